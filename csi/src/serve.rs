//! The driver's sockets.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::proto::node::file_systems_server::FileSystemsServer;
use control::transport::{TrustedPeers, bind_private};
use kube::{Client, Config};
use lh_cluster::run::Clients;
use thiserror::Error;
use tonic::transport::Server;

use crate::DRIVER;
use crate::cluster::Cluster;
use crate::controller::ControllerService;
use crate::guard::Guard;
use crate::identity::IdentityService;
use crate::metadata::{MetadataService, Source, Tickets};
use crate::node::{FileSystemService, NodeService, Trims};
use crate::proto::csi::controller_server::ControllerServer;
use crate::proto::csi::group_controller_server::GroupControllerServer;
use crate::proto::csi::identity_server::IdentityServer;
use crate::proto::csi::node_server::NodeServer;
use crate::proto::csi::snapshot_metadata_server::SnapshotMetadataServer;
use crate::proto::registration::registration_server::RegistrationServer;
use crate::registration::RegistrationService;

/// How long a driver that is to end tries to let go of what it keeps attached.
const LET_GO: Duration = Duration::from_secs(10);

/// How to run a driver.
#[derive(Clone, Debug)]
pub struct Options {
    /// The socket on which it serves.
    pub endpoint: PathBuf,
    /// This node's name in Kubernetes.
    pub node: String,
    /// The namespace of Longhorn's resources.
    pub namespace: String,
    /// Most volumes on a node; 0 for no limit.
    pub most_volumes: i64,
    /// Where engines put their devices.
    pub devices: PathBuf,
    /// The kubelet's registry (`plugins_registry`); `None`: no kubelet is told.
    pub registry: Option<PathBuf>,
    /// The endpoint as the kubelet sees it, if that is another path.
    pub kubelet_endpoint: Option<PathBuf>,
    /// The TCP port on which the kubelet asks whether the driver is well; `None`: nobody asks.
    pub health: Option<u16>,
    /// How long a request waits for the managers; `None` for the usual time.
    pub patience: Option<Duration>,
}

