//! What a snapshot holds and where two differ, over an API server in memory and replicas that say what the test lays down:
//! that all of it arrives, also if a replica goes away in the middle, that the volume is attached for so long and no longer,
//! and what is refused.

mod cluster;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cluster::{Cluster, MIB, PATIENCE, wish};
use csi::proto::csi as proto;
use csi::{Holder, Page, ReadSnapshots, SnapshotMap};
use proto::identity_client::IdentityClient;
use proto::plugin_capability::Type;
use proto::plugin_capability::service::Type as Service;
use proto::snapshot_metadata_client::SnapshotMetadataClient;
use proto::{BlockMetadataType, GetMetadataAllocatedRequest, GetMetadataDeltaRequest};
use serde_json::json;
use tokio::sync::oneshot;
use tonic::Code;

/// What replicas say.
#[derive(Default)]
struct Replicas {
    /// By snapshot and base.
    maps: BTreeMap<(String, Option<String>), Vec<Range<u64>>>,
    /// How many pages each replica gives before it goes away.
    pages: BTreeMap<String, usize>,
    /// Whom the driver asked, with which key.
    asked: Vec<(String, String)>,
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Replicas>>);

impl ReadSnapshots for Fake {
    fn open(&self, at: &Holder, snapshot: &str, base: Option<&str>) -> Result<Box<dyn SnapshotMap>, String> {
        let mut all = self.0.lock().unwrap();
        all.asked.push((at.replica.clone(), at.key.clone()));
        let left = *all.pages.get(&at.replica).unwrap_or(&usize::MAX);
        let ranges = all.maps.get(&(snapshot.to_owned(), base.map(str::to_owned)));
        Ok(Box::new(Map { ranges: ranges.ok_or("no such snapshot")?.clone(), left }))
    }
}

struct Map {
    ranges: Vec<Range<u64>>,
    left: usize,
}

impl SnapshotMap for Map {
    fn page(&mut self, from: u64) -> Result<Page, String> {
        self.left = self.left.checked_sub(1).ok_or("the replica is gone")?;
        let mut rest = self.ranges[self.ranges.partition_point(|r| r.end <= from)..].iter().cloned();
        let ranges = rest.by_ref().take(if self.ranges.len() > 1000 { 1000 } else { 3 }).collect();
        Ok(Page { ranges, next: rest.next().map(|r| r.start) })
    }
}

/// A volume with two snapshots and three replicas, of which the last one is being filled.
async fn start() -> (Cluster, Fake) {
    start_patient(PATIENCE).await
}

/// With a driver that waits so long.
async fn start_patient(patience: Duration) -> (Cluster, Fake) {
    let fake = Fake::default();
    let cluster = Cluster::with_patience(patience, 0, Arc::new(fake.clone())).await;
    cluster.server.apply(
        "nodes",
        "n1",
        &json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } }),
    );
    for (volume, snapshots) in [("v", &["one", "two"][..]), ("w", &["other"])] {
        cluster.create(wish(volume, 64)).await.unwrap();
        for name in snapshots {
            cluster.snapshot(volume, name).await.unwrap();
        }
    }
    for (name, mode) in [("v-r-1", "RW"), ("v-r-2", "RW"), ("v-r-3", "WO")] {
        let replica = json!({
            "apiVersion": "longhorn.io/v1beta2", "kind": "Replica",
            "metadata": { "labels": { "longhornvolume": "v" } },
            "spec": { "volumeName": "v", "nodeID": "n1" },
            "status": { "address": "unix:/nowhere", "mapKey": "key", "mode": mode },
        });
        cluster.server.apply("replicas", name, &replica);
    }
    let map = |ranges: &[(u64, u64)]| ranges.iter().map(|(at, n)| at * 4096..(at + n) * 4096).collect();
    let many: Vec<(u64, u64)> = (0..10).map(|n| (n * 3, 2)).collect();
    let mut all = fake.0.lock().unwrap();
    all.maps.insert(("two".into(), None), map(&many));
    all.maps.insert(("one".into(), None), Vec::new());
    all.maps.insert(("two".into(), Some("one".into())), map(&[(1, 1), (5, 4), (16_383, 2)]));
    drop(all);
    (cluster, fake)
}

/// Offset and length of each tuple, and how many came in each message.
type Heard = (Vec<(i64, i64)>, Vec<usize>);

