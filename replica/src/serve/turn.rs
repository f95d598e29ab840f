//! The ring's thread: completions become inputs of the machine, its outputs become operations.

use std::time::Duration;

use lh_ring::{Completion, Fd};
use lh_wire::ChainOp;

use super::core::{Failure, Input, Job, Output, PersistId, Record, RequestId};
use super::peer::{Phase, SEND_PATIENCE_NS};
use super::request::Digesting;
use super::server::{Held, Server};
use super::status::DiskTrouble;
use super::task::{Change, Report, Saved, Task};
use super::token::kind;
use super::trouble::note;
use super::{Mode, ServeError};
use crate::store::{Committed, Parts};

/// How long a replica that has failed stays, so that whoever waits hears of it.
const LAST_WORDS_NS: u64 = 1_000_000_000;

impl Server {
    pub(super) fn serve(mut self) -> Result<(), ServeError> {
        loop {
            self.pump();
            if self.worker.is_gone() {
                return Err(ServeError::Worker);
            }
            if self.stopping && self.is_quiet() {
                break;
            }
            if let Some(why) = self.given_up() {
                return Err(ServeError::Failed { why, full: self.status.trouble() == DiskTrouble::Full });
            }
            let timeout = self.next_wake().map(|at| Duration::from_nanos(at.saturating_sub(self.now())));
            self.ring.turn(timeout).map_err(ServeError::Ring)?;
            while let Some(completion) = self.ring.next() {
                self.completed(completion)?;
            }
        }
        self.hasher.stop();
        self.worker.stop();
        Ok(())
    }

    fn is_quiet(&self) -> bool {
        self.core.is_idle()
            && self.flusher.is_idle()
            && self.folder.is_idle()
            && self.peers.iter().next().is_none()
    }

    /// Why it ends by itself. A replica that has failed does nothing more, and a process that follows it is one that comes back:
    /// it knows what its directory holds, and is brought in sync.
    fn given_up(&mut self) -> Option<String> {
        if !self.core.is_failed() {
            return None;
        }
        let now = self.now();
        let ends_at = *self.ends_at.get_or_insert(now.saturating_add(LAST_WORDS_NS));
        let nobody_listens = self.peers.iter().next().is_none();
        (nobody_listens || now >= ends_at).then(|| self.status.snapshot().last_error.unwrap_or_default())
    }

    fn completed(&mut self, c: Completion) -> Result<(), ServeError> {
        match c.token.kind {
            // Without its bell it would answer pings, and record nothing any more, and nobody could stop it.
            kind::BELL => c.result.map(|_| self.heard()).map_err(ServeError::Deaf)?,
            kind::ACCEPT => self.accepted(c),
            kind::RECV => self.received(c),
            kind::KNOCK => self.knocked(&c),
            kind::SEND => self.sent(&c),
            kind::READ => self.read_done(c),
            kind::WRITE => self.write_done(&c),
            kind::PUNCH => self.punch_done(&c),
            kind::SYNC => self.sync_done(&c),
            kind::IDLE_PUNCH => self.idle_punch_done(&c),
            kind::MARK_WRITE | kind::MARK_SYNC => self.mark_op_done(c),
            _ => {}
        }
        // Applied at once, so that answers of one batch leave in one send, and memory is used again early.
        self.run_machine();
        Ok(())
    }

    /// Somebody rang: the worker with a report, or another thread that wants the server to end.
    fn heard(&mut self) {
        while let Some(report) = self.worker.next_report() {
            self.reported(report);
        }
        self.fold_heard();
        if self.status.is_stopping() && !self.stopping {
            self.stopping = true;
            self.close_door();
        }
    }

    fn reported(&mut self, report: Report) {
        match report {
            Report::Fold(report) => self.fold_reported(report),
            Report::Recorded(id, result) => {
                self.folder.chain_changed();
                let rebuilt = matches!(result, Ok(Change::Rebuilt(_)));
                let result = result.and_then(|change| self.take_change(change));
                if rebuilt && result.is_ok() && self.folder.closing > 0 {
                    // What it brings needs the space of what is gone.
                    self.folder.emptied = Some(id);
                } else {
                    self.inputs.push_back(Input::Persisted { id, result });
                }
            }
            Report::Described(request, mut state) => {
                state.fold = self.fold_state();
                state.hash = self.hasher.report();
                self.inputs.push_back(Input::Described { request, result: Ok(state) });
            }
            Report::ZeroesMarked(result) => self.zeroes_marked(result),
            Report::ZeroMapMade(result) => self.zero_map_made(result),
            Report::CommitSynced(result) => self.commit_synced(result),
        }
        self.run_machine();
    }

