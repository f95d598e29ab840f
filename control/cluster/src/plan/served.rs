//! Whether an engine has ever served a volume, as far as resources tell: until one has, replicas that hold nothing are no loss.

use crate::api::{Quorum, Replica, Volume};

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
