//! What the leader does for all nodes at once: which of them live, the settings that are not there, the image.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::ListParams;

use super::cache::Key;
use super::desk::Done;
use super::lead::Lead;
use super::lease::{NODE_LABEL, Watchers, mark};
use super::queue::Outcome;
use super::{Context, drain};
use crate::api::{Conditions, EngineImage, EngineImageSpec, EngineImageStatus, Node, Setting, SettingSpec};
use crate::plan::{node, written};
use crate::settings::DEFINITIONS;

/// Which nodes' managers live. True if that changed.
pub(super) async fn count_the_living(context: &Context, watchers: &mut Watchers) -> Done<bool> {
    let leases = context.desk.api::<Lease>().list(&ListParams::default().labels(NODE_LABEL)).await?;
    let now = Instant::now();
    let mut alive: BTreeSet<String> = [context.options.node.clone()].into();
    for lease in leases {
        let Some(node) = lease.labels().get(NODE_LABEL) else { continue };
        if watchers.is_alive(&lease.name_any(), &mark(&lease), now) {
            alive.insert(node.clone());
        }
    }
    let mut up = context.up.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = **up != alive;
    if changed {
        tracing::info!(?alive, "managers");
        *up = Arc::new(alive);
    }
    Ok(changed)
}

/// Says of nodes whose manager died that they are not ready, and keeps what stands for all nodes.
pub(super) async fn look(context: &Context, lead: &Lead) -> Done<Outcome> {
    let up = context.nodes_up();
    let now = written(Timestamp::now());
    for dead in lead.cache.nodes.all().iter().filter(|n| !up.contains(&n.name_any())) {
        let old = dead.status.clone().unwrap_or_default();
        let mut status = old.clone();
        let message = format!("the manager of node {} does not renew its lease", dead.name_any());
        status.conditions.set_condition(node::READY, false, "ManagerPodDown", &message, &now);
        let version = dead.resource_version();
        context.desk.set_status::<Node, _>(&dead.name_any(), version.as_deref(), &old, &status).await?;
        context.news.tell([Key::PodsOf(dead.name_any())]);
    }
    keep_settings(context).await?;
    keep_engine_image(context, lead, &up).await?;
    if picture_changed(context, lead, &up) {
        // A volume may wait for room, or have a replica on what is to be emptied.
        context.news.tell([Key::All]);
    }
    drain::look(context, lead).await
}

/// True if nodes and disks are not what they were in a way that could change where a replica goes. Free bytes alone do
/// not count: a volume that waits for them looks again by itself.
fn picture_changed(context: &Context, lead: &Lead, up: &BTreeSet<String>) -> bool {
    let (nodes, settings) = (lead.cache.nodes.all(), context.cache.settings());
    let drains = drain::views(&lead.cache);
    let (mut picture, _) = node::picture(nodes.iter().map(AsRef::as_ref), [], up, &drains, &settings);
    for disk in picture.nodes.values_mut().flat_map(|n| n.disks.values_mut()) {
        disk.available = 0;
    }
    let mut known = lead.pictured.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = *known != picture;
    *known = picture;
    changed
}

/// Makes the settings that are not there, with their defaults.
async fn keep_settings(context: &Context) -> Done {
    for definition in DEFINITIONS {
        if context.cache.settings.get(definition.name).is_none() {
            let spec = SettingSpec { value: definition.default.to_owned() };
            context.desk.create(&Setting::new(definition.name, spec)).await?;
        }
    }
    Ok(())
}

/// The image that engines and replicas are of. The programs are part of the manager's own image, so that they are on a
/// node as soon as its manager is.
async fn keep_engine_image(context: &Context, lead: &Lead, up: &BTreeSet<String>) -> Done {
    let image = &context.options.image;
    let name = format!(
        "ei-{}",
        image.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_lowercase()
    );
    let Some(resource) = lead.cache.engine_images.get(&name) else {
        let resource = EngineImage::new(&name, EngineImageSpec { image: image.clone() });
        return context.desk.create(&resource).await;
    };
    let old = resource.status.clone().unwrap_or_default();
    let volumes = lead.cache.volumes.all();
    let uses =
        volumes.iter().filter(|v| v.status.as_ref().is_some_and(|s| s.current_image == *image)).count();
    let new = EngineImageStatus {
        owner_id: context.options.node.clone(),
        state: "deployed".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ref_count: i64::try_from(uses).unwrap_or(i64::MAX),
        node_deployment_map: up.iter().map(|node| (node.clone(), true)).collect(),
        ..old.clone()
    };
    let version = resource.resource_version();
    context.desk.set_status::<EngineImage, _>(&name, version.as_deref(), &old, &new).await
}
