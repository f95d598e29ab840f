//! Longhorn's `ControllerService` over an [`EngineControl`]: requests are checked and put into its words, answers into
//! Longhorn's.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use lh_block::{BLOCK, check_name};
use tonic::{Request, Response, Status};

use super::{EngineControl, EngineReplica, NewLimits, Operation, SnapshotRequest, data_socket, version};
use crate::chain::HEAD;
use crate::limits::{REBUILD_CONCURRENCY_MAX, refuse_unmap_mark, snapshot_count, snapshot_size};
use crate::proto::ptypes;
use crate::proto::ptypes::controller_service_server::ControllerService;
use crate::unbuilt::unbuilt;

/// Most bytes that the labels of a snapshot take as JSON.
const LABELS_MAX: usize = 2048;

pub(super) struct Service {
    pub(super) engine: Arc<dyn EngineControl>,
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
            rebuild_rate: status.limits.rebuild_rate,
            rebuild_concurrency: status.limits.rebuild_concurrency,
            device,
            uri,
            generation: status.generation.into(),
            waiting_for: status.waiting_for,
            wait: status.wait.into(),
            lacks_space: status.lacks_space,
            has_lost: status.has_lost,
            ending: status.ending,
            hidden: status.hidden,
            repaired_blocks: status.repaired_blocks,
            relay_from: status.relay_from.map(|address| address.to_string()).unwrap_or_default(),
            ..Default::default()
        }
    }

    async fn set(&self, limits: NewLimits) -> Result<Response<ptypes::Volume>, Status> {
        self.engine.operate(Operation::SetLimits(limits)).await?;
        Ok(Response::new(self.volume()))
    }

    fn find(&self, is_it: impl Fn(&EngineReplica) -> bool) -> Result<ptypes::ControllerReplica, Status> {
        let found = self.engine.status().replicas.into_iter().find(is_it);
        found.map(replica).ok_or_else(no_such_replica)
    }

    /// The replica of that address, or of that name. Where both are said and are two replicas', or the address alone is, nobody knows which
    /// is meant.
    fn wanted(&self, wanted: &ptypes::ReplicaAddress) -> Result<ptypes::ControllerReplica, Status> {
        let replicas = self.engine.status().replicas;
        let is_said = |said: &str, own: &str| !said.is_empty() && said == own;
        let at: Vec<_> = replicas.iter().filter(|r| is_said(&wanted.address, &r.address)).collect();
        let named = replicas.iter().find(|r| is_said(&wanted.instance_name, &r.name));
        match (at.as_slice(), named) {
            ([at, ..], Some(named)) if at.address != named.address => Err(Status::failed_precondition(
                format!("{} is replica {}, not {}", at.address, at.name, named.name),
            )),
            (_, Some(named)) => Ok(replica(named.clone())),
            ([], None) => Err(no_such_replica()),
            ([at], None) => Ok(replica((*at).clone())),
            ([first, second, ..], None) => Err(Status::failed_precondition(format!(
                "{} is replica {} and replica {}: say which of them by its name",
                wanted.address, first.name, second.name
            ))),
        }
    }
}

fn no_such_replica() -> Status {
    Status::not_found("the volume has no such replica")
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

/// Longhorn's tools take what is called so for the head: in lists of layers by name, and in a directory whose
/// `volume.meta` is lost.
fn check_no_head(name: &str) -> Result<(), Status> {
    if name.contains(HEAD) {
        return Err(Status::invalid_argument(format!(
            "a name with {HEAD:?} in it is the head's: choose another"
        )));
    }
    Ok(())
}

/// What a replica tells of 250 snapshots has to fit a message of the data protocol, with all that it tells besides: without that no
/// engine could use it any more.
fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Status> {
    let bytes = serde_json::to_vec(labels).map_err(|e| Status::internal(e.to_string()))?.len();
    if bytes > LABELS_MAX {
        return Err(Status::invalid_argument(format!(
            "the snapshot's labels take {bytes} bytes as JSON: {LABELS_MAX} are the most"
        )));
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
        check_no_head(&name)?;
        let labels = request.labels.into_iter().collect();
        check_labels(&labels)?;
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
        data_socket::check(&address)?;
        let name = address.strip_prefix("unix:").and_then(|path| data_socket::name_of(Path::new(path)));
        let name = name.map(str::to_owned).ok_or_else(|| {
            Status::invalid_argument(format!(
                "{address} does not tell the replica's name, as unix:FOLDER/NAME.sock does: give it (`longhorn add \
                 --replica-instance-name NAME {address}`)"
            ))
        })?;
        self.engine.operate(Operation::AddReplica { name: name.clone(), address }).await?;
        self.find(|r| r.name == name).map(Response::new)
    }

    async fn replica_delete(&self, request: Request<ptypes::ReplicaAddress>) -> Result<Response<()>, Status> {
        let wanted = request.into_inner();
        let address = self.wanted(&wanted)?.address.unwrap_or_default();
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
        self.wanted(&request.into_inner()).map(Response::new)
    }

    /// A replica whose mode is to be ERR or WO is put out and brought in sync anew. RW nobody can give but the engine.
    async fn replica_update(
        &self,
        request: Request<ptypes::ControllerReplica>,
    ) -> Result<Response<ptypes::ControllerReplica>, Status> {
        let request = request.into_inner();
        let wanted = request.address.clone().unwrap_or_default();
        let found = self.wanted(&wanted)?;
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
        let replica = Some(self.wanted(&request.into_inner())?);
        Ok(Response::new(ptypes::ReplicaPrepareRebuildReply { replica, sync_file_info_list: Vec::new() }))
    }

    async fn replica_verify_rebuild(
        &self,
        request: Request<ptypes::ReplicaAddress>,
    ) -> Result<Response<ptypes::ControllerReplica>, Status> {
        let replica = self.wanted(&request.into_inner())?;
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
