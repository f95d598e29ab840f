//! A stop after every single operation that changes a directory: it opens, and holds the old state or the new one.
//!
//! Each scene is played again and again, stopped one operation later each time, and twice: files that were written but
//! not synced at the stop are left as they are, or cut off, as a power cut can leave them. At each stop every directory is
//! made and looked at, too, that a disk may hold which has some of the unsynced changes of names and not the others. And once more
//! with a disk that fails in the one operation and in no other: whoever asked for the scene hears of it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use lh_block::{Epoch, Generation, Instance};
use lh_wire::{BlockState, ChainOp, Keep, LayerInfo, Outsider};

use super::super::chain::Committed;
use super::super::clone::{self, CloneOptions};
use super::super::fs::Fs;
use super::super::offline::SnapshotView;
use super::super::pace::Pace;
use super::super::record::Direction;
use super::super::release::Release;
use super::super::survey::survey;
use super::super::{
    create,
    error::{ChainError, OpenError},
};
use super::names::Journal;
use super::tape::Tape;
use super::volume::{SIZE, Volume, create_options, extent, revert_op, snapshot_op, temporary};

/// Plays a scene with a stop after 0, 1, 2... operations, until it comes to its end. `scene` gets a directory made by
/// `before` and says whether it came to its end; `after` looks at what is there.
fn at_every_step(
    before: impl Fn(&Path),
    scene: impl Fn(&Path, &Arc<Tape>) -> bool,
    after: impl Fn(&Path, bool, &str),
) {
    for (lose, once) in [(false, false), (true, false), (false, true)] {
        for steps in 0.. {
            let place = temporary();
            let path = place.path().join("replica");
            before(&path);
            let tape = Arc::new(Tape::default());
            if once {
                tape.fail_once_after(steps);
            } else {
                tape.stop_after(steps);
            }
            if !once && path.join("engine").is_dir() {
                let attic = place.path().join("attic");
                fs::create_dir(&attic).unwrap();
                tape.keep(Journal::new(&path, &attic));
            }
            let finished = scene(&path, &tape);
            assert_ne!(finished, tape.stopped(), "a stop was passed over in silence");
            if finished {
                assert_eq!(tape.unsynced(), Vec::<std::path::PathBuf>::new(), "not durable at the end");
            }
            if lose {
                tape.lose_unsynced();
            }
            let what = format!("stopped after {steps} operations, lose {lose}, once {once}");
            if let Some(journal) = tape.journal().filter(|_| !lose) {
                let left = place.path().join("left");
                journal.states(&left, |changes| {
                    let what = format!("{what}, {changes}");
                    // Who reads without repairing may find names without what they name: that is said, nothing else.
                    drop(Volume::open(&left).unwrap_or_else(|e| panic!("{what}: {e}")));
                    after(&left, finished, &what);
                });
            }
            after(&path, finished, &what);
            if finished {
                assert!(steps > 3, "the scene has operations");
                break;
            }
        }
    }
}

fn sample(path: &Path) {
    fill_sample(&mut Volume::create(path));
}

