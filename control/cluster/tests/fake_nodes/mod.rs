//! The managers of a few nodes over an API server in memory, with agents that only fake the processes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use control::chain::Layer;
use control::logging::Level;
use lh_block::Generation;
use lh_cluster::agent::{
    Agent, AgentError, DeviceId, DiskView, EngineReplica, EngineStart, EngineView, Part, ProcessView,
    RebuildLimits, ReplicaView, TrimView,
};
use lh_cluster::api::{InstanceState, ReplicaMode, ReplicaSpec, SnapshotLimits};
use lh_cluster::plan::instance_manager::RunBy;
use lh_cluster::run::{Clock, Options, run};
use lh_cluster::settings::Given;
use serde_json::{Value, json};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tonic::async_trait;

use crate::api_server::ApiServer;

/// All processes of all nodes.
#[derive(Default)]
pub(crate) struct Machine {
    pub(crate) engines: BTreeMap<String, Vec<FakeEngine>>,
    pub(crate) replicas: BTreeMap<(String, String), Generation>,
    pub(crate) directories: BTreeSet<(String, String)>,
    pub(crate) keys: BTreeSet<(String, String)>,
    pub(crate) generations: Vec<u64>,
    /// No engine answers what would change its chain, as while it waits for its replicas.
    pub(crate) chains_are_held: bool,
    /// A replica that is made while this is so is not filled before it is so no more.
    pub(crate) rebuilds_are_held: bool,
    pub(crate) unfilled: BTreeSet<String>,
    /// No replica says anything of itself before this is so no more.
    pub(crate) replicas_are_silent: bool,
    /// Taken by whatever engine.
    pub(crate) snapshots: BTreeSet<String>,
    /// What an engine has besides, by its name.
    pub(crate) own_snapshots: BTreeMap<String, BTreeSet<String>>,
    /// Devices, by node and volume, and of which stay each is.
    pub(crate) stays: BTreeMap<(String, String), String>,
    /// Nodes whose instance manager does not answer.
    pub(crate) away: BTreeSet<String>,
    /// How often all processes of a node were listed.
    pub(crate) lists: usize,
    /// Nodes whose disk cannot be used.
    pub(crate) diskless: BTreeSet<String>,
    /// Engines let go of no replica, and say why.
    pub(crate) replicas_are_held: bool,
    /// Directories that cannot be removed.
    pub(crate) stubborn: BTreeSet<String>,
    /// No engine takes a snapshot, whatever anybody else thinks of the volume's limits.
    pub(crate) chains_are_full: bool,
    /// No engine can freeze a file system.
    pub(crate) nothing_freezes: bool,
    /// Snapshots that were taken while a file system rested.
    pub(crate) frozen: BTreeSet<String>,
    /// Engines tell of the snapshots, and remove them.
    pub(crate) chains_are_told: bool,
    /// What the kernel calls the device of each engine, by the engine's name.
    pub(crate) devices: BTreeMap<String, DeviceId>,
    /// The level at which each node was told to log, last.
    pub(crate) levels: BTreeMap<String, Level>,
    /// What drivers say of trimming; `None`: there is no driver.
    pub(crate) trimming: Option<TrimView>,
    /// Nodes and requests, as often as their drivers were asked, by volume.
    pub(crate) trims: BTreeMap<String, Vec<(String, String)>>,
}

pub(crate) struct FakeEngine {
    pub(crate) node: String,
    pub(crate) generation: Generation,
    pub(crate) size: u64,
    pub(crate) limits: SnapshotLimits,
    pub(crate) rebuild_limits: RebuildLimits,
    pub(crate) replicas: BTreeMap<String, String>,
    pub(crate) relay_from: String,
}

struct FakeAgent {
    node: String,
    server: ApiServer,
    machine: Arc<Mutex<Machine>>,
    bell: Arc<Notify>,
    /// What its engines are told to ask.
    authority: String,
}

