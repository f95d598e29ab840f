//! How long a lost watch waits before it is begun again.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use kube::runtime::utils::Backoff;

const FIRST: Duration = Duration::from_millis(500);
const MOST: Duration = Duration::from_secs(4);

/// From half a second to four, and up to as much again, other for each manager, kind and try, so that not all come at once.
/// Whatever is heard begins it anew.
///
/// The library's own grows to 30 s, and once more where an API server that is back no longer knows the watch's place: a
/// leader that is blind for a minute heals nothing in one.
#[derive(Debug)]
pub(super) struct Patience {
    next: Duration,
    /// Whose it is, and how often it has waited.
    of: DefaultHasher,
}

impl Patience {
    /// That of one manager for one kind.
    pub(super) fn of(manager: &str, kind: &str) -> Self {
        let mut of = DefaultHasher::new();
        (manager, kind).hash(&mut of);
        Self { next: FIRST, of }
    }
}

impl Iterator for Patience {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = self.next;
        self.next = (wait * 2).min(MOST);
        self.of.write_u8(0);
        let share = u32::from(self.of.finish().to_le_bytes()[0]);
        Some(wait + wait * share / u32::from(u8::MAX))
    }
}

impl Backoff for Patience {
    fn reset(&mut self) {
        self.next = FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_is_never_lost_for_long_and_managers_do_not_come_together() {
        let mut patience = Patience::of("n1", "Volume");
        assert!(patience.next() <= Some(2 * FIRST));
        let waits: Vec<Duration> = patience.by_ref().take(20).collect();
        assert!(waits.iter().all(|wait| *wait <= 2 * MOST), "{waits:?}");
        assert!(waits[10..].iter().all(|wait| *wait >= MOST), "{waits:?}");
        patience.reset();
        assert!(patience.next() <= Some(2 * FIRST));
        let first = |node: u8| Patience::of(&format!("n{node}"), "Volume").next().unwrap();
        let mut all: Vec<Duration> = (0..100).map(first).collect();
        all.sort();
        assert!(
            all[0] < FIRST * 11 / 10 && all[99] > FIRST * 19 / 10 && all[50] > FIRST * 13 / 10,
            "{all:?}"
        );
    }
}
