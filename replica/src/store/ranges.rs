//! A set of block numbers, kept as ranges: for what is on its way and soon gone again, never for a whole volume.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint ranges that do not touch, by their start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RangeSet(BTreeMap<u64, u64>);

impl RangeSet {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many ranges it takes.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().map(|(start, end)| *start..*end)
    }

    /// True if a block of the range is in the set.
    pub(super) fn overlaps(&self, range: Range<u64>) -> bool {
        self.0.range(..range.end).next_back().is_some_and(|(_, end)| *end > range.start) && !range.is_empty()
    }

    /// The parts of the range that are in the set, ascending.
    pub(super) fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let first = self.0.range(..=range.start).next_back().filter(|(_, end)| **end > range.start);
        let from = first.map_or(range.start, |(start, _)| *start);
        // An empty range would make BTreeMap panic if its ends were the wrong way round.
        self.0
            .range(from..range.end.max(from))
            .map(move |(start, end)| (*start).max(range.start)..(*end).min(range.end))
            .filter(|part| !part.is_empty())
    }

    pub(super) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        // Everything that overlaps or touches becomes part of the new range.
        while let Some((&s, &e)) = self.0.range(..=end).next_back() {
            if e < start {
                break;
            }
            self.0.remove(&s);
            start = start.min(s);
            end = end.max(e);
        }
        self.0.insert(start, end);
    }

    pub(super) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        while let Some((&s, &e)) = self.0.range(..range.end).next_back() {
            if e <= range.start {
                break;
            }
            self.0.remove(&s);
            if e > range.end {
                self.0.insert(range.end, e);
            }
            if s < range.start {
                self.0.insert(s, range.start);
                break;
            }
        }
    }

    /// From the first block to the last, `None` if there are none.
    pub(super) fn hull(&self) -> Option<Range<u64>> {
        let (start, end) = (self.0.first_key_value()?.0, self.0.last_key_value()?.1);
        Some(*start..*end)
    }

    /// Takes everything out.
    pub(super) fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// Adds all of another set.
    pub(super) fn append(&mut self, other: &Self) {
        for range in other.iter() {
            self.insert(range);
        }
    }

    /// Takes all of another set out.
    pub(super) fn subtract(&mut self, other: &Self) {
        for range in other.iter() {
            self.remove(range);
        }
    }

    /// Takes the first range out, at most `max` blocks of it.
    pub(super) fn take_first(&mut self, max: u64) -> Option<Range<u64>> {
        let (&start, &end) = self.0.first_key_value()?;
        let taken = start..end.min(start.saturating_add(max));
        self.remove(taken.clone());
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn neighbours_melt_and_pieces_come_out() {
        let mut set = RangeSet::default();
        set.insert(10..20);
        set.insert(20..30);
        set.insert(40..50);
        set.remove(12..14);
        assert_eq!(set.iter().collect::<Vec<_>>(), [10..12, 14..30, 40..50]);
        assert_eq!(set.within(11..45).collect::<Vec<_>>(), [11..12, 14..30, 40..45]);
        assert!(set.overlaps(29..40) && !set.overlaps(30..40) && !set.overlaps(15..15));
        assert_eq!(set.take_first(1), Some(10..11));
        set.insert(0..100);
        assert_eq!(set.iter().count(), 1);
        assert!(set.iter().all(|range| range == (0..100)));
    }

    proptest! {
        #[test]
        fn like_a_set_of_numbers(ops in prop::collection::vec((any::<bool>(), 0_u64..64, 0_u64..20), 0..60)) {
            let (mut set, mut model) = (RangeSet::default(), BTreeSet::new());
            for (add, start, len) in ops {
                let range = start..start + len;
                if add {
                    set.insert(range.clone());
                    model.extend(range.clone());
                } else {
                    set.remove(range.clone());
                    model.retain(|n| !range.contains(n));
                }
                let all: Vec<u64> = set.iter().flatten().collect();
                prop_assert_eq!(&all, &model.iter().copied().collect::<Vec<_>>());
                let inside: Vec<u64> = set.within(range.clone()).flatten().collect();
                prop_assert_eq!(inside, model.range(range.start..range.end).copied().collect::<Vec<_>>());
                prop_assert_eq!(set.overlaps(range.clone()), model.range(range).next().is_some());
                let ranges: Vec<_> = set.iter().collect();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
            }
        }
    }
}
