//! The generations that open replicas have seen, asked for over their control sockets.

use std::time::Duration;

use control::host::Root;
use control::proto::ptypes::replica_service_client::ReplicaServiceClient;
use lh_block::Generation;

/// How long a replica may take to say that it is open.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

/// The highest generation that a replica of the root has seen; `None`: it is not open.
pub(crate) async fn seen_by(root: &Root, replica: &str) -> Option<Generation> {
    let ask = async {
        let channel = control::transport::connect(&root.control_socket(replica)).await.ok()?;
        let answer = ReplicaServiceClient::new(channel).replica_get(()).await.ok()?;
        Some(Generation::from(answer.into_inner().replica?.generation))
    };
    tokio::time::timeout(ANSWER_PATIENCE, ask).await.ok().flatten()
}

/// The highest that any of these has seen, as far as they are open.
///
/// # Errors
/// No runtime can be made.
pub(crate) fn highest_seen<'a>(
    root: &Root,
    replicas: impl Iterator<Item = &'a str>,
) -> std::io::Result<Generation> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut highest = Generation::default();
        for replica in replicas {
            highest = highest.max(seen_by(root, replica).await.unwrap_or_default());
        }
        Ok(highest)
    })
}
