//! What the leader does: volumes, their attachments, settings, and what stands for all nodes.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{Node as KubeNode, Secret};
use kube::api::ListParams;
use kube::core::object::HasSpec;
use kube::{Api, Resource, ResourceExt};
use tokio::time::Instant;

use super::cache::{Global, Key};
use super::desk::{Done, Kind, ReconcileError};
use super::failures::Failures;
use super::key::{create_key, key_secret};
use super::lead::Lead;
use super::pods::remounts;
use super::processes::engines_of;
use super::queue::Outcome;
use super::snapshots::confirm_volume_goes;
use super::{Context, capacity};
use crate::api::{
    AttachmentTicket, Engine, Node, Replica, Setting, SettingStatus, Snapshot, TicketType, Volume,
    VolumeAttachment, VolumeAttachmentSpec, VolumeAttachmentStatus,
};
use crate::plan::snapshot::{FOR_CLONE, Ticket};
use crate::plan::trim::pending;
use crate::plan::volume::{self, Action, CLONED, CloneSource, Filling, Source, Wish};
use crate::plan::{FINALIZER, VOLUME_LABEL, attachment, snapshot, written};
use crate::settings::definition;

/// The ticket of one of our own controllers.
fn ticket_id(kind: TicketType) -> String {
    kind.to_string()
}

/// Looks at one volume.
pub(super) async fn volume(context: &Context, lead: &Lead, name: &str) -> Done<Outcome> {
    let cache = &lead.cache;
    let Some(volume) = cache.volumes.get(name) else {
        remounts(lead).forget(name);
        failures(lead).see(name, std::iter::empty(), Instant::now());
        return forget_left(context, lead, name).await;
    };
    let engines = cache.engines.of(name);
    let (engine, second) = volume::pair(&volume, engines.iter().map(Arc::as_ref));
    let replicas = cache.replicas.of(name);
    let attachment = cache.attachments.get(name);
    let snapshots = context.cache.snapshots.of(name);
    let origin = origin(context, cache, &volume);
    let left = cache.orphans.of(name);
    let picture = lead.picture(context);
    let lately_failed = failures(lead).see(name, replicas.iter().map(Arc::as_ref), Instant::now());
    let decide = |filling: &Filling| {
        volume::plan(&volume::Observed {
            volume: &volume,
            engine,
            second,
            replicas: replicas.iter().map(Arc::as_ref).collect(),
            attachment: attachment.as_deref(),
            source: origin.as_ref().map(|o| CloneSource {
                volume: o.0.as_deref(),
                snapshot: o.1.as_deref(),
                replicas: o.2.iter().map(Arc::as_ref).collect(),
            }),
            snapshots: snapshots.len(),
            left: left.iter().map(Arc::as_ref).collect(),
            cluster: &picture.cluster,
            filling,
            lately_failed: &lately_failed,
            disk_paths: &picture.disk_paths,
            nodes_up: &picture.up,
            settings: &picture.settings,
            image: &context.options.image,
            now: context.desk.now(),
        })
    };
    let actions = lead.decide_rebuilds(name, decide);
    if remounts(lead).is_open(&volume) {
        context.news.tell([Key::Remount(name.to_owned())]);
    }
    let version = volume.resource_version();
    let mut hands = Hands { context, lead, volume: &volume, version, outcome: Outcome::Done };
    for action in actions {
        // Another one may lead by now, if the action before had to wait.
        context.confirm_leads(lead)?;
        tracing::debug!(volume = name, ?action, "volume");
        hands.carry_out(action, &engines, &replicas, attachment.as_deref()).await?;
    }
    let outcome = hands.outcome;
    keep_attached_for_snapshots(context, lead, &volume).await?;
    Ok(outcome)
}

fn failures(lead: &Lead) -> MutexGuard<'_, Failures> {
    lead.failures.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forgets what a volume that is gone has left on nodes that are gone, too: nobody else is left to finish it. What is on other
