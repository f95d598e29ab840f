//! The ring's half of a fold: a machine that says what is to be done next, and keeps the store's account of it.
//!
//! The driver asks [`Fold::next`], does the step, reports, and asks again. It may stop between any two steps, and goes on
//! with client requests meanwhile. What it has to keep to: while a claim is held ([`Step::Claim`] to [`Step::Release`]), no
//! client's change of that range of the head is between plan and report.

use std::io;

use lh_block::Extent;

use super::super::data::Store;
use super::super::directory::NewZeroMap;
use super::super::layer::LayerNo;
use super::super::load::{blocks, bytes};
use super::super::ranges::RangeSet;
use super::super::zero::ZeroMap;
use super::drain::DRAIN_WORTH;
use super::moves::LOOK;
use super::running::Fold;
use super::stage::{Held, Stage, Step};
use super::work::{Found, Result as Worked};
use super::{Direction, Folded, Work};

/// Bytes moved into the parent after which the place is noted: what a crash makes to be done again.
const NOTE_AFTER: u64 = 256 << 20;

impl Fold {
    /// What is to be done next.
    ///
    /// # Errors
    /// The disk's: the replica has failed.
    pub fn next(&mut self, store: &mut Store) -> io::Result<Step> {
        if self.is_broken_off() {
            let end = if self.error.is_some() { Stage::Ended } else { Stage::Aside };
            self.stage = self.stage.broken_off(end);
        }
        self.watch_head(store);
        loop {
            return Ok(match self.stage {
                Stage::Survey => Step::Work(Work::survey(self.pair(store), &self.cancel)),
                Stage::Choose(direction) => Step::Choose(direction),
                Stage::Look if self.drain.is_some() => match self.drain(store) {
                    Some(step) => step,
                    None => continue,
                },
                Stage::Look if self.at >= self.end && !store.resolved.is_empty() => {
                    self.look_again(store);
                    continue;
                }
                Stage::Look if self.at >= self.end => {
                    self.stage = Stage::Flush { end: true };
                    continue;
                }
                Stage::Look if self.unnoted >= NOTE_AFTER && self.direction == Direction::IntoParent => {
                    self.stage = Stage::Flush { end: false };
                    continue;
                }
                Stage::Look => self.look(store),
                Stage::Move => match self.next_move(store)? {
                    Some(step) => step,
                    None => continue,
                },
                Stage::Claimed(..) if self.is_broken_off() => {
                    self.stage = Stage::Release;
                    continue;
                }
                Stage::Claimed(range, false) => match self.plan_head(store, range)? {
                    Some(step) => step,
                    None => continue,
                },
                Stage::Claimed(_, true) => {
                    self.stage = Stage::Release;
                    continue;
                }
                Stage::Release => {
                    self.stage = Stage::Move;
                    Step::Release
                }
                Stage::Flush { .. } => Step::Flush,
                Stage::Note => Step::Note(self.direction, self.at),
                Stage::Switch => Step::Switch(self.direction),
                Stage::Ready => Step::Ready,
                Stage::Hold(held) => {
                    self.stage = Stage::Held(held);
                    Step::Claim(Extent::new(0, store.size()))
                }
                Stage::Held(held) => match self.held(store, held)? {
                    Some(step) => step,
                    None => continue,
                },
                Stage::LetGo { swapped } => {
                    self.stage = self.let_go(swapped);
                    Step::Release
                }
                Stage::Finish => Step::Finish,
                Stage::Aside => {
                    (store.folding, store.undrained) = (None, None);
                    Step::GiveWay
                }
                Stage::Ended => {
                    (store.folding, store.undrained) = (None, None);
                    Step::Ended
                }
            });
        }
    }

    /// The parent makes something zero that lies below it.
    fn hides(&self, store: &Store) -> bool {
        !self.base && store.at(self.parent).zero.as_ref().is_some_and(ZeroMap::has_marks)
    }

    /// Somebody made a part of the head's index anew meanwhile, perhaps by what the source holds: that is moved, too. What became of
    /// the head's when it was one yet is looked at once more. The files of snapshots are what they were when they were looked at.
    fn look_again(&mut self, store: &mut Store) {
        let resolved = store.resolved.take();
        self.at = 0;
        if self.target() == store.head() {
            self.runs = resolved.iter().map(bytes).collect();
            self.found = Found { until: self.end, ..Found::default() };
            self.found_head = true;
            self.stage = Stage::Move;
        }
    }

    fn look(&mut self, store: &Store) -> Step {
        self.found_head = self.target() == store.head();
        let range = Extent::new(self.at, LOOK.min(self.end - self.at));
        let zero = match &store.at(self.parent).zero {
            // What reads as zero over nothing needs no mark.
            Some(map) if self.direction == Direction::IntoChild && !self.base => map.zeroes(blocks(range)),
            _ => RangeSet::default(),
        };
        let zero = zero.iter().map(bytes).collect();
        Step::Work(Work::look(self.pair(store), self.direction, range, zero, &self.cancel))
    }

