//! Volumes that rest and lack replicas: attached for their rebuild when that helps, and when nobody else wants them.

use super::*;
use crate::api::{AttachmentTicket, Toggle, VolumeAttachmentSpec};
use crate::plan::attachment::{self, DISABLE_FRONTEND};
use crate::plan::engine::SERVES;
use crate::plan::rebuild::{Decided, reserved};
use crate::plan::written;
use crate::schedule::{Disk, Node};

/// A volume whose tickets count: what the leader makes of them is where it is.
pub(super) struct Resting(pub(super) World);

impl Resting {
    /// It was used on n1, has replicas on n1, n2 and n3, and rests since a while, with the setting on.
    pub(super) fn new() -> Self {
        let mut world = World::attached_to("n1");
        world.attach("");
        world.settings = Settings::of([("offline-replica-rebuilding", "true")]);
        world.attachment = Some(VolumeAttachment::new("v", VolumeAttachmentSpec::default()));
        let mut resting = Self(world);
        resting.settle();
        assert!(resting.condition().is_none() && resting.0.plan().is_empty(), "it lacks nothing");
        resting
    }

    pub(super) fn settle(&mut self) {
        for _ in 0..40 {
            let before = (self.0.volume.clone(), self.0.replicas.clone(), self.0.attachment.clone());
            self.0.settle();
            let attachment = self.0.attachment.clone().expect("the attachment is there");
            let decided = attachment::plan(&attachment, self.0.volume.as_ref(), "2026-01-01T00:00:00Z");
            if let Some(target) = decided.target {
                let spec = &mut self.0.volume_mut().spec;
                (spec.node_id, spec.disable_frontend) = (target.node, target.disable_frontend);
            }
            if before == (self.0.volume.clone(), self.0.replicas.clone(), self.0.attachment.clone()) {
                return;
            }
        }
        panic!("it never settles: {:?}", self.0.plan());
    }

    /// A workload wants it there, or does not any more.
    pub(super) fn wanted(&mut self, node: &str) {
        let wish = Wish { node: node.to_owned(), ..Wish::default() };
        self.0.put(TicketType::Csi, Some(wish).filter(|w| !w.node.is_empty()));
        self.settle();
    }

    pub(super) fn pass(&mut self, seconds: i64) {
        self.0.now += SignedDuration::from_secs(seconds);
        self.settle();
    }

    fn ticket(&self) -> Option<&AttachmentTicket> {
        let attachment = self.0.attachment.as_ref()?;
        attachment.spec.attachment_tickets.values().find(|t| t.kind == TicketType::VolumeRebuilding)
    }

    fn condition(&self) -> Option<(bool, String)> {
        let status = self.0.status();
        let condition = status.conditions.get_condition(OFFLINE_REBUILDING)?;
        Some((condition.is_true(), condition.reason.clone()))
    }

    fn waits_for(&self, reason: &str) {
        assert_eq!(self.condition(), Some((false, reason.to_owned())));
        assert!(self.ticket().is_none() && self.0.status().state == VolumeState::Detached);
    }

    /// Whole, at rest, nothing to say.
    fn rests_whole_on(&self, nodes: &[&str]) {
        assert_eq!(self.0.nodes(), nodes);
        assert!(
            self.0.replicas.values().all(|r| r.spec.failed_at.is_empty() && !r.spec.healthy_at.is_empty())
        );
        assert_eq!((self.0.status().state, self.condition()), (VolumeState::Detached, None));
        assert!(self.ticket().is_none() && self.0.volume.as_ref().unwrap().spec.node_id.is_empty());
    }

    fn loses_the_replica_on(&mut self, node: &str) {
        let name = self.0.replica_on(node);
        self.0.replicas.remove(&name);
        self.settle();
    }

    /// The node's manager is silent, since now.
    fn goes_silent(&mut self, node: &str) {
        self.0.up.remove(node);
        let seen = self.0.cluster.nodes.get_mut(node).unwrap();
        (seen.schedulable, seen.silent_since) = (false, Some(self.0.now));
        self.settle();
    }

