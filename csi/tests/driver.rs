//! The driver over an API server in memory, with managers that do at once what resources ask: what it writes, what it
//! answers, what it refuses, and that every call may be made again.

mod cluster;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::api_server::ApiServer;
use cluster::{Cluster, MIB, block, capability, wish, words};
use csi::proto::csi as proto;
use csi::{Holder, Options, ReadSnapshots, SnapshotMap, Source as Snapshots, run};
use proto::group_controller_client::GroupControllerClient;
use proto::identity_client::IdentityClient;
use proto::node_client::NodeClient;
use proto::volume_capability::access_mode::Mode;
use proto::volume_content_source::{SnapshotSource, Type as Source, VolumeSource};
use proto::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerGetVolumeRequest, ControllerModifyVolumeRequest,
    ControllerPublishVolumeRequest, CreateVolumeRequest, DeleteSnapshotRequest, ListVolumesRequest,
    VolumeContentSource,
};
use serde_json::json;
use tonic::Code;

/// Nobody reads snapshots here.
struct Nothing;

impl ReadSnapshots for Nothing {
    fn open(&self, _: &Holder, _: &str, _: Option<&str>) -> Result<Box<dyn SnapshotMap>, String> {
        Err("there are none".to_owned())
    }
}

/// How long a driver waits for what a test never lets happen: far more than what does happen takes, on a loaded machine, too.
const IN_VAIN: Duration = Duration::from_secs(5);

fn no_snapshots() -> Snapshots {
    Arc::new(Nothing)
}

#[tokio::test]
async fn a_volume_is_made_once_and_only_as_it_was_asked_for() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    let mut request = wish("pvc-1", 63);
    request.parameters = words(&[("numberOfReplicas", "2"), ("fsType", "xfs"), ("mkfsParams", "-K")]);
    request.volume_capabilities = vec![capability(Mode::SingleNodeSingleWriter)];
    // XFS has a least size.
    let volume = cluster.create(request.clone()).await.unwrap();
    assert_eq!((volume.volume_id.as_str(), volume.capacity_bytes), ("pvc-1", 300 * MIB));
    assert_eq!(volume.volume_context["mkfsParams"], "-K");
    let spec = cluster.server.get("volumes", "pvc-1").unwrap()["spec"].clone();
    assert_eq!((&spec["numberOfReplicas"], &spec["accessMode"]), (&json!(2), &json!("rwop")));
    assert_eq!(spec["size"], json!((300 * MIB).to_string()));
    assert_eq!(cluster.create(request).await.unwrap().volume_id, "pvc-1");

    cluster.create(wish("pvc-2", 64)).await.unwrap();
    assert_eq!(cluster.create(wish("pvc-2", 128)).await, Err(Code::AlreadyExists));
    // What is there is within what is asked for, or beyond it (CSI, CreateVolume).
    let within = |limit: i64| CreateVolumeRequest {
        capacity_range: Some(CapacityRange { required_bytes: 32 * MIB, limit_bytes: limit * MIB }),
        ..wish("pvc-2", 32)
    };
    for (limit, expected) in [(0, Ok(64)), (64, Ok(64)), (48, Err(Code::AlreadyExists))] {
        let answer = cluster.create(within(limit)).await.map(|volume| volume.capacity_bytes / MIB);
        assert_eq!(answer, expected, "{limit}");
    }
    // Two names that are shortened are two volumes, and a taken one is not handed to somebody else.
    let long = "n".repeat(128);
    let shortened = cluster.create(wish(&long, 64)).await.unwrap().volume_id;
    assert_eq!(shortened.len(), 40);
    assert_eq!(cluster.create(wish(&shortened, 64)).await, Err(Code::AlreadyExists));

    for (bad, code) in [
        (wish("", 64), Code::InvalidArgument),
        (CreateVolumeRequest { volume_capabilities: Vec::new(), ..wish("x", 64) }, Code::InvalidArgument),
        (
            CreateVolumeRequest { parameters: words(&[("nonsense", "1")]), ..wish("x", 64) },
            Code::InvalidArgument,
        ),
        (
            CreateVolumeRequest { mutable_parameters: words(&[("nonsense", "1")]), ..wish("x", 64) },
            Code::InvalidArgument,
        ),
        (
            CreateVolumeRequest { parameters: words(&[("encrypted", "true")]), ..wish("x", 64) },
            Code::FailedPrecondition,
        ),
        (
            // A source of a kind that is not known.
            CreateVolumeRequest {
                volume_content_source: Some(VolumeContentSource::default()),
                ..wish("x", 64)
            },
            Code::InvalidArgument,
        ),
        (
            CreateVolumeRequest { parameters: words(&[("fromBackup", "s3://b")]), ..wish("x", 64) },
            Code::FailedPrecondition,
        ),
        (
            CreateVolumeRequest {
                capacity_range: Some(CapacityRange { required_bytes: 9 * MIB, limit_bytes: 9 * MIB }),
                ..wish("x", 64)
            },
            Code::OutOfRange,
        ),
    ] {
        assert_eq!(cluster.create(bad.clone()).await, Err(code), "{bad:?}");
    }
    assert!(cluster.server.get("volumes", "x").is_none(), "what is refused is not made");

    cluster.delete("pvc-1").await.unwrap();
    cluster.delete("pvc-1").await.unwrap();
    assert_eq!(cluster.delete("").await, Err(Code::InvalidArgument));
}

#[tokio::test]
async fn a_volume_is_on_one_node_in_one_way_and_a_node_has_so_many() {
    let cluster = Cluster::start(2, no_snapshots()).await;
    for name in ["a", "b", "c"] {
        cluster.create(wish(name, 64)).await.unwrap();
    }
    assert_eq!(cluster.publish("a", "n9", false).await, Err(Code::NotFound));
    assert_eq!(cluster.publish("z", "n1", false).await, Err(Code::NotFound));
    cluster.publish("a", "n1", false).await.unwrap();
    cluster.publish("a", "n1", false).await.unwrap();
    assert_eq!(cluster.publish("a", "n1", true).await, Err(Code::AlreadyExists));
    assert_eq!(cluster.publish("a", "n2", false).await, Err(Code::FailedPrecondition));
    let get = ControllerGetVolumeRequest { volume_id: "a".into() };
    let seen = cluster.controller().controller_get_volume(get).await.unwrap().into_inner().status.unwrap();
    assert_eq!(seen.published_node_ids, ["n1"]);
    assert!(!seen.volume_condition.unwrap().abnormal);
    assert_eq!(cluster.delete("a").await, Err(Code::FailedPrecondition), "it is in use");
    cluster.publish("b", "n1", true).await.unwrap();
    assert_eq!(cluster.publish("c", "n1", false).await, Err(Code::ResourceExhausted));
    cluster.publish("c", "n2", false).await.unwrap();
    cluster.unpublish("a", "n1").await;
    cluster.unpublish("a", "n1").await;
    cluster.unpublish("z", "").await;
    cluster.delete("a").await.unwrap();
}

