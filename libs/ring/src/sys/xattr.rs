//! Extended attributes of open files (xattr(7)).

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Longest value that is read; the system itself takes 64 KiB.
const VALUE_MAX: usize = 64 << 10;

/// Sets an attribute, new or not.
///
/// # Errors
/// The system's: `EOPNOTSUPP` where the file system has none, `ENOSPC`.
pub fn set_xattr(file: impl AsFd, name: &str, value: &[u8]) -> io::Result<()> {
    let name = CString::new(name)?;
    // SAFETY: reads the terminated name and `value.len()` bytes of the value; both outlive the call.
    let result = unsafe {
        libc::fsetxattr(file.as_fd().as_raw_fd(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// An attribute's value; `None` if there is no such attribute.
///
/// # Errors
/// The system's.
pub fn get_xattr(file: impl AsFd, name: &str) -> io::Result<Option<Vec<u8>>> {
    let name = CString::new(name)?;
    let mut value = vec![0; 256];
    loop {
        // SAFETY: reads the terminated name and writes at most `value.len()` bytes into the vector.
        let len = unsafe {
            libc::fgetxattr(file.as_fd().as_raw_fd(), name.as_ptr(), value.as_mut_ptr().cast(), value.len())
        };
        if let Ok(len) = usize::try_from(len) {
            value.truncate(len);
            return Ok(Some(value));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENODATA) => return Ok(None),
            Some(libc::ERANGE) if value.len() < VALUE_MAX => value.resize(VALUE_MAX, 0),
            _ => return Err(error),
        }
    }
}

/// Removes an attribute; false if there was none.
///
/// # Errors
/// The system's.
pub fn remove_xattr(file: impl AsFd, name: &str) -> io::Result<bool> {
    let name = CString::new(name)?;
    // SAFETY: reads the terminated name, which outlives the call.
    if unsafe { libc::fremovexattr(file.as_fd().as_raw_fd(), name.as_ptr()) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ENODATA) { Ok(false) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_set_read_and_removed() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let name = "user.longhorn.test";
        assert_eq!(get_xattr(&file, name).unwrap(), None);
        assert!(!remove_xattr(&file, name).unwrap());
        for value in [&b""[..], b"short", &[7; 1000]] {
            set_xattr(&file, name, value).unwrap();
            assert_eq!(get_xattr(&file, name).unwrap().as_deref(), Some(value));
        }
        assert!(remove_xattr(&file, name).unwrap());
        assert_eq!(get_xattr(&file, name).unwrap(), None);
        assert!(set_xattr(&file, "no.such.namespace", b"x").is_err());
    }
}
