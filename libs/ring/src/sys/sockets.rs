//! Options of sockets.

use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::{setsockopt, sockopt};

/// Asks for send and receive buffers of that many bytes. The system counts its own overhead in, and gives a process
/// without CAP_NET_ADMIN no more than /proc/sys/net/core/{w,r}mem_max.
///
/// # Errors
/// The system's, for what is no socket.
pub fn set_socket_buffers(socket: impl AsFd, bytes: usize) -> io::Result<()> {
    if setsockopt(&socket, sockopt::SndBufForce, &bytes).is_err() {
        setsockopt(&socket, sockopt::SndBuf, &bytes)?;
    }
    if setsockopt(&socket, sockopt::RcvBufForce, &bytes).is_err() {
        setsockopt(&socket, sockopt::RcvBuf, &bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use nix::sys::socket::getsockopt;

    use super::*;

    #[test]
    fn buffers_grow() {
        let (a, _b) = UnixStream::pair().unwrap();
        set_socket_buffers(&a, 4096).unwrap();
        let small = getsockopt(&a, sockopt::SndBuf).unwrap();
        set_socket_buffers(&a, 100_000).unwrap();
        assert!(getsockopt(&a, sockopt::SndBuf).unwrap() > small);
        assert!(getsockopt(&a, sockopt::RcvBuf).unwrap() >= 100_000);
    }
}
