//! What is copied in a rebuild, in which order, and how far that is.
//!
//! Layers go one after another, the head last. A layer of which anything may differ is gone through page by page: where
//! neither source nor target hold anything there is nothing to do, and where only the source does nothing to compare. Pieces are
//! laid out a part of the layer at a time, however much one page or one mark tells of.

use std::collections::{BTreeMap, VecDeque};

use lh_block::Extent;
use lh_wire::{COMPARE_MAX, MapPage};

use super::plan::How;
use crate::conductor::repair::join;
use crate::message::LayerRef;

/// Bytes of the largest copy.
const PIECE: u64 = lh_wire::MAX_DATA as u64;

/// Marked ranges kept at most: 16 MiB of memory. Beyond that what lies between them is compared, too.
pub(super) const MARKS_MAX: usize = 1 << 20;

/// Bytes of a layer whose pieces are laid out at a time: 65,536 windows, some megabytes of memory. A page may tell of terabytes, since
/// large files lie in few extents.
const PART: u64 = 8 << 30;

/// One copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) layer: Option<LayerRef>,
    pub(super) range: Extent,
    /// The target may hold the same already.
    pub(super) compare: bool,
}

/// Which half of a page is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::conductor) enum Side {
    Source,
    Target,
}

/// A page of a layer's map that is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) side: Side,
    pub(super) layer: String,
    pub(super) from: u64,
    pub(super) number: u64,
}

/// A layer on its way.
#[derive(Debug)]
struct Layer {
    layer: Option<LayerRef>,
    name: String,
    length: u64,
    how: How,
    /// Pieces laid out and not given.
    ready: VecDeque<Piece>,
    /// Everything before this byte is laid out.
    next: u64,
    /// Bytes that it was thought to take, and is known to.
    guess: u64,
    known: u64,
    page: Page,
}

/// The page that is asked for.
#[derive(Debug, Default)]
struct Page {
    number: u64,
    asked: bool,
    source: Option<MapPage>,
    target: Option<MapPage>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Copy {
    /// Base first, the head last.
    layers: VecDeque<Layer>,
    /// What the target may lack or have too much, sorted.
    marks: Vec<Extent>,
    pub(super) flying: BTreeMap<usize, (Piece, u64)>,
    again: Vec<Piece>,
    next_piece: usize,
    pages: u64,
    pub(super) done: u64,
    /// Bytes that differed.
    pub(super) copied: u64,
    total: u64,
}

impl Copy {
    /// Layers by number, name, length, bytes that the source holds, and how much may differ; base first, the head last.
    pub(super) fn of(
        layers: impl Iterator<Item = (Option<LayerRef>, String, u64, u64, How)>,
        marks: Vec<Extent>,
    ) -> Self {
        let marks = few(marks);
        let marked: u64 = marks.iter().map(|m| m.len).sum();
        let mut copy = Self { marks, ..Self::default() };
        for (layer, name, length, held, how) in layers {
            let guess = match how {
                How::Nothing => 0,
                How::Marked => marked,
                How::Whole => held,
            };
            copy.total += guess;
            let (ready, known, page) = (VecDeque::new(), 0, Page::default());
            let next = if how == How::Nothing { length } else { 0 };
            copy.layers.push_back(Layer { layer, name, length, how, ready, next, guess, known, page });
        }
        copy.lay_out();
        copy
    }

    /// Whatever can be laid out without a page is, of the layer whose turn it is; those that are through go.
    fn lay_out(&mut self) {
        loop {
            let last = self.layers.len() <= 1;
            let Some(layer) = self.layers.front_mut() else { break };
            layer.lay_out(&self.marks);
            if last || !layer.is_through() {
                break;
            }
            self.layers.pop_front();
        }
    }

    /// Bytes to be looked at in all, as far as is known.
    pub(super) fn total(&self) -> u64 {
        self.total.max(self.done)
    }

    pub(super) fn is_complete(&self) -> bool {
        self.flying.is_empty() && self.again.is_empty() && self.layers.iter().all(Layer::is_through)
    }

    /// A page that is wanted before anything else can be given.
    pub(super) fn wants(&mut self) -> Vec<Wanted> {
        let Some(layer) = self.front().filter(|l| l.ready.is_empty() && !l.is_known() && !l.page.asked)
        else {
            return Vec::new();
        };
        let (name, from) = (layer.name.clone(), layer.next);
        self.pages += 1;
        let number = self.pages;
        if let Some(layer) = self.front() {
            layer.page = Page { number, asked: true, ..Page::default() };
        }
        let wanted = |side| Wanted { side, layer: name.clone(), from, number };
        vec![wanted(Side::Source), wanted(Side::Target)]
    }

