//! When a node may be drained: `kubectl drain` evicts pods, and a PodDisruptionBudget keeps the instance manager's pod from
//! that for as long as it is there.
//!
//! Every node has a budget while it is in use. Once it is cordoned the budget goes as soon as nothing is lost with the
//! node, as Longhorn does it (longhorn-manager, `canDeleteInstanceManagerPDB`). All nodes are decided together: of two
//! that are cordoned at once, each with a replica of one volume, only one gives its budget up.

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt;

use super::replica::holds_everything;
use crate::api::{DesireState, Engine, InstanceState, Replica, TicketType, Volume, VolumeAttachment};
use crate::schedule::Cluster;
use crate::settings::DrainPolicy;

/// A node with an instance manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// It is cordoned.
    pub cordoned: bool,
    /// It has a budget.
    pub protected: bool,
    /// Kubernetes has no such node.
    pub gone: bool,
}

/// The nodes, and what is on them.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// All nodes, by name.
    pub nodes: &'a BTreeMap<String, NodeView>,
    /// All volumes.
    pub volumes: &'a [&'a Volume],
    /// All engines.
    pub engines: &'a [&'a Engine],
    /// All replicas.
    pub replicas: &'a [&'a Replica],
    /// Which disks work, and which nodes answer.
    pub cluster: &'a Cluster,
    /// The setting.
    pub policy: DrainPolicy,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// Make the budget of a node.
    Protect(String),
    /// Remove it: the node may be drained.
    Release(String),
}

/// Decides for all nodes, in the order of their names.
pub fn plan(o: &Observed<'_>) -> Vec<Action> {
    let mut protected: BTreeSet<&str> =
        o.nodes.iter().filter(|(_, n)| n.protected).map(|(name, _)| name.as_str()).collect();
    let mut actions = Vec::new();
    for (name, node) in o.nodes {
        match (node.cordoned, node.protected) {
            (false, false) => actions.push(Action::Protect(name.clone())),
            (true, true) if may_go(o, name, &protected) => {
                protected.remove(name.as_str());
                actions.push(Action::Release(name.clone()));
            }
            _ => {}
        }
    }
    actions
}

/// True if nothing is lost with the node, while these nodes are protected.
fn may_go(o: &Observed<'_>, node: &str, protected: &BTreeSet<&str>) -> bool {
    if o.engines.iter().any(|e| e.spec.node_id == node) {
        return false;
    }
    let mut here = o.replicas.iter().filter(|r| r.spec.node_id == node);
    match o.policy {
        DrainPolicy::Always => true,
        DrainPolicy::EvictAll => here.next().is_none(),
        DrainPolicy::AllowStopped => here.all(|r| is_stopped(r) || is_dispensable(o, r, protected)),
        DrainPolicy::BlockLast | DrainPolicy::EvictLast => here.all(|r| is_dispensable(o, r, protected)),
    }
}

/// A volume that only a ticket of the CSI driver keeps on a node that is to be drained.
#[derive(Clone, Copy, Debug)]
pub struct Held<'a> {
    /// The volume's attachment.
    pub attachment: &'a VolumeAttachment,
    /// The node.
    pub node: &'a str,
    /// The id of the ticket.
    pub ticket: &'a str,
}

/// What keeps cordoned nodes, and might be left there: volumes that are attached and for which the CSI driver has a ticket and
/// nobody else. Whether somebody uses them Kubernetes knows.
pub fn held<'a>(
    nodes: &BTreeMap<String, NodeView>,
    engines: impl IntoIterator<Item = &'a Engine>,
    attachments: impl IntoIterator<Item = &'a VolumeAttachment>,
) -> Vec<Held<'a>> {
    let waits = |node: &str| nodes.get(node).is_some_and(|n| n.cordoned && n.protected);
    let engines = engines.into_iter().filter(|e| waits(&e.spec.node_id));
    let attached: BTreeSet<(&str, &str)> =
        engines.map(|e| (e.spec.volume_name.as_str(), e.spec.node_id.as_str())).collect();
    let mut all = Vec::new();
    for attachment in attachments {
        let tickets = &attachment.spec.attachment_tickets;
        for (ticket, of_driver) in tickets.iter().filter(|(_, t)| t.kind == TicketType::Csi) {
            let node = of_driver.node_id.as_str();
            let alone = tickets.values().all(|t| t.node_id != node || t.kind == TicketType::Csi);
            if alone && attached.contains(&(attachment.spec.volume.as_str(), node)) {
                all.push(Held { attachment, node, ticket });
            }
        }
    }
    all
}

