//! The managers of three nodes against an API server in memory, with agents that only fake the processes: from a volume
//! to a running engine with replicas, over faults, and back to nothing.

mod api_server;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api_server::ApiServer;
use control::authority::{RemoteAuthority, Reply};
use lh_block::{Epoch, Generation, Instance};
use lh_cluster::agent::{
    Agent, AgentError, DiskView, EngineReplica, EngineStart, EngineView, Part, ProcessView, ReplicaView,
};
use lh_cluster::api::{InstanceState, ReplicaMode, ReplicaSpec};
use lh_cluster::plan::instance_manager::RunBy;
use lh_cluster::run::{Options, run};
use serde_json::{Value, json};
use tokio::sync::{Notify, oneshot};
use tonic::async_trait;

/// All processes of all nodes.
#[derive(Default)]
struct Machine {
    engines: BTreeMap<String, Vec<FakeEngine>>,
    replicas: BTreeMap<(String, String), Generation>,
    directories: BTreeSet<(String, String)>,
    keys: BTreeSet<(String, String)>,
    generations: Vec<u64>,
}

struct FakeEngine {
    node: String,
    generation: Generation,
    size: u64,
    replicas: BTreeMap<String, String>,
    relay_from: String,
}

struct FakeAgent {
    node: String,
    server: ApiServer,
    machine: Arc<Mutex<Machine>>,
    bell: Arc<Notify>,
}

impl FakeAgent {
    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process of this node. Each engine's number is above those of all before it; a relay has none.
    fn run(&self, start: &EngineStart<'_>) {
        let mut machine = self.machine();
        if !start.spec.relays() {
            let highest = machine.generations.iter().max().copied().unwrap_or_default();
            assert!(
                u64::from(start.generation) > highest,
                "generation {} was used already",
                start.generation
            );
            machine.generations.push(start.generation.into());
        }
        let engine = FakeEngine {
            node: self.node.clone(),
            generation: start.generation,
            size: start.spec.volume_size.bytes(),
            replicas: start.spec.replica_address_map.clone(),
            relay_from: start.spec.relay_from.clone(),
        };
        for ((_, name), seen) in &mut machine.replicas {
            if start.spec.replica_address_map.contains_key(name) {
                *seen = (*seen).max(start.generation);
            }
        }
        machine.engines.entry(start.name.to_owned()).or_default().push(engine);
        self.bell.notify_one();
    }

    fn directories(&self, disk: &std::path::Path) -> Vec<String> {
        let machine = self.machine();
        machine
            .directories
            .iter()
            .filter(|(d, _)| disk.display().to_string() == *d)
            .map(|(_, n)| n.clone())
            .collect()
    }
}

#[async_trait]
impl Agent for FakeAgent {
    async fn processes(&self) -> Result<BTreeMap<String, ProcessView>, AgentError> {
        let machine = self.machine();
        let running = |relay_from: &str| {
            let relay_from = relay_from.to_owned();
            ProcessView { state: InstanceState::Running, relay_from, ..ProcessView::default() }
        };
        let engine = |(name, all): (&String, &Vec<FakeEngine>)| {
            let here = all.iter().find(|e| e.node == self.node)?;
            Some((name.clone(), running(&here.relay_from)))
        };
        let replicas = machine.replicas.keys().filter(|(node, _)| *node == self.node);
        let replicas = replicas.map(|(_, name)| (name.clone(), running("")));
        Ok(machine.engines.iter().filter_map(engine).chain(replicas).collect())
    }

    async fn changed(&self) {
        self.bell.notified().await;
    }

    async fn listen(&self) {
        std::future::pending().await
    }

    async fn start_replica(&self, name: &str, spec: &ReplicaSpec) -> Result<(), AgentError> {
        let mut machine = self.machine();
        assert!(machine.keys.contains(&(self.node.clone(), spec.volume_name.clone())), "no key for {name}");
        machine.replicas.entry((self.node.clone(), name.to_owned())).or_default();
        machine.directories.insert((spec.disk_path.clone(), spec.data_directory_name.clone()));
        self.bell.notify_one();
        Ok(())
    }

    async fn start_engine(&self, start: EngineStart<'_>) -> Result<(), AgentError> {
        // Whoever detaches or deletes the volume from now on knows that there is a process.
        let status = self.server.get("engines", start.name).map(|e| e["status"].clone()).unwrap_or_default();
        assert_eq!((&status["currentState"], &status["ownerID"]), (&json!("starting"), &json!(self.node)));
        self.run(&start);
        Ok(())
    }

