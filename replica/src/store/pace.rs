//! How fast a task in the background goes, and when it stops.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What the one who started a task keeps in hand: a limit that may change while the task runs, and a stop.
#[derive(Debug, Default)]
pub struct Pace {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Bytes per second; 0: as fast as it goes.
    limit: u64,
    stopped: bool,
}

/// The task was stopped before it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopped;

impl Pace {
    /// A pace of so many bytes per second; 0: as fast as it goes.
    pub fn new(bytes_per_second: u64) -> Self {
        Self { state: Mutex::new(State { limit: bytes_per_second, stopped: false }), changed: Condvar::new() }
    }

    /// Changes the limit, also for what is waiting just now.
    pub fn set_limit(&self, bytes_per_second: u64) {
        self.lock().limit = bytes_per_second;
        self.changed.notify_all();
    }

    /// Stops the task at its next step: at once if it waits, else within one read of 1 MiB.
    pub fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A step of so many bytes was begun at `begun` and is done: waits for what is left of its time.
    pub(super) fn step(&self, bytes: u64, begun: Instant) -> Result<(), Stopped> {
        let mut state = self.lock();
        loop {
            if state.stopped {
                return Err(Stopped);
            }
            let rest = rest(bytes, state.limit, begun.elapsed());
            if rest.is_zero() {
                return Ok(());
            }
            let waited = self.changed.wait_timeout(state, rest);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
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
    fn a_stop_and_a_new_limit_wake_a_waiter() {
        let pace = std::sync::Arc::new(Pace::new(1));
        let waiter =
            |pace: std::sync::Arc<Pace>| std::thread::spawn(move || pace.step(1 << 60, Instant::now()));
        let first = waiter(pace.clone());
        pace.set_limit(0);
        assert_eq!(first.join().unwrap(), Ok(()));
        pace.set_limit(1);
        let second = waiter(pace.clone());
        pace.stop();
        assert_eq!(second.join().unwrap(), Err(Stopped));
        assert_eq!(pace.step(0, Instant::now()), Err(Stopped));
    }
}
