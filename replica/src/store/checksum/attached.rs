//! The checksums on record of one layer, for the process that serves the directory: it compares what it reads with them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use lh_block::Extent;
use lh_wire::BlockState;

use super::super::ENGINE;
use super::super::data::Store;
use super::super::disk;
use super::super::id::{Id, LAYER_ATTRIBUTE};
use super::super::layer::LayerNo;
use super::super::load::{blocks, bytes};
use super::super::ranges::RangeSet;
use super::sums::{Sums, Version};

/// The checksums of a snapshot's layer, and the file that they are of.
#[derive(Debug)]
pub struct LayerChecksums {
    file: Arc<File>,
    sums: Sums,
    /// Blocks that were changed on purpose since these were given up.
    changed: RangeSet,
}

/// Ranges of blocks that are remembered as changed: some megabytes of memory.
const CHANGED_MAX: usize = 1 << 16;

/// What a block is, beside its checksum on record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It fits, or nothing is recorded of a block that holds nothing.
    Sound,
    /// It is not what was recorded.
    Rotten,
    /// The checksums are damaged here, or the layer's zero map decides.
    Unknown,
}

/// A block as checksums on record tell it: the crc32c of what holds data.
pub type BlockSum = (BlockState, Option<u32>);

impl LayerChecksums {
    /// Looks for the checksums of a layer in a replica's directory. `None`: there are none of the file as it is now.
    pub fn open(directory: &Path, file: &Arc<File>) -> Option<Self> {
        let id = disk::id(file, LAYER_ATTRIBUTE).ok()??;
        let sums = Sums::open(&directory.join(ENGINE), id).ok()??;
        let checksums = Self { file: Arc::clone(file), sums, changed: RangeSet::default() };
        checksums.are_of(file).then_some(checksums)
    }

    /// They are of this very file, and nobody has changed it since.
    pub fn are_of(&self, file: &Arc<File>) -> bool {
        Arc::ptr_eq(&self.file, file) && Version::of(file).is_ok_and(|now| now == self.sums.version)
    }

    /// Compares one block.
    pub fn verdict(&mut self, block: u64, (state, sum): BlockSum) -> Verdict {
        let Ok(stored) = self.sums.next(block..block + 1) else { return Verdict::Unknown };
        match (stored, state, sum) {
            (_, BlockState::Zero, _) => Verdict::Unknown,
            (None, BlockState::Absent, _) => Verdict::Sound,
            (Some((_, stored)), BlockState::Data, Some(sum)) if stored == sum => Verdict::Sound,
            _ => Verdict::Rotten,
        }
    }

    /// The ranges inside `range` that hold data by the record.
    pub fn recorded(&mut self, range: Extent) -> Vec<Extent> {
        let (mut held, mut rest) = (Vec::<Range<u64>>::new(), blocks(range));
        while let Ok(Some((block, _))) = self.sums.next(rest.clone()) {
            rest.start = block + 1;
            match held.last_mut().filter(|run| run.end == block) {
                Some(run) => run.end = rest.start,
                None => held.push(block..rest.start),
            }
        }
        held.into_iter().map(bytes).collect()
    }

    /// The layer's file was changed on purpose into what these checksums say, or nearer to it: they are of the file as it
    /// is now. What in it still does not fit them is rotten as before.
    ///
    /// # Errors
    /// The disk's; then they say nothing any more.
    pub fn rebind(&mut self) -> io::Result<()> {
        self.sums.rebind(Version::of(&self.file)?)
    }

    /// The layer is about to become something else on purpose: from now on, and after a crash, they are of no file. This process may
    /// tell where they still hold ([`LayerChecksums::holds`]).
    ///
    /// # Errors
    /// The disk's. The change itself then makes them void.
    pub fn give_up(&mut self) -> io::Result<()> {
        self.sums.rebind(Version { length: 0, ctime: (0, 0) })
    }

    /// These were given up, and the range is about to be changed. False if that is more than is remembered: then they say nothing any
    /// more.
    #[must_use]
    pub fn note_changed(&mut self, range: Extent) -> bool {
        self.changed.insert(blocks(range));
        self.changed.len() <= CHANGED_MAX
    }

    /// The block was not changed since they were given up, and holds what they say.
    pub fn holds(&mut self, block: u64, sum: u32) -> bool {
        !self.changed.overlaps(block..block + 1)
            && self.verdict(block, (BlockState::Data, Some(sum))) == Verdict::Sound
    }
}

/// The checksums of two layers one of which is folded into the other, as they are before: what is folded by them is either
/// what they say, or rot that was carried along. Holds neither layer's file open.
#[derive(Debug)]
pub struct FoldedChecksums {
    upper: Sums,
    lower: Sums,
    /// Blocks that are zero by the upper layer's zero map: of neither anything is left there.
    zero: RangeSet,
    /// Those by the map of either.
    hidden: RangeSet,
}

impl FoldedChecksums {
    /// `None`: not both have checksums of the file as it is now.
    pub fn open(directory: &Path, store: &Store, upper: LayerNo, lower: LayerNo) -> Option<Self> {
        let sums = |layer| Some(LayerChecksums::open(directory, store.layer_file(layer))?.sums);
        let (upper_sums, lower_sums) = (sums(upper)?, sums(lower)?);
        let zero = store.zeroes(upper);
        let mut hidden = store.zeroes(lower);
        hidden.append(&zero);
        Some(Self { upper: upper_sums, lower: lower_sums, zero, hidden })
    }

    /// They tell of this layer: it is one of the two, and what is folded stays one of the two files.
    pub(in super::super) fn are_of(&self, layer: Option<Id>) -> bool {
        layer.is_some_and(|id| id == self.upper.id || id == self.lower.id)
    }

    /// As [`Sums::next`], where both are one.
    pub(in super::super) fn next(&mut self, range: Range<u64>) -> io::Result<Option<(u64, u32)>> {
        let upper = self.upper.next_outside(range.clone(), &self.zero)?;
        let before = range.start..upper.map_or(range.end, |(block, _)| block);
        Ok(self.lower.next_outside(before, &self.hidden)?.or(upper))
    }
}
