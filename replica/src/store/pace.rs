//! How fast a task in the background goes, and when it stops.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What the one who started a task keeps in hand.
#[derive(Debug, Default)]
pub struct Pace {
    /// Bytes per second; 0: as fast as it goes.
    limit: u64,
    stopped: Mutex<bool>,
    changed: Condvar,
}

/// The task was stopped before it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopped;

impl Pace {
    /// A pace of so many bytes per second; 0: as fast as it goes.
    pub fn new(bytes_per_second: u64) -> Self {
        Self { limit: bytes_per_second, ..Self::default() }
    }

    /// Stops the task at its next step: at once if it waits, else within one read of 1 MiB.
    pub fn stop(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.stopped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A step of so many bytes was begun at `begun` and is done: waits for what is left of its time.
    pub(super) fn step(&self, bytes: u64, begun: Instant) -> Result<(), Stopped> {
        let mut stopped = self.lock();
        loop {
            if *stopped {
                return Err(Stopped);
            }
            let rest = rest(bytes, self.limit, begun.elapsed());
            if rest.is_zero() {
                return Ok(());
            }
            let waited = self.changed.wait_timeout(stopped, rest);
            stopped = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// How long to wait after a step that took `spent`.
fn rest(bytes: u64, limit: u64, spent: Duration) -> Duration {
    if limit == 0 {
        return Duration::ZERO;
    }
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(limit);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).saturating_sub(spent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_time_of_its_bytes() {
        let second = Duration::from_secs(1);
        assert_eq!(rest(1 << 20, 1 << 20, Duration::ZERO), second);
        assert_eq!(rest(1 << 20, 4 << 20, Duration::from_millis(50)), Duration::from_millis(200));
        assert_eq!(rest(1 << 20, 1 << 20, 2 * second), Duration::ZERO);
        assert_eq!(rest(u64::MAX, 0, Duration::ZERO), Duration::ZERO);
        assert!(rest(u64::MAX, 1, Duration::ZERO) > second);
    }

    /// Would wait for centuries.
    #[test]
    fn a_stop_wakes_a_waiter() {
        let pace = std::sync::Arc::new(Pace::new(1));
        let waits = pace.clone();
        let waiter = std::thread::spawn(move || waits.step(1 << 60, Instant::now()));
        pace.stop();
        assert_eq!(waiter.join().unwrap(), Err(Stopped));
        assert_eq!(pace.step(0, Instant::now()), Err(Stopped));
    }
}
