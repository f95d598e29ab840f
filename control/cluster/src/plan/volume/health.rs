//! How well a volume is: what its engine says of the replicas, which ones failed, what can be salvaged.

use std::time::Duration;

use super::draft::Draft;
use crate::api::{
    Conditions, InstanceState, Int64Text, Quorum, ReplicaMode, ReplicaSpec, Robustness, VolumeState,
};
use crate::plan::{age, age_by_other, written};

/// Without epochs at the authority those replicas are used again that failed so shortly before the last one, as Longhorn does:
/// within that time an engine that lost its node loses all of them. With the quorum `majority` the engine then judges by the
/// epochs that a majority tells (`life`). Where it cannot judge, those that failed last are used alone.
const SALVAGE_WINDOW: Duration = Duration::from_secs(60);

/// How long an engine may serve without a replica whose process does not come up, though its node answers, before that replica
/// counts as failed: nothing else would ever have another one take its place. The instance manager of a drained node is away
/// for as long as the node is cordoned.
pub(super) const LEFT_OUT: Duration = Duration::from_secs(60);

impl Draft<'_> {
    /// Notes which replicas came in sync and which failed.
    pub(super) fn follow_modes(&mut self) {
        let names: Vec<String> = self.replicas.keys().cloned().collect();
        let engine = self.engine_state();
        let serves = self.tells_modes();
        for name in names {
            let mode = if serves { self.mode(&name) } else { None };
            let state = self.replica_state(&name);
            // Of an engine whose node is silent nobody knows what it has.
            let is_needed = !self.o.volume.spec.node_id.is_empty() && engine != InstanceState::Unknown;
            let rests_as_member = engine == InstanceState::Stopped && self.is_recorded(&name);
            let is_left_out = serves && mode.is_none() && self.is_left_out(&name, state);
            let is_unmounted = self.unmounted(&name).is_some();
            // Its resource alone keeps the next engine from beginning with it.
            let lags = serves && self.o.volume.spec.quorum == Quorum::Unsafe;
            let now = self.now.clone();
            let Some(spec) = self.replicas.get_mut(&name) else { continue };
            match mode {
                Some(ReplicaMode::ReadWrite) => {
                    if spec.healthy_at.is_empty() || !spec.failed_at.is_empty() {
                        spec.healthy_at.clone_from(&now);
                        spec.last_healthy_at = now;
                    }
                    spec.failed_at.clear();
                    spec.rebuild_retry_count = 0;
                }
                Some(ReplicaMode::WriteOnly) | None if lags && !spec.healthy_at.is_empty() => fail(spec, now),
                // It is being filled: it fails again if that fails.
                Some(ReplicaMode::WriteOnly) => {}
                Some(ReplicaMode::Error) => fail(spec, now),
                None if is_unmounted => {}
                None if state == InstanceState::Error => fail(spec, now),
                None if state == InstanceState::Unknown && is_needed => fail(spec, now),
                None if is_left_out => fail(spec, now),
                // Its rebuild ended, and its engine, before anybody here saw it in sync.
                None if rests_as_member && spec.failed_at.is_empty() && spec.healthy_at.is_empty() => {
                    spec.healthy_at.clone_from(&now);
                    spec.last_healthy_at = now;
                }
                None => {}
            }
        }
    }

    /// True for a replica that the engine has served without for long, since its process does not come up.
    fn is_left_out(&mut self, name: &str, state: InstanceState) -> bool {
        // Of one that runs the engine itself says what it is, once it has taken it.
        if state == InstanceState::Running {
            return false;
        }
        let Some(served) = self.served_for() else { return false };
        let made = self.replica(name).and_then(|r| r.metadata.creation_timestamp.as_ref());
        let since = made.and_then(|made| age_by_other(&written(made.0), self.o.now));
        let waited = served.min(since.unwrap_or(Duration::MAX));
        let left = LEFT_OUT.checked_sub(waited).filter(|left| !left.is_zero());
        if let Some(left) = left {
            self.look_again(left);
        }
        left.is_none()
    }

    /// True for a member of the epoch that counts, where there is one.
    pub(super) fn is_recorded(&self, name: &str) -> bool {
        self.status.epoch.is_some() && self.is_member(name)
    }

    /// Uses failed replicas again where all that count failed and some can serve: the members of the epoch that counts, of
    /// which a start needs one; without epochs, those that failed last.
    pub(super) fn salvage(&mut self) {
        let is_blank = self.is_blank();
        let may_count = |(name, spec): &(&String, &ReplicaSpec)| match &self.status.epoch {
            Some(_) => self.is_member(name),
            None => is_blank || !spec.healthy_at.is_empty(),
        };
        let mut counting = self.replicas.iter().filter(may_count).peekable();
        let all_failed = counting.peek().is_some() && counting.all(|(_, r)| !r.failed_at.is_empty());
        if !all_failed || !self.o.settings.auto_salvage() || self.engine_state() == InstanceState::Running {
            return;
        }
        let counting = self.replicas.iter().filter(may_count);
        let newest = counting.filter_map(|(_, r)| age(&r.failed_at, self.o.now)).min();
        let newest = newest.unwrap_or_default();
        if self.status.epoch.is_none() && self.was_outlived(newest) {
            return;
        }
        let usable: Vec<String> = self
            .replicas
            .iter()
            .filter(may_count)
            .filter(|(name, spec)| {
                let can_run =
                    !matches!(self.replica_state(name), InstanceState::Error | InstanceState::Unknown);
                let is_judged = is_blank || self.tells_epochs(name);
                let window = if is_judged { SALVAGE_WINDOW } else { Duration::ZERO };
                let failed = age(&spec.failed_at, self.o.now);
                can_run && (self.status.epoch.is_some() || failed.is_some_and(|a| a <= newest + window))
            })
            .map(|(name, _)| name.clone())
            .collect();
        if usable.is_empty() {
            return;
        }
        for name in &usable {
            if let Some(spec) = self.replicas.get_mut(name) {
                spec.failed_at.clear();
            }
        }
        self.status.last_auto_salvaged_at.clone_from(&self.now);
        let names = usable.join(", ");
        self.tell(false, "Salvaged", format!("all replicas had failed; these are used again: {names}"));
    }

    /// True if one that is being deleted held everything when the last of those that stay had failed, so long ago: they may lack what it
    /// has, which is kept until one of them holds everything (`crate::plan::replica::fate`), and would go if they were used again.
    fn was_outlived(&self, failed: Duration) -> bool {
        self.o.replicas.iter().any(|r| {
            let deleted = r.metadata.deletion_timestamp.as_ref();
            let deleted = deleted.and_then(|at| age_by_other(&written(at.0), self.o.now));
            let was_sound = !r.spec.healthy_at.is_empty() && r.spec.failed_at.is_empty();
            was_sound && deleted.is_some_and(|deleted| deleted < failed)
        })
    }

    /// Sets robustness and what follows from it.
    pub(super) fn judge(&mut self) {
        let wanted = self.wanted();
        let residents = self.residents();
        let in_sync = residents.iter().filter(|r| r.healthy && !r.failed).count();
        let all_failed = !residents.is_empty() && residents.iter().all(|r| r.failed);
        let old = self.status.robustness;
        if let Some(told) = self.o.engine.and_then(|e| e.status.as_ref()).filter(|s| !s.snapshots.is_empty())
        {
            let sizes = told.snapshots.values().filter_map(|layer| layer.size.parse::<i64>().ok());
            self.status.actual_size = sizes.fold(0, i64::saturating_add);
        }
        let silent = self.engine_state() == InstanceState::Unknown;
        self.status.robustness = match self.status.state {
            VolumeState::Attached if silent => Robustness::Unknown,
            VolumeState::Attached if in_sync >= wanted => Robustness::Healthy,
            VolumeState::Attached if in_sync > 0 => Robustness::Degraded,
            VolumeState::Attached => Robustness::Faulted,
            _ if all_failed => Robustness::Faulted,
            _ => Robustness::Unknown,
        };
        match self.status.robustness {
            Robustness::Degraded | Robustness::Faulted => {
                if self.status.last_degraded_at.is_empty() {
                    self.status.last_degraded_at.clone_from(&self.now);
                }
            }
            Robustness::Healthy => self.status.last_degraded_at.clear(),
            Robustness::Unknown => {}
        }
        if old == self.status.robustness {
            return;
        }
        match self.status.robustness {
            Robustness::Degraded => {
                let message = format!("{in_sync} of {wanted} replicas hold the data");
                self.tell(true, "Degraded", message);
            }
            Robustness::Faulted => {
                let message = "no replica can serve the volume: look at the replicas' conditions".to_owned();
                self.tell(true, "Faulted", message);
            }
            // Of one that was attached a moment ago it is what anybody expects.
            Robustness::Healthy if old != Robustness::Unknown => {
                self.tell(false, "Healthy", format!("{in_sync} replicas hold the data"));
            }
            Robustness::Healthy | Robustness::Unknown => {}
        }
    }

    /// Makes engine and replicas as large as the volume should be. A volume that rests grows when it is attached next:
    /// its engine does it, on all replicas at once.
    pub(super) fn resize(&mut self) {
        let size = self.o.volume.spec.size;
        if let Some(engine) = &mut self.engine
            && engine.volume_size < size
        {
            engine.volume_size = size;
        }
        for replica in self.replicas.values_mut().filter(|r| r.volume_size < size) {
            replica.volume_size = size;
        }
        let current =
            self.o.engine.and_then(|e| e.status.as_ref()).map(|s| s.current_size).unwrap_or_default();
        self.status.expansion_required = current > Int64Text(0) && current < size;
        let failure = self.o.engine.and_then(|e| e.status.as_ref()).map(|s| s.last_expansion_error.as_str());
        let failure = failure.unwrap_or_default().to_owned();
        let is_known = self.status.conditions.get_condition("Expansion").is_some();
        if self.status.expansion_required {
            let (reason, message) = if failure.is_empty() {
                ("Pending", format!("the engine serves {current} bytes yet"))
            } else {
                ("Failed", failure)
            };
            let now = self.now.clone();
            self.status.conditions.set_condition("Expansion", false, reason, &message, &now);
        } else if is_known {
            let now = self.now.clone();
            self.status.conditions.set_condition("Expansion", true, "", "", &now);
        }
    }
}

fn fail(spec: &mut crate::api::ReplicaSpec, now: String) {
    if spec.failed_at.is_empty() {
        spec.failed_at.clone_from(&now);
        spec.last_failed_at = now;
    }
}
