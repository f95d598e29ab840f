//! A disk that is full at any single operation that changes a directory, and has space again later. What was refused has changed
//! nothing and is done with the next try; what broke off half-way is said to be an error of the disk, after which the next process
//! finds the old state or the new one.

use std::fs;
use std::io;
use std::sync::Arc;

use lh_block::{Epoch, Generation, Instance};
use lh_wire::{BlockState, ChainOp, Keep, Outsider};

use super::super::error::ChainError;
use super::super::record::Direction;
use super::super::room::is_full;
use super::crash::{SAMPLE, fill_sample};
use super::tape::Tape;
use super::volume::{SIZE, Volume, extent, revert_op, snapshot_op, temporary};

/// How something ended, as whoever serves the directory sees it.
enum Trouble {
    /// Refused: it goes on.
    Full,
    /// The process ends.
    Failed,
}

impl From<ChainError> for Trouble {
    fn from(error: ChainError) -> Self {
        match error {
            ChainError::NoSpace(_) => Self::Full,
            _ => Self::Failed,
        }
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        if is_full(&error) { Self::Full } else { Self::Failed }
    }
}

/// The disk is full from the first, second... operation of a scene on. `check` is asked after the scene was refused, and after it
/// was done; both times again when the directory was opened anew.
fn at_every_step(
    before: impl Fn(&mut Volume),
    scene: impl Fn(&mut Volume) -> Result<(), Trouble>,
    check: impl Fn(&mut Volume, bool, &str),
) {
    for names in [false, true] {
        for steps in 0.. {
            let place = temporary();
            let path = place.path().join("replica");
            let mut volume = Volume::create(&path);
            before(&mut volume);
            drop(volume);
            let tape = Arc::new(Tape::default());
            let mut volume = Volume::open_taped(&path, &tape).unwrap();
            tape.full_after(steps, names);
            let done = scene(&mut volume);
            let refused = tape.free();
            let what = format!("full after {steps} operations, names {names}");
            match done {
                Ok(()) if !refused => {
                    assert!(steps > 0, "the scene takes space");
                    break;
                }
                Ok(()) => {}
                Err(Trouble::Full) => {
                    check(&mut volume, false, &what);
                    scene(&mut volume).unwrap_or_else(|_| panic!("{what}: not done with the next try"));
                }
                Err(Trouble::Failed) => {
                    drop(volume);
                    volume = Volume::open(&path).unwrap_or_else(|e| panic!("{what}: {e}"));
                    scene(&mut volume).unwrap_or_else(|_| panic!("{what}: not done by the next process"));
                }
            }
            check(&mut volume, true, &what);
            drop(volume);
            let mut volume = Volume::open(&path).unwrap_or_else(|e| panic!("{what}, opened anew: {e}"));
            check(&mut volume, true, &format!("{what}, opened anew"));
        }
    }
}

fn names(volume: &Volume) -> Vec<String> {
    volume.directory.state().chain.into_iter().map(|l| l.name).collect()
}

fn carry_out(volume: &mut Volume, id: u128, op: &ChainOp) -> Result<(), Trouble> {
    Ok(volume.carry_out(id, op)?)
}

#[test]
fn operations_on_the_chain() {
    let larger = SIZE + (8 << 20);
    let ops = [
        (snapshot_op("two"), "two"),
        (ChainOp::MarkRemoved { name: "one".into() }, "one"),
        (revert_op("one"), "one"),
        (
            ChainOp::Expand {
                name: Some("larger".into()),
                size: larger,
                created: "2026-11-20T06:03:39Z".into(),
            },
            "larger",
        ),
    ];
    for (op, last) in ops {
        at_every_step(
            fill_sample,
            |volume| carry_out(volume, 2, &op),
            |volume, done, what| {
                let reverted = done && matches!(op, ChainOp::Revert { .. });
                assert_eq!(
                    volume.blocks()[..9],
                    if reverted { [1, 1, 1, 1, 1, 1, 1, 1, 0] } else { SAMPLE },
                    "{what}"
                );
                assert_eq!(
                    names(volume).iter().rev().nth(1).map(String::as_str),
                    Some(if done { last } else { "one" })
                );
                volume.write(extent(0, 1), 1);
                if !done {
                    // The engine may also take it back.
                    volume.directory.abort(Instance(2)).unwrap_or_else(|e| panic!("{what}: {e}"));
                }
            },
        );
    }
}

/// Whoever marks zeroes while an operation is prepared has the mark in the volume.meta that it brings.
#[test]
fn a_mark_beside_a_prepared_snapshot() {
    at_every_step(
        |volume| {
            volume.write(extent(0, 8), 1);
            volume.snapshot(1, "one").unwrap();
            volume.directory.prepare(Instance(2), &snapshot_op("two")).unwrap();
        },
        |volume| {
            volume.directory.mark_zeroes()?;
            volume.store.marked();
            volume.zero(extent(4, 1));
            Ok(volume.commit(2)?)
        },
        |volume, done, what| {
            let marked = volume.store.has_zero_marks();
            assert_eq!(marked, done, "{what}");
            let meta = fs::read_to_string(volume.path().join("volume.meta")).unwrap();
            assert!(!marked || meta.contains("\"Rebuilding\":true"), "{what}: {meta}");
        },
    );
}

