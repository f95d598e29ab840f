//! What happens in a run: what people ask for, and what goes wrong, by a seed. Everything that goes wrong is mended in the end,
//! but for what is lost for good.

use std::time::Duration;

use lh_cluster::api::Quorum;
use serde_json::json;

use crate::clock;
use crate::cluster::Cluster;
use crate::dice::Dice;
use crate::judge;
use crate::world::{Disk, Place, State};

/// Most that is wrong at a time.
const WRONG_AT_ONCE: usize = 3;

/// The volumes.
pub(crate) const VOLUMES: [&str; 3] = ["apple", "birch", "cedar"];

/// Something that is wrong, until it is mended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The manager of a node has ended.
    Manager(String),
    /// A node has no power.
    Power(String),
    /// A node does not reach the API server.
    CutOff(String),
    /// A node reaches no other node.
    Alone(String),
    /// An instance manager does not answer.
    Silent(String),
    /// A disk can be neither read nor written.
    Disk(String),
    /// Of a hundred requests so many fail.
    Requests(u64),
    /// Watches of this kind tell nothing.
    News(&'static str),
}

/// The course of a run.
pub(crate) struct Script {
    pub(crate) dice: Dice,
    /// What is wrong, and until when.
    wrong: Vec<(Fault, Duration)>,
    nodes: Vec<String>,
}

impl Script {
    pub(crate) fn new(seed: u64, nodes: &[&str]) -> Self {
        let nodes = nodes.iter().map(|n| (*n).to_owned()).collect();
        Self { dice: Dice::new(seed), wrong: Vec::new(), nodes }
    }

    fn node(&mut self) -> String {
        self.dice.pick(&self.nodes).cloned().unwrap_or_default()
    }

    /// Mends what has been wrong for long enough.
    pub(crate) fn mend(&mut self, cluster: &mut Cluster) {
        let now = clock::elapsed();
        let due = self.wrong.iter().filter(|(_, until)| *until <= now).map(|(f, _)| f.clone());
        let due: Vec<Fault> = due.collect();
        self.wrong.retain(|(_, until)| *until > now);
        due.iter().for_each(|fault| undo(fault, cluster));
    }

    /// Mends everything.
    pub(crate) fn mend_all(&mut self, cluster: &mut Cluster) {
        let all = std::mem::take(&mut self.wrong);
        all.iter().for_each(|(fault, _)| undo(fault, cluster));
        for node in &self.nodes {
            exchange_disk(cluster, node);
            let spec = json!({ "spec": { "evictionRequested": false, "allowScheduling": true } });
            if cluster.server.get("nodes", node).is_some() {
                cluster.server.apply("nodes", node, &spec);
                cluster.server.apply("core/nodes", node, &json!({ "spec": { "unschedulable": false } }));
            }
        }
    }

    /// Lets one thing happen.
    pub(crate) fn step(&mut self, cluster: &mut Cluster) {
        if self.dice.percent(45) {
            self.go_wrong(cluster);
        } else {
            self.ask(cluster);
        }
    }

    /// Something goes wrong.
    fn go_wrong(&mut self, cluster: &mut Cluster) {
        let used = cluster.used_nodes();
        let used = self.dice.pick(&used).filter(|node| self.nodes.contains(node)).cloned();
        let node = match used {
            Some(used) if self.dice.percent(50) => used,
            _ => self.node(),
        };
        // Who moves meets a fault at once, since it does not last long.
        if let Some(volume) = moving(cluster).filter(|_| self.dice.percent(25)) {
            let there = cluster.asked_for(volume);
            let node = self.dice.pick(&there).cloned().unwrap_or_default();
            return self.end_processes(cluster, &node);
        }
        let kind = *self
            .dice
            .pick(&["replicas", "engines", "volumes", "nodes", "volumeattachments", "snapshots"])
            .unwrap_or(&"replicas");
        let leader = cluster.leader().filter(|leader| self.nodes.contains(leader));
        let fault = match self.dice.below(18) {
            0 | 1 => Fault::Manager(node.clone()),
            2 | 3 => Fault::Manager(leader.unwrap_or_else(|| node.clone())),
            4 | 5 => Fault::Power(node.clone()),
            6 | 7 => Fault::CutOff(node.clone()),
            8 => Fault::CutOff(leader.unwrap_or_else(|| node.clone())),
            9 | 10 => Fault::Alone(node.clone()),
            11 => Fault::Silent(node.clone()),
            12 => Fault::Disk(node.clone()),
            13 => Fault::Requests(5 + self.dice.below(40)),
            14 | 15 => Fault::News(kind),
            16 => return self.end_processes(cluster, &node),
            _ => return self.lose(cluster, &node),
        };
        if self.wrong.len() >= WRONG_AT_ONCE || self.wrong.iter().any(|(f, _)| *f == fault) {
            return;
        }
        let lasts = match self.dice.below(3) {
            0 => Duration::from_secs(1 + self.dice.below(20)),
            1 => Duration::from_secs(20 + self.dice.below(100)),
            _ => Duration::from_secs(120 + self.dice.below(600)),
        };
        cluster.tell(&format!("{fault:?} for {lasts:?}"));
        begin(&fault, cluster);
        self.wrong.push((fault, clock::elapsed() + lasts));
        self.flee(cluster, &node);
    }

