//! What a manager does for its own node: the node's resources, its engines, replicas and snapshots.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::ListParams;
use lh_block::Generation;

use super::cache::Key;
use super::desk::{Done, ReconcileError};
use super::leader::key_secret;
use super::lease::{NODE_LABEL, Watchers, mark};
use super::queue::Outcome;
use super::{Context, authority};
use crate::agent::{AgentError, DiskView, EngineStart};
use crate::api::{
    Conditions, DataEngine, DiskSpec, Engine, EngineImage, EngineImageSpec, EngineImageStatus,
    InstanceManager, InstanceManagerSpec, InstanceManagerStatus, InstanceState, Node, NodeSpec, Orphan,
    Replica, Setting, SettingSpec, Snapshot,
};
use crate::plan::{self, FINALIZER, engine, node, orphan, replica, snapshot, written};
use crate::settings::DEFINITIONS;

/// How often something that is on its way is looked at.
const SOON: Duration = Duration::from_millis(500);

/// The name of a default disk; Longhorn's begins so, too.
const DEFAULT_DISK: &str = "default-disk";

/// The name of a node's instance manager.
fn instance_manager(node: &str) -> String {
    format!("instance-manager-{node}")
}

/// Every process of this node may have changed.
pub(super) async fn tell_processes(context: &Context) {
    let Ok(processes) = context.agent.processes().await else { return };
    context.note_processes(processes.keys().cloned().collect());
    let keys = processes.into_keys().filter_map(|name| {
        if name.contains("-e-") {
            Some(Key::Engine(name))
        } else if name.contains("-r-") {
            Some(Key::Replica(name))
        } else {
            None
        }
    });
    // Those that are gone are in no list: what the resources say is here is looked at, too.
    let here = &context.options.node;
    let engines = context.cache.engines.state_filter(|e| e.spec.node_id == *here);
    let replicas = context.cache.replicas.state_filter(|r| r.spec.node_id == *here);
    context.news.tell(keys);
    context.news.tell(engines.into_iter().map(|e| Key::Engine(e.name_any())));
    context.news.tell(replicas.into_iter().map(|r| Key::Replica(r.name_any())));
}

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
    let changed = *up != alive;
    if changed {
        tracing::info!(?alive, "managers");
    }
    *up = alive;
    Ok(changed)
}

/// The leader says of nodes whose manager died that they are not ready, and keeps what stands for all nodes.
pub(super) async fn mark_the_dead(context: &Context) -> Done<Outcome> {
    let up = context.nodes_up();
    let now = written(Timestamp::now());
    for dead in context.cache.nodes.state().iter().filter(|n| !up.contains(&n.name_any())) {
        let old = dead.status.clone().unwrap_or_default();
        let mut status = old.clone();
        let message = format!("the manager of node {} does not renew its lease", dead.name_any());
        status.conditions.set_condition(node::READY, false, "ManagerPodDown", &message, &now);
        let version = dead.resource_version();
        context.desk.set_status::<Node, _>(&dead.name_any(), version.as_deref(), &old, &status).await?;
    }
    keep_settings(context).await?;
    keep_engine_image(context, &up).await?;
    if picture_changed(context, &up) {
        // A volume may wait for room, or have a replica on what is to be emptied.
        context.news.tell(super::leader::everything(context));
    }
    Ok(Outcome::Done)
}

/// True if nodes and disks are not what they were in a way that could change where a replica goes. Free bytes alone do
/// not count: a volume that waits for them looks again by itself.
fn picture_changed(context: &Context, up: &BTreeSet<String>) -> bool {
    let (nodes, settings) = (context.cache.nodes.state(), context.cache.settings());
    let (mut picture, _) = node::picture(nodes.iter().map(AsRef::as_ref), [], up, &settings);
    for disk in picture.nodes.values_mut().flat_map(|n| n.disks.values_mut()) {
        disk.available = 0;
    }
    let mut known = context.pictured.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = *known != picture;
    *known = picture;
    changed
}

/// Makes the settings that are not there, with their defaults.
async fn keep_settings(context: &Context) -> Done {
    for definition in DEFINITIONS {
        if context.cache.get(&context.cache.settings, definition.name).is_none() {
            let spec = SettingSpec { value: definition.default.to_owned() };
            context.desk.create(&Setting::new(definition.name, spec)).await?;
        }
    }
    Ok(())
}

