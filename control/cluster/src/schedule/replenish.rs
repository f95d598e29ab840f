//! What to do when a volume has too few replicas: use a failed one again, wait for it, or make a new one.

use std::time::Duration;

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replenish<'a> {
    /// Use this failed replica again: most of its data need not be copied.
    Reuse(&'a str),
    /// A failed replica may come back; look again after this time.
    Wait(Duration),
    /// Make a new one.
    New,
}

/// A failed replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed<'a> {
    /// Its name.
    pub name: &'a str,
    /// Since when, as a distance from now.
    pub since: Duration,
    /// Its node and disk answer, and its disk has room.
    pub usable: bool,
}

/// What to do for one missing replica. A failed one whose node is away is waited for as long as `wait` says, counted
/// from when the first of them failed.
pub fn replenish<'a>(failed: &[Failed<'a>], wait: Duration) -> Replenish<'a> {
    // The one that failed last lacks the least.
    if let Some(best) = failed.iter().filter(|f| f.usable).min_by_key(|f| (f.since, f.name)) {
        return Replenish::Reuse(best.name);
    }
    let youngest = failed.iter().map(|f| f.since).min();
    match youngest.and_then(|since| wait.checked_sub(since)) {
        Some(left) if left > Duration::ZERO => Replenish::Wait(left),
        _ => Replenish::New,
    }
}
