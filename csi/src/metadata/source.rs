//! What the driver is given to read snapshots with: it knows no block I/O itself.

use std::ops::Range;
use std::sync::Arc;

/// A running replica that holds everything, and what proves that it may be read.
#[derive(Clone, PartialEq, Eq)]
pub struct Holder {
    /// Name of the volume.
    pub volume: String,
    /// Name of the replica.
    pub replica: String,
    /// `unix:PATH` or `tcp:ADDRESS:PORT`.
    pub address: String,
    /// The key for maps, in hex.
    pub key: String,
}

/// Reads snapshots from replicas. Calls block.
pub trait ReadSnapshots: Send + Sync + 'static {
    /// Opens a snapshot. `base`: the snapshot that it is compared with; `None`: a volume of zeroes.
    ///
    /// # Errors
    /// One sentence. Another replica may do.
    fn open(&self, at: &Holder, snapshot: &str, base: Option<&str>) -> Result<Box<dyn SnapshotMap>, String>;
}

/// Where an open snapshot differs from its base.
pub trait SnapshotMap: Send {
    /// The ranges from the block of a byte on, as many as come at once.
    ///
    /// # Errors
    /// One sentence. Another replica may go on from there.
    fn page(&mut self, from: u64) -> Result<Page, String>;
}

/// Part of a map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// Ranges of bytes, ascending, none touching the next.
    pub ranges: Vec<Range<u64>>,
    /// There is more, from this byte on.
    pub next: Option<u64>,
}

/// As the driver's parts share it.
pub type Source = Arc<dyn ReadSnapshots>;
