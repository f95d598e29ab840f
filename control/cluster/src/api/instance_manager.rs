//! `InstanceManager`: what runs the engines and replicas of one node.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Condition, is_default, null_is_default};
use super::words::InstanceState;

/// What runs the engines and replicas of one node.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "longhorn.io",
    version = "v1beta2",
    kind = "InstanceManager",
    plural = "instancemanagers",
    shortname = "lhim",
    namespaced,
    status = "InstanceManagerStatus",
    derive = "Default",
    derive = "PartialEq",
    category = "longhorn",
    doc = "What runs the engines and replicas of one node.",
    printcolumn(name = "Data Engine", type_ = "string", json_path = ".spec.dataEngine"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.currentState"),
    printcolumn(name = "Type", type_ = "string", json_path = ".spec.type"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeID"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct InstanceManagerSpec {
    /// The data engine.
    #[serde(skip_serializing_if = "is_default")]
    pub data_engine: String,
    /// Settings that only one kind of data engine has.
    #[serde(skip_serializing_if = "is_default")]
    pub data_engine_spec: DataEngineSettings,
    /// The image of the programs.
    #[serde(skip_serializing_if = "is_default")]
    pub image: String,
    /// The node.
    #[serde(rename = "nodeID", skip_serializing_if = "is_default")]
    pub node_id: String,
    /// What it runs.
    #[serde(rename = "type", skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["aio", "engine", "replica"]))]
    pub kind: String,
}

/// Settings that only one kind of data engine has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DataEngineSettings {
    /// The v2 data engine's.
    #[serde(skip_serializing_if = "is_default")]
    pub v2: V2Settings,
}

/// Settings of the v2 data engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct V2Settings {
    /// Whether cores are taken away from others.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["", "true", "false"]))]
    pub cpu_isolation_enabled: String,
    /// Which cores are used.
    #[serde(skip_serializing_if = "is_default")]
    pub cpu_mask: String,
}

/// What was observed of an InstanceManager.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct InstanceManagerStatus {
    /// The oldest version of the service's API that it understands.
    #[serde(skip_serializing_if = "is_default")]
    pub api_min_version: i64,
    /// The version of the service's API.
    #[serde(skip_serializing_if = "is_default")]
    pub api_version: i64,
    /// Backing images, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub backing_images: BTreeMap<String, BackingImageCopy>,
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: Vec<Condition>,
    /// What it is doing.
    #[serde(skip_serializing_if = "is_default")]
    pub current_state: InstanceState,
    /// State that only one kind of data engine has.
    #[serde(skip_serializing_if = "is_default")]
    pub data_engine_status: DataEngineState,
    /// Frontend processes, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub instance_engine_frontends: BTreeMap<String, InstanceProcess>,
    /// Engine processes, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub instance_engines: BTreeMap<String, InstanceProcess>,
    /// Replica processes, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub instance_replicas: BTreeMap<String, InstanceProcess>,
    /// Shard group processes, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub instance_shard_groups: BTreeMap<String, InstanceProcess>,
    /// Shard processes, by name.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub instance_shards: BTreeMap<String, InstanceProcess>,
    /// Its address; empty while it is not running.
    #[serde(skip_serializing_if = "is_default")]
    pub ip: String,
    /// The manager that is responsible.
    #[serde(rename = "ownerID", skip_serializing_if = "is_default")]
    pub owner_id: String,
    /// The oldest version of the proxy's API that it understands.
    #[serde(skip_serializing_if = "is_default")]
    pub proxy_api_min_version: i64,
    /// The version of the proxy's API.
    #[serde(skip_serializing_if = "is_default")]
    pub proxy_api_version: i64,
}

/// A copy of a backing image that the instance manager holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct BackingImageCopy {
    /// Checksum of the file.
    #[serde(skip_serializing_if = "is_default")]
    pub current_checksum: String,
    /// UUID of the disk, from its `longhorn-disk.cfg`.
    #[serde(rename = "diskUUID", skip_serializing_if = "is_default")]
    pub disk_uuid: String,
    /// One sentence for people.
    #[serde(skip_serializing_if = "is_default")]
    pub message: String,
    /// Name.
    #[serde(skip_serializing_if = "is_default")]
    pub name: String,
    /// Per cent.
    #[serde(skip_serializing_if = "is_default")]
    pub progress: i64,
    /// Bytes.
    #[serde(skip_serializing_if = "is_default")]
    pub size: i64,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
    /// Another one for every one that was ever made.
    #[serde(skip_serializing_if = "is_default")]
    pub uuid: String,
}

