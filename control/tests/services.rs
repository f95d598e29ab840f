//! The services of engine and replica over real sockets, with stand-ins behind them.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use control::engine::{
    Answer, EngineControl, EngineError, EngineMetrics, EngineReplica, EngineStatus, SnapshotRequest,
};
use control::proto::ptypes;
use control::proto::ptypes::controller_service_client::ControllerServiceClient;
use control::proto::ptypes::replica_service_client::ReplicaServiceClient;
use control::replica::{Layer, ReplicaControl, ReplicaStatus, chain_of};
use control::transport::connect;
use lh_block::Generation;
use tonic::transport::Channel;
use tonic::{Code, Request};

#[derive(Default)]
struct Engine {
    snapshots: Mutex<Vec<String>>,
}

impl EngineControl for Engine {
    fn status(&self) -> EngineStatus {
        EngineStatus {
            volume: "demo".into(),
            size: 1 << 30,
            frontend: "fuse".into(),
            up: true,
            device: Some(PathBuf::from("/dev/longhorn/demo")),
            generation: Generation { attachment: 2, restart: 1 },
            replicas: vec![EngineReplica {
                name: "demo-r-1".into(),
                address: "unix:/r/1.sock".into(),
                mode: ptypes::ReplicaMode::Wo,
                reason: "it is being brought in sync".into(),
                rebuild_progress: 40,
            }],
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

    fn shutdown(&self) -> Answer<()> {
        Box::pin(std::future::ready(Err(EngineError::NotNow("/dev/longhorn/demo is in use by mount".into()))))
    }

    fn metrics(&self) -> EngineMetrics {
        EngineMetrics { writes: 7, ..Default::default() }
    }
}

struct Replica(Option<ReplicaStatus>);

impl ReplicaControl for Replica {
    fn status(&self) -> Pin<Box<dyn Future<Output = Option<ReplicaStatus>> + Send>> {
        Box::pin(std::future::ready(self.0.clone()))
    }
}

/// Waits for a server that was just started.
async fn reach(socket: &std::path::Path) -> Channel {
    for _ in 0..1000 {
        if let Ok(channel) = connect(socket).await {
            return channel;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("nobody listens on {}", socket.display())
}

async fn engine(dir: &tempfile::TempDir) -> ControllerServiceClient<Channel> {
    let socket = dir.path().join("e.sock");
    let served = socket.clone();
    tokio::spawn(
        async move { control::engine::serve(&served, "demo-e-0", Arc::new(Engine::default())).await },
    );
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
    assert_eq!(client.metrics_get(()).await.unwrap().into_inner().metrics.unwrap().write_iops, 7);
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
    let unbuilt = client.volume_expand(ptypes::VolumeExpandRequest { size: 1 }).await.unwrap_err();
    assert_eq!((unbuilt.code(), unbuilt.message()), (Code::Unimplemented, "VolumeExpand is not built yet"));
    let mut elsewhere = Request::new(());
    elsewhere.metadata_mut().insert("volume-name", "other".parse().unwrap());
    let refused = client.volume_get(elsewhere).await.unwrap_err();
    assert_eq!(refused.message(), "incorrect volume name other; check controller address");
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
        match client.replica_get(()).await {
            Ok(answer) => {
                let replica = answer.into_inner().replica.unwrap();
                assert_eq!(chain_of(&replica), chain);
                assert_eq!((replica.generation, name), (4 << 32, "open"));
            }
            Err(refused) => assert_eq!((refused.code(), name), (Code::Unavailable, "closed")),
        }
        let refused = client.replica_create(ptypes::ReplicaCreateRequest::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unimplemented);
    }
}