    async fn exchange(&self, _: &str, _: Part<'_>) -> Result<(), AgentError> {
        Err(AgentError::Unbuilt("there are no programs here".to_owned()))
    }

    async fn take_over(&self, start: EngineStart<'_>) -> Result<(), AgentError> {
        for all in self.machine().engines.values_mut() {
            all.retain(|e| e.node != self.node || e.relay_from.is_empty());
        }
        self.run(&start);
        Ok(())
    }

    fn program(&self, image: &str) -> PathBuf {
        image.into()
    }

    async fn has_program(&self, _: &str) -> bool {
        true
    }

    async fn install_program(&self, _: &str) -> Result<(), AgentError> {
        Ok(())
    }

    async fn stop(&self, name: &str) -> Result<(), AgentError> {
        let mut machine = self.machine();
        if let Some(all) = machine.engines.get_mut(name) {
            all.retain(|e| e.node != self.node);
        }
        machine.replicas.remove(&(self.node.clone(), name.to_owned()));
        self.bell.notify_one();
        Ok(())
    }

    async fn engine(&self, name: &str) -> Option<EngineView> {
        let machine = self.machine();
        let engine = machine.engines.get(name)?.iter().find(|e| e.node == self.node)?;
        let runs = |replica: &str| machine.replicas.keys().any(|(_, name)| name == replica);
        let replica = |(name, address): (&String, &String)| EngineReplica {
            name: name.clone(),
            address: address.clone(),
            mode: if runs(name) { ReplicaMode::ReadWrite } else { ReplicaMode::Error },
            ..EngineReplica::default()
        };
        Some(EngineView {
            up: !engine.relay_from.is_empty() || engine.replicas.keys().any(|name| runs(name)),
            size: engine.size,
            endpoint: format!("/dev/longhorn/{}", name.trim_end_matches("-e-0")),
            generation: engine.generation,
            replicas: engine.replicas.iter().map(replica).collect(),
            relay_from: engine.relay_from.clone(),
            ..EngineView::default()
        })
    }

    async fn replica(&self, name: &str) -> Option<ReplicaView> {
        let seen = *self.machine().replicas.get(&(self.node.clone(), name.to_owned()))?;
        Some(ReplicaView { generation: seen, ..ReplicaView::default() })
    }

    fn replica_address(&self, name: &str, _: &ProcessView) -> String {
        format!("unix:/{}/{name}.sock", self.node)
    }

    fn relay_address(&self, name: &str, _: &ProcessView) -> String {
        format!("unix:/{}/{name}.relay.sock", self.node)
    }

    async fn add_replica(&self, engine: &str, name: &str, address: &str) -> Result<(), AgentError> {
        for engine in self.machine().engines.get_mut(engine).into_iter().flatten() {
            engine.replicas.insert(name.to_owned(), address.to_owned());
        }
        Ok(())
    }

    async fn remove_replica(&self, engine: &str, name: &str) -> Result<(), AgentError> {
        for engine in self.machine().engines.get_mut(engine).into_iter().flatten() {
            engine.replicas.remove(name);
        }
        Ok(())
    }

    async fn expand(&self, engine: &str, size: u64) -> Result<(), AgentError> {
        for engine in self.machine().engines.get_mut(engine).into_iter().flatten() {
            engine.size = size;
        }
        Ok(())
    }

    async fn take_snapshot(&self, _: &str, _: &str, _: &BTreeMap<String, String>) -> Result<(), AgentError> {
        Err(AgentError::Unbuilt("not in this fake".to_owned()))
    }

    async fn remove_snapshot(&self, _: &str, _: &str) -> Result<(), AgentError> {
        Err(AgentError::Unbuilt("not in this fake".to_owned()))
    }

    async fn inspect_disk(&self, path: PathBuf) -> Result<DiskView, String> {
        Ok(DiskView {
            uuid: format!("disk-of-{}", self.node),
            filesystem_id: path.display().to_string(),
            maximum: 1 << 40,
            available: 1 << 40,
            directories: self.directories(&path),
            ..DiskView::default()
        })
    }

    async fn remove_directory(&self, disk_path: PathBuf, directory: String) -> Result<(), AgentError> {
        self.machine().directories.remove(&(disk_path.display().to_string(), directory));
        Ok(())
    }

