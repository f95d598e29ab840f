//! One engine on its node: the process that should be there, the replicas it should have, and what to say of it.
//!
//! Decided by the manager of the engine's node alone. A process of an engine that belongs elsewhere, or nowhere, is
//! ended, whatever the resource says of it. A relay, which only shows the volume here, becomes the engine under its device
//! (`super::volume`, migration).

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use super::upgrade::{self, Programs, UPGRADED};
use super::{Event, age, renew, renew_conditions, written};
use crate::agent::{DeviceId, EngineReplica, EngineView, ProcessView, RebuildLimits};
use crate::api::{
    Conditions, DesireState, Engine, EngineStatus, GenerationText, InstanceState, Int64Text, RebuildProgress,
    ReplicaMode, SnapshotInfo, SnapshotLimits,
};

/// The condition that says why an engine does not serve.
pub const SERVES: &str = "Serves";

/// Condition of an engine, false where what was answered may be lost; else it has none.
pub const INTACT: &str = "Intact";

/// How long a process that ended for good is left alone before it is tried again: its reason may be gone, and a
/// manager that tries without pause would only hide it.
const RETRY: Duration = Duration::from_secs(10);

/// An engine and what its node knows of it.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// The engine.
    pub engine: &'a Engine,
    /// This node.
    pub node: &'a str,
    /// This node's instance manager.
    pub instance_manager: &'a str,
    /// The process of that name on this node.
    pub process: Option<&'a ProcessView>,
    /// What that process runs.
    pub programs: Programs,
    /// What the engine says; `None`: it does not answer.
    pub view: Option<&'a EngineView>,
    /// Where relays reach it, if it is one that listens.
    pub relay_address: &'a str,
    /// None of its layers has grown or shrunk for a while.
    pub rests: bool,
    /// How its rebuilds should be held back; `None`: nobody here knows.
    pub rebuild_limits: Option<RebuildLimits>,
    /// The time.
    pub now: Timestamp,
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Start the process, under a new generation.
    Start,
    /// Replace a relay's process, under its device: by the engine, under a new generation, or by a relay from another address.
    TakeOver,
    /// Have the process run the program of this image.
    Exchange(String),
    /// End the process.
    Stop,
    /// Let the engine have one more replica.
    AddReplica {
        /// Its name.
        name: String,
        /// Where it is reached.
        address: String,
    },
    /// Let the engine go on without a replica.
    RemoveReplica {
        /// Its name.
        name: String,
        /// Where it was reached.
        address: String,
    },
    /// Grow the volume to so many bytes.
    Expand(u64),
    /// Let the engine take so many snapshots from now on.
    LimitSnapshots(SnapshotLimits),
    /// Hold back its rebuilds from now on.
    LimitRebuilds(RebuildLimits),
    /// Write the engine's status.
    SetStatus(Box<EngineStatus>),
    /// Tell people.
    Tell(Event),
    /// Look again after this time.
    LookAgain(Duration),
}

/// Decides for one engine.
pub fn plan(o: &Observed<'_>) -> Vec<Action> {
    let mut actions = Vec::new();
    let spec = &o.engine.spec;
    if spec.node_id != o.node {
        if o.process.is_some() {
            actions.push(Action::Stop);
        }
        return actions;
    }
    let mut status = o.engine.status.clone().unwrap_or_default();
    renew_conditions(&mut status.conditions, o.now);
    renew([&mut status.device_lost_at], o.now);
    if status.owner_id != o.node {
        // It was elsewhere, or nowhere yet. A process here is of an earlier stay, and was shut out since: nothing is said before it
        // is gone. Then a stay begins, and is told before anything is started, so that whoever starts it later starts it as that.
        if o.process.is_some() {
            return vec![Action::Stop];
        }
        status.stay.clear();
        status.device.clear();
    }
    if status.stay.is_empty() && o.process.is_none() {
        status.stay = o.now.as_nanosecond().to_string();
    }
    o.node.clone_into(&mut status.owner_id);
    o.instance_manager.clone_into(&mut status.instance_manager_name);
    // What the status has to say before it is done: whoever decided otherwise meanwhile made that write fail, and whoever
    // decides afterwards knows that there may be a process.
    let mut then = None;
    match (spec.desire_state, o.process) {
        (DesireState::Stopped, None) => {
            stopped(&mut status);
            // It was taken away on purpose.
            status.device.clear();
            status.conditions.retain(|c| c.kind != UPGRADED);
        }
        (DesireState::Stopped, Some(_)) => {
            status.current_state = InstanceState::Stopping;
            actions.push(Action::Stop);
        }
        (DesireState::Running, None) => {
            stopped(&mut status);
            status.current_state = InstanceState::Starting;
            then = (spec.relays() || !spec.replica_address_map.is_empty()).then_some(Action::Start);
        }
        (DesireState::Running, Some(process)) => {
            process.uuid.clone_into(&mut status.uuid);
            status.started = true;
            if process.relay_from == spec.relay_from {
                match exchange(o, process, &mut status, &mut actions) {
                    Some(image) => then = Some(Action::Exchange(image)),
                    None => run(o, process, &mut status, &mut actions),
                }
            } else if process.relay_from.is_empty() {
                // What another migration left behind. It takes its device with it, and nobody uses that here.
                status.current_state = InstanceState::Stopping;
                actions.push(Action::Stop);
            } else {
                then = Some(Action::TakeOver);
            }
        }
    }
    if o.engine.status.as_ref() != Some(&status) {
        actions.push(Action::SetStatus(Box::new(status)));
    }
    actions.extend(then);
    actions
}

