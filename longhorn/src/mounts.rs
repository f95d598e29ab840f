//! Where a block device is mounted.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Where the kernel names the devices of the file systems that are mounted, whoever sees the mount: one folder for each kind.
const MOUNTED: &str = "/sys/fs";

/// File systems that do so, which are those that Longhorn's volumes hold.
const KINDS: [&str; 2] = ["ext4", "xfs"];

/// Where the file system of a block device is mounted, in this process's mount namespace.
///
/// # Errors
/// There is no such device, or the table cannot be read.
pub(crate) fn mount_of(device: &Path) -> Result<Option<PathBuf>> {
    let number = std::fs::metadata(device).with_context(|| device.display().to_string())?.rdev();
    let table = std::fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
    Ok(mount_in(&table, (rustix::fs::major(number), rustix::fs::minor(number))))
}

/// Which file system of the block device is mounted, in whatever mount namespace; `None`: none that the kernel tells.
///
/// # Errors
/// There is no such device.
pub(crate) fn kind_mounted_anywhere(device: &Path) -> Result<Option<&'static str>> {
    let number = std::fs::metadata(device).with_context(|| device.display().to_string())?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    // A device that the kernel does not list has nothing mounted.
    let Ok(disk) = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")) else { return Ok(None) };
    Ok(disk.file_name().and_then(|name| kind_in(Path::new(MOUNTED), Path::new(name))))
}

fn kind_in(mounted: &Path, disk: &Path) -> Option<&'static str> {
    KINDS.into_iter().find(|kind| mounted.join(kind).join(disk).is_dir())
}

/// The first mount of the device in a mount table (proc(5): "/proc/pid/mountinfo").
fn mount_in(table: &str, device: (u32, u32)) -> Option<PathBuf> {
    let number = format!("{}:{}", device.0, device.1);
    let line = table.lines().find(|line| line.split(' ').nth(2) == Some(number.as_str()))?;
    line.split(' ').nth(4).map(|place| PathBuf::from(unescaped(place)))
}

/// Spaces and the like are written as three octal digits.
fn unescaped(text: &str) -> String {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    escapes.iter().fold(text.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_in_the_mount_table() {
        let table = "\
            24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            90 24 7:3 / /mnt/my\\040data rw,relatime - ext4 /dev/longhorn/demo rw\n\
            91 24 7:3 /sub /mnt/other rw - ext4 /dev/longhorn/demo rw\n";
        assert_eq!(mount_in(table, (7, 3)), Some(PathBuf::from("/mnt/my data")));
        assert_eq!(mount_in(table, (7, 4)), None);
        assert_eq!(mount_in("", (7, 3)), None);
    }

    #[test]
    fn the_kernel_tells_of_a_mount_that_is_not_seen() {
        let mounted = tempfile::tempdir().unwrap();
        for disk in ["ext4/loop3", "ext4/features", "xfs/nbd0"] {
            std::fs::create_dir_all(mounted.path().join(disk)).unwrap();
        }
        let kind = |disk: &str| kind_in(mounted.path(), Path::new(disk));
        assert_eq!((kind("loop3"), kind("nbd0"), kind("loop30")), (Some("ext4"), Some("xfs"), None));
    }
}