    async fn store_key(&self, volume: &str, key: &[u8]) -> Result<(), AgentError> {
        assert_eq!(key.len(), 32);
        self.machine().keys.insert((self.node.clone(), volume.to_owned()));
        Ok(())
    }
}

/// Managers that end with this.
struct Cluster {
    server: ApiServer,
    machine: Arc<Mutex<Machine>>,
    bells: BTreeMap<String, Arc<Notify>>,
    stops: BTreeMap<String, oneshot::Sender<()>>,
    scratch: tempfile::TempDir,
}

impl Cluster {
    async fn new(nodes: &[&str], seed: u64) -> Self {
        let server = ApiServer::new(seed);
        let mut cluster = Self {
            server,
            machine: Arc::default(),
            bells: BTreeMap::new(),
            stops: BTreeMap::new(),
            scratch: tempfile::tempdir().unwrap(),
        };
        for node in nodes {
            let labels = json!({ "topology.kubernetes.io/zone": format!("zone-{node}") });
            cluster.server.apply("core/nodes", node, &json!({ "metadata": { "labels": labels } }));
            cluster.start(node);
        }
        cluster
    }

    fn start(&mut self, node: &str) {
        let bell = self.bells.entry(node.to_owned()).or_default().clone();
        let (machine, server) = (Arc::clone(&self.machine), self.server.clone());
        let agent = FakeAgent { node: node.to_owned(), server, machine, bell };
        let options = Options {
            node: node.to_owned(),
            namespace: "longhorn-system".to_owned(),
            root: format!("/root-{node}").into(),
            instance_manager: RunBy::Others,
            image: "longhorn:test".to_owned(),
            authority: self.scratch.path().join(format!("{node}.sock")),
            webhook: None,
        };
        let (stop, stopped) = oneshot::channel();
        let client = self.server.client();
        tokio::spawn(async move {
            run(options, client, Arc::new(agent), async { drop(stopped.await) })
                .await
                .expect("the manager runs");
        });
        self.stops.insert(node.to_owned(), stop);
    }

    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        // Long enough for a loaded machine; the usual wait is a second.
        let deadline = Instant::now() + Duration::from_secs(60);
        while !done(self) {
            assert!(
                Instant::now() < deadline,
                "{what} did not happen: {:#?}\n{:#?}\n{:#?}",
                self.server.all("volumes"),
                self.server.all("engines"),
                self.server.all("replicas"),
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn volume(&self, field: &str) -> Value {
        self.server.get("volumes", "demo").map(|v| v["status"][field].clone()).unwrap_or_default()
    }

    fn create_volume(&self) {
        let spec = json!({ "size": "1073741824", "numberOfReplicas": 3 });
        self.server.apply(
            "volumes",
            "demo",
            &json!({
                "apiVersion": "longhorn.io/v1beta2", "kind": "Volume", "spec": spec,
            }),
        );
    }

    fn ticket(&self, node: Option<&str>) {
        let ticket = node.map(|n| json!({ "id": "csi", "type": "csi-attacher", "nodeID": n }));
        self.server.apply(
            "volumeattachments",
            "demo",
            &json!({ "spec": { "attachmentTickets": { "csi": ticket } } }),
        );
    }

    async fn attached_volume(&self) {
        self.wait("three nodes", |c| nodes_ready(c) >= 3).await;
        self.create_volume();
        self.wait("detached", |c| c.volume("state") == "detached" && c.server.all("replicas").len() == 3)
            .await;
        self.ticket(Some("n1"));
        self.wait("attached", |c| c.volume("state") == "attached" && c.volume("robustness") == "healthy")
            .await;
    }
}

fn nodes_ready(cluster: &Cluster) -> usize {
    let ready = |node: &Value| {
        let conditions = node["status"]["conditions"].as_array();
        let has_disk = node["status"]["diskStatus"].as_object().is_some_and(|d| !d.is_empty());
        has_disk
            && conditions.is_some_and(|all| all.iter().any(|c| c["type"] == "Ready" && c["status"] == "True"))
    };
    cluster.server.all("nodes").iter().filter(|n| ready(n)).count()
}

#[tokio::test]
async fn a_volume_from_its_creation_to_its_end() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 1).await;
    cluster.attached_volume().await;
    let engine = cluster.server.get("engines", "demo-e-0").unwrap();
    assert_eq!(engine["status"]["endpoint"], "/dev/longhorn/demo");
    let modes = engine["status"]["replicaModeMap"].as_object().unwrap();
    assert!(modes.len() == 3 && modes.values().all(|m| m == "RW"), "{modes:?}");
    let satisfied = |c: &Cluster| {
        let attachment = c.server.get("volumeattachments", "demo").unwrap();
        attachment["status"]["attachmentTicketStatuses"]["csi"]["satisfied"] == true
    };
    cluster.wait("the ticket is satisfied", satisfied).await;
    assert_eq!(cluster.volume("generation"), "4294967296");

