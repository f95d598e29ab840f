//! `Volume`: what a user asks for, and the authority over who may write it.

use control::host::{IO_TIMEOUT_SECONDS, SNAPSHOT_COUNT};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{
    Condition, EpochRecord, GenerationText, Int64Text, is_default, null_is_default, seconds,
};
use super::words::{
    AccessMode, AutoBalance, DataEngine, DataLocality, Frontend, Quorum, Robustness, SnapshotIntegrity,
    Toggle, VolumeState, quorum, quorum_schema,
};

/// Volumes are whole pieces of this many bytes, as Longhorn's are (`SizeAlignment` of longhorn-manager's `util`): its backups copy blocks
/// of that size.
pub const VOLUME_PIECE: u64 = 2 << 20;

/// Longest name of a volume or a snapshot, in bytes (`NameMaximumLength` of longhorn-manager's `datastore`): names of engines,
/// replicas, labels and sockets are made of it.
pub const NAME_MAX: usize = 40;

/// A replicated block device.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "Volume",
    plural = "volumes",
    shortname = "lhv",
    namespaced,
    status = "VolumeStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "A replicated block device.",
    selectable = ".spec.nodeID",
    selectable = ".status.cloneStatus.sourceVolume",
    printcolumn(name = "Data Engine", type_ = "string", json_path = ".spec.dataEngine"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Robustness", type_ = "string", json_path = ".status.robustness"),
    printcolumn(
        name = "Scheduled",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Scheduled')].status"
    ),
    printcolumn(name = "Size", type_ = "string", json_path = ".spec.size"),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.currentNodeID"),
    printcolumn(name = "Switchover", type_ = "string", json_path = ".status.switchoverState"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(oldSelf.size) || (has(self.size) && int(self.size) >= int(oldSelf.size))",
        "message": "a volume does not shrink: make a smaller one and copy the data"
    },
    {
        "rule": "!has(self.size) || int(self.size) >= 0",
        "message": "size is a number of bytes"
    },
    {
        "rule": "!has(self.dataLocality) || self.dataLocality != 'strict-local' || (has(self.numberOfReplicas) && self.numberOfReplicas == 1)",
        "message": "strict-local volumes have exactly one replica: set numberOfReplicas to 1 or another dataLocality"
    },
    {
        "rule": "!has(self.migratable) || !self.migratable || self.accessMode == 'rwx'",
        "message": "only rwx volumes are migratable"
    },
    {
        "rule": "self.dataEngine == oldSelf.dataEngine",
        "message": "the data engine of a volume does not change"
    },
    {
        "rule": "self.quorum == oldSelf.quorum",
        "message": "the quorum of a volume does not change: make another volume"
    },
    {
        "rule": "!has(oldSelf.encrypted) || !oldSelf.encrypted || (has(self.encrypted) && self.encrypted)",
        "message": "an encrypted volume stays encrypted"
    }
]))]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSpec {
    /// A standby of a backed-up volume: it follows new backups and cannot be written.
    #[serde(rename = "Standby", skip_serializing_if = "is_default")]
    pub standby: bool,
    /// How many nodes may use the volume at once.
    pub access_mode: AccessMode,
    /// Name of the backing image; empty for none.
    #[serde(skip_serializing_if = "is_default")]
    pub backing_image: String,
    /// Bytes of a block of a backup.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["2097152", "16777216"]))]
    pub backup_block_size: Int64Text,
    /// How backups are compressed.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["none", "lz4", "gzip"]))]
    pub backup_compression_method: String,
    /// Name of the backup target.
    #[serde(skip_serializing_if = "is_default")]
    pub backup_target_name: String,
    /// Whether a clone copies everything or shares layers with its source.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["", "full-copy", "linked-clone"]))]
    pub clone_mode: String,
    /// The data engine.
    pub data_engine: DataEngine,
    /// How the data is laid out.
    #[serde(skip_serializing_if = "is_default")]
    pub data_layout: DataLayout,
    /// Whether one replica should be on the node that the volume is attached to. Absent: the setting
    /// default-data-locality.
    #[serde(skip_serializing_if = "is_default")]
    pub data_locality: DataLocality,
    /// What the volume is cloned from: `snap://VOLUME/SNAPSHOT` or `vol://VOLUME`.
    #[serde(skip_serializing_if = "is_default")]
    pub data_source: String,
    /// The engine runs without showing a device.
    #[serde(skip_serializing_if = "is_default")]
    pub disable_frontend: bool,
    /// Tags that a disk must have, all of them.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_selector: Vec<String>,
    /// The data is encrypted on its way to the device.
    #[serde(skip_serializing_if = "is_default")]
    pub encrypted: bool,
    /// The node that the engine runs on, where that is not the volume's.
    #[serde(rename = "engineNodeID", skip_serializing_if = "is_default")]
    pub engine_node_id: String,
    /// The file system is frozen while a snapshot is taken.
    pub freeze_filesystem_for_snapshot: Toggle,
    /// The backup, as a URL, that the volume is restored from.
    #[serde(skip_serializing_if = "is_default")]
    pub from_backup: String,
    /// How the volume is shown; empty for not at all.
    pub frontend: Frontend,
    /// The image of the programs.
    #[serde(skip_serializing_if = "is_default")]
    pub image: String,
    /// Who attached the volume last.
    #[serde(skip_serializing_if = "is_default")]
    pub last_attached_by: String,
    /// The volume may be attached to two nodes while it moves.
    #[serde(skip_serializing_if = "is_default")]
    pub migratable: bool,
    /// The node that the volume is to move to.
    #[serde(rename = "migrationNodeID", skip_serializing_if = "is_default")]
    pub migration_node_id: String,
    /// The node.
    #[serde(rename = "nodeID", skip_serializing_if = "is_default")]
    pub node_id: String,
    /// Tags that a node must have, all of them.
    #[serde(skip_serializing_if = "is_default")]
    pub node_selector: Vec<String>,
    /// How many replicas the volume should have; 0 for the setting default-replica-count.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 0, max = 20))]
    pub number_of_replicas: i64,
    /// A degraded volume that is detached is attached to be rebuilt.
    pub offline_rebuilding: Toggle,
    /// How much a rebuild copies at once, in Longhorn's count of files; 0 for the setting.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 0, max = 5))]
    pub rebuild_concurrent_sync_limit: i64,
    /// Whether replicas are moved to spread evenly.
    #[serde(skip_serializing_if = "is_default")]
    pub replica_auto_balance: AutoBalance,
    /// Two replicas may share a disk.
    pub replica_disk_soft_anti_affinity: Toggle,
    /// MB/s of a rebuild; 0 for the setting.
    #[serde(skip_serializing_if = "is_default")]
    pub replica_rebuilding_bandwidth_limit: i64,
    /// Two replicas may share a node.
    pub replica_soft_anti_affinity: Toggle,
    /// Two replicas may share a zone.
    pub replica_zone_soft_anti_affinity: Toggle,
    /// A restored volume gets the recurring jobs of its backup.
    pub restore_volume_recurring_job: Toggle,
    /// No count of writes is kept.
    #[serde(skip_serializing_if = "is_default")]
    pub revision_counter_disabled: bool,
    /// Bytes.
    #[serde(skip_serializing_if = "is_default")]
    pub size: Int64Text,
    /// Whether and how checksums of snapshots are kept.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_data_integrity: SnapshotIntegrity,
    /// When checksums were last asked for, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_hashing_requested_at: String,
    /// Most snapshots; 0 for the setting.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 0, max = SNAPSHOT_COUNT))]
    pub snapshot_max_count: i64,
    /// Most bytes of all snapshots together; 0 for no limit.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_max_size: Int64Text,
    /// Minutes after which a failed replica is deleted; 0 for 2880.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 0))]
    pub stale_replica_timeout: i64,
    /// Queues of the engine and of its ublk device, at most 64; 0 for half as many as there are processors, at most 4.
    #[serde(skip_serializing_if = "is_default")]
    pub ublk_number_of_queue: i64,
    /// Requests of a queue of the ublk device at a time, 8 to 128; 0 for 128.
    #[serde(skip_serializing_if = "is_default")]
    pub ublk_queue_depth: i64,
    /// A request to trim the file system removes snapshots, so that their space comes back, too.
    pub unmap_mark_snap_chain_removed: Toggle,
    /// Who must agree before a change of the membership counts: the members left (any), a majority of all
    /// replicas, or nobody (unsafe).
    #[serde(deserialize_with = "quorum")]
    #[schemars(schema_with = "quorum_schema")]
    pub quorum: Quorum,
    /// Seconds that requests wait for a replica; 0 for ever.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "seconds")]
    #[schemars(extend("default" = IO_TIMEOUT_SECONDS))]
    pub io_timeout: Option<u32>,
}