/// Makes it a volume with a snapshot "one", written over and with a zeroed block; in use.
pub(super) fn fill_sample(volume: &mut Volume) {
    volume.write(extent(0, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(2, 2), 2);
    volume.zero(extent(4, 1));
    volume.flush();
}

pub(super) const SAMPLE: [u8; 9] = [1, 1, 2, 2, 0, 1, 1, 1, 0];
const ONE: [u8; 9] = [1, 1, 1, 1, 1, 1, 1, 1, 0];

fn volume_head(path: &Path) -> String {
    let names = fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    names.filter(|n| n.starts_with("volume-head-") && n.ends_with(".img")).max().unwrap()
}

fn reads(path: &Path, snapshot: Option<&str>) -> Vec<u8> {
    let view = SnapshotView::open(path, snapshot).unwrap();
    let mut byte = [0];
    (0..9)
        .map(|block| {
            view.read_at(block * 4096, &mut byte).unwrap();
            byte[0]
        })
        .collect()
}

fn names(volume: &Volume) -> Vec<String> {
    volume.directory.state().chain.into_iter().map(|l| l.name).collect()
}

/// No file lies about that is not part of the directory as it is.
fn is_tidy(path: &Path, volume: &Volume) {
    let mut found: Vec<String> =
        fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    found.sort();
    let chain = volume.directory.state().chain;
    let mut expected: Vec<String> = ["engine", "volume.meta"].map(str::to_owned).to_vec();
    for layer in chain.iter().filter(|l| !l.name.is_empty()) {
        expected.push(format!("volume-snap-{}.img", layer.name));
        expected.push(format!("volume-snap-{}.img.meta", layer.name));
    }
    let heads = found.iter().filter(|n| n.starts_with("volume-head-")).cloned();
    expected.extend(heads);
    expected.sort();
    assert_eq!(found, expected);
    assert_eq!(found.iter().filter(|n| n.starts_with("volume-head-")).count(), 2, "one head and its meta");
}

#[test]
fn snapshot() {
    at_every_step(
        sample,
        |path, tape| {
            let id = Instance(2);
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            if volume.directory.prepare(id, &snapshot_op("two")).is_err() {
                return false;
            }
            assert_eq!(tape.unsynced(), Vec::<std::path::PathBuf>::new(), "prepared is durable");
            volume.directory.commit(id).is_ok() && volume.directory.sync_commit().is_ok()
        },
        |path, finished, what| {
            // Readers see the old state or the new one before anything is repaired.
            assert_eq!(reads(path, None), SAMPLE, "{what}");
            assert_eq!(reads(path, Some("one")), ONE, "{what}");
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            is_tidy(path, &volume);
            assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
            let state = volume.directory.state();
            match (state.committed, &state.prepared) {
                (Some(Instance(2)), None) => assert_eq!(names(&volume), ["one", "two", ""], "{what}"),
                (Some(Instance(1)), prepared) => {
                    assert!(!finished, "{what}");
                    assert_eq!(names(&volume), ["one", ""], "{what}");
                    assert!(prepared.as_ref().is_none_or(|(id, _)| *id == Instance(2)));
                }
                other => panic!("{what}: {other:?}"),
            }
            // What the engine decided is carried out in any case.
            volume.snapshot(2, "two").unwrap_or_else(|e| panic!("{what}: {e}"));
            volume.write(extent(0, 1), 9);
            drop(volume);
            assert_eq!(reads(path, Some("two")), SAMPLE, "{what}");
            let volume = Volume::open(path).unwrap();
            assert_eq!(names(&volume), ["one", "two", ""]);
            assert_eq!(volume.blocks()[0], 9);
            is_tidy(path, &volume);
        },
    );
}

/// Requests are held meanwhile, and each step may wait for the file system's journal.
#[test]
fn the_switch_of_a_snapshot_is_one_step() {
    let place = temporary();
    let path = place.path().join("replica");
    sample(&path);
    let tape = Arc::new(Tape::default());
    let mut volume = Volume::open_taped(&path, &tape).unwrap();
    volume.directory.prepare(Instance(2), &snapshot_op("two")).unwrap();
    tape.stop_after(1);
    volume.directory.commit(Instance(2)).unwrap();
    assert_eq!(tape.go_on(), Some(0));
}

/// Also while the process goes on: what is left would stay until the next one.
#[test]
fn an_operation_that_is_taken_back_leaves_no_name() {
    let place = temporary();
    let path = place.path().join("replica");
    sample(&path);
    let mut volume = Volume::open(&path).unwrap();
    for op in [snapshot_op("two"), revert_op("one")] {
        volume.directory.prepare(Instance(2), &op).unwrap();
        volume.directory.abort(Instance(2)).unwrap();
        is_tidy(&path, &volume);
    }
}

/// An engine may die before the flush that follows on the change of heads, and the next one takes a snapshot first.
#[test]
fn a_snapshot_right_behind_another_one() {
    let place = temporary();
    let path = place.path().join("replica");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 8), 1);
    volume.directory.prepare(Instance(1), &snapshot_op("one")).unwrap();
    let Committed::Head(head) = volume.directory.commit(Instance(1)).unwrap() else { panic!("no new head") };
    volume.store.switch_head(*head);
    volume.snapshot(2, "two").unwrap();
    is_tidy(&path, &volume);
}

/// Requests go on behind the switch, before it is durable. What they make zero is marked in the new head's map, which may be on the disk
/// when the names are not.
#[test]
fn zeroes_in_a_head_whose_name_is_lost() {
    at_every_step(
        sample,
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            if volume.directory.prepare(Instance(2), &snapshot_op("two")).is_err() {
                return false;
            }
            let Ok(Committed::Head(head)) = volume.directory.commit(Instance(2)) else { return false };
            volume.store.switch_head(*head);
            volume.zero(extent(0, 1));
            volume.directory.sync_commit().is_ok()
        },
        |path, _, what| {
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            is_tidy(path, &volume);
            assert_eq!(volume.blocks()[1..9], SAMPLE[1..], "{what}");
            volume.snapshot(2, "two").unwrap_or_else(|e| panic!("{what}: {e}"));
            drop(volume);
            assert_eq!(reads(path, Some("two")), SAMPLE, "{what}");
            let volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(names(&volume), ["one", "two", ""], "{what}");
        },
    );
}

/// A fold that has waited for a prepared snapshot changes its names as soon as that is carried out, and nobody has flushed since.
#[test]
fn the_names_of_a_fold_right_behind_a_change_of_heads() {
    for removed in ["two", "three"] {
        at_every_step(
            |path| layered(path, removed),
            |path, tape| {
                let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
                let Ok(mut fold) = volume.begin_fold(removed) else { return false };
                if volume.directory.prepare(Instance(20), &snapshot_op("four")).is_err() {
                    return false;
                }
                let waits = loop {
                    match volume.fold_step(&mut fold) {
                        Ok(goes_on) => assert!(goes_on, "it does not wait"),
                        Err(refused) => break matches!(refused, ChainError::OtherPrepared(_)),
                    }
                };
                if !waits {
                    return false;
                }
                let Ok(Committed::Head(head)) = volume.directory.commit(Instance(20)) else { return false };
                volume.store.switch_head(*head);
                while let Ok(goes_on) = volume.fold_step(&mut fold) {
                    if !goes_on {
                        return volume.directory.sync_commit().is_ok();
                    }
                }
                false
            },
            |path, finished, what| {
                assert_eq!(reads(path, None), LAYERED[3].1, "{what}");
                let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
                is_tidy(path, &volume);
                assert_eq!(volume.blocks()[..9], LAYERED[3].1, "{what}");
                let known = names(&volume);
                let (is_there, is_taken) =
                    (known.iter().any(|n| n == removed), known.iter().any(|n| n == "four"));
                assert_eq!(volume.directory.state().committed == Some(Instance(20)), is_taken, "{what}");
                assert!(is_taken && !is_there || !finished, "{what}");
                volume.snapshot(20, "four").unwrap_or_else(|e| panic!("{what}: {e}"));
                if is_there {
                    volume.fold(removed).unwrap_or_else(|e| panic!("{what}: {e}"));
                }
                is_tidy(path, &volume);
                drop(volume);
                assert_eq!(reads(path, Some("four")), LAYERED[3].1, "{what}");
                let volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(volume.blocks()[..9], LAYERED[3].1, "{what}");
            },
        );
    }
}

