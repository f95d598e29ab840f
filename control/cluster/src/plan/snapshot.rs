//! A snapshot: taken by the volume's engine, told from the engine's chain, removed through the engine.
//!
//! Decided by the manager of the node that the engine runs on; where none runs, the leader asks for the volume to be
//! attached for as long as there is something to do ([`needs_engine`]).

pub mod unnamed;

use std::collections::{BTreeMap, BTreeSet};

use super::{FINALIZER, written};
use crate::api::{Engine, EngineStatus, InstanceState, Snapshot, SnapshotInfo, SnapshotStatus, Volume};
use k8s_openapi::jiff::Timestamp;

/// The label of a snapshot that was taken to copy a volume, and goes with the copy, which it names.
pub const FOR_CLONE: &str = "longhorn.io/clone";

/// The name that engines tell of the layer that is written.
const HEAD: &str = "volume-head";

/// How names of snapshots begin that managers and engines take for clones, and remove again.
const CLONE: &str = "clone-";

/// True for a name that nobody else may give a snapshot: the head would be taken for it, or it would be copied from and
/// removed in the place of another.
pub fn is_own_name(name: &str) -> bool {
    name == HEAD || name.starts_with(CLONE)
}

/// A snapshot and what it depends on.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// The snapshot.
    pub snapshot: &'a Snapshot,
    /// Its volume; `None`: it is gone.
    pub volume: Option<&'a Volume>,
    /// The volume's engine.
    pub engine: Option<&'a Engine>,
    /// A clone is being copied from it.
    pub in_use: bool,
    /// The time.
    pub now: Timestamp,
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Keep the resource until the snapshot is gone.
    AddFinalizer,
    /// The snapshot is gone, or its volume is.
    RemoveFinalizer,
    /// Take it.
    Take,
    /// Mark it for removal, if it is there.
    Remove,
    /// Let the resource go, which named a snapshot that is there no more.
    Forget,
    /// Write its status.
    SetStatus(Box<SnapshotStatus>),
}

/// How the error of a snapshot begins that its engine refused.
const NO_ROOM: &str = "TooManySnapshots: ";
const NOT_FROZEN: &str = "NotFrozen: ";

/// Why an engine refused a snapshot, in its own words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal<'a> {
    /// The volume's limits leave no room. It is asked for again now and then, and whenever the engine tells of something new; the volume
    /// is not attached for that alone.
    NoRoom(&'a str),
    /// The file system could not be frozen. It is asked for again until it can, or is not mounted any more.
    NotFrozen(&'a str),
}

impl<'a> Refusal<'a> {
    /// Why the engine refused a snapshot that says this of itself; `None`: it did not, or has taken it since.
    pub fn of(status: &'a SnapshotStatus) -> Option<Self> {
        let error = status.error.as_str();
        let no_room = error.strip_prefix(NO_ROOM).map(Self::NoRoom);
        no_room.or_else(|| error.strip_prefix(NOT_FROZEN).map(Self::NotFrozen))
    }

    /// What the snapshot says of itself.
    pub fn told(self, status: SnapshotStatus) -> SnapshotStatus {
        let (begin, why) = match self {
            Self::NoRoom(why) => (NO_ROOM, why),
            Self::NotFrozen(why) => (NOT_FROZEN, why),
        };
        SnapshotStatus { error: format!("{begin}{why}"), ..status }
    }

    /// The engine's words.
    pub const fn why(self) -> &'a str {
        match self {
            Self::NoRoom(why) | Self::NotFrozen(why) => why,
        }
    }
}

fn name(snapshot: &Snapshot) -> &str {
    snapshot.metadata.name.as_deref().unwrap_or_default()
}

fn is_kept(snapshot: &Snapshot) -> bool {
    snapshot.metadata.finalizers.as_deref().unwrap_or_default().iter().any(|f| f == FINALIZER)
}

/// True for one that is to be taken, and of which nobody has told yet that it was.
fn never_seen(snapshot: &Snapshot) -> bool {
    snapshot.spec.create_snapshot && snapshot.status.as_ref().is_none_or(|s| s.creation_time.is_empty())
}

/// True for one whose layer, if it is marked for removal, is none that was taken for it: one that nobody could use until now would have
/// been told as that before. One that was taken too late is removed at once, and says so.
fn is_another(snapshot: &Snapshot) -> bool {
    let refusal = snapshot.status.as_ref().and_then(Refusal::of);
    never_seen(snapshot) && !matches!(refusal, Some(Refusal::NotFrozen(_)))
}

