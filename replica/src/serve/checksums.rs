//! The checksums of layers that are on record, as far as they were looked at.

use std::collections::BTreeMap;
use std::path::PathBuf;

use lh_block::{BLOCK, Extent};

use crate::store::{BlockSum, FoldedChecksums, LayerChecksums, LayerNo, Store, Verdict};

/// Checksums of layers, as far as they were looked at.
#[derive(Debug)]
pub(super) struct Checksums {
    directory: PathBuf,
    pub(super) open: BTreeMap<LayerNo, LayerChecksums>,
    /// Those of layers that have got something else since. A rebuild changes a layer here and there, and of all else it may yet be
    /// sent what its source has lost.
    given_up: BTreeMap<LayerNo, LayerChecksums>,
    /// Layer images on their way that fit the layer's checksums: its file is another one already, or is about to be.
    pub(super) puts: BTreeMap<LayerNo, u32>,
}

impl Checksums {
    pub(super) const fn new(directory: PathBuf) -> Self {
        Self { directory, open: BTreeMap::new(), given_up: BTreeMap::new(), puts: BTreeMap::new() }
    }

    /// Those of a snapshot's layer as its file is now.
    pub(super) fn of(&mut self, store: &Store, layer: LayerNo) -> Option<&mut LayerChecksums> {
        if layer == store.head() {
            return None;
        }
        let file = store.layer_file(layer);
        if !self.open.get(&layer).is_some_and(|sums| sums.are_of(file)) {
            if self.puts.contains_key(&layer) {
                // Nothing is said now, and again when the image is put.
                return None;
            }
            self.open.remove(&layer);
            self.open.insert(layer, LayerChecksums::open(&self.directory, file)?);
        }
        self.open.get_mut(&layer)
    }

    /// The same while images that fit them are put into the layer.
    pub(super) fn while_put(&mut self, store: &Store, layer: LayerNo) -> Option<&mut LayerChecksums> {
        match self.puts.contains_key(&layer) {
            true => self.open.get_mut(&layer),
            false => self.of(store, layer),
        }
    }

    /// The ranges inside `range` in which a layer should hold data by its checksums. None if it has no checksums.
    pub(super) fn recorded(&mut self, store: &Store, layer: LayerNo, range: Extent) -> Vec<Extent> {
        let sums = if store.is_own(layer) { self.while_put(store, layer) } else { None };
        sums.map(|sums| sums.recorded(range)).unwrap_or_default()
    }

    /// Those of two snapshots' layers, for a fold of one into the other.
    pub(super) fn of_both(&self, store: &Store, upper: LayerNo, lower: LayerNo) -> Option<FoldedChecksums> {
        FoldedChecksums::open(&self.directory, store, upper, lower)
    }

    /// The layer gets something that its checksums say nothing of.
    pub(super) fn give_up(&mut self, store: &Store, layer: LayerNo) {
        if self.while_put(store, layer).is_some()
            && let Some(mut sums) = self.open.remove(&layer)
        {
            let given_up = sums.give_up();
            given_up.unwrap_or_else(|e| tracing::warn!("checksums of a layer are of no use any more: {e}"));
            self.given_up.insert(layer, sums);
        }
    }

    /// These ranges of a layer are about to be changed.
    pub(super) fn note_changed(&mut self, layer: LayerNo, mut ranges: impl Iterator<Item = Extent>) {
        let Some(sums) = self.given_up.get_mut(&layer) else { return };
        if !ranges.all(|range| sums.note_changed(range)) {
            self.given_up.remove(&layer);
        }
    }

    /// The block of a layer is what was on record of it before images changed other blocks.
    pub(super) fn was_recorded(&mut self, layer: LayerNo, block: u64, sum: u32) -> bool {
        self.given_up.get_mut(&layer).is_some_and(|sums| sums.holds(block, sum))
    }

    /// Layers are changed otherwise than by images from now on.
    pub(super) fn forget_given_up(&mut self) {
        self.given_up.clear();
    }

    /// Lets go of the file of a layer that is gone.
    pub(super) fn forget(&mut self, layer: LayerNo) {
        self.open.remove(&layer);
        self.given_up.remove(&layer);
    }

    /// Lets go of all files: the layers are others, and what is gone of them would keep its space.
    pub(super) fn forget_all(&mut self) {
        self.open.clear();
        self.given_up.clear();
    }

    /// What is to be said of the blocks from `offset` on, given what they hold. Empty: nothing can be said.
    pub(super) fn verdicts(
        &mut self,
        store: &Store,
        layer: LayerNo,
        offset: u64,
        own: &[BlockSum],
    ) -> Vec<(u64, Verdict)> {
        let Some(sums) = self.of(store, layer) else { return Vec::new() };
        let block = |n: usize| offset + n as u64 * BLOCK;
        let judge = |(n, sum): (usize, &BlockSum)| match store.was_found_marked(block(n)) {
            true => (n as u64, Verdict::Unknown),
            false => (n as u64, sums.verdict(block(n) / BLOCK, *sum)),
        };
        own.iter().enumerate().map(judge).collect()
    }
}
