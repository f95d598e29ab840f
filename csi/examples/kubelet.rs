//! What a kubelet does with a claim of a pod, for tests with Kubernetes' controllers and sidecars where no kubelet runs:
//! `kubelet NODE SOCKET mount CLAIM DIRECTORY` waits until the claim's volume is attached to the node, has the driver behind
//! the socket stage and publish it, grows it if its PersistentVolume has, and prints where it is; `unmount` takes it back. The
//! node says meanwhile that it uses the volume, so that it is not detached. `KUBECONFIG` names the API server.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use csi::proto::csi as proto;
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, Node, PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec,
};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client};
use proto::node_client::NodeClient;
use proto::volume_capability::access_mode::Mode;
use proto::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use proto::{
    NodeExpandVolumeRequest, NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest, VolumeCapability,
};
use serde_json::json;
use tonic::transport::Channel;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How often the attachment is looked for, half a second apart.
const LOOKS: usize = 240;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [node, socket, what, claim, directory] = words.as_slice() else {
        return Err("usage: kubelet NODE SOCKET mount|unmount CLAIM DIRECTORY".into());
    };
    let client = Client::try_default().await?;
    let driver = NodeClient::new(control::transport::connect(Path::new(socket)).await?);
    let mut pod = Pod::of(client, driver, node, claim, Path::new(directory)).await?;
    match what.as_str() {
        "mount" => pod.mount().await,
        "unmount" => pod.unmount().await,
        _ => Err(format!("{what} is neither mount nor unmount").into()),
    }
}

/// A claim, and who uses it where.
struct Pod {
    client: Client,
    driver: NodeClient<Channel>,
    node: String,
    claim: PersistentVolumeClaim,
    volume: PersistentVolume,
    staging: PathBuf,
    target: PathBuf,
}

impl Pod {
    async fn of(
        client: Client,
        driver: NodeClient<Channel>,
        node: &str,
        claim: &str,
        directory: &Path,
    ) -> Result<Self> {
        let claim = Api::<PersistentVolumeClaim>::namespaced(client.clone(), "default").get(claim).await?;
        let bound =
            claim.spec.as_ref().and_then(|s| s.volume_name.as_deref()).ok_or("the claim is not bound")?;
        let volume = Api::<PersistentVolume>::all(client.clone()).get(bound).await?;
        let (staging, target) = (directory.join(format!("{bound}-staging")), directory.join(bound));
        Ok(Self { client, driver, node: node.to_owned(), claim, volume, staging, target })
    }

    fn spec(&self) -> Result<&PersistentVolumeSpec> {
        self.volume.spec.as_ref().ok_or_else(|| "the volume has no spec".into())
    }

    fn source(&self) -> Result<&CSIPersistentVolumeSource> {
        self.spec()?.csi.as_ref().ok_or_else(|| "the volume is not a CSI volume".into())
    }

    async fn mount(&mut self) -> Result<()> {
        self.uses(true).await?;
        let context = self.attached().await?;
        let source = self.source()?.clone();
        let attributes: HashMap<String, String> =
            source.volume_attributes.clone().unwrap_or_default().into_iter().collect();
        let capability = Some(self.capability()?);
        let stage = NodeStageVolumeRequest {
            volume_id: source.volume_handle.clone(),
            publish_context: context.clone(),
            staging_target_path: text(&self.staging),
            volume_capability: capability.clone(),
            volume_context: attributes.clone(),
            ..NodeStageVolumeRequest::default()
        };
        self.driver.node_stage_volume(stage).await?;
        let publish = NodePublishVolumeRequest {
            volume_id: source.volume_handle,
            publish_context: context,
            staging_target_path: text(&self.staging),
            target_path: text(&self.target),
            volume_capability: capability,
            volume_context: attributes,
            ..NodePublishVolumeRequest::default()
        };
        self.driver.node_publish_volume(publish).await?;
        self.grow().await?;
        println!("{}", self.target.display());
        Ok(())
    }

