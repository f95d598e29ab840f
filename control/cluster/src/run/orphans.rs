//! Tells of what lies on this node and no resource knows, and removes what a user let go.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use kube::ResourceExt;
use kube::api::ListParams;
use tokio::time::Instant;

use super::Context;
use super::desk::Done;
use crate::agent::DiskView;
use crate::api::{Engine, Node, Orphan, Replica, Volume};
use crate::plan::orphan::{self, Action, DiskContent, may_be_missed, volume_of, volume_of_directory};
use crate::plan::{FINALIZER, volume_of_engine};

/// Data that its volume misses is not asked about again sooner.
const MISSED: Duration = Duration::from_secs(60);

/// Since when this manager has seen each orphan of its node, by name, without anybody who wants it. It is not kept: what nobody knows
/// when a manager starts may be about to be restored.
#[derive(Debug, Default)]
pub(super) struct Seen(BTreeMap<String, Instant>);

impl Seen {
    /// For how long each of these was seen.
    fn see(&mut self, orphans: &[Arc<Orphan>], now: Instant) -> BTreeMap<String, Duration> {
        let names: BTreeSet<String> = orphans.iter().map(|o| o.name_any()).collect();
        self.0.retain(|name, _| names.contains(name));
        for name in names {
            self.0.entry(name).or_insert(now);
        }
        self.0.iter().map(|(name, since)| (name.clone(), now.saturating_duration_since(*since))).collect()
    }

    /// Somebody may want what this one stands for.
    fn is_missed(&mut self, orphan: &str, now: Instant) {
        self.0.insert(orphan.to_owned(), now + MISSED);
    }
}

/// What resources know, wherever they are.
struct Known {
    /// Names of replicas' directories.
    directories: BTreeSet<String>,
    /// Names of engines and replicas.
    instances: BTreeSet<String>,
}

impl Known {
    fn add(&mut self, replica: &Replica) {
        self.directories.insert(replica.spec.data_directory_name.clone());
        self.instances.insert(replica.name_any());
    }

    /// What is known of this node.
    fn here(context: &Context) -> Self {
        let engines = context.cache.engines.all();
        let instances = engines.iter().map(|e| e.name_any()).collect();
        let mut known = Self { directories: BTreeSet::new(), instances };
        context.cache.replicas.all().iter().for_each(|replica| known.add(replica));
        known
    }

    /// What is known of everything: a disk may have come from another node, and a process may have been left behind by an
    /// engine that went to one. Directories go by their names, which no two replicas of a volume have.
    async fn everywhere(
        context: &Context,
        disks: &[DiskContent],
        processes: &BTreeSet<String>,
    ) -> Done<Self> {
        let mut known = Self::here(context);
        for disk in disks {
            let on_it = ListParams::default().fields(&format!("spec.diskID={}", disk.uuid));
            let replicas = context.desk.api::<Replica>().list(&on_it).await?;
            replicas.items.iter().for_each(|replica| known.add(replica));
        }
        // The disk may have lost its identity: its replicas name another one.
        let unknown = disks.iter().flat_map(|d| &d.directories).filter(|d| !known.directories.contains(*d));
        let volumes: BTreeSet<&str> = unknown.filter_map(|d| volume_of_directory(d)).collect();
        for volume in volumes {
            let of_volume = ListParams::default().fields(&format!("spec.volumeName={volume}"));
            let replicas = context.desk.api::<Replica>().list(&of_volume).await?;
            replicas.items.iter().for_each(|replica| known.add(replica));
        }
        for process in processes.difference(&known.instances.clone()) {
            let is_known = if volume_of_engine(process).is_some() {
                context.desk.api::<Engine>().get_opt(process).await?.is_some()
            } else {
                context.desk.api::<Replica>().get_opt(process).await?.is_some()
            };
            if is_known {
                known.instances.insert(process.clone());
            }
        }
        Ok(known)
    }
}

