//! A clone and its source, from the first look to the end of the copy.

use std::collections::BTreeMap;

use k8s_openapi::jiff::SignedDuration;

use super::super::draft::name_of;
use super::super::{Observed, plan};
use super::*;
use crate::api::{
    CloneStatus, EpochRecord, GenerationText, Int64Text, ReplicaSpec, ReplicaStatus, SnapshotStatus,
    VolumeSpec, VolumeStatus,
};
use crate::schedule::{Cluster, Disk, Node};
use crate::settings::Settings;

/// A source with replicas on two nodes, of which one holds everything, and a clone of it.
struct World {
    clone: Volume,
    source: Option<Volume>,
    snapshot: Option<Snapshot>,
    holders: Vec<Replica>,
    replicas: Vec<Replica>,
    up: BTreeSet<String>,
    /// Nodes whose disks are full.
    full: BTreeSet<String>,
    /// For how many seconds nodes that are not up do not answer.
    silent_for: i64,
}

impl World {
    fn new(data_source: &str) -> Self {
        let spec = VolumeSpec {
            size: Int64Text(100),
            data_source: data_source.into(),
            number_of_replicas: 3,
            ..VolumeSpec::default()
        };
        let mut source = Volume::new("src", VolumeSpec { size: Int64Text(100), ..VolumeSpec::default() });
        let epoch = EpochRecord { members: vec!["src-r-2".into()], ..EpochRecord::default() };
        source.status = Some(VolumeStatus { epoch: Some(epoch), ..VolumeStatus::default() });
        let holder = |n: u8| {
            let spec = ReplicaSpec {
                node_id: format!("n{n}"),
                disk_path: format!("/disks/{n}"),
                data_directory_name: format!("src-{n}"),
                healthy_at: "2026-01-01T00:00:00Z".into(),
                ..ReplicaSpec::default()
            };
            Replica::new(&format!("src-r-{n}"), spec)
        };
        Self {
            clone: Volume::new("new", spec),
            source: Some(source),
            snapshot: None,
            holders: vec![holder(1), holder(2)],
            replicas: Vec::new(),
            up: ["n1", "n2", "n3"].map(str::to_owned).into(),
            full: BTreeSet::new(),
            silent_for: 0,
        }
    }

    fn snapshot(&mut self, name: &str, ready: bool) {
        let spec = SnapshotSpec { volume: "src".into(), ..SnapshotSpec::default() };
        let mut snapshot = Snapshot::new(name, spec);
        snapshot.status = Some(SnapshotStatus { ready_to_use: ready, ..SnapshotStatus::default() });
        self.snapshot = Some(snapshot);
    }

    /// Plans, and takes over the volume's status and its new replicas.
    fn look(&mut self) -> Vec<Action> {
        let mut cluster = Cluster::default();
        for n in 1..=3 {
            let (name, now) = (format!("n{n}"), Timestamp::from_second(1_700_000_000).unwrap());
            let available = if self.full.contains(&name) { 0 } else { 1000 };
            let disk = Disk { schedulable: true, maximum: 1000, available, ..Disk::default() };
            let disks = [(format!("d{n}"), disk)].into();
            let silent = !self.up.contains(&name);
            let since = now - SignedDuration::from_secs(self.silent_for);
            let silent_since = silent.then_some(since);
            let node = Node { schedulable: true, disks, silent, silent_since, ..Node::default() };
            cluster.nodes.insert(name, node);
        }
        let actions = plan(&Observed {
            volume: &self.clone,
            engine: None,
            second: None,
            replicas: self.replicas.iter().collect(),
            attachment: None,
            source: Some(CloneSource {
                volume: self.source.as_ref(),
                snapshot: self.snapshot.as_ref(),
                replicas: self.holders.iter().collect(),
            }),
            snapshots: 0,
            left: Vec::new(),
            cluster: &cluster,
            lately_failed: &BTreeSet::new(),
            filling: &BTreeMap::new(),
            disk_paths: &BTreeMap::new(),
            nodes_up: &self.up,
            settings: &Settings::default(),
            image: "longhorn:1",
            now: Timestamp::from_second(1_700_000_000).unwrap(),
        });
        for action in &actions {
            match action {
                Action::SetStatus(status) => self.clone.status = Some((**status).clone()),
                Action::CreateReplica(name, spec) => self.replicas.push(Replica::new(name, (**spec).clone())),
                Action::SetReplica(name, spec) => {
                    let replica = self.replicas.iter_mut().find(|r| name_of(r) == *name).unwrap();
                    replica.spec = (**spec).clone();
                }
                Action::DeleteReplica(name) => self.replicas.retain(|r| name_of(r) != *name),
                _ => {}
            }
        }
        actions
    }

