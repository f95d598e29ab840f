//! A volume that rests and lacks replicas: attached for the time of its rebuild, where one of its replicas is, unless anybody
//! else wants it.
//!
//! ```text
//!                     a replica failed, is away or missing
//! rests, no condition --------------------------------------> waits: the condition is False and says for what
//!    ^  ^                                                       |            ^
//!    |  | somebody wants it                                     | a replica  | nothing moves any more: paused
//!    |  |                                                       v  can be    |
//!    |  +------------------------------------------------ attached: the condition is True, our ticket is there
//!    |                                                          |  filled
//!    +----------------------------------------------------------+ all replicas hold everything
//! ```
//!
//! It is attached only for a replica that can be filled: what cannot be helped is said, and no engine starts for it. What is
//! done while it is attached is what is done for every attached volume (`replicas`).

use std::time::Duration;

use super::at_rest::{Course, GAVE_UP, Wait, left};
use super::draft::Draft;
use super::{Action, FILLS_ON, Wish};
use crate::api::{Conditions, DataLocality, ReplicaSpec, Robustness, TicketType, Toggle};
use crate::plan::attachment::DISABLE_FRONTEND;
use crate::plan::{age, written};
use crate::schedule::{Failed, Replenish, replenish};

/// The condition: True while the volume is attached to be rebuilt, False with what that waits for while it rests and lacks
/// replicas.
pub const OFFLINE_REBUILDING: &str = "OfflineRebuilding";

/// How long a volume rests before it is attached to be rebuilt: a pod that goes to another node leaves it for a moment only.
const SETTLED: Duration = Duration::from_secs(15);

/// A rebuild that came to nothing is tried again after as long as the volume has been degraded, within these bounds: later and
/// later.
const PAUSE: (Duration, Duration) = (Duration::from_secs(600), Duration::from_secs(3600));

/// What to do.
enum Step {
    /// Nothing is to be said, and no ticket of ours to be there.
    Leave,
    /// The same; somebody else wants the volume.
    Yield(String),
    /// Everything stays as it is.
    Stay,
    /// It came to nothing, and the ticket is still there, for all that is known here.
    Drop,
    /// Not now.
    Wait(Wait),
    /// It is attached on this node, to fill a replica on that one.
    Begin(String, String),
    /// It is attached, or is being attached.
    GoOn,
    /// Nothing is lacking any more.
    Done,
    /// It was attached, and nothing moves.
    GiveUp(String),
}

