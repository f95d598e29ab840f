//! The connections of a server, by slot.
//!
//! A slot is used again; its serial number tells one user from the next, so that a completion that comes after its
//! connection was closed concerns nobody.

use std::os::fd::AsRawFd;

use nix::sys::socket::{Shutdown, shutdown};

use crate::connection::Connection;
use crate::handshake::Handshake;

/// A connection in one of its two phases.
#[derive(Debug)]
pub(super) enum Place {
    Handshake(Box<Handshake>),
    Connection(Box<Connection>),
}

#[derive(Debug, Default)]
pub(super) struct Places {
    all: Vec<(u32, Option<Place>)>,
    free: Vec<u16>,
    /// Slots in the the full feature phase phase.
    sessions: Vec<u16>,
}

impl Places {
    /// Number of connections.
    pub(super) fn len(&self) -> usize {
        self.all.len() - self.free.len()
    }

    /// Number of connections that log in.
    pub(super) fn handshakes(&self) -> usize {
        self.len() - self.sessions.len()
    }

    /// Slots of the connections in the full feature phase, in no order that means anything.
    pub(super) fn sessions(&self) -> &[u16] {
        &self.sessions
    }

    /// Every slot, used or not.
    pub(super) fn slots(&self) -> std::ops::Range<u16> {
        0..u16::try_from(self.all.len()).unwrap_or(u16::MAX)
    }

    /// A place for a new connection: its slot and serial number.
    ///
    /// # Panics
    /// Beyond 65,536 connections, which the limit of connections excludes.
    pub(super) fn insert(&mut self, handshake: Handshake) -> (u16, u32) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.all.push((0, None));
            u16::try_from(self.all.len() - 1).expect("fewer connections than slots")
        });
        let place = &mut self.all[usize::from(slot)];
        place.0 = place.0.wrapping_add(1);
        place.1 = Some(Place::Handshake(Box::new(handshake)));
        (slot, place.0)
    }

    /// The login is over.
    pub(super) fn promote(&mut self, slot: u16, connection: Connection) {
        self.all[usize::from(slot)].1 = Some(Place::Connection(Box::new(connection)));
        self.sessions.push(slot);
    }

    /// Takes a connection out.
    pub(super) fn remove(&mut self, slot: u16) -> Option<Place> {
        let place = self.all.get_mut(usize::from(slot))?.1.take()?;
        self.free.push(slot);
        self.sessions.retain(|other| *other != slot);
        Some(place)
    }

    /// The serial number of the slot's last user.
    pub(super) fn serial(&self, slot: u16) -> u32 {
        self.all[usize::from(slot)].0
    }

    /// True if this user of the slot is still there.
    pub(super) fn is_current(&self, slot: u16, serial: u32) -> bool {
        self.all.get(usize::from(slot)).is_some_and(|(now, place)| *now == serial && place.is_some())
    }

    pub(super) fn handshake(&mut self, slot: u16) -> Option<&mut Handshake> {
        match self.all.get_mut(usize::from(slot))?.1.as_mut()? {
            Place::Handshake(handshake) => Some(handshake),
            Place::Connection(_) => None,
        }
    }

    pub(super) fn connection(&mut self, slot: u16) -> Option<&mut Connection> {
        match self.all.get_mut(usize::from(slot))?.1.as_mut()? {
            Place::Handshake(_) => None,
            Place::Connection(connection) => Some(connection),
        }
    }

    /// Ends every connection. Dropping alone would leave those open that the ring still waits for.
    pub(super) fn shut_all(&self) {
        for place in self.all.iter().filter_map(|(_, place)| place.as_ref()) {
            let fd = match place {
                Place::Handshake(handshake) => &handshake.fd,
                Place::Connection(connection) => &connection.fd,
            };
            let _ = shutdown(fd.as_raw_fd(), Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use lh_ring::Fd;

    use super::*;

    #[test]
    fn a_completion_for_the_slots_last_user_is_nobodys() {
        let mut peers = Vec::new();
        let mut handshake = || {
            let (here, there) = UnixStream::pair().unwrap();
            peers.push(there);
            Handshake::new(Fd::from(OwnedFd::from(here)), 0, [0; crate::login::SEED])
        };
        let mut places = Places::default();
        let (slot, first) = places.insert(handshake());
        assert!(places.is_current(slot, first));
        places.remove(slot);
        assert!(!places.is_current(slot, first));
        let (again, second) = places.insert(handshake());
        assert_eq!(again, slot);
        assert!(places.is_current(slot, second) && !places.is_current(slot, first));
        assert_eq!((places.len(), places.handshakes()), (1, 1));
        assert!(places.remove(slot).is_some() && places.remove(slot).is_none());
        assert_eq!(places.len(), 0);
    }
}
