//! A served disk for tests: the example program as engine, its keeper, and a watchdog without which a mistake would leave
//! processes that nobody can kill.

#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fuse_frontend::keeper::{Info, Keeper};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// What a test may take before everything that waits for its device fails.
const PATIENCE: Duration = Duration::from_secs(120);

/// Says why a test cannot run here, if it cannot. `tools` are programs that it needs.
pub fn skip(test: &str, tools: &[&str]) -> bool {
    let reason = if !nix::unistd::geteuid().is_root() {
        "needs root".to_owned()
    } else if let Some(missing) = fuse_frontend::missing() {
        format!("no {missing}")
    } else if let Some(tool) = tools.iter().find(|tool| !is_there(tool)) {
        format!("no {tool}")
    } else {
        return false;
    };
    println!("SKIP {test}: {reason}");
    true
}

fn is_there(tool: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':').chain(["/usr/sbin", "/sbin"]).any(|dir| Path::new(dir).join(tool).exists())
}

/// Runs a program to its end.
pub fn run(line: &[&str]) -> String {
    let output = Command::new(line[0]).args(&line[1..]).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|e| panic!("{line:?}: {e}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{line:?}: {}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// The example program, built as the tests are.
fn example() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(examples) = std::env::var_os("LH_EXAMPLES") {
            return Path::new(&examples).join("fuse-memory");
        }
        // `cargo test --test NAME` builds no examples.
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "fuse-frontend", "--example", "fuse-memory"]);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo runs").success(), "the example is not built");
        let own = std::env::current_exe().expect("the test's own path");
        own.parent().and_then(Path::parent).expect("target/PROFILE/deps").join("examples/fuse-memory")
    })
}

