//! Damaged and hostile directories: each kind has its own error, which names the file and says what to do; nothing is
//! changed, and reading offline refuses it, too.

use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

use lh_block::BLOCK;
use lh_rig::allocations;

use super::super::error::{Damage, OpenError};
use super::super::fs::Fs;
use super::super::offline::SnapshotView;
use super::super::qcow2::Qcow2Fault;
use super::super::record::{Closed, Records};
use super::volume::{SIZE, Volume, create_options, extent, temporary};

const HEAD: &str = "volume-head-002.img";
const ONE: &str = "volume-snap-one.img";
const TWO: &str = "volume-snap-two.img";

/// A directory as Longhorn leaves it: snapshots one and two, a head, no records of ours.
fn foreign(path: &Path) {
    ours(path);
    fs::remove_dir_all(path.join("engine")).unwrap();
}

/// The same, ours, closed cleanly.
fn ours(path: &Path) {
    let mut volume = Volume::create(path);
    volume.write(extent(0, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.write(extent(2, 2), 2);
    volume.snapshot(2, "two").unwrap();
    volume.write(extent(3, 1), 3);
    volume.close();
}

fn edit(path: &Path, name: &str, from: &str, to: &str) {
    let file = path.join(name);
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains(from), "{name} has no {from}");
    fs::write(&file, text.replacen(from, to, 1)).unwrap();
}

fn set_length(path: &Path, name: &str, length: u64) {
    fs::OpenOptions::new().write(true).open(path.join(name)).unwrap().set_len(length).unwrap();
}

/// Names, lengths and contents of small files: what a refusal must leave alone.
fn listing(path: &Path) -> Vec<(String, u64, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let stat = entry.path().symlink_metadata().unwrap();
        let content =
            if stat.is_file() && stat.len() < 1 << 17 { fs::read(entry.path()).unwrap() } else { Vec::new() };
        found.push((name, stat.len(), content));
    }
    found.sort();
    found
}

/// The error of both ways to open, which must be the same and change nothing.
fn refused(path: &Path) -> Damage {
    let before = listing(path);
    let offline = SnapshotView::open(path, None).map(drop).unwrap_err();
    let online = Volume::open(path).map(drop).unwrap_err();
    assert_eq!(listing(path), before, "a refused directory was changed: {online}");
    let text = online.to_string();
    assert!(text.len() > 60 && !text.contains('\n'), "one clear sentence: {text}");
    assert!(text.starts_with(path.to_str().unwrap()), "{text}");
    match (offline, online) {
        (OpenError::Damaged { damage: a, .. }, OpenError::Damaged { damage: b, .. }) => {
            assert_eq!(a, b);
            a
        }
        (a, b) => panic!("{a}; {b}"),
    }
}

fn after(damage: impl Fn(&Path)) -> Damage {
    let place = temporary();
    let path = place.path().join("replica");
    foreign(&path);
    damage(&path);
    refused(&path)
}

/// Longhorn opens a snapshot of no length, and reads nothing in it.
#[test]
fn a_layer_may_be_empty() {
    // With FIEMAP and without.
    for place in [temporary(), tempfile::tempdir().unwrap()] {
        let path = place.path().join("replica");
        foreign(&path);
        set_length(&path, ONE, 0);
        let expected = [0, 0, 2, 3, 0, 0, 0, 0, 0];
        let view = SnapshotView::open(&path, None).unwrap();
        for (block, byte) in (0..).zip(expected) {
            let mut bytes = [9; 4096];
            view.read_at(block * BLOCK, &mut bytes).unwrap();
            assert!(bytes.iter().all(|b| *b == byte), "block {block}");
        }
        drop(view);
        let mut volume = Volume::open(&path).unwrap();
        assert_eq!(volume.blocks()[..9], expected);
        let one = volume.store.layer("one").unwrap();
        assert_eq!(volume.store.layer_map(one, 0).unwrap().ranges, []);
        volume.remove(5, "one").unwrap();
        assert_eq!(volume.fold("one").unwrap().state().error, None);
        assert_eq!(volume.blocks()[..9], expected);
        volume.close();
        assert_eq!(Volume::open(&path).unwrap().blocks()[..9], expected);
    }
}

#[test]
fn the_sample_itself_opens() {
    let place = temporary();
    let path = place.path().join("replica");
    foreign(&path);
    assert_eq!(Volume::open(&path).unwrap().blocks()[..6], [1, 1, 2, 3, 1, 1]);
}

/// Beside the process of a replica nobody holds a lock, and below no lock keeps anybody from cutting a file off.
#[test]
fn what_a_file_has_lost_is_not_read_as_zeroes() {
    let place = temporary();
    let path = place.path().join("replica");
    ours(&path);
    let view = SnapshotView::open(&path, None).unwrap();
    set_length(&path, ONE, 2 * BLOCK);
    let mut bytes = [0; 4096];
    view.read_at(BLOCK, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 4096]);
    let lost = view.read_at(4 * BLOCK, &mut bytes).unwrap_err();
    assert_eq!(lost.kind(), std::io::ErrorKind::UnexpectedEof);
    assert!(lost.to_string().contains("cut off"), "{lost}");
    let out = tempfile::tempfile().unwrap();
    assert!(view.export(&out, &mut |_, _| ()).is_err());
    view.read_at(3 * BLOCK, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 4096], "another layer's");
}