    /// What is used on a node that is in trouble is asked for on another one, as Kubernetes does.
    fn flee(&mut self, cluster: &mut Cluster, node: &str) {
        for volume in VOLUMES {
            let there = cluster.asked_for(volume);
            let other = self.node();
            if !there.iter().any(|n| n == node) || other == node || self.dice.percent(50) {
                continue;
            }
            let kept = there.iter().find(|n| *n != node).filter(|_| self.dice.percent(50));
            self.attach(cluster, volume, &[kept.unwrap_or(&other)]);
        }
    }

    /// The instance manager of a node ends with all its processes, and is there again at once.
    fn end_processes(&mut self, cluster: &mut Cluster, node: &str) {
        cluster.tell(&format!("the processes of {node} end"));
        {
            let mut state = cluster.world.state();
            state.end_processes(node);
            state.count("all processes of a node ended");
        }
        cluster.world.ring(node);
    }

    /// A disk, or a node with its disk, is lost for good; but no copy that nobody else has who counts: one that was let go of may hold
    /// as much for a while, and nobody knows.
    fn lose(&mut self, cluster: &mut Cluster, node: &str) {
        let path = State::disk_path(node);
        let members = cluster.member_directories();
        let may = {
            let mut state = cluster.world.state();
            judge::note_clones(&cluster.server, &mut state);
            let state = &*state;
            let here: Vec<&Place> = state.copies.keys().filter(|(disk, _)| *disk == path).collect();
            let is_good = state.hosts.get(node).is_some_and(|h| h.disk == Disk::Good && h.runs);
            // What most have is needed there; and where nobody has to agree, nobody says which copies count.
            let needs = |place: &&Place| {
                let copy = &state.copies[*place];
                let volume =
                    state.volumes.get(&copy.volume).filter(|v| v.birth == copy.birth && !v.is_deleted);
                volume.is_some_and(|v| v.quorum != Quorum::Any)
            };
            is_good
                && !here.iter().any(needs)
                && here.into_iter().all(|place| state.others_of(place, |other| members.contains(&other.1)))
        };
        if !may {
            return;
        }
        let for_good = self.nodes.len() > 3 && self.dice.percent(50);
        let mut state = cluster.world.state();
        state.copies.retain(|(disk, _), _| *disk != path);
        state.end_processes(node);
        let Some(host) = state.hosts.get_mut(node) else { return };
        host.disks += 1;
        if for_good {
            host.gone = true;
            state.lose_power(node);
            state.count("a node was lost for good");
        } else {
            state.count("a disk was replaced by an empty one");
        }
        drop(state);
        cluster.world.ring(node);
        if for_good {
            cluster.tell(&format!("{node} is lost for good"));
            cluster.kill_manager(node);
            self.nodes.retain(|n| n != node);
            self.wrong.retain(|(fault, _)| !fault.is_of(node));
            cluster.server.cut(node, false);
            // Its administrators say so.
            cluster.server.delete("core/nodes", node);
            cluster.server.delete("nodes", node);
        } else {
            cluster.tell(&format!("the disk of {node} is replaced by an empty one"));
            if self.dice.percent(50) {
                exchange_disk(cluster, node);
            }
        }
    }

