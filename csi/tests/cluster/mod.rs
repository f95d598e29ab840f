//! A driver over an API server in memory, with managers that do at once what resources ask.

#![allow(dead_code, reason = "every test uses some of it")]

#[path = "../../../control/cluster/tests/api_server/mod.rs"]
pub(crate) mod api_server;

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use api_server::ApiServer;
use csi::proto::csi as proto;
use csi::{Options, Source, run};
use lh_cluster::api::SnapshotStatus;
use lh_cluster::plan::snapshot::Refusal;
use proto::controller_client::ControllerClient;
use proto::volume_capability::access_mode::Mode;
use proto::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use proto::{
    CapacityRange, ControllerPublishVolumeRequest, ControllerUnpublishVolumeRequest, CreateSnapshotRequest,
    CreateVolumeRequest, DeleteVolumeRequest, VolumeCapability,
};
use serde_json::{Value, json};
use tonic::Code;
use tonic::transport::Channel;

pub(crate) const MIB: i64 = 1 << 20;

/// How long a test waits for what must come, and the driver for what it has asked of the cluster.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A driver and what it talks with.
pub(crate) struct Cluster {
    pub(crate) server: ApiServer,
    pub(crate) channel: Channel,
    scratch: tempfile::TempDir,
}

impl Cluster {
    pub(crate) async fn start(most_volumes: i64, snapshots: Source) -> Self {
        Self::with_patience(PATIENCE, most_volumes, snapshots).await
    }

    /// One whose driver waits so long for what it has asked of the cluster: where that never comes, a test waits as long.
    pub(crate) async fn with_patience(patience: Duration, most_volumes: i64, snapshots: Source) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let server = ApiServer::new(1);
        for node in ["n1", "n2"] {
            server.apply(
                "nodes",
                node,
                &json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Node", "spec": {} }),
            );
        }
        let options = Options { patience: Some(patience), ..options(scratch.path(), most_volumes) };
        let endpoint = options.endpoint.clone();
        tokio::spawn(run(options, server.client(), snapshots, std::future::pending()));
        tokio::spawn(manage(server.clone()));
        let channel = loop {
            match control::transport::connect(&endpoint).await {
                Ok(channel) => break channel,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        Self { server, channel, scratch }
    }

    /// Another driver of the same node, as after the end of the one before.
    pub(crate) fn start_again(&self, snapshots: Source) -> tempfile::TempDir {
        let scratch = tempfile::tempdir().unwrap();
        let running =
            run(options(scratch.path(), 0), self.server.client(), snapshots, std::future::pending());
        tokio::spawn(running);
        scratch
    }

    /// Another driver beside it, on the same node, until `stop` is ready. It waits longer than a test does.
    pub(crate) async fn start_until(
        &self,
        snapshots: Source,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> (Channel, tempfile::TempDir) {
        let scratch = tempfile::tempdir().unwrap();
        let options = Options { patience: Some(PATIENCE * 10), ..options(scratch.path(), 0) };
        let endpoint = options.endpoint.clone();
        tokio::spawn(run(options, self.server.client(), snapshots, stop));
        loop {
            match control::transport::connect(&endpoint).await {
                Ok(channel) => return (channel, scratch),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    /// A directory of its own: its devices are in `dev` below.
    pub(crate) fn place(&self) -> &Path {
        self.scratch.path()
    }

    pub(crate) fn controller(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.channel.clone())
    }

    pub(crate) async fn create(&self, request: CreateVolumeRequest) -> Result<proto::Volume, Code> {
        let answer = self.controller().create_volume(request).await;
        answer.map(|a| a.into_inner().volume.unwrap()).map_err(|e| e.code())
    }

    pub(crate) async fn publish(&self, volume: &str, node: &str, readonly: bool) -> Result<(), Code> {
        self.publish_as(volume, node, readonly, capability(Mode::SingleNodeWriter)).await
    }

    pub(crate) async fn publish_as(
        &self,
        volume: &str,
        node: &str,
        readonly: bool,
        capability: VolumeCapability,
    ) -> Result<(), Code> {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id: node.to_owned(),
            volume_capability: Some(capability),
            readonly,
            ..ControllerPublishVolumeRequest::default()
        };
        self.controller().controller_publish_volume(request).await.map(drop).map_err(|e| e.code())
    }

    /// From now on no engine grows beyond so many bytes.
    pub(crate) fn limit_room(&self, bytes: i64) {
        let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "data": { "bytes": bytes } });
        self.server.apply("core/configmaps", "room", &map);
    }

    /// From now on no volume is filled with what it is made of, and says why.
    pub(crate) fn hold_clones(&self, reason: &str, message: &str) {
        let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "data": { "reason": reason, "message": message } });
        self.server.apply("core/configmaps", "clones", &map);
    }

    /// From now on no volume is begun, and says why.
    pub(crate) fn hold_beginnings(&self, reason: &str, message: &str) {
        let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "data": { "reason": reason, "message": message } });
        self.server.apply("core/configmaps", "beginnings", &map);
    }

    /// From now on no volume is attached.
    pub(crate) fn hold_attachments(&self, why: &str) {
        let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "data": { "why": why } });
        self.server.apply("core/configmaps", "attachments", &map);
    }

    pub(crate) async fn unpublish(&self, volume: &str, node: &str) {
        let (volume_id, node_id) = (volume.to_owned(), node.to_owned());
        let request = ControllerUnpublishVolumeRequest { volume_id, node_id, ..Default::default() };
        self.controller().controller_unpublish_volume(request).await.unwrap();
    }

    pub(crate) async fn delete(&self, volume: &str) -> Result<(), Code> {
        let request = DeleteVolumeRequest { volume_id: volume.to_owned(), ..Default::default() };
        self.controller().delete_volume(request).await.map(drop).map_err(|e| e.code())
    }

    pub(crate) async fn snapshot(&self, volume: &str, name: &str) -> Result<proto::Snapshot, Code> {
        let (source_volume_id, name) = (volume.to_owned(), name.to_owned());
        let request = CreateSnapshotRequest { source_volume_id, name, ..Default::default() };
        let answer = self.controller().create_snapshot(request).await;
        answer.map(|a| a.into_inner().snapshot.unwrap()).map_err(|e| e.code())
    }
}

