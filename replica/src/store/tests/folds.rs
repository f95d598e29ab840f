//! Single stories of folds: what they move, what Longhorn gets wrong, what runs out.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use lh_block::{BLOCK, Extent};
use lh_wire::{BlockState, Keep, LayerInfo};

use super::super::disk;
use super::super::offline::SnapshotView;
use super::super::record::Direction;
use super::tape::Tape;
use super::volume::{Volume, extent, revert_op, temporary};

const MIB: u64 = 1 << 20;

/// Longhorn's order makes this quadratic: the sum that each step has gathered is copied into the next snapshot. Here each
/// block is moved at most once, whichever end is begun at.
#[test]
fn many_removed_snapshots_cost_what_they_hold() {
    const SNAPSHOTS: u64 = 11;
    for from_the_root in [true, false] {
        let place = temporary();
        let mut volume = Volume::create_sized(&place.path().join("r"), 64 * MIB);
        for n in 0..SNAPSHOTS {
            volume.write(Extent::new(n * 2 * MIB, 2 * MIB), u8::try_from(n + 1).unwrap());
            volume.snapshot(u128::from(n) + 1, &format!("s{n:02}")).unwrap();
        }
        volume.write(extent(0, 1), 99);
        for n in 0..SNAPSHOTS - 1 {
            volume.remove(100 + u128::from(n), &format!("s{n:02}")).unwrap();
        }
        let mut moved = 0;
        for step in 0..SNAPSHOTS - 1 {
            let n = if from_the_root { step } else { SNAPSHOTS - 2 - step };
            let fold = volume.fold(&format!("s{n:02}")).unwrap();
            moved += fold.moved().0 + fold.moved().1;
            assert_eq!(fold.state().done, fold.state().total);
        }
        assert_eq!(volume.directory.state().chain.len(), 2);
        let held = SNAPSHOTS * 2 * MIB;
        assert!(moved <= held, "moved {moved} bytes of {held}, from the root: {from_the_root}");
        let read = volume.read(Extent::new(0, 24 * MIB));
        let step = usize::try_from(2 * MIB).unwrap();
        let expected: Vec<u8> = (1..=11).chain([0]).collect();
        assert_eq!(read.chunks(step).map(|part| part[4096]).collect::<Vec<_>>(), expected);
        assert_eq!(read[0], 99);
    }
}

/// longhorn-engine punches the live snapshot above a removed one (its list of what may be punched goes on behind the
/// first that may not), and brings older data back when it opens the directory again.
#[test]
fn an_unmap_beside_a_removed_snapshot_touches_no_live_one() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 8), 66);
    volume.snapshot(1, "b").unwrap();
    volume.write(extent(0, 8), 65);
    volume.snapshot(2, "a").unwrap();
    volume.remove(3, "b").unwrap();
    volume.zero(extent(0, 4));
    let fold = volume.begin_fold("b");
    let reads = |volume: &Volume| volume.blocks()[..8].to_vec();
    let live = || {
        let mut bytes = vec![0; 8 * 4096];
        SnapshotView::open_beside(&path, "a").unwrap().read_at(0, &mut bytes).unwrap();
        bytes.chunks(4096).map(|block| block[0]).collect::<Vec<_>>()
    };
    assert_eq!((reads(&volume), live()), (vec![0, 0, 0, 0, 65, 65, 65, 65], vec![65; 8]));
    // And in the middle of the fold.
    let mut fold = fold.unwrap();
    for n in 4_u64.. {
        if n < 8 {
            volume.zero(extent(n, 1));
        }
        let goes_on = volume.fold_step(&mut fold).unwrap();
        assert_eq!(live(), vec![65; 8]);
        if !goes_on && n >= 8 {
            break;
        }
    }
    volume.flush();
    while volume.punch() {
        volume.flush();
    }
    drop(volume);
    let volume = Volume::open(&path).unwrap();
    assert_eq!((reads(&volume), live()), (vec![0; 8], vec![65; 8]), "nothing comes back");
}

/// What a fold into the parent has copied stays in the removed snapshot when it is broken off, and shows where the layer above
/// is to say nothing any more. So whoever takes such a word from another replica takes the snapshot's, too: an engine that brings
/// a replica in sync looks at removed snapshots wherever it looks at what stands on them.
#[test]
fn a_broken_off_fold_shows_where_an_image_says_nothing() {
    let (absent, own) = ((BlockState::Absent, 0), (BlockState::Data, 1));
    for (look_below, expected) in [(false, [1, 7, 0]), (true, [1, 0, 0])] {
        let place = temporary();
        let mut volume = Volume::create(&place.path().join("r"));
        volume.write(extent(0, 1), 1);
        volume.write(extent(8, 40), 1);
        volume.snapshot(1, "p").unwrap();
        volume.write(extent(1, 1), 7);
        volume.remove(2, "p").unwrap();
        let mut fold = volume.begin_fold("p").unwrap();
        while volume.layer("p")[1] == absent {
            assert!(volume.fold_step(&mut fold).unwrap(), "the head goes into the snapshot");
        }
        fold.stop("the replica is cut off");
        while volume.fold_step(&mut fold).unwrap() {}
        volume.flush();
        let chain = volume.directory.state().chain;
        let parts = volume.directory.begin_catch_up(volume.store.size(), &chain, &Keep::default()).unwrap();
        volume.store.replace(parts);
        // Elsewhere the block was given back, and nothing lies below it.
        if look_below {
            volume.put("p", 0, &[own, absent, absent]);
        }
        volume.put("", 0, &[absent, absent, absent]);
        volume.end_rebuild();
        assert_eq!(volume.blocks()[..3], expected);
    }
}

