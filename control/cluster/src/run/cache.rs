//! What the API server holds, kept up to date by watches, and the news of what changed.
//!
//! A manager hears of what is of its own node ([`Local`]), whoever leads of everything ([`Global`]): with a hundred nodes
//! each change would otherwise be sent, and read, a hundred times. Fields that are selected by are declared in the
//! definitions (`selectableFields`, Kubernetes 1.31). Of snapshots every manager hears: they do not name their node.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node as KubeNode, Pod, PodTemplate, Secret};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;
use kube::api::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use tokio::sync::Notify;

use super::Options;
use super::certificate::SECRET;
use super::clients::was_silent;
use super::desk::Desk;
use super::queue::{Lane, Laned};
use super::shelf::{Item, Shelf, Told};
use crate::api::{
    Engine, EngineImage, InstanceManager, Node, Orphan, Replica, Setting, Snapshot, Volume, VolumeAttachment,
};
use crate::plan::instance_manager::{RunBy, TEMPLATE};
use crate::plan::orphan::volume_of;
use crate::plan::snapshot::is_news;
use crate::plan::trim::pending;
use crate::settings::{Given, Settings};

/// A thing to look at.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// Leader: a volume.
    Volume(String),
    /// Leader: the attachment of a volume.
    Attachment(String),
    /// A request to trim a volume's file system: by the volume's node, or by the leader where there is none.
    Trim(String),
    /// Leader: one setting.
    Setting(String),
    /// Leader: an orphan, whose node may be gone for good.
    Orphan(String),
    /// Leader: which nodes are alive, and what stands for all of them.
    Nodes,
    /// Leader: the pods of a node whose manager is silent.
    PodsOf(String),
    /// Leader: the pods of a volume whose device was lost.
    Remount(String),
    /// Leader: everything, anew.
    All,
    /// The webhook's certificate: the leader keeps it, every manager serves it.
    Certificate,
    /// This node: which images' programs are on it.
    Programs,
    /// This node: itself and its disks.
    Here,
    /// This node: an engine.
    Engine(String),
    /// This node: a replica.
    Replica(String),
    /// This node: the device of a volume that has no engine here.
    Device(String),
    /// A snapshot, by whoever has its engine; by the leader where none runs.
    Snapshot(String),
    /// Every snapshot of a volume: its engine came, went, or tells of another chain.
    Snapshots(String),
}

impl Laned for Key {
    fn lane(&self) -> Lane {
        match self {
            Self::Snapshot(_) | Self::Trim(_) => Lane::Chains,
            Self::Engine(_) => Lane::Engines,
            Self::Replica(_) | Self::Device(_) => Lane::Replicas,
            _ => Lane::Rest,
        }
    }
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

impl Item for Volume {}
impl Item for Node {}
impl Item for Setting {}
impl Item for InstanceManager {}
impl Item for EngineImage {}
impl Item for Orphan {
    fn owner(&self) -> &str {
        volume_of(self).unwrap_or_default()
    }
}
impl Item for VolumeAttachment {
    /// How tickets fare does not.
    fn counts_otherwise(&self, before: &Self) -> bool {
        self.spec != before.spec
    }
}
impl Item for Secret {}
impl Item for Pod {}
impl Item for PodTemplate {}
impl Item for PodDisruptionBudget {
    /// That it is there counts, not how its pod is.
    fn counts_otherwise(&self, _before: &Self) -> bool {
        false
    }
}

impl Item for KubeNode {
    /// Kubelets tell every few minutes that they live.
    fn counts_otherwise(&self, before: &Self) -> bool {
        is_cordoned(self) != is_cordoned(before)
    }
}

/// True for a node on which nothing new is to be started.
pub(super) fn is_cordoned(node: &KubeNode) -> bool {
    node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false)
}

impl Item for Engine {
    fn owner(&self) -> &str {
        &self.spec.volume_name
    }
}

impl Item for Snapshot {
    fn owner(&self) -> &str {
        &self.spec.volume
    }
}

