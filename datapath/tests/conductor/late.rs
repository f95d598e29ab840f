//! Something of before is not over: a queue has not heard yet, a copy is still on its way, an epoch is not stored. What comes next
//! waits for it.

use datapath::conductor::{Command, Mode, Quorum, Robustness};
use datapath::message::Switch;
use lh_block::{BLOCK, Extent, Op};

use crate::replica::Replica;
use crate::stories::{opened_by, plan};
use crate::world::{Plan, World};

const SECOND: u64 = 1_000_000_000;

/// Whatever else happens in which order, each of these comes out the same.
const SEEDS: std::ops::Range<u64> = 0..10;

impl World {
    /// One of the queues looks at nothing that it is told for so long: until when.
    fn makes_deaf(&mut self, queue: usize, ns: u64) -> u64 {
        let until = self.now + ns;
        self.engine().queues[queue].deaf_until = until;
        until
    }

    fn is_said(&mut self, line: &str) -> bool {
        self.engine().log.iter().any(|l| l == line)
    }
}

/// One queue puts 1 out and would answer a write without it. The other one goes on reading from it, since its own connection is well.
#[test]
fn nobody_is_put_out_before_all_queues_have_stopped_reading_from_it() {
    for seed in SEEDS {
        let mut world = opened_by(seed, Quorum::Any);
        world.writes();
        let block = usize::try_from(World::hot(0)).expect("small");
        // What is written there fails; what is read from a queue that knows nothing of it would not.
        world.replicas[0].unreadable = vec![block];
        world.replicas[0].unwritable = true;
        let until = world.makes_deaf(1, 5 * SECOND);
        let before = world.oracle.acknowledged;
        assert!(world.request(0, 0, Op::Write { fua: false }, Extent::new(World::hot(0) * BLOCK, BLOCK)));
        world.run_until("1 is to be put out", |w| w.mode(1) == Mode::Err);
        world.replicas[0].unreadable.clear();
        world.run_until("the write is answered", |w| w.oracle.acknowledged > before);
        assert!(world.now >= until, "the other queue may read from 1 what was there before");
        (0..4).for_each(|_| world.reads());
        world.replicas[0].unwritable = false;
        world.settle();
    }
}

/// It would say of the first session that it broke, and end the second.
#[test]
fn nobody_is_let_in_again_before_all_queues_have_done_with_its_last_session() {
    for seed in SEEDS {
        let mut world = opened_by(seed, Quorum::Any);
        world.writes();
        world.replicas[1].end_session();
        let until = world.makes_deaf(1, 5 * SECOND);
        world.run_until("it is connected again", |w| {
            let lost = w.losses() > 0;
            lost && w.status().replicas[1].connected
        });
        assert!(world.now >= until, "queue 1 has not heard of the end");
        world.run_until("2 is a member again", |w| w.status().robustness == Robustness::Healthy);
        assert_eq!(world.losses(), 1);
        world.settle();
    }
}

/// Its session would be ended at once: the epoch without it may count already, also when all the others are lost since.
#[test]
fn who_is_being_put_out_is_not_let_in_again_before_it_is() {
    for seed in SEEDS {
        for others_are_lost in [false, true] {
            let mut world = opened_by(seed, Quorum::Any);
            world.writes();
            world.authority.away_until = world.now + 20 * SECOND;
            let until = world.authority.away_until;
            world.replicas[2].end_session();
            world.run_until("its epoch is on its way", |w| w.engine().store.is_some());
            if others_are_lost {
                world.replicas.iter_mut().for_each(Replica::end_session);
                world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
            }
            world.run_until("3 is connected again", |w| w.status().replicas[2].connected);
            assert!(world.now >= until, "the epoch without it is on its way");
            world.settle();
        }
    }
}

/// What it failed for is not known yet when the flush has failed, and who is closed records no epoch without it.
#[test]
fn whose_disk_fails_at_the_last_flush_is_put_out_before_anybody_is_closed() {
    for seed in SEEDS {
        let mut world = opened_by(seed, Quorum::Any);
        world.writes();
        world.replicas[1].syncs_fail = true;
        world.command(Command::Shutdown);
        world.run_until("the engine has ended", |w| {
            let ended = w.happened.contains_key("closed");
            assert!(ended || w.losses() <= 1, "who was closed is let in again, to record that 2 is out");
            ended
        });
        assert_eq!(world.authority.epoch.as_ref().map(|e| e.has("r2")), Some(false));
        world.replicas[1].syncs_fail = false;
        world.settle();
    }
}

