//! The login of one connection over its socket.
//!
//! Logins use no memory of the pool: they wait by poll, read exactly one PDU at a time and send at once. A last response
//! is kept back until the old commands of the same initiator port have ended (`docs/invariants.md`, 2 and 3).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use lh_ring::Fd;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

use crate::login::{Established, Login, Offer, Progress, SEED};
use crate::pdu::{Basic, HEADER, Raw, padding};
use crate::text::TEXT_MAX;

/// Reads of one login before others have their turn.
const READS_MAX: usize = 64;

/// A connection that logs in.
#[derive(Debug)]
pub(crate) struct Handshake {
    pub(crate) fd: Fd,
    login: Login,
    /// The PDU so far.
    pdu: Vec<u8>,
    /// Second at which it began.
    pub(crate) since: u32,
    /// Its last response, and what it says; not sent yet.
    pub(crate) finished: Option<(Box<Established>, Vec<u8>)>,
}

impl AsFd for Handshake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// What a login has come to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Wait for more bytes.
    Wait,
    /// Everything is agreed on: [`Handshake::finished`].
    Finished,
    /// Close; the status, if the login was refused.
    Close(Option<u16>),
}

impl Handshake {
    pub(crate) fn new(fd: Fd, since: u32, seed: [u8; SEED]) -> Self {
        Self { fd, login: Login::new(seed), pdu: Vec::new(), since, finished: None }
    }

    /// Reads and answers what is there.
    pub(crate) fn advance(&mut self, offer: &Offer<'_>) -> Outcome {
        if self.finished.is_some() {
            return Outcome::Finished;
        }
        for _ in 0..READS_MAX {
            let Some(want) = self.want() else { return Outcome::Close(None) };
            if want == 0 {
                match self.request(offer) {
                    Outcome::Wait => continue,
                    outcome => return outcome,
                }
            }
            let have = self.pdu.len();
            self.pdu.resize(have + want, 0);
            let read = recv(self.fd.as_raw_fd(), &mut self.pdu[have..], MsgFlags::MSG_DONTWAIT);
            self.pdu.truncate(have + read.unwrap_or(0));
            match read {
                Ok(0) => return Outcome::Close(None),
                Ok(_) => {}
                Err(Errno::EAGAIN | Errno::EINTR) => return Outcome::Wait,
                Err(_) => return Outcome::Close(None),
            }
        }
        Outcome::Wait
    }

    /// Bytes missing of the PDU; `None` if it is longer than a login's can be.
    fn want(&self) -> Option<usize> {
        let Some((raw, _)) = self.pdu.split_first_chunk::<HEADER>() else {
            return Some(HEADER - self.pdu.len());
        };
        let header = Basic::of(raw);
        let data = header.data_len();
        if data > TEXT_MAX {
            return None;
        }
        Some(HEADER + header.ahs_len() + data + padding(data) - self.pdu.len())
    }

    /// A whole PDU is there.
    fn request(&mut self, offer: &Offer<'_>) -> Outcome {
        let pdu = std::mem::take(&mut self.pdu);
        let Some((raw, rest)) = pdu.split_first_chunk::<HEADER>() else { return Outcome::Close(None) };
        let raw: &Raw = raw;
        let header = Basic::of(raw);
        let data = &rest[header.ahs_len()..][..header.data_len()];
        let mut response = Vec::new();
        let progress = self.login.apply(raw, data, offer, &mut response);
        match progress {
            Progress::Established(established) => {
                self.finished = Some((established, response));
                Outcome::Finished
            }
            Progress::Broken => Outcome::Close(None),
            Progress::More if send_all(&self.fd, &response) => Outcome::Wait,
            Progress::More => Outcome::Close(None),
            Progress::Refused(status) => {
                // Nobody is waited for who does not take it.
                send_all(&self.fd, &response);
                Outcome::Close(Some(status))
            }
        }
    }
}

/// Sends without waiting: a socket's buffer holds many responses, so one that does not take them has not been read.
fn send_all(fd: &Fd, bytes: &[u8]) -> bool {
    send(fd.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) == Ok(bytes.len())
}
