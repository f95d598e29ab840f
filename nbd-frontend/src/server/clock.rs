//! Time in ticks, counted only while somebody is waited for.

use std::time::Duration;

/// Length of a tick.
pub(super) const TICK: Duration = Duration::from_secs(1);

/// Ticks that a stopping server leaves a handshake to hear that it is stopping.
pub(super) const STOP_PATIENCE: u32 = 2;

/// Ticks that a stopping server leaves a client to take its answers.
pub(super) const STOP_ANSWERS: u32 = 5;

/// Counts ticks. Between two of them no time passes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Clock {
    now: u32,
    wanted: bool,
    armed: bool,
    ending: Option<u32>,
}

impl Clock {
    pub(super) const fn now(&self) -> u32 {
        self.now
    }

    /// Ticks since then.
    pub(super) const fn since(&self, then: u32) -> u32 {
        self.now.wrapping_sub(then)
    }

    /// Ticks since the server began to stop; 0 if it does not.
    pub(super) fn since_ending(&self) -> u32 {
        self.ending.map_or(0, |then| self.since(then))
    }

    pub(super) const fn begin_ending(&mut self) {
        self.ending = Some(self.now);
    }

    /// Somebody is waited for: time has to pass.
    pub(super) const fn want(&mut self) {
        self.wanted = true;
    }

    /// True if a timer is to be started now.
    pub(super) const fn is_to_be_armed(&mut self) -> bool {
        let start = self.wanted && !self.armed;
        self.armed |= start;
        self.wanted = false;
        start
    }

    /// The timer has run out.
    pub(super) const fn tick(&mut self) {
        self.now = self.now.wrapping_add(1);
        self.armed = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_timer_at_a_time_and_none_unasked_for() {
        let mut clock = Clock::default();
        assert!(!clock.is_to_be_armed());
        clock.want();
        assert!(clock.is_to_be_armed());
        clock.want();
        assert!(!clock.is_to_be_armed());
        clock.tick();
        assert!(!clock.is_to_be_armed());
        clock.want();
        assert!(clock.is_to_be_armed());
    }

    #[test]
    fn time_since_is_counted_over_the_end_of_the_numbers() {
        let mut clock = Clock { now: u32::MAX, ..Clock::default() };
        clock.begin_ending();
        clock.tick();
        clock.tick();
        assert_eq!((clock.since(u32::MAX), clock.since_ending()), (2, 2));
        assert_eq!(Clock::default().since_ending(), 0);
    }
}
