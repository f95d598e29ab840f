//! The managers of three nodes against an API server in memory, with agents that only fake the processes: from a volume
//! to a running engine with replicas, over faults, and back to nothing.

mod api_server;
mod fake_nodes;

use std::time::{Duration, Instant};

use control::authority::{RemoteAuthority, Reply};
use control::logging::Level;
use fake_nodes::{Cluster, FakeEngine, nodes_ready};
use lh_block::{Epoch, Generation, Instance};
use lh_cluster::agent::DeviceId;
use lh_cluster::api::SnapshotLimits;
use lh_cluster::plan::instance_manager::RunBy;
use serde_json::{Value, json};

/// The node's manager is away, and the others have seen it.
async fn goes_silent(cluster: &mut Cluster, name: &str) {
    cluster.stop(name).await;
    let silent = |c: &Cluster| {
        let node = c.server.get("nodes", name).unwrap();
        node["status"]["conditions"].as_array().unwrap().iter().any(|c| c["reason"] == "ManagerPodDown")
    };
    cluster.wait(&format!("{name} is silent"), silent).await;
}

#[tokio::test]
async fn a_volume_from_its_creation_to_its_end() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 1).await;
    cluster.attached_volume().await;
    let engine = cluster.server.get("engines", "demo-e-0").unwrap();
    assert_eq!(engine["status"]["endpoint"], "/dev/longhorn/demo");
    let modes = engine["status"]["replicaModeMap"].as_object().unwrap();
    assert!(modes.len() == 3 && modes.values().all(|m| m == "RW"), "{modes:?}");
    let satisfied = |c: &Cluster| {
        let attachment = c.server.get("volumeattachments", "demo").unwrap();
        attachment["status"]["attachmentTicketStatuses"]["csi"]["satisfied"] == true
    };
    cluster.wait("the ticket is satisfied", satisfied).await;
    assert_eq!(cluster.volume("generation"), "4294967296");

    cluster.server.apply("volumes", "demo", &json!({ "spec": { "size": "2147483648" } }));
    cluster
        .wait("grown", |c| {
            c.server.get("engines", "demo-e-0").is_some_and(|e| e["status"]["currentSize"] == "2147483648")
        })
        .await;

    let limits = |count, bytes| SnapshotLimits { count, bytes };
    assert_eq!(cluster.machine().engines["demo-e-0"][0].limits, limits(250, 0), "what the settings say");
    let limited = json!({ "spec": { "snapshotMaxCount": 7, "snapshotMaxSize": "4294967296" } });
    cluster.server.apply("volumes", "demo", &limited);
    cluster
        .wait("limited while it is up", |c| {
            let status = c.server.get("engines", "demo-e-0").map(|e| e["status"].clone()).unwrap_or_default();
            let told = (&status["snapshotMaxCount"], &status["snapshotMaxSize"]);
            c.machine().engines["demo-e-0"][0].limits == limits(7, 1 << 32)
                && told == (&json!(7), &json!("4294967296"))
        })
        .await;

    let rebuilds = |c: &Cluster| {
        let limits = c.machine().engines["demo-e-0"][0].rebuild_limits;
        (limits.bytes_per_second, limits.at_once)
    };
    assert_eq!(rebuilds(&cluster), (0, 1), "what the settings say");
    cluster.server.apply("settings", "replica-rebuilding-bandwidth-limit", &json!({ "value": "50" }));
    cluster.server.apply("settings", "replica-rebuild-concurrent-sync-limit", &json!({ "value": "3" }));
    cluster.wait("rebuilds are held back", |c| rebuilds(c) == (50 << 20, 3)).await;
    let own = json!({ "spec": { "replicaRebuildingBandwidthLimit": 3, "rebuildConcurrentSyncLimit": 5 } });
    cluster.server.apply("volumes", "demo", &own);
    cluster.wait("as the volume itself says", |c| rebuilds(c) == (3 << 20, 5)).await;
    let told =
        |c: &Cluster| c.server.get("engines", "demo-e-0").map(|e| e["status"].clone()).unwrap_or_default();
    cluster.wait("it says so", |c| told(c)["rebuildConcurrentSyncLimit"] == 5).await;

    cluster.ticket(Some("n2"));
    cluster
        .wait("attached to n2", |c| c.volume("currentNodeID") == "n2" && c.volume("state") == "attached")
        .await;
    assert!(cluster.machine().engines["demo-e-0"].iter().all(|e| e.node == "n2"), "one engine, on n2");
    cluster.wait("the next engine is told, too", |c| rebuilds(c) == (3 << 20, 5)).await;
    assert_eq!(cluster.volume("generation"), (2_u64 << 32).to_string());
    assert_eq!(cluster.machine().engines["demo-e-0"][0].limits, limits(7, 1 << 32), "from its start");

    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    assert!(cluster.machine().replicas.is_empty());
    cluster.server.delete("volumes", "demo");
    cluster
        .wait("gone", |c| {
            ["volumes", "engines", "replicas", "volumeattachments", "core/secrets"]
                .iter()
                .all(|k| c.server.all(k).is_empty())
        })
        .await;
    assert!(cluster.machine().directories.is_empty(), "the data is gone, too");
}

