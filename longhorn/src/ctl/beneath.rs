//! What a replica's directory lies on. On its own volume's device it would be written by what it is written for: a write there waits for
//! itself, and the volume can never be started again.
//!
//! Between a folder and a disk there may be partitions, device mapper, loop devices, and other volumes, whose replicas lie on disks in turn.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use control::host::{Root, VolumeRecord};
use fuse_frontend::node;
use nix::sys::stat::{major, makedev, minor};

use crate::device_names::{DEVICES, device_of};
use crate::mounts::{table_as_text, unescaped};

/// Where the kernel describes block devices, by their numbers.
const BLOCKS: &str = "/sys/dev/block";

/// Refuses a directory, which need not be there yet, that lies on the volume's own device, or on another volume that does.
///
/// # Errors
/// The volumes between, and what to do.
pub(super) fn check(root: &Root, volume: &str, directory: &Path) -> Result<()> {
    let kernel = Kernel { blocks: Path::new(BLOCKS).to_owned(), mounts: table_as_text() };
    let volumes = volumes();
    let name_of = |device: u64| volumes.iter().find(|(_, own)| *own == device).map(|(name, _)| name.clone());
    let replicas = |name: &str| {
        let record = VolumeRecord::load(root, name).ok();
        record.map_or_else(Vec::new, |r| r.replicas.into_iter().map(|r| r.directory).collect())
    };
    let Some(between) = way(volume, directory, &name_of, &replicas, &|device| kernel.below(device)) else {
        return Ok(());
    };
    let through = match between.is_empty() {
        true => format!("{}, the volume's own device", device_of(volume).display()),
        false => format!("volume {}, which lies on volume {volume} itself", between.join(", on volume ")),
    };
    bail!(
        "{} lies on {through}: a replica there would have to be written before it could be written. Choose a directory on another disk",
        directory.display()
    )
}

/// The volumes whose devices are here, with these devices' numbers.
fn volumes() -> Vec<(String, u64)> {
    let entries = fs::read_dir(DEVICES).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| node::rdev(&device_of(&name)).map(|device| (name, device))).collect()
}

/// The other volumes on the way from a directory down to a volume's device; `None` if no way leads there.
fn way(
    volume: &str,
    directory: &Path,
    name_of: &impl Fn(u64) -> Option<String>,
    replicas: &impl Fn(&str) -> Vec<PathBuf>,
    below: &impl Fn(u64) -> Vec<u64>,
) -> Option<Vec<String>> {
    let device_under =
        |path: &Path| path.ancestors().find_map(|path| fs::metadata(path).ok()).map(|meta| meta.dev());
    let mut seen = BTreeSet::new();
    let mut ahead: Vec<(u64, Vec<String>)> =
        device_under(directory).map(|device| (device, Vec::new())).into_iter().collect();
    while let Some((device, between)) = ahead.pop() {
        if !seen.insert(device) {
            continue;
        }
        match name_of(device) {
            Some(name) if name == volume => return Some(between),
            Some(name) => {
                let further = [between, vec![name.clone()]].concat();
                let devices = replicas(&name).into_iter().filter_map(|path| device_under(&path));
                ahead.extend(devices.map(|device| (device, further.clone())));
            }
            None => ahead.extend(below(device).into_iter().map(|device| (device, between.clone()))),
        }
    }
    None
}

/// What the kernel says of block devices.
struct Kernel {
    blocks: PathBuf,
    mounts: String,
}

impl Kernel {
    /// The devices that a device has its bytes from.
    fn below(&self, device: u64) -> Vec<u64> {
        // A file system of several devices, such as btrfs, has a number that no device has.
        if major(device) == 0 {
            return source(&self.mounts, device).and_then(|path| node::rdev(&path)).into_iter().collect();
        }
        let own = self.blocks.join(format!("{}:{}", major(device), minor(device)));
        let slaves = fs::read_dir(own.join("slaves")).into_iter().flatten().flatten();
        let mut below: Vec<u64> = slaves.filter_map(|slave| number(&slave.path())).collect();
        if own.join("partition").exists() {
            // The link leads to a folder in its disk's.
            below.extend(own.canonicalize().ok().and_then(|own| number(own.parent()?)));
        }
        if let Ok(file) = fs::read_to_string(own.join("loop/backing_file")) {
            below.extend(fs::metadata(file.trim_end_matches('\n')).map(|meta| meta.dev()));
        }
        below
    }
}

