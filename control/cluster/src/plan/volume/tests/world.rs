//! A world where nodes do at once what their resources ask.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::super::*;
use lh_block::Generation;

use crate::api::{
    AttachmentTicket, Condition, DesireState, EngineStatus, EpochRecord, GenerationText, InstanceState,
    Int64Text, Quorum, ReplicaMode, ReplicaStatus, VolumeSpec, VolumeState,
};
use crate::plan::upgrade::{Programs, Step, note};
use crate::plan::{FINALIZER, replica, written};
use crate::schedule::{Cluster, Disk, Node};

/// Resources, nodes and a clock. `settle` plans, carries out and lets the nodes act until nothing changes.
pub(super) struct World {
    pub(super) volume: Option<Volume>,
    pub(super) engines: BTreeMap<String, Engine>,
    /// What runs as engines, by name and node; true: it is a relay.
    pub(super) processes: BTreeMap<(String, String), bool>,
    /// Engines that were started, relays not among them.
    pub(super) starts: usize,
    /// The replicas that the last of them was told of.
    pub(super) first_told: Vec<String>,
    /// Nodes whose manager lives and does nothing yet.
    pub(super) late: BTreeSet<String>,
    pub(super) replicas: BTreeMap<String, Replica>,
    pub(super) attachment: Option<VolumeAttachment>,
    pub(super) left: Vec<Orphan>,
    pub(super) cluster: Cluster,
    pub(super) filling: Filling,
    /// Replicas whose failure the leader has known of for a moment.
    pub(super) lately_failed: BTreeSet<String>,
    pub(super) up: BTreeSet<String>,
    pub(super) settings: Settings,
    pub(super) now: Timestamp,
    /// Replicas whose process fails.
    pub(super) broken: BTreeSet<String>,
    /// Replicas whose disk is not given to the pods.
    pub(super) unmounted: BTreeSet<String>,
    /// Replicas whose process does not come up: their node has no instance manager.
    pub(super) absent: BTreeSet<String>,
    /// Engines and replicas whose process does not end.
    pub(super) stuck: BTreeSet<String>,
    /// Replicas that the engine calls ERR though their process runs.
    pub(super) cut_off: BTreeSet<String>,
    /// Images that do not serve, and in what: an engine's or a replica's name.
    pub(super) unfit: BTreeSet<(String, String)>,
    /// Rebuilds end at once.
    pub(super) rebuilds_end: bool,
    /// An engine that has served still says so when too few of its replicas are left for a majority.
    pub(super) engine_waits_running: bool,
    /// Replicas that were made.
    pub(super) made: usize,
    /// Two replicas are on one node.
    pub(super) crowded: bool,
    pub(super) told: Vec<&'static str>,
    pub(super) wishes: Vec<(TicketType, Option<Wish>)>,
}

impl World {
    pub(super) fn new(spec: VolumeSpec) -> Self {
        let mut cluster = Cluster::default();
        for n in ["n1", "n2", "n3", "n4"] {
            let disk = Disk { schedulable: true, maximum: 1000, available: 1000, ..Disk::default() };
            let node = Node {
                zone: n.into(),
                schedulable: true,
                disks: [(format!("{n}-d"), disk)].into(),
                ..Node::default()
            };
            cluster.nodes.insert(n.into(), node);
        }
        let mut volume = Volume::new("v", VolumeSpec { size: Int64Text(100), ..spec });
        volume.metadata.uid = Some("uid".into());
        Self {
            volume: Some(volume),
            engines: BTreeMap::new(),
            processes: BTreeMap::new(),
            starts: 0,
            first_told: Vec::new(),
            late: BTreeSet::new(),
            replicas: BTreeMap::new(),
            attachment: None,
            left: Vec::new(),
            up: cluster.nodes.keys().cloned().collect(),
            cluster,
            filling: Filling::new(),
            lately_failed: BTreeSet::new(),
            settings: Settings::default(),
            now: Timestamp::from_second(1_700_000_000).unwrap(),
            broken: BTreeSet::new(),
            unmounted: BTreeSet::new(),
            absent: BTreeSet::new(),
            stuck: BTreeSet::new(),
            cut_off: BTreeSet::new(),
            unfit: BTreeSet::new(),
            rebuilds_end: true,
            engine_waits_running: false,
            made: 0,
            crowded: false,
            told: Vec::new(),
            wishes: Vec::new(),
        }
    }

