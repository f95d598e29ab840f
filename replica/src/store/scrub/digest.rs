//! One number for each of many ranges of a layer, so that replicas are compared without moving their bytes.

use lh_block::Extent;
use lh_wire::BlockState;

use super::super::checksum::Sums;
use super::super::load::blocks;
use super::super::pace::Pace;
use super::ScrubError;
use super::layer::SnapshotLayer;
use super::walk::{Found, checksums};

/// Where a digest takes the checksums of the blocks from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestFrom {
    /// From those on record, if they are of this very file: costs no reading, and does not see rot.
    Record,
    /// From the disk.
    Disk,
}

impl SnapshotLayer {
    /// A digest of each range (whole blocks inside the layer): crc32c over its runs, from its beginning to its end. A run
    /// is all that follows itself in one state; it counts with its state (a byte, as in [`BlockState`]), its number of blocks
    /// (u64), and the crc32c of the crc32c of each of its blocks (u32, 0 if it is no data), little-endian. Ranges with
    /// equal digests hold the same data, holes and zeroes. What lies behind the layer's end is absent.
    ///
    /// # Errors
    /// [`ScrubError`].
    pub fn digest(&self, ranges: &[Extent], from: DigestFrom, pace: &Pace) -> Result<Vec<u32>, ScrubError> {
        let mut stored = if from == DigestFrom::Record { self.sums() } else { None };
        let mut digests = Vec::with_capacity(ranges.len());
        for range in ranges {
            let mut runs = Runs::new(*range);
            let taken = match &mut stored {
                Some(sums) => self.take_record(*range, sums, &mut runs),
                None => false,
            };
            if !taken {
                // Without checksums, or with damaged ones, the disk says it.
                stored = None;
                runs = Runs::new(*range);
                self.take_disk(*range, pace, &mut runs)?;
            }
            digests.push(self.finish(runs));
        }
        self.check_unchanged()?;
        Ok(digests)
    }

    fn finish(&self, mut runs: Runs) -> u32 {
        let end = runs.end;
        self.gap(&mut runs, end);
        runs.end_run();
        runs.crc
    }

    /// Up to `block` there is no data: zeroes by the map, or nothing.
    fn gap(&self, runs: &mut Runs, block: u64) {
        let zeroes = self.zeroes(runs.next..block.max(runs.next));
        for part in zeroes.iter() {
            runs.push(BlockState::Absent, part.start, None);
            runs.push(BlockState::Zero, part.end, None);
        }
        runs.push(BlockState::Absent, block, None);
    }

    fn data(&self, runs: &mut Runs, block: u64, crc: u32) {
        self.gap(runs, block);
        runs.push(BlockState::Data, block + 1, Some(crc));
    }

    fn take_record(&self, range: Extent, sums: &mut Sums, runs: &mut Runs) -> bool {
        let mut range = blocks(range);
        loop {
            match sums.next(range.clone()) {
                Ok(Some((block, crc))) => {
                    self.data(runs, block, crc);
                    range.start = block + 1;
                }
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    }

    fn take_disk(&self, range: Extent, pace: &Pace, runs: &mut Runs) -> Result<(), ScrubError> {
        let Some(inside) = range.intersection(self.whole()) else { return Ok(()) };
        self.walk(inside, pace, &mut |_| {}, &mut |found| match found {
            Found::Bytes { offset, bytes, own } => {
                for (block, crc) in checksums(offset, bytes, own) {
                    self.data(runs, block, crc);
                }
                Ok(())
            }
            Found::Unreadable { offset, error: source } => {
                Err(ScrubError::Unreadable { snapshot: self.snapshot.clone(), offset, source })
            }
        })
    }
}

/// The runs of a range, fed in order.
struct Runs {
    crc: u32,
    /// The first block that was not fed yet, and the range's end.
    next: u64,
    end: u64,
    /// The run that goes on: its state, its blocks, and the crc32c of their checksums.
    state: BlockState,
    blocks: u64,
    sums: u32,
}

impl Runs {
    fn new(range: Extent) -> Self {
        let range = blocks(range);
        Self { crc: 0, next: range.start, end: range.end, state: BlockState::Absent, blocks: 0, sums: 0 }
    }

    /// What there is up to `block`.
    fn push(&mut self, state: BlockState, block: u64, sum: Option<u32>) {
        let block = block.min(self.end);
        if block <= self.next {
            return;
        }
        if state != self.state {
            self.end_run();
            self.state = state;
        }
        self.blocks += block - self.next;
        self.next = block;
        if let Some(sum) = sum {
            self.sums = crc32c::crc32c_append(self.sums, &sum.to_le_bytes());
        }
    }

    fn end_run(&mut self) {
        if self.blocks > 0 {
            self.crc = crc32c::crc32c_append(self.crc, &[self.state as u8]);
            self.crc = crc32c::crc32c_append(self.crc, &self.blocks.to_le_bytes());
            self.crc = crc32c::crc32c_append(self.crc, &self.sums.to_le_bytes());
        }
        (self.blocks, self.sums) = (0, 0);
    }
}
