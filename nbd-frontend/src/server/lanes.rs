//! Clients that say who they are, and take the place of what they were before.
//!
//! A client that has lost a connection sends on the next one what was not answered. The first copy may still lie in the old
//! connection's buffers, or be at work in the device; were it done later, it would undo what the client has written since. So
//! a connection that takes the place of others ends them, and is greeted only when nothing that the device was given on any
//! connection that has ended is unanswered. What it is sent then comes last (`docs/invariants.md`, 2 and 3).
//!
//! Of several clients the one that came last has its place as long as it is there: one that had to go for it tries to come back,
//! and each would end the other's connections for ever.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use lh_ring::Ring;
use tracing::debug;

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

/// Clients that are remembered after they had to go: as many as try to come back at once, and more.
const REPLACED_MAX: usize = 16;

/// The lanes that are served, and those that wait until what was before them has come to its end.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    served: Vec<(Lane, (u16, u32))>,
    coming: Vec<(Lane, OwnedFd)>,
    /// Clients that had to go for another one, the last one last.
    replaced: VecDeque<u128>,
}

impl Lanes {
    /// True if the client had to go, and the one for which it did, or one after that, is there.
    fn has_had_to_go(&self, client: u128) -> bool {
        let lanes = self.served.iter().map(|(lane, _)| lane).chain(self.coming.iter().map(|(lane, _)| lane));
        self.replaced.contains(&client) && lanes.into_iter().any(|lane| lane.client != client)
    }

    /// A client comes in the place of these.
    fn note(&mut self, client: u128, before: impl IntoIterator<Item = u128>) {
        self.replaced.retain(|replaced| *replaced != client);
        for gone in before {
            if gone != client && !self.replaced.contains(&gone) {
                self.replaced.push_back(gone);
            }
        }
        while self.replaced.len() > REPLACED_MAX {
            self.replaced.pop_front();
        }
    }
}

impl Server {
    /// Serves a connection of this lane, from its handshake on, once what was on the connections in whose place it comes
    /// has come to its end. One of a client that had to go for another one that is there is closed. To be followed by a turn.
    pub fn adopt_lane(&mut self, connection: OwnedFd, lane: Lane) {
        let served = std::mem::take(&mut self.lanes.served);
        let is_there = |(_, (slot, serial)): &(Lane, (u16, u32))| self.places.is_current(*slot, *serial);
        self.lanes.served = served.into_iter().filter(is_there).collect();
        if self.lanes.has_had_to_go(lane.client) {
            return debug!("connection refused: its client had to go for another one, which is there");
        }
        let coming = self.lanes.coming.iter().map(|(other, _)| other.client);
        let before: Vec<u128> =
            coming.chain(self.lanes.served.iter().map(|(other, _)| other.client)).collect();
        self.lanes.note(lane.client, before);
        self.lanes.coming.retain(|(other, _)| !lane.replaces(*other));
        for (other, (slot, serial)) in std::mem::take(&mut self.lanes.served) {
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
