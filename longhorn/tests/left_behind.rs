//! What a command finds that others have left or begun to use, with real processes.

mod host;
mod stopped;

use std::fs::{self, File};
use std::io::Read as _;
use std::net::TcpListener;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use host::{Host, is_healthy, kill_9, pid, signal, until};
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use stopped::stand_still;

fn device(host: &Host) -> PathBuf {
    Path::new("/dev/longhorn").join(&host.volume)
}

/// A new volume's `up` that stands still as soon as its device is there, or is through by then.
fn up_that_stands_still(host: &Host) -> Child {
    let mut up = host
        .command(&["up", &host.volume, "--size", "16MiB", "--replicas", "1", "--frontend", "fuse"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until("the device is there", || device(host).exists() || up.try_wait().unwrap().is_some());
    signal(pid_of(&up), Signal::SIGSTOP);
    let stat = format!("/proc/{}/stat", up.id());
    until("it stands still", || {
        let state = fs::read_to_string(&stat).unwrap_or_default();
        state.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 'Z']))
    });
    up
}

fn pid_of(child: &Child) -> i32 {
    i32::try_from(child.id()).unwrap()
}

/// Whoever waits for a device uses it once it is there, whatever becomes of the command that makes its volume.
#[test]
fn a_new_volume_whose_device_somebody_uses_is_not_taken_back() {
    let Some(host) = Host::new("used") else { return };
    let volume = host.volume.as_str();
    if !Path::new("/dev/fuse").exists() || !Path::new("/dev/loop-control").exists() {
        eprintln!("SKIP a_new_volume_whose_device_somebody_uses: this host has no FUSE or no loop devices");
        return;
    }
    until("it is interrupted in time", || {
        let mut up = up_that_stands_still(&host);
        let user = File::open(device(&host)).unwrap();
        // So that it is not up yet for the command.
        let engine = pid(&host.status()["engine_pid"]);
        stand_still(engine);
        // SIGINT is ignored by all that a shell has begun in the background, these tests perhaps among them.
        signal(pid_of(&up), Signal::SIGTERM);
        signal(pid_of(&up), Signal::SIGCONT);
        let mut said = String::new();
        up.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let ended = up.wait().unwrap();
        signal(engine, Signal::SIGCONT);
        let is_in_time = said.contains("taking back");
        if is_in_time {
            assert_eq!(ended.code(), Some(143), "{said}");
            assert!(said.contains("is in use"), "{said}");
        }
        assert_eq!(host.wait("it is up", is_healthy)["engine_pid"], engine);
        drop(user);
        host.ok(&["down", volume]);
        host.ok(&["rm", volume, "--yes"]);
        is_in_time
    });
}

/// A volume whose processes, or all but its replicas', were deleted while its device was in use: the keeper of that is left.
fn without_engine(host: &Host, replicas_stay: bool) -> File {
    let volume = host.volume.as_str();
    host.ok(&["up", volume, "--frontend", "fuse"]);
    host.wait("healthy", is_healthy);
    let user = File::options().read(true).write(true).open(device(host)).unwrap();
    user.write_all_at(&[0x5a; 4096], 8 << 20).unwrap();
    user.sync_all().unwrap();
    let stays = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let word = line.split(|b| *b == 0).nth(1).unwrap_or_default();
        word.ends_with(b"keeper") || replicas_stay && word == b"replica"
    };
    until("the processes have ended", || {
        let others: Vec<i32> = host.processes().into_iter().filter(|pid| !stays(pid)).collect();
        others.iter().for_each(|pid| signal(*pid, Signal::SIGKILL));
        others.is_empty()
    });
    assert_eq!(host.processes().len(), if replicas_stay { 2 } else { 1 }, "the keeper has ended, too");
    for entry in fs::read_dir(host.path("run/processes")).unwrap() {
        let entry = entry.unwrap();
        if !replicas_stay || entry.file_name().to_str().unwrap().contains("-e-") {
            fs::remove_file(entry.path()).unwrap();
        }
    }
    user
}

/// A mounted file system would go on over what became of the volume without it.
#[test]
fn a_volume_without_processes_whose_device_is_in_use_keeps_its_bytes() {
    let Some(host) = Host::new("inuse") else { return };
    let volume = host.volume.as_str();
    if !Path::new("/dev/fuse").exists() || !Path::new("/dev/loop-control").exists() {
        eprintln!(
            "SKIP a_volume_without_processes_whose_device_is_in_use: this host has no FUSE or no loop devices"
        );
        return;
    }
    host.up("none", &["--replicas", "1"]);
    host.ok(&["snapshot", "create", volume, "s"]);
    host.ok(&["down", volume]);
    let user = without_engine(&host, false);
    for refused in [
        &["snapshot", "revert", volume, "s"][..],
        &["resize", volume, "32MiB"],
        &["rm", volume, "--yes"],
        &["up", volume, "--frontend", "nbd-server"],
        &["up", volume, "--frontend", "none"],
    ] {
        host.refused(refused, "is in use");
    }
    host.ok(&["up", volume]);
    assert!(device(&host).exists(), "it is served again");
    drop(user);
    host.ok(&["down", volume]);
    // The replicas are there; and somebody has removed the node of what is in use.
    let user = without_engine(&host, true);
    fs::remove_file(device(&host)).unwrap();
    for refused in [&["snapshot", "revert", volume, "s"][..], &["resize", volume, "32MiB"]] {
        host.refused(refused, "is in use");
    }
    assert_eq!(host.status()["size"], 16 << 20, "it was done before anybody looked");
    host.ok(&["up", volume]);
    assert!(device(&host).exists(), "it is served again");
    user.read_exact_at(&mut [0; 4096], 4 << 20).expect("what is asked of it fails");
    drop(user);
    host.ok(&["down", volume]);
    let directory = fs::read_dir(host.path("replicas")).unwrap().next().unwrap().unwrap().path();
    let image = host.path("image");
    host.ok(&["replica", "export", directory.to_str().unwrap(), image.to_str().unwrap()]);
    assert_eq!(fs::read(image).unwrap()[8 << 20], 0x5a, "it was reverted before anybody looked");
    // Nobody uses it any more.
    drop(without_engine(&host, false));
    host.ok(&["snapshot", "revert", volume, "s"]);
    assert!(!device(&host).exists());
    drop(without_engine(&host, false));
    host.ok(&["up", volume, "--frontend", "nbd-server"]);
    assert!(!device(&host).exists());
    host.ok(&["down", volume]);
    host.ok(&["rm", volume, "--yes"]);
}