    pub(super) fn attached_to(node: &str) -> Self {
        let mut world = Self::new(VolumeSpec::default());
        world.settle();
        world.attach(node);
        assert_eq!(world.status().state, VolumeState::Attached);
        world
    }

    pub(super) fn attach(&mut self, node: &str) {
        self.volume_mut().spec.node_id = node.into();
        self.settle();
    }

    pub(super) fn volume_mut(&mut self) -> &mut Volume {
        self.volume.as_mut().expect("the volume is there")
    }

    pub(super) fn status(&self) -> VolumeStatus {
        self.volume.as_ref().and_then(|v| v.status.clone()).unwrap_or_default()
    }

    pub(super) fn pair(&self) -> (Option<&Engine>, Option<&Engine>) {
        pair(self.volume.as_ref().expect("the volume is there"), self.engines.values())
    }

    pub(super) fn engine(&self) -> &Engine {
        self.pair().0.expect("the engine is there")
    }

    pub(super) fn plan(&self) -> Vec<Action> {
        let paths = self.cluster.nodes.iter().flat_map(|(n, node)| {
            node.disks.keys().map(move |d| ((n.clone(), d.clone()), format!("/disks/{d}")))
        });
        plan(&Observed {
            volume: self.volume.as_ref().expect("the volume is there"),
            engine: self.pair().0,
            second: self.pair().1,
            replicas: self.replicas.values().collect(),
            attachment: self.attachment.as_ref(),
            source: None,
            snapshots: 0,
            left: self.left.iter().collect(),
            cluster: &self.cluster,
            filling: &self.filling,
            lately_failed: &self.lately_failed,
            disk_paths: &paths.collect(),
            nodes_up: &self.up,
            settings: &self.settings,
            image: "longhorn:1",
            now: self.now,
        })
    }

    pub(super) fn carry_out(&mut self, action: Action) {
        match action {
            Action::AddFinalizer => self.volume_mut().metadata.finalizers = Some(vec![FINALIZER.into()]),
            Action::RemoveFinalizer => self.volume = None,
            Action::CreateAttachment => self.attachment = Some(VolumeAttachment::default()),
            Action::CreateEngine(name, spec) => {
                assert!(self.engines.len() < 2);
                assert!(self.engines.insert(name.clone(), Engine::new(&name, *spec)).is_none());
            }
            Action::CreateReplica(name, spec) => {
                self.made += 1;
                assert!(self.replicas.insert(name.clone(), Replica::new(&name, *spec)).is_none());
            }
            Action::SetEngine(name, spec) => {
                self.engines.get_mut(&name).expect("the engine is there").spec = *spec;
                let active = |e: &&Engine| e.spec.active && e.spec.desire_state == DesireState::Running;
                assert!(self.engines.values().filter(active).count() < 2, "two engines are wanted at once");
            }
            Action::SetReplica(name, spec) => {
                self.replicas.get_mut(&name).expect("the replica is there").spec = *spec;
            }
            Action::DeleteEngine(name) => {
                let runs = self.processes.keys().any(|(n, node)| *n == name && self.up.contains(node));
                assert!(!runs || self.stuck.contains(&name), "{name} is deleted and still runs");
                self.engines.remove(&name);
            }
            Action::DeleteReplica(name) if self.stuck.contains(&name) => {
                let replica = self.replicas.get_mut(&name).expect("the replica is there");
                replica.metadata.deletion_timestamp = Some(self.now.into());
            }
            Action::DeleteReplica(name) | Action::ForgetReplica(name) => drop(self.replicas.remove(&name)),
            Action::DeleteAttachment => self.attachment = None,
            Action::DeleteSnapshots | Action::LookAgain(_) => {}
            Action::CreateSourceSnapshot(..) | Action::DeleteSourceSnapshot(_) => {
                unreachable!("nothing is cloned")
            }
            Action::Ticket(kind, wish) => self.put(kind, wish),
            Action::SetStatus(status) => self.volume_mut().status = Some(*status),
            Action::Tell(event) => self.told.push(event.reason),
        }
    }

