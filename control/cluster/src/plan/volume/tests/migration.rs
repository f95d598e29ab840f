//! Volumes that move while they are used, over deaths and lost writes at every step.

use super::*;
use crate::api::{AttachmentTicket, EngineStatus, VolumeAttachmentSpec};
use crate::plan::attachment;

/// A migratable volume with tickets, which the attachment's decision turns into where it should be.
struct Moving(World);

impl Moving {
    fn attached_to(node: &str) -> Self {
        let spec = VolumeSpec { migratable: true, ..VolumeSpec::default() };
        let mut moving = Self(World::new(spec));
        moving.0.settle();
        moving.tickets(&[node]);
        moving.settle();
        assert_eq!(moving.at(), (node, ""));
        moving
    }

    /// Who wants the volume, from now on.
    fn tickets(&mut self, nodes: &[&str]) {
        let ticket = |node: &&str| {
            let (id, kind) = (format!("csi-{node}"), TicketType::Csi);
            (
                id.clone(),
                AttachmentTicket { id, kind, node_id: (*node).to_owned(), ..AttachmentTicket::default() },
            )
        };
        let attachment_tickets = nodes.iter().map(ticket).collect();
        let spec = VolumeAttachmentSpec { volume: "v".into(), attachment_tickets };
        self.0.attachment = Some(VolumeAttachment::new("v", spec));
    }

    /// What the leader makes of the tickets.
    fn follow_tickets(&mut self) {
        let attachment = self.0.attachment.clone().expect("the attachment is there");
        let decided = attachment::plan(&attachment, self.0.volume.as_ref(), "2026-01-01T00:00:00Z");
        if let Some(target) = decided.target {
            let spec = &mut self.0.volume_mut().spec;
            (spec.node_id, spec.migration_node_id) = (target.node, target.migration);
        }
    }

    fn met(&self, node: &str) -> bool {
        let attachment = self.0.attachment.as_ref().expect("the attachment is there");
        let tickets = attachment::plan(attachment, self.0.volume.as_ref(), "2026-01-01T00:00:00Z").tickets;
        tickets.get(&format!("csi-{node}")).is_some_and(|t| t.satisfied)
    }

    fn settle(&mut self) {
        for _ in 0..30 {
            let before = self.0.volume.clone();
            self.follow_tickets();
            self.0.settle();
            if before == self.0.volume {
                return;
            }
        }
        panic!("it never settles: {:?}", self.0.volume);
    }

    /// Where the volume is, and where it is shown besides.
    fn at(&self) -> (&str, &str) {
        let status = self.0.volume.as_ref().and_then(|v| v.status.as_ref()).expect("a status");
        (&status.current_node_id, &status.current_migration_node_id)
    }

    /// Every process, as `ENGINE@NODE`, with `~` for a relay.
    fn processes(&self) -> Vec<String> {
        let word = |((name, node), relays): (&(String, String), &bool)| {
            format!("{name}{}{node}", if *relays { "~" } else { "@" })
        };
        self.0.processes.iter().map(word).collect()
    }
}

fn names(world: &World) -> Vec<&str> {
    world.engines.keys().map(String::as_str).collect()
}

#[test]
fn a_relay_that_does_not_end_keeps_no_volume_from_being_detached() {
    let mut moving = Moving::attached_to("n1");
    moving.tickets(&["n1", "n2"]);
    moving.settle();
    let relay = moving.0.pair().1.and_then(|e| e.metadata.name.clone()).expect("a relay");
    moving.0.stuck.insert(relay.clone());
    moving.tickets(&[]);
    moving.settle();
    assert_eq!(moving.0.status().state, VolumeState::Detaching);
    moving.0.pass(59);
    assert_eq!(moving.0.status().state, VolumeState::Detaching);
    moving.0.pass(1);
    assert_eq!(moving.0.status().state, VolumeState::Detached);
    assert!(moving.0.told.contains(&"EngineNotEnded"), "{:?}", moving.0.told);
    moving.tickets(&["n3"]);
    moving.settle();
    assert_eq!((moving.at().0, moving.0.status().state), ("n3", VolumeState::Attached));
    moving.0.stuck.clear();
    moving.settle();
    assert_eq!(moving.0.engines.len(), 1, "it is forgotten once it has ended");
}

