//! Snapshots of several volumes at one moment.
//!
//! They are taken one after the other, so that they are of one moment only if at most one of the volumes is in use
//! meanwhile; anything else is refused, rather than handed out as what it is not.

use kube::ResourceExt;
use lh_cluster::api::{Snapshot, TicketType};
use tonic::{Request, Response, Status, async_trait};

use super::ControllerService;
use super::snapshots::{GROUP_LABEL, handle, told};
use crate::names::{SnapshotHandle, group_handle, group_name, resource_name, snapshot_name};
use crate::proto::csi::group_controller_server::GroupController;
use crate::proto::csi::group_controller_service_capability::rpc::Type as Ability;
use crate::proto::csi::group_controller_service_capability::{Rpc, Type};
use crate::proto::csi::{
    CreateVolumeGroupSnapshotRequest, CreateVolumeGroupSnapshotResponse, DeleteVolumeGroupSnapshotRequest,
    DeleteVolumeGroupSnapshotResponse, GetVolumeGroupSnapshotRequest, GetVolumeGroupSnapshotResponse,
    GroupControllerGetCapabilitiesRequest, GroupControllerGetCapabilitiesResponse,
    GroupControllerServiceCapability, VolumeGroupSnapshot,
};
use crate::refused::required;
use crate::{Refused, parameters};

impl ControllerService {
    async fn create_group(
        &self,
        request: CreateVolumeGroupSnapshotRequest,
    ) -> Result<VolumeGroupSnapshot, Refused> {
        let given = required("the group's name", &request.name)?;
        parameters::snapshot(&request.parameters)?;
        let mut volumes = request.source_volume_ids;
        volumes.sort();
        volumes.dedup();
        if volumes.is_empty() {
            return Err(Refused::Argument("the source volumes' ids are missing".to_owned()));
        }
        let group = resource_name(given);
        let _held = self.guard.take(&group_handle(&group))?;
        let there = self.members(&group).await?;
        let mut of: Vec<&str> = there.iter().map(|s| s.spec.volume.as_str()).collect();
        of.sort_unstable();
        if of.iter().any(|volume| !volumes.iter().any(|wanted| wanted == volume)) {
            return Err(Refused::Different(format!(
                "group {given} exists, of the volumes {}",
                of.join(", ")
            )));
        }
        let stays = |s: &Snapshot| s.metadata.deletion_timestamp.is_none();
        let is_taken = |s: &Snapshot| stays(s) && s.status.as_ref().is_some_and(|s| s.ready_to_use);
        if of == volumes && there.iter().all(is_taken) {
            return Ok(group_of(&group, &there));
        }
        for volume in &volumes {
            self.cluster.volume(volume).await?;
        }
        // What an earlier attempt has taken is of another moment.
        for snapshot in &there {
            self.drop_snapshot(&snapshot.name_any()).await?;
        }
        self.check_one_moment(&volumes).await?;
        let mut taken = Vec::new();
        for volume in &volumes {
            let full = format!("{given}/{volume}");
            match self.take_snapshot(&snapshot_name(&full), &full, volume, Some(&group)).await {
                Ok(snapshot) => taken.push(snapshot),
                Err(e) => return Err(self.taken_back(&group, e).await),
            }
        }
        if let Err(e) = self.check_one_moment(&volumes).await {
            for snapshot in &taken {
                self.drop_snapshot(&snapshot.name_any()).await?;
            }
            return Err(e);
        }
        Ok(group_of(&group, &taken))
    }

    /// Lets go of what was taken of a group that is not to be had, as far as that can be said now. Whoever asked may never ask
    /// again, and was told of no snapshot that could be deleted; the volumes of those that are left could not be, either.
    async fn taken_back(&self, group: &str, why: Refused) -> Refused {
        if matches!(why, Refused::NotYet(_) | Refused::Unavailable(_)) {
            return why;
        }
        let members = self.members(group).await.unwrap_or_default();
        for snapshot in members {
            if let Err(e) = self.cluster.delete::<Snapshot>(&snapshot.name_any()).await {
                tracing::warn!(snapshot = snapshot.name_any(), error = %e, "a part of a group is left");
            }
        }
        why
    }