    /// Puts a ticket on the attachment, or takes it off.
    pub(super) fn put(&mut self, kind: TicketType, wish: Option<Wish>) {
        self.wishes.push((kind, wish.clone()));
        let tickets = &mut self.attachment.as_mut().expect("the attachment is there").spec.attachment_tickets;
        let id = kind.to_string();
        if let Some(Wish { node: node_id, parameters }) = wish {
            let ticket =
                AttachmentTicket { id: id.clone(), kind, node_id, parameters, ..AttachmentTicket::default() };
            tickets.insert(id, ticket);
        } else {
            tickets.remove(&id);
        }
    }

    /// What the managers of the nodes that are up would do.
    pub(super) fn nodes_act(&mut self) {
        for (name, replica) in &mut self.replicas {
            if !self.up.contains(&replica.spec.node_id) {
                continue;
            }
            if self.unmounted.contains(name) && replica.spec.desire_state == DesireState::Running {
                replica.status = Some(without_disk(replica, self.now));
                continue;
            }
            let status = replica.status.get_or_insert_with(ReplicaStatus::default);
            if replica.spec.desire_state == DesireState::Running {
                let fits = !self.unfit.contains(&(name.clone(), replica.spec.image.clone()));
                let images = (&mut status.current_image, &mut status.failed_image);
                exchange(&replica.spec.image, fits, images, &mut status.conditions, self.now);
            }
            let state = match replica.spec.desire_state {
                DesireState::Running if self.broken.contains(name) => InstanceState::Error,
                DesireState::Running if self.absent.contains(name) => InstanceState::Stopped,
                DesireState::Running => InstanceState::Running,
                DesireState::Stopped if self.stuck.contains(name) => InstanceState::Stopping,
                DesireState::Stopped => InstanceState::Stopped,
            };
            status.current_state = state;
            status.address =
                if state == InstanceState::Running { format!("unix:/{name}") } else { String::new() };
        }
        for name in self.engines.keys().cloned().collect::<Vec<_>>() {
            if !self.hangs(&name) {
                self.engine_acts(&name);
            }
        }
        // What no resource, or one of another node, names.
        let names = |name: &String, node: &String| {
            self.engines.get(name).is_some_and(|e| e.spec.node_id == *node) || self.engines.is_empty()
        };
        let silent = |node: &String| !self.up.contains(node) || self.late.contains(node);
        let left = self.processes.clone();
        self.processes =
            left.into_iter().filter(|((name, node), _)| names(name, node) || silent(node)).collect();
    }

    /// True for an engine that was told to end and does not.
    fn hangs(&mut self, name: &str) -> bool {
        let Some(engine) = self.engines.get_mut(name).filter(|_| self.stuck.contains(name)) else {
            return false;
        };
        let hangs = engine.spec.desire_state == DesireState::Stopped;
        if let Some(status) = engine.status.as_mut().filter(|_| hangs) {
            status.current_state = InstanceState::Stopping;
        }
        hangs
    }

