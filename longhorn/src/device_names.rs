//! Where a volume's device is, and by which names the kernel and whoever else keeps it know it.

use std::path::{Path, PathBuf};

pub(crate) use control::host::DEVICES;
use control::host::RUN;
use iscsi_frontend::IQN_PREFIX;

/// A volume's device.
pub(crate) fn device_of(volume: &str) -> PathBuf {
    Path::new(DEVICES).join(volume)
}

/// What the kernel knows a volume's device by. Volumes of one name under two roots have two.
pub(crate) fn nbd_identifier(root: &Path, volume: &str) -> String {
    format!("longhorn:{}:{volume}", root.display())
}

/// Who a root's devices belong to.
pub(crate) fn ublk_owner(root: &Path) -> String {
    root.to_string_lossy().into_owned()
}

/// What the initiator knows a volume's target by.
pub(crate) fn target_name(volume: &str) -> String {
    format!("{IQN_PREFIX}{volume}")
}

/// Where a volume's keeper listens.
pub(crate) fn keeper_socket(volume: &str) -> PathBuf {
    Path::new(RUN).join(format!("{volume}.fuse.sock"))
}
