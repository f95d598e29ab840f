//! Leases: that a manager lives, and which one leads.
//!
//! Nobody compares clocks: a lease is alive for as long as its holder keeps changing it, counted from when the change
//! was seen here. One that was never seen to change is given a whole term.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use kube::api::{ObjectMeta, PostParams};
use tokio::time::Instant;

use super::desk::{Desk, Done, ReconcileError, is_missing};

/// How often a lease is renewed.
pub(super) const RENEW: Duration = Duration::from_secs(5);

/// A lease that does not change for so long is dead. Three renewals may get lost; the leader's absence and a node's
/// death are noticed within half of the minute in which a fault is to be healed.
pub(super) const TERM: Duration = Duration::from_secs(20);

/// A leader whose lease does not change for so long has missed a renewal, and may be dead.
pub(super) const SUSPECT: Duration = RENEW;

/// A leader that could not renew for so long stops acting, well before anybody else may begin.
pub(super) const YIELD: Duration = Duration::from_secs(12);

/// How long one request for a lease may take. A connection to an API server that lost its power says nothing of that for a
/// quarter of an hour; three such waits, one after the other, end before the leader has to yield.
const PATIENCE: Duration = Duration::from_secs(4);

/// What one request is answered, in time.
///
/// # Errors
/// What the API server says, or that it says nothing. The request may be carried out all the same: each write of a lease names
/// the version that was read, and is this holder's own.
pub(super) async fn answer<T>(request: impl Future<Output = kube::Result<T>>) -> Done<kube::Result<T>> {
    let late = |_| ReconcileError::NotYet(format!("the API server did not answer within {PATIENCE:?}"));
    tokio::time::timeout(PATIENCE, request).await.map_err(late)
}

/// The label of the leases of managers, with the node's name.
pub(super) const NODE_LABEL: &str = "longhorn.io/manager-of";

/// The lease of the leader.
pub(super) const LEADER: &str = "longhorn-manager-leader";

/// The name of a node's lease.
pub(super) fn node_lease(node: &str) -> String {
    format!("longhorn-manager-{node}")
}

/// What was seen of leases, by name.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    seen: BTreeMap<String, (String, Instant)>,
}

impl Watchers {
    /// How long a lease was not seen to change; zero for one that never was read.
    pub(super) fn still_for(&self, name: &str, now: Instant) -> Duration {
        self.seen.get(name).map_or(Duration::ZERO, |(_, since)| now.duration_since(*since))
    }

    /// When a lease that does not change any more is dead; `None`: none is on its way to that.
    pub(super) fn next_death(&self, now: Instant) -> Option<Duration> {
        let left = |(_, since): &(String, Instant)| TERM.checked_sub(now.duration_since(*since));
        self.seen.values().filter_map(left).filter(|left| *left > Duration::ZERO).min()
    }

    /// A lease was read: `mark` changes with every renewal. True if it is alive.
    pub(super) fn is_alive(&mut self, name: &str, mark: &str, now: Instant) -> bool {
        match self.seen.get_mut(name) {
            Some((before, since)) if before == mark => now.duration_since(*since) < TERM,
            Some(entry) => {
                *entry = (mark.to_owned(), now);
                true
            }
            None => {
                self.seen.insert(name.to_owned(), (mark.to_owned(), now));
                true
            }
        }
    }
}

/// What changes with every renewal of a lease.
pub(super) fn mark(lease: &Lease) -> String {
    let spec = lease.spec.clone().unwrap_or_default();
    format!("{:?} {:?} {:?}", spec.holder_identity, spec.renew_time, spec.lease_transitions)
}

fn holder(lease: &Lease) -> &str {
    lease.spec.as_ref().and_then(|s| s.holder_identity.as_deref()).unwrap_or_default()
}

/// Whether a lease may be taken by `identity`.
#[derive(Debug, PartialEq, Eq)]
enum Right {
    Renew,
    Take,
    Leave,
}

fn right(lease: &Lease, identity: &str, watchers: &mut Watchers, now: Instant) -> Right {
    let alive = watchers.is_alive(&lease.name_any(), &mark(lease), now);
    match holder(lease) {
        own if own == identity => Right::Renew,
        "" => Right::Take,
        _ if alive => Right::Leave,
        _ => Right::Take,
    }
}

/// A lease that this manager holds, or would take.
pub(super) struct Claim {
    name: String,
    identity: String,
    /// Its lease says of which node it is the manager.
    labelled: bool,
    /// As it was last written, if by this manager: the next renewal needs no reading.
    held: Option<Lease>,
    /// What was seen of it while somebody else had it.
    pub(super) watchers: Watchers,
}

