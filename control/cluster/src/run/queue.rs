//! What has to be looked at, and when: each thing once, however often it changed; never two looks at one thing at a time;
//! later and later after failures. What may wait for an engine or for another process of this node has only so many places
//! ([`Lane`]), so that what it waits for, and what it does not concern, has one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

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

/// Looks at once. Most wait for the API server or for a process of this node; more would only crowd it.
const AT_ONCE: usize = 20;

/// What a look may have to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// An engine's chain, which it changes once it is open and calm: as long as its replicas are away.
    Chains,
    /// An engine. Not the same places as the one above: what it waits for may be a replica's new address.
    Engines,
    /// A replica's process, its instance manager, its disk; a device without an engine.
    Replicas,
    /// None of these: what the leader does, the node.
    Rest,
}

impl Lane {
    const ALL: [Self; 4] = [Self::Chains, Self::Engines, Self::Replicas, Self::Rest];

    /// Looks at once of this lane. Engines have less than a half of all, and six are left for the leader's in any case.
    const fn places(self) -> usize {
        match self {
            Self::Chains => 3,
            Self::Engines => 5,
            Self::Replicas => 6,
            Self::Rest => AT_ONCE,
        }
    }
}

/// What a queue holds.
pub(super) trait Laned {
    /// What a look at it may have to wait for.
    fn lane(&self) -> Lane;
}

/// What is due in one lane, the first one first: thousands are due when a manager starts.
#[derive(Debug)]
struct Waiting<K> {
    order: BTreeSet<(Instant, K)>,
    /// How many are being looked at.
    busy: usize,
}

impl<K> Default for Waiting<K> {
    fn default() -> Self {
        Self { order: BTreeSet::new(), busy: 0 }
    }
}

#[derive(Debug)]
pub(super) struct Queue<K> {
    due: BTreeMap<K, Instant>,
    lanes: [Waiting<K>; Lane::ALL.len()],
    busy: BTreeSet<K>,
    /// Changed while it was looked at.
    again: BTreeSet<K>,
    failures: BTreeMap<K, u32>,
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Self {
            due: BTreeMap::new(),
            lanes: Default::default(),
            busy: BTreeSet::new(),
            again: BTreeSet::new(),
            failures: BTreeMap::new(),
        }
    }
}

impl<K: Clone + Ord + Laned> Queue<K> {
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
        let before = self.due.insert(key.clone(), at);
        let order = &mut self.lane(&key).order;
        if let Some(before) = before {
            order.remove(&(before, key.clone()));
        }
        order.insert((at, key));
    }

    fn lane(&mut self, key: &K) -> &mut Waiting<K> {
        &mut self.lanes[key.lane() as usize]
    }

    /// The lanes that have a place.
    fn open(&self) -> impl Iterator<Item = (Lane, &Waiting<K>)> {
        let room = self.busy.len() < AT_ONCE;
        let all = Lane::ALL.into_iter().zip(&self.lanes);
        all.filter(move |(lane, waiting)| room && waiting.busy < lane.places())
    }

    /// The next thing to look at, which is being looked at from now on; `None`: nothing is due, or there is no place.
    pub(super) fn take(&mut self, now: Instant) -> Option<K> {
        let first = |(lane, waiting): (Lane, &Waiting<K>)| Some((waiting.order.first()?.0, lane));
        let (due, lane) = self.open().filter_map(first).min_by_key(|(due, _)| *due)?;
        if due > now {
            return None;
        }
        let waiting = &mut self.lanes[lane as usize];
        let (_, key) = waiting.order.pop_first()?;
        waiting.busy += 1;
        self.due.remove(&key);
        self.busy.insert(key.clone());
        Some(key)
    }

    /// The look ended.
    pub(super) fn ended(&mut self, key: K, outcome: Outcome, now: Instant) {
        if self.busy.remove(&key) {
            self.lane(&key).busy -= 1;
        }
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

    /// When something is due next that has a place; `None`: nothing is, until something changes or a look ends.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.open().filter_map(|(_, waiting)| waiting.order.first()).map(|(due, _)| *due).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Laned for &str {
        fn lane(&self) -> Lane {
            match self.as_bytes().first() {
                Some(b's') => Lane::Chains,
                Some(b'e') => Lane::Engines,
                _ => Lane::Rest,
            }
        }
    }

    #[test]
    fn what_waits_for_engines_leaves_places_for_all_else() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let chains: Vec<String> = (0..100).map(|i| format!("s{i}")).collect();
        chains.iter().for_each(|key| queue.changed(key.as_str(), now));
        let taken: Vec<&str> = std::iter::from_fn(|| queue.take(now)).collect();
        assert_eq!((taken.len(), queue.next_due()), (3, None), "nobody waits for what has no place");
        let later = now + Duration::from_secs(1);
        queue.changed("e", later);
        queue.changed("volume", later + Duration::from_millis(1));
        assert_eq!(queue.next_due(), Some(later));
        let far = later + Duration::from_secs(1);
        assert_eq!([queue.take(far), queue.take(far), queue.take(far)], [Some("e"), Some("volume"), None]);
        queue.ended(taken[0], Outcome::Done, far);
        assert!(queue.take(far).is_some_and(|key| key.starts_with('s')));
        let engines = Lane::Chains.places() + Lane::Engines.places();
        assert!(engines * 2 <= AT_ONCE && engines + Lane::Replicas.places() < AT_ONCE);
        let others: Vec<String> = (0..100).map(|i| format!("v{i}")).collect();
        others.iter().for_each(|key| queue.changed(key.as_str(), far));
        assert_eq!(std::iter::from_fn(|| queue.take(far)).count(), AT_ONCE - 5);
    }

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
        assert_eq!((queue.take(now), queue.next_due(), queue.busy.len()), (None, None, 0));
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
