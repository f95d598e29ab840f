//! What two tasks that are each right could lose or bring back together: a fold and checksums, a scrub and a trim, a look and a
//! repair, an import and a fold.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use lh_block::BLOCK;
use lh_wire::{BlockState, Keep};

use super::super::checksum::{FoldedChecksums, file_name};
use super::super::disk;
use super::super::offline::SnapshotView;
use super::super::pace::Pace;
use super::super::scrub::{Rot, RotKind, ScrubError};
use super::scrub::{hash, layer, rot, scrub};
use super::tape::Tape;
use super::volume::{SIZE, Volume, extent};

/// Rot is carried along by a fold, and would become the truth. What a scrub finds afterwards, and the volume.
fn folded_rot(path: &Path, change: impl Fn(&fs::File)) -> (Vec<Rot>, Volume) {
    let mut volume = Volume::create(path);
    volume.write(extent(2, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(12, 12), 2);
    volume.snapshot(2, "two").unwrap();
    hash(path, "one");
    hash(path, "two");
    rot(path, "one", change);
    volume.remove(3, "one").unwrap();
    let (one, two) = (volume.store.layer("one").unwrap(), volume.store.layer("two").unwrap());
    let mut before = FoldedChecksums::open(path, &volume.store, two, one).unwrap();
    volume.fold("one").unwrap();
    let layer = layer(path, "two");
    let hashed = layer.hash_folded(&mut before, &Pace::new(0), &mut |_| {}).unwrap();
    assert!(hashed.silently_corrupted, "it is carried along as if it were sound: {hashed:?}");
    (scrub(path, "two").rotten, volume)
}

/// The block is trimmed, and then a scrub brings it back.
#[test]
fn a_block_that_a_folded_snapshot_has_lost_is_no_truth() {
    let place = tempfile::tempdir().unwrap();
    let lose = |file: &fs::File| disk::punch(file, extent(5, 2)).unwrap();
    let (rotten, mut volume) = folded_rot(&place.path().join("replica"), lose);
    assert_eq!(rotten, [Rot { extent: extent(5, 2), kind: RotKind::Lost }]);
    volume.zero(extent(5, 1));
    volume.put("two", 5, &[(BlockState::Data, 1), (BlockState::Data, 1)]);
    assert_eq!(volume.blocks()[4..8], [1, 0, 1, 1], "old data shows through the hole of the head");
}

#[test]
fn blocks_of_a_folded_snapshot_that_have_changed_or_appeared_are_no_truth() {
    let place = tempfile::tempdir().unwrap();
    let change = |file: &fs::File| {
        file.write_all_at(&[9; 4096], 11 * BLOCK).unwrap();
        file.write_all_at(&[9], 4 * BLOCK).unwrap();
    };
    let (rotten, _) = folded_rot(&place.path().join("replica"), change);
    let rot = |block, kind| Rot { extent: extent(block, 1), kind };
    assert_eq!(rotten, [rot(4, RotKind::Changed), rot(11, RotKind::Appeared)]);
}

/// What the upper layer hid, by data or by a mark, is in neither afterwards, and what both held is once.
#[test]
fn what_a_folded_snapshot_hid_is_no_rot() {
    for (written, zeroed) in
        [(extent(3, 1), extent(5, 3)), (extent(4, 5), extent(2, 1)), (extent(20, 30), extent(9, 1))]
    {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("replica");
        let mut volume = Volume::create(&path);
        volume.write(extent(2, 8), 1);
        volume.write(extent(40, 1), 1);
        volume.snapshot(1, "one").unwrap();
        volume.write(extent(5, 1), 2);
        volume.write(written, 3);
        volume.zero(zeroed);
        volume.snapshot(2, "two").unwrap();
        volume.flush();
        while volume.punch() {}
        hash(&path, "one");
        hash(&path, "two");
        volume.remove(3, "one").unwrap();
        let (one, two) = (volume.store.layer("one").unwrap(), volume.store.layer("two").unwrap());
        let mut before = FoldedChecksums::open(&path, &volume.store, two, one).unwrap();
        volume.fold("one").unwrap();
        let layer = layer(&path, "two");
        let hashed = layer.hash_folded(&mut before, &Pace::new(0), &mut |_| {}).unwrap();
        assert!(!hashed.silently_corrupted, "{written} written, {zeroed} zeroed");
        assert!(layer.has_block_checksums());
    }
}

/// The snapshot is folded away, too, before its hash has its turn, and another one is made of its name.
#[test]
fn another_snapshot_of_the_name_is_not_hashed_by_what_was_folded() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    let mut volume = Volume::create(&path);
    for (at, name) in [(2, "one"), (12, "two"), (20, "three")] {
        volume.write(extent(at, 8), 1);
        volume.snapshot(at.into(), name).unwrap();
    }
    hash(&path, "one");
    hash(&path, "two");
    volume.remove(30, "one").unwrap();
    let (one, two) = (volume.store.layer("one").unwrap(), volume.store.layer("two").unwrap());
    let mut before = FoldedChecksums::open(&path, &volume.store, two, one).unwrap();
    volume.fold("one").unwrap();
    volume.remove(31, "two").unwrap();
    volume.fold("two").unwrap();
    volume.write(extent(2, 8), 9);
    volume.snapshot(32, "two").unwrap();
    let another = layer(&path, "two");
    let refused = another.hash_folded(&mut before, &Pace::new(0), &mut |_| {});
    assert!(matches!(refused, Err(ScrubError::Changed(_))), "{refused:?}");
    assert!(!another.has_block_checksums());
    hash(&path, "two");
    assert_eq!(scrub(&path, "two").rotten, []);
}

