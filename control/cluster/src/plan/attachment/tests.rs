//! Tickets of volumes, and what becomes of them.

use super::*;
use crate::api::{VolumeAttachmentSpec, VolumeSpec, VolumeStatus};

const NOW: &str = "2026-01-01T00:00:00Z";

/// `id=type@node`, with `!` at the end for no device.
fn attachment(tickets: &str) -> VolumeAttachment {
    let one = |word: &str| {
        let (id, rest) = word.split_once('=').expect("ID=TYPE@NODE");
        let (kind, node) = rest.split_once('@').expect("ID=TYPE@NODE");
        let mut ticket = AttachmentTicket {
            id: id.into(),
            kind: TicketType::parse(kind).expect("a type"),
            node_id: node.trim_end_matches('!').into(),
            ..Default::default()
        };
        if node.ends_with('!') {
            ticket.parameters.insert(DISABLE_FRONTEND.into(), "true".into());
        }
        (id.to_owned(), ticket)
    };
    let attachment_tickets = tickets.split_whitespace().map(one).collect();
    VolumeAttachment::new("v", VolumeAttachmentSpec { volume: "v".into(), attachment_tickets })
}

fn volume(wanted: &str, current: &str, state: VolumeState) -> Volume {
    let mut volume = Volume::new("v", VolumeSpec { node_id: wanted.into(), ..VolumeSpec::default() });
    volume.status = Some(VolumeStatus { current_node_id: current.into(), state, ..VolumeStatus::default() });
    volume
}

#[test]
fn the_highest_priority_wins_then_the_lowest_id() {
    use VolumeState::{Attached, Attaching, Creating, Detached, Detaching};
    let cases: &[(&str, &str, Volume, Option<&str>)] = &[
        ("nobody", "", volume("", "", Detached), None),
        ("one", "a=csi-attacher@n1", volume("", "", Detached), Some("n1")),
        ("one without a node", "a=csi-attacher@", volume("", "", Detached), None),
        ("the workload", "a=snapshot-controller@n1 b=csi-attacher@n2", volume("", "", Detached), Some("n2")),
        ("the user", "a=csi-attacher@n1 b=longhorn-api@n2", volume("", "", Detached), Some("n2")),
        (
            "the restore",
            "a=longhorn-api@n1 b=volume-restore-controller@n2",
            volume("", "", Detached),
            Some("n2"),
        ),
        ("the lowest id", "b=csi-attacher@n1 a=csi-attacher@n2", volume("", "", Detached), Some("n2")),
        ("not before its replicas are placed", "a=csi-attacher@n1", volume("", "", Creating), None),
        ("not before it is detached", "a=csi-attacher@n2", volume("", "n1", Detaching), None),
        ("it stays", "a=csi-attacher@n1", volume("n1", "n1", Attached), None),
        ("nobody wants it any more", "", volume("n1", "n1", Attached), Some("")),
        ("nobody wants it there", "a=csi-attacher@n2", volume("n1", "", Attaching), Some("")),
        (
            "a workload does not end another",
            "a=csi-attacher@n1 b=longhorn-api@n2",
            volume("n1", "n1", Attached),
            None,
        ),
        (
            "a workload ends what is in the background",
            "a=snapshot-controller@n1 b=csi-attacher@n2",
            volume("n1", "n1", Attached),
            Some(""),
        ),
        (
            "the background ends nothing",
            "a=snapshot-controller@n1 b=backup-controller@n2",
            volume("n1", "n1", Attached),
            None,
        ),
        (
            "both on one node",
            "a=snapshot-controller@n1 b=csi-attacher@n1",
            volume("n1", "n1", Attached),
            None,
        ),
    ];
    for (what, tickets, volume, expected) in cases {
        let target = plan(&attachment(tickets), Some(volume), NOW).target;
        assert_eq!(target.map(|t| t.node).as_deref(), *expected, "{what}");
    }
}

#[test]
fn a_volume_that_is_being_deleted_is_left_to_its_own_controller() {
    let mut volume = volume("", "", VolumeState::Detached);
    volume.metadata.deletion_timestamp = Some(NOW.parse::<k8s_openapi::jiff::Timestamp>().unwrap().into());
    assert_eq!(plan(&attachment("a=csi-attacher@n1"), Some(&volume), NOW).target, None);
}

#[test]
fn maintenance_is_attached_without_a_device_and_left_for_a_workload() {
    let detached = volume("", "", VolumeState::Detached);
    let target = plan(&attachment("a=longhorn-api@n1!"), Some(&detached), NOW).target.unwrap();
    assert_eq!((target.disable_frontend, target.by.as_str()), (true, "longhorn-api"));
    let mut attached = volume("n1", "n1", VolumeState::Attached);
    attached.spec.disable_frontend = true;
    let with_device = attachment("a=longhorn-api@n1");
    let plan_ = plan(&with_device, Some(&attached), NOW);
    assert_eq!(plan_.target, Some(Target::default()));
    assert!(!plan_.tickets["a"].satisfied);
    assert_eq!(plan_.tickets["a"].conditions[0].reason, "FrontendDisabled");
}

