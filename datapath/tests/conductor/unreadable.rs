//! Disks that cannot read single blocks (`docs/invariants.md`, 6).

use datapath::conductor::{Input, Mode, Quorum, Robustness};
use datapath::message::{FromQueue, MemberId, QueueId};
use lh_block::{BLOCK, Extent, Op};

use crate::stories::opened;
use crate::world::World;

const SECOND: u64 = 1_000_000_000;

impl World {
    /// The disks of these replicas do not give the block any more.
    fn goes_bad(&mut self, block: u64, replicas: &[usize]) {
        for r in replicas {
            self.replicas[r - 1].unreadable.push(usize::try_from(block).expect("small"));
        }
    }

    /// Asks for a block and waits for the answer, whatever it is; how long that takes, ns.
    fn asks_for(&mut self, queue: usize, op: Op, block: u64) -> u64 {
        let began = self.now;
        assert!(self.request(0, queue, op, Extent::new(block * BLOCK, BLOCK)));
        self.run_until("the request is answered", |w| w.engines[0].in_flight() == 0);
        self.now - began
    }

    /// Sessions that ended without being asked to.
    pub(crate) fn losses(&self) -> usize {
        self.engines[0].log.iter().filter(|l| l.contains(" is lost: ")).count()
    }
}

#[test]
fn for_a_block_that_nobody_can_read_nobody_is_put_out() {
    for quorum in [Quorum::Any, Quorum::Majority] {
        let mut world = opened(quorum);
        world.writes();
        let (bad, good) = (World::hot(0), World::hot(8));
        world.goes_bad(bad, &[1, 2, 3]);
        for n in 0..40 {
            let read = world.oracle.failed_reads;
            let took = world.asks_for(n % 2, Op::Read, bad);
            assert!(took < SECOND, "the error comes after {took} ns");
            assert_eq!(world.oracle.failed_reads, read + 1, "it is told as an error");
            for op in [Op::Read, Op::Write { fua: false }] {
                let took = world.asks_for(n % 2, op, good);
                assert!(took < SECOND, "another block waits {took} ns");
            }
            world.run_for(300);
            assert_eq!(world.status().robustness, Robustness::Healthy);
        }
        assert_eq!(world.losses(), 0);
    }
}

#[test]
fn what_one_disk_cannot_read_is_written_anew_from_another_one() {
    for (quorum, snapshot) in [(Quorum::Any, false), (Quorum::Any, true), (Quorum::Majority, false)] {
        let mut world = opened(quorum);
        world.writes();
        if snapshot {
            let command = world.snapshot("a");
            assert_eq!(world.finish(command), Ok(()));
        }
        // Reads go to the first, which is near.
        let (bad, failed) = (World::hot(0), world.oracle.failed_reads);
        world.goes_bad(bad, &[1]);
        world.asks_for(0, Op::Read, bad);
        world.run_until("it is mended", |w| w.replicas[0].unreadable.is_empty());
        assert_eq!((world.losses(), world.oracle.failed_reads), (0, failed));
        world.settle();
        assert_eq!(world.losses(), 0);
    }
}

/// Two are left, and no checksums: what the one that can has is all that there is.
#[test]
fn of_two_the_one_that_can_read_a_block_mends_the_other() {
    let mut world = opened(Quorum::Majority);
    world.dies(3);
    world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
    world.writes();
    let (bad, lost) = (World::hot(0), world.losses());
    world.goes_bad(bad, &[1]);
    world.asks_for(0, Op::Read, bad);
    world.run_until("it is mended", |w| w.replicas[0].unreadable.is_empty());
    assert_eq!(world.losses(), lost);
    world.returns(3);
    world.settle();
}

#[test]
fn who_cannot_be_mended_is_put_out_and_comes_back_once_it_can() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let (bad, failed) = (World::hot(0), world.oracle.failed_reads);
    world.goes_bad(bad, &[1]);
    world.replicas[0].unwritable = true;
    world.asks_for(0, Op::Read, bad);
    world.run_until("1 is out", |w| w.mode(1) == Mode::Err);
    assert_eq!(world.oracle.failed_reads, failed, "another one has it");
    world.run_for(20_000);
    assert_ne!(world.mode(1), Mode::Rw, "it would be read from, and put out again");
    world.replicas[0].unwritable = false;
    world.settle();
    assert!(world.replicas[0].unreadable.is_empty());
}

#[test]
fn who_cannot_be_mended_stays_as_long_as_it_is_needed() {
    let mut world = opened(Quorum::Majority);
    world.dies(3);
    world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
    world.writes();
    let (bad, failed) = (World::hot(0), world.oracle.failed_reads);
    world.goes_bad(bad, &[1]);
    world.replicas[0].unwritable = true;
    let lost = world.losses();
    for n in 0..20 {
        let took = world.asks_for(n % 2, Op::Read, bad);
        assert!(took < SECOND, "it takes {took} ns");
        world.run_for(600);
    }
    assert_eq!((world.losses(), world.oracle.failed_reads), (lost, failed));
    world.replicas[0].unwritable = false;
    world.returns(3);
    world.settle();
}

/// More than can be mended meanwhile: it is put out, but not the last that can be read from.
#[test]
fn whose_disk_reads_nothing_is_put_out_unless_it_is_the_last() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.dies(3);
    world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
    let lost = world.losses();
    for member in [0, 1] {
        for block in 0..80 {
            let report = FromQueue::Unreadable(MemberId(member), Extent::new(block * BLOCK, BLOCK));
            let now = world.now;
            world.engine().conduct(now, Input::FromQueue(QueueId(member), report));
        }
    }
    world.run_for(100);
    assert_eq!(world.losses(), lost + 1);
    assert_ne!(world.status().robustness, Robustness::Faulted);
}

/// What is read again and again before its turn has come is one place, not many.
#[test]
fn whose_bad_block_is_read_again_is_not_put_out_while_others_wait_to_be_mended() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let lost = world.losses();
    // One is being mended, and as many wait as can.
    for block in (0..65).chain([40, 40]) {
        let report = FromQueue::Unreadable(MemberId(0), Extent::new(block * BLOCK, BLOCK));
        let now = world.now;
        world.engine().conduct(now, Input::FromQueue(QueueId(0), report));
    }
    world.run_for(100);
    assert_eq!(world.losses(), lost);
}

/// The nearest member is the source, and has a bad block; who returns gets that from the other.
#[test]
fn a_replica_is_filled_although_its_source_has_a_bad_block() {
    let mut world = opened(Quorum::Any);
    world.dies(3);
    world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
    world.writes();
    let lost = world.losses();
    world.goes_bad(World::hot(0), &[1]);
    world.returns(3);
    world.run_until("3 is a member", |w| w.mode(3) == Mode::Rw);
    assert_eq!(world.losses(), lost);
    world.run_until("it is mended", |w| w.replicas[0].unreadable.is_empty());
    world.settle();
}
