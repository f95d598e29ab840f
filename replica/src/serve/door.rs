//! The door: where the server listens, and what who comes in has to know.

use std::io;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lh_ring::Fd;
use lh_wire::handshake::{Challenge, HELLO_LEN, Hello, Key, Verdict, is_reader};

use super::strangers::Strangers;
use super::{Address, Options, ServeError};

/// How long a process that has ended may hold its listening socket: the kernel takes its ring apart after it.
const LINGERS: Duration = Duration::from_secs(2);

/// Between two looks at that.
const LOOK: Duration = Duration::from_millis(20);

/// Which key a peer knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proven {
    /// The volume's: it may have everything.
    Key,
    /// It may ask where snapshots hold data.
    MapKey,
}

/// The listening socket and what a peer must know.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) listener: Option<Fd>,
    address: Address,
    pub(super) accepting: bool,
    pub(super) retry_at: Option<u64>,
    volume: String,
    replica: String,
    key: Key,
    map_key: Key,
    pub(super) strangers: Strangers,
    /// Removed at the end.
    socket: Option<PathBuf>,
}

impl Door {
    /// Listens.
    ///
    /// # Errors
    /// The address is taken or not ours.
    pub(super) fn open(options: Options) -> Result<Self, ServeError> {
        let listen = options.listen;
        let (listener, address) = match listen_on(&listen) {
            Ok(both) => both,
            Err(source) => return Err(ServeError::Listen { listen, source }),
        };
        let socket = match &address {
            Address::Unix(path) => Some(path.clone()),
            Address::Tcp(_) => None,
        };
        Ok(Self {
            listener: Some(listener),
            address,
            accepting: false,
            retry_at: None,
            volume: options.volume,
            replica: options.replica,
            key: options.key,
            map_key: options.map_key,
            strangers: Strangers::default(),
            socket,
        })
    }

    pub(super) const fn address(&self) -> &Address {
        &self.address
    }

    pub(super) const fn key(&self, proven: Proven) -> &Key {
        match proven {
            Proven::Key => &self.key,
            Proven::MapKey => &self.map_key,
        }
    }

    pub(super) const fn wake_at(&self) -> Option<u64> {
        self.retry_at
    }

    /// Reads a hello and finds by which key it is proved; an error is what to answer.
    pub(super) fn examine(
        &self,
        bytes: &[u8; HELLO_LEN],
        challenge: &Challenge,
    ) -> Result<(Hello, Proven), Verdict> {
        let (hello, proven) = match Hello::decode(bytes, challenge, &self.key) {
            Err(Verdict::BadKey) => (Hello::decode(bytes, challenge, &self.map_key)?, Proven::MapKey),
            whole => (whole?, Proven::Key),
        };
        if proven == Proven::MapKey && !is_reader(bytes) {
            return Err(Verdict::BadKey);
        }
        if hello.volume != self.volume || hello.replica != self.replica {
            return Err(Verdict::WrongName);
        }
        Ok((hello, proven))
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Some(path) = &self.socket {
            // Best effort: a socket left behind is replaced by the next process.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn listen_on(listen: &Address) -> io::Result<(Fd, Address)> {
    match listen {
        Address::Tcp(address) => {
            let listener = TcpListener::bind(address)?;
            let address = Address::Tcp(listener.local_addr()?);
            Ok((Fd::new(listener), address))
        }
        Address::Unix(path) => {
            let listener = bind_unix(path)?;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
            Ok((Fd::new(listener), listen.clone()))
        }
    }
}

/// Binds, in place of a socket that nobody listens on any more if there is one. Whoever opens the door has the directory's lock: the
/// process before has ended, though its socket may be there for a moment yet.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let until = Instant::now() + LINGERS;
    loop {
        match UnixListener::bind(path) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => match UnixStream::connect(path) {
                _ if Instant::now() >= until => return Err(e),
                Err(refused) if refused.kind() == io::ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path)?;
                }
                _ => std::thread::sleep(LOOK),
            },
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_lingers_is_waited_for_and_one_that_is_used_is_not_taken() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("r.sock");
        let before = UnixListener::bind(&path).unwrap();
        let ends = std::thread::spawn(move || {
            std::thread::sleep(10 * LOOK);
            drop(before);
        });
        let now = bind_unix(&path).unwrap();
        ends.join().unwrap();
        assert_eq!(bind_unix(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        UnixStream::connect(&path).unwrap();
        drop(now);
    }
}
