//! `Engine`: the process that serves a volume on one node.

use std::collections::BTreeMap;

use control::host::SNAPSHOT_COUNT;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Condition, GenerationText, Int64Text, is_default, null_is_default, seconds};
use super::words::{
    DataEngine, DesireState, Frontend, InstanceState, Quorum, ReplicaMode, quorum, quorum_schema,
};

/// The process that serves a volume on one node.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "Engine",
    plural = "engines",
    shortname = "lhe",
    namespaced,
    status = "EngineStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "The process that serves a volume on one node.",
    selectable = ".spec.nodeID",
    printcolumn(name = "Data Engine", type_ = "string", json_path = ".spec.dataEngine"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.currentState"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeID"),
    printcolumn(name = "InstanceManager", type_ = "string", json_path = ".status.instanceManagerName"),
    printcolumn(name = "Image", type_ = "string", json_path = ".status.currentImage"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(oldSelf.volumeName) || oldSelf.volumeName == '' || (has(self.volumeName) && self.volumeName == oldSelf.volumeName)",
        "message": "an engine belongs to one volume for ever"
    }
]))]
#[serde(rename_all = "camelCase", default)]
pub struct EngineSpec {
    /// False while another one is taking its place.
    #[serde(skip_serializing_if = "is_default")]
    pub active: bool,
    /// Name of the volume in the backup target.
    #[serde(skip_serializing_if = "is_default")]
    pub backup_volume: String,
    /// The data engine.
    pub data_engine: DataEngine,
    /// What it should be doing.
    #[serde(skip_serializing_if = "is_default")]
    pub desire_state: DesireState,
    /// The engine runs without showing a device.
    #[serde(skip_serializing_if = "is_default")]
    pub disable_frontend: bool,
    /// How the volume is shown; empty for not at all.
    #[serde(skip_serializing_if = "is_default")]
    pub frontend: Frontend,
    /// The image of the programs.
    #[serde(skip_serializing_if = "is_default")]
    pub image: String,
    /// The log is to be fetched.
    #[serde(skip_serializing_if = "is_default")]
    pub log_requested: bool,
    /// The node.
    #[serde(rename = "nodeID", skip_serializing_if = "is_default")]
    pub node_id: String,
    /// How much a rebuild copies at once, in Longhorn's count of files; 0 for the setting.
    #[serde(skip_serializing_if = "is_default")]
    pub rebuild_concurrent_sync_limit: i64,
    /// Where the engine reaches its replicas, by name.
    #[serde(skip_serializing_if = "is_default")]
    pub replica_address_map: BTreeMap<String, String>,
    /// The backup to restore.
    #[serde(skip_serializing_if = "is_default")]
    pub requested_backup_restore: String,
    /// What to clone from.
    #[serde(skip_serializing_if = "is_default")]
    pub requested_data_source: String,
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
    /// Queues of the engine and of its ublk device, at most 64; 0 for half as many as there are processors, at most 4.
    #[serde(skip_serializing_if = "is_default")]
    pub ublk_number_of_queue: i64,
    /// Requests of a queue of the ublk device at a time, 8 to 128; 0 for 128.
    #[serde(skip_serializing_if = "is_default")]
    pub ublk_queue_depth: i64,
    /// UNMAP marks snapshots as removed.
    #[serde(skip_serializing_if = "is_default")]
    pub unmap_mark_snap_chain_removed_enabled: bool,
    /// Where the engine is to reach its replicas after the upgrade, by name.
    #[serde(skip_serializing_if = "is_default")]
    pub upgraded_replica_address_map: BTreeMap<String, String>,
    /// Name of the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub volume_name: String,
    /// Bytes of the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub volume_size: Int64Text,
    /// Who must agree before a change of the membership counts: the members left (any), a majority of all
    /// replicas, or nobody (unsafe).
    #[serde(skip_serializing_if = "is_default", deserialize_with = "quorum")]
    #[schemars(schema_with = "quorum_schema")]
    pub quorum: Quorum,
    /// Seconds that requests wait for a replica; 0 for ever.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "seconds")]
    pub io_timeout: Option<u32>,
    /// It serves the volume to relays on other nodes, too.
    #[serde(skip_serializing_if = "is_default")]
    pub migratable: bool,
    /// Where the volume's engine serves relays: the process shows the volume and passes requests on to there. Empty for an
    /// engine.
    #[serde(skip_serializing_if = "is_default")]
    pub relay_from: String,
}

