//! The decision while it is made: what everything will be, from which the differences are taken at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Action, Observed};
use crate::api::{
    DataLocality, DesireState, Engine, EngineSpec, InstanceState, Quorum, Replica, ReplicaMode, ReplicaSpec,
    Toggle, VolumeStatus,
};
use crate::plan::replica::is_spare;
use crate::plan::served::tells_epochs;
use crate::plan::{Event, FINALIZER, renew, renew_conditions, written};
use crate::schedule::{Locality, Resident, Want};

pub(super) struct Draft<'a> {
    pub(super) o: &'a Observed<'a>,
    pub(super) name: String,
    pub(super) now: String,
    pub(super) engine: Option<EngineSpec>,
    pub(super) second: Option<EngineSpec>,
    /// Of all replicas that are there and stay, and of those to be made. Of those with one directory one is here.
    pub(super) replicas: BTreeMap<String, ReplicaSpec>,
    /// Names and nodes of those that share the directory of one of these.
    pub(super) spare: Vec<(String, String)>,
    pub(super) status: VolumeStatus,
    pub(super) actions: Vec<Action>,
    /// Replicas that the engine is to let go of.
    pub(super) dropped: BTreeSet<String>,
    /// A replica that goes before there is another one in its place.
    pub(super) gives_way: Option<String>,
    again: Option<Duration>,
}

impl<'a> Draft<'a> {
    pub(super) fn new(o: &'a Observed<'a>) -> Self {
        let stays = |r: &&Replica| r.metadata.deletion_timestamp.is_none();
        let staying: Vec<&Replica> = o.replicas.iter().copied().filter(stays).collect();
        let (spare, serving): (Vec<_>, Vec<_>) =
            staying.iter().copied().partition(|r| is_spare(r, &staying, o.volume));
        let spec = |engine: Option<&Engine>| {
            engine.filter(|e| e.metadata.deletion_timestamp.is_none()).map(|e| e.spec.clone())
        };
        let mut status = o.volume.status.clone().unwrap_or_default();
        renew(std::iter::once(&mut status.last_degraded_at), o.now);
        renew_conditions(&mut status.conditions, o.now);
        let mut replicas: BTreeMap<String, ReplicaSpec> =
            serving.into_iter().map(|r| (name_of(r), r.spec.clone())).collect();
        for spec in replicas.values_mut() {
            renew([&mut spec.failed_at, &mut spec.last_failed_at], o.now);
        }
        Self {
            o,
            name: o.volume.metadata.name.clone().unwrap_or_default(),
            now: written(o.now),
            engine: spec(o.engine),
            second: spec(o.second),
            replicas,
            spare: spare.into_iter().map(|r| (name_of(r), r.spec.node_id.clone())).collect(),
            status,
            actions: Vec::new(),
            dropped: BTreeSet::new(),
            gives_way: None,
            again: None,
        }
    }

    /// What has to be there whatever the volume does: its finalizer, attachment and engine.
    pub(super) fn keep(&mut self) {
        let finalizers = self.o.volume.metadata.finalizers.as_deref().unwrap_or_default();
        if !finalizers.iter().any(|f| f == FINALIZER) {
            self.actions.push(Action::AddFinalizer);
        }
        self.ask_for_remount_after_deletion();
        if self.o.attachment.is_none() {
            self.actions.push(Action::CreateAttachment);
        }
        if self.o.engine.is_none() {
            let spec = &self.o.volume.spec;
            self.engine = Some(EngineSpec {
                volume_name: self.name.clone(),
                volume_size: spec.size,
                active: true,
                data_engine: spec.data_engine,
                frontend: spec.frontend,
                image: self.engine_image(),
                quorum: spec.quorum,
                io_timeout: spec.io_timeout,
                migratable: spec.migratable,
                ..EngineSpec::default()
            });
        }
    }

    /// How many replicas the volume should have.
    pub(super) fn wanted(&self) -> usize {
        let own = self.o.volume.spec.number_of_replicas;
        let wanted = if own > 0 { own } else { self.o.settings.replica_count() };
        usize::try_from(wanted).unwrap_or(1)
    }

    /// Tells the engine, one that runs too, how much the volume may be snapshotted.
    pub(super) fn limit_snapshots(&mut self) {
        let spec = &self.o.volume.spec;
        let setting = || i64::try_from(self.o.settings.snapshot_max_count()).unwrap_or_default();
        let count = if spec.snapshot_max_count > 0 { spec.snapshot_max_count } else { setting() };
        for engine in [&mut self.engine, &mut self.second].into_iter().flatten() {
            (engine.snapshot_max_count, engine.snapshot_max_size) = (count, spec.snapshot_max_size);
        }
    }

