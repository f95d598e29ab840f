//! `Snapshot`: a layer of a volume that does not change any more.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{is_default, null_is_default};

/// A layer of a volume that does not change any more.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "Snapshot",
    plural = "snapshots",
    shortname = "lhsnap",
    namespaced,
    status = "SnapshotStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "A layer of a volume that does not change any more.",
    printcolumn(name = "Volume", type_ = "string", json_path = ".spec.volume"),
    printcolumn(name = "CreationTime", type_ = "string", json_path = ".status.creationTime"),
    printcolumn(name = "ReadyToUse", type_ = "boolean", json_path = ".status.readyToUse"),
    printcolumn(name = "RestoreSize", type_ = "integer", json_path = ".status.restoreSize"),
    printcolumn(name = "Size", type_ = "integer", json_path = ".status.size"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "has(self.volume) && self.volume != ''",
        "message": "spec.volume names the volume that the snapshot is of"
    },
    {
        "rule": "!has(oldSelf.volume) || self.volume == oldSelf.volume",
        "message": "a snapshot belongs to one volume for ever"
    }
]))]
#[serde(rename_all = "camelCase", default)]
pub struct SnapshotSpec {
    /// The snapshot is yet to be taken; false where it exists already.
    #[serde(skip_serializing_if = "is_default")]
    pub create_snapshot: bool,
    /// Labels.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub labels: BTreeMap<String, String>,
    /// Name of the volume.
    #[serde(skip_serializing_if = "is_default")]
    pub volume: String,
}

/// What was observed of a Snapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SnapshotStatus {
    /// Checksum of the data.
    #[serde(skip_serializing_if = "is_default")]
    pub checksum: String,
    /// When the checksum was taken, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub checksum_calculated_at: String,
    /// The layers on top of this one.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub children: BTreeMap<String, bool>,
    /// When the snapshot was taken, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub creation_time: String,
    /// What went wrong; empty if nothing did.
    #[serde(skip_serializing_if = "is_default")]
    pub error: String,
    /// Labels.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub labels: BTreeMap<String, String>,
    /// The snapshot is marked for removal.
    #[serde(skip_serializing_if = "is_default")]
    pub mark_removed: bool,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// The layer below; empty for the lowest.
    #[serde(skip_serializing_if = "is_default")]
    pub parent: String,
    /// The snapshot can be used.
    #[serde(skip_serializing_if = "is_default")]
    pub ready_to_use: bool,
    /// When the snapshot was asked for, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub requested_time: String,
    /// Bytes of a volume made from the snapshot.
    #[serde(skip_serializing_if = "is_default")]
    pub restore_size: i64,
    /// Bytes.
    #[serde(skip_serializing_if = "is_default")]
    pub size: i64,
    /// A user asked for it.
    #[serde(skip_serializing_if = "is_default")]
    pub user_created: bool,
}