#[test]
fn of_two_that_are_equal_one_decides_about_the_device_whatever_the_volume_is() {
    let two = attachment("a=longhorn-api@n1! b=longhorn-api@n1");
    let detached = volume("", "", VolumeState::Detached);
    let target = plan(&two, Some(&detached), NOW).target.unwrap();
    let mut attached = volume("n1", "n1", VolumeState::Attached);
    attached.spec.disable_frontend = target.disable_frontend;
    assert_eq!(plan(&two, Some(&attached), NOW).target, None, "it would be attached and detached for ever");
}

#[test]
fn tickets_say_how_they_fare() {
    use VolumeState::{Attached, Attaching, Detached};
    let two = attachment("a=csi-attacher@n1 b=csi-attacher@n2");
    let cases = [
        (Some(volume("n1", "n1", Attached)), ("", true), ("Elsewhere", false)),
        (Some(volume("n1", "", Attaching)), ("Attaching", false), ("Waiting", false)),
        (Some(volume("", "", Detached)), ("Attaching", false), ("Waiting", false)),
        (Some(volume("n3", "", Attaching)), ("Waiting", false), ("Waiting", false)),
        (None, ("NoVolume", false), ("NoVolume", false)),
    ];
    for (volume, a, b) in cases {
        let tickets = plan(&two, volume.as_ref(), NOW).tickets;
        for (id, (reason, satisfied)) in [("a", a), ("b", b)] {
            let status = &tickets[id];
            assert_eq!((status.conditions[0].reason.as_str(), status.satisfied), (reason, satisfied));
        }
    }
}

/// A migratable volume `FROM[>TO]`, of which `current[>shown]` is said.
fn moving(wanted: &str, told: &str, state: VolumeState) -> Volume {
    let halves = |text: &str| {
        let (from, to) = text.split_once('>').unwrap_or((text, ""));
        (from.to_owned(), to.to_owned())
    };
    let ((node_id, migration_node_id), (current, shown)) = (halves(wanted), halves(told));
    let mut volume = volume(&node_id, &current, state);
    (volume.spec.migratable, volume.spec.migration_node_id) = (true, migration_node_id);
    volume.status.as_mut().unwrap().current_migration_node_id = shown;
    volume
}

/// What is decided, as `FROM[>TO]`; `None`: nothing changes.
fn decided(tickets: &str, volume: &Volume) -> Option<String> {
    let target = plan(&attachment(tickets), Some(volume), NOW).target?;
    Some(match target.migration.as_str() {
        "" => target.node,
        to => format!("{}>{to}", target.node),
    })
}

#[test]
fn a_migratable_volume_is_shown_on_a_second_node_and_moves_when_the_first_lets_go() {
    use VolumeState::{Attached, Attaching, Detached, Detaching};
    let both = "a=csi-attacher@n1 b=csi-attacher@n2";
    let cases: &[(&str, &str, Volume, Option<&str>)] = &[
        ("the first of two", both, moving("", "", Detached), Some("n1")),
        ("the second one", both, moving("n1", "n1", Attached), Some("n1>n2")),
        ("by a user", "a=csi-attacher@n1 b=longhorn-api@n2", moving("n1", "n1", Attached), Some("n1>n2")),
        (
            "in the background",
            "a=csi-attacher@n1 b=snapshot-controller@n2",
            moving("n1", "n1", Attached),
            None,
        ),
        ("without a device", "a=csi-attacher@n1 b=longhorn-api@n2!", moving("n1", "n1", Attached), None),
        ("not before it is attached", both, moving("n1", "", Attaching), None),
        ("not while it still moves", both, moving("n1", "n2", Attaching), None),
        ("not before the last one is over", both, moving("n1", "n1>n3", Attached), None),
        (
            "two more: the highest priority",
            "a=csi-attacher@n1 b=csi-attacher@n2 c=longhorn-api@n3",
            moving("n1", "n1", Attached),
            Some("n1>n3"),
        ),
        ("it goes on", both, moving("n1>n2", "n1", Attached), None),
        ("it goes on", both, moving("n1>n2", "n1>n2", Attached), None),
        (
            "a third waits",
            "a=csi-attacher@n1 b=csi-attacher@n2 c=longhorn-api@n3",
            moving("n1>n2", "n1>n2", Attached),
            None,
        ),
        (
            "a snapshot does not keep it",
            "b=csi-attacher@n2 s=snapshot-controller@n1",
            moving("n1>n2", "n1>n2", Attached),
            Some("n2"),
        ),
        ("confirmed", "b=csi-attacher@n2", moving("n1>n2", "n1>n2", Attached), Some("n2")),
        (
            "confirmed while its engine is away",
            "b=csi-attacher@n2",
            moving("n1>n2", "n1>n2", Attaching),
            Some("n2"),
        ),
        ("too early", "b=csi-attacher@n2", moving("n1>n2", "n1", Attached), Some("")),
        (
            "it is shown where it is not to go",
            "b=csi-attacher@n2",
            moving("n1>n2", "n1>n3", Attached),
            Some(""),
        ),
        ("rolled back", "a=csi-attacher@n1", moving("n1>n2", "n1>n2", Attached), Some("n1")),
        ("rolled back early", "a=csi-attacher@n1", moving("n1>n2", "n1", Attached), Some("n1")),
        (
            "rolled back for a third",
            "a=csi-attacher@n1 c=csi-attacher@n3",
            moving("n1>n2", "n1>n2", Attached),
            Some("n1"),
        ),
        ("both gone at once", "", moving("n1>n2", "n1>n2", Attached), Some("")),
        ("then elsewhere", "c=csi-attacher@n3", moving("n1>n2", "n1>n2", Attached), Some("")),
        ("to itself", "a=csi-attacher@n1", moving("n1>n1", "n1", Attached), Some("n1")),
        ("nothing before it is detached", both, moving("", "n1", Detaching), None),
        ("promoted and wanted back", both, moving("n2", "n1>n2", Attaching), None),
        ("promoted and over", both, moving("n2", "n2", Attached), Some("n2>n1")),
    ];
    for (what, tickets, volume, expected) in cases {
        assert_eq!(decided(tickets, volume).as_deref(), *expected, "{what}");
    }
    let mut ordinary = moving("n1", "n1", Attached);
    ordinary.spec.migratable = false;
    assert_eq!(decided(both, &ordinary), None, "it is not migratable");
    ordinary.spec.migration_node_id = "n2".into();
    assert_eq!(decided(both, &ordinary).as_deref(), Some("n1"), "and never was");
}

