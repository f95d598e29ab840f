//! Flushes: one at a time per queue, and whoever asks meanwhile shares the next (`docs/invariants.md`, 5).
//!
//! A flush covers what was answered before it was asked for. One that is under way may have been sent before an
//! answer that left since then, so a newcomer never joins it.
//!
//! While a chunk is in doubt some member may lack what was answered before: a client's flush waits until none is. A flush
//! during which one was in doubt is made again: the member that came back may have answered it before it was given what
//! it lacks.
//!
//! Where what was answered before is lost, the flush that would promise it fails
//! (`docs/decisions/0019-a-flush-tells-of-a-loss.md`).

use lh_block::IoError;
use lh_wire::{OpCode, Status};

use super::members::Link;
use super::slot::{Fan, SlotSet, Stage, Why};
use super::switches::Mode;
use super::tag::Tag;
use super::{Data, Output, Queue, Reply, Sabotage};
use crate::message::{Fault, JobResult, MemberId, MemberSet};

/// The flush that is under way.
#[derive(Debug)]
struct Batch {
    number: u64,
    fan: Fan,
    /// As [`crate::shared::Shared::sure`] said when it began.
    sure: Option<u64>,
}

/// Flushes of this queue.
#[derive(Debug, Default)]
pub(super) struct Flush {
    running: Option<Batch>,
    /// Who is answered when it ends.
    callers: SlotSet,
    /// Who waits for the next one.
    next: SlotSet,
}

impl Queue {
    /// A client or a job wants a flush.
    pub(super) fn join_flush(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        if !self.slot(s).work.is_job() && self.members.readable().is_empty() {
            return self.put_aside(now, s, Why::NoMember, out);
        }
        if !self.slot(s).work.is_job()
            && let Some(chunk) = self.shared.first_in_doubt()
        {
            return self.put_aside(now, s, Why::Doubt(chunk), out);
        }
        self.slot_mut(s).enter(Stage::Flushing);
        if self.flush.running.is_some() {
            self.flush.next.insert(s);
        } else {
            self.flush.callers.insert(s);
            self.start_flush(now, out);
        }
    }

    fn start_flush(&mut self, now: u64, out: &mut Vec<Output>) {
        let number = self.shared.start_flush();
        // Clients do not wait for the disk of one that is brought in sync. It becomes a member only after a flush of the conductor's, which
        // is asked of all.
        let for_job = self.flush.callers.iter().any(|s| self.slot(s).work.is_job());
        let spared = if for_job { MemberSet::EMPTY } else { self.members.filling() };
        let need = self.members.attached().minus(spared);
        let fan = Fan { need, sent_at: now, ..Fan::default() };
        self.flush.running = Some(Batch { number, fan, sure: self.shared.sure() });
        for m in fan.need.iter() {
            self.flush_send(now, m, out);
        }
        self.settle_flush(now, out);
    }

    /// Sends the flush to a member, if its link carries everything.
    fn flush_send(&mut self, now: u64, m: MemberId, out: &mut Vec<Output>) {
        if self.members[m].link != Link::Live {
            return;
        }
        if let Some(batch) = &mut self.flush.running {
            batch.fan.last_sent = now;
            batch.fan.sent = batch.fan.sent.with(m);
            batch.fan.failed = batch.fan.failed.without(m);
            let number = batch.number;
            if let Output::Send(message) = self.transmit(m, Tag::Flush(number), OpCode::Flush, Data::None) {
                out.push(Output::Send(super::Transmit { flush: number, ..message }));
            }
        }
    }

    /// A member answers a flush.
    pub(super) fn flush_reply(&mut self, now: u64, number: u64, reply: &Reply, out: &mut Vec<Output>) {
        let m = reply.member;
        let Some(batch) = &mut self.flush.running else { return };
        if batch.number != number || !batch.fan.sent.has(m) {
            return;
        }
        let sent_at = batch.fan.sent_at;
        batch.fan.sent = batch.fan.sent.without(m);
        let broken = reply.op != OpCode::Flush || matches!(reply.status, Status::Corrupt | Status::Invalid);
        match reply.status {
            _ if broken => {}
            Status::Ok => batch.fan.ok = batch.fan.ok.with(m),
            _ => batch.fan.failed = batch.fan.failed.with(m),
        }
        self.heard(m, sent_at);
        self.settle_flush(now, out);
        if broken {
            self.break_link(now, m, out);
        } else if reply.status != Status::Ok && self.members.attached().len() > 1 {
            self.report(now, m, Fault::Io, out);
        }
    }

    /// The link on which a flush was sent is down.
    pub(super) fn flush_lost(&mut self, now: u64, m: MemberId, out: &mut Vec<Output>) {
        if let Some(batch) = &mut self.flush.running {
            batch.fan.sent = batch.fan.sent.without(m);
            self.settle_flush(now, out);
        }
    }

