//! Every method that is declared, called over a real socket: it is served, or it answers `UNIMPLEMENTED` with a sentence,
//! as [`UNSERVED`] and `docs/grpc.md` say, and nothing in between.

mod reach;
mod stand_in;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use control::chain::Layer;
use control::engine::{
    Answer, EngineControl, EngineReplica, EngineStatus, Operation, PurgeProgress, SnapshotRequest,
};
use control::host::Root;
use control::manager::{self, Options};
use control::proto::imrpc::ProxyEngineRequest;
use control::proto::ptypes;
use control::replica::ReplicaStatus;
use prost::Message;
use prost_types::FileDescriptorSet;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use reach::reach;
use stand_in::Replica;

/// What answers `UNIMPLEMENTED`, by service. All else is served.
const UNSERVED: &[(&str, &[&str])] = &[
    ("ptypes.ControllerService", &["VolumeStart", "VolumeIO", "JournalList"]),
    (
        "ptypes.ReplicaService",
        &[
            "ReplicaDelete",
            "ReplicaOpen",
            "ReplicaClose",
            "ReplicaReload",
            "ReplicaRevert",
            "ReplicaSnapshot",
            "ReplicaExpand",
            "DiskRemove",
            "DiskReplace",
            "DiskPrepareRemove",
            "DiskMarkAsRemoved",
            "RebuildingSet",
            "RevisionCounterSet",
        ],
    ),
    (
        "ptypes.SyncAgentService",
        &[
            "FileRemove",
            "FileRename",
            "FileSend",
            "FilesSync",
            "SnapshotClone",
            "VolumeExport",
            "ReceiverLaunch",
            "BackupCreate",
            "BackupRemove",
            "BackupRestore",
            "BackupStatus",
            "Reset",
            "RestoreStatus",
            "SnapshotPurge",
            "ReplicaRebuildStatus",
            "SnapshotCloneStatus",
        ],
    ),
    (
        "imrpc.ProxyEngineService",
        &[
            "SnapshotBackup",
            "SnapshotBackupStatus",
            "BackupRestore",
            "BackupRestoreStatus",
            "BackupRestoreFinish",
            "CleanupBackupMountPoints",
            "SPDKBackingImageCreate",
            "SPDKBackingImageDelete",
            "SPDKBackingImageGet",
            "SPDKBackingImageList",
            "SPDKBackingImageWatch",
            "RemountReadOnlyVolume",
        ],
    ),
    (
        "imrpc.InstanceService",
        &[
            "InstanceSuspend",
            "InstanceResume",
            "InstanceSwitchOverTarget",
            "InstanceDeleteTarget",
            "LogSetFlags",
            "LogGetFlags",
        ],
    ),
    (
        "imrpc.DiskService",
        &[
            "DiskCreate",
            "DiskDelete",
            "DiskGet",
            "DiskHealthGet",
            "DiskReplicaInstanceList",
            "DiskReplicaInstanceDelete",
            "MetricsGet",
            "VersionGet",
        ],
    ),
];

/// Does whatever it is asked.
struct Willing;

impl EngineControl for Willing {
    fn fill_from(&self, _: control::cloning::CloneSource) -> Answer<()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn cloning(&self) -> Option<control::cloning::CloneProgress> {
        None
    }

    fn scrub(&self) -> Option<control::engine::ScrubProgress> {
        None
    }

    fn status(&self) -> EngineStatus {
        let replica = EngineReplica {
            name: "demo-r-1".into(),
            address: String::new(),
            mode: ptypes::ReplicaMode::Rw,
            reason: String::new(),
            rebuild: None,
        };
        EngineStatus { volume: "demo".into(), size: 1 << 30, replicas: vec![replica], ..Default::default() }
    }

    fn snapshot(&self, _: SnapshotRequest) -> Answer<()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn operate(&self, _: Operation) -> Answer<()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn chain(&self) -> Answer<Vec<Layer>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn purges(&self) -> Vec<PurgeProgress> {
        Vec::new()
    }

    fn shutdown(&self) -> Answer<()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn activity(&self) -> ptypes::Activity {
        ptypes::Activity::default()
    }
}

/// Messages as bytes, whatever they are.
#[derive(Clone, Copy, Default)]
struct Bytes;

impl Codec for Bytes {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        prost::bytes::BufMut::put_slice(out, &item);
        Ok(())
    }
}

impl Decoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        Ok(Some(prost::bytes::Buf::copy_to_bytes(from, prost::bytes::Buf::remaining(from)).to_vec()))
    }
}

/// A declared method.
struct Method {
    service: String,
    name: String,
    streams: bool,
    /// A request that names the engine, where requests do.
    request: Vec<u8>,
}

