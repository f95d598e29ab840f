//! Longhorn's engine command line against a volume with real processes: what the words print, in Longhorn's shapes, and how
//! they end. `command_line.rs` has what needs no engine.

mod host;
mod stopped;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use control::proto::ptypes::controller_service_client::ControllerServiceClient;
use control::proto::ptypes::{VolumeSnapshotMaxCountSetRequest, VolumeSnapshotRequest};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use stopped::stand_still;

const CTL: &str = env!("CARGO_BIN_EXE_longhornctl");
const LONGHORN: &str = env!("CARGO_BIN_EXE_longhorn");

/// Far more than anything here takes, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A root with one volume, shown nowhere; nothing of it is left when it is dropped.
struct Host {
    dir: tempfile::TempDir,
    // One name is live once on a host.
    volume: String,
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

impl Host {
    fn up(word: &str, replicas: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIP engine_words: not root");
            return None;
        }
        let volume = format!("{word}-{}", std::process::id());
        let host = Self { dir: tempfile::tempdir().unwrap(), volume };
        let words = ["up", &host.volume, "--size", "16MiB", "--replicas", replicas, "--frontend", "none"];
        let done = host.ctl(&words);
        assert!(done.status.success(), "{}", text(&done.stderr));
        Some(host)
    }

    fn ctl(&self, args: &[&str]) -> Output {
        let mut command = Command::new(CTL);
        command.arg("--root").arg(self.dir.path()).args(args).stdin(Stdio::null()).output().unwrap()
    }

    fn url(&self) -> String {
        format!("unix:{}/run/{}-e-0.grpc.sock", self.dir.path().display(), self.volume)
    }

    fn engine(&self, args: &[&str]) -> Output {
        let mut command = Command::new(LONGHORN);
        command.args(["--url", &self.url()]).args(args).stdin(Stdio::null()).output().unwrap()
    }

    /// What it prints, of a word that succeeds.
    fn says(&self, args: &[&str]) -> String {
        let done = self.engine(args);
        assert!(done.status.success(), "{args:?}: {}", text(&done.stderr));
        text(&done.stdout)
    }

    fn json(&self, args: &[&str]) -> BTreeMap<String, Value> {
        serde_json::from_str(&self.says(args)).unwrap()
    }

    /// Why a word does not succeed.
    fn refuses(&self, args: &[&str]) -> String {
        let done = self.engine(args);
        assert_eq!((done.status.code(), text(&done.stdout)), (Some(1), String::new()), "{args:?}");
        text(&done.stderr)
    }

    /// Addresses and modes, as `ls` lists them.
    fn replicas(&self) -> Vec<(String, String)> {
        let listed = self.says(&["ls"]);
        let words = listed.lines().skip(1).map(|line| line.split_whitespace());
        words.map(|mut w| (w.next().unwrap().to_owned(), w.next().unwrap().to_owned())).collect()
    }

    fn wait(&self, what: &str, is_so: impl Fn() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < until, "{what}: {}", text(&self.engine(&["ls"]).stdout));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn are_in_sync(&self) -> bool {
        let replicas = self.replicas();
        !replicas.is_empty() && replicas.iter().all(|(_, mode)| mode == "RW")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        host::leave_nothing_of(self.dir.path());
    }
}

#[test]
fn snapshots_are_listed_from_the_newest_down() {
    let Some(host) = Host::up("listed", "1") else { return };
    for name in ["b", "c", "a"] {
        assert_eq!(host.says(&["snapshot", "create", name]), format!("{name}\n"));
    }
    host.says(&["snapshot", "rm", "c"]);
    assert_eq!(host.says(&["snapshot", "ls"]), "ID\na\nb\n");
    assert_eq!(host.says(&["snapshots"]), "ID\na\nb\n");
    let all = host.json(&["snapshot", "info"]);
    assert_eq!(all.keys().collect::<Vec<_>>(), ["a", "b", "c", "volume-head"]);
    assert_eq!((&all["c"]["removed"], &all["c"]["children"]), (&json!(true), &json!({"a": true})));
    // One that is not there keeps none of the others.
    let said = host.refuses(&["snapshot", "rm", "nosuch", "a"]);
    assert!(said.contains("snapshot nosuch is not removed") && said.contains("1 of 2"), "{said}");
    assert_eq!(host.says(&["snapshot", "ls"]), "ID\nb\n");
    host.says(&["snapshot", "purge", "--skip-if-in-progress", "--wait"]);
    let (address, _) = host.replicas().remove(0);
    let through = json!({"error": "", "isPurging": false, "progress": 100, "state": "complete"});
    assert_eq!(host.json(&["snapshot", "purge-status"]), BTreeMap::from([(address, through)]));
}

