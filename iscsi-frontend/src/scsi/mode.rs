//! Mode pages: what an initiator may switch (SPC-4, 6.9, 6.11 and 7.5; SBC-3, 6.5).
//!
//! Two switches exist: the write cache (WCE) and the software write protection (SWP). Both outlive the process
//! ([`super::keep`]): an initiator that has seen WCE = 0 sends no flushes any more.

use super::command::{Cdb, be16, be32, opcode};
use super::sense::{INVALID_FIELD, INVALID_PARAMETER, PARAMETER_LIST_LENGTH, SAVING_UNSUPPORTED, Sense};

/// Page codes (SPC-4, table 444; SBC-3, table 225).
mod page {
    pub(super) const CACHING: u8 = 0x08;
    pub(super) const CONTROL: u8 = 0x0a;
    pub(super) const EXCEPTIONS: u8 = 0x1c;
    /// All pages.
    pub(super) const ALL: u8 = 0x3f;
}

/// In the order in which all of them are told.
const PAGES: [u8; 3] = [page::CACHING, page::CONTROL, page::EXCEPTIONS];

/// Longest page, its two bytes of header included.
const PAGE_MAX: usize = 20;

/// WCE in byte 2 of the caching page (SBC-3, 6.5.5).
const WCE: u8 = 0x04;

/// SWP in byte 4 of the control page (SPC-4, 7.5.8).
const SWP: u8 = 0x08;

/// WP and DPOFUA of the DEVICE-SPECIFIC PARAMETER (SBC-3, 6.5.1).
const WRITE_PROTECT: u8 = 0x80;
const DPO_FUA: u8 = 0x10;

/// Longest parameter list of a MODE SELECT that is taken: header, long block descriptor, every page once, and room.
pub(crate) const SELECT_MAX: u32 = 255;

/// What can be switched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    /// WCE: a write is acknowledged before it is on stable storage, unless it has FUA set.
    pub write_cache: bool,
    /// SWP: writes are refused.
    pub protected: bool,
}

/// A page as it is, or with ones where it can be changed.
fn content(code: u8, modes: Modes, changeable: bool) -> ([u8; PAGE_MAX], usize) {
    let mut bytes = [0; PAGE_MAX];
    let modes = if changeable { Modes { write_cache: true, protected: true } } else { modes };
    let len = match code {
        page::CACHING => {
            bytes[2] = if modes.write_cache { WCE } else { 0 };
            20
        }
        page::CONTROL => {
            if !changeable {
                // GLTSD, and QUEUE ALGORITHM MODIFIER 1: commands may be done in any order.
                (bytes[2], bytes[3]) = (0x02, 0x10);
                // TAS: commands that another initiator aborts end with TASK ABORTED.
                bytes[5] = 0x40;
                // BUSY TIMEOUT PERIOD: none.
                (bytes[8], bytes[9]) = (0xff, 0xff);
            }
            bytes[4] = if modes.protected { SWP } else { 0 };
            12
        }
        _ => {
            if !changeable {
                // DEXCPT: no exceptions are reported.
                bytes[2] = 0x08;
            }
            12
        }
    };
    bytes[0] = code;
    bytes[1] = u8::try_from(len - 2).unwrap_or(0);
    (bytes, len)
}

