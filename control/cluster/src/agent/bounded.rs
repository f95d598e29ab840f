//! A node whose calls end: none waits for a process, a disk or an instance manager for ever.
//!
//! A call that is cut short may be carried out all the same, and whoever looks again finds that done or asks for it once
//! more. Each call of [`Agent`] may be asked for twice: what is started is there already, what is stopped is not listed, a
//! snapshot exists, or is marked or gone, a file system is trimmed once for a request, a replica is known to its engine or is
//! not, a size or a level is reached.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use control::logging::Level;
use tonic::async_trait;

use super::local;
use super::{
    Agent, AgentError, DiskView, EngineStart, EngineView, Part, ProcessView, RebuildLimits, ReplicaView,
    TrimView,
};
use crate::api::{ReplicaSpec, SnapshotLimits};

/// How long a call may take. What a healthy engine is asked to change takes it less than a second; one that waits for its
/// replicas does nothing of it before they are back, and that may be hours.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The same for a relay's end, which the agent itself waits for.
const TAKE_OVER_PATIENCE: Duration = local::TAKE_OVER_PATIENCE.saturating_add(PATIENCE);

/// The same node, with an end to each of its calls.
pub(crate) struct Bounded<A: ?Sized> {
    node: Arc<A>,
    patience: Duration,
}

impl<A: Agent + ?Sized> Bounded<A> {
    pub(crate) fn new(node: Arc<A>) -> Self {
        Self { node, patience: PATIENCE }
    }

    async fn ends<T>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<T, AgentError>>,
    ) -> Result<T, AgentError> {
        within(self.patience, what, call).await
    }
}

async fn within<T>(
    patience: Duration,
    what: &'static str,
    call: impl Future<Output = Result<T, AgentError>>,
) -> Result<T, AgentError> {
    match tokio::time::timeout(patience, call).await {
        Ok(answer) => answer,
        Err(_) => Err(AgentError::Late(what, patience)),
    }
}

#[async_trait]
impl<A: Agent + ?Sized> Agent for Bounded<A> {
    async fn processes(&self) -> Result<BTreeMap<String, ProcessView>, AgentError> {
        self.ends("to list its processes", self.node.processes()).await
    }

    async fn process(&self, name: &str) -> Result<Option<ProcessView>, AgentError> {
        self.ends("for one of its processes", self.node.process(name)).await
    }

    async fn changed(&self) {
        self.node.changed().await;
    }

    async fn listen(&self) {
        self.node.listen().await;
    }

    async fn start_replica(&self, name: &str, spec: &ReplicaSpec) -> Result<(), AgentError> {
        self.ends("to start a replica", self.node.start_replica(name, spec)).await
    }

    async fn start_engine(&self, start: EngineStart<'_>) -> Result<(), AgentError> {
        self.ends("to start an engine", self.node.start_engine(start)).await
    }

    async fn exchange(&self, name: &str, part: Part<'_>) -> Result<(), AgentError> {
        self.ends("to exchange a program", self.node.exchange(name, part)).await
    }

    async fn take_over(&self, start: EngineStart<'_>) -> Result<(), AgentError> {
        within(TAKE_OVER_PATIENCE, "to end a relay", self.node.take_over(start)).await
    }

    fn program(&self, image: &str) -> PathBuf {
        self.node.program(image)
    }

    // Not cut short: that a program is away would be an answer, and all others wait for the same disk.
    async fn has_program(&self, image: &str) -> bool {
        self.node.has_program(image).await
    }

    // Nor is this, of which there is one at a time: a copy that goes on is not begun a second time beside it.
    async fn install_program(&self, image: &str) -> Result<(), AgentError> {
        self.node.install_program(image).await
    }

    async fn stop(&self, name: &str) -> Result<(), AgentError> {
        self.ends("to end a process", self.node.stop(name)).await
    }

    async fn engine(&self, name: &str) -> Option<EngineView> {
        tokio::time::timeout(self.patience, self.node.engine(name)).await.ok()?
    }

    async fn replica(&self, name: &str) -> Option<ReplicaView> {
        tokio::time::timeout(self.patience, self.node.replica(name)).await.ok()?
    }

    fn replica_address(&self, name: &str, process: &ProcessView) -> String {
        self.node.replica_address(name, process)
    }

    fn relay_address(&self, name: &str, process: &ProcessView) -> String {
        self.node.relay_address(name, process)
    }

    async fn add_replica(&self, engine: &str, name: &str, address: &str) -> Result<(), AgentError> {
        self.ends("to add a replica", self.node.add_replica(engine, name, address)).await
    }

    async fn remove_replica(&self, engine: &str, name: &str) -> Result<(), AgentError> {
        self.ends("to let go of a replica", self.node.remove_replica(engine, name)).await
    }

    async fn expand(&self, engine: &str, size: u64) -> Result<(), AgentError> {
        self.ends("to grow the volume", self.node.expand(engine, size)).await
    }

    async fn limit_snapshots(&self, engine: &str, limits: SnapshotLimits) -> Result<(), AgentError> {
        self.ends("to limit snapshots", self.node.limit_snapshots(engine, limits)).await
    }

    async fn limit_rebuilds(&self, engine: &str, limits: RebuildLimits) -> Result<(), AgentError> {
        self.ends("to limit rebuilds", self.node.limit_rebuilds(engine, limits)).await
    }

    async fn take_snapshot(
        &self,
        engine: &str,
        name: &str,
        labels: &BTreeMap<String, String>,
        freeze: bool,
    ) -> Result<(), AgentError> {
        self.ends("to take a snapshot", self.node.take_snapshot(engine, name, labels, freeze)).await
    }

    async fn remove_snapshot(&self, engine: &str, name: &str) -> Result<(), AgentError> {
        self.ends("to remove a snapshot", self.node.remove_snapshot(engine, name)).await
    }

    async fn trim(&self, volume: &str, request: &str) -> Result<TrimView, AgentError> {
        self.ends("to trim a file system", self.node.trim(volume, request)).await
    }

    async fn devices(&self) -> BTreeMap<String, String> {
        tokio::time::timeout(self.patience, self.node.devices()).await.unwrap_or_default()
    }

    async fn end_stay(&self, volume: &str, stay: &str, image: &str) -> Result<(), AgentError> {
        self.ends("to take a device away", self.node.end_stay(volume, stay, image)).await
    }

    async fn kept_volumes(&self) -> BTreeSet<String> {
        tokio::time::timeout(self.patience, self.node.kept_volumes()).await.unwrap_or_default()
    }

    async fn forget_volume(&self, volume: &str) -> Result<(), AgentError> {
        self.ends("to forget a volume", self.node.forget_volume(volume)).await
    }

    async fn log_at(&self, level: Level) -> Result<(), AgentError> {
        self.ends("to log at another level", self.node.log_at(level)).await
    }

    async fn inspect_disk(&self, path: PathBuf) -> Result<DiskView, String> {
        match tokio::time::timeout(self.patience, self.node.inspect_disk(path)).await {
            Ok(view) => view,
            Err(_) => Err(format!("the disk did not answer within {} s", self.patience.as_secs())),
        }
    }

    async fn remove_directory(&self, disk_path: PathBuf, directory: String) -> Result<(), AgentError> {
        self.ends("to remove a replica's directory", self.node.remove_directory(disk_path, directory)).await
    }

    async fn store_key(&self, volume: &str, key: &[u8]) -> Result<(), AgentError> {
        self.ends("to store a volume's key", self.node.store_key(volume, key)).await
    }
}
