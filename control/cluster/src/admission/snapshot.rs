//! Snapshots: of a volume that is there and has room for one more; what was taken does not change.

use kube::ResourceExt;

use super::{Change, Facts, Refusal, TOO_MANY_SNAPSHOTS};
use crate::api::Snapshot;
use crate::plan::VOLUME_LABEL;
use crate::plan::snapshot::is_own_name;

/// Labels a new snapshot with its volume, so that it is found by it; Longhorn does so, too.
pub(super) fn complete(snapshot: &mut Snapshot) {
    let volume = snapshot.spec.volume.clone();
    snapshot.labels_mut().insert(VOLUME_LABEL.to_owned(), volume);
}

pub(super) fn judge(change: Change<'_, Snapshot>, facts: &Facts) -> Result<Vec<String>, Refusal> {
    match change {
        Change::Create(new) => {
            lh_block::check_name("snapshot", &new.name_any()).map_err(|e| e.to_string())?;
            if is_own_name(&new.name_any()) {
                let text = format!("{} is a name of the managers' own: choose another one", new.name_any());
                return Err(text.into());
            }
            may_be_taken(new, facts)?;
        }
        Change::Update { old, new } => {
            let was_taken = old.status.as_ref().is_some_and(|s| !s.creation_time.is_empty());
            if was_taken && new.metadata.deletion_timestamp.is_none() && new.spec != old.spec {
                return Err("the snapshot was taken and does not change: take another one".to_owned().into());
            }
        }
        Change::Delete(_) => {}
    }
    Ok(Vec::new())
}

fn may_be_taken(new: &Snapshot, facts: &Facts) -> Result<(), Refusal> {
    let name = &new.spec.volume;
    let Some(volume) = facts.volume.as_ref().filter(|v| v.metadata.deletion_timestamp.is_none()) else {
        return Err(format!("volume {name} does not exist, or is being deleted").into());
    };
    let own = u64::try_from(volume.spec.snapshot_max_count).unwrap_or_default();
    let most = if own > 0 { own } else { facts.settings.snapshot_max_count() };
    let there = u64::try_from(facts.snapshots).unwrap_or(u64::MAX);
    if new.spec.create_snapshot && there >= most {
        let text = format!(
            "volume {name} has {there} snapshots, and {most} are allowed: delete some, or raise snapshotMaxCount"
        );
        return Err(Refusal { reason: TOO_MANY_SNAPSHOTS, text });
    }
    // As the engine counts, which has the last word.
    let chain = facts.engine.as_ref().and_then(|e| e.status.as_ref()).map(|s| s.snapshots.values());
    let live = chain.into_iter().flatten().filter(|layer| !layer.removed);
    let bytes: u64 = live.filter_map(|layer| layer.size.parse::<u64>().ok()).sum();
    let limit = volume.spec.snapshot_max_size.bytes();
    if new.spec.create_snapshot && limit > 0 && bytes > limit {
        let text = format!(
            "volume {name} and its snapshots hold {bytes} bytes, and {limit} are allowed: delete some, or raise snapshotMaxSize"
        );
        return Err(Refusal { reason: TOO_MANY_SNAPSHOTS, text });
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
        let full = refused("demo", &facts(2, 2));
        assert!(full.text.contains("2 are allowed") && full.reason == TOO_MANY_SNAPSHOTS, "{full:?}");
        assert!(refused("demo", &facts(0, 250)).text.contains("250 are allowed"), "the setting counts");
        let missing = refused("other", &Facts::default());
        assert!(missing.text.contains("does not exist") && missing.reason == "Invalid", "{missing:?}");
        let mut told = snapshot("demo");
        told.spec.create_snapshot = false;
        judge(Change::Create(&told), &facts(2, 2)).unwrap();
    }

    #[test]
    fn what_head_and_snapshots_hold_counts_without_what_is_removed() {
        use crate::api::{Engine, EngineStatus, Int64Text, SnapshotInfo};
        let layer = |name: &str, size: u64, removed| {
            (name.to_owned(), SnapshotInfo { size: size.to_string(), removed, ..SnapshotInfo::default() })
        };
        let mut facts = facts(10, 2);
        let mut engine = Engine::default();
        let chain = [layer("a", 60, false), layer("b", 50, true), layer("volume-head", 40, false)];
        engine.status = Some(EngineStatus { snapshots: chain.into(), ..EngineStatus::default() });
        facts.engine = Some(engine);
        for (limit, may) in [(0, true), (100, true), (99, false)] {
            facts.volume.as_mut().unwrap().spec.snapshot_max_size = Int64Text(limit);
            let answer = judge(Change::Create(&snapshot("demo")), &facts);
            let refused = answer.err().map(|refused| refused.reason);
            assert_eq!(refused, (!may).then_some(TOO_MANY_SNAPSHOTS), "{limit}");
        }
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
