//! Admission: which requests are refused, which wait outside, and how each is begun and ended.
//!
//! A request outside holds no claim and has nothing in flight, so it stands in nobody's way: neither a pause nor a
//! repair under a claim waits for it. Requests outside go on in their order of arrival.

use lh_block::{Extent, IoError, Op};

use super::slot::{Piece, Stage, Why, Work};
use super::switches::Mode;
use super::{Input, Output, Queue, Sabotage};
use crate::message::FromQueue;
use crate::order::{Kind, Outcome};

/// How often a queue tells that clients are active, ns: often enough for who looks every 200 ms.
const ACTIVITY_EVERY: u64 = 1_000_000;

impl Queue {
    /// A client's request. `Input::Request` says what the driver promises.
    pub(super) fn request(&mut self, now: u64, s: u16, op: Op, range: Extent, out: &mut Vec<Output>) {
        assert!(
            s < self.config.depth && !self.used.has(s),
            "slot of {:?} is not free",
            Input::Request { slot: s, op, range }
        );
        self.requests += 1;
        self.last_request = now;
        if now.saturating_sub(self.noted) >= ACTIVITY_EVERY {
            self.noted = now;
            self.shared.note_activity();
        }
        let order = self.requests;
        self.slot_mut(s).begin(Work::Client { op, range }, now, order);
        self.used.insert(s);
        self.stats.entered();
        match self.check(op, range) {
            Ok(()) => self.admit(now, s, out),
            Err(e) => self.refuse(now, s, e, out),
        }
    }

    fn check(&self, op: Op, range: Extent) -> Result<(), IoError> {
        if op == Op::Flush {
            return Ok(());
        }
        if range.offset.checked_add(range.len).is_none_or(|end| end > self.config.size) {
            return Err(IoError::OutOfRange);
        }
        let has_data = matches!(op, Op::Read | Op::Write { .. });
        if range.is_empty()
            || !range.is_aligned(u64::from(self.config.logical_block))
            || (has_data && range.len > u64::from(self.config.max_transfer))
        {
            return Err(IoError::Invalid);
        }
        Ok(())
    }

    /// Lets a request in that stands outside, or leaves it there.
    pub(super) fn admit(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        match self.mode {
            Mode::Stopping => return self.refuse(now, s, IoError::ShuttingDown, out),
            Mode::Paused => return self.put_aside(now, s, Why::Paused, out),
            Mode::Open => {}
        }
        if self.is_timed_out(now) {
            return self.refuse(now, s, IoError::TimedOut, out);
        }
        if let Stage::Parked(why @ Why::Full(until)) = *self.slot(s).stage()
            && now < until
        {
            return self.put_aside(now, s, why, out);
        }
        if let Work::Client { op: Op::Flush, .. } = self.slot(s).work {
            return self.join_flush(now, s, out);
        }
        self.start_piece(now, s, out);
    }

    /// Begins the next piece of a request, unless the queue is paused or the client gone: pieces may be thousands. The steps of
    /// one piece do not ask: a pause waits for those that were begun before it.
    pub(super) fn start_piece(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        let Work::Client { op, range } = self.slot(s).work else { return };
        if self.slot(s).abandoned {
            return self.refuse(now, s, IoError::ShuttingDown, out);
        }
        if self.mode == Mode::Paused {
            return self.put_aside(now, s, Why::Paused, out);
        }
        let slot = self.slot_mut(s);
        let mut piece = Piece::next(op, range, slot.done, slot.done < slot.singly);
        slot.piece = piece;
        slot.tried = Default::default();
        if self.members.readable().is_empty() {
            return self.put_aside(now, s, Why::NoMember, out);
        }
        if self.reads_first(s)
            && let Some(chunk) = self.shared.in_doubt(piece.whole)
        {
            let before = piece.before(chunk * self.shared.chunk());
            let Some(before) = before.filter(|_| op == Op::Allocation) else {
                return self.put_aside(now, s, Why::Doubt(chunk), out);
            };
            // What is known without it is told: a long range needs not wait for a whole repair.
            piece = before;
            self.slot_mut(s).piece = piece;
        }
        self.in_flight.insert(s);
        let kind = if op.is_write() { Kind::Exclusive } else { Kind::Shared };
        if self.claim(s, piece.whole, kind) == Outcome::Granted {
            self.claimed(now, s, out);
        }
    }

    /// True if the present piece begins with a read: reads and their like, and writes of parts of blocks.
    pub(super) fn reads_first(&self, s: u16) -> bool {
        let slot = self.slot(s);
        matches!(slot.work, Work::Client { op: Op::Read | Op::Allocation, .. })
            || (slot.work.is_client_write() && slot.piece.is_partial())
    }

