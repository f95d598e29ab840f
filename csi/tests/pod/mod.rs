//! What a kubelet and an orchestrator do with a driver that runs, for a pod.

#![allow(dead_code, reason = "every test uses some of it")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use csi::proto::csi as proto;
use proto::controller_client::ControllerClient;
use proto::node_client::NodeClient;
use proto::volume_capability::access_mode::Mode;
use proto::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use proto::volume_content_source::{SnapshotSource, Type as Source};
use proto::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest, CreateSnapshotRequest, CreateVolumeRequest, DeleteSnapshotRequest,
    DeleteVolumeRequest, NodeExpandVolumeRequest, NodeGetVolumeStatsRequest, NodePublishVolumeRequest,
    NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability,
    VolumeContentSource,
};
use tonic::transport::Channel;

const MIB: i64 = 1 << 20;

/// The driver that `CSI_ENDPOINT` names; `None`: none is named.
pub(crate) async fn driver() -> Option<Channel> {
    let endpoint = std::env::var("CSI_ENDPOINT").ok()?;
    let endpoint =
        endpoint.strip_prefix("unix://").map(PathBuf::from).expect("CSI_ENDPOINT begins with unix://");
    Some(control::transport::connect(&endpoint).await.unwrap())
}

/// A pod, as far as a driver sees it.
pub(crate) struct Pod {
    pub(crate) controller: ControllerClient<Channel>,
    pub(crate) node: NodeClient<Channel>,
    place: PathBuf,
    capability: VolumeCapability,
}

impl Pod {
    /// With a file system of that kind, or "block".
    pub(crate) fn new(channel: &Channel, place: &Path, kind: &str) -> Self {
        let access = match kind {
            "block" => AccessType::Block(BlockVolume {}),
            _ => AccessType::Mount(MountVolume {
                fs_type: kind.to_owned(),
                mount_flags: vec!["noatime".to_owned()],
                ..MountVolume::default()
            }),
        };
        Self {
            controller: ControllerClient::new(channel.clone()),
            node: NodeClient::new(channel.clone()),
            place: place.to_owned(),
            capability: VolumeCapability {
                access_type: Some(access),
                access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
            },
        }
    }

    pub(crate) async fn snapshot(&mut self, volume: &str, name: &str) -> String {
        let request = CreateSnapshotRequest {
            source_volume_id: volume.to_owned(),
            name: name.to_owned(),
            ..CreateSnapshotRequest::default()
        };
        self.controller.create_snapshot(request).await.unwrap().into_inner().snapshot.unwrap().snapshot_id
    }

    pub(crate) async fn delete_snapshot(&mut self, id: &str) {
        let request = DeleteSnapshotRequest { snapshot_id: id.to_owned(), secrets: HashMap::new() };
        self.controller.delete_snapshot(request).await.unwrap();
    }

    fn path(&self, volume: &str, what: &str) -> String {
        self.place.join(format!("{volume}-{what}")).display().to_string()
    }

    pub(crate) async fn create(&mut self, name: &str, snapshot: Option<&str>) -> String {
        self.create_sized(name, snapshot, 320).await
    }

    /// With at least so many MiB.
    pub(crate) async fn create_sized(&mut self, name: &str, snapshot: Option<&str>, mib: i64) -> String {
        let source = |id: &str| VolumeContentSource {
            r#type: Some(Source::Snapshot(SnapshotSource { snapshot_id: id.to_owned() })),
        };
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes: mib * MIB, limit_bytes: 0 }),
            volume_capabilities: vec![self.capability.clone()],
            volume_content_source: snapshot.map(source),
            ..CreateVolumeRequest::default()
        };
        self.controller.create_volume(request).await.unwrap().into_inner().volume.unwrap().volume_id
    }

    /// Brings a volume into the pod. Gives back where it is.
    pub(crate) async fn mount(&mut self, volume: &str, readonly: bool) -> PathBuf {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id: "node-1".to_owned(),
            volume_capability: Some(self.capability.clone()),
            readonly,
            ..ControllerPublishVolumeRequest::default()
        };
        let answer = self.controller.controller_publish_volume(request).await.unwrap().into_inner();
        let (staging, target) = (self.path(volume, "staging"), self.path(volume, "target"));
        let request = NodeStageVolumeRequest {
            volume_id: volume.to_owned(),
            publish_context: answer.publish_context.clone(),
            staging_target_path: staging.clone(),
            volume_capability: Some(self.capability.clone()),
            ..NodeStageVolumeRequest::default()
        };
        self.node.node_stage_volume(request).await.unwrap();
        let request = NodePublishVolumeRequest {
            volume_id: volume.to_owned(),
            publish_context: answer.publish_context,
            staging_target_path: staging,
            target_path: target.clone(),
            volume_capability: Some(self.capability.clone()),
            readonly,
            ..NodePublishVolumeRequest::default()
        };
        self.node.node_publish_volume(request).await.unwrap();
        target.into()
    }

    pub(crate) async fn unmount(&mut self, volume: &str) {
        let (volume_id, target_path) = (volume.to_owned(), self.path(volume, "target"));
        self.node.node_unpublish_volume(NodeUnpublishVolumeRequest { volume_id, target_path }).await.unwrap();
        let (volume_id, staging_target_path) = (volume.to_owned(), self.path(volume, "staging"));
        self.node
            .node_unstage_volume(NodeUnstageVolumeRequest { volume_id, staging_target_path })
            .await
            .unwrap();
        let (volume_id, node_id) = (volume.to_owned(), "node-1".to_owned());
        let request = ControllerUnpublishVolumeRequest { volume_id, node_id, secrets: HashMap::new() };
        self.controller.controller_unpublish_volume(request).await.unwrap();
    }

    pub(crate) async fn grow(&mut self, volume: &str, mib: i64) {
        let range = Some(CapacityRange { required_bytes: mib * MIB, limit_bytes: 0 });
        let request = ControllerExpandVolumeRequest {
            volume_id: volume.to_owned(),
            capacity_range: range,
            ..ControllerExpandVolumeRequest::default()
        };
        self.controller.controller_expand_volume(request).await.unwrap();
        let request = NodeExpandVolumeRequest {
            volume_id: volume.to_owned(),
            volume_path: self.path(volume, "target"),
            capacity_range: range,
            ..NodeExpandVolumeRequest::default()
        };
        self.node.node_expand_volume(request).await.unwrap();
    }

    pub(crate) async fn total(&mut self, volume: &str) -> i64 {
        let (volume_id, volume_path) = (volume.to_owned(), self.path(volume, "target"));
        let request =
            NodeGetVolumeStatsRequest { volume_id, volume_path, staging_target_path: String::new() };
        self.node.node_get_volume_stats(request).await.unwrap().into_inner().usage[0].total
    }

    pub(crate) async fn delete(&mut self, volume: &str) {
        let request = DeleteVolumeRequest { volume_id: volume.to_owned(), secrets: HashMap::new() };
        self.controller.delete_volume(request).await.unwrap();
    }
}
