//! Stories, told step by step. Replicas are numbered from 1, as their names are.

use datapath::conductor::{
    CHANGES_MAX, Command, CommandError, Mode, NewLimits, Quorum, Robustness, Sabotage,
};
use datapath::message::Switch;
use lh_block::{BLOCK, Extent, Generation, Op, SNAPSHOTS_MAX};

use crate::world::{Plan, SIZE, World};

const SECOND: u64 = 1_000_000_000;

pub(crate) fn plan(quorum: Quorum) -> Plan {
    Plan {
        quorum,
        replicas: 3,
        queues: 2,
        requests: 0,
        fault_every: 1,
        faults: &[],
        faults_max: 0,
        grace_ns: 3 * SECOND,
        sabotage: Sabotage::default(),
    }
}

fn quiet(quorum: Quorum) -> World {
    World::new(7, plan(quorum))
}

pub(crate) fn opened(quorum: Quorum) -> World {
    opened_by(7, quorum)
}

/// Things happen in the order of this seed.
pub(crate) fn opened_by(seed: u64, quorum: Quorum) -> World {
    let mut world = World::new(seed, plan(quorum));
    world.run_until("the volume opens", World::is_open);
    world
}

impl World {
    pub(crate) fn is_open(&mut self) -> bool {
        self.status().open
    }

    pub(crate) fn mode(&self, replica: usize) -> Mode {
        self.status().replicas[replica - 1].mode
    }

    /// The process dies and stays away.
    pub(crate) fn dies(&mut self, replica: usize) {
        self.kill(replica - 1, u64::MAX);
    }

    pub(crate) fn returns(&mut self, replica: usize) {
        self.restart(replica - 1);
    }

    /// Until a write is answered.
    pub(crate) fn writes(&mut self) {
        self.writes_to(0);
    }

    pub(crate) fn writes_to(&mut self, hot: u64) {
        let last = self.engines.len() - 1;
        let before = self.oracle.acknowledged;
        let range = Extent::new(Self::hot(hot) * BLOCK, BLOCK);
        assert!(self.request(last, 0, Op::Write { fua: false }, range));
        self.run_until("the write is answered", |w| w.oracle.acknowledged > before);
    }

    pub(crate) fn reads(&mut self) {
        self.reads_from(0);
    }

    pub(crate) fn reads_from(&mut self, hot: u64) {
        let last = self.engines.len() - 1;
        let before = self.oracle.answered_reads;
        assert!(self.request(last, 1, Op::Read, Extent::new(Self::hot(hot) * BLOCK, BLOCK)));
        self.run_until("the read is answered", |w| w.oracle.answered_reads > before);
    }

    pub(crate) fn members(&self) -> Vec<String> {
        self.status().epoch.map(|e| e.members).unwrap_or_default()
    }

    pub(crate) fn finish(&mut self, command: u64) -> Result<(), CommandError> {
        self.run_until("the command ends", |w| w.answers.contains_key(&command));
        self.answers[&command].clone()
    }
}

#[test]
fn a_new_volume_opens_with_all_its_replicas() {
    let world = opened(Quorum::Any);
    assert_eq!(world.members(), ["r1", "r2", "r3"]);
    assert_eq!(world.authority.epoch, world.status().epoch);
    assert_eq!(world.status().robustness, Robustness::Healthy);
}

#[test]
fn a_new_volume_waits_for_its_last_replica() {
    let mut world = quiet(Quorum::Any);
    world.dies(3);
    world.run_for(30_000);
    assert!(!world.is_open());
    assert!(world.status().waiting_for.is_some_and(|w| w.contains("r3")));
    world.returns(3);
    world.run_until("the volume opens", World::is_open);
}

#[test]
fn a_write_waits_for_the_epoch_without_the_replica_that_missed_it() {
    let mut world = opened(Quorum::Any);
    world.authority.away_until = world.now + 20 * SECOND;
    world.dies(3);
    assert!(world.request(0, 0, Op::Write { fua: false }, Extent::new(0, BLOCK)));
    world.run_for(15_000);
    assert_eq!(world.oracle.acknowledged, 0, "the authority has not stored the epoch yet");
    world.run_until("the write is answered", |w| w.oracle.acknowledged > 0);
    assert_eq!(world.members(), ["r1", "r2"]);
    assert_eq!(world.status().robustness, Robustness::Degraded);
}