impl EngineSpec {
    /// How much the volume may be snapshotted. What was never said, by a manager of before, is as an engine has it by itself.
    pub fn snapshot_limits(&self) -> SnapshotLimits {
        let own = u32::try_from(self.snapshot_max_count).ok().filter(|n| (1..=SNAPSHOT_COUNT).contains(n));
        SnapshotLimits { count: own.unwrap_or(SNAPSHOT_COUNT), bytes: self.snapshot_max_size.bytes() }
    }

    /// True for what shows the volume and has another node's engine answer.
    pub fn relays(&self) -> bool {
        !self.relay_from.is_empty()
    }
}

/// How much a volume may be snapshotted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotLimits {
    /// Most snapshots, removed ones not counted.
    pub count: u32,
    /// Most bytes of head and snapshots together; 0: any.
    pub bytes: u64,
}

impl Default for SnapshotLimits {
    fn default() -> Self {
        Self { count: SNAPSHOT_COUNT, bytes: 0 }
    }
}

/// What was observed of an Engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct EngineStatus {
    /// Backups in progress, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub backup_status: BTreeMap<String, BackupProgress>,
    /// Clones in progress.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub clone_status: BTreeMap<String, CloneProgress>,
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// The image in use.
    #[serde(skip_serializing_if = "is_default")]
    pub current_image: String,
    /// Where the running engine reaches its replicas, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub current_replica_address_map: BTreeMap<String, String>,
    /// Bytes of the volume that the running engine shows.
    #[serde(skip_serializing_if = "is_default")]
    pub current_size: Int64Text,
    /// What it is doing.
    #[serde(skip_serializing_if = "is_default")]
    pub current_state: InstanceState,
    /// Where it is used: a device path or a URI.
    #[serde(skip_serializing_if = "is_default")]
    pub endpoint: String,
    /// The instance manager that runs it.
    #[serde(skip_serializing_if = "is_default")]
    pub instance_manager_name: String,
    /// Its address; empty while it is not running.
    #[serde(skip_serializing_if = "is_default")]
    pub ip: String,
    /// An expansion goes on.
    #[serde(skip_serializing_if = "is_default")]
    pub is_expanding: bool,
    /// Why the last expansion failed.
    #[serde(skip_serializing_if = "is_default")]
    pub last_expansion_error: String,
    /// When the last expansion failed, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub last_expansion_failed_at: String,
    /// The last backup that was restored whole.
    #[serde(skip_serializing_if = "is_default")]
    pub last_restored_backup: String,
    /// The log was fetched.
    #[serde(skip_serializing_if = "is_default")]
    pub log_fetched: bool,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// Its port; 0 while it is not running.
    #[serde(skip_serializing_if = "is_default")]
    pub port: i64,
    /// Purges in progress, by the replica's address.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub purge_status: BTreeMap<String, PurgeProgress>,
    /// How much a rebuild copies at once, in Longhorn's count of files; 0 for the setting.
    #[serde(skip_serializing_if = "is_default")]
    pub rebuild_concurrent_sync_limit: i64,
    /// Rebuilds in progress, by the replica's address.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub rebuild_status: BTreeMap<String, RebuildProgress>,
    /// What each replica is to the engine, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub replica_mode_map: BTreeMap<String, ReplicaMode>,
    /// When a replica's mode last changed, RFC 3339, by name.
    #[serde(skip_serializing_if = "is_default")]
    pub replica_transition_time_map: BTreeMap<String, String>,
    /// Restores in progress, by the replica's address.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub restore_status: BTreeMap<String, RestoreProgress>,
    /// The salvage was done.
    #[serde(skip_serializing_if = "is_default")]
    pub salvage_executed: bool,
    /// Most snapshots; 0 for the setting.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_max_count: i64,
    /// Most bytes of all snapshots together; 0 for no limit.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_max_size: Int64Text,
    /// The chain of layers, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub snapshots: BTreeMap<String, SnapshotInfo>,
    /// Why the chain could not be read.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshots_error: String,
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
    /// UNMAP marks snapshots as removed.
    #[serde(skip_serializing_if = "is_default")]
    pub unmap_mark_snap_chain_removed_enabled: bool,
    /// Another one for every one that was ever made.
    #[serde(skip_serializing_if = "is_default")]
    pub uuid: String,
    /// The number of the running engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<GenerationText>,
    /// What requests to the volume wait for; empty while they are answered.
    #[serde(skip_serializing_if = "is_default")]
    pub waiting_for: String,
    /// Why a replica is not RW, by name.
    #[serde(skip_serializing_if = "is_default")]
    pub replica_reasons: BTreeMap<String, String>,
    /// The image that was tried last and did not serve.
    #[serde(skip_serializing_if = "is_default")]
    pub failed_image: String,
    /// Which device the endpoint is: the boot of its node and the number that the kernel gave it.
    #[serde(skip_serializing_if = "is_default")]
    pub device: String,
    /// When another device took the place of the one that clients had, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub device_lost_at: String,
    /// Tells this stay of the volume on its node from earlier ones. What those left behind, and whoever still has it open, is not
    /// this one's.
    #[serde(skip_serializing_if = "is_default")]
    pub stay: String,
    /// Where the running engine serves relays; empty while it does not.
    #[serde(skip_serializing_if = "is_default")]
    pub relay_address: String,
    /// What runs is a relay.
    #[serde(skip_serializing_if = "is_default")]
    pub relaying: bool,
}

