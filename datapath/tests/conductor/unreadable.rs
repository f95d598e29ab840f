//! Disks that cannot read single blocks (`docs/invariants.md`, 6).

use datapath::conductor::{Input, Mode, Quorum, Robustness};
use datapath::message::{Fault, FromQueue, MemberId, QueueId};
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
fn who_cannot_read_what_another_one_can_is_put_out_and_comes_back() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let bad = World::hot(0);
    // Reads go to the first, which is near.
    world.goes_bad(bad, &[1]);
    let failed = world.oracle.failed_reads;
    world.asks_for(0, Op::Read, bad);
    world.run_until("1 is out", |w| w.mode(1) == Mode::Err);
    assert_eq!(world.oracle.failed_reads, failed, "another one has it");
    world.replicas[0].unreadable.clear();
    world.settle();
    assert_eq!(world.losses(), 1);
}

#[test]
fn who_cannot_read_what_another_one_can_stays_as_long_as_it_is_needed() {
    let mut world = opened(Quorum::Majority);
    world.dies(3);
    world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
    world.writes();
    let (bad, failed) = (World::hot(0), world.oracle.failed_reads);
    world.goes_bad(bad, &[1]);
    let lost = world.losses();
    for n in 0..20 {
        let took = world.asks_for(n % 2, Op::Read, bad);
        assert!(took < SECOND, "it takes {took} ns");
        world.run_for(300);
    }
    assert_eq!((world.losses(), world.oracle.failed_reads), (lost, failed));
    world.returns(3);
    world.run_until("3 is a member", |w| w.mode(3) == Mode::Rw);
    let mut reads = 0..40;
    while world.losses() == lost
        && let Some(n) = reads.next()
    {
        world.asks_for(n % 2, Op::Read, bad);
        world.run_for(300);
    }
    assert_eq!((world.losses(), world.oracle.failed_reads), (lost + 1, failed));
}

/// Each queue has met another disk's bad block when the conductor hears of the first.
#[test]
fn the_last_that_can_be_read_from_stays_whatever_it_cannot_read() {
    let mut world = opened(Quorum::Any);
    world.writes();
    world.dies(3);
    world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
    let lost = world.losses();
    for n in [0, 1] {
        let (now, failed) = (world.now, FromQueue::Failed(MemberId(n), Fault::Unreadable));
        world.engine().conduct(now, Input::FromQueue(QueueId(n), failed));
    }
    world.run_for(100);
    assert_eq!(world.losses(), lost + 1);
    assert_ne!(world.status().robustness, Robustness::Faulted);
}