    /// Refuses volumes of which more than one may be written to.
    async fn check_one_moment(&self, volumes: &[String]) -> Result<(), Refused> {
        let mut used = Vec::new();
        for volume in volumes {
            let attachment = self.cluster.attachment(volume).await?;
            let tickets = attachment.iter().flat_map(|a| a.spec.attachment_tickets.values());
            if tickets.into_iter().any(|t| t.kind != TicketType::Snapshot) {
                used.push(volume.as_str());
            }
        }
        if used.len() < 2 {
            return Ok(());
        }
        Err(Refused::Precondition(format!(
            "snapshots of one moment need all volumes but one at rest, and these are in use: {}",
            used.join(", ")
        )))
    }

    async fn members(&self, group: &str) -> Result<Vec<Snapshot>, Refused> {
        let mut all = self.cluster.all::<Snapshot>(Some(&format!("{GROUP_LABEL}={group}"))).await?;
        all.sort_by_key(ResourceExt::name_any);
        Ok(all)
    }

    /// The snapshots of a group, checked against those that the request names. `gone_too`: one that is there no more may be named: an
    /// earlier attempt has deleted it.
    async fn found(&self, id: &str, named: &[String], gone_too: bool) -> Result<Vec<Snapshot>, Refused> {
        let id = required("the group's id", id)?;
        let Some(group) = group_name(id) else { return Ok(Vec::new()) };
        let members = self.members(group).await?;
        let is_one = |n: &String| members.iter().any(|m| handle(m).to_string() == *n);
        for other in named.iter().filter(|n| !members.is_empty() && !is_one(n)) {
            if !gone_too || self.is_there(other).await? {
                return Err(Refused::Argument(format!("snapshot {other} does not belong to group {id}")));
            }
        }
        Ok(members)
    }

    async fn is_there(&self, snapshot: &str) -> Result<bool, Refused> {
        let Some(wanted) = SnapshotHandle::parse(snapshot) else { return Ok(false) };
        Ok(self.cluster.snapshot(&wanted.name).await?.is_some_and(|s| handle(&s) == wanted))
    }
}

fn group_of(group: &str, members: &[Snapshot]) -> VolumeGroupSnapshot {
    let snapshots: Vec<_> = members.iter().map(told).collect();
    VolumeGroupSnapshot {
        group_snapshot_id: group_handle(group),
        creation_time: snapshots.iter().filter_map(|s| s.creation_time).max_by_key(|t| (t.seconds, t.nanos)),
        ready_to_use: !snapshots.is_empty() && snapshots.iter().all(|s| s.ready_to_use),
        snapshots,
    }
}

#[async_trait]
impl GroupController for ControllerService {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<GroupControllerGetCapabilitiesResponse>, Status> {
        let rpc = Rpc { r#type: Ability::CreateDeleteGetVolumeGroupSnapshot.into() };
        let capabilities = vec![GroupControllerServiceCapability { r#type: Some(Type::Rpc(rpc)) }];
        Ok(Response::new(GroupControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<CreateVolumeGroupSnapshotResponse>, Status> {
        let group_snapshot = Some(self.create_group(request.into_inner()).await?);
        Ok(Response::new(CreateVolumeGroupSnapshotResponse { group_snapshot }))
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<DeleteVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        let _held = self.guard.take(&request.group_snapshot_id)?;
        for member in self.found(&request.group_snapshot_id, &request.snapshot_ids, true).await? {
            self.drop_snapshot(&member.name_any()).await?;
        }
        Ok(Response::new(DeleteVolumeGroupSnapshotResponse {}))
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<GetVolumeGroupSnapshotResponse>, Status> {
        let request = request.into_inner();
        let members = self.found(&request.group_snapshot_id, &request.snapshot_ids, false).await?;
        let Some(group) = group_name(&request.group_snapshot_id).filter(|_| !members.is_empty()) else {
            return Err(
                Refused::Missing(format!("group {} does not exist", request.group_snapshot_id)).into()
            );
        };
        let group_snapshot = Some(group_of(group, &members));
        Ok(Response::new(GetVolumeGroupSnapshotResponse { group_snapshot }))
    }
}