/// The image that engines and replicas are of. The programs are part of the manager's own image, so that they are on a
/// node as soon as its manager is.
async fn keep_engine_image(context: &Context, up: &BTreeSet<String>) -> Done {
    let image = &context.options.image;
    let name = format!(
        "ei-{}",
        image.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_lowercase()
    );
    let Some(resource) = context.cache.get(&context.cache.engine_images, &name) else {
        let resource = EngineImage::new(&name, EngineImageSpec { image: image.clone() });
        return context.desk.create(&resource).await;
    };
    let old = resource.status.clone().unwrap_or_default();
    let uses =
        context.cache.volumes.state_filter(|v| v.status.as_ref().is_some_and(|s| s.current_image == *image));
    let new = EngineImageStatus {
        owner_id: context.options.node.clone(),
        state: "deployed".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ref_count: i64::try_from(uses.len()).unwrap_or(i64::MAX),
        node_deployment_map: up.iter().map(|node| (node.clone(), true)).collect(),
        ..old.clone()
    };
    let version = resource.resource_version();
    context.desk.set_status::<EngineImage, _>(&name, version.as_deref(), &old, &new).await
}

/// Looks at this node: its resources, its disks, its instance manager.
pub(super) async fn node(context: &Context) -> Done<Outcome> {
    let (cache, name) = (&context.cache, context.options.node.as_str());
    let settings = cache.settings();
    let Some(resource) = cache.get(&cache.nodes, name) else {
        create_node(context, &settings).await?;
        return Ok(Outcome::Again(SOON));
    };
    let mut disks = BTreeMap::new();
    for (disk, spec) in &resource.spec.disks {
        disks.insert(disk.clone(), context.agent.inspect_disk(PathBuf::from(&spec.path)).await);
    }
    let processes = context.agent.processes().await;
    let trouble = processes.as_ref().err().map(AgentError::to_string);
    let kubernetes = cache.kube_nodes.find(|n| n.name_any() == name).map(|n| node::KubernetesNode {
        cordoned: n.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false),
        zone: n.labels().get("topology.kubernetes.io/zone").cloned().unwrap_or_default(),
        region: n.labels().get("topology.kubernetes.io/region").cloned().unwrap_or_default(),
    });
    let replicas = cache.replicas.state_filter(|r| r.spec.node_id == name);
    let status = node::plan(&node::Observed {
        node: &resource,
        kubernetes: kubernetes.as_ref(),
        disks: &disks,
        replicas: &replicas.iter().map(AsRef::as_ref).collect::<Vec<_>>(),
        trouble: trouble.as_deref(),
        instance_manager: &instance_manager(name),
        settings: &settings,
        now: Timestamp::now(),
    });
    let old = resource.status.clone().unwrap_or_default();
    let version = resource.resource_version();
    context.desk.set_status::<Node, _>(name, version.as_deref(), &old, &status).await?;
    keep_instance_manager(context, trouble.is_none()).await?;
    if let Ok(processes) = processes {
        orphans(context, &disks, processes.into_keys().collect()).await?;
    }
    Ok(Outcome::Done)
}

/// Tells of what lies on this node and no resource knows, and removes what a user let go.
async fn orphans(
    context: &Context,
    disks: &BTreeMap<String, Result<DiskView, String>>,
    processes: BTreeSet<String>,
) -> Done {
    let (cache, name) = (&context.cache, context.options.node.as_str());
    let Some(resource) = cache.get(&cache.nodes, name) else { return Ok(()) };
    let content = disks.iter().filter_map(|(disk, view)| {
        let (view, spec) = (view.as_ref().ok()?, resource.spec.disks.get(disk)?);
        let (uuid, directories) = (view.uuid.clone(), view.directories.clone());
        Some(orphan::DiskContent { uuid, path: spec.path.clone(), directories })
    });
    let replicas = cache.replicas.state();
    let known = replicas.iter().map(|r| (r.spec.disk_id.clone(), r.spec.data_directory_name.clone()));
    let instances = replicas.iter().map(|r| r.name_any());
    let engines = cache.engines.state();
    let told = cache.orphans.state_filter(|o| o.spec.node_id == name);
    let actions = orphan::plan(&orphan::Observed {
        node: name,
        disks: &content.collect::<Vec<_>>(),
        known: &known.collect(),
        processes: &processes,
        instances: &instances.chain(engines.iter().map(|e| e.name_any())).collect(),
        orphans: &told.iter().map(AsRef::as_ref).collect::<Vec<_>>(),
    });
    for action in actions {
        tracing::info!(?action, "orphan");
        match action {
            orphan::Action::Create(name, spec) => {
                let mut object = Orphan::new(&name, *spec);
                object.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
                context.desk.create(&object).await?;
            }
            orphan::Action::Forget(name) => let_go(context, &told, &name).await?,
            orphan::Action::RemoveData { orphan, disk_path, directory } => {
                context.agent.remove_directory(disk_path.into(), directory).await?;
                let_go(context, &told, &orphan).await?;
            }
            orphan::Action::Stop { orphan, process } => {
                context.agent.stop(&process).await?;
                let_go(context, &told, &orphan).await?;
            }
        }
    }
    Ok(())
}

