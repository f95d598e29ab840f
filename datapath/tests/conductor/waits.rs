//! What is given up rather than waited for.

use datapath::conductor::{Command, CommandError, Quorum};
use lh_block::{BLOCK, Extent, Op};
use lh_wire::OpCode;

use crate::stories::{opened, opened_by};
use crate::world::World;

const SECOND: u64 = 1_000_000_000;

/// Its disks are full, say. Who reads meanwhile does not wait for that.
#[test]
fn a_snapshot_for_which_a_write_does_not_end_is_taken_back() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let snapshot = world.snapshot("s1");
    world.run_until("all have prepared it", |w| w.replicas.iter().all(|r| r.has_prepared()));
    assert!(world.request(0, 0, Op::Write { fua: false }, Extent::new(World::hot(0) * BLOCK, BLOCK)));
    let began = world.now;
    world.replicas.iter_mut().for_each(|r| r.stalled_until = began + 30 * SECOND);
    assert_eq!(world.finish(snapshot), Err(CommandError::RequestsWait));
    assert!(world.replicas.iter().all(|r| r.layers.len() == 1 && !r.has_prepared()));
    world.reads();
    let again = world.snapshot("s1");
    assert_eq!(world.finish(again), Ok(()));
    world.settle();
}

/// The disks are busy with what clients write. Nobody is lost for that, since all would be.
#[test]
fn a_snapshot_that_all_take_long_to_prepare_is_waited_for() {
    let mut world = opened(Quorum::Any);
    world.writes();
    let began = world.now;
    world.replicas.iter_mut().for_each(|r| r.syncs_until = began + 20 * SECOND);
    let snapshot = world.snapshot("s1");
    world.writes();
    assert!(world.now < began + 2 * SECOND, "clients do not wait for it");
    let told = |w: &World| w.engines[0].log.iter().filter(|l| l.contains("has not prepared it yet")).count();
    assert_eq!(told(&world), 0, "that is told which takes long");
    world.run_until("it takes long", |w| w.now > began + 5 * SECOND);
    assert_eq!(world.status().waiting_for, None, "requests do not wait");
    assert_eq!(world.finish(snapshot), Ok(()));
    assert!(told(&world) >= 1, "{:#?}", world.engines[0].log);
    assert!(world.now > began + 20 * SECOND);
    assert_eq!(world.losses(), 0);
    world.settle();
}

/// Every second, and told once.
#[test]
fn why_a_replica_cannot_be_connected_to_is_told_once() {
    let mut world = opened(Quorum::Any);
    world.dies(2);
    let until = world.now + 20 * SECOND;
    world.run_until("it was tried often", |w| w.now >= until);
    let told = |line: &&String| line.contains("cannot be connected to: nobody answers");
    assert_eq!(world.engines[0].log.iter().filter(told).count(), 1, "{:#?}", world.engines[0].log);
}

/// The engine was stopped meanwhile, or did not get to run. Its clock went on, and the answer lies there.
#[test]
fn nobody_is_lost_for_an_answer_that_nobody_has_read() {
    for seed in 0..10 {
        let mut world = opened_by(seed, Quorum::Any);
        world.writes();
        let look = world.command(Command::LookAtChain);
        world.run_until("1 has answered", |w| {
            w.engine().queues[0].wires[0].back.iter().any(|m| m.op == OpCode::Control)
        });
        world.now += 30 * SECOND;
        assert_eq!(world.finish(look), Ok(()));
        assert_eq!(world.losses(), 0, "seed {seed}");
        world.settle();
    }
}
