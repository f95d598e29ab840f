//! A byte for each block of a volume: which layer holds it (the extent index), or what a zero map says of it.
//!
//! The volume is cut into chunks of 16 MiB. A chunk is one value, or a sorted list of the places where the value changes
//! (3 bytes each), or a byte per block, whichever is smallest. The table of chunks, 16 bytes each, is cut into leaves
//! that are made when something is put there: 1 MiB per TiB in use, next to nothing for what is empty. Reading allocates
//! nothing; a change allocates only when the number of runs in a chunk changes. No two neighbouring runs of a chunk have
//! the same value.

use std::ops::Range;

/// Blocks in a chunk.
const CHUNK: usize = 4096;
const CHUNK_U64: u64 = CHUNK as u64;
/// Where a chunk ends.
const END: u16 = 4096;
const _: () = assert!(CHUNK == END as usize);

/// Bytes of a change of value in a list of runs: block number (little-endian u16), value.
const RUN_BYTES: usize = 3;
/// Runs that take less space than a byte per block.
const RUNS_MAX: usize = (CHUNK - 1) / RUN_BYTES;
/// A byte per block goes back to runs only below this: a chunk at the limit must not be rebuilt at each change.
const RUNS_AGAIN: usize = RUNS_MAX / 2;

/// One chunk. `Packed` of [`CHUNK`] bytes has a byte per block; shorter ones hold runs: the numbers of their first
/// blocks, then their values. The first run begins at block 0.
#[derive(Clone, Debug)]
enum Chunk {
    Uniform(u8),
    Packed(Box<[u8]>),
}

// The table's price: 16 bytes for 16 MiB of volume.
const _: () = assert!(size_of::<Chunk>() == 16);

/// A list of runs while it is made.
struct Runs {
    count: usize,
    starts: [u16; RUNS_MAX],
    values: [u8; RUNS_MAX],
}

impl Runs {
    const fn new() -> Self {
        Self { count: 0, starts: [0; RUNS_MAX], values: [0; RUNS_MAX] }
    }

    /// Adds a run behind the last. `false`: no room.
    fn push(&mut self, start: u16, value: u8) -> bool {
        if self.count > 0 && self.values[self.count - 1] == value {
            return true;
        }
        if self.count == RUNS_MAX {
            return false;
        }
        self.starts[self.count] = start;
        self.values[self.count] = value;
        self.count += 1;
        true
    }

    fn store(&self, chunk: &mut Chunk) {
        if self.count == 1 {
            *chunk = Chunk::Uniform(self.values[0]);
            return;
        }
        let len = self.count * RUN_BYTES;
        let mut fresh;
        let bytes: &mut [u8] = match chunk {
            Chunk::Packed(old) if old.len() == len => old,
            _ => {
                fresh = Chunk::Packed(vec![0; len].into_boxed_slice());
                std::mem::swap(chunk, &mut fresh);
                match chunk {
                    Chunk::Packed(new) => new,
                    Chunk::Uniform(_) => return,
                }
            }
        };
        let (starts, values) = bytes.split_at_mut(self.count * 2);
        for (slot, start) in starts.chunks_exact_mut(2).zip(&self.starts) {
            slot.copy_from_slice(&start.to_le_bytes());
        }
        values.copy_from_slice(&self.values[..self.count]);
    }
}

impl Chunk {
    /// The value at a block, and where its run ends.
    fn run_at(&self, block: u16) -> (u8, u16) {
        match self {
            Self::Uniform(value) => (*value, END),
            Self::Packed(bytes) if bytes.len() == CHUNK => {
                let from = usize::from(block);
                let value = bytes[from];
                let len = bytes[from..].iter().take_while(|b| **b == value).count();
                (value, block + u16::try_from(len).unwrap_or(END))
            }
            Self::Packed(bytes) => {
                let (starts, values) = bytes.split_at(bytes.len() / RUN_BYTES * 2);
                let run = run_of(starts, block);
                (values[run], run_start(starts, run + 1))
            }
        }
    }

    /// True if a range holds nothing but a value.
    fn holds(&self, start: u16, end: u16, value: u8) -> bool {
        if let Self::Packed(bytes) = self
            && bytes.len() == CHUNK
        {
            return bytes[usize::from(start)..usize::from(end)].iter().all(|byte| *byte == value);
        }
        let (held, until) = self.run_at(start);
        held == value && until >= end
    }

