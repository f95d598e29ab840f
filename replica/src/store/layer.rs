//! A layer as the ring thread knows it: its number and its file, and what is known of what that holds.

use std::fs::File;
use std::sync::Arc;

use super::disk::Look;
use super::qcow2::Image;
use super::ranges::RangeSet;
use super::zero::ZeroMap;

/// Number of a layer within its [`super::Store`]; stays the same until [`super::Store::replace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerNo(pub u16);

#[derive(Debug)]
pub(super) struct Layer {
    /// Snapshot name; empty for the head; `None` for the backing file.
    pub(super) name: Option<String>,
    pub(super) file: Arc<File>,
    pub(super) length: u64,
    pub(super) zero: Option<ZeroMap>,
    /// Of a backing file in qcow2.
    pub(super) image: Option<Arc<Image>>,
    /// How its extents are found while requests run.
    pub(super) look: Look,
    /// Place in the head's chain from 1, the value in the index; 0 for a layer of another branch.
    pub(super) rank: u8,
    /// Written since the last sync began.
    pub(super) dirty: bool,
    /// Blocks that a rotten image has not brought ([`super::Store::note_lost`]).
    pub(super) lost: RangeSet,
}
