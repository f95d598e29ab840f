//! Since when the leader knows of failed replicas, by its own count of time: what is written in them is what some clock said.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kube::ResourceExt;
use tokio::time::Instant;

use crate::api::Replica;

/// For so long a leader has to have known of a failure before it takes the replica for one that nobody waits for any more.
const LATELY: Duration = Duration::from_secs(600);

/// When failed replicas were first seen as such, by volume and name. It is not kept: another leader begins anew.
#[derive(Debug, Default)]
pub(super) struct Failures(BTreeMap<String, BTreeMap<String, Instant>>);

impl Failures {
    /// Sees a volume's replicas, which are all that it has. Gives back those whose failure is not known for long.
    pub(super) fn see<'a>(
        &mut self,
        volume: &str,
        replicas: impl Iterator<Item = &'a Replica>,
        now: Instant,
    ) -> BTreeSet<String> {
        let mut known = self.0.remove(volume).unwrap_or_default();
        let failed = replicas.filter(|r| !r.spec.failed_at.is_empty()).map(ResourceExt::name_any);
        let seen: BTreeMap<String, Instant> = failed
            .map(|name| (known.remove(&name).unwrap_or(now), name))
            .map(|(at, name)| (name, at))
            .collect();
        let is_late = |at: Instant| now.saturating_duration_since(at) < LATELY;
        let lately = seen.iter().filter(|(_, at)| is_late(**at)).map(|(name, _)| name.clone()).collect();
        if !seen.is_empty() {
            self.0.insert(volume.to_owned(), seen);
        }
        lately
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ReplicaSpec;

    #[test]
    fn a_failure_counts_from_when_it_was_seen_whatever_is_written_and_anew_if_it_is_another_one() {
        let (mut failures, start) = (Failures::default(), Instant::now());
        let mut see = |seconds, failed: &[&str]| {
            let replica = |name: &&str| {
                let spec = ReplicaSpec { failed_at: "2020-01-01T00:00:00Z".into(), ..ReplicaSpec::default() };
                Replica::new(name, spec)
            };
            let all: Vec<Replica> =
                failed.iter().map(replica).chain([Replica::new("ok", ReplicaSpec::default())]).collect();
            let lately = failures.see("v", all.iter(), start + Duration::from_secs(seconds));
            lately.into_iter().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(see(0, &["a"]), "a");
        assert_eq!(see(300, &["a", "b"]), "a b");
        assert_eq!(see(600, &["a", "b"]), "b");
        assert_eq!(see(601, &["b"]), "b");
        assert_eq!(see(900, &["a", "b"]), "a", "it had come back");
        assert_eq!(see(900, &[]), "");
        assert!(failures.0.is_empty());
    }
}
