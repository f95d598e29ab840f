//! What was seen of the tickets that may be left on cordoned nodes: how often each is asked about, and since when nobody has
//! used it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

/// How often Kubernetes is asked about a ticket.
const ROUND: Duration = Duration::from_secs(20);

/// How long a ticket has had no attachment before it goes: Kubernetes looks each minute whether a pod lacks one, and makes it anew.
const SURE: Duration = Duration::from_secs(70);

/// A volume, and the ticket on its attachment.
type Name = (String, String);

/// Tickets that may be left, as they were seen.
#[derive(Debug, Default)]
pub(super) struct Seen(BTreeMap<Name, Sight>);

#[derive(Clone, Copy, Debug)]
struct Sight {
    asked: Instant,
    /// Since when nobody has used it, as far as was seen at each look.
    unused: Option<Instant>,
}

impl Seen {
    /// Forgets all others.
    pub(super) fn keep(&mut self, tickets: &BTreeSet<Name>) {
        self.0.retain(|name, _| tickets.contains(name));
    }

    /// True if it is time to ask about a ticket.
    pub(super) fn is_due(&self, ticket: &Name, now: Instant) -> bool {
        self.0.get(ticket).is_none_or(|sight| now.duration_since(sight.asked) >= ROUND)
    }

    /// Notes what was found. True: nobody has used it for so long that nobody will.
    pub(super) fn note(&mut self, ticket: Name, is_used: bool, now: Instant) -> bool {
        let before = self.0.get(&ticket).and_then(|sight| sight.unused);
        let unused = (!is_used).then(|| before.unwrap_or(now));
        self.0.insert(ticket, Sight { asked: now, unused });
        unused.is_some_and(|since| now.duration_since(since) >= SURE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_left_once_it_was_seen_unused_for_long_enough_and_never_used_between() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let ticket = || ("v".to_owned(), "t".to_owned());
        let mut seen = Seen::default();
        assert!(seen.is_due(&ticket(), at(0)));
        assert!(!seen.note(ticket(), false, at(0)), "Kubernetes may make an attachment anew");
        assert!(!seen.is_due(&ticket(), at(19)) && seen.is_due(&ticket(), at(20)));
        assert!(!seen.note(ticket(), false, at(60)));
        assert!(!seen.note(ticket(), true, at(65)), "somebody uses it again");
        assert!(!seen.note(ticket(), false, at(80)));
        assert!(!seen.note(ticket(), false, at(149)));
        assert!(seen.note(ticket(), false, at(150)));
        // It was gone meanwhile: it begins anew.
        seen.keep(&BTreeSet::new());
        assert!(!seen.note(ticket(), false, at(160)));
    }
}
