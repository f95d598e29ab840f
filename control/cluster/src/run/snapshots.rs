//! Snapshots of the volumes whose engines run on this node (`crate::plan::snapshot`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use kube::api::ListParams;

use super::Context;
use super::cache::Key;
use super::desk::{Done, ReconcileError};
use super::processes::SOON;
use super::queue::Outcome;
use crate::agent::AgentError;
use crate::api::{Replica, Snapshot, Volume};
use crate::plan::snapshot::Refusal;
use crate::plan::snapshot::unnamed::unnamed;
use crate::plan::volume::{CLONED, pair};
use crate::plan::{Event, snapshot};

/// How often it is looked whether a deleted snapshot is still being copied: for hours perhaps, and each look asks for all clones.
const COPIED: Duration = Duration::from_secs(10);

/// How long a snapshot for which there was no room is left alone: that a head shrank, or a limit was raised, is no news of the chain.
const ROOM_AGAIN: Duration = Duration::from_secs(30);

/// The same where its file system is frozen for it, and those who write to it wait, before it is known that there is no room.
const ROOM_AGAIN_FROZEN: Duration = Duration::from_secs(600);

/// How long a file system that could not be frozen is left alone: whoever writes to it may have waited.
const FREEZE_AGAIN: Duration = Duration::from_secs(15);

/// Looks at all snapshots of a volume, after news of its engine, and names those that nobody has named.
pub(super) async fn look_at_all(context: &Context, volume: &str) -> Done<Outcome> {
    let cache = &context.cache;
    // What cannot be named keeps none of the others from being looked at.
    context.news.tell(cache.snapshots.of(volume).into_iter().map(|s| Key::Snapshot(s.name_any())));
    let engines = cache.engines.of(volume);
    if let Some(volume) = cache.volumes.get(volume)
        && let Some(engine) = pair(&volume, engines.iter().map(Arc::as_ref)).0
    {
        for snapshot in unnamed(&volume, engine, |name| cache.snapshots.get(name).is_some()) {
            tracing::debug!(snapshot = snapshot.name_any(), "named");
            context.desk.create(&snapshot).await?;
        }
    }
    Ok(Outcome::Done)
}

/// Looks at a snapshot of a volume whose engine runs here.
pub(super) async fn look(context: &Context, name: &str) -> Done<Outcome> {
    let cache = &context.cache;
    let Some(resource) = cache.snapshots.get(name) else { return Ok(Outcome::Done) };
    let engines = cache.engines.of(&resource.spec.volume);
    // A volume that is on its way elsewhere is the leader's affair.
    let Some(volume) = cache.volumes.get(&resource.spec.volume) else { return Ok(Outcome::Done) };
    let Some(engine) = pair(&volume, engines.iter().map(Arc::as_ref)).0 else { return Ok(Outcome::Done) };
    let engine_name = engine.name_any();
    let goes = resource.metadata.deletion_timestamp.is_some();
    if goes && volume.metadata.deletion_timestamp.is_some() {
        confirm_volume_goes(context, &resource.spec.volume).await?;
    }
    let in_use = goes && is_being_copied(context, &resource.spec.volume, name).await?;
    let actions = snapshot::plan(&snapshot::Observed {
        snapshot: &resource,
        volume: Some(&volume),
        engine: Some(engine),
        in_use,
        now: context.desk.now(),
    });
    let mut version = resource.resource_version();
    // Nothing of the snapshot itself changes when the copy ends.
    let mut outcome = if in_use { Outcome::Again(COPIED) } else { Outcome::Done };
    for action in actions {
        tracing::debug!(snapshot = name, ?action, "snapshot");
        match action {
            snapshot::Action::AddFinalizer => {
                version = context.desk.set_finalizer(resource.as_ref(), true).await?;
                if version.is_none() {
                    // It was deleted before anybody had begun with it, and news of that is late: it is not to be taken.
                    return Ok(Outcome::Done);
                }
            }
            snapshot::Action::RemoveFinalizer => {
                version = context.desk.set_finalizer(resource.as_ref(), false).await?;
            }
            snapshot::Action::Take => {
                let freeze = cache.settings().freezes(volume.spec.freeze_filesystem_for_snapshot);
                let labels = &resource.spec.labels;
                match context.agent.take_snapshot(&engine_name, name, labels, freeze).await {
                    Ok(()) => {}
                    Err(AgentError::NoRoom(why)) => {
                        say_refused(context, &resource, version.as_deref(), Refusal::NoRoom(&why)).await?;
                        return Ok(Outcome::Again(if freeze { ROOM_AGAIN_FROZEN } else { ROOM_AGAIN }));
                    }
                    Err(AgentError::NotFrozen(why)) => {
                        say_refused(context, &resource, version.as_deref(), Refusal::NotFrozen(&why)).await?;
                        return Ok(Outcome::Again(FREEZE_AGAIN));
                    }
                    Err(e) => return Err(e.into()),
                }
                context.news.tell([Key::Engine(engine_name.clone())]);
                outcome = Outcome::Again(SOON);
            }
            snapshot::Action::Remove => {
                if goes {
                    confirm_goes(context, &resource).await?;
                }
                context.agent.remove_snapshot(&engine_name, name).await?;
                context.news.tell([Key::Engine(engine_name.clone())]);
                outcome = Outcome::Again(SOON);
            }
            snapshot::Action::Forget => {
                // Without the finalizer nobody removes anything for it: should a snapshot of that name be there all the
                // same, it stays.
                context.desk.set_finalizer(resource.as_ref(), false).await?;
                context.desk.delete_same(resource.as_ref()).await?;
            }
            snapshot::Action::SetStatus(status) => {
                let old = resource.status.clone().unwrap_or_default();
                context.desk.set_status::<Snapshot, _>(name, version.as_deref(), &old, &*status).await?;
            }
        }
    }
    Ok(outcome)
}

