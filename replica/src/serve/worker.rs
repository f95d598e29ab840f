//! The worker thread: everything that creates, renames and syncs metadata. It does its tasks in the order in which
//! they come, and rings the bell after each.

use std::io;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use lh_ring::Bell;
use lh_wire::{ChainOp, LayerInfo, ReplicaState};

use super::Status;
use super::core::Failure;
use super::task::{Change, FoldReport, FoldTask, Report, Saved, Task};
use super::trouble::{Trouble, note};
use crate::store::{BackingFile, ChainError, Directory};

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
