//! The volume as a ublk device, with its node below /dev/longhorn.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use fuse_frontend::{NodeError, node};
use lh_block::Geometry;
use ublk_frontend::{Attach, AttachError, Attached, DeviceError, attach};

use super::super::queues::{Order, Queues};
use super::{
    Endpoint, HIDING, HideError, look_after_node, node_error, refuse_in_use, users, wait_until_hidden_by,
};
use crate::daemon::GivesUp;
use crate::device_names::{device_of, ublk_owner};

/// Longest read or write, as the engine takes it.
const TRANSFER: u32 = lh_wire::MAX_DATA;

/// How long somebody who has just looked at the device may hold its number at least, once it is gone.
pub(super) const REMOVED: Duration = Duration::from_secs(2);

/// A ublk device, from wanted to shown.
pub(in crate::daemon::controller) struct Ublk {
    volume: String,
    owner: String,
    block_size: u32,
    /// Requests of a queue at a time.
    depth: u16,
    attached: Option<Attached>,
    /// How many of the engine's queues serve some of the device's: fewer, if the engine before had fewer.
    serving: usize,
    /// The node and its numbers, once it is there.
    node: Option<(PathBuf, u64)>,
    /// The device is told to go, and the queues will say when it has gone.
    is_going: bool,
}

impl Ublk {
    /// What can be missing is looked for before anything is started.
    pub(super) fn prepare(volume: &str, root: &Path, block_size: u32, depth: u16) -> Result<Self> {
        if let Some(missing) = ublk_frontend::missing() {
            let text = format!("frontend ublk needs {missing}: load it, or use another frontend");
            return Err(GivesUp(text).into());
        }
        node::check(&device_of(volume), &[]).or_else(|e| match e {
            // The device that the engine before left behind is ours to take over.
            NodeError::Live { .. } => Ok(()),
            e => Err(node_error(e)),
        })?;
        Ok(Self {
            volume: volume.to_owned(),
            owner: ublk_owner(root),
            block_size,
            depth,
            attached: None,
            serving: 0,
            node: None,
            is_going: false,
        })
    }

    pub(super) fn show(&mut self, queues: &Queues, size: u64) -> Result<Endpoint> {
        let options = Attach {
            owner: self.owner.clone(),
            volume: self.volume.clone(),
            queues: u16::try_from(queues.len()).unwrap_or(1),
            depth: self.depth,
            geometry: Geometry {
                size,
                logical_block: self.block_size,
                physical_block: 4096,
                max_transfer: TRANSFER,
                depth: self.depth.into(),
            },
        };
        let mut attached = attach(&options).map_err(attach_error)?;
        if attached.is_taken_over() {
            queues.clients_have_stayed();
            tracing::info!(device = %attached.device().display(), "taken over");
        }
        let dealt = attached.channels(queues.len())?;
        self.serving = dealt.iter().filter(|channels| !channels.is_empty()).count();
        let mut dealt = dealt.into_iter();
        queues.order(|_| {
            let channels = dealt.next().unwrap_or_default();
            Ok(if channels.is_empty() { Order::Nothing } else { Order::Ublk(channels) })
        })?;
        attached.start().map_err(attach_error)?;
        let (major, minor) = attached.numbers().context("the device's numbers")?;
        let rdev = nix::sys::stat::makedev(major.into(), minor.into());
        let place = device_of(&self.volume);
        node::place(&place, rdev, &[rdev]).map_err(node_error)?;
        self.node = Some((place.clone(), rdev));
        self.attached = Some(attached);
        self.is_going = false;
        Ok(Endpoint { device: Some(place), uri: None })
    }

    /// The node, once it is there.
    pub(super) fn node(&self) -> Option<PathBuf> {
        self.node.as_ref().map(|(place, _)| place.clone())
    }

    pub(super) fn resize(&mut self, size: u64) -> Result<()> {
        Ok(self.attached.as_mut().map_or(Ok(()), |attached| attached.resize(size))?)
    }

    /// To be called now and then.
    pub(super) fn look_after(&self) {
        if let Some(Err(e)) = self.attached.as_ref().map(Attached::keep_a_command_back) {
            tracing::debug!("the device's requests are not limited: {e}");
        }
        if let Some((place, rdev)) = self.node.as_ref().filter(|_| !self.is_going) {
            look_after_node(place, *rdev);
        }
    }

    pub(super) fn hide(&mut self, queues: &Queues) -> Result<(), HideError> {
        let Some(attached) = &mut self.attached else { return Ok(()) };
        if let Some((place, rdev)) = self.node.as_ref().filter(|_| attached.is_shown()) {
            // Before Linux 7.0 the driver takes it away from who merely has it open.
            refuse_in_use(place, *rdev)?;
        }
        let deadline = Instant::now() + HIDING;
        match attached.stop(HIDING) {
            // It goes on in the kernel, and the queues will say so.
            Ok(()) | Err(DeviceError::Unanswered(_)) => {}
            Err(DeviceError::InUse(device)) => {
                if std::mem::take(&mut self.is_going) {
                    queues.stay(self.serving);
                }
                return Err(HideError::InUse(users(&device)));
            }
            Err(e) => return Err(HideError::Failed(e.into())),
        }
        if !std::mem::replace(&mut self.is_going, true) {
            queues.leave(self.serving);
        }
        wait_until_hidden_by(queues, deadline)?;
        if let Some((place, rdev)) = &self.node {
            node::remove(place, *rdev).map_err(|e| HideError::Failed(anyhow!("{}: {e}", place.display())))?;
            self.node = None;
        }
        match self.attached.take() {
            Some(attached) => {
                let patience = deadline.saturating_duration_since(Instant::now()) + REMOVED;
                attached.remove(patience).map_err(|e| HideError::Failed(e.into()))
            }
            None => Ok(()),
        }
    }
}

pub(super) fn attach_error(e: AttachError) -> anyhow::Error {
    match e {
        // They will be no other at the next start.
        AttachError::Missing(_) | AttachError::Blocks { .. } => GivesUp(e.to_string()).into(),
        e => e.into(),
    }
}
