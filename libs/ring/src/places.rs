//! The connections of a server, by slot.
//!
//! A slot is used again; its serial number tells one user from the next, so that a completion that comes after its
//! connection was closed concerns nobody.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

/// Connections asked about with one system call.
const BATCH: usize = 16;

/// POLLRDHUP of poll(2) on Linux: the peer has shut its writing side, or both. nix has no name for it.
const POLLRDHUP: PollFlags = PollFlags::from_bits_retain(0x2000);

/// A connection in one of its two phases.
#[derive(Debug)]
pub enum Place<H, C> {
    /// Greeted: what both sides can do is being agreed on.
    Handshake(H),
    /// Served.
    Connection(C),
}

impl<H: AsFd, C: AsFd> Place<H, C> {
    fn shut(&self) {
        let fd = match self {
            Self::Handshake(handshake) => handshake.as_fd(),
            Self::Connection(connection) => connection.as_fd(),
        };
        // One that the peer has ended already is ended.
        let _ = shutdown(fd.as_raw_fd(), Shutdown::Both);
    }
}

/// Connections by slot.
#[derive(Debug)]
pub struct Places<H, C> {
    all: Vec<(u32, Option<Place<H, C>>)>,
    /// When the user of each slot came, as one of so many.
    came: Vec<u64>,
    coming: u64,
    free: Vec<u16>,
    /// Slots of those that are served.
    served: Vec<u16>,
}

impl<H, C> Default for Places<H, C> {
    fn default() -> Self {
        Self { all: Vec::new(), came: Vec::new(), coming: 0, free: Vec::new(), served: Vec::new() }
    }
}

impl<H: AsFd, C: AsFd> Places<H, C> {
    /// Number of connections.
    pub fn len(&self) -> usize {
        self.all.len() - self.free.len()
    }

    /// True if there is no connection.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of connections in their handshake.
    pub fn handshakes(&self) -> usize {
        self.len() - self.served.len()
    }

    /// Slots of the connections that are served, in no order that means anything.
    pub fn served(&self) -> &[u16] {
        &self.served
    }

    /// Every slot, used or not.
    pub fn slots(&self) -> std::ops::Range<u16> {
        0..u16::try_from(self.all.len()).unwrap_or(u16::MAX)
    }

    /// A place for a new connection: its slot and serial number.
    ///
    /// # Panics
    /// Beyond 65,536 connections, which a server's limit of connections excludes.
    pub fn insert(&mut self, handshake: H) -> (u16, u32) {
        let (slot, serial) = self.begin();
        self.all[usize::from(slot)].1 = Some(Place::Handshake(handshake));
        (slot, serial)
    }

    /// A place for a connection on which nothing is left to be agreed on, made for its slot and serial number.
    ///
    /// # Panics
    /// As [`Places::insert`].
    pub fn insert_served(&mut self, make: impl FnOnce(u16, u32) -> C) {
        let (slot, serial) = self.begin();
        self.promote(slot, make(slot, serial));
    }

