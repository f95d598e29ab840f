//! Each rule alone, then thousands of random clusters against what must always hold.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::*;

const GIB: u64 = 1 << 30;

fn tags(text: &str) -> BTreeSet<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn disk(maximum: u64) -> Disk {
    Disk { schedulable: true, maximum, available: maximum, ..Disk::default() }
}

/// `"n1/z1: d1 d2"`: a node in a zone with disks of 100 GiB. The disk's id is `n1-d1`.
fn cluster(lines: &[&str]) -> Cluster {
    let mut cluster = Cluster::default();
    for line in lines {
        let (node, disks) = line.split_once(':').expect("NODE/ZONE: DISKS");
        let (name, zone) = node.split_once('/').unwrap_or((node, ""));
        let disks = disks.split_whitespace().map(|d| (format!("{name}-{d}"), disk(100 * GIB))).collect();
        let node = Node { zone: zone.into(), schedulable: true, disks, ..Node::default() };
        cluster.nodes.insert(name.to_owned(), node);
    }
    cluster
}

fn node<'a>(cluster: &'a mut Cluster, name: &str) -> &'a mut Node {
    cluster.nodes.get_mut(name).expect("a node of the test")
}

fn disk_of<'a>(cluster: &'a mut Cluster, id: &str) -> &'a mut Disk {
    let name = id.split_once('-').expect("NODE-DISK").0;
    node(cluster, name).disks.get_mut(id).expect("a disk of the test")
}

/// `n1-d1`: a healthy replica there; with `!` failed, with `>` leaving, with `~` not yet healthy.
fn residents(list: &str) -> Vec<Resident> {
    let one = |(i, word): (usize, &str)| {
        let at = word.trim_matches(['!', '>', '~']);
        Resident {
            name: format!("r{i}"),
            node: at.split_once('-').expect("NODE-DISK").0.to_owned(),
            disk: at.to_owned(),
            failed: word.contains('!'),
            leaving: word.contains('>'),
            healthy: !word.contains(['!', '~']),
        }
    };
    list.split_whitespace().enumerate().map(one).collect()
}

/// Longhorn's defaults: node hard, zone and disk soft.
fn want(gib: u64) -> Want {
    Want {
        size: gib * GIB,
        zone_soft: true,
        disk_soft: true,
        tagged_disks_serve_all: true,
        tagged_nodes_serve_all: true,
        ..Want::default()
    }
}

fn placed(cluster: &Cluster, want: &Want, list: &str) -> String {
    match place(cluster, want, &residents(list)) {
        Ok(at) => at.disk,
        Err(refusal) => format!("{:?}", refusal.disks.keys().collect::<Vec<_>>()),
    }
}

#[test]
fn anti_affinity_forbids_or_prefers() {
    let c = cluster(&["n1/z1: a b", "n2/z1: a", "n3/z2: a"]);
    let hard = want(1);
    let soft = Want { node_soft: true, ..want(1) };
    let hard_zone = Want { zone_soft: false, ..want(1) };
    let all_hard = Want { zone_soft: false, disk_soft: false, ..want(1) };
    let only_disk = Want { node_soft: true, disk_soft: false, ..want(1) };
    let cases: &[(&str, &Want, &str, &str)] = &[
        ("an unused zone first", &hard, "n1-a", "n3-a"),
        ("then an unused node", &hard, "n1-a n3-a", "n2-a"),
        ("hard: never the same node", &hard, "n1-a n2-a n3-a", "[NodeTaken]"),
        ("soft: the same node if no other is left", &soft, "n1-a n2-a n3-a", "n3-a"),
        ("soft: the emptiest zone, node, disk", &soft, "n1-a n2-a n3-a n3-a", "n1-b"),
        ("hard zone", &hard_zone, "n1-a", "n3-a"),
        ("hard zone: all taken", &hard_zone, "n1-a n3-a", "[NodeTaken, ZoneTaken]"),
        ("all hard", &all_hard, "n1-a n3-a", "[NodeTaken, ZoneTaken]"),
        ("hard disk on a shared node", &only_disk, "n1-a n2-a n3-a", "n1-b"),
        ("hard disk: all taken", &only_disk, "n1-a n1-b n2-a n3-a", "[DiskTaken]"),
        ("a failed replica keeps nobody away", &hard, "n1-a n2-a n3-a!", "n3-a"),
        ("a leaving one neither, but from its own disk", &hard, "n1-a> n2-a n3-a", "n1-b"),
        ("a leaving one from its only disk", &hard, "n1-a n2-a> n3-a", "[NodeTaken, DiskTaken]"),
    ];
    for (what, want, list, expected) in cases {
        assert_eq!(placed(&c, want, list), *expected, "{what}");
    }
}

