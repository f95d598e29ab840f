//! What may wait for the file's server, in a thread that does not keep the connection open.
//!
//! A thread that waits for a FUSE answer, or for the loop device's requests to end, cannot be killed. While it lives, its
//! descriptors stay open. If /dev/fuse were one of them, and engine and keeper were killed at such a moment, nobody would
//! ever answer, the kernel would not end the connection, and everything that touches the device would wait for ever. So
//! such a thread has a table of descriptors of its own (unshare(2), `CLONE_FILES`), without that one.

use std::io;
use std::os::fd::AsRawFd;

use nix::sched::{CloneFlags, unshare};

use super::STACK;
use super::connection::Connection;

/// Does `work` in a thread without the connection's /dev/fuse. Waits for it; what it opens is to be closed by it.
///
/// # Errors
/// The system's, before anything was done, or those of `work`.
pub(super) fn apart<T: Send>(
    connection: &Connection,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    let fuse = connection.fuse.as_raw_fd();
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("device".into()).stack_size(STACK);
        let thread = thread.spawn_scoped(scope, move || {
            unshare(CloneFlags::CLONE_FILES)?;
            // The copy in this thread's own table: the connection's stays open.
            nix::unistd::close(fuse)?;
            work()
        })?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
