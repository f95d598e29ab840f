//! The instance manager with real processes: what it starts lives on without it, and dies only when it should.

use std::fs;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use control::deposit::Deposit;
use control::host::Root;
use control::manager::{LAUNCH_NAME, ProcessRecord, State};
use control::proto::imrpc::instance_service_client::InstanceServiceClient;
use control::proto::imrpc::process_manager_service_client::ProcessManagerServiceClient;
use control::proto::imrpc::{
    DataEngine, LogRequest, LogSetLevelRequest, ProcessCreateRequest, ProcessDeleteRequest,
    ProcessGetRequest, ProcessListRequest, ProcessReplaceRequest, ProcessSpec, ProcessStatus,
};
use control::proto::process::LogLevel;
use control::proto::process::logging_client::LoggingClient;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio_stream::StreamExt;
use tonic::Code;
use tonic::transport::Channel;

const PROGRAM: &str = env!("CARGO_BIN_EXE_longhorn");

/// Far more than anything here takes, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A file that is open for writing cannot be executed, and a child that another test is just starting has a copy of every
/// descriptor: nobody starts processes while a program is being written.
static WRITING: Mutex<()> = Mutex::new(());

fn spawn(command: &mut Command) -> Child {
    let _nobody_writes = WRITING.lock().unwrap();
    command.spawn().unwrap()
}

type Client = ProcessManagerServiceClient<Channel>;

