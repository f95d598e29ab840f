//! What a manager does for its own node: its resource, its disks, its instance manager.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kube::ResourceExt;

use super::cache::{instance_manager, is_cordoned};
use super::desk::Done;
use super::processes::SOON;
use super::queue::Outcome;
use super::{Context, instance_pod, orphans, stays};
use crate::agent::AgentError;
use crate::api::{
    DataEngine, DiskSpec, InstanceManager, InstanceManagerSpec, InstanceManagerStatus, InstanceState, Node,
    NodeSpec,
};
use crate::plan::default_disk::Disks;
use crate::plan::{default_disk, node};
use crate::settings::Settings;

/// The name of a default disk; Longhorn's begins so, too.
const DEFAULT_DISK: &str = "default-disk";

/// Looks at this node: its resources, its disks, its instance manager.
pub(super) async fn look(context: &Context) -> Done<Outcome> {
    // None waits for another: what does not answer the one may well answer the other.
    let forget = async {
        if let Err(e) = stays::forget_gone(context).await {
            tracing::debug!(error = %e, "which volumes are gone is not known now");
        }
    };
    tokio::join!(look_at_node(context), log_as_set(context), stays::look_at_all(context), forget).0
}

/// Has this manager and what runs on its node log at the level that is set. Those who start anew are told with the next round.
async fn log_as_set(context: &Context) {
    let level = context.cache.settings().log_level();
    control::logging::set(level);
    if let Err(e) = context.agent.log_at(level).await {
        tracing::debug!(error = %e, "not everybody here has heard yet at which level to log");
    }
}

async fn look_at_node(context: &Context) -> Done<Outcome> {
    let (cache, name) = (&context.cache, context.options.node.as_str());
    let settings = cache.settings();
    let Some(resource) = cache.nodes.get(name) else {
        create_node(context, &settings).await?;
        return Ok(Outcome::Again(SOON));
    };
    let (spec, unmet) = completed(context, &resource, &settings).await;
    if spec != resource.spec {
        context.desk.set_spec(resource.as_ref(), &resource.spec, &spec).await?;
        return Ok(Outcome::Again(SOON));
    }
    let mut disks = BTreeMap::new();
    for (disk, spec) in &resource.spec.disks {
        disks.insert(disk.clone(), context.agent.inspect_disk(PathBuf::from(&spec.path)).await);
    }
    let processes = context.agent.processes().await;
    let trouble = processes.as_ref().err().map(AgentError::to_string);
    let kubernetes = cache.kube_nodes.get(name).map(|n| node::KubernetesNode {
        cordoned: is_cordoned(&n),
        zone: n.labels().get("topology.kubernetes.io/zone").cloned().unwrap_or_default(),
        region: n.labels().get("topology.kubernetes.io/region").cloned().unwrap_or_default(),
    });
    let replicas = cache.replicas.all();
    let status = node::plan(&node::Observed {
        node: &resource,
        kubernetes: kubernetes.as_ref(),
        disks: &disks,
        replicas: &replicas.iter().map(AsRef::as_ref).collect::<Vec<_>>(),
        trouble: trouble.as_deref(),
        unmet: unmet.as_deref(),
        instance_manager: &instance_manager(name),
        settings: &settings,
        now: context.desk.now(),
    });
    let old = resource.status.clone().unwrap_or_default();
    let version = resource.resource_version();
    context.desk.set_status::<Node, _>(name, version.as_deref(), &old, &status).await?;
    keep_instance_manager(context, trouble.is_none()).await?;
    instance_pod::look(context, processes.as_ref().ok()).await?;
    if let Ok(processes) = processes {
        orphans::look(context, &resource, &disks, &processes.into_keys().collect()).await?;
    }
    Ok(Outcome::Done)
}

