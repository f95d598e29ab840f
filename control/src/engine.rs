//! The gRPC face of an engine: Longhorn's `ControllerService` over a handle that knows the engine.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use lh_block::{Generation, check_name};
use thiserror::Error;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::proto::ptypes;
use crate::proto::ptypes::controller_service_server::{ControllerService, ControllerServiceServer};
use crate::transport::{Identity, TrustedPeers, bind_private};
use crate::unbuilt::unbuilt;

/// Longhorn 1.12's versions, current and oldest understood.
const CLI_API: (i64, i64) = (12, 8);
const CONTROLLER_API: (i64, i64) = (6, 4);
const DATA_FORMAT: (i64, i64) = (1, 1);

/// Most snapshots of a volume: with head and backing file a chain has at most 251 layers, as in Longhorn.
const SNAPSHOTS_MAX: i32 = 249;

/// An answer that takes time.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T, EngineError>> + Send>>;

/// What a gRPC server asks an engine. Called from the server's thread; no call may block.
pub trait EngineControl: Send + Sync + 'static {
    /// The engine as it is now.
    fn status(&self) -> EngineStatus;

    /// Takes a snapshot on every member, or on none. Answers when it is durable.
    fn snapshot(&self, request: SnapshotRequest) -> Answer<()>;

    /// Takes the frontend away, flushes, closes every replica cleanly and ends the engine's process soon afterwards.
    /// Refused, with nothing changed, while somebody uses the device.
    fn shutdown(&self) -> Answer<()>;

    /// Rates since the last time it was asked.
    fn metrics(&self) -> EngineMetrics;
}

/// Why an engine did not do what it was asked. The texts are one sentence each.
#[derive(Clone, Debug, Error)]
pub enum EngineError {
    /// The request makes no sense, now or ever.
    #[error("{0}")]
    Invalid(String),
    /// The name is taken.
    #[error("{0}")]
    Exists(String),
    /// Not in this state; it may be possible later.
    #[error("{0}")]
    NotNow(String),
    /// It was tried and failed.
    #[error("{0}")]
    Failed(String),
}

impl From<EngineError> for Status {
    fn from(e: EngineError) -> Self {
        match e {
            EngineError::Invalid(text) => Self::invalid_argument(text),
            EngineError::Exists(text) => Self::already_exists(text),
            EngineError::NotNow(text) => Self::failed_precondition(text),
            EngineError::Failed(text) => Self::internal(text),
        }
    }
}

/// A snapshot to take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// Its name, checked.
    pub name: String,
    /// Labels.
    pub labels: std::collections::BTreeMap<String, String>,
}

/// An engine as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStatus {
    /// Volume.
    pub volume: String,
    /// Bytes; 0 until a replica told.
    pub size: u64,
    /// The frontend in use, never "auto"; empty until it is chosen.
    pub frontend: String,
    /// The endpoint is usable.
    pub up: bool,
    /// The block device, if there is one.
    pub device: Option<PathBuf>,
    /// The URI of what is served, if something is.
    pub uri: Option<String>,
    /// The engine's generation.
    pub generation: Generation,
    /// One sentence that says what requests wait for; empty while they are answered.
    pub waiting_for: String,
    /// Blocks that differed between members when this engine started, and were made equal.
    pub repaired_blocks: u64,
    /// Every configured replica.
    pub replicas: Vec<EngineReplica>,
}

/// A replica as its engine sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineReplica {
    /// Its name.
    pub name: String,
    /// Where it is reached.
    pub address: String,
    /// What it does for the volume.
    pub mode: ptypes::ReplicaMode,
    /// One sentence that says why it is not RW; empty if it is.
    pub reason: String,
    /// Per cent of a running rebuild.
    pub rebuild_progress: u8,
}

/// Rates per second and mean times since the last time they were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineMetrics {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Mean time of a read in nanoseconds.
    pub read_latency: u64,
    /// Mean time of a write in nanoseconds.
    pub write_latency: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