#[test]
fn what_takes_no_replicas_gets_none() {
    let base = || cluster(&["n1: a", "n2: a"]);
    type Case = (&'static str, fn(&mut Cluster), &'static str);
    let cases: &[Case] = &[
        ("both", |_| {}, "n1-a"),
        ("a node that is not ready", |c| node(c, "n1").schedulable = false, "n2-a"),
        ("a node that is emptied", |c| node(c, "n1").emptying = Emptying::All, "n2-a"),
        ("a closed disk", |c| disk_of(c, "n1-a").schedulable = false, "n2-a"),
        ("a disk that is emptied", |c| disk_of(c, "n1-a").evicting = true, "n2-a"),
        ("a disk that is unknown in size", |c| disk_of(c, "n1-a").maximum = 0, "n2-a"),
    ];
    for (what, change, expected) in cases {
        let mut c = base();
        change(&mut c);
        assert_eq!(placed(&c, &want(1), ""), *expected, "{what}");
    }
    let mut none = base();
    node(&mut none, "n1").schedulable = false;
    disk_of(&mut none, "n2-a").evicting = true;
    assert_eq!(placed(&none, &want(1), ""), "[NodeUnschedulable, DiskEvicting]");
    let said = place(&none, &want(1), &[]).unwrap_err().to_string();
    assert!(said.contains("1 disk on a node that is not ready") && said.contains("cordon"), "{said}");
    let empty = place(&Cluster::default(), &want(1), &[]).unwrap_err().to_string();
    assert!(empty.contains("there is no disk"), "{empty}");
}

#[test]
fn tags_are_all_needed() {
    let mut c = cluster(&["n1: a", "n2: a", "n3: a"]);
    node(&mut c, "n1").tags = tags("fast");
    node(&mut c, "n2").tags = tags("fast big");
    disk_of(&mut c, "n1-a").tags = tags("ssd");
    disk_of(&mut c, "n2-a").tags = tags("hdd");
    let select =
        |nodes: &str, disks: &str| Want { node_selector: tags(nodes), disk_selector: tags(disks), ..want(1) };
    let no_tagged = Want { tagged_nodes_serve_all: false, tagged_disks_serve_all: false, ..want(1) };
    let cases: &[(&str, Want, &str)] = &[
        ("no selector", select("", ""), "n1-a"),
        ("one node tag", select("fast", ""), "n1-a"),
        ("two node tags", select("big fast", ""), "n2-a"),
        ("a disk tag", select("", "hdd"), "n2-a"),
        ("node and disk tags that no disk has", select("big", "ssd"), "[NodeTags, DiskTags]"),
        ("an unknown tag", select("gold", ""), "[NodeTags]"),
        ("no selector where tagged ones are kept apart", no_tagged, "n3-a"),
    ];
    for (what, want, expected) in cases {
        assert_eq!(placed(&c, want, ""), *expected, "{what}");
    }
}

#[test]
fn a_node_needs_the_volumes_program() {
    let mut c = cluster(&["n1: a", "n2: a"]);
    node(&mut c, "n2").programs = ["old".to_owned(), "new".to_owned()].into();
    let of = |image: &str| Want { program: Some(image.into()), ..want(1) };
    assert_eq!((placed(&c, &of("new"), ""), placed(&c, &want(1), "")), ("n2-a".into(), "n1-a".into()));
    assert_eq!(placed(&c, &of("newest"), ""), "[NoProgram]");
}

