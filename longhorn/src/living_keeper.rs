//! The keeper of a volume's FUSE device, found by who has no engine to ask.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use fuse_frontend::keeper::{Keeper, LeftBehind, remove_left_behind};

/// How long one that is just beginning may take to listen, and one that is ending to be gone.
const PASSING: Duration = Duration::from_secs(5);

/// Between two looks for it.
const AGAIN: Duration = Duration::from_millis(20);

/// The keeper of a device, if one lives. What one has left that died together with its engine is taken away: it fails whoever uses it.
///
/// # Errors
/// One lives and cannot be reached; it holds the device still. The system's.
pub(crate) fn living_keeper(socket: &Path, device: &Path) -> Result<Option<Keeper>> {
    let deadline = Instant::now() + PASSING;
    loop {
        match Keeper::connect(socket) {
            Ok(keeper) => return Ok(Some(keeper)),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {}
            Err(e) => return Err(e).with_context(|| socket.display().to_string()),
        }
        match remove_left_behind(socket, device).with_context(|| device.display().to_string())? {
            LeftBehind::Nothing | LeftBehind::Removed => return Ok(None),
            LeftBehind::Alive if Instant::now() < deadline => std::thread::sleep(AGAIN),
            LeftBehind::Alive => bail!(
                "{} is held by a process that does not listen on {}: find it with `pgrep -af fuse-keeper`, and kill it first",
                device.display(),
                socket.display()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_lives_and_does_not_listen_is_not_taken_for_none() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, device) = (dir.path().join("x.sock"), dir.path().join("x"));
        assert!(living_keeper(&socket, &device).unwrap().is_none());
        let lock = std::fs::File::create(socket.with_extension("lock")).unwrap();
        lock.lock().unwrap();
        let refused = living_keeper(&socket, &device).unwrap_err().to_string();
        assert!(refused.contains("does not listen"), "{refused}");
        drop(lock);
        assert!(living_keeper(&socket, &device).unwrap().is_none());
        assert!(!socket.with_extension("lock").exists());
    }
}