/// A byte of the index tells 255 places apart; snapshots that came and went do not use them up.
#[test]
fn ranks_are_used_again() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 64), 1);
    volume.snapshot(1, "base").unwrap();
    for n in 0..300_u128 {
        let name = format!("s{n}");
        let (at, byte) = (u64::try_from(n % 60).unwrap(), u8::try_from(n % 200 + 2).unwrap());
        volume.write(extent(at, 2), byte);
        volume.snapshot(10 + 2 * n, &name).unwrap();
        volume.write(extent(at, 1), byte - 1);
        volume.remove(11 + 2 * n, &name).unwrap();
        volume.fold(&name).unwrap();
        assert_eq!(volume.blocks()[usize::try_from(at).unwrap()..][..2], [byte - 1, byte]);
    }
    let before = volume.blocks();
    assert!(volume.store.layers() <= 4, "numbers of layers are used again");
    drop(volume);
    assert_eq!(Volume::open(&path).unwrap().blocks(), before);
}

#[test]
fn what_may_not_be_folded_is_refused_with_a_reason() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(0, 4), 1);
    volume.snapshot(1, "one").unwrap();
    volume.snapshot(2, "two").unwrap();
    volume.flush();
    volume.carry_out(3, &revert_op("one")).unwrap();
    let why = |volume: &mut Volume, name: &str| volume.fold(name).unwrap_err().to_string();
    assert_eq!(why(&mut volume, "one"), "snapshot \"one\" is not marked as removed: remove it first");
    assert_eq!(why(&mut volume, "none"), "there is no snapshot \"none\"");
    assert_eq!(why(&mut volume, ""), "there is no snapshot \"\"");
    volume.remove(4, "one").unwrap();
    let branches = why(&mut volume, "one");
    assert!(branches.contains("2 layers stand on snapshot \"one\""), "{branches}");
    // The branch goes, and then it can be.
    volume.remove(5, "two").unwrap();
    volume.fold("two").unwrap();
    volume.fold("one").unwrap();
    assert_eq!(volume.directory.state().chain.len(), 1);
    assert_eq!(volume.blocks()[..5], [1, 1, 1, 1, 0]);
    let removed = volume.carry_out(6, &revert_op("one")).unwrap_err();
    assert_eq!(removed.to_string(), "there is no snapshot \"one\"");
}

/// While a chain operation is prepared its files name the chain as it is: the names wait.
#[test]
fn a_fold_ends_after_a_prepared_operation() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(0, 4), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(1, 1), 2);
    volume.remove(2, "one").unwrap();
    let mut fold = volume.begin_fold("one").unwrap();
    volume.directory.prepare(lh_block::Instance(3), &super::volume::snapshot_op("two")).unwrap();
    let refused = loop {
        match volume.fold_step(&mut fold) {
            Ok(_) => {}
            Err(e) => break e,
        }
    };
    assert!(matches!(refused, super::super::error::ChainError::OtherPrepared(_)), "{refused}");
    volume.commit(3).unwrap();
    while volume.fold_step(&mut fold).unwrap() {}
    let names: Vec<_> = volume.directory.state().chain.into_iter().map(|l| (l.name, l.parent)).collect();
    assert_eq!(names, [("two".into(), String::new()), (String::new(), "two".into())]);
    assert_eq!(volume.blocks()[..5], [1, 2, 1, 1, 0]);
}

/// A fold into the parent notes how far it is, and one that was killed goes on from there.
#[test]
fn a_killed_fold_into_the_parent_goes_on_where_it_was() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create_sized(&path, 64 * MIB);
    volume.write(Extent::new(0, 32 * MIB), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(Extent::new(0, 16 * MIB), 2);
    volume.snapshot(2, "two").unwrap();
    volume.remove(3, "one").unwrap();
    let plan = volume.directory.begin_fold("one").unwrap();
    assert_eq!(plan.resume, None);
    volume.directory.choose_fold(&plan, super::super::Direction::IntoParent).unwrap();
    volume.directory.save_fold(&plan, super::super::Direction::IntoParent, 12 * MIB).unwrap();
    drop(volume);
    let mut volume = Volume::open(&path).unwrap();
    assert_eq!(volume.directory.begin_fold("one").unwrap().resume, Some(12 * MIB));
    let fold = volume.fold("one").unwrap();
    assert_eq!(fold.moved().0 + fold.moved().1, 4 * MIB, "only the rest is moved");
    assert!(!path.join("engine/fold").exists());
    // Nobody had copied the beginning: the note was believed.
    assert_eq!(volume.blocks()[usize::try_from(12 * MIB / BLOCK).unwrap()], 2);
}

