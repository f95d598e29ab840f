//! The gRPC face of a replica: Longhorn's `ReplicaService` over a handle that knows the replica. It also translates
//! between snapshot names and Longhorn's file names, for both ends of the wire.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use lh_block::{Generation, SECTOR};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::proto::ptypes;
use crate::proto::ptypes::replica_service_server::{ReplicaService, ReplicaServiceServer};
use crate::proto::ptypes::sync_agent_service_server::SyncAgentServiceServer;
use crate::sync_agent::SyncAgent;
use crate::transport::{Identity, TrustedPeers, bind_private};
use crate::unbuilt::unbuilt;

/// Most snapshots of a volume.
const SNAPSHOTS_MAX: usize = 249;

/// What a gRPC server asks a replica. Called from the server's thread; no call may block.
pub trait ReplicaControl: Send + Sync + 'static {
    /// The replica as it is now. `None`: its directory is not open yet, or not any more.
    fn status(&self) -> Pin<Box<dyn Future<Output = Option<ReplicaStatus>> + Send>>;
}

/// A replica as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// The volume's size in bytes.
    pub size: u64,
    /// The highest generation that was ever fenced for.
    pub generation: Generation,
    /// An engine uses it.
    pub open: bool,
    /// It was not closed cleanly since its last write.
    pub dirty: bool,
    /// It is unusable alone until a rebuild ends.
    pub rebuilding: bool,
    /// Base first, the head last.
    pub chain: Vec<Layer>,
}

/// One layer of a replica's chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layer {
    /// The snapshot's name; empty for the head.
    pub name: String,
    /// The snapshot below; empty for the lowest layer.
    pub parent: String,
    /// Marked for removal.
    pub removed: bool,
    /// Asked for by a user.
    pub user_created: bool,
    /// RFC 3339.
    pub created: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Bytes that the layer takes on its disk.
    pub allocated: u64,
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
    let identity = Identity { volume: volume.to_owned(), instance: instance.to_owned(), role: "replica" };
    let service = ReplicaServiceServer::with_interceptor(Service { replica }, identity.clone());
    let files = SyncAgentServiceServer::with_interceptor(SyncAgent, identity);
    let peers = TrustedPeers::new(bind_private(socket)?);
    Server::builder()
        .add_service(service)
        .add_service(files)
        .serve_with_incoming(peers)
        .await
        .map_err(io::Error::other)
}

/// Longhorn's file name of a snapshot; the head's has a number that is the replica's own affair, and stands for any.
fn file_name(layer: &str) -> String {
    if layer.is_empty() { "volume-head-000.img".to_owned() } else { format!("volume-snap-{layer}.img") }
}

/// The snapshot's name in one of Longhorn's file names; `None` for a head.
pub(crate) fn snapshot_name(file: &str) -> Option<&str> {
    file.strip_prefix("volume-snap-")?.strip_suffix(".img")
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
        chain: status.chain.iter().rev().map(|layer| file_name(&layer.name)).collect(),
        disks: disks.collect(),
        remain_snapshots: count(SNAPSHOTS_MAX.saturating_sub(used)),
        head_file_size: head.allocated.try_into().unwrap_or(i64::MAX),
        revision_counter_disabled: true,
        snapshot_count_usage: count(used),
        snapshot_size_usage: snapshots.map(|l| l.allocated).sum::<u64>().try_into().unwrap_or(i64::MAX),
        snapshot_count_total: count(status.chain.len().saturating_sub(1)),
        generation: status.generation.into(),
        ..Default::default()
    }
}

