//! What does not answer holds up nothing else: an engine, a connection to the API server.

mod api_server;
mod fake_nodes;

use std::time::Duration;

use fake_nodes::{Cluster, nodes_ready};
use serde_json::json;

/// Far more than what is looked at takes, on a loaded machine, too.
const SECONDS: Duration = Duration::from_secs(10);

#[tokio::test]
async fn engines_that_hold_snapshots_back_hold_nothing_else_up() {
    let cluster = Cluster::new(&["n1"], 21).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    cluster.create("demo", 1);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    cluster.ticket(Some("n1"));
    cluster.wait("attached", |c| c.volume("state") == "attached").await;
    cluster.machine().chains_are_held = true;
    for i in 0..40 {
        let spec = json!({ "volume": "demo", "createSnapshot": true });
        cluster.server.apply("snapshots", &format!("s{i}"), &json!({ "spec": spec }));
    }
    let asked =
        |c: &Cluster| c.server.all("snapshots").iter().any(|s| s["metadata"]["finalizers"].is_array());
    cluster.wait("the first is asked for", asked).await;
    cluster.create("other", 1);
    let stands =
        |c: &Cluster| c.server.get("volumes", "other").is_some_and(|v| v["status"]["state"] == "detached");
    cluster.wait_for(SECONDS, "another volume is made", stands).await;
    // The engine itself is looked at meanwhile: it may be that it waits for just that.
    cluster.server.apply("volumes", "demo", &json!({ "spec": { "size": "2147483648" } }));
    let grown = |c: &Cluster| {
        c.server.get("engines", "demo-e-0").is_some_and(|e| e["status"]["currentSize"] == "2147483648")
    };
    cluster.wait_for(SECONDS, "it grows", grown).await;
    // Nobody ever answers those that were asked; they are asked for again.
    cluster.machine().chains_are_held = false;
    cluster.wait("all are taken", |c| c.machine().snapshots.len() == 40).await;
}
