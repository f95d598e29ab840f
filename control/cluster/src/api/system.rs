//! Recurring jobs, shared volumes, system backups, support bundles. Stored for what comes later: nothing acts on them yet.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Condition, is_default, null_is_default};

/// A backup of the cluster's Longhorn resources.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "SystemBackup",
    plural = "systembackups",
    shortname = "lhsb",
    namespaced,
    status = "SystemBackupStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "A backup of the cluster's Longhorn resources.",
    printcolumn(name = "Version", type_ = "string", json_path = ".status.version"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Created", type_ = "string", json_path = ".status.createdAt"),
    printcolumn(name = "LastSyncedAt", type_ = "string", json_path = ".status.lastSyncedAt")
)]
#[serde(rename_all = "camelCase", default)]
pub struct SystemBackupSpec {
    /// Which volumes are backed up, too.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub volume_backup_policy: String,
}

/// What was observed of a SystemBackup.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SystemBackupStatus {
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// When it was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Time>,
    /// The commit that it was built from.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub git_commit: String,
    /// When it was last read from the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_synced_at: Option<Time>,
    /// Image of the manager that made it.
    #[serde(skip_serializing_if = "is_default")]
    pub manager_image: String,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
    /// Version.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub version: String,
}

/// A restore of a system backup.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "SystemRestore",
    plural = "systemrestores",
    shortname = "lhsr",
    namespaced,
    status = "SystemRestoreStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "A restore of a system backup.",
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct SystemRestoreSpec {
    /// Name of the system backup.
    #[serde(skip_serializing_if = "is_default")]
    pub system_backup: String,
}

/// What was observed of a SystemRestore.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SystemRestoreStatus {
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// Where the backup is.
    #[serde(rename = "sourceURL", skip_serializing_if = "is_default")]
    pub source_url: String,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
}

/// An archive of logs and resources for whoever helps.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "SupportBundle",
    plural = "supportbundles",
    shortname = "lhbundle",
    namespaced,
    status = "SupportBundleStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "An archive of logs and resources for whoever helps.",
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Issue", type_ = "string", json_path = ".spec.issueURL"),
    printcolumn(name = "Description", type_ = "string", json_path = ".spec.description"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct SupportBundleSpec {
    /// What the problem is.
    #[serde(skip_serializing_if = "is_default")]
    pub description: String,
    /// Where the problem is talked about.
    #[serde(rename = "issueURL", skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub issue_url: String,
    /// The node.
    #[serde(rename = "nodeID", skip_serializing_if = "is_default")]
    pub node_id: String,
}

/// What was observed of a SupportBundle.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SupportBundleStatus {
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default")]
    pub conditions: Vec<Condition>,
    /// Name of the file.
    #[serde(skip_serializing_if = "is_default")]
    pub filename: String,
    /// Bytes of the file.
    #[serde(skip_serializing_if = "is_default")]
    pub filesize: i64,
    /// The image of the programs.
    #[serde(skip_serializing_if = "is_default")]
    pub image: String,
    /// Address of the manager at work.
    #[serde(rename = "managerIP", skip_serializing_if = "is_default")]
    pub manager_ip: String,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
}

/// The server of a volume that many nodes mount.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "ShareManager",
    plural = "sharemanagers",
    shortname = "lhsm",
    namespaced,
    status = "ShareManagerStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "The server of a volume that many nodes mount.",
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.ownerID"),
    printcolumn(name = "Image", type_ = "string", json_path = ".status.currentImage"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct ShareManagerSpec {
    /// The image of the programs.
    #[serde(skip_serializing_if = "is_default")]
    pub image: String,
}

/// What was observed of a ShareManager.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ShareManagerStatus {
    /// The image in use.
    #[serde(skip_serializing_if = "is_default")]
    pub current_image: String,
    /// Where it is used: a device path or a URI.
    #[serde(skip_serializing_if = "is_default")]
    pub endpoint: String,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
}

/// Work that is done on volumes by a clock.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "RecurringJob",
    plural = "recurringjobs",
    shortname = "lhrj",
    namespaced,
    status = "RecurringJobStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "Work that is done on volumes by a clock.",
    printcolumn(name = "Groups", type_ = "string", json_path = ".spec.groups"),
    printcolumn(name = "Task", type_ = "string", json_path = ".spec.task"),
    printcolumn(name = "Cron", type_ = "string", json_path = ".spec.cron"),
    printcolumn(name = "Retain", type_ = "integer", json_path = ".spec.retain"),
    printcolumn(name = "Concurrency", type_ = "integer", json_path = ".spec.concurrency"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Labels", type_ = "string", json_path = ".spec.labels")
)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(self.concurrency) || self.concurrency >= 1",
        "message": "concurrency is at least 1"
    }
]))]
#[serde(rename_all = "camelCase", default)]
pub struct RecurringJobSpec {
    /// How many volumes are worked on at once.
    #[serde(skip_serializing_if = "is_default")]
    pub concurrency: i64,
    /// When, as a cron expression.
    #[serde(skip_serializing_if = "is_default")]
    pub cron: String,
    /// Groups of volumes that the job is for.
    #[serde(skip_serializing_if = "is_default")]
    pub groups: Vec<String>,
    /// Labels.
    #[serde(skip_serializing_if = "is_default")]
    pub labels: BTreeMap<String, String>,
    /// Name.
    #[serde(skip_serializing_if = "is_default")]
    pub name: String,
    /// Further details.
    #[serde(skip_serializing_if = "is_default")]
    pub parameters: BTreeMap<String, String>,
    /// How many snapshots or backups are kept.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(range(min = 0))]
    pub retain: i64,
    /// What to do.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["snapshot", "snapshot-force-create", "snapshot-cleanup", "snapshot-delete", "backup", "backup-force-create", "filesystem-trim", "system-backup"]))]
    pub task: String,
}

/// What was observed of a RecurringJob.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RecurringJobStatus {
    /// How often the job has run.
    #[serde(skip_serializing_if = "is_default")]
    pub execution_count: i64,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
}
