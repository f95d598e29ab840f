//! Volumes from their creation to their end, in a world where nodes do at once what their resources ask.

use k8s_openapi::jiff::SignedDuration;

use super::*;
use crate::api::{
    Conditions, DataLocality, DesireState, EngineStatus, EpochRecord, Frontend, InstanceState, Int64Text,
    Quorum, ReplicaStatus, Robustness, VolumeSpec, VolumeState,
};
use crate::schedule::Emptying;

mod clocks;
mod eviction;
mod image;
mod migration;
mod moves;
mod offline;
mod rebuild;
mod removal;
mod start;
mod world;

use world::World;

#[test]
fn a_new_volume_gets_its_engine_and_replicas_and_rests() {
    let mut world = World::new(VolumeSpec::default());
    world.settle();
    assert_eq!(world.nodes(), ["n1", "n2", "n3"]);
    let status = world.status();
    assert_eq!((status.state, status.robustness), (VolumeState::Detached, Robustness::Unknown));
    assert!(status.conditions.holds(SCHEDULED));
    assert_eq!(world.engine().spec.desire_state, DesireState::Stopped);
    assert!(world.attachment.is_some() && world.volume.as_ref().unwrap().metadata.finalizers.is_some());
    let (name, replica) = world.replicas.iter().next().unwrap();
    assert!(name.starts_with("v-r-") && name.len() == 12, "{name}");
    assert_eq!(replica.spec.data_directory_name, format!("v-{}", &name[4..]));
    assert_eq!(replica.spec.disk_path, format!("/disks/{}", replica.spec.disk_id));
    assert_eq!(world.plan(), [], "at rest nothing is done");
}

/// As a live upgrade or migration of Longhorn's leaves it.
#[test]
fn a_second_replica_of_a_directory_serves_nobody_and_goes_once_its_manager_leaves_the_directory() {
    let mut world = World::new(VolumeSpec::default());
    world.settle();
    world.crowded = true;
    let first = world.replica_on("n1");
    let second = "v-r-00000000";
    let mut spec = world.replicas[&first].spec.clone();
    (spec.active, spec.healthy_at) = (false, "2026-01-01T00:00:00Z".into());
    world.replicas.insert(second.into(), Replica::new(second, spec));
    world.replicas.get_mut(&first).unwrap().spec.healthy_at = "2026-01-01T00:00:00Z".into();
    world.attach("n1");
    assert_eq!(world.status().state, VolumeState::Attached);
    assert!(!world.first_told.iter().any(|name| name == second), "{:?}", world.first_told);
    assert_eq!(world.replicas[second].spec.desire_state, DesireState::Stopped);
    assert_eq!(world.replicas.len(), 4, "a manager of before would remove what both have");
    for node in world.cluster.nodes.values_mut() {
        node.programs.insert("longhorn:1".into());
    }
    world.pass(60);
    assert_eq!(world.nodes(), ["n1", "n2", "n3"]);
    assert!(world.replicas.contains_key(&first), "the one that serves stays");
}

#[test]
fn a_decision_made_again_before_it_is_seen_makes_the_same_replicas() {
    let world = World::new(VolumeSpec::default());
    let made = |actions: Vec<Action>| -> Vec<String> {
        let name = |a| if let Action::CreateReplica(name, _) = a { Some(name) } else { None };
        actions.into_iter().filter_map(name).collect()
    };
    let first = made(world.plan());
    assert_eq!(first.len(), 3);
    assert_eq!(first, made(world.plan()));
}

#[test]
fn without_room_for_all_it_starts_with_fewer_or_waits_as_the_setting_says() {
    for (degraded, replicas, state) in
        [("true", 2, VolumeState::Detached), ("false", 0, VolumeState::Creating)]
    {
        let mut world = World::new(VolumeSpec::default());
        world.settings = Settings::of([("allow-volume-creation-with-degraded-availability", degraded)]);
        for n in ["n3", "n4"] {
            world.cluster.nodes.get_mut(n).unwrap().schedulable = false;
        }
        world.settle();
        assert_eq!((world.replicas.len(), world.status().state), (replicas, state));
        let status = world.status();
        let scheduled = status.conditions.get_condition(SCHEDULED).unwrap();
        assert_eq!(scheduled.status, "False");
        assert!(scheduled.message.contains("takes no new replicas"), "{}", scheduled.message);
        assert_eq!(world.told.iter().filter(|r| **r == "ReplicaSchedulingFailure").count(), 1);
        assert!(world.plan().iter().any(|a| matches!(a, Action::LookAgain(_))));
    }
}

