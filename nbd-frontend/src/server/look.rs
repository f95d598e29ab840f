//! Are the clients still there? Asked once in a turn that has writes to submit, for all connections that have sent
//! something, and so with one system call.
//!
//! What a connection has in this turn was received before the question. So a write of a client that had hung up
//! before it sent the same write again on another connection of this server is seen as such, before either of the
//! two is submitted.
//!
//! Nobody is asked while the volume has one connection ([`ConnectionCount`](crate::ConnectionCount)): what a client sends
//! again it sends on another one, and that is counted before it is greeted or served, by whichever queue.

use std::os::fd::AsFd;

use lh_ring::Fd;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Server;

/// Connections asked about with one system call.
const BATCH: usize = 16;

/// POLLRDHUP of poll(2) on Linux: the peer has shut its writing side, or both. nix has no name for it.
const POLLRDHUP: PollFlags = PollFlags::from_bits_retain(0x2000);

impl Server {
    /// Asks about every connection that has bytes to be served.
    pub(super) fn look(&mut self) {
        let mut batch: [Option<(u16, Fd)>; BATCH] = Default::default();
        let mut count = 0;
        for index in 0..self.places.served().len() {
            let slot = self.places.served()[index];
            let Some(connection) = self.places.connection(slot) else { continue };
            if connection.rx.available() == 0 {
                // Nothing of it will be submitted in this turn.
                continue;
            }
            batch[count] = Some((slot, connection.fd.clone()));
            count += 1;
            if count == BATCH {
                self.look_at(&batch);
                batch = Default::default();
                count = 0;
            }
        }
        self.look_at(&batch);
    }

    fn look_at(&mut self, batch: &[Option<(u16, Fd)>; BATCH]) {
        let Some((_, first)) = &batch[0] else { return };
        let count = batch.iter().flatten().count();
        let fd = |i: usize| batch[i].as_ref().map_or(first, |(_, fd)| fd).as_fd();
        // Hang-up and errors are told unasked for.
        let mut polls: [PollFd<'_>; BATCH] = std::array::from_fn(|i| PollFd::new(fd(i), POLLRDHUP));
        let polls = &mut polls[..count];
        // Of so few descriptors, without waiting, only a signal can keep the answer back.
        while poll(polls, PollTimeout::ZERO) == Err(Errno::EINTR) {}
        for ((slot, _), seen) in batch.iter().flatten().zip(polls) {
            // `None` are flags unknown to nix, POLLRDHUP among them.
            let has_shut = seen.any() != Some(false);
            if let Some(connection) = self.places.connection(*slot) {
                connection.seen(has_shut);
            }
        }
    }
}
