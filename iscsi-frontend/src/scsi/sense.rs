//! Sense data: why a command ended with CHECK CONDITION.
//!
//! Fixed format only (SPC-4, 4.5.3): the control mode page says D_SENSE = 0, unchangeable.

use lh_block::IoError;

/// Bytes of fixed format sense data.
pub const SENSE_LEN: usize = 18;

/// RESPONSE CODE of current errors in fixed format (SPC-4, 4.5.1).
const CURRENT_FIXED: u8 = 0x70;

/// The VALID bit: the INFORMATION field means something (SPC-4, 4.5.3).
const VALID: u8 = 0x80;

/// SKSV and C/D of the field pointer (SPC-4, 4.5.2.4.2).
const FIELD_POINTER: u8 = 0x80;
const FIELD_IN_CDB: u8 = 0x40;

/// Sense keys (SPC-4, table 48).
pub mod key {
    /// NO SENSE.
    pub const NO_SENSE: u8 = 0x0;
    /// NOT READY.
    pub const NOT_READY: u8 = 0x2;
    /// MEDIUM ERROR.
    pub const MEDIUM_ERROR: u8 = 0x3;
    /// HARDWARE ERROR.
    pub const HARDWARE_ERROR: u8 = 0x4;
    /// ILLEGAL REQUEST.
    pub const ILLEGAL_REQUEST: u8 = 0x5;
    /// UNIT ATTENTION.
    pub const UNIT_ATTENTION: u8 = 0x6;
    /// DATA PROTECT.
    pub const DATA_PROTECT: u8 = 0x7;
    /// ABORTED COMMAND.
    pub const ABORTED_COMMAND: u8 = 0xb;
    /// MISCOMPARE.
    pub const MISCOMPARE: u8 = 0xe;
}

/// A sense key, an additional sense code with its qualifier, and what points at the culprit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// One of [`key`].
    pub key: u8,
    /// ADDITIONAL SENSE CODE and its QUALIFIER, high and low byte (SPC-4, table F.1).
    pub code: u16,
    /// The INFORMATION field: a logical block, or a byte of the data.
    pub information: Option<u32>,
    /// The first wrong byte.
    pub field: Option<Field>,
}

/// Where a wrong field begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// Byte of the CDB.
    Cdb(u16),
    /// Byte of the parameter data.
    Parameter(u16),
}

const fn sense(key: u8, code: u16) -> Sense {
    Sense { key, code, information: None, field: None }
}

/// NO ADDITIONAL SENSE INFORMATION.
pub const NOTHING: Sense = sense(key::NO_SENSE, 0x0000);
/// LOGICAL UNIT NOT READY, CAUSE NOT REPORTABLE: the volume is being stopped.
pub const STOPPING: Sense = sense(key::NOT_READY, 0x0400);
/// LOGICAL UNIT COMMUNICATION TIME-OUT: no replica came back within the volume's I/O timeout.
pub const TIMED_OUT: Sense = sense(key::HARDWARE_ERROR, 0x0801);
/// UNEXPECTED UNSOLICITED DATA (RFC 7143, 11.4.7.2).
pub const UNEXPECTED_DATA: Sense = sense(key::ABORTED_COMMAND, 0x0c0c);
/// NOT ENOUGH UNSOLICITED DATA, also for data out of sequence (RFC 7143, 11.4.7.2).
pub const INCORRECT_DATA: Sense = sense(key::ABORTED_COMMAND, 0x0c0d);
/// INVALID FIELD IN COMMAND INFORMATION UNIT: the transport's lengths or directions contradict the CDB.
pub const INVALID_INFORMATION_UNIT: Sense = sense(key::ILLEGAL_REQUEST, 0x0e03);
/// UNRECOVERED READ ERROR.
pub const READ_ERROR: Sense = sense(key::MEDIUM_ERROR, 0x1100);
/// WRITE ERROR.
pub const WRITE_ERROR: Sense = sense(key::MEDIUM_ERROR, 0x0c00);
/// PARAMETER LIST LENGTH ERROR.
pub const PARAMETER_LIST_LENGTH: Sense = sense(key::ILLEGAL_REQUEST, 0x1a00);
/// MISCOMPARE DURING VERIFY OPERATION.
pub const MISCOMPARED: Sense = sense(key::MISCOMPARE, 0x1d00);
/// INVALID COMMAND OPERATION CODE.
pub const INVALID_OPCODE: Sense = sense(key::ILLEGAL_REQUEST, 0x2000);
/// LOGICAL BLOCK ADDRESS OUT OF RANGE.
pub const OUT_OF_RANGE: Sense = sense(key::ILLEGAL_REQUEST, 0x2100);
/// INVALID FIELD IN CDB.
pub const INVALID_FIELD: Sense = sense(key::ILLEGAL_REQUEST, 0x2400);
/// LOGICAL UNIT NOT SUPPORTED.
pub const NO_UNIT: Sense = sense(key::ILLEGAL_REQUEST, 0x2500);
/// INVALID FIELD IN PARAMETER LIST.
pub const INVALID_PARAMETER: Sense = sense(key::ILLEGAL_REQUEST, 0x2600);
/// INVALID RELEASE OF PERSISTENT RESERVATION.
pub const INVALID_RELEASE: Sense = sense(key::ILLEGAL_REQUEST, 0x2604);
/// WRITE PROTECTED.
pub const WRITE_PROTECTED: Sense = sense(key::DATA_PROTECT, 0x2700);
/// SPACE ALLOCATION FAILED WRITE PROTECT (SBC-3, 4.7.3.6): no replica has space left.
pub const NO_SPACE: Sense = sense(key::DATA_PROTECT, 0x2707);
/// SAVING PARAMETERS NOT SUPPORTED.
pub const SAVING_UNSUPPORTED: Sense = sense(key::ILLEGAL_REQUEST, 0x3900);
/// INTERNAL TARGET FAILURE.
pub const INTERNAL: Sense = sense(key::HARDWARE_ERROR, 0x4400);
/// INSUFFICIENT REGISTRATION RESOURCES.
pub const NO_REGISTRATIONS: Sense = sense(key::ILLEGAL_REQUEST, 0x5504);

/// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED: the first command of a nexus.
pub const POWER_ON: Sense = sense(key::UNIT_ATTENTION, 0x2900);
/// SCSI BUS RESET OCCURRED: a reset of the whole target.
pub const TARGET_RESET: Sense = sense(key::UNIT_ATTENTION, 0x2902);
/// BUS DEVICE RESET FUNCTION OCCURRED: a reset of the logical unit.
pub const UNIT_RESET: Sense = sense(key::UNIT_ATTENTION, 0x2903);
/// SOME COMMANDS CLEARED BY ISCSI PROTOCOL EVENT: their connection has been replaced.
pub const COMMANDS_CLEARED: Sense = sense(key::UNIT_ATTENTION, 0x477f);
/// MODE PARAMETERS CHANGED.
pub const MODE_CHANGED: Sense = sense(key::UNIT_ATTENTION, 0x2a01);
/// RESERVATIONS PREEMPTED.
pub const RESERVATION_PREEMPTED: Sense = sense(key::UNIT_ATTENTION, 0x2a03);
/// RESERVATIONS RELEASED.
pub const RESERVATION_RELEASED: Sense = sense(key::UNIT_ATTENTION, 0x2a04);
/// REGISTRATIONS PREEMPTED.
pub const REGISTRATION_PREEMPTED: Sense = sense(key::UNIT_ATTENTION, 0x2a05);
/// CAPACITY DATA HAS CHANGED.
pub const CAPACITY_CHANGED: Sense = sense(key::UNIT_ATTENTION, 0x2a09);

impl Sense {
    /// The same, pointing at a byte of the CDB.
    #[must_use]
    pub const fn at_cdb(self, byte: u16) -> Self {
        Self { field: Some(Field::Cdb(byte)), ..self }
    }

    /// The same, pointing at a byte of the parameter data.
    #[must_use]
    pub const fn at_parameter(self, byte: u16) -> Self {
        Self { field: Some(Field::Parameter(byte)), ..self }
    }

    /// The same, with an INFORMATION field.
    #[must_use]
    pub const fn with_information(self, information: u32) -> Self {
        Self { information: Some(information), ..self }
    }

    /// What a device's error is to an initiator; `write`: of a request that was to reach the medium, a flush among them.
    pub const fn of_device(reason: IoError, write: bool) -> Self {
        match reason {
            IoError::OutOfRange => OUT_OF_RANGE,
            IoError::Invalid => INVALID_FIELD,
            IoError::NoSpace => NO_SPACE,
            IoError::ReadOnly => WRITE_PROTECTED,
            IoError::TimedOut => TIMED_OUT,
            IoError::NotSupported => INTERNAL,
            IoError::Io if write => WRITE_ERROR,
            IoError::Io => READ_ERROR,
            IoError::ShuttingDown => STOPPING,
        }
    }

    /// The bytes that an initiator gets.
    pub fn encode(&self) -> [u8; SENSE_LEN] {
        let mut bytes = [0; SENSE_LEN];
        bytes[0] = CURRENT_FIXED;
        bytes[2] = self.key;
        if let Some(information) = self.information {
            bytes[0] |= VALID;
            bytes[3..7].copy_from_slice(&information.to_be_bytes());
        }
        // ADDITIONAL SENSE LENGTH counts what follows it.
        bytes[7] = 10;
        bytes[12..14].copy_from_slice(&self.code.to_be_bytes());
        if let Some(field) = self.field {
            let (flags, at) = match field {
                Field::Cdb(at) => (FIELD_POINTER | FIELD_IN_CDB, at),
                Field::Parameter(at) => (FIELD_POINTER, at),
            };
            bytes[15] = flags;
            bytes[16..18].copy_from_slice(&at.to_be_bytes());
        }
        bytes
    }
}

impl std::fmt::Display for Sense {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sense {:x}/{:02x}/{:02x}", self.key, self.code >> 8, self.code & 0xff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let sense = INVALID_FIELD.at_cdb(2);
        let bytes = [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0xc0, 0, 2];
        assert_eq!(sense.encode(), bytes);
        let sense = MISCOMPARED.with_information(513);
        let bytes = [0xf0, 0, 0xe, 0, 0, 2, 1, 10, 0, 0, 0, 0, 0x1d, 0, 0, 0, 0, 0];
        assert_eq!(sense.encode(), bytes);
        assert_eq!(INVALID_PARAMETER.at_parameter(9).encode()[15..], [0x80, 0, 9]);
    }

    #[test]
    fn every_error_of_a_device_has_its_sense() {
        assert_eq!(Sense::of_device(IoError::Io, true), WRITE_ERROR);
        assert_eq!(Sense::of_device(IoError::Io, false), READ_ERROR);
        assert_eq!(Sense::of_device(IoError::NoSpace, true).to_string(), "sense 7/27/07");
        assert_eq!(Sense::of_device(IoError::OutOfRange, false), OUT_OF_RANGE);
        assert_eq!(Sense::of_device(IoError::ShuttingDown, false), STOPPING);
    }
}
