//! Hears processes that leave their listening sockets with this manager, fetch or withdraw them (`crate::deposit`).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::StreamExt;

use super::registry::Registry;
use crate::deposit::{DONE, Verb, receive, send};
use crate::transport::TrustedPeers;

/// Between two tries to accept while the system cannot give a connection.
const AGAIN: Duration = Duration::from_millis(100);

/// Answers processes, for ever.
pub(super) async fn serve(listener: UnixListener, registry: Arc<Registry>) {
    let mut peers = TrustedPeers::new(listener);
    while let Some(peer) = peers.next().await {
        match peer {
            Ok(stream) => drop(tokio::spawn(hear(stream, registry.clone()))),
            Err(e) => {
                tracing::warn!(error = %e, "a process cannot be heard");
                tokio::time::sleep(AGAIN).await;
            }
        }
    }
}

/// Answers one process until it goes.
async fn hear(stream: UnixStream, registry: Arc<Registry>) {
    while let Ok((line, fd)) = stream.async_io(Interest::READABLE, || receive(stream.as_fd())).await {
        let (answer, fd) = match answer(&registry, &line, fd) {
            Ok(fd) => (DONE.to_owned(), fd),
            Err(refusal) => (refusal, None),
        };
        let fd = fd.as_ref().map(AsFd::as_fd);
        if stream.async_io(Interest::WRITABLE, || send(stream.as_fd(), &answer, fd)).await.is_err() {
            return;
        }
    }
}

/// What a process is answered; an error is a refusal, in words.
fn answer(registry: &Registry, line: &str, fd: Option<OwnedFd>) -> Result<Option<OwnedFd>, String> {
    let (verb, name) = Verb::of(line).ok_or("this is not understood")?;
    // Nothing is kept for whom nobody will start again.
    registry.get(name).map_err(|e| e.to_string())?;
    let deposits = registry.deposits();
    match (verb, fd) {
        (Verb::Leave, Some(listener)) => deposits.leave(name, listener),
        (Verb::Leave, None) => return Err("there is no descriptor with it".to_owned()),
        (Verb::Fetch, _) => return deposits.copy(name).map_err(|e| e.to_string()),
        (Verb::Withdraw, _) => deposits.forget(name),
    }
    Ok(None)
}
