//! The handshake of one connection over its socket.
//!
//! Handshakes use no memory of the pool: they wait by poll, read exactly what the machine wants and send at once. A
//! client that lets its answers pile up breaks the protocol (one option at a time) and is disconnected.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use lh_ring::{Counted, Fd};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

use crate::export::Agreed;
use crate::negotiate::{Negotiation, Offer, Progress, Reason};

/// Reads of one handshake before others have their turn.
const READS_MAX: usize = 64;

/// Bytes read at once.
const PIECE: usize = 4096;

/// A connection in the handshake phase.
#[derive(Debug)]
pub(crate) struct Handshake {
    pub(crate) fd: Fd,
    negotiation: Negotiation,
    _counted: Counted,
    /// The server's tick at which it began.
    pub(crate) since: u32,
}

impl AsFd for Handshake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// What a handshake has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Wait for more bytes.
    Wait,
    /// Go on with transmission.
    Ready(Agreed),
    /// Close; the reason, if the client gave one.
    Close(Option<Reason>),
}

impl Handshake {
    /// Sends the greeting. `None` if the client is gone already.
    pub(crate) fn begin(fd: Fd, counted: Counted, since: u32, scratch: &mut Vec<u8>) -> Option<Self> {
        scratch.clear();
        let negotiation = Negotiation::new(scratch);
        send_all(&fd, scratch).then_some(Self { fd, negotiation, _counted: counted, since })
    }

    /// Reads and answers what is there.
    pub(crate) fn advance(&mut self, offer: &Offer<'_>, scratch: &mut Vec<u8>) -> Outcome {
        let mut piece = [0; PIECE];
        for _ in 0..READS_MAX {
            let want = self.negotiation.want().min(PIECE);
            let n = match recv(self.fd.as_raw_fd(), &mut piece[..want], MsgFlags::MSG_DONTWAIT) {
                Ok(0) => return Outcome::Close(None),
                Ok(n) => n,
                Err(Errno::EAGAIN | Errno::EINTR) => return Outcome::Wait,
                Err(_) => return Outcome::Close(None),
            };
            scratch.clear();
            let progress = self.negotiation.input(&piece[..n], offer, scratch);
            if !scratch.is_empty() && !send_all(&self.fd, scratch) {
                return Outcome::Close(None);
            }
            match progress {
                Progress::More => {}
                Progress::Ready(agreed) => return Outcome::Ready(agreed),
                Progress::Close(reason) => return Outcome::Close(Some(reason)),
            }
        }
        Outcome::Wait
    }
}

/// Sends without waiting: a socket's buffer holds many answers, so one that does not take them has not been read.
fn send_all(fd: &Fd, bytes: &[u8]) -> bool {
    send(fd.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) == Ok(bytes.len())
}
