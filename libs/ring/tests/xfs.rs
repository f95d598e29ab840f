//! What ext4 lacks: shared extents, tried on an XFS of its own in a loop device, mounted where nobody sees it. Skipped
//! with a line of explanation where mkfs.xfs, a privilege or the kernel's XFS is missing.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lh_rig::bind_loop;
use lh_ring::Falloc;
use lh_ring::sys::{self, FileExtent, loops, mounts};

/// A mounted XFS, and the devices below it; all of it ends with this value.
struct Xfs {
    mount: OwnedFd,
    _device: File,
    _image: tempfile::NamedTempFile,
}

impl Xfs {
    fn new() -> Result<Self, String> {
        let image =
            tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).map_err(|e| e.to_string())?;
        image.as_file().set_len(320 << 20).map_err(|e| e.to_string())?;
        let made = Command::new("mkfs.xfs").arg("-q").arg(image.path()).stderr(Stdio::null()).status();
        if !made.map_err(|e| format!("mkfs.xfs: {e}"))?.success() {
            return Err("mkfs.xfs failed".into());
        }
        let (number, device) = bind_loop(image.as_file(), "ring-xfs-test")?;
        let source = format!("/dev/loop{number}");
        let mount = mounts::detached("xfs", &[("source", source)]).map_err(|e| format!("mounting: {e}"))?;
        // Unbinds itself with the last user: this process and the mount.
        loops::clear(device.as_fd()).map_err(|e| e.to_string())?;
        Ok(Self { mount, _device: device, _image: image })
    }

    fn open(&self, name: &str) -> File {
        let path = format!("/proc/self/fd/{}/{name}", self.mount.as_raw_fd());
        File::options().read(true).write(true).create(true).truncate(false).open(path).expect("open")
    }
}

fn extents(file: &File) -> Vec<FileExtent> {
    let mut found = Vec::new();
    assert!(sys::fiemap(file, 0, u64::MAX, true, &mut found).expect("fiemap"));
    found
}

#[test]
fn clones_share_space_and_turn_unwritten_extents_into_holes() {
    let xfs = match Xfs::new() {
        Ok(xfs) => xfs,
        Err(reason) => {
            println!("SKIP clones_share_space_and_turn_unwritten_extents_into_holes: {reason}");
            return;
        }
    };
    let (from, to) = (xfs.open("from"), xfs.open("to"));
    assert_eq!(sys::file_system(&from).expect("statfs").magic, 0x5846_5342);
    from.write_all_at(&[7; 65536], 0).expect("write");
    sys::fallocate(&from, Falloc::Allocate, 65536, 65536).expect("fallocate");
    assert!(extents(&from).iter().any(FileExtent::is_unwritten));
    sys::clone_range(&to, 0, &from, 0, 131_072).expect("clone");
    let cloned = extents(&to);
    assert_eq!(cloned.iter().map(|e| (e.logical, e.length)).collect::<Vec<_>>(), [(0, 65536)]);
    assert!(cloned.iter().all(|e| e.flags & FileExtent::SHARED != 0));
    to.write_all_at(&[8; 4096], 8192).expect("write");
    let mut bytes = vec![0; 65536];
    from.read_exact_at(&mut bytes, 0).expect("read");
    assert!(bytes == [7; 65536], "a write to the clone is not one to its source");
    to.read_exact_at(&mut bytes, 0).expect("read");
    assert!(bytes[8192..12288] == [8; 4096] && bytes[12288..] == [7; 53248]);
    let unaligned = sys::clone_range(&to, 100, &from, 0, 4096).expect_err("unaligned");
    assert_eq!(unaligned.raw_os_error(), Some(libc::EINVAL));

    // Frozen: a writer waits for the thaw.
    let root = File::open(format!("/proc/self/fd/{}", xfs.mount.as_raw_fd())).expect("open");
    sys::freeze(&root).expect("freeze");
    assert_eq!(sys::freeze(&root).expect_err("twice").raw_os_error(), Some(libc::EBUSY));
    let writer = std::thread::spawn(move || {
        to.write_all_at(&[9; 4096], 1 << 20).expect("write");
        Instant::now()
    });
    std::thread::sleep(Duration::from_millis(50));
    let thawed = Instant::now();
    sys::thaw(&root).expect("thaw");
    assert!(writer.join().expect("writer") > thawed);
}