#[test]
fn volume_meta() {
    let meta = |from: &'static str, to: &'static str| after(move |path| edit(path, "volume.meta", from, to));
    assert_eq!(meta("\"Size\":262144", "\"Size\":-4096"), Damage::SizeNotPositive(-4096));
    assert_eq!(meta("\"Size\":262144", "\"Size\":0"), Damage::SizeNotPositive(0));
    assert_eq!(meta("\"Size\":262144", "\"Size\":5000"), Damage::SizeUnaligned(5000));
    assert_eq!(meta("\"Size\":262144", "\"Size\":4611686018427387904"), Damage::SizeTooLarge(1 << 62));
    assert!(matches!(meta("\"Size\":262144", "\"Size\":99999999999999999999"), Damage::MetaFields { .. }));
    assert!(matches!(meta("\"Size\":262144", "\"Size\":\"262144\""), Damage::MetaFields { .. }));
    assert_eq!(meta("\"SectorSize\":512", "\"SectorSize\":4096"), Damage::SectorSize(4096));
    assert_eq!(meta("\"Error\":\"\"", "\"Error\":\"lost\""), Damage::NotedError("lost".into()));
    assert_eq!(meta(HEAD, "/etc/shadow"), Damage::HeadName("/etc/shadow".into()));
    assert_eq!(meta(HEAD, "../volume-head-000.img"), Damage::HeadName("../volume-head-000.img".into()));
    assert_eq!(meta(HEAD, "volume-head-../../x.img"), Damage::HeadName("volume-head-../../x.img".into()));
    assert_eq!(meta(HEAD, ONE), Damage::HeadName(ONE.into()));
    assert_eq!(meta(HEAD, "volume-head-009.img"), Damage::HeadMissing("volume-head-009.img".into()));
    assert_eq!(meta("\"Rebuilding\":false", "\"Rebuilding\":true"), Damage::Rebuilding);
    assert!(matches!(meta("\"Head\"", "\"Tail\""), Damage::MetaFields { .. }));
    assert!(matches!(meta("}", ""), Damage::MetaCutOff(file) if file == "volume.meta"));
    assert!(matches!(meta("{", "no"), Damage::MetaNotJson { .. }));
    assert!(matches!(
        meta("\"Parent\":\"volume-snap-two.img\"", "\"Parent\":\"\""),
        Damage::HeadParent { .. }
    ));
    let huge = after(|path| fs::write(path.join("volume.meta"), vec![b' '; 65 << 10]).unwrap());
    assert_eq!(huge, Damage::MetaTooLarge("volume.meta".into()));
    let nul = after(|path| fs::write(path.join("volume.meta"), [0; 200]).unwrap());
    assert!(matches!(nul, Damage::MetaNotJson { .. }));
    let link = after(|path| {
        fs::rename(path.join("volume.meta"), path.join("elsewhere")).unwrap();
        symlink("elsewhere", path.join("volume.meta")).unwrap();
    });
    assert_eq!(link, Damage::NotAFile("volume.meta".into()));
}

#[test]
fn volume_meta_missing() {
    for empty in [false, true] {
        let place = temporary();
        let path = place.path().join("replica");
        foreign(&path);
        if empty {
            fs::write(path.join("volume.meta"), b"").unwrap();
        } else {
            fs::remove_file(path.join("volume.meta")).unwrap();
        }
        SnapshotView::open(&path, Some("one")).unwrap();
        assert_eq!(path.join("volume.meta").exists(), empty, "reading offline made volume.meta");
        let volume = Volume::open(&path).unwrap();
        assert_eq!(volume.blocks()[..6], [1, 1, 2, 3, 1, 1]);
        let meta = fs::read_to_string(path.join("volume.meta")).unwrap();
        assert!(
            meta.contains(HEAD) && meta.contains(&format!("\"Size\":{SIZE}")) && meta.contains(TWO),
            "{meta}"
        );
    }
    let two = after(|path| {
        fs::remove_file(path.join("volume.meta")).unwrap();
        fs::copy(path.join(HEAD), path.join("volume-head-007.img")).unwrap();
    });
    assert_eq!(two, Damage::ManyHeads(format!("{HEAD}, volume-head-007.img")));
    let none = after(|path| {
        fs::remove_file(path.join("volume.meta")).unwrap();
        fs::remove_file(path.join(HEAD)).unwrap();
    });
    assert_eq!(none, Damage::NothingHere);
}