async fn let_go(context: &Context, told: &[std::sync::Arc<Orphan>], name: &str) -> Done {
    let Some(orphan) = told.iter().find(|o| o.name_any() == name) else { return Ok(()) };
    context.desk.set_finalizer(orphan.as_ref(), false).await?;
    context.desk.delete::<Orphan>(name).await
}

async fn create_node(context: &Context, settings: &crate::settings::Settings) -> Done {
    let name = &context.options.node;
    let labelled = context.cache.kube_nodes.find(|n| n.name_any() == *name).is_some_and(|n| {
        n.labels().get("node.longhorn.io/create-default-disk").is_some_and(|value| value == "true")
    });
    let mut spec = NodeSpec { name: name.clone(), allow_scheduling: true, ..NodeSpec::default() };
    if labelled || !settings.default_disk_by_label() {
        let path = settings.default_disk_path().map_or_else(|| context.options.root.clone(), PathBuf::from);
        let found = context.agent.inspect_disk(path.clone()).await.map_err(ReconcileError::NotYet)?;
        let reserved = u128::from(found.maximum) * u128::from(settings.default_disk_reserved()) / 100;
        let disk = DiskSpec {
            path: path.display().to_string(),
            allow_scheduling: true,
            storage_reserved: i64::try_from(reserved).unwrap_or(i64::MAX),
            ..DiskSpec::default()
        };
        spec.disks.insert(format!("{DEFAULT_DISK}-{}", found.uuid.get(..8).unwrap_or_default()), disk);
    }
    context.desk.create(&Node::new(name, spec)).await
}