    cluster.server.apply("volumes", "demo", &json!({ "spec": { "size": "2147483648" } }));
    cluster
        .wait("grown", |c| {
            c.server.get("engines", "demo-e-0").is_some_and(|e| e["status"]["currentSize"] == "2147483648")
        })
        .await;

    cluster.ticket(Some("n2"));
    cluster
        .wait("attached to n2", |c| c.volume("currentNodeID") == "n2" && c.volume("state") == "attached")
        .await;
    assert!(cluster.machine().engines["demo-e-0"].iter().all(|e| e.node == "n2"), "one engine, on n2");
    assert_eq!(cluster.volume("generation"), (2_u64 << 32).to_string());

    cluster.ticket(None);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    assert!(cluster.machine().replicas.is_empty());
    cluster.server.delete("volumes", "demo");
    cluster
        .wait("gone", |c| {
            ["volumes", "engines", "replicas", "volumeattachments", "core/secrets"]
                .iter()
                .all(|k| c.server.all(k).is_empty())
        })
        .await;
    assert!(cluster.machine().directories.is_empty(), "the data is gone, too");
}

#[tokio::test]
async fn a_node_that_is_emptied_gives_its_replica_to_another() {
    let cluster = Cluster::new(&["n1", "n2", "n3", "n4"], 4).await;
    cluster.wait("four nodes", |c| nodes_ready(c) == 4).await;
    cluster.attached_volume().await;
    let on = |c: &Cluster, node: &str| c.server.all("replicas").iter().any(|r| r["spec"]["nodeID"] == *node);
    let emptied = if on(&cluster, "n2") { "n2" } else { "n3" };
    cluster.server.apply(
        "nodes",
        emptied,
        &json!({ "spec": { "allowScheduling": false, "evictionRequested": true } }),
    );
    cluster
        .wait("the node is empty", |c| {
            !on(c, emptied) && c.server.all("replicas").len() == 3 && c.volume("robustness") == "healthy"
        })
        .await;
    assert!(
        !cluster.machine().directories.iter().any(|(disk, _)| disk.ends_with(emptied)),
        "its data is gone"
    );
}

#[tokio::test]
async fn a_cordoned_node_may_be_drained_once_nothing_is_lost_with_it() {
    let cluster = Cluster::new(&["n1", "n2", "n3", "n4"], 9).await;
    cluster.wait("four nodes", |c| nodes_ready(c) == 4).await;
    cluster.attached_volume().await;
    let protected = |c: &Cluster, node: &str| {
        c.server.get("poddisruptionbudgets", &format!("instance-manager-{node}")).is_some()
    };
    let cordon = |node: &str, on: bool| {
        cluster.server.apply("core/nodes", node, &json!({ "spec": { "unschedulable": on } }));
    };
    let all = |c: &Cluster| c.server.all("poddisruptionbudgets").len() == 4;
    cluster.wait("each node is protected", all).await;
    let on = |c: &Cluster, node: &str| c.server.all("replicas").iter().any(|r| r["spec"]["nodeID"] == *node);
    let with_replica = if on(&cluster, "n2") { "n2" } else { "n3" };
    cordon(with_replica, true);
    cluster.wait("others hold everything", |c| !protected(c, with_replica)).await;
    assert!(on(&cluster, with_replica), "its replica stays");
    cordon(with_replica, false);
    cluster.wait("it is used again", all).await;

    let eviction = json!({ "value": "block-for-eviction" });
    cluster.server.apply("settings", "node-drain-policy", &eviction);
    cordon(with_replica, true);
    cluster.wait("it is empty", |c| !protected(c, with_replica) && !on(c, with_replica)).await;
    cordon(with_replica, false);
    cordon("n1", true);
    cluster.wait("n1 has no replica", |c| !on(c, "n1")).await;
    assert!(protected(&cluster, "n1"), "the volume is attached there");
    cluster.ticket(None);
    cluster.wait("n1 may go", |c| !protected(c, "n1")).await;
}

