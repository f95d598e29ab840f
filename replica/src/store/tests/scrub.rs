//! Checksums of layers: what was hashed is found clean, and each kind of rot is found where it is.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use lh_block::BLOCK;

use super::super::checksum::{Crc64, Recorded, Sums, Version, file_name};
use super::super::disk;
use super::super::fs::Fs;
use super::super::pace::Pace;
use super::super::scrub::walk::tests_fault::BAD;
use super::super::scrub::{Rot, RotKind, ScrubError, ScrubReport, SnapshotLayer, Stored};
use super::tape::Tape;
use super::volume::{SIZE, Volume, extent};

/// Blocks 2 to 9 and 20 of snapshot one hold data; of two, block 3 holds data, and 5 and 7 are zero by its map: over a
/// hole, and over data that is still in the file.
fn sample(path: &Path) -> Volume {
    let mut volume = Volume::create(path);
    volume.write(extent(2, 8), 1);
    volume.write(extent(20, 1), 2);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(3, 1), 3);
    volume.zero(extent(5, 1));
    volume.write(extent(7, 1), 6);
    volume.zero(extent(7, 1));
    volume.snapshot(2, "two").unwrap();
    volume.write(extent(0, 1), 4);
    volume.flush();
    volume
}

pub(super) fn layer(path: &Path, snapshot: &str) -> SnapshotLayer {
    SnapshotLayer::open(path, snapshot).unwrap()
}

pub(super) fn scrub(path: &Path, snapshot: &str) -> ScrubReport {
    layer(path, snapshot).scrub(&Pace::new(0), &mut |_| {}).unwrap()
}

pub(super) fn hash(path: &Path, snapshot: &str) -> super::super::scrub::Hashed {
    layer(path, snapshot).hash(&Pace::new(0), &mut |_| {}).unwrap()
}

/// Changes a snapshot's file, and makes its checksums forget that somebody did.
pub(super) fn rot(path: &Path, snapshot: &str, change: impl Fn(&fs::File)) {
    let before = layer(path, snapshot);
    let file =
        fs::OpenOptions::new().write(true).open(path.join(format!("volume-snap-{snapshot}.img"))).unwrap();
    change(&file);
    file.sync_all().unwrap();
    let now = Version::of(&file).unwrap();
    assert_ne!(now, before.version_for_tests(), "nothing was changed");
    let sums = Sums::open(&path.join("engine"), before.id_for_tests().unwrap()).unwrap();
    sums.unwrap().rebind(now).unwrap();
    let record = path.join(file_name(snapshot));
    let recorded = Recorded::parse(&fs::read(&record).unwrap()).unwrap();
    let sum = recorded.of(before.version_for_tests().ctime).unwrap();
    fs::write(record, Recorded::new(sum, now.ctime, "2026-11-20T06:04:40Z".into()).encode()).unwrap();
}

fn rotten(at: u64, blocks: u64, kind: RotKind) -> Rot {
    Rot { extent: extent(at, blocks), kind }
}

#[test]
fn what_was_hashed_is_clean_beside_the_process_that_serves() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    // Open all the while.
    let volume = sample(&path);
    let report = scrub(&path, "one");
    assert_eq!((report.stored, report.checksum_fits, report.blocks), (Stored::Missing, None, 9));
    for (name, blocks) in [("one", 9), ("two", 1)] {
        let hashed = hash(&path, name);
        let mut crc = Crc64::new();
        crc.update(&fs::read(path.join(format!("volume-snap-{name}.img"))).unwrap());
        assert_eq!(hashed.checksum, crc.finish(), "{name}");
        assert_eq!((hashed.blocks, hashed.silently_corrupted), (Some(blocks), false), "{name}");
        let recorded = layer(&path, name).recorded_checksum().unwrap().unwrap();
        assert_eq!((recorded.checksum, recorded.silently_corrupted), (hashed.checksum, false));
        let report = scrub(&path, name);
        assert!(report.is_clean(), "{report:?}");
        assert_eq!((report.stored, report.checksum_fits, report.blocks), (Stored::Valid, Some(true), blocks));
    }
    drop(volume);
    // Neither Longhorn's readers nor ours mind the new files.
    Volume::open(&path).unwrap().close();
    assert!(scrub(&path, "one").is_clean());
}

