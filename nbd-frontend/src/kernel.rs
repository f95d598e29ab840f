//! The kernel's own NBD client: `/dev/nbdN` on the other end of a server's sockets, over netlink.
//!
//! - A caller makes connections, runs [`crate::client::handshake()`] on each, and hands them to [`connect`]. The kernel then holds the
//!   sockets: the device lives on when the caller ends, and when the server does.
//! - When a server has gone, requests wait in the kernel. Whoever looks after the device makes connections to the next
//!   server and calls [`Device::reconnect`]; the kernel sends again what had not been answered. It does so for a request
//!   only when that request's timer has run out, so a long timer is a long pause.
//! - A device is found again by the identifier that it was made with: [`find`].
//! - Most of what can be set of a device waits until no request is in flight (the kernel freezes its queue), and nothing ends that
//!   wait: not a signal, and for a new size not even another connection, which needs the lock that is held meanwhile. A
//!   server that dies then leaves a device, and processes, that only a restart of the host ends. So first comes the connection
//!   ([`Device::reconnect`]), then the rest ([`Device::adopt`]), and that only in a moment in which requests are answered.
//!
//! What the timer means besides that depends on [`Slow`]: with several connections a request that a living server leaves
//! unanswered for longer ends its connection, too, and somebody has to look ([`Device::has_lost_connection`]) also while
//! the server lives.

mod flow;
mod message;
mod netlink;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use lh_block::SECTOR;
use lh_ring::sys;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use thiserror::Error;

use crate::client::Served;
use crate::proto::transmission_flag as flag;

use flow::{Answered, answered};
use message::{Request, attributes, find as attribute, number, u32_at};
use netlink::Netlink;

/// What becomes of the connection of a request whose timer has run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slow {
    /// It is taken for dead, and everything on it is sent again on another one.
    IsDead,
    /// Nothing: a disk that is slower than the timer is no dead server. Only what was sent on a connection that has been
    /// replaced since is sent again. For devices of one connection; with several the kernel does the other thing.
    IsPatient,
}

/// What a device is made with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The number in `/dev/nbdN`; `None`: one that is free.
    pub index: Option<u32>,
    /// Whose it is: what [`find`] looks for. A later [`Device::reconnect`] is refused for any other.
    pub identifier: String,
    /// What the server has told of its export.
    pub served: Served,
    /// How long an unanswered request waits until it is sent on another connection, if there is one; whole seconds, at
    /// least one.
    pub timeout: Duration,
    /// What that means for the connection.
    pub slow: Slow,
    /// How long requests wait for a new connection when none is left, before they fail; whole seconds.
    pub dead_timeout: Duration,
}

/// How long who looks at a device that was just made (udev, a scan of partitions) may wait for its server until what is left
/// to be set is left to [`Device::adopt`].
const GLANCE: Duration = Duration::from_secs(2);

/// What has become of a device that is to be made what its server says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adopted {
    /// It is that.
    AsServed,
    /// Requests are not answered, and nothing was changed: it is to be tried again.
    Unanswered,
    /// Somebody has turned its statistics off (`queue/iostats`): whether requests are answered cannot be known, and nothing was
    /// changed. Once they are on again it is to be tried again.
    Uncounted,
}

/// What is refused by a device that was disconnected, and by no other.
const NEW_CONNECTIONS: &str = "take new connections";

/// Why the kernel's client did not do it.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The kernel has no NBD client.
    #[error("kernel module nbd is not loaded: run modprobe nbd, or use another frontend")]
    Missing,
    /// The device is not there, or belongs to somebody else.
    #[error("/dev/nbd{0} is not connected to this volume")]
    NotOurs(u32),
    /// The device was disconnected, and is nobody's only once it is closed.
    #[error("/dev/nbd{0} has been disconnected and is still open")]
    StillOpen(u32),
    /// The device, or every device, is taken.
    #[error("{0} is in use by another server")]
    Busy(String),
    /// The kernel refused.
    #[error("the kernel's NBD client refuses to {what}: {source}")]
    Refused {
        /// What was asked for.
        what: &'static str,
        /// Its answer.
        source: io::Error,
    },
}

