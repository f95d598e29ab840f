//! Longhorn's `ProxyEngineService`: whatever a manager wants of an engine of this node, passed on to that engine's own
//! control socket.
//!
//! A request names its engine; the engine checks the names once more and refuses, with Longhorn's words, what was meant
//! for another (`transport::Identity`). Only sockets of this root are ever opened, whatever address a request carries:
//! an open port must not become a door to every socket of the machine.

mod engine;
mod status;

use std::collections::HashMap;
use std::time::Duration;

use tonic::{Request, Response, Status};

use crate::host::Root;
use crate::joining::{NotInSync, until_in_sync};
use crate::proto::imrpc;
use crate::proto::imrpc::proxy_engine_service_server::ProxyEngineService;
use crate::proto::ptypes;
use crate::proto::volume;
use crate::unbuilt::unbuilt;
use engine::{AtPort, Engine, Engines, LONG};

/// How long a client waits for what moves data.
fn patience(grpc_timeout_seconds: i64) -> Duration {
    match u64::try_from(grpc_timeout_seconds) {
        Ok(seconds @ 1..) => Duration::from_secs(seconds),
        _ => LONG,
    }
}

/// The service.
#[derive(Debug)]
pub(crate) struct Proxy {
    engines: Engines,
}

impl Proxy {
    /// The proxy to the engines of a root. `at_port`: the process to which its manager has given a port.
    pub(crate) fn new(root: Root, at_port: impl Fn(u16) -> Option<String> + Send + Sync + 'static) -> Self {
        Self { engines: Engines::new(root, AtPort(Box::new(at_port))) }
    }

    /// The engine that a request names.
    fn engine(&self, request: Option<imrpc::ProxyEngineRequest>) -> Result<Engine, Status> {
        let request = request.ok_or_else(|| Status::invalid_argument("the request names no engine"))?;
        self.engines.find(&request)
    }
}

/// The part of a request that is passed on.
fn part<T>(part: Option<T>, name: &str) -> Result<T, Status> {
    part.ok_or_else(|| Status::invalid_argument(format!("the request has no {name}")))
}

/// How many failures one status tells of. Its text is a header, and a client takes 16 KiB of headers.
const TOLD_MAX: usize = 10;

