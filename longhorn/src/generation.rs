//! The generations that open replicas have seen, asked for over their control sockets.

use std::time::{Duration, Instant};

use control::host::Root;
use control::proto::ptypes::replica_service_client::ReplicaServiceClient;
use lh_block::Generation;

use crate::reader::{ReplicaAt, look};

/// How long a replica may take to say that it is open.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

/// How long an engine that has died may still be seen: its ring outlives it.
const PREDECESSOR: Duration = Duration::from_secs(5);

/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// The highest generation that a replica of the root has seen; `None`: it is not open.
pub(crate) async fn seen_by(root: &Root, replica: &str) -> Option<Generation> {
    let ask = async {
        let channel = control::transport::connect(&root.control_socket(replica)).await.ok()?;
        let answer = ReplicaServiceClient::new(channel).replica_get(()).await.ok()?;
        Some(Generation::from(answer.into_inner().replica?.generation))
    };
    tokio::time::timeout(ANSWER_PATIENCE, ask).await.ok().flatten()
}

/// A replica that has an engine that lives, and goes on to.
pub(crate) struct Served {
    pub(crate) replica: String,
    /// The highest generation that any of those who answered has seen.
    pub(crate) highest: Generation,
}

/// The highest that any of these has seen, as far as they answer, wherever they are.
///
/// # Errors
/// [`Served`].
pub(crate) fn highest_seen(replicas: &[ReplicaAt]) -> Result<Generation, Served> {
    let until = Instant::now() + PREDECESSOR;
    loop {
        let looks: Vec<_> = std::thread::scope(|scope| {
            let deadline = Instant::now() + ANSWER_PATIENCE;
            let threads: Vec<_> =
                replicas.iter().map(|at| (at, scope.spawn(move || look(at, deadline).ok()))).collect();
            threads.into_iter().filter_map(|(at, thread)| Some((at, thread.join().ok()??))).collect()
        });
        let highest = looks.iter().map(|(_, (seen, _))| *seen).max().unwrap_or_default();
        match looks.iter().find(|(_, (_, has_engine))| *has_engine) {
            None => return Ok(highest),
            Some((at, _)) if Instant::now() > until => {
                return Err(Served { replica: at.replica.clone(), highest });
            }
            Some(_) => std::thread::sleep(LOOK),
        }
    }
}
