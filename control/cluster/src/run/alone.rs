//! Making sure that nobody else acts on these resources.
//!
//! Longhorn's own manager would start engines for the same volumes, and its instance managers hold the replicas'
//! directories open without a lock that anybody here could see: two engines would write one replica. So nothing begins
//! while a pod of either is there.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};

use super::RunError;
use crate::api::Volume;

/// Labels that Longhorn's pods have (longhorn-manager, `types/types.go` and the chart's templates), and ours have not.
const LONGHORNS: [&str; 2] = ["app=longhorn-manager", "longhorn.io/component=instance-manager"];

/// Between two attempts to reach an API server that does not answer.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// Returns when it is sure that Longhorn does not act in this namespace and that the definitions are there. An API server
/// that does not answer is waited for.
///
/// # Errors
/// [`RunError::Longhorn`], [`RunError::Definitions`], or a clear refusal of the API server.
pub async fn alone(client: &Client, namespace: &str) -> Result<(), RunError> {
    loop {
        match look(client, namespace).await {
            Err(RunError::Api(e)) if passes(&e) => {
                tracing::warn!(error = %e, "the API server does not answer; it is asked again");
                tokio::time::sleep(ASK_AGAIN).await;
            }
            other => return other,
        }
    }
}

async fn look(client: &Client, namespace: &str) -> Result<(), RunError> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    for label in LONGHORNS {
        let found = pods.list(&ListParams::default().labels(label)).await.map_err(Box::new)?;
        if let Some(pod) = found.items.iter().find(|pod| may_act(pod)) {
            return Err(RunError::Longhorn { namespace: namespace.to_owned(), pod: pod.name_any() });
        }
    }
    let volumes: Api<Volume> = Api::namespaced(client.clone(), namespace);
    match volumes.list(&ListParams::default().limit(1)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Err(RunError::Definitions),
        Err(e) => Err(Box::new(e).into()),
    }
}

/// False for a pod all of whose processes have ended.
fn may_act(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    !matches!(phase, Some("Succeeded" | "Failed"))
}

/// True for what another attempt may not meet: everything but a clear refusal.
fn passes(e: &kube::Error) -> bool {
    match e {
        kube::Error::Api(status) => status.code >= 500 || status.code == 429,
        kube::Error::Service(_) | kube::Error::HyperError(_) => true,
        _ => false,
    }
}
