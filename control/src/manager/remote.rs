//! The instance manager on TCP: the ports where Longhorn's clients look, from the first on those of processes, of the proxy,
//! of disks, of instances and of the engines that Longhorn builds on SPDK. Each of them answers for all services.

use std::net::SocketAddr;

use futures::future::try_join_all;
use tokio::net::TcpListener;
use tonic::service::Routes;

use super::{ManagerError, io_error};
use crate::front::Trust;
use crate::tls::{Door, TlsError};
use crate::transport::{everybody, not_listening, tcp_server};

/// How many ports.
const PORTS: u16 = 5;

/// The ports, taken but not served yet.
pub(super) struct Remote {
    listeners: Vec<TcpListener>,
    door: Option<Door>,
}

/// How clients are let in who have to show certificates, by files that are read here.
///
/// # Errors
/// The files cannot be used.
pub(super) fn door(trust: &Trust) -> Result<Option<Door>, TlsError> {
    match trust {
        Trust::Certificates(files) => Door::new(files.clone()).map(Some),
        Trust::Everybody => Ok(None),
    }
}

impl Remote {
    /// Takes the ports. Without a `door` whoever comes is let in.
    ///
    /// # Errors
    /// A port is taken, or may not be had.
    pub(super) async fn bind(first: SocketAddr, door: Option<Door>) -> Result<Self, ManagerError> {
        let mut listeners = Vec::new();
        for offset in 0..PORTS {
            // A port that the system chooses has no neighbours.
            let port = if first.port() == 0 { 0 } else { first.port().saturating_add(offset) };
            let address = SocketAddr::new(first.ip(), port);
            listeners
                .push(TcpListener::bind(address).await.map_err(|e| io_error(address, not_listening(e)))?);
        }
        match &door {
            Some(door) => tracing::info!(address = %first, authority = %door.authority().display(),
                "whoever has a certificate of this authority is obeyed"),
            None => tracing::warn!(address = %first, "insecure: whoever reaches this address is obeyed"),
        }
        Ok(Self { listeners, door })
    }

    /// Serves until it is dropped.
    ///
    /// # Errors
    /// A server's.
    pub(super) async fn serve(self, routes: Routes) -> Result<(), tonic::transport::Error> {
        let Self { listeners, door } = self;
        let serve = |listener| {
            let (server, door) = (tcp_server().add_routes(routes.clone()), door.as_ref());
            async move {
                match door {
                    Some(door) => server.serve_with_incoming(door.peers(listener)).await,
                    None => server.serve_with_incoming(everybody(listener)).await,
                }
            }
        };
        try_join_all(listeners.into_iter().map(serve)).await.map(drop)
    }
}