#[test]
fn the_ones_that_were_left_out_do_not_start_without_the_last() {
    let mut world = opened(Quorum::Any);
    world.dies(3);
    world.run_until("3 is out", |w| w.members() == ["r1", "r2"]);
    world.dies(2);
    world.run_until("2 is out", |w| w.members() == ["r1"]);
    world.writes();
    world.dies(1);
    world.crash_engine();
    world.returns(2);
    world.returns(3);
    world.run_for(60_000);
    assert!(!world.is_open(), "acknowledged writes would be lost");
    world.returns(1);
    world.run_until("the volume opens", World::is_open);
    assert_eq!(world.members(), ["r1"]);
    world.settle();
}

#[test]
fn the_last_member_is_waited_for_and_what_waits_is_written_then() {
    let mut world = opened(Quorum::Any);
    (1..=3).for_each(|r| world.dies(r));
    assert!(world.request(0, 0, Op::Write { fua: false }, Extent::new(0, BLOCK)));
    world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
    world.run_for(20_000);
    assert_eq!(world.oracle.acknowledged, 0);
    world.returns(2);
    world.run_until("the write is answered", |w| w.oracle.acknowledged > 0);
    assert_eq!(world.members(), ["r2"]);
    world.returns(1);
    world.returns(3);
    world.settle();
}

#[test]
fn with_a_majority_one_of_three_may_go_and_the_second_is_waited_for() {
    let mut world = opened(Quorum::Majority);
    world.dies(1);
    world.writes();
    assert_eq!(world.members(), ["r2", "r3"]);
    world.dies(2);
    assert!(world.request(0, 0, Op::Write { fua: false }, Extent::new(0, BLOCK)));
    world.run_for(20_000);
    assert_eq!((world.oracle.acknowledged, world.members().len()), (1, 2));
    world.returns(2);
    world.run_until("the write is answered", |w| w.oracle.acknowledged == 2);
    world.returns(1);
    world.settle();
}

#[test]
fn a_majority_that_lost_its_second_member_for_good_is_saved_by_the_first() {
    let mut world = opened(Quorum::Majority);
    world.dies(3);
    world.writes();
    world.dies(2);
    world.crash_engine();
    world.returns(3);
    world.run_until("1 and 3 go on", World::is_open);
    assert_eq!(world.members(), ["r1", "r3"]);
    world.reads();
    world.returns(2);
    world.settle();
}

/// A volume whose second replica has missed a write and is back.
fn returning(queues: u8) -> World {
    let mut world = World::new(7, Plan { queues, ..plan(Quorum::Any) });
    world.run_until("the volume opens", World::is_open);
    world.writes();
    world.dies(2);
    world.run_until("2 is out", |w| w.members() == ["r1", "r3"]);
    world.writes();
    world.returns(2);
    world
}

#[test]
fn a_returning_replica_is_brought_in_sync_and_then_a_member() {
    let mut world = returning(2);
    world.run_until("2 is being rebuilt", |w| w.mode(2) == Mode::Wo);
    world.writes();
    world.run_until("2 is a member", |w| w.mode(2) == Mode::Rw);
    assert_eq!(world.members(), ["r1", "r2", "r3"]);
    assert_eq!(world.status().counters.rebuilds, 1);
    world.settle();
}

/// What lies below the lowest layer is in nobody's chain: who lacks it would be a member that reads zeroes there.
#[test]
fn who_stands_on_another_backing_file_is_not_brought_in_sync() {
    for (source, target, is_filled) in [
        (Some(true), Some(false), false),
        (Some(false), Some(true), false),
        (Some(true), Some(true), true),
        // An older program does not say.
        (None, Some(true), true),
        (Some(true), None, true),
    ] {
        let mut world = opened(Quorum::Any);
        world.dies(2);
        world.run_until("2 is out", |w| w.members() == ["r1", "r3"]);
        for (number, backed) in [(0, source), (1, target), (2, source)] {
            world.replicas[number].backed = backed;
        }
        world.returns(2);
        let refused = |w: &World| w.engines[0].log.iter().any(|line| line.contains("backing file"));
        world.run_until("2 is a member, or refused", |w| w.mode(2) == Mode::Rw || refused(w));
        assert_eq!(!refused(&world), is_filled, "{source:?} {target:?}");
        assert_eq!(world.mode(2) == Mode::Rw, is_filled);
    }
}

