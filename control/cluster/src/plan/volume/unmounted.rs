//! Replicas whose disks cannot be used, of a volume that no engine of ours has served: of one that was Longhorn's until now, whose disks
//! are perhaps not given to our pods yet. It is not begun without them. Of replicas that miss nothing some would lack what is written from
//! then on, and a volume whose other replicas are gone would have none; and all that is missing is a mount.
//!
//! A node that does not answer is another matter, and one whose disk breaks later, too: both count as they do for every volume (`health`).

use super::draft::Draft;
use crate::api::{Conditions, InstanceState};
use crate::plan::replica::SERVES;
use crate::plan::served::may_have_served;

/// The reason in the condition of such a replica.
const DISK: &str = "Disk";

impl Draft<'_> {
    /// Why the disk cannot be used that a replica lies on, which holds everything as its resource says; `None`: it can, or an engine of
    /// ours has served the volume.
    pub(super) fn unmounted(&self, name: &str) -> Option<&str> {
        let was_served = self.status.epoch.is_some() || may_have_served(self.o.volume);
        let holds = |name| {
            self.replicas.get(name).is_some_and(|r| !r.healthy_at.is_empty() && r.failed_at.is_empty())
        };
        if was_served || self.replica_state(name) != InstanceState::Error || !holds(name) {
            return None;
        }
        let told = self.replica(name)?.status.as_ref()?.conditions.get_condition(SERVES)?;
        (!told.is_true() && told.reason == DISK).then_some(told.message.as_str())
    }

    /// What a volume that comes from Longhorn waits for: the disks of its replicas, each with what makes it usable. `None`: they are here.
    pub(super) fn lacks_disks(&self) -> Option<String> {
        let lacking: Vec<_> = self
            .replicas
            .iter()
            .filter_map(|(name, spec)| Some((name, spec, self.unmounted(name)?)))
            .collect();
        if lacking.is_empty() {
            return None;
        }
        let what: Vec<String> = lacking
            .iter()
            .map(|(name, spec, why)| format!("{name} at {} on node {}: {why}", place(spec), spec.node_id))
            .collect();
        let mut options: Vec<String> =
            lacking.iter().map(|(_, spec, _)| format!("--disk {}", place(spec))).collect();
        options.sort_unstable();
        options.dedup();
        Some(format!(
            "these replicas hold the volume's data, and their disks cannot be used: {}. What is mounted on the node is given to \
             the pods by `longhornctl install manifests {}` or the chart's extraDiskPaths, and the instance managers have it once \
             all volumes of their nodes are detached; if a disk is lost for good, delete the Replica",
            what.join("; "),
            options.join(" ")
        ))
    }
}

/// The path of a replica's disk as an option has it: Longhorn writes some with a slash at the end.
fn place(spec: &crate::api::ReplicaSpec) -> &str {
    match spec.disk_path.trim_end_matches('/') {
        "" => &spec.disk_path,
        path => path,
    }
}
