//! How long a lost watch waits before it is begun again.

use std::time::Duration;

use control::random;
use kube::runtime::utils::Backoff;

const FIRST: Duration = Duration::from_millis(500);
const MOST: Duration = Duration::from_secs(4);

/// From half a second to four, and as much again by chance, so that managers do not all come at once. Whatever is heard begins
/// it anew.
///
/// The library's own grows to 30 s, and once more where an API server that is back no longer knows the watch's place: a
/// leader that is blind for a minute heals nothing in one.
#[derive(Debug)]
pub(super) struct Patience {
    next: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { next: FIRST }
    }
}

impl Iterator for Patience {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = self.next;
        self.next = (wait * 2).min(MOST);
        // Without random numbers all come at once, which is better than not at all.
        let chance = u16::from_le_bytes(random::bytes().unwrap_or_default());
        Some(wait + wait * u32::from(chance) / u32::from(u16::MAX))
    }
}

impl Backoff for Patience {
    fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_is_never_lost_for_long() {
        let mut patience = Patience::default();
        assert!(patience.next() < Some(2 * FIRST));
        let waits: Vec<Duration> = patience.by_ref().take(20).collect();
        assert!(waits.iter().all(|wait| *wait < 2 * MOST), "{waits:?}");
        assert!(waits[10..].iter().all(|wait| *wait >= MOST), "{waits:?}");
        patience.reset();
        assert!(patience.next() < Some(2 * FIRST));
    }
}
