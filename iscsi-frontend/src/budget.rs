//! The memory that reads, and writes that were asked for, may take together.
//!
//! The bytes of a read are counted from before it is submitted until they are sent, those of a write from before they
//! are asked for until the device is done with them. One command always passes, whatever its size.

/// Counts bytes of payloads.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    used: usize,
}

impl Budget {
    pub(crate) const fn new(limit: usize) -> Self {
        Self { limit, used: 0 }
    }

    /// Bytes taken.
    pub(crate) const fn used(&self) -> usize {
        self.used
    }

    /// Takes `bytes`; false, and nothing taken, if there is no room now.
    pub(crate) const fn take(&mut self, bytes: usize) -> bool {
        let fits = self.used == 0 || self.used + bytes <= self.limit;
        if fits {
            self.used += bytes;
        }
        fits
    }

    /// Gives `bytes` back.
    pub(crate) fn give_back(&mut self, bytes: usize) {
        debug_assert!(bytes <= self.used);
        self.used = self.used.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_but_one_always_passes() {
        let mut budget = Budget::new(100);
        assert!(budget.take(1000) && !budget.take(1));
        budget.give_back(1000);
        assert!(budget.take(60) && !budget.take(60));
        assert_eq!(budget.used(), 60);
    }
}
