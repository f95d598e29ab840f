//! Replicas that move though nothing is wrong with them: to spread them better, and to be where the volume is used.

use super::*;
use crate::schedule::{Disk, Node};

/// With two replicas in one zone while another one has none, since that had no room before.
fn crowded(balance: &str) -> World {
    let mut world = World::new(VolumeSpec { number_of_replicas: 2, ..VolumeSpec::default() });
    for node in ["n1", "n2", "n3"] {
        world.cluster.nodes.get_mut(node).unwrap().zone = "a".into();
    }
    world.cluster.nodes.get_mut("n4").unwrap().schedulable = false;
    world.settings = Settings::of([("replica-auto-balance", balance)]);
    world.settle();
    world.attach("n1");
    assert_eq!(world.nodes(), ["n1", "n2"]);
    world.cluster.nodes.get_mut("n4").unwrap().schedulable = true;
    world
}

#[test]
fn replicas_are_spread_and_the_old_one_goes_once_the_new_one_is_filled() {
    for balance in ["least-effort", "best-effort"] {
        let mut world = crowded(balance);
        world.rebuilds_end = false;
        world.settle();
        assert_eq!(world.nodes(), ["n1", "n2", "n4"], "{balance}: it is being filled");
        assert_eq!(world.status().robustness, Robustness::Healthy, "{balance}");
        assert_eq!(
            world.told.iter().filter(|t| **t == "Balancing").count(),
            1,
            "{balance}: {:?}",
            world.told
        );
        world.rebuilds_end = true;
        world.settle();
        assert!(world.nodes().contains(&"n4") && world.replicas.len() == 2, "{balance}: {:?}", world.nodes());
        let told = world.told.len();
        world.pass(3600);
        assert_eq!((world.told.len(), world.plan()), (told, vec![]), "{balance}: at rest nothing is done");
    }
    let mut alone = crowded("disabled");
    alone.settle();
    assert_eq!(alone.nodes(), ["n1", "n2"]);
}

#[test]
fn one_that_moves_in_and_fails_goes_and_one_that_is_not_needed_any_more_too() {
    let mut world = crowded("least-effort");
    world.rebuilds_end = false;
    world.settle();
    let coming = world.replica_on("n4");
    world.broken.insert(coming.clone());
    world.settle();
    world.pass(599);
    let begun = |world: &World| world.told.iter().filter(|t| **t == "Balancing").count();
    assert!(
        world.replicas.contains_key(&coming) && begun(&world) == 1,
        "that disk is not filled again at once"
    );
    assert!(world.plan().iter().any(|a| matches!(a, Action::LookAgain(_))));
    world.cluster.nodes.get_mut("n4").unwrap().schedulable = false;
    world.pass(1);
    assert_eq!(world.nodes(), ["n1", "n2"]);

    let mut fewer = crowded("least-effort");
    fewer.rebuilds_end = false;
    fewer.settle();
    fewer.volume_mut().spec.number_of_replicas = 1;
    fewer.settle();
    assert_eq!(fewer.replicas.len(), 2, "one that holds everything, and the one that is being filled");
    fewer.rebuilds_end = true;
    fewer.settle();
    assert_eq!(fewer.replicas.len(), 1);
}

