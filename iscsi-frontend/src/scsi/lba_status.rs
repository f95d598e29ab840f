//! GET LBA STATUS (SBC-3, 5.4): which blocks of the unit are mapped, as the device tells it.

use lh_block::{Extent, Geometry, RUNS_MAX, Run, runs};

use super::command::{Cdb, be32, be64};
use super::sense::{self, Sense};

/// Bytes before the descriptors, and of each of them (SBC-3, tables 31 and 32).
const HEAD: u32 = 8;
const DESCRIPTOR: u32 = 16;

/// Most bytes of an answer.
#[expect(clippy::cast_possible_truncation, reason = "128")]
pub(super) const ANSWER_MAX: u32 = HEAD + RUNS_MAX as u32 * DESCRIPTOR;

/// A question that has been understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbaStatus {
    /// From where on it is asked.
    pub range: Extent,
    /// Bytes of a block.
    block: u32,
    /// Most bytes of the answer.
    allocation: u32,
}

impl LbaStatus {
    /// Reads the command.
    ///
    /// # Errors
    /// A block beyond the unit; no place for a descriptor.
    pub(super) fn of(cdb: &Cdb, geometry: &Geometry) -> Result<Self, Sense> {
        let block = u64::from(geometry.logical_block);
        let first = be64(cdb, 2);
        if first >= geometry.size / block {
            return Err(sense::OUT_OF_RANGE.at_cdb(2));
        }
        let allocation = be32(cdb, 10);
        if allocation < HEAD + DESCRIPTOR {
            return Err(sense::INVALID_FIELD.at_cdb(10));
        }
        // A descriptor counts blocks with 32 bits.
        let most = u64::from(u32::MAX) / 8 * 8 * block;
        let range = Extent::new(first * block, (geometry.size - first * block).min(most));
        Ok(Self { range, block: geometry.logical_block, allocation })
    }

    /// Most bytes of the answer.
    pub(super) fn bytes(&self) -> u32 {
        self.allocation.min(ANSWER_MAX)
    }

    /// The answer. `told` is the device's to [`lh_block::Op::Allocation`], empty if it had none; what it does not know is mapped.
    pub(super) fn answer(&self, told: &[u8]) -> Vec<u8> {
        let block = u64::from(self.block);
        let count = (self.allocation - HEAD) / DESCRIPTOR;
        let mut reply = vec![0; HEAD as usize];
        for Run { range, data } in runs(told, self.range).take(count as usize) {
            reply.extend_from_slice(&(range.offset / block).to_be_bytes());
            reply.extend_from_slice(&u32::try_from(range.len / block).unwrap_or(u32::MAX).to_be_bytes());
            // PROVISIONING STATUS: mapped or unknown, deallocated.
            reply.extend_from_slice(&[u8::from(!data), 0, 0, 0]);
        }
        // PARAMETER DATA LENGTH: what follows it.
        let length = u32::try_from(reply.len() - 4).unwrap_or(0);
        reply[..4].copy_from_slice(&length.to_be_bytes());
        reply.truncate(self.allocation as usize);
        reply
    }
}
