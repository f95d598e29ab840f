//! A connection to the server: requests out, replies in where they lie.

use std::os::fd::OwnedFd;

use lh_block::Done;
use lh_ring::{Completion, Fd, OWNER_DEVICE, Payload, Pool, Ring, Rx, Token, Tx, sys};
use nix::sys::socket::{Shutdown, setsockopt, shutdown, sockopt};

use super::requests::{Answer, Broken, Place, REPLY_LEN, Requests};

/// [`Token::kind`] of a receive.
const RECEIVE: u8 = 0;
/// [`Token::kind`] of a send.
const SEND: u8 = 1;

/// Bytes that a socket may hold in either direction: a burst at full depth goes out in one call.
const SOCKET_BUFFER: usize = 1 << 20;

/// How long a server's host may be silent, in milliseconds: then the connection counts as lost, and another one is tried. The
/// kernel of a host that lives answers at once, however slow the server is.
const SILENCE_MS: u32 = 5000;

/// [`REPLY_LEN`] as receives count.
#[expect(clippy::cast_possible_truncation, reason = "16")]
const HEAD: u32 = REPLY_LEN as u32;

/// What the next bytes of the stream are.
#[derive(Clone, Copy, Debug)]
enum Expect {
    Head,
    Data(Place, u32),
}

/// A connection whose handshake is done.
#[derive(Debug)]
pub(super) struct Link {
    fd: Fd,
    number: u32,
    rx: Rx,
    tx: Tx,
    expect: Expect,
    /// Bytes missing for the next step.
    want: u32,
}

impl Link {
    pub(super) fn new(socket: OwnedFd, number: u32, pool: &Pool) -> Self {
        if let Err(e) = sys::set_socket_buffers(&socket, SOCKET_BUFFER) {
            tracing::debug!("socket buffers of a client's connection stay as they are: {e}");
        }
        notice_silence(&socket);
        let (rx, tx) = (Rx::new(pool, 1), Tx::new(pool));
        Self { fd: Fd::new(socket), number, rx, tx, expect: Expect::Head, want: HEAD }
    }

    pub(super) const fn number(&self) -> u32 {
        self.number
    }

    /// Sends what is to be sent, and starts to receive; false if there was no memory for that.
    pub(super) fn start(&mut self, ring: &mut Ring, requests: &mut Requests) -> bool {
        while let Some(call) = requests.next_call() {
            self.tx.push_header(&call.head);
            call.data.into_iter().for_each(|data| self.tx.push_payload(data));
        }
        ring.send(Token::new(OWNER_DEVICE, SEND, 0, self.number), &self.fd, &mut self.tx);
        self.rx.is_outstanding()
            || ring.recv(Token::new(OWNER_DEVICE, RECEIVE, 0, self.number), &self.fd, &mut self.rx, self.want)
    }

    /// A completion of this connection; false if it is broken.
    pub(super) fn completed(completion: &Completion) -> bool {
        match (&completion.result, completion.token.kind) {
            (Ok(0), RECEIVE) | (Err(_), _) => false,
            (Ok(_), _) => true,
        }
    }

    /// The next request that what was received has ended; `None` until more has come.
    pub(super) fn next_done(&mut self, requests: &mut Requests) -> Result<Option<Done<Payload>>, Broken> {
        loop {
            match self.expect {
                Expect::Head => {
                    let Some(head) = self.rx.peek::<REPLY_LEN>() else {
                        self.want = missing(HEAD, self.rx.available());
                        return Ok(None);
                    };
                    let answer = requests.reply(&head)?;
                    self.rx.skip(REPLY_LEN);
                    match answer {
                        Answer::Data(place, len) => self.expect = Expect::Data(place, len),
                        Answer::Done(done) => return Ok(Some(done)),
                        Answer::Piece => {}
                    }
                }
                Expect::Data(place, len) => {
                    if self.rx.available() < len as usize {
                        self.want = missing(len, self.rx.available());
                        return Ok(None);
                    }
                    self.expect = Expect::Head;
                    let data = self.rx.take(len as usize);
                    if let Some(done) = requests.data(place, data) {
                        return Ok(Some(done));
                    }
                }
            }
        }
    }

    /// Ends the connection: both directions at once, so that what is in flight on the ring ends, too.
    pub(super) fn close(self) {
        let _ = shutdown(self.fd.raw(), Shutdown::Both);
    }
}

fn missing(needed: u32, available: usize) -> u32 {
    needed.saturating_sub(u32::try_from(available).unwrap_or(u32::MAX)).max(1)
}

/// Ends a TCP connection whose other end is silent, with requests in flight or without. Unix sockets have none of it and
/// refuse.
fn notice_silence(socket: &OwnedFd) {
    let _ = setsockopt(socket, sockopt::TcpUserTimeout, &SILENCE_MS);
    let _ = setsockopt(socket, sockopt::TcpKeepIdle, &2);
    let _ = setsockopt(socket, sockopt::TcpKeepInterval, &1);
    let _ = setsockopt(socket, sockopt::TcpKeepCount, &3);
    let _ = setsockopt(socket, sockopt::KeepAlive, &true);
}
