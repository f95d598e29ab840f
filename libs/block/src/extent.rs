//! A range of bytes of a volume.

use serde::{Deserialize, Serialize};

/// Bytes in a block: the unit of layers, of the extent index and of everything a replica is sent
/// (Longhorn's `VolumeSectorSize`).
pub const BLOCK: u64 = 4096;

/// Bytes in a logical sector of the device (Longhorn's `ReplicaSectorSize`).
pub const SECTOR: u64 = 512;

/// A half-open range of bytes, `offset .. offset + len`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Extent {
    /// The range of `len` bytes from `offset` on.
    pub const fn new(offset: u64, len: u64) -> Self {
        Self { offset, len }
    }

    /// First byte behind the range. Saturates, so that a hostile range never wraps round.
    pub const fn end(self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// True if the range holds no byte.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// True if both ranges share at least one byte.
    pub const fn overlaps(self, other: Self) -> bool {
        self.offset < other.end() && other.offset < self.end() && !self.is_empty() && !other.is_empty()
    }

    /// True if `other` lies wholly inside this range.
    pub const fn contains(self, other: Self) -> bool {
        self.offset <= other.offset && other.end() <= self.end()
    }

    /// The shared part of both ranges, if there is any.
    pub fn intersection(self, other: Self) -> Option<Self> {
        let offset = self.offset.max(other.offset);
        let end = self.end().min(other.end());
        (offset < end).then(|| Self::new(offset, end - offset))
    }

    /// The smallest range of whole units of `unit` bytes (a power of two) around this one.
    pub const fn widen(self, unit: u64) -> Self {
        let start = self.offset & !(unit - 1);
        let end = match self.end().checked_add(unit - 1) {
            Some(end) => end & !(unit - 1),
            None => !(unit - 1),
        };
        Self::new(start, end - start)
    }

    /// The whole units of `unit` bytes (a power of two) inside this range; empty if there is none.
    pub const fn narrow(self, unit: u64) -> Self {
        let start = match self.offset.checked_add(unit - 1) {
            Some(start) => start & !(unit - 1),
            None => return Self::new(self.offset, 0),
        };
        let end = self.end() & !(unit - 1);
        if end > start { Self::new(start, end - start) } else { Self::new(start, 0) }
    }

    /// True if start and length are multiples of `unit` (a power of two).
    pub const fn is_aligned(self, unit: u64) -> bool {
        (self.offset | self.len) & (unit - 1) == 0
    }
}

impl std::fmt::Display for Extent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}+{}", self.offset, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widen_and_narrow_keep_to_units() {
        let e = Extent::new(100, 5000);
        assert_eq!(e.widen(BLOCK), Extent::new(0, 8192));
        assert!(e.narrow(BLOCK).is_empty());
        assert_eq!(Extent::new(1, 3 * BLOCK).narrow(BLOCK), Extent::new(BLOCK, 2 * BLOCK));
    }

    #[test]
    fn ranges_at_the_end_of_the_number_space_do_not_wrap() {
        let e = Extent::new(u64::MAX - 10, 100);
        assert_eq!(e.end(), u64::MAX);
        assert!(e.widen(BLOCK).len <= BLOCK);
        assert!(e.narrow(BLOCK).is_empty());
        assert!(!e.overlaps(Extent::new(0, 10)));
    }

    #[test]
    fn empty_ranges_overlap_nothing() {
        assert!(!Extent::new(5, 0).overlaps(Extent::new(0, 10)));
        assert!(Extent::new(5, 1).overlaps(Extent::new(0, 6)));
        assert!(!Extent::new(6, 1).overlaps(Extent::new(0, 6)));
    }
}