#[test]
fn nobody_is_copied_to_before_every_queue_writes_to_it() {
    let mut world = returning(2);
    world.run_until("2 is to be filled", |w| {
        w.engines[0].queues[1].is_told(|s| matches!(s, Switch::Fill { .. }))
    });
    let until = world.now + 2 * SECOND;
    world.engines[0].queues[1].deaf_until = until;
    world.run_until("what is copied is known", |w| {
        w.engines[0].log.iter().any(|l| l.contains("bytes to look at"))
    });
    assert!(world.now >= until, "a write on the other queue may miss 2 and be copied too early");
    world.settle();
}

#[test]
fn nobody_becomes_a_member_before_every_queue_waits_for_it() {
    // The flush that follows is asked of one of them: it does not hold up both runs.
    for deaf in [1, 2] {
        let mut world = returning(3);
        world.run_until("2 is to be awaited", |w| {
            w.engines[0].queues[deaf].is_told(|s| matches!(s, Switch::Await { .. }))
        });
        // Clients of this queue may believe done what has not reached 2.
        let until = world.now + 2 * SECOND;
        world.engines[0].queues[deaf].deaf_until = until;
        world.run_until("2 is a member", |w| w.members() == ["r1", "r2", "r3"]);
        assert!(world.now >= until, "queue {deaf} was not asked");
        world.settle();
    }
}

#[test]
fn an_engine_waits_while_an_older_one_may_still_answer() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.dies(3);
    world.run_until("3 is out", |w| w.members() == ["r1", "r2"]);
    world.writes();
    // The first engine keeps its connection to 2, which the second does not reach.
    world.replicas[1].stalled_until = world.now + 60 * SECOND;
    world.start_engine(false);
    let start = world.now;
    world.run_until("the second one opens", World::is_open);
    assert!(world.now - start >= 7 * SECOND, "3 s for 2 to come, 4 s until the old one trusts it no more");
    world.returns(3);
    world.settle();
}

#[test]
fn a_restart_whose_old_engine_is_dead_does_not_wait() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.crash_engine();
    let start = world.now;
    world.run_until("the volume opens", World::is_open);
    assert!(world.now - start < SECOND);
    assert_eq!(world.members(), ["r1", "r2", "r3"], "in an epoch of its own");
    assert_eq!(world.status().epoch.map(|e| e.generation), Some(world.engines[0].generation));
}

#[test]
fn what_only_the_living_hold_is_kept_when_an_engine_and_a_replica_die() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.replicas[0].forget_unflushed();
    world.crash_engine();
    world.run_until("the volume opens", World::is_open);
    world.reads();
    assert!(world.status().counters.repaired_blocks > 0);
    world.settle();
}

#[test]
fn what_only_the_living_hold_is_kept_when_all_connections_break() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.replicas[0].forget_unflushed();
    world.replicas[1].end_session();
    world.replicas[2].end_session();
    world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
    world.run_until("all are back", |w| w.status().robustness == Robustness::Healthy);
    world.reads();
    assert_eq!((world.members().len(), world.status().counters.rebuilds), (3, 0));
    world.settle();
}

#[test]
fn a_flush_waits_until_no_member_lacks_what_it_covers() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.replicas[2].forget_unflushed();
    world.crash_engine();
    world.run_until("the volume opens", World::is_open);
    assert!(world.request(0, 1, Op::Flush, Extent::default()));
    world.run_until("the flush is answered", |w| w.engines[0].in_flight() == 0);
    assert_eq!(world.status().chunks_in_doubt, 0);
    // Now the only one that held it goes, and the power of the other, too.
    world.dies(1);
    world.dies(2);
    world.replicas[2].forget_unflushed();
    world.run_until("3 is left", |w| w.members() == ["r3"]);
    world.reads();
}