/// The number of the device that has this folder in sysfs.
fn number(folder: &Path) -> Option<u64> {
    let text = fs::read_to_string(folder.join("dev")).ok()?;
    let (major, minor) = text.trim_end().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// What the file system of this number was mounted from (`proc_pid_mountinfo(5)`).
fn source(mounts: &str, device: u64) -> Option<PathBuf> {
    let number = format!("{}:{}", major(device), minor(device));
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some(number.as_str()))?;
    let (_, of_file_system) = mount.split_once(" - ")?;
    of_file_system.split(' ').nth(1).map(|path| unescaped(path.as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_way_leads_through_partitions_and_mapped_devices() {
        let dir = tempfile::tempdir().unwrap();
        let blocks = dir.path().join("block");
        let disk = dir.path().join("devices/loop3");
        fs::create_dir_all(blocks.join("253:0/slaves")).unwrap();
        fs::create_dir_all(disk.join("loop3p1")).unwrap();
        fs::write(disk.join("dev"), "7:3\n").unwrap();
        fs::write(disk.join("loop3p1/dev"), "259:1\n").unwrap();
        fs::write(disk.join("loop3p1/partition"), "1\n").unwrap();
        symlink(disk.join("loop3p1"), blocks.join("253:0/slaves/loop3p1")).unwrap();
        symlink(disk.join("loop3p1"), blocks.join("259:1")).unwrap();
        let kernel = Kernel { blocks, mounts: String::new() };
        assert_eq!(kernel.below(makedev(253, 0)), [makedev(259, 1)]);
        assert_eq!(kernel.below(makedev(259, 1)), [makedev(7, 3)]);
        assert_eq!(kernel.below(makedev(8, 0)), [0; 0]);
        let mounts = "24 1 254:0 / / rw - ext4 /dev/vda rw\n91 24 0:44 /sub /mnt rw shared:2 - btrfs /dev/my\\040disk rw\n";
        assert_eq!(source(mounts, makedev(0, 44)), Some("/dev/my disk".into()));
        assert_eq!(source(mounts, makedev(0, 45)), None);
    }

    /// What is to be written on the one waits for the other, which waits for the first.
    #[test]
    fn a_way_leads_through_other_volumes() {
        let dir = tempfile::tempdir().unwrap();
        let own = fs::metadata(dir.path()).unwrap().dev();
        let others = makedev(7, 3);
        let name_of = |device| match device {
            device if device == own => Some("b".to_owned()),
            device if device == others => Some("a".to_owned()),
            _ => None,
        };
        let lies = |volume: &str, replicas: &[PathBuf]| {
            way(volume, &dir.path().join("not/yet"), &name_of, &|_| replicas.to_vec(), &|_| Vec::new())
        };
        let here = [dir.path().to_owned()];
        assert_eq!(lies("b", &here), Some(Vec::new()));
        assert_eq!(lies("a", &here), None, "another volume may be below");
        assert_eq!(lies("c", &here), None, "it ends though they lie on one another");
        // Another file system, on which "b" has its replica.
        let proc = fs::metadata("/proc").unwrap().dev();
        let name_of = |device| match device {
            device if device == own => Some("b".to_owned()),
            device if device == proc => Some("a".to_owned()),
            _ => None,
        };
        let lies = |volume| way(volume, dir.path(), &name_of, &|_| vec!["/proc".into()], &|_| Vec::new());
        assert_eq!(lies("a"), Some(vec!["b".to_owned()]));
        let disk = own + 1;
        let mapped = |device| if device == own { vec![disk] } else { vec![others] };
        let name_of = |device| (device == others).then(|| "a".to_owned());
        let lies = |volume| way(volume, dir.path(), &name_of, &|_| Vec::new(), &mapped);
        assert_eq!((lies("a"), lies("b")), (Some(Vec::new()), None));
    }
}
