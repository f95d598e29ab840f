//! Volumes that begin and end while something of them does not come up, or does not end.

use super::*;
use crate::api::{GenerationText, Quorum, ReplicaMode};
use crate::plan::engine::SERVES;
use crate::plan::written;

/// The engine says that it serves, since now.
fn serves(world: &mut World) {
    let now = written(world.now);
    let engine = world.engines.values_mut().next().expect("an engine");
    engine.status.as_mut().expect("a status").conditions.set_condition(SERVES, true, "", "", &now);
}

fn waits_for(world: &World) -> String {
    let status = world.status();
    status.conditions.get_condition(READY).map(|c| c.message.clone()).unwrap_or_default()
}

#[test]
fn a_replica_whose_process_does_not_come_up_is_replaced_in_the_end() {
    let mut world = World::attached_to("n1");
    world.attach("");
    // Its node takes nothing new.
    world.cluster.nodes.get_mut("n3").unwrap().schedulable = false;
    let absent = world.replica_on("n3");
    world.absent.insert(absent.clone());
    world.attach("n1");
    assert_eq!(world.status().state, VolumeState::Attaching);
    world.pass(21);
    assert_eq!(
        (world.status().state, world.status().robustness),
        (VolumeState::Attached, Robustness::Degraded)
    );
    serves(&mut world);
    world.pass(59);
    assert!(world.replicas[&absent].spec.failed_at.is_empty(), "it may come up yet");
    assert!(world.plan().iter().any(|a| matches!(a, Action::LookAgain(_))));
    world.pass(1);
    assert!(!world.replicas[&absent].spec.failed_at.is_empty());
    world.pass(601);
    assert_eq!((world.nodes(), world.status().robustness), (vec!["n1", "n2", "n4"], Robustness::Healthy));

    let mut late = World::attached_to("n1");
    late.attach("");
    let absent = late.replica_on("n3");
    late.absent.insert(absent.clone());
    late.attach("n1");
    late.pass(21);
    serves(&mut late);
    late.pass(60);
    late.absent.clear();
    late.settle();
    assert!(late.replicas[&absent].spec.failed_at.is_empty(), "it is taken back");
    assert_eq!((late.nodes(), late.status().robustness), (vec!["n1", "n2", "n3"], Robustness::Healthy));
}

#[test]
fn a_volume_that_was_never_used_begins_without_what_does_not_come_up() {
    let mut world = World::new(VolumeSpec::default());
    world.settle();
    let absent = world.replica_on("n3");
    world.absent.insert(absent.clone());
    world.attach("n1");
    world.pass(59);
    assert_eq!(world.status().state, VolumeState::Attaching);
    assert!(waits_for(&world).contains(&absent), "{}", waits_for(&world));
    world.pass(1);
    assert_eq!(
        (world.status().state, world.status().robustness),
        (VolumeState::Attached, Robustness::Degraded)
    );
    assert!(world.told.contains(&"ReplicasLeftOut"));

    // One that may hold something is waited for.
    let mut used = World::attached_to("n1");
    used.attach("");
    used.volume_mut().status.as_mut().unwrap().epoch = None;
    used.absent.insert(used.replica_on("n3"));
    used.attach("n1");
    used.pass(3600);
    assert_eq!(used.status().state, VolumeState::Attaching);
    assert!(!used.told.contains(&"ReplicasLeftOut"));
}

