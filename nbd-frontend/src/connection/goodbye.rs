//! `NBD_CMD_DISC`: what a client has sent before that it meant, and all of it is done ("Request types"), also where nobody stays to
//! take the answers.

use std::os::fd::AsRawFd;

use lh_ring::{Fd, Pool, Tx};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, Shutdown, recv, shutdown};

use super::{Connection, Expect, SEND_MAX, as_len};
use crate::budget::Budget;
use crate::proto::command;

impl Connection {
    /// True if the client, which has shut its side, has sent `NBD_CMD_DISC`. A device that is full keeps it from being read. The answer
    /// costs a copy of what has not been read, once.
    pub(crate) fn says_goodbye(&mut self) -> bool {
        if self.has_said_goodbye {
            return true;
        }
        let mut unread = vec![0; self.rx.available()];
        self.rx.peek_at(0, &mut unread);
        unread.extend(in_socket(&self.fd));
        let len = self.session.request_len();
        let mut next = match &self.expect {
            Expect::Header => 0,
            Expect::Data { range, rest, .. } => range.len + rest.map_or(0, |rest| rest.len),
            Expect::Piece { rest, .. } => rest.len,
            Expect::Filter { call } => call.payload,
            Expect::Drop { left, .. } => *left,
        };
        let mut stream = &unread[..];
        while let Some((header, behind)) = stream.get(as_len(next)..).and_then(|s| s.split_at_checked(len)) {
            let Ok(call) = self.session.decode(header) else { break };
            self.has_said_goodbye |= call.kind == command::DISC;
            (stream, next) = (behind, call.payload);
        }
        self.has_said_goodbye
    }

    /// Answers cannot be sent any more. True if the connection goes on without, until its stream ends: its client has said goodbye, or
    /// may have in what a receive is bringing just now.
    pub(crate) fn goes_on_unheard(&mut self, pool: &Pool, budget: &mut Budget) -> bool {
        let goes_on = self.says_goodbye() || (self.rx.is_outstanding() && !self.is_finishing());
        if goes_on {
            self.is_unheard = true;
            self.tx = Tx::in_parts(pool, SEND_MAX);
            self.untaken = None;
            self.sent(budget);
            self.shut();
        }
        goes_on
    }

    /// Ends the waiting for a client that takes no answers: the send that is on its way fails.
    pub(crate) fn shut(&self) {
        // What has come can be read all the same. One that the client has ended is ended.
        let _ = shutdown(self.fd.as_raw_fd(), Shutdown::Both);
    }

    /// Queues an answer without data, if there is somebody to take it.
    pub(super) fn say(&mut self, answer: &[u8]) {
        if !self.is_unheard {
            self.tx.push_header(answer);
        }
    }
}

/// What has come to a socket and has not been received.
fn in_socket(fd: &Fd) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    loop {
        let peeked = recv(fd.as_raw_fd(), &mut bytes, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT);
        match peeked {
            Ok(len) if len < bytes.len() => {
                bytes.truncate(len);
                return bytes;
            }
            Ok(len) => bytes.resize(2 * len, 0),
            Err(Errno::EINTR) => {}
            Err(_) => return Vec::new(),
        }
    }
}