    /// A slot that nobody has, and the serial number of its next user.
    fn begin(&mut self) -> (u16, u32) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.all.push((0, None));
            self.came.push(0);
            u16::try_from(self.all.len() - 1).expect("fewer connections than slots")
        });
        self.coming += 1;
        self.came[usize::from(slot)] = self.coming;
        let place = &mut self.all[usize::from(slot)];
        place.0 = place.0.wrapping_add(1);
        (slot, place.0)
    }

    /// The handshake is over: from now on the connection is served.
    pub fn promote(&mut self, slot: u16, connection: C) {
        self.all[usize::from(slot)].1 = Some(Place::Connection(connection));
        self.served.push(slot);
    }

    /// Takes a connection out, with which no ring does anything any more.
    pub fn remove(&mut self, slot: u16) -> Option<Place<H, C>> {
        let place = self.all.get_mut(usize::from(slot))?.1.take()?;
        self.free.push(slot);
        self.served.retain(|other| *other != slot);
        Some(place)
    }

    /// Takes a connection out and ends it, whatever a ring still does with its socket: that holds the descriptor, so that
    /// dropping alone would leave it open.
    pub fn end(&mut self, slot: u16) -> Option<Place<H, C>> {
        let place = self.remove(slot)?;
        place.shut();
        Some(place)
    }

    /// The serial number of the slot's last user.
    pub fn serial(&self, slot: u16) -> u32 {
        self.all[usize::from(slot)].0
    }

    /// True if this user of the slot is still there.
    pub fn is_current(&self, slot: u16, serial: u32) -> bool {
        self.all.get(usize::from(slot)).is_some_and(|(now, place)| *now == serial && place.is_some())
    }

    /// The slot's user, if it is in its handshake.
    pub fn handshake(&mut self, slot: u16) -> Option<&mut H> {
        match self.all.get_mut(usize::from(slot))?.1.as_mut()? {
            Place::Handshake(handshake) => Some(handshake),
            Place::Connection(_) => None,
        }
    }

    /// The slot of the handshake that has been there for longest, of those that are `wanted`.
    pub fn oldest_handshake(&self, wanted: impl Fn(&H) -> bool) -> Option<u16> {
        let is_wanted = |slot: &u16| match &self.all[usize::from(*slot)].1 {
            Some(Place::Handshake(handshake)) => wanted(handshake),
            Some(Place::Connection(_)) | None => false,
        };
        self.slots().filter(is_wanted).min_by_key(|slot| self.came[usize::from(*slot)])
    }

    /// The slot's user, if it is served.
    pub fn connection(&mut self, slot: u16) -> Option<&mut C> {
        match self.all.get_mut(usize::from(slot))?.1.as_mut()? {
            Place::Handshake(_) => None,
            Place::Connection(connection) => Some(connection),
        }
    }

    /// Are the peers of those served connections still there that are `wanted`? Of each `seen` is told its slot, and whether the
    /// peer has shut its writing side, or both. One system call for sixteen of them.
    pub fn look(&mut self, wanted: impl Fn(&C) -> bool, mut seen: impl FnMut(&mut C, u16, bool)) {
        let mut next = 0;
        while next < self.served.len() {
            let (mut slots, mut count) = ([0; BATCH], 0);
            while let Some(&slot) = self.served.get(next).filter(|_| count < BATCH) {
                next += 1;
                if self.peer(slot).is_some_and(&wanted) {
                    slots[count] = slot;
                    count += 1;
                }
            }
            let slots = &slots[..count];
            for (slot, has_shut) in slots.iter().zip(self.have_shut(slots)) {
                if let Some(connection) = self.connection(*slot) {
                    seen(connection, *slot, has_shut);
                }
            }
        }
    }

    /// The slot's user, if it is served, to look at.
    pub fn peer(&self, slot: u16) -> Option<&C> {
        match self.all.get(usize::from(slot))?.1.as_ref()? {
            Place::Handshake(_) => None,
            Place::Connection(connection) => Some(connection),
        }
    }

    /// Whether the peers of these slots, [`BATCH`] at most, have shut their side.
    fn have_shut(&self, slots: &[u16]) -> [bool; BATCH] {
        let mut have_shut = [false; BATCH];
        let fds: [Option<BorrowedFd<'_>>; BATCH] =
            std::array::from_fn(|i| slots.get(i).and_then(|slot| self.peer(*slot)).map(AsFd::as_fd));
        let Some(first) = fds[0] else { return have_shut };
        // Hang-up and errors are told unasked for.
        let mut polls = fds.map(|fd| PollFd::new(fd.unwrap_or(first), POLLRDHUP));
        let polls = &mut polls[..slots.len()];
        // Of so few descriptors, without waiting, only a signal can keep the answer back.
        while poll(polls, PollTimeout::ZERO) == Err(Errno::EINTR) {}
        for (has_shut, told) in have_shut.iter_mut().zip(polls) {
            // `None` are flags unknown to nix, POLLRDHUP among them.
            *has_shut = told.any() != Some(false);
        }
        have_shut
    }

    /// Ends every connection. Dropping alone would leave those open that a ring still waits for.
    pub fn shut_all(&self) {
        self.all.iter().filter_map(|(_, place)| place.as_ref()).for_each(Place::shut);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn peers() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    #[test]
    fn a_completion_for_the_slots_last_user_is_nobodys() {
        let mut places = Places::<UnixStream, UnixStream>::default();
        let (slot, first) = places.insert(peers().0);
        assert!(places.is_current(slot, first));
        places.remove(slot);
        assert!(!places.is_current(slot, first));
        let (again, second) = places.insert(peers().0);
        assert_eq!(again, slot);
        assert!(places.is_current(slot, second) && !places.is_current(slot, first));
        assert_eq!((places.len(), places.handshakes()), (1, 1));
        assert!(places.remove(slot).is_some() && places.remove(slot).is_none());
        assert!(places.is_empty());
    }

    /// A slot that is used again is not the oldest for its number.
    #[test]
    fn the_oldest_handshake_is_the_one_that_came_first() {
        let mut places = Places::<UnixStream, UnixStream>::default();
        let slots: Vec<u16> = (0..4).map(|_| places.insert(peers().0).0).collect();
        places.promote(slots[1], peers().0);
        for expected in [slots[0], slots[2], slots[3], slots[0]] {
            assert_eq!(places.oldest_handshake(|_| true), Some(expected));
            places.remove(expected);
            assert_eq!(places.insert(peers().0).0, expected);
        }
        assert_eq!(places.oldest_handshake(|_| false), None);
    }

    #[test]
    fn who_is_ended_hears_of_it_though_somebody_holds_the_socket() {
        let mut places = Places::<UnixStream, UnixStream>::default();
        for served in [false, true] {
            let (ours, mut theirs) = peers();
            let held = ours.try_clone().unwrap();
            let (slot, _) = places.insert(ours);
            if served {
                places.promote(slot, held.try_clone().unwrap());
            }
            assert_eq!(matches!(places.end(slot), Some(Place::Connection(_))), served);
            assert!(places.is_empty() && places.end(slot).is_none());
            theirs.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
            assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
            drop(held);
        }
    }

    /// More than one system call asks about, and some that nobody asks about.
    #[test]
    fn who_has_shut_its_side_is_seen_among_many() {
        let mut places = Places::<UnixStream, UnixStream>::default();
        let mut theirs = Vec::new();
        for _ in 0..3 * BATCH {
            let (ours, peer) = peers();
            let (slot, _) = places.insert(peers().0);
            places.promote(slot, ours);
            theirs.push((slot, peer));
        }
        let look = |places: &mut Places<UnixStream, UnixStream>, unwanted: i32| {
            let mut seen = Vec::new();
            places.look(|c| c.as_raw_fd() != unwanted, |_, slot, has_shut| seen.push((slot, has_shut)));
            seen
        };
        let gone = [0, BATCH - 1, BATCH, 2 * BATCH + 1];
        let unwanted = places.connection(theirs[1].0).unwrap().as_raw_fd();
        assert!(look(&mut places, unwanted).iter().all(|(_, has_shut)| !has_shut));
        for at in gone {
            let how = if at == 0 { Shutdown::Write } else { Shutdown::Both };
            shutdown(theirs[at].1.as_raw_fd(), how).unwrap();
        }
        let seen = look(&mut places, unwanted);
        assert_eq!(seen.len(), 3 * BATCH - 1);
        for (at, (slot, _)) in theirs.iter().enumerate().filter(|(at, _)| *at != 1) {
            assert!(seen.contains(&(*slot, gone.contains(&at))), "{at}");
        }
    }

    #[test]
    fn who_is_served_is_no_handshake_any_more_and_both_are_ended_at_the_end() {
        let mut places = Places::default();
        let ((early, mut one), (late, mut two)) = (peers(), peers());
        let (slot, _) = places.insert(peers().0);
        places.insert(early);
        places.promote(slot, late);
        assert_eq!((places.served(), places.handshakes(), places.len()), (&[slot][..], 1, 2));
        assert!(places.handshake(slot).is_none() && places.connection(slot).is_some());
        places.shut_all();
        for peer in [&mut one, &mut two] {
            assert_eq!(peer.read(&mut [0]).unwrap(), 0);
        }
        places.remove(slot);
        assert!(places.served().is_empty());
    }
}