fn count(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

fn disk(layer: &Layer, chain: &[Layer]) -> ptypes::DiskInfo {
    let name = file_name(&layer.name);
    let children = chain.iter().filter(|c| !layer.name.is_empty() && c.parent == layer.name);
    ptypes::DiskInfo {
        parent: if layer.parent.is_empty() { String::new() } else { file_name(&layer.parent) },
        children: children.map(|c| (file_name(&c.name), true)).collect(),
        removed: layer.removed,
        user_created: layer.user_created,
        created: layer.created.clone(),
        size: layer.allocated.to_string(),
        labels: layer.labels.clone().into_iter().collect::<HashMap<_, _>>(),
        name,
    }
}

/// The chain in an answer to `ReplicaGet`, base first, the head last. Layers that are not in the head's chain are left
/// out.
pub fn chain_of(replica: &ptypes::Replica) -> Vec<Layer> {
    let layers = replica.chain.iter().rev().filter_map(|file| replica.disks.get(file));
    layers
        .map(|disk| Layer {
            name: snapshot_name(&disk.name).unwrap_or_default().to_owned(),
            parent: snapshot_name(&disk.parent).unwrap_or_default().to_owned(),
            removed: disk.removed,
            user_created: disk.user_created,
            created: disk.created.clone(),
            labels: disk.labels.clone().into_iter().collect(),
            allocated: disk.size.parse().unwrap_or_default(),
        })
        .collect()
}

struct Service {
    replica: Arc<dyn ReplicaControl>,
}

#[tonic::async_trait]
impl ReplicaService for Service {
    async fn replica_get(&self, _: Request<()>) -> Result<Response<ptypes::ReplicaGetResponse>, Status> {
        match self.replica.status().await {
            Some(status) => Ok(Response::new(ptypes::ReplicaGetResponse { replica: Some(message(status)) })),
            None => Err(Status::unavailable("the replica's directory is not open yet")),
        }
    }

    unbuilt! {
        replica_create(ptypes::ReplicaCreateRequest) -> ptypes::ReplicaCreateResponse,
            "ReplicaCreate is not built: a replica is created by the --size of its command line";
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
        disk_remove(ptypes::DiskRemoveRequest) -> ptypes::DiskRemoveResponse, "DiskRemove is not built yet";
        disk_replace(ptypes::DiskReplaceRequest) -> ptypes::DiskReplaceResponse, "DiskReplace is not built yet";
        disk_prepare_remove(ptypes::DiskPrepareRemoveRequest) -> ptypes::DiskPrepareRemoveResponse,
            "DiskPrepareRemove is not built yet";
        disk_mark_as_removed(ptypes::DiskMarkAsRemovedRequest) -> ptypes::DiskMarkAsRemovedResponse,
            "DiskMarkAsRemoved is not built: chain operations go through the engine";
        rebuilding_set(ptypes::RebuildingSetRequest) -> ptypes::RebuildingSetResponse,
            "RebuildingSet is not built: the engine rebuilds by itself";
        revision_counter_set(ptypes::RevisionCounterSetRequest) -> ptypes::RevisionCounterSetResponse,
            "RevisionCounterSet is not built: epochs take its place";
        unmap_mark_disk_chain_removed_set(ptypes::UnmapMarkDiskChainRemovedSetRequest)
            -> ptypes::UnmapMarkDiskChainRemovedSetResponse,
            "UnmapMarkDiskChainRemovedSet is not built: UNMAP never touches what a snapshot needs";
        snapshot_max_count_set(ptypes::SnapshotMaxCountSetRequest) -> ptypes::SnapshotMaxCountSetResponse,
            "SnapshotMaxCountSet is not built yet: the limit is 249";
        snapshot_max_size_set(ptypes::SnapshotMaxSizeSetRequest) -> ptypes::SnapshotMaxSizeSetResponse,
            "SnapshotMaxSizeSet is not built yet";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(name: &str, parent: &str) -> Layer {
        Layer { name: name.into(), parent: parent.into(), allocated: 4096, ..Layer::default() }
    }

    #[test]
    fn a_chain_survives_the_way_through_longhorns_names() {
        let mut middle = layer("s2", "s1");
        middle.labels.insert("why".into(), "test".into());
        middle.user_created = true;
        let chain = vec![layer("s1", ""), middle, layer("", "s2")];
        let status = ReplicaStatus { size: 1 << 20, open: true, chain: chain.clone(), ..Default::default() };
        let message = message(status);
        assert_eq!(message.chain, ["volume-head-000.img", "volume-snap-s2.img", "volume-snap-s1.img"]);
        assert_eq!(message.parent, "volume-snap-s2.img");
        assert!(message.disks["volume-snap-s1.img"].children["volume-snap-s2.img"]);
        assert!(message.disks["volume-head-000.img"].children.is_empty());
        assert_eq!((message.snapshot_count_usage, message.remain_snapshots), (2, 247));
        assert_eq!((message.size.as_str(), message.state.as_str()), ("1048576", "open"));
        assert_eq!(chain_of(&message), chain);
    }
}
