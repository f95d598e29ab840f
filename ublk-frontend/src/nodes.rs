//! The driver's nodes in /dev, and what stands for them where nobody makes them.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::stat::{Mode, SFlag, makedev, mknod, stat};

/// Where the kernel lists the devices.
const CLASS: &str = "/sys/class/ublk-char";

/// Between two looks for a node that udev is making, or that another process is letting go of.
const LOOK: Duration = Duration::from_millis(5);

/// How long udev may take for a node. The kernel's own devtmpfs has it at once, a container without either never.
const UDEV: Duration = Duration::from_secs(1);

/// The numbers of all devices. One that was removed is none of them, though somebody may have it open still.
///
/// # Errors
/// The system's: who takes that for "none" makes a second device for a volume that has one.
pub(crate) fn devices() -> io::Result<Vec<u32>> {
    listed(Path::new(CLASS))
}

fn listed(class: &Path) -> io::Result<Vec<u32>> {
    let entries = match fs::read_dir(class) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        found.extend(name.to_str().and_then(|name| name.strip_prefix("ublkc")?.parse::<u32>().ok()));
    }
    found.sort_unstable();
    Ok(found)
}

/// Has the kernel send no more than so many requests of each of a device's queues at a time, whatever it was made with.
pub(crate) fn limit_requests(device: u32, most: u16) -> io::Result<()> {
    lower(Path::new(&format!("/sys/block/ublkb{device}/queue/nr_requests")), most)
}

fn lower(file: &Path, most: u16) -> io::Result<()> {
    let now: u64 = fs::read_to_string(file)?.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
    if now > most.into() { fs::write(file, most.to_string()) } else { Ok(()) }
}

/// Opens a device's `/dev/ublkcN`, which one process at a time may have.
pub(crate) fn open(device: u32, major: u32, minor: u32, deadline: Instant) -> io::Result<File> {
    let path = format!("/dev/ublkc{device}");
    let path = Path::new(&path);
    let udev = Instant::now() + UDEV;
    loop {
        let opened = match open_own(path, SFlag::S_IFCHR, (major, minor), open_node) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && Instant::now() > udev => {
                open_by_numbers(device, SFlag::S_IFCHR, (major, minor), open_node)
            }
            other => other,
        };
        match opened {
            Err(e) if waits(&e) && Instant::now() < deadline => std::thread::sleep(LOOK),
            other => return other,
        }
    }
}

fn waits(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ResourceBusy)
}

/// Opens a device's node. One of the same name that is another device's is none: a container that is given the host's nodes when it
/// starts keeps them, and a disk's numbers go to any disk that comes after it.
fn open_own(
    path: &Path,
    kind: SFlag,
    (major, minor): (u32, u32),
    open: fn(&Path) -> io::Result<File>,
) -> io::Result<File> {
    let found = stat(path)?;
    let is_kind = SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT == kind;
    if is_kind && found.st_rdev == makedev(major.into(), minor.into()) {
        open(path)
    } else {
        Err(io::ErrorKind::NotFound.into())
    }
}

fn open_node(path: &Path) -> io::Result<File> {
    // Non-blocking: io_uring then reads and writes at once, in the submitting thread.
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Opens a device by a node of our own, which is gone again afterwards.
fn open_by_numbers(
    device: u32,
    kind: SFlag,
    (major, minor): (u32, u32),
    open: fn(&Path) -> io::Result<File>,
) -> io::Result<File> {
    let path = format!("/dev/.longhorn-ublk{device}-{}", std::process::id());
    let path = Path::new(&path);
    // One that was killed here has left it, and in a container the next one has the same number.
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    mknod(path, kind, Mode::S_IRUSR | Mode::S_IWUSR, makedev(major.into(), minor.into()))?;
    let opened = open(path);
    // A node left behind names a device that root alone may open.
    let _ = fs::remove_file(path);
    opened
}

/// Opens `/dev/ublkbN` as its only user; `EBUSY` if it is mounted or part of another device.
pub(crate) fn open_exclusively(device: u32, major: u32, minor: u32) -> io::Result<File> {
    let path = format!("/dev/ublkb{device}");
    match open_own(Path::new(&path), SFlag::S_IFBLK, (major, minor), open_disk) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            open_by_numbers(device, SFlag::S_IFBLK, (major, minor), open_disk)
        }
        other => other,
    }
}

fn open_disk(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_cannot_be_read_is_no_empty_list() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["ublkc10", "ublkc9", "ublkb1", "ublkc", "ublkcx"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(listed(dir.path()).unwrap(), [9, 10]);
        assert!(listed(&dir.path().join("nowhere")).unwrap().is_empty(), "no driver is no device");
        assert_eq!(listed(&dir.path().join("ublkc9")).unwrap_err().kind(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn a_disk_without_a_node_or_with_anothers_is_opened_by_its_numbers() {
        use std::os::unix::fs::MetadataExt;

        let test = "a_disk_without_a_node_or_with_anothers_is_opened_by_its_numbers";
        if !nix::unistd::geteuid().is_root() || !Path::new("/sys/block/loop0").exists() {
            println!("SKIP {test}: needs root, and the loop driver");
            return;
        }
        // There is no ublk device of that number, and so no node.
        let number = u32::MAX;
        let mode = Mode::S_IRUSR;
        // One before was killed in the midst of it.
        let ours = format!("-{}", std::process::id());
        let left = format!("/dev/.longhorn-ublk{number}{ours}");
        mknod(Path::new(&left), SFlag::S_IFBLK, mode, makedev(7, 1)).unwrap();
        let anothers = format!("/dev/ublkb{number}");
        for _ in 0..2 {
            match open_exclusively(number, 7, 0) {
                Ok(disk) => assert_eq!(disk.metadata().unwrap().rdev(), makedev(7, 0)),
                // Another test may have it for itself.
                Err(e) => assert_eq!(e.kind(), io::ErrorKind::ResourceBusy, "{e}"),
            }
            // /dev/null, which cannot be opened as a disk, and is none.
            let _ = fs::remove_file(&anothers);
            mknod(Path::new(&anothers), SFlag::S_IFCHR, mode, makedev(1, 3)).unwrap();
        }
        fs::remove_file(&anothers).unwrap();
        let nodes = fs::read_dir("/dev").unwrap().filter_map(Result::ok).map(|entry| entry.file_name());
        assert!(!nodes.into_iter().any(|name| {
            let name = name.to_string_lossy();
            name.starts_with(".longhorn-ublk") && name.ends_with(&ours)
        }));
    }

    #[test]
    fn what_is_low_enough_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nr_requests");
        for (before, after) in [("256\n", "127"), ("127\n", "127\n"), ("64\n", "64\n")] {
            fs::write(&file, before).unwrap();
            lower(&file, 127).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), after);
        }
        fs::write(&file, "none").unwrap();
        assert_eq!(lower(&file, 127).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