    /// Somebody asks for something.
    fn ask(&mut self, cluster: &mut Cluster) {
        if let Some(volume) = moving(cluster).filter(|_| self.dice.percent(50)) {
            return self.decide(cluster, volume);
        }
        let volume = *self.dice.pick(&VOLUMES).unwrap_or(&VOLUMES[0]);
        let node = self.node();
        if cluster.server.get("volumes", volume).is_none() {
            let (replicas, stale) = (1 + self.dice.below(3), 1 + self.dice.below(20));
            let migrates = self.dice.percent(70);
            let kind = if migrates { ", migrates" } else { "" };
            let quorum = match self.dice.below(8) {
                0 | 1 => Quorum::Majority,
                2 => Quorum::Unsafe,
                _ => Quorum::Any,
            };
            let origin = self.source(cluster, volume);
            let of =
                origin.as_ref().map(|o| format!(", of {} {:?}", o.volume, o.snapshot)).unwrap_or_default();
            cluster.tell(&format!(
                "{volume} is made with {replicas} replicas, which are stale after {stale} min{kind}{of}, quorum {quorum}"
            ));
            return cluster.create_volume(volume, replicas, stale, migrates, quorum, origin);
        }
        match self.dice.below(26) {
            20..=25 => self.ask_for_snapshots(cluster, volume),
            0..=6 => self.move_to(cluster, volume, &node),
            7 => self.attach(cluster, volume, &[]),
            8 | 9 => {
                let replicas = 1 + self.dice.below(3);
                cluster.tell(&format!("{volume} is to have {replicas} replicas"));
                cluster.server.apply("volumes", volume, &json!({ "spec": { "numberOfReplicas": replicas } }));
            }
            10..=12 => {
                let replicas = cluster.replicas(volume);
                let Some(replica) = self.dice.pick(&replicas) else { return };
                let (name, spec) =
                    (replica["metadata"]["name"].as_str().unwrap_or_default(), &replica["spec"]);
                let text = |field: &str| spec[field].as_str().unwrap_or_default().to_owned();
                let place = (text("diskPath"), text("dataDirectoryName"));
                let may = {
                    let mut state = cluster.world.state();
                    judge::note_clones(&cluster.server, &mut state);
                    state.others_hold(&place)
                };
                // The webhook refuses to let the last one go; a garbage collector asks none.
                if !may && !self.dice.percent(20) {
                    return;
                }
                cluster.tell(&format!("replica {name} is deleted"));
                cluster.world.state().count("somebody deleted a replica");
                cluster.server.delete("replicas", name);
            }
            13 if self.dice.percent(50) => {
                cluster.tell(&format!("{volume} is deleted"));
                cluster.world.state().count("a volume was deleted");
                cluster.delete_volume(volume);
            }
            14 | 15 => self.toggle(cluster, "nodes", &node, "evictionRequested", "allowScheduling"),
            16 => self.toggle(cluster, "core/nodes", &node, "unschedulable", ""),
            17 => {
                let near = if self.dice.percent(50) { "best-effort" } else { "disabled" };
                cluster.tell(&format!("{volume} is to be near: {near}"));
                cluster.server.apply("volumes", volume, &json!({ "spec": { "dataLocality": near } }));
            }
            18 => {
                let wait = self.dice.below(600).to_string();
                cluster.tell(&format!("failed replicas are waited for {wait} s"));
                let name = "replica-replenishment-wait-interval";
                cluster.server.apply("settings", name, &json!({ "value": wait }));
            }
            _ => {
                let how =
                    *self.dice.pick(&["disabled", "least-effort", "best-effort"]).unwrap_or(&"disabled");
                cluster.tell(&format!("replicas are spread: {how}"));
                cluster.server.apply("settings", "replica-auto-balance", &json!({ "value": how }));
            }
        }
    }

    fn attach(&mut self, cluster: &mut Cluster, volume: &str, nodes: &[&str]) {
        cluster.tell(&format!("{volume} is asked for on {nodes:?}"));
        cluster.ask_for(volume, nodes);
    }

    /// A volume is wanted there: besides, if it migrates and is used.
    fn move_to(&mut self, cluster: &mut Cluster, volume: &str, node: &str) {
        let there = cluster.asked_for(volume);
        let migrates = cluster.server.get("volumes", volume).is_some_and(|v| v["spec"]["migratable"] == true);
        match there.as_slice() {
            [one] if migrates && self.nodes.contains(one) && self.dice.percent(80) => {
                self.attach(cluster, volume, &[one, node])
            }
            _ => self.attach(cluster, volume, &[node]),
        }
    }

    /// One of those who use a volume that migrates lets go.
    fn decide(&mut self, cluster: &mut Cluster, volume: &str) {
        let there = cluster.asked_for(volume);
        let object = cluster.server.get("volumes", volume).unwrap_or_default();
        let (first, second) = (&object["spec"]["nodeID"], &object["status"]["currentMigrationNodeID"]);
        let is_first = |node: &&String| **node == *first;
        let is_shown = there.iter().any(|node| *node == *second);
        let is_confirmed = self.dice.percent(if is_shown { 65 } else { 15 });
        // Most wait until the second node shows it.
        if !is_shown && !is_confirmed && self.dice.percent(70) {
            return;
        }
        let stays = there.iter().find(|node| is_first(node) != is_confirmed);
        let Some(stays) = stays.or(there.first()) else { return };
        cluster.world.state().count(match (is_first(&stays), is_shown) {
            (false, true) => "a migration was confirmed",
            (false, false) => "a migration was confirmed too early",
            (true, _) => "a migration was given up",
        });
        self.attach(cluster, volume, &[stays]);
    }

