//! What the unit tells about itself without I/O: numbers, capacity.

use lh_block::Geometry;

use super::DISK_LUN;
use crate::scsi::command::{Cdb, be32, be64};
use crate::scsi::sense::{self, Sense};

/// REPORT LUNS (SPC-4, 6.33).
pub(super) fn report_luns(cdb: &Cdb, reply: &mut Vec<u8>) -> Result<(), Sense> {
    let allocation = be32(cdb, 6);
    if allocation < 16 {
        return Err(sense::INVALID_FIELD.at_cdb(6));
    }
    let units: &[u8] = match cdb[2] {
        0 | 2 => &[0, DISK_LUN],
        // Only well-known units: there are none.
        1 => &[],
        _ => return Err(sense::INVALID_FIELD.at_cdb(2)),
    };
    let length = u32::try_from(8 * units.len()).unwrap_or(0);
    reply.extend_from_slice(&length.to_be_bytes());
    reply.extend_from_slice(&[0; 4]);
    units.iter().for_each(|unit| reply.extend_from_slice(&[0, *unit, 0, 0, 0, 0, 0, 0]));
    reply.truncate(allocation as usize);
    Ok(())
}

/// READ CAPACITY (10) (SBC-3, 5.15).
pub(super) fn read_capacity_10(cdb: &Cdb, geometry: &Geometry, reply: &mut Vec<u8>) -> Result<(), Sense> {
    let address_without_pmi = cdb[8] & 1 == 0 && be32(cdb, 2) != 0;
    if address_without_pmi {
        return Err(sense::INVALID_FIELD.at_cdb(2));
    }
    let last = geometry.size / u64::from(geometry.logical_block) - 1;
    reply.extend_from_slice(&u32::try_from(last).unwrap_or(u32::MAX).to_be_bytes());
    reply.extend_from_slice(&geometry.logical_block.to_be_bytes());
    Ok(())
}

/// READ CAPACITY (16) (SBC-3, 5.16).
pub(super) fn read_capacity_16(cdb: &Cdb, geometry: &Geometry, reply: &mut Vec<u8>) -> Result<(), Sense> {
    if cdb[14] & 1 == 0 && be64(cdb, 2) != 0 {
        return Err(sense::INVALID_FIELD.at_cdb(2));
    }
    let last = geometry.size / u64::from(geometry.logical_block) - 1;
    reply.extend_from_slice(&last.to_be_bytes());
    reply.extend_from_slice(&geometry.logical_block.to_be_bytes());
    let exponent = (geometry.physical_block / geometry.logical_block).trailing_zeros();
    // LBPME and LBPRZ: thin, and what is unmapped reads as zero.
    reply.extend_from_slice(&[0, u8::try_from(exponent).unwrap_or(0), 0xc0, 0]);
    reply.resize(32, 0);
    reply.truncate(be32(cdb, 10) as usize);
    Ok(())
}
