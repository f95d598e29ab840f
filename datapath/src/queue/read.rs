//! Reads: which member, what if it fails, and when the answer may be given.
//!
//! Everything that reads blocks as they are now goes this way: reads of clients, the block under a write of a part of it, and
//! which blocks hold data, which is all that is read of them then. A read that nobody can serve now goes back outside, without
//! its claim.

use lh_block::{BLOCK, Extent, IoError, Op, Runs};
use lh_wire::{OpCode, Status};

use super::latency::Class;
use super::slot::{Stage, Why, Work};
use super::switches::Mode;
use super::tag::Tag;
use super::{Data, LEASE, Output, Queue, Reply, Sabotage, Transmit};
use crate::message::{FromQueue, MemberId, MemberSet};

impl Queue {
    /// Sends the read of the present piece, whose range is claimed, to the best member.
    pub(super) fn send_read(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        let whole = self.slot(s).piece.whole;
        if let Some(chunk) = self.shared.in_doubt(whole) {
            return self.put_aside(now, s, Why::Doubt(chunk), out);
        }
        let Some(m) = self.choose(self.slot(s).tried) else { return self.no_reader(now, s, out) };
        self.begin_reading(now, s, m);
        let tag = Tag::Slot { slot: s, attempt: self.slot(s).attempt }.pack();
        let flush = self.shared.flush_everywhere();
        let asks = self.asks_allocation(s);
        out.push(Output::Send(Transmit {
            member: m,
            tag,
            op: if asks { OpCode::Allocation } else { OpCode::Read },
            range: whole,
            fua: false,
            verify: self.config.verify && !asks,
            flush,
            aux: 0,
            data: Data::None,
        }));
        // Early enough that the answer need not wait for it.
        self.ping_unheard(now, LEASE / 2, out);
    }

    /// The client wants to know which blocks hold data, not what.
    fn asks_allocation(&self, s: u16) -> bool {
        matches!(self.slot(s).work, Work::Client { op: Op::Allocation, .. })
    }

    /// The slot waits for this member from now on; whatever was sent for it before is late.
    pub(super) fn begin_reading(&mut self, now: u64, s: u16, m: MemberId) {
        let slot = self.slot_mut(s);
        slot.attempt = slot.attempt.wrapping_add(1);
        slot.enter(Stage::Reading { member: m, sent_at: now });
        self.members[m].reading += 1;
    }

    /// The nearest of the members that can be read from; of those the one that will probably answer first. Members
    /// that are about to be put out only if there is no other.
    fn choose(&self, tried: MemberSet) -> Option<MemberId> {
        let far = self.shared.far();
        self.members.readable().iter().filter(|m| !tried.has(*m)).min_by_key(|m| {
            let member = &self.members[*m];
            (
                member.fault.is_some(),
                far.has(*m),
                (u64::from(member.reading) + 1).saturating_mul(member.read_mean.max(1)),
            )
        })
    }

    /// No member is left for this read.
    fn no_reader(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        let tried = self.slot(s).tried;
        // Who is brought in sync is no member for hours perhaps, and gets this block from those who have been tried.
        let members = self.members.attached().minus(self.members.filling());
        if tried.is_empty() || !members.minus(tried).is_empty() {
            // Some member can still become one to read from, or is put out: then it is tried again.
            self.put_aside(now, s, Why::NoMember, out);
        } else if self.is_worth_splitting(s) {
            let slot = self.slot_mut(s);
            slot.singly = slot.done + slot.piece.part.len;
            self.release(s, out);
            self.start_piece(now, s, out);
        } else {
            self.conclude(now, s, Err(IoError::Io), out);
        }
    }

    /// Nobody can read all of the piece, but each of its blocks may be sound on somebody.
    fn is_worth_splitting(&self, s: u16) -> bool {
        let slot = self.slot(s);
        matches!(slot.work, Work::Client { op: Op::Read, .. })
            && slot.piece.whole.len > BLOCK
            && slot.tried.len() > 1
    }

