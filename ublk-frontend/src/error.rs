//! Why a volume has no device, and why a device is not changed.

use std::io;
use std::path::PathBuf;

use lh_ring::sys::is_shortage;
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
    /// It is told to go, and goes once what is in flight has been answered: that has taken longer than it may.
    #[error("{0} is stopped once what is in flight is done")]
    Unanswered(PathBuf),
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

/// Why the driver cannot be asked: it is not there, or out of reach, unless the system is short of something just now.
pub(crate) fn unreachable(error: io::Error) -> AttachError {
    let control = crate::kernel::CONTROL;
    match error.kind() {
        _ if is_shortage(&error) => refused(format!("access to {control}"))(error),
        io::ErrorKind::NotFound => AttachError::Missing(format!("{control} (kernel module ublk_drv)")),
        _ => AttachError::Missing(format!("access to {control}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who takes it for an absent driver gives up a device that is there, and whoever has it open waits for ever.
    #[test]
    fn a_shortage_is_no_driver_that_is_absent() {
        let failed = |errno| unreachable(io::Error::from_raw_os_error(errno));
        for errno in [libc::ENOMEM, libc::EMFILE, libc::ENFILE] {
            let found = failed(errno);
            assert!(matches!(found, AttachError::Kernel { .. }), "{found}");
        }
        for errno in [libc::ENOENT, libc::EACCES, libc::EPERM, libc::ENODEV] {
            let found = failed(errno);
            assert!(matches!(found, AttachError::Missing(_)), "{found}");
        }
    }
}
