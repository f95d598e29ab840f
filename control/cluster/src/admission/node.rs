//! Nodes and their disks: an entry goes, or becomes another place, only when nothing stands on it.

use std::collections::BTreeMap;

use kube::ResourceExt;

use super::{Change, Facts, Verdict, tidy};
use crate::api::{DiskSpec, DiskStatus, Node};

/// Fills in the node's own name, and puts tags in order.
pub(super) fn complete(node: &mut Node) {
    let name = node.name_any();
    let spec = &mut node.spec;
    if spec.name.is_empty() {
        spec.name = name;
    }
    tidy(&mut spec.tags);
    for disk in spec.disks.values_mut() {
        tidy(&mut disk.tags);
    }
}

pub(super) fn judge(change: Change<'_, Node>, facts: &Facts) -> Verdict {
    match change {
        Change::Create(new) => no_twins(&new.spec.disks)?,
        Change::Update { old, new } if new.metadata.deletion_timestamp.is_none() => judge_update(old, new)?,
        Change::Update { .. } => {}
        Change::Delete(node) => judge_delete(node, facts)?,
    }
    Ok(Vec::new())
}

fn judge_update(old: &Node, new: &Node) -> Result<(), String> {
    if new.spec == old.spec {
        return Ok(());
    }
    no_twins(&new.spec.disks)?;
    let begins = |before: bool, after: bool| after && !before;
    if begins(old.spec.eviction_requested, new.spec.eviction_requested) && new.spec.allow_scheduling {
        return Err("evictionRequested of a node needs allowScheduling: false, or new replicas would come while the others go".to_owned());
    }
    let status = new.status.clone().or_else(|| old.status.clone()).unwrap_or_default();
    for (name, before) in &old.spec.disks {
        let there = status.disk_status.get(name);
        match new.spec.disks.get(name) {
            None => may_go(name, before, there)?,
            Some(after) => disk_may_change(name, before, after, there)?,
        }
    }
    Ok(())
}

fn disk_may_change(
    name: &str,
    before: &DiskSpec,
    after: &DiskSpec,
    there: Option<&DiskStatus>,
) -> Result<(), String> {
    if before.path != after.path || before.disk_type != after.disk_type {
        return Err(format!(
            "disk {name} is at {} and stays there: add another one, and remove this one when it is empty",
            before.path
        ));
    }
    if after.eviction_requested && !before.eviction_requested && after.allow_scheduling {
        return Err(format!("evictionRequested of disk {name} needs allowScheduling: false"));
    }
    let maximum = there.map_or(0, |s| s.storage_maximum);
    if maximum > 0 && after.storage_reserved > maximum && after.storage_reserved != before.storage_reserved {
        return Err(format!(
            "storageReserved of disk {name} is {} bytes, and the disk has {maximum}",
            after.storage_reserved
        ));
    }
    Ok(())
}

/// Whether a disk's entry may be removed. Its replicas would have a place that no manager looks at.
fn may_go(name: &str, disk: &DiskSpec, there: Option<&DiskStatus>) -> Result<(), String> {
    if disk.allow_scheduling {
        return Err(format!("disk {name} still takes new replicas: set its allowScheduling to false first"));
    }
    let replicas: Vec<&str> =
        there.map(|s| s.scheduled_replica.keys().map(String::as_str).collect()).unwrap_or_default();
    match replicas.as_slice() {
        [] => Ok(()),
        some => Err(format!(
            "replicas are on disk {name}: {}: set its evictionRequested and wait until they are elsewhere",
            some.join(", ")
        )),
    }
}

/// Two entries for one directory would count its room twice.
fn no_twins(disks: &BTreeMap<String, DiskSpec>) -> Result<(), String> {
    let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, disk) in disks {
        let path = match disk.path.trim_end_matches('/') {
            "" => continue,
            path => path,
        };
        if let Some(other) = seen.insert(path, name) {
            return Err(format!("disks {other} and {name} are both at {path}"));
        }
    }
    Ok(())
}

