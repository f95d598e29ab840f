//! What the store's account of layers and index makes of a fold: what was copied, what was broken off, and which layer is gone.

use std::fs::File;
use std::sync::Arc;

use lh_block::Extent;

use super::super::data::Store;
use super::super::heads::RANKS_TIDY;
use super::super::layer::LayerNo;
use super::super::load::blocks;
use super::Direction;

impl Store {
    /// Nothing lies below the layer: no other layer, no backing file.
    pub(in super::super) fn is_base(&self, layer: LayerNo) -> bool {
        let rank = self.at(layer).rank;
        // What a layer of another branch stands on is not known here.
        rank != 0 && self.up_to(rank - 1).next().is_none()
    }

    /// The layer that the head stands on.
    pub(in super::super) fn below_head(&self) -> Option<LayerNo> {
        self.up_to(self.at(self.head()).rank - 1).next_back().map(|(_, layer)| layer)
    }

    /// The ranges are in the target's file now, as the source has them.
    pub(super) fn folded_in(
        &mut self,
        source: LayerNo,
        target: LayerNo,
        direction: Direction,
        runs: &[Extent],
    ) {
        self.touched = true;
        let layer = self.at_mut(target);
        let to = layer.rank;
        layer.dirty |= !runs.is_empty();
        for run in runs {
            if let Some(zero) = &mut layer.zero {
                // The end of the fold waits for a flush anyway.
                let _ = zero.wrote(blocks(*run));
            }
        }
        if direction == Direction::IntoParent || to == 0 {
            return;
        }
        for run in runs {
            let held = self.places.runs(blocks(*run)).filter(|(_, held)| self.holder(*held) == Some(source));
            let held: Vec<_> = held.map(|(part, _)| part).collect();
            self.places.set_all(held.into_iter(), to);
        }
    }

    /// A layer is gone, and what it held is in another one: `stays`, with its new length. Takes no longer the more the
    /// volume holds: in the index both ranks mean the same layer from now on.
    pub(super) fn end_fold(
        &mut self,
        goes: LayerNo,
        stays: Option<LayerNo>,
        direction: Direction,
        length: u64,
    ) {
        self.touched = true;
        let gone = self.at_mut(goes);
        let (name, rank) = (gone.name.take(), std::mem::take(&mut gone.rank));
        gone.zero = None;
        gone.dirty = false;
        if let Some(stays) = stays {
            let layer = self.at_mut(stays);
            layer.length = length;
            layer.dirty = true;
            if direction == Direction::IntoParent {
                layer.name = name;
            }
            if rank != 0 {
                // Whoever lies above the one lies above the other.
                layer.rank = layer.rank.max(rank);
                self.places.merge(goes, stays);
            }
        }
        self.folding = None;
        // Also of a layer that is gone with all that it held: the last descriptor of its file gives the space back.
        self.places.end_grant();
        self.tidy_ranks(RANKS_TIDY);
    }

    /// Lets go of a layer that was folded away: its number is used again. Nothing in flight uses it any more. The last
    /// descriptor of the file gives its space back, which takes long: close it where blocking is allowed.
    pub fn release(&mut self, layer: LayerNo) -> Option<Arc<File>> {
        let stand_in = Arc::clone(&self.at(self.head()).file);
        let gone = self.at_mut(layer);
        if gone.name.is_some() || gone.rank != 0 {
            return None;
        }
        let file = std::mem::replace(&mut gone.file, stand_in);
        self.free.push(layer);
        Some(file)
    }
}
