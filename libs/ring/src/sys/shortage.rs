//! What the system has too little of at one moment, and may have again at the next.

use std::io;

use nix::errno::Errno;

/// True for what passes, and says nothing of what was asked for: no memory, no descriptor left, or a signal.
pub fn is_shortage(error: &io::Error) -> bool {
    let passing = [Errno::ENOMEM, Errno::ENOBUFS, Errno::EMFILE, Errno::ENFILE, Errno::EAGAIN, Errno::EINTR];
    error.raw_os_error().is_some_and(|errno| passing.contains(&Errno::from_raw(errno)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_is_told_from_what_stays() {
        let told = |errno: Errno| is_shortage(&io::Error::from_raw_os_error(errno as i32));
        assert!([Errno::ENOMEM, Errno::ENOBUFS, Errno::EMFILE, Errno::ENFILE].into_iter().all(told));
        assert!(![Errno::ENOENT, Errno::EACCES, Errno::EIO, Errno::EADDRINUSE].into_iter().any(told));
        assert!(!is_shortage(&io::ErrorKind::InvalidData.into()));
    }
}
