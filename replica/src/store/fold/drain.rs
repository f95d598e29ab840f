//! A small head over a large removed snapshot goes into the snapshot's file, which then becomes the head: what has to be moved
//! is what was written since the snapshot, not what the volume holds.
//!
//! Clients go on writing to the head meanwhile. So the head is gone through again and again: each time only what was written
//! since it was copied ([`Store::undrained`]), until little is left. Then all writes wait, while the rest is copied and synced,
//! and one rename makes the snapshot's file the head ([`super::names`]). Nothing else is claimed: a copy that a client's write
//! has met is overwritten by the next one.
//!
//! Until the rename nobody reads what is copied, since the head has those blocks itself. Zeroes of the head must be marks for
//! that, not mere holes: a copy of what was there before may be on its way below ([`Store::plan_zero`]). If clients write
//! faster than is copied, the fold goes the other way.

use std::io;
use std::ops::Range;

use lh_block::{BLOCK, Extent};

use super::super::data::Store;
use super::super::index::Index;
use super::super::layer::LayerNo;
use super::super::load::{blocks, bytes};
use super::super::ranges::RangeSet;
use super::Direction;
use super::moves::LOOK;
use super::running::{Drain, Fold};
use super::stage::{Held, Stage, Step};
use super::work::Found;

/// How much less than the other way this way has to move at least: what clients write meanwhile is moved again, and at the
/// end they wait.
pub(super) const DRAIN_WORTH: u64 = 4;

/// Bytes that are left to be copied while all writes wait: at 100 MB/s for 10 ms.
const LAST: u64 = 1 << 20;

/// If clients have written more than this by then, they do not wait for it.
const LAST_MOST: u64 = 4 << 20;

/// Times that the head is gone through. Each takes what was written during the one before, so if that is not few after so many,
/// clients are faster.
const TIMES: u32 = 12;

impl Fold {
    /// Writes wait for a moment first: no hole may be on its way that was planned before zeroes became marks.
    pub(super) fn begin_drain(&mut self) -> Stage {
        self.drain = Some(Drain::default());
        Stage::Hold(Held::Begin)
    }

    /// The head may have become a snapshot: then it goes into the parent as any other.
    pub(super) fn watch_head(&mut self, store: &mut Store) {
        let free = matches!(
            self.stage,
            Stage::Look | Stage::Move | Stage::Flush { .. } | Stage::Ready | Stage::Hold(_)
        );
        if self.drain.is_some() && free && self.child != store.head() {
            self.end_drain(store);
            self.stage = Stage::Look;
        }
    }

    fn end_drain(&mut self, store: &mut Store) {
        (self.drain, store.undrained) = (None, None);
        (self.runs, self.marks) = Default::default();
        (self.moving, self.marking) = Default::default();
        self.at = 0;
        store.resolved = RangeSet::default();
    }

    /// Finds what is to be moved next, or what comes before.
    pub(super) fn drain(&mut self, store: &mut Store) -> Option<Step> {
        let drain = self.drain.as_mut()?;
        if store.at(self.parent).zero.is_none() {
            // It becomes the head's.
            return Some(Step::MakeMap(store.at(self.parent).name.clone().unwrap_or_default()));
        }
        if self.at < self.end {
            let window = Extent::new(self.at, LOOK.min(self.end - self.at));
            if drain.times == 0 {
                store.begin_draining(self.child, blocks(window));
            }
            self.take_undrained(store, window);
            self.found = Found { until: window.end(), ..Found::default() };
            self.stage = Stage::Move;
            return None;
        }
        self.at = 0;
        drain.times += 1;
        let few = store.undrained_bytes() <= LAST;
        let most = if few { 2 * TIMES } else { TIMES };
        if drain.times >= most {
            self.end_drain(store);
            self.total = self.done + self.other_way;
            self.stage = Stage::Choose(Direction::IntoChild);
        } else if few {
            self.stage = Stage::Flush { end: false };
        }
        None
    }

    fn take_undrained(&mut self, store: &mut Store, range: Extent) {
        let (data, zeroes) = store.take_undrained(self.child, blocks(range));
        self.runs = data.iter().map(bytes).collect();
        self.marks = zeroes.iter().map(bytes).collect();
        self.done += self.runs.iter().map(|run| run.len).sum::<u64>();
    }