#[test]
fn a_joiner_records_itself_first() {
    let mut world = opened(Quorum::Any);
    world.dies(3);
    world.run_until("3 is out", |w| w.members() == ["r1", "r2"]);
    world.returns(3);
    world.run_until("3 is a member", |w| {
        let told = |r: &crate::replica::Replica, of: u64| {
            r.epoch.as_ref().is_some_and(|e| e.has("r3") && e.counter == of)
        };
        for counter in 2..9 {
            let others = w.replicas[..2].iter().any(|r| told(r, counter));
            assert!(!others || told(&w.replicas[2], counter), "the others know of 3 before 3 does");
        }
        w.mode(3) == Mode::Rw
    });
}

#[test]
fn an_epoch_that_did_not_count_never_will() {
    let mut world = opened(Quorum::Majority);
    world.dies(1);
    world.run_until("1 is out", |w| w.members() == ["r2", "r3"]);
    world.writes();
    world.returns(1);
    let knows = |r: &crate::replica::Replica| r.epoch.as_ref().is_some_and(|e| e.counter > 2 && e.has("r1"));
    world.run_until("1 has recorded that it is in", |w| knows(&w.replicas[0]));
    assert!(!world.replicas[1..].iter().any(knows), "the others have not");
    world.dies(1);
    world.crash_engine();
    world.run_until("the volume opens without 1", World::is_open);
    world.writes_to(8);
    world.command(Command::Shutdown);
    world.run_until("the engine has ended", |w| w.happened.contains_key("closed"));
    world.dies(2);
    world.returns(1);
    world.run_until("the volume opens without 2", World::is_open);
    world.reads_from(8);
    world.returns(2);
    world.settle();
}

#[test]
fn a_joiner_lost_while_its_epoch_is_stored_is_left_out_before_the_volume_opens() {
    let mut world = opened(Quorum::Any);
    world.dies(3);
    world.run_until("3 is out", |w| w.members() == ["r1", "r2"]);
    // The next engine does not reach 2, and waits until the one before cannot answer any more. Meanwhile 3 is synced.
    world.replicas[1].stalled_until = world.now + 60 * SECOND;
    world.start_engine(false);
    world.returns(3);
    world.run_until("3 is being rebuilt", |w| w.mode(3) == Mode::Wo);
    world.authority.away_until = world.now + 10 * SECOND;
    let knows = |w: &mut World| w.replicas[0].epoch.as_ref().is_some_and(|e| e.has("r3") && !e.has("r2"));
    world.run_until("1 has recorded that 3 is in", knows);
    world.dies(3);
    world.run_until("the second one opens", World::is_open);
    assert_eq!(world.members(), ["r1"]);
    world.writes();
    world.returns(3);
    world.settle();
}

#[test]
fn who_comes_back_takes_back_what_was_refused_meanwhile() {
    for seed in 0..100 {
        let mut world = World::new(seed, plan(Quorum::Any));
        world.run_until("the volume opens", World::is_open);
        world.replicas[1].prepare_something_else();
        world.snapshot("s1");
        world.run_until("1 has prepared it", |w| w.replicas[0].has_prepared());
        world.replicas.iter_mut().for_each(crate::replica::Replica::end_session);
        world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
        world.run_until("all are back", |w| w.status().robustness == Robustness::Healthy);
        let s2 = world.snapshot("s2");
        assert_eq!(world.finish(s2), Ok(()), "seed {seed}");
        world.settle();
    }
}

#[test]
fn a_snapshot_is_on_all_or_on_none() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let s1 = world.snapshot("s1");
    assert_eq!(world.finish(s1), Ok(()));
    let again = world.snapshot("s1");
    assert_eq!(world.finish(again), Err(CommandError::Exists("snapshot s1".into())));
    let bad = world.snapshot("../s1");
    assert!(matches!(world.finish(bad), Err(CommandError::Name(_))));
    // Somebody else's operation is prepared on 2: it refuses.
    world.replicas[1].prepare_something_else();
    let s2 = world.snapshot("s2");
    assert!(matches!(world.finish(s2), Err(CommandError::Refused { replica, .. }) if replica == "r2"));
    assert!(world.replicas.iter().all(|r| r.layers.len() == 2));
    world.writes();
    assert_eq!(world.status().robustness, Robustness::Healthy);
}

#[test]
fn a_snapshot_that_one_member_carried_out_is_finished_by_the_next_engine() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.snapshot("s1");
    world.run_until("one has carried it out", |w| w.replicas.iter().any(|r| r.layers.len() == 2));
    world.crash_engine();
    world.run_until("the volume opens", World::is_open);
    assert!(world.replicas.iter().all(|r| r.layers.len() == 2));
    world.settle();
}

