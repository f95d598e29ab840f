//! The protocol's structures (RFC 7143, chapter 11), each declared once. Big-endian.

mod structures;

pub use structures::{
    Answer, Async, Basic, DataIn, DataOut, LoginRequest, LoginResponse, LogoutRequest, R2t, ScsiCommand,
    ScsiResponse, TaskRequest, TextRequest, TextResponse,
};

/// Bytes of a basic header segment (11.2).
pub const HEADER: usize = 48;

/// Bytes of a digest (11.2.3).
pub const DIGEST: usize = 4;

/// Most bytes of additional header segments: their length is a byte of 4-byte words (11.2.1.5).
pub const AHS_MAX: usize = 255 * 4;

/// A tag that stands for none: of a task (11.2.1.8), of a transfer (11.7.4).
pub const NO_TAG: u32 = 0xffff_ffff;

/// Immediate delivery, in the first byte (11.2.1.1).
pub const IMMEDIATE: u8 = 0x40;

/// The final bit (11.2.1.3).
pub const FINAL: u8 = 0x80;

/// Operation codes (11.2.1.2).
pub mod opcode {
    #![expect(missing_docs, reason = "the names are the RFC's")]
    pub const NOP_OUT: u8 = 0x00;
    pub const SCSI_COMMAND: u8 = 0x01;
    pub const TASK_REQUEST: u8 = 0x02;
    pub const LOGIN_REQUEST: u8 = 0x03;
    pub const TEXT_REQUEST: u8 = 0x04;
    pub const DATA_OUT: u8 = 0x05;
    pub const LOGOUT_REQUEST: u8 = 0x06;
    pub const SNACK: u8 = 0x10;
    pub const NOP_IN: u8 = 0x20;
    pub const SCSI_RESPONSE: u8 = 0x21;
    pub const TASK_RESPONSE: u8 = 0x22;
    pub const LOGIN_RESPONSE: u8 = 0x23;
    pub const TEXT_RESPONSE: u8 = 0x24;
    pub const DATA_IN: u8 = 0x25;
    pub const LOGOUT_RESPONSE: u8 = 0x26;
    pub const R2T: u8 = 0x31;
    pub const ASYNC: u8 = 0x32;
    pub const REJECT: u8 = 0x3f;
}

/// Reasons of a Reject (11.17.1).
pub mod reject {
    #![expect(missing_docs, reason = "the names are the RFC's")]
    pub const DATA_DIGEST: u8 = 0x02;
    pub const SNACK: u8 = 0x03;
    pub const PROTOCOL_ERROR: u8 = 0x04;
    pub const NOT_SUPPORTED: u8 = 0x05;
    pub const TOO_MANY_IMMEDIATE: u8 = 0x06;
    pub const TASK_IN_PROGRESS: u8 = 0x07;
    pub const INVALID_FIELD: u8 = 0x09;
}

/// Status class and detail of a Login Response (11.13.5).
pub mod login_status {
    #![expect(missing_docs, reason = "the names are the RFC's")]
    pub const SUCCESS: u16 = 0x0000;
    pub const INITIATOR_ERROR: u16 = 0x0200;
    pub const AUTHENTICATION_FAILURE: u16 = 0x0201;
    pub const NOT_FOUND: u16 = 0x0203;
    pub const UNSUPPORTED_VERSION: u16 = 0x0205;
    pub const TOO_MANY_CONNECTIONS: u16 = 0x0206;
    pub const MISSING_PARAMETER: u16 = 0x0207;
    pub const CANNOT_INCLUDE: u16 = 0x0208;
    pub const SESSION_TYPE: u16 = 0x0209;
    pub const NO_SESSION: u16 = 0x020a;
    pub const INVALID_DURING_LOGIN: u16 = 0x020b;
    pub const UNAVAILABLE: u16 = 0x0301;
    pub const OUT_OF_RESOURCES: u16 = 0x0302;
}

/// Functions of a Task Management Function Request (11.5.1).
pub mod function {
    #![expect(missing_docs, reason = "the names are the RFC's")]
    pub const ABORT_TASK: u8 = 1;
    pub const ABORT_TASK_SET: u8 = 2;
    pub const CLEAR_ACA: u8 = 3;
    pub const CLEAR_TASK_SET: u8 = 4;
    pub const LOGICAL_UNIT_RESET: u8 = 5;
    pub const TARGET_WARM_RESET: u8 = 6;
    pub const TARGET_COLD_RESET: u8 = 7;
    pub const TASK_REASSIGN: u8 = 8;
}

/// Responses to it (11.6.1).
pub mod function_response {
    #![expect(missing_docs, reason = "the names are the RFC's")]
    pub const COMPLETE: u8 = 0;
    pub const NO_TASK: u8 = 1;
    pub const NO_UNIT: u8 = 2;
    pub const NO_REASSIGN: u8 = 4;
    pub const NOT_SUPPORTED: u8 = 5;
    pub const REJECTED: u8 = 255;
}

/// Status of a SCSI Response (11.4.2).
pub mod status {
    #![expect(missing_docs, reason = "the names are SAM's")]
    pub const GOOD: u8 = 0x00;
    pub const CHECK_CONDITION: u8 = 0x02;
    pub const BUSY: u8 = 0x08;
    pub const RESERVATION_CONFLICT: u8 = 0x18;
    pub const TASK_ABORTED: u8 = 0x40;
}

