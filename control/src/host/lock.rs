//! One command at a time changes what belongs to a volume.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use thiserror::Error;

use super::Root;
use super::durable::create_dir_durably;

/// How often a held lock is tried again.
const RETRY: Duration = Duration::from_millis(50);

/// Why a volume could not be locked.
#[derive(Debug, Error)]
pub enum LockError {
    /// Another command works on it.
    #[error("another command is working on volume {0}: wait until it is done, then try again")]
    Busy(String),
    /// The lock file cannot be made or locked.
    #[error("the lock of volume {volume} cannot be taken: {source}")]
    Io {
        /// The volume.
        volume: String,
        /// What the system said.
        source: io::Error,
    },
}

/// Held by a command while it changes a volume's record, processes or directories; let go when dropped or when the
/// process ends. The lock file stays, so that a removed volume's lock cannot be held twice.
#[derive(Debug)]
pub struct VolumeLock {
    _file: Flock<std::fs::File>,
}

impl VolumeLock {
    /// Waits up to `patience` for the volume's lock.
    ///
    /// # Errors
    /// [`LockError`].
    pub fn take(root: &Root, volume: &str, patience: Duration) -> Result<Self, LockError> {
        let failed = |source| LockError::Io { volume: volume.to_owned(), source };
        let directory = root.volume_locks();
        create_dir_durably(&directory).map_err(failed)?;
        let path = directory.join(format!("{volume}.lock"));
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
        let mut file = file.map_err(failed)?;
        let deadline = Instant::now() + patience;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(file) => return Ok(Self { _file: file }),
                Err((back, nix::errno::Errno::EWOULDBLOCK)) => file = back,
                Err((_, errno)) => return Err(failed(errno.into())),
            }
            if Instant::now() >= deadline {
                return Err(LockError::Busy(volume.to_owned()));
            }
            std::thread::sleep(RETRY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_waits_for_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        let first = VolumeLock::take(&root, "demo", Duration::ZERO).unwrap();
        assert!(matches!(VolumeLock::take(&root, "demo", Duration::ZERO), Err(LockError::Busy(_))));
        VolumeLock::take(&root, "other", Duration::ZERO).unwrap();
        drop(first);
        VolumeLock::take(&root, "demo", Duration::ZERO).unwrap();
    }
}
