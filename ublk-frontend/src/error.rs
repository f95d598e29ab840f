//! Why a volume has no device, and why a device is not changed.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why there is no device.
#[derive(Debug, Error)]
pub enum AttachError {
    /// The kernel has no ublk, or one that is too old.
    #[error("{0}")]
    Missing(String),
    /// The volume's device has a server.
    #[error("/dev/ublkb{device} is served by process {pid}")]
    Served {
        /// The number in its name.
        device: u32,
        /// By whom.
        pid: i32,
    },
    /// The device that the last engine left behind has other blocks, which a device in use cannot change.
    #[error(
        "/dev/ublkb{device} has blocks of {theirs} bytes, the volume has {ours}: stop what uses it, and detach the volume first"
    )]
    Blocks {
        /// The number in its name.
        device: u32,
        /// What it has.
        theirs: u32,
        /// What was asked for.
        ours: u32,
    },
    /// The kernel refused.
    #[error("{what}: {source}")]
    Kernel {
        /// What was asked of it.
        what: String,
        /// Its answer.
        source: io::Error,
    },
}

/// Why a device is not changed or taken away.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// Somebody has it open; nothing has changed.
    #[error("{0} is in use")]
    InUse(PathBuf),
    /// This kernel cannot change a device's size.
    #[error(
        "this kernel cannot change the size of a ublk device (Linux 6.16 can): the new size shows when the volume is attached anew"
    )]
    FixedSize,
    /// The kernel refused.
    #[error("{what}: {source}")]
    Kernel {
        /// What was asked of it.
        what: String,
        /// Its answer.
        source: io::Error,
    },
}

pub(crate) fn refused(what: impl Into<String>) -> impl FnOnce(io::Error) -> AttachError {
    let what = what.into();
    move |source| AttachError::Kernel { what, source }
}

/// In words, why the driver cannot be asked.
pub(crate) fn absent(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => format!("{} (kernel module ublk_drv)", crate::kernel::CONTROL),
        _ => format!("access to {}: {error}", crate::kernel::CONTROL),
    }
}
