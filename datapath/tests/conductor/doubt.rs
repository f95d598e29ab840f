//! What an engine that starts has to repair beside folds and reverts: what is put into a snapshot stays there, nobody waits for
//! what is gone, and no branch is left before it is settled.

use datapath::conductor::{Command, Mode, Quorum, Robustness};
use lh_block::{BLOCK, Extent, Op};

use crate::stories::{opened, opened_by};
use crate::world::World;

const SECOND: u64 = 1_000_000_000;

impl World {
    /// Snapshots a and b, of which a is removed and on every replica.
    fn with_a_removed() -> Self {
        Self::with_a_removed_in(opened(Quorum::Any))
    }

    fn with_a_removed_in(mut world: Self) -> Self {
        world.writes();
        for name in ["a", "b"] {
            let command = world.snapshot(name);
            assert_eq!(world.finish(command), Ok(()));
        }
        let command = world.command(Command::RemoveSnapshot { name: "a".into() });
        assert_eq!(world.finish(command), Ok(()));
        world
    }

    /// Replica 3 and the engine die with writes that nobody has flushed, to several chunks.
    fn three_and_the_engine_die(&mut self) {
        (0..4).for_each(|hot| self.writes_to(hot));
        self.replicas[2].forget_unflushed();
        self.crash_engine();
        self.run_until("the volume opens", Self::is_open);
        assert!(self.status().chunks_in_doubt > 0);
    }

    /// Replica 3 has missed a write, is back, and so many things have happened since its rebuild began. Then 2, which cannot be done
    /// without, loses its power with writes that nobody has flushed, and is back.
    fn two_loses_its_power_while_three_is_filled(seed: u64, steps: u64) -> Self {
        let mut world = Self::with_a_removed_in(opened_by(seed, Quorum::Majority));
        let [wholly, write_in_flight, slowly, deaf] = [1, 2, 4, 8].map(|bit| seed & bit != 0);
        world.dies(3);
        world.writes_to(5);
        world.run_until("3 is out", |w| w.status().epoch.is_some_and(|e| e.members.len() == 2));
        (0..4).for_each(|hot| world.writes_to(hot));
        if wholly {
            world.command(Command::Rebuild { name: "r3".into() });
        }
        if write_in_flight {
            world.replicas[1].stalled_until = u64::MAX;
            let range = Extent::new(Self::hot(6) * BLOCK, BLOCK);
            assert!(world.request(0, 0, Op::Write { fua: false }, range));
        }
        world.replicas.iter_mut().for_each(|r| r.unsettle("b"));
        // There is something to copy into this layer.
        let layer = world.replicas[2].layers.iter_mut().find(|l| l.name == "b").expect("a layer");
        (0..4).for_each(|hot| layer.blocks[usize::try_from(Self::hot(hot)).expect("small")] = Some(666));
        if deaf {
            let until = world.now + seed % 64 * 50_000_000;
            world.engine().queues[1].deaf_until = until;
        }
        world.returns(3);
        world.run_until("3 is being filled", |w| w.replicas[2].rebuilding);
        (0..steps).for_each(|_| world.step());
        if slowly {
            world.replicas[2].stalled_until = u64::MAX;
        }
        world.replicas[1].stalled_until = 0;
        world.replicas[1].forget_unflushed();
        world
    }

    /// What is not removed is in the same layer everywhere.
    fn compare_layers(&self) {
        for layer in self.replicas[0].layers.iter().filter(|l| !l.removed) {
            for other in &self.replicas {
                let theirs = other.layers.iter().find(|l| l.name == layer.name).expect("every layer");
                let differ = layer.blocks.iter().zip(&theirs.blocks).position(|(a, b)| a != b);
                assert_eq!(differ, None, "layer {:?} of {}", layer.name, other.name);
            }
        }
    }

    fn nothing_is_in_doubt(&mut self) {
        self.run_until("nothing is in doubt", |w| w.status().chunks_in_doubt == 0);
        self.writes();
        self.reads();
        self.replicas.iter().for_each(|r| self.compare_with(r));
    }
}

#[test]
fn nothing_is_folded_before_nothing_is_in_doubt() {
    let mut world = World::with_a_removed();
    world.replicas.iter_mut().for_each(|r| r.unsettle("b"));
    world.three_and_the_engine_die();
    world.command(Command::Purge);
    world.run_until("a is gone everywhere", |w| {
        let folded = w.replicas.iter().any(|r| r.layers.len() < 3);
        assert!(!folded || w.status().chunks_in_doubt == 0, "folded beside a repair");
        w.replicas.iter().all(|r| r.layers.len() == 2)
    });
    world.nothing_is_in_doubt();
}

