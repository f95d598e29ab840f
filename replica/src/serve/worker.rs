//! The worker thread: everything that creates, renames and syncs metadata. It does its tasks in the order in which
//! they come, and rings the bell after each.

use std::io;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use lh_block::{Epoch, Generation, Instance};
use lh_ring::Bell;
use lh_wire::{ChainOp, Keep, LayerInfo, Outsider, ReplicaState};

use super::Status;
use super::core::{Failure, PersistId, RequestId};
use super::fold::{FoldReport, FoldTask};
use super::status::DiskTrouble;
use crate::store::{
    BackingFile, ChainError, Closing, Committed, Directory, FoldPlan, NewZeroMap, Parts, Trail,
};

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

/// The ring thread's side of the worker.
#[derive(Debug)]
pub(super) struct Worker {
    tasks: Sender<Task>,
    reports: Receiver<Report>,
    thread: Option<JoinHandle<()>>,
    gone: bool,
}

/// Rings when the thread ends, however it ends.
struct Toll(Bell);

impl Drop for Toll {
    fn drop(&mut self) {
        self.0.ring();
    }
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start(directory: Directory, bell: Bell, status: Status) -> io::Result<Self> {
        let (tasks, inbox) = unbounded();
        let (outbox, reports) = unbounded();
        let run = move || {
            let toll = Toll(bell);
            work(directory, &inbox, outbox, &toll.0, &status);
        };
        let thread = std::thread::Builder::new().name("replica-worker".into()).spawn(run)?;
        Ok(Self { tasks, reports, thread: Some(thread), gone: false })
    }

    pub(super) fn tasks(&self) -> Sender<Task> {
        self.tasks.clone()
    }

    pub(super) fn send(&mut self, task: Task) {
        self.gone |= self.tasks.send(task).is_err();
    }

    pub(super) fn next_report(&mut self) -> Option<Report> {
        match self.reports.try_recv() {
            Ok(report) => Some(report),
            Err(e) => {
                self.gone |= e == TryRecvError::Disconnected;
                None
            }
        }
    }

    /// The thread has ended, though nobody asked it to.
    pub(super) const fn is_gone(&self) -> bool {
        self.gone
    }

