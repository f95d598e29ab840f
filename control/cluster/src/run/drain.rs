//! The disruption budgets of all nodes' instance managers (`crate::plan::drain`), which only the leader makes and removes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use kube::api::{ListParams, ObjectMeta};

use super::cache::{Global, instance_manager, is_cordoned};
use super::desk::Done;
use super::lead::Lead;
use super::queue::Outcome;
use super::{Context, left};
use crate::plan::drain::{Action, NodeView, Observed, plan};
use crate::plan::instance_manager::{COMPONENT, COMPONENT_LABEL, NODE_LABEL};

/// How often what is on a cordoned node that may not be drained yet is looked at. That costs no request.
const ROUND: Duration = Duration::from_secs(5);

/// Which nodes are cordoned and which protected, as far as the watches tell.
pub(super) fn views(cache: &Global) -> BTreeMap<String, NodeView> {
    let protected = nodes_of(cache.budgets.all().iter().map(Arc::as_ref));
    views_with(cache, &protected)
}

fn views_with(cache: &Global, protected: &BTreeSet<String>) -> BTreeMap<String, NodeView> {
    let view = |name: String| {
        let node = cache.kube_nodes.get(&name);
        let cordoned = node.as_ref().is_none_or(|node| is_cordoned(node));
        let view = NodeView { cordoned, protected: protected.contains(&name), gone: node.is_none() };
        (name, view)
    };
    // One that is gone leaves its budget behind.
    let known = cache.nodes.all().into_iter().map(|node| node.name_any());
    known.chain(protected.iter().cloned()).map(view).collect()
}

/// The nodes whose budgets these are.
fn nodes_of<'a>(budgets: impl Iterator<Item = &'a PodDisruptionBudget>) -> BTreeSet<String> {
    let node = |budget: &PodDisruptionBudget| {
        let goes = budget.metadata.deletion_timestamp.is_some();
        let node = budget.labels().get(NODE_LABEL).filter(|node| budget.name_any() == instance_manager(node));
        node.filter(|_| !goes).cloned()
    };
    budgets.filter_map(node).collect()
}

/// Looks at all nodes.
pub(super) async fn look(context: &Context, lead: &Lead) -> Done<Outcome> {
    let known = views(&lead.cache);
    let mut actions = decide(context, lead, &known);
    if actions.iter().any(|a| matches!(a, Action::Release(_))) {
        // A budget that is gone already must not count for another node: the API server itself is asked.
        let there = context.desk.api::<PodDisruptionBudget>().list(&ListParams::default()).await?;
        actions = decide(context, lead, &views_with(&lead.cache, &nodes_of(there.items.iter())));
    }
    for action in actions {
        match action {
            Action::Protect(node) => context.desk.create(&budget(&node)).await?,
            Action::Release(node) => {
                tracing::info!(node, "the node may be drained");
                context.desk.delete::<PodDisruptionBudget>(&instance_manager(&node)).await?;
            }
        }
    }
    if !known.values().any(|node| node.cordoned && node.protected) {
        return Ok(Outcome::Done);
    }
    // Nothing else waits for what is only freed here.
    if let Err(e) = left::look(context, lead, &known).await {
        tracing::warn!(error = %e, "whether volumes are left on cordoned nodes is asked again later");
    }
    Ok(Outcome::Again(ROUND))
}

fn decide(context: &Context, lead: &Lead, nodes: &BTreeMap<String, NodeView>) -> Vec<Action> {
    // Where all are as they should be nobody has to read everything.
    if nodes.values().all(|node| node.cordoned != node.protected) {
        return Vec::new();
    }
    let cache = &lead.cache;
    let (volumes, engines, replicas) = (cache.volumes.all(), cache.engines.all(), cache.replicas.all());
    let picture = lead.picture(context);
    plan(&Observed {
        nodes,
        volumes: &volumes.iter().map(Arc::as_ref).collect::<Vec<_>>(),
        engines: &engines.iter().map(Arc::as_ref).collect::<Vec<_>>(),
        replicas: &replicas.iter().map(Arc::as_ref).collect::<Vec<_>>(),
        cluster: &picture.cluster,
        policy: context.cache.settings().drain(),
    })
}

/// One pod at least: the node's only instance manager stays.
fn budget(node: &str) -> PodDisruptionBudget {
    let labels: BTreeMap<String, String> =
        [(COMPONENT_LABEL, COMPONENT), (NODE_LABEL, node)].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let selector = LabelSelector { match_labels: Some(labels.clone()), ..LabelSelector::default() };
    PodDisruptionBudget {
        metadata: ObjectMeta {
            name: Some(instance_manager(node)),
            labels: Some(labels),
            ..ObjectMeta::default()
        },
        spec: Some(PodDisruptionBudgetSpec {
            min_available: Some(IntOrString::Int(1)),
            selector: Some(selector),
            ..PodDisruptionBudgetSpec::default()
        }),
        status: None,
    }
}
