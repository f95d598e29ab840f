//! From nothing to the first answer (`docs/invariants.md`, 4, 9, 12).
//!
//! Whatever happens to a chosen replica before the volume opens, the start begins again with what is left: nothing was
//! answered yet, so nothing can be lost by it. One that comes back each time, and can do what is asked of it no better, would keep it from
//! its end for ever: after some attempts the start goes on without it, if it can be spared.

use lh_block::{Epoch, EpochOrder};
use lh_wire::ReplicaState;

use super::chain::unfinished;
use super::choose::{Candidate, Choice, Start, choose};
use super::{Conductor, ControlFor, Opening, Output, Phase, Quorum, Role, Seat, sabotaged};
use crate::message::{MemberId, MemberSet, Switch, SwitchId};

/// So many starts that begin again because one replica is lost are enough.
const SPOILS_MAX: u32 = 3;

impl Conductor {
    pub(super) fn advance_start(&mut self) -> bool {
        match &self.phase {
            Phase::Collecting { .. } => self.collect(),
            Phase::Finishing { asked } => self.finish_chain(*asked),
            Phase::Recording => self.change.is_none() && self.begin_attaching(),
            Phase::Attaching(switches) => self.desk.switches.all_done(switches) && self.begin_repairing(),
            Phase::Repairing(_) => self.advance_in_doubt(),
            Phase::Running | Phase::Stopped => false,
        }
    }

    fn collect(&mut self) -> bool {
        // What a start before this one left on its way could still change what is chosen now.
        if self.authority.is_storing() || !self.desk.jobs.no_copies() || self.replicas.is_closing_links() {
            return false;
        }
        match self.choose() {
            Choice::Wait(why) => {
                self.waiting_for = Some(why);
                self.phase = Phase::Collecting { since: None };
                // It may have been asked before the engine before stored what replicas know of by now.
                if self.authority.epoch().is_some() {
                    self.ask_authority_again();
                }
                false
            }
            Choice::Start(start) => {
                let since = self.possible_since();
                let over = self.desk.now >= since.saturating_add(self.desk.limits.grace_ns);
                if !(start.complete || over && !self.replicas.is_answering(start.base.as_ref())) {
                    self.waiting_for = Some("further replicas may still come".into());
                    return false;
                }
                if !self.ask_authority_again() {
                    return false;
                }
                self.begin(start);
                true
            }
        }
    }

    /// Asks the authority once more if a replica was fenced since it was asked, and does not wait for the answer: true if it has
    /// told what counts since the last one was ([`super::authority`]).
    fn ask_authority_again(&mut self) -> bool {
        if self.authority.ask_again() {
            self.desk.emit(Output::LoadEpoch);
        }
        self.authority.is_current()
    }

    /// An older engine had an epoch on its way to the authority while it was fenced off. It counts, and is started from. What
    /// this engine has told its replicas to record names members that this epoch does not have, and has ended what was kept
    /// for them: they are compared wholly.
    pub(super) fn begin_again_from(&mut self, current: Epoch) {
        self.desk
            .log(format!("the engine before has stored epoch {}.{}", current.generation, current.counter));
        for member in self
            .replicas
            .configured()
            .iter()
            .filter(|m| !current.has(self.replicas.name(*m)))
            .collect::<Vec<_>>()
        {
            self.replicas.get_mut(member).thorough = true;
        }
        self.authority.found(current);
        self.begin_again();
    }

    fn choose(&self) -> Choice {
        if let Some(why) = self.waits_for_learner() {
            return Choice::Wait(why);
        }
        let asked = if sabotaged!(self, learner_unheard) {
            self.replicas.counted()
        } else {
            self.replicas.configured()
        };
        let candidates: Vec<Candidate<'_>> = asked
            .iter()
            .map(|id| {
                let replica = self.replicas.get(id);
                let (name, counts) = (replica.name.as_str(), !replica.learner);
                Candidate { id, name, counts, state: replica.state.as_deref() }
            })
            .collect();
        let (quorum, own) = (self.config.quorum, self.config.generation);
        let choice = choose(quorum, own, self.authority.known(), self.replicas.members_min(), &candidates);
        // Number 0 never counted: nothing was answered by it.
        let before = self.epochs.started_from().filter(|(_, counter)| *counter > 0);
        match (choice, before) {
            (Choice::Start(Start { base: None, .. }), Some(before)) => {
                Choice::Wait(self.were_emptied(before))
            }
            (Choice::Start(start), _) => {
                let unfenced = start.unfenced || self.is_learner_unfenced();
                Choice::Start(Start { unfenced, ..start })
            }
            (wait @ Choice::Wait(_), _) => wait,
        }
    }

