//! The seeded simulation of a whole volume: seeds without a violation, and every sabotaged mechanism noticed.
//!
//! `LH_SEED=n` runs one seed and prints what happens, `LH_WATCH=block` with it what becomes of a block on every disk; `LH_SEEDS=n`
//! runs so many, `LH_FIRST_SEED=n` from there on, `LH_MIX=folds` with faults of one kind only (`sim::faults::Mix`).

mod sim;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use sim::faults::{Fault, Mix};
use sim::world::{Sabotage, World};

/// Seeds of the usual run. `LH_SEEDS` says otherwise.
const SEEDS: u64 = 10_000;

/// Broken seeds after which a run ends.
const BROKEN_MAX: usize = 20;

/// Seeds of those with clients that leave.
const CLIENT_SEEDS: u64 = 1000;

/// Seeds of those in which something older is put back.
const OLDER_SEEDS: u64 = 500;

/// Seeds of those in which a copy of a replica's disk is put back.
const COPY_SEEDS: u64 = 500;

/// Seeds of those in which the volume grows from one replica.
const GROW_SEEDS: u64 = 1000;

/// Seeds of those in which replicas are filled beside folds.
const FILL_SEEDS: u64 = 500;

/// Seeds of those with branches.
const BRANCH_SEEDS: u64 = 1000;

/// Seeds of those in which engines are told to end.
const END_SEEDS: u64 = 500;

/// Seeds of those with other numbers of replicas than three.
const MANY_SEEDS: u64 = 500;

/// States that some seed of the usual run has to enter.
const STATES: [&str; 32] = [
    "allocation told",
    "answered with TimedOut",
    "authority did not answer",
    "block rebuilt",
    "block rotten",
    "block written in part",
    "blocks repaired",
    "chunks resolved",
    "engine fenced off",
    "engine open",
    "epoch made",
    "epoch with one member",
    "expansion done",
    "fence refused an engine",
    "flush told of a loss",
    "fold ended",
    "fold of a head ended",
    "member lost: disk error",
    "member lost: disk full",
    "member lost: hung",
    "member lost: link",
    "member lost: slow",
    "no member kept what was not flushed",
    "no space on a replica's disk",
    "read here",
    "read here for nothing",
    "rebuild finished",
    "revert done",
    "scrub done",
    "snapshot done",
    "two engines open",
    "write in several pieces",
];

/// A sabotaged mechanism has to be noticed within so many seeds.
const NOTICED_WITHIN: u64 = 4000;

fn run(seed: u64, sabotage: Sabotage, tracing: bool) -> Result<BTreeMap<String, u64>, String> {
    run_only(wanted_mix(), seed, sabotage, tracing)
}

fn wanted_mix() -> Option<Mix> {
    let wanted = std::env::var("LH_MIX").ok();
    wanted.map(|name| Mix::named(&name).unwrap_or_else(|| panic!("there are no runs of {name}")))
}

