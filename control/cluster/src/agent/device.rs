//! Which device an endpoint is.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

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
