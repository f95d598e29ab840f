//! The server of a replica: a pure machine that decides ([`core`]), and the driver that carries out ([`run`]).
//!
//! One thread with one ring serves all connections of engines and does all reads, writes, punches and syncs of the layers;
//! one worker thread does what creates, renames and syncs metadata, and readers of snapshots have threads of their own. A request and its answer never leave the ring's
//! thread, and in the steady state nothing is allocated for them.
//!
//! Files stand on each other. What a part of the server keeps has a file of its own that knows nothing of the server (`flusher`,
//! `folder`, `grants`, `marks`, `checksums`, `door`, `reader`, `worker`); `server` holds them all; what it does with each stands above
//! (`flush`, `fold`, `grant`, `mark`, `verify`, `greet`), and `turn` goes round them.

pub mod core;

mod blocks;
mod checksums;
mod compare;
mod door;
mod flush;
mod flusher;
mod fold;
mod fold_aside;
mod fold_thread;
mod folder;
mod grant;
mod grants;
mod greet;
mod hash;
mod mark;
mod marks;
mod memory;
mod message;
mod open;
mod peer;
mod put;
mod read;
mod reader;
mod request;
mod server;
mod status;
mod strangers;
mod task;
mod telling;
mod token;
mod trouble;
mod turn;
mod verify;
mod worker;
mod write;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use lh_wire::handshake::Key;
use thiserror::Error;

use crate::store::OpenError;

pub use hash::HashOutcome;
pub use lh_block::Address;
pub use open::run;
pub use status::{Counters, Mode, Snapshot, Status};

/// What a replica's server is given.
#[derive(Clone, Debug)]
pub struct Options {
    /// The replica's directory.
    pub directory: PathBuf,
    /// Size in bytes that a missing or empty directory is created with. `None`: it must be there.
    pub size: Option<u64>,
    /// How long to wait for the locks of a process that is about to end.
    pub lock_wait: Duration,
    /// Name of the volume: who wants another is sent away.
    pub volume: String,
    /// Name of the replica, likewise.
    pub replica: String,
    /// The volume's key.
    pub key: Key,
    /// What lets readers in who may know where snapshots hold data, and not what.
    pub map_key: Key,
    /// Where to listen.
    pub listen: Address,
    /// Through this other threads see how the server fares, and stop it.
    pub status: Status,
}

/// Why a server did not begin, or ended.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The directory cannot be used.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Nobody can connect.
    #[error("cannot listen on {listen}: {source}")]
    Listen {
        /// Where.
        listen: Address,
        /// Why.
        source: io::Error,
    },
    /// The system has no memory, descriptors or io_uring for it.
    #[error("cannot set up {what}: {source}")]
    System {
        /// What is missing.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The ring cannot be used any more.
    #[error("io_uring failed: {0}")]
    Ring(io::Error),
    /// Other threads cannot wake the ring's any more.
    #[error("the replica cannot hear its own threads: reading its eventfd fails: {0}")]
    Deaf(io::Error),
    /// The worker thread is gone.
    #[error("the replica's worker thread has ended")]
    Worker,
    /// The disk failed in a sync or in a record. What the directory holds the next process finds out.
    #[error("the replica has failed: {why}")]
    Failed {
        /// The last error.
        why: String,
        /// For want of room an operation on the chain broke off, and nothing worse has happened: what was answered is there.
        full: bool,
    },
}