/// What became of several snapshots, in one status: the first failure's, which tells of all.
fn not_removed(asked: usize, mut failed: Vec<(String, Status)>) -> Result<(), Status> {
    if failed.is_empty() {
        return Ok(());
    }
    if asked == 1 {
        return Err(failed.remove(0).1);
    }
    let told = failed.iter().take(TOLD_MAX).map(|(name, status)| format!("{name:?} ({})", status.message()));
    let mut text = told.collect::<Vec<_>>().join(", ");
    if failed.len() > TOLD_MAX {
        text.push_str(", and others");
    }
    let text = format!("{} of {asked} snapshots are not removed: {text}", failed.len());
    Err(Status::new(failed[0].1.code(), text))
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl ProxyEngineService for Proxy {
    async fn server_version_get(
        &self,
        request: Request<imrpc::ProxyEngineRequest>,
    ) -> Answer<imrpc::EngineVersionProxyResponse> {
        let engine = self.engine(Some(request.into_inner()))?;
        let answer = engine.ask((), |mut c, r| async move { c.version_detail_get(r).await }).await?;
        Ok(Response::new(imrpc::EngineVersionProxyResponse { version: answer.version }))
    }

    async fn volume_get(
        &self,
        request: Request<imrpc::ProxyEngineRequest>,
    ) -> Answer<imrpc::EngineVolumeGetProxyResponse> {
        let engine = self.engine(Some(request.into_inner()))?;
        let volume = engine.ask((), |mut c, r| async move { c.volume_get(r).await }).await?;
        Ok(Response::new(imrpc::EngineVolumeGetProxyResponse { volume: Some(volume) }))
    }

    async fn volume_expand(&self, request: Request<imrpc::EngineVolumeExpandRequest>) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?.waiting(LONG);
        let expand = part(request.expand, "expand")?;
        engine.ask(expand, |mut c, r| async move { c.volume_expand(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn volume_frontend_start(
        &self,
        request: Request<imrpc::EngineVolumeFrontendStartRequest>,
    ) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let start = part(request.frontend_start, "frontend_start")?;
        engine.ask(start, |mut c, r| async move { c.volume_frontend_start(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn volume_frontend_shutdown(&self, request: Request<imrpc::ProxyEngineRequest>) -> Answer<()> {
        let engine = self.engine(Some(request.into_inner()))?;
        engine.ask((), |mut c, r| async move { c.volume_frontend_shutdown(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn volume_unmap_mark_snap_chain_removed_set(
        &self,
        request: Request<imrpc::EngineVolumeUnmapMarkSnapChainRemovedSetRequest>,
    ) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let mark = part(request.unmap_mark_snap, "unmap_mark_snap")?;
        engine
            .ask(mark, |mut c, r| async move { c.volume_unmap_mark_snap_chain_removed_set(r).await })
            .await?;
        Ok(Response::new(()))
    }

    async fn volume_snapshot_max_count_set(
        &self,
        request: Request<imrpc::EngineVolumeSnapshotMaxCountSetRequest>,
    ) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let count = part(request.count, "count")?;
        engine.ask(count, |mut c, r| async move { c.volume_snapshot_max_count_set(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn volume_snapshot_max_size_set(
        &self,
        request: Request<imrpc::EngineVolumeSnapshotMaxSizeSetRequest>,
    ) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let size = part(request.size, "size")?;
        engine.ask(size, |mut c, r| async move { c.volume_snapshot_max_size_set(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn volume_snapshot(
        &self,
        request: Request<imrpc::EngineVolumeSnapshotRequest>,
    ) -> Answer<imrpc::EngineVolumeSnapshotProxyResponse> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let snapshot = part(request.snapshot_volume, "snapshot_volume")?;
        let taken = engine.ask(snapshot, |mut c, r| async move { c.volume_snapshot(r).await }).await?;
        Ok(Response::new(imrpc::EngineVolumeSnapshotProxyResponse { snapshot: Some(taken) }))
    }

    /// The snapshots of a member: they are the same on each.
    async fn snapshot_list(
        &self,
        request: Request<imrpc::ProxyEngineRequest>,
    ) -> Answer<imrpc::EngineSnapshotListProxyResponse> {
        let engine = self.engine(Some(request.into_inner()))?;
        let chain = engine.operate((), |mut c, r| async move { c.snapshot_list(r).await }).await?;
        Ok(Response::new(imrpc::EngineSnapshotListProxyResponse { disks: status::snapshots(&chain.layers) }))
    }

    async fn snapshot_revert(&self, request: Request<imrpc::EngineSnapshotRevertRequest>) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let revert = ptypes::VolumeRevertRequest { name: request.name };
        engine.ask(revert, |mut c, r| async move { c.volume_revert(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn snapshot_purge(&self, request: Request<imrpc::EngineSnapshotPurgeRequest>) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        if request.skip_if_in_progress {
            let now = engine.operate((), |mut c, r| async move { c.snapshot_purge_status(r).await }).await?;
            if now.replicas.iter().any(|replica| replica.running) {
                return Ok(Response::new(()));
            }
        }
        engine.operate((), |mut c, r| async move { c.snapshot_purge(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn snapshot_purge_status(
        &self,
        request: Request<imrpc::ProxyEngineRequest>,
    ) -> Answer<imrpc::EngineSnapshotPurgeStatusProxyResponse> {
        let engine = self.engine(Some(request.into_inner()))?;
        let list = engine.ask((), |mut c, r| async move { c.replica_list(r).await }).await?;
        let purges = engine.operate((), |mut c, r| async move { c.snapshot_purge_status(r).await }).await?;
        let status = status::purges(&list, purges);
        Ok(Response::new(imrpc::EngineSnapshotPurgeStatusProxyResponse { status }))
    }

    /// The engine fills all its replicas; it answers when they hold everything. Timeouts of Longhorn's file transfer mean
    /// nothing here, and what a backing file holds is always part of the bytes.
    async fn snapshot_clone(&self, request: Request<imrpc::EngineSnapshotCloneRequest>) -> Answer<()> {
        let request = request.into_inner();
        if request.clone_mode() != imrpc::CloneMode::FullCopy {
            return Err(Status::unimplemented(
                "a linked clone is of version 2 of the data engine, which is not built: ask for a full copy",
            ));
        }
        let target = part(request.proxy_engine_request, "proxy_engine_request")?;
        let source = self.engines.find(&imrpc::ProxyEngineRequest {
            address: request.from_engine_address,
            engine_name: request.from_engine_name.clone(),
            volume_name: request.from_volume_name.clone(),
            backend_store_driver: target.backend_store_driver,
            data_engine: target.data_engine,
            ..Default::default()
        })?;
        let clone = volume::CloneSource {
            engine: format!("unix:{}", source.socket().display()),
            volume: request.from_volume_name,
            instance: request.from_engine_name,
            snapshot: request.snapshot_name,
        };
        let engine = self.engine(Some(target))?.waiting(patience(request.grpc_timeout_seconds));
        engine.operate(clone, |mut c, r| async move { c.snapshot_clone(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn snapshot_clone_status(
        &self,
        request: Request<imrpc::ProxyEngineRequest>,
    ) -> Answer<imrpc::EngineSnapshotCloneStatusProxyResponse> {
        let engine = self.engine(Some(request.into_inner()))?;
        let list = engine.ask((), |mut c, r| async move { c.replica_list(r).await }).await?;
        let state = engine.operate((), |mut c, r| async move { c.snapshot_clone_status(r).await }).await?;
        let status = crate::cloning::clone_statuses(&list, &state);
        Ok(Response::new(imrpc::EngineSnapshotCloneStatusProxyResponse { status }))
    }

    /// Every replica that is in sync takes the checksums of its own copy.
    async fn snapshot_hash(&self, request: Request<imrpc::EngineSnapshotHashRequest>) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let list = engine.ask((), |mut c, r| async move { c.replica_list(r).await }).await?;
        for member in status::members(list) {
            let (snapshot_name, rehash) = (request.snapshot_name.clone(), request.rehash);
            let hash = ptypes::SnapshotHashRequest { snapshot_name, rehash };
            self.engines
                .files(&engine, &member, hash, |mut c, r| async move { c.snapshot_hash(r).await })
                .await?;
        }
        Ok(Response::new(()))
    }

    /// By the addresses of the replicas; one that cannot be asked says so in its error.
    async fn snapshot_hash_status(
        &self,
        request: Request<imrpc::EngineSnapshotHashStatusRequest>,
    ) -> Answer<imrpc::EngineSnapshotHashStatusProxyResponse> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let list = engine.ask((), |mut c, r| async move { c.replica_list(r).await }).await?;
        let mut status = HashMap::new();
        for member in status::members(list) {
            let ask = ptypes::SnapshotHashStatusRequest { snapshot_name: request.snapshot_name.clone() };
            let answer = self
                .engines
                .files(&engine, &member, ask, |mut c, r| async move { c.snapshot_hash_status(r).await })
                .await;
            let answer = answer.unwrap_or_else(|e| ptypes::SnapshotHashStatusResponse {
                state: crate::progress::ERROR.to_owned(),
                error: e.message().to_owned(),
                ..Default::default()
            });
            status.insert(member.address, answer);
        }
        Ok(Response::new(imrpc::EngineSnapshotHashStatusProxyResponse { status }))
    }

    /// Each snapshot is one decision: one that is not removed does not keep the others from it.
    async fn snapshot_remove(&self, request: Request<imrpc::EngineSnapshotRemoveRequest>) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let (asked, mut failed) = (request.names.len(), Vec::new());
        for name in request.names {
            let one = volume::SnapshotName { name: name.clone() };
            if let Err(status) =
                engine.operate(one, |mut c, r| async move { c.snapshot_remove(r).await }).await
            {
                failed.push((name, status));
            }
        }
        not_removed(asked, failed).map(Response::new)
    }

    /// Answers when the replica that was added is in sync, as Longhorn's does, whose clients take success for one more copy of everything; how
    /// far that is, `ReplicaRebuildingStatus` tells. Sizes, Longhorn's fast sync and the limits of its file transfer mean nothing here.
    async fn replica_add(&self, request: Request<imrpc::EngineReplicaAddRequest>) -> Answer<()> {
        let request = request.into_inner();
        if request.restore {
            return Err(Status::unimplemented(
                "a replica to restore into is not built yet: there are no backups",
            ));
        }
        let engine = self.engine(request.proxy_engine_request)?;
        let (address, name) = (request.replica_address, request.replica_name);
        if name.is_empty() {
            let create =
                ptypes::ControllerReplicaCreateRequest { address: address.clone(), ..Default::default() };
            engine.ask(create, |mut c, r| async move { c.controller_replica_create(r).await }).await?;
        } else {
            let replica = volume::NamedReplica { name: name.clone(), address: address.clone() };
            engine.operate(replica, |mut c, r| async move { c.replica_add(r).await }).await?;
        }
        let list = || {
            let list = engine.ask((), |mut c, r| async move { c.replica_list(r).await });
            async move { Ok::<_, Status>(list.await?.replicas) }
        };
        let joined = tokio::time::timeout(
            patience(request.grpc_timeout_seconds),
            until_in_sync(&address, &name, list),
        );
        match joined.await {
            Ok(Ok(())) => Ok(Response::new(())),
            Ok(Err(NotInSync::Unheard(status))) => Err(status),
            Ok(Err(e @ NotInSync::TakenOut(_))) => Err(Status::aborted(e.to_string())),
            Ok(Err(e @ NotInSync::LeftOut { .. })) => Err(Status::failed_precondition(e.to_string())),
            Err(_) => Err(Status::deadline_exceeded(format!(
                "replica {address} is added and not in sync yet: its engine goes on"
            ))),
        }
    }

    async fn replica_list(
        &self,
        request: Request<imrpc::ProxyEngineRequest>,
    ) -> Answer<imrpc::EngineReplicaListProxyResponse> {
        let engine = self.engine(Some(request.into_inner()))?;
        let list = engine.ask((), |mut c, r| async move { c.replica_list(r).await }).await?;
        Ok(Response::new(imrpc::EngineReplicaListProxyResponse { replica_list: Some(list) }))
    }

    async fn replica_rebuilding_status(
        &self,
        request: Request<imrpc::ProxyEngineRequest>,
    ) -> Answer<imrpc::EngineReplicaRebuildStatusProxyResponse> {
        let engine = self.engine(Some(request.into_inner()))?;
        let list = engine.ask((), |mut c, r| async move { c.replica_list(r).await }).await?;
        let status = status::rebuilds(list);
        Ok(Response::new(imrpc::EngineReplicaRebuildStatusProxyResponse { status }))
    }

    async fn replica_verify_rebuild(
        &self,
        request: Request<imrpc::EngineReplicaVerifyRebuildRequest>,
    ) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let replica =
            ptypes::ReplicaAddress { address: request.replica_address, instance_name: request.replica_name };
        engine.ask(replica, |mut c, r| async move { c.replica_verify_rebuild(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn replica_remove(&self, request: Request<imrpc::EngineReplicaRemoveRequest>) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let replica =
            ptypes::ReplicaAddress { address: request.replica_address, instance_name: request.replica_name };
        engine.ask(replica, |mut c, r| async move { c.replica_delete(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn replica_mode_update(
        &self,
        request: Request<imrpc::EngineReplicaModeUpdateRequest>,
    ) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let address = ptypes::ReplicaAddress { address: request.replica_address, ..Default::default() };
        let replica =
            ptypes::ControllerReplica { address: Some(address), mode: request.mode, ..Default::default() };
        engine.ask(replica, |mut c, r| async move { c.replica_update(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn replica_rebuild_concurrent_sync_limit_set(
        &self,
        request: Request<imrpc::EngineReplicaRebuildConcurrentSyncLimitSetRequest>,
    ) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let limit = ptypes::ReplicaRebuildConcurrentSyncLimitSetRequest { limit: request.limit };
        engine
            .ask(limit, |mut c, r| async move { c.replica_rebuild_concurrent_sync_limit_set(r).await })
            .await?;
        Ok(Response::new(()))
    }

    async fn replica_rebuild_concurrent_sync_limit_get(
        &self,
        request: Request<imrpc::ProxyEngineRequest>,
    ) -> Answer<imrpc::EngineReplicaRebuildConcurrentSyncLimitGetResponse> {
        let engine = self.engine(Some(request.into_inner()))?;
        let answer = engine
            .ask((), |mut c, r| async move { c.replica_rebuild_concurrent_sync_limit_get(r).await })
            .await?;
        let limit = answer.limit;
        Ok(Response::new(imrpc::EngineReplicaRebuildConcurrentSyncLimitGetResponse { limit }))
    }

    /// Longhorn's unit is a megabyte per second, of 2^20 bytes.
    async fn replica_rebuilding_qos_set(
        &self,
        request: Request<imrpc::EngineReplicaRebuildingQosSetRequest>,
    ) -> Answer<()> {
        let request = request.into_inner();
        let engine = self.engine(request.proxy_engine_request)?;
        let wanted = request.qos_limit_mbps;
        let bytes_per_second = u64::try_from(wanted).ok().and_then(|n| n.checked_mul(1 << 20));
        let bytes_per_second = bytes_per_second
            .ok_or_else(|| Status::invalid_argument(format!("a rebuild cannot be held to {wanted} MB/s")))?;
        let rate = volume::RebuildRate { bytes_per_second };
        engine.operate(rate, |mut c, r| async move { c.rebuild_rate_set(r).await }).await?;
        Ok(Response::new(()))
    }

    async fn metrics_get(
        &self,
        request: Request<imrpc::ProxyEngineRequest>,
    ) -> Answer<imrpc::EngineMetricsGetProxyResponse> {
        let engine = self.engine(Some(request.into_inner()))?;
        let answer = engine.ask((), |mut c, r| async move { c.metrics_get(r).await }).await?;
        Ok(Response::new(imrpc::EngineMetricsGetProxyResponse { metrics: answer.metrics }))
    }

    type SPDKBackingImageWatchStream = tokio_stream::Empty<Result<(), Status>>;

    unbuilt! {
        snapshot_backup(imrpc::EngineSnapshotBackupRequest) -> imrpc::EngineSnapshotBackupProxyResponse,
            "SnapshotBackup is not built yet: there are no backups";
        snapshot_backup_status(imrpc::EngineSnapshotBackupStatusRequest)
            -> imrpc::EngineSnapshotBackupStatusProxyResponse,
            "SnapshotBackupStatus is not built yet: there are no backups";
        backup_restore(imrpc::EngineBackupRestoreRequest) -> imrpc::EngineBackupRestoreProxyResponse,
            "BackupRestore is not built yet: there are no backups";
        backup_restore_status(imrpc::ProxyEngineRequest) -> imrpc::EngineBackupRestoreStatusProxyResponse,
            "BackupRestoreStatus is not built yet: there are no backups";
        backup_restore_finish(imrpc::EngineBackupRestoreFinishRequest) -> (),
            "BackupRestoreFinish is not built yet: there are no backups";
        cleanup_backup_mount_points(()) -> (), "CleanupBackupMountPoints is not built yet: there are no backups";
        spdk_backing_image_create(imrpc::SpdkBackingImageCreateRequest) -> imrpc::SpdkBackingImageResponse,
            "SPDKBackingImageCreate is of version 2 of the data engine, which is not built";
        spdk_backing_image_delete(imrpc::SpdkBackingImageDeleteRequest) -> (),
            "SPDKBackingImageDelete is of version 2 of the data engine, which is not built";
        spdk_backing_image_get(imrpc::SpdkBackingImageGetRequest) -> imrpc::SpdkBackingImageResponse,
            "SPDKBackingImageGet is of version 2 of the data engine, which is not built";
        spdk_backing_image_list(()) -> imrpc::SpdkBackingImageListResponse,
            "SPDKBackingImageList is of version 2 of the data engine, which is not built";
        spdk_backing_image_watch(()) -> Self::SPDKBackingImageWatchStream,
            "SPDKBackingImageWatch is of version 2 of the data engine, which is not built";
        remount_read_only_volume(imrpc::RemountVolumeRequest) -> (),
            "RemountReadOnlyVolume is not built: a device of this program pauses, and never turns read-only";
    }
}