#[test]
fn the_limits_hold_to_the_byte() {
    let limits = |over, minimal| Limits { over_provisioning: over, minimal_available: minimal };
    let cases: &[(&str, Limits, Disk, u64, u64, bool)] = &[
        ("exactly what is offered", limits(100, 0), disk(100), 100, 0, true),
        ("a byte more", limits(100, 0), disk(100), 101, 0, false),
        ("twice over", limits(200, 0), disk(100), 200, 0, true),
        ("less the reservation", limits(100, 0), Disk { reserved: 30, ..disk(100) }, 70, 0, true),
        ("a byte of the reservation", limits(100, 0), Disk { reserved: 30, ..disk(100) }, 71, 0, false),
        ("beside others", limits(100, 0), Disk { scheduled: 60, ..disk(100) }, 40, 0, true),
        ("beside others, too much", limits(100, 0), Disk { scheduled: 60, ..disk(100) }, 41, 0, false),
        ("reserved more than there is", limits(100, 0), Disk { reserved: 101, ..disk(100) }, 1, 0, false),
        ("more than the minimum stays", limits(100, 25), Disk { available: 26, ..disk(100) }, 1, 0, true),
        (
            "the minimum alone is not enough",
            limits(100, 25),
            Disk { available: 25, ..disk(100) },
            1,
            0,
            false,
        ),
        ("what is copied counts", limits(100, 25), Disk { available: 40, ..disk(100) }, 1, 15, false),
        ("what is copied fits", limits(100, 25), Disk { available: 41, ..disk(100) }, 1, 15, true),
        (
            "what is copied is more than there is",
            limits(100, 0),
            Disk { available: 5, ..disk(100) },
            1,
            6,
            false,
        ),
        ("numbers beyond 64 bits", limits(100, 25), disk(u64::MAX), u64::MAX / 2, 0, true),
    ];
    for (what, limits, disk, size, fill, fits) in cases {
        let mut c = cluster(&["n1: a"]);
        c.limits = *limits;
        *disk_of(&mut c, "n1-a") = disk.clone();
        let want = Want { size: *size, fill: *fill, ..want(0) };
        assert_eq!(place(&c, &want, &[]).is_ok(), *fits, "{what}");
    }
}

#[test]
fn the_emptiest_of_equal_disks_is_taken() {
    let mut c = cluster(&["n1: a", "n2: a", "n3: a"]);
    disk_of(&mut c, "n1-a").scheduled = 10 * GIB;
    disk_of(&mut c, "n3-a").available = 60 * GIB;
    assert_eq!(placed(&c, &want(1), ""), "n2-a");
    disk_of(&mut c, "n2-a").scheduled = 50 * GIB;
    assert_eq!(placed(&c, &want(1), ""), "n1-a");
}