#[tokio::test]
async fn a_node_gets_the_disks_and_tags_that_kubernetes_names_for_it_whenever_that_is() {
    let mut cluster = Cluster::new(&[], 19).await;
    cluster.server.apply("settings", "create-default-disk-labeled-nodes", &json!({ "value": "true" }));
    cluster.server.apply("core/nodes", "n1", &json!({ "metadata": {} }));
    cluster.start("n1");
    let node = |c: &Cluster| c.server.get("nodes", "n1").unwrap_or_default();
    let conditions = |c: &Cluster| node(c)["status"]["conditions"].as_array().cloned().unwrap_or_default();
    cluster.wait("the node", |c| !conditions(c).is_empty()).await;
    assert!(
        node(&cluster)["spec"]["disks"].as_object().is_none_or(serde_json::Map::is_empty),
        "nobody asks for one"
    );
    let asks = |disks: &str| {
        let labels = json!({ "node.longhorn.io/create-default-disk": "config" });
        let annotations = json!({
            "node.longhorn.io/default-disks-config": disks,
            "node.longhorn.io/default-node-tags": "[\"fast\"]",
        });
        let metadata = json!({ "labels": labels, "annotations": annotations });
        cluster.server.apply("core/nodes", "n1", &json!({ "metadata": metadata }));
    };
    let says = |c: &Cluster, word: &str| {
        conditions(c).iter().any(|c| c["message"].as_str().is_some_and(|text| text.contains(word)))
    };
    asks("[/mnt/a]");
    cluster.wait("it says what is wrong", |c| says(c, "JSON array")).await;
    asks(r#"[{"name":"ssd","path":"/mnt/a","allowScheduling":true,"tags":["ssd"]}]"#);
    cluster.wait("it has its disk", |c| nodes_ready(c) == 1 && !says(c, "JSON array")).await;
    let spec = node(&cluster)["spec"].clone();
    assert_eq!((&spec["disks"]["ssd"]["path"], &spec["tags"]), (&json!("/mnt/a"), &json!(["fast"])));
}

#[tokio::test]
async fn a_node_whose_first_disk_cannot_be_used_is_there_without_it_and_gets_it_later() {
    let mut cluster = Cluster::new(&[], 29).await;
    cluster.machine().diskless.insert("n1".to_owned());
    cluster.add("n1");
    let node = |c: &Cluster| c.server.get("nodes", "n1").unwrap_or_default();
    let condition = |c: &Cluster, kind: &str| {
        let all = node(c)["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|c| c["type"] == kind)
    };
    let lacks = |c: &Cluster| condition(c, "DefaultDisksAndTags");
    cluster.wait("it says why it has none", |c| lacks(c).is_some()).await;
    let told = lacks(&cluster).unwrap();
    assert!(told["message"].as_str().unwrap().contains("/root-n1: No such file"), "{told}");
    assert_eq!(condition(&cluster, "Ready").unwrap()["status"], "True", "volumes may be attached there");
    cluster.machine().diskless.clear();
    cluster.server.apply("core/nodes", "n1", &json!({ "metadata": { "labels": { "looked": "again" } } }));
    cluster.wait("it has its disk", |c| nodes_ready(c) == 1 && lacks(c).is_none()).await;
    let disks = node(&cluster)["spec"]["disks"].clone();
    let (name, disk) = disks.as_object().unwrap().iter().next().unwrap();
    assert!(name.starts_with("default-disk-") && disk["storageReserved"].as_i64() > Some(0), "{disks}");
    // One that somebody takes away stays away.
    cluster.server.apply("nodes", "n1", &json!({ "spec": { "disks": { name: null } } }));
    let without = |c: &Cluster| nodes_ready(c) == 0;
    cluster.wait("it has lost its disk", without).await;
    cluster.server.apply("nodes", "n1", &json!({ "spec": { "tags": ["seen"] } }));
    cluster.server.apply("core/nodes", "n1", &json!({ "spec": { "unschedulable": true } }));
    cluster
        .wait("it was looked at", |c| condition(c, "Schedulable").is_some_and(|c| c["reason"] == "Cordoned"))
        .await;
    assert!(without(&cluster) && lacks(&cluster).is_none());
}

/// How often a node was called dead from a write on, and how many writes of it there were.
fn called_dead(cluster: &Cluster, node: &str, from: usize) -> (usize, usize) {
    let later = cluster.server.history("nodes", node).split_off(from);
    let is_dead = |node: &&Value| {
        let all = node["status"]["conditions"].as_array();
        all.is_some_and(|all| all.iter().any(|c| c["reason"] == "ManagerPodDown"))
    };
    (later.iter().filter(is_dead).count(), later.len())
}

#[tokio::test]
async fn a_node_that_joins_or_is_back_is_not_called_dead_until_it_is_counted() {
    let mut cluster = Cluster::new(&["n1"], 32).await;
    cluster.wait("a leader acts", |c| nodes_ready(c) == 1 && !c.server.all("engineimages").is_empty()).await;
    // Replicas are placed on nodes that count.
    let counts = |c: &Cluster, volume: &str| {
        let placed = |r: &Value| r["spec"]["volumeName"] == *volume && r["spec"]["nodeID"] == "n2";
        c.server.all("replicas").iter().any(placed)
    };
    cluster.add("n2");
    cluster.create("first", 2);
    cluster.wait("it counts", |c| counts(c, "first")).await;
    let (dead, writes) = called_dead(&cluster, "n2", 0);
    assert!(dead == 0 && writes < 10, "called dead in {dead} of {writes} writes");

    goes_silent(&mut cluster, "n2").await;
    let from = cluster.server.history("nodes", "n2").len();
    cluster.create("second", 2);
    cluster.start("n2");
    cluster.wait("it counts again", |c| counts(c, "second")).await;
    let (dead, writes) = called_dead(&cluster, "n2", from);
    assert!(dead == 0 && writes < 10, "called dead in {dead} of {writes} writes after it was back");
}

#[tokio::test]
async fn a_node_whose_manager_never_comes_is_called_dead_after_a_term() {
    let cluster = Cluster::new(&["n1"], 33).await;
    cluster.wait("a leader acts", |c| nodes_ready(c) == 1 && !c.server.all("engineimages").is_empty()).await;
    // As Longhorn has left it.
    let ready = json!({ "type": "Ready", "status": "True" });
    let left = json!({ "spec": { "allowScheduling": true }, "status": { "conditions": [ready] } });
    cluster.server.apply("nodes", "away", &left);
    cluster.wait("it is dead", |c| called_dead(c, "away", 0).0 == 1).await;
}

#[tokio::test]
async fn a_lease_that_somebody_removes_is_no_death() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 34).await;
    cluster.attached_volume().await;
    for node in ["n1", "n2", "n3"] {
        cluster.server.delete("leases", &format!("longhorn-manager-{node}"));
    }
    let back = |c: &Cluster| c.server.all("leases").len() == 4;
    cluster.wait("they are written anew", back).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    let dead: usize = ["n1", "n2", "n3"].iter().map(|node| called_dead(&cluster, node, 0).0).sum();
    assert_eq!(dead, 0);
    assert_eq!(cluster.volume("state"), "attached");
}

/// A pod of a node with the volume `demo`, which a controller makes anew, or nobody; it began long ago, or will have.
fn pod(name: &str, node: &str, owner: Option<&str>, began: &str) -> Value {
    let owner = owner.map(
        |kind| json!({ "apiVersion": "apps/v1", "kind": kind, "name": "s", "uid": "s", "controller": true }),
    );
    let owners: Vec<Value> = owner.into_iter().collect();
    json!({
        "metadata": { "namespace": "apps", "name": name, "uid": name, "ownerReferences": owners, "creationTimestamp": began },
        "spec": {
            "nodeName": node, "containers": [],
            "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": "data" } }],
        },
        "status": { "startTime": began },
    })
}

#[tokio::test]
async fn pods_whose_device_was_lost_begin_anew_where_somebody_makes_them() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 35).await;
    let device = |sequence| DeviceId { boot: "boot".to_owned(), sequence };
    cluster.machine().devices.insert("demo-e-0".to_owned(), device(7));
    cluster.attached_volume().await;
    let told = |c: &Cluster, what: &str| c.server.get("engines", "demo-e-0").unwrap()["status"][what].clone();
    cluster.wait("the device is known", |c| told(c, "device") == "boot/7").await;
    let claim = json!({ "namespace": "apps", "name": "data" });
    let source = json!({ "driver": "driver.longhorn.io", "volumeHandle": "demo" });
    let volume = json!({ "metadata": { "name": "pv" }, "spec": { "csi": source, "claimRef": claim } });
    cluster.server.apply("core/persistentvolumes", "pv", &volume);
    let (before, after) = ("2026-01-01T00:00:00Z", "2126-01-01T00:00:00Z");
    let spared = json!({ "value": "apps/DaemonSet" });
    let setting = "blacklist-for-auto-delete-pod-when-volume-detached-unexpectedly";
    cluster.server.apply("settings", setting, &spared);
    let pods = [
        ("refused", "n1", Some("StatefulSet"), before),
        ("old", "n1", Some("StatefulSet"), before),
        ("new", "n1", Some("StatefulSet"), after),
        ("spared", "n1", Some("DaemonSet"), before),
        ("somebodys", "n1", None, before),
        ("elsewhere", "n2", Some("StatefulSet"), before),
    ];
    for (name, node, owner, began) in pods {
        cluster.server.apply("core/pods", name, &pod(name, node, owner, began));
    }
    // What a webhook forbids for one keeps no other.
    cluster.server.protect("core/pods", "refused");
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(cluster.server.all("core/pods").len(), pods.len(), "nothing was lost");
    cluster.machine().devices.insert("demo-e-0".to_owned(), device(8));
    cluster.wait("it has to begin anew", |c| c.server.get("core/pods", "old").is_none()).await;
    assert_ne!(told(&cluster, "deviceLostAt"), "");
    assert_ne!(cluster.volume("remountRequestedAt"), "");
    tokio::time::sleep(Duration::from_secs(6)).await;
    let left: Vec<Value> =
        cluster.server.all("core/pods").iter().map(|p| p["metadata"]["name"].clone()).collect();
    assert_eq!(left, ["elsewhere", "new", "refused", "somebodys", "spared"]);
    assert_eq!(cluster.volume("state"), "attached");
}

