//! Full disks (`docs/invariants.md`, 7): not a failure, as long as all are full or space comes back.
//!
//! A write that every member refused before it had changed anything waits outside and begins anew; so does the rest of one of which
//! all have done as many of the first blocks, once who is brought in sync has done these, too. One that some have done, or have done another part of, holds its range until all have
//! done it: members may differ there. After a while the full ones are reported, unless all are full, or they are needed.
//!
//! A replica that is brought in sync on another disk is the way out, so nothing that waits may stand in its way: it is sent a write
//! only once a member has done it, and if it has done one that none had space for, it begins anew. Else the range would be held until
//! it is in sync, and it could not be before the range is let go.
//!
//! To send a write again takes a place of the window, of which there are few. When none is left the oldest write is sent again to
//! everybody, and so is the last one that each of them remembers: whoever is needed is tried for as long as it takes.
//!
//! Nobody waits for space with what only gives space back: a client that unmaps is answered that there is none.

use lh_block::{BLOCK, IoError, Op};
use lh_wire::Status;

use super::slot::{Fan, First, Stage, Why, Work};
use super::{Output, Queue, Sabotage};
use crate::message::{Fault, MEMBERS_MAX, MemberId, MemberSet};

/// How long a full disk waits for the others' answers before its member is reported, ns.
const GRACE: u64 = 2_000_000_000;

/// A member whose disk was full is tried again after this time, ns.
pub(super) const RETRY: u64 = 1_000_000_000;

/// What one member's disk said.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Space {
    /// When it last was full, ns. Not forgotten when it takes a write: that may have needed no space.
    full_at: Option<u64>,
    /// When it is tried again, ns.
    probe_at: u64,
    /// It has done a write that it had refused: the others may follow.
    again: bool,
}

impl Queue {
    /// Notes what a member's answer to a write says of its disk.
    pub(super) fn note_space(&mut self, now: u64, m: MemberId, status: Status, was_full: bool) {
        let space = &mut self.members[m].space;
        match status {
            Status::NoSpace => {
                space.full_at = Some(now);
                space.again = false;
                if space.probe_at <= now {
                    space.probe_at = now + RETRY;
                }
            }
            Status::Ok if was_full => space.again = true,
            _ => {}
        }
    }

    /// Tries again what was refused for want of space, and reports who is full while others are not.
    pub(super) fn retry_full(&mut self, now: u64, out: &mut Vec<Output>) {
        self.stats.starved(self.is_starved(now));
        let due = |s: &u16| matches!(self.slot(*s).stage(), Stage::Parked(Why::Full(t)) if *t <= now);
        if self.parked.iter().any(due) {
            self.retry_parked();
        }
        // The write of each member that was refused first finds out whether there is space again: to send a write
        // again takes a place of the window.
        let mut first: [Option<u16>; MEMBERS_MAX] = [None; MEMBERS_MAX];
        // How many writes found no place.
        let mut left_out = 0;
        for s in self.used.iter() {
            let Stage::Writing(fan) = *self.slot(s).stage() else { continue };
            if fan.full.is_empty() || self.slot(s).work.is_job() {
                continue;
            }
            if now.saturating_sub(fan.full_since) >= GRACE {
                self.judge_full(now, &fan, out);
                self.judge_ahead(now, &fan, out);
                self.give_up_unmap(now, s, out);
            }
            if fan.ok.is_empty() && fan.sent.is_empty() && fan.missing() == fan.full.or(fan.back) {
                if fan.last_sent + RETRY <= now {
                    left_out += u32::from(!self.send_anew(now, s, &fan, out));
                }
                continue;
            }
            for m in fan.full.and(self.members.live()).minus(fan.sent).iter() {
                let first = &mut first[usize::from(m.0)];
                if self.members[m].space.again {
                    left_out += u32::from(!self.repeat(now, s, m, out));
                } else if first.is_none_or(|f| self.slot(s).order < self.slot(f).order) {
                    *first = Some(s);
                }
            }
        }
        for (m, s) in (0..).map(MemberId).zip(first) {
            let space = &mut self.members[m].space;
            space.again = false;
            if let Some(s) = s
                && space.probe_at <= now
            {
                space.probe_at = now + RETRY;
                left_out += u32::from(!self.repeat(now, s, m, out));
            }
        }
        for _ in 0..left_out {
            self.send_oldest_anew(now, out);
        }
    }

