//! A group of snapshots of real volumes through a driver that runs: one volume in use and one at rest, both as they were, in
//! volumes made of them; and that two in use are refused. Needs root and `CSI_ENDPOINT`, as `scripts/cluster env` prints it.

mod pod;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use csi::proto::csi as proto;
use pod::Pod;
use proto::group_controller_client::GroupControllerClient;
use proto::{
    CreateVolumeGroupSnapshotRequest, DeleteVolumeGroupSnapshotRequest, GetVolumeGroupSnapshotRequest,
    ListSnapshotsRequest,
};
use tonic::Code;

const BYTES: usize = 1 << 20;

fn write(device: &Path, word: &str) {
    let file = fs::OpenOptions::new().write(true).open(device).unwrap();
    file.write_all_at(word.repeat(BYTES / word.len()).as_bytes(), 0).unwrap();
    file.sync_all().unwrap();
}

fn starts_with(device: &Path, word: &str) -> bool {
    let mut bytes = vec![0; word.len()];
    fs::File::open(device).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    bytes == word.as_bytes()
}

#[tokio::test]
async fn a_group_is_taken_told_restored_and_deleted() {
    let Some(channel) = pod::driver().await else {
        println!("elsewhere groups: CSI_ENDPOINT does not name a driver; tests/cluster/sanity has one");
        return;
    };
    let place = tempfile::tempdir().unwrap();
    let mut pod = Pod::new(&channel, place.path(), "block");
    let mut groups = GroupControllerClient::new(channel.clone());
    let volumes = [pod.create("group-a", None).await, pod.create("group-b", None).await];
    let mut devices = Vec::new();
    for (volume, word) in volumes.iter().zip(["old-a---", "old-b---"]) {
        let device = pod.mount(volume, false).await;
        write(&device, word);
        devices.push(device);
    }
    let request = |name: &str| CreateVolumeGroupSnapshotRequest {
        name: name.to_owned(),
        source_volume_ids: volumes.to_vec(),
        ..Default::default()
    };
    let refused = groups.create_volume_group_snapshot(request("group")).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "two are in use: {refused}");
    pod.unmount(&volumes[1]).await;
    let group = groups.create_volume_group_snapshot(request("group")).await.unwrap().into_inner();
    let group = group.group_snapshot.unwrap();
    assert!(group.ready_to_use && group.snapshots.len() == 2 && group.creation_time.is_some());
    write(&devices[0], "new-a---");

    let get = GetVolumeGroupSnapshotRequest {
        group_snapshot_id: group.group_snapshot_id.clone(),
        ..Default::default()
    };
    let told = groups.get_volume_group_snapshot(get.clone()).await.unwrap().into_inner();
    assert_eq!(told.group_snapshot.as_ref(), Some(&group));
    let again = groups.create_volume_group_snapshot(request("group")).await.unwrap().into_inner();
    assert_eq!(again.group_snapshot.as_ref(), Some(&group), "it is taken once");
    let listed = pod.controller.list_snapshots(ListSnapshotsRequest::default()).await.unwrap().into_inner();
    let of_group = listed.entries.iter().filter_map(|e| e.snapshot.as_ref());
    let of_group = of_group.filter(|s| s.group_snapshot_id == group.group_snapshot_id).count();
    assert_eq!(of_group, 2);

    for (volume, word) in volumes.iter().zip(["old-a---", "old-b---"]) {
        let snapshot = group.snapshots.iter().find(|s| s.source_volume_id == *volume).unwrap();
        let restored = pod.create(&format!("{volume}-restored"), Some(&snapshot.snapshot_id)).await;
        let device = pod.mount(&restored, false).await;
        assert!(starts_with(&device, word), "{volume} was otherwise when the group was taken");
        pod.unmount(&restored).await;
        pod.delete(&restored).await;
    }
    pod.unmount(&volumes[0]).await;
    let delete = DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: group.group_snapshot_id.clone(),
        snapshot_ids: group.snapshots.iter().map(|s| s.snapshot_id.clone()).collect(),
        ..Default::default()
    };
    groups.delete_volume_group_snapshot(delete).await.unwrap();
    assert_eq!(groups.get_volume_group_snapshot(get).await.unwrap_err().code(), Code::NotFound);
    for volume in &volumes {
        pod.delete(volume).await;
    }
    println!("SHOWN a group of two real volumes: taken, told, restored, deleted");
}
