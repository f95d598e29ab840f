//! Replicas: a user may delete one, with its data, as long as another one holds everything, and its volume goes on; none moves.

use kube::ResourceExt;

use super::{Change, Facts, Verdict};
use crate::api::{Engine, EngineStatus, InstanceState, Replica, ReplicaMode, Volume};
use crate::plan::replica::holds_everything;

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
    let holds = |r: &Replica| is_whole(r, volume, facts.engine.as_ref());
    let own = replica.name_any();
    // One that nobody can read now may be lost for good.
    let is_there = |r: &Replica| facts.cluster.is_readable(&r.spec.node_id, &r.spec.disk_id);
    let stays = |r: &Replica| r.name_any() != own && r.metadata.deletion_timestamp.is_none() && is_there(r);
    if !holds(replica) {
        return Ok(());
    }
    let others = facts.replicas.iter().filter(|r| stays(r) && holds(r)).count();
    if others == 0 {
        return Err(format!(
            "replica {own} is the only one that holds everything of volume {name} and can be read: wait until another one does, or delete the volume"
        ));
    }
    let counted = told(facts.engine.as_ref()).map_or(0, |told| told.replica_mode_map.len());
    let needed = volume.spec.quorum.members_min(counted);
    if others < needed {
        return Err(format!(
            "volume {name} is attached, has the quorum majority, and would wait without replica {own}: {needed} of its {counted} replicas have to hold everything, and beside this one {others} that can be read {}: wait until another one does, or detach the volume first",
            if others == 1 { "does" } else { "do" }
        ));
    }
    Ok(())
}

/// What an engine says that runs, for all that is known, and tells of its replicas. One that was a relay a moment ago does not yet.
fn told(engine: Option<&Engine>) -> Option<&EngineStatus> {
    let status = engine?.status.as_ref()?;
    let tells = !status.relaying && !status.replica_mode_map.is_empty();
    (tells && status.current_state == InstanceState::Running).then_some(status)
}

/// True if the replica holds every acknowledged write, as its volume's running engine says, or as resources tell.
fn is_whole(replica: &Replica, volume: &Volume, engine: Option<&Engine>) -> bool {
    let name = replica.name_any();
    let epoch = volume.status.as_ref().and_then(|s| s.epoch.as_ref());
    match told(engine) {
        Some(told) => {
            let counts = epoch.is_none_or(|epoch| epoch.members.contains(&name));
            counts && told.replica_mode_map.get(&name) == Some(&ReplicaMode::ReadWrite)
        }
        None => holds_everything(replica, Some(volume)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{EngineSpec, EpochRecord, Quorum, ReplicaSpec, VolumeSpec, VolumeStatus};
    use crate::schedule::{Cluster, Disk, Node};

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
            cluster: cluster(false),
            ..Facts::default()
        }
    }

    /// The node of all replicas, and one more.
    fn cluster(silent: bool) -> Cluster {
        let node =
            |silent| Node { silent, disks: [(String::new(), Disk::default())].into(), ..Node::default() };
        let nodes = [("n1".to_owned(), node(false)), ("n2".to_owned(), node(silent))].into();
        Cluster { nodes, ..Cluster::default() }
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
    fn one_that_nobody_can_read_does_not_count() {
        let mut away = replica("b");
        away.spec.node_id = "n2".into();
        let mut facts = facts(&[replica("a"), away]);
        delete("a", &facts).unwrap();
        facts.cluster = cluster(true);
        assert!(delete("a", &facts).unwrap_err().contains("can be read"));
        delete("b", &facts).unwrap();
        facts.cluster.nodes.remove("n2");
        assert!(delete("a", &facts).is_err());
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

    /// `"a b! c?"`: what an engine that runs says of its replicas: in sync, lost (`!`), being filled (`?`).
    fn engine(text: &str) -> Engine {
        let one = |word: &str| {
            let mode = match &word[1..] {
                "!" => ReplicaMode::Error,
                "?" => ReplicaMode::WriteOnly,
                _ => ReplicaMode::ReadWrite,
            };
            (word[..1].to_owned(), mode)
        };
        let status = EngineStatus {
            current_state: InstanceState::Running,
            replica_mode_map: text.split_whitespace().map(one).collect(),
            ..EngineStatus::default()
        };
        let spec = EngineSpec { volume_name: "demo".into(), ..EngineSpec::default() };
        Engine { status: Some(status), ..Engine::new("demo-e-0", spec) }
    }

    #[test]
    fn a_running_engine_knows_best() {
        let mut facts = facts(&[replica("a"), replica("b")]);
        facts.engine = Some(engine("a b?"));
        assert!(delete("a", &facts).is_err());
        delete("b", &facts).unwrap();
    }

    /// It was a relay until now, or has yet to say what it has.
    #[test]
    fn an_engine_that_tells_of_no_replica_is_not_asked() {
        let mut facts = facts(&[replica("a"), failed("b")]);
        facts.engine = Some(engine(""));
        assert!(delete("a", &facts).unwrap_err().contains("the only one"));
        let mut relay = engine("a! b!");
        relay.status.as_mut().unwrap().relaying = true;
        facts.engine = Some(relay);
        assert!(delete("a", &facts).unwrap_err().contains("the only one"));
        delete("b", &facts).unwrap();
    }

    /// Its engine would let go of none then, wait for one whose process has ended, and take no other one in its place.
    #[test]
    fn a_majority_that_is_used_stays_one() {
        let all = ["a", "b", "c", "d"].map(replica);
        let cases: &[(&str, &str, &[&str])] = &[
            ("all are in sync", "a b c", &["a", "b", "c"]),
            ("one is lost", "a b c!", &["c"]),
            ("one is being filled", "a b c?", &["c"]),
            ("there are two", "a b", &[]),
            ("the second one of two is being filled", "a b?", &["b"]),
            ("it waits already", "a b! c!", &["b", "c"]),
            ("of four", "a b c d", &["a", "b", "c", "d"]),
            ("of four one is lost", "a b c d!", &["d"]),
        ];
        for (what, told, go) in cases {
            let there: Vec<Replica> = all.iter().filter(|r| told.contains(&r.name_any())).cloned().collect();
            let mut facts = facts(&there);
            facts.engine = Some(engine(told));
            let which = |facts: &Facts| -> Vec<String> {
                let names = there.iter().map(ResourceExt::name_any);
                names.filter(|name| delete(name, facts).is_ok()).collect()
            };
            let last = usize::from(told.split_whitespace().filter(|word| word.len() == 1).count() == 1);
            assert_eq!(which(&facts).len(), there.len() - last, "any: {what}");
            facts.volume.as_mut().unwrap().spec.quorum = Quorum::Majority;
            assert_eq!(which(&facts), *go, "{what}");
            // At rest the others are enough to begin with: people say which are lost.
            facts.engine = None;
            assert_eq!(which(&facts).len(), there.len(), "at rest: {what}");
        }
        let mut facts = facts(&all[..3]);
        facts.volume.as_mut().unwrap().spec.quorum = Quorum::Majority;
        facts.engine = Some(engine("a b c"));
        facts.replicas[2].spec.node_id = "n2".into();
        facts.cluster = cluster(true);
        let refused = delete("a", &facts).unwrap_err();
        assert!(
            refused.contains(
                "2 of its 3 replicas have to hold everything, and beside this one 1 that can be read does"
            ),
            "{refused}"
        );
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
