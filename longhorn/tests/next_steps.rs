//! What somebody is told who has met a dead end: why, and what to do.

mod host;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use host::Host;
use serde_json::Value;

const LONGHORN: &str = env!("CARGO_BIN_EXE_longhorn");

impl Host {
    /// Directories of the volume's replicas.
    fn directories(&self) -> Vec<PathBuf> {
        let replicas = self.status()["replicas"].as_array().unwrap().clone();
        replicas.iter().map(|r| r["path"].as_str().unwrap().into()).collect()
    }

    fn name_of_first(&self) -> String {
        self.status()["replicas"][0]["name"].as_str().unwrap().to_owned()
    }
}

fn said(done: &Output) -> String {
    String::from_utf8(done.stderr.clone()).unwrap()
}

/// A replica that is started by hand.
fn replica(host: &Host, directory: &Path) -> Command {
    replica_at(host, directory, &format!("unix:{}", host.path("d.sock").display()))
}

fn replica_at(host: &Host, directory: &Path, data: &str) -> Command {
    let (key, socket) = (host.path("key"), |name: &str| format!("unix:{}", host.path(name).display()));
    fs::write(&key, [7; 32]).unwrap();
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let mut command = Command::new(LONGHORN);
    command.args(["replica", "--volume-name", &host.volume, "--replica-instance-name", "by-hand"]);
    command.args(["--listen", &socket("c.sock"), "--data-listen", data, "--key-file"]);
    command.arg(key).arg(directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// It waits, for what may be a process that is just ending; who looks on sees for whom.
#[test]
fn a_replica_whose_directory_is_in_use_says_for_whom_it_waits() {
    let Some(host) = Host::new("inuse") else { return };
    host.up("none", &["--replicas", "1"]);
    let holder = host.status()["replicas"][0]["pid"].as_u64().unwrap();
    let mut second = Ended(replica(&host, &host.directories()[0]).spawn().unwrap());
    let lines = BufReader::new(second.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let line =
        lines.take_while(|line| !line.starts_with("error")).find(|line| line.contains("in use by process"));
    let line = line.expect("it says for whom it waits");
    assert!(line.contains(&format!("in use by process {holder} ")) && line.contains("60 s"), "{line}");
}

/// Restored from somewhere, or mistaken: what is missing is there, and nobody would look for the key.
#[test]
fn a_volume_whose_key_is_another_one_says_so_while_it_waits() {
    let Some(host) = Host::new("key") else { return };
    host.up("none", &["--replicas", "1"]);
    fs::write(host.path(&format!("volumes/{}/key", host.volume)), [7; 32]).unwrap();
    host::kill_9(host::pid(&host.status()["engine_pid"]));
    let mut up = Ended(
        host.command(&["up", &host.volume]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap(),
    );
    let mut lines = BufReader::new(up.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let told = lines.find(|line| line.contains("the key is not this volume's") || line.starts_with("error"));
    assert!(told.as_ref().is_some_and(|line| line.starts_with("waiting: ")), "{told:?}");
    // Whoever has no `up` that waits, as of an engine that was started by hand.
    let remark = host.status()["remark"].clone();
    assert!(remark.as_str().is_some_and(|text| text.contains("give both sides the key file")), "{remark}");
}

#[test]
fn a_replica_without_a_directory_says_what_makes_one() {
    let Some(host) = Host::new("nosize") else { return };
    let (missing, empty) = (host.path("missing"), host.path("empty"));
    fs::create_dir(&empty).unwrap();
    for directory in [&missing, &empty] {
        let done = replica(&host, directory).output().unwrap();
        assert!(said(&done).lines().last().unwrap().contains("--size"), "{}", said(&done));
    }
    assert!(!missing.exists() && fs::read_dir(&empty).unwrap().next().is_none());
}

/// The instance manager remembers what has ended. Nothing runs, as `status` says, and nobody has to stop it first.
#[test]
fn a_volume_that_did_not_come_up_is_salvaged_at_once() {
    let Some(host) = Host::new("failed") else { return };
    host.up("none", &["--replicas", "2"]);
    host.ok(&["down", &host.volume]);
    let metas: Vec<PathBuf> = host.directories().iter().map(|d| d.join("volume.meta")).collect();
    let sound: Vec<Vec<u8>> = metas.iter().map(|meta| fs::read(meta).unwrap()).collect();
    metas.iter().for_each(|meta| fs::write(meta, "{").unwrap());
    host.refused(&["up", &host.volume], "can be opened");
    assert_eq!(host.status()["state"], "detached");
    fs::write(&metas[0], &sound[0]).unwrap();
    let salvaged: Value = serde_json::from_str(&host.ok(&["-o", "json", "salvage", &host.volume])).unwrap();
    assert_eq!(salvaged["status"]["state"], "attached", "{salvaged}");
}

/// There is none from which it could be rebuilt.
#[test]
fn nobody_is_told_to_rebuild_the_only_replica() {
    let Some(host) = Host::new("only") else { return };
    host.up("none", &["--replicas", "1"]);
    host.ok(&["snapshot", "create", &host.volume, "s1"]);
    host.ok(&["down", &host.volume]);
    let directory = host.directories().remove(0);
    fs::write(directory.join("volume-snap-s1.img.meta"), "{").unwrap();
    let up = said(&host.run(&["up", &host.volume]));
    let status = host.status()["replicas"][0]["remark"].as_str().unwrap().to_owned();
    let salvage = host.run(&["salvage", &host.volume]);
    let salvage = said(&salvage) + &String::from_utf8_lossy(&salvage.stdout);
    for text in [up, status, salvage] {
        assert!(!text.contains("be rebuilt") && text.contains("restore the file"), "{text}");
        assert!(text.contains("replica export --rescue"), "{text}");
    }
}

#[test]
fn a_revert_says_which_snapshots_still_have_what_it_took_back() {
    let Some(host) = Host::new("revert") else { return };
    host.up("none", &["--replicas", "1"]);
    let take = |name: &str| host.ok(&["snapshot", "create", &host.volume, name]);
    let revert = |name: &str| said(&host.run(&["snapshot", "revert", &host.volume, name]));
    take("s1");
    let alone = revert("s1");
    assert!(alone.contains("what it had since is gone"), "{alone}");
    take("s2");
    take("s3");
    let text = revert("s1");
    assert!(
        text.contains("up to s3 is kept in its snapshots") && text.contains("what came after s3 is gone"),
        "{text}"
    );
}

#[test]
fn a_replica_that_is_given_by_its_place_is_named() {
    let Some(host) = Host::new("place") else { return };
    host.up("none", &["--replicas", "2"]);
    let (name, directory) = (host.name_of_first(), host.directories().remove(0));
    let address = host.status()["replicas"][0]["address"].as_str().unwrap().to_owned();
    for given in [directory.to_str().unwrap(), &address] {
        for word in ["rm", "rebuild"] {
            host.refused(
                &["replica", word, &host.volume, given],
                &format!("replica {word} {} {name}`", host.volume),
            );
        }
    }
    host.refused(&["replica", "rm", &host.volume, "/nowhere"], "replica ls");
    assert_eq!(host.directories().len(), 2);
}

#[test]
fn a_file_called_qcow2_is_one() {
    let Some(host) = Host::new("suffix") else { return };
    host.up("none", &["--replicas", "1"]);
    host.ok(&["snapshot", "create", &host.volume, "s1"]);
    let is_qcow2 = |file: &str, more: &[&str]| {
        let path = host.path(file);
        let words = ["snapshot", "export", &host.volume, "s1", path.to_str().unwrap()];
        host.ok(&[&words, more].concat());
        fs::read(&path).unwrap().starts_with(b"QFI\xfb")
    };
    assert!(is_qcow2("a.qcow2", &[]) && is_qcow2("a.QCOW2", &[]));
    assert!(!is_qcow2("a.img", &[]) && !is_qcow2("qcow2", &[]));
    assert!(!is_qcow2("b.qcow2", &["--format", "raw"]) && is_qcow2("b.img", &["--format", "qcow2"]));
}

#[test]
fn each_column_of_what_becomes_of_all_volumes_has_a_name() {
    let Some(host) = Host::new("all") else { return };
    host.up("none", &["--replicas", "1"]);
    let printed = host.ok(&["up", "--all"]);
    let head: Vec<&str> = printed.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(head, ["VOLUME", "STATE", "ENDPOINT"], "{printed}");
    let printed = host.ok(&["down", "--all"]);
    let row: Vec<&str> = printed.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row, [host.volume.as_str(), "down"], "{printed}");
}

/// It is not in sync by being down.
#[test]
fn a_volume_that_is_stopped_before_all_are_in_sync_says_what_becomes_of_them() {
    let Some(host) = Host::new("behind") else { return };
    host.up("none", &["--replicas", "2"]);
    let quiet = said(&host.run(&["down", &host.volume]));
    assert!(!quiet.contains("in sync"), "{quiet}");
    host.up("none", &[]);
    let (name, directory) = (host.name_of_first(), host.directories().remove(0));
    fs::rename(&directory, host.path("aside")).unwrap();
    fs::write(&directory, "in its way").unwrap();
    host::kill_9(host::pid(&host.status()["replicas"][0]["pid"]));
    host.wait("it is out", |status| status["replicas"][0]["mode"] == "ERR");
    let text = said(&host.run(&["down", &host.volume]));
    assert!(text.contains(&format!("{name} is not in sync")) && text.contains("once it is up"), "{text}");
}

/// The lock, a process's record, a log and the volume's record are all that keeps two managers from one root.
#[test]
fn no_file_of_a_root_is_replaced_by_an_export() {
    let Some(host) = Host::new("exported") else { return };
    host.up("none", &["--replicas", "1"]);
    host.ok(&["snapshot", "create", &host.volume, "s1"]);
    let volume = host.volume.as_str();
    let link = host.path("link");
    std::os::unix::fs::symlink(host.path("run"), &link).unwrap();
    let places = [
        host.path("run/instance-manager.lock"),
        host.path(&format!("run/processes/{volume}-e-0.json")),
        host.path("log/demo.img"),
        host.path("volumes/demo.img"),
        host.path("engine-binaries/images/demo.img"),
        link.join("demo.img"),
        format!("/run/longhorn/{volume}.img").into(),
    ];
    fs::create_dir_all(host.path("engine-binaries/images")).unwrap();
    for place in places {
        let before = fs::read(&place).ok();
        let file = place.to_str().unwrap();
        host.refused(&["snapshot", "export", volume, "s1", file], "would lie among the files of");
        assert_eq!(fs::read(&place).ok(), before, "{file}");
    }
    let file = host.path("demo.img");
    host.ok(&["snapshot", "export", volume, "s1", file.to_str().unwrap()]);
}

#[test]
fn what_sends_data_unencrypted_says_so_in_its_log() {
    let Some(host) = Host::new("open") else { return };
    let mut open = replica_at(&host, &host.path("data"), "tcp:127.0.0.1:0");
    open.args(["--size", "16777216", "--insecure"]);
    let mut open = Ended(open.spawn().unwrap());
    let mut lines = BufReader::new(open.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let is_told = |line: &String| line.contains("insecure: data is not encrypted");
    // What it says last before it can be reached.
    let until = |line: &String| is_told(line) || line.contains("127.0.0.1") || line.starts_with("error");
    let told = lines.find(until);
    assert!(told.as_ref().is_some_and(is_told), "{told:?}");
    // It begins with nobody: that is told before.
    let engine = ["controller", "--root", host.dir.path().to_str().unwrap(), "--insecure", "--replica"];
    let socket = format!("unix:{}", host.path("e.sock").display());
    let words = ["by-hand=tcp:127.0.0.1:9", "--listen", &socket, &host.volume];
    let text = said(&Command::new(LONGHORN).args(engine).args(words).output().unwrap());
    assert_eq!(text.matches("insecure: data is not encrypted").count(), 1, "{text}");
}

#[test]
fn an_engine_says_how_the_directory_of_its_authority_is_made() {
    let Some(host) = Host::new("nowhere") else { return };
    let (missing, key) = (host.path("missing"), host.path("key"));
    fs::write(&key, [7; 32]).unwrap();
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let socket = |name: &str| format!("unix:{}", host.path(name).display());
    let mut engine = Command::new(LONGHORN);
    engine.args(["controller", "--size", "16777216", "--listen", &socket("e.sock"), "--key-file"]).arg(&key);
    engine.arg("--root").arg(host.dir.path()).arg("--authority").arg(&missing).arg(&host.volume);
    // There may be more than one thing wrong; this one is the command line's.
    let none = engine.output().unwrap();
    assert!(said(&none).contains("at least one --replica"), "{}", said(&none));
    assert!(none.status.code() == Some(3) && !missing.exists());
    let done = engine.arg("--replica").arg(format!("by-hand={}", socket("d.sock"))).output().unwrap();
    // Its disk may come back.
    assert_eq!(done.status.code(), Some(1));
    assert!(said(&done).contains(&format!("`mkdir -p {}`", missing.display())), "{}", said(&done));
    assert!(!missing.exists());
}

#[test]
fn what_was_never_started_is_started_and_not_salvaged() {
    let Some(host) = Host::new("never") else { return };
    host.up("none", &["--replicas", "2"]);
    host.ok(&["down", &host.volume]);
    let new = format!("{}-new", host.volume);
    host.ok(&["clone", &host.volume, &new]);
    host.refused(&["salvage", &new], "was never started");
    host.refused(&["salvage", &new], &format!("up {new}` starts it"));
    host.ok(&["-o", "json", "rm", "--yes", &new]);
    // Of one that was started that is not said.
    let directories = host.directories();
    directories.iter().for_each(|d| fs::remove_dir_all(d).unwrap());
    let lost = said(&host.run(&["salvage", &host.volume]));
    assert!(lost.contains("no replica") && !lost.contains("never started"), "{lost}");
}

/// Neither has to wait for a build.
#[test]
fn what_was_not_started_from_the_sources_is_not_stopped_from_there() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/run");
    let nothing = tempfile::tempdir().unwrap();
    let run = |words: &[&str]| {
        // Where it would build, it does not get that far.
        let mut command = Command::new("timeout");
        command.arg("20").arg(&script).args(words).env("CARGO_TARGET_DIR", nothing.path());
        command.env("CARGO", "false").env("PATH", "/usr/bin:/bin").stdin(Stdio::null()).output().unwrap()
    };
    let two = run(&["--down", "demo"]);
    assert!(two.status.code() == Some(2) && said(&two).contains("one option at most"), "{}", said(&two));
    let down = run(&["--down"]);
    assert_eq!(down.status.code(), Some(1), "{}", said(&down));
    assert!(said(&down).contains("nothing was started from here"), "{}", said(&down));
}