/// A run of one kind, or of the seed's.
fn run_only(
    mix: Option<Mix>,
    seed: u64,
    sabotage: Sabotage,
    tracing: bool,
) -> Result<BTreeMap<String, u64>, String> {
    // A machine that panics has met what it holds to be impossible: as good a find as a violation.
    match catch_unwind(AssertUnwindSafe(|| {
        World::new(seed, sabotage, tracing).watching(number("LH_WATCH")).only(mix).run()
    })) {
        Ok(Ok(seen)) => Ok(seen),
        Ok(Err(broken)) => Err(broken),
        Err(panic) => Err(panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
            .unwrap_or_else(|| "panic".into())),
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn no_seed_breaks_a_promise() {
    if let Some(seed) = number("LH_SEED") {
        run(seed, Sabotage::default(), true).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        return;
    }
    let mut seen: BTreeMap<String, u64> = BTreeMap::new();
    let first = number("LH_FIRST_SEED").unwrap_or(1);
    let mut broken = Vec::new();
    let seeds = first..first + number("LH_SEEDS").unwrap_or(SEEDS);
    for seed in seeds {
        match run(seed, Sabotage::default(), false) {
            Ok(one) => one.into_iter().for_each(|(what, count)| *seen.entry(what).or_default() += count),
            Err(e) => broken.push(format!("LH_SEED={seed}: {e}")),
        }
        if broken.len() == BROKEN_MAX {
            break;
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    for (what, count) in &seen {
        println!("{count:>8}  {what}");
    }
    if number("LH_SEEDS").is_some_and(|seeds| seeds < SEEDS) {
        return;
    }
    for kind in Fault::KINDS.iter().chain(&STATES) {
        assert!(seen.contains_key(*kind), "no seed had: {kind}");
    }
}

/// Runs so many seeds of a kind that seeds do not choose, so that the runs of all others are as they were without it. None may
/// break a promise, and each of these states has to be met more often than once in `share` seeds.
fn none_breaks(mix: Mix, seeds: u64, states: &[&str], share: u64) {
    let fewer = number("LH_SEEDS").filter(|wanted| *wanted < seeds);
    let mut seen: BTreeMap<String, u64> = BTreeMap::new();
    for seed in 1..=fewer.unwrap_or(seeds) {
        match run_only(Some(mix), seed, Sabotage::default(), false) {
            Ok(one) => one.into_iter().for_each(|(what, count)| *seen.entry(what).or_default() += count),
            Err(e) => panic!("LH_MIX={mix:?} LH_SEED={seed}: {e}"),
        }
    }
    if fewer.is_none() {
        for state in states {
            assert!(seen.get(*state).is_some_and(|n| *n > seeds / share), "{state}: {seen:?}");
        }
    }
}

#[test]
fn what_clients_give_up_is_not_done_after_what_they_send_in_its_place() {
    let states = ["client left", "clients looked for once their writes had ranges"];
    none_breaks(Mix::Clients, CLIENT_SEEDS, &states, 1);
}

#[test]
fn what_is_older_and_put_back_is_not_believed() {
    let states =
        ["quorum majority", "authority lost its epoch", "older directory put back", "older epoch put back"];
    none_breaks(Mix::Older, OLDER_SEEDS, &states, 8);
}

#[test]
fn a_directory_that_is_put_back_as_it_was_is_told_from_the_member() {
    let states = [
        "quorum majority",
        "quorum any",
        "copy put back in its round",
        "copy put back a round behind",
        "copy put back behind",
        "copy put back while the others go on",
        "copy put back while all are away",
        "copy put back before a start",
        "copy put back behind a clean end",
        "copy put back beside an engine that dies, while the others live on",
    ];
    none_breaks(Mix::Copies, COPY_SEEDS, &states, 20);
}

#[test]
fn a_volume_that_begins_with_one_replica_is_given_others() {
    let states = ["replica added", "second replica noted to be in sync", "rebuild finished", "engine killed"];
    none_breaks(Mix::Grow, GROW_SEEDS, &states, 20);
}

#[test]
fn who_is_filled_while_snapshots_are_folded_and_others_die_holds_what_they_hold() {
    none_breaks(Mix::Fills, FILL_SEEDS, &["rebuild finished", "fold ended", "chunks resolved"], 2);
}

/// Some revert in nearly every run.
#[test]
fn branches_that_reverts_leave_are_the_same_in_any_order() {
    let states = ["revert done", "fold ended", "scrub done", "rebuild finished", "chain looked at"];
    none_breaks(Mix::Branches, BRANCH_SEEDS, &states, 2);
}

#[test]
fn who_is_told_to_end_leaves_all_as_it_was_answered() {
    none_breaks(Mix::Ends, END_SEEDS, &["engine ended cleanly", "engine gave up", "replica gave up"], 10);
}

#[test]
fn more_and_fewer_replicas_keep_what_three_do() {
    let states = ["quorum majority", "quorum any", "rebuild finished", "engine killed"];
    none_breaks(Mix::Many, MANY_SEEDS, &states, 10);
}

/// Runs seeds until one notices that the mechanism is missing.
fn noticed(name: &str, sabotage: Sabotage) {
    noticed_from(1, name, sabotage);
}

fn noticed_from(first: u64, name: &str, sabotage: Sabotage) {
    noticed_in(None, first, name, sabotage);
}

fn noticed_in(mix: Option<Mix>, first: u64, name: &str, sabotage: Sabotage) {
    noticed_beside(Sabotage::default(), mix, first, name, sabotage);
}

/// The seed that notices must break no promise with the mechanism in place, which `otherwise` has: else it tells of something else.
/// `LH_FIRST_SEED` looks from there on, and then only within `LH_SEEDS`; alone that says nothing of how rare it is what one looks for.
fn noticed_beside(otherwise: Sabotage, mix: Option<Mix>, first: u64, name: &str, sabotage: Sabotage) {
    let mix = wanted_mix().or(mix);
    let wanted = number("LH_FIRST_SEED");
    let first = wanted.unwrap_or(first);
    let within = wanted.and(number("LH_SEEDS")).unwrap_or(NOTICED_WITHIN);
    if let Some(seed) = number("LH_SEED") {
        println!("{name}: {:?}", run_only(mix, seed, sabotage, true).err());
        return;
    }
    let found =
        (first..first + within).find_map(|seed| Some((seed, run_only(mix, seed, sabotage, false).err()?)));
    let (seed, what) = found.unwrap_or_else(|| panic!("{name}: not noticed within {within} seeds"));
    println!("{name}: noticed by seed {seed}: {what}");
    if let Err(e) = run_only(mix, seed, otherwise, false) {
        panic!("{mix:?}, LH_SEED={seed} fails with the mechanism, too: {e}");
    }
}

macro_rules! sabotage {
    ($($test:ident: $part:ident $value:expr;)*) => {$(
        #[test]
        fn $test() {
            let mut sabotage = Sabotage::default();
            sabotage.$part = $value;
            noticed(stringify!($test), sabotage);
        }
    )*};
}

use datapath::conductor::Sabotage as InConductor;
use datapath::queue::Sabotage as InQueue;
use replica::serve::core::Sabotage as InReplica;

/// Epochs do not say what their members had recorded, and marks are taken back without rounds.
fn without_rounds() -> InConductor {
    InConductor { after_unnoted: true, rounds_unasked: true, ..InConductor::default() }
}

/// Rare: an engine has to die after one replica has folded a snapshot and before another has, with a write in doubt beside what
/// was folded.
#[test]
fn repaired_layer_by_layer() {
    let conductor = InConductor { repair_by_layer: true, ..InConductor::default() };
    noticed_from(7_001, "repaired_layer_by_layer", Sabotage { conductor, ..Sabotage::default() });
}

/// Rare: a replica has to come back after a revert that it has missed, to a block that was written before and not since. Where epochs
/// and rounds tell who lacks what, it is not met in the usual runs, so this engine does without.
#[test]
fn map_believed_after_a_revert() {
    let conductor = InConductor { others_marks_spared: true, ..without_rounds() };
    let otherwise = Sabotage { conductor, ..Sabotage::default() };
    let replica = InReplica { map_survives_revert: true, ..InReplica::default() };
    let sabotage = Sabotage { replica, ..otherwise };
    noticed_beside(otherwise, None, 2_501, "map_believed_after_a_revert", sabotage);
}

/// Rare, among runs with slow folds, too: a host has to lose its power between a snapshot and the flush that settles it, and to
/// be asked for a fold into that snapshot while what it lacks of it is copied.
#[test]
fn folded_beside_a_repair() {
    let conductor = InConductor { fold_beside_repair: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Folds), 3_001, "folded_beside_a_repair", sabotage);
}

/// Rare: an engine that is stopped has to read in a file when the replica has folded it away, or another engine has it.
#[test]
fn reads_in_files_that_are_granted_no_more() {
    let sabotage = Sabotage { grants_endless: true, ..Sabotage::default() };
    noticed_from(17_001, "reads_in_files_that_are_granted_no_more", sabotage);
}

/// All members have to be lost after a revert and a snapshot, and one opened anew.
#[test]
fn layers_told_in_another_order_taken_for_others() {
    let conductor = InConductor { order_counts: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Branches), 1, "layers_told_in_another_order_taken_for_others", sabotage);
}

/// All disks have to be full in the middle of a write while a replica is filled, behind what was copied to it.
#[test]
fn part_of_a_refused_write_not_done_by_who_is_filled() {
    let sabotage = Sabotage { queue: Some(InQueue::FillersLackParts), ..Sabotage::default() };
    noticed_in(Some(Mix::Members), 1, "part_of_a_refused_write_not_done_by_who_is_filled", sabotage);
}

/// Clients have to leave at all.
#[test]
fn what_was_given_up_done_all_the_same() {
    let sabotage = Sabotage { queue: Some(InQueue::NotAbandoned), ..Sabotage::default() };
    noticed_in(Some(Mix::Clients), 1, "what_was_given_up_done_all_the_same", sabotage);
}

/// A thread has to be kept from its processor between its look for a client and the write's place in the order.
#[test]
fn what_was_given_up_sent_once_it_has_its_range() {
    let sabotage = Sabotage { queue: Some(InQueue::NotLooked), ..Sabotage::default() };
    noticed_in(Some(Mix::Clients), 1, "what_was_given_up_sent_once_it_has_its_range", sabotage);
}

/// Rare: a snapshot has to be folded away and another one to get its name while a replica is out that comes back to just that.
#[test]
fn another_snapshot_of_the_same_name_and_time() {
    let conductor = InConductor { same_time_again: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_from(1, "another_snapshot_of_the_same_name_and_time", sabotage);
}

/// Rare even there: a member has to die while another replica is filled, with a write in doubt over what is in a removed snapshot, and
/// nothing to write there again before the next scrub.
#[test]
fn who_is_filled_spared_what_is_merged() {
    let conductor = InConductor { spare_filler: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Fills), 8_001, "who_is_filled_spared_what_is_merged", sabotage);
}

/// Rare: a block has to be lost with the power of one host in a snapshot that is not flushed yet, and zeroed in the head before that is
/// repaired. Where epochs and rounds tell who lacks what, none of 50,000 seeds comes to that, so this engine does without.
#[test]
fn zeroed_over_what_is_in_doubt() {
    let otherwise = Sabotage { conductor: without_rounds(), ..Sabotage::default() };
    let replica = InReplica { zero_over_doubt: true, ..InReplica::default() };
    let sabotage = Sabotage { replica, ..otherwise };
    noticed_beside(otherwise, None, 703_001, "zeroed_over_what_is_in_doubt", sabotage);
}

/// One engine has to let in both directories, or the authority's epoch to be put back.
#[test]
fn what_members_had_recorded_not_noted() {
    let conductor = InConductor { after_unnoted: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Older), 1, "what_members_had_recorded_not_noted", sabotage);
}

/// A copy of a disk has to be put back.
#[test]
fn marks_taken_back_without_a_round() {
    let conductor = InConductor { rounds_unasked: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Copies), 1, "marks_taken_back_without_a_round", sabotage);
}

