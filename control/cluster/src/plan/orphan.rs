//! What lies on a node and no resource knows: directories of replicas, and processes of engines and replicas.
//!
//! Each becomes an Orphan resource, and nothing else happens to it unless a setting says so: nobody but a user can know that
//! it is not wanted. Deleting the resource deletes what it stands for. Nothing goes by itself while resources may be about to be
//! restored: a volume of which something is missing keeps what lies on nodes under its name.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::{FINALIZER, volume_of_engine};
use crate::api::{Orphan, OrphanSpec, Replica, Robustness, Volume};
use crate::settings::AutoDeletion;

/// Longhorn's types of orphans.
const REPLICA_DATA: &str = "replica-data";
/// The first one's before Longhorn 1.9.
const REPLICA_DATA_BEFORE: &str = "replica";
const ENGINE: &str = "engine-instance";
const REPLICA: &str = "replica-instance";

/// The names of parameters; Longhorn's.
const DATA_NAME: &str = "DataName";
const DISK_UUID: &str = "DiskUUID";
const DISK_PATH: &str = "DiskPath";
const INSTANCE: &str = "InstanceName";

/// A disk with what lies in its `replicas/`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskContent {
    /// UUID of the disk.
    pub uuid: String,
    /// Path of the disk.
    pub path: String,
    /// Names of the directories.
    pub directories: Vec<String>,
}

/// A node and what is known of it.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// The node.
    pub node: &'a str,
    /// Its disks.
    pub disks: &'a [DiskContent],
    /// Names of directories that replicas have, wherever: a disk may have moved here, or have lost the file with its identity and
    /// been given another one.
    pub known: &'a BTreeSet<String>,
    /// Names of the processes on the node.
    pub processes: &'a BTreeSet<String>,
    /// Names of all engines and replicas there are.
    pub instances: &'a BTreeSet<String>,
    /// The node's orphans.
    pub orphans: &'a [&'a Orphan],
    /// For how long this manager has seen each of them, by name, without anybody who wants it.
    pub seen: &'a BTreeMap<String, Duration>,
    /// Which of them go by themselves.
    pub deletion: &'a AutoDeletion,
    /// The time.
    pub now: Timestamp,
}

impl AutoDeletion {
    /// `seen`: for how long. An Orphan that was restored with the rest is as old as when it was made.
    fn takes(&self, orphan: &Orphan, kind: &str, seen: Duration, now: Timestamp) -> bool {
        let chosen = if kind == REPLICA_DATA { self.data } else { self.instances };
        let made = orphan.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let age = made.map(|made| now.duration_since(made).max(SignedDuration::ZERO).unsigned_abs());
        chosen && age.is_some_and(|age| age.min(seen) > self.grace)
    }
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Tell of an orphan, under this name.
    Create(String, Box<OrphanSpec>),
    /// It is no orphan any more: let it go, and what it stood for alone.
    Forget(String),
    /// Its time is over: delete it, and what it stands for with it.
    Delete(String),
    /// Remove a directory, then let the orphan go.
    RemoveData {
        /// The orphan.
        orphan: String,
        /// Path of the disk.
        disk_path: String,
        /// The directory.
        directory: String,
    },
    /// End a process, then let the orphan go.
    Stop {
        /// The orphan.
        orphan: String,
        /// The process.
        process: String,
    },
}