/// What is settled may be said between a change of heads and the flush that follows it.
#[test]
fn a_record_right_behind_a_change_of_heads() {
    at_every_step(
        sample,
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            if volume.directory.prepare(Instance(2), &snapshot_op("two")).is_err() {
                return false;
            }
            let Ok(Committed::Head(head)) = volume.directory.commit(Instance(2)) else { return false };
            volume.store.switch_head(*head);
            volume.directory.store_settled("one").is_ok() && volume.directory.sync_commit().is_ok()
        },
        |path, _, what| {
            let volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            is_tidy(path, &volume);
            let (known, committed) = (names(&volume), volume.directory.state().committed);
            let is_taken = known.iter().any(|name| name == "two");
            assert_eq!(committed == Some(Instance(2)), is_taken, "{what}: {known:?}");
            assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
        },
    );
}

/// How far a fold has come is noted for the layer that stands on its snapshot, by its name. If a power cut makes that the head again it is
/// written to, and whatever has the name later is another one.
#[test]
fn what_a_fold_has_noted_right_behind_a_change_of_heads() {
    at_every_step(
        |path| layered(path, "three"),
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            let Ok(plan) = volume.directory.begin_fold("three") else { return false };
            if volume.directory.prepare(Instance(20), &snapshot_op("four")).is_err() {
                return false;
            }
            let Ok(Committed::Head(head)) = volume.directory.commit(Instance(20)) else { return false };
            volume.store.switch_head(*head);
            volume.directory.save_fold(&plan, Direction::IntoParent, 4096).is_ok()
                && volume.directory.sync_commit().is_ok()
        },
        |path, finished, what| {
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let is_taken = names(&volume).iter().any(|name| name == "four");
            if !is_taken {
                assert!(!finished, "{what}");
                volume.directory.abort(Instance(20)).unwrap();
                volume.write(extent(0, 1), 9);
                volume.snapshot(21, "four").unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            let plan = volume.directory.begin_fold("three").unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(plan.resume.is_none() || is_taken, "{what}");
            volume.fold("three").unwrap_or_else(|e| panic!("{what}: {e}"));
            let expected = if is_taken { LAYERED[3].1[0] } else { 9 };
            assert_eq!(volume.blocks()[0], expected, "{what}");
            assert_eq!(volume.blocks()[1..9], LAYERED[3].1[1..], "{what}");
        },
    );
}

#[test]
fn snapshot_that_is_taken_back() {
    at_every_step(
        |path| {
            sample(path);
            let mut volume = Volume::open(path).unwrap();
            volume.directory.prepare(Instance(2), &snapshot_op("two")).unwrap();
        },
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            volume.directory.abort(Instance(2)).is_ok()
        },
        |path, finished, what| {
            assert_eq!(reads(path, None), SAMPLE, "{what}");
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let prepared = volume.directory.state().prepared;
            assert!(prepared.is_none() || !finished, "{what}");
            volume.directory.abort(Instance(2)).unwrap();
            assert_eq!(names(&volume), ["one", ""]);
            volume.snapshot(3, "two").unwrap();
            is_tidy(path, &volume);
            assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
        },
    );
}

#[test]
fn removal() {
    let op = ChainOp::MarkRemoved { name: "one".into() };
    at_every_step(
        sample,
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            volume.directory.prepare(Instance(2), &op).is_ok()
                && volume.directory.commit(Instance(2)).is_ok()
                && volume.directory.sync_commit().is_ok()
        },
        |path, finished, what| {
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let state = volume.directory.state();
            let removed = state.chain[0].removed;
            assert_eq!(removed, state.committed == Some(Instance(2)), "{what}");
            assert!(removed || !finished, "{what}");
            volume.directory.prepare(Instance(2), &op).unwrap();
            volume.commit(2).unwrap();
            assert!(volume.directory.state().chain[0].removed);
            assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
        },
    );
}

#[test]
fn revert() {
    at_every_step(
        sample,
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            if volume.directory.prepare(Instance(2), &revert_op("one")).is_err() {
                return false;
            }
            assert_eq!(tape.unsynced(), Vec::<std::path::PathBuf>::new(), "prepared is durable");
            volume.commit(2).is_ok()
        },
        |path, finished, what| {
            let reverted = reads(path, None) == ONE;
            assert!(reverted || reads(path, None) == SAMPLE, "{what}");
            assert_eq!(reads(path, Some("one")), ONE, "{what}");
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            is_tidy(path, &volume);
            let committed = volume.directory.state().committed == Some(Instance(2));
            assert_eq!(committed, reverted, "{what}");
            assert!(committed || !finished, "{what}");
            assert_eq!(volume.blocks()[..9], if reverted { ONE } else { SAMPLE }, "{what}");
            volume.carry_out(2, &revert_op("one")).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(volume.blocks()[..9], ONE, "{what}");
            volume.write(extent(0, 1), 9);
            drop(volume);
            assert_eq!((reads(path, None)[0], reads(path, Some("one"))[0]), (9, 1), "{what}");
            is_tidy(path, &Volume::open(path).unwrap());
        },
    );
}