#[tokio::test]
async fn a_volume_that_is_not_attached_in_time_says_why() {
    let cluster = Cluster::with_patience(IN_VAIN, 0, no_snapshots()).await;
    cluster.create(wish("v", 64)).await.unwrap();
    cluster.hold_attachments("the volume is attached to node n7");
    let replicas = json!({ "type": "ReplicasReady", "status": "False", "message": "no replica runs" });
    cluster.server.apply("volumes", "v", &json!({ "status": { "conditions": [replicas] } }));
    let request = ControllerPublishVolumeRequest {
        volume_id: "v".into(),
        node_id: "n1".into(),
        volume_capability: Some(capability(Mode::SingleNodeWriter)),
        ..Default::default()
    };
    let refused = cluster.controller().controller_publish_volume(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::Aborted);
    assert!(refused.message().ends_with("the volume is attached to node n7: no replica runs"), "{refused}");
}

#[tokio::test]
async fn a_strictly_local_volume_is_published_where_its_replica_is() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    let request = CreateVolumeRequest {
        parameters: words(&[("dataLocality", "strict-local"), ("numberOfReplicas", "1")]),
        ..wish("near", 64)
    };
    cluster.create(request).await.unwrap();
    let replica = json!({
        "apiVersion": "longhorn.io/v1beta2", "kind": "Replica",
        "metadata": { "labels": { "longhornvolume": "near" } },
        "spec": { "volumeName": "near", "nodeID": "n2" },
    });
    cluster.server.apply("replicas", "near-r-1", &replica);
    // What was never used is made anew where it is.
    cluster.publish("near", "n1", false).await.unwrap();
    cluster.unpublish("near", "n1").await;
    let used = json!({ "spec": { "healthyAt": "2026-01-01T00:00:00Z" } });
    cluster.server.apply("replicas", "near-r-1", &used);
    assert_eq!(cluster.publish("near", "n1", false).await, Err(Code::FailedPrecondition));
    let tickets =
        cluster.server.get("volumeattachments", "near").unwrap()["spec"]["attachmentTickets"].clone();
    assert_eq!(tickets.as_object().map(serde_json::Map::len), Some(0), "nothing is asked for");
    cluster.publish("near", "n2", false).await.unwrap();
}

#[tokio::test]
async fn what_a_volume_may_become_is_confirmed_by_what_it_is() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    let one = [("numberOfReplicas", "1")];
    let near = [("numberOfReplicas", "1"), ("dataLocality", "strict-local")];
    for (name, parameters) in [("one", &one[..]), ("near", &near[..])] {
        cluster
            .create(CreateVolumeRequest { parameters: words(parameters), ..wish(name, 64) })
            .await
            .unwrap();
    }
    let validate = async |volume: &str, change: (&str, &str)| {
        let request = proto::ValidateVolumeCapabilitiesRequest {
            volume_id: volume.into(),
            volume_capabilities: vec![capability(Mode::SingleNodeWriter)],
            mutable_parameters: words(&[change]),
            ..Default::default()
        };
        let answer = cluster.controller().validate_volume_capabilities(request).await.unwrap().into_inner();
        answer.confirmed.is_some()
    };
    assert!(validate("one", ("dataLocality", "strict-local")).await);
    assert!(!validate("near", ("numberOfReplicas", "3")).await, "its one replica is where it is used");
}

#[tokio::test]
async fn a_device_that_migrates_is_on_two_nodes_until_one_of_them_lets_go() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    let node = json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Node", "spec": {} });
    cluster.server.apply("nodes", "n3", &node);
    let both = || block(Mode::MultiNodeMultiWriter);
    let of_class = |name: &str, migratable: &str, capability| CreateVolumeRequest {
        parameters: words(&[("migratable", migratable)]),
        volume_capabilities: vec![capability],
        ..wish(name, 64)
    };
    let spec = |name: &str| cluster.server.get("volumes", name).unwrap()["spec"].clone();
    cluster.create(of_class("vm", "true", both())).await.unwrap();
    assert_eq!((&spec("vm")["accessMode"], &spec("vm")["migratable"]), (&json!("rwx"), &json!(true)));
    cluster.create(of_class("scratch", "true", capability(Mode::SingleNodeWriter))).await.unwrap();
    assert_eq!(
        (&spec("scratch")["accessMode"], &spec("scratch")["migratable"]),
        (&json!("rwo"), &json!(null))
    );
    for (migratable, wrong) in [("false", both()), ("true", capability(Mode::MultiNodeMultiWriter))] {
        assert_eq!(cluster.create(of_class("x", migratable, wrong)).await, Err(Code::InvalidArgument));
    }
    assert_eq!(
        cluster.create(of_class("vm", "true", block(Mode::SingleNodeWriter))).await,
        Err(Code::AlreadyExists)
    );
    let validate = async |volume: &str| {
        let request = proto::ValidateVolumeCapabilitiesRequest {
            volume_id: volume.into(),
            volume_capabilities: vec![both()],
            ..Default::default()
        };
        let answer = cluster.controller().validate_volume_capabilities(request).await.unwrap().into_inner();
        answer.confirmed.is_some()
    };
    assert!(validate("vm").await && !validate("scratch").await);
    assert_eq!(cluster.publish_as("scratch", "n1", false, both()).await, Err(Code::InvalidArgument));

    cluster.publish_as("vm", "n1", false, both()).await.unwrap();
    assert_eq!(
        cluster.publish_as("vm", "n2", false, block(Mode::SingleNodeWriter)).await,
        Err(Code::FailedPrecondition)
    );
    for _ in 0..2 {
        cluster.publish_as("vm", "n2", false, both()).await.unwrap();
    }
    assert_eq!(cluster.publish_as("vm", "n3", false, both()).await, Err(Code::FailedPrecondition), "a third");
    let published = async || {
        let get = ControllerGetVolumeRequest { volume_id: "vm".into() };
        let seen =
            cluster.controller().controller_get_volume(get).await.unwrap().into_inner().status.unwrap();
        let mut nodes = seen.published_node_ids;
        nodes.sort();
        nodes
    };
    assert_eq!(published().await, ["n1", "n2"]);
    let grow = || ControllerExpandVolumeRequest {
        volume_id: "vm".into(),
        capacity_range: Some(CapacityRange { required_bytes: 128 * MIB, limit_bytes: 0 }),
        ..Default::default()
    };
    let refused = cluster.controller().controller_expand_volume(grow()).await.unwrap_err();
    assert!(
        refused.code() == Code::FailedPrecondition && refused.message().contains("migrates"),
        "{refused}"
    );
    cluster.unpublish("vm", "n1").await;
    assert_eq!(published().await, ["n2"]);
    let status = cluster.server.get("volumes", "vm").unwrap()["status"].clone();
    assert_eq!((&status["currentNodeID"], &status["currentMigrationNodeID"]), (&json!("n2"), &json!("")));
    cluster.controller().controller_expand_volume(grow()).await.unwrap();
    cluster.publish_as("vm", "n3", false, both()).await.unwrap();
    cluster.unpublish("vm", "n3").await;
    assert_eq!(published().await, ["n2"], "rolled back");
    cluster.unpublish("vm", "n2").await;
    cluster.delete("vm").await.unwrap();
}

