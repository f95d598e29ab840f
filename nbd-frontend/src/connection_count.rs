//! How many connections the servers of a volume have, all queues together, and how many there were.
//!
//! A client that gives up on a connection sends its writes again on another one, and what is left of them in the first must
//! not be done after that (`docs/invariants.md`, 3). While there has been no other since its client was last seen there, nothing can
//! have been sent again, and a server need not ask. That there is no other is not enough: one may have come, done what was sent
//! again, and gone. A connection that other processes may have is counted by whoever cannot exclude it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The connections of all servers of a volume.
#[derive(Clone, Debug, Default)]
pub struct ConnectionCount(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    now: AtomicUsize,
    ever: AtomicU64,
}

/// One connection, counted for as long as this lives.
#[derive(Debug)]
pub struct Counted {
    count: ConnectionCount,
    /// How many there had been when its client was last known to be there, itself included.
    seen: u64,
}

/// What the count was at a moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Census {
    single: bool,
    ever: u64,
}

impl ConnectionCount {
    /// Counts one more. To be called before a byte of the connection is read.
    #[must_use]
    pub fn add(&self) -> Counted {
        self.0.now.fetch_add(1, Ordering::SeqCst);
        let before = self.0.ever.fetch_add(1, Ordering::SeqCst);
        Counted { count: self.clone(), seen: before + 1 }
    }

    /// How many there are.
    #[must_use]
    pub fn now(&self) -> usize {
        self.0.now.load(Ordering::SeqCst)
    }

    /// The count as it is now.
    pub(crate) fn census(&self) -> Census {
        // In this order, since one that comes is counted the other way round: one that has come and gone is among those that there were.
        let single = self.0.now.load(Ordering::SeqCst) <= 1;
        Census { single, ever: self.0.ever.load(Ordering::SeqCst) }
    }
}

impl Counted {
    /// True if its client can have sent nothing again elsewhere, by a count that was taken after its requests had come.
    pub(crate) const fn is_alone(&self, census: Census) -> bool {
        census.single && census.ever == self.seen
    }

    /// Its client was there after that count was taken.
    pub(crate) const fn seen(&mut self, census: Census) {
        self.seen = census.ever;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.count.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_had_company_is_alone_again_once_it_was_seen() {
        let count = ConnectionCount::default();
        let mut first = count.add();
        assert!(first.is_alone(count.census()));
        let second = count.add();
        assert!(!first.is_alone(count.census()) && !second.is_alone(count.census()));
        drop(second);
        let census = count.census();
        assert!(!first.is_alone(census), "the second may have done again what the first has left");
        first.seen(census);
        assert!(first.is_alone(count.census()));
        let third = count.add();
        drop(first);
        assert!(third.is_alone(count.census()), "whatever was before it is no concern of its own");
    }
}
