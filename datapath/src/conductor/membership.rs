//! One change of the membership at a time (`docs/invariants.md`, 1, 8, 12).
//!
//! ```text
//!  Silencing --> Joiners --> Ending --> Members --> Storing --> Enacting
//!  no queue      joiners     it counts  all who     compare-    Forget leavers,
//!  reads from    record it   for them   stay do     and-swap    Promote joiners
//!  leavers
//! ```
//!
//! Behind it, with the quorum `any`, all record that it counts.
//!
//! - Until `Storing` a change is given up when somebody who should stay fails; the next one includes that failure. An
//!   epoch that was given up may lie on some replicas: the next one is younger and replaces it.
//! - In `Storing` nothing is given up: the epoch may count already.

use lh_block::Epoch;
use lh_wire::Control;

use super::authority::Verdict;
use super::{Ballot, Conductor, ControlFor, Output, Phase, Quorum, Role, Seat, Stored, Why, sabotaged};
use crate::message::{MemberId, MemberSet, Switch, SwitchId};

/// A change on its way.
#[derive(Debug)]
pub(super) struct Change {
    number: u64,
    epoch: Epoch,
    /// Members of the new epoch.
    target: MemberSet,
    joiners: MemberSet,
    leavers: MemberSet,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Silencing,
    Joiners(Ballot),
    Ending,
    Members(Ballot),
    Storing,
    Enacting(Vec<SwitchId>),
}

impl Conductor {
    pub(super) fn advance_change(&mut self) -> bool {
        let Some(mut change) = self.change.take() else { return self.plan_change() };
        let moved = match &mut change.stage {
            Stage::Silencing => self.silenced(&change).then(|| self.begin_recording(&mut change)),
            Stage::Joiners(ballot) => self
                .record(ballot, change.joiners, change.number, &change.epoch)
                .then(|| change.stage = Stage::Ending),
            Stage::Ending => {
                self.end_rebuilds(change.joiners).then(|| change.stage = Stage::Members(Ballot::default()))
            }
            Stage::Members(ballot) => {
                let stay = change.target.minus(change.joiners);
                self.record(ballot, stay, change.number, &change.epoch)
                    .then(|| self.begin_storing(&mut change))
            }
            Stage::Storing => (!self.authority.is_storing()).then(|| self.enact(&mut change)),
            Stage::Enacting(switches) => {
                if self.desk.switches.all_done(switches) {
                    self.on_change_done(change.joiners);
                    self.tell_that_it_counts();
                    return true;
                }
                None
            }
        };
        self.change = Some(change);
        moved.is_some()
    }

    /// Begins the change that the present state calls for, if it calls for one.
    fn plan_change(&mut self) -> bool {
        if !matches!(self.phase, Phase::Running) || self.authority.is_storing() {
            return false;
        }
        let leavers = self.replicas.failing();
        let joiners = self.ready_joiners();
        let target = self.replicas.serving().or(joiners);
        let moves = !leavers.is_empty() || !joiners.is_empty();
        let due = moves || !self.is_recorded(target);
        // One that has just learnt everything is no majority without the one that it has learnt it from.
        let counted = match sabotaged!(self, learner_suffices) {
            true => target,
            false => target.and(self.replicas.counted()),
        };
        if !due || counted.len() < self.replicas.members_min() {
            return false;
        }
        self.begin_change(target, joiners, leavers);
        true
    }

    /// These are the members of the epoch that counts, and nobody holds a younger one.
    pub(super) fn is_recorded(&self, members: MemberSet) -> bool {
        self.epochs.is(&self.replicas.names_of(members))
    }

    pub(super) fn begin_change(&mut self, target: MemberSet, joiners: MemberSet, leavers: MemberSet) {
        let epoch = self.epochs.next(self.replicas.names_of(target));
        let after = epoch.after.filter(|_| !sabotaged!(self, after_unnoted));
        let epoch = Epoch { after, round: Some(self.rounds.present()), ..epoch };
        self.desk.log(format!("epoch {}.{}: {}", epoch.generation, epoch.counter, epoch.members.join(", ")));
        let stage = Stage::Silencing;
        self.change = Some(Change { number: self.attempts.next(), epoch, target, joiners, leavers, stage });
    }

    /// No queue reads from a leaver any more.
    fn silenced(&self, change: &Change) -> bool {
        change.leavers.iter().all(|m| !matches!(self.replicas.get(m).link, super::Link::Closing(_)))
    }

    fn begin_recording(&mut self, change: &mut Change) {
        self.replicas.mark_recorded(change.joiners);
        change.stage = Stage::Joiners(Ballot::default());
        if sabotaged!(self, epoch_not_durable) {
            self.record(&mut Ballot::default(), change.target, change.number, &change.epoch);
            self.end_rebuilds(change.joiners);
            self.begin_storing(change);
            self.enact(change);
        }
    }

