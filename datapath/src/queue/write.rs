//! Writes: the window, the fan-out, and when one is done.
//!
//! What changes data goes to every attached member and is done when all of them have answered `Ok`. A member that
//! cannot answer is waited for until it is forgotten or attached again. The client is not kept waiting for a replica that
//! is brought in sync: its answer is given when every member has answered, while the range is held until the last.

use lh_block::{BLOCK, IoError, Op};
use lh_wire::{OpCode, Status};

use super::latency::Class;
use super::members::Link;
use super::slot::{Copy, Fan, Stage, Why, Work};
use super::switches::Mode;
use super::tag::Tag;
use super::{Data, Output, Queue, Reply, Sabotage, Transmit};
use crate::message::{Fault, Job, MemberId, MemberSet};

impl Queue {
    /// The blocks are claimed and, if need be, merged: sends them now, or when the window has room.
    pub(super) fn enqueue_write(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        let len = self.slot(s).piece.whole.len;
        if self.lacks(Sabotage::NoWindow) || (self.window.is_free() && self.window.has_room(len)) {
            self.send_fan(now, s, out);
        } else {
            self.slot_mut(s).enter(Stage::Queued);
            self.window.wait(s);
        }
    }

    /// Sends what the slot has to every member that it concerns.
    pub(super) fn send_fan(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        if self.slot(s).given {
            return self.settle_given(s, out);
        }
        if self.mode == Mode::Stopping && !self.slot(s).work.is_job() {
            return self.conclude(now, s, Err(IoError::ShuttingDown), out);
        }
        let need = match &self.slot(s).work {
            // Whom it was read from has it, but for what is merged.
            Work::Job(_, Job::Equalise { targets, merged: false, .. }) => targets.minus(self.slot(s).sources),
            Work::Job(_, Job::Equalise { targets, .. } | Job::Compare { targets, .. }) => *targets,
            _ => self.members.attached(),
        };
        let len = self.slot(s).piece.whole.len;
        let place = self.takes_place(s).then(|| self.window.take(len));
        let back = if self.slot(s).work.is_job() { MemberSet::EMPTY } else { self.kept_back(now, need) };
        let slot = self.slot_mut(s);
        slot.attempt = slot.attempt.wrapping_add(1);
        slot.enter(Stage::Writing(Fan { need, back, sent_at: now, place, ..Fan::default() }));
        let first = need.minus(back);
        for m in first.iter() {
            self.send_to(now, s, m, out);
        }
        if self.slot_mut(s).fan().is_some_and(|fan| fan.sent != first) {
            self.settle(now, s, out);
        }
    }

    /// True for what a replica remembers as possibly unfinished elsewhere.
    fn takes_place(&self, s: u16) -> bool {
        if self.lacks(Sabotage::NoWindow) {
            return false;
        }
        match &self.slot(s).work {
            Work::Client { .. } => true,
            Work::Job(_, Job::Equalise { layer: None, .. }) => self.slot(s).copy == Copy::Put,
            Work::Job(..) | Work::None => false,
        }
    }

    /// Sends a fan-out to one member, if there is a link for it.
    pub(super) fn send_to(&mut self, now: u64, s: u16, m: MemberId, out: &mut Vec<Output>) {
        let job = self.slot(s).work.is_job();
        let usable =
            if job { self.members[m].link != Link::Down } else { self.members[m].link == Link::Live };
        let message = usable.then(|| self.message(s, m));
        if let Some(fan) = self.slot_mut(s).fan() {
            match message {
                Some(message) => {
                    fan.last_sent = now;
                    fan.sent = fan.sent.with(m);
                    fan.failed = fan.failed.without(m);
                    out.push(Output::Send(message));
                }
                None if job => fan.failed = fan.failed.with(m),
                None => {}
            }
        }
    }

