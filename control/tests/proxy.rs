//! The instance manager's services over real sockets: the proxy in front of a stand-in for an engine, and
//! instances that are processes.

mod reach;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use control::chain::Layer;
use control::cloning::{CloneProgress, CloneSource};
use control::engine::{
    Answer, EngineControl, EngineError, EngineReplica, EngineStatus, Operation, PurgeProgress, ScrubProgress,
    SnapshotRequest,
};
use control::host::Root;
use control::manager::{self, Options};
use control::proto::health::health_check_response::ServingStatus;
use control::proto::health::health_client::HealthClient;
use control::proto::health::{HealthCheckRequest, HealthCheckResponse};
use control::proto::imrpc::instance_service_client::InstanceServiceClient;
use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::proto::imrpc::proxy_engine_service_client::ProxyEngineServiceClient;
use control::proto::{imrpc, ptypes};
use tonic::Code;
use tonic::transport::Channel;

use reach::reach;

/// Remembers what it was asked.
#[derive(Default)]
struct Engine {
    asked: Mutex<Vec<Operation>>,
    cloned: Mutex<Vec<CloneSource>>,
    purging: bool,
    /// Looks at a replica that was added.
    looks: AtomicU32,
}

impl EngineControl for Engine {
    fn status(&self) -> EngineStatus {
        let replica = |name: &str, mode| EngineReplica {
            name: name.into(),
            address: format!("unix:/r/{name}.sock"),
            mode,
            reason: String::new(),
            rebuild: (mode == ptypes::ReplicaMode::Wo).then_some((30, 100)),
        };
        let added = self.asked.lock().unwrap().iter().find_map(|operation| match operation {
            Operation::AddReplica { name, address } => Some((name.clone(), address.clone())),
            _ => None,
        });
        let added = added.map(|(name, address)| {
            let is_in_sync = self.looks.fetch_add(1, Ordering::SeqCst) >= 3;
            let mode = if is_in_sync { ptypes::ReplicaMode::Rw } else { ptypes::ReplicaMode::Wo };
            EngineReplica { address, ..replica(&name, mode) }
        });
        let members =
            [replica("demo-r-1", ptypes::ReplicaMode::Rw), replica("demo-r-2", ptypes::ReplicaMode::Wo)];
        EngineStatus {
            volume: "demo".into(),
            size: 1 << 30,
            replicas: members.into_iter().chain(added).collect(),
            ..Default::default()
        }
    }

    fn snapshot(&self, _: SnapshotRequest) -> Answer<()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn operate(&self, operation: Operation) -> Answer<()> {
        let refused = operation == Operation::RemoveSnapshot { name: "gone".into() };
        self.asked.lock().unwrap().push(operation);
        Box::pin(std::future::ready(if refused {
            Err(EngineError::Invalid("there is no snapshot gone".into()))
        } else {
            Ok(())
        }))
    }

    fn chain(&self) -> Answer<Vec<Layer>> {
        Box::pin(std::future::ready(Ok(one_snapshot())))
    }

    fn purges(&self) -> Vec<PurgeProgress> {
        let snapshot = if self.purging { "s1".into() } else { String::new() };
        vec![PurgeProgress {
            replica: "demo-r-1".into(),
            running: self.purging,
            snapshot,
            done: 1,
            total: 2,
            ..PurgeProgress::default()
        }]
    }

    fn scrub(&self) -> Option<ScrubProgress> {
        None
    }

    fn fill_from(&self, source: CloneSource) -> Answer<()> {
        self.cloned.lock().unwrap().push(source);
        Box::pin(std::future::ready(Ok(())))
    }

    fn cloning(&self) -> Option<CloneProgress> {
        Some(CloneProgress { running: true, done: 1, total: 2, snapshot: "s1".into(), ..Default::default() })
    }

