//! How many connections the servers of a volume have, all queues together.
//!
//! A client that gives up on a connection sends its writes again on another one, and what is left of them in the first must
//! not be done after that (`docs/invariants.md`, 3). Where a server has to ask whether a client is still there, and where
//! there is no other connection by which anything could have been sent again, is told by this number.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The connections of all servers of a volume.
#[derive(Clone, Debug, Default)]
pub struct Company(Arc<AtomicUsize>);

/// One connection, counted for as long as this lives.
#[derive(Debug)]
pub struct Guest(Company);

impl Company {
    /// Counts one more. To be called before a byte of the connection is read.
    #[must_use]
    pub fn join(&self) -> Guest {
        self.0.fetch_add(1, Ordering::SeqCst);
        Guest(self.clone())
    }

    /// True if there is not more than one.
    pub(crate) fn is_single(&self) -> bool {
        self.0.load(Ordering::SeqCst) <= 1
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}
