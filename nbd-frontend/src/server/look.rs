//! Are the clients still there? Asked once in a turn that has writes to submit, for all connections that have sent
//! something, and so with one system call; and by the device, when changes have their ranges, and before it begins requests that have
//! waited in it without any order.
//!
//! What a connection has in this turn was received before the question. So a write of a client that had hung up
//! before it sent the same write again on another connection of this server is seen as such, before either of the
//! two is submitted.
//!
//! Nobody is asked while the volume has had one connection ([`ConnectionCount`](lh_ring::ConnectionCount)) since it was last seen: what
//! a client sends again it sends on another one, and that is counted before it is greeted or served, by whichever queue.

use lh_block::Device;
use lh_ring::{Census, Payload};

use super::Server;
use crate::connection::Why;

impl Server {
    /// Asks about every connection that has bytes to be served: of the others nothing will be submitted in this turn.
    pub(super) fn look_at_senders(&mut self, census: Census) {
        self.places.look(
            |connection| connection.rx.available() > 0,
            |connection, _, has_shut| connection.seen(has_shut, census),
        );
    }

    /// Asks about every connection of which the device has requests, and closes those whose client has left. Before
    /// `NBD_CMD_DISC` it meant what it had sent, whether that has been read or not.
    pub(super) fn end_who_left(&mut self) {
        let census = self.count.census();
        let mut left = Vec::new();
        self.places.look(
            |connection| connection.may_have_left(census),
            |connection, slot, has_shut| {
                if has_shut && !connection.says_goodbye() {
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
}