    fn toggle(&mut self, cluster: &mut Cluster, kind: &str, node: &str, field: &str, against: &str) {
        let Some(object) = cluster.server.get(kind, node) else { return };
        let is_set = object["spec"][field] == true;
        cluster.tell(&format!("{node}: {field} {}", !is_set));
        let mut spec = json!({ field: !is_set });
        if !against.is_empty() {
            spec[against] = json!(is_set);
        }
        cluster.server.apply(kind, node, &json!({ "spec": spec }));
    }

    /// In the end most volumes are used, some of them in two places.
    pub(crate) fn settle(&mut self, cluster: &mut Cluster) {
        for volume in VOLUMES {
            let there = cluster.server.get("volumes", volume);
            let goes = there.as_ref().is_some_and(|v| !v["metadata"]["deletionTimestamp"].is_null());
            if there.is_none() || goes {
                continue;
            }
            let node = self.node();
            match self.dice.below(10) {
                0..=3 => self.move_to(cluster, volume, &node),
                4..=6 => self.attach(cluster, volume, &[&node]),
                _ => self.attach(cluster, volume, &[]),
            }
        }
    }
}

/// A volume that two nodes use.
fn moving(cluster: &Cluster) -> Option<&'static str> {
    VOLUMES.into_iter().find(|volume| cluster.asked_for(volume).len() > 1)
}

impl Fault {
    fn is_of(&self, node: &str) -> bool {
        match self {
            Self::Manager(n)
            | Self::Power(n)
            | Self::CutOff(n)
            | Self::Alone(n)
            | Self::Silent(n)
            | Self::Disk(n) => n == node,
            Self::Requests(_) | Self::News(_) => false,
        }
    }
}

fn begin(fault: &Fault, cluster: &mut Cluster) {
    let what = match fault {
        Fault::Manager(node) => {
            cluster.kill_manager(node);
            "a manager ended"
        }
        Fault::Power(node) => {
            cluster.kill_manager(node);
            cluster.world.state().lose_power(node);
            "a node lost its power"
        }
        Fault::CutOff(node) => {
            cluster.server.cut(node, true);
            "a node was cut off from the API server"
        }
        Fault::Alone(node) => {
            with_host(cluster, node, |host| host.alone = true);
            "a node was cut off from the others"
        }
        Fault::Silent(node) => {
            with_host(cluster, node, |host| host.answers = false);
            "an instance manager did not answer"
        }
        Fault::Disk(node) => {
            with_host(cluster, node, |host| host.disk = Disk::Broken);
            "a disk could not be used"
        }
        Fault::Requests(percent) => {
            cluster.server.fail(*percent);
            "requests failed"
        }
        Fault::News(kind) => {
            cluster.server.hold_news(Some(kind));
            "watches told nothing"
        }
    };
    cluster.world.state().count(what);
}

fn undo(fault: &Fault, cluster: &mut Cluster) {
    cluster.tell(&format!("{fault:?} is over"));
    match fault {
        Fault::Manager(node) => cluster.start_manager(node),
        Fault::Power(node) => {
            with_host(cluster, node, |host| host.runs = true);
            cluster.start_manager(node);
        }
        Fault::CutOff(node) => cluster.server.cut(node, false),
        Fault::Alone(node) => with_host(cluster, node, |host| host.alone = false),
        Fault::Silent(node) => with_host(cluster, node, |host| host.answers = true),
        Fault::Disk(node) => with_host(cluster, node, |host| host.disk = Disk::Good),
        Fault::Requests(_) => cluster.server.fail(0),
        Fault::News(_) => cluster.server.hold_news(None),
    }
}

/// Says that another disk is at a node's path, as people do once they have replaced one.
fn exchange_disk(cluster: &mut Cluster, node: &str) {
    let number = cluster.world.state().hosts.get(node).map_or(1, |host| host.disks);
    let Some(object) = cluster.server.get("nodes", node) else { return };
    let name = format!("disk-{number}");
    let Some(disks) = object["spec"]["disks"].as_object() else { return };
    if number == 1 || disks.contains_key(&name) {
        return;
    }
    cluster.tell(&format!("{name} is the disk of {node}"));
    let mut patch: serde_json::Map<_, _> = disks.keys().map(|old| (old.clone(), json!(null))).collect();
    let path = State::disk_path(node);
    patch.insert(name, json!({ "path": path, "allowScheduling": true, "diskType": "filesystem" }));
    cluster.server.apply("nodes", node, &json!({ "spec": { "disks": patch } }));
}

fn with_host(cluster: &Cluster, node: &str, change: impl FnOnce(&mut crate::world::Host)) {
    if let Some(host) = cluster.world.state().hosts.get_mut(node) {
        change(host);
    }
    cluster.world.ring(node);
}