#[tokio::test]
async fn a_pod_that_cannot_be_deleted_keeps_no_other_on_its_dead_node() {
    let mut cluster = Cluster::new(&["n1", "n2"], 31).await;
    cluster.wait("two nodes", |c| nodes_ready(c) == 2).await;
    let policy = json!({ "value": "delete-both-statefulset-and-deployment-pod" });
    cluster.server.apply("settings", "node-down-pod-deletion-policy", &policy);
    let claim = json!({ "namespace": "apps", "name": "data" });
    let source = json!({ "driver": "driver.longhorn.io", "volumeHandle": "demo" });
    let volume = json!({ "metadata": { "name": "pv" }, "spec": { "csi": source, "claimRef": claim } });
    cluster.server.apply("core/persistentvolumes", "pv", &volume);
    for name in ["a", "b"] {
        let owner = json!({
            "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "s", "uid": "s", "controller": true
        });
        let pod = json!({
            "metadata": {
                "namespace": "apps", "name": name, "uid": name, "ownerReferences": [owner],
                "deletionTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {
                "nodeName": "n2", "containers": [],
                "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": "data" } }],
            },
        });
        cluster.server.apply("core/pods", name, &pod);
    }
    cluster.server.protect("core/pods", "a");
    goes_silent(&mut cluster, "n2").await;
    cluster.wait("the other one is gone", |c| c.server.get("core/pods", "b").is_none()).await;
    assert!(cluster.server.get("core/pods", "a").is_some());
}

#[tokio::test]
async fn defaults_that_were_given_count_from_the_start_and_go_before_a_users_value_once() {
    let mut cluster = Cluster::new(&[], 23).await;
    cluster.given.give("create-default-disk-labeled-nodes", "true").unwrap();
    cluster.given.give("default-replica-count", "2").unwrap();
    cluster.server.apply("core/nodes", "n1", &json!({ "metadata": {} }));
    cluster.start("n1");
    let value = |c: &Cluster, name: &str| c.server.get("settings", name).unwrap_or_default()["value"].clone();
    cluster.wait("all settings", |c| value(c, "storage-reserved-percentage-for-default-disk") == "30").await;
    assert_eq!(value(&cluster, "default-replica-count"), "2");
    let disks = |c: &Cluster| c.server.get("nodes", "n1").map(|n| n["spec"]["disks"].clone());
    cluster.wait("the node", |c| disks(c).is_some()).await;
    let none = disks(&cluster).is_some_and(|d| d.as_object().is_none_or(serde_json::Map::is_empty));
    assert!(none, "the node has a disk that nobody asked for, made before the setting was there");

    // What a user writes stays when managers begin anew, until another default is given.
    cluster.server.apply("settings", "default-replica-count", &json!({ "value": "1" }));
    for (name, new, stays) in [("snapshot-max-count", "100", "1"), ("default-replica-count", "3", "3")] {
        cluster.given.give(name, new).unwrap();
        cluster.stop("n1").await;
        cluster.start("n1");
        cluster.wait(&format!("{name} has its new default"), |c| value(c, name) == new).await;
        assert_eq!(value(&cluster, "default-replica-count"), stays);
    }
}

#[tokio::test]
async fn a_node_that_is_emptied_gives_its_replica_to_another() {
    let cluster = Cluster::new(&["n1", "n2", "n3", "n4"], 4).await;
    cluster.wait("four nodes", |c| nodes_ready(c) == 4).await;
    cluster.attached_volume().await;
    let on = |c: &Cluster, node: &str| c.server.all("replicas").iter().any(|r| r["spec"]["nodeID"] == *node);
    let emptied = if on(&cluster, "n2") { "n2" } else { "n3" };
    cluster.server.apply(
        "nodes",
        emptied,
        &json!({ "spec": { "allowScheduling": false, "evictionRequested": true } }),
    );
    cluster
        .wait("the node is empty", |c| {
            !on(c, emptied) && c.server.all("replicas").len() == 3 && c.volume("robustness") == "healthy"
        })
        .await;
    assert!(
        !cluster.machine().directories.iter().any(|(disk, _)| disk.ends_with(emptied)),
        "its data is gone"
    );
}

/// Of two replicas of a volume whose majority decides its engine lets go of neither.
#[tokio::test]
async fn people_are_told_why_a_replica_stays_that_is_to_go() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 43).await;
    cluster.attached_volume().await;
    cluster.machine().replicas_are_held = true;
    cluster.server.apply("volumes", "demo", &json!({ "spec": { "numberOfReplicas": 2 } }));
    let says = |event: &Value| {
        let is_about = event["reason"] == "ReplicaKept" && event["regarding"]["kind"] == "Engine";
        is_about && event["note"].as_str().is_some_and(|note| note.contains("cannot leave: too few are left"))
    };
    cluster.wait("it is told", |c| c.server.all("events").iter().any(says)).await;
    assert_eq!(cluster.server.all("replicas").len(), 3);
}

// In simulated time: a new leader releases no budget in its first minute.
#[tokio::test(start_paused = true)]
async fn a_cordoned_node_may_be_drained_once_nothing_is_lost_with_it() {
    let cluster = Cluster::new(&["n1", "n2", "n3", "n4"], 9).await;
    cluster.wait("four nodes", |c| nodes_ready(c) == 4).await;
    cluster.attached_volume().await;
    let protected = |c: &Cluster, node: &str| {
        c.server.get("poddisruptionbudgets", &format!("instance-manager-{node}")).is_some()
    };
    let cordon = |node: &str, on: bool| {
        cluster.server.apply("core/nodes", node, &json!({ "spec": { "unschedulable": on } }));
    };
    let all = |c: &Cluster| c.server.all("poddisruptionbudgets").len() == 4;
    cluster.wait("each node is protected", all).await;
    let on = |c: &Cluster, node: &str| c.server.all("replicas").iter().any(|r| r["spec"]["nodeID"] == *node);
    let with_replica = if on(&cluster, "n2") { "n2" } else { "n3" };
    cordon(with_replica, true);
    cluster.wait("others hold everything", |c| !protected(c, with_replica)).await;
    assert!(on(&cluster, with_replica), "its replica stays");
    cordon(with_replica, false);
    cluster.wait("it is used again", all).await;

    let eviction = json!({ "value": "block-for-eviction" });
    cluster.server.apply("settings", "node-drain-policy", &eviction);
    cordon(with_replica, true);
    cluster.wait("it is empty", |c| !protected(c, with_replica) && !on(c, with_replica)).await;
    cordon(with_replica, false);
    cordon("n1", true);
    cluster.wait("n1 has no replica", |c| !on(c, "n1")).await;
    assert!(protected(&cluster, "n1"), "the volume is attached there");
    cluster.ticket(None);
    cluster.wait("n1 may go", |c| !protected(c, "n1")).await;
}