/// Layers of an expanded volume are of several lengths: the one that stays is as long as the longer of the two.
#[test]
fn short_layers_become_long_enough() {
    for larger_child in [false, true] {
        let place = temporary();
        let path = place.path().join("r");
        let mut volume = Volume::create(&path);
        volume.write(extent(0, 40), 1);
        let size = 128 * BLOCK;
        volume.expand(1, size).unwrap();
        volume.write(extent(100, if larger_child { 20 } else { 2 }), 2);
        volume.snapshot(2, "two").unwrap();
        volume.write(extent(101, 1), 3);
        let expected = volume.blocks();
        let name = format!("expand-{size}");
        volume.remove(3, &name).unwrap();
        volume.fold(&name).unwrap();
        assert_eq!(volume.directory.state().chain[0].length, size);
        assert_eq!(volume.blocks(), expected);
        drop(volume);
        let volume = Volume::open(&path).unwrap();
        assert_eq!(volume.blocks(), expected);
        assert_eq!(volume.directory.state().chain.len(), 2);
    }
}

/// How long the file is by then is on record before anything is copied, and a file that is shorter than that is refused.
#[test]
fn a_file_that_a_fold_has_made_longer_is_so_when_the_power_goes() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 40), 1);
    let size = 128 * BLOCK;
    volume.expand(1, size).unwrap();
    volume.write(extent(100, 2), 2);
    volume.snapshot(2, "two").unwrap();
    let (expected, name) = (volume.blocks(), format!("expand-{size}"));
    volume.remove(3, &name).unwrap();
    volume.flush();
    drop(volume);
    let tape = Arc::new(Tape::default());
    let mut volume = Volume::open_taped(&path, &tape).unwrap();
    let plan = volume.directory.begin_fold(&name).unwrap();
    volume.directory.choose_fold(&plan, Direction::IntoParent).unwrap();
    drop(volume);
    tape.lose_unsynced();
    assert_eq!(Volume::open(&path).unwrap().blocks(), expected);
}

/// Else all that is below counted as not settled, and would be compared with other replicas.
#[test]
fn what_a_settled_snapshot_stood_on_is_settled_when_it_is_folded_away() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    for (id, name) in [(1, "one"), (2, "two")] {
        volume.write(extent(0, 8), 1);
        volume.snapshot(id, name).unwrap();
    }
    volume.directory.store_settled("two").unwrap();
    volume.remove(3, "two").unwrap();
    volume.fold("two").unwrap();
    assert_eq!(volume.directory.state().unsettled, [] as [String; 0]);
    volume.snapshot(4, "three").unwrap();
    assert_eq!(volume.directory.state().unsettled, ["three"]);
}

/// A fold that was stopped before its change of names leaves another name of a layer. Taking it away changes the layer's ctime,
/// by which a clean close tells whether somebody else was at the files.
#[test]
fn a_name_that_a_stopped_fold_has_left_makes_the_layer_nobody_elses() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 4), 1);
    volume.snapshot(1, "one").unwrap();
    // A mark without which the files are not the volume: an import would refuse them.
    volume.zero(extent(0, 1));
    std::fs::hard_link(path.join("volume-snap-one.img"), path.join("engine/fold-layer")).unwrap();
    let expected = volume.blocks();
    let path = volume.close();
    // Opened, and killed before anything was written.
    drop(Volume::open(&path).unwrap());
    assert!(!path.join("engine/fold-layer").exists());
    let view = SnapshotView::open_beside(&path, "one").unwrap();
    assert_eq!(view.size(), expected.len() as u64 * BLOCK);
    let volume = Volume::open(&path).unwrap();
    assert_eq!(volume.blocks(), expected);
    assert!(!volume.directory.state().imported);
}

/// What Longhorn finds when it opens the directory: it knows nothing of `engine/`.
#[test]
fn a_changed_chain_reads_the_same_without_our_files() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 12), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(2, 3), 2);
    volume.snapshot(2, "two").unwrap();
    volume.write(extent(4, 4), 3);
    volume.snapshot(3, "three").unwrap();
    volume.expand(4, 96 * BLOCK).unwrap();
    volume.write(extent(80, 2), 4);
    volume.snapshot(5, "five").unwrap();
    volume.write(extent(81, 2), 5);
    volume.remove(6, "two").unwrap();
    volume.fold("two").unwrap();
    volume.remove(7, "five").unwrap();
    volume.fold("five").unwrap();
    let check = |volume: Volume, expected: &[u8]| {
        assert_eq!(volume.blocks(), expected);
        let path = volume.close();
        std::fs::remove_dir_all(path.join("engine")).unwrap();
        let volume = Volume::open(&path).unwrap();
        assert!(volume.directory.state().imported);
        assert_eq!(volume.blocks(), expected);
        volume
    };
    let expected = volume.blocks();
    assert_eq!((expected[3], expected[5], expected[80..84].to_vec()), (2, 3, vec![4, 5, 5, 0]));
    let mut volume = check(volume, &expected);
    volume.flush();
    volume.carry_out(8, &revert_op("one")).unwrap();
    let expected: Vec<u8> = (0..96).map(|n| u8::from(n < 12)).collect();
    let volume = check(volume, &expected);
    let names: Vec<_> = volume.directory.state().chain.into_iter().map(|l| l.name).collect();
    assert_eq!(names, ["one", "three", &format!("expand-{}", 96 * BLOCK), ""]);
}