/// Answers MODE SENSE: fills `reply`, which is empty, up to the allocation length. `blocks` of `block` bytes, and
/// `read_only` from outside.
///
/// # Errors
/// INVALID FIELD IN CDB for a page that is not there; SAVING PARAMETERS NOT SUPPORTED for saved values.
pub(crate) fn mode_sense(
    cdb: &Cdb,
    modes: Modes,
    read_only: bool,
    (blocks, block): (u64, u32),
    reply: &mut Vec<u8>,
) -> Result<(), Sense> {
    let long = cdb[0] == opcode::MODE_SENSE_10;
    let (control, code, subpage) = (cdb[2] >> 6, cdb[2] & 0x3f, cdb[3]);
    if control == 3 {
        return Err(SAVING_UNSUPPORTED);
    }
    if subpage != 0 && !(code == page::ALL && subpage == 0xff) {
        return Err(INVALID_FIELD.at_cdb(3));
    }
    if code != page::ALL && !PAGES.contains(&code) {
        return Err(INVALID_FIELD.at_cdb(2));
    }
    let header = if long { 8 } else { 4 };
    reply.resize(header, 0);
    let (no_descriptor, long_lba) = (cdb[1] & 0x08 != 0, long && cdb[1] & 0x10 != 0);
    if !no_descriptor && long_lba {
        // SBC-3, 6.5.2.3.
        reply.extend_from_slice(&blocks.to_be_bytes());
        reply.extend_from_slice(&[0; 4]);
        reply.extend_from_slice(&block.to_be_bytes());
    } else if !no_descriptor {
        // SBC-3, 6.5.2.2.
        reply.extend_from_slice(&u32::try_from(blocks).unwrap_or(u32::MAX).to_be_bytes());
        reply.extend_from_slice(&block.to_be_bytes());
    }
    let descriptor = u8::try_from(reply.len() - header).unwrap_or(0);
    for each in PAGES.iter().filter(|each| code == page::ALL || **each == code) {
        let (bytes, len) = content(*each, modes, control == 1);
        reply.extend_from_slice(&bytes[..len]);
    }
    let protect = if modes.protected || read_only { WRITE_PROTECT } else { 0 };
    let device = DPO_FUA | protect;
    if long {
        let len = u16::try_from(reply.len() - 2).unwrap_or(0);
        reply[..2].copy_from_slice(&len.to_be_bytes());
        reply[3] = device;
        // LONGLBA.
        reply[4] = u8::from(descriptor == 16);
        reply[7] = descriptor;
        reply.truncate(usize::from(be16(cdb, 7)));
    } else {
        reply[0] = u8::try_from(reply.len() - 1).unwrap_or(0);
        reply[2] = device;
        reply[3] = descriptor;
        reply.truncate(usize::from(cdb[4]));
    }
    Ok(())
}

/// Length of the parameter list of a MODE SELECT.
///
/// # Errors
/// INVALID FIELD IN CDB unless PF is set and SP is not; PARAMETER LIST LENGTH ERROR beyond [`SELECT_MAX`].
pub(crate) fn select_length(cdb: &Cdb) -> Result<u32, Sense> {
    const PF: u8 = 0x10;
    const SP: u8 = 0x01;
    if cdb[1] & PF == 0 || cdb[1] & SP != 0 {
        return Err(INVALID_FIELD.at_cdb(1));
    }
    let length = if cdb[0] == opcode::MODE_SELECT_10 { u32::from(be16(cdb, 7)) } else { u32::from(cdb[4]) };
    if length > SELECT_MAX { Err(PARAMETER_LIST_LENGTH) } else { Ok(length) }
}

/// Refuses a block descriptor of no length that there is, or that asks for blocks of another length than `block`: nobody is to believe
/// that a format would make them. What it says of the number of blocks means nothing here, and is passed over (SBC-3, 6.5.2).
fn check_descriptor(list: &[u8], header: usize, length: usize, block: u32) -> Result<(), Sense> {
    let long = header == 8;
    // LONGLBA.
    let is_wide = long && list[4] & 0x01 != 0;
    let descriptor = match (length, is_wide) {
        (0, _) => return Ok(()),
        (8, false) | (16, true) => list.get(header..header + length).ok_or(PARAMETER_LIST_LENGTH)?,
        _ => return Err(INVALID_PARAMETER.at_parameter(if long { 6 } else { 3 })),
    };
    // Of the short one the length has three bytes, behind one that is reserved.
    let (at, told) = match is_wide {
        true => (12, be32(descriptor, 12)),
        false => (5, be32(descriptor, 4) & 0x00ff_ffff),
    };
    if told == block {
        return Ok(());
    }
    Err(INVALID_PARAMETER.at_parameter(u16::try_from(header + at).unwrap_or(0)))
}

