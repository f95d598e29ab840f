//! Backing images. Stored for what comes later: nothing acts on them yet.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{is_default, null_is_default};
use super::words::DataEngine;

/// An image that volumes can be based on.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "BackingImage",
    plural = "backingimages",
    shortname = "lhbi",
    namespaced,
    status = "BackingImageStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "An image that volumes can be based on.",
    printcolumn(name = "UUID", type_ = "string", json_path = ".status.uuid"),
    printcolumn(name = "SourceType", type_ = "string", json_path = ".spec.sourceType"),
    printcolumn(name = "Size", type_ = "integer", json_path = ".status.size"),
    printcolumn(name = "VirtualSize", type_ = "integer", json_path = ".status.virtualSize"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct BackingImageSpec {
    /// Checksum of the data.
    #[serde(skip_serializing_if = "is_default")]
    pub checksum: String,
    /// The data engine.
    pub data_engine: DataEngine,
    /// Copies that should be there, by the disk's UUID.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_file_spec_map: BTreeMap<String, BackingImageDiskSpec>,
    /// Tags that a disk must have, all of them.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_selector: Vec<String>,
    /// Disks that should have a copy, by UUID.
    #[serde(skip_serializing_if = "is_default")]
    pub disks: BTreeMap<String, String>,
    /// Copies that are kept at least.
    #[serde(skip_serializing_if = "is_default")]
    pub min_number_of_copies: i64,
    /// Tags that a node must have, all of them.
    #[serde(skip_serializing_if = "is_default")]
    pub node_selector: Vec<String>,
    /// Secret with the key.
    #[serde(skip_serializing_if = "is_default")]
    pub secret: String,
    /// Namespace of the secret.
    #[serde(skip_serializing_if = "is_default")]
    pub secret_namespace: String,
    /// Details of the source.
    #[serde(skip_serializing_if = "is_default")]
    pub source_parameters: BTreeMap<String, String>,
    /// Where the image comes from.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["download", "upload", "export-from-volume", "restore", "clone"]))]
    pub source_type: String,
}

/// A copy of a backing image that should be on a disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackingImageDiskSpec {
    /// The data engine.
    #[serde(skip_serializing_if = "is_default")]
    pub data_engine: DataEngine,
    /// Replicas here are to be moved elsewhere.
    #[serde(skip_serializing_if = "is_default")]
    pub eviction_requested: bool,
}

/// What was observed of a BackingImage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackingImageStatus {
    /// Checksum of the data.
    #[serde(skip_serializing_if = "is_default")]
    pub checksum: String,
    /// Copies that are there, by the disk's UUID.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub disk_file_status_map: BTreeMap<String, BackingImageDiskStatus>,
    /// When a disk's copy was last needed, by the disk's UUID.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub disk_last_ref_at_map: BTreeMap<String, String>,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// Bytes on the disk.
    #[serde(skip_serializing_if = "is_default")]
    pub real_size: i64,
    /// Bytes.
    #[serde(skip_serializing_if = "is_default")]
    pub size: i64,
    /// Another one for every one that was ever made.
    #[serde(skip_serializing_if = "is_default")]
    pub uuid: String,
    /// Disk of the first copy.
    #[serde(skip_serializing_if = "is_default")]
    pub v2_first_copy_disk: String,
    /// State of the first copy.
    #[serde(skip_serializing_if = "is_default")]
    pub v2_first_copy_status: String,
    /// Bytes that a volume sees.
    #[serde(skip_serializing_if = "is_default")]
    pub virtual_size: i64,
}

/// A copy of a backing image on a disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackingImageDiskStatus {
    /// The data engine.
    #[serde(skip_serializing_if = "is_default")]
    pub data_engine: DataEngine,
    /// When the state last changed, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub last_state_transition_time: String,
    /// One sentence for people.
    #[serde(skip_serializing_if = "is_default")]
    pub message: String,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
}

