//! Replicas: a user may delete one, with its data, as long as another one holds everything; none moves.

use kube::ResourceExt;

use super::{Change, Facts, Verdict};
use crate::api::{Engine, InstanceState, Replica, ReplicaMode, Volume};

pub(super) fn judge(change: Change<'_, Replica>, facts: &Facts) -> Verdict {
    match change {
        Change::Update { old, new } if new.metadata.deletion_timestamp.is_none() => stays(old, new)?,
        Change::Delete(replica) => may_go(replica, facts)?,
        Change::Create(_) | Change::Update { .. } => {}
    }
    Ok(Vec::new())
}

fn stays(old: &Replica, new: &Replica) -> Result<(), String> {
    let (before, after) = (&old.spec, &new.spec);
    let places = [
        ("nodeID", &before.node_id, &after.node_id),
        ("diskID", &before.disk_id, &after.disk_id),
        ("diskPath", &before.disk_path, &after.disk_path),
    ];
    match places.into_iter().find(|(_, before, after)| !before.is_empty() && before != after) {
        Some((field, ..)) => Err(format!(
            "spec.{field} says where the replica's data lies and does not change: set evictionRequested of its disk or node (nodes.longhorn.io) to have it moved"
        )),
        None => Ok(()),
    }
}

fn may_go(replica: &Replica, facts: &Facts) -> Result<(), String> {
    let name = &replica.spec.volume_name;
    // With its volume everything goes.
    let Some(volume) = facts.volume.as_ref().filter(|v| v.metadata.deletion_timestamp.is_none()) else {
        return Ok(());
    };
    let holds = |r: &Replica| holds_everything(r, volume, facts.engine.as_ref());
    let own = replica.name_any();
    let mut others =
        facts.replicas.iter().filter(|r| r.name_any() != own && r.metadata.deletion_timestamp.is_none());
    if holds(replica) && !others.any(holds) {
        return Err(format!(
            "replica {own} is the only one that holds everything of volume {name}: wait until another one does, or delete the volume"
        ));
    }
    Ok(())
}

/// True if the replica holds every acknowledged write, as far as resources tell.
fn holds_everything(replica: &Replica, volume: &Volume, engine: Option<&Engine>) -> bool {
    let name = replica.name_any();
    let status = volume.status.as_ref();
    let is_member = |members: &[String]| members.contains(&name);
    let counts = status.and_then(|s| s.epoch.as_ref()).is_none_or(|epoch| is_member(&epoch.members));
    let told = engine.and_then(|e| e.status.as_ref()).filter(|s| s.current_state == InstanceState::Running);
    match told {
        Some(told) => counts && told.replica_mode_map.get(&name) == Some(&ReplicaMode::ReadWrite),
        None => counts && replica.spec.failed_at.is_empty() && !replica.spec.healthy_at.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{EngineSpec, EngineStatus, EpochRecord, ReplicaSpec, VolumeSpec, VolumeStatus};

    fn replica(name: &str) -> Replica {
        let spec = ReplicaSpec {
            volume_name: "demo".into(),
            healthy_at: "2026-01-01T00:00:00Z".into(),
            node_id: "n1".into(),
            ..ReplicaSpec::default()
        };
        Replica::new(name, spec)
    }

    fn failed(name: &str) -> Replica {
        let mut failed = replica(name);
        failed.spec.failed_at = "2026-01-02T00:00:00Z".into();
        failed
    }

    fn facts(replicas: &[Replica]) -> Facts {
        Facts {
            volume: Some(Volume::new("demo", VolumeSpec::default())),
            replicas: replicas.to_vec(),
            ..Facts::default()
        }
    }

    fn delete(name: &str, facts: &Facts) -> Verdict {
        let replica = facts.replicas.iter().find(|r| r.name_any() == name).unwrap();
        judge(Change::Delete(replica), facts)
    }

    #[test]
    fn the_last_one_that_holds_everything_stays() {
        delete("a", &facts(&[replica("a"), replica("b")])).unwrap();
        let one = facts(&[replica("a"), failed("b")]);
        assert!(delete("a", &one).unwrap_err().contains("the only one"));
        delete("b", &one).unwrap();
        let mut going = replica("b");
        going.metadata.deletion_timestamp = serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap();
        assert!(delete("a", &facts(&[replica("a"), going])).is_err(), "one that goes does not count");
        let mut fresh = replica("b");
        fresh.spec.healthy_at.clear();
        assert!(
            delete("a", &facts(&[replica("a"), fresh])).is_err(),
            "one that never was in sync does not count"
        );
    }

    #[test]
    fn one_outside_of_the_epoch_does_not_count() {
        let mut facts = facts(&[replica("a"), replica("b")]);
        let epoch = EpochRecord { members: vec!["a".into()], ..EpochRecord::default() };
        let status = VolumeStatus { epoch: Some(epoch), ..VolumeStatus::default() };
        facts.volume = Some(Volume { status: Some(status), ..Volume::new("demo", VolumeSpec::default()) });
        assert!(delete("a", &facts).is_err());
        delete("b", &facts).unwrap();
    }

    #[test]
    fn a_running_engine_knows_best() {
        let mut facts = facts(&[replica("a"), replica("b")]);
        let modes = [("a", ReplicaMode::ReadWrite), ("b", ReplicaMode::WriteOnly)];
        let status = EngineStatus {
            current_state: InstanceState::Running,
            replica_mode_map: modes.into_iter().map(|(n, m)| (n.to_owned(), m)).collect(),
            ..EngineStatus::default()
        };
        let engine =
            Engine::new("demo-e-0", EngineSpec { volume_name: "demo".into(), ..EngineSpec::default() });
        facts.engine = Some(Engine { status: Some(status), ..engine });
        assert!(delete("a", &facts).is_err());
        delete("b", &facts).unwrap();
    }

    #[test]
    fn with_its_volume_it_goes() {
        let mut facts = facts(&[replica("a")]);
        let mut volume = Volume::new("demo", VolumeSpec::default());
        volume.metadata.deletion_timestamp = serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap();
        facts.volume = Some(volume);
        delete("a", &facts).unwrap();
        facts.volume = None;
        delete("a", &facts).unwrap();
    }

    #[test]
    fn it_does_not_move() {
        let mut moved = replica("a");
        moved.spec.node_id = "n2".into();
        assert!(
            judge(Change::Update { old: &replica("a"), new: &moved }, &Facts::default())
                .unwrap_err()
                .contains("nodeID")
        );
        let mut placed = replica("a");
        placed.spec.disk_id = "d".into();
        judge(Change::Update { old: &replica("a"), new: &placed }, &Facts::default()).unwrap();
    }
}