/// Serves the engine on a unix socket until it is dropped.
///
/// # Errors
/// The socket cannot be bound, or the server fails.
pub async fn serve(socket: &Path, instance: &str, engine: Arc<dyn EngineControl>) -> io::Result<()> {
    let volume = engine.status().volume;
    let identity = Identity { volume, instance: instance.to_owned(), role: "controller" };
    let service = ControllerServiceServer::with_interceptor(Service { engine }, identity);
    let peers = TrustedPeers::new(bind_private(socket)?);
    Server::builder().add_service(service).serve_with_incoming(peers).await.map_err(io::Error::other)
}

struct Service {
    engine: Arc<dyn EngineControl>,
}

impl Service {
    fn volume(&self) -> ptypes::Volume {
        let status = self.engine.status();
        let device = status.device.as_deref().map(|d| d.to_string_lossy().into_owned()).unwrap_or_default();
        let uri = status.uri.unwrap_or_default();
        ptypes::Volume {
            name: status.volume,
            size: i64::try_from(status.size).unwrap_or(i64::MAX),
            replica_count: i32::try_from(status.replicas.len()).unwrap_or(i32::MAX),
            endpoint: if device.is_empty() { uri.clone() } else { device.clone() },
            frontend: status.frontend,
            frontend_state: if status.up { "up" } else { "down" }.to_owned(),
            snapshot_max_count: SNAPSHOTS_MAX,
            device,
            uri,
            generation: status.generation.into(),
            waiting_for: status.waiting_for,
            repaired_blocks: status.repaired_blocks,
            ..Default::default()
        }
    }
}

fn replica(replica: EngineReplica) -> ptypes::ControllerReplica {
    ptypes::ControllerReplica {
        address: Some(ptypes::ReplicaAddress { address: replica.address, instance_name: replica.name }),
        mode: replica.mode.into(),
        reason: replica.reason,
        rebuild_progress: replica.rebuild_progress.into(),
    }
}

/// A name for a snapshot that has none: Longhorn's are UUIDs, too.
fn invented_name() -> Result<String, Status> {
    crate::random::uuid().map_err(|e| Status::internal(format!("no random numbers: {e}")))
}

#[tonic::async_trait]
impl ControllerService for Service {
    async fn volume_get(&self, _: Request<()>) -> Result<Response<ptypes::Volume>, Status> {
        Ok(Response::new(self.volume()))
    }

    async fn volume_shutdown(&self, _: Request<()>) -> Result<Response<ptypes::Volume>, Status> {
        self.engine.shutdown().await?;
        Ok(Response::new(self.volume()))
    }

    async fn volume_snapshot(
        &self,
        request: Request<ptypes::VolumeSnapshotRequest>,
    ) -> Result<Response<ptypes::VolumeSnapshotReply>, Status> {
        let request = request.into_inner();
        if request.freeze_filesystem {
            return Err(Status::unimplemented(
                "freezing the file system first is not built yet: run fsfreeze around the snapshot",
            ));
        }
        let name = if request.name.is_empty() { invented_name()? } else { request.name };
        check_name("snapshot", &name).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let labels = request.labels.into_iter().collect();
        self.engine.snapshot(SnapshotRequest { name: name.clone(), labels }).await?;
        Ok(Response::new(ptypes::VolumeSnapshotReply { name }))
    }

    async fn replica_list(&self, _: Request<()>) -> Result<Response<ptypes::ReplicaListReply>, Status> {
        let replicas = self.engine.status().replicas.into_iter().map(replica).collect();
        Ok(Response::new(ptypes::ReplicaListReply { replicas }))
    }

    async fn replica_get(
        &self,
        request: Request<ptypes::ReplicaAddress>,
    ) -> Result<Response<ptypes::ControllerReplica>, Status> {
        let wanted = request.into_inner();
        let found = self.engine.status().replicas.into_iter().find(|r| {
            r.address == wanted.address || !wanted.instance_name.is_empty() && r.name == wanted.instance_name
        });
        match found {
            Some(found) => Ok(Response::new(replica(found))),
            None => Err(Status::not_found(format!("there is no replica at {:?}", wanted.address))),
        }
    }