    async fn unmount(&mut self) -> Result<()> {
        let volume_id = self.source()?.volume_handle.clone();
        let (target_path, staging_target_path) = (text(&self.target), text(&self.staging));
        let unpublish = NodeUnpublishVolumeRequest { volume_id: volume_id.clone(), target_path };
        self.driver.node_unpublish_volume(unpublish).await?;
        let unstage = NodeUnstageVolumeRequest { volume_id, staging_target_path };
        self.driver.node_unstage_volume(unstage).await?;
        self.uses(false).await
    }

    /// What the driver said when it attached the volume here; waits for that.
    async fn attached(&self) -> Result<HashMap<String, String>> {
        let name = self.volume.metadata.name.as_deref();
        let attachments = Api::<VolumeAttachment>::all(self.client.clone());
        for _ in 0..LOOKS {
            let all = attachments.list(&ListParams::default()).await?;
            let ours = all.items.into_iter().find(|a| {
                a.spec.source.persistent_volume_name.as_deref() == name && a.spec.node_name == self.node
            });
            if let Some(status) = ours.and_then(|a| a.status).filter(|s| s.attached) {
                return Ok(status.attachment_metadata.unwrap_or_default().into_iter().collect());
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        Err(format!("{} is not attached to {}", name.unwrap_or_default(), self.node).into())
    }

    fn capability(&self) -> Result<VolumeCapability> {
        let (spec, source) = (self.spec()?, self.source()?);
        let access = if spec.volume_mode.as_deref() == Some("Block") {
            AccessType::Block(BlockVolume {})
        } else {
            AccessType::Mount(MountVolume {
                fs_type: source.fs_type.clone().unwrap_or_default(),
                mount_flags: spec.mount_options.clone().unwrap_or_default(),
                ..MountVolume::default()
            })
        };
        let mode = AccessMode { mode: Mode::SingleNodeMultiWriter.into() };
        Ok(VolumeCapability { access_type: Some(access), access_mode: Some(mode) })
    }

    /// Has the driver grow what is mounted, and says so, where the claim is told a smaller size than the volume has.
    async fn grow(&mut self) -> Result<()> {
        let capacity = self.spec()?.capacity.clone().unwrap_or_default();
        let told = self.claim.status.as_ref().and_then(|s| s.capacity.clone()).unwrap_or_default();
        if capacity.get("storage") == told.get("storage") {
            return Ok(());
        }
        let expand = NodeExpandVolumeRequest {
            volume_id: self.source()?.volume_handle.clone(),
            volume_path: text(&self.target),
            staging_target_path: text(&self.staging),
            volume_capability: Some(self.capability()?),
            ..NodeExpandVolumeRequest::default()
        };
        self.driver.node_expand_volume(expand).await?;
        let told = json!({ "status": { "capacity": capacity, "conditions": null, "allocatedResourceStatuses": null } });
        let claims = Api::<PersistentVolumeClaim>::namespaced(self.client.clone(), "default");
        let name = self.claim.metadata.name.as_deref().unwrap_or_default();
        claims.patch_status(name, &PatchParams::default(), &Patch::Merge(told)).await?;
        Ok(())
    }

    /// The node's status names what is mounted on it, which is not detached.
    async fn uses(&self, used: bool) -> Result<()> {
        let nodes = Api::<Node>::all(self.client.clone());
        let name = format!("kubernetes.io/csi/{}^{}", csi::DRIVER, self.source()?.volume_handle);
        let status = nodes.get(&self.node).await?.status.unwrap_or_default();
        let others = status.volumes_in_use.unwrap_or_default().into_iter().filter(|n| *n != name);
        let all: Vec<String> = others.chain(used.then(|| name.clone())).collect();
        let told = BTreeMap::from([("status", json!({ "volumesInUse": all }))]);
        nodes.patch_status(&self.node, &PatchParams::default(), &Patch::Merge(told)).await?;
        Ok(())
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
