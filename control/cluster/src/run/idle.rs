//! Longhorn's resources that wait for Longhorn when they are deleted: it has put its finalizer on all that it made, and is not there to
//! take it off. So that they go when somebody deletes them, or what they belong to, the leader takes it off then. Some are of kinds that
//! nothing here acts on: backups, recurring jobs, backing images and the like stay as they are, and what they stand for elsewhere, as a
//! backup in its store, stays. The others are of kinds that go at once where they were made here: who deletes one of them waits for
//! nothing, or has waited before.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use kube::ResourceExt;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use tokio::time::MissedTickBehavior;

use super::desk::{Desk, Kind};
use crate::api::{
    BackingImage, BackingImageDataSource, BackingImageManager, Backup, BackupBackingImage, BackupTarget,
    BackupVolume, Engine, EngineImage, InstanceManager, Node, RecurringJob, ShareManager, SupportBundle,
    SystemBackup, SystemRestore, VolumeAttachment,
};
use crate::plan::FINALIZER;

/// How long after a failure it is tried again.
const AGAIN: Duration = Duration::from_secs(30);

/// What lets the resources of each kind go, for as long as it is polled.
pub(super) fn let_go(desk: &Desk) -> Vec<BoxFuture<'static, ()>> {
    fn of<K: Kind + Send + Sync + 'static>(desk: &Desk) -> BoxFuture<'static, ()> {
        // Of an engine that is all that counts here, and its status changes often.
        Box::pin(follow::<PartialObjectMeta<K>>(desk.clone()))
    }
    vec![
        of::<BackingImage>(desk),
        of::<BackingImageDataSource>(desk),
        of::<BackingImageManager>(desk),
        of::<Backup>(desk),
        of::<BackupBackingImage>(desk),
        of::<BackupTarget>(desk),
        of::<BackupVolume>(desk),
        of::<Engine>(desk),
        of::<EngineImage>(desk),
        of::<InstanceManager>(desk),
        of::<Node>(desk),
        of::<RecurringJob>(desk),
        of::<ShareManager>(desk),
        of::<SupportBundle>(desk),
        of::<SystemBackup>(desk),
        of::<SystemRestore>(desk),
        of::<VolumeAttachment>(desk),
    ]
}

async fn follow<K: Kind + Send + Sync + 'static>(desk: Desk) {
    let events = watcher(desk.watched::<K>(), watcher::Config::default()).backoff(desk.patience::<K>());
    let mut objects = std::pin::pin!(events.applied_objects());
    // What could not be let go of keeps no other: it is tried again beside them, as it was told of last.
    let mut left: BTreeMap<String, K> = BTreeMap::new();
    let mut again = tokio::time::interval(AGAIN);
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let object = tokio::select! {
            biased;
            object = objects.next() => object,
            _ = again.tick() => {
                for (name, object) in std::mem::take(&mut left) {
                    if !release(&desk, &object).await {
                        left.insert(name, object);
                    }
                }
                continue;
            }
        };
        match object {
            None => return,
            Some(Ok(object)) => {
                let name = object.name_any();
                left.remove(&name);
                if is_held(&object) && !release(&desk, &object).await {
                    left.insert(name, object);
                }
            }
            Some(Err(e)) => {
                tracing::debug!(kind = %K::kind(&()), error = %e, "the watch was lost and is begun again");
                // The watcher itself waits longer and longer; this only bounds the log.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Somebody has deleted it, and it waits for Longhorn.
fn is_held<K: Kind>(object: &K) -> bool {
    object.meta().deletion_timestamp.is_some() && object.finalizers().iter().any(|f| f == FINALIZER)
}

/// False if it has to be tried again: another version of it is told of by itself.
async fn release<K: Kind>(desk: &Desk, object: &K) -> bool {
    let name = object.name_any();
    match desk.set_finalizer(object, false).await {
        Err(super::desk::ReconcileError::Stale) => true,
        Err(e) => {
            tracing::warn!(kind = %K::kind(&()), name, error = %e, "its finalizer stays for now");
            false
        }
        Ok(_) => {
            tracing::info!(kind = %K::kind(&()), name, "was deleted, and waits for nobody here: its finalizer is gone");
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use kube::api::ObjectMeta;

    use super::*;

    #[test]
    fn only_what_is_deleted_and_waits_is_let_go() {
        let target = |deleted: bool, finalizer: &str| {
            let mut target = BackupTarget::new("default", Default::default());
            target.metadata = ObjectMeta {
                deletion_timestamp: deleted.then(|| Time(Default::default())),
                finalizers: Some(vec![finalizer.to_owned()]),
                ..target.metadata
            };
            target
        };
        assert!(is_held(&target(true, FINALIZER)));
        assert!(!is_held(&target(false, FINALIZER)));
        assert!(!is_held(&target(true, "somebody-else")));
    }
}