    pub(super) fn locality(&self) -> DataLocality {
        match self.o.volume.spec.data_locality {
            DataLocality::Setting => self.o.settings.data_locality(),
            own @ (DataLocality::Disabled | DataLocality::BestEffort | DataLocality::StrictLocal) => own,
        }
    }

    /// What the scheduler has to know of the volume. `fill`: bytes that a new replica takes at once.
    pub(super) fn want(&self, fill: u64) -> Want {
        let (spec, settings) = (&self.o.volume.spec, self.o.settings);
        let soft = |own: Toggle, global: bool| match own {
            Toggle::Ignored => global,
            Toggle::Enabled => true,
            Toggle::Disabled => false,
        };
        let node = &spec.node_id;
        Want {
            size: spec.size.bytes(),
            fill,
            node_selector: spec.node_selector.iter().cloned().collect(),
            disk_selector: spec.disk_selector.iter().cloned().collect(),
            tagged_nodes_serve_all: settings.tagged_nodes_serve_all(),
            tagged_disks_serve_all: settings.tagged_disks_serve_all(),
            node_soft: soft(spec.replica_soft_anti_affinity, settings.node_soft()),
            zone_soft: soft(spec.replica_zone_soft_anti_affinity, settings.zone_soft()),
            disk_soft: soft(spec.replica_disk_soft_anti_affinity, settings.disk_soft()),
            locality: match self.locality() {
                DataLocality::BestEffort if !node.is_empty() => Locality::Prefer(node.clone()),
                DataLocality::StrictLocal if !node.is_empty() => Locality::Only(node.clone()),
                _ => Locality::Anywhere,
            },
            program: Some(self.image()).filter(|image| self.is_anywhere(image)),
        }
    }

    /// The replicas as the scheduler sees them.
    pub(super) fn residents(&self) -> Vec<Resident> {
        let resident = |(name, spec): (&String, &ReplicaSpec)| Resident {
            name: name.clone(),
            node: spec.node_id.clone(),
            disk: spec.disk_id.clone(),
            failed: !spec.failed_at.is_empty(),
            leaving: spec.eviction_requested,
            healthy: self.is_in_sync(name, spec),
        };
        self.replicas.iter().map(resident).collect()
    }

    /// The same where one more is to be placed. One that failed before it was ever filled keeps its node from the next one: what kept
    /// it from being filled would keep that one, too. A node that is gone for good keeps nothing, nor its zone.
    pub(super) fn occupants(&self) -> Vec<Resident> {
        let mut residents = self.residents();
        for resident in &mut residents {
            let was_filled = self.replicas.get(&resident.name).is_none_or(|r| !r.healthy_at.is_empty());
            resident.failed &= was_filled || self.is_gone(&resident.node);
        }
        residents
    }

    /// True if the replica holds everything: its engine says so, or none runs and nothing was wrong with it.
    pub(super) fn is_in_sync(&self, name: &str, spec: &ReplicaSpec) -> bool {
        if self.tells_modes() {
            return self.mode(name) == Some(ReplicaMode::ReadWrite);
        }
        spec.failed_at.is_empty() && self.is_member(name)
    }

    /// True for a member of the epoch that counts; of every replica while there is none.
    pub(super) fn is_member(&self, name: &str) -> bool {
        self.status.epoch.as_ref().is_none_or(|epoch| epoch.members.iter().any(|m| m == name))
    }

    /// True for a replica that an engine may be told of before it serves. Where no epoch says who holds everything it takes those
    /// that it finds for the volume: of one that Longhorn served until now a single one, whose name comes first. So it is told of
    /// those that hold everything as their resources say, and of the others once it serves.
    pub(super) fn may_begin(&self, name: &str) -> bool {
        let spec = self.replicas.get(name).filter(|r| !r.healthy_at.is_empty() && r.failed_at.is_empty());
        spec.is_some() || self.is_blank() || self.tells_epochs(name)
    }

    /// True while no replica was ever in sync, for all that is known here: one is as good as another.
    pub(super) fn is_blank(&self) -> bool {
        self.o.replicas.iter().all(|r| r.spec.healthy_at.is_empty())
    }

