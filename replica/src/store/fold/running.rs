//! A fold that runs: what it holds, and how it is looked at and stopped.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lh_block::Extent;
use lh_wire::FoldState;

use super::super::data::Store;
use super::super::layer::LayerNo;
use super::stage::Stage;
use super::work::{Found, Moved, Pair};
use super::{Direction, FoldPlan};

/// A fold that runs.
#[derive(Debug)]
pub struct Fold {
    pub(super) plan: FoldPlan,
    pub(super) stage: Stage,
    pub(super) direction: Direction,
    pub(super) parent: LayerNo,
    pub(super) child: LayerNo,
    /// Nothing lies below the parent: what is zero there needs no mark.
    pub(super) base: bool,
    /// Everything before is done; `end` is where the longer layer ends.
    pub(super) at: u64,
    pub(super) end: u64,
    pub(super) found: Found,
    /// `found` is about a head: clients may have written since.
    pub(super) found_head: bool,
    /// The head goes into the parent.
    pub(super) drain: Option<Drain>,
    pub(super) runs: VecDeque<Extent>,
    pub(super) marks: VecDeque<Extent>,
    /// What the piece of work in hand moves, and the marks that follow it.
    pub(super) moving: Vec<Extent>,
    pub(super) marking: Vec<Extent>,
    pub(super) share: bool,
    pub(super) done: u64,
    pub(super) total: u64,
    /// Bytes that the other direction would move.
    pub(super) other_way: u64,
    pub(super) unnoted: u64,
    pub(super) moved: Moved,
    pub(super) error: Option<String>,
    /// It is to stand aside.
    pub(super) gives_way: bool,
    pub(super) cancel: Arc<AtomicBool>,
}

/// A head on its way into the parent.
#[derive(Debug, Default)]
pub(super) struct Drain {
    /// Times that it was gone through.
    pub(super) times: u32,
    /// The names have changed.
    pub(super) finished: bool,
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

    /// It cannot go on.
    pub fn fail(&mut self, why: String) {
        self.error.get_or_insert(why);
        self.stage = Stage::Ended;
    }

    pub(super) fn target(&self) -> LayerNo {
        match self.direction {
            Direction::IntoParent => self.parent,
            Direction::IntoChild => self.child,
        }
    }

    pub(super) fn source(&self) -> LayerNo {
        match self.direction {
            Direction::IntoParent => self.child,
            Direction::IntoChild => self.parent,
        }
    }

    pub(super) fn pair(&self, store: &Store) -> Pair {
        let (parent, child) = (store.at(self.parent), store.at(self.child));
        Pair {
            parent: Arc::clone(&parent.file),
            child: Arc::clone(&child.file),
            parent_length: parent.length,
            child_length: child.length,
            look: parent.look,
        }
    }
}