impl Claim {
    pub(super) fn new(name: String, identity: &str, labelled: bool) -> Self {
        Self { name, identity: identity.to_owned(), labelled, held: None, watchers: Watchers::default() }
    }

    /// Renews the lease, or takes it if nobody holds it. True: it is held for another term from before the call.
    pub(super) async fn hold(&mut self, desk: &Desk) -> Done<bool> {
        if let Some(held) = self.held.take()
            && self.write(desk, held).await?
        {
            return Ok(true);
        }
        // Somebody else wrote it, or removed it.
        let mut lease = match answer(desk.api::<Lease>().get(&self.name)).await? {
            Ok(lease) => lease,
            Err(e) if is_missing(&e) => return self.create(desk).await,
            Err(e) => return Err(e.into()),
        };
        match right(&lease, &self.identity, &mut self.watchers, Instant::now()) {
            Right::Leave => return Ok(false),
            Right::Renew => {}
            Right::Take => {
                let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
                spec.holder_identity = Some(self.identity.clone());
                spec.acquire_time = Some(MicroTime(desk.now()));
                spec.lease_transitions = Some(spec.lease_transitions.unwrap_or_default().saturating_add(1));
            }
        }
        self.write(desk, lease).await
    }

    /// Writes the lease with the time of now. False: somebody else was faster, or it is gone.
    async fn write(&mut self, desk: &Desk, mut lease: Lease) -> Done<bool> {
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        spec.renew_time = Some(MicroTime(desk.now()));
        spec.lease_duration_seconds = Some(term_seconds());
        let (api, as_usual) = (desk.api::<Lease>(), PostParams::default());
        let written = answer(api.replace(&self.name, &as_usual, &lease)).await?;
        self.keep(written)
    }

    async fn create(&mut self, desk: &Desk) -> Done<bool> {
        let labels = self.labelled.then(|| [(NODE_LABEL.to_owned(), self.identity.clone())].into());
        let metadata = ObjectMeta { name: Some(self.name.clone()), labels, ..ObjectMeta::default() };
        let now = MicroTime(desk.now());
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(term_seconds()),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            ..LeaseSpec::default()
        };
        let lease = Lease { metadata, spec: Some(spec) };
        let created = answer(desk.api::<Lease>().create(&PostParams::default(), &lease)).await?;
        self.keep(created)
    }

    fn keep(&mut self, written: kube::Result<Lease>) -> Done<bool> {
        match written {
            Ok(lease) => {
                // To whoever loses it one day it was alive until now.
                self.watchers.is_alive(&self.name, &mark(&lease), Instant::now());
                self.held = Some(lease);
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.code == 409 || status.code == 404 => Ok(false),
            Err(e) => Err(ReconcileError::from(e)),
        }
    }
}

fn term_seconds() -> i32 {
    i32::try_from(TERM.as_secs()).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, transitions: i32) -> Lease {
        let spec = LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        };
        Lease { metadata: ObjectMeta { name: Some("l".into()), ..ObjectMeta::default() }, spec: Some(spec) }
    }

    #[test]
    fn a_lease_is_taken_only_after_it_was_seen_still_for_a_term() {
        let (mut watchers, start) = (Watchers::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(right(&lease("a", 1), "b", &mut watchers, at(0)), Right::Leave);
        assert_eq!(right(&lease("a", 1), "b", &mut watchers, at(19)), Right::Leave);
        assert_eq!(watchers.still_for("l", at(19)), Duration::from_secs(19));
        assert_eq!(watchers.next_death(at(19)), Some(Duration::from_secs(1)));
        assert_eq!(right(&lease("a", 2), "b", &mut watchers, at(20)), Right::Leave, "it was renewed");
        assert_eq!(right(&lease("a", 2), "b", &mut watchers, at(39)), Right::Leave);
        assert_eq!(right(&lease("a", 2), "b", &mut watchers, at(40)), Right::Take);
        assert_eq!(watchers.next_death(at(40)), None, "it is dead already");
        assert_eq!(right(&lease("b", 3), "b", &mut watchers, at(40)), Right::Renew);
        assert_eq!(right(&lease("", 3), "b", &mut watchers, at(41)), Right::Take, "its holder gave it up");
    }

    #[test]
    fn a_leader_stops_before_another_may_begin() {
        assert!(YIELD + RENEW < TERM);
        // One renewal that nobody answers, then one that is read, written and counted.
        assert!(3 * PATIENCE <= YIELD);
    }
}