#[test]
fn it_is_shown_on_a_second_node_and_then_has_its_engine_there_again_and_again() {
    let mut moving = Moving::attached_to("n1");
    let route = [("n1", "n4"), ("n4", "n2"), ("n2", "n1")];
    for (round, (from, to)) in route.into_iter().enumerate() {
        let (old, new) = if round % 2 == 0 { ("v-e-0", "v-e-1") } else { ("v-e-1", "v-e-0") };
        moving.tickets(&[from, to]);
        moving.settle();
        assert_eq!(moving.at(), (from, to));
        let relay = moving.0.pair().1.unwrap().clone();
        assert_eq!(relay.spec.relay_from, format!("unix:/{old}.relay"));
        assert!(!relay.spec.active && relay.spec.replica_address_map.is_empty());
        assert!(moving.met(from) && moving.met(to));
        let mut shown = [format!("{old}@{from}"), format!("{new}~{to}")];
        shown.sort();
        assert_eq!(moving.processes(), shown);
        let starts = moving.0.starts;
        moving.tickets(&[to]);
        moving.settle();
        assert_eq!((moving.at(), names(&moving.0)), ((to, ""), vec![new]));
        assert_eq!(moving.processes(), [format!("{new}@{to}")]);
        let engine = moving.0.engine();
        assert!(engine.spec.active && !engine.spec.relays() && engine.spec.replica_address_map.len() == 3);
        assert_eq!(moving.0.starts, starts + 1, "by an engine with a number of its own");
        assert_eq!(
            (moving.0.status().state, moving.0.status().robustness),
            (VolumeState::Attached, Robustness::Healthy)
        );
        assert!(moving.0.replicas.values().all(|r| r.spec.engine_name == new));
        assert_eq!(moving.0.plan(), [], "at rest nothing is done");
    }
}

#[test]
fn the_old_engine_is_told_to_stop_before_the_new_one_is_told_to_be_one() {
    let mut moving = Moving::attached_to("n1");
    moving.tickets(&["n1", "n2"]);
    moving.settle();
    moving.tickets(&["n2"]);
    moving.follow_tickets();
    let told = |actions: &[Action]| -> Vec<(String, bool, DesireState)> {
        let one = |a: &Action| match a {
            Action::SetEngine(name, spec) => Some((name.clone(), spec.active, spec.desire_state)),
            _ => None,
        };
        actions.iter().filter_map(one).collect()
    };
    let actions = moving.0.plan();
    let (stopped, active) =
        (("v-e-0".to_owned(), false, DesireState::Stopped), ("v-e-1".to_owned(), true, DesireState::Running));
    assert_eq!(told(&actions), [stopped, active.clone()]);
    assert!(!actions.iter().any(|a| matches!(a, Action::DeleteEngine(_))), "it still runs: {actions:?}");
    // Whoever leads now finds it written so far, and no further.
    let first = actions.into_iter().find(|a| matches!(a, Action::SetEngine(..))).unwrap();
    moving.0.carry_out(first);
    assert_eq!(told(&moving.0.plan()), [active]);
    // What is said of the relay is not taken for the engine that it is to be.
    moving.0.late = ["n1".to_owned(), "n2".to_owned()].into();
    moving.0.settle();
    assert_eq!(
        (moving.at(), names(&moving.0)),
        (("n1", "n2"), vec!["v-e-0", "v-e-1"]),
        "nobody did anything yet"
    );
    assert!(moving.met("n2"), "whoever uses it there only waits");
    moving.0.late.clear();
    moving.settle();
    assert_eq!((moving.at(), names(&moving.0)), (("n2", ""), vec!["v-e-1"]));
}