/// nodes their managers finish.
async fn forget_left(context: &Context, lead: &Lead, name: &str) -> Done<Outcome> {
    let replicas = lead.cache.replicas.of(name);
    let lost =
        volume::lost(replicas.iter().map(Arc::as_ref), &lead.picture(context).cluster, &context.nodes_up());
    if lost.is_empty() || context.desk.api::<Volume>().get_opt(name).await?.is_some() {
        return Ok(Outcome::Done);
    }
    for replica in lost {
        confirm_gone(context, &replica.spec.node_id).await?;
        tracing::info!(replica = replica.name_any(), node = replica.spec.node_id, "forgotten with its node");
        forget(context, replica).await?;
    }
    Ok(Outcome::Done)
}

type Origin = (Option<Arc<Volume>>, Option<Arc<Snapshot>>, Vec<Arc<Replica>>);

/// What a volume is being cloned from: the volume, its snapshot, its replicas.
fn origin(context: &Context, cache: &Global, volume: &Volume) -> Option<Origin> {
    let source = Source::parse(&volume.spec.data_source)?;
    let is_done = volume.status.as_ref().is_some_and(|s| s.clone_status.state == CLONED);
    if is_done {
        return None;
    }
    let snapshot = context.cache.snapshots.get(&source.snapshot_name(&volume.name_any()));
    Some((cache.volumes.get(source.volume), snapshot, cache.replicas.of(source.volume)))
}

/// Carries out a volume's actions.
struct Hands<'a> {
    context: &'a Context,
    lead: &'a Lead,
    volume: &'a Volume,
    /// The volume's version: as read, then as written.
    version: Option<String>,
    outcome: Outcome,
}