    /// This engine has begun a start from an epoch: the volume has data, and does not begin anew where no replica tells of that any more.
    fn were_emptied(&self, (generation, counter): EpochOrder) -> String {
        format!(
            "the replicas have no record of the volume any more, but had epoch {generation}.{counter} when this start began: they were \
             emptied meanwhile. Bring back what they held, and if that is one replica alone, begin with it: \
             `longhornctl salvage {} --replica NAME`",
            self.config.volume
        )
    }

    /// Where those that count have no record of the volume, one that learns may have: it was a member, which nobody has noted, and they were
    /// emptied since.
    fn waits_for_learner(&self) -> Option<String> {
        if self.config.quorum != Quorum::Majority {
            return None;
        }
        let (volume, state) = (&self.config.volume, |m: MemberId| self.replicas.state(m));
        if !self.replicas.counted().iter().all(|m| state(m).is_some_and(|s| s.epoch.is_none())) {
            return None;
        }
        let tells = |s: &ReplicaState| s.epoch.as_ref().is_some_and(|e| e.counter > 0);
        let may_be_member = |m: &MemberId| self.replicas.get(*m).noted_learner && state(*m).is_none_or(tells);
        let learner = self.replicas.configured().minus(self.replicas.counted()).iter().find(may_be_member)?;
        let name = self.replicas.name(learner);
        Some(match state(learner) {
            None => format!("no replica that is here has a record of the volume, and {name} may have one"),
            Some(_) => format!(
                "replica {name} alone has a record of the volume, and nobody noted that it holds everything: `longhornctl salvage {volume} \
                 --replica {name}` begins with it"
            ),
        })
    }

    /// Nothing is decided with a learner. But it may have been a member, which nobody has noted, and be read from by an engine before.
    fn is_learner_unfenced(&self) -> bool {
        let learners = self.replicas.configured().minus(self.replicas.counted());
        learners.iter().any(|m| self.replicas.get(m).state.is_none()) && !sabotaged!(self, learner_unheard)
    }

    fn possible_since(&mut self) -> u64 {
        let now = self.desk.now;
        match &mut self.phase {
            Phase::Collecting { since } => *since.get_or_insert(now),
            _ => now,
        }
    }

    fn begin(&mut self, start: Start) {
        self.waiting_for = None;
        if start.unfenced && !self.config.known_dead {
            self.lease_until = self.lease_until.max(self.desk.now.saturating_add(self.desk.limits.lease_ns));
        }
        let members = self.without_spoilers(start.members);
        self.desk.log(format!("starting with {}", self.replicas.names_of(members).join(", ")));
        if let (Some(base), Some(stored)) = (&start.base, self.authority.epoch())
            && base.order() > stored.order()
        {
            self.desk.log(format!(
                "the authority was put back: it has epoch {}.{}, and {}.{} is younger than one that counted",
                stored.generation, stored.counter, base.generation, base.counter
            ));
        }
        self.epochs.start_from(start.base, start.recorded);
        let told = members.iter().filter_map(|m| self.replicas.state(m)?.epoch.as_ref()?.round).max();
        self.rounds.go_on_from(told);
        for member in members.iter() {
            self.replicas.get_mut(member).role = Role::Member(Seat::Serving);
        }
        // Left from a start before this one, and not chosen again.
        for member in self.replicas.select(|r| r.attached && matches!(r.role, Role::Out)).iter() {
            self.lose(member, "it is not chosen");
        }
        self.phase = Phase::Finishing { asked: MemberSet::EMPTY };
    }

    /// Of the chosen, those who let the start come to its end; and of the others whoever it cannot do without: too few would be left, or
    /// nobody who has what was answered.
    fn without_spoilers(&mut self, chosen: MemberSet) -> MemberSet {
        let mut members = chosen;
        let mut spoilers: Vec<_> =
            chosen.iter().filter(|m| self.replicas.get(*m).spoilt >= SPOILS_MAX).collect();
        spoilers.sort_by_key(|m| std::cmp::Reverse(self.replicas.get(*m).spoilt));
        for member in spoilers {
            let enough = self.replicas.are_enough(members.without(member));
            if enough && !self.best_of(members, self.dead_of(members)).without(member).is_empty() {
                let (name, times) = (self.replicas.name(member), self.replicas.get(member).spoilt);
                self.desk.log(format!(
                    "the start goes on without replica {name}, which was lost in {times} attempts"
                ));
                members = members.without(member);
            }
        }
        members
    }

