//! The header before every message, in both directions.

use lh_block::Generation;
use thiserror::Error;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First four bytes of every header: "LHr1".
pub const MAGIC: u32 = u32::from_le_bytes(*b"LHr1");

/// Version of header and messages.
///
/// - 1: the first.
pub const VERSION: u8 = 1;

/// Bytes in a header.
pub const HEADER_LEN: usize = 64;

/// Payloads of requests begin at a multiple of this in their stream: the memory alignment that O_DIRECT asks for on
/// disks with 512-byte sectors (statx(2), stx_dio_mem_align).
pub const PAYLOAD_ALIGN: u64 = 512;

/// Largest data of a read or write, in bytes.
pub const MAX_DATA: u32 = 1 << 20;

/// Largest payload of any message: a layer image of [`MAX_DATA`] with its trailer, or a control message.
pub const MAX_PAYLOAD: u32 = MAX_DATA + (64 << 10);

/// Bits of [`Header::flags`].
pub mod flags {
    /// On stable storage before the answer (write, write zeroes).
    pub const FUA: u8 = 1;
    /// The message answers a request.
    pub const RESPONSE: u8 = 2;
    /// `payload_crc` is set and must match.
    pub const CRC: u8 = 4;
    /// What snapshot layers hold is compared with their checksums on record (read, read layer, digest layer, compare
    /// layer): a block that does not fit is not answered as if it were sound. Of a put layer: what is sent is rotten by
    /// its sender's word.
    pub const VERIFY: u8 = 8;
    /// Of a request to write: the payload says where the bytes are ([`crate::Pieces`]), in memory that the engine has lent
    /// with its hello. A checksum is that of the bytes.
    pub const LENT: u8 = 16;
    /// All bits that this version knows.
    pub const ALL: u8 = FUA | RESPONSE | CRC | VERIFY | LENT;
}

/// What a message asks for. A response repeats its request's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum OpCode {
    /// The bytes of the range through the whole chain.
    Read = 1,
    /// Bytes for the range, into the head.
    Write = 2,
    /// The range reads back as zero.
    WriteZeroes = 3,
    /// The range reads back as zero, its space is given back.
    Unmap = 4,
    /// Everything answered before is on stable storage; `aux` is unused, the flush's number is in `flush`.
    Flush = 5,
    /// Nothing; proves that the replica is alive.
    Ping = 6,
    /// What one layer holds of the range; payload: the layer's name (empty: the head). With `aux` [`MERGED`], what
    /// the layers under it hold counts as its own, and what none of them holds is zero.
    ReadLayer = 7,
    /// Makes the range of one layer exactly so; payload: a layer image. The answer's `aux` counts changed blocks. With
    /// `VERIFY` nothing is changed if all that the image would replace fits the checksums of this replica.
    PutLayer = 8,
    /// No write is unfinished in the range: its chunks may be unmarked in the intent bitmap.
    ClearIntent = 9,
    /// A [`crate::Control`] message as JSON.
    Control = 10,
    /// Checksums of what one layer holds of the range; payload: the layer's name. The answer's payload is a
    /// [`crate::LayerDigest`]; with `VERIFY` its `aux` has a bit for each part of the range that does not fit its
    /// checksums.
    DigestLayer = 11,
    /// Compares what one layer holds of the range; payload: the [`crate::LayerDigest`] of another replica. The answer's
    /// `aux` has a bit for each part of the range that differs; with `VERIFY` also for each that does not fit the
    /// checksums of this replica.
    CompareLayer = 12,
    /// Reads what one layer holds of the range, at most [`crate::VERIFY_MAX`] bytes, and compares it with the layer's
    /// checksums on record; payload: the layer's name. The answer's `aux` is [`crate::Verified::bits`].
    VerifyLayer = 13,
    /// Where the blocks of a piece ([`crate::PIECE`]) are, for an engine that was granted the layers' files. The answer's payload
    /// is [`crate::Places`], its `aux` the number of the grant.
    Places = 14,
    /// Which blocks of the range, at most [`lh_block::ALLOCATION_MAX`] bytes, hold data, through the whole chain. The answer's payload is
    /// [`lh_block::Runs`]. Only to replicas that say that they tell it ([`crate::handshake::Challenge::tells`]).
    Allocation = 15,
}

