//! A fold where the file system shares extents: nothing is copied, and what was never written stays a hole. On an XFS of
//! its own in a loop device; skipped with a line of explanation where mkfs.xfs, a privilege or the kernel's XFS is missing.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use lh_block::{Extent, Instance};
use lh_rig::bind_loop;
use lh_ring::Falloc;
use lh_ring::sys::{self, loops, mounts};
use lh_wire::ChainOp;
use replica::store::{
    Committed, CreateOptions, Directory, Fold, FoldStep, OpenOptions, SnapshotView, Source, Store,
};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 256 * MIB;
const WAIT: Duration = Duration::from_secs(5);

/// A mounted XFS, and the devices below it; all of it ends with this value.
struct Xfs {
    mount: OwnedFd,
    _device: File,
    _image: tempfile::NamedTempFile,
}

impl Xfs {
    fn new() -> Result<Self, String> {
        let image = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
        image.as_file().set_len(320 * MIB).map_err(|e| e.to_string())?;
        let made = Command::new("mkfs.xfs").arg("-q").arg(image.path()).stderr(Stdio::null()).status();
        if !made.map_err(|e| format!("mkfs.xfs: {e}"))?.success() {
            return Err("mkfs.xfs failed".into());
        }
        let (number, device) = bind_loop(image.as_file(), "fold-xfs-test")?;
        let source = format!("/dev/loop{number}");
        let mount = mounts::detached("xfs", &[("source", source)]).map_err(|e| format!("mounting: {e}"))?;
        // Unbinds itself with the last user: this process and the mount.
        loops::clear(device.as_fd()).map_err(|e| e.to_string())?;
        Ok(Self { mount, _device: device, _image: image })
    }

    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.mount.as_raw_fd()))
    }
}

/// The same file without O_DIRECT.
fn buffered(file: &File) -> File {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().read(true).write(true).open(path).unwrap()
}

struct Volume {
    directory: Directory,
    store: Store,
    operations: u128,
}

impl Volume {
    fn write(&mut self, range: Extent, byte: u8) {
        self.directory.begin_use().unwrap();
        let head = self.store.head();
        assert!(self.store.begin_write(head, range));
        let file = buffered(self.store.layer_file(head));
        file.write_all_at(&vec![byte; usize::try_from(range.len).unwrap()], range.offset).unwrap();
        file.sync_data().unwrap();
        let _ = self.store.wrote(range);
        self.store.flush_now().unwrap();
    }

    fn carry_out(&mut self, op: &ChainOp) {
        self.operations += 1;
        let id = Instance(self.operations);
        self.directory.prepare(id, op).unwrap();
        if let Committed::Head(head) = self.directory.commit(id).unwrap() {
            self.store.switch_head(*head);
        }
        self.directory.sync_commit().unwrap();
    }

    fn snapshot(&mut self, name: &str) {
        let (name, created) = (name.to_owned(), "2026-11-20T06:03:39Z".to_owned());
        self.carry_out(&ChainOp::Snapshot { name, user_created: true, created, labels: Default::default() });
    }

