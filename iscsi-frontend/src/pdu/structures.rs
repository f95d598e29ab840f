//! The headers, field by field.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::HEADER;

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
        /// Operation code, and [`super::IMMEDIATE`].
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
        /// [`super::opcode::SCSI_COMMAND`].
        opcode: u8,
        /// [`super::FINAL`], [`super::flag::READ`], [`super::flag::WRITE`], attribute.
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
        /// [`super::opcode::SCSI_RESPONSE`].
        opcode: u8,
        /// [`super::FINAL`], [`super::flag::OVERFLOW`], [`super::flag::UNDERFLOW`].
        flags: u8,
        /// 0: the command was completed at the target.
        response: u8,
        /// One of [`super::status`].
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
        /// [`super::opcode::TASK_REQUEST`].
        opcode: u8,
        /// [`super::FINAL`] and one of [`super::function`].
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
        /// [`super::FINAL`].
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
        /// Initiator task tag; [`super::NO_TAG`] in a Reject.
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
        /// [`super::opcode::DATA_OUT`].
        opcode: u8,
        /// [`super::FINAL`]: the last of its sequence.
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
        /// Target transfer tag of the R2T; [`super::NO_TAG`] for unsolicited data.
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
        /// [`super::opcode::DATA_IN`].
        opcode: u8,
        /// [`super::FINAL`], [`super::flag::OVERFLOW`], [`super::flag::UNDERFLOW`], [`super::flag::STATUS`].
        flags: u8,
        /// Reserved.
        reserved: u8,
        /// With [`super::flag::STATUS`]: one of [`super::status`].
        status: u8,
        /// As in [`Basic`].
        ahs: u8,
        /// As in [`Basic`].
        data: [u8; 3],
        /// Logical unit number.
        lun: U64,
        /// Initiator task tag.
        itt: U32,
        /// [`super::NO_TAG`]: no acknowledgement is asked for.
        ttt: U32,
        /// With [`super::flag::STATUS`]: status sequence number.
        stat_sn: U32,
        /// As in [`ScsiResponse`].
        exp_cmd_sn: U32,
        /// As in [`ScsiResponse`].
        max_cmd_sn: U32,
        /// Number of the PDU among the command's.
        data_sn: U32,
        /// Where the bytes belong.
        offset: U32,
        /// With [`super::flag::STATUS`]: bytes of overflow or underflow.
        residual: U32,
    }
}

declare! {
    /// Ready To Transfer (11.8).
    R2t {
        /// [`super::opcode::R2T`].
        opcode: u8,
        /// [`super::FINAL`].
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
        /// [`super::opcode::ASYNC`].
        opcode: u8,
        /// [`super::FINAL`].
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
        /// [`super::FINAL`], [`super::flag::CONTINUE`].
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
        /// [`super::FINAL`].
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
        /// [`super::opcode::LOGIN_REQUEST`] with [`super::IMMEDIATE`].
        opcode: u8,
        /// [`super::flag::TRANSIT`], [`super::flag::CONTINUE`], current stage (bits 3 and 2), next stage (bits 1 and 0).
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
        /// [`super::opcode::LOGIN_RESPONSE`].
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
        /// One of [`super::login_status`].
        status: U16,
        /// Reserved.
        reserved2: [u8; 10],
    }
}

declare! {
    /// Logout Request (11.14).
    LogoutRequest {
        /// [`super::opcode::LOGOUT_REQUEST`].
        opcode: u8,
        /// [`super::FINAL`] and the reason: 0 the session, 1 the connection, 2 for recovery.
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