    /// Asks for the epoch to be recorded; true once everybody in the set has.
    fn record(&mut self, ballot: &mut Ballot, of: MemberSet, number: u64, epoch: &Epoch) -> bool {
        let control = self.set_epoch(epoch.clone());
        self.poll(ballot, of, ControlFor::Epoch(number), &control);
        ballot.complete(of)
    }

    pub(super) fn set_epoch(&self, epoch: Epoch) -> Control {
        let out =
            self.replicas.names_of(self.replicas.select(|r| !matches!(r.role, Role::Vacant) && !r.unwanted));
        let out = out.into_iter().filter(|name| !epoch.has(name)).collect();
        Control::SetEpoch { epoch, out }
    }

    /// The authority has the epoch: its members note that it does, so that nobody believes an older one should the authority's be put
    /// back. Nothing waits for it: until the next epoch is made, which says as much, it is only likely.
    fn tell_that_it_counts(&mut self) {
        if self.config.quorum != Quorum::Any || sabotaged!(self, after_unnoted) {
            return;
        }
        let Some(epoch) = self.again() else { return };
        let control = self.set_epoch(epoch);
        for member in self.replicas.linked(self.replicas.serving()).iter() {
            self.desk.ask(member, ControlFor::Counts, control.clone());
        }
    }

    pub(super) fn on_epoch_recorded(&mut self, member: MemberId, number: u64) {
        let change = self.change.as_mut().filter(|c| c.number == number);
        if let Some(Stage::Joiners(ballot) | Stage::Members(ballot)) = change.map(|c| &mut c.stage) {
            ballot.says_yes(member);
        }
    }

    fn begin_storing(&mut self, change: &mut Change) {
        change.stage = Stage::Storing;
        self.authority.begin_storing(&change.epoch, self.desk.now);
    }

    /// The epoch counts: nobody waits for the leavers any more, and the joiners may be read from.
    fn enact(&mut self, change: &mut Change) {
        self.epochs.counts(&change.epoch);
        self.counters.epochs += 1;
        let mut switches = Vec::new();
        for member in change.leavers.iter() {
            if self.replicas.get(member).link.is_up() {
                self.desk.emit(Output::Disconnect { member });
            }
            let switch = self.desk.switch(Switch::Forget { member });
            self.replicas.get_mut(member).attached = false;
            self.replicas.get_mut(member).role = Role::Out;
            // It may have come back meanwhile, too late.
            self.close_link(member, switch);
            if let Some(outage) = self.outage.as_mut() {
                outage.lost(member);
            }
            switches.push(switch);
        }
        // At once, also who was lost and has come back before this epoch: none must go on without the one from which it has learnt.
        for member in change.target.iter() {
            self.replicas.get_mut(member).learner = false;
        }
        for member in change.joiners.iter() {
            if matches!(self.replicas.get(member).role, Role::Joining(_)) {
                self.replicas.get_mut(member).role = Role::Member(Seat::Serving);
                switches.push(self.desk.switch(Switch::Promote { member }));
                self.counters.rebuilds += 1;
                self.desk.log(format!("replica {} is in sync", self.replicas.name(member)));
            }
        }
        change.stage = Stage::Enacting(switches);
    }

    /// Somebody's session ended. If the new epoch was to include it and cannot count yet, it never will.
    pub(super) fn abandon_change(&mut self, member: MemberId) {
        let Some(change) = self.change.as_ref().filter(|c| c.target.has(member)) else { return };
        let begun = match &change.stage {
            Stage::Silencing => false,
            Stage::Joiners(ballot) => ballot.begun(),
            Stage::Ending | Stage::Members(_) => true,
            Stage::Storing | Stage::Enacting(_) => return,
        };
        if begun {
            self.epochs.loosen();
        }
        self.change = None;
    }

    /// The start begins again: whatever was on its way is replaced by the next epoch.
    pub(super) fn drop_change(&mut self) {
        if self.change.take().is_some() {
            self.epochs.loosen();
        }
    }

    pub(super) fn advance_store(&mut self) -> bool {
        let Some((expected, epoch)) = self.authority.due(self.desk.now) else { return false };
        self.desk.emit(Output::StoreEpoch { expected, epoch });
        true
    }

    pub(super) fn on_stored(&mut self, stored: Stored) {
        let retry_at = self.desk.now.saturating_add(self.desk.limits.retry_ns);
        match self.authority.answered(stored, self.config.generation, self.serves(), retry_at) {
            Verdict::Unasked | Verdict::Counts => {}
            Verdict::Unknown(reason) => {
                self.desk.log(format!("the authority does not store the epoch: {reason}"));
            }
            Verdict::Overtaken(current) => self.begin_again_from(current),
            Verdict::Stale(by) => self.stop(Why::Stale { by, seen: None }),
        }
    }
}
