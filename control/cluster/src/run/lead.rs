//! What a manager has only while it leads: everything there is, and the picture of nodes and disks that decisions about
//! volumes share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::cache::{Global, Key, News};
use super::desk::Desk;
use super::pods::Remounts;
use super::tickets::Seen;
use super::{Context, budgets, failures::Failures, idle, programs};
use crate::plan::node;
use crate::plan::rebuild::{Decided, Place, reserved, taken};
use crate::plan::volume::{Action, Filling};
use crate::schedule;
use crate::settings::Settings;

/// What a manager has while it leads. Its watches end with it.
pub(super) struct Lead {
    pub(super) cache: Global,
    is_ready: Arc<AtomicBool>,
    picture: Mutex<Option<(Stamps, Arc<Picture>)>>,
    /// What was last known of nodes and disks that could change where a replica goes.
    pub(super) pictured: Mutex<schedule::Cluster>,
    rebuilds: Mutex<Rebuilds>,
    /// Nodes of which it was told that their manager is silent, for as long as it is.
    pub(super) told_silent: Mutex<BTreeSet<String>>,
    /// Devices that were lost.
    pub(super) remounts: Mutex<Remounts>,
    pub(super) failures: Mutex<Failures>,
    /// Nodes that are gone, and versions of their managers' leases, which were to be deleted.
    pub(super) leases_tried: Mutex<BTreeSet<(String, Option<String>)>>,
    /// Tickets that may be left on nodes that are to be drained.
    pub(super) left: Mutex<Seen>,
    begun: Instant,
    _tasks: JoinSet<()>,
}

/// Replicas that are being filled.
#[derive(Default)]
struct Rebuilds {
    /// The places that are taken, and their nodes, as of that change of any replica and attachment.
    seen: BTreeMap<Place, String>,
    as_of: Option<(u64, u64)>,
    decided: Decided,
}

/// The nodes and disks at one moment, for the decisions about all volumes.
pub(super) struct Picture {
    /// Nodes whose manager answers.
    pub(super) up: Arc<BTreeSet<String>>,
    pub(super) settings: Settings,
    pub(super) cluster: schedule::Cluster,
    /// Paths of the disks, by node and UUID.
    pub(super) disk_paths: BTreeMap<(String, String), String>,
}

/// What a picture is made of: it holds while these are the same.
#[derive(PartialEq, Eq)]
struct Stamps {
    nodes: u64,
    replicas: u64,
    settings: u64,
    kube_nodes: u64,
    budgets: u64,
    engine_images: u64,
    up: Arc<BTreeSet<String>>,
}

impl Lead {
    /// Begins to read everything. Once it is read, all is looked at.
    pub(super) fn begin(desk: &Desk, news: &Arc<News>) -> Arc<Self> {
        let (cache, watches) = Global::new(desk, news);
        let mut tasks = JoinSet::new();
        for watch in watches.into_iter().chain(idle::let_go(desk)) {
            tasks.spawn(watch);
        }
        let is_ready = Arc::new(AtomicBool::new(false));
        let (reads, ready, news) = (cache.clone(), Arc::clone(&is_ready), Arc::clone(news));
        tasks.spawn(async move {
            reads.ready().await;
            ready.store(true, Ordering::Release);
            news.tell([Key::All, Key::Nodes, Key::Certificate]);
        });
        Arc::new(Self {
            cache,
            is_ready,
            picture: Mutex::default(),
            pictured: Mutex::default(),
            rebuilds: Mutex::default(),
            told_silent: Mutex::default(),
            remounts: Mutex::default(),
            failures: Mutex::default(),
            leases_tried: Mutex::default(),
            left: Mutex::default(),
            begun: Instant::now(),
            _tasks: tasks,
        })
    }

    /// False until everything was read once: what is missing would be made anew.
    pub(super) fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Acquire)
    }

    /// For how long this manager has led.
    pub(super) fn has_led_for(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Has one volume decided on at a time, knowing what is being filled and what the decisions before it will fill.
    pub(super) fn decide_rebuilds(
        &self,
        volume: &str,
        decide: impl FnOnce(&Filling) -> Vec<Action>,
    ) -> Vec<Action> {
        let mut rebuilds = self.rebuilds.lock().unwrap_or_else(PoisonError::into_inner);
        let stamps = (self.cache.replicas.changes(), self.cache.attachments.stamp());
        if rebuilds.as_of != Some(stamps) {
            let (replicas, attachments) = (self.cache.replicas.all(), self.cache.attachments.all());
            rebuilds.seen = taken(replicas.iter().map(Arc::as_ref), attachments.iter().map(Arc::as_ref));
            rebuilds.as_of = Some(stamps);
        }
        let Rebuilds { seen, decided, .. } = &mut *rebuilds;
        let known = |place: &Place| match place {
            Place::Replica(name) => self.cache.replicas.get(name).is_some(),
            Place::Volume(name) => {
                self.cache.attachments.get(name).is_some_and(|a| !reserved([&*a]).is_empty())
            }
        };
        let now = self.begun.elapsed();
        let actions = decide(&decided.filling(volume, seen, known, now));
        decided.note(volume, &actions, now);
        actions
    }

    /// Nodes and disks as they are now.
    pub(super) fn picture(&self, context: &Context) -> Arc<Picture> {
        let stamps = Stamps {
            nodes: self.cache.nodes.stamp(),
            replicas: self.cache.replicas.stamp(),
            settings: context.cache.settings.stamp(),
            kube_nodes: self.cache.kube_nodes.stamp(),
            budgets: self.cache.budgets.stamp(),
            engine_images: context.cache.engine_images.stamp(),
            up: context.nodes_up(),
        };
        let mut kept = self.picture.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, picture)) = &*kept
            && *of == stamps
        {
            return Arc::clone(picture);
        }
        let (nodes, replicas) = (self.cache.nodes.all(), self.cache.replicas.all());
        let (up, settings) = (Arc::clone(&stamps.up), context.cache.settings());
        let (nodes, replicas) = (nodes.iter().map(Arc::as_ref), replicas.iter().map(Arc::as_ref));
        let (drains, programs) = (budgets::views(&self.cache), programs::by_node(&context.cache));
        let (cluster, disk_paths) = node::picture(nodes, replicas, &up, &drains, &programs, &settings);
        let picture = Arc::new(Picture { up, settings, cluster, disk_paths });
        *kept = Some((stamps, Arc::clone(&picture)));
        picture
    }
}
