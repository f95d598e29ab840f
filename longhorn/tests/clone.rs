//! A volume filled over gRPC from a snapshot of another one, with real processes: the bytes, on every replica; a replica of
//! the source that dies, and all of them; and that what is not whole is shown to nobody, however often it is started.

mod host;
mod nbd;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use control::proto::imrpc;
use control::proto::imrpc::proxy_engine_service_client::ProxyEngineServiceClient;
use control::proto::ptypes::SnapshotCloneStatusResponse;
use host::{kill_9, pid, signal};
use nbd::Client;
use nix::sys::signal::Signal;
use replica::store::SnapshotView;
use serde_json::Value;
use tonic::{Code, Status};

const CTL: &str = env!("CARGO_BIN_EXE_longhornctl");
const LONGHORN: &str = env!("CARGO_BIN_EXE_longhorn");

/// Far more than anything here takes, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often a clone may be through before the test has seen it halfway.
const LOOKS: usize = 20;

const MIB: usize = 1 << 20;

/// A root with its processes; nothing of it is left when it is dropped.
struct Host {
    dir: tempfile::TempDir,
}

impl Host {
    fn new() -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIP clone: not root");
            return None;
        }
        Some(Self { dir: tempfile::tempdir().unwrap() })
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn ctl(&self, args: &[&str]) -> String {
        said(Command::new(CTL).arg("--root").arg(self.path()).args(args))
    }

    fn status(&self, volume: &str) -> Value {
        serde_json::from_str(&self.ctl(&["-o", "json", "status", volume])).unwrap()
    }

    fn wait(&self, what: &str, volume: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + PATIENCE;
        loop {
            let status = self.status(volume);
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < until, "{what}: {status:#}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn up(&self, volume: &str, size: &str, replicas: &str, frontend: &str) {
        self.ctl(&["up", volume, "--size", size, "--replicas", replicas, "--frontend", frontend]);
    }

    fn socket(&self, volume: &str) -> String {
        format!("unix:{}/run/{volume}-e-0.grpc.sock", self.path().display())
    }

    /// Longhorn's engine command line.
    fn engine(&self, volume: &str, args: &[&str]) -> Output {
        Command::new(LONGHORN).args(["--url", &self.socket(volume)]).args(args).output().unwrap()
    }

    /// The bytes of every replica of a volume that is down.
    fn replicas(&self, volume: &str) -> Vec<Vec<u8>> {
        let status = self.status(volume);
        let directories =
            status["replicas"].as_array().unwrap().iter().map(|r| PathBuf::from(r["path"].as_str().unwrap()));
        let read = |directory: PathBuf| {
            let view = SnapshotView::open(&directory, None).unwrap();
            let mut bytes = vec![0; usize::try_from(view.size()).unwrap()];
            view.read_at(0, &mut bytes).unwrap();
            bytes
        };
        directories.map(read).collect()
    }

    fn remove(&self, volume: &str) {
        self.ctl(&["down", volume]);
        self.ctl(&["rm", volume, "--yes"]);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        host::leave_nothing_of(self.path());
    }
}

fn said(command: &mut Command) -> String {
    let done = command.stdin(Stdio::null()).output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Bytes that are nowhere by chance.
fn random(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = vec![0; length];
    for eight in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        eight.copy_from_slice(&state.to_le_bytes());
    }
    bytes
}

/// A source with a snapshot `one` and something after it. Gives back what the snapshot holds.
fn source(host: &Host, volume: &str, mib: usize, replicas: &str) -> Vec<u8> {
    host.up(volume, &format!("{mib}MiB"), replicas, "nbd-server");
    let mut client = Client::of(volume);
    let mut image = vec![0; mib * MIB];
    // All but a quarter, some of it twice, in two layers.
    for (turn, seed) in [(0, 1), (1, 2)] {
        for at in (turn..mib * 3 / 4).step_by(turn + 1) {
            let bytes = random(seed + at as u64, MIB);
            client.write((at * MIB) as u64, &bytes);
            image[at * MIB..(at + 1) * MIB].copy_from_slice(&bytes);
        }
        client.flush();
        host.ctl(&["snapshot", "create", volume, ["zero", "one"][turn]]);
    }
    client.write(0, &random(3, MIB));
    client.flush();
    image
}

/// Asks the instance manager.
struct Proxy(ProxyEngineServiceClient<tonic::transport::Channel>);

impl Proxy {
    async fn of(host: &Host) -> Self {
        let socket = host.path().join("run/instance-manager.sock");
        Self(ProxyEngineServiceClient::new(control::transport::connect(&socket).await.unwrap()))
    }

    fn engine(volume: &str) -> imrpc::ProxyEngineRequest {
        imrpc::ProxyEngineRequest {
            engine_name: format!("{volume}-e-0"),
            volume_name: volume.to_owned(),
            ..Default::default()
        }
    }

    async fn clone(&self, to: &str, from: &str, snapshot: &str) -> Result<(), Status> {
        let request = imrpc::EngineSnapshotCloneRequest {
            proxy_engine_request: Some(Self::engine(to)),
            from_engine_name: format!("{from}-e-0"),
            from_volume_name: from.to_owned(),
            snapshot_name: snapshot.to_owned(),
            ..Default::default()
        };
        self.0.clone().snapshot_clone(request).await.map(drop)
    }

