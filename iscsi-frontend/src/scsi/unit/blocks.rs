//! Commands on blocks: where, how much, and whether that is allowed.

use lh_block::{Extent, Geometry};

use super::{Decision, LogicalUnit};
use crate::scsi::command::{Cdb, be16, blocks_of, opcode};
use crate::scsi::sense::{self, Sense};
use crate::scsi::work::{COMPARE_WRITE_BYTES, TRANSFER_MAX, WRITE_SAME_BLOCKS, Work};

/// FUA of READ (SBC-3, 5.11) and WRITE: what is written is on stable storage before the answer, and so is what is read, which a cache
/// may have that nobody has flushed.
const FUA: u8 = 0x08;

/// UNMAP and NDOB of WRITE SAME (SBC-3, 5.43 and 5.44).
const UNMAP: u8 = 0x08;
const NDOB: u8 = 0x01;

impl LogicalUnit {
    /// READ and WRITE, in all their lengths.
    pub(super) fn read_or_write(&self, cdb: &Cdb, geometry: &Geometry) -> Result<Decision, Decision> {
        let range = range_of(cdb, geometry)?;
        if range.len > u64::from(geometry.max_transfer.min(TRANSFER_MAX)) {
            return Err(sense::INVALID_FIELD.at_cdb(length_field(cdb)).into());
        }
        let writes = cdb[0] & 0x0f == opcode::WRITE_6;
        if writes {
            self.writable()?;
        }
        if range.is_empty() {
            return Ok(Decision::Good);
        }
        let six = cdb[0] >> 5 == 0;
        let fua = !six && cdb[1] & FUA != 0;
        Ok(Decision::Work(match (writes, fua) {
            (true, _) => Work::Write { range, fua: fua || !self.kept.modes.write_cache },
            (false, true) => Work::ReadStable(range),
            (false, false) => Work::Read(range),
        }))
    }

    fn writable(&self) -> Result<(), Sense> {
        if self.read_only || self.kept.modes.protected { Err(sense::WRITE_PROTECTED) } else { Ok(()) }
    }

    /// The other commands on blocks.
    pub(super) fn on_blocks(&self, cdb: &Cdb, geometry: &Geometry) -> Result<Decision, Decision> {
        let block = geometry.logical_block;
        let most = u64::from(geometry.max_transfer.min(TRANSFER_MAX));
        let fua = !self.kept.modes.write_cache;
        let range = match cdb[0] {
            opcode::UNMAP => {
                self.writable()?;
                let (data, size) = (u32::from(be16(cdb, 7)), geometry.size);
                return Ok(if data == 0 {
                    Decision::Good
                } else {
                    Work::Unmap { data, block, size, fua }.into()
                });
            }
            opcode::WRITE_SAME_10 | opcode::WRITE_SAME_16 => {
                self.writable()?;
                return write_same(cdb, geometry, fua);
            }
            _ => range_of(cdb, geometry)?,
        };
        let too_long = Decision::from(sense::INVALID_FIELD.at_cdb(length_field(cdb)));
        let byte_check = cdb[1] & 0x06;
        let work = match cdb[0] {
            opcode::READ_6 | opcode::WRITE_6 | opcode::READ_12 | opcode::WRITE_12 => {
                return self.read_or_write(cdb, geometry);
            }
            // Nothing is gained by reading ahead what the initiator will ask for from the same memory.
            opcode::PRE_FETCH_10 | opcode::PRE_FETCH_16 => return Ok(Decision::Good),
            // All of it: a part costs the same.
            opcode::SYNCHRONIZE_CACHE_10 | opcode::SYNCHRONIZE_CACHE_16 => return Ok(Work::Flush.into()),
            opcode::VERIFY_10 | opcode::VERIFY_12 | opcode::VERIFY_16 => match byte_check {
                // Replicas are compared by their own checksums, not by reading them out.
                0 => return Ok(Decision::Good),
                _ if range.is_empty() => return Ok(Decision::Good),
                0x02 if range.len > most => return Err(too_long),
                0x02 => Work::Verify { range, data: u32::try_from(range.len).unwrap_or(u32::MAX) },
                0x06 => Work::Verify { range, data: block },
                _ => return Err(sense::INVALID_FIELD.at_cdb(1).into()),
            },
            _ => {
                self.writable()?;
                let fua = fua || cdb[1] & FUA != 0;
                let limit = match cdb[0] {
                    opcode::COMPARE_AND_WRITE => u64::from(COMPARE_WRITE_BYTES).min(most / 2),
                    _ => most,
                };
                if range.len > limit {
                    return Err(too_long);
                }
                if range.is_empty() && cdb[0] != opcode::COMPARE_AND_WRITE {
                    return Ok(Decision::Good);
                }
                match cdb[0] {
                    opcode::COMPARE_AND_WRITE => Work::CompareAndWrite { range, fua },
                    opcode::ORWRITE => Work::OrWrite { range, fua },
                    _ if byte_check & 0x04 != 0 => return Err(sense::INVALID_FIELD.at_cdb(1).into()),
                    _ => Work::WriteVerify { range, compare: byte_check != 0 },
                }
            }
        };
        Ok(work.into())
    }
}

/// The bytes that a command with address and count means.
fn range_of(cdb: &Cdb, geometry: &Geometry) -> Result<Extent, Sense> {
    let block = u64::from(geometry.logical_block);
    let (first, count) = blocks_of(cdb);
    let all = geometry.size / block;
    // An empty range must begin inside, too; a command of 0 blocks at the end itself is refused by all targets.
    let inside = first < all && count <= all - first;
    if !inside {
        return Err(sense::OUT_OF_RANGE);
    }
    Ok(Extent::new(first * block, count * block))
}

/// Byte of the CDB where the number of blocks stands.
const fn length_field(cdb: &Cdb) -> u16 {
    match cdb[0] >> 5 {
        0 => 4,
        1 | 2 => 7,
        5 => 6,
        _ if cdb[0] == opcode::COMPARE_AND_WRITE => 13,
        _ => 10,
    }
}

fn write_same(cdb: &Cdb, geometry: &Geometry, fua: bool) -> Result<Decision, Decision> {
    let mut range = range_of(cdb, geometry)?;
    if range.is_empty() {
        // WSNZ = 0: to the end (SBC-3, 5.43).
        range.len = geometry.size - range.offset;
    }
    if range.len > u64::from(WRITE_SAME_BLOCKS) * u64::from(geometry.logical_block) {
        return Err(sense::INVALID_FIELD.at_cdb(length_field(cdb)).into());
    }
    let unmap = cdb[1] & UNMAP != 0;
    if cdb[0] == opcode::WRITE_SAME_16 && cdb[1] & NDOB != 0 {
        return Ok(Work::Zero { range, unmap, fua }.into());
    }
    Ok(Work::WriteSame { range, block: geometry.logical_block, unmap, fua }.into())
}
