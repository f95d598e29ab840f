//! `Orphan`: a replica directory or a process that nothing in the cluster knows.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Condition, is_default, null_is_default};

/// A replica directory or a process that nothing in the cluster knows.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "Orphan",
    plural = "orphans",
    shortname = "lho",
    namespaced,
    status = "OrphanStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "A replica directory or a process that nothing in the cluster knows.",
    selectable = ".spec.nodeID",
    printcolumn(name = "Type", type_ = "string", json_path = ".spec.orphanType"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeID")
)]
#[serde(rename_all = "camelCase", default)]
pub struct OrphanSpec {
    /// The data engine.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["v1", "v2"]))]
    pub data_engine: String,
    /// The node.
    #[serde(rename = "nodeID", skip_serializing_if = "is_default")]
    pub node_id: String,
    /// What was found: `replica-data`, `engine-instance` or `replica-instance`.
    #[serde(skip_serializing_if = "is_default")]
    pub orphan_type: String,
    /// Further details.
    #[serde(skip_serializing_if = "is_default")]
    pub parameters: BTreeMap<String, String>,
}

/// What was observed of an Orphan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct OrphanStatus {
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
}