/// Why a driver does not run.
#[derive(Debug, Error)]
pub enum RunError {
    /// There is no way to the API server.
    #[error("the API server: {0}")]
    Api(#[from] Box<kube::Error>),
    /// A socket cannot be used.
    #[error("{}: {source}", socket.display())]
    Socket {
        /// Its path.
        socket: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The port for probes cannot be used.
    #[error("port {port} for health probes: {source}")]
    Health {
        /// The port.
        port: u16,
        /// What the system said.
        source: io::Error,
    },
    /// The driver's place is taken, or has no definitions.
    #[error(transparent)]
    Cluster(#[from] lh_cluster::run::RunError),
    /// Serving ended.
    #[error(transparent)]
    Serving(#[from] tonic::transport::Error),
}

/// Runs the driver until `stop` is ready, with the API server that `KUBECONFIG` or the pod's service account names.
/// `snapshots`: what reads them.
///
/// # Errors
/// [`RunError`].
pub async fn run_here(
    options: Options,
    snapshots: Source,
    stop: impl Future<Output = ()>,
) -> Result<(), RunError> {
    let config = Config::infer().await.map_err(|e| Box::new(kube::Error::InferConfig(e)))?;
    run(options, client(&config).map_err(Box::new)?, snapshots, stop).await
}

/// A way to the API server on which each request ends: one that nobody answers would hold its volume for ever.
fn client(config: &Config) -> kube::Result<Client> {
    Ok(Clients::with(config)?.requests)
}

/// Runs the driver until `stop` is ready. What is mounted stays so. Before anything, it makes sure that Longhorn's own
/// driver is not there: both have the same name, and the kubelet would be told to ask this one for the other's volumes.
///
/// # Errors
/// [`RunError`].
pub async fn run(
    options: Options,
    client: Client,
    snapshots: Source,
    stop: impl Future<Output = ()>,
) -> Result<(), RunError> {
    let mut stop = std::pin::pin!(stop);
    tokio::select! {
        alone = lh_cluster::run::alone(&client, &options.namespace) => alone?,
        () = &mut stop => return Ok(()),
    }
    let mut cluster = Cluster::new(client, &options.namespace);
    if let Some(patience) = options.patience {
        cluster = cluster.with_patience(patience);
    }
    let controller = ControllerService::new(cluster.clone(), options.most_volumes);
    let tickets = Tickets::of(&options.node);
    let metadata = MetadataService::new(cluster.clone(), tickets.clone(), snapshots);
    let forgotten = tickets.forget_others(&cluster).await;
    if let Err(e) = &forgotten {
        // A driver that serves a kubelet alone may not see attachments, and has put no tickets there.
        tracing::debug!(error = %e, "tickets of an earlier driver are not looked for");
    }
    let others_wait = matches!(forgotten, Err(crate::Refused::Unavailable(_)));
    let node = NodeService {
        cluster: cluster.clone(),
        node: options.node.clone(),
        most_volumes: options.most_volumes,
        devices: options.devices.clone(),
        guard: Guard::default(),
        trims: Trims::default(),
    };
    let server = Server::builder()
        .add_service(IdentityServer::new(IdentityService { cluster: cluster.clone() }))
        .add_service(ControllerServer::new(controller.clone()))
        .add_service(GroupControllerServer::new(controller))
        .add_service(SnapshotMetadataServer::new(metadata))
        .add_service(FileSystemsServer::new(FileSystemService { node: node.clone() }))
        .add_service(control::logging::service())
        .add_service(NodeServer::new(node));
    let serve = server.serve_with_incoming(listen(&options.endpoint)?.heard());
    tracing::info!(endpoint = %options.endpoint.display(), node = options.node, "driver is ready");
    // Told last: the kubelet calls at once.
    let register = register(&options)?;
    tokio::select! {
        ended = serve => Ok(ended?),
        ended = register => ended,
        ended = answer_probes(&options) => ended,
        never = tickets.tend(&cluster, others_wait) => match never {},
        () = &mut stop => {
            // What is not let go of now the next driver does.
            let _ = tokio::time::timeout(LET_GO, tickets.let_go(&cluster)).await;
            Ok(())
        }
    }
}

/// Answers the kubelet's probes for as long as it is polled.
async fn answer_probes(options: &Options) -> Result<(), RunError> {
    let Some(port) = options.health else { return std::future::pending().await };
    let served = crate::health::serve(port, options.endpoint.clone()).await;
    served.map_err(|source| RunError::Health { port, source })
}

fn listen(socket: &Path) -> Result<TrustedPeers, RunError> {
    let bound = socket.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| bind_private(socket));
    let listener = bound.map_err(|source| RunError::Socket { socket: socket.to_owned(), source })?;
    Ok(TrustedPeers::new(listener))
}

/// The name of the socket in the kubelet's registry.
///
/// The kubelet's client (grpc-go) sends the socket's path as `:authority`, each slash as `%2F`, and a host may hold no `%`:
/// requests would be refused as malformed. In what stands before an `@` it may.
fn registration_socket() -> String {
    format!("reg@{DRIVER}.sock")
}

/// Answers the kubelet for as long as it is polled.
fn register(options: &Options) -> Result<impl Future<Output = Result<(), RunError>>, RunError> {
    let seen = options.kubelet_endpoint.as_ref().unwrap_or(&options.endpoint).display().to_string();
    let socket = options.registry.as_ref().map(|registry| registry.join(registration_socket()));
    let incoming = socket.as_deref().map(listen).transpose()?;
    Ok(async move {
        let Some(incoming) = incoming else { return std::future::pending().await };
        let service = RegistrationServer::new(RegistrationService { endpoint: seen });
        Ok(Server::builder().add_service(service).serve_with_incoming(incoming.heard()).await?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver whose requests never end holds the guards of their volumes for ever.
    #[tokio::test]
    async fn an_api_server_that_takes_a_question_and_says_nothing_keeps_nobody() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let config = Config::new(format!("http://{}", listener.local_addr().unwrap()).parse().unwrap());
        // Connections are made, and nobody reads from them.
        let mute = tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                open.push(stream);
            }
        });
        let cluster = Cluster::new(client(&config).unwrap(), "longhorn-system");
        let asked = tokio::time::timeout(Duration::from_secs(60), cluster.volume("v")).await;
        assert!(matches!(asked, Ok(Err(crate::Refused::Unavailable(_)))), "{asked:?}");
        mute.abort();
    }

    #[test]
    fn the_path_of_the_registration_is_an_authority_as_the_kubelet_sends_it() {
        let sent = format!("/var/lib/kubelet/plugins_registry/{}", registration_socket()).replace('/', "%2F");
        assert!(sent.parse::<http::uri::Authority>().is_ok(), "{sent}");
    }
}