impl FakeAgent {
    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process of this node. Each engine's number is above those of all before it; a relay has none.
    fn run(&self, start: &EngineStart<'_>) {
        let mut machine = self.machine();
        if !start.spec.relays() {
            let highest = machine.generations.iter().max().copied().unwrap_or_default();
            assert!(
                u64::from(start.generation) > highest,
                "generation {} was used already",
                start.generation
            );
            machine.generations.push(start.generation.into());
        }
        let engine = FakeEngine {
            node: self.node.clone(),
            generation: start.generation,
            size: start.spec.volume_size.bytes(),
            limits: start.spec.snapshot_limits(),
            rebuild_limits: RebuildLimits { bytes_per_second: 0, at_once: 1 },
            replicas: start.spec.replica_address_map.clone(),
            relay_from: start.spec.relay_from.clone(),
        };
        for ((_, name), seen) in &mut machine.replicas {
            if start.spec.replica_address_map.contains_key(name) {
                *seen = (*seen).max(start.generation);
            }
        }
        machine.engines.entry(start.name.to_owned()).or_default().push(engine);
        self.bell.notify_one();
    }

    fn directories(&self, disk: &std::path::Path) -> Vec<String> {
        let machine = self.machine();
        machine
            .directories
            .iter()
            .filter(|(d, _)| disk.display().to_string() == *d)
            .map(|(_, n)| n.clone())
            .collect()
    }
}

impl FakeAgent {
    fn listed(&self) -> Result<BTreeMap<String, ProcessView>, AgentError> {
        let machine = self.machine();
        if machine.away.contains(&self.node) {
            return Err(AgentError::Away("there is no instance manager".to_owned()));
        }
        let running = |relay_from: &str, authority: &str| {
            let (relay_from, authority) = (relay_from.to_owned(), authority.to_owned());
            ProcessView { state: InstanceState::Running, relay_from, authority, ..ProcessView::default() }
        };
        let engine = |(name, all): (&String, &Vec<FakeEngine>)| {
            let here = all.iter().find(|e| e.node == self.node)?;
            Some((name.clone(), running(&here.relay_from, &self.authority)))
        };
        let replicas = machine.replicas.keys().filter(|(node, _)| *node == self.node);
        let replicas = replicas.map(|(_, name)| (name.clone(), running("", "")));
        Ok(machine.engines.iter().filter_map(engine).chain(replicas).collect())
    }
}

#[async_trait]
impl Agent for FakeAgent {
    async fn processes(&self) -> Result<BTreeMap<String, ProcessView>, AgentError> {
        self.machine().lists += 1;
        self.listed()
    }

    async fn process(&self, name: &str) -> Result<Option<ProcessView>, AgentError> {
        Ok(self.listed()?.remove(name))
    }

    async fn changed(&self) {
        self.bell.notified().await;
    }

    async fn listen(&self) {
        std::future::pending().await
    }

    async fn start_replica(&self, name: &str, spec: &ReplicaSpec) -> Result<(), AgentError> {
        let mut machine = self.machine();
        assert!(machine.keys.contains(&(self.node.clone(), spec.volume_name.clone())), "no key for {name}");
        machine.replicas.entry((self.node.clone(), name.to_owned())).or_default();
        let is_new = machine.directories.insert((spec.disk_path.clone(), spec.data_directory_name.clone()));
        // Whoever is given it first, and an engine that starts with it, finds it empty.
        if is_new && machine.rebuilds_are_held {
            machine.unfilled.insert(name.to_owned());
        }
        self.bell.notify_one();
        Ok(())
    }

    async fn start_engine(&self, start: EngineStart<'_>) -> Result<(), AgentError> {
        // Whoever detaches or deletes the volume from now on knows that there is a process.
        let status = self.server.get("engines", start.name).map(|e| e["status"].clone()).unwrap_or_default();
        assert_eq!((&status["currentState"], &status["ownerID"]), (&json!("starting"), &json!(self.node)));
        self.run(&start);
        Ok(())
    }

    async fn exchange(&self, _: &str, _: Part<'_>) -> Result<(), AgentError> {
        Err(AgentError::Unbuilt("there are no programs here".to_owned()))
    }

    async fn take_over(&self, start: EngineStart<'_>) -> Result<(), AgentError> {
        for all in self.machine().engines.values_mut() {
            all.retain(|e| e.node != self.node || e.relay_from.is_empty());
        }
        self.run(&start);
        Ok(())
    }

    fn program(&self, image: &str) -> PathBuf {
        image.into()
    }

    async fn has_program(&self, _: &str) -> bool {
        true
    }

    async fn install_program(&self, _: &str) -> Result<(), AgentError> {
        Ok(())
    }

