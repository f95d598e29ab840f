//! What a replica grants an engine on its host: to read blocks from the layers' files itself
//! (`docs/decisions/0016-reads-on-one-host-are-the-engines-own.md`).
//!
//! A grant is one message ([`Grant`]) and the descriptors that come with it. First that of memory which the replica writes and the
//! engine sees: word 0 is 0 as long as the grant holds, word `1 + n` counter `n` ([`counter_of`]). Then those of layer files. Where
//! the blocks of a piece are ([`Places`]) is asked for over a data connection of the session, and counts as long as the grant holds
//! and the piece's counter stands where it stood.

use lh_block::{BLOCK, Extent};
use thiserror::Error;
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of volume whose places are told together.
pub const PIECE: u64 = 1 << 20;

/// Blocks in a piece.
pub const PIECE_BLOCKS: usize = (PIECE / BLOCK) as usize;

/// Counters of a grant: with the word before them 64 KiB. A prime, so that no pattern of pieces meets on a few of them.
pub const COUNTERS: usize = 8191;

/// Most layer files of a grant: what lies in others is asked of the replica.
pub const FILES_MAX: usize = 31;

/// First bytes of a grant: "LHgr".
const MAGIC: u32 = u32::from_le_bytes(*b"LHgr");

/// The piece that a byte of the volume is in.
pub const fn piece_of(offset: u64) -> u64 {
    offset / PIECE
}

/// The counter of a piece.
#[expect(clippy::cast_possible_truncation, reason = "below the number of counters")]
pub const fn counter_of(piece: u64) -> usize {
    (piece % COUNTERS as u64) as usize
}

/// Bytes of a [`Grant`].
pub const GRANT_LEN: usize = size_of::<RawGrant>();

const _: () = assert!(GRANT_LEN == 12);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawGrant {
    magic: U32,
    number: U32,
    files: U16,
    reserved: U16,
}

/// The message of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Counts the grants of the replica's process.
    pub number: u32,
    /// How many descriptors of layer files there are, at most [`FILES_MAX`].
    pub files: u16,
}

/// Why bytes are no grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum GrantError {
    /// Something else.
    #[error("not a grant")]
    Magic,
    /// More files than there may be.
    #[error("a grant of {0} files")]
    Files(u16),
}

impl Grant {
    /// The bytes to send.
    pub fn encode(&self) -> [u8; GRANT_LEN] {
        let raw = RawGrant {
            magic: MAGIC.into(),
            number: self.number.into(),
            files: self.files.into(),
            reserved: 0.into(),
        };
        zerocopy::transmute!(raw)
    }

    /// Reads a grant.
    ///
    /// # Errors
    /// [`GrantError`].
    pub fn decode(bytes: &[u8; GRANT_LEN]) -> Result<Self, GrantError> {
        let raw: RawGrant = zerocopy::transmute!(*bytes);
        if raw.magic.get() != MAGIC {
            return Err(GrantError::Magic);
        }
        let files = raw.files.get();
        if usize::from(files) > FILES_MAX {
            Err(GrantError::Files(files))
        } else {
            Ok(Self { number: raw.number.get(), files })
        }
    }
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: it is zeroes.
    Zero,
    /// In this file of the grant, from 0, where it is in the volume.
    File(u8),
    /// The replica has to be asked for the bytes.
    Asked,
}

impl Place {
    const ASKED: u8 = u8::MAX;

    /// The byte that stands for it. Files beyond [`FILES_MAX`] are asked for.
    #[expect(clippy::cast_possible_truncation, reason = "31")]
    pub const fn code(self) -> u8 {
        match self {
            Self::Zero => 0,
            Self::File(file) if file < FILES_MAX as u8 => file + 1,
            Self::File(_) | Self::Asked => Self::ASKED,
        }
    }

    /// What a byte stands for; `None` for one that no replica sends.
    #[expect(clippy::cast_possible_truncation, reason = "31")]
    pub const fn of_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Zero),
            Self::ASKED => Some(Self::Asked),
            n if n <= FILES_MAX as u8 => Some(Self::File(n - 1)),
            _ => None,
        }
    }
}

/// Where the blocks of a piece are: the payload of the answer to [`crate::OpCode::Places`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Where the piece's counter stood before anybody looked.
    pub count: u64,
    /// [`Place::code`] of each block; the last piece of a volume may be shorter.
    blocks: [u8; PIECE_BLOCKS],
    len: usize,
}

/// Why bytes tell no places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PlacesError {
    /// Not one byte for each block behind the counter.
    #[error("{0} bytes tell no places")]
    Length(usize),
    /// A byte that stands for nothing, or for a file that was not granted.
    #[error("a block in place {0}, which there is not")]
    Place(u8),
}

impl Places {
    /// Most bytes on the wire.
    pub const LEN_MAX: usize = 8 + PIECE_BLOCKS;

