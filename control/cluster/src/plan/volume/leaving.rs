//! Which replicas of a volume go: those of which it has one too many, and those that nobody waits for any more. One at a time.

use std::time::Duration;

use super::Action;
use super::draft::Draft;
use super::replicas::ROOM;
use crate::api::{InstanceState, Quorum, ReplicaMode, ReplicaSpec};
use crate::plan::age;
use crate::schedule::{Resident, choose_removal};

/// How long a failed replica stays where the volume does not say, in minutes: Longhorn's two days.
const STALE_MINUTES: u64 = 2880;

impl Draft<'_> {
    /// Removes replicas that Longhorn made of a directory that another one has, and leaves that (`crate::plan::replica::fate`). A manager
    /// of an older version would not: its node is one without this one's program yet.
    pub(super) fn remove_spare(&mut self) {
        let is_new =
            |node: &String| self.o.cluster.nodes.get(node).is_some_and(|n| n.programs.contains(self.o.image));
        for (name, node) in std::mem::take(&mut self.spare) {
            if !is_new(&node) {
                self.look_again(ROOM);
                continue;
            }
            let message =
                format!("replica {name} is Longhorn's second one of a directory that stays with another");
            self.tell(false, "ReplicaRemoved", message);
            self.actions.push(Action::DeleteReplica(name));
        }
    }

    /// Removes one replica that is not needed any more.
    pub(super) fn thin_out(&mut self) {
        let wanted = self.wanted();
        let residents = self.residents();
        if !self.is_attached() {
            return self.drop_unused(&residents);
        }
        let sound = residents.iter().filter(|r| r.healthy && !r.failed && !r.leaving).count();
        let settled: Vec<Resident> = residents.iter().filter(|r| !self.is_moving_in(r)).cloned().collect();
        let surplus = settled.len() > wanted && sound >= wanted;
        let victim = if let Some(empty) = self.empty_leaver(&residents) {
            Some(empty)
        } else if surplus {
            // What was begun is ended first, whatever has failed meanwhile: each majority has one in common with the next one only
            // while they differ by one replica.
            let let_go = settled.iter().find(|r| !r.healthy && self.was_let_go(&r.name));
            let choose = || choose_removal(self.o.cluster, &self.want(0), &settled);
            let_go.or_else(choose).map(|r| r.name.clone())
        } else {
            let waited_out = self.stale(&residents).or_else(|| self.keeps_out_a_successor(&residents));
            waited_out.or_else(|| self.gives_way.take().filter(|_| sound > 0))
        };
        let Some(name) = victim else { return };
        // The engine lets go of it first: one that loses it without being asked stops everything for a moment.
        if self.is_held(&name) {
            self.dropped.insert(name);
            return;
        }
        self.tell(false, "ReplicaRemoved", format!("replica {name} is not needed any more"));
        self.replicas.remove(&name);
        self.actions.push(Action::DeleteReplica(name));
    }

    /// True for one that the engine had to let go of, and has.
    fn was_let_go(&self, name: &str) -> bool {
        let is_told = self.o.engine.is_some_and(|e| e.spec.replica_address_map.contains_key(name));
        self.tells_modes() && !is_told && !self.is_held(name)
    }

    /// A replica that failed, and that keeps out the one that was made in its place: where a majority decides, an engine takes one more
    /// only if those in sync are more than half of all then. It would wait for as long as failed ones are kept.
    fn keeps_out_a_successor(&self, residents: &[Resident]) -> Option<String> {
        if self.o.volume.spec.quorum != Quorum::Majority || !self.tells_modes() {
            return None;
        }
        let staying = || residents.iter().filter(|r| !r.failed && !r.leaving);
        let runs = |r: &&Resident| self.replica_state(&r.name) == InstanceState::Running;
        // The engine takes the successor as soon as it has let go of the one that failed.
        let is_let_go = |r: &&Resident| r.failed && self.tells_epochs(&r.name) && self.was_let_go(&r.name);
        if let Some(let_go) = residents.iter().find(is_let_go).filter(|_| staying().count() >= self.wanted())
        {
            return Some(let_go.name.clone());
        }
        staying().filter(|r| !self.is_held(&r.name)).find(runs)?;
        let held = residents.iter().filter(|r| self.is_held(&r.name));
        let (in_sync, all) = (held.clone().filter(|r| r.healthy).count(), held.clone().count());
        // Fewer are none with which a volume goes on: those that failed are waited for.
        let is_majority_of = |all: usize| in_sync > all / 2;
        if is_majority_of(all + 1) || !is_majority_of(all) {
            return None;
        }
        let failed = held.filter(|r| r.failed && self.mode(&r.name) == Some(ReplicaMode::Error));
        let since =
            |r: &&Resident| self.replicas.get(&r.name).and_then(|spec| age(&spec.failed_at, self.o.now));
        failed.max_by_key(since).map(|r| r.name.clone())
    }

    /// Of a volume that nobody ever used a replica that leaves has nothing to hand over, and one that failed keeps its node from the next
    /// one, and a majority from coming together.
    fn drop_unused(&mut self, residents: &[Resident]) {
        let rests = self.o.volume.spec.node_id.is_empty() && self.engine_state() == InstanceState::Stopped;
        if !rests || !self.is_new() {
            return;
        }
        let staying = residents.iter().filter(|r| !r.failed && !r.leaving).count();
        let may_go = |r: &&Resident| r.failed || r.leaving && staying >= self.wanted();
        if let Some(unused) = residents.iter().find(may_go) {
            self.replicas.remove(&unused.name);
            self.actions.push(Action::DeleteReplica(unused.name.clone()));
        }
    }

    /// A replica that leaves before it was ever filled: it hands over nothing, and to fill it would only hold up the one that
    /// takes its place, and whoever empties the node.
    fn empty_leaver(&self, residents: &[Resident]) -> Option<String> {
        let is_empty = |r: &&Resident| {
            r.leaving
                && !r.healthy
                && self.replicas.get(&r.name).is_some_and(|spec| spec.healthy_at.is_empty())
        };
        let others_hold = residents.iter().any(|r| r.healthy && !r.failed);
        residents.iter().find(is_empty).filter(|_| others_hold).map(|r| r.name.clone())
    }

    /// A replica that failed long ago, while others hold the data, and is not back: one that is being filled lacks less than one in
    /// its place would. One that was never filled goes once another one is there in its place.
    fn stale(&mut self, residents: &[Resident]) -> Option<String> {
        let own = u64::try_from(self.o.volume.spec.stale_replica_timeout).unwrap_or_default();
        let minutes = if own > 0 { own } else { STALE_MINUTES };
        let limit = Duration::from_secs(minutes.saturating_mul(60));
        let is_replaced = residents.iter().filter(|r| !r.failed && !r.leaving).count() >= self.wanted();
        if !residents.iter().any(|r| r.healthy && !r.failed) {
            return None;
        }
        let is_stale = |(name, spec): &(&String, &ReplicaSpec)| {
            let was_filled = !spec.healthy_at.is_empty();
            let limit = if was_filled { limit } else { self.patience_with(spec).min(limit) };
            let is_old = age(&spec.failed_at, self.o.now).is_some_and(|a| a >= limit);
            is_old && (was_filled || is_replaced) && self.mode(name) != Some(ReplicaMode::WriteOnly)
        };
        // By a clock that is ahead whatever has just failed did so long ago.
        let is_known = |(name, spec): &(&String, &ReplicaSpec)| {
            spec.healthy_at.is_empty() || !self.o.lately_failed.contains(*name)
        };
        let stale = self.replicas.iter().filter(is_stale);
        let known = stale.clone().find(is_known).map(|(name, _)| name.clone());
        if known.is_none() && stale.count() > 0 {
            self.look_again(ROOM);
        }
        known
    }
}