#[test]
fn layers() {
    let cut = after(|path| fs::write(path.join("volume-snap-one.img.meta"), "{\"Name\":\"vol").unwrap());
    assert_eq!(cut, Damage::MetaCutOff("volume-snap-one.img.meta".into()));
    let empty = after(|path| fs::write(path.join("volume-snap-one.img.meta"), "").unwrap());
    assert_eq!(empty, Damage::MetaCutOff("volume-snap-one.img.meta".into()));
    let meta = |name: &'static str, from: &'static str, to: &'static str| {
        after(move |path| edit(path, &format!("{name}.meta"), from, to))
    };
    assert!(matches!(meta(TWO, "\"Labels\":{", "\"Labels\":[{"), Damage::MetaFields { .. }));
    assert!(matches!(meta(TWO, "\"Labels\":{", "\"Labels\":}"), Damage::MetaNotJson { .. }));
    assert!(matches!(meta(TWO, "\"Removed\":false", "\"Removed\":0"), Damage::MetaFields { .. }));
    assert_eq!(meta(HEAD, "\"Removed\":false", "\"Removed\":true"), Damage::HeadRemoved(HEAD.into()));
    let missing = Damage::ParentMissing { file: TWO.into(), parent: "volume-snap-zero.img".into() };
    assert_eq!(meta(TWO, ONE, "volume-snap-zero.img"), missing);
    for name in ["../one.img", HEAD, "/volume-snap-one.img", "one"] {
        let wrong = Damage::ParentName { file: TWO.into(), parent: name.into() };
        assert_eq!(meta(TWO, ONE, name), wrong);
    }
    let own = "\"Parent\":\"volume-snap-one.img\"";
    assert!(matches!(meta(ONE, "\"Parent\":\"\"", own), Damage::Loop(_)));
    assert!(matches!(meta(ONE, "\"Parent\":\"\"", "\"Parent\":\"volume-snap-two.img\""), Damage::Loop(_)));
    let file = |damage: fn(&Path)| after(damage);
    assert_eq!(
        file(|path| fs::remove_file(path.join("volume-snap-one.img.meta")).unwrap()),
        Damage::MetaMissing(ONE.into())
    );
    assert_eq!(file(|path| fs::remove_file(path.join(ONE)).unwrap()), Damage::ImageMissing(ONE.into()));
    assert_eq!(file(|path| fs::remove_file(path.join(HEAD)).unwrap()), Damage::HeadMissing(HEAD.into()));
    assert_eq!(
        file(|path| fs::remove_file(path.join("volume-head-002.img.meta")).unwrap()),
        Damage::MetaMissing(HEAD.into())
    );
    let long = Damage::LayerTooLong { file: ONE.into(), length: SIZE + BLOCK, size: SIZE };
    assert_eq!(file(|path| set_length(path, ONE, SIZE + BLOCK)), long);
    let odd = Damage::LayerUnaligned { file: ONE.into(), length: SIZE - 100 };
    assert_eq!(file(|path| set_length(path, ONE, SIZE - 100)), odd);
    let short = Damage::HeadShort { file: HEAD.into(), length: BLOCK, size: SIZE };
    assert_eq!(file(|path| set_length(path, HEAD, BLOCK)), short);
    let link = file(|path| {
        fs::rename(path.join(ONE), path.join("elsewhere")).unwrap();
        symlink("elsewhere", path.join(ONE)).unwrap();
    });
    assert_eq!(link, Damage::NotAFile(ONE.into()));
    let directory = file(|path| {
        fs::remove_file(path.join(ONE)).unwrap();
        fs::create_dir(path.join(ONE)).unwrap();
    });
    assert_eq!(directory, Damage::NotAFile(ONE.into()));
    let many = file(|path| {
        for n in 0..249 {
            let name = format!("volume-snap-x{n}.img");
            fs::File::create(path.join(&name)).unwrap();
            fs::copy(path.join("volume-snap-one.img.meta"), path.join(format!("{name}.meta"))).unwrap();
        }
    });
    assert_eq!(many, Damage::TooManyLayers(252));
}

#[test]
fn backing_files() {
    let named = |path: &Path| {
        edit(path, "volume.meta", "\"BackingFilePath\":\"\"", "\"BackingFilePath\":\"../backing\"")
    };
    assert!(matches!(after(named), Damage::BackingMissing(_)));
    let with = |content: &'static [u8], length: u64| {
        after(move |path| {
            named(path);
            let file = fs::File::create(path.join("../backing")).unwrap();
            file.write_all_at(content, 0).unwrap();
            file.set_len(length).unwrap();
        })
    };
    let qcow2 = with(b"QFI\xfb", 4096);
    assert!(matches!(qcow2, Damage::BackingQcow2 { fault: Qcow2Fault::Version(0), .. }), "{qcow2}");
    assert!(matches!(with(b"raw", 1000), Damage::BackingLength { length: 1000, .. }));
    assert!(matches!(with(b"raw", SIZE + 512), Damage::BackingLength { .. }));
    assert!(matches!(with(b"", 0), Damage::BackingLength { .. }));
    let directory = after(|path| {
        named(path);
        fs::create_dir(path.join("../backing")).unwrap();
    });
    assert!(matches!(directory, Damage::BackingDirectory(_)));
}

