//! A connection whose handshake is done by calls that wait, before a ring has it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use lh_block::Address;
use nix::errno::Errno;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket};

use super::send_with_fds;
use crate::tune_served;

/// A stream of either kind. Every call ends at the deadline, with `TimedOut`, however slowly the other side speaks.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    deadline: Instant,
}

#[derive(Debug)]
enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    /// Connects. Small messages of a TCP connection leave at once.
    ///
    /// # Errors
    /// The system's; `TimedOut`.
    pub fn connect(address: &Address, deadline: Instant) -> io::Result<Self> {
        match address {
            Address::Unix(path) => Ok(Self::of_unix(connect_unix(path, deadline)?, deadline)),
            Address::Tcp(address) => {
                Self::of_tcp(TcpStream::connect_timeout(address, left(deadline)?)?, deadline)
            }
        }
    }

    /// A unix connection that exists.
    pub const fn of_unix(socket: UnixStream, deadline: Instant) -> Self {
        Self { socket: Socket::Unix(socket), deadline }
    }

    /// A TCP connection that exists.
    ///
    /// # Errors
    /// The system's.
    pub fn of_tcp(socket: TcpStream, deadline: Instant) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        // Who asks for nothing notices as well that the other host is gone.
        tune_served(&socket);
        Ok(Self { socket: Socket::Tcp(socket), deadline })
    }

    /// Calls end at another time from now on.
    pub const fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// Writes bytes, and a copy of the descriptor with the first of them. Over TCP there is no such thing.
    ///
    /// # Errors
    /// The system's; `TimedOut`; `Unsupported` over TCP, and nothing is written then.
    pub fn write_all_with_fd(&mut self, bytes: &[u8], fd: BorrowedFd<'_>) -> io::Result<()> {
        let Socket::Unix(socket) = &self.socket else { return Err(io::ErrorKind::Unsupported.into()) };
        socket.set_write_timeout(Some(left(self.deadline)?))?;
        let done = loop {
            match send_with_fds(socket.as_fd(), bytes, &[fd]) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                done => break done.map_err(in_time)?,
            }
        };
        self.write_all(&bytes[done..])
    }

    /// True over a unix socket at which root or this process's own user has begun to listen: so much is known of the other side
    /// before it has proved a key.
    pub fn is_to_own_user(&self) -> bool {
        match &self.socket {
            Socket::Unix(socket) => getsockopt(socket, PeerCredentials)
                .is_ok_and(|listener| [0, nix::unistd::geteuid().as_raw()].contains(&listener.uid())),
            Socket::Tcp(_) => false,
        }
    }

    /// The socket, without a deadline.
    ///
    /// # Errors
    /// The system's.
    pub fn into_socket(self) -> io::Result<OwnedFd> {
        Ok(match self.socket {
            Socket::Unix(socket) => {
                socket.set_read_timeout(None)?;
                socket.set_write_timeout(None)?;
                socket.into()
            }
            Socket::Tcp(socket) => {
                socket.set_read_timeout(None)?;
                socket.set_write_timeout(None)?;
                socket.into()
            }
        })
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = Some(left(self.deadline)?);
        let done = match &mut self.socket {
            Socket::Unix(socket) => socket.set_read_timeout(left).and_then(|()| socket.read(bytes)),
            Socket::Tcp(socket) => socket.set_read_timeout(left).and_then(|()| socket.read(bytes)),
        };
        done.map_err(in_time)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = Some(left(self.deadline)?);
        let done = match &mut self.socket {
            Socket::Unix(socket) => socket.set_write_timeout(left).and_then(|()| socket.write(bytes)),
            Socket::Tcp(socket) => socket.set_write_timeout(left).and_then(|()| socket.write(bytes)),
        };
        done.map_err(in_time)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A unix connection waits for ever while its listener has as many as it wishes that nobody has accepted. The time to write
/// holds for that wait, too.
fn connect_unix(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let address = UnixAddr::new(path)?;
    let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let stream = UnixStream::from(socket);
    loop {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match connect(stream.as_raw_fd(), &address) {
            Ok(()) => return Ok(stream),
            Err(Errno::EINTR) => {}
            Err(e) => return Err(in_time(e.into())),
        }
    }
}

/// What the system calls a time that has run out is no word for people.
fn in_time(e: io::Error) -> io::Error {
    if e.kind() == io::ErrorKind::WouldBlock { too_late() } else { e }
}

fn too_late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no answer in time")
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(too_late()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use nix::sys::socket::{Backlog, listen, sockopt};

    use super::*;

    #[test]
    fn one_that_speaks_slowly_is_not_waited_for_beyond_the_deadline() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let began = Instant::now();
        let mut stream = Stream::of_unix(ours, began + Duration::from_millis(100));
        // All of it would take half a minute.
        let drip = std::thread::spawn(move || {
            let mut theirs = theirs;
            while theirs.write_all(&[1]).is_ok() {
                std::thread::sleep(Duration::from_millis(30));
            }
        });
        assert_eq!(stream.read_exact(&mut [0; 1000]).unwrap_err().kind(), io::ErrorKind::TimedOut);
        let took = began.elapsed();
        assert!((100..15_000).contains(&took.as_millis()), "{took:?}");
        drop(stream);
        drip.join().unwrap();
    }

    #[test]
    fn a_listener_that_accepts_nobody_is_not_waited_for_beyond_the_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listen(&listener, Backlog::new(0).unwrap()).unwrap();
        let address = Address::Unix(path);
        let (said, heard) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut waiting = Vec::new();
            let (error, took) = loop {
                let began = Instant::now();
                // There is room for the first, however long its thread is kept from it.
                let most = if waiting.is_empty() { 10_000 } else { 500 };
                match Stream::connect(&address, began + Duration::from_millis(most)) {
                    Ok(stream) => waiting.push(stream),
                    Err(e) => break (e, began.elapsed()),
                }
            };
            said.send((waiting.len(), error.kind(), took)).unwrap();
        });
        let (waiting, error, took) = heard.recv_timeout(Duration::from_secs(20)).expect("it waits for ever");
        assert_eq!((waiting, error), (1, io::ErrorKind::TimedOut));
        assert!(took.as_millis() >= 500, "{took:?}");
    }

    #[test]
    fn whose_listener_it_is_is_known() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let is_own = |name: &str| {
            let address = Address::Unix(directory.path().join(name));
            Stream::connect(&address, Instant::now() + Duration::from_secs(5)).unwrap().is_to_own_user()
        };
        let _own = UnixListener::bind(directory.path().join("own")).unwrap();
        assert!(is_own("own"));
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
        assert!(!Stream::of_tcp(tcp, Instant::now()).unwrap().is_to_own_user());
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP whose_listener_it_is_is_known: another user needs root");
            return;
        }
        let path = directory.path().join("other");
        let listen = move || {
            // SAFETY: the call takes numbers and, unlike libc's function of this name, changes the calling thread alone, which
            // ends with this closure.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1_i64, 65534_i64, -1_i64) }, 0);
            UnixListener::bind(path).unwrap()
        };
        let _other = std::thread::spawn(listen).join().unwrap();
        assert!(!is_own("other"));
    }

    #[test]
    fn a_tcp_connection_is_watched_when_nobody_says_anything() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp(listener.local_addr().unwrap());
        let stream = Stream::connect(&address, Instant::now() + Duration::from_secs(5)).unwrap();
        assert!(getsockopt(&stream.into_socket().unwrap(), sockopt::KeepAlive).unwrap());
    }

    #[test]
    fn another_deadline_holds_from_then_on() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut stream = Stream::of_unix(ours, Instant::now());
        theirs.write_all(b"a").unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::TimedOut);
        stream.set_deadline(Instant::now() + Duration::from_secs(5));
        assert_eq!(stream.read(&mut [0]).unwrap(), 1);
    }

    #[test]
    fn a_socket_given_on_waits_as_long_as_it_takes() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut stream = Stream::of_unix(ours, Instant::now() + Duration::from_secs(5));
        theirs.write_all(b"ab").unwrap();
        stream.read_exact(&mut [0; 1]).unwrap();
        stream.write_all(b"c").unwrap();
        let socket = UnixStream::from(stream.into_socket().unwrap());
        assert_eq!((socket.read_timeout().unwrap(), socket.write_timeout().unwrap()), (None, None));
    }
}