impl Item for Replica {
    fn owner(&self) -> &str {
        &self.spec.volume_name
    }

    /// What it takes of the room of a disk.
    fn counts_otherwise(&self, before: &Self) -> bool {
        let place = |r: &Self| (r.spec.node_id.clone(), r.spec.disk_id.clone(), r.spec.volume_size);
        place(self) != place(before)
    }
}

/// The field that names the node of an engine, a replica, an orphan, and the one that a volume should be on.
const NODE_FIELD: &str = "spec.nodeID";

/// The name of a node's instance manager.
pub(super) fn instance_manager(node: &str) -> String {
    format!("instance-manager-{node}")
}

/// That somebody asks for a volume's file system to be trimmed.
fn trim_request(volume: &Volume) -> Vec<Key> {
    pending(volume).map(|_| Key::Trim(volume.name_any())).into_iter().collect()
}

/// What is of this node.
#[derive(Clone)]
pub(super) struct Local {
    /// Those that should be here.
    pub(super) volumes: Shelf<Volume>,
    pub(super) engines: Shelf<Engine>,
    pub(super) replicas: Shelf<Replica>,
    /// Of all nodes.
    pub(super) snapshots: Shelf<Snapshot>,
    /// This one alone.
    pub(super) nodes: Shelf<Node>,
    /// All.
    pub(super) settings: Shelf<Setting>,
    /// What counts for settings that nobody has made yet.
    given: Arc<Given>,
    /// This one's alone.
    pub(super) instance_managers: Shelf<InstanceManager>,
    pub(super) orphans: Shelf<Orphan>,
    /// All.
    pub(super) engine_images: Shelf<EngineImage>,
    /// This one alone.
    pub(super) kube_nodes: Shelf<KubeNode>,
    /// The webhook's certificate alone.
    pub(super) secrets: Shelf<Secret>,
    /// Where the manager makes its instance manager's pod.
    pub(super) pod: Option<OwnPod>,
}

/// The pod of this node's instance manager, and its template.
#[derive(Clone)]
pub(super) struct OwnPod {
    pub(super) pods: Shelf<Pod>,
    pub(super) templates: Shelf<PodTemplate>,
}

impl Local {
    /// What is of this manager's node, and what keeps it up to date for as long as it is polled.
    pub(super) fn new(
        desk: &Desk,
        news: &Arc<News>,
        options: &Options,
    ) -> (Self, Vec<BoxFuture<'static, ()>>) {
        let here = options.node.as_str();
        let mut to = Watches { desk, news: Arc::clone(news), all: Vec::new() };
        let of_node = format!("{NODE_FIELD}={here}");
        let named = |name: &str| format!("metadata.name={name}");
        let engines = to.watch_changes(desk.watched(), &of_node, |told: &Told<Engine>| {
            let engine = Key::Engine(told.object.name_any());
            [engine].into_iter().chain(news_for_snapshots(told)).collect()
        });
        let local = Self {
            volumes: to.watch_changes(desk.watched(), &of_node, |told: &Told<Volume>| {
                // Its engine may have been heard of before it.
                let came = told.before.is_none().then(|| Key::Snapshots(told.object.name_any()));
                trim_request(&told.object).into_iter().chain(came).collect()
            }),
            engines: engines.clone(),
            // What replicas take of a disk is told with the next round.
            replicas: to.watch(desk.watched(), &of_node, |r: &Replica| vec![Key::Replica(r.name_any())]),
            snapshots: to.watch_changes(desk.watched(), "", move |told: &Told<Snapshot>| {
                let (name, volume) = (told.object.name_any(), told.object.spec.volume.clone());
                let went = if told.is_there { Vec::new() } else { left_unnamed(&engines, &name, &volume) };
                [Key::Snapshot(name), Key::Volume(volume)].into_iter().chain(went).collect()
            }),
            nodes: to.watch(desk.watched(), &named(here), |_| vec![Key::Here]),
            settings: to.watch(desk.watched(), "", |s: &Setting| {
                vec![Key::Setting(s.name_any()), Key::Here, Key::Nodes, Key::All]
            }),
            instance_managers: to.watch(desk.watched(), &named(&instance_manager(here)), |_| vec![Key::Here]),
            orphans: to.watch(desk.watched(), &of_node, |_| vec![Key::Here]),
            engine_images: to.watch(desk.watched(), "", |_: &EngineImage| vec![Key::Programs, Key::Nodes]),
            kube_nodes: to.watch(Api::all(desk.watching.clone()), &named(here), |_| vec![Key::Here]),
            secrets: to.watch(desk.watched(), &named(SECRET), |_| vec![Key::Certificate]),
            given: Arc::clone(&options.settings),
            pod: (options.instance_manager == RunBy::Pod).then(|| OwnPod {
                pods: to.watch(desk.watched(), &named(&instance_manager(here)), |_| vec![Key::Here]),
                templates: to.watch(desk.watched(), &named(TEMPLATE), |_| vec![Key::Here]),
            }),
        };
        (local, to.all)
    }

