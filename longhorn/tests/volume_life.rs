//! A volume's life through the commands, with real processes and without a frontend: no kernel feature is needed but
//! io_uring. Real devices are the end-to-end scenarios' affair.

mod host;
mod nbd;
mod stopped;

use std::io::{self, ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use host::{Host, has_ended, is_healthy, kill_9, pid, signal, until};
use nix::sys::signal::Signal;
use serde_json::Value;
use stopped::stand_still;

const CTL: &str = env!("CARGO_BIN_EXE_longhornctl");

/// Far more than anything here takes, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Everything at and below a place that others than its owner may do anything with.
fn open_to_others(place: &Path, found: &mut Vec<(std::path::PathBuf, u32)>) {
    use std::os::unix::fs::PermissionsExt;
    // Replicas that run rename files, and remove them.
    let meta = match std::fs::symlink_metadata(place) {
        Err(e) if e.kind() == ErrorKind::NotFound => return,
        meta => meta.unwrap(),
    };
    if meta.permissions().mode() & 0o077 != 0 {
        found.push((place.to_owned(), meta.permissions().mode() & 0o777));
    }
    if meta.is_dir() {
        std::fs::read_dir(place).unwrap().for_each(|entry| open_to_others(&entry.unwrap().path(), found));
    }
}

/// A replica may lie on a disk of its own, where no root keeps others out.
#[test]
fn what_a_replica_holds_is_for_its_owner_alone() {
    let Some(host) = Host::new("mine") else { return };
    let copy = format!("{}-copy", host.volume);
    let elsewhere = tempfile::tempdir().unwrap();
    let directory = elsewhere.path().join("demo");
    host.up("none", &["--replicas", "1"]);
    host.ok(&["replica", "add", &host.volume, "--dir", directory.to_str().unwrap()]);
    host.ok(&["snapshot", "create", &host.volume, "s1"]);
    host.ok(&["clone", &format!("{}@s1", host.volume), &copy]);
    for asked in ["--wait", "--status"] {
        let found = host.ok(&["scrub", &host.volume, asked]);
        assert!(found.contains("looked at"), "what was found is the result: {found:?}");
    }
    let mut found = Vec::new();
    open_to_others(&directory, &mut found);
    open_to_others(&host.dir.path().join("replicas"), &mut found);
    assert!(found.is_empty(), "{found:?}");
    let image = elsewhere.path().join("out.img");
    let (directory, image) = (directory.to_str().unwrap(), image.to_str().unwrap());
    let exported = |args: &[&str]| {
        let told: Value = serde_json::from_str(&host.ok(args)).expect("one document of JSON");
        assert_eq!((&told["file"], &told["size"]), (&Value::from(image), &Value::from(16 << 20)), "{told}");
    };
    exported(&["-o", "json", "snapshot", "export", &host.volume, "s1", image]);
    // Whoever ended the process that has it would see another one take its place.
    host.refused(&["replica", "export", directory, image], &format!("snapshot export {}", host.volume));
    // As other tools call it.
    host.ok(&["stop", &host.volume]);
    exported(&["-o", "json", "replica", "export", directory, image]);
}

#[test]
fn up_snapshot_down_rm() {
    let Some(host) = Host::new("life") else { return };
    let volume = host.volume.as_str();
    host.refused(&["up", volume], "--size");
    host.up("none", &[]);
    // `up` waits until it can be used.
    let up = host.wait("all replicas", is_healthy);
    assert_eq!((&up["generation"], &up["endpoint"]), (&Value::from(1_u64 << 32), &Value::from("")));
    host.ok(&["up", volume, "--size", "16MiB"]);
    assert_eq!(host.status()["engine_pid"], up["engine_pid"], "up on a running volume changes nothing");
    host.refused(&["up", volume, "--io-timeout", "7"], "down");
    host.refused(&["rm", volume, "--yes"], "down");

    assert_eq!(host.ok(&["snapshot", "create", volume, "one"]).trim(), "one");
    let second = host.ok(&["snapshot", "create", volume]).trim().to_owned();
    host.refused(&["snapshot", "create", volume, "one"], "one");
    let list = |host: &Host| -> Value {
        serde_json::from_str(&host.ok(&["-o", "json", "snapshot", "ls", volume])).unwrap()
    };
    let running = list(&host);
    assert_eq!(running[0]["name"], "one");
    assert_eq!(running[0]["children"], Value::from(vec![second.clone()]));
    assert_eq!(running[1]["parent"], "one");
    assert_eq!(running[1]["user_created"], true);
    let out: PathBuf = host.dir.path().join("one.img");
    host.ok(&["snapshot", "export", volume, "one", out.to_str().unwrap()]);
    assert_eq!(std::fs::metadata(&out).unwrap().len(), 16 << 20);

    host.ok(&["down", volume]);
    let down = host.status();
    assert_eq!((&down["state"], &down["engine_pid"]), (&Value::from("detached"), &Value::Null));
    assert!(down["replicas"].as_array().unwrap().iter().all(|r| r["mode"] == "RW" && r["pid"].is_null()));
    let stopped = list(&host);
    let names = |list: &Value| list.as_array().unwrap().iter().map(|s| s["name"].clone()).collect::<Vec<_>>();
    assert_eq!(names(&stopped), names(&running));
    host.ok(&["down", volume]);
    host.ok(&["up", volume, "--io-timeout", "7"]);
    assert_eq!(host.status()["generation"], Value::from(2_u64 << 32));
    host.ok(&["down", volume]);
    host.ok(&["rm", volume, "--yes"]);
    assert_eq!(std::fs::read_dir(host.dir.path().join("replicas")).unwrap().count(), 0);
}

/// Of the longest name that a volume may have, replicas and an engine have longer ones.
#[test]
fn a_volume_may_have_the_longest_name() {
    let Some(mut host) = Host::new("longest-") else { return };
    host.volume = format!("{:x<64}", host.volume);
    let volume = host.volume.as_str();
    host.up("none", &["--replicas", "1"]);
    let added = host.ok(&["replica", "add", volume]).trim().to_owned();
    assert_eq!(host.wait("two replicas", is_healthy)["replicas"][1]["name"], added.as_str());
    host.ok(&["replica", "rebuild", volume, &added]);
    host.ok(&["replica", "rm", volume, &added]);
    host.ok(&["down", volume]);
}

/// A name that was made up nobody could find again among others.
#[test]
fn what_was_made_is_named_also_where_its_name_cannot_be_printed() {
    let Some(host) = Host::new("unnamed") else { return };
    let volume = host.volume.as_str();
    host.up("none", &["--replicas", "1"]);
    for (args, list, has) in [
        (["snapshot", "create", volume], ["snapshot", "ls", volume], "was taken"),
        (["replica", "add", volume], ["replica", "ls", volume], "is in sync"),
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let done = host.command(&args).stdout(full).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{said}");
        let made: Value = serde_json::from_str(&host.ok(&[&["-o", "json"], &list[..]].concat())).unwrap();
        let name = made.as_array().unwrap().last().unwrap()["name"].as_str().unwrap().to_owned();
        let told = said.lines().last().unwrap();
        assert!(told.contains(&name) && told.contains(has), "{name}: {said}");
    }
    host.ok(&["down", volume]);
}

#[test]
fn whatever_dies_comes_back() {
    let Some(host) = Host::new("deaths") else { return };
    let volume = host.volume.as_str();
    host.up("none", &[]);
    let first = host.status();

    kill_9(pid(&first["engine_pid"]));
    let second = host.wait("a new engine", |s| is_healthy(s) && s["engine_pid"] != first["engine_pid"]);
    assert_eq!(second["generation"], Value::from((1_u64 << 32) + 1), "its manager counts restarts");

    let lost = &second["replicas"][1];
    kill_9(pid(&lost["pid"]));
    host.wait("the replica again", |s| is_healthy(s) && s["replicas"][1]["pid"] != lost["pid"]);

    host.kill_everything();
    let dead = host.status();
    assert_eq!((&dead["state"], &dead["engine_pid"]), (&Value::from("detached"), &Value::Null));
    host.ok(&["up", volume]);
    let third = host.wait("everything again", is_healthy);
    assert!(third["generation"].as_u64() > second["generation"].as_u64());
    host.ok(&["down", volume]);
    host.ok(&["rm", volume, "--yes"]);
}

/// Most systems give a process 1024, and take more from nobody who asks.
#[test]
fn engines_and_replicas_may_have_more_files_open_than_whoever_starts_them() {
    let Some(host) = Host::new("files") else { return };
    let volume = host.volume.as_str();
    let mut up = Command::new("sh");
    up.args(["-c", "ulimit -S -n 1024 && exec \"$0\" \"$@\"", CTL, "--root"]).arg(host.dir.path());
    up.args(["up", volume, "--size", "16MiB", "--frontend", "none"]);
    let done = up.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let status = host.wait("the volume", is_healthy);
    for process in [&status["engine_pid"], &status["replicas"][0]["pid"]] {
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", pid(process))).unwrap();
        let files = limits.lines().find_map(|l| l.strip_prefix("Max open files")).unwrap();
        let [soft, hard] = [0, 1].map(|n| files.split_whitespace().nth(n).unwrap().parse::<u64>().unwrap());
        assert_eq!(soft, hard.min(16 << 10), "process {process}");
    }
    host.ok(&["down", volume]);
    host.ok(&["rm", volume, "--yes"]);
}

/// What a host had up when it lost its power is known by the note of whoever started it, and by what its manager remembers of the
/// engine: either is enough, since the power may go before the second is there, and programs of before left no note.
#[test]
fn what_was_noted_or_is_remembered_is_started_again() {
    let Some(host) = Host::new("again") else { return };
    let volume = host.volume.as_str();
    let note = host.dir.path().join(format!("volumes/{volume}/up"));
    let memory = host.dir.path().join(format!("run/processes/{volume}-e-0.json"));
    let is_up = || host.status()["state"] == "attached";
    let again = |gone: &[&Path]| {
        host.kill_everything();
        gone.iter().for_each(|file| std::fs::remove_file(file).unwrap());
        host.ok(&["up", "--all"]);
        is_up()
    };
    host.up("none", &["--replicas", "1"]);
    assert!(again(&[&memory]), "it was noted");
    assert!(again(&[&note]), "it is remembered");
    assert!(note.exists(), "and noted since");
    assert!(!again(&[&note, &memory]), "nobody knows of it");
    // What is stopped for a while is noted then, at the latest.
    host.ok(&["up", volume]);
    std::fs::remove_file(&note).unwrap();
    host.ok(&["down", volume, "--for-now"]);
    assert!(note.exists() && !memory.exists() && !is_up());
    assert!(again(&[]), "it was stopped for a while");
    host.ok(&["down", volume]);
    assert!(!note.exists() && !again(&[]));
    // One that was down is not to be up for that.
    host.ok(&["down", volume, "--for-now"]);
    assert!(!note.exists());
}

#[test]
fn a_name_that_lives_under_another_root_is_refused() {
    let (Some(host), Some(mut other)) = (Host::new("two-roots"), Host::new("two-roots")) else { return };
    other.volume.clone_from(&host.volume);
    let volume = host.volume.as_str();
    host.up("none", &["--replicas", "1"]);
    other
        .refused(&["up", volume, "--size", "16MiB", "--frontend", "none"], host.dir.path().to_str().unwrap());
    assert!(other.processes().is_empty());
    host.ok(&["down", volume]);
    other.ok(&["up", volume, "--size", "16MiB", "--frontend", "none", "--replicas", "1"]);
    other.ok(&["down", volume]);
}

/// Longhorn's clients speak to the engine alone.
#[test]
fn a_volume_that_its_engine_was_told_to_grow_has_its_size_everywhere() {
    let Some(host) = Host::new("grown") else { return };
    let volume = host.volume.as_str();
    host.up("none", &["--replicas", "1"]);
    let grow = |size: &str| {
        let socket = format!("unix:{}/run/{volume}-e-0.grpc.sock", host.dir.path().display());
        let program = Command::new(env!("CARGO_BIN_EXE_longhorn"))
            .args(["--url", &socket, "expand", "--size", size])
            .output();
        let grown = program.unwrap();
        assert!(grown.status.success(), "{}", String::from_utf8_lossy(&grown.stderr));
    };
    grow("20MiB");
    assert_eq!(host.status()["size"], Value::from(20 << 20));
    host.ok(&["up", volume, "--size", "20MiB"]);
    host.refused(&["up", volume, "--size", "16MiB"], "20 MiB");
    grow("24MiB");
    let down: Value = serde_json::from_str(&host.ok(&["-o", "json", "down", volume])).unwrap();
    assert_eq!(down["size"], Value::from(24 << 20));
    assert_eq!(host.status()["size"], Value::from(24 << 20));
    host.ok(&["up", volume, "--size", "24MiB"]);
    host.ok(&["down", volume]);
}

/// Processes that are started by hand; they end with this.
struct ByHand(Vec<Child>);

impl ByHand {
    fn start(&mut self, program: &str, words: &[&str]) -> &mut Child {
        let mut command = Command::new(program);
        self.0.push(command.args(words).stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        self.0.last_mut().unwrap()
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Longhorn's command line of an engine has no generation, and its replicas may be anywhere.
#[test]
fn an_engine_without_a_number_asks_its_replicas_and_leaves_a_living_engine_alone() {
    let Some(host) = Host::new("numbers") else { return };
    let (volume, longhorn) = (host.volume.as_str(), env!("CARGO_BIN_EXE_longhorn"));
    host.up("none", &["--replicas", "1"]);
    host.ok(&["down", volume]);
    let replica = host.status()["replicas"][0].clone();
    let (name, path) = (replica["name"].as_str().unwrap(), replica["path"].as_str().unwrap());
    let place = |file: &str| format!("unix:{}/{file}", host.dir.path().display());
    let record = host.dir.path().join("volumes").join(volume).display().to_string();
    let key = format!("{record}/key");
    let mut by_hand = ByHand(Vec::new());
    let (control, data) = (place("r.grpc.sock"), place("r.sock"));
    let words = ["replica", "--volume-name", volume, "--replica-instance-name", name, "--listen", &control];
    by_hand.start(longhorn, &[&words[..], &["--data-listen", &data, "--key-file", &key, path]].concat());
    until("the replica listens", || UnixStream::connect(host.dir.path().join("r.sock")).is_ok());

    let elsewhere = host.dir.path().join("elsewhere").display().to_string();
    let (socket, member) = (place("e.sock"), format!("{name}={data}"));
    let engine = [
        "controller",
        "--root",
        &elsewhere,
        "--authority",
        &record,
        "--key-file",
        &key,
        "--size",
        "16777216",
    ];
    let engine = [&engine[..], &["--frontend", "none", "--listen", &socket, "--replica", &member]].concat();
    let issued = || -> u64 {
        let authority: Value =
            serde_json::from_slice(&std::fs::read(format!("{record}/authority.json")).unwrap()).unwrap();
        authority["epoch"]["generation"].as_u64().unwrap() >> 32
    };
    by_hand.start(longhorn, &[&engine[..], &["--generation", &(7_u64 << 32).to_string(), volume]].concat());
    until("an epoch of the seventh", || issued() == 7);
    // On another host nothing but the replicas knows of it.
    let other = ["--mount", "sh", "-c", "mount -t tmpfs none /run/longhorn && exec \"$0\" \"$@\"", longhorn];
    let refused = Command::new("unshare").args([&other[..], &engine, &[volume]].concat()).output().unwrap();
    assert_eq!(refused.status.code(), Some(3), "it has fenced off an engine that lives");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains(&format!("with --generation {}", 8_u64 << 32)), "{said}");
    let first = &mut by_hand.0[1];
    assert!(first.try_wait().unwrap().is_none(), "the engine that lived has ended");
    first.kill().unwrap();
    first.wait().unwrap();
    by_hand.start(longhorn, &[&engine[..], &[volume]].concat());
    until("an epoch of the eighth", || issued() == 8);
    // A clean end leaves nothing of the volume on the host.
    let last = by_hand.0.last_mut().unwrap();
    signal(i32::try_from(last.id()).unwrap(), Signal::SIGTERM);
    assert!(last.wait().unwrap().success());
}

/// On a host of its own, where nothing but its replicas knows of the engines before, and they begin after it.
#[test]
fn an_engine_whose_replicas_come_later_and_know_more_has_its_next_start_begin() {
    let Some(host) = Host::new("later") else { return };
    let (volume, longhorn) = (host.volume.as_str(), env!("CARGO_BIN_EXE_longhorn"));
    for _ in 0..2 {
        host.up("none", &["--replicas", "1"]);
        host.ok(&["down", volume]);
    }
    let replica = host.status()["replicas"][0].clone();
    let (name, path) = (replica["name"].as_str().unwrap(), replica["path"].as_str().unwrap());
    let place = |file: &str| format!("unix:{}/{file}", host.dir.path().display());
    let key = host.dir.path().join("volumes").join(volume).join("key").display().to_string();
    let elsewhere = host.dir.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let (elsewhere, socket) = (elsewhere.display().to_string(), place("e.sock"));
    let (control, data) = (place("r.grpc.sock"), place("r.sock"));
    let member = format!("{name}={data}");
    let engine = [
        "controller",
        "--root",
        &elsewhere,
        "--authority",
        &elsewhere,
        "--key-file",
        &key,
        "--size",
        "16777216",
    ];
    let engine =
        [&engine[..], &["--frontend", "none", "--listen", &socket, "--replica", &member, volume]].concat();
    let mut by_hand = ByHand(Vec::new());
    by_hand.start(longhorn, &engine);
    until("the engine listens", || UnixStream::connect(host.dir.path().join("e.sock")).is_ok());
    let words = ["replica", "--volume-name", volume, "--replica-instance-name", name, "--listen", &control];
    by_hand.start(longhorn, &[&words[..], &["--data-listen", &data, "--key-file", &key, path]].concat());
    let first = by_hand.0[0].wait().unwrap();
    assert_eq!(
        first.code(),
        Some(1),
        "whoever starts it again is not to be told that it fails in the same way"
    );
    by_hand.start(longhorn, &engine);
    let issued = || -> Option<u64> {
        let authority = std::fs::read(format!("{elsewhere}/authority.json")).ok()?;
        let authority: Value = serde_json::from_slice(&authority).ok()?;
        Some(authority["epoch"]["generation"].as_u64()? >> 32)
    };
    until("an epoch of the third", || issued() == Some(3));
}

#[test]
fn a_server_stays_where_it_listens_when_its_frontend_is_named_again() {
    let Some(host) = Host::new("stays") else { return };
    let (volume, address) = (host.volume.as_str(), own_address(7));
    host.up("nbd-server", &["--replicas", "1", "--listen", &address]);
    let up = host.status();
    host.ok(&["up", volume, "--frontend", "nbd-server"]);
    assert_eq!(host.status(), up);
    host.refused(&["up", volume, "--listen", "127.0.0.1:1"], &format!("--listen {address}"));
    host.ok(&["down", volume]);
    host.ok(&["up", volume, "--frontend", "nbd-server"]);
    assert!(
        host.status()["uri"].as_str().unwrap().starts_with("nbd+unix:"),
        "by itself it listens elsewhere"
    );
    host.ok(&["down", volume]);
}

/// A client of a server that says something when it accepts, or waits to be spoken to.
fn connect(place: &str) -> io::Result<Box<dyn Read>> {
    let patience = Some(PATIENCE);
    if place.starts_with('/') {
        let stream = UnixStream::connect(place)?;
        stream.set_read_timeout(patience)?;
        return Ok(Box::new(stream));
    }
    let stream = TcpStream::connect(place)?;
    stream.set_read_timeout(patience)?;
    Ok(Box::new(stream))
}

/// State of a TCP socket that listens (include/net/tcp_states.h), and of a connection to a unix socket that waits to be taken
/// (SS_CONNECTING, include/uapi/linux/net.h).
const LISTENS: u8 = 0x0a;
const WAITS: &str = "02";

/// What the kernel tells of the TCP sockets at an address of this host (proc_net_tcp.txt): state, and how much waits there to be
/// taken: bytes, or connections of one that listens.
fn sockets_at(address: &str) -> Vec<(u8, u32)> {
    let address: SocketAddrV4 = address.parse().unwrap();
    let at = format!("{:08X}:{:04X}", u32::from_ne_bytes(address.ip().octets()), address.port());
    let number = |hex: &str| u32::from_str_radix(hex, 16).unwrap();
    let all = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let fields = all.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let here = fields.filter(|fields| fields[1] == at);
    here.map(|fields| (number(fields[3]).to_le_bytes()[0], number(fields[4].split_once(':').unwrap().1)))
        .collect()
}

/// Somebody has connected there, and nobody has taken the connection.
fn is_somebody_waiting(place: &str) -> bool {
    if !place.starts_with('/') {
        return sockets_at(place).iter().any(|(state, waiting)| *state == LISTENS && *waiting > 0);
    }
    let all = std::fs::read_to_string("/proc/net/unix").unwrap();
    let mut fields = all.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields.any(|fields| fields.get(5) == Some(&WAITS) && fields.last() == Some(&place))
}

/// An address of this machine that no other test has: what is free there stays free.
fn own_address(last: u8) -> String {
    let [.., high, low] = std::process::id().to_be_bytes();
    TcpListener::bind((Ipv4Addr::new(127, high, low, last), 0)).unwrap().local_addr().unwrap().to_string()
}

/// Kills the engine while its manager sleeps, so that there is a time without any.
fn is_not_missed(word: &str, frontend: &str, listen: Option<&str>) {
    let Some(host) = Host::new(word) else { return };
    let volume = host.volume.as_str();
    let place = listen.map_or_else(|| format!("/run/longhorn/{volume}.nbd.sock"), str::to_owned);
    let mut up = vec!["up", volume, "--size", "16MiB", "--replicas", "1", "--frontend", frontend];
    up.extend(listen.iter().flat_map(|address| ["--listen", address]));
    host.ok(&up);
    let manager = std::fs::read_to_string(host.dir.path().join("run/instance-manager.lock")).unwrap();
    let manager: i32 = manager.trim().parse().unwrap();
    for _ in 0..2 {
        let engine = host.status()["engine_pid"].clone();
        stand_still(manager);
        kill_9(pid(&engine));
        until("the engine has ended", || has_ended(pid(&engine)));
        // Its ring outlives it for some milliseconds, and may still take one.
        let mut waiting = connect(&place);
        until("a connection waits", || {
            waiting.is_err() || is_somebody_waiting(&place) || {
                waiting = connect(&place);
                false
            }
        });
        signal(manager, Signal::SIGCONT);
        let mut waiting = waiting.unwrap_or_else(|e| panic!("{frontend} at {place} without an engine: {e}"));
        if frontend == "nbd-server" {
            let mut greeting = [0; 8];
            waiting.read_exact(&mut greeting).unwrap();
            assert_eq!(&greeting, b"NBDMAGIC");
        }
        host.wait("a new engine", |s| is_healthy(s) && s["engine_pid"] != engine);
        connect(&place).unwrap();
    }
    host.ok(&["down", volume]);
    // What the last one has left with its manager is closed behind its end.
    until("nobody listens", || {
        let refused = connect(&place).map(drop).err();
        refused.is_some_and(|e| matches!(e.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound))
    });
}

#[test]
fn whoever_connects_while_no_engine_runs_waits_for_the_next_one() {
    is_not_missed("unix", "nbd-server", None);
    is_not_missed("tcp", "nbd-server", Some(&own_address(1)));
    is_not_missed("target", "iscsi-target", Some(&own_address(1)));
}

/// A replica does not answer: who wants the volume hidden is told so before any manager loses its patience, and it is hidden when
/// the request has been answered, by the same engine.
#[test]
fn what_is_in_flight_holds_up_the_end_of_a_server_and_no_more() {
    let Some(host) = Host::new("hidden") else { return };
    let (volume, address) = (host.volume.as_str(), own_address(2));
    host.up("nbd-server", &["--replicas", "1", "--listen", &address]);
    let up = host.status();
    let engine_line = |words: &[&str]| {
        let socket = host.dir.path().join(format!("run/{volume}-e-0.grpc.sock"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_longhorn"));
        command.arg("--url").arg(format!("unix:{}", socket.display())).args(words);
        command.stdin(Stdio::null()).output().unwrap()
    };
    let mut client = nbd::Client::over(TcpStream::connect(&address).unwrap(), volume);
    client.write(0, &[1; 4096]);
    stand_still(pid(&up["replicas"][0]["pid"]));
    client.begin_write(0, &[2; 4096]);
    until("the engine has taken it", || sockets_at(&address).iter().all(|(_, waiting)| *waiting == 0));

    let refused = engine_line(&["frontend", "shutdown"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("in flight"), "{said}");
    assert_eq!(host.status()["endpoint"], up["endpoint"], "it is not hidden");
    signal(pid(&up["replicas"][0]["pid"]), Signal::SIGCONT);
    client.end();
    let hidden = host.wait("it is hidden", |s| s["endpoint"] == "");
    assert_eq!(hidden["engine_pid"], up["engine_pid"], "the engine lives on");

    assert!(engine_line(&["frontend", "start", "nbd-server"]).status.success());
    let mut client = nbd::Client::over(TcpStream::connect(&address).unwrap(), volume);
    assert_eq!(client.read(0, 4096), [2; 4096]);
    drop(client);
    host.ok(&["down", volume]);
}

/// The same of an engine that is told to end: whoever told it hears that it takes longer, and it ends when it can.
#[test]
fn an_engine_that_was_told_to_end_ends_once_what_is_in_flight_is_done() {
    let Some(host) = Host::new("late") else { return };
    let (volume, address) = (host.volume.as_str(), own_address(3));
    let listen = ["--frontend", "nbd-server", "--listen", &address];
    host.ok(&[&["up", volume, "--size", "16MiB", "--replicas", "1"], &listen[..]].concat());
    let up = host.status();
    let mut client = nbd::Client::over(TcpStream::connect(&address).unwrap(), volume);
    client.write(0, &[1; 4096]);
    stand_still(pid(&up["replicas"][0]["pid"]));
    client.begin_write(0, &[2; 4096]);
    until("the engine has taken it", || sockets_at(&address).iter().all(|(_, waiting)| *waiting == 0));
    host.refused(&["down", volume], "in flight");
    let engine = pid(&up["engine_pid"]);
    assert_eq!(host.status()["engine_pid"], up["engine_pid"], "it ended with a request in flight");
    signal(pid(&up["replicas"][0]["pid"]), Signal::SIGCONT);
    client.end();
    until("it ends by itself", || !Path::new(&format!("/proc/{engine}")).exists());
    host.ok(&["down", volume]);
    host.ok(&["up", volume]);
    let mut client = nbd::Client::over(TcpStream::connect(&address).unwrap(), volume);
    assert_eq!(client.read(0, 4096), [2; 4096]);
    drop(client);
    host.ok(&["down", volume]);
}

/// An epoch that cannot be stored, as on a disk that is full, holds requests up. Who looks is told which file it is, and all goes
/// on when there is space.
#[test]
fn what_cannot_be_noted_is_named() {
    let Some(host) = Host::new("noted") else { return };
    let (volume, address) = (host.volume.as_str(), own_address(4));
    let listen = ["--frontend", "nbd-server", "--listen", &address];
    host.ok(&[&["up", volume, "--size", "16MiB", "--replicas", "2"], &listen[..]].concat());
    let up = host.wait("healthy", |s| s["robustness"] == "healthy");
    // What the file is written as before it takes its place cannot be made.
    let in_the_way = host.dir.path().join(format!("volumes/{volume}/.authority.json.tmp"));
    std::fs::create_dir(&in_the_way).unwrap();
    stand_still(pid(&up["replicas"][1]["pid"]));
    let mut client = nbd::Client::over(TcpStream::connect(&address).unwrap(), volume);
    client.begin_write(0, &[2; 4096]);
    host.wait("it is named", |s| s["remark"].as_str().is_some_and(|r| r.contains("authority.json: ")));
    std::fs::remove_dir(&in_the_way).unwrap();
    client.end();
    host.wait("no more of it", |s| s["remark"] == "");
    signal(pid(&up["replicas"][1]["pid"]), Signal::SIGCONT);
    drop(client);
    host.ok(&["down", volume]);
}

/// Who takes the way back as `status` tells it has as many sound replicas as before.
#[test]
fn a_replica_whose_directory_is_damaged_is_replaced_as_told() {
    let Some(host) = Host::new("damaged") else { return };
    let volume = host.volume.as_str();
    host.up("none", &["--replicas", "2"]);
    let before = host.wait("healthy", is_healthy);
    assert_eq!((&before["quorum"], &before["io_timeout_seconds"]), (&"any".into(), &300.into()));
    let text = host.ok(&["status", volume]);
    assert!(text.contains("options     --quorum any --io-timeout 300\n"), "{text}");
    let log = before["log_directory"].as_str().unwrap();
    assert!(Path::new(log).join(format!("{volume}-e-0.log")).exists() && text.contains(log), "{text}");
    host.ok(&["down", volume]);
    let (name, path) = (before["replicas"][1]["name"].as_str().unwrap(), &before["replicas"][1]["path"]);
    std::fs::write(Path::new(path.as_str().unwrap()).join("volume.meta"), "x").unwrap();
    host.ok(&["up", volume]);
    let remark = |s: &Value| s["replicas"][1]["remark"].as_str().unwrap().to_owned();
    let damaged = host.wait("it is told", |s| remark(s).contains("replica rm"));
    assert!(remark(&damaged).contains("volume.meta"), "{}", remark(&damaged));

    let asked = Instant::now();
    host.refused(&["replica", "rebuild", volume, name], "does not start any more");
    assert!(asked.elapsed() < Duration::from_secs(20), "nothing is waited for");
    let steps: Vec<String> = remark(&damaged).split('`').skip(1).step_by(2).map(str::to_owned).collect();
    assert_eq!(steps.len(), 2, "{steps:?}");
    for step in steps {
        let done = Command::new("sh").args(["-c", &step.replacen("longhornctl", CTL, 1)]).output().unwrap();
        assert!(done.status.success(), "{step}: {}", String::from_utf8_lossy(&done.stderr));
    }
    assert_eq!(host.wait("healthy again", is_healthy)["replicas"].as_array().unwrap().len(), 2);

    // What is beyond the limits is told with what makes room.
    host.ok(&["up", volume, "--snapshot-max-count", "1"]);
    host.ok(&["snapshot", "create", volume, "one"]);
    host.refused(&["snapshot", "create", volume, "two"], "--snapshot-max-count N");
    host.ok(&["down", volume]);
}

/// Nobody can flush it any more. It is stopped all the same, whoever stopped it hears of it, and the next start has all of it.
#[test]
fn a_volume_without_replicas_is_stopped_and_said_not_to_be_flushed() {
    let Some(host) = Host::new("unflushed") else { return };
    let volume = host.volume.as_str();
    host.up("none", &["--replicas", "1", "--io-timeout", "77"]);
    let up = host.wait("healthy", is_healthy);
    // Its disk goes away with its process: the next manager cannot start it again.
    let lock = std::fs::read_to_string(host.dir.path().join("run/instance-manager.lock")).unwrap();
    kill_9(lock.lines().next().unwrap().parse().unwrap());
    let place = PathBuf::from(up["replicas"][0]["path"].as_str().unwrap());
    let away = place.with_extension("away");
    std::fs::rename(&place, &away).unwrap();
    std::fs::write(&place, "in the way").unwrap();
    kill_9(pid(&up["replicas"][0]["pid"]));
    // That nobody starts processes again may be said first.
    let says = |s: &Value| s["remark"].as_str().is_some_and(|r| r.contains("77 s at most (--io-timeout)"));
    host.wait("it is seen", |s| s["robustness"] == "faulted" && says(s));

    host.refused(&["down", volume], "is down, but not flushed (stopped without closing the replicas");
    let down = host.status();
    assert_eq!((&down["state"], &down["replicas"][0]["pid"]), (&"detached".into(), &Value::Null));
    let noted = host.run(&["up", "--all"]);
    assert!(!String::from_utf8(noted.stdout).unwrap().contains(volume), "it is noted as down");
    std::fs::remove_file(&place).unwrap();
    std::fs::rename(&away, &place).unwrap();
    host.ok(&["up", volume]);
    host.wait("healthy again", is_healthy);
    host.ok(&["down", volume]);
}

/// What is at the place of a disk that is not mounted is the host's own, and is not filled.
#[test]
fn a_replica_whose_disk_is_missing_waits_for_it() {
    let Some(host) = Host::new("unmounted") else { return };
    let volume = host.volume.as_str();
    let disk = tempfile::tempdir().unwrap();
    let (place, away) = (disk.path().join("replica"), disk.path().join("away"));
    host.up("none", &["--replicas", "1"]);
    host.ok(&["replica", "add", volume, "--dir", place.to_str().unwrap()]);
    host.ok(&["down", volume]);
    std::fs::rename(&place, &away).unwrap();
    host.ok(&["up", volume]);
    let remark = |s: &Value| s["replicas"][1]["remark"].as_str().unwrap().to_owned();
    let missing = host.wait("it is told", |s| remark(s).contains("mount its disk"));
    assert!(remark(&missing).contains("replica rm") && missing["robustness"] == "degraded", "{missing:#}");
    assert!(!place.exists(), "nothing is made in its place");
    std::fs::rename(&away, &place).unwrap();
    host.wait("it is back", is_healthy);
    host.ok(&["down", volume]);
}

/// A limit of a file's length (`ulimit -f`) is handed down, and whoever writes behind it is killed.
#[test]
fn a_volume_is_made_where_files_may_not_be_long() {
    let Some(host) = Host::new("short") else { return };
    let volume = host.volume.as_str();
    let up = host.command(&["up", volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none"]);
    // In units of 512 bytes or of 1 KiB.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -S -f 2048 && exec \"$@\"", "sh"]).arg(up.get_program()).args(up.get_args());
    let done = limited.stdin(Stdio::null()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let longest = |process: i32| {
        let limits = std::fs::read_to_string(format!("/proc/{process}/limits")).unwrap();
        limits.lines().find(|line| line.starts_with("Max file size")).unwrap().to_owned()
    };
    for process in host.processes() {
        assert!(longest(process).contains("unlimited"), "{}", longest(process));
    }
    host.ok(&["down", volume]);
}
