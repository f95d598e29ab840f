//! The intent bitmap's state machine (`docs/invariants.md`, 4): a chunk's bit is on stable storage before the first
//! write into the chunk reaches the store.
//!
//! Marks that are asked for while a record is on its way are gathered for the next one. Clears are lazy: they ride
//! along with the next marks, or go by themselves after a while; until a clear is *put out*, the bit counts as durable
//! and a new write costs nothing. From then on it does not count, whatever becomes of the record.

use std::ops::Range;

use lh_block::Extent;

use super::doubt::{REPORTED_MAX, few};
use super::event::Record;

/// How long clears wait for company: a bit that stays a second too long costs a comparison after a power cut.
const CLEAR_DELAY_NS: u64 = 1_000_000_000;

/// A fixed number of bits.
#[derive(Clone, Debug, Default)]
struct Bits(Vec<u64>);

impl Bits {
    fn resize(&mut self, bits: u64) {
        let words = usize::try_from(bits.div_ceil(64)).unwrap_or(usize::MAX);
        self.0.resize(words, 0);
    }

    fn place(n: u64) -> (usize, u64) {
        (usize::try_from(n / 64).unwrap_or(usize::MAX), 1 << (n % 64))
    }

    fn get(&self, n: u64) -> bool {
        let (word, bit) = Self::place(n);
        self.0.get(word).is_some_and(|w| w & bit != 0)
    }

    fn set(&mut self, n: u64, on: bool) {
        let (word, bit) = Self::place(n);
        if let Some(w) = self.0.get_mut(word) {
            *w = if on { *w | bit } else { *w & !bit };
        }
    }
}

/// What became of the marks asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// All bits are durable: go on.
    Durable,
    /// Wait for the record that is on its way, or the next.
    Wait,
}

/// The bitmap as it should be, as it is on disk, and what lies between.
#[derive(Debug)]
pub(super) struct IntentMap {
    chunk: u64,
    /// The bit is wanted: reported to engines.
    marked: Bits,
    /// The bit is certainly set on disk.
    durable: Bits,
    /// The chunk is in `pending` or `saving`.
    asked: Bits,
    /// To be marked by the next record.
    pending: Vec<u64>,
    /// Marked by the record on its way.
    saving: Option<Vec<u64>>,
    /// Maybe to be cleared by the next record: checked again when it is made.
    clears: Vec<u64>,
    clear_at: Option<u64>,
}

impl IntentMap {
    /// The bitmap of a volume of `size` bytes as the directory has it.
    pub(super) fn new(chunk: u64, size: u64, marked: &[Extent]) -> Self {
        let mut map = Self {
            chunk,
            marked: Bits::default(),
            durable: Bits::default(),
            asked: Bits::default(),
            pending: Vec::new(),
            saving: None,
            clears: Vec::new(),
            clear_at: None,
        };
        map.resize(size);
        for range in marked {
            for n in map.chunks(*range) {
                map.marked.set(n, true);
                map.durable.set(n, true);
            }
        }
        map
    }

    /// The volume has this size now. Bits stay as they are.
    pub(super) fn resize(&mut self, size: u64) {
        for bits in [&mut self.marked, &mut self.durable, &mut self.asked] {
            bits.resize(size.div_ceil(self.chunk));
        }
    }

    /// True while a record is on its way.
    pub(super) const fn is_saving(&self) -> bool {
        self.saving.is_some()
    }

    pub(super) const fn chunk(&self) -> u64 {
        self.chunk
    }

    fn chunks(&self, range: Extent) -> Range<u64> {
        if range.is_empty() {
            return 0..0;
        }
        range.offset / self.chunk..range.end().div_ceil(self.chunk)
    }

    /// A write into the range comes.
    pub(super) fn mark(&mut self, range: Extent) -> Mark {
        let mut answer = Mark::Durable;
        for n in self.chunks(range) {
            self.marked.set(n, true);
            if self.durable.get(n) {
                continue;
            }
            answer = Mark::Wait;
            if !self.asked.get(n) {
                self.asked.set(n, true);
                self.pending.push(n);
            }
        }
        answer
    }