    /// Waits until everything was read once.
    pub(super) async fn ready(&self) {
        futures::join!(
            self.volumes.ready(),
            self.engines.ready(),
            self.replicas.ready(),
            self.snapshots.ready(),
            self.nodes.ready(),
            self.settings.ready(),
            self.instance_managers.ready(),
            self.orphans.ready(),
            self.engine_images.ready(),
            self.kube_nodes.ready(),
            self.secrets.ready(),
        );
        if let Some(pod) = &self.pod {
            futures::join!(pod.pods.ready(), pod.templates.ready());
        }
    }

    /// The settings in force.
    pub(super) fn settings(&self) -> Settings {
        let all = self.settings.all();
        let names: Vec<(String, String)> = all.iter().map(|s| (s.name_any(), s.spec.value.clone())).collect();
        let written = names.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        Settings::of(self.given.all().chain(written))
    }
}

/// What is of all nodes.
#[derive(Clone)]
pub(super) struct Global {
    pub(super) volumes: Shelf<Volume>,
    pub(super) engines: Shelf<Engine>,
    pub(super) replicas: Shelf<Replica>,
    pub(super) attachments: Shelf<VolumeAttachment>,
    pub(super) nodes: Shelf<Node>,
    pub(super) kube_nodes: Shelf<KubeNode>,
    pub(super) orphans: Shelf<Orphan>,
    /// Those of instance managers among others.
    pub(super) budgets: Shelf<PodDisruptionBudget>,
}

impl Global {
    /// Everything, and what keeps it up to date for as long as it is polled.
    pub(super) fn new(desk: &Desk, news: &Arc<News>) -> (Self, Vec<BoxFuture<'static, ()>>) {
        let mut to = Watches { desk, news: Arc::clone(news), all: Vec::new() };
        let global = Self {
            volumes: to.watch(desk.watched(), "", |v: &Volume| {
                [Key::Volume(v.name_any()), Key::Attachment(v.name_any())]
                    .into_iter()
                    .chain(trim_request(v))
                    .collect()
            }),
            engines: to.watch_changes(desk.watched(), "", |told: &Told<Engine>| {
                let volume = Key::Volume(told.object.spec.volume_name.clone());
                [volume].into_iter().chain(news_for_snapshots(told)).collect()
            }),
            replicas: to
                .watch(desk.watched(), "", |r: &Replica| vec![Key::Volume(r.spec.volume_name.clone())]),
            attachments: to.watch(desk.watched(), "", |a: &VolumeAttachment| {
                vec![Key::Attachment(a.name_any()), Key::Volume(a.spec.volume.clone())]
            }),
            nodes: to.watch(desk.watched(), "", |_: &Node| vec![Key::Nodes]),
            kube_nodes: to.watch(Api::all(desk.watching.clone()), "", |_: &KubeNode| vec![Key::Nodes]),
            orphans: to.watch(desk.watched(), "", |o: &Orphan| {
                let volume = volume_of(o).map(|volume| Key::Volume(volume.to_owned()));
                [Key::Orphan(o.name_any())].into_iter().chain(volume).collect()
            }),
            budgets: to.watch(desk.watched(), "", |_: &PodDisruptionBudget| vec![Key::Nodes]),
        };
        (global, to.all)
    }