/// Their disks were exchanged before anybody used the volume: those that failed were replicas of which a majority was wanted for ever,
/// and kept others from their nodes.
#[test]
fn replicas_that_failed_before_a_volume_was_ever_used_are_made_anew() {
    let spec = VolumeSpec { quorum: Quorum::Majority, number_of_replicas: 3, ..VolumeSpec::default() };
    let mut world = World::new(spec);
    world.settle();
    let lost = ["n2", "n3"].map(|node| world.replica_on(node));
    for name in &lost {
        world.replicas.get_mut(name).unwrap().spec.failed_at = "2026-01-01T00:00:00Z".into();
    }
    world.settle();
    assert!(lost.iter().all(|name| !world.replicas.contains_key(name)), "{lost:?}");
    assert_eq!(world.replicas.len(), 3);
    world.attach("n1");
    world.settle();
    assert_eq!(
        (world.status().state, world.status().robustness),
        (VolumeState::Attached, Robustness::Healthy)
    );

    // What was in use once may be all that there is.
    let mut used = World::attached_to("n1");
    used.attach("");
    let kept = used.replica_on("n3");
    used.replicas.get_mut(&kept).unwrap().spec.failed_at = "2026-01-01T00:00:00Z".into();
    used.settle();
    assert!(used.replicas.contains_key(&kept));
}

#[test]
fn an_engine_that_begins_a_volume_with_a_replica_that_is_lost_begins_anew_without_it() {
    let begun = |world: &mut World| {
        world.settle();
        let lost = world.replica_on("n3");
        world.cut_off.insert(lost.clone());
        world.attach("n1");
        world.pass(600);
        assert_eq!(world.status().state, VolumeState::Attaching, "the very first start needs all of them");
        assert!(world.engine().spec.replica_address_map.contains_key(&lost));
        lost
    };
    let mut world = World::new(VolumeSpec::default());
    let lost = begun(&mut world);
    world.up.remove("n3");
    world.settle();
    assert_eq!(world.status().state, VolumeState::Attached);
    assert!(!world.engine().spec.replica_address_map.contains_key(&lost) && world.starts == 2);
    world.up.insert("n3".into());
    world.cut_off.clear();
    world.settle();
    assert_eq!(world.status().robustness, Robustness::Healthy, "it is filled once it is back");

    let mut deleted = World::new(VolumeSpec::default());
    let lost = begun(&mut deleted);
    deleted.replicas.remove(&lost);
    deleted.settle();
    assert_eq!(deleted.status().state, VolumeState::Attached);

    // What may hold something is waited for.
    let mut served = World::new(VolumeSpec::default());
    let lost = begun(&mut served);
    let other = served.replica_on("n1");
    served.replicas.get_mut(&other).unwrap().spec.healthy_at = written(served.now);
    served.up.remove("n3");
    served.pass(600);
    assert!(served.engine().spec.replica_address_map.contains_key(&lost) && served.starts == 1);
}

#[test]
fn what_a_majority_decides_starts_with_a_majority_of_all_replicas_alone() {
    let rests = || {
        let mut world = World::new(VolumeSpec { quorum: Quorum::Majority, ..VolumeSpec::default() });
        world.settle();
        world.attach("n1");
        world.attach("");
        // The authority keeps no epochs of such a volume.
        world.volume_mut().status.as_mut().unwrap().epoch = None;
        world
    };
    let mut world = rests();
    world.up = ["n1".to_owned()].into();
    world.attach("n1");
    world.pass(3600);
    assert_eq!(
        (world.status().state, world.engine().spec.desire_state),
        (VolumeState::Attaching, DesireState::Stopped)
    );
    assert!(waits_for(&world).contains("1 of 3 replicas run"), "{}", waits_for(&world));
    // One that failed tells what it has recorded, too.
    world.up.insert("n2".into());
    world.settle();
    assert_eq!(world.status().state, VolumeState::Attached);

    // A later start waits for none beyond that for ever.
    let mut slow = rests();
    slow.absent.insert(slow.replica_on("n3"));
    slow.attach("n1");
    assert_eq!(slow.status().state, VolumeState::Attaching);
    slow.pass(21);
    assert_eq!(slow.status().state, VolumeState::Attached);
}

