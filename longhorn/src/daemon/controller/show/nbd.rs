//! The volume as a device of the kernel's NBD client, which talks to this process over a pair of sockets.
//!
//! - Nobody listens: the engine makes both ends, hands one to its queue and the other to the kernel. The kernel keeps the
//!   device when this process dies, and the next engine hands it a new end.
//! - It gets that as soon as the next engine starts, long before the volume is open: what it sends waits in the socket. The kernel
//!   sends a request again when that request's timer runs out and there is another connection by then, else the timer runs
//!   once more, and that is what users would wait for. There is no handshake on it, which only an open volume could answer: the device
//!   has its flags from the first connection, and its size is set when the volume is shown.
//! - One connection (`docs/decisions/0007-one-connection-to-the-nbd-client.md`): with several, a disk that is slower than
//!   the kernel's timer would lose its connections, and with them the answers to what it has done.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use fuse_frontend::node;
use nbd_frontend::Export;
use nbd_frontend::client::{Served, handshake};
use nbd_frontend::kernel::{self, Adopted, ClientError, Device, Settings, Slow};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::super::queues::{Order, Queues};
use super::{
    Endpoint, HideError, PREDECESSOR, look_after_node, node_error, refuse_in_use, wait_until_hidden,
};
use crate::daemon::GivesUp;
use crate::device_names::{device_of, nbd_identifier};

/// The queue that serves it.
const QUEUE: usize = 0;

/// How long a request waits before the kernel looks whether its connection has been replaced: the pause that a new engine
/// costs, and up to a second more. Shorter than a second the kernel cannot.
const TIMER: Duration = Duration::from_secs(1);

/// How long requests wait for the next engine before they fail. An engine that nobody can start any more is the reason to
/// let them fail by hand (`longhornctl down`), not the clock's.
const DEAD: Duration = Duration::from_secs(7 * 24 * 3600);

/// How long this process's own queue may take to say hello.
const HELLO: Duration = Duration::from_secs(10);

/// How long what is in flight when the device is to be changed may take to be answered, at a start. The kernel sends again what
/// the engine before has left when its timer has run out.
const ANSWERED: Duration = Duration::from_secs(5);

/// The same where the engine has looked already and comes back to it.
const AGAIN_ANSWERED: Duration = Duration::from_secs(1);

/// Somebody else has taken the device apart.
const DISCONNECTED: &str = "the device has been disconnected";

/// Where the kernel says which devices it has, for people.
const DEVICES: &str = "looking for an NBD device in /sys/block";

/// Between two tries to give the kernel a connection, while it does not know yet that the last one is dead.
const AGAIN: Duration = Duration::from_millis(5);

/// A device of the kernel's NBD client, from wanted to shown.
pub(in crate::daemon::controller) struct Nbd {
    volume: String,
    identifier: String,
    /// A device that an engine before this one has left gets its connection.
    coming: Option<JoinHandle<Result<OwnedFd>>>,
    shown: Option<ShownNbd>,
}

struct ShownNbd {
    device: Device,
    /// The queue's end of the connection, to see when the kernel has let go of the other.
    connection: OwnedFd,
    /// What the device is to be.
    served: Served,
    /// It is that.
    is_as_served: bool,
    place: PathBuf,
    rdev: u64,
    /// This process has taken the device apart, and has more to do until nothing is shown.
    is_apart: bool,
}

impl Nbd {
    /// What can be missing is looked for before anything is started. The engine before this one has ended.
    pub(super) fn prepare(volume: &str, root: &Path) -> Result<Self> {
        if let Some(missing) = kernel::missing() {
            let text = format!("frontend nbd needs {missing}: run modprobe nbd, or use another frontend");
            return Err(GivesUp(text).into());
        }
        let identifier = nbd_identifier(root, volume);
        let left = kernel::find(&identifier).context(DEVICES)?;
        let own: Vec<u64> = left.iter().map(numbers).collect::<Result<_>>()?;
        node::check(&device_of(volume), &own).map_err(node_error)?;
        let coming = match left {
            Some(_) => {
                let identifier = identifier.clone();
                let thread = std::thread::Builder::new().name("nbd-connection".into());
                let started = thread.spawn(move || hand_over(&identifier));
                Some(started.context("a thread that gives the kernel a connection")?)
            }
            None => None,
        };
        Ok(Self { volume: volume.to_owned(), identifier, coming, shown: None })
    }

