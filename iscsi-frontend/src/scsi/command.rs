//! The commands of the logical unit, in one table: what has no row does not exist.
//!
//! A row's usage map says which bits of a CDB mean something here (as REPORT SUPPORTED OPERATION CODES tells it). A bit
//! outside it is refused, so that nobody believes in a protection or an option that is not there.

use super::sense::{INVALID_FIELD, INVALID_OPCODE, Sense};

/// Longest CDB that is taken.
pub const CDB_MAX: usize = 16;

/// A command descriptor block, padded with zeroes.
pub type Cdb = [u8; CDB_MAX];

/// Operation codes (SPC-4, table F.2).
pub mod opcode {
    #![expect(missing_docs, reason = "the names are the standard's")]
    pub const TEST_UNIT_READY: u8 = 0x00;
    pub const REQUEST_SENSE: u8 = 0x03;
    pub const READ_6: u8 = 0x08;
    pub const WRITE_6: u8 = 0x0a;
    pub const INQUIRY: u8 = 0x12;
    pub const MODE_SELECT_6: u8 = 0x15;
    pub const RESERVE_6: u8 = 0x16;
    pub const RELEASE_6: u8 = 0x17;
    pub const MODE_SENSE_6: u8 = 0x1a;
    pub const START_STOP_UNIT: u8 = 0x1b;
    pub const SEND_DIAGNOSTIC: u8 = 0x1d;
    pub const PREVENT_ALLOW: u8 = 0x1e;
    pub const READ_CAPACITY_10: u8 = 0x25;
    pub const READ_10: u8 = 0x28;
    pub const WRITE_10: u8 = 0x2a;
    pub const WRITE_VERIFY_10: u8 = 0x2e;
    pub const VERIFY_10: u8 = 0x2f;
    pub const PRE_FETCH_10: u8 = 0x34;
    pub const SYNCHRONIZE_CACHE_10: u8 = 0x35;
    pub const WRITE_SAME_10: u8 = 0x41;
    pub const UNMAP: u8 = 0x42;
    pub const MODE_SELECT_10: u8 = 0x55;
    pub const MODE_SENSE_10: u8 = 0x5a;
    pub const PERSISTENT_RESERVE_IN: u8 = 0x5e;
    pub const PERSISTENT_RESERVE_OUT: u8 = 0x5f;
    pub const READ_16: u8 = 0x88;
    pub const COMPARE_AND_WRITE: u8 = 0x89;
    pub const WRITE_16: u8 = 0x8a;
    pub const ORWRITE: u8 = 0x8b;
    pub const WRITE_VERIFY_16: u8 = 0x8e;
    pub const VERIFY_16: u8 = 0x8f;
    pub const PRE_FETCH_16: u8 = 0x90;
    pub const SYNCHRONIZE_CACHE_16: u8 = 0x91;
    pub const WRITE_SAME_16: u8 = 0x93;
    pub const SERVICE_ACTION_IN_16: u8 = 0x9e;
    pub const REPORT_LUNS: u8 = 0xa0;
    pub const MAINTENANCE_IN: u8 = 0xa3;
    pub const READ_12: u8 = 0xa8;
    pub const WRITE_12: u8 = 0xaa;
    pub const WRITE_VERIFY_12: u8 = 0xae;
    pub const VERIFY_12: u8 = 0xaf;
}

/// Service actions.
pub mod action {
    /// READ CAPACITY (16) (SBC-3, 5.16).
    pub const READ_CAPACITY_16: u8 = 0x10;
    /// GET LBA STATUS (SBC-3, 5.4).
    pub const GET_LBA_STATUS: u8 = 0x12;
    /// REPORT SUPPORTED OPERATION CODES (SPC-4, 6.35).
    pub const REPORT_OPCODES: u8 = 0x0c;
}

/// What another initiator's reservation does to a command (SPC-4, table 66; SBC-3, table 17).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Always allowed.
    Free,
    /// Allowed beside a Write Exclusive reservation.
    Reads,
    /// Not allowed beside any.
    Changes,
    /// Decides for itself: PERSISTENT RESERVE OUT, RESERVE, RELEASE, START STOP UNIT, PREVENT ALLOW MEDIUM REMOVAL.
    Own,
}

/// A row of the table.
#[derive(Debug)]
pub struct Command {
    /// Operation code.
    pub opcode: u8,
    /// Service action, where the operation code has them.
    pub action: Option<u8>,
    /// Which bits of the CDB are looked at; its length is the CDB's. Byte 0 is the operation code.
    pub usage: &'static [u8],
    /// See [`Access`].
    pub access: Access,
}