    fn shutdown(&self) -> Answer<()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn activity(&self) -> ptypes::Activity {
        let writes = ptypes::Requests { rate: 7, ..Default::default() };
        ptypes::Activity { writes: Some(writes), ..Default::default() }
    }
}

/// A snapshot below the head.
fn one_snapshot() -> Vec<Layer> {
    let layer = |name: &str, parent: &str| Layer {
        name: name.into(),
        parent: parent.into(),
        allocated: 4096,
        ..Default::default()
    };
    vec![layer("one", ""), layer("", "one")]
}

/// An instance manager over an empty root.
struct Manager {
    root: Root,
    channel: Channel,
    _dir: tempfile::TempDir,
}

impl Manager {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        // The processes of these tests are never let through the gate: what is shown is what the manager says of them.
        let program = PathBuf::from("/bin/true");
        let options = Options { root: root.clone(), program, listen: None, take_over: false };
        tokio::spawn(async move { manager::run(options, std::future::pending()).await.unwrap() });
        let channel = reach(&root.manager_socket()).await;
        Self { root, channel, _dir: dir }
    }

    fn proxy(&self) -> ProxyEngineServiceClient<Channel> {
        ProxyEngineServiceClient::new(self.channel.clone())
    }

    async fn engine(&self, engine: Engine) -> Arc<Engine> {
        let (engine, socket) = (Arc::new(engine), self.root.control_socket("demo-e-0"));
        let (served, path) = (engine.clone(), socket.clone());
        tokio::spawn(async move { control::engine::serve(&path, "demo-e-0", served).await });
        reach(&socket).await;
        engine
    }
}

fn demo() -> imrpc::ProxyEngineRequest {
    imrpc::ProxyEngineRequest {
        engine_name: "demo-e-0".into(),
        volume_name: "demo".into(),
        ..Default::default()
    }
}

#[tokio::test]
async fn an_engine_is_asked_through_the_proxy() {
    let manager = Manager::start().await;
    manager.engine(Engine::default()).await;
    let mut proxy = manager.proxy();
    let volume = proxy.volume_get(demo()).await.unwrap().into_inner().volume.unwrap();
    assert_eq!((volume.name.as_str(), volume.size), ("demo", 1 << 30));
    let version = proxy.server_version_get(demo()).await.unwrap().into_inner().version.unwrap();
    assert_eq!(version.controller_api_version, 6);
    let metrics = proxy.metrics_get(demo()).await.unwrap().into_inner().metrics.unwrap();
    assert_eq!(metrics.write_iops, 7);
    let list = proxy.replica_list(demo()).await.unwrap().into_inner().replica_list.unwrap();
    assert_eq!(list.replicas.len(), 2);
    let rebuilds = proxy.replica_rebuilding_status(demo()).await.unwrap().into_inner().status;
    assert_eq!(rebuilds["unix:/r/demo-r-2.sock"].progress, 30);
    let disks = proxy.snapshot_list(demo()).await.unwrap().into_inner().disks;
    assert_eq!(disks["volume-head"].parent, "one");
    assert!(disks["one"].children["volume-head"]);
}

/// Longhorn's clients ask so whether a server is there (`CheckConnection`).
#[tokio::test]
async fn manager_and_engine_say_that_they_serve() {
    let manager = Manager::start().await;
    manager.engine(Engine::default()).await;
    let engine = reach(&manager.root.control_socket("demo-e-0")).await;
    for channel in [manager.channel.clone(), engine] {
        let mut health = HealthClient::new(channel);
        let serving = HealthCheckResponse { status: ServingStatus::Serving.into() };
        let answer = health.check(HealthCheckRequest::default()).await.unwrap().into_inner();
        assert_eq!(answer, serving);
        let mut watched = health.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
        assert_eq!(watched.message().await.unwrap(), Some(serving));
        // It goes on as long as the server does.
        assert!(tokio::time::timeout(Duration::from_millis(100), watched.message()).await.is_err());
    }
}