/// A raw backing file that ends within a block, in a directory of its own.
#[test]
fn a_backing_file_lies_below_all() {
    // The replica on a disk, the backing file in RAM, where FIEMAP is missing.
    let (place, elsewhere) = (tempfile::tempdir().unwrap(), temporary());
    let path = place.path().join("replica");
    foreign(&path);
    let named = format!("\"BackingFilePath\":\"{}\"", elsewhere.path().display());
    edit(&path, "volume.meta", "\"BackingFilePath\":\"\"", &named);
    let backing = fs::File::create(elsewhere.path().join("image")).unwrap();
    backing.write_all_at(&vec![9; 10 * 4096 + 512], 0).unwrap();
    let mut volume = Volume::open(&path).unwrap();
    let mut bytes = volume.read(extent(0, 12));
    assert!(
        bytes[8 * 4096..10 * 4096 + 512].iter().all(|b| *b == 9)
            && bytes[10 * 4096 + 512..].iter().all(|b| *b == 0)
    );
    assert_eq!((bytes[0], bytes[3 * 4096]), (1, 3));
    volume.zero(extent(9, 1));
    volume.flush();
    drop(volume);
    let view = SnapshotView::open(&path, None).unwrap();
    view.read_at(0, &mut bytes).unwrap();
    assert!(bytes[8 * 4096..9 * 4096].iter().all(|b| *b == 9), "the zero covers one block");
    assert!(bytes[9 * 4096..10 * 4096].iter().all(|b| *b == 0));
    assert!(bytes[10 * 4096..10 * 4096 + 512].iter().all(|b| *b == 9));
}

/// What an interrupted snapshot of Longhorn leaves: the new head, and the old head under the snapshot's name as well.
/// Longhorn removes a snapshot's file first, and is killed.
#[test]
fn a_removed_snapshots_meta_without_its_file() {
    let place = temporary();
    let path = place.path().join("r");
    foreign(&path);
    let meta = fs::read_to_string(path.join("volume-snap-one.img.meta")).unwrap();
    let gone = path.join("volume-snap-gone.img.meta");
    fs::write(&gone, &meta).unwrap();
    assert_eq!(refused(&path), Damage::ImageMissing("volume-snap-gone.img".into()), "it is not removed");
    fs::write(&gone, meta.replace("\"Removed\":false", "\"Removed\":true")).unwrap();
    assert!(SnapshotView::open(&path, None).is_ok());
    let volume = Volume::open(&path).unwrap();
    assert_eq!(volume.blocks()[..5], [1, 1, 2, 3, 1]);
    assert!(!gone.exists());
    drop(volume);
    // A layer stands on it.
    let place = temporary();
    let path = place.path().join("r");
    foreign(&path);
    fs::remove_file(path.join(ONE)).unwrap();
    edit(&path, "volume-snap-one.img.meta", "\"Removed\":false", "\"Removed\":true");
    let missing = Damage::ParentMissing { file: TWO.into(), parent: ONE.into() };
    assert_eq!(refused(&path), missing);
}

/// A creation that cannot take away what another one has left says so.
#[test]
fn what_cannot_be_removed_is_in_the_way() {
    let place = temporary();
    let path = place.path().join("r");
    fs::create_dir_all(path.join("engine/creating")).unwrap();
    let made = super::super::Directory::create(&path, &create_options(SIZE));
    assert!(matches!(made.map(drop), Err(OpenError::NotEmpty(_))));
}

/// Half a creation stays what it is as long as a part of it is there: without the word for it, it would be somebody's volume.
#[test]
fn half_a_creation_that_cannot_be_removed_is_called_unfinished() {
    for left in ["volume.meta", "engine/intent"] {
        let place = temporary();
        let path = place.path().join("r");
        let tape = std::sync::Arc::new(super::tape::Tape::default());
        tape.stop_after(40);
        let fs = Fs { tape: Some(tape) };
        assert!(super::super::create::create(&path, &create_options(SIZE), fs).is_err());
        let _ = fs::remove_file(path.join(left));
        fs::create_dir(path.join(left)).unwrap();
        let create = || super::super::Directory::create(&path, &create_options(SIZE)).map(drop);
        assert!(matches!(create(), Err(OpenError::NotEmpty(_))));
        let opened = Volume::open(&path).map(drop).unwrap_err();
        assert!(matches!(opened, OpenError::Damaged { damage: Damage::Unfinished, .. }), "{left}: {opened}");
        fs::remove_dir(path.join(left)).unwrap();
        create().unwrap();
    }
}

