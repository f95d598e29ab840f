//! The ring's half of a fold: a machine that says what is to be done next, and keeps the store's account of it.
//!
//! The driver asks [`Fold::next`], does the step, reports, and asks again. It may stop between any two steps, and goes on
//! with client requests meanwhile. What it has to keep to: while a claim is held ([`Step::Claim`] to [`Step::Release`]), no
//! client's change of that range of the head is between plan and report.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lh_block::{BLOCK, Extent};
use lh_wire::FoldState;

use super::super::data::Store;
use super::super::directory::NewZeroMap;
use super::super::layer::LayerNo;
use super::super::load::{blocks, bytes};
use super::super::ranges::RangeSet;
use super::super::zero::ZeroMap;
use super::drain::{DRAIN_WORTH, Drain};
use super::stage::{Held, Stage};
use super::work::{Found, Moved, Pair, Result as Worked};
use super::{Direction, FoldPlan, Folded, Work};

/// Bytes that one look goes over at most: bounds the zero marks that are handed over with it.
pub(super) const LOOK: u64 = 1 << 30;
/// Bytes that one piece of work copies at most between two snapshots: at 100 MB/s it stops within a tenth of a second.
const BATCH: u64 = 8 << 20;
/// Bytes of the head that are claimed for a copy: a client's write there waits as long as that takes.
const CLAIM: u64 = 1 << 20;
/// Bytes of the head that are claimed where space is shared, which takes the same time however much it is.
const CLAIM_SHARED: u64 = 64 << 20;
/// Bytes moved into the parent after which the place is noted: what a crash makes to be done again.
const NOTE_AFTER: u64 = 256 << 20;

/// What is to be done next.
#[derive(Debug)]
#[must_use]
pub enum Step {
    /// Run it, where blocking is allowed; then [`Fold::worked`].
    Work(Work),
    /// No client's change of the range may be on its way, until [`Step::Release`].
    Claim(Extent),
    /// The claim is given back.
    Release,
    /// A hole is being punched where something is to be written: ask again when that has ended.
    Punching,
    /// [`super::super::Directory::make_zero_map`] for this layer, then [`Fold::map_made`].
    MakeMap(String),
    /// [`super::super::Directory::mark_zeroes`], then [`Store::marked`].
    MarkZeroes,
    /// [`super::super::Directory::choose_fold`], then [`Fold::chosen`].
    Choose(Direction),
    /// A whole flush, then [`Fold::flushed`].
    Flush,
    /// [`super::super::Directory::save_fold`] with this offset, then [`Fold::noted`].
    Note(Direction, u64),
    /// [`super::super::Directory::switch_fold`], then [`Fold::switched`]; when it is refused because a chain operation is
    /// prepared, later.
    Switch(Direction),
    /// [`super::super::Directory::ready_fold`], then [`Fold::readied`]; refused as [`Step::Switch`] is.
    Ready,
    /// [`super::super::Directory::swap_fold`], then [`Fold::switched`] or [`Fold::not_swapped`].
    Swap,
    /// [`super::super::Directory::finish_fold`], which must follow the swap at once, then [`Fold::finished`]. The driver need
    /// not wait with it for this step.
    Finish,
    /// Layer images go first: [`super::super::Directory::forget_fold`], then the images, then [`Fold::begin_anew`].
    GiveWay,
    /// It is over: [`Fold::state`] says how.
    Ended,
}

/// A fold that runs.
#[derive(Debug)]
pub struct Fold {
    pub(super) plan: FoldPlan,
    pub(super) stage: Stage,
    pub(super) direction: Direction,
    pub(super) parent: LayerNo,
    pub(super) child: LayerNo,
    /// Nothing lies below the parent: what is zero there needs no mark.
    base: bool,
    /// Everything before is done; `end` is where the longer layer ends.
    pub(super) at: u64,
    pub(super) end: u64,
    pub(super) found: Found,
    /// `found` is about a head: clients may have written since.
    found_head: bool,
    /// The head goes into the parent.
    pub(super) drain: Option<Drain>,
    pub(super) runs: VecDeque<Extent>,
    pub(super) marks: VecDeque<Extent>,
    /// What the piece of work in hand moves, and the marks that follow it.
    pub(super) moving: Vec<Extent>,
    pub(super) marking: Vec<Extent>,
    share: bool,
    pub(super) done: u64,
    pub(super) total: u64,
    /// Bytes that the other direction would move.
    pub(super) other_way: u64,
    unnoted: u64,
    pub(super) moved: Moved,
    pub(super) error: Option<String>,
    /// It is to stand aside.
    pub(super) gives_way: bool,
    pub(super) cancel: Arc<AtomicBool>,
}

