//! Who uses a block device: what `down` tells a person when a device cannot be stopped.
//!
//! It only looks and never opens the device. What it misses (a mapping without a descriptor, a process that comes a
//! moment later) the kernel still sees: the keeper's stop asks the loop driver, which counts the openers.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::node;
use lh_ring::sys::mounts::cached_identity_at;

/// What a mount is called among the holders.
const MOUNT: &str = "mount";

/// Where the kernel has a directory for each file system that it has read in and not let go of, named as its device is. That of jbd2
/// names journals that lie on a device of their own.
const FILE_SYSTEMS: [(&str, &str); 4] =
    [("ext4", "sys/fs/ext4"), ("xfs", "sys/fs/xfs"), ("f2fs", "sys/fs/f2fs"), ("jbd2", "proc/fs/jbd2")];

/// Where btrfs names the devices of a file system.
const BTRFS: &str = "sys/fs/btrfs";

/// One user of a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// The process; `None` where the kernel itself holds the device.
    pub pid: Option<i32>,
    /// The process's name, or the part of the kernel: `mount`, `swap`, `dm-0`, `loop3`.
    pub name: String,
    /// What it does: `mounted on /mnt`, `has it open`, ...
    pub what: String,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "{} (pid {pid}) {}", self.name, self.what),
            None => write!(f, "{}: {}", self.name, self.what),
        }
    }
}

/// Everybody who uses the block device that the node `device` names, or a partition of it, in a fixed order; empty if `device` is
/// no node. The caller's own process is left out.
pub fn users_of(device: &Path) -> Vec<Holder> {
    node::rdev(device).map(users_of_number).unwrap_or_default()
}

/// The same of the block device with these numbers, wherever it has nodes.
pub fn users_of_number(rdev: u64) -> Vec<Holder> {
    let rdevs = with_partitions(rdev);
    let mut holders: Vec<Holder> = rdevs.iter().flat_map(|rdev| stacked(*rdev)).collect();
    holders.extend(swaps(&rdevs));
    holders.extend(loops(&rdevs));
    processes(&rdevs, &mut holders);
    // Who knows where it is mounted needs no more.
    if !holders.iter().any(|holder| holder.name == MOUNT) {
        holders.extend(file_systems(&rdevs, Path::new("/")));
    }
    holders.sort();
    holders.dedup();
    holders
}

/// The numbers of a block device and of its partitions, which have nodes of their own.
fn with_partitions(rdev: u64) -> Vec<u64> {
    let mut rdevs = vec![rdev];
    let Ok(entries) = fs::read_dir(node::sys_directory(rdev)) else { return rdevs };
    let partitions = entries.filter_map(Result::ok).filter(|e| e.path().join("partition").exists());
    rdevs.extend(partitions.filter_map(|e| node::rdev_in(&e.path())));
    rdevs
}

/// Device mapper, md and their like on top (sysfs, `holders`).
fn stacked(rdev: u64) -> Vec<Holder> {
    let Ok(entries) = fs::read_dir(node::sys_directory(rdev).join("holders")) else { return Vec::new() };
    entries
        .filter_map(Result::ok)
        .map(|e| Holder {
            pid: None,
            name: e.file_name().to_string_lossy().into_owned(),
            what: match fs::read_to_string(e.path().join("dm/name")) {
                // By this name it is closed.
                Ok(mapped) => format!("stands on it as {}", mapped.trim_end()),
                Err(_) => "stands on it".into(),
            },
        })
        .collect()
}

fn swaps(rdevs: &[u64]) -> Option<Holder> {
    let swaps = fs::read_to_string("/proc/swaps").ok()?;
    let own = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    let mut own = own.filter(|path| is_node_of(Path::new(path), rdevs));
    own.next().map(|_| Holder { pid: None, name: "swap".into(), what: "swaps to it".into() })
}