    async fn status(&self, volume: &str) -> Vec<SnapshotCloneStatusResponse> {
        let answer = self.0.clone().snapshot_clone_status(Self::engine(volume)).await.unwrap();
        answer.into_inner().status.into_values().collect()
    }

    /// Waits until something was copied, but not all of it: how far it is, and the address of the replica that is read.
    /// `None`: all was copied before anybody looked.
    async fn halfway(&self, volume: &str) -> Option<(i32, String)> {
        let until = Instant::now() + PATIENCE;
        loop {
            let status = self.status(volume).await;
            let ahead = status.iter().max_by_key(|s| s.progress);
            if let Some(ahead) = ahead.filter(|ahead| ahead.progress > 5) {
                let is_half = ahead.is_cloning && ahead.progress < 70;
                return is_half.then(|| (ahead.progress, ahead.from_replica_address.clone()));
            }
            assert!(Instant::now() < until, "the clone does not begin: {status:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Fills a volume, which is made for it and whose name is given back, and does something when half of it is there. A busy
    /// machine may look too late, or be too slow to do it in time where that has to be the clone's end: then it begins again with
    /// another volume.
    async fn clone_with(
        &self,
        host: &Host,
        [to, from]: [&str; 2],
        has_to_fail: bool,
        make: impl Fn(&str),
        half: impl Fn(&str),
    ) -> (String, Result<(), Status>) {
        for turn in 0..LOOKS {
            let to = format!("{to}{turn}");
            make(&to);
            let (cloned, reached) = tokio::join!(self.clone(&to, from, "one"), async {
                let (reached, read) = self.halfway(&to).await?;
                half(&read);
                Some(reached)
            });
            if let Some(reached) = reached
                && !(has_to_fail && cloned.is_ok())
            {
                println!("the source's replica died at {reached} %");
                return (to, cloned);
            }
            cloned.unwrap();
            host.remove(&to);
        }
        panic!("{LOOKS} clones were faster than the test");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_replica_holds_the_snapshots_bytes_also_if_one_of_the_source_dies() {
    let Some(host) = Host::new() else { return };
    let name = |word: &str| format!("test-{}-{word}", std::process::id());
    let (old, new, cli) = (name("co"), name("cn"), name("cl"));
    let image = source(&host, &old, 192, "2");
    let make = |name: &str| host.up(name, "200MiB", "2", "none");
    let proxy = Proxy::of(&host).await;
    make(&new);
    let missing = proxy.clone(&new, &old, "none").await.unwrap_err();
    assert_eq!(missing.code(), Code::Internal, "{missing}");
    assert!(missing.message().contains("none"), "{missing}");
    assert_eq!(
        host.ctl(&["-o", "json", "snapshot", "ls", &new]).trim(),
        "[]",
        "the volume is marked as half a clone"
    );

    let replicas = host.status(&old)["replicas"].as_array().unwrap().clone();
    host.remove(&new);
    let die = |from: &str| {
        let read = replicas.iter().find(|r| from.contains(r["name"].as_str().unwrap())).unwrap();
        kill_9(pid(&read["pid"]));
    };
    let (new, cloned) = proxy.clone_with(&host, [&new, &old], false, make, die).await;
    cloned.unwrap();
    let status = proxy.status(&new).await;
    assert_eq!(status.len(), 2);
    assert!(status.iter().all(|s| s.state == "complete" && s.progress == 100 && !s.is_cloning), "{status:?}");
    // The mark is removed when the clone has ended, and folded away after that.
    let snapshots = || -> Vec<(String, bool)> {
        let list: Value = serde_json::from_str(&host.ctl(&["-o", "json", "snapshot", "ls", &new])).unwrap();
        let snapshot = |s: &Value| (s["name"].as_str().unwrap().to_owned(), s["removed"].as_bool().unwrap());
        list.as_array().unwrap().iter().map(snapshot).collect()
    };
    let kept: Vec<_> = snapshots().into_iter().filter(|(_, removed)| !removed).collect();
    assert_eq!(kept, [("one".to_owned(), false)]);
    host.wait("the mark is folded away", &new, |_| snapshots() == kept);
    // It is whole, and a clone does not go over what is there.
    assert_eq!(proxy.clone(&new, &old, "one").await.unwrap_err().code(), Code::FailedPrecondition);

    // Longhorn's own words for the same thing; a smaller volume is refused.
    host.up(&cli, "16MiB", "1", "none");
    let words =
        ["snapshot", "clone", "--snapshot-name", "one", "--from-controller-address", &host.socket(&old)];
    let refused = host.engine(&cli, &words);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("at least as large"), "{refused:?}");
    let status = host.engine(&cli, &["snapshot", "clone-status"]);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    let status = status.as_object().unwrap().values().next().unwrap().clone();
    assert_eq!((&status["state"], &status["snapshotName"]), (&"error".into(), &"one".into()));

    host.ctl(&["down", &new]);
    for bytes in host.replicas(&new) {
        assert!(bytes[..image.len()] == image, "a replica has other bytes than the snapshot");
        assert!(bytes[image.len()..].iter().all(|b| *b == 0));
    }
    for volume in [&cli, &old] {
        host.remove(volume);
    }
    host.ctl(&["rm", &new, "--yes"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_whole_is_shown_to_nobody() {
    let Some(host) = Host::new() else { return };
    let name = |word: &str| format!("test-{}-{word}", std::process::id());
    let (old, new) = (name("ho"), name("hn"));
    let image = source(&host, &old, 256, "1");
    host.up(&new, "256MiB", "1", "nbd-server");
    let proxy = Proxy::of(&host).await;
    let shown = proxy.clone(&new, &old, "one").await.unwrap_err();
    assert_eq!(shown.code(), Code::FailedPrecondition, "somebody could read meanwhile: {shown}");
    host.remove(&new);

    let only = RefCell::new(Value::Null);
    let make = |name: &str| {
        // It may have died for nothing before.
        let whole = host.wait("the source is whole", &old, |s| {
            s["robustness"] == "healthy" && s["replicas"][0]["pid"].is_i64()
        });
        only.replace(whole["replicas"][0]["pid"].clone());
        host.up(name, "256MiB", "1", "nbd-server");
        assert!(host.engine(name, &["frontend", "shutdown"]).status.success());
    };
    let (new, cloned) =
        proxy.clone_with(&host, [&new, &old], true, make, |_| kill_9(pid(&only.borrow()))).await;
    let failed = cloned.unwrap_err();
    assert_eq!(failed.code(), Code::Internal, "{failed}");
    let status = proxy.status(&new).await.remove(0);
    assert_eq!((status.state.as_str(), status.is_cloning), ("error", false));
    assert!(!status.error.is_empty() && status.progress < 100, "{status:?}");

    let not_shown = || {
        let start = host.engine(&new, &["frontend", "start", "nbd-server"]);
        let said = String::from_utf8_lossy(&start.stderr).into_owned();
        assert!(!start.status.success() && said.contains("not whole"), "{said}");
        let mark = host.engine(&new, &["snapshot", "rm", "clone-unfinished"]);
        assert!(!mark.status.success(), "whoever removes the mark has a volume that looks whole");
    };
    not_shown();
    // The next engine does not know of the clone, but of the mark.
    let before = host.status(&new);
    kill_9(pid(&before["engine_pid"]));
    host.wait("another engine", &new, |now| {
        let is_another = now["engine_pid"].is_i64() && now["engine_pid"] != before["engine_pid"];
        is_another && host.ctl(&["status", &new]).contains("not whole")
    });
    assert!(!nbd::is_served(&new), "half a clone is served");
    not_shown();

    host.wait("the source is whole again", &old, |s| s["robustness"] == "healthy");
    // Its replica serves its engine, and nobody else gets in.
    let address = host.status(&new)["replicas"][0]["address"].as_str().unwrap().to_owned();
    let socket = PathBuf::from(address.strip_prefix("unix:").unwrap());
    let away = socket.with_extension("away");
    std::fs::rename(&socket, &away).unwrap();
    let unseen = proxy.clone(&new, &old, "one").await.unwrap_err();
    assert!(unseen.message().contains("cannot be seen"), "{unseen}");
    not_shown();
    std::fs::rename(&away, &socket).unwrap();

    // Again, from the beginning.
    proxy.clone(&new, &old, "one").await.unwrap();
    assert!(host.engine(&new, &["frontend", "start", "nbd-server"]).status.success());
    let mut client = Client::of(&new);
    for (at, expected) in image.chunks(MIB).enumerate() {
        assert!(client.read((at * MIB) as u64, MIB) == expected, "other bytes than the snapshot's");
    }
    host.remove(&new);
    host.remove(&old);
}

/// Its writes wait for the replica, and who ends the volume does not wait for them.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_replica_stands_still_under_a_clone_is_stopped() {
    let Some(host) = Host::new() else { return };
    let name = |word: &str| format!("test-{}-{word}", std::process::id());
    let (old, new) = (name("so"), name("sn"));
    source(&host, &old, 256, "1");
    let proxy = Proxy::of(&host).await;
    let filled = RefCell::new(String::new());
    let make = |name: &str| {
        host.up(name, "256MiB", "1", "none");
        filled.replace(name.to_owned());
    };
    let stop = |_: &str| {
        let volume = filled.borrow();
        signal(pid(&host.status(&volume)["replicas"][0]["pid"]), Signal::SIGSTOP);
        let began = Instant::now();
        let done = Command::new(CTL).arg("--root").arg(host.path()).args(["down", &volume]).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(said.contains("is down, but not flushed"), "{said}");
        assert!(began.elapsed() < PATIENCE, "it has waited for the clone");
    };
    let (new, cloned) = proxy.clone_with(&host, [&new, &old], true, make, stop).await;
    cloned.unwrap_err();
    assert_eq!(host.status(&new)["state"], "detached");
    host.ctl(&["rm", &new, "--yes"]);
    host.remove(&old);
}