fn run(o: &Observed<'_>, process: &ProcessView, status: &mut EngineStatus, actions: &mut Vec<Action>) {
    let now = written(o.now);
    match process.state {
        InstanceState::Error | InstanceState::Stopped => {
            let is_news = status.current_state != InstanceState::Error;
            status.current_state = InstanceState::Error;
            status.endpoint.clear();
            let why = if process.error.is_empty() { "the process ended" } else { &process.error };
            status.conditions.set_condition(SERVES, false, "Ended", why, &now);
            let since =
                status.conditions.get_condition(SERVES).and_then(|c| age(&c.last_transition_time, o.now));
            if is_news {
                let message = format!("the engine ended: {why}");
                actions.push(Action::Tell(Event { warning: true, reason: "EngineEnded", message }));
            }
            match RETRY.checked_sub(since.unwrap_or_default()) {
                Some(left) if left > Duration::ZERO => actions.push(Action::LookAgain(left)),
                _ => actions.push(Action::Stop),
            }
        }
        InstanceState::Stopping => status.current_state = InstanceState::Stopping,
        _ => match o.view {
            Some(view) => serve(o, view, status, actions),
            // One that served does so still, for all that is known: only its control socket is silent.
            None if status.current_state == InstanceState::Running => {}
            None => status.current_state = InstanceState::Starting,
        },
    }
}

/// Exchanges the program for that of the image that is given back, or sees how that fares.
fn exchange(
    o: &Observed<'_>,
    process: &ProcessView,
    status: &mut EngineStatus,
    actions: &mut Vec<Action>,
) -> Option<String> {
    let wanted = &o.engine.spec.image;
    let serves = process.state == InstanceState::Running && o.view.is_some_and(|view| view.up);
    let images = (&mut status.current_image, &mut status.failed_image);
    let advance = upgrade::advance(
        wanted,
        (o.programs, serves, trouble(process)),
        images,
        &mut status.conditions,
        o.now,
    );
    actions.extend(advance.wait.map(Action::LookAgain));
    if let Some(why) = advance.failure {
        let message = format!("image {wanted} does not serve ({why}); back to {}", status.current_image);
        actions.push(Action::Tell(Event { warning: true, reason: "UpgradeFailed", message }));
    }
    advance.exchange
}

/// Why a process does not run; empty if it does, or is on its way for the first time.
pub(super) fn trouble(process: &ProcessView) -> &str {
    match process.state {
        InstanceState::Running => "",
        _ if !process.error.is_empty() => &process.error,
        InstanceState::Error | InstanceState::Stopped => "the process ended",
        _ => "",
    }
}