    /// Chain operations of engines before: carried out everywhere if any member has, taken back else.
    fn finish_chain(&mut self, asked: MemberSet) -> bool {
        let members = self.replicas.members();
        if !members.iter().all(|m| self.replicas.get(m).state.is_some()) {
            return false;
        }
        let Some((member, control)) = members.iter().find_map(|m| Some((m, self.to_finish(m)?))) else {
            return self.compare_shapes();
        };
        if asked.has(member) {
            self.lose(member, "it does not settle a chain operation");
            return true;
        }
        self.replicas.get_mut(member).state = None;
        self.desk.ask(member, ControlFor::Finish, control);
        self.phase = Phase::Finishing { asked: asked.with(member) };
        true
    }

    fn to_finish(&self, member: MemberId) -> Option<lh_wire::Control> {
        let state = self.replicas.state(member)?;
        let members = self.replicas.members();
        unfinished(state, |id| {
            let known =
                |m: MemberId| self.replicas.get(m).state.as_ref().is_some_and(|s| s.committed == Some(id));
            let carried_out = members.iter().any(known) && !sabotaged!(self, undo_decided);
            self.chain.is_decided(id) || carried_out
        })
    }

    /// Members that do not hold the same snapshots as most of the others are no members: they are rebuilt.
    fn compare_shapes(&mut self) -> bool {
        let members = self.replicas.members();
        let Some(model) =
            members.iter().max_by_key(|m| self.likeness(*m)).and_then(|m| self.replicas.get(m).state.clone())
        else {
            return false;
        };
        for member in members.iter() {
            let alike =
                self.replicas.get(member).state.as_ref().is_some_and(|s| self.have_same_shape(s, &model));
            if !alike && !sabotaged!(self, undo_decided) {
                self.desk.log(format!(
                    "replica {} holds other snapshots than the rest",
                    self.replicas.name(member)
                ));
                let replica = self.replicas.get_mut(member);
                replica.role = Role::Out;
                replica.last_error = Some("it holds other snapshots than the rest".into());
                if replica.attached {
                    self.lose(member, "it holds other snapshots than the rest");
                }
            }
        }
        self.take_volume(&model);
        self.begin_first_change();
        true
    }

    /// How many hold the same as this one; who lived on counts more. A learner is no model for who decides.
    fn likeness(&self, member: MemberId) -> (bool, usize, bool) {
        let Some(own) = self.replicas.state(member) else { return (false, 0, false) };
        let like =
            |m: &MemberId| self.replicas.get(*m).state.as_ref().is_some_and(|s| self.have_same_shape(s, own));
        (self.replicas.counted().has(member), self.replicas.members().iter().filter(like).count(), own.lived)
    }

    fn take_volume(&mut self, model: &ReplicaState) {
        self.chain.volume.size = model.size;
        self.config.shared.grow(model.size);
        self.chain.volume.chain = model.chain.clone().into();
        self.chain.volume.unsettled.clear();
        let told = self.replicas.members().iter().filter_map(|m| self.replicas.get(m).state.as_ref());
        let unsettled: Vec<String> = told.flat_map(|s| s.unsettled.iter().cloned()).collect();
        self.chain.volume.note_unsettled(&unsettled);
        for name in model.chain.iter().map(|l| l.name.clone()).collect::<Vec<_>>() {
            self.layer_ref(&name);
        }
    }

    /// Every engine makes an epoch of its own before it answers, even with the members of the one before. A replica
    /// that is not here may have recorded a younger one, which did not count (a joiner records it first): against
    /// this engine's generation it never will.
    fn begin_first_change(&mut self) {
        self.phase = Phase::Recording;
        let members = self.replicas.members();
        if self.replicas.are_enough(members) {
            self.begin_change(members, MemberSet::EMPTY, MemberSet::EMPTY);
        }
    }

