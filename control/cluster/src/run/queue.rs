//! What has to be looked at, and when: each thing once, however often it changed; never two looks at one thing at a time;
//! later and later after failures.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// The first wait after a failure; it doubles with each further one.
const RETRY_FIRST: Duration = Duration::from_millis(100);

/// The longest wait after a failure. Longhorn's users see a fault healed in less than a minute only if what failed once
/// is tried several times within that.
const RETRY_MAX: Duration = Duration::from_secs(15);

/// How a look ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All is done that could be.
    Done,
    /// Look again after this time.
    Again(Duration),
    /// Somebody else was faster: what was read is old. Look again as soon as news can be there.
    Stale,
    /// It failed.
    Failed,
}

/// Time for the news of somebody else's write to arrive.
const NEWS: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Queue<K> {
    due: BTreeMap<K, Instant>,
    /// The same, the first one first: thousands are due when a manager starts.
    order: BTreeSet<(Instant, K)>,
    busy: BTreeSet<K>,
    /// Changed while it was looked at.
    again: BTreeSet<K>,
    failures: BTreeMap<K, u32>,
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Self {
            due: BTreeMap::new(),
            order: BTreeSet::new(),
            busy: BTreeSet::new(),
            again: BTreeSet::new(),
            failures: BTreeMap::new(),
        }
    }
}

impl<K: Clone + Ord> Queue<K> {
    /// It changed: look at it as soon as possible.
    pub(super) fn changed(&mut self, key: K, now: Instant) {
        if self.busy.contains(&key) {
            self.again.insert(key);
        } else if self.due.get(&key).is_none_or(|due| *due > now) {
            // One that is due already keeps its place, or what changes all the time would never have its turn.
            self.schedule(key, now);
        }
    }

    fn schedule(&mut self, key: K, at: Instant) {
        if let Some(before) = self.due.insert(key.clone(), at) {
            self.order.remove(&(before, key.clone()));
        }
        self.order.insert((at, key));
    }

    /// The next thing to look at, which is being looked at from now on.
    pub(super) fn take(&mut self, now: Instant) -> Option<K> {
        if self.order.first()?.0 > now {
            return None;
        }
        let (_, key) = self.order.pop_first()?;
        self.due.remove(&key);
        self.busy.insert(key.clone());
        Some(key)
    }

    /// The look ended.
    pub(super) fn ended(&mut self, key: K, outcome: Outcome, now: Instant) {
        self.busy.remove(&key);
        let failures = match outcome {
            Outcome::Failed => self.failures.get(&key).copied().unwrap_or_default().saturating_add(1),
            Outcome::Done | Outcome::Again(_) | Outcome::Stale => 0,
        };
        if failures == 0 {
            self.failures.remove(&key);
        } else {
            self.failures.insert(key.clone(), failures);
        }
        let wait = match outcome {
            Outcome::Done => None,
            Outcome::Again(wait) => Some(wait),
            Outcome::Stale => Some(NEWS),
            Outcome::Failed => {
                let factor = 1_u32.checked_shl(failures - 1).unwrap_or(u32::MAX);
                Some(RETRY_FIRST.saturating_mul(factor).min(RETRY_MAX))
            }
        };
        let changed = self.again.remove(&key);
        // A failure waits even if something changed meanwhile: its own half-done work is such a change.
        let due = match (outcome, wait) {
            (Outcome::Failed, Some(wait)) => Some(now + wait),
            _ if changed => Some(now),
            (_, Some(wait)) => Some(now + wait),
            (_, None) => None,
        };
        if let Some(due) = due {
            self.schedule(key, due);
        }
    }

    /// When something is due next; `None`: nothing is, until something changes.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.order.first().map(|(due, _)| *due)
    }

    /// How many are being looked at.
    pub(super) fn busy(&self) -> usize {
        self.busy.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thing_is_looked_at_once_and_again_if_it_changed_meanwhile() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.changed("a", now);
        queue.changed("a", now);
        assert_eq!((queue.take(now), queue.take(now)), (Some("a"), None));
        queue.changed("a", now);
        assert_eq!(queue.take(now), None, "not twice at a time");
        queue.ended("a", Outcome::Done, now);
        assert_eq!(queue.take(now), Some("a"));
        queue.ended("a", Outcome::Done, now);
        assert_eq!((queue.take(now), queue.next_due(), queue.busy()), (None, None, 0));
    }

    #[test]
    fn what_changes_again_and_again_keeps_its_turn() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.changed("busy", now);
        queue.changed("quiet", now + Duration::from_millis(1));
        queue.changed("busy", now + Duration::from_millis(2));
        assert_eq!(queue.take(now + Duration::from_millis(3)), Some("busy"));
        assert_eq!(queue.take(now + Duration::from_millis(3)), Some("quiet"));
        assert_eq!((queue.take(now + Duration::from_secs(1)), queue.next_due()), (None, None));
    }

    #[test]
    fn failures_wait_longer_and_longer_and_success_forgets_them() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let wait = |queue: &mut Queue<&'static str>, outcome| {
            queue.changed("a", now);
            queue.take(now).unwrap();
            queue.changed("a", now);
            queue.ended("a", outcome, now);
            queue.next_due().map(|due| due - now)
        };
        assert_eq!(wait(&mut queue, Outcome::Failed), Some(RETRY_FIRST));
        assert_eq!(wait(&mut queue, Outcome::Failed), Some(RETRY_FIRST * 2));
        for _ in 0..40 {
            wait(&mut queue, Outcome::Failed);
        }
        assert_eq!(wait(&mut queue, Outcome::Failed), Some(RETRY_MAX));
        assert_eq!(wait(&mut queue, Outcome::Done), Some(Duration::ZERO), "it changed meanwhile");
        assert_eq!(wait(&mut queue, Outcome::Failed), Some(RETRY_FIRST));
    }

    #[test]
    fn a_look_that_is_due_later_waits_unless_something_changes() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.changed("a", now);
        queue.take(now).unwrap();
        queue.ended("a", Outcome::Again(Duration::from_secs(5)), now);
        assert_eq!(queue.take(now), None);
        queue.changed("a", now);
        assert_eq!(queue.take(now), Some("a"));
    }
}
