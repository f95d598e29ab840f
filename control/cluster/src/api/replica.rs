//! `Replica`: one copy of a volume's data, on one disk of one node.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Condition, GenerationText, Int64Text, is_default, null_is_default};
use super::words::{DataEngine, DesireState, InstanceState};

/// One copy of a volume's data on one disk of one node.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "Replica",
    plural = "replicas",
    shortname = "lhr",
    namespaced,
    status = "ReplicaStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "One copy of a volume's data on one disk of one node.",
    selectable = ".spec.nodeID",
    selectable = ".spec.volumeName",
    selectable = ".spec.diskID",
    printcolumn(name = "Data Engine", type_ = "string", json_path = ".spec.dataEngine"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.currentState"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeID"),
    printcolumn(name = "Disk", type_ = "string", json_path = ".spec.diskID"),
    printcolumn(name = "InstanceManager", type_ = "string", json_path = ".status.instanceManagerName"),
    printcolumn(name = "Image", type_ = "string", json_path = ".status.currentImage"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(oldSelf.volumeName) || oldSelf.volumeName == '' || (has(self.volumeName) && self.volumeName == oldSelf.volumeName)",
        "message": "a replica belongs to one volume for ever"
    },
    {
        "rule": "!has(oldSelf.dataDirectoryName) || oldSelf.dataDirectoryName == '' || (has(self.dataDirectoryName) && self.dataDirectoryName == oldSelf.dataDirectoryName)",
        "message": "a replica's directory does not change"
    }
]))]
#[serde(rename_all = "camelCase", default)]
pub struct ReplicaSpec {
    /// False while another one is taking its place.
    #[serde(skip_serializing_if = "is_default")]
    pub active: bool,
    /// Name of the backing image; empty for none.
    #[serde(skip_serializing_if = "is_default")]
    pub backing_image: String,
    /// What its directory is copied from before it serves for the first time.
    #[serde(skip_serializing_if = "is_default")]
    pub clone_from: CloneOrigin,
    /// Name of the directory below the disk's `replicas/`.
    #[serde(skip_serializing_if = "is_default")]
    pub data_directory_name: String,
    /// The data engine.
    pub data_engine: DataEngine,
    /// What it should be doing.
    #[serde(skip_serializing_if = "is_default")]
    pub desire_state: DesireState,
    /// UUID of the disk.
    #[serde(rename = "diskID", skip_serializing_if = "is_default")]
    pub disk_id: String,
    /// Path of the disk on its node.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_path: String,
    /// Name of the engine.
    #[serde(skip_serializing_if = "is_default")]
    pub engine_name: String,
    /// This replica is to be replaced by one elsewhere.
    #[serde(skip_serializing_if = "is_default")]
    pub eviction_requested: bool,
    /// When it failed, RFC 3339; empty while it is well.
    #[serde(skip_serializing_if = "is_default")]
    pub failed_at: String,
    /// The only node that the replica may be on.
    #[serde(skip_serializing_if = "is_default")]
    pub hard_node_affinity: String,
    /// When it was first in sync, RFC 3339; empty if it never was.
    #[serde(skip_serializing_if = "is_default")]
    pub healthy_at: String,
    /// The image of the programs.
    #[serde(skip_serializing_if = "is_default")]
    pub image: String,
    /// When it last failed, RFC 3339; kept when it is well again.
    #[serde(skip_serializing_if = "is_default")]
    pub last_failed_at: String,
    /// When it was last seen in sync, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub last_healthy_at: String,
    /// The replica whose layers this one shares.
    #[serde(skip_serializing_if = "is_default")]
    pub linked_clone_src_replica_name: String,
    /// The log is to be fetched.
    #[serde(skip_serializing_if = "is_default")]
    pub log_requested: bool,
    /// Engine that the replica moves to.
    #[serde(skip_serializing_if = "is_default")]
    pub migration_engine_name: String,
    /// The node.
    #[serde(rename = "nodeID", skip_serializing_if = "is_default")]
    pub node_id: String,
    /// How often the rebuild has failed in a row.
    #[serde(skip_serializing_if = "is_default")]
    pub rebuild_retry_count: i64,
    /// No count of writes is kept.
    #[serde(skip_serializing_if = "is_default")]
    pub revision_counter_disabled: bool,
    /// A failed one is to be used again.
    #[serde(skip_serializing_if = "is_default")]
    pub salvage_requested: bool,
    /// Most snapshots; 0 for the setting.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_max_count: i64,
    /// Most bytes of all snapshots together; 0 for no limit.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_max_size: Int64Text,
    /// UNMAP marks snapshots as removed.
    #[serde(skip_serializing_if = "is_default")]
    pub unmap_mark_disk_chain_removed_enabled: bool,
    /// Name of the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub volume_name: String,
    /// Bytes of the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub volume_size: Int64Text,
}

/// What a replica's directory is copied from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CloneOrigin {
    /// Path of another replica's directory on the same node.
    #[serde(skip_serializing_if = "is_default")]
    pub directory: String,
    /// Name of the snapshot.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot: String,
}

/// What was observed of a Replica.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ReplicaStatus {
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// The image in use.
    #[serde(skip_serializing_if = "is_default")]
    pub current_image: String,
    /// What it is doing.
    #[serde(skip_serializing_if = "is_default")]
    pub current_state: InstanceState,
    /// The instance manager that runs it.
    #[serde(skip_serializing_if = "is_default")]
    pub instance_manager_name: String,
    /// Its address; empty while it is not running.
    #[serde(skip_serializing_if = "is_default")]
    pub ip: String,
    /// The log was fetched.
    #[serde(skip_serializing_if = "is_default")]
    pub log_fetched: bool,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// Its port; 0 while it is not running.
    #[serde(skip_serializing_if = "is_default")]
    pub port: i64,
    /// The salvage was done.
    #[serde(skip_serializing_if = "is_default")]
    pub salvage_executed: bool,
    /// It has been running.
    #[serde(skip_serializing_if = "is_default")]
    pub started: bool,
    /// It is being started.
    #[serde(skip_serializing_if = "is_default")]
    pub starting: bool,
    /// Its address on the storage network.
    #[serde(rename = "storageIP", skip_serializing_if = "is_default")]
    pub storage_ip: String,
    /// Number of the ublk device.
    #[serde(rename = "ublkID", skip_serializing_if = "is_default")]
    pub ublk_id: i32,
    /// Another one for every one that was ever made.
    #[serde(skip_serializing_if = "is_default")]
    pub uuid: String,
    /// The highest number of an engine that the replica has seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<GenerationText>,
    /// It has recorded an epoch, so that it tells in which it was: one that is being filled for the first time has none.
    #[serde(skip_serializing_if = "is_default")]
    pub epoch_recorded: bool,
    /// Where an engine reaches the replica's data.
    #[serde(skip_serializing_if = "is_default")]
    pub address: String,
    /// What proves to the replica that one may ask where its snapshots hold data; what the data is it tells nobody for it.
    #[serde(skip_serializing_if = "is_default")]
    pub map_key: String,
    /// The image that was tried last and did not serve.
    #[serde(skip_serializing_if = "is_default")]
    pub failed_image: String,
}
