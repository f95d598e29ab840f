//! Whether the disks of a volume's replicas can promise a larger size. Once a size is asked for there is no way back, so that it
//! is looked before.

use std::collections::BTreeMap;

use crate::api::Replica;
use crate::schedule::{Cluster, Disk};

/// Why a volume with these replicas cannot have so many bytes, in one sentence; `None`: it can, for all that is known.
pub fn refuses(volume: &str, cluster: &Cluster, replicas: &[Replica], bytes: u64) -> Option<String> {
    let (disk, obstacle) = in_the_way(cluster, replicas, bytes)?;
    Some(format!(
        "volume {volume} has a replica on disk {disk}, which cannot take it with {bytes} bytes: it is {obstacle}"
    ))
}

/// The first disk, as `NODE/UUID`, that cannot promise its replicas of the volume so many bytes each, and what it has against
/// it. A disk that nobody knows is not judged, nor one with a replica that failed.
fn in_the_way(cluster: &Cluster, replicas: &[Replica], bytes: u64) -> Option<(String, &'static str)> {
    let mut more: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for replica in replicas.iter().filter(|r| r.spec.failed_at.is_empty()) {
        let at = (replica.spec.node_id.as_str(), replica.spec.disk_id.as_str());
        let sum = more.entry(at).or_default();
        *sum = sum.saturating_add(bytes.saturating_sub(replica.spec.volume_size.bytes()));
    }
    let disk = |node: &str, disk: &str| -> Option<&Disk> { cluster.nodes.get(node)?.disks.get(disk) };
    more.into_iter().find_map(|((node, uuid), more)| {
        let obstacle = disk(node, uuid)?.limit_in_the_way(cluster.limits, more, 0)?;
        Some((format!("{node}/{uuid}"), obstacle.says()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Int64Text, ReplicaSpec};
    use crate::schedule::Node;

    const GIB: u64 = 1 << 30;

    fn replica(disk: &str, failed_at: &str) -> Replica {
        let spec = ReplicaSpec {
            node_id: "n1".into(),
            disk_id: disk.into(),
            volume_size: Int64Text::of_bytes(10 * GIB),
            failed_at: failed_at.into(),
            ..ReplicaSpec::default()
        };
        Replica::new("r", spec)
    }

    #[test]
    fn every_disk_with_a_replica_has_to_have_room_for_the_growth() {
        let disk = |scheduled: u64| Disk {
            maximum: 100 * GIB,
            available: 90 * GIB,
            reserved: 20 * GIB,
            scheduled: scheduled * GIB,
            ..Disk::default()
        };
        let low = Disk { available: 25 * GIB, ..disk(10) };
        let disks = [("wide", disk(10)), ("full", disk(70)), ("low", low)];
        let disks = disks.map(|(name, disk)| (name.to_owned(), disk)).into();
        let node = Node { disks, ..Node::default() };
        let cluster = Cluster { nodes: [("n1".to_owned(), node)].into(), ..Cluster::default() };
        let judged = |replicas: &[Replica], gib: u64| in_the_way(&cluster, replicas, gib * GIB);
        assert_eq!(judged(&[replica("wide", "")], 80), None, "all that the disk offers");
        let (at, why) = judged(&[replica("wide", "")], 81).unwrap();
        assert!(at == "n1/wide" && why.contains("over-provisioning"), "{at} {why}");
        assert_eq!(judged(&[replica("wide", ""), replica("full", "")], 21).unwrap().0, "n1/full");
        assert_eq!(
            judged(&[replica("wide", ""), replica("wide", "")], 46).unwrap().0,
            "n1/wide",
            "both grow"
        );
        assert!(judged(&[replica("low", "")], 11).unwrap().1.contains("minimal-available"));
        assert_eq!(judged(&[replica("full", "2026-01-01T00:00:00Z"), replica("unknown", "")], 80), None);
    }
}
