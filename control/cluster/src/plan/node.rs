//! One node: what its disks are, whether it and they take new replicas, and the picture of the whole cluster that the
//! scheduler gets from all nodes.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;

use super::drain::NodeView;
use super::written;
use crate::agent::DiskView;
use crate::api::{Conditions, DiskSpec, DiskStatus, DiskType, Node, NodeStatus, Replica};
use crate::schedule::{self, Cluster, Emptying};
use crate::settings::Settings;

/// The condition: the manager of the node answers, and what it needs is there.
pub const READY: &str = "Ready";
/// The condition: the node, or the disk, takes new replicas.
pub const SCHEDULABLE: &str = "Schedulable";

/// The condition, where it does not hold: the node has the disks and tags that its node in Kubernetes asks for.
const DEFAULTS: &str = "DefaultDisksAndTags";

/// The annotation of a node whose first disk could not be used when its resource was made.
const OWED: &str = "longhorn.io/first-disks-owed";

/// Notes that the node gets its first disks once they can be used.
pub fn owe_disks(node: &mut Node) {
    node.metadata.annotations.get_or_insert_default().insert(OWED.to_owned(), "true".to_owned());
}

/// True until a node of which that was noted has had its disks: its condition says so, once there is one.
pub fn is_owed_disks(node: &Node) -> bool {
    let noted = node.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(OWED));
    let lacks = |status: &NodeStatus| status.conditions.get_condition(DEFAULTS).is_some();
    noted && node.status.as_ref().is_none_or(lacks)
}

/// What Kubernetes says of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubernetesNode {
    /// It is cordoned.
    pub cordoned: bool,
    /// The label `topology.kubernetes.io/zone`.
    pub zone: String,
    /// The label `topology.kubernetes.io/region`.
    pub region: String,
}

/// A node and what was found on it.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// The node.
    pub node: &'a Node,
    /// What Kubernetes says of it; `None`: Kubernetes does not know it.
    pub kubernetes: Option<&'a KubernetesNode>,
    /// What is at the path of each disk, by the disk's name.
    pub disks: &'a BTreeMap<String, Result<DiskView, String>>,
    /// All replicas on the node.
    pub replicas: &'a [&'a Replica],
    /// Why the instance manager cannot be used; `None` if it can.
    pub trouble: Option<&'a str>,
    /// Why it does not have the disks or tags that its node in Kubernetes asks for; `None`: it has them.
    pub unmet: Option<&'a str>,
    /// This node's instance manager.
    pub instance_manager: &'a str,
    /// The settings in force.
    pub settings: &'a Settings,
    /// The time.
    pub now: Timestamp,
}

/// What is true of the node now.
pub fn plan(o: &Observed<'_>) -> NodeStatus {
    let now = written(o.now);
    let mut status = o.node.status.clone().unwrap_or_default();
    if let Some(kubernetes) = o.kubernetes {
        status.zone.clone_from(&kubernetes.zone);
        status.region.clone_from(&kubernetes.region);
    }
    let (ready, reason, message) = match (o.kubernetes, o.trouble) {
        (None, _) => (false, "KubernetesNodeGone", "Kubernetes knows no node of this name".to_owned()),
        (Some(_), Some(trouble)) => (false, "InstanceManagerDown", trouble.to_owned()),
        (Some(_), None) => (true, "", String::new()),
    };
    status.conditions.set_condition(READY, ready, reason, &message, &now);
    let is_cordoned = o.kubernetes.is_some_and(|k| k.cordoned);
    let cordoned = is_cordoned && o.settings.cordon_stops_scheduling();
    let (open, reason, message) = match (o.node.spec.allow_scheduling, cordoned) {
        (false, _) => (false, "NotAllowed", "spec.allowScheduling of the node is false".to_owned()),
        (true, true) => (false, "Cordoned", "the node is cordoned (kubectl uncordon)".to_owned()),
        (true, false) => (true, "", String::new()),
    };
    status.conditions.set_condition(SCHEDULABLE, open, reason, &message, &now);
    match o.unmet {
        Some(why) => status.conditions.set_condition(DEFAULTS, false, "NotUsable", why, &now),
        None => status.conditions.retain(|c| c.kind != DEFAULTS),
    }
    status.auto_evicting = is_cordoned && is_emptied_by_itself(o);
    let old = std::mem::take(&mut status.disk_status);
    let twins = twins(o.disks, &old);
    for (name, spec) in &o.node.spec.disks {
        let before = old.get(name).cloned().unwrap_or_default();
        let disk = disk_status(o, name, spec, before, twins.get(name.as_str()).copied(), &now);
        status.disk_status.insert(name.clone(), disk);
    }
    status
}

