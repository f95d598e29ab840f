//! File systems mounted where nobody sees them (fsopen(2), fsmount(2)), and what the kernel knows of a file without
//! asking the file's server.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

/// FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC (include/uapi/linux/mount.h).
const CLOEXEC: libc::c_long = 1;
/// enum fsconfig_command.
const FSCONFIG_SET_STRING: libc::c_long = 1;
const FSCONFIG_CMD_CREATE: libc::c_long = 6;
/// MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV and MOUNT_ATTR_NOEXEC.
const ATTRIBUTES: libc::c_long = 2 | 4 | 8;

/// Mounts a file system of that type, detached: it is in no mount table and ends with the last descriptor of it or of
/// its files. Linux 5.2; for FUSE 5.4.
///
/// # Errors
/// The system's: `ENODEV` if the kernel has no such file system.
pub fn detached(kind: &str, options: &[(&str, String)]) -> io::Result<OwnedFd> {
    let kind = CString::new(kind)?;
    // SAFETY: fsopen reads the terminated string and makes a descriptor.
    let context = owned(unsafe { libc::syscall(libc::SYS_fsopen, kind.as_ptr(), CLOEXEC) })?;
    for (key, value) in options {
        let (key, value) = (CString::new(*key)?, CString::new(value.as_str())?);
        configure(&context, FSCONFIG_SET_STRING, Some((&key, &value)))?;
    }
    configure(&context, FSCONFIG_CMD_CREATE, None)?;
    // SAFETY: fsmount takes numbers only and makes a descriptor.
    owned(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), CLOEXEC, ATTRIBUTES) })
}

fn configure(context: &OwnedFd, command: libc::c_long, setting: Option<(&CStr, &CStr)>) -> io::Result<()> {
    let (key, value) =
        setting.map_or((std::ptr::null(), std::ptr::null()), |(k, v)| (k.as_ptr(), v.as_ptr()));
    // SAFETY: fsconfig reads two terminated strings, or none where they are null; both outlive the call.
    match unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), command, key, value, 0_i32) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A descriptor that a system call has just made, or its error.
fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    match libc::c_int::try_from(result) {
        // SAFETY: the call made this descriptor for us, and nobody else has seen its number.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Numbers of a file as they are cached: no server of a network or user-space file system is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The file system's device number.
    pub dev: u64,
    /// The device that a block node stands for.
    pub block_device: Option<u64>,
}

/// The identity of an open file.
///
/// # Errors
/// The system's.
pub fn cached_identity(fd: BorrowedFd<'_>) -> io::Result<Identity> {
    statx(fd.as_raw_fd(), c"", libc::AT_EMPTY_PATH)
}

/// The identity of the file at `path`, links followed. Names in `/proc/PID/fd` lead to the file without a walk.
///
/// # Errors
/// The system's.
pub fn cached_identity_at(path: &Path) -> io::Result<Identity> {
    let path = CString::new(path.as_os_str().as_encoded_bytes())?;
    statx(libc::AT_FDCWD, &path, 0)
}

fn statx(directory: libc::c_int, path: &CStr, flags: libc::c_int) -> io::Result<Identity> {
    let flags = flags | libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT;
    let mut found = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: statx reads the terminated string and writes one structure, which lives here.
    let result =
        unsafe { libc::statx(directory, path.as_ptr(), flags, libc::STATX_TYPE, found.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed, and then filled by the successful call; it is a plain C structure of integers.
    let found = unsafe { found.assume_init() };
    let is_block = libc::mode_t::from(found.stx_mode) & libc::S_IFMT == libc::S_IFBLK;
    Ok(Identity {
        dev: libc::makedev(found.stx_dev_major, found.stx_dev_minor),
        block_device: is_block.then(|| libc::makedev(found.stx_rdev_major, found.stx_rdev_minor)),
    })
}

/// Aborts a FUSE connection: everything that waits for its server fails at once. `dev` is the device number of its file
/// system. An aborted or vanished connection is no error.
///
/// # Errors
/// The system's: `ENODEV` if the kernel has no fusectl.
pub fn abort_fuse(dev: u64) -> io::Result<()> {
    let control = detached("fusectl", &[])?;
    let path = format!("/proc/self/fd/{}/{}/abort", control.as_raw_fd(), libc::minor(dev));
    match std::fs::write(path, "1") {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn cached_numbers_are_those_of_stat() {
        let file = tempfile::tempfile().unwrap();
        let identity = cached_identity(file.as_fd()).unwrap();
        assert_eq!(identity, Identity { dev: file.metadata().unwrap().dev(), block_device: None });
        assert_eq!(cached_identity_at(Path::new("/proc/self/exe")).unwrap().block_device, None);
        assert!(cached_identity_at(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn a_detached_mount_is_in_no_table() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP a_detached_mount_is_in_no_table: needs root");
            return;
        }
        let before = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = detached("tmpfs", &[("size", "64k".into())]).unwrap();
        let file = format!("/proc/self/fd/{}/file", mount.as_raw_fd());
        std::fs::write(&file, "here").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"here");
        assert_eq!(std::fs::read_to_string("/proc/self/mountinfo").unwrap(), before);
        assert_eq!(detached("nosuchfs", &[]).unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }
}