    /// Sets ascending, disjoint, non-empty ranges to a value.
    fn overlay(&mut self, ranges: &[(u16, u16)], value: u8) {
        if ranges.iter().all(|(start, end)| self.holds(*start, *end, value)) {
            return;
        }
        if let Self::Packed(bytes) = self
            && bytes.len() == CHUNK
        {
            let mut fewer = false;
            for range in ranges {
                fewer |= fill(bytes, *range, value);
            }
            if fewer {
                self.shrink();
            }
            return;
        }
        if let [(start, end)] = ranges {
            if !self.splice(*start, *end, value) {
                self.expand();
                self.overlay(ranges, value);
            }
            return;
        }
        let mut runs = Runs::new();
        if self.merge(ranges, value, &mut runs) {
            runs.store(self);
        } else {
            self.expand();
            self.overlay(ranges, value);
        }
    }

    /// Sets one range of a chunk that is uniform or has runs: looks at no more than the runs that it meets, and moves the
    /// others as bytes. `false`: too many runs, nothing was changed.
    fn splice(&mut self, start: u16, end: u16, value: u8) -> bool {
        let uniform;
        let old: &[u8] = match &*self {
            Self::Uniform(held) => {
                uniform = [0, 0, *held];
                &uniform
            }
            Self::Packed(bytes) => bytes,
        };
        let count = old.len() / RUN_BYTES;
        let (starts, values) = old.split_at(2 * count);
        let (gone, fresh) = cut(starts, values, start, end, value);
        let fresh = fresh.as_slice();
        let left = count - gone.len() + fresh.len();
        if left > RUNS_MAX {
            return false;
        }
        if left == 1 {
            *self = Self::Uniform(value);
            return true;
        }
        if gone.len() == fresh.len()
            && let Self::Packed(bytes) = self
        {
            let (starts, values) = bytes.split_at_mut(2 * count);
            for (i, (start, value)) in gone.zip(fresh) {
                starts[2 * i..2 * i + 2].copy_from_slice(&start.to_le_bytes());
                values[i] = *value;
            }
            return true;
        }
        let mut new = Vec::with_capacity(left * RUN_BYTES);
        new.extend_from_slice(&starts[..2 * gone.start]);
        fresh.iter().for_each(|(start, _)| new.extend_from_slice(&start.to_le_bytes()));
        new.extend_from_slice(&starts[2 * gone.end..]);
        new.extend_from_slice(&values[..gone.start]);
        new.extend(fresh.iter().map(|(_, value)| *value));
        new.extend_from_slice(&values[gone.end..]);
        *self = Self::Packed(new.into_boxed_slice());
        true
    }

    /// The runs of this chunk with the ranges laid over them. `false`: too many.
    fn merge(&self, ranges: &[(u16, u16)], value: u8, runs: &mut Runs) -> bool {
        let mut ranges = ranges.iter().copied().peekable();
        let mut at = 0;
        while usize::from(at) < CHUNK {
            let fits = match ranges.peek() {
                Some((start, end)) if *start == at => {
                    let fits = runs.push(at, value);
                    at = *end;
                    ranges.next();
                    fits
                }
                next => {
                    let (held, end) = self.run_at(at);
                    let fits = runs.push(at, held);
                    at = next.map_or(end, |(start, _)| end.min(*start));
                    fits
                }
            };
            if !fits {
                return false;
            }
        }
        true
    }

    fn remap(&mut self, values: &[u8; 256]) {
        let new = |value: &mut u8| *value = values[usize::from(*value)];
        match self {
            Self::Uniform(value) => new(value),
            Self::Packed(bytes) if bytes.len() == CHUNK => {
                bytes.iter_mut().for_each(new);
                self.shrink();
            }
            Self::Packed(bytes) => {
                let count = bytes.len() / RUN_BYTES;
                bytes[2 * count..].iter_mut().for_each(new);
                // Neighbours may have become equal.
                let mut runs = Runs::new();
                if self.merge(&[], 0, &mut runs) {
                    runs.store(self);
                }
            }
        }
    }

    /// Turns into a byte per block.
    fn expand(&mut self) {
        let mut bytes = vec![0; CHUNK].into_boxed_slice();
        let mut at = 0;
        while usize::from(at) < CHUNK {
            let (value, end) = self.run_at(at);
            bytes[usize::from(at)..usize::from(end)].fill(value);
            at = end;
        }
        *self = Self::Packed(bytes);
    }

    /// Turns a byte per block into runs if there are few.
    fn shrink(&mut self) {
        let Self::Packed(bytes) = &*self else { return };
        if is_worth_runs(bytes) {
            let mut runs = Runs::new();
            if self.merge(&[], 0, &mut runs) {
                runs.store(self);
            }
        }
    }
}