/// Replicas fold on their own. Whichever of two has folded, and whichever is made equal to the other: both read what was
/// written last. Copied layer by layer, the one that has folded would lose what its head alone holds.
#[test]
fn replicas_that_have_folded_differently_are_made_equal_by_what_is_read() {
    for (target_folds, source_folds) in [(true, false), (false, true), (true, true), (false, false)] {
        let place = temporary();
        let made = |name: &str, folds: bool| {
            let mut volume = Volume::create(&place.path().join(name));
            volume.write(extent(0, 8), 1);
            volume.snapshot(1, "a").unwrap();
            volume.write(extent(2, 2), 2);
            volume.zero(extent(5, 1));
            volume.remove(2, "a").unwrap();
            if folds {
                volume.fold("a").unwrap();
            }
            volume
        };
        let (mut target, mut source) = (made("target", target_folds), made("source", source_folds));
        // What only one of them had when their engine died.
        target.write(extent(6, 1), 9);
        source.write(extent(3, 1), 3);
        let image = source.merged("");
        target.put("", 0, &image);
        let expected = [1, 1, 2, 3, 1, 0, 1, 1];
        let case = format!("target has folded: {target_folds}, source: {source_folds}");
        assert_eq!(source.blocks()[..8], expected, "{case}");
        assert_eq!(target.blocks()[..8], expected, "{case}");
        if !target_folds {
            target.fold("a").unwrap();
            assert_eq!(target.blocks()[..8], expected, "{case}, folded afterwards");
        }
    }
}

/// Over a backing file, what no layer of the source says anything of is what that file has: another replica may yet have something else in
/// a snapshot that was removed.
#[test]
fn what_only_a_backing_file_holds_is_told_as_it_is_read() {
    let place = temporary();
    std::fs::write(place.path().join("backing"), [vec![8; 10 * 4096], vec![0; 54 * 4096]].concat()).unwrap();
    let made = |name: &str, written: u8| {
        let path = place.path().join(name);
        Volume::create(&path).close();
        let meta = path.join("volume.meta");
        let text = std::fs::read_to_string(&meta).unwrap();
        let named = text.replacen("\"BackingFilePath\":\"\"", "\"BackingFilePath\":\"../backing\"", 1);
        std::fs::write(&meta, named).unwrap();
        let mut volume = Volume::open(&path).unwrap();
        volume.write(extent(2, 2), 1);
        // What was on its way to all of them when their engine died.
        if written > 0 {
            volume.write(extent(4, 1), written);
            volume.write(extent(20, 1), written);
        }
        volume.snapshot(1, "a").unwrap();
        volume.zero(extent(3, 1));
        volume.remove(2, "a").unwrap();
        volume
    };
    let (mut target, mut source) = (made("target", 9), made("source", 0));
    source.fold("a").unwrap();
    target.write(extent(6, 1), 7);
    let image = source.merged("");
    target.put("", 0, &image);
    let mut expected = vec![8; 10];
    expected.resize(64, 0);
    (expected[2], expected[3]) = (1, 0);
    assert_eq!(source.blocks(), expected);
    assert_eq!(target.blocks(), expected);
    target.fold("a").unwrap();
    assert_eq!(target.blocks(), expected, "folded afterwards");
}

/// A snapshot from before an expansion has nothing behind its end, whatever is read through it.
#[test]
fn what_is_read_through_a_shorter_snapshot_ends_with_it() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.write(extent(1, 1), 1);
    volume.snapshot(1, "a").unwrap();
    volume.write(extent(2, 1), 2);
    volume.expand(2, 96 * BLOCK).unwrap();
    volume.write(extent(80, 1), 3);
    let name = format!("expand-{}", 96 * BLOCK);
    let image = volume.merged(&name);
    assert_eq!(
        (image[1], image[2], image[3]),
        ((BlockState::Data, 1), (BlockState::Data, 2), (BlockState::Zero, 0))
    );
    assert!(image[64..].iter().all(|block| *block == (BlockState::Absent, 0)));
    volume.put(&name, 0, &image);
    assert_eq!(volume.blocks()[..4], [0, 1, 2, 0]);
    assert_eq!(volume.blocks()[80], 3);
}

/// A volume of 64 MiB with 32 MiB in a removed snapshot, and a head of 1 MiB over it.
fn small_head(path: &std::path::Path) -> Volume {
    let mut volume = Volume::create_sized(path, 64 * MIB);
    volume.write(Extent::new(0, 32 * MIB), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(Extent::new(4 * MIB, MIB), 2);
    volume.zero(Extent::new(8 * MIB, MIB));
    volume.write(Extent::new(40 * MIB, MIB / 2), 4);
    volume.remove(2, "one").unwrap();
    volume
}

/// The volume of [`small_head`] after so many steps of the fold; `false`: it has ended.
fn folding(path: &std::path::Path, steps: usize) -> (Volume, super::super::Fold, bool) {
    let mut volume = small_head(path);
    let mut fold = volume.begin_fold("one").unwrap();
    let goes_on = (0..steps).all(|_| volume.fold_step(&mut fold).unwrap());
    (volume, fold, goes_on)
}

/// The byte of each half megabyte.
fn halves(volume: &Volume) -> Vec<u8> {
    let bytes = volume.read(Extent::new(0, 64 * MIB));
    bytes.chunks(usize::try_from(MIB / 2).unwrap()).map(|part| part[0]).collect()
}

/// What the volume of [`small_head`] reads as.
fn expected_halves() -> Vec<u8> {
    let byte = |half| match half {
        8..10 => 2,
        16..18 => 0,
        0..64 => 1,
        80 => 4,
        _ => 0,
    };
    (0..128).map(byte).collect()
}

#[test]
fn a_small_head_goes_into_a_large_snapshot_whatever_clients_write() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = small_head(&path);
    let mut expected = expected_halves();
    let mut fold = volume.begin_fold("one").unwrap();
    // Data over data and over a zero, a zero over data, what neither had, and the same again and again.
    for (step, (half, byte)) in
        [(8, 7), (16, 7), (9, 0), (100, 7), (12, 0), (8, 0), (8, 9), (60, 5)].into_iter().enumerate()
    {
        for _ in 0..=step {
            volume.fold_step(&mut fold).unwrap();
        }
        let range = Extent::new(half * MIB / 2, MIB / 2);
        while volume.claim.is_some() {
            volume.fold_step(&mut fold).unwrap();
        }
        if byte == 0 {
            volume.zero(range)
        } else {
            volume.write(range, byte)
        }
        expected[usize::try_from(half).unwrap()] = byte;
        assert_eq!(halves(&volume), expected, "step {step}");
    }
    while volume.fold_step(&mut fold).unwrap() {}
    assert_eq!(fold.state().error, None);
    let moved = fold.moved().0 + fold.moved().1;
    assert!(moved <= 6 * MIB, "{moved} bytes were moved");
    assert_eq!(volume.directory.state().chain.len(), 1);
    assert_eq!(halves(&volume), expected);
    volume.write(Extent::new(0, MIB / 2), 3);
    expected[0] = 3;
    drop(volume);
    assert_eq!(halves(&Volume::open(&path).unwrap()), expected);
}