/// It breaks off when all has been flushed, and one queue has not stopped reading from it.
#[test]
fn nobody_is_closed_before_whoever_was_lost_since_the_last_flush_is_put_out() {
    for seed in SEEDS {
        for deaf in [0, 1] {
            let mut world = opened_by(seed, Quorum::Any);
            world.writes();
            world.replicas[0].stalled_until = u64::MAX;
            world.command(Command::Shutdown);
            world.run_until("2 has flushed", |w| w.replicas[1].is_synced());
            world.run_for(10);
            world.replicas[1].end_session();
            world.makes_deaf(deaf, 3 * SECOND);
            world.run_until("2 is lost", |w| w.mode(2) == Mode::Err);
            world.replicas[0].stalled_until = 0;
            world.run_until("the engine has ended", |w| w.happened.contains_key("closed"));
            assert_eq!(world.authority.epoch.as_ref().map(|e| e.has("r2")), Some(false));
            world.settle();
        }
    }
}

/// It would put into a member what the start before took for right, after this one has made them equal; and its end be taken for that of a
/// copy which this start gives.
#[test]
fn a_start_that_begins_again_waits_for_copies_of_the_one_before() {
    for seed in SEEDS {
        let mut world = World::new(seed, Plan { replicas: 5, ..plan(Quorum::Majority) });
        world.run_until("the volume opens", World::is_open);
        [4, 5].into_iter().for_each(|r| world.dies(r));
        world.writes();
        (1..=3).for_each(|r| world.dies(r));
        world.replicas[0].lose_power();
        world.crash_engine();
        // Nothing can be copied to it.
        world.replicas[3].full = true;
        [1, 3, 4].into_iter().for_each(|r| world.returns(r));
        let until = world.now + 8 * SECOND;
        world.replicas[0].puts_until = until;
        world.run_until("it starts", |w| w.is_said("starting with r1, r3"));
        world.run_until("chunks are in doubt", |w| w.status().chunks_in_doubt > 0);
        world.run_for(1_000);
        world.returns(2);
        world.run_until("it begins again", |w| w.is_said("the start begins again"));
        world.run_until("it starts again", |w| w.is_said("starting with r1, r2, r3"));
        assert!(world.now >= until, "a copy from 3 to 1 is on its way");
        world.replicas[3].full = false;
        world.run_until("it goes on", World::is_open);
        world.reads();
        world.returns(5);
        world.settle();
    }
}

/// A repair that was given before every queue wrote to it leaves it out: members tell of that once it is done.
#[test]
fn nobody_is_asked_what_a_replica_missed_before_repairs_without_it_are_done() {
    for seed in SEEDS {
        let mut world = opened_by(seed, Quorum::Majority);
        (0..4).for_each(|hot| world.writes_to(hot));
        world.dies(3);
        world.writes_to(5);
        world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
        // Until this write is done nobody is copied to.
        world.replicas[1].stalled_until = u64::MAX;
        assert!(world.request(0, 1, Op::Write { fua: false }, Extent::new(World::hot(6) * BLOCK, BLOCK)));
        world.returns(3);
        world.run_until("3 is being filled", |w| w.replicas[2].rebuilding);
        world.run_until("all queues write to it", |w| {
            let filled = |s: &Switch| matches!(s, Switch::Fill { .. });
            w.engine().queues.iter().all(|q| !q.is_told(filled)) && w.mode(3) == Mode::Wo
        });
        world.run_for(100);
        world.replicas[1].stalled_until = 0;
        world.replicas[1].forget_unflushed();
        let until = world.now + 8 * SECOND;
        world.replicas[1].puts_until = until;
        world.run_until("2 is lost", |w| !w.status().replicas[1].connected);
        world.run_until("2 is back", |w| w.status().replicas[1].connected);
        // So the write is sent again, and all queues write to 3, only when repairs are on their way.
        world.makes_deaf(1, 3 * SECOND);
        world.run_until("chunks are in doubt", |w| w.status().chunks_in_doubt > 0);
        world.run_until("a member is asked", |w| w.replicas.iter().any(|r| r.asked_for_others > 0));
        assert!(world.now >= until, "2 is being made equal to 1");
        world.settle();
    }
}
