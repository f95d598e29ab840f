//! The keeper: a small process that holds a volume's FUSE connection and loop device through the deaths of engines.
//!
//! - It opens /dev/fuse, mounts, answers INIT, and gives the descriptor to one engine at a time. While no engine
//!   serves, the kernel keeps requests for the next one; nothing ends until both processes are gone.
//! - **It never waits for the file while no engine serves it.** Whatever the kernel asks the server about (binding the
//!   loop device, a new size, the end) happens in a thread of its own, and never under the lock, so that a keeper whose
//!   engine died in the middle still takes the next engine.
//! - One engine at a time: the next is given the descriptor only when the connection of the one before has closed,
//!   which is after its last thread has let go of it. A request that the kernel hands out again must not fall into the
//!   hands of the dying (`docs/invariants.md`, 6).
//! - It takes no part in I/O and allocates nothing on its account.

mod apart;
mod client;
mod connection;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod left_behind;
mod lock;
mod loop_device;
mod message;
mod refusal;
mod service;
mod socket;

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::stat::Mode;
use thiserror::Error;

pub use client::{Info, Keeper, KeeperError};
pub use left_behind::{LeftBehind, remove_left_behind};

use lock::Lock;
use service::Service;

/// The stack of a keeper's thread: a few calls deep, and its pages are locked once touched.
const STACK: usize = 128 << 10;

/// What a keeper is told at its start.
#[derive(Clone, Debug)]
pub struct Options {
    /// The volume's name.
    pub volume: String,
    /// Its socket. The directory is shared by all roots of a host, and so the name stands for the volume.
    pub socket: PathBuf,
    /// Whose volume it is: the root's path. An engine of another owner is refused.
    pub owner: String,
    /// The device node to make, `/dev/longhorn/VOLUME`.
    pub node: PathBuf,
}

/// Why a keeper could not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// Another one serves the volume.
    #[error("another keeper holds {lock}: the volume runs already")]
    Running {
        /// The lock file.
        lock: PathBuf,
    },
    /// A system call.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, with its path.
        what: String,
        /// Why not.
        source: io::Error,
    },
}

impl StartError {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// Runs a keeper until it is told to stop. The process is the keeper's own: it becomes a session leader, blocks the
/// signals of a terminal and of a service manager, and locks its memory.
///
/// # Errors
/// [`StartError`] before the socket takes connections; later failures are told to who asked.
pub fn run(mut options: Options) -> Result<(), StartError> {
    for path in [&mut options.socket, &mut options.node] {
        *path = std::path::absolute(&path).map_err(StartError::io(format!("resolve {}", path.display())))?;
    }
    detach();
    protect();
    let directory = options.socket.parent().unwrap_or(Path::new("."));
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)
        .map_err(StartError::io(format!("make {}", directory.display())))?;
    let lock = Lock::take(&options.socket)?;
    let listener = listen(&options.socket)?;
    let socket = options.socket.clone();
    let service = Arc::new(Service::new(options, lock));
    let accepting = Arc::clone(&service);
    std::thread::Builder::new()
        .name("accept".into())
        .stack_size(STACK)
        .spawn(move || service::accept(&accepting, &listener))
        .map_err(StartError::io("start a thread"))?;
    service.wait_for_stop();
    let _ = fs::remove_file(&socket);
    service.lock_file().remove();
    Ok(())
}

/// Leaves the engine's session, and the signals that end whole groups: what this process holds ends with it.
fn detach() {
    // Fails for the leader of a group, which has nothing to leave.
    let _ = nix::unistd::setsid();
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
        signals.add(signal);
    }
    // No file system is kept busy by this process.
    let _ = std::env::set_current_dir("/");
    if let Err(e) = signals.thread_block() {
        tracing::warn!("signals can end the keeper: {e}");
    }
}

/// The device may hold the swap or the files this process would wait for.
fn protect() {
    if let Err(e) = lh_ring::sys::set_io_flusher() {
        tracing::warn!("no PR_SET_IO_FLUSHER: {e}");
    }
    if let Err(e) = lh_ring::sys::lock_memory_on_fault() {
        tracing::warn!("memory is not locked: {e}");
    }
    if let Err(e) = fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::warn!("the kernel may choose the keeper when it is out of memory: {e}");
    }
}

/// Binds the socket, for root alone from its first moment. What stands there is a dead keeper's: the lock is held.
fn listen(socket: &Path) -> Result<UnixListener, StartError> {
    let _ = fs::remove_file(socket);
    let before = nix::sys::stat::umask(Mode::from_bits_truncate(0o177));
    let listener = UnixListener::bind(socket);
    nix::sys::stat::umask(before);
    listener.map_err(StartError::io(format!("listen on {}", socket.display())))
}
