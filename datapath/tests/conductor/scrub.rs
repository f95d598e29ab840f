//! Stories of rot: what a scrub finds, repairs, and leaves alone.

use datapath::conductor::{Command, Finding, Flaw, Mend, Mode, Quorum, ScrubStatus};
use lh_block::{BLOCK, Extent, Op};
use lh_wire::Control;

use crate::stories::{opened, purging};
use crate::world::World;

impl World {
    pub(crate) fn scrub(&mut self, repair: bool) -> ScrubStatus {
        let command = self.command(Command::Scrub { repair, bytes_per_second: 0 });
        assert_eq!(self.finish(command), Ok(()));
        self.run_until("the scrub ends", |w| w.status().scrub.is_some_and(|s| !s.running));
        self.status().scrub.expect("it ran")
    }

    /// A block of a layer of a replica, numbered from 1.
    fn block(&mut self, replica: usize, layer: &str, hot: u64) -> &mut Option<u32> {
        let layers = &mut self.replicas[replica - 1].layers;
        let layer = layers.iter_mut().find(|l| l.name == layer).expect("a layer");
        &mut layer.blocks[usize::try_from(Self::hot(hot)).expect("small")]
    }

    fn rots(&mut self, replica: usize, layer: &str, hot: u64) {
        *self.block(replica, layer, hot) = Some(666);
    }

    /// With a snapshot that holds two blocks, and checksums of it.
    fn hashed() -> Self {
        Self::hashed_with(2)
    }

    fn hashed_with(blocks: u64) -> Self {
        let mut world = opened(Quorum::Any);
        (0..blocks).for_each(|hot| world.writes_to(hot));
        let command = world.snapshot("a");
        assert_eq!(world.finish(command), Ok(()));
        let first = world.scrub(false);
        assert_eq!((first.findings.len(), first.error), (0, None));
        assert!(world.replicas.iter().all(|r| r.layers[0].recorded.is_some()), "a scrub takes checksums");
        world
    }
}

fn finding(replica: usize, layer: &str, hot: u64, flaw: Flaw, mend: Mend) -> Finding {
    let range = Extent::new(World::hot(hot) * BLOCK, BLOCK);
    Finding { replica: format!("r{replica}"), layer: layer.into(), range, flaw, mend }
}

#[test]
fn rot_is_named_and_stays_until_somebody_asks_for_its_repair() {
    let mut world = World::hashed();
    let good = *world.block(1, "a", 0);
    world.rots(2, "a", 0);
    for _ in 0..2 {
        let scrub = world.scrub(false);
        assert_eq!(scrub.findings, [finding(2, "a", 0, Flaw::Rotten, Mend::Reported)]);
        assert_eq!(*world.block(2, "a", 0), Some(666));
    }
    let scrub = world.scrub(true);
    assert_eq!(scrub.findings, [finding(2, "a", 0, Flaw::Rotten, Mend::Repaired)]);
    assert_eq!((scrub.bad_blocks, scrub.repaired_blocks), (1, 1));
    assert_eq!(*world.block(2, "a", 0), good);
    assert_eq!(world.scrub(false).findings, []);
}

/// It was sound when it was asked, and is another when it is compared: that is rot, and no conflict.
#[test]
fn what_rots_while_it_is_looked_at_is_rot() {
    let mut found = 0;
    for steps in 0..200 {
        let mut world = World::hashed();
        // It is looked at closely since it has rotted elsewhere.
        world.rots(3, "a", 1);
        let scrub = Command::Scrub { repair: false, bytes_per_second: 0 };
        let command = world.command(scrub);
        (0..steps).for_each(|_| world.step());
        world.rots(2, "a", 1);
        assert_eq!(world.finish(command), Ok(()));
        world.run_until("the scrub ends", |w| w.status().scrub.is_some_and(|s| !s.running));
        let findings = world.status().scrub.expect("it ran").findings;
        let rot = [
            finding(2, "a", 1, Flaw::Rotten, Mend::Reported),
            finding(3, "a", 1, Flaw::Rotten, Mend::Reported),
        ];
        assert!(findings.iter().all(|f| rot.contains(f)), "after {steps} steps: {findings:?}");
        found += findings.len();
    }
    assert!(found > 200, "{found}");
}

