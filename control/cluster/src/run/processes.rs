//! What engines and replicas of this node have in common: a process, and a resource that names it.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use kube::api::ListParams;

use super::Context;
use super::cache::Key;
use super::desk::{Desk, Done, Kind, ReconcileError};
use super::shelf::{Item, Shelf};
use crate::api::Engine;
use crate::plan::{self, VOLUME_LABEL, volume_of_engine};

/// How often something that is on its way is looked at.
pub(super) const SOON: Duration = Duration::from_millis(500);

/// Processes of this node may have changed: those that did are looked at.
pub(super) async fn tell_processes(context: &Context) {
    let Ok(processes) = context.agent.processes().await else { return };
    let mut known = context.processes.lock().unwrap_or_else(PoisonError::into_inner);
    let before = std::mem::replace(&mut *known, processes);
    let differ = |name: &&String| before.get(*name) != known.get(*name);
    let names: BTreeSet<&String> = before.keys().chain(known.keys()).filter(differ).collect();
    context.news.tell(names.into_iter().filter_map(|name| {
        if volume_of_engine(name).is_some() {
            Some(Key::Engine(name.clone()))
        } else if name.contains("-r-") {
            Some(Key::Replica(name.clone()))
        } else {
            None
        }
    }));
}

/// The resource of a process. One that went to another node is on no shelf here: whose process is left behind is asked of
/// the API server.
pub(super) async fn resource_of<K: Kind + Item>(
    context: &Context,
    shelf: &Shelf<K>,
    name: &str,
) -> Done<Option<Arc<K>>> {
    match shelf.get(name) {
        Some(resource) => Ok(Some(resource)),
        None if context.runs(name) => Ok(context.desk.api::<K>().get_opt(name).await?.map(Arc::new)),
        None => Ok(None),
    }
}

/// Tells people that a process could not be started.
pub(super) async fn tell_failure<K: Kind>(context: &Context, about: &K, why: &ReconcileError) {
    if !matches!(why, ReconcileError::Stale) {
        let event = plan::Event { warning: true, reason: "StartFailed", message: why.to_string() };
        context.desk.tell(about, &event).await;
    }
}

/// The engines of a volume, wherever they are.
pub(super) async fn engines_of(desk: &Desk, volume: &str) -> kube::Result<Vec<Engine>> {
    let those = ListParams::default().labels(&format!("{VOLUME_LABEL}={volume}"));
    desk.api::<Engine>().list(&those).await.map(|found| found.items)
}