#[tokio::test]
async fn what_nothing_knows_is_told_and_goes_with_its_orphan() {
    let cluster = Cluster::new(&["n1"], 5).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    let stray = ("/root-n1".to_owned(), "gone-0a1b2c3d".to_owned());
    cluster.machine().directories.insert(stray.clone());
    cluster.wait("told", |c| c.server.all("orphans").len() == 1).await;
    assert!(cluster.machine().directories.contains(&stray), "it is only told of");
    let name = cluster.server.all("orphans")[0]["metadata"]["name"].as_str().unwrap().to_owned();
    cluster.server.delete("orphans", &name);
    cluster.wait("gone", |c| c.server.all("orphans").is_empty()).await;
    assert!(!cluster.machine().directories.contains(&stray));
}

#[tokio::test]
async fn what_belongs_to_a_replica_of_another_node_is_no_orphan() {
    let cluster = Cluster::new(&["n1"], 7).await;
    cluster.wait("the node", |c| nodes_ready(c) == 1).await;
    for name in ["orphan-resource-auto-deletion", "orphan-resource-auto-deletion-grace-period"] {
        let value = if name.ends_with("period") { "0" } else { "replica-data;instance" };
        cluster.server.apply("settings", name, &json!({ "value": value }));
    }
    // A disk that came from node n2, with a replica of it, and one that nobody knows.
    let spec = json!({ "nodeID": "n2", "diskID": "disk-of-n1", "dataDirectoryName": "moved-0a1b2c3d" });
    cluster.server.apply("replicas", "moved-r-0a1b2c3d", &json!({ "spec": spec }));
    let (known, stray) = ("moved-0a1b2c3d", "gone-0a1b2c3d");
    for name in [known, stray] {
        cluster.machine().directories.insert(("/root-n1".to_owned(), name.to_owned()));
    }
    let there = |c: &Cluster, name: &str| c.machine().directories.iter().any(|(_, d)| d == name);
    cluster.wait("the stray one goes by itself", |c| !there(c, stray)).await;
    assert!(there(&cluster, known), "a replica's data");
    assert_eq!(
        cluster.server.all("orphans").iter().filter(|o| o["spec"]["parameters"]["DataName"] == known).count(),
        0
    );
}

#[tokio::test]
async fn a_process_that_its_engine_left_behind_is_ended() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 8).await;
    cluster.attached_volume().await;
    // While its manager is away the volume goes elsewhere.
    drop(cluster.stops.remove("n1"));
    let silent = |c: &Cluster| {
        let node = c.server.get("nodes", "n1").unwrap();
        node["status"]["conditions"].as_array().unwrap().iter().any(|c| c["reason"] == "ManagerPodDown")
    };
    cluster.wait("n1 is silent", silent).await;
    cluster.ticket(Some("n2"));
    cluster
        .wait("attached to n2", |c| c.volume("currentNodeID") == "n2" && c.volume("state") == "attached")
        .await;
    let on_n1 = |c: &Cluster| c.machine().engines["demo-e-0"].iter().any(|e| e.node == "n1");
    assert!(on_n1(&cluster), "nobody was there to end it");
    cluster.start("n1");
    cluster.wait("the old engine is ended", |c| !on_n1(c)).await;
}

/// Asks for the migratable volume on these nodes.
fn wanted_on(cluster: &Cluster, nodes: &[&str]) {
    let all = ["n1", "n2", "n3"];
    let ticket = |node: &&str| json!({ "id": format!("csi-{node}"), "type": "csi-attacher", "nodeID": node });
    let tickets: serde_json::Map<String, Value> = all
        .iter()
        .map(|node| (format!("csi-{node}"), if nodes.contains(node) { ticket(node) } else { Value::Null }))
        .collect();
    cluster.server.apply("volumeattachments", "demo", &json!({ "spec": { "attachmentTickets": tickets } }));
}

/// What runs, as `ENGINE@NODE`, with `~` for a relay.
fn running(cluster: &Cluster) -> Vec<String> {
    let machine = cluster.machine();
    let word = |name: &str, e: &FakeEngine| {
        format!("{name}{}{}", if e.relay_from.is_empty() { "@" } else { "~" }, e.node)
    };
    machine.engines.iter().flat_map(|(name, all)| all.iter().map(|e| word(name, e))).collect()
}