    fn waits(&self) -> String {
        let status = self.clone.status.as_ref().unwrap();
        assert_eq!(status.state, VolumeState::Creating, "nobody may attach it yet");
        status.conditions.get_condition(CLONING).unwrap().reason.clone()
    }

    fn replica_is(&mut self, state: InstanceState) {
        self.replicas[0].status = Some(ReplicaStatus { current_state: state, ..ReplicaStatus::default() });
    }
}

#[test]
fn sources_are_read_and_nothing_else_is() {
    let volume = Source { volume: "v", snapshot: None };
    assert_eq!(Source::parse("vol://v"), Some(volume));
    assert_eq!(Source::parse("snap://v/s"), Some(Source { snapshot: Some("s"), ..volume }));
    for bad in ["", "v", "vol://", "vol://v/s", "snap://v", "snap:///s", "snap://v/s/t", "bak://v/b"] {
        assert_eq!(Source::parse(bad), None, "{bad}");
    }
}

#[test]
fn a_volume_is_copied_from_a_snapshot_of_its_own_beside_a_member_and_then_like_any_other() {
    let mut world = World::new("vol://src");
    let actions = world.look();
    assert!(
        actions.iter().any(|a| matches!(a, Action::CreateSourceSnapshot(name, _) if name == "clone-new"))
    );
    assert_eq!(world.waits(), "Snapshot");
    world.snapshot("clone-new", false);
    world.look();
    assert_eq!(world.waits(), "Snapshot");
    world.snapshot("clone-new", true);
    world.look();
    assert_eq!(world.waits(), "Copying");
    // One replica, on the node of the one that counts.
    assert_eq!(world.replicas.len(), 1);
    let spec = &world.replicas[0].spec;
    assert_eq!(spec.node_id, "n2");
    assert_eq!(
        (spec.clone_from.directory.as_str(), spec.clone_from.snapshot.as_str()),
        ("/disks/2/replicas/src-2", "clone-new")
    );
    world.look();
    assert_eq!(world.replicas[0].spec.desire_state, DesireState::Running);
    world.replica_is(InstanceState::Running);
    let actions = world.look();
    assert!(actions.contains(&Action::DeleteSourceSnapshot("clone-new".into())), "{actions:?}");
    let status = world.clone.status.clone().unwrap();
    assert_eq!((status.clone_status.state.as_str(), status.state), (CLONED, VolumeState::Detached));
    let spec = &world.replicas[0].spec;
    assert_eq!((&spec.clone_from, spec.desire_state), (&CloneOrigin::default(), DesireState::Stopped));
    assert!(!spec.healthy_at.is_empty(), "empty replicas must not count as good as this one");
    world.look();
    assert_eq!(world.replicas.len(), 1, "the others are filled once it is attached");
}

#[test]
fn a_clone_that_has_no_room_beside_its_source_says_where_it_needs_it() {
    let mut world = World::new("snap://src/s");
    world.snapshot("s", true);
    world.full.insert("n2".into());
    world.look();
    assert_eq!((world.waits().as_str(), world.replicas.len()), ("NoRoom", 0));
    let status = world.clone.status.clone().unwrap();
    let said = &status.conditions.get_condition(CLONING).unwrap().message;
    // That other nodes have room helps nobody, and that it is not there is no fault of theirs.
    assert!(said.contains("(n2): no disk can take a replica: 1 disk with too little free space"), "{said}");
    world.full.clear();
    world.look();
    assert_eq!((world.waits().as_str(), world.replicas[0].spec.node_id.as_str()), ("Copying", "n2"));
}

#[test]
fn a_clone_whose_status_was_lost_is_what_it_was() {
    let mut world = World::new("vol://src");
    let replica = |name: &str, healthy_at: &str| {
        let spec =
            ReplicaSpec { node_id: "n1".into(), healthy_at: healthy_at.into(), ..ReplicaSpec::default() };
        Replica::new(name, spec)
    };
    world.replicas = vec![replica("new-r-1", ""), replica("new-r-2", "2026-01-01T00:00:00Z")];
    world.replica_is(InstanceState::Error);
    world.look();
    let status = world.clone.status.clone().unwrap();
    assert_eq!((status.clone_status.state.as_str(), status.state), (CLONED, VolumeState::Detached));
    assert_eq!(world.replicas.len(), 2, "the one that was being filled is no copy that failed");
}

