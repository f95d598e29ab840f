//! What the driver does with a node's devices and mounts, with loop devices in the place of volumes: devices that are lost,
//! that are for reading in one place and for writing in another, that do not grow, that are trimmed. Needs root and loop
//! devices.

mod cluster;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::{Cluster, MIB, block, capability};
use control::proto::node::file_systems_client::FileSystemsClient;
use control::proto::node::{TrimRequest, TrimState};
use csi::proto::csi as proto;
use csi::{Holder, ReadSnapshots, SnapshotMap};
use proto::node_client::NodeClient;
use proto::volume_capability::access_mode::Mode;
use proto::volume_capability::{AccessType, MountVolume};
use proto::{
    CapacityRange, NodeExpandVolumeRequest, NodeGetVolumeStatsRequest, NodePublishVolumeRequest,
    NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability,
};
use serde_json::json;
use tonic::transport::Channel;
use tonic::{Code, Status};

const VOLUME: &str = "v";

/// Nobody reads snapshots here.
struct Nothing;

impl ReadSnapshots for Nothing {
    fn open(&self, _: &Holder, _: &str, _: Option<&str>) -> Result<Box<dyn SnapshotMap>, String> {
        Err("there are none".to_owned())
    }
}

/// Runs a program. What it says, or why not.
fn run(line: &[&str]) -> Result<String, String> {
    let output = Command::new(line[0]).args(&line[1..]).output().map_err(|e| format!("{line:?}: {e}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// A file as a block device.
struct Loop {
    file: PathBuf,
    device: String,
}

impl Loop {
    /// Of a file that is there, or of a new one.
    fn of(file: PathBuf) -> Result<Self, String> {
        if !file.exists() {
            File::create(&file).unwrap().set_len(64 << 20).unwrap();
        }
        let device = run(&["losetup", "--find", "--show", file.to_str().unwrap()])?;
        Ok(Self { file, device })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run(&["losetup", "--detach", &self.device]);
    }
}

/// How long a mount may be in use by nobody.
const BUSY: Duration = Duration::from_secs(20);

/// A child that another test is just starting has a copy of what this one has open, until it is another program. Kubelets ask again, too.
async fn is_let_go(refused: &Status, until: Instant) {
    assert!(refused.message().contains("target is busy") && Instant::now() < until, "{refused}");
    tokio::time::sleep(Duration::from_millis(10)).await;
}

/// A driver, its node, and a kubelet's directories for one volume. What is left mounted goes at the end.
struct Kubelet {
    cluster: Cluster,
    node: NodeClient<Channel>,
    capability: VolumeCapability,
    /// What the volume's class says.
    class: HashMap<String, String>,
    /// Whether the volume as a whole is published for reading only.
    read_only: bool,
}

impl Kubelet {
    /// With a new device for the volume; `None`, and why is told: this machine has none to give.
    async fn start(test: &str, capability: VolumeCapability) -> Option<(Self, Loop)> {
        let cluster = Cluster::start(0, Arc::new(Nothing)).await;
        let device = match Loop::of(cluster.place().join("a")) {
            _ if !nix::unistd::geteuid().is_root() => Err("needs root".to_owned()),
            made => made,
        };
        match device {
            Ok(device) => {
                let node = NodeClient::new(cluster.channel.clone());
                let kubelet = Self { cluster, node, capability, class: HashMap::new(), read_only: false };
                kubelet.is_now(&device);
                Some((kubelet, device))
            }
            Err(why) => {
                println!("SKIP {test}: {why}");
                None
            }
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.cluster.place().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn device(&self) -> String {
        self.path("dev").join(VOLUME).display().to_string()
    }

    /// Makes the volume's node that of a device, as engines do.
    fn is_now(&self, device: &Loop) {
        let numbers = run(&["stat", "-c", "%Hr %Lr", &device.device]).unwrap();
        let (major, minor) = numbers.split_once(' ').unwrap();
        fs::create_dir_all(self.path("dev")).unwrap();
        let beside = self.text("dev/.beside");
        run(&["mknod", &beside, "b", major, minor]).unwrap();
        fs::rename(beside, self.device()).unwrap();
    }

    fn context(&self) -> HashMap<String, String> {
        cluster::words(&[("readonly", if self.read_only { "true" } else { "false" })])
    }

    async fn stage(&mut self) -> Result<(), Code> {
        let request = NodeStageVolumeRequest {
            volume_id: VOLUME.into(),
            staging_target_path: self.text("staging"),
            volume_capability: Some(self.capability.clone()),
            volume_context: self.class.clone(),
            publish_context: self.context(),
            ..Default::default()
        };
        self.node.node_stage_volume(request).await.map(drop).map_err(|e| e.code())
    }

    async fn publish(&mut self, target: &str, readonly: bool) -> Result<(), Code> {
        let request = NodePublishVolumeRequest {
            volume_id: VOLUME.into(),
            staging_target_path: self.text("staging"),
            target_path: self.text(target),
            volume_capability: Some(self.capability.clone()),
            volume_context: self.class.clone(),
            publish_context: self.context(),
            readonly,
            ..Default::default()
        };
        self.node.node_publish_volume(request).await.map(drop).map_err(|e| e.code())
    }

    async fn unpublish(&mut self, target: &str) {
        let request = NodeUnpublishVolumeRequest { volume_id: VOLUME.into(), target_path: self.text(target) };
        let until = Instant::now() + BUSY;
        while let Err(refused) = self.node.node_unpublish_volume(request.clone()).await {
            is_let_go(&refused, until).await;
        }
    }

    async fn unstage(&mut self) {
        let request =
            NodeUnstageVolumeRequest { volume_id: VOLUME.into(), staging_target_path: self.text("staging") };
        let until = Instant::now() + BUSY;
        while let Err(refused) = self.node.node_unstage_volume(request.clone()).await {
            is_let_go(&refused, until).await;
        }
    }

    /// Has the kernel stop the file system that is staged.
    fn stop_as_for_an_error(&self, kind: &str) {
        let staging = self.text("staging");
        match kind {
            "ext4" => run(&["mount", "-o", "remount,abort", &staging]).unwrap(),
            _ => run(&["xfs_io", "-x", "-c", "shutdown", &staging]).unwrap(),
        };
        assert!(fs::write(self.path("staging/more"), "x").is_err(), "{kind} goes on");
    }

    /// Whether something is wrong with the volume at a place.
    async fn is_abnormal(&mut self, target: &str) -> bool {
        let request = NodeGetVolumeStatsRequest {
            volume_id: VOLUME.into(),
            volume_path: self.text(target),
            ..Default::default()
        };
        let told = self.node.node_get_volume_stats(request).await.unwrap().into_inner();
        told.volume_condition.unwrap().abnormal
    }

    /// Has the file system trimmed, and waits for the end of that.
    async fn trim(&self, request: &str) -> Result<TrimState, (Code, String)> {
        loop {
            let state = self.begin_to_trim(VOLUME, request).await?;
            if !state.running {
                return Ok(state);
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    async fn begin_to_trim(&self, volume: &str, request: &str) -> Result<TrimState, (Code, String)> {
        let request = TrimRequest { volume: volume.to_owned(), request: request.to_owned() };
        let answer = FileSystemsClient::new(self.cluster.channel.clone()).trim(request).await;
        answer.map(|a| a.into_inner()).map_err(|e| (e.code(), e.message().to_owned()))
    }

    /// What is mounted at and below a name, by its device.
    fn mounted(&self, name: &str) -> Vec<String> {
        let (path, table) = (self.text(name), fs::read_to_string("/proc/self/mountinfo").unwrap());
        let fields = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        fields.filter(|f| f[4].starts_with(&path)).map(|f| f[2].to_owned()).collect()
    }

    /// How the kernel numbers the volume's device.
    fn numbers(&self) -> String {
        run(&["stat", "-c", "%Hr:%Lr", &self.device()]).unwrap()
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        for place in ["target-1", "target-2", ".target-1.readonly", ".target-2.readonly", "staging"] {
            while !self.mounted(place).is_empty() {
                if run(&["umount", "--lazy", &self.text(place)]).is_err() {
                    break;
                }
            }
        }
    }
}

#[tokio::test]
async fn a_pod_that_comes_after_a_lost_device_gets_the_volume_of_the_new_one() {
    let test = "a_pod_that_comes_after_a_lost_device_gets_the_volume_of_the_new_one";
    let Some((mut kubelet, first)) = Kubelet::start(test, capability(Mode::SingleNodeWriter)).await else {
        return;
    };
    assert_eq!(kubelet.publish("target-1", false).await, Err(Code::FailedPrecondition), "nobody staged it");
    kubelet.stage().await.unwrap();
    kubelet.publish("target-1", false).await.unwrap();
    fs::write(kubelet.path("target-1/data"), "kept").unwrap();
    run(&["sync", "-f", &kubelet.text("target-1")]).unwrap();
    kubelet.publish("target-2", false).await.unwrap();
    kubelet.unpublish("target-2").await;
    assert_eq!(kubelet.mounted("staging"), [kubelet.numbers()], "what serves the volume stays");

    // The bytes are the same, and the device is another one; a pod still has the first one.
    let copy = kubelet.path("b");
    fs::copy(&first.file, &copy).unwrap();
    let second = Loop::of(copy).unwrap();
    let lost = kubelet.numbers();
    kubelet.is_now(&second);
    drop(first);
    kubelet.publish("target-2", false).await.unwrap();
    assert_eq!(fs::read_to_string(kubelet.path("target-2/data")).unwrap(), "kept");
    assert_eq!(kubelet.mounted("target-2"), [kubelet.numbers()]);
    assert_eq!(kubelet.mounted("staging"), [kubelet.numbers()], "what the first one left is gone");
    assert_eq!(kubelet.mounted("target-1"), [lost], "that pod is not touched");
    // It was told again to a pod whose place had been made before.
    kubelet.publish("target-1", false).await.unwrap();
    assert_eq!(kubelet.mounted("target-1"), [kubelet.numbers()]);
    for target in ["target-1", "target-2"] {
        kubelet.unpublish(target).await;
    }
    kubelet.unstage().await;
    assert!(kubelet.mounted("").is_empty());
}

#[tokio::test]
async fn what_a_lost_device_left_is_no_reason_not_to_stage_and_nothing_is_formatted_again() {
    let test = "what_a_lost_device_left_is_no_reason_not_to_stage_and_nothing_is_formatted_again";
    let Some((mut kubelet, first)) = Kubelet::start(test, capability(Mode::SingleNodeWriter)).await else {
        return;
    };
    kubelet.stage().await.unwrap();
    let empty = Loop::of(kubelet.path("b")).unwrap();
    kubelet.is_now(&empty);
    // The file system that was there cannot be gone: whoever says so is wrong.
    assert_eq!(kubelet.stage().await, Err(Code::FailedPrecondition));
    kubelet.is_now(&first);
    kubelet.stage().await.unwrap();
    kubelet.is_now(&empty);
    assert_eq!(kubelet.publish("target-1", false).await, Err(Code::FailedPrecondition));
    let mut beginning = vec![1; 1 << 20];
    File::open(&empty.file).unwrap().read_exact(&mut beginning).unwrap();
    assert!(beginning.iter().all(|b| *b == 0), "it was formatted");
    kubelet.is_now(&first);
    kubelet.stage().await.unwrap();
    assert_eq!(kubelet.mounted("staging"), [kubelet.numbers()]);
    kubelet.unstage().await;

    // What is somebody else's stays where it is.
    run(&["mount", "-t", "tmpfs", "other", &kubelet.text("staging")]).unwrap();
    assert_eq!(kubelet.stage().await, Err(Code::FailedPrecondition));
    assert_eq!(kubelet.publish("target-1", false).await, Err(Code::FailedPrecondition));
    assert_eq!(kubelet.mounted("staging").len(), 1);
}

fn write(at: &Path) -> std::io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(at)?;
    file.write_all(&[7; 4096])?;
    file.sync_all()
}

#[tokio::test]
async fn who_reads_a_device_keeps_nobody_from_writing_to_it() {
    let test = "who_reads_a_device_keeps_nobody_from_writing_to_it";
    let Some((mut kubelet, device)) = Kubelet::start(test, block(Mode::SingleNodeWriter)).await else {
        return;
    };
    let (writer, reader) = (kubelet.path("target-1"), kubelet.path("target-2"));
    kubelet.stage().await.unwrap();
    for _ in 0..2 {
        kubelet.publish("target-1", false).await.unwrap();
    }
    assert_eq!(kubelet.publish("target-1", true).await, Err(Code::AlreadyExists));
    assert_eq!(kubelet.publish("target-2", true).await, Err(Code::FailedPrecondition));
    write(&writer).unwrap();
    kubelet.unpublish("target-1").await;
    for _ in 0..2 {
        kubelet.publish("target-2", true).await.unwrap();
    }
    kubelet.stage().await.unwrap();
    assert!(write(&reader).is_err(), "{} takes writes", device.device);
    assert_eq!(kubelet.publish("target-1", false).await, Err(Code::FailedPrecondition));
    kubelet.unpublish("target-2").await;
    // One for reading after the other one leaves nothing behind.
    kubelet.publish("target-1", false).await.unwrap();
    write(&writer).unwrap();
    kubelet.publish("target-2", false).await.unwrap();
    write(&reader).unwrap();
    for target in ["target-1", "target-2"] {
        kubelet.unpublish(target).await;
    }
    kubelet.unstage().await;

    kubelet.read_only = true;
    kubelet.stage().await.unwrap();
    for target in ["target-1", "target-2"] {
        kubelet.publish(target, false).await.unwrap();
    }
    assert!(write(&writer).is_err() && write(&reader).is_err(), "the volume is for reading only");
}

/// The options of the mount at a name itself.
fn options(kubelet: &Kubelet, name: &str) -> String {
    let (path, table) = (kubelet.text(name), fs::read_to_string("/proc/self/mountinfo").unwrap());
    let mut fields = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    fields.rfind(|f| f[4] == path).map(|f| f[5].to_owned()).unwrap_or_default()
}

#[tokio::test]
async fn what_is_for_reading_alone_never_takes_writes_however_it_was_begun() {
    let test = "what_is_for_reading_alone_never_takes_writes_however_it_was_begun";
    let Some((mut kubelet, _device)) = Kubelet::start(test, capability(Mode::SingleNodeWriter)).await else {
        return;
    };
    kubelet.stage().await.unwrap();
    // Whoever published it was ended after the first of two steps: beside the place, where no pod is.
    let left = kubelet.text(".target-1.readonly");
    fs::create_dir(&left).unwrap();
    run(&["mount", "--bind", &kubelet.text("staging"), &left]).unwrap();
    for _ in 0..2 {
        kubelet.publish("target-1", true).await.unwrap();
    }
    assert!(options(&kubelet, "target-1").split(',').any(|o| o == "ro"), "{}", options(&kubelet, "target-1"));
    assert!(fs::write(kubelet.path("target-1/data"), "x").is_err());
    assert!(kubelet.mounted(".target-1.readonly").is_empty() && !Path::new(&left).exists());
    assert_eq!(kubelet.publish("target-1", false).await, Err(Code::AlreadyExists));
    fs::write(kubelet.path("staging/data"), "x").unwrap();
    kubelet.publish("target-2", false).await.unwrap();
    fs::write(kubelet.path("target-2/data"), "y").unwrap();
    // The pod goes before it was published again.
    fs::create_dir(kubelet.path(".target-2.readonly")).unwrap();
    run(&["mount", "--bind", &kubelet.text("staging"), &kubelet.text(".target-2.readonly")]).unwrap();
    for target in ["target-1", "target-2"] {
        kubelet.unpublish(target).await;
    }
    kubelet.unstage().await;
    assert!(kubelet.mounted("").is_empty());
}

#[tokio::test]
async fn options_of_the_class_count_for_whoever_only_reads_too() {
    let test = "options_of_the_class_count_for_whoever_only_reads_too";
    let flags = ["nosuid", "nodev", "noexec", "noatime"];
    let mount = MountVolume { mount_flags: flags.map(str::to_owned).to_vec(), ..MountVolume::default() };
    let capability = VolumeCapability {
        access_type: Some(AccessType::Mount(mount)),
        ..capability(Mode::SingleNodeWriter)
    };
    let Some((mut kubelet, _device)) = Kubelet::start(test, capability).await else { return };
    kubelet.stage().await.unwrap();
    for (target, readonly) in [("target-1", true), ("target-2", false)] {
        kubelet.publish(target, readonly).await.unwrap();
        let told = options(&kubelet, target);
        let has = |flag: &str| told.split(',').any(|o| o == flag);
        assert!(flags.into_iter().all(has) && has("ro") == readonly, "{target}: {told}");
    }
    for target in ["target-1", "target-2"] {
        kubelet.unpublish(target).await;
    }
    kubelet.unstage().await;
}

#[tokio::test]
async fn what_is_for_one_pod_is_published_in_one_place() {
    let test = "what_is_for_one_pod_is_published_in_one_place";
    let by_class = |capability| (capability, HashMap::from([("exclusive".to_owned(), "true".to_owned())]));
    for (capability, class) in [
        (capability(Mode::SingleNodeSingleWriter), HashMap::new()),
        (block(Mode::SingleNodeSingleWriter), HashMap::new()),
        by_class(capability(Mode::SingleNodeWriter)),
        by_class(block(Mode::SingleNodeWriter)),
    ] {
        let Some((mut kubelet, _device)) = Kubelet::start(test, capability).await else { return };
        kubelet.class = class;
        kubelet.stage().await.unwrap();
        for _ in 0..2 {
            kubelet.publish("target-1", false).await.unwrap();
        }
        assert_eq!(kubelet.publish("target-2", false).await, Err(Code::FailedPrecondition));
        kubelet.unpublish("target-1").await;
        kubelet.publish("target-2", false).await.unwrap();
        kubelet.unpublish("target-2").await;
        kubelet.unstage().await;
    }
}

#[tokio::test]
async fn a_pod_is_not_kept_from_a_volume_that_does_not_grow() {
    let test = "a_pod_is_not_kept_from_a_volume_that_does_not_grow";
    let Some((mut kubelet, device)) = Kubelet::start(test, capability(Mode::SingleNodeWriter)).await else {
        return;
    };
    kubelet.stage().await.unwrap();
    kubelet.publish("target-1", false).await.unwrap();
    let volume = json!({
        "apiVersion": "longhorn.io/v1beta2", "kind": "Volume", "spec": { "size": (64 * MIB).to_string() },
        "status": { "conditions": [{ "type": "Expansion", "status": "False", "reason": "Failed", "message": "no room" }] },
    });
    kubelet.cluster.server.apply("volumes", VOLUME, &volume);
    let request = NodeExpandVolumeRequest {
        volume_id: VOLUME.into(),
        volume_path: kubelet.text("target-1"),
        capacity_range: Some(CapacityRange { required_bytes: 1 << 40, limit_bytes: 0 }),
        ..Default::default()
    };
    let refused = kubelet.node.node_expand_volume(request).await.unwrap_err();
    // The kubelet goes on without after this code, and after no other.
    assert!(
        refused.code() == Code::FailedPrecondition && refused.message().contains("no room"),
        "{refused} {}",
        device.device
    );
}

/// Bytes that a file takes on its disk.
fn allocated(file: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(file).unwrap().blocks() * 512
}

/// A larger device in the place of the one that a kubelet began with: sparse, and empty.
fn enlarge(kubelet: &Kubelet, bytes: u64) -> Loop {
    let file = kubelet.path("large");
    File::create(&file).unwrap().set_len(bytes).unwrap();
    let device = Loop::of(file).unwrap();
    kubelet.is_now(&device);
    device
}

#[tokio::test]
async fn what_a_file_system_does_not_use_is_given_back_once_for_a_request() {
    let test = "what_a_file_system_does_not_use_is_given_back_once_for_a_request";
    let Some((mut kubelet, _small)) = Kubelet::start(test, capability(Mode::SingleNodeWriter)).await else {
        return;
    };
    // More than one piece, and the file system ends before its device.
    let device = enlarge(&kubelet, 5 << 30);
    kubelet.stage().await.unwrap();
    kubelet.publish("target-1", false).await.unwrap();
    File::options().write(true).open(&device.file).unwrap().set_len(13 << 30).unwrap();
    run(&["losetup", "--set-capacity", &device.device]).unwrap();
    fs::write(kubelet.path("target-1/data"), vec![7; 24 << 20]).unwrap();
    run(&["sync", "-f", &kubelet.text("target-1")]).unwrap();
    fs::remove_file(kubelet.path("target-1/data")).unwrap();
    run(&["sync", "-f", &kubelet.text("target-1")]).unwrap();
    let before = allocated(&device.file);
    let state = kubelet.trim("1").await.unwrap();
    assert!(state.error.is_empty() && state.bytes > 9 << 29 && state.bytes < 5 << 30, "{state:?}");
    let after = allocated(&device.file);
    assert!(after + (20 << 20) < before, "{before} bytes, and {after} afterwards");
    assert_eq!(kubelet.trim("1").await.unwrap(), state, "it is told again, and not done again");
    let again = kubelet.trim("2").await.unwrap();
    assert!(again.error.is_empty() && again.bytes < state.bytes, "{again:?}");
    kubelet.unpublish("target-1").await;
    kubelet.unstage().await;
    assert!(kubelet.mounted("").is_empty());
}

#[tokio::test]
async fn a_volume_that_is_unmounted_waits_for_one_piece_of_its_trimming() {
    let test = "a_volume_that_is_unmounted_waits_for_one_piece_of_its_trimming";
    let Some((mut kubelet, _small)) = Kubelet::start(test, capability(Mode::SingleNodeWriter)).await else {
        return;
    };
    let _device = enlarge(&kubelet, 64 << 30);
    for round in 0..5 {
        kubelet.stage().await.unwrap();
        let request = format!("{round}");
        assert!(kubelet.begin_to_trim(VOLUME, &request).await.unwrap().running);
        // At different moments of it.
        tokio::time::sleep(std::time::Duration::from_millis(round * 3)).await;
        kubelet.unstage().await;
        assert!(kubelet.mounted("").is_empty());
    }
}

#[tokio::test]
async fn what_cannot_be_trimmed_is_refused_with_a_reason() {
    let test = "what_cannot_be_trimmed_is_refused_with_a_reason";
    let Some((mut kubelet, _device)) = Kubelet::start(test, capability(Mode::SingleNodeWriter)).await else {
        return;
    };
    let refused = async |kubelet: &Kubelet, says: &str| {
        let (code, why) = kubelet.begin_to_trim(VOLUME, "1").await.unwrap_err();
        assert!(code == Code::FailedPrecondition && why.contains(says), "{code:?} {why}");
    };
    assert_eq!(kubelet.begin_to_trim("w", "1").await.unwrap_err().0, Code::NotFound);
    assert_eq!(kubelet.begin_to_trim("../dev/v", "1").await.unwrap_err().0, Code::NotFound);
    // What Longhorn made may have a dot in its name.
    fs::hard_link(kubelet.device(), kubelet.text("dev/v.1")).unwrap();
    assert_eq!(kubelet.begin_to_trim("v.1", "1").await.unwrap_err().0, Code::FailedPrecondition);
    assert_eq!(kubelet.begin_to_trim("", "1").await.unwrap_err().0, Code::InvalidArgument);
    assert_eq!(kubelet.begin_to_trim(VOLUME, "").await.unwrap_err().0, Code::InvalidArgument);
    refused(&kubelet, "no file system of it is mounted").await;
    kubelet.stage().await.unwrap();
    kubelet.unstage().await;
    kubelet.read_only = true;
    kubelet.stage().await.unwrap();
    refused(&kubelet, "for reading only").await;
    kubelet.unstage().await;
    (kubelet.read_only, kubelet.capability) = (false, block(Mode::SingleNodeWriter));
    kubelet.publish("target-1", false).await.unwrap();
    refused(&kubelet, "used as a device").await;
    kubelet.unpublish("target-1").await;
}

/// With a file system of that kind.
fn of_kind(fs_type: &str) -> VolumeCapability {
    let mount = MountVolume { fs_type: fs_type.to_owned(), ..MountVolume::default() };
    VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..capability(Mode::SingleNodeWriter) }
}

#[tokio::test]
async fn what_is_staged_is_taken_for_nothing_else() {
    let test = "what_is_staged_is_taken_for_nothing_else";
    let Some((mut kubelet, device)) = Kubelet::start(test, of_kind("ext4")).await else { return };
    for _ in 0..2 {
        kubelet.stage().await.unwrap();
    }
    kubelet.read_only = true;
    assert_eq!(kubelet.stage().await, Err(Code::AlreadyExists), "it is there for writing");
    kubelet.unstage().await;
    for _ in 0..2 {
        kubelet.stage().await.unwrap();
    }
    kubelet.read_only = false;
    assert_eq!(kubelet.stage().await, Err(Code::AlreadyExists), "it is there for reading only");
    kubelet.unstage().await;
    kubelet.stage().await.unwrap();
    kubelet.capability = of_kind("xfs");
    assert_eq!(kubelet.stage().await, Err(Code::AlreadyExists), "it is another file system");
    kubelet.capability = capability(Mode::SingleNodeWriter);
    kubelet.stage().await.unwrap();
    // Options of the class say it, too.
    kubelet.unstage().await;
    let mount = MountVolume { mount_flags: vec!["ro".to_owned()], ..MountVolume::default() };
    kubelet.capability =
        VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..kubelet.capability.clone() };
    for _ in 0..2 {
        kubelet.stage().await.unwrap();
    }
    for _ in 0..2 {
        kubelet.publish("target-1", false).await.unwrap();
    }
    assert!(options(&kubelet, "target-1").split(',').any(|o| o == "ro"), "{}", options(&kubelet, "target-1"));
    kubelet.unpublish("target-1").await;
    // What takes no writes does not grow, and is there all the same.
    File::options().write(true).open(&device.file).unwrap().set_len(96 << 20).unwrap();
    run(&["losetup", "--set-capacity", &device.device]).unwrap();
    kubelet.stage().await.unwrap();
    kubelet.unstage().await;
    kubelet.stage().await.unwrap();
    kubelet.unstage().await;
}

#[tokio::test]
async fn a_device_that_was_left_protected_is_no_obstacle_to_who_reads_either() {
    let test = "a_device_that_was_left_protected_is_no_obstacle_to_who_reads_either";
    let Some((mut kubelet, first)) = Kubelet::start(test, capability(Mode::SingleNodeWriter)).await else {
        return;
    };
    kubelet.stage().await.unwrap();
    fs::write(kubelet.path("staging/data"), "kept").unwrap();
    run(&["sync", "-f", &kubelet.text("staging")]).unwrap();
    // As a clone of what is in use is: its journal is to be replayed.
    fs::copy(&first.file, kubelet.path("b")).unwrap();
    kubelet.unstage().await;
    let second = Loop::of(kubelet.path("b")).unwrap();
    run(&["blockdev", "--setro", &second.device]).unwrap();
    kubelet.is_now(&second);
    kubelet.read_only = true;
    kubelet.stage().await.unwrap();
    assert_eq!(fs::read_to_string(kubelet.path("staging/data")).unwrap(), "kept");
    kubelet.unstage().await;
}

#[tokio::test]
async fn what_cannot_be_staged_is_mounted_nowhere() {
    let test = "what_cannot_be_staged_is_mounted_nowhere";
    let Some((mut kubelet, device)) = Kubelet::start(test, capability(Mode::SingleNodeWriter)).await else {
        return;
    };
    // Of a kind that does not grow.
    run(&["mkfs.ext3", "-q", &device.device]).unwrap();
    assert_eq!(kubelet.stage().await, Err(Code::FailedPrecondition));
    // After that code the kubelet has nothing unstaged.
    assert!(kubelet.mounted("staging").is_empty());
    // For reading it need not grow.
    kubelet.read_only = true;
    kubelet.stage().await.unwrap();
    kubelet.unstage().await;
}

#[tokio::test]
async fn a_volume_grows_also_where_the_pod_only_reads() {
    let test = "a_volume_grows_also_where_the_pod_only_reads";
    let Some((mut kubelet, _small)) = Kubelet::start(test, of_kind("xfs")).await else { return };
    let device = enlarge(&kubelet, 320 << 20);
    kubelet.stage().await.unwrap();
    kubelet.publish("target-1", true).await.unwrap();
    File::options().write(true).open(&device.file).unwrap().set_len(640 << 20).unwrap();
    run(&["losetup", "--set-capacity", &device.device]).unwrap();
    let request = NodeExpandVolumeRequest {
        volume_id: VOLUME.into(),
        volume_path: kubelet.text("target-1"),
        capacity_range: Some(CapacityRange { required_bytes: 640 << 20, limit_bytes: 0 }),
        ..Default::default()
    };
    kubelet.node.node_expand_volume(request).await.unwrap();
    let size = nix::sys::statvfs::statvfs(&kubelet.path("target-1")).unwrap();
    assert!(size.blocks() * size.fragment_size() > 500 << 20, "{size:?}");
    kubelet.unpublish("target-1").await;
    kubelet.unstage().await;
}

#[tokio::test]
async fn a_file_system_whose_making_was_cut_short_is_made_anew_and_no_other_is() {
    let test = "a_file_system_whose_making_was_cut_short_is_made_anew_and_no_other_is";
    let Some((mut kubelet, _small)) = Kubelet::start(test, of_kind("xfs")).await else { return };
    let device = enlarge(&kubelet, 320 << 20);
    kubelet.stage().await.unwrap();
    kubelet.publish("target-1", false).await.unwrap();
    fs::write(kubelet.path("target-1/data"), "kept").unwrap();
    kubelet.unpublish("target-1").await;
    kubelet.unstage().await;
    kubelet.stage().await.unwrap();
    assert_eq!(fs::read_to_string(kubelet.path("staging/data")).unwrap(), "kept", "it is done");
    kubelet.unstage().await;
    // As a copy of the superblock is that somebody has put back, and as xfs_mdrestore leaves it when it is killed: files are there.
    run(&["xfs_db", "-x", "-c", "sb 0", "-c", "write inprogress 1", &device.device]).unwrap();
    assert!(run(&["blkid", "-p", &device.device]).unwrap().contains("TYPE=\"xfs\""));
    assert!(kubelet.stage().await.is_err(), "no kernel mounts it, and nobody may make it anew");
    run(&["xfs_db", "-x", "-c", "sb 0", "-c", "write inprogress 0", &device.device]).unwrap();
    kubelet.stage().await.unwrap();
    assert_eq!(fs::read_to_string(kubelet.path("staging/data")).unwrap(), "kept");
    kubelet.unstage().await;
    // As mkfs.xfs leaves it when it is killed: a root directory is what it makes last (the fields are the driver's).
    let file = fs::OpenOptions::new().write(true).open(&device.device).unwrap();
    file.write_all_at(&[0xff; 8], 56).unwrap();
    file.write_all_at(&[1], 126).unwrap();
    file.sync_all().unwrap();
    drop(file);
    assert!(run(&["blkid", "-p", &device.device]).unwrap().contains("TYPE=\"xfs\""));
    kubelet.read_only = true;
    assert_eq!(kubelet.stage().await, Err(Code::FailedPrecondition), "for reading there is nothing");
    kubelet.read_only = false;
    kubelet.stage().await.unwrap();
    assert_eq!(kubelet.mounted("staging"), [kubelet.numbers()]);
    kubelet.unstage().await;
}

#[tokio::test]
async fn a_file_system_that_has_shut_down_is_let_go_of_wherever_it_is_mounted() {
    let test = "a_file_system_that_has_shut_down_is_let_go_of_wherever_it_is_mounted";
    let Some((mut kubelet, _small)) = Kubelet::start(test, of_kind("xfs")).await else { return };
    let _device = enlarge(&kubelet, 320 << 20);
    kubelet.stage().await.unwrap();
    kubelet.publish("target-1", false).await.unwrap();
    // Whoever published it for reading was ended on the way.
    let left = kubelet.path(".target-2.readonly");
    fs::create_dir(&left).unwrap();
    run(&["mount", "--bind", &kubelet.text("staging"), &left.display().to_string()]).unwrap();
    run(&["xfs_io", "-x", "-c", "shutdown", &kubelet.text("staging")]).unwrap();
    assert!(fs::symlink_metadata(&left).is_err(), "nobody can say what is there");
    for target in ["target-1", "target-2"] {
        kubelet.unpublish(target).await;
    }
    kubelet.unstage().await;
    assert!(kubelet.mounted("").is_empty() && !left.exists());
    kubelet.stage().await.unwrap();
    kubelet.unstage().await;
}

#[tokio::test]
async fn a_file_system_that_has_stopped_is_abnormal_whatever_its_kind_and_kernel_call_it() {
    let test = "a_file_system_that_has_stopped_is_abnormal_whatever_its_kind_and_kernel_call_it";
    for kind in ["ext4", "xfs"] {
        let Some((mut kubelet, _small)) = Kubelet::start(test, of_kind(kind)).await else { return };
        let _device = enlarge(&kubelet, 320 << 20);
        kubelet.stage().await.unwrap();
        // Seen by one that writes and by one that reads.
        for (target, readonly) in [("target-1", false), ("target-2", true)] {
            kubelet.publish(target, readonly).await.unwrap();
            assert!(!kubelet.is_abnormal(target).await, "{kind}");
        }
        kubelet.stop_as_for_an_error(kind);
        for target in ["target-1", "target-2"] {
            assert!(
                kubelet.is_abnormal(target).await,
                "{kind} at {target}: {:?}",
                fs::read_to_string("/proc/self/mountinfo")
            );
            kubelet.unpublish(target).await;
        }
        kubelet.unstage().await;
        kubelet.read_only = true;
        kubelet.stage().await.unwrap();
        kubelet.publish("target-1", false).await.unwrap();
        assert!(!kubelet.is_abnormal("target-1").await, "{kind}: it is for reading only");
        kubelet.unpublish("target-1").await;
        kubelet.unstage().await;
    }
}

#[tokio::test]
async fn a_pod_that_comes_when_nobody_has_a_stopped_file_system_any_more_gets_it_mounted_anew() {
    let test = "a_pod_that_comes_when_nobody_has_a_stopped_file_system_any_more_gets_it_mounted_anew";
    for kind in ["ext4", "xfs"] {
        let Some((mut kubelet, _small)) = Kubelet::start(test, of_kind(kind)).await else { return };
        let _device = enlarge(&kubelet, 320 << 20);
        kubelet.stage().await.unwrap();
        kubelet.publish("target-1", false).await.unwrap();
        fs::write(kubelet.path("target-1/data"), "kept").unwrap();
        run(&["sync", "-f", &kubelet.text("target-1")]).unwrap();
        kubelet.stop_as_for_an_error(kind);
        // A pod has it, which is to see that.
        let _ = kubelet.stage().await;
        let _ = kubelet.publish("target-2", false).await;
        assert!(fs::write(kubelet.path("target-1/more"), "x").is_err(), "{kind}");
        for target in ["target-1", "target-2"] {
            kubelet.unpublish(target).await;
        }
        // The kubelet stages nothing anew for a pod that was there before the one before it had gone.
        kubelet.publish("target-2", false).await.unwrap();
        assert_eq!(fs::read_to_string(kubelet.path("target-2/data")).unwrap(), "kept", "{kind}");
        fs::write(kubelet.path("target-2/more"), "x").unwrap();
        assert!(!kubelet.is_abnormal("target-2").await, "{kind}");
        kubelet.stop_as_for_an_error(kind);
        kubelet.unpublish("target-2").await;
        kubelet.stage().await.unwrap();
        fs::write(kubelet.path("staging/more"), "x").unwrap();
        kubelet.unstage().await;
        assert!(kubelet.mounted("").is_empty());
    }
}
