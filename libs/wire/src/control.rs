//! Control messages: rare, and in the order of the data stream. JSON, so that a capture can be read and a field can
//! be added; `docs/decisions/0002-control-messages-are-json.md` says why.

use std::collections::BTreeMap;

use lh_block::{Epoch, Extent, Generation, Instance, check_name};
use serde::{Deserialize, Serialize};

/// Bytes in a second at which a replica takes checksums that nobody waits for: of what a rebuild has brought, for which the
/// engine asks, and of what a fold has written, which the replica does by itself (`docs/integrity.md`).
pub const UNASKED_HASH_RATE: u64 = 64 << 20;

/// One layer of a replica's chain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInfo {
    /// Snapshot name; empty for the head.
    pub name: String,
    /// Name of the snapshot below; empty for the lowest layer.
    pub parent: String,
    /// Marked for removal.
    pub removed: bool,
    /// Made by a user, not by the system.
    pub user_created: bool,
    /// RFC 3339, as in Longhorn's `.meta` files.
    pub created: String,
    /// Labels of the snapshot.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Length of the layer's file in bytes: the volume's size when the layer was the head.
    pub length: u64,
    /// Bytes that the layer's file takes on its disk.
    pub allocated: u64,
}

/// A change of the chain that all members do, or none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum ChainOp {
    /// The head becomes the snapshot `name`, a new head is put over it.
    Snapshot {
        /// Name of the snapshot.
        name: String,
        /// Asked for by a user.
        user_created: bool,
        /// Time of creation of the snapshot and of the new head, the same on every replica. Later than the head's before, so that
        /// another snapshot that gets the name once this one is folded away has another time.
        created: String,
        /// Labels.
        labels: BTreeMap<String, String>,
    },
    /// The snapshot `name` is marked as removed.
    MarkRemoved {
        /// Name of the snapshot.
        name: String,
    },
    /// The volume is again as the snapshot `name` has it: an empty head is put over the snapshot, the old head is
    /// dropped. Nothing may be in flight.
    Revert {
        /// Name of the snapshot.
        name: String,
        /// Time of creation of the new head, the same on every replica.
        created: String,
    },
    /// The volume grows: the head becomes a snapshot, a longer head is put over it. On the wire and on disks it is called
    /// `grow`: a replica of before, which would give the snapshot another name than the others do, refuses that.
    #[serde(rename = "grow", alias = "expand")]
    Expand {
        /// Name of the snapshot ([`expansion_snapshot`]). An engine of before gives none: it is `expand-SIZE`.
        #[serde(default)]
        name: Option<String>,
        /// The new size in bytes: a multiple of the block, larger than the volume is.
        size: u64,
        /// Time of creation of the snapshot and of the new head, the same on every replica.
        created: String,
    },
}

impl ChainOp {
    /// The name of the snapshot that the head becomes; `None`: it becomes none.
    pub fn snapshot(&self) -> Option<String> {
        match self {
            Self::Snapshot { name, .. } => Some(name.clone()),
            Self::Expand { name, size, .. } => Some(name.clone().unwrap_or_else(|| of_size(*size))),
            Self::MarkRemoved { .. } | Self::Revert { .. } => None,
        }
    }

    /// The time of an operation that puts another head in the head's place; `None`: it leaves the head alone.
    pub const fn created_mut(&mut self) -> Option<&mut String> {
        match self {
            Self::Snapshot { created, .. } | Self::Revert { created, .. } | Self::Expand { created, .. } => {
                Some(created)
            }
            Self::MarkRemoved { .. } => None,
        }
    }
}

/// The name of the snapshot that an expansion to `size` bytes takes: `expand-SIZE-VOLUME`, as in Longhorn since 1.12.2, so that
/// those of two volumes differ; `expand-SIZE` where that is longer than a name may be.
pub fn expansion_snapshot(size: u64, volume: &str) -> String {
    let name = format!("{}-{volume}", of_size(size));
    if check_name("snapshot", &name).is_ok() { name } else { of_size(size) }
}

/// Longhorn's name for it before that.
fn of_size(size: u64) -> String {
    format!("expand-{size}")
}

