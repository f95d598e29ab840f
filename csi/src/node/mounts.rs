//! What is mounted where, as the kernel says, and what a path is.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::libc::EIO;
use nix::sys::stat::{major, minor};

use crate::Refused;

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// The device of its file system.
    pub(super) device: (u64, u64),
    /// What of that file system is mounted: `/`, or a path in it.
    pub(super) root: PathBuf,
    /// Where.
    pub(super) point: PathBuf,
    /// The file system.
    pub(super) kind: String,
    /// What it was mounted from, as whoever mounted it said: a device by the path that it had then.
    pub(super) source: PathBuf,
    /// The mount itself takes no writes.
    pub(super) read_only: bool,
    /// The file system takes none, as it was mounted or since the kernel stopped it for its errors.
    pub(super) super_read_only: bool,
}

impl Mount {
    /// True if its kernel has stopped the file system for its errors. Whoever asks may wait as long as the volume does.
    ///
    /// Of an XFS the mount says nothing, and the kernel goes on telling how full it is; nothing else of it can be had any more.
    pub(super) fn has_stopped(&self) -> bool {
        let is_shut = || fs::symlink_metadata(&self.point).is_err_and(|e| e.raw_os_error() == Some(EIO));
        self.super_read_only && !self.read_only || is_shut()
    }
}

/// Every mount of this mount namespace, in the order in which they were made.
pub(super) fn mounts() -> Result<Vec<Mount>, Refused> {
    let table = fs::read("/proc/self/mountinfo")
        .map_err(|e| Refused::Failed(format!("/proc/self/mountinfo: {e}")))?;
    Ok(mounts_in(&table))
}

/// Those of a mountinfo. Where a name is not UTF-8 something stands for it: no orchestrator can mean that place, and whoever writes to
/// a volume chooses names that are told here, once a pod has only a part of it (subPath).
fn mounts_in(table: &[u8]) -> Vec<Mount> {
    String::from_utf8_lossy(table).lines().filter_map(parse).collect()
}

/// One line of mountinfo (proc_pid_mountinfo(5)).
fn parse(line: &str) -> Option<Mount> {
    let (own, of_file_system) = line.split_once(" - ")?;
    let mut own = own.split(' ').skip(2);
    let (major, minor) = own.next()?.split_once(':')?;
    let (root, point, options) = (own.next()?, own.next()?, own.next()?);
    let mut rest = of_file_system.split(' ');
    let (kind, source, super_options) = (rest.next()?, rest.next()?, rest.next().unwrap_or_default());
    let has = |options: &str, any: &[&str]| options.split(',').any(|o| any.contains(&o));
    Some(Mount {
        device: (major.parse().ok()?, minor.parse().ok()?),
        root: PathBuf::from(unescape(root)),
        point: PathBuf::from(unescape(point)),
        kind: kind.to_owned(),
        source: PathBuf::from(unescape(source)),
        read_only: has(options, &["ro"]),
        super_read_only: has(super_options, STOPPED),
    })
}

/// What says of a file system that it takes no writes: the last two are ext4's since Linux 6.15, which leaves out the first.
const STOPPED: &[&str] = &["ro", "emergency_ro", "shutdown"];

/// Blanks, tabs, newlines and backslashes are written as three octal digits.
fn unescape(text: &str) -> String {
    let mut out = Vec::new();
    let bytes = text.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        let code = bytes.get(i + 1..i + 4).filter(|_| bytes[i] == b'\\');
        let code = code.and_then(|c| std::str::from_utf8(c).ok()).and_then(|c| u8::from_str_radix(c, 8).ok());
        out.push(code.unwrap_or(bytes[i]));
        i += if code.is_some() { 4 } else { 1 };
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The mount at a path: the last one that was made there, which hides the others.
pub(super) fn mount_at(path: &Path) -> Result<Option<Mount>, Refused> {
    // The kernel tells real paths.
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    Ok(mounts()?.into_iter().rfind(|m| m.point == real))
}

/// The numbers of a block device; `None`: it is none.
pub(super) fn block_numbers(path: &Path) -> Option<(u64, u64)> {
    let found = fs::metadata(path).ok().filter(|m| m.file_type().is_block_device())?;
    Some((major(found.rdev()), minor(found.rdev())))
}

/// True if the kernel has no block device of these numbers, or an empty one: without a file, a server or a connection.
pub(super) fn is_gone((major, minor): (u64, u64)) -> bool {
    let size = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/size"));
    size.is_ok_and(|size| size.trim() == "0")
        || !Path::new(&format!("/sys/dev/block/{major}:{minor}")).exists()
}

pub(super) fn is_block_device(path: &Path) -> bool {
    block_numbers(path).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_mountinfo_is_read() {
        let line = r"91 30 7:3 /sub /var/lib/pods/a\040b rw,noatime shared:1 - ext4 /dev/longhorn/v ro,errors=continue";
        let mount = parse(line).unwrap();
        assert_eq!((mount.device, mount.kind.as_str()), ((7, 3), "ext4"));
        assert_eq!(
            (mount.root.as_path(), mount.point.as_path()),
            (Path::new("/sub"), Path::new("/var/lib/pods/a b"))
        );
        assert_eq!(mount.source, Path::new("/dev/longhorn/v"));
        assert!(!mount.read_only && mount.super_read_only);
        for stopped in ["rw,emergency_ro", "rw,abort,shutdown"] {
            let mount = parse(&line.replace("ro,errors=continue", stopped)).unwrap();
            assert!(!mount.read_only && mount.super_read_only, "{stopped}");
        }
        // Without optional fields.
        let line = "22 1 0:21 / /sys ro - sysfs sysfs rw";
        let mount = parse(line).unwrap();
        assert!(mount.read_only && !mount.super_read_only);
        assert_eq!(parse("nonsense"), None);
        assert_eq!(unescape(r"a\134b\04"), r"a\b\04");
    }

    #[test]
    fn a_name_that_is_no_text_hides_no_other_mount() {
        let table = b"91 30 7:3 /\xff /pods/a rw - ext4 /dev/longhorn/v rw\n92 30 7:4 / /pods/b rw - ext4 /dev/longhorn/w rw\n";
        let points: Vec<PathBuf> = mounts_in(table).into_iter().map(|m| m.point).collect();
        assert_eq!(points, [Path::new("/pods/a"), Path::new("/pods/b")]);
    }

    #[test]
    fn this_machine_has_a_root() {
        assert!(mount_at(Path::new("/proc")).unwrap().is_some_and(|m| m.kind == "proc"));
        assert_eq!(mount_at(Path::new("/proc/self/nowhere")).unwrap(), None);
        assert!(!is_block_device(Path::new("/dev/null")) && !is_block_device(Path::new("/nowhere")));
        // No block device has the major number of file systems without one.
        assert!(is_gone((0, 1)));
    }
}