/// Flags of SCSI commands and of responses to them (11.3.1, 11.4.1, 11.7.3).
pub mod flag {
    /// Data goes to the initiator.
    pub const READ: u8 = 0x40;
    /// Data comes from the initiator.
    pub const WRITE: u8 = 0x20;
    /// More would have been transferred than was expected.
    pub const OVERFLOW: u8 = 0x04;
    /// Less was transferred than was expected.
    pub const UNDERFLOW: u8 = 0x02;
    /// A Data-In that carries the status.
    pub const STATUS: u8 = 0x01;
    /// Login, text: the text goes on in the next PDU (11.10.2, 11.12.2).
    pub const CONTINUE: u8 = 0x40;
    /// Login: on to the next stage (11.12.1).
    pub const TRANSIT: u8 = 0x80;
}

/// Task attributes (11.3.1).
pub mod attribute {
    /// After everything before it, before everything after it.
    pub const ORDERED: u8 = 2;
}

/// A header as it came.
pub type Raw = [u8; HEADER];

impl Basic {
    /// The header's common part.
    pub fn of(raw: &Raw) -> Self {
        zerocopy::transmute!(*raw)
    }

    /// The operation code alone.
    pub fn code(&self) -> u8 {
        self.opcode & 0x3f
    }

    /// Not counted in the order of commands, and delivered at once.
    pub fn is_immediate(&self) -> bool {
        self.opcode & IMMEDIATE != 0
    }

    /// Bytes of additional header segments.
    pub fn ahs_len(&self) -> usize {
        usize::from(self.ahs) * 4
    }

    /// Bytes of the data segment without padding.
    pub fn data_len(&self) -> usize {
        let [a, b, c] = self.data;
        usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c)
    }
}

/// A data segment's length for a header.
///
/// # Panics
/// Beyond 24 bits, which no segment here reaches.
pub(crate) fn length24(len: usize) -> [u8; 3] {
    let [zero, rest @ ..] = u32::try_from(len).expect("a segment is shorter than 16 MiB").to_be_bytes();
    assert_eq!(zero, 0, "a segment is shorter than 16 MiB");
    rest
}

/// Bytes that fill a segment up to a multiple of 4 (11.1).
pub(crate) const fn padding(len: usize) -> usize {
    len.wrapping_neg() % 4
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    /// A READ (10) of one block as an initiator sends it, field by field.
    #[test]
    fn golden_command() {
        let mut raw = [0; HEADER];
        raw[..2].copy_from_slice(&[0x01, 0xc1]);
        raw[9] = 1;
        raw[16..20].copy_from_slice(&[0, 0, 0, 7]);
        raw[20..24].copy_from_slice(&512_u32.to_be_bytes());
        raw[24..28].copy_from_slice(&9_u32.to_be_bytes());
        raw[28..32].copy_from_slice(&3_u32.to_be_bytes());
        raw[32..42].copy_from_slice(&[0x28, 0, 0, 0, 0, 5, 0, 0, 1, 0]);
        let command: ScsiCommand = zerocopy::transmute!(raw);
        assert_eq!((command.itt.get(), command.expected.get(), command.cmd_sn.get()), (7, 512, 9));
        assert_eq!((command.lun.get(), command.exp_stat_sn.get(), command.cdb[5]), (1 << 48, 3, 5));
        assert_eq!(command.as_bytes(), raw);
    }

    #[test]
    fn golden_answers() {
        let data_in = DataIn {
            opcode: opcode::DATA_IN,
            flags: FINAL | flag::STATUS,
            data: length24(0x01_02_03),
            data_sn: 1.into(),
            offset: 2.into(),
            residual: 3.into(),
            ..DataIn::default()
        };
        let bytes = data_in.as_bytes();
        assert_eq!(bytes[..8], [0x25, 0x81, 0, 0, 0, 1, 2, 3]);
        assert_eq!(bytes[36..], [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3]);
        let r2t =
            R2t { ttt: 5.into(), r2t_sn: 6.into(), offset: 7.into(), length: 8.into(), ..R2t::default() };
        assert_eq!(
            (r2t.as_bytes()[23], r2t.as_bytes()[39], r2t.as_bytes()[43], r2t.as_bytes()[47]),
            (5, 6, 7, 8)
        );
        let response =
            ScsiResponse { status: 2, stat_sn: 1.into(), residual: 9.into(), ..ScsiResponse::default() };
        assert_eq!((response.as_bytes()[3], response.as_bytes()[27], response.as_bytes()[47]), (2, 1, 9));
        let login = LoginResponse { status: 0x0201.into(), ..LoginResponse::default() };
        assert_eq!(login.as_bytes()[36..38], [2, 1]);
        let message = Async { event: 1, parameter3: 10.into(), ..Async::default() };
        assert_eq!((message.as_bytes()[36], message.as_bytes()[43]), (1, 10));
        let logout = Answer { time2wait: 2.into(), time2retain: 3.into(), ..Answer::default() };
        assert_eq!((logout.as_bytes()[41], logout.as_bytes()[43]), (2, 3));
    }

    #[test]
    fn lengths() {
        let basic = Basic { opcode: 0x43, ahs: 2, data: length24(70_000), ..Basic::default() };
        assert_eq!((basic.code(), basic.is_immediate()), (opcode::LOGIN_REQUEST, true));
        assert_eq!((basic.ahs_len(), basic.data_len()), (8, 70_000));
        assert_eq!([0, 1, 2, 3, 4].map(padding), [0, 3, 2, 1, 0]);
    }
}
