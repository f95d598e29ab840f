//! The services of engine and replica over real sockets, with stand-ins behind them.

mod reach;
mod stand_in;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use control::chain::{Layer, layers_of};
use control::engine::{
    Answer, EngineControl, EngineError, EngineReplica, EngineStatus, Operation, PurgeProgress, ScrubProgress,
    SnapshotRequest,
};
use control::proto::health::health_client::HealthClient;
use control::proto::health::{HealthCheckRequest, health_check_response::ServingStatus};
use control::proto::ptypes::controller_service_client::ControllerServiceClient;
use control::proto::ptypes::replica_service_client::ReplicaServiceClient;
use control::proto::ptypes::sync_agent_service_client::SyncAgentServiceClient;
use control::proto::volume::volume_operations_client::VolumeOperationsClient;
use control::proto::{ptypes, volume};
use control::replica::ReplicaStatus;
use lh_block::Generation;
use tonic::transport::Channel;
use tonic::{Code, Request};

use reach::reach;
use stand_in::Replica;

#[derive(Default)]
struct Engine {
    snapshots: Mutex<Vec<String>>,
    /// Replicas beside its own.
    others: Vec<EngineReplica>,
}

impl EngineControl for Engine {
    fn fill_from(&self, _: control::cloning::CloneSource) -> Answer<()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn cloning(&self) -> Option<control::cloning::CloneProgress> {
        None
    }

    fn status(&self) -> EngineStatus {
        EngineStatus {
            volume: "demo".into(),
            size: 1 << 30,
            frontend: "fuse".into(),
            up: true,
            device: Some(PathBuf::from("/dev/longhorn/demo")),
            generation: Generation { attachment: 2, restart: 1 },
            replicas: std::iter::once(EngineReplica {
                name: "demo-r-1".into(),
                address: "unix:/r/1.sock".into(),
                mode: ptypes::ReplicaMode::Wo,
                reason: "it is being brought in sync".into(),
                rebuild: Some((400, 1000)),
            })
            .chain(self.others.iter().cloned())
            .collect(),
            ..Default::default()
        }
    }

    fn snapshot(&self, request: SnapshotRequest) -> Answer<()> {
        let mut taken = self.snapshots.lock().unwrap();
        let answer = if taken.contains(&request.name) {
            Err(EngineError::Exists(format!("there is a snapshot {} already", request.name)))
        } else {
            taken.push(request.name);
            Ok(())
        };
        Box::pin(std::future::ready(answer))
    }

    fn operate(&self, operation: Operation) -> Answer<()> {
        Box::pin(async move {
            match operation {
                Operation::Expand { .. } | Operation::AddReplica { .. } => Ok(()),
                Operation::RebuildReplica { name } => {
                    Err(EngineError::NotFound(format!("there is no replica {name}")))
                }
                other => Err(EngineError::NotNow(format!("{other:?} was asked for"))),
            }
        })
    }

    fn chain(&self) -> Answer<Vec<Layer>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn purges(&self) -> Vec<PurgeProgress> {
        vec![PurgeProgress { replica: "demo-r-1".into(), done: 1, total: 2, ..PurgeProgress::default() }]
    }

    fn scrub(&self) -> Option<ScrubProgress> {
        None
    }

    fn shutdown(&self) -> Answer<()> {
        Box::pin(std::future::ready(Err(EngineError::NotNow("/dev/longhorn/demo is in use by mount".into()))))
    }

    fn activity(&self) -> ptypes::Activity {
        let writes =
            ptypes::Requests { rate: 7, throughput: 28672, mean: 90, p99: 200, ..Default::default() };
        ptypes::Activity { window: 1_000_000_000, writes: Some(writes), ..Default::default() }
    }
}

async fn engine(dir: &tempfile::TempDir) -> ControllerServiceClient<Channel> {
    engine_with(dir, Vec::new()).await
}

async fn engine_with(
    dir: &tempfile::TempDir,
    others: Vec<EngineReplica>,
) -> ControllerServiceClient<Channel> {
    let socket = dir.path().join("e.sock");
    let served = socket.clone();
    let engine = Arc::new(Engine { others, ..Engine::default() });
    tokio::spawn(async move { control::engine::serve(&served, "demo-e-0", engine).await });
    ControllerServiceClient::new(reach(&socket).await)
}

