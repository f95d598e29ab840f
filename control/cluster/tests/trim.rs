//! Requests to trim volumes' file systems: answered once, by the node's manager or by the leader, whatever fails or is written
//! meanwhile.

mod api_server;
mod fake_nodes;

use fake_nodes::Cluster;
use lh_cluster::agent::TrimView;
use lh_cluster::api::NAMESPACE;
use lh_cluster::run::{RequestError, trim};
use serde_json::{Value, json};
use std::time::Duration;

fn condition(cluster: &Cluster) -> Value {
    let conditions = cluster.volume("conditions").as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|c| c["type"] == "Trimmed").unwrap_or_default()
}

fn request(cluster: &Cluster, at: &str) {
    let annotations = json!({ "longhorn.io/trim-requested-at": at });
    cluster.server.apply("volumes", "demo", &json!({ "metadata": { "annotations": annotations } }));
}

#[tokio::test]
async fn a_request_is_carried_out_once_and_a_volume_on_no_node_has_the_leaders_answer() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 1).await;
    cluster.attached_volume().await;
    cluster.machine().trims.insert("demo".to_owned(), vec![]);
    cluster.machine().trimming = Some(TrimView { running: true, bytes: 1, error: String::new() });
    request(&cluster, "2026-01-01T00:00:00Z");
    cluster.wait("the driver is asked", |c| c.machine().trims["demo"].len() > 1).await;
    assert_eq!(condition(&cluster), Value::Null, "it is not through yet");
    cluster.machine().trimming = Some(TrimView { running: false, bytes: 4096, error: String::new() });
    cluster.wait("answered", |c| condition(c)["lastProbeTime"] == "2026-01-01T00:00:00Z").await;
    assert_eq!(condition(&cluster)["status"], "True");
    assert!(condition(&cluster)["message"].as_str().unwrap().starts_with("4096 bytes"));
    let asked = cluster.machine().trims["demo"].clone();
    assert!(
        asked.iter().all(|(node, request)| node == "n1" && request == "2026-01-01T00:00:00Z"),
        "{asked:?}"
    );
    // Whatever else is written to the volume, nobody is asked again.
    cluster.server.apply("volumes", "demo", &json!({ "spec": { "size": "2147483648" } }));
    cluster
        .wait("grown", |c| {
            c.server.get("engines", "demo-e-0").unwrap()["status"]["currentSize"] == "2147483648"
        })
        .await;
    assert_eq!(cluster.machine().trims["demo"].len(), asked.len());

    let ask = async || {
        let patience = Duration::from_secs(30);
        trim(cluster.server.client(), NAMESPACE, "demo", patience).await
    };
    let done = ask().await.unwrap();
    assert!(done.node == "n1" && done.message.starts_with("4096 bytes"), "{done:?}");
    cluster.machine().trimming = Some(TrimView { running: false, bytes: 0, error: "it broke".to_owned() });
    let failed = ask().await.unwrap_err();
    assert!(matches!(&failed, RequestError::Refused(why) if why.contains("it broke")), "{failed}");

    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    let refused = ask().await.unwrap_err();
    assert!(matches!(&refused, RequestError::Refused(why) if why.contains("not attached")), "{refused}");
    assert!(condition(&cluster)["status"] == "False" && condition(&cluster)["reason"] == "Refused");
}

#[tokio::test]
async fn a_request_is_answered_though_the_api_server_fails_now_and_then() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 7).await;
    cluster.attached_volume().await;
    cluster.machine().trims.insert("demo".to_owned(), vec![]);
    cluster.machine().trimming = Some(TrimView { running: false, bytes: 7, error: String::new() });
    cluster.server.fail(30);
    request(&cluster, "2026-01-01T00:00:00Z");
    cluster.wait("answered", |c| condition(c)["status"] == "True").await;
    cluster.server.fail(0);
}