#[tokio::test]
async fn a_volume_with_data_on_a_drained_node_can_be_deleted() {
    let mut cluster = Cluster::new(&[], 20).await;
    // With no template nobody makes pods, as on nodes that are cordoned.
    cluster.run_by = RunBy::Pod;
    ["n1", "n2", "n3"].into_iter().for_each(|node| cluster.add(node));
    cluster.attached_volume().await;
    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    cluster.machine().away.insert("n3".to_owned());
    cluster.server.delete("volumes", "demo");
    cluster.wait("gone", |c| c.server.all("volumes").is_empty() && c.server.all("replicas").is_empty()).await;
    assert!(cluster.machine().directories.is_empty());
}

#[tokio::test]
async fn what_nothing_knows_is_told_and_goes_with_its_orphan() {
    let cluster = Cluster::new(&["n1"], 5).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    let stray = ("/root-n1".to_owned(), "gone-0a1b2c3d".to_owned());
    cluster.machine().directories.insert(stray.clone());
    cluster.wait("told", |c| c.server.all("orphans").len() == 1).await;
    assert!(cluster.machine().directories.contains(&stray), "it is only told of");
    let name = cluster.server.all("orphans")[0]["metadata"]["name"].as_str().unwrap().to_owned();
    cluster.server.delete("orphans", &name);
    cluster.wait("gone", |c| c.server.all("orphans").is_empty()).await;
    assert!(!cluster.machine().directories.contains(&stray));
}

#[tokio::test]
async fn what_belongs_to_a_replica_of_another_node_is_no_orphan() {
    let cluster = Cluster::new(&["n1"], 7).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    for name in ["orphan-resource-auto-deletion", "orphan-resource-auto-deletion-grace-period"] {
        let value = if name.ends_with("period") { "0" } else { "replica-data;instance" };
        cluster.server.apply("settings", name, &json!({ "value": value }));
    }
    // A disk that came from node n2, with a replica of it, and one that nobody knows.
    let spec = json!({ "nodeID": "n2", "diskID": "disk-of-n1", "dataDirectoryName": "moved-0a1b2c3d" });
    cluster.server.apply("replicas", "moved-r-0a1b2c3d", &json!({ "spec": spec }));
    let (known, stray) = ("moved-0a1b2c3d", "gone-0a1b2c3d");
    for name in [known, stray] {
        cluster.machine().directories.insert(("/root-n1".to_owned(), name.to_owned()));
    }
    let there = |c: &Cluster, name: &str| c.machine().directories.iter().any(|(_, d)| d == name);
    cluster.wait("the stray one goes by itself", |c| !there(c, stray)).await;
    assert!(there(&cluster, known), "a replica's data");
    assert_eq!(
        cluster.server.all("orphans").iter().filter(|o| o["spec"]["parameters"]["DataName"] == known).count(),
        0
    );
}

#[tokio::test]
async fn a_device_is_taken_away_where_the_volume_is_no_more_and_not_where_it_may_come_back() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 35).await;
    cluster.attached_volume().await;
    let left = |nodes: &[&str]| {
        let place = |node: &&str| (((*node).to_owned(), "demo".to_owned()), "1".to_owned());
        cluster.machine().stays.extend(nodes.iter().map(place));
    };
    let on =
        |c: &Cluster| -> Vec<String> { c.machine().stays.keys().map(|(node, _)| node.clone()).collect() };
    left(&["n1", "n2"]);
    cluster.wait("the one that is elsewhere", |c| on(c) == ["n1"]).await;
    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    left(&["n3"]);
    cluster.wait("one from before", |c| on(c) == ["n1"]).await;
    cluster.ticket(Some("n2"));
    cluster.wait("the volume is elsewhere", |c| on(c).is_empty()).await;
    cluster.server.delete("volumes", "demo");
    cluster.wait("gone", |c| c.server.get("volumes", "demo").is_none()).await;
    left(&["n1"]);
    cluster.wait("that of a volume that is gone", |c| on(c).is_empty()).await;
}

#[tokio::test]
async fn a_process_that_its_engine_left_behind_is_ended() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 8).await;
    cluster.attached_volume().await;
    // While its manager is away the volume goes elsewhere.
    goes_silent(&mut cluster, "n1").await;
    cluster.ticket(Some("n2"));
    cluster
        .wait("attached to n2", |c| c.volume("currentNodeID") == "n2" && c.volume("state") == "attached")
        .await;
    let on_n1 = |c: &Cluster| c.machine().engines["demo-e-0"].iter().any(|e| e.node == "n1");
    assert!(on_n1(&cluster), "nobody was there to end it");
    cluster.start("n1");
    cluster.wait("the old engine is ended", |c| !on_n1(c)).await;
}

#[tokio::test]
async fn what_was_on_a_burnt_down_node_is_forgotten_once_kubernetes_lacks_it() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 14).await;
    cluster.attached_volume().await;
    let all = cluster.server.all("replicas");
    let lost = all.iter().find(|r| r["spec"]["nodeID"] == "n3").unwrap();
    let lost = lost["metadata"]["name"].as_str().unwrap().to_owned();
    goes_silent(&mut cluster, "n3").await;
    cluster.server.delete("replicas", &lost);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(cluster.server.get("replicas", &lost).is_some(), "it may be back, with its data");
    cluster.server.delete("core/nodes", "n3");
    cluster.wait("forgotten", |c| c.server.get("replicas", &lost).is_none()).await;
}

/// An epoch that is just being stored may have been judged by the replicas as they were before.
#[tokio::test]
async fn the_data_of_a_deleted_replica_goes_after_the_volume_tells_of_it() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 25).await;
    cluster.attached_volume().await;
    let of_n3 = |c: &Cluster| c.server.all("replicas").into_iter().find(|r| r["spec"]["nodeID"] == "n3");
    let deleted = of_n3(&cluster).unwrap();
    let [name, uid] = ["name", "uid"].map(|key| deleted["metadata"][key].as_str().unwrap().to_owned());
    let directory = deleted["spec"]["dataDirectoryName"].as_str().unwrap().to_owned();
    let has_data = |c: &Cluster| c.machine().directories.iter().any(|(_, found)| *found == directory);
    cluster.server.fix("volumes", "demo");
    cluster.server.delete("replicas", &name);
    let stopped = |c: &Cluster| !c.machine().replicas.contains_key(&("n3".to_owned(), name.clone()));
    cluster.wait("its process is stopped", stopped).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(has_data(&cluster), "the volume cannot tell of it");
    cluster.server.fix("volumes", "another");
    cluster.wait("its data is gone", |c| !has_data(c)).await;
    assert_eq!(cluster.server.get("volumes", "demo").unwrap()["status"]["dataRemovedOf"], json!([uid]));
}

