//! File systems on which space is another matter: one that takes none ahead (ext4 that was made as ext3: its files have maps of
//! blocks), and one that writes to another place what is there already (XFS, of a file that shares its extents). Each in a
//! loop device; skipped with a line of explanation where its mkfs, a privilege or the kernel's driver is missing.

mod serve_client;

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lh_block::Instance;
use lh_rig::bind_loop;
use lh_ring::Falloc;
use lh_ring::sys::{self, loops, mounts};
use lh_wire::{ChainOp, Control, OpCode, Status};
use replica::serve::{Address, Mode, Options};
use serve_client::{MIB, Server, options, pattern, session};

/// A mounted file system, and the devices below it; all of it ends with this value.
struct Disk {
    mount: OwnedFd,
    _device: File,
    _image: tempfile::NamedTempFile,
}

impl Disk {
    fn new(kind: &str, mib: u64) -> Result<Self, String> {
        let text = |e: std::io::Error| e.to_string();
        let image = tempfile::NamedTempFile::new().map_err(text)?;
        image.as_file().set_len(mib << 20).map_err(text)?;
        let mkfs = format!("mkfs.{kind}");
        let made = Command::new(&mkfs).arg("-q").arg(image.path()).stderr(Stdio::null()).status();
        if !made.map_err(|e| format!("{mkfs}: {e}"))?.success() {
            return Err(format!("{mkfs} failed"));
        }
        let (number, device) = bind_loop(image.as_file(), "file-systems-test")?;
        let source = format!("/dev/loop{number}");
        let mount = mounts::detached(kind, &[("source", source)]).map_err(|e| format!("mounting: {e}"))?;
        // Unbinds itself with the last user: this process and the mount.
        loops::clear(device.as_fd()).map_err(text)?;
        Ok(Self { mount, _device: device, _image: image })
    }

    /// Runs a test, if there can be such a disk.
    fn with(test: &str, kind: &str, mib: u64, run: impl FnOnce(&Self, &Path)) {
        match Self::new(kind, mib) {
            Ok(disk) => run(&disk, tempfile::tempdir().unwrap().path()),
            Err(reason) => println!("SKIP {test}: {reason}"),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.mount.as_raw_fd()))
    }

    /// A server of a replica on this disk. Its socket lies elsewhere.
    fn serve(&self, place: &Path) -> Server {
        let listen = Address::Unix(place.join("socket"));
        Server::with(Options { directory: self.path("replica"), listen, ..options(place) })
    }

    /// Leaves no block free.
    fn fill(&self) -> PathBuf {
        let path = self.path("filling");
        let mut filling = File::create(&path).unwrap();
        for size in [1 << 20, 4096] {
            let bytes = vec![1; size];
            while filling.write_all(&bytes).and_then(|()| filling.sync_data()).is_ok() {}
        }
        path
    }
}

/// Marks of zeroes have their space before anything is changed, there too.
#[test]
fn zeroes_over_a_snapshot_where_no_space_is_taken_ahead() {
    let test = "zeroes_over_a_snapshot_where_no_space_is_taken_ahead";
    Disk::with(test, "ext3", 64, |disk, place| {
        let other = File::create(disk.path("other")).unwrap();
        let refused = sys::fallocate(&other, Falloc::Allocate, 0, 4096).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EOPNOTSUPP), "another file system is needed here");
        let server = disk.serve(place);
        let mut c = session(&server.socket, 1, 1);
        let (data, at) = (pattern(1, MIB as usize), 40 * u64::from(MIB));
        assert_eq!(c.write(at, &data), Status::Ok);
        let (name, created) = ("s".to_owned(), "2026-11-20T06:03:39Z".to_owned());
        let op = ChainOp::Snapshot { name, user_created: true, created, labels: Default::default() };
        let id = Instance(1);
        assert_eq!(c.control(&Control::Prepare { id, op }).status(), Status::Ok);
        assert_eq!(c.control(&Control::Commit { id }).status(), Status::Ok);
        assert_eq!(c.op(OpCode::Unmap, at, 8192).status(), Status::Ok);
        assert_eq!(c.op(OpCode::WriteZeroes, at + 65536, 4096).status(), Status::Ok);
        assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
        drop(c);
        server.stop();
        let server = disk.serve(place);
        let mut c = session(&server.socket, 2, 2);
        let mut expected = data;
        expected[..8192].fill(0);
        expected[65536..65536 + 4096].fill(0);
        assert!(c.read(at, MIB) == expected);
    });
}

/// A copy of the directory that shares its space keeps what the intent bitmap had: its next mark goes to another place.
#[test]
fn an_intent_bitmap_that_finds_no_space_is_no_failure() {
    let test = "an_intent_bitmap_that_finds_no_space_is_no_failure";
    Disk::with(test, "xfs", 320, |disk, place| {
        disk.serve(place).stop();
        let intent = File::open(disk.path("replica/engine/intent")).unwrap();
        let copy = File::create(disk.path("copy")).unwrap();
        sys::clone_range(&copy, 0, &intent, 0, intent.metadata().unwrap().len()).unwrap();
        let server = disk.serve(place);
        let mut c = session(&server.socket, 1, 1);
        let filling = disk.fill();
        let data = pattern(1, 4096);
        assert_eq!(c.write(0, &data), Status::NoSpace);
        assert_eq!(server.status.snapshot().mode, Mode::Serving);
        assert_eq!(c.state().intent, [], "what was not written is not marked");
        std::fs::remove_file(filling).unwrap();
        let began = Instant::now();
        while c.write(0, &data) != Status::Ok {
            assert!(began.elapsed() < Duration::from_secs(20), "it stays full");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(c.state().intent.len(), 1);
        assert_eq!(c.read(0, 4096), data);
    });
}