    async fn stop(&self, name: &str) -> Result<(), AgentError> {
        let mut machine = self.machine();
        if let Some(all) = machine.engines.get_mut(name) {
            all.retain(|e| e.node != self.node);
        }
        machine.replicas.remove(&(self.node.clone(), name.to_owned()));
        self.bell.notify_one();
        Ok(())
    }

    async fn engine(&self, name: &str) -> Option<EngineView> {
        let machine = self.machine();
        let engine = machine.engines.get(name)?.iter().find(|e| e.node == self.node)?;
        let runs = |replica: &str| machine.replicas.keys().any(|(_, name)| name == replica);
        let replica = |(name, address): (&String, &String)| EngineReplica {
            name: name.clone(),
            address: address.clone(),
            mode: match runs(name) {
                true if machine.rebuilds_are_held && machine.unfilled.contains(name) => {
                    ReplicaMode::WriteOnly
                }
                true => ReplicaMode::ReadWrite,
                false => ReplicaMode::Error,
            },
            ..EngineReplica::default()
        };
        Some(EngineView {
            up: !engine.relay_from.is_empty() || engine.replicas.keys().any(|name| runs(name)),
            size: engine.size,
            snapshot_limits: engine.limits,
            rebuild_limits: engine.rebuild_limits,
            endpoint: format!("/dev/longhorn/{}", name.trim_end_matches("-e-0")),
            device: machine.devices.get(name).cloned(),
            generation: engine.generation,
            replicas: engine.replicas.iter().map(replica).collect(),
            relay_from: engine.relay_from.clone(),
            chain: machine.chains_are_told.then(|| {
                let own = machine.own_snapshots.get(name).into_iter().flatten();
                chain(&machine.snapshots.iter().chain(own).cloned().collect())
            }),
            ..EngineView::default()
        })
    }

    async fn replica(&self, name: &str) -> Option<ReplicaView> {
        if self.machine().replicas_are_silent {
            return None;
        }
        let seen = *self.machine().replicas.get(&(self.node.clone(), name.to_owned()))?;
        Some(ReplicaView { generation: seen, epoch_recorded: false })
    }

    fn replica_address(&self, name: &str, _: &ProcessView) -> String {
        format!("unix:/{}/{name}.sock", self.node)
    }

    fn relay_address(&self, name: &str, _: &ProcessView) -> String {
        format!("unix:/{}/{name}.relay.sock", self.node)
    }

    async fn add_replica(&self, engine: &str, name: &str, address: &str) -> Result<(), AgentError> {
        let mut machine = self.machine();
        for engine in machine.engines.get_mut(engine).into_iter().flatten() {
            engine.replicas.insert(name.to_owned(), address.to_owned());
        }
        Ok(())
    }

    async fn remove_replica(&self, engine: &str, name: &str) -> Result<(), AgentError> {
        if self.machine().replicas_are_held {
            return Err(AgentError::Failed(format!("replica {name} cannot leave: too few are left")));
        }
        for engine in self.machine().engines.get_mut(engine).into_iter().flatten() {
            engine.replicas.remove(name);
        }
        Ok(())
    }

    async fn expand(&self, engine: &str, size: u64) -> Result<(), AgentError> {
        for engine in self.machine().engines.get_mut(engine).into_iter().flatten() {
            engine.size = size;
        }
        Ok(())
    }

    async fn limit_snapshots(&self, engine: &str, limits: SnapshotLimits) -> Result<(), AgentError> {
        for engine in self.machine().engines.get_mut(engine).into_iter().flatten() {
            engine.limits = limits;
        }
        Ok(())
    }

    async fn limit_rebuilds(&self, engine: &str, limits: RebuildLimits) -> Result<(), AgentError> {
        for engine in self.machine().engines.get_mut(engine).into_iter().flatten() {
            engine.rebuild_limits = limits;
        }
        Ok(())
    }

    async fn take_snapshot(
        &self,
        _: &str,
        name: &str,
        _: &BTreeMap<String, String>,
        freeze: bool,
    ) -> Result<(), AgentError> {
        if self.machine().chains_are_held {
            std::future::pending::<()>().await;
        }
        if freeze && self.machine().nothing_freezes {
            return Err(AgentError::NotFrozen("it is frozen already".to_owned()));
        }
        if self.machine().chains_are_full {
            return Err(AgentError::NoRoom("the volume has as many snapshots as it may".to_owned()));
        }
        let mut machine = self.machine();
        machine.snapshots.insert(name.to_owned());
        if freeze {
            machine.frozen.insert(name.to_owned());
        }
        Ok(())
    }

