//! Files that others read: exported images judged by qemu-img, Longhorn's checksum files, a qcow2 backing file as it is
//! served.

mod serve_client;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lh_wire::{BlockState, Header, MERGED, OpCode, Status};
use replica::store::{Directory, OpenOptions, Pace, SnapshotLayer, SnapshotView, Stored};
use serde_json::Value;
use serve_client::{MIB, Server, session};

fn unpack(name: &str) -> (tempfile::TempDir, PathBuf, Value) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .join(format!("tests/fixtures/replica-{name}"));
    let expected = serde_json::from_slice(&fs::read(from.join("expected.json")).unwrap()).unwrap();
    let keep = tempfile::tempdir().unwrap();
    let archive = from.join(format!("replica-{name}.tar.xz"));
    let done = Command::new("tar").arg("-xJf").arg(archive).arg("-C").arg(keep.path()).status().unwrap();
    assert!(done.success(), "tar unpacks {name}");
    let replica = keep.path().join("replica");
    (keep, replica, expected)
}

/// `None`, and a word about it: there is no qemu-img here.
fn qemu_img(args: &[&str], files: &[&Path]) -> Option<(bool, String)> {
    let Ok(done) = Command::new("qemu-img").args(args).args(files).output() else {
        println!("SKIP formats: there is no qemu-img here");
        return None;
    };
    let text = [done.stdout, done.stderr].concat();
    Some((done.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

#[test]
fn an_exported_qcow2_image_is_what_qemu_reads() {
    for name in ["simple", "removed", "expanded", "backing-raw", "backing-qcow2"] {
        let (keep, replica, expected) = unpack(name);
        let snapshots = expected["snapshots"].as_object().unwrap().iter();
        let snapshots =
            snapshots.filter(|(_, of)| of["removed"] != true).map(|(name, _)| Some(name.as_str()));
        for snapshot in snapshots.chain([None]) {
            let view = SnapshotView::open(&replica, snapshot).unwrap();
            let (image, raw) = (keep.path().join("out.qcow2"), keep.path().join("out.raw"));
            let mut last = 0;
            view.export_qcow2(&File::create(&image).unwrap(), &mut |done, all| {
                assert!(done >= last && all == view.size());
                last = done;
            })
            .unwrap();
            assert_eq!(last, view.size());
            view.export(&File::create(&raw).unwrap(), &mut |_, _| {}).unwrap();
            let what = format!("{name}, {snapshot:?}");
            let Some((clean, text)) = qemu_img(&["check", "-f", "qcow2"], &[&image]) else { return };
            assert!(clean && text.contains("No errors were found"), "{what}: {text}");
            let compare = ["compare", "-f", "qcow2", "-F", "raw"];
            let (same, text) = qemu_img(&compare, &[&image, &raw]).unwrap();
            assert!(same, "{what}: {text}");
        }
    }
}

/// More than one L2 table, more than one block of reference counts' worth of table, an end within a cluster.
#[test]
fn a_large_sparse_volume_becomes_a_small_image() {
    let place = tempfile::tempdir().unwrap();
    let (path, image) = (place.path().join("replica"), place.path().join("image"));
    let size = (3 << 40) + 4096;
    let options = replica::store::CreateOptions { size, backing: None, lock_wait: Duration::from_secs(5) };
    let (mut directory, mut store) = Directory::create(&path, &options).unwrap();
    directory.begin_use().unwrap();
    let head = File::options().write(true).open(path.join("volume-head-000.img")).unwrap();
    let mut expected = Vec::new();
    for at in [0, 65_536 - 4096, 512 << 20, (1 << 40) + 8192, size - 4096] {
        let byte = u8::try_from(at % 251 + 1).unwrap();
        let extent = lh_block::Extent::new(at, 4096);
        assert!(store.begin_write(store.head(), extent));
        std::os::unix::fs::FileExt::write_all_at(&head, &[byte; 4096], at).unwrap();
        let _ = store.wrote(extent);
        expected.push((at, byte));
    }
    drop((directory, store, head));
    let view = SnapshotView::open(&path, None).unwrap();
    view.export_qcow2(&File::create(&image).unwrap(), &mut |_, _| {}).unwrap();
    assert!(fs::metadata(&image).unwrap().len() < 2 << 20);
    let Some((clean, text)) = qemu_img(&["check", "-f", "qcow2"], &[&image]) else { return };
    assert!(clean, "{text}");
    let (_, map) = qemu_img(&["map", "--output=json", "-f", "qcow2"], &[&image]).unwrap();
    let map: Value = serde_json::from_str(&map).unwrap();
    let data = map.as_array().unwrap().iter().filter(|run| run["data"] == true);
    let starts: Vec<_> = data.map(|run| run["start"].as_u64().unwrap()).collect();
    assert_eq!(starts, [0, 512 << 20, 1 << 40, 3 << 40]);
    // And back in, as a backing file of another volume.
    let other = place.path().join("other");
    let options = replica::store::CreateOptions {
        size,
        backing: Some(image.display().to_string()),
        lock_wait: Duration::from_secs(5),
    };
    drop(Directory::create(&other, &options).unwrap());
    let view = SnapshotView::open(&other, None).unwrap();
    for (at, byte) in expected {
        let mut block = [0; 4096];
        view.read_at(at, &mut block).unwrap();
        assert_eq!(block, [byte; 4096], "at {at}");
    }
    let mut hole = [1; 4096];
    view.read_at(2 << 40, &mut hole).unwrap();
    assert_eq!(hole, [0; 4096]);
}

#[test]
fn longhorns_checksums_are_found_and_written_as_longhorn_does() {
    let (_keep, replica, expected) = unpack("checksums");
    for (name, of) in expected["snapshots"].as_object().unwrap() {
        let recorded = of["checksum"]["checksum"].as_str().unwrap();
        let layer = SnapshotLayer::open(&replica, name).unwrap();
        let report = layer.scrub(&Pace::new(0), &mut |_| {}).unwrap();
        // The archive does not carry the ctime.
        assert_eq!((report.checksum_fits, report.stored), (None, Stored::Missing));
        let file = replica.join(format!("volume-snap-{name}.img.checksum"));
        let theirs = fs::read_to_string(&file).unwrap();
        let hashed = layer.hash(&Pace::new(0), &mut |_| {}).unwrap();
        assert_eq!(format!("{:016x}", hashed.checksum), recorded, "{name}");
        assert!(!hashed.silently_corrupted);
        // Byte for byte but for the two times.
        let ours = fs::read_to_string(&file).unwrap();
        let without_times = |text: &str| {
            let value: Value = serde_json::from_str(text).unwrap();
            let mut bare = text.to_owned();
            for key in ["change_time", "last_hashed_at"] {
                bare = bare.replace(value[key].as_str().unwrap(), "");
            }
            bare
        };
        assert_eq!(without_times(&ours), without_times(&theirs));
        assert!(ours.ends_with("\"silently_corrupted\":false}\n"));
        assert_eq!(layer.scrub(&Pace::new(0), &mut |_| {}).unwrap().checksum_fits, Some(true));
    }
    // A file that Longhorn hashed just now, in its own time zone, is believed: only the ctime counts.
    let file = replica.join("volume-snap-h1.img.checksum");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("0fac3a8982c29d39", "0fac3a8982c29d38")).unwrap();
    let report = SnapshotLayer::open(&replica, "h1").unwrap().scrub(&Pace::new(0), &mut |_| {}).unwrap();
    assert_eq!(report.checksum_fits, Some(false));
}

/// Reads over the data protocol give what the directory holds, whatever the clusters are like.
#[test]
fn a_qcow2_backing_file_is_served() {
    let forms: [Option<&[&str]>; 4] =
        [None, Some(&["-c"]), Some(&["-o", "cluster_size=1024"]), Some(&["-c", "-o", "cluster_size=2M"])];
    for form in forms {
        let (keep, replica, _) = unpack("backing-qcow2");
        if let Some(form) = form {
            let (image, other) = (keep.path().join("backing.qcow2"), keep.path().join("other"));
            let args = [&["convert", "-O", "qcow2"], form].concat();
            let Some((done, text)) = qemu_img(&args, &[&image, &other]) else { return };
            assert!(done, "{text}");
            fs::rename(other, image).unwrap();
        }
        let view = SnapshotView::open(&replica, None).unwrap();
        let mut expected = vec![0; usize::try_from(view.size()).unwrap()];
        view.read_at(0, &mut expected).unwrap();
        drop(view);
        let mut options = serve_client::options(keep.path());
        options.size = None;
        let server = Server::with(options);
        let mut c = session(&server.socket, 1, 1);
        // Backwards, so that what is kept of one read does not serve the next.
        for at in (0..16_u64).rev() {
            let got = c.read(at * u64::from(MIB), MIB);
            let from = usize::try_from(at).unwrap() << 20;
            assert!(got == expected[from..from + (1 << 20)], "{form:?}: MiB {at}");
        }
        // So is what is told of it to replicas that are to read the same.
        for at in (0..16_u64).rev() {
            let header = c.header(OpCode::ReadLayer, at * u64::from(MIB), MIB);
            let image = c.ask(Header { aux: MERGED, ..header }, b"");
            assert_eq!(image.status(), Status::Ok);
            let (mut data, states) = image.payload.split_at(image.payload.len() - 256);
            let from = usize::try_from(at).unwrap() << 20;
            for (state, block) in states.iter().zip(expected[from..from + (1 << 20)].chunks(4096)) {
                let is_data = BlockState::from_u8(*state) == Some(BlockState::Data);
                assert!(is_data || *state == BlockState::Zero as u8 && block.iter().all(|byte| *byte == 0));
                let (own, rest) = data.split_at(if is_data { 4096 } else { 0 });
                assert!(!is_data || own == block, "{form:?}: MiB {at}");
                data = rest;
            }
        }
        for at in (0..4 << 20).step_by(37 * 4096) {
            assert!(c.read(at, 8192) == expected[usize::try_from(at).unwrap()..][..8192], "{form:?}: {at}");
        }
        drop(c);
        server.stop();
        let (_directory, _store) =
            Directory::open(&replica, &OpenOptions { lock_wait: Duration::from_secs(5) }).unwrap();
    }
}

/// An XFS of its own, unmounted when dropped.
struct Xfs {
    place: tempfile::TempDir,
}

impl Xfs {
    /// `None`, and a word about it: this machine does not let us.
    fn mount() -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let (image, at) = (place.path().join("image"), place.path().join("xfs"));
        File::create(&image).unwrap().set_len(400 << 20).unwrap();
        fs::create_dir(&at).unwrap();
        let done = |command: &mut Command| command.output().ok().filter(|out| out.status.success());
        let mounted = || {
            done(Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&image))?;
            let device = done(Command::new("losetup").args(["--find", "--show"]).arg(&image))?;
            let device = String::from_utf8(device.stdout).ok()?.trim().to_owned();
            // Whoever had this loop device before may have forbidden to write to it, and that stays.
            done(Command::new("blockdev").args(["--setrw", &device]));
            let mounted = done(Command::new("mount").arg(&device).arg(&at));
            // It goes with the last that has it open.
            done(Command::new("losetup").args(["--detach", &device]));
            mounted
        };
        if mounted().is_none() {
            println!("SKIP formats: no XFS can be mounted here");
            return None;
        }
        Some(Self { place })
    }

    fn path(&self) -> PathBuf {
        self.place.path().join("xfs")
    }

    fn used(&self) -> u64 {
        let out =
            Command::new("df").args(["--sync", "--output=used", "-B1"]).arg(self.path()).output().unwrap();
        String::from_utf8(out.stdout).unwrap().lines().nth(1).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

/// 120 MiB in two layers: the clone takes next to nothing, and what is written into it afterwards is its own.
#[test]
fn a_clone_on_xfs_shares_its_extents() {
    use std::os::unix::fs::FileExt;
    let Some(xfs) = Xfs::mount() else { return };
    let (path, to) = (xfs.path().join("replica"), xfs.path().join("clone"));
    let options =
        replica::store::CreateOptions { size: 1 << 30, backing: None, lock_wait: Duration::from_secs(5) };
    drop(Directory::create(&path, &options).unwrap());
    // As Longhorn leaves it: a snapshot with a head over it.
    fs::remove_dir_all(path.join("engine")).unwrap();
    for name in ["volume-head-000.img", "volume-head-000.img.meta"] {
        fs::rename(path.join(name), path.join(name.replace("head-000", "snap-s"))).unwrap();
    }
    let meta = fs::read_to_string(path.join("volume-snap-s.img.meta")).unwrap();
    let child = meta.replace("\"Parent\":\"\"", "\"Parent\":\"volume-snap-s.img\"");
    fs::write(path.join("volume-head-001.img.meta"), child).unwrap();
    let volume = fs::read_to_string(path.join("volume.meta")).unwrap();
    let volume =
        volume.replace("head-000", "head-001").replace("\"Parent\":\"\"", "\"Parent\":\"volume-snap-s.img\"");
    fs::write(path.join("volume.meta"), volume).unwrap();
    let snapshot = File::options().write(true).open(path.join("volume-snap-s.img")).unwrap();
    let head = File::create(path.join("volume-head-001.img")).unwrap();
    head.set_len(1 << 30).unwrap();
    let mib = |n: u8| vec![n; 1 << 20];
    for n in 0..80_u8 {
        snapshot.write_all_at(&mib(n + 1), u64::from(n) * (3 << 20)).unwrap();
    }
    for n in 0..40_u8 {
        head.write_all_at(&mib(n + 100), u64::from(n) * (6 << 20) + (1 << 19)).unwrap();
    }
    for file in [&snapshot, &head] {
        file.sync_all().unwrap();
    }
    let view = SnapshotView::open(&path, None).unwrap();
    let before = xfs.used();
    let options = replica::store::CloneOptions { snapshot: "base".into(), ..Default::default() };
    let cloned = replica::store::clone_snapshot(&view, &to, &options, &Pace::new(0), &mut |_, _| {}).unwrap();
    let took = xfs.used() - before;
    assert_eq!(cloned.copied, 0);
    assert!(cloned.shared >= 100 << 20, "{cloned:?}");
    assert!(took < 4 << 20, "a clone that shares took {took} bytes");
    let clone = SnapshotView::open(&to, None).unwrap();
    let (mut a, mut b) = (mib(0), mib(0));
    for at in (0..1_u64 << 30).step_by(1 << 20) {
        view.read_at(at, &mut a).unwrap();
        clone.read_at(at, &mut b).unwrap();
        assert!(a == b, "at {at}");
    }
}
