//! What a manager does for its own node: the node's resources, its engines, replicas and snapshots.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::ListParams;
use lh_block::Generation;

use super::cache::{Key, instance_manager, is_cordoned};
use super::desk::{Desk, Done, Kind, ReconcileError};
use super::leader::key_secret;
use super::queue::Outcome;
use super::shelf::{Item, Shelf};
use super::{Context, authority, instance_pod, orphans, programs};
use crate::agent::{AgentError, EngineStart, Part};
use crate::api::{
    Conditions, DataEngine, DiskSpec, Engine, EngineSpec, InstanceManager, InstanceManagerSpec,
    InstanceManagerStatus, InstanceState, Node, NodeSpec, Replica, ReplicaSpec, Snapshot, Volume,
};
use crate::plan::upgrade::{Images, target};
use crate::plan::volume::{CLONED, pair, volume_of_engine};
use crate::plan::{self, VOLUME_LABEL, engine, node, replica, snapshot, written};

/// How often something that is on its way is looked at.
const SOON: Duration = Duration::from_millis(500);

/// How often something that others have to finish first is looked at.
const LATER: Duration = Duration::from_secs(10);

/// The name of a default disk; Longhorn's begins so, too.
const DEFAULT_DISK: &str = "default-disk";

/// Processes of this node may have changed: those that did are looked at.
pub(super) async fn tell_processes(context: &Context) {
    let Ok(processes) = context.agent.processes().await else { return };
    let mut known = context.processes.lock().unwrap_or_else(PoisonError::into_inner);
    let before = std::mem::replace(&mut *known, processes);
    let differ = |name: &&String| before.get(*name) != known.get(*name);
    let names: BTreeSet<&String> = before.keys().chain(known.keys()).filter(differ).collect();
    context.news.tell(names.into_iter().filter_map(|name| {
        if volume_of_engine(name).is_some() {
            Some(Key::Engine(name.clone()))
        } else if name.contains("-r-") {
            Some(Key::Replica(name.clone()))
        } else {
            None
        }
    }));
}

/// Everything of this node.
pub(super) fn everything(context: &Context) -> Vec<Key> {
    let cache = &context.cache;
    let engines = cache.engines.all().into_iter().map(|e| Key::Engine(e.name_any()));
    let replicas = cache.replicas.all().into_iter().map(|r| Key::Replica(r.name_any()));
    let snapshots = cache.snapshots.all().into_iter().map(|s| Key::Snapshot(s.name_any()));
    engines.chain(replicas).chain(snapshots).chain([Key::Here]).collect()
}

/// The resource of a process. One that went to another node is on no shelf here: whose process is left behind is asked of
/// the API server.
async fn resource_of<K: Kind + Item>(
    context: &Context,
    shelf: &Shelf<K>,
    name: &str,
) -> Done<Option<Arc<K>>> {
    match shelf.get(name) {
        Some(resource) => Ok(Some(resource)),
        None if context.runs(name) => Ok(context.desk.api::<K>().get_opt(name).await?.map(Arc::new)),
        None => Ok(None),
    }
}