/// True if a replica leaves the node though nobody asked for that: it is cordoned.
fn is_emptied_by_itself(o: &Observed<'_>) -> bool {
    let statuses = o.node.status.as_ref().map(|s| &s.disk_status);
    let is_asked = |disk: &str| {
        let name =
            statuses.and_then(|all| all.iter().find(|(_, d)| d.disk_uuid == disk)).map(|(name, _)| name);
        name.and_then(|name| o.node.spec.disks.get(name)).is_some_and(|d| d.eviction_requested)
    };
    let leaves = |r: &&Replica| r.spec.eviction_requested && !is_asked(&r.spec.disk_id);
    !o.node.spec.eviction_requested && o.replicas.iter().any(leaves)
}

/// Disks that lie on the file system of another one, by name, with the other one's name: its room would count twice. Of two the one
/// stays that was a disk before, with replicas perhaps: the other one is new, or is not mounted any more and shows what lies below.
fn twins<'a>(
    disks: &'a BTreeMap<String, Result<DiskView, String>>,
    before: &BTreeMap<String, DiskStatus>,
) -> BTreeMap<&'a str, &'a str> {
    let is_known = |name: &str, view: &DiskView| before.get(name).is_some_and(|d| d.disk_uuid == view.uuid);
    let seen = disks.iter().filter_map(|(name, view)| Some((name.as_str(), view.as_ref().ok()?)));
    let (known, others): (Vec<_>, Vec<_>) = seen.partition(|(name, view)| is_known(name, view));
    let mut first: BTreeMap<&str, &str> = BTreeMap::new();
    let mut twins = BTreeMap::new();
    for (name, view) in known.into_iter().chain(others) {
        if let Some(other) = first.get(view.filesystem_id.as_str()) {
            twins.insert(name, *other);
        } else {
            first.insert(&view.filesystem_id, name);
        }
    }
    twins
}

fn disk_status(
    o: &Observed<'_>,
    name: &str,
    spec: &DiskSpec,
    mut status: DiskStatus,
    twin: Option<&str>,
    now: &str,
) -> DiskStatus {
    name.clone_into(&mut status.disk_name);
    status.disk_path.clone_from(&spec.path);
    status.disk_type = spec.disk_type.to_string();
    o.instance_manager.clone_into(&mut status.instance_manager_name);
    let trouble = match (o.disks.get(name), spec.disk_type, twin) {
        (_, DiskType::Block, _) => Some("disks of type block are for Longhorn's v2 data engine".to_owned()),
        (None, ..) => Some("the disk was not looked at yet".to_owned()),
        (Some(Err(e)), ..) => Some(e.clone()),
        (Some(Ok(view)), ..) if !status.disk_uuid.is_empty() && view.uuid != status.disk_uuid => {
            Some(format!(
                "another disk is at {}: {} was expected, {} is there",
                spec.path, status.disk_uuid, view.uuid
            ))
        }
        (Some(Ok(_)), _, Some(twin)) => {
            Some(format!("it lies on the same file system as disk {twin}: remove one of the two"))
        }
        (Some(Ok(_)), ..) => None,
    };
    if let (None, Some(Ok(view))) = (&trouble, o.disks.get(name)) {
        status.disk_uuid.clone_from(&view.uuid);
        status.filesystem_type.clone_from(&view.filesystem_type);
        status.storage_maximum = to_i64(view.maximum);
        status.storage_available = round(view.available, status.storage_available, view.maximum);
    }
    let reason = if trouble.is_some() { "NotUsable" } else { "" };
    let message = trouble.unwrap_or_default();
    let ready = reason.is_empty();
    status.conditions.set_condition(READY, ready, reason, &message, now);
    let here =
        o.replicas.iter().filter(|r| !status.disk_uuid.is_empty() && r.spec.disk_id == status.disk_uuid);
    status.scheduled_replica =
        here.map(|r| (r.metadata.name.clone().unwrap_or_default(), r.spec.volume_size.0)).collect();
    status.storage_scheduled = status.scheduled_replica.values().sum();
    let (open, reason, message) = if !ready {
        (false, "NotReady", message)
    } else if !spec.allow_scheduling {
        (false, "NotAllowed", "allowScheduling of the disk is false".to_owned())
    } else {
        (true, "", String::new())
    };
    status.conditions.set_condition(SCHEDULABLE, open, reason, &message, now);
    status
}

