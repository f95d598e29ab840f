//! A replica that was added, until it is in sync: Longhorn's calls and commands that add one answer then, and whoever asked takes that
//! for one more copy of everything.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::proto::ptypes::{ControllerReplica, ReplicaMode};

/// How long a replica that was added may be left out before whoever added it is told: its engine connects within seconds, and
/// begins again by itself after what passes.
const LEFT_OUT: Duration = Duration::from_secs(30);

/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(200);

/// Why a replica that was added is not in sync.
#[derive(Debug, thiserror::Error)]
pub enum NotInSync<E> {
    /// The engine does not tell.
    #[error("{0}")]
    Unheard(E),
    /// Somebody has taken it out.
    #[error("replica {0} was taken out again")]
    TakenOut(String),
    /// It stays added, and what keeps it out may pass.
    #[error("replica {address} is added and not in sync yet: {reason}; its engine goes on trying")]
    LeftOut {
        /// Where it is.
        address: String,
        /// What its engine says.
        reason: String,
    },
}

/// Looks again and again at the engine's replicas, as `list` gives them, until the one at this address, and of this name if there is one, is
/// in sync. A call that is given up leaves the replica as it is.
///
/// # Errors
/// [`NotInSync`].
pub async fn until_in_sync<E, L, F>(address: &str, name: &str, mut list: L) -> Result<(), NotInSync<E>>
where
    L: FnMut() -> F,
    F: Future<Output = Result<Vec<ControllerReplica>, E>>,
{
    let mut left_out = None;
    loop {
        let replicas = list().await.map_err(NotInSync::Unheard)?;
        // Another replica may have had the address before.
        let found = replicas.into_iter().find(|replica| {
            replica
                .address
                .as_ref()
                .is_some_and(|a| a.address == address && (name.is_empty() || a.instance_name == name))
        });
        let Some(replica) = found else { return Err(NotInSync::TakenOut(address.to_owned())) };
        match replica.mode() {
            ReplicaMode::Rw => return Ok(()),
            ReplicaMode::Wo => left_out = None,
            ReplicaMode::Err => {
                if left_out.get_or_insert_with(Instant::now).elapsed() >= LEFT_OUT {
                    return Err(NotInSync::LeftOut { address: address.to_owned(), reason: replica.reason });
                }
            }
        }
        sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::proto::ptypes::ReplicaAddress;

    /// What an engine tells, one mode after the other, the last for ever; and after how many looks it was enough.
    async fn told(modes: &[Option<ReplicaMode>]) -> (Result<(), NotInSync<Infallible>>, usize) {
        let mut looks = 0;
        let list = || {
            let mode = modes[looks.min(modes.len() - 1)];
            looks += 1;
            let replica = |mode: ReplicaMode| ControllerReplica {
                address: Some(ReplicaAddress { address: "a".into(), instance_name: "r-3".into() }),
                mode: mode.into(),
                reason: "it is full".into(),
                ..ControllerReplica::default()
            };
            std::future::ready(Ok(mode.map(replica).into_iter().collect()))
        };
        let done = until_in_sync("a", "r-3", list).await;
        (done, looks)
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_waited_for_as_long_as_it_is_filled_and_for_a_moment_where_it_is_left_out() {
        use ReplicaMode::{Err as Out, Rw, Wo};
        let (done, looks) = told(&[Some(Out), Some(Wo), Some(Wo), Some(Out), Some(Wo), Some(Rw)]).await;
        assert!(done.is_ok() && looks == 6, "{done:?} after {looks}");
        let (done, looks) = told(&[Some(Wo), Some(Out)]).await;
        assert!(
            matches!(&done, Err(NotInSync::LeftOut { reason, .. }) if reason == "it is full"),
            "{done:?}"
        );
        assert!(looks >= 150, "after {looks} looks");
        let (done, _) = told(&[Some(Wo), None]).await;
        assert!(matches!(&done, Err(NotInSync::TakenOut(address)) if address == "a"), "{done:?}");
    }
}
