//! What the kernel tells of itself in files that come and go with what they are about.

use std::io;

use nix::errno::Errno;

/// What is not there, or goes as it is looked at (ENODEV), is `None`. Any other error says nothing of whether it is there.
///
/// # Errors
/// The system's.
pub fn if_there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(Errno::ENODEV as i32) => {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_not_there_is_none() {
        let told = |errno: Errno| if_there(Err::<(), _>(io::Error::from_raw_os_error(errno as i32)));
        for errno in [Errno::ENOENT, Errno::ENODEV] {
            assert!(told(errno).unwrap().is_none());
        }
        for errno in [Errno::EMFILE, Errno::ENOMEM, Errno::EIO, Errno::EACCES] {
            assert_eq!(told(errno).unwrap_err().raw_os_error(), Some(errno as i32));
        }
        assert_eq!(if_there(Ok(7)).unwrap(), Some(7));
    }
}
