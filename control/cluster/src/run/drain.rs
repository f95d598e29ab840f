//! The disruption budgets of all nodes' instance managers (`crate::plan::drain`), which only the leader makes and removes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::{ListParams, ObjectMeta};

use super::budgets::{nodes_of, views, views_with};
use super::cache::instance_manager;
use super::desk::Done;
use super::lead::Lead;
use super::queue::Outcome;
use super::{Context, left};
use crate::plan::drain::{Action, NodeView, Observed, plan};
use crate::plan::instance_manager::{COMPONENT, COMPONENT_LABEL, NODE_LABEL};

/// How often what is on a cordoned node that may not be drained yet is looked at. That costs no request.
const ROUND: Duration = Duration::from_secs(5);

/// A new leader releases no budget for so long. What the one before it asked for last may be carried out yet: it acts until 12 s after
/// its last renewal (`super::lease::YIELD`), and a request of its ends 15 s later.
const QUIET: Duration = Duration::from_secs(60);

/// Looks at all nodes.
pub(super) async fn look(context: &Context, lead: &Lead) -> Done<Outcome> {
    let known = views(&lead.cache);
    let mut actions = decide(context, lead, &known);
    if lead.has_led_for() < QUIET {
        actions.retain(|action| !matches!(action, Action::Release(_)));
    }
    if actions.iter().any(|a| matches!(a, Action::Release(_))) {
        // A budget that is gone already must not count for another node: the API server itself is asked.
        let there = context.desk.api::<PodDisruptionBudget>().list(&ListParams::default()).await?;
        actions = decide(context, lead, &views_with(&lead.cache, &nodes_of(there.items.iter())));
    }
    for action in actions {
        match action {
            Action::Protect(node) => context.desk.create(&budget(&node)).await?,
            Action::Release(node) => {
                // Two leaders would release the last two copies of a volume.
                context.confirm_leads(lead)?;
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