    async fn remove_snapshot(&self, _: &str, name: &str) -> Result<(), AgentError> {
        self.machine().snapshots.remove(name);
        Ok(())
    }

    async fn trim(&self, volume: &str, request: &str) -> Result<TrimView, AgentError> {
        let mut machine = self.machine();
        let asked = (self.node.clone(), request.to_owned());
        machine.trims.entry(volume.to_owned()).or_default().push(asked);
        machine.trimming.clone().ok_or_else(|| AgentError::DriverAway("there is none".to_owned()))
    }

    async fn log_at(&self, level: Level) -> Result<(), AgentError> {
        self.machine().levels.insert(self.node.clone(), level);
        Ok(())
    }

    async fn inspect_disk(&self, path: PathBuf) -> Result<DiskView, String> {
        if self.machine().diskless.contains(&self.node) {
            return Err(format!("{}: No such file or directory", path.display()));
        }
        Ok(DiskView {
            uuid: format!("disk-of-{}", self.node),
            filesystem_id: path.display().to_string(),
            maximum: 1 << 40,
            available: 1 << 40,
            directories: self.directories(&path),
            ..DiskView::default()
        })
    }

    async fn remove_directory(&self, disk_path: PathBuf, directory: String) -> Result<(), AgentError> {
        if self.machine().stubborn.contains(&directory) {
            return Err(AgentError::Failed("Input/output error".to_owned()));
        }
        self.machine().directories.remove(&(disk_path.display().to_string(), directory));
        Ok(())
    }

    async fn devices(&self) -> BTreeMap<String, String> {
        let all = self.machine().stays.clone();
        all.into_iter().filter(|((node, _), _)| *node == self.node).map(|((_, v), stay)| (v, stay)).collect()
    }

    async fn kept_volumes(&self) -> BTreeSet<String> {
        let keys = self.machine().keys.clone();
        keys.into_iter().filter(|(node, _)| *node == self.node).map(|(_, volume)| volume).collect()
    }

    async fn forget_volume(&self, volume: &str) -> Result<(), AgentError> {
        self.machine().keys.remove(&(self.node.clone(), volume.to_owned()));
        Ok(())
    }

    async fn end_stay(&self, volume: &str, stay: &str, _: &str) -> Result<(), AgentError> {
        let place = (self.node.clone(), volume.to_owned());
        self.machine().stays.retain(|at, of| *at != place || of != stay);
        Ok(())
    }

    async fn store_key(&self, volume: &str, key: &[u8]) -> Result<(), AgentError> {
        assert_eq!(key.len(), 32);
        self.machine().keys.insert((self.node.clone(), volume.to_owned()));
        Ok(())
    }
}

/// The head, over whatever snapshots there are.
fn chain(snapshots: &BTreeSet<String>) -> Vec<Layer> {
    let layer = |name: &str| Layer {
        name: name.to_owned(),
        created: "2026-01-01T00:00:00Z".to_owned(),
        user_created: true,
        ..Layer::default()
    };
    [""].into_iter().chain(snapshots.iter().map(String::as_str)).map(layer).collect()
}

/// Managers that end with this.
pub(crate) struct Cluster {
    pub(crate) server: ApiServer,
    pub(crate) machine: Arc<Mutex<Machine>>,
    pub(crate) bells: BTreeMap<String, Arc<Notify>>,
    managers: BTreeMap<String, (oneshot::Sender<()>, JoinHandle<()>)>,
    pub(crate) scratch: tempfile::TempDir,
    /// Who runs the instance managers of nodes that are begun from now on.
    pub(crate) run_by: RunBy,
    /// Defaults of settings that managers have which begin from now on.
    pub(crate) given: Given,
}

impl Cluster {
    pub(crate) async fn new(nodes: &[&str], seed: u64) -> Self {
        let server = ApiServer::new(seed);
        let mut cluster = Self {
            server,
            machine: Arc::default(),
            bells: BTreeMap::new(),
            managers: BTreeMap::new(),
            scratch: tempfile::tempdir().unwrap(),
            run_by: RunBy::Others,
            given: Given::default(),
        };
        nodes.iter().for_each(|node| cluster.add(node));
        cluster
    }