/// State that only one kind of data engine has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DataEngineState {
    /// The v2 data engine's.
    #[serde(skip_serializing_if = "is_default")]
    pub v2: V2State,
}

/// State of the v2 data engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct V2State {
    /// How many cores are used.
    #[serde(skip_serializing_if = "is_default")]
    pub cpu_core_number: i64,
    /// Which cores are used.
    #[serde(skip_serializing_if = "is_default")]
    pub cpu_mask: String,
    /// Whether it sleeps while there is nothing to do.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("enum" = ["", "true", "false"]))]
    pub interrupt_mode_enabled: String,
}

/// One process of an instance manager.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct InstanceProcess {
    /// What it is.
    #[serde(skip_serializing_if = "is_default")]
    pub spec: InstanceProcessSpec,
    /// How it is.
    #[serde(skip_serializing_if = "is_default")]
    pub status: InstanceProcessStatus,
}

/// What a process is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct InstanceProcessSpec {
    /// The data engine.
    #[serde(skip_serializing_if = "is_default")]
    pub data_engine: String,
    /// Name.
    #[serde(skip_serializing_if = "is_default")]
    pub name: String,
}

/// How a process is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct InstanceProcessStatus {
    /// The way in use.
    #[serde(skip_serializing_if = "is_default")]
    pub active_path: String,
    /// What is so and what is not, each with a reason.
    #[serde(skip_serializing_if = "is_default", deserialize_with = "null_is_default")]
    #[schemars(extend("nullable" = true))]
    pub conditions: BTreeMap<String, bool>,
    /// Where it is used: a device path or a URI.
    #[serde(skip_serializing_if = "is_default")]
    pub endpoint: String,
    /// What went wrong; empty if nothing did.
    #[serde(skip_serializing_if = "is_default")]
    pub error_msg: String,
    /// How the volume is shown; empty for not at all.
    #[serde(skip_serializing_if = "is_default")]
    pub frontend: String,
    /// Where it listens.
    #[serde(skip_serializing_if = "is_default")]
    pub listen: String,
    /// The ways to it.
    #[serde(skip_serializing_if = "is_default")]
    pub paths: Vec<InstancePath>,
    /// The last of its ports.
    #[serde(skip_serializing_if = "is_default")]
    pub port_end: i32,
    /// The first of its ports.
    #[serde(skip_serializing_if = "is_default")]
    pub port_start: i32,
    /// The way to use if there is a choice.
    #[serde(skip_serializing_if = "is_default")]
    pub preferred_path: String,
    /// Version of what is known of the process.
    #[serde(skip_serializing_if = "is_default")]
    pub resource_version: i64,
    /// State.
    #[serde(skip_serializing_if = "is_default")]
    pub state: String,
    /// The last port of the target.
    #[serde(skip_serializing_if = "is_default")]
    pub target_port_end: i32,
    /// The first port of the target.
    #[serde(skip_serializing_if = "is_default")]
    pub target_port_start: i32,
    /// What it runs.
    #[serde(rename = "type", skip_serializing_if = "is_default")]
    pub kind: String,
    /// Number of the ublk device.
    #[serde(rename = "ublkID", skip_serializing_if = "is_default")]
    pub ublk_id: i32,
    /// Another one for every one that was ever made.
    #[serde(skip_serializing_if = "is_default")]
    pub uuid: String,
}

/// One way to a process over the network.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct InstancePath {
    /// State of the way, as NVMe names it.
    #[serde(skip_serializing_if = "is_default")]
    pub ana_state: String,
    /// Name of the engine.
    #[serde(skip_serializing_if = "is_default")]
    pub engine_name: String,
    /// Id of the NVMe namespace.
    #[serde(skip_serializing_if = "is_default")]
    pub nguid: String,
    /// Name of the NVMe subsystem.
    #[serde(skip_serializing_if = "is_default")]
    pub nqn: String,
    /// Address of the target.
    #[serde(rename = "targetIP", skip_serializing_if = "is_default")]
    pub target_ip: String,
    /// Port of the target.
    #[serde(skip_serializing_if = "is_default")]
    pub target_port: i64,
}
