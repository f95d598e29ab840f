//! Whether an engine has ever served a volume, as far as resources tell: until one has, replicas that hold nothing are no loss.

use kube::ResourceExt;
use lh_block::Generation;

use crate::api::{EngineSpec, Quorum, Replica, Volume};

/// True if an engine was given a number and nobody here would have heard if it has served: with another quorum than `any` the
/// authority has no epoch, and that a replica came in sync is told afterwards.
pub fn may_have_served(volume: &Volume) -> bool {
    volume.spec.quorum != Quorum::Any && volume.status.as_ref().is_some_and(|s| s.generation.is_some())
}

/// True if no engine has ever answered for the volume, beyond doubt: its replicas, which these are, hold nothing. With the
/// quorum `any` the authority has the epoch of each engine that did; with another one nobody here may have heard of it.
pub fn was_never_served<'a>(volume: &Volume, replicas: impl IntoIterator<Item = &'a Replica>) -> bool {
    let has_epoch = volume.status.as_ref().is_some_and(|s| s.epoch.is_some());
    let was_filled = |r: &Replica| !r.spec.healthy_at.is_empty();
    volume.spec.quorum == Quorum::Any && !has_epoch && !replicas.into_iter().any(was_filled)
}

/// True if an engine may begin with the replicas that it is told of, beside all of its volume, those that are being deleted among them.
/// Where the authority keeps no epoch an engine that was told only of replicas that were never in sync would begin the volume anew: those
/// that were may just be away, or deleted and kept. With the quorum `any` the authority's epoch says so to the engine itself.
pub fn may_begin_with(engine: &EngineSpec, replicas: &[Replica]) -> bool {
    let mut filled = replicas.iter().filter(|r| !r.spec.healthy_at.is_empty()).peekable();
    engine.quorum == Quorum::Any
        || filled.peek().is_none()
        || filled.any(|r| engine.replica_address_map.contains_key(&r.name_any()))
}

/// True if a replica tells an engine in which epochs it was: it has recorded any. One that was being filled for the first time when its
/// engine ended has not, and an engine that was told of it would count it among those of which a majority has to tell; nor has one that
/// only Longhorn's had. One that was in sync and had an engine has, whether that was noted or not.
pub fn tells_epochs(replica: &Replica) -> bool {
    let status = replica.status.as_ref();
    let had_engine = status.and_then(|s| s.generation).is_some_and(|g| g.0 > Generation::default());
    let was_in_sync = !replica.spec.healthy_at.is_empty();
    had_engine && was_in_sync || status.is_some_and(|s| s.epoch_recorded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ReplicaSpec;

    #[test]
    fn an_engine_that_knows_none_of_those_that_were_in_sync_does_not_begin() {
        let replica = |name: &str, healthy_at: &str| {
            Replica::new(name, ReplicaSpec { healthy_at: healthy_at.into(), ..ReplicaSpec::default() })
        };
        let told = |quorum, names: &[&str]| {
            let address = |name: &&str| ((*name).to_owned(), format!("tcp:{name}"));
            EngineSpec {
                quorum,
                replica_address_map: names.iter().map(address).collect(),
                ..EngineSpec::default()
            }
        };
        let all = [replica("full", "2026-01-01T00:00:00Z"), replica("empty", "")];
        for quorum in [Quorum::Majority, Quorum::Unsafe] {
            assert!(!may_begin_with(&told(quorum, &["empty"]), &all));
            assert!(may_begin_with(&told(quorum, &["empty", "full"]), &all));
            assert!(may_begin_with(&told(quorum, &["empty"]), &all[1..]), "none was ever in sync");
        }
        assert!(may_begin_with(&told(Quorum::Any, &["empty"]), &all), "its authority tells it");
    }
}
