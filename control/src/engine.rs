//! The gRPC face of an engine: Longhorn's `ControllerService` over a handle that knows the engine.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use lh_block::{Address, BLOCK, Generation, check_name};
use thiserror::Error;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::cloning::{CloneProgress, CloneSource};
use crate::host::SNAPSHOT_COUNT;
use crate::proto::ptypes;
use crate::proto::ptypes::controller_service_server::{ControllerService, ControllerServiceServer};
use crate::transport::{Identity, TrustedPeers, bind_private};
use crate::unbuilt::unbuilt;

/// Longhorn 1.12's versions, current and oldest understood.
const CLI_API: (i64, i64) = (12, 8);
const CONTROLLER_API: (i64, i64) = (6, 4);
const DATA_FORMAT: (i64, i64) = (1, 1);

/// An answer that takes time.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T, EngineError>> + Send>>;

/// What a gRPC server asks an engine. Called from the server's thread; no call may block.
pub trait EngineControl: Send + Sync + 'static {
    /// The engine as it is now.
    fn status(&self) -> EngineStatus;

    /// Takes a snapshot on every member, or on none. Answers when it is durable.
    fn snapshot(&self, request: SnapshotRequest) -> Answer<()>;

    /// Carries out an operation of the volume. Answers when it is durable, or has begun, as each says.
    fn operate(&self, operation: Operation) -> Answer<()>;

    /// How far folding is, for each replica that folds or failed to.
    fn purges(&self) -> Vec<PurgeProgress>;

    /// The scrub that runs, or the last one since the engine started.
    fn scrub(&self) -> Option<ScrubProgress>;

    /// Fills the volume, which is empty and shown nowhere, from a snapshot of another one. Answers when it holds all of
    /// it, and is carried on if nobody waits any more.
    fn fill_from(&self, source: CloneSource) -> Answer<()>;

    /// The clone that runs, or the last one since the engine started.
    fn cloning(&self) -> Option<CloneProgress>;

    /// Takes the frontend away, flushes, closes every replica cleanly and ends the engine's process soon afterwards.
    /// Refused, with nothing changed, while somebody uses the device.
    fn shutdown(&self) -> Answer<()>;

    /// What it did lately; see the message's own description.
    fn activity(&self) -> ptypes::Activity;
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
    /// There is no such snapshot or replica.
    #[error("{0}")]
    NotFound(String),
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
            EngineError::NotFound(text) => Self::not_found(text),
            EngineError::NotNow(text) => Self::failed_precondition(text),
            EngineError::Failed(text) => Self::internal(text),
        }
    }
}

/// What a volume can be asked beyond a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Marks a snapshot as removed, on every member or on none. Answers when that is durable.
    RemoveSnapshot {
        /// Its name.
        name: String,
    },
    /// Begins to fold removed snapshots away.
    Purge,
    /// Makes the volume's bytes those of a snapshot. Refused while something is shown. Answers when it is durable.
    Revert {
        /// The snapshot's name, checked.
        name: String,
    },
    /// Makes the volume larger. Answers when it is durable and the frontend shows it.
    Expand {
        /// Bytes.
        size: u64,
    },
    /// Adds a replica, which is then brought in sync. Answers as soon as it is configured.
    AddReplica {
        /// Its name.
        name: String,
        /// `unix:PATH`.
        address: String,
    },
    /// Takes a replica out.
    RemoveReplica {
        /// Its name.
        name: String,
    },
    /// Brings a replica in sync anew.
    RebuildReplica {
        /// Its name.
        name: String,
    },
    /// Changes bounds, at once and until the engine ends.
    SetLimits(NewLimits),
    /// Shows the volume, which nothing shows now, by the frontend that the engine was started with.
    ShowFrontend {
        /// Its name, this project's or Longhorn's.
        frontend: String,
    },
    /// Takes the frontend away; the engine goes on. Refused while somebody uses the device.
    HideFrontend,
    /// Begins to compare the replicas with each other and with their checksums.
    Scrub {
        /// Repair what is rotten.
        repair: bool,
        /// Bytes of the volume in a second; 0: as fast as it goes.
        bytes_per_second: u64,
    },
    /// Ends the scrub that runs.
    CancelScrub,
}

