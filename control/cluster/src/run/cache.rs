//! What the API server holds, kept up to date by one watch per kind, and the news of what changed.

use std::collections::BTreeSet;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node as KubeNode, Secret};
use kube::api::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::watcher::{self, watcher};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

use super::certificate::SECRET;
use super::desk::{Desk, Kind};
use super::lease::NODE_LABEL;
use crate::api::{
    Engine, EngineImage, InstanceManager, Node, Orphan, Replica, Setting, Snapshot, Volume, VolumeAttachment,
};
use crate::settings::Settings;

/// A thing to look at.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// Leader: a volume.
    Volume(String),
    /// Leader: the attachment of a volume.
    Attachment(String),
    /// Leader: one setting.
    Setting(String),
    /// Leader: which nodes are alive, and what stands for all of them.
    Nodes,
    /// Leader: everything, anew.
    All,
    /// The webhook's certificate: the leader keeps it, every manager serves it.
    Certificate,
    /// This node: itself and its disks.
    Here,
    /// This node: an engine.
    Engine(String),
    /// This node: a replica.
    Replica(String),
    /// A snapshot, by whoever has its engine; by the leader where none runs.
    Snapshot(String),
    /// Every snapshot of a volume: its engine came, went, or tells of another chain.
    Snapshots(String),
}

/// News that nobody has looked at yet.
#[derive(Debug, Default)]
pub(super) struct News {
    keys: Mutex<BTreeSet<Key>>,
    bell: Notify,
}