/// Free bytes as they are told: a change below a thousandth of the disk is not worth a write of the resource.
fn round(free: u64, told: i64, maximum: u64) -> i64 {
    let free = to_i64(free);
    let step = to_i64(maximum / 1000);
    if told > 0 && free.abs_diff(told) < step.unsigned_abs() { told } else { free }
}

fn to_i64(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

fn to_u64(bytes: i64) -> u64 {
    u64::try_from(bytes).unwrap_or_default()
}

/// True if the node answers and that disk of it works, as the resource tells.
pub fn is_readable(node: &Node, disk: &str) -> bool {
    let Some(status) = node.status.as_ref().filter(|s| s.conditions.holds(READY)) else { return false };
    status.disk_status.values().any(|d| d.disk_uuid == disk && d.conditions.holds(READY))
}

/// Since when the leader says of a node whose manager is silent that it is.
fn silent_since(status: &NodeStatus) -> Option<Timestamp> {
    let ready = status.conditions.get_condition(READY).filter(|c| !c.is_true())?;
    ready.last_transition_time.parse().ok()
}

/// What the scheduler gets: every node and disk as its resource tells, of nodes whose manager answers. Room that
/// replicas were promised counts from the replicas themselves: a replica made a moment ago is on no node's list yet.
/// `drains`: which nodes are cordoned, which protected. `programs`: the images whose programs are there, by node.
pub fn picture<'a>(
    nodes: impl IntoIterator<Item = &'a Node>,
    replicas: impl IntoIterator<Item = &'a Replica>,
    nodes_up: &BTreeSet<String>,
    drains: &BTreeMap<String, NodeView>,
    programs: &BTreeMap<String, BTreeSet<String>>,
    settings: &Settings,
) -> (Cluster, BTreeMap<(String, String), String>) {
    let mut promised: BTreeMap<&str, u64> = BTreeMap::new();
    for replica in replicas {
        let bytes = promised.entry(&replica.spec.disk_id).or_default();
        *bytes = bytes.saturating_add(replica.spec.volume_size.bytes());
    }
    let mut cluster = Cluster { limits: settings.limits(), ..Cluster::default() };
    let mut paths = BTreeMap::new();
    for node in nodes {
        let name = node.metadata.name.clone().unwrap_or_default();
        let unknown = NodeStatus::default();
        let status = node.status.as_ref().unwrap_or(&unknown);
        let drain = drains.get(&name).copied().unwrap_or_default();
        let is_up = nodes_up.contains(&name) && status.conditions.holds(READY);
        let mut disks = BTreeMap::new();
        for (disk_name, spec) in &node.spec.disks {
            let Some(disk) = status.disk_status.get(disk_name).filter(|d| !d.disk_uuid.is_empty()) else {
                continue;
            };
            paths.insert((name.clone(), disk.disk_uuid.clone()), spec.path.clone());
            let seen = schedule::Disk {
                schedulable: disk.conditions.holds(SCHEDULABLE) && spec.allow_scheduling,
                broken: !disk.conditions.holds(READY),
                evicting: spec.eviction_requested,
                tags: spec.tags.iter().cloned().collect(),
                maximum: to_u64(disk.storage_maximum),
                available: to_u64(disk.storage_available),
                reserved: to_u64(spec.storage_reserved),
                scheduled: promised.get(disk.disk_uuid.as_str()).copied().unwrap_or_default(),
            };
            disks.insert(disk.disk_uuid.clone(), seen);
        }
        let seen = schedule::Node {
            zone: status.zone.clone(),
            schedulable: is_up && status.conditions.holds(SCHEDULABLE) && node.spec.allow_scheduling,
            emptying: match (node.spec.eviction_requested, drain.cordoned) {
                (true, _) => Emptying::All,
                (false, true) => settings.drain().empties(),
                (false, false) => Emptying::No,
            },
            cordoned: drain.cordoned,
            protected: drain.protected,
            gone: drain.gone && !nodes_up.contains(&name),
            silent: !is_up,
            silent_since: if nodes_up.contains(&name) { None } else { silent_since(status) },
            tags: node.spec.tags.iter().cloned().collect(),
            programs: programs.get(&name).cloned().unwrap_or_default(),
            disks,
        };
        cluster.nodes.insert(name, seen);
    }
    (cluster, paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Int64Text, NodeSpec, ReplicaSpec};

    fn node(disks: &[(&str, DiskSpec)]) -> Node {
        let disks = disks.iter().map(|(name, disk)| ((*name).to_owned(), disk.clone())).collect();
        Node::new("n1", NodeSpec { allow_scheduling: true, disks, ..NodeSpec::default() })
    }

    fn disk(path: &str) -> DiskSpec {
        DiskSpec { path: path.into(), allow_scheduling: true, storage_reserved: 10, ..DiskSpec::default() }
    }

    fn view(uuid: &str, filesystem: &str) -> Result<DiskView, String> {
        Ok(DiskView {
            uuid: uuid.into(),
            filesystem_id: filesystem.into(),
            maximum: 100_000,
            available: 90_000,
            ..DiskView::default()
        })
    }

    fn replica(name: &str, disk: &str, size: i64) -> Replica {
        let spec =
            ReplicaSpec { disk_id: disk.into(), volume_size: Int64Text(size), ..ReplicaSpec::default() };
        Replica::new(name, spec)
    }

    fn look(
        node: &Node,
        kubernetes: Option<&KubernetesNode>,
        disks: &[(&str, Result<DiskView, String>)],
        replicas: &[&Replica],
        trouble: Option<&str>,
    ) -> NodeStatus {
        let disks = disks.iter().map(|(name, view)| ((*name).to_owned(), view.clone())).collect();
        plan(&Observed {
            node,
            kubernetes,
            disks: &disks,
            replicas,
            trouble,
            unmet: None,
            instance_manager: "im",
            settings: &Settings::default(),
            now: Timestamp::from_second(1_700_000_000).unwrap(),
        })
    }

    #[test]
    fn a_disk_is_told_with_its_room_and_its_replicas() {
        let node = node(&[("a", disk("/a"))]);
        let (mine, other) = (replica("r1", "u1", 70), replica("r2", "u2", 50));
        let kubernetes = KubernetesNode { zone: "z1".into(), ..KubernetesNode::default() };
        let status = look(&node, Some(&kubernetes), &[("a", view("u1", "f1"))], &[&mine, &other], None);
        assert!(status.conditions.holds(READY) && status.conditions.holds(SCHEDULABLE));
        assert_eq!(status.zone, "z1");
        let a = &status.disk_status["a"];
        assert!(a.conditions.holds(READY) && a.conditions.holds(SCHEDULABLE));
        assert_eq!((a.storage_maximum, a.storage_available, a.storage_scheduled), (100_000, 90_000, 70));
        assert_eq!(a.scheduled_replica.keys().collect::<Vec<_>>(), ["r1"]);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let plain = KubernetesNode::default();
        let cordoned = KubernetesNode { cordoned: true, ..KubernetesNode::default() };
        let good = || [("a", view("u1", "f1"))];
        let mut closed = node(&[("a", disk("/a"))]);
        closed.spec.allow_scheduling = false;
        let open = node(&[("a", disk("/a"))]);
        let reason =
            |status: &NodeStatus, kind| status.conditions.get_condition(kind).unwrap().reason.clone();
        assert_eq!(reason(&look(&open, None, &good(), &[], None), READY), "KubernetesNodeGone");
        assert_eq!(reason(&look(&open, Some(&plain), &good(), &[], Some("x")), READY), "InstanceManagerDown");
        assert_eq!(reason(&look(&open, Some(&cordoned), &good(), &[], None), SCHEDULABLE), "Cordoned");
        assert_eq!(reason(&look(&closed, Some(&plain), &good(), &[], None), SCHEDULABLE), "NotAllowed");
    }

    #[test]
    fn a_disk_that_is_not_itself_takes_nothing() {
        let plain = KubernetesNode::default();
        let mut two = node(&[("a", disk("/a")), ("b", disk("/b"))]);
        let views = [("a", view("u1", "f1")), ("b", view("u2", "f1"))];
        let status = look(&two, Some(&plain), &views, &[], None);
        assert!(status.disk_status["a"].conditions.holds(READY));
        let b = status.disk_status["b"].conditions.get_condition(READY).unwrap();
        assert!(b.message.contains("same file system as disk a"), "{}", b.message);
        two.status = Some(status);
        let views = [("a", view("u9", "f1")), ("b", Err("/b: gone".to_owned()))];
        let status = look(&two, Some(&plain), &views, &[], None);
        let a = status.disk_status["a"].conditions.get_condition(READY).unwrap();
        assert!(a.message.contains("u1 was expected, u9 is there"), "{}", a.message);
        assert_eq!(status.disk_status["a"].disk_uuid, "u1", "the resource stays that of the disk it had");
        assert!(!status.disk_status["b"].conditions.holds(SCHEDULABLE));
        two.spec.disks.remove("b");
        assert!(!look(&two, Some(&plain), &[], &[], None).disk_status.contains_key("b"));
    }

    #[test]
    fn a_disk_stays_one_whatever_else_comes_to_lie_on_its_file_system() {
        let plain = KubernetesNode::default();
        let mut two = node(&[("a", disk("/a")), ("b", disk("/b"))]);
        let before = look(&two, Some(&plain), &[("a", view("u1", "f1")), ("b", view("u2", "f2"))], &[], None);
        let says = |status: &NodeStatus, name: &str| {
            status.disk_status[name].conditions.get_condition(READY).unwrap().message.clone()
        };
        // After the node was started anew the first one is not mounted: what lies below it is on the second one's file system.
        two.status = Some(before.clone());
        let status = look(&two, Some(&plain), &[("a", view("u9", "f2")), ("b", view("u2", "f2"))], &[], None);
        assert_eq!(says(&status, "b"), "");
        assert!(says(&status, "a").contains("u1 was expected, u9 is there"), "{}", says(&status, "a"));
        // One that is added before it.
        let mut known = before;
        known.disk_status.remove("a");
        two.status = Some(known);
        let status = look(&two, Some(&plain), &[("a", view("u9", "f2")), ("b", view("u2", "f2"))], &[], None);
        assert_eq!(says(&status, "b"), "");
        assert!(says(&status, "a").contains("same file system as disk b"), "{}", says(&status, "a"));
        two.status = Some(status);
        let again = look(&two, Some(&plain), &[("a", view("u9", "f2")), ("b", view("u2", "f2"))], &[], None);
        assert_eq!(Some(again), two.status, "and so it stays");
    }

    #[test]
    fn small_changes_of_the_free_space_are_not_told() {
        let plain = KubernetesNode::default();
        let mut node = node(&[("a", disk("/a"))]);
        node.status = Some(look(&node, Some(&plain), &[("a", view("u1", "f1"))], &[], None));
        let free = |available| {
            let view = view("u1", "f1").map(|v| DiskView { available, ..v });
            look(&node, Some(&plain), &[("a", view)], &[], None).disk_status["a"].storage_available
        };
        assert_eq!((free(89_901), free(89_899)), (90_000, 89_899));
    }

    #[test]
    fn the_picture_counts_replicas_that_no_node_lists_yet_and_trusts_no_node_that_is_silent() {
        let plain = KubernetesNode::default();
        let mut one = node(&[("a", disk("/a"))]);
        one.status = Some(look(&one, Some(&plain), &[("a", view("u1", "f1"))], &[], None));
        let up: BTreeSet<String> = ["n1".to_owned()].into();
        let new = replica("r1", "u1", 70);
        let (drains, settings) = (BTreeMap::new(), Settings::default());
        let programs = [("n1".to_owned(), ["image".to_owned()].into())].into();
        let (cluster, paths) = picture([&one], [&new], &up, &drains, &programs, &settings);
        let seen = &cluster.nodes["n1"];
        assert!(seen.schedulable && seen.disks["u1"].schedulable && seen.programs.contains("image"));
        assert_eq!((seen.disks["u1"].scheduled, seen.disks["u1"].reserved), (70, 10));
        assert_eq!(paths[&("n1".to_owned(), "u1".to_owned())], "/a");
        let readable = |cluster: &Cluster| cluster.is_readable("n1", "u1");
        assert!(readable(&cluster) && is_readable(&one, "u1"));
        assert!(
            !cluster.is_readable("n1", "u2") && !cluster.is_readable("n2", "u1") && !is_readable(&one, "u2")
        );
        let (silent, _) = picture([&one], [], &BTreeSet::new(), &drains, &programs, &settings);
        assert!(!silent.nodes["n1"].schedulable && !readable(&silent));
        one.status = Some(look(&one, Some(&plain), &[("a", Err("gone".to_owned()))], &[], None));
        let (broken, _) = picture([&one], [], &up, &drains, &programs, &settings);
        assert!(!readable(&broken) && !is_readable(&one, "u1"));
    }

    #[test]
    fn a_cordoned_node_is_emptied_as_the_policy_says_and_an_asked_one_always() {
        let seen = |asked: bool, cordoned: bool, policy: &str| {
            let mut one = node(&[]);
            one.spec.eviction_requested = asked;
            let settings = Settings::of([("node-drain-policy", policy)]);
            let drains = [("n1".to_owned(), NodeView { cordoned, protected: true, gone: false })].into();
            let (cluster, _) = picture([&one], [], &BTreeSet::new(), &drains, &BTreeMap::new(), &settings);
            (cluster.nodes["n1"].emptying, cluster.nodes["n1"].protected)
        };
        let cases = [
            (false, true, "block-for-eviction", Emptying::All),
            (false, true, "block-for-eviction-if-contains-last-replica", Emptying::LastReplicas),
            (false, true, "block-if-contains-last-replica", Emptying::No),
            (false, true, "always-allow", Emptying::No),
            (false, false, "block-for-eviction", Emptying::No),
            (true, false, "always-allow", Emptying::All),
        ];
        for (asked, cordoned, policy, expected) in cases {
            assert_eq!(seen(asked, cordoned, policy), (expected, true), "{asked} {cordoned} {policy}");
        }
    }

    #[test]
    fn a_node_says_that_it_is_emptied_because_it_is_cordoned() {
        let (plain, cordoned) =
            (KubernetesNode::default(), KubernetesNode { cordoned: true, ..KubernetesNode::default() });
        let mut one = node(&[("a", disk("/a"))]);
        one.status = Some(look(&one, Some(&plain), &[("a", view("u1", "f1"))], &[], None));
        let (stays, mut leaves) = (replica("r1", "u1", 70), replica("r2", "u1", 70));
        leaves.spec.eviction_requested = true;
        let says = |node: &Node, kubernetes: &KubernetesNode, replica: &Replica| {
            look(node, Some(kubernetes), &[("a", view("u1", "f1"))], &[replica], None).auto_evicting
        };
        assert!(says(&one, &cordoned, &leaves));
        assert!(!says(&one, &plain, &leaves) && !says(&one, &cordoned, &stays));
        one.spec.disks.get_mut("a").unwrap().eviction_requested = true;
        assert!(!says(&one, &cordoned, &leaves), "somebody asked for it");
    }
}
