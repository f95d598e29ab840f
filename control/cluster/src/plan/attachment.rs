//! Where a volume is attached: the ticket with the highest priority decides, then the lowest id.
//!
//! A volume goes from one node to another only over being detached. A ticket of a workload on another node ends what
//! runs in the background (priority 800: snapshots, backups, rebuilds), and nothing else is ended by a newcomer. A
//! volume for which nobody holds a ticket on its node any more is detached.

use crate::api::{
    AttachmentTicket, Conditions, TicketStatus, TicketType, Volume, VolumeAttachment, VolumeState,
};

/// The parameter of a ticket that asks for the engine without a device.
pub const DISABLE_FRONTEND: &str = "disableFrontend";

/// What a ticket's condition is about.
const SATISFIED: &str = "Satisfied";

/// Tickets from here on belong to somebody who waits for the volume; those below run in the background.
const WORKLOAD: u32 = 900;

/// Where the volume should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// The node; empty for none.
    pub node: String,
    /// Without a device.
    pub disable_frontend: bool,
    /// Who asked.
    pub by: String,
}

/// What to change.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Where the volume should be, if that changes.
    pub target: Option<Target>,
    /// How each ticket fares.
    pub tickets: std::collections::BTreeMap<String, TicketStatus>,
}

/// Longhorn's priorities.
const fn priority(kind: TicketType) -> u32 {
    match kind {
        TicketType::VolumeRestore | TicketType::VolumeExpansion => 2000,
        TicketType::Api => 1000,
        TicketType::Csi | TicketType::Salvage | TicketType::ShareManager => WORKLOAD,
        TicketType::VolumeClone
        | TicketType::Snapshot
        | TicketType::Backup
        | TicketType::VolumeEviction
        | TicketType::VolumeRebuilding
        | TicketType::BackingImageDataSource => 800,
        TicketType::Unknown => 0,
    }
}

fn disables_frontend(ticket: &AttachmentTicket) -> bool {
    ticket.parameters.get(DISABLE_FRONTEND).is_some_and(|v| v == "true")
}

/// Decides for one volume. Without the volume nothing is satisfied.
pub fn plan(attachment: &VolumeAttachment, volume: Option<&Volume>, now: &str) -> Plan {
    let tickets = &attachment.spec.attachment_tickets;
    let old = attachment.status.as_ref().map(|s| &s.attachment_ticket_statuses);
    let is_going = volume.is_some_and(|v| v.metadata.deletion_timestamp.is_some());
    let target = volume.filter(|_| !is_going).and_then(|volume| target(tickets.iter(), volume));
    // What is decided now counts: it is told once, not twice.
    let wanted = target.as_ref().map(|t| &t.node).or(volume.map(|v| &v.spec.node_id));
    let statuses = tickets.iter().map(|(id, ticket)| {
        let before = old.and_then(|all| all.get(id));
        (id.clone(), fare(id, ticket, volume.zip(wanted), before, now))
    });
    let tickets = statuses.collect();
    Plan { target, tickets }
}

/// Where the volume should be, if that is not where its spec puts it.
fn target<'a>(
    tickets: impl Iterator<Item = (&'a String, &'a AttachmentTicket)> + Clone,
    volume: &Volume,
) -> Option<Target> {
    let spec = &volume.spec;
    let state = volume.status.as_ref().map(|s| s.state).unwrap_or_default();
    let wanted = || tickets.clone().filter(|(_, t)| !t.node_id.is_empty());
    if spec.node_id.is_empty() {
        if state != VolumeState::Detached {
            return None;
        }
        let best = wanted().max_by(|(a_id, a), (b_id, b)| {
            priority(a.kind).cmp(&priority(b.kind)).then_with(|| b_id.cmp(a_id))
        });
        return best.map(|(_, ticket)| Target {
            node: ticket.node_id.clone(),
            disable_frontend: disables_frontend(ticket),
            by: ticket.kind.to_string(),
        });
    }
    let here = || wanted().filter(|(_, t)| t.node_id == spec.node_id);
    let background_only = here().all(|(_, t)| priority(t.kind) < WORKLOAD);
    let elsewhere = wanted().any(|(_, t)| t.node_id != spec.node_id && priority(t.kind) >= WORKLOAD);
    let leaves = here().next().is_none() || background_only && elsewhere;
    if leaves {
        return Some(Target::default());
    }
    // A device is added or taken away only by attaching anew; a workload's wish counts before a background one's.
    let front = here().max_by_key(|(_, t)| priority(t.kind)).map(|(_, t)| t)?;
    (disables_frontend(front) != spec.disable_frontend && !background_only).then(Target::default)
}

/// How a ticket fares, of a volume that should be on a node, or, if that is empty, nowhere.
fn fare(
    id: &str,
    ticket: &AttachmentTicket,
    volume: Option<(&Volume, &String)>,
    before: Option<&TicketStatus>,
    now: &str,
) -> TicketStatus {
    let mut status = before.cloned().unwrap_or_default();
    id.clone_into(&mut status.id);
    status.generation = ticket.generation;
    let (satisfied, reason, message) = verdict(ticket, volume);
    status.satisfied = satisfied;
    status.conditions.set_condition(SATISFIED, satisfied, reason, &message, now);
    status
}

fn verdict(ticket: &AttachmentTicket, volume: Option<(&Volume, &String)>) -> (bool, &'static str, String) {
    let Some((volume, wanted)) = volume else {
        return (false, "NoVolume", "the volume does not exist".to_owned());
    };
    let status = volume.status.clone().unwrap_or_default();
    let node = &ticket.node_id;
    let current = &status.current_node_id;
    if current == node && status.state == VolumeState::Attached && !node.is_empty() {
        let wants_none = disables_frontend(ticket);
        if volume.spec.disable_frontend == wants_none || wants_none {
            return (true, "", String::new());
        }
        let message = "the volume is attached without a device, for maintenance".to_owned();
        return (false, "FrontendDisabled", message);
    }
    if !current.is_empty() && current != node {
        return (false, "Elsewhere", format!("the volume is attached to node {current}"));
    }
    if wanted == node && !node.is_empty() {
        return (false, "Attaching", format!("the volume is being attached to node {node}"));
    }
    (false, "Waiting", format!("the volume is {}", status.state))
}

#[cfg(test)]
mod tests {
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
        volume.status =
            Some(VolumeStatus { current_node_id: current.into(), state, ..VolumeStatus::default() });
        volume
    }

    #[test]
    fn the_highest_priority_wins_then_the_lowest_id() {
        use VolumeState::{Attached, Attaching, Creating, Detached, Detaching};
        let cases: &[(&str, &str, Volume, Option<&str>)] = &[
            ("nobody", "", volume("", "", Detached), None),
            ("one", "a=csi-attacher@n1", volume("", "", Detached), Some("n1")),
            ("one without a node", "a=csi-attacher@", volume("", "", Detached), None),
            (
                "the workload",
                "a=snapshot-controller@n1 b=csi-attacher@n2",
                volume("", "", Detached),
                Some("n2"),
            ),
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
        volume.metadata.deletion_timestamp =
            Some(NOW.parse::<k8s_openapi::jiff::Timestamp>().unwrap().into());
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
}
