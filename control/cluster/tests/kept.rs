//! What is deleted, lost or silent around a volume that stays: its data does not go with it, and nothing waits for ever.

mod api_server;
mod fake_nodes;

use std::cell::Cell;
use std::time::{Duration, Instant};

use fake_nodes::{Cluster, nodes_ready};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

/// Longer than a manager takes for anything that it would do.
const LONG: Duration = Duration::from_secs(3);

fn replicas(cluster: &Cluster) -> Vec<String> {
    let name = |r: &Value| r["metadata"]["name"].as_str().unwrap().to_owned();
    cluster.server.all("replicas").iter().map(name).collect()
}

async fn detached_volume(cluster: &Cluster) {
    cluster.attached_volume().await;
    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached" && c.machine().replicas.is_empty()).await;
}

#[tokio::test]
async fn the_last_copy_of_a_volume_that_stays_is_not_deleted_whoever_deletes_its_replica() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 31).await;
    detached_volume(&cluster).await;
    // As Kubernetes' garbage collector does with those of a volume that was restored: it has another UID than their owner.
    let all = replicas(&cluster);
    all.iter().for_each(|name| cluster.server.delete("replicas", name));
    tokio::time::sleep(LONG).await;
    let kept = cluster.machine().directories.clone();
    assert_eq!(
        (kept.len(), replicas(&cluster)),
        (3, all),
        "nothing else holds what they hold, and nothing is begun anew"
    );
    cluster.server.delete("volumes", "demo");
    cluster.wait("gone", |c| c.server.all("volumes").is_empty() && c.server.all("replicas").is_empty()).await;
    assert!(cluster.machine().directories.is_empty());
}

/// A replica of a volume that is not there, with data on n1, deleted so long ago: its owner has another UID than any.
fn left_replica(cluster: &Cluster, deleted: Duration) {
    left_replica_at(cluster, Timestamp::now() - deleted);
}

fn left_replica_at(cluster: &Cluster, at: Timestamp) {
    let directory = "demo-0a1b2c3d";
    let spec = json!({
        "volumeName": "demo", "nodeID": "n1", "diskID": "disk-of-n1", "diskPath": "/root-n1", "dataDirectoryName": directory,
        "healthyAt": "2026-01-01T00:00:00Z",
    });
    let metadata =
        json!({ "finalizers": ["longhorn.io"], "deletionTimestamp": format!("{}", at.strftime("%FT%TZ")) });
    cluster.machine().directories.insert(("/root-n1".to_owned(), directory.to_owned()));
    cluster.server.apply("replicas", "demo-r-11112222", &json!({ "metadata": metadata, "spec": spec }));
}

#[tokio::test]
async fn a_replica_that_is_deleted_before_its_volume_is_restored_keeps_its_data_and_the_volume_begins_nothing_anew()
 {
    let cluster = Cluster::new(&["n1"], 37).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    left_replica(&cluster, Duration::ZERO);
    tokio::time::sleep(LONG).await;
    assert_eq!((cluster.machine().directories.len(), replicas(&cluster).len()), (1, 1), "it is waited for");
    cluster.create("demo", 1);
    cluster.ticket(Some("n1"));
    tokio::time::sleep(LONG).await;
    let left = (cluster.machine().directories.len(), replicas(&cluster));
    assert_eq!(left, (1, vec!["demo-r-11112222".to_owned()]), "an empty one would be taken for the volume");
    cluster.server.delete("volumes", "demo");
    cluster.wait("gone", |c| c.server.all("volumes").is_empty() && c.server.all("replicas").is_empty()).await;
    assert!(cluster.machine().directories.is_empty(), "now somebody asked for that");
}

#[tokio::test]
async fn a_node_whose_clock_is_behind_waits_for_a_volume_all_the_same() {
    let cluster = Cluster::new(&["n1"], 43).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    let in_an_hour = Timestamp::now() + Duration::from_secs(3600);
    left_replica_at(&cluster, in_an_hour);
    tokio::time::sleep(LONG).await;
    assert_eq!(replicas(&cluster).len(), 1, "its directory would be an orphan, which may go by itself");
}

#[tokio::test]
async fn the_data_of_a_replica_whose_volume_never_came_is_an_orphan() {
    let cluster = Cluster::new(&["n1"], 38).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    left_replica(&cluster, Duration::from_secs(660));
    cluster.wait("nobody waits for ever", |c| replicas(c).is_empty()).await;
    cluster.wait("told", |c| c.server.all("orphans").len() == 1).await;
    assert_eq!(cluster.machine().directories.len(), 1, "a person decides");
    let name = cluster.server.all("orphans")[0]["metadata"]["name"].as_str().unwrap().to_owned();
    cluster.server.delete("orphans", &name);
    cluster.wait("gone", |c| c.machine().directories.is_empty()).await;
}

