//! Locks on open files (flock(2)): held by the descriptor's open file, also in other processes that share it, until it
//! is closed everywhere. I/O in flight keeps it open, so the lock says that no write of an ended process is left.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

/// Takes the lock, shared or exclusive, without waiting: false if somebody else has it.
///
/// # Errors
/// The system's.
pub fn lock(file: impl AsFd, exclusive: bool) -> io::Result<bool> {
    let kind = if exclusive { libc::LOCK_EX } else { libc::LOCK_SH };
    let result = super::retry(|| {
        // SAFETY: flock takes numbers only.
        unsafe { libc::flock(file.as_fd().as_raw_fd(), kind | libc::LOCK_NB) }
    });
    match result {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
        other => other.map(|()| true),
    }
}

/// Takes the lock, waiting for it until the deadline: false if somebody else had it all the time.
///
/// # Errors
/// The system's.
pub fn lock_until(file: impl AsFd, exclusive: bool, deadline: Instant) -> io::Result<bool> {
    let mut pause = Duration::from_millis(1);
    loop {
        if lock(&file, exclusive)? {
            return Ok(true);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn one_writer_or_many_readers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(file.path()).unwrap();
        let (a, b, c) = (open(), open(), open());
        assert!(lock(&a, false).unwrap() && lock(&b, false).unwrap());
        assert!(!lock(&c, true).unwrap());
        let begin = Instant::now();
        assert!(!lock_until(&c, true, begin + Duration::from_millis(30)).unwrap());
        assert!(begin.elapsed() >= Duration::from_millis(30));
        drop(a);
        let waiter = std::thread::spawn(move || {
            lock_until(&c, true, Instant::now() + Duration::from_secs(10)).map(|got| (got, c))
        });
        std::thread::sleep(Duration::from_millis(20));
        drop(b);
        let (got, _c) = waiter.join().unwrap().unwrap();
        assert!(got);
        assert!(!lock(open(), false).unwrap());
    }
}
