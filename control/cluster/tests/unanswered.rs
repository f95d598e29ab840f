//! What does not answer holds up nothing else: an engine, a connection to the API server.

mod api_server;
mod fake_nodes;

use std::time::Duration;

use fake_nodes::{Cluster, nodes_ready};
use serde_json::json;

/// Far more than what is looked at takes, on a loaded machine, too, and less than the 20 s after which a call to a node ends
/// by itself and gives its place back.
const SECONDS: Duration = Duration::from_secs(15);

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

#[tokio::test]
async fn a_leader_whose_renewals_nobody_answers_yields_and_leads_again() {
    let cluster = Cluster::new(&["n1"], 22).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    cluster.create("before", 1);
    let stands = |c: &Cluster, name: &str| {
        c.server.get("volumes", name).is_some_and(|v| v["status"]["state"] == "detached")
    };
    cluster.wait("a leader acts", |c| stands(c, "before")).await;
    cluster.server.swallow(Some("leases"));
    // A leader stops 12 s after its last renewal, and another one may begin after 20 s.
    tokio::time::sleep(Duration::from_secs(13)).await;
    cluster.create("meanwhile", 1);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(cluster.server.get("volumes", "meanwhile").is_some_and(|v| v["status"].is_null()));
    assert!(!cluster.server.all("engines").iter().any(|e| e["spec"]["volumeName"] == "meanwhile"));
    // What was asked is never answered; what is asked anew is.
    cluster.server.swallow(None);
    cluster.wait("it leads again", |c| stands(c, "meanwhile")).await;
}

fn budgets(cluster: &Cluster) -> usize {
    cluster.server.all("poddisruptionbudgets").len()
}

fn cordon(cluster: &Cluster, node: &str) {
    cluster.server.apply("core/nodes", node, &json!({ "spec": { "unschedulable": true } }));
}

/// What a leader asks for last may be carried out when another one leads already, and each may release one of the last two copies.
#[tokio::test(start_paused = true)]
async fn a_new_leader_releases_no_budget_at_first() {
    let cluster = Cluster::new(&["n1", "n2"], 24).await;
    cluster.wait("each node is protected", |c| budgets(c) == 2).await;
    cordon(&cluster, "n1");
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert_eq!(budgets(&cluster), 2);
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(budgets(&cluster), 1);
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_hears_late_which_budgets_there_are_releases_none() {
    let cluster = Cluster::new(&["n1", "n2"], 25).await;
    cluster.wait("each node is protected", |c| budgets(c) == 2).await;
    tokio::time::sleep(Duration::from_secs(70)).await;
    // It leads for 12 s after its last renewal.
    cluster.server.late(Some(("poddisruptionbudgets", Duration::from_secs(14))));
    cluster.server.swallow(Some("leases"));
    cordon(&cluster, "n1");
    tokio::time::sleep(Duration::from_secs(40)).await;
    assert_eq!(budgets(&cluster), 2, "another one may lead, and may have released n2");
    cluster.server.late(None);
    cluster.server.swallow(None);
    tokio::time::sleep(Duration::from_secs(90)).await;
    assert_eq!(budgets(&cluster), 1);
}

#[tokio::test]
async fn a_replica_goes_only_as_the_api_server_has_it() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 23).await;
    cluster.attached_volume().await;
    // Whoever leads has not heard of the newest changes: another one may have decided something since.
    cluster.server.hold_news(Some("replicas"));
    for replica in cluster.server.all("replicas") {
        let newer = json!({ "metadata": { "annotations": { "changed": "yes" } } });
        cluster.server.apply("replicas", replica["metadata"]["name"].as_str().unwrap(), &newer);
    }
    cluster.server.apply("volumes", "demo", &json!({ "spec": { "numberOfReplicas": 2 } }));
    let members = |c: &Cluster| {
        let engine = c.server.get("engines", "demo-e-0").unwrap();
        engine["status"]["replicaModeMap"].as_object().map_or(0, serde_json::Map::len)
    };
    cluster.wait("the engine lets go of one", |c| members(c) == 2).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let going = |r: &serde_json::Value| !r["metadata"]["deletionTimestamp"].is_null();
    assert!(!cluster.server.all("replicas").iter().any(going), "what it was decided on is old");
    cluster.server.hold_news(None);
    cluster.wait("it goes", |c| c.server.all("replicas").len() == 2).await;
}