/// A connected device. Dropping it changes nothing for the device.
#[derive(Debug)]
pub struct Device {
    index: u32,
    identifier: String,
    /// Our own handles of the sockets that the kernel has, to see their end.
    sockets: Vec<OwnedFd>,
}

/// What the kernel lacks for this, in words that name it; `None` if nothing.
pub fn missing() -> Option<&'static str> {
    match Netlink::open() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Some("the kernel's NBD client (kernel module nbd)"),
        _ => None,
    }
}

fn open(what: &'static str) -> Result<Netlink, ClientError> {
    Netlink::open().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => ClientError::Missing,
        _ => ClientError::Refused { what, source: e },
    })
}

/// Makes a device of connections on which the handshake is done. Several need a server that says so
/// ([`crate::proto::transmission_flag::CAN_MULTI_CONN`]).
/// Where who looks at the new device gets no answer it is not ready yet: [`Device::adopt`] makes it so.
///
/// # Errors
/// [`ClientError`].
pub fn connect(settings: &Settings, sockets: Vec<OwnedFd>) -> Result<Device, ClientError> {
    const WHAT: &str = "connect";
    let mut netlink = open(WHAT)?;
    let mut request = netlink.request(number::CONNECT);
    if let Some(index) = settings.index {
        request.attribute(number::INDEX, &index.to_ne_bytes());
    }
    request.number(number::SIZE, settings.served.size);
    request.number(number::BLOCK_SIZE, settings.served.block.into());
    let timeout = settings.timeout.as_secs().max(1);
    // 0 is not none: requests have the queue's own timer then, which the kernel sets to 30 s.
    request.number(number::TIMEOUT, if settings.slow == Slow::IsDead { timeout } else { 0 });
    request.number(number::DEAD_TIMEOUT, settings.dead_timeout.as_secs());
    request.number(number::SERVER_FLAGS, settings.served.flags.into());
    request.text(number::BACKEND, &settings.identifier);
    add_sockets(&mut request, &sockets);
    let mut index = None;
    let done = netlink.converse(request, |data| {
        index = attribute(data, number::INDEX).and_then(|value| u32_at(value, 0));
    });
    match (done, index.or(settings.index)) {
        (Ok(()), Some(index)) => {
            let device = Device { index, identifier: settings.identifier.clone(), sockets };
            match device.prepare_new(&settings.served, timeout) {
                Ok(()) => Ok(device),
                Err(source) => {
                    device.disconnect()?;
                    Err(unlike(source))
                }
            }
        }
        (Ok(()), None) => {
            Err(ClientError::Refused { what: WHAT, source: io::ErrorKind::UnexpectedEof.into() })
        }
        (Err(e), _) if e.kind() == io::ErrorKind::ResourceBusy => {
            let name =
                settings.index.map_or("every NBD device".to_owned(), |index| format!("/dev/nbd{index}"));
            Err(ClientError::Busy(name))
        }
        (Err(source), _) => Err(ClientError::Refused { what: WHAT, source }),
    }
}

/// The device has not become what the server says.
fn unlike(source: io::Error) -> ClientError {
    ClientError::Refused { what: "make the device what the server says", source }
}

/// The number in a file of sysfs.
fn number_in(file: &Path) -> io::Result<u64> {
    fs::read_to_string(file)?.trim().parse().map_err(io::Error::other)
}

fn add_sockets(request: &mut Request, sockets: &[OwnedFd]) {
    request.nested(number::SOCKETS, |list| {
        for socket in sockets {
            list.nested(number::SOCKET, |item| {
                item.attribute(number::SOCKET_FD, &socket.as_raw_fd().to_ne_bytes());
            });
        }
    });
}

/// The device with this identifier, if the kernel has one: made by an earlier process.
///
/// # Errors
/// The system's: it could not be looked, which does not say that there is none.
pub fn find(identifier: &str) -> io::Result<Option<Device>> {
    find_below(Path::new("/sys/block"), identifier)
}

