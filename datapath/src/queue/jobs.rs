//! Work for the conductor: copies from one member to others, marks taken back, flushes.
//!
//! A job runs whether or not the queue is paused, and over links that carry nothing else yet. It never waits for a
//! member to be put out; a member that fails ends it, once every other has answered.

use lh_block::Extent;
use lh_wire::{MERGED, OpCode, Status};

use super::members::Link;
use super::slot::{Copy, Fan, Stage, Work};
use super::switches::Mode;
use super::tag::Tag;
use super::{Data, JOB_SLOTS, Output, Queue, Reply, Transmit};
use crate::message::{FromQueue, Job, JobId, JobResult, MemberId, MemberSet};
use crate::order::{Kind, Outcome};

impl Job {
    /// What is copied or compared, and whether the range is claimed. `None`: nothing is.
    fn claim(&self) -> Option<(Extent, Kind)> {
        match self {
            Self::Equalise { layer, range, repair, .. } if layer.is_none() || *repair => {
                Some((*range, Kind::Exclusive))
            }
            Self::Compare { layer: None, range, .. } | Self::Verify { layer: None, range, .. } => {
                Some((*range, Kind::Shared))
            }
            Self::ClearIntent { range, .. } => Some((*range, Kind::Exclusive)),
            Self::Equalise { .. } | Self::Compare { .. } | Self::Verify { .. } | Self::Flush => None,
        }
    }

    /// Where.
    fn range(&self) -> Extent {
        match self {
            Self::Equalise { range, .. }
            | Self::Compare { range, .. }
            | Self::Verify { range, .. }
            | Self::ClearIntent { range, .. } => *range,
            Self::Flush => Extent::default(),
        }
    }

    /// The members that it cannot do without, given all that are attached.
    const fn members(&self, attached: MemberSet) -> MemberSet {
        match self {
            Self::Equalise { source, targets, .. } | Self::Compare { source, targets, .. } => {
                targets.with(*source)
            }
            Self::Verify { member, .. } => MemberSet::EMPTY.with(*member),
            Self::ClearIntent { .. } | Self::Flush => attached,
        }
    }
}

impl Queue {
    /// A job comes in.
    pub(super) fn job(&mut self, now: u64, id: JobId, job: Job, out: &mut Vec<Output>) {
        if self.mode == Mode::Stopping {
            out.push(Output::Report(FromQueue::JobDone(id, JobResult::Skipped)));
            return;
        }
        let first = self.config.depth;
        match (first..first + JOB_SLOTS).find(|s| !self.used.has(*s)) {
            Some(s) => self.start_job(now, s, id, job, out),
            None => self.jobs.push_back((id, job)),
        }
    }

    fn start_job(&mut self, now: u64, s: u16, id: JobId, job: Job, out: &mut Vec<Output>) {
        let (range, claim) = (job.range(), job.claim());
        let is_flush = job == Job::Flush;
        self.used.insert(s);
        self.slot_mut(s).begin(Work::Job(id, job), now, 0);
        self.slot_mut(s).piece = super::slot::Piece { whole: range, part: range };
        if let Some(member) = self.first_down(self.members_of_job(s)) {
            self.end_job(s, JobResult::Failed { member }, out);
        } else if is_flush {
            self.join_flush(now, s, out);
        } else if claim.is_none_or(|(range, kind)| self.claim(s, range, kind) == Outcome::Granted) {
            self.job_claimed(now, s, out);
        }
    }

    /// The range of a job is claimed, or needs no claim.
    pub(super) fn job_claimed(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        if self.slot(s).given {
            return self.close_job(s, out);
        }
        let Work::Job(_, job) = &self.slot(s).work else { return };
        match *job {
            Job::Equalise { compare, .. } => {
                self.slot_mut(s).copy = if compare { Copy::Digest } else { Copy::Read };
                self.read_source(now, s, out);
            }
            Job::Compare { .. } => {
                self.slot_mut(s).copy = Copy::Digest;
                self.read_source(now, s, out);
            }
            Job::Verify { .. } => {
                self.slot_mut(s).copy = Copy::Verify;
                self.read_source(now, s, out);
            }
            Job::ClearIntent { range, flush } => {
                let clearable = self.shared.chunks_of(range).all(|chunk| self.shared.clearable(chunk, flush));
                if clearable && self.shared.in_doubt(range).is_none() {
                    self.send_fan(now, s, out);
                } else {
                    self.end_job(s, JobResult::Skipped, out);
                }
            }
            Job::Flush => {}
        }
    }