/// The engine process.
pub struct Server {
    pub child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Server {
    /// Gives an order and waits for its answer.
    pub fn order(&mut self, line: &str) -> String {
        writeln!(self.orders, "{line}").expect("the server takes orders");
        self.answer()
    }

    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the server answers");
        line.trim_end().to_owned()
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A disk of a test's own.
pub struct Rig {
    pub name: String,
    pub node: PathBuf,
    pub socket: PathBuf,
    pub directory: tempfile::TempDir,
    arguments: Vec<String>,
    pub server: Option<Server>,
    over: Arc<AtomicBool>,
}

impl Rig {
    /// Starts a disk of `size` bytes. With `lasting`, its bytes outlive the server.
    pub fn start(test: &str, size: u64, block_size: u32, lasting: bool) -> Self {
        let mut rig = Self::new(test, size, block_size, lasting);
        rig.serve();
        rig
    }

    /// The same without a server.
    pub fn new(test: &str, size: u64, block_size: u32, lasting: bool) -> Self {
        let name = format!("test-{test}-{}", std::process::id());
        // In memory: what is tested is the device, not the disk of this machine.
        let directory = tempfile::Builder::new().prefix("fuse").tempdir_in("/dev/shm").expect("/dev/shm");
        let socket = directory.path().join("keeper.sock");
        let node = PathBuf::from("/dev/longhorn").join(&name);
        let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
        let mut arguments: Vec<String> =
            ["serve", &name, "--size", &size.to_string(), "--block-size", &block_size.to_string()]
                .map(str::to_owned)
                .into();
        arguments.extend(["--socket".into(), text(&socket), "--node".into(), text(&node)]);
        if lasting {
            arguments.extend(["--file".into(), text(&directory.path().join("disk"))]);
        }
        let over = Arc::new(AtomicBool::new(false));
        watch(test, socket.clone(), Arc::clone(&over));
        Self { name, node, socket, directory, arguments, server: None, over }
    }

    /// More arguments for servers to come.
    pub fn add(&mut self, arguments: &[&str]) {
        self.arguments.extend(arguments.iter().map(|&a| a.to_owned()));
    }

    /// Starts a server and waits until the device is there.
    pub fn serve(&mut self) -> String {
        let mut server = self.spawn();
        let ready = server.answer();
        let log = || fs::read_to_string(self.directory.path().join("log")).unwrap_or_default();
        assert!(ready.starts_with("ready "), "{ready:?}\n{}", log());
        self.server = Some(server);
        ready
    }

    pub fn spawn(&self) -> Server {
        self.spawn_with(&[])
    }

    /// The same with more arguments, of which the last one of a kind counts.
    pub fn spawn_with(&self, more: &[&str]) -> Server {
        let mut child = Command::new(example())
            .args(&self.arguments)
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(self.log())
            .spawn()
            .expect("the example starts");
        let orders = child.stdin.take().expect("piped");
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Server { child, orders, answers }
    }

    /// A keeper without an engine.
    pub fn spawn_keeper(&self) -> Child {
        self.spawn_keeper_by(Command::new(example()))
    }

    /// One that finds another file where /dev/fuse should be.
    pub fn spawn_keeper_without_fuse(&self) -> Child {
        let mut command = Command::new("unshare");
        command
            .args(["-m", "sh", "-c", "mount --bind /dev/null /dev/fuse && exec \"$0\" \"$@\""])
            .arg(example());
        self.spawn_keeper_by(command)
    }

    fn spawn_keeper_by(&self, mut command: Command) -> Child {
        command
            .args(["keeper", &self.name, "--socket", self.socket.to_str().expect("UTF-8")])
            .args(["--node", self.node()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(self.log())
            .spawn()
            .expect("the example starts")
    }

    fn log(&self) -> fs::File {
        fs::File::options().create(true).append(true).open(self.directory.path().join("log")).expect("a log")
    }

    pub fn server(&mut self) -> &mut Server {
        self.server.as_mut().expect("a server runs")
    }

    pub fn info(&self) -> Info {
        Keeper::connect(&self.socket)
            .and_then(|mut k| k.info().map_err(std::io::Error::other))
            .expect("a keeper")
    }

    pub fn node(&self) -> &str {
        self.node.to_str().expect("UTF-8")
    }

    pub fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().expect("UTF-8").to_owned()
    }

    /// Stops everything cleanly and checks that nothing is left.
    pub fn stop(mut self) {
        let info = self.info();
        let (device, bound, keeper) = (info.device().expect("a device"), info.loop_sequence, info.pid);
        let mut server = self.server.take().expect("a server runs");
        assert_eq!(server.order("stop"), "stopped");
        assert!(server.child.wait().expect("it ends").success());
        assert!(!self.node.exists(), "the node is left");
        assert_ne!(sequence(&device), bound, "the loop device is left");
        wait_until("the keeper ends", || !Path::new(&format!("/proc/{keeper}")).exists());
        assert!(!self.socket.exists(), "the socket is left");
        assert!(!self.socket.with_extension("lock").exists(), "the lock is left");
        assert!(!fs::read_to_string("/proc/self/mountinfo").expect("mountinfo").contains(&self.name));
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if std::thread::panicking() {
            println!("{}", fs::read_to_string(self.directory.path().join("log")).unwrap_or_default());
        }
        let Ok(mut keeper) = Keeper::connect(&self.socket) else { return };
        let pid = keeper.info().map(|info| info.pid);
        if let Some(mut server) = self.server.take() {
            server.kill();
        }
        // The users of the device have got errors by now, and go.
        for _ in 0..50 {
            if keeper.stop_by_force().is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        if let Ok(pid) = pid {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = fs::remove_file(&self.node);
    }
}

/// Aborts the connection when the test takes too long, so that what waits for the device fails instead of hanging.
fn watch(test: &str, socket: PathBuf, over: Arc<AtomicBool>) {
    let test = test.to_owned();
    std::thread::spawn(move || {
        let deadline = Instant::now() + PATIENCE;
        while !over.load(Ordering::Acquire) {
            if Instant::now() > deadline {
                println!("{test}: {PATIENCE:?} have passed: aborting its connection");
                let connection = Keeper::connect(&socket)
                    .and_then(|mut k| k.info().map_err(std::io::Error::other))
                    .map(|info| info.connection);
                if let Ok(Some(connection)) = connection {
                    let _ = lh_ring::sys::mounts::abort_fuse(connection);
                }
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    });
}

/// The kernel's number of a loop device's present binding.
pub fn sequence(device: &Path) -> Option<u64> {
    let name = device.file_name()?.to_str()?;
    fs::read_to_string(format!("/sys/block/{name}/diskseq")).ok()?.trim().parse().ok()
}

/// Waits up to a minute.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A mounted file system, unmounted at the end.
pub struct Mounted(pub PathBuf);

impl Mounted {
    pub fn new(device: &str, at: PathBuf, options: &str) -> Self {
        fs::create_dir_all(&at).expect("a mount point");
        run(&["mount", "-o", options, device, at.to_str().expect("UTF-8")]);
        Self(at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A child that another test is just starting has a copy of what this one had open there, until it is another program.
        let until = Instant::now() + Duration::from_secs(20);
        let at = self.0.to_string_lossy().into_owned();
        let is_mounted = || fs::read_to_string("/proc/self/mounts").is_ok_and(|mounts| mounts.contains(&at));
        while is_mounted() && Instant::now() < until {
            let _ = Command::new("umount").arg(&self.0).status();
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