    /// The worker changed the directory: the store follows before anybody else acts on it.
    fn take_change(&mut self, change: Change) -> Result<(), Failure> {
        match change {
            Change::None => return Ok(()),
            Change::Committed(head) => {
                self.flusher.commit_follows();
                match head {
                    Committed::Head(head) => {
                        let number = self.store.switch_head(*head);
                        // The number of a layer that is gone may be used again.
                        if usize::from(number.0) < self.files.len() {
                            let file = self.store.layer_file(number).try_clone();
                            let file = file.map_err(|e| note(&self.status, &e))?;
                            self.files[usize::from(number.0)] = Fd::new(file);
                        }
                    }
                    Committed::Chain(parts) => self.replace_layers(*parts),
                    Committed::Nothing => return Ok(()),
                }
            }
            Change::Rebuilt(parts) => self.replace_layers(*parts),
        }
        self.open_files().map_err(|e| note(&self.status, &e))
    }

    /// All layers are others, under other numbers.
    fn replace_layers(&mut self, parts: Parts) {
        let before = self.store.replace(parts);
        // The ring's own descriptors go first, so that the thread's are the last.
        self.files.clear();
        self.checksums.forget_all();
        before.into_iter().for_each(|file| self.close_elsewhere(file));
    }

    /// Feeds the machine and carries out what it wants, until it wants nothing more.
    pub(super) fn run_machine(&mut self) {
        while let Some(input) = self.inputs.pop_front() {
            let now = self.now();
            self.core.apply(now, input, &mut self.outputs);
            // Before anybody hears of what has become of the session.
            self.watch_grant();
            let mut outputs = std::mem::take(&mut self.outputs);
            outputs.drain(..).for_each(|output| self.carry_out(output));
            self.outputs = outputs;
        }
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Welcome { conn, generation } => self.welcome(conn, generation),
            Output::Refuse { conn, verdict, generation } => self.refuse(conn, verdict, generation),
            Output::Reply { conn, request, header, body } => self.reply(conn, request, header, body),
            Output::Drop { request } => self.requests.remove(request),
            Output::Store { request, job } => self.start_job(request, job),
            Output::Sync => self.flusher.core_waits(),
            Output::Describe { request } => self.ask_worker(Task::Describe(request)),
            Output::Map { request, layer, from, recorded } => {
                self.map_layer(request, &layer, from, recorded);
            }
            Output::Persist { id, record } => self.persist(id, record),
            Output::Close { conn, reason } => {
                tracing::info!("connection {} closed: {reason:?}", conn.0);
                self.hang_up(conn);
            }
        }
    }

    fn persist(&mut self, id: PersistId, record: Record) {
        let saved = match record {
            Record::Intent { mark, clear } => return self.save_marks(id, &mark, &clear),
            Record::RebuildEnd => return self.end_rebuild(id),
            Record::Begin { generation } => Saved::Begin(generation),
            Record::Whole => Saved::Whole,
            Record::Fence { generation, instance } => Saved::Fence(generation, instance),
            Record::Epoch { epoch, out } => Saved::Epoch(epoch, out),
            Record::Missed { trails } => {
                Saved::Missed(trails.into_iter().map(|(chunk, trail)| (chunk, trail.0)).collect())
            }
            Record::Prepare { id, op } => {
                self.reverting = matches!(op, ChainOp::Revert { .. }).then_some(id);
                Saved::Prepare(id, op)
            }
            Record::Commit { id: op } if self.reverting == Some(op) => {
                return self.hold(id, Held::Revert(op));
            }
            Record::Commit { id } => Saved::Commit(id),
            Record::Abort { id } => Saved::Abort(id),
            Record::Settled { snapshot } => Saved::Settled(snapshot),
            Record::RebuildBegin { size, chain, keep } => {
                return self.hold(id, Held::Rebuild(size, chain, keep));
            }
            Record::Close => return self.hold(id, Held::Close),
            Record::Fold { name, bytes_per_second } => return self.begin_fold(id, name, bytes_per_second),
            Record::FoldStop => return self.stop_fold(id),
            Record::Hash { snapshots, bytes_per_second } => {
                self.hasher.add(snapshots, false, bytes_per_second.unwrap_or(0));
                return self.inputs.push_back(Input::Persisted { id, result: Ok(()) });
            }
            Record::HashStop => {
                self.hasher.cancel(None);
                return self.inputs.push_back(Input::Persisted { id, result: Ok(()) });
            }
        };
        self.ask_worker(Task::Record(id, saved));
    }

    fn hold(&mut self, id: PersistId, held: Held) {
        self.folder.stop(match held {
            Held::Close => "the directory is being closed",
            Held::Revert(_) | Held::Rebuild(..) => "the chain is changed",
        });
        self.hasher.cancel(None);
        self.held = Some((id, held));
    }

    /// Goes on with a record that had to wait. What it waited for may have failed: then nobody knows what the layers hold, and
    /// no record says that they are closed, or are others. What has just come up is heard by the machine first.
    fn release_held(&mut self) {
        let is_free = self.inputs.is_empty() && self.flusher.is_idle() && self.folder.is_idle();
        let Some((id, held)) = self.held.take_if(|_| is_free) else { return };
        if self.core.is_failed() {
            return self.inputs.push_back(Input::Persisted { id, result: Err(Failure::Io) });
        }
        let saved = match held {
            Held::Rebuild(size, chain, keep) => Saved::RebuildBegin(size, chain, keep),
            Held::Revert(op) => Saved::Commit(op),
            Held::Close => Saved::Close(self.store.close()),
        };
        self.ask_worker(Task::Record(id, saved));
    }

    /// Hands a job to the store, unless a fold is at work in its range.
    pub(super) fn start_job(&mut self, id: RequestId, job: Job) {
        self.requests.get(id).job = Some(job);
        if self.held_by_fold(id, job) {
            return;
        }
        match job {
            Job::Read(range) => self.start_read(id, range),
            Job::Write(range) => self.start_write(id, range),
            Job::Zero(range) | Job::Unmap(range) => self.start_zero(id, range),
            Job::ReadLayer { range, merged } => self.start_read_layer(id, range, merged),
            Job::PutLayer { range, trailer } => self.start_put(id, range, trailer),
            Job::DigestLayer(range) => self.start_digest(id, range, Digesting::Tell),
            Job::CompareLayer(range) => self.start_digest(id, range, Digesting::Compare),
            Job::VerifyLayer(range) => self.start_digest(id, range, Digesting::Verify),
            Job::Places(range) => self.tell_places(id, range),
            Job::Allocation(range) => self.tell_allocation(id, range),
        }
    }

    /// Between two turns: everything that can go on goes on, everything queued is submitted.
    fn pump(&mut self) {
        let now = self.now();
        if self.core.wake_at().is_some_and(|at| at <= now) {
            self.inputs.push_back(Input::Tick);
        }
        self.part_with_the_late(now);
        loop {
            self.run_machine();
            self.feed_hungry();
            self.resume_stalled();
            self.pump_flush(now);
            self.pump_fold(now);
            self.release_held();
            self.pump_marks();
            // What ended at once has something to say to the machine, which may want more; and a fold may want a sync.
            if self.inputs.is_empty() && !self.flusher.is_wanted() {
                break;
            }
        }
        self.watch_grant();
        self.pump_door(now);
        self.pump_streams(now);
        self.publish();
    }

    /// Requests that waited for memory try again, up to the first that goes on waiting.
    fn feed_hungry(&mut self) {
        while let Some(id) = self.hungry.pop_front() {
            if let Some(job) = self.requests.get(id).job {
                self.start_job(id, job);
            }
            if self.hungry.front() == Some(&id) {
                return;
            }
            if self.hungry.back() == Some(&id) {
                self.hungry.rotate_right(1);
                return;
            }
        }
    }

    /// Submits receives and sends.
    fn pump_streams(&mut self, now: u64) {
        let may_receive = self.may_receive();
        for peer in self.peers.iter_mut() {
            if peer.may_lend && matches!(peer.phase, Phase::Hello(_)) {
                if !std::mem::replace(&mut peer.awaited, true) {
                    self.ring.poll_in(peer.conn.token(kind::KNOCK), &peer.fd);
                }
            } else if peer.wants > 0 && may_receive && !peer.rx.is_outstanding() && !peer.is_clogged() {
                // Without memory just now it is tried again with the next turn: something is in flight that holds it.
                let _ = self.ring.recv(peer.conn.token(kind::RECV), &peer.fd, &mut peer.rx, peer.wants);
            }
            if self.ring.send(peer.conn.token(kind::SEND), &peer.fd, &mut peer.tx)
                && matches!(peer.phase, Phase::Open)
            {
                peer.deadline.get_or_insert(now + SEND_PATIENCE_NS);
            }
        }
    }

    /// When the loop has something to do although nothing happens.
    fn next_wake(&self) -> Option<u64> {
        let deadlines = self.peers.iter().filter_map(|p| p.deadline);
        // What nobody asked for waits for the directory to be in use, which is heard of.
        let unasked = [self.flusher.wake_at(), self.folder.wake_at()];
        let unasked = unasked.into_iter().filter(|_| self.core.is_in_use() && !self.stopping);
        let at_once = self.flusher.ending.map(|_| 0);
        let own = unasked.chain([self.core.wake_at(), self.door.wake_at(), self.ends_at, at_once]);
        deadlines.chain(own.flatten()).min()
    }

    fn publish(&mut self) {
        let mode = match (self.core.is_failed(), self.core.is_serving()) {
            (true, _) => Mode::Failed,
            (false, true) => Mode::Serving,
            (false, false) => Mode::Idle,
        };
        let news = (mode, self.core.generation());
        if news != self.mode {
            self.mode = news;
            self.status.set_mode(news.0, news.1);
        }
    }
}

#[cfg(test)]
mod tests;
