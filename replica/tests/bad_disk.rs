//! A disk that fails, below a real file system. On an ext4 of its own, in a loop device whose file can be kept from
//! getting any larger; skipped with a line of explanation where mkfs.ext4, a privilege or loop devices are missing.
//!
//! What a failed sync has not written stays in the page cache and counts as written: a second sync says that all is well.

mod serve_client;

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lh_block::{Extent, Instance};
use lh_rig::bind_loop;
use lh_ring::Falloc;
use lh_ring::sys::{self, loops, mounts};
use lh_wire::{ChainOp, Control, OpCode, Status};
use replica::serve::{Address, Mode, Options, ServeError};
use replica::store::{Committed, CreateOptions, Directory, OpenOptions, Source, Store};
use serve_client::{SIZE, Server, options, session};

const MIB: u64 = 1 << 20;
/// So far behind that its mark is in no block of the map that was written before.
const BLOCK: Extent = Extent::new(62 * MIB, 4096);
const WAIT: Duration = Duration::from_secs(5);

/// A mounted ext4, the devices below it, and the memory in which all of it lies; all ends with this value.
struct Ext4 {
    mount: OwnedFd,
    _device: File,
    memory: OwnedFd,
}

impl Ext4 {
    fn new() -> Result<Self, String> {
        let text = |e: std::io::Error| e.to_string();
        let memory = mounts::detached("tmpfs", &[("size", "48m".into())]).map_err(text)?;
        let path = public(&PathBuf::from(format!("/proc/self/fd/{}/image", memory.as_raw_fd())));
        let image = File::options().read(true).write(true).create_new(true).open(&path).map_err(text)?;
        image.set_len(64 * MIB).map_err(text)?;
        // Everything that the file system writes for itself has its space.
        let options = ["-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0", "-b", "4096"];
        let made =
            Command::new("mkfs.ext4").arg("-q").args(options).arg(&path).stderr(Stdio::null()).status();
        if !made.map_err(|e| format!("mkfs.ext4: {e}"))?.success() {
            return Err("mkfs.ext4 failed".into());
        }
        // Here zeroes are left as holes all the same. A commit that meets one while there is no space would end the journal, and with it
        // all writing: so all that was made is written once more.
        let mut made = vec![0; made_blocks(&image).map_err(text)? * 4096];
        image.read_exact_at(&mut made, 0).and_then(|()| image.write_all_at(&made, 0)).map_err(text)?;
        let (number, device) = bind_loop(&image, "bad-disk-test")?;
        let source = format!("/dev/loop{number}");
        let mount = mounts::detached("ext4", &[("source", source)]).map_err(|e| format!("mounting: {e}"))?;
        loops::clear(device.as_fd()).map_err(text)?;
        Ok(Self { mount, _device: device, memory })
    }

    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.mount.as_raw_fd()))
    }

    /// Runs a test, if there can be such a disk.
    fn with(test: &str, run: impl FnOnce(&Self)) {
        match Self::new() {
            Ok(disk) => run(&disk),
            Err(reason) => println!("SKIP {test}: {reason}"),
        }
    }

    /// A server of a replica on this disk. Its socket lies elsewhere.
    fn serve(&self, place: &Path) -> Server {
        let listen = Address::Unix(place.join("socket"));
        Server::with(Options { directory: self.path("replica"), listen, ..options(place) })
    }

    /// Takes away what the disk has of some of a file's extents, as filefrag tells of them: they are new to the disk again.
    fn forget(&self, file: &Path, is_meant: impl Fn(&str) -> bool) {
        let told = Command::new("filefrag").args(["-b4096", "-v", "-e"]).arg(public(file)).output().unwrap();
        let told = String::from_utf8(told.stdout).unwrap();
        let image = File::options().write(true).open(self.in_memory("image")).unwrap();
        let mut forgotten = 0;
        // "   0:        0..       0:       2099..      2099:      1:             last,eof"
        for line in told.lines().filter(|line| line.contains("..") && is_meant(line.trim_start())) {
            let place = line.split(':').nth(2).and_then(|place| place.split_once("..")).expect(line);
            let [first, last] = [place.0, place.1].map(|block| block.trim().parse::<u64>().expect(line));
            sys::punch_hole(&image, first * 4096, (last + 1 - first) * 4096).unwrap();
            forgotten += 1;
        }
        assert!(forgotten > 0, "{told}");
    }

    /// The next marks of zeroes are in blocks that the disk has not seen. Left to itself the file system may take for them what another
    /// file had before.
    fn forget_marks(&self) {
        let engine = fs::read_dir(self.path("replica/engine")).unwrap().map(|entry| entry.unwrap().path());
        let is_map = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("zero-");
        for map in engine.filter(is_map) {
            let file = File::options().write(true).open(&map).unwrap();
            sys::fallocate(&file, Falloc::AllocateKeepSize, 0, 64 << 10).unwrap();
            file.sync_all().unwrap();
            self.forget(&map, |line| line.contains("unwritten"));
        }
    }

    fn in_memory(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.memory.as_raw_fd()))
    }

    /// What the disk has not seen before is an error from now on.
    fn exhaust(&self) {
        let mut file = File::create(self.in_memory("filling")).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
    }

    /// True if the disk has not what it said that it has: marks that nobody could sync any further are not there. Of a write that its
    /// memory takes a part of, the loop driver says that it was done (`lo_complete_rq` of drivers/block/loop.c).
    fn has_lied(&self) -> bool {
        let files = fs::read_dir(self.path("replica/engine")).unwrap().map(|entry| entry.unwrap().path());
        let mut maps = files.filter(|f| f.file_name().unwrap().to_str().unwrap().starts_with("zero-"));
        maps.any(|map| {
            let is_synced = File::open(&map).unwrap().sync_all().is_ok();
            let (cached, on_disk) = both(&map);
            is_synced && cached != on_disk
        })
    }

    fn relieve(&self) {
        fs::remove_file(self.in_memory("filling")).unwrap();
    }
}

