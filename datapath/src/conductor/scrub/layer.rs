//! One layer on its way through a scrub: where members hold anything, cut into pieces.

use std::collections::{BTreeMap, VecDeque};

use lh_block::Extent;
use lh_wire::{MAX_DATA, MapPage, VERIFY_MAX};

use crate::message::{LayerRef, MemberId, MemberSet};

/// Bytes of a layer whose pieces are laid out at a time: 65,536 of them, some megabytes of memory. A page may tell of terabytes.
const PART: u64 = 64 << 30;

/// Bytes compared at once, while nobody else wants the disk.
const PIECE: u64 = MAX_DATA as u64;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Layer {
    /// Empty: the head.
    pub(super) name: String,
    pub(super) layer: Option<LayerRef>,
    length: u64,
    /// Only this is looked at.
    part: Option<Extent>,
    /// Everything before this byte is in `ready`, or through.
    next: u64,
    ready: VecDeque<Extent>,
    /// Pages that are asked for have this number; a late one has another.
    pub(super) number: u64,
    asked: MemberSet,
    pages: BTreeMap<MemberId, MapPage>,
}

impl Layer {
    pub(super) fn new(name: String, layer: Option<LayerRef>, length: u64, number: u64) -> Self {
        let (ready, pages) = (VecDeque::new(), BTreeMap::new());
        Self { name, layer, length, part: None, next: 0, ready, number, asked: MemberSet::EMPTY, pages }
    }

    /// A layer of which only one range is looked at.
    pub(super) fn part(name: String, layer: Option<LayerRef>, length: u64, range: Extent) -> Self {
        let mut part = Self { part: Some(range), ..Self::new(name, layer, length, 0) };
        part.rewind(None, 0);
        part
    }

    /// All of it was given out.
    pub(super) fn is_through(&self) -> bool {
        self.next >= self.length && self.ready.is_empty()
    }

    /// A page is wanted of every member: from where on. `None`: not now.
    pub(super) fn wants(&mut self, members: MemberSet) -> Option<u64> {
        let wants = self.ready.is_empty() && self.next < self.length && self.asked.is_empty();
        self.asked = if wants { members } else { self.asked };
        wants.then_some(self.next)
    }

    pub(super) fn heard(&mut self, member: MemberId, page: MapPage) {
        if self.asked.has(member) {
            self.pages.insert(member, page);
        }
    }

    /// Makes pieces of the pages, once all who are still members have told theirs. True if it did.
    pub(super) fn lay_out(&mut self, members: MemberSet) -> bool {
        let waits = self.asked.and(members).iter().any(|m| !self.pages.contains_key(&m));
        if (self.asked.is_empty() && self.pages.is_empty()) || waits {
            return false;
        }
        self.asked = MemberSet::EMPTY;
        let pages = std::mem::take(&mut self.pages);
        let end = pages.values().filter_map(|page| page.next).min().unwrap_or(self.length).min(self.length);
        if pages.is_empty() {
            // Nobody is left of those who were asked: the others are.
            return true;
        }
        let end = end.min((self.next / PART).saturating_add(1).saturating_mul(PART));
        let within = Extent::new(self.next, end.saturating_sub(self.next));
        let held = pages.values().flat_map(|page| &page.ranges).filter_map(|r| r.intersection(within));
        self.ready.extend(windows(held));
        // A page that brings nothing further would be asked for again for ever.
        self.next = if end > self.next { end } else { self.length };
        true
    }

    /// The next piece, at most `most` bytes of it.
    pub(super) fn take(&mut self, most: u64) -> Option<Extent> {
        let mut piece = self.ready.pop_front()?;
        if piece.len > most {
            self.ready.push_front(Extent::new(piece.offset + most, piece.len - most));
            piece.len = most;
        }
        Some(piece)
    }

    /// The piece was not looked at.
    pub(super) fn give_back(&mut self, piece: Extent) {
        self.ready.push_front(piece);
    }

    /// Blocks may have moved from layer to layer: what is not through is looked for anew.
    pub(super) fn rewind(&mut self, to: Option<u64>, number: u64) {
        self.forget_pages(number);
        if let Some(part) = self.part {
            let inside = part.intersection(Extent::new(0, self.length));
            self.ready = inside.into_iter().flat_map(|range| cut(range, PIECE)).collect();
            self.next = self.length;
            return;
        }
        let first = self.ready.iter().map(|r| r.offset).chain(to).min();
        self.next = first.unwrap_or(self.next).min(self.next);
        self.ready.clear();
    }

