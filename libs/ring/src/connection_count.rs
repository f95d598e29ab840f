//! How many connections the servers of a volume have, all queues and protocols together, and how many there were.
//!
//! A client that gives up on a connection sends its writes again on another one, and what is left of them in the first must
//! not be done after that (`docs/invariants.md`, 3). While there has been no other since its client was last seen there, nothing can
//! have been sent again, and a server need not ask. That there is no other is not enough: one may have come, done what was sent
//! again, and gone. Where a client may go on at something that nobody here can count, it is never alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The connections of all servers of a volume: those of NBD, and sessions of iSCSI. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct ConnectionCount {
    counts: Arc<Counts>,
    /// The clients of who has this may be served elsewhere, too.
    beside_uncounted: bool,
}

#[derive(Debug, Default)]
struct Counts {
    now: AtomicUsize,
    ever: AtomicU64,
}

/// One connection, counted for as long as this lives.
#[derive(Debug)]
pub struct Counted {
    counts: Arc<Counts>,
    /// How many there had been when its client was last known to be there, itself included.
    seen: u64,
}

/// What the count was at a moment.
#[derive(Clone, Copy, Debug)]
pub struct Census {
    single: bool,
    ever: u64,
}

impl ConnectionCount {
    /// The same count, for a server whose clients may also be served where nobody counts: by another process, or through a device of
    /// the kernel. By it nobody is ever alone.
    #[must_use]
    pub fn beside_uncounted(&self) -> Self {
        Self { counts: Arc::clone(&self.counts), beside_uncounted: true }
    }

    /// Counts one more. To be called before a byte of the connection is read, of a session before its client is told that it has begun.
    #[must_use]
    pub fn add(&self) -> Counted {
        self.counts.now.fetch_add(1, Ordering::SeqCst);
        let before = self.counts.ever.fetch_add(1, Ordering::SeqCst);
        Counted { counts: Arc::clone(&self.counts), seen: before + 1 }
    }

    /// How many there are.
    #[must_use]
    pub fn now(&self) -> usize {
        self.counts.now.load(Ordering::SeqCst)
    }

    /// The count as it is now.
    #[must_use]
    pub fn census(&self) -> Census {
        // In this order, since one that comes is counted the other way round: one that has come and gone is among those that there were.
        let single = self.now() <= 1 && !self.beside_uncounted;
        Census { single, ever: self.counts.ever.load(Ordering::SeqCst) }
    }
}

impl Census {
    /// True if somebody has come since that one was taken, whether still there or not.
    #[must_use]
    pub const fn has_more_than(self, earlier: Self) -> bool {
        self.ever != earlier.ever
    }
}

impl Counted {
    /// True if its client can have sent nothing again elsewhere, by a count that was taken after its requests had come.
    #[must_use]
    pub const fn is_alone(&self, census: Census) -> bool {
        census.single && census.ever == self.seen
    }

    /// Its client was there after that count was taken.
    pub const fn seen(&mut self, census: Census) {
        self.seen = census.ever;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.counts.now.fetch_sub(1, Ordering::SeqCst);
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

    #[test]
    fn beside_what_nobody_counts_nobody_is_alone() {
        let count = ConnectionCount::default();
        let mut beside = count.beside_uncounted().add();
        let census = count.beside_uncounted().census();
        beside.seen(census);
        assert!(!beside.is_alone(census));
        assert!(beside.is_alone(count.census()), "they are counted together");
    }
}
