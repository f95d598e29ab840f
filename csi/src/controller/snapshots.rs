//! Snapshots of a volume: `Snapshot` resources, which the manager of the volume's node takes and removes.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use lh_cluster::api::{Snapshot, SnapshotSpec};
use lh_cluster::plan::VOLUME_LABEL;
use lh_cluster::plan::snapshot::Refusal;

use super::ControllerService;
use super::look::page;
use crate::names::{GIVEN_NAME, SnapshotHandle, group_handle, snapshot_name};
use crate::proto::csi::list_snapshots_response::Entry;
use crate::proto::csi::{
    CreateSnapshotRequest, CreateSnapshotResponse, DeleteSnapshotRequest, DeleteSnapshotResponse,
    GetSnapshotRequest, GetSnapshotResponse, ListSnapshotsRequest, ListSnapshotsResponse, Snapshot as Told,
};
use crate::refused::required;
use crate::{Refused, parameters};

/// The label of snapshots that belong to a group, which it names.
pub(super) const GROUP_LABEL: &str = "csi.longhorn.io/group";

impl ControllerService {
    pub(super) async fn create_snapshot(
        &self,
        request: CreateSnapshotRequest,
    ) -> Result<CreateSnapshotResponse, Refused> {
        let given = required("the snapshot's name", &request.name)?;
        let volume = required("the source volume's id", &request.source_volume_id)?;
        parameters::snapshot(&request.parameters)?;
        let name = snapshot_name(given);
        let _held = self.guard.take(&name)?;
        let snapshot = self.take_snapshot(&name, given, volume, None).await?;
        Ok(CreateSnapshotResponse { snapshot: Some(told(&snapshot)) })
    }

    /// Makes the resource unless it is there, and waits until the snapshot is taken.
    pub(super) async fn take_snapshot(
        &self,
        name: &str,
        given: &str,
        volume: &str,
        group: Option<&str>,
    ) -> Result<Snapshot, Refused> {
        if self.cluster.volume(volume).await?.metadata.deletion_timestamp.is_some() {
            return Err(Refused::Missing(format!("volume {volume} is being removed")));
        }
        // The label lies with the data: a resource that somebody lost is made again by the managers, which know no more.
        let labels = BTreeMap::from([(GIVEN_NAME.to_owned(), given.to_owned())]);
        let spec = SnapshotSpec { volume: volume.to_owned(), create_snapshot: true, labels };
        let mut snapshot = Snapshot::new(name, spec);
        snapshot.labels_mut().insert(VOLUME_LABEL.to_owned(), volume.to_owned());
        snapshot.annotations_mut().insert(GIVEN_NAME.to_owned(), given.to_owned());
        if let Some(group) = group {
            snapshot.labels_mut().insert(GROUP_LABEL.to_owned(), group.to_owned());
        }
        match self.cluster.create(&snapshot).await {
            Ok(true) => {}
            // One that is there already may be what left no room: the managers are asked before it is looked for.
            made @ (Ok(false) | Err(Refused::Exhausted(_))) => match self.cluster.snapshot(name).await? {
                Some(there) => {
                    check_same(&there, given, volume)?;
                    self.drop_lost(&there).await?;
                }
                None => drop(made?),
            },
            Err(refused) => return Err(refused),
        }
        let taken =
            self.cluster.wait::<Snapshot, Snapshot>(name, "the snapshot is being taken", is_taken).await;
        if let Err(Refused::Exhausted(_) | Refused::Precondition(_)) = taken {
            // Nobody takes it unasked once it could be: whoever wants it then asks again.
            self.cluster.delete::<Snapshot>(name).await?;
        }
        taken
    }

    /// Deletes the resource of a snapshot that was taken once and is in the volume no more, as a revert or a purge by hand leaves it:
    /// it never becomes ready again, and the next request takes one of today.
    async fn drop_lost(&self, there: &Snapshot) -> Result<(), Refused> {
        let status = there.status.clone().unwrap_or_default();
        let was_taken = !status.creation_time.is_empty();
        if !was_taken || status.ready_to_use || status.mark_removed || status.error.is_empty() {
            return Ok(());
        }
        self.cluster.delete_read(there).await?;
        Err(Refused::NotYet(format!(
            "snapshot {}: {}: ask again for a new one",
            there.name_any(),
            status.error
        )))
    }

    pub(super) async fn delete_snapshot(
        &self,
        request: DeleteSnapshotRequest,
    ) -> Result<DeleteSnapshotResponse, Refused> {
        let id = required("the snapshot's id", &request.snapshot_id)?;
        let handle = match SnapshotHandle::named(id) {
            Ok(handle) => handle,
            // There is none of that name: that is as good as deleted. A backup is still there, and nobody is told that it is not.
            Err(Refused::Missing(_)) => return Ok(DeleteSnapshotResponse {}),
            Err(refused) => return Err(refused),
        };
        let _held = self.guard.take(&handle.name)?;
        let found = self.cluster.snapshot(&handle.name).await?.filter(|s| s.spec.volume == handle.volume);
        let Some(snapshot) = found else { return Ok(DeleteSnapshotResponse {}) };
        if let Some(group) = snapshot.labels().get(GROUP_LABEL) {
            return Err(Refused::Argument(format!(
                "snapshot {id} belongs to the group {}: delete the group",
                group_handle(group)
            )));
        }
        self.drop_snapshot(&handle.name).await?;
        Ok(DeleteSnapshotResponse {})
    }

    /// Deletes a snapshot and waits until it is gone.
    pub(super) async fn drop_snapshot(&self, name: &str) -> Result<(), Refused> {
        self.cluster.delete::<Snapshot>(name).await?;
        self.cluster.wait_gone::<Snapshot>(name, "the snapshot is being removed").await
    }

