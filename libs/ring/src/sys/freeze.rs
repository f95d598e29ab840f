//! Freezing a mounted file system (fsfreeze(8)): everything written is on its device, and nothing is written until
//! it thaws.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// _IOWR('X', 119, int) and _IOWR('X', 120, int) (include/uapi/linux/fs.h).
const FIFREEZE: libc::Ioctl = 0xc004_5877_u32 as libc::Ioctl;
const FITHAW: libc::Ioctl = 0xc004_5878_u32 as libc::Ioctl;

/// Freezes the file system of an open directory. Whoever writes to it waits, the caller included.
///
/// # Errors
/// The system's: `EBUSY` if it is frozen already, `EOPNOTSUPP` if it cannot be, `EPERM` without CAP_SYS_ADMIN.
pub fn freeze(directory: impl AsFd) -> io::Result<()> {
    command(directory, FIFREEZE)
}

/// Thaws it.
///
/// # Errors
/// The system's: `EINVAL` if it is not frozen.
pub fn thaw(directory: impl AsFd) -> io::Result<()> {
    command(directory, FITHAW)
}

fn command(directory: impl AsFd, command: libc::Ioctl) -> io::Result<()> {
    // SAFETY: both commands ignore their argument.
    match unsafe { libc::ioctl(directory.as_fd().as_raw_fd(), command, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn what_cannot_freeze_says_so() {
        let proc = File::open("/proc/self").unwrap();
        for result in [freeze(&proc), thaw(&proc)] {
            let error = result.unwrap_err().raw_os_error();
            assert!(matches!(error, Some(libc::EOPNOTSUPP | libc::EINVAL | libc::EPERM)), "{error:?}");
        }
    }
}
