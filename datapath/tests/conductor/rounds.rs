//! Marks are taken back in rounds, and who is put back as it was rounds ago is told from the member that it was.

use datapath::conductor::{Mode, Quorum, Robustness};
use lh_block::{BLOCK, Extent, Op, Round};
use lh_wire::WRITE_WINDOW;

use crate::replica::Replica;
use crate::stories::{opened, plan};
use crate::world::{CHUNK, Plan, World};

impl World {
    fn round(&self, replica: usize) -> Option<Round> {
        self.replicas[replica - 1].epoch.as_ref().and_then(|e| e.round)
    }

    /// All members have recorded this one.
    fn runs_to_round(&mut self, round: u64) {
        self.run_until("the round comes", |w| (1..=3).all(|r| w.round(r) >= Some(Round(round))));
        assert!((1..=3).all(|r| self.round(r) == Some(Round(round))), "no two at once");
    }

    /// Writes a block, each in a chunk of its own, and flushes.
    fn writes_durably_to(&mut self, hot: u64) {
        self.writes_to(hot);
        let (e, before) = (self.engines.len() - 1, self.oracle.flushes.len());
        assert!(self.request(e, 0, Op::Flush, Extent::default()));
        self.run_until("the flush is answered", |w| w.oracle.flushes.len() > before);
    }

    fn is_marked(&self, hot: u64) -> bool {
        let chunk = Self::hot(hot) * BLOCK / CHUNK;
        self.replicas.iter().any(|r| r.intent().contains(&chunk))
    }
}

#[test]
fn marks_go_in_the_second_round_after_the_flush_that_covers_them() {
    let mut world = opened(Quorum::Any);
    world.writes_durably_to(2);
    world.runs_to_round(1);
    // Whoever is copied now has not got this, and is in the round that was asked for before it.
    world.writes_durably_to(4);
    world.runs_to_round(2);
    world.run_for(100);
    assert!(!world.is_marked(2) && world.is_marked(4));
    world.runs_to_round(3);
    world.run_for(100);
    assert!(!world.is_marked(4));
    world.run_for(60_000);
    world.runs_to_round(3);
    world.settle();
}

/// Programs from before rounds answer that they have the epoch already.
#[test]
fn marks_go_though_a_replica_does_not_know_of_rounds() {
    let mut world = opened(Quorum::Any);
    world.replicas[1].knows_rounds = false;
    world.replicas[1].epoch.as_mut().expect("an epoch").round = None;
    world.writes_durably_to(2);
    world.run_until("the marks go", |w| !w.is_marked(2));
    assert_eq!((1..=3).map(|r| world.round(r)).collect::<Vec<_>>(), [Some(Round(2)), None, Some(Round(2))]);
    world.crash_engine();
    world.run_until("the volume opens", World::is_open);
    assert_eq!((world.members().len(), world.status().counters.rebuilds), (3, 0));
    world.settle();
}

/// Their programs are exchanged for older ones and back, each time with the replicas away. What lies in the directories from before is
/// rounds behind, and nobody is taken for an older copy by it.
#[test]
fn a_round_from_before_an_older_program_is_not_believed() {
    let mut world = opened(Quorum::Any);
    world.writes_durably_to(2);
    world.runs_to_round(2);
    for knows_rounds in [false, true] {
        (1..=3).for_each(|r| world.dies(r));
        world.run_until("it waits for them", |w| w.status().robustness == Robustness::Faulted);
        world.replicas.iter_mut().for_each(|r| r.knows_rounds = knows_rounds);
        (1..=3).for_each(|r| world.returns(r));
        world.run_until("it goes on", |w| w.status().robustness == Robustness::Healthy);
        for _ in 0..3 {
            world.writes_durably_to(2);
            world.run_until("the mark goes", |w| !w.is_marked(2));
        }
    }
    assert_eq!(world.status().counters.rebuilds, 0);
    world.settle();
}

/// It is asked again: nothing is covered before all have the round, and nobody is put out.
#[test]
fn marks_stay_while_a_round_has_no_place_on_a_disk() {
    let mut world = opened(Quorum::Any);
    world.replicas[1].epochs_full = true;
    world.writes_durably_to(2);
    world.run_for(60_000);
    assert!(world.is_marked(2));
    assert_eq!((world.round(1), world.round(2)), (Some(Round(1)), Some(Round(0))));
    assert!((1..=3).all(|r| world.mode(r) == Mode::Rw));
    world.replicas[1].epochs_full = false;
    world.run_until("the marks go", |w| !w.is_marked(2));
    world.runs_to_round(2);
    world.settle();
}

