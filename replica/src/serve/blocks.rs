//! The blocks of a range, given the state of each: where data is, and what is compared of it.

use lh_block::{BLOCK, Extent};
use lh_ring::Payload;
use lh_wire::{BlockDigest, BlockState, block_hash};

use crate::store::BlockSum;

/// The ranges of the blocks that hold data, given the states of the blocks from `offset` on.
pub(super) fn runs_of(states: &[BlockState], offset: u64) -> impl Iterator<Item = Extent> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let data = |s: &BlockState| *s == BlockState::Data;
        at += states.get(at..)?.iter().position(data)?;
        let len = states[at..].iter().take_while(|s| data(s)).count();
        let run = Extent::new(offset + at as u64 * BLOCK, len as u64 * BLOCK);
        at += len;
        Some(run)
    })
}

/// What checksums on record are compared with, given the data of the blocks that hold some, in one piece or several.
pub(super) fn block_sums<'a>(
    states: &[BlockState],
    data: impl IntoIterator<Item = &'a Payload>,
) -> Vec<BlockSum> {
    each(states, data, |block| block.crc32c())
}

/// What another replica's blocks are compared with.
pub(super) fn block_digests<'a>(
    seed: u64,
    states: &[BlockState],
    data: impl IntoIterator<Item = &'a Payload>,
) -> Vec<BlockDigest> {
    each(states, data, |block| block_hash(seed, block.segments()))
}

fn each<'a, T>(
    states: &[BlockState],
    data: impl IntoIterator<Item = &'a Payload>,
    tell: impl Fn(Payload) -> T,
) -> Vec<(BlockState, Option<T>)> {
    let block = usize::try_from(BLOCK).unwrap_or(usize::MAX);
    let mut blocks =
        data.into_iter().flat_map(|p| (0..p.len() / block).map(move |n| p.slice(n * block, block)));
    let told = |state: &BlockState| match state {
        BlockState::Data => blocks.next().map(&tell),
        BlockState::Absent | BlockState::Zero => None,
    };
    let told: Vec<Option<T>> = states.iter().map(told).collect();
    states.iter().copied().zip(told).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_data() {
        use BlockState::{Absent, Data, Zero};
        let runs = |states: &[BlockState]| runs_of(states, 8 * BLOCK).collect::<Vec<_>>();
        assert!(runs(&[]).is_empty());
        assert!(runs(&[Absent, Zero]).is_empty());
        assert_eq!(
            runs(&[Data, Absent, Data, Data]),
            [Extent::new(8 * BLOCK, BLOCK), Extent::new(10 * BLOCK, 2 * BLOCK)]
        );
    }
}
