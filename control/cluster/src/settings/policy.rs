//! Policies: what settings say that is more than a word or a number.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::schedule::Emptying;

/// What has to hold before a cordoned node may be drained, beside that no volume is attached there: the setting
/// node-drain-policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DrainPolicy {
    /// Each volume with a replica there has a healthy one on another protected node (block-if-contains-last-replica).
    #[default]
    BlockLast,
    /// The same of volumes whose replica there runs (allow-if-replica-is-stopped).
    AllowStopped,
    /// Nothing (always-allow).
    Always,
    /// No replica is there any more: all are moved away (block-for-eviction).
    EvictAll,
    /// As the first; replicas of volumes that have no other are moved away
    /// (block-for-eviction-if-contains-last-replica).
    EvictLast,
}

impl DrainPolicy {
    /// Which replicas of a cordoned node are moved elsewhere.
    pub fn empties(self) -> Emptying {
        match self {
            Self::EvictAll => Emptying::All,
            Self::EvictLast => Emptying::LastReplicas,
            Self::BlockLast | Self::AllowStopped | Self::Always => Emptying::No,
        }
    }
}

/// Which orphans go by themselves, and after what time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AutoDeletion {
    /// Directories of replicas.
    pub data: bool,
    /// Processes.
    pub instances: bool,
    /// How long they are only told of.
    pub grace: Duration,
}

/// Pods of which owners are deleted by force when their node is down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeDown {
    /// StatefulSets'.
    pub stateful_sets: bool,
    /// Deployments', which own them by ReplicaSets.
    pub deployments: bool,
}

impl NodeDown {
    /// True if there is anything to do when a node is down.
    pub fn acts(self) -> bool {
        self.stateful_sets || self.deployments
    }
}

/// Whose pods are left alone when their volume's device was lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remount {
    /// Kinds of owners, each as `apps/StatefulSet`.
    pub spared: BTreeSet<String>,
}
