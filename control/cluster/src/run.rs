//! `longhorn manager`: the control plane of one node, and, on one of them, of the whole cluster.
//!
//! Watches keep a cache, of this node or, where it leads, of everything; what changed is put on a queue; a look at one thing
//! reads the cache, decides (`crate::plan`) and carries out what was decided. Nothing is asked of the API server at rest but the watches and
//! the leases. A write names the version that was read, so that a decision made on old news is refused and made again.

mod alone;
mod authority;
mod budgets;
mod cache;
mod capacity;
mod certificate;
mod clients;
mod clock;
mod desk;
mod drain;
mod engines;
mod facts;
mod failures;
mod here;
mod idle;
mod instance_pod;
mod key;
mod lead;
mod leader;
mod leadership;
mod lease;
mod left;
mod nodes;
mod orphans;
mod patch;
mod patience;
mod pods;
mod processes;
mod programs;
mod queue;
mod replicas;
mod request;
mod shelf;
mod snapshots;
mod sole;
mod stays;
mod tickets;
mod trim;
mod upgrades;
mod webhook;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use control::host::{Root, RootError};
use kube::ResourceExt;
use thiserror::Error;
use tokio::task::{Id, JoinSet};
use tokio::time::Instant;

use crate::agent::{Agent, Bounded, LocalAgent, ProcessView, Reach, authority_at};
use crate::plan::instance_manager::RunBy;
use crate::settings::Given;
use cache::{Key, Local, News};
use desk::{Desk, Done, ReconcileError};
use lead::Lead;
use leadership::{Leadership, keep_leases};
use queue::{Outcome, Queue};

pub use alone::alone;
pub use clients::Clients;
pub use clock::Clock;
pub use request::{RequestError, Trimmed, request_trim, trim};

/// How often the engines and disks of this node are asked how they are: over unix sockets of the node, without the API
/// server. Engines do not tell by themselves yet.
const ROUND: Duration = Duration::from_secs(5);

/// How to run a manager.
#[derive(Clone, Debug)]
pub struct Options {
    /// The node's name in Kubernetes.
    pub node: String,
    /// The namespace of everything.
    pub namespace: String,
    /// Where volumes, logs and sockets of this node lie; also its default disk.
    pub root: PathBuf,
    /// The image of the programs, as it is named in engines and replicas.
    pub image: String,
    /// Who runs the instance manager of this node.
    pub instance_manager: RunBy,
    /// The socket on which engines ask for their volume's authority.
    pub authority: PathBuf,
    /// The TCP port on which the API server asks what users may do; `None`: it does not ask here.
    pub webhook: Option<u16>,
    /// Defaults of settings that go before those of Longhorn.
    pub settings: Arc<Given>,
    /// What time it is.
    pub clock: Clock,
}