#[tokio::test]
async fn a_snapshot_is_taken_once_keeps_its_volume_and_makes_another() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    cluster.create(wish("v", 64)).await.unwrap();
    cluster.create(wish("w", 64)).await.unwrap();
    let taken = cluster.snapshot("v", "s").await.unwrap();
    assert_eq!((taken.snapshot_id.as_str(), taken.ready_to_use), ("snap://v/s", true));
    assert_eq!(taken.creation_time.unwrap().seconds, 1_767_225_600);
    assert_eq!(cluster.snapshot("v", "s").await.unwrap().snapshot_id, "snap://v/s");
    assert_eq!(cluster.snapshot("w", "s").await, Err(Code::AlreadyExists));
    assert_eq!(cluster.snapshot("z", "t").await, Err(Code::NotFound));
    assert_eq!(cluster.delete("v").await, Err(Code::FailedPrecondition), "its snapshots would go with it");

    let of = |source| Some(VolumeContentSource { r#type: Some(source) });
    let snap = |id: &str| of(Source::Snapshot(SnapshotSource { snapshot_id: id.to_owned() }));
    let clone = CreateVolumeRequest { volume_content_source: snap("snap://v/s"), ..wish("clone", 10) };
    let made = cluster.create(clone.clone()).await.unwrap();
    assert_eq!((made.capacity_bytes, made.content_source), (64 * MIB, snap("snap://v/s")));
    assert_eq!(cluster.server.get("volumes", "clone").unwrap()["spec"]["dataSource"], "snap://v/s");
    assert_eq!(cluster.create(clone.clone()).await.unwrap().volume_id, "clone");
    let large = CreateVolumeRequest { volume_content_source: snap("snap://v/s"), ..wish("clone", 65) };
    assert_eq!(cluster.create(large).await, Err(Code::AlreadyExists));
    let volume = |id: &str| of(Source::Volume(VolumeSource { volume_id: id.to_owned() }));
    for (source, code) in [
        (snap("snap://v/none"), Code::NotFound),
        (snap("snap://w/s"), Code::NotFound),
        (snap("nonsense"), Code::NotFound),
        (volume("none"), Code::NotFound),
    ] {
        let request = CreateVolumeRequest { volume_content_source: source.clone(), ..wish("other", 65) };
        assert_eq!(cluster.create(request).await, Err(code), "{source:?}");
    }
    let small = Some(CapacityRange { required_bytes: MIB, limit_bytes: 60 * MIB });
    let small =
        CreateVolumeRequest { volume_content_source: volume("v"), capacity_range: small, ..wish("other", 1) };
    assert_eq!(cluster.create(small).await, Err(Code::OutOfRange));
    assert!(cluster.server.get("volumes", "other").is_none());

    let delete = |id: &str| DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() };
    for id in ["snap://v/s", "snap://v/s", "nonsense"] {
        cluster.controller().delete_snapshot(delete(id)).await.unwrap();
    }
    // Whoever did not hear that it was made asks again, and would leave it behind if what it was made of were missed.
    assert_eq!(cluster.create(clone.clone()).await.unwrap().volume_id, "clone");
    let other = CreateVolumeRequest { volume_content_source: snap("snap://v/t"), ..clone };
    assert_eq!(cluster.create(other).await, Err(Code::AlreadyExists));
    cluster.delete("v").await.unwrap();
}

#[tokio::test]
async fn a_snapshot_whose_data_is_gone_is_taken_anew_when_it_is_asked_for_again() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    cluster.create(wish("v", 64)).await.unwrap();
    cluster.snapshot("v", "s").await.unwrap();
    let first = cluster.server.get("snapshots", "s").unwrap();
    let lost = json!({ "readyToUse": false, "error": "the volume has no snapshot of this name" });
    cluster.server.apply("snapshots", "s", &json!({ "status": lost }));
    assert_eq!(cluster.snapshot("v", "s").await, Err(Code::Aborted));
    assert_eq!(cluster.snapshot("v", "s").await.unwrap().snapshot_id, "snap://v/s");
    let second = cluster.server.get("snapshots", "s").unwrap();
    assert_ne!(first["metadata"]["uid"], second["metadata"]["uid"]);
}

#[tokio::test]
async fn a_snapshot_whose_resource_was_lost_keeps_its_volume_all_the_same() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    cluster.create(wish("v", 64)).await.unwrap();
    cluster.snapshot("v", "s").await.unwrap();
    let labels = cluster.server.get("snapshots", "s").unwrap()["spec"]["labels"].clone();
    cluster.server.delete("snapshots", "s");
    // A manager makes the resource again from what the volume's engine tells, and knows no more.
    let again = json!({
        "apiVersion": "longhorn.io/v1beta2", "kind": "Snapshot",
        "metadata": { "labels": { "longhornvolume": "v" }, "annotations": { "longhorn.io/named-by-manager": "true" } },
        "spec": { "volume": "v", "createSnapshot": false },
        "status": { "readyToUse": true, "creationTime": "2026-01-01T00:00:00Z", "labels": labels },
    });
    cluster.server.apply("snapshots", "s", &again);
    assert_eq!(cluster.delete("v").await, Err(Code::FailedPrecondition), "its snapshots would go with it");
}

#[tokio::test]
async fn snapshots_without_their_volumes_label_keep_it_too_and_one_is_found_by_its_id() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    for volume in ["v", "w"] {
        cluster.create(wish(volume, 64)).await.unwrap();
    }
    for (volume, name) in [("v", "s"), ("w", "t"), ("w", "u")] {
        cluster.snapshot(volume, name).await.unwrap();
    }
    cluster.server.apply("snapshots", "s", &json!({ "metadata": { "labels": { "longhornvolume": null } } }));
    assert_eq!(cluster.delete("v").await, Err(Code::FailedPrecondition), "its snapshots would go with it");
    // No label can name a volume that somebody has given so long a name.
    let long = "x".repeat(100);
    let of_long = format!("snap://{long}/a");
    let spec = json!({ "volume": long, "createSnapshot": true });
    let a = json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Snapshot", "spec": spec });
    cluster.server.apply("snapshots", "a", &a);
    cluster.server.apply("snapshots", "a", &json!({ "status": { "readyToUse": true } }));
    for (id, volume, expected) in [
        ("snap://w/t", "", &["snap://w/t"][..]),
        ("snap://w/t", "v", &[]),
        ("snap://v/t", "", &[]),
        ("snap://v/none", "", &[]),
        ("nonsense", "", &[]),
        ("", "v", &["snap://v/s"]),
        ("", "w", &["snap://w/t", "snap://w/u"]),
        ("", &long, &[&of_long]),
        ("", "no label=", &[]),
        ("", "", &[&of_long, "snap://v/s", "snap://w/t", "snap://w/u"]),
    ] {
        let request = proto::ListSnapshotsRequest {
            snapshot_id: id.to_owned(),
            source_volume_id: volume.to_owned(),
            ..Default::default()
        };
        let listed = cluster.controller().list_snapshots(request).await.unwrap().into_inner().entries;
        let ids: Vec<_> = listed.into_iter().map(|e| e.snapshot.unwrap().snapshot_id).collect();
        assert_eq!(ids, expected, "{id:?} of {volume:?}");
    }
}

#[tokio::test]
async fn a_snapshot_that_goes_keeps_no_volume() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    cluster.create(wish("v", 64)).await.unwrap();
    cluster.snapshot("v", "s").await.unwrap();
    // Its volume's engine may never serve again: then nobody else lets it go.
    cluster.server.apply("snapshots", "s", &json!({ "metadata": { "finalizers": ["longhorn.io"] } }));
    assert_eq!(cluster.delete("v").await, Err(Code::FailedPrecondition));
    cluster.server.delete("snapshots", "s");
    cluster.delete("v").await.unwrap();
}