/// How the data is laid out over replicas or shards.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DataLayout {
    /// How many shards hold data.
    #[serde(skip_serializing_if = "is_default")]
    pub data_chunks: i64,
    /// How the data is spread.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["raid1", "erasureCoding", ""]))]
    pub mode: String,
    /// How many shards hold parity.
    #[serde(skip_serializing_if = "is_default")]
    pub parity_chunks: i64,
    /// KiB of a strip.
    #[serde(rename = "stripSizeKB", skip_serializing_if = "is_default")]
    pub strip_size_kb: i64,
    /// Replicas or shards.
    #[serde(rename = "type", skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["replicated", "sharded", ""]))]
    pub kind: String,
}

/// What was observed of a Volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeStatus {
    /// Bytes that all layers of the volume take on a replica's disk.
    #[serde(skip_serializing_if = "is_default")]
    pub actual_size: i64,
    /// Clones in progress.
    #[serde(skip_serializing_if = "is_default")]
    pub clone_status: CloneStatus,
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// The node that the engine runs on.
    #[serde(rename = "currentEngineNodeID", skip_serializing_if = "is_default")]
    pub current_engine_node_id: String,
    /// The image in use.
    #[serde(skip_serializing_if = "is_default")]
    pub current_image: String,
    /// The node that the volume is migrating to.
    #[serde(rename = "currentMigrationNodeID", skip_serializing_if = "is_default")]
    pub current_migration_node_id: String,
    /// The node that the volume is attached to; empty while it is not.
    #[serde(rename = "currentNodeID", skip_serializing_if = "is_default")]
    pub current_node_id: String,
    /// The engine is smaller than the volume should be.
    #[serde(skip_serializing_if = "is_default")]
    pub expansion_required: bool,
    /// The engine runs without showing a device.
    #[serde(skip_serializing_if = "is_default")]
    pub frontend_disabled: bool,
    /// It follows new backups.
    #[serde(skip_serializing_if = "is_default")]
    pub is_standby: bool,
    /// What of Kubernetes uses the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub kubernetes_status: KubernetesStatus,
    /// When the volume was last salvaged by itself, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub last_auto_salvaged_at: String,
    /// Name of the last backup.
    #[serde(skip_serializing_if = "is_default")]
    pub last_backup: String,
    /// When the last backup was made, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub last_backup_at: String,
    /// Since when the volume has too few healthy replicas, RFC 3339; empty if it has enough.
    #[serde(skip_serializing_if = "is_default")]
    pub last_degraded_at: String,
    /// When the last checksums that were asked for were done, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub last_on_demand_snapshot_hashing_complete_at: String,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// When whoever mounts the volume was last asked to do it again, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub remount_requested_at: String,
    /// The restore has begun.
    #[serde(skip_serializing_if = "is_default")]
    pub restore_initiated: bool,
    /// A backup is to be restored.
    #[serde(skip_serializing_if = "is_default")]
    pub restore_required: bool,
    /// How well the volume is protected.
    #[serde(skip_serializing_if = "is_default")]
    pub robustness: Robustness,
    /// Where the shared volume is mounted from.
    #[serde(skip_serializing_if = "is_default")]
    pub share_endpoint: String,
    /// State of the share manager.
    #[serde(skip_serializing_if = "is_default")]
    pub share_state: String,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: VolumeState,
    /// State of a switch between two engines.
    #[serde(skip_serializing_if = "is_default")]
    pub switchover_state: String,
    /// The highest number that was given to an engine of this volume: attachment number x 2^32 + restart
    /// number. Written before its use, never lowered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<GenerationText>,
    /// The members that count, replaced only by an engine that knew the one before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<EpochRecord>,
    /// UIDs of the deleted Replicas whose data is about to go, and of the one whose data went last.
    #[serde(skip_serializing_if = "is_default")]
    pub data_removed_of: Vec<String>,
    /// How often the volume was attached so that its replicas can leave, and that came to nothing, since it was asked for.
    #[serde(skip_serializing_if = "is_default")]
    pub eviction_attempts: i64,
}

