//! Volumes on this node: staged (a file system made, checked and mounted once), published (bound where a pod sees it),
//! grown, measured, and taken back.
//!
//! What begins is finished even if the orchestrator goes away meanwhile: half a mkfs is worse than one too many.

mod filesystem;
mod lost;
mod mounts;
mod stats;
mod target;
mod trim;
mod trimmable;

use std::future::Future;
use std::path::{Path, PathBuf};

use tonic::{Request, Response, Status, async_trait};

use crate::Refused;
use crate::capability::{Access, Use};
use crate::cluster::Cluster;
use crate::guard::Guard;
use crate::parameters;
use crate::proto::csi::node_server::Node;
use crate::proto::csi::node_service_capability::rpc::Type as Ability;
use crate::proto::csi::node_service_capability::{Rpc, Type};
use crate::proto::csi::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
    NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse, NodeGetVolumeStatsRequest,
    NodeGetVolumeStatsResponse, NodePublishVolumeRequest, NodePublishVolumeResponse, NodeServiceCapability,
    NodeStageVolumeRequest, NodeStageVolumeResponse, NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse,
    NodeUnstageVolumeRequest, NodeUnstageVolumeResponse, Topology,
};
use crate::refused::required;
use target::Staging;
pub(crate) use trim::{FileSystemService, Trims};

/// The key of a node's topology: each node is a place of its own. Its label is the node's name on most clusters, and not on all.
pub(crate) const HOST: &str = "kubernetes.io/hostname";

/// What the node's part can do.
const ABILITIES: &[Ability] = &[
    Ability::StageUnstageVolume,
    Ability::GetVolumeStats,
    Ability::ExpandVolume,
    Ability::VolumeCondition,
    Ability::SingleNodeMultiWriter,
];

/// The node's part.
#[derive(Clone)]
pub(crate) struct NodeService {
    pub(crate) cluster: Cluster,
    pub(crate) node: String,
    /// Most volumes on this node; 0 for no limit.
    pub(crate) most_volumes: i64,
    /// Where engines put their devices.
    pub(crate) devices: PathBuf,
    pub(crate) guard: Guard,
    /// File systems that are being trimmed.
    pub(crate) trims: Trims,
}

impl NodeService {
    /// The device of a volume, if it is here.
    fn device(&self, volume: &str) -> Result<PathBuf, Refused> {
        // A name that leaves the directory is of no volume. What Longhorn made may be named as no orchestrator's is.
        let plain = !volume.contains('/') && !volume.starts_with('.');
        let path = self.devices.join(volume);
        if plain && mounts::is_block_device(&path) {
            return Ok(path);
        }
        Err(Refused::Missing(format!(
            "volume {volume} has no device {} on node {}: is it published here?",
            path.display(),
            self.node
        )))
    }