    async fn version_detail_get(
        &self,
        _: Request<()>,
    ) -> Result<Response<ptypes::VersionDetailGetReply>, Status> {
        let version = ptypes::VersionOutput {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            git_commit: String::new(),
            build_date: String::new(),
            cli_api_version: CLI_API.0,
            cli_api_min_version: CLI_API.1,
            controller_api_version: CONTROLLER_API.0,
            controller_api_min_version: CONTROLLER_API.1,
            data_format_version: DATA_FORMAT.0,
            data_format_min_version: DATA_FORMAT.1,
        };
        Ok(Response::new(ptypes::VersionDetailGetReply { version: Some(version) }))
    }

    async fn metrics_get(&self, _: Request<()>) -> Result<Response<ptypes::MetricsGetReply>, Status> {
        let metrics = self.engine.metrics();
        let metrics = ptypes::Metrics {
            read_throughput: metrics.read_bytes,
            write_throughput: metrics.write_bytes,
            read_latency: metrics.read_latency,
            write_latency: metrics.write_latency,
            read_iops: metrics.reads,
            write_iops: metrics.writes,
        };
        Ok(Response::new(ptypes::MetricsGetReply { metrics: Some(metrics) }))
    }

    unbuilt! {
        volume_start(ptypes::VolumeStartRequest) -> ptypes::Volume,
            "VolumeStart is not built: an engine starts with the replicas of its command line";
        volume_revert(ptypes::VolumeRevertRequest) -> ptypes::Volume, "VolumeRevert is not built yet";
        volume_expand(ptypes::VolumeExpandRequest) -> ptypes::Volume, "VolumeExpand is not built yet";
        volume_frontend_start(ptypes::VolumeFrontendStartRequest) -> ptypes::Volume,
            "VolumeFrontendStart is not built: an engine starts with the frontend of its command line";
        volume_frontend_shutdown(()) -> ptypes::Volume,
            "VolumeFrontendShutdown is not built: VolumeShutdown ends the frontend and the engine";
        volume_unmap_mark_snap_chain_removed_set(ptypes::VolumeUnmapMarkSnapChainRemovedSetRequest) -> ptypes::Volume,
            "VolumeUnmapMarkSnapChainRemovedSet is not built: UNMAP never touches what a snapshot needs";
        volume_snapshot_max_count_set(ptypes::VolumeSnapshotMaxCountSetRequest) -> ptypes::Volume,
            "VolumeSnapshotMaxCountSet is not built yet: the limit is 249";
        volume_snapshot_max_size_set(ptypes::VolumeSnapshotMaxSizeSetRequest) -> ptypes::Volume,
            "VolumeSnapshotMaxSizeSet is not built yet";
        volume_io(ptypes::VolumeIoRequest) -> ptypes::VolumeIoResponse,
            "VolumeIO is not built: data goes through the frontend";
        controller_replica_create(ptypes::ControllerReplicaCreateRequest) -> ptypes::ControllerReplica,
            "ControllerReplicaCreate is not built yet";
        replica_delete(ptypes::ReplicaAddress) -> (), "ReplicaDelete is not built yet";
        replica_update(ptypes::ControllerReplica) -> ptypes::ControllerReplica,
            "ReplicaUpdate is not built: the engine alone decides a replica's mode";
        replica_prepare_rebuild(ptypes::ReplicaAddress) -> ptypes::ReplicaPrepareRebuildReply,
            "ReplicaPrepareRebuild is not built: the engine rebuilds by itself";
        replica_verify_rebuild(ptypes::ReplicaAddress) -> ptypes::ControllerReplica,
            "ReplicaVerifyRebuild is not built: the engine rebuilds by itself";
        replica_rebuild_concurrent_sync_limit_set(ptypes::ReplicaRebuildConcurrentSyncLimitSetRequest) -> (),
            "ReplicaRebuildConcurrentSyncLimitSet is not built yet";
        replica_rebuild_concurrent_sync_limit_get(()) -> ptypes::ReplicaRebuildConcurrentSyncLimitGetReply,
            "ReplicaRebuildConcurrentSyncLimitGet is not built yet";
        journal_list(ptypes::JournalListRequest) -> (), "JournalList is not built: no journal is kept";
    }
}