fn is_stopped(replica: &Replica) -> bool {
    let state = replica.status.as_ref().map(|s| s.current_state).unwrap_or_default();
    replica.spec.desire_state == DesireState::Stopped && state == InstanceState::Stopped
}

/// True if the replica never held anything, or its volume goes on without it: as many others as it needs hold everything, on protected
/// nodes. One that nobody can read now does not count: its node may be down for good, and the one that is drained is often deleted next.
fn is_dispensable(o: &Observed<'_>, replica: &Replica, protected: &BTreeSet<&str>) -> bool {
    let spec = &replica.spec;
    if is_unused(replica) {
        return true;
    }
    let volume = o.volumes.iter().find(|v| v.metadata.name.as_ref() == Some(&spec.volume_name)).copied();
    let of_volume = || o.replicas.iter().copied().filter(|other| other.spec.volume_name == spec.volume_name);
    let stays = |other: &&Replica| {
        other.spec.node_id != spec.node_id
            && protected.contains(other.spec.node_id.as_str())
            && o.cluster.is_readable(&other.spec.node_id, &other.spec.disk_id)
            && holds_everything(other, volume)
    };
    let quorum = volume.map(|v| v.spec.quorum).unwrap_or_default();
    of_volume().filter(stays).count()
        >= quorum.members_min(of_volume().filter(|other| counts(o, other)).count())
}

fn is_unused(replica: &Replica) -> bool {
    replica.spec.healthy_at.is_empty() && replica.spec.failed_at.is_empty()
}