#[test]
fn rot_is_found_where_it_is() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    drop(sample(&path));
    hash(&path, "one");
    type Case<'a> = (&'a dyn Fn(&fs::File), &'a [Rot]);
    let cases: [Case<'_>; 4] = [
        (&|file| file.write_all_at(&[7], 4 * BLOCK + 100).unwrap(), &[rotten(4, 1, RotKind::Changed)]),
        (
            &|file| disk::punch(file, extent(8, 2)).unwrap(),
            &[rotten(4, 1, RotKind::Changed), rotten(8, 2, RotKind::Lost)],
        ),
        (
            &|file| file.write_all_at(&[0; 2 * 4096], 30 * BLOCK).unwrap(),
            &[rotten(4, 1, RotKind::Changed), rotten(8, 2, RotKind::Lost), rotten(30, 2, RotKind::Appeared)],
        ),
        (
            &|file| disk::punch(file, extent(20, 1)).unwrap(),
            &[
                rotten(4, 1, RotKind::Changed),
                rotten(8, 2, RotKind::Lost),
                rotten(20, 1, RotKind::Lost),
                rotten(30, 2, RotKind::Appeared),
            ],
        ),
    ];
    for (change, expected) in cases {
        rot(&path, "one", change);
        let report = scrub(&path, "one");
        assert_eq!(report.rotten, expected);
        assert_eq!(report.rotten_blocks, expected.iter().map(|rot| rot.extent.len / BLOCK).sum::<u64>());
        assert_eq!((report.stored, report.checksum_fits), (Stored::Valid, Some(false)));
    }
    // Hashing does not make rot the truth.
    let sums = fs::read(sums_of(&path, "one")).unwrap();
    assert!(hash(&path, "one").silently_corrupted);
    assert_eq!(fs::read(sums_of(&path, "one")).unwrap(), sums);
    let record = fs::read_to_string(path.join(file_name("one"))).unwrap();
    assert!(record.contains("\"silently_corrupted\":true"), "{record}");
    assert!(layer(&path, "one").recorded_checksum().unwrap().unwrap().silently_corrupted);
    assert_eq!(scrub(&path, "one").rotten.len(), 4);
}

fn sums_of(path: &Path, snapshot: &str) -> std::path::PathBuf {
    path.join(format!("engine/sums-{}", layer(path, snapshot).id_for_tests().unwrap()))
}

/// Without Longhorn's file the blocks' own checksums notice.
#[test]
fn hashing_again_compares_with_the_blocks() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    drop(sample(&path));
    hash(&path, "one");
    rot(&path, "one", |file| file.write_all_at(&[7], 4 * BLOCK).unwrap());
    fs::remove_file(path.join(file_name("one"))).unwrap();
    assert!(hash(&path, "one").silently_corrupted);
    assert_eq!(scrub(&path, "one").rotten, [rotten(4, 1, RotKind::Changed)]);
}

#[test]
fn a_bad_sector_costs_one_block() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    drop(sample(&path));
    hash(&path, "one");
    BAD.set(Some(6 * BLOCK + 512));
    let report = scrub(&path, "one");
    let hashed = layer(&path, "one").hash(&Pace::new(0), &mut |_| {});
    BAD.set(None);
    assert_eq!(report.rotten, [rotten(6, 1, RotKind::Unreadable)]);
    assert_eq!((report.blocks, report.checksum_fits), (8, None));
    assert!(matches!(hashed, Err(ScrubError::Unreadable { offset, .. }) if offset == 6 * BLOCK));
    assert!(scrub(&path, "one").is_clean());
}

/// A fold, or an administrator: the ctime moves, and the checksums say nothing any more.
#[test]
fn a_change_on_purpose_is_no_rot() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    drop(sample(&path));
    hash(&path, "one");
    let file = fs::OpenOptions::new().write(true).open(path.join("volume-snap-one.img")).unwrap();
    file.write_all_at(&[9; 4096], 2 * BLOCK).unwrap();
    let report = scrub(&path, "one");
    assert_eq!((report.stored, report.checksum_fits, report.rotten.len()), (Stored::Missing, None, 0));
    assert_eq!(layer(&path, "one").recorded_checksum().unwrap(), None);
    assert!(!hash(&path, "one").silently_corrupted);
    assert_eq!(scrub(&path, "one").stored, Stored::Valid);
    // While it is being read, too.
    let open = layer(&path, "one");
    file.write_all_at(&[8; 4096], 2 * BLOCK).unwrap();
    assert!(matches!(open.scrub(&Pace::new(0), &mut |_| {}), Err(ScrubError::Changed(_))));
    assert!(matches!(open.hash(&Pace::new(0), &mut |_| {}), Err(ScrubError::Changed(_))));
}

/// What the zero map covers is punched out later: that is no loss.
#[test]
fn zeroed_data_does_not_count() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    let mut volume = sample(&path);
    hash(&path, "two");
    assert!(volume.punch(), "something waits to be punched");
    while volume.punch() {}
    volume.flush();
    assert_eq!(scrub(&path, "two").stored, Stored::Missing, "the file is another one now");
    assert_eq!(hash(&path, "two").blocks, Some(1));
    assert!(scrub(&path, "two").is_clean());
}