/// What serves the backing images of one disk.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "BackingImageManager",
    plural = "backingimagemanagers",
    shortname = "lhbim",
    namespaced,
    status = "BackingImageManagerStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "What serves the backing images of one disk.",
    printcolumn(name = "State", type_ = "string", json_path = ".status.currentState"),
    printcolumn(name = "Image", type_ = "string", json_path = ".spec.image"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeID"),
    printcolumn(name = "DiskUUID", type_ = "string", json_path = ".spec.diskUUID"),
    printcolumn(name = "DiskPath", type_ = "string", json_path = ".spec.diskPath"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct BackingImageManagerSpec {
    /// Backing images, by name.
    #[serde(skip_serializing_if = "is_default")]
    pub backing_images: BTreeMap<String, String>,
    /// Path of the disk on its node.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_path: String,
    /// UUID of the disk, from its `longhorn-disk.cfg`.
    #[serde(rename = "diskUUID", skip_serializing_if = "is_default")]
    pub disk_uuid: String,
    /// The image of the programs.
    #[serde(skip_serializing_if = "is_default")]
    pub image: String,
    /// The node.
    #[serde(rename = "nodeID", skip_serializing_if = "is_default")]
    pub node_id: String,
}

/// What was observed of a BackingImageManager.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackingImageManagerStatus {
    /// The oldest version of the service's API that it understands.
    #[serde(skip_serializing_if = "is_default")]
    pub api_min_version: i64,
    /// The version of the service's API.
    #[serde(skip_serializing_if = "is_default")]
    pub api_version: i64,
    /// The files, by the backing image's name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub backing_image_file_map: BTreeMap<String, BackingImageFile>,
    /// What it is doing.
    #[serde(skip_serializing_if = "is_default")]
    pub current_state: String,
    /// Its address; empty while it is not running.
    #[serde(skip_serializing_if = "is_default")]
    pub ip: String,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// Its address on the storage network.
    #[serde(rename = "storageIP", skip_serializing_if = "is_default")]
    pub storage_ip: String,
}

/// One file of a backing image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackingImageFile {
    /// Checksum of the file.
    #[serde(skip_serializing_if = "is_default")]
    pub current_checksum: String,
    /// One sentence for people.
    #[serde(skip_serializing_if = "is_default")]
    pub message: String,
    /// Name.
    #[serde(skip_serializing_if = "is_default")]
    pub name: String,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// Bytes on the disk.
    #[serde(skip_serializing_if = "is_default")]
    pub real_size: i64,
    /// Where the data comes from.
    #[serde(skip_serializing_if = "is_default")]
    pub sender_manager_address: String,
    /// How many are being sent the file.
    #[serde(skip_serializing_if = "is_default")]
    pub sending_reference: i64,
    /// Bytes.
    #[serde(skip_serializing_if = "is_default")]
    pub size: i64,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
    /// Another one for every one that was ever made.
    #[serde(skip_serializing_if = "is_default")]
    pub uuid: String,
    /// Bytes that a volume sees.
    #[serde(skip_serializing_if = "is_default")]
    pub virtual_size: i64,
}

/// Where the first copy of a backing image comes from.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "BackingImageDataSource",
    plural = "backingimagedatasources",
    shortname = "lhbids",
    namespaced,
    status = "BackingImageDataSourceStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "Where the first copy of a backing image comes from.",
    printcolumn(name = "UUID", type_ = "string", json_path = ".spec.uuid"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.currentState"),
    printcolumn(name = "SourceType", type_ = "string", json_path = ".spec.sourceType"),
    printcolumn(name = "Size", type_ = "integer", json_path = ".status.size"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeID"),
    printcolumn(name = "DiskUUID", type_ = "string", json_path = ".spec.diskUUID"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct BackingImageDataSourceSpec {
    /// Checksum of the data.
    #[serde(skip_serializing_if = "is_default")]
    pub checksum: String,
    /// Path of the disk on its node.
    #[serde(skip_serializing_if = "is_default")]
    pub disk_path: String,
    /// UUID of the disk, from its `longhorn-disk.cfg`.
    #[serde(rename = "diskUUID", skip_serializing_if = "is_default")]
    pub disk_uuid: String,
    /// The file has been handed on.
    #[serde(skip_serializing_if = "is_default")]
    pub file_transferred: bool,
    /// The node.
    #[serde(rename = "nodeID", skip_serializing_if = "is_default")]
    pub node_id: String,
    /// Further details.
    #[serde(skip_serializing_if = "is_default")]
    pub parameters: BTreeMap<String, String>,
    /// Where the image comes from.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["download", "upload", "export-from-volume", "restore", "clone"]))]
    pub source_type: String,
    /// Another one for every one that was ever made.
    #[serde(skip_serializing_if = "is_default")]
    pub uuid: String,
}

/// What was observed of a BackingImageDataSource.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackingImageDataSourceStatus {
    /// Checksum of the data.
    #[serde(skip_serializing_if = "is_default")]
    pub checksum: String,
    /// What it is doing.
    #[serde(skip_serializing_if = "is_default")]
    pub current_state: String,
    /// Its address; empty while it is not running.
    #[serde(skip_serializing_if = "is_default")]
    pub ip: String,
    /// One sentence for people.
    #[serde(skip_serializing_if = "is_default")]
    pub message: String,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// Details of what goes on.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub running_parameters: BTreeMap<String, String>,
    /// Bytes.
    #[serde(skip_serializing_if = "is_default")]
    pub size: i64,
    /// Its address on the storage network.
    #[serde(rename = "storageIP", skip_serializing_if = "is_default")]
    pub storage_ip: String,
}