/// Longhorn's clients ask for the version by the address alone.
#[tokio::test]
async fn an_engine_is_found_by_the_port_that_it_was_given() {
    let manager = Manager::start().await;
    let mut instances = InstanceServiceClient::new(manager.channel.clone());
    let spec = imrpc::InstanceSpec { port_count: 1, ..instance_spec("demo-e-0", &["controller"]) };
    let request = imrpc::InstanceCreateRequest { spec: Some(spec), ..Default::default() };
    let port = instances.instance_create(request).await.unwrap().into_inner().status.unwrap().port_start;
    manager.engine(Engine::default()).await;
    let mut proxy = manager.proxy();
    let at = |address: String| imrpc::ProxyEngineRequest { address, ..Default::default() };
    for address in [format!("10.0.0.1:{port}"), format!("tcp://[fd00::1]:{port}")] {
        let answer = proxy.server_version_get(at(address)).await.unwrap().into_inner();
        assert_eq!(answer.version.unwrap().controller_api_version, 6);
    }
    for nobodys in
        [format!("10.0.0.1:{}", port + 1), format!("unix:/run/other.sock:{port}"), port.to_string()]
    {
        let refused = proxy.server_version_get(at(nobodys.clone())).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{nobodys}");
    }
}

/// Who is taken out by mistake may be the last that has everything.
#[tokio::test]
async fn an_address_and_a_name_of_two_replicas_are_neithers() {
    let manager = Manager::start().await;
    let engine = manager.engine(Engine::default()).await;
    let mut proxy = manager.proxy();
    let remove = |address: &str, name: &str| imrpc::EngineReplicaRemoveRequest {
        proxy_engine_request: Some(demo()),
        replica_address: address.into(),
        replica_name: name.into(),
    };
    let refused = proxy.replica_remove(remove("unix:/r/demo-r-1.sock", "demo-r-2")).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(refused.message(), "unix:/r/demo-r-1.sock is replica demo-r-1, not demo-r-2");
    assert!(engine.asked.lock().unwrap().is_empty());
    let verify = imrpc::EngineReplicaVerifyRebuildRequest {
        proxy_engine_request: Some(demo()),
        replica_address: "unix:/r/demo-r-1.sock".into(),
        replica_name: "demo-r-2".into(),
    };
    assert_eq!(proxy.replica_verify_rebuild(verify).await.unwrap_err().code(), Code::FailedPrecondition);
    // One that was started anew elsewhere is known by its name.
    proxy.replica_remove(remove("unix:/r/before.sock", "demo-r-2")).await.unwrap();
    let asked = engine.asked.lock().unwrap().clone();
    assert_eq!(asked, [Operation::RemoveReplica { name: "demo-r-2".into() }]);
}