fn options(scratch: &Path, most_volumes: i64) -> Options {
    Options {
        endpoint: scratch.join("csi.sock"),
        node: "n1".to_owned(),
        namespace: "longhorn-system".to_owned(),
        most_volumes,
        devices: scratch.join("dev"),
        registry: None,
        kubelet_endpoint: None,
        health: None,
        patience: Some(PATIENCE),
    }
}

/// What an engine says of the replicas that are there.
fn modes(server: &ApiServer, volume: &str) -> Value {
    let replicas = server.all("replicas").into_iter().filter(|r| r["spec"]["volumeName"] == volume);
    let modes = replicas.map(|r| {
        let mode = r["status"]["mode"].as_str().unwrap_or("RW").to_owned();
        (r["metadata"]["name"].as_str().unwrap().to_owned(), json!(mode))
    });
    Value::Object(modes.collect())
}

/// What an engine has of the bytes that its volume should have, and says of the rest: 64 MiB where there is no room for more.
fn grown(server: &ApiServer, size: &Value) -> Value {
    let room = server.get("core/configmaps", "room").and_then(|map| map["data"]["bytes"].as_i64());
    let bytes: i64 = size.as_str().unwrap().parse().unwrap();
    match room.is_some_and(|room| room < bytes) {
        true => json!({ "currentSize": (64 * MIB).to_string(), "lastExpansionError": "no room" }),
        false => json!({ "currentSize": size, "lastExpansionError": "" }),
    }
}

