//! Time in seconds, and the timer that makes it pass: every second while somebody is waited for, now and then while
//! there is only somebody to be pinged, never while there is nobody.
//!
//! A timer that is seen much too late says that this thread stood still, and heard nobody meanwhile: that is no silence of
//! the initiators, and does not count.

use std::time::{Duration, Instant};

/// Between two looks while somebody is waited for.
const SHORT: Duration = Duration::from_secs(1);

/// Between two looks while initiators are idle: they are pinged after half a minute.
const LONG: Duration = Duration::from_secs(15);

/// What is waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Want {
    #[default]
    Nothing,
    Pings,
    Seconds,
}

impl Want {
    /// Until the next look.
    const fn timer(self) -> Duration {
        match self {
            Self::Seconds => SHORT,
            Self::Pings => LONG,
            Self::Nothing => Duration::MAX,
        }
    }
}

/// Counts seconds.
#[derive(Debug)]
pub(super) struct Clock {
    start: Instant,
    /// Seconds since then when the time was read last.
    read: u32,
    now: u32,
    want: Want,
    /// The timer that runs, and its number: an older one that runs out is nobody's.
    armed: Want,
    number: u32,
    ending: Option<u32>,
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            read: 0,
            now: 0,
            want: Want::Nothing,
            armed: Want::Nothing,
            number: 0,
            ending: None,
        }
    }
}

impl Clock {
    /// A turn begins, or somebody comes.
    pub(super) fn read(&mut self) {
        let seconds = u32::try_from(self.start.elapsed().as_secs()).unwrap_or(u32::MAX);
        let most = u32::try_from(self.armed.timer().saturating_mul(2).as_secs()).unwrap_or(u32::MAX);
        let passed = seconds - std::mem::replace(&mut self.read, seconds);
        self.now = self.now.saturating_add(passed.min(most));
    }

    pub(super) const fn now(&self) -> u32 {
        self.now
    }

    /// Seconds since then.
    pub(super) const fn since(&self, then: u32) -> u32 {
        self.now.saturating_sub(then)
    }

    /// Seconds since the server began to stop.
    pub(super) fn since_ending(&self) -> Option<u32> {
        self.ending.map(|then| self.since(then))
    }

    pub(super) const fn begin_ending(&mut self) {
        self.ending = Some(self.now);
    }

    /// Time has to pass.
    pub(super) fn want(&mut self, want: Want) {
        self.want = self.want.max(want);
    }

    /// The timer that is to be started now, if one is: its number and how long.
    pub(super) fn arm(&mut self) -> Option<(u32, Duration)> {
        let want = std::mem::take(&mut self.want);
        if want <= self.armed {
            return None;
        }
        self.armed = want;
        self.number = self.number.wrapping_add(1);
        Some((self.number, want.timer()))
    }

    /// A timer has run out; true if it is the one that was waited for.
    pub(super) fn tick(&mut self, number: u32) -> bool {
        let current = number == self.number;
        if current {
            self.read();
            self.armed = Want::Nothing;
        }
        current
    }

    /// So many seconds pass.
    #[cfg(test)]
    pub(super) fn pass(&mut self, seconds: u64) {
        self.start -= Duration::from_secs(seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_timer_at_a_time_and_none_unasked_for() {
        let mut clock = Clock::default();
        assert_eq!(clock.arm(), None);
        clock.want(Want::Pings);
        assert_eq!(clock.arm(), Some((1, LONG)));
        clock.want(Want::Pings);
        assert_eq!(clock.arm(), None);
        // Somebody is waited for: the long timer does not count any more.
        clock.want(Want::Seconds);
        clock.want(Want::Pings);
        assert_eq!(clock.arm(), Some((2, SHORT)));
        assert!(!clock.tick(1));
        assert!(clock.tick(2));
        clock.want(Want::Seconds);
        assert_eq!(clock.arm(), Some((3, SHORT)));
    }

    #[test]
    fn time_in_which_nobody_was_heard_is_not_counted() {
        let mut clock = Clock::default();
        for (want, passes, counts) in [
            (Want::Seconds, 1, 1),
            (Want::Seconds, 2, 2),
            (Want::Seconds, 1000, 2),
            (Want::Pings, 15, 15),
            (Want::Pings, 1000, 30),
            // While there was nobody, nobody could be silent.
            (Want::Nothing, 1000, 1000),
        ] {
            let before = clock.now();
            clock.want(want);
            clock.arm();
            clock.pass(passes);
            clock.tick(clock.number);
            assert_eq!(clock.since(before), counts, "{want:?}, {passes} s");
        }
    }
}