/// How far a clone is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct CloneStatus {
    /// How often the clone was tried.
    #[serde(skip_serializing_if = "is_default")]
    pub attempt_count: i64,
    /// When the clone may be tried again, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub next_allowed_attempt_at: String,
    /// Name of the snapshot.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot: String,
    /// The volume that the clone is of.
    #[serde(skip_serializing_if = "is_default")]
    pub source_volume: String,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
}

/// What of Kubernetes uses the volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct KubernetesStatus {
    /// When a claim last used the volume, RFC 3339.
    #[serde(rename = "lastPVCRefAt", skip_serializing_if = "is_default")]
    pub last_pvc_ref_at: String,
    /// When a pod last used the volume, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub last_pod_ref_at: String,
    /// Namespace of the claim.
    #[serde(skip_serializing_if = "is_default")]
    pub namespace: String,
    /// The persistent volume.
    #[serde(skip_serializing_if = "is_default")]
    pub pv_name: String,
    /// Phase of the persistent volume.
    #[serde(skip_serializing_if = "is_default")]
    pub pv_status: String,
    /// The claim.
    #[serde(skip_serializing_if = "is_default")]
    pub pvc_name: String,
    /// The pods that use the volume.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub workloads_status: Vec<Workload>,
}

/// A pod that uses the volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Workload {
    /// The pod.
    #[serde(skip_serializing_if = "is_default")]
    pub pod_name: String,
    /// The pod's phase.
    #[serde(skip_serializing_if = "is_default")]
    pub pod_status: String,
    /// What the pod belongs to.
    #[serde(skip_serializing_if = "is_default")]
    pub workload_name: String,
    /// Kind of what the pod belongs to.
    #[serde(skip_serializing_if = "is_default")]
    pub workload_type: String,
}
