//! A volume made of another one: one replica is copied beside a replica of the source, from a snapshot, and the others are
//! filled from it when the volume is attached, as any new replica is.
//!
//! The copy is the replica process' own work, done before it serves for the first time: it runs while the volume is
//! `creating`, and ends when it answers. A source without a snapshot is given one for that time.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use super::draft::Draft;
use super::{Action, READY};
use crate::api::{
    CloneOrigin, Conditions, DesireState, InstanceState, Replica, Snapshot, SnapshotSpec, Volume, VolumeState,
};
use crate::plan::replica::holds_everything;
use crate::plan::served::tells_epochs;
use crate::plan::snapshot::FOR_CLONE;
use crate::schedule::{Locality, Want, place};

/// What `status.cloneStatus.state` says while it is copied; Longhorn's word.
const INITIATED: &str = "initiated";

/// What `status.cloneStatus.state` says once the volume holds everything; Longhorn's word.
pub const CLONED: &str = "completed";

/// The condition that says what a clone waits for.
pub const CLONING: &str = "Cloned";

/// The condition's reason where what it is to be copied from is not there.
pub const SOURCE_MISSING: &str = "SourceMissing";

/// The condition's reason where the source has grown beyond the clone before anything was copied. A copy is as large as the source by
/// then, whenever the snapshot was taken: its tail would be no volume's, and missing in backups.
pub const SOURCE_LARGER: &str = "SourceLarger";

/// The condition's reason where Longhorn began to copy and did not end it.
pub const CLONE_UNFINISHED: &str = "CloneUnfinished";

/// What `status.cloneStatus.state` says between Longhorn's attempts; nobody else writes it.
const FAILED: &str = "failed";

/// How often a clone is looked at: nobody tells of the source's replicas and snapshots.
const LOOK: Duration = Duration::from_millis(500);

/// How long a copy that failed is left alone; longer every time.
const RETRY: Duration = Duration::from_secs(5);

/// Longest time between two attempts.
const LONGEST_RETRY: Duration = Duration::from_secs(300);

/// What a volume is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source<'a> {
    /// The volume.
    pub volume: &'a str,
    /// Its snapshot; `None`: as it is now.
    pub snapshot: Option<&'a str>,
}

impl<'a> Source<'a> {
    /// Reads `vol://VOLUME` or `snap://VOLUME/SNAPSHOT`.
    pub fn parse(text: &'a str) -> Option<Self> {
        let plain = |part: &&str| !part.is_empty() && !part.contains('/');
        if let Some(volume) = text.strip_prefix("vol://").filter(plain) {
            return Some(Self { volume, snapshot: None });
        }
        let (volume, snapshot) = text.strip_prefix("snap://")?.split_once('/')?;
        (plain(&volume) && plain(&snapshot)).then_some(Self { volume, snapshot: Some(snapshot) })
    }

    /// The snapshot that the volume `clone` is copied from.
    pub fn snapshot_name(&self, clone: &str) -> String {
        self.snapshot.map_or_else(|| format!("clone-{clone}"), str::to_owned)
    }
}

/// What a volume is cloned from, as it is now.
#[derive(Clone, Debug)]
pub struct CloneSource<'a> {
    /// The volume; `None`: there is none.
    pub volume: Option<&'a Volume>,
    /// The snapshot; `None`: there is none.
    pub snapshot: Option<&'a Snapshot>,
    /// The volume's replicas.
    pub replicas: Vec<&'a Replica>,
}

