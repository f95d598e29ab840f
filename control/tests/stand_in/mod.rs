//! A replica that is only told of.

use std::pin::Pin;

use control::replica::{HashStatus, ReplicaControl, ReplicaStatus};

/// Always the same; the snapshot `one` has been hashed.
pub(crate) struct Replica(pub(crate) Option<ReplicaStatus>);

impl ReplicaControl for Replica {
    fn status(&self) -> Pin<Box<dyn Future<Output = Option<ReplicaStatus>> + Send>> {
        Box::pin(std::future::ready(self.0.clone()))
    }

    fn set_snapshot_limits(&self, _: Option<u32>, _: Option<u64>) {}

    fn hash(&self, _: &str, _: bool) -> bool {
        true
    }

    fn hash_status(&self, snapshot: &str) -> HashStatus {
        match snapshot {
            "one" => HashStatus::Complete { checksum: 0x1234, corrupted: false },
            _ => HashStatus::None,
        }
    }

    fn cancel_hash(&self, _: &str) {}

    fn is_hashing(&self) -> bool {
        false
    }
}
