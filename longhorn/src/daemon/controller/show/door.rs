//! Where clients connect, whichever engine serves them: on the listening socket that the engine before has left with the
//! instance manager (`control::deposit`), else on a new one.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use control::deposit::Deposit;
use control::host::Root;

use super::super::queues::{Order, Queues};
use super::{HideError, wait_until_hidden};

/// How long an address may still be taken by the engine before, whose ring outlives it for some milliseconds.
const FREED: Duration = Duration::from_secs(2);

/// Between two tries.
const AGAIN: Duration = Duration::from_millis(10);

/// A listening socket that outlives this engine.
pub(in crate::daemon::controller) struct Door {
    deposit: Deposit,
}

impl Door {
    /// The one of the engine of this name.
    pub(super) fn of(root: &Root, engine: &str) -> Self {
        Self { deposit: Deposit::of(root, engine) }
    }

    /// Listens on the socket of the engine before, if `fits` takes it, else on the one that `anew` makes.
    pub(super) fn open<L: AsFd>(
        &mut self,
        fits: impl FnOnce(OwnedFd) -> Option<L>,
        anew: impl FnMut() -> io::Result<L>,
    ) -> io::Result<L> {
        let left = self.deposit.fetch().unwrap_or_else(|e| {
            tracing::debug!("what the engine before has left cannot be had: {e}");
            None
        });
        let listener = match left.map(fits) {
            Some(Some(listener)) => listener,
            Some(None) => {
                // Nobody will answer there, and it may be in the way.
                self.close();
                listen(anew)?
            }
            None => listen(anew)?,
        };
        if let Err(e) = self.deposit.leave(listener.as_fd()) {
            tracing::warn!(
                "the instance manager does not keep the listening socket ({e}): when this engine dies, clients are refused until the next one listens"
            );
        }
        Ok(listener)
    }

    /// Looks whether the manager that keeps the socket has been replaced.
    pub(super) fn look_after(&mut self) {
        if let Err(e) = self.deposit.renew() {
            tracing::debug!("the instance manager does not keep the listening socket: {e}");
        }
    }

    /// Ends what is shown behind it: whoever connects from now on is refused. `shown`: the queues listen.
    pub(super) fn hide(&mut self, queues: &Queues, shown: bool) -> Result<(), HideError> {
        self.close();
        if shown && queues.leaving() == 0 {
            queues.order(|_| Ok(Order::Hide)).map_err(HideError::Failed)?;
            queues.leave(queues.len());
        }
        wait_until_hidden(queues)
    }

    /// Whoever connects from now on is refused, once this engine listens no more.
    fn close(&mut self) {
        if let Err(e) = self.deposit.withdraw() {
            tracing::debug!("no instance manager keeps the listening socket: {e}");
        }
    }
}

/// Takes a socket that listens at this address, or, where the address leaves the port open, at this IP address.
pub(super) fn tcp_at<L: From<TcpListener>>(wanted: SocketAddr) -> impl FnOnce(OwnedFd) -> Option<L> {
    move |fd| {
        let listener = TcpListener::from(fd);
        let at = listener.local_addr().ok()?;
        let fits = at.ip() == wanted.ip() && (wanted.port() == 0 || wanted.port() == at.port());
        fits.then(|| listener.into())
    }
}

/// Takes a socket that listens at this path, where clients still find it.
pub(super) fn unix_at(path: &Path) -> impl FnOnce(OwnedFd) -> Option<nbd_frontend::Listener> {
    move |fd| {
        let listener = UnixListener::from(fd);
        let is_there = listener.local_addr().ok()?.as_pathname() == Some(path);
        is_there.then(|| nbd_frontend::Listener::inherited(path, listener).ok())?
    }
}

/// Listens, once the engine before has let go of the address.
fn listen<L>(mut anew: impl FnMut() -> io::Result<L>) -> io::Result<L> {
    let deadline = Instant::now() + FREED;
    loop {
        match anew() {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(AGAIN);
            }
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use nbd_frontend::Listener;

    use super::*;

    #[test]
    fn a_socket_fits_where_clients_look_for_it() {
        let made = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (first, second) = (made(), made());
        let (here, there) = (first.local_addr().unwrap(), second.local_addr().unwrap());
        let any_port: SocketAddr = "127.0.0.1:0".parse().unwrap();
        assert!(tcp_at::<Listener>(here)(first.try_clone().unwrap().into()).is_some());
        assert!(tcp_at::<Listener>(any_port)(first.try_clone().unwrap().into()).is_some());
        assert!(tcp_at::<Listener>(there)(first.try_clone().unwrap().into()).is_none());
        assert!(unix_at(Path::new("/x"))(first.into()).is_none());

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nbd.sock");
        let listener = UnixListener::bind(&path).unwrap();
        assert!(tcp_at::<Listener>(here)(listener.try_clone().unwrap().into()).is_none());
        let taken = unix_at(&path)(listener.try_clone().unwrap().into()).unwrap();
        UnixStream::connect(&path).unwrap();
        drop(taken);
        assert!(unix_at(&path)(listener.into()).is_none(), "nobody finds it there any more");
    }
}
