//! What an orchestrator asks of a driver for a virtual machine's disk, one call at a time, for tests:
//!
//! ```text
//! orchestrator SOCKET create NAME MIB REPLICAS | delete NAME
//! orchestrator SOCKET attach NAME NODE | detach NAME NODE       (ControllerPublishVolume, ControllerUnpublishVolume)
//! orchestrator SOCKET mount NAME DIRECTORY | unmount NAME DIRECTORY     (NodeStageVolume and NodePublishVolume, and back)
//! orchestrator SOCKET nodes NAME
//! ```
//!
//! A driver that refuses ends it with status 1 and `CODE: message`.

use std::error::Error;
use std::path::Path;

use csi::proto::csi as proto;
use proto::controller_client::ControllerClient;
use proto::node_client::NodeClient;
use proto::volume_capability::access_mode::Mode;
use proto::volume_capability::{AccessMode, AccessType, BlockVolume};
use proto::{
    CapacityRange, ControllerGetVolumeRequest, ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest, CreateVolumeRequest, DeleteVolumeRequest, NodePublishVolumeRequest,
    NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability,
};
use tonic::Status;

/// ReadWriteMany, volumeMode Block.
fn capability() -> Option<VolumeCapability> {
    Some(VolumeCapability {
        access_type: Some(AccessType::Block(BlockVolume {})),
        access_mode: Some(AccessMode { mode: Mode::MultiNodeMultiWriter.into() }),
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let [socket, call @ ..] = words.as_slice() else {
        return Err("usage: orchestrator SOCKET CALL...".into());
    };
    let channel = control::transport::connect(Path::new(socket)).await?;
    let (mut controller, mut node) = (ControllerClient::new(channel.clone()), NodeClient::new(channel));
    let done: Result<(), Status> = match *call {
        ["create", name, mib, replicas] => {
            let request = CreateVolumeRequest {
                name: name.to_owned(),
                capacity_range: Some(CapacityRange {
                    required_bytes: mib.parse::<i64>()? << 20,
                    limit_bytes: 0,
                }),
                volume_capabilities: capability().into_iter().collect(),
                parameters: [("migratable", "true"), ("frontend", "fuse"), ("numberOfReplicas", replicas)]
                    .map(|(key, value)| (key.to_owned(), value.to_owned()))
                    .into(),
                ..CreateVolumeRequest::default()
            };
            controller.create_volume(request).await.map(drop)
        }
        ["delete", name] => {
            let request = DeleteVolumeRequest { volume_id: name.to_owned(), ..Default::default() };
            controller.delete_volume(request).await.map(drop)
        }
        ["attach", name, to] => {
            let request = ControllerPublishVolumeRequest {
                volume_id: name.to_owned(),
                node_id: to.to_owned(),
                volume_capability: capability(),
                ..ControllerPublishVolumeRequest::default()
            };
            controller.controller_publish_volume(request).await.map(drop)
        }
        ["detach", name, from] => {
            let (volume_id, node_id) = (name.to_owned(), from.to_owned());
            let request = ControllerUnpublishVolumeRequest { volume_id, node_id, ..Default::default() };
            controller.controller_unpublish_volume(request).await.map(drop)
        }
        ["mount", name, directory] => mount(&mut node, name, directory).await,
        ["unmount", name, directory] => unmount(&mut node, name, directory).await,
        ["nodes", name] => {
            let request = ControllerGetVolumeRequest { volume_id: name.to_owned() };
            let status = controller.controller_get_volume(request).await?.into_inner().status;
            let mut nodes = status.unwrap_or_default().published_node_ids;
            nodes.sort();
            println!("{}", nodes.join(" "));
            Ok(())
        }
        _ => return Err(format!("no such call: {call:?}").into()),
    };
    if let Err(status) = done {
        eprintln!("{:?}: {}", status.code(), status.message());
        std::process::exit(1);
    }
    Ok(())
}

type Node = NodeClient<tonic::transport::Channel>;

async fn mount(node: &mut Node, name: &str, directory: &str) -> Result<(), Status> {
    let staging_target_path = format!("{directory}/staging");
    let stage = NodeStageVolumeRequest {
        volume_id: name.to_owned(),
        staging_target_path: staging_target_path.clone(),
        volume_capability: capability(),
        ..NodeStageVolumeRequest::default()
    };
    node.node_stage_volume(stage).await?;
    let publish = NodePublishVolumeRequest {
        volume_id: name.to_owned(),
        staging_target_path,
        target_path: format!("{directory}/disk"),
        volume_capability: capability(),
        ..NodePublishVolumeRequest::default()
    };
    node.node_publish_volume(publish).await.map(drop)
}

async fn unmount(node: &mut Node, name: &str, directory: &str) -> Result<(), Status> {
    let (volume_id, target_path) = (name.to_owned(), format!("{directory}/disk"));
    node.node_unpublish_volume(NodeUnpublishVolumeRequest { volume_id, target_path }).await?;
    let (volume_id, staging_target_path) = (name.to_owned(), format!("{directory}/staging"));
    node.node_unstage_volume(NodeUnstageVolumeRequest { volume_id, staging_target_path }).await.map(drop)
}
