//! Which nodes a disruption budget protects from being drained, and which are cordoned.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;

use super::cache::{Global, instance_manager, is_cordoned};
use crate::plan::drain::NodeView;
use crate::plan::instance_manager::NODE_LABEL;

/// Which nodes are cordoned and which protected, as far as the watches tell.
pub(super) fn views(cache: &Global) -> BTreeMap<String, NodeView> {
    let protected = nodes_of(cache.budgets.all().iter().map(Arc::as_ref));
    views_with(cache, &protected)
}

pub(super) fn views_with(cache: &Global, protected: &BTreeSet<String>) -> BTreeMap<String, NodeView> {
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
pub(super) fn nodes_of<'a>(budgets: impl Iterator<Item = &'a PodDisruptionBudget>) -> BTreeSet<String> {
    let node = |budget: &PodDisruptionBudget| {
        let goes = budget.metadata.deletion_timestamp.is_some();
        let node = budget.labels().get(NODE_LABEL).filter(|node| budget.name_any() == instance_manager(node));
        node.filter(|_| !goes).cloned()
    };
    budgets.filter_map(node).collect()
}