#[tokio::test]
async fn a_volume_is_there_for_as_long_as_a_replica_of_it_is() {
    let cluster = Cluster::new(&["n1"], 39).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    // Of this one none is made before it is used.
    let spec = json!({ "size": "1073741824", "numberOfReplicas": 1, "dataLocality": "strict-local" });
    cluster.server.apply("volumes", "demo", &json!({ "spec": spec }));
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    cluster.server.hold_news(Some("replicas"));
    let spec = json!({
        "volumeName": "demo", "nodeID": "n1", "diskID": "disk-of-n1", "diskPath": "/root-n1",
        "dataDirectoryName": "demo-0a1b2c3d",
    });
    let replica = json!({ "metadata": { "finalizers": ["longhorn.io"] }, "spec": spec });
    cluster.server.apply("replicas", "demo-r-11112222", &replica);
    cluster.machine().directories.insert(("/root-n1".to_owned(), "demo-0a1b2c3d".to_owned()));
    cluster.server.delete("volumes", "demo");
    tokio::time::sleep(LONG).await;
    assert_eq!(
        cluster.server.all("volumes").len(),
        1,
        "without it nobody would say what becomes of the replica"
    );
    cluster.server.hold_news(None);
    cluster.wait("gone", |c| c.server.all("volumes").is_empty() && c.server.all("replicas").is_empty()).await;
    assert!(cluster.machine().directories.is_empty());
}

#[tokio::test]
async fn a_copy_goes_only_while_another_one_can_be_read() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 32).await;
    detached_volume(&cluster).await;
    let on = |c: &Cluster, node: &str| {
        let all = c.server.all("replicas");
        let found = all.iter().find(|r| r["spec"]["nodeID"] == *node);
        found.map(|r| r["metadata"]["name"].as_str().unwrap().to_owned())
    };
    let (first, second) = (on(&cluster, "n1").unwrap(), on(&cluster, "n2").unwrap());
    cluster.server.delete("replicas", &first);
    cluster.wait("two others hold everything", |c| c.server.get("replicas", &first).is_none()).await;
    cluster.stop("n3").await;
    let silent = |c: &Cluster| c.server.get("nodes", "n3").unwrap().to_string().contains("ManagerPodDown");
    cluster.wait("n3 is silent", silent).await;
    cluster.server.delete("replicas", &second);
    tokio::time::sleep(LONG).await;
    let data = |c: &Cluster| c.machine().directories.iter().any(|(disk, _)| disk == "/root-n2");
    assert!(
        data(&cluster) && cluster.server.get("replicas", &second).is_some(),
        "nobody knows whether n3 is lost"
    );
}

/// As Longhorn's live upgrade or migration leaves it where its managers go before either has ended.
#[tokio::test]
async fn a_second_replica_of_a_directory_goes_alone() {
    let cluster = Cluster::new(&["n1"], 50).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    cluster.create("demo", 1);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    cluster.ticket(Some("n1"));
    cluster.wait("attached", |c| c.volume("robustness") == "healthy").await;
    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached" && c.machine().replicas.is_empty()).await;
    let (all, before) = (replicas(&cluster), cluster.machine().directories.clone());
    let mut spec = cluster.server.get("replicas", &all[0]).unwrap()["spec"].clone();
    spec["active"] = json!(false);
    let deleted = format!("{}", Timestamp::now().strftime("%FT%TZ"));
    for (name, deleted) in [("demo-r-00000000", json!(deleted)), ("demo-r-ffffffff", Value::Null)] {
        let metadata = json!({ "finalizers": ["longhorn.io"], "deletionTimestamp": deleted });
        cluster.server.apply("replicas", name, &json!({ "metadata": metadata, "spec": spec }));
        cluster.wait(name, |c| c.server.get("replicas", name).is_none()).await;
        tokio::time::sleep(LONG).await;
        let left = (replicas(&cluster), cluster.machine().directories.clone());
        assert_eq!(left, (all.clone(), before.clone()), "{name}: the directory is another one's");
    }
    assert!(cluster.server.all("orphans").is_empty(), "and nobody's orphan");
    cluster.ticket(Some("n1"));
    cluster
        .wait("attached", |c| c.volume("state") == "attached" && c.volume("robustness") == "healthy")
        .await;
    // With their volume both go, and what they have with the last one.
    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached" && c.machine().replicas.is_empty()).await;
    let metadata = json!({ "finalizers": ["longhorn.io"] });
    cluster.server.apply("replicas", "demo-r-00000000", &json!({ "metadata": metadata, "spec": spec }));
    cluster.server.delete("volumes", "demo");
    cluster.wait("gone", |c| c.server.all("volumes").is_empty() && c.server.all("replicas").is_empty()).await;
    assert!(cluster.machine().directories.is_empty() && cluster.server.all("orphans").is_empty());
}