impl Fold {
    /// The machine for a plan that [`super::super::Directory::begin_fold`] has made. `None`: the store knows no such
    /// layers.
    pub fn new(store: &Store, plan: FoldPlan) -> Option<Self> {
        let parent = store.layer(&plan.name)?;
        let child = match &plan.child {
            Some(name) => store.layer(name)?,
            None => parent,
        };
        let base = store.is_base(parent);
        let end = store.at(parent).length.max(store.at(child).length);
        let stage = if plan.child.is_none() { Stage::Switch } else { Stage::Survey };
        Some(Self {
            stage,
            direction: Direction::IntoChild,
            parent,
            child,
            base,
            at: 0,
            end,
            found: Found::default(),
            found_head: false,
            drain: None,
            runs: VecDeque::new(),
            marks: VecDeque::new(),
            moving: Vec::new(),
            marking: Vec::new(),
            share: true,
            done: 0,
            total: 0,
            other_way: 0,
            unnoted: 0,
            moved: Moved::default(),
            error: None,
            gives_way: false,
            cancel: Arc::new(AtomicBool::new(false)),
            plan,
        })
    }

    /// What it was made for.
    pub const fn plan(&self) -> &FoldPlan {
        &self.plan
    }

    /// For people and for the engine.
    pub fn state(&self) -> FoldState {
        FoldState {
            name: self.plan.name.clone(),
            done: self.done.min(self.total),
            total: self.total,
            error: self.error.clone(),
        }
    }

    /// Bytes that were read and written so far, and bytes whose space is shared instead.
    pub const fn moved(&self) -> (u64, u64) {
        (self.moved.copied, self.moved.shared)
    }

    /// It is over.
    pub fn is_ended(&self) -> bool {
        self.stage == Stage::Ended
    }

    /// It ends at the next step. Work that runs is cut short.
    pub fn stop(&mut self, why: &str) {
        if !self.is_ended() {
            self.cancel.store(true, Ordering::Relaxed);
            self.error.get_or_insert_with(|| why.to_owned());
        }
    }

    pub(super) fn target(&self) -> LayerNo {
        match self.direction {
            Direction::IntoParent => self.parent,
            Direction::IntoChild => self.child,
        }
    }

    fn source(&self) -> LayerNo {
        match self.direction {
            Direction::IntoParent => self.child,
            Direction::IntoChild => self.parent,
        }
    }

    fn pair(&self, store: &Store) -> Pair {
        let (parent, child) = (store.at(self.parent), store.at(self.child));
        Pair {
            parent: Arc::clone(&parent.file),
            child: Arc::clone(&child.file),
            parent_length: parent.length,
            child_length: child.length,
            look: parent.look,
        }
    }

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

    fn next_move(&mut self, store: &mut Store) -> io::Result<Option<Step>> {
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
    fn plan_head(&mut self, store: &mut Store, range: Extent) -> io::Result<Option<Step>> {
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

    fn copied(&mut self, store: &mut Store, runs: &[Extent], moved: Moved) -> io::Result<()> {
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

    fn broken_off(&mut self, why: &str, store: &mut Store) -> io::Result<()> {
        self.error.get_or_insert_with(|| why.to_owned());
        self.set_back(store, Stage::Ended)
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

    /// It cannot go on.
    pub fn fail(&mut self, why: String) {
        self.error.get_or_insert(why);
        self.stage = Stage::Ended;
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