/// True for a resource that took no snapshot, and named one that was there: somebody has told of that, or made the resource for it.
fn named_what_was_there(snapshot: &Snapshot) -> bool {
    let was_seen = snapshot.status.as_ref().is_some_and(|s| !s.creation_time.is_empty());
    !snapshot.spec.create_snapshot && (was_seen || unnamed::is_named(snapshot))
}

fn serves(engine: Option<&Engine>) -> bool {
    let status = engine.and_then(|e| e.status.as_ref());
    status.is_some_and(|s| s.current_state == InstanceState::Running && !s.relaying)
}

/// True while the engine waits, for its replicas for one: it changes its chain afterwards, and each question would be one more
/// that waits in it.
fn waits(engine: Option<&Engine>) -> bool {
    engine.and_then(|e| e.status.as_ref()).is_some_and(|s| !s.waiting_for.is_empty())
}

/// True if the snapshot waits for an engine.
pub fn needs_engine(o: &Observed<'_>) -> bool {
    let volume_stays = o.volume.is_some_and(|v| v.metadata.deletion_timestamp.is_none());
    let status = o.snapshot.status.clone().unwrap_or_default();
    let is_going = o.snapshot.metadata.deletion_timestamp.is_some();
    let may_be_taken = status.error.is_empty() || matches!(Refusal::of(&status), Some(Refusal::NotFrozen(_)));
    let to_take = o.snapshot.spec.create_snapshot && status.creation_time.is_empty() && may_be_taken;
    volume_stays && (to_take && !is_going || is_going && is_kept(o.snapshot))
}

/// What to do about the ticket by which a volume is attached for its snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ticket {
    /// Nothing.
    Leave,
    /// Ask for the volume on this node, and on no other one.
    Ask(String),
    /// Let it go.
    Drop,
}

/// Decides about that ticket. `asked`: the node that it names, if there is one; `rests`: the volume is on no node; `near`: the
/// nodes of its replicas. One on a node that does not answer goes to one that does: it may be gone for good.
pub fn ticket(
    needed: bool,
    asked: Option<&str>,
    rests: bool,
    near: &[String],
    nodes_up: &BTreeSet<String>,
) -> Ticket {
    // Where its replicas are, so that nothing has to travel.
    let place =
        || near.iter().find(|node| nodes_up.contains(*node)).cloned().map_or(Ticket::Leave, Ticket::Ask);
    match asked {
        Some(_) if !needed => Ticket::Drop,
        Some(node) if !nodes_up.contains(node) => place(),
        None if needed && rests => place(),
        Some(_) | None => Ticket::Leave,
    }
}

/// True if an engine tells something by which a snapshot of its volume could be decided on otherwise. How much the head has grown, how
/// far a rebuild is and the like is nothing to snapshots.
pub fn is_news(before: &Engine, now: &Engine) -> bool {
    type Layers = BTreeMap<String, SnapshotInfo>;
    let layers = |status: Option<&EngineStatus>| -> Layers {
        let mut layers = status.map(|s| s.snapshots.clone()).unwrap_or_default();
        layers.entry(HEAD.to_owned()).and_modify(|head| head.size.clear());
        layers
    };
    let state = |status: Option<&EngineStatus>| {
        status.map(|s| (s.current_state, s.relaying, s.waiting_for.is_empty(), s.owner_id.clone()))
    };
    let (old, new) = (before.status.as_ref(), now.status.as_ref());
    before.spec != now.spec || state(old) != state(new) || layers(old) != layers(new)
}