/// The first block of a run, from a chunk's list of starts; behind the last run, the end of the chunk.
fn run_start(starts: &[u8], run: usize) -> u16 {
    starts.get(2 * run..2 * run + 2).map_or(END, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
}

/// The last run that begins at or before a block.
fn run_of(starts: &[u8], block: u16) -> usize {
    let (mut low, mut high) = (0, starts.len() / 2);
    while high - low > 1 {
        let middle = usize::midpoint(low, high);
        if run_start(starts, middle) <= block { low = middle } else { high = middle }
    }
    low
}

/// True if a byte per block changes rarely. Asked after every write that takes a change away: it looks no further than to the one too
/// many, and at many bytes at once.
fn is_worth_runs(bytes: &[u8]) -> bool {
    const AT_ONCE: usize = 128;
    let mut changes = 0;
    bytes.chunks(AT_ONCE).zip(bytes[1..].chunks(AT_ONCE)).all(|(blocks, next)| {
        let differ: u8 = blocks.iter().zip(next).map(|(a, b)| u8::from(a != b)).sum();
        changes += usize::from(differ);
        changes < RUNS_AGAIN
    })
}

/// Sets a range of a byte per block. True if the chunk has fewer runs afterwards.
fn fill(bytes: &mut [u8], (start, end): (u16, u16), value: u8) -> bool {
    let (start, end) = (usize::from(start), usize::from(end));
    let around = start.saturating_sub(1)..(end + 1).min(CHUNK);
    let changes = |bytes: &[u8]| bytes[around.clone()].windows(2).filter(|pair| pair[0] != pair[1]).count();
    let before = changes(bytes);
    bytes[start..end].fill(value);
    changes(bytes) < before
}

/// Up to three runs that take the place of others.
struct Fresh {
    count: usize,
    runs: [(u16, u8); 3],
}

impl Fresh {
    fn push(&mut self, start: u16, value: u8) {
        self.runs[self.count] = (start, value);
        self.count += 1;
    }

    fn as_slice(&self) -> &[(u16, u8)] {
        &self.runs[..self.count]
    }
}

/// The numbers of the runs that go, and what comes in their place, if a range takes a value.
fn cut(starts: &[u8], values: &[u8], start: u16, end: u16, value: u8) -> (Range<usize>, Fresh) {
    let (mut first, last) = (run_of(starts, start), run_of(starts, end - 1));
    let mut fresh = Fresh { count: 0, runs: [(0, 0); 3] };
    let begins = run_start(starts, first);
    if begins < start && values[first] != value {
        fresh.push(begins, values[first]);
        fresh.push(start, value);
    } else if begins == start && first > 0 && values[first - 1] == value {
        // The run before it grows.
        first -= 1;
        fresh.push(run_start(starts, first), value);
    } else {
        fresh.push(begins, value);
    }
    let behind = last + 1;
    if run_start(starts, behind) > end {
        if values[last] != value {
            fresh.push(end, values[last]);
        }
        return (first..behind, fresh);
    }
    // The run behind it is taken in if it has the same value.
    let taken = values.get(behind).is_some_and(|next| *next == value);
    (first..behind + usize::from(taken), fresh)
}

/// Chunks in a leaf: 4 GiB of volume, 4 KiB of table.
const LEAF: usize = 256;
const LEAF_BLOCKS: u64 = CHUNK_U64 * LEAF as u64;

type Leaf = [Chunk; LEAF];

/// A byte for each block. See the module's documentation.
#[derive(Clone, Debug)]
pub(super) struct Index {
    blocks: u64,
    /// A leaf that was never made holds value 0.
    leaves: Vec<Option<Box<Leaf>>>,
}

impl Index {
    /// An index of so many blocks, all of value 0.
    pub(super) fn new(blocks: u64) -> Self {
        let leaves = usize::try_from(blocks.div_ceil(LEAF_BLOCKS)).unwrap_or(usize::MAX);
        Self { blocks, leaves: vec![None; leaves] }
    }

    /// There are so many blocks from now on, more than before; the new ones have value 0.
    pub(super) fn grow(&mut self, blocks: u64) {
        self.leaves.resize(usize::try_from(blocks.div_ceil(LEAF_BLOCKS)).unwrap_or(usize::MAX), None);
        self.blocks = blocks;
    }

    /// Replaces each value by another. 0 stays 0.
    pub(super) fn remap(&mut self, values: &[u8; 256]) {
        for chunk in self.leaves.iter_mut().flatten().flat_map(|leaf| leaf.iter_mut()) {
            chunk.remap(values);
        }
    }

    /// True if all blocks have value 0.
    pub(super) fn is_zero(&self) -> bool {
        let zero = |leaf: &Leaf| leaf.iter().all(|chunk| matches!(chunk, Chunk::Uniform(0)));
        self.leaves.iter().flatten().all(|leaf| zero(leaf))
    }

    /// The value at a block and where its run ends within the chunk, or within the leaf that was never made.
    fn run_at(&self, block: u64) -> (u8, u64) {
        let (leaf, chunk) = place(block);
        match self.leaves.get(leaf) {
            Some(Some(held)) => {
                let base = block - block % CHUNK_U64;
                let (value, end) = held[chunk].run_at(short(block - base));
                (value, base + u64::from(end))
            }
            Some(None) => (0, (leaf as u64 + 1) * LEAF_BLOCKS),
            None => (0, u64::MAX),
        }
    }

    /// The runs of equal values in a range of blocks, ascending and without gaps; neighbours differ.
    pub(super) fn runs(&self, range: Range<u64>) -> IndexRuns<'_> {
        IndexRuns { index: self, at: range.start, end: range.end.min(self.blocks) }
    }

    /// Sets a range of blocks.
    pub(super) fn set(&mut self, range: Range<u64>, value: u8) {
        self.set_all(std::iter::once(range), value);
    }

    /// Sets ascending, disjoint ranges of blocks: cheaper than one after another, since each chunk is changed once.
    pub(super) fn set_all(&mut self, ranges: impl Iterator<Item = Range<u64>>, value: u8) {
        let mut of = None;
        let mut list: Batch = Batch::new();
        for range in ranges {
            let end = range.end.min(self.blocks);
            let mut at = range.start;
            while at < end {
                let chunk = at / CHUNK_U64;
                let base = chunk * CHUNK_U64;
                let until = end.min(base + CHUNK_U64);
                if of != Some(chunk) || list.is_full() {
                    self.overlay(of, &mut list, value);
                    of = Some(chunk);
                }
                list.push(at - base, until - base);
                at = until;
            }
        }
        self.overlay(of, &mut list, value);
    }

    fn overlay(&mut self, chunk: Option<u64>, list: &mut Batch, value: u8) {
        const ZERO: Chunk = Chunk::Uniform(0);
        let Some(first) = chunk.map(|chunk| chunk * CHUNK_U64) else { return };
        let (leaf, chunk) = place(first);
        if let Some(leaf) = self.leaves.get_mut(leaf)
            && (value != 0 || leaf.is_some())
        {
            leaf.get_or_insert_with(|| Box::new([ZERO; LEAF]))[chunk].overlay(list.as_slice(), value);
        }
        list.len = 0;
    }

    /// Bytes that the index takes, with what the allocator adds to each piece (glibc: 16-byte steps, 8 of them its own).
    #[cfg(test)]
    pub(super) fn heap_bytes(&self) -> usize {
        let piece = |bytes: usize| (bytes + 8).next_multiple_of(16).max(32);
        let chunks = self.leaves.iter().flatten().flat_map(|leaf| leaf.iter());
        let packed = chunks.map(|chunk| match chunk {
            Chunk::Uniform(_) => 0,
            Chunk::Packed(bytes) => piece(bytes.len()),
        });
        let leaves = self.leaves.iter().flatten().count() * piece(size_of::<Leaf>());
        packed.sum::<usize>() + leaves + piece(self.leaves.capacity() * size_of::<usize>())
    }
}