/// What an orphan stands for.
type Identity = (&'static str, String, String);

fn identity(spec: &OrphanSpec) -> Option<Identity> {
    let parameter = |name: &str| spec.parameters.get(name).cloned().unwrap_or_default();
    match spec.orphan_type.as_str() {
        REPLICA_DATA | REPLICA_DATA_BEFORE => {
            Some((REPLICA_DATA, parameter(DISK_UUID), parameter(DATA_NAME)))
        }
        ENGINE => Some((ENGINE, String::new(), parameter(INSTANCE))),
        REPLICA => Some((REPLICA, String::new(), parameter(INSTANCE))),
        _ => None,
    }
}

/// The volume of `VOLUME-` and eight hex digits, which is what a replica's directory is called; `None`: it is somebody else's.
pub fn volume_of_directory(name: &str) -> Option<&str> {
    let (volume, suffix) = name.rsplit_once('-')?;
    let is_suffix = suffix.len() == 8 && suffix.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    (is_suffix && !volume.is_empty()).then_some(volume)
}

/// The volume whose data an orphan stands for; `None`: it stands for something else.
pub fn volume_of(orphan: &Orphan) -> Option<&str> {
    let is_data = matches!(orphan.spec.orphan_type.as_str(), REPLICA_DATA | REPLICA_DATA_BEFORE);
    orphan.spec.parameters.get(DATA_NAME).filter(|_| is_data).and_then(|name| volume_of_directory(name))
}

/// True while data that no Replica names may be all that there is of something: its volume is there and has not all the replicas that it
/// should have, in sync as its engine says. Of one that rests nobody says so.
pub fn may_be_missed(volume: &Volume, replicas: &[Replica]) -> bool {
    let is_healthy = volume.status.as_ref().is_some_and(|s| s.robustness == Robustness::Healthy);
    let sound = replicas.iter().filter(|r| {
        let stays = r.metadata.deletion_timestamp.is_none();
        stays && !r.spec.healthy_at.is_empty() && r.spec.failed_at.is_empty()
    });
    let wanted = usize::try_from(volume.spec.number_of_replicas).unwrap_or_default().max(1);
    !is_healthy || sound.count() < wanted
}

/// Decides for one node.
pub fn plan(o: &Observed<'_>) -> Vec<Action> {
    let found = found(o);
    let mut actions = Vec::new();
    let mut told: BTreeSet<Identity> = BTreeSet::new();
    for orphan in o.orphans {
        let name = orphan.metadata.name.clone().unwrap_or_default();
        let kept = orphan.metadata.finalizers.as_deref().unwrap_or_default().iter().any(|f| f == FINALIZER);
        let is_going = orphan.metadata.deletion_timestamp.is_some();
        let Some(identity) = identity(&orphan.spec) else {
            // What it stands for nobody here knows: somebody else's engine, for one. It waits for nobody.
            if kept && is_going {
                actions.push(Action::Forget(name));
            }
            continue;
        };
        match (found.get(&identity), is_going) {
            // A replica came to know it, or it is gone: deleting the resource must not delete a replica's data.
            (None, true) if kept => actions.push(Action::Forget(name)),
            (None, false) => actions.push(Action::Forget(name)),
            // Where it lies now, which is not where it was told of if the disk was moved: what lies there now is another disk's.
            (Some(spec), true) if kept => actions.push(removal(name, &identity, spec)),
            (Some(_), false) => {
                let seen = o.seen.get(&name).copied().unwrap_or_default();
                if o.deletion.takes(orphan, identity.0, seen, o.now) {
                    actions.push(Action::Delete(name));
                }
            }
            _ => {}
        }
        told.insert(identity);
    }
    for (identity, spec) in found.into_iter().filter(|(identity, _)| !told.contains(identity)) {
        let words = [o.node, identity.0, &identity.1, &identity.2];
        actions.push(Action::Create(format!("orphan-{}", digest(&words)), Box::new(spec)));
    }
    actions
}

fn removal(orphan: String, identity: &Identity, spec: &OrphanSpec) -> Action {
    if identity.0 == REPLICA_DATA {
        let disk_path = spec.parameters.get(DISK_PATH).cloned().unwrap_or_default();
        Action::RemoveData { orphan, disk_path, directory: identity.2.clone() }
    } else {
        Action::Stop { orphan, process: identity.2.clone() }
    }
}

/// Everything on the node that no resource knows.
fn found(o: &Observed<'_>) -> BTreeMap<Identity, OrphanSpec> {
    let spec = |kind: &str, parameters: &[(&str, &str)]| OrphanSpec {
        node_id: o.node.to_owned(),
        orphan_type: kind.to_owned(),
        data_engine: "v1".to_owned(),
        parameters: parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
    };
    let mut found = BTreeMap::new();
    for disk in o.disks {
        for directory in disk.directories.iter().filter(|d| volume_of_directory(d).is_some()) {
            if !o.known.contains(directory) {
                let identity = (REPLICA_DATA, disk.uuid.clone(), directory.clone());
                let parameters =
                    [(DATA_NAME, directory.as_str()), (DISK_UUID, &disk.uuid), (DISK_PATH, &disk.path)];
                found.insert(identity, spec(REPLICA_DATA, &parameters));
            }
        }
    }
    for process in o.processes.difference(o.instances) {
        let kind = if volume_of_engine(process).is_some() {
            ENGINE
        } else if process.contains("-r-") {
            REPLICA
        } else {
            continue;
        };
        found.insert((kind, String::new(), process.clone()), spec(kind, &[(INSTANCE, process)]));
    }
    found
}

/// FNV-1a (64 bits) over words, as hex digits.
fn digest(words: &[&str]) -> String {
    let bytes = words.iter().flat_map(|w| w.bytes().chain([0]));
    format!("{:016x}", lh_block::fnv1a(bytes))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use k8s_openapi::jiff::Timestamp;

    use super::*;

    struct Case {
        directories: Vec<&'static str>,
        known: Vec<&'static str>,
        processes: Vec<&'static str>,
        instances: Vec<&'static str>,
        orphans: Vec<Orphan>,
        seen: Duration,
        deletion: AutoDeletion,
    }

    fn case() -> Case {
        Case {
            directories: vec!["v-0a1b2c3d"],
            known: vec![],
            processes: vec![],
            instances: vec![],
            orphans: vec![],
            seen: Duration::MAX,
            deletion: AutoDeletion::default(),
        }
    }

    fn decide(case: &Case) -> Vec<Action> {
        let owned = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect::<BTreeSet<String>>();
        let directories = case.directories.iter().map(|d| (*d).to_owned()).collect();
        let name = |o: &Orphan| (o.metadata.name.clone().unwrap_or_default(), case.seen);
        plan(&Observed {
            node: "n1",
            disks: &[DiskContent { uuid: "u1".into(), path: "/disk".into(), directories }],
            known: &owned(&case.known),
            processes: &owned(&case.processes),
            instances: &owned(&case.instances),
            orphans: &case.orphans.iter().collect::<Vec<_>>(),
            seen: &case.orphans.iter().map(name).collect(),
            deletion: &case.deletion,
            now: Timestamp::from_second(1_700_000_000).unwrap(),
        })
    }

    /// The orphan that the only action makes.
    fn made(case: &Case) -> Orphan {
        let actions = decide(case);
        let [Action::Create(name, spec)] = &actions[..] else { panic!("{actions:?}") };
        let mut orphan = Orphan::new(name, (**spec).clone());
        orphan.metadata.finalizers = Some(vec![FINALIZER.into()]);
        orphan
    }

    fn going(mut orphan: Orphan) -> Orphan {
        orphan.metadata.deletion_timestamp = Some(Timestamp::from_second(1_700_000_000).unwrap().into());
        orphan
    }

    #[test]
    fn what_nothing_knows_is_told_once_and_left_alone() {
        let orphan = made(&case());
        assert_eq!(orphan.spec.orphan_type, "replica-data");
        assert_eq!(orphan.spec.parameters["DataName"], "v-0a1b2c3d");
        assert_eq!(decide(&Case { orphans: vec![orphan], ..case() }), []);
        assert_eq!(decide(&Case { known: vec!["v-0a1b2c3d"], ..case() }), []);
        for others in ["lost+found", "v-0A1B2C3D", "v-0a1b2c3", "-0a1b2c3d"] {
            assert_eq!(decide(&Case { directories: vec![others], ..case() }), [], "{others}");
        }
    }

    #[test]
    fn deleting_it_deletes_what_it_stands_for() {
        let orphan = going(made(&case()));
        let name = orphan.metadata.name.clone().unwrap();
        let actions = decide(&Case { orphans: vec![orphan], ..case() });
        let removal =
            Action::RemoveData { orphan: name, disk_path: "/disk".into(), directory: "v-0a1b2c3d".into() };
        assert_eq!(actions, [removal]);
    }

    #[test]
    fn what_longhorn_told_before_1_9_is_the_same_orphan_and_goes_the_same_way() {
        let mut orphan = made(&case());
        orphan.spec.orphan_type = "replica".into();
        orphan.metadata.name = Some("orphan-of-longhorn".into());
        let with = |orphan: &Orphan| decide(&Case { orphans: vec![orphan.clone()], ..case() });
        assert_eq!(with(&orphan), [], "it is told of");
        let orphan = going(orphan);
        assert!(
            matches!(&with(&orphan)[..], [Action::RemoveData { orphan, .. }] if orphan == "orphan-of-longhorn")
        );
    }

    #[test]
    fn one_of_a_kind_that_nobody_here_knows_goes_alone() {
        let mut orphan = made(&case());
        orphan.spec.orphan_type = "snapshot".into();
        let name = orphan.metadata.name.clone().unwrap();
        let without = || Case { directories: vec![], ..case() };
        assert_eq!(decide(&Case { orphans: vec![orphan.clone()], ..without() }), []);
        assert_eq!(decide(&Case { orphans: vec![going(orphan)], ..without() }), [Action::Forget(name)]);
    }

    #[test]
    fn what_goes_is_looked_for_where_its_disk_is_now() {
        let mut orphan = going(made(&case()));
        orphan.spec.parameters.insert(DISK_PATH.to_owned(), "/where/it/was".to_owned());
        let actions = decide(&Case { orphans: vec![orphan], ..case() });
        assert!(
            matches!(&actions[..], [Action::RemoveData { disk_path, .. }] if disk_path == "/disk"),
            "{actions:?}"
        );
    }

    #[test]
    fn what_a_replica_came_to_know_is_not_deleted_with_the_orphan() {
        let orphan = made(&case());
        let name = orphan.metadata.name.clone().unwrap();
        let known = |orphan| Case { known: vec!["v-0a1b2c3d"], orphans: vec![orphan], ..case() };
        assert_eq!(decide(&known(orphan.clone())), [Action::Forget(name.clone())]);
        assert_eq!(decide(&known(going(orphan))), [Action::Forget(name)]);
    }

    #[test]
    fn it_goes_by_itself_only_where_that_is_set_and_after_its_time() {
        let mut orphan = made(&case());
        let name = orphan.metadata.name.clone().unwrap();
        let mut after = |seconds: i64, data, instances| {
            let born = Timestamp::from_second(1_700_000_000 - seconds).unwrap();
            orphan.metadata.creation_timestamp = Some(born.into());
            let deletion = AutoDeletion { data, instances, grace: Duration::from_secs(300) };
            decide(&Case { orphans: vec![orphan.clone()], deletion, ..case() })
        };
        assert_eq!(after(301, true, false), [Action::Delete(name)]);
        for (seconds, data, instances) in [(300, true, true), (301, false, true), (-5, true, true)] {
            assert_eq!(after(seconds, data, instances), [], "{seconds} {data} {instances}");
        }
        // A replica came to know it meanwhile.
        let deletion = AutoDeletion { data: true, instances: true, grace: Duration::from_secs(300) };
        orphan.metadata.creation_timestamp = Some(Timestamp::from_second(1_600_000_000).unwrap().into());
        let seen = |seconds| {
            let (orphans, deletion) = (vec![orphan.clone()], deletion.clone());
            decide(&Case { orphans, deletion, seen: Duration::from_secs(seconds), ..case() }).len()
        };
        assert_eq!(
            (seen(300), seen(301)),
            (0, 1),
            "it may have been restored, and what names it comes later"
        );
        let known = Case { known: vec!["v-0a1b2c3d"], orphans: vec![orphan.clone()], deletion, ..case() };
        assert!(matches!(decide(&known)[..], [Action::Forget(_)]));
    }

    #[test]
    fn what_is_left_is_missed_unless_its_volume_is_whole_without_it() {
        let mut volume = Volume::default();
        volume.spec.number_of_replicas = 2;
        let robust = |volume: &Volume, robustness| {
            let status = crate::api::VolumeStatus { robustness, ..Default::default() };
            Volume { status: Some(status), ..volume.clone() }
        };
        let mut sound = Replica::default();
        sound.spec.healthy_at = "2026-01-01T00:00:00Z".into();
        let (mut failed, mut going) = (sound.clone(), sound.clone());
        failed.spec.failed_at = "2026-01-02T00:00:00Z".into();
        going.metadata.deletion_timestamp = Some(Timestamp::from_second(1_700_000_000).unwrap().into());
        let healthy = robust(&volume, Robustness::Healthy);
        assert!(!may_be_missed(&healthy, &[sound.clone(), sound.clone()]));
        for other in [Replica::default(), failed, going] {
            assert!(may_be_missed(&healthy, &[sound.clone(), other]));
        }
        assert!(may_be_missed(&healthy, &[]), "somebody restores it, with its status");
        for robustness in [Robustness::Unknown, Robustness::Degraded, Robustness::Faulted] {
            let volume = robust(&volume, robustness);
            assert!(may_be_missed(&volume, &[sound.clone(), sound.clone()]), "{robustness:?}");
        }
        assert!(may_be_missed(&volume, &[sound.clone(), sound]), "nobody has looked at it yet");
    }

    #[test]
    fn processes_that_nothing_knows_are_told_too() {
        let case = Case {
            directories: vec![],
            processes: vec!["v-e-0", "w-e-0", "w-r-0a1b2c3d", "other"],
            instances: vec!["v-e-0"],
            ..case()
        };
        let actions = decide(&case);
        let told: Vec<&str> = actions
            .iter()
            .filter_map(|a| match a {
                Action::Create(_, spec) => Some(spec.orphan_type.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(told, ["engine-instance", "replica-instance"]);
    }
}
