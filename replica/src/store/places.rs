//! Where the blocks of the volume are: the index, and whose its values are.
//!
//! An engine on this host may have been granted the layers' files, and reads there by what it was told of places
//! (`docs/decisions/0016-reads-on-one-host-are-the-engines-own.md`). So nothing here changes unnoticed: a change of the index
//! raises the counter of each piece in which a block's value becomes another, and a change of the layers ends the grant. Both at
//! once, before anything can follow from it: an answer, or a change of what an old place holds.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;

use lh_block::BLOCK;
use lh_ring::Changes;
use lh_wire::{COUNTERS, PIECE_BLOCKS, Place, counter_of};

use super::index::{Index, IndexRuns};
use super::layer::LayerNo;

const PIECE: u64 = PIECE_BLOCKS as u64;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Places {
    /// Values are places in `chain`, counted from 1; 0 is zeroes.
    index: Index,
    /// Numbers of the layers of the head's chain, base first.
    chain: Vec<LayerNo>,
    grant: Option<Holding>,
}

/// A grant that holds.
#[derive(Debug)]
struct Holding {
    changes: Changes,
    /// Layers whose files are granted, in the order of the descriptors.
    files: Vec<LayerNo>,
}

impl Places {
    pub(super) const fn new(index: Index, chain: Vec<LayerNo>) -> Self {
        Self { index, chain, grant: None }
    }

    /// As [`Index::runs`].
    pub(super) fn runs(&self, range: Range<u64>) -> IndexRuns<'_> {
        self.index.runs(range)
    }

    /// Numbers of the layers of the head's chain, base first.
    pub(super) fn chain(&self) -> &[LayerNo] {
        &self.chain
    }

    /// As [`Index::set`].
    pub(super) fn set(&mut self, range: Range<u64>, value: u8) {
        self.note(range.clone(), value);
        self.index.set(range, value);
    }

    /// As [`Index::set_all`].
    pub(super) fn set_all(&mut self, ranges: impl Iterator<Item = Range<u64>>, value: u8) {
        if self.grant.is_none() {
            return self.index.set_all(ranges, value);
        }
        let ranges: Vec<_> = ranges.collect();
        ranges.iter().for_each(|range| self.note(range.clone(), value));
        self.index.set_all(ranges.into_iter(), value);
    }

    /// Raises the counters of the blocks of the range whose value is another.
    fn note(&self, range: Range<u64>, value: u8) {
        if self.grant.is_some() {
            let other = self.index.runs(range).filter(|(_, held)| *held != value);
            other.for_each(|(part, _)| self.changed(part));
        }
    }

    /// What the range reads has changed, or is about to, though it stays where it is.
    pub(super) fn changed(&self, range: Range<u64>) {
        let Some(grant) = &self.grant else { return };
        let pieces = range.start / PIECE..range.end.div_ceil(PIECE);
        if pieces.end.saturating_sub(pieces.start) >= COUNTERS as u64 {
            grant.changes.raise_all();
        } else {
            pieces.for_each(|piece| grant.changes.raise(counter_of(piece)));
        }
    }

    /// As [`Index::grow`].
    pub(super) fn grow(&mut self, blocks: u64) {
        self.end_grant();
        self.index.grow(blocks);
    }

    /// A layer lies above all others.
    pub(super) fn push(&mut self, layer: LayerNo) {
        self.end_grant();
        self.chain.push(layer);
    }

    /// What the index says of the one layer holds of the other from now on.
    pub(super) fn merge(&mut self, goes: LayerNo, stays: LayerNo) {
        self.end_grant();
        self.chain.iter_mut().filter(|place| **place == goes).for_each(|place| *place = stays);
    }

    /// Other values for the same: `values` by the old ones.
    pub(super) fn remap(&mut self, values: &[u8; 256], chain: Vec<LayerNo>) {
        self.end_grant();
        self.index.remap(values);
        self.chain = chain;
    }

    /// Grants the files of these layers, in this order: the memory whose counters say from now on what is no longer so. Another
    /// grant is over.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn grant(&mut self, files: Vec<LayerNo>) -> io::Result<OwnedFd> {
        self.end_grant();
        let changes = Changes::new(COUNTERS)?;
        let memory = changes.lend()?;
        self.grant = Some(Holding { changes, files });
        Ok(memory)
    }

    /// The grant is over, if there is one: whoever looks knows.
    pub(super) fn end_grant(&mut self) {
        self.grant = None;
    }

    pub(super) const fn is_granted(&self) -> bool {
        self.grant.is_some()
    }

    /// Where the blocks of a range within a piece are. `None`: nothing is granted.
    pub(super) fn tell(&self, range: Range<u64>) -> Option<lh_wire::Places> {
        let grant = self.grant.as_ref()?;
        let mut told = lh_wire::Places::new(grant.changes.count(counter_of(range.start / PIECE)));
        for (part, value) in self.index.runs(range) {
            let place = match self.chain.get(usize::from(value).wrapping_sub(1)) {
                None => Place::Zero,
                Some(layer) => {
                    let file = grant.files.iter().position(|file| file == layer);
                    file.and_then(|file| u8::try_from(file).ok()).map_or(Place::Asked, Place::File)
                }
            };
            told.push(usize::try_from(part.end - part.start).unwrap_or(usize::MAX), place);
        }
        Some(told)
    }
}

const _: () = assert!(PIECE * BLOCK == lh_wire::PIECE);