/// Why a manager does not run.
#[derive(Debug, Error)]
pub enum RunError {
    /// The API server does not answer as it should.
    #[error("the API server: {0}")]
    Api(#[from] Box<kube::Error>),
    /// Longhorn itself runs on these resources.
    #[error(
        "Longhorn itself runs in namespace {namespace} (pod {pod}): both would act on the same volumes. Stop the pods that use its volumes, wait until every volume is detached, and remove Longhorn's workloads but not its resources (docs/install.md, Moving from Longhorn)"
    )]
    Longhorn {
        /// Where.
        namespace: String,
        /// One of its pods.
        pod: String,
    },
    /// The definitions of the resources are not there.
    #[error(
        "the API server does not know volumes.longhorn.io: longhornctl install manifests | kubectl apply --server-side -f -"
    )]
    Definitions,
    /// The root cannot be used.
    #[error(transparent)]
    Root(#[from] RootError),
    /// Whether another manager has the root cannot be said.
    #[error("{}: {source}", path.display())]
    Lock {
        /// The lock's file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The socket for engines cannot be used.
    #[error("{}: {source}", socket.display())]
    Socket {
        /// Its path.
        socket: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The port for the API server's questions cannot be used.
    #[error("port {port} for the webhook: {source}")]
    Webhook {
        /// The port.
        port: u16,
        /// What the system said.
        source: std::io::Error,
    },
}

/// What every look needs.
struct Context {
    options: Options,
    desk: Desk,
    /// What is of this node.
    cache: Local,
    agent: Arc<dyn Agent>,
    news: Arc<News>,
    /// Which managers live, as far as is known here; only who leads asks.
    counted: Mutex<nodes::Counted>,
    /// Processes of this node, as of the last change that was heard of.
    processes: Mutex<BTreeMap<String, ProcessView>>,
    leadership: Leadership,
    certificate: webhook::Certificate,
    orphans_seen: Mutex<orphans::Seen>,
    unknown: Mutex<stays::Unknown>,
    sizes: Mutex<engines::Sizes>,
}

impl Context {
    fn nodes_up(&self) -> Arc<BTreeSet<String>> {
        Arc::clone(&self.counted.lock().unwrap_or_else(PoisonError::into_inner).up)
    }

    /// What the leader has; `None`: this manager does not lead, or has not read everything yet.
    fn lead(&self) -> Option<Arc<Lead>> {
        self.leadership.now().filter(|lead| lead.is_ready())
    }

    /// What another leader could do at the same time is done only while this one leads still, and has done so all the while: what was asked
    /// before may have been answered late.
    fn confirm_leads(&self, lead: &Lead) -> Done {
        let leads = self.lead().is_some_and(|now| std::ptr::eq(Arc::as_ptr(&now), lead));
        if leads { Ok(()) } else { Err(ReconcileError::Stale) }
    }

    /// True for an engine that runs here and asks this manager who may write.
    fn is_own_engine(&self, process: &str) -> bool {
        let own = authority_at(&self.options.authority);
        let all = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(process).is_some_and(|process| process.authority == own)
    }

    fn runs(&self, process: &str) -> bool {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner).contains_key(process)
    }

    fn runs_any(&self, is_it: impl Fn(&str) -> bool) -> bool {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner).keys().any(|process| is_it(process))
    }
}

/// Runs the manager of this machine until `stop` is ready: with the API server that `KUBECONFIG` or the pod's service
/// account names, and the instance manager of the root, once no other manager has that. `reach`: how engines of other nodes
/// reach replicas of this one; `driver`: the socket of this node's CSI driver, if there is one.
///
/// # Errors
/// [`RunError`].
pub async fn run_here(
    options: Options,
    reach: Reach,
    driver: Option<PathBuf>,
    stop: impl Future<Output = ()>,
) -> Result<(), RunError> {
    let root = Root::at(&options.root);
    let root = root.map_err(|source| RootError::Refused { root: options.root.clone(), source })?;
    root.create()?;
    let mut stop = std::pin::pin!(stop);
    let _sole = tokio::select! {
        held = sole::sole(&root, &options) => held?,
        () = &mut stop => return Ok(()),
    };
    let clients = Clients::of_this_place().await.map_err(Box::new)?;
    // What runs, whatever lies by now where it was started from.
    let own = PathBuf::from("/proc/self/exe");
    let agent = LocalAgent::new(root, options.authority.clone(), reach, own).with_driver(driver);
    let agent = Arc::new(agent);
    run(options, clients, agent, stop).await
}

/// Where the engines of a root ask for their volume's authority.
///
/// # Errors
/// A relative path while the current directory is gone, or a parent that may not be read.
pub fn authority_socket(root: &std::path::Path) -> std::io::Result<PathBuf> {
    Ok(Root::at(root)?.control_socket("manager-authority"))
}