#[tokio::test]
async fn a_clone_says_what_it_waits_for_and_one_without_a_source_is_not_waited_for() {
    let cluster = Cluster::with_patience(IN_VAIN, 0, no_snapshots()).await;
    cluster.create(wish("v", 64)).await.unwrap();
    cluster.snapshot("v", "s").await.unwrap();
    let source = Source::Snapshot(SnapshotSource { snapshot_id: "snap://v/s".to_owned() });
    let request = || CreateVolumeRequest {
        volume_content_source: Some(VolumeContentSource { r#type: Some(source.clone()) }),
        ..wish("clone", 64)
    };
    let refused = async || cluster.controller().create_volume(request()).await.unwrap_err();
    cluster.hold_clones("SourceAway", "no replica can be read");
    let why = refused().await;
    assert!(why.code() == Code::Aborted && why.message().contains("no replica can be read"), "{why}");
    // A leader that has not heard of the snapshot yet is mistaken.
    cluster.hold_clones("SourceMissing", "snapshot s does not exist");
    assert_eq!(refused().await.code(), Code::Aborted);
    assert!(cluster.server.get("volumes", "clone").is_some());
    cluster.server.delete("snapshots", "s");
    let why = refused().await;
    assert!(why.code() == Code::NotFound && why.message().contains("snap://v/s"), "{why}");
    assert!(cluster.server.get("volumes", "clone").is_none(), "it would never be made");
}

#[tokio::test]
async fn a_volume_whose_old_data_lies_somewhere_waits_for_that_and_one_without_room_goes() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    let refused = async || cluster.controller().create_volume(wish("v", 64)).await.unwrap_err();
    // No other place has room for it, and somebody may have restored it before its replicas.
    cluster.hold_beginnings("DataLeft", "data of a volume of this name lies on nodes");
    for _ in 0..2 {
        let why = refused().await;
        assert!(why.code() == Code::Aborted && why.message().contains("lies on nodes"), "{why}");
        assert!(cluster.server.get("volumes", "v").is_some());
    }
    cluster.server.delete("core/configmaps", "beginnings");
    while cluster.server.get("volumes", "v").unwrap()["status"]["state"] == "creating" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    cluster.create(wish("v", 64)).await.unwrap();
    cluster.hold_beginnings("ReplicaSchedulingFailure", "no disk has room");
    cluster.server.delete("volumes", "v");
    assert_eq!(refused().await.code(), Code::ResourceExhausted);
    assert!(cluster.server.get("volumes", "v").is_none());
}

/// Deleted, and kept by somebody's finalizer.
async fn goes(cluster: &Cluster, kind: &str, name: &str) {
    cluster.server.apply(kind, name, &json!({ "metadata": { "finalizers": ["test/keeps"] } }));
    cluster.server.delete(kind, name);
    assert!(cluster.server.get(kind, name).unwrap()["metadata"]["deletionTimestamp"].is_string());
}

#[tokio::test]
async fn a_volume_that_is_larger_than_what_it_is_made_of_grows_once_it_holds_that() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    cluster.create(wish("v", 64)).await.unwrap();
    cluster.snapshot("v", "s").await.unwrap();
    let snapshot = Source::Snapshot(SnapshotSource { snapshot_id: "snap://v/s".to_owned() });
    let of = |mib: i64| CreateVolumeRequest {
        volume_content_source: Some(VolumeContentSource { r#type: Some(snapshot.clone()) }),
        ..wish("clone", mib)
    };
    for _ in 0..2 {
        assert_eq!(cluster.create(of(128)).await.unwrap().capacity_bytes, 128 * MIB);
        let volume = cluster.server.get("volumes", "clone").unwrap();
        assert_eq!(volume["spec"]["size"], json!((128 * MIB).to_string()));
    }
    let answer = cluster.create(of(64)).await.map(|volume| volume.capacity_bytes);
    assert_eq!(answer, Ok(128 * MIB), "it is within what is asked for");
    assert_eq!(cluster.create(of(130)).await, Err(Code::AlreadyExists));
    // The driver ended before it had asked for more.
    let copied = json!({ "spec": { "size": (64 * MIB).to_string() } });
    cluster.server.apply("volumes", "clone", &copied);
    assert_eq!(cluster.create(of(128)).await.unwrap().capacity_bytes, 128 * MIB);
    assert_eq!(
        cluster.server.get("volumes", "clone").unwrap()["spec"]["size"],
        json!((128 * MIB).to_string())
    );
}

/// To Kubernetes' provisioner a refused request has made nothing, so that nobody would delete what it has made.
#[tokio::test]
async fn a_clone_whose_growth_is_refused_is_not_left() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    cluster.create(wish("v", 64)).await.unwrap();
    let volume = Source::Volume(VolumeSource { volume_id: "v".to_owned() });
    let clone = CreateVolumeRequest {
        volume_content_source: Some(VolumeContentSource { r#type: Some(volume) }),
        ..wish("clone", 128)
    };
    // As the managers' webhook does it, which may know of more than the driver.
    cluster.server.fix("volumes", "clone");
    assert_eq!(cluster.create(clone).await, Err(Code::OutOfRange));
    assert!(cluster.server.get("volumes", "clone").is_none());
}

#[tokio::test]
async fn a_clone_of_a_snapshot_from_before_its_volume_grew_is_as_large_as_the_volume() {
    let cluster = Cluster::with_patience(IN_VAIN, 0, no_snapshots()).await;
    cluster.create(wish("v", 64)).await.unwrap();
    cluster.snapshot("v", "s").await.unwrap();
    let snapshot = Source::Snapshot(SnapshotSource { snapshot_id: "snap://v/s".to_owned() });
    let of = |limit_bytes: i64| CreateVolumeRequest {
        volume_content_source: Some(VolumeContentSource { r#type: Some(snapshot.clone()) }),
        capacity_range: Some(CapacityRange { required_bytes: 64 * MIB, limit_bytes }),
        ..wish("clone", 64)
    };
    let grows = |mib: i64| {
        cluster.server.apply("volumes", "v", &json!({ "spec": { "size": (mib * MIB).to_string() } }));
    };
    // What is copied is a replica of it, of the size that it has by now.
    grows(128);
    assert_eq!(cluster.create(of(100 * MIB)).await, Err(Code::OutOfRange));
    // It grows again before anything is copied: what waits is too small for ever, and goes.
    cluster.hold_clones("SourceLarger", "volume v has more bytes by now");
    assert_eq!(cluster.create(of(0)).await, Err(Code::Aborted));
    assert!(cluster.server.get("volumes", "clone").is_none());
    grows(192);
    cluster.server.delete("core/configmaps", "clones");
    assert_eq!(cluster.create(of(0)).await.unwrap().capacity_bytes, 192 * MIB);
    assert_eq!(cluster.create(of(0)).await.unwrap().capacity_bytes, 192 * MIB, "asked for again");
}

#[tokio::test]
async fn a_volume_of_a_strict_class_is_kept_where_its_first_pod_is_by_the_labels_that_are_told() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    let place = |node: &str, zone: &str| proto::Topology {
        segments: words(&[("kubernetes.io/hostname", node), ("zone", zone)]),
    };
    let (first, second) = (place("n2", "b"), place("n1", "a"));
    let asked = proto::TopologyRequirement {
        requisite: vec![second.clone(), first.clone()],
        preferred: vec![first, second],
    };
    let of = |name: &str, strict: &str| CreateVolumeRequest {
        parameters: words(&[("strictTopology", strict)]),
        accessibility_requirements: Some(asked.clone()),
        ..wish(name, 64)
    };
    let told = async |name: &str, strict: &str| {
        cluster.create(of(name, strict)).await.map(|volume| volume.accessible_topology)
    };
    assert_eq!(told("a", "true").await, Ok(Vec::new()), "no label says where that is");
    cluster.server.apply("settings", "csi-allowed-topology-keys", &json!({ "value": "zone, region" }));
    let there = proto::Topology { segments: words(&[("zone", "b")]) };
    assert_eq!(told("a", "True").await, Ok(vec![there]));
    assert_eq!(told("a", "false").await, Ok(Vec::new()));
    assert_eq!(told("b", "perhaps").await, Err(Code::InvalidArgument));
}

#[tokio::test]
async fn a_volume_without_room_for_a_snapshot_is_no_wrong_request() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    cluster.create(wish("v", 64)).await.unwrap();
    cluster.snapshot("v", "s").await.unwrap();
    let why = "admission webhook \"validator.longhorn.io\" denied the request: volume v has 1 snapshots";
    // Its engine's own word is told at once, and leaves nothing behind: it may be asked for again.
    for (name, code) in [("full", Code::ResourceExhausted), ("restless", Code::FailedPrecondition)] {
        for _ in 0..2 {
            assert_eq!(cluster.snapshot("v", name).await, Err(code));
            assert!(cluster.server.get("snapshots", name).is_none());
        }
    }
    cluster.server.refuse("snapshots", 422, "TooManySnapshots", why);
    assert_eq!(cluster.snapshot("v", "t").await, Err(Code::ResourceExhausted));
    assert_eq!(cluster.snapshot("v", "s").await.unwrap().snapshot_id, "snap://v/s", "asked for again");
    cluster.server.refuse("snapshots", 422, "Invalid", "a rule");
    assert_eq!(cluster.snapshot("v", "t").await, Err(Code::InvalidArgument));
}

#[tokio::test]
async fn what_goes_is_no_source_and_an_odd_time_hides_no_other_snapshot() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    cluster.create(wish("v", 64)).await.unwrap();
    for name in ["s", "t"] {
        cluster.snapshot("v", name).await.unwrap();
    }
    let odd = json!({ "status": { "creationTime": "some day" } });
    cluster.server.apply("snapshots", "t", &odd);
    let all = cluster.controller().list_snapshots(proto::ListSnapshotsRequest::default()).await.unwrap();
    assert_eq!(all.into_inner().entries.len(), 2);
    goes(&cluster, "snapshots", "s").await;
    let snapshot = Source::Snapshot(SnapshotSource { snapshot_id: "snap://v/s".to_owned() });
    let request = CreateVolumeRequest {
        volume_content_source: Some(VolumeContentSource { r#type: Some(snapshot) }),
        ..wish("clone", 64)
    };
    assert_eq!(cluster.create(request).await, Err(Code::NotFound));
    goes(&cluster, "volumes", "v").await;
    let volume = Source::Volume(VolumeSource { volume_id: "v".to_owned() });
    let request = CreateVolumeRequest {
        volume_content_source: Some(VolumeContentSource { r#type: Some(volume) }),
        ..wish("copy", 64)
    };
    assert_eq!(cluster.create(request).await, Err(Code::NotFound));
    assert!(cluster.server.get("volumes", "copy").is_none());
    assert_eq!(cluster.snapshot("v", "u").await, Err(Code::NotFound));
    assert!(cluster.server.get("snapshots", "u").is_none());
}

#[tokio::test]
async fn a_volume_grows_changes_and_is_listed() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    for name in ["a", "b", "c"] {
        cluster.create(wish(name, 64)).await.unwrap();
    }
    let grow = |mib: i64, limit: i64| ControllerExpandVolumeRequest {
        volume_id: "a".into(),
        capacity_range: Some(CapacityRange { required_bytes: mib * MIB, limit_bytes: limit * MIB }),
        ..Default::default()
    };
    for (mib, expected) in [(128, 128), (128, 128), (64, 128)] {
        let answer = cluster.controller().controller_expand_volume(grow(mib, 0)).await.unwrap().into_inner();
        assert_eq!((answer.capacity_bytes, answer.node_expansion_required), (expected * MIB, true));
    }
    let refused = cluster.controller().controller_expand_volume(grow(64, 64)).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange);
    let change = |volume: &str, pairs: &[(&str, &str)]| ControllerModifyVolumeRequest {
        volume_id: volume.into(),
        mutable_parameters: words(pairs),
        ..Default::default()
    };
    for (volume, pairs, code) in [
        ("a", &[("numberOfReplicas", "2"), ("snapshotMaxCount", "9")][..], Code::Ok),
        ("a", &[("fsType", "xfs")], Code::InvalidArgument),
        ("", &[], Code::InvalidArgument),
        ("z", &[("numberOfReplicas", "2")], Code::NotFound),
    ] {
        let answer = cluster.controller().controller_modify_volume(change(volume, pairs)).await;
        assert_eq!(answer.map_or_else(|e| e.code(), |_| Code::Ok), code, "{volume} {pairs:?}");
    }
    assert_eq!(cluster.server.get("volumes", "a").unwrap()["spec"]["snapshotMaxCount"], 9);
    // Where its replica is matters while it is used.
    let near = [("numberOfReplicas", "1"), ("dataLocality", "strict-local")];
    let nearby = [("numberOfReplicas", "2"), ("dataLocality", "best-effort")];
    cluster.publish("c", "n1", false).await.unwrap();
    let modified = async |pairs: &[(&str, &str)]| {
        let answer = cluster.controller().controller_modify_volume(change("c", pairs)).await;
        answer.map_or_else(|e| e.code(), |_| Code::Ok)
    };
    assert_eq!(modified(&near).await, Code::FailedPrecondition);
    assert_eq!(cluster.server.get("volumes", "c").unwrap()["spec"]["dataLocality"], json!(null));
    assert_eq!(modified(&nearby).await, Code::Ok);
    cluster.unpublish("c", "n1").await;
    let state = || cluster.server.get("volumes", "c").unwrap()["status"]["state"].clone();
    while state() != "detached" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(modified(&near).await, Code::Ok);
    assert_eq!(modified(&near).await, Code::Ok, "again");
    // Where no webhook fills it in, the volume says nothing of where its replicas are: nor does whoever changes it otherwise.
    let locality = || cluster.server.get("volumes", "a").unwrap()["spec"]["dataLocality"].clone();
    cluster.server.apply("volumes", "a", &json!({ "spec": { "dataLocality": null } }));
    for (pairs, expected) in [
        (&[("numberOfReplicas", "1")][..], json!(null)),
        (&[("dataLocality", "best-effort")], json!("best-effort")),
    ] {
        cluster.controller().controller_modify_volume(change("a", pairs)).await.unwrap();
        assert_eq!(locality(), expected);
    }
    let page = |token: &str| ListVolumesRequest { max_entries: 2, starting_token: token.into() };
    let first = cluster.controller().list_volumes(page("")).await.unwrap().into_inner();
    assert_eq!((first.entries.len(), first.next_token.as_str()), (2, "after:b"));
    let rest = cluster.controller().list_volumes(page(&first.next_token)).await.unwrap().into_inner();
    assert_eq!((rest.entries.len(), rest.next_token.as_str()), (1, ""));
}

#[tokio::test]
async fn however_many_volumes_there_are_and_whatever_they_say_a_list_of_them_can_be_received() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    // Why a volume has no place names every disk.
    let message = "node n has no room; ".repeat(300);
    let condition = json!({ "type": "Scheduled", "status": "False", "message": message });
    for n in 0..2500 {
        let volume = json!({
            "apiVersion": "longhorn.io/v1beta2", "kind": "Volume", "spec": { "size": (64 * MIB).to_string() },
            "status": { "state": "detached", "robustness": "unknown", "conditions": [condition] },
        });
        cluster.server.apply("volumes", &format!("v{n:04}"), &volume);
    }
    // Receivers take 4 MiB, unless they are told otherwise.
    let (mut token, mut seen) = (String::new(), 0);
    loop {
        let request = ListVolumesRequest { max_entries: 0, starting_token: token };
        let page = cluster.controller().list_volumes(request).await.unwrap().into_inner();
        let told = |e: &proto::list_volumes_response::Entry| {
            e.status.as_ref().unwrap().volume_condition.clone().unwrap().message
        };
        assert!(page.entries.iter().all(|e| told(e).contains("no room")));
        seen += page.entries.len();
        token = page.next_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(seen, 2500);
}

#[tokio::test]
async fn a_volume_that_cannot_grow_is_used_as_it_is() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    cluster.create(wish("a", 64)).await.unwrap();
    cluster.limit_room(1 << 30);
    // By hand: whoever asks the driver for so much is refused.
    cluster.server.apply("volumes", "a", &json!({ "spec": { "size": (20_i64 << 40).to_string() } }));
    let expand = async |bytes: i64| {
        let request = ControllerExpandVolumeRequest {
            volume_id: "a".into(),
            capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            ..Default::default()
        };
        cluster.controller().controller_expand_volume(request).await.map(drop).map_err(|e| e.code())
    };
    cluster.publish("a", "n1", false).await.unwrap();
    assert_eq!(expand(20 << 40).await, Err(Code::Internal));
    cluster.unpublish("a", "n1").await;
    cluster.publish("a", "n1", false).await.unwrap();
    // What failed before is tried again, and not taken for a failure of now.
    let server = cluster.server.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(1)).await;
        server.apply("core/configmaps", "room", &json!({ "data": { "bytes": 30_i64 << 40 } }));
    });
    assert_eq!(expand(20 << 40).await, Ok(()));
}