    /// Waits until everything was read once.
    pub(super) async fn ready(&self) {
        futures::join!(
            self.volumes.ready(),
            self.engines.ready(),
            self.replicas.ready(),
            self.attachments.ready(),
            self.nodes.ready(),
            self.kube_nodes.ready(),
            self.orphans.ready(),
            self.budgets.ready(),
        );
    }
}

/// What has to be looked at where the resource of a snapshot went: another snapshot of that name may be without one now, of its volume or of
/// one that was copied from it.
fn left_unnamed(engines: &Shelf<Engine>, snapshot: &str, volume: &str) -> Vec<Key> {
    let has_it = |e: &Engine| e.status.as_ref().is_some_and(|s| s.snapshots.contains_key(snapshot));
    let all = engines.all();
    let others = all.iter().filter(|e| e.spec.volume_name != volume && has_it(e));
    let others = others.map(|e| e.spec.volume_name.clone());
    [volume.to_owned()].into_iter().chain(others).map(Key::Snapshots).collect()
}

/// What has to be looked at where an engine tells something that a snapshot depends on.
fn news_for_snapshots(told: &Told<Engine>) -> Option<Key> {
    let is_news = told.before.as_ref().is_none_or(|before| is_news(before, &told.object));
    is_news.then(|| Key::Snapshots(told.object.spec.volume_name.clone()))
}

/// Watches that are being begun.
struct Watches<'a> {
    desk: &'a Desk,
    news: Arc<News>,
    all: Vec<BoxFuture<'static, ()>>,
}

impl Watches<'_> {
    /// Begins to watch those of one kind that `fields` selects; empty: all.
    fn watch<K: Item>(
        &mut self,
        api: Api<K>,
        fields: &str,
        keys: impl Fn(&K) -> Vec<Key> + Send + 'static,
    ) -> Shelf<K> {
        self.watch_changes(api, fields, move |told: &Told<K>| keys(&told.object))
    }

    /// The same where it matters what has changed.
    fn watch_changes<K: Item>(
        &mut self,
        api: Api<K>,
        fields: &str,
        keys: impl Fn(&Told<K>) -> Vec<Key> + Send + 'static,
    ) -> Shelf<K> {
        let config = watcher::Config::default();
        let config = if fields.is_empty() { config } else { config.fields(fields) };
        let shelf = Shelf::new();
        let (patience, news) = (self.desk.patience::<K>(), Arc::clone(&self.news));
        self.all.push(Box::pin(follow(watcher(api, config).backoff(patience), news, shelf.clone(), keys)));
        shelf
    }
}

async fn follow<K: Item>(
    events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send,
    news: Arc<News>,
    shelf: Shelf<K>,
    keys: impl Fn(&Told<K>) -> Vec<Key> + Send,
) {
    // Who wrote which field is as large as the object itself, and nobody asks for it.
    let lean = |object: &mut K| object.meta_mut().managed_fields = None;
    let mut events = std::pin::pin!(events.modify(lean));
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                let changed = shelf.hear(event);
                if !changed.is_empty() {
                    news.tell(changed.iter().flat_map(&keys));
                }
            }
            Err(e) => {
                if was_silent(&e) {
                    tracing::debug!(kind = %K::kind(&()), "the watch was silent and is begun again");
                } else {
                    tracing::warn!(kind = %K::kind(&()), error = %e, "the watch was lost and is begun again");
                }
                // The watcher itself waits longer and longer; this only bounds the log.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}