#[test]
fn a_snapshot_that_nobody_carried_out_is_taken_back_by_the_next_engine() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.snapshot("s1");
    world.run_until("one has prepared it", |w| w.replicas.iter().any(|r| r.has_prepared()));
    world.crash_engine();
    world.run_until("the volume opens", World::is_open);
    assert!(world.replicas.iter().all(|r| r.layers.len() == 1 && !r.has_prepared()));
    let s1 = world.snapshot("s1");
    assert_eq!(world.finish(s1), Ok(()));
}

#[test]
fn a_clean_end_leaves_nothing_to_repair() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.command(Command::Shutdown);
    world.run_until("the engine has ended", |w| w.happened.contains_key("closed"));
    world.run_until("the volume opens", World::is_open);
    let counters = world.status().counters;
    assert_eq!((counters.repaired_blocks, counters.resolved_chunks), (0, 0));
    assert!(world.replicas.iter().all(|r| r.intent().is_empty()));
}

#[test]
fn an_engine_that_is_told_to_end_before_it_is_open_says_so_and_the_next_one_repairs() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.replicas[0].forget_unflushed();
    world.crash_engine();
    assert!(!world.is_open());
    world.command(Command::Shutdown);
    world.run_until("the engine has ended", |w| w.happened.contains_key("unopened"));
    assert!(!world.happened.contains_key("ended"), "no failure");
    world.run_until("the volume opens", World::is_open);
    world.reads();
    assert!(world.status().counters.repaired_blocks > 0);
    world.settle();
}

#[test]
fn marks_are_taken_back_after_a_while() {
    let mut world = opened(Quorum::Any);
    world.writes();
    assert!(world.replicas.iter().all(|r| !r.intent().is_empty()));
    // Nobody flushes: after a minute the engine does.
    world.run_for(150_000);
    assert!(world.replicas.iter().all(|r| r.intent().is_empty()));
}

#[test]
fn the_last_member_cannot_be_taken_out() {
    let mut world = opened(Quorum::Any);
    for name in ["r1", "r2"] {
        let out = world.command(Command::RemoveReplica { name: name.into() });
        assert_eq!(world.finish(out), Ok(()));
    }
    assert_eq!(world.members(), ["r3"]);
    let last = world.command(Command::RemoveReplica { name: "r3".into() });
    assert_eq!(world.finish(last), Err(CommandError::Needed("r3".into())));
    assert_eq!(world.status().replicas.len(), 1);
    world.writes();
}

#[test]
fn a_younger_engine_ends_an_older_one() {
    let mut world = opened(Quorum::Any);
    let old = world.engines[0].generation;
    world.start_engine(false);
    world.run_until("the old one has ended", |w| w.happened.contains_key("fenced"));
    assert!(world.engines[0].generation > old);
    assert_ne!(old, Generation::default());
}

/// While a younger engine fences the replicas one after the other, the older one puts out who it has lost, and its epoch counts:
/// the younger one starts from that, and does not take itself for the older of the two.
#[test]
fn an_older_engine_that_loses_its_replicas_does_not_end_a_younger_one() {
    for seed in 0..50 {
        let mut world = World::new(seed, plan(Quorum::Any));
        world.run_until("the volume opens", World::is_open);
        world.writes();
        world.start_engine(false);
        let younger = world.engine().number;
        let mut connects = std::mem::take(&mut world.engine().connects);
        world.run_until("the authority has answered", |w| !w.engine().load && w.engine().outside.is_empty());
        world.engine().connects = connects.split_off(2);
        let without = |w: &mut World| w.authority.epoch.as_ref().is_some_and(|e| !e.has("r3"));
        world.run_until("the older one has put 3 out", without);
        world.engine().connects.extend(connects);
        world.run_until("a younger one serves", World::is_open);
        assert_eq!(world.engine().number, younger, "seed {seed}: another had to be started");
        world.writes();
        world.settle();
        // Where it starts from what it had heard first, it learns of the other's epoch too late to know what 3 has missed.
        assert!(world.replicas.iter().any(|r| r.asked_for_others > 0), "seed {seed}: 3 is compared wholly");
    }
}