/// How many blocks of an empty file system are its own, which are the first ones: its superblock counts all and those that are free
/// (Documentation/filesystems/ext4/super.rst: s_blocks_count_lo, s_free_blocks_count_lo).
fn made_blocks(image: &File) -> std::io::Result<usize> {
    let mut superblock = [0; 16];
    image.read_exact_at(&mut superblock, 1024)?;
    let number =
        |at: usize| superblock[at..at + 4].iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte));
    Ok(number(4) - number(12))
}

/// The path as other programs can use it.
fn public(path: &Path) -> PathBuf {
    Path::new("/proc").join(std::process::id().to_string()).join(path.strip_prefix("/proc/self").unwrap())
}

fn write(directory: &mut Directory, store: &mut Store, byte: u8) {
    directory.begin_use().unwrap();
    let head = store.head();
    assert!(store.begin_write(head, BLOCK));
    // The same file without O_DIRECT.
    let path = format!("/proc/self/fd/{}", store.layer_file(head).as_raw_fd());
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&[byte; 4096], BLOCK.offset).unwrap();
    file.sync_data().unwrap();
    let _ = store.wrote(BLOCK);
    store.flush_now().unwrap();
}

fn snapshot(directory: &mut Directory, store: &mut Store) {
    let (name, created) = ("one".to_owned(), "2026-11-20T06:03:39Z".to_owned());
    let op = ChainOp::Snapshot { name, user_created: true, created, labels: Default::default() };
    directory.prepare(Instance(1), &op).unwrap();
    if let Committed::Head(head) = directory.commit(Instance(1)).unwrap() {
        store.switch_head(*head);
    }
    directory.sync_commit().unwrap();
    store.flush_now().unwrap();
}

fn source(store: &Store) -> Source {
    let mut pieces = Vec::new();
    store.plan_read(BLOCK, &mut pieces);
    pieces[0].source
}

/// The file as the page cache has it, and as the disk has it.
fn both(path: &Path) -> (Vec<u8>, Vec<u8>) {
    let cached = fs::read(path).unwrap();
    let length = cached.len().next_multiple_of(4096);
    let mut memory = vec![0; length + 4096];
    let skip = memory.as_ptr().align_offset(4096);
    let disk = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let read = disk.read_at(&mut memory[skip..skip + length], 0).unwrap();
    (cached, memory[skip..skip + read].to_vec())
}

/// The mark of a block that was zeroed: its sync fails, and with it the replica. What the next process finds is what a power cut
/// leaves once that has flushed.
#[test]
fn what_a_failed_sync_has_left_is_not_believed() {
    Ext4::with("what_a_failed_sync_has_left_is_not_believed", what_is_left_is_not_believed);
}

fn what_is_left_is_not_believed(disk: &Ext4) {
    let path = disk.path("replica");
    let options = CreateOptions { size: SIZE, backing: None, lock_wait: WAIT };
    let (mut directory, mut store) = Directory::create(&path, &options).unwrap();
    write(&mut directory, &mut store, 1);
    snapshot(&mut directory, &mut store);
    write(&mut directory, &mut store, 2);
    let plan = store.plan_zero(BLOCK, false, &mut |_, _, _| Vec::new()).unwrap();
    assert_eq!((plan.marks.as_slice(), plan.needs_mark), (&[BLOCK][..], true));
    directory.mark_zeroes().unwrap();
    store.marked();
    disk.forget_marks();
    disk.exhaust();
    store.zeroed(&plan).unwrap();
    store.flush_now().unwrap_err();
    drop((directory, store));
    disk.relieve();
    let (directory, mut store) = Directory::open(&path, &OpenOptions { lock_wait: WAIT }).unwrap();
    let found = source(&store);
    store.flush_now().unwrap();
    for file in fs::read_dir(path.join("engine")).unwrap().map(|e| e.unwrap().path()) {
        let name = file.file_name().unwrap().to_str().unwrap();
        if name.starts_with("zero-") || name == "intent" {
            let (cached, on_disk) = both(&file);
            assert!(cached == on_disk, "a flush ended well, and what was read of {name} is not on the disk");
        }
    }
    drop((directory, store));
    let (_directory, store) = Directory::open(&path, &OpenOptions { lock_wait: WAIT }).unwrap();
    assert_eq!(source(&store), found);
}