fn judge_delete(node: &Node, facts: &Facts) -> Result<(), String> {
    let name = node.name_any();
    if facts.kubernetes_has_it {
        return Err(format!(
            "node {name} is still a node of Kubernetes, and its manager would make this anew: delete that one first"
        ));
    }
    // Those that go the leader forgets: with the node nobody is left to finish that.
    let stay = facts.replicas.iter().filter(|r| r.metadata.deletion_timestamp.is_none());
    let replicas: Vec<String> = stay.map(|r| r.name_any()).collect();
    if !replicas.is_empty() {
        return Err(format!(
            "replicas are on node {name}: {}: wait until others have taken their place, or delete them",
            replicas.join(", ")
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{NodeSpec, NodeStatus, Replica, ReplicaSpec};

    /// A change of a good disk, and a part of what is said of it.
    type Case = (fn(&mut DiskSpec), &'static str);

    fn node(change: impl Fn(&mut NodeSpec)) -> Node {
        let disk = DiskSpec { path: "/data".into(), allow_scheduling: true, ..DiskSpec::default() };
        let mut spec = NodeSpec {
            allow_scheduling: true,
            disks: [("a".to_owned(), disk)].into(),
            ..NodeSpec::default()
        };
        change(&mut spec);
        Node::new("n1", spec)
    }

    fn with_replica(mut node: Node, replica: &str) -> Node {
        let disk = DiskStatus {
            scheduled_replica: [(replica.to_owned(), 1)].into(),
            storage_maximum: 100,
            ..DiskStatus::default()
        };
        node.status =
            Some(NodeStatus { disk_status: [("a".to_owned(), disk)].into(), ..NodeStatus::default() });
        node
    }

    fn refusal(old: &Node, new: &Node) -> String {
        judge(Change::Update { old, new }, &Facts::default()).expect_err("it is refused")
    }

    #[test]
    fn tags_are_put_in_order() {
        let mut untidy = node(|s| s.tags = ["z", " a ", "z", ""].map(str::to_owned).to_vec());
        complete(&mut untidy);
        assert_eq!((untidy.spec.tags.join(","), untidy.spec.name.as_str()), ("a,z".to_owned(), "n1"));
    }

    #[test]
    fn a_disk_goes_when_it_takes_nothing_and_holds_nothing() {
        let gone = node(|s| s.disks.clear());
        assert!(refusal(&node(|_| {}), &gone).contains("still takes new replicas"));
        let closed = node(|s| s.disks.get_mut("a").unwrap().allow_scheduling = false);
        let full = with_replica(closed.clone(), "demo-r-1");
        let refused = refusal(&full, &gone);
        assert!(refused.contains("demo-r-1") && refused.contains("evictionRequested"), "{refused}");
        judge(Change::Update { old: &closed, new: &gone }, &Facts::default()).unwrap();
    }

    #[test]
    fn a_disk_stays_where_it_is_and_within_its_size() {
        let disk = |change: fn(&mut DiskSpec)| node(|s| change(s.disks.get_mut("a").unwrap()));
        let old = with_replica(node(|_| {}), "demo-r-1");
        let cases: &[Case] = &[
            (|d| d.path = "/other".into(), "at /data and stays there"),
            (|d| d.storage_reserved = 101, "the disk has 100"),
            (|d| d.eviction_requested = true, "needs allowScheduling: false"),
        ];
        for (change, says) in cases {
            let refused = refusal(&old, &disk(*change));
            assert!(refused.contains(says), "{refused}");
        }
        judge(Change::Update { old: &old, new: &disk(|d| d.storage_reserved = 100) }, &Facts::default())
            .unwrap();
        let evicted = node(|s| s.eviction_requested = true);
        assert!(refusal(&old, &evicted).contains("needs allowScheduling: false"));
        let twin = node(|s| {
            drop(s.disks.insert("b".into(), DiskSpec { path: "/data/".into(), ..DiskSpec::default() }))
        });
        assert!(refusal(&old, &twin).contains("a and b are both at /data"));
    }

    #[test]
    fn a_node_goes_when_kubernetes_and_replicas_have_left_it() {
        let delete = |facts: &Facts| judge(Change::Delete(&node(|_| {})), facts);
        let mut facts = Facts { kubernetes_has_it: true, ..Facts::default() };
        assert!(delete(&facts).unwrap_err().contains("still a node of Kubernetes"));
        facts.kubernetes_has_it = false;
        let on =
            |node: &str| Replica::new("r", ReplicaSpec { node_id: node.into(), ..ReplicaSpec::default() });
        facts.replicas.push(on("n1"));
        assert!(delete(&facts).unwrap_err().contains("replicas are on node n1"));
        let going = || {
            let mut going = on("n1");
            going.metadata.deletion_timestamp = serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap();
            going
        };
        facts.replicas.push(going());
        assert!(delete(&facts).is_err(), "one of the two stays");
        facts.replicas = vec![going(), going()];
        delete(&facts).unwrap();
        facts.kubernetes_has_it = true;
        assert!(delete(&facts).is_err(), "its manager finishes them");
        facts = Facts::default();
        delete(&facts).unwrap();
    }
}