/// Two of three are rotten in the same way: a majority, and wrong.
#[test]
fn the_one_sound_copy_is_the_source_whatever_the_majority() {
    let mut world = World::hashed();
    let good = *world.block(1, "a", 1);
    world.rots(1, "a", 1);
    world.rots(2, "a", 1);
    let scrub = world.scrub(true);
    assert_eq!(scrub.repaired_blocks, 2);
    assert!((1..=3).all(|r| *world.block(r, "a", 1) == good));
}

#[test]
fn nothing_is_repaired_from_a_bad_copy() {
    let mut world = World::hashed();
    world.dies(3);
    world.run_until("3 is out", |w| {
        w.mode(3) == Mode::Err && w.status().epoch.is_some_and(|e| e.members.len() == 2)
    });
    let good = *world.block(3, "a", 0);
    world.rots(1, "a", 0);
    world.rots(2, "a", 0);
    let scrub = world.scrub(true);
    let left = |r| finding(r, "a", 0, Flaw::Rotten, Mend::NoSource);
    assert_eq!(scrub.findings, [left(1), left(2)]);
    assert!((1..=2).all(|r| *world.block(r, "a", 0) == Some(666)));
    // Nor is the rot made the truth.
    assert!(world.replicas[0].layers[0].recorded.as_ref().is_some_and(|record| record.contains(&good)));
    assert_eq!(world.scrub(true).findings, [left(1), left(2)]);
}

/// A replica is filled from one that has rotted. It takes no checksums of what it got, so that the third replica is still
/// believed.
#[test]
fn rot_of_the_source_of_a_rebuild_is_taken_from_another_member_and_repaired() {
    let mut world = World::hashed();
    let good = *world.block(2, "a", 0);
    world.rots(1, "a", 0);
    // Nothing of it is left, so that it cannot be its own copy that stays.
    world.replicas[2].layers[0].recorded = None;
    *world.block(3, "a", 0) = None;
    let rebuild = world.command(Command::Rebuild { name: "r3".into() });
    world.run_until("the rebuild is over", |w| w.answers.contains_key(&rebuild) && w.mode(3) == Mode::Rw);
    assert_eq!(*world.block(3, "a", 0), good);
    world.run_until("the rot is repaired", |w| (1..=3).all(|r| *w.block(r, "a", 0) == good));
    assert_eq!(world.scrub(false).findings, []);
}

/// The target lacks it, too, so that they are alike there. Nothing else that one of them holds is near it, or what both hold.
#[test]
fn what_the_source_of_a_rebuild_has_lost_is_taken_from_another_member_and_repaired() {
    for blocks in [1, 2] {
        let mut world = World::hashed_with(blocks);
        let good = *world.block(2, "a", 0);
        *world.block(1, "a", 0) = None;
        world.replicas[2].layers[0].recorded = None;
        *world.block(3, "a", 0) = None;
        let rebuild = world.command(Command::Rebuild { name: "r3".into() });
        world.run_until("the rebuild is over", |w| w.answers.contains_key(&rebuild) && w.mode(3) == Mode::Rw);
        assert_eq!(*world.block(3, "a", 0), good, "of {blocks} blocks");
        world.run_until("the loss is repaired", |w| (1..=3).all(|r| *w.block(r, "a", 0) == good));
        assert_eq!(world.scrub(false).findings, []);
    }
}

/// The only member has rotted, and what comes back has the last sound copy.
#[test]
fn the_last_sound_copy_is_not_overwritten_with_rot() {
    let mut world = World::hashed();
    world.dies(2);
    world.run_until("2 is out", |w| w.status().epoch.is_some_and(|e| e.members.len() == 2));
    let good = *world.block(3, "a", 0);
    world.rots(1, "a", 0);
    let rebuild = world.command(Command::Rebuild { name: "r3".into() });
    world.run_until("the rebuild is over", |w| w.answers.contains_key(&rebuild) && w.mode(3) == Mode::Rw);
    assert_eq!(*world.block(3, "a", 0), good);
    world.run_until("the rot is repaired", |w| [1, 3].iter().all(|r| *w.block(*r, "a", 0) == good));
}