#[test]
fn expansion() {
    const LARGER: u64 = SIZE + (8 << 20);
    at_every_step(
        sample,
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            volume.expand(2, LARGER).is_ok()
        },
        |path, finished, what| {
            assert_eq!(reads(path, None), SAMPLE, "{what}");
            let size = SnapshotView::open(path, None).unwrap().size();
            assert!(size == LARGER || (size == SIZE && !finished), "{what}: {size}");
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            is_tidy(path, &volume);
            assert_eq!((volume.directory.size(), volume.store.size()), (size, size), "{what}");
            // The marks of the writes before are there, and no others.
            let marked = volume.store.intent();
            assert_eq!(marked.len(), 1, "{what}: {marked:?}");
            assert!(marked[0].end() <= 4 << 20, "{what}: {marked:?}");
            if size == SIZE {
                volume.expand(2, LARGER).unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            assert_eq!(names(&volume), ["one", &format!("expand-{LARGER}"), ""]);
            volume.write(extent(SIZE / 4096 + 5, 1), 9);
            drop(volume);
            let volume = Volume::open(path).unwrap();
            let firsts = |start, blocks| -> Vec<u8> {
                volume.read(extent(start, blocks)).chunks(4096).map(|block| block[0]).collect()
            };
            assert_eq!(firsts(0, 9), SAMPLE, "{what}");
            assert_eq!(firsts(SIZE / 4096, 7), [0, 0, 0, 0, 0, 9, 0], "{what}");
            is_tidy(path, &volume);
        },
    );
}

/// one <- two <- three <- head, each with data and zeroes over the ones below; `removed` is marked.
pub(super) fn layered(path: &Path, removed: &str) {
    let mut volume = Volume::create(path);
    volume.write(extent(0, 9), 1);
    volume.snapshot(11, "one").unwrap();
    volume.write(extent(1, 1), 2);
    volume.zero(extent(2, 2));
    volume.snapshot(12, "two").unwrap();
    volume.write(extent(3, 4), 3);
    volume.zero(extent(7, 1));
    volume.snapshot(13, "three").unwrap();
    volume.write(extent(5, 1), 4);
    volume.zero(extent(6, 1));
    volume.remove(14, removed).unwrap();
    volume.flush();
}

pub(super) const LAYERED: [(&str, [u8; 9]); 4] = [
    ("one", [1, 1, 1, 1, 1, 1, 1, 1, 1]),
    ("two", [1, 2, 0, 0, 1, 1, 1, 1, 1]),
    ("three", [1, 2, 0, 3, 3, 3, 3, 0, 1]),
    ("", [1, 2, 0, 3, 3, 4, 0, 0, 1]),
];

/// Folds `removed` away. `live`: what is there besides; `stays`: the layer whose file is there afterwards.
fn fold_at_every_step(before: impl Fn(&Path), removed: &str, live: &[(&str, [u8; 9])], stays: &str) {
    let head = live.last().unwrap().1;
    let inode = |path: &Path, name: &str| {
        let file = match name {
            "" => volume_head(path),
            name => format!("volume-snap-{name}.img"),
        };
        fs::metadata(path.join(file)).unwrap().ino()
    };
    let all_read = |path: &Path, what: &str| {
        for (name, blocks) in live {
            let snapshot = Some(*name).filter(|name| !name.is_empty());
            assert_eq!(reads(path, snapshot), *blocks, "{what}: {name:?}");
        }
    };
    at_every_step(
        |path| before(path),
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            let Ok(plan) = volume.directory.begin_fold(removed) else { return false };
            let above = plan.child.unwrap_or_default();
            let file = inode(path, stays);
            let folded = volume.fold(removed).is_ok();
            assert!(!folded || inode(path, &above) == file, "{stays:?} has not stayed");
            folded
        },
        |path, finished, what| {
            all_read(path, what);
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            is_tidy(path, &volume);
            assert_eq!(volume.blocks()[..9], head, "{what}");
            let there = names(&volume).iter().any(|name| name == removed);
            assert!(!there || !finished, "{what}");
            if there {
                volume.fold(removed).unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            assert_eq!(names(&volume).len(), live.len(), "{what}");
            assert_eq!(volume.blocks()[..9], head, "{what}");
            is_tidy(path, &volume);
            assert!(!path.join("engine/fold").exists(), "{what}");
            drop(volume);
            all_read(path, what);
            let volume = Volume::open(path).unwrap();
            assert_eq!(volume.blocks()[..9], head, "{what}");
            let path = volume.close();
            all_read(&path, what);
        },
    );
}

fn layers_but(removed: &str) -> Vec<(&'static str, [u8; 9])> {
    LAYERED.into_iter().filter(|(name, _)| *name != removed).collect()
}

/// The child holds less: it goes into the parent, which is the base.
#[test]
fn fold_into_the_base() {
    fold_at_every_step(|path| layered(path, "one"), "one", &layers_but("one"), "one");
}

/// The parent holds less than the child does.
#[test]
fn fold_into_the_child() {
    fold_at_every_step(|path| layered(path, "two"), "two", &layers_but("two"), "three");
}

#[test]
fn fold_into_the_head() {
    fold_at_every_step(|path| layered(path, "three"), "three", &layers_but("three"), "");
}