#[tokio::test]
async fn a_replica_that_was_made_anew_keeps_the_data_of_the_one_that_was_deleted() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 40).await;
    detached_volume(&cluster).await;
    let all = replicas(&cluster);
    all.iter().for_each(|name| cluster.server.delete("replicas", name));
    tokio::time::sleep(LONG).await;
    // As the events say it: the finalizer off, and the same replica again. Managers hear of it late.
    let before: Vec<Value> = all.iter().map(|name| cluster.server.get("replicas", name).unwrap()).collect();
    cluster.server.hold_news(Some("replicas"));
    for (name, before) in all.iter().zip(&before) {
        cluster.server.apply("replicas", name, &json!({ "metadata": { "finalizers": null } }));
        cluster.server.delete("replicas", name);
        let labels = &before["metadata"]["labels"];
        let metadata =
            json!({ "uid": format!("anew-{name}"), "labels": labels, "finalizers": ["longhorn.io"] });
        let anew = json!({ "metadata": metadata, "spec": before["spec"] });
        cluster.server.apply("replicas", name, &anew);
    }
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert_eq!(cluster.machine().directories.len(), 3, "they are those of the new ones");
    cluster.server.hold_news(None);
    cluster.ticket(Some("n1"));
    cluster
        .wait("attached", |c| c.volume("state") == "attached" && c.volume("robustness") == "healthy")
        .await;
    assert_eq!(replicas(&cluster), all);
}

#[tokio::test]
async fn the_data_of_replicas_is_no_orphan_when_their_disk_has_lost_its_identity() {
    let cluster = Cluster::new(&["n1"], 33).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    for name in ["orphan-resource-auto-deletion", "orphan-resource-auto-deletion-grace-period"] {
        let value = if name.ends_with("period") { "0" } else { "replica-data;instance" };
        cluster.server.apply("settings", name, &json!({ "value": value }));
    }
    // What the disk was before longhorn-disk.cfg was lost; of this node, and of one that it came from.
    for (volume, node) in [("here", "n1"), ("there", "n2")] {
        let directory = format!("{volume}-0a1b2c3d");
        let spec = json!({ "volumeName": volume, "nodeID": node, "diskID": "before", "dataDirectoryName": directory });
        cluster.server.apply("replicas", &format!("{volume}-r-11112222"), &json!({ "spec": spec }));
        cluster.machine().directories.insert(("/root-n1".to_owned(), directory));
    }
    cluster.machine().directories.insert(("/root-n1".to_owned(), "gone-0a1b2c3d".to_owned()));
    let there = |c: &Cluster, name: &str| c.machine().directories.iter().any(|(_, d)| d.starts_with(name));
    cluster.wait("what nobody knows goes by itself", |c| !there(c, "gone")).await;
    tokio::time::sleep(LONG).await;
    assert!(there(&cluster, "here") && there(&cluster, "there"), "the data of replicas");
}

#[tokio::test]
async fn a_volume_whose_key_was_deleted_is_attached_with_another_one() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 34).await;
    detached_volume(&cluster).await;
    let secret = || cluster.server.get("core/secrets", "longhorn-volume-key-demo");
    let owner = |secret: &Value| secret["metadata"]["ownerReferences"][0]["kind"].clone();
    let before = secret().unwrap();
    cluster.server.delete("core/secrets", "longhorn-volume-key-demo");
    cluster.ticket(Some("n2"));
    cluster
        .wait("attached", |c| c.volume("state") == "attached" && c.volume("robustness") == "healthy")
        .await;
    let after = secret().unwrap();
    assert_eq!(owner(&after), owner(&before), "it goes with the volume");
    assert_ne!(after["data"], before["data"]);
    cluster.ticket(None);
    cluster.server.delete("volumes", "demo");
    cluster
        .wait("gone", |c| c.server.all("volumes").is_empty() && c.server.all("core/secrets").is_empty())
        .await;
}

#[tokio::test]
async fn a_snapshot_is_taken_elsewhere_when_the_node_that_its_volume_was_attached_to_for_it_is_lost() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 35).await;
    detached_volume(&cluster).await;
    {
        let mut machine = cluster.machine();
        (machine.chains_are_told, machine.chains_are_held) = (true, true);
    }
    let snapshot = json!({ "spec": { "volume": "demo", "createSnapshot": true } });
    cluster.server.apply("snapshots", "s1", &snapshot);
    cluster.wait("attached for it", |c| c.volume("state") == "attached").await;
    let node = cluster.volume("currentNodeID").as_str().unwrap().to_owned();
    cluster.stop(&node).await;
    cluster.machine().chains_are_held = false;
    let taken =
        |c: &Cluster| c.server.get("snapshots", "s1").is_some_and(|s| s["status"]["readyToUse"] == true);
    cluster.wait("taken from another node", taken).await;
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
}