/// Looks at what lies on the disks of the node, and at its processes.
pub(super) async fn look(
    context: &Context,
    node: &Node,
    disks: &BTreeMap<String, Result<DiskView, String>>,
    processes: &BTreeSet<String>,
) -> Done {
    let content = disks.iter().filter_map(|(disk, view)| {
        let (view, spec) = (view.as_ref().ok()?, node.spec.disks.get(disk)?);
        let (uuid, directories) = (view.uuid.clone(), view.directories.clone());
        Some(DiskContent { uuid, path: spec.path.clone(), directories })
    });
    let content: Vec<DiskContent> = content.collect();
    let orphans = context.cache.orphans.all();
    let deletion = context.cache.settings().orphan_deletion();
    let seen = seen_by(context).see(&orphans, Instant::now());
    let plan = |known: &Known| {
        orphan::plan(&orphan::Observed {
            node: &context.options.node,
            disks: &content,
            known: &known.directories,
            processes,
            instances: &known.instances,
            orphans: &orphans.iter().map(AsRef::as_ref).collect::<Vec<_>>(),
            seen: &seen,
            deletion: &deletion,
            now: context.desk.now(),
        })
    };
    let mut actions = plan(&Known::here(context));
    // Nothing is called an orphan, or removed as one, before the API server itself was asked for whom it is.
    if actions.iter().any(|action| !matches!(action, Action::Forget(_))) {
        actions = plan(&Known::everywhere(context, &content, processes).await?);
    }
    let mut first = Ok(());
    for action in actions {
        tracing::info!(?action, "orphan");
        // What one is kept by, a disk that fails for instance, keeps no other.
        let done = carry_out(context, action).await;
        if let Err(e) = &done {
            tracing::warn!(error = %e, "an orphan stays as it is");
        }
        first = first.and(done);
    }
    first
}

async fn carry_out(context: &Context, action: Action) -> Done {
    match action {
        Action::Create(name, spec) => {
            let mut object = Orphan::new(&name, *spec);
            object.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
            context.desk.create(&object).await
        }
        Action::Forget(name) => let_go(context, &name).await,
        Action::Delete(name) => delete_by_itself(context, &name).await,
        Action::RemoveData { orphan, disk_path, directory } => {
            context.agent.remove_directory(disk_path.into(), directory).await?;
            let_go(context, &orphan).await
        }
        Action::Stop { orphan, process } => {
            context.agent.stop(&process).await?;
            let_go(context, &orphan).await
        }
    }
}

fn seen_by(context: &Context) -> MutexGuard<'_, Seen> {
    context.orphans_seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Deletes an orphan, and what it stands for with it, unless that may be missed.
async fn delete_by_itself(context: &Context, name: &str) -> Done {
    let Some(orphan) = context.cache.orphans.get(name) else { return Ok(()) };
    if let Some(volume) = volume_of(&orphan)
        && is_missed(context, volume).await?
    {
        tracing::info!(orphan = name, volume, "it stays: its volume has not all of its replicas");
        seen_by(context).is_missed(name, Instant::now());
        return Ok(());
    }
    context.desk.delete_same(orphan.as_ref()).await
}

/// True if data of a volume that no Replica names may be missed, by the API server itself.
async fn is_missed(context: &Context, volume: &str) -> Done<bool> {
    let Some(resource) = context.desk.api::<Volume>().get_opt(volume).await? else { return Ok(false) };
    let of_volume = ListParams::default().fields(&format!("spec.volumeName={volume}"));
    let replicas = context.desk.api::<Replica>().list(&of_volume).await?.items;
    Ok(may_be_missed(&resource, &replicas))
}

async fn let_go(context: &Context, name: &str) -> Done {
    let Some(orphan) = context.cache.orphans.get(name) else { return Ok(()) };
    context.desk.set_finalizer(orphan.as_ref(), false).await?;
    context.desk.delete::<Orphan>(name).await
}