/// Longhorn folds a layer into the removed snapshot below, gives the snapshot's file the layer's name, too, and takes the
/// snapshot's own name away then. The layers have ids of ours here: the directory was ours, and released.
#[test]
fn an_interrupted_fold_of_longhorn() {
    for already in [0, 1, 2, 3] {
        let place = temporary();
        let path = place.path().join("replica");
        foreign(&path);
        let one = "volume-snap-one.img.meta";
        edit(&path, one, "\"Removed\":false", "\"Removed\":true");
        let file = fs::OpenOptions::new().write(true).open(path.join(ONE)).unwrap();
        file.write_all_at(&[2; 2 << 12], 2 * BLOCK).unwrap();
        drop(file);
        fs::remove_file(path.join(TWO)).unwrap();
        fs::hard_link(path.join(ONE), path.join(TWO)).unwrap();
        if already > 0 {
            edit(&path, "volume-snap-two.img.meta", ONE, "");
        }
        if already > 1 {
            fs::remove_file(path.join(ONE)).unwrap();
        }
        if already > 2 {
            fs::remove_file(path.join(one)).unwrap();
        }
        let volume = Volume::open(&path).unwrap();
        assert_eq!(volume.blocks()[..5], [1, 1, 2, 3, 1], "{already}");
        let names: Vec<String> = volume.directory.state().chain.into_iter().map(|l| l.name).collect();
        assert_eq!(names, ["two", ""], "{already}");
        drop(volume);
        assert!(!path.join(ONE).exists() && !path.join(one).exists());
        let volume = Volume::open(&path).unwrap();
        assert_eq!(volume.blocks()[..5], [1, 1, 2, 3, 1], "{already}: again");
        drop(volume);
        let snapshot = SnapshotView::open(&path, Some("two")).unwrap();
        let mut bytes = vec![0; 5 << 12];
        snapshot.read_at(0, &mut bytes).unwrap();
        assert!(bytes.chunks(1 << 12).map(|block| block[0]).eq([1, 1, 2, 2, 1]), "{already}");
    }
}

#[test]
fn an_interrupted_snapshot_of_longhorn() {
    for with_meta in [false, true] {
        let place = temporary();
        let path = place.path().join("replica");
        foreign(&path);
        let new = fs::File::create(path.join("volume-head-003.img")).unwrap();
        new.set_len(SIZE).unwrap();
        fs::copy(path.join("volume-head-002.img.meta"), path.join("volume-head-003.img.meta")).unwrap();
        fs::hard_link(path.join(HEAD), path.join("volume-snap-new.img")).unwrap();
        if with_meta {
            fs::hard_link(path.join("volume-head-002.img.meta"), path.join("volume-snap-new.img.meta"))
                .unwrap();
        }
        assert_eq!(SnapshotView::open(&path, None).unwrap().layers().len(), 3);
        let mut volume = Volume::open(&path).unwrap();
        assert_eq!(volume.blocks()[..6], [1, 1, 2, 3, 1, 1]);
        assert!(!path.join("volume-snap-new.img").exists() && !path.join("volume-head-003.img").exists());
        volume.snapshot(7, "new").unwrap();
    }
}

fn ours_after(damage: impl Fn(&Path)) -> Damage {
    let place = temporary();
    let path = place.path().join("replica");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.zero(extent(1, 3));
    volume.flush();
    drop(volume);
    damage(&path);
    match Volume::open(&path).map(drop).unwrap_err() {
        OpenError::Damaged { damage, .. } => damage,
        other => panic!("{other}"),
    }
}

fn zero_map(path: &Path, with_marks: bool) -> std::path::PathBuf {
    let maps = fs::read_dir(path.join("engine")).unwrap().map(|e| e.unwrap().path());
    maps.filter(|p| p.file_name().unwrap().to_str().unwrap().starts_with("zero-"))
        .find(|p| (p.metadata().unwrap().len() > 512) == with_marks)
        .unwrap()
}

fn flip(path: &Path, offset: u64) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
}

