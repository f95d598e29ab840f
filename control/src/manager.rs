//! The instance manager: one per root, it starts the root's engines and replicas, watches them, and starts those that
//! died again.
//!
//! Its own death changes nothing for them: each runs in a session of its own and writes its own log, and the next manager
//! adopts it (`state`, `identity`). It knows nothing of volumes: what it runs, and with which arguments, its clients say
//! (`program` bounds that), but for one thing: an engine that is started again gets the next generation (`policy`).

mod deposits;
mod hearing;
mod identity;
mod instance;
mod launch;
mod levels;
mod lock;
mod log;
mod policy;
mod ports;
mod predecessor;
mod program;
mod ready;
mod registry;
mod remote;
mod service;
mod state;
mod supervisor;
mod telling;
mod wish;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tonic::service::Routes;
use tonic::transport::Server;

pub use identity::ProcessId;
pub use launch::{LAUNCH_NAME, is_launched, run_launched};
pub use policy::EXIT_GIVES_UP;
pub use ports::PortRange;
pub use state::{ProcessRecord, State};
pub use supervisor::{REPLACE_SIGNAL_NAME, STOP_PATIENCE};

use crate::front::Trust;
use crate::host::{Root, RootError};
use crate::proto::imrpc::disk_service_server::DiskServiceServer;
use crate::proto::imrpc::instance_service_server::InstanceServiceServer;
use crate::proto::imrpc::process_manager_service_server::ProcessManagerServiceServer;
use crate::proto::imrpc::proxy_engine_service_server::ProxyEngineServiceServer;
use crate::proxy::Proxy;
use crate::tls::TlsError;
use crate::transport::{TrustedPeers, bind_private, connect_within};
use instance::{Disks, Instances};
use lock::{Bound, ManagerLock};
use ports::Ports;
use program::Programs;
use registry::Registry;
use remote::Remote;
use service::Service;

/// How often logs are looked at for their size.
const ROTATION: Duration = Duration::from_secs(5);

/// How long who only looks waits for a manager that takes no connection.
const GLANCE: Duration = Duration::from_millis(100);

/// After how many looks at their size logs of processes that are no more are looked at: an hour.
const SWEEP: u32 = 720;

/// How to run an instance manager.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its root.
    pub root: Root,
    /// This program, which starts processes under [`LAUNCH_NAME`] and is one that clients may have run.
    pub program: PathBuf,
    /// Where to listen on TCP, besides the root's socket, and who is obeyed there.
    pub listen: Option<(SocketAddr, Trust)>,
    /// End the manager that there is, instead of leaving the root to it.
    pub take_over: bool,
}