fn serve(o: &Observed<'_>, view: &EngineView, status: &mut EngineStatus, actions: &mut Vec<Action>) {
    let (spec, now) = (&o.engine.spec, written(o.now));
    // While its program is exchanged it is what it was: whoever uses the volume only waits.
    let goes_on = status.current_state == InstanceState::Running && upgrade::is_on(&status.conditions);
    status.current_state = if view.up || goes_on { InstanceState::Running } else { InstanceState::Starting };
    status.starting = !view.up;
    status.endpoint.clone_from(&view.endpoint);
    status.current_size = Int64Text::of_bytes(view.size);
    status.relaying = !view.relay_from.is_empty();
    status.generation = (!status.relaying).then_some(GenerationText(view.generation));
    let serves_relays = view.up && !status.relaying && spec.migratable;
    status.relay_address = if serves_relays { o.relay_address.to_owned() } else { String::new() };
    status.waiting_for.clone_from(&view.waiting_for);
    let reason = if view.waiting_for.is_empty() { "" } else { "Waiting" };
    status.conditions.set_condition(SERVES, view.up && reason.is_empty(), reason, &view.waiting_for, &now);
    follow_device(view, status, &now, actions);
    follow_loss(view, status, &now, actions);
    // To one that has just taken another one's place all are out until it serves: none has failed for that.
    if view.up || !goes_on {
        follow_replicas(view, status, &now);
    }
    follow_chain(view, o.rests, status);
    if status.relaying {
        return;
    }
    status.snapshot_max_count = view.snapshot_limits.count.into();
    status.snapshot_max_size = Int64Text::of_bytes(view.snapshot_limits.bytes);
    status.rebuild_concurrent_sync_limit = view.rebuild_limits.at_once.into();
    // Before it is up, too: the one that it waits for may be among them.
    let has = |name: &String| view.replicas.iter().any(|r| r.name == *name);
    for (name, address) in spec.replica_address_map.iter().filter(|(name, _)| !has(name)) {
        actions.push(Action::AddReplica { name: name.clone(), address: address.clone() });
    }
    if !view.up {
        // None is let go: which of them hold everything is not known yet.
        for replica in view.replicas.iter().filter(|r| r.mode == ReplicaMode::Error) {
            let now = spec.replica_address_map.get(&replica.name);
            if let Some(address) = now.filter(|address| **address != replica.address) {
                actions.push(Action::AddReplica { name: replica.name.clone(), address: address.clone() });
            }
        }
        return;
    }
    // One whose process came back elsewhere is let go and taken anew; while it is in sync it is where the engine knows it.
    let stays = |r: &EngineReplica| match spec.replica_address_map.get(&r.name) {
        Some(address) => *address == r.address || r.mode != ReplicaMode::Error,
        None => false,
    };
    let (moved, gone): (Vec<&EngineReplica>, Vec<&EngineReplica>) = view
        .replicas
        .iter()
        .filter(|r| !stays(r))
        .partition(|r| spec.replica_address_map.contains_key(&r.name));
    // One after the other: until they are taken anew they are no part of its majority.
    for replica in gone.into_iter().chain(moved.into_iter().take(1)) {
        let (name, address) = (replica.name.clone(), replica.address.clone());
        actions.push(Action::RemoveReplica { name, address });
    }
    if view.snapshot_limits != spec.snapshot_limits() {
        actions.push(Action::LimitSnapshots(spec.snapshot_limits()));
    }
    let differ = |wanted: &RebuildLimits| {
        let now = view.rebuild_limits;
        let can_copy_more = now.at_once > 0;
        wanted.bytes_per_second != now.bytes_per_second || can_copy_more && wanted.at_once != now.at_once
    };
    actions.extend(o.rebuild_limits.filter(differ).map(Action::LimitRebuilds));
    status.is_expanding = view.expanding;
    let wanted = spec.volume_size.bytes();
    if view.size < wanted && !view.expanding {
        actions.push(Action::Expand(wanted));
    } else if view.size >= wanted {
        status.last_expansion_error.clear();
        status.last_expansion_failed_at.clear();
    }
}

/// Notes which device the volume is, and that it became another one under those who use it: what they have open or mounted
/// is dead. After its node was started anew nobody has anything open.
fn follow_device(view: &EngineView, status: &mut EngineStatus, now: &str, actions: &mut Vec<Action>) {
    let Some(device) = &view.device else { return };
    let before = DeviceId::parse(&status.device);
    if before.is_some_and(|before| before.boot == device.boot && before.sequence != device.sequence) {
        now.clone_into(&mut status.device_lost_at);
        let message = "another device took the place of the one that is in use".to_owned();
        actions.push(Action::Tell(Event { warning: true, reason: "DeviceLost", message }));
    }
    status.device = device.to_string();
}

/// Notes that what was answered and not flushed may be lost, and tells it once. A file system that is mounted then stops writing: its
/// pods are helped as those whose device was lost.
fn follow_loss(view: &EngineView, status: &mut EngineStatus, now: &str, actions: &mut Vec<Action>) {
    if !view.has_lost {
        status.conditions.retain(|c| c.kind != INTACT);
        return;
    }
    let message = "the hosts of all replicas lost their power, or their disks failed, and what was written and not flushed before may be \
        lost: flushes fail for a minute, and pods that have the volume mounted have to start anew";
    if status.conditions.get_condition(INTACT).is_none() {
        now.clone_into(&mut status.device_lost_at);
        actions.push(Action::Tell(Event { warning: true, reason: "DataLost", message: message.to_owned() }));
    }
    status.conditions.set_condition(INTACT, false, "PowerLost", message, now);
}