/// The head holds far less than the snapshot below, whose file becomes the head.
#[test]
fn fold_of_a_small_head() {
    let before = |path: &Path| {
        layered(path, "two");
        let mut volume = Volume::open(path).unwrap();
        volume.fold("two").unwrap();
        volume.write(extent(20, 12), 5);
        volume.snapshot(15, "four").unwrap();
        volume.write(extent(8, 1), 6);
        volume.zero(extent(4, 1));
        volume.remove(16, "four").unwrap();
        volume.flush();
    };
    let mut head = LAYERED[3].1;
    (head[8], head[4]) = (6, 0);
    fold_at_every_step(before, "four", &[LAYERED[0], LAYERED[2], ("", head)], "four");
}

/// The same over the base, in which a zero is a mere hole.
#[test]
fn fold_of_a_small_head_into_the_base() {
    let before = |path: &Path| {
        let mut volume = Volume::create(path);
        volume.write(extent(0, 20), 1);
        volume.snapshot(15, "base").unwrap();
        volume.write(extent(3, 2), 2);
        volume.zero(extent(6, 1));
        volume.remove(16, "base").unwrap();
        volume.flush();
    };
    fold_at_every_step(before, "base", &[("", [1, 1, 1, 2, 2, 1, 0, 1, 1])], "base");
}

/// Of an import a snapshot's file has no id of ours, and takes the name of a layer that has one.
#[test]
fn fold_into_a_snapshot_of_an_import() {
    let before = |path: &Path| {
        foreign(path);
        let one = path.join("volume-snap-one.img");
        let bytes = fs::read(&one).unwrap();
        fs::remove_file(&one).unwrap();
        fs::write(&one, bytes).unwrap();
        let mut volume = Volume::open(path).unwrap();
        volume.write(extent(4, 1), 3);
        volume.snapshot(15, "two").unwrap();
        volume.write(extent(5, 1), 4);
        volume.remove(16, "one").unwrap();
        volume.flush();
    };
    let (two, head) = ([1, 1, 2, 2, 3, 1, 1, 1, 0], [1, 1, 2, 2, 3, 4, 1, 1, 0]);
    fold_at_every_step(before, "one", &[("two", two), ("", head)], "one");
}

/// A removed snapshot that nothing stands on is deleted.
#[test]
fn fold_of_a_branch() {
    at_every_step(
        |path| {
            layered(path, "three");
            let mut volume = Volume::open(path).unwrap();
            volume.flush();
            volume.carry_out(20, &revert_op("two")).unwrap();
        },
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            volume.fold("three").is_ok()
        },
        |path, finished, what| {
            assert_eq!(
                (reads(path, None), reads(path, Some("one"))),
                (LAYERED[1].1.into(), LAYERED[0].1.into())
            );
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let there = names(&volume).iter().any(|name| name == "three");
            assert!(!there || !finished, "{what}");
            if there {
                volume.fold("three").unwrap();
            }
            is_tidy(path, &volume);
            assert_eq!(names(&volume), ["one", "two", ""], "{what}");
            assert_eq!(volume.blocks()[..9], LAYERED[1].1, "{what}");
        },
    );
}

#[test]
fn creation() {
    at_every_step(
        |_| {},
        |path, tape| {
            let fs = Fs { tape: Some(Arc::clone(tape)) };
            create::create(path, &create_options(SIZE), fs).is_ok()
        },
        |path, finished, what| match Volume::open(path) {
            Ok(volume) => assert!(volume.blocks().iter().all(|b| *b == 0)),
            Err(err) => {
                assert!(!finished, "{what}: {err}");
                let clear = matches!(err, OpenError::NoDirectory(_) | OpenError::Damaged { .. });
                assert!(clear, "{what}: {err}");
                let volume = Volume::create(path);
                assert!(volume.directory.state().clean && !volume.directory.state().imported);
            }
        },
    );
}

/// Half a clone is nobody's volume.
#[test]
fn cloning() {
    let place = temporary();
    sample(&place.path().join("source"));
    let view = SnapshotView::open(&place.path().join("source"), None).unwrap();
    let options = CloneOptions { snapshot: "base".into(), ..CloneOptions::default() };
    at_every_step(
        |_| {},
        |path, tape| {
            let fs = Fs { tape: Some(Arc::clone(tape)) };
            let Ok((directory, _)) = create::create(path, &create_options(SIZE), fs) else { return false };
            clone::fill(&view, directory, &options, &Pace::new(0), &mut |_, _| {}).is_ok()
        },
        |path, finished, what| match Volume::open(path) {
            Ok(volume) => {
                let state = volume.directory.state();
                assert!(!finished || (!state.rebuilding && state.clean), "{what}");
                let is_new = names(&volume) == [""];
                assert!(state.rebuilding || is_new || volume.blocks()[..9] == SAMPLE, "{what}");
            }
            Err(err) => assert!(!finished, "{what}: {err}"),
        },
    );
}

fn form() -> Vec<LayerInfo> {
    let layer = |name: &str, parent: &str| LayerInfo {
        name: name.into(),
        parent: parent.into(),
        created: "2026-11-20T06:03:39Z".into(),
        length: SIZE,
        ..LayerInfo::default()
    };
    vec![layer("a", ""), layer("b", "a"), layer("branch", "a"), layer("", "b")]
}

