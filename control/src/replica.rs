//! The gRPC face of a replica: Longhorn's `ReplicaService` over a handle that knows the replica.

mod sync_agent;

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use lh_block::{Generation, SECTOR};
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use crate::chain::{Layer, disk, file_name, heads_chain};
use crate::front::{self, Front};
use crate::limits::{refuse_unmap_mark, snapshot_count, snapshot_size};
use crate::proto::ptypes;
use crate::proto::ptypes::replica_service_server::{ReplicaService, ReplicaServiceServer};
use crate::proto::ptypes::sync_agent_service_server::SyncAgentServiceServer;
use crate::transport::Identity;
use crate::unbuilt::unbuilt;
use sync_agent::SyncAgent;

/// What a gRPC server asks a replica. Called from the server's thread; no call may block.
pub trait ReplicaControl: Send + Sync + 'static {
    /// The replica as it is now. `None`: its directory is not open yet, or not any more.
    fn status(&self) -> Pin<Box<dyn Future<Output = Option<ReplicaStatus>> + Send>>;

    /// Bounds beyond which this replica refuses a snapshot, and with it the whole volume does. `None`: as it is. They
    /// hold until the process ends.
    fn set_snapshot_limits(&self, count: Option<u32>, bytes: Option<u64>);

    /// Takes a snapshot's checksums, after those that were asked for before; `again`: though they are on record. False
    /// while the directory is not open.
    fn hash(&self, snapshot: &str, again: bool) -> bool;

    /// What became of a snapshot that was to be hashed.
    fn hash_status(&self, snapshot: &str) -> HashStatus;

    /// Ends the hashing of a snapshot, if it is hashed.
    fn cancel_hash(&self, snapshot: &str);

    /// Some snapshot is being hashed.
    fn is_hashing(&self) -> bool;
}

/// A fold that a replica is at, or has given up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoldProgress {
    /// Bytes done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
    /// Why it does not go on; `None`: it runs.
    pub error: Option<String>,
}

/// What became of a snapshot that was to be hashed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HashStatus {
    /// Nobody asked since the process began.
    #[default]
    None,
    /// It is under way.
    Running,
    /// Its crc64 is on record.
    Complete {
        /// The crc64.
        checksum: u64,
        /// The snapshot is not what it was when it was hashed before, though nobody changed it.
        corrupted: bool,
    },
    /// It was not hashed; one sentence.
    Failed(String),
}

/// A replica as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// The volume's size in bytes.
    pub size: u64,
    /// The highest generation that was ever fenced for.
    pub generation: Generation,
    /// It has recorded an epoch.
    pub epoch_recorded: bool,
    /// An engine uses it.
    pub open: bool,
    /// It was not closed cleanly since its last write.
    pub dirty: bool,
    /// It is unusable alone until a rebuild ends.
    pub rebuilding: bool,
    /// All layers, of other branches, too: parents before children, the head last.
    pub chain: Vec<Layer>,
    /// The fold that runs, or the last one if it did not end.
    pub fold: Option<FoldProgress>,
    /// Most snapshots that it takes.
    pub snapshots_max: u32,
}

/// Serves the replica on a unix socket until it is dropped.
///
/// # Errors
/// The socket cannot be bound, or the server fails.
pub async fn serve(
    socket: &Path,
    volume: &str,
    instance: &str,
    replica: Arc<dyn ReplicaControl>,
) -> io::Result<()> {
    serve_at(&[Front::Unix(socket.to_owned())], volume, instance, replica).await
}

/// The same wherever it is to answer, until nobody answers anywhere any more.
///
/// # Errors
/// As [`serve`].
pub async fn serve_at(
    fronts: &[Front],
    volume: &str,
    instance: &str,
    replica: Arc<dyn ReplicaControl>,
) -> io::Result<()> {
    let identity = Identity { volume: volume.to_owned(), instance: instance.to_owned(), role: "replica" };
    let agent = SyncAgent::of(Arc::clone(&replica));
    let service = ReplicaServiceServer::with_interceptor(Service { replica }, identity.clone());
    let files = SyncAgentServiceServer::with_interceptor(agent, identity);
    let routes = Routes::new(service)
        .add_service(files)
        .add_service(crate::logging::service())
        .add_service(crate::health::service());
    front::serve(fronts, routes).await
}