/// A member was asked and is lost. Nobody who was asked, or was not, is taken for an older copy.
#[test]
fn who_is_lost_while_a_round_is_asked_for_comes_back_as_what_it_was() {
    for asked in [false, true] {
        let mut world = opened(Quorum::Any);
        world.writes_durably_to(2);
        world.runs_to_round(1);
        world.replicas[if asked { 0 } else { 2 }].stalled_until = u64::MAX;
        world.run_until("some have the round", |w| (1..=3).any(|r| w.round(r) == Some(Round(2))));
        assert!((1..=3).any(|r| world.round(r) == Some(Round(1))));
        (1..=3).for_each(|r| world.dies(r));
        world.crash_engine();
        world.replicas.iter_mut().for_each(|r| r.stalled_until = 0);
        (1..=3).for_each(|r| world.returns(r));
        world.run_until("the volume opens", World::is_open);
        assert_eq!(world.members().len(), 3);
        world.settle();
    }
}

/// What it was some rounds before takes the first one's place.
fn as_it_was(world: &mut World) -> Replica {
    world.writes_durably_to(2);
    let copy = world.replicas[0].clone();
    world.writes_durably_to(2);
    world.runs_to_round(2);
    world.run_for(100);
    assert!(!world.is_marked(2));
    copy
}

#[test]
fn who_is_put_back_as_it_was_rounds_ago_is_not_begun_with() {
    for quorum in [Quorum::Any, Quorum::Majority] {
        let mut world = opened(quorum);
        let copy = as_it_was(&mut world);
        (1..=3).for_each(|r| world.dies(r));
        world.crash_engine();
        world.replicas[0] = copy;
        world.replicas[0].kill();
        (1..=3).for_each(|r| world.returns(r));
        world.run_until("the volume opens", World::is_open);
        assert_eq!(world.members(), ["r2", "r3"]);
        world.run_until("it is filled", |w| w.mode(1) == Mode::Rw);
        world.settle();
    }
}

/// The others are back too late: what they hold is not overwritten with what the copy lacks.
#[test]
fn who_is_rounds_ahead_of_the_one_that_was_begun_with_is_kept_as_it_is() {
    let mut world = opened(Quorum::Any);
    let copy = as_it_was(&mut world);
    (1..=3).for_each(|r| world.dies(r));
    world.crash_engine();
    world.replicas[0] = copy;
    world.replicas[0].kill();
    world.returns(1);
    world.run_until("the volume opens", World::is_open);
    assert_eq!(world.members(), ["r1"]);
    let held = world.replicas[1].epoch.clone();
    world.returns(2);
    world.run_for(30_000);
    let why = world.status().replicas[1].last_error.clone();
    assert!(why.is_some_and(|why| why.contains("rounds ahead")), "{:?}", world.status().replicas);
    assert_eq!((world.mode(2), world.replicas[1].rebuilding), (Mode::Err, false));
    assert_eq!(world.replicas[1].epoch, held);
}

#[test]
fn who_is_put_back_as_it_was_before_a_clean_end_is_not_begun_with() {
    let mut world = opened(Quorum::Any);
    world.writes_durably_to(2);
    let copy = world.replicas[0].clone();
    world.writes_durably_to(2);
    world.command(datapath::conductor::Command::Shutdown);
    world.run_until("it has ended", |w| w.happened.contains_key("closed"));
    world.replicas[0] = copy;
    world.replicas[0].kill();
    world.returns(1);
    world.run_until("the volume opens", World::is_open);
    assert_eq!(world.members(), ["r2", "r3"]);
    world.run_until("it is filled", |w| w.mode(1) == Mode::Rw);
    world.settle();
}

/// The only one that is left dies under an engine that lives on.
#[test]
fn who_is_put_back_as_it_was_rounds_ago_is_not_gone_on_with() {
    let mut world = opened(Quorum::Any);
    let copy = as_it_was(&mut world);
    world.all_die_and_1_returns_as(copy);
    world.goes_on_when_3_returns();
}