    fn comes_back(&mut self, node: &str) {
        self.0.up.insert(node.to_owned());
        let seen = self.0.cluster.nodes.get_mut(node).unwrap();
        (seen.schedulable, seen.silent_since) = (true, None);
        self.settle();
    }

    pub(super) fn close(&mut self, nodes: &[&str]) {
        for node in nodes {
            self.0.cluster.nodes.get_mut(*node).unwrap().schedulable = false;
        }
    }
}

#[test]
fn a_volume_that_rests_and_lost_a_replica_is_attached_until_it_is_whole() {
    let mut resting = Resting::new();
    resting.loses_the_replica_on("n2");
    resting.waits_for("Settling");
    resting.pass(14);
    resting.waits_for("Settling");
    resting.0.rebuilds_end = false;
    resting.pass(1);
    assert_eq!(resting.condition(), Some((true, String::new())));
    let ticket = resting.ticket().expect("a ticket");
    assert_eq!((ticket.node_id.as_str(), &ticket.parameters[DISABLE_FRONTEND]), ("n1", &"true".to_owned()));
    let fills = ticket.parameters[FILLS_ON].clone();
    let status = resting.0.status();
    assert_eq!((status.state, status.robustness), (VolumeState::Attached, Robustness::Degraded));
    assert!(status.frontend_disabled && resting.0.engine().spec.disable_frontend, "without a device");
    assert!(["n2", "n4"].contains(&fills.as_str()) && resting.0.nodes().contains(&fills.as_str()));
    // However long it takes.
    resting.pass(100_000);
    assert_eq!(resting.0.status().state, VolumeState::Attached);
    resting.0.rebuilds_end = true;
    resting.settle();
    let mut whole = vec!["n1", "n3", &fills];
    whole.sort_unstable();
    resting.rests_whole_on(&whole);
    let told = ["OfflineRebuilding", "OfflineRebuilt"];
    assert!(told.iter().all(|t| resting.0.told.contains(t)), "{:?}", resting.0.told);
    assert_eq!(resting.0.status().last_degraded_at, "");
}

#[test]
fn more_replicas_that_are_asked_for_at_rest_are_filled_one_after_the_other() {
    let mut resting = Resting::new();
    resting.0.volume_mut().spec.number_of_replicas = 4;
    resting.settle();
    resting.pass(15);
    resting.rests_whole_on(&["n1", "n2", "n3", "n4"]);
    let starts = resting.0.starts;
    // A fifth has no place: it is said, and no engine starts for it.
    resting.0.volume_mut().spec.number_of_replicas = 5;
    resting.settle();
    resting.pass(15);
    for _ in 0..10 {
        resting.waits_for("NoPlace");
        resting.pass(3600);
    }
    assert_eq!(resting.0.starts, starts);
    let disk = Disk { schedulable: true, maximum: 1000, available: 1000, ..Disk::default() };
    let n5 = Node {
        zone: "n5".into(),
        schedulable: true,
        disks: [("n5-d".to_owned(), disk)].into(),
        ..Node::default()
    };
    resting.0.cluster.nodes.insert("n5".into(), n5);
    resting.0.up.insert("n5".into());
    resting.settle();
    resting.rests_whole_on(&["n1", "n2", "n3", "n4", "n5"]);
}