/// In `aux` of a [`OpCode::ReadLayer`]: together with the layers under it.
pub const MERGED: u32 = 1;

/// In `aux` of an answer [`Status::NoSpace`] to what changes the head: part of it may have been done before the disk was full.
/// Which part, [`done_of`] says if it is known.
pub const IN_PART: u32 = 1;

/// The `aux` of an answer [`Status::NoSpace`] to a write of which the first `blocks` are done, as durably as it asked for, and
/// nothing of the others was changed, by it or by an earlier attempt on the same connection. Not 0, and not all.
pub const fn in_part(blocks: u32) -> u32 {
    IN_PART | blocks << 1
}

/// How many blocks of a write are done, of the answer [`Status::NoSpace`] to which this is the `aux`: 0 if nothing was changed.
/// `None`: nobody knows which. Replicas of before this was told say nothing else of what they have done in part.
pub const fn done_of(aux: u32) -> Option<u32> {
    match (aux & IN_PART != 0, aux >> 1) {
        (false, _) => Some(0),
        (true, 0) => None,
        (true, blocks) => Some(blocks),
    }
}

impl OpCode {
    /// All codes, in order.
    pub const ALL: [Self; 15] = [
        Self::Read,
        Self::Write,
        Self::WriteZeroes,
        Self::Unmap,
        Self::Flush,
        Self::Ping,
        Self::ReadLayer,
        Self::PutLayer,
        Self::ClearIntent,
        Self::Control,
        Self::DigestLayer,
        Self::CompareLayer,
        Self::VerifyLayer,
        Self::Places,
        Self::Allocation,
    ];

    fn from_u8(n: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| *op as u8 == n)
    }
}

/// How a request ended. What the engine does about each is its own decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// A younger engine has fenced this one off: stop, answer nobody, exit.
    Stale = 1,
    /// The replica's file system is full. Nothing was changed, unless `aux` says [`IN_PART`].
    NoSpace = 2,
    /// The disk failed. The replica is to be put out.
    Io = 3,
    /// Checksum mismatch on the wire. Nothing was changed.
    Corrupt = 4,
    /// The request makes no sense: a bug of the sender.
    Invalid = 5,
    /// Refused for a reason that the payload tells in words.
    Refused = 6,
    /// A block does not fit its checksum on record: another member has to answer, and this one's block is to be repaired.
    Rotten = 7,
}

impl Status {
    /// All of them, in order.
    pub const ALL: [Self; 8] = [
        Self::Ok,
        Self::Stale,
        Self::NoSpace,
        Self::Io,
        Self::Corrupt,
        Self::Invalid,
        Self::Refused,
        Self::Rotten,
    ];

    fn from_u8(n: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|s| *s as u8 == n)
    }
}

/// The header as it lies on the wire. Little-endian, no padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Raw {
    magic: U32,
    version: u8,
    op: u8,
    flags: u8,
    status: u8,
    tag: U64,
    offset: U64,
    length: U32,
    payload: U32,
    generation: U64,
    flush: U64,
    aux: U32,
    pad: U16,
    reserved: U16,
    payload_crc: U32,
    header_crc: U32,
}

const _: () = assert!(size_of::<Raw>() == HEADER_LEN);

/// Bytes of `header_crc`, the last field: the checksum covers everything before it.
const CRC_AT: usize = HEADER_LEN - 4;

