//! Volumes: what a new one is unless it says otherwise, and what does not change while, or because, its data is there.

use std::collections::BTreeMap;

use kube::ResourceExt;

use super::{Change, Facts, NO_JOBS, Verdict};
use crate::api::{
    DataLocality, Int64Text, NAME_MAX, SnapshotIntegrity, VOLUME_PIECE, Volume, VolumeSpec, VolumeState,
};
use crate::plan::growth::refuses;
use crate::plan::volume::{CLONED, unbuilt};
use crate::settings::{NO_CHECKSUMS, Settings};

/// Volumes are whole pieces of this many bytes.
const PIECE: i64 = VOLUME_PIECE.cast_signed();

/// What begins labels that give a volume to a recurring job, or to a group of them.
const JOB_LABELS: &[&str] = &["recurring-job.longhorn.io/", "recurring-job-group.longhorn.io/"];

/// Most bytes of snapshots are at least so many times the volume: one full snapshot and one full head, or nothing could
/// be written.
const SNAPSHOTS_MIN: i64 = 2;

/// Fills in what a new volume leaves to the settings, which therefore count as they were when it was made, and rounds
/// sizes up.
pub(super) fn complete(volume: &mut Volume, is_new: bool, settings: &Settings) {
    let spec = &mut volume.spec;
    spec.size = whole(spec.size);
    if !is_new {
        return;
    }
    if spec.data_locality == DataLocality::Setting {
        spec.data_locality = settings.data_locality();
    }
    if spec.number_of_replicas == 0 {
        spec.number_of_replicas = match spec.data_locality {
            DataLocality::StrictLocal => 1,
            _ => settings.replica_count(),
        };
    }
    if spec.snapshot_max_count == 0 {
        spec.snapshot_max_count = i64::try_from(settings.snapshot_max_count()).unwrap_or_default();
    }
    super::tidy(&mut spec.disk_selector);
    super::tidy(&mut spec.node_selector);
}

fn whole(size: Int64Text) -> Int64Text {
    let pieces = size.0 / PIECE + i64::from(size.0 % PIECE > 0);
    pieces.checked_mul(PIECE).map_or(size, Int64Text)
}

pub(super) fn judge(change: Change<'_, Volume>, facts: &Facts) -> Verdict {
    let mut warnings = Vec::new();
    match change {
        Change::Create(new) => {
            let name = new.name_any();
            if name.len() > NAME_MAX {
                return Err(format!(
                    "a volume's name has at most {NAME_MAX} characters, and {name} has {}",
                    name.len()
                ));
            }
            lh_block::check_name("volume", &name).map_err(|e| e.to_string())?;
            if new.spec.size.0 <= 0 && new.spec.from_backup.is_empty() {
                return Err("spec.size is missing: bytes, as text, for example \"10737418240\"".to_owned());
            }
            if let Some(what) = unbuilt(&new.spec) {
                return Err(format!("this version cannot do that yet: {what}"));
            }
            snapshot_limits(&new.spec)?;
            stays_where_its_replica_is(&new.spec)?;
            warnings.extend(idle(&VolumeSpec::default(), &new.spec));
            warnings.extend(idle_labels(&BTreeMap::new(), new.labels()));
        }
        Change::Update { old, new } => {
            // One that goes only loses its finalizers.
            if new.metadata.deletion_timestamp.is_none() && new.spec != old.spec {
                judge_update(old, new)?;
                has_room(old, new, facts)?;
                warnings.extend(idle(&old.spec, &new.spec));
            }
            warnings.extend(idle_labels(old.labels(), new.labels()));
        }
        Change::Delete(_) => {}
    }
    Ok(warnings)
}

/// What to know of a wish that is stored, and on which nothing acts, of those that were not there before.
fn idle(before: &VolumeSpec, after: &VolumeSpec) -> Option<String> {
    let (was, is) = (before.snapshot_data_integrity, after.snapshot_data_integrity);
    let is_wish = matches!(is, SnapshotIntegrity::Enabled | SnapshotIntegrity::FastCheck);
    (is_wish && was != is)
        .then(|| format!("spec.snapshotDataIntegrity is stored and nothing acts on it: {NO_CHECKSUMS}"))
}

