//! What is read of a damaged directory by whoever has no better copy: everything that is sure, and what is not is told.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use lh_block::{BLOCK, Extent, Instance};
use lh_wire::ChainOp;

use super::super::error::{Damage, OpenError};
use super::super::known::Known;
use super::super::offline::SnapshotView;
use super::super::record::{Creating, Identity, Rebuild, Record};
use super::super::rescue::{Doubt, DoubtKind};
use super::volume::{Volume, create_options, extent, temporary};

/// Blocks that a page of a zero map tells of, and two pages of them.
const PAGE_BLOCKS: u64 = 2032;
const BLOCKS: u64 = 2 * PAGE_BLOCKS;
const ALL: Extent = Extent::new(0, BLOCKS * BLOCK);
const HEAD: &str = "volume-head-001.img";

/// Blocks 0 to 7 hold 1 in snapshot one, and 2 in the head from 4 on; 1 and one of the second page are zeroed there. Closed cleanly.
fn filled(place: &Path) -> PathBuf {
    let path = place.join("r");
    let mut volume = Volume::create_sized(&path, BLOCKS * BLOCK);
    volume.write(extent(0, 8), 1);
    volume.write(extent(PAGE_BLOCKS, 2), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(4, 4), 2);
    volume.zero(extent(1, 1));
    volume.zero(extent(PAGE_BLOCKS, 1));
    volume.flush();
    volume.close();
    path
}

/// Block by block, the first ones and the first of the second page.
fn read(view: &SnapshotView) -> [Vec<u8>; 2] {
    [extent(0, 9), extent(PAGE_BLOCKS, 3)].map(|range| {
        let mut bytes = vec![0; usize::try_from(range.len).unwrap()];
        view.read_at(range.offset, &mut bytes).unwrap();
        bytes.iter().copied().step_by(usize::try_from(BLOCK).unwrap()).collect()
    })
}

const WHOLE: [&[u8]; 2] = [&[1, 0, 1, 1, 2, 2, 2, 2, 0], &[0, 1, 0]];

/// That it is refused, and what is read all the same.
fn rescued(path: &Path) -> ([Vec<u8>; 2], Vec<Doubt>) {
    assert!(matches!(SnapshotView::open(path, None), Err(OpenError::Damaged { .. })));
    let view = SnapshotView::rescue(path, None).unwrap();
    let bytes = read(&view);
    (bytes, view.doubts().unwrap())
}

/// The zero map of the head, which has marks.
fn zero_map(path: &Path) -> PathBuf {
    let maps = fs::read_dir(path.join("engine")).unwrap().map(|entry| entry.unwrap());
    let map = maps.filter(|map| map.file_name().to_str().unwrap().starts_with("zero-"));
    map.max_by_key(|map| map.metadata().unwrap().len()).unwrap().path()
}