/// Not a client's write alone changes what was copied already: an image of the head does, and what is left of a write that failed.
#[test]
fn what_has_changed_in_a_head_that_was_copied_is_copied_again() {
    for is_image in [false, true] {
        let place = temporary();
        let path = place.path().join("r");
        let mut volume = small_head(&path);
        let mut fold = volume.begin_fold("one").unwrap();
        while fold.moved().0 + fold.moved().1 < MIB + MIB / 2 {
            assert!(volume.fold_step(&mut fold).unwrap());
        }
        let changed = extent(4 * MIB / BLOCK, 1);
        if is_image {
            volume.put("", changed.offset / BLOCK, &[(BlockState::Data, 9)]);
        } else {
            let head = volume.store.head();
            assert!(volume.store.begin_write(head, changed));
            let file = disk::reopen(volume.store.layer_file(head)).unwrap();
            file.write_all_at(&[9; 4096], changed.offset).unwrap();
            file.sync_data().unwrap();
            volume.store.refresh(head, changed).unwrap();
        }
        while volume.fold_step(&mut fold).unwrap() {}
        assert_eq!(fold.state().error, None);
        let moved = fold.moved().0 + fold.moved().1;
        assert!(moved <= 2 * MIB, "{moved} bytes were moved: it went the other way");
        let mut expected = expected_halves();
        expected[8] = 9;
        assert_eq!(halves(&volume), expected, "by an image: {is_image}");
    }
}

/// The process dies after any step, and what was zeroed just before stays zero: below it lies a copy of what was there.
#[test]
fn zeroes_made_beside_the_fold_of_a_head_stay_zero() {
    // Where the snapshot holds something itself, and where a hole would do if nothing were copied there.
    for (offset, half) in [(4 * MIB, 8), (40 * MIB, 80)] {
        let mut made = 0;
        for steps in 1.. {
            let place = temporary();
            let path = place.path().join("r");
            let (mut volume, mut fold, goes_on) = folding(&path, steps);
            let mut expected = expected_halves();
            if goes_on && zeroed_beside_a_step(&mut volume, &mut fold, Extent::new(offset, MIB / 2)) {
                expected[half] = 0;
                made += 1;
            }
            drop(volume);
            assert_eq!(halves(&Volume::open(&path).unwrap()), expected, "after {steps} steps");
            if !goes_on {
                break;
            }
        }
        assert!(made > 0, "nothing was zeroed beside a copy");
    }
}

/// A head over a removed snapshot, two, that hides by a mark block 4 of what lies below it, and the head has data there.
fn over_a_mark(path: &std::path::Path) -> Volume {
    let mut volume = Volume::create(path);
    volume.write(extent(0, 32), 1);
    volume.snapshot(1, "one").unwrap();
    volume.zero(extent(4, 1));
    volume.write(extent(8, 8), 2);
    volume.snapshot(2, "two").unwrap();
    // So much that the snapshot goes into the head.
    volume.write(extent(4, 1), 3);
    volume.write(extent(16, 12), 3);
    volume.remove(3, "two").unwrap();
    volume
}

/// The snapshot that goes hides by a mark what lies below it, under data of the head. That is zeroed at some moment of the fold: now
/// the head has to hide it.
#[test]
fn what_the_snapshot_hid_does_not_come_back_where_the_head_is_zeroed_beside_the_fold() {
    for steps in 0.. {
        let place = temporary();
        let path = place.path().join("r");
        let mut volume = over_a_mark(&path);
        let mut fold = volume.begin_fold("two").unwrap();
        let mut left = steps;
        while left > 0 && volume.fold_step(&mut fold).unwrap() {
            left -= 1;
        }
        while volume.claim.is_some() && volume.fold_step(&mut fold).unwrap() {}
        volume.zero(extent(4, 1));
        while volume.fold_step(&mut fold).unwrap() {}
        let expected = [1, 1, 1, 1, 0, 1, 1, 1, 2];
        assert_eq!(volume.blocks()[..9], expected, "after {steps} steps");
        drop(volume);
        assert_eq!(Volume::open(&path).unwrap().blocks()[..9], expected, "after {steps} steps, opened anew");
        if left > 0 {
            break;
        }
    }
}