    /// The member's session is over: its page does not come.
    pub(super) fn lost(&mut self, member: MemberId) {
        self.asked = self.asked.without(member);
        self.pages.remove(&member);
    }

    /// The head has this name from now on.
    pub(super) fn became(&mut self, layer: LayerRef, name: &str, number: u64) {
        self.layer = Some(layer);
        name.clone_into(&mut self.name);
        self.forget_pages(number);
    }

    fn forget_pages(&mut self, number: u64) {
        self.number = number;
        self.asked = MemberSet::EMPTY;
        self.pages.clear();
    }
}

/// Cuts a range at multiples of `unit`.
fn cut(range: Extent, unit: u64) -> impl Iterator<Item = Extent> {
    let mut at = range.offset;
    std::iter::from_fn(move || {
        let end = range.end().min((at / unit + 1) * unit);
        let part = Extent::new(at, end - at);
        at = end;
        (part.len > 0).then_some(part)
    })
}

/// What is looked at closely for a suspect range.
pub(super) fn closely(range: Extent) -> impl Iterator<Item = Extent> {
    cut(range, VERIFY_MAX)
}

/// Joins ranges that lie in one window of [`PIECE`]: from the first to the last.
fn windows(held: impl Iterator<Item = Extent>) -> Vec<Extent> {
    let mut windows: BTreeMap<u64, Extent> = BTreeMap::new();
    for part in held.flat_map(|range| cut(range, PIECE)) {
        let known = windows.entry(part.offset / PIECE).or_insert(part);
        let (from, to) = (known.offset.min(part.offset), known.end().max(part.end()));
        *known = Extent::new(from, to - from);
    }
    windows.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MemberId = MemberId(0);
    const B: MemberId = MemberId(1);
    const MIB: u64 = 1 << 20;

    fn page(ranges: &[(u64, u64)], next: Option<u64>) -> MapPage {
        let ranges = ranges.iter().map(|(offset, len)| Extent::new(*offset, *len)).collect();
        MapPage { ranges, next, total: None }
    }

    #[test]
    fn pieces_are_where_anybody_holds_anything() {
        let both = MemberSet::EMPTY.with(A).with(B);
        let mut layer = Layer::new("s".into(), Some(LayerRef(0)), 64 * MIB, 1);
        assert_eq!(layer.wants(both), Some(0));
        assert_eq!(layer.wants(both), None);
        layer.heard(A, page(&[(0, 4096), (MIB - 4096, 8192)], Some(32 * MIB)));
        assert!(!layer.lay_out(both));
        layer.heard(B, page(&[(8192, 4096), (40 * MIB, 4096)], None));
        assert!(layer.lay_out(both));
        assert_eq!(layer.take(u64::MAX), Some(Extent::new(0, MIB)));
        assert_eq!(layer.take(u64::MAX), Some(Extent::new(MIB, 4096)));
        assert!(!layer.is_through());
        assert_eq!(layer.wants(both), Some(32 * MIB));
        layer.heard(B, page(&[(40 * MIB, 4096)], None));
        // The other has left.
        assert!(layer.lay_out(MemberSet::EMPTY.with(B)));
        assert_eq!(layer.take(u64::MAX), Some(Extent::new(40 * MIB, 4096)));
        assert!(layer.is_through());
    }

    /// Files of terabytes lie in few extents.
    #[test]
    fn however_much_a_page_tells_of_little_is_laid_out_at_a_time() {
        let only = MemberSet::EMPTY.with(A);
        let mut layer = Layer::new("s".into(), Some(LayerRef(0)), 8 << 40, 1);
        layer.wants(only);
        layer.heard(A, page(&[(0, 8 << 40)], None));
        assert!(layer.lay_out(only));
        assert_eq!(layer.ready.len() as u64, PART / PIECE);
        while layer.take(u64::MAX).is_some() {}
        assert_eq!((layer.is_through(), layer.wants(only)), (false, Some(PART)));
    }

    #[test]
    fn what_is_not_through_is_looked_for_again() {
        let only = MemberSet::EMPTY.with(A);
        let mut layer = Layer::new("s".into(), Some(LayerRef(0)), 8 * MIB, 1);
        layer.wants(only);
        layer.heard(A, page(&[(0, 4 * MIB)], None));
        layer.lay_out(only);
        assert_eq!(layer.take(4096), Some(Extent::new(0, 4096)));
        layer.rewind(None, 2);
        assert_eq!(layer.wants(only), Some(4096));
        layer.rewind(Some(0), 3);
        assert_eq!(layer.wants(only), Some(0));
    }
}