#[test]
fn our_own_files() {
    for record in ["identity", "fence", "epoch", "chain", "layers"] {
        let rotten = ours_after(|path| fs::write(path.join("engine").join(record), "rotten").unwrap());
        assert_eq!(rotten, Damage::Record(record.into()));
    }
    let page = ours_after(|path| flip(&zero_map(path, true), 600));
    assert!(matches!(page, Damage::ZeroPage { page: 1, .. }));
    assert!(matches!(ours_after(|path| flip(&zero_map(path, true), 9)), Damage::ZeroHeader(_)));
    assert!(matches!(
        ours_after(|path| fs::remove_file(zero_map(path, true)).unwrap()),
        Damage::ZeroMissing(_)
    ));
    assert!(matches!(
        ours_after(|path| fs::remove_file(zero_map(path, false)).unwrap()),
        Damage::ZeroMissing(_)
    ));
    // A layer that was replaced by a copy has lost its id, and its marks with it.
    let replaced = ours_after(|path| {
        fs::remove_file(path.join("engine/layers")).unwrap();
        let head = path.join("volume-head-001.img");
        let copy = fs::read(&head).unwrap();
        fs::remove_file(&head).unwrap();
        fs::write(&head, copy).unwrap();
    });
    assert!(matches!(replaced, Damage::ZeroOrphan(_)));
    // Without volume.meta nothing says whether our marks still count.
    let lost = ours_after(|path| fs::remove_file(path.join("volume.meta")).unwrap());
    assert_eq!(lost, Damage::MarksWithoutVolume);
    // Longhorn replaces volume.meta when it opens the directory, and keeps its `Rebuilding`.
    let taken = ours_after(|path| {
        let meta = fs::read(path.join("volume.meta")).unwrap();
        fs::remove_file(path.join("volume.meta")).unwrap();
        fs::write(path.join("volume.meta"), meta).unwrap();
    });
    assert_eq!(taken, Damage::Rebuilding);
    let unfinished = ours_after(|path| {
        let good = fs::read_to_string(path.join("engine/identity")).unwrap();
        assert!(good.starts_with("longhorn identity 1 "));
        fs::write(path.join("engine/creating"), "longhorn creating 1 ").unwrap();
    });
    assert_eq!(unfinished, Damage::Record("creating".into()));
}

/// What another program writes into a cleanly closed directory makes it an import; so does a copy.
#[test]
fn written_by_others() {
    let open = |change: fn(&Path)| {
        let place = temporary();
        let path = place.path().join("replica");
        ours(&path);
        let clean = Volume::open(&path).unwrap();
        assert!(clean.directory.state().clean && !clean.directory.state().imported);
        drop(clean);
        change(&path);
        let volume = Volume::open(&path).unwrap();
        let state = volume.directory.state();
        drop(volume);
        // It is remembered until an epoch is stored.
        let mut again = Volume::open(&path).unwrap();
        assert_eq!(again.directory.state().imported, state.imported);
        assert!(again.directory.store_epoch(lh_block::Epoch::default()).unwrap());
        drop(again);
        assert!(!Volume::open(&path).unwrap().directory.state().imported);
        (state.imported, state.clean)
    };
    assert_eq!(open(|_| {}), (false, true));
    let write = |path: &Path| {
        let head = fs::OpenOptions::new().write(true).open(path.join(HEAD)).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        head.write_all_at(&[5], 0).unwrap();
    };
    assert_eq!(open(write), (true, false));
    let punch = |path: &Path| {
        let head = fs::OpenOptions::new().write(true).open(path.join(HEAD)).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        lh_ring::sys::punch_hole(&head, 0, 4096).unwrap();
    };
    assert_eq!(open(punch), (true, false));
    // Nobody has written anything.
    let label = |path: &Path| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let layers = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        for layer in layers.filter(|path| path.extension().is_some_and(|e| e == "img")) {
            let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o640);
            fs::set_permissions(layer, permissions).unwrap();
        }
    };
    assert_eq!(open(label), (false, true));
    // An older program noted no more than the ctime.
    let label_of_older = |path: &Path| {
        let records = Records { directory: path };
        let mut closed = records.load::<Closed>().unwrap().unwrap();
        closed.files.iter_mut().for_each(|file| file.mtime = None);
        records.store(&Fs::default(), &closed).unwrap();
        assert!(Volume::open(path).unwrap().directory.state().clean);
        let mut closed = records.load::<Closed>().unwrap().unwrap();
        closed.files.iter_mut().for_each(|file| (file.mtime, file.ctime) = (None, file.ctime - 1));
        records.store(&Fs::default(), &closed).unwrap();
    };
    assert_eq!(open(label_of_older), (true, false));
    let replace = |path: &Path| {
        let meta = fs::read(path.join("volume.meta")).unwrap();
        fs::remove_file(path.join("volume.meta")).unwrap();
        fs::write(path.join("volume.meta"), meta).unwrap();
    };
    assert_eq!(open(replace), (true, false));
    // A rotten record of the close is no proof of anything.
    assert_eq!(open(|path| fs::write(path.join("engine/closed"), "?").unwrap()), (false, false));
    // Intent marks are believed when in doubt.
    let place = temporary();
    let path = place.path().join("replica");
    ours(&path);
    fs::write(path.join("engine/intent"), "?").unwrap();
    assert_eq!(Volume::open(&path).unwrap().store.intent(), [lh_block::Extent::new(0, SIZE)]);
}

