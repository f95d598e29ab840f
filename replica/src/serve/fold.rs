//! Folds beside the requests: one at a time, step by step, on the ring's thread what is short, the rest on the worker's
//! and on a thread for what reads and writes much.
//!
//! A step that goes into the head claims its range first: a client's write of it waits until the claim is given back,
//! and the claim waits for those that had begun (`docs/invariants.md`, 3). Reads go on.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use lh_block::Extent;
use lh_ring::Fd;
use lh_wire::FoldState;

use super::core::{Failure, Input, Job, PersistId, RequestId};
use super::fold_thread::FoldThread;
use super::folder::{Run, Waits};
use super::request::Work as RequestWork;
use super::server::Server;
use super::task::{FoldReport, FoldTask, Task};
use super::trouble::note;
use crate::store::{Fold, FoldPlan, FoldStep, FoldWork, FoldedChecksums};

impl Server {
    /// Puts a write off that would meet a fold. True: it waits.
    pub(super) fn held_by_fold(&mut self, id: RequestId, job: Job) -> bool {
        // What was begun is waited for; it must not wait in turn.
        let begun = !matches!(self.requests.get(id).work, RequestWork::None);
        if begun || !(self.folder.holds_back(job) || self.waits_for_fold(id, job)) {
            return false;
        }
        self.folder.waiting.push(id);
        true
    }

    pub(super) fn begin_fold(&mut self, id: PersistId, name: String, bytes_per_second: Option<u64>) {
        let refused = match &mut self.folder.run {
            Some(run) if run.fold.plan().name == name => {
                run.bytes_per_second = bytes_per_second;
                return self.inputs.push_back(Input::Persisted { id, result: Ok(()) });
            }
            Some(run) => Some(format!("snapshot {} is being folded: one at a time", run.fold.plan().name)),
            None => self.folder.beginning.is_some().then(|| "a fold is beginning: one at a time".to_owned()),
        };
        if let Some(why) = refused {
            let result = Err(Failure::Refused(why.into()));
            return self.inputs.push_back(Input::Persisted { id, result });
        }
        self.folder.beginning = Some((id, bytes_per_second));
        self.ask_worker(Task::Fold(FoldTask::Begin(id, name)));
    }

    pub(super) fn stop_fold(&mut self, id: PersistId) {
        self.folder.stop("it was stopped");
        self.inputs.push_back(Input::Persisted { id, result: Ok(()) });
    }

    fn fold_begun(&mut self, id: PersistId, plan: Result<FoldPlan, Failure>) {
        let (_, bytes_per_second) = self.folder.beginning.take().unwrap_or((id, None));
        let result = plan.and_then(|plan| {
            let gone = || Failure::Refused("the snapshot is gone".into());
            let mut fold = Fold::new(&self.store, plan).ok_or_else(gone)?;
            self.start_fold_thread().map_err(|e| note(&self.status, &e))?;
            if self.held.is_some() || self.stopping {
                return Err(Failure::Refused("the directory is being closed".into()));
            }
            tracing::info!("folding snapshot {}", fold.plan().name);
            self.status.set_fold(Some(fold.state()));
            if self.has_images_of(&fold) {
                fold.give_way();
            }
            self.hasher.forget_folded(fold.plan().child.as_deref().unwrap_or_default());
            self.hasher.forget_folded(&fold.plan().name);
            self.checksums.forget_given_up();
            let checksums = self.checksums_of_both(fold.plan());
            let waits = Waits::Nothing;
            self.folder.run = Some(Run {
                fold,
                bytes_per_second,
                not_before: 0,
                reckoned: 0,
                waits,
                claim: None,
                checksums,
            });
            Ok(())
        });
        self.inputs.push_back(Input::Persisted { id, result });
        self.begin_waiting();
    }

    /// The checksums of a snapshot that goes and of the one above it, if both have some: only what is folded by them gets
    /// some. Of what nobody knows to be sound a checksum would make the truth.
    pub(super) fn checksums_of_both(&self, plan: &FoldPlan) -> Option<Box<FoldedChecksums>> {
        let above = plan.child.as_deref().filter(|child| !child.is_empty())?;
        let (upper, lower) = (self.store.layer(above)?, self.store.layer(&plan.name)?);
        self.checksums.of_both(&self.store, upper, lower).map(Box::new)
    }

    /// Goes on with the fold as far as nothing has to be waited for.
    pub(super) fn pump_fold(&mut self, now: u64) {
        self.release_gone();
        if self.core.is_failed() {
            self.folder.stop("the replica has failed");
        } else if self.stopping {
            self.folder.stop("the replica's process ends");
        } else if !self.core.is_in_use() && self.held.is_none() {
            return;
        }
        while self.may_step(now) {
            let Some(run) = &mut self.folder.run else { return };
            match run.fold.next(&mut self.store) {
                Ok(step) => self.take_fold_step(step),
                Err(e) => self.break_fold(&e),
            }
        }
    }