impl Draft<'_> {
    /// Brings a clone forward. False: there is nothing to clone, or it was done.
    pub(super) fn is_being_cloned(&mut self) -> bool {
        let data_source = self.o.volume.spec.data_source.clone();
        let Some(source) = Source::parse(&data_source) else { return false };
        if self.status.clone_status.state == CLONED {
            return false;
        }
        self.status.state = VolumeState::Creating;
        if self.is_left_unfinished() {
            self.refuse_unfinished(&data_source);
            return true;
        }
        let clone = &mut self.status.clone_status;
        INITIATED.clone_into(&mut clone.state);
        source.volume.clone_into(&mut clone.source_volume);
        clone.snapshot = source.snapshot_name(&self.name);
        let waits = match self.replicas.keys().next().cloned() {
            // It was there before; only that was not written yet, or is not any more.
            _ if self.replicas.values().any(|r| !r.healthy_at.is_empty()) => None,
            Some(replica) => self.follow_copy(&replica, source),
            None => self.begin_copy(source),
        };
        let now = self.now.clone();
        match waits {
            None => {
                CLONED.clone_into(&mut self.status.clone_status.state);
                self.status.conditions.retain(|c| c.kind != CLONING);
                self.tell(false, "Cloned", format!("the volume holds what {data_source} held"));
                if source.snapshot.is_none() {
                    self.actions.push(Action::DeleteSourceSnapshot(source.snapshot_name(&self.name)));
                }
                false
            }
            Some((reason, message)) => {
                self.status.conditions.set_condition(CLONING, false, reason, &message, &now);
                self.look_again(LOOK);
                true
            }
        }
    }

    /// True for a clone that Longhorn has begun, as its state says, and not ended: it calls its replicas healthy before it copies anything.
    /// Where nothing tells what a replica holds, that it is called healthy does; here a copy is, and its volume has said that it is made.
    fn is_left_unfinished(&self) -> bool {
        let status = &self.status;
        let was_begun_here =
            status.conditions.get_condition(CLONING).is_some_and(|c| c.reason != CLONE_UNFINISHED);
        let is_longhorns = match status.clone_status.state.as_str() {
            INITIATED => !was_begun_here,
            FAILED => true,
            _ => false,
        };
        let was_served = status.epoch.is_some()
            || status.generation.is_some()
            || self.o.replicas.iter().copied().any(tells_epochs);
        let is_copied_here = || self.replicas.values().any(|r| r.clone_from != CloneOrigin::default());
        is_longhorns && !was_served && !self.replicas.is_empty() && !is_copied_here()
    }

    /// Keeps such a clone from everybody: its state stays, which is all that tells it from a whole one.
    fn refuse_unfinished(&mut self, data_source: &str) {
        for engine in [&mut self.engine, &mut self.second].into_iter().flatten() {
            engine.desire_state = DesireState::Stopped;
        }
        self.replicas.values_mut().for_each(|replica| replica.desire_state = DesireState::Stopped);
        let message = format!(
            "Longhorn began to copy {data_source} into this volume and did not finish: it is not whole, and is not attached; delete it, \
             by its claim where it has one, and clone again"
        );
        let before = self.status.conditions.get_condition(CLONING);
        if before.is_none_or(|c| c.reason != CLONE_UNFINISHED) {
            self.tell(true, CLONE_UNFINISHED, message.clone());
        }
        let now = self.now.clone();
        // Whoever waits to have it attached hears of the second one.
        for kind in [CLONING, READY] {
            self.status.conditions.set_condition(kind, false, CLONE_UNFINISHED, &message, &now);
        }
    }

    /// Lets go of what was taken for a clone that will not be.
    pub(super) fn forget_source(&mut self) {
        let snapshot = self
            .o
            .source
            .as_ref()
            .and_then(|s| s.snapshot)
            .filter(|s| s.metadata.labels.as_ref().is_some_and(|l| l.get(FOR_CLONE) == Some(&self.name)));
        if let Some(name) = snapshot.and_then(|s| s.metadata.name.clone()) {
            self.actions.push(Action::DeleteSourceSnapshot(name));
        }
    }

    /// Makes the first replica beside one that holds the snapshot. Gives back what is waited for.
    fn begin_copy(&mut self, source: Source<'_>) -> Option<(&'static str, String)> {
        let name = source.snapshot_name(&self.name);
        let next = &self.status.clone_status.next_allowed_attempt_at;
        // A wrong clock wrote it, if it is further away than any is.
        let left = next.parse().ok().map(|next: Timestamp| next.duration_since(self.o.now).as_secs());
        if left.is_some_and(|left| (1..=LONGEST_RETRY.as_secs().cast_signed()).contains(&left)) {
            return Some(("Waiting", "the last copy failed; the next attempt is due later".to_owned()));
        }
        let found = self.o.source.as_ref();
        let Some(volume) = found.and_then(|s| s.volume) else {
            return Some((SOURCE_MISSING, format!("volume {} does not exist", source.volume)));
        };
        let (size, needed) = (self.o.volume.spec.size, volume.spec.size);
        if size < needed {
            let message = format!(
                "volume {} has {needed} bytes, and a clone of it has as many at least: this one has {size}",
                source.volume
            );
            return Some((SOURCE_LARGER, message));
        }
        let Some(snapshot) = found.and_then(|s| s.snapshot) else {
            if source.snapshot.is_some() {
                return Some((SOURCE_MISSING, format!("snapshot {name} does not exist")));
            }
            let spec = SnapshotSpec {
                volume: source.volume.to_owned(),
                create_snapshot: true,
                ..SnapshotSpec::default()
            };
            self.actions.push(Action::CreateSourceSnapshot(name, Box::new(spec)));
            return Some(("Snapshot", "a snapshot of the source is taken".to_owned()));
        };
        if snapshot.metadata.deletion_timestamp.is_some() {
            return Some(match source.snapshot {
                Some(_) => (SOURCE_MISSING, format!("snapshot {name} is being deleted")),
                // Taken for a clone of this name that was deleted: it holds what the source was then.
                None => ("Snapshot", format!("snapshot {name}, which was taken before, is being deleted")),
            });
        }
        if snapshot.spec.volume != source.volume {
            return Some((SOURCE_MISSING, format!("snapshot {name} is of volume {}", snapshot.spec.volume)));
        }
        if !snapshot.status.as_ref().is_some_and(|s| s.ready_to_use) {
            let why = snapshot.status.as_ref().map(|s| s.error.as_str()).filter(|why| !why.is_empty());
            let why = why.map(|why| format!(": {why}")).unwrap_or_default();
            return Some(("Snapshot", format!("snapshot {name} is not ready to use yet{why}")));
        }
        let holds =
            |r: &&&Replica| holds_everything(r, Some(volume)) && self.o.nodes_up.contains(&r.spec.node_id);
        let holders: Vec<&Replica> =
            found.map(|s| s.replicas.iter().filter(holds).copied().collect()).unwrap_or_default();
        if holders.is_empty() {
            return Some(("SourceAway", format!("no replica of volume {} can be read", source.volume)));
        }
        let fill = volume.status.as_ref().and_then(|s| u64::try_from(s.actual_size).ok()).unwrap_or_default();
        for holder in &holders {
            let want = Want { locality: Locality::Only(holder.spec.node_id.clone()), ..self.want(fill) };
            if let Ok(at) = place(self.o.cluster, &want, &[]) {
                let directory =
                    format!("{}/replicas/{}", holder.spec.disk_path, holder.spec.data_directory_name);
                self.add_copy(&at, CloneOrigin { directory, snapshot: name });
                return Some(("Copying", format!("it is copied on node {}", at.node)));
            }
        }
        Some(("NoRoom", self.no_room_beside(&holders, fill)))
    }

    /// Why none of the nodes takes a replica that have one to copy from. What the others have against it does not matter.
    fn no_room_beside(&self, holders: &[&Replica], fill: u64) -> String {
        let nodes: BTreeSet<&str> = holders.iter().map(|holder| holder.spec.node_id.as_str()).collect();
        let mut beside = self.o.cluster.clone();
        beside.nodes.retain(|node, _| nodes.contains(node.as_str()));
        let want = Want { locality: Locality::Anywhere, ..self.want(fill) };
        let why = place(&beside, &want, &[]).err().map(|why| why.to_string()).unwrap_or_default();
        let nodes = nodes.into_iter().collect::<Vec<_>>().join(", ");
        format!(
            "a clone begins on a node where its source has a replica that counts, and only there ({nodes}): {why}"
        )
    }

    /// True for a node that is silent for no longer than a failed replica is waited for.
    fn may_be_back(&self, node: &str) -> bool {
        let wait = self.o.settings.replenishment_wait();
        let since = self.o.cluster.nodes.get(node).and_then(|n| n.silent_since);
        let silent = since.and_then(|since| Duration::try_from(self.o.now.duration_since(since)).ok());
        !self.is_gone(node) && silent.is_none_or(|silent| silent < wait)
    }

    /// Waits for the copy. Gives back what is waited for; `None`: it is there.
    fn follow_copy(&mut self, name: &str, source: Source<'_>) -> Option<(&'static str, String)> {
        let state = self.replica_state(name);
        let now = self.now.clone();
        let is_waited_for = self.replicas.get(name).is_some_and(|spec| self.may_be_back(&spec.node_id));
        let spec = self.replicas.get_mut(name)?;
        if spec.clone_from == CloneOrigin::default() {
            // An API server with definitions that lack the field drops it, and an empty directory would serve as the clone.
            spec.desire_state = DesireState::Stopped;
            let message = format!(
                "the API server did not keep spec.cloneFrom of replica {name}: kubectl apply --server-side -f deploy/crds.yaml, then delete the volume"
            );
            return Some(("OldDefinitions", message));
        }
        // Its process goes on without its node's manager, and what it has copied may be hours of work.
        if state == InstanceState::Unknown && is_waited_for {
            spec.desire_state = DesireState::Running;
            let message =
                format!("it is copied on node {}, which does not answer: it is waited for", spec.node_id);
            return Some(("Copying", message));
        }
        match state {
            InstanceState::Running => {
                spec.clone_from = CloneOrigin::default();
                spec.healthy_at.clone_from(&now);
                spec.last_healthy_at = now;
                None
            }
            InstanceState::Error | InstanceState::Unknown => {
                let why = self.replica(name).and_then(|r| r.status.as_ref());
                let why =
                    why.and_then(|s| s.conditions.iter().find(|c| !c.is_true())).map(|c| c.message.clone());
                let why = why.unwrap_or_else(|| "its node does not answer".to_owned());
                self.replicas.remove(name);
                self.actions.push(Action::DeleteReplica(name.to_owned()));
                let clone = &mut self.status.clone_status;
                clone.attempt_count += 1;
                let attempts = u32::try_from(clone.attempt_count).unwrap_or(u32::MAX);
                let wait = RETRY.saturating_mul(attempts).min(LONGEST_RETRY);
                clone.next_allowed_attempt_at = crate::plan::written(self.o.now + wait);
                let message = format!("copying {} failed: {why}", source.volume);
                self.tell(true, "CloneFailed", message.clone());
                Some(("CopyFailed", message))
            }
            _ => {
                spec.desire_state = DesireState::Running;
                Some(("Copying", format!("it is copied on node {}", spec.node_id)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
                    Action::CreateReplica(name, spec) => {
                        self.replicas.push(Replica::new(name, (**spec).clone()))
                    }
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
            self.replicas[0].status =
                Some(ReplicaStatus { current_state: state, ..ReplicaStatus::default() });
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
        assert!(
            said.contains("(n2): no disk can take a replica: 1 disk with too little free space"),
            "{said}"
        );
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
                let is_told =
                    |a: &&Action| matches!(a, Action::Tell(event) if event.reason == CLONE_UNFINISHED);
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
        world.clone.status.as_mut().unwrap().clone_status.next_allowed_attempt_at =
            "2020-01-01T00:00:00Z".into();
        world.look();
        assert_eq!((world.waits().as_str(), world.replicas.len()), ("Copying", 1));
        world.source = None;
        world.replicas.clear();
        world.look();
        assert_eq!(world.waits(), "SourceMissing");
    }
}
