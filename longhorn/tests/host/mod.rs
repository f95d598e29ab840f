//! A root of its own on this host, with real processes.

#![allow(dead_code, reason = "each test uses its part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

const CTL: &str = env!("CARGO_BIN_EXE_longhornctl");
const LONGHORN: &str = env!("CARGO_BIN_EXE_longhorn");

/// Far more than anything takes, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A root with its processes; nothing of it is left when it is dropped.
pub(crate) struct Host {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) volume: String,
}

impl Host {
    /// `None` where volumes cannot run: they belong to root.
    pub(crate) fn new(word: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIP {word}: not root");
            return None;
        }
        // Volume names are the host's, not the root's.
        let volume = format!("test-{}-{word}", std::process::id());
        Some(Self { dir: tempfile::tempdir().unwrap(), volume })
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(CTL);
        command.arg("--root").arg(self.dir.path()).args(args).stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let done = self.run(args);
        assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    /// Makes the volume, of 16 MiB.
    pub(crate) fn up(&self, frontend: &str, more: &[&str]) {
        let usual = ["up", &self.volume, "--size", "16MiB", "--frontend", frontend];
        self.ok(&[&usual, more].concat());
    }

    pub(crate) fn refused(&self, args: &[&str], says: &str) {
        let done = self.run(args);
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains(says), "{args:?} does not say {says}: {said}");
    }

    pub(crate) fn status(&self) -> Value {
        serde_json::from_str(&self.ok(&["-o", "json", "status", &self.volume])).unwrap()
    }

    pub(crate) fn wait(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
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

    /// The processes of this root, commands among them.
    pub(crate) fn processes(&self) -> Vec<i32> {
        processes_of(self.dir.path())
    }

    pub(crate) fn kill_everything(&self) {
        kill_all_of(self.dir.path());
    }

    /// Tells others on this host whose the volume's name is.
    pub(crate) fn lock_of_the_name(&self) -> PathBuf {
        PathBuf::from(format!("/run/longhorn/{}.engine.lock", self.volume))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        leave_nothing_of(self.dir.path());
    }
}

fn processes_of(root: &Path) -> Vec<i32> {
    let root = root.to_str().unwrap();
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pid = |path: &Path| path.file_name()?.to_str()?.parse::<i32>().ok();
    let is_of_it = |path: &Path| {
        let line = std::fs::read(path.join("cmdline")).unwrap_or_default();
        let text = String::from_utf8_lossy(&line);
        (text.starts_with(LONGHORN) || text.starts_with(CTL)) && text.contains(root)
    };
    entries.map(|e| e.path()).filter(|p| is_of_it(p)).filter_map(|p| pid(&p)).collect()
}

fn kill_all_of(root: &Path) {
    loop {
        let processes = processes_of(root);
        if processes.is_empty() {
            return;
        }
        processes.iter().copied().for_each(kill_9);
        // What is ending has no command line any more, and is there all the same: whoever looks at it finds that it lives.
        until("they have ended", || processes.iter().copied().all(has_ended));
    }
}

/// Ends the processes of a root, and takes away what killed engines have left of their volumes' names, which are the host's.
pub(crate) fn leave_nothing_of(root: &Path) {
    kill_all_of(root);
    for entry in std::fs::read_dir("/run/longhorn").into_iter().flatten().flatten() {
        let (lock, name) = (entry.path(), entry.file_name());
        let Some(volume) = name.to_str().and_then(|name| name.strip_suffix(".engine.lock")) else { continue };
        let holder = std::fs::read(&lock).ok().and_then(|text| serde_json::from_slice::<Value>(&text).ok());
        let holder = holder.and_then(|holder| Some(PathBuf::from(holder["root"].as_str()?)));
        // A root may lie in another one.
        if holder.is_some_and(|holder| holder.starts_with(root)) {
            let _ = std::fs::remove_file(lock.with_file_name(format!("{volume}.nbd.sock")));
            let _ = std::fs::remove_file(lock);
        }
    }
}

pub(crate) fn kill_9(pid: i32) {
    signal(pid, Signal::SIGKILL);
}

pub(crate) fn signal(pid: i32, signal: Signal) {
    // It may have ended by itself.
    let _ = kill(Pid::from_raw(pid), signal);
}

/// The number of a process, as a status has it.
pub(crate) fn pid(value: &Value) -> i32 {
    value.as_i64().and_then(|n| i32::try_from(n).ok()).unwrap_or_else(|| panic!("{value} is no process"))
}

pub(crate) fn is_healthy(status: &Value) -> bool {
    status["state"] == "attached" && status["robustness"] == "healthy"
}

/// Waits until it is so.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// It was killed, and none of its threads runs any more, whether anybody has heard of that or not.
pub(crate) fn has_ended(pid: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return true };
    let is_zombie = stat.rsplit_once(") ").unwrap().1.starts_with('Z');
    is_zombie && std::fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|threads| threads.count() == 1)
}
