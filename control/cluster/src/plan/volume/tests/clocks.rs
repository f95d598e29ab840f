//! Volumes whose times were written with a clock that was wrong.

use super::*;
use crate::plan::written;

/// Two hours after the world's clock.
fn ahead(world: &World) -> String {
    written(world.now + SignedDuration::from_hours(2))
}

#[test]
fn a_replica_that_failed_by_a_clock_that_was_ahead_is_replaced_as_any_other() {
    let mut world = World::attached_to("n1");
    let lost = world.replica_on("n3");
    world.up.remove("n3");
    world.cluster.nodes.get_mut("n3").unwrap().schedulable = false;
    world.settle();
    let ahead = ahead(&world);
    for time in ["failed", "last failed"] {
        let spec = &mut world.replicas.get_mut(&lost).unwrap().spec;
        if time == "failed" { &mut spec.failed_at } else { &mut spec.last_failed_at }.clone_from(&ahead);
    }
    world.settle();
    assert_eq!(world.replicas[&lost].spec.failed_at, written(world.now));
    assert_eq!(world.plan().iter().filter(|a| !matches!(a, Action::LookAgain(_))).count(), 0);
    world.pass(599);
    assert_eq!(world.nodes(), ["n1", "n2", "n3"]);
    world.pass(2);
    assert_eq!(world.nodes(), ["n1", "n2", "n4"]);
}

#[test]
fn a_volume_that_waits_by_a_clock_that_was_ahead_is_detached_after_a_minute() {
    let mut world = World::attached_to("n1");
    world.stuck.insert(world.replica_on("n3"));
    world.attach("");
    assert_eq!(world.status().state, VolumeState::Detaching);
    let ahead = ahead(&world);
    let status = world.volume_mut().status.as_mut().unwrap();
    let ended = status.conditions.iter_mut().find(|c| c.kind == ENDED).unwrap();
    ended.last_transition_time = ahead;
    world.settle();
    world.pass(59);
    assert_eq!(world.status().state, VolumeState::Detaching);
    world.pass(2);
    assert_eq!(world.status().state, VolumeState::Detached);
}

/// By the clock of a leader that is days ahead every replica that has just failed is one that nobody waits for any more.
#[test]
fn a_replica_with_data_is_given_up_only_by_a_leader_that_has_known_of_its_failure_for_a_while() {
    let mut world = World::attached_to("n1");
    for n in ["n3", "n4"] {
        world.cluster.nodes.get_mut(n).unwrap().schedulable = false;
    }
    let lost = world.replica_on("n3");
    world.up.remove("n3");
    world.settle();
    world.lately_failed.insert(lost.clone());
    world.pass(3 * 24 * 3600);
    assert!(world.replicas.contains_key(&lost));
    assert!(world.plan().iter().any(|a| matches!(a, Action::LookAgain(_))));
    world.lately_failed.clear();
    world.settle();
    assert_eq!(world.nodes(), ["n1", "n2"]);
}
