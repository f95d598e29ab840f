//! A deleted volume, and what keeps it.

use super::world::World;
use super::*;

fn deleted(node: &str, stuck: impl Fn(&World) -> String) -> (World, String) {
    let mut world = World::attached_to(node);
    let stuck = stuck(&world);
    world.stuck.insert(stuck.clone());
    let now = world.now;
    world.volume_mut().metadata.deletion_timestamp = Some(now.into());
    world.settle();
    (world, stuck)
}

fn why(world: &World) -> (String, String) {
    let condition = world.status().conditions.get_condition(ENDED).cloned().unwrap_or_default();
    (condition.reason, condition.message)
}

#[test]
fn an_engine_that_does_not_end_keeps_a_deleted_volume_for_a_minute() {
    let (mut world, engine) = deleted("n1", |_| "v-e-0".into());
    world.pass(59);
    assert_eq!((world.replicas.len(), world.engines.contains_key(&engine)), (3, true));
    assert!(world.plan().iter().any(|a| matches!(a, Action::LookAgain(_))), "nothing else wakes it");
    assert_eq!(why(&world).0, "Ending");
    world.pass(1);
    assert!(world.volume.is_none() && world.engines.is_empty() && world.replicas.is_empty());
    assert_eq!(world.told.iter().filter(|t| **t == "EngineNotEnded").count(), 1);
}

#[test]
fn an_engine_that_may_just_be_started_is_told_to_end_first_however_long_its_volume_has_waited() {
    let (mut world, engine) = deleted("n1", |_| "v-e-0".into());
    world.engines.get_mut(&engine).unwrap().spec.desire_state = DesireState::Running;
    world.now += SignedDuration::from_secs(3600);
    let first = world.plan();
    let is_stop = |a: &Action| matches!(a, Action::SetEngine(_, e) if e.desire_state == DesireState::Stopped);
    assert!(first.iter().any(is_stop), "{first:?}");
    assert!(
        !first.iter().any(|a| matches!(a, Action::DeleteEngine(_) | Action::DeleteReplica(_))),
        "{first:?}"
    );
}

#[test]
fn what_a_deleted_volume_waits_for_is_said_once_it_is_late() {
    let (mut world, replica) = deleted("n1", |world| world.replica_on("n3"));
    world.pass(299);
    assert_eq!((world.replicas.len(), why(&world).0.as_str()), (1, "Ending"), "much data takes its time");
    assert!(world.plan().iter().any(|a| matches!(a, Action::LookAgain(_))), "nothing else wakes it");
    world.pass(1);
    let (reason, message) = why(&world);
    assert_eq!(reason, "Waits");
    assert!(message.contains(&replica) && message.contains("has not ended"), "{message}");
    world.up.remove("n3");
    world.pass(10);
    assert!(why(&world).1.contains("kubectl delete node n3"), "{}", why(&world).1);
    world.up.insert("n3".into());
    let status = world.replicas.get_mut(&replica).unwrap().status.as_mut().unwrap();
    status.current_state = InstanceState::Stopped;
    assert!(world.plan().iter().any(|a| matches!(a, Action::SetStatus(s)
        if s.conditions.get_condition(ENDED).unwrap().message.contains("not removed yet"))));
    assert_eq!(world.told.iter().filter(|t| **t == "DeletionWaits").count(), 1);
    world.replicas.clear();
    world.settle();
    assert!(world.volume.is_none());
}