#[tokio::test]
async fn a_replica_of_a_lost_node_goes_though_its_volume_is_gone() {
    let cluster = Cluster::new(&["n1"], 17).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    // Somebody took the volume's finalizer off, so that all that it owned is deleted; of the nodes one burnt down.
    for (name, node, deleted) in [("lost", "burnt", true), ("kept", "burnt", false)] {
        let spec = json!({ "volumeName": "gone", "nodeID": node, "dataDirectoryName": name });
        let replica = json!({ "metadata": { "finalizers": ["longhorn.io"] }, "spec": spec });
        cluster.server.apply("replicas", name, &replica);
        if deleted {
            cluster.server.delete("replicas", name);
        }
    }
    cluster
        .wait("the one that is deleted is forgotten", |c| c.server.get("replicas", "lost").is_none())
        .await;
    assert!(cluster.server.get("replicas", "kept").is_some(), "nobody asked for that");
}

#[tokio::test]
async fn a_volume_that_longhorn_made_goes_though_nobody_takes_longhorns_finalizers_off() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 22).await;
    cluster.attached_volume().await;
    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    // Its webhooks put them on everything that was made; of what is made here only replicas, volumes and snapshots have one.
    let held = json!({ "metadata": { "finalizers": ["longhorn.io"] } });
    let all = [
        ("engines", "demo-e-0"),
        ("volumeattachments", "demo"),
        ("instancemanagers", "instance-manager-0a1b2c3d"),
        ("engineimages", "ei-0a1b2c3d"),
        ("nodes", "away"),
    ];
    for (kind, name) in all {
        cluster.server.apply(kind, name, &held);
    }
    cluster.server.delete("volumes", "demo");
    for (kind, name) in &all[2..] {
        cluster.server.delete(kind, name);
    }
    for (kind, name) in all {
        cluster.wait(&format!("{kind} {name} is gone"), |c| c.server.get(kind, name).is_none()).await;
    }
    cluster.wait("the volume is gone", |c| c.server.all("volumes").is_empty()).await;
}

#[tokio::test]
async fn an_engine_on_a_silent_node_ends_when_the_node_is_back_and_its_volume_gone() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 15).await;
    cluster.attached_volume().await;
    goes_silent(&mut cluster, "n1").await;
    cluster.server.delete("volumes", "demo");
    cluster.wait("the engine's resource is gone", |c| c.server.all("engines").is_empty()).await;
    assert_eq!(running(&cluster), ["demo-e-0@n1"], "nobody was there to end it");
    cluster.start("n1");
    cluster.wait("all of it is gone", |c| running(c).is_empty() && c.server.all("volumes").is_empty()).await;
}

#[tokio::test]
async fn a_volume_that_rests_is_made_whole_again_and_whoever_wants_it_goes_first() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 16).await;
    cluster.attached_volume().await;
    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    cluster.server.apply("settings", "offline-replica-rebuilding", &json!({ "value": "true" }));
    let applied = |c: &Cluster| {
        c.server.get("settings", "offline-replica-rebuilding").is_some_and(|s| s["status"]["applied"] == true)
    };
    cluster.wait("the setting is in force", applied).await;
    let tickets = |c: &Cluster| {
        let attachment = c.server.get("volumeattachments", "demo").unwrap();
        attachment["spec"]["attachmentTickets"].as_object().cloned().unwrap_or_default()
    };
    let word = |c: &Cluster| {
        let conditions = c.volume("conditions");
        let all = conditions.as_array().cloned().unwrap_or_default();
        let found = all.into_iter().find(|c| c["type"] == "OfflineRebuilding")?;
        Some((found["status"].as_str()?.to_owned(), found["reason"].as_str()?.to_owned()))
    };
    let healthy = |c: &Cluster| {
        let all = c.server.all("replicas");
        all.iter().filter(|r| r["spec"]["healthyAt"].as_str().is_some_and(|t| !t.is_empty())).count()
    };
    let waits = Some(("False".to_owned(), "Settling".to_owned()));
    let lose_one = |c: &Cluster| {
        let lost = c.server.all("replicas")[1]["metadata"]["name"].as_str().unwrap().to_owned();
        c.server.delete("replicas", &lost);
    };
    cluster.machine().rebuilds_are_held = true;
    lose_one(&cluster);
    cluster.wait("it says what it waits for", |c| word(c) == waits).await;
    let ticket = |c: &Cluster| tickets(c).get("volume-rebuilding-controller").cloned();
    cluster
        .wait("it is being rebuilt", |c| c.volume("robustness") == "degraded" && ticket(c).is_some())
        .await;
    assert_eq!(word(&cluster), Some(("True".to_owned(), String::new())));
    let ours = ticket(&cluster).unwrap();
    assert_eq!(ours["parameters"]["disableFrontend"], "true");
    let with =
        |c: &Cluster, node: &Value| c.server.all("replicas").iter().any(|r| r["spec"]["nodeID"] == *node);
    assert!(with(&cluster, &ours["nodeID"]) && with(&cluster, &ours["parameters"]["fillsOn"]));

    let elsewhere = if ours["nodeID"] == "n3" { "n2" } else { "n3" };
    cluster.ticket(Some(elsewhere));
    let goes_first = |c: &Cluster| {
        let satisfied =
            &c.server.get("volumeattachments", "demo").unwrap()["status"]["attachmentTicketStatuses"];
        c.volume("currentNodeID") == *elsewhere
            && satisfied["csi"]["satisfied"] == true
            && ticket(c).is_none()
    };
    cluster.wait("a workload goes first", goes_first).await;
    assert_eq!((word(&cluster), healthy(&cluster)), (None, 2));
    cluster.ticket(None);
    cluster.wait("it comes back", |c| ticket(c).is_some() && c.volume("state") == "attached").await;
    cluster.machine().rebuilds_are_held = false;
    let rests = |c: &Cluster| {
        healthy(c) == 3 && c.volume("state") == "detached" && tickets(c).is_empty() && word(c).is_none()
    };
    cluster.wait("it is whole, and rests", rests).await;
    assert!(cluster.machine().replicas.is_empty());
}

#[tokio::test]
async fn a_volume_that_rests_is_attached_for_its_snapshots_and_no_longer() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 18).await;
    cluster.wait("three nodes", |c| nodes_ready(c) == 3).await;
    cluster.machine().chains_are_told = true;
    cluster.create_volume();
    let rests = |c: &Cluster| {
        let attachment = c.server.get("volumeattachments", "demo").unwrap_or_default();
        let tickets = attachment["spec"]["attachmentTickets"].as_object().map_or(0, serde_json::Map::len);
        c.volume("state") == "detached" && tickets == 0
    };
    cluster.wait("detached", rests).await;
    let spec = json!({ "volume": "demo", "createSnapshot": true });
    cluster.server.apply("snapshots", "s1", &json!({ "spec": spec }));
    let taken =
        |c: &Cluster| c.server.get("snapshots", "s1").is_some_and(|s| s["status"]["readyToUse"] == true);
    cluster.wait("taken", taken).await;
    cluster.wait("detached again", rests).await;
    // The last one goes: nothing of it is left that anybody could look at.
    cluster.server.delete("snapshots", "s1");
    cluster.wait("gone", |c| c.server.all("snapshots").is_empty()).await;
    assert!(cluster.machine().snapshots.is_empty());
    cluster.wait("detached in the end", rests).await;
}