/// What the younger engine has told all to record has ended what was kept for the one that the older had put out: what that one has missed
/// nobody knows any more.
#[test]
fn who_was_put_out_by_an_epoch_that_came_first_after_all_is_compared_wholly() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.dies(3);
    world.run_until("the epoch without 3 is on its way", |w| w.engine().store.is_some());
    let first = world.engine().store.take();
    world.returns(3);
    world.start_engine(false);
    world.run_until("a younger one's is on its way", |w| w.engine().store.is_some());
    let younger = world.engine().store.take();
    assert!(younger.as_ref().is_some_and(|(_, epoch)| epoch.has("r3")));
    world.engines[0].store = first;
    world.run_until("the first is stored", |w| w.authority.epoch.as_ref().is_some_and(|e| !e.has("r3")));
    world.engine().store = younger;
    world.run_until("3 is in sync", |w| w.is_open() && w.members() == ["r1", "r2", "r3"]);
    assert!(world.replicas.iter().all(|r| r.asked_for_others == 0));
    world.settle();
}

/// The answer to what was to be stored before would be taken for that to the next.
#[test]
fn a_start_that_begins_again_waits_for_what_is_on_its_way_to_the_authority() {
    let mut world = quiet(Quorum::Any);
    world.run_until("the first epoch is on its way", |w| w.engine().store.is_some());
    let store = world.engine().store.take();
    world.dies(3);
    world.returns(3);
    world.run_for(20_000);
    let recorded = world.replicas.iter().filter_map(|r| r.epoch.as_ref());
    assert_eq!(recorded.map(|e| e.counter).collect::<Vec<_>>(), [1, 1, 1]);
    assert!(!world.is_open() && world.engine().store.is_none());
    world.engine().store = store;
    world.run_until("the volume opens", World::is_open);
    assert_eq!(world.authority.epoch, world.status().epoch);
    world.settle();
}

#[test]
fn unsafe_goes_on_with_whoever_is_here() {
    let mut world = opened(Quorum::Unsafe);
    world.dies(1);
    world.writes();
    assert_eq!(
        (world.mode(1), world.members(), &world.authority.epoch),
        (Mode::Err, strings(&["r2", "r3"]), &None)
    );
    world.dies(2);
    world.dies(3);
    world.crash_engine();
    world.returns(1);
    world.run_until("the volume opens", World::is_open);
    assert_eq!(world.members(), ["r1"], "what it has missed is given up");
    world.returns(2);
    world.returns(3);
    world.run_until("all are in sync", |w| w.members() == ["r1", "r2", "r3"]);
}

/// The engine's process ends before the replica that was out was filled again, or has begun to be.
#[test]
fn unsafe_begins_again_without_who_was_out() {
    let mut world = opened(Quorum::Unsafe);
    world.writes();
    world.dies(1);
    world.writes();
    world.crash_engine();
    world.returns(1);
    world.run_until("the volume opens", World::is_open);
    assert_eq!((world.members(), world.mode(2)), (strings(&["r2", "r3"]), Mode::Rw));
    world.reads();
    world.settle();
}

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| (*n).to_owned()).collect()
}

fn created() -> String {
    "2026-01-01T00:00:00Z".into()
}

#[test]
fn a_volume_grows_on_every_member_and_never_shrinks() {
    let mut world = opened(Quorum::Any);
    let size = world.status().size;
    let grown = 2 * size;
    let command = world.command(Command::Expand { size: grown, created: created() });
    assert_eq!(world.finish(command), Ok(()));
    assert_eq!(world.status().size, grown);
    assert!(world.replicas.iter().all(|r| r.size == grown && r.layers.len() == 2));
    let command = world.command(Command::Expand { size, created: created() });
    assert_eq!(world.finish(command), Err(CommandError::BadSize { now: grown, wanted: size }));
    world.writes();
    world.reads();
}

/// Several within a second, as scripts take them: whoever has been away tells them apart by their times, whatever their names are.
#[test]
fn no_two_snapshots_are_of_one_time() {
    let mut world = opened(Quorum::Any);
    for name in ["a", "b", "c"] {
        let command = world.snapshot(name);
        assert_eq!(world.finish(command), Ok(()));
    }
    for replica in &world.replicas {
        let times: Vec<&str> = replica.layers.iter().map(|layer| &*layer.created).collect();
        let second = |n: u8| format!("2026-01-01T00:00:0{n}Z");
        assert_eq!(times, [second(0), second(1), second(2), second(2)]);
    }
}