    fn may_step(&mut self, now: u64) -> bool {
        self.end_standing_aside(now);
        let Some(run) = &self.folder.run else { return false };
        let ready = match run.waits {
            Waits::Nothing => run.is_due(now),
            Waits::Claim => !run.claim.is_some_and(|claim| self.is_written(claim)),
            Waits::Punch => !self.flusher.is_punching(),
            // A prepared operation may stay for long; who wants an end gets it.
            Waits::Chain => run.fold.is_broken_off(),
            Waits::Images => run.fold.state().error.is_some(),
            Waits::Report => false,
        };
        if let Some(run) = self.folder.run.as_mut().filter(|_| ready) {
            run.waits = Waits::Nothing;
        }
        ready
    }

    /// A client's change of the range has begun and not ended.
    fn is_written(&self, range: Extent) -> bool {
        let begun = |(id, job): (RequestId, Job)| {
            job.is_write() && job.range().overlaps(range) && !self.folder.waiting.contains(&id)
        };
        self.requests.jobs().any(begun)
    }

    fn take_fold_step(&mut self, step: FoldStep) {
        let Some(run) = &mut self.folder.run else { return };
        run.waits = Waits::Report;
        let plan = || run.fold.plan().clone();
        let task = match step {
            FoldStep::Work(work) => {
                if let Some(thread) = &mut self.folder.thread {
                    thread.send(work);
                }
                return;
            }
            FoldStep::Claim(range) => {
                run.claim = Some(range);
                run.waits = Waits::Claim;
                return;
            }
            FoldStep::Release => {
                run.waits = Waits::Nothing;
                return self.end_claim();
            }
            FoldStep::Punching => {
                run.waits = Waits::Punch;
                return;
            }
            FoldStep::Flush => return self.flusher.fold_waits(),
            FoldStep::Ended => return self.fold_ended(),
            FoldStep::MakeMap(name) => FoldTask::MakeMap(name),
            FoldStep::MarkZeroes => FoldTask::MarkZeroes,
            FoldStep::Choose(direction) => {
                self.folder.forgotten = false;
                FoldTask::Choose(plan(), direction)
            }
            FoldStep::GiveWay => return self.forget_fold(),
            FoldStep::Note(direction, at) => FoldTask::Note(plan(), direction, at),
            FoldStep::Switch(direction) => FoldTask::Switch(plan(), direction),
            FoldStep::Ready => FoldTask::Ready(plan()),
            FoldStep::Swap => {
                let swap = Task::SwapFold(plan());
                return self.ask_worker(swap);
            }
            // It was asked for with the swap.
            FoldStep::Finish => return,
        };
        self.ask_worker(Task::Fold(task));
    }

    /// Writes that waited for the claim's end begin.
    fn end_claim(&mut self) {
        if let Some(run) = &mut self.folder.run {
            run.claim = None;
        }
        self.begin_waiting();
    }

    /// Writes that waited begin, or wait again.
    pub(super) fn begin_waiting(&mut self) {
        for id in std::mem::take(&mut self.folder.waiting) {
            if let Some(job) = self.requests.get(id).job {
                self.start_job(id, job);
            }
        }
    }

    fn fold_ended(&mut self) {
        let Some(run) = self.folder.run.take() else { return };
        let state = run.fold.state();
        match &state.error {
            None => {
                tracing::info!("snapshot {} is folded away", state.name);
                if let (Some(name), Some(before)) = (run.fold.plan().child.clone(), run.checksums) {
                    self.hasher.add_folded(name, before);
                }
            }
            Some(why) => tracing::warn!("snapshot {} is not folded away: {why}", state.name),
        }
        self.status.set_fold(Some(state).filter(|state| state.error.is_some()));
        self.end_claim();
    }

    /// What the store or a file holds is not known any more.
    fn break_fold(&mut self, error: &io::Error) {
        self.break_down(error);
        if let Some(run) = &mut self.folder.run {
            run.fold.fail(error.to_string());
            run.waits = Waits::Nothing;
        }
    }

    /// The thread has done a piece of work.
    pub(super) fn fold_heard(&mut self) {
        while let Some(work) = self.folder.thread.as_mut().and_then(FoldThread::next) {
            self.fold_worked(work);
        }
    }

    fn fold_worked(&mut self, work: FoldWork) {
        if work.is_closing() {
            return self.closed_elsewhere();
        }
        let now = self.now();
        let Some(run) = self.folder.run.as_mut() else { return };
        run.waits = Waits::Nothing;
        let result = run.fold.worked(&mut self.store, work);
        let copied = run.fold.moved().0;
        if let Some(rate) = run.bytes_per_second.filter(|rate| *rate > 0) {
            let pause = u128::from(copied - run.reckoned) * 1_000_000_000 / u128::from(rate);
            run.not_before = now.saturating_add(u64::try_from(pause).unwrap_or(u64::MAX));
        }
        run.reckoned = copied;
        self.status.set_fold(Some(run.fold.state()));
        if let Err(e) = result {
            self.break_fold(&e);
        }
    }