    /// A page has come.
    pub(super) fn heard(&mut self, side: Side, number: u64, page: MapPage) {
        let Some(layer) = self.layers.front_mut().filter(|l| l.page.asked && l.page.number == number) else {
            return;
        };
        match side {
            Side::Source => layer.page.source = Some(page),
            Side::Target => layer.page.target = Some(page),
        }
        let Page { source: Some(source), target: Some(target), .. } = &layer.page else { return };
        let end = source.next.unwrap_or(layer.length).min(target.next.unwrap_or(layer.length));
        let end = end.min(end_of_part(layer.next));
        let within = Extent::new(layer.next, end.saturating_sub(layer.next));
        let clip =
            |page: &MapPage| page.ranges.iter().filter_map(|r| r.intersection(within)).collect::<Vec<_>>();
        let (source, target) = (clip(source), clip(target));
        layer.known += source.iter().map(|r| r.len).sum::<u64>();
        layer.ready.extend(pieces(layer.layer, &source, &target));
        // A page that brings nothing further would be asked for again for ever.
        layer.next = if end > layer.next { end } else { layer.length };
        layer.page.asked = false;
        if layer.is_known() {
            self.total = (self.total + layer.known).saturating_sub(layer.guess);
        }
        self.lay_out();
    }

    /// The layer whose turn it is.
    fn front(&mut self) -> Option<&mut Layer> {
        let flies = self.flying.values().any(|(p, _)| p.layer.is_some()) || !self.again.is_empty();
        // What is below the head is there before the head is.
        self.layers.front_mut().filter(|l| l.layer.is_some() || !flies)
    }

    /// The next piece to copy, at most `most` bytes of it. It is given now.
    pub(super) fn next(&mut self, most: u64, now: u64) -> Option<(usize, Piece)> {
        let mut piece = match self.again.pop() {
            Some(piece) => piece,
            None => self.front()?.ready.pop_front()?,
        };
        self.lay_out();
        if piece.range.len > most {
            let rest = Extent::new(piece.range.offset + most, piece.range.len - most);
            self.again.push(Piece { range: rest, ..piece });
            piece.range.len = most;
        }
        self.next_piece += 1;
        self.flying.insert(self.next_piece, (piece, now));
        Some((self.next_piece, piece))
    }

    /// The piece is copied; `changed` bytes differed.
    pub(super) fn copied(&mut self, piece: usize, changed: u64) {
        if let Some((piece, _)) = self.flying.remove(&piece) {
            self.done += piece.range.len;
            self.copied += changed;
        }
    }

    /// The piece was not copied.
    pub(super) fn not_copied(&mut self, piece: usize) {
        self.again.extend(self.flying.remove(&piece).map(|(piece, _)| piece));
    }

    /// When the piece was given.
    pub(super) fn given_at(&self, piece: usize) -> Option<u64> {
        self.flying.get(&piece).map(|(_, at)| *at)
    }

    /// The head is this snapshot now. The new head is empty on both sides, and written on both from the first write on.
    pub(super) fn head_became(&mut self, snapshot: LayerRef, name: &str) {
        let Some(head) = self.layers.back_mut() else { return };
        head.layer = Some(snapshot);
        name.clone_into(&mut head.name);
        // A page on its way is of the layer that had no name; it may be either.
        head.page = Page::default();
        let length = head.length;
        for piece in self.again.iter_mut().chain(&mut head.ready).filter(|p| p.layer.is_none()) {
            piece.layer = Some(snapshot);
        }
        let (ready, page) = (VecDeque::new(), Page::default());
        self.layers.push_back(Layer {
            layer: None,
            name: String::new(),
            length,
            how: How::Nothing,
            ready,
            next: length,
            guess: 0,
            known: 0,
            page,
        });
        self.lay_out();
    }
}

impl Layer {
    /// All of it is laid out.
    const fn is_known(&self) -> bool {
        self.next >= self.length
    }

    /// All of it was given.
    fn is_through(&self) -> bool {
        self.is_known() && self.ready.is_empty()
    }