    /// Asks the source of a copy for its checksums, or for the present part.
    fn read_source(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        let Work::Job(_, job) = &self.slot(s).work else { return };
        let (layer, source, verify, merged) = match *job {
            // A head has no checksums, but the layers below it have, through which it may be read.
            Job::Equalise { layer, source, merged, .. } => {
                (layer, self.sound_source(s).unwrap_or(source), layer.is_some() || merged, merged)
            }
            Job::Compare { layer, source, .. } => (layer, source, true, false),
            Job::Verify { layer, member, .. } => (layer, member, false, false),
            Job::ClearIntent { .. } | Job::Flush => return,
        };
        let (op, range) = match self.slot(s).copy {
            Copy::Verify => (OpCode::VerifyLayer, job.range()),
            Copy::Digest | Copy::Compare => (OpCode::DigestLayer, job.range()),
            Copy::Read | Copy::ReadAnyway | Copy::Put => (OpCode::ReadLayer, self.slot(s).piece.part),
        };
        if self.members[source].link == Link::Down {
            // It went down while others were asked: nobody would tell this read any more.
            return self.end_job(s, JobResult::Failed { member: source }, out);
        }
        let verify = verify && self.slot(s).copy != Copy::ReadAnyway;
        self.slot_mut(s).sources = MemberSet::EMPTY.with(source);
        self.begin_reading(now, s, source);
        let tag = Tag::Slot { slot: s, attempt: self.slot(s).attempt }.pack();
        let flush = self.shared.flush_everywhere();
        let data = Data::LayerName(layer);
        let (member, fua, aux) = (source, false, if merged { MERGED } else { 0 });
        out.push(Output::Send(Transmit { member, tag, op, range, fua, verify, flush, aux, data }));
    }

    /// Goes on with the next part that differs; false if there is none.
    fn copy_next_part(&mut self, now: u64, s: u16, out: &mut Vec<Output>) -> bool {
        let slot = self.slot_mut(s);
        let Some(part) = lh_wire::differing(slot.piece.whole, slot.differ).next() else { return false };
        let (len, first) = (slot.piece.whole.len, part.offset - slot.piece.whole.offset);
        let step = usize::try_from(lh_wire::part_len(len)).unwrap_or(usize::MAX);
        for at in (first..first + part.len).step_by(step) {
            slot.differ &= !lh_wire::part_bit(len, at);
        }
        slot.piece.part = part;
        slot.copy = Copy::Read;
        (slot.rotten, slot.is_rotten) = (MemberSet::EMPTY, false);
        self.read_source(now, s, out);
        true
    }

    /// The members that a job cannot do without.
    fn members_of_job(&self, s: u16) -> MemberSet {
        let attached = self.members.attached();
        match &self.slot(s).work {
            Work::Job(_, job) => job.members(attached),
            Work::Client { .. } | Work::None => attached,
        }
    }

    /// A link is down: jobs that need the member and wait for their claim or for the window end now. What they wait
    /// for may be a write that waits for that very member.
    pub(super) fn jobs_lost(&mut self, m: MemberId, out: &mut Vec<Output>) {
        let attached = self.members.attached();
        self.jobs.retain(|(id, job)| {
            let needs = job.members(attached);
            if needs.has(m) {
                out.push(Output::Report(FromQueue::JobDone(*id, JobResult::Failed { member: m })));
            }
            !needs.has(m)
        });
        for s in self.used.iter() {
            if !self.slot(s).work.is_job() || self.slot(s).given || !self.members_of_job(s).has(m) {
                continue;
            }
            match self.slot(s).stage() {
                Stage::Claiming => {
                    // Its place in the line cannot be given up before it is granted.
                    self.report_job(s, JobResult::Failed { member: m }, out);
                    self.slot_mut(s).given = true;
                }
                Stage::Queued => {
                    self.window.stop_waiting(s);
                    self.end_job(s, JobResult::Failed { member: m }, out);
                }
                _ => {}
            }
        }
    }