fn message(status: ReplicaStatus) -> ptypes::Replica {
    let snapshots = status.chain.iter().filter(|l| !l.name.is_empty() && !l.removed);
    let used = snapshots.clone().count();
    let head = status.chain.last().cloned().unwrap_or_default();
    let disks = status.chain.iter().map(|layer| (file_name(&layer.name), disk(layer, &status.chain)));
    ptypes::Replica {
        dirty: status.dirty,
        rebuilding: status.rebuilding,
        head: file_name(""),
        parent: if head.parent.is_empty() { String::new() } else { file_name(&head.parent) },
        size: status.size.to_string(),
        sector_size: SECTOR.cast_signed(),
        state: match (status.rebuilding, status.open, status.dirty) {
            (true, ..) => "rebuilding",
            (false, true, true) => "dirty",
            (false, true, false) => "open",
            (false, false, _) => "closed",
        }
        .to_owned(),
        chain: heads_chain(&status.chain),
        disks: disks.collect(),
        remain_snapshots: count(status.snapshots_max as usize).saturating_sub(count(used)).max(0),
        head_file_size: head.allocated.try_into().unwrap_or(i64::MAX),
        revision_counter_disabled: true,
        snapshot_count_usage: count(used),
        snapshot_size_usage: snapshots.map(|l| l.allocated).sum::<u64>().try_into().unwrap_or(i64::MAX),
        snapshot_count_total: count(status.chain.len().saturating_sub(1)),
        generation: status.generation.into(),
        epoch_recorded: status.epoch_recorded,
        ..Default::default()
    }
}

