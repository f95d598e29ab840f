//! Too few members are left to go on: I/O waits until enough are back (`docs/invariants.md`, 6).
//!
//! Nobody can be put out, so those who failed stay members, and the queues keep what waits for them. Whoever returns
//! has been fenced, which drained it; what it holds of a running chain operation is settled first, then every queue
//! attaches it again and sends again what waits. A member whose process did not live on may lack what was not flushed:
//! its marked chunks are put in doubt before anybody reads from it.

use lh_wire::Control;

use super::chain::unfinished;
use super::{Conductor, ControlFor, Phase, Role, Seat, sabotaged};
use crate::message::{MemberId, MemberSet, Switch};

/// The time between the loss of too many and the return of enough.
#[derive(Debug, Default)]
pub(super) struct Outage {
    /// Asked to settle a chain operation.
    asked: MemberSet,
    /// Back, and fit to go on.
    ready: MemberSet,
    /// When enough were back first.
    since: Option<u64>,
}

impl Outage {
    pub(super) const fn lost(&mut self, member: MemberId) {
        self.asked = self.asked.without(member);
        self.ready = self.ready.without(member);
    }
}

impl Conductor {
    /// A failed member's return is of use: it cannot be put out, and no epoch without it may count already.
    pub(super) fn wants_back(&self, member: MemberId) -> bool {
        self.outage.is_some()
            && self.change.is_none()
            && !self.authority.is_storing()
            && matches!(self.replicas.get(member).role, Role::Member(Seat::Failing))
    }

    pub(super) fn advance_outage(&mut self) -> bool {
        if !matches!(self.phase, Phase::Running) || !self.serves() {
            return false;
        }
        let too_few = !self.replicas.are_enough(self.replicas.serving());
        match (&self.outage, too_few) {
            (None, false) => false,
            (None, true) => {
                self.desk.log("too few replicas are left: requests wait".into());
                self.outage = Some(Outage::default());
                true
            }
            (Some(_), false) => {
                self.outage = None;
                true
            }
            (Some(_), true) => self.examine_returned() || self.end_outage(),
        }
    }

    /// Looks at whoever is back.
    fn examine_returned(&mut self) -> bool {
        if self.change.is_some() || self.authority.is_storing() {
            // An epoch without them may count already.
            return false;
        }
        let back = self.replicas.linked(self.replicas.failing());
        let Some(outage) = self.outage.as_ref() else { return false };
        let unknown = back.minus(outage.ready).iter().find(|m| self.replicas.get(*m).state.is_some());
        let Some(member) = unknown else { return false };
        let (asked, settled) = (outage.asked.has(member), self.settle_chain(member));
        match settled {
            Some(control) if !asked => {
                self.desk.ask(member, ControlFor::Finish, control);
                self.replicas.get_mut(member).state = None;
                self.mark_asked(member);
            }
            Some(_) => self.lose(member, "it does not settle a chain operation"),
            None if self.is_fit(member) => {
                if let Some(outage) = self.outage.as_mut() {
                    outage.ready = outage.ready.with(member);
                }
            }
            None if self.is_behind(member) => self.lose(
                member,
                "its directory is an older copy of what it was: stop the volume and start it again, and it is filled",
            ),
            None => self.lose(member, "it is no longer what it was"),
        }
        true
    }

    fn mark_asked(&mut self, member: MemberId) {
        if let Some(outage) = self.outage.as_mut() {
            outage.asked = outage.asked.with(member);
        }
    }

    /// What a returned member has to do about a chain operation that it holds prepared: what was decided is carried
    /// out; what is not decided yet stays; all else is taken back.
    fn settle_chain(&self, member: MemberId) -> Option<Control> {
        let state = self.replicas.state(member)?;
        let undecided = self.chain.undecided();
        unfinished(state, |id| self.chain.is_decided(id))
            .filter(|_| state.prepared.as_ref().is_none_or(|(id, _)| undecided != Some(*id)))
    }