/// An engine before has begun it, and this one knows nothing of it.
#[test]
fn a_fold_that_runs_is_stopped_before_a_snapshot_is_repaired() {
    let mut world = World::with_a_removed();
    world.replicas.iter_mut().for_each(|r| r.unsettle("b"));
    world.replicas[1].goes_on_folding("a");
    world.replicas[2].goes_on_folding("a");
    world.three_and_the_engine_die();
    world.nothing_is_in_doubt();
    assert!(world.replicas.iter().all(|r| r.layers.len() == 3), "nobody has asked for a fold");
}

/// One replica has folded it away, and another still has it and does not know that it is stable.
#[test]
fn a_removed_snapshot_that_not_everybody_has_holds_no_repair_up() {
    for folded in 0..3 {
        let mut world = World::with_a_removed();
        let fold = lh_wire::Control::Fold { name: "a".into(), bytes_per_second: None };
        world.replicas[folded].control(&fold).expect("folded");
        for replica in world.replicas.iter_mut().filter(|r| r.layers.len() == 3) {
            replica.unsettle("a");
        }
        world.three_and_the_engine_die();
        world.nothing_is_in_doubt();
    }
}

/// The engine died between a snapshot and its flush; the next one is asked for a revert before it has made up for that.
#[test]
fn a_revert_waits_until_what_it_leaves_is_settled_and_says_what_is() {
    let mut world = World::with_a_removed();
    world.crash_engine();
    world.replicas.iter_mut().for_each(|r| r.settled = None);
    let revert = Command::Revert { name: "b".into(), created: "2026-01-01T00:00:00Z".into() };
    assert!(!world.is_open());
    let command = world.command(revert);
    assert_eq!(world.finish(command), Ok(()));
    assert!(world.replicas.iter().all(|r| r.settled.as_deref() == Some("b")));
    // Another one, with nothing to settle before: it tells what is settled on the branch that it goes to.
    let left = world.snapshot("c");
    assert_eq!(world.finish(left), Ok(()));
    assert!(world.replicas.iter().all(|r| r.settled.as_deref() == Some("c")));
    let again = Command::Revert { name: "b".into(), created: "2026-01-02T00:00:00Z".into() };
    let command = world.command(again);
    assert_eq!(world.finish(command), Ok(()));
    assert!(world.replicas.iter().all(|r| r.settled.as_deref() == Some("b")));
}

/// Nobody is here who holds it. That is what people chose; it is said.
#[test]
fn going_on_without_what_was_not_flushed_is_said() {
    let said = |w: &World| w.engines[0].log.iter().any(|line| line.contains("not flushed may be gone"));
    for lives in [true, false] {
        let mut world = opened(Quorum::Any);
        world.writes();
        world.replicas[0].forget_unflushed();
        world.dies(2);
        if !lives {
            world.dies(3);
        }
        world.crash_engine();
        world.run_until("the volume opens", World::is_open);
        assert_eq!(said(&world), !lives);
    }
}

/// Many copies are on their way at once, and all of them fail for one reason.
#[test]
fn disks_that_are_full_for_a_moment_while_ranges_are_repaired_cost_no_replica() {
    for (full_for, stay) in [(2_500, true), (20_000, false)] {
        let mut world = opened(Quorum::Any);
        (0..8).for_each(|n| world.writes_to(2 * n));
        world.crash_engine();
        world.replicas[1..].iter_mut().for_each(|r| r.full = true);
        world.run_for(full_for);
        world.replicas[1..].iter_mut().for_each(|r| r.full = false);
        world.run_until("the volume opens", World::is_open);
        let log = &world.engines.last().expect("an engine").log;
        assert_eq!(log.iter().all(|line| !line.contains("copies fail on it")), stay, "{log:#?}");
        world.settle();
    }
}

#[test]
fn a_disk_that_is_full_for_a_moment_while_chunks_are_repaired_costs_no_replica() {
    let mut world = opened(Quorum::Any);
    world.three_and_the_engine_die();
    world.replicas[2].full = true;
    world.run_for(2_500);
    assert!(world.status().chunks_in_doubt > 0);
    world.replicas[2].full = false;
    world.nothing_is_in_doubt();
    let log = &world.engines[0].log;
    assert!(log.iter().all(|line| !line.contains("copies fail on it")), "{log:#?}");
}