#[test]
fn a_strictly_local_volume_is_used_where_its_replica_is_alone() {
    let strict = VolumeSpec {
        data_locality: DataLocality::StrictLocal,
        number_of_replicas: 1,
        ..VolumeSpec::default()
    };
    let mut world = World::new(strict);
    world.settle();
    world.attach("n3");
    world.attach("");
    world.attach("n2");
    world.pass(3600);
    assert_eq!((world.status().state, world.nodes()), (VolumeState::Attaching, vec!["n3"]));
    assert!(waits_for(&world).contains("its replica is on node n3"), "{}", waits_for(&world));
    world.attach("n3");
    assert_eq!(world.status().state, VolumeState::Attached);

    // One that became strict with replicas elsewhere, too, keeps the one that is there.
    let mut narrowed = World::attached_to("n1");
    narrowed.attach("");
    let spec = &mut narrowed.volume_mut().spec;
    (spec.data_locality, spec.number_of_replicas) = (DataLocality::StrictLocal, 1);
    narrowed.attach("n2");
    assert_eq!((narrowed.nodes(), narrowed.status().state), (vec!["n2"], VolumeState::Attached));
}

/// A strict-local volume that is being attached to n3, where its engine starts and does not come to serve.
fn begun_in_vain(quorum: Quorum) -> World {
    let (data_locality, number_of_replicas) = (DataLocality::StrictLocal, 1);
    let mut world =
        World::new(VolumeSpec { data_locality, number_of_replicas, quorum, ..VolumeSpec::default() });
    world.settle();
    world.late.insert("n3".into());
    world.attach("n3");
    world.cut_off.insert(world.replica_on("n3"));
    world.late.clear();
    world.settle();
    assert_eq!((world.status().state, world.starts), (VolumeState::Attaching, 1));
    world
}

#[test]
fn a_strictly_local_volume_that_was_never_used_goes_where_it_is_wanted() {
    let mut world = begun_in_vain(Quorum::Any);
    world.attach("");
    world.attach("n2");
    assert_eq!((world.status().state, world.nodes()), (VolumeState::Attached, vec!["n2"]));
    // By now it was used.
    world.attach("");
    world.attach("n1");
    assert_eq!((world.status().state, world.nodes()), (VolumeState::Attaching, vec!["n2"]));

    // With another quorum nobody here may have heard that it was served.
    let mut unsure = begun_in_vain(Quorum::Unsafe);
    unsure.attach("");
    unsure.attach("n2");
    assert_eq!((unsure.status().state, unsure.nodes()), (VolumeState::Attaching, vec!["n3"]));
}

#[test]
fn of_a_node_whose_engine_has_not_ended_nothing_is_taken() {
    let mut world = begun_in_vain(Quorum::Any);
    world.stuck.insert("v-e-0".into());
    world.attach("");
    world.pass(60);
    world.attach("n2");
    world.pass(3600);
    assert_eq!((world.status().state, world.nodes()), (VolumeState::Attaching, vec!["n3"]));
    assert!(waits_for(&world).contains("may still be on node n3"), "{}", waits_for(&world));
    world.stuck.clear();
    let told = world.engines.values_mut().next().and_then(|e| e.status.as_mut()).unwrap();
    told.current_state = InstanceState::Stopped;
    world.settle();
    assert_eq!((world.status().state, world.nodes()), (VolumeState::Attached, vec!["n2"]));
}

#[test]
fn an_engine_that_does_not_end_keeps_its_volume_for_a_minute() {
    let mut world = World::attached_to("n1");
    world.stuck.insert("v-e-0".into());
    world.attach("");
    world.pass(59);
    assert_eq!((world.status().state, world.engine().spec.node_id.as_str()), (VolumeState::Detaching, "n1"));
    assert!(world.replicas.values().all(|r| r.spec.desire_state == DesireState::Running), "it may use them");
    world.pass(1);
    assert_eq!(world.status().state, VolumeState::Detached);
    assert_eq!(world.told.iter().filter(|t| **t == "EngineNotEnded").count(), 1);
    world.attach("n2");
    assert_eq!((world.status().state, world.engine().spec.node_id.as_str()), (VolumeState::Attached, "n2"));
}

const HOURS_AGO: [&str; 2] = ["2023-11-14T20:00:00Z", "2023-11-14T21:00:00Z"];