/// Zeroes are answered when their mark is in the page cache. Whether it comes to the disk a flush says.
#[test]
fn a_failed_sync_fails_the_replica() {
    let mut is_judged = false;
    // On a busy host it happens that the disk is no judge.
    for _ in 0..8 {
        is_judged = true;
        Ext4::with("a_failed_sync_fails_the_replica", |disk| is_judged = is_failed_by_a_sync(disk));
        if is_judged {
            break;
        }
    }
    assert!(is_judged, "the disk has lied each time");
}

/// False: the disk told of no error.
fn is_failed_by_a_sync(disk: &Ext4) -> bool {
    let place = tempfile::tempdir().unwrap();
    let server = disk.serve(place.path());
    let mut c = session(&server.socket, 1, 1);
    let (block, length) = ([1; 4096], 4096);
    for offset in [0, BLOCK.offset] {
        assert_eq!(c.write(offset, &block), Status::Ok);
    }
    let created = "2026-11-20T06:03:39Z".to_owned();
    let op =
        ChainOp::Snapshot { name: "one".into(), user_created: true, created, labels: Default::default() };
    assert_eq!(c.control(&Control::Prepare { id: Instance(1), op }).status(), Status::Ok);
    assert_eq!(c.control(&Control::Commit { id: Instance(1) }).status(), Status::Ok);
    // From now on volume.meta says that there are marks.
    assert_eq!(c.op(OpCode::Unmap, 0, length).status(), Status::Ok);
    assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
    disk.forget_marks();
    disk.exhaust();
    assert_eq!(c.op(OpCode::Unmap, BLOCK.offset, length).status(), Status::Ok);
    let flushed = c.op(OpCode::Flush, 0, 0).status();
    if flushed == Status::Ok && disk.has_lied() {
        return false;
    }
    assert_eq!(flushed, Status::Io);
    assert_eq!(server.status.snapshot().mode, Mode::Failed);
    disk.relieve();
    assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Io, "it is not tried again");
    assert_eq!(c.write(0, &block), Status::Io);
    // The next process is one that comes back: this one would keep its place, and do nothing.
    let began = Instant::now();
    let ended = server.ended();
    assert!(matches!(ended, Err(ServeError::Failed { full: false, .. })), "{ended:?}");
    assert!(began.elapsed() < WAIT, "who waits hears of it, and not for ever");
    let server = disk.serve(place.path());
    drop(session(&server.socket, 2, 2));
    true
}

/// The chunk's mark in the intent bitmap is on the disk before the write is done.
#[test]
fn no_write_is_done_whose_mark_is_not_on_the_disk() {
    Ext4::with("no_write_is_done_whose_mark_is_not_on_the_disk", |disk| {
        let place = tempfile::tempdir().unwrap();
        let server = disk.serve(place.path());
        let mut c = session(&server.socket, 1, 1);
        let chunk = c.state().intent_chunk;
        assert_eq!(c.write(BLOCK.offset, &[1; 4096]), Status::Ok);
        assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
        let (first, length) = (BLOCK.offset - BLOCK.offset % chunk, u32::try_from(chunk).unwrap());
        assert_eq!(c.op(OpCode::ClearIntent, first, length).status(), Status::Ok);
        let intent = disk.path("replica/engine/intent");
        let began = Instant::now();
        // Also on the disk: what is written later would take the place that is forgotten anew.
        while both(&intent).1[512..1020].iter().any(|byte| *byte != 0) {
            assert!(began.elapsed() < WAIT * 8, "the mark is not taken back");
            std::thread::sleep(Duration::from_millis(50));
        }
        // In place, so that the write itself takes nothing new.
        disk.forget(&intent, |line| line.starts_with("0:"));
        disk.exhaust();
        assert_eq!(c.write(BLOCK.offset, &[2; 4096]), Status::Io);
        assert_eq!(server.status.snapshot().mode, Mode::Failed);
        drop(server);
        disk.relieve();
        // The page cache has the mark, and says that it was written: the next process does not read it there.
        let server = disk.serve(place.path());
        drop(session(&server.socket, 2, 2));
        let (cached, on_disk) = both(&intent);
        assert!(cached == on_disk, "what is believed of the intent bitmap is not on the disk");
    });
}