/// A request in the payload of an `OpCode::Control` message. The answer's payload is JSON as each variant says; a
/// refusal (`Status::Refused`) carries one sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "do")]
pub enum Control {
    /// Answer: [`ReplicaState`].
    State,
    /// Stores the epoch. Answered when it is durable. Refused if the replica has a higher one. Between
    /// [`Control::RebuildBegin`] and [`Control::RebuildEnd`] it is kept beside the one that counts, and counts from the end on.
    ///
    /// Of each replica that is in the epoch before, not in this one, and named in `out`, the replica keeps from now on
    /// what it may lack ([`Control::Missed`]). What it keeps of others is forgotten.
    SetEpoch {
        /// The epoch that counts from now on.
        epoch: Epoch,
        /// Replicas of the volume that are not in the epoch and may come back.
        #[serde(default)]
        out: Vec<String>,
    },
    /// Every range in doubt is equal on all members: what earlier sessions left is forgotten.
    Resolved,
    /// Makes everything ready for a chain operation; answered when that is durable.
    Prepare {
        /// Names this decision in `Commit` and `Abort`.
        id: Instance,
        /// The operation.
        op: ChainOp,
    },
    /// Carries a prepared operation out. Doing it twice is doing it once.
    Commit {
        /// As in `Prepare`.
        id: Instance,
    },
    /// As `Commit`, but answered as soon as the chain is switched, so that I/O pauses no longer than that. What was
    /// written into the former head is on stable storage only after a flush, which the engine sends next.
    Switch {
        /// As in `Prepare`.
        id: Instance,
    },
    /// Takes a prepared operation back. Refused if it was carried out.
    Abort {
        /// As in `Prepare`.
        id: Instance,
    },
    /// The layers up to this snapshot are on stable storage on every member.
    Settled {
        /// Name of the snapshot.
        snapshot: String,
    },
    /// Begins to fold the removed snapshot `name` into its neighbour, on this replica alone. Answered when it has
    /// begun: [`ReplicaState::fold`] says how far it is, and when it is done the snapshot is gone from the chain.
    /// Refused if it cannot be folded, or if another fold runs.
    Fold {
        /// Name of the snapshot.
        name: String,
        /// How many bytes may be copied in a second; `None`: no limit.
        bytes_per_second: Option<u64>,
    },
    /// Stops the fold that runs, if one does. What was copied stays: beginning anew goes on from there.
    FoldStop,
    /// What a replica that is out may lack: everything written since before it left. The answer is a [`MapPage`].
    /// Refused if this replica has not seen every write since that epoch.
    Missed {
        /// Name of the replica.
        replica: String,
        /// The last epoch that it was in, as it says itself.
        base: Epoch,
        /// Nothing before this byte.
        from: u64,
    },
    /// Where a layer holds data or zeroes of its own. The answer is a [`MapPage`].
    LayerMap {
        /// Name of the layer; empty for the head.
        layer: String,
        /// Nothing before this byte.
        from: u64,
        /// Also where it should hold data by its checksums.
        #[serde(default)]
        recorded: bool,
    },
    /// Takes the checksums of these snapshots' layers, one after another, of those that have none; on this replica alone.
    /// Answered at once: [`ReplicaState::hash`] says how far it is.
    Hash {
        /// Names of the snapshots.
        snapshots: Vec<String>,
        /// How many bytes may be read in a second; `None`: no limit.
        bytes_per_second: Option<u64>,
    },
    /// Stops what [`Control::Hash`] began. Checksums that are complete stay.
    HashStop,
    /// Durably marks the replica as unusable alone and gives its chain this form, base first, the head last.
    RebuildBegin {
        /// Volume size in bytes.
        size: u64,
        /// The source's chain.
        chain: Vec<LayerInfo>,
        /// What layers of the same name hold stays; without it every layer is empty afterwards.
        #[serde(default)]
        keep: Option<Keep>,
    },
    /// The replica holds everything: syncs all layers, takes the mark back, and lets the epoch count that was stored since
    /// [`Control::RebuildBegin`]; of the last two both or neither. Answered when that is durable.
    RebuildEnd,
    /// No request is in flight, all is flushed everywhere: closes the directory cleanly. Answered when durable.
    Close,
}

/// What becomes of the layers that a replica has when its rebuild begins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// The layer that the head becomes; empty: it stays the head.
    pub head: String,
    /// Layers of the new chain that may differ anywhere from what the members have, not only where they were written
    /// since the replica left. Remembered until the rebuild has ended: an interrupted one must not trust them.
    pub unsure: Vec<String>,
}

/// What was answered since a replica was opened for this engine is there, though its process may have died: its host has kept its
/// power. The less of two has it for longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PowerSince {
    /// Of the engine that the replica was opened for first on this boot of its host.
    pub generation: Generation,
    /// That engine had it before, and the power was lost under it.
    pub late: bool,
}

/// What a replica whose rebuild did not end still knows of its layers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// As in [`Keep`].
    pub unsure: Vec<String>,
}

/// A replica that is out, as a member remembers it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outsider {
    /// Its name.
    pub replica: String,
    /// The last epoch that had it.
    pub base: Epoch,
}

