//! Clients that say who they are, and take the place of what they were before.
//!
//! A client that has lost a connection sends on the next one what was not answered. The first copy may still lie in the old
//! connection's buffers, or be at work in the device; were it done later, it would undo what the client has written since. So
//! a connection that takes the place of others ends them, and is greeted only when nothing that the device was given on any
//! connection that has ended is unanswered. What it is sent then comes last (`docs/invariants.md`, 2 and 3).

use std::os::fd::OwnedFd;

use lh_ring::Ring;

use super::Server;
use crate::connection::Why;

/// Who a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Told from all others: a client in place of another one takes the place of all its connections.
    pub client: u128,
    /// Which of the client's connections: a new one takes the place of the one with the same number.
    pub number: u16,
}

impl Lane {
    const fn replaces(self, other: Self) -> bool {
        self.client != other.client || self.number == other.number
    }
}

/// The lanes that are served, and those that wait until what was before them has come to its end.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    served: Vec<(Lane, (u16, u32))>,
    coming: Vec<(Lane, OwnedFd)>,
}

impl Server {
    /// Serves a connection of this lane, from its handshake on, once what was on the connections in whose place it comes
    /// has come to its end. To be followed by a turn.
    pub fn adopt_lane(&mut self, connection: OwnedFd, lane: Lane) {
        self.lanes.coming.retain(|(other, _)| !lane.replaces(*other));
        let served = std::mem::take(&mut self.lanes.served);
        for (other, (slot, serial)) in served {
            if !self.places.is_current(slot, serial) {
                continue;
            }
            if lane.replaces(other) {
                self.close(slot, Why::Replaced);
            } else {
                self.lanes.served.push((other, (slot, serial)));
            }
        }
        self.lanes.coming.push((lane, connection));
    }

    /// Ends every connection that has come by a lane. What the device has of them runs to its end.
    pub fn close_lanes(&mut self) {
        self.lanes.coming.clear();
        for (_, (slot, serial)) in std::mem::take(&mut self.lanes.served) {
            if self.places.is_current(slot, serial) {
                self.close(slot, Why::Replaced);
            }
        }
    }

    /// Lets in who waits, if nothing is left of connections that have ended.
    pub(super) fn let_lanes_in(&mut self, ring: &mut Ring) {
        if self.lanes.coming.is_empty()
            || self.requests.owners().any(|(slot, serial)| !self.places.is_current(slot, serial))
        {
            return;
        }
        for (lane, connection) in std::mem::take(&mut self.lanes.coming) {
            if let Some(place) = self.adopt(ring, connection) {
                self.lanes.served.push((lane, place));
            }
        }
    }
}
