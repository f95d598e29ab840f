//! A volume's growth: asked for where there is room for it, and waited for until the running engine serves it.

use std::time::Duration;

use kube::ResourceExt;
use lh_cluster::api::{Engine, Int64Text, Replica, Volume, VolumeState};
use lh_cluster::plan::VOLUME_LABEL;
use lh_cluster::plan::growth::refuses;
use serde_json::json;
use tokio::time::Instant;

use super::ControllerService;
use crate::Refused;
use crate::capability::{Access, Use, size};
use crate::proto::csi::{ControllerExpandVolumeRequest, ControllerExpandVolumeResponse};
use crate::refused::required;

/// How long a failure has to be told until it is believed: the first that is seen may be of the time before the volume was
/// attached, and its engine tries again as soon as it runs.
const BELIEVED: Duration = Duration::from_secs(3);

/// What became of a growth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Growth {
    /// The engine serves that many bytes.
    Done,
    /// It does not, and why. It goes on trying.
    Failed(String),
}

impl ControllerService {
    pub(super) async fn controller_expand_volume(
        &self,
        request: ControllerExpandVolumeRequest,
    ) -> Result<ControllerExpandVolumeResponse, Refused> {
        let id = required("the volume's id", &request.volume_id)?;
        if request.capacity_range.is_none() {
            return Err(Refused::Argument("the capacity range is missing".to_owned()));
        }
        let wanted = size(request.capacity_range, false)?;
        let _held = self.guard.take(id)?;
        let volume = self.cluster.volume(id).await?;
        let new = wanted.max(volume.spec.size.bytes());
        let limit = request.capacity_range.map_or(0, |r| r.limit_bytes);
        if limit > 0 && u64::try_from(limit).is_ok_and(|limit| limit < new) {
            return Err(Refused::Range(format!(
                "volume {id} has {new} bytes already, and volumes do not shrink"
            )));
        }
        if new > volume.spec.size.bytes() {
            self.ask_for_size(&volume, new).await?;
        }
        let attached = volume.status.as_ref().is_some_and(|s| s.state == VolumeState::Attached);
        if attached && let Growth::Failed(why) = self.wait_for_size(&volume, new).await? {
            return Err(Refused::Failed(format!("the volume does not grow: {why}")));
        }
        let used = request.volume_capability.as_ref().map(|c| Use::of(Some(c))).transpose()?;
        Ok(ControllerExpandVolumeResponse {
            capacity_bytes: i64::try_from(new).unwrap_or(i64::MAX),
            node_expansion_required: used.is_none_or(|u| u.access != Access::Block),
        })
    }

    /// Asks the managers for a larger volume. Once that is asked there is no way back, so that it is looked before whether
    /// there is room.
    pub(super) async fn ask_for_size(&self, volume: &Volume, bytes: u64) -> Result<(), Refused> {
        let id = &volume.name_any();
        if !volume.spec.migration_node_id.is_empty() {
            return Err(Refused::Precondition(format!(
                "volume {id} migrates from node {} to node {}: expand it afterwards",
                volume.spec.node_id, volume.spec.migration_node_id
            )));
        }
        let replicas = self.cluster.all::<Replica>(Some(&format!("{VOLUME_LABEL}={id}"))).await?;
        let (_, picture) = self.cluster.picture().await?;
        if let Some(why) = refuses(id, &picture, &replicas, bytes) {
            // To Kubernetes' resizer this size is infeasible: it tries seldom, and lets the claim ask for less.
            return Err(Refused::Range(why));
        }
        let patch = json!({ "spec": { "size": Int64Text::of_bytes(bytes) } });
        match self.cluster.change::<Volume>(id, &patch).await {
            // The managers' webhook may know of more than was seen here.
            Err(Refused::Argument(why)) => Err(Refused::Range(why)),
            done => done,
        }
    }

    /// Waits until the running engine serves so many bytes, or says for a while that it cannot.
    pub(super) async fn wait_for_size(&self, volume: &Volume, bytes: u64) -> Result<Growth, Refused> {
        let engine = self.cluster.engine_of(volume).await?;
        let believed = Instant::now() + BELIEVED;
        let grown = move |engine: Option<&Engine>| {
            let status = engine.and_then(|e| e.status.clone()).unwrap_or_default();
            if status.current_size.bytes() >= bytes {
                return Ok(Some(Growth::Done));
            }
            let is_told = !status.last_expansion_error.is_empty() && Instant::now() >= believed;
            Ok(is_told.then_some(Growth::Failed(status.last_expansion_error)))
        };
        self.cluster.wait::<Engine, Growth>(&engine, "the volume is growing", grown).await
    }
}