/// How far a scrub is, and what it has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubProgress {
    /// It has not ended.
    pub running: bool,
    /// What is found is repaired.
    pub repair: bool,
    /// What it looks at or waits for, for people.
    pub doing: String,
    /// Bytes done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
    /// What it has found: the first 4096.
    pub findings: Vec<ScrubFinding>,
    /// Blocks found wrong in all.
    pub bad_blocks: u64,
    /// Blocks of these that are sound again.
    pub repaired_blocks: u64,
    /// One sentence for each snapshot of which a replica could not take checksums.
    pub notes: Vec<String>,
    /// Why it ended before it was through; empty if it did not.
    pub error: String,
}

/// Some neighbouring blocks of one replica that are not as they should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubFinding {
    /// Whose.
    pub replica: String,
    /// Name of the snapshot; empty: the head.
    pub layer: String,
    /// Where, in bytes.
    pub offset: u64,
    /// How long, in bytes.
    pub length: u64,
    /// "rotten" or "differs".
    pub flaw: &'static str,
    /// "reported", "repaired", "no_source", "unsure", "conflict" or "failed".
    pub done: &'static str,
}

/// How far a replica is with folding a snapshot away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PurgeProgress {
    /// The replica.
    pub replica: String,
    /// It is not through yet.
    pub running: bool,
    /// The snapshot that goes; empty if none does now.
    pub snapshot: String,
    /// Bytes done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
    /// Why the last fold did not end; empty if it did.
    pub error: String,
    /// Removed snapshots that stay for now, and why: a sentence each.
    pub kept: Vec<(String, String)>,
}

/// A snapshot to take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// Its name, checked.
    pub name: String,
    /// Labels.
    pub labels: std::collections::BTreeMap<String, String>,
    /// The file system that is mounted from the volume's device rests meanwhile, if one is.
    pub freeze: bool,
}

/// Bounds of a volume that can be changed while it runs; `None`: as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewLimits {
    /// Most snapshots, removed ones not counted.
    pub snapshot_max_count: Option<u32>,
    /// Most bytes of all snapshots together; 0: any.
    pub snapshot_max_size: Option<u64>,
    /// Bytes that rebuilds may copy in a second; 0: as much as they can.
    pub rebuild_rate: Option<u64>,
    /// How much a rebuild copies at once, in Longhorn's count of files: 1 is the least.
    pub rebuild_concurrency: Option<u32>,
}

/// Bounds of a volume as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLimits {
    /// See [`NewLimits::snapshot_max_count`].
    pub snapshot_max_count: u32,
    /// See [`NewLimits::snapshot_max_size`].
    pub snapshot_max_size: u64,
    /// See [`NewLimits::rebuild_concurrency`].
    pub rebuild_concurrency: u32,
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
    /// What it may grow to.
    pub limits: EngineLimits,
    /// Of a relay: where the volume's engine serves it. `None` for an engine.
    pub relay_from: Option<Address>,
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
    /// Bytes done and bytes in all of a running rebuild.
    pub rebuild: Option<(u64, u64)>,
}

/// Serves the engine on a unix socket until it is dropped.
///
/// # Errors
/// The socket cannot be bound, or the server fails.
pub async fn serve(socket: &Path, instance: &str, engine: Arc<dyn EngineControl>) -> io::Result<()> {
    let volume = engine.status().volume;
    let identity = Identity { volume, instance: instance.to_owned(), role: "controller" };
    let operations = crate::operations::service(Arc::clone(&engine), identity.clone());
    let service = ControllerServiceServer::with_interceptor(Service { engine }, identity);
    let peers = TrustedPeers::new(bind_private(socket)?);
    Server::builder()
        .add_service(service)
        .add_service(operations)
        .serve_with_incoming(peers)
        .await
        .map_err(io::Error::other)
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
            snapshot_max_count: i32::try_from(status.limits.snapshot_max_count).unwrap_or(i32::MAX),
            snapshot_max_size: i64::try_from(status.limits.snapshot_max_size).unwrap_or(i64::MAX),
            device,
            uri,
            generation: status.generation.into(),
            waiting_for: status.waiting_for,
            repaired_blocks: status.repaired_blocks,
            relay_from: status.relay_from.map(|address| address.to_string()).unwrap_or_default(),
            ..Default::default()
        }
    }
}

