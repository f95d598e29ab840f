//! The protocol's structures (RFC 7143, chapter 11), each declared once. Big-endian.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a basic header segment (11.2).
pub const HEADER: usize = 48;

/// Bytes of a digest (13.1).
pub const DIGEST: usize = 4;

/// Most bytes of additional header segments: their length is a byte of 4-byte words (11.2.1.5).
pub const AHS_MAX: usize = 255 * 4;

/// A task tag that stands for none (11.2.1.8, 11.3.2).
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
}

/// Flags of SCSI commands and of responses to them (11.3.1, 11.4.1, 11.7.1).
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
    /// Login, text: the text goes on in the next PDU (11.10.2, 11.12.3).
    pub const CONTINUE: u8 = 0x40;
    /// Login: on to the next stage (11.12.2).
    pub const TRANSIT: u8 = 0x80;
}

/// Task attributes (11.3.1).
pub mod attribute {
    /// After everything before it, before everything after it.
    pub const ORDERED: u8 = 2;
}

macro_rules! declare {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == HEADER);
    };
}

declare! {
    /// What all PDUs share (11.2.1).
    Basic {
        /// Operation code, and [`IMMEDIATE`].
        opcode: u8,
        /// Of each operation its own.
        flags: u8,
        /// Of each operation its own.
        own: [u8; 2],
        /// Length of additional header segments, in words of 4 bytes.
        ahs: u8,
        /// Length of the data segment without padding, 24 bits.
        data: [u8; 3],
        /// Logical unit number, or of each operation its own.
        lun: U64,
        /// Initiator task tag.
        itt: U32,
        /// Of each operation its own.
        rest: [u8; 28],
    }
}

declare! {
    /// SCSI Command (11.3).
    ScsiCommand {
        /// [`opcode::SCSI_COMMAND`].
        opcode: u8,
        /// [`FINAL`], [`flag::READ`], [`flag::WRITE`], attribute.
        flags: u8,
        /// Reserved.
        reserved: [u8; 2],
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Logical unit number.
        lun: U64,
        /// Initiator task tag.
        itt: U32,
        /// Expected data transfer length.
        expected: U32,
        /// Command sequence number.
        cmd_sn: U32,
        /// The status that the initiator expects next.
        exp_stat_sn: U32,
        /// Command descriptor block.
        cdb: [u8; 16],
    }
}

declare! {
    /// SCSI Response (11.4).
    ScsiResponse {
        /// [`opcode::SCSI_RESPONSE`].
        opcode: u8,
        /// [`FINAL`], [`flag::OVERFLOW`], [`flag::UNDERFLOW`].
        flags: u8,
        /// 0: the command was completed at the target.
        response: u8,
        /// One of [`status`].
        status: u8,
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Reserved.
        reserved: U64,
        /// Initiator task tag.
        itt: U32,
        /// SNACK tag.
        snack: U32,
        /// Status sequence number.
        stat_sn: U32,
        /// Next command sequence number that is expected.
        exp_cmd_sn: U32,
        /// Last command sequence number that is taken.
        max_cmd_sn: U32,
        /// Number of Data-In and R2T PDUs that were sent for the command.
        exp_data_sn: U32,
        /// Of bidirectional commands.
        bidi_residual: U32,
        /// Bytes of overflow or underflow.
        residual: U32,
    }
}

declare! {
    /// Task Management Function Request (11.5).
    TaskRequest {
        /// [`opcode::TASK_REQUEST`].
        opcode: u8,
        /// [`FINAL`] and one of [`function`].
        function: u8,
        /// Reserved.
        reserved: [u8; 2],
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Logical unit number.
        lun: U64,
        /// Initiator task tag.
        itt: U32,
        /// Tag of the task meant.
        referenced: U32,
        /// Command sequence number.
        cmd_sn: U32,
        /// As in [`ScsiCommand`].
        exp_stat_sn: U32,
        /// Sequence number of the command meant.
        ref_cmd_sn: U32,
        /// Of TASK REASSIGN.
        exp_data_sn: U32,
        /// Reserved.
        reserved2: U64,
    }
}