#[tokio::test]
async fn a_volume_grows_only_where_its_replicas_have_room() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    cluster.create(wish("a", 64)).await.unwrap();
    let node = json!({
        "spec": { "disks": { "d": { "path": "/d", "allowScheduling": true } } },
        "status": { "diskStatus": { "d": { "diskUUID": "u",
            "storageMaximum": 200 * MIB, "storageAvailable": 200 * MIB } } },
    });
    cluster.server.apply("nodes", "n1", &node);
    let replica = json!({
        "apiVersion": "longhorn.io/v1beta2", "kind": "Replica", "metadata": { "labels": { "longhornvolume": "a" } },
        "spec": { "volumeName": "a", "nodeID": "n1", "diskID": "u", "volumeSize": (64 * MIB).to_string() },
    });
    cluster.server.apply("replicas", "a-r-1", &replica);
    let expand = async |mib: i64| {
        let request = ControllerExpandVolumeRequest {
            volume_id: "a".into(),
            capacity_range: Some(CapacityRange { required_bytes: mib * MIB, limit_bytes: 0 }),
            ..Default::default()
        };
        cluster.controller().controller_expand_volume(request).await.map(drop)
    };
    let refused = expand(100 << 20).await.unwrap_err();
    assert!(
        refused.code() == Code::OutOfRange && refused.message().contains("n1/u"),
        "{refused}: the claim can ask for less only after that code"
    );
    let size = || cluster.server.get("volumes", "a").unwrap()["spec"]["size"].clone();
    assert_eq!(size(), json!((64 * MIB).to_string()), "nothing was asked for");
    expand(200).await.unwrap();
    assert_eq!(size(), json!((200 * MIB).to_string()));
}

