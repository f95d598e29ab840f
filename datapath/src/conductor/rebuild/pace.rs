//! How fast rebuilds and scrubs go: a token bucket for the limit that people set, and restraint while clients are active.

/// Clients count as active for so long after they were seen last, ns.
const ACTIVE_FOR: u64 = 200_000_000;

/// While clients are active one copy at a time is made, of at most so many bytes: a disk that writes 500 MB/s is done with
/// it in half a millisecond.
pub(in crate::conductor) const BUSY_PIECE: u64 = 256 << 10;

/// And after it as long a rest as it took, at most this, ns: a disk that hangs must not stop a rebuild for good.
pub(in crate::conductor) const REST_MAX: u64 = 100_000_000;

/// What may be copied in one go after a rest, as a part of a second's worth.
const BURST: u64 = 10;

/// A second, ns.
const SECOND: u64 = 1_000_000_000;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(in crate::conductor) struct Pace {
    /// As last seen.
    activity: u64,
    active_until: u64,
    /// The bucket is as full as it was when this time is reached: what is copied moves it on.
    paid_until: u64,
    free_at: u64,
}

impl Pace {
    /// Looks at whether clients are active: `activity` changes when they are.
    pub(in crate::conductor) const fn see(&mut self, now: u64, activity: u64) {
        if activity != self.activity {
            self.activity = activity;
            self.active_until = now.saturating_add(ACTIVE_FOR);
        }
    }

    /// Clients were active lately, when last looked at.
    pub(in crate::conductor) const fn is_busy(&self, now: u64) -> bool {
        now < self.active_until
    }

    /// The bucket gets what time has brought at `rate` bytes a second; 0: any rate.
    pub(in crate::conductor) fn refill(&mut self, now: u64, rate: u64) {
        self.paid_until = self.paid_until.max(now.saturating_sub(SECOND / BURST));
        self.free_at = if rate == 0 { 0 } else { self.paid_until };
    }

    /// Another copy may begin.
    pub(in crate::conductor) const fn is_free(&self, now: u64) -> bool {
        self.free_at <= now
    }

    /// So many bytes are copied.
    pub(in crate::conductor) fn spend(&mut self, bytes: u64, rate: u64) {
        if rate > 0 {
            let time = u128::from(bytes) * u128::from(SECOND) / u128::from(rate);
            self.paid_until = self.paid_until.saturating_add(u64::try_from(time).unwrap_or(u64::MAX));
        }
    }

    /// When the bucket lets the next copy through, as it was refilled last.
    pub(in crate::conductor) const fn free_at(&self) -> u64 {
        self.free_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_holds_over_time() {
        let (mut pace, mut copied, rate) = (Pace::default(), 0, 10 << 20);
        for ms in 0..10_000 {
            let now = SECOND + ms * 1_000_000;
            pace.refill(now, rate);
            while pace.is_free(now) {
                pace.spend(1 << 20, rate);
                pace.refill(now, rate);
                copied += 1 << 20;
            }
        }
        let allowed = 10 * rate + rate / BURST + (1 << 20);
        assert!(copied <= allowed && copied >= 10 * rate - (1 << 20), "{copied}");
        pace.refill(20 * SECOND, 0);
        assert!(pace.is_free(20 * SECOND), "without a limit there is none");
    }

    #[test]
    fn clients_are_busy_for_a_while() {
        let mut pace = Pace::default();
        let mut is_busy = |now, activity| {
            pace.see(now, activity);
            pace.is_busy(now)
        };
        assert!(!is_busy(1, 0));
        assert!(is_busy(2, 1) && is_busy(1 + ACTIVE_FOR, 1));
        assert!(!is_busy(2 + ACTIVE_FOR, 1));
    }
}
