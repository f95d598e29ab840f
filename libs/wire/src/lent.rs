//! References to bytes that the engine lends instead of sending them (`docs/decisions/0014-writes-on-one-host-are-lent.md`).
//!
//! The payload of a write with [`flags::LENT`] is a list of pieces of the memory that came with the hello, in the order of the
//! range. Each is eight bytes: offset in the memory and length, little-endian. Together they are as long as the range.

use thiserror::Error;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::header::{Header, flags};

/// A piece as it lies on the wire.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Raw {
    offset: U32,
    length: U32,
}

/// Bytes of one piece's reference.
const PIECE_LEN: usize = size_of::<Raw>();

const _: () = assert!(PIECE_LEN == 8);

/// Why the payload of a message is no list of pieces. It ends the connection, as a malformed header does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PiecesError {
    /// Not a whole number of references, none, or more than [`Pieces::MAX`].
    #[error("{0} bytes are no list of lent pieces")]
    Length(usize),
    /// An empty piece, or their sum is another length than the range's.
    #[error("lent pieces that do not make up the range")]
    Sum,
}

/// Where the bytes of a write are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    list: [(u32, u32); Self::MAX],
    count: usize,
}

impl Pieces {
    /// Most pieces of one write.
    pub const MAX: usize = 12;

    /// Most bytes of a list.
    pub const LEN_MAX: usize = Self::MAX * PIECE_LEN;

    /// The offset and length of each piece. `None` for more than [`Pieces::MAX`].
    pub fn new(pieces: impl IntoIterator<Item = (u32, u32)>) -> Option<Self> {
        let mut new = Self { list: [(0, 0); Self::MAX], count: 0 };
        for piece in pieces {
            *new.list.get_mut(new.count)? = piece;
            new.count += 1;
        }
        Some(new)
    }

    /// Offset and length of each.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.list[..self.count].iter().copied()
    }

    /// The bytes on the wire: the first so many of the array.
    pub fn encode(&self) -> ([u8; Self::LEN_MAX], usize) {
        let mut bytes = [0; Self::LEN_MAX];
        for (field, (offset, length)) in bytes.chunks_exact_mut(PIECE_LEN).zip(self.iter()) {
            field.copy_from_slice(Raw { offset: offset.into(), length: length.into() }.as_bytes());
        }
        (bytes, self.count * PIECE_LEN)
    }

    /// Reads the list of a write of `length` bytes. Whether the pieces are inside the memory is for who has it mapped.
    ///
    /// # Errors
    /// [`PiecesError`].
    pub fn decode(bytes: &[u8], length: u32) -> Result<Self, PiecesError> {
        let (raws, rest) = bytes.as_chunks::<PIECE_LEN>();
        if raws.is_empty() || raws.len() > Self::MAX || !rest.is_empty() {
            return Err(PiecesError::Length(bytes.len()));
        }
        let mut pieces = Self { list: [(0, 0); Self::MAX], count: raws.len() };
        let mut sum = 0_u64;
        for (piece, raw) in pieces.list.iter_mut().zip(raws) {
            let raw = Raw::read_from_bytes(raw).map_err(|_| PiecesError::Length(bytes.len()))?;
            *piece = (raw.offset.get(), raw.length.get());
            sum += u64::from(piece.1);
            if piece.1 == 0 {
                return Err(PiecesError::Sum);
            }
        }
        if sum == u64::from(length) { Ok(pieces) } else { Err(PiecesError::Sum) }
    }
}

impl Header {
    /// The header of a write whose bytes were lent, once they are at hand: as if they had come with it.
    #[must_use]
    pub const fn with_bytes_at_hand(&self) -> Self {
        Self { flags: self.flags & !flags::LENT, payload: self.length, pad: 0, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let pieces = Pieces::new([(0x0002_0000, 0x1000), (0x0004_0200, 0x200)]).unwrap();
        let (bytes, len) = pieces.encode();
        let hex: String = bytes[..len].iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "00000200001000000002040000020000");
        assert_eq!(Pieces::decode(&bytes[..len], 0x1200), Ok(pieces));
    }

    #[test]
    fn lists_of_every_length_survive() {
        for count in 1..=Pieces::MAX {
            let pieces = Pieces::new((1..=12).map(|n| (n * 4096, n)).take(count)).unwrap();
            let (bytes, len) = pieces.encode();
            let sum = pieces.iter().map(|(_, length)| length).sum();
            assert_eq!(Pieces::decode(&bytes[..len], sum), Ok(pieces));
        }
        assert_eq!(Pieces::new([(0, 1); Pieces::MAX + 1]), None);
    }

    #[test]
    fn what_is_no_list_is_refused() {
        let one = |offset: u32, length: u32| [offset.to_le_bytes(), length.to_le_bytes()].concat();
        for len in [0, 1, 7, 9, 15, Pieces::LEN_MAX + 8, 1 << 20] {
            let bytes = one(0, 1).repeat(len.div_ceil(8));
            let sum = u32::try_from(len / 8).unwrap();
            assert_eq!(Pieces::decode(&bytes[..len], sum), Err(PiecesError::Length(len)));
        }
        let two = [one(0, 4096), one(8192, 0)].concat();
        assert_eq!(Pieces::decode(&two, 4096), Err(PiecesError::Sum), "an empty piece");
        for sum in [0, 4095, 4097] {
            assert_eq!(Pieces::decode(&one(0, 4096), sum), Err(PiecesError::Sum));
        }
        let beyond = [one(0, u32::MAX), one(0, 4097)].concat();
        assert_eq!(Pieces::decode(&beyond, 4096), Err(PiecesError::Sum), "the sum is not taken modulo 2^32");
    }
}