#[tokio::test]
async fn a_volume_moves_from_node_to_node_over_failing_requests_and_restarted_managers() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 11).await;
    cluster.wait("three nodes", |c| nodes_ready(c) == 3).await;
    cluster.create_volume();
    let migratable = json!({ "spec": { "migratable": true, "accessMode": "rwx" } });
    cluster.server.apply("volumes", "demo", &migratable);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    wanted_on(&cluster, &["n1"]);
    cluster.wait("on n1", |c| running(c) == ["demo-e-0@n1"] && c.volume("state") == "attached").await;
    cluster.server.fail(10);
    for (round, (from, to)) in [("n1", "n2"), ("n2", "n3"), ("n3", "n1")].into_iter().enumerate() {
        let (old, new) = if round % 2 == 0 { ("demo-e-0", "demo-e-1") } else { ("demo-e-1", "demo-e-0") };
        let both = |c: &Cluster| {
            let mut shown = [format!("{old}@{from}"), format!("{new}~{to}")];
            shown.sort();
            running(c) == shown && c.volume("currentMigrationNodeID") == *to
        };
        // Begun and given up, and begun again.
        wanted_on(&cluster, &[from, to]);
        cluster.wait(&format!("round {round}: shown on {to}"), both).await;
        wanted_on(&cluster, &[from]);
        cluster
            .wait("given up", |c| {
                running(c) == [format!("{old}@{from}")] && c.server.all("engines").len() == 1
            })
            .await;
        wanted_on(&cluster, &[from, to]);
        cluster.wait(&format!("round {round}: shown on {to} again"), both).await;
        let issued = cluster.machine().generations.len();
        // The manager that has to do it dies, or the one that has to stop the old one.
        let victim = if round == 1 { from } else { to };
        drop(cluster.stops.remove(victim));
        wanted_on(&cluster, &[to]);
        cluster.start(victim);
        let there = |c: &Cluster| {
            running(c) == [format!("{new}@{to}")]
                && c.volume("currentNodeID") == *to
                && c.volume("robustness") == "healthy"
        };
        cluster.wait(&format!("round {round}: moved to {to}"), there).await;
        assert!(cluster.machine().generations.len() > issued);
        cluster.wait("the old engine is forgotten", |c| c.server.all("engines").len() == 1).await;
    }
    cluster.server.fail(0);
    wanted_on(&cluster, &[]);
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    cluster.server.delete("volumes", "demo");
    cluster.wait("gone", |c| c.server.all("volumes").is_empty() && c.server.all("engines").is_empty()).await;
    assert!(running(&cluster).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_moves_from_a_node_that_is_silent_and_what_runs_there_ends_when_it_is_back() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 12).await;
    cluster.wait("three nodes", |c| nodes_ready(c) == 3).await;
    cluster.create_volume();
    cluster.server.apply("volumes", "demo", &json!({ "spec": { "migratable": true, "accessMode": "rwx" } }));
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    wanted_on(&cluster, &["n1", "n2"]);
    cluster
        .wait("shown on both", |c| {
            running(c) == ["demo-e-0@n1", "demo-e-1~n2"] && c.volume("currentMigrationNodeID") == "n2"
        })
        .await;
    let ask = |node: &str| RemoteAuthority::at(cluster.scratch.path().join(format!("{node}.sock")), "demo");
    let (source, target) = (ask("n1"), ask("n2"));
    let (first, late, new) = (epoch(1, 1), epoch(1, 2), epoch(2, 1));
    assert_eq!(source.store(None, &first), Reply::Stored);
    drop(cluster.stops.remove("n1"));
    wanted_on(&cluster, &["n2"]);
    cluster
        .wait("moved to n2", |c| c.volume("currentNodeID") == "n2" && c.volume("state") == "attached")
        .await;
    assert_eq!(running(&cluster), ["demo-e-0@n1", "demo-e-1@n2"], "nobody was there to end it");
    cluster.wait("its resource is gone", |c| c.server.all("engines").len() == 1).await;
    assert_eq!(target.store(Some(first.order()), &new), Reply::Stored);
    cluster.start("n1");
    cluster.wait("what ran there is ended", |c| running(c) == ["demo-e-1@n2"]).await;
    // Whatever the old engine wants stored, its node's manager finds the new one's.
    assert_eq!(source.store(Some(first.order()), &late), Reply::Conflict(Some(new)));
}