#[tokio::test]
async fn a_snapshot_that_nobody_named_gets_a_resource_which_goes_with_it() {
    const NAME: &str = "expand-8192-demo";
    let cluster = Cluster::new(&["n1", "n2", "n3"], 34).await;
    cluster.attached_volume().await;
    cluster.machine().chains_are_told = true;
    cluster.machine().snapshots.insert(NAME.to_owned());
    let named =
        |c: &Cluster| c.server.get("snapshots", NAME).is_some_and(|s| s["status"]["readyToUse"] == true);
    cluster.wait("named", named).await;
    let spec = &cluster.server.get("snapshots", NAME).unwrap()["spec"];
    assert_eq!((&spec["volume"], &spec["createSnapshot"]), (&json!("demo"), &Value::Null));

    // Folded away by itself: at no time does its resource say that a snapshot of this name is to be removed.
    cluster.machine().snapshots.remove(NAME);
    let none = |c: &Cluster| c.server.all("snapshots").is_empty();
    cluster.wait("gone with it", none).await;
    let asks = |s: &Value| !s["metadata"]["deletionTimestamp"].is_null();
    assert!(!cluster.server.history("snapshots", NAME).iter().any(asks));

    cluster.machine().snapshots.insert(NAME.to_owned());
    cluster.wait("named again", named).await;
    cluster.server.delete("snapshots", NAME);
    cluster.wait("removed by its resource", none).await;
    assert!(cluster.machine().snapshots.is_empty());
}

/// A clone has what it was copied from under the same name, which is its source's for as long as that has it.
#[tokio::test]
async fn what_a_clone_was_copied_from_gets_a_resource_once_its_source_has_none_of_that_name() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 55).await;
    cluster.attached_volume().await;
    cluster.machine().chains_are_told = true;
    let spec = json!({ "volume": "demo", "createSnapshot": true });
    cluster.server.apply("snapshots", "s1", &json!({ "spec": spec }));
    let of = |c: &Cluster| c.server.get("snapshots", "s1").map(|s| s["spec"]["volume"].clone());
    let taken =
        |c: &Cluster| c.server.get("snapshots", "s1").is_some_and(|s| s["status"]["readyToUse"] == true);
    cluster.wait("taken", taken).await;
    cluster.machine().own_snapshots.insert("copy-e-0".to_owned(), ["s1".to_owned()].into());
    cluster.machine().generations.clear();
    cluster.create("copy", 1);
    let state = |c: &Cluster| c.server.get("volumes", "copy").unwrap()["status"]["state"].clone();
    cluster.wait("detached", |c| state(c) == "detached").await;
    let ticket = json!({ "id": "csi", "type": "csi-attacher", "nodeID": "n2" });
    let wanted = json!({ "spec": { "attachmentTickets": { "csi": ticket } } });
    cluster.server.apply("volumeattachments", "copy", &wanted);
    let tells = |c: &Cluster| {
        c.server.get("engines", "copy-e-0").is_some_and(|e| e["status"]["snapshots"]["s1"].is_object())
    };
    cluster.wait("attached", |c| state(c) == "attached" && tells(c)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(of(&cluster), Some(json!("demo")));
    cluster.server.delete("snapshots", "s1");
    cluster.wait("the clone's", |c| of(c) == Some(json!("copy"))).await;
}

#[tokio::test]
async fn a_snapshot_that_its_engine_has_no_room_for_says_so_and_keeps_no_volume_attached() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 5).await;
    cluster.wait("three nodes", |c| nodes_ready(c) == 3).await;
    cluster.machine().chains_are_told = true;
    cluster.machine().chains_are_full = true;
    cluster.create_volume();
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    let spec = json!({ "volume": "demo", "createSnapshot": true });
    cluster.server.apply("snapshots", "s1", &json!({ "spec": spec }));
    let error = |c: &Cluster| {
        let snapshot = c.server.get("snapshots", "s1").unwrap_or_default();
        snapshot["status"]["error"].as_str().unwrap_or_default().to_owned()
    };
    cluster.wait("refused", |c| error(c).starts_with("TooManySnapshots: the volume has")).await;
    cluster.wait("detached again", |c| c.volume("state") == "detached").await;
    assert!(cluster.machine().snapshots.is_empty());
    // Once there is room it is taken with the next that is, or when the volume is attached.
    cluster.machine().chains_are_full = false;
    cluster.ticket(Some("n1"));
    let taken =
        |c: &Cluster| c.server.get("snapshots", "s1").is_some_and(|s| s["status"]["readyToUse"] == true);
    cluster.wait("taken", taken).await;
    assert_eq!(error(&cluster), "");
}

/// A head that a trim has made smaller, or a limit that was raised, is nothing that an engine tells of.
#[tokio::test]
async fn a_snapshot_that_was_refused_is_taken_once_there_is_room_though_nothing_else_happens() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 54).await;
    cluster.attached_volume().await;
    cluster.machine().chains_are_told = true;
    cluster.machine().chains_are_full = true;
    let tells = |c: &Cluster| {
        c.server
            .get("engines", "demo-e-0")
            .is_some_and(|e| e["status"]["snapshots"]["volume-head"].is_object())
    };
    cluster.wait("it tells of its chain", tells).await;
    let spec = json!({ "volume": "demo", "createSnapshot": true });
    cluster.server.apply("snapshots", "s1", &json!({ "spec": spec }));
    let status = |c: &Cluster| c.server.get("snapshots", "s1").unwrap()["status"].clone();
    cluster.wait("refused", |c| status(c)["error"].is_string()).await;
    // Whatever is told of the engine meanwhile has been.
    tokio::time::sleep(Duration::from_secs(6)).await;
    cluster.machine().chains_are_full = false;
    cluster.wait("taken", |c| status(c)["readyToUse"] == true).await;
    assert!(status(&cluster)["error"].is_null());
}