    /// Ends the thread after what it has to do.
    pub(super) fn stop(mut self) {
        self.send(Task::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(
    mut directory: Directory,
    inbox: &Receiver<Task>,
    outbox: Sender<Report>,
    bell: &Bell,
    status: &Status,
) {
    // That is for ever.
    let backed = BackingFile::of(directory.path()).ok().map(|file| file.is_some());
    for task in inbox {
        let report = match task {
            Task::Record(id, saved) => {
                let result =
                    save(&mut directory, saved, status).map_err(|trouble| trouble.into_failure(status));
                Report::Recorded(id, result)
            }
            Task::Describe(id) => {
                Report::Described(id, Box::new(ReplicaState { backed, ..directory.state() }))
            }
            Task::MarkZeroes => Report::ZeroesMarked(directory.mark_zeroes().map_err(|e| note(status, &e))),
            Task::MakeZeroMap(layer) => {
                let made = directory.make_zero_map(&layer).map_err(|e| note(status, &e));
                Report::ZeroMapMade(made.map(|map| map.map(Box::new)))
            }
            Task::SyncCommit => Report::CommitSynced(directory.sync_commit().map_err(|e| note(status, &e))),
            Task::SwapFold(plan) => {
                let swapped = directory.swap_fold(&plan).map_err(|e| note(status, &e));
                let finishes = matches!(swapped, Ok(Some(_)));
                // Writes wait no longer than this.
                if outbox.send(Report::Fold(FoldReport::Swapped(swapped))).is_err() {
                    return;
                }
                bell.ring();
                if !finishes {
                    continue;
                }
                // The names have half changed: there is no going on without the rest.
                let finished = directory.finish_fold(&plan).map_err(|e| {
                    note(status, &e);
                    Failure::Io
                });
                Report::Fold(FoldReport::Finished(finished))
            }
            Task::Fold(task) => Report::Fold(fold(&mut directory, task, status)),
            Task::Look(reply) => {
                let _ = reply.send(ReplicaState { fold: status.fold(), ..directory.state() });
                continue;
            }
            Task::Stop => return,
        };
        if outbox.send(report).is_err() {
            return;
        }
        bell.ring();
    }
}

fn fold(directory: &mut Directory, task: FoldTask, status: &Status) -> FoldReport {
    let io = |e| note(status, &e);
    match task {
        FoldTask::Begin(id, name) => {
            let plan = directory.begin_fold(&name);
            FoldReport::Begun(id, plan.map_err(|e| Trouble::Chain(e).into_failure(status)))
        }
        FoldTask::MakeMap(layer) => {
            let made = directory.make_zero_map(&layer).map_err(io);
            FoldReport::MapMade(made.map(|map| map.map(Box::new)))
        }
        FoldTask::Forget => FoldReport::Forgotten(directory.forget_fold().map_err(io)),
        FoldTask::MarkZeroes => FoldReport::ZeroesMarked(directory.mark_zeroes().map_err(io)),
        FoldTask::Choose(plan, direction) => {
            FoldReport::Chosen(directory.choose_fold(&plan, direction).map_err(io))
        }
        FoldTask::Note(plan, direction, at) => {
            FoldReport::Noted(directory.save_fold(&plan, direction, at).map_err(io))
        }
        FoldTask::Switch(plan, direction) => {
            FoldReport::Switched(match directory.switch_fold(&plan, direction) {
                Ok(folded) => Ok(Some(folded)),
                Err(ChainError::OtherPrepared(_)) => Ok(None),
                Err(e) => Err(Trouble::Chain(e).into_failure(status)),
            })
        }
        FoldTask::Ready(plan) => FoldReport::Readied(match directory.ready_fold(&plan) {
            Ok(ready) => Ok(Some(ready)),
            Err(ChainError::OtherPrepared(_)) => Ok(None),
            Err(e) => Err(Trouble::Chain(e).into_failure(status)),
        }),
    }
}

/// Why a record was not made durable.
enum Trouble {
    Io(io::Error),
    Chain(ChainError),
    YoungerEpoch,
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<ChainError> for Trouble {
    fn from(error: ChainError) -> Self {
        Self::Chain(error)
    }
}

impl Trouble {
    /// The machine's word for it; what the disk said is noted for people. Where an operation on the chain has begun and not
    /// ended nobody knows what the directory holds, be it for a full disk: the next process looks.
    fn into_failure(self, status: &Status) -> Failure {
        match self {
            Self::Io(error) => note(status, &error),
            Self::Chain(ChainError::Io { what, source }) => {
                status.set_error(format!("{what}: {source}"));
                let full = failure_of(&source) == Failure::NoSpace;
                status.set_trouble(if full { DiskTrouble::Full } else { DiskTrouble::Failed });
                tracing::error!("{what}: {source}");
                Failure::Io
            }
            Self::Chain(refusal) => Failure::Refused(refusal.to_string().into()),
            Self::YoungerEpoch => Failure::Refused("this replica has a younger epoch".into()),
        }
    }
}

/// Notes an error of the disk for people, and gives the machine's word for it.
pub(super) fn note(status: &Status, error: &io::Error) -> Failure {
    tracing::error!("{error}");
    status.set_error(error.to_string());
    let failure = failure_of(error);
    if failure == Failure::Io {
        status.set_trouble(DiskTrouble::Failed);
    }
    failure
}

/// A full disk is no failure of the replica; everything else is.
fn failure_of(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Failure::NoSpace,
        _ => Failure::Io,
    }
}

/// Whether another snapshot fits the limits. What is marked as removed does not count.
fn check_room(chain: &[LayerInfo], (count, bytes): (u32, u64)) -> Result<(), ChainError> {
    let live = || chain.iter().filter(|l| !l.removed);
    let snapshots = live().count().saturating_sub(1);
    if snapshots >= count as usize {
        return Err(ChainError::CountLimit(snapshots));
    }
    let taken = live().map(|l| l.allocated).sum();
    if bytes > 0 && taken > bytes {
        return Err(ChainError::SizeLimit { bytes: taken, limit: bytes });
    }
    Ok(())
}

fn save(directory: &mut Directory, saved: Saved, status: &Status) -> Result<Change, Trouble> {
    match saved {
        Saved::Begin(generation) => {
            directory.begin_use()?;
            directory.note_power(generation)?;
        }
        Saved::Whole => directory.note_whole()?,
        Saved::Fence(generation, instance) => directory.store_fence(generation, instance)?,
        Saved::Missed(trails) => directory.store_missed(&trails)?,
        Saved::Epoch(epoch, out) => {
            if !directory.store_epoch_and_outsiders(epoch, out)? {
                return Err(Trouble::YoungerEpoch);
            }
        }
        Saved::Prepare(id, op) => {
            if let ChainOp::Snapshot { .. } = op {
                check_room(&directory.state().chain, status.snapshot_limits())?;
            }
            directory.prepare(id, &op)?;
        }
        Saved::Commit(id) => return Ok(Change::Committed(directory.commit(id)?)),
        Saved::Abort(id) => directory.abort(id)?,
        Saved::Settled(snapshot) => directory.store_settled(&snapshot)?,
        Saved::RebuildBegin(size, chain, Some(keep)) => {
            return Ok(Change::Rebuilt(Box::new(directory.begin_catch_up(size, &chain, &keep)?)));
        }
        Saved::RebuildBegin(size, chain, None) => {
            return Ok(Change::Rebuilt(Box::new(directory.begin_rebuild(size, &chain)?)));
        }
        Saved::RebuildEnd => {
            directory.note_whole()?;
            directory.end_rebuild()?;
        }
        Saved::Close(closing) => directory.close_clean(closing)?,
    }
    Ok(Change::None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A full disk is a reason to refuse what has not begun, and a failure of what has.
    #[test]
    fn an_operation_that_broke_off_half_way_fails_the_replica() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let status = Status::default();
        assert_eq!(Trouble::Io(full()).into_failure(&status), Failure::NoSpace);
        assert_eq!(
            status.trouble(),
            DiskTrouble::None,
            "a sync for which there was no room has taken away what it was for"
        );
        let begun = ChainError::Io { what: "carrying out a snapshot".into(), source: full() };
        assert_eq!(Trouble::Chain(begun).into_failure(&status), Failure::Io);
        let refused = Trouble::Chain(ChainError::NoSpace("a snapshot".into())).into_failure(&status);
        assert!(matches!(refused, Failure::Refused(_)));
        assert_eq!(status.trouble(), DiskTrouble::Full, "what was answered is there");
        assert_eq!(note(&status, &io::ErrorKind::InvalidData.into()), Failure::Io);
        note(&status, &full());
        assert_eq!(status.trouble(), DiskTrouble::Failed, "whatever came last");
    }

    #[test]
    fn removed_snapshots_do_not_count_and_the_head_is_none() {
        let layer = |name: &str, removed| LayerInfo {
            name: name.into(),
            removed,
            allocated: 4096,
            ..LayerInfo::default()
        };
        let chain = [layer("a", false), layer("b", true), layer("", false)];
        assert!(check_room(&chain, (2, 0)).is_ok());
        assert!(matches!(check_room(&chain, (1, 0)), Err(ChainError::CountLimit(1))));
        assert!(check_room(&chain, (2, 8192)).is_ok());
        assert!(matches!(
            check_room(&chain, (2, 8191)),
            Err(ChainError::SizeLimit { bytes: 8192, limit: 8191 })
        ));
    }
}