impl News {
    pub(super) fn tell(&self, keys: impl IntoIterator<Item = Key>) {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).extend(keys);
        self.bell.notify_one();
    }

    pub(super) fn take(&self) -> BTreeSet<Key> {
        std::mem::take(&mut *self.keys.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for news. Loses none when it is given up.
    pub(super) async fn wait(&self) {
        self.bell.notified().await;
    }
}

/// All kinds that decisions are made of.
#[derive(Clone)]
pub(super) struct Cache {
    pub(super) volumes: Store<Volume>,
    pub(super) engines: Store<Engine>,
    pub(super) replicas: Store<Replica>,
    pub(super) attachments: Store<VolumeAttachment>,
    pub(super) snapshots: Store<Snapshot>,
    pub(super) nodes: Store<Node>,
    pub(super) settings: Store<Setting>,
    pub(super) instance_managers: Store<InstanceManager>,
    pub(super) engine_images: Store<EngineImage>,
    pub(super) orphans: Store<Orphan>,
    pub(super) kube_nodes: Store<KubeNode>,
    pub(super) leases: Store<Lease>,
    /// The webhook's certificate alone.
    pub(super) secrets: Store<Secret>,
    namespace: String,
}

impl Cache {
    /// The cache, and what keeps it up to date for as long as it is polled.
    pub(super) fn new(desk: &Desk, news: &Arc<News>) -> (Self, Vec<BoxFuture<'static, ()>>) {
        let mut watches = Vec::new();
        let plain = watcher::Config::default;
        let cache = Self {
            volumes: watch(desk.api(), plain(), news, &mut watches, volume_keys),
            engines: watch(desk.api(), plain(), news, &mut watches, engine_keys),
            replicas: watch(desk.api(), plain(), news, &mut watches, |r: &Replica| {
                vec![Key::Replica(r.name_any()), Key::Volume(r.spec.volume_name.clone()), Key::Here]
            }),
            attachments: watch(desk.api(), plain(), news, &mut watches, |a: &VolumeAttachment| {
                vec![Key::Attachment(a.name_any()), Key::Volume(a.spec.volume.clone())]
            }),
            snapshots: watch(desk.api(), plain(), news, &mut watches, |s: &Snapshot| {
                vec![Key::Snapshot(s.name_any()), Key::Volume(s.spec.volume.clone())]
            }),
            nodes: watch(desk.api(), plain(), news, &mut watches, |_: &Node| vec![Key::Here, Key::Nodes]),
            settings: watch(desk.api(), plain(), news, &mut watches, |s: &Setting| {
                vec![Key::Setting(s.name_any()), Key::Here, Key::All]
            }),
            instance_managers: watch(desk.api(), plain(), news, &mut watches, |_: &InstanceManager| {
                vec![Key::Here]
            }),
            engine_images: watch(desk.api(), plain(), news, &mut watches, |_: &EngineImage| vec![Key::Nodes]),
            orphans: watch(desk.api(), plain(), news, &mut watches, |_: &Orphan| vec![Key::Here]),
            kube_nodes: watch(Api::all(desk.client.clone()), plain(), news, &mut watches, |_: &KubeNode| {
                vec![Key::Here]
            }),
            leases: watch(desk.api(), plain().labels(NODE_LABEL), news, &mut watches, |_: &Lease| {
                vec![Key::Nodes]
            }),
            secrets: watch(
                desk.api(),
                plain().fields(&format!("metadata.name={SECRET}")),
                news,
                &mut watches,
                |_: &Secret| vec![Key::Certificate],
            ),
            namespace: desk.namespace.clone(),
        };
        (cache, watches)
    }

    /// Waits until everything was read once.
    pub(super) async fn ready(&self) {
        // A store says that it never will be ready only when its watch ended, which it does not while it is polled.
        let _ = futures::join!(
            self.volumes.wait_until_ready(),
            self.engines.wait_until_ready(),
            self.replicas.wait_until_ready(),
            self.attachments.wait_until_ready(),
            self.snapshots.wait_until_ready(),
            self.nodes.wait_until_ready(),
            self.settings.wait_until_ready(),
            self.instance_managers.wait_until_ready(),
            self.engine_images.wait_until_ready(),
            self.orphans.wait_until_ready(),
            self.kube_nodes.wait_until_ready(),
            self.leases.wait_until_ready(),
            self.secrets.wait_until_ready(),
        );
    }

    /// One object of this namespace.
    pub(super) fn get<K: Kind>(&self, store: &Store<K>, name: &str) -> Option<Arc<K>> {
        store.get(&ObjectRef::new(name).within(&self.namespace))
    }

    /// The settings in force.
    pub(super) fn settings(&self) -> Settings {
        let all = self.settings.state();
        let names: Vec<(String, String)> = all.iter().map(|s| (s.name_any(), s.spec.value.clone())).collect();
        Settings::of(names.iter().map(|(name, value)| (name.as_str(), value.as_str())))
    }
}

fn volume_keys(volume: &Volume) -> Vec<Key> {
    let name = volume.name_any();
    vec![
        Key::Volume(name.clone()),
        Key::Attachment(name.clone()),
        Key::Engine(crate::plan::volume::engine_name(&name)),
    ]
}

fn engine_keys(engine: &Engine) -> Vec<Key> {
    let volume = &engine.spec.volume_name;
    vec![Key::Engine(engine.name_any()), Key::Volume(volume.clone()), Key::Snapshots(volume.clone())]
}

/// Starts to watch one kind.
fn watch<K>(
    api: Api<K>,
    config: watcher::Config,
    news: &Arc<News>,
    watches: &mut Vec<BoxFuture<'static, ()>>,
    keys: fn(&K) -> Vec<Key>,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    let (reader, writer) = store();
    watches.push(Box::pin(follow(api, config, Arc::clone(news), writer, keys)));
    reader
}

async fn follow<K>(
    api: Api<K>,
    config: watcher::Config,
    news: Arc<News>,
    writer: Writer<K>,
    keys: fn(&K) -> Vec<Key>,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    let mut events = std::pin::pin!(watcher(api, config).default_backoff().reflect(writer));
    // What was told of: after a watch was lost, things that are gone meanwhile are in no event.
    let mut known: BTreeSet<Key> = BTreeSet::new();
    let mut listed: BTreeSet<Key> = BTreeSet::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Apply(object)) => {
                let keys = keys(&object);
                known.extend(keys.iter().cloned());
                news.tell(keys);
            }
            Ok(watcher::Event::Delete(object)) => news.tell(keys(&object)),
            Ok(watcher::Event::Init) => listed.clear(),
            Ok(watcher::Event::InitApply(object)) => listed.extend(keys(&object)),
            Ok(watcher::Event::InitDone) => {
                let before = std::mem::replace(&mut known, std::mem::take(&mut listed));
                news.tell(before.into_iter().chain(known.iter().cloned()));
            }
            Err(e) => {
                tracing::warn!(kind = %K::kind(&()), error = %e, "the watch was lost and is begun again");
                // The watcher itself waits longer and longer; this only bounds the log.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}