/// Loop devices whose file is the device.
fn loops(rdevs: &[u64]) -> Vec<Holder> {
    let Ok(entries) = fs::read_dir("/sys/block") else { return Vec::new() };
    let backing = |e: &fs::DirEntry| fs::read_to_string(e.path().join("loop/backing_file")).ok();
    entries
        .filter_map(Result::ok)
        .filter(|e| backing(e).is_some_and(|file| is_node_of(Path::new(file.trim_end()), rdevs)))
        .map(|e| Holder {
            pid: None,
            name: e.file_name().to_string_lossy().into_owned(),
            what: "is a loop device on it".into(),
        })
        .collect()
}

/// File systems on the devices of which no mount tells: one of several devices is mounted from one of them, and one that was unmounted
/// lazily lives on as long as somebody has a file of it open.
fn file_systems(rdevs: &[u64], root: &Path) -> Vec<Holder> {
    let names: Vec<OsString> = rdevs.iter().filter_map(|rdev| node::name_of(*rdev)).collect();
    let mut found: Vec<&str> = Vec::new();
    for (kind, place) in FILE_SYSTEMS {
        if names.iter().any(|name| root.join(place).join(name).exists()) {
            found.push(kind);
        }
    }
    let of_several = fs::read_dir(root.join(BTRFS)).into_iter().flatten().filter_map(Result::ok);
    let mut devices = of_several.map(|entry| entry.path().join("devices"));
    if devices.any(|devices| names.iter().any(|name| devices.join(name).symlink_metadata().is_ok())) {
        found.push("btrfs");
    }
    let what = "a file system on it is mounted, or was and has open files";
    found.iter().map(|kind| Holder { pid: None, name: (*kind).into(), what: what.into() }).collect()
}

fn is_node_of(path: &Path, rdevs: &[u64]) -> bool {
    node::rdev(path).is_some_and(|rdev| rdevs.contains(&rdev))
}

/// Open descriptors of all processes, and mounts in all their mount namespaces.
fn processes(rdevs: &[u64], holders: &mut Vec<Holder>) {
    let Ok(entries) = fs::read_dir("/proc") else { return };
    let own = i32::try_from(std::process::id()).ok();
    let mut namespaces = HashSet::new();
    // The caller's own namespace first: its mounts are named without a process.
    if let Ok(namespace) = fs::read_link("/proc/self/ns/mnt") {
        namespaces.insert(namespace);
        holders.extend(mounts(rdevs, Path::new("/proc/self/mountinfo"), None));
    }
    for entry in entries.filter_map(Result::ok) {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
        let directory = entry.path();
        if fs::read_link(directory.join("ns/mnt")).is_ok_and(|namespace| namespaces.insert(namespace)) {
            holders.extend(mounts(rdevs, &directory.join("mountinfo"), Some(pid)));
        }
        // One that has ended meanwhile has no name any more, and nothing open.
        if Some(pid) != own
            && has_open(rdevs, &directory)
            && let Some(name) = process_name(&directory)
        {
            holders.push(Holder { pid: Some(pid), name, what: "has it open".into() });
        }
    }
}

fn process_name(directory: &Path) -> Option<String> {
    Some(fs::read_to_string(directory.join("comm")).ok()?.trim_end().to_owned())
}

fn has_open(rdevs: &[u64], process: &Path) -> bool {
    let Ok(entries) = fs::read_dir(process.join("fd")) else { return false };
    entries.filter_map(Result::ok).any(|e| is_device(&e.path(), rdevs))
}

/// True if the descriptor is open on the device. No file's server is asked: some may be dead, this device's own among
/// them.
fn is_device(descriptor: &Path, rdevs: &[u64]) -> bool {
    let Ok(target) = fs::read_link(descriptor) else { return false };
    let name = target.as_os_str().as_encoded_bytes();
    if !name.starts_with(b"/") || name.starts_with(b"/memfd:") {
        return false;
    }
    let device = cached_identity_at(descriptor).ok().and_then(|identity| identity.block_device);
    device.is_some_and(|device| rdevs.contains(&device))
}

/// Mounts of the devices in one namespace (proc_pid_mountinfo(5)).
fn mounts(rdevs: &[u64], mountinfo: &Path, pid: Option<i32>) -> Vec<Holder> {
    let Ok(bytes) = fs::read(mountinfo) else { return Vec::new() };
    mounts_in(&String::from_utf8_lossy(&bytes), rdevs)
        .map(|at| Holder { pid, name: MOUNT.into(), what: format!("mounted on {}", at.display()) })
        .collect()
}