#[tokio::test]
async fn an_orphan_of_a_node_that_is_gone_for_good_can_be_deleted() {
    let mut cluster = Cluster::new(&["n1", "n2"], 36).await;
    cluster.wait("two nodes", |c| nodes_ready(c) == 2).await;
    cluster.machine().directories.insert(("/root-n2".to_owned(), "gone-0a1b2c3d".to_owned()));
    cluster.wait("told", |c| c.server.all("orphans").len() == 1).await;
    cluster.stop("n2").await;
    let silent = |c: &Cluster| c.server.get("nodes", "n2").unwrap().to_string().contains("ManagerPodDown");
    cluster.wait("n2 is silent", silent).await;
    let name = cluster.server.all("orphans")[0]["metadata"]["name"].as_str().unwrap().to_owned();
    cluster.server.delete("orphans", &name);
    tokio::time::sleep(LONG).await;
    assert_eq!(cluster.server.all("orphans").len(), 1, "n2 may be back, and remove what it stands for");
    cluster.server.delete("core/nodes", "n2");
    cluster.wait("forgotten with its node", |c| c.server.all("orphans").is_empty()).await;
}

#[tokio::test]
async fn a_replica_that_longhorn_found_no_place_for_keeps_nothing_from_its_volume() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 41).await;
    detached_volume(&cluster).await;
    let nowhere = "demo-r-11112222";
    let replica = json!({ "metadata": { "finalizers": ["longhorn.io"] }, "spec": { "volumeName": "demo" } });
    cluster.server.apply("replicas", nowhere, &replica);
    cluster.server.delete("replicas", nowhere);
    cluster.wait("nobody else is there to let it go", |c| c.server.get("replicas", nowhere).is_none()).await;
    cluster.ticket(Some("n1"));
    cluster
        .wait("attached", |c| c.volume("state") == "attached" && c.volume("robustness") == "healthy")
        .await;
    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    cluster.server.apply("replicas", nowhere, &replica);
    cluster.server.delete("volumes", "demo");
    cluster.wait("gone", |c| c.server.all("volumes").is_empty() && c.server.all("replicas").is_empty()).await;
}

#[tokio::test]
async fn a_volume_whose_numbers_are_too_large_keeps_no_other_from_being_read() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 43).await;
    detached_volume(&cluster).await;
    // The API server knows numbers of 64 bits alone, and texts of 19 digits.
    let spec = json!({ "size": "1073741824", "numberOfReplicas": 1, "ioTimeout": 5_000_000_000_u64, "snapshotMaxSize": "9999999999999999999" });
    cluster.server.apply("volumes", "odd", &json!({ "spec": spec }));
    // Whoever leads from now on reads all of them anew.
    for node in ["n1", "n2", "n3"] {
        cluster.stop(node).await;
        cluster.start(node);
    }
    cluster.ticket(Some("n2"));
    cluster
        .wait("attached", |c| c.volume("state") == "attached" && c.volume("robustness") == "healthy")
        .await;
    let state = |c: &Cluster| c.server.get("volumes", "odd").unwrap()["status"]["state"].clone();
    cluster.wait("the odd one is made, too", |c| state(c) == "detached").await;
}

#[tokio::test]
async fn an_orphan_that_cannot_be_removed_keeps_no_other_from_it() {
    let cluster = Cluster::new(&["n1"], 44).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    for name in ["a", "b", "c"] {
        cluster.machine().directories.insert(("/root-n1".to_owned(), format!("{name}-0a1b2c3d")));
    }
    cluster.machine().stubborn.insert("b-0a1b2c3d".to_owned());
    cluster.wait("told", |c| c.server.all("orphans").len() == 3).await;
    for orphan in cluster.server.all("orphans") {
        cluster.server.delete("orphans", orphan["metadata"]["name"].as_str().unwrap());
    }
    cluster.wait("two are gone", |c| c.machine().directories.len() == 1).await;
    cluster.machine().directories.insert(("/root-n1".to_owned(), "d-0a1b2c3d".to_owned()));
    let is_d = |o: &Value| o["spec"]["parameters"]["DataName"] == "d-0a1b2c3d";
    cluster.wait("another one is told of", |c| c.server.all("orphans").iter().any(is_d)).await;
}