#[test]
fn rebuild() {
    at_every_step(
        sample,
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            let Ok(parts) = volume.directory.begin_rebuild(SIZE, &form()) else { return false };
            volume.store.replace(parts);
            true
        },
        |path, finished, what| {
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let state = volume.directory.state();
            assert!(!state.imported, "{what}");
            if state.rebuilding {
                assert!(volume.blocks().iter().all(|b| *b == 0), "{what}");
                drop(volume);
                let refused = SnapshotView::open(path, None).map(drop).unwrap_err();
                assert!(refused.to_string().contains("rebuilt"), "{what}: {refused}");
                volume = Volume::open(path).unwrap();
            } else {
                assert!(!finished, "{what}");
                assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
            }
            let parts = volume.directory.begin_rebuild(SIZE, &form()).unwrap();
            volume.store.replace(parts);
            assert_eq!(names(&volume), ["a", "b", "branch", ""]);
            is_tidy(path, &volume);
            let image: Vec<_> = (0..8).map(|n| (BlockState::Data, n)).collect();
            volume.put("a", 0, &image);
            volume.put("b", 3, &[(BlockState::Zero, 0)]);
            volume.end_rebuild();
            drop(volume);
            assert_eq!(reads(path, None), [0, 1, 2, 0, 4, 5, 6, 7, 0], "{what}");
            assert_eq!(reads(path, Some("a")), [0, 1, 2, 3, 4, 5, 6, 7, 0], "{what}");
            assert_eq!(reads(path, Some("branch")), [0, 1, 2, 3, 4, 5, 6, 7, 0], "{what}");
        },
    );
}

/// A replica that was out takes over a chain in which its head has become a snapshot.
#[test]
fn catching_up() {
    let layer = |name: &str, parent: &str| LayerInfo {
        name: name.into(),
        parent: parent.into(),
        created: "2026-11-20T06:03:39Z".into(),
        length: SIZE,
        ..LayerInfo::default()
    };
    let chain = [layer("one", ""), layer("two", "one"), layer("", "two")];
    let take_over = |volume: &mut Volume| {
        let known = volume.directory.state().chain.iter().any(|l| l.name == "two");
        let keep = Keep { head: if known { "" } else { "two" }.into(), unsure: vec!["one".into()] };
        let parts = volume.directory.begin_catch_up(SIZE, &chain, &keep);
        parts.map(|parts| drop(volume.store.replace(parts)))
    };
    let before = |path: &Path| {
        sample(path);
        let mut volume = Volume::open(path).unwrap();
        let epoch = Epoch { generation: Generation::from(5), id: Instance(5), ..Epoch::default() };
        assert!(volume.directory.store_epoch(epoch).unwrap());
    };
    // A replica that left in the middle of an operation, and has not been opened since.
    let beside_prepared = |volume: &mut Volume| {
        volume.directory.prepare(Instance(7), &snapshot_op("lost")).and_then(|()| take_over(volume))
    };
    for scene in [&take_over as &dyn Fn(&mut Volume) -> _, &beside_prepared] {
        at_every_step(
            before,
            |path, tape| Volume::open_taped(path, tape).is_ok_and(|mut volume| scene(&mut volume).is_ok()),
            |path, finished, what| {
                let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
                let state = volume.directory.state();
                assert!(!state.imported, "{what}");
                match (state.rebuilding, &state.kept) {
                    (false, _) => {
                        assert!(!finished, "{what}");
                        assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
                    }
                    // What the layers hold counts only if it is said so.
                    (true, Some(_)) => assert_eq!(volume.blocks()[..9], SAMPLE, "{what}"),
                    (true, None) => assert!(!finished && volume.blocks().iter().all(|b| *b == 0), "{what}"),
                }
                take_over(&mut volume).unwrap_or_else(|e| panic!("{what}: {e}"));
                assert_eq!(names(&volume), ["one", "two", ""], "{what}");
                is_tidy(path, &volume);
                volume.put("one", 0, &[(BlockState::Data, 1); 8]);
                let (own, zero) = ((BlockState::Data, 2), (BlockState::Zero, 0));
                let absent = (BlockState::Absent, 0);
                volume.put("two", 0, &[absent, absent, own, own, zero, absent, absent, absent, absent]);
                volume.end_rebuild();
                drop(volume);
                assert_eq!(reads(path, None), SAMPLE, "{what}");
                assert_eq!(reads(path, Some("one")), ONE, "{what}");
                assert_eq!(reads(path, Some("two")), SAMPLE, "{what}");
            },
        );
    }
}

/// A head that stays is as long as its volume has become meanwhile, also when the power goes.
#[test]
fn catching_up_with_a_volume_that_has_grown() {
    let layer = |name: &str, parent: &str, length| LayerInfo {
        name: name.into(),
        parent: parent.into(),
        created: "2026-11-20T06:03:39Z".into(),
        length,
        ..LayerInfo::default()
    };
    let chain = [layer("one", "", SIZE), layer("", "one", 2 * SIZE)];
    at_every_step(
        |path| {
            sample(path);
            let mut volume = Volume::open(path).unwrap();
            let epoch = Epoch { generation: Generation::from(5), id: Instance(5), ..Epoch::default() };
            assert!(volume.directory.store_epoch(epoch).unwrap());
        },
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            let parts = volume.directory.begin_catch_up(2 * SIZE, &chain, &Keep::default());
            parts.is_ok_and(|parts| {
                drop(volume.store.replace(parts));
                true
            })
        },
        |path, finished, what| {
            let volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let state = volume.directory.state();
            assert!(!finished || (state.size == 2 * SIZE && state.kept.is_some()), "{what}");
            if !state.rebuilding || state.kept.is_some() {
                assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
            }
        },
    );
}