    /// Folds the snapshot away: bytes copied, bytes shared, pieces of work.
    fn fold(&mut self, name: &str) -> (u64, u64, usize) {
        self.carry_out(&ChainOp::MarkRemoved { name: name.to_owned() });
        let plan = self.directory.begin_fold(name).unwrap();
        let mut fold = Fold::new(&self.store, plan).unwrap();
        let (store, directory) = (&mut self.store, &mut self.directory);
        let mut pieces = 0;
        loop {
            match fold.next(store).unwrap() {
                FoldStep::Work(work) => {
                    pieces += 1;
                    fold.worked(store, work.run()).unwrap();
                }
                FoldStep::Claim(_) | FoldStep::Release => {}
                FoldStep::Choose(direction) => {
                    directory.choose_fold(fold.plan(), direction).unwrap();
                    fold.chosen(store);
                }
                FoldStep::Flush => {
                    store.flush_now().unwrap();
                    fold.flushed();
                }
                FoldStep::Switch(direction) => {
                    let folded = directory.switch_fold(fold.plan(), direction).unwrap();
                    let gone = fold.switched(store, &folded);
                    drop(store.release(gone));
                }
                FoldStep::Ready => {
                    let ready = directory.ready_fold(fold.plan()).unwrap();
                    fold.readied(ready);
                }
                FoldStep::Swap => {
                    let folded = directory.swap_fold(fold.plan()).unwrap().unwrap();
                    let gone = fold.switched(store, &folded);
                    drop(store.release(gone));
                    directory.finish_fold(fold.plan()).unwrap();
                    fold.finished();
                }
                FoldStep::Ended => break,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(fold.state().error, None);
        let (copied, shared) = fold.moved();
        (copied, shared, pieces)
    }

    fn byte(&self, offset: u64) -> u8 {
        let mut pieces = Vec::new();
        self.store.plan_read(Extent::new(offset, 4096), &mut pieces);
        let mut byte = [0];
        if let Source::Layer(layer) = pieces[0].source {
            buffered(self.store.layer_file(layer)).read_exact_at(&mut byte, offset).unwrap();
        }
        byte[0]
    }
}

/// Space that a file takes and was never written.
fn unwritten(path: &Path) -> u64 {
    let mut found = Vec::new();
    assert!(sys::fiemap(File::open(path).unwrap(), 0, u64::MAX, true, &mut found).unwrap());
    found.iter().filter(|e| e.is_unwritten()).map(|e| e.length).sum()
}

#[test]
fn what_is_shared_is_not_copied() {
    let xfs = match Xfs::new() {
        Ok(xfs) => xfs,
        Err(reason) => return println!("SKIP what_is_shared_is_not_copied: {reason}"),
    };
    let path = xfs.path("replica");
    let options = CreateOptions { size: SIZE, backing: None, lock_wait: WAIT };
    let (directory, store) = Directory::create(&path, &options).unwrap();
    let mut volume = Volume { directory, store, operations: 0 };
    volume.write(Extent::new(0, 48 * MIB), 1);
    volume.snapshot("one");
    volume.write(Extent::new(8 * MIB, 8 * MIB), 2);
    // Space that was taken ahead is none of the layer's data.
    sys::fallocate(volume.store.layer_file(volume.store.head()), Falloc::Allocate, 100 * MIB, MIB).unwrap();
    volume.snapshot("two");
    volume.write(Extent::new(12 * MIB, MIB), 3);
    volume.snapshot("three");
    // The child's 8 MiB into the parent, and the head gets the rest.
    assert_eq!(volume.fold("one").0, 0, "something was copied");
    let two = path.join("volume-snap-two.img");
    assert_eq!(unwritten(&two), 0);
    // The head is empty: the snapshot's file becomes the head.
    assert_eq!(volume.fold("three").1, 0);
    let bytes = |volume: &Volume| [0, 8, 12, 15, 16, 100].map(|at| volume.byte(at * MIB));
    assert_eq!(bytes(&volume), [1, 2, 3, 2, 1, 0]);
    let mut read = vec![0; usize::try_from(16 * MIB).unwrap()];
    SnapshotView::open_beside(&path, "two").unwrap().read_at(0, &mut read).unwrap();
    assert_eq!((read[0], read[12 << 20], read[8 << 20]), (1, 2, 2));
    // Into a head that has much itself: however much is missing, a few calls.
    volume.write(Extent::new(32 * MIB, 16 * MIB), 4);
    let (copied, shared, pieces) = volume.fold("two");
    assert_eq!((copied, shared), (0, 31 * MIB));
    assert!(pieces < 10, "{pieces} pieces of work");
    assert_eq!(bytes(&volume), [1, 2, 3, 2, 1, 0]);
    // And out of one that has little.
    volume.snapshot("four");
    volume.write(Extent::new(100 * MIB, MIB), 5);
    let (copied, shared, pieces) = volume.fold("four");
    assert_eq!((copied, shared), (0, MIB));
    assert!(pieces < 20, "{pieces} pieces of work");
    assert_eq!(bytes(&volume), [1, 2, 3, 2, 1, 5]);
    drop(volume);
    let (directory, store) = Directory::open(&path, &OpenOptions { lock_wait: WAIT }).unwrap();
    let volume = Volume { directory, store, operations: 0 };
    assert_eq!(bytes(&volume), [1, 2, 3, 2, 1, 5]);
    assert_eq!(fs::read_dir(&path).unwrap().count(), 4, "the head, its meta, volume.meta, engine");
}
