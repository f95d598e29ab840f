//! The managers of many nodes in one process, each with a client, watches and leases of its own, whose agents only fake the
//! processes: for `tests/cluster/scale`. `scale FIRST LAST FOLDER` runs node-FIRST to node-LAST; what "runs" on a node is kept
//! in FOLDER, so that it goes on when this program ends, as real processes do.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use control::chain::Layer;
use control::logging::Level;
use lh_block::Generation;
use lh_cluster::agent::{
    Agent, AgentError, DiskView, EngineReplica, EngineStart, EngineView, Part, ProcessView, RebuildLimits,
    ReplicaView, TrimView,
};
use lh_cluster::api::{InstanceState, NAMESPACE, ReplicaMode, ReplicaSpec, SnapshotLimits};
use lh_cluster::plan::instance_manager::RunBy;
use lh_cluster::run::{Clock, Options, run};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tonic::async_trait;

/// Bytes of every disk, of which half are free.
const DISK: u64 = 1 << 44;

#[derive(Default, Serialize, Deserialize)]
struct Processes {
    engines: BTreeMap<String, Engine>,
    /// The highest generation that each replica has seen.
    replicas: BTreeMap<String, u64>,
}

#[derive(Clone, Serialize, Deserialize)]
struct Engine {
    generation: u64,
    size: u64,
    replicas: BTreeMap<String, String>,
}

/// A node whose processes are entries in a file.
struct PretendedNode {
    name: String,
    file: PathBuf,
    processes: Mutex<Processes>,
    bell: Notify,
    begun: Instant,
}

impl PretendedNode {
    fn open(name: String, folder: &Path) -> io::Result<Self> {
        let file = folder.join(format!("{name}.json"));
        let processes = match std::fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Processes::default(),
            Err(e) => return Err(e),
        };
        let (bell, begun) = (Notify::new(), Instant::now());
        // As with the first list of real processes: what is there is news.
        bell.notify_one();
        Ok(Self { name, file, processes: Mutex::new(processes), bell, begun })
    }

    fn processes(&self) -> MutexGuard<'_, Processes> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Processes)) -> Result<(), AgentError> {
        let bytes = {
            let mut processes = self.processes();
            change(&mut processes);
            serde_json::to_vec(&*processes)
        };
        let failed = |e: String| AgentError::Failed(format!("{}: {e}", self.file.display()));
        std::fs::write(&self.file, bytes.map_err(|e| failed(e.to_string()))?)
            .map_err(|e| failed(e.to_string()))?;
        self.bell.notify_one();
        Ok(())
    }
}

#[async_trait]
impl Agent for PretendedNode {
    async fn processes(&self) -> Result<BTreeMap<String, ProcessView>, AgentError> {
        let processes = self.processes();
        let running = || ProcessView { state: InstanceState::Running, ..ProcessView::default() };
        let names: BTreeSet<&String> = processes.engines.keys().chain(processes.replicas.keys()).collect();
        Ok(names.into_iter().map(|name| (name.clone(), running())).collect())
    }

    async fn changed(&self) {
        self.bell.notified().await;
    }

    async fn listen(&self) {
        std::future::pending().await
    }

    async fn start_replica(&self, name: &str, _: &ReplicaSpec) -> Result<(), AgentError> {
        self.change(|p| {
            p.replicas.entry(name.to_owned()).or_default();
        })
    }

    async fn start_engine(&self, start: EngineStart<'_>) -> Result<(), AgentError> {
        let engine = Engine {
            generation: start.generation.into(),
            size: start.spec.volume_size.bytes(),
            replicas: start.spec.replica_address_map.clone(),
        };
        self.change(|p| drop(p.engines.insert(start.name.to_owned(), engine)))
    }

    async fn exchange(&self, _: &str, _: Part<'_>) -> Result<(), AgentError> {
        Err(AgentError::Unbuilt("there are no programs here".to_owned()))
    }

    async fn take_over(&self, _: EngineStart<'_>) -> Result<(), AgentError> {
        Err(AgentError::Unbuilt("nothing migrates here".to_owned()))
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
        self.change(|p| {
            p.engines.remove(name);
            p.replicas.remove(name);
        })
    }

    async fn engine(&self, name: &str) -> Option<EngineView> {
        let engine = self.processes().engines.get(name)?.clone();
        let replica = |(name, address): (String, String)| EngineReplica {
            name,
            address,
            mode: ReplicaMode::ReadWrite,
            ..EngineReplica::default()
        };
        // All volumes are written to: a block more with every round.
        let allocated = 4096 * (1 + self.begun.elapsed().as_secs() / 5);
        let head = Layer { created: "2026-01-01T00:00:00Z".to_owned(), allocated, ..Layer::default() };
        Some(EngineView {
            up: true,
            size: engine.size,
            endpoint: format!("/dev/longhorn/{}", name.trim_end_matches("-e-0")),
            generation: engine.generation.into(),
            replicas: engine.replicas.into_iter().map(replica).collect(),
            chain: Some(vec![head]),
            ..EngineView::default()
        })
    }