#[test]
fn a_replica_that_was_filled_takes_checksums_of_what_it_got() {
    let mut world = World::hashed();
    world.dies(3);
    world.run_until("3 is out", |w| w.status().epoch.is_some_and(|e| e.members.len() == 2));
    world.replicas[2].layers[0].recorded = None;
    world.returns(3);
    world.run_until("3 is back", |w| w.mode(3) == Mode::Rw);
    world.run_until("it has checksums", |w| w.replicas[2].layers[0].recorded.is_some());
}

/// Of two replicas one is rotten and the other has no checksums: nobody knows whether it was filled from the first.
#[test]
fn what_may_be_rot_is_hashed_on_no_replica() {
    let mut world = World::hashed();
    world.dies(3);
    world.run_until("3 is out", |w| w.status().epoch.is_some_and(|e| e.members.len() == 2));
    world.rots(1, "a", 0);
    world.rots(2, "a", 0);
    world.replicas[1].layers[0].recorded = None;
    let scrub = world.scrub(true);
    assert_eq!(scrub.findings, [finding(1, "a", 0, Flaw::Rotten, Mend::Unsure)]);
    assert_eq!(world.replicas[1].layers[0].recorded, None);
}

/// The head has no checksums: more than half decide. Of two, nobody does.
#[test]
fn a_head_that_differs_is_made_what_most_have() {
    let mut world = opened(Quorum::Any);
    world.writes_to(0);
    let good = *world.block(1, "", 0);
    world.rots(3, "", 0);
    let scrub = world.scrub(true);
    assert_eq!(scrub.findings, [finding(3, "", 0, Flaw::Differs, Mend::Repaired)]);
    assert_eq!(*world.block(3, "", 0), good);
    world.dies(3);
    world.run_until("3 is out", |w| w.status().epoch.is_some_and(|e| e.members.len() == 2));
    world.rots(2, "", 0);
    let scrub = world.scrub(true);
    let unsure = |r| finding(r, "", 0, Flaw::Differs, Mend::Unsure);
    assert_eq!(scrub.findings, [unsure(1), unsure(2)]);
    assert_eq!((*world.block(1, "", 0), *world.block(2, "", 0)), (good, Some(666)));
}

/// Nobody has told the engine that it is gone.
#[test]
fn a_snapshot_that_was_folded_away_is_no_part_of_a_scrub() {
    let mut world = purging();
    world.run_until("a is gone everywhere", |w| w.replicas.iter().all(|r| r.layers.len() == 2));
    let scrub = world.scrub(false);
    assert_eq!((scrub.notes, scrub.error), (Vec::new(), None));
    assert!(world.replicas.iter().all(|r| r.layers[0].recorded.is_some()), "the other one is hashed");
}

#[test]
fn one_scrub_at_a_time_and_it_can_be_cancelled() {
    let mut world = World::hashed();
    let begin = Command::Scrub { repair: false, bytes_per_second: 1 };
    let first = world.command(begin.clone());
    assert_eq!(world.finish(first), Ok(()));
    let second = world.command(begin);
    assert!(world.finish(second).is_err());
    let stop = world.command(Command::ScrubStop);
    assert_eq!(world.finish(stop), Ok(()));
    let scrub = world.status().scrub.expect("it ran");
    assert!(!scrub.running && scrub.error.is_some());
    assert_eq!(world.scrub(false).error, None);
}

/// The head becomes a snapshot under the scrub, snapshots are folded away, a replica comes back.
#[test]
fn a_scrub_gives_way_to_everything_else() {
    let mut world = World::hashed();
    for name in ["b", "c"] {
        let command = world.snapshot(name);
        assert_eq!(world.finish(command), Ok(()));
        world.writes_to(2);
    }
    world.rots(2, "a", 0);
    let slow = Command::Scrub { repair: true, bytes_per_second: 4096 };
    world.command(slow);
    let snapshot = world.snapshot("d");
    assert_eq!(world.finish(snapshot), Ok(()));
    let remove = world.command(Command::RemoveSnapshot { name: "b".into() });
    assert_eq!(world.finish(remove), Ok(()));
    world.command(Command::Purge);
    let gone = |w: &mut World| w.replicas.iter().all(|r| r.layers.iter().all(|l| l.name != "b"));
    world.run_until("b is folded away", gone);
    world.dies(3);
    world.run_for(2000);
    world.returns(3);
    world.run_until("3 is back", |w| w.mode(3) == Mode::Rw);
    world.run_until("the scrub ends", |w| w.status().scrub.is_some_and(|s| !s.running));
    let scrub = world.status().scrub.expect("it ran");
    assert_eq!(scrub.error, None);
    assert_eq!(scrub.findings, [finding(2, "a", 0, Flaw::Rotten, Mend::Repaired)]);
    let content: Vec<_> = world.replicas.iter().map(|r| r.layers.clone()).collect();
    let blocks = |r: usize| content[r].iter().map(|l| (&l.name, &l.blocks)).collect::<Vec<_>>();
    assert!(blocks(0) == blocks(1) && blocks(1) == blocks(2), "all are equal again");
}