#[test]
fn who_lets_go_decides_what_becomes_of_it() {
    let states = |nodes: &[&str], silent: &[&str], shown: bool| {
        let mut moving = Moving::attached_to("n1");
        moving.tickets(&["n1", "n2"]);
        if !shown {
            moving.0.late.insert("n2".into());
        }
        moving.settle();
        assert_eq!(moving.met("n2"), shown);
        moving.0.up.retain(|node| !silent.contains(&node.as_str()));
        moving.tickets(nodes);
        moving.settle();
        let first = (moving.0.status().state, moving.0.status().current_node_id, moving.0.engines.len());
        moving.0.late.clear();
        moving.0.up.extend(["n1".to_owned(), "n2".to_owned()]);
        moving.settle();
        let left = moving.processes();
        assert_eq!(left.len(), usize::from(!nodes.is_empty()), "{nodes:?}: {left:?}");
        assert!(moving.0.engines.len() == 1, "{nodes:?}");
        first
    };
    use VolumeState::{Attached, Attaching, Detached};
    let on = |node: &str| node.to_owned();
    assert_eq!(states(&["n2"], &[], true), (Attached, on("n2"), 1), "confirmed");
    assert_eq!(states(&["n1"], &[], true), (Attached, on("n1"), 1), "rolled back");
    assert_eq!(states(&["n3"], &[], true), (Attached, on("n3"), 1), "elsewhere, over being detached");
    assert_eq!(states(&[], &[], true), (Detached, on(""), 1), "both let go");
    assert_eq!(states(&["n2"], &["n1"], true), (Attached, on("n2"), 1), "the first node is silent");
    assert_eq!(states(&["n1"], &["n2"], true), (Attached, on("n1"), 1), "the second node is silent");
    assert_eq!(states(&["n2"], &["n2"], true), (Attaching, on("n1"), 1), "it is wanted where nobody answers");
    assert_eq!(states(&["n3"], &["n1", "n2"], true), (Attached, on("n3"), 1), "both are silent");
    assert_eq!(states(&["n1"], &[], false), (Attached, on("n1"), 1), "it never came so far");
    assert_eq!(states(&["n2"], &[], false), (Attaching, on(""), 1), "the relay was not up: attached anew");
}

#[test]
fn a_relay_follows_its_engine_and_one_that_is_shown_stays_met() {
    let mut moving = Moving::attached_to("n1");
    moving.tickets(&["n1", "n2"]);
    moving.settle();
    let engine = moving.0.engines.get_mut("v-e-0").unwrap().status.as_mut().unwrap();
    engine.relay_address = "tcp:10.0.0.1:10009".into();
    moving.0.late.insert("n1".into());
    moving.settle();
    assert_eq!(moving.0.engines["v-e-1"].spec.relay_from, "tcp:10.0.0.1:10009");
    let engine = moving.0.engines.get_mut("v-e-0").unwrap().status.as_mut().unwrap();
    (engine.current_state, engine.relay_address) = (InstanceState::Error, String::new());
    let relay = moving.0.engines.get_mut("v-e-1").unwrap().status.as_mut().unwrap();
    relay.current_state = InstanceState::Error;
    moving.0.late.insert("n2".into());
    moving.settle();
    assert_eq!(moving.0.engines["v-e-1"].spec.relay_from, "tcp:10.0.0.1:10009", "it comes back there");
    assert!(moving.met("n2"));
}

#[test]
fn nothing_else_begins_meanwhile() {
    let mut moving = Moving::attached_to("n1");
    moving.tickets(&["n1", "n2"]);
    moving.settle();
    moving.0.volume_mut().spec.size = Int64Text(200);
    moving.0.volume_mut().spec.image = "longhorn:2".into();
    for node in moving.0.cluster.nodes.values_mut() {
        node.programs.extend(["longhorn:1".to_owned(), "longhorn:2".to_owned()]);
    }
    moving.settle();
    let plain = |world: &World| {
        world.engines.values().all(|e| e.spec.volume_size == Int64Text(100) && e.spec.image == "longhorn:1")
    };
    assert!(plain(&moving.0));
    moving.tickets(&["n2"]);
    moving.settle();
    moving.0.pass(60);
    assert_eq!(moving.0.engine().spec.volume_size, Int64Text(200), "afterwards it does");
    assert_eq!(moving.at(), ("n2", ""));
}

#[test]
fn a_relay_that_somebody_may_just_start_is_deleted_only_once_nobody_may() {
    let mut moving = Moving::attached_to("n1");
    moving.0.late.insert("n2".into());
    moving.tickets(&["n1", "n2"]);
    moving.settle();
    // What is said of it is from before it was told to run.
    let said = EngineStatus { owner_id: "n2".into(), ..EngineStatus::default() };
    moving.0.engines.get_mut("v-e-1").unwrap().status = Some(said);
    moving.tickets(&["n1"]);
    moving.follow_tickets();
    let first = moving.0.plan();
    let is_stop = |a: &Action| matches!(a, Action::SetEngine(_, e) if e.desire_state == DesireState::Stopped);
    assert!(first.iter().any(is_stop), "{first:?}");
    assert!(!first.contains(&Action::DeleteEngine("v-e-1".into())), "{first:?}");
    moving.settle();
    assert_eq!((moving.at(), names(&moving.0)), (("n1", ""), vec!["v-e-0"]));
}