/// Why an instance manager does not run.
#[derive(Debug, Error)]
pub enum ManagerError {
    /// There is one already.
    #[error("an instance manager for {} runs already (process {pid}): one is enough", root.display())]
    AlreadyRuns {
        /// The root.
        root: PathBuf,
        /// The other one.
        pid: String,
    },
    /// The certificates cannot be used.
    #[error("no TLS: {0}")]
    Tls(#[from] TlsError),
    /// A file, directory or socket cannot be used.
    #[error("{what}: {source}")]
    Io {
        /// What it was about.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// Its lock was removed, and another manager may have begun.
    #[error(
        "{} was removed or replaced, and another instance manager has begun on this root, or may have: this one ends. Its processes go on \
         and are adopted by the other one; where it is the command of a container they end with it, and are started again",
        .0.display()
    )]
    LockLost(PathBuf),
    /// The root.
    #[error(transparent)]
    Root(#[from] RootError),
    /// The server ended.
    #[error("the gRPC server failed: {0}")]
    Server(#[from] tonic::transport::Error),
}

/// Runs an instance manager until `stop` is ready; its processes go on then.
///
/// # Errors
/// [`ManagerError`].
pub async fn run(options: Options, stop: impl Future<Output = ()>) -> Result<(), ManagerError> {
    // A signal that is caught here has its default meaning again in what is started; one that whoever started this process
    // had switched off (nohup) would be off there, too, and SIGHUP replaces engines.
    let _hangup = signal(SignalKind::hangup()).map_err(|e| io_error("SIGHUP cannot be caught", e))?;
    let root = options.root;
    root.create()?;
    let open_to_all = options.listen.as_ref().filter(|(_, trust)| *trust == Trust::Everybody);
    // Without it there would be no manager: the one before goes on.
    let door = options.listen.as_ref().map(|(_, trust)| remote::door(trust)).transpose()?.flatten();
    if options.take_over {
        predecessor::end(&root.manager_lock()).await;
    }
    let lock = Arc::new(ManagerLock::take(&root, open_to_all.map(|(address, _)| *address))?);
    let remote = match &options.listen {
        Some((address, _)) => Some(Remote::bind(*address, door).await?),
        None => None,
    };
    let programs = Programs::new(options.program, root.engine_binaries());
    let ports = Ports::new(ports::RANGE);
    let registry = Arc::new(Registry::new(root.clone(), lock.clone(), programs, ports));
    registry.adopt_all().map_err(|e| io_error(root.processes().display(), e))?;
    let (deposits, deposits_at) = bind(&root.deposit_socket())?;
    let socket = root.manager_socket();
    let (listener, listener_at) = bind(&socket)?;
    let routes = services(&root, &registry);
    let local =
        Server::builder().add_routes(routes.clone()).serve_with_incoming(TrustedPeers::new(listener).heard());
    let remote = async {
        match remote {
            None => std::future::pending().await,
            Some(remote) => remote.serve(routes).await,
        }
    };
    tracing::info!(root = %root.path().display(), socket = %socket.display(), "instance manager is ready");
    ready::announce();
    tokio::select! {
        ended = local => Ok(ended?),
        ended = remote => Ok(ended?),
        () = hearing::serve(deposits, registry.clone()) => Ok(()),
        lost = look_after_files(&root, &registry, lock, vec![deposits_at, listener_at]) => Err(lost),
        () = telling::keep(&registry) => Ok(()),
        () = stop => {
            tracing::info!("instance manager ends; its processes go on");
            Ok(())
        }
    }
}

/// A socket of the root, and which one it is.
fn bind(socket: &Path) -> Result<(UnixListener, Bound), ManagerError> {
    let failed = |e| io_error(socket.display(), e);
    let listener = bind_private(socket).map_err(failed)?;
    Ok((listener, Bound::at(socket).map_err(failed)?))
}

/// Everything that an instance manager can be asked.
fn services(root: &Root, registry: &Arc<Registry>) -> Routes {
    let ports = registry.clone();
    let proxy = Proxy::new(root.clone(), move |port| ports.at_port(port));
    Routes::new(ProcessManagerServiceServer::new(Service::new(registry.clone())))
        .add_service(InstanceServiceServer::new(Instances::new(registry.clone())))
        .add_service(ProxyEngineServiceServer::new(proxy))
        .add_service(DiskServiceServer::new(Disks))
        .add_service(crate::health::service())
}

/// The address on which the root's instance manager obeys whoever reaches it; none if it does not, or none runs.
pub fn obeys_at(root: &Root) -> Option<String> {
    let said = std::fs::read_to_string(root.manager_lock()).ok()?;
    let address = said.lines().nth(1)?.to_owned();
    match connect_within(GLANCE, &root.manager_socket()) {
        // There is one with which no more can wait.
        Err(e) if e.kind() != io::ErrorKind::WouldBlock => None,
        _ => Some(address),
    }
}

/// True if the root has an instance manager, which may be about to begin or to end.
pub fn is_there(root: &Root) -> bool {
    predecessor::is_held(&root.manager_lock())
}

/// The process that is, or was last, the root's instance manager.
pub fn process_of(root: &Root) -> Option<u32> {
    std::fs::read_to_string(root.manager_lock()).ok()?.lines().next()?.parse().ok()
}

/// Bounds the logs of all processes, and the manager's own, which whoever started it may have put beside them, until the lock is lost.
async fn look_after_files(
    root: &Root,
    registry: &Registry,
    lock: Arc<ManagerLock>,
    sockets: Vec<Bound>,
) -> ManagerError {
    let sockets = Arc::new(sockets);
    let mut ticks = tokio::time::interval(ROTATION);
    for look in (0..SWEEP).cycle() {
        ticks.tick().await;
        let mut names = registry.names();
        names.push("instance-manager".to_owned());
        let (root, lock, sockets) = (root.clone(), lock.clone(), sockets.clone());
        // A disk that is slow keeps nobody from the manager, and no process from being started again.
        let looked = tokio::task::spawn_blocking(move || {
            lock.keep(&sockets)?;
            bound_logs(&root, &names, look == 0);
            Ok(())
        });
        match looked.await {
            Ok(Err(lost)) => return lost,
            Ok(Ok(())) => {}
            Err(e) => tracing::error!(error = %e, "logs are not bounded"),
        }
    }
    unreachable!("the ticks never end")
}

/// `names`: those of all processes. `sweep`: logs of those that are no more are looked at, too.
fn bound_logs(root: &Root, names: &[String], sweep: bool) {
    if sweep && let Err(e) = log::sweep(&root.logs(), names, log::LEFT_MAX) {
        tracing::warn!(path = %root.logs().display(), error = %e, "logs of processes that are no more stay");
    }
    for path in names.iter().map(|name| root.log(name)) {
        if let Err(e) = log::rotate(&path, log::LOG_MAX) {
            tracing::warn!(path = %path.display(), error = %e, "log cannot be rotated");
        }
    }
}

fn io_error(what: impl std::fmt::Display, source: io::Error) -> ManagerError {
    ManagerError::Io { what: what.to_string(), source }
}