declare! {
    /// Task Management Function Response (11.6), Logout Response (11.15) and Reject (11.17): what they share.
    Answer {
        /// Operation code.
        opcode: u8,
        /// [`FINAL`].
        flags: u8,
        /// Response or reason.
        response: u8,
        /// Reserved.
        reserved: u8,
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Reserved.
        reserved2: U64,
        /// Initiator task tag; [`NO_TAG`] in a Reject.
        itt: U32,
        /// Reserved.
        reserved3: U32,
        /// Status sequence number.
        stat_sn: U32,
        /// As in [`ScsiResponse`].
        exp_cmd_sn: U32,
        /// As in [`ScsiResponse`].
        max_cmd_sn: U32,
        /// Reserved. Of a Reject: the data sequence number, where one matters.
        reserved4: U32,
        /// Logout: seconds to wait before a new login (Time2Wait).
        time2wait: U16,
        /// Logout: seconds that tasks are kept (Time2Retain).
        time2retain: U16,
        /// Reserved.
        reserved5: U32,
    }
}

declare! {
    /// Data-Out (11.7).
    DataOut {
        /// [`opcode::DATA_OUT`].
        opcode: u8,
        /// [`FINAL`]: the last of its sequence.
        flags: u8,
        /// Reserved.
        reserved: [u8; 2],
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Logical unit number.
        lun: U64,
        /// Initiator task tag.
        itt: U32,
        /// Target transfer tag of the R2T; [`NO_TAG`] for unsolicited data.
        ttt: U32,
        /// Reserved.
        reserved2: U32,
        /// As in [`ScsiCommand`].
        exp_stat_sn: U32,
        /// Reserved.
        reserved3: U32,
        /// Number of the PDU in its sequence.
        data_sn: U32,
        /// Where the bytes belong, counted from the command's first.
        offset: U32,
        /// Reserved.
        reserved4: U32,
    }
}

declare! {
    /// Data-In (11.7).
    DataIn {
        /// [`opcode::DATA_IN`].
        opcode: u8,
        /// [`FINAL`], [`flag::OVERFLOW`], [`flag::UNDERFLOW`], [`flag::STATUS`].
        flags: u8,
        /// Reserved.
        reserved: u8,
        /// With [`flag::STATUS`]: one of [`status`].
        status: u8,
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Logical unit number.
        lun: U64,
        /// Initiator task tag.
        itt: U32,
        /// [`NO_TAG`]: no acknowledgement is asked for.
        ttt: U32,
        /// With [`flag::STATUS`]: status sequence number.
        stat_sn: U32,
        /// As in [`ScsiResponse`].
        exp_cmd_sn: U32,
        /// As in [`ScsiResponse`].
        max_cmd_sn: U32,
        /// Number of the PDU among the command's.
        data_sn: U32,
        /// Where the bytes belong.
        offset: U32,
        /// With [`flag::STATUS`]: bytes of overflow or underflow.
        residual: U32,
    }
}

declare! {
    /// Ready To Transfer (11.8).
    R2t {
        /// [`opcode::R2T`].
        opcode: u8,
        /// [`FINAL`].
        flags: u8,
        /// Reserved.
        reserved: [u8; 2],
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Logical unit number.
        lun: U64,
        /// Initiator task tag.
        itt: U32,
        /// Target transfer tag.
        ttt: U32,
        /// The next status sequence number.
        stat_sn: U32,
        /// As in [`ScsiResponse`].
        exp_cmd_sn: U32,
        /// As in [`ScsiResponse`].
        max_cmd_sn: U32,
        /// Number of the R2T among the command's.
        r2t_sn: U32,
        /// First byte wanted.
        offset: U32,
        /// How many.
        length: U32,
    }
}

declare! {
    /// Asynchronous Message (11.9).
    Async {
        /// [`opcode::ASYNC`].
        opcode: u8,
        /// [`FINAL`].
        flags: u8,
        /// Reserved.
        reserved: [u8; 2],
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Of SCSI events.
        lun: U64,
        /// All ones.
        itt: U32,
        /// Reserved.
        reserved2: U32,
        /// Status sequence number.
        stat_sn: U32,
        /// As in [`ScsiResponse`].
        exp_cmd_sn: U32,
        /// As in [`ScsiResponse`].
        max_cmd_sn: U32,
        /// 1: the target asks for a logout.
        event: u8,
        /// Vendor's.
        code: u8,
        /// Of each event its own.
        parameter1: U16,
        /// Of each event its own.
        parameter2: U16,
        /// For event 1: seconds until the connection ends without one.
        parameter3: U16,
        /// Reserved.
        reserved3: U32,
    }
}