fn flip(file: &Path, at: u64) {
    let file = fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

fn edit(file: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(file).unwrap();
    assert!(text.contains(from));
    // In place: volume.meta keeps its attribute.
    fs::write(file, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn nothing_is_in_doubt_of_a_directory_that_is_sound() {
    let place = temporary();
    let path = filled(place.path());
    let view = SnapshotView::rescue(&path, None).unwrap();
    assert_eq!((read(&view), view.doubts()), (WHOLE.map(Vec::from), Some(Vec::new())));
    assert_eq!(SnapshotView::open(&path, None).unwrap().doubts(), None);
}

#[test]
fn a_damaged_page_of_a_zero_map_leaves_its_own_blocks_in_doubt() {
    let place = temporary();
    let path = filled(place.path());
    let map = zero_map(&path);
    // The second page of marks.
    flip(&map, 2 * 512 + 300);
    let (bytes, doubts) = rescued(&path);
    assert_eq!(bytes, [WHOLE[0].to_vec(), vec![1, 1, 0]]);
    let name = format!("engine/{}", map.file_name().unwrap().to_str().unwrap());
    let range = extent(PAGE_BLOCKS, PAGE_BLOCKS);
    assert_eq!(doubts, [Doubt { range, why: DoubtKind::Zeroes(name.clone()) }]);

    // A bit of the header as well: its marks are those of the file, by their own checksums.
    flip(&map, 3);
    let (bytes, doubts) = rescued(&path);
    assert_eq!(bytes, [WHOLE[0].to_vec(), vec![1, 1, 0]]);
    assert_eq!(doubts[0], Doubt { range: ALL, why: DoubtKind::Zeroes(name) });

    fs::remove_file(&map).unwrap();
    let (bytes, doubts) = rescued(&path);
    assert_eq!(bytes, [vec![1, 1, 1, 1, 2, 2, 2, 2, 0], vec![1, 1, 0]]);
    assert_eq!(doubts, [Doubt { range: ALL, why: DoubtKind::Zeroes(format!("the zero map of {HEAD}")) }]);
    let text = doubts[0].why.to_string();
    assert!(text.contains(HEAD) && text.contains("what was there before"), "{text}");
}

#[test]
fn of_a_layer_that_was_cut_off_the_rest_is_read() {
    for cut in [6 * BLOCK, 6 * BLOCK - 512] {
        let place = temporary();
        let path = filled(place.path());
        let head = fs::OpenOptions::new().write(true).open(path.join(HEAD)).unwrap();
        head.set_len(cut).unwrap();
        let (bytes, doubts) = rescued(&path);
        // What was written there is gone, half of block 5 with it.
        assert_eq!(bytes[0][..8], [1, 0, 1, 1, 2, 2, 1, 1], "{cut}");
        let why = DoubtKind::CutOff(HEAD.into());
        let range = Extent::new(cut, ALL.end() - cut);
        assert!(doubts.contains(&Doubt { range, why }), "{cut}: {doubts:?}");
    }
}

#[test]
fn of_a_layer_below_that_was_cut_off_or_replaced_the_rest_is_read() {
    let place = temporary();
    let path = filled(place.path());
    let one = path.join("volume-snap-one.img");
    fs::OpenOptions::new().write(true).open(&one).unwrap().set_len(3 * BLOCK).unwrap();
    let (bytes, doubts) = rescued(&path);
    assert_eq!(bytes[0], [1, 0, 1, 0, 2, 2, 2, 2, 0]);
    let why = DoubtKind::CutOff("volume-snap-one.img".into());
    assert_eq!(doubts, [Doubt { range: Extent::new(3 * BLOCK, ALL.end() - 3 * BLOCK), why }]);

    // Another file of that name, without the attribute.
    fs::remove_file(&one).unwrap();
    fs::File::create(&one).unwrap().set_len(ALL.len).unwrap();
    let (bytes, doubts) = rescued(&path);
    assert_eq!(bytes[0], [0, 0, 0, 0, 2, 2, 2, 2, 0]);
    assert_eq!(doubts, [Doubt { range: ALL, why: DoubtKind::Replaced("volume-snap-one.img".into()) }]);
}

/// A directory that is being filled says so, and so does one that Longhorn was filling.
#[test]
fn of_half_a_rebuild_what_is_there_is_read() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create_sized(&path, BLOCKS * BLOCK);
    let chain = volume.directory.state().chain;
    let parts = volume.directory.begin_rebuild(BLOCKS * BLOCK, &chain).unwrap();
    volume.store = super::super::Store::new(parts);
    volume.write(extent(0, 2), 7);
    drop(volume);
    let (bytes, doubts) = rescued(&path);
    assert_eq!(bytes[0][..3], [7, 7, 0]);
    assert_eq!(doubts, [Doubt { range: ALL, why: DoubtKind::Rebuilding }]);

    let place = temporary();
    let path = filled(place.path());
    fs::remove_dir_all(path.join("engine")).unwrap();
    assert!(fs::read_to_string(path.join("volume.meta")).unwrap().contains("\"Rebuilding\":true"));
    let (bytes, doubts) = rescued(&path);
    assert_eq!(bytes[0], [1, 1, 1, 1, 2, 2, 2, 2, 0], "without marks");
    assert_eq!(doubts, [Doubt { range: ALL, why: DoubtKind::Rebuilding }]);
}

#[test]
fn an_error_that_longhorn_has_noted_is_told() {
    let place = temporary();
    let path = filled(place.path());
    edit(&path.join("volume.meta"), "\"Error\":\"\"", "\"Error\":\"lost\"");
    let (bytes, doubts) = rescued(&path);
    assert_eq!(bytes, WHOLE.map(Vec::from));
    assert_eq!(doubts, [Doubt { range: ALL, why: DoubtKind::Noted("lost".into()) }]);
}

#[test]
fn without_volume_meta_the_head_says_what_it_can() {
    let place = temporary();
    let path = filled(place.path());
    fs::remove_file(path.join("volume.meta")).unwrap();
    let (bytes, doubts) = rescued(&path);
    assert_eq!(bytes, WHOLE.map(Vec::from));
    assert_eq!(doubts, [Doubt { range: ALL, why: DoubtKind::VolumeMissing }]);
}

#[test]
fn damaged_records_are_not_heeded() {
    for name in [Identity::NAME, Known::NAME, Rebuild::NAME, Creating::NAME] {
        let place = temporary();
        let path = filled(place.path());
        fs::write(path.join("engine").join(name), "rotten").unwrap();
        let (bytes, doubts) = rescued(&path);
        assert_eq!(bytes, WHOLE.map(Vec::from), "{name}");
        assert_eq!(doubts, [Doubt { range: ALL, why: DoubtKind::Record(name.into()) }]);
    }
}

/// A file that gives an error on reading: here one that has become shorter than it was when it was opened.
#[test]
fn zeroes_stand_for_what_the_disk_does_not_give() {
    let place = temporary();
    let path = filled(place.path());
    let strict = SnapshotView::open(&path, None).unwrap();
    let view = SnapshotView::rescue(&path, None).unwrap();
    let head = fs::OpenOptions::new().write(true).open(path.join(HEAD)).unwrap();
    head.set_len(6 * BLOCK).unwrap();
    let out = tempfile::tempfile_in(place.path()).unwrap();
    assert!(strict.export(&out, &mut |_, _| ()).is_err(), "no bytes, no file");
    view.export(&out, &mut |_, _| ()).unwrap();
    let mut bytes = vec![9; 9 << 12];
    out.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes.iter().copied().step_by(1 << 12).collect::<Vec<_>>(), [1, 0, 1, 1, 2, 2, 0, 0, 0]);
    let doubts = view.doubts().unwrap();
    let [Doubt { range, why: DoubtKind::Unreadable { layer: Some(layer), error } }] = &doubts[..] else {
        panic!("{doubts:?}");
    };
    assert_eq!((*range, layer.as_str()), (extent(6, 2), ""));
    assert!(
        error.contains("cut off") && doubts[0].why.to_string().starts_with("the head cannot be read there")
    );
    // As a qcow2 image, too.
    let out = tempfile::tempfile_in(place.path()).unwrap();
    SnapshotView::rescue(&path, Some("one")).unwrap().export_qcow2(&out, &mut |_, _| ()).unwrap();
    assert!(view.export_qcow2(&tempfile::tempfile_in(place.path()).unwrap(), &mut |_, _| ()).is_ok());
}

/// Nothing says which layer lies over which.
#[test]
fn without_a_layers_meta_nothing_is_read() {
    let place = temporary();
    let path = filled(place.path());
    fs::remove_file(path.join("volume-snap-one.img.meta")).unwrap();
    let refused = SnapshotView::rescue(&path, None).map(drop).unwrap_err();
    assert!(matches!(refused, OpenError::Damaged { damage: Damage::MetaMissing(_), .. }), "{refused}");
    // Nor of what was never a replica.
    let place = temporary();
    assert!(SnapshotView::rescue(place.path(), None).is_err());
    assert!(super::super::Directory::create(&place.path().join("x"), &create_options(BLOCK)).is_ok());
}

/// What is wrong with a branch that is not read is nobody's doubt.
#[test]
fn a_branch_that_is_not_read_leaves_nothing_in_doubt() {
    let place = temporary();
    let path = place.path().join("r");
    let mut volume = Volume::create_sized(&path, BLOCKS * BLOCK);
    volume.write(extent(0, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(0, 8), 2);
    volume.snapshot(2, "two").unwrap();
    let back = ChainOp::Revert { name: "one".into(), created: "2026-11-20T06:03:39Z".into() };
    volume.directory.prepare(Instance(3), &back).unwrap();
    volume.commit(3).unwrap();
    volume.close();
    let two = path.join("volume-snap-two.img");
    fs::OpenOptions::new().write(true).open(&two).unwrap().set_len(BLOCK).unwrap();
    let view = SnapshotView::rescue(&path, None).unwrap();
    assert_eq!((&read(&view)[0][..2], view.doubts()), (&[1, 1][..], Some(Vec::new())));
    let view = SnapshotView::rescue(&path, Some("two")).unwrap();
    assert_eq!(read(&view)[0][..2], [2, 1]);
    assert_eq!(view.doubts().unwrap().len(), 1);
}
