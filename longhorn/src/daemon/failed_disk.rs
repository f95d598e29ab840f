//! A disk that failed a replica. A file system whose journal it did not take loses what was answered and not flushed, as with its
//! power, though the host has kept its own (`docs/decisions/0018-who-kept-its-power-is-the-source.md`).
//!
//! The directory mostly takes no note of that any more: it is read-only, or gives errors, until its file system is mounted anew.
//! So the note lies in /run/longhorn until a start of the replica can heed it. After the host's own next boot nothing depends on it.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::host::RUN;
use nix::errno::Errno;
use replica::serve::ServeError;
use replica::store::{OpenError, forget_power};

/// Where the note of the replica of that name lies.
pub(crate) fn note(replica: &str) -> PathBuf {
    Path::new(RUN).join(format!("{replica}.failed"))
}

/// The replica ends for this. If its disk has failed that is noted.
pub(super) fn remember(replica: &str, directory: &Path, error: &ServeError) {
    if !is_of_the_disk(error) {
        return;
    }
    let note = note(replica);
    let made = note
        .parent()
        .map_or(Ok(()), |run| std::fs::DirBuilder::new().recursive(true).mode(0o700).create(run));
    if let Err(e) = made.and_then(|()| std::fs::write(&note, format!("{}: {error}\n", directory.display()))) {
        tracing::warn!(
            "{} cannot be written ({e}): what this disk may have lost is told to nobody",
            note.display()
        );
    }
}

/// Before the directory is served: a note that is there is heeded, and goes. A directory that is not there may be on the disk that
/// failed.
///
/// # Errors
/// The directory cannot be used.
pub(super) fn heed(replica: &str, directory: &Path, lock_wait: Duration) -> Result<(), OpenError> {
    let note = note(replica);
    match note.try_exists() {
        Ok(true) => {}
        _ => return Ok(()),
    }
    match forget_power(directory, lock_wait) {
        Err(OpenError::NoDirectory(_)) => return Ok(()),
        done => done?,
    }
    tracing::warn!(
        "the disk has failed since this directory was used: what was answered and not flushed may be gone"
    );
    match std::fs::remove_file(&note) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("{} stays ({e})", note.display());
        }
        _ => {}
    }
    Ok(())
}

/// A sync or a record failed, if only for want of room: what it was for may be gone. Or the directory lies on a file system that has
/// stopped (ext4 is read-only then, XFS gives errors).
fn is_of_the_disk(error: &ServeError) -> bool {
    match error {
        ServeError::Failed { full, .. } => !full,
        ServeError::Open(OpenError::Io { source, .. }) => {
            let of_disk = [Errno::EIO, Errno::EROFS];
            source.raw_os_error().is_some_and(|e| of_disk.contains(&Errno::from_raw(e)))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_has_stopped_is_told_from_one_that_is_full() {
        let opening = |errno: Errno| {
            ServeError::Open(OpenError::Io {
                what: "opening".into(),
                source: io::Error::from_raw_os_error(errno as i32),
            })
        };
        assert!(is_of_the_disk(&opening(Errno::EROFS)) && is_of_the_disk(&opening(Errno::EIO)));
        let failed = |full| ServeError::Failed { why: "a record".into(), full };
        assert!(is_of_the_disk(&failed(false)) && !is_of_the_disk(&failed(true)));
        assert!(!is_of_the_disk(&opening(Errno::ENOSPC)) && !is_of_the_disk(&opening(Errno::ENOENT)));
    }
}