/// A root that can be read alone, until it is dropped.
struct ReadOnly(PathBuf);

impl ReadOnly {
    fn new(place: &Path) -> Option<Self> {
        let mount = |words: &[&str]| Command::new("mount").args(words).status().is_ok_and(|s| s.success());
        let path = place.to_str().unwrap();
        if !mount(&["--bind", path, path]) {
            return None;
        }
        let bound = Self(place.to_owned());
        mount(&["-o", "remount,bind,ro", path]).then_some(bound)
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// As on a disk that the kernel has made so after an error.
#[test]
fn a_volume_that_is_down_is_so_on_a_root_that_cannot_be_written() {
    let Some(host) = Host::new("readonly") else { return };
    let volume = host.volume.as_str();
    host.up("none", &["--replicas", "1"]);
    host.ok(&["down", volume, "--for-now"]);
    host.kill_everything();
    let Some(bound) = ReadOnly::new(host.dir.path()) else {
        eprintln!("SKIP a_volume_that_is_down_is_so: nothing can be mounted");
        return;
    };
    // A start of all would start it again, which cannot be changed.
    host.refused(&["down", volume], "Read-only");
    drop(bound);
    host.ok(&["down", volume]);
    host.kill_everything();
    let bound = ReadOnly::new(host.dir.path()).unwrap();
    let down = host.ok(&["-o", "json", "down", volume]);
    assert!(down.contains("\"detached\""), "{down}");
    host.refused(&["up", volume], "read-only");
    drop(bound);
}

/// Its numbers go to whatever disk comes next, which whoever opens it by the volume's name would write to.
#[test]
fn the_node_of_a_device_that_has_gone_goes_when_its_volume_is_stopped() {
    let Some(host) = Host::new("node") else { return };
    let volume = host.volume.as_str();
    host.up("none", &["--replicas", "1"]);
    host.wait("healthy", is_healthy);
    fs::create_dir_all("/dev/longhorn").unwrap();
    // For experiments (Documentation/admin-guide/devices.txt), so there is none.
    mknod(&device(&host), SFlag::S_IFBLK, Mode::S_IRUSR, makedev(240, 1_048_575)).unwrap();
    let down = host.run(&["down", volume]);
    let is_left = device(&host).exists();
    let _ = fs::remove_file(device(&host));
    assert!(down.status.success() && !is_left, "{down:?}");
}

/// Before anything is made, and by the name of what chooses another address.
#[test]
fn a_new_volume_is_not_served_where_somebody_else_is() {
    let Some(host) = Host::new("second") else { return };
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = other.local_addr().unwrap().to_string();
    let up = [
        "up",
        &host.volume,
        "--size",
        "16MiB",
        "--replicas",
        "1",
        "--frontend",
        "nbd-server",
        "--listen",
        &at,
    ];
    host.refused(&up, &format!("--listen {at}: "));
    assert!(!host.path("volumes").join(&host.volume).exists());
    drop(other);
    host.ok(&up);
    host.ok(&["down", &host.volume]);
}

/// Whether by another frontend's usual address or by the one that is named: nothing is noted of a start that is refused.
#[test]
fn a_volume_is_not_changed_to_be_served_where_somebody_else_is() {
    let Some(host) = Host::new("changed") else { return };
    let volume = host.volume.as_str();
    host.up("none", &["--replicas", "1"]);
    host.ok(&["down", volume]);
    let record = host.path("volumes").join(volume).join("volume.json");
    let before = fs::read(&record).unwrap();
    // Where it is taken already, that is as good.
    let _other = TcpListener::bind("127.0.0.1:3260");
    host.refused(&["up", volume, "--frontend", "iscsi-target"], "--listen 127.0.0.1:3260: ");
    assert_eq!(fs::read(&record).unwrap(), before);
    assert!(host.ok(&["up", "--all"]).is_empty() && host.status()["state"] == "detached");
}

/// An engine that was killed has left it, and the one after it may not have come.
#[test]
fn no_socket_of_a_volume_is_left_when_it_is_stopped() {
    let Some(host) = Host::new("socket") else { return };
    let (volume, socket) = (host.volume.as_str(), format!("/run/longhorn/{}.nbd.sock", host.volume));
    host.up("nbd-server", &["--replicas", "1"]);
    assert!(Path::new(&socket).exists());
    kill_9(pid(&host.status()["engine_pid"]));
    host.run(&["down", volume]);
    assert_eq!(host.status()["state"], "detached");
    assert!(!Path::new(&socket).exists(), "{socket}");
    assert!(!host.lock_of_the_name().exists());
}