    /// The member that was asked will not answer.
    pub(super) fn read_lost(&mut self, now: u64, s: u16, m: MemberId, out: &mut Vec<Output>) {
        self.members[m].reading -= 1;
        if self.slot(s).work.is_job() {
            self.job_read_lost(s, m, out);
        } else {
            self.stats.retried();
            self.send_read(now, s, out);
        }
    }

    /// The member that was asked answers.
    pub(super) fn read_reply(
        &mut self,
        now: u64,
        s: u16,
        sent_at: u64,
        reply: &Reply,
        out: &mut Vec<Output>,
    ) {
        let m = reply.member;
        if self.slot(s).work.is_job() {
            return self.job_read_reply(now, s, reply, out);
        }
        if self.asks_allocation(s) {
            return self.allocation_reply(now, s, reply, out);
        }
        let whole = self.slot(s).piece.whole;
        let complete = reply.op == OpCode::Read && u64::from(reply.payload) == whole.len;
        if reply.op != OpCode::Read || (reply.status == Status::Ok && !complete) {
            return self.break_link(now, m, out);
        }
        let time = now.saturating_sub(sent_at);
        self.stats.member_read(m).ended(whole.len, time, reply.status == Status::Ok);
        match reply.status {
            Status::Ok => {
                let member = &mut self.members[m];
                member.reading -= 1;
                member.read_mean = (member.read_mean * 7 + time) / 8;
                self.took(m, Class::Read, time);
                let unread = self.unread[usize::from(s)].and(self.slot(s).tried);
                self.read_done(now, s, m, out);
                self.report_unreadable(unread, whole, out);
            }
            Status::Corrupt | Status::Invalid => self.break_link(now, m, out),
            Status::Rotten => {
                self.note_tried(s, m, false);
                out.push(Output::Report(FromQueue::Rotten(m, whole)));
                self.read_lost(now, s, m, out);
            }
            Status::Io | Status::NoSpace | Status::Refused | Status::Stale => {
                self.note_tried(s, m, true);
                self.read_lost(now, s, m, out);
            }
        }
    }

    /// The member that was asked which blocks hold data answers, without bytes if it does not know. That says nothing of its disk,
    /// nor of how fast it reads.
    #[cold]
    fn allocation_reply(&mut self, now: u64, s: u16, reply: &Reply, out: &mut Vec<Output>) {
        let m = reply.member;
        let complete = usize::try_from(reply.payload).is_ok_and(|n| n <= Runs::LEN_MAX);
        match reply.status {
            _ if reply.op != OpCode::Allocation => self.break_link(now, m, out),
            Status::Ok if complete => {
                self.members[m].reading -= 1;
                self.slot_mut(s).aux = reply.payload;
                self.read_done(now, s, m, out);
            }
            Status::Io | Status::NoSpace | Status::Refused | Status::Stale => {
                self.note_tried(s, m, false);
                self.read_lost(now, s, m, out);
            }
            Status::Ok | Status::Corrupt | Status::Invalid | Status::Rotten => self.break_link(now, m, out),
        }
    }

    /// The member has not got the present piece; `unread`: for an error of its disk.
    fn note_tried(&mut self, s: u16, m: MemberId, unread: bool) {
        self.slot_mut(s).tried = self.slot(s).tried.with(m);
        let before = self.unread[usize::from(s)];
        self.unread[usize::from(s)] = if unread { before.with(m) } else { before.without(m) };
    }

    /// These could not read what another member just has: it can be written anew from there. Of a block that nobody can read nobody
    /// is told: nobody has what it should hold.
    fn report_unreadable(&self, unread: MemberSet, range: Extent, out: &mut Vec<Output>) {
        for m in unread.and(self.members.readable()).iter() {
            out.push(Output::Report(FromQueue::Unreadable(m, range)));
        }
    }