/// A root with its manager; nothing of it is left when it is dropped.
struct Host {
    root: Root,
    manager: Option<Child>,
    _dir: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        let mut host = Self { root, manager: None, _dir: dir };
        host.start();
        host
    }

    fn start(&mut self) {
        self.manager = Some(spawn(&mut self.command()));
    }

    fn command(&self) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(["instance-manager", "--root"]).arg(self.root.path());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    fn kill_manager(&mut self) {
        let mut manager = self.manager.take().unwrap();
        manager.kill().unwrap();
        manager.wait().unwrap();
    }

    async fn client(&self) -> Client {
        let until = Instant::now() + PATIENCE;
        loop {
            match control::transport::connect(&self.root.manager_socket()).await {
                Ok(channel) => return Client::new(channel),
                Err(e) => assert!(Instant::now() < until, "the manager does not answer: {e}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// A program that the manager may run.
    fn script(&self, name: &str, text: &str) -> String {
        let path = self.root.engine_binaries().join(name);
        if !path.exists() {
            let _nobody_starts = WRITING.lock().unwrap();
            fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        path.to_str().unwrap().to_owned()
    }

    /// A program that runs until it is ended.
    fn endless(&self) -> String {
        self.script("endless", "echo \"started with $*\"\nexec sleep 1000")
    }

    fn record(&self, name: &str) -> ProcessRecord {
        ProcessRecord::load(&self.root, name).unwrap().unwrap()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if self.manager.is_some() {
            self.kill_manager();
        }
        for record in ProcessRecord::load_all(&self.root).unwrap().into_iter().flatten() {
            record.pid().into_iter().for_each(kill_9);
        }
    }
}

fn kill_9(pid: u32) {
    let pid = Pid::from_raw(pid.try_into().unwrap());
    // It may have ended by itself.
    let _ = kill(pid, Signal::SIGKILL);
}

fn is_alive(pid: u32) -> bool {
    control::manager::ProcessId::of(pid).unwrap().is_some()
}

async fn create(client: &mut Client, name: &str, binary: &str, args: &[&str]) -> Result<(), tonic::Status> {
    let spec = ProcessSpec {
        name: name.into(),
        binary: binary.into(),
        args: args.iter().map(|a| (*a).to_owned()).collect(),
        ..Default::default()
    };
    client.process_create(ProcessCreateRequest { spec: Some(spec) }).await.map(drop)
}

async fn replace(client: &mut Client, spec: ProcessSpec) -> Result<(), tonic::Status> {
    let request = ProcessReplaceRequest { spec: Some(spec), terminate_signal: "SIGHUP".into() };
    client.process_replace(request).await.map(|_| ())
}

async fn status(client: &mut Client, name: &str) -> Result<ProcessStatus, tonic::Status> {
    let request = ProcessGetRequest { name: name.into() };
    Ok(client.process_get(request).await?.into_inner().status.unwrap())
}

/// Waits for a state of a process.
async fn wait(client: &mut Client, name: &str, wanted: impl Fn(&ProcessStatus) -> bool) -> ProcessStatus {
    let until = Instant::now() + PATIENCE;
    loop {
        let status = status(client, name).await.unwrap();
        if wanted(&status) {
            return status;
        }
        assert!(Instant::now() < until, "{name} stays {status:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits for a line in the log of a process.
async fn says(client: &mut Client, name: &str, line: &str) {
    let until = Instant::now() + PATIENCE;
    loop {
        let lines = client.process_log(LogRequest { name: name.into() }).await.unwrap().into_inner();
        let lines: Vec<String> = lines.map(|l| l.unwrap().line).collect().await;
        if lines.iter().any(|l| l == line) {
            return;
        }
        assert!(Instant::now() < until, "{lines:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn delete(client: &mut Client, name: &str) {
    client.process_delete(ProcessDeleteRequest { name: name.into(), uuid: String::new() }).await.unwrap();
    let until = Instant::now() + PATIENCE;
    while status(client, name).await.is_ok() {
        assert!(Instant::now() < until, "{name} is not forgotten");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Runs a command that ends by itself: its status and what it said on standard error.
fn run_to_end(mut command: Command) -> (Option<i32>, String) {
    let mut child = spawn(command.stdout(Stdio::null()).stderr(Stdio::piped()));
    let until = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let done = child.wait_with_output().unwrap();
    (done.status.code(), String::from_utf8(done.stderr).unwrap())
}

const fn running(status: &ProcessStatus) -> bool {
    status.pid != 0
}

#[tokio::test]
async fn a_process_that_dies_is_started_again_with_the_next_generation() {
    let host = Host::new();
    let mut client = host.client().await;
    let generation = (7_u64 << 32).to_string();
    create(&mut client, "demo-e-0", &host.endless(), &["--generation", &generation, "demo"]).await.unwrap();
    let first = wait(&mut client, "demo-e-0", running).await;
    assert_eq!((first.state.as_str(), first.restarts), ("running", 0));
    kill_9(first.pid);
    let second = wait(&mut client, "demo-e-0", |s| s.restarts == 1 && running(s)).await;
    assert_ne!(second.pid, first.pid);
    assert_eq!(second.uuid, first.uuid);
    assert_eq!(host.record("demo-e-0").args[1], ((7_u64 << 32) + 1).to_string());
    let again = create(&mut client, "demo-e-0", &host.endless(), &[]).await.unwrap_err();
    assert_eq!(again.code(), Code::AlreadyExists);
    let root = &host.root;
    let sockets =
        [root.control_socket("demo-e-0"), root.data_socket("demo-e-0"), root.relay_socket("demo-e-0")];
    // As one that is killed leaves them.
    sockets.iter().for_each(|path| drop(UnixListener::bind(path).unwrap()));
    delete(&mut client, "demo-e-0").await;
    assert!(!is_alive(second.pid));
    assert!(!host.root.process("demo-e-0").exists());
    assert_eq!(sockets.each_ref().map(|path| path.exists()), [false; 3]);
}

#[tokio::test]
async fn the_managers_death_changes_nothing_and_the_next_one_adopts() {
    let mut host = Host::new();
    let mut client = host.client().await;
    create(&mut client, "demo-r-1", &host.endless(), &["dir"]).await.unwrap();
    create(&mut client, "demo-r-2", &host.endless(), &["dir"]).await.unwrap();
    let one = wait(&mut client, "demo-r-1", running).await;
    let two = wait(&mut client, "demo-r-2", running).await;
    host.kill_manager();
    // Neither it nor what it held on to was needed.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(is_alive(one.pid) && is_alive(two.pid));
    // The second one dies while nobody looks.
    kill_9(two.pid);
    host.start();
    let mut client = host.client().await;
    let adopted = wait(&mut client, "demo-r-1", running).await;
    assert_eq!((adopted.pid, adopted.restarts, &adopted.uuid), (one.pid, 0, &one.uuid));
    let restarted = wait(&mut client, "demo-r-2", |s| s.restarts == 1 && running(s)).await;
    assert_ne!(restarted.pid, two.pid);
    // Adopted is as good as born here.
    kill_9(one.pid);
    wait(&mut client, "demo-r-1", |s| s.restarts == 1 && running(s)).await;
    delete(&mut client, "demo-r-1").await;
    delete(&mut client, "demo-r-2").await;
}

#[tokio::test]
async fn everything_comes_back_after_everything_was_killed() {
    let mut host = Host::new();
    let mut client = host.client().await;
    create(&mut client, "demo-e-0", &host.endless(), &["--generation=5"]).await.unwrap();
    let before = wait(&mut client, "demo-e-0", running).await;
    host.kill_manager();
    kill_9(before.pid);
    host.start();
    let mut client = host.client().await;
    wait(&mut client, "demo-e-0", |s| s.restarts == 1 && running(s)).await;
    assert_eq!(host.record("demo-e-0").args, ["--generation=6"]);
}

#[tokio::test]
async fn a_wish_to_stop_outlives_the_manager() {
    let mut host = Host::new();
    let mut client = host.client().await;
    let stubborn = host.script("stubborn", "trap '' TERM\necho deaf\nwhile :; do sleep 0.05; done");
    create(&mut client, "demo-r-1", &stubborn, &[]).await.unwrap();
    let status = wait(&mut client, "demo-r-1", running).await;
    // Only a shell that has run its first line ignores the signal.
    says(&mut client, "demo-r-1", "deaf").await;
    let request = ProcessDeleteRequest { name: "demo-r-1".into(), uuid: String::new() };
    client.process_delete(request).await.unwrap();
    wait(&mut client, "demo-r-1", |s| s.state == "stopping").await;
    // It is told first, and then written down.
    let until = Instant::now() + PATIENCE;
    while host.record("demo-r-1").state != State::Stopping {
        assert!(Instant::now() < until, "the wish is not written down");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    host.kill_manager();
    kill_9(status.pid);
    host.start();
    let mut client = host.client().await;
    let until = Instant::now() + PATIENCE;
    while client
        .process_list(ProcessListRequest {})
        .await
        .unwrap()
        .into_inner()
        .processes
        .contains_key("demo-r-1")
    {
        assert!(Instant::now() < until, "it came back");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!host.root.process("demo-r-1").exists());
}

/// A new listening socket, left with the manager by a process that has ended since.
fn leave(host: &Host, process: &str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Deposit::of(&host.root, process).leave(listener.as_fd()).unwrap();
    listener.local_addr().unwrap()
}

async fn wait_until_refused(address: SocketAddr) {
    let until = Instant::now() + PATIENCE;
    while TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < until, "{address} is not closed");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_listening_socket_outlives_its_process() {
    let mut host = Host::new();
    let mut client = host.client().await;
    create(&mut client, "demo-e-0", &host.endless(), &[]).await.unwrap();
    // From then on it is on record.
    wait(&mut client, "demo-e-0", |s| s.state == "running").await;
    let address = leave(&host, "demo-e-0");
    let waiting = TcpStream::connect(address).unwrap();
    let mut deposit = Deposit::of(&host.root, "demo-e-0");
    let next = TcpListener::from(deposit.fetch().unwrap().unwrap());
    assert_eq!(next.accept().unwrap().1, waiting.local_addr().unwrap());
    let refused = Deposit::of(&host.root, "demo-e-1").leave(next.as_fd()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
    assert!(refused.to_string().contains("demo-e-1"), "{refused}");

    // The next manager has nothing until it is told.
    deposit.leave(next.as_fd()).unwrap();
    host.kill_manager();
    host.start();
    let mut client = host.client().await;
    assert!(Deposit::of(&host.root, "demo-e-0").fetch().unwrap().is_none());
    deposit.renew().unwrap();
    drop((next, deposit));
    TcpStream::connect(address).unwrap();

    Deposit::of(&host.root, "demo-e-0").withdraw().unwrap();
    wait_until_refused(address).await;
    let address = leave(&host, "demo-e-0");
    TcpStream::connect(address).unwrap();
    delete(&mut client, "demo-e-0").await;
    wait_until_refused(address).await;
}

#[tokio::test]
async fn nothing_listens_for_a_process_that_is_not_started_again() {
    let host = Host::new();
    let mut client = host.client().await;
    let word = host.root.path().join("word");
    let obedient = host.script("obedient", "while [ ! -e \"$1\" ]; do sleep 0.02; done");
    create(&mut client, "demo-e-0", &obedient, &[word.to_str().unwrap()]).await.unwrap();
    let address = leave(&host, "demo-e-0");
    TcpStream::connect(address).unwrap();
    fs::write(&word, "").unwrap();
    wait(&mut client, "demo-e-0", |s| s.state == "stopped").await;
    wait_until_refused(address).await;
}

#[tokio::test]
async fn only_our_own_programs_are_run() {
    let host = Host::new();
    let mut client = host.client().await;
    std::os::unix::fs::symlink("/bin/sh", host.root.engine_binaries().join("link")).unwrap();
    let link = host.root.engine_binaries().join("link");
    for binary in ["/bin/bash", "/bin/sh", link.to_str().unwrap()] {
        let refused = create(&mut client, "demo-r-1", binary, &["-c", "true"]).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{binary}");
        assert!(refused.message().contains("engine-binaries"), "{}", refused.message());
    }
    let refused = create(&mut client, "demo-r-1", "bash", &[]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    for name in ["", "../x", "a/b", ".x", "instance-manager", "listeners"] {
        let refused = create(&mut client, name, &host.endless(), &[]).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{name:?}");
    }
    // The launcher's name is not for clients: as an argument it is only an argument.
    create(&mut client, "demo-r-2", "", &[LAUNCH_NAME, "/bin/sh"]).await.unwrap();
    wait(&mut client, "demo-r-2", |s| s.state == "error").await;
    let spec = ProcessSpec { name: "demo-r-2".into(), binary: "/bin/sh".into(), ..Default::default() };
    let refused = replace(&mut client, spec).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(client.process_list(ProcessListRequest {}).await.unwrap().into_inner().processes.len() == 1);
}

/// A copied file could be one that root believes.
#[tokio::test]
async fn of_our_own_program_only_engines_and_replicas_are_run() {
    let host = Host::new();
    let mut client = host.client().await;
    let file = host.root.path().join("not-ours");
    let sock = format!("unix:{}", host.root.path().join("copy.sock").display());
    let receive = ["ssync", "receive", file.to_str().unwrap(), "--listen", &sock];
    let copy = host.root.engine_binaries().join("longhorn");
    {
        let _nobody_writes = WRITING.lock().unwrap();
        fs::copy(PROGRAM, &copy).unwrap();
    }
    for (name, binary) in [("own", ""), ("copied", copy.to_str().unwrap())] {
        create(&mut client, name, binary, &receive).await.unwrap();
        let failed = wait(&mut client, name, |s| s.state == "error" || file.exists()).await;
        assert!(failed.error_msg.contains("`controller` and `replica`"), "{}", failed.error_msg);
        assert!(!file.exists());
        delete(&mut client, name).await;
    }
}

#[tokio::test]
async fn there_is_one_manager_per_root() {
    let host = Host::new();
    host.client().await;
    let (status, said) = run_to_end(host.command());
    assert_eq!(status, Some(1));
    let pid = host.manager.as_ref().unwrap().id();
    assert!(said.contains("instance manager") && said.contains(&format!("process {pid}")), "{said}");
    // The first one goes on.
    host.client().await.version_get(()).await.unwrap();
}

/// The next one would have nothing to know it by, and both would start the same processes.
#[tokio::test]
async fn a_manager_whose_lock_is_replaced_leaves_the_root_to_the_next() {
    let mut host = Host::new();
    let mut client = host.client().await;
    create(&mut client, "demo-r-1", &host.endless(), &[]).await.unwrap();
    wait(&mut client, "demo-r-1", |s| s.state == "running").await;
    let pid = host.record("demo-r-1").pid().unwrap();
    host.kill_manager();
    let said = host.root.path().join("said");
    let mut command = host.command();
    host.manager = Some(spawn(command.stderr(fs::File::create(&said).unwrap())));
    host.client().await;
    let other = host.root.path().join("other");
    fs::write(&other, "1\n").unwrap();
    fs::rename(&other, host.root.manager_lock()).unwrap();
    let until = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = host.manager.as_mut().unwrap().try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < until, "it goes on");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    host.manager = None;
    assert_eq!(status.code(), Some(1));
    let said = fs::read_to_string(said).unwrap();
    assert!(said.contains("instance-manager.lock was removed or replaced"), "{said}");
    assert!(is_alive(pid));
    host.start();
    host.client().await;
    assert_eq!(host.record("demo-r-1").pid(), Some(pid));
}

/// True if a thread of the process waits in the call that opens a file.
fn opens_a_file(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let call = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("syscall")).unwrap_or_default();
    let open = nix::libc::SYS_openat.to_string();
    threads.map(call).any(|call| call.split(' ').next() == Some(open.as_str()))
}

/// What a manager has begun to write it may write after it was told to end: a record that is stored, sockets that are removed.
#[tokio::test]
async fn the_next_manager_does_not_begin_beside_what_the_one_before_is_still_writing() {
    let mut host = Host::new();
    let mut client = host.client().await;
    // Whoever writes there waits for a reader.
    let slow = host.root.processes().join(".demo-r-1.json.tmp");
    nix::unistd::mkfifo(&slow, nix::sys::stat::Mode::S_IRWXU).unwrap();
    create(&mut client, "demo-r-1", &host.endless(), &[]).await.unwrap();
    let mut manager = host.manager.take().unwrap();
    let until = Instant::now() + PATIENCE;
    while !opens_a_file(manager.id()) {
        assert!(Instant::now() < until, "the manager writes no record");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    kill(Pid::from_raw(manager.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    while control::transport::connect(&host.root.manager_socket()).await.is_ok() {
        assert!(Instant::now() < until, "the manager goes on");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for _ in 0..20 {
        assert!(manager.try_wait().unwrap().is_none(), "it writes nothing");
        let (status, said) = run_to_end(host.command());
        assert!(status == Some(1) && said.contains("runs already"), "{said}");
    }
    drop(fs::File::open(&slow).unwrap());
    manager.wait().unwrap();
    host.start();
    host.client().await.version_get(()).await.unwrap();
}

#[tokio::test]
async fn the_manager_before_is_not_ended_for_one_that_cannot_begin() {
    let host = Host::new();
    host.client().await;
    let mut command = host.command();
    command.args(["--take-over", "--listen", "127.0.0.1:0", "--tls-dir", "/nowhere"]);
    let (status, said) = run_to_end(command);
    assert!(status == Some(1) && said.contains("/nowhere/ca.crt"), "{said}");
    host.client().await.version_get(()).await.unwrap();
}

#[tokio::test]
async fn tcp_needs_certificates_or_the_word_insecure() {
    let other = tempfile::tempdir().unwrap();
    let start = |more: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.args(["instance-manager", "--listen", "127.0.0.1:0", "--root"]).arg(other.path());
        command.args(more);
        run_to_end(command)
    };
    let (status, said) = start(&[]);
    assert_eq!(status, Some(1));
    assert!(said.contains("--tls-dir") && said.contains("--insecure"), "{said}");
    let (status, said) = start(&["--tls-dir", "/nowhere"]);
    assert_eq!(status, Some(1));
    assert!(said.contains("/nowhere/ca.crt: No such file") && !said.contains("is obeyed"), "{said}");
    let (status, said) = start(&["--tls-dir", "/nowhere", "--insecure"]);
    assert_eq!(status, Some(2), "{said}");
}

#[tokio::test]
async fn who_is_done_or_gives_up_is_not_started_again() {
    let host = Host::new();
    let mut client = host.client().await;
    let done = host.script("done", "exit 0");
    let gives_up = host.script("gives-up", "echo 'error: the key is wrong' >&2\nexit 3");
    create(&mut client, "demo-e-0", &done, &[]).await.unwrap();
    create(&mut client, "demo-r-1", &gives_up, &[]).await.unwrap();
    wait(&mut client, "demo-e-0", |s| s.state == "stopped").await;
    let failed = wait(&mut client, "demo-r-1", |s| s.state == "error").await;
    assert_eq!(failed.error_msg, "the key is wrong");
    tokio::time::sleep(Duration::from_millis(300)).await;
    for (name, state) in [("demo-e-0", "stopped"), ("demo-r-1", "error")] {
        let now = status(&mut client, name).await.unwrap();
        assert_eq!((now.restarts, now.state.as_str()), (0, state), "{name}");
        delete(&mut client, name).await;
    }
}

/// The lines about the usage, which end what the program says then, tell nobody what to do.
#[tokio::test]
async fn of_a_wrong_command_line_what_is_wrong_with_it_is_told() {
    let host = Host::new();
    let mut client = host.client().await;
    let engine =
        ["controller", "--listen", "unix:/run/x.sock", "--frontend", "none", "--queues", "abc", "demo"];
    create(&mut client, "demo-e-0", "", &engine).await.unwrap();
    let failed = wait(&mut client, "demo-e-0", |s| s.state == "error").await;
    assert!(failed.error_msg.starts_with("invalid value 'abc' for '--queues"), "{}", failed.error_msg);
    delete(&mut client, "demo-e-0").await;
}

#[tokio::test]
async fn changes_are_told_and_logs_are_kept() {
    let host = Host::new();
    let mut client = host.client().await;
    let mut changes = client.process_watch(()).await.unwrap().into_inner();
    create(&mut client, "demo-r-1", &host.endless(), &["the", "arguments"]).await.unwrap();
    let mut seen = Vec::new();
    while seen.last().map(String::as_str) != Some("running") {
        let change = tokio::time::timeout(PATIENCE, changes.next()).await.unwrap().unwrap().unwrap();
        seen.push(change.status.unwrap().state);
    }
    assert_eq!(seen, ["starting", "running"]);
    says(&mut client, "demo-r-1", "started with the arguments").await;
    delete(&mut client, "demo-r-1").await;
    let last = loop {
        let change = tokio::time::timeout(PATIENCE, changes.next()).await.unwrap().unwrap().unwrap();
        if change.deleted {
            break change;
        }
    };
    assert_eq!(last.spec.unwrap().name, "demo-r-1");
    let missing = client.process_log(LogRequest { name: "demo-r-1".into() }).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
}

/// A replica of the real program, with nobody that uses it.
async fn create_replica(host: &Host, client: &mut Client, name: &str) {
    let line = replica_line(host, name, name);
    create(client, name, "", &line.iter().map(String::as_str).collect::<Vec<_>>()).await.unwrap();
}

/// The words of a replica's process, in that directory of the root.
fn replica_line(host: &Host, name: &str, directory: &str) -> Vec<String> {
    fs::create_dir_all(host.root.volume("demo")).unwrap();
    fs::write(host.root.key("demo"), [7; 32]).unwrap();
    fs::set_permissions(host.root.key("demo"), fs::Permissions::from_mode(0o600)).unwrap();
    let at = |path: PathBuf| format!("unix:{}", path.display());
    let (listen, data) = (at(host.root.control_socket(name)), at(host.root.data_socket(name)));
    let (key, directory) = (host.root.key("demo"), host.root.path().join(directory));
    let named = |option: &str, value: &str| [format!("--{option}"), value.to_owned()];
    let options = [
        ("volume-name", "demo"),
        ("replica-instance-name", name),
        ("size", "16MiB"),
        ("listen", &listen),
        ("data-listen", &data),
        ("key-file", key.to_str().unwrap()),
    ];
    let mut line = vec!["replica".to_owned()];
    line.extend(options.into_iter().flat_map(|(option, value)| named(option, value)));
    line.push(directory.to_str().unwrap().to_owned());
    line
}

/// What a line of /proc/PID/status says.
fn of_status(pid: u32, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.unwrap_or_default().trim().to_owned()
}

/// It would wait for a minute.
#[tokio::test]
async fn a_replica_that_waits_for_its_directory_ends_when_it_is_told_to() {
    let host = Host::new();
    let mut client = host.client().await;
    create_replica(&host, &mut client, "demo-r-1").await;
    let first = wait(&mut client, "demo-r-1", running).await;
    let mut second = spawn(Command::new(PROGRAM).args(replica_line(&host, "demo-r-2", "demo-r-1")));
    let until = Instant::now() + PATIENCE;
    let caught = || u64::from_str_radix(&of_status(second.id(), "SigCgt"), 16).unwrap_or(0);
    while caught() & (1 << (Signal::SIGTERM as u32 - 1)) == 0 {
        assert!(Instant::now() < until && is_alive(second.id()), "it does not hear signals");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let until = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = second.try_wait().unwrap() {
            break status;
        }
        // Again and again: signal-hook-registry installs its handler a moment before it knows what to do in it, and a
        // signal of that moment is lost.
        kill(Pid::from_raw(second.id().cast_signed()), Signal::SIGTERM).unwrap();
        assert!(Instant::now() < until, "it waits for the directory all the same");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert_eq!(status.code(), Some(0));
    assert!(is_alive(first.pid), "the other has the directory");
}

/// Waits until the log of a process has a line with this.
async fn tells(host: &Host, name: &str, text: &str) {
    let until = Instant::now() + PATIENCE;
    while !fs::read_to_string(host.root.log(name)).is_ok_and(|log| log.contains(text)) {
        assert!(Instant::now() < until, "{:?}", fs::read_to_string(host.root.log(name)));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_replica_logs_at_the_level_that_its_manager_is_told() {
    let host = Host::new();
    let mut client = host.client().await;
    let channel = control::transport::connect(&host.root.manager_socket()).await.unwrap();
    let mut instances = InstanceServiceClient::new(channel);
    let mut set = async |level: &str| {
        let request = LogSetLevelRequest { data_engine: DataEngine::V1.into(), level: level.into() };
        instances.log_set_level(request).await.unwrap();
    };
    create_replica(&host, &mut client, "demo-r-1").await;
    tells(&host, "demo-r-1", "starts as process").await;
    set("Debug").await;
    tells(&host, "demo-r-1", "logs at level debug from now on").await;
    // One that starts later begins at that level: there is nothing to change when it is told.
    create_replica(&host, &mut client, "demo-r-2").await;
    wait(&mut client, "demo-r-2", running).await;
    set("warn").await;
    set("trace").await;
    tells(&host, "demo-r-2", "logs at level trace from now on").await;
    let log = fs::read_to_string(host.root.log("demo-r-2")).unwrap();
    assert!(!log.contains("level debug"), "{log}");
    // What is told at another level than the new one is let through no more: that it is `warn` now, for one.
    let own = control::transport::connect(&host.root.control_socket("demo-r-2")).await.unwrap();
    let mut own = LoggingClient::new(own);
    for level in ["warn", "info"] {
        own.level_set(LogLevel { level: level.to_owned() }).await.unwrap();
    }
    tells(&host, "demo-r-2", "logs at level info from now on").await;
    let log = fs::read_to_string(host.root.log("demo-r-2")).unwrap();
    assert!(!log.contains("level warn"), "{log}");
}

#[tokio::test]
async fn a_log_does_not_grow_for_ever() {
    let host = Host::new();
    let mut client = host.client().await;
    let chatty = host.script("chatty", "head -c 12000000 /dev/zero | tr '\\0' '\\n'\nexec sleep 1000");
    create(&mut client, "demo-r-1", &chatty, &[]).await.unwrap();
    let log = host.root.log("demo-r-1");
    let older = PathBuf::from(format!("{}.1", log.display()));
    let until = Instant::now() + PATIENCE;
    while !older.exists() || fs::metadata(&log).unwrap().len() > 10 << 20 {
        assert!(Instant::now() < until, "the log is never rotated");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn a_launched_process_whose_manager_died_runs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("it-ran");
    let mut command = Command::new(PROGRAM);
    command.arg0(LAUNCH_NAME).args(["/bin/sh", "-c"]).arg(format!("touch {}", trace.display()));
    // An empty standard input is what the manager's death looks like.
    let ended = spawn(command.stdin(Stdio::null()).stderr(Stdio::null())).wait().unwrap();
    assert!(!ended.success());
    assert!(!trace.exists());
}