/// A single one of three is not told that nothing is in doubt: the start begins again with the one that comes, and what the first alone
/// remembers of a write in flight is made equal then.
#[test]
fn what_is_in_doubt_is_remembered_until_enough_members_are_equal() {
    let mut world = opened(Quorum::Majority);
    world.dies(3);
    world.writes();
    let block = World::hot(6);
    let read =
        |w: &World| [0, 1].map(|n: usize| w.replicas[n].read(usize::try_from(block).expect("small"), 0));
    world.replicas[1].stalled_until = u64::MAX;
    assert!(world.request(0, 0, Op::Write { fua: false }, Extent::new(block * BLOCK, BLOCK)));
    world.run_until("1 alone has it", |w| read(w)[0] != read(w)[1]);
    world.dies(2);
    world.crash_engine();
    // The third has missed writes, and nothing can be copied to it.
    world.replicas[2].full = true;
    world.returns(3);
    world.run_for(8_000);
    assert!(!world.is_open(), "one of three goes on");
    world.replicas[1].stalled_until = 0;
    world.returns(2);
    world.run_until("the volume opens", World::is_open);
    let [first, second] = read(&world);
    assert_eq!(first, second);
    world.replicas[2].full = false;
    world.settle();
}

/// What a repair puts into a layer because others may have folded what is below it goes to who is being filled, too, however far that
/// is: one that holds it further down alone reads the same, and is not.
#[test]
fn who_is_filled_gets_what_is_repaired_beside_it() {
    let mut beside = 0;
    for (seed, steps) in (0..96).flat_map(|seed| (0..32).map(move |steps| (seed, steps))) {
        let mut world = World::two_loses_its_power_while_three_is_filled(seed, 2 * steps);
        let filled = world.replicas[2].rebuilding;
        world.run_until("chunks are in doubt, or 2 is out", |w| {
            w.status().chunks_in_doubt > 0 || w.status().epoch.is_some_and(|e| !e.has("r2"))
        });
        world.replicas[2].stalled_until = world.now + 1_000_000 * (seed / 16 % 16);
        beside += u64::from(filled && world.replicas[2].rebuilding && world.status().chunks_in_doubt > 0);
        world.settle();
        world.compare_layers();
    }
    assert!(beside > 100, "{beside} repairs beside a replica that is being filled");
}

/// Requests wait for a repair as long as it takes, but not for replicas that are gone, which would have to make it.
#[test]
fn nobody_waits_for_ever_for_a_repair_that_nobody_can_make() {
    let mut world = World::with_a_removed();
    world.three_and_the_engine_die();
    assert!(world.engine().shared.is_patient(), "the repair goes on");
    (1..=3).for_each(|r| world.dies(r));
    world.run_until("all are lost", |w| w.status().robustness == Robustness::Faulted);
    world.run_for(1_000);
    assert!(world.status().chunks_in_doubt > 0);
    assert!(!world.engine().shared.is_patient(), "requests wait whatever ioTimeout");
    (1..=3).for_each(|r| world.returns(r));
    world.run_until("it goes on", |w| w.status().robustness != Robustness::Faulted);
    assert!(world.status().chunks_in_doubt > 0);
    assert!(world.engine().shared.is_patient(), "the repair goes on");
    world.nothing_is_in_doubt();
    assert!(!world.engine().shared.is_patient());
}

/// Alone it has nobody to differ from. But what the others gave it may still be on its way into a snapshot, where no claim keeps
/// requests away from it.
#[test]
fn who_is_left_alone_is_not_read_from_while_a_copy_to_it_is_on_its_way() {
    let mut world = World::with_a_removed();
    world.replicas.iter_mut().for_each(|r| r.unsettle("b"));
    world.three_and_the_engine_die();
    world.replicas[2].puts_until = u64::MAX;
    world.replicas[2].layers[1].blocks[2] = Some(666);
    let read = |w: &World| w.replicas[2].read(2, 2);
    world.run_for(500);
    (1..=2).for_each(|r| world.dies(r));
    world.replicas[2].puts_until = world.now + 3 * SECOND;
    world.run_until("nothing is in doubt", |w| w.status().chunks_in_doubt == 0);
    let before = read(&world);
    world.run_for(5_000);
    assert_eq!(read(&world), before, "who has read it sees something else now");
}

impl World {
    /// The engine dies with a write that only the first replica, which is the nearest, has in its place, and so many that all have.
    fn the_engine_dies_with_a_write_that_one_has(&mut self) -> usize {
        (0..4).for_each(|n| self.writes_to(2 * n));
        let block = usize::try_from(Self::hot(6)).expect("small");
        let before = self.replicas[1].read(block, 0);
        self.replicas[1].stalled_until = u64::MAX;
        assert!(self.request(0, 0, Op::Write { fua: false }, Extent::new(Self::hot(6) * BLOCK, BLOCK)));
        self.run_until("1 has it", |w| w.replicas[0].read(block, 0) != before);
        self.crash_engine();
        self.replicas[1].stalled_until = 0;
        block
    }
}

