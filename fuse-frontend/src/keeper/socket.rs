//! A keeper's connections: messages with descriptors, who is at the other end, and whether anybody still is.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use super::message::Message;

/// One message, and the descriptor that came with it.
pub(super) fn receive(stream: &UnixStream) -> io::Result<(Message, Option<OwnedFd>)> {
    let mut first = [0];
    let (len, mut descriptors) = lh_ring::sys::receive_with_fds(stream.as_fd(), &mut first)?;
    if len == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((Message::read(stream, &first)?, descriptors.pop()))
}

/// Sends a message, with a descriptor if there is one.
pub(super) fn send(
    stream: &UnixStream,
    message: &Message,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let text = message.encode();
    let descriptors: &[BorrowedFd<'_>] = descriptor.as_slice();
    let mut sent = lh_ring::sys::send_with_fds(stream.as_fd(), text.as_bytes(), descriptors)?;
    while sent < text.len() {
        sent += lh_ring::sys::send_with_fds(stream.as_fd(), &text.as_bytes()[sent..], &[])?;
    }
    Ok(())
}

/// True if the other side is gone.
pub(super) fn is_closed(stream: &UnixStream) -> bool {
    wait_closed(stream, Instant::now())
}

/// Waits until the other side is gone, or the deadline; false then.
pub(super) fn wait_closed(stream: &UnixStream, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut watched = [PollFd::new(stream.as_fd(), PollFlags::empty())];
        let millis = u16::try_from(left.as_millis()).unwrap_or(u16::MAX);
        match poll(&mut watched, millis) {
            Ok(0) if left.is_zero() => return false,
            Ok(0) | Err(nix::errno::Errno::EINTR) => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
    }
}

pub(super) fn pid_of(stream: &UnixStream) -> Option<i32> {
    getsockopt(stream, PeerCredentials).ok().map(|peer| peer.pid())
}

/// Root, or whoever the keeper itself runs as.
pub(super) fn is_allowed(stream: &UnixStream) -> bool {
    let uid = getsockopt(stream, PeerCredentials).map(|peer| peer.uid());
    let allowed = uid.is_ok_and(|uid| uid == 0 || uid == nix::unistd::geteuid().as_raw());
    if !allowed {
        tracing::warn!("a connection that is not root's was refused");
    }
    allowed
}