/// The same zeroes were planned before the fold had begun, when the snapshot's mark did for them, and are made later.
#[test]
fn a_hole_that_was_planned_before_the_fold_does_not_rely_on_the_snapshot_that_goes() {
    let zeroed = extent(4, 1);
    for steps in 0.. {
        let place = temporary();
        let path = place.path().join("r");
        let mut volume = over_a_mark(&path);
        let plan = volume.store.plan_zero(zeroed, false, &mut |_, _, _| Vec::new()).unwrap();
        assert_eq!((&plan.punch[..], &plan.marks[..]), (&[zeroed][..], &[][..]));
        let mut fold = volume.begin_fold("two").unwrap();
        let mut left = steps;
        // A claim waits for what had begun.
        while left > 0 && volume.claim.is_none_or(|claim| !claim.overlaps(zeroed)) {
            assert!(volume.fold_step(&mut fold).unwrap(), "no claim has waited for the zeroes");
            left -= 1;
        }
        volume.make_zero(&plan);
        while volume.fold_step(&mut fold).unwrap() {}
        let expected = [1, 1, 1, 1, 0, 1, 1, 1, 2];
        assert_eq!(volume.blocks()[..9], expected, "after {steps} steps");
        drop(volume);
        assert_eq!(Volume::open(&path).unwrap().blocks()[..9], expected, "after {steps} steps, opened anew");
        if left > 0 {
            break;
        }
    }
}

/// Clients try again what a full disk has refused, and each time the store looks at what is there. A fold gives space, so it must come to
/// its end.
#[test]
fn writes_that_fail_again_and_again_do_not_keep_a_fold_from_its_end() {
    let refused = extent(16_000, 1);
    for into_head in [false, true] {
        let place = temporary();
        let path = place.path().join("r");
        let mut volume = Volume::create_sized(&path, 64 * MIB);
        volume.write(Extent::new(32 * MIB, 8 * MIB), 1);
        (0..1000).for_each(|n| volume.write(extent(2 * n, 1), 1));
        volume.snapshot(1, "one").unwrap();
        if into_head {
            volume.write(Extent::new(36 * MIB, 16 * MIB), 2);
        } else {
            (0..600).for_each(|n| volume.write(extent(2 * n, 1), 2));
            volume.snapshot(2, "two").unwrap();
        }
        volume.remove(3, "one").unwrap();
        let expected = volume.blocks();
        let mut fold = volume.begin_fold("one").unwrap();
        let mut steps = 0;
        while volume.fold_step(&mut fold).unwrap() {
            steps += 1;
            assert!(steps < 10_000, "it begins anew each time, into the head: {into_head}");
            let head = volume.store.head();
            if steps % 3 == 0 && volume.claim.is_none_or(|claim| !claim.overlaps(refused)) {
                volume.store.refresh(head, refused).unwrap();
            }
        }
        assert_eq!(fold.state().error, None);
        assert_eq!(volume.blocks(), expected, "into the head: {into_head}");
        drop(volume);
        assert_eq!(Volume::open(&path).unwrap().blocks(), expected, "into the head: {into_head}");
    }
}

/// What the head said itself and says no more is the snapshot's, which goes: it is moved though the fold has passed there, also when the
/// head has become a snapshot meanwhile.
#[test]
fn what_the_head_lets_go_of_beside_a_fold_is_moved_into_it() {
    // Behind these the fold syncs what it has moved.
    for (steps, becomes) in (1..=6).flat_map(|steps| [(steps, false), (steps, true)]) {
        let place = temporary();
        let path = place.path().join("r");
        let mut volume = Volume::create(&path);
        volume.write(extent(0, 20), 1);
        volume.snapshot(1, "one").unwrap();
        volume.write(extent(8, 50), 2);
        volume.remove(2, "one").unwrap();
        let mut fold = volume.begin_fold("one").unwrap();
        assert!((0..steps).all(|_| volume.fold_step(&mut fold).unwrap()));
        while volume.claim.is_some() {
            assert!(volume.fold_step(&mut fold).unwrap());
        }
        volume.put("", 9, &[(BlockState::Absent, 0)]);
        if becomes {
            volume.snapshot(3, "two").unwrap();
        }
        while volume.fold_step(&mut fold).unwrap() {}
        assert_eq!(fold.state().error, None);
        assert_eq!(volume.blocks()[7..11], [1, 2, 1, 2], "after {steps} steps, a snapshot: {becomes}");
    }
}

/// The same where the fold has gone on to other windows of a fragmented snapshot since, and the head is one by the time that it ends.
#[test]
fn what_a_head_has_let_go_of_windows_ago_is_moved_into_the_snapshot_that_it_became() {
    let place = temporary();
    let mut volume = Volume::create_sized(&place.path().join("r"), 64 * MIB);
    // More extents than one look finds.
    (0..700).for_each(|n| volume.write(extent(2 * n, 1), 1));
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(4, 1), 2);
    volume.write(extent(4000, 800), 2);
    volume.remove(2, "one").unwrap();
    let mut fold = volume.begin_fold("one").unwrap();
    while fold.moved().0 + fold.moved().1 < 400 * BLOCK {
        assert!(volume.fold_step(&mut fold).unwrap());
    }
    while volume.claim.is_some() {
        assert!(volume.fold_step(&mut fold).unwrap());
    }
    volume.put("", 4, &[(BlockState::Absent, 0)]);
    volume.snapshot(3, "two").unwrap();
    while volume.fold_step(&mut fold).unwrap() {}
    assert_eq!(fold.state().error, None);
    assert_eq!(volume.directory.state().chain.len(), 2);
    assert_eq!(volume.blocks()[2..7], [1, 0, 1, 0, 1]);
}

