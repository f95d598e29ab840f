//! Devices that volumes have left on this node, which have gone elsewhere, or for good (`crate::plan::stay`).

use super::Context;
use super::cache::Key;
use super::desk::Done;
use super::processes::engines_of;
use super::queue::Outcome;
use crate::api::Volume;
use crate::plan::{Event, stay, volume_of_engine};

/// Looks for devices without an engine.
pub(super) async fn look_at_all(context: &Context) {
    let left = context.agent.devices().await;
    context.news.tell(left.into_keys().filter(|volume| !has_engine(context, volume)).map(Key::Device));
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
