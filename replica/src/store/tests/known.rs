//! A layer's file that was cut off or replaced after an unclean stop is noticed, and what no change of the layers breaks is not taken
//! for that.

use std::fs;
use std::path::Path;

use lh_block::BLOCK;
use lh_wire::Keep;

use super::super::error::{Damage, OpenError};
use super::super::known::Known;
use super::super::offline::SnapshotView;
use super::super::record::{Record, Records};
use super::super::survey::survey;
use super::volume::{SIZE, Volume, extent, revert_op, temporary};

const ONE: &str = "volume-snap-one.img";
const TWO: &str = "volume-snap-two.img";

/// Snapshots one and two, a head, and a process that was killed.
fn killed(path: &Path) {
    let mut volume = Volume::create(path);
    volume.write(extent(0, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(2, 2), 2);
    volume.snapshot(2, "two").unwrap();
    volume.write(extent(3, 1), 3);
    volume.flush();
}

fn cut(path: &Path, name: &str, length: u64) {
    fs::OpenOptions::new().write(true).open(path.join(name)).unwrap().set_len(length).unwrap();
}

/// Another file, without what makes the layer's file known.
fn replace(path: &Path, name: &str) {
    let bytes = fs::read(path.join(name)).unwrap();
    fs::remove_file(path.join(name)).unwrap();
    fs::write(path.join(name), bytes).unwrap();
}

/// What each way to read the directory says, which is the same.
fn refused(path: &Path) -> Damage {
    let errors = [
        Volume::open(path).map(drop).unwrap_err(),
        SnapshotView::open(path, None).map(drop).unwrap_err(),
        survey(path).map(drop).unwrap_err(),
    ];
    let damages = errors.map(|error| match error {
        OpenError::Damaged { damage, .. } => damage,
        other => panic!("{other}"),
    });
    assert!(damages[0] == damages[1] && damages[0] == damages[2], "{damages:?}");
    let text = damages[0].to_string();
    assert!(text.contains("let it be rebuilt"), "{text}");
    damages[0].clone()
}

#[test]
fn a_layer_that_was_cut_off_is_not_read_as_holes() {
    for (name, length) in [(ONE, BLOCK), (ONE, 0), (TWO, SIZE - BLOCK)] {
        let place = temporary();
        let path = place.path().join("replica");
        killed(&path);
        cut(&path, name, length);
        assert_eq!(refused(&path), Damage::LayerShort { file: name.into(), length, known: SIZE });
    }
}

/// Who has changed it behind a clean close may be another program, whose bytes count; but none cuts a layer off.
#[test]
fn a_layer_that_was_cut_off_behind_a_clean_close_is_not_read_as_holes() {
    for (name, length) in [(ONE, BLOCK), (TWO, SIZE - BLOCK)] {
        let place = temporary();
        let path = place.path().join("replica");
        killed(&path);
        Volume::open(&path).unwrap().close();
        cut(&path, name, length);
        assert_eq!(refused(&path), Damage::LayerShort { file: name.into(), length, known: SIZE });
        // Put back from a copy, it is what is there, whoever has written it.
        replace(&path, name);
        cut(&path, name, SIZE);
        assert!(survey(&path).unwrap().imported);
        drop(SnapshotView::open(&path, None).unwrap());
        drop(Volume::open(&path).unwrap());
    }
}

#[test]
fn a_layer_that_was_replaced_is_not_believed() {
    for name in [ONE, TWO] {
        let place = temporary();
        let path = place.path().join("replica");
        killed(&path);
        replace(&path, name);
        assert_eq!(refused(&path), Damage::LayerReplaced(name.into()));
    }
    // One layer in another one's place.
    let place = temporary();
    let path = place.path().join("replica");
    killed(&path);
    let other = temporary();
    let elsewhere = other.path().join("replica");
    killed(&elsewhere);
    fs::remove_file(path.join(ONE)).unwrap();
    fs::rename(elsewhere.join(ONE), path.join(ONE)).unwrap();
    assert_eq!(refused(&path), Damage::LayerReplaced(ONE.into()));
}

#[test]
fn of_an_import_the_layers_are_known_by_their_names() {
    let place = temporary();
    let path = place.path().join("replica");
    killed(&path);
    fs::remove_dir_all(path.join("engine")).unwrap();
    for name in [ONE, TWO] {
        replace(&path, name);
    }
    // As after an expansion by Longhorn: an older layer is shorter.
    cut(&path, ONE, SIZE / 2);
    drop(Volume::open(&path).unwrap());
    drop(Volume::open(&path).unwrap());
    cut(&path, ONE, SIZE / 4);
    let known = SIZE / 2;
    assert_eq!(refused(&path), Damage::LayerShort { file: ONE.into(), length: SIZE / 4, known });
}

#[test]
fn a_directory_of_an_older_program_opens_and_is_known_from_then_on() {
    let place = temporary();
    let path = place.path().join("replica");
    killed(&path);
    fs::remove_file(path.join("engine").join(Known::NAME)).unwrap();
    drop(Volume::open(&path).unwrap());
    cut(&path, ONE, BLOCK);
    assert!(matches!(refused(&path), Damage::LayerShort { .. }));
}

/// A change of the layers.
type Change = (&'static str, fn(&mut Volume));

const CHANGES: [Change; 8] = [
    ("a snapshot", |v| v.snapshot(11, "three").unwrap()),
    ("an expansion", |v| v.expand(12, 2 * SIZE).unwrap()),
    ("a revert", |v| v.carry_out(13, &revert_op("one")).unwrap()),
    ("a fold into the child", |v| {
        v.remove(14, "one").unwrap();
        v.write(extent(0, 8), 4);
        v.fold("one").unwrap();
    }),
    ("a fold of the one below the head", |v| {
        v.remove(15, "two").unwrap();
        v.fold("two").unwrap();
    }),
    ("a fold after an expansion", |v| {
        v.expand(16, 2 * SIZE).unwrap();
        v.remove(17, "two").unwrap();
        v.fold("two").unwrap();
    }),
    ("a rebuild", |v| {
        let chain = v.directory.state().chain;
        drop(v.directory.begin_rebuild(SIZE, &chain).unwrap());
    }),
    ("a rebuild that keeps layers", |v| {
        let chain = v.directory.state().chain;
        drop(v.directory.begin_catch_up(SIZE, &chain, &Keep::default()).unwrap());
    }),
];

/// A crash may come between a change and its record; and a directory is moved with all that is in it.
#[test]
fn no_change_of_the_layers_is_taken_for_damage() {
    for (what, change) in CHANGES {
        let place = temporary();
        let path = place.path().join("replica");
        killed(&path);
        let record = path.join("engine").join(Known::NAME);
        let before = fs::read(&record).unwrap();
        let mut volume = Volume::open(&path).unwrap();
        change(&mut volume);
        let layers: Vec<(String, u64)> =
            volume.directory.state().chain.into_iter().map(|l| (l.name, l.length)).collect();
        drop(volume);
        let is_same = what == "a rebuild that keeps layers";
        assert_eq!(fs::read(&record).unwrap() == before, is_same, "{what} is noted");
        let opens = || {
            let volume = Volume::open(&path).unwrap_or_else(|e| panic!("{what}: {e}"));
            let found = volume.directory.state().chain.into_iter().map(|l| (l.name, l.length));
            assert_eq!(found.collect::<Vec<_>>(), layers, "{what}");
        };
        opens();
        if !what.contains("rebuild") && !what.contains("after") {
            fs::write(&record, &before).unwrap();
            opens();
            assert_ne!(fs::read(&record).unwrap(), before, "{what} is noted by who comes next");
        }
        for layer in layers.iter().filter(|(name, _)| !name.is_empty()) {
            cut(&path, &format!("volume-snap-{}.img", layer.0), layer.1 - BLOCK);
            let Err(OpenError::Damaged { damage, .. }) = Volume::open(&path).map(drop) else {
                panic!("{what}: {} is cut off", layer.0);
            };
            assert!(matches!(damage, Damage::LayerShort { .. }), "{what}: {damage}");
            cut(&path, &format!("volume-snap-{}.img", layer.0), layer.1);
        }
    }
}

/// While layers are replaced nothing is known of them, whatever becomes of the process.
#[test]
fn layers_that_are_being_replaced_are_not_known() {
    let place = temporary();
    let path = place.path().join("replica");
    killed(&path);
    let mut volume = Volume::open(&path).unwrap();
    drop(volume.directory.say_rebuilding(SIZE, "emptying").unwrap());
    drop(volume);
    let records = Records { directory: &path };
    assert!(records.load::<Known>().unwrap().is_none());
    assert_eq!(Volume::open(&path).unwrap().directory.state().chain.len(), 1);
    assert!(records.load::<Known>().unwrap().is_some());
}