/// What managers would make of the resources.
async fn manage(server: ApiServer) {
    loop {
        for volume in server.all("volumes") {
            let (name, spec) = (volume["metadata"]["name"].as_str().unwrap().to_owned(), &volume["spec"]);
            if server.get("volumeattachments", &name).is_none() {
                server.apply(
                    "volumeattachments",
                    &name,
                    &json!({
                        "apiVersion": "longhorn.io/v1beta2", "kind": "VolumeAttachment",
                        "spec": { "volume": name, "attachmentTickets": {} },
                    }),
                );
            }
            let attachment = server.get("volumeattachments", &name).unwrap();
            let tickets = attachment["spec"]["attachmentTickets"].as_object().cloned().unwrap_or_default();
            let nodes: Vec<&str> = tickets.values().map(|t| t["nodeID"].as_str().unwrap()).collect();
            let there = spec["nodeID"].as_str().filter(|n| nodes.contains(n));
            let node = there.or_else(|| nodes.first().copied()).unwrap_or_default();
            let second =
                nodes.iter().find(|n| **n != node && spec["migratable"] == true).copied().unwrap_or_default();
            let held = server.get("core/configmaps", "clones").filter(|_| spec["dataSource"].is_string());
            let kept = server.get("core/configmaps", "beginnings");
            let state = match held.as_ref().or(kept.as_ref()) {
                Some(_) => "creating",
                None if node.is_empty() => "detached",
                None => "attached",
            };
            let clone = if spec["dataSource"].is_string() && held.is_none() { "completed" } else { "" };
            for (why, kind) in [(&held, "Cloned"), (&kept, "Scheduled")] {
                let Some(why) = why else { continue };
                let (reason, message) = (&why["data"]["reason"], &why["data"]["message"]);
                let condition =
                    json!({ "type": kind, "status": "False", "reason": reason, "message": message });
                server.apply("volumes", &name, &json!({ "status": { "conditions": [condition] } }));
            }
            server.apply("volumes", &name, &json!({ "spec": { "nodeID": node, "migrationNodeID": second }, "status": {
                "state": state, "currentNodeID": node, "currentMigrationNodeID": second, "robustness": "healthy", "cloneStatus": { "state": clone } } }));
            let held = server.get("core/configmaps", "attachments");
            let fare = |id: &String| match &held {
                None => json!({ "id": id, "satisfied": true }),
                Some(why) => {
                    let condition =
                        json!({ "type": "Satisfied", "status": "False", "message": why["data"]["why"] });
                    json!({ "id": id, "satisfied": false, "conditions": [condition] })
                }
            };
            let met: serde_json::Map<String, Value> =
                tickets.keys().map(|id| (id.clone(), fare(id))).collect();
            server.apply(
                "volumeattachments",
                &name,
                &json!({ "status": { "attachmentTicketStatuses": met } }),
            );
            let mut status = grown(&server, &spec["size"]);
            status["replicaModeMap"] = modes(&server, &name);
            server.apply(
                "engines",
                &format!("{name}-e-0"),
                &json!({
                "apiVersion": "longhorn.io/v1beta2", "kind": "Engine", "spec": {}, "status": status }),
            );
        }
        for snapshot in server.all("snapshots") {
            let name = snapshot["metadata"]["name"].as_str().unwrap();
            // Its engine counts otherwise than who asks beforehand.
            let refusal = match name {
                _ if snapshot["spec"]["volume"] == "full" => {
                    Some(Refusal::NoRoom("the volume has as many as it may"))
                }
                "full" => Some(Refusal::NoRoom("the volume has as many as it may")),
                "restless" => Some(Refusal::NotFrozen("it is frozen already")),
                _ => None,
            };
            if let Some(refusal) = refusal {
                let refused = refusal.told(SnapshotStatus::default());
                server.apply("snapshots", name, &json!({ "status": refused }));
            } else if snapshot["status"]["readyToUse"] != true && !snapshot["status"]["error"].is_string() {
                server.apply(
                    "snapshots",
                    name,
                    &json!({ "status": {
                    "readyToUse": true, "restoreSize": 64 * MIB, "creationTime": "2026-01-01T00:00:00Z" } }),
                );
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) fn capability(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume::default())),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

/// Of the device itself.
pub(crate) fn block(mode: Mode) -> VolumeCapability {
    VolumeCapability { access_type: Some(AccessType::Block(BlockVolume {})), ..capability(mode) }
}

pub(crate) fn wish(name: &str, mib: i64) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(CapacityRange { required_bytes: mib * MIB, limit_bytes: 0 }),
        volume_capabilities: vec![capability(Mode::SingleNodeWriter)],
        ..CreateVolumeRequest::default()
    }
}

pub(crate) fn words(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}
