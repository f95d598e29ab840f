//! Where a process answers (gRPC), and who is obeyed there.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic::transport::Server;

use crate::tls::{Door, TlsFiles};
use crate::transport::{TrustedPeers, bind_private, everybody, not_listening, tcp_server};

/// Who is obeyed on TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Whoever shows a certificate of the authority of these files.
    Certificates(TlsFiles),
    /// Whoever reaches the address.
    Everybody,
}

/// Where the process of an engine or a replica answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Front {
    /// A unix socket, for root alone.
    Unix(PathBuf),
    /// TCP, and who is obeyed there.
    Tcp(SocketAddr, Trust),
}

impl std::fmt::Display for Front {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address, _) => write!(f, "{address}"),
        }
    }
}

/// Answers at all of these. One that fails is told of, and the others go on; the end is the last one's. Certificates that cannot be used
/// are waited for.
///
/// # Errors
/// Of the last one: a socket that cannot be made.
pub(crate) async fn serve(fronts: &[Front], routes: Routes) -> io::Result<()> {
    let serve = |front| {
        let routes = routes.clone();
        async move { (front, serve_one(front, routes).await) }
    };
    let mut serving: FuturesUnordered<_> = fronts.iter().map(serve).collect();
    loop {
        let Some((front, ended)) = serving.next().await else { return Ok(()) };
        match ended {
            Err(e) if !serving.is_empty() => tracing::error!("nobody answers at {front} any more: {e}"),
            _ if !serving.is_empty() => {}
            last => return last,
        }
    }
}

async fn serve_one(front: &Front, routes: Routes) -> io::Result<()> {
    let served = match front {
        Front::Unix(path) => {
            let peers = TrustedPeers::new(bind_private(path)?).heard();
            Server::builder().add_routes(routes).serve_with_incoming(peers).await
        }
        Front::Tcp(address, trust) => {
            let server = tcp_server().add_routes(routes);
            let listen = async || TcpListener::bind(address).await.map_err(not_listening);
            match trust {
                Trust::Certificates(files) => {
                    let door = Door::opened(files.clone()).await;
                    server.serve_with_incoming(door.peers(listen().await?)).await
                }
                Trust::Everybody => {
                    tracing::warn!(%address, "insecure: whoever reaches this address is obeyed");
                    server.serve_with_incoming(everybody(listen().await?)).await
                }
            }
        }
    };
    served.map_err(io::Error::other)
}
