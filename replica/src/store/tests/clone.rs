//! Clones of snapshots, by sharing and by copying.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use lh_block::BLOCK;

use super::super::clone::{CloneError, CloneOptions, clone_snapshot};
use super::super::error::ChainError;
use super::super::offline::SnapshotView;
use super::super::pace::Pace;
use super::volume::{SIZE, Volume, extent, temporary};

fn source(path: &Path) {
    let mut volume = Volume::create(path);
    volume.write(extent(2, 8), 1);
    volume.write(extent(20, 1), 2);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(9, 3), 3);
    volume.zero(extent(5, 2));
    volume.write(extent(40, 4), 0);
    volume.snapshot(2, "two").unwrap();
    volume.write(extent(0, 64), 9);
    volume.close();
}

fn options() -> CloneOptions {
    CloneOptions { snapshot: "base".into(), labels: [("of".to_owned(), "two".to_owned())].into() }
}

fn clone(from: &Path, snapshot: Option<&str>, to: &Path) -> super::super::clone::Cloned {
    let view = SnapshotView::open(from, snapshot).unwrap();
    clone_snapshot(&view, to, &options(), &Pace::new(0), &mut |_, _| {}).unwrap()
}

fn bytes(path: &Path, snapshot: Option<&str>) -> Vec<u8> {
    let view = SnapshotView::open(path, snapshot).unwrap();
    let mut bytes = vec![0; usize::try_from(view.size()).unwrap()];
    view.read_at(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_clone_reads_as_its_snapshot() {
    for place in [tempfile::tempdir().unwrap(), temporary()] {
        let (from, to) = (place.path().join("from"), place.path().join("to"));
        source(&from);
        let before = bytes(&from, None);
        for snapshot in [Some("one"), Some("two"), None] {
            let _ = fs::remove_dir_all(&to);
            let cloned = clone(&from, snapshot, &to);
            assert_eq!(bytes(&to, None), bytes(&from, snapshot), "{snapshot:?}");
            assert_eq!(bytes(&to, Some("base")), bytes(&from, snapshot), "{snapshot:?}");
            assert!(cloned.shared + cloned.copied > 0 && cloned.shared + cloned.copied <= SIZE);
        }
        let _ = fs::remove_dir_all(&to);
        clone(&from, Some("two"), &to);
        // Holes, zeroed blocks and, where it was copied, blocks of zeroes take no space.
        let held = fs::metadata(to.join("volume-snap-base.img")).unwrap().blocks() * 512;
        assert!(held <= 15 * BLOCK, "{held}");
        let view = SnapshotView::open(&to, None).unwrap();
        let names: Vec<_> =
            view.layers().iter().map(|layer| (layer.name.as_str(), layer.parent.as_str())).collect();
        assert_eq!(names, [("base", ""), ("", "base")]);
        assert_eq!(view.layers()[0].labels["of"], "two");
        drop(view);
        // It has a life of its own.
        let mut volume = Volume::open(&to).unwrap();
        assert!(volume.directory.state().clean && !volume.directory.state().imported);
        assert_eq!(volume.blocks()[..12], [0, 0, 1, 1, 1, 0, 0, 1, 1, 3, 3, 3]);
        volume.write(extent(2, 1), 7);
        volume.snapshot(9, "later").unwrap();
        volume.close();
        assert_eq!(bytes(&from, None), before);
        assert_eq!(bytes(&to, Some("base")), bytes(&from, Some("two")));
        // Without our records it is Longhorn's: no zero marks, nothing that says that it is being rebuilt.
        let meta = fs::read_to_string(to.join("volume.meta")).unwrap();
        assert!(meta.contains("\"Rebuilding\":false") && meta.contains("\"Dirty\":false"), "{meta}");
    }
}

/// The backing file's bytes come along: the clone needs none.
#[test]
fn a_backing_file_is_copied() {
    let place = temporary();
    let (from, to) = (place.path().join("from"), place.path().join("to"));
    source(&from);
    fs::remove_dir_all(from.join("engine")).unwrap();
    let backing = fs::File::create(place.path().join("backing")).unwrap();
    backing.write_all_at(&[8; 31 * 4096 + 512], 0).unwrap();
    let meta = fs::read_to_string(from.join("volume.meta")).unwrap();
    let meta = meta
        .replace("\"BackingFilePath\":\"\"", "\"BackingFilePath\":\"../backing\"")
        .replace("\"Rebuilding\":true", "\"Rebuilding\":false");
    fs::write(from.join("volume.meta"), meta).unwrap();
    clone(&from, Some("one"), &to);
    let expected = bytes(&from, Some("one"));
    assert_eq!((expected[0], expected[31 * 4096 + 511], expected[31 * 4096 + 512]), (8, 8, 0));
    assert_eq!(bytes(&to, None), expected);
    fs::remove_file(place.path().join("backing")).unwrap();
    assert_eq!(bytes(&to, None), expected);
}

#[test]
fn half_a_clone_is_none() {
    let place = temporary();
    let (from, to) = (place.path().join("from"), place.path().join("to"));
    source(&from);
    let view = SnapshotView::open(&from, Some("two")).unwrap();
    let pace = Pace::new(0);
    let marked = Cell::new(false);
    let half = place.path().join("half");
    let done = clone_snapshot(&view, &to, &options(), &pace, &mut |_, _| {
        // As a crash would leave it.
        let _ = fs::create_dir_all(half.join("engine"));
        for name in fs::read_dir(&to).unwrap().chain(fs::read_dir(to.join("engine")).unwrap()) {
            let from = name.unwrap().path();
            if from.is_file() {
                fs::copy(&from, half.join(from.strip_prefix(&to).unwrap())).unwrap();
            }
        }
        marked.set(to.join("engine/rebuilding").exists());
        pace.stop();
    });
    assert!(matches!(done, Err(CloneError::Stopped)), "{done:?}");
    assert!(marked.get(), "a clone that is not complete does not say so");
    assert!(!to.exists(), "what was begun is taken back");
    let err = SnapshotView::open(&half, None).map(drop).unwrap_err();
    assert!(err.to_string().contains("being rebuilt"), "{err}");

    // A directory that was there stays there, and is empty again.
    fs::create_dir(&to).unwrap();
    let bad = CloneOptions { snapshot: "a/b".into(), ..options() };
    let done = clone_snapshot(&view, &to, &bad, &Pace::new(0), &mut |_, _| {});
    assert!(matches!(done, Err(CloneError::Chain(ChainError::BadChain(_)))), "{done:?}");
    assert_eq!(fs::read_dir(&to).unwrap().count(), 0);
    // What is in use by others is not touched.
    fs::write(to.join("mine"), b"x").unwrap();
    let done = clone_snapshot(&view, &to, &options(), &Pace::new(0), &mut |_, _| {});
    assert!(matches!(done, Err(CloneError::Open(_))), "{done:?}");
    assert!(to.join("mine").exists());
}
