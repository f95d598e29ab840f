//! The time that passes on every host alike (clock_gettime(2)).

use std::time::Duration;

/// Time since the host was started. Hours in which it was suspended count, as they do everywhere else; for [`std::time::Instant`],
/// which is CLOCK_MONOTONIC, they do not. So what holds between hosts for some time is to be measured by this. No system call: the
/// vDSO answers.
///
/// # Panics
/// Never: Linux has had this clock since 2.6.39.
pub fn since_boot() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec, which `time` is.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    assert_eq!(result, 0, "CLOCK_BOOTTIME");
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use lh_rig::{SUSPENDED, on_a_host_that_was_suspended};

    use super::*;

    #[test]
    fn time_in_which_the_host_was_suspended_counts() {
        on_a_host_that_was_suspended(|| assert!(since_boot() >= SUSPENDED));
    }

    #[test]
    fn it_goes_on() {
        let before = since_boot();
        thread::sleep(Duration::from_millis(5));
        let passed = since_boot() - before;
        assert!(passed >= Duration::from_millis(5) && passed < Duration::from_secs(60), "{passed:?}");
    }
}
