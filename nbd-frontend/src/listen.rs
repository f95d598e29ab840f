//! Sockets to listen on.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};

/// Connections that may wait to be accepted: a burst of a few thousand is refused, a thousand is not.
const BACKLOG: i32 = 1024;

/// A socket that listens. A unix socket's path is removed when it is dropped, unless somebody else has taken it over.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: PathGuard,
}

/// Keeps a unix socket's path until it is dropped: its path, device and inode. `None`: there is no path to keep.
#[derive(Debug)]
pub(crate) struct PathGuard(Option<(PathBuf, u64, u64)>);

impl Listener {
    /// Listens on a unix socket that only its owner may connect to. A socket that a dead process left behind is
    /// replaced.
    ///
    /// # Errors
    /// `AddrInUse` if another process listens there, or if something else than a socket has the name; otherwise the
    /// system's.
    pub fn unix(path: &Path) -> io::Result<Self> {
        remove_stale(path)?;
        let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        // Nobody can connect before `listen`.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        listen(&fd, Backlog::new(BACKLOG)?)?;
        Self::at(path, fd)
    }

    /// A unix socket that listens at this path already, made by the server before this one.
    ///
    /// # Errors
    /// The system's; `NotFound` if nobody finds the socket there any more.
    pub fn inherited(path: &Path, listener: UnixListener) -> io::Result<Self> {
        Self::at(path, listener.into())
    }

    fn at(path: &Path, fd: OwnedFd) -> io::Result<Self> {
        let made = fs::symlink_metadata(path)?;
        Ok(Self { fd, path: PathGuard(Some((path.to_owned(), made.dev(), made.ino()))) })
    }

    /// Listens on a TCP address.
    ///
    /// # Errors
    /// The system's: `AddrInUse`, `AddrNotAvailable`, `PermissionDenied`.
    pub fn tcp(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listen(&listener, Backlog::new(BACKLOG)?)?;
        Ok(listener.into())
    }

    /// The socket, and the guard of its path.
    pub(crate) fn split(self) -> (OwnedFd, PathGuard) {
        (self.fd, self.path)
    }

    /// The address of a TCP socket: which port the system chose.
    ///
    /// # Errors
    /// For a unix socket, or the system's.
    pub fn tcp_address(&self) -> io::Result<SocketAddr> {
        TcpListener::from(self.fd.try_clone()?).local_addr()
    }
}

impl Drop for PathGuard {
    fn drop(&mut self) {
        let Some((path, dev, ino)) = &self.0 else { return };
        let ours = fs::symlink_metadata(path).is_ok_and(|now| now.dev() == *dev && now.ino() == *ino);
        if ours {
            // What cannot be removed is removed by the next who listens there.
            let _ = fs::remove_file(path);
        }
    }
}

/// Removes a socket on which nobody listens.
fn remove_stale(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    if !found.file_type().is_socket() {
        let text = format!("{} exists and is no socket", path.display());
        return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
    }
    match UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        _ => {
            let text = format!("another process listens on {}", path.display());
            Err(io::Error::new(io::ErrorKind::AddrInUse, text))
        }
    }
}

/// A listener made elsewhere, whose path somebody else keeps.
impl From<UnixListener> for Listener {
    fn from(listener: UnixListener) -> Self {
        Self { fd: listener.into(), path: PathGuard(None) }
    }
}

/// A listener made elsewhere, for example by the server before this one.
impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self { fd: listener.into(), path: PathGuard(None) }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_left_behind_is_replaced_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nbd.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let first = Listener::unix(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let error = Listener::unix(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains("another process listens"));
        drop(first);
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        fs::write(&path, "data").unwrap();
        assert_eq!(Listener::unix(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }

    #[test]
    fn a_path_taken_over_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nbd.sock");
        let first = Listener::unix(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let second = Listener::unix(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn tcp_tells_its_port() {
        let listener = Listener::tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        assert_ne!(listener.tcp_address().unwrap().port(), 0);
    }
}