/// Runs a manager until `stop` is ready. Engines and replicas go on then.
///
/// # Errors
/// [`RunError`]. What fails later is tried again for ever.
pub async fn run(
    options: Options,
    clients: impl Into<Clients>,
    agent: Arc<dyn Agent>,
    stop: impl Future<Output = ()>,
) -> Result<(), RunError> {
    let desk = Desk::new(clients.into(), &options.namespace, &options.node, options.clock);
    let mut stop = std::pin::pin!(stop);
    tokio::select! {
        biased;
        () = &mut stop => return Ok(()),
        checked = alone(&desk.client, &desk.namespace) => checked?,
    }
    let news = Arc::new(News::default());
    let (cache, watches) = Local::new(&desk, &news, &options);
    let mut tasks = JoinSet::new();
    for watch in watches {
        tasks.spawn(watch);
    }
    let up = Arc::new([options.node.clone()].into());
    let counted = Mutex::new(nodes::Counted { up, ..nodes::Counted::default() });
    let (leadership, processes) = (Leadership::default(), Mutex::default());
    let certificate = webhook::Certificate::default();
    let agent: Arc<dyn Agent> = Arc::new(Bounded::new(agent));
    let context = Arc::new(Context {
        options,
        desk,
        cache,
        agent,
        news,
        counted,
        processes,
        leadership,
        certificate,
        orphans_seen: Mutex::default(),
        unknown: Mutex::default(),
        sizes: Mutex::default(),
    });
    tokio::select! {
        biased;
        () = &mut stop => return Ok(()),
        () = context.cache.ready() => {}
    }
    let socket = context.options.authority.clone();
    let authority = authority::serve(context.desk.clone(), &socket);
    tasks.spawn(listen(Arc::clone(&context)));
    tasks.spawn(rounds(Arc::clone(&context)));
    tasks.spawn(keep_leases(Arc::clone(&context)));
    context.news.tell([Key::Here, Key::Programs, Key::Certificate]);
    tracing::info!(node = context.options.node, "manager is ready");
    tokio::select! {
        biased;
        () = &mut stop => Ok(()),
        ended = authority => match ended {
            Err(source) => Err(RunError::Socket { socket: socket.clone(), source }),
            Ok(()) => Ok(()),
        },
        ended = answer_questions(&context) => ended,
        () = work(&context) => Ok(()),
    }
}

/// Answers the API server's questions for as long as it is polled.
async fn answer_questions(context: &Arc<Context>) -> Result<(), RunError> {
    let Some(port) = context.options.webhook else { return std::future::pending().await };
    let served = webhook::serve(Arc::clone(context), port).await;
    served.map_err(|source| RunError::Webhook { port, source })
}

/// Looks at what changed, for ever.
async fn work(context: &Arc<Context>) {
    let mut queue: Queue<Key> = Queue::default();
    let mut looks = Looks::default();
    loop {
        while let Some(key) = queue.take(Instant::now()) {
            let (context, of) = (Arc::clone(context), key.clone());
            looks.begin(key, async move { look(&context, &of).await });
        }
        let due = queue.next_due();
        let sleep = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        // What has ended first: its place is free for what is due.
        tokio::select! {
            biased;
            Some((key, outcome)) = looks.ended() => queue.ended(key, outcome, Instant::now()),
            () = context.news.wait() => {
                for key in context.news.take() {
                    queue.changed(key, Instant::now());
                }
            }
            () = sleep => {}
        }
    }
}

/// The looks that go on, each with what it looks at.
#[derive(Default)]
struct Looks {
    tasks: JoinSet<Outcome>,
    keys: HashMap<Id, Key>,
}

impl Looks {
    fn begin(&mut self, key: Key, look: impl Future<Output = Outcome> + Send + 'static) {
        let task = self.tasks.spawn(look).id();
        self.keys.insert(task, key);
    }

    /// The next one that ends; `None`: none goes on. May be cancelled.
    async fn ended(&mut self) -> Option<(Key, Outcome)> {
        loop {
            let (task, outcome) = match self.tasks.join_next_with_id().await? {
                Ok(ended) => ended,
                // A panic is a mistake in one decision: it is made again, later and later, and the log has it. Whatever else is to be
                // looked at, and when, is as it was.
                Err(e) => {
                    tracing::error!(error = %e, key = ?self.keys.get(&e.id()), "a look ended badly");
                    (e.id(), Outcome::Failed)
                }
            };
            if let Some(key) = self.keys.remove(&task) {
                return Some((key, outcome));
            }
        }
    }
}