fn find_below(devices: &Path, identifier: &str) -> io::Result<Option<Device>> {
    let Some(entries) = sys::if_there(fs::read_dir(devices))? else { return Ok(None) };
    for entry in entries {
        if let Some(index) = index_of(&entry?.path(), identifier)? {
            return Ok(Some(Device { index, identifier: identifier.to_owned(), sockets: Vec::new() }));
        }
    }
    Ok(None)
}

fn index_of(directory: &Path, identifier: &str) -> io::Result<Option<u32>> {
    let number = directory.file_name().and_then(|name| name.to_str()?.strip_prefix("nbd")?.parse().ok());
    let Some(index) = number else { return Ok(None) };
    // One without a connection has no such file.
    let backend = sys::if_there(fs::read_to_string(directory.join("backend")))?;
    Ok(backend.filter(|backend| backend.trim_end_matches('\n') == identifier).map(|_| index))
}

impl Device {
    /// The number in `/dev/nbdN`.
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// What it was made with, and is found by.
    pub fn identifier(&self) -> &str {
        &self.identifier
    }

    /// Major and minor number, which it has whatever its node is called, and without one: a container that has a /dev of its own has none.
    ///
    /// # Errors
    /// The system's: the kernel does not have it any more.
    pub fn numbers(&self) -> io::Result<(u64, u64)> {
        let text = fs::read_to_string(format!("/sys/block/nbd{}/dev", self.index))?;
        let numbers = text.trim().split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        numbers.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// `/dev/nbdN`.
    pub fn path(&self) -> PathBuf {
        format!("/dev/nbd{}", self.index).into()
    }

    /// Prepares a device that was just made, if who looks at it already is answered.
    fn prepare_new(&self, served: &Served, timeout: u64) -> io::Result<()> {
        match self.answered(GLANCE)? {
            Answered::All => {}
            Answered::NotYet => return Ok(()),
            // Who had the number before has left them off. From now on it counts.
            Answered::Unknown => fs::write(self.setting("iostats"), "1")?,
        }
        self.prepare(served, timeout)
    }

    /// Takes back what somebody has set who had the number before, which outlives a connection, and sets what this one
    /// needs. The timer comes last: who finds it set knows that the rest was done. (Devices of [`Slow::IsDead`] have it from the
    /// begin, and the kernel's module has no way to ask which they are.)
    fn prepare(&self, served: &Served, timeout: u64) -> io::Result<()> {
        if served.flags & (flag::READ_ONLY | flag::SEND_FLUSH) == flag::SEND_FLUSH {
            sys::as_new(self.open()?.as_fd())?;
        }
        self.limit(served.longest)?;
        self.set_timer(timeout)
    }

    /// Opens the device, for a moment by a node of our own where nobody made one (containers have a /dev of their own).
    fn open(&self) -> io::Result<File> {
        match File::open(self.path()) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            opened => return opened,
        }
        let numbers = fs::read_to_string(format!("/sys/block/nbd{}/dev", self.index))?;
        let (major, minor) = numbers.trim().split_once(':').ok_or(io::ErrorKind::InvalidData)?;
        let number = |text: &str| text.parse().map_err(io::Error::other);
        let path = PathBuf::from(format!("/dev/.longhorn-nbd{}-{}", self.index, std::process::id()));
        mknod(&path, SFlag::S_IFBLK, Mode::S_IRUSR | Mode::S_IWUSR, makedev(number(major)?, number(minor)?))?;
        let opened = File::open(&path);
        // A node left behind names a device that root alone may open.
        let _ = fs::remove_file(path);
        opened
    }

    /// A setting of the device's queue.
    fn setting(&self, name: &str) -> PathBuf {
        format!("/sys/block/nbd{}/queue/{name}", self.index).into()
    }