async fn allocated(cluster: &Cluster, id: &str, start: i64, most: i32) -> Result<Heard, Code> {
    let mut client = SnapshotMetadataClient::new(cluster.channel.clone());
    let request = GetMetadataAllocatedRequest {
        snapshot_id: id.to_owned(),
        starting_offset: start,
        max_results: most,
        ..GetMetadataAllocatedRequest::default()
    };
    let mut stream = client.get_metadata_allocated(request).await.map_err(|e| e.code())?.into_inner();
    let (mut tuples, mut sizes) = (Vec::new(), Vec::new());
    while let Some(message) = stream.message().await.map_err(|e| e.code())? {
        assert_eq!(message.block_metadata_type(), BlockMetadataType::VariableLength);
        assert_eq!(message.volume_capacity_bytes, 64 * MIB);
        sizes.push(message.block_metadata.len());
        tuples.extend(message.block_metadata.iter().map(|b| (b.byte_offset, b.size_bytes)));
    }
    Ok((tuples, sizes))
}

async fn delta(cluster: &Cluster, base: &str, target: &str, start: i64) -> Result<Vec<(i64, i64)>, Code> {
    let mut client = SnapshotMetadataClient::new(cluster.channel.clone());
    let request = GetMetadataDeltaRequest {
        base_snapshot_id: base.to_owned(),
        target_snapshot_id: target.to_owned(),
        starting_offset: start,
        ..GetMetadataDeltaRequest::default()
    };
    let mut stream = client.get_metadata_delta(request).await.map_err(|e| e.code())?.into_inner();
    let mut tuples = Vec::new();
    while let Some(message) = stream.message().await.map_err(|e| e.code())? {
        tuples.extend(message.block_metadata.iter().map(|b| (b.byte_offset, b.size_bytes)));
    }
    Ok(tuples)
}

fn tickets(cluster: &Cluster) -> usize {
    let attachment = cluster.server.get("volumeattachments", "v").unwrap();
    attachment["spec"]["attachmentTickets"].as_object().map_or(0, serde_json::Map::len)
}