#[tokio::test]
async fn operations_reach_the_engine_as_they_were_meant() {
    let manager = Manager::start().await;
    let engine = manager.engine(Engine::default()).await;
    let mut proxy = manager.proxy();
    let snapshot = ptypes::VolumeSnapshotRequest { name: "one".into(), ..Default::default() };
    let request = imrpc::EngineVolumeSnapshotRequest {
        proxy_engine_request: Some(demo()),
        snapshot_volume: Some(snapshot),
    };
    let taken = proxy.volume_snapshot(request).await.unwrap().into_inner();
    assert_eq!(taken.snapshot.unwrap().name, "one");
    let expand = Some(ptypes::VolumeExpandRequest { size: 2 << 30 });
    let request = imrpc::EngineVolumeExpandRequest { proxy_engine_request: Some(demo()), expand };
    proxy.volume_expand(request).await.unwrap();
    let request =
        imrpc::EngineSnapshotRevertRequest { proxy_engine_request: Some(demo()), name: "one".into() };
    proxy.snapshot_revert(request).await.unwrap();
    let names = ["one", "gone", "two"].map(str::to_owned).into();
    let request = imrpc::EngineSnapshotRemoveRequest { proxy_engine_request: Some(demo()), names };
    let refused = proxy.snapshot_remove(request).await.unwrap_err();
    let told = "1 of 3 snapshots are not removed: \"gone\" (there is no snapshot gone)";
    assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, told));
    let purge =
        imrpc::EngineSnapshotPurgeRequest { proxy_engine_request: Some(demo()), skip_if_in_progress: true };
    proxy.snapshot_purge(purge).await.unwrap();
    let at = format!("unix:{}", manager.root.data_socket("demo-r-3").display());
    let add = imrpc::EngineReplicaAddRequest {
        proxy_engine_request: Some(demo()),
        replica_address: at.clone(),
        replica_name: "demo-r-3".into(),
        ..Default::default()
    };
    proxy.replica_add(add).await.unwrap();
    assert!(engine.looks.load(Ordering::SeqCst) > 3, "it answers before the replica is in sync");
    let remove = imrpc::EngineReplicaRemoveRequest {
        proxy_engine_request: Some(demo()),
        replica_address: "unix:/r/demo-r-2.sock".into(),
        ..Default::default()
    };
    proxy.replica_remove(remove).await.unwrap();
    let named = |name: &str| name.to_owned();
    let asked = engine.asked.lock().unwrap().clone();
    assert_eq!(
        asked,
        [
            Operation::Expand { size: 2 << 30 },
            Operation::Revert { name: named("one") },
            Operation::RemoveSnapshot { name: named("one") },
            Operation::RemoveSnapshot { name: named("gone") },
            Operation::RemoveSnapshot { name: named("two") },
            Operation::Purge,
            Operation::AddReplica { name: named("demo-r-3"), address: at },
            Operation::RemoveReplica { name: named("demo-r-2") },
        ]
    );
}

#[tokio::test]
async fn a_clone_is_of_an_engine_of_this_root_and_told_of_every_replica() {
    let manager = Manager::start().await;
    let engine = manager.engine(Engine::default()).await;
    let mut proxy = manager.proxy();
    let clone = |address: &str, name: &str| imrpc::EngineSnapshotCloneRequest {
        proxy_engine_request: Some(demo()),
        from_engine_address: address.into(),
        from_engine_name: name.into(),
        from_volume_name: "old".into(),
        snapshot_name: "s1".into(),
        ..Default::default()
    };
    proxy.snapshot_clone(clone("10.0.0.1:10000", "old-e-0")).await.unwrap();
    let by_address = manager.root.control_socket("old-e-0");
    proxy.snapshot_clone(clone(&format!("unix:{}", by_address.display()), "")).await.unwrap();
    let asked = engine.cloned.lock().unwrap().clone();
    assert_eq!((asked[0].engine.clone(), asked[0].instance.as_str()), (by_address.clone(), "old-e-0"));
    assert_eq!((asked[1].engine.clone(), asked[1].instance.as_str()), (by_address, ""));
    assert!(asked.iter().all(|source| source.volume == "old" && source.snapshot == "s1"));
    let refused = proxy.snapshot_clone(clone("10.0.0.1:10000", "")).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "only sockets of this root are opened");
    let linked = imrpc::CloneMode::LinkedClone.into();
    let refused = proxy
        .snapshot_clone(imrpc::EngineSnapshotCloneRequest { clone_mode: linked, ..clone("", "old-e-0") })
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    let status = proxy.snapshot_clone_status(demo()).await.unwrap().into_inner().status;
    let one = &status["unix:/r/demo-r-1.sock"];
    assert_eq!((one.state.as_str(), one.progress, one.snapshot_name.as_str()), ("in_progress", 50, "s1"));
    assert_eq!(status.len(), 1, "who is not in sync is filled otherwise");
}