#[tokio::test]
async fn what_a_manager_tells_of_a_node_without_a_disk_is_not_written_again_and_again() {
    let mut cluster = Cluster::new(&["n1"], 42).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    cluster.machine().diskless.insert("n2".to_owned());
    cluster.add("n2");
    let told = |c: &Cluster| {
        let all = c.server.all("engineimages");
        all.iter().any(|image| image["status"]["nodeDeploymentMap"]["n2"] == true)
    };
    cluster.wait("its program is there", told).await;
    // Before the leader counts it among the living both say of it what they know.
    let seen = Cell::new((0, Instant::now()));
    let counted = |c: &Cluster| {
        let (writes, since) = (c.server.writes(), seen.get().1);
        let goes_on = writes > seen.get().0 + 2;
        seen.set((writes, if goes_on { Instant::now() } else { since }));
        since.elapsed() > Duration::from_secs(1)
    };
    cluster.wait("it is counted", counted).await;
    let before = cluster.server.writes();
    tokio::time::sleep(LONG).await;
    let writes = cluster.server.writes() - before;
    let node = cluster.server.get("nodes", "n2").expect("it has its resource");
    assert!(
        node["spec"]["disks"].as_object().is_none_or(|disks| disks.is_empty()) && told(&cluster),
        "{node}"
    );
    assert!(writes < 30, "{writes} writes");
}

#[tokio::test]
async fn what_of_longhorns_cannot_be_let_go_of_keeps_no_other_of_its_kind() {
    let cluster = Cluster::new(&["n1"], 45).await;
    cluster.wait("a leader acts", |c| nodes_ready(c) == 1 && !c.server.all("engineimages").is_empty()).await;
    for name in ["a", "b"] {
        cluster.server.apply("backups", name, &json!({ "metadata": { "finalizers": ["longhorn.io"] } }));
    }
    cluster.server.fix("backups", "a");
    cluster.server.delete("backups", "a");
    tokio::time::sleep(LONG).await;
    cluster.server.delete("backups", "b");
    cluster.wait("the other one is gone", |c| c.server.get("backups", "b").is_none()).await;
    assert!(cluster.server.get("backups", "a").is_some());
}

#[tokio::test]
async fn pods_begin_anew_where_what_keeps_their_volume_attached_was_deleted() {
    for (kind, name) in [("engines", "demo-e-0"), ("volumeattachments", "demo")] {
        let cluster = Cluster::new(&["n1", "n2", "n3"], 46).await;
        cluster.attached_volume().await;
        let claim = json!({ "namespace": "apps", "name": "data" });
        let source = json!({ "driver": "driver.longhorn.io", "volumeHandle": "demo" });
        let volume = json!({ "metadata": { "name": "pv" }, "spec": { "csi": source, "claimRef": claim } });
        cluster.server.apply("core/persistentvolumes", "pv", &volume);
        let began = "2026-01-01T00:00:00Z";
        let owner = json!({ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "s", "uid": "s", "controller": true });
        let pod = json!({
            "metadata": { "namespace": "apps", "uid": "p", "ownerReferences": [owner], "creationTimestamp": began },
            "spec": {
                "nodeName": "n1", "containers": [],
                "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": "data" } }],
            },
            "status": { "startTime": began },
        });
        cluster.server.apply("core/pods", "p", &pod);
        let starts = cluster.machine().generations.len();
        cluster.server.delete(kind, name);
        let is_anew =
            |c: &Cluster| c.server.get(kind, name).is_some_and(|o| o["spec"].to_string().contains("demo"));
        cluster.wait(&format!("it is made anew among {kind}"), is_anew).await;
        // As csi-attacher does within a minute: Kubernetes has it attached all the while. Sooner, and the device would stay.
        if kind == "volumeattachments" {
            cluster.wait("nobody wants it any more", |c| c.volume("state") != "attached").await;
        }
        cluster.ticket(Some("n1"));
        cluster
            .wait(&format!("what had its device goes, {kind}"), |c| c.server.get("core/pods", "p").is_none())
            .await;
        let is_served =
            |c: &Cluster| c.machine().generations.len() > starts && c.volume("state") == "attached";
        cluster.wait(&format!("it is attached again, {kind}"), is_served).await;
        // A cluster may have tens of thousands of them.
        for i in 0..10 {
            let annotations = json!({ "looked": i.to_string() });
            cluster.server.apply("volumes", "demo", &json!({ "metadata": { "annotations": annotations } }));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let lists = cluster.server.lists("core/persistentvolumes");
        assert!((1..=2).contains(&lists), "{kind}: {lists}");
    }
}

