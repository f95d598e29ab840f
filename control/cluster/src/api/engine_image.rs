//! `EngineImage`: a version of the programs that run engines and replicas.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Condition, is_default, null_is_default};

/// A version of the programs that run engines and replicas.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "EngineImage",
    plural = "engineimages",
    shortname = "lhei",
    namespaced,
    status = "EngineImageStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "A version of the programs that run engines and replicas.",
    printcolumn(name = "Incompatible", type_ = "boolean", json_path = ".status.incompatible"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Image", type_ = "string", json_path = ".spec.image"),
    printcolumn(name = "RefCount", type_ = "integer", json_path = ".status.refCount"),
    printcolumn(name = "BuildDate", type_ = "string", json_path = ".status.buildDate"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct EngineImageSpec {
    /// The image of the programs.
    #[serde(skip_serializing_if = "is_default")]
    pub image: String,
}

/// What was observed of an EngineImage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct EngineImageStatus {
    /// When the programs were built.
    #[serde(skip_serializing_if = "is_default")]
    pub build_date: String,
    /// The oldest command line that is understood.
    #[serde(rename = "cliAPIMinVersion", skip_serializing_if = "is_default")]
    pub cli_api_min_version: i64,
    /// The version of the command line.
    #[serde(rename = "cliAPIVersion", skip_serializing_if = "is_default")]
    pub cli_api_version: i64,
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// The oldest version of the engine's API that it understands.
    #[serde(rename = "controllerAPIMinVersion", skip_serializing_if = "is_default")]
    pub controller_api_min_version: i64,
    /// The version of the engine's API.
    #[serde(rename = "controllerAPIVersion", skip_serializing_if = "is_default")]
    pub controller_api_version: i64,
    /// The oldest data format that is understood.
    #[serde(skip_serializing_if = "is_default")]
    pub data_format_min_version: i64,
    /// The version of the data format.
    #[serde(skip_serializing_if = "is_default")]
    pub data_format_version: i64,
    /// The commit that it was built from.
    #[serde(skip_serializing_if = "is_default")]
    pub git_commit: String,
    /// These programs cannot work with this manager.
    #[serde(skip_serializing_if = "is_default")]
    pub incompatible: bool,
    /// Since when nothing uses the image, RFC 3339.
    #[serde(skip_serializing_if = "is_default")]
    pub no_ref_since: String,
    /// Whether the programs are on a node, by the node's name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub node_deployment_map: BTreeMap<String, bool>,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// How many volumes, engines and replicas use the image.
    #[serde(skip_serializing_if = "is_default")]
    pub ref_count: i64,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
    /// Version.
    #[serde(skip_serializing_if = "is_default")]
    pub version: String,
}
