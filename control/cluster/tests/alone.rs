//! Nothing begins where Longhorn itself acts on the same resources: two engines would write one replica.

mod api_server;

use api_server::ApiServer;
use lh_cluster::run::{RunError, alone};
use serde_json::{Value, json};

const NAMESPACE: &str = "longhorn-system";

fn pod(labels: &Value, phase: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "labels": labels }, "status": { "phase": phase } })
}

/// What is said where a pod with these labels is in this phase.
async fn beside(labels: Value, phase: &str) -> Result<(), RunError> {
    let server = ApiServer::new(1);
    server.apply("core/pods", "somebody", &pod(&labels, phase));
    alone(&server.client(), NAMESPACE).await
}

#[tokio::test]
async fn longhorns_pods_keep_everything_from_beginning() {
    // A manager that was removed may have left instance managers, which hold replicas open.
    for labels in
        [json!({ "app": "longhorn-manager" }), json!({ "longhorn.io/component": "instance-manager" })]
    {
        for phase in ["Running", "Pending"] {
            let refused = beside(labels.clone(), phase).await.unwrap_err();
            assert!(matches!(&refused, RunError::Longhorn { pod, .. } if pod == "somebody"), "{refused}");
            assert!(refused.to_string().contains("Moving from Longhorn"), "it says what to do: {refused}");
        }
        beside(labels, "Succeeded").await.unwrap();
    }
    beside(
        json!({ "app.kubernetes.io/part-of": "longhorn", "app.kubernetes.io/component": "manager" }),
        "Running",
    )
    .await
    .unwrap();
}

#[tokio::test]
async fn an_api_server_that_fails_is_asked_again() {
    let server = ApiServer::new(7);
    server.fail(70);
    alone(&server.client(), NAMESPACE).await.unwrap();
}
