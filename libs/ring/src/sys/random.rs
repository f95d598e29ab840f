//! Random numbers from the system (getrandom(2)): for ids and keys.

use std::io;

/// Fills `bytes` with what nobody can guess; waits, early at boot, until the system has some.
///
/// # Errors
/// The system's: `ENOSYS` before Linux 3.17.
pub fn random(bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &mut bytes[done..];
        // SAFETY: writes at most `rest.len()` bytes into `rest`.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(got) {
            Ok(got) => done += got,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_are_alike() {
        let (mut a, mut b) = ([0; 1000], [0; 1000]);
        random(&mut a).unwrap();
        random(&mut b).unwrap();
        assert!(a != b && a.iter().any(|byte| *byte != 0));
    }
}