#[test]
fn a_revert_drops_the_head_on_every_member() {
    let mut world = opened(Quorum::Any);
    let command = world.snapshot("s");
    assert_eq!(world.finish(command), Ok(()));
    world.writes();
    let command = world.command(Command::Revert { name: "x".into(), created: created() });
    assert_eq!(world.finish(command), Err(CommandError::NotFound("snapshot x".into())));
    let command = world.command(Command::Revert { name: "s".into(), created: created() });
    assert_eq!(world.finish(command), Ok(()));
    for replica in &world.replicas {
        let head = replica.layers.last().expect("a head");
        assert!(replica.layers.len() == 2 && head.blocks.iter().all(Option::is_none));
    }
}

/// A revert is decided, and one dies before it carries it out. When it is brought in sync it is known by what it has prepared that its
/// head is the old one: whatever becomes of the engine, that goes only when the rebuild has begun.
#[test]
fn a_prepared_revert_is_told_from_until_the_rebuild_has_begun() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let snapshot = world.snapshot("s");
    assert_eq!(world.finish(snapshot), Ok(()));
    let revert = world.command(Command::Revert { name: "s".into(), created: created() });
    let holds = |w: &World, replica: usize| w.replicas[replica - 1].prepared.is_some();
    world.run_until("all have prepared it", |w| (1..=3).all(|r| holds(w, r)));
    world.run_until("one has switched", |w| (1..=3).any(|r| !holds(w, r)));
    let behind = (1..=3).find(|r| holds(&world, *r)).expect("another has not");
    world.dies(behind);
    assert_eq!(world.finish(revert), Ok(()));
    world.returns(behind);
    for _ in 0..2 {
        world.run_until("it is about to be rebuilt", |w| w.mode(behind) == Mode::Wo);
        assert!(holds(&world, behind));
        world.crash_engine();
    }
    world.run_until("the rebuild has begun", |w| !holds(w, behind));
    assert!(world.replicas[behind - 1].rebuilding);
    world.settle();
}

/// 2 is filled with what its older epoch's other members need not have. It is whole only in an epoch that is younger.
#[test]
fn who_is_filled_is_whole_only_in_the_epoch_that_takes_it_in() {
    for quorum in [Quorum::Any, Quorum::Majority] {
        let mut world = opened(quorum);
        world.dies(2);
        world.writes();
        let order =
            |w: &World, replica: usize| w.replicas[replica - 1].epoch.as_ref().map(lh_block::Epoch::order);
        let without = order(&world, 1);
        assert!(order(&world, 2) < without);
        world.returns(2);
        world.run_until("2 is being filled", |w| w.replicas[1].rebuilding);
        world.run_until("2 is whole", |w| !w.replicas[1].rebuilding);
        assert!(order(&world, 2) > without);
        assert_eq!(order(&world, 1), without, "who is filled is the first to record it");
        world.settle();
    }
}

/// Who asks may ask again and again while nothing is answered.
#[test]
fn no_more_changes_than_that_wait_for_replicas() {
    let mut world = opened(Quorum::Any);
    (1..=3).for_each(|r| world.dies(r));
    world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
    let waiting: Vec<_> = (0..CHANGES_MAX).map(|i| world.snapshot(&format!("s{}", i % 2))).collect();
    let one_more = world.snapshot("s0");
    assert_eq!(world.finish(one_more), Err(CommandError::TooManyWait(CHANGES_MAX)));
    (1..=3).for_each(|r| world.returns(r));
    let done = waiting.into_iter().filter(|command| world.finish(*command).is_ok()).count();
    assert_eq!(done, 2, "the others are there by then");
    let again = world.snapshot("s2");
    assert_eq!(world.finish(again), Ok(()));
    world.settle();
}