    /// The range of a slot is claimed.
    pub(super) fn claimed(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        if self.slot(s).work.is_job() {
            self.job_claimed(now, s, out);
        } else if self.slot(s).given {
            self.settle_given(s, out);
        } else if self.mode == Mode::Stopping || self.slot(s).abandoned {
            self.conclude(now, s, Err(IoError::ShuttingDown), out);
        } else if self.watched
            && !self.lacks(Sabotage::NotLooked)
            && self.slot(s).work.is_client_write()
            && !matches!(self.slot(s).stage(), Stage::Looking)
        {
            self.slot_mut(s).enter(Stage::Looking);
            self.looking.push_back(s);
        } else if self.reads_first(s) {
            self.send_read(now, s, out);
        } else {
            self.enqueue_write(now, s, out);
        }
    }

    /// Clients were looked for since these had their ranges: what was sent again stands behind them.
    pub(super) fn looked(&mut self, now: u64, out: &mut Vec<Output>) {
        for _ in 0..self.looking.len() {
            let Some(s) = self.looking.pop_front() else { break };
            debug_assert!(matches!(self.slot(s).stage(), Stage::Looking), "it keeps its range until then");
            self.claimed(now, s, out);
        }
    }

    /// Puts a request outside: it gives up its claim, and nothing of it may be in flight.
    pub(super) fn put_aside(&mut self, now: u64, s: u16, why: Why, out: &mut Vec<Output>) {
        self.leave_barriers(s, out);
        if self.slot(s).given {
            return self.settle_given(s, out);
        }
        self.release(s, out);
        // Once the engine ends nothing changes any more that would let it in again.
        if self.slot(s).abandoned || self.mode == Mode::Stopping {
            return self.refuse(now, s, IoError::ShuttingDown, out);
        }
        if let Why::Doubt(chunk) = why {
            let waits = |p: u16| matches!(self.slot(p).stage(), Stage::Parked(Why::Doubt(c)) if *c == chunk);
            if !waits(s) && !self.parked.iter().any(|p| waits(*p)) {
                out.push(Output::Report(FromQueue::ChunkWanted(chunk)));
            }
        }
        self.slot_mut(s).enter(Stage::Parked(why));
        let order = self.slot(s).order;
        let behind = self.parked.iter().rev().take_while(|p| self.slot(**p).order > order).count();
        self.parked.insert(self.parked.len() - behind, s);
        self.stats.parked(self.parked.len());
    }

    /// The conductor has made a chunk equal. If it is in doubt again by now, it does not know that it is still wanted.
    pub(super) fn chunk_resolved(&mut self, chunk: u64) {
        for i in 0..self.parked.len() {
            let slot = self.slot_mut(self.parked[i]);
            if matches!(slot.stage(), Stage::Parked(Why::Doubt(c)) if *c == chunk) {
                slot.enter(Stage::Parked(Why::NoMember));
            }
        }
        self.retry_parked();
    }

    /// Something has changed for those who wait outside. They are tried again once the driver has looked whether their clients are
    /// still there ([`Queue::lets_in`]).
    pub(super) fn retry_parked(&mut self) {
        self.let_in |= !self.parked.is_empty();
    }

    /// Tries everything that waits outside again.
    pub(super) fn let_in(&mut self, now: u64, out: &mut Vec<Output>) {
        if !self.lets_in() {
            return;
        }
        self.let_in = false;
        // What has to go on waiting comes back into `parked`, in the same order.
        std::mem::swap(&mut self.parked, &mut self.parked_before);
        while let Some(s) = self.parked_before.pop_front() {
            self.admit(now, s, out);
        }
        self.stats.parked(self.parked.len());
    }

    /// The client of a request is gone. What waits outside ends now; what holds a claim, or waits for one, is in its order, and
    /// goes no further than the present piece.
    pub(super) fn abandoned(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        if !self.used.has(s) || self.slot(s).work.is_job() || self.lacks(Sabotage::NotAbandoned) {
            return;
        }
        self.slot_mut(s).abandoned = true;
        if matches!(self.slot(s).stage(), Stage::Parked(_)) {
            self.parked.retain(|parked| *parked != s);
            self.stats.parked(self.parked.len());
            self.refuse(now, s, IoError::ShuttingDown, out);
        }
    }

    /// Answers a request that holds no claim, and frees its slot.
    pub(super) fn refuse(&mut self, now: u64, s: u16, error: IoError, out: &mut Vec<Output>) {
        self.leave_barriers(s, out);
        self.complete(now, s, Err(error), None, false, out);
        self.free(s, out);
    }

