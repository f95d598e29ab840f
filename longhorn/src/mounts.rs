//! Where a block device is mounted.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Where the file system of a block device is mounted, in this process's mount namespace.
///
/// # Errors
/// There is no such device, or the table cannot be read.
pub(crate) fn mount_of(device: &Path) -> Result<Option<PathBuf>> {
    let number = std::fs::metadata(device).with_context(|| device.display().to_string())?.rdev();
    let table = std::fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
    Ok(mount_in(&table, (rustix::fs::major(number), rustix::fs::minor(number))))
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
}