    /// The flush that the fold waits for has ended.
    pub(super) fn fold_flushed(&mut self, ok: bool) {
        let Some(run) = self.folder.run.as_mut().filter(|run| run.waits == Waits::Report) else { return };
        run.waits = Waits::Nothing;
        if ok { run.fold.flushed() } else { run.fold.fail("a sync failed".into()) }
    }

    pub(super) fn fold_reported(&mut self, report: FoldReport) {
        let report = match report {
            FoldReport::Begun(id, plan) => return self.fold_begun(id, plan),
            FoldReport::Forgotten(result) => return self.fold_forgotten(&result),
            other => other,
        };
        let Some(run) = &mut self.folder.run else { return };
        run.waits = Waits::Nothing;
        let (fold, store) = (&mut run.fold, &mut self.store);
        let result = match report {
            FoldReport::Begun(..) | FoldReport::Forgotten(_) => Ok(()),
            FoldReport::MapMade(made) => made.map(|map| fold.map_made(store, map.map(|map| *map))),
            FoldReport::ZeroesMarked(done) => done.map(|()| store.marked()),
            FoldReport::Chosen(done) => done.map(|()| fold.chosen(store)),
            FoldReport::Noted(done) => done.map(|()| fold.noted()),
            FoldReport::Switched(Ok(None)) => {
                run.waits = Waits::Chain;
                Ok(())
            }
            FoldReport::Switched(Ok(Some(folded))) | FoldReport::Swapped(Ok(Some(folded))) => {
                let layer = fold.switched(store, &folded);
                self.folder.gone.add(layer, &self.requests);
                // The head has no checksums.
                self.checksums.forget(store.head());
                Ok(())
            }
            FoldReport::Readied(Ok(None)) => {
                run.waits = Waits::Chain;
                Ok(())
            }
            FoldReport::Readied(Ok(Some(ready))) => {
                fold.readied(ready);
                Ok(())
            }
            FoldReport::Swapped(Ok(None)) => {
                fold.not_swapped();
                Ok(())
            }
            FoldReport::Finished(Ok(())) => {
                fold.finished();
                Ok(())
            }
            FoldReport::Switched(Err(failure))
            | FoldReport::Swapped(Err(failure))
            | FoldReport::Readied(Err(failure))
            | FoldReport::Finished(Err(failure)) => Err(failure),
        };
        match result {
            Ok(()) => {}
            Err(Failure::Refused(why)) => run.fold.fail(why.into()),
            Err(Failure::NoSpace) => run.fold.fail("the disk is full".into()),
            Err(_) => self.break_fold(&io::Error::other("the worker could not keep its part of a fold")),
        }
    }

    /// Lets go of layers that nothing reads any more: of all of them, before their numbers are given to others.
    fn release_gone(&mut self) {
        while !self.flusher.is_punching()
            && let Some(layer) = self.folder.gone.take_unread(&self.requests)
        {
            self.checksums.forget(layer);
            let Some(file) = self.store.release(layer) else { continue };
            let head = self.files[usize::from(self.store.head().0)].clone();
            // The ring's own descriptor goes first, so that the thread's is the last.
            let own: Fd = std::mem::replace(&mut self.files[usize::from(layer.0)], head);
            drop(own);
            self.close_elsewhere(file);
        }
    }

    fn start_fold_thread(&mut self) -> io::Result<()> {
        if self.folder.thread.is_none() {
            self.folder.thread = Some(FoldThread::start(self.status.bell())?);
        }
        Ok(())
    }

    /// Lets go of a layer's file on the thread for what takes long. One that has a name, or goes on being used, is closed at once.
    pub(super) fn close_elsewhere(&mut self, file: Arc<std::fs::File>) {
        if file.metadata().is_ok_and(|stat| stat.nlink() > 0) {
            return;
        }
        match self.start_fold_thread() {
            Ok(()) => {
                if let Some(thread) = &mut self.folder.thread {
                    self.folder.closing += 1;
                    thread.send(FoldWork::closing(file));
                }
            }
            Err(e) => tracing::warn!("a layer that is gone gives its space back while requests wait: {e}"),
        }
    }

    fn closed_elsewhere(&mut self) {
        self.folder.closing -= 1;
        if self.folder.closing == 0
            && let Some(id) = self.folder.emptied.take()
        {
            self.inputs.push_back(Input::Persisted { id, result: Ok(()) });
        }
    }

    /// For [`lh_wire::ReplicaState::fold`].
    pub(super) fn fold_state(&self) -> Option<FoldState> {
        self.status.fold()
    }
}