#[tokio::test]
async fn a_volume_that_is_restored_before_its_replicas_begins_nothing_beside_their_data() {
    let cluster = Cluster::new(&["n1", "n2"], 47).await;
    // Orphans go by themselves, after less time than anything here is waited for.
    for (name, value) in [
        ("orphan-resource-auto-deletion", "replica-data"),
        ("orphan-resource-auto-deletion-grace-period", "2"),
    ] {
        cluster.server.apply("settings", name, &json!({ "value": value }));
    }
    cluster.wait("two nodes", |c| nodes_ready(c) == 2).await;
    let directory = "demo-0a1b2c3d";
    cluster.machine().directories.insert(("/root-n1".to_owned(), directory.to_owned()));
    cluster.wait("nobody knows the data", |c| c.server.all("orphans").len() == 1).await;
    cluster.create("demo", 1);
    cluster.wait("it can be asked for", |c| c.server.get("volumeattachments", "demo").is_some()).await;
    cluster.ticket(Some("n2"));
    cluster
        .wait("it says what it waits for", |c| c.volume("conditions").to_string().contains("DataLeft"))
        .await;
    tokio::time::sleep(LONG).await;
    let begun = (replicas(&cluster).len(), cluster.machine().engines.len());
    assert_eq!(begun, (0, 0), "whoever wants it would be given an empty device");
    let spec = json!({
        "volumeName": "demo", "nodeID": "n1", "diskID": "disk-of-n1", "diskPath": "/root-n1", "dataDirectoryName": directory,
        "volumeSize": "1073741824", "healthyAt": "2026-01-01T00:00:00Z",
    });
    cluster.server.apply("replicas", "demo-r-11112222", &json!({ "spec": spec }));
    cluster
        .wait("attached", |c| c.volume("state") == "attached" && c.volume("robustness") == "healthy")
        .await;
    assert_eq!((cluster.machine().directories.len(), replicas(&cluster).len()), (1, 1), "with what it had");
    assert!(!cluster.volume("conditions").to_string().contains("DataLeft"));

    // Of a name that somebody has used before, and whose data nobody wants.
    cluster.machine().directories.insert(("/root-n2".to_owned(), "anew-0a1b2c3d".to_owned()));
    let orphan = |c: &Cluster| {
        let all = c.server.all("orphans");
        let found = all.iter().find(|o| o["spec"]["parameters"]["DataName"] == "anew-0a1b2c3d");
        found.map(|o| o["metadata"]["name"].as_str().unwrap().to_owned())
    };
    cluster.wait("told", |c| orphan(c).is_some()).await;
    cluster.create("anew", 1);
    let status = |c: &Cluster| c.server.get("volumes", "anew").unwrap()["status"].clone();
    cluster.wait("it waits", |c| status(c)["conditions"].to_string().contains("DataLeft")).await;
    tokio::time::sleep(LONG).await;
    assert!(orphan(&cluster).is_some(), "it stays for as long as it may be missed");
    cluster.server.delete("orphans", &orphan(&cluster).unwrap());
    cluster.wait("it begins", |c| status(c)["state"] == "detached").await;

    // Of a volume that nobody restores.
    cluster.machine().directories.insert(("/root-n2".to_owned(), "gone-0a1b2c3d".to_owned()));
    let is_there = |c: &Cluster| c.machine().directories.iter().any(|(_, name)| name == "gone-0a1b2c3d");
    cluster.wait("it goes by itself", |c| !is_there(c)).await;
}

/// Seen in the simulation (seed 684): the leader heard late that a volume had gone and was made anew, and deleted what was of its name.
#[tokio::test]
async fn snapshots_of_a_volume_that_was_made_anew_do_not_go_with_the_one_before() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 47).await;
    detached_volume(&cluster).await;
    let (_, kept) = cluster.machine().directories.first().cloned().expect("a replica's");
    cluster.machine().stubborn.insert(kept);
    cluster.server.delete("volumes", "demo");
    let rest = |c: &Cluster| c.volume("state") == "deleting" && replicas(c).len() == 1;
    cluster.wait("nearly all is gone", rest).await;
    cluster.server.hold_news(Some("volumes"));
    cluster.machine().stubborn.clear();
    cluster.wait("gone", |c| c.server.all("volumes").is_empty()).await;
    cluster.create_volume();
    let spec = json!({ "volume": "demo", "createSnapshot": true });
    let snapshot = json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Snapshot", "spec": spec });
    cluster.server.apply("snapshots", "s1", &snapshot);
    tokio::time::sleep(LONG).await;
    let s1 = cluster.server.get("snapshots", "s1").expect("it is there");
    assert!(s1["metadata"]["deletionTimestamp"].is_null(), "{s1}");
}

/// A volume with a snapshot, and a clone of it: on nodes that take replicas, or do not.
async fn cloned(cluster: &Cluster, nodes_take: bool) {
    cluster.machine().chains_are_told = true;
    cluster.attached_volume().await;
    ask_for_snapshot(cluster, "s1");
    cluster.wait("taken", |c| is_taken(c, "s1")).await;
    for node in ["n1", "n2", "n3"] {
        cluster.server.apply("nodes", node, &json!({ "spec": { "allowScheduling": nodes_take } }));
    }
    tokio::time::sleep(LONG).await;
    cluster.machine().replicas_are_silent = true;
    let spec = json!({ "size": "1073741824", "numberOfReplicas": 1, "dataSource": "snap://demo/s1" });
    cluster.server.apply("volumes", "copy", &json!({ "spec": spec }));
}

