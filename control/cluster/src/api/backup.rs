//! Backups and their targets. Stored for what comes later: nothing acts on them yet.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Condition, Int64Text, is_default, null_is_default};

/// One backup of a snapshot.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "Backup",
    plural = "backups",
    shortname = "lhb",
    namespaced,
    status = "BackupStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "One backup of a snapshot.",
    printcolumn(name = "SnapshotName", type_ = "string", json_path = ".status.snapshotName"),
    printcolumn(name = "SnapshotSize", type_ = "string", json_path = ".status.size"),
    printcolumn(name = "SnapshotCreatedAt", type_ = "string", json_path = ".status.snapshotCreatedAt"),
    printcolumn(name = "BackupTarget", type_ = "string", json_path = ".status.backupTargetName"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "LastSyncedAt", type_ = "string", json_path = ".status.lastSyncedAt")
)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupSpec {
    /// Bytes of a block of a backup.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["-1", "2097152", "16777216"]))]
    pub backup_block_size: Int64Text,
    /// Whether all blocks are sent again, or those that changed.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["full", "incremental"]))]
    pub backup_mode: String,
    /// Labels.
    #[serde(skip_serializing_if = "is_default")]
    pub labels: BTreeMap<String, String>,
    /// Name of the snapshot.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_name: String,
    /// When the target was last asked to be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sync_requested_at: Option<Time>,
}

/// What was observed of a Backup.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupStatus {
    /// When the backup was made, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub backup_created_at: String,
    /// Name of the backup target.
    #[serde(skip_serializing_if = "is_default")]
    pub backup_target_name: String,
    /// How the data is compressed.
    #[serde(skip_serializing_if = "is_default")]
    pub compression_method: String,
    /// What went wrong; empty if nothing did.
    #[serde(skip_serializing_if = "is_default")]
    pub error: String,
    /// Labels.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub labels: BTreeMap<String, String>,
    /// When it was last read from the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_synced_at: Option<Time>,
    /// Further remarks.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub messages: BTreeMap<String, String>,
    /// Bytes that the target did not have yet.
    #[serde(skip_serializing_if = "is_default")]
    pub newly_upload_data_size: String,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// Bytes that the target had and that were sent again.
    #[serde(skip_serializing_if = "is_default")]
    pub re_uploaded_data_size: String,
    /// The replica at work.
    #[serde(skip_serializing_if = "is_default")]
    pub replica_address: String,
    /// Bytes.
    #[serde(skip_serializing_if = "is_default")]
    pub size: String,
    /// When the snapshot was taken, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_created_at: String,
    /// Name of the snapshot.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_name: String,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
    /// Where it is, as a URL.
    #[serde(skip_serializing_if = "is_default")]
    pub url: String,
    /// Backing image of the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub volume_backing_image_name: String,
    /// When the volume was made, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub volume_created: String,
    /// Name of the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub volume_name: String,
    /// Bytes of the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub volume_size: String,
}

/// A place for backups.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "BackupTarget",
    plural = "backuptargets",
    shortname = "lhbt",
    namespaced,
    status = "BackupTargetStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "A place for backups.",
    printcolumn(name = "URL", type_ = "string", json_path = ".spec.backupTargetURL"),
    printcolumn(name = "Credential", type_ = "string", json_path = ".spec.credentialSecret"),
    printcolumn(name = "LastBackupAt", type_ = "string", json_path = ".spec.pollInterval"),
    printcolumn(name = "Available", type_ = "boolean", json_path = ".status.available"),
    printcolumn(name = "LastSyncedAt", type_ = "string", json_path = ".status.lastSyncedAt")
)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupTargetSpec {
    /// The place, as a URL.
    #[serde(rename = "backupTargetURL", skip_serializing_if = "is_default")]
    pub backup_target_url: String,
    /// Secret with the target's credentials.
    #[serde(skip_serializing_if = "is_default")]
    pub credential_secret: String,
    /// How often the target is read.
    #[serde(skip_serializing_if = "is_default")]
    pub poll_interval: String,
    /// When the target was last asked to be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sync_requested_at: Option<Time>,
}

/// What was observed of a BackupTarget.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupTargetStatus {
    /// The target answers.
    #[serde(skip_serializing_if = "is_default")]
    pub available: bool,
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// When it was last read from the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_synced_at: Option<Time>,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
}