impl Hands<'_> {
    async fn carry_out(
        &mut self,
        action: Action,
        engines: &[Arc<Engine>],
        replicas: &[Arc<Replica>],
        attachment: Option<&VolumeAttachment>,
    ) -> Done {
        let desk = &self.context.desk;
        match action {
            Action::AddFinalizer => {
                // The key is there before anything that needs it.
                create_key(desk, self.volume).await?;
                self.version = desk.set_finalizer(self.volume, true).await?;
            }
            Action::RemoveFinalizer => {
                self.confirm_empty().await?;
                self.context.confirm_leads(self.lead)?;
                desk.delete::<Secret>(&key_secret(&self.volume.name_any())).await?;
                self.version = desk.set_finalizer(self.volume, false).await?;
            }
            Action::CreateAttachment => self.create_attachment().await?,
            Action::CreateEngine(name, spec) => desk.create(&self.owned(Engine::new(&name, *spec))).await?,
            Action::CreateReplica(name, spec) => {
                let mut replica = self.owned(Replica::new(&name, *spec));
                replica.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
                desk.create(&replica).await?;
            }
            Action::SetEngine(name, spec) => {
                if let Some(engine) = engines.iter().find(|e| e.name_any() == name) {
                    desk.set_spec(engine.as_ref(), engine.spec(), &*spec).await?;
                }
            }
            Action::SetReplica(name, spec) => {
                if let Some(replica) = replicas.iter().find(|r| r.name_any() == name) {
                    desk.set_spec(replica.as_ref(), replica.spec(), &*spec).await?;
                }
            }
            Action::DeleteEngine(name) => {
                if let Some(engine) = engines.iter().find(|e| e.name_any() == name) {
                    desk.delete_read(engine.as_ref()).await?;
                }
            }
            Action::DeleteReplica(name) => {
                if let Some(replica) = replicas.iter().find(|r| r.name_any() == name) {
                    self.confirm(engines, replicas).await?;
                    desk.delete_read(replica.as_ref()).await?;
                }
            }
            Action::ForgetReplica(name) => {
                if let Some(replica) = replicas.iter().find(|r| r.name_any() == name) {
                    confirm_gone(self.context, &replica.spec.node_id).await?;
                    tracing::info!(replica = name, node = replica.spec.node_id, "forgotten with its node");
                    desk.delete_same(replica.as_ref()).await?;
                    forget(self.context, replica.as_ref()).await?;
                }
            }
            Action::DeleteAttachment => {
                if let Some(attachment) = attachment {
                    desk.delete_same(attachment).await?;
                }
            }
            Action::DeleteSnapshots => self.delete_snapshots().await?,
            Action::CreateSourceSnapshot(name, spec) => {
                let mut snapshot = Snapshot::new(&name, *spec);
                snapshot.labels_mut().insert(FOR_CLONE.to_owned(), self.volume.name_any());
                desk.create(&snapshot).await?;
            }
            Action::DeleteSourceSnapshot(name) => desk.delete::<Snapshot>(&name).await?,
            Action::Ticket(kind, wish) => set_ticket(self.context, attachment, kind, wish).await?,
            Action::SetStatus(status) => {
                let old = self.volume.status.clone().unwrap_or_default();
                let version = self.version.clone();
                desk.set_status::<Volume, _>(&self.volume.name_any(), version.as_deref(), &old, &*status)
                    .await?;
            }
            Action::Tell(event) => desk.tell(self.volume, &event).await,
            Action::LookAgain(after) => self.outcome = Outcome::Again(after),
        }
        Ok(())
    }

    /// Data goes only if the API server itself has all that was decided on: the volume, its engines, its other replicas. Of a
    /// volume that goes, all goes.
    async fn confirm(&self, engines: &[Arc<Engine>], replicas: &[Arc<Replica>]) -> Done {
        if self.volume.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let (desk, name) = (&self.context.desk, self.volume.name_any());
        let volume = desk.api::<Volume>().get_opt(&name).await?;
        let of_volume = ListParams::default().fields(&format!("spec.volumeName={name}"));
        let fresh = desk.api::<Replica>().list(&of_volume).await?.items;
        let same = volume.is_some_and(|v| v.resource_version() == self.version)
            && versions(replicas.iter().map(Arc::as_ref)) == versions(&fresh)
            && versions(engines.iter().map(Arc::as_ref)) == versions(&engines_of(desk, &name).await?);
        if same { Ok(()) } else { Err(ReconcileError::Stale) }
    }

    /// A volume goes only after the last of its replicas, by the API server itself: one that is left without it keeps its data
    /// (`crate::plan::replica::fate`).
    async fn confirm_empty(&self) -> Done {
        let of_volume = ListParams::default().fields(&format!("spec.volumeName={}", self.volume.name_any()));
        let left = self.context.desk.api::<Replica>().list(&of_volume).await?.items;
        if left.is_empty() { Ok(()) } else { Err(ReconcileError::Stale) }
    }

    /// An object that goes with the volume.
    fn owned<K: Kind>(&self, mut object: K) -> K {
        let name = self.volume.name_any();
        object.meta_mut().labels.get_or_insert_default().insert(VOLUME_LABEL.to_owned(), name);
        object.meta_mut().owner_references = self.volume.controller_owner_ref(&()).map(|owner| vec![owner]);
        object
    }

    async fn create_attachment(&self) -> Done {
        let name = self.volume.name_any();
        let spec = VolumeAttachmentSpec { volume: name.clone(), ..VolumeAttachmentSpec::default() };
        self.context.desk.create(&self.owned(VolumeAttachment::new(&name, spec))).await
    }

    /// What goes with a volume that is deleted goes only if the API server itself has no other one of its name, which was made since: news of
    /// that may be late. What is to go was read before.
    async fn confirm_no_other(&self) -> Done {
        let found = self.context.desk.api::<Volume>().get_opt(&self.volume.name_any()).await?;
        let is_same = found.is_none_or(|found| found.uid() == self.volume.uid());
        if is_same { Ok(()) } else { Err(ReconcileError::Stale) }
    }

    async fn delete_snapshots(&self) -> Done {
        let snapshots = self.context.cache.snapshots.of(&self.volume.name_any());
        self.confirm_no_other().await?;
        for snapshot in snapshots {
            if snapshot.metadata.deletion_timestamp.is_none() {
                self.context.desk.delete_same(snapshot.as_ref()).await?;
            } else {
                forget(self.context, snapshot.as_ref()).await?;
            }
        }
        Ok(())
    }
}

