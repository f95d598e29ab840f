//! A disk that for once does not tell what a name stands for, at any single look of an operation. Nothing is taken for done that was
//! not: the next process finds the old state or the new one, and what the volume holds.

use std::path::Path;
use std::sync::Arc;

use lh_block::Instance;
use lh_wire::ChainOp;

use super::super::fs::tests_fault::BLIND_AFTER;
use super::super::survey::survey;
use super::crash::{LAYERED, SAMPLE, fill_sample, layered};
use super::tape::Tape;
use super::volume::{SIZE, Volume, extent, revert_op, snapshot_op, temporary};

/// Plays a scene with the first, second... look failing, until none fails any more.
fn at_every_look(before: impl Fn(&Path), scene: impl Fn(&Path), after: impl Fn(&Path, &str)) -> usize {
    for looks in 0.. {
        let place = temporary();
        let path = place.path().join("replica");
        before(&path);
        BLIND_AFTER.set(Some(looks));
        scene(&path);
        let is_over = BLIND_AFTER.take().is_some();
        after(&path, &format!("look {looks} fails"));
        if is_over {
            return looks;
        }
    }
    0
}

fn sample(path: &Path) {
    fill_sample(&mut Volume::create(path));
}

fn opened(path: &Path, what: &str) -> Volume {
    let volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(!volume.directory.state().imported, "{what}");
    volume
}

#[test]
fn operations_on_the_chain() {
    const ONE: [u8; 9] = [1, 1, 1, 1, 1, 1, 1, 1, 0];
    let created = || "2026-11-20T06:03:39Z".to_owned();
    let ops = [
        (snapshot_op("two"), SAMPLE),
        (ChainOp::MarkRemoved { name: "one".into() }, SAMPLE),
        (revert_op("one"), ONE),
        (ChainOp::Expand { name: None, size: SIZE + (8 << 20), created: created() }, SAMPLE),
    ];
    for (op, done) in ops {
        let looks = at_every_look(
            sample,
            |path| drop(Volume::open(path).map(|mut volume| volume.carry_out(2, &op))),
            |path, what| {
                let volume = opened(path, what);
                let is_done = volume.directory.state().committed == Some(Instance(2));
                let expected = if is_done { done } else { SAMPLE };
                assert_eq!(volume.blocks()[..9], expected, "{op:?}, {what}");
                drop(volume);
                let mut volume = opened(path, what);
                volume.carry_out(2, &op).unwrap_or_else(|e| panic!("{op:?}, {what}: {e}"));
                assert_eq!(volume.blocks()[..9], done, "{op:?}, {what}");
            },
        );
        assert!(looks > 5, "{op:?}");
    }
}

/// A head that holds far less than the removed snapshot below it.
fn small_head(path: &Path) {
    let mut volume = Volume::create(path);
    volume.write(extent(0, 20), 1);
    volume.snapshot(15, "base").unwrap();
    volume.write(extent(3, 2), 2);
    volume.zero(extent(6, 1));
    volume.remove(16, "base").unwrap();
    volume.flush();
}

/// What a fold's snapshot holds is nowhere else until it is copied, and then it goes.
fn fold_at_every_look(before: impl Fn(&Path), removed: &str, expected: [u8; 9]) {
    let after = |path: &Path, what: &str| {
        let mut volume = opened(path, what);
        assert_eq!(volume.blocks()[..9], expected, "{what}");
        if volume.directory.state().chain.iter().any(|layer| layer.name == removed) {
            volume.fold(removed).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        assert_eq!(volume.blocks()[..9], expected, "{what}");
    };
    let fold = |path: &Path| drop(Volume::open(path).map(|mut volume| volume.fold(removed)));
    assert!(at_every_look(&before, fold, after) > 10);
    // And what is done of it when the directory is opened.
    for stop in 0.. {
        let tape = Arc::new(Tape::default());
        let stopped = |path: &Path| {
            before(path);
            tape.stop_after(stop);
            drop(Volume::open_taped(path, &tape).map(|mut volume| volume.fold(removed)));
        };
        let open = |path: &Path| drop(Volume::open(path));
        at_every_look(stopped, open, |path, what| {
            after(path, &format!("stopped after {stop} operations, {what}"))
        });
        if !tape.stopped() {
            break;
        }
    }
}

#[test]
fn a_fold_into_the_base() {
    fold_at_every_look(|path| layered(path, "one"), "one", LAYERED[3].1);
}

#[test]
fn a_fold_into_the_child() {
    fold_at_every_look(|path| layered(path, "two"), "two", LAYERED[3].1);
}

#[test]
fn a_fold_into_the_head() {
    fold_at_every_look(|path| layered(path, "three"), "three", LAYERED[3].1);
}

#[test]
fn a_fold_of_a_small_head() {
    fold_at_every_look(small_head, "base", [1, 1, 1, 2, 2, 1, 0, 1, 1]);
}

/// A directory that was closed cleanly is nobody else's because one of its files could not be looked at.
#[test]
fn a_clean_close_is_believed_or_the_directory_is_not_opened() {
    let closed = |path: &Path| {
        let mut volume = Volume::create(path);
        volume.write(extent(0, 8), 1);
        volume.snapshot(1, "one").unwrap();
        volume.write(extent(2, 2), 2);
        volume.close();
    };
    let looks = at_every_look(
        closed,
        |path| {
            // Who decides where a volume is to start from asks first.
            if let Ok(found) = survey(path) {
                assert!(found.clean && !found.imported);
                drop(Volume::open(path));
            }
        },
        |path, what| assert_eq!(opened(path, what).blocks()[..9], [1, 1, 2, 2, 1, 1, 1, 1, 0], "{what}"),
    );
    assert!(looks > 5);
}
