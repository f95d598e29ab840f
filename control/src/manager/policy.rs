//! What happens after a process has ended, decided without doing anything.

use std::time::Duration;

use lh_block::Generation;

/// The exit status of a program that would fail in the same way if it were started again: a damaged directory, a wrong
/// key, a newer engine. It is not started again.
pub const EXIT_GIVES_UP: i32 = 3;

/// The exit status of a program that does not understand its arguments.
pub(super) const EXIT_USAGE: i32 = 2;

/// The first wait before a second start in a row; it doubles with each further one.
const BACK_OFF_FIRST: Duration = Duration::from_millis(100);

/// The longest wait between two starts.
const BACK_OFF_MAX: Duration = Duration::from_secs(5);

/// A process that has run for so long has not failed at its start: the next start is not delayed.
const STEADY: Duration = Duration::from_secs(10);

/// SIGKILL, which no process sends to itself.
const KILLED: i32 = nix::sys::signal::Signal::SIGKILL as i32;

/// A process that somebody killed after so long had not failed by itself: it is started again at once, however often
/// that happens. Pauses of I/O are as long as this decision makes them.
const WAS_WELL: Duration = Duration::from_millis(50);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    /// By itself, with this status.
    Status(i32),
    /// By a signal.
    Signal(i32),
    /// It was somebody else's child, or was never started: nobody told.
    Unknown,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(status) => write!(f, "exit status {status}"),
            Self::Signal(signal) => match nix::sys::signal::Signal::try_from(*signal) {
                Ok(signal) => write!(f, "killed by {signal}"),
                Err(_) => write!(f, "killed by signal {signal}"),
            },
            Self::Unknown => f.write_str("ended"),
        }
    }
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Start it again after this time.
    Restart(Duration),
    /// It did what it was asked and is done.
    Stopped,
    /// It failed for good.
    Failed,
}

/// Counts starts in a row that did not last.
#[derive(Debug, Default)]
pub(super) struct BackOff {
    failures: u32,
}

impl BackOff {
    /// What to do after a process that ran for `ran` ended so.
    pub(super) fn after(&mut self, exit: Exit, ran: Duration) -> Next {
        match exit {
            Exit::Status(0) => Next::Stopped,
            Exit::Status(EXIT_GIVES_UP | EXIT_USAGE) => Next::Failed,
            Exit::Signal(KILLED) if ran >= WAS_WELL => Next::Restart(Duration::ZERO),
            Exit::Status(_) | Exit::Signal(_) | Exit::Unknown => {
                if ran >= STEADY {
                    self.failures = 0;
                }
                let wait = self.wait();
                self.failures = self.failures.saturating_add(1);
                Next::Restart(wait)
            }
        }
    }

    fn wait(&self) -> Duration {
        match self.failures.checked_sub(1) {
            None => Duration::ZERO,
            Some(doublings) => BACK_OFF_FIRST
                .saturating_mul(1_u32.checked_shl(doublings).unwrap_or(u32::MAX))
                .min(BACK_OFF_MAX),
        }
    }
}

/// The arguments of the next start: the value of `--generation`, if there is one, counts one restart more
/// (`docs/invariants.md`, 2: every engine start has a higher generation). A value that is no generation stays.
pub(super) fn arguments_of_restart(args: &[String]) -> Vec<String> {
    with_generation(args, next_restart)
}

/// The arguments with another value of `--generation`.
fn with_generation(args: &[String], mut change: impl FnMut(&str) -> String) -> Vec<String> {
    const FLAG: &str = "--generation";
    let mut next = Vec::with_capacity(args.len());
    let mut value_follows = false;
    for arg in args {
        let attached = arg.strip_prefix(FLAG).and_then(|rest| rest.strip_prefix('='));
        next.push(match attached {
            _ if value_follows => change(arg),
            Some(value) => format!("{FLAG}={}", change(value)),
            None => arg.clone(),
        });
        value_follows = !value_follows && arg == FLAG;
    }
    next
}