    /// Ends a request that is in flight, on the members' side. What changed data keeps its claim until the answer
    /// has left.
    pub(super) fn conclude(&mut self, now: u64, s: u16, result: Result<(), IoError>, out: &mut Vec<Output>) {
        self.leave_barriers(s, out);
        if self.slot(s).given {
            return self.settle_given(s, out);
        }
        if self.slot(s).work.is_client_write() {
            self.complete(now, s, result, None, true, out);
            self.slot_mut(s).given = true;
            self.slot_mut(s).enter(Stage::Settled);
        } else {
            self.release(s, out);
            self.complete(now, s, result, None, false, out);
            self.free(s, out);
        }
    }

    /// Ends a request, all but the leaving of its answer, which the client was given before.
    pub(super) fn settle_given(&mut self, s: u16, out: &mut Vec<Output>) {
        self.leave_barriers(s, out);
        if self.slot(s).left {
            self.release(s, out);
            self.free(s, out);
        } else {
            self.slot_mut(s).enter(Stage::Settled);
        }
    }

    /// The answer of a slot has left the process.
    pub(super) fn answered(&mut self, s: u16, out: &mut Vec<Output>) {
        if !self.slot(s).given {
            return;
        }
        self.slot_mut(s).left = true;
        if matches!(self.slot(s).stage(), Stage::Settled) {
            self.release(s, out);
            self.free(s, out);
        }
    }

    /// Gives the client its answer.
    pub(super) fn complete(
        &mut self,
        now: u64,
        s: u16,
        result: Result<(), IoError>,
        part: Option<(u32, u32)>,
        held: bool,
        out: &mut Vec<Output>,
    ) {
        let slot = self.slot(s);
        if let Work::Client { op, range } = slot.work {
            self.stats.of(op).ended(range.len, now.saturating_sub(slot.arrived), result.is_ok());
            // Who has come back is written to before it is read from.
            if self.dark_since.is_some() && result.is_ok() && op.is_write() {
                self.dark_since = Some(now);
            }
        }
        out.push(Output::Complete { slot: s, result, part, held });
    }

    /// True if for `ioTimeout` too few members could be read from and no write was answered, and the conductor has no reason to wait longer.
    pub fn is_timed_out(&self, now: u64) -> bool {
        let timeout = self.config.io_timeout_ns;
        timeout != 0
            && self.dark_since.is_some_and(|t| now.saturating_sub(t) >= timeout)
            && !self.shared.is_patient()
    }

    /// Answers everything with `TimedOut`. What was sent, or waits for its claim, keeps its slot until that ends.
    pub(super) fn expire(&mut self, now: u64, out: &mut Vec<Output>) {
        self.parked.clear();
        self.stats.parked(0);
        for s in self.used.iter() {
            let slot = self.slot(s);
            if slot.work.is_job() || slot.given {
                continue;
            }
            match slot.stage() {
                Stage::Parked(_) => self.refuse(now, s, IoError::TimedOut, out),
                Stage::Held => {
                    self.held.remove(s);
                    self.refuse(now, s, IoError::TimedOut, out);
                }
                Stage::Flushing => {
                    self.leave_flush(s);
                    self.refuse(now, s, IoError::TimedOut, out);
                }
                Stage::Claiming | Stage::Looking | Stage::Queued | Stage::Writing(_) => {
                    self.complete(now, s, Err(IoError::TimedOut), None, true, out);
                    self.slot_mut(s).given = true;
                }
                Stage::Free | Stage::Reading { .. } | Stage::Settled => {}
            }
        }
    }

    /// Answers everything that waits with `ShuttingDown`; what is in flight ends by itself.
    pub(super) fn stop(&mut self, now: u64, out: &mut Vec<Output>) {
        self.parked.clear();
        self.stats.parked(0);
        for s in self.used.iter() {
            if self.slot(s).work.is_job() {
                continue;
            }
            match self.slot(s).stage() {
                Stage::Parked(_) => self.refuse(now, s, IoError::ShuttingDown, out),
                Stage::Held => {
                    self.held.remove(s);
                    self.refuse(now, s, IoError::ShuttingDown, out);
                }
                Stage::Queued => {
                    self.window.stop_waiting(s);
                    self.conclude(now, s, Err(IoError::ShuttingDown), out);
                }
                Stage::Writing(_) => self.settle(now, s, out),
                Stage::Free
                | Stage::Claiming
                | Stage::Looking
                | Stage::Reading { .. }
                | Stage::Flushing
                | Stage::Settled => {}
            }
        }
        self.stop_flush(now, out);
        self.skip_waiting_jobs(out);
    }

    /// True if a slot is not answered yet.
    pub(super) fn is_open(&self, s: u16) -> bool {
        !matches!(self.slot(s).stage(), Stage::Free | Stage::Settled)
    }
}
