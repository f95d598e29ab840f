//! A file system that tells its disk of everything that is freed.
//!
//! ext4 mounted with `discard` waits for the disk at each extent that it frees. Folds, unmaps and the removal of a volume free
//! many, and on a disk whose host carries discards out one by one each takes milliseconds.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::Finding;
use crate::mounts::table_as_text;

const CHECK: &str = "discard";

/// How the file system is mounted that `path` lies on.
pub(super) fn finding(path: &Path) -> Finding {
    let table = table_as_text();
    let device = fs::metadata(path).map_or(0, |meta| meta.dev());
    judge(is_mounted_so(&table, (rustix::fs::major(device), rustix::fs::minor(device))))
}

fn judge(is_mounted_so: bool) -> Finding {
    if !is_mounted_so {
        return Finding::ok(CHECK, "when the host does it, not at each block that is freed");
    }
    Finding::warn(
        CHECK,
        "at each block that is freed: on some disks folds, unmaps and rm take minutes",
        "mount it without the option discard, and systemctl enable --now fstrim.timer",
    )
}

/// Whether the mount table has the option for that device (proc(5): "/proc/pid/mountinfo"; the options of the file system
/// come last).
fn is_mounted_so(table: &str, device: (u32, u32)) -> bool {
    let number = format!("{}:{}", device.0, device.1);
    table.lines().any(|line| {
        line.split(' ').nth(2) == Some(number.as_str())
            && line.rsplit(' ').next().is_some_and(|options| options.split(',').any(|o| o == "discard"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn the_option_counts_for_its_own_device_only() {
        let table = "26 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard,resuid=65534\n\
                     30 26 254:16 / /data rw,relatime shared:2 - ext4 /dev/vdb rw,nodiscard\n\
                     31 26 254:32 / /discard rw,relatime - xfs /dev/vdc rw,attr2\n";
        assert!(is_mounted_so(table, (254, 0)));
        assert!(!is_mounted_so(table, (254, 16)));
        assert!(!is_mounted_so(table, (254, 32)));
        assert!(!is_mounted_so("", (254, 0)));
    }

    #[test]
    fn who_has_it_is_told_what_to_do() {
        assert_eq!(judge(false).verdict, Verdict::Ok);
        let warning = judge(true);
        assert_eq!(warning.verdict, Verdict::Warn);
        assert!(warning.next.contains("fstrim.timer"), "{warning:?}");
    }
}