/// A volume as Longhorn leaves it: no epoch is known of it, and its resources say which replicas hold everything.
fn from_longhorn(quorum: Quorum) -> World {
    let mut world = World::new(VolumeSpec { quorum, ..VolumeSpec::default() });
    world.settle();
    world.replicas.values_mut().for_each(|r| HOURS_AGO[0].clone_into(&mut r.spec.healthy_at));
    world
}

/// What the engine is told of before it serves.
fn told_first(world: &mut World, node: &str) -> Vec<String> {
    world.late.insert(node.into());
    world.attach(node);
    assert_eq!(world.engine().spec.desire_state, DesireState::Running);
    let told = world.engine().spec.replica_address_map.keys().cloned().collect();
    world.late.clear();
    told
}

#[test]
fn where_no_epoch_says_who_holds_everything_the_resources_do() {
    for quorum in [Quorum::Any, Quorum::Unsafe] {
        let mut world = from_longhorn(quorum);
        let names: Vec<String> = world.replicas.keys().cloned().collect();
        // Its name comes first, and what it holds is an hour old.
        let old = world.replicas.get_mut(&names[0]).unwrap();
        HOURS_AGO[1].clone_into(&mut old.spec.failed_at);
        assert_eq!(told_first(&mut world, "n1"), names[1..], "{quorum}");
        world.settle();
        assert_eq!(world.engine().spec.replica_address_map.len(), 3, "once it serves the others are filled");
        assert_eq!(world.status().robustness, Robustness::Healthy);
    }
}

/// A disk that was forgotten when Longhorn's pods went, which saw the whole host.
#[test]
fn a_volume_of_longhorns_waits_for_the_disks_that_are_not_given_to_the_pods_yet() {
    for quorum in [Quorum::Any, Quorum::Majority, Quorum::Unsafe] {
        for lacking in [&["n3"][..], &["n1", "n2", "n3"]] {
            let mut world = from_longhorn(quorum);
            world.replicas.values_mut().for_each(|r| r.spec.disk_path.push('/'));
            world.unmounted = lacking.iter().map(|node| world.replica_on(node)).collect();
            world.attach("n1");
            world.pass(5);
            world.pass(3600);
            let what = format!("{quorum} {lacking:?}");
            assert_eq!((world.status().state, world.starts), (VolumeState::Attaching, 0), "{what}");
            assert!(world.replicas.values().all(|r| r.spec.failed_at.is_empty()), "{what}");
            let said = waits_for(&world);
            for node in lacking {
                let shown = format!("at /disks/{node}-d on node {node}: /disks/{node}-d/: No such file");
                assert!(
                    said.contains(&shown) && said.contains(&format!(" --disk /disks/{node}-d")),
                    "{said}"
                );
            }
            assert_eq!(said.matches("--disk ").count(), lacking.len(), "{said}");
            world.unmounted.clear();
            world.settle();
            assert_eq!(world.status().robustness, Robustness::Healthy, "{what}");
            assert_eq!((world.starts, world.first_told.len(), world.nodes()), (1, 3, vec!["n1", "n2", "n3"]));
        }
    }
}

#[test]
fn what_is_not_a_forgotten_disk_of_longhorns_is_not_waited_for() {
    // Whoever knows that the disk is lost says so.
    let mut deleted = from_longhorn(Quorum::Any);
    let lost = deleted.replica_on("n3");
    deleted.unmounted.insert(lost.clone());
    deleted.cluster.nodes.get_mut("n3").unwrap().schedulable = false;
    deleted.attach("n1");
    deleted.replicas.get_mut(&lost).unwrap().metadata.deletion_timestamp = Some(deleted.now.into());
    deleted.settle();
    assert_eq!((deleted.status().state, deleted.first_told.len()), (VolumeState::Attached, 2));

    // Its node may be gone for good.
    let mut silent = from_longhorn(Quorum::Any);
    silent.up.remove("n3");
    silent.attach("n1");
    assert_eq!((silent.status().state, silent.first_told.len()), (VolumeState::Attached, 2));

    // One that failed under Longhorn lacks something anyway.
    let mut failed = from_longhorn(Quorum::Any);
    let old = failed.replica_on("n3");
    HOURS_AGO[1].clone_into(&mut failed.replicas.get_mut(&old).unwrap().spec.failed_at);
    failed.unmounted.insert(old);
    failed.attach("n1");
    assert_eq!((failed.status().state, failed.first_told.len()), (VolumeState::Attached, 2));

    // Of what was served here the epoch says who holds everything, and a disk that breaks is as any other.
    let mut served = World::attached_to("n1");
    served.attach("");
    let broken = served.replica_on("n3");
    served.unmounted.insert(broken.clone());
    served.attach("n1");
    assert_eq!(
        (served.status().state, served.status().robustness),
        (VolumeState::Attached, Robustness::Degraded)
    );
    assert!(!served.replicas[&broken].spec.failed_at.is_empty());
}