/// Modes, reasons and rebuilds as the engine says.
fn follow_replicas(view: &EngineView, status: &mut EngineStatus, now: &str) {
    let mut modes = BTreeMap::new();
    let mut reasons = BTreeMap::new();
    let mut rebuilds = BTreeMap::new();
    for replica in &view.replicas {
        if status.replica_mode_map.get(&replica.name) != Some(&replica.mode) {
            status.replica_transition_time_map.insert(replica.name.clone(), now.to_owned());
        }
        modes.insert(replica.name.clone(), replica.mode);
        if !replica.reason.is_empty() {
            reasons.insert(replica.name.clone(), replica.reason.clone());
        }
        if replica.mode == ReplicaMode::WriteOnly {
            let progress = RebuildProgress {
                is_rebuilding: true,
                progress: i64::from(replica.rebuild_progress),
                state: "in_progress".to_owned(),
                ..RebuildProgress::default()
            };
            rebuilds.insert(replica.address.clone(), progress);
        }
    }
    status.replica_transition_time_map.retain(|name, _| modes.contains_key(name));
    status.current_replica_address_map =
        view.replicas.iter().map(|r| (r.name.clone(), r.address.clone())).collect();
    status.replica_mode_map = modes;
    status.replica_reasons = reasons;
    status.rebuild_status = rebuilds;
}

/// The chain of layers, if it is known. It stays as it was while it cannot be read. How large a layer that is being written has become is
/// told roughly, and exactly once it rests: each time would be a write of the Engine and of its Volume.
fn follow_chain(view: &EngineView, rests: bool, status: &mut EngineStatus) {
    let Some(chain) = &view.chain else { return };
    let name = |layer: &str| if layer.is_empty() { "volume-head".to_owned() } else { layer.to_owned() };
    let one = |layer: &control::chain::Layer| {
        let children = chain.iter().filter(|c| !layer.name.is_empty() && c.parent == layer.name);
        let info = SnapshotInfo {
            children: children.map(|c| (name(&c.name), true)).collect(),
            created: layer.created.clone(),
            labels: layer.labels.clone(),
            name: name(&layer.name),
            parent: layer.parent.clone(),
            removed: layer.removed,
            size: layer.allocated.to_string(),
            user_created: layer.user_created,
        };
        (info.name.clone(), info)
    };
    let now = chain.iter().map(one).collect();
    if rests || !is_about(&status.snapshots, &now) {
        status.snapshots = now;
    }
}

/// A change of a layer's size below this many bytes is told once the layer rests.
const ROUGHLY: u64 = 16 << 20;

/// True if nothing differs but sizes, and those by little.
fn is_about(told: &BTreeMap<String, SnapshotInfo>, now: &BTreeMap<String, SnapshotInfo>) -> bool {
    let bytes = |layer: &SnapshotInfo| layer.size.parse::<u64>().unwrap_or_default();
    let is_near = |a: &SnapshotInfo, b: &SnapshotInfo| {
        let step = (bytes(a) / 1000).max(ROUGHLY);
        bytes(a).abs_diff(bytes(b)) < step && SnapshotInfo { size: a.size.clone(), ..b.clone() } == *a
    };
    told.len() == now.len() && told.iter().all(|(name, a)| now.get(name).is_some_and(|b| is_near(a, b)))
}

/// Of an engine without a process nothing is known but its past.
fn stopped(status: &mut EngineStatus) {
    let keep = EngineStatus {
        owner_id: std::mem::take(&mut status.owner_id),
        instance_manager_name: std::mem::take(&mut status.instance_manager_name),
        generation: status.generation,
        conditions: std::mem::take(&mut status.conditions),
        snapshots: std::mem::take(&mut status.snapshots),
        last_expansion_error: std::mem::take(&mut status.last_expansion_error),
        last_expansion_failed_at: std::mem::take(&mut status.last_expansion_failed_at),
        current_size: status.current_size,
        current_image: std::mem::take(&mut status.current_image),
        failed_image: std::mem::take(&mut status.failed_image),
        device: std::mem::take(&mut status.device),
        stay: std::mem::take(&mut status.stay),
        device_lost_at: std::mem::take(&mut status.device_lost_at),
        ..EngineStatus::default()
    };
    *status = keep;
    status.conditions.retain(|c| c.kind != SERVES);
}
