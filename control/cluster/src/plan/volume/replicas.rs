//! How many replicas a volume has, and where: made, waited for, replaced, moved.

use std::collections::BTreeSet;
use std::time::Duration;

use super::draft::{Draft, name_of};
use super::{Action, SCHEDULED};
use crate::api::{
    AutoBalance, CloneOrigin, Conditions, DataLocality, InstanceState, Replica, ReplicaMode, ReplicaSpec,
    TicketType,
};
use crate::plan::engine::SERVES;
use crate::plan::served::{may_have_served, tells_epochs, was_never_served};
use crate::plan::{FINALIZER, age, age_by_other, engine_name};
use crate::schedule::{
    Cluster, Emptying, Failed, Locality, Placement, Refusal, Replenish, Resident, Want, balance,
    broken_anti_affinity, place, place_all, replenish,
};

/// How long a replica that failed before it was ever filled is left alone before another one is tried in its place; twice as long with
/// each further one. Its engine takes it back by itself as soon as it can be filled.
const TRY_AGAIN: Duration = Duration::from_secs(60);

/// Longest time between two of them.
const TRY_AGAIN_MAX: Duration = Duration::from_secs(3600);

/// A replica that was made to take another one's place, and failed, is the last one for so long: nothing is wrong without it.
const MOVE_AGAIN: Duration = Duration::from_secs(600);

/// How long an engine that has just begun to serve has for taking back a replica that had failed: it tries every second.
const RETURN: Duration = Duration::from_secs(30);

/// A volume that waits for others' rebuilds looks again after this time: how soon one of them ends nobody knows.
pub(super) const TURN: Duration = Duration::from_secs(15);

/// A volume that waits for room is looked at again after this time, even if nothing in the cluster changed.
pub(super) const ROOM: Duration = Duration::from_secs(60);