    pub(super) fn show(&mut self, queues: &Queues) -> Result<Endpoint> {
        queues.order(|number| {
            let name = self.volume.clone();
            let export = Export { name, description: "Longhorn volume".to_owned(), read_only: false };
            Ok(if number == QUEUE { Order::Nbd(export, None) } else { Order::Nothing })
        })?;
        let (device, connection, served) = match kernel::find(&self.identifier).context(DEVICES)? {
            Some(device) => {
                queues.clients_have_stayed();
                let coming = self.coming.take().map(JoinHandle::join).transpose();
                let given = coming.map_err(|_| anyhow!("its thread has panicked"))?.transpose()?;
                let connection = match given {
                    Some(connection) if !is_lost(&connection)? => connection,
                    _ => hand_over(&self.identifier)?,
                };
                let served = self.serve(&connection, queues)?;
                tracing::info!(device = %device.path().display(), "taken over");
                (device, connection, served)
            }
            None => self.connect(queues)?,
        };
        let rdev = numbers(&device)?;
        let place = device_of(&self.volume);
        node::place(&place, rdev, &[rdev]).map_err(node_error)?;
        let (is_as_served, is_apart) = (false, false);
        let mut shown =
            ShownNbd { device, connection, served, is_as_served, place: place.clone(), rdev, is_apart };
        // Before the volume is said to be shown: the engine before may have died before it had made its device ready.
        shown.become_as_served()?;
        self.shown = Some(shown);
        Ok(Endpoint { device: Some(place), uri: None })
    }

    fn connect(&self, queues: &Queues) -> Result<(Device, OwnedFd, Served)> {
        let (served, ours, theirs) = self.connection(queues)?;
        let settings = Settings {
            index: None,
            identifier: self.identifier.clone(),
            served,
            timeout: TIMER,
            slow: Slow::IsPatient,
            dead_timeout: DEAD,
        };
        let mut device = kernel::connect(&settings, vec![theirs])?;
        device.let_go();
        Ok((device, ours, served))
    }

    /// Serves the device on a connection that the kernel has been given. What it is to be.
    fn serve(&self, connection: &OwnedFd, queues: &Queues) -> Result<Served> {
        // Said on a connection that is for nothing else.
        let (served, ..) = self.connection(queues)?;
        let queues_end = connection.try_clone().context("a copy of a socket")?;
        queues.tell(QUEUE, Order::Kernel(queues_end))?;
        Ok(served)
    }

    /// A connection to the queue on which the handshake is done: what was told, the queue's end, the kernel's end.
    fn connection(&self, queues: &Queues) -> Result<(Served, OwnedFd, OwnedFd)> {
        let (mut kernels, queues_end) = UnixStream::pair().context("a pair of sockets")?;
        let watched = OwnedFd::from(queues_end.try_clone()?);
        queues.tell(QUEUE, Order::Client(queues_end.into()))?;
        kernels.set_read_timeout(Some(HELLO))?;
        let served = handshake(&mut kernels, &self.volume).context("the engine's own queue")?;
        kernels.set_read_timeout(None)?;
        Ok((served, watched, kernels.into()))
    }

    pub(super) fn resize(&mut self, size: u64) -> Result<()> {
        let Some(shown) = &mut self.shown else { return Ok(()) };
        shown.served.size = size;
        shown.become_as_served()
    }

    /// Gives the device a new connection if it has lost the one it had, and makes it what it is not yet.
    pub(super) fn look_after(&mut self, queues: &Queues) -> Result<()> {
        let Some(shown) = &mut self.shown else { return Ok(()) };
        if shown.is_apart {
            return Ok(());
        }
        if !is_lost(&shown.connection)? {
            look_after_node(&shown.place, shown.rdev);
            return shown.make_as_served(AGAIN_ANSWERED).map(drop);
        }
        if !shown.device.is_connected() {
            if node::rdev(&shown.place) != Some(shown.rdev) {
                // That has been said.
                return Ok(());
            }
            // Its number may be another server's by now.
            node::remove(&shown.place, shown.rdev).with_context(|| shown.place.display().to_string())?;
            bail!(
                "{} was disconnected by somebody else: stop the volume, then start it again",
                shown.device.path().display()
            );
        }
        tracing::warn!(device = %shown.device.path().display(), "its connection was lost; it gets a new one");
        let connection = hand_over(&self.identifier)?;
        let served = self.serve(&connection, queues)?;
        if let Some(shown) = &mut self.shown {
            (shown.served, shown.connection) = (served, connection);
            shown.become_as_served()?;
        }
        Ok(())
    }