async fn keep_instance_manager(context: &Context, answers: bool) -> Done {
    let node = &context.options.node;
    let name = instance_manager(node);
    let Some(resource) = context.cache.get(&context.cache.instance_managers, &name) else {
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

/// Looks at an engine.
pub(super) async fn engine(context: &Context, name: &str) -> Done<Outcome> {
    let (cache, here) = (&context.cache, context.options.node.as_str());
    // Without its resource a process is left alone: what was deleted was stopped first.
    let Some(resource) = cache.get(&cache.engines, name) else { return Ok(Outcome::Done) };
    // Of the engines of all other nodes most changes mean nothing here.
    if resource.spec.node_id != here && !context.runs(name) {
        return Ok(Outcome::Done);
    }
    let processes = context.agent.processes().await?;
    let process = processes.get(name);
    if resource.spec.node_id != here && process.is_none() {
        return Ok(Outcome::Done);
    }
    let view = match process {
        Some(_) => context.agent.engine(name).await,
        None => None,
    };
    let actions = engine::plan(&engine::Observed {
        engine: &resource,
        node: here,
        instance_manager: &instance_manager(here),
        process,
        view: view.as_ref(),
        now: Timestamp::now(),
    });
    let mut outcome = Outcome::Done;
    let mut version = resource.resource_version();
    let (mut refusal, mut failure) = (None, None);
    for action in actions {
        tracing::debug!(engine = name, ?action, "engine");
        match action {
            // What follows is written all the same: people look there.
            engine::Action::Start => failure = start_engine(context, &resource).await.err(),
            engine::Action::Stop => context.agent.stop(name).await?,
            engine::Action::AddReplica { name: replica, address } => {
                refusal = context.agent.add_replica(name, &replica, &address).await.err().or(refusal);
            }
            engine::Action::RemoveReplica { name: replica, .. } => {
                refusal = context.agent.remove_replica(name, &replica).await.err().or(refusal);
            }
            engine::Action::Expand(size) => {
                if let Err(e) = context.agent.expand(name, size).await {
                    version = say_not_expanded(context, &resource, version, &e).await?;
                }
            }
            engine::Action::SetStatus(status) => {
                let old = resource.status.clone().unwrap_or_default();
                let done =
                    context.desk.set_status::<Engine, _>(name, version.as_deref(), &old, &*status).await;
                done?;
                // What follows is written on top of it, or not at all.
                version = None;
            }
            engine::Action::Tell(event) => context.desk.tell(resource.as_ref(), &event).await,
            engine::Action::LookAgain(after) => outcome = Outcome::Again(after),
        }
    }
    if let Some(e) = failure {
        tell_failure(context, resource.as_ref(), &e).await;
        return Err(e);
    }
    if let Some(e) = refusal {
        tracing::warn!(engine = name, error = %e, "the engine's replicas are not yet what they should be");
    }
    let on_its_way = resource.spec.node_id == here
        && (process.is_some() && view.as_ref().is_none_or(|v| !v.up)
            || process.is_none() && outcome == Outcome::Done);
    let wants = resource.spec.desire_state == crate::api::DesireState::Running || process.is_some();
    Ok(if on_its_way && wants && outcome == Outcome::Done { Outcome::Again(SOON) } else { outcome })
}

/// Tells people that a process could not be started.
async fn tell_failure<K: super::desk::Kind>(context: &Context, about: &K, why: &ReconcileError) {
    if !matches!(why, ReconcileError::Stale) {
        let event = plan::Event { warning: true, reason: "StartFailed", message: why.to_string() };
        context.desk.tell(about, &event).await;
    }
}

/// Notes why an expansion did not begin. Gives back the version to go on from.
async fn say_not_expanded(
    context: &Context,
    resource: &Engine,
    version: Option<String>,
    why: &AgentError,
) -> Done<Option<String>> {
    let old = resource.status.clone().unwrap_or_default();
    if old.last_expansion_error == why.to_string() {
        return Ok(version);
    }
    let mut new = old.clone();
    new.last_expansion_error = why.to_string();
    new.last_expansion_failed_at = written(Timestamp::now());
    context.desk.set_status::<Engine, _>(&resource.name_any(), None, &old, &new).await?;
    Ok(None)
}

/// Starts an engine under a new generation: above everything that the volume issued and its replicas have seen.
async fn start_engine(context: &Context, resource: &Engine) -> Done {
    let (name, volume) = (resource.name_any(), &resource.spec.volume_name);
    // What the cache says may be old, and a generation given out in vain would shut out the engine that is wanted.
    let fresh = context.desk.api::<Engine>().get(&name).await?;
    if fresh.spec != resource.spec {
        return Err(ReconcileError::Stale);
    }
    lay_key(context, volume).await?;
    let replicas = context.cache.replicas.state_filter(|r| r.spec.volume_name == *volume);
    let told = replicas.iter().filter_map(|r| r.status.as_ref()?.generation).map(|g| g.0);
    let seen = told.max().unwrap_or(Generation::default());
    let generation = authority::issue_generation(&context.desk, volume, seen).await?;
    tracing::info!(engine = name, %generation, "engine starts");
    context.agent.start_engine(EngineStart { name: &name, spec: &resource.spec, generation }).await?;
    Ok(())
}

/// Lays the volume's key on this node.
async fn lay_key(context: &Context, volume: &str) -> Done {
    let secret = context.desk.api::<Secret>().get(&key_secret(volume)).await?;
    let key = secret.data.as_ref().and_then(|data| data.get("key"));
    let key =
        key.ok_or_else(|| ReconcileError::NotYet(format!("secret {} has no key", key_secret(volume))))?;
    Ok(context.agent.store_key(volume, &key.0).await?)
}

/// Looks at a replica.
pub(super) async fn replica(context: &Context, name: &str) -> Done<Outcome> {
    let (cache, here) = (&context.cache, context.options.node.as_str());
    let Some(resource) = cache.get(&cache.replicas, name) else { return Ok(Outcome::Done) };
    if resource.spec.node_id != here {
        return Ok(Outcome::Done);
    }
    let processes = context.agent.processes().await?;
    let process = processes.get(name);
    let view = match process {
        Some(_) => context.agent.replica(name).await,
        None => None,
    };
    let trouble = disk_trouble(context, &resource);
    let address = process.map(|p| context.agent.replica_address(name, p)).unwrap_or_default();
    let actions = replica::plan(&replica::Observed {
        replica: &resource,
        node: here,
        instance_manager: &instance_manager(here),
        disk_trouble: trouble.as_deref(),
        address: &address,
        process,
        view: view.as_ref(),
        now: Timestamp::now(),
    });
    let mut outcome = Outcome::Done;
    let mut version = resource.resource_version();
    let mut failure = None;
    for action in actions {
        tracing::debug!(replica = name, ?action, "replica");
        match action {
            replica::Action::AddFinalizer => {
                version = context.desk.set_finalizer(resource.as_ref(), true).await?
            }
            replica::Action::Start => {
                failure = start_replica(context, &resource).await.err();
                outcome = Outcome::Again(SOON);
            }
            replica::Action::Stop => {
                context.agent.stop(name).await?;
                outcome = Outcome::Again(SOON);
            }
            replica::Action::RemoveData => {
                let spec = &resource.spec;
                let (disk, directory) = (PathBuf::from(&spec.disk_path), spec.data_directory_name.clone());
                context.agent.remove_directory(disk, directory).await?;
                context.desk.set_finalizer(resource.as_ref(), false).await?;
            }
            replica::Action::SetStatus(status) => {
                let old = resource.status.clone().unwrap_or_default();
                context.desk.set_status::<Replica, _>(name, version.as_deref(), &old, &*status).await?;
            }
            replica::Action::LookAgain(after) => outcome = Outcome::Again(after),
        }
    }
    if let Some(e) = failure {
        tell_failure(context, resource.as_ref(), &e).await;
        return Err(e);
    }
    let on_its_way = process.is_some() && view.is_none();
    Ok(if on_its_way && outcome == Outcome::Done { Outcome::Again(SOON) } else { outcome })
}

async fn start_replica(context: &Context, resource: &Replica) -> Done {
    lay_key(context, &resource.spec.volume_name).await?;
    Ok(context.agent.start_replica(&resource.name_any(), &resource.spec).await?)
}

/// Why the disk of a replica cannot be used; `None` if it can.
fn disk_trouble(context: &Context, replica: &Replica) -> Option<String> {
    let node = context.cache.get(&context.cache.nodes, &context.options.node)?;
    let status = node.status.as_ref()?;
    let disk = status.disk_status.values().find(|d| d.disk_uuid == replica.spec.disk_id);
    match disk {
        None => Some(format!("disk {} is not on this node any more", replica.spec.disk_id)),
        Some(disk) => {
            let ready = disk.conditions.get_condition(node::READY)?;
            (!ready.is_true()).then(|| ready.message.clone())
        }
    }
}

/// Looks at a snapshot of a volume whose engine runs here.
pub(super) async fn snapshot(context: &Context, name: &str) -> Done<Outcome> {
    let cache = &context.cache;
    let Some(resource) = cache.get(&cache.snapshots, name) else { return Ok(Outcome::Done) };
    let engine_name = plan::volume::engine_name(&resource.spec.volume);
    let Some(engine) = cache.get(&cache.engines, &engine_name) else { return Ok(Outcome::Done) };
    if engine.spec.node_id != context.options.node {
        return Ok(Outcome::Done);
    }
    let volume = cache.get(&cache.volumes, &resource.spec.volume);
    let in_use = super::leader::is_being_copied(context, &resource);
    let actions = snapshot::plan(&snapshot::Observed {
        snapshot: &resource,
        volume: volume.as_deref(),
        engine: Some(&engine),
        in_use,
        now: Timestamp::now(),
    });
    let mut version = resource.resource_version();
    // Nothing of the snapshot itself changes when the copy ends.
    let waits = in_use && resource.metadata.deletion_timestamp.is_some();
    let mut outcome = if waits { Outcome::Again(SOON) } else { Outcome::Done };
    for action in actions {
        tracing::debug!(snapshot = name, ?action, "snapshot");
        match action {
            snapshot::Action::AddFinalizer => {
                version = context.desk.set_finalizer(resource.as_ref(), true).await?
            }
            snapshot::Action::RemoveFinalizer => {
                version = context.desk.set_finalizer(resource.as_ref(), false).await?;
            }
            snapshot::Action::Take => {
                context.agent.take_snapshot(&engine_name, name, &resource.spec.labels).await?;
                context.news.tell([Key::Engine(engine_name.clone())]);
                outcome = Outcome::Again(SOON);
            }
            snapshot::Action::Remove => {
                context.agent.remove_snapshot(&engine_name, name).await?;
                context.news.tell([Key::Engine(engine_name.clone())]);
                outcome = Outcome::Again(SOON);
            }
            snapshot::Action::SetStatus(status) => {
                let old = resource.status.clone().unwrap_or_default();
                context.desk.set_status::<Snapshot, _>(name, version.as_deref(), &old, &*status).await?;
            }
        }
    }
    Ok(outcome)
}