/// A replica as Longhorn makes it, of a clone whose engine has served.
fn longhorns(name: &str) -> Replica {
    let spec = ReplicaSpec {
        active: true,
        node_id: "n1".into(),
        data_directory_name: "new-0a1b2c3d".into(),
        healthy_at: "2026-01-01T00:00:00Z".into(),
        desire_state: DesireState::Running,
        ..ReplicaSpec::default()
    };
    Replica::new(name, spec)
}

fn says(world: &mut World, state: &str) {
    let clone_status = CloneStatus { state: state.into(), ..CloneStatus::default() };
    world.clone.status = Some(VolumeStatus { clone_status, ..VolumeStatus::default() });
}

#[test]
fn a_clone_that_longhorn_did_not_finish_is_none_and_is_not_attached() {
    for state in ["failed", "initiated"] {
        let mut world = World::new("vol://src");
        world.clone.spec.node_id = "n1".into();
        world.replicas = vec![longhorns("new-r-1")];
        says(&mut world, state);
        let told = |actions: &[Action]| {
            let is_told = |a: &&Action| matches!(a, Action::Tell(event) if event.reason == CLONE_UNFINISHED);
            actions.iter().filter(is_told).count()
        };
        let actions = world.look();
        assert_eq!((world.waits().as_str(), told(&actions)), (CLONE_UNFINISHED, 1), "{state}");
        let conditions = world.clone.status.as_ref().unwrap().conditions.clone();
        let ready = conditions.get_condition(READY).expect("whoever attaches it hears of that");
        assert!(ready.message.contains("delete") && ready.message.contains("vol://src"), "{ready:?}");
        assert_eq!(world.replicas[0].spec.desire_state, DesireState::Stopped, "{state}");
        world.replica_is(InstanceState::Running);
        for _ in 0..3 {
            let actions = world.look();
            assert_eq!((world.waits().as_str(), told(&actions)), (CLONE_UNFINISHED, 0), "{state}");
        }
        assert_eq!(world.replicas.len(), 1, "{state}");
    }
}

#[test]
fn a_clone_that_longhorn_began_without_any_replica_is_copied_here() {
    let mut world = World::new("snap://src/s");
    world.snapshot("s", true);
    // The second time with the replica that the first time made: what was to be said of it was not written.
    for replicas in [0, 1] {
        assert_eq!(world.replicas.len(), replicas);
        says(&mut world, "failed");
        world.look();
        assert_eq!(world.waits(), "Copying");
    }
    world.look();
    world.replica_is(InstanceState::Running);
    world.look();
    assert_eq!(world.clone.status.as_ref().unwrap().clone_status.state, CLONED);
}

#[test]
fn a_clone_that_was_copied_here_or_served_is_whole_whatever_its_state_says() {
    // The write that says so was lost after that of the replica.
    let mut world = World::new("snap://src/s");
    world.snapshot("s", true);
    world.look();
    world.look();
    let before = world.clone.status.clone();
    world.replica_is(InstanceState::Running);
    world.look();
    assert!(!world.replicas[0].spec.healthy_at.is_empty());
    world.clone.status = before;
    world.look();
    assert_eq!(world.clone.status.as_ref().unwrap().clone_status.state, CLONED);

    type Case = (&'static str, fn(&mut World));
    let cases: [Case; 5] = [
        ("", |_| {}),
        ("copy-completed-awaiting-healthy", |_| {}),
        ("initiated", |w| w.clone.status.as_mut().unwrap().epoch = Some(EpochRecord::default())),
        ("failed", |w| {
            w.clone.status.as_mut().unwrap().generation = Some(GenerationText(1.into()));
        }),
        ("failed", |w| {
            let status = ReplicaStatus { epoch_recorded: true, ..ReplicaStatus::default() };
            w.replicas[0].status = Some(status);
        }),
    ];
    for (n, (state, change)) in cases.into_iter().enumerate() {
        let mut world = World::new("vol://src");
        world.replicas = vec![longhorns("new-r-1")];
        says(&mut world, state);
        change(&mut world);
        world.look();
        let status = world.clone.status.unwrap();
        assert_eq!(status.clone_status.state, CLONED, "{n}: {state}");
    }
}

#[test]
fn an_empty_replica_never_stands_for_a_copy() {
    let mut world = World::new("snap://src/s");
    world.snapshot("s", true);
    world.look();
    // As an API server does that does not know the field.
    world.replicas[0].spec.clone_from = CloneOrigin::default();
    world.replica_is(InstanceState::Running);
    world.look();
    assert_eq!(world.waits(), "OldDefinitions");
    assert_eq!(world.replicas[0].spec.desire_state, DesireState::Stopped);
}

#[test]
fn a_copy_is_never_larger_than_its_volume_says() {
    let mut world = World::new("snap://src/s");
    world.snapshot("s", true);
    world.source.as_mut().unwrap().spec.size = Int64Text(101);
    world.look();
    assert_eq!((world.waits().as_str(), world.replicas.len()), ("SourceLarger", 0));
    world.clone.spec.size = Int64Text(101);
    world.look();
    assert_eq!(world.waits(), "Copying");
}

#[test]
fn what_is_being_deleted_is_not_copied() {
    let deleted = |world: &mut World| {
        let time = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::default());
        world.snapshot.as_mut().unwrap().metadata.deletion_timestamp = Some(time);
    };
    let mut world = World::new("snap://src/s");
    world.snapshot("s", true);
    deleted(&mut world);
    world.look();
    assert_eq!((world.waits().as_str(), world.replicas.len()), ("SourceMissing", 0));
    // A volume of that name was cloned before, and deleted: what it was to be made of is older than what is asked for now.
    let mut world = World::new("vol://src");
    world.snapshot("clone-new", true);
    deleted(&mut world);
    world.look();
    assert_eq!((world.waits().as_str(), world.replicas.len()), ("Snapshot", 0));
    world.snapshot = None;
    let actions = world.look();
    assert!(actions.iter().any(|a| matches!(a, Action::CreateSourceSnapshot(..))), "{actions:?}");
}

