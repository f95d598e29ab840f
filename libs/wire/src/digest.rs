//! What one layer holds of a range, in short: the payload of `DigestLayer` answers and `CompareLayer` requests.
//!
//! A byte per block ([`BlockState`]), then the crc32c of each block that holds data, little-endian and in order, then
//! the layer's name. A comparison answers with a bit for each of 32 equal parts of the range, so that only what
//! differs has to travel.

use lh_block::{BLOCK, Extent};

use crate::layer::BlockState;

/// Parts of a range that a comparison tells apart: the bits of the header's field `aux`.
const PARTS: u64 = 32;

/// Longest range of which a comparison still tells single blocks apart.
pub const COMPARE_MAX: u64 = PARTS * BLOCK;

/// Longest range of a `VerifyLayer` request: a word tells two things of each block.
pub const VERIFY_MAX: u64 = 16 * BLOCK;

/// What a replica knows of the blocks of a range of at most [`VERIFY_MAX`] bytes, a bit each from the low end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// The block is not what its layer's checksums say.
    pub rotten: u16,
    /// The layer has checksums, and they count for this block.
    pub known: u16,
}

impl Verified {
    /// As one word of a header.
    pub const fn bits(self) -> u32 {
        (self.known as u32) << 16 | self.rotten as u32
    }

    /// From one word of a header.
    pub const fn from_bits(bits: u32) -> Self {
        let [a, b, c, d] = bits.to_le_bytes();
        Self { rotten: u16::from_le_bytes([a, b]), known: u16::from_le_bytes([c, d]) }
    }
}

/// Bytes in a part of a range of `len` bytes: whole blocks.
pub const fn part_len(len: u64) -> u64 {
    let part = len.div_ceil(PARTS);
    let blocks = part.div_ceil(BLOCK);
    if blocks == 0 { BLOCK } else { blocks * BLOCK }
}

/// The bit of the part that a block of the range lies in, `at` bytes from the range's begin.
pub const fn part_bit(len: u64, at: u64) -> u32 {
    1 << (at / part_len(len))
}

/// The ranges that the bits name: runs of parts, ascending.
pub fn differing(range: Extent, bits: u32) -> impl Iterator<Item = Extent> {
    let part = part_len(range.len);
    let mut at = 0;
    std::iter::from_fn(move || {
        let has = |n: u64| n < PARTS && bits & 1 << n != 0;
        at += (at..PARTS).take_while(|n| !has(*n)).count() as u64;
        let parts = (at..PARTS).take_while(|n| has(*n)).count() as u64;
        let found = Extent::new(range.offset.saturating_add(at * part), parts * part);
        at += parts;
        found.intersection(range).filter(|_| parts > 0)
    })
}

/// A block as a digest tells it.
pub type BlockDigest = (BlockState, Option<u32>);

/// A decoded digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerDigest<'a> {
    states: &'a [u8],
    sums: &'a [u8],
    /// Name of the layer; empty for the head.
    pub layer: &'a str,
}

impl<'a> LayerDigest<'a> {
    /// Writes the digest of these blocks.
    pub fn encode(blocks: &[BlockDigest], layer: &str) -> Vec<u8> {
        let mut bytes: Vec<u8> = blocks.iter().map(|(state, _)| *state as u8).collect();
        bytes.extend(blocks.iter().filter_map(|(_, sum)| *sum).flat_map(u32::to_le_bytes));
        bytes.extend_from_slice(layer.as_bytes());
        bytes
    }

    /// Reads the digest of a range of `length` bytes; `None` for anything that is none.
    pub fn decode(bytes: &'a [u8], length: u32) -> Option<Self> {
        if u64::from(length) % BLOCK != 0 {
            return None;
        }
        let (states, rest) = bytes.split_at_checked((u64::from(length) / BLOCK) as usize)?;
        let known = states.iter().all(|s| BlockState::from_u8(*s).is_some());
        let data = states.iter().filter(|s| **s == BlockState::Data as u8).count();
        let (sums, name) = rest.split_at_checked(data * 4).filter(|_| known)?;
        Some(Self { states, sums, layer: std::str::from_utf8(name).ok()? })
    }

    /// The blocks of the range, in order.
    pub fn blocks(&self) -> impl Iterator<Item = BlockDigest> + '_ {
        let mut sums = self.sums.chunks_exact(4);
        self.states.iter().map(move |state| {
            let state = BlockState::from_u8(*state).unwrap_or(BlockState::Absent);
            let mut sum = || sums.next().and_then(|s| Some(u32::from_le_bytes(s.try_into().ok()?)));
            (state, if state == BlockState::Data { sum() } else { None })
        })
    }

    /// A bit for each part of the range in which these blocks differ from the digest's.
    pub fn compare(&self, length: u32, own: &[BlockDigest]) -> u32 {
        let differ = self.blocks().zip(own).enumerate().filter(|(_, (theirs, own))| theirs != *own);
        differ.fold(0, |bits, (n, _)| bits | part_bit(length.into(), n as u64 * BLOCK))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back_and_nothing_else() {
        let blocks = [
            (BlockState::Data, Some(7)),
            (BlockState::Absent, None),
            (BlockState::Zero, None),
            (BlockState::Data, Some(9)),
        ];
        let bytes = LayerDigest::encode(&blocks, "s1");
        let digest = LayerDigest::decode(&bytes, 4 * 4096).unwrap();
        assert_eq!(digest.layer, "s1");
        assert_eq!(digest.blocks().collect::<Vec<_>>(), blocks);
        assert_eq!(digest.compare(4 * 4096, &blocks), 0);
        let mut other = blocks;
        other[1] = (BlockState::Zero, None);
        other[3] = (BlockState::Data, Some(8));
        assert_eq!(digest.compare(4 * 4096, &other), 0b1010);
        assert_eq!(LayerDigest::decode(&bytes, 100), None);
        assert_eq!(LayerDigest::decode(&bytes[..3], 4 * 4096), None);
        assert_eq!(LayerDigest::decode(&bytes[..9], 4 * 4096), None, "a checksum is missing");
        assert_eq!(LayerDigest::decode(&[3], 4096), None);
        assert_eq!(LayerDigest::decode(&[0, 0xff], 4096), None);
    }

    #[test]
    fn parts_cover_the_range() {
        assert_eq!(part_len(4096), 4096);
        assert_eq!(part_len(COMPARE_MAX), 4096);
        assert_eq!(part_len(1 << 20), 32 << 10);
        assert_eq!(part_bit(COMPARE_MAX, COMPARE_MAX - 4096), 1 << 31);
        let range = Extent::new(8192, 5 * 4096);
        assert_eq!(differing(range, 0).count(), 0);
        assert_eq!(
            differing(range, 0b10_0110).collect::<Vec<_>>(),
            [Extent::new(8192 + 4096, 8192)],
            "what lies behind the range is none of it"
        );
        assert_eq!(differing(range, u32::MAX).collect::<Vec<_>>(), [range]);
        let long = Extent::new(0, 1 << 20);
        assert_eq!(
            differing(long, 1 | 1 << 31).collect::<Vec<_>>(),
            [Extent::new(0, 32 << 10), Extent::new((1 << 20) - (32 << 10), 32 << 10)]
        );
    }
}