    pub(super) async fn get_snapshot(
        &self,
        request: GetSnapshotRequest,
    ) -> Result<GetSnapshotResponse, Refused> {
        let id = required("the snapshot's id", &request.snapshot_id)?;
        let missing = || Refused::Missing(format!("snapshot {id} does not exist"));
        let handle = SnapshotHandle::named(id)?;
        let found = self.cluster.snapshot(&handle.name).await?.filter(|s| s.spec.volume == handle.volume);
        Ok(GetSnapshotResponse { snapshot: Some(told(&found.ok_or_else(missing)?)) })
    }

    pub(super) async fn list_snapshots(
        &self,
        request: ListSnapshotsRequest,
    ) -> Result<ListSnapshotsResponse, Refused> {
        let wanted = |s: &Snapshot| {
            let is_there = s.metadata.deletion_timestamp.is_none() && is_kept(s);
            let of_volume = request.source_volume_id.is_empty() || s.spec.volume == request.source_volume_id;
            let is_it = request.snapshot_id.is_empty() || handle(s).to_string() == request.snapshot_id;
            is_there && of_volume && is_it
        };
        let (id, volume) = (request.snapshot_id.as_str(), request.source_volume_id.as_str());
        let mut all = match (SnapshotHandle::named(id), volume) {
            (Ok(handle), _) => self.cluster.snapshot(&handle.name).await?.into_iter().collect(),
            // One that nobody can name is none of ours.
            (Err(_), _) if !id.is_empty() => Vec::new(),
            (Err(_), "") => self.cluster.all::<Snapshot>(None).await?,
            (Err(_), volume) => self.cluster.snapshots_of(volume).await?,
        };
        all.retain(wanted);
        all.sort_by_key(ResourceExt::name_any);
        let (entries, next_token) =
            page(all, &request.starting_token, request.max_entries, ResourceExt::name_any)?;
        let entries = entries.iter().map(|s| Entry { snapshot: Some(told(s)) }).collect();
        Ok(ListSnapshotsResponse { entries, next_token })
    }
}

/// True for a snapshot that somebody can use: taken, and not only for a clone or a backup of our own.
fn is_kept(snapshot: &Snapshot) -> bool {
    let ours = snapshot.labels().contains_key(lh_cluster::plan::snapshot::FOR_CLONE);
    !ours && snapshot.status.as_ref().is_some_and(|s| s.ready_to_use)
}

/// The name by which an orchestrator asked for a snapshot; `None`: nobody did.
pub(super) fn given_name(snapshot: &Snapshot) -> Option<&String> {
    let in_the_data = || snapshot.status.as_ref().and_then(|status| status.labels.get(GIVEN_NAME));
    snapshot.annotations().get(GIVEN_NAME).or_else(in_the_data)
}

fn check_same(there: &Snapshot, given: &str, volume: &str) -> Result<(), Refused> {
    let name = there.name_any();
    if there.metadata.deletion_timestamp.is_some() {
        return Err(Refused::NotYet(format!("snapshot {name} is being removed: ask again")));
    }
    let kept = given_name(there);
    if there.spec.volume != volume || kept.is_some_and(|kept| kept != given) {
        return Err(Refused::Different(format!(
            "the name {name} is taken by a snapshot of volume {}",
            there.spec.volume
        )));
    }
    Ok(())
}

fn is_taken(snapshot: Option<&Snapshot>) -> Result<Option<Snapshot>, Refused> {
    let Some(snapshot) = snapshot else {
        return Err(Refused::NotYet("the snapshot was removed meanwhile".to_owned()));
    };
    let status = snapshot.status.clone().unwrap_or_default();
    match Refusal::of(&status) {
        Some(Refusal::NoRoom(why)) => return Err(Refused::Exhausted(why.to_owned())),
        Some(Refusal::NotFrozen(why)) => return Err(Refused::Precondition(why.to_owned())),
        None => {}
    }
    if !status.error.is_empty() {
        // It may be had yet: an orchestrator that hears of an end forgets that there may be a snapshot.
        return Err(Refused::NotYet(status.error));
    }
    Ok(status.ready_to_use.then(|| snapshot.clone()))
}

pub(super) fn handle(snapshot: &Snapshot) -> SnapshotHandle {
    SnapshotHandle { volume: snapshot.spec.volume.clone(), name: snapshot.name_any() }
}

/// A snapshot as an orchestrator hears of it.
pub(super) fn told(snapshot: &Snapshot) -> Told {
    let status = snapshot.status.clone().unwrap_or_default();
    Told {
        size_bytes: status.restore_size,
        snapshot_id: handle(snapshot).to_string(),
        source_volume_id: snapshot.spec.volume.clone(),
        creation_time: Some(time(&status.creation_time).or_else(|| made(snapshot)).unwrap_or_default()),
        ready_to_use: status.ready_to_use,
        group_snapshot_id: snapshot.labels().get(GROUP_LABEL).map(|g| group_handle(g)).unwrap_or_default(),
    }
}

/// A time in RFC 3339; `None`: it is none. It is from a disk that somebody may have brought along, and one that nobody can
/// read keeps no other snapshot from being told of.
fn time(text: &str) -> Option<prost_types::Timestamp> {
    text.parse().ok().map(stamp)
}

/// When the resource was made: a snapshot always has a time.
fn made(snapshot: &Snapshot) -> Option<prost_types::Timestamp> {
    snapshot.metadata.creation_timestamp.as_ref().map(|time| stamp(time.0))
}

fn stamp(time: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: time.as_second(), nanos: time.subsec_nanosecond() }
}
