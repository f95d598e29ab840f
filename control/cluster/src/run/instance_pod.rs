//! The pod of this node's instance manager, where the manager makes it (`crate::plan::instance_manager`).

use std::collections::BTreeMap;

use kube::Resource;

use super::Context;
use super::cache::{instance_manager, is_cordoned};
use super::desk::Done;
use crate::agent::ProcessView;
use crate::api::DesireState;
use crate::plan::instance_manager::{Action, Observed, plan};

/// Looks at the pod. `processes`: what runs in it; `None`: nobody answers.
pub(super) async fn look(context: &Context, processes: Option<&BTreeMap<String, ProcessView>>) -> Done {
    let Some(own) = &context.cache.pod else { return Ok(()) };
    let (node, cache) = (context.options.node.as_str(), &context.cache);
    let name = instance_manager(node);
    let (template, pod) = (own.templates.all().pop(), own.pods.get(&name));
    let owner = cache.instance_managers.get(&name).and_then(|resource| resource.controller_owner_ref(&()));
    let wants = |state: DesireState| state == DesireState::Running;
    let is_wanted = cache.engines.all().iter().any(|e| wants(e.spec.desire_state))
        || cache.replicas.all().iter().any(|r| wants(r.spec.desire_state));
    let action = plan(&Observed {
        name: &name,
        node,
        cordoned: cache.kube_nodes.get(node).is_none_or(|node| is_cordoned(&node)),
        template: template.as_deref(),
        pod: pod.as_deref(),
        owner,
        idle: processes.is_some_and(BTreeMap::is_empty) && !is_wanted,
    });
    match action {
        Some(Action::Create(pod)) => context.desk.create(&*pod).await,
        Some(Action::Delete) => {
            let Some(pod) = pod else { return Ok(()) };
            // The next one of its name has everything of the node in it.
            context.desk.delete_same(pod.as_ref()).await
        }
        None => Ok(()),
    }
}