#[tokio::test]
async fn an_engine_tells_how_it_fares() {
    let dir = tempfile::tempdir().unwrap();
    let mut client = engine(&dir).await;
    let volume = client.volume_get(()).await.unwrap().into_inner();
    assert_eq!((volume.name.as_str(), volume.size, volume.replica_count), ("demo", 1 << 30, 1));
    assert_eq!((volume.endpoint.as_str(), volume.frontend_state.as_str()), ("/dev/longhorn/demo", "up"));
    assert_eq!(volume.generation, (2 << 32) + 1);
    let replicas = client.replica_list(()).await.unwrap().into_inner().replicas;
    assert_eq!(replicas[0].mode(), ptypes::ReplicaMode::Wo);
    assert_eq!(replicas[0].rebuild_progress, 40);
    let address = replicas[0].address.clone().unwrap();
    assert_eq!(address.instance_name, "demo-r-1");
    assert_eq!(client.replica_get(address).await.unwrap().into_inner(), replicas[0]);
    let missing = ptypes::ReplicaAddress { address: "unix:/none".into(), ..Default::default() };
    assert_eq!(client.replica_get(missing).await.unwrap_err().code(), Code::NotFound);
    let version = client.version_detail_get(()).await.unwrap().into_inner().version.unwrap();
    assert_eq!((version.cli_api_version, version.controller_api_version), (12, 6));
    let reply = client.metrics_get(()).await.unwrap().into_inner();
    let longhorns =
        ptypes::Metrics { write_iops: 7, write_throughput: 28672, write_latency: 90, ..Default::default() };
    assert_eq!(reply.metrics, Some(longhorns));
    assert_eq!(reply.activity.unwrap().writes.unwrap().p99, 200);
}

/// What a replica tells of all its snapshots has to fit a message of the data protocol.
#[tokio::test]
async fn labels_of_a_snapshot_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let mut client = engine(&dir).await;
    let mut take = async |name: &str, label: String| {
        let labels = [("why".to_owned(), label)].into();
        let request = ptypes::VolumeSnapshotRequest { name: name.into(), labels, ..Default::default() };
        client.volume_snapshot(request).await.map(|r| r.into_inner().name)
    };
    take("one", "x".repeat(2000)).await.unwrap();
    // A control character takes six bytes.
    for label in ["x".repeat(2100), "\u{1}".repeat(350)] {
        let refused = take("two", label).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains("2048"), "{}", refused.message());
    }
    // It was not taken.
    take("two", String::new()).await.unwrap();
}

#[tokio::test]
async fn snapshots_get_a_name_and_bad_ones_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut client = engine(&dir).await;
    let mut take = async |name: &str| {
        let request = ptypes::VolumeSnapshotRequest { name: name.into(), ..Default::default() };
        client.volume_snapshot(request).await.map(|r| r.into_inner().name)
    };
    assert_eq!(take("one").await.unwrap(), "one");
    assert_eq!(take("one").await.unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(take("../one").await.unwrap_err().code(), Code::InvalidArgument);
    // What lists and directories call the head.
    for head in ["volume-head", "old-volume-head-001"] {
        assert_eq!(take(head).await.unwrap_err().code(), Code::InvalidArgument, "{head}");
    }
    let (a, b) = (take("").await.unwrap(), take("").await.unwrap());
    assert!(!a.is_empty() && a != b);
}

