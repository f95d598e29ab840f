//! How long the chain of a volume's layers may be.

/// Most layers of a volume, the head included: longhorn-engine opens no longer chain (`MaximumTotalSnapshotCount` of its
/// `pkg/types`, with which `pkg/replica` compares the files of the live chain, and which is at the same time the largest
/// limit for the number of snapshots that Longhorn lets people set).
pub const LAYERS_MAX: u16 = 250;

/// Most snapshots of a volume, with those that are removed and not folded yet: all layers but the head.
pub const SNAPSHOTS_MAX: u16 = LAYERS_MAX - 1;
