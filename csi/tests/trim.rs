//! A pod's file system is trimmed through a cluster that runs: the replicas' disks get back what the pod deleted. Needs root,
//! and `CSI_ENDPOINT` and `KUBECONFIG`, as `scripts/cluster env` prints them. `LONGHORNCTL`: the program that asks first.

mod pod;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client};
use lh_cluster::api::{NAMESPACE, Replica, Snapshot, Volume};
use lh_cluster::run::{RequestError, trim};
use pod::Pod;
use serde_json::json;

const MIB: u64 = 1 << 20;

/// What is written and deleted.
const FILE: usize = 100 << 20;

/// Longer than a request takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Bytes that all replicas of a volume take on their disks.
async fn allocated(client: &Client, volume: &str) -> u64 {
    let replicas: Api<Replica> = Api::namespaced(client.clone(), NAMESPACE);
    let of_volume = ListParams::default().fields(&format!("spec.volumeName={volume}"));
    let mut sum = 0;
    for replica in replicas.list(&of_volume).await.unwrap().items {
        let spec = replica.spec;
        let directory = Path::new(&spec.disk_path).join("replicas").join(&spec.data_directory_name);
        let files = fs::read_dir(directory).unwrap().flatten();
        let layers = files.filter(|f| f.path().extension().is_some_and(|e| e == "img"));
        // One may be folded away meanwhile.
        sum += layers.filter_map(|f| Some(f.metadata().ok()?.blocks() * 512)).sum::<u64>();
    }
    sum
}

fn sync(at: &Path) {
    assert!(Command::new("sync").arg("-f").arg(at).status().unwrap().success());
}

/// Asks for the file system to be trimmed. What was said, or why not.
async fn ask(client: &Client, volume: &str) -> Result<String, String> {
    if let Some(program) = std::env::var_os("LONGHORNCTL") {
        let asked =
            Command::new(program).args(["trim", "volume", volume, "--root", "/var/empty"]).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        return if asked.status.success() { Ok(text(&asked.stdout)) } else { Err(text(&asked.stderr)) };
    }
    let asked = trim(client.clone(), NAMESPACE, volume, PATIENCE).await;
    asked.map(|done| done.message).map_err(|e| e.to_string())
}

#[tokio::test]
async fn what_a_pod_deleted_is_given_back_by_the_replicas() {
    let Some(channel) = pod::driver().await else {
        println!("elsewhere trim: CSI_ENDPOINT does not name a driver; tests/cluster/sanity has one");
        return;
    };
    let client = Client::try_default().await.expect("KUBECONFIG names the cluster");
    let place = tempfile::tempdir().unwrap();
    let mut pod = Pod::new(&channel, place.path(), "ext4");
    let volume = pod.create("trim-ext4", None).await;
    assert!(ask(&client, &volume).await.unwrap_err().contains("not attached"));
    let at = pod.mount(&volume, false).await;
    let kept: Vec<u8> = (0..4 << 20).map(|i: u32| (i / 7).to_le_bytes()[0]).collect();
    fs::write(at.join("kept"), &kept).unwrap();
    fs::write(at.join("deleted"), vec![7; FILE]).unwrap();
    sync(&at);
    let full = allocated(&client, &volume).await;
    assert!(full > 3 * FILE as u64, "{} MiB of three replicas", full / MIB);

    // All of it is in a snapshot, which keeps it.
    let snapshot = pod.snapshot(&volume, "trim-snapshot").await;
    fs::remove_file(at.join("deleted")).unwrap();
    sync(&at);
    let said = ask(&client, &volume).await.unwrap();
    assert!(!said.contains("removed") && said.contains(" bytes of the volume"), "{said}");
    let with_snapshot = allocated(&client, &volume).await;
    assert!(with_snapshot > 3 * FILE as u64, "{} MiB: the snapshot has lost something", with_snapshot / MIB);

    // It goes where the volume says so.
    let volumes: Api<Volume> = Api::namespaced(client.clone(), NAMESPACE);
    let wish = json!({ "spec": { "unmapMarkSnapChainRemoved": "enabled" } });
    volumes.patch(&volume, &PatchParams::default(), &Patch::Merge(wish)).await.unwrap();
    let said = ask(&client, &volume).await.unwrap();
    assert!(said.contains("removed with them: trim-snapshot"), "{said}");
    let begun = Instant::now();
    let left = loop {
        let left = allocated(&client, &volume).await;
        if left < 60 * MIB || begun.elapsed() > PATIENCE {
            break left;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    assert!(left < 60 * MIB, "{} of {} MiB are left", left / MIB, full / MIB);
    let snapshots: Api<Snapshot> = Api::namespaced(client.clone(), NAMESPACE);
    let name = snapshot.rsplit('/').next().unwrap();
    while snapshots.get_opt(name).await.unwrap().is_some() {
        assert!(begun.elapsed() < PATIENCE, "the snapshot's resource stays");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(fs::read(at.join("kept")).unwrap() == kept, "a file that nobody deleted has other bytes");
    pod.unmount(&volume).await;
    pod.delete(&volume).await;

    let mut pod = Pod::new(&channel, place.path(), "block");
    let device = pod.create("trim-block", None).await;
    pod.mount(&device, false).await;
    assert!(ask(&client, &device).await.unwrap_err().contains("used as a device"));
    pod.unmount(&device).await;
    pod.delete(&device).await;
    let missing = trim(client, NAMESPACE, "trim-nothing", PATIENCE).await;
    assert!(matches!(missing, Err(RequestError::Missing(_))), "{missing:?}");
    println!(
        "SHOWN trim: {} MiB of three replicas, {} once what was deleted is trimmed, {} without its snapshot",
        full / MIB,
        with_snapshot / MIB,
        left / MIB
    );
}
