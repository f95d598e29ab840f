//! The time of a run: it begins when the run does, and stands still while anything is done.

use std::cell::Cell;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

thread_local! {
    static BEGUN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// 2026-01-01T00:00:00Z, in seconds.
const FIRST: i64 = 1_767_225_600;

/// A run begins on this thread.
pub(crate) fn begin() {
    BEGUN.set(Some(Instant::now()));
}

/// How long the run of this thread has gone on.
pub(crate) fn elapsed() -> Duration {
    BEGUN.get().map(|begun| begun.elapsed()).unwrap_or_default()
}

pub(crate) fn now() -> Timestamp {
    let first = Timestamp::from_second(FIRST).expect("a time");
    first.checked_add(elapsed()).expect("a time")
}

/// As it is written into objects.
pub(crate) fn written() -> String {
    lh_cluster::plan::written(now())
}
