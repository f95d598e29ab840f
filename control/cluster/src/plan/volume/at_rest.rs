//! A volume that rests and is attached only so that a replica can be filled: which one, as it would be chosen if the volume were attached,
//! and how long that may come to nothing. Why it is attached is `offline`'s and `eviction`'s affair, each with a ticket and a condition of
//! its own.

use std::time::Duration;

use super::READY;
use super::draft::Draft;
use super::replicas::{ROOM, TURN};
use crate::api::{Conditions, InstanceState, Replica, ReplicaMode, ReplicaSpec, VolumeState};
use crate::plan::{age_by_other, written};

/// How long attaching may take.
const START_PATIENCE: Duration = Duration::from_secs(300);

/// How long nothing may move while it is attached: longer than a replica takes to start and the engine to take it.
const IDLE: Duration = Duration::from_secs(60);

/// The reason in the condition of an attachment that came to nothing.
pub(super) const GAVE_UP: &str = "GaveUp";

/// Why it is not attached now: the condition's reason, and a sentence.
pub(super) struct Wait(pub(super) &'static str, pub(super) String);

/// How it goes on after it was asked for.
pub(super) enum Course {
    /// It is being attached, or something moves, or may yet.
    GoesOn,
    /// It could not be attached: why.
    Unattached(String),
    /// It is attached, and nothing has moved for a while.
    Still,
}

impl Draft<'_> {
    /// Nobody has it, and nothing of it runs.
    pub(super) fn rests(&self) -> bool {
        self.o.volume.spec.node_id.is_empty()
            && self.status.state == VolumeState::Detached
            && matches!(self.engine_state(), InstanceState::Stopped | InstanceState::Unknown)
            && self.o.attachment.is_some()
    }

    /// Refuses where no replica is filled at all.
    pub(super) fn may_fill(&self) -> Result<(), Wait> {
        if self.o.settings.rebuilds_at_once() == 0 {
            let why = "concurrent-replica-rebuild-per-node-limit is 0".to_owned();
            return Err(Wait("NotAllowed", why));
        }
        Ok(())
    }

    /// The first of these nodes, on each of which is a replica that can be filled, that fills no others just now.
    pub(super) fn fill_back(&mut self, nodes: &[String]) -> Result<String, Wait> {
        let calm = nodes.iter().find(|node| !self.is_crowded(node)).cloned();
        calm.ok_or_else(|| self.wait_for_turn())
    }

    /// The node for one more replica.
    pub(super) fn fill_new(&mut self) -> Result<String, Wait> {
        let fill = u64::try_from(self.status.actual_size).unwrap_or_default();
        match self.place_now(fill) {
            Ok(Some(at)) => Ok(at.node),
            Ok(None) => Err(self.wait_for_turn()),
            Err(refusal) => {
                self.look_again(ROOM);
                Err(Wait("NoPlace", refusal.to_string()))
            }
        }
    }

    fn wait_for_turn(&mut self) -> Wait {
        self.look_again(TURN);
        let why = "as many replicas are being filled on the nodes as may be at once \
                   (concurrent-replica-rebuild-per-node-limit)";
        Wait("Turn", why.to_owned())
    }

    /// How an attachment does that was asked for so long ago. `purpose`: what it is to be attached for.
    pub(super) fn course(&mut self, since: Duration, purpose: &str) -> Course {
        if !self.is_attached() {
            let Some(left) = left(START_PATIENCE, since) else {
                let why = self.status.conditions.get_condition(READY).map(|c| format!(": {}", c.message));
                let why = why.unwrap_or_default();
                return Course::Unattached(format!("the volume could not be attached to {purpose}{why}"));
            };
            self.look_again(left);
            return Course::GoesOn;
        }
        let is_filling = self.replicas.keys().any(|name| self.mode(name) == Some(ReplicaMode::WriteOnly));
        let is_placed = self.replicas.keys().any(|name| self.replica(name).is_none());
        if is_filling || is_placed || !self.is_written() {
            return Course::GoesOn;
        }
        let Some(left) = left(IDLE, self.unmoved().min(since)) else { return Course::Still };
        self.look_again(left);
        Course::GoesOn
    }

    /// How many replicas hold everything, as the running engine says.
    pub(super) fn in_sync(&self) -> usize {
        self.replicas.keys().filter(|name| self.mode(name) == Some(ReplicaMode::ReadWrite)).count()
    }

    /// True if what the running engine says of them is in their resources.
    pub(super) fn is_written(&self) -> bool {
        let is_noted = |r: &Replica| r.spec.failed_at.is_empty() && !r.spec.healthy_at.is_empty();
        let in_sync = self.replicas.keys().filter(|name| self.mode(name) == Some(ReplicaMode::ReadWrite));
        in_sync.into_iter().all(|name| self.replica(name).is_some_and(is_noted))
    }

    /// How long ago a replica was made, or became something else to the engine.
    fn unmoved(&self) -> Duration {
        let made = self.o.replicas.iter().filter_map(|r| r.metadata.creation_timestamp.as_ref());
        let made = made.map(|time| written(time.0));
        let engine = self.o.engine.and_then(|e| e.status.as_ref());
        let changed = engine.into_iter().flat_map(|s| s.replica_transition_time_map.values().cloned());
        made.chain(changed).filter_map(|time| age_by_other(&time, self.o.now)).min().unwrap_or(Duration::MAX)
    }

    /// Why no replica is being filled.
    pub(super) fn stuck(&self) -> String {
        let reasons = self.o.engine.and_then(|e| e.status.as_ref()).map(|s| &s.replica_reasons);
        let said = reasons.into_iter().flatten().filter(|(name, _)| self.replicas.contains_key(*name));
        let said: Vec<String> = said.map(|(name, reason)| format!("{name}: {reason}")).collect();
        let (in_sync, wanted) = (self.in_sync(), self.wanted());
        if said.is_empty() {
            return format!("{in_sync} of {wanted} replicas hold the data, and no other is being filled");
        }
        format!("{in_sync} of {wanted} replicas hold the data; {}", said.join("; "))
    }

    /// True for a replica that an engine may find there, and fill.
    pub(super) fn can_run(&self, name: &str, spec: &ReplicaSpec) -> bool {
        self.is_near(spec) && self.replica_state(name) != InstanceState::Error
    }

    /// True for a replica whose node answers.
    pub(super) fn is_near(&self, spec: &ReplicaSpec) -> bool {
        self.o.nodes_up.contains(&spec.node_id)
    }
}

/// What is left of it; `None`: nothing.
pub(super) fn left(of: Duration, passed: Duration) -> Option<Duration> {
    of.checked_sub(passed).filter(|left| *left > Duration::ZERO)
}
