//! Checksums of a snapshot's layer: taken and checked. Two tasks over one walk, each beside the process that
//! serves the directory, each with a [`Pace`](super::Pace) that limits and stops it, each within a few MiB of memory.
//!
//! - [`SnapshotLayer::hash`] writes Longhorn's checksum file and ours.
//! - [`SnapshotLayer::scrub`] reads everything and names the blocks that are not what they were when they were hashed.
//!
//! Rot is what changes bytes without a trace. Whoever changes a file on purpose changes its ctime, and checksums that
//! name another ctime say nothing. So blocks are called rotten only if file and checksums name the same.

mod hash;
mod layer;
mod verify;
pub(super) mod walk;

use std::io;

use thiserror::Error;

use super::error::OpenError;
use super::pace::Stopped;

pub use hash::{Hashed, RecordedChecksum};
pub use layer::SnapshotLayer;
pub use verify::{Rot, RotKind, ScrubReport, Stored};

/// Why a task over a layer did not come to its end.
#[derive(Debug, Error)]
pub enum ScrubError {
    /// The directory or the snapshot cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Stopped by its [`super::Pace`].
    #[error("stopped before it was done")]
    Stopped,
    /// Somebody wrote into the layer's file meanwhile.
    #[error("snapshot {0} changed while it was read: try again when no fold works on it")]
    Changed(String),
    /// A block cannot be read.
    #[error("snapshot {snapshot}, block at {offset}: {source}")]
    Unreadable {
        /// The snapshot.
        snapshot: String,
        /// Of the first such block, in bytes.
        offset: u64,
        /// The disk's error.
        source: io::Error,
    },
    /// The operating system refused something else.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, with the file's name.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl From<Stopped> for ScrubError {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

/// Names what was tried.
fn failed(what: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> ScrubError {
    move |source| ScrubError::Io { what: format!("{what} {}", path.display()), source }
}
