//! The memory that requests of all connections may take together.
//!
//! - The bytes of a write are counted from before they are received until the device is done with them, those of a
//!   read from before it is submitted until they are sent. So no connection begins to receive a payload that there is no
//!   room for, and no two connections wait for each other with half a payload each.
//! - Whoever is refused first is served first: while it waits, nobody else gets anything.
//! - One request always passes, whatever its size.

/// Who waits: a connection's slot and serial number.
pub(crate) type Claimant = (u16, u32);

/// Counts bytes of payloads in flight.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    used: usize,
    first: Option<Claimant>,
}

impl Budget {
    pub(crate) const fn new(limit: usize) -> Self {
        Self { limit, used: 0, first: None }
    }

    /// Bytes taken.
    pub(crate) const fn used(&self) -> usize {
        self.used
    }

    /// Takes `bytes`; false, and nothing taken, if the claimant has to wait.
    pub(crate) fn take(&mut self, claimant: Claimant, bytes: usize) -> bool {
        if bytes == 0 {
            return true;
        }
        let its_turn = self.first.is_none_or(|first| first == claimant);
        let fits = self.used == 0 || self.used + bytes <= self.limit;
        if its_turn && fits {
            self.first = None;
            self.used += bytes;
            return true;
        }
        self.first.get_or_insert(claimant);
        false
    }

    /// Gives `bytes` back.
    pub(crate) fn give_back(&mut self, bytes: usize) {
        debug_assert!(bytes <= self.used);
        self.used = self.used.saturating_sub(bytes);
    }

    /// The claimant is gone, and waits no more.
    pub(crate) fn forget(&mut self, claimant: Claimant) {
        if self.first == Some(claimant) {
            self.first = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Claimant = (1, 1);
    const B: Claimant = (2, 1);

    #[test]
    fn bounded_but_one_always_passes() {
        let mut budget = Budget::new(100);
        assert!(budget.take(A, 1000));
        assert!(!budget.take(B, 1));
        budget.give_back(1000);
        assert!(budget.take(B, 60));
        assert!(!budget.take(A, 60));
        assert_eq!(budget.used(), 60);
    }

    #[test]
    fn who_waits_first_is_served_first() {
        let mut budget = Budget::new(100);
        assert!(budget.take(A, 90));
        assert!(!budget.take(B, 50));
        // Would fit, but B is first.
        assert!(!budget.take(A, 10));
        budget.give_back(90);
        assert!(!budget.take(A, 10));
        assert!(budget.take(B, 50));
        assert!(budget.take(A, 10));
    }

    #[test]
    fn a_waiter_that_leaves_blocks_nobody() {
        let mut budget = Budget::new(100);
        assert!(budget.take(A, 90));
        assert!(!budget.take(B, 50));
        budget.forget(A);
        assert!(!budget.take(A, 10));
        budget.forget(B);
        assert!(budget.take(A, 10));
    }
}