#[test]
fn whoever_wants_the_volume_goes_first_and_the_rebuild_comes_back_later() {
    for node in ["n1", "n2", "n4"] {
        let mut resting = Resting::new();
        resting.loses_the_replica_on("n3");
        resting.0.rebuilds_end = false;
        resting.pass(15);
        assert!(resting.ticket().is_some(), "{node}");
        resting.wanted(node);
        assert!(resting.ticket().is_none() && resting.condition().is_none(), "{node}: it yields");
        let status = resting.0.status();
        assert_eq!((status.state, status.current_node_id.as_str()), (VolumeState::Attached, node));
        assert!(!status.frontend_disabled, "{node}: with its device");
        assert!(resting.0.told.contains(&"OfflineRebuildingInterrupted"));
        // Used, it is filled as any other; left before that, it is attached for it again.
        resting.pass(3600);
        assert!(resting.ticket().is_none(), "{node}");
        resting.wanted("");
        resting.waits_for("Settling");
        resting.0.rebuilds_end = true;
        resting.pass(15);
        assert_eq!(resting.0.replicas.len(), 3, "{node}");
        resting.rests_whole_on(&resting.0.nodes());
    }
}

#[test]
fn a_pod_that_goes_from_node_to_node_is_not_held_up() {
    let mut resting = Resting::new();
    resting.wanted("n1");
    resting.0.cut_off.insert(resting.0.replica_on("n3"));
    resting.settle();
    assert_eq!(resting.0.status().robustness, Robustness::Degraded);
    let starts = resting.0.starts;
    resting.wanted("");
    resting.waits_for("Settling");
    resting.pass(10);
    resting.wanted("n2");
    assert_eq!((resting.0.starts, resting.0.status().current_node_id), (starts + 1, "n2".to_owned()));
    assert!(!resting.0.told.contains(&"OfflineRebuilding"));
}

#[test]
fn a_replica_that_failed_is_waited_for_and_then_replaced() {
    let mut resting = Resting::new();
    let lost = resting.0.replica_on("n3");
    resting.goes_silent("n3");
    resting.pass(15);
    resting.waits_for("MayComeBack");
    assert!(resting.0.replicas[&lost].spec.failed_at.is_empty(), "nothing is wrong with it");
    let starts = resting.0.starts;
    // Back in time it was nothing.
    resting.pass(500);
    resting.comes_back("n3");
    resting.rests_whole_on(&["n1", "n2", "n3"]);
    assert_eq!(resting.0.starts, starts);
    resting.goes_silent("n3");
    resting.pass(599);
    resting.waits_for("MayComeBack");
    resting.pass(1);
    // It was waited for at rest, and is not waited for once more. The one that is away is not needed any more.
    resting.rests_whole_on(&["n1", "n2", "n4"]);
    assert_eq!(resting.0.starts, starts + 1);
}

#[test]
fn a_replica_that_failed_in_use_is_filled_when_its_node_is_back() {
    let mut resting = Resting::new();
    resting.wanted("n1");
    resting.goes_silent("n3");
    assert_eq!(resting.0.status().robustness, Robustness::Degraded);
    resting.wanted("");
    resting.close(&["n4"]);
    resting.pass(15);
    resting.waits_for("MayComeBack");
    resting.pass(3600);
    resting.waits_for("NoPlace");
    resting.comes_back("n3");
    resting.rests_whole_on(&["n1", "n2", "n3"]);
}

#[test]
fn a_rebuild_that_comes_to_nothing_is_tried_later_and_later() {
    let mut resting = Resting::new();
    resting.wanted("n1");
    let bad = resting.0.replica_on("n3");
    resting.0.cut_off.insert(bad.clone());
    resting.settle();
    resting.wanted("");
    resting.close(&["n3", "n4"]);
    let (starts, mut tried) = (resting.0.starts, Vec::new());
    for minute in 0..24 * 60 {
        resting.pass(60);
        let total = resting.0.starts - starts;
        tried.resize(total, minute);
    }
    assert_eq!(resting.condition(), Some((false, "GaveUp".to_owned())));
    assert!((6..=26).contains(&tried.len()), "{tried:?}");
    assert!(tried.windows(2).all(|pair| pair[1] - pair[0] >= 10), "{tried:?}");
    assert!(resting.0.told.contains(&"OfflineRebuildingFailed"));
    resting.0.cut_off.clear();
    resting.pass(3600);
    resting.rests_whole_on(&["n1", "n2", "n3"]);
}

