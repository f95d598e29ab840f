//! What room is left, for all volumes of a class and for those that are used on one node.
//!
//! csi-provisioner asks for every node and every class at once, each minute, so what was read for one answer is kept for those
//! that follow it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use lh_cluster::api::{DataLocality, VolumeSpec};
use lh_cluster::schedule::{Cluster as Picture, Want};
use lh_cluster::settings::Settings;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::ControllerService;
use crate::proto::csi::{GetCapacityRequest, GetCapacityResponse};
use crate::{Refused, capability, node, parameters};

/// How old what is told may be.
const AGE: Duration = Duration::from_secs(5);

/// The settings and disks as they were read last.
#[derive(Clone, Default)]
pub(super) struct Rooms {
    last: Arc<Mutex<Option<Arc<Read>>>>,
}

struct Read {
    at: Instant,
    settings: Settings,
    picture: Picture,
}

impl ControllerService {
    pub(super) async fn get_capacity(
        &self,
        request: GetCapacityRequest,
    ) -> Result<GetCapacityResponse, Refused> {
        let spec = parameters::volume(&request.parameters)?;
        let segments = request.accessible_topology.map(|t| t.segments).unwrap_or_default();
        let disks = self.disks().await?;
        let used_on = match segments.get(node::HOST) {
            Some(host) if !disks.picture.nodes.contains_key(host) => {
                Some(self.cluster.node_with(node::HOST, host).await?.unwrap_or_else(|| host.clone()))
            }
            host => host.cloned(),
        };
        let (sum, largest) = room(&disks.settings, &disks.picture, &spec, used_on.as_deref());
        let bytes = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let is_xfs = request.parameters.get("fsType").is_some_and(|kind| kind == "xfs");
        Ok(GetCapacityResponse {
            available_capacity: bytes(sum),
            maximum_volume_size: Some(bytes(capability::largest(largest, is_xfs))),
            minimum_volume_size: None,
        })
    }

    /// The settings and disks, not older than [`AGE`]. Whoever asks while they are read waits for that.
    async fn disks(&self) -> Result<Arc<Read>, Refused> {
        let mut last = self.rooms.last.lock().await;
        if let Some(read) = last.as_ref().filter(|read| read.at.elapsed() < AGE) {
            return Ok(Arc::clone(read));
        }
        let (settings, picture) = self.cluster.picture().await?;
        let read = Arc::new(Read { at: Instant::now(), settings, picture });
        *last = Some(Arc::clone(&read));
        Ok(read)
    }
}

/// Bytes of all disks that take a replica of such a volume when it is used on a node, and of the roomiest one.
///
/// A volume is used everywhere, wherever its replicas are: a node's own disks alone count only if a replica is to be
/// there. Best effort is none where there is no disk.
fn room(settings: &Settings, picture: &Picture, spec: &VolumeSpec, used_on: Option<&str>) -> (u64, u64) {
    let locality = match spec.data_locality {
        DataLocality::Setting => settings.data_locality(),
        own => own,
    };
    let has_disks = |name: &str| picture.nodes.get(name).is_some_and(|node| !node.disks.is_empty());
    let only = used_on.filter(|node| match locality {
        DataLocality::StrictLocal => true,
        DataLocality::BestEffort => has_disks(node),
        DataLocality::Disabled | DataLocality::Setting => false,
    });
    let want = Want {
        node_selector: spec.node_selector.iter().cloned().collect(),
        disk_selector: spec.disk_selector.iter().cloned().collect(),
        tagged_nodes_serve_all: settings.tagged_nodes_serve_all(),
        tagged_disks_serve_all: settings.tagged_disks_serve_all(),
        ..Want::default()
    };
    let rooms: BTreeMap<_, u64> =
        picture.rooms(&want).into_iter().filter(|(at, _)| only.is_none_or(|node| node == at.node)).collect();
    let sum = rooms.values().fold(0_u64, |sum, room| sum.saturating_add(*room));
    (sum, rooms.values().copied().max().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use lh_cluster::schedule::{Disk, Node};

    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_nodes_own_disks_count_where_a_replica_is_to_be_there() {
        let disk = |gib: u64| {
            let bytes = gib * GIB;
            Disk { schedulable: true, maximum: bytes, available: bytes, ..Disk::default() }
        };
        let node = |disks: &[u64]| Node {
            schedulable: true,
            disks: disks.iter().map(|gib| (format!("d{gib}"), disk(*gib))).collect(),
            ..Node::default()
        };
        let nodes = [("a", node(&[10, 20])), ("b", node(&[30])), ("compute", node(&[]))];
        let nodes = nodes.into_iter().map(|(name, node)| (name.to_owned(), node)).collect();
        let picture = Picture { nodes, ..Picture::default() };
        let of = |locality, settings: &[(&str, &str)], used_on| {
            let spec = VolumeSpec { data_locality: locality, ..VolumeSpec::default() };
            let (sum, largest) = room(&Settings::of(settings.iter().copied()), &picture, &spec, used_on);
            (sum / GIB, largest / GIB)
        };
        use DataLocality::{BestEffort, Disabled, Setting, StrictLocal};
        for locality in [Disabled, BestEffort, StrictLocal, Setting] {
            assert_eq!(of(locality, &[], None), (60, 30), "{locality}");
        }
        assert_eq!(of(StrictLocal, &[], Some("a")), (30, 20));
        assert_eq!(of(StrictLocal, &[], Some("compute")), (0, 0));
        assert_eq!(of(BestEffort, &[], Some("b")), (30, 30));
        for (locality, node) in [(BestEffort, "compute"), (Disabled, "compute"), (Setting, "a")] {
            assert_eq!(of(locality, &[], Some(node)), (60, 30), "{locality} on {node}");
        }
        assert_eq!(of(Setting, &[("default-data-locality", "strict-local")], Some("a")), (30, 20));
    }
}