    /// The member is out: nothing waits for it.
    pub(super) fn flush_forget(&mut self, now: u64, m: MemberId, out: &mut Vec<Output>) {
        if let Some(batch) = &mut self.flush.running {
            batch.fan.forget(m);
            self.settle_flush(now, out);
        }
    }

    /// The member is attached again: a flush that waits for it is sent over the new link.
    pub(super) fn flush_attach(&mut self, now: u64, m: MemberId, out: &mut Vec<Output>) {
        let waits = |b: &Batch| b.fan.missing().has(m) && !b.fan.sent.has(m);
        if self.flush.running.as_ref().is_some_and(waits) {
            self.flush_send(now, m, out);
        }
    }

    /// When the flush that this member has not answered was sent.
    pub(super) fn flush_sent_to(&self, m: MemberId) -> Option<u64> {
        self.flush.running.as_ref().filter(|b| b.fan.sent.has(m)).map(|b| b.fan.last_sent)
    }

    /// Decides whether the flush is done; called after every change of it.
    fn settle_flush(&mut self, now: u64, out: &mut Vec<Output>) {
        let Some(Batch { number, fan, sure }) = self.flush.running else { return };
        let missing = fan.missing();
        if missing.is_empty() || (self.lacks(Sabotage::FlushEarly) && !fan.ok.is_empty()) {
            if !fan.need.is_empty() && self.covers_all(sure) {
                self.shared.finish_flush(number);
            }
            return self.end_flush(now, Ok(()), out);
        }
        // A job does not wait for a member to be put out: the conductor, which puts it out, waits for the job.
        if let Some(m) = missing.iter().find(|m| !fan.sent.has(*m)) {
            for s in self.flush.callers.iter() {
                if self.slot(s).work.is_job() {
                    self.flush.callers.remove(s);
                    self.end_job(s, JobResult::Failed { member: m }, out);
                }
            }
        }
        if fan.sent.is_empty() {
            if self.mode == Mode::Stopping {
                self.end_flush(now, Err(IoError::ShuttingDown), out);
            } else if fan.need.len() == 1 && missing == fan.failed {
                self.end_flush(now, Err(IoError::Io), out);
            }
        }
    }

    /// What a flush that began so has synced on every member is all that was answered before it.
    fn covers_all(&self, sure: Option<u64>) -> bool {
        sure.is_some() && sure == self.shared.sure()
    }

    /// Answers the callers and starts the next flush, if anybody waits for one.
    fn end_flush(&mut self, now: u64, result: Result<(), IoError>, out: &mut Vec<Output>) {
        let ended = self.flush.running.take();
        let nobody = ended.as_ref().is_some_and(|b| b.fan.need.is_empty());
        let covers = ended.is_some_and(|b| self.covers_all(b.sure));
        let lost = result.is_ok() && covers && !nobody && self.tells_of_loss(now);
        for s in std::mem::take(&mut self.flush.callers).iter() {
            if self.slot(s).work.is_job() {
                let done = if result.is_ok() && covers {
                    JobResult::Done { changed: 0 }
                } else {
                    JobResult::Skipped
                };
                self.end_job(s, done, out);
            } else if nobody {
                self.put_aside(now, s, Why::NoMember, out);
            } else if result.is_ok() && !covers && self.mode == Mode::Stopping {
                self.refuse(now, s, IoError::ShuttingDown, out);
            } else if result.is_ok() && !covers {
                match self.shared.first_in_doubt() {
                    Some(chunk) => self.put_aside(now, s, Why::Doubt(chunk), out),
                    None => self.flush.next.insert(s),
                }
            } else {
                let result = if lost { Err(IoError::Io) } else { result };
                self.leave_barriers(s, out);
                self.complete(now, s, result, None, false, out);
                self.free(s, out);
            }
        }
        if !self.flush.next.is_empty() {
            self.flush.callers = std::mem::take(&mut self.flush.next);
            self.start_flush(now, out);
        }
    }

    /// True if clients must not hear that all is on stable storage. Asked only where one is to be answered: a job's flush tells
    /// nobody.
    fn tells_of_loss(&self, now: u64) -> bool {
        self.flush.callers.iter().any(|s| !self.slot(s).work.is_job()) && self.shared.loss().fails_flush(now)
    }

    /// A caller goes away without an answer of the flush.
    pub(super) fn leave_flush(&mut self, s: u16) {
        self.flush.callers.remove(s);
        self.flush.next.remove(s);
    }

    /// The engine ends: who waits for the next flush gets none.
    pub(super) fn stop_flush(&mut self, now: u64, out: &mut Vec<Output>) {
        for s in std::mem::take(&mut self.flush.next).iter() {
            if self.slot(s).work.is_job() {
                self.end_job(s, JobResult::Skipped, out);
            } else {
                self.refuse(now, s, IoError::ShuttingDown, out);
            }
        }
        self.settle_flush(now, out);
    }
}
