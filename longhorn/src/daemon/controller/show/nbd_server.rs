//! The volume as an NBD export.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use control::host::LiveDirs;
use control::transport::not_listening;
use nbd_frontend::{Export, Listener};

use super::super::queues::{Order, Queues};
use super::door::{Door, tcp_at, unix_at};
use super::{HideError, host_of};

/// An NBD export, from wanted to shown.
pub(in crate::daemon::controller) struct NbdServer {
    volume: String,
    wanted: Option<SocketAddr>,
    door: Door,
    listener: Option<Listener>,
    uri: String,
}

impl NbdServer {
    /// Takes the address before anything is started; without one, a unix socket.
    pub(super) fn prepare(volume: &str, wanted: Option<SocketAddr>, mut door: Door) -> Result<Self> {
        let (listener, uri) = listen(volume, wanted, &mut door)?;
        Ok(Self { volume: volume.to_owned(), wanted, door, listener: Some(listener), uri })
    }

    /// Shows it, for the first time or after it was hidden: where clients find it.
    pub(super) fn show(&mut self, queues: &Queues) -> Result<String> {
        if self.listener.is_none() {
            let (listener, uri) = listen(&self.volume, self.wanted, &mut self.door)?;
            (self.listener, self.uri) = (Some(listener), uri);
        }
        queues.order(|number| {
            let export = Export {
                name: self.volume.clone(),
                description: "Longhorn volume".to_owned(),
                read_only: false,
            };
            let listener = if number == 0 { self.listener.take() } else { None };
            Ok(Order::Nbd(export, listener))
        })?;
        Ok(self.uri.clone())
    }

    pub(super) fn look_after(&mut self) {
        self.door.look_after();
    }

    pub(super) fn hide(&mut self, queues: &Queues) -> Result<(), HideError> {
        self.door.hide(queues, self.listener.is_none())
    }
}

fn listen(volume: &str, wanted: Option<SocketAddr>, door: &mut Door) -> Result<(Listener, String)> {
    match wanted {
        None => {
            let path = LiveDirs::default().nbd_socket(volume);
            let listener = door
                .open(unix_at(&path), || Listener::unix(&path))
                .with_context(|| format!("cannot listen on {}", path.display()))?;
            Ok((listener, format!("nbd+unix:///{volume}?socket={}", path.display())))
        }
        Some(address) => {
            let listener = door
                .open(tcp_at(address), || Listener::tcp(address))
                .map_err(not_listening)
                .with_context(|| format!("cannot listen on {address}"))?;
            let port = listener.tcp_address().context("the port that was chosen")?.port();
            tracing::warn!(%address, "insecure: whoever reaches this address may read and write the volume");
            Ok((listener, format!("nbd://{}/{volume}", host_of(SocketAddr::new(address.ip(), port)))))
        }
    }
}