/// A message's header, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What is asked for, or what is answered.
    pub op: OpCode,
    /// See [`flags`].
    pub flags: u8,
    /// How it ended; [`Status::Ok`] in requests.
    pub status: Status,
    /// Chosen by the engine, repeated in the answer. Unique among the requests in flight of one connection.
    pub tag: u64,
    /// First byte of the range in the volume.
    pub offset: u64,
    /// Bytes in the range. For zeroes and unmap it may be larger than [`MAX_DATA`].
    pub length: u32,
    /// Bytes that follow header and padding.
    pub payload: u32,
    /// The engine's generation: the session's own, or the message is refused.
    pub generation: Generation,
    /// In requests the number of the last flush complete on every member; in a flush its own number.
    pub flush: u64,
    /// Depends on the operation: length of a trailer, count of changed blocks.
    pub aux: u32,
    /// Bytes between header and payload.
    pub pad: u16,
    /// crc32c of the payload, if [`flags::CRC`] is set.
    pub payload_crc: u32,
}

/// Why bytes are no header. Each ends the connection: there is no way to find the next message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// Another protocol talks here.
    #[error("not this protocol (first bytes {0:#010x})")]
    Magic(u32),
    /// Right protocol, other version.
    #[error("protocol version {0}, this side speaks {VERSION}")]
    Version(u8),
    /// The header's own checksum does not match.
    #[error("header checksum mismatch")]
    Checksum,
    /// Unknown operation, status or flag.
    #[error("unknown operation {op}, status {status} or flags {flags:#x}")]
    Unknown {
        /// Operation code.
        op: u8,
        /// Status code.
        status: u8,
        /// Flag bits.
        flags: u8,
    },
    /// A length beyond the protocol's limits.
    #[error("payload of {payload} bytes with {pad} of padding is beyond the limit")]
    Oversize {
        /// Payload length.
        payload: u32,
        /// Padding length.
        pad: u16,
    },
}

/// Padding that a sender puts behind a header so that the payload is aligned, when the header begins at byte
/// `position` of the stream.
pub const fn padding(position: u64) -> u16 {
    let after = (position + HEADER_LEN as u64) % PAYLOAD_ALIGN;
    ((PAYLOAD_ALIGN - after) % PAYLOAD_ALIGN) as u16
}

impl Header {
    /// A request without payload, padding or flags.
    pub const fn request(op: OpCode, tag: u64, offset: u64, length: u32, generation: Generation) -> Self {
        Self {
            op,
            flags: 0,
            status: Status::Ok,
            tag,
            offset,
            length,
            payload: 0,
            generation,
            flush: 0,
            aux: 0,
            pad: 0,
            payload_crc: 0,
        }
    }

    /// The answer to this request, without payload.
    pub const fn response(&self, status: Status) -> Self {
        Self { flags: flags::RESPONSE, status, payload: 0, aux: 0, pad: 0, payload_crc: 0, ..*self }
    }

