//! What a reader asks: somebody who proves the volume's key and wants only to know, or to have, the bytes of a snapshot.
//!
//! A reader joins no session and fences nobody: what it asks concerns snapshots alone, which do not change. Each request is
//! the JSON payload of an [`crate::OpCode::Control`] message, one at a time.

use serde::{Deserialize, Serialize};

/// A request of a reader. A refusal carries one sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "ask")]
pub enum Ask {
    /// Chooses the snapshot that all that follows is about; before anything else. The answer is [`Opened`]. Refused if
    /// there is none of that name, or if it is not known to be on stable storage everywhere.
    Open {
        /// Name of the snapshot.
        snapshot: String,
        /// The snapshot that it is compared with; `None`: a volume of zeroes.
        base: Option<String>,
    },
    /// Where the snapshot differs from its base, or may. The answer is a [`crate::MapPage`].
    Map {
        /// Nothing before the block of this byte.
        from: u64,
    },
    /// The snapshot's bytes, which are the answer's payload.
    Read {
        /// Bytes from the volume's begin.
        offset: u64,
        /// How many, at most [`crate::MAX_DATA`].
        length: u32,
    },
    /// Whether an engine is let in; of no snapshot. The answer is [`Looked`].
    Look,
}

/// What a replica is up to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Looked {
    /// An engine is connected.
    pub engine: bool,
}

/// What was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The volume's size in bytes as it is now; beyond what the snapshot held it is zero.
    pub size: u64,
}