/// A fold of the head that was broken off before its end has given the snapshot's file another name. It goes when the snapshot does: else
/// the space of its file would not be free.
#[test]
fn no_other_name_is_left_of_a_snapshot_that_is_folded_away() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = small_head(&path);
    let mut fold = volume.begin_fold("one").unwrap();
    let link = path.join("engine/fold-layer");
    while !link.exists() {
        assert!(volume.fold_step(&mut fold).unwrap(), "the head goes into the snapshot");
    }
    fold.stop("it was stopped");
    while volume.fold_step(&mut fold).unwrap() {}
    // So much that the snapshot goes into the head now.
    volume.write(Extent::new(0, 30 * MIB), 5);
    let fold = volume.fold("one").unwrap();
    assert_eq!(fold.state().error, None);
    assert_eq!(volume.directory.state().chain.len(), 1);
    assert!(!link.exists(), "the space of the snapshot's file is taken still");
}

/// The same if the layers are replaced instead.
#[test]
fn no_other_name_is_left_of_a_snapshot_that_is_replaced() {
    for keeps in [false, true] {
        let place = temporary();
        let path = place.path().join("r");
        let mut volume = small_head(&path);
        let mut fold = volume.begin_fold("one").unwrap();
        let link = path.join("engine/fold-layer");
        while !link.exists() {
            assert!(volume.fold_step(&mut fold).unwrap(), "the head goes into the snapshot");
        }
        fold.stop("it was stopped");
        while volume.fold_step(&mut fold).unwrap() {}
        let head = [LayerInfo::default()];
        let begun = match keeps {
            true => volume.directory.begin_catch_up(64 * MIB, &head, &Keep::default()),
            false => volume.directory.begin_rebuild(64 * MIB, &head),
        };
        volume.store.replace(begun.unwrap());
        assert!(!link.exists(), "the space of the snapshot's file is taken still");
    }
}

/// The same if another program has taken the snapshot away meanwhile, and the directory is taken over anew.
#[test]
fn no_other_name_is_left_of_a_snapshot_that_another_program_has_taken_away() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 4), 1);
    let path = volume.close();
    std::fs::hard_link(path.join("volume-head-000.img"), path.join("engine/fold-layer")).unwrap();
    // As Longhorn does whenever it opens a directory.
    let meta = std::fs::read(path.join("volume.meta")).unwrap();
    std::fs::remove_file(path.join("volume.meta")).unwrap();
    std::fs::write(path.join("volume.meta"), meta).unwrap();
    let volume = Volume::open(&path).unwrap();
    assert!(volume.directory.state().imported);
    assert!(!path.join("engine/fold-layer").exists(), "the space of the file is taken still");
}

/// Plans zeroes before the next step, which may begin a copy of them, and makes them when it may have ended. `false`: it was no
/// piece of work.
fn zeroed_beside_a_step(volume: &mut Volume, fold: &mut super::super::Fold, zeroed: Extent) -> bool {
    let plan = volume
        .claim
        .is_none()
        .then(|| volume.store.plan_zero(zeroed, false, &mut |_, _, _| Vec::new()).unwrap());
    let step = fold.next(&mut volume.store).unwrap();
    let (super::super::FoldStep::Work(work), Some(plan)) = (step, plan) else { return false };
    fold.worked(&mut volume.store, work.run()).unwrap();
    volume.make_zero(&plan);
    true
}

#[test]
fn a_head_that_becomes_a_snapshot_is_folded_as_one() {
    for stop in 1.. {
        let place = temporary();
        let path = place.path().join("r");
        let (mut volume, mut fold, mut goes_on) = folding(&path, stop);
        while goes_on && volume.claim.is_some() {
            goes_on = volume.fold_step(&mut fold).unwrap();
        }
        if !goes_on {
            assert!(stop > 8);
            break;
        }
        volume.snapshot(3, "two").unwrap();
        volume.write(Extent::new(4 * MIB, MIB / 2), 9);
        while volume.fold_step(&mut fold).unwrap() {}
        assert_eq!(fold.state().error, None, "after {stop} steps");
        let mut expected = expected_halves();
        let two = SnapshotView::open_beside(&path, "two").unwrap();
        let mut byte = [0];
        two.read_at(4 * MIB, &mut byte).unwrap();
        assert_eq!(byte, [2], "after {stop} steps");
        expected[8] = 9;
        assert_eq!(halves(&volume), expected, "after {stop} steps");
        assert_eq!(volume.directory.state().chain.len(), 2, "after {stop} steps");
        drop(volume);
        assert_eq!(halves(&Volume::open(&path).unwrap()), expected, "after {stop} steps");
    }
}