/// Whoever writes to a file system waits while it is frozen, each time that there turns out to be no room.
#[tokio::test(start_paused = true)]
async fn a_file_system_is_seldom_frozen_for_a_snapshot_that_there_is_no_room_for() {
    for (freezes, early, late) in [("disabled", 25, 10), ("enabled", 590, 15)] {
        let cluster = Cluster::new(&["n1", "n2", "n3"], 55).await;
        cluster.attached_volume().await;
        cluster.server.apply(
            "volumes",
            "demo",
            &json!({ "spec": { "freezeFilesystemForSnapshot": freezes } }),
        );
        cluster.machine().chains_are_told = true;
        cluster.machine().chains_are_full = true;
        let status = |c: &Cluster| c.server.get("snapshots", "s1").map(|s| s["status"].clone());
        // Whatever is told of the engine has been.
        tokio::time::sleep(Duration::from_secs(60)).await;
        let spec = json!({ "volume": "demo", "createSnapshot": true });
        cluster.server.apply("snapshots", "s1", &json!({ "spec": spec }));
        cluster.wait("refused", |c| status(c).is_some_and(|s| s["error"].is_string())).await;
        cluster.machine().chains_are_full = false;
        tokio::time::sleep(Duration::from_secs(early)).await;
        assert!(cluster.machine().snapshots.is_empty(), "{freezes}: it was tried after less than {early} s");
        tokio::time::sleep(Duration::from_secs(late)).await;
        assert!(cluster.machine().snapshots.contains("s1"), "{freezes}: {:?}", status(&cluster));
    }
}

#[tokio::test]
async fn a_file_system_rests_for_a_snapshot_where_the_volume_or_the_setting_says_so() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 29).await;
    cluster.attached_volume().await;
    cluster.machine().chains_are_told = true;
    let spec = json!({ "volume": "demo", "createSnapshot": true });
    let status = |c: &Cluster, name: &str| {
        c.server.get("snapshots", name).map(|s| s["status"].clone()).unwrap_or_default()
    };
    let cases =
        [("false", "ignored"), ("true", "ignored"), ("true", "disabled"), ("false", "enabled")].into_iter();
    for (i, (setting, own)) in cases.enumerate() {
        let name = format!("s{i}");
        cluster.server.apply("settings", "freeze-filesystem-for-snapshot", &json!({ "value": setting }));
        let applied = |c: &Cluster| {
            c.server.get("settings", "freeze-filesystem-for-snapshot").unwrap()["status"]["applied"] == true
        };
        cluster.wait("the setting counts", applied).await;
        cluster.server.apply("volumes", "demo", &json!({ "spec": { "freezeFilesystemForSnapshot": own } }));
        // Managers hear of both before they hear of what is made afterwards, on one watch each.
        tokio::time::sleep(Duration::from_millis(200)).await;
        cluster.server.apply("snapshots", &name, &json!({ "spec": spec }));
        cluster.wait(&name, |c| status(c, &name)["readyToUse"] == true).await;
    }
    let frozen: Vec<String> = cluster.machine().frozen.iter().cloned().collect();
    assert_eq!(frozen, ["s1", "s3"]);

    cluster.machine().nothing_freezes = true;
    cluster.server.apply("snapshots", "s4", &json!({ "spec": spec }));
    cluster.wait("refused", |c| status(c, "s4")["error"] == "NotFrozen: it is frozen already").await;
    assert!(!cluster.machine().snapshots.contains("s4"));
    cluster.machine().nothing_freezes = false;
    cluster.wait("tried again", |c| status(c, "s4")["readyToUse"] == true).await;
    assert!(cluster.machine().frozen.contains("s4") && status(&cluster, "s4")["error"].is_null());
}

/// Asks for the migratable volume on these nodes.
fn wanted_on(cluster: &Cluster, nodes: &[&str]) {
    let all = ["n1", "n2", "n3"];
    let ticket = |node: &&str| json!({ "id": format!("csi-{node}"), "type": "csi-attacher", "nodeID": node });
    let tickets: serde_json::Map<String, Value> = all
        .iter()
        .map(|node| (format!("csi-{node}"), if nodes.contains(node) { ticket(node) } else { Value::Null }))
        .collect();
    cluster.server.apply("volumeattachments", "demo", &json!({ "spec": { "attachmentTickets": tickets } }));
}

/// What runs, as `ENGINE@NODE`, with `~` for a relay.
fn running(cluster: &Cluster) -> Vec<String> {
    let machine = cluster.machine();
    let word = |name: &str, e: &FakeEngine| {
        format!("{name}{}{}", if e.relay_from.is_empty() { "@" } else { "~" }, e.node)
    };
    machine.engines.iter().flat_map(|(name, all)| all.iter().map(|e| word(name, e))).collect()
}

#[tokio::test]
async fn a_volume_moves_from_node_to_node_over_failing_requests_and_restarted_managers() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 11).await;
    cluster.wait("three nodes", |c| nodes_ready(c) == 3).await;
    cluster.create_volume();
    let migratable = json!({ "spec": { "migratable": true, "accessMode": "rwx" } });
    cluster.server.apply("volumes", "demo", &migratable);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    wanted_on(&cluster, &["n1"]);
    cluster.wait("on n1", |c| running(c) == ["demo-e-0@n1"] && c.volume("state") == "attached").await;
    cluster.server.fail(10);
    for (round, (from, to)) in [("n1", "n2"), ("n2", "n3"), ("n3", "n1")].into_iter().enumerate() {
        let (old, new) = if round % 2 == 0 { ("demo-e-0", "demo-e-1") } else { ("demo-e-1", "demo-e-0") };
        let both = |c: &Cluster| {
            let mut shown = [format!("{old}@{from}"), format!("{new}~{to}")];
            shown.sort();
            running(c) == shown && c.volume("currentMigrationNodeID") == *to
        };
        // Begun and given up, and begun again.
        wanted_on(&cluster, &[from, to]);
        cluster.wait(&format!("round {round}: shown on {to}"), both).await;
        wanted_on(&cluster, &[from]);
        cluster
            .wait("given up", |c| {
                running(c) == [format!("{old}@{from}")] && c.server.all("engines").len() == 1
            })
            .await;
        wanted_on(&cluster, &[from, to]);
        cluster.wait(&format!("round {round}: shown on {to} again"), both).await;
        let issued = cluster.machine().generations.len();
        // The manager that has to do it dies, or the one that has to stop the old one.
        let victim = if round == 1 { from } else { to };
        cluster.stop(victim).await;
        wanted_on(&cluster, &[to]);
        cluster.start(victim);
        let there = |c: &Cluster| {
            running(c) == [format!("{new}@{to}")]
                && c.volume("currentNodeID") == *to
                && c.volume("robustness") == "healthy"
        };
        cluster.wait(&format!("round {round}: moved to {to}"), there).await;
        assert!(cluster.machine().generations.len() > issued);
        cluster.wait("the old engine is forgotten", |c| c.server.all("engines").len() == 1).await;
    }
    cluster.server.fail(0);
    wanted_on(&cluster, &[]);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    cluster.server.delete("volumes", "demo");
    cluster.wait("gone", |c| c.server.all("volumes").is_empty() && c.server.all("engines").is_empty()).await;
    assert!(running(&cluster).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_moves_from_a_node_that_is_silent_and_what_runs_there_ends_when_it_is_back() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 12).await;
    cluster.wait("three nodes", |c| nodes_ready(c) == 3).await;
    cluster.create_volume();
    cluster.server.apply("volumes", "demo", &json!({ "spec": { "migratable": true, "accessMode": "rwx" } }));
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    wanted_on(&cluster, &["n1", "n2"]);
    cluster
        .wait("shown on both", |c| {
            running(c) == ["demo-e-0@n1", "demo-e-1~n2"] && c.volume("currentMigrationNodeID") == "n2"
        })
        .await;
    let ask = |node: &str| RemoteAuthority::at(cluster.scratch.path().join(format!("{node}.sock")), "demo");
    let (source, target) = (ask("n1"), ask("n2"));
    let (first, late, new) = (epoch(1, 1), epoch(1, 2), epoch(2, 1));
    assert_eq!(source.store(None, &first), Reply::Stored);
    cluster.stop("n1").await;
    wanted_on(&cluster, &["n2"]);
    cluster
        .wait("moved to n2", |c| c.volume("currentNodeID") == "n2" && c.volume("state") == "attached")
        .await;
    assert_eq!(running(&cluster), ["demo-e-0@n1", "demo-e-1@n2"], "nobody was there to end it");
    cluster.wait("its resource is gone", |c| c.server.all("engines").len() == 1).await;
    assert_eq!(target.store(Some(first.order()), &new), Reply::Stored);
    cluster.start("n1");
    cluster.wait("what ran there is ended", |c| running(c) == ["demo-e-1@n2"]).await;
    // Whatever the old engine wants stored, its node's manager finds the new one's.
    assert_eq!(source.store(Some(first.order()), &late), Reply::Conflict(Some(new)));
}

