//! The checksums on record of one layer, for the process that serves the directory: it compares what it reads with them.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use lh_block::Extent;
use lh_wire::BlockState;

use super::super::ENGINE;
use super::super::disk;
use super::super::id::LAYER_ATTRIBUTE;
use super::super::load::{blocks, bytes};
use super::super::ranges::RangeSet;
use super::sums::{Sums, Version};

/// The checksums of a snapshot's layer, and the file that they are of.
#[derive(Debug)]
pub struct LayerChecksums {
    file: Arc<File>,
    sums: Sums,
}

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
        let checksums = Self { file: Arc::clone(file), sums };
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
        let (mut held, mut rest) = (RangeSet::default(), blocks(range));
        while let Ok(Some((block, _))) = self.sums.next(rest.clone()) {
            held.insert(block..block + 1);
            rest.start = block + 1;
        }
        held.iter().map(bytes).collect()
    }

    /// The layer's file was changed on purpose into what these checksums say, or nearer to it: they are of the file as it
    /// is now. What in it still does not fit them is rotten as before.
    ///
    /// # Errors
    /// The disk's; then they say nothing any more.
    pub fn rebind(&mut self) -> io::Result<()> {
        self.sums.rebind(Version::of(&self.file)?)
    }

    /// The layer is about to become something else on purpose: from now on, and after a crash, they are of no file.
    ///
    /// # Errors
    /// The disk's. The change itself then makes them void.
    pub fn give_up(mut self) -> io::Result<()> {
        self.sums.rebind(Version { length: 0, ctime: (0, 0) })
    }
}

/// The checksums of two layers one of which is folded into the other, as they are before: what is folded by them is either
/// what they say, or rot that was carried along. Holds neither layer's file open.
#[derive(Debug)]
pub struct FoldedChecksums {
    upper: Sums,
    lower: Sums,
}

impl FoldedChecksums {
    /// `None`: not both have checksums of the file as it is now.
    pub fn open(directory: &Path, upper: &Arc<File>, lower: &Arc<File>) -> Option<Self> {
        let (upper, lower) =
            (LayerChecksums::open(directory, upper)?.sums, LayerChecksums::open(directory, lower)?.sums);
        Some(Self { upper, lower })
    }

    /// The checksum that a block has where both are one. `None`: none, or it is damaged.
    pub(in super::super) fn sum_of(&mut self, block: u64) -> Option<u32> {
        let upper = self.upper.next(block..block + 1).ok()?;
        let found = if upper.is_some() { upper } else { self.lower.next(block..block + 1).ok()? };
        found.map(|(_, sum)| sum)
    }
}
