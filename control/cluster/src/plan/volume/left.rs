//! Data of a volume that no Replica names: somebody restores the volume's resources, and the Volume came first, or is all that there
//! is. Replicas that were begun beside that data would be empty, and whoever had the volume attached then would find, and be given,
//! an empty device.

use super::draft::Draft;
use super::replicas::ROOM;
use super::{READY, SCHEDULED};
use crate::api::{Conditions, Orphan, VolumeState};

/// The reason in the condition.
pub const DATA_LEFT: &str = "DataLeft";

impl Draft<'_> {
    /// True for a volume of which nothing is known here but data that lies on nodes under its name. It begins once a Replica names some
    /// of that, or nobody wants it any more.
    pub(super) fn waits_for_what_is_left(&mut self) -> bool {
        let stays = |orphan: &&&Orphan| orphan.metadata.deletion_timestamp.is_none();
        let left: Vec<String> = self.o.left.iter().filter(stays).map(|orphan| place(orphan)).collect();
        if left.is_empty() || !self.o.replicas.is_empty() || self.status.epoch.is_some() {
            return false;
        }
        self.status.state = VolumeState::Creating;
        let message = format!(
            "data of a volume of this name lies on nodes, and no Replica names it: {}. Nothing is begun beside it: restore the Replicas, \
             or delete these Orphans, and the data with them",
            left.join("; ")
        );
        let is_known = self.status.conditions.get_condition(SCHEDULED).is_some_and(|c| c.reason == DATA_LEFT);
        let now = self.now.clone();
        // Whoever waits to have it attached hears of the second one.
        for kind in [SCHEDULED, READY] {
            self.status.conditions.set_condition(kind, false, DATA_LEFT, &message, &now);
        }
        if !is_known {
            self.tell(true, DATA_LEFT, message);
        }
        self.look_again(ROOM);
        true
    }
}

/// Where it lies, and what it is called here.
fn place(orphan: &Orphan) -> String {
    let name = orphan.metadata.name.as_deref().unwrap_or_default();
    let parameter = |name: &str| orphan.spec.parameters.get(name).map_or("", String::as_str);
    let (disk, directory) = (parameter("DiskPath"), parameter("DataName"));
    format!("{disk}/replicas/{directory} on node {} (Orphan {name})", orphan.spec.node_id)
}