impl Service {
    async fn set(&self, limits: NewLimits) -> Result<Response<ptypes::Volume>, Status> {
        self.engine.operate(Operation::SetLimits(limits)).await?;
        Ok(Response::new(self.volume()))
    }

    fn find(&self, is_it: impl Fn(&EngineReplica) -> bool) -> Result<ptypes::ControllerReplica, Status> {
        let found = self.engine.status().replicas.into_iter().find(is_it);
        found.map(replica).ok_or_else(|| Status::not_found("the volume has no such replica"))
    }
}

fn is_wanted(replica: &EngineReplica, wanted: &ptypes::ReplicaAddress) -> bool {
    replica.address == wanted.address
        || !wanted.instance_name.is_empty() && replica.name == wanted.instance_name
}

/// The replica's name in the path of its data socket, which is named after it.
fn name_of(address: &str) -> Option<String> {
    let file = Path::new(address.strip_prefix("unix:")?).file_name()?.to_str()?;
    Some(file.split('.').next()?.to_owned()).filter(|name| !name.is_empty())
}

fn replica(replica: EngineReplica) -> ptypes::ControllerReplica {
    let (done, total) = replica.rebuild.unwrap_or_default();
    let percent = done.saturating_mul(100).checked_div(total).unwrap_or(0).min(100);
    ptypes::ControllerReplica {
        address: Some(ptypes::ReplicaAddress { address: replica.address, instance_name: replica.name }),
        mode: replica.mode.into(),
        reason: replica.reason,
        rebuild_progress: i32::try_from(percent).unwrap_or(100),
        rebuild_done: done,
        rebuild_total: total,
    }
}

/// What this program is: its own version, and Longhorn's API versions that it understands.
pub fn version() -> ptypes::VersionOutput {
    ptypes::VersionOutput {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        git_commit: String::new(),
        build_date: String::new(),
        cli_api_version: CLI_API.0,
        cli_api_min_version: CLI_API.1,
        controller_api_version: CONTROLLER_API.0,
        controller_api_min_version: CONTROLLER_API.1,
        data_format_version: DATA_FORMAT.0,
        data_format_min_version: DATA_FORMAT.1,
    }
}

/// Most files that Longhorn's setting lets a rebuild copy at once.
const REBUILD_CONCURRENCY_MAX: u32 = 5;

/// A limit for the number of snapshots as Longhorn's clients send it: 2 to 250 there, where the head counts.
pub(crate) fn snapshot_count(count: i32) -> Result<u32, Status> {
    let fits = u32::try_from(count).ok().filter(|n| (1..=SNAPSHOT_COUNT).contains(n));
    let text = || format!("{count} cannot be the limit for snapshots: 1 to {SNAPSHOT_COUNT} can");
    fits.ok_or_else(|| Status::invalid_argument(text()))
}

/// A limit for the bytes of snapshots; 0: none.
pub(crate) fn snapshot_size(bytes: i64) -> Result<u64, Status> {
    u64::try_from(bytes)
        .map_err(|_| Status::invalid_argument(format!("{bytes} bytes cannot be the limit for snapshots")))
}

