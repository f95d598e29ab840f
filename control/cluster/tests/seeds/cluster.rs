//! The managers of a few nodes, and what people ask of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use lh_cluster::api::Quorum;
use lh_cluster::plan::instance_manager::RunBy;
use lh_cluster::run::{Clock, Options, run};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::agent::SimulatedNode;
use crate::api_server::ApiServer;
use crate::clock;
use crate::world::{Origin, Volume, World};

/// How long a request, an answer or news takes at most.
const SLOW_MS: u64 = 40;

/// What is counted when somebody takes a deleted replica back.
pub(crate) const TOOK_BACK: &str = "somebody took a deleted replica back";

/// Names of the tickets of people, of which a volume that migrates has two.
const TICKETS: [&str; 2] = ["csi-1", "csi-2"];

pub(crate) struct Cluster {
    pub(crate) server: ApiServer,
    pub(crate) world: Arc<World>,
    managers: BTreeMap<String, JoinHandle<()>>,
    /// What happened, for people.
    pub(crate) story: Vec<String>,
}

impl Cluster {
    pub(crate) fn new(nodes: &[&str], seed: u64, world: Arc<World>) -> Self {
        let server = ApiServer::new(seed);
        server.tell_time(clock::written);
        server.slow(SLOW_MS);
        let mut cluster = Self { server, world, managers: BTreeMap::new(), story: Vec::new() };
        for node in nodes {
            let labels = json!({ "topology.kubernetes.io/zone": format!("zone-{node}") });
            cluster.server.apply("core/nodes", node, &json!({ "metadata": { "labels": labels } }));
            cluster.start_manager(node);
        }
        cluster
    }

    pub(crate) fn tell(&mut self, what: &str) {
        self.story.push(format!("{:>7.1} s: {what}", clock::elapsed().as_secs_f64()));
    }

    pub(crate) fn start_manager(&mut self, node: &str) {
        if self.managers.contains_key(node) {
            return;
        }
        let options = Options {
            node: node.to_owned(),
            namespace: "longhorn-system".to_owned(),
            root: format!("/root-{node}").into(),
            image: "longhorn:test".to_owned(),
            instance_manager: RunBy::Others,
            authority: self.world.socket(node),
            webhook: None,
            settings: Arc::default(),
            clock: Clock::new(clock::now),
        };
        let (world, server) = (Arc::clone(&self.world), self.server.clone());
        let agent = Arc::new(SimulatedNode { node: node.to_owned(), world, server });
        let client = self.server.client_of(node);
        let manager = tokio::spawn(async move {
            if let Err(e) = run(options, client, agent, std::future::pending()).await {
                tracing::warn!(error = %e, "a manager ended");
            }
        });
        self.managers.insert(node.to_owned(), manager);
    }

    /// A manager ends wherever it is.
    pub(crate) fn kill_manager(&mut self, node: &str) {
        if let Some(manager) = self.managers.remove(node) {
            manager.abort();
        }
    }

    /// Starts the managers anew that have ended by themselves: they could not reach the API server when they began.
    pub(crate) fn restart_ended(&mut self) {
        let ended = self.managers.iter().filter(|(_, manager)| manager.is_finished());
        let ended: Vec<String> = ended.map(|(node, _)| node.clone()).collect();
        for node in ended {
            self.managers.remove(&node);
            self.start_manager(&node);
        }
    }

    /// The node whose manager leads, if one does.
    pub(crate) fn leader(&self) -> Option<String> {
        let lease = self.server.get("leases", "longhorn-manager-leader")?;
        Some(lease["spec"]["holderIdentity"].as_str()?.to_owned())
    }

    pub(crate) fn create_volume(
        &mut self,
        name: &str,
        replicas: u64,
        stale_minutes: u64,
        migrates: bool,
        quorum: Quorum,
        origin: Option<Origin>,
    ) {
        let source = origin.as_ref().map(|o| match &o.snapshot {
            Some(snapshot) => format!("snap://{}/{snapshot}", o.volume),
            None => format!("vol://{}", o.volume),
        });
        let spec = json!({
            "quorum": quorum.to_string(), "dataSource": source.unwrap_or_default(),
            "size": "1073741824", "numberOfReplicas": replicas, "staleReplicaTimeout": stale_minutes,
            "migratable": migrates, "accessMode": if migrates { "rwx" } else { "rwo" },
        });
        self.server.apply(
            "volumes",
            name,
            &json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Volume", "spec": spec }),
        );
        let mut state = self.world.state();
        let birth = state.number();
        state.volumes.insert(name.to_owned(), Volume { birth, quorum, origin, ..Volume::default() });
    }