/// Gives nodes disks of so many bytes.
fn give_disks(cluster: &Cluster, nodes: &[(&str, i64)]) {
    let holds = |kind: &str| json!({ "type": kind, "status": "True" });
    let conditions = json!([holds("Ready"), holds("Schedulable")]);
    for (node, bytes) in nodes {
        let disk = json!({
            "diskUUID": node, "storageMaximum": bytes, "storageAvailable": bytes, "conditions": conditions,
        });
        let resource = json!({
            "spec": { "allowScheduling": true, "disks": { "d": { "path": "/d", "allowScheduling": true } } },
            "status": { "conditions": conditions, "diskStatus": { "d": disk } },
        });
        cluster.server.apply("nodes", node, &resource);
    }
}

#[tokio::test]
async fn the_room_of_a_node_is_told_by_the_label_that_it_has() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    give_disks(&cluster, &[("n1", 100 * MIB), ("n2", 200 * MIB)]);
    let labels = json!({ "kubernetes.io/hostname": "host-of-n1" });
    cluster.server.apply("core/nodes", "n1", &json!({ "metadata": { "labels": labels } }));
    let room = async |host: &str| {
        let segments = words(&[("kubernetes.io/hostname", host)]);
        let request = proto::GetCapacityRequest {
            parameters: words(&[("dataLocality", "strict-local")]),
            accessible_topology: Some(proto::Topology { segments }),
            ..Default::default()
        };
        cluster.controller().get_capacity(request).await.unwrap().into_inner().available_capacity / MIB
    };
    for (host, mib) in [("host-of-n1", 100), ("n2", 200), ("nobody", 0)] {
        assert_eq!(room(host).await, mib, "{host}");
    }
}

/// The scheduler sends a pod to a node that tells of room for its volume, and a volume has whole pieces and a least size.
#[tokio::test]
async fn the_largest_volume_that_is_told_of_is_one_that_can_be_had() {
    for (bytes, file_system, largest) in [
        (400 * MIB, "ext4", 400 * MIB),
        (402 * MIB - 1, "ext4", 400 * MIB),
        (402 * MIB - 1, "xfs", 400 * MIB),
        (299 * MIB, "xfs", 0),
        (10 * MIB, "ext4", 10 * MIB),
        (10 * MIB - 1, "ext4", 0),
    ] {
        let cluster = Cluster::start(0, no_snapshots()).await;
        give_disks(&cluster, &[("n1", bytes)]);
        let parameters = words(&[("fsType", file_system)]);
        let request = proto::GetCapacityRequest { parameters, ..Default::default() };
        let told = cluster.controller().get_capacity(request).await.unwrap().into_inner();
        assert_eq!(told.maximum_volume_size, Some(largest), "{bytes} bytes for {file_system}");
    }
}