    /// Nothing yet, of a piece whose counter stands there.
    pub const fn new(count: u64) -> Self {
        Self { count, blocks: [0; PIECE_BLOCKS], len: 0 }
    }

    /// The next so many blocks are there.
    ///
    /// # Panics
    /// Beyond the piece's end.
    pub fn push(&mut self, blocks: usize, place: Place) {
        self.blocks[self.len..self.len + blocks].fill(place.code());
        self.len += blocks;
    }

    /// [`Place::code`] of each block, in order.
    pub fn blocks(&self) -> &[u8] {
        &self.blocks[..self.len]
    }

    /// The bytes on the wire, and how many of them there are.
    pub fn encode(&self) -> ([u8; Self::LEN_MAX], usize) {
        let mut bytes = [0; Self::LEN_MAX];
        bytes[..8].copy_from_slice(&self.count.to_le_bytes());
        bytes[8..8 + self.len].copy_from_slice(self.blocks());
        (bytes, 8 + self.len)
    }

    /// Reads the places of `blocks` blocks, of a grant of so many files.
    ///
    /// # Errors
    /// [`PlacesError`].
    pub fn decode(bytes: &[u8], blocks: usize, files: usize) -> Result<Self, PlacesError> {
        let wrong = PlacesError::Length(bytes.len());
        let Some((count, codes)) = bytes.split_first_chunk::<8>() else { return Err(wrong) };
        if codes.len() != blocks || blocks > PIECE_BLOCKS {
            return Err(wrong);
        }
        let is_there = |code: &u8| match Place::of_code(*code) {
            Some(Place::File(file)) => usize::from(file) < files,
            other => other.is_some(),
        };
        if let Some(bad) = codes.iter().find(|code| !is_there(code)) {
            return Err(PlacesError::Place(*bad));
        }
        let mut places = Self::new(u64::from_le_bytes(*count));
        places.blocks[..blocks].copy_from_slice(codes);
        places.len = blocks;
        Ok(places)
    }
}

/// The pieces that a range of the volume touches.
pub fn pieces_of(range: Extent) -> std::ops::Range<u64> {
    piece_of(range.offset)..range.end().div_ceil(PIECE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let grant = Grant { number: 0x0102_0304, files: 31 };
        assert_eq!(grant.encode(), *b"LHgr\x04\x03\x02\x01\x1f\0\0\0");
        assert_eq!(Grant::decode(&grant.encode()), Ok(grant));
        let mut places = Places::new(0x0807_0605_0403_0201);
        places.push(2, Place::Zero);
        places.push(1, Place::File(30));
        places.push(1, Place::Asked);
        let (bytes, len) = places.encode();
        assert_eq!(bytes[..len], [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 31, 255]);
        assert_eq!(Places::decode(&bytes[..len], 4, 31), Ok(places));
    }

    #[test]
    fn what_is_no_grant_is_refused() {
        let mut bytes = Grant { number: 1, files: 31 }.encode();
        bytes[8] = 32;
        assert_eq!(Grant::decode(&bytes), Err(GrantError::Files(32)));
        bytes[0] ^= 1;
        assert_eq!(Grant::decode(&bytes), Err(GrantError::Magic));
    }

    #[test]
    fn places_that_there_are_not_are_refused() {
        let bytes = |codes: &[u8]| [&[0; 8], codes].concat();
        assert!(Places::decode(&bytes(&[0, 1, 2, 255]), 4, 2).is_ok());
        for (code, files) in [(3, 2), (1, 0), (32, 31), (254, 31)] {
            assert_eq!(Places::decode(&bytes(&[code]), 1, files), Err(PlacesError::Place(code)));
        }
        for len in [0, 3, 5, PIECE_BLOCKS] {
            assert_eq!(Places::decode(&bytes(&vec![0; len]), 4, 31), Err(PlacesError::Length(8 + len)));
        }
        assert_eq!(Places::decode(&[0; 7], 0, 31), Err(PlacesError::Length(7)));
        let long = bytes(&vec![0; PIECE_BLOCKS + 1]);
        assert_eq!(Places::decode(&long, PIECE_BLOCKS + 1, 31), Err(PlacesError::Length(long.len())));
    }

    #[test]
    fn codes_stand_for_one_place_each() {
        let known: Vec<u8> = (0..=u8::MAX).filter(|code| Place::of_code(*code).is_some()).collect();
        assert_eq!(known.len(), FILES_MAX + 2);
        for code in known {
            assert_eq!(Place::of_code(code).map(Place::code), Some(code));
        }
        assert_eq!(Place::File(31).code(), Place::Asked.code());
    }

    #[test]
    fn pieces_touched() {
        assert_eq!(pieces_of(Extent::new(PIECE - 4096, 8192)), 0..2);
        assert_eq!(pieces_of(Extent::new(PIECE, PIECE)), 1..2);
    }
}