    /// True if the chunk's bit is wanted.
    pub(super) fn is_marked(&self, n: u64) -> bool {
        self.marked.get(n)
    }

    /// True if every bit of the range is durable.
    pub(super) fn is_durable(&self, range: Extent) -> bool {
        self.chunks(range).all(|n| self.durable.get(n))
    }

    /// True if some bit of the range is neither durable nor on its way: its record failed.
    pub(super) fn is_lost(&self, range: Extent) -> bool {
        self.chunks(range).any(|n| !self.durable.get(n) && !self.asked.get(n))
    }

    /// Takes back the marks of the chunks wholly inside the range that `busy` does not hold.
    pub(super) fn clear(&mut self, now_ns: u64, range: Extent, busy: impl Fn(Extent) -> bool) {
        let first = range.offset.div_ceil(self.chunk);
        for n in first..range.end() / self.chunk {
            if !self.marked.get(n) || busy(Extent::new(n * self.chunk, self.chunk)) {
                continue;
            }
            self.marked.set(n, false);
            if self.durable.get(n) {
                self.clears.push(n);
                self.clear_at.get_or_insert(now_ns.saturating_add(CLEAR_DELAY_NS));
            }
        }
    }

    /// When [`Self::next_record`] would have something to say that it has not now.
    pub(super) const fn wake_at(&self) -> Option<u64> {
        if self.saving.is_some() { None } else { self.clear_at }
    }

    /// The next record, if there is one to write now. At most one is on its way.
    pub(super) fn next_record(&mut self, now_ns: u64) -> Option<Record> {
        let clears_due = self.clear_at.is_some_and(|at| at <= now_ns);
        if self.saving.is_some() || (self.pending.is_empty() && !clears_due) {
            return None;
        }
        let mark = std::mem::take(&mut self.pending);
        let mut clear = std::mem::take(&mut self.clears);
        clear.retain(|n| !self.marked.get(*n) && self.durable.get(*n));
        clear.sort_unstable();
        clear.dedup();
        self.clear_at = None;
        if mark.is_empty() && clear.is_empty() {
            return None;
        }
        for n in &clear {
            self.durable.set(*n, false);
        }
        self.saving = Some(mark.clone());
        Some(Record::Intent { mark, clear })
    }

    /// The record on its way ended.
    pub(super) fn saved(&mut self, now_ns: u64, durable: bool) {
        for n in self.saving.take().into_iter().flatten() {
            self.asked.set(n, false);
            self.durable.set(n, durable);
            if !durable {
                self.marked.set(n, false);
            } else if !self.marked.get(n) {
                self.clears.push(n);
                self.clear_at.get_or_insert(now_ns.saturating_add(CLEAR_DELAY_NS));
            }
        }
    }