/// Copies lose what a copy loses: inodes, space that was never written, with tar also attributes. They read the same, and
/// are imports.
#[test]
fn carried_away_and_back() {
    use std::process::Command;
    let place = tempfile::tempdir().unwrap();
    let (path, copy) = (place.path().join("replica"), place.path().join("copy"));
    ours(&path);
    let expected = Volume::open(&path).unwrap().blocks();
    let cp = |flags: &str| {
        let done = Command::new("cp").args(["-a", flags]).args([&path, &copy]).status();
        assert!(done.unwrap().success());
    };
    let tar = || {
        let (archive, top) = (place.path().join("tar"), place.path());
        let pack = Command::new("tar").arg("-cSf").arg(&archive).arg("-C").arg(top).arg("replica").status();
        fs::create_dir(&copy).unwrap();
        let unpack = Command::new("tar")
            .arg("-xf")
            .arg(&archive)
            .arg("-C")
            .arg(&copy)
            .arg("--strip-components=1")
            .status();
        assert!(pack.unwrap().success() && unpack.unwrap().success());
    };
    let (full, tight) = (|| cp("--sparse=auto"), || cp("--sparse=always"));
    let ways: [&dyn Fn(); 3] = [&full, &tight, &tar];
    for carry in ways {
        carry();
        for _ in 0..2 {
            let volume = Volume::open(&copy).unwrap();
            assert!(volume.directory.state().imported);
            assert_eq!(volume.blocks(), expected);
        }
        fs::remove_dir_all(&copy).unwrap();
    }
}

/// Longhorn replaces volume.meta whenever it opens a directory, and knows no marks of ours: where it has written, they
/// say nothing any more.
#[test]
fn a_week_under_longhorn() {
    let place = temporary();
    let path = place.path().join("replica");
    let mut volume = Volume::create(&path);
    volume.write(extent(0, 8), 1);
    volume.snapshot(1, "one").unwrap();
    volume.zero(extent(2, 2));
    assert_eq!(volume.blocks()[..5], [1, 1, 0, 0, 1]);
    volume.close();
    let meta = fs::read_to_string(path.join("volume.meta")).unwrap();
    assert!(meta.contains("\"Rebuilding\":true"), "the files alone must not be believed: {meta}");
    // Somebody has taken that on himself.
    fs::remove_file(path.join("volume.meta")).unwrap();
    fs::write(path.join("volume.meta"), meta.replace("\"Rebuilding\":true", "\"Rebuilding\":false")).unwrap();
    let head = fs::OpenOptions::new().write(true).open(path.join("volume-head-001.img")).unwrap();
    head.write_all_at(&[9; 4096], 2 * BLOCK).unwrap();
    drop(head);
    for _ in 0..2 {
        let volume = Volume::open(&path).unwrap();
        assert!(volume.directory.state().imported);
        assert_eq!(volume.blocks()[2], 9, "a mark hides what was written later");
    }
}

#[test]
fn an_extent_that_was_never_written() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    let allocate = |path: &Path| {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        super::super::disk::allocate(&file, 0, 3 * BLOCK).unwrap();
    };
    // Ours: what a power cut left of a write that was never flushed. A hole; and one for Longhorn, too, when closed.
    ours(&path);
    Volume::open(&path).unwrap().directory.begin_use().unwrap();
    allocate(&path.join(HEAD));
    let mut volume = Volume::open(&path).unwrap();
    assert_eq!(volume.blocks()[..6], [1, 1, 2, 3, 1, 1]);
    volume.close();
    let view = SnapshotView::open(&path, None).unwrap();
    let mut byte = [0];
    view.read_at(0, &mut byte).unwrap();
    assert_eq!(byte, [1]);
    drop(view);
    // Another program's: zeroes that hide what lies below, before and after the import.
    fs::remove_dir_all(path.join("engine")).unwrap();
    SnapshotView::open(&path, None).unwrap().read_at(0, &mut byte).unwrap();
    assert_eq!(byte, [1], "an extent was left that others take for data");
    allocate(&path.join(HEAD));
    SnapshotView::open(&path, None).unwrap().read_at(0, &mut byte).unwrap();
    assert_eq!(byte, [0]);
    for _ in 0..2 {
        volume = Volume::open(&path).unwrap();
        assert_eq!(volume.blocks()[..6], [0, 0, 0, 3, 1, 1]);
        drop(volume);
    }
}

#[test]
fn creating_where_something_is() {
    let place = temporary();
    let path = place.path().join("replica");
    let create =
        |size| super::super::create::create(&path, &create_options(size), Default::default()).map(drop);
    for size in [0, 100, 4097] {
        assert!(matches!(create(size), Err(OpenError::BadSize(n)) if n == size));
    }
    let err = create(1 << 62).unwrap_err();
    assert!(matches!(err, OpenError::TooLarge { .. }), "{err}");
    assert!(!path.exists(), "a refused creation left something");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("letter"), "dear").unwrap();
    assert!(matches!(create(SIZE), Err(OpenError::NotEmpty(_))));
    assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
    fs::remove_file(path.join("letter")).unwrap();
    create(SIZE).unwrap();
    assert!(matches!(create(SIZE), Err(OpenError::NotEmpty(_))));
    Volume::open(&path).unwrap();
    let file = place.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(Volume::open(&file).unwrap_err(), OpenError::NoDirectory(_)));
    assert!(matches!(Volume::open(&place.path().join("nowhere")).unwrap_err(), OpenError::NoDirectory(_)));
}