const fn row(opcode: u8, access: Access, usage: &'static [u8]) -> Command {
    assert!(usage[0] == opcode);
    Command { opcode, action: None, usage, access }
}

const fn act(opcode: u8, action: u8, access: Access, usage: &'static [u8]) -> Command {
    assert!(usage[0] == opcode && usage[1] & 0x1f == action);
    Command { opcode, action: Some(action), usage, access }
}

/// Every command, in the order of operation codes. NACA in the control byte is refused: there is no ACA. DPO and the
/// obsolete FUA_NV are taken and mean nothing; group numbers are taken, too.
pub const COMMANDS: &[Command] = {
    use Access::{Changes, Free, Own, Reads};
    &[
        row(opcode::TEST_UNIT_READY, Free, &[0x00, 0, 0, 0, 0, 0x04]),
        row(opcode::REQUEST_SENSE, Free, &[0x03, 0x01, 0, 0, 0xff, 0x04]),
        row(opcode::READ_6, Reads, &[0x08, 0x1f, 0xff, 0xff, 0xff, 0x04]),
        row(opcode::WRITE_6, Changes, &[0x0a, 0x1f, 0xff, 0xff, 0xff, 0x04]),
        row(opcode::INQUIRY, Free, &[0x12, 0x01, 0xff, 0xff, 0xff, 0x04]),
        row(opcode::MODE_SELECT_6, Changes, &[0x15, 0x11, 0, 0, 0xff, 0x04]),
        row(opcode::RESERVE_6, Own, &[0x16, 0, 0, 0, 0, 0x04]),
        row(opcode::RELEASE_6, Own, &[0x17, 0, 0, 0, 0, 0x04]),
        row(opcode::MODE_SENSE_6, Changes, &[0x1a, 0x08, 0xff, 0xff, 0xff, 0x04]),
        row(opcode::START_STOP_UNIT, Own, &[0x1b, 0x01, 0, 0x0f, 0xf7, 0x04]),
        row(opcode::SEND_DIAGNOSTIC, Changes, &[0x1d, 0x04, 0, 0, 0, 0x04]),
        row(opcode::PREVENT_ALLOW, Own, &[0x1e, 0, 0, 0, 0x03, 0x04]),
        row(opcode::READ_CAPACITY_10, Free, &[0x25, 0x01, 0xff, 0xff, 0xff, 0xff, 0, 0, 0x01, 0x04]),
        row(opcode::READ_10, Reads, &[0x28, 0x1a, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0x04]),
        row(opcode::WRITE_10, Changes, &[0x2a, 0x1a, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0x04]),
        row(opcode::WRITE_VERIFY_10, Changes, &[0x2e, 0x12, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0x04]),
        row(opcode::VERIFY_10, Reads, &[0x2f, 0x16, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0x04]),
        row(opcode::PRE_FETCH_10, Reads, &[0x34, 0x02, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0x04]),
        row(
            opcode::SYNCHRONIZE_CACHE_10,
            Changes,
            &[0x35, 0x06, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0x04],
        ),
        row(opcode::WRITE_SAME_10, Changes, &[0x41, 0x08, 0xff, 0xff, 0xff, 0xff, 0x1f, 0xff, 0xff, 0x04]),
        row(opcode::UNMAP, Changes, &[0x42, 0, 0, 0, 0, 0, 0x1f, 0xff, 0xff, 0x04]),
        row(opcode::MODE_SELECT_10, Changes, &[0x55, 0x11, 0, 0, 0, 0, 0, 0xff, 0xff, 0x04]),
        row(opcode::MODE_SENSE_10, Changes, &[0x5a, 0x18, 0xff, 0xff, 0, 0, 0, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_IN, 0, Free, &[0x5e, 0x00, 0, 0, 0, 0, 0, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_IN, 1, Free, &[0x5e, 0x01, 0, 0, 0, 0, 0, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_IN, 2, Free, &[0x5e, 0x02, 0, 0, 0, 0, 0, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_IN, 3, Free, &[0x5e, 0x03, 0, 0, 0, 0, 0, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_OUT, 0, Own, &[0x5f, 0x00, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_OUT, 1, Own, &[0x5f, 0x01, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_OUT, 2, Own, &[0x5f, 0x02, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_OUT, 3, Own, &[0x5f, 0x03, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_OUT, 4, Own, &[0x5f, 0x04, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_OUT, 5, Own, &[0x5f, 0x05, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_OUT, 6, Own, &[0x5f, 0x06, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x04]),
        act(opcode::PERSISTENT_RESERVE_OUT, 7, Own, &[0x5f, 0x07, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x04]),
        row(
            opcode::READ_16,
            Reads,
            &[0x88, 0x1a, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04],
        ),
        row(
            opcode::COMPARE_AND_WRITE,
            Changes,
            &[0x89, 0x1a, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 255, 0x1f, 0x04],
        ),
        row(
            opcode::WRITE_16,
            Changes,
            &[0x8a, 0x1a, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04],
        ),
        row(
            opcode::ORWRITE,
            Changes,
            &[0x8b, 0x1a, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04],
        ),
        row(
            opcode::WRITE_VERIFY_16,
            Changes,
            &[0x8e, 0x12, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04],
        ),
        row(
            opcode::VERIFY_16,
            Reads,
            &[0x8f, 0x16, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04],
        ),
        row(
            opcode::PRE_FETCH_16,
            Reads,
            &[0x90, 0x02, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04],
        ),
        row(
            opcode::SYNCHRONIZE_CACHE_16,
            Changes,
            &[0x91, 0x06, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04],
        ),
        row(
            opcode::WRITE_SAME_16,
            Changes,
            &[0x93, 0x09, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04],
        ),
        act(
            opcode::SERVICE_ACTION_IN_16,
            action::READ_CAPACITY_16,
            Free,
            &[0x9e, 0x10, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0x01, 0x04],
        ),
        act(
            opcode::SERVICE_ACTION_IN_16,
            action::GET_LBA_STATUS,
            Reads,
            &[0x9e, 0x12, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x04],
        ),
        row(opcode::REPORT_LUNS, Free, &[0xa0, 0, 0xff, 0, 0, 0, 255, 255, 255, 255, 0, 0x04]),
        act(
            opcode::MAINTENANCE_IN,
            action::REPORT_OPCODES,
            Free,
            &[0xa3, 0x0c, 0x87, 0xff, 0xff, 0xff, 255, 255, 255, 255, 0, 0x04],
        ),
        row(opcode::READ_12, Reads, &[0xa8, 0x1a, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04]),
        row(opcode::WRITE_12, Changes, &[0xaa, 0x1a, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04]),
        row(
            opcode::WRITE_VERIFY_12,
            Changes,
            &[0xae, 0x12, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04],
        ),
        row(opcode::VERIFY_12, Reads, &[0xaf, 0x16, 255, 255, 255, 255, 255, 255, 255, 255, 0x1f, 0x04]),
    ]
};

/// LINK and FLAG of the control byte have meant nothing since SAM-2 and are passed over.
const CONTROL_IGNORED: u8 = 0x03;

/// Index of the first row of each operation code, `NONE` where there is none: the table is not searched per command.
const INDEX: [u8; 256] = {
    let mut index = [NONE; 256];
    let mut i = COMMANDS.len();
    assert!(i < NONE as usize);
    while i > 0 {
        i -= 1;
        #[expect(clippy::cast_possible_truncation, reason = "fewer rows than NONE, asserted above")]
        let at = i as u8;
        index[COMMANDS[i].opcode as usize] = at;
    }
    index
};

const NONE: u8 = 255;

impl Command {
    /// The row of a CDB.
    ///
    /// # Errors
    /// INVALID COMMAND OPERATION CODE, or INVALID FIELD IN CDB for a service action that is not there.
    pub fn of(cdb: &Cdb) -> Result<&'static Self, Sense> {
        let first = INDEX[usize::from(cdb[0])];
        if first == NONE {
            return Err(INVALID_OPCODE.at_cdb(0));
        }
        let rows = &COMMANDS[usize::from(first)..];
        if rows[0].action.is_none() {
            return Ok(&rows[0]);
        }
        let asked = cdb[1] & 0x1f;
        let own = rows.iter().take_while(|row| row.opcode == cdb[0]);
        own.into_iter().find(|row| row.action == Some(asked)).ok_or(INVALID_FIELD.at_cdb(1))
    }

    /// Refuses bits that mean nothing here.
    ///
    /// # Errors
    /// INVALID FIELD IN CDB.
    pub fn check(&self, cdb: &Cdb) -> Result<(), Sense> {
        let control = self.usage.len() - 1;
        for (at, (byte, usage)) in cdb.iter().zip(self.usage).enumerate().skip(1) {
            let usage = match at {
                // The usage of a service action tells its value; every bit of it has been looked at.
                1 if self.action.is_some() => usage | 0x1f,
                // NACA (bit 2) is looked at, and must be 0.
                _ if at == control => CONTROL_IGNORED,
                _ => *usage,
            };
            if byte & !usage != 0 {
                return Err(INVALID_FIELD.at_cdb(u16::try_from(at).unwrap_or(0)));
            }
        }
        Ok(())
    }
}

/// A number of the CDB, big-endian.
pub(crate) fn be16(cdb: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([cdb[at], cdb[at + 1]])
}

/// The same of four bytes.
pub(crate) fn be32(cdb: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([cdb[at], cdb[at + 1], cdb[at + 2], cdb[at + 3]])
}

/// The same of eight bytes.
pub(crate) fn be64(cdb: &[u8], at: usize) -> u64 {
    u64::from(be32(cdb, at)) << 32 | u64::from(be32(cdb, at + 4))
}

/// First logical block and number of blocks of a command that has them (SBC-3, 5).
pub(crate) fn blocks_of(cdb: &Cdb) -> (u64, u64) {
    match cdb[0] >> 5 {
        // A count of 0 means 256 (SBC-3, 5.10).
        0 => (u64::from(be32(cdb, 0) & 0x1f_ffff), if cdb[4] == 0 { 256 } else { u64::from(cdb[4]) }),
        1 | 2 => (u64::from(be32(cdb, 2)), u64::from(be16(cdb, 7))),
        5 => (u64::from(be32(cdb, 2)), u64::from(be32(cdb, 6))),
        _ if cdb[0] == opcode::COMPARE_AND_WRITE => (be64(cdb, 2), u64::from(cdb[13])),
        _ => (be64(cdb, 2), u64::from(be32(cdb, 10))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cdb(bytes: &[u8]) -> Cdb {
        let mut cdb = [0; CDB_MAX];
        cdb[..bytes.len()].copy_from_slice(bytes);
        cdb
    }

    #[test]
    fn rows_are_in_order_and_as_long_as_their_group_says() {
        assert!(COMMANDS.is_sorted_by_key(|row| (row.opcode, row.action)));
        for row in COMMANDS {
            let length = match row.opcode >> 5 {
                0 => 6,
                1 | 2 => 10,
                4 => 16,
                _ => 12,
            };
            assert_eq!(row.usage.len(), length, "{:#x}", row.opcode);
            assert_eq!(row.usage[length - 1], 0x04, "NACA of {:#x}", row.opcode);
        }
    }

    #[test]
    fn what_has_no_row_is_refused() {
        let of = |bytes: &[u8]| Command::of(&cdb(bytes)).map(|row| (row.opcode, row.action));
        assert_eq!(of(&[0x04]), Err(INVALID_OPCODE.at_cdb(0)));
        assert_eq!(of(&[0xff]), Err(INVALID_OPCODE.at_cdb(0)));
        assert_eq!(of(&[0x5e, 0x03]), Ok((0x5e, Some(3))));
        assert_eq!(of(&[0x5e, 0x04]), Err(INVALID_FIELD.at_cdb(1)));
        assert_eq!(of(&[0x9e, 0x12]), Ok((0x9e, Some(0x12))));
        assert_eq!(of(&[0x28, 0x1f]), Ok((0x28, None)));
    }

    #[test]
    fn bits_without_a_meaning_are_refused_where_they_stand() {
        let check = |bytes: &[u8]| {
            let cdb = cdb(bytes);
            Command::of(&cdb).unwrap().check(&cdb)
        };
        assert_eq!(check(&[0x28, 0x18, 1, 2, 3, 4, 0x1f, 1, 1, 0]), Ok(()));
        // RDPROTECT.
        assert_eq!(check(&[0x28, 0x20, 0, 0, 0, 0, 0, 0, 1, 0]), Err(INVALID_FIELD.at_cdb(1)));
        // NACA.
        assert_eq!(check(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 4]), Err(INVALID_FIELD.at_cdb(9)));
        // LINK.
        assert_eq!(check(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 1]), Ok(()));
        assert_eq!(check(&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32]), Ok(()));
    }

    #[test]
    fn addresses_and_counts_of_every_group() {
        assert_eq!(blocks_of(&cdb(&[0x08, 0x1f, 0xff, 0xff, 0])), (0x1f_ffff, 256));
        assert_eq!(blocks_of(&cdb(&[0x28, 0, 1, 2, 3, 4, 0, 5, 6])), (0x0102_0304, 0x0506));
        assert_eq!(blocks_of(&cdb(&[0xa8, 0, 1, 2, 3, 4, 5, 6, 7, 8])), (0x0102_0304, 0x0506_0708));
        let long = cdb(&[0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(blocks_of(&long), (0x0102_0304_0506_0708, 0x090a_0b0c));
        assert_eq!(blocks_of(&cdb(&[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 3])), (7, 3));
    }
}