/// An epoch that an engine of that attachment would make.
fn epoch(attachment: u32, counter: u64) -> Epoch {
    let generation = Generation { attachment, restart: 0 };
    Epoch {
        generation,
        counter,
        members: vec!["demo-r-1".into()],
        id: Instance(u128::from(counter) + 1),
        after: None,
        round: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_volume_resource_stores_one_epoch_in_place_of_exactly_one() {
    let cluster = Cluster::new(&["n1", "n2"], 6).await;
    cluster.wait("two nodes", |c| nodes_ready(c) == 2).await;
    cluster.create_volume();
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    let ask = |node: &str| RemoteAuthority::at(cluster.scratch.path().join(format!("{node}.sock")), "demo");
    let (one, two) = (ask("n1"), ask("n2"));
    let (first, old, new) = (epoch(1, 1), epoch(1, 2), epoch(2, 1));
    assert_eq!(one.load(), Reply::Counts(None));
    assert_eq!(one.store(None, &first), Reply::Stored);
    // The old engine's node and the new one's both replace the epoch that they know: one of them is told that it is late.
    assert_eq!(two.store(Some(first.order()), &new), Reply::Stored);
    assert_eq!(one.store(Some(first.order()), &old), Reply::Conflict(Some(new.clone())));
    assert_eq!(two.store(Some(first.order()), &new), Reply::Stored, "said again");
    assert_eq!(one.load(), Reply::Counts(Some(new)));
    // Many at once from both nodes: each number is stored once, in order.
    let before = cluster.server.writes();
    let racers = (0..8_u64).map(|i| {
        let authority = if i % 2 == 0 { one.clone() } else { two.clone() };
        tokio::task::spawn_blocking(move || {
            let next = Epoch { id: Instance(100 + u128::from(i)), ..epoch(3, 1) };
            matches!(authority.store(Some(epoch(2, 1).order()), &next), Reply::Stored)
        })
    });
    let mut won = 0;
    for racer in racers.collect::<Vec<_>>() {
        won += usize::from(racer.await.unwrap());
    }
    assert_eq!(won, 1);
    assert!(cluster.server.writes() > before);
    let unknown = RemoteAuthority::at(cluster.scratch.path().join("n1.sock"), "no-such-volume");
    assert!(matches!(unknown.load(), Reply::Unavailable(_)));
}

#[tokio::test]
async fn every_node_logs_at_the_level_that_is_set_from_when_it_changes() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 1).await;
    let all = |level: Level| move |c: &Cluster| c.machine().levels.values().filter(|l| **l == level).count();
    let nodes_at = |level: Level, count: usize| move |c: &Cluster| all(level)(c) == count;
    cluster.wait("at the default", nodes_at(Level::INFO, 3)).await;
    // Each is set when a round has just told the one before, if nothing else has: the next round is 5 s later. A busy machine may
    // take as long now and then.
    let mut soon = None;
    for (level, word) in
        [(Level::DEBUG, "debug"), (Level::TRACE, "trace"), (Level::WARN, "warn"), (Level::ERROR, "error")]
    {
        let begun = Instant::now();
        cluster.server.apply("settings", "log-level", &json!({ "value": word }));
        cluster.wait("at the level that is set", nodes_at(level, 3)).await;
        if begun.elapsed() < Duration::from_secs(4) {
            soon = Some(level);
            break;
        }
    }
    let level = soon.expect("none came before the next round");
    cluster.add("n4");
    cluster.wait("a new node, too", nodes_at(level, 4)).await;
    let applied = |c: &Cluster| c.server.get("settings", "log-level").unwrap()["status"]["applied"] == true;
    cluster.wait("it is in force", applied).await;
}

#[tokio::test]
async fn at_rest_nothing_is_written_but_leases() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 2).await;
    cluster.attached_volume().await;
    // What the attachment leaves to be written down: how long that takes is the machine's affair. Then nothing is for longer than a
    // round, in which everything was looked at.
    let written = || cluster.server.writes_beside("leases");
    let until = Instant::now() + Duration::from_secs(60);
    let mut calm = (written(), cluster.server.writes(), Instant::now(), 0);
    while calm.3 < 120 {
        assert!(Instant::now() < until, "{} writes of other kinds than leases, and no end", written());
        tokio::time::sleep(Duration::from_millis(50)).await;
        calm.3 += 1;
        if written() != calm.0 {
            calm = (written(), cluster.server.writes(), Instant::now(), 0);
        }
    }
    let (_, all, began, _) = calm;
    // A lease of each node, and the leader's, every five seconds.
    let renewed = cluster.server.writes() - all;
    assert!(
        renewed <= 4 * (began.elapsed().as_secs() / 5 + 1),
        "{renewed} renewals in {:?}",
        began.elapsed()
    );
}

#[tokio::test]
async fn it_converges_over_failing_requests_lost_watches_and_restarted_managers() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 3).await;
    cluster.attached_volume().await;
    cluster.server.fail(15);
    for (round, node) in ["n2", "n3", "n1"].into_iter().enumerate() {
        // A manager dies and is started again; a replica's process dies meanwhile.
        cluster.stop(node).await;
        let victim = cluster.machine().replicas.keys().next().cloned().unwrap();
        cluster.machine().replicas.remove(&victim);
        cluster.start(node);
        cluster.bells[&victim.0].notify_one();
        cluster.ticket(Some(node));
        cluster
            .wait(&format!("round {round}: attached to {node}"), |c| {
                c.volume("currentNodeID") == *node
                    && c.volume("robustness") == "healthy"
                    && c.volume("state") == "attached"
            })
            .await;
        let engines = cluster.machine().engines["demo-e-0"].len();
        assert_eq!(engines, 1, "round {round}");
        assert_eq!(cluster.server.all("replicas").len(), 3, "round {round}");
    }
    cluster.ticket(None);
    cluster.server.delete("volumes", "demo");
    cluster.wait("gone", |c| c.server.all("volumes").is_empty() && c.server.all("replicas").is_empty()).await;
    assert!(cluster.machine().directories.is_empty());
}