/// A disk has to be copied in a round, and put back before the next one but one, though what was written behind it has no mark any more.
#[test]
fn what_is_written_behind_a_round_covered_by_it() {
    let conductor = InConductor { rounds_unpinned: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Copies), 1, "what_is_written_behind_a_round_covered_by_it", sabotage);
}

/// One that is put back as it was within the last two rounds lacks what others mark, when it and the engine die and they live on.
#[test]
fn marks_of_who_lives_on_spared() {
    let conductor = InConductor { others_marks_spared: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Copies), 1, "marks_of_who_lives_on_spared", sabotage);
}

/// One host has to lose its power, then another one, and then the first one again, between an answered write and its flush.
#[test]
fn losses_of_power_under_one_engine_alike() {
    let conductor = InConductor { losses_alike: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Absences), 2_001, "losses_of_power_under_one_engine_alike", sabotage);
}

/// The first replica has to be lost while the epoch with the second one is made.
#[test]
fn who_has_learnt_goes_on_alone() {
    let conductor = InConductor { learner_suffices: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Grow), 1, "who_has_learnt_goes_on_alone", sabotage);
}

/// The only member has to lose its power when the second one has just learnt everything, and what that one has and it has lost to matter.
#[test]
fn what_members_have_lost_kept_by_who_joins() {
    let conductor = InConductor { joiner_outlives_members: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Grow), 35_001, "what_members_have_lost_kept_by_who_joins", sabotage);
}

