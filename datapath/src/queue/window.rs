//! The write window: how far writes may run beyond the oldest one that is not complete on every member
//! (`docs/invariants.md`, 4).
//!
//! A replica remembers the last [`WRITE_WINDOW`] writes of a connection as possibly unfinished elsewhere. Whatever
//! some member may lack is among them only as long as no more writes than that are sent beyond it. A new engine has
//! to make equal what they cover, so their bytes are bounded, too.

use std::collections::VecDeque;

use lh_wire::{WRITE_WINDOW, WRITE_WINDOW_BYTES};

/// Places that only repetitions take (a member whose disk was full is sent the write again).
const RESERVE: usize = 16;

/// Places in the window, and who waits for one.
#[derive(Debug)]
pub(super) struct Window {
    /// Length and completeness of each write since the oldest incomplete one, in the order in which they were sent.
    sent: VecDeque<(u64, bool)>,
    /// The place of the first in `sent`.
    first: u64,
    /// Sum of the lengths in `sent`.
    bytes: u64,
    /// Slots that wait, first come first served.
    waiters: VecDeque<u16>,
}

impl Window {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            sent: VecDeque::with_capacity(WRITE_WINDOW),
            first: 0,
            bytes: 0,
            waiters: VecDeque::with_capacity(slots),
        }
    }

    /// True if a write of this length may be sent now, apart from those that wait already.
    pub(super) fn has_room(&self, len: u64) -> bool {
        self.sent.len() < WRITE_WINDOW - RESERVE && self.bytes + len <= WRITE_WINDOW_BYTES
    }

    /// Takes a place; give it to [`Window::complete`].
    pub(super) fn take(&mut self, len: u64) -> u64 {
        self.sent.push_back((len, false));
        self.bytes += len;
        self.first + self.sent.len() as u64 - 1
    }

    /// Takes a place for sending a write again that holds one already; false if there is none.
    pub(super) fn repeat(&mut self) -> bool {
        if !self.can_repeat() {
            return false;
        }
        self.sent.push_back((0, true));
        true
    }

    /// The write in this place is complete on every member.
    pub(super) fn complete(&mut self, place: u64) {
        let at = usize::try_from(place - self.first).unwrap_or(usize::MAX);
        self.sent[at].1 = true;
        while let Some(&(len, true)) = self.sent.front() {
            self.sent.pop_front();
            self.first += 1;
            self.bytes -= len;
        }
    }

    /// The place of the oldest write that is not complete everywhere, if there is one.
    pub(super) const fn oldest(&self) -> u64 {
        self.first
    }

    /// True if a write may be sent again.
    pub(super) fn can_repeat(&self) -> bool {
        self.sent.len() < WRITE_WINDOW
    }

    /// True if nobody waits.
    pub(super) fn is_free(&self) -> bool {
        self.waiters.is_empty()
    }

    pub(super) fn wait(&mut self, slot: u16) {
        self.waiters.push_back(slot);
    }

    /// The slot that has waited longest.
    pub(super) fn first_waiter(&self) -> Option<u16> {
        self.waiters.front().copied()
    }

    /// A slot waits no longer.
    pub(super) fn stop_waiting(&mut self, slot: u16) {
        self.waiters.retain(|s| *s != slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_from_the_oldest_incomplete_write() {
        let mut w = Window::new(8);
        let oldest = w.take(4096);
        let mut sent = 1;
        while w.has_room(4096) {
            let place = w.take(4096);
            w.complete(place);
            sent += 1;
        }
        assert_eq!(sent, WRITE_WINDOW - RESERVE, "complete ones count while an older one is not");
        w.complete(oldest);
        assert!(w.has_room(4096) && w.sent.is_empty() && w.bytes == 0);
    }

    #[test]
    fn counts_bytes() {
        let mut w = Window::new(8);
        for _ in 0..16 {
            assert!(w.has_room(1 << 20));
            w.take(1 << 20);
        }
        assert!(!w.has_room(4096));
        w.complete(0);
        assert!(w.has_room(1 << 20));
    }

    #[test]
    fn repetitions_have_a_reserve_and_an_end() {
        let mut w = Window::new(8);
        while w.has_room(0) {
            w.take(0);
        }
        let mut repeated = 0;
        while w.repeat() {
            repeated += 1;
        }
        assert_eq!(repeated, RESERVE);
    }
}
