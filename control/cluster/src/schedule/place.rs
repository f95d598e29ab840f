//! The best disk for one more replica.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use super::fit::{Obstacle, obstacle};
use super::{Cluster, Disk, Locality, Resident, Want};

/// A disk of a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Placement {
    /// The node.
    pub node: String,
    /// UUID of the disk.
    pub disk: String,
}

/// No disk can take the replica.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// How many disks have that against it.
    pub disks: BTreeMap<Obstacle, usize>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.disks.is_empty() {
            return f.write_str("there is no disk: add one to a node (spec.disks of nodes.longhorn.io)");
        }
        f.write_str("no disk can take a replica: ")?;
        for (i, (obstacle, count)) in self.disks.iter().enumerate() {
            let (comma, s) = (if i > 0 { "; " } else { "" }, if *count == 1 { "" } else { "s" });
            write!(f, "{comma}{count} disk{s} {}", obstacle.says())?;
        }
        Ok(())
    }
}

/// The best disk for one more replica of a volume that has these.
///
/// # Errors
/// What each disk has against it.
pub fn place(cluster: &Cluster, want: &Want, residents: &[Resident]) -> Result<Placement, Refusal> {
    let mut refusal = Refusal::default();
    let mut best = None;
    for (node_name, node) in &cluster.nodes {
        for (disk_id, disk) in &node.disks {
            if let Some(o) = obstacle(cluster, want, residents, (node_name, node), (disk_id, disk)) {
                *refusal.disks.entry(o).or_default() += 1;
                continue;
            }
            let rank = rank(cluster, want, residents, node_name, disk_id);
            // Names decide last, so that equal clusters give equal answers.
            let candidate = (rank, Reverse(slack(disk)), node_name, disk_id);
            if best.as_ref().is_none_or(|b| candidate < *b) {
                best = Some(candidate);
            }
        }
    }
    best.map(|(_, _, node, disk)| Placement { node: node.clone(), disk: disk.clone() }).ok_or(refusal)
}

/// Places for up to `count` more replicas, and why there are not more if there are not.
pub fn place_all(
    cluster: &Cluster,
    want: &Want,
    residents: &[Resident],
    count: usize,
) -> (Vec<Placement>, Option<Refusal>) {
    let (mut cluster, mut residents) = (cluster.clone(), residents.to_vec());
    let mut places = Vec::new();
    while places.len() < count {
        match place(&cluster, want, &residents) {
            Ok(at) => {
                cluster.reserve(&at, want.size, want.fill);
                let (node, disk) = (at.node.clone(), at.disk.clone());
                residents.push(Resident { name: String::new(), node, disk, ..Resident::default() });
                places.push(at);
            }
            Err(refusal) => return (places, Some(refusal)),
        }
    }
    (places, None)
}

/// How far a disk is from the ideal one: lower is better, the first difference decides.
type Rank = (bool, usize, usize, usize);

fn rank(cluster: &Cluster, want: &Want, residents: &[Resident], node: &str, disk: &str) -> Rank {
    let staying = || residents.iter().filter(|r| !r.failed && !r.leaving);
    let misses_its_node = match &want.locality {
        Locality::Prefer(local) => local != node && !staying().any(|r| r.node == *local),
        Locality::Anywhere | Locality::Only(_) => false,
    };
    let zone = cluster.zone(node);
    let in_zone = staying().filter(|r| cluster.zone(&r.node) == zone).count();
    let on_node = staying().filter(|r| r.node == node).count();
    let on_disk = staying().filter(|r| r.node == node && r.disk == disk).count();
    (misses_its_node, in_zone, on_node, on_disk)
}

/// Bytes that would be free if every replica were still to be written; below zero where more is promised than is there. What
/// is promised counts in full: free bytes alone do not change when volumes are made, and all of them would go to one disk.
fn slack(disk: &Disk) -> i128 {
    i128::from(disk.available) - i128::from(disk.scheduled)
}

/// Bytes that a disk can still promise or still has, whichever is less.
fn room(cluster: &Cluster, node: &str, disk: &str) -> u128 {
    let Some(disk) = cluster.nodes.get(node).and_then(|n| n.disks.get(disk)) else { return 0 };
    let offered = u128::from(disk.maximum.saturating_sub(disk.reserved))
        * u128::from(cluster.limits.over_provisioning)
        / 100;
    offered.saturating_sub(disk.scheduled.into()).min(disk.available.into())
}

impl Cluster {
    /// Bytes of the largest volume that each disk could take now, of those disks that may take one.
    pub fn rooms(&self, want: &Want) -> BTreeMap<Placement, u64> {
        let mut rooms = BTreeMap::new();
        for (node_name, node) in &self.nodes {
            for (disk_id, disk) in &node.disks {
                if obstacle(self, want, &[], (node_name, node), (disk_id, disk)).is_none() {
                    let at = Placement { node: node_name.clone(), disk: disk_id.clone() };
                    rooms.insert(at, u64::try_from(room(self, node_name, disk_id)).unwrap_or(u64::MAX));
                }
            }
        }
        rooms
    }
}