/// Decides for one snapshot of a volume whose engine runs here, or whose volume is gone.
pub fn plan(o: &Observed<'_>) -> Vec<Action> {
    let is_going = o.snapshot.metadata.deletion_timestamp.is_some();
    let volume_stays = o.volume.is_some_and(|v| v.metadata.deletion_timestamp.is_none());
    if is_going && !volume_stays {
        return if is_kept(o.snapshot) { vec![Action::RemoveFinalizer] } else { Vec::new() };
    }
    if !serves(o.engine) {
        return Vec::new();
    }
    let chain = o.engine.and_then(|e| e.status.as_ref()).map(|s| &s.snapshots);
    let found = chain.and_then(|c| c.get(name(o.snapshot)));
    // Every chain has a head: one without anything is not known yet.
    let is_unknown = chain.is_none_or(|c| c.is_empty());
    if is_going {
        return match found {
            _ if !is_kept(o.snapshot) || is_unknown => Vec::new(),
            // Its layer is being read by a process that no engine knows of.
            Some(_) if o.in_use => Vec::new(),
            // What is left of it is the engine's affair.
            Some(info) if info.removed => vec![Action::RemoveFinalizer],
            // One that was asked for before the engine began to wait may be taken yet.
            _ if waits(o.engine) => Vec::new(),
            Some(_) => vec![Action::Remove],
            // One that was never seen may be taken all the same: what is told of the chain may be older. The engine knows.
            None if never_seen(o.snapshot) && o.in_use => Vec::new(),
            None if never_seen(o.snapshot) => vec![Action::Remove, Action::RemoveFinalizer],
            None => vec![Action::RemoveFinalizer],
        };
    }
    if found.is_none() && !is_unknown && !waits(o.engine) && named_what_was_there(o.snapshot) {
        return vec![Action::Forget];
    }
    let mut actions = if is_kept(o.snapshot) { Vec::new() } else { vec![Action::AddFinalizer] };
    let mut status = o.snapshot.status.clone().unwrap_or_default();
    match found {
        // Of one of its name that was removed: as of a clone that was deleted, and made anew. It is folded away first.
        Some(info) if info.removed && is_another(o.snapshot) => {
            if !waits(o.engine) {
                actions.push(Action::Remove);
            }
        }
        Some(info) => {
            status.creation_time.clone_from(&info.created);
            status.parent.clone_from(&info.parent);
            status.children.clone_from(&info.children);
            status.labels.clone_from(&info.labels);
            status.size = info.size.parse().unwrap_or_default();
            status.user_created = info.user_created;
            status.mark_removed = info.removed;
            status.ready_to_use = !info.removed;
            // As large as the volume was then, however it grows.
            if status.restore_size == 0 {
                status.restore_size = o.volume.map_or(0, |v| v.spec.size.0);
            }
            // One that was taken after the file system thawed was removed again, and says why.
            if !info.removed || !matches!(Refusal::of(&status), Some(Refusal::NotFrozen(_))) {
                status.error.clear();
            }
        }
        None if o.snapshot.spec.create_snapshot && status.creation_time.is_empty() => {
            if status.requested_time.is_empty() {
                status.requested_time = written(o.now);
            }
            if !waits(o.engine) {
                actions.push(Action::Take);
            }
        }
        None if is_unknown => {}
        None => {
            status.ready_to_use = false;
            "the volume has no snapshot of this name".clone_into(&mut status.error);
        }
    }
    if o.snapshot.status.as_ref() != Some(&status) {
        actions.push(Action::SetStatus(Box::new(status)));
    }
    actions
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{EngineSpec, EngineStatus, Int64Text, SnapshotInfo, SnapshotSpec, VolumeSpec};

    pub(super) fn now() -> Timestamp {
        Timestamp::from_second(1_700_000_000).unwrap()
    }

    fn snapshot() -> Snapshot {
        let spec = SnapshotSpec { volume: "v".into(), create_snapshot: true, ..SnapshotSpec::default() };
        let mut snapshot = Snapshot::new("s1", spec);
        snapshot.metadata.finalizers = Some(vec![FINALIZER.into()]);
        snapshot
    }

    pub(super) fn volume() -> Volume {
        Volume::new("v", VolumeSpec { size: Int64Text(100), ..VolumeSpec::default() })
    }

    pub(super) fn engine(state: InstanceState, snapshots: &[(&str, bool)]) -> Engine {
        let info = |(name, removed): &(&str, bool)| {
            let info = SnapshotInfo {
                removed: *removed,
                created: "2026-01-01T00:00:00Z".into(),
                size: "4096".into(),
                ..SnapshotInfo::default()
            };
            ((*name).to_owned(), info)
        };
        let mut engine = Engine::new("v-e-0", EngineSpec::default());
        engine.status = Some(EngineStatus {
            current_state: state,
            snapshots: snapshots.iter().chain(&[("volume-head", false)]).map(info).collect(),
            ..EngineStatus::default()
        });
        engine
    }

    #[test]
    fn what_a_head_has_grown_is_no_news_for_snapshots_and_all_else_of_a_chain_is() {
        let before = engine(InstanceState::Running, &[("s1", false)]);
        let changed = |change: fn(&mut EngineStatus)| {
            let mut now = before.clone();
            change(now.status.as_mut().unwrap());
            is_news(&before, &now)
        };
        assert!(!changed(|_| {}) && !changed(|s| s.replica_reasons = [("r".into(), "slow".into())].into()));
        assert!(!changed(|s| s.snapshots.get_mut(HEAD).unwrap().size = "8192".into()));
        assert!(changed(|s| s.snapshots.get_mut("s1").unwrap().size = "8192".into()), "it tells its size");
        for change in [
            (|s: &mut EngineStatus| s.snapshots.get_mut("s1").unwrap().removed = true)
                as fn(&mut EngineStatus),
            |s| s.snapshots.get_mut(HEAD).unwrap().created = "2026-01-02T00:00:00Z".into(),
            |s| drop(s.snapshots.remove("s1")),
            |s| s.current_state = InstanceState::Stopped,
            |s| s.waiting_for = "replicas".into(),
        ] {
            assert!(changed(change));
        }
        let mut elsewhere = before.clone();
        elsewhere.spec.node_id = "n2".into();
        assert!(is_news(&before, &elsewhere));
    }

    fn decide(snapshot: &Snapshot, volume: Option<&Volume>, engine: Option<&Engine>) -> (Vec<Action>, bool) {
        let observed = Observed { snapshot, volume, engine, in_use: false, now: now() };
        (plan(&observed), needs_engine(&observed))
    }

    #[test]
    fn a_volume_is_attached_for_its_snapshots_where_somebody_answers() {
        let near = ["n1", "n2"].map(str::to_owned);
        let ask = |node: &str| Ticket::Ask(node.to_owned());
        // Needed, asked on, rests, who answers.
        let cases = [
            ((true, None, true, "n1 n2"), ask("n1")),
            ((true, None, true, "n2"), ask("n2")),
            ((true, None, true, "n3"), Ticket::Leave),
            ((true, None, false, "n1 n2"), Ticket::Leave),
            ((true, Some("n1"), false, "n1 n2"), Ticket::Leave),
            ((true, Some("n1"), false, "n2"), ask("n2")),
            ((true, Some("n1"), false, ""), Ticket::Leave),
            ((true, Some("n3"), false, "n1 n3"), Ticket::Leave),
            ((false, Some("n1"), false, ""), Ticket::Drop),
            ((false, None, true, "n1"), Ticket::Leave),
        ];
        for ((needed, asked, rests, up), expected) in cases {
            let nodes_up = up.split_whitespace().map(str::to_owned).collect();
            let decided = ticket(needed, asked, rests, &near, &nodes_up);
            assert_eq!(decided, expected, "{needed} {asked:?} {rests} {up:?}");
        }
    }

    #[test]
    fn one_that_is_refused_waits_for_room_and_keeps_no_volume_attached() {
        use InstanceState::{Running, Stopped};
        let (mut snapshot, volume) = (snapshot(), volume());
        let refusal = Refusal::NoRoom("5 are enough");
        let status = refusal.told(SnapshotStatus::default());
        assert_eq!(Refusal::of(&status), Some(refusal));
        snapshot.status = Some(status);
        assert_eq!(decide(&snapshot, Some(&volume), Some(&engine(Stopped, &[]))), (vec![], false));
        let (actions, needed) = decide(&snapshot, Some(&volume), Some(&engine(Running, &[])));
        assert!(actions.contains(&Action::Take) && !needed, "{actions:?}");
        let (actions, _) = decide(&snapshot, Some(&volume), Some(&engine(Running, &[("s1", false)])));
        let [Action::SetStatus(status)] = &actions[..] else { panic!("{actions:?}") };
        assert!(status.ready_to_use && status.error.is_empty());
    }

    #[test]
    fn one_whose_file_system_does_not_rest_is_tried_on_and_is_not_what_was_taken_too_late() {
        use InstanceState::{Running, Stopped};
        let (mut snapshot, volume) = (snapshot(), volume());
        let refused = Refusal::NotFrozen("it is frozen already").told(SnapshotStatus::default());
        snapshot.status = Some(refused.clone());
        let (actions, needed) = decide(&snapshot, Some(&volume), Some(&engine(Running, &[])));
        assert!(actions.contains(&Action::Take) && needed, "{actions:?}");
        assert_eq!(
            decide(&snapshot, Some(&volume), Some(&engine(Stopped, &[]))),
            (vec![], true),
            "nothing is mounted then"
        );
        let told = |removed| {
            let (actions, _) = decide(&snapshot, Some(&volume), Some(&engine(Running, &[("s1", removed)])));
            let [Action::SetStatus(status)] = &actions[..] else { panic!("{actions:?}") };
            (status.ready_to_use, status.error.clone())
        };
        assert_eq!(told(true), (false, refused.error.clone()));
        assert_eq!(told(false), (true, String::new()));
    }

    #[test]
    fn it_is_taken_once_and_then_told() {
        use InstanceState::{Running, Stopped};
        let (mut snapshot, volume) = (snapshot(), volume());
        assert_eq!(decide(&snapshot, Some(&volume), Some(&engine(Stopped, &[]))), (vec![], true));
        let (actions, _) = decide(&snapshot, Some(&volume), Some(&engine(Running, &[])));
        assert!(actions.contains(&Action::Take), "{actions:?}");
        let taken = engine(Running, &[("s1", false)]);
        let (actions, _) = decide(&snapshot, Some(&volume), Some(&taken));
        let [Action::SetStatus(status)] = &actions[..] else { panic!("{actions:?}") };
        assert!(status.ready_to_use);
        assert_eq!((status.size, status.restore_size), (4096, 100));
        snapshot.status = Some((**status).clone());
        assert_eq!(decide(&snapshot, Some(&volume), Some(&taken)), (vec![], false));
        assert_eq!(Refusal::of(status), None);
        // Gone behind our back: it is not taken again.
        let (actions, _) = decide(&snapshot, Some(&volume), Some(&engine(Running, &[])));
        let [Action::SetStatus(status)] = &actions[..] else { panic!("{actions:?}") };
        assert!(!status.ready_to_use && status.error.contains("no snapshot"));
    }

    /// Seen in the simulation: a volume was cloned, the clone deleted and made anew, and its source's chain, as it was told last, still
    /// had the first one's snapshot, marked for removal. The second one waited for that for ever.
    #[test]
    fn one_of_a_name_that_is_being_removed_is_taken_once_that_is_folded_away() {
        let (snapshot, volume) = (snapshot(), volume());
        let left = engine(InstanceState::Running, &[("s1", true)]);
        let (actions, needed) = decide(&snapshot, Some(&volume), Some(&left));
        let [Action::Remove, Action::SetStatus(status)] = &actions[..] else { panic!("{actions:?}") };
        assert!(needed && status.creation_time.is_empty(), "it is not taken for the other one");
        let (actions, _) = decide(&snapshot, Some(&volume), Some(&engine(InstanceState::Running, &[])));
        assert!(actions.contains(&Action::Take), "{actions:?}");
    }

    #[test]
    fn a_resource_that_named_what_is_gone_goes_and_one_that_took_it_says_so() {
        let volume = volume();
        let (mut snapshot, mut engine) = (snapshot(), engine(InstanceState::Running, &[]));
        snapshot.spec.create_snapshot = false;
        let (actions, _) = decide(&snapshot, Some(&volume), Some(&engine));
        let [Action::SetStatus(status)] = &actions[..] else { panic!("never seen: {actions:?}") };
        assert!(status.error.contains("no snapshot"));
        let created =
            SnapshotStatus { creation_time: "2026-01-01T00:00:00Z".into(), ..SnapshotStatus::default() };
        snapshot.status = Some(created);
        assert_eq!(decide(&snapshot, Some(&volume), Some(&engine)).0, [Action::Forget]);
        snapshot.metadata.finalizers = None;
        assert_eq!(decide(&snapshot, Some(&volume), Some(&engine)).0, [Action::Forget], "cut off in between");
        engine.status.as_mut().unwrap().waiting_for = "its replicas".into();
        let (actions, _) = decide(&snapshot, Some(&volume), Some(&engine));
        assert!(!actions.contains(&Action::Forget), "{actions:?}");
    }

    /// Seen in the simulation (seed 822): a snapshot that nobody had named went before the first look at the resource that was made for
    /// it, which stayed and said that the volume has none of this name.
    #[test]
    fn a_resource_that_a_manager_made_goes_with_its_snapshot_though_nobody_has_told_of_it() {
        let (volume, engine) = (volume(), engine(InstanceState::Running, &[("s1", false)]));
        let made = unnamed::unnamed(&volume, &engine, |_| false);
        let [made] = &made[..] else { panic!("{made:?}") };
        let (actions, _) = decide(made, Some(&volume), Some(&engine));
        assert!(matches!(&actions[..], [Action::SetStatus(status)] if status.ready_to_use), "{actions:?}");
        let without = self::engine(InstanceState::Running, &[]);
        assert_eq!(decide(made, Some(&volume), Some(&without)).0, [Action::Forget]);
    }

    #[test]
    fn an_engine_that_waits_is_asked_for_nothing() {
        let (mut snapshot, volume) = (snapshot(), volume());
        let mut engine = engine(InstanceState::Running, &[("s2", false)]);
        engine.status.as_mut().unwrap().waiting_for = "its replicas".into();
        let (actions, needs) = decide(&snapshot, Some(&volume), Some(&engine));
        assert!(!actions.contains(&Action::Take) && needs, "{actions:?}");
        snapshot.metadata.deletion_timestamp = Some(now().into());
        assert_eq!(decide(&snapshot, Some(&volume), Some(&engine)).0, [], "it may be taken yet");
        snapshot.metadata.name = Some("s2".into());
        assert_eq!(decide(&snapshot, Some(&volume), Some(&engine)).0, []);
        engine.status.as_mut().unwrap().snapshots.get_mut("s2").unwrap().removed = true;
        assert_eq!(decide(&snapshot, Some(&volume), Some(&engine)).0, [Action::RemoveFinalizer]);
    }

    #[test]
    fn a_chain_that_nobody_told_yet_says_nothing_of_a_snapshot() {
        let volume = volume();
        let (mut unknown, mut relay) =
            (engine(InstanceState::Running, &[]), engine(InstanceState::Running, &[]));
        unknown.status.as_mut().unwrap().snapshots.clear();
        relay.status.as_mut().unwrap().relaying = true;
        let mut taken = snapshot();
        taken.status = Some(SnapshotStatus {
            creation_time: "2026-01-01T00:00:00Z".into(),
            ready_to_use: true,
            ..SnapshotStatus::default()
        });
        for engine in [&unknown, &relay] {
            assert_eq!(decide(&taken, Some(&volume), Some(engine)).0, []);
            let mut going = taken.clone();
            going.metadata.deletion_timestamp = Some(now().into());
            assert_eq!(decide(&going, Some(&volume), Some(engine)).0, []);
        }
        assert_eq!(decide(&snapshot(), Some(&volume), Some(&relay)).0, [], "a relay takes none");
    }

    #[test]
    fn it_is_removed_before_its_resource_goes() {
        use InstanceState::{Running, Stopped};
        let (mut snapshot, mut volume) = (snapshot(), volume());
        snapshot.metadata.deletion_timestamp = Some(now().into());
        assert_eq!(decide(&snapshot, Some(&volume), Some(&engine(Stopped, &[]))), (vec![], true));
        let there = engine(Running, &[("s1", false)]);
        assert_eq!(decide(&snapshot, Some(&volume), Some(&there)).0, [Action::Remove]);
        // Taken a moment ago, and its engine has told of its chain before that.
        let before = engine(Running, &[]);
        let (actions, _) = decide(&snapshot, Some(&volume), Some(&before));
        assert_eq!(actions, [Action::Remove, Action::RemoveFinalizer]);
        let mut seen = snapshot.clone();
        seen.status = Some(SnapshotStatus {
            creation_time: "2026-01-01T00:00:00Z".into(),
            ..SnapshotStatus::default()
        });
        assert_eq!(decide(&seen, Some(&volume), Some(&before)).0, [Action::RemoveFinalizer]);
        let marked = engine(Running, &[("s1", true)]);
        assert_eq!(decide(&snapshot, Some(&volume), Some(&marked)).0, [Action::RemoveFinalizer]);
        assert_eq!(decide(&snapshot, None, None).0, [Action::RemoveFinalizer]);
        volume.metadata.deletion_timestamp = Some(now().into());
        assert_eq!(decide(&snapshot, Some(&volume), Some(&there)), (vec![Action::RemoveFinalizer], false));
    }
}
