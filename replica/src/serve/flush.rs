//! Syncs of the layers: data first, then zero bits, one at a time; and what may follow in quiet hours.
//!
//! A sync serves the machine, the end of a rebuild, or nobody: the store may have bits and holes that another sync
//! brings further ([`crate::store::Store::wants_flush`]).

use std::time::{Duration, Instant};

use lh_ring::{Completion, Falloc, Fd, Token};

use super::core::{Failure, Input, PersistId};
use super::flusher::Run;
use super::server::Server;
use super::status::count;
use super::task::{Saved, Task};
use super::token::{OWNER, kind};
use super::trouble::note;
use crate::store::Store;

/// For how long a turn drops what the end of a rebuild leaves over: requests wait for it.
const DROPPING: Duration = Duration::from_millis(1);

/// How long after the last sync one is made that nobody asked for.
const QUIET_NS: u64 = 2_000_000_000;

impl Server {
    /// Begins a sync that is wanted, and a punch that is possible.
    pub(super) fn pump_flush(&mut self, now: u64) {
        if self.core.is_failed() {
            return self.refuse_syncs();
        }
        self.drop_left_over();
        let flusher = &mut self.flusher;
        let free = self.core.is_in_use() && !self.stopping;
        let quiet = free && flusher.quiet_at.is_some_and(|at| at <= now);
        if flusher.is_wanted() || (quiet && flusher.run.is_none()) {
            self.begin_sync();
        }
        // A mark with a punch on its way could not be dropped.
        let free = free && self.flusher.ending.is_none();
        if free
            && self.flusher.punching.is_none()
            && let Some((layer, hole)) = self.store.take_punch()
        {
            self.flusher.punching = Some((layer, hole));
            let token = Token::new(OWNER, kind::IDLE_PUNCH, 0, 0);
            let file = &self.files[usize::from(layer.0)];
            self.ring.fallocate(token, file, Falloc::PunchHole, hole.offset, hole.len);
        }
    }

    /// After a failed sync there is no other: who waits hears so.
    fn refuse_syncs(&mut self) {
        if std::mem::take(&mut self.flusher.core) {
            self.inputs.push_back(Input::Synced { result: Err(Failure::Io) });
        }
        if std::mem::take(&mut self.flusher.fold) {
            self.fold_flushed(false);
        }
        let ending = self.flusher.ending.take().map(|(id, _)| id);
        for id in self.flusher.rebuild.take().into_iter().chain(ending) {
            self.inputs.push_back(Input::Persisted { id, result: Err(Failure::Io) });
        }
    }

    fn begin_sync(&mut self) {
        let flush = self.store.begin_flush();
        let flusher = &mut self.flusher;
        flusher.quiet_at = None;
        let mut left = flush.data().len();
        for layer in flush.data() {
            let token = Token::new(OWNER, kind::SYNC, 0, 0);
            self.ring.fdatasync(token, &self.files[usize::from(layer.0)]);
        }
        let commit = std::mem::take(&mut flusher.commit);
        left += usize::from(commit);
        let core = std::mem::take(&mut flusher.core);
        let rebuild = flusher.rebuild.take();
        let fold = std::mem::take(&mut flusher.fold);
        flusher.run = Some(Run { flush, bits: false, left, core, rebuild, fold, failure: None });
        count(&self.status.counts().syncs, 1);
        if commit {
            self.ask_worker(Task::SyncCommit);
        }
        if left == 0 {
            self.sync_step();
        }
    }

    pub(super) fn sync_done(&mut self, c: &Completion) {
        let failure = c.result.as_ref().err().map(|e| note(&self.status, e));
        self.sync_part_done(failure);
    }

    pub(super) fn commit_synced(&mut self, result: Result<(), Failure>) {
        self.sync_part_done(result.err());
    }

    fn sync_part_done(&mut self, failure: Option<Failure>) {
        let Some(run) = self.flusher.run.as_mut() else { return };
        run.left -= 1;
        run.failure = run.failure.take().or(failure);
        if run.left == 0 {
            self.sync_step();
        }
    }

    /// Everything of one step has ended: the next.
    fn sync_step(&mut self) {
        let Some(mut run) = self.flusher.run.take() else { return };
        if run.failure.is_none() && !run.bits {
            run.bits = true;
            match self.sync_bits(&run) {
                Ok(0) => {}
                Ok(left) => {
                    run.left = left;
                    self.flusher.run = Some(run);
                    return;
                }
                Err(failure) => run.failure = Some(failure),
            }
        }
        let result = match run.failure {
            Some(_) => Err(Failure::Io),
            None => {
                self.store.end_flush(run.flush);
                Ok(())
            }
        };
        if run.fold {
            self.fold_flushed(result.is_ok());
        }
        self.sync_ended(run.core, run.rebuild, result);
    }

    /// Submits the syncs of the files that zero bits were written to: how many.
    fn sync_bits(&mut self, run: &Run) -> Result<usize, Failure> {
        let files = self.store.flush_data_done(&run.flush).map_err(|e| note(&self.status, &e))?;
        let mut fds = Vec::with_capacity(files.len());
        for file in &files {
            fds.push(Fd::new(file.try_clone().map_err(|e| note(&self.status, &e))?));
        }
        for fd in &fds {
            self.ring.fdatasync(Token::new(OWNER, kind::SYNC, 0, 0), fd);
        }
        Ok(fds.len())
    }

    fn sync_ended(&mut self, core: bool, rebuild: Option<PersistId>, result: Result<(), Failure>) {
        if let Some(id) = rebuild {
            match &result {
                Ok(()) => self.ask_worker(Task::Record(id, Saved::RebuildEnd)),
                Err(failure) => {
                    self.inputs.push_back(Input::Persisted { id, result: Err(failure.clone()) });
                }
            }
        }
        if self.store.wants_flush() && result.is_ok() {
            self.flusher.quiet_at = Some(self.now() + QUIET_NS);
        }
        if core {
            self.inputs.push_back(Input::Synced { result });
        } else if result.is_err() {
            self.inputs.push_back(Input::Broken);
        }
    }

    /// The rebuild is complete: what is left over is dropped, a little with each turn, synced, and then the mark is taken back.
    pub(super) fn end_rebuild(&mut self, id: PersistId) {
        self.flusher.ending = Some((id, 0));
    }

    fn drop_left_over(&mut self) {
        let Some((id, from)) = self.flusher.ending.take() else { return };
        let began = Instant::now();
        let checksums = &mut self.checksums;
        let mut recorded = |store: &Store, layer, part| checksums.recorded(store, layer, part);
        match self.store.end_rebuild(from, &mut recorded, || began.elapsed() >= DROPPING) {
            Ok(None) => self.flusher.rebuild = Some(id),
            Ok(Some(next)) => self.flusher.ending = Some((id, next)),
            Err(e) => {
                note(&self.status, &e);
                self.inputs.push_back(Input::Persisted { id, result: Err(Failure::Io) });
            }
        }
    }

    pub(super) fn idle_punch_done(&mut self, c: &Completion) {
        if let Some((layer, hole)) = self.flusher.punching.take() {
            if let Err(e) = &c.result {
                tracing::warn!("no hole at {hole}: {e}");
            }
            self.store.punched(layer, hole, c.result.is_ok());
            self.unpark();
        }
    }
}
