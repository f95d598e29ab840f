//! Where a block device is mounted.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Where the kernel names the devices of the file systems that are mounted, whoever sees the mount: one folder for each kind.
const MOUNTED: &str = "/sys/fs";

/// What is mounted where (proc(5): "/proc/pid/mountinfo").
const TABLE: &str = "/proc/self/mountinfo";

/// File systems that do so, which are those that Longhorn's volumes hold.
const KINDS: [&str; 2] = ["ext4", "xfs"];

/// Where the file system of a block device is mounted, in this process's mount namespace.
///
/// # Errors
/// There is no such device, or the table cannot be read.
pub(crate) fn mount_of(device: &Path) -> Result<Option<PathBuf>> {
    let number = std::fs::metadata(device).with_context(|| device.display().to_string())?.rdev();
    let table = std::fs::read(TABLE).context(TABLE)?;
    Ok(mount_in(&table, (rustix::fs::major(number), rustix::fs::minor(number))))
}

/// The mount table of this process's mount namespace, as text. Names of folders need not be any: anybody's mount may lie in one that
/// is not, and hides no other.
pub(crate) fn table_as_text() -> String {
    String::from_utf8_lossy(&std::fs::read(TABLE).unwrap_or_default()).into_owned()
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

/// The first mount of the device in a mount table.
fn mount_in(table: &[u8], device: (u32, u32)) -> Option<PathBuf> {
    let number = format!("{}:{}", device.0, device.1);
    let mut lines = table.split(|byte| *byte == b'\n').map(|line| line.split(|byte| *byte == b' '));
    let mut line = lines.find(|line| line.clone().nth(2) == Some(number.as_bytes()))?;
    line.nth(4).map(unescaped)
}

/// Spaces and the like are written as three octal digits.
fn unescaped(text: &[u8]) -> PathBuf {
    let escapes = [(&b"\\040"[..], b' '), (b"\\011", b'\t'), (b"\\012", b'\n'), (b"\\134", b'\\')];
    let (mut plain, mut rest) = (Vec::with_capacity(text.len()), text);
    while let Some(first) = rest.first() {
        let escape = escapes.iter().find(|(escape, _)| rest.starts_with(escape));
        plain.push(escape.map_or(*first, |(_, byte)| *byte));
        rest = &rest[escape.map_or(1, |(escape, _)| escape.len())..];
    }
    PathBuf::from(OsString::from_vec(plain))
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
        assert_eq!(mount_in(table.as_bytes(), (7, 3)), Some(PathBuf::from("/mnt/my data")));
        assert_eq!(mount_in(table.as_bytes(), (7, 4)), None);
        assert_eq!(mount_in(b"", (7, 3)), None);
    }

    /// Somebody has bound a folder of his whose name is no text.
    #[test]
    fn a_name_that_is_no_text_hides_no_mount() {
        let table = b"\
            89 24 8:1 /pod /mnt/\xff\\134040 rw - ext4 /dev/sda1 rw\n\
            90 24 7:3 / /mnt/data rw,relatime - ext4 /dev/longhorn/demo rw\n";
        assert_eq!(mount_in(table, (7, 3)), Some(PathBuf::from("/mnt/data")));
        let odd = OsString::from_vec(b"/mnt/\xff\\040".to_vec());
        assert_eq!(mount_in(table, (8, 1)), Some(PathBuf::from(odd)), "an escape is read once");
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