/// An engine that was stopped has to go on and read from a learner that was a member already, which nobody has noted.
#[test]
fn reads_of_before_from_who_has_learnt() {
    let conductor = InConductor { learner_unheard: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Grow), 10_001, "reads_of_before_from_who_has_learnt", sabotage);
}

/// Of an even number of replicas both halves have to go on, one after the other.
#[test]
fn half_of_the_replicas_taken_for_a_majority() {
    let conductor = InConductor { half_suffices: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Many), 1, "half_of_the_replicas_taken_for_a_majority", sabotage);
}

/// An engine has to be told to end before what was in doubt is equal.
#[test]
fn closed_cleanly_while_chunks_are_in_doubt() {
    let conductor = InConductor { close_in_doubt: true, ..InConductor::default() };
    let sabotage = Sabotage { conductor, ..Sabotage::default() };
    noticed_in(Some(Mix::Ends), 1, "closed_cleanly_while_chunks_are_in_doubt", sabotage);
}

/// Disks have to refuse records.
#[test]
fn records_that_failed_believed() {
    let sabotage = Sabotage { records_believed: true, ..Sabotage::default() };
    noticed_in(Some(Mix::Ends), 1, "records_that_failed_believed", sabotage);
}

/// An engine has to die after all have lost their power, before anybody flushes.
#[test]
fn loss_not_noted_for_the_next_engine() {
    let sabotage = Sabotage { loss_not_noted: true, ..Sabotage::default() };
    noticed_from(7_001, "loss_not_noted_for_the_next_engine", sabotage);
}

