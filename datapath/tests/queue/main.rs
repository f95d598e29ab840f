//! Two queues over one table, and replicas that answer in any order: random schedules, each from a seed.
//!
//! A schedule fails if a block's history is not linearizable, if a write is answered that a current member lacks, if
//! a flush is answered before all that it covers is stable everywhere, if a replica forgets a write that another
//! lacks, if replicas differ after settling, or if anything is left unanswered. Each seed is printed when it fails.
//! `LH_RUNS=n` sets how many schedules there are of each scenario.
//!
//! With the feature `sabotage` each mechanism is taken out in turn; a test fails unless some schedule notices.

mod history;
mod manager;
mod replica;
mod world;

use world::{Scenario, World};

/// Runs the schedules of a scenario: as many as usual, or as `LH_RUNS` says.
fn run(scenario: Scenario, usual: u64) {
    let count = std::env::var("LH_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(usual);
    let mut seen = world::Seen::default();
    for seed in 0..count {
        if let Err(what) = World::new(scenario, seed).run(&mut seen) {
            panic!("{scenario:?}, seed {seed}: {what}");
        }
    }
    println!("{scenario:?}: {seen:?}");
    // Fewer may well lack something.
    if count < usual {
        return;
    }
    if let Some(nothing) = seen.missing(scenario) {
        panic!("{scenario:?}: {nothing} never happened");
    }
}

#[test]
fn without_faults() {
    run(Scenario::Calm, 40);
}

#[test]
fn with_faults() {
    run(Scenario::Faults, 120);
}

#[test]
fn with_stuck_writes() {
    run(Scenario::Stuck, 8);
}

#[test]
fn with_another_engine() {
    run(Scenario::Takeover, 120);
}

#[cfg(feature = "sabotage")]
mod sabotage {
    use super::*;
    use datapath::queue::Sabotage;

    /// Some schedule of the scenario notices that the mechanism is missing.
    fn noticed(which: Sabotage, scenario: Scenario) {
        for seed in 0..400 {
            let mut world = World::new(scenario, seed);
            world.sabotage(which);
            if let Err(what) = world.run(&mut world::Seen::default()) {
                println!("{which:?}: seed {seed}: {what}");
                return;
            }
        }
        panic!("nobody noticed {which:?}");
    }

    #[test]
    fn a_write_waits_for_the_epoch() {
        noticed(Sabotage::AckBeforeEpoch, Scenario::Faults);
    }

    #[test]
    fn overlapping_requests_are_ordered() {
        noticed(Sabotage::NoOrder, Scenario::Calm);
    }

    #[test]
    fn reads_are_ordered_too() {
        noticed(Sabotage::UnclaimedReads, Scenario::Calm);
    }

    #[test]
    fn a_range_is_held_until_the_last_answer() {
        noticed(Sabotage::ReleaseEarly, Scenario::Calm);
    }

    #[test]
    fn a_flush_waits_for_every_member() {
        noticed(Sabotage::FlushEarly, Scenario::Calm);
    }

    #[test]
    fn who_becomes_a_member_is_awaited() {
        noticed(Sabotage::NotAwaited, Scenario::Faults);
    }

    #[test]
    fn writes_stay_within_the_window() {
        noticed(Sabotage::NoWindow, Scenario::Stuck);
    }

    #[test]
    fn what_was_refused_in_part_keeps_its_range() {
        noticed(Sabotage::FullIsUntouched, Scenario::Faults);
    }

    #[test]
    fn a_fence_is_no_failure() {
        noticed(Sabotage::StaleIsFailure, Scenario::Takeover);
    }

    #[test]
    fn reads_need_the_lease() {
        noticed(Sabotage::NoLease, Scenario::Takeover);
    }
}
