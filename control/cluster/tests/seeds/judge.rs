//! What has to be so once nothing is wrong any more.

use std::time::Duration;

use serde_json::Value;

use crate::cluster::{Cluster, TOOK_BACK};
use crate::engine::Phase;
use crate::pass;

/// How long it may take: what failed is waited for ten minutes, and replaced one after the other.
const PATIENCE: Duration = Duration::from_secs(3_600);

/// After so long somebody takes back what was deleted and is kept, since nothing else holds everything.
const TAKEN_BACK: Duration = Duration::from_secs(1_200);

/// How often it is looked.
const LOOK: Duration = Duration::from_secs(20);

/// How long nothing but leases may be written then.
const QUIET: Duration = Duration::from_secs(120);

/// In one of so many such times.
const QUIETS: usize = 4;

/// Waits until everything is as it was asked for; then nobody has anything to do.
pub(crate) async fn comes_to_rest(cluster: &mut Cluster) {
    let mut waited = Duration::ZERO;
    loop {
        pass(cluster, LOOK).await;
        waited += LOOK;
        if !cluster.world.state().wrongs.is_empty() {
            return;
        }
        let open = open(cluster);
        if open.is_empty() {
            break;
        }
        if waited == TAKEN_BACK {
            while cluster.take_back() {}
        }
        if waited >= PATIENCE {
            let mut what = format!("after {waited:?} without faults: {}", open.join("; "));
            for kind in ["volumes", "engines", "replicas", "volumeattachments", "nodes"] {
                for object in cluster.server.all(kind) {
                    what.push_str(&format!("\n{kind} {}", without_noise(object)));
                }
            }
            return cluster.world.state().wrong(what);
        }
    }
    // What is told late, that an image is used no more for one, takes its time.
    let mut writes = 0;
    for _ in 0..QUIETS {
        let before = cluster.server.writes_beside("leases");
        pass(cluster, QUIET).await;
        writes = cluster.server.writes_beside("leases") - before;
        if writes == 0 {
            break;
        }
    }
    if writes > 0 {
        let last = cluster.server.last_writes(writes.min(6));
        cluster.world.state().wrong(format!("{writes} writes at rest, the last: {}", last.join("\n")));
    }
    let open = open(cluster);
    if !open.is_empty() {
        cluster.world.state().wrong(format!("it did not stay so: {}", open.join("; ")));
    }
}

fn without_noise(mut object: Value) -> Value {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.retain(|key, _| matches!(key.as_str(), "name" | "deletionTimestamp" | "finalizers"));
    }
    object
}

/// What is not yet as it should be.
fn open(cluster: &Cluster) -> Vec<String> {
    let mut open = Vec::new();
    let volumes = cluster.server.all("volumes");
    for volume in &volumes {
        let name = volume["metadata"]["name"].as_str().unwrap_or_default();
        if !volume["metadata"]["deletionTimestamp"].is_null() {
            open.push(format!("{name} is still there"));
            continue;
        }
        of_volume(cluster, name, volume, &mut open);
    }
    let is_known = |name: &Value| volumes.iter().any(|v| v["metadata"]["name"] == *name);
    for kind in ["engines", "replicas"] {
        let left = cluster.server.all(kind).into_iter().filter(|o| !is_known(&o["spec"]["volumeName"]));
        open.extend(left.map(|o| format!("{kind} {} is left", o["metadata"]["name"])));
    }
    processes(cluster, &mut open);
    copies(cluster, &mut open);
    open
}

fn of_volume(cluster: &Cluster, name: &str, volume: &Value, open: &mut Vec<String>) {
    let (status, replicas) = (&volume["status"], cluster.replicas(name));
    let wanted = volume["spec"]["numberOfReplicas"].as_u64().unwrap_or_default();
    match cluster.asked_for(name) {
        Some(node) => {
            if status["state"] != "attached" || status["currentNodeID"] != *node {
                open.push(format!(
                    "{name} is {} on {}, not attached on {node}",
                    status["state"], status["currentNodeID"]
                ));
            }
            if status["robustness"] != "healthy" || replicas.len() as u64 != wanted {
                open.push(format!(
                    "{name} is {} with {} of {wanted} replicas",
                    status["robustness"],
                    replicas.len()
                ));
            }
        }
        None => {
            if status["state"] != "detached" {
                open.push(format!("{name} is {}, not detached", status["state"]));
            }
        }
    }
    for replica in &replicas {
        if !replica["metadata"]["deletionTimestamp"].is_null() {
            open.push(format!("replica {} is deleted and still there", replica["metadata"]["name"]));
        }
    }
    let whole = replicas.iter().filter(|r| r["spec"]["failedAt"].as_str().is_none_or(str::is_empty));
    let mut nodes: Vec<&Value> = whole.map(|r| &r["spec"]["nodeID"]).collect();
    let count = nodes.len();
    nodes.sort_by_key(|n| n.to_string());
    nodes.dedup();
    // Only who is used parts; and what was taken back lies where it lay, and its successor may be there by now.
    let is_used = cluster.asked_for(name).is_some();
    let is_taken_back = cluster.world.state().counts.contains_key(TOOK_BACK);
    if nodes.len() < count && is_used && !is_taken_back {
        open.push(format!("two replicas of {name} are on one node"));
    }
}

/// Only what should run does.
fn processes(cluster: &Cluster, open: &mut Vec<String>) {
    let state = cluster.world.state();
    for ((node, name), engine) in &state.engines {
        let should = cluster.asked_for(&engine.volume);
        if should.as_ref() != Some(node) || engine.phase != Phase::Serves {
            open.push(format!("engine {name} is on {node}: {:?}", engine.phase));
        }
    }
    for (node, name) in state.replicas.keys() {
        let resource = cluster.server.get("replicas", name);
        if resource.is_none_or(|r| r["spec"]["desireState"] != "running" || r["spec"]["nodeID"] != *node) {
            open.push(format!("the process of {name} is left on {node}"));
        }
    }
}

/// What is on a disk belongs to a replica, or is told as an orphan.
fn copies(cluster: &Cluster, open: &mut Vec<String>) {
    let state = cluster.world.state();
    let (replicas, orphans) = (cluster.server.all("replicas"), cluster.server.all("orphans"));
    for (disk, directory) in state.copies.keys() {
        let has = |o: &&Value, key: &str| o["spec"][key] == *directory;
        let is_known = replicas.iter().any(|r| has(&r, "dataDirectoryName"));
        let is_told = orphans.iter().any(|o| o["spec"]["parameters"]["DataName"] == *directory);
        if !is_known && !is_told {
            open.push(format!("{disk}/{directory} is nobody's"));
        }
    }
}
