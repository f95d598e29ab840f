//! The driver's nodes in /dev, and what stands for them where nobody makes them.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::stat::{Mode, SFlag, makedev, mknod};

/// Where the kernel lists the devices.
const CLASS: &str = "/sys/class/ublk-char";

/// Between two looks for a node that udev is making, or that another process is letting go of.
const LOOK: Duration = Duration::from_millis(5);

/// How long udev may take for a node. The kernel's own devtmpfs has it at once, a container without either never.
const UDEV: Duration = Duration::from_secs(1);

/// The numbers of all devices.
pub(crate) fn devices() -> Vec<u32> {
    let Ok(entries) = fs::read_dir(CLASS) else { return Vec::new() };
    let mut found: Vec<u32> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok())
        .collect();
    found.sort_unstable();
    found
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
        let opened = match open_node(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && Instant::now() > udev => {
                open_by_numbers(device, major, minor)
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

fn open_node(path: &Path) -> io::Result<File> {
    // Non-blocking: io_uring then reads and writes at once, in the submitting thread.
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Opens the device by a node of our own, which is gone again afterwards.
fn open_by_numbers(device: u32, major: u32, minor: u32) -> io::Result<File> {
    let path = format!("/dev/.longhorn-ublkc{device}-{}", std::process::id());
    let path = Path::new(&path);
    mknod(path, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, makedev(major.into(), minor.into()))?;
    let opened = open_node(path);
    // A node left behind names a device that root alone may open.
    let _ = fs::remove_file(path);
    opened
}

/// Opens a block device as its only user; `EBUSY` if it is mounted or part of another device.
pub(crate) fn open_exclusively(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

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