fn clone_says(cluster: &Cluster, reason: &str) -> bool {
    let conditions = cluster.server.get("volumes", "copy").unwrap()["status"]["conditions"].clone();
    let all = conditions.as_array().cloned().unwrap_or_default();
    all.iter().any(|c| c["type"] == "Cloned" && c["reason"] == reason)
}

#[tokio::test]
async fn a_snapshot_that_a_clone_waits_to_be_copied_from_can_be_deleted() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 51).await;
    cloned(&cluster, false).await;
    cluster.wait("there is no room", |c| clone_says(c, "NoRoom")).await;
    cluster.server.delete("snapshots", "s1");
    cluster.wait("gone", |c| c.server.get("snapshots", "s1").is_none()).await;
    cluster.wait("it says so", |c| clone_says(c, "SourceMissing")).await;
}

#[tokio::test]
async fn a_snapshot_that_is_being_copied_stays_and_is_asked_about_now_and_then() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 52).await;
    cluster.server.tell_time(|| Timestamp::now().strftime("%FT%TZ").to_string());
    cloned(&cluster, true).await;
    let copies =
        |c: &Cluster| c.machine().replicas.keys().filter(|(_, name)| name.starts_with("copy-")).count();
    cluster.wait("it is copied", |c| copies(c) == 1).await;
    // Times of the API server are of whole seconds.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    cluster.server.delete("snapshots", "s1");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = cluster.server.lists("volumes");
    tokio::time::sleep(2 * LONG).await;
    let lists = cluster.server.lists("volumes") - before;
    assert!(lists <= 2, "{lists} in six seconds");
    assert!(cluster.machine().snapshots.contains("s1"), "its layer is read");
    // Its node reboots: the copy is begun anew, from what was kept for it.
    let replica =
        cluster.machine().replicas.keys().find(|(_, name)| name.starts_with("copy-")).cloned().unwrap();
    cluster.machine().replicas.remove(&replica);
    cluster.bells[&replica.0].notify_one();
    cluster.wait("it is copied again", |c| c.machine().replicas.contains_key(&replica)).await;
    cluster.machine().replicas_are_silent = false;
    let state = |c: &Cluster| c.server.get("volumes", "copy").unwrap()["status"]["state"].clone();
    cluster.wait("it is whole", |c| state(c) == "detached").await;
    let failed =
        cluster.server.get("volumes", "copy").unwrap()["status"]["cloneStatus"]["attemptCount"].clone();
    assert!(failed.is_null() || failed == 0, "{failed}");
    cluster.wait("gone", |c| c.server.get("snapshots", "s1").is_none()).await;
}

/// Whoever deleted the snapshot has found nobody who copies it; who makes the copy has not heard of that.
#[tokio::test]
async fn a_copy_does_not_begin_from_a_snapshot_that_is_deleted() {
    let cluster = Cluster::new(&["n1"], 53).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    let goes = json!({ "finalizers": ["longhorn.io"], "deletionTimestamp": "2026-01-01T00:00:00Z" });
    cluster.server.apply("snapshots", "s1", &json!({ "metadata": goes, "spec": { "volume": "demo" } }));
    let from = json!({ "directory": "/root-n1/replicas/demo-0a1b2c3d", "snapshot": "s1" });
    let spec = json!({
        "volumeName": "copy", "nodeID": "n1", "diskID": "disk-of-n1", "diskPath": "/root-n1", "dataDirectoryName": "copy-0a1b2c3d",
        "volumeSize": "1073741824", "desireState": "running", "cloneFrom": from,
    });
    cluster.server.apply("replicas", "copy-r-11112222", &json!({ "spec": spec }));
    let says = |c: &Cluster| {
        let status = c.server.get("replicas", "copy-r-11112222").unwrap()["status"].clone();
        status["currentState"] == "error" && status["conditions"].to_string().contains("is being deleted")
    };
    cluster.wait("it says so", says).await;
    assert!(cluster.machine().replicas.is_empty());
}

/// A node that does not lead.
fn follower(cluster: &Cluster) -> &'static str {
    let lease = cluster.server.get("leases", "longhorn-manager-leader").unwrap_or_default();
    let leads = |node: &&&str| lease["spec"]["holderIdentity"] == **node;
    ["n1", "n2"].iter().find(|node| !leads(node)).expect("one of two does not lead")
}

fn ask_for_snapshot(cluster: &Cluster, name: &str) {
    let spec = json!({ "volume": "demo", "createSnapshot": true });
    let snapshot = json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Snapshot", "spec": spec });
    cluster.server.apply("snapshots", name, &snapshot);
}

