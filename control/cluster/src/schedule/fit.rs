//! What forbids a replica on a disk.

use std::collections::BTreeSet;

use super::{Cluster, Disk, Emptying, Locality, Node, Resident, Want};

/// The limits of every disk, as the settings say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Per cent of what a disk offers that replicas may add up to (storage-over-provisioning-percentage).
    pub over_provisioning: u32,
    /// Per cent of a disk that stays free (storage-minimal-available-percentage).
    pub minimal_available: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { over_provisioning: 100, minimal_available: 25 }
    }
}

/// Why a replica cannot be on a disk. In the order in which they are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Obstacle {
    /// The volume's only replica belongs on another node.
    NotLocal,
    /// The node does not answer, or takes no new replicas.
    NodeUnschedulable,
    /// The node is being emptied.
    NodeEvicting,
    /// The node lacks a tag.
    NodeTags,
    /// The node lacks the program of the volume's image.
    NoProgram,
    /// The disk does not work, or takes no new replicas.
    DiskUnschedulable,
    /// The disk is being emptied.
    DiskEvicting,
    /// The disk lacks a tag.
    DiskTags,
    /// Another replica is on the node.
    NodeTaken,
    /// Another replica is in the zone.
    ZoneTaken,
    /// Another replica is on the disk.
    DiskTaken,
    /// All replicas on the disk together would exceed what it offers.
    OverProvisioned,
    /// Too little of the disk would stay free.
    NoSpace,
}

impl Obstacle {
    /// For people: what a number of disks have against the replica.
    pub const fn says(self) -> &'static str {
        match self {
            Self::NotLocal => "not on the node that the volume is attached to (strict-local)",
            Self::NodeUnschedulable => {
                "on a node that is not ready or takes no new replicas (allowScheduling, cordon)"
            }
            Self::NodeEvicting => "on a node that is being emptied (evictionRequested, node-drain-policy)",
            Self::NodeTags => "on a node without the tags of the volume's nodeSelector",
            Self::NoProgram => "on a node without the program of the volume's image (engineimages)",
            Self::DiskUnschedulable => "not ready or closed to new replicas (allowScheduling)",
            Self::DiskEvicting => "being emptied (evictionRequested)",
            Self::DiskTags => "without the tags of the volume's diskSelector",
            Self::NodeTaken => {
                "on a node that has a replica of the volume already (replica-soft-anti-affinity is off)"
            }
            Self::ZoneTaken => {
                "in a zone that has a replica of the volume already (replica-zone-soft-anti-affinity is off)"
            }
            Self::DiskTaken => {
                "with a replica of the volume already (replica-disk-soft-anti-affinity is off)"
            }
            Self::OverProvisioned => {
                "promised to other replicas already (storage-over-provisioning-percentage, storageReserved)"
            }
            Self::NoSpace => "with too little free space (storage-minimal-available-percentage)",
        }
    }
}

impl Disk {
    /// What of the limits forbids a replica of `size` bytes that takes `fill` at once.
    pub fn limit_in_the_way(&self, limits: Limits, size: u64, fill: u64) -> Option<Obstacle> {
        let offered = u128::from(self.maximum.saturating_sub(self.reserved));
        let promised = u128::from(self.scheduled) + u128::from(size);
        if self.maximum == 0 || promised * 100 > offered * u128::from(limits.over_provisioning) {
            return Some(Obstacle::OverProvisioned);
        }
        let left = u128::from(self.available.saturating_sub(fill));
        let keep = u128::from(self.maximum) * u128::from(limits.minimal_available);
        (left * 100 <= keep || self.available < fill).then_some(Obstacle::NoSpace)
    }
}

fn has_tags(own: &BTreeSet<String>, wanted: &BTreeSet<String>, serves_all: bool) -> bool {
    if wanted.is_empty() { serves_all || own.is_empty() } else { wanted.is_subset(own) }
}

/// Why a new replica of the volume cannot be on that disk of that node; `None`: it can.
pub(super) fn obstacle(
    cluster: &Cluster,
    want: &Want,
    residents: &[Resident],
    (node_name, node): (&str, &Node),
    (disk_id, disk): (&str, &Disk),
) -> Option<Obstacle> {
    let first = [
        (matches!(&want.locality, Locality::Only(only) if only != node_name), Obstacle::NotLocal),
        (!node.schedulable, Obstacle::NodeUnschedulable),
        (node.emptying != Emptying::No, Obstacle::NodeEvicting),
        (!has_tags(&node.tags, &want.node_selector, want.tagged_nodes_serve_all), Obstacle::NodeTags),
        (want.program.as_ref().is_some_and(|image| !node.programs.contains(image)), Obstacle::NoProgram),
        (!disk.schedulable, Obstacle::DiskUnschedulable),
        (disk.evicting, Obstacle::DiskEvicting),
        (!has_tags(&disk.tags, &want.disk_selector, want.tagged_disks_serve_all), Obstacle::DiskTags),
    ];
    if let Some((_, obstacle)) = first.into_iter().find(|(in_the_way, _)| *in_the_way) {
        return Some(obstacle);
    }
    taken(cluster, want, residents, node_name, disk_id)
        .or_else(|| disk.limit_in_the_way(cluster.limits, want.size, want.fill))
}

/// What of the volume's other replicas forbids one more there.
fn taken(cluster: &Cluster, want: &Want, residents: &[Resident], node: &str, disk: &str) -> Option<Obstacle> {
    let staying = || residents.iter().filter(|r| !r.failed && !r.leaving);
    if !want.node_soft && staying().any(|r| r.node == node) {
        return Some(Obstacle::NodeTaken);
    }
    let zone = cluster.zone(node);
    if !want.zone_soft && staying().any(|r| cluster.zone(&r.node) == zone) {
        return Some(Obstacle::ZoneTaken);
    }
    // A replica that leaves a disk gains nothing by one on the same disk.
    let on_disk = |r: &&Resident| r.node == node && r.disk == disk && !r.failed;
    let is_left = residents.iter().any(|r| on_disk(&r) && r.leaving);
    (is_left || !want.disk_soft && staying().any(|r| on_disk(&r))).then_some(Obstacle::DiskTaken)
}
