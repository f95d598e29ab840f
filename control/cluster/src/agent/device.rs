//! Which device an endpoint is, and which devices volumes have here.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use control::host::{DEVICES, LiveDirs, Root};
use rustix::fs::{major, minor};

use super::DeviceId;

/// The block device at a path; `None`: there is none, or the kernel does not number them.
pub(super) fn device_at(endpoint: &str) -> Option<DeviceId> {
    let meta = fs::metadata(Path::new(endpoint)).ok().filter(|meta| meta.file_type().is_block_device())?;
    let (major, minor) = (major(meta.rdev()), minor(meta.rdev()));
    let sequence = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/diskseq")).ok()?;
    let boot = lh_block::boot().ok()?;
    Some(DeviceId { boot: boot.to_owned(), sequence: sequence.trim().parse().ok()? })
}

/// The volumes of a root that have a device on this host, and of which stay each is.
pub(super) fn devices(root: &Root) -> BTreeMap<String, String> {
    let entries = fs::read_dir(DEVICES).into_iter().flatten().filter_map(Result::ok);
    let is_device = |e: &fs::DirEntry| e.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
    let names = entries.filter(is_device).filter_map(|e| e.file_name().into_string().ok());
    // One without a record is another root's, or nobody tells stays apart there. A name that another root has is that one's.
    let names = names.filter(|name| LiveDirs::default().check_free(name, root).is_ok());
    names.filter_map(|name| fs::read_to_string(root.stay(&name)).ok().map(|stay| (name, stay))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_block_device_has_a_number() {
        assert_eq!(device_at("/dev/null"), None);
        assert_eq!(device_at("nbd+unix:///demo?socket=/x"), None);
        let id = DeviceId { boot: "b".into(), sequence: 7 };
        assert_eq!(DeviceId::parse(&id.to_string()), Some(id));
        assert_eq!(DeviceId::parse(""), None);
    }
}