    /// Marked ranges of a volume of `size` bytes: whole chunks, the last cut at the volume's end, ascending, at most
    /// [`REPORTED_MAX`]: beyond that chunks between marked ones are reported, too.
    pub(super) fn report(&self, size: u64) -> Vec<Extent> {
        let mut ranges: Vec<Extent> = Vec::new();
        for (at, word) in self.marked.0.iter().enumerate().filter(|(_, w)| **w != 0) {
            for bit in (0..64).filter(|bit| word & 1 << bit != 0) {
                let offset = (at as u64 * 64 + bit) * self.chunk;
                match ranges.last_mut() {
                    Some(last) if last.end() == offset => last.len += self.chunk,
                    _ => ranges.push(Extent::new(offset, self.chunk)),
                }
            }
        }
        let volume = Extent::new(0, size);
        let ranges = few(ranges, self.chunk, REPORTED_MAX);
        ranges.into_iter().filter_map(|r| r.intersection(volume)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = 4 << 20;

    fn map(marked: &[Extent]) -> IntentMap {
        IntentMap::new(CHUNK, 64 * CHUNK, marked)
    }

    fn at(n: u64) -> Extent {
        Extent::new(n * CHUNK + 4096, 4096)
    }

    fn whole(n: u64) -> Extent {
        Extent::new(n * CHUNK, CHUNK)
    }

    fn intent(mark: &[u64], clear: &[u64]) -> Option<Record> {
        Some(Record::Intent { mark: mark.to_vec(), clear: clear.to_vec() })
    }

    #[test]
    fn marks_are_grouped_while_a_record_is_on_its_way() {
        let mut m = map(&[]);
        assert_eq!(m.mark(at(3)), Mark::Wait);
        assert_eq!(m.next_record(0), intent(&[3], &[]));
        assert_eq!(m.mark(at(3)), Mark::Wait);
        assert_eq!(m.mark(at(5)), Mark::Wait);
        assert_eq!(m.mark(Extent::new(6 * CHUNK - 4096, 8192)), Mark::Wait);
        assert_eq!(m.next_record(0), None, "one at a time");
        m.saved(0, true);
        assert_eq!(m.mark(at(3)), Mark::Durable);
        assert!(!m.is_durable(at(5)));
        assert_eq!(m.next_record(0), intent(&[5, 6], &[]));
        m.saved(0, true);
        assert!(m.is_durable(Extent::new(5 * CHUNK, 2 * CHUNK)));
        assert_eq!(m.report(u64::MAX), [whole(3), Extent::new(5 * CHUNK, 2 * CHUNK)]);
    }

    #[test]
    fn a_clear_is_lazy_and_a_write_before_it_leaves_costs_nothing() {
        let mut m = map(&[whole(1), whole(2)]);
        m.clear(0, Extent::new(CHUNK, 2 * CHUNK), |r| r.overlaps(at(2)));
        assert_eq!(m.report(u64::MAX), [whole(2)], "the busy chunk stays");
        assert_eq!(m.next_record(5), None);
        assert_eq!(m.wake_at(), Some(CLEAR_DELAY_NS));
        assert_eq!(m.mark(at(1)), Mark::Durable);
        assert_eq!(m.next_record(CLEAR_DELAY_NS), None, "marked again");
    }

    #[test]
    fn from_the_moment_a_clear_leaves_the_bit_does_not_count() {
        let mut m = map(&[whole(1)]);
        m.clear(0, whole(1), |_| false);
        assert_eq!(m.next_record(CLEAR_DELAY_NS), intent(&[], &[1]));
        assert_eq!(m.mark(at(1)), Mark::Wait);
        m.saved(CLEAR_DELAY_NS, true);
        assert!(!m.is_durable(at(1)));
        assert_eq!(m.next_record(CLEAR_DELAY_NS), intent(&[1], &[]));
    }

    #[test]
    fn a_chunk_cleared_while_its_mark_is_on_its_way_is_cleared_later() {
        let mut m = map(&[]);
        m.mark(at(1));
        m.next_record(0);
        m.clear(0, whole(1), |_| false);
        m.saved(0, true);
        assert_eq!(m.next_record(CLEAR_DELAY_NS), intent(&[], &[1]));
    }

    #[test]
    fn a_part_of_a_chunk_clears_nothing() {
        let mut m = map(&[whole(1)]);
        m.clear(0, Extent::new(CHUNK, CHUNK - 4096), |_| false);
        assert_eq!(m.report(u64::MAX), [whole(1)]);
    }

    #[test]
    fn a_report_is_bounded_and_covers_every_mark() {
        let mut m = IntentMap::new(CHUNK, 100_000 * CHUNK, &[]);
        (0..50_000).for_each(|n| _ = m.mark(at(2 * n)));
        let report = m.report(100_000 * CHUNK);
        assert!(report.len() <= REPORTED_MAX);
        for n in 0..50_000 {
            let at = report.partition_point(|r| r.offset <= whole(2 * n).offset);
            assert!(at > 0 && report[at - 1].contains(whole(2 * n)), "{n}");
        }
    }

    #[test]
    fn a_failed_record_leaves_nothing_marked() {
        let mut m = map(&[]);
        m.mark(at(1));
        m.next_record(0);
        m.mark(at(2));
        m.saved(0, false);
        assert!(m.is_lost(at(1)) && !m.is_lost(at(2)));
        assert_eq!(m.report(u64::MAX), [whole(2)]);
        assert_eq!(m.mark(at(1)), Mark::Wait);
        assert_eq!(m.next_record(0), intent(&[2, 1], &[]));
    }
}