impl Draft<'_> {
    /// Has a volume that rests and lacks replicas attached for their rebuild, if it wants that.
    pub(super) fn rebuild_at_rest(&mut self) {
        let asked = self.has_ticket(TicketType::VolumeRebuilding);
        let step = match self.forbids_rebuild() {
            Some(step) => step,
            None if asked => self.rebuild_goes_on(),
            None => self.rebuild_begins(),
        };
        if asked && matches!(step, Step::Leave | Step::Yield(_) | Step::Drop | Step::Done | Step::GiveUp(_)) {
            self.actions.push(Action::Ticket(TicketType::VolumeRebuilding, None));
        }
        let was_on = self.status.conditions.holds(OFFLINE_REBUILDING);
        match step {
            Step::Stay | Step::Drop => {}
            Step::Leave => self.forget_rebuild(),
            Step::Yield(who) => {
                self.forget_rebuild();
                if was_on {
                    self.tell(false, "OfflineRebuildingInterrupted", who);
                }
            }
            Step::Done => {
                self.forget_rebuild();
                let message = "all replicas hold the data: the volume is detached again".to_owned();
                if was_on {
                    self.tell(false, "OfflineRebuilt", message);
                }
            }
            Step::Wait(Wait(reason, message)) => self.say_rebuild(false, reason, &message),
            Step::GiveUp(why) => {
                self.say_rebuild(false, GAVE_UP, &why);
                self.tell(true, "OfflineRebuildingFailed", why);
            }
            Step::GoOn => self.say_rebuild(true, "", "the volume is attached to be rebuilt"),
            Step::Begin(node, fills) => self.begin_rebuild(node, fills),
        }
    }

    fn say_rebuild(&mut self, on: bool, reason: &str, message: &str) {
        let now = self.now.clone();
        self.status.conditions.set_condition(OFFLINE_REBUILDING, on, reason, message, &now);
    }

    fn forget_rebuild(&mut self) {
        self.status.conditions.retain(|c| c.kind != OFFLINE_REBUILDING);
    }

    fn begin_rebuild(&mut self, node: String, fills: String) {
        self.mark_away();
        self.say_rebuild(true, "", "the volume is attached to be rebuilt");
        let message = format!("the volume is attached to node {node} to fill a replica on node {fills}");
        self.tell(false, "OfflineRebuilding", message);
        let parameters =
            [(DISABLE_FRONTEND.to_owned(), true.to_string()), (FILLS_ON.to_owned(), fills)].into();
        let wish = Wish { node, parameters };
        self.actions.push(Action::Ticket(TicketType::VolumeRebuilding, Some(wish)));
    }

    /// What keeps any volume from being rebuilt at rest; `None`: nothing.
    fn forbids_rebuild(&self) -> Option<Step> {
        let spec = &self.o.volume.spec;
        let wants = match spec.offline_rebuilding {
            Toggle::Ignored => self.o.settings.offline_rebuilding(),
            Toggle::Enabled => true,
            Toggle::Disabled => false,
        };
        if !wants || self.locality() == DataLocality::StrictLocal || self.is_new() || self.migrates() {
            return Some(Step::Leave);
        }
        let tickets = self.o.attachment.iter().flat_map(|a| a.spec.attachment_tickets.values());
        let mut others = tickets.filter(|t| t.kind != TicketType::VolumeRebuilding && !t.node_id.is_empty());
        let other = others.next()?;
        Some(Step::Yield(format!("{} wants the volume on node {}", other.kind, other.node_id)))
    }

    /// Under our ticket.
    fn rebuild_goes_on(&mut self) -> Step {
        if let Some(node) = self.should_leave() {
            return Step::Yield(format!(
                "node {node} is cordoned: the rebuild goes on from another node, so that this one can be drained"
            ));
        }
        let condition = self.status.conditions.get_condition(OFFLINE_REBUILDING);
        let is_whole = self.is_attached() && self.in_sync() >= self.wanted();
        if is_whole && self.is_written() && self.replicas.len() <= self.wanted() {
            return Step::Done;
        }
        if condition.is_some_and(|c| c.reason == GAVE_UP) {
            return Step::Drop;
        }
        let begun = condition.filter(|c| c.is_true());
        let Some(since) = begun.and_then(|c| age(&c.last_transition_time, self.o.now)) else {
            // The ticket was written and this was not, or the ticket is gone and that was not read yet.
            let lacks = self.holding().len() < self.wanted();
            return if lacks { Step::GoOn } else { Step::Leave };
        };
        match self.course(since, "be rebuilt") {
            Course::GoesOn => Step::GoOn,
            Course::Unattached(why) => Step::GiveUp(why),
            Course::Still if is_whole => Step::Done,
            Course::Still => Step::GiveUp(self.stuck()),
        }
    }

    /// The node that the volume is attached to, if that is cordoned and it can be rebuilt from another one: an engine keeps its node
    /// from being drained, and a rebuild may take hours.
    fn should_leave(&self) -> Option<String> {
        let is_cordoned = |node: &str| self.o.cluster.nodes.get(node).is_some_and(|n| n.cordoned);
        let tickets = self.o.attachment.iter().flat_map(|a| a.spec.attachment_tickets.values());
        let node = tickets.filter(|t| t.kind == TicketType::VolumeRebuilding).map(|t| &t.node_id).next()?;
        let others = self.holding().iter().any(|r| !is_cordoned(&r.node_id));
        (is_cordoned(node) && others).then(|| node.clone())
    }

    /// Without our ticket.
    fn rebuild_begins(&mut self) -> Step {
        if !self.rests() {
            return Step::Stay;
        }
        let holding = self.holding();
        // One that is faulted has none that count, or all failed.
        if holding.len() >= self.wanted() || self.status.robustness == Robustness::Faulted {
            return Step::Leave;
        }
        let is_cordoned = |node: &str| self.o.cluster.nodes.get(node).is_some_and(|n| n.cordoned);
        let rank =
            |r: &ReplicaSpec| (is_cordoned(&r.node_id), !self.is_open(&r.node_id), r.eviction_requested);
        let source = holding.iter().min_by_key(|r| rank(r));
        let source = source.map(|r| r.node_id.clone());
        if let Some(step) = self.keeps_resting() {
            return step;
        }
        let Some(source) = source else {
            let why = "no node that answers has a replica that holds the data";
            return Step::Wait(Wait("NoSource", why.to_owned()));
        };
        match self.choose_rebuild() {
            Ok(fills) => Step::Begin(source, fills),
            Err(wait) => Step::Wait(wait),
        }
    }

    /// Replicas that hold everything and whose nodes answer.
    fn holding(&self) -> Vec<&ReplicaSpec> {
        let counts = |(name, spec): &(&String, &ReplicaSpec)| self.holds(name, spec) && self.is_near(spec);
        self.replicas.iter().filter(counts).map(|(_, spec)| spec).collect()
    }

    /// Why it is too early to begin; `None`: it is not.
    fn keeps_resting(&mut self) -> Option<Step> {
        if self.status.expansion_required {
            let why = "the volume grows when it is attached next, and is rebuilt then".to_owned();
            return Some(Step::Wait(Wait("Expanding", why)));
        }
        let settling = || Step::Wait(Wait("Settling", "the volume may be wanted again at once".to_owned()));
        let known = self.status.conditions.get_condition(OFFLINE_REBUILDING).filter(|c| !c.is_true());
        let Some(known) = known else {
            self.look_again(SETTLED);
            return Some(settling());
        };
        let since = age(&known.last_transition_time, self.o.now).unwrap_or_default();
        let gave_up = known.reason == GAVE_UP;
        let degraded = age(&self.status.last_degraded_at, self.o.now).unwrap_or_default();
        let pause = if gave_up { degraded.saturating_sub(since).clamp(PAUSE.0, PAUSE.1) } else { SETTLED };
        let left = left(pause, since)?;
        self.look_again(left);
        Some(if gave_up { Step::Stay } else { settling() })
    }

    /// The node on which a replica is to be filled.
    fn choose_rebuild(&mut self) -> Result<String, Wait> {
        self.may_fill()?;
        let lacking = || {
            let left = self.replicas.iter().filter(|(_, spec)| !spec.eviction_requested);
            left.filter(|(name, spec)| !self.holds(name, spec) || !self.is_near(spec))
        };
        let back = lacking().filter(|(name, spec)| self.can_run(name, spec));
        let back: Vec<String> = back.map(|(_, spec)| spec.node_id.clone()).collect();
        if !back.is_empty() {
            return self.fill_back(&back);
        }
        let failed: Vec<Failed<'_>> = lacking()
            .map(|(name, spec)| Failed { name, since: self.away_for(spec), usable: false })
            .collect();
        let is_missing = self.wanted() > self.replicas.len();
        if let Replenish::Wait(left) = replenish(&failed, self.o.settings.replenishment_wait())
            && !is_missing
        {
            let names: Vec<&str> = failed.iter().map(|f| f.name).collect();
            let why = format!(
                "replicas that failed may come back (replica-replenishment-wait-interval): {}",
                names.join(", ")
            );
            self.look_again(left);
            return Err(Wait("MayComeBack", why));
        }
        self.fill_new()
    }

    /// True for a replica that holds everything, of a volume that is in nobody's use.
    fn holds(&self, name: &str, spec: &ReplicaSpec) -> bool {
        // Without epochs (quorum `unsafe`) one that was never filled has failed no more than the others.
        let was_filled = self.status.epoch.is_some() || !spec.healthy_at.is_empty();
        was_filled && self.is_in_sync(name, spec)
    }

    fn is_open(&self, node: &str) -> bool {
        self.o.cluster.nodes.get(node).is_some_and(|n| n.schedulable)
    }

    /// For how long a replica that holds nothing, or whose node does not answer, has been of no use.
    fn away_for(&self, spec: &ReplicaSpec) -> Duration {
        if !spec.failed_at.is_empty() {
            return age(&spec.failed_at, self.o.now).unwrap_or_default();
        }
        let node = self.o.cluster.nodes.get(&spec.node_id);
        if let Some(since) = node.and_then(|n| n.silent_since) {
            return age(&written(since), self.o.now).unwrap_or_default();
        }
        // There is no such node any more: as long as is known of it.
        let known = self.status.conditions.get_condition(OFFLINE_REBUILDING).filter(|c| !c.is_true());
        known.and_then(|c| age(&c.last_transition_time, self.o.now)).unwrap_or_default()
    }

    /// Of replicas that were waited for at rest it is noted since when, so that they are not waited for once more.
    fn mark_away(&mut self) {
        let away: Vec<(String, Duration)> = self
            .replicas
            .iter()
            .filter(|(_, spec)| spec.failed_at.is_empty() && !self.is_near(spec))
            .map(|(name, spec)| (name.clone(), self.away_for(spec)))
            .collect();
        for (name, since) in away {
            let Some(spec) = self.replicas.get_mut(&name) else { continue };
            spec.failed_at = written(self.o.now - since);
            spec.last_failed_at.clone_from(&spec.failed_at);
        }
    }
}
