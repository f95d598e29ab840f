//! Which ranges an engine may have had in flight when it died (`docs/invariants.md`, 4).
//!
//! An engine never runs more than [`WRITE_WINDOW`] writes of a connection beyond its oldest one that is not complete
//! everywhere, so the last [`WRITE_WINDOW`] ranges taken from the connection hold all that may be unfinished on
//! another member. They are kept when the connection ends, however many engines die after one another, until an
//! engine has made them equal. What is kept may grow to cover more than was written, never less.

use lh_block::{BLOCK, Extent};
use lh_wire::WRITE_WINDOW;

/// Ranges kept of dead connections before they are joined: 64 connections' worth, 256 KiB of memory.
const KEPT_MAX: usize = 64 * WRITE_WINDOW;

/// Ranges in one report, of either kind: as JSON they take some 45 bytes each, and two reports and a chain of 250
/// snapshots have to fit a message ([`lh_wire::MAX_PAYLOAD`]). A coarser report costs comparisons, nothing else.
pub(super) const REPORTED_MAX: usize = 4096;

/// The last writes of one live connection.
#[derive(Debug)]
pub(super) struct Window {
    ranges: Box<[Extent; WRITE_WINDOW]>,
    taken: usize,
}

impl Window {
    pub(super) fn new() -> Self {
        Self { ranges: Box::new([Extent::default(); WRITE_WINDOW]), taken: 0 }
    }

    /// A write of this range was taken from the connection.
    pub(super) const fn push(&mut self, range: Extent) {
        self.ranges[self.taken % WRITE_WINDOW] = range;
        self.taken += 1;
    }

    /// Everything taken from the connection is complete everywhere.
    pub(super) const fn clear(&mut self) {
        self.taken = 0;
    }

    fn ranges(&self) -> &[Extent] {
        &self.ranges[..self.taken.min(WRITE_WINDOW)]
    }
}

/// The ranges that dead connections left.
#[derive(Debug, Default)]
pub(super) struct InDoubt {
    kept: Vec<Extent>,
}

impl InDoubt {
    /// The connection ended.
    pub(super) fn keep(&mut self, window: &Window) {
        self.kept.extend_from_slice(window.ranges());
        if self.kept.len() > KEPT_MAX {
            self.join();
        }
    }

    /// An engine made all of it equal.
    pub(super) fn resolve(&mut self) {
        self.kept = Vec::new();
    }

    /// Sorted, disjoint ranges inside a volume of `size` bytes, at most [`REPORTED_MAX`].
    pub(super) fn report(&self, size: u64) -> Vec<Extent> {
        let volume = Extent::new(0, size);
        let ranges = few(self.kept.clone(), BLOCK, REPORTED_MAX);
        ranges.into_iter().filter_map(|r| r.intersection(volume)).collect()
    }

    /// Halves the number of ranges.
    fn join(&mut self) {
        self.kept = few(std::mem::take(&mut self.kept), BLOCK, KEPT_MAX / 2);
    }
}

/// Sorted, disjoint ranges that cover the given ones, at most `most`: widened, if need be, to ever larger multiples of
/// `unit` (a power of two) until enough of them touch.
pub(super) fn few(ranges: Vec<Extent>, unit: u64, most: usize) -> Vec<Extent> {
    let mut unit = unit;
    let mut ranges = coalesce(ranges);
    while ranges.len() > most {
        unit *= 2;
        ranges = coalesce(ranges.iter().map(|r| r.widen(unit)).collect());
    }
    ranges
}

/// Sorts, and joins what overlaps or touches.
fn coalesce(mut ranges: Vec<Extent>) -> Vec<Extent> {
    ranges.sort_unstable();
    let mut joined: Vec<Extent> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.offset <= last.end() => {
                last.len = last.end().max(range.end()) - last.offset;
            }
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(n: u64) -> Extent {
        Extent::new(n * BLOCK, BLOCK)
    }

    #[test]
    fn the_last_writes_of_a_connection_are_kept() {
        let mut window = Window::new();
        for n in 0..300 {
            window.push(block(2 * n));
        }
        let mut doubt = InDoubt::default();
        doubt.keep(&window);
        let report = doubt.report(u64::MAX);
        assert_eq!(report.len(), WRITE_WINDOW);
        assert_eq!(report[0], block(2 * 44));
        assert_eq!(report[255], block(2 * 299));
    }

    #[test]
    fn touching_ranges_are_reported_as_one_and_clipped_to_the_volume() {
        let mut window = Window::new();
        for n in [3, 2, 4, 9] {
            window.push(block(n));
        }
        let mut doubt = InDoubt::default();
        doubt.keep(&window);
        assert_eq!(doubt.report(9 * BLOCK), [Extent::new(2 * BLOCK, 3 * BLOCK)]);
        doubt.resolve();
        assert!(doubt.report(u64::MAX).is_empty());
    }

    #[test]
    fn a_thousand_dead_connections_cost_bounded_memory_and_lose_no_range() {
        let mut doubt = InDoubt::default();
        let mut written = Vec::new();
        let mut n: u64 = 1;
        for _ in 0..1000 {
            let mut window = Window::new();
            for _ in 0..WRITE_WINDOW {
                n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let range = block(n >> 30 & 0xff_ffff);
                window.push(range);
                written.push(range);
            }
            doubt.keep(&window);
            assert!(doubt.kept.len() <= KEPT_MAX);
        }
        let report = doubt.report(u64::MAX);
        assert!(report.len() <= REPORTED_MAX);
        for range in written {
            let at = report.partition_point(|r| r.offset <= range.offset);
            assert!(at > 0 && report[at - 1].contains(range), "{range}");
        }
    }
}