/// What was on a node is forgotten only if Kubernetes itself has no such node, or there is none of ours. A replica that Longhorn
/// found no place for is on none, and the API server cannot be asked for that.
async fn confirm_gone(context: &Context, node: &str) -> Done {
    if node.is_empty() {
        return Ok(());
    }
    let nodes: Api<KubeNode> = Api::all(context.desk.client.clone());
    let is_gone =
        context.desk.api::<Node>().get_opt(node).await?.is_none() || nodes.get_opt(node).await?.is_none();
    if is_gone { Ok(()) } else { Err(ReconcileError::Stale) }
}

/// Which objects there are, each as it is.
fn versions<'a, K: Kind + 'a>(all: impl IntoIterator<Item = &'a K>) -> BTreeMap<String, Option<String>> {
    all.into_iter().map(|object| (object.name_any(), object.resource_version())).collect()
}

/// Takes the finalizer off an object that nobody else is left to finish. Another one of its name is left alone.
async fn forget<K: Kind>(context: &Context, object: &K) -> Done {
    let fresh = context.desk.api::<K>().get_opt(&object.name_any()).await?;
    let Some(fresh) = fresh.filter(|fresh| fresh.uid() == object.uid()) else { return Ok(()) };
    context.desk.set_finalizer(&fresh, false).await.map(drop)
}

/// Puts a ticket of our own on an attachment, or takes it off.
async fn set_ticket(
    context: &Context,
    attachment: Option<&VolumeAttachment>,
    kind: TicketType,
    wish: Option<Wish>,
) -> Done {
    let Some(attachment) = attachment else { return Ok(()) };
    let (mut spec, id) = (attachment.spec.clone(), ticket_id(kind));
    match wish {
        Some(Wish { node: node_id, parameters }) => {
            let ticket =
                AttachmentTicket { id: id.clone(), kind, node_id, parameters, ..AttachmentTicket::default() };
            spec.attachment_tickets.insert(id, ticket);
        }
        None => drop(spec.attachment_tickets.remove(&id)),
    }
    context.desk.set_spec(attachment, &attachment.spec, &spec).await.map(drop)
}

/// Looks at the attachment of a volume.
pub(super) async fn attachment(context: &Context, lead: &Lead, name: &str) -> Done<Outcome> {
    let Some(attachment) = lead.cache.attachments.get(name) else { return Ok(Outcome::Done) };
    let volume = lead.cache.volumes.get(&attachment.spec.volume);
    let decided = attachment::plan(&attachment, volume.as_deref(), &written(context.desk.now()));
    let old = attachment.status.clone().unwrap_or_default();
    let new = VolumeAttachmentStatus { attachment_ticket_statuses: decided.tickets };
    let version = attachment.resource_version();
    context.desk.set_status::<VolumeAttachment, _>(name, version.as_deref(), &old, &new).await?;
    if let (Some(volume), Some(target)) = (volume, decided.target) {
        let mut spec = volume.spec.clone();
        spec.node_id = target.node;
        spec.migration_node_id = target.migration;
        spec.disable_frontend = target.disable_frontend;
        if !target.by.is_empty() {
            spec.last_attached_by = target.by;
        }
        context.desk.set_spec(volume.as_ref(), &volume.spec, &spec).await?;
    }
    Ok(Outcome::Done)
}

/// A snapshot and its volume, where no engine runs for it.
fn observed<'a>(
    context: &Context,
    snapshot: &'a Snapshot,
    volume: Option<&'a Volume>,
) -> snapshot::Observed<'a> {
    snapshot::Observed { in_use: false, snapshot, volume, engine: None, now: context.desk.now() }
}

/// Has a volume that rests attached for as long as a snapshot of it waits for an engine. Decided with the volume: the last one
/// that it was attached for may be gone by now.
async fn keep_attached_for_snapshots(context: &Context, lead: &Lead, volume: &Volume) -> Done {
    if volume.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    let (cache, name) = (&lead.cache, volume.name_any());
    let snapshots = context.cache.snapshots.of(&name);
    let needed = snapshots.iter().any(|s| snapshot::needs_engine(&observed(context, s, Some(volume))));
    let attachment = cache.attachments.get(&name);
    let id = ticket_id(TicketType::Snapshot);
    let asked =
        attachment.as_ref().and_then(|a| a.spec.attachment_tickets.get(&id)).map(|t| t.node_id.as_str());
    let near: Vec<String> = cache.replicas.of(&name).iter().map(|r| r.spec.node_id.clone()).collect();
    let rests = volume.spec.node_id.is_empty();
    let wish = match snapshot::ticket(needed, asked, rests, &near, &context.nodes_up()) {
        Ticket::Leave => return Ok(()),
        Ticket::Ask(node) => Some(Wish { node, ..Wish::default() }),
        Ticket::Drop => None,
    };
    set_ticket(context, attachment.as_deref(), TicketType::Snapshot, wish).await
}

