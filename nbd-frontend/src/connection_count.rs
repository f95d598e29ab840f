//! How many connections the servers of a volume have, all queues together.
//!
//! A client that gives up on a connection sends its writes again on another one, and what is left of them in the first must
//! not be done after that (`docs/invariants.md`, 3). While there is only one, nothing can have been sent again, and a server need
//! not ask whether the client is still there. A connection that other processes may have is counted by whoever cannot exclude it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The connections of all servers of a volume.
#[derive(Clone, Debug, Default)]
pub struct ConnectionCount(Arc<AtomicUsize>);

/// One connection, counted for as long as this lives.
#[derive(Debug)]
pub struct Counted(ConnectionCount);

impl ConnectionCount {
    /// Counts one more. To be called before a byte of the connection is read.
    #[must_use]
    pub fn add(&self) -> Counted {
        self.0.fetch_add(1, Ordering::SeqCst);
        Counted(self.clone())
    }

    /// True if there is not more than one.
    pub(crate) fn is_single(&self) -> bool {
        self.0.load(Ordering::SeqCst) <= 1
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}
