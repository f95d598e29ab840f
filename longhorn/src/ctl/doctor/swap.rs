//! Swap that lies on a volume of this host.
//!
//! XFS hands the splitting of a file's extent tree to a worker of the kernel's (`xfs_btree_split_worker`). When memory is short that
//! worker may have to swap something out before it has a page, as nobody has told it not to. If the swap is on the very volume
//! whose replica's write waits for the worker, they wait for each other (`docs/devices.md`, When memory is short).

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::Finding;
use crate::mounts::unescaped;

const CHECK: &str = "swap";

/// Whether what the kernel swaps to is a volume shown here, with replicas on this kind of file system.
pub(super) fn on_volumes(devices: &Path, replicas: &str) -> Finding {
    let volumes: Vec<(String, u64)> = fs::read_dir(devices)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|node| {
            Some((node.file_name().into_string().ok()?, fs::metadata(node.path()).ok()?.rdev()))
        })
        .collect();
    // Names of any bytes may stand in it.
    let table = fs::read("/proc/swaps").unwrap_or_default();
    let used = areas(&table).filter_map(|area| device_of(&area)).find_map(|device| {
        volumes.iter().find(|(_, volume)| *volume == device).map(|(name, _)| name.as_str())
    });
    judge(used, replicas)
}

fn judge(volume: Option<&str>, replicas: &str) -> Finding {
    match volume {
        None => Finding::ok(CHECK, "none on a volume"),
        Some(volume) if replicas == "xfs" => Finding::warn(
            CHECK,
            format!(
                "on volume {volume}, and replicas lie on xfs here: they may wait for each other for ever"
            ),
            "swapoff it, or have the replicas on ext4 or on other hosts",
        ),
        Some(volume) => Finding::ok(CHECK, format!("on volume {volume}")),
    }
}

/// The places of `/proc/swaps`, behind a line of headings.
fn areas(table: &[u8]) -> impl Iterator<Item = PathBuf> {
    let lines = table.split(|byte| *byte == b'\n').skip(1);
    let first = |line: &[u8]| line.split(u8::is_ascii_whitespace).next().map(unescaped);
    lines.filter(|line| !line.is_empty()).filter_map(first)
}

/// The number of the device that an area is, or whose file system it lies on.
fn device_of(area: &Path) -> Option<u64> {
    let meta = fs::metadata(area).ok()?;
    Some(if meta.file_type().is_block_device() { meta.rdev() } else { meta.dev() })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use super::super::Verdict;
    use super::*;

    #[test]
    fn places_are_read_from_the_kernels_table() {
        let table = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
                     /dev/dm-1                               partition\t1048572\t\t0\t\t-2\n\
                     /mnt/my\\040data/swap\\011                file\t\t262140\t\t0\t\t-3\n";
        let table = [table.as_bytes(), b"/mnt/\xff\tfile\t1\t0\t-4\n"].concat();
        let found: Vec<PathBuf> = areas(&table).collect();
        let strange = Path::new(OsStr::from_bytes(b"/mnt/\xff"));
        assert_eq!(found, [Path::new("/dev/dm-1"), Path::new("/mnt/my data/swap\t"), strange]);
        assert_eq!(areas(b"").count(), 0);
    }

    #[test]
    fn a_file_is_on_its_file_systems_device() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(device_of(file.path()), Some(file.as_file().metadata().unwrap().dev()));
        assert_eq!(device_of(Path::new("/not/there")), None);
    }

    #[test]
    fn only_xfs_below_the_volume_is_warned_of() {
        assert_eq!(judge(None, "xfs").verdict, Verdict::Ok);
        assert_eq!(judge(Some("db"), "ext4").verdict, Verdict::Ok);
        let warning = judge(Some("db"), "xfs");
        assert_eq!(warning.verdict, Verdict::Warn);
        assert!(warning.detail.contains("volume db") && warning.next.contains("swapoff"), "{warning:?}");
    }
}