/// Writes run all the while: no two replicas are found different.
#[test]
fn a_write_beside_a_scrub_is_no_false_alarm() {
    let mut world = World::hashed();
    for round in 0..40 {
        world.command(Command::Scrub { repair: round % 2 == 0, bytes_per_second: 0 });
        for n in 0..6 {
            let range = Extent::new(World::hot(n) * BLOCK, BLOCK);
            world.request(0, usize::from(n % 2 == 1), Op::Write { fua: false }, range);
        }
        world.run_until("the scrub ends", |w| w.status().scrub.is_some_and(|s| !s.running));
        assert_eq!(world.status().scrub.map(|s| s.findings), Some(Vec::new()));
    }
}

/// One replica has folded a removed snapshot away, another could not: their layers differ, and nothing is wrong.
#[test]
fn a_snapshot_that_only_some_have_folded_is_no_rot() {
    let mut world = World::hashed();
    world.writes_to(0);
    let remove = world.command(Command::RemoveSnapshot { name: "a".into() });
    assert_eq!(world.finish(remove), Ok(()));
    let before: Vec<u32> =
        (0..2).map(|n| world.replicas[1].read(usize::try_from(World::hot(n)).expect("small"), 1)).collect();
    let fold = Control::Fold { name: "a".into(), bytes_per_second: None };
    world.replicas[1].control(&fold).expect("it folds");
    let scrub = world.scrub(true);
    assert_eq!((scrub.findings, scrub.error), (Vec::new(), None));
    assert_eq!(scrub.notes.len(), 2, "the snapshot and the head are named: {:?}", scrub.notes);
    for (n, expected) in (0..2).zip(before) {
        let block = usize::try_from(World::hot(n)).expect("small");
        assert_eq!(
            world.replicas[1].read(block, 0),
            expected,
            "what was folded into the head is still there"
        );
    }
}

/// A removed snapshot has rotted on the replica that the others are made equal to after a power cut. Be it that another one kept its power,
/// or that none did: no head gets the rot, which would hide the sound copies below.
#[test]
fn rot_below_heads_in_doubt_is_copied_into_none() {
    for lost in [vec![3], vec![2, 3]] {
        let mut world = World::hashed();
        let snapshot = world.snapshot("b");
        assert_eq!(world.finish(snapshot), Ok(()));
        let removal = world.command(Command::RemoveSnapshot { name: "a".into() });
        assert_eq!(world.finish(removal), Ok(()));
        let good = *world.block(1, "a", 0);
        world.writes_to(1);
        let written = *world.block(1, "", 1);
        lost.iter().for_each(|replica: &usize| world.replicas[replica - 1].forget_unflushed());
        world.rots(1, "a", 0);
        world.crash_engine();
        world.run_until("the volume opens", World::is_open);
        assert!(world.status().chunks_in_doubt > 0);
        world.run_until("nothing is in doubt", |w| w.status().chunks_in_doubt == 0);
        for replica in 1..=3 {
            assert_eq!(*world.block(replica, "", 1), written, "{replica}");
            let (top, block) = (world.replicas[replica - 1].layers.len() - 1, World::hot(0));
            let block = usize::try_from(block).expect("small");
            let sound = world.replicas[replica - 1].read(block, top) == good.expect("written");
            assert!(sound || replica == 1 && lost.len() == 2, "replica {replica}, {lost:?} lost their power");
            assert_ne!(*world.block(replica, "", 0), Some(666), "replica {replica}");
        }
    }
}