    fn engine_acts(&mut self, name: &str) {
        let Some(engine) = self.engines.get_mut(name) else { return };
        if !self.up.contains(&engine.spec.node_id) || self.late.contains(&engine.spec.node_id) {
            return;
        }
        let status = engine.status.get_or_insert_with(EngineStatus::default);
        let process = (name.to_owned(), engine.spec.node_id.clone());
        status.owner_id.clone_from(&engine.spec.node_id);
        if engine.spec.desire_state == DesireState::Stopped {
            let (owner_id, current_image) = (status.owner_id.clone(), status.current_image.clone());
            let current_size = status.current_size;
            *status = EngineStatus { owner_id, current_image, current_size, ..EngineStatus::default() };
            self.processes.remove(&process);
            return;
        }
        if engine.spec.relays() {
            assert!(!engine.spec.active);
            // An engine that was left there takes its device with it.
            let is_relay = *self.processes.entry(process.clone()).or_insert(true);
            if !is_relay {
                self.processes.remove(&process);
            }
            let owner_id = status.owner_id.clone();
            let state = if is_relay { InstanceState::Running } else { InstanceState::Stopping };
            *status = EngineStatus {
                owner_id,
                current_state: state,
                relaying: is_relay,
                current_image: engine.spec.image.clone(),
                ..EngineStatus::default()
            };
            return;
        }
        if self.processes.get(&process) != Some(&false) {
            // Only the volume's node gets a number.
            if self.volume.as_ref().is_none_or(|v| v.spec.node_id != process.1) {
                return;
            }
            self.processes.insert(process, false);
            self.starts += 1;
            self.first_told = engine.spec.replica_address_map.keys().cloned().collect();
        }
        let decides = self.volume.as_ref().is_some_and(|v| v.spec.quorum == Quorum::Majority);
        let taken = taken(&engine.spec.replica_address_map, status, decides);
        status.relaying = false;
        status.relay_address =
            if engine.spec.migratable { format!("unix:/{name}.relay") } else { String::new() };
        let fits = !self.unfit.contains(&(name.to_owned(), engine.spec.image.clone()));
        let images = (&mut status.current_image, &mut status.failed_image);
        exchange(&engine.spec.image, fits, images, &mut status.conditions, self.now);
        let (mut modes, mut members) = (BTreeMap::new(), Vec::new());
        for name in taken.keys() {
            let Some(replica) = self.replicas.get(name) else { continue };
            let runs = replica.status.as_ref().is_some_and(|s| s.current_state == InstanceState::Running)
                && self.up.contains(&replica.spec.node_id)
                && !self.cut_off.contains(name);
            let epoch = self.volume.as_ref().and_then(|v| v.status.as_ref()).and_then(|s| s.epoch.as_ref());
            let is_member = epoch.is_none_or(|e| e.members.contains(name)) || self.rebuilds_end;
            let mode = match (runs, is_member) {
                (true, true) => ReplicaMode::ReadWrite,
                (true, false) => ReplicaMode::WriteOnly,
                (false, _) => ReplicaMode::Error,
            };
            if mode == ReplicaMode::ReadWrite {
                members.push(name.clone());
            }
            if status.replica_mode_map.get(name) != Some(&mode) {
                status.replica_transition_time_map.insert(name.clone(), written(self.now));
            }
            modes.insert(name.clone(), mode);
        }
        // The very first start needs all of them, and where a majority decides each needs one.
        let epoch = self.volume.as_ref().and_then(|v| v.status.as_ref()).and_then(|s| s.epoch.as_ref());
        let keeps_epochs = self.volume.as_ref().is_some_and(|v| v.spec.quorum == Quorum::Any);
        let is_first = keeps_epochs && epoch.is_none() && status.current_state != InstanceState::Running;
        let told = taken.len();
        let waits = self.engine_waits_running && status.current_state == InstanceState::Running;
        let serves = !members.is_empty()
            && (!is_first || members.len() == told)
            && (!decides || waits || members.len() > told / 2);
        status.current_state = if serves { InstanceState::Running } else { InstanceState::Starting };
        status.replica_mode_map = modes;
        status.current_replica_address_map = taken;
        status.current_size = engine.spec.volume_size;
        for name in &members {
            let status = self.replicas.get_mut(name).and_then(|r| r.status.as_mut());
            let status = status.expect("it runs");
            status.generation = Some(GenerationText(Generation { attachment: 1, restart: 0 }));
            status.epoch_recorded = true;
        }
        // The authority keeps no others.
        let keeps_epochs = |v: &&mut Volume| v.spec.quorum == Quorum::Any;
        if serves && let Some(volume) = self.volume.as_mut().filter(keeps_epochs) {
            volume.status.get_or_insert_with(VolumeStatus::default).epoch =
                Some(EpochRecord { members, ..EpochRecord::default() });
        }
    }

