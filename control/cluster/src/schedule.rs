//! Which disk a replica goes to, and which replica goes: decided from what is known of the cluster, without I/O, the same
//! every time for the same input.
//!
//! What is forbidden (`fit`): a node or disk that is not ready, takes no new replicas, or lacks a tag or the volume's
//! program; a disk without room under the two limits; another replica of the volume on the same node, zone or disk where the volume's
//! anti-affinity is hard. What is preferred (`place`): the node that the volume is attached to, if its locality asks;
//! then an unused zone, an unused node, an unused disk; then the disk with the most room.

mod fit;
mod place;
mod replenish;
mod spread;
#[cfg(test)]
mod tests;

pub use fit::{Limits, Obstacle};
pub use place::{Placement, Refusal, place, place_all};
pub use replenish::{Failed, Replenish, replenish};
pub use spread::{balance, broken_anti_affinity, choose_removal};

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;

/// What is known of the nodes and disks, by name and by UUID.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cluster {
    /// The nodes, by name.
    pub nodes: BTreeMap<String, Node>,
    /// The limits of every disk.
    pub limits: Limits,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Node {
    /// Its zone; nodes without one share the empty zone.
    pub zone: String,
    /// It answers, and takes new replicas.
    pub schedulable: bool,
    /// Which of its replicas are to be moved elsewhere.
    pub emptying: Emptying,
    /// It is cordoned: whoever did that may want to drain it.
    pub cordoned: bool,
    /// A disruption budget keeps it from being drained (`crate::plan::drain`).
    pub protected: bool,
    /// Kubernetes has it no more, and its manager is silent: nobody is left to end or to remove what was there.
    pub gone: bool,
    /// Nobody answers there now, or nothing can be started.
    pub silent: bool,
    /// Since when its manager does not answer; `None`: it does, or nobody knows.
    pub silent_since: Option<Timestamp>,
    /// Its tags.
    pub tags: BTreeSet<String>,
    /// The images whose programs are on it.
    pub programs: BTreeSet<String>,
    /// Its disks, by UUID.
    pub disks: BTreeMap<String, Disk>,
}

/// Which replicas of a node are to be moved elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Emptying {
    /// None.
    #[default]
    No,
    /// Those of volumes that have no other healthy one on a protected node.
    LastReplicas,
    /// All.
    All,
}

/// A disk.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Disk {
    /// It works, and takes new replicas.
    pub schedulable: bool,
    /// It does not work, or another one is in its place.
    pub broken: bool,
    /// Its replicas are to be moved elsewhere.
    pub evicting: bool,
    /// Its tags.
    pub tags: BTreeSet<String>,
    /// Bytes of its file system.
    pub maximum: u64,
    /// Bytes free now.
    pub available: u64,
    /// Bytes that are not for replicas.
    pub reserved: u64,
    /// Bytes of all replicas on it, at their full size.
    pub scheduled: u64,
}

/// A replica of the volume that has its place.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resident {
    /// Its name.
    pub name: String,
    /// Its node.
    pub node: String,
    /// UUID of its disk.
    pub disk: String,
    /// It failed: it keeps no other replica away.
    pub failed: bool,
    /// It is to be replaced by one elsewhere: it keeps no other replica away but from its own disk.
    pub leaving: bool,
    /// It holds everything (its mode is RW).
    pub healthy: bool,
}

/// How a volume wants its replicas placed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Want {
    /// Bytes of a replica at its full size.
    pub size: u64,
    /// Bytes that a new replica takes at once; 0 for one that starts empty.
    pub fill: u64,
    /// Tags that a node must have, all of them.
    pub node_selector: BTreeSet<String>,
    /// Tags that a disk must have, all of them.
    pub disk_selector: BTreeSet<String>,
    /// Disks without tags serve volumes without a selector only if this is set; then also disks with tags.
    pub tagged_disks_serve_all: bool,
    /// Likewise for nodes.
    pub tagged_nodes_serve_all: bool,
    /// Two replicas may share a node.
    pub node_soft: bool,
    /// Two replicas may share a zone.
    pub zone_soft: bool,
    /// Two replicas may share a disk.
    pub disk_soft: bool,
    /// Where one replica should be.
    pub locality: Locality,
    /// The image whose program the node must have; `None`: no node tells that it has it.
    pub program: Option<String>,
}

/// Where one replica should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Locality {
    /// Anywhere.
    #[default]
    Anywhere,
    /// On this node, if there is room.
    Prefer(String),
    /// On this node or nowhere.
    Only(String),
}

impl Cluster {
    /// The zone of a node; empty if the node is not known.
    pub fn zone(&self, node: &str) -> &str {
        self.nodes.get(node).map_or("", |n| n.zone.as_str())
    }

    /// True for a disk that works, on a node that answers.
    pub fn is_readable(&self, node: &str, disk: &str) -> bool {
        let node = self.nodes.get(node).filter(|n| !n.silent);
        node.and_then(|n| n.disks.get(disk)).is_some_and(|d| !d.broken)
    }

    /// Takes back what is promised to a replica on a disk.
    pub fn release(&mut self, node: &str, disk: &str, size: u64) {
        if let Some(disk) = self.nodes.get_mut(node).and_then(|n| n.disks.get_mut(disk)) {
            disk.scheduled = disk.scheduled.saturating_sub(size);
        }
    }

    /// Takes the room of a replica on a disk, so that the next decision sees it taken.
    pub fn reserve(&mut self, at: &Placement, size: u64, fill: u64) {
        if let Some(disk) = self.nodes.get_mut(&at.node).and_then(|n| n.disks.get_mut(&at.disk)) {
            disk.scheduled = disk.scheduled.saturating_add(size);
            disk.available = disk.available.saturating_sub(fill);
        }
    }
}
