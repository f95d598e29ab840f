//! A replica that is only told of, and the way to a server that was just started.

use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use control::replica::{HashStatus, ReplicaControl, ReplicaStatus};
use control::transport::connect;
use tonic::transport::Channel;

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

/// Waits for a server that was just started.
pub(crate) async fn reach(socket: &Path) -> Channel {
    for _ in 0..2000 {
        if let Ok(channel) = connect(socket).await {
            return channel;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("nobody listens on {}", socket.display())
}
