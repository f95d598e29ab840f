//! What the leader does for all nodes at once: which of them live, the settings that are not there, the image.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::api::{ListParams, ObjectMeta, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio::time::Instant;

use super::cache::Key;
use super::desk::Done;
use super::lead::Lead;
use super::lease::{NODE_LABEL, Watchers, answer, mark, node_lease};
use super::queue::Outcome;
use super::{Context, budgets, drain, programs, upgrades};
use crate::api::{Conditions, EngineImage, EngineImageSpec, Node, Setting, SettingSpec, Volume};
use crate::plan::{node, written};
use crate::settings::DEFINITIONS;

/// Which default a setting was given last, by whoever installed the managers.
const GIVEN: &str = "longhorn.io/given-default";

/// For so long a manager is silent whose lease goes with its node.
const LEFT: Duration = Duration::from_secs(3600);

/// The managers, as they were counted last.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// Nodes whose manager lives.
    pub(super) up: Arc<BTreeSet<String>>,
    /// Nodes whose manager was seen to be silent for a term. Not those that are new: nobody has counted them yet, or their
    /// manager has written its first lease a moment after its Node.
    pub(super) silent: BTreeSet<String>,
    /// Leases of managers that have been silent for long on nodes that there are not any more, as they were read.
    pub(super) left: Vec<Left>,
}

/// A lease that nobody will renew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Left {
    node: String,
    uid: Option<String>,
    version: Option<String>,
}

/// Which nodes' managers live. True if that changed.
pub(super) async fn count_the_living(context: &Context, watchers: &mut Watchers) -> Done<bool> {
    let (api, managers) = (context.desk.api::<Lease>(), ListParams::default().labels(NODE_LABEL));
    let leases = answer(api.list(&managers)).await??;
    let marks: BTreeMap<&String, String> =
        leases.iter().filter_map(|lease| Some((lease.labels().get(NODE_LABEL)?, mark(lease)))).collect();
    let before = context.nodes_up();
    let nodes = context.lead().map(|lead| lead.cache.nodes.all()).unwrap_or_default();
    let names: BTreeSet<String> = nodes.iter().map(|n| n.name_any()).collect();
    let (own, now) = (&context.options.node, Instant::now());
    let (mut up, mut silent) = (BTreeSet::from([own.clone()]), BTreeSet::new());
    let known: BTreeSet<&String> = marks.keys().copied().chain(&names).chain(&*before).collect();
    for node in known.into_iter().filter(|node| *node != own) {
        // A lease that somebody removed is written anew with the next renewal, and is missed only after a term, too.
        let is_late = !watchers.is_alive(&node_lease(node), marks.get(node).map_or("", String::as_str), now);
        if is_late {
            silent.insert(node.clone());
        } else if marks.contains_key(node) || before.contains(node) {
            up.insert(node.clone());
        }
    }
    let counted = Counted { up: Arc::new(up), silent, left: left(context, &leases.items, watchers, now) };
    let mut last = context.counted.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = *last != counted;
    if changed {
        tracing::info!(alive = ?counted.up, silent = ?counted.silent, "managers");
        *last = counted;
    }
    Ok(changed)
}

/// Those leases of which no node in either API has been told for as long as this manager leads, and that it has not seen to change for long.
fn left(context: &Context, leases: &[Lease], watchers: &Watchers, now: Instant) -> Vec<Left> {
    let Some(lead) = context.lead() else { return Vec::new() };
    let is_left = |node: &String| {
        let cache = &lead.cache;
        let is_known = cache.nodes.get(node).is_some() || cache.kube_nodes.get(node).is_some();
        !is_known && watchers.still_for(&node_lease(node), now) >= LEFT
    };
    let named = leases.iter().filter_map(|lease| Some((lease.labels().get(NODE_LABEL)?, lease)));
    let named = named.filter(|(node, lease)| is_left(node) && lease.name_any() == node_lease(node));
    named
        .map(|(node, lease)| Left { node: node.clone(), uid: lease.uid(), version: lease.resource_version() })
        .collect()
}

/// Deletes them, if the API server itself has no such node. A manager that lives all the same makes its lease anew.
async fn forget_left(context: &Context, lead: &Lead) -> Done {
    let left = context.counted.lock().unwrap_or_else(PoisonError::into_inner).left.clone();
    let nodes: Api<KubeNode> = Api::all(context.desk.client.clone());
    let tried = || lead.leases_tried.lock().unwrap_or_else(PoisonError::into_inner);
    for Left { node, uid, version } in left {
        let lease = (node.clone(), version.clone());
        // One that cannot be deleted, since the managers may not, is not tried with each change of any node.
        if tried().contains(&lease) {
            continue;
        }
        let is_there = context.desk.api::<Node>().get_opt(&node).await?.is_some()
            || nodes.get_opt(&node).await?.is_some();
        if is_there {
            continue;
        }
        context.confirm_leads(lead)?;
        tried().insert(lease);
        let metadata = ObjectMeta {
            name: Some(node_lease(&node)),
            uid,
            resource_version: version,
            ..ObjectMeta::default()
        };
        // It harms nobody: what keeps it keeps nothing else from being looked at.
        match context.desk.delete_read(&Lease { metadata, spec: None }).await {
            Ok(()) => tracing::info!(node, "the lease of a manager whose node is gone is deleted"),
            Err(e) => tracing::warn!(node, error = %e, "the lease of a manager whose node is gone stays"),
        }
    }
    Ok(())
}

