//! Tests of how long somebody is waited for, on a host that may be too busy to keep to their times.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

/// So often such a test is begun.
const TRIES: u32 = 10;

/// Whether a test has kept to its times.
#[derive(Default)]
pub struct Pace {
    is_late: Cell<bool>,
}

/// A part of a test that may take so long.
struct Step<'a>(&'a Pace, Instant, Duration);

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if self.1.elapsed() > self.2 {
            self.0.is_late.set(true);
        }
    }
}

impl Pace {
    /// Does something that a server would not wait for if it took longer.
    pub fn within<R>(&self, most: Duration, action: impl FnOnce() -> R) -> R {
        let _step = Step(self, Instant::now(), most);
        action()
    }
}

/// Does a test. If it fails, and was late besides, that says nothing, and it is done once more.
pub fn in_time(test: impl Fn(&Pace)) {
    for _ in 0..TRIES {
        let pace = Pace::default();
        match catch_unwind(AssertUnwindSafe(|| test(&pace))) {
            Ok(()) => return,
            Err(panic) if !pace.is_late.get() => resume_unwind(panic),
            Err(_) => eprintln!("it was late, and is done once more"),
        }
    }
    panic!("this host is too busy");
}
