//! The engine's way to the volume's authority: the record directory's file on a bare host, the node's manager in a cluster.

use control::authority::{RemoteAuthority, Reply};
use control::host::{self, AuthorityError};
use datapath::conductor::Stored;
use datapath::engine;
use lh_block::{Epoch, Generation};

/// The authority of a bare host, as the engine asks it.
pub(super) struct OnHost(pub(super) host::Authority);

impl engine::Authority for OnHost {
    fn load(&mut self) -> Result<Option<Epoch>, String> {
        self.0.settled_epoch().map_err(|e| e.to_string())
    }

    fn store(&mut self, expected: Option<(Generation, u64)>, epoch: &Epoch) -> Stored {
        match self.0.store_epoch(expected, epoch) {
            Ok(()) => Stored::Stored,
            Err(e @ (AuthorityError::Replaced(_) | AuthorityError::NotNewer(..))) => match self.0.epoch() {
                Ok(current) => Stored::Conflict { current },
                Err(_) => Stored::Unavailable { reason: e.to_string() },
            },
            Err(e) => Stored::Unavailable { reason: e.to_string() },
        }
    }
}

/// The authority of a cluster, as the engine asks it.
pub(super) struct InCluster(pub(super) RemoteAuthority);

/// For a reply that answers another question.
fn confused(reply: &Reply) -> String {
    format!("the manager of this node answered {reply:?}, which was not asked")
}

impl engine::Authority for InCluster {
    fn load(&mut self) -> Result<Option<Epoch>, String> {
        match self.0.load() {
            Reply::Counts(epoch) => Ok(epoch),
            Reply::Unavailable(reason) => Err(reason),
            other @ (Reply::Stored | Reply::Conflict(_)) => Err(confused(&other)),
        }
    }

    fn store(&mut self, expected: Option<(Generation, u64)>, epoch: &Epoch) -> Stored {
        match self.0.store(expected, epoch) {
            Reply::Stored => Stored::Stored,
            Reply::Conflict(current) => Stored::Conflict { current },
            Reply::Unavailable(reason) => Stored::Unavailable { reason },
            other @ Reply::Counts(_) => Stored::Unavailable { reason: confused(&other) },
        }
    }
}

#[cfg(test)]
mod tests {
    use datapath::engine::Authority;
    use lh_block::Instance;

    use super::*;

    #[test]
    fn a_conflict_tells_what_is_stored() {
        let dir = tempfile::tempdir().unwrap();
        let mut authority = OnHost(host::Authority::in_directory(dir.path()));
        assert_eq!(authority.load(), Ok(None));
        let epoch = |counter| Epoch { counter, id: Instance(counter.into()), ..Epoch::default() };
        assert_eq!(authority.store(None, &epoch(1)), Stored::Stored);
        assert_eq!(authority.store(None, &epoch(2)), Stored::Conflict { current: Some(epoch(1)) });
        assert_eq!(authority.store(Some(epoch(1).order()), &epoch(2)), Stored::Stored);
        assert_eq!(authority.load(), Ok(Some(epoch(2))));
        std::fs::write(dir.path().join("authority.json"), "{").unwrap();
        assert!(authority.load().is_err());
        assert!(matches!(authority.store(None, &epoch(3)), Stored::Unavailable { .. }));
    }
}