impl Draft<'_> {
    /// Makes replicas that are missing, as far as there is room.
    pub(super) fn fill_up(&mut self) {
        self.leave_unused_node();
        self.mark_leavers();
        let wanted = self.wanted();
        let residents = self.residents();
        let staying = residents.iter().filter(|r| !r.failed && !r.leaving).count();
        let is_new = self.is_new();
        // A volume whose only replica belongs on the node that it is attached to has none before.
        let waits_for_node =
            self.locality() == DataLocality::StrictLocal && self.o.volume.spec.node_id.is_empty() && is_new;
        if waits_for_node {
            return;
        }
        if staying < wanted {
            if is_new {
                self.place_first(wanted - staying);
            } else if self.is_attached() {
                self.replace(residents.iter().any(|r| r.leaving));
            } else {
                self.report_places(None);
            }
            return;
        }
        self.report_places(None);
        if !self.draw_near() && !self.keep_apart() {
            self.spread();
        }
    }

    /// A volume whose only replica belongs where the volume is used goes with its first user: what was made for it on another
    /// node, on which it was never served, holds nothing. Not while an engine may be there that nobody hears of: it could begin to
    /// serve what is being deleted.
    fn leave_unused_node(&mut self) {
        let target = self.o.volume.spec.node_id.clone();
        let is_strict = self.locality() == DataLocality::StrictLocal;
        let is_nowhere = self.engine.as_ref().is_none_or(|e| e.node_id.is_empty()) && self.second.is_none();
        if !is_strict
            || target.is_empty()
            || !is_nowhere
            || !self.was_never_served()
            || self.may_have_engine()
        {
            return;
        }
        let elsewhere = self.replicas.iter().filter(|(_, spec)| spec.node_id != target);
        let unused: Vec<(String, String)> =
            elsewhere.map(|(name, spec)| (name.clone(), spec.node_id.clone())).collect();
        for (name, node) in unused {
            let message = format!("the volume was never used on node {node}: it begins on node {target}");
            self.tell(false, "ReplicaRemoved", message);
            self.replicas.remove(&name);
            self.actions.push(Action::DeleteReplica(name));
        }
    }

    /// True unless the node of the last engine has said that it ended, or is gone for good. Before an engine starts its node says
    /// so.
    fn may_have_engine(&self) -> bool {
        self.o.engine.and_then(|e| e.status.as_ref()).is_some_and(|told| {
            let has_ended = matches!(told.current_state, InstanceState::Stopped | InstanceState::Error);
            !has_ended && !self.is_gone(&told.owner_id)
        })
    }

    pub(super) fn was_never_served(&self) -> bool {
        was_never_served(self.o.volume, self.o.replicas.iter().copied())
    }

    /// True before the volume was ever written to: every replica is as good as another, and all are needed. One that is being
    /// deleted counts: what it holds may be all that there is (`crate::plan::replica::fate`).
    pub(super) fn is_new(&self) -> bool {
        let goes = |r: &&&Replica| r.metadata.deletion_timestamp.is_some();
        let going = self.o.replicas.iter().filter(goes).map(|r| &r.spec);
        let is_blank = self.replicas.values().chain(going).all(|r| r.healthy_at.is_empty());
        self.status.epoch.is_none() && is_blank && !may_have_served(self.o.volume)
    }

    /// Marks replicas on nodes and disks that are being emptied.
    fn mark_leavers(&mut self) {
        let leaves: Vec<bool> = self.replicas.values().map(|spec| self.leaves(spec)).collect();
        for (spec, leaves) in self.replicas.values_mut().zip(leaves) {
            spec.eviction_requested = leaves;
        }
    }

    fn leaves(&self, spec: &ReplicaSpec) -> bool {
        let Some(node) = self.o.cluster.nodes.get(&spec.node_id) else { return false };
        let is_last = || {
            let elsewhere = self.replicas.values().filter(|r| r.node_id != spec.node_id && self.is_safe(r));
            elsewhere.count() < self.needed()
        };
        let is_used = !spec.healthy_at.is_empty() || !spec.failed_at.is_empty();
        let leaves_node = match node.emptying {
            Emptying::No => false,
            // One that leaves does so to the end: once its successor is filled it is the last one no more.
            Emptying::LastReplicas => spec.eviction_requested || is_used && is_last(),
            Emptying::All => true,
        };
        leaves_node || node.disks.get(&spec.disk_id).is_some_and(|disk| disk.evicting)
    }

    /// So many replicas have to hold everything for the volume to go on: of those that were used, or that its engine is told of.
    fn needed(&self) -> usize {
        let is_told =
            |name: &String| self.engine.as_ref().is_some_and(|e| e.replica_address_map.contains_key(name));
        let is_used = |spec: &ReplicaSpec| !spec.healthy_at.is_empty() || !spec.failed_at.is_empty();
        let counted = self.replicas.iter().filter(|(name, spec)| is_used(spec) || is_told(name)).count();
        self.o.volume.spec.quorum.members_min(counted)
    }

    /// True for a healthy replica that can be read, on a node that is not about to be drained.
    fn is_safe(&self, spec: &ReplicaSpec) -> bool {
        let is_protected = self.o.cluster.nodes.get(&spec.node_id).is_some_and(|n| n.protected);
        let is_readable = self.o.cluster.is_readable(&spec.node_id, &spec.disk_id);
        is_protected && is_readable && !spec.healthy_at.is_empty() && spec.failed_at.is_empty()
    }

    pub(super) fn has_ticket(&self, kind: TicketType) -> bool {
        self.o.attachment.is_some_and(|a| a.spec.attachment_tickets.values().any(|t| t.kind == kind))
    }

    fn place_first(&mut self, count: usize) {
        let (places, refusal) = place_all(self.o.cluster, &self.want(0), &self.occupants(), count);
        let enough = places.len() == count || self.o.settings.degraded_creation();
        if enough {
            for at in &places {
                self.add_replica(at);
            }
        }
        self.report_places(refusal.as_ref());
    }

    /// Replaces one replica that failed or leaves, one at a time: rebuilds compete for the same disks and links.
    fn replace(&mut self, anybody_leaves: bool) {
        let filling = self.replicas.iter().any(|(name, spec)| {
            spec.failed_at.is_empty() && !spec.eviction_requested && !self.is_in_sync(name, spec)
        });
        if filling || self.comes_back() || self.was_just_tried() {
            return;
        }
        let failed: Vec<Failed<'_>> = self
            .replicas
            .iter()
            .filter(|(_, spec)| !spec.failed_at.is_empty() && !spec.eviction_requested)
            .map(|(name, spec)| Failed {
                name,
                since: age(&spec.failed_at, self.o.now).unwrap_or_default(),
                // The engine takes a replica back by itself as soon as it answers; nobody has to be told.
                usable: false,
            })
            .collect();
        let wait = self.o.settings.replenishment_wait();
        let missing = self.wanted().saturating_sub(self.replicas.len());
        match replenish(&failed, wait) {
            Replenish::Wait(left) if missing == 0 && !anybody_leaves => self.look_again(left),
            Replenish::Wait(_) | Replenish::Reuse(_) | Replenish::New => {
                let fill = u64::try_from(self.status.actual_size).unwrap_or_default();
                match self.place_now(fill).or_else(|refusal| self.place_again(fill).ok_or(refusal)) {
                    Ok(Some(at)) => {
                        self.add_successor(&at);
                        self.report_places(None);
                    }
                    Ok(None) => self.look_again(TURN),
                    Err(refusal) => {
                        self.gives_way = self.choose_to_give_way(fill);
                        self.report_places(Some(&refusal));
                    }
                }
            }
        }
    }

    /// True while the engine fills a replica that had failed, or may be about to take it back: a new one would be copied whole,
    /// and this one lacks little.
    fn comes_back(&mut self) -> bool {
        let served = self.served_for();
        let left = served.and_then(|served| RETURN.checked_sub(served)).filter(|left| !left.is_zero());
        let failed =
            self.replicas.iter().filter(|(_, spec)| !spec.failed_at.is_empty() && !spec.eviction_requested);
        let runs =
            |name| matches!(self.replica_state(name), InstanceState::Starting | InstanceState::Running);
        let mut back = failed.filter(|(name, _)| {
            self.mode(name) == Some(ReplicaMode::WriteOnly) || left.is_some() && runs(name)
        });
        let is_back = back.next().is_some();
        if let Some(left) = left.filter(|_| is_back) {
            self.look_again(left);
        }
        is_back
    }

    /// Replicas that failed before they were ever filled: whatever kept them from it may keep others from it, too. What that was of those on
    /// a node that is gone for good has gone with it.
    fn unfilled(&self) -> impl Iterator<Item = &ReplicaSpec> {
        let is_unfilled = |r: &&ReplicaSpec| r.healthy_at.is_empty() && !r.failed_at.is_empty();
        let counts = |r: &&ReplicaSpec| !r.eviction_requested && !self.is_gone(&r.node_id);
        self.replicas.values().filter(is_unfilled).filter(counts)
    }

    /// True while one that failed before it was filled is left alone.
    fn was_just_tried(&mut self) -> bool {
        let left = |r: &ReplicaSpec| tries_again_after(r).checked_sub(age(&r.failed_at, self.o.now)?);
        let left = self.unfilled().filter_map(left).max().filter(|left| !left.is_zero());
        left.into_iter().for_each(|left| self.look_again(left));
        left.is_some()
    }

    /// How long a replica that failed before it was filled stays.
    pub(super) fn patience_with(&self, unfilled: &ReplicaSpec) -> Duration {
        let is_move = !unfilled.hard_node_affinity.is_empty();
        let own = if is_move { MOVE_AGAIN } else { tries_again_after(unfilled) };
        own.max(self.o.settings.replenishment_wait())
    }

    /// A place on the nodes of those that failed before they were filled, and have had their time, where there is none elsewhere: on
    /// another disk, or else beside them, since what is in their directories may be what is wrong. `None`: one has not had its time, or
    /// there is no place.
    fn place_again(&mut self, fill: u64) -> Option<Option<Placement>> {
        let left = |r: &ReplicaSpec| self.patience_with(r).checked_sub(age(&r.failed_at, self.o.now)?);
        let left = self.unfilled().filter_map(left).max();
        if let Some(left) = left.filter(|left| !left.is_zero()) {
            self.look_again(left);
            return None;
        }
        let (want, residents) = (self.want(fill), self.residents());
        let is_unfilled = |name: &str| self.replicas.get(name).is_some_and(|r| r.healthy_at.is_empty());
        let mut others = residents.clone();
        for tried in others.iter_mut().filter(|r| r.failed && is_unfilled(&r.name)) {
            (tried.failed, tried.leaving) = (false, true);
        }
        let at = place(self.o.cluster, &want, &others).or_else(|_| place(self.o.cluster, &want, &residents));
        let at = at.ok()?;
        Some((!self.is_crowded(&at.node)).then_some(at))
    }

    /// One that failed before it was filled and whose process does not come up, where only what is promised to it keeps another one from its
    /// disk: it goes before that is made. How many were tried before is forgotten with it, so it has as much time as one that moves in.
    fn choose_to_give_way(&mut self, fill: u64) -> Option<String> {
        let (want, residents) = (self.want(fill), self.residents());
        // It is there for the asking, or will be.
        if place(self.o.cluster, &want, &residents).is_ok() {
            return None;
        }
        let may_go = |(name, spec): &(&String, &ReplicaSpec)| {
            let is_unfilled = spec.healthy_at.is_empty() && !spec.failed_at.is_empty();
            let was_in_epoch = self.is_recorded(name) || self.replica(name).is_some_and(tells_epochs);
            is_unfilled && !was_in_epoch && self.replica_state(name) == InstanceState::Error
        };
        let makes_room = |(name, spec): &(&String, &ReplicaSpec)| {
            let mut cluster = self.o.cluster.clone();
            cluster.release(&spec.node_id, &spec.disk_id, spec.volume_size.bytes());
            let others: Vec<Resident> = residents.iter().filter(|r| r.name != **name).cloned().collect();
            place(&cluster, &want, &others).is_ok()
        };
        let (name, spec) = self.replicas.iter().filter(may_go).find(makes_room)?;
        let patience = self.patience_with(spec).max(MOVE_AGAIN);
        let left = patience.checked_sub(age(&spec.failed_at, self.o.now)?).filter(|left| !left.is_zero());
        let name = name.clone();
        left.into_iter().for_each(|left| self.look_again(left));
        left.is_none().then_some(name)
    }

    /// Makes a replica that knows how many were tried before it.
    fn add_successor(&mut self, at: &Placement) {
        let tried =
            self.unfilled().map(|r| r.rebuild_retry_count.saturating_add(1)).max().unwrap_or_default();
        let name = self.add_copy(at, CloneOrigin::default());
        if let Some(spec) = self.replicas.get_mut(&name) {
            spec.rebuild_retry_count = tried;
        }
    }

    /// For how long the engine serves; `None`: it does not, or nobody says so.
    pub(super) fn served_for(&self) -> Option<Duration> {
        let serves = self.o.engine.and_then(|e| e.status.as_ref()?.conditions.get_condition(SERVES));
        serves.filter(|c| c.is_true()).and_then(|c| age_by_other(&c.last_transition_time, self.o.now))
    }

    /// Where a replica may be filled now; `None`: where there is room enough is being filled.
    pub(super) fn place_now(&self, fill: u64) -> Result<Option<Placement>, Refusal> {
        let (want, residents) = (self.want(fill), self.occupants());
        let at = place(self.o.cluster, &want, &residents)?;
        if !self.is_crowded(&at.node) {
            return Ok(Some(at));
        }
        // The node that the volume is used on is waited for: one that is filled elsewhere would be filled there once more.
        let is_preferred = match &want.locality {
            Locality::Prefer(node) | Locality::Only(node) => *node == at.node,
            Locality::Anywhere => false,
        };
        Ok(if is_preferred { None } else { place(&self.calm(), &want, &residents).ok() })
    }

    /// True for a node on which as many replicas are being filled as may be.
    pub(super) fn is_crowded(&self, node: &str) -> bool {
        let filling = self.o.filling.get(node).copied().unwrap_or_default();
        filling >= self.o.settings.rebuilds_at_once()
    }

    /// The cluster as if the nodes took nothing on which no further replica may be filled now.
    fn calm(&self) -> Cluster {
        let mut calm = self.o.cluster.clone();
        for (name, node) in &mut calm.nodes {
            node.schedulable &= !self.is_crowded(name);
        }
        calm
    }

    /// Has a replica made where the volume is used, if its locality asks for one there and there is none: another one goes once
    /// it is filled. False: nothing is to be done about that.
    fn draw_near(&mut self) -> bool {
        let node = self.o.volume.spec.node_id.as_str();
        let is_used_there = self.is_attached()
            && !self.o.volume.spec.disable_frontend
            && self.engine.as_ref().is_some_and(|e| e.node_id == node);
        let asks = self.locality() == DataLocality::BestEffort && is_used_there && !self.migrates();
        let residents = self.residents();
        let is_near = residents.iter().any(|r| r.node == node);
        if !asks || is_near || !is_calm(&residents) || residents.len() != self.wanted() {
            return false;
        }
        let fill = u64::try_from(self.status.actual_size).unwrap_or_default();
        let want = Want { locality: Locality::Only(node.to_owned()), ..self.want(fill) };
        // Without room there it stays where it is: as well as can be.
        let Ok(at) = place(self.o.cluster, &want, &residents) else { return false };
        let why = format!("a replica moves to node {node}, where the volume is used");
        self.move_to(&at, why);
        true
    }

    /// Has a replica made elsewhere where two are in one place that the volume's anti-affinity keeps apart: one that was given up has
    /// come back beside its successor. One of the two goes once the new one is filled. False: nothing is to be done about that.
    fn keep_apart(&mut self) -> bool {
        let residents = self.residents();
        if !is_calm(&residents) || residents.len() != self.wanted() || !self.is_attached() || self.migrates()
        {
            return false;
        }
        let fill = u64::try_from(self.status.actual_size).unwrap_or_default();
        let want = self.want(fill);
        let Some(broken) = broken_anti_affinity(self.o.cluster, &want, &residents) else { return false };
        // Without a place of its own it stays where it is: as well as can be.
        let Ok(at) = place(self.o.cluster, &want, &residents) else { return false };
        let why = format!("a replica moves to node {}: {broken}", at.node);
        self.move_to(&at, why);
        true
    }

    /// Has a replica made that takes the place of another one once it is filled.
    fn move_to(&mut self, at: &Placement, why: String) {
        if self.is_crowded(&at.node) {
            return self.look_again(TURN);
        }
        let name = self.add_copy(at, CloneOrigin::default());
        if let Some(spec) = self.replicas.get_mut(&name) {
            spec.hard_node_affinity.clone_from(&at.node);
        }
        self.tell(false, "Balancing", why);
    }

    /// True for a replica that was made to take another one's place and is not filled yet: it is not one too many. One that
    /// failed before it was stays for a while: nothing moves while it is there, or a disk that cannot take a replica would be filled
    /// again and again.
    pub(super) fn is_moving_in(&mut self, resident: &Resident) -> bool {
        let Some(spec) = self.replicas.get(&resident.name) else { return false };
        let is_made_for_it = !spec.hard_node_affinity.is_empty() && spec.healthy_at.is_empty();
        if !is_made_for_it || resident.healthy || resident.leaving {
            return false;
        }
        let Some(failed) = age(&spec.failed_at, self.o.now) else { return true };
        let left = self.patience_with(spec).checked_sub(failed).filter(|left| !left.is_zero());
        left.into_iter().for_each(|left| self.look_again(left));
        left.is_some()
    }

    /// Moves one replica if that spreads them better: the new one is made now, the old one goes once it is filled.
    fn spread(&mut self) {
        let how = match self.o.volume.spec.replica_auto_balance {
            AutoBalance::Ignored => self.o.settings.auto_balance(),
            own => own,
        };
        let even = how == AutoBalance::BestEffort;
        let moves = even || how == AutoBalance::LeastEffort;
        if !moves || !self.is_attached() || self.replicas.len() != self.wanted() {
            return;
        }
        let fill = u64::try_from(self.status.actual_size).unwrap_or_default();
        let want = self.want(fill);
        if let Some(at) = balance(self.o.cluster, &want, &self.residents(), even) {
            let why = format!("a replica moves to node {}, which spreads them better", at.node);
            self.move_to(&at, why);
        }
    }

    fn add_replica(&mut self, at: &Placement) {
        self.add_copy(at, CloneOrigin::default());
    }

    /// Makes a replica whose directory is copied from another one. Gives back its name.
    pub(super) fn add_copy(&mut self, at: &Placement, clone_from: CloneOrigin) -> String {
        let suffix = self.new_suffix();
        let spec = &self.o.volume.spec;
        let path = self.o.disk_paths.get(&(at.node.clone(), at.disk.clone())).cloned().unwrap_or_default();
        let replica = ReplicaSpec {
            volume_name: self.name.clone(),
            volume_size: spec.size,
            clone_from,
            node_id: at.node.clone(),
            disk_id: at.disk.clone(),
            disk_path: path,
            data_directory_name: format!("{}-{suffix}", self.name),
            engine_name: self
                .o
                .engine
                .and_then(|e| e.metadata.name.clone())
                .unwrap_or_else(|| engine_name(&self.name)),
            data_engine: spec.data_engine,
            active: true,
            image: self.image(),
            ..ReplicaSpec::default()
        };
        let name = format!("{}-r-{suffix}", self.name);
        self.replicas.insert(name.clone(), replica);
        name
    }

    /// Eight hex digits that follow from what is there: a decision that is made again before the first one is seen makes
    /// the same replica, not one more.
    fn new_suffix(&self) -> String {
        let uid = self.o.volume.metadata.uid.as_deref().unwrap_or_default();
        let mut salt = 0_u32;
        loop {
            let known = self.o.replicas.iter().filter_map(|r| r.metadata.name.as_deref());
            let parts =
                [uid, &self.name].into_iter().chain(known).chain(self.replicas.keys().map(String::as_str));
            let suffix = format!("{:08x}", hash(parts).wrapping_add(salt));
            let name = format!("{}-r-{suffix}", self.name);
            let is_there = self.replicas.contains_key(&name) || self.replica(&name).is_some();
            if !is_there && !self.is_told_of(&name) {
                return suffix;
            }
            salt += 1;
        }
    }

    fn report_places(&mut self, refusal: Option<&Refusal>) {
        let now = self.now.clone();
        let conditions = &mut self.status.conditions;
        let was_fine = conditions.get_condition(SCHEDULED).is_none_or(crate::api::Condition::is_true);
        match refusal {
            None => conditions.set_condition(SCHEDULED, true, "", "", &now),
            Some(refusal) => {
                let message = refusal.to_string();
                conditions.set_condition(SCHEDULED, false, "ReplicaSchedulingFailure", &message, &now);
                self.look_again(ROOM);
                if was_fine {
                    self.tell(true, "ReplicaSchedulingFailure", message);
                }
            }
        }
    }

    /// Lets go of deleted replicas that no manager is left to finish.
    pub(super) fn forget_lost(&mut self) {
        let lost = lost(self.o.replicas.iter().copied(), self.o.cluster, self.o.nodes_up);
        let names: Vec<String> = lost.into_iter().map(name_of).collect();
        self.actions.extend(names.into_iter().map(Action::ForgetReplica));
    }

    pub(super) fn is_gone(&self, node: &str) -> bool {
        is_gone(node, self.o.cluster, self.o.nodes_up)
    }

    /// True for one that the epoch or an engine names, though it may have been deleted since: an empty one of that name would be taken for
    /// it, and for one that holds everything.
    fn is_told_of(&self, name: &str) -> bool {
        self.is_recorded(name) || self.mode(name).is_some() || self.is_held(name)
    }

    /// True for a replica that the engine has, whatever it is to it.
    pub(super) fn is_held(&self, name: &str) -> bool {
        let told = self.o.engine.and_then(|e| e.status.as_ref());
        told.is_some_and(|s| s.current_replica_address_map.contains_key(name))
    }

    /// Replicas whose process has not ended, as far as anybody can know, and that have not failed.
    pub(super) fn unended(&self) -> Vec<String> {
        let rests =
            |state| matches!(state, InstanceState::Stopped | InstanceState::Error | InstanceState::Unknown);
        let left = self.replicas.iter().filter(|(_, spec)| spec.failed_at.is_empty());
        left.filter(|(name, _)| !rests(self.replica_state(name))).map(|(name, _)| name.clone()).collect()
    }
}

