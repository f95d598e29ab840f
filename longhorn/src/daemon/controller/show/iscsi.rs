//! The volume as an iSCSI target.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use anyhow::{Context, Result};
use iscsi_frontend::{Listener, Target};

use super::super::queues::{Order, Queues};
use super::{HideError, host_of, listen, wait_until_hidden};
use crate::arguments::ISCSI_PORT;

/// The number of the volume's disk: Longhorn's targets have it there, behind tgtd's controller with number 0.
const LUN: u8 = 1;

/// What is in the file beside the volume's record.
const RESERVATIONS: &str = "reservations";

/// An iSCSI target, from wanted to shown.
pub(in crate::daemon::controller) struct Iscsi {
    target: Target,
    listener: Option<Listener>,
    uri: String,
}

impl Iscsi {
    /// Takes the address before anything is started. Without one that is this host's own, for this host alone.
    pub(super) fn prepare(volume: &str, record: Option<&Path>, wanted: Option<SocketAddr>) -> Result<Self> {
        let address = wanted.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, ISCSI_PORT)));
        let listener =
            listen(|| Listener::tcp(address)).with_context(|| format!("cannot listen on {address}"))?;
        let bound = listener.address().context("the port that was chosen")?;
        if !bound.ip().is_loopback() {
            tracing::warn!(%bound, "insecure: whoever reaches this address may read and write the volume");
        }
        Ok(Self::on(volume, record, listener, SocketAddr::new(address.ip(), bound.port())))
    }

    /// A target on an address that is taken already.
    pub(super) fn on(volume: &str, record: Option<&Path>, listener: Listener, address: SocketAddr) -> Self {
        let mut target = Target::of_volume(volume);
        target.reservations = record.map(|directory| directory.join(RESERVATIONS));
        let uri = format!("iscsi://{}/{}/{LUN}", host_of(address), target.name);
        Self { target, listener: Some(listener), uri }
    }

    /// One queue serves all initiators: a target's reservations and task management concern every one of them.
    pub(super) fn show(&mut self, queues: &Queues) -> Result<()> {
        queues.order(|number| match (number, self.listener.take()) {
            (0, Some(listener)) => Ok(Order::Iscsi(self.target.clone(), listener)),
            _ => Ok(Order::Nothing),
        })
    }

    /// Where initiators find the disk.
    pub(super) fn uri(&self) -> &str {
        &self.uri
    }

    pub(super) fn hide(&self, queues: &Queues) -> Result<(), HideError> {
        if self.listener.is_some() {
            // Never shown.
            return Ok(());
        }
        queues.order(|_| Ok(Order::Hide)).map_err(HideError::Failed)?;
        wait_until_hidden(queues, queues.len()).map_err(HideError::Failed)
    }
}
