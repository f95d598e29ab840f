//! The volume as an iSCSI target.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, Result};
use control::transport::not_listening;
use iscsi_frontend::{Listener, Target};

use super::super::queues::{Order, Queues};
use super::door::{Door, tcp_at};
use super::{HideError, host_of};
use crate::arguments::ISCSI_HERE;

/// The number of the volume's disk: Longhorn's targets have it there, behind tgtd's controller with number 0.
const LUN: u8 = 1;

/// An iSCSI target, from wanted to shown.
pub(in crate::daemon::controller) struct Iscsi {
    target: Target,
    /// Where it listens, and will listen again.
    address: SocketAddr,
    door: Door,
    listener: Option<Listener>,
}

impl Iscsi {
    /// Takes the address before anything is started. Without one that is this host's own, for this host alone.
    pub(super) fn prepare(
        volume: &str,
        reservations: Option<PathBuf>,
        wanted: Option<SocketAddr>,
        mut door: Door,
    ) -> Result<Self> {
        let address = wanted.unwrap_or(ISCSI_HERE);
        let listener = listen(&mut door, address)?;
        let iscsi = Self::on(volume, reservations, listener, door)?;
        if !iscsi.address.ip().is_loopback() {
            tracing::warn!(address = %iscsi.address, "insecure: whoever reaches this address may read and write the volume");
        }
        Ok(iscsi)
    }

    /// A target on an address that is taken already.
    pub(super) fn on(
        volume: &str,
        reservations: Option<PathBuf>,
        listener: Listener,
        door: Door,
    ) -> Result<Self> {
        let mut target = Target::of_volume(volume);
        target.reservations = reservations;
        let address = listener.address().context("the port that was chosen")?;
        Ok(Self { target, address, door, listener: Some(listener) })
    }

    /// Shows it, for the first time or after it was hidden. One queue serves all initiators: a target's reservations and
    /// task management concern every one of them.
    pub(super) fn show(&mut self, queues: &Queues) -> Result<()> {
        let listener = match self.listener.take() {
            Some(listener) => listener,
            None => listen(&mut self.door, self.address)?,
        };
        let mut order = Some(Order::Iscsi(self.target.clone(), listener));
        queues.order(|_| Ok(order.take().unwrap_or(Order::Nothing)))
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where initiators find the disk.
    pub(super) fn uri(&self) -> String {
        format!("iscsi://{}/{}/{LUN}", host_of(self.address), self.target.name)
    }

    pub(super) fn look_after(&mut self) {
        self.door.look_after();
    }

    pub(super) fn hide(&mut self, queues: &Queues) -> Result<(), HideError> {
        self.door.hide(queues, self.listener.is_none())
    }
}

fn listen(door: &mut Door, address: SocketAddr) -> Result<Listener> {
    door.open(tcp_at(address), || Listener::tcp(address))
        .map_err(not_listening)
        .with_context(|| format!("cannot listen on {address}"))
}