#[test]
fn a_replica_that_was_never_filled_does_not_stand_for_those_that_are_away() {
    for quorum in [Quorum::Any, Quorum::Unsafe] {
        let mut world = from_longhorn(quorum);
        world.replicas.get_mut(&world.replica_on("n3")).unwrap().spec.healthy_at.clear();
        world.up = ["n3".to_owned(), "n4".to_owned()].into();
        world.attach("n3");
        world.pass(3600);
        assert_eq!(
            (world.status().state, world.starts, world.replicas.len()),
            (VolumeState::Attaching, 0, 3),
            "{quorum}: an empty volume would be served"
        );
        world.up.extend(["n1".to_owned(), "n2".to_owned()]);
        world.settle();
        assert_eq!(world.status().robustness, Robustness::Healthy);
    }
}

#[test]
fn of_replicas_that_all_failed_those_that_failed_last_begin_where_nobody_judges() {
    let mut world = from_longhorn(Quorum::Any);
    let names: Vec<String> = world.replicas.keys().cloned().collect();
    for (name, failed) in
        names.iter().zip(["2023-11-14T21:00:00Z", "2023-11-14T21:00:30Z", "2023-11-14T21:00:30Z"])
    {
        failed.clone_into(&mut world.replicas.get_mut(name).unwrap().spec.failed_at);
    }
    assert_eq!(told_first(&mut world, "n1"), names[1..]);
}

#[test]
fn without_epochs_what_is_out_of_sync_is_not_begun_with_later() {
    let mut world = World::new(VolumeSpec { quorum: Quorum::Unsafe, ..VolumeSpec::default() });
    world.settle();
    world.attach("n1");
    assert_eq!(world.status().robustness, Robustness::Healthy);
    let behind = world.replica_on("n3");
    let engine = world.engines.values_mut().next().unwrap();
    engine.status.as_mut().unwrap().replica_mode_map.insert(behind.clone(), ReplicaMode::WriteOnly);
    for action in world.plan() {
        world.carry_out(action);
    }
    assert!(!world.replicas[&behind].spec.failed_at.is_empty(), "it lacks something");
    world.cut_off.insert(behind.clone());
    world.settle();
    world.attach("");
    world.cut_off.clear();
    let told = told_first(&mut world, "n1");
    assert!(told.len() == 2 && !told.contains(&behind), "{told:?}");
}