/// Without Longhorn's file, what is missing and what is new are seen in the blocks' own checksums.
#[test]
fn hashing_again_finds_what_is_missing_and_what_is_new() {
    let lose = |file: &fs::File| disk::punch(file, extent(5, 1)).unwrap();
    let gain = |file: &fs::File| file.write_all_at(&[9; 4096], 11 * BLOCK).unwrap();
    let changes: [&dyn Fn(&fs::File); 2] = [&lose, &gain];
    for change in changes {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("replica");
        let mut volume = Volume::create(&path);
        volume.write(extent(2, 8), 1);
        volume.snapshot(1, "one").unwrap();
        hash(&path, "one");
        rot(&path, "one", change);
        fs::remove_file(path.join(file_name("one"))).unwrap();
        assert!(hash(&path, "one").silently_corrupted);
    }
}

/// A snapshot has lost a block (rot), the block is trimmed in the head, the scrub gives the snapshot its block back.
#[test]
fn what_was_trimmed_over_a_lost_block_stays_zero_when_a_scrub_brings_that_back() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    let mut volume = Volume::create(&path);
    volume.write(extent(5, 1), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(5, 1), 2);
    volume.flush();
    hash(&path, "one");
    rot(&path, "one", |file| disk::punch(file, extent(5, 1)).unwrap());
    volume.zero(extent(5, 1));
    volume.flush();
    assert_eq!(volume.blocks()[5], 0);
    // What mends it: the block as the other replicas have it.
    volume.put("one", 5, &[(BlockState::Data, 1)]);
    assert_eq!(volume.blocks()[5], 0, "old data shows through the hole of the head");
}

/// Block 5 of its snapshot `one` is on record, and gone.
fn that_has_lost_a_block(path: &Path) -> Volume {
    let mut volume = Volume::create(path);
    volume.write(extent(5, 1), 1);
    volume.snapshot(1, "one").unwrap();
    volume.flush();
    hash(path, "one");
    rot(path, "one", |file| disk::punch(file, extent(5, 1)).unwrap());
    volume
}

/// A mark over what a snapshot has lost is compared as one: the other replica has the block there.
#[test]
fn a_mark_over_a_lost_block_is_compared_as_one() {
    let place = tempfile::tempdir().unwrap();
    let mut volume = that_has_lost_a_block(&place.path().join("replica"));
    volume.zero(extent(5, 1));
    assert_eq!(volume.compared(extent(4, 3)), [BlockState::Absent, BlockState::Zero, BlockState::Absent]);
}

