//! The volume as a disk of the host's own iSCSI initiator, which logs in to this engine's target.
//!
//! The initiator keeps the disk when this process dies, and logs in again at once where it logged in before; refused, it
//! would wait for 3 s, which no setting changes. So the next engine listens at that address, which the initiator's session
//! tells, on the very socket of the engine before ([`Door`]); only without a session is one chosen.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use fuse_frontend::node;
use iscsi_frontend::Listener;
use iscsi_frontend::initiator::{self, Patience, Session};
use nix::sys::stat::{major, minor};

use super::super::queues::Queues;
use super::door::{Door, tcp_at};
use super::iscsi::Iscsi;
use super::{Endpoint, HideError, look_after_node, node_error, refuse_in_use};
use crate::arguments::ISCSI_PORT;
use crate::daemon::GivesUp;
use crate::device_names::{device_of, target_name};

/// Ports to choose from: from the protocol's own on, and none that the kernel gives to whoever asks for any.
const PORTS: std::ops::Range<u16> = ISCSI_PORT..ISCSI_PORT + 1024;

/// A command outlives the engine's own timeout by so much: it is the engine that says what failed.
const BEYOND: Duration = Duration::from_secs(60);

/// What is looked at, for people.
const SESSIONS: &str = "looking for a session of the host's initiator";

/// How long commands wait for the next engine before they fail; also for one command, of a volume without a timeout.
const AWAY: Duration = Duration::from_secs(7 * 24 * 3600);

/// How long the initiator may take to log in again, which it does at once where its connection waits in the listening socket, until a disk
/// that is to grow is left to the next look at it.
const GROWN: Duration = Duration::from_secs(5);

/// A disk of the host's initiator, from wanted to shown.
pub(in crate::daemon::controller) struct Initiator {
    volume: String,
    target: Iscsi,
    patience: Patience,
    shown: Option<ShownDisk>,
}

struct ShownDisk {
    session: Session,
    place: PathBuf,
    rdev: u64,
    /// What it is to have, in bytes.
    size: u64,
    /// This process has logged the initiator out, and has more to do until nothing is shown.
    is_apart: bool,
}

impl Initiator {
    /// Takes an address before anything is started: the one where the initiator looks for this target, or a free one.
    pub(super) fn prepare(
        volume: &str,
        reservations: Option<PathBuf>,
        io_timeout: Duration,
        mut door: Door,
    ) -> Result<Self> {
        let session = initiator::find(&target_name(volume)).context(SESSIONS)?;
        let missing = match session {
            Some(_) => initiator::missing_but_daemon(),
            None => initiator::missing(),
        };
        if let Some(missing) = missing {
            let text = format!("frontend iscsi needs {missing}: install or load it, or use another frontend");
            return Err(GivesUp(text).into());
        }
        let own: Vec<u64> = session.iter().filter_map(|s| rdev(s).ok()).collect();
        node::check(&device_of(volume), &own).map_err(node_error)?;
        let listener = match &session {
            Some(session) => door
                .open(tcp_at(session.portal), || Listener::tcp(session.portal))
                .with_context(|| format!("cannot listen on {}", session.portal))?,
            None => door
                .open(tcp_at((Ipv4Addr::LOCALHOST, 0).into()), free_port)
                .context("cannot listen for the host's initiator")?,
        };
        let command = if io_timeout.is_zero() { AWAY } else { io_timeout + BEYOND };
        Ok(Self {
            volume: volume.to_owned(),
            target: Iscsi::on(volume, reservations, listener, door)?,
            patience: Patience { command, away: AWAY.max(command) },
            shown: None,
        })
    }

    pub(super) fn show(&mut self, queues: &Queues, size: u64) -> Result<Endpoint> {
        let left = initiator::find(&target_name(&self.volume)).context(SESSIONS)?;
        if left.is_some() {
            queues.clients_have_stayed();
        }
        self.target.show(queues)?;
        let portal = self.target.address();
        let (session, is_new) = match left {
            Some(session) if session.portal == portal => {
                tracing::info!(%portal, "the initiator logs in again");
                // An engine that died with its login half done has left a disk that nobody has waited for.
                let is_new = session.be_patient(self.patience)?;
                (session, is_new)
            }
            Some(session) => bail!("the initiator is logged in to {} of this name", session.portal),
            None => (initiator::login(&target_name(&self.volume), portal, self.patience)?, true),
        };
        let rdev = rdev(&session)?;
        let place = device_of(&self.volume);
        node::place(&place, rdev, &[rdev]).map_err(node_error)?;
        if is_new {
            session.wait_for_node(&place)?;
        }
        let shown = ShownDisk { session, place: place.clone(), rdev, size, is_apart: false };
        // It may have grown while nobody served it.
        shown.grow()?;
        self.shown = Some(shown);
        Ok(Endpoint { device: Some(place), uri: None })
    }

    pub(super) fn resize(&mut self, size: u64) -> Result<()> {
        let Some(shown) = &mut self.shown else { return Ok(()) };
        shown.size = size;
        shown.grow()
    }

    pub(super) fn look_after(&mut self) {
        self.target.look_after();
        let Some(ShownDisk { session, place, rdev, size, is_apart }) = &mut self.shown else { return };
        if has_disk(session, *rdev) {
            *is_apart = false;
            look_after_node(place, *rdev);
            if let Err(e) = session.grow(*size, Duration::ZERO) {
                tracing::error!("the disk does not get its size: {e}");
            }
        } else if !*is_apart && node::rdev(place) == Some(*rdev) {
            tracing::error!(
                "somebody else has logged the initiator out, or has taken its disk away: stop the volume, then start it again"
            );
            // Its numbers may be another disk's by now.
            if let Err(e) = node::remove(place, *rdev) {
                tracing::error!("{} stays: {e}", place.display());
            }
        }
    }

    pub(super) fn hide(&mut self, queues: &Queues) -> Result<(), HideError> {
        if let Some(ShownDisk { session, place, rdev, is_apart, .. }) = &mut self.shown {
            if has_disk(session, *rdev) {
                refuse_in_use(place, *rdev)?;
            }
            // What fails leaves the rest to whoever asks again.
            let logged_out = session.logout();
            *is_apart |= !has_disk(session, *rdev);
            logged_out.map_err(|e| HideError::Failed(e.into()))?;
            node::remove(place, *rdev).map_err(|e| HideError::Failed(anyhow!("{}: {e}", place.display())))?;
            self.shown = None;
        }
        self.target.hide(queues)
    }
}

impl ShownDisk {
    /// Has the disk get its size, and says so if it has to wait for that.
    fn grow(&self) -> Result<()> {
        if !self.session.grow(self.size, GROWN)? {
            tracing::warn!("the initiator has not logged in again: its disk gets its size once it has");
        }
        Ok(())
    }
}

/// The disk with these numbers is the session's.
fn has_disk(session: &Session, rdev: u64) -> bool {
    session.has_disk((major(rdev), minor(rdev)))
}

fn rdev(session: &Session) -> Result<u64> {
    let (major, minor) = session.numbers()?;
    Ok(nix::sys::stat::makedev(major, minor))
}

/// Listens on the first port that nobody has, for this host alone.
fn free_port() -> io::Result<Listener> {
    for port in PORTS {
        match Listener::tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, port))) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
            done => return done,
        }
    }
    Err(io::Error::other(format!("every port from {} to {} is taken", PORTS.start, PORTS.end - 1)))
}
