//! Commands that were broken off, and commands that meet others at work, with real processes: what is left is whole, and what they say
//! leads on.

mod host;
mod stopped;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::proto::imrpc::{ProcessCreateRequest, ProcessDeleteRequest, ProcessSpec};
use host::{Host, has_ended, is_healthy, kill_9, pid, signal, until};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::stat::{Mode, SFlag, major, minor, mknod};
use replica::store::SnapshotView;
use serde_json::Value;
use stopped::stand_still;

/// A volume of so many replicas, which is not shown.
fn up(host: &Host, replicas: &str) {
    host.up("none", &["--replicas", replicas]);
}

/// Says what is not looked at where a volume cannot be a device.
fn has_fuse(test: &str) -> bool {
    let has = Path::new("/dev/fuse").exists() && Path::new("/dev/loop-control").exists();
    if !has {
        eprintln!("SKIP {test}: this host has no FUSE or no loop devices");
    }
    has
}

fn healthy(host: &Host) -> Value {
    host.wait("healthy", is_healthy)
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap()
}

/// A `down` that is interrupted leaves processes that are ending, on a busy disk for a while.
#[tokio::test]
async fn what_is_just_ending_is_waited_for_and_started_again() {
    let Some(host) = Host::new("ending") else { return };
    let volume = host.volume.as_str();
    up(&host, "2");
    let replica = healthy(&host)["replicas"][1].clone();
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
    healthy(&host);
    host.ok(&["down", volume]);
}

/// Whoever reads a directory without its process would read zeroes where it is being deleted.
#[test]
fn nothing_is_deleted_under_who_reads_it() {
    let Some(host) = Host::new("read") else { return };
    let volume = host.volume.as_str();
    up(&host, "1");
    host.ok(&["snapshot", "create", volume, "s1"]);
    let directory = PathBuf::from(text(&healthy(&host)["replicas"][0], "path"));
    host.ok(&["down", volume]);
    let view = SnapshotView::open(&directory, Some("s1")).unwrap();
    let by = format!("is in use by process {}", std::process::id());
    host.refused(&["rm", volume, "--yes"], &by);
    // It is as it was.
    drop(view);
    host.ok(&["up", volume]);
    healthy(&host);
    host.ok(&["down", volume]);
    host.ok(&["rm", volume, "--yes"]);
    assert!(!directory.exists());
}

/// The command names the replica in what it says is to be done next.
#[test]
fn a_replica_that_was_not_deleted_to_its_end_is_deleted_by_its_name() {
    let Some(host) = Host::new("half") else { return };
    let volume = host.volume.as_str();
    up(&host, "2");
    let replica = healthy(&host)["replicas"][1].clone();
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
    assert_eq!(healthy(&host)["replicas"].as_array().unwrap().len(), 1);
    host.ok(&["down", volume]);
}

/// What is on a disk that is not mounted cannot be deleted, and nobody is to believe that it was.
#[test]
fn what_was_not_there_when_its_volume_was_deleted_is_named() {
    let Some(host) = Host::new("away") else { return };
    let volume = host.volume.as_str();
    let disk = tempfile::tempdir().unwrap();
    let (place, away) = (disk.path().join("replica"), disk.path().join("away"));
    up(&host, "1");
    host.ok(&["replica", "add", volume, "--dir", place.to_str().unwrap()]);
    host.ok(&["down", volume]);
    fs::rename(&place, &away).unwrap();
    let removed: Value = serde_json::from_str(&host.ok(&["-o", "json", "rm", volume, "--yes"])).unwrap();
    assert_eq!(removed["left"], Value::from(vec![place.to_str().unwrap()]));
    assert_eq!(removed["removed"].as_array().unwrap().len(), 1);
    assert!(away.join("volume.meta").exists());
}

/// As where the disk of a replica was exchanged, or is not mounted.
#[test]
fn what_lies_where_a_replica_was_stays_and_is_not_said_to_be_deleted() {
    let Some(host) = Host::new("exchanged") else { return };
    let volume = host.volume.as_str();
    let disk = tempfile::tempdir().unwrap();
    let (place, away) = (disk.path().join("replica"), disk.path().join("away"));
    up(&host, "1");
    let exchange = |name: &str| {
        host.ok(&["replica", "add", volume, "--dir", place.to_str().unwrap()]);
        let added = healthy(&host)["replicas"][1].clone();
        fs::rename(&place, away.join(name)).unwrap();
        fs::create_dir(&place).unwrap();
        fs::write(place.join("photo"), name).unwrap();
        text(&added, "name").to_owned()
    };
    fs::create_dir(&away).unwrap();
    let told = |args: &[&str]| {
        let done = host.run(args);
        let said = String::from_utf8(done.stderr).unwrap();
        assert!(done.status.success() && said.contains(&format!("was in {}", place.display())), "{said}");
        said
    };
    let replica = exchange("first");
    let said = told(&["replica", "rm", volume, &replica]);
    assert!(!said.contains("is deleted"), "{said}");
    assert_eq!(fs::read_to_string(place.join("photo")).unwrap(), "first");
    fs::remove_dir_all(&place).unwrap();
    exchange("second");
    host.ok(&["down", volume]);
    told(&["rm", volume, "--yes"]);
    assert_eq!(fs::read_to_string(place.join("photo")).unwrap(), "second");
    assert!(away.join("first/volume.meta").exists() && away.join("second/volume.meta").exists());
}

