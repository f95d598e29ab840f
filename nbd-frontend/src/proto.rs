//! The NBD protocol's structures and constants, each declared once.
//!
//! Section names in the comments are those of the protocol document (`doc/proto.md` of the NBD project). Everything
//! on the wire is big-endian and without padding; the sizes are asserted here and the bytes pinned in the tests.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The registered port ("Newstyle negotiation").
pub const DEFAULT_PORT: u16 = 10809;

/// `NBDMAGIC`: first eight bytes of a server ("Newstyle negotiation").
pub const MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");

/// `IHAVEOPT`: marks the newstyle greeting and every option ("Newstyle negotiation").
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");

/// Marks a reply to an option ("Fixed newstyle negotiation").
pub const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Marks a compact request ("Request message").
pub const REQUEST_MAGIC: u32 = 0x2560_9513;

/// Marks an extended request ("Request message").
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;

/// Marks a simple reply ("Simple reply message").
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

/// Marks a structured reply chunk ("Structured reply chunk message").
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Marks an extended reply chunk ("Extended reply chunk message").
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Longest string of the protocol: names, queries, error texts ("Conventions").
pub const STRING_MAX: usize = 4096;

/// Zeroes behind the answer to `NBD_OPT_EXPORT_NAME`, unless both sides agreed to do without
/// ("Newstyle negotiation").
pub const EXPORT_NAME_ZEROES: usize = 124;

/// The only metadata context served ("`base:allocation` metadata context").
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Our id for it: any number, opaque to the client ("`NBD_OPT_SET_META_CONTEXT`").
pub const BASE_ALLOCATION_ID: u32 = 1;