/// The same block is trimmed while the replica is filled, and nothing brings the snapshot's block before that is over.
#[test]
fn what_was_trimmed_over_a_lost_block_during_a_rebuild_stays_zero() {
    let place = tempfile::tempdir().unwrap();
    let mut volume = that_has_lost_a_block(&place.path().join("replica"));
    let chain = volume.directory.state().chain;
    let parts = volume.directory.begin_catch_up(SIZE, &chain, &Keep::default()).unwrap();
    volume.store.replace(parts);
    volume.zero(extent(5, 2));
    volume.end_rebuild();
    let states = volume.layer("");
    assert_eq!(
        (states[5].0, states[6].0),
        (BlockState::Zero, BlockState::Absent),
        "the other mark hides nothing"
    );
    volume.put("one", 5, &[(BlockState::Data, 1)]);
    assert_eq!(volume.blocks()[5], 0, "old data shows through the hole of the head");
}

/// A head of many pieces over many snapshots: what is on record costs one question to each layer, not one for each piece.
#[test]
fn a_trim_asks_each_layer_once_what_it_should_hold() {
    let place = tempfile::tempdir().unwrap();
    let mut volume = Volume::create(&place.path().join("replica"));
    for (tag, name) in [(1, "one"), (2, "two"), (3, "three")] {
        volume.write(extent(2, 8), 1);
        volume.snapshot(tag, name).unwrap();
    }
    for block in (0..60).step_by(2) {
        volume.write(extent(block, 1), 2);
    }
    let mut asked = 0;
    let plan = volume.store.plan_zero(extent(0, 60), false, &mut |_, _, _| {
        asked += 1;
        vec![extent(21, 1)]
    });
    assert_eq!(asked, 3);
    assert!(plan.unwrap().marks.contains(&extent(21, 1)), "a layer below may get that back");
}

/// A view that was opened while its snapshot was not settled, and what a repair brought before it was.
#[test]
fn what_was_looked_at_before_a_snapshot_was_repaired_is_not_called_lasting() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    let mut volume = Volume::create(&path);
    volume.write(extent(5, 1), 1);
    volume.snapshot(1, "one").unwrap();
    assert_eq!(volume.directory.state().unsettled, ["one"]);
    let view = SnapshotView::open_beside(&path, "one").unwrap();
    // A repair of what is in doubt brings blocks that this replica lacks; then the engine calls the snapshot settled.
    volume.put("one", 9, &[(BlockState::Data, 3)]);
    volume.flush();
    volume.directory.store_settled("one").unwrap();
    let mut bytes = vec![0; 4096];
    view.read_at(9 * BLOCK, &mut bytes).unwrap();
    let lasting = view.check_lasting().is_ok();
    assert!(
        bytes[0] == 3 || !lasting,
        "a block that the snapshot has reads {}, and that is called the snapshot's",
        bytes[0]
    );
}

/// The head has become the removed snapshot's file (one rename), the process dies before the metas follow, and another
/// program opens the directory, which replaces volume.meta.
#[test]
fn an_import_finishes_a_fold_of_the_head_that_was_cut_short() {
    let (mut refused, mut ended) = (Vec::new(), false);
    for steps in 0..200 {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("replica");
        let mut volume = Volume::create(&path);
        volume.write(extent(0, 60), 1);
        volume.snapshot(1, "base").unwrap();
        volume.write(extent(0, 50), 2);
        volume.snapshot(2, "one").unwrap();
        volume.write(extent(3, 2), 3);
        volume.flush();
        volume.remove(3, "one").unwrap();
        let expected = volume.blocks();
        drop(volume);
        let tape = Arc::new(Tape::default());
        tape.stop_after(steps);
        let done = Volume::open_taped(&path, &tape).is_ok_and(|mut volume| volume.fold("one").is_ok());
        // As Longhorn does at every open.
        let meta = fs::read(path.join("volume.meta")).unwrap();
        fs::remove_file(path.join("volume.meta")).unwrap();
        fs::write(path.join("volume.meta"), meta).unwrap();
        match Volume::open(&path) {
            Ok(volume) => assert_eq!(volume.blocks(), expected, "stopped after {steps}"),
            Err(e) => refused.push(format!("{steps}: {e}")),
        }
        if done {
            ended = true;
            break;
        }
    }
    assert!(refused.is_empty(), "{refused:#?}");
    assert!(ended, "the fold has more steps than were tried");
}