/// A part of a map of ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapPage {
    /// Ranges of whole blocks, ascending, none touching the next.
    pub ranges: Vec<Extent>,
    /// The map goes on from this byte; `None`: this is the end of it.
    pub next: Option<u64>,
    /// Bytes in the whole map, if that is known.
    pub total: Option<u64>,
}

impl MapPage {
    /// Most ranges in a page: as JSON they take some 45 bytes each and have to fit a message.
    pub const RANGES_MAX: usize = 4096;
}

/// A fold that runs, or the last one if it ended without folding its snapshot away.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoldState {
    /// Name of the snapshot.
    pub name: String,
    /// Bytes done: copied, shared, or found to be there already.
    pub done: u64,
    /// Bytes to do in all.
    pub total: u64,
    /// It runs no more, and why.
    pub error: Option<String>,
}

/// Checksums that are being taken, or were.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashState {
    /// The snapshot whose layer is read now; empty: none is.
    pub name: String,
    /// Bytes read of it.
    pub done: u64,
    /// Bytes that its file takes.
    pub total: u64,
    /// How many snapshots come after it.
    pub waiting: u64,
    /// Snapshots that could not be hashed, and why.
    pub failed: Vec<(String, String)>,
    /// Snapshots that are not what they were when they were hashed before, though nobody changed them.
    pub corrupted: Vec<String>,
}

/// What a replica knows of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaState {
    /// Volume size in bytes.
    pub size: u64,
    /// Highest generation that has fenced this replica before the asking session.
    pub previous_generation: Generation,
    /// The last epoch stored, if there ever was one.
    pub epoch: Option<Epoch>,
    /// Base first, the head last.
    pub chain: Vec<LayerInfo>,
    /// A chain operation that was prepared and neither carried out nor taken back.
    pub prepared: Option<(Instance, ChainOp)>,
    /// The id of the last chain operation that was carried out.
    pub committed: Option<Instance>,
    /// Ranges of writes that earlier engines had in flight, as long as this process remembers.
    pub in_doubt: Vec<Extent>,
    /// Bytes in a chunk of the intent bitmap.
    pub intent_chunk: u64,
    /// Ranges (whole chunks) that the intent bitmap marks.
    pub intent: Vec<Extent>,
    /// This process has held the directory since before the earlier engines' last writes: `in_doubt` is complete and
    /// nothing acknowledged by it can be missing.
    pub lived: bool,
    /// The host has kept its power since this replica held everything that was answered last: what was not flushed is here
    /// all the same, though the process may have died.
    #[serde(default)]
    pub powered: bool,
    /// If not `powered`: from when on the host has kept its power.
    #[serde(default)]
    pub power_since: Option<PowerSince>,
    /// Marked as unusable alone: a rebuild began and did not end.
    pub rebuilding: bool,
    /// While `rebuilding`: the layers are still those of `epoch`, but for what was written since and for this. `None`:
    /// nothing is known of them.
    #[serde(default)]
    pub kept: Option<Kept>,
    /// Snapshots that are not known to be on stable storage everywhere, base first.
    pub unsettled: Vec<String>,
    /// The directory was closed cleanly and not written since.
    pub clean: bool,
    /// An import: the directory was written by another program, or never by this one.
    pub imported: bool,
    /// The lowest layer stands on a backing file, which is none of the chain's and comes over with no copy. `None`: an older program
    /// does not say.
    #[serde(default)]
    pub backed: Option<bool>,
    /// The fold that runs, or the last one if it failed or was stopped.
    #[serde(default)]
    pub fold: Option<FoldState>,
    /// Checksums that are being taken, or were since the process began.
    #[serde(default)]
    pub hash: Option<HashState>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expansion_names_its_snapshot_after_the_volume() {
        assert_eq!(expansion_snapshot(8192, "pvc-1"), "expand-8192-pvc-1");
        assert_eq!(expansion_snapshot(8192, &"v".repeat(52)), format!("expand-8192-{}", "v".repeat(52)));
        assert_eq!(expansion_snapshot(8192, &"v".repeat(53)), "expand-8192");
        let op = ChainOp::Expand { name: Some("expand-1-v".into()), size: 1, created: "now".into() };
        let json = r#"{"kind":"grow","name":"expand-1-v","size":1,"created":"now"}"#;
        assert_eq!(serde_json::to_string(&op).unwrap(), json);
        let read: ChainOp = serde_json::from_str(json).unwrap();
        assert_eq!(read.snapshot().unwrap(), "expand-1-v");
        let before: ChainOp = serde_json::from_str(r#"{"kind":"expand","size":1,"created":"now"}"#).unwrap();
        assert_eq!(before.snapshot().unwrap(), "expand-1");
    }
}