/// Looks at this node: its resources, its disks, its instance manager.
pub(super) async fn node(context: &Context) -> Done<Outcome> {
    let (cache, name) = (&context.cache, context.options.node.as_str());
    let settings = cache.settings();
    let Some(resource) = cache.nodes.get(name) else {
        create_node(context, &settings).await?;
        return Ok(Outcome::Again(SOON));
    };
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
        instance_manager: &instance_manager(name),
        settings: &settings,
        now: Timestamp::now(),
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

async fn create_node(context: &Context, settings: &crate::settings::Settings) -> Done {
    let name = &context.options.node;
    let labelled = context.cache.kube_nodes.get(name).is_some_and(|n| {
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

/// Looks at an engine.
pub(super) async fn engine(context: &Context, name: &str) -> Done<Outcome> {
    match look_at_engine(context, name).await {
        // This node was cut off while its engine was replaced, and has not heard of that yet.
        Err(e) if e.is_of_nothing() && context.desk.api::<Engine>().get_opt(name).await?.is_none() => {
            end_what_was_left(context, name).await
        }
        looked => looked,
    }
}

async fn look_at_engine(context: &Context, name: &str) -> Done<Outcome> {
    let (cache, here) = (&context.cache, context.options.node.as_str());
    let Some(resource) = resource_of(context, &cache.engines, name).await? else {
        return end_what_was_left(context, name).await;
    };
    let processes = context.agent.processes().await?;
    let process = processes.get(name);
    let view = match process {
        Some(_) => context.agent.engine(name).await,
        None => None,
    };
    let known = resource.status.clone().unwrap_or_default();
    let images =
        Images { wanted: &resource.spec.image, current: &known.current_image, failed: &known.failed_image };
    let spec = EngineSpec { image: target(images).to_owned(), ..resource.spec.clone() };
    let actions = engine::plan(&engine::Observed {
        engine: &resource,
        node: here,
        instance_manager: &instance_manager(here),
        process,
        programs: programs::of_process(context, images, process).await,
        view: view.as_ref(),
        relay_address: &process.map(|p| context.agent.relay_address(name, p)).unwrap_or_default(),
        now: Timestamp::now(),
    });
    let mut outcome = Outcome::Done;
    let mut version = resource.resource_version();
    let (mut refusal, mut failure) = (None, None);
    let mut stay = known.stay;
    for action in actions {
        tracing::debug!(engine = name, ?action, "engine");
        match action {
            engine::Action::Start => failure = start_engine(context, name, &spec, &stay).await.err(),
            engine::Action::TakeOver => failure = take_over(context, name, &spec, &stay).await.err(),
            engine::Action::Exchange(image) => {
                tracing::info!(engine = name, image, "the engine's program is exchanged");
                let spec = EngineSpec { image, ..spec.clone() };
                let generation = Generation::default();
                let start = EngineStart { name, spec: &spec, generation, stay: &stay };
                context.agent.exchange(name, Part::Engine(start)).await?;
            }
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
                stay = status.stay;
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

/// Ends an engine that no resource names, if its volume has another one, or goes: its node was silent when a migration
/// ended, or when the volume was deleted. One that is none of this manager's is left alone.
async fn end_what_was_left(context: &Context, name: &str) -> Done<Outcome> {
    let Some(volume) = volume_of_engine(name).filter(|_| context.is_own_engine(name)) else {
        return Ok(Outcome::Done);
    };
    let has_other = !engines_of(&context.desk, volume).await?.is_empty();
    let found = context.desk.api::<Volume>().get_opt(volume).await?;
    if !has_other && found.is_some_and(|volume| volume.metadata.deletion_timestamp.is_none()) {
        // It is about to be deleted, or to have another engine.
        return Ok(Outcome::Again(LATER));
    }
    tracing::info!(engine = name, has_other, "what was left of the volume here is ended");
    context.agent.stop(name).await?;
    Ok(Outcome::Again(SOON))
}

/// The engines of a volume, wherever they are.
pub(super) async fn engines_of(desk: &Desk, volume: &str) -> kube::Result<Vec<Engine>> {
    let those = ListParams::default().labels(&format!("{VOLUME_LABEL}={volume}"));
    desk.api::<Engine>().list(&those).await.map(|found| found.items)
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

/// Starts an engine, or a relay.
async fn start_engine(context: &Context, name: &str, spec: &EngineSpec, stay: &str) -> Done {
    lay_key(context, &spec.volume_name).await?;
    let generation = number(context, spec).await?;
    tracing::info!(engine = name, %generation, relay_from = spec.relay_from, "engine starts");
    Ok(context.agent.start_engine(EngineStart { name, spec, generation, stay }).await?)
}

/// Has an engine take a relay's place.
async fn take_over(context: &Context, name: &str, spec: &EngineSpec, stay: &str) -> Done {
    let generation = number(context, spec).await?;
    tracing::info!(engine = name, %generation, relay_from = spec.relay_from, "engine takes a relay's place");
    Ok(context.agent.take_over(EngineStart { name, spec, generation, stay }).await?)
}

/// A new generation for an engine: above everything that the volume issued and its replicas have seen. A relay needs none.
async fn number(context: &Context, spec: &EngineSpec) -> Done<Generation> {
    if spec.relays() {
        return Ok(Generation::default());
    }
    let volume = &spec.volume_name;
    let of_volume = ListParams::default().fields(&format!("spec.volumeName={volume}")).match_any();
    let replicas = context.desk.api::<Replica>().list(&of_volume).await?;
    let told = replicas.items.iter().filter_map(|r| r.status.as_ref()?.generation).map(|g| g.0);
    let seen = told.max().unwrap_or(Generation::default());
    let here = &context.options.node;
    authority::issue_generation(&context.desk, volume, here, seen).await
}

/// Lays the volume's key on this node.
async fn lay_key(context: &Context, volume: &str) -> Done {
    let secret = context.desk.api::<Secret>().get(&key_secret(volume)).await?;
    let key = secret.data.as_ref().and_then(|data| data.get("key"));
    let key =
        key.ok_or_else(|| ReconcileError::NotYet(format!("secret {} has no key", key_secret(volume))))?;
    Ok(context.agent.store_key(volume, &key.0).await?)
}

/// What a replica is asked for maps with, from the key that was laid here before it was started.
fn map_key(context: &Context, resource: &Replica) -> String {
    let known = resource.status.as_ref().map(|s| s.map_key.clone()).unwrap_or_default();
    if !known.is_empty() {
        return known;
    }
    // Without it nobody is told where snapshots hold data, and all else goes on.
    let Ok(root) = control::host::Root::at(&context.options.root) else { return String::new() };
    let Ok(key) = control::host::read_key(&root.key(&resource.spec.volume_name)) else {
        return String::new();
    };
    control::host::MapKey::of(&key).to_string()
}

/// Looks at a replica.
pub(super) async fn replica(context: &Context, name: &str) -> Done<Outcome> {
    let (cache, here) = (&context.cache, context.options.node.as_str());
    let Some(resource) = resource_of(context, &cache.replicas, name).await? else { return Ok(Outcome::Done) };
    let processes = context.agent.processes().await?;
    let process = processes.get(name);
    let view = match process {
        Some(_) => context.agent.replica(name).await,
        None => None,
    };
    let trouble = disk_trouble(context, &resource);
    let address = process.map(|p| context.agent.replica_address(name, p)).unwrap_or_default();
    let map_key = map_key(context, &resource);
    let known = resource.status.clone().unwrap_or_default();
    let images =
        Images { wanted: &resource.spec.image, current: &known.current_image, failed: &known.failed_image };
    let spec = ReplicaSpec { image: target(images).to_owned(), ..resource.spec.clone() };
    let actions = replica::plan(&replica::Observed {
        replica: &resource,
        node: here,
        instance_manager: &instance_manager(here),
        disk_trouble: trouble.as_deref(),
        address: &address,
        map_key: &map_key,
        process,
        programs: programs::of_process(context, images, process).await,
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
                failure = start_replica(context, name, &spec).await.err();
                outcome = Outcome::Again(SOON);
            }
            replica::Action::Exchange(image) => {
                tracing::info!(replica = name, image, "the replica's program is exchanged");
                let spec = ReplicaSpec { image, ..spec.clone() };
                context.agent.exchange(name, Part::Replica(&spec)).await?;
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

async fn start_replica(context: &Context, name: &str, spec: &ReplicaSpec) -> Done {
    lay_key(context, &spec.volume_name).await?;
    Ok(context.agent.start_replica(name, spec).await?)
}

/// Why the disk of a replica cannot be used; `None` if it can.
fn disk_trouble(context: &Context, replica: &Replica) -> Option<String> {
    let node = context.cache.nodes.get(&context.options.node)?;
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
    let Some(resource) = cache.snapshots.get(name) else { return Ok(Outcome::Done) };
    let engines = cache.engines.of(&resource.spec.volume);
    // A volume that is on its way elsewhere is the leader's affair.
    let Some(volume) = cache.volumes.get(&resource.spec.volume) else { return Ok(Outcome::Done) };
    let Some(engine) = pair(&volume, engines.iter().map(Arc::as_ref)).0 else { return Ok(Outcome::Done) };
    let engine_name = engine.name_any();
    let goes = resource.metadata.deletion_timestamp.is_some();
    let in_use = goes && being_copied(context, &resource.spec.volume).await?.contains(name);
    let actions = snapshot::plan(&snapshot::Observed {
        snapshot: &resource,
        volume: Some(&volume),
        engine: Some(engine),
        in_use,
        now: Timestamp::now(),
    });
    let mut version = resource.resource_version();
    // Nothing of the snapshot itself changes when the copy ends.
    let mut outcome = if in_use { Outcome::Again(SOON) } else { Outcome::Done };
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

/// Snapshots of a volume that others are being copied from. Volumes of other nodes are in no cache here.
pub(super) async fn being_copied(context: &Context, volume: &str) -> Done<BTreeSet<String>> {
    let fields = format!("status.cloneStatus.sourceVolume={volume}");
    let clones = context.desk.api::<Volume>().list(&ListParams::default().fields(&fields)).await?;
    let copied = |v: Volume| {
        let stays = v.metadata.deletion_timestamp.is_none();
        let clone = v.status.map(|s| s.clone_status).filter(|c| stays && c.state != CLONED)?;
        Some(clone.snapshot)
    };
    Ok(clones.items.into_iter().filter_map(copied).collect())
}