    pub(super) fn hide(&mut self, queues: &Queues) -> Result<(), HideError> {
        let Some(shown) = &mut self.shown else { return wait_until_hidden(queues) };
        if shown.device.is_connected() {
            refuse_in_use(&shown.place, shown.rdev)?;
        }
        // What fails leaves the rest to whoever asks again: the queues serve a device's client until they are told to stop.
        shown.device.disconnect().map_err(|e| HideError::Failed(e.into()))?;
        shown.is_apart = true;
        node::remove(&shown.place, shown.rdev)
            .map_err(|e| HideError::Failed(anyhow!("{}: {e}", shown.place.display())))?;
        queues.order(|_| Ok(Order::Hide)).map_err(HideError::Failed)?;
        queues.leave(queues.len());
        self.shown = None;
        wait_until_hidden(queues)
    }
}

impl ShownNbd {
    /// Makes the device what is served now, and says so if it has to wait with that.
    fn become_as_served(&mut self) -> Result<()> {
        self.is_as_served = false;
        let device = self.device.path();
        match self.make_as_served(ANSWERED)? {
            Adopted::AsServed => {}
            Adopted::Unanswered => {
                tracing::warn!(device = %device.display(), "requests are not answered: it gets its size once they are");
            }
            Adopted::Uncounted => tracing::warn!(
                device = %device.display(),
                "its statistics are turned off, and whether requests are answered cannot be known: it gets its size once 1 is \
                 written to its queue/iostats in /sys/block"
            ),
        }
        Ok(())
    }

    /// Makes the device what is served, if it is not that yet, and requests are answered; else it is to be tried again. The kernel would hold its locks until they are, and no next engine could come if this one died.
    fn make_as_served(&mut self, within: Duration) -> Result<Adopted> {
        if self.is_as_served {
            return Ok(Adopted::AsServed);
        }
        let adopted = self.device.adopt(&self.served, TIMER, within)?;
        self.is_as_served = adopted == Adopted::AsServed;
        Ok(adopted)
    }
}

/// Gives the kernel a connection to a device, as soon as it takes one: only in the place of one that it knows to be dead. The
/// queue's end of it.
fn hand_over(identifier: &str) -> Result<OwnedFd> {
    let deadline = Instant::now() + PREDECESSOR;
    loop {
        let (kernels, ours) = UnixStream::pair().context("a pair of sockets")?;
        let mut device = kernel::find(identifier).context(DEVICES)?.context(DISCONNECTED)?;
        device.reconnect(vec![kernels.into()]).map_err(|e| match e {
            ClientError::StillOpen(_) => anyhow!("{e}{}: unmount or close it first", by_whom(&device)),
            e => e.into(),
        })?;
        device.let_go();
        let ours = ours.into();
        if !is_lost(&ours)? {
            return Ok(ours);
        }
        if Instant::now() > deadline {
            bail!("{} is served by another process", device.path().display());
        }
        std::thread::sleep(AGAIN);
    }
}

/// Who has the device open, in brackets, if that is seen.
fn by_whom(device: &Device) -> String {
    let users = fuse_frontend::users_of(&device.path());
    let named: Vec<String> = users.iter().map(ToString::to_string).collect();
    if named.is_empty() { String::new() } else { format!(" ({})", named.join(", ")) }
}

/// True if the kernel has closed its end.
fn is_lost(connection: &OwnedFd) -> io::Result<bool> {
    // An end that is closed is told without being asked for.
    let mut polls = [PollFd::new(connection.as_fd(), PollFlags::empty())];
    Ok(poll(&mut polls, PollTimeout::ZERO)? > 0)
}

fn numbers(device: &Device) -> Result<u64> {
    let (major, minor) = device.numbers().with_context(|| device.path().display().to_string())?;
    Ok(nix::sys::stat::makedev(major, minor))
}