    /// Keeps requests to what the server takes. The kernel's client does not ask, and sends 4 MiB (Linux 7.3).
    fn limit(&self, longest: u32) -> io::Result<()> {
        let setting = self.setting("max_sectors_kb");
        if number_in(&setting)? > (longest >> 10).into() {
            fs::write(setting, (longest >> 10).to_string())
        } else {
            Ok(())
        }
    }

    /// How long a request waits before the kernel looks at its connection.
    fn set_timer(&self, seconds: u64) -> io::Result<()> {
        fs::write(self.setting("io_timeout"), (seconds * 1000).to_string())
    }

    /// Gives up this process's own handles of the sockets, which are the kernel's alone then: a socket that it does not
    /// take, or no longer has, is closed, and the server sees that.
    pub fn let_go(&mut self) {
        self.sockets.clear();
    }

    /// Hands the kernel connections to take the places of those that have died; as many as have died at most are taken.
    /// Nothing else goes with them: before it took any of them, the kernel would wait for the requests that wait for them
    /// (seen on Linux 6.12 and 7.3), for ever.
    ///
    /// # Errors
    /// [`ClientError::NotOurs`] if the device was disconnected meanwhile, [`ClientError::StillOpen`] if somebody has it open besides.
    pub fn reconnect(&mut self, sockets: Vec<OwnedFd>) -> Result<(), ClientError> {
        self.reconfigure(NEW_CONNECTIONS, |request| add_sockets(request, &sockets))?;
        self.sockets = sockets;
        Ok(())
    }

    /// Makes a device that an earlier process has left, or one whose server's disk has grown, what its server says now: its size,
    /// its longest request, and all that [`connect`] sets where that process died before it had. To be called when the kernel has
    /// taken connections. What is in flight then has `within` to be answered.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn adopt(
        &mut self,
        served: &Served,
        timeout: Duration,
        within: Duration,
    ) -> Result<Adopted, ClientError> {
        if !self.is_connected() {
            // What would be set is another's.
            return Err(ClientError::NotOurs(self.index));
        }
        let timeout = timeout.as_secs().max(1);
        let is_ready = number_in(&self.setting("io_timeout")).map_err(unlike)? == timeout * 1000;
        let longest = number_in(&self.setting("max_sectors_kb")).map_err(unlike)?;
        let is_limited = longest <= (served.longest >> 10).into();
        let sectors = number_in(format!("/sys/block/nbd{}/size", self.index).as_ref()).map_err(unlike)?;
        let is_as_large = sectors * SECTOR == served.size;
        if is_ready && is_limited && is_as_large {
            return Ok(Adopted::AsServed);
        }
        match self.answered(within).map_err(unlike)? {
            Answered::All => {}
            Answered::NotYet => return Ok(Adopted::Unanswered),
            Answered::Unknown => return Ok(Adopted::Uncounted),
        }
        let made_ready = match is_ready {
            // What has been set since then is its users' affair, as long as the server takes what they send.
            true => self.limit(served.longest),
            false => self.prepare(served, timeout),
        };
        made_ready.map_err(unlike)?;
        if !is_as_large {
            self.resize(served.size)?;
        }
        Ok(Adopted::AsServed)
    }

    /// Changes the device's size, in use or not, when everything in flight has been answered: see [`Device::adopt`], which
    /// sees to it that it will be.
    ///
    /// # Errors
    /// As for [`Device::reconnect`].
    pub fn resize(&mut self, size: u64) -> Result<(), ClientError> {
        self.reconfigure("take the new size", |request| request.number(number::SIZE, size))
    }

    /// Whether what is in flight has been answered: see [`answered`].
    fn answered(&self, within: Duration) -> io::Result<Answered> {
        answered(format!("/sys/block/nbd{}", self.index).as_ref(), within)
    }

    fn reconfigure(&self, what: &'static str, fill: impl FnOnce(&mut Request)) -> Result<(), ClientError> {
        let mut netlink = open(what)?;
        let mut request = netlink.request(number::RECONFIGURE);
        request.attribute(number::INDEX, &self.index.to_ne_bytes());
        request.text(number::BACKEND, &self.identifier);
        fill(&mut request);
        netlink.converse(request, |_| {}).map_err(|source| match source.raw_os_error() {
            // EINVAL stands for everything: no such device, none of ours, not connected.
            Some(22) if !self.is_connected() => ClientError::NotOurs(self.index),
            Some(22) if what == NEW_CONNECTIONS => ClientError::StillOpen(self.index),
            _ => ClientError::Refused { what, source },
        })
    }

    /// True while the kernel has the device for this identifier, with living connections or not.
    pub fn is_connected(&self) -> bool {
        let directory = format!("/sys/block/nbd{}", self.index);
        // One that cannot be looked at is not taken for gone.
        index_of(Path::new(&directory), &self.identifier).map_or(true, |index| index.is_some())
    }

    /// Waits until one of the connections that this process handed over has ended: the server has gone, or the kernel has
    /// taken it for dead. False if none has when the time is over. Of a device that was only found nothing is known, so
    /// that is true at once.
    ///
    /// # Errors
    /// The system's.
    pub fn has_lost_connection(&self, within: Duration) -> io::Result<bool> {
        if self.sockets.is_empty() {
            return Ok(true);
        }
        // The kernel shuts a dead connection both ways, which is told without being asked for.
        let mut polls: Vec<PollFd<'_>> =
            self.sockets.iter().map(|s| PollFd::new(s.as_fd(), PollFlags::empty())).collect();
        let timeout = PollTimeout::try_from(within).unwrap_or(PollTimeout::MAX);
        match poll(&mut polls, timeout) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => Ok(false),
            Ok(_) => Ok(true),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes the device apart. Requests that wait for a connection fail; whoever has it open gets errors. The caller has
    /// made sure that it is not in use. Where it fails it may be asked for again.
    ///
    /// # Errors
    /// [`ClientError`]. A device that is not connected any more is no error.
    pub fn disconnect(&self) -> Result<(), ClientError> {
        const WHAT: &str = "disconnect";
        if !self.is_connected() {
            return Ok(());
        }
        let mut netlink = open(WHAT)?;
        let mut request = netlink.request(number::DISCONNECT);
        request.attribute(number::INDEX, &self.index.to_ne_bytes());
        netlink.converse(request, |_| {}).map_err(|source| ClientError::Refused { what: WHAT, source })
    }
}

