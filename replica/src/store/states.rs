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

    /// What is read of each block of the range through a layer of the head's chain: for each layer from it down, what it alone
    /// adds. What no layer holds is zero, by the last one's word, unless a backing file is below. Of a layer that is not in
    /// that chain, what itself holds.
    ///
    /// # Errors
    /// The disk's.
    pub fn merged_states(
        &self,
        layer: LayerNo,
        extent: Extent,
    ) -> io::Result<Vec<(LayerNo, Vec<BlockState>)>> {
        let Some(place) = self.chain().iter().position(|no| *no == layer) else {
            return self.layer_states(layer, extent).map(|states| vec![(layer, states)]);
        };
        let mut found: Vec<(LayerNo, Vec<BlockState>)> = Vec::new();
        let mut said = vec![false; usize::try_from(extent.len / BLOCK).unwrap_or(0)];
        let own_layers = self.chain()[..=place].iter().rev().filter(|no| self.at(**no).name.is_some());
        for no in own_layers {
            let mut states = self.layer_states(*no, extent)?;
            for (state, said) in states.iter_mut().zip(&mut said) {
                if *said {
                    *state = BlockState::Absent;
                }
                *said |= *state != BlockState::Absent;
            }
            found.push((*no, states));
        }
        let backed = self.chain().iter().any(|no| self.at(*no).name.is_none());
        if let Some((_, last)) = found.last_mut().filter(|_| !backed) {
            let silent = last.iter_mut().zip(&said).filter(|(_, said)| !**said);
            silent.for_each(|(state, _)| *state = BlockState::Zero);
        }
        Ok(found)
    }
}
