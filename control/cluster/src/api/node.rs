//! `Node`: a machine, its disks, and what is known of both.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Condition, is_default, null_is_default};
use super::words::DiskType;

/// A machine that holds replicas and runs engines.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "Node",
    plural = "nodes",
    shortname = "lhn",
    namespaced,
    status = "NodeStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "A machine that holds replicas and runs engines.",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(name = "AllowScheduling", type_ = "boolean", json_path = ".spec.allowScheduling"),
    printcolumn(
        name = "Schedulable",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Schedulable')].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSpec {
    /// New replicas may be put here.
    #[serde(skip_serializing_if = "is_default")]
    pub allow_scheduling: bool,
    /// The disks, by name.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("maxProperties" = 64))]
    pub disks: BTreeMap<String, DiskSpec>,
    /// Replicas here are to be moved elsewhere.
    #[serde(skip_serializing_if = "is_default")]
    pub eviction_requested: bool,
    /// Thousandths of a core that the instance manager asks for; 0 for the setting.
    #[serde(rename = "instanceManagerCPURequest", skip_serializing_if = "is_default")]
    #[schemars(range(min = 0))]
    pub instance_manager_cpu_request: i64,
    /// Name.
    #[serde(skip_serializing_if = "is_default")]
    pub name: String,
    /// Tags.
    #[serde(skip_serializing_if = "is_default")]
    pub tags: Vec<String>,
}

/// A disk as it is wanted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(self.path) || self.path == '' || self.path.startsWith('/')",
        "message": "path is absolute"
    },
    {
        "rule": "!has(self.storageReserved) || self.storageReserved >= 0",
        "message": "storageReserved is a number of bytes"
    }
]))]
#[serde(rename_all = "camelCase", default)]
pub struct DiskSpec {
    /// New replicas may be put here.
    #[serde(skip_serializing_if = "is_default")]
    pub allow_scheduling: bool,
    /// How the disk is to be driven.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["", "auto", "aio", "nvme"]))]
    pub disk_driver: String,
    /// What the disk is.
    pub disk_type: DiskType,
    /// Replicas here are to be moved elsewhere.
    #[serde(skip_serializing_if = "is_default")]
    pub eviction_requested: bool,
    /// Absolute path of the directory, or of the device.
    #[serde(skip_serializing_if = "is_default")]
    pub path: String,
    /// Bytes that are not for replicas.
    #[serde(skip_serializing_if = "is_default")]
    pub storage_reserved: i64,
    /// Tags.
    #[serde(skip_serializing_if = "is_default")]
    pub tags: Vec<String>,
}

/// What was observed of a Node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatus {
    /// Replicas are being moved away because the node is being drained.
    #[serde(skip_serializing_if = "is_default")]
    pub auto_evicting: bool,
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// The kubelet's policy for cores.
    #[serde(skip_serializing_if = "is_default")]
    pub cpu_policy: String,
    /// The disks as they are, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub disk_status: BTreeMap<String, DiskStatus>,
    /// The region, from the node's label.
    #[serde(skip_serializing_if = "is_default")]
    pub region: String,
    /// When snapshots were last checked.
    #[serde(skip_serializing_if = "is_default")]
    pub snapshot_check_status: SnapshotCheck,
    /// The zone, from the node's label.
    #[serde(skip_serializing_if = "is_default")]
    pub zone: String,
}

/// A disk as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DiskStatus {
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// How the disk is driven.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_driver: String,
    /// Name of the disk.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_name: String,
    /// Path of the disk on its node.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_path: String,
    /// What the disk is.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_type: String,
    /// UUID of the disk, from its `longhorn-disk.cfg`.
    #[serde(rename = "diskUUID", skip_serializing_if = "is_default")]
    pub disk_uuid: String,
    /// File system of the disk.
    #[serde(skip_serializing_if = "is_default")]
    pub filesystem_type: String,
    /// Health, by the disk's name.
    #[serde(skip_serializing_if = "is_default")]
    pub health_data: BTreeMap<String, DiskHealth>,
    /// When the health was last read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health_data_last_collected_at: Option<Time>,
    /// The instance manager that runs it.
    #[serde(skip_serializing_if = "is_default")]
    pub instance_manager_name: String,
    /// Bytes of each backing image on the disk, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub scheduled_backing_image: BTreeMap<String, i64>,
    /// Bytes of each replica on the disk, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub scheduled_replica: BTreeMap<String, i64>,
    /// Bytes free.
    #[serde(skip_serializing_if = "is_default")]
    pub storage_available: i64,
    /// Bytes of the disk.
    #[serde(skip_serializing_if = "is_default")]
    pub storage_maximum: i64,
    /// Bytes of all replicas on the disk, at their full size.
    #[serde(skip_serializing_if = "is_default")]
    pub storage_scheduled: i64,
}

/// What a disk says of its own health.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DiskHealth {
    /// The figures.
    #[serde(skip_serializing_if = "is_default")]
    pub attributes: Vec<HealthAttribute>,
    /// Bytes.
    #[serde(skip_serializing_if = "is_default")]
    pub capacity: i64,
    /// Name of the disk.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_name: String,
    /// What the disk is.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_type: String,
    /// Version of the firmware.
    #[serde(skip_serializing_if = "is_default")]
    pub firmware_version: String,
    /// The verdict.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["FAILED", "PASSED", "UNKNOWN", "WARNING"]))]
    pub health_status: String,
    /// Model of the disk.
    #[serde(skip_serializing_if = "is_default")]
    pub model_name: String,
    /// Serial number of the disk.
    #[serde(skip_serializing_if = "is_default")]
    pub serial_number: String,
    /// Who says so.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["SMART", "SPDK"]))]
    pub source: String,
    /// Degrees Celsius.
    #[serde(skip_serializing_if = "is_default")]
    pub temperature: i64,
}

/// One figure of a disk's health.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct HealthAttribute {
    /// Number of the attribute.
    #[serde(skip_serializing_if = "is_default")]
    pub id: i64,
    /// Name.
    #[serde(skip_serializing_if = "is_default")]
    pub name: String,
    /// The figure as text.
    #[serde(skip_serializing_if = "is_default")]
    pub raw_string: String,
    /// The figure as the disk keeps it.
    #[serde(skip_serializing_if = "is_default")]
    pub raw_value: i64,
    /// The figure that counts as failure.
    #[serde(skip_serializing_if = "is_default")]
    pub threshold: i64,
    /// The figure, from 0 to 255.
    #[serde(skip_serializing_if = "is_default")]
    pub value: i64,
    /// When it failed.
    #[serde(skip_serializing_if = "is_default")]
    pub when_failed: String,
    /// The worst figure ever seen.
    #[serde(skip_serializing_if = "is_default")]
    pub worst: i64,
}

/// When snapshots were last checked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SnapshotCheck {
    /// When the last check by the clock ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_periodic_checked_at: Option<Time>,
}