/// Its disk stays full, and what others hold of a write in flight finds no place there.
#[test]
fn a_volume_begins_without_a_replica_that_cannot_be_made_equal() {
    for quorum in [Quorum::Any, Quorum::Majority] {
        let mut world = opened(quorum);
        world.the_engine_dies_with_a_write_that_one_has();
        world.replicas[1].full = true;
        world.run_until("the volume opens", World::is_open);
        assert_eq!(world.members(), ["r1", "r3"], "{quorum:?}");
        (0..4).for_each(|n| world.writes_to(2 * n));
        world.reads();
        world.replicas[1].full = false;
        world.settle();
    }
}

/// The nearest one's disk does not give a block that is in doubt, and another one has everything, too. It is written anew; where it
/// cannot be, the volume begins without that one.
#[test]
fn what_the_nearest_disk_does_not_give_is_copied_from_another() {
    for (quorum, unwritable) in
        [Quorum::Any, Quorum::Majority].into_iter().flat_map(|q| [(q, false), (q, true)])
    {
        let mut world = opened(quorum);
        let block = world.the_engine_dies_with_a_write_that_one_has();
        (world.replicas[0].unreadable, world.replicas[0].unwritable) = (vec![block], unwritable);
        world.run_until("the volume opens", World::is_open);
        let members: &[&str] = if unwritable { &["r2", "r3"] } else { &["r1", "r2", "r3"] };
        assert_eq!(world.members(), members, "{quorum:?}");
        assert_eq!(world.replicas[0].unreadable.is_empty(), !unwritable, "{quorum:?}");
        (0..4).for_each(|n| world.writes_to(2 * n));
        world.reads();
        world.replicas[0].unwritable = false;
        world.settle();
    }
}

/// Two of three are left, and neither can be spared.
#[test]
fn a_needed_replica_that_does_not_give_a_block_in_doubt_keeps_nobody_waiting() {
    let mut world = opened(Quorum::Majority);
    world.dies(3);
    world.run_until("3 is out", |w| w.mode(3) == Mode::Err);
    let block = world.the_engine_dies_with_a_write_that_one_has();
    world.replicas[0].unreadable = vec![block];
    world.run_until("the volume opens", World::is_open);
    assert_eq!(world.members(), ["r1", "r2"]);
    world.reads();
    world.returns(3);
    world.settle();
}

/// The others have lost their power with what was not flushed, and it alone has that. Then it is waited for.
#[test]
fn no_volume_begins_without_who_alone_kept_what_was_not_flushed() {
    let mut world = opened(Quorum::Any);
    let block = world.the_engine_dies_with_a_write_that_one_has();
    world.replicas[1..].iter_mut().for_each(|r| r.forget_unflushed());
    world.replicas[0].unreadable = vec![block];
    world.run_for(120_000);
    assert!(!world.is_open(), "it begins without what was answered");
    world.replicas[0].unreadable.clear();
    world.run_until("the volume opens", World::is_open);
    world.reads();
    world.settle();
}

/// A part of a chunk in doubt cannot be read on the nearest one, and the other parts are copied each time. Another one has everything:
/// the part is copied from that, and whoever cannot be written to, either, is put out.
#[test]
fn one_part_of_a_chunk_that_a_member_does_not_give_is_copied_from_another() {
    let (mut mended, mut lost) = (0, 0);
    for (seed, unwritable) in (0..20).flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut world = opened_by(seed, Quorum::Any);
        world.writes();
        let snapshot = world.snapshot("b");
        assert_eq!(world.finish(snapshot), Ok(()));
        world.replicas.iter_mut().for_each(|r| r.unsettle("b"));
        world.three_and_the_engine_die();
        world.replicas[0].unreadable =
            (0..4).map(|n| usize::try_from(World::hot(n)).expect("small")).collect();
        world.replicas[0].unwritable = unwritable;
        world.run_until("nothing is in doubt", |w| w.status().chunks_in_doubt == 0);
        let is_lost = world.engine().log.iter().any(|line| line == "replica r1 is lost: copies fail on it");
        assert!(!is_lost || unwritable, "seed {seed}: it could have been written anew");
        lost += u32::from(is_lost);
        mended += u32::from(!unwritable && world.replicas[0].unreadable.len() < 4);
        world.replicas[0].unwritable = false;
        world.settle();
    }
    assert!(lost > 10, "{lost} of 20 met it");
    assert!(mended > 10, "{mended} of 20 were mended");
}