    async fn replica(&self, name: &str) -> Option<ReplicaView> {
        let seen = *self.processes().replicas.get(name)?;
        Some(ReplicaView { generation: Generation::from(seen), epoch_recorded: true })
    }

    fn replica_address(&self, name: &str, _: &ProcessView) -> String {
        format!("unix:/nodes/{}/run/{name}.data.sock", self.name)
    }

    fn relay_address(&self, name: &str, _: &ProcessView) -> String {
        format!("unix:/nodes/{}/run/{name}.relay.sock", self.name)
    }

    async fn add_replica(&self, engine: &str, name: &str, address: &str) -> Result<(), AgentError> {
        self.change(|p| {
            if let Some(engine) = p.engines.get_mut(engine) {
                engine.replicas.insert(name.to_owned(), address.to_owned());
            }
        })
    }

    async fn remove_replica(&self, engine: &str, name: &str) -> Result<(), AgentError> {
        self.change(|p| {
            if let Some(engine) = p.engines.get_mut(engine) {
                engine.replicas.remove(name);
            }
        })
    }

    async fn expand(&self, engine: &str, size: u64) -> Result<(), AgentError> {
        self.change(|p| {
            if let Some(engine) = p.engines.get_mut(engine) {
                engine.size = size;
            }
        })
    }

    async fn limit_snapshots(&self, _: &str, _: SnapshotLimits) -> Result<(), AgentError> {
        Ok(())
    }

    async fn limit_rebuilds(&self, _: &str, _: RebuildLimits) -> Result<(), AgentError> {
        Ok(())
    }

    async fn take_snapshot(
        &self,
        _: &str,
        _: &str,
        _: &BTreeMap<String, String>,
        _: bool,
    ) -> Result<(), AgentError> {
        Err(AgentError::Unbuilt("nothing is snapshotted here".to_owned()))
    }

    async fn remove_snapshot(&self, _: &str, _: &str) -> Result<(), AgentError> {
        Ok(())
    }

    async fn trim(&self, _: &str, _: &str) -> Result<TrimView, AgentError> {
        Err(AgentError::Unbuilt("nothing is mounted here".to_owned()))
    }

    async fn devices(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    async fn end_stay(&self, volume: &str, _: &str, _: &str) -> Result<(), AgentError> {
        Err(AgentError::Failed(format!("{volume} has no device here")))
    }

    async fn kept_volumes(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }

    async fn forget_volume(&self, volume: &str) -> Result<(), AgentError> {
        Err(AgentError::Failed(format!("nothing of {volume} is kept here")))
    }

    async fn log_at(&self, _: Level) -> Result<(), AgentError> {
        Ok(())
    }

    async fn inspect_disk(&self, _: PathBuf) -> Result<DiskView, String> {
        Ok(DiskView {
            uuid: format!("disk-of-{}", self.name),
            filesystem_id: self.name.clone(),
            filesystem_type: "xfs".to_owned(),
            maximum: DISK,
            available: DISK / 2,
            directories: Vec::new(),
        })
    }

    async fn remove_directory(&self, _: PathBuf, _: String) -> Result<(), AgentError> {
        Ok(())
    }

    async fn store_key(&self, _: &str, _: &[u8]) -> Result<(), AgentError> {
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(io::stderr)
        .init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [first, last, folder] = args.as_slice() else { return Err("usage: scale FIRST LAST FOLDER".into()) };
    let (first, last, folder) = (first.parse::<u32>()?, last.parse::<u32>()?, PathBuf::from(folder));
    let mut managers = tokio::task::JoinSet::new();
    for node in first..=last {
        let name = format!("node-{node}");
        let agent = Arc::new(PretendedNode::open(name.clone(), &folder)?);
        let options = Options {
            authority: folder.join(format!("{name}.sock")),
            root: PathBuf::from(format!("/nodes/{name}")),
            node: name,
            namespace: NAMESPACE.to_owned(),
            instance_manager: RunBy::Others,
            image: "longhorn:scale".to_owned(),
            webhook: None,
            settings: Arc::default(),
            clock: Clock::default(),
        };
        let client = kube::Client::try_default().await?;
        managers.spawn(run(options, client, agent, std::future::pending()));
        // A cluster's nodes do not start in one moment either, and each begins with a dozen lists.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    match managers.join_next().await {
        Some(ended) => Ok(ended??),
        None => Ok(()),
    }
}