sabotage! {
    answered_before_the_epoch_is_durable: queue Some(InQueue::AckBeforeEpoch);
    overlapping_requests_not_ordered: queue Some(InQueue::NoOrder);
    reads_beside_writes_in_flight: queue Some(InQueue::UnclaimedReads);
    range_released_early: queue Some(InQueue::ReleaseEarly);
    flush_answered_early_by_the_engine: queue Some(InQueue::FlushEarly);
    who_becomes_a_member_not_awaited: queue Some(InQueue::NotAwaited);
    lent_memory_used_again_before_the_replica_is_heard: returned_unheard true;
    reads_where_blocks_were_once: counters_unseen true;
    reads_not_compared_with_checksums: reads_unverified true;
    reads_without_a_lease: queue Some(InQueue::NoLease);
    part_of_a_refused_write_overlooked: queue Some(InQueue::FullIsUntouched);
    different_parts_of_a_refused_write_taken_for_alike: queue Some(InQueue::PartsAreAlike);
    epoch_not_durable: conductor InConductor { epoch_not_durable: true, ..InConductor::default() };
    in_doubt_ranges_forgotten: conductor InConductor { forget_in_doubt: true, ..InConductor::default() };
    intent_ignored: conductor InConductor { skip_intent: true, ..InConductor::default() };
    leaver_on_one_queue: conductor InConductor { leaver_on_one_queue: true, ..InConductor::default() };
    copied_before_all_queues_send: conductor InConductor { join_without_drain: true, ..InConductor::default() };
    snapshot_without_a_pause: conductor InConductor { commit_without_pause: true, ..InConductor::default() };
    requests_go_on_before_all_have_switched: conductor InConductor { resume_early: true, ..InConductor::default() };
    power_of_the_source_not_asked_for: conductor InConductor { power_unasked: true, ..InConductor::default() };
    source_of_what_is_merged_spared: conductor InConductor { spare_source: true, ..InConductor::default() };
    flushes_end_well_after_a_loss: conductor InConductor { loss_untold: true, ..InConductor::default() };
    decided_operation_taken_back: conductor InConductor { undo_decided: true, ..InConductor::default() };
    fence_without_drain: replica InReplica { fence_without_drain: true, ..InReplica::default() };
    stale_let_in: replica InReplica { accept_stale: true, ..InReplica::default() };
    doubt_forgotten_by_the_replica: replica InReplica { forget_in_doubt: true, ..InReplica::default() };
    flush_answered_early_by_the_replica: replica InReplica { flush_early: true, ..InReplica::default() };
    leavers_unflushed_writes_forgotten: replica InReplica { map_begins_empty: true, ..InReplica::default() };
    map_with_a_gap_believed: replica InReplica { map_with_gap: true, ..InReplica::default() };
    missed_writes_not_saved: replica InReplica { missed_not_saved: true, ..InReplica::default() };
    own_doubt_of_who_returns_forgotten: conductor InConductor { forget_own_doubt: true, ..InConductor::default() };
    snapshot_taken_meanwhile_forgotten: conductor InConductor { snapshot_meanwhile: true, ..InConductor::default() };
    intent_not_durable: replica InReplica { intent_not_durable: true, ..InReplica::default() };
}