    /// What a fan-out sends.
    fn message(&self, s: u16, member: MemberId) -> Transmit {
        let slot = self.slot(s);
        let (op, data, fua) = match &slot.work {
            Work::Client { op, range } => {
                let fua = matches!(op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. });
                let from = u32::try_from(slot.piece.part.offset - range.offset).unwrap_or(0);
                match op {
                    _ if slot.piece.is_partial() => (OpCode::Write, Data::Stored { slot: s }, fua),
                    Op::Write { .. } => (OpCode::Write, Data::Client { slot: s, from }, fua),
                    Op::WriteZeroes { .. } => (OpCode::WriteZeroes, Data::None, fua),
                    Op::Unmap | Op::Read | Op::Flush | Op::Allocation => (OpCode::Unmap, Data::None, false),
                }
            }
            Work::Job(_, Job::Equalise { .. } | Job::Compare { .. }) => {
                let compares = slot.copy == Copy::Compare;
                let op = if compares { OpCode::CompareLayer } else { OpCode::PutLayer };
                (op, Data::Stored { slot: s }, false)
            }
            Work::Job(..) | Work::None => (OpCode::ClearIntent, Data::None, false),
        };
        Transmit {
            member,
            tag: Tag::Slot { slot: s, attempt: slot.attempt }.pack(),
            op,
            range: if op == OpCode::PutLayer { slot.piece.part } else { slot.piece.whole },
            fua,
            // What is rotten wherever it was read replaces nothing that is sound.
            verify: matches!(slot.work, Work::Job(_, Job::Compare { .. }))
                || (op == OpCode::PutLayer && slot.is_rotten),
            flush: self.shared.flush_everywhere(),
            aux: slot.aux,
            data,
        }
    }

    /// A member answers a fan-out.
    pub(super) fn fan_reply(&mut self, now: u64, s: u16, reply: &Reply, out: &mut Vec<Output>) {
        let m = reply.member;
        let (expected, len) = (self.message(s, m).op, self.slot(s).piece.whole.len);
        if reply.op != expected {
            return self.break_link(now, m, out);
        }
        let job = self.slot(s).work.is_job();
        let blocks =
            if self.lacks(Sabotage::FullIsUntouched) { Some(0) } else { lh_wire::done_of(reply.aux) };
        let is_joining = self.members.joining().has(m);
        // No member has to hold what a joiner has done alone.
        let blocks = blocks.filter(|n| *n == 0 || (u64::from(*n) * BLOCK < len && !is_joining));
        let Some(fan) = self.slot_mut(s).fan() else { return };
        let time = now.saturating_sub(fan.last_sent);
        fan.sent = fan.sent.without(m);
        let mut fault = None;
        let was_full = fan.full.has(m);
        match reply.status {
            Status::Ok => {
                fan.ok = fan.ok.with(m);
                fan.full = fan.full.without(m);
            }
            Status::NoSpace => {
                if fan.full.is_empty() {
                    fan.full_since = now;
                }
                fan.full = fan.full.with(m);
                match blocks {
                    Some(_) if is_joining => {}
                    Some(blocks) => {
                        fan.first = fan.first.told(blocks);
                        fan.told = fan.told.with(m);
                    }
                    // Members may differ there; and of a single one, what was read of it must not give way to a later write,
                    // and come again with the next attempt.
                    None => fan.unsure = fan.unsure.with(m),
                }
            }
            Status::Io | Status::Refused | Status::Stale | Status::Rotten => {
                fan.failed = fan.failed.with(m);
                fault = Some(Fault::Io);
            }
            // Nothing was changed there. Over a new connection it may be sent again.
            Status::Corrupt | Status::Invalid => fault = Some(Fault::Link),
        }
        if job {
            let slot = self.slot_mut(s);
            match slot.copy {
                Copy::Compare => slot.differ |= reply.aux,
                Copy::Verify | Copy::Digest | Copy::Read | Copy::ReadAnyway | Copy::Put => {
                    slot.changed += u64::from(reply.aux);
                }
            }
        } else {
            self.note_space(now, m, reply.status, was_full);
            self.member_wrote(m, reply.status, len, time);
        }
        if self.lacks(Sabotage::ReleaseEarly) {
            self.release(s, out);
        }
        self.settle(now, s, out);
        match fault {
            Some(Fault::Link) => self.break_link(now, m, out),
            Some(fault) if !job && self.members.attached().len() > 1 => self.report(now, m, fault, out),
            _ => {}
        }
    }

    /// Notes how long a member took.
    fn member_wrote(&mut self, m: MemberId, status: Status, len: u64, time: u64) {
        self.stats.member_write(m).ended(len, time, status == Status::Ok);
        if status == Status::Ok {
            self.took(m, Class::Write, time);
        }
    }

    /// The link on which a fan-out was sent is down.
    pub(super) fn fan_lost(&mut self, now: u64, s: u16, m: MemberId, out: &mut Vec<Output>) {
        let job = self.slot(s).work.is_job();
        if let Some(fan) = self.slot_mut(s).fan()
            && job
        {
            fan.failed = fan.failed.with(m);
        }
        self.settle(now, s, out);
    }

    /// The member is out: nothing waits for it.
    pub(super) fn fan_forget(&mut self, now: u64, s: u16, m: MemberId, out: &mut Vec<Output>) {
        let job = self.slot(s).work.is_job();
        if let Some(fan) = self.slot_mut(s).fan()
            && fan.need.has(m)
        {
            if job {
                fan.sent = fan.sent.without(m);
                fan.failed = fan.failed.with(m);
            } else {
                fan.forget(m);
            }
            self.settle(now, s, out);
        }
    }

    /// The member is attached again: what is not done everywhere is sent to it over the new link, even if it has done
    /// it before: its process may have died since, and its power have gone.
    pub(super) fn fan_attach(&mut self, now: u64, s: u16, m: MemberId, out: &mut Vec<Output>) {
        if self.slot(s).work.is_job() {
            return;
        }
        let Some(fan) = self.slot_mut(s).fan() else { return };
        if fan.need.has(m) && !fan.sent.has(m) && !fan.back.has(m) {
            if fan.ok.has(m) {
                fan.unsure = fan.unsure.with(m);
                fan.ok = fan.ok.without(m);
            }
            fan.full = fan.full.without(m);
            self.send_to(now, s, m, out);
        }
    }

    /// Decides whether a fan-out is done; called after every change of it.
    pub(super) fn settle(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        let stopping = self.mode == Mode::Stopping;
        self.send_back(now, s, out);
        let Some(fan) = self.slot_mut(s).fan().copied() else { return };
        if self.slot(s).work.is_job() {
            return self.job_settle(now, s, &fan, out);
        }
        let missing = fan.missing();
        if self.may_be_given(s, missing, &fan) {
            self.complete(now, s, Ok(()), None, true, out);
            self.slot_mut(s).given = true;
        }
        if fan.need.is_empty() {
            self.leave_window(s, &fan);
            self.put_aside(now, s, Why::NoMember, out);
        } else if missing.is_empty() && self.is_held(&fan) || self.lacks_epoch_wait(missing, &fan) {
            self.fan_done(now, s, &fan, Ok(()), out);
        } else if !fan.sent.is_empty() {
            // The last answer decides.
        } else if stopping {
            self.fan_done(now, s, &fan, Err(IoError::ShuttingDown), out);
        } else if fan.need.len() == 1 && !missing.is_empty() && missing == fan.failed {
            self.fan_done(now, s, &fan, Err(IoError::Io), out);
        } else if fan.ok.is_empty() && fan.unsure.is_empty() && missing == fan.full.or(fan.back) {
            self.refused_everywhere(now, s, &fan, out);
        }
    }

    /// One of the members that have done it is still there. Who is not may have lost it with its power, and is sent it again once it
    /// is back; who is about to become a member may never be one.
    fn is_held(&self, fan: &Fan) -> bool {
        !fan.ok.minus(self.members.joining()).and(self.members.live()).is_empty()
    }

    /// True if the client is to be answered now although the piece goes on: every member has done it, and only those have
    /// not that are brought in sync. They are members once nothing answered is on its way to them any more
    /// ([`crate::message::Switch::Await`]).
    fn may_be_given(&self, s: u16, missing: MemberSet, fan: &Fan) -> bool {
        let (slot, filling) = (self.slot(s), self.members.filling());
        let last =
            matches!(&slot.work, Work::Client { range, .. } if slot.done + slot.piece.part.len == range.len);
        let only_fillers = missing.iter().all(|m| filling.has(m));
        !slot.given && !missing.is_empty() && only_fillers && self.is_held(fan) && last
    }

    /// True if every missing member failed and the mechanism that waits for the epoch is left out.
    fn lacks_epoch_wait(&self, missing: MemberSet, fan: &Fan) -> bool {
        self.lacks(Sabotage::AckBeforeEpoch)
            && !fan.ok.is_empty()
            && missing.iter().all(|m| self.members[m].fault.is_some() || fan.failed.has(m))
    }

    /// The piece is no longer among the writes that a member may lack.
    pub(super) fn leave_window(&mut self, s: u16, fan: &Fan) {
        if let Some(place) = fan.place {
            self.window.complete(place);
        }
        self.shared.wrote(self.slot(s).piece.whole);
    }

    /// No member has the piece to do any more.
    fn fan_done(&mut self, now: u64, s: u16, fan: &Fan, result: Result<(), IoError>, out: &mut Vec<Output>) {
        self.leave_window(s, fan);
        let slot = self.slot_mut(s);
        slot.done += slot.piece.part.len;
        let Work::Client { range, .. } = slot.work else { return };
        if result.is_ok() && slot.done < range.len && !slot.given {
            self.release(s, out);
            if self.mode != Mode::Stopping {
                // Nothing of before is on its way any more: the next piece goes to whoever was attached meanwhile, too.
                self.leave_barriers(s, out);
            }
            self.start_piece(now, s, out);
        } else {
            self.conclude(now, s, result, out);
        }
    }
}
