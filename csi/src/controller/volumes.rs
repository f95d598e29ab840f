//! Volumes made, changed and deleted.

use std::collections::HashMap;

use kube::ResourceExt;
use lh_cluster::api::{
    AccessMode, AttachmentTicket, Conditions, DataLocality, Int64Text, Snapshot, TicketType, Volume,
    VolumeSpec, VolumeState,
};
use lh_cluster::plan::volume::{
    CLONING, DATA_LEFT, NOT_BUILT, SCHEDULED, SOURCE_LARGER, SOURCE_MISSING, unbuilt,
};
use serde_json::{Map, Value, json};

use super::ControllerService;
use super::publish::{left, must_migrate};
use super::snapshots::given_name;
use crate::capability::{Access, Use, size};
use crate::names::{GIVEN_NAME, SnapshotHandle, resource_name};
use crate::proto::csi::volume_content_source::Type as Source;
use crate::proto::csi::{
    ControllerModifyVolumeRequest, ControllerModifyVolumeResponse, CreateVolumeRequest, CreateVolumeResponse,
    DeleteVolumeRequest, DeleteVolumeResponse, Topology, Volume as Told, VolumeContentSource,
};
use crate::refused::required;
use crate::{Refused, parameters};

/// The annotation of a volume that is made of another one: bytes that it was asked for with.
const ASKED_SIZE: &str = "csi.longhorn.io/size";

/// What a clone says when it holds everything.
const CLONED: &str = lh_cluster::plan::volume::CLONED;