/// Its host has died together with the engine, and is back as it was within the last two rounds, while the others lived on. What they were
/// asked to write since is marked on them, and not on the copy.
#[test]
fn who_is_put_back_as_it_was_within_two_rounds_gets_what_the_others_mark() {
    for quorum in [Quorum::Any, Quorum::Majority] {
        let mut world = opened(quorum);
        world.writes_durably_to(2);
        let copy = world.replicas[0].clone();
        world.writes_durably_to(4);
        // The last writes of a session are remembered one by one: this is none of them.
        (0..WRITE_WINDOW).for_each(|_| world.writes_to(6));
        assert!(world.is_marked(4) && world.round(1) == copy.epoch.as_ref().and_then(|e| e.round));
        world.dies(1);
        world.replicas[0] = copy;
        world.replicas[0].kill();
        world.crash_engine();
        world.returns(1);
        world.run_until("the volume opens", World::is_open);
        assert_eq!(world.members().len(), 3);
        world.reads_from(4);
        world.settle();
    }
}

/// The copy is one from a clean end, and the engine after that died before it had asked for two rounds. By itself it says that it lacks
/// nothing.
#[test]
fn who_is_put_back_as_it_was_before_the_engine_began_is_not_begun_with() {
    let mut world = opened(Quorum::Majority);
    world.writes_durably_to(2);
    world.command(datapath::conductor::Command::Shutdown);
    world.run_until("it has ended", |w| w.happened.contains_key("closed"));
    let copy = world.replicas[0].clone();
    world.run_until("the next one serves", World::is_open);
    world.writes_durably_to(4);
    (0..WRITE_WINDOW).for_each(|_| world.writes_to(6));
    world.dies(1);
    world.replicas[0] = copy;
    world.replicas[0].kill();
    world.crash_engine();
    world.returns(1);
    world.run_until("the volume opens", World::is_open);
    world.reads_from(4);
    assert_eq!(world.members(), ["r2", "r3"]);
    world.run_until("it is filled", |w| w.mode(1) == Mode::Rw);
    world.settle();
}

/// A copy of the round before goes on with the others, and is a member like them from then on. It gets an epoch in the present round before
/// the next one is asked for, or it would be two behind them, and be left out where it alone has kept its power.
#[test]
fn who_goes_on_from_the_round_before_is_in_the_present_one_before_the_next() {
    let mut world = opened(Quorum::Any);
    world.writes_durably_to(2);
    let copy = world.replicas[0].clone();
    world.runs_to_round(1);
    world.run_for(100);
    (1..=3).for_each(|r| world.dies(r));
    world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
    world.replicas[0] = copy;
    world.replicas[0].kill();
    (1..=3).for_each(|r| world.returns(r));
    world.run_until("they go on", |w| w.status().robustness == Robustness::Healthy);
    world.writes_durably_to(4);
    world.replicas[0].stalled_until = u64::MAX;
    world.run_until("others have the next round", |w| (2..=3).any(|r| w.round(r) == Some(Round(2))));
    (1..=3).for_each(|r| world.dies(r));
    world.crash_engine();
    world.replicas[0].stalled_until = 0;
    (1..=3).for_each(|r| world.returns(r));
    world.run_until("the volume opens", World::is_open);
    assert_eq!(world.members().len(), 3);
    world.settle();
}

/// It is one of two that are left of three, and goes on with the other, under an engine that lives on.
#[test]
fn who_returns_as_it_was_within_two_rounds_gets_what_the_engine_knows_to_be_marked() {
    let mut world = opened(Quorum::Majority);
    world.dies(3);
    world.writes_durably_to(2);
    let copy = world.replicas[0].clone();
    world.writes_durably_to(4);
    assert!(world.is_marked(4));
    world.dies(1);
    world.replicas[0] = copy;
    world.replicas[0].kill();
    world.run_until("too few are left", |w| w.status().robustness == Robustness::Faulted);
    world.returns(1);
    world.run_until("it goes on", |w| w.status().robustness != Robustness::Faulted);
    world.reads_from(4);
    world.returns(3);
    world.settle();
}

/// A copy has what a revert takes away, and the head that stands where the new one stands.
#[test]
fn two_rounds_follow_a_revert() {
    let mut world = World::new(7, Plan { replicas: 3, ..plan(Quorum::Any) });
    world.run_until("the volume opens", World::is_open);
    let command = world.snapshot("a");
    assert_eq!(world.finish(command), Ok(()));
    let before = world.round(1).expect("a round").0;
    let command = world.revert("a");
    assert_eq!(world.finish(command), Ok(()));
    world.run_for(1000);
    world.runs_to_round(before + 2);
    assert_eq!(world.status().robustness, Robustness::Healthy);
    world.settle();
}
