//! What has to be so at all times, and what once nothing is wrong any more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use lh_cluster::api::Quorum;
use serde_json::Value;

use crate::api_server::ApiServer;
use crate::chain::{FOR_CLONE, Known, Layer};
use crate::cluster::{Cluster, TOOK_BACK};
use crate::engine::Phase;
use crate::pass;
use crate::world::State;

/// How long it may take: what failed is waited for ten minutes, and replaced one after the other.
const PATIENCE: Duration = Duration::from_secs(3_600);

/// After so long somebody takes back what was deleted and is kept, since nothing else holds everything.
const TAKEN_BACK: Duration = Duration::from_secs(1_200);

/// How often it is looked.
const LOOK: Duration = Duration::from_secs(20);

/// Replicas of a volume that may be made within an hour. Somebody deletes some, nodes are lost, and a clone is tried again and again while
/// its source is away.
const MADE_AN_HOUR: usize = 60;

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
            cluster.give_up_clones();
        }
        if waited >= PATIENCE {
            let mut what = format!("after {waited:?} without faults: {}", open.join("; "));
            for kind in ["volumes", "engines", "replicas", "snapshots", "volumeattachments", "nodes"] {
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
    devices(cluster, &mut open);
    snapshots(cluster, &mut open);
    copies(cluster, &mut open);
    open
}

fn of_volume(cluster: &Cluster, name: &str, volume: &Value, open: &mut Vec<String>) {
    let (status, replicas) = (&volume["status"], cluster.replicas(name));
    let wanted = volume["spec"]["numberOfReplicas"].as_u64().unwrap_or_default();
    let users = cluster.asked_for(name);
    let engines = engines(cluster, name);
    if engines.len() != users.len().max(1) {
        open.push(format!("{name} has {} engines for {users:?}", engines.len()));
    }
    match users.first() {
        Some(_) => {
            let mut shown: Vec<&str> = ["currentNodeID", "currentMigrationNodeID"]
                .iter()
                .filter_map(|field| status[*field].as_str().filter(|node| !node.is_empty()))
                .collect();
            shown.sort_unstable();
            let mut wanted_on: Vec<&str> = users.iter().map(String::as_str).collect();
            wanted_on.sort_unstable();
            if status["state"] != "attached" || shown != wanted_on {
                open.push(format!(
                    "{name} is {} on {shown:?}, not attached on {wanted_on:?}",
                    status["state"]
                ));
            }
            // Of two neither goes while it is used (`docs/decisions/0023-the-second-of-a-majority-learns-first.md`).
            let is_of_two = volume["spec"]["quorum"] == "majority" && (wanted, replicas.len()) == (1, 2);
            let has_all = replicas.len() as u64 == wanted || is_of_two;
            if status["robustness"] != "healthy" || !has_all {
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
    // Only who is used parts, and not while it moves; and what was taken back lies where it lay, and its successor may be there by now.
    let is_used = users.len() == 1;
    let is_taken_back = cluster.world.state().counts.contains_key(TOOK_BACK);
    if nodes.len() < count && is_used && !is_taken_back {
        open.push(format!("two replicas of {name} are on one node"));
    }
}

/// The engines of a volume.
fn engines(cluster: &Cluster, volume: &str) -> Vec<Value> {
    cluster.server.all("engines").into_iter().filter(|e| e["spec"]["volumeName"] == volume).collect()
}

/// True while somebody uses a volume on a node and goes on to: it is to be there, and who asks for it has been told that it is.
pub(crate) fn is_in_use(server: &ApiServer, volume: &str, node: &str) -> bool {
    let Some(object) = server.get("volumes", volume) else { return false };
    let attachment = server.get("volumeattachments", volume).unwrap_or_default();
    let tickets = attachment["spec"]["attachmentTickets"].as_object();
    let told = &attachment["status"]["attachmentTicketStatuses"];
    let is_met = |(id, ticket): (&String, &Value)| ticket["nodeID"] == node && told[id]["satisfied"] == true;
    let spec = &object["spec"];
    object["metadata"]["deletionTimestamp"].is_null()
        && (spec["nodeID"] == node || spec["migrationNodeID"] == node)
        && tickets.is_some_and(|tickets| tickets.iter().any(is_met))
}

/// Why a stay of a volume on a node is not over: an engine is there, or is to be, whose resource says that it is of this stay.
pub(crate) fn goes_on(server: &ApiServer, volume: &str, node: &str, stay: &str) -> Option<String> {
    let is_of = |e: &Value| {
        e["spec"]["volumeName"] == volume && e["status"]["ownerID"] == node && e["status"]["stay"] == stay
    };
    let engine = server.all("engines").into_iter().find(is_of)?;
    Some(format!(
        "the device of {volume} on {node} is taken away, and {} has it yet",
        engine["metadata"]["name"]
    ))
}

/// At no time two engines of a volume were to answer for it: what the second one is told comes after the first was told to end.
pub(crate) fn one_engine_at_a_time(cluster: &Cluster) {
    let mut engines: BTreeMap<String, Value> = BTreeMap::new();
    for (at, engine) in cluster.server.course_of("engines") {
        let (name, volume) = (engine["metadata"]["name"].to_string(), engine["spec"]["volumeName"].clone());
        engines.insert(name, engine);
        let answers = |e: &&Value| {
            let spec = &e["spec"];
            let is_relay = spec["relayFrom"].as_str().is_some_and(|from| !from.is_empty());
            spec["volumeName"] == volume && spec["desireState"] == "running" && !is_relay
        };
        let count = engines.values().filter(answers).count();
        if count > 1 {
            cluster.world.state().wrong(format!("{at}: {count} engines of {volume} are to answer"));
        }
    }
}

/// Replicas that cannot be filled are not made again and again: each is filled from the start, and deleted with all that it has.
pub(crate) fn replicas_are_made_seldom(cluster: &Cluster) {
    let (mut seen, mut made) = (BTreeSet::new(), BTreeMap::<String, VecDeque<Timestamp>>::new());
    for (at, replica) in cluster.server.course_of("replicas") {
        let Some(uid) = replica["metadata"]["uid"].as_str() else { continue };
        if !seen.insert(uid.to_owned()) {
            continue;
        }
        let at: Timestamp = at.parse().expect("a time");
        let of_volume = made.entry(replica["spec"]["volumeName"].to_string()).or_default();
        of_volume.push_back(at);
        of_volume.retain(|made| at.duration_since(*made) < SignedDuration::from_hours(1));
        if of_volume.len() > MADE_AN_HOUR {
            let what =
                format!("{at}: {} replicas of {} in an hour", of_volume.len(), replica["spec"]["volumeName"]);
            return cluster.world.state().wrong(what);
        }
    }
}

/// Only what should run does.
fn processes(cluster: &Cluster, open: &mut Vec<String>) {
    let state = cluster.world.state();
    for ((node, name), engine) in &state.engines {
        let volume = cluster.server.get("volumes", &engine.volume).unwrap_or_default();
        let is_relay = !engine.relay_from.is_empty();
        let field = if is_relay { "currentMigrationNodeID" } else { "currentNodeID" };
        let is_wanted = cluster.asked_for(&engine.volume).contains(node) && volume["status"][field] == *node;
        // What it passes on to is the engine, under the name that this has now.
        let from = state.relayed(node, &engine.relay_from).and_then(|from| state.engines.get(&from));
        let is_answered =
            !is_relay || from.is_some_and(|e| e.phase == Phase::Serves && e.volume == engine.volume);
        if !is_wanted || !engine.is_up() || !is_answered {
            open.push(format!("engine {name} is on {node}: {:?} {}", engine.phase, engine.relay_from));
        }
    }
    for (node, name) in state.replicas.keys() {
        let resource = cluster.server.get("replicas", name);
        if resource.is_none_or(|r| r["spec"]["desireState"] != "running" || r["spec"]["nodeID"] != *node) {
            open.push(format!("the process of {name} is left on {node}"));
        }
    }
}

/// Notes of which clones people were told that they hold what they are made of.
pub(crate) fn note_clones(server: &ApiServer, state: &mut State) {
    for (name, volume) in &mut state.volumes {
        let told = server.get("volumes", name).unwrap_or_default();
        volume.is_cloned = told["status"]["cloneStatus"]["state"] == "completed";
    }
}

/// Each snapshot is what its resource says, and each resource is one that is wanted.
fn snapshots(cluster: &Cluster, open: &mut Vec<String>) {
    let state = cluster.world.state();
    let resources = cluster.server.all("snapshots");
    for resource in &resources {
        let (name, status) = (resource["metadata"]["name"].as_str().unwrap_or_default(), &resource["status"]);
        let volume = resource["spec"]["volume"].as_str().unwrap_or_default();
        let birth = state.volumes.get(volume).filter(|v| !v.is_deleted).map(|v| v.birth);
        let known = state.snapshots.get(name);
        let is_wanted = known.is_some_and(|k| !k.is_deleted && Some(k.birth) == birth);
        // One that is gone by itself has no resource, but for one that was asked for by that.
        let is_used = !cluster.asked_for(volume).is_empty();
        let is_gone = known.is_some_and(|k| is_gone(&state, k, name));
        let is_left = is_gone && is_used && known.is_some_and(|k| k.is_unnamed);
        if !is_wanted || is_left || !resource["metadata"]["deletionTimestamp"].is_null() {
            open.push(format!("snapshot {name} of {volume} is left: {known:?}"));
            continue;
        }
        // Nobody tells of a chain that rests.
        let is_told = is_used || !is_gone;
        let is_ready = status["readyToUse"] == true;
        if is_told && (is_ready == is_gone || !is_gone && !has_layer(&state, volume, name)) {
            open.push(format!("snapshot {name} of {volume} says of itself {status}, and is {known:?}"));
        }
    }
    for (name, known) in &state.snapshots {
        let is_there =
            state.volumes.get(&known.volume).is_some_and(|v| v.birth == known.birth && !v.is_deleted);
        let is_used = !cluster.asked_for(&known.volume).is_empty();
        let has_resource = resources.iter().any(|r| r["metadata"]["name"] == *name);
        let was_asked = !known.is_unnamed || known.holds.is_some() && is_used;
        if is_there
            && was_asked
            && !known.is_deleted
            && !has_resource
            && !(known.is_unnamed && is_gone(&state, known, name))
        {
            open.push(format!("snapshot {name} has no resource: {known:?}"));
        }
        if is_there
            && is_used
            && (known.is_deleted || known.is_removed)
            && has_layer(&state, &known.volume, name)
        {
            open.push(format!("snapshot {name} is there: {known:?}"));
        }
    }
    for (place, copy) in &state.copies {
        let is_used = !cluster.asked_for(&copy.volume).is_empty();
        let is_of_clone = |layer: &&Layer| layer.name.starts_with(FOR_CLONE) && layer.removed.is_none();
        if let Some(layer) = copy.chain.iter().find(is_of_clone).filter(|_| is_used) {
            open.push(format!("{layer:?}, which was for a clone, is left in {place:?}"));
        }
    }
}

/// True for one that was removed beside its resource, or is lost with what its volume holds: nothing is promised of that where nobody has
/// to agree.
fn is_gone(state: &State, known: &Known, name: &str) -> bool {
    let may_be_lost = state.volumes.get(&known.volume).is_some_and(|v| v.quorum == Quorum::Unsafe);
    known.is_removed || may_be_lost && known.holds.is_some() && !has_layer(state, &known.volume, name)
}

/// True if what people would use of a volume has that snapshot.
fn has_layer(state: &State, volume: &str, name: &str) -> bool {
    let Some(known) = state.volumes.get(volume) else { return false };
    let mut whole = state
        .copies
        .values()
        .filter(|c| c.volume == volume && c.birth == known.birth && c.holds == known.answered);
    whole.any(|copy| copy.chain.iter().any(|layer| layer.name == name && layer.removed.is_none()))
}

/// A device is where its volume is, or was when it came to rest; of one that nobody has had yet nothing is known.
fn devices(cluster: &Cluster, open: &mut Vec<String>) {
    let state = cluster.world.state();
    for ((node, volume), device) in &state.devices {
        let resource = cluster.server.get("volumes", volume).unwrap_or_default();
        let users = cluster.asked_for(volume);
        let owners: Vec<String> = engines(cluster, volume)
            .iter()
            .filter_map(|e| e["status"]["ownerID"].as_str().filter(|owner| !owner.is_empty()))
            .map(str::to_owned)
            .collect();
        let rests_here = users.is_empty() && (owners.is_empty() || owners.contains(node));
        if resource.is_null() || !users.contains(node) && !rests_here {
            open.push(format!("the {device:?} of {volume} is left on {node}, which {users:?} use"));
        }
    }
    for ((node, _), engine) in state.engines.iter().filter(|(_, engine)| engine.is_up()) {
        let device = state.devices.get(&(node.clone(), engine.volume.clone()));
        if device.is_none_or(|d| d.stay != engine.stay || d.birth != engine.birth) {
            open.push(format!("{} is shown on {node} as {device:?}", engine.volume));
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
