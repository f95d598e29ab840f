//! Longhorn's `SyncAgentService` beside a replica. In Longhorn a client moves, folds and hashes a replica's files by it;
//! here the engine does all of that over the data connection, for every replica as one decision, and clients ask the
//! engine. So that a client of Longhorn's learns what to do, every call is declared and answered by a sentence. Hashing
//! snapshots is each replica's own affair, and works as in Longhorn.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::{HashStatus, ReplicaControl};
use crate::progress::{ERROR, IN_PROGRESS, percent};
use crate::proto::ptypes;
use crate::proto::ptypes::sync_agent_service_server::SyncAgentService;
use crate::unbuilt::unbuilt;

/// The service.
pub(super) struct SyncAgent {
    replica: Arc<dyn ReplicaControl>,
}

impl SyncAgent {
    pub(super) fn of(replica: Arc<dyn ReplicaControl>) -> Self {
        Self { replica }
    }
}

/// Refuses the head, which has no name. Of others the replica knows which there are: names of imported ones may be any.
fn checked(snapshot: &str) -> Result<(), Status> {
    if snapshot.is_empty() { Err(Status::invalid_argument("the snapshot's name is missing")) } else { Ok(()) }
}

#[tonic::async_trait]
impl SyncAgentService for SyncAgent {
    /// How far this replica is with what the engine lets it fold.
    async fn snapshot_purge_status(
        &self,
        _: Request<()>,
    ) -> Result<Response<ptypes::SnapshotPurgeStatusResponse>, Status> {
        let status = self.replica.status().await;
        let status = status.ok_or_else(|| Status::unavailable("the replica's directory is not open yet"))?;
        let Some(fold) = status.fold else {
            return Ok(Response::new(ptypes::SnapshotPurgeStatusResponse::default()));
        };
        let is_purging = fold.error.is_none();
        Ok(Response::new(ptypes::SnapshotPurgeStatusResponse {
            is_purging,
            progress: percent(fold.done, fold.total),
            state: if is_purging { IN_PROGRESS } else { ERROR }.to_owned(),
            error: fold.error.unwrap_or_default(),
        }))
    }

    /// Answered when it is queued: one snapshot is hashed at a time.
    async fn snapshot_hash(
        &self,
        request: Request<ptypes::SnapshotHashRequest>,
    ) -> Result<Response<()>, Status> {
        let ptypes::SnapshotHashRequest { snapshot_name, rehash } = request.into_inner();
        checked(&snapshot_name)?;
        let not_open = || Status::unavailable("the replica's directory is not open yet");
        let status = self.replica.status().await.ok_or_else(not_open)?;
        if !status.chain.iter().any(|layer| layer.name == snapshot_name) {
            return Err(Status::not_found(format!("there is no snapshot {snapshot_name}")));
        }
        if !self.replica.hash(&snapshot_name, rehash) {
            return Err(not_open());
        }
        Ok(Response::new(()))
    }

    async fn snapshot_hash_status(
        &self,
        request: Request<ptypes::SnapshotHashStatusRequest>,
    ) -> Result<Response<ptypes::SnapshotHashStatusResponse>, Status> {
        let name = request.into_inner().snapshot_name;
        checked(&name)?;
        let (state, checksum, error, silently_corrupted) = match self.replica.hash_status(&name) {
            HashStatus::None => {
                return Err(Status::not_found(format!("snapshot {name} was not to be hashed")));
            }
            HashStatus::Running => ("in_progress", String::new(), String::new(), false),
            HashStatus::Complete { checksum, corrupted } => {
                ("complete", format!("{checksum:016x}"), String::new(), corrupted)
            }
            HashStatus::Failed(why) => ("error", String::new(), why, false),
        };
        let state = state.to_owned();
        Ok(Response::new(ptypes::SnapshotHashStatusResponse { state, checksum, error, silently_corrupted }))
    }

    async fn snapshot_hash_cancel(
        &self,
        request: Request<ptypes::SnapshotHashCancelRequest>,
    ) -> Result<Response<()>, Status> {
        let name = request.into_inner().snapshot_name;
        checked(&name)?;
        self.replica.cancel_hash(&name);
        Ok(Response::new(()))
    }

    async fn snapshot_hash_lock_state(
        &self,
        _: Request<()>,
    ) -> Result<Response<ptypes::SnapshotHashLockStateResponse>, Status> {
        let is_locked = self.replica.is_hashing();
        Ok(Response::new(ptypes::SnapshotHashLockStateResponse { is_locked }))
    }

    unbuilt! {
        file_remove(ptypes::FileRemoveRequest) -> (),
            "FileRemove is not built: only the replica's own process touches its files";
        file_rename(ptypes::FileRenameRequest) -> (),
            "FileRename is not built: only the replica's own process touches its files";
        file_send(ptypes::FileSendRequest) -> (),
            "FileSend is not built: the engine copies layers over the data connection";
        files_sync(ptypes::FilesSyncRequest) -> (),
            "FilesSync is not built: the engine copies layers over the data connection";
        snapshot_clone(ptypes::SnapshotCloneRequest) -> (),
            "SnapshotClone is not built here: ask the engine, which fills all its replicas";
        volume_export(ptypes::VolumeExportRequest) -> (),
            "VolumeExport is not built: `longhornctl snapshot export` writes a snapshot into a file";
        receiver_launch(ptypes::ReceiverLaunchRequest) -> ptypes::ReceiverLaunchResponse,
            "ReceiverLaunch is not built: the engine copies layers over the data connection";
        backup_create(ptypes::BackupCreateRequest) -> ptypes::BackupCreateResponse,
            "BackupCreate is not built yet: there are no backups";
        backup_remove(ptypes::BackupRemoveRequest) -> (), "BackupRemove is not built yet: there are no backups";
        backup_restore(ptypes::BackupRestoreRequest) -> (), "BackupRestore is not built yet: there are no backups";
        backup_status(ptypes::BackupStatusRequest) -> ptypes::BackupStatusResponse,
            "BackupStatus is not built yet: there are no backups";
        reset(()) -> (), "Reset is not built: nothing is left over from an operation that was broken off";
        restore_status(()) -> ptypes::RestoreStatusResponse, "RestoreStatus is not built yet: there are no backups";
        snapshot_purge(()) -> (),
            "SnapshotPurge is not built here: ask the engine, which folds on every replica";
        replica_rebuild_status(()) -> ptypes::ReplicaRebuildStatusResponse,
            "ReplicaRebuildStatus is not built here: ask the engine, which rebuilds";
        snapshot_clone_status(()) -> ptypes::SnapshotCloneStatusResponse,
            "SnapshotCloneStatus is not built here: ask the engine, which fills all its replicas";
    }
}