/// Says once of each node whose manager fell silent that it is not ready. What is said of it after that its manager has said,
/// which is back, and which the next count finds alive.
async fn tell_of_the_silent(context: &Context, lead: &Lead, now: &str) -> Done {
    let silent = context.counted.lock().unwrap_or_else(PoisonError::into_inner).silent.clone();
    let news: Vec<String> = {
        let mut told = lead.told_silent.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|node| silent.contains(node));
        silent.difference(&told).cloned().collect()
    };
    for name in news {
        let Some(node) = lead.cache.nodes.get(&name) else { continue };
        let old = node.status.clone().unwrap_or_default();
        let mut status = old.clone();
        let message = format!("the manager of node {name} does not renew its lease");
        status.conditions.set_condition(node::READY, false, "ManagerPodDown", &message, now);
        let version = node.resource_version();
        context.desk.set_status::<Node, _>(&name, version.as_deref(), &old, &status).await?;
        lead.told_silent.lock().unwrap_or_else(PoisonError::into_inner).insert(name);
    }
    let known = silent.into_iter().filter(|node| lead.cache.nodes.get(node).is_some());
    context.news.tell(known.map(Key::PodsOf));
    Ok(())
}

/// Says of nodes whose manager died that they are not ready, and keeps what stands for all nodes.
pub(super) async fn look(context: &Context, lead: &Lead) -> Done<Outcome> {
    let up = context.nodes_up();
    tell_of_the_silent(context, lead, &written(context.desk.now())).await?;
    forget_left(context, lead).await?;
    keep_settings(context).await?;
    keep_engine_images(context, lead, &up).await?;
    if picture_changed(context, lead, &up) {
        // A volume may wait for room or for a program, or have a replica on what is to be emptied.
        context.news.tell([Key::All]);
    }
    let (upgrades, drains) = (upgrades::look(context, lead).await?, drain::look(context, lead).await?);
    Ok(match (upgrades, drains) {
        (Outcome::Again(one), Outcome::Again(other)) => Outcome::Again(one.min(other)),
        (Outcome::Done, other) | (other, _) => other,
    })
}

/// True if nodes and disks are not what they were in a way that could change where a replica goes, or what it runs. Free
/// bytes alone do not count: a volume that waits for them looks again by itself.
fn picture_changed(context: &Context, lead: &Lead, up: &BTreeSet<String>) -> bool {
    let (nodes, settings) = (lead.cache.nodes.all(), context.cache.settings());
    let (drains, programs) = (budgets::views(&lead.cache), programs::by_node(&context.cache));
    let (mut picture, _) =
        node::picture(nodes.iter().map(AsRef::as_ref), [], up, &drains, &programs, &settings);
    for disk in picture.nodes.values_mut().flat_map(|n| n.disks.values_mut()) {
        disk.available = 0;
    }
    let mut known = lead.pictured.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = *known != picture;
    *known = picture;
    changed
}

/// Makes the settings that are not there, with their defaults. A default that was given anew goes before what users wrote
/// since the last one, and once: an annotation says which one the value was.
async fn keep_settings(context: &Context) -> Done {
    for definition in DEFINITIONS {
        let given = context.options.settings.get(definition.name);
        match (context.cache.settings.get(definition.name), given) {
            (None, given) => {
                let spec = SettingSpec { value: given.unwrap_or(definition.default).to_owned() };
                let mut new = Setting::new(definition.name, spec);
                let given = given.map(|value| (GIVEN.to_owned(), value.to_owned()));
                new.metadata.annotations = given.map(|annotation| [annotation].into());
                context.desk.create(&new).await?;
            }
            (Some(old), Some(value)) if old.annotations().get(GIVEN).is_none_or(|last| last != value) => {
                tracing::info!(
                    setting = definition.name,
                    from = old.spec.value,
                    to = value,
                    "given another default"
                );
                let metadata =
                    json!({ "annotations": { GIVEN: value }, "resourceVersion": old.resource_version() });
                let patch = Patch::Merge(json!({ "value": value, "metadata": metadata }));
                context.desk.api::<Setting>().patch(definition.name, &PatchParams::default(), &patch).await?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// The images that engines and replicas may be of: the manager's own, which each manager lays on its node, and others that
/// are or were there.
async fn keep_engine_images(context: &Context, lead: &Lead, up: &BTreeSet<String>) -> Done {
    let image = &context.options.image;
    let name = format!(
        "ei-{}",
        image.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_lowercase()
    );
    if context.cache.engine_images.get(&name).is_none() {
        let resource = EngineImage::new(&name, EngineImageSpec { image: image.clone() });
        context.desk.create(&resource).await?;
    }
    // A manager may run on a node whose resource cannot be made yet. What it has told stays: it would tell it again at once.
    let (own, kubernetes) = (lead.cache.nodes.all(), lead.cache.kube_nodes.all());
    let nodes = own.iter().map(|n| n.name_any()).chain(kubernetes.iter().map(|n| n.name_any()));
    let nodes: BTreeSet<String> = nodes.collect();
    let volumes = lead.cache.volumes.all();
    for resource in context.cache.engine_images.all() {
        let image = &resource.spec.image;
        let uses = |v: &&Arc<Volume>| v.status.as_ref().is_some_and(|s| s.current_image == *image);
        let new = programs::judge(&resource, context, up, &nodes, volumes.iter().filter(uses).count());
        let (old, version) = (resource.status.clone().unwrap_or_default(), resource.resource_version());
        let name = resource.name_any();
        context.desk.set_status::<EngineImage, _>(&name, version.as_deref(), &old, &new).await?;
    }
    Ok(())
}