    /// [`Step::Ready`] was done; `false`: the head has become a snapshot.
    pub fn readied(&mut self, ready: bool) {
        self.stage = if ready { Stage::Hold(Held::Move) } else { Stage::Look };
    }

    /// All writes wait.
    pub(super) fn held(&mut self, store: &mut Store, held: Held) -> io::Result<Option<Step>> {
        match held {
            Held::Begin => {
                if self.drain.is_some() {
                    store.undrained = Some(Index::new(store.size() / BLOCK));
                }
                self.stage = Stage::LetGo { swapped: false };
                Ok(None)
            }
            Held::Move => self.move_last(store),
            Held::Flush => Ok(Some(Step::Flush)),
            Held::Swap => Ok(Some(Step::Swap)),
        }
    }

    fn move_last(&mut self, store: &mut Store) -> io::Result<Option<Step>> {
        if !self.is_moving() {
            let left = store.undrained_bytes();
            if left > LAST_MOST {
                self.stage = Stage::LetGo { swapped: false };
                return Ok(None);
            }
            self.take_undrained(store, Extent::new(0, self.end));
            if !self.is_moving() {
                self.stage = Stage::Held(Held::Flush);
                return Ok(None);
            }
        }
        self.take_moves();
        self.begin_move(store)
    }

    /// [`Step::Swap`] was not done: something has changed meanwhile.
    pub fn not_swapped(&mut self) {
        self.stage = Stage::LetGo { swapped: false };
    }

    /// Where it goes on once writes wait no longer.
    pub(super) fn let_go(&mut self, swapped: bool) -> Stage {
        match &self.drain {
            Some(drain) if swapped && !drain.finished => Stage::Finish,
            _ if swapped => self.end(),
            _ if self.error.is_some() => Stage::Ended,
            _ => Stage::Look,
        }
    }

    /// [`Step::Finish`] was done, asked for or not.
    pub fn finished(&mut self) {
        if let Some(drain) = &mut self.drain {
            drain.finished = true;
        }
        if self.stage == Stage::Finish {
            self.stage = self.end();
        }
    }

    /// It was folded, whoever has asked it to stop since.
    fn end(&mut self) -> Stage {
        self.error = None;
        Stage::Ended
    }
}

impl Store {
    /// Everything that the head has in the range is to be moved.
    fn begin_draining(&mut self, head: LayerNo, range: Range<u64>) {
        let mut held = RangeSet::default();
        for (part, value) in self.places.runs(range.clone()) {
            if self.holder(value) == Some(head) {
                held.insert(part);
            }
        }
        if let Some(zero) = &self.at(head).zero {
            held.append(&zero.zeroes(range));
        }
        if let Some(undrained) = &mut self.undrained {
            undrained.set_all(held.iter(), 1);
        }
    }

    /// The head was changed in a range.
    pub(in super::super) fn changed_head(&mut self, extent: Extent) {
        if let Some(undrained) = &mut self.undrained {
            undrained.set(blocks(extent), 1);
        }
    }

    /// Takes what is to be moved in a range: data, and what reads as zero.
    fn take_undrained(&mut self, head: LayerNo, range: Range<u64>) -> (RangeSet, RangeSet) {
        let (mut data, mut zeroes) = (RangeSet::default(), RangeSet::default());
        let Some(undrained) = &mut self.undrained else { return (data, zeroes) };
        let parts: Vec<_> =
            undrained.runs(range.clone()).filter(|(_, is)| *is != 0).map(|(part, _)| part).collect();
        undrained.set(range, 0);
        for (part, value) in parts.into_iter().flat_map(|part| self.places.runs(part)) {
            if value == 0 {
                zeroes.insert(part);
            } else if self.holder(value) == Some(head) {
                data.insert(part);
            }
        }
        (data, zeroes)
    }

    /// Bytes of blocks that were changed and not moved since.
    fn undrained_bytes(&self) -> u64 {
        let Some(undrained) = &self.undrained else { return 0 };
        let changed = undrained.runs(0..self.size / BLOCK).filter(|(_, is)| *is != 0);
        changed.map(|(part, _)| (part.end - part.start) * BLOCK).sum()
    }
}
