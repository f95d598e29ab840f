//! Directories written by Longhorn open here, and every head and snapshot reads as it did there.
//!
//! Each fixture is unpacked on the file system of the temporary directory, and copied to tmpfs, where extents come from
//! SEEK_DATA. The bytes are read twice: without an engine's hands on the directory ([`SnapshotView`]), which must not
//! change it, and as the replica process reads them ([`Store`]), which takes the directory over.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lh_block::Extent;
use replica::store::{Damage, Directory, OpenError, OpenOptions, SnapshotView, Source, Store};
use serde_json::Value;
use sha2::{Digest, Sha256};

const OPTIONS: OpenOptions = OpenOptions { lock_wait: Duration::from_secs(5) };

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("tests/fixtures")
}

struct Fixture {
    expected: Value,
    _keep: tempfile::TempDir,
    replica: PathBuf,
}

fn unpack(name: &str, place: Option<&str>) -> Fixture {
    let from = fixtures().join(format!("replica-{name}"));
    let expected = serde_json::from_slice(&fs::read(from.join("expected.json")).unwrap()).unwrap();
    let keep = match place {
        Some(place) => tempfile::tempdir_in(place).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let archive = from.join(format!("replica-{name}.tar.xz"));
    let done = Command::new("tar").arg("-xJf").arg(archive).arg("-C").arg(keep.path()).status().unwrap();
    assert!(done.success(), "tar unpacks {name}");
    let replica = keep.path().join("replica");
    drop_preallocation(&replica);
    Fixture { expected, _keep: keep, replica }
}

/// XFS allocates ahead of what tar writes, and leaves extents that Longhorn would take for data. No fixture has one.
fn drop_preallocation(replica: &Path) {
    use lh_ring::sys;
    for entry in fs::read_dir(replica).unwrap() {
        let path = entry.unwrap().path();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let (mut found, mut at) = (Vec::new(), 0);
        while path.extension().is_some_and(|e| e == "img") {
            let Ok(last) = sys::fiemap(&file, at, u64::MAX - at, true, &mut found) else { break };
            at = found.last().map_or(0, |e| e.logical + e.length);
            if last {
                break;
            }
        }
        for extent in found.iter().filter(|e| e.is_unwritten()) {
            sys::punch_hole(&file, extent.logical, extent.length).unwrap();
        }
    }
}

/// Compares bytes with `length`, `sha256` and `chunks_sha256`, naming the first chunk that differs.
fn compare(what: &str, bytes: &[u8], content: &Value) {
    let hex = |bytes: &[u8]| -> String { Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect() };
    assert_eq!(Some(bytes.len() as u64), content["length"].as_u64(), "{what}: length");
    let step = usize::try_from(content["chunk_size"].as_u64().unwrap()).unwrap();
    let chunks = content["chunks_sha256"].as_array().unwrap();
    assert_eq!(chunks.len(), bytes.len().div_ceil(step));
    for (n, (chunk, expected)) in bytes.chunks(step).zip(chunks).enumerate() {
        assert_eq!(Some(hex(chunk).as_str()), expected.as_str(), "{what}: the chunk at {} differs", n * step);
    }
    assert_eq!(Some(hex(bytes).as_str()), content["sha256"].as_str(), "{what}");
}

/// Everything that can be seen of a directory without reading its files' data.
fn listing(directory: &Path) -> Vec<(String, u64, i64, i64)> {
    let mut found: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let stat = entry.metadata().unwrap();
            (entry.file_name().into_string().unwrap(), stat.ino(), stat.mtime_nsec(), stat.ctime_nsec())
        })
        .collect();
    found.sort();
    found
}

fn offline(fixture: &Fixture, snapshot: Option<&str>) -> Vec<u8> {
    let view = SnapshotView::open(&fixture.replica, snapshot).unwrap();
    let mut bytes = vec![0xaa; usize::try_from(view.size()).unwrap()];
    view.read_at(0, &mut bytes).unwrap();
    let out = fixture.replica.parent().unwrap().join("export.img");
    view.export(&File::create(&out).unwrap(), &mut |_, _| {}).unwrap();
    assert!(fs::read(&out).unwrap() == bytes, "an export reads otherwise");
    // A small read at an odd place is the same bytes.
    let mut part = vec![0xaa; 70_001];
    view.read_at(123_457, &mut part).unwrap();
    assert_eq!(part, bytes[123_457..123_457 + 70_001]);
    bytes
}