    fn first_down(&self, members: MemberSet) -> Option<MemberId> {
        members.iter().find(|m| self.members[*m].link == Link::Down)
    }

    /// The source of a copy answers.
    pub(super) fn job_read_reply(&mut self, now: u64, s: u16, reply: &Reply, out: &mut Vec<Output>) {
        let m = reply.member;
        let copy = self.slot(s).copy;
        let expected = match copy {
            Copy::Verify => OpCode::VerifyLayer,
            Copy::Digest | Copy::Compare => OpCode::DigestLayer,
            Copy::Read | Copy::ReadAnyway | Copy::Put => OpCode::ReadLayer,
        };
        if reply.op != expected {
            return self.break_link(now, m, out);
        }
        self.members[m].reading -= 1;
        if reply.status == Status::Rotten && copy == Copy::Read && !self.repairs(s) {
            return self.read_elsewhere(now, s, m, out);
        }
        if reply.status == Status::Io && self.takes_another(s, m) {
            out.push(Output::Report(FromQueue::Unreadable(m, self.slot(s).piece.part)));
            return self.read_source(now, s, out);
        }
        if reply.status != Status::Ok {
            return self.end_job(s, JobResult::Failed { member: m }, out);
        }
        if copy == Copy::Verify {
            let verified = lh_wire::Verified::from_bits(reply.aux);
            return self.end_job(s, JobResult::Verified(verified), out);
        }
        out.push(Output::Store { slot: s, append: false });
        self.slot_mut(s).aux = reply.aux;
        self.slot_mut(s).copy = if copy == Copy::Digest { Copy::Compare } else { Copy::Put };
        if copy == Copy::Digest {
            self.digested(now, s, m, reply.aux, out);
        } else if matches!(self.slot(s).work, Work::Job(_, Job::Equalise { layer: None, .. })) {
            self.enqueue_write(now, s, out);
        } else {
            self.send_fan(now, s, out);
        }
    }

    /// The job is a repair: what it reads has to be sound.
    fn repairs(&self, s: u16) -> bool {
        matches!(self.slot(s).work, Work::Job(_, Job::Equalise { repair: true, .. }))
    }

    /// Whom to read the part in hand from: the source, or one of those who hold the same, if it has not said that this is
    /// rotten, nor failed to read it.
    fn sound_source(&self, s: u16) -> Option<MemberId> {
        let Work::Job(_, Job::Equalise { source, others, .. }) = self.slot(s).work else { return None };
        let sound = |m: &MemberId| !self.slot(s).rotten.has(*m);
        let other = |m: &MemberId| sound(m) && self.members[*m].link != Link::Down;
        Some(source).filter(sound).or_else(|| others.iter().find(other))
    }

    /// A member's disk does not give what was to be copied from it, or summed up: true if it can be asked of another that holds
    /// the same.
    fn takes_another(&mut self, s: u16, m: MemberId) -> bool {
        if !matches!(self.slot(s).copy, Copy::Digest | Copy::Read) || self.repairs(s) {
            return false;
        }
        let slot = self.slot_mut(s);
        slot.rotten = slot.rotten.with(m);
        self.sound_source(s).is_some()
    }

