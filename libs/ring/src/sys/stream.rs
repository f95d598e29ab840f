//! A connection whose handshake is done by calls that wait, before a ring has it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use lh_block::Address;

/// A stream of either kind. Every call ends at the deadline, with `TimedOut` or `WouldBlock`, however slowly the other side
/// speaks.
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
            Address::Unix(path) => Ok(Self::of_unix(UnixStream::connect(path)?, deadline)),
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
        Ok(Self { socket: Socket::Tcp(socket), deadline })
    }

    /// The same with another deadline.
    #[must_use]
    pub fn until(self, deadline: Instant) -> Self {
        Self { deadline, ..self }
    }

    /// The socket, without a deadline.
    ///
    /// # Errors
    /// The system's.
    pub fn into_socket(self) -> io::Result<OwnedFd> {
        self.set_timeout(None)?;
        Ok(match self.socket {
            Socket::Unix(socket) => socket.into(),
            Socket::Tcp(socket) => socket.into(),
        })
    }

    fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match &self.socket {
            Socket::Unix(s) => s.set_read_timeout(timeout).and_then(|()| s.set_write_timeout(timeout)),
            Socket::Tcp(s) => s.set_read_timeout(timeout).and_then(|()| s.set_write_timeout(timeout)),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.set_timeout(Some(left(self.deadline)?))?;
        match &mut self.socket {
            Socket::Unix(socket) => socket.read(bytes),
            Socket::Tcp(socket) => socket.read(bytes),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.set_timeout(Some(left(self.deadline)?))?;
        match &mut self.socket {
            Socket::Unix(socket) => socket.write(bytes),
            Socket::Tcp(socket) => socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_speaks_slowly_is_not_waited_for_beyond_the_deadline() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let began = Instant::now();
        let mut stream = Stream::of_unix(ours, began + Duration::from_millis(100));
        let drip = std::thread::spawn(move || {
            let mut theirs = theirs;
            while theirs.write_all(&[1]).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        assert!(stream.read_exact(&mut [0; 1000]).is_err());
        let took = began.elapsed();
        assert!((100..1000).contains(&took.as_millis()), "{took:?}");
        drop(stream);
        drip.join().unwrap();
    }

    #[test]
    fn a_socket_given_on_waits_as_long_as_it_takes() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut stream = Stream::of_unix(ours, Instant::now() + Duration::from_secs(5));
        theirs.write_all(b"ab").unwrap();
        stream.read_exact(&mut [0; 1]).unwrap();
        let socket = UnixStream::from(stream.into_socket().unwrap());
        assert_eq!((socket.read_timeout().unwrap(), socket.write_timeout().unwrap()), (None, None));
    }
}
