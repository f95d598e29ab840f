//! What was answered and not flushed is gone: a flush does not promise it (`docs/decisions/0019-a-flush-tells-of-a-loss.md`).

use datapath::conductor::{Command, CommandError, Mode, Quorum, Robustness};
use datapath::message::MemberId;
use lh_block::{BLOCK, Extent, Op};

use crate::stories::opened;
use crate::world::World;

impl World {
    /// Whether a flush that a client asks for now ends well.
    fn flushes_well(&mut self) -> bool {
        let last = self.engines.len() - 1;
        let before = self.oracle.flushes.len();
        assert!(self.request(last, 1, Op::Flush, Extent::default()));
        self.run_until("the flush is answered", |w| w.oracle.flushes.len() > before);
        self.oracle.flushes[before]
    }

    /// All hosts lose their power and have it back at once; the engine lives on.
    fn all_lose_power(&mut self) {
        self.replicas.iter_mut().for_each(crate::replica::Replica::forget_unflushed);
        self.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
        self.run_until("all are back", |w| w.status().robustness == Robustness::Healthy);
    }
}

#[test]
fn flushes_fail_for_a_minute_after_a_loss() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.all_lose_power();
    assert!(world.engine().loss_noted, "the next engine would not know");
    assert!(!world.flushes_well(), "it would promise what is gone");
    world.run_for(50_000);
    assert!(!world.flushes_well(), "whoever asked first need not be who wrote it");
    world.run_for(15_000);
    world.writes();
    assert!(world.flushes_well());
    world.settle();
}

#[test]
fn with_one_replica_there_is_nobody_to_copy_from_and_it_is_told_all_the_same() {
    let mut world = opened(Quorum::Any);
    world.dies(2);
    world.dies(3);
    world.run_until("1 is left", |w| w.mode(2) == Mode::Err && w.mode(3) == Mode::Err);
    world.writes();
    world.replicas[0].forget_unflushed();
    world.run_until("it is lost", |w| w.status().robustness == Robustness::Faulted);
    world.run_until("it is back", |w| w.status().robustness == Robustness::Degraded);
    assert!(!world.flushes_well(), "it would promise what is gone");
}

/// It was sent before anybody lost anything, and reaches a replica when all is gone.
#[test]
fn a_flush_that_was_under_way_fails_as_well() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.replicas.iter_mut().for_each(|r| r.stalled_until = u64::MAX);
    assert!(world.request(0, 1, Op::Flush, Extent::default()));
    world.run_for(10);
    world.replicas.iter_mut().for_each(|r| {
        r.stalled_until = 0;
        r.forget_unflushed();
    });
    world.run_until("the flush is answered", |w| !w.oracle.flushes.is_empty());
    assert_eq!(world.oracle.flushes, [false]);
}

#[test]
fn who_flushed_before_has_lost_nothing() {
    let mut world = opened(Quorum::Any);
    world.writes();
    assert!(world.flushes_well());
    world.all_lose_power();
    assert!(!world.engine().loss_noted);
    assert!(world.flushes_well());
    world.settle();
}

#[test]
fn nothing_is_lost_as_long_as_one_host_keeps_its_power() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.dies(2);
    world.replicas[0].forget_unflushed();
    world.replicas[2].forget_unflushed();
    world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
    world.returns(2);
    world.run_until("all are back", |w| w.status().robustness == Robustness::Healthy);
    assert!(world.flushes_well());
    world.reads();
    world.settle();
}

/// Who kept its power goes for good before it could give the other one what that lacks.
#[test]
fn what_goes_with_the_last_that_kept_it_is_told() {
    let mut world = opened(Quorum::Any);
    world.dies(3);
    world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
    world.writes();
    world.dies(2);
    world.replicas[0].forget_unflushed();
    world.replicas[0].full = true;
    world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
    world.returns(2);
    world.run_until("both are back", |w| w.mode(1) == Mode::Rw && w.mode(2) == Mode::Rw);
    assert!(world.status().chunks_in_doubt > 0, "nothing can be copied to 1");
    world.dies(2);
    world.run_until("1 is left", |w| w.mode(2) == Mode::Err && w.status().chunks_in_doubt == 0);
    assert!(!world.flushes_well(), "it would promise what is gone");
}

impl World {
    /// Of 1 and 2, which are left, 1 has lost its host's power, and has yet to get from 2 what was not flushed.
    fn one_lacks_what_two_has(&mut self) {
        self.dies(3);
        self.run_until("3 is out", |w| w.mode(3) == Mode::Err);
        (0..8).for_each(|hot| self.writes_to(hot));
        self.dies(2);
        self.replicas[0].forget_unflushed();
        self.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
        self.returns(2);
        self.run_until("both are back", |w| w.mode(1) == Mode::Rw && w.mode(2) == Mode::Rw);
        assert!(self.status().chunks_in_doubt > 0);
    }
}

