//! What one layer holds of a range, in short: the payload of `DigestLayer` answers and `CompareLayer` requests.
//!
//! A byte per block ([`BlockState`]), a seed, then the hash ([`block_hash`]) of each block that holds data, little-endian
//! and in order, then the layer's name. A comparison answers with a bit for each of 32 equal parts of the range, so that
//! only what differs has to travel.

use lh_block::{BLOCK, Extent};
use xxhash_rust::xxh3::Xxh3;

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

/// Bytes of the seed.
const SEED: usize = size_of::<u64>();

/// Bytes of a block's hash.
const HASH: usize = size_of::<u128>();

/// A block's content in short: XXH3 of 128 bits over its bytes, given in one piece or several.
///
/// No CRC does: a block that ends with the CRC of what stands before has one and the same CRC whatever it holds, and
/// databases' pages and ext4's directories are such blocks (`docs/decisions/0011-blocks-are-compared-by-a-hash.md`). The
/// seed is another one for each digest, so that what one comparison takes for equal the next one does not.
pub fn block_hash<'a>(seed: u64, pieces: impl Iterator<Item = &'a [u8]>) -> u128 {
    let mut hash = Xxh3::with_seed(seed);
    pieces.for_each(|piece| hash.update(piece));
    hash.digest128()
}

/// A block as a digest tells it.
pub type BlockDigest = (BlockState, Option<u128>);

/// A decoded digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerDigest<'a> {
    states: &'a [u8],
    /// Of the hashes.
    pub seed: u64,
    hashes: &'a [u8],
    /// Name of the layer; empty for the head.
    pub layer: &'a str,
}

impl<'a> LayerDigest<'a> {
    /// Writes the digest of these blocks, hashed with the seed.
    pub fn encode(seed: u64, blocks: &[BlockDigest], layer: &str) -> Vec<u8> {
        let mut bytes: Vec<u8> = blocks.iter().map(|(state, _)| *state as u8).collect();
        bytes.extend_from_slice(&seed.to_le_bytes());
        bytes.extend(blocks.iter().filter_map(|(_, hash)| *hash).flat_map(u128::to_le_bytes));
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
        let (seed, rest) = rest.split_first_chunk::<SEED>()?;
        let (hashes, name) = rest.split_at_checked(data * HASH).filter(|_| known)?;
        let seed = u64::from_le_bytes(*seed);
        Some(Self { states, seed, hashes, layer: std::str::from_utf8(name).ok()? })
    }

    /// The blocks of the range, in order.
    pub fn blocks(&self) -> impl Iterator<Item = BlockDigest> + '_ {
        let mut hashes = self.hashes.chunks_exact(HASH);
        self.states.iter().map(move |state| {
            let state = BlockState::from_u8(*state).unwrap_or(BlockState::Absent);
            let mut hash = || hashes.next().and_then(|h| Some(u128::from_le_bytes(h.try_into().ok()?)));
            (state, if state == BlockState::Data { hash() } else { None })
        })
    }

    /// A bit for each part of the range in which these blocks, hashed with this seed, differ from the digest's.
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
        let bytes = LayerDigest::encode(5, &blocks, "s1");
        let digest = LayerDigest::decode(&bytes, 4 * 4096).unwrap();
        assert_eq!((digest.seed, digest.layer), (5, "s1"));
        assert_eq!(digest.blocks().collect::<Vec<_>>(), blocks);
        assert_eq!(digest.compare(4 * 4096, &blocks), 0);
        let mut other = blocks;
        other[1] = (BlockState::Zero, None);
        other[3] = (BlockState::Data, Some(8));
        assert_eq!(digest.compare(4 * 4096, &other), 0b1010);
        assert_eq!(LayerDigest::decode(&bytes, 100), None);
        assert_eq!(LayerDigest::decode(&bytes[..3], 4 * 4096), None);
        assert_eq!(LayerDigest::decode(&bytes[..9], 4 * 4096), None, "the seed is cut off");
        assert_eq!(LayerDigest::decode(&bytes[..4 + SEED + HASH], 4 * 4096), None, "a hash is missing");
        let nothing = LayerDigest::encode(0, &[(BlockState::Absent, None)], "");
        assert!(LayerDigest::decode(&nothing, 4096).is_some());
        let unknown = [&[3], &nothing[1..]].concat();
        assert_eq!(LayerDigest::decode(&unknown, 4096), None);
        let no_name = [&nothing[..], &[0xff]].concat();
        assert_eq!(LayerDigest::decode(&no_name, 4096), None);
    }

    #[test]
    fn a_hash_is_of_all_bytes_and_the_seed() {
        let block: Vec<u8> = (0..4096_u32).map(|n| (n * 7 + n / 256).to_le_bytes()[0]).collect();
        let whole = block_hash(1, [&block[..]].into_iter());
        // XXH3_128bits_withSeed of the reference implementation, by Python's xxhash 4.1.
        assert_eq!(whole, 0x6a53_9771_8b83_726b_4cc7_048d_ab1b_fccc);
        assert_eq!(whole, block_hash(1, block.chunks(100)));
        assert_ne!(whole, block_hash(2, [&block[..]].into_iter()));
    }

    #[test]
    fn blocks_that_end_with_their_own_checksum_are_told_apart() {
        let sealed = |byte| {
            let mut block = vec![byte; 4092];
            block.extend(crc32c::crc32c(&block).to_le_bytes());
            block
        };
        let (one, other) = (sealed(1), sealed(2));
        assert_eq!(crc32c::crc32c(&one), crc32c::crc32c(&other), "which is why it is no CRC");
        assert_ne!(block_hash(7, [&one[..]].into_iter()), block_hash(7, [&other[..]].into_iter()));
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
