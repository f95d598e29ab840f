//! The listening sockets that this manager's processes have left with it (`crate::deposit`).

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::StreamExt;

use super::registry::Registry;
use crate::deposit::{DONE, Verb, receive, send};
use crate::transport::TrustedPeers;

/// Between two tries to accept while the system cannot give a connection.
const AGAIN: Duration = Duration::from_millis(100);

/// One socket per process, by the process's name.
#[derive(Debug, Default)]
pub(super) struct Deposits(Mutex<BTreeMap<String, OwnedFd>>);

impl Deposits {
    fn leave(&self, name: &str, listener: OwnedFd) {
        self.all().insert(name.to_owned(), listener);
    }

    fn copy(&self, name: &str) -> io::Result<Option<OwnedFd>> {
        self.all().get(name).map(OwnedFd::try_clone).transpose()
    }

    /// Closes what a process has left: it will not be started again, or does not want to be found.
    pub(super) fn forget(&self, name: &str) {
        self.all().remove(name);
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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