#[test]
fn who_alone_kept_it_does_not_leave_before_the_others_have_it() {
    let mut world = opened(Quorum::Any);
    world.one_lacks_what_two_has();
    for asked in [Command::RemoveReplica { name: "r2".into() }, Command::Rebuild { name: "r2".into() }] {
        let asked = world.command(asked);
        assert_eq!(world.finish(asked), Err(CommandError::Source("r2".into())));
    }
    world.run_until("1 has it", |w| w.status().chunks_in_doubt == 0);
    let leaves = world.command(Command::RemoveReplica { name: "r2".into() });
    assert_eq!(world.finish(leaves), Ok(()));
    assert_eq!(world.members(), ["r1"]);
    assert!(world.flushes_well());
    world.reads();
}

/// 2 was told to leave when 1 lost its power, and was needed then.
#[test]
fn who_came_back_to_be_let_go_gives_the_others_first_what_it_alone_kept() {
    let mut world = opened(Quorum::Any);
    world.dies(3);
    world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
    (0..8).for_each(|hot| world.writes_to(hot));
    let leaves = world.command(Command::RemoveReplica { name: "r2".into() });
    world.replicas[0].forget_unflushed();
    assert_eq!(world.finish(leaves), Ok(()));
    assert_eq!(world.members(), ["r1"]);
    assert!(world.flushes_well(), "it went with what 1 had lost");
    world.reads();
}

/// One that is slow or full goes on as it is where it is needed.
#[test]
fn who_alone_kept_it_is_not_put_out_for_being_full_before_the_others_have_it() {
    let mut world = opened(Quorum::Any);
    world.one_lacks_what_two_has();
    world.replicas[0].puts_until = world.now + 10_000_000_000;
    world.replicas[1].head_full = true;
    assert!(world.request(0, 0, Op::Write { fua: false }, Extent::new(World::hot(20) * BLOCK, BLOCK)));
    world.run_until("2 is out", |w| w.mode(2) == Mode::Err);
    assert!(world.flushes_well(), "it went with what 1 had lost");
    world.reads();
}

/// More of its blocks cannot be read than are mended meanwhile.
#[test]
fn who_alone_kept_it_is_not_put_out_for_what_it_cannot_read_before_the_others_have_it() {
    let mut world = opened(Quorum::Any);
    world.one_lacks_what_two_has();
    world.replicas[0].full = true;
    world.engine().shared.set_far(MemberId(0), true);
    // None of them is in doubt: the other one gives them.
    world.replicas[1].unreadable = (208..380).collect();
    for block in 208..380 {
        let read = Extent::new(block * BLOCK, BLOCK);
        world.run_until("there is room for a read", |w| w.request(0, 0, Op::Read, read));
    }
    world.run_until("all is answered", |w| w.engines[0].in_flight() == 0);
    let noted = world.engine().log.iter().filter(|line| line.contains("cannot be read there")).count();
    assert!(noted > 60, "{noted}");
    let said = world.engine().log.iter().filter(|line| line.contains("is needed, though")).count();
    assert_eq!(said, 1, "each read of one more block says so");
    assert_eq!(world.mode(2), Mode::Rw, "it is put out");
    assert!(world.status().chunks_in_doubt > 0);
    world.replicas[0].full = false;
    world.replicas[1].unreadable.clear();
    assert!(world.flushes_well(), "it went with what 1 had lost");
    world.reads();
}

/// A block cannot be read on it, and the copy of its chunk fails each time: what else it alone kept is not given up for that.
#[test]
fn who_alone_kept_it_is_not_put_out_for_a_copy_that_fails_before_the_others_have_it() {
    let mut world = opened(Quorum::Any);
    world.one_lacks_what_two_has();
    world.replicas[1].unreadable = vec![usize::try_from(World::hot(0)).expect("small")];
    world.run_for(20_000);
    assert_eq!(world.mode(2), Mode::Rw, "it is put out");
    assert_eq!(world.status().chunks_in_doubt, 1, "the others are copied meanwhile");
    world.replicas[1].unreadable.clear();
    assert!(world.flushes_well(), "it went with what 1 had lost");
    world.reads();
}

/// The clients of an engine that is gone know that.
#[test]
fn who_comes_after_the_loss_was_promised_nothing() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.replicas.iter_mut().for_each(crate::replica::Replica::forget_unflushed);
    world.crash_engine();
    world.run_until("the volume opens", World::is_open);
    world.writes();
    assert!(world.flushes_well());
    world.settle();
}

/// The device stayed while the engine was replaced, and whoever has it open does not know that anything happened.
#[test]
fn who_stays_while_the_engine_is_replaced_is_told() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.replicas.iter_mut().for_each(crate::replica::Replica::forget_unflushed);
    world.crash_engine();
    world.run_until("the volume opens", World::is_open);
    world.engine().shared.loss().clients_have_stayed();
    assert!(!world.flushes_well(), "it would promise what is gone");
}
