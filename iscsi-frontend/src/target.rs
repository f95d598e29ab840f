//! What a target is: its name, its disk, who may use it, and its bounds.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use lh_ring::{CHUNK, Pool};
use nix::sys::socket::{SockaddrStorage, getsockname};

use crate::chap::Chap;
use crate::scsi::{DISK_LUN, Identity};

/// What Longhorn's targets are called, before the volume's name.
pub const IQN_PREFIX: &str = "iqn.2019-10.io.longhorn:";

/// A target with one disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// iSCSI name.
    pub name: String,
    /// What initiators know the disk again by.
    pub identity: Identity,
    /// Writes are refused.
    pub read_only: bool,
    /// Whether the write cache is on where no initiator has switched it. With it, a write without FUA is acknowledged by
    /// every replica before it is on stable storage, and a flush makes it so.
    pub write_cache: bool,
    /// Who may log in. `None`: whoever reaches the address.
    pub chap: Option<Chap>,
    /// Where reservations and mode switches are kept. `None`: nowhere, they end with the process.
    pub reservations: Option<PathBuf>,
}

impl Target {
    /// The target of a volume, for everybody.
    pub fn of_volume(volume: &str) -> Self {
        Self {
            name: format!("{IQN_PREFIX}{volume}"),
            identity: Identity::of_volume(volume),
            read_only: false,
            write_cache: true,
            chap: None,
            reservations: None,
        }
    }

    /// Where the disk is found at an address of this host.
    pub fn uri(&self, address: SocketAddr) -> String {
        format!("iscsi://{address}/{}/{DISK_LUN}", self.name)
    }
}

/// Bounds of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections, those that log in included. A further one takes the place of the oldest login on its way, or is closed as soon as it
    /// is accepted.
    pub connections: usize,
    /// Sessions, which hold memory of the pool. Further ones are refused in the login.
    pub sessions: usize,
    /// Commands of a session at a time.
    pub window: u32,
    /// Bytes that a command may bring unasked for (FirstBurstLength). The pool has room for so many bytes of every
    /// command of every session, so that no session ever waits in the middle of its stream.
    pub first_burst: u32,
    /// Bytes of reads, and of writes that are asked for, at a time.
    pub payload_bytes: usize,
    /// The same of one session: who takes no answers holds nobody else up.
    pub session_bytes: usize,
    /// Receives that need memory wait while the pool has fewer free chunks: the rest is for what brings memory back.
    pub spare_chunks: usize,
    /// Seconds that an initiator may take for its login, for 1 MiB of data it was asked for or of its answers, or be silent in the
    /// middle of a PDU (`docs/invariants.md`, 3).
    pub patience_s: u32,
    /// Seconds without a byte after which an initiator is pinged. It has `patience_s` for the answer.
    pub ping_s: u32,
}

impl Limits {
    /// Bounds for a server that shares this pool with its device: half of it for unsolicited data, three eighths for
    /// other data, an eighth kept free.
    pub fn of_pool(pool: &Pool) -> Self {
        /// What an initiator keeps in flight to a disk: Linux has 32 by default, QEMU and Windows up to 64.
        const WINDOW: u32 = 64;
        /// Small writes come with their command; larger ones are worth a question.
        const FIRST_BURST: u32 = 16 << 10;
        let hard = pool.hard_bytes();
        let per_session = (WINDOW * FIRST_BURST) as usize;
        Self {
            connections: 1024,
            sessions: (hard / 2 / per_session).clamp(1, 64),
            window: WINDOW,
            first_burst: FIRST_BURST,
            payload_bytes: hard / 8 * 3,
            session_bytes: hard / 8,
            spare_chunks: hard / CHUNK / 8,
            patience_s: 30,
            ping_s: 30,
        }
    }
}

/// The address at which an initiator has reached us, for SendTargets: it may be one of many.
pub(crate) fn address_of(connection: &impl AsRawFd) -> Option<SocketAddr> {
    let name: SockaddrStorage = getsockname(connection.as_raw_fd()).ok()?;
    if let Some(v4) = name.as_sockaddr_in() {
        return Some(SocketAddr::from((v4.ip(), v4.port())));
    }
    let v6 = name.as_sockaddr_in6()?;
    let address = SocketAddr::from((v6.ip(), v6.port()));
    Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

/// A socket that listens.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens on a TCP address.
    ///
    /// # Errors
    /// The system's: `AddrInUse`, `AddrNotAvailable`, `PermissionDenied`.
    pub fn tcp(address: SocketAddr) -> std::io::Result<Self> {
        Ok(TcpListener::bind(address)?.into())
    }

    /// The address: which port the system chose.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        TcpListener::from(self.0.try_clone()?).local_addr()
    }

    pub(crate) fn into_fd(self) -> OwnedFd {
        self.0
    }
}

/// A listener made elsewhere, for example by the server before this one.
impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self(listener.into())
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