#[test]
fn snapshots_are_hashed_by_every_replica() {
    let Some(host) = Host::up("hashed", "2") else { return };
    host.wait("in sync", || host.are_in_sync());
    host.says(&["snapshot", "create", "one"]);
    let unasked = host.json(&["snapshot", "hash-status", "one"]);
    assert_eq!(unasked.len(), 2, "{unasked:?}");
    assert!(unasked.values().all(|s| s["state"] == "error" && s["error"] != ""), "{unasked:?}");
    assert_eq!(host.says(&["snapshot", "hash", "--rehash", "one"]), "");
    let is_told = || host.json(&["hash-status", "one"]).values().all(|s| s["state"] != "in_progress");
    host.wait("hashed", is_told);
    let hashed = host.json(&["snapshot", "hash-status", "one"]);
    let addresses: BTreeSet<String> = host.replicas().into_iter().map(|(address, _)| address).collect();
    assert_eq!(hashed.keys().collect::<Vec<_>>(), addresses.iter().collect::<Vec<_>>());
    let sums: Vec<&Value> = hashed.values().map(|s| &s["checksum"]).collect();
    assert!(sums[0].as_str().unwrap().len() == 16 && sums[0] == sums[1], "{hashed:?}");
    for status in hashed.values() {
        let keys: Vec<&String> = status.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["checksum", "error", "silentlyCorrupted", "state"]);
        assert_eq!((&status["state"], &status["silentlyCorrupted"]), (&json!("complete"), &json!(false)));
    }
    assert_eq!(host.says(&["snapshot", "hash-cancel", "one"]), "");
    assert!(host.refuses(&["hash", "../one"]).contains("there is no snapshot ../one"));
}

#[test]
fn a_replica_is_put_out_brought_back_and_verified() {
    let Some(host) = Host::up("verified", "2") else { return };
    host.wait("in sync", || host.are_in_sync());
    let (address, _) = host.replicas().remove(1);
    host.says(&["verify-rebuild-replica", &address]);
    let name = address.rsplit('/').next().unwrap().strip_suffix(".sock").unwrap();
    host.says(&["verify-rebuild", "--replica-instance-name", name, &address]);
    let said = host.refuses(&["verify-rebuild", "--replica-instance-name", "other", &address]);
    assert!(said.contains(name) && said.contains("not other"), "{said}");
    assert!(host.refuses(&["verify-rebuild", "unix:/nosuch.sock"]).contains("no such replica"));

    // Stopped, it stays out for as long as that takes to be seen.
    let pid = |host: &Host| -> i32 {
        let status: Value =
            serde_json::from_slice(&host.ctl(&["-o", "json", "status", &host.volume]).stdout).unwrap();
        let found = status["replicas"].as_array().unwrap().iter().find(|r| r["name"] == name);
        found.unwrap()["pid"].as_i64().unwrap().try_into().unwrap()
    };
    stand_still(pid(&host));
    host.says(&["update", "--mode", "ERR", &address]);
    let mode = |host: &Host| host.replicas().into_iter().find(|(a, _)| *a == address).unwrap().1;
    host.wait("it is put out", || mode(&host) != "RW");
    let said = host.refuses(&["verify-rebuild", &address]);
    assert!(said.contains("not in sync"), "{said}");
    let said = host.refuses(&["update-replica", "--mode", "RW", &address]);
    assert!(said.contains("becomes RW by itself"), "{said}");
    let said = host.refuses(&["snapshot", "hash", "one"]);
    assert!(said.contains("cannot be hashed while") && said.contains(&address), "{said}");
    kill(Pid::from_raw(pid(&host)), Signal::SIGCONT).unwrap();
    host.wait("it is back", || mode(&host) == "RW");
    host.says(&["verify-rebuild", &address]);

    // Taken out and added again, it is in sync when `add` returns.
    host.says(&["rm", &address]);
    assert_eq!(host.replicas().len(), 1);
    host.says(&["add", "--size", "16777216", "--current-size", "16777216", "--fast-sync", &address]);
    assert_eq!(mode(&host), "RW");
    let rebuilt = host.json(&["rebuild-status"]);
    assert_eq!(rebuilt[&address]["fromReplicaAddress"], "");
}

/// A replica that is away may be on another host: whoever gave the command looks for it there.
#[test]
fn a_command_that_waits_for_replicas_says_so() {
    let Some(host) = Host::up("says", "1") else { return };
    let status: Value =
        serde_json::from_slice(&host.ctl(&["-o", "json", "status", &host.volume]).stdout).unwrap();
    let replica = status["replicas"][0]["pid"].as_i64().unwrap().try_into().unwrap();
    stand_still(replica);
    let mut command = Command::new(LONGHORN);
    command.args(["--url", &host.url(), "snapshot", "create", "late"]).stdin(Stdio::null());
    let mut waits = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(waits.stderr.take().unwrap()).read_line(&mut said).unwrap();
    kill(Pid::from_raw(replica), Signal::SIGCONT).unwrap();
    assert_eq!(said, "waiting: too few replicas are left\n");
    let done = waits.wait_with_output().unwrap();
    assert!(done.status.success());
    assert_eq!(text(&done.stdout), "late\n");
}