#[test]
fn what_is_in_the_way_of_a_migration_is_waited_for_and_told() {
    let attached = || moving("n1", "n1", VolumeState::Attached);
    let (mut grows, mut changes, mut bare) = (attached(), attached(), attached());
    grows.status.as_mut().unwrap().expansion_required = true;
    changes.status.as_mut().unwrap().conditions.set_condition("Upgraded", false, "Engine", "", NOW);
    bare.spec.disable_frontend = true;
    let mut failed = attached();
    failed.status.as_mut().unwrap().conditions.set_condition("Upgraded", false, "NotDeployed", "", NOW);
    assert_eq!(decided("a=csi-attacher@n1 b=csi-attacher@n2", &failed).as_deref(), Some("n1>n2"));
    let both = attachment("a=csi-attacher@n1! b=csi-attacher@n2");
    for (volume, says) in [(grows, "it has grown"), (changes, "programs"), (bare, "a device")] {
        let decided = plan(&both, Some(&volume), NOW);
        assert!(decided.target.is_none_or(|t| t.migration.is_empty()), "{says}");
        let condition = &decided.tickets["b"].conditions[0];
        assert!(condition.message.contains(says), "{says}: {}", condition.message);
    }
}

#[test]
fn both_tickets_of_a_migration_are_met_and_a_third_is_told_why_not() {
    use VolumeState::{Attached, Attaching};
    let all = attachment("a=csi-attacher@n1 b=csi-attacher@n2 c=csi-attacher@n3");
    let met = ("", true);
    let cases = [
        ("begun", moving("n1", "n1", Attached), [met, ("Migrating", false), ("Elsewhere", false)]),
        ("not shown yet", moving("n1>n2", "n1", Attached), [met, ("Migrating", false), ("Elsewhere", false)]),
        ("shown", moving("n1>n2", "n1>n2", Attached), [met, met, ("Elsewhere", false)]),
        (
            "its engine is away",
            moving("n1>n2", "n1>n2", Attaching),
            [("Attaching", false), met, ("Elsewhere", false)],
        ),
        (
            "the engine takes the place",
            moving("n2", "n1>n2", Attached),
            [("Waiting", false), met, ("Elsewhere", false)],
        ),
        (
            "what is left of the last one",
            moving("n1", "n1>n2", Attached),
            [met, ("Elsewhere", false), ("Elsewhere", false)],
        ),
    ];
    for (what, volume, expected) in cases {
        let tickets = plan(&all, Some(&volume), NOW).tickets;
        for (id, (reason, satisfied)) in ["a", "b", "c"].into_iter().zip(expected) {
            let status = &tickets[id];
            let seen = (status.conditions[0].reason.as_str(), status.satisfied);
            assert_eq!(seen, (reason, satisfied), "{what}: {id}");
        }
    }
    let third = &plan(&all, Some(&moving("n1>n2", "n1>n2", Attached)), NOW).tickets["c"];
    assert!(third.conditions[0].message.contains("migrates to node n2"), "{:?}", third.conditions);
    let after =
        &plan(&attachment("b=csi-attacher@n2"), Some(&moving("n1>n2", "n1>n2", Attached)), NOW).tickets["b"];
    assert!(after.satisfied, "confirmed: it never stops to be met");
}