#[test]
fn snapshots_have_a_limit_that_can_be_changed() {
    let mut world = opened(Quorum::Any);
    let limit =
        |snapshots| Command::SetLimits(NewLimits { snapshots: Some(snapshots), ..NewLimits::default() });
    world.command(limit(1));
    let command = world.snapshot("a");
    assert_eq!(world.finish(command), Ok(()));
    let command = world.snapshot("b");
    assert_eq!(world.finish(command), Err(CommandError::TooManySnapshots { count: 1, limit: 1 }));
    assert_eq!(world.status().limits.snapshots, 1);
    // A removed one does not count.
    let command = world.command(Command::RemoveSnapshot { name: "a".into() });
    assert_eq!(world.finish(command), Ok(()));
    let command = world.snapshot("c");
    assert_eq!(world.finish(command), Ok(()));
    world.command(limit(2));
    let command = world.snapshot("b");
    assert_eq!(world.finish(command), Ok(()));
}

/// What no limit raises is not called one: only a fold makes room.
#[test]
fn a_full_chain_takes_a_snapshot_once_another_is_folded() {
    let mut world = opened(Quorum::Any);
    world.command(Command::SetLimits(NewLimits { snapshots: Some(250), ..NewLimits::default() }));
    for n in 0..SNAPSHOTS_MAX {
        let command = world.snapshot(&format!("s{n}"));
        assert_eq!(world.finish(command), Ok(()), "snapshot {n}");
    }
    let full = Err(CommandError::ChainFull(249));
    for _ in 0..2 {
        let command = world.snapshot("more");
        assert_eq!(world.finish(command), full);
        let command = world.command(Command::Expand { size: 2 * SIZE, created: created() });
        assert_eq!(world.finish(command), full);
        let command = world.command(Command::RemoveSnapshot { name: "s7".into() });
        assert_eq!(world.finish(command), Ok(()), "removed, and counted until it is folded");
    }
    let command = world.command(Command::Purge);
    assert_eq!(world.finish(command), Ok(()));
    world.run_until("it is folded", |w| w.replicas.iter().all(|r| r.layers.len() == 249));
    let command = world.snapshot("more");
    assert_eq!(world.finish(command), Ok(()));
}

/// A volume with the snapshots a and b, whose replicas have been told to fold a away.
pub(crate) fn purging() -> World {
    told_to_fold(opened(Quorum::Any))
}

/// The same, and folds end when they are told to.
pub(crate) fn purging_slowly(quorum: Quorum) -> World {
    let mut world = opened(quorum);
    world.replicas.iter_mut().for_each(|r| r.slow_folds = true);
    told_to_fold(world)
}

fn told_to_fold(mut world: World) -> World {
    for name in ["a", "b"] {
        let command = world.snapshot(name);
        assert_eq!(world.finish(command), Ok(()));
    }
    for command in [Command::RemoveSnapshot { name: "a".into() }, Command::Purge] {
        let command = world.command(command);
        assert_eq!(world.finish(command), Ok(()));
    }
    world
}

#[test]
fn a_purge_folds_what_is_removed_on_every_member() {
    let mut world = purging();
    // Nobody takes it for done before a replica has said so.
    let through = |w: &World| w.status().folds.iter().filter(|f| f.fold.is_none()).count();
    assert_eq!((world.status().folds.len(), through(&world)), (3, 0));
    world.run_until("a is gone everywhere", |w| w.replicas.iter().all(|r| r.layers.len() == 2));
    world.run_until("every replica is through", |w| through(w) == 3);
    world.writes();
    world.reads();
}

/// An engine lives through any number of snapshots.
#[test]
fn snapshots_leave_no_names_behind_that_nobody_needs() {
    let mut world = opened(Quorum::Any);
    let takes = |world: &mut World, name: &str| {
        let command = world.snapshot(name);
        assert_eq!(world.finish(command), Ok(()));
    };
    for n in 0..20 {
        takes(&mut world, &format!("s{n}"));
    }
    assert_eq!(world.engines[0].layers.len(), 0);
    // Who is filled is filled by name.
    let rebuild = world.command(Command::Rebuild { name: "r2".into() });
    assert_eq!(world.finish(rebuild), Ok(()));
    world.run_until("2 is out", |w| w.mode(2) != Mode::Rw);
    world.run_until("2 is in sync", |w| w.mode(2) == Mode::Rw);
    assert_eq!(world.engines[0].layers.len(), 20);
    takes(&mut world, "t");
    assert_eq!(world.engines[0].layers.len(), 0);
    world.settle();
}
