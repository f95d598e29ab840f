//! Many volumes that lose a replica at once.

use super::super::*;
use super::world::World;
use crate::api::{ReplicaMode, Robustness};
use crate::plan::rebuild::{Decided, filling, taken};

/// Volumes, one after the other, each of which has decided before the next one looks.
struct Volumes {
    worlds: Vec<World>,
    decided: Decided,
}

impl Volumes {
    fn replicas(&self) -> Vec<Replica> {
        let named = |(i, world): (usize, &World)| {
            let own = |r: &Replica| {
                let mut own = r.clone();
                own.metadata.name = Some(format!("{i}/{}", r.metadata.name.as_deref().unwrap_or_default()));
                own.spec.volume_name = i.to_string();
                own
            };
            world.replicas.values().map(own).collect::<Vec<_>>()
        };
        self.worlds.iter().enumerate().flat_map(named).collect()
    }

    fn unfilled(&self) -> Filling {
        let mut on = Filling::new();
        for node in filling(&self.replicas()).values() {
            *on.entry((*node).to_owned()).or_default() += 1;
        }
        on
    }

    /// Each decides; what all have decided is carried out afterwards.
    fn round(&mut self) {
        let all = self.replicas();
        let seen = taken(&all, []);
        let mut decisions = Vec::new();
        for (i, world) in self.worlds.iter_mut().enumerate() {
            world.filling = self.decided.filling(&i.to_string(), &seen, |_| false, Duration::ZERO);
            let actions = world.plan();
            self.decided.note(&i.to_string(), &named(i, &actions), Duration::ZERO);
            decisions.push(actions);
        }
        self.decided = Decided::default();
        for (world, actions) in self.worlds.iter_mut().zip(decisions) {
            actions.into_iter().for_each(|action| world.carry_out(action));
            world.nodes_act();
        }
    }
}

/// Names that no other volume's replicas have.
fn named(volume: usize, actions: &[Action]) -> Vec<Action> {
    let own = |action: &Action| match action {
        Action::CreateReplica(name, spec) => {
            Some(Action::CreateReplica(format!("{volume}/{name}"), spec.clone()))
        }
        _ => None,
    };
    actions.iter().filter_map(own).collect()
}

#[test]
fn no_node_fills_more_than_it_may_and_all_have_their_turn() {
    let volume = || {
        let mut world = World::attached_to("n1");
        world.rebuilds_end = false;
        world.up.remove("n3");
        world.cluster.nodes.get_mut("n3").unwrap().schedulable = false;
        world.settle();
        world.now += k8s_openapi::jiff::SignedDuration::from_secs(601);
        world
    };
    let mut volumes =
        Volumes { worlds: std::iter::repeat_with(volume).take(50).collect(), decided: Decided::default() };
    let mut most = 0;
    for _ in 0..20 {
        for _ in 0..4 {
            volumes.round();
            let unfilled = volumes.unfilled();
            assert!(unfilled.values().all(|n| *n <= 5), "{unfilled:?}");
            most = most.max(unfilled.get("n4").copied().unwrap_or_default());
        }
        let waits = volumes.worlds.iter().filter(|w| !w.nodes().contains(&"n4"));
        assert!(waits.clone().all(|w| w.plan().iter().any(|a| matches!(a, Action::LookAgain(_)))));
        let ends = waits.count() == 0;
        for world in &mut volumes.worlds {
            // Those that are being filled are filled.
            world.rebuilds_end = true;
            world.nodes_act();
        }
        volumes.round();
        volumes.worlds.iter_mut().for_each(|world| world.rebuilds_end = false);
        if ends {
            break;
        }
    }
    (0..4).for_each(|_| volumes.round());
    assert_eq!(most, 5);
    assert!(volumes.worlds.iter().all(|world| world.nodes() == ["n1", "n2", "n4"]), "all are whole again");
    assert_eq!(Settings::of([("concurrent-replica-rebuild-per-node-limit", "7")]).rebuilds_at_once(), 7);
}

#[test]
fn a_replica_that_is_back_is_filled_to_the_end_however_long_ago_it_failed() {
    let mut world = World::attached_to("n1");
    world.volume_mut().spec.stale_replica_timeout = 30;
    // There is no place for another one.
    for n in ["n3", "n4"] {
        world.cluster.nodes.get_mut(n).unwrap().schedulable = false;
    }
    let back = world.replica_on("n3");
    world.up.remove("n3");
    world.settle();
    world.pass(29 * 60);
    world.rebuilds_end = false;
    world.up.insert("n3".into());
    world.settle();
    let mode = |world: &World| world.engine().status.as_ref().unwrap().replica_mode_map.get(&back).copied();
    assert_eq!(mode(&world), Some(ReplicaMode::WriteOnly));
    world.pass(10 * 60);
    assert_eq!(mode(&world), Some(ReplicaMode::WriteOnly), "it takes its time");
    world.rebuilds_end = true;
    world.settle();
    assert_eq!((world.status().robustness, world.nodes()), (Robustness::Healthy, vec!["n1", "n2", "n3"]));
    assert!(world.replicas.contains_key(&back));
    world.up.remove("n3");
    world.settle();
    world.pass(31 * 60);
    assert_eq!(world.nodes(), ["n1", "n2"], "one that stays away goes");
}