/// Mount points of the devices, also where the mount's own number is another but its source is a node of one (btrfs), or it keeps its log
/// or its real-time data there (XFS).
fn mounts_in<'a>(mountinfo: &'a str, rdevs: &'a [u64]) -> impl Iterator<Item = PathBuf> + 'a {
    mountinfo.lines().filter_map(move |line| {
        let mut fields = line.split(' ');
        let device = fields.nth(2)?;
        let point = fields.nth(1)?;
        let mut file_system = line.split(" - ").nth(1).into_iter().flat_map(|rest| rest.split(' ').skip(1));
        let (source, options) = (file_system.next(), file_system.next());
        let others = options.into_iter().flat_map(|options| options.split(','));
        let others = others.filter_map(|o| o.strip_prefix("logdev=").or_else(|| o.strip_prefix("rtdev=")));
        let is_one = node::parse_numbers(device).is_some_and(|device| rdevs.contains(&device));
        let mut paths = source.into_iter().chain(others);
        let is_there = is_one || paths.any(|path| is_node_of(Path::new(&unescape(path)), rdevs));
        is_there.then(|| PathBuf::from(unescape(point)))
    })
}

/// Undoes the kernel's `\040` for a space and its like.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 8).ok());
        match octal {
            Some(byte) if first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::makedev;

    use super::*;

    #[test]
    fn mount_points_of_a_device() {
        let text = "28 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
                    40 28 7:3 / /mnt/a\\040b rw shared:1 - ext4 /dev/longhorn/x rw\n\
                    41 28 7:30 / /other rw - ext4 /dev/loop30 rw\n";
        let found: Vec<_> = mounts_in(text, &[makedev(7, 3)]).collect();
        assert_eq!(found, [PathBuf::from("/mnt/a b")]);
        let both = mounts_in(text, &[makedev(7, 3), makedev(7, 30)]).count();
        assert_eq!((both, mounts_in("broken\n\n", &[makedev(7, 3)]).count()), (2, 0));
    }

    /// As the kernel shows them of a device that there is on every Linux.
    #[test]
    fn file_systems_that_no_mount_tells_of_are_seen() {
        let mut all = fs::read_dir("/sys/class/block").expect("sysfs is mounted");
        let device = all.next().expect("a block device").expect("its name");
        let (rdev, name) = (node::rdev_in(&device.path()).unwrap(), device.file_name());
        let root = tempfile::tempdir().unwrap();
        let holders = || file_systems(&[rdev], root.path());
        for other in [
            "sys/fs/ext4/features",
            "sys/fs/btrfs/features",
            "sys/fs/btrfs/u-u/devices/other",
            "proc/fs/jbd2/other-8",
        ] {
            fs::create_dir_all(root.path().join(other)).unwrap();
        }
        assert_eq!(holders(), []);
        for (place, kind) in [
            ("sys/fs/xfs", "xfs"),
            ("sys/fs/ext4", "ext4"),
            ("proc/fs/jbd2", "jbd2"),
            ("sys/fs/btrfs/u-u/devices", "btrfs"),
        ] {
            let there = root.path().join(place).join(&name);
            fs::create_dir_all(&there).unwrap();
            assert_eq!(holders().iter().map(|h| h.name.as_str()).collect::<Vec<_>>(), [kind]);
            fs::remove_dir(&there).unwrap();
        }
    }

    #[test]
    fn a_path_that_is_no_device_has_no_users() {
        assert_eq!(users_of(Path::new("/proc/self/exe")), []);
        assert_eq!(users_of(Path::new("/nonexistent")), []);
    }

    #[test]
    fn holders_read_well() {
        let process = Holder { pid: Some(7), name: "fio".into(), what: "has it open".into() };
        assert_eq!(process.to_string(), "fio (pid 7) has it open");
        let mount = Holder { pid: None, name: "mount".into(), what: "mounted on /mnt".into() };
        assert_eq!(mount.to_string(), "mount: mounted on /mnt");
    }
}