/// It is stopped as the host is before it restarts, and refused since a disk is not mounted.
#[test]
fn a_volume_that_is_not_released_is_started_with_the_host_as_before() {
    let Some(host) = Host::new("unreleased") else { return };
    let volume = host.volume.as_str();
    up(&host, "1");
    let directory = PathBuf::from(text(&healthy(&host)["replicas"][0], "path"));
    host.ok(&["down", volume, "--for-now"]);
    let away = directory.with_extension("away");
    fs::rename(&directory, &away).unwrap();
    host.refused(&["release", volume], directory.to_str().unwrap());
    fs::rename(&away, &directory).unwrap();
    host.ok(&["up", "--all"]);
    healthy(&host);
    host.ok(&["down", volume]);
}

#[test]
fn an_address_that_cannot_be_had_is_not_remembered() {
    let Some(host) = Host::new("address") else { return };
    let volume = host.volume.as_str();
    host.up("nbd-server", &["--replicas", "1"]);
    host.ok(&["down", volume]);
    host.refused(&["up", volume, "--frontend", "nbd-server", "--listen", "192.0.2.1"], "ip address");
    host.ok(&["up", volume]);
    assert!(text(&healthy(&host), "uri").starts_with("nbd+unix:"));
    host.ok(&["down", volume]);
}

#[test]
fn what_a_killed_engine_left_of_its_name_goes_when_the_volume_is_stopped() {
    let Some(host) = Host::new("name") else { return };
    up(&host, "1");
    host.kill_everything();
    assert!(host.lock_of_the_name().exists(), "until then it says whose the name is");
    host.ok(&["down", &host.volume]);
    assert!(!host.lock_of_the_name().exists());
}

/// An engine that died is started again: what is asked of its volume meanwhile is asked of the next one. With no manager either, the
/// command starts one.
#[test]
fn an_engine_that_is_started_again_is_waited_for() {
    let Some(host) = Host::new("again") else { return };
    let volume = host.volume.as_str();
    up(&host, "1");
    let manager: i32 = fs::read_to_string(host.path("run/instance-manager.lock"))
        .unwrap()
        .lines()
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let lost = |snapshot: &str| {
        let engine = pid(&healthy(&host)["engine_pid"]);
        kill_9(engine);
        until("the engine has ended", || has_ended(engine));
        host.command(&["snapshot", "create", volume, snapshot]).stdout(Stdio::null()).spawn().unwrap()
    };
    // So nobody starts it before the command has found it missing.
    stand_still(manager);
    let mut asked = lost("one");
    std::thread::sleep(Duration::from_millis(300));
    assert!(asked.try_wait().unwrap().is_none(), "it waits for nobody");
    signal(manager, Signal::SIGCONT);
    assert!(asked.wait().unwrap().success());
    kill_9(manager);
    until("the manager has ended", || has_ended(manager));
    assert!(lost("two").wait().unwrap().success());
    let tree = host.ok(&["snapshot", "tree", volume]);
    assert!(tree.contains("one") && tree.contains("two"), "{tree}");
    host.ok(&["down", volume]);
}