/// Makes the node's resource. Without a disk that can be used volumes may be attached there all the same.
async fn create_node(context: &Context, settings: &Settings) -> Done {
    let name = &context.options.node;
    let spec = NodeSpec { name: name.clone(), allow_scheduling: true, ..NodeSpec::default() };
    let mut new = Node::new(name, spec);
    // Those that a label asks for are asked for until they are there.
    if !settings.default_disk_by_label() {
        match first_disks(context, settings).await {
            Ok(disks) => new.spec.disks = disks,
            Err(why) => {
                tracing::warn!("the node has no disk yet: {why}");
                node::owe_disks(&mut new);
            }
        }
    }
    context.desk.create(&new).await
}

/// What a node without disks or without tags is to be, as its node in Kubernetes asks by now; and why that cannot be.
async fn completed(context: &Context, resource: &Node, settings: &Settings) -> (NodeSpec, Option<String>) {
    let (mut spec, mut trouble) = (resource.spec.clone(), None);
    let kubernetes = context.cache.kube_nodes.get(&context.options.node);
    // Where no label decides, a node that had its disk may have lost it on purpose.
    let asked = settings.default_disk_by_label() && kubernetes.is_some() || node::is_owed_disks(resource);
    if spec.disks.is_empty() && asked {
        match first_disks(context, settings).await {
            Ok(disks) => spec.disks = disks,
            Err(why) => trouble = Some(why),
        }
    }
    if let Some(kubernetes) = kubernetes.filter(|_| spec.tags.is_empty()) {
        match default_disk::tags(kubernetes.annotations()) {
            Ok(tags) => spec.tags = tags,
            Err(why) => trouble = Some(why),
        }
    }
    (spec, trouble)
}

/// The disks that the node begins with.
///
/// # Errors
/// Nobody can make out what is asked for, or a place cannot be used: one sentence.
async fn first_disks(context: &Context, settings: &Settings) -> Result<BTreeMap<String, DiskSpec>, String> {
    let kubernetes = context.cache.kube_nodes.get(&context.options.node);
    let (labels, annotations) =
        kubernetes.map(|n| (n.labels().clone(), n.annotations().clone())).unwrap_or_default();
    let listed = match default_disk::disks(&labels, &annotations, settings.default_disk_by_label())? {
        Disks::None => Vec::new(),
        Disks::Listed(all) => all,
        Disks::Own => {
            let path =
                settings.default_disk_path().map_or_else(|| context.options.root.clone(), PathBuf::from);
            let found = context.agent.inspect_disk(path.clone()).await?;
            let reserved = u128::from(found.maximum) * u128::from(settings.default_disk_reserved()) / 100;
            let disk = DiskSpec {
                path: path.display().to_string(),
                allow_scheduling: true,
                storage_reserved: i64::try_from(reserved).unwrap_or(i64::MAX),
                ..DiskSpec::default()
            };
            vec![(String::new(), disk)]
        }
    };
    let mut disks = BTreeMap::new();
    for (name, disk) in listed {
        let found = context.agent.inspect_disk(PathBuf::from(&disk.path)).await?;
        let own = || format!("{DEFAULT_DISK}-{}", found.uuid.get(..8).unwrap_or_default());
        disks.insert(Some(name).filter(|n| !n.is_empty()).unwrap_or_else(own), disk);
    }
    Ok(disks)
}

async fn keep_instance_manager(context: &Context, answers: bool) -> Done {
    let node = &context.options.node;
    let name = instance_manager(node);
    let Some(resource) = context.cache.instance_managers.get(&name) else {
        let spec = InstanceManagerSpec {
            node_id: node.clone(),
            image: context.options.image.clone(),
            kind: "aio".to_owned(),
            data_engine: DataEngine::V1.to_string(),
            ..InstanceManagerSpec::default()
        };
        return context.desk.create(&InstanceManager::new(&name, spec)).await;
    };
    let old = resource.status.clone().unwrap_or_default();
    let new = InstanceManagerStatus {
        owner_id: node.clone(),
        current_state: if answers { InstanceState::Running } else { InstanceState::Error },
        ..old.clone()
    };
    let version = resource.resource_version();
    context.desk.set_status::<InstanceManager, _>(&name, version.as_deref(), &old, &new).await
}