    /// One more node, in a zone of its own.
    pub(crate) fn add(&mut self, node: &str) {
        let labels = json!({ "topology.kubernetes.io/zone": format!("zone-{node}") });
        self.server.apply("core/nodes", node, &json!({ "metadata": { "labels": labels } }));
        self.start(node);
    }

    pub(crate) fn start(&mut self, node: &str) {
        let bell = self.bells.entry(node.to_owned()).or_default().clone();
        let (machine, server) = (Arc::clone(&self.machine), self.server.clone());
        let authority = self.scratch.path().join(format!("{node}.sock"));
        let told = format!("unix:{}", authority.display());
        let agent = FakeAgent { node: node.to_owned(), server, machine, bell, authority: told };
        let options = Options {
            node: node.to_owned(),
            namespace: "longhorn-system".to_owned(),
            root: format!("/root-{node}").into(),
            instance_manager: self.run_by,
            image: "longhorn:test".to_owned(),
            authority,
            webhook: None,
            settings: Arc::new(self.given.clone()),
            clock: Clock::default(),
        };
        let (stop, stopped) = oneshot::channel();
        let client = self.server.client_of(node);
        let manager = tokio::spawn(async move {
            run(options, client, Arc::new(agent), async { drop(stopped.await) })
                .await
                .expect("the manager runs");
        });
        self.managers.insert(node.to_owned(), (stop, manager));
    }

    /// A node's manager ends. It has ended when this returns, and does nothing of what is wanted from then on.
    #[allow(dead_code, reason = "some tests leave all of them alone")]
    pub(crate) async fn stop(&mut self, node: &str) {
        let (stop, manager) = self.managers.remove(node).expect("it runs");
        drop(stop);
        manager.await.expect("it ends well");
    }

    pub(crate) fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) async fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        // Long enough for a loaded machine; the usual wait is a second.
        self.wait_for(Duration::from_secs(60), what, done).await;
    }

    pub(crate) async fn wait_for(&self, patience: Duration, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + patience;
        while !done(self) {
            assert!(
                Instant::now() < deadline,
                "{what} did not happen: {:#?}\n{:#?}\n{:#?}",
                self.server.all("volumes"),
                self.server.all("engines"),
                self.server.all("replicas"),
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn volume(&self, field: &str) -> Value {
        self.server.get("volumes", "demo").map(|v| v["status"][field].clone()).unwrap_or_default()
    }

    pub(crate) fn create_volume(&self) {
        self.create("demo", 3);
    }

    pub(crate) fn create(&self, volume: &str, replicas: u32) {
        let spec = json!({ "size": "1073741824", "numberOfReplicas": replicas });
        self.server.apply(
            "volumes",
            volume,
            &json!({
                "apiVersion": "longhorn.io/v1beta2", "kind": "Volume", "spec": spec,
            }),
        );
    }

    pub(crate) fn ticket(&self, node: Option<&str>) {
        let ticket = node.map(|n| json!({ "id": "csi", "type": "csi-attacher", "nodeID": n }));
        self.server.apply(
            "volumeattachments",
            "demo",
            &json!({ "spec": { "attachmentTickets": { "csi": ticket } } }),
        );
    }

    pub(crate) async fn attached_volume(&self) {
        self.wait("three nodes", |c| nodes_ready(c) >= 3).await;
        self.create_volume();
        self.wait("detached", |c| c.volume("state") == "detached" && c.server.all("replicas").len() == 3)
            .await;
        self.ticket(Some("n1"));
        self.wait("attached", |c| c.volume("state") == "attached" && c.volume("robustness") == "healthy")
            .await;
    }
}

pub(crate) fn nodes_ready(cluster: &Cluster) -> usize {
    let ready = |node: &Value| {
        let conditions = node["status"]["conditions"].as_array();
        let has_disk = node["status"]["diskStatus"].as_object().is_some_and(|d| !d.is_empty());
        has_disk
            && conditions.is_some_and(|all| all.iter().any(|c| c["type"] == "Ready" && c["status"] == "True"))
    };
    cluster.server.all("nodes").iter().filter(|n| ready(n)).count()
}