declare! {
    /// Text Request (11.10), NOP-Out (11.18): what they share.
    TextRequest {
        /// Operation code.
        opcode: u8,
        /// [`FINAL`], [`flag::CONTINUE`].
        flags: u8,
        /// Reserved.
        reserved: [u8; 2],
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Logical unit number.
        lun: U64,
        /// Initiator task tag.
        itt: U32,
        /// Target transfer tag.
        ttt: U32,
        /// Command sequence number.
        cmd_sn: U32,
        /// As in [`ScsiCommand`].
        exp_stat_sn: U32,
        /// Reserved.
        reserved2: [u8; 16],
    }
}

declare! {
    /// Text Response (11.11), NOP-In (11.19): what they share.
    TextResponse {
        /// Operation code.
        opcode: u8,
        /// [`FINAL`].
        flags: u8,
        /// Reserved.
        reserved: [u8; 2],
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Logical unit number.
        lun: U64,
        /// Initiator task tag.
        itt: U32,
        /// Target transfer tag.
        ttt: U32,
        /// Status sequence number.
        stat_sn: U32,
        /// As in [`ScsiResponse`].
        exp_cmd_sn: U32,
        /// As in [`ScsiResponse`].
        max_cmd_sn: U32,
        /// Reserved.
        reserved2: [u8; 12],
    }
}

declare! {
    /// Login Request (11.12).
    LoginRequest {
        /// [`opcode::LOGIN_REQUEST`] with [`IMMEDIATE`].
        opcode: u8,
        /// [`flag::TRANSIT`], [`flag::CONTINUE`], current stage (bits 3 and 2), next stage (bits 1 and 0).
        flags: u8,
        /// Highest version.
        version_max: u8,
        /// Lowest version.
        version_min: u8,
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Initiator's part of the session's name.
        isid: [u8; 6],
        /// The target's handle of the session; 0 for a new one.
        tsih: U16,
        /// Initiator task tag.
        itt: U32,
        /// Connection's number.
        cid: U16,
        /// Reserved.
        reserved: U16,
        /// Command sequence number.
        cmd_sn: U32,
        /// As in [`ScsiCommand`].
        exp_stat_sn: U32,
        /// Reserved.
        reserved2: [u8; 16],
    }
}

declare! {
    /// Login Response (11.13).
    LoginResponse {
        /// [`opcode::LOGIN_RESPONSE`].
        opcode: u8,
        /// As in [`LoginRequest`].
        flags: u8,
        /// Highest version.
        version_max: u8,
        /// The version spoken.
        version_active: u8,
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// As in [`LoginRequest`].
        isid: [u8; 6],
        /// As in [`LoginRequest`].
        tsih: U16,
        /// Initiator task tag.
        itt: U32,
        /// Reserved.
        reserved: U32,
        /// Status sequence number.
        stat_sn: U32,
        /// As in [`ScsiResponse`].
        exp_cmd_sn: U32,
        /// As in [`ScsiResponse`].
        max_cmd_sn: U32,
        /// One of [`login_status`].
        status: U16,
        /// Reserved.
        reserved2: [u8; 10],
    }
}

declare! {
    /// Logout Request (11.14).
    LogoutRequest {
        /// [`opcode::LOGOUT_REQUEST`].
        opcode: u8,
        /// [`FINAL`] and the reason: 0 the session, 1 the connection, 2 for recovery.
        reason: u8,
        /// Reserved.
        reserved: [u8; 2],
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Reserved.
        reserved2: U64,
        /// Initiator task tag.
        itt: U32,
        /// Connection's number.
        cid: U16,
        /// Reserved.
        reserved3: U16,
        /// Command sequence number.
        cmd_sn: U32,
        /// As in [`ScsiCommand`].
        exp_stat_sn: U32,
        /// Reserved.
        reserved4: [u8; 16],
    }
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

/// Bytes that fill a segment up to a multiple of 4 (11.2.3).
pub(crate) const fn padding(len: usize) -> usize {
    len.wrapping_neg() % 4
}

#[cfg(test)]
mod tests {
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