    /// A member says that blocks are rotten that were to be copied from it: another is asked. If they are rotten everywhere,
    /// members are made equal all the same, unless a target's own copy is sound: which of them is right is for a scrub to
    /// say, and this asks for one.
    fn read_elsewhere(&mut self, now: u64, s: u16, m: MemberId, out: &mut Vec<Output>) {
        out.push(Output::Report(FromQueue::Rotten(m, self.slot(s).piece.part)));
        let slot = self.slot_mut(s);
        slot.rotten = slot.rotten.with(m);
        if self.sound_source(s).is_none() {
            let slot = self.slot_mut(s);
            (slot.copy, slot.is_rotten) = (Copy::ReadAnyway, true);
        }
        self.read_source(now, s, out);
    }

    /// The source of a copy or comparison has told its checksums.
    fn digested(&mut self, now: u64, s: u16, m: MemberId, rotten: u32, out: &mut Vec<Output>) {
        // What is rotten there is copied also where a target has the same: from another source.
        self.slot_mut(s).differ = rotten;
        if let Work::Job(_, Job::Equalise { range, .. }) = self.slot(s).work {
            let parts = lh_wire::differing(range, rotten);
            out.extend(parts.map(|part| Output::Report(FromQueue::Rotten(m, part))));
        }
        match self.slot(s).work {
            Work::Job(_, Job::Compare { targets, .. }) if targets.is_empty() => {
                self.end_job(s, JobResult::Compared { parts: rotten }, out);
            }
            _ => self.send_fan(now, s, out),
        }
    }

    /// The source of a copy will not answer.
    pub(super) fn job_read_lost(&mut self, s: u16, m: MemberId, out: &mut Vec<Output>) {
        self.end_job(s, JobResult::Failed { member: m }, out);
    }

    /// Decides whether a job's fan-out is done.
    pub(super) fn job_settle(&mut self, now: u64, s: u16, fan: &Fan, out: &mut Vec<Output>) {
        if !fan.sent.is_empty() {
            return;
        }
        let result = match fan.missing().iter().next() {
            Some(member) => JobResult::Failed { member },
            None if matches!(self.slot(s).work, Work::Job(_, Job::Compare { .. })) => {
                JobResult::Compared { parts: self.slot(s).differ }
            }
            None => JobResult::Done { changed: self.slot(s).changed },
        };
        if let Work::Job(_, Job::ClearIntent { range, .. }) = self.slot(s).work {
            if matches!(result, JobResult::Done { .. }) {
                self.shared.chunks_of(range).for_each(|chunk| self.shared.cleared(chunk));
            }
        } else {
            if self.slot(s).copy == Copy::Put {
                self.leave_window(s, fan);
            }
            if matches!(result, JobResult::Done { .. }) && self.copy_next_part(now, s, out) {
                return;
            }
        }
        self.end_job(s, result, out);
    }

    /// Reports a job and goes on with the next.
    pub(super) fn end_job(&mut self, s: u16, result: JobResult, out: &mut Vec<Output>) {
        self.report_job(s, result, out);
        self.close_job(s, out);
    }

    fn report_job(&self, s: u16, result: JobResult, out: &mut Vec<Output>) {
        if let Work::Job(id, _) = self.slot(s).work {
            out.push(Output::Report(FromQueue::JobDone(id, result)));
        }
    }

    /// Frees the slot of a job that was reported.
    fn close_job(&mut self, s: u16, out: &mut Vec<Output>) {
        self.leave_barriers(s, out);
        self.release(s, out);
        self.free(s, out);
        self.job_slot_free = true;
    }

    /// Starts jobs that waited for a slot.
    pub(super) fn start_waiting_jobs(&mut self, now: u64, out: &mut Vec<Output>) {
        self.job_slot_free = false;
        let first = self.config.depth;
        while let Some(s) = (first..first + JOB_SLOTS).find(|s| !self.used.has(*s)) {
            let Some((id, job)) = self.jobs.pop_front() else {
                break;
            };
            self.start_job(now, s, id, job, out);
        }
    }

    /// The engine ends: jobs that wait for a slot are not done.
    pub(super) fn skip_waiting_jobs(&mut self, out: &mut Vec<Output>) {
        for (id, _) in self.jobs.drain(..) {
            out.push(Output::Report(FromQueue::JobDone(id, JobResult::Skipped)));
        }
    }
}