#[test]
fn many_volumes_spread_over_equal_disks_however_much_may_be_promised() {
    let lines: Vec<String> = (0..10).map(|n| format!("n{n}/z{}: a", n % 5)).collect();
    let mut c = cluster(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    c.limits.over_provisioning = 1000;
    for _ in 0..100 {
        let (places, refusal) = place_all(&c, &want(1), &[], 3);
        assert_eq!((places.len(), refusal), (3, None));
        for at in &places {
            c.reserve(at, GIB, 0);
        }
    }
    let loads: Vec<u64> =
        c.nodes.values().flat_map(|n| n.disks.values().map(|d| d.scheduled / GIB)).collect();
    assert!(loads.iter().all(|load| (28..=32).contains(load)), "{loads:?}");
}

#[test]
fn one_replica_is_where_the_locality_asks() {
    let c = cluster(&["n1/z1: a", "n2/z2: a", "n3/z3: a"]);
    let prefer = |node: &str| Want { locality: Locality::Prefer(node.into()), ..want(1) };
    let only = |node: &str| Want { locality: Locality::Only(node.into()), ..want(1) };
    assert_eq!(placed(&c, &prefer("n3"), ""), "n3-a");
    assert_eq!(placed(&c, &prefer("n3"), "n3-a"), "n1-a");
    assert_eq!(placed(&c, &prefer("n3"), "n1-a n2-a"), "n3-a");
    let mut full = c.clone();
    disk_of(&mut full, "n3-a").available = 0;
    assert_eq!(placed(&full, &prefer("n3"), ""), "n1-a");
    assert_eq!(placed(&c, &only("n2"), ""), "n2-a");
    assert_eq!(placed(&full, &only("n3"), ""), "[NotLocal, NoSpace]");
}

#[test]
fn several_replicas_see_each_other() {
    let c = cluster(&["n1: a", "n2: a"]);
    let (places, refusal) = place_all(&c, &want(1), &[], 3);
    assert_eq!(places.iter().map(|p| p.node.as_str()).collect::<Vec<_>>(), ["n1", "n2"]);
    assert_eq!(refusal.unwrap().disks[&Obstacle::NodeTaken], 2);
    let small = cluster(&["n1: a"]);
    let two_fit = Want { node_soft: true, ..want(45) };
    assert_eq!(place_all(&small, &two_fit, &[], 3).0.len(), 2, "the room of the first two is taken");
}

#[test]
fn two_in_one_place_are_told_of_where_the_volume_keeps_them_apart() {
    let c = cluster(&["n1/z1: a b", "n2/z1: a", "n3/z2: a"]);
    let hard = want(1);
    let soft = Want { node_soft: true, ..want(1) };
    let zones = Want { node_soft: true, zone_soft: false, ..want(1) };
    let cases: &[(&Want, &str, Option<&str>)] = &[
        (&hard, "n1-a n2-a n3-a", None),
        (&hard, "n1-a n3-a n1-b", Some("two are on node n1")),
        (&soft, "n1-a n3-a n1-b", None),
        (&zones, "n1-a n3-a", None),
        (&zones, "n1-a n2-a n3-a", Some("two are in zone z1")),
    ];
    for (want, list, told) in cases {
        assert_eq!(broken_anti_affinity(&c, want, &residents(list)).as_deref(), *told, "{list}");
    }
}

#[test]
fn the_one_that_is_missed_least_goes() {
    let mut c = cluster(&["n1/z1: a b", "n2/z1: a", "n3/z2: a", "n4/z3: a", "n5/z4: a b", "n6/z1: a"]);
    node(&mut c, "n4").tags = tags("other");
    let plain = want(1);
    let local = Want { locality: Locality::Prefer("n1".into()), ..want(1) };
    let tagged = Want { node_selector: tags("other"), ..want(1) };
    let cases: &[(&str, &Want, &str, Option<&str>)] = &[
        ("failed before all", &plain, "n1-a n1-a> n3-a!", Some("r2")),
        ("then one that leaves", &plain, "n1-a n1-b n3-a>", Some("r2")),
        ("then one that is being filled", &plain, "n1-a n1-b n3-a~", Some("r2")),
        ("then one where its tags forbid it", &tagged, "n4-a n3-a", Some("r1")),
        ("then the fullest zone", &plain, "n1-a n2-a n3-a", Some("r0")),
        ("and the fullest node in it", &plain, "n2-a n1-a n1-b n3-a", Some("r1")),
        (
            "before that one of two on a node that may have one",
            &plain,
            "n1-a n2-a n5-a n5-b n6-a",
            Some("r2"),
        ),
        ("the local one stays", &local, "n1-a n2-a n3-a", Some("r1")),
        ("the local one leaves if it must", &local, "n1-a> n2-a n3-a", Some("r0")),
        ("the last healthy one stays", &plain, "n1-a", None),
        ("though it should leave", &plain, "n1-a> n2-a~", Some("r1")),
        ("nothing to take", &plain, "", None),
    ];
    for (what, want, list, expected) in cases {
        let all = residents(list);
        assert_eq!(choose_removal(&c, want, &all).map(|r| r.name.as_str()), *expected, "{what}");
    }
}

#[test]
fn replicas_are_moved_only_where_it_helps() {
    let c = cluster(&["n1/z1: a b", "n2/z1: a", "n3/z2: a"]);
    let soft = Want { node_soft: true, ..want(1) };
    let local = Want { node_soft: true, locality: Locality::Prefer("n1".into()), ..want(1) };
    let cases: &[(&str, &Want, &str, bool, Option<&str>)] = &[
        ("both on one node", &soft, "n1-a n1-b", false, Some("n3-a")),
        ("both in one zone", &soft, "n1-a n2-a", false, Some("n3-a")),
        ("spread", &soft, "n1-a n3-a", true, None),
        ("three, two of them on one node: least effort is content", &soft, "n1-a n1-b n3-a", false, None),
        ("best effort is not", &soft, "n1-a n1-b n3-a", true, Some("n2-a")),
        ("both on one disk: to another zone", &soft, "n1-a n1-a", true, Some("n3-a")),
        ("not while one is failed", &soft, "n1-a n1-b!", true, None),
        ("not while one is being filled", &soft, "n1-a n1-b~", true, None),
        ("one alone lies well", &soft, "n1-a", true, None),
        ("the local one stays, the other goes", &local, "n1-a n2-a", true, Some("n3-a")),
    ];
    for (what, want, list, even, expected) in cases {
        let moved = balance(&c, want, &residents(list), *even);
        assert_eq!(moved.map(|p| p.disk).as_deref(), *expected, "{what}");
    }
    let mut full = c.clone();
    disk_of(&mut full, "n3-a").available = 0;
    disk_of(&mut full, "n2-a").available = 0;
    assert_eq!(balance(&full, &soft, &residents("n1-a n1-b"), true), None, "nowhere to go");
}

#[test]
fn failed_replicas_are_used_again_then_waited_for_then_replaced() {
    let secs = Duration::from_secs;
    let failed = |name, since, usable| Failed { name, since: secs(since), usable };
    let wait = secs(600);
    let cases: &[(&str, Vec<Failed<'_>>, Replenish<'_>)] = &[
        ("none failed", vec![], Replenish::New),
        ("one can be used", vec![failed("a", 5, true)], Replenish::Reuse("a")),
        (
            "the one that failed last lacks the least",
            vec![failed("a", 50, true), failed("b", 5, true)],
            Replenish::Reuse("b"),
        ),
        ("its node is away", vec![failed("a", 5, false)], Replenish::Wait(secs(595))),
        ("for too long", vec![failed("a", 600, false)], Replenish::New),
        (
            "one away, another there",
            vec![failed("a", 5, false), failed("b", 700, true)],
            Replenish::Reuse("b"),
        ),
    ];
    for (what, failed, expected) in cases {
        assert_eq!(replenish(failed, wait), *expected, "{what}");
    }
}

prop_compose! {
    fn any_disk()(
        maximum in 1_u64..1000, used in 0_u64..1000, reserved in 0_u64..400, scheduled in 0_u64..1200,
        schedulable in prop::bool::weighted(0.9), evicting in prop::bool::weighted(0.1), tagged in any::<bool>(),
    ) -> Disk {
        Disk {
            schedulable, broken: false, evicting, maximum, available: maximum.saturating_sub(used), reserved, scheduled,
            tags: if tagged { tags("ssd") } else { BTreeSet::new() },
        }
    }
}

prop_compose! {
    fn any_cluster()(
        nodes in prop::collection::vec(
            (0_u8..4, prop::bool::weighted(0.9), prop::bool::weighted(0.1), any::<bool>(),
             prop::collection::vec(any_disk(), 0..4)), 0..9),
        over in 50_u32..300, minimal in 0_u32..50,
    ) -> Cluster {
        let nodes = nodes.into_iter().enumerate().map(|(i, (zone, schedulable, evicting, tagged, disks))| {
            let has_program = i % 2 == disks.len() % 2;
            let disks = disks.into_iter().enumerate().map(|(d, disk)| (format!("n{i}-d{d}"), disk)).collect();
            let tags = if tagged { tags("fast") } else { BTreeSet::new() };
            let emptying = if evicting { Emptying::All } else { Emptying::No };
            let programs = if has_program { ["i".to_owned()].into() } else { BTreeSet::new() };
            let zone = format!("z{zone}");
            (format!("n{i}"), Node { zone, schedulable, emptying, tags, programs, disks, ..Node::default() })
        });
        Cluster {
            nodes: nodes.collect(),
            limits: Limits { over_provisioning: over, minimal_available: minimal },
        }
    }
}

prop_compose! {
    fn any_want()(
        size in 1_u64..400, fill in 0_u64..200, flags in any::<[bool; 7]>(), locality in 0_u8..12,
    ) -> Want {
        let [node_soft, zone_soft, disk_soft, fast, ssd, nodes_all, disks_all] = flags;
        let select = |on, tag| if on { tags(tag) } else { BTreeSet::new() };
        Want {
            size, fill: fill.min(size), node_soft, zone_soft, disk_soft,
            node_selector: select(fast && locality % 3 == 0, "fast"),
            disk_selector: select(ssd && locality % 3 == 1, "ssd"),
            tagged_nodes_serve_all: nodes_all, tagged_disks_serve_all: disks_all,
            locality: match locality {
                0..=5 => Locality::Anywhere,
                6..=9 => Locality::Prefer(format!("n{}", locality - 6)),
                _ => Locality::Only(format!("n{}", locality - 10)),
            },
            program: (fill % 5 == 0).then(|| "i".to_owned()),
        }
    }
}

fn any_residents(cluster: &Cluster) -> impl Strategy<Value = Vec<Resident>> + use<> {
    let spots: Vec<(String, String)> = cluster
        .nodes
        .iter()
        .flat_map(|(n, node)| node.disks.keys().map(move |d| (n.clone(), d.clone())))
        .collect();
    let most = if spots.is_empty() { 0 } else { 5 };
    prop::collection::vec((any::<prop::sample::Index>(), 0_u8..8), 0..=most).prop_map(move |picks| {
        let one = |(i, (spot, state)): (usize, (prop::sample::Index, u8))| {
            let (node, disk) = spot.get(&spots).clone();
            let (failed, leaving) = (state == 0, state == 1);
            Resident { name: format!("r{i}"), node, disk, failed, leaving, healthy: !failed && state != 2 }
        };
        picks.into_iter().enumerate().map(one).collect()
    })
}

fn any_case() -> impl Strategy<Value = (Cluster, Want, Vec<Resident>)> {
    (any_cluster(), any_want()).prop_flat_map(|(cluster, want)| {
        let residents = any_residents(&cluster);
        (Just(cluster), Just(want), residents)
    })
}

/// The rules once more, written down in another way: may this replica be there, beside these?
fn is_allowed(c: &Cluster, w: &Want, beside: &[Resident], node: &str, disk: &str) -> bool {
    let (n, d) = (&c.nodes[node], &c.nodes[node].disks[disk]);
    let local = !matches!(&w.locality, Locality::Only(only) if only != node);
    let open = n.schedulable && n.emptying == Emptying::No && d.schedulable && !d.evicting;
    let node_tags = w.node_selector.iter().all(|t| n.tags.contains(t))
        && (!w.node_selector.is_empty() || w.tagged_nodes_serve_all || n.tags.is_empty());
    let disk_tags = w.disk_selector.iter().all(|t| d.tags.contains(t))
        && (!w.disk_selector.is_empty() || w.tagged_disks_serve_all || d.tags.is_empty());
    let program = w.program.iter().all(|image| n.programs.contains(image));
    let mut apart = true;
    for r in beside.iter().filter(|r| !r.failed) {
        let (same_node, same_disk) = (r.node == node, r.node == node && r.disk == disk);
        let same_zone = c.nodes[&r.node].zone == n.zone;
        apart &= !(r.leaving && same_disk);
        if !r.leaving {
            apart &=
                (w.node_soft || !same_node) && (w.zone_soft || !same_zone) && (w.disk_soft || !same_disk);
        }
    }
    let percent = |whole: u64, part: u32| whole as f64 * f64::from(part) / 100.0;
    let offered = percent(d.maximum.saturating_sub(d.reserved), c.limits.over_provisioning);
    let promised = (d.scheduled + w.size) as f64 <= offered;
    let free = d.available >= w.fill
        && (d.available - w.fill) as f64 > percent(d.maximum, c.limits.minimal_available);
    local && open && node_tags && disk_tags && program && apart && promised && free
}

/// The same clusters in every run; `LH_SEED` chooses others, `LH_CASES` how many.
fn config() -> ProptestConfig {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    ProptestConfig {
        cases: number("LH_CASES").and_then(|n: u64| u32::try_from(n).ok()).unwrap_or(3000),
        rng_seed: RngSeed::Fixed(number("LH_SEED").unwrap_or(7)),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    /// No placement breaks a rule, whatever came before it; a refusal means that no disk was left; equal input gives
    /// an equal answer in whatever order the replicas are listed.
    #[test]
    fn placements_keep_every_rule((cluster, want, residents) in any_case(), count in 1_usize..5) {
        let (places, refusal) = place_all(&cluster, &want, &residents, count);
        prop_assert_eq!(places.len() < count, refusal.is_some());
        let (mut c, mut beside) = (cluster.clone(), residents.clone());
        for at in &places {
            prop_assert!(is_allowed(&c, &want, &beside, &at.node, &at.disk), "{at:?}");
            c.reserve(at, want.size, want.fill);
            let (node, disk) = (at.node.clone(), at.disk.clone());
            beside.push(Resident { name: "new".into(), node, disk, ..Resident::default() });
        }
        if let Some(refusal) = refusal {
            for (name, node) in &c.nodes {
                for id in node.disks.keys() {
                    prop_assert!(!is_allowed(&c, &want, &beside, name, id), "{name} {id} was free");
                }
            }
            let disks: usize = c.nodes.values().map(|n| n.disks.len()).sum();
            prop_assert_eq!(refusal.disks.values().sum::<usize>(), disks);
        }
        let mut reversed = residents;
        reversed.reverse();
        prop_assert_eq!(place_all(&cluster, &want, &reversed, count).0, places);
    }

    /// A soft rule gives way only where it must.
    #[test]
    fn an_unused_zone_and_node_are_preferred((cluster, want, residents) in any_case()) {
        let Ok(at) = place(&cluster, &want, &residents) else { return Ok(()) };
        if want.locality != Locality::Anywhere { return Ok(()) }
        let staying: Vec<_> = residents.iter().filter(|r| !r.failed && !r.leaving).collect();
        let in_zone = |node: &str| staying.iter().filter(|r| cluster.zone(&r.node) == cluster.zone(node)).count();
        let on_node = |node: &str| staying.iter().filter(|r| r.node == node).count();
        for (name, node) in &cluster.nodes {
            for id in node.disks.keys().filter(|id| is_allowed(&cluster, &want, &residents, name, id)) {
                let (theirs, ours) = ((in_zone(name), on_node(name)), (in_zone(&at.node), on_node(&at.node)));
                prop_assert!(theirs >= ours, "{name} {id} was better than {at:?}");
            }
        }
    }

    /// Moving replicas, one after another, comes to an end, keeps every rule and the number of replicas, and the one
    /// that goes is never the only healthy one.
    #[test]
    fn balancing_ends_and_keeps_the_rules((cluster, want, residents) in any_case(), even in any::<bool>()) {
        let mut residents = residents;
        let count = residents.len();
        for round in 0.. {
            prop_assert!(round < 40, "no end: {residents:?}");
            let Some(to) = balance(&cluster, &want, &residents, even) else { break };
            prop_assert!(is_allowed(&cluster, &want, &residents, &to.node, &to.disk), "{to:?}");
            residents.push(Resident {
                name: format!("m{round}"), node: to.node, disk: to.disk, healthy: true, ..Resident::default()
            });
            let gone = choose_removal(&cluster, &want, &residents).expect("one of many healthy ones").name.clone();
            prop_assert_ne!(&gone, &format!("m{round}"), "the new one goes again");
            residents.retain(|r| r.name != gone);
            prop_assert_eq!(residents.len(), count);
        }
    }

    /// Moving replicas from where the volume's anti-affinity forbids them, one after another, comes to an end.
    #[test]
    fn keeping_apart_ends((cluster, want, residents) in any_case(), plain in any::<bool>()) {
        // Most of the others forbid any move.
        let anywhere = || Want { node_soft: want.node_soft, zone_soft: want.zone_soft, size: 0, ..self::want(0) };
        let want = if plain { anywhere() } else { want };
        let calm = |r: Resident| Resident { failed: false, leaving: false, healthy: true, ..r };
        let mut residents: Vec<Resident> = residents.into_iter().map(calm).collect();
        for round in 0.. {
            prop_assert!(round < 40, "no end: {residents:?}");
            if broken_anti_affinity(&cluster, &want, &residents).is_none() { break }
            let Ok(to) = place(&cluster, &want, &residents) else { break };
            residents.push(calm(Resident {
                name: format!("m{round}"), node: to.node, disk: to.disk, ..Resident::default()
            }));
            let gone = choose_removal(&cluster, &want, &residents).expect("one of many healthy ones").name.clone();
            prop_assert_ne!(&gone, &format!("m{round}"), "the new one goes again");
            residents.retain(|r| r.name != gone);
        }
    }

    /// As long as there is a healthy replica, removing what is missed least, again and again, leaves one.
    #[test]
    fn the_last_healthy_replica_stays((cluster, want, residents) in any_case()) {
        let had_one = residents.iter().any(|r| r.healthy && !r.failed);
        let mut left = residents;
        while let Some(gone) = choose_removal(&cluster, &want, &left).map(|r| r.name.clone()) {
            left.retain(|r| r.name != gone);
        }
        prop_assert_eq!(left.len(), usize::from(had_one));
        prop_assert!(left.iter().all(|r| r.healthy && !r.failed));
    }
}
