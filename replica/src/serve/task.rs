//! What the ring's thread asks of the worker, and what that reports.

use crossbeam_channel::Sender;
use lh_block::{Epoch, Generation, Instance};
use lh_wire::{ChainOp, Keep, LayerInfo, Outsider, ReplicaState};

use super::core::{Failure, PersistId, RequestId};
use crate::store::{Closing, Committed, Direction, FoldPlan, Folded, NewZeroMap, Parts, Trail};

/// Work for the worker. Few are ever queued: a fence, a control operation, a mark of zeroes, a sync of a commit, and
/// what [`super::Status::state`] asks.
#[derive(Debug)]
pub(super) enum Task {
    Record(PersistId, Saved),
    Describe(RequestId),
    MarkZeroes,
    /// A zero map for a layer that came with an import, by its name.
    MakeZeroMap(String),
    SyncCommit,
    Fold(FoldTask),
    /// A fold's change of heads. Two reports: writes go on after the first, and the second says that it is finished.
    SwapFold(FoldPlan),
    /// For [`super::Status::state`].
    Look(Sender<ReplicaState>),
    Stop,
}

/// A record that the worker makes durable.
#[derive(Debug)]
pub(super) enum Saved {
    Begin(Generation),
    Whole,
    Fence(Generation, Instance),
    Epoch(Epoch, Vec<Outsider>),
    Missed(Vec<(u64, Trail)>),
    Prepare(Instance, ChainOp),
    Commit(Instance),
    Abort(Instance),
    Settled(String),
    RebuildBegin(u64, Vec<LayerInfo>, Option<Keep>),
    RebuildEnd,
    Close(Closing),
}

/// What became of a task.
#[derive(Debug)]
pub(super) enum Report {
    Recorded(PersistId, Result<Change, Failure>),
    Described(RequestId, Box<ReplicaState>),
    ZeroesMarked(Result<(), Failure>),
    ZeroMapMade(Result<Option<Box<NewZeroMap>>, Failure>),
    CommitSynced(Result<(), Failure>),
    Fold(FoldReport),
}

/// What the ring's thread has to do to its own half after a record.
#[derive(Debug)]
pub(super) enum Change {
    None,
    Committed(Committed),
    Rebuilt(Box<Parts>),
}

/// What a fold asks of the worker.
#[derive(Debug)]
pub(super) enum FoldTask {
    Begin(PersistId, String),
    MakeMap(String),
    MarkZeroes,
    Choose(FoldPlan, Direction),
    Note(FoldPlan, Direction, u64),
    Switch(FoldPlan, Direction),
    Ready(FoldPlan),
    /// What is noted of an earlier fold, or of this one, counts no more.
    Forget,
}

/// What became of it.
#[derive(Debug)]
pub(super) enum FoldReport {
    Begun(PersistId, Result<FoldPlan, Failure>),
    MapMade(Result<Option<Box<NewZeroMap>>, Failure>),
    ZeroesMarked(Result<(), Failure>),
    Chosen(Result<(), Failure>),
    Noted(Result<(), Failure>),
    /// `None`: a chain operation is prepared.
    Switched(Result<Option<Folded>, Failure>),
    /// Likewise.
    Readied(Result<Option<bool>, Failure>),
    Swapped(Result<Option<Folded>, Failure>),
    Finished(Result<(), Failure>),
    Forgotten(Result<(), Failure>),
}