/// Sent by the server after its magics ("Handshake flags").
pub mod handshake_flag {
    /// The server speaks fixed newstyle.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// The server can leave out the 124 zeroes.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// The client's answer to the greeting ("Client flags").
pub mod client_flag {
    /// The client speaks fixed newstyle.
    pub const FIXED_NEWSTYLE: u32 = 1;
    /// The client wants no 124 zeroes.
    pub const NO_ZEROES: u32 = 1 << 1;
    /// All that exist. Any other ends the connection.
    pub const ALL: u32 = FIXED_NEWSTYLE | NO_ZEROES;
}

/// What an export can do ("Transmission flags").
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `NBD_CMD_FLUSH` is served.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `NBD_CMD_FLAG_FUA` is served.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `NBD_CMD_TRIM` is served.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `NBD_CMD_WRITE_ZEROES` is served.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `NBD_CMD_FLAG_DF` is served; only with structured or extended replies.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers the writes answered on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `NBD_CMD_CACHE` is served.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `NBD_CMD_FLAG_FAST_ZERO` is served.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// `NBD_CMD_BLOCK_STATUS` takes a list of contexts; only with extended headers.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Options of the handshake ("Option types").
pub mod option {
    /// `NBD_OPT_EXPORT_NAME`: choose and go on, the old way.
    pub const EXPORT_NAME: u32 = 1;
    /// `NBD_OPT_ABORT`: end of the session.
    pub const ABORT: u32 = 2;
    /// `NBD_OPT_LIST`: names of the exports.
    pub const LIST: u32 = 3;
    /// `NBD_OPT_STARTTLS`.
    pub const STARTTLS: u32 = 5;
    /// `NBD_OPT_INFO`: facts about an export.
    pub const INFO: u32 = 6;
    /// `NBD_OPT_GO`: facts, then transmission.
    pub const GO: u32 = 7;
    /// `NBD_OPT_STRUCTURED_REPLY`.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// `NBD_OPT_LIST_META_CONTEXT`.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// `NBD_OPT_SET_META_CONTEXT`.
    pub const SET_META_CONTEXT: u32 = 10;
    /// `NBD_OPT_EXTENDED_HEADERS`.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Kinds of replies to options ("Option reply types").
pub mod reply {
    /// `NBD_REP_ACK`: done.
    pub const ACK: u32 = 1;
    /// `NBD_REP_SERVER`: an export's name.
    pub const SERVER: u32 = 2;
    /// `NBD_REP_INFO`: a fact about an export.
    pub const INFO: u32 = 3;
    /// `NBD_REP_META_CONTEXT`: a metadata context.
    pub const META_CONTEXT: u32 = 4;
    const ERROR: u32 = 1 << 31;
    /// `NBD_REP_ERR_UNSUP`: option unknown here.
    pub const ERR_UNSUP: u32 = ERROR + 1;
    /// `NBD_REP_ERR_POLICY`: option known and forbidden.
    pub const ERR_POLICY: u32 = ERROR + 2;
    /// `NBD_REP_ERR_INVALID`: option known and malformed.
    pub const ERR_INVALID: u32 = ERROR + 3;
    /// `NBD_REP_ERR_UNKNOWN`: no such export.
    pub const ERR_UNKNOWN: u32 = ERROR + 6;
    /// `NBD_REP_ERR_SHUTDOWN`: the server is being stopped.
    pub const ERR_SHUTDOWN: u32 = ERROR + 7;
    /// `NBD_REP_ERR_TOO_BIG`: more data than is taken.
    pub const ERR_TOO_BIG: u32 = ERROR + 9;
    /// `NBD_REP_ERR_EXT_HEADER_REQD`: extended headers are on and stay on.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR + 10;
}

/// Facts in `NBD_REP_INFO` ("`NBD_REP_INFO`").
pub mod info {
    /// `NBD_INFO_EXPORT`: size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// `NBD_INFO_NAME`: the canonical name.
    pub const NAME: u16 = 1;
    /// `NBD_INFO_DESCRIPTION`: words for people.
    pub const DESCRIPTION: u16 = 2;
    /// `NBD_INFO_BLOCK_SIZE`: smallest, preferred and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Commands ("Request types").
pub mod command {
    /// `NBD_CMD_READ`.
    pub const READ: u16 = 0;
    /// `NBD_CMD_WRITE`.
    pub const WRITE: u16 = 1;
    /// `NBD_CMD_DISC`.
    pub const DISC: u16 = 2;
    /// `NBD_CMD_FLUSH`.
    pub const FLUSH: u16 = 3;
    /// `NBD_CMD_TRIM`.
    pub const TRIM: u16 = 4;
    /// `NBD_CMD_CACHE`.
    pub const CACHE: u16 = 5;
    /// `NBD_CMD_WRITE_ZEROES`.
    pub const WRITE_ZEROES: u16 = 6;
    /// `NBD_CMD_BLOCK_STATUS`.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request ("Command flags").
pub mod command_flag {
    /// On stable storage before the answer. Taken with every command.
    pub const FUA: u16 = 1;
    /// Write zeroes: allocate them.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Read: one content chunk at most.
    pub const DF: u16 = 1 << 2;
    /// Block status: one extent per context.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Write zeroes: fail rather than be slow.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// Extended headers: `length` counts bytes behind the header.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Kinds of reply chunks ("Structured reply types").
pub mod chunk {
    /// `NBD_REPLY_TYPE_NONE`.
    pub const NONE: u16 = 0;
    /// `NBD_REPLY_TYPE_OFFSET_DATA`.
    pub const OFFSET_DATA: u16 = 1;
    /// `NBD_REPLY_TYPE_BLOCK_STATUS`.
    pub const BLOCK_STATUS: u16 = 5;
    /// `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// `NBD_REPLY_TYPE_ERROR`.
    pub const ERROR: u16 = (1 << 15) + 1;
    /// `NBD_REPLY_TYPE_ERROR_OFFSET`.
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
}

/// `NBD_REPLY_FLAG_DONE`: last chunk of a reply ("Structured and extended header reply flags").
pub const REPLY_FLAG_DONE: u16 = 1;

/// Status flags of `base:allocation`.
pub mod state {
    /// `NBD_STATE_HOLE`: not allocated.
    pub const HOLE: u32 = 1;
    /// `NBD_STATE_ZERO`: reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// Errors of a transmission reply ("Error values").
pub mod error {
    /// `NBD_EPERM`: the export is read-only.
    pub const EPERM: u32 = 1;
    /// `NBD_EIO`.
    pub const EIO: u32 = 5;
    /// `NBD_EINVAL`.
    pub const EINVAL: u32 = 22;
    /// `NBD_ENOSPC`.
    pub const ENOSPC: u32 = 28;
    /// `NBD_EOVERFLOW`: only for reads that must not be answered in several chunks.
    pub const EOVERFLOW: u32 = 75;
    /// `NBD_ENOTSUP`: only for fast zeroes.
    pub const ENOTSUP: u32 = 95;
    /// `NBD_ESHUTDOWN`.
    pub const ESHUTDOWN: u32 = 108;
}

/// Declares structures as they lie on the wire, and their sizes.
macro_rules! wire {
    ($($(#[$meta:meta])* $name:ident = $size:literal { $($(#[$fmeta:meta])* $field:ident: $ty:ty,)* })*) => {$(
        $(#[$meta])*
        #[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(C)]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

wire! {
    /// The server's first words ("Newstyle negotiation").
    Greeting = 18 {
        /// [`MAGIC`].
        magic: U64,
        /// [`OPTION_MAGIC`].
        option_magic: U64,
        /// Bits of [`handshake_flag`].
        flags: U16,
    }

    /// Head of an option ("Newstyle negotiation").
    OptionHeader = 16 {
        /// [`OPTION_MAGIC`].
        magic: U64,
        /// One of [`option`].
        option: U32,
        /// Bytes of data that follow.
        length: U32,
    }

    /// Head of a reply to an option ("Fixed newstyle negotiation").
    OptionReply = 20 {
        /// [`REPLY_MAGIC`].
        magic: U64,
        /// The option that this answers.
        option: U32,
        /// One of [`reply`].
        kind: U32,
        /// Bytes of data that follow.
        length: U32,
    }

    /// Answer to `NBD_OPT_EXPORT_NAME` ("Newstyle negotiation").
    ExportReply = 10 {
        /// Bytes of the export.
        size: U64,
        /// Bits of [`transmission_flag`].
        flags: U16,
    }

    /// `NBD_INFO_EXPORT`.
    InfoExport = 12 {
        /// [`info::EXPORT`].
        kind: U16,
        /// Bytes of the export.
        size: U64,
        /// Bits of [`transmission_flag`].
        flags: U16,
    }

    /// `NBD_INFO_BLOCK_SIZE`.
    InfoBlockSize = 14 {
        /// [`info::BLOCK_SIZE`].
        kind: U16,
        /// Offsets and lengths are multiples of this.
        minimum: U32,
        /// What is served without read-modify-write.
        preferred: U32,
        /// Longest read or write.
        maximum: U32,
    }

    /// A compact request ("Request message").
    Request = 28 {
        /// [`REQUEST_MAGIC`].
        magic: U32,
        /// Bits of [`command_flag`].
        flags: U16,
        /// One of [`command`].
        kind: U16,
        /// The client's mark, repeated in the reply. Opaque, so kept as bytes in a number.
        cookie: U64,
        /// First byte of the range.
        offset: U64,
        /// Bytes in the range; of a write also the bytes that follow.
        length: U32,
    }

    /// An extended request ("Request message").
    ExtendedRequest = 32 {
        /// [`EXTENDED_REQUEST_MAGIC`].
        magic: U32,
        /// Bits of [`command_flag`].
        flags: U16,
        /// One of [`command`].
        kind: U16,
        /// As in [`Request`].
        cookie: U64,
        /// First byte of the range.
        offset: U64,
        /// Bytes that follow with [`command_flag::PAYLOAD_LEN`], else bytes in the range.
        length: U64,
    }

    /// A simple reply ("Simple reply message").
    SimpleReply = 16 {
        /// [`SIMPLE_REPLY_MAGIC`].
        magic: U32,
        /// 0 or one of [`error`].
        error: U32,
        /// The request's.
        cookie: U64,
    }

    /// Head of a structured reply chunk ("Structured reply chunk message").
    StructuredReply = 20 {
        /// [`STRUCTURED_REPLY_MAGIC`].
        magic: U32,
        /// [`REPLY_FLAG_DONE`] or 0.
        flags: U16,
        /// One of [`chunk`].
        kind: U16,
        /// The request's.
        cookie: U64,
        /// Bytes that follow.
        length: U32,
    }

    /// Head of an extended reply chunk ("Extended reply chunk message").
    ExtendedReply = 32 {
        /// [`EXTENDED_REPLY_MAGIC`].
        magic: U32,
        /// [`REPLY_FLAG_DONE`] or 0.
        flags: U16,
        /// One of [`chunk`].
        kind: U16,
        /// The request's.
        cookie: U64,
        /// The request's.
        offset: U64,
        /// Bytes that follow.
        length: U64,
    }

    /// Begin of an error chunk's payload ("`NBD_REPLY_TYPE_ERROR`").
    ErrorChunk = 6 {
        /// One of [`error`].
        error: U32,
        /// Bytes of text that follow.
        message_length: U16,
    }

    /// Begin of a block status chunk's payload ("`NBD_REPLY_TYPE_BLOCK_STATUS`").
    StatusChunk = 4 {
        /// The metadata context's id.
        context: U32,
    }

    /// An extent in a block status chunk ("`NBD_REPLY_TYPE_BLOCK_STATUS`").
    StatusExtent = 8 {
        /// Bytes.
        length: U32,
        /// Bits of [`state`].
        flags: U32,
    }

    /// Begin of an extended block status chunk's payload ("`NBD_REPLY_TYPE_BLOCK_STATUS_EXT`").
    StatusChunkExt = 8 {
        /// The metadata context's id.
        context: U32,
        /// Extents that follow.
        count: U32,
    }

    /// An extent in an extended block status chunk ("`NBD_REPLY_TYPE_BLOCK_STATUS_EXT`").
    StatusExtentExt = 16 {
        /// Bytes.
        length: U64,
        /// Bits of [`state`].
        flags: U64,
    }
}

#[cfg(test)]
mod tests {
    use lh_rig::hex;

    use super::*;

    #[test]
    fn golden_handshake() {
        let greeting = Greeting {
            magic: MAGIC.into(),
            option_magic: OPTION_MAGIC.into(),
            flags: (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES).into(),
        };
        assert_eq!(hex(greeting.as_bytes()), "4e42444d4147494349484156454f50540003");
        let option =
            OptionHeader { magic: OPTION_MAGIC.into(), option: option::GO.into(), length: 0x10.into() };
        assert_eq!(hex(option.as_bytes()), "49484156454f50540000000700000010");
        let reply = OptionReply {
            magic: REPLY_MAGIC.into(),
            option: option::LIST.into(),
            kind: reply::ERR_TOO_BIG.into(),
            length: 5.into(),
        };
        assert_eq!(hex(reply.as_bytes()), "0003e889045565a9000000038000000900000005");
        let export = ExportReply { size: (1 << 30).into(), flags: 0x0de5.into() };
        assert_eq!(hex(export.as_bytes()), "00000000400000000de5");
    }

    #[test]
    fn golden_information() {
        let export = InfoExport { kind: info::EXPORT.into(), size: (1 << 30).into(), flags: 0x0de5.into() };
        assert_eq!(hex(export.as_bytes()), "000000000000400000000de5");
        let block = InfoBlockSize {
            kind: info::BLOCK_SIZE.into(),
            minimum: 512.into(),
            preferred: 4096.into(),
            maximum: (1 << 20).into(),
        };
        assert_eq!(hex(block.as_bytes()), "0003000002000000100000100000");
    }

    #[test]
    fn golden_requests() {
        let compact = Request {
            magic: REQUEST_MAGIC.into(),
            flags: command_flag::FUA.into(),
            kind: command::WRITE.into(),
            cookie: 0x0102_0304_0506_0708.into(),
            offset: 0x1000.into(),
            length: 0x200.into(),
        };
        assert_eq!(hex(compact.as_bytes()), "25609513000100010102030405060708000000000000100000000200");
        let extended = ExtendedRequest {
            magic: EXTENDED_REQUEST_MAGIC.into(),
            flags: command_flag::PAYLOAD_LEN.into(),
            kind: command::BLOCK_STATUS.into(),
            cookie: 0x0102_0304_0506_0708.into(),
            offset: 0x1000.into(),
            length: (1 << 40).into(),
        };
        assert_eq!(
            hex(extended.as_bytes()),
            "21e41c7100200007010203040506070800000000000010000000010000000000"
        );
    }

    #[test]
    fn golden_replies() {
        let cookie = U64::from(0x0102_0304_0506_0708);
        let simple = SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: error::ENOSPC.into(), cookie };
        assert_eq!(hex(simple.as_bytes()), "674466980000001c0102030405060708");
        let structured = StructuredReply {
            magic: STRUCTURED_REPLY_MAGIC.into(),
            flags: REPLY_FLAG_DONE.into(),
            kind: chunk::OFFSET_DATA.into(),
            cookie,
            length: 520.into(),
        };
        assert_eq!(hex(structured.as_bytes()), "668e33ef00010001010203040506070800000208");
        let extended = ExtendedReply {
            magic: EXTENDED_REPLY_MAGIC.into(),
            flags: REPLY_FLAG_DONE.into(),
            kind: chunk::ERROR_OFFSET.into(),
            cookie,
            offset: 0x1000.into(),
            length: 14.into(),
        };
        assert_eq!(
            hex(extended.as_bytes()),
            "6e8a278c0001800201020304050607080000000000001000000000000000000e"
        );
    }

    #[test]
    fn golden_chunks() {
        let error = ErrorChunk { error: error::ESHUTDOWN.into(), message_length: 2.into() };
        assert_eq!(hex(error.as_bytes()), "0000006c0002");
        let extent = StatusExtent { length: 4096.into(), flags: (state::HOLE | state::ZERO).into() };
        assert_eq!(hex(extent.as_bytes()), "0000100000000003");
        let extent = StatusExtentExt { length: (1 << 40).into(), flags: 3.into() };
        assert_eq!(hex(extent.as_bytes()), "00000100000000000000000000000003");
        assert_eq!(hex(StatusChunkExt { context: 1.into(), count: 2.into() }.as_bytes()), "0000000100000002");
        assert_eq!(hex(StatusChunk { context: 1.into() }.as_bytes()), "00000001");
    }
}