#[test]
fn two_replicas_that_came_to_be_on_one_node_part_where_the_volume_keeps_them_apart() {
    let together = |change: fn(&mut World)| {
        let mut world = World::attached_to("n1");
        let moved = world.replica_on("n3");
        let spec = &mut world.replicas.get_mut(&moved).unwrap().spec;
        (spec.node_id, spec.disk_id) = ("n2".into(), "n2-d".into());
        world.crowded = true;
        change(&mut world);
        world.settle();
        world
    };
    let world = together(|_| {});
    assert_eq!((world.nodes(), world.status().robustness), (vec!["n1", "n2", "n3"], Robustness::Healthy));
    assert!(world.told.contains(&"Balancing"));
    assert_eq!(world.plan(), [], "at rest nothing is done");
    type Case = (&'static str, fn(&mut World));
    let cases: &[Case] = &[
        ("it may be so", |w| w.settings = Settings::of([("replica-soft-anti-affinity", "true")])),
        ("no other node takes one", |w| {
            for node in ["n3", "n4"] {
                w.cluster.nodes.get_mut(node).unwrap().schedulable = false;
            }
        }),
    ];
    for (what, change) in cases {
        let world = together(*change);
        assert_eq!(world.nodes(), ["n1", "n2", "n2"], "{what}");
    }
}

#[test]
fn a_node_on_which_a_replica_never_came_up_gets_no_second_one_before_that_is_given_up() {
    let mut world = World::attached_to("n1");
    // n3 is to be emptied, and n4, the only place for what takes over, starts nothing.
    world.cluster.nodes.get_mut("n3").unwrap().emptying = Emptying::All;
    world.rebuilds_end = false;
    world.settle();
    let made = world.replica_on("n4");
    world.cut_off.insert(made.clone());
    world.pass(1);
    for _ in 0..9 {
        world.pass(60);
    }
    let failed_at = |world: &World| world.replicas[&world.replica_on("n4")].spec.failed_at.clone();
    let first = failed_at(&world);
    assert!(!first.is_empty());
    assert_eq!(world.nodes(), ["n1", "n2", "n3", "n4"], "one a minute would be made");
    // Then it goes, long before a replica that holds something would, and another one is made in its place.
    world.pass(120);
    assert_ne!(failed_at(&world), first, "another one is there, or it would keep its node for two days");
    assert_eq!(world.nodes(), ["n1", "n2", "n3", "n4"]);
    world.cut_off.clear();
    world.rebuilds_end = true;
    world.pass(120);
    assert_eq!((world.nodes(), world.status().robustness), (vec!["n1", "n2", "n4"], Robustness::Healthy));
}

/// How many replicas are made in so many minutes of which none is ever filled.
fn made_in_vain(world: &mut World, minutes: usize) -> usize {
    let (known, before) = (world.replicas.clone(), world.made);
    for _ in 0..minutes * 12 {
        world.pass(5);
        world.cut_off.extend(world.replicas.keys().filter(|name| !known.contains_key(*name)).cloned());
    }
    world.made - before
}

#[test]
fn replicas_that_cannot_be_filled_are_made_seldom_however_short_failed_ones_are_waited_for() {
    let wait = ("replica-replenishment-wait-interval", "0");
    let mut missing = World::attached_to("n1");
    missing.settings = Settings::of([wait]);
    missing.rebuilds_end = false;
    missing.up.remove("n3");
    missing.cluster.nodes.get_mut("n3").unwrap().schedulable = false;
    let mut leaving = World::attached_to("n1");
    leaving.settings = Settings::of([wait]);
    leaving.rebuilds_end = false;
    leaving.cluster.nodes.get_mut("n3").unwrap().emptying = Emptying::All;
    let mut moving = crowded("least-effort");
    moving.settings = Settings::of([wait, ("replica-auto-balance", "least-effort")]);
    moving.rebuilds_end = false;
    for (what, world) in [("missing", &mut missing), ("leaving", &mut leaving), ("moving", &mut moving)] {
        let made = made_in_vain(world, 10);
        assert!((1..=4).contains(&made), "{what}: {made}");
        let later = made_in_vain(world, 60);
        assert!((1..=6).contains(&later), "{what}: another one is tried, and ever more seldom: {later}");
        world.cut_off.clear();
        world.rebuilds_end = true;
        world.settle();
        world.pass(3600);
        world.pass(3600);
        assert_eq!(world.status().robustness, Robustness::Healthy, "{what}");
        assert!(world.replicas.values().all(|r| r.spec.rebuild_retry_count == 0), "{what}");
    }
}

#[test]
fn one_that_failed_before_it_was_filled_goes_once_another_one_is_there() {
    let mut world = World::attached_to("n1");
    world.settings = Settings::of([("replica-replenishment-wait-interval", "0")]);
    world.rebuilds_end = false;
    let disk = Disk { schedulable: true, maximum: 1000, available: 1000, ..Disk::default() };
    world.cluster.nodes.get_mut("n4").unwrap().disks.insert("n4-e".into(), disk);
    world.up.remove("n3");
    world.cluster.nodes.get_mut("n3").unwrap().schedulable = false;
    world.settle();
    let first = world.replica_on("n4");
    world.cut_off.insert(first.clone());
    world.pass(1);
    world.pass(59);
    assert!(world.replicas.contains_key(&first) && world.nodes() == ["n1", "n2", "n3", "n4"]);
    world.pass(2);
    let second = world.replica_on("n4");
    assert_ne!(first, second);
    let spec = &world.replicas[&second].spec;
    assert_eq!((spec.disk_id.as_str(), spec.rebuild_retry_count), ("n4-e", 1), "on another disk");
}

/// A replica is to be made anew on n3, whose disk has this much in all, and never serves.
fn never_served(maximum: u64) -> (World, String) {
    let mut world = World::attached_to("n1");
    world.cluster.nodes.get_mut("n4").unwrap().schedulable = false;
    let lost = world.replica_on("n3");
    world.replicas.remove(&lost);
    world.rebuilds_end = false;
    let disk = world.cluster.nodes.get_mut("n3").unwrap().disks.get_mut("n3-d").unwrap();
    disk.maximum = maximum;
    for action in world.plan() {
        world.carry_out(action);
    }
    let first = world.replica_on("n3");
    world.broken.insert(first.clone());
    world.settle();
    promise(&mut world);
    assert!(!world.replicas[&first].spec.failed_at.is_empty());
    (world, first)
}

/// What is promised of n3's disk is what is there.
fn promise(world: &mut World) {
    let there = world.replicas.values().filter(|r| r.spec.node_id == "n3").count();
    let disk = world.cluster.nodes.get_mut("n3").unwrap().disks.get_mut("n3-d").unwrap();
    disk.scheduled = 100 * u64::try_from(there).unwrap();
}

#[test]
fn one_that_never_served_gives_way_where_only_its_own_promise_keeps_out_the_next() {
    let (mut world, first) = never_served(150);
    world.pass(599);
    promise(&mut world);
    assert!(world.replicas.contains_key(&first), "it has its time");
    world.pass(1);
    assert_eq!((world.nodes(), world.made), (vec!["n1", "n2"], 4), "it went first");
    promise(&mut world);
    world.broken.clear();
    world.rebuilds_end = true;
    world.pass(60);
    assert_eq!((world.nodes(), world.status().robustness), (vec!["n1", "n2", "n3"], Robustness::Healthy));
}

#[test]
fn one_that_never_served_stays_where_another_one_has_no_room_without_it_either() {
    let (mut small, first) = never_served(150);
    small.cluster.nodes.get_mut("n3").unwrap().disks.get_mut("n3-d").unwrap().maximum = 99;
    small.pass(600);
    small.pass(600);
    assert!(small.replicas.contains_key(&first));
}

#[test]
fn one_that_runs_gives_way_to_none_on_its_disk() {
    let (mut runs, first) = never_served(150);
    runs.broken.clear();
    runs.cut_off.insert(first.clone());
    runs.settle();
    runs.pass(600);
    runs.pass(600);
    assert!(runs.replicas.contains_key(&first), "its engine takes it as soon as it can be filled");
}

#[test]
fn one_that_was_in_an_epoch_gives_way_to_none_though_nobody_saw_it_filled() {
    type Case = (&'static str, fn(&mut World, &str));
    let cases: &[Case] = &[
        ("the authority", |w, name| {
            let epoch = w.volume_mut().status.as_mut().unwrap().epoch.as_mut().unwrap();
            epoch.members.push(name.to_owned());
        }),
        ("the replica", |w, name| {
            w.replicas.get_mut(name).unwrap().status.as_mut().unwrap().epoch_recorded = true;
        }),
    ];
    for (who, tells) in cases {
        let (mut world, first) = never_served(150);
        tells(&mut world, &first);
        world.now += SignedDuration::from_secs(600);
        let actions = world.plan();
        assert!(!actions.contains(&Action::DeleteReplica(first)), "{who}: {actions:?}");
    }
}

#[test]
fn however_short_failed_ones_are_waited_for_one_gives_way_seldom() {
    let (mut world, _) = never_served(150);
    world.settings = Settings::of([("replica-replenishment-wait-interval", "0")]);
    let before = world.made;
    for _ in 0..720 {
        world.pass(5);
        promise(&mut world);
        world.broken =
            world.replicas.iter().filter(|(_, r)| r.spec.node_id == "n3").map(|(n, _)| n.clone()).collect();
    }
    let made = world.made - before;
    assert!((1..=6).contains(&made), "{made} in an hour");
}

#[test]
fn replicas_on_a_node_that_is_gone_keep_nobody_waiting_for_another_try() {
    let mut world = World::attached_to("n1");
    world.cluster.nodes.get_mut("n4").unwrap().schedulable = false;
    let lost = world.replica_on("n3");
    world.cut_off.insert(lost.clone());
    world.settle();
    // It is the seventh that was tried.
    let spec = &mut world.replicas.get_mut(&lost).unwrap().spec;
    assert!(!spec.failed_at.is_empty());
    spec.healthy_at.clear();
    spec.rebuild_retry_count = 6;
    let zone = "n3".to_owned();
    world.cluster.nodes.remove("n3");
    world.up.remove("n3");
    let disk = Disk { schedulable: true, maximum: 1000, available: 1000, ..Disk::default() };
    let disks = [("n5-d".to_owned(), disk)].into();
    world.cluster.nodes.insert("n5".into(), Node { zone, schedulable: true, disks, ..Node::default() });
    world.up.insert("n5".into());
    world.settle();
    assert!(!world.nodes().contains(&"n5"), "it may be back");
    world.pass(600);
    assert!(world.nodes().contains(&"n5"), "{:?}", world.nodes());
}

fn near(replicas: i64) -> World {
    let locality = DataLocality::BestEffort;
    let mut world = World::new(VolumeSpec {
        data_locality: locality,
        number_of_replicas: replicas,
        ..VolumeSpec::default()
    });
    world.settle();
    world
}

#[test]
fn best_effort_locality_brings_a_replica_to_where_the_volume_is_used() {
    let mut world = near(2);
    world.rebuilds_end = false;
    world.attach("n1");
    assert_eq!(world.nodes(), ["n1", "n2"], "one is there");
    world.attach("");
    world.attach("n4");
    assert_eq!(world.nodes(), ["n1", "n2", "n4"], "it is being filled");
    world.rebuilds_end = true;
    world.settle();
    assert!(world.nodes().contains(&"n4") && world.replicas.len() == 2, "{:?}", world.nodes());
    assert_eq!(world.status().robustness, Robustness::Healthy);
    assert_eq!(world.plan(), [], "at rest nothing is done");
}

#[test]
fn what_keeps_a_replica_from_where_the_volume_is_used() {
    type Case = (&'static str, fn(&mut World));
    let cases: &[Case] = &[
        ("no room there", |w| w.cluster.nodes.get_mut("n4").unwrap().schedulable = false),
        ("another locality", |w| w.volume_mut().spec.data_locality = DataLocality::Disabled),
        ("nobody uses it: it is attached without a device", |w| w.volume_mut().spec.disable_frontend = true),
        ("as many are filled there as may be", |w| w.filling = [("n4".into(), 5)].into()),
        ("one of the others does not hold everything", |w| {
            w.attach("n1");
            w.attach("");
            let one = w.replica_on("n1");
            w.cut_off.insert(one);
        }),
    ];
    for (what, change) in cases {
        let mut world = near(2);
        change(&mut world);
        world.attach("n4");
        assert_eq!(world.nodes(), ["n1", "n2"], "{what}");
        assert_eq!(world.status().state, VolumeState::Attached, "{what}");
    }
}

#[test]
fn a_replica_that_leaves_before_it_was_filled_is_not_filled_first() {
    let mut world = World::attached_to("n1");
    let lost = world.replica_on("n2");
    world.replicas.remove(&lost);
    world.rebuilds_end = false;
    world.cluster.nodes.get_mut("n2").unwrap().schedulable = false;
    world.settle();
    assert_eq!(world.nodes(), ["n1", "n3", "n4"], "it is being filled on n4");
    world.cluster.nodes.get_mut("n2").unwrap().schedulable = true;
    world.cluster.nodes.get_mut("n4").unwrap().emptying = Emptying::All;
    world.settle();
    assert_eq!(world.nodes(), ["n1", "n2", "n3"], "nothing is there to wait for");
}

/// A volume that is being rebuilt at rest, attached to the first of two nodes with a replica that counts.
fn rebuilt_at_rest() -> (World, &'static str, &'static str) {
    let mut world = World::attached_to("n1");
    world.attach("");
    let lost = world.replica_on("n3");
    world.replicas.remove(&lost);
    world.rebuilds_end = false;
    world.settings = Settings::of([("offline-replica-rebuilding", "true")]);
    world.settle();
    world.pass(15);
    let (_, wish) = world.wishes.last().unwrap();
    let wish = wish.clone().expect("a ticket");
    assert!(wish.parameters.contains_key(FILLS_ON), "{wish:?}");
    let (there, other) = if wish.node == "n1" { ("n1", "n2") } else { ("n2", "n1") };
    world.attach(there);
    (world, there, other)
}

#[test]
fn a_rebuild_at_rest_leaves_a_node_that_is_cordoned_if_it_can_go_on_elsewhere() {
    let (mut world, there, other) = rebuilt_at_rest();
    world.cluster.nodes.get_mut(there).unwrap().cordoned = true;
    let leaves = Action::Ticket(TicketType::VolumeRebuilding, None);
    assert!(world.plan().contains(&leaves), "{:?}", world.plan());
    world.settle();
    assert!(world.told.contains(&"OfflineRebuildingInterrupted"), "{:?}", world.told);
    world.attach("");
    world.pass(15);
    let (_, wish) = world.wishes.last().unwrap();
    assert_eq!(wish.as_ref().map(|w| w.node.as_str()), Some(other));

    let (mut only, ..) = rebuilt_at_rest();
    only.cluster.nodes.values_mut().for_each(|n| n.cordoned = true);
    assert!(!only.plan().contains(&leaves), "there is no other node to go on from");
}