    pub(crate) fn delete_volume(&mut self, name: &str) {
        if let Some(volume) = self.world.state().volumes.get_mut(name) {
            volume.is_deleted = true;
        }
        self.server.delete("volumes", name);
    }

    /// Asks for a volume on these nodes and no others, of which there are two at most. A ticket keeps its name.
    pub(crate) fn ask_for(&mut self, volume: &str, nodes: &[&str]) {
        if self.server.get("volumeattachments", volume).is_none() {
            return;
        }
        let mut tickets = self.tickets(volume);
        tickets.retain(|_, node| nodes.contains(&node.as_str()));
        for node in nodes {
            let free = TICKETS.iter().find(|id| !tickets.contains_key(**id));
            if let Some(id) = free.filter(|_| !tickets.values().any(|there| there == node)) {
                tickets.insert((*id).to_owned(), (*node).to_owned());
            }
        }
        let ticket = |id: &&str| {
            let node = tickets.get(*id);
            let ticket = node.map(|n| json!({ "id": id, "type": "csi-attacher", "nodeID": n }));
            ((*id).to_owned(), ticket.unwrap_or_default())
        };
        let all: serde_json::Map<_, _> = TICKETS.iter().map(ticket).collect();
        self.server.apply("volumeattachments", volume, &json!({ "spec": { "attachmentTickets": all } }));
    }

    /// Who asks for a volume, and where.
    fn tickets(&self, volume: &str) -> BTreeMap<String, String> {
        let attachment = self.server.get("volumeattachments", volume).unwrap_or_default();
        let node = |id: &&str| {
            let ticket = &attachment["spec"]["attachmentTickets"][*id];
            Some(((*id).to_owned(), ticket["nodeID"].as_str()?.to_owned()))
        };
        TICKETS.iter().filter_map(node).collect()
    }

    /// Where people have asked for a volume.
    pub(crate) fn asked_for(&self, volume: &str) -> Vec<String> {
        self.tickets(volume).into_values().collect()
    }

    /// The nodes on which engines run.
    pub(crate) fn used_nodes(&self) -> Vec<String> {
        self.world.state().engines.keys().map(|(node, _)| node.clone()).collect()
    }

    /// Directories of replicas that are members of their volume's epoch, as the authority has it, and stay.
    pub(crate) fn member_directories(&self) -> Vec<String> {
        let is_member = |r: &Value| {
            let volume = self.server.get("volumes", r["spec"]["volumeName"].as_str()?)?;
            let members = volume["status"]["epoch"]["members"].as_array()?.clone();
            Some(members.contains(&r["metadata"]["name"]) && r["metadata"]["deletionTimestamp"].is_null())
        };
        let all = self.server.all("replicas");
        let members = all.iter().filter(|r| is_member(r).unwrap_or(false));
        members.filter_map(|r| Some(r["spec"]["dataDirectoryName"].as_str()?.to_owned())).collect()
    }

    /// Takes back what somebody deleted though its volume has nothing else, as the event about it says: the finalizer is taken off,
    /// and the same Replica made anew. True if there was one.
    pub(crate) fn take_back(&mut self) -> bool {
        let stays = |volume: &Value| {
            let name = volume.as_str().unwrap_or_default();
            self.server.get("volumes", name).is_some_and(|v| v["metadata"]["deletionTimestamp"].is_null())
        };
        let is_kept =
            |r: &&Value| !r["metadata"]["deletionTimestamp"].is_null() && stays(&r["spec"]["volumeName"]);
        let all = self.server.all("replicas");
        let Some(replica) = all.iter().find(is_kept) else { return false };
        let name = replica["metadata"]["name"].as_str().unwrap_or_default();
        self.server.let_go("replicas", name);
        let metadata = json!({ "labels": replica["metadata"]["labels"], "ownerReferences": replica["metadata"]["ownerReferences"] });
        let kinds = json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Replica" });
        self.server.apply("replicas", name, &kinds);
        self.server.apply("replicas", name, &json!({ "metadata": metadata, "spec": replica["spec"] }));
        self.tell(&format!("replica {name} is taken back"));
        self.world.state().count(TOOK_BACK);
        true
    }

    /// The replicas of a volume.
    pub(crate) fn replicas(&self, volume: &str) -> Vec<Value> {
        let all = self.server.all("replicas");
        all.into_iter().filter(|r| r["spec"]["volumeName"] == volume).collect()
    }
}