#[test]
fn a_replica_that_was_never_filled_is_not_copied_where_no_epoch_says_who_counts() {
    let mut world = World::new("snap://src/s");
    world.snapshot("s", true);
    world.source.as_mut().unwrap().status = None;
    world.holders[0].spec.healthy_at.clear();
    world.look();
    assert_eq!((world.waits().as_str(), world.replicas[0].spec.node_id.as_str()), ("Copying", "n2"));
}

#[test]
fn a_copy_on_a_node_that_is_silent_for_a_while_goes_on() {
    let mut world = World::new("snap://src/s");
    world.snapshot("s", true);
    world.look();
    world.look();
    world.replica_is(InstanceState::Starting);
    let copy = name_of(&world.replicas[0]);
    world.up.remove("n2");
    for silent_for in [0, 60, 599] {
        world.silent_for = silent_for;
        world.look();
        let there: Vec<String> = world.replicas.iter().map(name_of).collect();
        assert_eq!((world.waits().as_str(), there), ("Copying", vec![copy.clone()]), "{silent_for}");
    }
    world.up.insert("n2".into());
    world.look();
    world.replica_is(InstanceState::Running);
    world.look();
    assert_eq!(world.clone.status.as_ref().unwrap().clone_status.state, CLONED);
    assert_eq!(name_of(&world.replicas[0]), copy, "it was not begun anew");
}

#[test]
fn a_copy_on_a_node_that_does_not_come_back_is_begun_anew() {
    let mut world = World::new("snap://src/s");
    world.snapshot("s", true);
    world.look();
    world.look();
    world.replica_is(InstanceState::Starting);
    world.up.remove("n2");
    world.silent_for = 601;
    world.look();
    assert_eq!((world.waits().as_str(), world.replicas.len()), ("CopyFailed", 0));
}

#[test]
fn a_copy_that_fails_is_begun_anew_later_and_what_is_missing_is_told() {
    let mut world = World::new("snap://src/s");
    world.look();
    assert_eq!(world.waits(), "SourceMissing");
    world.snapshot("s", true);
    world.up.remove("n2");
    world.look();
    assert_eq!(world.waits(), "SourceAway", "one that is not a member is not copied");
    world.up.insert("n2".into());
    world.look();
    world.replica_is(InstanceState::Error);
    world.look();
    assert_eq!((world.waits().as_str(), world.replicas.len()), ("CopyFailed", 0));
    world.look();
    assert_eq!(world.waits(), "Waiting");
    world.clone.status.as_mut().unwrap().clone_status.next_allowed_attempt_at = "2020-01-01T00:00:00Z".into();
    world.look();
    assert_eq!((world.waits().as_str(), world.replicas.len()), ("Copying", 1));
    world.source = None;
    world.replicas.clear();
    world.look();
    assert_eq!(world.waits(), "SourceMissing");
}