/// A chunk's mark goes once the trail is saved: from then on nothing else tells of what was written there.
#[test]
fn trails_of_who_is_out() {
    let epoch = |counter: u64, members: &[&str]| Epoch {
        generation: Generation::from(5),
        counter,
        members: members.iter().map(|m| (*m).to_owned()).collect(),
        id: Instance(counter.into()),
        after: None,
        round: None,
    };
    let out = || vec![Outsider { replica: "2".into(), base: epoch(1, &["1", "2"]) }];
    at_every_step(
        |path| {
            sample(path);
            let mut volume = Volume::open(path).unwrap();
            assert!(volume.directory.store_epoch_and_outsiders(epoch(2, &["1"]), out()).unwrap());
        },
        |path, tape| {
            let volume = Volume::open_taped(path, tape);
            volume.is_ok_and(|mut volume| volume.directory.store_missed(&[(0, [3; 16])]).is_ok())
        },
        |path, finished, what| {
            let volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let missed = volume.directory.missed().unwrap();
            assert_eq!(missed.out, out(), "{what}");
            assert!(!finished || missed.trails == [(0, [3; 16])], "{what}: {missed:?}");
        },
    );
}

/// Both or neither: a replica that is whole in its older epoch would be taken for one that has what the others of that have.
#[test]
fn a_rebuild_ends_with_the_epoch_that_was_stored_meanwhile() {
    let epoch = |number: u64| Epoch {
        generation: Generation::from(number),
        id: Instance(number.into()),
        ..Epoch::default()
    };
    let out = || vec![Outsider { replica: "u".into(), base: epoch(4) }];
    at_every_step(
        |path| {
            sample(path);
            let mut volume = Volume::open(path).unwrap();
            assert!(volume.directory.store_epoch(epoch(5)).unwrap());
            let chain = volume.directory.state().chain;
            let keep = Keep { head: String::new(), unsure: Vec::new() };
            let parts = volume.directory.begin_catch_up(SIZE, &chain, &keep).unwrap();
            volume.store.replace(parts);
            assert!(volume.directory.store_epoch_and_outsiders(epoch(6), out()).unwrap());
            let state = volume.directory.state();
            assert!(state.rebuilding && state.kept.is_some() && state.epoch == Some(epoch(5)));
            assert!(!volume.directory.store_epoch(epoch(5)).unwrap(), "a younger one is stored");
            assert_eq!(volume.store.end_rebuild(0, &mut |_, _, _| Vec::new(), || false).unwrap(), None);
            volume.flush();
        },
        |path, tape| {
            Volume::open_taped(path, tape).is_ok_and(|mut volume| volume.directory.end_rebuild().is_ok())
        },
        |path, finished, what| {
            let found = survey(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let state = volume.directory.state();
            assert_eq!((found.epoch, found.rebuilding), (state.epoch.clone(), state.rebuilding), "{what}");
            let missed = volume.directory.missed().unwrap();
            match state.rebuilding {
                true => {
                    assert!(!finished && state.epoch == Some(epoch(5)) && missed.out.is_empty(), "{what}")
                }
                false => assert_eq!((state.epoch, missed.out), (Some(epoch(6)), out()), "{what}"),
            }
            assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
            drop(volume);
            let again = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}")).directory.state();
            assert_eq!(again.rebuilding, state.rebuilding, "{what}");
        },
    );
}

#[test]
fn closing_and_use() {
    at_every_step(
        sample,
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            volume.flush();
            let closing = volume.store.close();
            if volume.directory.close_clean(closing).is_err() {
                return false;
            }
            volume.directory.begin_use().is_ok()
        },
        |path, _, what| {
            assert_eq!(reads(path, None), SAMPLE, "{what}");
            let volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(!volume.directory.state().imported, "{what}");
            assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
        },
    );
}

/// A directory of another program: the same layers, none of our records.
fn foreign(path: &Path) {
    let mut volume = Volume::create(path);
    volume.write(extent(0, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(2, 2), 2);
    volume.close();
    fs::remove_dir_all(path.join("engine")).unwrap();
}

const FOREIGN: [u8; 9] = [1, 1, 2, 2, 1, 1, 1, 1, 0];

#[test]
fn import() {
    at_every_step(
        foreign,
        |path, tape| Volume::open_taped(path, tape).is_ok(),
        |path, finished, what| {
            assert_eq!(reads(path, None), FOREIGN, "{what}");
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let state = volume.directory.state();
            assert!(state.imported && !state.clean && state.intent.is_empty(), "{what}");
            assert_eq!(volume.blocks()[..9], FOREIGN, "{what}");
            volume.zero(extent(1, 1));
            volume.flush();
            drop(volume);
            let _ = finished;
            assert_eq!(Volume::open(path).unwrap().blocks()[1], 0, "{what}");
        },
    );
}

#[test]
fn records() {
    let epoch = |n| Epoch {
        generation: Generation::from(n),
        counter: 1,
        members: vec!["r".into()],
        id: Instance(u128::from(n)),
        after: None,
        round: None,
    };
    at_every_step(
        |path| {
            sample(path);
            let mut volume = Volume::open(path).unwrap();
            volume.directory.store_fence(Generation::from(5), Instance(5)).unwrap();
            assert!(volume.directory.store_epoch(epoch(5)).unwrap());
            volume.directory.store_settled("").unwrap();
        },
        |path, tape| {
            let Ok(mut volume) = Volume::open_taped(path, tape) else { return false };
            volume.directory.store_fence(Generation::from(6), Instance(6)).is_ok()
                && volume.directory.store_epoch(epoch(6)).is_ok()
                && volume.directory.store_settled("one").is_ok()
        },
        |path, finished, what| {
            let volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let state = volume.directory.state();
            let fence = u64::from(volume.directory.fence().0);
            let stored = state.epoch.as_ref().map(|e| u64::from(e.generation)).unwrap();
            let settled = state.unsettled.is_empty();
            assert!((5..=6).contains(&fence) && (5..=6).contains(&stored), "{what}");
            assert!(fence >= stored && (stored == 6 || !settled), "{what}");
            assert!(!finished || (fence, stored, settled) == (6, 6, true), "{what}");
        },
    );
}

#[test]
fn a_lower_epoch_does_not_replace_a_higher_one() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    let epoch = |n| Epoch { generation: Generation::from(n), ..Epoch::default() };
    assert!(volume.directory.store_epoch(epoch(7)).unwrap());
    assert!(!volume.directory.store_epoch(epoch(6)).unwrap());
    assert!(volume.directory.store_epoch(epoch(7)).unwrap());
}

