//! How what was found is moved, a piece after the other. Into the head under a claim, and only what is still to be moved then.

use std::collections::VecDeque;
use std::io;

use lh_block::{BLOCK, Extent};

use super::super::data::Store;
use super::super::load::{blocks, bytes};
use super::super::ranges::RangeSet;
use super::running::Fold;
use super::stage::{Stage, Step};
use super::work::Moved;
use super::{Direction, Work};

/// Bytes that one look goes over at most: bounds the zero marks that are handed over with it.
pub(super) const LOOK: u64 = 1 << 30;
/// Bytes that one piece of work copies at most between two snapshots: at 100 MB/s it stops within a tenth of a second.
const BATCH: u64 = 8 << 20;
/// Bytes of the head that are claimed for a copy: a client's write there waits as long as that takes.
const CLAIM: u64 = 1 << 20;
/// Bytes of the head that are claimed where space is shared, which takes the same time however much it is.
const CLAIM_SHARED: u64 = 64 << 20;

impl Fold {
    /// The next piece of what was found, or the next look.
    pub(super) fn next_move(&mut self, store: &mut Store) -> io::Result<Option<Step>> {
        let head = self.target() == store.head();
        if self.found_head && !head {
            // The head has become a snapshot, and what was seen of it is old.
            (self.runs, self.marks) = Default::default();
            self.found_head = false;
            self.stage = Stage::Look;
            return Ok(None);
        }
        if !self.is_moving() {
            self.at = self.found.until;
            self.stage = Stage::Look;
            return Ok(None);
        }
        if head {
            let span = self.take_span();
            self.stage = Stage::Claimed(span, false);
            return Ok(Some(Step::Claim(span)));
        }
        self.take_moves();
        self.begin_move(store)
    }

    /// The next runs of the head that are near each other. What lies between two of them is claimed with them.
    fn take_span(&mut self) -> Extent {
        let most = if self.share { CLAIM_SHARED } else { CLAIM };
        let mut taken = take(&mut self.runs, most);
        let from = taken.first().map_or(0, |first| first.offset);
        while let Some(last) = taken.pop_if(|e| e.end() > from + most && e.offset > from) {
            self.runs.push_front(last);
        }
        Extent::new(from, taken.last().map_or(0, |last| last.end() - from))
    }

    /// The range of the head is claimed: what is to be moved there is what the index has of the parent, now.
    pub(super) fn plan_head(&mut self, store: &mut Store, range: Extent) -> io::Result<Option<Step>> {
        if self.moving.is_empty() && self.marking.is_empty() {
            let (mut data, mut nothing) = (RangeSet::default(), RangeSet::default());
            for (part, held) in store.places.runs(blocks(range)) {
                if store.holder(held) == Some(self.parent) {
                    data.insert(part);
                } else if held == 0 {
                    nothing.insert(part);
                }
            }
            let mut marks = RangeSet::default();
            if let Some(map) = store.at(self.parent).zero.as_ref().filter(|_| !self.base) {
                let zeroes = map.zeroes(blocks(range));
                for part in nothing.iter() {
                    zeroes.within(part).for_each(|zero| marks.insert(zero));
                }
            }
            if let Some(map) = &store.at(self.child).zero {
                marks.subtract(&map.zeroes(blocks(range)));
            }
            self.moving = data.iter().map(bytes).collect();
            self.marking = marks.iter().map(bytes).collect();
            if self.moving.is_empty() && self.marking.is_empty() {
                self.stage = Stage::Claimed(range, true);
                return Ok(None);
            }
        }
        self.begin_move(store)
    }

    /// Something that was found is not moved yet.
    pub(super) fn is_moving(&self) -> bool {
        let nothing = self.runs.is_empty() && self.marks.is_empty();
        !(nothing && self.moving.is_empty() && self.marking.is_empty())
    }

    /// Takes the next of what was found, if nothing is in hand.
    pub(super) fn take_moves(&mut self) {
        if self.moving.is_empty() && self.marking.is_empty() {
            let most = if self.share { LOOK } else { BATCH };
            self.moving = take(&mut self.runs, most);
            self.marking = take(&mut self.marks, LOOK);
        }
    }

    /// Everything in `moving` and `marking` may begin, or what has to come before.
    pub(super) fn begin_move(&mut self, store: &mut Store) -> io::Result<Option<Step>> {
        let target = self.target();
        let marks = !self.marking.is_empty() && !self.marks_are_holes();
        if marks && store.at(target).zero.is_none() {
            let name = store.at(target).name.clone().unwrap_or_default();
            return Ok(Some(Step::MakeMap(name)));
        }
        if marks && !store.marked {
            return Ok(Some(Step::MarkZeroes));
        }
        for extent in self.moving.iter().chain(&self.marking) {
            if !store.begin_write(target, *extent) {
                return Ok(Some(Step::Punching));
            }
        }
        if marks
            && let Some(map) = &store.at(target).zero
            && let Err(e) = self.marking.iter().try_for_each(|e| map.reserve(blocks(*e)))
        {
            self.broken_off(&e.to_string(), store)?;
            return Ok(None);
        }
        let holes = if self.marks_are_holes() { self.marking.clone() } else { Vec::new() };
        let runs = self.moving.clone();
        Ok(Some(Step::Work(Work::copy(
            self.pair(store),
            self.direction,
            runs,
            holes,
            self.share,
            &self.cancel,
        ))))
    }

    /// Into the base: what the child makes zero becomes a hole there, below which there is nothing.
    fn marks_are_holes(&self) -> bool {
        self.base && self.direction == Direction::IntoParent
    }

    /// A piece of work has copied this.
    pub(super) fn copied(&mut self, store: &mut Store, runs: &[Extent], moved: Moved) -> io::Result<()> {
        self.share &= !moved.cannot_share;
        self.moved.copied += moved.copied;
        self.moved.shared += moved.shared;
        self.unnoted += moved.copied + moved.shared;
        let (target, source) = (self.target(), self.source());
        store.folded_in(source, target, self.direction, runs);
        let marks = std::mem::take(&mut self.marking);
        if self.marks_are_holes() {
            store.at_mut(target).dirty |= !marks.is_empty();
        } else if let Some(map) = &mut store.at_mut(target).zero {
            for extent in &marks {
                map.set(blocks(*extent))?;
            }
        }
        self.moving.clear();
        if let Stage::Claimed(_, done) = &mut self.stage {
            *done = true;
        }
        Ok(())
    }
}

/// Takes ranges from the front, so many bytes at most; the last may be cut.
fn take(from: &mut VecDeque<Extent>, most: u64) -> Vec<Extent> {
    let (mut taken, mut left) = (Vec::new(), most);
    while left > 0 {
        let Some(first) = from.pop_front() else { break };
        let len = first.len.min(left);
        taken.push(Extent::new(first.offset, len));
        if len < first.len {
            from.push_front(Extent::new(first.offset + len, first.len - len));
        }
        left -= len;
    }
    taken
}

const _: () =
    assert!(CLAIM.is_multiple_of(BLOCK) && CLAIM_SHARED.is_multiple_of(BLOCK) && BATCH.is_multiple_of(BLOCK));