#[test]
fn a_migration_that_is_given_up_and_wanted_again_at_once_begins_anew() {
    for was_shown in [false, true] {
        let mut moving = Moving::attached_to("n1");
        if !was_shown {
            moving.0.late.insert("n2".into());
        }
        moving.tickets(&["n1", "n2"]);
        moving.settle();
        assert_eq!(moving.met("n2"), was_shown);
        // Its relay is told to end, and has not done so when it is wanted again.
        moving.tickets(&["n1"]);
        moving.follow_tickets();
        moving.0.plan().into_iter().for_each(|action| moving.0.carry_out(action));
        assert_eq!(moving.0.pair().1.map(|e| e.spec.desire_state), Some(DesireState::Stopped));
        moving.tickets(&["n1", "n2"]);
        moving.follow_tickets();
        moving.0.late.clear();
        moving.settle();
        assert_eq!(moving.processes(), ["v-e-0@n1", "v-e-1~n2"], "{was_shown}");
        assert!(moving.met("n1") && moving.met("n2"), "{was_shown}");
    }
}

#[test]
fn a_deleted_volume_takes_both_engines_with_it() {
    let mut moving = Moving::attached_to("n1");
    moving.tickets(&["n1", "n2"]);
    moving.settle();
    let deleted = moving.0.now;
    moving.0.volume_mut().metadata.deletion_timestamp = Some(deleted.into());
    moving.0.settle();
    assert!(moving.0.volume.is_none() && moving.0.engines.is_empty() && moving.0.processes.is_empty());
}

#[test]
fn a_relay_that_does_not_end_keeps_a_deleted_volume_for_a_minute() {
    let mut moving = Moving::attached_to("n1");
    moving.tickets(&["n1", "n2"]);
    moving.settle();
    let relay = moving.0.pair().1.and_then(|e| e.metadata.name.clone()).expect("a relay");
    moving.0.stuck.insert(relay);
    let deleted = moving.0.now;
    moving.0.volume_mut().metadata.deletion_timestamp = Some(deleted.into());
    moving.0.settle();
    moving.0.pass(59);
    assert_eq!(moving.0.replicas.len(), 3);
    moving.0.pass(1);
    assert!(moving.0.volume.is_none() && moving.0.engines.is_empty() && moving.0.replicas.is_empty());
    assert!(moving.0.told.contains(&"EngineNotEnded"), "{:?}", moving.0.told);
}

/// Whatever dies, is late or is written only in part, and whoever lets go meanwhile: never are two engines wanted, none is
/// forgotten while it runs (both in `World`), and in the end the volume is where it is wanted, with one engine.
#[test]
fn it_converges_from_every_step() {
    let nodes = ["n1", "n2", "n3"];
    for seed in 0..400_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut roll = |sides: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % sides
        };
        let mut moving = Moving::attached_to("n1");
        for _ in 0..60 {
            let pick = |n: u64| nodes[usize::try_from(n).unwrap()];
            match roll(8) {
                0 => moving.tickets(&[pick(roll(3))]),
                1 => moving.tickets(&[pick(roll(3)), pick(roll(3))]),
                2 if roll(3) == 0 => {
                    moving.0.up.remove(pick(roll(3)));
                }
                2 | 3 => moving.0.up.extend(nodes.map(str::to_owned)),
                4 => moving.0.late = [pick(roll(3)).to_owned()].into(),
                5 => moving.follow_tickets(),
                6 => moving.0.nodes_act(),
                _ => {
                    // A leader dies, or its write is refused, in the middle.
                    let actions = moving.0.plan();
                    let length = u64::try_from(actions.len()).unwrap();
                    let whole = roll(2) == 0;
                    let count = if whole { length } else { roll(length + 1) };
                    actions
                        .into_iter()
                        .take(usize::try_from(count).unwrap())
                        .for_each(|a| moving.0.carry_out(a));
                }
            }
        }
        moving.0.up.extend(nodes.map(str::to_owned));
        moving.0.late.clear();
        moving.tickets(&["n2"]);
        moving.settle();
        moving.0.pass(60);
        moving.settle();
        assert_eq!(moving.at(), ("n2", ""), "seed {seed}");
        assert_eq!(
            (moving.0.engines.len(), moving.processes().len()),
            (1, 1),
            "seed {seed}: {:?}",
            moving.processes()
        );
        assert!(moving.processes()[0].ends_with("@n2"), "seed {seed}");
        assert_eq!(moving.0.status().state, VolumeState::Attached, "seed {seed}");
    }
}