    pub(super) fn settle(&mut self) {
        for _ in 0..60 {
            let before = (self.volume.clone(), self.engines.clone(), self.replicas.clone());
            if self.volume.is_none() {
                return;
            }
            for action in self.plan() {
                self.carry_out(action);
            }
            self.nodes_act();
            self.keep_the_rules();
            if before == (self.volume.clone(), self.engines.clone(), self.replicas.clone()) {
                return;
            }
        }
        panic!("it never settles: {:?}", self.plan());
    }

    pub(super) fn keep_the_rules(&self) {
        let sound: Vec<_> = self.replicas.values().filter(|r| r.spec.failed_at.is_empty()).collect();
        let nodes: BTreeSet<_> = sound.iter().map(|r| &r.spec.node_id).collect();
        assert!(self.crowded || nodes.len() == sound.len(), "two replicas on one node");
    }

    pub(super) fn pass(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
        self.settle();
    }

    pub(super) fn nodes(&self) -> Vec<&str> {
        let mut nodes: Vec<&str> = self.replicas.values().map(|r| r.spec.node_id.as_str()).collect();
        nodes.sort_unstable();
        nodes
    }

    pub(super) fn replica_on(&self, node: &str) -> String {
        let found = self.replicas.iter().find(|(_, r)| r.spec.node_id == node);
        found.map(|(name, _)| name.clone()).expect("a replica there")
    }
}

/// What the manager of its node says of a replica whose disk it does not find.
fn without_disk(replica: &Replica, now: Timestamp) -> ReplicaStatus {
    let trouble = format!("{}: No such file or directory", replica.spec.disk_path);
    let decided = replica::plan(&replica::Observed {
        replica,
        node: &replica.spec.node_id,
        instance_manager: "im",
        disk_trouble: Some(&trouble),
        address: "",
        map_key: "",
        process: None,
        programs: Programs { runs_target: true, installed: true },
        view: None,
        now,
    });
    let status = decided.into_iter().find_map(|action| match action {
        replica::Action::SetStatus(status) => Some(*status),
        _ => None,
    });
    status.or_else(|| replica.status.clone()).expect("a status")
}

/// Of these the replicas that an engine has. One that serves, and of whose replicas a majority decides, takes one more only if those in
/// sync are a majority of all then (`datapath`, `conductor/commands.rs`).
fn taken(told: &BTreeMap<String, String>, status: &EngineStatus, decides: bool) -> BTreeMap<String, String> {
    let known = &status.current_replica_address_map;
    if !decides || status.current_state != InstanceState::Running || known.is_empty() {
        return told.clone();
    }
    let (had, new): (BTreeMap<_, _>, BTreeMap<_, _>) =
        told.clone().into_iter().partition(|(name, _)| known.contains_key(name));
    let in_sync = |name: &&String| status.replica_mode_map.get(*name) == Some(&ReplicaMode::ReadWrite);
    let (in_sync, mut taken) = (had.keys().filter(in_sync).count(), had);
    for (name, address) in new {
        if taken.len() == 1 || in_sync > taken.len().div_ceil(2) {
            taken.insert(name, address);
        }
    }
    taken
}

/// What a node makes of an image: it serves, or the one before does again.
fn exchange(
    wanted: &str,
    fits: bool,
    images: (&mut String, &mut String),
    conditions: &mut Vec<Condition>,
    now: Timestamp,
) {
    let step = match (images.0 == wanted, fits) {
        (true, _) => return,
        (false, true) => Step::Done,
        (false, false) if images.1 == wanted => return,
        (false, false) => Step::GoBack("it is unfit".into()),
    };
    note(&step, wanted, images, conditions, now);
}