/// A fold moves data into the next layer; the checksums of what is gone go with the next hash.
#[test]
fn a_fold_is_no_rot() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    let mut volume = sample(&path);
    hash(&path, "one");
    hash(&path, "two");
    volume.remove(3, "one").unwrap();
    volume.fold("one").unwrap();
    let report = scrub(&path, "two");
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(
        hash(&path, "two").blocks,
        Some(7),
        "the 9 blocks of one without the two that are zero in two"
    );
    assert_eq!(scrub(&path, "two").stored, Stored::Valid);
    let names = fs::read_dir(path.join("engine")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.filter(|name| name.to_str().unwrap().starts_with("sums-")).count(), 1);
}

/// Whoever takes a snapshot's checksums may come to the end of it while the snapshot is folded away.
#[test]
fn checksums_of_what_is_folded_away_leave_no_file() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    let mut volume = sample(&path);
    let layer = layer(&path, "one");
    let recorded = Recorded::new(1, layer.version_for_tests().ctime, "2026-11-20T06:04:40Z".into());
    volume.remove(3, "one").unwrap();
    volume.fold("one").unwrap();
    layer.write_record(&Fs::default(), &recorded).unwrap();
    assert!(!path.join(file_name("one")).exists());
}

/// At no step of a fold is the image still there and the checksum gone for good: who writes one then is not told that
/// there is nothing to write it for.
#[test]
fn a_fold_takes_the_checksum_after_the_image() {
    for steps in 0.. {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("replica");
        drop(sample(&path));
        hash(&path, "one");
        Volume::open(&path).unwrap().remove(3, "one").unwrap();
        let tape = Arc::new(Tape::default());
        tape.stop_after(steps);
        let folded = Volume::open_taped(&path, &tape).is_ok_and(|mut volume| volume.fold("one").is_ok());
        let is_there = |name: &str| path.join(name).exists();
        let left = (is_there("volume-snap-one.img"), is_there(&file_name("one")));
        assert_ne!(left, (true, false), "stopped after {steps} operations");
        if folded {
            return assert_eq!(left, (false, false));
        }
    }
}

#[test]
fn damaged_checksums_are_not_believed() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    drop(sample(&path));
    hash(&path, "one");
    let sums = sums_of(&path, "one");
    let mut bytes = fs::read(&sums).unwrap();
    bytes[4096 + 130] ^= 1;
    fs::write(&sums, bytes).unwrap();
    let report = scrub(&path, "one");
    assert_eq!((report.stored, report.rotten.len(), report.checksum_fits), (Stored::Damaged, 0, Some(true)));
}

#[test]
fn a_stopped_task_leaves_everything_as_it_was() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    drop(sample(&path));
    hash(&path, "one");
    let before = fs::read(path.join(file_name("one"))).unwrap();
    let pace = Pace::new(0);
    let layer = layer(&path, "one");
    let mut seen = 0;
    // From the first report on: the second extent is not read.
    let stopped = layer.hash(&pace, &mut |done| {
        seen = done;
        pace.stop();
    });
    assert!(matches!(stopped, Err(ScrubError::Stopped)), "{stopped:?}");
    assert_eq!(seen, 8 * BLOCK);
    assert!(matches!(layer.scrub(&pace, &mut |_| {}), Err(ScrubError::Stopped)));
    assert_eq!(fs::read(path.join(file_name("one"))).unwrap(), before);
    assert!(scrub(&path, "one").is_clean());
}

#[test]
fn a_directory_of_longhorns_gets_longhorns_checksum() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    sample(&path).close();
    let ours = hash(&path, "one");
    for name in ["engine", "x"] {
        let _ = fs::remove_dir_all(path.join(name));
    }
    fs::remove_file(path.join(file_name("one"))).unwrap();
    let meta = fs::read_to_string(path.join("volume.meta")).unwrap();
    fs::write(path.join("volume.meta"), meta.replace("\"Rebuilding\":true", "\"Rebuilding\":false")).unwrap();
    let theirs = hash(&path, "one");
    assert_eq!((theirs.checksum, theirs.blocks), (ours.checksum, None));
    let report = scrub(&path, "one");
    assert_eq!((report.stored, report.checksum_fits), (Stored::Missing, Some(true)));
    let mut names: Vec<_> =
        fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.ends_with(".img") && !name.ends_with(".meta"));
    assert_eq!(names, [file_name("one")]);
}

#[test]
fn the_head_has_no_checksums() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    drop(sample(&path));
    SnapshotLayer::open(&path, "").map(drop).unwrap_err();
    let err = SnapshotLayer::open(&path, "three").map(drop).unwrap_err();
    assert!(err.to_string().contains("one, two"), "{err}");
    assert_eq!(layer(&path, "two").length(), SIZE);
}