/// The leaf of a block, and its chunk there.
fn place(block: u64) -> (usize, usize) {
    let chunk = block / CHUNK_U64;
    let leaf = usize::try_from(chunk / LEAF as u64).unwrap_or(usize::MAX);
    (leaf, usize::try_from(chunk % LEAF as u64).unwrap_or(0))
}

/// A place within a chunk.
fn short(block: u64) -> u16 {
    u16::try_from(block).unwrap_or(u16::MAX)
}

/// Ranges of one chunk, gathered: half the blocks of a chunk can begin one.
struct Batch {
    len: usize,
    ranges: [(u16, u16); 128],
}

impl Batch {
    const fn new() -> Self {
        Self { len: 0, ranges: [(0, 0); 128] }
    }

    const fn is_full(&self) -> bool {
        self.len == self.ranges.len()
    }

    fn push(&mut self, start: u64, end: u64) {
        self.ranges[self.len] = (short(start), short(end));
        self.len += 1;
    }

    fn as_slice(&self) -> &[(u16, u16)] {
        &self.ranges[..self.len]
    }
}

/// See [`Index::runs`].
#[derive(Clone, Debug)]
pub(super) struct IndexRuns<'a> {
    index: &'a Index,
    at: u64,
    end: u64,
}

impl Iterator for IndexRuns<'_> {
    type Item = (Range<u64>, u8);

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.end {
            return None;
        }
        let start = self.at;
        let (value, mut until) = self.index.run_at(start);
        while until < self.end {
            let (next, end) = self.index.run_at(until);
            if next != value {
                break;
            }
            until = end;
        }
        self.at = until.min(self.end);
        Some((start..self.at, value))
    }
}

#[cfg(test)]
mod tests;