impl ControllerService {
    pub(super) async fn create_volume(
        &self,
        request: CreateVolumeRequest,
    ) -> Result<CreateVolumeResponse, Refused> {
        let given = required("the volume's name", &request.name)?;
        let name = resource_name(given);
        let _held = self.guard.take(&name)?;
        let wish = wish(&request)?;
        let source = request.volume_content_source.as_ref().and_then(|s| s.r#type.clone());
        let limit = request.capacity_range.map_or(0, |r| r.limit_bytes);
        if let Some(there) = self.cluster.find::<Volume>(&name).await? {
            // It was asked for before. What it is made of may be gone since.
            check_same(&there, given, &wish, limit)?;
        } else {
            let spec = self.as_large_as(source.as_ref(), wish.clone(), limit).await?;
            let mut volume = Volume::new(&name, spec);
            volume.annotations_mut().insert(GIVEN_NAME.to_owned(), given.to_owned());
            if source.is_some() {
                volume.annotations_mut().insert(ASKED_SIZE.to_owned(), wish.size.to_string());
            }
            if !self.cluster.create(&volume).await? {
                check_same(&self.cluster.volume(&name).await?, given, &wish, limit)?;
            }
        }
        let ready = self.cluster.wait::<Volume, Volume>(&name, "the volume is being made", is_made).await;
        let volume = match ready {
            // Without room the orchestrator tries elsewhere, or gives up: it does not come back for this one.
            Err(e @ (Refused::Exhausted(_) | Refused::Precondition(_))) => {
                self.give_up(&name).await?;
                return Err(e);
            }
            Err(Refused::NotYet(why)) => return Err(self.unmade(&name, source.as_ref(), why).await?),
            other => other?,
        };
        let volume = self.grown(volume, &wish).await?;
        let topology = self.topology(&request).await?;
        Ok(CreateVolumeResponse { volume: Some(told(&volume, &request, topology)) })
    }

    /// Where the volume can be used: everywhere, since its data travels. One of a strict class is kept where its first pod is, which
    /// Kubernetes asks for first; as in Longhorn the labels say where that is that are told as topology, and a node alone is no place.
    async fn topology(&self, request: &CreateVolumeRequest) -> Result<Vec<Topology>, Refused> {
        let asked = request.accessibility_requirements.as_ref();
        let asked = asked.filter(|_| parameters::is_strict(&request.parameters));
        let Some(first) = asked.and_then(|a| a.preferred.first().or(a.requisite.first())) else {
            return Ok(Vec::new());
        };
        let keys = self.cluster.topology_keys().await?;
        let mut there = first.clone();
        there.segments.retain(|key, _| keys.contains(key));
        Ok(if there.segments.is_empty() { Vec::new() } else { vec![there] })
    }

    /// Deletes a volume that is not made, and will not be. If it is by now, another request may have been told of it.
    async fn give_up(&self, name: &str) -> Result<(), Refused> {
        match self.cluster.find::<Volume>(name).await? {
            Some(volume) if is_made(Some(&volume)).is_err() => self.cluster.delete_read(&volume).await,
            _ => Ok(()),
        }
    }

    /// Why a volume is not made yet. One whose source went before anything was copied never will be: it goes, too, and whoever asks
    /// hears what is missing, or would ask for it for ever. One whose source has grown meanwhile goes to be made as large.
    async fn unmade(&self, name: &str, source: Option<&Source>, why: String) -> Result<Refused, Refused> {
        let Some(volume) = self.cluster.find::<Volume>(name).await? else { return Ok(Refused::NotYet(why)) };
        let conditions = volume.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
        let Some(waits) = conditions.iter().find(|c| c.kind == CLONING && !c.is_true()) else {
            return Ok(Refused::NotYet(why));
        };
        if source.is_some() && waits.reason == SOURCE_LARGER {
            self.cluster.delete_read(&volume).await?;
        }
        if let Some(source) = source.filter(|_| waits.reason == SOURCE_MISSING)
            && let Err(missing @ Refused::Missing(_)) = self.bytes_of(source).await
        {
            self.cluster.delete::<Volume>(name).await?;
            return Ok(missing);
        }
        Ok(Refused::NotYet(format!("{why}: {}", waits.message)))
    }

    /// A volume that holds what it was made of, as large as it was asked for: it is grown when it is attached.
    async fn grown(&self, mut volume: Volume, wish: &VolumeSpec) -> Result<Volume, Refused> {
        if volume.spec.size >= wish.size {
            return Ok(volume);
        }
        match self.ask_for_size(&volume, wish.size.bytes()).await {
            // As where there is no room for it at all.
            Err(e @ Refused::Range(_)) => {
                self.cluster.delete::<Volume>(&volume.name_any()).await?;
                Err(e)
            }
            Err(e) => Err(e),
            Ok(()) => {
                volume.spec.size = wish.size;
                Ok(volume)
            }
        }
    }

    /// The volume that is asked for, as large as what it is made of: it grows when it holds all of that.
    async fn as_large_as(
        &self,
        source: Option<&Source>,
        mut spec: VolumeSpec,
        limit: i64,
    ) -> Result<VolumeSpec, Refused> {
        let Some(source) = source else { return Ok(spec) };
        let bytes = self.bytes_of(source).await?;
        if limit > 0 && u64::try_from(limit).is_ok_and(|limit| limit < bytes) {
            return Err(Refused::Range(format!(
                "a clone is as large as its source at least, {bytes} bytes: the limit {limit} is below"
            )));
        }
        spec.size = Int64Text::of_bytes(bytes);
        Ok(spec)
    }

    /// Bytes of what a volume is to be made of, which has to be there. What is copied of a snapshot is as large as its volume is by now.
    async fn bytes_of(&self, source: &Source) -> Result<u64, Refused> {
        match source {
            Source::Volume(volume) => {
                let id = &volume.volume_id;
                let found = self.cluster.volume(id).await?;
                if found.metadata.deletion_timestamp.is_some() {
                    return Err(Refused::Missing(format!("volume {id} is being removed")));
                }
                Ok(found.spec.size.bytes())
            }
            Source::Snapshot(snapshot) => {
                let id = &snapshot.snapshot_id;
                let missing = || Refused::Missing(format!("snapshot {id} does not exist"));
                let handle = SnapshotHandle::named(id)?;
                let found = self.cluster.snapshot(&handle.name).await?;
                let stays =
                    |s: &Snapshot| s.spec.volume == handle.volume && s.metadata.deletion_timestamp.is_none();
                let found = found.filter(stays).ok_or_else(missing)?;
                let status = found.status.unwrap_or_default();
                if !status.ready_to_use {
                    return Err(Refused::NotYet(format!(
                        "snapshot {id} is not ready to use: {}",
                        status.error
                    )));
                }
                let now =
                    self.cluster.find::<Volume>(&handle.volume).await?.map_or(0, |v| v.spec.size.bytes());
                Ok(u64::try_from(status.restore_size).unwrap_or_default().max(now))
            }
        }
    }

    pub(super) async fn delete_volume(
        &self,
        request: DeleteVolumeRequest,
    ) -> Result<DeleteVolumeResponse, Refused> {
        let id = required("the volume's id", &request.volume_id)?;
        let _held = self.guard.take(id)?;
        let Some(volume) = self.cluster.find::<Volume>(id).await? else { return Ok(DeleteVolumeResponse {}) };
        if volume.metadata.deletion_timestamp.is_none() {
            if let Some(attachment) = self.cluster.attachment(id).await? {
                let is_use = |t: &&AttachmentTicket| matches!(t.kind, TicketType::Csi | TicketType::Api);
                let mut nodes = attachment.spec.attachment_tickets.values().filter(is_use).peekable();
                if nodes.peek().is_some() {
                    // Where Kubernetes has it nowhere any more, nobody will let go of it.
                    let nodes = nodes.map(|t| t.node_id.as_str());
                    let known = self.cluster.nodes_in_kubernetes(id, nodes).await?;
                    let left = known.map(|known| left(&attachment, &known)).unwrap_or_default();
                    let tickets = attachment.spec.attachment_tickets.iter();
                    let mut users = tickets.filter(|(name, t)| is_use(t) && !left.contains(*name));
                    if let Some((_, user)) = users.next() {
                        return Err(Refused::Precondition(format!(
                            "volume {id} is in use on node {}: detach it first",
                            user.node_id
                        )));
                    }
                }
            }
            // They lie in the volume's replicas and would go with it.
            let snapshots = self.cluster.snapshots_of(id).await?;
            // One that is deleted already waits for the volume's engine, which may never serve again, or goes with the volume.
            let is_asked_for =
                |s: &&Snapshot| s.metadata.deletion_timestamp.is_none() && given_name(s).is_some();
            let names: Vec<String> =
                snapshots.iter().filter(is_asked_for).map(ResourceExt::name_any).collect();
            if !names.is_empty() {
                return Err(Refused::Precondition(format!(
                    "volume {id} has snapshots, which would go with it: delete them first: {}",
                    names.join(", ")
                )));
            }
            self.cluster.delete::<Volume>(id).await?;
        }
        self.cluster.wait_gone::<Volume>(id, "the volume is being removed").await?;
        Ok(DeleteVolumeResponse {})
    }

    pub(super) async fn controller_modify_volume(
        &self,
        request: ControllerModifyVolumeRequest,
    ) -> Result<ControllerModifyVolumeResponse, Refused> {
        let id = required("the volume's id", &request.volume_id)?;
        let volume = self.cluster.volume(id).await?;
        let mut spec = volume.spec.clone();
        parameters::change(&mut spec, &request.mutable_parameters)?;
        if spec != volume.spec {
            check_locality(&volume, &spec)?;
            let patch = json!({
                "metadata": { "resourceVersion": volume.metadata.resource_version },
                "spec": difference(&volume.spec, &spec)?,
            });
            self.cluster.change::<Volume>(id, &patch).await?;
        }
        Ok(ControllerModifyVolumeResponse {})
    }
}

/// Refuses a change of where the volume's only replica has to be while it is used. The managers refuse that, too, and by their answer
/// nobody could tell that it is only to be asked for later.
fn check_locality(volume: &Volume, wanted: &VolumeSpec) -> Result<(), Refused> {
    let is_strict = |spec: &VolumeSpec| spec.data_locality == DataLocality::StrictLocal;
    let state = volume.status.clone().unwrap_or_default().state;
    let is_down = matches!(state, VolumeState::Detached | VolumeState::Creating);
    if is_down || is_strict(&volume.spec) == is_strict(wanted) {
        return Ok(());
    }
    Err(Refused::Precondition(format!(
        "dataLocality to or from strict-local changes while the volume is detached, and volume {} is {state}",
        volume.name_any()
    )))
}

/// What makes a merge patch of one into the other: what nobody asked for is not written, and stays absent where it is.
fn difference(old: &VolumeSpec, new: &VolumeSpec) -> Result<Map<String, Value>, Refused> {
    let fields = |spec| match serde_json::to_value(spec) {
        Ok(Value::Object(fields)) => Ok(fields),
        other => Err(Refused::Failed(format!("a volume cannot be written: {other:?}"))),
    };
    let (old, mut new) = (fields(old)?, fields(new)?);
    let gone: Vec<String> = old.keys().filter(|key| !new.contains_key(*key)).cloned().collect();
    new.retain(|key, value| old.get(key) != Some(value));
    new.extend(gone.into_iter().map(|key| (key, Value::Null)));
    Ok(new)
}

/// The volume that a request asks for, without a look at anything: of one that is made of another, the least size.
fn wish(request: &CreateVolumeRequest) -> Result<VolumeSpec, Refused> {
    let uses = Use::of_all(&request.volume_capabilities)?;
    let mut spec = parameters::volume(&request.parameters)?;
    if !request.mutable_parameters.is_empty() {
        parameters::change(&mut spec, &request.mutable_parameters)?;
    }
    if uses.iter().any(|u| u.one_pod) {
        spec.access_mode = AccessMode::ReadWriteOncePod;
    }
    if uses.iter().any(|u| u.moves) {
        must_migrate(&spec)?;
        spec.access_mode = AccessMode::ReadWriteMany;
    } else {
        // As Longhorn's: what is used on one node, such as a virtual machine's scratch, is an ordinary volume of the class.
        spec.migratable = false;
    }
    if let Some(what) = unbuilt(&spec) {
        return Err(Refused::Precondition(format!("this version cannot do that yet: {what}")));
    }
    let class_fs = request.parameters.get("fsType").map_or("", String::as_str);
    let xfs = uses.iter().any(|u| match &u.access {
        Access::Mount { fs_type, .. } => fs_type == "xfs" || fs_type.is_empty() && class_fs == "xfs",
        Access::Block => false,
    });
    spec.size = Int64Text::of_bytes(size(request.capacity_range, xfs)?);
    if let Some(source) = &request.volume_content_source {
        // One of a kind that is not known is none to leave out: the volume would be empty.
        let unknown =
            || Refused::Argument("the volume's source is neither a snapshot nor a volume".to_owned());
        spec.data_source = handle(source.r#type.as_ref().ok_or_else(unknown)?)?;
    }
    Ok(spec)
}

/// What a volume is to be made of, as Longhorn writes it.
fn handle(source: &Source) -> Result<String, Refused> {
    match source {
        Source::Volume(volume) => {
            Ok(format!("vol://{}", required("the source volume's id", &volume.volume_id)?))
        }
        Source::Snapshot(snapshot) => {
            let id = required("the source snapshot's id", &snapshot.snapshot_id)?;
            Ok(SnapshotHandle::named(id)?.to_string())
        }
    }
}

/// Refuses a volume of that name that is another one. One that was made of another has its size, within what is asked for.
fn check_same(there: &Volume, given: &str, wanted: &VolumeSpec, limit: i64) -> Result<(), Refused> {
    let name = there.name_any();
    if there.metadata.deletion_timestamp.is_some() {
        return Err(Refused::NotYet(format!("volume {name} is being removed: ask again")));
    }
    let kept = there.annotations().get(GIVEN_NAME);
    if kept.is_some_and(|kept| kept != given) {
        return Err(Refused::Different(format!(
            "the name {name} is taken by volume {}",
            kept.map_or("", |k| k)
        )));
    }
    // It may not have grown to what it was asked for with yet.
    let asked = there.annotations().get(ASKED_SIZE).and_then(|asked| asked.parse().ok());
    let size = there.spec.size.max(asked.map(Int64Text).unwrap_or_default());
    if size < wanted.size || limit > 0 && size.0 > limit {
        return Err(Refused::Different(format!(
            "volume {name} exists with {size} bytes: {} at least are asked for, and {} at most",
            wanted.size,
            if limit == 0 { "any number".to_owned() } else { limit.to_string() }
        )));
    }
    if there.spec.migratable != wanted.migratable {
        return Err(Refused::Different(format!(
            "volume {name} exists and {}, unlike what is asked for",
            if there.spec.migratable { "migrates" } else { "does not migrate" }
        )));
    }
    if there.spec.data_source != wanted.data_source {
        return Err(Refused::Different(format!(
            "volume {name} exists and is made of {:?}, not of {:?}",
            there.spec.data_source, wanted.data_source
        )));
    }
    Ok(())
}

/// The volume once it can be attached and holds what it was made of.
fn is_made(volume: Option<&Volume>) -> Result<Option<Volume>, Refused> {
    let Some(volume) = volume else {
        return Err(Refused::NotYet("the volume was removed meanwhile".to_owned()));
    };
    let status = volume.status.clone().unwrap_or_default();
    let is_there = matches!(status.state, VolumeState::Detached | VolumeState::Attached);
    let is_filled = volume.spec.data_source.is_empty() || status.clone_status.state == CLONED;
    if is_there && is_filled {
        return Ok(Some(volume.clone()));
    }
    if status.state == VolumeState::Creating
        && let Some(condition) = status.conditions.get_condition(SCHEDULED).filter(|c| !c.is_true())
    {
        return Err(match condition.reason.as_str() {
            NOT_BUILT => Refused::Precondition(condition.message.clone()),
            // It begins by itself once somebody has decided about that data, and no other node has room for it. The volume stays:
            // whoever restores it may have made it before its replicas.
            DATA_LEFT => Refused::NotYet(condition.message.clone()),
            _ => Refused::Exhausted(condition.message.clone()),
        });
    }
    Ok(None)
}

/// The answer about a new volume.
fn told(volume: &Volume, request: &CreateVolumeRequest, accessible_topology: Vec<Topology>) -> Told {
    let context: HashMap<String, String> =
        request.parameters.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    Told {
        capacity_bytes: volume.spec.size.0,
        volume_id: volume.name_any(),
        volume_context: context,
        content_source: request.volume_content_source.clone(),
        accessible_topology,
    }
}

/// Where a volume is from, as an orchestrator hears it.
pub(super) fn content_source(volume: &Volume) -> Option<VolumeContentSource> {
    use crate::proto::csi::volume_content_source::{SnapshotSource, VolumeSource};
    let source = &volume.spec.data_source;
    let kind = if let Some(id) = source.strip_prefix("vol://") {
        Source::Volume(VolumeSource { volume_id: id.to_owned() })
    } else {
        let handle = SnapshotHandle::parse(source)?;
        Source::Snapshot(SnapshotSource { snapshot_id: handle.to_string() })
    };
    Some(VolumeContentSource { r#type: Some(kind) })
}