/// A file system with a limit below the size: ext4 holds files of just under 16 TiB.
#[test]
fn a_size_beyond_the_file_system() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("replica");
    let size = 1 << 49;
    match super::super::create::create(&path, &create_options(size), Default::default()) {
        Err(OpenError::TooLarge { limit, size: asked, .. }) => {
            assert!(asked == size && limit < size && limit % BLOCK == 0);
            assert!(!path.exists());
            Volume::create_sized(&path, limit);
        }
        Err(other) => panic!("{other}"),
        Ok(_) => assert!(path.exists()),
    }
}

/// Of a replica whose state fits no message no engine can make any use.
#[test]
fn snapshots_of_which_nobody_could_be_told_are_refused() {
    use super::super::error::ChainError;
    use lh_block::Instance;
    use lh_wire::{ChainOp, MAX_PAYLOAD};
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("replica"));
    let labelled = |n: u128| ChainOp::Snapshot {
        name: format!("s{n}"),
        user_created: true,
        created: String::new(),
        labels: [("k".to_owned(), "v".repeat(60_000))].into(),
    };
    let refused = (1..30).find_map(|n| match volume.directory.prepare(Instance(n), &labelled(n)) {
        Ok(()) => {
            volume.commit(n).unwrap();
            None
        }
        Err(e) => Some(e),
    });
    assert!(matches!(refused, Some(ChainError::ChainTooLong { .. })), "{refused:?}");
    // Others are taken.
    volume.snapshot(99, "plain").unwrap();
    let told = serde_json::to_vec(&volume.directory.state()).unwrap().len();
    assert!((500_000..MAX_PAYLOAD as usize - 400_000).contains(&told), "{told}");
}

#[test]
fn chain_operations_that_are_refused() {
    use super::super::error::ChainError;
    use lh_block::Instance;
    use lh_wire::ChainOp;
    let place = temporary();
    let path = place.path().join("replica");
    let mut volume = Volume::create(&path);
    volume.snapshot(1, "one").unwrap();
    assert!(matches!(volume.snapshot(2, "one"), Err(ChainError::NameTaken(_))));
    for name in ["", "a/b", "..", "-x", "a b"] {
        assert!(matches!(volume.snapshot(2, name), Err(ChainError::Name(_))), "{name:?}");
    }
    let long = ChainOp::Snapshot {
        name: "long".into(),
        user_created: true,
        created: String::new(),
        labels: [("k".to_owned(), "v".repeat(70_000))].into(),
    };
    assert!(matches!(volume.directory.prepare(Instance(2), &long), Err(ChainError::LabelsTooLong(_))));
    let remove = |name: &str| ChainOp::MarkRemoved { name: name.into() };
    assert!(matches!(volume.directory.prepare(Instance(2), &remove("two")), Err(ChainError::NoSnapshot(_))));
    assert!(matches!(volume.directory.prepare(Instance(2), &remove("")), Err(ChainError::NoSnapshot(_))));
    assert!(matches!(volume.directory.commit(Instance(2)), Err(ChainError::NotPrepared(_))));
    volume.directory.prepare(Instance(3), &remove("one")).unwrap();
    assert!(matches!(volume.snapshot(4, "two"), Err(ChainError::OtherPrepared(Instance(3)))));
    volume.directory.abort(Instance(9)).unwrap();
    volume.commit(3).unwrap();
    assert!(matches!(volume.directory.abort(Instance(3)), Err(ChainError::Committed(_))));
    volume.commit(3).unwrap();
    assert!(volume.directory.begin_rebuild(SIZE, &[]).is_err());
}

/// Longhorn opens 250 layers; ours are as many, and opening costs what each of them takes, not what each takes beside all
/// others.
#[test]
fn the_250th_snapshot_is_refused() {
    use super::super::error::ChainError;
    let place = temporary();
    let path = place.path().join("replica");
    let mut volume = Volume::create(&path);
    let mut of_half = 0;
    for n in 0..249_u8 {
        if n == 124 {
            let path = volume.close();
            (of_half, volume) = allocations::during(|| Volume::open(&path).unwrap());
        }
        volume.write(extent(u64::from(n % 60), 1), n % 250 + 1);
        volume.snapshot(u128::from(n), &format!("s{n}")).unwrap();
    }
    assert!(matches!(volume.snapshot(999, "more"), Err(ChainError::TooMany(249))));
    volume.write(extent(63, 1), 7);
    volume.zero(extent(0, 1));
    let blocks = volume.blocks();
    let path = volume.close();
    let (of_all, volume) = allocations::during(|| Volume::open(&path).unwrap());
    assert!(of_all < 3 * of_half, "{of_all} allocations for 250 layers, {of_half} for 125");
    assert_eq!(volume.blocks(), blocks);
    assert_eq!((blocks[0], blocks[63], blocks[8]), (0, 7, 249));
}