/// What to know of labels that were not there before: they ask for recurring jobs, and nothing acts on those. Longhorn's own tools put
/// them on volumes, one by one or as members of a group.
fn idle_labels(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> Option<String> {
    let is_wish = |(label, value): &(&String, &String)| {
        *value == "enabled" && JOB_LABELS.iter().any(|prefix| label.starts_with(prefix))
    };
    let new = after.iter().filter(is_wish).filter(|(label, value)| before.get(*label) != Some(value));
    let names: Vec<&str> = new.map(|(label, _)| label.as_str()).collect();
    (!names.is_empty()).then(|| format!("{}: stored and nothing acts on it: {NO_JOBS}", names.join(", ")))
}

fn judge_update(old: &Volume, new: &Volume) -> Result<(), String> {
    let (before, after) = (&old.spec, &new.spec);
    let made_of = [
        ("dataSource", before.data_source != after.data_source),
        ("fromBackup", before.from_backup != after.from_backup),
        ("backingImage", before.backing_image != after.backing_image),
    ];
    if let Some((field, _)) = made_of.into_iter().find(|(_, changed)| *changed) {
        return Err(format!(
            "spec.{field} says what the volume was made of and does not change: make another volume"
        ));
    }
    if let (None, Some(what)) = (unbuilt(before), unbuilt(after)) {
        return Err(format!("this version cannot do that yet: {what}"));
    }
    if before.snapshot_max_count != after.snapshot_max_count
        || before.snapshot_max_size != after.snapshot_max_size
    {
        snapshot_limits(after)?;
    }
    let status = old.status.clone().unwrap_or_default();
    let is_cloning = !status.clone_status.state.is_empty() && status.clone_status.state != CLONED;
    if before.size != after.size && is_cloning {
        return Err("the volume is still being cloned: expand it when that is done".to_owned());
    }
    if !before.migration_node_id.is_empty() {
        let while_it_moves = [
            ("grows", before.size != after.size),
            ("changes to another image", before.image != after.image),
            ("is shown without a device", before.disable_frontend != after.disable_frontend),
        ];
        if let Some((what, _)) = while_it_moves.into_iter().find(|(_, changed)| *changed) {
            return Err(format!(
                "the volume {what} when its migration from node {} to node {} is over",
                before.node_id, before.migration_node_id
            ));
        }
    }
    let is_strict = |spec: &VolumeSpec| spec.data_locality == DataLocality::StrictLocal;
    if is_strict(before) != is_strict(after) || before.migratable != after.migratable {
        stays_where_its_replica_is(after)?;
    }
    let only_detached = [
        ("frontend", before.frontend != after.frontend),
        ("migratable", before.migratable != after.migratable),
        ("accessMode", before.access_mode != after.access_mode),
        ("dataLocality to or from strict-local", is_strict(before) != is_strict(after)),
    ];
    let is_down = matches!(status.state, VolumeState::Detached | VolumeState::Creating);
    match only_detached.into_iter().find(|(_, changed)| *changed) {
        Some((what, _)) if !is_down => {
            Err(format!("{what} changes while the volume is detached, and it is {}", status.state))
        }
        _ => Ok(()),
    }
}

/// A size cannot be taken back, whether the volume could grow or not.
fn has_room(old: &Volume, new: &Volume, facts: &Facts) -> Result<(), String> {
    if new.spec.size <= old.spec.size {
        return Ok(());
    }
    let refusal = refuses(&new.name_any(), &facts.cluster, &facts.replicas, new.spec.size.bytes());
    refusal.map_or(Ok(()), Err)
}

fn stays_where_its_replica_is(spec: &VolumeSpec) -> Result<(), String> {
    if spec.migratable && spec.data_locality == DataLocality::StrictLocal {
        return Err("a strict-local volume is used where its replica is and does not migrate: choose another dataLocality"
            .to_owned());
    }
    Ok(())
}

fn snapshot_limits(spec: &VolumeSpec) -> Result<(), String> {
    if spec.snapshot_max_count == 1 {
        return Err(
            "snapshotMaxCount is 2 to 250, or 0 for the setting: a rebuild needs room for one of its own"
                .to_owned(),
        );
    }
    let (most, size) = (spec.snapshot_max_size.0, spec.size.0);
    if most != 0 && most < size.saturating_mul(SNAPSHOTS_MIN) {
        return Err(format!(
            "snapshotMaxSize is 0 for no limit, or at least twice the volume's size: {size} x {SNAPSHOTS_MIN}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{CloneStatus, Frontend, Replica, ReplicaSpec, Toggle, VolumeStatus};
    use crate::schedule::{Cluster, Disk, Node};

    const GIB: i64 = 1 << 30;

    /// A change of a good specification, and a part of what is said of it.
    type Case = (fn(&mut VolumeSpec), &'static str);

    fn volume(change: impl Fn(&mut VolumeSpec)) -> Volume {
        let mut spec = VolumeSpec { size: Int64Text(GIB), number_of_replicas: 3, ..VolumeSpec::default() };
        change(&mut spec);
        Volume::new("demo", spec)
    }

    #[test]
    fn labels_for_recurring_jobs_are_told_to_do_nothing() {
        let labelled = |labels: &[(&str, &str)]| {
            let mut volume = volume(|_| {});
            let labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            volume.metadata.labels = Some(labels.collect());
            volume
        };
        let told = |change| judge(change).unwrap().join("\n");
        let job = ("recurring-job.longhorn.io/nightly", "enabled");
        let group = ("recurring-job-group.longhorn.io/default", "enabled");
        let both = labelled(&[job, group]);
        let warning = told(Change::Create(&both));
        assert!(
            warning.contains(job.0) && warning.contains(group.0) && warning.contains("not built"),
            "{warning}"
        );
        let one = labelled(&[group]);
        let warning = told(Change::Update { old: &one, new: &both });
        assert!(
            warning.contains(job.0) && !warning.contains(group.0),
            "what was there is not told again: {warning}"
        );
        assert_eq!(told(Change::Update { old: &both, new: &one }), "");
        let others = labelled(&[("recurring-job.longhorn.io/nightly", "disabled"), ("app", "enabled")]);
        assert_eq!(told(Change::Create(&others)), "");
    }

    fn in_state(state: VolumeState, change: impl Fn(&mut VolumeSpec)) -> Volume {
        let status = VolumeStatus { state, ..VolumeStatus::default() };
        Volume { status: Some(status), ..volume(change) }
    }

    fn judge(change: Change<'_, Volume>) -> Verdict {
        super::judge(change, &Facts::default())
    }

    fn refusal(verdict: Verdict) -> String {
        verdict.expect_err("it is refused")
    }

    #[test]
    fn a_new_volume_gets_what_the_settings_say() {
        let settings = Settings::of([
            ("default-replica-count", "2"),
            ("default-data-locality", "best-effort"),
            ("snapshot-max-count", "100"),
        ]);
        let mut bare = volume(|s| (s.size, s.number_of_replicas) = (Int64Text(GIB + 1), 0));
        bare.spec.node_selector = [" b", "a", "", "b"].map(str::to_owned).to_vec();
        complete(&mut bare, true, &settings);
        let spec = &bare.spec;
        assert_eq!(spec.size, Int64Text(GIB + PIECE));
        assert_eq!((spec.number_of_replicas, spec.snapshot_max_count), (2, 100));
        assert_eq!(
            (spec.data_locality, &spec.node_selector[..]),
            (DataLocality::BestEffort, &["a".to_owned(), "b".to_owned()][..])
        );
        let mut own = volume(|s| {
            (s.number_of_replicas, s.snapshot_max_count, s.data_locality) = (5, 7, DataLocality::Disabled)
        });
        let before = own.clone();
        complete(&mut own, true, &settings);
        assert_eq!(own, before, "what is said stays");
        let mut local = volume(|s| (s.data_locality, s.number_of_replicas) = (DataLocality::StrictLocal, 0));
        complete(&mut local, true, &settings);
        assert_eq!(local.spec.number_of_replicas, 1);
    }

    #[test]
    fn an_old_volume_keeps_what_it_has() {
        let mut old = volume(|s| (s.number_of_replicas, s.size) = (0, Int64Text(1)));
        complete(&mut old, false, &Settings::default());
        assert_eq!((old.spec.number_of_replicas, old.spec.size), (0, Int64Text(PIECE)));
        for size in [0, -1, i64::MAX] {
            let mut odd = volume(|s| s.size = Int64Text(size));
            complete(&mut odd, false, &Settings::default());
            assert_eq!(odd.spec.size.0, size.max(odd.spec.size.0), "it never gets smaller");
        }
    }

    #[test]
    fn impossible_new_volumes_are_refused() {
        let judged = |change: fn(&mut VolumeSpec)| judge(Change::Create(&volume(change)));
        judged(|_| {}).unwrap();
        judged(|s| s.snapshot_max_size = Int64Text(2 * GIB)).unwrap();
        let cases: &[Case] = &[
            (|s| s.size = Int64Text(0), "spec.size is missing"),
            (|s| s.encrypted = true, "encryption"),
            (|s| s.data_source = "nonsense".into(), "dataSource"),
            (|s| s.snapshot_max_count = 1, "2 to 250"),
            (|s| s.snapshot_max_size = Int64Text(2 * GIB - 1), "twice"),
        ];
        for (change, says) in cases {
            let refused = refusal(judged(*change));
            assert!(refused.contains(says), "{refused}");
        }
        let spec = volume(|_| {}).spec;
        judge(Change::Create(&Volume::new(&"x".repeat(40), spec.clone()))).unwrap();
        assert!(refusal(judge(Change::Create(&Volume::new(&"x".repeat(41), spec)))).contains("at most 40"));
    }

    #[test]
    fn whoever_sets_what_nothing_acts_on_is_told_so_once() {
        let wishes = |s: &mut VolumeSpec| s.snapshot_data_integrity = SnapshotIntegrity::FastCheck;
        let warned = judge(Change::Create(&volume(wishes))).unwrap();
        assert!(matches!(&warned[..], [text] if text.contains("spec.snapshotDataIntegrity")), "{warned:?}");
        assert_eq!(judge(Change::Create(&volume(|_| {}))).unwrap(), Vec::<String>::new());
        let (plain, old) = (volume(|_| {}), volume(wishes));
        let mut other = volume(wishes);
        other.spec.number_of_replicas = 2;
        let update = |old, new| judge(Change::Update { old, new }).unwrap().len();
        assert_eq!((update(&plain, &old), update(&old, &other), update(&old, &plain)), (1, 0, 0));
    }

    #[test]
    fn what_a_volume_was_made_of_does_not_change() {
        let old = in_state(VolumeState::Detached, |_| {});
        let cases: &[Case] = &[
            (|s| s.data_source = "vol://other".into(), "spec.dataSource"),
            (|s| s.from_backup = "s3://b".into(), "spec.fromBackup"),
            (|s| s.backing_image = "image".into(), "spec.backingImage"),
            (|s| s.encrypted = true, "encryption"),
            (|s| s.snapshot_max_count = 1, "2 to 250"),
        ];
        for (change, says) in cases {
            let refused = refusal(judge(Change::Update { old: &old, new: &volume(*change) }));
            assert!(refused.contains(says), "{refused}");
        }
        judge(Change::Update { old: &old, new: &volume(|s| s.size = Int64Text(2 * GIB)) }).unwrap();
    }

    #[test]
    fn some_things_change_only_while_it_is_detached() {
        let cases: &[fn(&mut VolumeSpec)] = &[
            |s| s.frontend = Frontend::Nbd,
            |s| (s.data_locality, s.number_of_replicas) = (DataLocality::StrictLocal, 1),
        ];
        for change in cases {
            let new = volume(*change);
            judge(Change::Update { old: &in_state(VolumeState::Detached, |_| {}), new: &new }).unwrap();
            let attached = in_state(VolumeState::Attached, |_| {});
            let refused = refusal(judge(Change::Update { old: &attached, new: &new }));
            assert!(refused.contains("it is attached"), "{refused}");
        }
        let attached = in_state(VolumeState::Attached, |_| {});
        let other = volume(|s| s.replica_soft_anti_affinity = Toggle::Enabled);
        judge(Change::Update { old: &attached, new: &other }).unwrap();
    }

    #[test]
    fn what_migrates_grows_and_changes_afterwards() {
        let moving = |change: fn(&mut VolumeSpec)| {
            in_state(VolumeState::Attached, |s| {
                (s.migratable, s.node_id, s.migration_node_id) = (true, "n1".into(), "n2".into());
                change(s);
            })
        };
        let cases: &[Case] = &[
            (|s| s.size = Int64Text(2 * GIB), "grows when its migration from node n1 to node n2 is over"),
            (|s| s.image = "longhorn:2".into(), "another image"),
            (|s| s.disable_frontend = true, "without a device"),
            (|s| s.migratable = false, "while the volume is detached"),
        ];
        for (change, says) in cases {
            let refused = refusal(judge(Change::Update { old: &moving(|_| {}), new: &moving(*change) }));
            assert!(refused.contains(says), "{refused}");
        }
        let confirmed = moving(|s| (s.node_id, s.migration_node_id) = ("n2".into(), String::new()));
        judge(Change::Update { old: &moving(|_| {}), new: &confirmed }).unwrap();
        let strict = volume(|s| {
            (s.migratable, s.data_locality, s.number_of_replicas) = (true, DataLocality::StrictLocal, 1)
        });
        assert!(refusal(judge(Change::Create(&strict))).contains("does not migrate"));
    }

    #[test]
    fn a_clone_grows_when_it_is_whole() {
        let clone = |state: &str| {
            let clone_status = CloneStatus { state: state.to_owned(), ..CloneStatus::default() };
            Volume {
                status: Some(VolumeStatus { clone_status, ..VolumeStatus::default() }),
                ..volume(|_| {})
            }
        };
        let grown = volume(|s| s.size = Int64Text(2 * GIB));
        judge(Change::Update { old: &clone(CLONED), new: &grown }).unwrap();
        assert!(
            refusal(judge(Change::Update { old: &clone("initiated"), new: &grown })).contains("being cloned")
        );
    }

    #[test]
    fn a_volume_grows_where_its_replicas_disks_have_room() {
        let disk = Disk { maximum: 10 << 30, available: 10 << 30, scheduled: 1 << 30, ..Disk::default() };
        let node = Node { disks: [("d".to_owned(), disk)].into(), ..Node::default() };
        let spec = ReplicaSpec {
            node_id: "n".into(),
            disk_id: "d".into(),
            volume_size: Int64Text(GIB),
            ..ReplicaSpec::default()
        };
        let facts = Facts {
            cluster: Cluster { nodes: [("n".to_owned(), node)].into(), ..Cluster::default() },
            replicas: vec![Replica::new("r", spec)],
            ..Facts::default()
        };
        let old = in_state(VolumeState::Detached, |_| {});
        let grown = |gib: i64| {
            let new = volume(|s| s.size = Int64Text(gib * GIB));
            super::judge(Change::Update { old: &old, new: &new }, &facts)
        };
        grown(10).unwrap();
        let refused = refusal(grown(11));
        assert!(refused.contains("disk n/d") && refused.contains("over-provisioning"), "{refused}");
        let mut renamed = volume(|s| s.size = Int64Text(11 * GIB));
        let old = renamed.clone();
        renamed.spec.replica_soft_anti_affinity = Toggle::Enabled;
        super::judge(Change::Update { old: &old, new: &renamed }, &facts).unwrap();
    }

    #[test]
    fn one_that_goes_may_lose_its_finalizers() {
        let old = in_state(VolumeState::Attached, |_| {});
        let mut going = volume(|s| s.frontend = Frontend::Nbd);
        going.metadata.deletion_timestamp = serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap();
        judge(Change::Update { old: &old, new: &going }).unwrap();
    }
}