#[test]
fn replicas_that_were_never_in_sync_are_no_part_of_a_majority() {
    let mut world = World::new(VolumeSpec { quorum: Quorum::Majority, ..VolumeSpec::default() });
    world.settle();
    world.attach("n1");
    world.attach("");
    // The one on n3 was put out a moment before the others went, and two that were to take others' places were never filled.
    let (away, node) = (world.replica_on("n3"), world.cluster.nodes["n4"].clone());
    world.replicas.get_mut(&away).unwrap().spec.failed_at = written(world.now);
    world.now += SignedDuration::from_secs(30);
    world.cluster.nodes.insert("n5".into(), node);
    for at in ["n4", "n5"] {
        let mut unfilled = world.replicas[&away].clone();
        unfilled.metadata.name = Some(format!("v-r-{at}"));
        unfilled.status = None;
        unfilled.spec = ReplicaSpec {
            node_id: at.into(),
            healthy_at: String::new(),
            failed_at: String::new(),
            ..unfilled.spec
        };
        world.replicas.insert(format!("v-r-{at}"), unfilled);
    }
    world.up = ["n3", "n4", "n5"].map(str::to_owned).into();
    world.attach("n3");
    world.pass(3600);
    assert_eq!((world.status().state, world.starts), (VolumeState::Attaching, 1), "others may hold more");
    assert!(waits_for(&world).contains("1 of 3 replicas run"), "{}", waits_for(&world));
    world.up.insert("n2".into());
    world.settle();
    assert_eq!(world.status().state, VolumeState::Attached);
}

/// An engine counts those that it is told of, and one that has recorded nothing would be half of these for ever.
#[test]
fn one_that_was_being_filled_for_the_first_time_is_no_part_of_a_majority() {
    let spec = VolumeSpec { quorum: Quorum::Majority, number_of_replicas: 1, ..VolumeSpec::default() };
    let mut world = World::new(spec);
    world.settle();
    world.attach("n1");
    world.attach("");
    let first = world.replicas.keys().next().unwrap().clone();
    let mut unfilled = world.replicas[&first].clone();
    unfilled.metadata.name = Some("v-r-n4".to_owned());
    (unfilled.spec.node_id, unfilled.spec.healthy_at) = ("n4".to_owned(), String::new());
    let status = unfilled.status.as_mut().unwrap();
    status.epoch_recorded = false;
    assert!(status.generation.is_some(), "an engine had it");
    world.replicas.insert("v-r-n4".to_owned(), unfilled);
    world.volume_mut().spec.number_of_replicas = 2;
    world.attach("n1");
    assert_eq!(world.first_told, [first]);
    assert_eq!(world.status().state, VolumeState::Attached);
}

/// Nor is it told that one of those has gone for good which it was told of.
#[test]
fn an_engine_that_waits_for_a_replica_that_is_gone_begins_again_without_it() {
    let spec = VolumeSpec { quorum: Quorum::Majority, number_of_replicas: 2, ..VolumeSpec::default() };
    let mut world = World::new(spec);
    world.settle();
    world.attach("n1");
    world.attach("");
    let mut names = world.replicas.keys().cloned();
    let (stays, goes) = (names.next().unwrap(), names.next().unwrap());
    drop(names);
    world.cut_off.insert(goes.clone());
    world.attach("n1");
    world.pass(600);
    assert_eq!((world.status().state, world.first_told.len()), (VolumeState::Attaching, 2));
    let starts = world.starts;
    world.replicas.remove(&goes);
    world.settle();
    assert_eq!(world.status().state, VolumeState::Attached);
    assert_eq!((&world.first_told, world.starts), (&vec![stays], starts + 1));
}

/// Its device goes with an engine, and this one needs but one of those that are there.
#[test]
fn an_engine_that_can_have_its_majority_is_not_ended_for_one_that_is_gone() {
    let mut world = World::new(VolumeSpec { quorum: Quorum::Majority, ..VolumeSpec::default() });
    world.settle();
    world.attach("n1");
    world.attach("");
    let names: Vec<String> = world.replicas.keys().cloned().collect();
    world.cut_off.extend(names[..2].iter().cloned());
    world.attach("n1");
    assert_eq!((world.status().state, world.first_told.len()), (VolumeState::Attaching, 3));
    let starts = world.starts;
    world.replicas.remove(&names[2]);
    world.pass(600);
    assert_eq!((world.status().state, world.starts), (VolumeState::Attaching, starts));
    world.cut_off.clear();
    world.settle();
    assert_eq!((world.status().state, world.starts), (VolumeState::Attached, starts));
}

