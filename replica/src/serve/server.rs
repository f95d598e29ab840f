//! The ring's thread: completions become inputs of the machine, its outputs become operations.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use lh_block::{Generation, Instance};
use lh_ring::{Completion, Fd, Pool, Ring};
use lh_wire::{ChainOp, Keep, LayerInfo};

use super::core::{Core, Failure, Input, Job, Output, PersistId, Record, RequestId};
use super::door::Door;
use super::flush::Flusher;
use super::fold::Folder;
use super::grant::Grants;
use super::hash::Hasher;
use super::marks::Marks;
use super::peer::{Peers, Phase, SEND_PATIENCE_NS};
use super::reader::Readers;
use super::request::{Digesting, Requests};
use super::status::DiskTrouble;
use super::verify::Checksums;
use super::worker::{Change, Report, Saved, Task, Worker};
use super::{Mode, ServeError, Status};
use crate::store::{Committed, Parts, Piece, Store};

/// Owner of all tokens here: the thread has no other part.
pub(super) const OWNER: u8 = 1;

/// What an operation is for.
pub(super) mod kind {
    pub(in crate::serve) const BELL: u8 = 0;
    pub(in crate::serve) const ACCEPT: u8 = 1;
    pub(in crate::serve) const RECV: u8 = 2;
    pub(in crate::serve) const SEND: u8 = 3;
    pub(in crate::serve) const SHUTDOWN: u8 = 4;
    /// These carry a request's place.
    pub(in crate::serve) const READ: u8 = 5;
    pub(in crate::serve) const WRITE: u8 = 6;
    pub(in crate::serve) const PUNCH: u8 = 7;
    /// These belong to the flusher.
    pub(in crate::serve) const SYNC: u8 = 8;
    pub(in crate::serve) const IDLE_PUNCH: u8 = 9;
    /// These belong to the intent bitmap.
    pub(in crate::serve) const MARK_WRITE: u8 = 10;
    pub(in crate::serve) const MARK_SYNC: u8 = 11;
    /// Something has come from a stranger over a unix socket.
    pub(in crate::serve) const KNOCK: u8 = 12;
}

/// Largest read or write that is made at once where layers lie in memory: a ring would hand it to a thread of the
/// kernel's, which costs more than copying this much. Larger ones are worth a second processor.
pub(super) const AT_ONCE_MAX: usize = 64 << 10;

/// How long a replica that has failed stays, so that whoever waits hears of it.
const LAST_WORDS_NS: u64 = 1_000_000_000;

/// Memory in use above which no read begins.
const READS_MAX: usize = 48 << 20;

/// Memory in use above which no layer image is compared with what is there. Images hold memory themselves: the limit
/// lies above [`RECEIVED_MAX`], so that they always end.
pub(super) const IMAGES_MAX: usize = 200 << 20;

/// Memory in use above which nothing is received: above reads and half-received messages together.
const RECEIVED_MAX: usize = 160 << 20;

/// While the machine is short of memory nothing begins above this, so that what is resident from the start suffices with
/// one more message of the largest size: what waits stays with the engine, whose memory is resident.
pub(super) const SHORT_MAX: usize = super::open::POOL_SOFT - (1 << 20);

/// A record that nothing may be done beside: a punch or a sync that nobody asked for is waited for.
pub(super) enum Held {
    Rebuild(u64, Vec<LayerInfo>, Option<Keep>),
    Revert(Instance),
    Close,
}

/// The ring thread's state.
pub(super) struct Server {
    pub(super) ring: Ring,
    pub(super) pool: Pool,
    pub(super) status: Status,
    pub(super) started: Instant,
    pub(super) core: Core,
    pub(super) inputs: VecDeque<Input>,
    pub(super) outputs: Vec<Output>,
    pub(super) peers: Peers,
    pub(super) requests: Requests,
    pub(super) store: Store,
    /// The layers' files, by number.
    pub(super) files: Vec<Fd>,
    /// The layers lie in memory: reading and writing them never waits.
    pub(super) in_memory: bool,
    pub(super) worker: Worker,
    pub(super) door: Door,
    pub(super) flusher: Flusher,
    pub(super) marks: Marks,
    pub(super) folder: Folder,
    pub(super) checksums: Checksums,
    pub(super) hasher: Hasher,
    pub(super) readers: Readers,
    pub(super) grants: Grants,
    /// A prepared revert.
    pub(super) reverting: Option<Instance>,
    /// Requests that wait for memory, in order of arrival.
    pub(super) hungry: VecDeque<RequestId>,
    /// Writes that wait for the end of a punch.
    pub(super) parked: Vec<RequestId>,
    /// Requests that wait for the mark of zeroes in volume.meta.
    pub(super) unmarked: Vec<RequestId>,
    /// Layer images that wait for a zero map of their layer; the first one's is being made.
    pub(super) mapless: VecDeque<RequestId>,
    /// A record that waits until nothing is done to the layers that nobody asked for.
    pub(super) held: Option<(PersistId, Held)>,
    /// Room for plans of reads.
    pub(super) pieces: Vec<Piece>,
    pub(super) stopping: bool,
    /// Set when it has failed: when it ends for that.
    pub(super) ends_at: Option<u64>,
    /// What was last published.
    pub(super) mode: (Mode, Generation),
}

impl Server {
    /// Takes the files of layers that have come: after the start and after each change of the chain.
    pub(super) fn open_files(&mut self) -> io::Result<()> {
        let known = u16::try_from(self.files.len()).unwrap_or(u16::MAX);
        for n in known..self.store.layers() {
            let file = self.store.layer_file(crate::store::LayerNo(n)).try_clone()?;
            self.files.push(Fd::new(file));
        }
        self.marks.open(&self.store)
    }

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

    /// Nanoseconds since the start: the machine's clock.
    pub(super) fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
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
                let result = result.and_then(|change| self.take_change(change));
                self.inputs.push_back(Input::Persisted { id, result });
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
                            let file = file.map_err(|e| super::worker::note(&self.status, &e))?;
                            self.files[usize::from(number.0)] = Fd::new(file);
                        }
                    }
                    Committed::Chain(parts) => self.replace_layers(*parts),
                    Committed::Nothing => return Ok(()),
                }
            }
            Change::Rebuilt(parts) => self.replace_layers(*parts),
        }
        self.open_files().map_err(|e| super::worker::note(&self.status, &e))
    }

    /// All layers are others, under other numbers.
    fn replace_layers(&mut self, parts: Parts) {
        self.store.replace(parts);
        self.files.clear();
        self.checksums.forget_all();
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

    /// A worker that is gone is noticed by the loop, which ends then.
    pub(super) fn ask_worker(&mut self, task: Task) {
        self.worker.send(task);
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

    /// There is no memory for the request now. Writes come first: they bring memory with them that they hold.
    pub(super) fn starve(&mut self, id: RequestId) {
        match self.requests.get(id).job {
            Some(job) if job.is_write() => self.hungry.push_front(id),
            _ => self.hungry.push_back(id),
        }
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

    /// Memory in use above which no read begins.
    pub(super) fn reads_max(&self) -> usize {
        if self.status.is_memory_short() { SHORT_MAX } else { READS_MAX }
    }

    fn may_receive(&self) -> bool {
        let most = if self.status.is_memory_short() { SHORT_MAX } else { RECEIVED_MAX };
        // When all requests wait for memory, it is with messages that have come in part: they have to come whole.
        self.pool.used_bytes() < most || self.requests.count() == self.hungry.len()
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
        let own = unasked.chain([self.core.wake_at(), self.door.wake_at(), self.ends_at]);
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