/// Looks at a snapshot whose volume goes, or is gone: it is let go with it.
pub(super) async fn snapshot(context: &Context, lead: &Lead, name: &str) -> Done<Outcome> {
    let Some(snapshot) = context.cache.snapshots.get(name) else { return Ok(Outcome::Done) };
    let volume = lead.cache.volumes.get(&snapshot.spec.volume);
    let volume_stays = volume.as_ref().is_some_and(|v| v.metadata.deletion_timestamp.is_none());
    let observed = observed(context, &snapshot, volume.as_deref());
    if !volume_stays && snapshot::plan(&observed).contains(&snapshot::Action::RemoveFinalizer) {
        confirm_volume_goes(context, &snapshot.spec.volume).await?;
        forget(context, snapshot.as_ref()).await?;
    }
    Ok(Outcome::Done)
}

/// Looks at an orphan: one that is deleted and whose node is gone for good has nobody else to let it go.
pub(super) async fn orphan(context: &Context, lead: &Lead, name: &str) -> Done<Outcome> {
    let Some(orphan) = lead.cache.orphans.get(name) else { return Ok(Outcome::Done) };
    let node = &orphan.spec.node_id;
    let is_lost = || volume::is_gone(node, &lead.picture(context).cluster, &context.nodes_up());
    if orphan.metadata.deletion_timestamp.is_some() && is_lost() {
        confirm_gone(context, node).await?;
        tracing::info!(orphan = name, node, "forgotten with its node");
        forget(context, orphan.as_ref()).await?;
    }
    Ok(Outcome::Done)
}

/// Says of a setting whether its value is in force.
pub(super) async fn setting(context: &Context, name: &str) -> Done<Outcome> {
    let Some(setting) = context.cache.settings.get(name) else { return Ok(Outcome::Done) };
    let applied = definition(name).is_some_and(|d| d.idle.is_none() && d.check(&setting.spec.value).is_ok());
    let old = setting.status.clone().unwrap_or_default();
    let new = SettingStatus { applied };
    let version = setting.resource_version();
    context.desk.set_status::<Setting, _>(name, version.as_deref(), &old, &new).await?;
    if name == capacity::SETTING { capacity::look(context).await } else { Ok(Outcome::Done) }
}

/// What has to be looked at anew when nodes come or go, or when nobody may have looked for a while.
pub(super) fn everything(context: &Context, lead: &Lead) -> Vec<Key> {
    let (own, cache) = (&context.cache, &lead.cache);
    let volumes = cache.volumes.all().into_iter().map(|v| Key::Volume(v.name_any()));
    let left = cache.replicas.all().into_iter().filter(|r| cache.volumes.get(&r.spec.volume_name).is_none());
    let left = left.map(|r| Key::Volume(r.spec.volume_name.clone()));
    let attachments = cache.attachments.all().into_iter().map(|a| Key::Attachment(a.name_any()));
    let settings = own.settings.all().into_iter().map(|s| Key::Setting(s.name_any()));
    let snapshots = own.snapshots.all().into_iter().map(|s| Key::Snapshot(s.name_any()));
    let orphans = cache.orphans.all().into_iter().map(|o| Key::Orphan(o.name_any()));
    let trims = cache.volumes.all().into_iter().filter(|v| pending(v).is_some());
    let trims = trims.map(|v| Key::Trim(v.name_any()));
    volumes
        .chain(left)
        .chain(trims)
        .chain(attachments)
        .chain(settings)
        .chain(snapshots)
        .chain(orphans)
        .collect()
}