/// Requests wait at a device whose engine died, and its manager as well: the next manager brings the engine back, and who uses the
/// device is not made to fail by a `down` that would have been refused.
#[test]
fn who_waits_for_an_engine_that_can_come_is_not_failed_by_a_down() {
    let Some(host) = Host::new("waiting") else { return };
    let volume = host.volume.as_str();
    if !has_fuse("who_waits_for_an_engine") {
        return;
    }
    host.up("fuse", &["--replicas", "1"]);
    let device = Path::new("/dev/longhorn").join(volume);
    let user = File::open(&device).unwrap();
    let stat = format!(
        "/sys/dev/block/{}:{}/stat",
        major(user.metadata().unwrap().rdev()),
        minor(user.metadata().unwrap().rdev())
    );
    let engine = pid(&healthy(&host)["engine_pid"]);
    let manager = fs::read_to_string(host.path("run/instance-manager.lock")).unwrap();
    let manager: i32 = manager.lines().next().unwrap().parse().unwrap();
    for process in [manager, engine] {
        kill_9(process);
        until("it has ended", || has_ended(process));
    }
    let of = format!("of={}", device.display());
    let mut writer = Command::new("dd")
        .args(["if=/dev/zero", &of, "bs=4096", "count=1", "oflag=direct"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("its request waits", || fs::read_to_string(&stat).unwrap().split_whitespace().nth(8) != Some("0"));
    host.refused(&["down", volume], "is in use");
    assert!(writer.wait().unwrap().success(), "its request was answered");
    drop(user);
    host.ok(&["down", volume]);
}

/// Whoever has signals blocked hands that down to what he starts, and so would that.
#[test]
fn signals_end_what_was_started_by_whom_no_signal_ends() {
    let Some(host) = Host::new("blocked") else { return };
    let volume = host.volume.as_str();
    let before = SigSet::thread_get_mask().unwrap();
    SigSet::all().thread_set_mask().unwrap();
    let done = host.run(&["up", volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none"]);
    before.thread_set_mask().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let processes = host.processes();
    assert_eq!(processes.len(), 3, "a manager, an engine and a replica");
    for process in processes {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        let blocked = u64::from_str_radix(blocked.trim(), 16).unwrap();
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
            assert_eq!(blocked >> (signal as i32 - 1) & 1, 0, "{signal}: {status}");
        }
    }
    host.ok(&["down", volume]);
}

/// A replica that somebody ends by `kill` has done as it was told, and is not started again by itself: who looks is told how.
#[test]
fn of_a_replica_that_was_told_to_end_is_said_what_starts_it() {
    let Some(host) = Host::new("ended") else { return };
    let volume = host.volume.as_str();
    up(&host, "1");
    let replica = pid(&healthy(&host)["replicas"][0]["pid"]);
    signal(replica, Signal::SIGTERM);
    let step = format!("longhornctl --root {} up {volume}", host.dir.path().display());
    host.wait("it is out", |s| text(&s["replicas"][0], "remark").contains(&step));
    host.ok(&["up", volume]);
    assert_eq!(text(&healthy(&host)["replicas"][0], "remark"), "");
    host.ok(&["down", volume]);
}

/// An engine looks after its keeper every few seconds, and is told to grow or to end in between.
#[test]
fn a_device_whose_keeper_has_just_died_grows_and_goes() {
    let Some(host) = Host::new("keeper") else { return };
    let volume = host.volume.as_str();
    if !has_fuse("a_device_whose_keeper_has_just_died") {
        return;
    }
    let kill_the_keeper = || {
        let is_keeper = |pid: &i32| {
            fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.contains("\0fuse-keeper\0"))
        };
        let keeper = host.processes().into_iter().find(is_keeper).expect("a keeper");
        kill_9(keeper);
        until("the keeper has ended", || has_ended(keeper));
    };
    host.up("fuse", &["--replicas", "1"]);
    healthy(&host);
    kill_the_keeper();
    host.ok(&["resize", volume, "20MiB"]);
    let rdev = fs::metadata(Path::new("/dev/longhorn").join(volume)).unwrap().rdev();
    let sectors = fs::read_to_string(format!("/sys/dev/block/{}:{}/size", major(rdev), minor(rdev))).unwrap();
    assert_eq!(sectors.trim(), ((20 << 20) / 512).to_string());
    kill_the_keeper();
    host.ok(&["down", volume]);
    assert!(!Path::new("/dev/longhorn").join(volume).exists());
}

/// As when its terminal is closed, or the connection to it breaks.
#[test]
fn a_command_that_loses_its_terminal_says_what_is_left_and_takes_back_what_it_began() {
    let Some(host) = Host::new("terminal") else { return };
    let volume = host.volume.as_str();
    // On a busy host it may be through before it is told.
    let mut line = String::new();
    until("it is told in time", || {
        let (code, said) = up_that_loses_its_terminal(&host);
        if code == Some(0) {
            host.ok(&["down", volume]);
            host.ok(&["rm", volume, "--yes"]);
            return false;
        }
        assert_eq!(code, Some(129), "{said}");
        line = said;
        true
    });
    // What was begun is not there any more, or goes on to its end.
    let list = host.ok(&["ls"]);
    match line.contains("taking back") {
        true => assert!(!list.contains(volume), "{line}{list}"),
        false => assert!(line.contains("goes on") && list.contains(volume), "{line}{list}"),
    }
}

/// How it ends, and what it says.
fn up_that_loses_its_terminal(host: &Host) -> (Option<i32>, String) {
    let up = ["up", &host.volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none"];
    let up = host.command(&up);
    // One that is begun by nohup does not hear it, nor does what that begins.
    let mut hears = Command::new("env");
    hears.arg("--default-signal=HUP").arg(up.get_program()).args(up.get_args()).stdin(Stdio::null());
    let mut begun = hears.stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(begun.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "starting the replicas");
    // Its shell tells it, and when that has ended the kernel does.
    for _ in 0..2 {
        signal(i32::try_from(begun.id()).unwrap(), Signal::SIGHUP);
        said.read_line(&mut line).unwrap();
    }
    said.read_to_string(&mut line).unwrap();
    (begun.wait().unwrap().code(), line)
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
    up(&host, "1");
    let engine = healthy(&host)["engine_pid"].clone();
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
