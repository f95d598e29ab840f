//! A Volume resource becomes an engine and replicas on this machine: the controllers over an API server in memory, the
//! real agent, a real instance manager and the real programs. Needs root and `LONGHORN_PROGRAM`, the path of `longhorn`.

mod api_server;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api_server::ApiServer;
use control::host::Root;
use lh_cluster::agent::{Agent, LocalAgent, Reach};
use lh_cluster::plan::instance_manager::RunBy;
use lh_cluster::run::{Clock, Options, authority_socket, run};
use serde_json::{Value, json};
use tokio::sync::oneshot;

/// An instance manager that ends with this; its processes were ended before.
struct InstanceManager(Child);

impl Drop for InstanceManager {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Machine {
    server: ApiServer,
    root: Root,
    agent: Arc<LocalAgent>,
    _manager: InstanceManager,
    _stop: oneshot::Sender<()>,
    _scratch: tempfile::TempDir,
}

impl Machine {
    async fn start(program: &Path) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let root = Root::at(scratch.path()).unwrap();
        root.create().unwrap();
        let child = Command::new(program)
            .args(["instance-manager", "--root"])
            .arg(root.path())
            .stdin(Stdio::null())
            .spawn()
            .expect("the instance manager starts");
        let manager = InstanceManager(child);
        let authority = authority_socket(root.path()).unwrap();
        let agent = Arc::new(LocalAgent::new(
            root.clone(),
            authority.clone(),
            Reach::ThisMachine,
            program.to_owned(),
        ));
        let server = ApiServer::new(1);
        server.apply("core/nodes", "n1", &json!({}));
        // Both replicas are on the one node that there is, on a disk that may be nearly full.
        for (name, value) in [
            ("replica-soft-anti-affinity", "true"),
            ("storage-minimal-available-percentage", "0"),
            ("storage-reserved-percentage-for-default-disk", "0"),
        ] {
            let setting = json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Setting", "value": value });
            server.apply("settings", name, &setting);
        }
        let options = Options {
            node: "n1".to_owned(),
            namespace: "longhorn-system".to_owned(),
            root: root.path().to_owned(),
            instance_manager: RunBy::Others,
            image: "longhorn:test".to_owned(),
            authority,
            webhook: None,
            settings: Arc::default(),
            clock: Clock::default(),
        };
        let (stop, stopped) = oneshot::channel();
        let (client, shared) = (server.client(), Arc::clone(&agent));
        tokio::spawn(async move {
            run(options, client, shared, async { drop(stopped.await) }).await.expect("the manager runs");
        });
        Self { server, root, agent, _manager: manager, _stop: stop, _scratch: scratch }
    }

    fn field(&self, kind: &str, name: &str, path: &str) -> Value {
        self.server.get(kind, name).and_then(|o| o.pointer(path).cloned()).unwrap_or_default()
    }

    async fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !done(self) {
            if Instant::now() > deadline {
                for entry in std::fs::read_dir(self.root.logs()).into_iter().flatten().flatten() {
                    let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
                    eprintln!("== {}\n{text}", entry.path().display());
                }
                panic!(
                    "{what} did not happen: {:#?}\n{:#?}",
                    self.server.all("volumes"),
                    self.server.all("engines")
                );
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn ticket(&self, node: Option<&str>) {
        let ticket = node.map(|n| json!({ "id": "t", "type": "csi-attacher", "nodeID": n }));
        self.server.apply(
            "volumeattachments",
            "demo",
            &json!({ "spec": { "attachmentTickets": { "t": ticket } } }),
        );
    }
}

/// The generation in a field.
fn number(value: &Value) -> u64 {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or_default()
}

#[tokio::test]
async fn a_volume_resource_becomes_an_engine_with_replicas() {
    let Some(program) = std::env::var_os("LONGHORN_PROGRAM").map(PathBuf::from) else {
        println!("SKIP on_this_machine: LONGHORN_PROGRAM does not name the program longhorn");
        return;
    };
    let machine = Machine::start(&program).await;
    machine
        .wait("the node is ready", |m| {
            m.field("nodes", "n1", "/status/conditions/0/status") == "True"
                && m.field("nodes", "n1", "/status/diskStatus").as_object().is_some_and(|d| !d.is_empty())
        })
        .await;
    let spec = json!({ "size": "67108864", "numberOfReplicas": 2, "frontend": "nbd-server" });
    machine.server.apply(
        "volumes",
        "demo",
        &json!({
            "apiVersion": "longhorn.io/v1beta2", "kind": "Volume", "spec": spec,
        }),
    );
    machine.wait("detached", |m| m.field("volumes", "demo", "/status/state") == "detached").await;
    machine.ticket(Some("n1"));
    machine
        .wait("attached and healthy", |m| {
            m.field("volumes", "demo", "/status/state") == "attached"
                && m.field("volumes", "demo", "/status/robustness") == "healthy"
        })
        .await;
    let endpoint = machine.field("engines", "demo-e-0", "/status/endpoint");
    assert!(endpoint.as_str().is_some_and(|e| e.starts_with("nbd+unix://")), "{endpoint}");
    // The engine stored its epoch in the Volume, through the manager.
    let epoch = machine.field("volumes", "demo", "/status/epoch");
    assert_eq!(epoch["members"].as_array().map(Vec::len), Some(2), "{epoch}");
    let generation = number(&machine.field("volumes", "demo", "/status/generation"));
    assert_eq!(number(&epoch["generation"]), generation);
    assert_eq!(generation >> 32, 1);

    let snapshot = json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Snapshot",
        "spec": { "volume": "demo", "createSnapshot": true, "labels": { "why": "test" } } });
    machine.server.apply("snapshots", "first", &snapshot);
    machine
        .wait("the snapshot is there", |m| m.field("snapshots", "first", "/status/readyToUse") == true)
        .await;
    assert_eq!(machine.field("snapshots", "first", "/status/labels/why"), "test");

    // The engine itself says which limits it has, and keeps them over its end.
    let limited = json!({ "spec": { "snapshotMaxCount": 7, "snapshotMaxSize": "4294967296" } });
    machine.server.apply("volumes", "demo", &limited);
    let is_limited = |m: &Machine| {
        let told = |field| m.field("engines", "demo-e-0", &format!("/status/{field}"));
        told("snapshotMaxCount") == 7 && told("snapshotMaxSize") == "4294967296"
    };
    machine.wait("limited while it is up", is_limited).await;

    machine.ticket(None);
    machine.wait("detached again", |m| m.field("volumes", "demo", "/status/state") == "detached").await;
    assert!(machine.agent.processes().await.unwrap().is_empty());
    machine.ticket(Some("n1"));
    machine.wait("attached again", |m| m.field("volumes", "demo", "/status/state") == "attached").await;
    assert!(is_limited(&machine), "from its start");
    assert_eq!(number(&machine.field("volumes", "demo", "/status/generation")) >> 32, 2);

    machine.ticket(None);
    machine.server.delete("volumes", "demo");
    machine
        .wait("gone", |m| {
            ["volumes", "engines", "replicas", "snapshots", "core/secrets"]
                .iter()
                .all(|k| m.server.all(k).is_empty())
        })
        .await;
    let left: Vec<_> = std::fs::read_dir(machine.root.replicas()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(machine.agent.processes().await.unwrap().is_empty());
}
