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

/// Each list has all processes of a node: asked for by each look at one of them they grow as its square.
#[tokio::test(start_paused = true)]
async fn at_rest_processes_are_listed_with_the_rounds_however_many_there_are() {
    let cluster = Cluster::new(&["n1"], 26).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    for i in 0..4 {
        let volume = format!("v{i}");
        // Each volume has its own.
        cluster.machine().generations.clear();
        cluster.create(&volume, 1);
        let tickets = json!({ "spec": { "attachmentTickets": {
            "t": { "id": "t", "type": "longhorn-api", "nodeID": "n1" } } } });
        cluster.wait("its attachment", |c| c.server.get("volumeattachments", &volume).is_some()).await;
        cluster.server.apply("volumeattachments", &volume, &tickets);
        let is_up = |c: &Cluster| {
            c.server.get("volumes", &volume).is_some_and(|v| v["status"]["robustness"] == "healthy")
        };
        cluster.wait("it is up", is_up).await;
    }
    tokio::time::sleep(Duration::from_secs(30)).await;
    let before = cluster.machine().lists;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let lists = cluster.machine().lists - before;
    assert!((1..=15).contains(&lists), "{lists} lists in a minute");
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_manager_goes_an_hour_after_its_node_has() {
    let cluster = Cluster::new(&["n1"], 27).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    let lease = |c: &Cluster, node: &str| c.server.get("leases", &format!("longhorn-manager-{node}"));
    for node in ["gone", "known", "ours"] {
        let lease = json!({
            "metadata": { "labels": { "longhorn.io/manager-of": node } },
            "spec": { "holderIdentity": node, "renewTime": "2026-01-01T00:00:00.000000Z" },
        });
        cluster.server.apply("leases", &format!("longhorn-manager-{node}"), &lease);
    }
    cluster.server.apply("core/nodes", "known", &json!({ "metadata": {} }));
    cluster.server.apply("nodes", "ours", &json!({ "spec": {}, "status": {} }));
    tokio::time::sleep(Duration::from_secs(3500)).await;
    assert!(lease(&cluster, "gone").is_some());
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert!(lease(&cluster, "gone").is_none());
    assert!(["n1", "known", "ours"].iter().all(|node| lease(&cluster, node).is_some()));
}

#[tokio::test(start_paused = true)]
async fn the_key_of_a_volume_goes_from_a_node_an_hour_after_the_volume_has() {
    let cluster = Cluster::new(&["n1", "n2"], 28).await;
    cluster.wait("the nodes", |c| nodes_ready(c) == 2).await;
    cluster.create("demo", 1);
    cluster.wait("made", |c| c.volume("state") == "detached").await;
    cluster.ticket(Some("n1"));
    cluster.wait("attached", |c| c.volume("state") == "attached").await;
    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    let lay = |c: &Cluster, node: &str, volume: &str| c.machine().keys.insert((node.into(), volume.into()));
    for node in ["n1", "n2"] {
        lay(&cluster, node, "demo");
        lay(&cluster, node, "gone");
    }
    let keys =
        |c: &Cluster| c.machine().keys.iter().map(|(node, v)| format!("{node}/{v}")).collect::<Vec<_>>();
    tokio::time::sleep(Duration::from_secs(3500)).await;
    assert_eq!(keys(&cluster).len(), 4);
    // Nothing is known while the API server is away.
    cluster.server.fail(100);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(keys(&cluster).len(), 4);
    cluster.server.fail(0);
    tokio::time::sleep(Duration::from_secs(3700)).await;
    assert_eq!(keys(&cluster), ["n1/demo", "n2/demo"]);
}
