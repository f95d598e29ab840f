//! What people's programs ask of the managers through the API server, and wait for.

use std::time::Duration;

use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use thiserror::Error;

use super::Clients;
use super::desk::is_missing;
use crate::api::{Conditions, Volume};
use crate::plan::trim::{REQUESTED_AT, TRIMMED};

/// Between two looks at the answer.
const LOOK: Duration = Duration::from_secs(1);

/// What came of a request to trim a volume's file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trimmed {
    /// The node that has it mounted.
    pub node: String,
    /// One sentence of that node's manager.
    pub message: String,
}

/// Why nothing was trimmed, as far as is known.
#[derive(Debug, Error)]
pub enum RequestError {
    /// Nothing names an API server.
    #[error("no cluster is known here: {0}")]
    NoCluster(Box<kube::Error>),
    /// The API server refused or does not answer.
    #[error("the API server: {0}")]
    Api(Box<kube::Error>),
    /// There is no such volume.
    #[error("there is no volume {0} in the cluster")]
    Missing(String),
    /// The managers' answer.
    #[error("{0}")]
    Refused(String),
    /// There is no answer.
    #[error(
        "nobody has answered within {} s: the condition Trimmed of the Volume will tell, if the manager of its node runs",
        .0.as_secs()
    )]
    NotYet(Duration),
}

/// Asks for a volume's file system to be trimmed, and waits for that. The API server is the one that `KUBECONFIG` or the pod's
/// service account names.
///
/// # Errors
/// [`RequestError`]. What was asked for may be carried out yet after the last one.
pub async fn request_trim(
    namespace: &str,
    volume: &str,
    patience: Duration,
) -> Result<Trimmed, RequestError> {
    let clients = Clients::of_this_place().await.map_err(|e| RequestError::NoCluster(Box::new(e)))?;
    trim(clients.requests, namespace, volume, patience).await
}

/// The same with an API server that is known.
///
/// # Errors
/// [`RequestError`].
pub async fn trim(
    client: Client,
    namespace: &str,
    volume: &str,
    patience: Duration,
) -> Result<Trimmed, RequestError> {
    let volumes: Api<Volume> = Api::namespaced(client, namespace);
    let failed = |e: kube::Error| match is_missing(&e) {
        true => RequestError::Missing(volume.to_owned()),
        false => RequestError::Api(Box::new(e)),
    };
    // With the fractions of a second: two requests are two.
    let request = k8s_openapi::jiff::Timestamp::now().to_string();
    let patch = json!({ "metadata": { "annotations": { REQUESTED_AT: request } } });
    volumes.patch(volume, &PatchParams::default(), &Patch::Merge(patch)).await.map_err(failed)?;
    let begun = tokio::time::Instant::now();
    loop {
        let status = volumes.get(volume).await.map_err(failed)?.status.unwrap_or_default();
        let answer = status.conditions.get_condition(TRIMMED).filter(|c| c.last_probe_time == request);
        match answer {
            Some(answer) if answer.is_true() => {
                return Ok(Trimmed { node: status.current_node_id, message: answer.message.clone() });
            }
            Some(answer) => return Err(RequestError::Refused(answer.message.clone())),
            None if begun.elapsed() >= patience => return Err(RequestError::NotYet(patience)),
            None => tokio::time::sleep(LOOK).await,
        }
    }
}
