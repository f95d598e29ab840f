//! Who wants a sync of the layers, the one that runs, and the hole that is being punched.

use super::core::{Failure, PersistId};
use crate::store::{Flush, LayerNo};

/// Who wants a sync, and the one that runs.
#[derive(Debug, Default)]
pub(super) struct Flusher {
    pub(super) run: Option<Run>,
    pub(super) core: bool,
    pub(super) rebuild: Option<PersistId>,
    /// Before that sync the marks over nothing go, from this block on.
    pub(super) ending: Option<(PersistId, u64)>,
    /// A fold waits for a sync.
    pub(super) fold: bool,
    /// A commit is to be made durable by the next sync.
    pub(super) commit: bool,
    pub(super) quiet_at: Option<u64>,
    /// The hole that is being punched.
    pub(super) punching: Option<(LayerNo, lh_block::Extent)>,
}

/// A sync that runs.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) flush: Flush,
    /// The data is on stable storage, bits are being synced.
    pub(super) bits: bool,
    /// Operations that have not ended.
    pub(super) left: usize,
    pub(super) core: bool,
    pub(super) rebuild: Option<PersistId>,
    pub(super) fold: bool,
    pub(super) failure: Option<Failure>,
}

impl Flusher {
    pub(super) fn core_waits(&mut self) {
        self.core = true;
    }

    pub(super) fn fold_waits(&mut self) {
        self.fold = true;
    }

    pub(super) fn is_punching(&self) -> bool {
        self.punching.is_some()
    }

    pub(super) fn commit_follows(&mut self) {
        self.commit = true;
    }

    /// A sync is to begin, and may.
    pub(super) fn is_wanted(&self) -> bool {
        self.run.is_none() && (self.core || self.rebuild.is_some() || self.fold)
    }

    pub(super) fn is_idle(&self) -> bool {
        let nobody_waits = !self.core && self.rebuild.is_none() && self.ending.is_none() && !self.fold;
        self.run.is_none() && nobody_waits && self.punching.is_none()
    }

    /// When a sync that nobody asked for is due.
    pub(super) fn wake_at(&self) -> Option<u64> {
        self.quiet_at.filter(|_| self.run.is_none())
    }
}