#[test]
fn an_unmap_marks_no_snapshot() {
    let Some(host) = Host::up("marks", "1") else { return };
    assert_eq!(host.says(&["unmap-mark-snap-chain-removed", "--disable"]), "");
    let said = host.refuses(&["unmap-mark-snap", "--enable"]);
    assert!(said.contains("snapshot"), "{said}");
    let info = host.json(&["info"]);
    assert_eq!(info["unmapMarkSnapChainRemoved"], false);
    for neither in [&["unmap-mark-snap"][..], &["unmap-mark-snap", "--enable", "--disable"]] {
        assert_eq!(host.engine(neither).status.code(), Some(2), "{neither:?}");
    }
}

/// They go with the snapshot to each replica in one message, and come back in one with those of all others.
#[test]
fn labels_that_fit_no_message_are_refused_and_cost_no_replica() {
    let Some(host) = Host::up("labels", "1") else { return };
    let labels: Vec<String> = (0..10).map(|n| format!("k{n}={}", "x".repeat(120_000))).collect();
    let words = labels.iter().flat_map(|label| ["--label", label]);
    let words: Vec<&str> = ["snapshot", "create"].into_iter().chain(words).chain(["one"]).collect();
    let mut create = Command::new(LONGHORN);
    create.args(["--url", &host.url()]).args(&words).stdin(Stdio::null());
    let done = create.output().unwrap();
    let said = text(&done.stderr);
    assert!(!done.status.success(), "{said}");
    assert!(said.contains("labels"), "{said}");
    assert!(host.are_in_sync());
    assert_eq!(host.says(&["snapshot", "create", "--label", "why=test", "two"]), "two\n");
}

/// A manager asks again and again for what an engine cannot do before its replicas are back.
#[test]
fn commands_that_wait_keep_no_other_from_its_answer() {
    let Some(host) = Host::up("waits", "1") else { return };
    let status: Value =
        serde_json::from_slice(&host.ctl(&["-o", "json", "status", &host.volume]).stdout).unwrap();
    let replica = status["replicas"][0]["pid"].as_i64().unwrap().try_into().unwrap();
    stand_still(replica);
    let socket = host.url().strip_prefix("unix:").unwrap().to_owned();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = async || {
        let channel = control::transport::connect(std::path::Path::new(&socket)).await.unwrap();
        ControllerServiceClient::new(channel)
    };
    runtime.block_on(async {
        // More than a runtime has threads, and as many at a time as a connection has streams.
        for round in 0..6 {
            let client = client().await;
            let mut asked = tokio::task::JoinSet::new();
            for n in 0..100 {
                let (mut client, name) = (client.clone(), format!("s{}", 100 * round + n));
                asked.spawn(async move {
                    let request = VolumeSnapshotRequest { name, ..Default::default() };
                    let taken = client.volume_snapshot(request);
                    assert!(
                        tokio::time::timeout(Duration::from_secs(1), taken).await.is_err(),
                        "it was taken"
                    );
                });
            }
            while let Some(ended) = asked.join_next().await {
                ended.unwrap();
            }
        }
        let request = VolumeSnapshotMaxCountSetRequest { count: 7 };
        let mut client = client().await;
        let set = client.volume_snapshot_max_count_set(request);
        let set = tokio::time::timeout(Duration::from_secs(30), set).await.expect("it is answered");
        assert_eq!(set.unwrap().into_inner().snapshot_max_count, 7);
    });
    kill(Pid::from_raw(replica), Signal::SIGCONT).unwrap();
}

/// Ends with its drop.
struct Child(std::process::Child);

