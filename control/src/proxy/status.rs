//! What engine and replicas tell, as Longhorn's clients expect it.

use std::collections::HashMap;

use crate::chain::HEAD;
use crate::progress::{COMPLETE, ERROR, IN_PROGRESS, percent};
use crate::proto::{imrpc, ptypes, volume};

/// The replicas that are in sync.
pub(super) fn members(list: ptypes::ReplicaListReply) -> impl Iterator<Item = ptypes::ReplicaAddress> {
    let members = list.replicas.into_iter().filter(|replica| replica.mode() == ptypes::ReplicaMode::Rw);
    members.filter_map(|replica| replica.address)
}

/// Layers by the names of their snapshots; the head is one of them.
pub(super) fn snapshots(layers: &[volume::Layer]) -> HashMap<String, imrpc::EngineSnapshotDiskInfo> {
    let shown = |name: &str| if name.is_empty() { HEAD.to_owned() } else { name.to_owned() };
    let disk = |layer: &volume::Layer| {
        let children = layers.iter().filter(|c| !layer.name.is_empty() && c.parent == layer.name);
        imrpc::EngineSnapshotDiskInfo {
            name: shown(&layer.name),
            parent: layer.parent.clone(),
            children: children.map(|child| (shown(&child.name), true)).collect(),
            removed: layer.removed,
            user_created: layer.user_created,
            created: layer.created.clone(),
            size: layer.allocated.to_string(),
            labels: layer.labels.clone(),
        }
    };
    layers.iter().map(disk).map(|disk| (disk.name.clone(), disk)).collect()
}

/// How far folding is, by the addresses of the replicas.
pub(super) fn purges(
    list: &ptypes::ReplicaListReply,
    purges: volume::PurgeStatus,
) -> HashMap<String, ptypes::SnapshotPurgeStatusResponse> {
    let address = |name: &str| {
        let found = list.replicas.iter().filter_map(|r| r.address.as_ref()).find(|a| a.instance_name == name);
        found.map_or_else(|| name.to_owned(), |a| a.address.clone())
    };
    let status = purges.replicas.into_iter().map(|purge| {
        let is_purging = purge.running;
        let status = ptypes::SnapshotPurgeStatusResponse {
            is_purging,
            progress: if is_purging { percent(purge.done, purge.total) } else { 100 },
            state: match (is_purging, purge.error.is_empty()) {
                (true, _) => IN_PROGRESS,
                (false, true) => COMPLETE,
                (false, false) => ERROR,
            }
            .to_owned(),
            error: purge.error,
        };
        (address(&purge.replica), status)
    });
    status.collect()
}

/// How far rebuilds are, by the addresses of the replicas that are being rebuilt. The sources are the members.
pub(super) fn rebuilds(
    list: ptypes::ReplicaListReply,
) -> HashMap<String, ptypes::ReplicaRebuildStatusResponse> {
    let addresses = |mode: ptypes::ReplicaMode| {
        list.replicas.iter().filter(move |r| r.mode() == mode).filter_map(|r| Some((r.address.as_ref()?, r)))
    };
    let sources: Vec<String> =
        addresses(ptypes::ReplicaMode::Rw).map(|(address, _)| address.address.clone()).collect();
    let status = addresses(ptypes::ReplicaMode::Wo).map(|(address, replica)| {
        let status = ptypes::ReplicaRebuildStatusResponse {
            is_rebuilding: true,
            progress: replica.rebuild_progress,
            state: IN_PROGRESS.to_owned(),
            from_replica_address: sources.first().cloned().unwrap_or_default(),
            from_replica_address_list: sources.clone(),
            ..Default::default()
        };
        (address.address.clone(), status)
    });
    status.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::ptypes::ReplicaMode;

    fn replica(name: &str, mode: ReplicaMode) -> ptypes::ControllerReplica {
        let address =
            ptypes::ReplicaAddress { address: format!("unix:/r/{name}.sock"), instance_name: name.into() };
        ptypes::ControllerReplica {
            address: Some(address),
            mode: mode.into(),
            rebuild_progress: 40,
            ..Default::default()
        }
    }

    fn list() -> ptypes::ReplicaListReply {
        let replicas = [("a", ReplicaMode::Err), ("b", ReplicaMode::Wo), ("c", ReplicaMode::Rw)];
        ptypes::ReplicaListReply { replicas: replicas.map(|(n, mode)| replica(n, mode)).into() }
    }

    #[test]
    fn snapshots_have_their_names_and_the_head_longhorns() {
        let layer = |name: &str, parent: &str, allocated| volume::Layer {
            name: name.into(),
            parent: parent.into(),
            allocated,
            ..Default::default()
        };
        let all = snapshots(&[layer("one", "", 4096), layer("", "one", 0)]);
        assert_eq!((all["one"].parent.as_str(), all["volume-head"].parent.as_str()), ("", "one"));
        assert_eq!((all["one"].size.as_str(), all["volume-head"].children.len()), ("4096", 0));
        assert!(all["one"].children["volume-head"]);
    }

    #[test]
    fn progress_is_by_address() {
        let purge = |replica: &str, snapshot: &str, error: &str| volume::ReplicaPurge {
            replica: replica.into(),
            running: !snapshot.is_empty(),
            snapshot: snapshot.into(),
            done: 1,
            total: 3,
            error: error.into(),
            kept: Vec::new(),
        };
        let told = vec![purge("a", "", ""), purge("b", "s1", ""), purge("c", "", "disk full")];
        let status = purges(&list(), volume::PurgeStatus { replicas: told });
        let of = |name: &str| &status[&format!("unix:/r/{name}.sock")];
        assert_eq!((of("a").state.as_str(), of("a").progress, of("a").is_purging), (COMPLETE, 100, false));
        assert_eq!((of("b").state.as_str(), of("b").progress, of("b").is_purging), (IN_PROGRESS, 33, true));
        assert_eq!((of("c").state.as_str(), of("c").error.as_str()), (ERROR, "disk full"));

        let status = rebuilds(list());
        assert_eq!(status.len(), 1);
        let rebuild = &status["unix:/r/b.sock"];
        assert!(rebuild.is_rebuilding && rebuild.progress == 40);
        assert_eq!(rebuild.from_replica_address_list, ["unix:/r/c.sock"]);
    }
}