async fn look(context: &Context, key: &Key) -> Outcome {
    match dispatch(context, key).await {
        Ok(outcome) => outcome,
        Err(ReconcileError::Stale) => Outcome::Stale,
        Err(e) => {
            tracing::warn!(?key, error = %e, "tried again later");
            Outcome::Failed
        }
    }
}

async fn dispatch(context: &Context, key: &Key) -> Done<Outcome> {
    let lead = context.lead();
    match (key, &lead) {
        (Key::Here, _) => here::look(context).await,
        (Key::Programs, _) => programs::look(context).await,
        (Key::Engine(name), _) => engines::look(context, name).await,
        (Key::Device(volume), _) => stays::look(context, volume).await,
        (Key::Replica(name), _) => replicas::look(context, name).await,
        (Key::Snapshot(name), None) => snapshots::look(context, name).await,
        (Key::Snapshot(name), Some(lead)) => {
            let done = snapshots::look(context, name).await?;
            // Either may have to look again.
            match leader::snapshot(context, lead, name).await? {
                Outcome::Done => Ok(done),
                other => Ok(other),
            }
        }
        (Key::Snapshots(volume), _) => snapshots::look_at_all(context, volume).await,
        (Key::Certificate, _) if context.options.webhook.is_none() => Ok(Outcome::Done),
        (Key::Trim(name), lead) => trim::look(context, lead.as_deref(), name).await,
        (Key::Certificate, lead) => certificate::look(context, lead.is_some()).await,
        (Key::Volume(name), Some(lead)) => leader::volume(context, lead, name).await,
        (Key::Attachment(name), Some(lead)) => leader::attachment(context, lead, name).await,
        (Key::Setting(name), Some(_)) => leader::setting(context, name).await,
        (Key::Orphan(name), Some(lead)) => leader::orphan(context, lead, name).await,
        (Key::Nodes, Some(lead)) => nodes::look(context, lead).await,
        (Key::PodsOf(node), Some(lead)) => pods::of_dead_node(context, lead, node).await,
        (Key::Remount(volume), Some(lead)) => pods::after_loss(context, lead, volume).await,
        (Key::All, Some(lead)) => {
            context.news.tell(leader::everything(context, lead));
            Ok(Outcome::Done)
        }
        // The leader's.
        (_, None) => Ok(Outcome::Done),
    }
}

/// Hears of this node's processes, and of every change of them.
async fn listen(context: Arc<Context>) {
    let hear = async {
        loop {
            processes::tell_processes(&context).await;
            context.agent.changed().await;
        }
    };
    tokio::join!(context.agent.listen(), hear);
}

/// Asks this node's engines and disks how they are.
async fn rounds(context: Arc<Context>) {
    let mut ticks = tokio::time::interval(ROUND);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let engines = context.cache.engines.all();
        context.news.tell(engines.into_iter().map(|e| Key::Engine(e.name_any())).chain([Key::Here]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the certificate, of the nodes and of programs nothing else would tell for days.
    #[tokio::test(start_paused = true)]
    async fn a_look_that_panics_is_made_again_and_what_others_wait_for_stays_due() {
        let (mut queue, mut looks) = (Queue::default(), Looks::default());
        let start = Instant::now();
        queue.changed(Key::Certificate, start);
        assert_eq!(queue.take(start), Some(Key::Certificate));
        looks.begin(Key::Certificate, async { Outcome::Again(Duration::from_secs(3600)) });
        let (key, outcome) = looks.ended().await.unwrap();
        queue.ended(key, outcome, start);
        queue.changed(Key::Nodes, start);
        assert_eq!(queue.take(start), Some(Key::Nodes));
        looks.begin(Key::Nodes, async { panic!("a mistake") });
        let (key, outcome) = looks.ended().await.unwrap();
        assert_eq!((&key, outcome), (&Key::Nodes, Outcome::Failed));
        queue.ended(key, outcome, start);
        assert!(looks.ended().await.is_none());
        let later = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(queue.take(later(15)), Some(Key::Nodes));
        assert_eq!(queue.take(later(3600)), Some(Key::Certificate));
    }
}
