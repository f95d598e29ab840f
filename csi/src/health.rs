//! Whether the driver's socket answers, for the kubelet's probes, which speak HTTP.
//!
//! Asked is the socket itself, from outside: a driver whose socket was taken over or removed is as useless as a dead one.
//! The API server does not count: another process would not reach it either.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use control::transport::{bind_everywhere, connect};

use crate::DRIVER;
use crate::proto::csi::GetPluginInfoRequest;
use crate::proto::csi::identity_client::IdentityClient;

/// Where it is asked.
const PATH: &str = "/healthz";

/// A driver that takes longer than this to say its name is not well. The kubelet waits 3 s (`deploy/csi.yaml`).
const PATIENCE: Duration = Duration::from_secs(2);

/// Answers probes on this port of every address, for as long as it is polled.
///
/// # Errors
/// The port cannot be had.
pub(crate) async fn serve(port: u16, socket: PathBuf) -> io::Result<()> {
    let listener = bind_everywhere(port).await?;
    let socket = Arc::new(socket);
    let probe = get(move || {
        let socket = Arc::clone(&socket);
        async move {
            match tokio::time::timeout(PATIENCE, ask(&socket)).await {
                Ok(Ok(())) => (StatusCode::OK, "ok\n".to_owned()),
                Ok(Err(e)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{}: {e}\n", socket.display())),
                Err(_) => (StatusCode::SERVICE_UNAVAILABLE, format!("{} is silent\n", socket.display())),
            }
        }
    });
    axum::serve(listener, Router::new().route(PATH, probe)).await
}

async fn ask(socket: &Path) -> Result<(), String> {
    let channel = connect(socket).await.map_err(|e| e.to_string())?;
    let answer = IdentityClient::new(channel).get_plugin_info(GetPluginInfoRequest {}).await;
    match answer.map_err(|e| e.message().to_owned())?.into_inner().name {
        name if name == DRIVER => Ok(()),
        other => Err(format!("{other} answers there")),
    }
}