    /// A look has ended: zero maps have the last word on what files hold.
    fn found(&mut self, store: &Store, found: Found) {
        let range = blocks(Extent::new(self.at, found.until - self.at));
        let (mut runs, mut marks) = (RangeSet::default(), RangeSet::default());
        found.runs.iter().for_each(|e| runs.insert(blocks(*e)));
        found.zero.iter().for_each(|e| marks.insert(blocks(*e)));
        self.done += found.runs.iter().map(|e| e.len).sum::<u64>();
        let zeroes = |layer: LayerNo| {
            store.at(layer).zero.as_ref().map(|map| map.zeroes(range.clone())).unwrap_or_default()
        };
        let above = zeroes(self.child);
        runs.subtract(&above);
        match self.direction {
            Direction::IntoChild => {
                runs.subtract(&zeroes(self.parent));
                marks.subtract(&above);
            }
            Direction::IntoParent => marks = above,
        }
        if self.found_head {
            // Marks of the head are claimed like data.
            runs.append(&marks);
            marks = RangeSet::default();
        }
        self.runs = runs.iter().map(bytes).collect();
        self.marks = marks.iter().map(bytes).collect();
        self.found = found;
        self.stage = Stage::Move;
    }

    /// A piece of work was run.
    ///
    /// # Errors
    /// The disk's: the replica has failed.
    pub fn worked(&mut self, store: &mut Store, work: Work) -> io::Result<()> {
        match work.result() {
            Worked::Survey { into_parent, into_child } => self.surveyed(store, into_parent, into_child),
            Worked::Look(found) => self.found(store, found),
            Worked::Copy(runs, moved) => self.copied(store, &runs, moved)?,
            Worked::Stopped if self.error.is_none() && self.gives_way => {
                self.set_back(store, Stage::Aside)?;
            }
            Worked::Stopped => self.broken_off("stopped", store)?,
            Worked::Failed { error, spoilt: false } => self.broken_off(&error.to_string(), store)?,
            Worked::Failed { error, spoilt: true } => return Err(error),
        }
        Ok(())
    }

    fn surveyed(&mut self, store: &mut Store, into_parent: u64, into_child: u64) {
        let head = self.child == store.head();
        store.folding = Some(self.parent);
        let direction = match self.plan.resume {
            Some(_) if !head => Direction::IntoParent,
            _ if !head && into_parent < into_child => Direction::IntoParent,
            _ if head && into_parent < into_child / DRAIN_WORTH => Direction::IntoParent,
            _ => Direction::IntoChild,
        };
        (self.total, self.other_way) = match direction {
            Direction::IntoParent => (into_parent, into_child),
            Direction::IntoChild => (into_child, into_parent),
        };
        self.stage = Stage::Choose(direction);
    }

    /// The direction is noted, and the file that stays is long enough.
    pub fn chosen(&mut self, store: &mut Store) {
        let Stage::Choose(direction) = self.stage else { return };
        self.direction = direction;
        let target = self.target();
        store.at_mut(target).length = self.end;
        store.touched = true;
        // What comes is looked at after this.
        store.resolved = RangeSet::default();
        self.at = 0;
        self.stage = Stage::Look;
        let head = self.child == store.head();
        match direction {
            Direction::IntoParent if head => self.stage = self.begin_drain(),
            Direction::IntoParent => self.at = self.plan.resume.unwrap_or(0).min(self.end),
            // A hole of the head that is on its way was planned, perhaps, when the parent's marks did for it.
            Direction::IntoChild if head && self.hides(store) => self.stage = Stage::Hold(Held::Begin),
            Direction::IntoChild => {}
        }
    }

    /// The map of [`Step::MakeMap`] is there.
    pub fn map_made(&mut self, store: &mut Store, map: Option<NewZeroMap>) {
        match map {
            Some(map) => store.attach_zero_map(map),
            None => self.stop("the layer is gone"),
        }
    }

    /// The flush has ended.
    pub fn flushed(&mut self) {
        self.stage = match self.stage {
            Stage::Flush { end: true } => Stage::Switch,
            Stage::Flush { end: false } if self.drain.is_some() => Stage::Ready,
            Stage::Flush { end: false } => Stage::Note,
            Stage::Held(Held::Flush) => Stage::Held(Held::Swap),
            other => other,
        };
    }

    /// The place is noted.
    pub fn noted(&mut self) {
        self.unnoted = 0;
        self.stage = Stage::Look;
    }

    /// The names have changed. The layer that is gone is let go of by [`Store::release`], once nothing in flight reads
    /// it any more.
    pub fn switched(&mut self, store: &mut Store, folded: &Folded) -> LayerNo {
        self.stage = if self.drain.is_some() { Stage::LetGo { swapped: true } } else { Stage::Ended };
        self.error = None;
        self.done = self.total;
        let (goes, stays) = match (&self.plan.child, self.direction) {
            (None, _) => (self.parent, None),
            (Some(_), Direction::IntoParent) => (self.child, Some(self.parent)),
            (Some(_), Direction::IntoChild) => (self.parent, Some(self.child)),
        };
        store.end_fold(goes, stays, self.direction, folded.length);
        goes
    }
}