/// A snapshot is removed only if the API server itself has its resource, and as one that goes: it may have been taken anew elsewhere, which
/// is heard late.
async fn confirm_goes(context: &Context, resource: &Snapshot) -> Done {
    let fresh = context.desk.api::<Snapshot>().get_opt(&resource.name_any()).await?;
    let is_it =
        |fresh: Snapshot| fresh.uid() == resource.uid() && fresh.metadata.deletion_timestamp.is_some();
    if fresh.is_some_and(is_it) { Ok(()) } else { Err(ReconcileError::Stale) }
}

/// What is of a volume that goes is let go of only if the API server itself has no volume of its name that stays: it may have been made
/// anew, which is heard late.
pub(super) async fn confirm_volume_goes(context: &Context, volume: &str) -> Done {
    let fresh = context.desk.api::<Volume>().get_opt(volume).await?;
    let goes = fresh.is_none_or(|fresh| fresh.metadata.deletion_timestamp.is_some());
    if goes { Ok(()) } else { Err(ReconcileError::Stale) }
}

/// Notes that the engine refused a snapshot: whoever waits for it hears so at once.
async fn say_refused(
    context: &Context,
    resource: &Snapshot,
    version: Option<&str>,
    refusal: Refusal<'_>,
) -> Done {
    let old = resource.status.clone().unwrap_or_default();
    let new = refusal.told(old.clone());
    if new != old {
        let message = refusal.why().to_owned();
        context.desk.tell(resource, &Event { warning: true, reason: "SnapshotRefused", message }).await;
    }
    context.desk.set_status::<Snapshot, _>(&resource.name_any(), version, &old, &new).await?;
    Ok(())
}

/// Volumes that are not yet what they are cloned from, and the snapshots of a volume that they are made of. Volumes of other nodes are in
/// no cache here.
async fn clones(context: &Context, volume: &str) -> Done<Vec<(String, String)>> {
    let fields = format!("status.cloneStatus.sourceVolume={volume}");
    let clones = context.desk.api::<Volume>().list(&ListParams::default().fields(&fields)).await?;
    let copied = |v: Volume| {
        let (name, stays) = (v.name_any(), v.metadata.deletion_timestamp.is_none());
        let clone = v.status.map(|s| s.clone_status).filter(|c| stays && c.state != CLONED)?;
        Some((name, clone.snapshot))
    };
    Ok(clones.items.into_iter().filter_map(copied).collect())
}

/// Snapshots of a volume that clones are made of, or are to be.
pub(super) async fn wanted_by_clones(context: &Context, volume: &str) -> Done<BTreeSet<String>> {
    Ok(clones(context, volume).await?.into_iter().map(|(_, snapshot)| snapshot).collect())
}

/// True while a clone is being copied from a snapshot that is deleted. One that has not begun does not begin any more
/// (`super::replicas`), and is not waited for: it may wait for room for ever.
async fn is_being_copied(context: &Context, volume: &str, snapshot: &str) -> Done<bool> {
    let copies = |replica: &Replica| replica.spec.clone_from.snapshot == snapshot;
    for (clone, _) in clones(context, volume).await?.into_iter().filter(|(_, of)| of == snapshot) {
        let of_clone = ListParams::default().fields(&format!("spec.volumeName={clone}"));
        if context.desk.api::<Replica>().list(&of_clone).await?.iter().any(copies) {
            return Ok(true);
        }
    }
    Ok(false)
}
