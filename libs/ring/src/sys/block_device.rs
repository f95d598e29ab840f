//! Settings of a block device that outlive what it was bound or connected to: whoever has the number next finds them as
//! somebody before has left them.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use nix::sys::stat::{fstat, major, minor};

/// _IO(0x12, 93) (include/uapi/linux/fs.h).
const BLKROSET: libc::Ioctl = 0x125d;

/// _IO(0x12, 105), and what it is to do (include/uapi/linux/blkpg.h).
const BLKPG: libc::Ioctl = 0x1269;
const BLKPG_DEL_PARTITION: libc::c_int = 2;

/// struct blkpg_partition.
#[repr(C)]
struct BlkpgPartition {
    start: i64,
    length: i64,
    number: libc::c_int,
    names: [[u8; 64]; 2],
}

const _: () = assert!(size_of::<BlkpgPartition>() == 152);

/// struct blkpg_ioctl_arg.
#[repr(C)]
struct BlkpgIoctlArg {
    op: libc::c_int,
    flags: libc::c_int,
    datalen: libc::c_int,
    data: *const BlkpgPartition,
}

/// Makes a device that has just been bound or connected what its driver says: it may be written, though somebody has
/// forbidden that (`blockdev --setro`); its flushes are sent, though somebody has said that it has no cache (`write through`
/// in `queue/write_cache`), without which what a flush has promised would be lost with the power; and its requests are as
/// long as the driver takes them. For devices whose driver asks for flushes.
///
/// # Errors
/// The system's: the device is not to be used then.
pub fn as_new(device: BorrowedFd<'_>) -> io::Result<()> {
    let read_only: libc::c_int = 0;
    // SAFETY: the command reads one int, which lives until the call returns.
    if unsafe { libc::ioctl(device.as_raw_fd(), BLKROSET, &raw const read_only) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let queue = queue_of(device)?;
    send_flushes(&queue.join("write_cache"))?;
    let number = |name: &str| fs::read_to_string(queue.join(name)).ok()?.trim().parse::<u64>().ok();
    if number("max_sectors_kb") < number("max_hw_sectors_kb") {
        // Older kernels have no word for "as long as may be", and short requests are only slow.
        let _ = fs::write(queue.join("max_sectors_kb"), "0");
    }
    Ok(())
}

/// Removes the partitions of a device that somebody has added by hand (partx(8)). A driver that looks for none does not take them
/// away with what it was bound to, and they are parts of what it is bound to next.
///
/// # Errors
/// The system's: `ResourceBusy` if one is in use. It, and those behind it, are still there then.
pub fn remove_partitions(device: BorrowedFd<'_>) -> io::Result<()> {
    let entries = fs::read_dir(directory_of(device)?)?.collect::<io::Result<Vec<_>>>()?;
    for entry in entries {
        let Ok(number) = fs::read_to_string(entry.path().join("partition")) else { continue };
        let number = number.trim().parse().map_err(io::Error::other)?;
        let data = BlkpgPartition { start: 0, length: 0, number, names: [[0; 64]; 2] };
        let len = i32::try_from(size_of_val(&data)).unwrap_or(0);
        let arg = BlkpgIoctlArg { op: BLKPG_DEL_PARTITION, flags: 0, datalen: len, data: &raw const data };
        // SAFETY: the command reads one blkpg_ioctl_arg and the blkpg_partition in it, which live until the call returns.
        if unsafe { libc::ioctl(device.as_raw_fd(), BLKPG, &raw const arg) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn queue_of(device: BorrowedFd<'_>) -> io::Result<PathBuf> {
    Ok(directory_of(device)?.join("queue"))
}

/// The device's directory in sysfs.
fn directory_of(device: BorrowedFd<'_>) -> io::Result<PathBuf> {
    let rdev = fstat(device)?.st_rdev;
    Ok(PathBuf::from(format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev))))
}

/// Where sysfs may only be read, as in many containers, nothing fails unless something would have to be changed.
fn send_flushes(setting: &Path) -> io::Result<()> {
    match fs::read_to_string(setting) {
        Ok(now) if now.trim() == "write through" => fs::write(setting, "write back"),
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_cache_that_is_told_of_and_one_that_nobody_knows_of_are_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let setting = directory.path().join("write_cache");
        send_flushes(&setting).unwrap();
        assert!(!setting.exists());
        for (before, after) in [("write back\n", "write back\n"), ("write through\n", "write back")] {
            fs::write(&setting, before).unwrap();
            send_flushes(&setting).unwrap();
            assert_eq!(fs::read_to_string(&setting).unwrap(), after);
        }
    }

    #[test]
    fn what_is_no_block_device_is_none() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(as_new(file.as_fd()).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    }
}