#[test]
fn one_that_cannot_be_attached_is_let_go() {
    let mut resting = Resting::new();
    resting.loses_the_replica_on("n2");
    resting.0.late = ["n1", "n3"].map(str::to_owned).into();
    resting.pass(15);
    assert!(resting.ticket().is_some());
    resting.pass(299);
    assert!(resting.ticket().is_some());
    resting.pass(1);
    resting.waits_for("GaveUp");
}

#[test]
fn what_keeps_a_volume_from_being_rebuilt_at_rest() {
    type Case = (&'static str, fn(&mut World), Option<&'static str>);
    let cases: &[Case] = &[
        ("the setting is off", |w| w.settings = Settings::default(), None),
        ("its own word", |w| w.volume_mut().spec.offline_rebuilding = Toggle::Disabled, None),
        ("strict-local", |w| w.volume_mut().spec.data_locality = DataLocality::StrictLocal, None),
        (
            "faulted",
            |w| w.replicas.values_mut().for_each(|r| r.spec.failed_at = "2020-01-01T00:00:00Z".into()),
            None,
        ),
        ("it grows", |w| w.volume_mut().spec.size = Int64Text(200), Some("Expanding")),
        (
            "no rebuilds at all",
            |w| {
                w.settings = Settings::of([
                    ("offline-replica-rebuilding", "true"),
                    ("concurrent-replica-rebuild-per-node-limit", "0"),
                ]);
            },
            Some("NotAllowed"),
        ),
        ("others are filled", |w| w.filling = [("n2".into(), 5), ("n4".into(), 5)].into(), Some("Turn")),
        ("no node with a replica answers", |w| w.up.retain(|n| n != "n1" && n != "n3"), Some("NoSource")),
    ];
    for (what, change, reason) in cases {
        let mut resting = Resting::new();
        // Nobody salvages it under the test.
        resting.0.settings =
            Settings::of([("offline-replica-rebuilding", "true"), ("auto-salvage", "false")]);
        resting.loses_the_replica_on("n2");
        change(&mut resting.0);
        resting.settle();
        let starts = resting.0.starts;
        resting.pass(15);
        resting.pass(100_000);
        assert_eq!(resting.condition().map(|(_, reason)| reason).as_deref(), *reason, "{what}");
        assert!(resting.ticket().is_none() && resting.0.starts == starts, "{what}");
    }
    // The volume's own word counts before the setting's.
    let mut own = Resting::new();
    own.0.settings = Settings::default();
    own.0.volume_mut().spec.offline_rebuilding = Toggle::Enabled;
    own.loses_the_replica_on("n2");
    own.pass(15);
    assert_eq!((own.0.replicas.len(), own.condition()), (3, None));
    let mut fresh = World::new(VolumeSpec { offline_rebuilding: Toggle::Enabled, ..VolumeSpec::default() });
    fresh.cluster.nodes.retain(|name, _| ["n1", "n2"].contains(&name.as_str()));
    fresh.settle();
    fresh.pass(60);
    assert!(fresh.wishes.is_empty(), "one that was never used holds nothing");
}

#[test]
fn switched_off_in_the_middle_it_ends() {
    let mut resting = Resting::new();
    resting.loses_the_replica_on("n2");
    resting.0.rebuilds_end = false;
    resting.pass(15);
    assert!(resting.ticket().is_some());
    resting.0.volume_mut().spec.offline_rebuilding = Toggle::Disabled;
    resting.settle();
    assert_eq!((resting.0.status().state, resting.condition()), (VolumeState::Detached, None));
    assert!(resting.ticket().is_none());
}