/// A backup that the engine is making.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupProgress {
    /// The backup, as a URL.
    #[serde(rename = "backupURL", skip_serializing_if = "is_default")]
    pub backup_url: String,
    /// What went wrong; empty if nothing did.
    #[serde(skip_serializing_if = "is_default")]
    pub error: String,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// The replica at work.
    #[serde(skip_serializing_if = "is_default")]
    pub replica_address: String,
    /// Name of the snapshot.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_name: String,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
}

/// A clone that a replica is receiving.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CloneProgress {
    /// What went wrong; empty if nothing did.
    #[serde(skip_serializing_if = "is_default")]
    pub error: String,
    /// The replica that the data comes from.
    #[serde(skip_serializing_if = "is_default")]
    pub from_replica_address: String,
    /// The clone goes on.
    #[serde(skip_serializing_if = "is_default")]
    pub is_cloning: bool,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// Name of the snapshot.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_name: String,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
}

/// A purge that a replica is doing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PurgeProgress {
    /// What went wrong; empty if nothing did.
    #[serde(skip_serializing_if = "is_default")]
    pub error: String,
    /// The purge goes on.
    #[serde(skip_serializing_if = "is_default")]
    pub is_purging: bool,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
}

/// A rebuild of a replica.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RebuildProgress {
    /// The limit of the rebuild's speed in MB/s; 0 for none.
    #[serde(skip_serializing_if = "is_default")]
    pub applied_rebuilding_m_bps: i64,
    /// What went wrong; empty if nothing did.
    #[serde(skip_serializing_if = "is_default")]
    pub error: String,
    /// The replica that the data comes from.
    #[serde(skip_serializing_if = "is_default")]
    pub from_replica_address: String,
    /// The replicas that the data comes from.
    #[serde(skip_serializing_if = "is_default")]
    pub from_replica_address_list: Vec<String>,
    /// The rebuild goes on.
    #[serde(skip_serializing_if = "is_default")]
    pub is_rebuilding: bool,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
}

/// A restore into a replica.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RestoreProgress {
    /// The backup, as a URL.
    #[serde(rename = "backupURL", skip_serializing_if = "is_default")]
    pub backup_url: String,
    /// The backup that is being restored.
    #[serde(skip_serializing_if = "is_default")]
    pub current_restoring_backup: String,
    /// What went wrong; empty if nothing did.
    #[serde(skip_serializing_if = "is_default")]
    pub error: String,
    /// Name of the file.
    #[serde(skip_serializing_if = "is_default")]
    pub filename: String,
    /// The restore goes on.
    #[serde(skip_serializing_if = "is_default")]
    pub is_restoring: bool,
    /// The last backup that was restored whole.
    #[serde(skip_serializing_if = "is_default")]
    pub last_restored: String,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
}

/// A snapshot as the engine knows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SnapshotInfo {
    /// The layers on top of this one.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub children: BTreeMap<String, bool>,
    /// When it was made, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub created: String,
    /// Labels.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub labels: BTreeMap<String, String>,
    /// Name.
    #[serde(skip_serializing_if = "is_default")]
    pub name: String,
    /// The layer below; empty for the lowest.
    #[serde(skip_serializing_if = "is_default")]
    pub parent: String,
    /// It is marked for removal.
    #[serde(skip_serializing_if = "is_default")]
    pub removed: bool,
    /// Bytes.
    #[serde(skip_serializing_if = "is_default")]
    pub size: String,
    /// A user asked for it.
    #[serde(rename = "usercreated", skip_serializing_if = "is_default")]
    pub user_created: bool,
}
