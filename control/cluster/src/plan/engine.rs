//! One engine on its node: the process that should be there, the replicas it should have, and what to say of it.
//!
//! Decided by the manager of the engine's node alone. A process of an engine that belongs elsewhere, or nowhere, is
//! ended, whatever the resource says of it.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use super::upgrade::{self, Programs, UPGRADED};
use super::{Event, age, written};
use crate::agent::{DeviceId, EngineReplica, EngineView, ProcessView};
use crate::api::{
    Conditions, DesireState, Engine, EngineStatus, GenerationText, InstanceState, Int64Text, RebuildProgress,
    ReplicaMode, SnapshotInfo,
};

/// The condition that says why an engine does not serve.
pub const SERVES: &str = "Serves";

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
    /// The time.
    pub now: Timestamp,
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Start the process, under a new generation.
    Start,
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
            then = (!spec.replica_address_map.is_empty()).then_some(Action::Start);
        }
        (DesireState::Running, Some(process)) => {
            process.uuid.clone_into(&mut status.uuid);
            status.started = true;
            match exchange(o, process, &mut status, &mut actions) {
                Some(image) => then = Some(Action::Exchange(image)),
                None => run(o, process, &mut status, &mut actions),
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
    status.generation = Some(GenerationText(view.generation));
    status.waiting_for.clone_from(&view.waiting_for);
    let reason = if view.waiting_for.is_empty() { "" } else { "Waiting" };
    status.conditions.set_condition(SERVES, view.up && reason.is_empty(), reason, &view.waiting_for, &now);
    follow_device(view, status, &now, actions);
    follow_replicas(view, status, &now);
    follow_chain(view, status);
    if !view.up {
        return;
    }
    let has = |name: &String| view.replicas.iter().any(|r| r.name == *name);
    for (name, address) in spec.replica_address_map.iter().filter(|(name, _)| !has(name)) {
        actions.push(Action::AddReplica { name: name.clone(), address: address.clone() });
    }
    // One whose process came back elsewhere is let go and taken anew; while it is in sync it is where the engine knows it.
    let stays = |r: &EngineReplica| match spec.replica_address_map.get(&r.name) {
        Some(address) => *address == r.address || r.mode != ReplicaMode::Error,
        None => false,
    };
    for replica in view.replicas.iter().filter(|r| !stays(r)) {
        let (name, address) = (replica.name.clone(), replica.address.clone());
        actions.push(Action::RemoveReplica { name, address });
    }
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

/// The chain of layers, if it is known. It stays as it was while it cannot be read.
fn follow_chain(view: &EngineView, status: &mut EngineStatus) {
    let Some(chain) = &view.chain else { return };
    let name = |layer: &str| if layer.is_empty() { "volume-head".to_owned() } else { layer.to_owned() };
    let one = |layer: &control::replica::Layer| {
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
    status.snapshots = chain.iter().map(one).collect();
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
        device_lost_at: std::mem::take(&mut status.device_lost_at),
        ..EngineStatus::default()
    };
    *status = keep;
    status.conditions.retain(|c| c.kind != SERVES);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::EngineSpec;

    /// It runs what it should.
    const RUNS: Programs = Programs { runs_target: true, installed: true };

    fn now() -> Timestamp {
        Timestamp::from_second(1_700_000_000).unwrap()
    }

    fn engine(node: &str, desire: DesireState, replicas: &[&str]) -> Engine {
        let address = |name: &&str| ((*name).to_owned(), format!("unix:/{name}"));
        let spec = EngineSpec {
            node_id: node.into(),
            desire_state: desire,
            volume_size: Int64Text(100),
            replica_address_map: replicas.iter().map(address).collect(),
            ..EngineSpec::default()
        };
        Engine::new("v-e-0", spec)
    }

    fn process(state: InstanceState) -> ProcessView {
        ProcessView { state, ..ProcessView::default() }
    }

    fn view(up: bool, replicas: &[(&str, ReplicaMode)]) -> EngineView {
        let replica = |(name, mode): &(&str, ReplicaMode)| EngineReplica {
            name: (*name).into(),
            address: format!("unix:/{name}"),
            mode: *mode,
            ..EngineReplica::default()
        };
        EngineView {
            up,
            size: 100,
            replicas: replicas.iter().map(replica).collect(),
            ..EngineView::default()
        }
    }

    fn decide(engine: &Engine, process: Option<&ProcessView>, view: Option<&EngineView>) -> Vec<Action> {
        plan(&Observed {
            engine,
            node: "n1",
            instance_manager: "im",
            process,
            programs: RUNS,
            view,
            now: now(),
        })
    }

    fn status_in(actions: &[Action]) -> EngineStatus {
        let status = actions.iter().find_map(|a| match a {
            Action::SetStatus(status) => Some((**status).clone()),
            _ => None,
        });
        status.expect("a status")
    }

    #[test]
    fn a_process_of_somebody_elses_engine_is_ended_and_nothing_is_said_of_it() {
        for node in ["n2", ""] {
            let engine = engine(node, DesireState::Running, &["a"]);
            let running = process(InstanceState::Running);
            assert_eq!(decide(&engine, Some(&running), Some(&view(true, &[]))), [Action::Stop]);
            assert_eq!(decide(&engine, None, None), []);
        }
    }

    #[test]
    fn it_starts_once_it_has_replicas_and_serves_once_its_endpoint_is_usable() {
        use InstanceState::{Running, Starting};
        let empty = engine("n1", DesireState::Running, &[]);
        assert!(!decide(&empty, None, None).contains(&Action::Start));
        let engine = engine("n1", DesireState::Running, &["a"]);
        let starts = decide(&engine, None, None);
        assert_eq!(status_in(&starts).current_state, Starting);
        assert_eq!(starts.last(), Some(&Action::Start), "only once it is told");
        let running = process(Running);
        assert_eq!(status_in(&decide(&engine, Some(&running), None)).current_state, Starting);
        let not_yet = view(false, &[("a", ReplicaMode::ReadWrite)]);
        assert_eq!(status_in(&decide(&engine, Some(&running), Some(&not_yet))).current_state, Starting);
        let serves = view(true, &[("a", ReplicaMode::ReadWrite)]);
        let status = status_in(&decide(&engine, Some(&running), Some(&serves)));
        assert_eq!((status.current_state, status.owner_id.as_str()), (Running, "n1"));
        assert_eq!(status.replica_mode_map["a"], ReplicaMode::ReadWrite);
        // At rest nothing is written, and a silent control socket is no reason to call it dead.
        let mut settled = engine.clone();
        settled.status = Some(status);
        assert_eq!(decide(&settled, Some(&running), Some(&serves)), []);
        assert_eq!(decide(&settled, Some(&running), None), []);
    }

    #[test]
    fn its_replicas_become_what_the_map_says_and_its_size_what_the_volume_should_have() {
        let mut engine = engine("n1", DesireState::Running, &["a", "b"]);
        engine.spec.volume_size = Int64Text(200);
        let running = process(InstanceState::Running);
        let old = view(true, &[("a", ReplicaMode::ReadWrite), ("c", ReplicaMode::Error)]);
        let actions = decide(&engine, Some(&running), Some(&old));
        let add = Action::AddReplica { name: "b".into(), address: "unix:/b".into() };
        let remove = Action::RemoveReplica { name: "c".into(), address: "unix:/c".into() };
        assert!(actions.contains(&add) && actions.contains(&remove), "{actions:?}");
        assert!(actions.contains(&Action::Expand(200)));
        let growing = EngineView { expanding: true, ..old };
        assert!(!decide(&engine, Some(&running), Some(&growing)).contains(&Action::Expand(200)));
    }

    #[test]
    fn a_replica_that_came_back_elsewhere_is_let_go_and_taken_anew() {
        let mut engine = engine("n1", DesireState::Running, &["a", "b"]);
        engine.spec.replica_address_map.insert("b".into(), "tcp:10.0.0.2:10007".into());
        let running = process(InstanceState::Running);
        let seen = |mode| {
            decide(&engine, Some(&running), Some(&view(true, &[("a", ReplicaMode::ReadWrite), ("b", mode)])))
        };
        let remove = Action::RemoveReplica { name: "b".into(), address: "unix:/b".into() };
        assert!(!seen(ReplicaMode::ReadWrite).contains(&remove), "it serves where the engine knows it");
        assert!(seen(ReplicaMode::Error).contains(&remove));
        let without = decide(&engine, Some(&running), Some(&view(true, &[("a", ReplicaMode::ReadWrite)])));
        let add = Action::AddReplica { name: "b".into(), address: "tcp:10.0.0.2:10007".into() };
        assert!(without.contains(&add), "{without:?}");
    }

    #[test]
    fn one_that_gave_up_is_tried_again_after_a_while() {
        let engine = engine("n1", DesireState::Running, &["a"]);
        let dead = ProcessView { error: "a newer engine".into(), ..process(InstanceState::Error) };
        let actions = decide(&engine, Some(&dead), None);
        let status = status_in(&actions);
        assert_eq!(status.current_state, InstanceState::Error);
        assert_eq!(status.conditions.get_condition(SERVES).unwrap().message, "a newer engine");
        assert!(actions.contains(&Action::LookAgain(RETRY)) && !actions.contains(&Action::Stop));
        let mut later = engine;
        later.status = Some(status);
        let observed = Observed {
            engine: &later,
            node: "n1",
            instance_manager: "im",
            process: Some(&dead),
            programs: RUNS,
            view: None,
            now: now() + RETRY,
        };
        assert_eq!(plan(&observed), [Action::Stop]);
    }

    #[test]
    fn a_stop_is_over_when_the_process_is_gone() {
        let mut engine = engine("n1", DesireState::Stopped, &["a"]);
        let running = process(InstanceState::Running);
        let serves = view(true, &[("a", ReplicaMode::ReadWrite)]);
        let actions = decide(&engine, Some(&running), Some(&serves));
        assert!(actions.contains(&Action::Stop));
        let status = status_in(&actions);
        assert_eq!(status.current_state, InstanceState::Stopping);
        engine.status = Some(EngineStatus { endpoint: "/dev/longhorn/v".into(), ..status });
        let status = status_in(&decide(&engine, None, None));
        assert_eq!((status.current_state, status.endpoint.as_str()), (InstanceState::Stopped, ""));
    }

    #[test]
    fn another_program_takes_over_while_the_engine_is_said_to_run() {
        let mut engine = engine("n1", DesireState::Running, &["a"]);
        let (running, serves) =
            (process(InstanceState::Running), view(true, &[("a", ReplicaMode::ReadWrite)]));
        engine.spec.image = "old".into();
        engine.status = Some(status_in(&decide(&engine, Some(&running), Some(&serves))));
        assert_eq!(engine.status.as_ref().unwrap().current_image, "old");
        engine.spec.image = "new".into();
        let with = |engine: &Engine, runs_target, view: Option<&EngineView>| {
            let programs = Programs { runs_target, installed: true };
            let process = Some(&running);
            plan(&Observed {
                engine,
                node: "n1",
                instance_manager: "im",
                process,
                programs,
                view,
                now: now(),
            })
        };
        let actions = with(&engine, false, Some(&serves));
        let exchange = Action::Exchange("new".into());
        assert_eq!(actions.last(), Some(&exchange), "only once it is told: {actions:?}");
        engine.status = Some(status_in(&actions));
        let again = with(&engine, false, Some(&serves));
        assert!(!again.contains(&exchange), "once: {again:?}");
        let starts = view(false, &[]);
        engine.status = Some(status_in(&with(&engine, true, Some(&starts))));
        let status = engine.status.as_ref().unwrap();
        assert_eq!((status.current_state, &*status.current_image), (InstanceState::Running, "old"));
        let status = status_in(&with(&engine, true, Some(&serves)));
        assert_eq!((&*status.current_image, status.conditions.holds(UPGRADED)), ("new", true));
        let dead = ProcessView { error: "bad".into(), ..process(InstanceState::Starting) };
        let actions = decide(&engine, Some(&dead), None);
        assert_eq!(actions.last(), Some(&Action::Exchange("old".into())), "{actions:?}");
        assert_eq!(status_in(&actions).failed_image, "new");
        // Its process was lost meanwhile, with the pod that it ran in: the next one is of the new program, and goes back, too.
        let starts = decide(&engine, None, None);
        assert_eq!(starts.last(), Some(&Action::Start));
        engine.status = Some(status_in(&starts));
        let actions = decide(&engine, Some(&dead), None);
        assert_eq!(actions.last(), Some(&Action::Exchange("old".into())), "{actions:?}");
    }

    #[test]
    fn a_device_that_another_one_replaced_under_its_users_is_lost() {
        let running = process(InstanceState::Running);
        let on = |boot: &str, sequence| EngineView {
            device: Some(DeviceId { boot: boot.into(), sequence }),
            ..view(true, &[("a", ReplicaMode::ReadWrite)])
        };
        let lost = |first: &EngineView, between: Option<DesireState>, then: &EngineView| {
            let mut engine = engine("n1", DesireState::Running, &["a"]);
            engine.status = Some(status_in(&decide(&engine, Some(&running), Some(first))));
            if let Some(desire) = between {
                engine.spec.desire_state = desire;
                engine.status = Some(status_in(&decide(&engine, None, None)));
                engine.spec.desire_state = DesireState::Running;
            }
            let actions = decide(&engine, Some(&running), Some(then));
            let told = actions.iter().any(|a| matches!(a, Action::Tell(e) if e.reason == "DeviceLost"));
            let status = actions.iter().find_map(|a| match a {
                Action::SetStatus(status) => Some(!status.device_lost_at.is_empty()),
                _ => None,
            });
            assert_eq!(status.unwrap_or_default(), told);
            told
        };
        let (stays, stops) = (Some(DesireState::Running), Some(DesireState::Stopped));
        assert!(!lost(&on("b", 7), None, &on("b", 7)), "the same one, taken over");
        assert!(lost(&on("b", 7), None, &on("b", 8)));
        assert!(lost(&on("b", 7), stays, &on("b", 8)), "its process was gone meanwhile");
        assert!(!lost(&on("b", 7), stops, &on("b", 8)), "it was detached meanwhile");
        assert!(!lost(&on("b", 7), None, &on("c", 1)), "its node was started anew");
        assert!(!lost(&view(true, &[]), None, &on("b", 7)), "the first one");
    }
}
