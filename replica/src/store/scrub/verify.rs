//! Comparing a layer with the checksums that were taken of it.

use std::ops::Range;

use lh_block::{BLOCK, Extent};

use super::super::checksum::{Crc64, Sums};
use super::super::load::bytes as extent_of;
use super::super::pace::Pace;
use super::layer::SnapshotLayer;
use super::walk::{Found, checksums};
use super::{ScrubError, failed};

/// Ranges of rotten blocks that a report lists. A disk with more of them is to be replaced whole.
const ROT_MAX: usize = 4096;

/// What became of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotKind {
    /// It holds other bytes than when it was hashed.
    Changed,
    /// It held data, and is a hole now.
    Lost,
    /// It was a hole, and holds data now.
    Appeared,
    /// The disk does not give it.
    Unreadable,
}

/// Neighbouring rotten blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rot {
    /// Where, in whole blocks.
    pub extent: Extent,
    /// What became of them.
    pub kind: RotKind,
}

/// Which checksums of blocks a scrub had to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Those of this very file.
    Valid,
    /// None, or of another state of the file: only blocks that cannot be read were found. [`SnapshotLayer::hash`] takes
    /// new ones.
    Missing,
    /// They are damaged themselves; so were the blocks compared only up to there.
    Damaged,
}

/// What a scrub found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubReport {
    /// Blocks that hold data.
    pub blocks: u64,
    /// What they were compared with.
    pub stored: Stored,
    /// Whether Longhorn's checksum fits; `None`: there is none of this state of the file, or not all could be read.
    pub checksum_fits: Option<bool>,
    /// The rotten blocks, ascending: the first 4096 ranges.
    pub rotten: Vec<Rot>,
    /// All of them.
    pub rotten_blocks: u64,
}

impl ScrubReport {
    /// True if nothing was found wrong.
    pub fn is_clean(&self) -> bool {
        self.rotten_blocks == 0 && self.checksum_fits != Some(false)
    }

    fn add(&mut self, blocks: Range<u64>, kind: RotKind) {
        self.rotten_blocks += blocks.end - blocks.start;
        let extent = extent_of(blocks);
        let room = self.rotten.len() < ROT_MAX;
        match self.rotten.last_mut() {
            Some(last) if last.kind == kind && last.extent.end() == extent.offset => {
                last.extent.len += extent.len;
            }
            _ if room => self.rotten.push(Rot { extent, kind }),
            _ => {}
        }
    }
}

impl SnapshotLayer {
    /// Reads the whole layer and names the blocks that are not what they were when they were hashed. `progress`: bytes
    /// read so far. Changes nothing.
    ///
    /// # Errors
    /// [`ScrubError`]. A block that cannot be read is no error but a finding.
    pub fn scrub(&self, pace: &Pace, progress: &mut dyn FnMut(u64)) -> Result<ScrubReport, ScrubError> {
        let here = |source| failed("scrubbing", &self.directory)(source);
        let recorded = self.recorded().map_err(here)?.and_then(|recorded| recorded.of(self.version.ctime));
        let mut against = Against { sums: self.sums(), next: 0 };
        let stored = if against.sums.is_some() { Stored::Valid } else { Stored::Missing };
        let mut report =
            ScrubReport { blocks: 0, stored, checksum_fits: None, rotten: Vec::new(), rotten_blocks: 0 };
        let (mut crc, mut at, mut complete) = (Crc64::new(), 0, true);
        self.walk(self.whole(), pace, progress, &mut |found| {
            match found {
                Found::Bytes { offset, bytes, own } => {
                    crc.skip_zeroes(offset - at);
                    crc.update(bytes);
                    at = offset + bytes.len() as u64;
                    for (block, sum) in checksums(offset, bytes, own) {
                        report.blocks += 1;
                        against.compare(block, Some(sum), &mut report);
                    }
                }
                Found::Unreadable { offset, .. } => {
                    complete = false;
                    let block = offset / BLOCK;
                    against.compare(block, None, &mut report);
                    report.add(block..block + 1, RotKind::Unreadable);
                }
            }
            Ok(())
        })?;
        against.lost_before(self.version.length.div_ceil(BLOCK), &mut report);
        self.check_unchanged()?;
        crc.skip_zeroes(self.version.length - at);
        report.checksum_fits = recorded.filter(|_| complete).map(|recorded| recorded == crc.finish());
        Ok(report)
    }
}

/// The stored checksums, walked along.
struct Against {
    sums: Option<Sums>,
    /// The first block that was not compared yet.
    next: u64,
}

impl Against {
    /// A block that the layer holds; its checksum, unless it could not be read.
    fn compare(&mut self, block: u64, found: Option<u32>, report: &mut ScrubReport) {
        self.lost_before(block, report);
        match self.find(block..block + 1, report) {
            Ok(Some((_, stored))) if found.is_some_and(|found| found != stored) => {
                report.add(block..block + 1, RotKind::Changed);
            }
            Ok(None) if found.is_some() && self.sums.is_some() => {
                report.add(block..block + 1, RotKind::Appeared);
            }
            _ => {}
        }
        self.next = block + 1;
    }

    /// What has a checksum before `block` and was not met.
    fn lost_before(&mut self, block: u64, report: &mut ScrubReport) {
        while let Ok(Some((lost, _))) = self.find(self.next..block, report) {
            report.add(lost..lost + 1, RotKind::Lost);
            self.next = lost + 1;
        }
    }

    fn find(&mut self, range: Range<u64>, report: &mut ScrubReport) -> Result<Option<(u64, u32)>, ()> {
        let Some(sums) = &mut self.sums else { return Ok(None) };
        sums.next(range).map_err(|_| {
            self.sums = None;
            report.stored = Stored::Damaged;
        })
    }
}
