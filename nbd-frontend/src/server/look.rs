//! Are the clients still there? Asked once in a turn that has writes to submit, for all connections that have sent
//! something, and so with one system call; and before the device begins requests that have waited in it without any order.
//!
//! What a connection has in this turn was received before the question. So a write of a client that had hung up
//! before it sent the same write again on another connection of this server is seen as such, before either of the
//! two is submitted.
//!
//! Nobody is asked while the volume has had one connection ([`ConnectionCount`](crate::ConnectionCount)) since it was last seen: what
//! a client sends again it sends on another one, and that is counted before it is greeted or served, by whichever queue.

use std::os::fd::AsFd;

use lh_block::Device;
use lh_ring::{Fd, Payload};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Server;
use crate::connection::{Connection, Why};
use crate::connection_count::Census;

/// Connections asked about with one system call.
const BATCH: usize = 16;

/// POLLRDHUP of poll(2) on Linux: the peer has shut its writing side, or both. nix has no name for it.
const POLLRDHUP: PollFlags = PollFlags::from_bits_retain(0x2000);

impl Server {
    /// Asks about every connection that has bytes to be served: of the others nothing will be submitted in this turn.
    pub(super) fn look_at_senders(&mut self, census: Census) {
        self.look_at_those(
            |connection| connection.rx.available() > 0,
            |server, slot, has_shut| {
                if let Some(connection) = server.places.connection(slot) {
                    connection.seen(has_shut, census);
                }
            },
        );
    }

    /// Asks about every connection of which the device has requests, and closes those whose client has left. After
    /// `NBD_CMD_DISC` it meant what it had sent.
    pub(super) fn end_who_left(&mut self) {
        let census = self.count.census();
        let mut left = Vec::new();
        self.look_at_those(
            |connection| connection.may_have_left(census),
            |_, slot, has_shut| {
                if has_shut {
                    left.push(slot);
                }
            },
        );
        left.into_iter().for_each(|slot| self.close(slot, Why::Left));
    }

    /// What has not been begun of the requests of connections that are closed is not done any more.
    pub(super) fn abandon(&mut self, device: &mut dyn Device<Payload>) {
        for owner in self.gone.drain(..) {
            self.requests.tags_of(owner).for_each(|tag| device.abandon(tag));
        }
    }

    fn look_at_those(
        &mut self,
        whom: impl Fn(&Connection) -> bool,
        mut seen: impl FnMut(&mut Self, u16, bool),
    ) {
        let mut batch: [Option<(u16, Fd)>; BATCH] = Default::default();
        let mut count = 0;
        for index in 0..self.places.served().len() {
            let slot = self.places.served()[index];
            let Some(connection) = self.places.connection(slot).filter(|connection| whom(connection)) else {
                continue;
            };
            batch[count] = Some((slot, connection.fd.clone()));
            count += 1;
            if count == BATCH {
                self.look_at(&batch, &mut seen);
                batch = Default::default();
                count = 0;
            }
        }
        self.look_at(&batch, &mut seen);
    }

    fn look_at(&mut self, batch: &[Option<(u16, Fd)>; BATCH], seen: &mut impl FnMut(&mut Self, u16, bool)) {
        let Some((_, first)) = &batch[0] else { return };
        let count = batch.iter().flatten().count();
        let fd = |i: usize| batch[i].as_ref().map_or(first, |(_, fd)| fd).as_fd();
        // Hang-up and errors are told unasked for.
        let mut polls: [PollFd<'_>; BATCH] = std::array::from_fn(|i| PollFd::new(fd(i), POLLRDHUP));
        let polls = &mut polls[..count];
        // Of so few descriptors, without waiting, only a signal can keep the answer back.
        while poll(polls, PollTimeout::ZERO) == Err(Errno::EINTR) {}
        for ((slot, _), told) in batch.iter().flatten().zip(polls) {
            // `None` are flags unknown to nix, POLLRDHUP among them.
            seen(self, *slot, told.any() != Some(false));
        }
    }
}