#[tokio::test]
async fn refusals_keep_their_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let mut client = engine(&dir).await;
    let refused = client.volume_shutdown(()).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::FailedPrecondition, "/dev/longhorn/demo is in use by mount")
    );
    let unbuilt = client.volume_io(ptypes::VolumeIoRequest::default()).await.unwrap_err();
    assert_eq!(
        (unbuilt.code(), unbuilt.message()),
        (Code::Unimplemented, "VolumeIO is not built: data goes through the frontend")
    );
    let mark = |enabled| ptypes::VolumeUnmapMarkSnapChainRemovedSetRequest { enabled };
    client.volume_unmap_mark_snap_chain_removed_set(mark(false)).await.unwrap();
    let refused = client.volume_unmap_mark_snap_chain_removed_set(mark(true)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    for (count, bytes) in [(0, -1), (251, i64::MIN)] {
        let request = ptypes::VolumeSnapshotMaxCountSetRequest { count };
        assert_eq!(
            client.volume_snapshot_max_count_set(request).await.unwrap_err().code(),
            Code::InvalidArgument
        );
        let request = ptypes::VolumeSnapshotMaxSizeSetRequest { size: bytes };
        assert_eq!(
            client.volume_snapshot_max_size_set(request).await.unwrap_err().code(),
            Code::InvalidArgument
        );
    }
    let verify = ptypes::ReplicaAddress { instance_name: "demo-r-1".into(), ..Default::default() };
    let refused = client.replica_verify_rebuild(verify).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "it is WO");
    let mut elsewhere = Request::new(());
    elsewhere.metadata_mut().insert("volume-name", "other".parse().unwrap());
    let refused = client.volume_get(elsewhere).await.unwrap_err();
    assert_eq!(refused.message(), "incorrect volume name other; check controller address");
}

#[tokio::test]
async fn of_two_replicas_at_one_address_the_one_that_is_named_is_meant_and_else_none() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str, address: &str| EngineReplica {
        name: name.into(),
        address: address.into(),
        mode: ptypes::ReplicaMode::Rw,
        reason: String::new(),
        rebuild: None,
    };
    let here = "tcp:10.0.0.1:10000";
    let mut client = engine_with(&dir, vec![at("demo-r-2", here), at("demo-r-3", here)]).await;
    let said = |address: &str, instance_name: &str| ptypes::ReplicaAddress {
        address: address.into(),
        instance_name: instance_name.into(),
    };
    let refused = client.replica_delete(said(here, "")).await.unwrap_err();
    let why = "tcp:10.0.0.1:10000 is replica demo-r-2 and replica demo-r-3: say which of them by its name";
    assert_eq!((refused.code(), refused.message()), (Code::FailedPrecondition, why));
    for meant in [said(here, "demo-r-3"), said("", "demo-r-3")] {
        let asked = client.replica_delete(meant).await.unwrap_err();
        assert!(asked.message().starts_with("RemoveReplica { name: \"demo-r-3\" }"), "{asked}");
    }
    let refused = client.replica_delete(said("unix:/r/1.sock", "demo-r-3")).await.unwrap_err();
    assert_eq!(refused.message(), "unix:/r/1.sock is replica demo-r-1, not demo-r-3");
    let create = ptypes::ControllerReplicaCreateRequest { address: here.into(), ..Default::default() };
    let refused = client.controller_replica_create(create).await.unwrap_err();
    assert!(refused.message().contains("--replica-instance-name NAME tcp:10.0.0.1:10000"), "{refused}");
}

