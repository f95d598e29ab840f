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

/// The first mount of the device in a mount table that its path leads to. Where something is mounted over it, or over a folder above it,
/// the path leads there.
fn mount_in(table: &[u8], device: (u32, u32)) -> Option<PathBuf> {
    let number = format!("{}:{}", device.0, device.1);
    let mounts: Vec<Mount<'_>> = table.split(|byte| *byte == b'\n').filter_map(Mount::of).collect();
    let is_seen = |mount: &&Mount<'_>| {
        let below = |m: &&Mount<'_>| mounts.iter().find(|other| other.id == m.parent && m.id != m.parent);
        let way: Vec<&Mount<'_>> = std::iter::successors(Some(*mount), below).take(mounts.len()).collect();
        let is_on_it = |other: &Mount<'_>| way.iter().any(|m| m.id == other.id);
        !mounts.iter().any(|other| !is_on_it(other) && way.iter().any(|m| other.covers(m)))
    };
    let mut own = mounts.iter().filter(|mount| mount.device == number.as_bytes());
    own.find(is_seen).map(|mount| mount.place.clone())
}

/// A line of the table.
struct Mount<'a> {
    id: &'a [u8],
    /// The mount on which it lies.
    parent: &'a [u8],
    device: &'a [u8],
    place: PathBuf,
}

impl<'a> Mount<'a> {
    fn of(line: &'a [u8]) -> Option<Self> {
        let mut words = line.split(|byte| *byte == b' ');
        let (id, parent, device) = (words.next()?, words.next()?, words.next()?);
        Some(Self { id, parent, device, place: words.nth(1).map(unescaped)? })
    }

    /// It lies on the other one's root; or beside it, on a folder above: that was mounted before, or would lie on this one.
    fn covers(&self, other: &Self) -> bool {
        let is_over = self.parent == other.id && self.place == other.place;
        let is_above =
            self.parent == other.parent && self.place != other.place && other.place.starts_with(&self.place);
        is_over || is_above
    }
}

/// A path in one of the kernel's tables: spaces and the like are written as three octal digits.
pub(crate) fn unescaped(text: &[u8]) -> PathBuf {
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

    /// Whoever freezes or trims what the path leads to would meet another file system.
    #[test]
    fn what_something_is_mounted_over_is_not_taken_for_what_its_path_leads_to() {
        let volume = "24 1 254:0 / / rw - ext4 /dev/vda rw\n\
                      90 24 7:3 / /mnt/data rw - ext4 /dev/longhorn/demo rw\n";
        let over = |line: &str| mount_in(format!("{volume}{line}\n").as_bytes(), (7, 3));
        let seen = Some(PathBuf::from("/mnt/data"));
        assert_eq!(over("91 90 0:44 / /mnt/data rw - tmpfs none rw"), None, "over it");
        assert_eq!(over("91 24 0:44 / /mnt rw - tmpfs none rw"), None, "over the folder above it");
        assert_eq!(over("91 24 0:44 / /mnt/da rw - tmpfs none rw"), seen, "beside it");
        assert_eq!(over("91 90 0:44 / /mnt/data/a rw - tmpfs none rw"), seen, "in it");
        let again =
            "91 90 0:44 / /mnt/data rw - tmpfs none rw\n92 24 7:3 / /pod rw - ext4 /dev/longhorn/demo rw";
        assert_eq!(over(again), Some("/pod".into()), "seen elsewhere");
        let below = "24 1 254:0 / / rw - ext4 /dev/vda rw\n25 24 8:1 / /srv rw - ext4 /dev/sda1 rw\n\
                     90 25 7:3 / /srv/data rw - ext4 /dev/longhorn/demo rw\n91 25 0:44 / /srv rw - tmpfs none rw\n";
        assert_eq!(mount_in(below.as_bytes(), (7, 3)), None, "over what it lies on");
        let early = "1 1 0:1 / / rw - rootfs rootfs rw\n24 1 254:0 / / rw - ext4 /dev/vda rw\n\
                     90 24 7:3 / /mnt rw - ext4 /dev/longhorn/demo rw\n";
        assert_eq!(
            mount_in(early.as_bytes(), (7, 3)),
            Some("/mnt".into()),
            "the root over the one before it"
        );
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