/// The arguments of a process that takes the place of another: as they are asked for, but if both have a `--generation`,
/// not below the next one of the process before.
pub(super) fn arguments_of_replacement(before: &[String], asked: &[String]) -> Vec<String> {
    let Some(least) = generation(&arguments_of_restart(before)) else { return asked.to_vec() };
    match generation(asked) {
        Some(wanted) if wanted < least => with_generation(asked, |_| least.to_string()),
        _ => asked.to_vec(),
    }
}

/// The value of `--generation`.
pub(super) fn generation(args: &[String]) -> Option<u64> {
    let mut found = None;
    with_generation(args, |value| {
        found = value.parse().ok();
        value.to_owned()
    });
    found
}

fn next_restart(value: &str) -> String {
    match value.parse::<u64>().map(Generation::from) {
        Ok(generation) if generation.restart < u32::MAX => generation.next_restart().to_string(),
        _ => value.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_limit_and_begin_anew_after_a_steady_run() {
        let mut back_off = BackOff::default();
        let mut waits = Vec::new();
        for _ in 0..10 {
            let Next::Restart(wait) = back_off.after(Exit::Signal(6), Duration::from_secs(1)) else {
                panic!("not started again")
            };
            waits.push(wait.as_millis());
        }
        assert_eq!(waits, [0, 100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000]);
        // Killed while it was well, which says nothing of it; but not if it hardly began.
        assert_eq!(back_off.after(Exit::Signal(9), WAS_WELL), Next::Restart(Duration::ZERO));
        assert_eq!(back_off.after(Exit::Signal(9), Duration::ZERO), Next::Restart(BACK_OFF_MAX));
        assert_eq!(back_off.after(Exit::Signal(6), STEADY), Next::Restart(Duration::ZERO));
        assert_eq!(back_off.after(Exit::Unknown, Duration::ZERO), Next::Restart(BACK_OFF_FIRST));
        back_off.failures = u32::MAX;
        assert_eq!(back_off.after(Exit::Unknown, Duration::ZERO), Next::Restart(BACK_OFF_MAX));
    }

    #[test]
    fn who_ended_on_purpose_or_cannot_succeed_stays_ended() {
        let mut back_off = BackOff::default();
        let mut after = |status| back_off.after(Exit::Status(status), Duration::ZERO);
        assert_eq!(after(0), Next::Stopped);
        assert_eq!(after(EXIT_GIVES_UP), Next::Failed);
        assert_eq!(after(2), Next::Failed);
        assert_eq!(after(1), Next::Restart(Duration::ZERO));
        assert!(matches!(after(101), Next::Restart(_)), "a panic");
    }

    #[test]
    fn a_restart_has_the_next_generation() {
        let args = |list: &[&str]| list.iter().map(|a| (*a).to_owned()).collect::<Vec<_>>();
        let third = u64::from(Generation { attachment: 3, restart: 0 });
        assert_eq!(
            arguments_of_restart(&args(&["controller", "--generation", &third.to_string(), "demo"])),
            args(&["controller", "--generation", &(third + 1).to_string(), "demo"])
        );
        assert_eq!(arguments_of_restart(&args(&["--generation=7"])), args(&["--generation=8"]));
        for same in [&["replica", "--size", "5", "dir"][..], &["--generation"], &["--generation", "x"]] {
            assert_eq!(arguments_of_restart(&args(same)), args(same));
        }
        let last = u64::from(Generation { attachment: 3, restart: u32::MAX }).to_string();
        assert_eq!(arguments_of_restart(&args(&["--generation", &last])), args(&["--generation", &last]));
    }

    #[test]
    fn a_replacement_is_younger_than_what_it_replaces() {
        let args = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let before = args("controller --generation 4294967298 demo");
        let replaced = |asked: &str| arguments_of_replacement(&before, &args(asked)).join(" ");
        assert_eq!(
            replaced("controller --generation=4294967297 demo"),
            "controller --generation=4294967299 demo"
        );
        assert_eq!(
            replaced("controller --generation 8589934592 demo"),
            "controller --generation 8589934592 demo"
        );
        assert_eq!(replaced("controller demo"), "controller demo");
        let none = arguments_of_replacement(&args("replica /d"), &args("replica --generation 1 /d"));
        assert_eq!(none.join(" "), "replica --generation 1 /d");
    }
}
