//! Devices that volumes have left on this node, which have gone elsewhere, or for good (`crate::plan::stay`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use kube::api::ListParams;
use tokio::time::Instant;

use super::Context;
use super::cache::Key;
use super::desk::Done;
use super::processes::engines_of;
use super::queue::Outcome;
use crate::api::{Replica, Volume};
use crate::plan::{Event, stay, volume_of_engine};

/// Looks for devices without an engine.
pub(super) async fn look_at_all(context: &Context) {
    let left = context.agent.devices().await;
    context.news.tell(left.into_keys().filter(|volume| !has_engine(context, volume)).map(Key::Device));
}

/// After so long it is asked about a volume of which nobody here knows anything whether it is gone; again after as long.
const UNKNOWN: Duration = Duration::from_secs(3600);

/// How often it is looked which those are.
const LOOK: Duration = Duration::from_secs(60);

/// Volumes of which something is kept here and nothing else is known, each with when it is asked about.
#[derive(Debug, Default)]
pub(super) struct Unknown {
    due: BTreeMap<String, Instant>,
    next: Option<Instant>,
}

impl Unknown {
    /// True once in [`LOOK`].
    fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.next.is_none_or(|next| next <= now);
        if is_due {
            self.next = Some(now + LOOK);
        }
        is_due
    }

    /// These are those that there are. Gives back those to ask about.
    fn see(&mut self, volumes: &BTreeSet<String>, now: Instant) -> Vec<String> {
        self.due.retain(|volume, _| volumes.contains(volume));
        for volume in volumes {
            self.due.entry(volume.clone()).or_insert(now + UNKNOWN);
        }
        let due = self.due.iter_mut().filter(|(_, at)| **at <= now);
        due.map(|(volume, at)| {
            *at = now + UNKNOWN;
            volume.clone()
        })
        .collect()
    }
}

/// Removes what is kept here of volumes that are gone. Such a key is nobody's any more, and one that is left would be taken for that of the
/// next volume of its name whose own is lost (`super::key`).
pub(super) async fn forget_gone(context: &Context) -> Done {
    let unknown = || context.unknown.lock().unwrap_or_else(PoisonError::into_inner);
    if !unknown().is_due(Instant::now()) {
        return Ok(());
    }
    let mut volumes = context.agent.kept_volumes().await;
    volumes.retain(|volume| !is_known(context, volume));
    let due = unknown().see(&volumes, Instant::now());
    for volume in due {
        // The API server itself: most of them are on other nodes, of which nothing is known here.
        let of_volume = ListParams::default().fields(&format!("spec.volumeName={volume}"));
        let is_there = context.desk.api::<Volume>().get_opt(&volume).await?.is_some()
            || !engines_of(&context.desk, &volume).await?.is_empty()
            || !context.desk.api::<Replica>().list(&of_volume).await?.items.is_empty();
        if is_there || is_known(context, &volume) {
            continue;
        }
        match context.agent.forget_volume(&volume).await {
            Ok(()) => tracing::info!(volume, "what was kept here of the volume, which is gone, is removed"),
            Err(e) => {
                tracing::warn!(volume, error = %e, "what is kept here of the volume, which is gone, stays")
            }
        }
    }
    Ok(())
}

/// True if anything of a volume is here, or is to be.
fn is_known(context: &Context, volume: &str) -> bool {
    let (cache, replicas) = (&context.cache, format!("{volume}-r-"));
    let is_of = |process: &str| volume_of_engine(process) == Some(volume) || process.starts_with(&replicas);
    cache.volumes.get(volume).is_some()
        || !cache.engines.of(volume).is_empty()
        || !cache.replicas.of(volume).is_empty()
        || context.runs_any(is_of)
}

/// Looks at the device of a volume.
pub(super) async fn look(context: &Context, volume: &str) -> Done<Outcome> {
    let devices = context.agent.devices().await;
    let Some(stay) = devices.get(volume).filter(|_| !has_engine(context, volume)) else {
        return Ok(Outcome::Done);
    };
    let engines = engines_of(&context.desk, volume).await?;
    let resource = context.desk.api::<Volume>().get_opt(volume).await?;
    if !stay::is_over(&context.options.node, &engines, resource.is_some()) {
        // The next round looks again.
        return Ok(Outcome::Done);
    }
    context.agent.end_stay(volume, stay, &context.options.image).await?;
    tracing::warn!(volume, "the device that the volume had here before it went is taken away");
    if let Some(resource) = resource {
        let node = &context.options.node;
        let message =
            format!("the device that was left on node {node} is gone; what waited there has failed");
        context.desk.tell(&resource, &Event { warning: true, reason: "DeviceTakenAway", message }).await;
    }
    Ok(Outcome::Done)
}

/// True while an engine of the volume, or a relay, runs here or is to: then nobody else need be asked. One that nobody knows of here
/// has the volume's name on this host, and no stay is ended beside it.
fn has_engine(context: &Context, volume: &str) -> bool {
    let is_of = |process: &str| volume_of_engine(process) == Some(volume);
    let is_to_be = || context.cache.engines.of(volume).iter().any(|e| e.spec.node_id == context.options.node);
    context.runs_any(is_of) || is_to_be()
}