/// Reads as the driver does: a plan, then each piece from its layer's file.
fn online(store: &Store) -> Vec<u8> {
    let mut bytes = vec![0xaa; usize::try_from(store.size()).unwrap()];
    let mut pieces = Vec::new();
    store.plan_read(Extent::new(0, store.size()), &mut pieces);
    let mut at = 0;
    for piece in pieces {
        assert_eq!(piece.extent.offset, at, "pieces leave no gap");
        at = piece.extent.end();
        let range = usize::try_from(piece.extent.offset).unwrap()..usize::try_from(at).unwrap();
        let part = &mut bytes[range];
        part.fill(0);
        let (layer, offset) = match piece.source {
            Source::Zero => continue,
            Source::Layer(layer) => (layer, piece.extent.offset),
            Source::Cluster(layer, offset) => (layer, offset),
            Source::Packed(layer) => {
                let mut at = 0;
                store
                    .decode(layer, piece.extent, |bytes| {
                        part[at..at + bytes.len()].copy_from_slice(bytes);
                        at += bytes.len();
                    })
                    .unwrap();
                assert_eq!(at, part.len());
                continue;
            }
        };
        let file = File::open(format!("/proc/self/fd/{}", raw(store.layer_file(layer)))).unwrap();
        let mut done = 0;
        while done < part.len() {
            match file.read_at(&mut part[done..], offset + done as u64).unwrap() {
                0 => break,
                n => done += n,
            }
        }
    }
    assert_eq!(at, store.size());
    bytes
}

fn raw(file: &File) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(file)
}

fn check(name: &str, place: Option<&str>) {
    let fixture = unpack(name, place);
    let expected = &fixture.expected;
    let before = listing(&fixture.replica);
    compare(&format!("{name}: head, offline"), &offline(&fixture, None), &expected["head"]["content"]);
    check_snapshots(&fixture, &format!("{name}, offline"));
    assert_eq!(listing(&fixture.replica), before, "{name}: reading offline changed the directory");

    let (directory, store) = Directory::open(&fixture.replica, &OPTIONS).unwrap();
    compare(&format!("{name}: head"), &online(&store), &expected["head"]["content"]);
    let state = directory.state();
    assert!(state.imported && !state.rebuilding && !state.clean);
    let names: Vec<_> = state.chain.iter().map(|l| l.name.as_str()).collect();
    assert_eq!(names.len(), expected["snapshots"].as_object().unwrap().len() + 1);
    for layer in &state.chain {
        let of = if layer.name.is_empty() { &expected["head"] } else { &expected["snapshots"][&layer.name] };
        let parent = of["parent"]
            .as_str()
            .map_or("", |p| p.strip_prefix("volume-snap-").and_then(|p| p.strip_suffix(".img")).unwrap_or(p));
        assert_eq!(layer.parent, parent, "{name}: parent of {:?}", layer.name);
        assert!(parent.is_empty() || names.contains(&parent));
        if !layer.name.is_empty() {
            assert_eq!(Some(layer.removed), of["removed"].as_bool());
            assert_eq!(Some(layer.user_created), of["user_created"].as_bool());
            assert_eq!(Some(layer.created.as_str()), of["created"].as_str());
            assert_eq!(Some(layer.length), of["file_length"].as_u64());
            let labels = serde_json::to_value(&layer.labels).unwrap();
            assert_eq!(labels, of["labels"], "{name}: labels of {}", layer.name);
        }
    }
    drop((directory, store));

    // Taken over, it still reads the same, for both.
    let (directory, store) = Directory::open(&fixture.replica, &OPTIONS).unwrap();
    compare(&format!("{name}: head, again"), &online(&store), &expected["head"]["content"]);
    drop((directory, store));
    check_snapshots(&fixture, &format!("{name}, taken over"));
}

/// Each is what it was, but for those that are removed: a fold may have left in them what was written later.
fn check_snapshots(fixture: &Fixture, what: &str) {
    for (snapshot, of) in fixture.expected["snapshots"].as_object().unwrap() {
        if of["removed"] == true {
            let refused = SnapshotView::open(&fixture.replica, Some(snapshot)).map(drop).unwrap_err();
            assert!(
                matches!(refused, OpenError::NotLasting { .. }),
                "{what}: snapshot {snapshot}: {refused}"
            );
        } else {
            let found = offline(fixture, Some(snapshot));
            compare(&format!("{what}: snapshot {snapshot}"), &found, &of["content"]);
        }
    }
}