#[tokio::test]
async fn a_purge_that_runs_is_not_begun_again() {
    let manager = Manager::start().await;
    let engine = manager.engine(Engine { purging: true, ..Engine::default() }).await;
    let mut proxy = manager.proxy();
    let mut purge =
        imrpc::EngineSnapshotPurgeRequest { proxy_engine_request: Some(demo()), skip_if_in_progress: true };
    proxy.snapshot_purge(purge.clone()).await.unwrap();
    assert!(engine.asked.lock().unwrap().is_empty());
    purge.skip_if_in_progress = false;
    proxy.snapshot_purge(purge).await.unwrap();
    assert_eq!(*engine.asked.lock().unwrap(), [Operation::Purge]);
    let status = proxy.snapshot_purge_status(demo()).await.unwrap().into_inner().status;
    let status = &status["unix:/r/demo-r-1.sock"];
    assert!(status.is_purging && status.progress == 50 && status.state == "in_progress");
}

#[tokio::test]
async fn what_is_meant_for_another_or_not_built_is_refused() {
    let manager = Manager::start().await;
    manager.engine(Engine::default()).await;
    let mut proxy = manager.proxy();
    let other = imrpc::ProxyEngineRequest { volume_name: "other".into(), ..demo() };
    let refused = proxy.volume_get(other).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(refused.message(), "incorrect volume name other; check controller address");
    let wrong = imrpc::ProxyEngineRequest {
        engine_name: String::new(),
        address: "unix:/run/other.sock".into(),
        ..demo()
    };
    assert_eq!(proxy.volume_get(wrong).await.unwrap_err().code(), Code::InvalidArgument);
    let spdk = imrpc::ProxyEngineRequest { data_engine: imrpc::DataEngine::V2.into(), ..demo() };
    assert_eq!(proxy.volume_get(spdk).await.unwrap_err().code(), Code::Unimplemented);
    let backup = proxy.backup_restore_status(demo()).await.unwrap_err();
    assert_eq!(backup.code(), Code::Unimplemented);
    assert!(backup.message().contains("not built yet"), "{}", backup.message());
    let missing = imrpc::ProxyEngineRequest { engine_name: "demo-e-1".into(), ..demo() };
    let missing = proxy.volume_get(missing).await.unwrap_err();
    assert_eq!(missing.code(), Code::Unavailable);
    assert!(missing.message().contains("demo-e-1.grpc.sock: No such file"), "{}", missing.message());
}

/// The channel to an engine is kept, and finds the next process of that name by itself.
#[tokio::test]
async fn an_engine_that_was_started_again_is_found() {
    let manager = Manager::start().await;
    let mut proxy = manager.proxy();
    let socket = manager.root.control_socket("demo-e-0");
    for _ in 0..3 {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let path = socket.clone();
        // A runtime of its own, with which its connections end, as those of a process do.
        let process = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    served = control::engine::serve(&path, "demo-e-0", Arc::new(Engine::default())) => served.unwrap(),
                    _ = stopped => {}
                }
            });
        });
        reach(&socket).await;
        proxy.volume_get(demo()).await.unwrap();
        stop.send(()).unwrap();
        process.join().unwrap();
        let gone = proxy.volume_get(demo()).await.unwrap_err();
        assert_eq!(gone.code(), Code::Unavailable, "{gone:?}");
    }
}

fn instance_spec(name: &str, args: &[&str]) -> imrpc::InstanceSpec {
    let args = args.iter().map(|arg| (*arg).to_owned()).collect();
    imrpc::InstanceSpec {
        name: name.into(),
        process_instance_spec: Some(imrpc::ProcessInstanceSpec { binary: String::new(), args }),
        ..Default::default()
    }
}

