//! Commands that were broken off, and commands that meet others at work, with real processes: what is left is whole, and what they say
//! leads on.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::proto::imrpc::{ProcessCreateRequest, ProcessDeleteRequest, ProcessSpec};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::{Mode, SFlag, major, mknod};
use nix::unistd::Pid;
use replica::store::SnapshotView;
use serde_json::Value;

const CTL: &str = env!("CARGO_BIN_EXE_longhornctl");
const LONGHORN: &str = env!("CARGO_BIN_EXE_longhorn");

/// Far more than anything here takes, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A root with its processes; nothing of it is left when it is dropped.
struct Host {
    dir: tempfile::TempDir,
    volume: String,
}

impl Host {
    /// `None` where volumes cannot run: they belong to root.
    fn new(word: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIP broken_off: not root");
            return None;
        }
        let volume = format!("test-{}-{word}", std::process::id());
        Some(Self { dir: tempfile::tempdir().unwrap(), volume })
    }

    fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(CTL);
        command.arg("--root").arg(self.dir.path()).args(args).stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> String {
        let done = self.run(args);
        assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    fn refused(&self, args: &[&str], says: &str) {
        let done = self.run(args);
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains(says), "{args:?} does not say {says}: {said}");
    }

    fn up(&self, replicas: &str) {
        self.ok(&["up", &self.volume, "--size", "16MiB", "--replicas", replicas, "--frontend", "none"]);
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.ok(&["-o", "json", "status", &self.volume])).unwrap()
    }

    fn wait(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + PATIENCE;
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < until, "{what}: {status:#}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn healthy(&self) -> Value {
        self.wait("healthy", |s| s["state"] == "attached" && s["robustness"] == "healthy")
    }

    /// The processes of this root.
    fn processes(&self) -> Vec<i32> {
        let root = self.dir.path().to_str().unwrap();
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let is_ours = |path: &Path| {
            let line = fs::read(path.join("cmdline")).unwrap_or_default();
            let text = String::from_utf8_lossy(&line);
            text.contains(root) && (text.starts_with(LONGHORN) || text.starts_with(CTL))
        };
        let pid = |path: PathBuf| path.file_name()?.to_str()?.parse::<i32>().ok();
        entries.map(|e| e.path()).filter(|p| is_ours(p)).filter_map(pid).collect()
    }

    fn kill_everything(&self) {
        let until = Instant::now() + PATIENCE;
        loop {
            let processes = self.processes();
            if processes.is_empty() {
                return;
            }
            assert!(Instant::now() < until, "{processes:?} do not end");
            for pid in processes {
                // It may have ended by itself.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn lock_of_the_name(&self) -> PathBuf {
        PathBuf::from(format!("/run/longhorn/{}.engine.lock", self.volume))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill_everything();
        let _ = fs::remove_file(self.lock_of_the_name());
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap()
}

/// A `down` that is interrupted leaves processes that are ending, on a busy disk for a while.
#[tokio::test]
async fn what_is_just_ending_is_waited_for_and_started_again() {
    let Some(host) = Host::new("ending") else { return };
    let volume = host.volume.as_str();
    host.up("2");
    let replica = host.healthy()["replicas"][1].clone();
    host.ok(&["down", volume]);
    let slow = host.path("engine-binaries/slow");
    fs::write(&slow, "#!/bin/sh\ntrap '' TERM\necho begins\nsleep 3\n").unwrap();
    fs::set_permissions(&slow, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let channel = control::transport::connect(&host.path("run/instance-manager.sock")).await.unwrap();
    let mut manager = ProcessManagerServiceClient::new(channel);
    let name = text(&replica, "name").to_owned();
    let spec =
        ProcessSpec { name: name.clone(), binary: slow.to_str().unwrap().into(), ..Default::default() };
    manager.process_create(ProcessCreateRequest { spec: Some(spec) }).await.unwrap();
    let log = host.path(&format!("log/{name}.log"));
    until("it begins", || fs::read_to_string(&log).unwrap().lines().any(|line| line == "begins"));
    manager.process_delete(ProcessDeleteRequest { name, uuid: String::new() }).await.unwrap();
    host.ok(&["up", volume]);
    host.healthy();
    host.ok(&["down", volume]);
}

/// Whoever reads a directory without its process would read zeroes where it is being deleted.
#[test]
fn nothing_is_deleted_under_who_reads_it() {
    let Some(host) = Host::new("read") else { return };
    let volume = host.volume.as_str();
    host.up("1");
    host.ok(&["snapshot", "create", volume, "s1"]);
    let directory = PathBuf::from(text(&host.healthy()["replicas"][0], "path"));
    host.ok(&["down", volume]);
    let view = SnapshotView::open(&directory, Some("s1")).unwrap();
    let by = format!("is in use by process {}", std::process::id());
    host.refused(&["rm", volume, "--yes"], &by);
    // It is as it was.
    drop(view);
    host.ok(&["up", volume]);
    host.healthy();
    host.ok(&["down", volume]);
    host.ok(&["rm", volume, "--yes"]);
    assert!(!directory.exists());
}

/// The command names the replica in what it says is to be done next.
#[test]
fn a_replica_that_was_not_deleted_to_its_end_is_deleted_by_its_name() {
    let Some(host) = Host::new("half") else { return };
    let volume = host.volume.as_str();
    host.up("2");
    let replica = host.healthy()["replicas"][1].clone();
    let directory = PathBuf::from(text(&replica, "path"));
    // Taken as soon as its process has ended.
    let reader = std::thread::spawn({
        let directory = File::open(&directory).unwrap();
        move || Flock::lock(directory, FlockArg::LockShared).unwrap()
    });
    let remove = ["replica", "rm", volume, text(&replica, "name")];
    host.refused(&remove, "is in use by process");
    assert!(directory.exists());
    drop(reader.join().unwrap());
    host.ok(&remove);
    assert!(!directory.exists());
    assert_eq!(host.healthy()["replicas"].as_array().unwrap().len(), 1);
    host.ok(&["down", volume]);
}

/// What is on a disk that is not mounted cannot be deleted, and nobody is to believe that it was.
#[test]
fn what_was_not_there_when_its_volume_was_deleted_is_named() {
    let Some(host) = Host::new("away") else { return };
    let volume = host.volume.as_str();
    let disk = tempfile::tempdir().unwrap();
    let (place, away) = (disk.path().join("replica"), disk.path().join("away"));
    host.up("1");
    host.ok(&["replica", "add", volume, "--dir", place.to_str().unwrap()]);
    host.ok(&["down", volume]);
    fs::rename(&place, &away).unwrap();
    let removed: Value = serde_json::from_str(&host.ok(&["-o", "json", "rm", volume, "--yes"])).unwrap();
    assert_eq!(removed["left"], Value::from(vec![place.to_str().unwrap()]));
    assert_eq!(removed["removed"].as_array().unwrap().len(), 1);
    assert!(away.join("volume.meta").exists());
}

#[test]
fn an_address_that_cannot_be_had_is_not_remembered() {
    let Some(host) = Host::new("address") else { return };
    let volume = host.volume.as_str();
    host.ok(&["up", volume, "--size", "16MiB", "--replicas", "1", "--frontend", "nbd-server"]);
    host.ok(&["down", volume]);
    host.refused(&["up", volume, "--frontend", "nbd-server", "--listen", "192.0.2.1"], "ip address");
    host.ok(&["up", volume]);
    assert!(text(&host.healthy(), "uri").starts_with("nbd+unix:"));
    host.ok(&["down", volume]);
}

#[test]
fn what_a_killed_engine_left_of_its_name_goes_when_the_volume_is_stopped() {
    let Some(host) = Host::new("name") else { return };
    host.up("1");
    host.kill_everything();
    assert!(host.lock_of_the_name().exists(), "until then it says whose the name is");
    host.ok(&["down", &host.volume]);
    assert!(!host.lock_of_the_name().exists());
}

/// Two commands may start a manager at once. The one whose manager finds another in its place waits for that one.
#[test]
fn a_manager_that_is_about_to_answer_is_waited_for() {
    let Some(host) = Host::new("managers") else { return };
    fs::create_dir_all(host.path("run")).unwrap();
    let lock = File::create(host.path("run/instance-manager.lock")).unwrap();
    let other = Flock::lock(lock, FlockArg::LockExclusiveNonblock).unwrap();
    let up = ["up", &host.volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none"];
    let mut waiting = host.command(&up).stderr(Stdio::null()).spawn().unwrap();
    let log = host.path("log/instance-manager.log");
    until("its own manager ends", || {
        fs::read_to_string(&log).is_ok_and(|said| said.contains("runs already"))
    });
    std::thread::sleep(Duration::from_millis(500));
    assert!(waiting.try_wait().unwrap().is_none(), "it gave up");
    // That one ends as well, and has never answered.
    drop(other);
    let ended = waiting.wait().unwrap();
    assert_eq!(ended.code(), Some(1));
}

/// An engine that begins, or cannot be asked, may be about to take over a device that is mounted.
#[test]
fn an_engine_that_cannot_be_asked_is_not_ended_under_who_uses_its_device() {
    let Some(host) = Host::new("unasked") else { return };
    let volume = host.volume.as_str();
    let disk = host.dir.path().metadata().unwrap().dev();
    if major(disk) == 0 {
        eprintln!("SKIP an_engine_that_cannot_be_asked: no block device is mounted here");
        return;
    }
    host.up("1");
    let engine = host.healthy()["engine_pid"].clone();
    // Of a disk that is mounted, and stands for the volume's device.
    let node = Path::new("/dev/longhorn").join(volume);
    fs::create_dir_all("/dev/longhorn").unwrap();
    mknod(&node, SFlag::S_IFBLK, Mode::S_IRUSR, disk).unwrap();
    fs::remove_file(host.path(&format!("run/{volume}-e-0.grpc.sock"))).unwrap();
    let refused = host.run(&["down", volume]);
    fs::remove_file(&node).unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("is in use"), "{said}");
    assert_eq!(host.status()["engine_pid"], engine);
    host.ok(&["down", volume]);
}