    /// Lays out the next part that is marked, if that is what is looked at and nothing is left of the part before. The marks are
    /// sorted.
    fn lay_out(&mut self, marks: &[Extent]) {
        while self.how == How::Marked && self.ready.is_empty() && !self.is_known() {
            let left = &marks[marks.partition_point(|m| m.end() <= self.next)..];
            let from = left.first().map_or(self.length, |m| m.offset).max(self.next).min(self.length);
            let within = Extent::new(from, self.length.min(end_of_part(from)) - from);
            let some: Vec<Extent> = left.iter().map_while(|m| m.intersection(within)).collect();
            self.ready.extend(pieces(self.layer, &[], &some));
            self.next = within.end();
        }
    }
}

/// Where the part ends that begins with this byte. Parts end where windows do.
const fn end_of_part(from: u64) -> u64 {
    (from / PART).saturating_add(1).saturating_mul(PART)
}

/// Cuts what the source holds, and what the target does, into copies: what both may hold is compared, in windows small
/// enough that single blocks are told apart.
fn pieces(layer: Option<LayerRef>, source: &[Extent], target: &[Extent]) -> Vec<Piece> {
    let mut all: Vec<(Extent, bool)> = source.iter().map(|r| (*r, false)).collect();
    all.extend(target.iter().map(|r| (*r, true)));
    let mut windows: BTreeMap<u64, (Extent, bool)> = BTreeMap::new();
    for (range, held) in all {
        let mut at = range.offset;
        while at < range.end() {
            let window = at / COMPARE_MAX;
            let end = range.end().min((window + 1) * COMPARE_MAX);
            let part = Extent::new(at, end - at);
            let known = windows.entry(window).or_insert((part, held));
            let (from, to) = (known.0.offset.min(part.offset), known.0.end().max(part.end()));
            *known = (Extent::new(from, to - from), known.1 | held);
            at = end;
        }
    }
    let mut pieces: Vec<Piece> = Vec::new();
    for (range, compare) in windows.into_values() {
        match pieces.last_mut() {
            Some(last)
                if !last.compare
                    && !compare
                    && last.range.end() == range.offset
                    && last.range.len + range.len <= PIECE =>
            {
                last.range.len += range.len;
            }
            _ => pieces.push(Piece { layer, range, compare }),
        }
    }
    pieces
}

/// Sorts and joins ranges, and widens them until there are few enough.
pub(super) fn few(ranges: Vec<Extent>) -> Vec<Extent> {
    let (mut ranges, mut unit) = (join(ranges), COMPARE_MAX);
    while ranges.len() > MARKS_MAX {
        ranges = join(ranges.iter().map(|r| r.widen(unit)).collect());
        unit *= 2;
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const S: Option<LayerRef> = Some(LayerRef(0));

    fn at(offset: u64, len: u64) -> Extent {
        Extent::new(offset, len)
    }

    fn page(ranges: &[Extent], next: Option<u64>) -> MapPage {
        MapPage { ranges: ranges.to_vec(), next, total: None }
    }

    fn take(copy: &mut Copy) -> Option<(Option<LayerRef>, Extent, bool)> {
        copy.next(u64::MAX, 0).map(|(_, p)| (p.layer, p.range, p.compare))
    }

    /// Answers what is wanted: the source holds these, the target those.
    fn tell(copy: &mut Copy, source: &[Extent], target: &[Extent]) {
        let wanted = copy.wants();
        assert_eq!(wanted.len(), 2);
        copy.heard(Side::Source, wanted[0].number, page(source, None));
        copy.heard(Side::Target, wanted[1].number, page(target, None));
    }

    fn whole(layers: &[(Option<LayerRef>, &str, u64)]) -> Copy {
        let layers = layers.iter().map(|(l, name, n)| (*l, (*name).to_owned(), *n, *n, How::Whole));
        Copy::of(layers, Vec::new())
    }

    #[test]
    fn holes_are_passed_over_and_the_head_waits_for_all_below_it() {
        let mut copy = whole(&[(S, "s", 64 * MIB), (None, "", 64 * MIB)]);
        assert_eq!(copy.total(), 128 * MIB);
        assert_eq!(take(&mut copy), None);
        tell(&mut copy, &[at(0, 2 * MIB), at(32 * MIB, 4096)], &[]);
        assert_eq!(take(&mut copy), Some((S, at(0, MIB), false)));
        assert_eq!(take(&mut copy), Some((S, at(MIB, MIB), false)));
        assert_eq!(take(&mut copy), Some((S, at(32 * MIB, 4096), false)));
        assert!(copy.wants().is_empty(), "pieces of the layer below are on their way");
        (1..=3).for_each(|n| copy.copied(n, 0));
        tell(&mut copy, &[], &[]);
        assert!(copy.is_complete());
        assert_eq!((copy.done, copy.total()), (2 * MIB + 4096, 2 * MIB + 4096));
    }

    #[test]
    fn what_the_target_holds_is_compared_in_small_windows() {
        let got = pieces(None, &[at(0, MIB)], &[at(0, 4096), at(MIB, 4096)]);
        assert_eq!(
            got.iter().map(|p| (p.range, p.compare)).collect::<Vec<_>>(),
            [(at(0, COMPARE_MAX), true), (at(COMPARE_MAX, MIB - COMPARE_MAX), false), (at(MIB, 4096), true)]
        );
    }

    #[test]
    fn marks_are_compared_and_nothing_else() {
        let layers =
            [(S, "a".to_owned(), MIB, MIB, How::Nothing), (None, String::new(), MIB, MIB, How::Marked)];
        let mut copy = Copy::of(layers.into_iter(), vec![at(8192, 4096), at(4096, 4096), at(MIB, 4096)]);
        assert!(copy.wants().is_empty());
        assert_eq!(take(&mut copy), Some((None, at(4096, 8192), true)));
        assert_eq!(take(&mut copy), None);
        copy.not_copied(1);
        assert!(!copy.is_complete());
        assert!(take(&mut copy).is_some());
        copy.copied(2, 4096);
        assert!(copy.is_complete());
        assert_eq!(copy.copied, 4096);
    }

    /// Files of terabytes lie in few extents, and what was written while the target was away may be all of the volume.
    #[test]
    fn however_much_a_page_or_a_mark_tells_of_little_is_laid_out_at_a_time() {
        const TIB: u64 = MIB << 20;
        let look_at = |copy: &mut Copy, bytes: u64| {
            for n in 0..bytes / COMPARE_MAX {
                let (number, piece) = copy.next(u64::MAX, 0).expect("it goes on");
                assert_eq!((piece.range, piece.compare), (at(n * COMPARE_MAX, COMPARE_MAX), true));
                let laid_out: usize = copy.layers.iter().map(|l| l.ready.len()).sum();
                assert!(laid_out as u64 <= PART / COMPARE_MAX, "{laid_out} pieces");
                copy.copied(number, 0);
            }
        };
        let mut copy = whole(&[(S, "s", 8 * TIB), (None, "", 8 * TIB)]);
        tell(&mut copy, &[at(0, 8 * TIB)], &[at(0, 8 * TIB)]);
        look_at(&mut copy, PART);
        assert_eq!(take(&mut copy), None);
        let next = copy.wants();
        assert_eq!((next[0].layer.as_str(), next[0].from), ("s", PART));

        let name = |layer: Option<LayerRef>| if layer.is_some() { "s".to_owned() } else { String::new() };
        let layers = [S, None].map(|layer| (layer, name(layer), 8 * TIB, 8 * TIB, How::Marked));
        let mut copy = Copy::of(layers.into_iter(), vec![at(0, 8 * TIB)]);
        look_at(&mut copy, 2 * PART);
        assert!(copy.wants().is_empty() && !copy.is_complete());
    }

    #[test]
    fn layers_that_are_not_marked_are_through_at_once() {
        let layers =
            [(S, "s".to_owned(), MIB, MIB, How::Marked), (None, String::new(), 64 << 30, MIB, How::Marked)];
        let mut copy = Copy::of(layers.into_iter(), vec![at(40 << 30, 4096), at(60 << 30, 4096)]);
        for offset in [40 << 30, 60 << 30] {
            assert!(!copy.is_complete());
            assert_eq!(take(&mut copy), Some((None, at(offset, 4096), true)));
        }
        (1..=2).for_each(|n| copy.copied(n, 0));
        assert!(copy.is_complete());
    }

    #[test]
    fn after_a_snapshot_the_former_head_goes_on_under_its_name() {
        let mut copy = whole(&[(None, "", 4 * MIB)]);
        let wanted = copy.wants();
        copy.heard(Side::Source, wanted[0].number, page(&[at(0, MIB)], Some(2 * MIB)));
        copy.heard(Side::Target, wanted[0].number, page(&[], None));
        let (_, piece) = copy.next(4096, 0).unwrap();
        assert_eq!((piece.layer, piece.range), (None, at(0, 4096)));
        copy.copied(1, 0);
        assert_eq!(take(&mut copy), Some((None, at(4096, MIB - 4096), false)));
        copy.copied(2, 0);
        let late = copy.wants();
        assert_eq!((late[0].layer.as_str(), late[0].from), ("", 2 * MIB));
        copy.head_became(LayerRef(7), "x");
        let wanted = copy.wants();
        assert_eq!((wanted[0].layer.as_str(), wanted[0].from), ("x", 2 * MIB));
        for side in [Side::Source, Side::Target] {
            copy.heard(side, late[0].number, page(&[], None));
        }
        assert!(!copy.is_complete(), "a page that was on its way counts for nothing");
        copy.heard(Side::Source, wanted[0].number, page(&[at(3 * MIB, 4096)], None));
        copy.heard(Side::Target, wanted[0].number, page(&[], None));
        assert_eq!(take(&mut copy), Some((Some(LayerRef(7)), at(3 * MIB, 4096), false)));
        copy.copied(3, 4096);
        assert!(copy.is_complete(), "the new head is the same on both");
    }
}
