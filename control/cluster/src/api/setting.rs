//! `Setting`: one global setting. Its value lies beside its status, not below a `spec`.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::is_default;

/// One global setting.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "Setting",
    plural = "settings",
    shortname = "lhs",
    namespaced,
    no_spec,
    status = "SettingStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "One global setting.",
    printcolumn(name = "Value", type_ = "string", json_path = ".value"),
    printcolumn(name = "Applied", type_ = "boolean", json_path = ".status.applied"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct SettingSpec {
    /// The value, as text.
    #[serde(skip_serializing_if = "is_default")]
    pub value: String,
}

/// What was observed of a Setting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SettingStatus {
    /// The value is in force.
    #[serde(skip_serializing_if = "is_default")]
    pub applied: bool,
}