/// How long a replica that failed before it was filled is left alone.
fn tries_again_after(unfilled: &ReplicaSpec) -> Duration {
    let tried = u32::try_from(unfilled.rebuild_retry_count).unwrap_or_default();
    let factor = 1_u32.checked_shl(tried).unwrap_or(u32::MAX);
    TRY_AGAIN.saturating_mul(factor).min(TRY_AGAIN_MAX)
}

/// True while all of them hold everything and stay: only then one more is moved.
fn is_calm(residents: &[Resident]) -> bool {
    residents.iter().all(|r| r.healthy && !r.failed && !r.leaving)
}

/// Of these, those that are deleted and that no manager is left to finish.
pub fn lost<'a>(
    replicas: impl Iterator<Item = &'a Replica>,
    cluster: &Cluster,
    nodes_up: &BTreeSet<String>,
) -> Vec<&'a Replica> {
    let is_kept = |r: &Replica| r.metadata.finalizers.iter().flatten().any(|f| f == FINALIZER);
    let is_deleted = |r: &Replica| r.metadata.deletion_timestamp.is_some() && is_kept(r);
    replicas.filter(|r| is_deleted(r) && is_gone(&r.spec.node_id, cluster, nodes_up)).collect()
}

/// True for a node that nobody will hear of again. One that is only out of reach is none: it has its data, and may be back.
pub fn is_gone(node: &str, cluster: &Cluster, nodes_up: &BTreeSet<String>) -> bool {
    let is_known = cluster.nodes.get(node).is_some_and(|n| !n.gone);
    !is_known && !nodes_up.contains(node)
}

/// FNV-1a (32 bits) over words.
fn hash<'a>(words: impl Iterator<Item = &'a str>) -> u32 {
    const OFFSET: u32 = 0x811c_9dc5;
    const PRIME: u32 = 0x0100_0193;
    let bytes = words.flat_map(|w| w.bytes().chain([0]));
    bytes.fold(OFFSET, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(PRIME))
}
