//! A volume's life through a driver that runs: made, mounted, written, grown, snapshotted, cloned, read again, for both
//! file systems and for the device itself. Needs root and `CSI_ENDPOINT`, as `scripts/cluster env` prints it.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
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

struct Pod {
    controller: ControllerClient<Channel>,
    node: NodeClient<Channel>,
    place: PathBuf,
    capability: VolumeCapability,
}

impl Pod {
    fn path(&self, volume: &str, what: &str) -> String {
        self.place.join(format!("{volume}-{what}")).display().to_string()
    }

    async fn create(&mut self, name: &str, snapshot: Option<&str>) -> String {
        let source = |id: &str| VolumeContentSource {
            r#type: Some(Source::Snapshot(SnapshotSource { snapshot_id: id.to_owned() })),
        };
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes: 320 * MIB, limit_bytes: 0 }),
            volume_capabilities: vec![self.capability.clone()],
            volume_content_source: snapshot.map(source),
            ..CreateVolumeRequest::default()
        };
        self.controller.create_volume(request).await.unwrap().into_inner().volume.unwrap().volume_id
    }

    /// Brings a volume into the pod. Gives back where it is.
    async fn mount(&mut self, volume: &str, readonly: bool) -> PathBuf {
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

    async fn unmount(&mut self, volume: &str) {
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

    async fn grow(&mut self, volume: &str, mib: i64) {
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

    async fn total(&mut self, volume: &str) -> i64 {
        let (volume_id, volume_path) = (volume.to_owned(), self.path(volume, "target"));
        let request =
            NodeGetVolumeStatsRequest { volume_id, volume_path, staging_target_path: String::new() };
        self.node.node_get_volume_stats(request).await.unwrap().into_inner().usage[0].total
    }

    async fn delete(&mut self, volume: &str) {
        let request = DeleteVolumeRequest { volume_id: volume.to_owned(), secrets: HashMap::new() };
        self.controller.delete_volume(request).await.unwrap();
    }
}

/// True with the capability that the kernel asks for where ext4 grows (capability 24).
fn has_sys_resource() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> 24 & 1 == 1
}

/// Bytes that are nowhere by chance.
fn bytes(seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    };
    (0..1 << 20).map(|_| next()).collect()
}

/// Writes durably: to a file of the file system, or to the device.
fn write(at: &Path, bytes: &[u8]) {
    use std::io::Write;
    let path = if at.is_dir() { at.join("data") } else { at.to_owned() };
    let mut file =
        fs::OpenOptions::new().write(true).create(at.is_dir()).truncate(at.is_dir()).open(path).unwrap();
    file.write_all(bytes).unwrap();
    file.sync_all().unwrap();
}

fn read(at: &Path, length: usize) -> Vec<u8> {
    use std::io::Read;
    let path = if at.is_dir() { at.join("data") } else { at.to_owned() };
    let mut bytes = vec![0; length];
    fs::File::open(path).unwrap().read_exact(&mut bytes).unwrap();
    bytes
}

async fn live(endpoint: &Path, kind: &str) {
    let channel = control::transport::connect(endpoint).await.unwrap();
    let place = tempfile::tempdir().unwrap();
    let access = match kind {
        "block" => AccessType::Block(BlockVolume {}),
        _ => AccessType::Mount(MountVolume {
            fs_type: kind.to_owned(),
            mount_flags: vec!["noatime".to_owned()],
            ..MountVolume::default()
        }),
    };
    let capability = VolumeCapability {
        access_type: Some(access),
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
    };
    let mut pod = Pod {
        controller: ControllerClient::new(channel.clone()),
        node: NodeClient::new(channel),
        place: place.path().to_owned(),
        capability,
    };
    let (old, new) = (bytes(1), bytes(2));
    let volume = pod.create(&format!("life-{kind}"), None).await;
    let at = pod.mount(&volume, false).await;
    assert_eq!(fs::metadata(&at).unwrap().file_type().is_block_device(), kind == "block");
    write(&at, &old);
    let request = CreateSnapshotRequest {
        source_volume_id: volume.clone(),
        name: format!("life-{kind}-s"),
        ..CreateSnapshotRequest::default()
    };
    let snapshot = pod.controller.create_snapshot(request).await.unwrap().into_inner().snapshot.unwrap();
    write(&at, &new);
    if kind == "ext4" && !has_sys_resource() {
        println!(
            "SKIP life: ext4 grows while mounted only with CAP_SYS_RESOURCE, which this machine does not give"
        );
    } else {
        let before = pod.total(&volume).await;
        pod.grow(&volume, 640).await;
        assert!(pod.total(&volume).await > before * 3 / 2, "{kind}: it did not grow");
    }
    pod.unmount(&volume).await;
    assert!(!at.exists());
    // Elsewhere in time: mounted anew, and for reading only.
    let at = pod.mount(&volume, true).await;
    assert!(read(&at, new.len()) == new, "{kind}: what was written is not there");
    let written = if at.is_dir() {
        fs::write(at.join("more"), "x").is_ok()
    } else {
        use std::io::Write;
        let opened = fs::OpenOptions::new().write(true).open(&at);
        opened.is_ok_and(|mut file| file.write_all(&old).is_ok() && file.sync_all().is_ok())
    };
    assert!(!written, "{kind}: written to though it is for reading only");
    // The clone is mounted beside its source, whose UUID it has.
    let clone = pod.create(&format!("life-{kind}-clone"), Some(&snapshot.snapshot_id)).await;
    let at = pod.mount(&clone, false).await;
    assert!(read(&at, old.len()) == old, "{kind}: a clone without its snapshot's bytes");
    write(&at, &new);
    assert!(read(&at, new.len()) == new);
    // What refused writes to a volume refuses none to the next one with its number.
    for volume in [&clone, &volume] {
        pod.unmount(volume).await;
    }
    let at = pod.mount(&volume, false).await;
    write(&at, &old);
    pod.unmount(&volume).await;
    pod.delete(&clone).await;
    let request = DeleteSnapshotRequest { snapshot_id: snapshot.snapshot_id, secrets: HashMap::new() };
    pod.controller.delete_snapshot(request).await.unwrap();
    pod.delete(&volume).await;
}

#[tokio::test]
async fn what_a_pod_writes_is_there_again_and_in_a_clone() {
    let endpoint = std::env::var("CSI_ENDPOINT").unwrap_or_default();
    let Some(endpoint) = endpoint.strip_prefix("unix://").map(PathBuf::from) else {
        println!("SKIP life: CSI_ENDPOINT does not name a driver (scripts/cluster up, then env)");
        return;
    };
    for kind in ["ext4", "xfs", "block"] {
        live(&endpoint, kind).await;
        println!("SHOWN {kind}: made, written, mounted for reading, snapshotted, cloned, deleted");
    }
}