#[test]
fn folds() {
    for small in [false, true] {
        at_every_step(
            |volume| {
                fill_sample(volume);
                volume.write(extent(if small { 20 } else { 9 }, 30), 3);
                volume.snapshot(2, "two").unwrap();
                volume.write(extent(1, 1), 4);
                volume.zero(extent(3, 1));
                volume.remove(3, if small { "two" } else { "one" }).unwrap();
            },
            |volume| {
                let name = if small { "two" } else { "one" };
                if !names(volume).iter().any(|n| n == name) {
                    return Ok(());
                }
                volume.fold(name)?;
                Ok(())
            },
            |volume, done, what| {
                assert_eq!(volume.blocks()[..9], [1, 4, 2, 0, 0, 1, 1, 1, 0], "{what}");
                assert_eq!(names(volume).len(), if done { 2 } else { 3 }, "{what}");
                volume.write(extent(1, 1), 4);
            },
        );
    }
}

#[test]
fn records_and_zero_maps() {
    let epoch = |n: u32| Epoch {
        generation: Generation::from(u64::from(n)),
        id: Instance(n.into()),
        ..Epoch::default()
    };
    at_every_step(
        |volume| {
            fill_sample(volume);
            assert!(volume.directory.store_epoch(epoch(5)).unwrap());
        },
        |volume| {
            let out = vec![Outsider { replica: "b".into(), base: epoch(5) }];
            volume.directory.store_fence(Generation::from(6), Instance(6))?;
            assert!(volume.directory.store_epoch_and_outsiders(epoch(6), out)?);
            volume.directory.store_missed(&[(0, [1; 16])])?;
            volume.directory.store_settled("one")?;
            let map = volume.directory.make_zero_map("one")?.unwrap();
            volume.store.attach_zero_map(map);
            Ok(())
        },
        |volume, done, what| {
            assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
            let missed = volume.directory.missed().unwrap();
            assert!(
                !done || (missed.out.len() == 1 && missed.trails == [(0, [1; 16])]),
                "{what}: {missed:?}"
            );
        },
    );
}

#[test]
fn closing_and_use() {
    at_every_step(
        fill_sample,
        |volume| {
            volume.flush();
            let closing = volume.store.close();
            volume.directory.close_clean(closing)?;
            volume.directory.begin_use()?;
            Ok(())
        },
        |volume, _, what| {
            volume.write(extent(9, 1), 5);
            let meta = fs::read_to_string(volume.path().join("volume.meta")).unwrap();
            assert!(
                meta.contains("\"Dirty\":true") && meta.contains("\"Rebuilding\":true"),
                "{what}: {meta}"
            );
            assert!(!volume.path().join("engine/closed").exists(), "{what}");
            assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
        },
    );
}

/// Nothing is believed of a directory whose layers were half replaced.
#[test]
fn layers_that_are_replaced() {
    for keeps in [false, true] {
        at_every_step(
            fill_sample,
            |volume| {
                let chain = volume.directory.state().chain;
                let mut chain: Vec<_> =
                    chain.into_iter().filter(|l| l.name == "one" || l.name.is_empty()).collect();
                if chain.len() == 1 {
                    // It had to be emptied.
                    chain[0].parent.clear();
                }
                let parts = match keeps {
                    true => volume.directory.begin_catch_up(SIZE, &chain, &Keep::default())?,
                    false => volume.directory.begin_rebuild(SIZE, &chain)?,
                };
                volume.store.replace(parts);
                Ok(())
            },
            |volume, done, what| {
                let state = volume.directory.state();
                assert_eq!(state.rebuilding, done, "{what}");
                if done {
                    let all: Vec<_> = (0..9).map(|n| (BlockState::Data, SAMPLE[n])).collect();
                    volume.put("", 0, &all);
                }
                assert_eq!(volume.blocks()[..9], SAMPLE, "{what}");
            },
        );
    }
}

/// A larger volume's bitmap is written when the names have changed: it has its space before.
#[test]
fn an_expansion_has_the_space_for_its_bitmap() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("replica"));
    let op = ChainOp::Expand { name: None, size: 40 << 30, created: "2026-11-20T06:03:39Z".into() };
    volume.directory.prepare(Instance(1), &op).unwrap();
    let length = || fs::metadata(place.path().join("replica/engine/intent")).unwrap().len();
    let prepared = length();
    volume.commit(1).unwrap();
    assert_eq!((prepared, length()), (4 * 512, 4 * 512));
}

/// What the change of a fold's names needs is made before the first of them changes: a full disk only puts it off.
#[test]
fn the_names_of_a_fold_wait_for_space() {
    let place = temporary();
    let path = place.path().join("replica");
    let mut volume = Volume::create(&path);
    fill_sample(&mut volume);
    volume.remove(2, "one").unwrap();
    drop(volume);
    let tape = Arc::new(Tape::default());
    let mut volume = Volume::open_taped(&path, &tape).unwrap();
    let plan = volume.directory.begin_fold("one").unwrap();
    for _ in 0..2 {
        tape.full_after(0, false);
        let switched = volume.directory.switch_fold(&plan, Direction::IntoChild).map(drop);
        assert!(matches!(switched, Err(ChainError::NoSpace(_))), "{switched:?}");
        // The head may have been about to go into the snapshot before.
        let ready = volume.directory.ready_fold(&plan);
        assert!(matches!(ready, Err(ChainError::NoSpace(_))), "{ready:?}");
        tape.free();
        assert!(volume.directory.ready_fold(&plan).unwrap());
    }
    assert_eq!((names(&volume).len(), &volume.blocks()[..9]), (2, &SAMPLE[..]));
    drop(volume);
    assert_eq!(Volume::open(&path).unwrap().blocks()[..9], SAMPLE);
}