#[test]
fn release() {
    at_every_step(
        |path| layered(path, "two"),
        |path, tape| {
            let fs = Fs { tape: Some(Arc::clone(tape)) };
            Release::prepare_with(path, fs).and_then(Release::carry_out).is_ok()
        },
        |path, finished, what| {
            let bytes = |name: &str| reads(path, Some(name).filter(|n| !n.is_empty()));
            // The other one is removed: nobody reads it but through those above it.
            let live = || LAYERED.into_iter().filter(|(name, _)| *name != "two");
            for (name, blocks) in live() {
                assert_eq!(bytes(name), blocks, "{what}: {name:?}");
            }
            let found = survey(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(found.imported || !finished, "{what}: it is still ours");
            // Begun again, it comes to its end, and nothing of ours but the fence is left.
            Release::prepare(path).and_then(Release::carry_out).unwrap_or_else(|e| panic!("{what}: {e}"));
            let found = survey(path).unwrap();
            assert!(found.imported && !found.rebuilding && found.clean, "{what}");
            let left: Vec<_> =
                fs::read_dir(path.join("engine")).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert!(left.iter().all(|name| name == "fence"), "{what}: {left:?}");
            for (name, blocks) in live() {
                assert_eq!(bytes(name), blocks, "{what}: {name:?} as Longhorn reads it");
            }
            // And it can be taken back.
            let volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(volume.blocks()[..9], LAYERED[3].1, "{what}");
        },
    );
}

/// Who begins it again asks for a clean close, which the first step takes back. It counts as long as nobody else writes.
#[test]
fn a_release_that_was_broken_off_is_one_of_a_directory_that_was_closed_cleanly() {
    at_every_step(
        |path| {
            layered(path, "two");
            Volume::open(path).unwrap().close();
        },
        |path, tape| {
            let fs = Fs { tape: Some(Arc::clone(tape)) };
            Release::prepare_with(path, fs).and_then(Release::carry_out).is_ok()
        },
        |path, _, what| {
            let found = survey(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            // Opened since it is Longhorn's, it is an import, which nobody has used either.
            assert!(found.clean || found.imported, "{what}: nobody has written, and that does not count");
            let release = Release::prepare(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(release.is_as(&found), "{what}");
            drop(release);
            let mut volume = Volume::open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
            volume.write(extent(8, 1), 9);
            drop(volume);
            assert!(!survey(path).unwrap().clean, "{what}: somebody has written, and it counts as closed");
            if found.clean {
                assert!(!Release::prepare(path).unwrap().is_as(&found), "{what}");
            }
        },
    );
}

/// The program was exchanged for one that does not know what a release that was broken off has noted, and for a newer one again.
#[test]
fn what_a_release_has_noted_does_not_count_once_an_engine_has_had_the_directory() {
    let place = temporary();
    let path = place.path().join("replica");
    layered(&path, "two");
    Volume::open(&path).unwrap().close();
    Volume::open(&path).unwrap().directory.begin_release().unwrap();
    let noted = path.join("engine/releasing");
    let note = fs::read(&noted).unwrap();
    assert!(survey(&path).unwrap().clean);
    let mut volume = Volume::open(&path).unwrap();
    volume.directory.store_fence(Generation::from(7), Instance(7)).unwrap();
    volume.write(extent(8, 1), 9);
    drop(volume);
    fs::write(&noted, note).unwrap();
    assert!(!survey(&path).unwrap().clean, "it was written, and not closed");
}

/// A directory that says that it was closed cleanly has nothing to lose with the power, of no layer.
#[test]
fn a_clean_close_has_synced_every_layer() {
    for layer in ["volume-snap-one.img", "volume-head-001.img"] {
        let place = temporary();
        let path = place.path().join("replica");
        sample(&path);
        let tape = Arc::new(Tape::default());
        let mut volume = Volume::open_taped(&path, &tape).unwrap();
        tape.overwrites(&path.join(layer));
        if layer.contains("head") {
            volume.write(extent(2, 1), 9);
        } else {
            let image: Vec<_> = [1, 1, 9, 1].map(|byte| (BlockState::Data, byte)).into();
            volume.put("one", 0, &image);
        }
        let held = volume.layer(if layer.contains("head") { "" } else { "one" });
        let closing = volume.store.close();
        volume.directory.close_clean(closing).unwrap();
        drop(volume);
        tape.lose_unsynced();
        let volume = Volume::open(&path).unwrap();
        assert!(volume.directory.state().clean, "{layer}");
        assert_eq!(volume.layer(if layer.contains("head") { "" } else { "one" }), held, "{layer}");
    }
}