#[tokio::test]
async fn a_group_is_of_one_moment_or_refused() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    for name in ["a", "b"] {
        cluster.create(wish(name, 64)).await.unwrap();
    }
    let mut groups = GroupControllerClient::new(cluster.channel.clone());
    let request = |name: &str, of: &[&str]| proto::CreateVolumeGroupSnapshotRequest {
        name: name.into(),
        source_volume_ids: of.iter().map(|v| (*v).to_owned()).collect(),
        ..Default::default()
    };
    let group = groups.create_volume_group_snapshot(request("g", &["a", "b"])).await.unwrap().into_inner();
    let group = group.group_snapshot.unwrap();
    assert_eq!((group.snapshots.len(), group.ready_to_use), (2, true));
    assert!(group.snapshots.iter().all(|s| s.group_snapshot_id == group.group_snapshot_id));
    groups.create_volume_group_snapshot(request("g", &["b", "a"])).await.unwrap();
    let one =
        DeleteSnapshotRequest { snapshot_id: group.snapshots[0].snapshot_id.clone(), ..Default::default() };
    assert_eq!(cluster.controller().delete_snapshot(one).await.unwrap_err().code(), Code::InvalidArgument);
    for volume in ["a", "b"] {
        cluster.publish(volume, "n1", false).await.unwrap();
    }
    let refused = groups.create_volume_group_snapshot(request("h", &["a", "b"])).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    groups.create_volume_group_snapshot(request("i", &["a"])).await.unwrap();
    // Another group of that name, and the rest of one that was begun: its first part is of another moment.
    cluster.create(wish("c", 64)).await.unwrap();
    for of in [&["c"][..], &["a", "c"], &["a"]] {
        let refused = groups.create_volume_group_snapshot(request("g", of)).await.unwrap_err();
        assert_eq!(refused.code(), Code::AlreadyExists, "{of:?}");
    }
    let of_a = || {
        let all = cluster.server.all("snapshots");
        let is_it = |s: &&serde_json::Value| {
            s["metadata"]["labels"]["csi.longhorn.io/group"] == "i" && s["spec"]["volume"] == "a"
        };
        all.iter().find(is_it).unwrap()["metadata"].clone()
    };
    let old = json!({ "metadata": { "labels": { "taken": "before" } } });
    cluster.server.apply("snapshots", of_a()["name"].as_str().unwrap(), &old);
    cluster.unpublish("b", "n1").await;
    let whole = groups.create_volume_group_snapshot(request("i", &["a", "b"])).await.unwrap().into_inner();
    assert_eq!(whole.group_snapshot.unwrap().snapshots.len(), 2);
    assert!(of_a()["labels"]["taken"].is_null(), "it was taken at another time than the rest");
    // What somebody deletes is not handed out again.
    let name = of_a()["name"].as_str().unwrap().to_owned();
    cluster.server.apply("snapshots", &name, &old);
    goes(&cluster, "snapshots", &name).await;
    let server = cluster.server.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        server.apply("snapshots", &name, &json!({ "metadata": { "finalizers": null } }));
        server.delete("snapshots", &name);
    });
    groups.create_volume_group_snapshot(request("i", &["a", "b"])).await.unwrap();
    assert!(of_a()["labels"]["taken"].is_null() && of_a()["deletionTimestamp"].is_null(), "{}", of_a());
    let ids: Vec<String> = group.snapshots.iter().map(|s| s.snapshot_id.clone()).collect();
    let delete = |ids: &[String]| proto::DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: group.group_snapshot_id.clone(),
        snapshot_ids: ids.to_vec(),
        ..Default::default()
    };
    // One of its own is gone since the last attempt, which did not get to the other one.
    cluster.server.delete("snapshots", ids[0].rsplit_once('/').unwrap().1);
    let strange = cluster.snapshot("c", "strange").await.unwrap().snapshot_id;
    let refused = groups.delete_volume_group_snapshot(delete(&[ids[1].clone(), strange])).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    cluster.server.delete("snapshots", "strange");
    groups.delete_volume_group_snapshot(delete(&ids)).await.unwrap();
    groups.delete_volume_group_snapshot(delete(&ids)).await.unwrap();
    assert_eq!(cluster.server.all("snapshots").len(), 2);
    // One of its volumes has no room for it: nothing is left that nobody was told of.
    cluster.create(wish("full", 64)).await.unwrap();
    let refused = groups.create_volume_group_snapshot(request("j", &["b", "full"])).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert_eq!(cluster.server.all("snapshots").len(), 2);
    cluster.delete("full").await.unwrap();
}

#[tokio::test]
async fn the_driver_tells_who_it_is_and_what_is_not_on_its_node() {
    let cluster = Cluster::start(7, no_snapshots()).await;
    let mut identity = IdentityClient::new(cluster.channel.clone());
    let info = identity.get_plugin_info(proto::GetPluginInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.name, csi::DRIVER);
    assert_eq!(identity.probe(proto::ProbeRequest {}).await.unwrap().into_inner().ready, Some(true));
    let mut node = NodeClient::new(cluster.channel.clone());
    let info = node.node_get_info(proto::NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.node_id.as_str(), info.max_volumes_per_node), ("n1", 7));
    assert_eq!(info.accessible_topology.unwrap().segments["kubernetes.io/hostname"], "n1");
    // Where the label is another one the kubelet takes no driver that says otherwise.
    let labels = json!({ "kubernetes.io/hostname": "host-of-n1" });
    cluster.server.apply("core/nodes", "n1", &json!({ "metadata": { "labels": labels } }));
    let info = node.node_get_info(proto::NodeGetInfoRequest {}).await.unwrap().into_inner();
    let segments = info.accessible_topology.unwrap().segments;
    assert_eq!((info.node_id.as_str(), segments["kubernetes.io/hostname"].as_str()), ("n1", "host-of-n1"));
    let stage = |volume: &str| proto::NodeStageVolumeRequest {
        volume_id: volume.into(),
        staging_target_path: "/nowhere/staging".into(),
        volume_capability: Some(capability(Mode::SingleNodeWriter)),
        ..Default::default()
    };
    for (volume, code) in [("", Code::InvalidArgument), ("v", Code::NotFound), ("../null", Code::NotFound)] {
        assert_eq!(node.node_stage_volume(stage(volume)).await.unwrap_err().code(), code, "{volume:?}");
    }
}

/// A driver beside an API server, with a socket and a port of its own.
fn options(scratch: &std::path::Path, health: u16) -> Options {
    Options {
        endpoint: scratch.join("csi.sock"),
        node: "n1".to_owned(),
        namespace: "longhorn-system".to_owned(),
        most_volumes: 0,
        devices: scratch.join("dev"),
        registry: Some(scratch.to_owned()),
        kubelet_endpoint: None,
        health: Some(health),
        patience: None,
    }
}

#[tokio::test]
async fn the_socket_of_longhorns_own_driver_is_left_alone() {
    let (scratch, server) = (tempfile::tempdir().unwrap(), ApiServer::new(1));
    let labels =
        json!({ "metadata": { "labels": { "app": "longhorn-manager" } }, "status": { "phase": "Running" } });
    server.apply("core/pods", "longhorn-manager-x", &labels);
    let theirs = scratch.path().join("csi.sock");
    std::fs::write(&theirs, "theirs").unwrap();
    let running = run(options(scratch.path(), 1), server.client(), no_snapshots(), std::future::pending());
    let ended = tokio::time::timeout(Duration::from_secs(20), running).await;
    let refused = ended.expect("it serves beside Longhorn's own driver").unwrap_err();
    assert!(refused.to_string().contains("longhorn-manager-x"), "{refused}");
    assert_eq!(std::fs::read_to_string(&theirs).unwrap(), "theirs");
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 1, "no kubelet was told");
}

