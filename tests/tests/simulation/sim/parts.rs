//! Blocks that clients write in part. A block's content is one number ([`Stamp`]); that of the first few blocks is made of two, one for
//! each half, and to the oracle each half is a register of its own.

use lh_block::{BLOCK, Extent};

use super::disk::blocks;
use super::world::BLOCKS;
use tests::register::Stamp;

/// So many blocks have halves.
pub(crate) const HALVED: u64 = 4;

/// Bytes of a half.
pub(crate) const HALF: u64 = BLOCK / 2;

/// Registers of the oracle: one for each block, and one more for the second half of each of those.
pub(crate) const REGISTERS: u64 = BLOCKS + HALVED;

/// What of a block's number a half has.
const BITS: u32 = u64::BITS / 2;
const MASK: u64 = (1 << BITS) - 1;

/// One register of the oracle: a block, or a half of one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Register {
    /// By which the oracle knows it.
    pub(crate) number: u64,
    /// Where it is.
    pub(crate) block: u64,
    bytes: Extent,
}

impl Register {
    /// What it holds, by the blocks of this range.
    pub(crate) fn value_in(self, range: Extent, contents: &[Stamp]) -> Option<Stamp> {
        let at = usize::try_from(self.block - blocks(range).start).ok()?;
        contents.get(at).map(|block| self.value(*block))
    }

    /// What it holds, by what its block does.
    pub(crate) const fn value(self, block: Stamp) -> Stamp {
        match (self.block < HALVED, self.number == self.block) {
            (false, _) => block,
            (true, true) => Stamp(block.0 & MASK),
            (true, false) => Stamp(block.0 >> BITS),
        }
    }
}

/// The registers of a block.
pub(crate) fn registers_of(block: u64) -> impl Iterator<Item = Register> {
    let len = if block < HALVED { HALF } else { BLOCK };
    let first = Register { number: block, block, bytes: Extent::new(block * BLOCK, len) };
    let second = Register { number: BLOCKS + block, block, bytes: Extent::new(block * BLOCK + HALF, HALF) };
    std::iter::once(first).chain((block < HALVED).then_some(second))
}

/// The registers of a range.
pub(crate) fn registers(range: Extent) -> impl Iterator<Item = Register> {
    blocks(range).flat_map(registers_of).filter(move |r| range.contains(r.bytes))
}

/// What a block is that is written with this stamp.
pub(crate) const fn whole(block: u64, stamp: Stamp) -> Stamp {
    if block < HALVED { Stamp(stamp.0 << BITS | stamp.0) } else { stamp }
}

/// A block of which bytes from `at` on were written over: half of it.
///
/// # Panics
/// If they are not a half.
pub(crate) fn merged(before: Stamp, at: u32, len: u32, new: Stamp) -> Stamp {
    assert_eq!(u64::from(len), HALF, "clients write halves");
    let mask = if at == 0 { MASK } else { MASK << BITS };
    Stamp(before.0 & !mask | new.0 & mask)
}
