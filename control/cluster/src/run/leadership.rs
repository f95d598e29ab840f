//! Who leads, and until when: leases renewed, deaths noticed, and none of it held up by an API server that does not answer.
//!
//! A manager leads for [`YIELD`] from before the renewal that succeeded, and not a moment longer, whatever it waits for then:
//! who asks compares with the clock.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::cache::Key;
use super::lead::Lead;
use super::lease::{self, Claim, LEADER, RENEW, SUSPECT, Watchers, YIELD};
use super::{Context, nodes};

/// Least time between two renewals.
const SOONEST: Duration = Duration::from_millis(500);

/// What is there while this manager leads.
#[derive(Default)]
pub(super) struct Leadership {
    held: Mutex<Option<Held>>,
}

struct Held {
    lead: Arc<Lead>,
    until: Instant,
}

impl Leadership {
    /// What the leader has; `None`: this manager does not lead, or could not renew for too long.
    pub(super) fn now(&self) -> Option<Arc<Lead>> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.as_ref().filter(|held| Instant::now() < held.until).map(|held| Arc::clone(&held.lead))
    }

    /// Leads until then, or not at all.
    fn set(&self, until: Option<Instant>, begin: impl FnOnce() -> Arc<Lead>) -> Term {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match (&mut *held, until) {
            (Some(held), Some(until)) => {
                let has_lapsed = held.until <= Instant::now();
                held.until = until;
                if has_lapsed { Term::GoesOn } else { Term::AsBefore }
            }
            (None, None) => Term::AsBefore,
            (Some(_), None) => {
                tracing::info!(leads = false, "leadership");
                *held = None;
                Term::AsBefore
            }
            (None, Some(until)) => {
                tracing::info!(leads = true, "leadership");
                *held = Some(Held { lead: begin(), until });
                Term::Begins
            }
        }
    }
}

/// What is new about who leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Term {
    /// Nothing.
    AsBefore,
    /// This manager leads from now on. What it reads first it looks at.
    Begins,
    /// It had led for too long without a renewal, which nobody noticed. What changed meanwhile it has heard, and not looked at.
    GoesOn,
}

/// Renews this node's lease, tries to lead, and notices who died.
pub(super) async fn keep_leases(context: Arc<Context>) {
    let node = &context.options.node;
    let mut own = Claim::new(lease::node_lease(node), node, true);
    let mut first = Claim::new(LEADER.to_owned(), node, false);
    let mut nodes = Watchers::default();
    let mut led_at: Option<Instant> = None;
    let mut counted_at: Option<Instant> = None;
    loop {
        let begun = Instant::now();
        let (renewed, leading) = tokio::join!(own.hold(&context.desk), first.hold(&context.desk));
        if let Err(e) = renewed {
            tracing::warn!(error = %e, "this node's lease was not renewed");
        }
        match leading {
            Ok(true) => led_at = Some(begun),
            Ok(false) => led_at = None,
            Err(e) => tracing::warn!(error = %e, "the leader's lease was not renewed"),
        }
        let mut until = led_at.map(|at| at + YIELD).filter(|until| Instant::now() < *until);
        // An API server that was away kept everybody from renewing: nobody is dead for that.
        if counted_at.is_some_and(|at| at.elapsed() > YIELD) {
            (nodes, counted_at) = (Watchers::default(), None);
        }
        let mut changed = false;
        // Whoever may lead soon counts already: a node that dies with the leader is noticed in one term, not in two.
        if until.is_some() || first.watchers.still_for(LEADER, Instant::now()) >= SUSPECT {
            match nodes::count_the_living(&context, &mut nodes).await {
                Ok(news) => (changed, counted_at) = (news, Some(Instant::now())),
                Err(e) => tracing::warn!(error = %e, "the managers were not counted"),
            }
        }
        // To a leader that never counted all other nodes would be dead.
        until = until.filter(|_| counted_at.is_some());
        match context.leadership.set(until, || Lead::begin(&context.desk, &context.news)) {
            Term::GoesOn => context.news.tell([Key::All, Key::Nodes, Key::Certificate]),
            Term::AsBefore if until.is_some() && changed => context.news.tell([Key::All, Key::Nodes]),
            Term::AsBefore | Term::Begins => {}
        }
        // A death is noticed when it is due, not up to a renewal later.
        let now = Instant::now();
        let deaths = first.watchers.next_death(now).into_iter().chain(nodes.next_death(now));
        // What was waited for in vain is part of the time between two renewals.
        let rest = RENEW.saturating_sub(begun.elapsed());
        tokio::time::sleep(deaths.fold(rest, Duration::min).max(SOONEST)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::cache::News;
    use crate::run::desk::Desk;

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_renews_too_late_and_is_the_leader_still_looks_at_everything() {
        let nobody = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            std::future::pending::<Result<http::Response<kube::client::Body>, std::convert::Infallible>>()
                .await
        });
        let client = kube::Client::new(nobody, "longhorn-system");
        let desk = Desk::new(client.into(), "longhorn-system", "n1", super::super::Clock::default());
        let (leadership, news) = (Leadership::default(), Arc::new(News::default()));
        let renew = || leadership.set(Some(Instant::now() + YIELD), || Lead::begin(&desk, &news));
        assert_eq!(renew(), Term::Begins);
        let lead = leadership.now().expect("it leads");
        tokio::time::sleep(YIELD - Duration::from_millis(1)).await;
        assert_eq!(renew(), Term::AsBefore, "in time");
        tokio::time::sleep(YIELD).await;
        assert!(leadership.now().is_none(), "whatever is told now is for nobody");
        assert_eq!(renew(), Term::GoesOn);
        assert!(leadership.now().is_some_and(|now| Arc::ptr_eq(&now, &lead)), "with what it has read");
        assert_eq!(leadership.set(None, || unreachable!()), Term::AsBefore);
        assert_eq!(renew(), Term::Begins);
    }
}