impl Child {
    fn start(line: &[String], more: &[&str]) -> Self {
        let mut command = Command::new(LONGHORN);
        command.args(line).args(more).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0.id().try_into().unwrap()), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

/// The processes of a volume as somebody starts them by hand, to answer on TCP.
struct ByHand {
    replica: Vec<String>,
    controller: Vec<String>,
    /// Where the engine answers.
    engine: String,
}

/// Stops the volume; its processes answer at addresses that nobody else has, with Longhorn's ports.
fn by_hand(host: &Host, last: u8) -> ByHand {
    let status: Value =
        serde_json::from_slice(&host.ctl(&["-o", "json", "status", &host.volume]).stdout).unwrap();
    assert!(host.ctl(&["down", &host.volume]).status.success());
    let root = host.dir.path().to_str().unwrap();
    let word = |key: &str| status["replicas"][0][key].as_str().unwrap();
    let key = format!("{root}/volumes/{}/key", host.volume);
    let [high, low] = u16::try_from(std::process::id() % 0x10000).unwrap().to_be_bytes();
    let (engine, data) = (format!("127.{high}.{low}.{last}:9501"), format!("127.{high}.{low}.{last}:9502"));
    let name = ["--volume-name", &host.volume];
    let replica =
        ["replica", "--replica-instance-name", word("name"), "--data-listen", word("address"), "--key-file"];
    let replica = [&name[..], &replica, &[&key, word("path"), "--listen", &data]].concat();
    let controller = ["controller", "--root", root, "--frontend", "none", &host.volume, "--listen", &engine];
    let line = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    ByHand { replica: line(&replica), controller: line(&controller), engine: engine.clone() }
}

/// Longhorn's own spelling, `--listen localhost:9501`, works for who says who is to be obeyed there.
#[test]
fn an_engine_and_a_replica_answer_on_tcp_for_whom_they_are_told_to_trust() {
    let Some(host) = Host::up("tcp", "1") else { return };
    let ByHand { replica, controller, engine } = by_hand(&host, 1);

    for line in [&replica, &controller] {
        let refused = Command::new(LONGHORN).args(line).stdin(Stdio::null()).output().unwrap();
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{said}");
        for way in ["--tls-dir DIR", "--insecure", "--listen unix:PATH"] {
            assert!(said.contains(way), "{way}: {said}");
        }
    }
    let missing = Command::new(LONGHORN).args(&controller).args(["--tls-dir", "/nowhere"]).output().unwrap();
    assert!(!missing.status.success() && text(&missing.stderr).contains("/nowhere/ca.crt"), "{missing:?}");
    let _replica = Child::start(&replica, &["--insecure"]);
    let _engine = Child::start(&controller, &["--insecure"]);
    let ask = |url: &str, words: &[&str]| {
        Command::new(LONGHORN).args(["--url", url]).args(words).stdin(Stdio::null()).output().unwrap()
    };
    for url in [format!("http://{engine}"), engine.clone(), host.url()] {
        host.wait(&format!("it answers at {url}"), || {
            text(&ask(&url, &["ls"]).stdout).lines().skip(1).any(|line| line.contains(" RW "))
        });
        let info: Value = serde_json::from_slice(&ask(&url, &["info"]).stdout).unwrap();
        assert_eq!(info["name"], Value::from(host.volume.as_str()), "{url}");
    }
    assert_eq!(text(&ask(&engine, &["snapshot", "create", "one"]).stdout), "one\n");
    // A replica's own gRPC is there, too, and its engine's commands find it beside its data socket.
    assert!(ask(&engine, &["snapshot", "hash", "one"]).status.success());

    let nobody = ask(&engine.replace(":9501", ":9"), &["info"]);
    assert!(text(&nobody.stderr).contains("no engine at"), "{}", text(&nobody.stderr));
    let encrypted = ask(&format!("https://{engine}"), &["info"]);
    assert!(text(&encrypted.stderr).contains("--url unix:PATH"), "{}", text(&encrypted.stderr));
}

/// A certificate has expired, say, when the processes start.
#[test]
fn certificates_that_do_not_fit_keep_no_volume_from_its_data() {
    let Some(host) = Host::up("unfit", "1") else { return };
    let ByHand { replica, controller, .. } = by_hand(&host, 2);
    let files = host.dir.path().join("tls");
    std::fs::create_dir(&files).unwrap();
    for name in ["ca.crt", "tls.crt", "tls.key"] {
        std::fs::write(files.join(name), "nothing").unwrap();
    }
    let unfit = ["--tls-dir", files.to_str().unwrap()];
    let all = RefCell::new([Child::start(&replica, &unfit), Child::start(&controller, &unfit)]);
    host.wait("it answers this host's root", || {
        let has_ended = |child: &mut Child| child.0.try_wait().unwrap().is_some();
        assert!(!all.borrow_mut().iter_mut().any(has_ended), "one has ended");
        text(&host.engine(&["ls"]).stdout).lines().skip(1).any(|line| line.contains(" RW "))
    });
    // The engine first.
    for child in all.borrow_mut().iter_mut().rev() {
        kill(Pid::from_raw(child.0.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
        let until = Instant::now() + PATIENCE;
        let ended = loop {
            match child.0.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > until => {
                    child.0.kill().unwrap();
                    panic!("it does not end");
                }
                None => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        assert!(ended.success(), "{ended}");
    }
}