#[tokio::test]
async fn operations_reach_the_engine_by_either_service() {
    let dir = tempfile::tempdir().unwrap();
    let mut longhorns = engine(&dir).await;
    let mut ours = VolumeOperationsClient::new(reach(&dir.path().join("e.sock")).await);
    let asked = |status: tonic::Status, what: &str| {
        assert!(status.message().starts_with(what), "{status}");
    };
    let revert = ptypes::VolumeRevertRequest { name: "a".into() };
    asked(longhorns.volume_revert(revert).await.unwrap_err(), "Revert { name: \"a\" }");
    let expand = |size| ptypes::VolumeExpandRequest { size };
    longhorns.volume_expand(expand(8192)).await.unwrap();
    for bad in [-4096, 0, 4097] {
        let refused = longhorns.volume_expand(expand(bad)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{bad}");
    }
    let count = ptypes::VolumeSnapshotMaxCountSetRequest { count: 7 };
    asked(
        longhorns.volume_snapshot_max_count_set(count).await.unwrap_err(),
        "SetLimits(NewLimits { snapshot_max_count: Some(7)",
    );
    asked(longhorns.volume_frontend_shutdown(()).await.unwrap_err(), "HideFrontend");
    let wo = ptypes::ControllerReplica {
        address: Some(ptypes::ReplicaAddress { instance_name: "demo-r-1".into(), ..Default::default() }),
        mode: ptypes::ReplicaMode::Err.into(),
        ..Default::default()
    };
    asked(longhorns.replica_update(wo).await.unwrap_err(), "there is no replica demo-r-1");
    let known = ptypes::ReplicaAddress { instance_name: "demo-r-1".into(), ..Default::default() };
    asked(longhorns.replica_delete(known).await.unwrap_err(), "RemoveReplica { name: \"demo-r-1\" }");
    let unknown = ptypes::ReplicaAddress { instance_name: "demo-r-9".into(), ..Default::default() };
    assert_eq!(longhorns.replica_delete(unknown).await.unwrap_err().code(), Code::NotFound);
    let name = |name: &str| volume::SnapshotName { name: name.into() };
    asked(ours.snapshot_remove(name("a")).await.unwrap_err(), "RemoveSnapshot");
    asked(ours.snapshot_purge(()).await.unwrap_err(), "Purge");
    assert_eq!(ours.snapshot_purge_status(()).await.unwrap().into_inner().replicas[0].total, 2);
    let at = |address: String| volume::NamedReplica { name: "demo-r-2".into(), address };
    ours.replica_add(at(format!("unix:{}", dir.path().join("2.sock").display()))).await.unwrap();
    for nowhere in ["unix:/etc/passwd", "unix:/nope"].map(str::to_owned) {
        let create =
            ptypes::ControllerReplicaCreateRequest { address: nowhere.clone(), ..Default::default() };
        let refused = longhorns.controller_replica_create(create).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{nowhere}");
        assert_eq!(ours.replica_add(at(nowhere)).await.unwrap_err().code(), Code::InvalidArgument);
    }
    let replica = |name: &str| volume::ReplicaName { name: name.into() };
    asked(ours.replica_remove(replica("demo-r-1")).await.unwrap_err(), "RemoveReplica");
    let unknown = ours.replica_rebuild(replica("demo-r-9")).await.unwrap_err();
    assert_eq!((unknown.code(), unknown.message()), (Code::NotFound, "there is no replica demo-r-9"));
}

#[tokio::test]
async fn a_replica_tells_its_chain() {
    let dir = tempfile::tempdir().unwrap();
    let layer =
        |name: &str, parent: &str| Layer { name: name.into(), parent: parent.into(), ..Layer::default() };
    let chain = vec![layer("one", ""), layer("", "one")];
    let generation = Generation { attachment: 4, restart: 0 };
    let status = ReplicaStatus { size: 4096, generation, chain: chain.clone(), ..Default::default() };
    for (name, replica) in [("open", Replica(Some(status))), ("closed", Replica(None))] {
        let socket = dir.path().join(name);
        let served = socket.clone();
        tokio::spawn(
            async move { control::replica::serve(&served, "demo", "demo-r-1", Arc::new(replica)).await },
        );
        let mut client = ReplicaServiceClient::new(reach(&socket).await);
        let mut health = HealthClient::new(reach(&socket).await);
        let answers = health.check(HealthCheckRequest::default()).await.unwrap().into_inner();
        assert_eq!(answers.status(), ServingStatus::Serving);
        match client.replica_get(()).await {
            Ok(answer) => {
                let replica = answer.into_inner().replica.unwrap();
                assert_eq!(layers_of(&replica), chain);
                assert_eq!((replica.generation, name), (4 << 32, "open"));
            }
            Err(refused) => assert_eq!((refused.code(), name), (Code::Unavailable, "closed")),
        }
        let mut files = SyncAgentServiceClient::new(reach(&socket).await);
        let hash = |name: &str| ptypes::SnapshotHashRequest { snapshot_name: name.into(), rehash: false };
        let [known, unknown] =
            [files.snapshot_hash(hash("one")).await, files.snapshot_hash(hash("nope")).await]
                .map(|hashed| hashed.err().map(|refused| refused.code()));
        let expected =
            if name == "open" { [None, Some(Code::NotFound)] } else { [Some(Code::Unavailable); 2] };
        assert_eq!([known, unknown], expected);
        let create = |size: &str| ptypes::ReplicaCreateRequest { size: size.into() };
        let made = client.replica_create(create("4096")).await.map_err(|refused| refused.code());
        assert_eq!(made.is_ok(), name == "open", "{made:?}");
        let refused = client.replica_create(create("8192")).await.unwrap_err();
        let expected = if name == "open" { Code::FailedPrecondition } else { Code::Unavailable };
        assert_eq!(refused.code(), expected);
    }
}