#[tokio::test]
async fn instances_are_processes() {
    let manager = Manager::start().await;
    let mut instances = InstanceServiceClient::new(manager.channel.clone());
    let mut processes = ProcessManagerServiceClient::new(manager.channel.clone());
    let mut changes = instances.instance_watch(()).await.unwrap().into_inner();
    let spec = instance_spec("demo-r-1", &["replica", "/nowhere"]);
    let request = imrpc::InstanceCreateRequest { spec: Some(spec.clone()), ..Default::default() };
    let made = instances.instance_create(request.clone()).await.unwrap().into_inner();
    assert_eq!(made.spec.unwrap().r#type, "replica");
    let uuid = made.status.unwrap().uuid;
    assert!(!uuid.is_empty());
    assert_eq!(instances.instance_create(request).await.unwrap_err().code(), Code::AlreadyExists);
    changes.message().await.unwrap().expect("a change is told");
    let list = instances.instance_list(()).await.unwrap().into_inner().instances;
    assert_eq!(list["demo-r-1"].status.as_ref().unwrap().uuid, uuid);
    let process = processes.process_get(imrpc::ProcessGetRequest { name: "demo-r-1".into() }).await;
    assert_eq!(process.unwrap().into_inner().status.unwrap().uuid, uuid);
    let get = imrpc::InstanceGetRequest { name: "demo-r-1".into(), ..Default::default() };
    instances.instance_get(get.clone()).await.unwrap();
    let spdk = imrpc::InstanceGetRequest { data_engine: imrpc::DataEngine::V2.into(), ..get.clone() };
    let refused = instances.instance_get(spdk).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    assert!(refused.message().starts_with("unsupported data engine DATA_ENGINE_V2"));
    let delete = imrpc::InstanceDeleteRequest { name: "demo-r-1".into(), uuid, ..Default::default() };
    instances.instance_delete(delete).await.unwrap();
    while instances.instance_get(get.clone()).await.is_ok() {
        changes.message().await.unwrap().expect("a change is told");
    }
}

#[tokio::test]
async fn a_replacement_keeps_name_and_ports_and_is_refused_with_other_signals() {
    let manager = Manager::start().await;
    let mut processes = ProcessManagerServiceClient::new(manager.channel.clone());
    let spec = |args: &[&str]| imrpc::ProcessSpec {
        name: "demo-e-0".into(),
        args: args.iter().map(|arg| (*arg).to_owned()).collect(),
        ..Default::default()
    };
    let ports = imrpc::ProcessSpec { port_count: 30_000, ..spec(&[]) };
    let refused = processes.process_create(imrpc::ProcessCreateRequest { spec: Some(ports) }).await;
    assert_eq!(refused.unwrap_err().code(), Code::ResourceExhausted);
    let replace = |spec: imrpc::ProcessSpec, signal: &str| imrpc::ProcessReplaceRequest {
        spec: Some(spec),
        terminate_signal: signal.into(),
    };
    let missing = processes.process_replace(replace(spec(&[]), "SIGHUP")).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
    let first = spec(&["controller", "--generation", "4294967296", "demo"]);
    let first = processes.process_create(imrpc::ProcessCreateRequest { spec: Some(first) }).await;
    let uuid = first.unwrap().into_inner().status.unwrap().uuid;
    let next = spec(&["controller", "--generation", "1", "--frontend", "none", "demo"]);
    let refused = processes.process_replace(replace(next.clone(), "SIGTERM")).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().starts_with("doesn't support terminate signal SIGTERM"));
    let foreign = imrpc::ProcessSpec { binary: "/bin/sh".into(), ..next.clone() };
    let refused = processes.process_replace(replace(foreign, "SIGHUP")).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let replaced = processes.process_replace(replace(next, "SIGHUP")).await.unwrap().into_inner();
    let generation: u64 = replaced.spec.unwrap().args[2].parse().unwrap();
    assert!(generation > 4_294_967_296, "{generation}");
    let get = || imrpc::ProcessGetRequest { name: "demo-e-0".into() };
    loop {
        let now = processes.process_get(get()).await.unwrap().into_inner();
        assert_eq!(now.status.unwrap().uuid, uuid);
        if now.spec.unwrap().args.contains(&"--frontend".to_owned()) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