fn count(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

struct Service {
    replica: Arc<dyn ReplicaControl>,
}

impl Service {
    async fn look(&self) -> Result<ptypes::Replica, Status> {
        let status = self.replica.status().await;
        status.map(message).ok_or_else(|| Status::unavailable("the replica's directory is not open yet"))
    }
}

#[tonic::async_trait]
impl ReplicaService for Service {
    async fn replica_get(&self, _: Request<()>) -> Result<Response<ptypes::ReplicaGetResponse>, Status> {
        Ok(Response::new(ptypes::ReplicaGetResponse { replica: Some(self.look().await?) }))
    }

    /// A replica is created when its process starts: done already, if it has the size.
    async fn replica_create(
        &self,
        request: Request<ptypes::ReplicaCreateRequest>,
    ) -> Result<Response<ptypes::ReplicaCreateResponse>, Status> {
        let wanted = request.into_inner().size;
        let replica = self.look().await?;
        if wanted != replica.size {
            return Err(Status::failed_precondition(format!(
                "the replica has {} bytes, not {wanted}: it is created by the --size of its command line",
                replica.size
            )));
        }
        Ok(Response::new(ptypes::ReplicaCreateResponse { replica: Some(replica) }))
    }

    async fn snapshot_max_count_set(
        &self,
        request: Request<ptypes::SnapshotMaxCountSetRequest>,
    ) -> Result<Response<ptypes::SnapshotMaxCountSetResponse>, Status> {
        let count = snapshot_count(request.into_inner().count)?;
        self.replica.set_snapshot_limits(Some(count), None);
        Ok(Response::new(ptypes::SnapshotMaxCountSetResponse { replica: Some(self.look().await?) }))
    }

    async fn snapshot_max_size_set(
        &self,
        request: Request<ptypes::SnapshotMaxSizeSetRequest>,
    ) -> Result<Response<ptypes::SnapshotMaxSizeSetResponse>, Status> {
        let size = snapshot_size(request.into_inner().size)?;
        self.replica.set_snapshot_limits(None, Some(size));
        Ok(Response::new(ptypes::SnapshotMaxSizeSetResponse { replica: Some(self.look().await?) }))
    }

    async fn unmap_mark_disk_chain_removed_set(
        &self,
        request: Request<ptypes::UnmapMarkDiskChainRemovedSetRequest>,
    ) -> Result<Response<ptypes::UnmapMarkDiskChainRemovedSetResponse>, Status> {
        refuse_unmap_mark(request.into_inner().enabled)?;
        let replica = Some(self.look().await?);
        Ok(Response::new(ptypes::UnmapMarkDiskChainRemovedSetResponse { replica }))
    }

    unbuilt! {
        replica_delete(()) -> (), "ReplicaDelete is not built: `longhornctl rm` deletes a volume's data";
        replica_open(ptypes::ReplicaOpenRequest) -> ptypes::ReplicaOpenResponse,
            "ReplicaOpen is not built: a replica opens when its process starts";
        replica_close(()) -> ptypes::ReplicaCloseResponse,
            "ReplicaClose is not built: the engine closes its replicas over the data connection";
        replica_reload(()) -> ptypes::ReplicaReloadResponse, "ReplicaReload is not built";
        replica_revert(ptypes::ReplicaRevertRequest) -> ptypes::ReplicaRevertResponse,
            "ReplicaRevert is not built: chain operations go through the engine";
        replica_snapshot(ptypes::ReplicaSnapshotRequest) -> ptypes::ReplicaSnapshotResponse,
            "ReplicaSnapshot is not built: chain operations go through the engine";
        replica_expand(ptypes::ReplicaExpandRequest) -> ptypes::ReplicaExpandResponse,
            "ReplicaExpand is not built: chain operations go through the engine";
        disk_remove(ptypes::DiskRemoveRequest) -> ptypes::DiskRemoveResponse,
            "DiskRemove is not built: the engine's SnapshotRemove and SnapshotPurge do it on every replica";
        disk_replace(ptypes::DiskReplaceRequest) -> ptypes::DiskReplaceResponse,
            "DiskReplace is not built: the engine's SnapshotPurge folds on every replica";
        disk_prepare_remove(ptypes::DiskPrepareRemoveRequest) -> ptypes::DiskPrepareRemoveResponse,
            "DiskPrepareRemove is not built: the engine's SnapshotPurge folds on every replica";
        disk_mark_as_removed(ptypes::DiskMarkAsRemovedRequest) -> ptypes::DiskMarkAsRemovedResponse,
            "DiskMarkAsRemoved is not built: chain operations go through the engine";
        rebuilding_set(ptypes::RebuildingSetRequest) -> ptypes::RebuildingSetResponse,
            "RebuildingSet is not built: the engine rebuilds by itself";
        revision_counter_set(ptypes::RevisionCounterSetRequest) -> ptypes::RevisionCounterSetResponse,
            "RevisionCounterSet is not built: epochs take its place";
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::layers_of;

    fn layer(name: &str, parent: &str) -> Layer {
        Layer { name: name.into(), parent: parent.into(), allocated: 4096, ..Layer::default() }
    }

    #[test]
    fn a_chain_survives_the_way_through_longhorns_names() {
        let mut middle = layer("s2", "s1");
        middle.labels.insert("why".into(), "test".into());
        middle.user_created = true;
        let chain = vec![layer("s1", ""), middle, layer("", "s2")];
        let status = ReplicaStatus {
            size: 1 << 20,
            open: true,
            chain: chain.clone(),
            snapshots_max: 249,
            ..Default::default()
        };
        let message = message(status);
        assert_eq!(message.chain, ["volume-head-000.img", "volume-snap-s2.img", "volume-snap-s1.img"]);
        assert_eq!(message.parent, "volume-snap-s2.img");
        assert!(message.disks["volume-snap-s1.img"].children["volume-snap-s2.img"]);
        assert!(message.disks["volume-head-000.img"].children.is_empty());
        assert_eq!((message.snapshot_count_usage, message.remain_snapshots), (2, 247));
        assert_eq!((message.size.as_str(), message.state.as_str()), ("1048576", "open"));
        assert_eq!(layers_of(&message), chain);
    }

    #[test]
    fn other_branches_are_disks_and_not_in_the_chain() {
        let made = |name: &str, parent: &str, created: &str| Layer {
            created: created.into(),
            ..layer(name, parent)
        };
        let layers = vec![
            made("a", "", "2026-01-01T00:00:00Z"),
            made("b", "a", "2026-01-02T00:00:00Z"),
            made("c", "a", "2026-01-03T00:00:00Z"),
            made("", "c", "2026-01-04T00:00:00Z"),
        ];
        let message = message(ReplicaStatus { chain: layers.clone(), ..Default::default() });
        assert_eq!(message.chain, ["volume-head-000.img", "volume-snap-c.img", "volume-snap-a.img"]);
        assert_eq!(message.disks.len(), 4);
        assert_eq!(layers_of(&message), layers);
    }
}