/// Its status may be of a version that did not note epochs.
#[test]
fn one_that_was_in_sync_and_has_failed_is_part_of_a_majority() {
    let mut world = World::new(VolumeSpec { quorum: Quorum::Majority, ..VolumeSpec::default() });
    world.settle();
    world.attach("n1");
    world.attach("");
    let failed = world.replica_on("n3");
    let now = written(world.now);
    let replica = world.replicas.get_mut(&failed).unwrap();
    replica.spec.failed_at = now;
    replica.status.as_mut().unwrap().epoch_recorded = false;
    world.attach("n1");
    assert!(world.first_told.contains(&failed), "{:?}", world.first_told);
}

#[test]
fn nothing_is_begun_anew_beside_replicas_of_which_nobody_heard_that_they_were_written_to() {
    let mut world = World::new(VolumeSpec { quorum: Quorum::Majority, ..VolumeSpec::default() });
    world.settle();
    // An engine served, and was gone before the leader looked.
    world.volume_mut().status.as_mut().unwrap().generation = Some(GenerationText(1.into()));
    world.up = ["n3", "n4"].map(str::to_owned).into();
    world.attach("n3");
    world.attach("");
    assert_eq!(world.nodes(), ["n1", "n2", "n3"], "empty ones would be half of a majority");
}

/// An engine counts those that it is told of. Seen on paper: of five replicas it was told of three, and went on with two; the next one was
/// told of three, of which one knew no more than that it was a member.
#[test]
fn an_engine_counts_those_too_of_which_nobody_knows_where_they_are() {
    let spec = VolumeSpec { quorum: Quorum::Majority, number_of_replicas: 5, ..VolumeSpec::default() };
    let mut world = World::new(spec);
    let mut node = world.cluster.nodes["n4"].clone();
    node.zone = "n5".into();
    world.cluster.nodes.insert("n5".into(), node);
    world.up.insert("n5".into());
    world.settle();
    world.attach("n1");
    world.attach("");
    assert_eq!(world.replicas.len(), 5);
    world.up = ["n1", "n2", "n3"].map(str::to_owned).into();
    world.attach("n1");
    world.pass(21);
    assert_eq!(world.status().state, VolumeState::Attached);
    assert_eq!((world.first_told.len(), world.engine().spec.replica_address_map.len()), (5, 5));
    // Once they are back they are where they are.
    world.up.extend(["n4", "n5"].map(str::to_owned));
    world.settle();
    let map = &world.engine().spec.replica_address_map;
    assert!(map.iter().all(|(name, address)| *address == format!("unix:/{name}")), "{map:?}");
}

/// One failed, and the two others were deleted at the same time, each of which was to stay for the other. The API server's clock may be
/// ahead of this one's.
#[test]
fn what_failed_before_others_were_deleted_is_not_used_again_in_their_place() {
    for (quorum, ahead) in [(Quorum::Majority, 0), (Quorum::Unsafe, 0), (Quorum::Unsafe, 3600)] {
        let mut world = World::new(VolumeSpec { quorum, ..VolumeSpec::default() });
        world.settle();
        world.attach("n1");
        let behind = world.replica_on("n3");
        world.cut_off.insert(behind.clone());
        world.settle();
        assert!(!world.replicas[&behind].spec.failed_at.is_empty());
        world.attach("");
        world.now += SignedDuration::from_secs(5);
        let deleted: Vec<String> = world.replicas.keys().filter(|name| **name != behind).cloned().collect();
        for name in &deleted {
            let at = world.now + SignedDuration::from_secs(ahead);
            world.replicas.get_mut(name).unwrap().metadata.deletion_timestamp = Some(at.into());
        }
        world.now += SignedDuration::from_secs(5);
        world.cut_off.clear();
        world.attach("n1");
        world.pass(600);
        assert!(!world.replicas[&behind].spec.failed_at.is_empty(), "it lacks what the others hold");
        assert_eq!(world.status().state, VolumeState::Attaching);
        // Somebody says that they are gone for good.
        deleted.iter().for_each(|name| drop(world.replicas.remove(name)));
        world.settle();
        assert_eq!(world.status().state, VolumeState::Attached);
    }
}