    /// True if the bit is set; `bit` is one of [`flags`].
    pub const fn has(&self, bit: u8) -> bool {
        self.flags & bit != 0
    }

    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let raw = Raw {
            magic: MAGIC.into(),
            version: VERSION,
            op: self.op as u8,
            flags: self.flags,
            status: self.status as u8,
            tag: self.tag.into(),
            offset: self.offset.into(),
            length: self.length.into(),
            payload: self.payload.into(),
            generation: u64::from(self.generation).into(),
            flush: self.flush.into(),
            aux: self.aux.into(),
            pad: self.pad.into(),
            reserved: 0.into(),
            payload_crc: self.payload_crc.into(),
            header_crc: 0.into(),
        };
        let mut bytes = [0; HEADER_LEN];
        bytes.copy_from_slice(raw.as_bytes());
        let crc = crc32c::crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`DecodeError`]: the connection cannot be used any more.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, DecodeError> {
        let raw = Raw::read_from_bytes(bytes).map_err(|_| DecodeError::Checksum)?;
        if raw.magic.get() != MAGIC {
            return Err(DecodeError::Magic(raw.magic.get()));
        }
        if raw.version != VERSION {
            return Err(DecodeError::Version(raw.version));
        }
        if raw.header_crc.get() != crc32c::crc32c(&bytes[..CRC_AT]) {
            return Err(DecodeError::Checksum);
        }
        let unknown = DecodeError::Unknown { op: raw.op, status: raw.status, flags: raw.flags };
        let op = OpCode::from_u8(raw.op).ok_or(unknown)?;
        let status = Status::from_u8(raw.status).ok_or(unknown)?;
        let lent_write = op == OpCode::Write && raw.flags & flags::RESPONSE == 0;
        if raw.flags & !flags::ALL != 0 || (raw.flags & flags::LENT != 0 && !lent_write) {
            return Err(unknown);
        }
        let (payload, pad) = (raw.payload.get(), raw.pad.get());
        if payload > MAX_PAYLOAD || u64::from(pad) >= PAYLOAD_ALIGN {
            return Err(DecodeError::Oversize { payload, pad });
        }
        Ok(Self {
            op,
            flags: raw.flags,
            status,
            tag: raw.tag.get(),
            offset: raw.offset.get(),
            length: raw.length.get(),
            payload,
            generation: Generation::from(raw.generation.get()),
            flush: raw.flush.get(),
            aux: raw.aux.get(),
            pad,
            payload_crc: raw.payload_crc.get(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        Header {
            op: OpCode::Write,
            flags: flags::FUA | flags::CRC,
            status: Status::Ok,
            tag: 0x0102_0304_0506_0708,
            offset: 0x1000,
            length: 4096,
            payload: 4096,
            generation: Generation { attachment: 2, restart: 1 },
            flush: 9,
            aux: 5,
            pad: 448,
            payload_crc: 0xdead_beef,
        }
    }

    #[test]
    fn golden_bytes() {
        let hex: String = sample().encode().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            "4c487231010205000807060504030201001000000000000000100000001000000100000002000000\
             090000000000000005000000c0010000efbeadde54f37a49"
        );
        assert_eq!(Header::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let good = sample().encode();
        for bit in 0..HEADER_LEN * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn every_operation_and_status_survives() {
        for op in OpCode::ALL {
            for status in Status::ALL {
                let h = Header { op, status, ..sample() };
                assert_eq!(Header::decode(&h.encode()), Ok(h));
            }
        }
    }

    #[test]
    fn only_the_bytes_of_a_write_are_lent() {
        for op in OpCode::ALL {
            for more in [0, flags::FUA, flags::CRC, flags::RESPONSE] {
                let h = Header { op, flags: flags::LENT | more, ..sample() };
                let good = op == OpCode::Write && more != flags::RESPONSE;
                assert_eq!(Header::decode(&h.encode()).is_ok(), good, "{h:?}");
            }
        }
        let lent = Header { flags: flags::LENT | flags::FUA, payload: 16, pad: 0, ..sample() };
        let whole = lent.with_bytes_at_hand();
        assert_eq!(whole, Header { flags: flags::FUA, payload: 4096, pad: 0, ..sample() });
    }

    #[test]
    fn padding_aligns_the_payload() {
        for position in [0_u64, 64, 448, 449, 1 << 40] {
            assert_eq!((position + 64 + u64::from(padding(position))) % PAYLOAD_ALIGN, 0);
        }
    }

    #[test]
    fn oversize_is_refused_even_with_a_right_checksum() {
        let h = Header { payload: MAX_PAYLOAD + 1, ..sample() };
        assert!(matches!(Header::decode(&h.encode()), Err(DecodeError::Oversize { .. })));
        // Padding is only what an alignment takes.
        for (pad, fits) in [(511, true), (512, false), (u16::MAX, false)] {
            let h = Header { pad, ..sample() };
            assert_eq!(Header::decode(&h.encode()).is_ok(), fits, "{pad}");
        }
    }
}
