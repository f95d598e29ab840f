//! What the benchmarks drive: the real state machines, with members and disks that answer at once. The criterion
//! benchmarks in `benches/` take their time, `count-instructions` counts what they execute.
//!
//! Everything here does one request from its arrival to its answer, single-threaded, so that a figure is the cost of
//! the code and of nothing else. The volume as a whole, beside its peers, is what `scripts/bench` measures.

mod index;
mod nbd;
mod replica;
mod volume;

pub use index::IndexedStore;
pub use nbd::NbdStream;
pub use replica::ReplicaRig;
pub use volume::VolumeRig;

/// Offsets of 4 KiB blocks all over a volume: the same sequence at every run, without a visible pattern.
#[derive(Clone, Debug)]
pub struct Places {
    blocks: u64,
    state: u64,
}

impl Places {
    /// Places in a volume of so many bytes.
    ///
    /// # Panics
    /// If it has less than a block.
    pub fn new(size: u64) -> Self {
        assert!(size >= lh_block::BLOCK, "a volume has at least a block");
        Self { blocks: size / lh_block::BLOCK, state: 0x9e37_79b9_7f4a_7c15 }
    }

    /// The next one, in bytes (xorshift64, Marsaglia 2003).
    pub fn next_block(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state % self.blocks * lh_block::BLOCK
    }
}