/// An epoch that an engine of that attachment would make.
fn epoch(attachment: u32, counter: u64) -> Epoch {
    let generation = Generation { attachment, restart: 0 };
    Epoch { generation, counter, members: vec!["demo-r-1".into()], id: Instance(u128::from(counter) + 1) }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_volume_resource_stores_one_epoch_in_place_of_exactly_one() {
    let cluster = Cluster::new(&["n1", "n2"], 6).await;
    cluster.wait("two nodes", |c| nodes_ready(c) == 2).await;
    cluster.create_volume();
    cluster.wait("detached", |c| c.volume("state") == "detached").await;
    let ask = |node: &str| RemoteAuthority::at(cluster.scratch.path().join(format!("{node}.sock")), "demo");
    let (one, two) = (ask("n1"), ask("n2"));
    let (first, old, new) = (epoch(1, 1), epoch(1, 2), epoch(2, 1));
    assert_eq!(one.load(), Reply::Counts(None));
    assert_eq!(one.store(None, &first), Reply::Stored);
    // The old engine's node and the new one's both replace the epoch that they know: one of them is told that it is late.
    assert_eq!(two.store(Some(first.order()), &new), Reply::Stored);
    assert_eq!(one.store(Some(first.order()), &old), Reply::Conflict(Some(new.clone())));
    assert_eq!(two.store(Some(first.order()), &new), Reply::Stored, "said again");
    assert_eq!(one.load(), Reply::Counts(Some(new)));
    // Many at once from both nodes: each number is stored once, in order.
    let before = cluster.server.writes();
    let racers = (0..8_u64).map(|i| {
        let authority = if i % 2 == 0 { one.clone() } else { two.clone() };
        tokio::task::spawn_blocking(move || {
            let next = Epoch { id: Instance(100 + u128::from(i)), ..epoch(3, 1) };
            matches!(authority.store(Some(epoch(2, 1).order()), &next), Reply::Stored)
        })
    });
    let mut won = 0;
    for racer in racers.collect::<Vec<_>>() {
        won += usize::from(racer.await.unwrap());
    }
    assert_eq!(won, 1);
    assert!(cluster.server.writes() > before);
    let unknown = RemoteAuthority::at(cluster.scratch.path().join("n1.sock"), "no-such-volume");
    assert!(matches!(unknown.load(), Reply::Unavailable(_)));
}

#[tokio::test]
async fn at_rest_nothing_is_written_but_leases() {
    let cluster = Cluster::new(&["n1", "n2", "n3"], 2).await;
    cluster.attached_volume().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let leases = |c: &Cluster| -> Vec<Value> { c.server.all("leases") };
    let (before, leases_before) = (cluster.server.writes(), leases(&cluster));
    tokio::time::sleep(Duration::from_secs(6)).await;
    let renewed: u64 =
        leases(&cluster).iter().zip(&leases_before).filter(|(a, b)| a != b).count().try_into().unwrap();
    // Each lease is renewed at most twice in that time.
    let written = cluster.server.writes() - before;
    assert!(written <= renewed * 2, "{written} writes, {renewed} leases renewed");
}

#[tokio::test]
async fn it_converges_over_failing_requests_lost_watches_and_restarted_managers() {
    let mut cluster = Cluster::new(&["n1", "n2", "n3"], 3).await;
    cluster.attached_volume().await;
    cluster.server.fail(15);
    for (round, node) in ["n2", "n3", "n1"].into_iter().enumerate() {
        // A manager dies and is started again; a replica's process dies meanwhile.
        drop(cluster.stops.remove(node));
        let victim = cluster.machine().replicas.keys().next().cloned().unwrap();
        cluster.machine().replicas.remove(&victim);
        cluster.start(node);
        cluster.bells[&victim.0].notify_one();
        cluster.ticket(Some(node));
        cluster
            .wait(&format!("round {round}: attached to {node}"), |c| {
                c.volume("currentNodeID") == *node
                    && c.volume("robustness") == "healthy"
                    && c.volume("state") == "attached"
            })
            .await;
        let engines = cluster.machine().engines["demo-e-0"].len();
        assert_eq!(engines, 1, "round {round}");
        assert_eq!(cluster.server.all("replicas").len(), 3, "round {round}");
    }
    cluster.ticket(None);
    cluster.server.delete("volumes", "demo");
    cluster.wait("gone", |c| c.server.all("volumes").is_empty() && c.server.all("replicas").is_empty()).await;
    assert!(cluster.machine().directories.is_empty());
}