/// Waits until no more tickets are left than these.
async fn let_go(cluster: &Cluster, most: usize) {
    let until = Instant::now() + PATIENCE;
    while tickets(cluster) > most {
        assert!(Instant::now() < until, "the volume is kept attached");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn everything_arrives_once_also_if_a_replica_goes_away() {
    let (cluster, fake) = start().await;
    let mut identity = IdentityClient::new(cluster.channel.clone());
    let told = identity.get_plugin_capabilities(proto::GetPluginCapabilitiesRequest {}).await.unwrap();
    let serves = |c: &proto::PluginCapability| matches!(&c.r#type, Some(Type::Service(s)) if s.r#type() == Service::SnapshotMetadataService);
    assert!(told.into_inner().capabilities.iter().any(serves));

    let expected: Vec<(i64, i64)> = (0..10).map(|n| (n * 3 * 4096, 8192)).collect();
    let (tuples, sizes) = allocated(&cluster, "snap://v/two", 0, 2).await.unwrap();
    assert_eq!(tuples, expected);
    assert!(sizes.iter().all(|n| *n <= 2), "{sizes:?}");
    let_go(&cluster, 0).await;
    fake.0.lock().unwrap().pages.insert("v-r-1".into(), 2);
    assert_eq!(allocated(&cluster, "snap://v/two", 0, 0).await.unwrap().0, expected);
    let asked: Vec<_> = fake.0.lock().unwrap().asked.drain(..).collect();
    let expected_of = ["v-r-1", "v-r-1", "v-r-2"].map(|replica| (replica.to_owned(), "key".to_owned()));
    assert_eq!(asked, expected_of);
    // On from within a range, which begins before that.
    assert_eq!(allocated(&cluster, "snap://v/two", 8 * 4096 - 1, 0).await.unwrap().0, expected[2..]);
    assert_eq!(allocated(&cluster, "snap://v/two", 64 * MIB, 0).await.unwrap().0, []);
    // Nothing is told by a message that tells the capacity.
    assert_eq!(allocated(&cluster, "snap://v/one", 0, 0).await.unwrap(), (vec![], vec![0]));
    // What lies behind the snapshot's end is not its own.
    let changes = delta(&cluster, "snap://v/one", "snap://v/two", 0).await.unwrap();
    assert_eq!(changes, [(4096, 4096), (5 * 4096, 4 * 4096), (16_383 * 4096, 4096)]);
    let_go(&cluster, 0).await;
    // In use, it stays where it is.
    cluster.publish("v", "n2", false).await.unwrap();
    allocated(&cluster, "snap://v/two", 0, 0).await.unwrap();
    assert_eq!(cluster.server.get("volumes", "v").unwrap()["status"]["currentNodeID"], "n2");
}

#[tokio::test]
async fn what_cannot_be_told_is_refused_and_nothing_is_kept() {
    let (cluster, fake) = start().await;
    for (id, start, most, code) in [
        ("", 0, 0, Code::InvalidArgument),
        ("snap://v/two", 0, -1, Code::InvalidArgument),
        ("snap://v/none", 0, 0, Code::NotFound),
        ("snap://w/two", 0, 0, Code::NotFound),
        ("nonsense", 0, 0, Code::NotFound),
        ("snap://v/two", -1, 0, Code::OutOfRange),
        ("snap://v/two", 64 * MIB + 1, 0, Code::OutOfRange),
    ] {
        assert_eq!(allocated(&cluster, id, start, most).await, Err(code), "{id} {start} {most}");
    }
    for (base, target, start, code) in [
        ("", "snap://v/two", 0, Code::InvalidArgument),
        ("snap://v/one", "", 0, Code::InvalidArgument),
        ("snap://w/other", "snap://v/two", 0, Code::InvalidArgument),
        ("snap://v/two", "snap://v/two", 0, Code::InvalidArgument),
        ("snap://v/none", "snap://v/two", 0, Code::NotFound),
        ("snap://v/one", "snap://v/none", 0, Code::NotFound),
        ("snap://v/one", "snap://v/two", 64 * MIB + 1, Code::OutOfRange),
    ] {
        assert_eq!(delta(&cluster, base, target, start).await, Err(code), "{base} {target} {start}");
    }
    assert!(fake.0.lock().unwrap().asked.is_empty());

    // Half of it and no error would be taken for all of it.
    fake.0.lock().unwrap().pages.extend([("v-r-1".into(), 1), ("v-r-2".into(), 1)]);
    assert_eq!(allocated(&cluster, "snap://v/two", 0, 0).await, Err(Code::Unavailable));
    let_go(&cluster, 0).await;
    let asked: Vec<String> = fake.0.lock().unwrap().asked.drain(..).map(|(replica, _)| replica).collect();
    assert_eq!(asked, ["v-r-1", "v-r-2"], "whoever is being filled knows nothing");
}

#[tokio::test]
async fn a_driver_that_starts_lets_go_what_the_one_before_it_kept() {
    let (cluster, fake) = start().await;
    let ticket = |node: &str| json!({ "type": "snapshot-controller", "nodeID": node });
    let left = json!({ "spec": { "attachmentTickets": {
        "snapshot-metadata-n1-7": ticket("n1"), "snapshot-metadata-n10-1": ticket("n1"), "csi-x": ticket("n1") } } });
    cluster.server.apply("volumeattachments", "v", &left);
    let _scratch = cluster.start_again(Arc::new(fake));
    let_go(&cluster, 2).await;
    let attachment = cluster.server.get("volumeattachments", "v").unwrap();
    let kept: Vec<_> = attachment["spec"]["attachmentTickets"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(kept, ["csi-x", "snapshot-metadata-n10-1"], "what is another driver's stays");

    // The other one's node is gone, and nobody will start there again.
    let pod = |node: &str| {
        json!({
            "metadata": { "labels": { "app.kubernetes.io/component": "csi-controller" } }, "spec": { "nodeName": node, "containers": [] },
        })
    };
    cluster.server.apply("core/pods", "here", &pod("n1"));
    let _scratch = cluster.start_again(Arc::new(Fake::default()));
    let_go(&cluster, 1).await;
    cluster.server.apply("core/pods", "there", &pod("n10"));
    cluster.server.apply("volumeattachments", "v", &left);
    let _scratch = cluster.start_again(Arc::new(Fake::default()));
    let_go(&cluster, 2).await;

    // One that cannot be changed keeps no other one.
    cluster.create(wish("a", 64)).await.unwrap();
    for volume in ["a", "v"] {
        cluster.server.apply("volumeattachments", volume, &left);
    }
    cluster.server.fix("volumeattachments", "a");
    let _scratch = cluster.start_again(Arc::new(Fake::default()));
    let_go(&cluster, 2).await;
}

/// Of two controllers on one node, as of a cluster of one, and while a Deployment is rolled out.
#[tokio::test]
async fn what_another_driver_of_the_node_keeps_stays_as_long_as_that_is_there() {
    let (cluster, _) = start().await;
    let ticket =
        |host: &str| json!({ "type": "snapshot-controller", "nodeID": "n1", "parameters": { "host": host } });
    let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim_end().to_owned();
    let left = json!({ "spec": { "attachmentTickets": {
        "snapshot-metadata-n1-1": ticket("there"), "snapshot-metadata-n1-2": ticket(&own) } } });
    cluster.server.apply("volumeattachments", "v", &left);
    let pod = json!({
        "metadata": { "labels": { "app.kubernetes.io/component": "csi-controller" } }, "spec": { "nodeName": "n1", "containers": [] },
    });
    cluster.server.apply("core/pods", "there", &pod);
    let _scratch = cluster.start_until(Arc::new(Fake::default()), std::future::pending()).await;
    let_go(&cluster, 1).await;
    let attachment = cluster.server.get("volumeattachments", "v").unwrap();
    assert!(attachment["spec"]["attachmentTickets"]["snapshot-metadata-n1-1"].is_object(), "{attachment}");
    // Another pod has taken its place.
    cluster.server.delete("core/pods", "there");
    let _scratch = cluster.start_until(Arc::new(Fake::default()), std::future::pending()).await;
    let_go(&cluster, 0).await;
}

#[tokio::test]
async fn a_driver_that_ends_lets_go_what_it_keeps() {
    let (cluster, fake) = start().await;
    cluster.hold_attachments("not now");
    let (stop, stopped) = oneshot::channel::<()>();
    let (channel, _scratch) = cluster.start_until(Arc::new(fake), async { drop(stopped.await) }).await;
    let request =
        GetMetadataAllocatedRequest { snapshot_id: "snap://v/two".to_owned(), ..Default::default() };
    let _waits = SnapshotMetadataClient::new(channel).get_metadata_allocated(request).await.unwrap();
    let until = Instant::now() + PATIENCE;
    while tickets(&cluster) == 0 {
        assert!(Instant::now() < until, "the volume is not asked for");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stop.send(()).unwrap();
    let_go(&cluster, 0).await;
}

/// A stream of what snapshot "two" holds, which nobody reads.
async fn unread(cluster: &Cluster) -> Result<tonic::Streaming<proto::GetMetadataAllocatedResponse>, Code> {
    let request =
        GetMetadataAllocatedRequest { snapshot_id: "snap://v/two".to_owned(), ..Default::default() };
    let mut client = SnapshotMetadataClient::new(cluster.channel.clone());
    client.get_metadata_allocated(request).await.map(tonic::Response::into_inner).map_err(|e| e.code())
}

#[tokio::test]
async fn a_reader_who_takes_nothing_keeps_no_volume_and_hears_that_it_is_not_all() {
    let (cluster, fake) = start_patient(Duration::from_secs(2)).await;
    // More than any buffer on the way holds.
    let many = (0..(64 << 20) / 64).map(|n| n * 64..n * 64 + 32).collect();
    fake.0.lock().unwrap().maps.insert(("two".into(), None), many);
    let mut stream = unread(&cluster).await.unwrap();
    let until = Instant::now() + PATIENCE;
    while tickets(&cluster) == 0 {
        assert!(Instant::now() < until, "the volume is not asked for");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let_go(&cluster, 0).await;
    let end = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => break None,
            Err(e) => break Some((e.code(), e.message().contains("from byte"))),
        }
    };
    assert_eq!(end, Some((Code::Aborted, true)));
}

#[tokio::test]
async fn sixteen_streams_at_a_time_and_no_more() {
    let (cluster, _fake) = start().await;
    cluster.hold_attachments("not now");
    let mut waiting = Vec::new();
    for _ in 0..16 {
        waiting.push(unread(&cluster).await.unwrap());
    }
    assert_eq!(unread(&cluster).await.err(), Some(Code::Aborted));
}

/// Nobody else takes its ticket off, and the node that it is attached to is drained by nobody before.
#[tokio::test]
async fn a_volume_is_let_go_of_when_the_api_server_is_back_that_was_away_when_its_stream_ended() {
    let (cluster, fake) = start_patient(Duration::from_secs(2)).await;
    let many = (0..(64 << 20) / 64).map(|n| n * 64..n * 64 + 32).collect();
    fake.0.lock().unwrap().maps.insert(("two".into(), None), many);
    let mut stream = unread(&cluster).await.unwrap();
    assert!(stream.message().await.unwrap().is_some());
    assert_eq!(tickets(&cluster), 1);
    cluster.server.fail(100);
    // Its reader has gone.
    drop(stream);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(tickets(&cluster), 1);
    cluster.server.fail(0);
    let_go(&cluster, 0).await;
}