#[test]
fn it_is_attached_where_a_replica_that_counts_is_and_rather_not_on_a_cordoned_node() {
    let mut resting = Resting::new();
    let failed = resting.0.replica_on("n1");
    resting.0.replicas.get_mut(&failed).unwrap().spec.failed_at = "2023-11-14T22:13:00Z".into();
    resting.close(&["n2"]);
    resting.settle();
    resting.pass(15);
    let (_, first) = &resting.0.wishes[0];
    assert_eq!(first.as_ref().map(|wish| wish.node.as_str()), Some("n3"));
}

#[test]
fn a_replica_that_is_back_is_taken_back_and_no_other_is_made() {
    let mut world = World::attached_to("n1");
    world.rebuilds_end = false;
    world.up.remove("n3");
    world.settle();
    world.attach("");
    world.now += SignedDuration::from_secs(3600);
    world.up.insert("n3".into());
    world.attach("n1");
    assert_eq!(world.nodes(), ["n1", "n2", "n3"], "it is being filled");
    world.rebuilds_end = true;
    world.settle();
    assert_eq!((world.nodes(), world.status().robustness), (vec!["n1", "n2", "n3"], Robustness::Healthy));
    // An engine that has just begun to serve has taken nobody back yet.
    for (serves, is_awaited) in [(29, true), (30, false)] {
        let mut world = World::attached_to("n1");
        let back = world.replica_on("n3");
        world.cut_off.insert(back.clone());
        world.settle();
        let since = written(world.now + SignedDuration::from_secs(3600));
        let engine = world.engines.values_mut().next().unwrap().status.as_mut().unwrap();
        engine.conditions.set_condition(SERVES, true, "", "", &since);
        world.pass(3600 + serves);
        assert_eq!(world.replicas.contains_key(&back), is_awaited, "{serves}");
    }
}

#[test]
fn volumes_that_are_attached_for_it_have_their_places_kept() {
    let volume = || {
        let mut resting = Resting::new();
        resting.loses_the_replica_on("n2");
        resting.close(&["n2"]);
        resting.0.now += SignedDuration::from_secs(15);
        resting
    };
    let mut all: Vec<Resting> = std::iter::repeat_with(volume).take(8).collect();
    let mut decided = Decided::default();
    let (mut begun, none) = (0, std::collections::BTreeMap::new());
    for (i, resting) in all.iter_mut().enumerate() {
        resting.0.filling = decided.filling(&i.to_string(), &none, |_| false, Duration::ZERO);
        let actions = resting.0.plan();
        decided.note(&i.to_string(), &actions, Duration::ZERO);
        begun += actions.iter().filter(|a| matches!(a, Action::Ticket(..))).count();
        actions.into_iter().for_each(|action| resting.0.carry_out(action));
    }
    assert_eq!(begun, 5, "as many as may be filled on n4 at once");
    let first = &mut all[0];
    first.0.attachment.as_mut().unwrap().spec.volume = "v".into();
    assert_eq!(reserved(first.0.attachment.as_ref()), [("v", "n4")].into(), "and once the ticket is there");
}

#[test]
fn what_was_read_too_early_begins_nothing_anew() {
    // The ticket is gone, and the attachment as it is read still has it.
    let mut resting = Resting::new();
    resting.loses_the_replica_on("n2");
    resting.0.rebuilds_end = false;
    resting.pass(15);
    let with_ticket = resting.0.attachment.clone();
    for ends in [true, false] {
        let mut other = Resting::new();
        other.loses_the_replica_on("n2");
        other.0.rebuilds_end = ends;
        other.0.late = if ends { BTreeSet::new() } else { ["n1", "n3"].map(str::to_owned).into() };
        other.pass(15);
        other.pass(300);
        let (before, told) = (other.condition(), other.0.told.clone());
        assert!(other.ticket().is_none());
        other.0.attachment.clone_from(&with_ticket);
        let again = other.0.plan();
        assert!(again.contains(&Action::Ticket(TicketType::VolumeRebuilding, None)), "{ends}: {again:?}");
        again.into_iter().for_each(|action| other.0.carry_out(action));
        assert_eq!((other.condition(), other.0.told), (before, told), "{ends}");
    }
}