    fn is_behind(&self, member: MemberId) -> bool {
        let recorded = self.replicas.state(member).and_then(|state| state.epoch.as_ref());
        recorded.zip(self.again()).is_some_and(|(recorded, now)| recorded.is_behind(&now))
    }

    /// It is the member that was lost, and not an older copy of its directory.
    fn is_fit(&self, member: MemberId) -> bool {
        let Some(state) = self.replicas.state(member) else { return false };
        let known = lh_wire::ReplicaState {
            size: self.chain.volume.size,
            chain: self.chain.volume.chain.to_vec(),
            ..lh_wire::ReplicaState::default()
        };
        let counted = self.epochs.order();
        let recorded = state.epoch.as_ref().map(lh_block::Epoch::order);
        !state.rebuilding
            && !state.imported
            && recorded >= counted
            && !self.is_behind(member)
            && self.have_same_shape(state, &known)
    }

    fn is_in_another_round(&self, member: MemberId) -> bool {
        let recorded = self.replicas.state(member).and_then(|state| state.epoch.as_ref());
        recorded.is_some_and(|epoch| epoch.round != Some(self.rounds.present()))
    }

    /// Goes on once all are back, or enough and the others had their time.
    fn end_outage(&mut self) -> bool {
        let failing = self.replicas.failing();
        let Some(outage) = self.outage.as_mut() else { return false };
        let ready = outage.ready.and(failing);
        let still_away = failing.minus(ready);
        // Whoever is being looked at may be the one that has everything, and is lost itself if that takes too long.
        let answering = !self.replicas.linked(still_away).is_empty();
        let changing = self.change.is_some() || self.authority.is_storing();
        if !self.replicas.are_enough(self.replicas.serving().or(ready)) || changing {
            return false;
        }
        let now = self.desk.now;
        let since = self.outage.as_mut().map_or(now, |o| *o.since.get_or_insert(now));
        let over = now >= since.saturating_add(self.desk.limits.grace_ns);
        if answering || !(still_away.is_empty() || over) {
            return false;
        }
        self.outage = None;
        self.readmit(ready);
        true
    }

    fn readmit(&mut self, returned: MemberSet) {
        let dead = self.dead_of(returned);
        let together = self.replicas.serving().or(returned);
        if together == dead.all && !sabotaged!(self, joiner_outlives_members) {
            // Each may have lost what a joiner has from it, and nobody makes that one equal to what they agree on.
            for joiner in self.replicas.attached_joiners().iter() {
                self.lose(joiner, "it may have what the members have lost");
            }
        }
        self.put_in_doubt(dead, together);
        let mut attached = Vec::new();
        for member in returned.iter() {
            attached.push(self.desk.switch(Switch::Attach { member }));
            self.desk.switch(Switch::Promote { member });
            let unsettled = self.replicas.get(member).state.as_ref().map(|s| s.unsettled.clone());
            self.chain.volume.note_unsettled(&unsettled.unwrap_or_default());
            let replica = self.replicas.get_mut(member);
            replica.attached = true;
            replica.role = Role::Member(Seat::Serving);
            self.fold_what_was_missed(member);
        }
        if returned.iter().any(|m| self.is_in_another_round(m)) {
            // It records the present one with the next epoch, before another round is asked for. If its program is one from before rounds,
            // that leaves the one that its directory has, which is not to be believed once the program is exchanged again, and records the
            // next epoch without.
            self.epochs.loosen();
        }
        self.desk.log(format!("requests go on with {}", self.replicas.names_of(together).join(", ")));
        self.tell_resolved_after(attached);
    }

    pub(super) fn outage_deadline(&self) -> Option<u64> {
        let since = self.outage.as_ref()?.since?;
        Some(since.saturating_add(self.desk.limits.grace_ns)).filter(|at| *at > self.desk.now)
    }
}
