//! Snapshots: of a volume that is there and has room for one more; what was taken does not change.

use kube::ResourceExt;

use super::{Change, Facts, Verdict};
use crate::api::Snapshot;
use crate::plan::VOLUME_LABEL;
use crate::plan::snapshot::is_own_name;

/// Labels a new snapshot with its volume, so that it is found by it; Longhorn does so, too.
pub(super) fn complete(snapshot: &mut Snapshot) {
    let volume = snapshot.spec.volume.clone();
    snapshot.labels_mut().insert(VOLUME_LABEL.to_owned(), volume);
}

pub(super) fn judge(change: Change<'_, Snapshot>, facts: &Facts) -> Verdict {
    match change {
        Change::Create(new) => {
            lh_block::check_name("snapshot", &new.name_any()).map_err(|e| e.to_string())?;
            if is_own_name(&new.name_any()) {
                return Err(format!("{} is a name of the managers' own: choose another one", new.name_any()));
            }
            may_be_taken(new, facts)?;
        }
        Change::Update { old, new } => {
            let was_taken = old.status.as_ref().is_some_and(|s| !s.creation_time.is_empty());
            if was_taken && new.metadata.deletion_timestamp.is_none() && new.spec != old.spec {
                return Err("the snapshot was taken and does not change: take another one".to_owned());
            }
        }
        Change::Delete(_) => {}
    }
    Ok(Vec::new())
}

fn may_be_taken(new: &Snapshot, facts: &Facts) -> Result<(), String> {
    let name = &new.spec.volume;
    let Some(volume) = facts.volume.as_ref().filter(|v| v.metadata.deletion_timestamp.is_none()) else {
        return Err(format!("volume {name} does not exist, or is being deleted"));
    };
    let own = u64::try_from(volume.spec.snapshot_max_count).unwrap_or_default();
    let most = if own > 0 { own } else { facts.settings.snapshot_max_count() };
    let there = u64::try_from(facts.snapshots).unwrap_or(u64::MAX);
    if new.spec.create_snapshot && there >= most {
        return Err(format!(
            "volume {name} has {there} snapshots, and {most} are allowed: delete some, or raise snapshotMaxCount"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{SnapshotSpec, SnapshotStatus, Volume, VolumeSpec};

    fn snapshot(volume: &str) -> Snapshot {
        Snapshot::new(
            "s1",
            SnapshotSpec { volume: volume.into(), create_snapshot: true, ..SnapshotSpec::default() },
        )
    }

    fn facts(most: i64, there: usize) -> Facts {
        let volume = Volume::new("demo", VolumeSpec { snapshot_max_count: most, ..VolumeSpec::default() });
        Facts { volume: Some(volume), snapshots: there, ..Facts::default() }
    }

    #[test]
    fn it_is_of_a_volume_that_has_room_for_it() {
        judge(Change::Create(&snapshot("demo")), &facts(2, 1)).unwrap();
        let refused =
            |volume: &str, facts: &Facts| judge(Change::Create(&snapshot(volume)), facts).unwrap_err();
        assert!(refused("demo", &facts(2, 2)).contains("2 are allowed"));
        assert!(refused("demo", &facts(0, 250)).contains("250 are allowed"), "the setting counts");
        assert!(refused("other", &Facts::default()).contains("does not exist"));
        let mut told = snapshot("demo");
        told.spec.create_snapshot = false;
        judge(Change::Create(&told), &facts(2, 2)).unwrap();
    }

    #[test]
    fn names_of_the_managers_own_are_nobody_elses() {
        for (name, may) in [("volume-head", false), ("clone-demo", false), ("my-clone-1", true)] {
            let mut new = snapshot("demo");
            new.metadata.name = Some(name.to_owned());
            assert_eq!(judge(Change::Create(&new), &facts(2, 1)).is_ok(), may, "{name}");
        }
    }

    #[test]
    fn one_that_was_taken_does_not_change() {
        let mut old = snapshot("demo");
        let mut new = old.clone();
        new.spec.labels.insert("a".into(), "b".into());
        judge(Change::Update { old: &old, new: &new }, &facts(2, 1)).unwrap();
        old.status = Some(SnapshotStatus {
            creation_time: "2026-01-01T00:00:00Z".into(),
            ..SnapshotStatus::default()
        });
        assert!(judge(Change::Update { old: &old, new: &new }, &facts(2, 1)).is_err());
        judge(Change::Update { old: &old, new: &old }, &facts(2, 1)).unwrap();
    }

    #[test]
    fn it_is_labelled_with_its_volume() {
        let mut new = snapshot("demo");
        complete(&mut new);
        assert_eq!(new.labels().get(VOLUME_LABEL).map(String::as_str), Some("demo"));
    }
}