/// Who writes faster than is copied makes the fold go into the head, which ends whatever is written.
#[test]
fn a_head_that_is_never_copied_gets_the_snapshot_instead() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = small_head(&path);
    let mut fold = volume.begin_fold("one").unwrap();
    let mut byte = 10;
    while volume.fold_step(&mut fold).unwrap() {
        byte = byte % 200 + 10;
        if volume.claim.is_none() {
            volume.write(Extent::new(4 * MIB, 2 * MIB), byte);
        }
    }
    assert_eq!(fold.state().error, None);
    assert_eq!(volume.directory.state().chain.len(), 1);
    let mut expected = expected_halves();
    expected[8..12].fill(volume.read(Extent::new(4 * MIB, 1))[0]);
    assert!(expected[8] >= 10);
    assert_eq!(halves(&volume), expected);
    drop(volume);
    assert_eq!(halves(&Volume::open(&path).unwrap()), expected);
}

/// What is put into one of a fold's layers is in the one that stays, whichever way it goes, wherever it is, and whether the head is
/// one of the two.
#[test]
fn layer_images_are_in_the_layer_that_stays() {
    for (blocks, child, head) in [(48, "two", false), (4, "two", false), (48, "", true), (3, "", true)] {
        for steps in 0.. {
            let place = temporary();
            let path = place.path().join("r");
            let mut volume = Volume::create(&path);
            volume.write(extent(0, 20), 1);
            volume.snapshot(1, "one").unwrap();
            volume.write(extent(8, blocks), 2);
            volume.zero(extent(2, 1));
            if !head {
                volume.snapshot(2, "two").unwrap();
            }
            volume.remove(3, "one").unwrap();
            let mut expected = volume.blocks();
            let mut fold = volume.begin_fold("one").unwrap();
            let mut goes_on = (0..steps).all(|_| volume.fold_step(&mut fold).unwrap());
            while goes_on && volume.claim.is_some() {
                goes_on = volume.fold_step(&mut fold).unwrap();
            }
            if !goes_on {
                assert!(steps > 5);
                break;
            }
            let case = format!("{blocks} blocks in {child:?}, after {steps} steps");
            let image = [(BlockState::Data, 5), (BlockState::Zero, 0), (BlockState::Data, 6)];
            volume.put_beside(&mut fold, child, 4, &image);
            expected[4..7].copy_from_slice(&[5, 0, 6]);
            if volume.store.layer("one").is_some() {
                // Below what the child has, and where it has nothing.
                volume.put_beside(&mut fold, "one", 7, &[(BlockState::Data, 7), (BlockState::Data, 8)]);
                // Into the child it may have been copied before the image came.
                expected[7] = volume.blocks()[7];
                assert!(expected[7] == 7 || (expected[7] == 1 && blocks == 48), "{case}");
            }
            assert_eq!(volume.blocks(), expected, "{case}");
            while volume.fold_step(&mut fold).unwrap() {}
            assert_eq!(fold.state().error, None, "{case}");
            assert_eq!(volume.blocks(), expected, "{case}");
            assert!(volume.store.layer("one").is_none(), "{case}");
            drop(volume);
            assert_eq!(Volume::open(&path).unwrap().blocks(), expected, "{case}");
        }
    }
}

/// Where a fold has noted that it was counts only as long as nobody has written its layers.
#[test]
fn a_fold_that_gave_way_begins_at_the_start() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 20), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(8, 4), 2);
    volume.snapshot(2, "two").unwrap();
    volume.remove(3, "one").unwrap();
    let plan = volume.directory.begin_fold("one").unwrap();
    volume.directory.choose_fold(&plan, super::super::Direction::IntoParent).unwrap();
    volume.directory.save_fold(&plan, super::super::Direction::IntoParent, 10 * BLOCK).unwrap();
    drop(volume);
    let mut volume = Volume::open(&path).unwrap();
    let mut fold = volume.begin_fold("one").unwrap();
    assert_eq!(fold.plan().resume, Some(10 * BLOCK));
    fold.give_way();
    while !fold.stands_aside() {
        volume.fold_step(&mut fold).unwrap();
    }
    drop(volume);
    assert!(!path.join("engine/fold").exists());
    let mut volume = Volume::open(&path).unwrap();
    volume.put("two", 3, &[(BlockState::Data, 5)]);
    assert_eq!(volume.begin_fold("one").unwrap().plan().resume, None);
    volume.fold("one").unwrap();
    assert_eq!(volume.blocks()[2..12], [1, 5, 1, 1, 1, 1, 2, 2, 2, 2]);
}

/// Nor is it believed when another snapshot was folded meanwhile, beside which an image may come that nobody holds back for it.
#[test]
fn what_a_fold_has_noted_counts_no_more_when_another_begins() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 20), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(8, 4), 2);
    volume.snapshot(2, "two").unwrap();
    volume.write(extent(9, 1), 3);
    volume.snapshot(3, "three").unwrap();
    volume.remove(4, "one").unwrap();
    volume.remove(5, "three").unwrap();
    let plan = volume.directory.begin_fold("one").unwrap();
    volume.directory.choose_fold(&plan, super::super::Direction::IntoParent).unwrap();
    volume.directory.save_fold(&plan, super::super::Direction::IntoParent, 10 * BLOCK).unwrap();
    let mut fold = volume.begin_fold("three").unwrap();
    volume.put_beside(&mut fold, "two", 3, &[(BlockState::Data, 5)]);
    fold.stop("it was stopped");
    while volume.fold_step(&mut fold).unwrap() {}
    let fold = volume.fold("one").unwrap();
    assert_eq!(fold.plan().resume, None);
    assert_eq!(volume.blocks()[2..12], [1, 5, 1, 1, 1, 1, 2, 3, 2, 2]);
}