    fn begin_attaching(&mut self) -> bool {
        let mut switches = Vec::new();
        for member in
            self.replicas.members().iter().filter(|m| !self.replicas.get(*m).attached).collect::<Vec<_>>()
        {
            self.replicas.get_mut(member).attached = true;
            switches.push(self.desk.switch(Switch::Attach { member }));
        }
        self.phase = Phase::Attaching(switches);
        true
    }

    /// The volume opens when enough members are there and no older engine can answer reads any more.
    pub(super) fn advance_opening(&mut self) -> bool {
        match &self.opening {
            Opening::Shut => {
                let may = self.check_opening();
                if may {
                    let switches = self.unlock();
                    self.opening = Opening::Unlocking(switches);
                }
                may
            }
            Opening::Unlocking(switches) if self.desk.switches.all_done(switches) => {
                self.opening = Opening::Open;
                self.desk.log(format!("volume {} is open", self.config.volume));
                self.desk.emit(Output::Open { size: self.chain.volume.size });
                true
            }
            _ => false,
        }
    }

    /// Whether nothing stands against it any more; notes what does, for people.
    fn check_opening(&mut self) -> bool {
        if !matches!(self.phase, Phase::Running) || self.change.is_some() || self.closing.is_some() {
            return false;
        }
        if !self.replicas.are_enough(self.replicas.serving()) {
            self.waiting_for = Some("too few replicas hold the newest data".into());
            return false;
        }
        if !self.is_recorded(self.replicas.members()) {
            // A joiner was lost while its epoch was being stored: the next one leaves it out.
            return false;
        }
        if self.desk.now < self.lease_until {
            self.waiting_for = Some("an older engine may still answer reads".into());
            return false;
        }
        self.waiting_for = None;
        true
    }

    fn unlock(&mut self) -> Vec<SwitchId> {
        let mut switches = Vec::new();
        if self.chain.volume.size != self.config.size {
            switches.push(self.desk.switch(Switch::Resize { size: self.chain.volume.size }));
        }
        for member in self.replicas.serving().iter() {
            switches.push(self.desk.switch(Switch::Promote { member }));
        }
        switches.push(self.desk.switch(Switch::Resume));
        switches
    }

    /// Back to the beginning of the start.
    pub(super) fn begin_again(&mut self) {
        if matches!(self.phase, Phase::Collecting { .. } | Phase::Stopped) {
            return;
        }
        self.desk.log("the start begins again".into());
        self.phase = Phase::Collecting { since: None };
        self.drop_change();
        self.drop_doubt();
        for member in self.replicas.joining().iter() {
            self.lose(member, "the start begins again");
        }
        for member in self.replicas.members().iter() {
            self.replicas.get_mut(member).role = Role::Out;
        }
        for member in self.replicas.linked(self.replicas.configured()).iter() {
            self.ask_state(member);
        }
    }

    /// A member of the epoch has come after the start went on without it, but nothing was answered yet: with too few
    /// members the volume is held shut, and this one may be enough. It may also be the one that holds everything.
    pub(super) fn on_late_member(&mut self, member: MemberId) {
        let held = !self.serves() && !self.replicas.are_enough(self.replicas.serving());
        let counts = self.epochs.has(self.replicas.name(member));
        if held && counts {
            self.begin_again();
        }
    }

    /// Requests wait although nobody may be read from, however long: for the authority, or for a repair that makes
    /// progress. Only for replicas they do not wait for ever.
    pub(super) fn is_patient(&self) -> bool {
        match &self.phase {
            Phase::Collecting { since } => {
                self.authority.is_awaited() || self.authority.is_storing() || since.is_some()
            }
            Phase::Finishing { .. } | Phase::Recording | Phase::Attaching(_) | Phase::Repairing(_) => true,
            Phase::Running => {
                let opens = !self.is_open() && self.replicas.are_enough(self.replicas.serving());
                // With too few members nothing is repaired before enough are back.
                let repairs = !self.doubt.is_empty() && self.outage.is_none();
                opens || self.authority.is_storing() || repairs
            }
            Phase::Stopped => false,
        }
    }

    pub(super) fn start_deadline(&self) -> Option<u64> {
        match &self.phase {
            Phase::Collecting { since: Some(since) } => Some(since.saturating_add(self.desk.limits.grace_ns)),
            Phase::Running if !self.serves() => Some(self.lease_until),
            Phase::Repairing(in_doubt) => in_doubt.retry_at(),
            _ => None,
        }
        .filter(|at| *at > self.desk.now)
    }
}