    /// Every member has refused it. If nothing was changed anywhere it waits outside, and if all have done as many blocks the rest
    /// does. Else the range is held.
    pub(super) fn refused_everywhere(&mut self, now: u64, s: u16, fan: &Fan, out: &mut Vec<Output>) {
        let blocks = match fan.first {
            First::Alike(blocks) => blocks,
            First::Differ if self.lacks(Sabotage::PartsAreAlike) => 1,
            First::Untold | First::Differ => return,
        };
        if !fan.need.minus(fan.back).minus(self.members.joining()).minus(fan.told).is_empty() {
            // Whose link was down while the others were asked again.
            return;
        }
        if blocks > 0 && !self.lacks(Sabotage::FillersLackParts) {
            return self.cut_piece(now, s, blocks, out);
        }
        self.leave_window(s, fan);
        // None, unless a mechanism is left out.
        self.slot_mut(s).done += u64::from(blocks) * BLOCK;
        if self.unmaps(s) {
            self.conclude(now, s, Err(IoError::NoSpace), out);
        } else {
            self.put_aside(now, s, Why::Full(now + RETRY), out);
        }
    }

    /// All members have done the first blocks of a piece, and nothing of the rest: these blocks are the piece from now on, which
    /// whoever is brought in sync has still to do, and what is left is the next one.
    fn cut_piece(&mut self, now: u64, s: u16, blocks: u32, out: &mut Vec<Output>) {
        let slot = self.slot_mut(s);
        slot.piece.whole.len = u64::from(blocks) * BLOCK;
        slot.piece.part = slot.piece.whole;
        if let Some(fan) = slot.fan() {
            (fan.ok, fan.full, fan.back) = (fan.told, MemberSet::EMPTY, fan.need.minus(fan.told));
            (fan.first, fan.told) = (First::Untold, MemberSet::EMPTY);
        }
        self.settle(now, s, out);
    }

    fn unmaps(&self, s: u16) -> bool {
        matches!(self.slot(s).work, Work::Client { op: Op::Unmap, .. })
    }

    /// Some have unmapped the range and others had no space to: whoever waits for it waits no longer. The range is held all the
    /// same until it is equal everywhere.
    fn give_up_unmap(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        if self.unmaps(s) && !self.slot(s).given && matches!(self.slot(s).stage(), Stage::Writing(_)) {
            self.complete(now, s, Err(IoError::NoSpace), None, true, out);
            self.slot_mut(s).given = true;
        }
    }

    /// Sends a write again to all, who have refused it, some of them after a part. To all of them it is their last one then: its
    /// place in the window is the last one, too, so that it is tried for as long as it takes. False if there is none.
    fn send_anew(&mut self, now: u64, s: u16, fan: &Fan, out: &mut Vec<Output>) -> bool {
        let can = self.window.can_repeat();
        if can {
            self.send_to_all(now, s, fan, out);
        }
        can
    }

    /// The window is used up: the oldest write in it gives its place back and takes the last one. If it waits for space, that is: all
    /// else in the window ends by itself.
    fn send_oldest_anew(&mut self, now: u64, out: &mut Vec<Output>) {
        let oldest = self.window.oldest();
        let found = self.used.iter().find_map(|s| match *self.slot(s).stage() {
            Stage::Writing(fan) if fan.place == Some(oldest) => Some((s, fan)),
            _ => None,
        });
        if let Some((s, fan)) = found.filter(|(_, fan)| fan.sent.is_empty() && !fan.full.is_empty()) {
            self.send_to_all(now, s, &fan, out);
        }
    }