#[test]
fn an_engine_that_has_not_told_of_its_replicas_is_no_reason_to_call_them_failed() {
    for (quorum, relays) in [(Quorum::Any, false), (Quorum::Any, true), (Quorum::Unsafe, true)] {
        let mut world = World::new(VolumeSpec { quorum, ..VolumeSpec::default() });
        world.settle();
        world.attach("n1");
        assert_eq!(world.status().robustness, Robustness::Healthy);
        let engine = world.engines.values_mut().next().unwrap();
        if relays {
            engine.spec.relay_from = "unix:/relay".into();
        }
        let status = engine.status.as_mut().unwrap();
        status.replica_mode_map.clear();
        status.relaying = relays;
        let (told, failed) = (
            |a: &Action| matches!(a, Action::Tell(e) if e.warning),
            |a: &Action| matches!(a, Action::SetReplica(_, spec) if !spec.failed_at.is_empty()),
        );
        let plan = world.plan();
        assert!(!plan.iter().any(|a| told(a) || failed(a)), "{quorum:?} {relays}: {plan:#?}");
    }
}

#[test]
fn what_is_not_built_is_refused_before_anything_exists() {
    use crate::api::DataEngine;
    type Case = (fn(&mut VolumeSpec), &'static str);
    let cases: &[Case] = &[
        (|v| v.from_backup = "s3://b@r/?backup=x&volume=y".into(), "fromBackup"),
        (|v| v.data_source = "bak://other/b".into(), "dataSource"),
        (|v| v.encrypted = true, "encryption"),
        (|v| v.backing_image = "debian".into(), "backing images"),
        (|v| v.data_engine = DataEngine::V2, "v2 data engine"),
        (|v| v.frontend = Frontend::Nvmf, "nvmf"),
    ];
    for (change, says) in cases {
        let mut spec = VolumeSpec::default();
        change(&mut spec);
        let mut world = World::new(spec);
        world.settle();
        assert!(world.replicas.is_empty(), "{says}");
        let condition = world.status().conditions.get_condition(SCHEDULED).unwrap().clone();
        assert!(condition.status == "False" && condition.message.contains(says), "{condition:?}");
        assert_eq!(world.told, ["NotBuilt"]);
        world.attach("n1");
        assert!(world.replicas.is_empty() && world.status().state == VolumeState::Creating);
    }
}

#[test]
fn a_volume_that_longhorn_has_restored_from_a_backup_is_one_as_any_other() {
    let restored = |begun: bool, due: bool| {
        let mut world = World::attached_to("n1");
        world.attach("");
        let volume = world.volume_mut();
        volume.spec.from_backup = "s3://b@r/?backup=x&volume=y".into();
        let status = volume.status.as_mut().unwrap();
        (status.restore_initiated, status.restore_required) = (begun, due);
        world.attach("n1");
        world
    };
    assert_eq!(restored(true, false).status().state, VolumeState::Attached);
    for (begun, due) in [(true, true), (false, true), (false, false)] {
        let world = restored(begun, due);
        assert_eq!(world.status().state, VolumeState::Detached, "half a backup, for all that is known");
        let condition = world.status().conditions.get_condition(SCHEDULED).unwrap().clone();
        assert!(condition.message.contains("fromBackup"), "{condition:?}");
    }
    let mut empty = World::new(VolumeSpec { from_backup: "s3://b".into(), ..VolumeSpec::default() });
    empty.volume_mut().status = Some(VolumeStatus { restore_initiated: true, ..VolumeStatus::default() });
    empty.settle();
    assert!(empty.replicas.is_empty(), "an empty volume would be handed out for it");
}

#[test]
fn attach_write_detach_and_elsewhere() {
    let mut world = World::attached_to("n1");
    let status = world.status();
    assert_eq!((status.robustness, status.current_node_id.as_str()), (Robustness::Healthy, "n1"));
    assert_eq!(world.engine().spec.replica_address_map.len(), 3);
    assert_eq!(world.plan(), [], "at rest nothing is done");
    // To another node it goes by way of being detached, which its attachment's controller asks for.
    world.attach("");
    assert_eq!(world.status().state, VolumeState::Detached);
    assert_eq!(world.status().current_node_id, "");
    let stopped = |r: &Replica| r.spec.desire_state == DesireState::Stopped;
    assert!(world.replicas.values().all(stopped));
    world.attach("n4");
    assert_eq!(world.status().current_node_id, "n4");
    assert_eq!(world.engine().spec.node_id, "n4");
}

#[test]
fn an_engine_has_its_volumes_limits_for_snapshots_from_the_first_and_follows_them() {
    let limited = VolumeSpec { snapshot_max_size: Int64Text(300), ..VolumeSpec::default() };
    let mut world = World::new(limited);
    world.settings = Settings::of([("snapshot-max-count", "100")]);
    world.settle();
    let limits = |world: &World| {
        let spec = &world.engine().spec;
        (spec.snapshot_max_count, spec.snapshot_max_size)
    };
    assert_eq!(limits(&world), (100, Int64Text(300)), "the setting, where the volume says nothing");
    world.attach("n1");
    world.volume_mut().spec.snapshot_max_count = 7;
    world.volume_mut().spec.snapshot_max_size = Int64Text(0);
    world.settle();
    assert_eq!(limits(&world), (7, Int64Text(0)), "while it is up");
    assert_eq!(world.plan(), [], "at rest nothing is done");
}

#[test]
fn an_engine_is_ended_before_its_replicas_and_before_the_next_one_starts() {
    let mut world = World::attached_to("n1");
    world.volume_mut().spec.node_id = "n2".into();
    for action in world.plan() {
        world.carry_out(action);
    }
    assert_eq!(world.engine().spec.node_id, "n1", "it still runs there");
    assert_eq!(world.engine().spec.desire_state, DesireState::Stopped);
    assert!(world.replicas.values().all(|r| r.spec.desire_state == DesireState::Running));
    assert_eq!(world.status().state, VolumeState::Detaching);
    world.settle();
    assert_eq!(world.status().current_node_id, "n2");
}

#[test]
fn the_first_start_waits_for_every_replica_and_a_later_one_only_for_a_while() {
    let mut world = World::new(VolumeSpec::default());
    world.settle();
    let away = world.replica_on("n3");
    world.up.remove("n3");
    world.settings = Settings::of([("auto-salvage", "false")]);
    world.volume_mut().spec.node_id = "n1".into();
    for action in world.plan() {
        world.carry_out(action);
    }
    // A replica that nobody can reach counts as failed; one that is slow does not.
    assert!(!world.replicas[&away].spec.failed_at.is_empty());

    let mut slow = World::new(VolumeSpec::default());
    slow.settle();
    slow.volume_mut().spec.node_id = "n1".into();
    let name = slow.replica_on("n2");
    let start = |world: &mut World| {
        for _ in 0..5 {
            for action in world.plan() {
                world.carry_out(action);
            }
            for (n, replica) in &mut world.replicas {
                let state = if *n == name { InstanceState::Starting } else { InstanceState::Running };
                replica.status = Some(ReplicaStatus {
                    current_state: state,
                    address: n.clone(),
                    ..ReplicaStatus::default()
                });
            }
        }
        world.engine().spec.desire_state
    };
    assert_eq!(start(&mut slow), DesireState::Stopped);
    slow.now += SignedDuration::from_secs(21);
    assert_eq!(start(&mut slow), DesireState::Stopped, "the one that is away may have the data");
    let members = slow.replicas.keys().cloned().collect();
    slow.volume_mut().status.as_mut().unwrap().epoch =
        Some(EpochRecord { members, ..EpochRecord::default() });
    assert_eq!(start(&mut slow), DesireState::Running);
}

#[test]
fn a_failed_replica_is_waited_for_and_then_replaced() {
    let mut world = World::attached_to("n1");
    let lost = world.replica_on("n3");
    world.up.remove("n3");
    world.cluster.nodes.get_mut("n3").unwrap().schedulable = false;
    world.settle();
    assert_eq!(world.status().robustness, Robustness::Degraded);
    assert!(!world.status().last_degraded_at.is_empty());
    assert!(!world.replicas[&lost].spec.failed_at.is_empty());
    assert!(world.plan().iter().any(|a| matches!(a, Action::LookAgain(_))));
    world.pass(599);
    assert_eq!(world.nodes(), ["n1", "n2", "n3"]);
    world.pass(2);
    assert_eq!(world.nodes(), ["n1", "n2", "n4"], "the new one is filled, the lost one is given up");
    assert_eq!(world.status().robustness, Robustness::Healthy);
    assert!(world.status().last_degraded_at.is_empty());
}

#[test]
fn a_replica_that_comes_back_in_time_is_kept() {
    let mut world = World::attached_to("n1");
    world.up.remove("n3");
    world.settle();
    world.pass(300);
    world.up.insert("n3".into());
    world.settle();
    assert_eq!((world.nodes(), world.status().robustness), (vec!["n1", "n2", "n3"], Robustness::Healthy));
    assert!(world.replicas.values().all(|r| r.spec.failed_at.is_empty()));
}

#[test]
fn one_rebuild_at_a_time() {
    let mut world = World::attached_to("n1");
    world.rebuilds_end = false;
    world.volume_mut().spec.number_of_replicas = 4;
    world.settle();
    assert_eq!(world.replicas.len(), 4);
    world.cluster.nodes.insert("n5".into(), world.cluster.nodes["n4"].clone());
    world.up.insert("n5".into());
    world.volume_mut().spec.number_of_replicas = 5;
    world.settle();
    assert_eq!(world.replicas.len(), 4, "the fourth is being filled");
    assert_eq!(world.status().robustness, Robustness::Degraded);
    world.rebuilds_end = true;
    world.settle();
    assert_eq!((world.replicas.len(), world.status().robustness), (5, Robustness::Healthy));
}

#[test]
fn fewer_replicas_are_asked_for() {
    let mut world = World::attached_to("n1");
    world.volume_mut().spec.number_of_replicas = 1;
    world.settle();
    assert_eq!((world.replicas.len(), world.status().robustness), (1, Robustness::Healthy));
    let mut resting = World::attached_to("n1");
    resting.attach("");
    resting.volume_mut().spec.number_of_replicas = 1;
    resting.settle();
    assert_eq!(resting.replicas.len(), 3, "nobody knows which ones hold everything");
}

#[test]
fn a_replica_that_came_in_sync_unseen_counts_all_the_same() {
    let mut world = World::attached_to("n1");
    let unseen = world.replica_on("n2");
    world.attach("");
    world.replicas.get_mut(&unseen).unwrap().spec.healthy_at.clear();
    world.settle();
    assert_eq!(world.replicas[&unseen].spec.healthy_at, world.replicas[&unseen].spec.last_healthy_at);
    assert!(!world.replicas[&unseen].spec.healthy_at.is_empty());
    let epoch = world.volume_mut().status.as_mut().unwrap().epoch.as_mut().unwrap();
    epoch.members.retain(|m| *m != unseen);
    world.replicas.get_mut(&unseen).unwrap().spec.healthy_at.clear();
    world.settle();
    assert_eq!(world.replicas[&unseen].spec.healthy_at, "", "it is no member");
}

#[test]
fn an_engine_lets_go_of_a_replica_before_it_is_deleted() {
    let mut world = World::attached_to("n1");
    world.volume_mut().spec.number_of_replicas = 2;
    let actions = world.plan();
    assert!(!actions.iter().any(|a| matches!(a, Action::DeleteReplica(_))), "{actions:?}");
    let maps = actions.iter().filter_map(|a| match a {
        Action::SetEngine(_, spec) => Some(spec.replica_address_map.len()),
        _ => None,
    });
    assert_eq!(maps.collect::<Vec<_>>(), [2]);
    world.settle();
    assert_eq!(world.replicas.len(), 2);
}

#[test]
fn an_emptied_disk_is_left_before_its_replica_goes() {
    let mut world = World::attached_to("n1");
    world.rebuilds_end = false;
    world.cluster.nodes.get_mut("n2").unwrap().emptying = Emptying::All;
    world.settle();
    assert_eq!(world.nodes(), ["n1", "n2", "n3", "n4"], "the old one stays while the new one is filled");
    world.rebuilds_end = true;
    world.settle();
    assert_eq!((world.nodes(), world.status().robustness), (vec!["n1", "n3", "n4"], Robustness::Healthy));
}

#[test]
fn an_emptied_disk_of_a_volume_that_rests_has_it_attached() {
    let mut world = World::attached_to("n1");
    world.attach("");
    world.cluster.nodes.get_mut("n2").unwrap().emptying = Emptying::All;
    let actions = world.plan();
    let asks = |a: &Action| matches!(a, Action::Ticket(TicketType::VolumeEviction, Some(_)));
    assert!(actions.iter().any(asks), "{actions:?}");
}

#[test]
fn a_volume_that_was_never_used_leaves_an_emptied_node_without_being_attached() {
    let mut world = World::new(VolumeSpec::default());
    world.settle();
    assert_eq!(world.nodes(), ["n1", "n2", "n3"]);
    world.cluster.nodes.get_mut("n2").unwrap().emptying = Emptying::All;
    world.settle();
    assert_eq!(world.nodes(), ["n1", "n3", "n4"]);
    assert!(world.wishes.is_empty(), "{:?}", world.wishes);
}

#[test]
fn a_drained_node_is_left_by_the_last_replica_alone_and_to_the_end() {
    let spread = |replicas: i64| {
        let mut world = World::attached_to("n1");
        world.cluster.nodes.values_mut().for_each(|n| n.protected = true);
        world.volume_mut().spec.number_of_replicas = replicas;
        world.settle();
        world
    };
    let drain = |world: &mut World, node: &str| {
        let node = world.cluster.nodes.get_mut(node).unwrap();
        (node.emptying, node.schedulable) = (Emptying::LastReplicas, false);
        world.settle();
    };
    let mut three = spread(3);
    drain(&mut three, "n2");
    assert_eq!(three.nodes(), ["n1", "n2", "n3"], "others are on protected nodes");
    for other in ["n1", "n3"] {
        three.cluster.nodes.get_mut(other).unwrap().protected = false;
    }
    three.settle();
    assert!(!three.nodes().contains(&"n2"), "{:?}: those on the others may go at any moment", three.nodes());

    let mut unreadable = spread(3);
    unreadable.cluster.nodes.get_mut("n1").unwrap().disks.get_mut("n1-d").unwrap().broken = true;
    unreadable.cluster.nodes.get_mut("n3").unwrap().silent = true;
    drain(&mut unreadable, "n2");
    assert!(!unreadable.nodes().contains(&"n2"), "{:?}: nobody can read the others now", unreadable.nodes());

    let mut one = spread(1);
    let last = one.nodes()[0].to_owned();
    one.rebuilds_end = false;
    drain(&mut one, &last);
    assert_eq!(one.replicas.len(), 2, "the old one stays while the new one is filled");
    one.rebuilds_end = true;
    one.settle();
    assert!(one.replicas.len() == 1 && one.nodes() != [last.as_str()], "{:?}", one.nodes());
    assert_eq!(one.status().robustness, Robustness::Healthy);

    // Where a majority decides it needs two of three.
    let mut majority = spread(3);
    majority.volume_mut().spec.quorum = Quorum::Majority;
    drain(&mut majority, "n2");
    assert_eq!(majority.nodes(), ["n1", "n2", "n3"], "two are on protected nodes");
    majority.cluster.nodes.get_mut("n3").unwrap().protected = false;
    majority.rebuilds_end = false;
    majority.settle();
    assert_eq!(majority.nodes(), ["n1", "n2", "n3", "n4"], "the one on n1 is too few");
    majority.rebuilds_end = true;
    majority.settle();
    assert_eq!(
        (majority.nodes(), majority.status().robustness),
        (vec!["n1", "n3", "n4"], Robustness::Healthy)
    );

    let mut unused = World::new(VolumeSpec::default());
    unused.cluster.nodes.values_mut().for_each(|n| n.protected = true);
    unused.settle();
    drain(&mut unused, "n2");
    assert_eq!(unused.nodes(), ["n1", "n2", "n3"], "it holds nothing");
}

#[test]
fn all_replicas_failed_and_some_are_salvaged() {
    let mut world = World::attached_to("n1");
    let members: BTreeSet<String> = world.replicas.keys().cloned().collect();
    world.broken = members.clone();
    world.settle();
    assert_eq!(world.status().robustness, Robustness::Faulted);
    // Only members of the epoch that counts may be used; here one was out before the others failed.
    let out = world.replica_on("n3");
    let epoch = world.volume_mut().status.as_mut().unwrap().epoch.as_mut().unwrap();
    epoch.members = members.iter().filter(|m| **m != out).cloned().collect();
    world.attach("");
    assert_eq!(world.status().state, VolumeState::Detached);
    world.broken.clear();
    world.rebuilds_end = false;
    world.attach("n1");
    assert!(world.told.contains(&"Salvaged"));
    assert_eq!(
        (world.status().state, world.status().robustness),
        (VolumeState::Attached, Robustness::Degraded)
    );
    assert!(!world.replicas[&out].spec.failed_at.is_empty(), "it is no member");
    world.rebuilds_end = true;
    world.settle();
    assert_eq!(world.status().robustness, Robustness::Healthy);
}

#[test]
fn a_node_that_is_silent_does_not_keep_its_volume() {
    let mut world = World::attached_to("n1");
    world.up.remove("n1");
    world.cluster.nodes.get_mut("n1").unwrap().schedulable = false;
    world.settle();
    assert_eq!(world.engine().spec.node_id, "n1", "nobody asked for it elsewhere yet");
    world.attach("");
    assert_eq!(world.status().state, VolumeState::Detached);
    world.attach("n2");
    assert_eq!(world.status().state, VolumeState::Attached);
    assert_eq!(
        (world.engine().spec.node_id.as_str(), world.status().robustness),
        ("n2", Robustness::Degraded)
    );
}

#[test]
fn a_volume_stays_as_it_is_while_the_manager_of_its_node_is_silent() {
    let mut world = World::attached_to("n1");
    world.up.remove("n1");
    world.settle();
    world.pass(3600);
    let status = world.status();
    assert_eq!((status.state, status.robustness), (VolumeState::Attached, Robustness::Unknown));
    assert!(world.replicas.values().all(|r| r.spec.failed_at.is_empty()));
    assert_eq!(world.replicas.len(), 3);
    world.up.insert("n1".into());
    world.settle();
    assert_eq!(world.status().robustness, Robustness::Healthy);
}

#[test]
fn a_device_is_taken_away_only_by_attaching_anew() {
    let mut world = World::attached_to("n1");
    world.volume_mut().spec.disable_frontend = true;
    for action in world.plan() {
        world.carry_out(action);
    }
    assert_eq!(world.engine().spec.desire_state, DesireState::Stopped);
    world.settle();
    assert!(world.engine().spec.disable_frontend && world.status().frontend_disabled);
    assert_eq!(world.engine().spec.frontend, Frontend::Blockdev);
}

#[test]
fn an_engine_has_the_queues_that_its_volume_asks_for_when_it_starts() {
    let mut world = World::attached_to("n1");
    world.attach("");
    let spec = &mut world.volume_mut().spec;
    (spec.ublk_number_of_queue, spec.ublk_queue_depth) = (3, 32);
    world.attach("n2");
    let engine = &world.engine().spec;
    assert_eq!((engine.ublk_number_of_queue, engine.ublk_queue_depth), (3, 32));
}

#[test]
fn it_grows_through_its_engine() {
    let mut world = World::attached_to("n1");
    world.volume_mut().spec.size = Int64Text(200);
    for action in world.plan() {
        world.carry_out(action);
    }
    assert!(world.status().expansion_required);
    assert_eq!(world.engine().spec.volume_size, Int64Text(200));
    world.settle();
    assert!(!world.status().expansion_required);
    assert!(world.replicas.values().all(|r| r.spec.volume_size == Int64Text(200)));
}

#[test]
fn a_strictly_local_volume_has_its_replica_where_it_is_attached() {
    let spec = VolumeSpec {
        data_locality: DataLocality::StrictLocal,
        number_of_replicas: 1,
        ..VolumeSpec::default()
    };
    let mut world = World::new(spec);
    world.settle();
    assert_eq!((world.replicas.len(), world.status().state), (0, VolumeState::Detached));
    world.attach("n3");
    assert_eq!((world.nodes(), world.status().state), (vec!["n3"], VolumeState::Attached));
}

#[test]
fn a_deleted_volume_goes_engine_first_and_itself_last() {
    let mut world = World::attached_to("n1");
    let deleted = world.now;
    world.volume_mut().metadata.deletion_timestamp = Some(deleted.into());
    let first = world.plan();
    assert!(first.iter().any(|a| matches!(a, Action::SetEngine(..))), "{first:?}");
    assert!(
        !first.iter().any(|a| matches!(a, Action::DeleteReplica(_) | Action::DeleteEngine(_))),
        "{first:?}"
    );
    world.settle();
    assert!(world.volume.is_none() && world.engines.is_empty() && world.replicas.is_empty());
    assert!(world.attachment.is_none());
}

#[test]
fn an_engine_that_somebody_may_just_start_is_deleted_only_once_nobody_may() {
    let mut world = World::attached_to("n1");
    world.attach("");
    let engine = world.engines.get_mut("v-e-0").unwrap();
    // What is said of it is from before it was told to run.
    assert_eq!(engine.status.as_ref().unwrap().current_state, InstanceState::Stopped);
    (engine.spec.node_id, engine.spec.desire_state) = ("n1".into(), DesireState::Running);
    engine.status.as_mut().unwrap().owner_id = "n1".into();
    let deleted = world.now;
    world.volume_mut().metadata.deletion_timestamp = Some(deleted.into());
    let first = world.plan();
    let is_stop = |a: &Action| matches!(a, Action::SetEngine(_, e) if e.desire_state == DesireState::Stopped);
    assert!(first.iter().any(is_stop), "{first:?}");
    assert!(!first.contains(&Action::DeleteEngine("v-e-0".into())), "{first:?}");
    world.settle();
    assert!(world.volume.is_none() && world.engines.is_empty());
}

#[test]
fn a_deleted_replica_is_forgotten_with_its_node_and_not_before() {
    let mut world = World::attached_to("n1");
    let lost = world.replica_on("n3");
    let deleted = world.now;
    let replica = world.replicas.get_mut(&lost).unwrap();
    replica.metadata.deletion_timestamp = Some(deleted.into());
    replica.metadata.finalizers = Some(vec![crate::plan::FINALIZER.into()]);
    let forgets = |world: &World| world.plan().contains(&Action::ForgetReplica(lost.clone()));
    assert!(!forgets(&world), "its manager removes the data");
    world.up.remove("n3");
    assert!(!forgets(&world), "a node that is out of reach may be back");
    world.cluster.nodes.get_mut("n3").unwrap().gone = true;
    assert!(forgets(&world));
    let node = world.cluster.nodes.remove("n3").unwrap();
    assert!(forgets(&world), "nor does any Node name it");
    world.up.insert("n3".into());
    assert!(!forgets(&world), "its manager is there, and makes the Node anew");
    // It is the same for a volume that goes as a whole.
    world.up.remove("n3");
    world.cluster.nodes.insert("n3".into(), node);
    world.volume_mut().metadata.deletion_timestamp = Some(deleted.into());
    world.volume_mut().spec.node_id.clear();
    world.engines.clear();
    assert!(forgets(&world));
    world.cluster.nodes.get_mut("n3").unwrap().gone = false;
    assert!(!forgets(&world));
}

#[test]
fn an_engine_starts_with_a_member_and_hears_of_those_that_come_later() {
    let mut world = World::new(VolumeSpec::default());
    world.settle();
    let names: Vec<String> = world.replicas.keys().cloned().collect();
    let [filled, member, other] = &names[..] else { panic!("{names:?}") };
    world.replicas.remove(other);
    world.volume_mut().spec.number_of_replicas = 2;
    let epoch = EpochRecord { members: vec![member.clone()], ..EpochRecord::default() };
    world.volume_mut().status.as_mut().unwrap().epoch = Some(epoch);
    world.replicas.get_mut(member).unwrap().spec.healthy_at = "2023-01-01T00:00:00Z".into();
    world.volume_mut().spec.node_id = "n1".into();
    let look = |world: &mut World, of_member: InstanceState| {
        for action in world.plan() {
            world.carry_out(action);
        }
        for (name, state) in [(filled, InstanceState::Running), (member, of_member)] {
            let address =
                if state == InstanceState::Running { format!("unix:/{name}") } else { String::new() };
            let status = ReplicaStatus { current_state: state, address, ..ReplicaStatus::default() };
            world.replicas.get_mut(name).unwrap().status = Some(status);
        }
    };
    look(&mut world, InstanceState::Starting);
    look(&mut world, InstanceState::Starting);
    world.now += SignedDuration::from_secs(25);
    look(&mut world, InstanceState::Starting);
    assert_eq!(
        world.engine().spec.desire_state,
        DesireState::Stopped,
        "none of those that run holds anything"
    );
    look(&mut world, InstanceState::Running);
    look(&mut world, InstanceState::Running);
    assert_eq!(world.engine().spec.desire_state, DesireState::Running);
    // While it starts the member comes back elsewhere.
    let engine = world.engines.get_mut("v-e-0").unwrap();
    let starting = InstanceState::Starting;
    engine.status =
        Some(EngineStatus { owner_id: "n1".into(), current_state: starting, ..EngineStatus::default() });
    world.replicas.get_mut(member).unwrap().status.as_mut().unwrap().address = "unix:/elsewhere".into();
    for action in world.plan() {
        world.carry_out(action);
    }
    assert_eq!(world.engine().spec.replica_address_map[member], "unix:/elsewhere");
}

#[test]
fn members_that_failed_are_salvaged_whatever_was_being_filled_from_them() {
    let mut world = World::attached_to("n1");
    let filled = world.replica_on("n3");
    let members: BTreeSet<String> = world.replicas.keys().filter(|n| **n != filled).cloned().collect();
    world.rebuilds_end = false;
    world.attach("");
    let epoch = EpochRecord { members: members.iter().cloned().collect(), ..EpochRecord::default() };
    world.volume_mut().status.as_mut().unwrap().epoch = Some(epoch);
    world.replicas.get_mut(&filled).unwrap().spec.healthy_at.clear();
    let failed = crate::plan::written(world.now);
    for name in &members {
        world.replicas.get_mut(name).unwrap().spec.failed_at.clone_from(&failed);
    }
    world.attach("n1");
    assert_eq!(world.status().state, VolumeState::Attached);
    assert!(world.told.contains(&"Salvaged"));
}

#[test]
fn a_replica_that_does_not_end_keeps_its_volume_for_a_minute_and_one_that_failed_not_at_all() {
    let mut world = World::attached_to("n1");
    let stuck = world.replica_on("n3");
    world.stuck.insert(stuck.clone());
    world.attach("");
    assert_eq!(world.status().state, VolumeState::Detaching);
    assert!(world.plan().iter().any(|a| matches!(a, Action::LookAgain(_))));
    world.pass(59);
    assert_eq!(world.status().state, VolumeState::Detaching);
    world.pass(2);
    assert_eq!(world.status().state, VolumeState::Detached);
    assert_eq!(world.told.iter().filter(|r| **r == "ReplicasNotEnded").count(), 1);
    assert!(world.status().conditions.get_condition(ENDED).is_none());
    world.pass(10);
    assert_eq!(world.plan(), [], "at rest nothing is done");
    // The next time is counted anew.
    world.stuck.clear();
    world.attach("n1");
    world.stuck.insert(stuck.clone());
    world.attach("");
    assert_eq!(world.status().state, VolumeState::Detaching);
    let failed = crate::plan::written(world.now);
    world.replicas.get_mut(&stuck).unwrap().spec.failed_at = failed;
    world.settle();
    assert_eq!(world.status().state, VolumeState::Detached);
}
