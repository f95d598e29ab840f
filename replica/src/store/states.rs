//! What layers say of blocks, for images and comparisons: a layer alone, as it counts, and with all that it stands on.

use std::io;

use lh_block::{BLOCK, Extent};
use lh_wire::BlockState;

use super::data::Store;
use super::layer::LayerNo;
use super::load::blocks;
use super::ranges::RangeSet;
use super::zeroed::Recorded;

impl Store {
    /// What the layer itself says of each block of the range.
    ///
    /// # Errors
    /// The disk's.
    pub fn layer_states(&self, layer: LayerNo, extent: Extent) -> io::Result<Vec<BlockState>> {
        let range = blocks(extent);
        let own = self.own(layer, range.clone())?;
        let mut states = vec![BlockState::Absent; usize::try_from(range.end - range.start).unwrap_or(0)];
        for (set, state) in [(&own.data, BlockState::Data), (&own.zero, BlockState::Zero)] {
            for block in set.within(range.clone()).flatten() {
                states[usize::try_from(block - range.start).unwrap_or(0)] = state;
            }
        }
        Ok(states)
    }

    /// What a layer says of each block of the range, given what itself says, as it is compared with the same layer of another
    /// replica: where nothing is held below, its zeroes are nothing. Which of the two it is depends on when the replica has folded
    /// what was removed: zeroes that find data below are marked, and the mark stays when that is gone. What a layer below has lost is
    /// held below, since the other replica may have it there (`recorded`: as for [`Store::plan_zero`]). Of a layer of another branch it
    /// is what itself says.
    ///
    /// # Errors
    /// The disk's.
    pub fn compared_states(
        &self,
        layer: LayerNo,
        extent: Extent,
        states: &[BlockState],
        recorded: Recorded<'_>,
    ) -> io::Result<Vec<BlockState>> {
        let rank = self.at(layer).rank;
        let mut compared = states.to_vec();
        if rank == 0 {
            return Ok(compared);
        }
        let first = blocks(extent).start;
        let mut zeroes = RangeSet::default();
        let marked = (first..).zip(states).filter(|(_, state)| **state == BlockState::Zero);
        marked.for_each(|(block, _)| zeroes.insert(block..block + 1));
        let mut idle = zeroes.clone();
        for part in zeroes.iter() {
            idle.subtract(&self.held_below(part, rank)?);
        }
        if let Some(hull) = idle.hull() {
            idle.subtract(&self.recorded_below(hull, rank, recorded));
        }
        for block in idle.iter().flatten() {
            compared[usize::try_from(block - first).unwrap_or(0)] = BlockState::Absent;
        }
        Ok(compared)
    }

    /// What is read of each block of the range through a layer of the head's chain: what it and each layer under it add, the backing file
    /// included. Of a layer that is not in that chain, what itself holds.
    ///
    /// # Errors
    /// The disk's.
    pub fn merged_states(&self, layer: LayerNo, extent: Extent) -> io::Result<Merged> {
        let Some(place) = self.chain().iter().position(|no| *no == layer) else {
            return self.layer_states(layer, extent).map(|states| Merged::alone(layer, states));
        };
        let blocks = usize::try_from(extent.len / BLOCK).unwrap_or(0);
        let within = self.at(layer).length.saturating_sub(extent.offset) / BLOCK;
        let within = usize::try_from(within).unwrap_or(usize::MAX).min(blocks);
        let (mut told, mut covered) = (Vec::new(), vec![false; blocks]);
        for layer in self.chain()[..=place].iter().rev() {
            let mut states = self.layer_states(*layer, extent)?;
            let above = covered.clone();
            for (state, covered) in states.iter_mut().zip(&mut covered) {
                if *covered {
                    *state = BlockState::Absent;
                }
                *covered |= *state != BlockState::Absent;
            }
            told.push(Told { layer: *layer, states, covered: above });
        }
        Ok(Merged { told, within })
    }
}

/// What one layer says of the blocks of a range that are read through several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// The layer.
    pub layer: LayerNo,
    /// What it says of each block; nothing where a layer above has spoken.
    pub states: Vec<BlockState>,
    /// The blocks of which a layer above has spoken: what this one holds, or has lost, of them is not read.
    pub covered: Vec<bool>,
}

/// What layers say of the blocks of a range, the highest first; no block is told by two of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Layer by layer.
    pub told: Vec<Told>,
    /// The first so many blocks are zero if no layer says anything of them. The others lie behind the layer's end.
    within: usize,
}

impl Merged {
    /// What a layer alone says: of the other blocks nothing is known.
    pub fn alone(layer: LayerNo, states: Vec<BlockState>) -> Self {
        let covered = vec![false; states.len()];
        Self { told: vec![Told { layer, states, covered }], within: 0 }
    }

    /// What all of them say of each block.
    pub fn states(&self) -> Vec<BlockState> {
        let mut states = vec![BlockState::Absent; self.told.first().map_or(0, |told| told.states.len())];
        states.iter_mut().take(self.within).for_each(|state| *state = BlockState::Zero);
        for told in &self.told {
            let said = states.iter_mut().zip(&told.states).filter(|(_, own)| **own != BlockState::Absent);
            said.for_each(|(state, own)| *state = *own);
        }
        states
    }
}
