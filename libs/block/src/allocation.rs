//! Which blocks of a range hold data: the answer to [`Op::Allocation`](crate::Op::Allocation), as a member gives it, a queue passes it on
//! and a frontend reads it.
//!
//! It is a list of runs of blocks, little-endian words of four bytes in the order of the volume: the highest bit is set where
//! the blocks hold data, and clear where they read as zero and take no space; the others count the blocks, at least one. The first
//! run begins with the block that the range begins in. The runs may end before the range does: whoever asks goes on from there.

use crate::{BLOCK, Extent};

/// Most runs in an answer: half a KiB, and enough that whoever walks a fragmented volume spends its time on more than round trips.
pub const RUNS_MAX: usize = 128;

/// Longest range that is looked at for one answer, bytes. Its blocks are claimed meanwhile.
pub const ALLOCATION_MAX: u64 = 1 << 30;

/// Bytes of a run.
const RUN_BYTES: usize = 4;

/// In a run: the blocks hold data.
const DATA: u32 = 1 << 31;

// A run can be as long as the longest range.
const _: () = assert!(ALLOCATION_MAX / BLOCK < DATA as u64);

/// Blocks that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where; whole logical blocks.
    pub range: Extent,
    /// They hold data. If not, they read as zero and take no space.
    pub data: bool,
}

/// An answer while it is made.
#[derive(Clone, Debug)]
pub struct Runs {
    bytes: [u8; Self::LEN_MAX],
    len: usize,
    /// The last run, which the next blocks may belong to.
    last: u32,
}

impl Default for Runs {
    fn default() -> Self {
        Self { bytes: [0; Self::LEN_MAX], len: 0, last: 0 }
    }
}

impl Runs {
    /// Most bytes of an answer.
    pub const LEN_MAX: usize = RUNS_MAX * RUN_BYTES;

    /// The next so many blocks, at most [`ALLOCATION_MAX`] bytes of them together, hold data or not. False if there is no room for
    /// another run: the answer ends before them.
    pub fn push(&mut self, blocks: u32, data: bool) -> bool {
        let kind = if data { DATA } else { 0 };
        if self.len > 0 && self.last & DATA == kind {
            self.last += blocks;
            self.len -= RUN_BYTES;
        } else if self.len == Self::LEN_MAX {
            return false;
        } else {
            self.last = kind | blocks;
        }
        self.bytes[self.len..self.len + RUN_BYTES].copy_from_slice(&self.last.to_le_bytes());
        self.len += RUN_BYTES;
        true
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// True for an answer to a question about this range that can be right.
pub fn are_runs(bytes: &[u8], range: Extent) -> bool {
    let blocks = range.widen(BLOCK).len / BLOCK;
    let (words, rest) = bytes.as_chunks::<RUN_BYTES>();
    let counts = words.iter().map(|word| u64::from(u32::from_le_bytes(*word) & !DATA));
    (1..=RUNS_MAX).contains(&words.len())
        && rest.is_empty()
        && counts.clone().all(|count| count > 0)
        && counts.sum::<u64>() <= blocks
}

/// The runs of an answer to a question about this range, and nothing beyond it. What can be no answer counts as data.
pub fn runs(bytes: &[u8], range: Extent) -> impl Iterator<Item = Run> {
    let (words, _) = bytes.as_chunks::<RUN_BYTES>();
    let words = if are_runs(bytes, range) { words } else { &[] };
    let mut at = range.offset - range.offset % BLOCK;
    let known = words.iter().filter_map(move |word| {
        let word = u32::from_le_bytes(*word);
        let run = Extent::new(at, u64::from(word & !DATA) * BLOCK);
        at = run.end();
        Some(Run { range: run.intersection(range)?, data: word & DATA != 0 })
    });
    let unknown = words.is_empty() && !range.is_empty();
    known.chain(unknown.then_some(Run { range, data: true }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(runs: &[(u32, bool)]) -> Vec<u8> {
        let mut told = Runs::default();
        runs.iter().for_each(|(blocks, data)| assert!(told.push(*blocks, *data)));
        told.as_bytes().to_vec()
    }

    #[test]
    fn golden_bytes() {
        let bytes = told(&[(1, true), (2, true), (258, false), (1, true)]);
        assert_eq!(bytes, [3, 0, 0, 0x80, 2, 1, 0, 0, 1, 0, 0, 0x80]);
        assert!(are_runs(&bytes, Extent::new(0, 262 * BLOCK)));
    }

    #[test]
    fn runs_count_from_the_block_that_the_range_begins_in_and_end_with_the_range() {
        let bytes = told(&[(1, false), (1, true), (1, false)]);
        let range = Extent::new(5 * BLOCK + 512, 2 * BLOCK);
        let all: Vec<_> = runs(&bytes, range).collect();
        assert_eq!(
            all,
            [
                Run { range: Extent::new(5 * BLOCK + 512, BLOCK - 512), data: false },
                Run { range: Extent::new(6 * BLOCK, BLOCK), data: true },
                Run { range: Extent::new(7 * BLOCK, 512), data: false },
            ]
        );
        let first: Vec<_> = runs(&told(&[(1, false)]), range).collect();
        assert_eq!(first.len(), 1, "less than was asked for");
    }

    #[test]
    fn what_can_be_no_answer_counts_as_data() {
        let range = Extent::new(0, 4 * BLOCK);
        let all = Run { range, data: true };
        let long = told(&[(5, false)]);
        let many = [1, 0, 0, 0].repeat(RUNS_MAX + 1);
        for bytes in [&[][..], &[1, 0, 0], &[0, 0, 0, 0], &long, &[1, 0, 0, 0, 1], &many] {
            assert!(!are_runs(bytes, range), "{bytes:?}");
            assert_eq!(runs(bytes, range).collect::<Vec<_>>(), [all]);
        }
    }

    #[test]
    fn bounded() {
        let mut runs = Runs::default();
        let taken = (0..1000).take_while(|n| runs.push(1, n % 2 == 0)).count();
        assert_eq!((taken, runs.as_bytes().len()), (RUNS_MAX, Runs::LEN_MAX));
        assert!(runs.push(1, false) && !runs.push(1, true), "of the last kind there is room");
    }
}