/// Every NBD device of the kernel, and whether it is connected.
///
/// # Errors
/// [`ClientError`].
pub fn status() -> Result<Vec<(u32, bool)>, ClientError> {
    const WHAT: &str = "tell its devices";
    let mut netlink = open(WHAT)?;
    let request = netlink.request(number::STATUS);
    let mut devices = Vec::new();
    netlink
        .converse(request, |data| {
            let list = attribute(data, number::DEVICES).unwrap_or_default();
            devices.extend(attributes(list).filter(|(kind, _)| *kind == number::DEVICE).filter_map(
                |(_, item)| {
                    let index = u32_at(attribute(item, number::DEVICE_INDEX)?, 0)?;
                    let connected = attribute(item, number::DEVICE_CONNECTED)?.first()? != &0;
                    Some((index, connected))
                },
            ));
        })
        .map_err(|source| ClientError::Refused { what: WHAT, source })?;
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_looked_at_is_not_passed_over() {
        let devices = tempfile::tempdir().unwrap();
        let found = |name: &str| find_below(devices.path(), name).map(|found| found.map(|d| d.index()));
        assert!(find_below(&devices.path().join("none"), "a").unwrap().is_none());
        for number in [0, 1, 2] {
            fs::create_dir(devices.path().join(format!("nbd{number}"))).unwrap();
        }
        fs::write(devices.path().join("nbd1/backend"), "a\n").unwrap();
        assert_eq!((found("a").unwrap(), found("b").unwrap()), (Some(1), None));
        // A directory of that name stands for what cannot be read just now.
        fs::create_dir(devices.path().join("nbd2/backend")).unwrap();
        assert!(found("b").is_err(), "it may be the one");
    }
}
