//! What clients were answered and is lost, until a flush has told them (`docs/decisions/0019-a-flush-tells-of-a-loss.md`).
//!
//! ```text
//!   nothing --lose--> untold --the first flush--> being told: flushes fail --a minute--> told
//!      ^                ^                              |                                  |
//!      |                +------------lose--------------+----------------------------------+
//!      +----------------------all have closed the device----------------------------------+
//! ```
//!
//! The conductor loses, queues tell. What an engine before has lost concerns those of its clients that are here.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Flushes fail for this long, ns, from the first one that tells of a loss: whoever asks first need not be who has to know. File
/// systems force their logs at least every 5 s (ext4, `commit=`) to 30 s (XFS, `xfssyncd_centisecs`; Btrfs, `commit=`).
pub const TOLD_FOR: u64 = 60_000_000_000;

/// [`Loss::told_until`]: clients have lost something, and none has asked for a flush since.
const UNTOLD: u64 = u64::MAX;

/// [`Loss::told_until`]: all is told.
const TOLD: u64 = 1;

/// [`Loss::before`]: what an engine before had answered may be lost.
const LOST_BEFORE: u8 = 1;

/// [`Loss::before`]: its clients are this one's.
const CLIENTS_STAYED: u8 = 2;

/// Shared by the conductor, the queues, and whoever shows the device.
#[derive(Debug, Default)]
pub struct Loss {
    /// Until when flushes fail, ns on the queues' clock; 0 before any loss, [`UNTOLD`] from one to the first of them, [`TOLD`] at
    /// last.
    told_until: AtomicU64,
    /// [`LOST_BEFORE`] and [`CLIENTS_STAYED`], once they are known.
    before: AtomicU8,
}

impl Loss {
    /// What clients of this engine were answered and no flush covers is lost, or may be. Before any flush that was asked for since
    /// can end.
    pub fn lose(&self) {
        self.told_until.store(UNTOLD, Ordering::Release);
    }

    /// The same of clients of engines before this one, if they are here.
    pub fn lose_from_before(&self) {
        self.note(LOST_BEFORE);
    }

    /// The device that an engine before has left is shown by this one: whoever had it open then has it still. Before any of its
    /// requests is taken.
    pub fn clients_have_stayed(&self) {
        self.note(CLIENTS_STAYED);
    }

    fn note(&self, what: u8) {
        let known = self.before.fetch_or(what, Ordering::AcqRel) | what;
        if known == LOST_BEFORE | CLIENTS_STAYED {
            self.lose();
        }
    }

    /// Something has been lost, and whoever has to know, or knows, has the device open.
    pub fn concerns_anybody(&self) -> bool {
        self.told_until.load(Ordering::Acquire) != 0
    }

    /// Flushes fail, if there are any.
    pub fn is_being_told(&self) -> bool {
        !matches!(self.told_until.load(Ordering::Acquire), 0 | TOLD | UNTOLD)
    }

    /// Nobody has the device open: who does so from now on was promised nothing. What no flush has told of stays untold.
    pub fn all_have_closed(&self) {
        let until = self.told_until.load(Ordering::Acquire);
        if until != UNTOLD {
            let _ = self.told_until.compare_exchange(until, 0, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    /// No flush has told any client yet.
    pub fn is_untold(&self) -> bool {
        self.told_until.load(Ordering::Acquire) == UNTOLD
    }

    /// True if a client's flush that ends now has to fail: something that it promises may be lost. Whoever asks this answers so.
    pub fn fails_flush(&self, now: u64) -> bool {
        let mut until = self.told_until.load(Ordering::Acquire);
        if until == UNTOLD {
            until = now.saturating_add(TOLD_FOR).min(UNTOLD - 1);
            // Whoever was faster has put down much the same; a loss that has come since is told by the next flush.
            let _ = self.told_until.compare_exchange(UNTOLD, until, Ordering::AcqRel, Ordering::Acquire);
        } else if until > TOLD && now >= until {
            let _ = self.told_until.compare_exchange(until, TOLD, Ordering::AcqRel, Ordering::Acquire);
        }
        now < until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_told_by_the_next_flush_and_those_of_a_minute() {
        let loss = Loss::default();
        assert!(!loss.fails_flush(7) && !loss.concerns_anybody());
        loss.lose();
        assert!(loss.concerns_anybody());
        for now in [1_000, 1_001, 999 + TOLD_FOR] {
            assert!(loss.fails_flush(now), "{now}");
        }
        assert!(!loss.fails_flush(1_000 + TOLD_FOR) && loss.concerns_anybody());
        loss.all_have_closed();
        assert!(!loss.concerns_anybody());
        loss.lose();
        assert!(loss.fails_flush(2 * TOLD_FOR), "another one is told, too");
    }

    #[test]
    fn who_opens_the_device_after_all_have_closed_it_is_told_nothing() {
        let loss = Loss::default();
        loss.lose();
        loss.all_have_closed();
        assert!(loss.is_untold() && !loss.is_being_told(), "who wrote it may come back to flush it");
        assert!(loss.fails_flush(100) && loss.is_being_told());
        loss.all_have_closed();
        assert!(!loss.fails_flush(101) && !loss.is_being_told() && !loss.concerns_anybody());
        loss.lose();
        assert!(loss.fails_flush(102), "another one is told, too");
    }

    #[test]
    fn what_was_lost_before_concerns_clients_that_stayed() {
        let loss = Loss::default();
        loss.lose_from_before();
        assert!(!loss.fails_flush(0), "whoever comes now was promised nothing");
        loss.clients_have_stayed();
        assert!(loss.fails_flush(0));

        let loss = Loss::default();
        loss.clients_have_stayed();
        assert!(!loss.fails_flush(0));
        loss.lose_from_before();
        assert!(loss.fails_flush(0), "found out later, while chunks were made equal");
    }
}