fn is_taken(cluster: &Cluster, name: &str) -> bool {
    cluster.server.get("snapshots", name).is_some_and(|s| s["status"]["readyToUse"] == true)
}

/// The manager of the engine's node hears late that its volume had gone and was made anew: what it knows is being deleted.
#[tokio::test]
async fn a_snapshot_is_removed_before_its_resource_goes_though_its_volume_seems_to_go() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 48).await;
    cluster.wait("three nodes", |c| nodes_ready(c) >= 3).await;
    cluster.machine().chains_are_told = true;
    let here = follower(&cluster);
    cluster.create_volume();
    cluster.wait("made", |c| c.volume("state") == "detached").await;
    cluster.ticket(Some(here));
    cluster.wait("attached", |c| c.volume("state") == "attached").await;
    let (_, kept) = cluster.machine().directories.first().cloned().expect("a replica's");
    cluster.machine().stubborn.insert(kept);
    cluster.server.delete("volumes", "demo");
    let rest = |c: &Cluster| c.volume("state") == "deleting" && replicas(c).len() == 1;
    cluster.wait("nearly all is gone", rest).await;
    cluster.server.hold_news_of(here, "volumes");
    cluster.machine().stubborn.clear();
    cluster.wait("gone", |c| c.server.all("volumes").is_empty()).await;
    cluster.machine().generations.clear();
    cluster.create_volume();
    cluster.wait("made anew", |c| c.volume("state") == "detached").await;
    cluster.ticket(Some(here));
    cluster.wait("attached anew", |c| c.volume("state") == "attached").await;
    ask_for_snapshot(&cluster, "s1");
    cluster.wait("taken", |c| is_taken(c, "s1")).await;
    cluster.server.delete("snapshots", "s1");
    tokio::time::sleep(LONG).await;
    let is_there = cluster.server.get("snapshots", "s1").is_some();
    assert!(is_there || cluster.machine().snapshots.is_empty(), "its resource has gone before it");
    cluster.server.hold_news(None);
    cluster.wait("gone", |c| c.server.all("snapshots").is_empty()).await;
    assert!(cluster.machine().snapshots.is_empty());
}

/// The manager of the engine's node hears late that a snapshot had gone, and was taken anew while the volume was elsewhere.
#[tokio::test]
async fn a_snapshot_that_was_taken_anew_is_not_removed_for_the_one_before() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 49).await;
    cluster.attached_volume().await;
    cluster.machine().chains_are_told = true;
    ask_for_snapshot(&cluster, "s1");
    cluster.wait("taken", |c| is_taken(c, "s1")).await;
    // That it is deleted is heard, and that it has gone is not.
    cluster.server.fix("snapshots", "s1");
    cluster.server.delete("snapshots", "s1");
    cluster.wait("removed", |c| c.machine().snapshots.is_empty()).await;
    cluster.server.hold_news_of("n1", "snapshots");
    cluster.server.fix("snapshots", "none");
    cluster.wait("gone", |c| c.server.all("snapshots").is_empty()).await;
    cluster.ticket(Some("n2"));
    ask_for_snapshot(&cluster, "s1");
    cluster.wait("taken elsewhere", |c| is_taken(c, "s1")).await;
    cluster.ticket(Some("n1"));
    let is_back = |c: &Cluster| c.volume("state") == "attached" && c.volume("currentNodeID") == "n1";
    cluster.wait("back", is_back).await;
    tokio::time::sleep(LONG).await;
    assert!(cluster.machine().snapshots.contains("s1"), "nobody has deleted it");
}

/// Whoever takes snapshots hears late that nobody wants one any more.
#[tokio::test]
async fn a_snapshot_whose_resource_has_gone_is_not_taken() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 50).await;
    cluster.wait("three nodes", |c| nodes_ready(c) >= 3).await;
    cluster.machine().chains_are_told = true;
    cluster.create_volume();
    cluster.wait("made", |c| c.volume("state") == "detached").await;
    let nodes = ["n1", "n2", "n3"].map(str::to_owned);
    cluster.machine().away.extend(nodes);
    ask_for_snapshot(&cluster, "s1");
    tokio::time::sleep(LONG).await;
    cluster.server.hold_news(Some("snapshots"));
    cluster.server.delete("snapshots", "s1");
    assert!(cluster.server.get("snapshots", "s1").is_none(), "nobody has begun with it");
    cluster.machine().away.clear();
    cluster.ticket(Some("n1"));
    cluster.wait("attached", |c| c.volume("state") == "attached").await;
    tokio::time::sleep(LONG).await;
    assert!(cluster.machine().snapshots.is_empty(), "it was taken");
    cluster.server.hold_news(None);
    tokio::time::sleep(LONG).await;
    assert!(cluster.server.all("snapshots").is_empty() && cluster.machine().snapshots.is_empty());
}
