//! Runs in an order chosen by a seed.

use std::collections::BTreeMap;

use datapath::conductor::{Quorum, Sabotage};

use crate::world::{Fault, Plan, World};

fn base() -> Plan {
    Plan {
        quorum: Quorum::Any,
        replicas: 3,
        queues: 2,
        requests: 300,
        fault_every: 150,
        faults: &[],
        faults_max: 30,
        grace_ns: 3_000_000_000,
        sabotage: Sabotage::default(),
    }
}

/// What each kind of run is made of. A run takes one of these by its seed.
const MIXES: &[&[Fault]] = &[
    &[Fault::BreakLink, Fault::Kill, Fault::Stall, Fault::DeafQueue],
    &[Fault::DeafQueue, Fault::Rebuild, Fault::DeafQueue, Fault::Snapshot],
    &[Fault::CrashEngine, Fault::BreakLink, Fault::Kill],
    &[Fault::Snapshot, Fault::BreakLink, Fault::Kill, Fault::CrashEngine, Fault::RemoveSnapshot],
    &[Fault::SecondEngine, Fault::BreakLink, Fault::AuthorityAway, Fault::Kill],
    &[Fault::KillAll, Fault::CutPower, Fault::CrashEngine, Fault::BreakLink],
    &[Fault::CutAllPower, Fault::Kill, Fault::Snapshot, Fault::CrashEngine],
    &[Fault::CloseEngine, Fault::Snapshot, Fault::Kill, Fault::Rebuild],
    &[Fault::Scrub, Fault::Snapshot, Fault::Scrub, Fault::Kill, Fault::Scrub, Fault::Rebuild],
    &[Fault::Snapshot, Fault::Revert, Fault::Snapshot, Fault::Kill, Fault::CrashEngine, Fault::KillAll],
    &[
        Fault::Snapshot,
        Fault::Revert,
        Fault::RemoveSnapshot,
        Fault::Purge,
        Fault::Kill,
        Fault::CutPower,
        Fault::CrashEngine,
        Fault::Rebuild,
        Fault::Scrub,
    ],
    &[
        Fault::BreakLink,
        Fault::Kill,
        Fault::KillAll,
        Fault::CutPower,
        Fault::CutAllPower,
        Fault::Stall,
        Fault::CrashEngine,
        Fault::SecondEngine,
        Fault::CloseEngine,
        Fault::Snapshot,
        Fault::Revert,
        Fault::Rebuild,
        Fault::Scrub,
        Fault::AuthorityAway,
        Fault::DeafQueue,
    ],
];

fn plan(seed: u64) -> Plan {
    let pick = |n: usize| usize::try_from(seed).expect("64 bits") % n;
    Plan {
        quorum: [Quorum::Any, Quorum::Any, Quorum::Majority][pick(3)],
        replicas: [3, 3, 3, 2, 5, 1, 3][pick(7)],
        queues: [2, 2, 3, 1][pick(4)],
        faults: MIXES[pick(MIXES.len())],
        grace_ns: [base().grace_ns, 250_000_000][pick(2)],
        fault_every: if seed.is_multiple_of(5) { 40 } else { 150 },
        ..base()
    }
}

fn run(seed: u64, plan: Plan) -> BTreeMap<String, u64> {
    let mut world = World::new(seed, plan);
    world.run_until("all requests are made", World::is_asked);
    world.settle();
    let (acknowledged, reads) = (world.oracle.acknowledged, world.oracle.answered_reads);
    let counters = world.status().counters;
    let mut happened = world.happened;
    for (what, n) in [
        ("acknowledged writes", acknowledged),
        ("answered reads", reads),
        ("epochs", counters.epochs),
        ("rebuilds", counters.rebuilds),
        ("repaired blocks", counters.repaired_blocks),
        ("resolved chunks", counters.resolved_chunks),
    ] {
        *happened.entry(what.to_owned()).or_default() += n;
    }
    happened
}

fn seeds(default: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    match number("LH_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("LH_RUNS").unwrap_or(default),
    }
}

/// Says which seed it was when a run fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("LH_SEED={}", self.0);
        }
    }
}

#[test]
fn whatever_fails_nothing_acknowledged_is_lost() {
    let mut happened: BTreeMap<String, u64> = BTreeMap::new();
    let seeds = seeds(160);
    let many = seeds.end - seeds.start > 100;
    for seed in seeds {
        let _named = Seed(seed);
        for (what, n) in run(seed, plan(seed)) {
            *happened.entry(what).or_default() += n;
        }
    }
    println!("{happened:#?}");
    for what in [
        "epochs",
        "rebuilds",
        "repaired blocks",
        "resolved chunks",
        "command done",
        "reverted",
        "closed",
        "fenced",
        "scrubbed",
    ] {
        assert!(!many || happened.get(what).is_some_and(|n| *n > 0), "it never came to this: {what}");
    }
}

/// Runs with a mechanism taken out, until one fails; says how many it took.
#[cfg(feature = "sabotage")]
fn caught(what: &str, sabotage: Sabotage) {
    let failed = |seed: &u64| {
        let plan = Plan { sabotage, ..plan(*seed) };
        std::panic::catch_unwind(|| run(*seed, plan)).is_err()
    };
    let seed = (0..2000).find(failed);
    println!("{what}: noticed by run {seed:?}");
    assert!(seed.is_some(), "{what} is not noticed");
}

#[cfg(feature = "sabotage")]
#[test]
fn every_mechanism_is_needed() {
    let none = Sabotage::default();
    caught("epoch_not_durable", Sabotage { epoch_not_durable: true, ..none });
    caught("forget_in_doubt", Sabotage { forget_in_doubt: true, ..none });
    caught("skip_intent", Sabotage { skip_intent: true, ..none });
    caught("leaver_on_one_queue", Sabotage { leaver_on_one_queue: true, ..none });
    caught("commit_without_pause", Sabotage { commit_without_pause: true, ..none });
}