    /// True if an engine hears in which epochs the replica was: from the authority, or from the replica.
    pub(super) fn tells_epochs(&self, name: &str) -> bool {
        match self.o.volume.spec.quorum {
            Quorum::Any => self.status.epoch.is_some(),
            Quorum::Majority => self.replica(name).is_some_and(tells_epochs),
            Quorum::Unsafe => false,
        }
    }

    /// True while the engine says what each replica is to it. A relay, and an engine that has just taken one's place, do not.
    pub(super) fn tells_modes(&self) -> bool {
        let told = self.o.engine.and_then(|e| e.status.as_ref());
        let has_told = told.is_some_and(|s| !s.relaying && !s.replica_mode_map.is_empty());
        has_told && self.engine_state() == InstanceState::Running
    }

    /// What the replica is to the running engine.
    pub(super) fn mode(&self, replica: &str) -> Option<ReplicaMode> {
        self.o.engine?.status.as_ref()?.replica_mode_map.get(replica).copied()
    }

    /// What the engine is doing, as far as anybody can know.
    pub(super) fn engine_state(&self) -> InstanceState {
        self.o.engine.map_or(InstanceState::Stopped, |engine| self.state_of(engine))
    }

    /// The same of either engine.
    pub(super) fn state_of(&self, engine: &Engine) -> InstanceState {
        let node = &engine.spec.node_id;
        if node.is_empty() {
            return InstanceState::Stopped;
        }
        if !self.o.nodes_up.contains(node) {
            return InstanceState::Unknown;
        }
        match &engine.status {
            // A relay that is to be an engine is none yet, and the other way round.
            Some(status) if status.owner_id == *node => match status.current_state {
                InstanceState::Running if status.relaying != engine.spec.relays() => InstanceState::Starting,
                state => state,
            },
            // Nobody there has taken it up yet.
            Some(_) | None if engine.spec.desire_state == DesireState::Stopped => InstanceState::Stopped,
            Some(_) | None => InstanceState::Starting,
        }
    }

    /// What a replica is doing, as far as anybody can know.
    pub(super) fn replica_state(&self, name: &str) -> InstanceState {
        let Some(replica) = self.replica(name) else { return InstanceState::Stopped };
        if !self.o.nodes_up.contains(&replica.spec.node_id) {
            return InstanceState::Unknown;
        }
        replica.status.as_ref().map(|s| s.current_state).unwrap_or_default()
    }

    pub(super) fn replica(&self, name: &str) -> Option<&'a Replica> {
        self.o.replicas.iter().find(|r| r.metadata.name.as_deref() == Some(name)).copied()
    }

    pub(super) fn is_attached(&self) -> bool {
        self.engine_state() == InstanceState::Running
    }

    pub(super) fn tell(&mut self, warning: bool, reason: &'static str, message: String) {
        self.actions.push(Action::Tell(Event { warning, reason, message }));
    }

    /// Looks again after that time at the latest.
    pub(super) fn look_again(&mut self, after: Duration) {
        self.again = Some(self.again.map_or(after, |again| again.min(after)));
    }

    /// Everything that has to change.
    pub(super) fn finish(mut self) -> Vec<Action> {
        for (name, spec) in std::mem::take(&mut self.replicas) {
            match self.replica(&name) {
                None => self.actions.push(Action::CreateReplica(name, Box::new(spec))),
                Some(old) if old.spec != spec => {
                    self.actions.push(Action::SetReplica(name, Box::new(spec)));
                }
                Some(_) => {}
            }
        }
        // In this order: what the first one is not any more, the second one may be then.
        for (old, new) in [(self.o.engine, self.engine.take()), (self.o.second, self.second.take())] {
            match (old, new) {
                (None, Some(spec)) => {
                    self.actions.push(Action::CreateEngine(self.free_engine_name(), Box::new(spec)));
                }
                (Some(old), Some(spec)) if old.spec != spec => {
                    let name = old.metadata.name.clone().unwrap_or_default();
                    self.actions.push(Action::SetEngine(name, Box::new(spec)));
                }
                _ => {}
            }
        }
        if self.o.volume.status.as_ref() != Some(&self.status) {
            self.actions.push(Action::SetStatus(Box::new(self.status)));
        }
        if let Some(after) = self.again {
            self.actions.push(Action::LookAgain(after));
        }
        self.actions
    }
}

pub(super) fn name_of(replica: &Replica) -> String {
    replica.metadata.name.clone().unwrap_or_default()
}