fn methods() -> Vec<Method> {
    let set = FileDescriptorSet::decode(control::proto::DESCRIPTORS).unwrap();
    let proxied = ProxyEngineRequest {
        engine_name: "demo-e-0".into(),
        volume_name: "demo".into(),
        ..Default::default()
    };
    let messages: BTreeMap<String, _> = set
        .file
        .iter()
        .flat_map(|f| f.message_type.iter().map(|m| (format!(".{}.{}", f.package(), m.name()), m)))
        .collect();
    let request = |input: &str| {
        if input.ends_with(".ProxyEngineRequest") {
            return proxied.encode_to_vec();
        }
        let first = messages.get(input).and_then(|m| m.field.iter().find(|f| f.number() == 1));
        if first.is_none_or(|f| !f.type_name().ends_with(".ProxyEngineRequest")) {
            return Vec::new();
        }
        let inner = proxied.encode_to_vec();
        // Field 1, length-delimited.
        let mut outer = vec![0x0a, u8::try_from(inner.len()).unwrap()];
        outer.extend(inner);
        outer
    };
    let mut methods = Vec::new();
    for file in set.file.iter().filter(|f| f.package() != "google.protobuf") {
        for service in &file.service {
            let package =
                if file.package().is_empty() { String::new() } else { format!("{}.", file.package()) };
            methods.extend(service.method.iter().map(|m| Method {
                service: format!("{package}{}", service.name()),
                name: m.name().to_owned(),
                streams: m.server_streaming(),
                request: request(m.input_type()),
            }));
        }
    }
    methods
}

/// `None`: it answered, whatever.
async fn refusal(channel: &Channel, method: &Method) -> Option<Status> {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let path: tonic::codegen::http::uri::PathAndQuery =
        format!("/{}/{}", method.service, method.name).parse().unwrap();
    let request = Request::new(method.request.clone());
    if method.streams {
        return match client.server_streaming(request, path, Bytes).await {
            Err(status) => Some(status),
            Ok(answer) => {
                let first = tokio::time::timeout(Duration::from_secs(1), answer.into_inner().message()).await;
                first.ok().and_then(Result::err)
            }
        };
    }
    client.unary::<Vec<u8>, Vec<u8>, Bytes>(request, path, Bytes).await.err()
}

#[tokio::test]
async fn every_method_is_served_or_says_why_not() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path()).unwrap();
    let options =
        Options { root: root.clone(), program: PathBuf::from("/bin/true"), listen: None, take_over: false };
    tokio::spawn(async move { manager::run(options, std::future::pending()).await.unwrap() });
    let manager = reach(&root.manager_socket()).await;
    let (engine_at, replica_at) = (root.control_socket("demo-e-0"), root.control_socket("demo-r-1"));
    let path = engine_at.clone();
    tokio::spawn(async move { control::engine::serve(&path, "demo-e-0", Arc::new(Willing)).await });
    let path = replica_at.clone();
    let status = ReplicaStatus { chain: vec![Layer::default()], ..Default::default() };
    tokio::spawn(async move {
        control::replica::serve(&path, "demo", "demo-r-1", Arc::new(Replica(Some(status)))).await
    });
    let (engine, replica) = (reach(&engine_at).await, reach(&replica_at).await);
    let methods = methods();
    let mut unserved: BTreeSet<(&str, &str)> =
        UNSERVED.iter().flat_map(|(service, methods)| methods.iter().map(|m| (*service, *m))).collect();
    let mut wrong = Vec::new();
    for method in &methods {
        let channel = match method.service.as_str() {
            "ptypes.ControllerService" | "longhorn.volume.VolumeOperations" => &engine,
            "ptypes.ReplicaService" | "ptypes.SyncAgentService" => &replica,
            _ => &manager,
        };
        let refused = refusal(channel, method).await;
        let unbuilt = refused.as_ref().filter(|status| status.code() == Code::Unimplemented);
        let listed = unserved.remove(&(method.service.as_str(), method.name.as_str()));
        let sentence =
            unbuilt.is_none_or(|status| status.message().contains(' ') && status.message().len() > 20);
        if listed != unbuilt.is_some() || !sentence {
            wrong.push(format!(
                "{}/{}: listed as unserved: {listed}, answers {refused:?}",
                method.service, method.name
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(unserved.is_empty(), "there is no {unserved:?}");
}

#[test]
fn the_documentation_names_what_is_not_served() {
    let text = include_str!("../../docs/grpc.md");
    let section = text.split("## What is not served").nth(1).expect("a section on what is not served");
    let section = section.split("\n## ").next().unwrap_or_default();
    let quoted =
        |cell: &str| -> BTreeSet<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let told: BTreeMap<String, BTreeSet<String>> = section
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| {
            let cells: Vec<&str> = line.split('|').collect();
            (quoted(cells[1]).pop_first().expect("a service"), quoted(cells[2]))
        })
        .collect();
    let known: BTreeMap<String, BTreeSet<String>> = UNSERVED
        .iter()
        .map(|(service, methods)| ((*service).to_owned(), methods.iter().map(|m| (*m).to_owned()).collect()))
        .collect();
    assert_eq!(told, known);
}
