//! Engines, their processes, and what is made of both.

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
    let mut engine = Engine::new("v-e-0", spec);
    engine.status = Some(EngineStatus { owner_id: node.into(), ..EngineStatus::default() });
    engine
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
    EngineView { up, size: 100, replicas: replicas.iter().map(replica).collect(), ..EngineView::default() }
}

fn decide(engine: &Engine, process: Option<&ProcessView>, view: Option<&EngineView>) -> Vec<Action> {
    plan(&Observed {
        engine,
        node: "n1",
        instance_manager: "im",
        process,
        programs: RUNS,
        view,
        relay_address: "unix:/relay",
        rests: true,
        rebuild_limits: None,
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
fn a_running_engine_is_told_of_new_limits_and_its_status_has_those_in_force() {
    let mut engine = engine("n1", DesireState::Running, &["a"]);
    let running = process(InstanceState::Running);
    let limits = |actions: &[Action]| {
        let of = |a: &Action| if let Action::LimitSnapshots(limits) = a { Some(*limits) } else { None };
        actions.iter().find_map(of)
    };
    let mut serves = view(true, &[("a", ReplicaMode::ReadWrite)]);
    assert_eq!(limits(&decide(&engine, Some(&running), Some(&serves))), None, "nobody has said anything yet");
    (engine.spec.snapshot_max_count, engine.spec.snapshot_max_size) = (7, Int64Text(300));
    let wanted = SnapshotLimits { count: 7, bytes: 300 };
    let actions = decide(&engine, Some(&running), Some(&serves));
    assert_eq!(limits(&actions), Some(wanted));
    let status = status_in(&actions);
    assert_eq!((status.snapshot_max_count, status.snapshot_max_size), (250, Int64Text(0)), "not yet");
    serves.snapshot_limits = SnapshotLimits { bytes: 0, ..wanted };
    assert_eq!(
        limits(&decide(&engine, Some(&running), Some(&serves))),
        Some(wanted),
        "told of the half only"
    );
    serves.snapshot_limits = wanted;
    let actions = decide(&engine, Some(&running), Some(&serves));
    assert_eq!(limits(&actions), None);
    let status = status_in(&actions);
    assert_eq!((status.snapshot_max_count, status.snapshot_max_size), (7, Int64Text(300)));
    // A relay takes no snapshots, and an engine that is not up yet may answer nobody.
    let relay = EngineView { relay_from: "unix:/x".into(), ..view(true, &[]) };
    engine.spec.relay_from = "unix:/x".into();
    let shows = ProcessView { relay_from: "unix:/x".into(), ..process(InstanceState::Running) };
    assert_eq!(limits(&decide(&engine, Some(&shows), Some(&relay))), None);
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

/// Until they are taken anew a majority is one of the others.
#[test]
fn replicas_that_came_back_elsewhere_are_let_go_one_after_the_other() {
    let mut engine = engine("n1", DesireState::Running, &["a", "b", "c"]);
    for (name, address) in [("b", "tcp:10.0.0.2:10007"), ("c", "tcp:10.0.0.3:10007")] {
        engine.spec.replica_address_map.insert(name.into(), address.into());
    }
    let all = [("a", ReplicaMode::ReadWrite), ("b", ReplicaMode::Error), ("c", ReplicaMode::Error)];
    let let_go = |replicas: &[(&str, ReplicaMode)]| {
        let seen = view(true, replicas);
        let actions = decide(&engine, Some(&process(InstanceState::Running)), Some(&seen));
        let name = |action: Action| match action {
            Action::RemoveReplica { name, .. } => Some(name),
            _ => None,
        };
        actions.into_iter().filter_map(name).collect::<Vec<_>>()
    };
    assert_eq!(let_go(&all), ["b"]);
    let gone = [all[0], all[1], ("d", ReplicaMode::Error), ("e", ReplicaMode::Error)];
    assert_eq!(let_go(&gone), ["d", "e", "b"], "what is no replica any more goes at once");
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
        relay_address: "",
        rests: true,
        rebuild_limits: None,
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
    let (running, serves) = (process(InstanceState::Running), view(true, &[("a", ReplicaMode::ReadWrite)]));
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
            relay_address: "",
            rests: true,
            rebuild_limits: None,
            now: now(),
        })
    };
    let actions = with(&engine, false, Some(&serves));
    let exchange = Action::Exchange("new".into());
    assert_eq!(actions.last(), Some(&exchange), "only once it is told: {actions:?}");
    engine.status = Some(status_in(&actions));
    let again = with(&engine, false, Some(&serves));
    assert!(!again.contains(&exchange), "once: {again:?}");
    let starts = view(false, &[("a", ReplicaMode::Error)]);
    engine.status = Some(status_in(&with(&engine, true, Some(&starts))));
    let status = engine.status.as_ref().unwrap();
    assert_eq!(status.replica_mode_map["a"], ReplicaMode::ReadWrite, "it did not fail");
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
fn a_loss_of_what_was_not_flushed_is_told_once_and_pods_start_anew() {
    let running = process(InstanceState::Running);
    let whole = view(true, &[("a", ReplicaMode::ReadWrite)]);
    let lost = EngineView { has_lost: true, ..whole.clone() };
    let told =
        |actions: &[Action]| actions.iter().any(|a| matches!(a, Action::Tell(e) if e.reason == "DataLost"));
    let mut engine = engine("n1", DesireState::Running, &["a"]);
    let before = decide(&engine, Some(&running), Some(&whole));
    assert!(!told(&before) && status_in(&before).device_lost_at.is_empty());
    engine.status = Some(status_in(&before));
    let then = decide(&engine, Some(&running), Some(&lost));
    let status = status_in(&then);
    assert!(told(&then) && !status.device_lost_at.is_empty());
    assert_eq!(status.conditions.get_condition(INTACT).map(|c| c.reason.as_str()), Some("PowerLost"));
    engine.status = Some(status);
    assert!(!told(&decide(&engine, Some(&running), Some(&lost))), "once");
    // The next engine has lost nothing, and should it, that is said again.
    let next = decide(&engine, Some(&running), Some(&whole));
    assert!(status_in(&next).conditions.get_condition(INTACT).is_none());
    engine.status = Some(status_in(&next));
    assert!(told(&decide(&engine, Some(&running), Some(&lost))));
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

/// A relay's process, and what it says.
fn relay(from: &str, up: bool) -> (ProcessView, EngineView) {
    let process = ProcessView { relay_from: from.into(), ..process(InstanceState::Running) };
    (process, EngineView { relay_from: from.into(), ..view(up, &[]) })
}

#[test]
fn a_relay_starts_without_replicas_and_says_what_it_is() {
    let mut engine = engine("n1", DesireState::Running, &[]);
    engine.spec.relay_from = "unix:/source".into();
    assert_eq!(decide(&engine, None, None).last(), Some(&Action::Start));
    let (process, view) = relay("unix:/source", true);
    engine.spec.volume_size = Int64Text(200);
    let actions = decide(&engine, Some(&process), Some(&view));
    let status = status_in(&actions);
    assert_eq!((status.current_state, status.relaying), (InstanceState::Running, true));
    assert_eq!((status.generation, status.relay_address.as_str()), (None, ""), "it is nobody's engine");
    assert_eq!(actions.len(), 1, "it has no replicas, and does not grow: {actions:?}");
}

#[test]
fn a_migratable_engine_says_where_relays_reach_it() {
    let mut engine = engine("n1", DesireState::Running, &["a"]);
    let (running, serves) = (process(InstanceState::Running), view(true, &[("a", ReplicaMode::ReadWrite)]));
    assert_eq!(status_in(&decide(&engine, Some(&running), Some(&serves))).relay_address, "");
    engine.spec.migratable = true;
    let status = status_in(&decide(&engine, Some(&running), Some(&serves)));
    assert_eq!((status.relay_address.as_str(), status.relaying), ("unix:/relay", false));
}

#[test]
fn a_relay_is_replaced_under_its_device_until_the_engine_itself_serves() {
    let mut engine = engine("n1", DesireState::Running, &["a"]);
    let (process, view) = relay("unix:/source", true);
    let takes_over = |engine: &Engine, process: &ProcessView, view: Option<&EngineView>| {
        let actions = decide(engine, Some(process), view);
        assert!(!actions.iter().any(|a| matches!(a, Action::Stop | Action::Start)), "{actions:?}");
        actions.last() == Some(&Action::TakeOver)
    };
    // Whoever it asks, if anybody: what was begun and not finished is begun again.
    assert!(takes_over(&engine, &process, Some(&view)));
    assert!(takes_over(&engine, &process, None));
    let dead = ProcessView { state: InstanceState::Error, ..process.clone() };
    assert!(takes_over(&engine, &dead, None));
    engine.spec.relay_from = "unix:/elsewhere".into();
    assert!(takes_over(&engine, &process, Some(&view)), "the source is reached elsewhere");
    engine.spec.relay_from = "unix:/source".into();
    assert!(!takes_over(&engine, &process, Some(&view)));
    engine.status = Some(status_in(&decide(&engine, Some(&process), Some(&view))));
    // The instance manager has begun, and who answers is still the relay, or nobody.
    engine.spec.relay_from.clear();
    let begun = ProcessView { relay_from: String::new(), ..process.clone() };
    for still in [Some(&view), None] {
        assert!(!takes_over(&engine, &begun, still));
        assert!(engine.status.as_ref().unwrap().relaying);
    }
    let serves = self::view(true, &[("a", ReplicaMode::ReadWrite)]);
    assert!(!status_in(&decide(&engine, Some(&begun), Some(&serves))).relaying);
}

#[test]
fn an_engine_is_never_made_a_relay() {
    let mut engine = engine("n1", DesireState::Running, &[]);
    engine.spec.relay_from = "unix:/source".into();
    let (running, serves) = (process(InstanceState::Running), view(true, &[]));
    let actions = decide(&engine, Some(&running), Some(&serves));
    assert!(actions.contains(&Action::Stop) && !actions.contains(&Action::TakeOver), "{actions:?}");
}

#[test]
fn a_stay_begins_before_anything_is_started_and_once_what_was_here_is_gone() {
    let mut engine = engine("n1", DesireState::Running, &["a"]);
    let begins = |engine: &Engine, after| {
        let actions = plan(&Observed {
            engine,
            node: "n1",
            instance_manager: "im",
            process: None,
            programs: RUNS,
            view: None,
            relay_address: "",
            rests: true,
            rebuild_limits: None,
            now: now() + Duration::from_secs(after),
        });
        assert_eq!(actions.last(), Some(&Action::Start), "{actions:?}");
        let told = actions.iter().any(|a| matches!(a, Action::SetStatus(_))).then(|| status_in(&actions));
        told.or_else(|| engine.status.clone()).unwrap()
    };
    let first = begins(&engine, 0);
    assert!(!first.stay.is_empty());
    engine.status = Some(EngineStatus { device: "boot/1".into(), ..first.clone() });
    let again = begins(&engine, 10);
    assert_eq!((&again.stay, again.device.as_str()), (&first.stay, "boot/1"), "its process was lost");
    // It was elsewhere, while this node could not be reached.
    let elsewhere = EngineStatus { owner_id: "n2".into(), ..again };
    engine.status = Some(elsewhere);
    let left = process(InstanceState::Error);
    assert_eq!(decide(&engine, Some(&left), None), [Action::Stop], "and nothing is said while it is there");
    let second = begins(&engine, 20);
    assert_ne!(second.stay, first.stay);
    assert_eq!((second.owner_id.as_str(), second.device.as_str()), ("n1", ""));
}

#[test]
fn one_that_waits_for_its_replicas_hears_where_they_are() {
    let engine = engine("n1", DesireState::Running, &["a", "b", "c"]);
    let mut waits =
        view(false, &[("a", ReplicaMode::Error), ("b", ReplicaMode::Error), ("d", ReplicaMode::Error)]);
    waits.replicas[1].address = "unix:/before".into();
    let actions = decide(&engine, Some(&process(InstanceState::Running)), Some(&waits));
    let told: Vec<&Action> = actions.iter().filter(|a| !matches!(a, Action::SetStatus(_))).collect();
    let add = Action::AddReplica { name: "c".into(), address: "unix:/c".into() };
    let moved = Action::AddReplica { name: "b".into(), address: "unix:/b".into() };
    assert_eq!(told, [&add, &moved], "none is given up");
}

#[test]
fn how_large_a_layer_is_is_told_roughly_while_it_is_written_and_exactly_once_it_rests() {
    const MIB: u64 = 1 << 20;
    let running = process(InstanceState::Running);
    let chain = |head: u64, names: &[&str]| {
        let layer = |name: &str, allocated| control::chain::Layer {
            name: name.into(),
            allocated,
            ..control::chain::Layer::default()
        };
        let all = names.iter().map(|name| layer(name, 4096)).chain([layer("", head)]);
        EngineView { chain: Some(all.collect()), ..view(true, &[("a", ReplicaMode::ReadWrite)]) }
    };
    let mut engine = engine("n1", DesireState::Running, &["a"]);
    let tell = |engine: &Engine, view: &EngineView, rests| {
        let observed = Observed {
            engine,
            node: "n1",
            instance_manager: "im",
            process: Some(&running),
            programs: RUNS,
            view: Some(view),
            relay_address: "unix:/relay",
            rests,
            rebuild_limits: None,
            now: now(),
        };
        plan(&observed)
    };
    let size = |actions: &[Action]| status_in(actions).snapshots["volume-head"].size.clone();
    engine.status = Some(status_in(&tell(&engine, &chain(0, &["s1"]), false)));
    assert_eq!(tell(&engine, &chain(4096, &["s1"]), false), [], "nobody has to know at once");
    assert_eq!(size(&tell(&engine, &chain(4096, &["s1"]), true)), "4096", "once it rests it is told");
    let much = 16 * MIB;
    assert_eq!(size(&tell(&engine, &chain(much, &["s1"]), false)), much.to_string());
    assert_eq!(
        size(&tell(&engine, &chain(4096, &["s1", "s2"]), false)),
        "4096",
        "with all else of the chain"
    );
    engine.status = Some(status_in(&tell(&engine, &chain(100_000 * MIB, &["s1"]), false)));
    assert_eq!(tell(&engine, &chain(100_099 * MIB, &["s1"]), false), []);
    assert_eq!(tell(&engine, &chain(99_901 * MIB, &["s1"]), false), [], "of a large one by a thousandth");
    assert!(!tell(&engine, &chain(100_100 * MIB, &["s1"]), false).is_empty());
}