/// Longhorn can mark every snapshot as removed that a trim meets; that is not built.
pub(crate) fn refuse_unmap_mark(enabled: bool) -> Result<(), Status> {
    if enabled {
        return Err(Status::unimplemented(
            "a trim that marks snapshots as removed is not built: UNMAP never touches what a snapshot needs; \
             `longhornctl snapshot rm` removes snapshots",
        ));
    }
    Ok(())
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
        let name = if request.name.is_empty() { invented_name()? } else { request.name };
        check_name("snapshot", &name).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let labels = request.labels.into_iter().collect();
        let freeze = request.freeze_filesystem;
        self.engine.snapshot(SnapshotRequest { name: name.clone(), labels, freeze }).await?;
        Ok(Response::new(ptypes::VolumeSnapshotReply { name }))
    }

    async fn volume_revert(
        &self,
        request: Request<ptypes::VolumeRevertRequest>,
    ) -> Result<Response<ptypes::Volume>, Status> {
        self.engine.operate(Operation::Revert { name: request.into_inner().name }).await?;
        Ok(Response::new(self.volume()))
    }

    async fn volume_expand(
        &self,
        request: Request<ptypes::VolumeExpandRequest>,
    ) -> Result<Response<ptypes::Volume>, Status> {
        let wanted = request.into_inner().size;
        let size =
            u64::try_from(wanted).ok().filter(|size| *size > 0 && size % BLOCK == 0).ok_or_else(|| {
                Status::invalid_argument(format!(
                    "{wanted} bytes are no volume's size: give a multiple of {BLOCK}"
                ))
            })?;
        self.engine.operate(Operation::Expand { size }).await?;
        Ok(Response::new(self.volume()))
    }

    /// As Longhorn's: the replica is at the address, and its name is whatever tells it from the others there.
    async fn controller_replica_create(
        &self,
        request: Request<ptypes::ControllerReplicaCreateRequest>,
    ) -> Result<Response<ptypes::ControllerReplica>, Status> {
        // No snapshot is taken for a rebuild, whether one is asked for or not.
        let address = request.into_inner().address;
        let name = name_of(&address).ok_or_else(|| {
            Status::invalid_argument(format!("{address:?} is not unix:PATH of a replica's data socket"))
        })?;
        self.engine.operate(Operation::AddReplica { name: name.clone(), address }).await?;
        self.find(|r| r.name == name).map(Response::new)
    }

    async fn replica_delete(&self, request: Request<ptypes::ReplicaAddress>) -> Result<Response<()>, Status> {
        let wanted = request.into_inner();
        let address = self.find(|r| is_wanted(r, &wanted))?.address.unwrap_or_default();
        self.engine.operate(Operation::RemoveReplica { name: address.instance_name }).await?;
        Ok(Response::new(()))
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
        self.find(|r| is_wanted(r, &wanted)).map(Response::new)
    }

    /// A replica whose mode is to be ERR or WO is put out and brought in sync anew. RW nobody can give but the engine.
    async fn replica_update(
        &self,
        request: Request<ptypes::ControllerReplica>,
    ) -> Result<Response<ptypes::ControllerReplica>, Status> {
        let request = request.into_inner();
        let wanted = request.address.clone().unwrap_or_default();
        let found = self.find(|r| is_wanted(r, &wanted))?;
        let name = found.address.clone().unwrap_or_default().instance_name;
        match (request.mode(), found.mode()) {
            (ptypes::ReplicaMode::Rw, ptypes::ReplicaMode::Rw) => return Ok(Response::new(found)),
            (ptypes::ReplicaMode::Rw, _) => {
                return Err(Status::failed_precondition(format!(
                    "replica {name} is not in sync: it becomes RW by itself when it is"
                )));
            }
            (ptypes::ReplicaMode::Wo | ptypes::ReplicaMode::Err, _) => {
                self.engine.operate(Operation::RebuildReplica { name: name.clone() }).await?;
            }
        }
        self.find(|r| r.name == name).map(Response::new)
    }

    /// The engine copies by itself: there is no file that the caller would have to sync.
    async fn replica_prepare_rebuild(
        &self,
        request: Request<ptypes::ReplicaAddress>,
    ) -> Result<Response<ptypes::ReplicaPrepareRebuildReply>, Status> {
        let wanted = request.into_inner();
        let replica = Some(self.find(|r| is_wanted(r, &wanted))?);
        Ok(Response::new(ptypes::ReplicaPrepareRebuildReply { replica, sync_file_info_list: Vec::new() }))
    }

    async fn replica_verify_rebuild(
        &self,
        request: Request<ptypes::ReplicaAddress>,
    ) -> Result<Response<ptypes::ControllerReplica>, Status> {
        let wanted = request.into_inner();
        let replica = self.find(|r| is_wanted(r, &wanted))?;
        if replica.mode() == ptypes::ReplicaMode::Rw {
            return Ok(Response::new(replica));
        }
        let name = replica.address.unwrap_or_default().instance_name;
        Err(Status::failed_precondition(format!("replica {name} is not in sync: {}", replica.reason)))
    }

    async fn volume_snapshot_max_count_set(
        &self,
        request: Request<ptypes::VolumeSnapshotMaxCountSetRequest>,
    ) -> Result<Response<ptypes::Volume>, Status> {
        let count = snapshot_count(request.into_inner().count)?;
        self.set(NewLimits { snapshot_max_count: Some(count), ..NewLimits::default() }).await
    }

    async fn volume_snapshot_max_size_set(
        &self,
        request: Request<ptypes::VolumeSnapshotMaxSizeSetRequest>,
    ) -> Result<Response<ptypes::Volume>, Status> {
        let size = snapshot_size(request.into_inner().size)?;
        self.set(NewLimits { snapshot_max_size: Some(size), ..NewLimits::default() }).await
    }

    async fn replica_rebuild_concurrent_sync_limit_set(
        &self,
        request: Request<ptypes::ReplicaRebuildConcurrentSyncLimitSetRequest>,
    ) -> Result<Response<()>, Status> {
        let limit = request.into_inner().limit;
        let concurrency = u32::try_from(limit)
            .ok()
            .filter(|n| (1..=REBUILD_CONCURRENCY_MAX).contains(n))
            .ok_or_else(|| {
                Status::invalid_argument(format!(
                    "a rebuild cannot copy {limit} files at once: 1 to {REBUILD_CONCURRENCY_MAX}"
                ))
            })?;
        self.set(NewLimits { rebuild_concurrency: Some(concurrency), ..NewLimits::default() }).await?;
        Ok(Response::new(()))
    }

    async fn replica_rebuild_concurrent_sync_limit_get(
        &self,
        _: Request<()>,
    ) -> Result<Response<ptypes::ReplicaRebuildConcurrentSyncLimitGetReply>, Status> {
        let limit = i32::try_from(self.engine.status().limits.rebuild_concurrency).unwrap_or(i32::MAX);
        Ok(Response::new(ptypes::ReplicaRebuildConcurrentSyncLimitGetReply { limit }))
    }

    async fn volume_frontend_start(
        &self,
        request: Request<ptypes::VolumeFrontendStartRequest>,
    ) -> Result<Response<ptypes::Volume>, Status> {
        let frontend = request.into_inner().frontend;
        self.engine.operate(Operation::ShowFrontend { frontend }).await?;
        Ok(Response::new(self.volume()))
    }

    async fn volume_frontend_shutdown(&self, _: Request<()>) -> Result<Response<ptypes::Volume>, Status> {
        self.engine.operate(Operation::HideFrontend).await?;
        Ok(Response::new(self.volume()))
    }

    /// Off is all that there is: a trim gives back what no snapshot needs, and never takes a snapshot with it.
    async fn volume_unmap_mark_snap_chain_removed_set(
        &self,
        request: Request<ptypes::VolumeUnmapMarkSnapChainRemovedSetRequest>,
    ) -> Result<Response<ptypes::Volume>, Status> {
        refuse_unmap_mark(request.into_inner().enabled)?;
        Ok(Response::new(self.volume()))
    }

    async fn version_detail_get(
        &self,
        _: Request<()>,
    ) -> Result<Response<ptypes::VersionDetailGetReply>, Status> {
        Ok(Response::new(ptypes::VersionDetailGetReply { version: Some(version()) }))
    }

    async fn metrics_get(&self, _: Request<()>) -> Result<Response<ptypes::MetricsGetReply>, Status> {
        let activity = self.engine.activity();
        let reads = activity.reads.unwrap_or_default();
        let writes = activity.writes.unwrap_or_default();
        let metrics = ptypes::Metrics {
            read_throughput: reads.throughput,
            write_throughput: writes.throughput,
            read_latency: reads.mean,
            write_latency: writes.mean,
            read_iops: reads.rate,
            write_iops: writes.rate,
        };
        Ok(Response::new(ptypes::MetricsGetReply { metrics: Some(metrics), activity: Some(activity) }))
    }

    unbuilt! {
        volume_start(ptypes::VolumeStartRequest) -> ptypes::Volume,
            "VolumeStart is not built: an engine starts with the replicas of its command line";
        volume_io(ptypes::VolumeIoRequest) -> ptypes::VolumeIoResponse,
            "VolumeIO is not built: data goes through the frontend";
        journal_list(ptypes::JournalListRequest) -> (), "JournalList is not built: no journal is kept";
    }
}