/// A volume as a backup target knows it.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "BackupVolume",
    plural = "backupvolumes",
    shortname = "lhbv",
    namespaced,
    status = "BackupVolumeStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "A volume as a backup target knows it.",
    printcolumn(name = "BackupTarget", type_ = "string", json_path = ".spec.backupTargetName"),
    printcolumn(name = "CreatedAt", type_ = "string", json_path = ".status.createdAt"),
    printcolumn(name = "LastBackupName", type_ = "string", json_path = ".status.lastBackupName"),
    printcolumn(name = "LastBackupAt", type_ = "string", json_path = ".status.lastBackupAt"),
    printcolumn(name = "LastSyncedAt", type_ = "string", json_path = ".status.lastSyncedAt")
)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupVolumeSpec {
    /// Name of the backup target.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub backup_target_name: String,
    /// When the target was last asked to be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sync_requested_at: Option<Time>,
    /// Name of the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub volume_name: String,
}

/// What was observed of a BackupVolume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupVolumeStatus {
    /// Checksum of the backing image.
    #[serde(skip_serializing_if = "is_default")]
    pub backing_image_checksum: String,
    /// Name of the backing image.
    #[serde(skip_serializing_if = "is_default")]
    pub backing_image_name: String,
    /// When it was made.
    #[serde(skip_serializing_if = "is_default")]
    pub created_at: String,
    /// Bytes that the backups take.
    #[serde(skip_serializing_if = "is_default")]
    pub data_stored: String,
    /// Labels.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub labels: BTreeMap<String, String>,
    /// When the last backup was made, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub last_backup_at: String,
    /// Name of the last backup.
    #[serde(skip_serializing_if = "is_default")]
    pub last_backup_name: String,
    /// When it last changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_modification_time: Option<Time>,
    /// When it was last read from the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_synced_at: Option<Time>,
    /// Further remarks.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub messages: BTreeMap<String, String>,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// Bytes.
    #[serde(skip_serializing_if = "is_default")]
    pub size: String,
    /// The storage class of the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub storage_class_name: String,
}

/// A backup of a backing image.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "BackupBackingImage",
    plural = "backupbackingimages",
    shortname = "lhbbi",
    namespaced,
    status = "BackupBackingImageStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "A backup of a backing image.",
    printcolumn(name = "BackingImage", type_ = "string", json_path = ".status.backingImage"),
    printcolumn(name = "Size", type_ = "integer", json_path = ".status.size"),
    printcolumn(name = "BackupCreatedAt", type_ = "string", json_path = ".status.backupCreatedAt"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "LastSyncedAt", type_ = "string", json_path = ".status.lastSyncedAt")
)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupBackingImageSpec {
    /// Name of the backing image; empty for none.
    #[serde(skip_serializing_if = "is_default")]
    pub backing_image: String,
    /// Name of the backup target.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub backup_target_name: String,
    /// Labels.
    #[serde(skip_serializing_if = "is_default")]
    pub labels: BTreeMap<String, String>,
    /// When the target was last asked to be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sync_requested_at: Option<Time>,
    /// A user asked for it.
    #[serde(skip_serializing_if = "is_default")]
    pub user_created: bool,
}

/// What was observed of a BackupBackingImage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackupBackingImageStatus {
    /// Name of the backing image; empty for none.
    #[serde(skip_serializing_if = "is_default")]
    pub backing_image: String,
    /// When the backup was made, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub backup_created_at: String,
    /// Checksum of the data.
    #[serde(skip_serializing_if = "is_default")]
    pub checksum: String,
    /// How the data is compressed.
    #[serde(skip_serializing_if = "is_default")]
    pub compression_method: String,
    /// What went wrong; empty if nothing did.
    #[serde(skip_serializing_if = "is_default")]
    pub error: String,
    /// Labels.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub labels: BTreeMap<String, String>,
    /// When it was last read from the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_synced_at: Option<Time>,
    /// Address of the manager at work.
    #[serde(skip_serializing_if = "is_default")]
    pub manager_address: String,
    /// Further remarks.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub messages: BTreeMap<String, String>,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// Secret with the key.
    #[serde(skip_serializing_if = "is_default")]
    pub secret: String,
    /// Namespace of the secret.
    #[serde(skip_serializing_if = "is_default")]
    pub secret_namespace: String,
    /// Bytes.
    #[serde(skip_serializing_if = "is_default")]
    pub size: i64,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
    /// Where it is, as a URL.
    #[serde(skip_serializing_if = "is_default")]
    pub url: String,
}