/// True for a replica of which a majority is one: it was used, or an engine has it and is about to fill it.
fn counts(o: &Observed<'_>, replica: &Replica) -> bool {
    let is_told = |e: &&Engine| e.spec.replica_address_map.contains_key(&replica.name_any());
    let goes = replica.metadata.deletion_timestamp.is_some();
    !goes && (!is_unused(replica) || o.engines.iter().any(is_told))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{
        AttachmentTicket, EngineSpec, EpochRecord, Quorum, ReplicaSpec, ReplicaStatus, VolumeAttachmentSpec,
        VolumeSpec, VolumeStatus,
    };
    use crate::schedule::{self, Disk};

    /// `"v1@n1 v1@n2! v1@n3? v2@n1."`: replicas of volumes on nodes, healthy ones that run; failed (`!`), unused (`?`),
    /// healthy and stopped (`.`).
    fn replicas(text: &str) -> Vec<Replica> {
        let one = |word: &str| {
            let (name, how) = match word.strip_suffix(['!', '?', '.']) {
                Some(name) => (name, &word[name.len()..]),
                None => (word, ""),
            };
            let (volume, node) = name.split_once('@').expect("VOLUME@NODE");
            let at = |set: bool| if set { "2026-01-01T00:00:00Z".to_owned() } else { String::new() };
            let (desire_state, current_state) = match how {
                "." | "?" => (DesireState::Stopped, InstanceState::Stopped),
                _ => (DesireState::Running, InstanceState::Running),
            };
            let spec = ReplicaSpec {
                volume_name: volume.into(),
                node_id: node.into(),
                healthy_at: at(how != "?"),
                failed_at: at(how == "!"),
                desire_state,
                ..ReplicaSpec::default()
            };
            let mut replica = Replica::new(&format!("{volume}-r-{node}"), spec);
            replica.status = Some(ReplicaStatus { current_state, ..ReplicaStatus::default() });
            replica
        };
        text.split_whitespace().map(one).collect()
    }

    /// The same nodes: on those with `~` nobody answers, and on those with `!` the disk does not work.
    fn cluster(text: &str) -> Cluster {
        let one = |word: &str| {
            let disk = Disk { broken: word.contains('!'), ..Disk::default() };
            let disks = [(String::new(), disk)].into();
            let node = schedule::Node { silent: word.contains('~'), disks, ..schedule::Node::default() };
            (word.trim_end_matches([':', '-', '~', '!']).to_owned(), node)
        };
        Cluster { nodes: text.split_whitespace().map(one).collect(), ..Cluster::default() }
    }

    /// `"n1: n2 n3-"`: nodes with a budget; cordoned (`:`), without one (`-`).
    fn nodes(text: &str) -> BTreeMap<String, NodeView> {
        let one = |word: &str| {
            let (cordoned, protected) = (word.contains(':'), !word.contains('-'));
            let view = NodeView { cordoned, protected, gone: false };
            (word.trim_end_matches([':', '-', '~', '!']).to_owned(), view)
        };
        text.split_whitespace().map(one).collect()
    }

    fn decide(on: &str, there: &str, engine_on: &str, policy: DrainPolicy) -> Vec<Action> {
        let (nodes, replicas) = (nodes(on), replicas(there));
        let engine = Engine::new("v1-e-0", EngineSpec { node_id: engine_on.into(), ..EngineSpec::default() });
        plan(&Observed {
            nodes: &nodes,
            volumes: &[],
            engines: &[&engine],
            replicas: &replicas.iter().collect::<Vec<_>>(),
            cluster: &cluster(on),
            policy,
        })
    }

    fn released(actions: &[Action]) -> Vec<&str> {
        let names = actions.iter().filter_map(|a| match a {
            Action::Release(name) => Some(name.as_str()),
            Action::Protect(_) => None,
        });
        names.collect()
    }

    #[test]
    fn a_node_in_use_has_a_budget_and_a_cordoned_one_gets_none() {
        let actions = decide("n1- n2 n3:-", "", "", DrainPolicy::Always);
        assert_eq!(actions, [Action::Protect("n1".into())]);
    }

    #[test]
    fn each_policy_lets_a_node_go_when_nothing_is_lost_with_it() {
        use DrainPolicy::{AllowStopped, Always, BlockLast, EvictAll, EvictLast};
        // What is on the cordoned node n1 and elsewhere, and the policies that let n1 go.
        let cases: &[(&str, &str, &[DrainPolicy])] = &[
            ("nothing", "", &[BlockLast, AllowStopped, Always, EvictAll, EvictLast]),
            ("another on n2", "v1@n1 v1@n2", &[BlockLast, AllowStopped, Always, EvictLast]),
            ("the only one", "v1@n1", &[Always]),
            ("the only one, stopped", "v1@n1.", &[AllowStopped, Always]),
            ("another that failed", "v1@n1 v1@n2!", &[Always]),
            ("another that never held anything", "v1@n1 v1@n2?", &[Always]),
            ("another of another volume", "v1@n1 v2@n2", &[Always]),
            ("another on a node without a budget", "v1@n1 v1@n3", &[Always]),
            ("one that never held anything", "v1@n1?", &[BlockLast, AllowStopped, Always, EvictLast]),
            (
                "a failed one, and one elsewhere",
                "v1@n1! v1@n2",
                &[BlockLast, AllowStopped, Always, EvictLast],
            ),
            ("two volumes, one of them last", "v1@n1 v1@n2 v2@n1", &[Always]),
            ("only elsewhere", "v1@n2", &[BlockLast, AllowStopped, Always, EvictAll, EvictLast]),
        ];
        for (what, there, lets_go) in cases {
            for policy in [BlockLast, AllowStopped, Always, EvictAll, EvictLast] {
                let expected: &[&str] = if lets_go.contains(&policy) { &["n1"] } else { &[] };
                let actions = decide("n1: n2 n3:-", there, "", policy);
                assert_eq!(released(&actions), expected, "{what}, {policy:?}");
                assert_eq!(
                    released(&decide("n1 n2 n3-", there, "", policy)),
                    [""; 0],
                    "not cordoned: {what}"
                );
                assert_eq!(released(&decide("n1: n2 n3", there, "n1", policy)), [""; 0], "attached: {what}");
            }
        }
    }

    #[test]
    fn what_nobody_can_read_is_no_other_copy() {
        for (on, lets_go) in [("n1: n2", true), ("n1: n2~", false), ("n1: n2!", false), ("n1: n2~ n3", true)]
        {
            let there = if on.contains("n3") { "v1@n1 v1@n2 v1@n3" } else { "v1@n1 v1@n2" };
            let actions = decide(on, there, "", DrainPolicy::BlockLast);
            assert_eq!(!released(&actions).is_empty(), lets_go, "{on}");
        }
    }

    #[test]
    fn of_two_nodes_at_once_only_one_goes() {
        let both = |policy| decide("n1: n2:", "v1@n1 v1@n2", "n3", policy);
        assert_eq!(released(&both(DrainPolicy::BlockLast)), ["n1"]);
        assert_eq!(released(&both(DrainPolicy::EvictLast)), ["n1"]);
        assert_eq!(released(&both(DrainPolicy::Always)), ["n1", "n2"]);
        let three = decide("n1: n2: n3:", "v1@n1 v1@n2 v1@n3", "", DrainPolicy::BlockLast);
        assert_eq!(released(&three), ["n1", "n2"]);
        let next = decide("n1:- n2:", "v1@n1 v1@n2", "", DrainPolicy::BlockLast);
        assert_eq!(released(&next), [""; 0], "the first is still away");
    }

    /// Seen on paper: two of three nodes were drained one after the other, and a volume waited that had the third one only.
    #[test]
    fn where_a_majority_decides_no_node_goes_that_leaves_fewer() {
        let mut volume = Volume::new("v1", VolumeSpec { quorum: Quorum::Majority, ..VolumeSpec::default() });
        let decide = |volume: &Volume, on: &str, there: &str, told: &[&str]| {
            let (nodes, replicas) = (nodes(on), replicas(there));
            let mut engine = Engine::new("v1-e-0", EngineSpec::default());
            engine.spec.replica_address_map =
                told.iter().map(|name| (format!("v1-r-{name}"), String::new())).collect();
            let actions = plan(&Observed {
                nodes: &nodes,
                volumes: &[volume],
                engines: &[&engine],
                replicas: &replicas.iter().collect::<Vec<_>>(),
                cluster: &cluster(on),
                policy: DrainPolicy::BlockLast,
            });
            released(&actions).join(" ")
        };
        let cases = [
            ("the first of three", "n1: n2 n3", "v1@n1 v1@n2 v1@n3", "n1"),
            ("another one is away", "n1:- n2: n3", "v1@n1 v1@n2 v1@n3", ""),
            ("two at once", "n1: n2: n3", "v1@n1 v1@n2 v1@n3", "n1"),
            ("another one has failed", "n1: n2 n3", "v1@n1 v1@n2 v1@n3!", ""),
            ("one that failed", "n1: n2 n3", "v1@n1! v1@n2 v1@n3", "n1"),
            ("another one has its successor", "n1: n2 n3 n4:-", "v1@n1 v1@n2 v1@n3 v1@n4!", ""),
            ("which is in sync, and the other one gone", "n1: n2 n3 n4:-", "v1@n1 v1@n2 v1@n3", "n1"),
            ("one of two", "n1: n2", "v1@n1 v1@n2", ""),
            ("two of five", "n1: n2: n3 n4 n5", "v1@n1 v1@n2 v1@n3 v1@n4 v1@n5", "n1 n2"),
            ("one that holds nothing", "n1: n2 n3", "v1@n1? v1@n2 v1@n3", "n1"),
            ("beside one that nobody has", "n1: n2 n3 n4", "v1@n1 v1@n2 v1@n3 v1@n4?", "n1"),
        ];
        for (what, on, there, goes) in cases {
            assert_eq!(decide(&volume, on, there, &[]), goes, "{what}");
        }
        let (on, there) = ("n1: n2 n3 n4", "v1@n1 v1@n2 v1@n3 v1@n4?");
        assert_eq!(
            decide(&volume, on, there, &["n1", "n2", "n3", "n4"]),
            "",
            "beside one that is being filled"
        );
        volume.spec.quorum = Quorum::Any;
        assert_eq!(decide(&volume, "n1:- n2: n3", "v1@n1 v1@n2 v1@n3", &[]), "n2");
    }

    #[test]
    fn only_what_the_driver_alone_keeps_on_a_node_that_waits_may_be_left() {
        let attachment = |tickets: &[(&str, TicketType, &str)]| {
            let ticket = |(id, kind, node): &(&str, TicketType, &str)| {
                let node_id = (*node).to_owned();
                let id = (*id).to_owned();
                (id.clone(), AttachmentTicket { id, kind: *kind, node_id, ..AttachmentTicket::default() })
            };
            let attachment_tickets = tickets.iter().map(ticket).collect();
            let spec = VolumeAttachmentSpec { volume: "v1".into(), attachment_tickets };
            VolumeAttachment::new("v1", spec)
        };
        let (csi, api) = (TicketType::Csi, TicketType::Api);
        type Ticket = (&'static str, TicketType, &'static str);
        let cases: &[(&str, &str, &[Ticket], &[&str])] = &[
            ("the driver's alone", "n1:", &[("a", csi, "n1")], &["a"]),
            ("not cordoned", "n1", &[("a", csi, "n1")], &[]),
            ("released already", "n1:-", &[("a", csi, "n1")], &[]),
            ("a person's, too", "n1:", &[("a", csi, "n1"), ("ui", api, "n1")], &[]),
            ("a person's elsewhere", "n1:", &[("a", csi, "n1"), ("ui", api, "n2")], &["a"]),
            ("it migrates", "n1: n2", &[("a", csi, "n1"), ("b", csi, "n2")], &["a"]),
            ("no engine is there", "n1 n2:", &[("b", csi, "n2")], &[]),
        ];
        let spec = EngineSpec { volume_name: "v1".into(), node_id: "n1".into(), ..EngineSpec::default() };
        let engine = Engine::new("v1-e-0", spec);
        for (what, on, tickets, expected) in cases {
            let attachment = attachment(tickets);
            let found = held(&nodes(on), [&engine], [&attachment]);
            assert_eq!(found.iter().map(|h| h.ticket).collect::<Vec<_>>(), *expected, "{what}");
            assert!(found.iter().all(|h| h.node == "n1"), "{what}");
        }
    }

    #[test]
    fn a_replica_that_is_no_member_of_the_epoch_does_not_count() {
        let (nodes, replicas, cluster) = (nodes("n1: n2"), replicas("v1@n1 v1@n2"), cluster("n1: n2"));
        let with = |members: &[&str]| {
            let mut volume = Volume::new("v1", VolumeSpec::default());
            let members = members.iter().map(|m| (*m).to_owned()).collect();
            let epoch = Some(EpochRecord { members, ..EpochRecord::default() });
            volume.status = Some(VolumeStatus { epoch, ..VolumeStatus::default() });
            plan(&Observed {
                nodes: &nodes,
                volumes: &[&volume],
                engines: &[],
                replicas: &replicas.iter().collect::<Vec<_>>(),
                cluster: &cluster,
                policy: DrainPolicy::BlockLast,
            })
        };
        assert_eq!(released(&with(&["v1-r-n1"])), [""; 0]);
        assert_eq!(released(&with(&["v1-r-n1", "v1-r-n2"])), ["n1"]);
    }
}