    /// The blocks of the present piece are here.
    fn read_done(&mut self, now: u64, s: u16, m: MemberId, out: &mut Vec<Output>) {
        let slot = self.slot_mut(s);
        let Work::Client { op, range } = slot.work else { return };
        slot.sources = slot.sources.with(m);
        if op.is_write() {
            out.push(Output::Store { slot: s, append: false });
            let (piece, from) = (slot.piece, slot.piece.part.offset - range.offset);
            out.push(Output::Merge {
                slot: s,
                at: in_transfer(piece.part.offset - piece.whole.offset),
                // Zeroes and unmap may be longer, but have no data to take it from.
                from: if matches!(op, Op::Write { .. }) { in_transfer(from) } else { 0 },
                len: in_transfer(piece.part.len),
            });
            return self.enqueue_write(now, s, out);
        }
        out.push(Output::Store { slot: s, append: slot.done > 0 });
        slot.done += slot.piece.part.len;
        // Which blocks hold data is told for as many as one answer covers.
        let more = slot.done < range.len && op == Op::Read;
        self.release(s, out);
        if more {
            self.start_piece(now, s, out);
        } else {
            self.slot_mut(s).enter(Stage::Held);
            self.held.insert(s);
            self.answer_read(now, s, out);
        }
    }

    /// Answers a read that has its data, if every member was heard; else it is held until they are.
    fn answer_read(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        let slot = self.slot(s);
        let Work::Client { op, range } = slot.work else { return };
        let readable = self.members.readable();
        if slot.sources.and(readable) != slot.sources {
            // Put out, or about to be, before the answer was given: what it said may be out of date by then.
            self.held.remove(s);
            let slot = self.slot_mut(s);
            slot.done = 0;
            slot.sources = MemberSet::EMPTY;
            return self.admit(now, s, out);
        }
        if !self.all_heard(now) {
            if self.mode == Mode::Stopping {
                // Those that were not heard may be gone, and nobody puts them out any more.
                self.held.remove(s);
                return self.refuse(now, s, IoError::ShuttingDown, out);
            }
            // Neither a pause nor a switch waits for it: it has its data, and no claim.
            self.leave_barriers(s, out);
            return self.ping_unheard(now, LEASE, out);
        }
        let part = match op {
            Op::Allocation => (slot.aux > 0).then_some((0, slot.aux)),
            _ => Some((in_transfer(range.offset - range.widen(BLOCK).offset), in_transfer(range.len))),
        };
        self.held.remove(s);
        self.leave_barriers(s, out);
        self.complete(now, s, Ok(()), part, false, out);
        self.free(s, out);
    }

    /// Looks again at the reads that are held.
    pub(super) fn recheck_held(&mut self, now: u64, out: &mut Vec<Output>) {
        for s in self.held.iter() {
            self.answer_read(now, s, out);
        }
    }

    /// True if every attached member was heard lately. A single member proves itself by the answer.
    fn all_heard(&self, now: u64) -> bool {
        let attached = self.members.attached();
        self.lacks(Sabotage::NoLease)
            || attached.len() <= 1
            || attached.iter().all(|m| self.members[m].heard.is_some_and(|t| now.saturating_sub(t) < LEASE))
    }

    /// Pings the attached members that were not heard for `age` ns.
    fn ping_unheard(&mut self, now: u64, age: u64, out: &mut Vec<Output>) {
        let attached = self.members.attached();
        if attached.len() <= 1 || self.lacks(Sabotage::NoLease) {
            return;
        }
        for m in attached.iter() {
            if self.members[m].heard.is_none_or(|t| now.saturating_sub(t) >= age) {
                self.ping(now, m, out);
            }
        }
    }
}

/// A place or length inside one transfer.
fn in_transfer(n: u64) -> u32 {
    u32::try_from(n).unwrap_or_else(|_| unreachable!("transfers are at most 1 MiB"))
}