/// The modes of a unit with blocks of `block` bytes after a MODE SELECT with these parameters.
///
/// # Errors
/// INVALID FIELD IN PARAMETER LIST for a page that is not there, a bit that cannot be changed, or blocks of another length; PARAMETER
/// LIST LENGTH ERROR for a list that ends in the middle. Nothing is changed then.
pub(crate) fn mode_select(cdb: &Cdb, list: &[u8], modes: Modes, block: u32) -> Result<Modes, Sense> {
    if list.is_empty() {
        return Ok(modes);
    }
    let long = cdb[0] == opcode::MODE_SELECT_10;
    let header = if long { 8 } else { 4 };
    if list.len() < header {
        return Err(PARAMETER_LIST_LENGTH);
    }
    let descriptor = if long { usize::from(be16(list, 6)) } else { usize::from(list[3]) };
    check_descriptor(list, header, descriptor, block)?;
    let mut at = header + descriptor;
    let mut after = modes;
    while at < list.len() {
        let rest = &list[at..];
        let Some(length) = rest.get(1).map(|length| usize::from(*length) + 2) else {
            return Err(PARAMETER_LIST_LENGTH);
        };
        let where_ = u16::try_from(at).unwrap_or(0);
        // PS is reserved here; SPF: there are no subpages.
        let code = rest[0];
        if !PAGES.contains(&code) {
            return Err(INVALID_PARAMETER.at_parameter(where_));
        }
        let (now, len) = content(code, modes, false);
        let (mask, _) = content(code, modes, true);
        if length != len {
            return Err(INVALID_PARAMETER.at_parameter(where_ + 1));
        }
        let Some(wanted) = rest.get(..len) else { return Err(PARAMETER_LIST_LENGTH) };
        for i in 2..len {
            if (wanted[i] ^ now[i]) & !mask[i] != 0 {
                return Err(INVALID_PARAMETER.at_parameter(where_ + u16::try_from(i).unwrap_or(0)));
            }
        }
        match code {
            page::CACHING => after.write_cache = wanted[2] & WCE != 0,
            page::CONTROL => after.protected = wanted[4] & SWP != 0,
            _ => {}
        }
        at += len;
    }
    if at == list.len() { Ok(after) } else { Err(PARAMETER_LIST_LENGTH) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODES: Modes = Modes { write_cache: true, protected: false };

    fn sense6(byte1: u8, page: u8, allocation: u8) -> Result<Vec<u8>, Sense> {
        let mut cdb = [0; 16];
        cdb[..5].copy_from_slice(&[0x1a, byte1, page, 0, allocation]);
        let mut reply = Vec::new();
        mode_sense(&cdb, MODES, false, (1 << 40, 512), &mut reply)?;
        Ok(reply)
    }

    fn select6(list: &[u8]) -> Result<Modes, Sense> {
        let mut cdb = [0; 16];
        cdb[..5].copy_from_slice(&[0x15, 0x10, 0, 0, u8::try_from(list.len()).unwrap()]);
        assert_eq!(select_length(&cdb), Ok(u32::try_from(list.len()).unwrap()));
        mode_select(&cdb, list, MODES, 512)
    }

    fn select10(list: &[u8]) -> Result<Modes, Sense> {
        let mut cdb = [0; 16];
        cdb[..9].copy_from_slice(&[0x55, 0x10, 0, 0, 0, 0, 0, 0, u8::try_from(list.len()).unwrap()]);
        mode_select(&cdb, list, MODES, 512)
    }

    #[test]
    fn all_pages_with_a_block_descriptor() {
        let all = sense6(0, 0x3f, 255).unwrap();
        assert_eq!(all.len(), 4 + 8 + 20 + 12 + 12);
        assert_eq!(usize::from(all[0]) + 1, all.len());
        assert_eq!(all[2..4], [0x10, 8]);
        assert_eq!(all[4..12], [0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0]);
        assert_eq!(all[12..15], [0x08, 18, WCE]);
        assert_eq!(sense6(8, 0x3f, 4).unwrap(), [47, 0, 0x10, 0]);
        // Changeable values.
        assert_eq!(sense6(8, 0x48, 255).unwrap()[4..8], [0x08, 18, WCE, 0]);
        assert_eq!(sense6(8, 0xc8, 255), Err(SAVING_UNSUPPORTED));
        assert_eq!(sense6(8, 0x05, 255), Err(INVALID_FIELD.at_cdb(2)));
    }

    #[test]
    fn a_long_descriptor_where_it_is_asked_for() {
        let mut cdb = [0; 16];
        cdb[..9].copy_from_slice(&[0x5a, 0x10, 0x08, 0, 0, 0, 0, 0, 255]);
        let mut reply = Vec::new();
        mode_sense(&cdb, MODES, true, (1 << 40, 512), &mut reply).unwrap();
        assert_eq!(reply[3..8], [0x90, 1, 0, 0, 16]);
        assert_eq!(u64::from_be_bytes(reply[8..16].try_into().unwrap()), 1 << 40);
    }

    #[test]
    fn blocks_have_the_length_that_they_have() {
        let off = Ok(Modes { write_cache: false, protected: false });
        let page = &content(page::CACHING, Modes { write_cache: false, protected: false }, false).0[..];
        let short = |descriptor: &[u8]| {
            let length = u8::try_from(descriptor.len()).unwrap();
            select6(&[&[0, 0, 0, length], descriptor, page].concat())
        };
        let long = |wide: u8, descriptor: &[u8]| {
            let length = u8::try_from(descriptor.len()).unwrap();
            select10(&[&[0, 0, 0, 0, wide, 0, 0, length], descriptor, page].concat())
        };
        // As MODE SENSE tells them, and with another number of blocks.
        for blocks in [0xff, 0x00] {
            assert_eq!(short(&[blocks, 0, 0, 0, 0, 0, 2, 0]), off);
            assert_eq!(long(0, &[blocks, 0, 0, 0, 0, 0, 2, 0]), off);
            assert_eq!(long(1, &[blocks, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0]), off);
        }
        let wrong = |at| Err(INVALID_PARAMETER.at_parameter(at));
        assert_eq!(short(&[0, 0, 0, 0, 0, 0, 16, 0]), wrong(9));
        assert_eq!(short(&[0; 8]), wrong(9));
        assert_eq!(long(0, &[0, 0, 0, 0, 0, 0, 16, 0]), wrong(13));
        assert_eq!(long(1, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0]), wrong(20));
        // Of no length that there is.
        assert_eq!(short(&[0, 0, 0, 0]), wrong(3));
        assert_eq!(short(&[0; 16]), wrong(3));
        assert_eq!((long(0, &[0; 16]), long(1, &[0; 8])), (wrong(6), wrong(6)));
        assert_eq!(select6(&[0, 0, 0, 8, 0, 0]), Err(PARAMETER_LIST_LENGTH));
    }

    #[test]
    fn switches_are_switched_and_nothing_else_is() {
        let caching = |byte2: u8| {
            let mut list = vec![0; 4];
            list.extend_from_slice(&content(page::CACHING, MODES, false).0);
            list[6] = byte2;
            list
        };
        assert_eq!(select6(&caching(0)), Ok(Modes { write_cache: false, protected: false }));
        assert_eq!(select6(&caching(WCE)), Ok(MODES));
        // RCD cannot be switched.
        assert_eq!(select6(&caching(WCE | 1)), Err(INVALID_PARAMETER.at_parameter(6)));
        let mut control = vec![0; 4];
        control.extend_from_slice(&content(page::CONTROL, MODES, false).0[..12]);
        control[8] |= SWP;
        assert_eq!(select6(&control), Ok(Modes { write_cache: true, protected: true }));
        assert_eq!(select6(&control[..15]), Err(PARAMETER_LIST_LENGTH));
        assert_eq!(select6(&[0, 0, 0, 0, 0x05, 0]), Err(INVALID_PARAMETER.at_parameter(4)));
        assert_eq!(select6(&[0, 0, 0]), Err(PARAMETER_LIST_LENGTH));
        assert_eq!(select6(&[]), Ok(MODES));
        let mut bad = [0; 16];
        bad[0] = 0x15;
        assert_eq!(select_length(&bad), Err(INVALID_FIELD.at_cdb(1)));
    }
}