/// An engine takes one more only if those in sync are a majority then, and the failed one is kept for two days.
#[test]
fn one_that_failed_makes_room_for_its_successor_where_a_majority_decides() {
    let mut world = World::new(VolumeSpec { quorum: Quorum::Majority, ..VolumeSpec::default() });
    world.settle();
    world.attach("n1");
    let lost = world.replica_on("n3");
    world.up.remove("n3");
    world.cluster.nodes.get_mut("n3").unwrap().schedulable = false;
    world.settle();
    world.pass(599);
    assert_eq!(world.nodes(), ["n1", "n2", "n3"]);
    world.pass(2);
    assert!(!world.replicas.contains_key(&lost));
    assert_eq!((world.nodes(), world.status().robustness), (vec!["n1", "n2", "n4"], Robustness::Healthy));
}

/// Where too few are left for a majority nothing goes: one of them is needed.
#[test]
fn nothing_is_given_up_that_a_majority_waits_for() {
    let mut world = World::new(VolumeSpec { quorum: Quorum::Majority, ..VolumeSpec::default() });
    world.settle();
    world.attach("n1");
    let all: Vec<String> = world.replicas.keys().cloned().collect();
    for node in ["n2", "n3"] {
        world.cut_off.insert(world.replica_on(node));
    }
    world.engine_waits_running = true;
    world.settle();
    world.pass(601);
    assert_eq!(world.replicas.len(), 4, "its successor is there, and is not taken");
    assert!(all.iter().all(|name| world.replicas.contains_key(name)));
}

/// Each majority of five has one in common with each of four, and none with some of three.
#[test]
fn a_replica_that_an_engine_has_let_go_of_is_deleted_before_the_next_one_goes() {
    let spec = VolumeSpec { quorum: Quorum::Majority, number_of_replicas: 4, ..VolumeSpec::default() };
    let mut world = World::new(spec);
    world.settle();
    world.attach("n1");
    world.volume_mut().spec.number_of_replicas = 2;
    let before = world.engine().spec.replica_address_map.clone();
    world.plan().into_iter().for_each(|action| world.carry_out(action));
    world.nodes_act();
    let let_go = before.keys().find(|name| !world.engine().spec.replica_address_map.contains_key(*name));
    let let_go = let_go.expect("one is let go of").clone();
    // Another one fails before it is heard that the first one is let go of.
    let fails = before.keys().rev().find(|name| **name != let_go).expect("others").clone();
    world.cut_off.insert(fails.clone());
    world.nodes_act();
    let actions = world.plan();
    assert!(actions.contains(&Action::DeleteReplica(let_go.clone())), "{actions:?}");
    actions.into_iter().for_each(|action| world.carry_out(action));
    let told = &world.engine().spec.replica_address_map;
    assert!(told.contains_key(&fails) && !told.contains_key(&let_go), "{told:?}");
    world.settle();
    assert!(world.replicas.len() == 2 && !world.replicas.contains_key(&fails), "{:?}", world.nodes());
}

/// Its name follows from what is there, and the same is there as when the one before was made. Seen on paper, where somebody takes a
/// replica's finalizer off: its engine still called the one before in sync, and so an empty one of its name held everything.
#[test]
fn a_new_replica_has_not_the_name_of_one_that_an_engine_still_has() {
    let mut world = World::new(VolumeSpec { number_of_replicas: 2, ..VolumeSpec::default() });
    world.settle();
    world.attach("n1");
    let first = world.replicas.keys().next().expect("two are there").clone();
    for _ in 0..3 {
        let other = world.replicas.keys().find(|name| **name != first).expect("two are there").clone();
        world.replicas.remove(&other);
        let made = world.plan().into_iter().find_map(|action| match action {
            Action::CreateReplica(name, _) => Some(name),
            _ => None,
        });
        assert_ne!(made.expect("another one is made"), other);
        world.settle();
        assert_eq!(world.status().robustness, Robustness::Healthy);
    }
}
