//! What the API server holds, kept up to date by one watch per kind, and the news of what changed.

use std::collections::BTreeSet;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
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
    /// The webhook's certificate alone.
    pub(super) secrets: Store<Secret>,
    namespace: String,
}

impl Cache {
    /// The cache, and what keeps it up to date for as long as it is polled. `here`: this node, which looks at itself when
    /// something of its own changes, and not for each of a thousand replicas elsewhere.
    pub(super) fn new(desk: &Desk, news: &Arc<News>, here: &str) -> (Self, Vec<BoxFuture<'static, ()>>) {
        let mut watches = Vec::new();
        let own = |node: &str, here: &str| (node == here).then_some(Key::Here);
        let (of_replica, of_node) = (here.to_owned(), here.to_owned());
        let (of_manager, of_orphan, of_kube) = (here.to_owned(), here.to_owned(), here.to_owned());
        let cache = Self {
            volumes: watch(desk.api(), news, &mut watches, volume_keys),
            engines: watch(desk.api(), news, &mut watches, engine_keys),
            replicas: watch(desk.api(), news, &mut watches, move |r: &Replica| {
                let of_both = [Key::Replica(r.name_any()), Key::Volume(r.spec.volume_name.clone())];
                of_both.into_iter().chain(own(&r.spec.node_id, &of_replica)).collect()
            }),
            attachments: watch(desk.api(), news, &mut watches, |a: &VolumeAttachment| {
                vec![Key::Attachment(a.name_any()), Key::Volume(a.spec.volume.clone())]
            }),
            snapshots: watch(desk.api(), news, &mut watches, |s: &Snapshot| {
                vec![Key::Snapshot(s.name_any()), Key::Volume(s.spec.volume.clone())]
            }),
            nodes: watch(desk.api(), news, &mut watches, move |n: &Node| {
                own(&n.name_any(), &of_node).into_iter().chain([Key::Nodes]).collect()
            }),
            settings: watch(desk.api(), news, &mut watches, |s: &Setting| {
                vec![Key::Setting(s.name_any()), Key::Here, Key::All]
            }),
            instance_managers: watch(desk.api(), news, &mut watches, move |m: &InstanceManager| {
                own(&m.spec.node_id, &of_manager).into_iter().collect()
            }),
            engine_images: watch(desk.api(), news, &mut watches, |_: &EngineImage| vec![Key::Nodes]),
            orphans: watch(desk.api(), news, &mut watches, move |o: &Orphan| {
                own(&o.spec.node_id, &of_orphan).into_iter().collect()
            }),
            kube_nodes: watch(Api::all(desk.client.clone()), news, &mut watches, move |n: &KubeNode| {
                own(&n.name_any(), &of_kube).into_iter().collect()
            }),
            secrets: watch_some(
                desk.api(),
                watcher::Config::default().fields(&format!("metadata.name={SECRET}")),
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
    news: &Arc<News>,
    watches: &mut Vec<BoxFuture<'static, ()>>,
    keys: impl Fn(&K) -> Vec<Key> + Send + 'static,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    watch_some(api, watcher::Config::default(), news, watches, keys)
}

/// Starts to watch those of one kind that the configuration selects.
fn watch_some<K>(
    api: Api<K>,
    config: watcher::Config,
    news: &Arc<News>,
    watches: &mut Vec<BoxFuture<'static, ()>>,
    keys: impl Fn(&K) -> Vec<Key> + Send + 'static,
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
    keys: impl Fn(&K) -> Vec<Key> + Send,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    // Who wrote which field is as large as the object itself, and nobody asks for it.
    let lean = |object: &mut K| object.meta_mut().managed_fields = None;
    let events = watcher(api, config).default_backoff().modify(lean).reflect(writer);
    let mut events = std::pin::pin!(events);
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