    /// Sends a write again to everybody, also to those who have done it, as their last one.
    fn send_to_all(&mut self, now: u64, s: u16, fan: &Fan, out: &mut Vec<Output>) {
        if let Some(place) = fan.place {
            self.window.complete(place);
        }
        let place = fan.place.map(|_| self.window.take(self.slot(s).piece.whole.len));
        if let Some(fan) = self.slot_mut(s).fan() {
            fan.place = place;
            fan.unsure = fan.unsure.or(fan.ok);
            fan.ok = MemberSet::EMPTY;
            (fan.first, fan.told) = (First::Untold, MemberSet::EMPTY);
        }
        for m in fan.need.minus(fan.back).iter() {
            self.send_to(now, s, m, out);
        }
    }

    /// True if a write is under way, or waits outside, while no member has space. It stays so for a moment when they have.
    fn is_starved(&self, now: u64) -> bool {
        let waits = |s| matches!(self.slot(s).stage(), Stage::Parked(Why::Full(_)) | Stage::Writing(_));
        self.all_full(now) && self.used.iter().any(waits)
    }

    /// True if every member that is read from was full lately.
    fn all_full(&self, now: u64) -> bool {
        let lately = |m: MemberId| {
            self.members[m].space.full_at.is_some_and(|t| now.saturating_sub(t) < GRACE + RETRY)
        };
        let readable = self.members.readable();
        !readable.is_empty() && readable.iter().all(lately)
    }

    /// Reports the members that are full, unless all are: then the volume waits for space.
    fn judge_full(&mut self, now: u64, fan: &Fan, out: &mut Vec<Output>) {
        if self.all_full(now) && self.window.can_repeat() {
            return;
        }
        for m in fan.full.iter() {
            if self.members[m].fault.is_none() && self.may_lose(m) {
                self.report(now, m, Fault::NoSpace, out);
            }
        }
    }

    /// Whom a write is not sent to before a member has done it.
    pub(super) fn kept_back(&self, now: u64, need: MemberSet) -> MemberSet {
        let joining = self.members.joining().and(need);
        let starved = !joining.is_empty() && joining != need && self.all_full(now);
        if starved { joining } else { MemberSet::EMPTY }
    }

    /// Sends a write to those that were kept back, if a member has done it, if they are members by now, or if nobody else is left.
    pub(super) fn send_back(&mut self, now: u64, s: u16, out: &mut Vec<Output>) {
        let joining = self.members.joining();
        let Some(fan) = self.slot_mut(s).fan() else { return };
        if fan.back.is_empty() {
            return;
        }
        let done = !fan.ok.minus(joining).is_empty();
        let alone = fan.need.minus(fan.back).is_empty();
        let due = if done || alone { fan.back } else { fan.back.minus(joining) };
        fan.back = fan.back.minus(due);
        for m in due.iter() {
            self.send_to(now, s, m, out);
        }
    }

    /// Reports who is brought in sync and has done, or may have done, what no member has space for: the range is held for it.
    fn judge_ahead(&mut self, now: u64, fan: &Fan, out: &mut Vec<Output>) {
        let joining = self.members.joining();
        let members = fan.need.minus(joining);
        let refused =
            !members.is_empty() && members.minus(fan.full).is_empty() && members.and(fan.unsure).is_empty();
        if !refused {
            return;
        }
        for m in fan.need.and(joining).minus(fan.back).iter() {
            if self.members[m].fault.is_none() {
                self.report(now, m, Fault::Ahead, out);
            }
        }
    }

    /// Sends a write again to a member that was full; false if the window has no place for it.
    fn repeat(&mut self, now: u64, s: u16, m: MemberId, out: &mut Vec<Output>) -> bool {
        let can = self.window.repeat();
        if can {
            self.send_to(now, s, m, out);
        }
        can
    }
}