/// The status line and the body of `GET /healthz`.
async fn health(port: u16) -> Option<String> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer)
}

/// What probes hear of a driver once it answers; `None`: it has ended instead.
async fn answer_of<T>(port: u16, driver: &tokio::task::JoinHandle<T>) -> Option<String> {
    let until = Instant::now() + cluster::PATIENCE;
    loop {
        // Whoever else has the port may say nothing.
        let heard = tokio::time::timeout(Duration::from_secs(5), health(port)).await.ok().flatten();
        if driver.is_finished() {
            return None;
        }
        if heard.is_some() {
            return heard;
        }
        assert!(Instant::now() < until, "nobody answers probes");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn probes_hear_whether_the_socket_answers() {
    let (scratch, server) = (tempfile::tempdir().unwrap(), ApiServer::new(1));
    // Anybody else may have been given a port that was free just now.
    let mut first = None;
    let mut port = 0;
    for _ in 0..10 {
        port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let running =
            run(options(scratch.path(), port), server.client(), no_snapshots(), std::future::pending());
        let running = tokio::spawn(running);
        first = answer_of(port, &running).await;
        if first.is_some() {
            break;
        }
    }
    let first = first.expect("nobody answers probes");
    assert!(first.starts_with("HTTP/1.1 200 "), "{first}");
    // Somebody removed it: no kubelet reaches the driver any more, however well it feels.
    std::fs::remove_file(scratch.path().join("csi.sock")).unwrap();
    let then = health(port).await.unwrap();
    assert!(then.starts_with("HTTP/1.1 503 ") && then.contains("csi.sock"), "{then}");
}

/// Kubernetes has the volume attached to a node, or not any more.
fn in_kubernetes(cluster: &Cluster, volume: &str, node: &str, is_attached: bool) {
    let (name, persistent) = (format!("csi-{volume}-{node}"), format!("pv-{volume}"));
    let csi = json!({ "driver": csi::DRIVER, "volumeHandle": volume });
    cluster.server.apply("core/persistentvolumes", &persistent, &json!({ "spec": { "csi": csi } }));
    let spec = json!({
        "attacher": csi::DRIVER, "nodeName": node, "source": { "persistentVolumeName": persistent },
    });
    if is_attached {
        cluster.server.apply("storage/volumeattachments", &name, &json!({ "spec": spec }));
    } else {
        cluster.server.delete("storage/volumeattachments", &name);
    }
}

#[tokio::test]
async fn where_kubernetes_has_a_volume_is_asked_by_name_and_else_page_by_page() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    for other in 0..700 {
        in_kubernetes(&cluster, &format!("o{other}"), "n1", true);
    }
    cluster.create(wish("v", 64)).await.unwrap();
    in_kubernetes(&cluster, "v", "n2", true);
    cluster.publish("v", "n1", false).await.unwrap();
    let name = |node: &str| csi::names::ticket_id("v", csi::DRIVER, node);
    let by_name = |node: &str| {
        let source = json!({ "persistentVolumeName": "pv-v" });
        let spec = json!({ "attacher": csi::DRIVER, "nodeName": node, "source": source });
        cluster.server.apply("storage/volumeattachments", &name(node), &json!({ "spec": spec }));
    };
    by_name("n1");
    by_name("n2");
    assert_eq!(cluster.publish("v", "n2", false).await, Err(Code::FailedPrecondition));
    assert_eq!(cluster.delete("v").await, Err(Code::FailedPrecondition));
    for kind in ["core/persistentvolumes", "storage/volumeattachments"] {
        assert_eq!(cluster.server.at_once(kind), None, "{kind}: its own name says where it is");
    }
    // Somebody else's attachment has another name, and is found among all.
    cluster.server.delete("storage/volumeattachments", &name("n1"));
    in_kubernetes(&cluster, "v", "n1", true);
    assert_eq!(cluster.publish("v", "n2", false).await, Err(Code::FailedPrecondition));
    in_kubernetes(&cluster, "v", "n1", false);
    cluster.publish("v", "n2", false).await.unwrap();
    for kind in ["core/persistentvolumes", "storage/volumeattachments"] {
        assert_eq!(cluster.server.at_once(kind), Some(500), "{kind}");
    }
}

#[tokio::test]
async fn a_ticket_whose_attachment_kubernetes_has_no_more_keeps_nobody_from_the_volume() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    let tickets = |volume: &str| {
        let attachment = cluster.server.get("volumeattachments", volume).unwrap();
        let tickets = attachment["spec"]["attachmentTickets"].as_object().cloned().unwrap_or_default();
        tickets.values().map(|t| t["nodeID"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    cluster.create(wish("v", 64)).await.unwrap();
    in_kubernetes(&cluster, "v", "n1", true);
    in_kubernetes(&cluster, "other", "n1", true);
    cluster.publish("v", "n1", false).await.unwrap();
    // Somebody takes the attachment away by force; the driver is not asked to unpublish anything.
    in_kubernetes(&cluster, "v", "n1", false);
    assert_eq!(
        cluster.publish("v", "n2", false).await,
        Err(Code::FailedPrecondition),
        "whoever is no Kubernetes keeps its own account"
    );
    in_kubernetes(&cluster, "v", "n2", true);
    cluster.publish("v", "n2", false).await.unwrap();
    assert_eq!(tickets("v"), ["n2"]);
    // While Kubernetes has both, the one that it has first stays.
    in_kubernetes(&cluster, "v", "n1", true);
    assert_eq!(cluster.publish("v", "n1", false).await, Err(Code::FailedPrecondition));
    assert_eq!(cluster.delete("v").await, Err(Code::FailedPrecondition), "it is in use");
    in_kubernetes(&cluster, "v", "n2", false);
    in_kubernetes(&cluster, "v", "n1", false);
    cluster.delete("v").await.unwrap();
    // What a person attached stays in use, wherever Kubernetes has it.
    cluster.create(wish("w", 64)).await.unwrap();
    in_kubernetes(&cluster, "w", "n1", false);
    let ticket = json!({ "id": "ui", "type": "longhorn-api", "nodeID": "n1" });
    let wanted = json!({ "spec": { "attachmentTickets": { "ui": ticket } } });
    cluster.server.apply("volumeattachments", "w", &wanted);
    assert_eq!(cluster.delete("w").await, Err(Code::FailedPrecondition));
}

#[tokio::test]
async fn a_backup_of_longhorns_is_neither_restored_nor_said_to_be_deleted() {
    let cluster = Cluster::start(0, no_snapshots()).await;
    for handle in ["bak://pvc-1/backup-1", "bs://pvc-1/backup-1", "bi://image?backingImage=x"] {
        let delete = DeleteSnapshotRequest { snapshot_id: handle.into(), ..Default::default() };
        let refused = cluster.controller().delete_snapshot(delete).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{handle}");
        let source = SnapshotSource { snapshot_id: handle.into() };
        let source = VolumeContentSource { r#type: Some(Source::Snapshot(source)) };
        let request = CreateVolumeRequest { volume_content_source: Some(source), ..wish("restored", 64) };
        assert_eq!(cluster.create(request).await, Err(Code::FailedPrecondition), "{handle}");
    }
    let delete = DeleteSnapshotRequest { snapshot_id: "nonsense".into(), ..Default::default() };
    cluster.controller().delete_snapshot(delete).await.unwrap();
}
