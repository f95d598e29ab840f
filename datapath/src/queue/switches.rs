//! Switches: one step of a change, made here and acknowledged once its condition holds (`docs/invariants.md`, 1, 9).
//!
//! Conditions are about the requests that were admitted before the switch. They are counted at admission: a request
//! that was let in goes through all steps of its piece, whatever was switched meanwhile, unless it has to go back outside.

use super::members::{Link, Role};
use super::slot::{SlotSet, Stage};
use super::{Output, Queue, Sabotage};
use crate::message::{Fault, FromQueue, MemberId, Switch, SwitchId};

/// Whether requests are let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// They wait outside.
    Paused,
    /// They are.
    Open,
    /// They are answered with an error, for good.
    Stopping,
}

/// A switch that is made, and the slots that have to end before it is acknowledged.
#[derive(Debug)]
pub(super) struct Barrier {
    id: SwitchId,
    waiting: SlotSet,
}

impl Queue {
    /// Makes a switch.
    pub(super) fn switch(&mut self, now: u64, id: SwitchId, switch: Switch, out: &mut Vec<Output>) {
        let mut waiting = SlotSet::default();
        match switch {
            Switch::Attach { member } => {
                self.push_barrier(id, self.writes_in_flight());
                self.attach(now, member, Role::WriteOnly, out);
            }
            Switch::Fill { member } => {
                self.push_barrier(id, self.writes_in_flight());
                self.attach(now, member, Role::Filling, out);
            }
            Switch::Await { member } => {
                self.push_barrier(id, self.writes_in_flight());
                if self.members[member].role == Role::Filling && !self.lacks(Sabotage::NotAwaited) {
                    self.members.set_role(member, Role::Awaited);
                }
            }
            Switch::Promote { member } => {
                self.push_barrier(id, waiting);
                let role = self.members[member].role;
                assert!(role != Role::Out, "a member is attached before it is read from");
                if role != Role::Filling {
                    self.members.set_role(member, Role::ReadWrite);
                } else {
                    assert!(self.lacks(Sabotage::NotAwaited), "a member is awaited before it is read from");
                }
                self.note_serving(now);
                self.settle_writes(now, out);
                self.retry_parked();
            }
            Switch::StopReads { member } => {
                self.push_barrier(id, waiting);
                if self.members[member].role != Role::Out {
                    self.members.set_role(member, Role::Leaving);
                }
                self.note_serving(now);
                self.abandon_reads(now, member, out);
                self.recheck_held(now, out);
            }
            Switch::Forget { member } => {
                self.push_barrier(id, waiting);
                self.forget(now, member, out);
            }
            Switch::Pause => {
                self.push_barrier(id, self.in_flight);
                if self.mode == Mode::Open {
                    self.mode = Mode::Paused;
                }
            }
            Switch::Resume => {
                self.push_barrier(id, waiting);
                if self.mode == Mode::Paused {
                    self.mode = Mode::Open;
                }
                self.retry_parked();
            }
            Switch::Resize { size } => {
                self.push_barrier(id, waiting);
                self.config.size = size;
            }
            Switch::Stop => {
                for s in self.used.iter().filter(|s| self.is_open(*s)) {
                    waiting.insert(s);
                }
                self.push_barrier(id, waiting);
                self.mode = Mode::Stopping;
                self.stop(now, out);
            }
        }
        self.report_barriers(out);
    }

    /// The clients' writes whose last answer is still to come.
    fn writes_in_flight(&self) -> SlotSet {
        let mut writes = SlotSet::default();
        for s in self.in_flight.iter().filter(|s| self.slot(*s).work.is_client_write()) {
            writes.insert(s);
        }
        writes
    }

    fn push_barrier(&mut self, id: SwitchId, waiting: SlotSet) {
        self.barriers.push(Barrier { id, waiting });
    }

    /// Acknowledges the switches whose condition holds.
    fn report_barriers(&mut self, out: &mut Vec<Output>) {
        self.barriers.retain(|b| {
            let waits = !b.waiting.is_empty();
            if !waits {
                out.push(Output::Report(FromQueue::Switched(b.id)));
            }
            waits
        });
    }

    /// A slot is not in flight any more: nothing waits for it.
    pub(super) fn leave_barriers(&mut self, s: u16, out: &mut Vec<Output>) {
        self.in_flight.remove(s);
        if self.barriers.is_empty() {
            return;
        }
        for b in &mut self.barriers {
            b.waiting.remove(s);
        }
        self.report_barriers(out);
    }

    /// The member is written from now on. What waits for it since its last link broke is sent again.
    fn attach(&mut self, now: u64, m: MemberId, role: Role, out: &mut Vec<Output>) {
        match self.members[m].link {
            Link::Live => {
                self.members[m].fault = None;
                if self.members[m].role == Role::Out {
                    self.members.set_role(m, role);
                }
            }
            Link::Up => {
                self.members[m].fault = None;
                self.members.set_role(m, role);
                self.members.set_link(m, Link::Live);
                for s in self.used.iter() {
                    self.fan_attach(now, s, m, out);
                }
                self.flush_attach(now, m, out);
            }
            Link::Down => {
                // It broke while the switch was on its way, which was reported then. Everything waits for the member
                // until the next attempt.
                self.members.set_role(m, role);
                self.report(now, m, Fault::Link, out);
            }
        }
        self.note_serving(now);
        self.retry_parked();
    }

    /// One who joined is a member now: what it alone has done, and is still there, is held.
    fn settle_writes(&mut self, now: u64, out: &mut Vec<Output>) {
        for s in self.used.iter() {
            if matches!(self.slot(s).stage(), Stage::Writing(_)) && !self.slot(s).work.is_job() {
                self.settle(now, s, out);
            }
        }
    }

    /// An epoch without the member is durable: nothing waits for it any more, and nothing it says counts.
    fn forget(&mut self, now: u64, m: MemberId, out: &mut Vec<Output>) {
        if self.members[m].link != Link::Down {
            out.push(Output::Disconnect { member: m });
            self.members[m].fault = Some(Fault::Link); // nobody needs to be told
            self.link_down(now, m, out);
        }
        self.members.set_role(m, Role::Out);
        self.members[m].heard = None;
        self.note_serving(now);
        for s in self.used.iter() {
            if matches!(self.slot(s).stage(), Stage::Writing(_)) {
                self.fan_forget(now, s, m, out);
            }
        }
        self.flush_forget(now, m, out);
        self.recheck_held(now, out);
        self.retry_parked();
    }
}