    /// Carries out work on one volume, to its end whoever waits for it.
    async fn work<T: Send + 'static>(
        &self,
        volume: &str,
        work: impl Future<Output = Result<T, Refused>> + Send + 'static,
    ) -> Result<T, Refused> {
        let held = self.guard.take(volume)?;
        let task = tokio::spawn(async move {
            let done = work.await;
            drop(held);
            done
        });
        task.await.map_err(|e| Refused::Failed(format!("the work on the volume ended badly: {e}")))?
    }

    async fn stage(&self, request: NodeStageVolumeRequest) -> Result<(), Refused> {
        let id = required("the volume's id", &request.volume_id)?.to_owned();
        let staging = PathBuf::from(required("the staging target path", &request.staging_target_path)?);
        let used = Use::of(request.volume_capability.as_ref())?;
        let device = self.device(&id)?;
        let published = request.publish_context.get("readonly").is_some_and(|v| v == "true");
        let read_only = used.read_only || published;
        let context = request.volume_context;
        let wish = Staging { device, read_only, again: false, used, context };
        self.work(&id, async move { target::stage(&wish, &staging).await }).await
    }

    async fn unstage(&self, request: NodeUnstageVolumeRequest) -> Result<(), Refused> {
        let id = required("the volume's id", &request.volume_id)?.to_owned();
        let staging = PathBuf::from(required("the staging target path", &request.staging_target_path)?);
        let (device, trims, volume) = (self.device(&id).ok(), self.trims.clone(), id.clone());
        let work = async move {
            // It would keep the file system busy.
            trims.end(&volume).await;
            target::unmount(&staging).await?;
            match device {
                Some(device) => target::take_writes(&device).await,
                None => Ok(()),
            }
        };
        self.work(&id, work).await
    }

    async fn publish(&self, request: NodePublishVolumeRequest) -> Result<(), Refused> {
        let id = required("the volume's id", &request.volume_id)?.to_owned();
        let target = PathBuf::from(required("the target path", &request.target_path)?);
        let used = Use::of(request.volume_capability.as_ref())?;
        let device = self.device(&id)?;
        let published = request.publish_context.get("readonly").is_some_and(|v| v == "true");
        // Of the volume as a whole, and of this place.
        let all_read_only = used.read_only || published;
        let read_only = request.readonly || all_read_only;
        let staging = PathBuf::from(request.staging_target_path);
        let one_pod = used.one_pod || parameters::is_exclusive(&request.volume_context);
        let used = Use { one_pod, ..used };
        let wish =
            Staging { device, read_only: all_read_only, again: true, used, context: request.volume_context };
        let work = async move {
            match wish.used.access {
                Access::Block => target::publish_device(&wish.device, &target, read_only, one_pod).await,
                Access::Mount { .. } if staging.as_os_str().is_empty() => Err(Refused::Precondition(
                    "the staging target path is missing: the volume is staged first".to_owned(),
                )),
                Access::Mount { .. } => target::publish_mount(&wish, &staging, &target, read_only).await,
            }
        };
        self.work(&id, work).await
    }

    async fn unpublish(&self, request: NodeUnpublishVolumeRequest) -> Result<(), Refused> {
        let id = required("the volume's id", &request.volume_id)?.to_owned();
        let target = PathBuf::from(required("the target path", &request.target_path)?);
        self.work(&id, async move { target::unpublish(&target).await }).await
    }

    async fn expand(&self, request: NodeExpandVolumeRequest) -> Result<i64, Refused> {
        let id = required("the volume's id", &request.volume_id)?.to_owned();
        let path = PathBuf::from(required("the volume's path", &request.volume_path)?);
        let device = self.device(&id)?;
        let wanted = request.capacity_range.map_or(0, |range| range.required_bytes);
        let wanted = u64::try_from(wanted).unwrap_or_default();
        let (cluster, volume) = (self.cluster.clone(), id.clone());
        let work = async move {
            let size = filesystem::size(&device)?;
            let failure = match size < wanted {
                true => cluster.growth_failure(&volume).await.unwrap_or_else(|e| {
                    tracing::debug!(volume, error = %e, "whether it still grows is not known");
                    None
                }),
                false => None,
            };
            let Some(why) = failure else { return target::grow(&device, &path, wanted).await };
            target::grow(&device, &path, size).await?;
            // To the kubelet this error alone is no reason to keep a pod from its volume.
            Err(Refused::Precondition(format!(
                "the volume has {size} bytes, and {wanted} cannot be had: {why}"
            )))
        };
        self.work(&id, work).await
    }

    async fn stats(&self, request: NodeGetVolumeStatsRequest) -> Result<NodeGetVolumeStatsResponse, Refused> {
        let id = required("the volume's id", &request.volume_id)?;
        let path = required("the volume's path", &request.volume_path)?;
        let device = self.device(id)?;
        // The kubelet asks again and again, and does not wait for the answer to the question before. One thread is enough.
        let held = self.guard.take(&format!("{id} at {path}"))?;
        stats::stats(&device, Path::new(path), held).await
    }

    async fn topology(&self) -> Result<Topology, Refused> {
        let keys = self.cluster.topology_keys().await?;
        let labels = self.cluster.node_labels(&self.node).await?;
        // The kubelet registers no driver that tells another value of a label that its node has.
        let host = labels.get(HOST).unwrap_or(&self.node).clone();
        let mut topology = Topology { segments: [(HOST.to_owned(), host)].into() };
        let told = keys.into_iter().filter_map(|key| labels.get(&key).cloned().map(|label| (key, label)));
        topology.segments.extend(told);
        Ok(topology)
    }
}

/// What was refused, in the log, too: the kubelet's own log may be far away.
fn tell(call: &str, volume: &str, refused: Refused) -> Status {
    tracing::info!(call, volume, error = %refused, "refused");
    refused.into()
}

#[async_trait]
impl Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = request.volume_id.clone();
        self.stage(request).await.map_err(|e| tell("stage", &id, e))?;
        Ok(Response::new(NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = request.volume_id.clone();
        self.unstage(request).await.map_err(|e| tell("unstage", &id, e))?;
        Ok(Response::new(NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = request.volume_id.clone();
        self.publish(request).await.map_err(|e| tell("publish", &id, e))?;
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = request.volume_id.clone();
        self.unpublish(request).await.map_err(|e| tell("unpublish", &id, e))?;
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        Ok(Response::new(self.stats(request.into_inner()).await?))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let id = request.volume_id.clone();
        let capacity_bytes = self.expand(request).await.map_err(|e| tell("expand", &id, e))?;
        Ok(Response::new(NodeExpandVolumeResponse { capacity_bytes }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let tell = |ability: &Ability| NodeServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: (*ability).into() })),
        };
        let capabilities = ABILITIES.iter().map(tell).collect();
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: self.node.clone(),
            max_volumes_per_node: self.most_volumes,
            accessible_topology: Some(self.topology().await?),
        }))
    }
}
