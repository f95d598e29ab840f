//! What a keeper leaves that died together with its engine, so that the connection has ended.

use std::fs;
use std::io;
use std::path::Path;

use super::lock::Lock;
use crate::node;

/// What there was of a keeper that nobody reaches at its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftBehind {
    /// Nothing.
    Nothing,
    /// What it had left is taken away.
    Removed,
    /// The keeper itself, which lives, or is just beginning or ending: nothing has changed.
    Alive,
}

/// Takes away what is left of the keeper at a socket and of its engine, both of which are gone: its loop device, which fails every
/// request, as soon as nobody has it open; the device's node; and what the keeper had noted.
///
/// # Errors
/// The system's.
pub fn remove_left_behind(socket: &Path, node: &Path) -> io::Result<LeftBehind> {
    let lock = match Lock::take_left_behind(socket)? {
        Ok(lock) => lock,
        Err(other) => return Ok(other),
    };
    if let Some(device) = lock.left_behind() {
        device.clear_at_last_close()?;
    }
    // Whoever has the number by now, the node of this name was made for the volume.
    if let Some(rdev) = lock.recorded().and_then(|device| device.rdev().ok()) {
        node::remove(node, rdev)?;
    }
    let _ = fs::remove_file(socket);
    lock.remove();
    Ok(LeftBehind::Removed)
}