const ALL: [&str; 8] =
    ["simple", "removed", "expanded", "dirty", "checksums", "revision", "backing-raw", "backing-qcow2"];

#[test]
fn every_directory_reads_as_longhorn_wrote_it() {
    for name in ALL {
        check(name, None);
    }
}

#[test]
fn and_on_tmpfs() {
    for name in ALL {
        check(name, Some("/dev/shm"));
    }
}

/// The fixture's image with compressed clusters, and with other sizes of clusters, as qemu-img makes them.
#[test]
fn backing_files_of_other_forms_read_the_same() {
    let forms: [&[&str]; 4] = [
        &["-c"],
        &["-c", "-o", "compat=0.10,cluster_size=4096"],
        &["-o", "cluster_size=512"],
        &["-o", "cluster_size=2M"],
    ];
    for form in forms {
        let fixture = unpack("backing-qcow2", None);
        let backing = fixture.replica.parent().unwrap().join("backing.qcow2");
        let other = backing.with_extension("other");
        let convert = Command::new("qemu-img")
            .args(["convert", "-O", "qcow2"])
            .args(form)
            .args([&backing, &other])
            .status();
        if convert.is_err() {
            println!("SKIP fixtures: there is no qemu-img here");
            return;
        }
        assert!(convert.unwrap().success());
        fs::rename(other, backing).unwrap();
        let expected = &fixture.expected;
        compare(&format!("{form:?}: head, offline"), &offline(&fixture, None), &expected["head"]["content"]);
        let (directory, store) = Directory::open(&fixture.replica, &OPTIONS).unwrap();
        compare(&format!("{form:?}: head"), &online(&store), &expected["head"]["content"]);
        // Twice: the second time from what was kept.
        compare(&format!("{form:?}: head, again"), &online(&store), &expected["head"]["content"]);
        drop(directory);
    }
}

#[test]
fn a_qcow2_backing_file_that_is_not_read_is_refused_in_words() {
    let fixture = unpack("backing-qcow2", None);
    let backing = fixture.replica.parent().unwrap().join("backing.qcow2");
    let image = File::options().write(true).open(backing).unwrap();
    // crypt_method: LUKS.
    image.write_all_at(&[0, 0, 0, 2], 32).unwrap();
    let before = listing(&fixture.replica);
    let offline = SnapshotView::open(&fixture.replica, None).map(drop).unwrap_err();
    let online = Directory::open(&fixture.replica, &OPTIONS).map(drop).unwrap_err();
    for err in [offline, online] {
        assert!(matches!(&err, OpenError::Damaged { damage: Damage::BackingQcow2 { .. }, .. }), "{err}");
        assert!(err.to_string().contains("backing.qcow2 is a qcow2 image that uses encryption"), "{err}");
    }
    assert_eq!(listing(&fixture.replica), before, "a refused directory was changed");
}

#[test]
fn a_live_process_keeps_readers_out() {
    let fixture = unpack("simple", None);
    let (directory, store) = Directory::open(&fixture.replica, &OPTIONS).unwrap();
    let err = SnapshotView::open(&fixture.replica, None).map(drop).unwrap_err();
    assert!(matches!(&err, OpenError::InUse { .. }), "{err}");
    assert!(err.to_string().contains(&format!("by process {}", std::process::id())), "{err}");
    drop((directory, store));
    let view = SnapshotView::open(&fixture.replica, None).unwrap();
    let wait = OpenOptions { lock_wait: Duration::from_secs(1) };
    assert!(matches!(Directory::open(&fixture.replica, &wait), Err(OpenError::InUse { .. })));
    drop(view);
    Directory::open(&fixture.replica, &wait).unwrap();
}

#[test]
fn an_unknown_snapshot_is_named_with_those_that_are_there() {
    let fixture = unpack("simple", None);
    let err = SnapshotView::open(&fixture.replica, Some("s9")).map(drop).unwrap_err();
    assert!(err.to_string().contains("s1, s2, s3"), "{err}");
}
