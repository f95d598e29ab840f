//! `status --watch` on a volume that is being written, with real processes: rates, times and replicas as objects and as
//! lines.

mod host;
mod nbd;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use nbd::Client;
use serde_json::Value;

const CTL: &str = env!("CARGO_BIN_EXE_longhornctl");

/// Lines that are looked at before giving up: one comes each second, the first may be from before the writes.
const LINES_MAX: usize = 60;

/// A volume that is stopped when the test ends, however it ends.
struct Volume {
    root: tempfile::TempDir,
    name: String,
}

impl Volume {
    fn ctl(&self, args: &[&str]) -> Command {
        let mut command = Command::new(CTL);
        command.arg("--root").arg(self.root.path()).args(args).arg(&self.name).stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.ctl(args).output().unwrap()
    }

    /// Reads lines of a watcher until one is as wanted.
    fn watch(&self, args: &[&str], wanted: impl Fn(&str) -> bool) -> String {
        let mut watcher = Watcher(self.ctl(args).stdout(Stdio::piped()).spawn().unwrap());
        let lines = BufReader::new(watcher.0.stdout.take().unwrap()).lines();
        let mut seen = Vec::new();
        for line in lines.take(LINES_MAX) {
            let line = line.unwrap();
            if wanted(&line) {
                return line;
            }
            seen.push(line);
        }
        panic!("not among the lines of {args:?}: {seen:#?}");
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.run(&["down"]);
        self.run(&["rm", "--yes"]);
        // Nobody is left but the instance manager.
        host::leave_nothing_of(self.root.path());
    }
}

struct Watcher(Child);

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes 4 KiB again and again until it is told to stop.
fn write_until(volume: &str, stop: &AtomicBool) {
    let mut client = Client::of(volume);
    let mut turn = 0;
    while !stop.load(Ordering::Relaxed) {
        turn += 1;
        client.write(turn % 1024 * 4096, &[7; 4096]);
    }
}

fn has_writes(activity: &Value) -> bool {
    activity["writes"]["iops"].as_u64().is_some_and(|n| n > 0)
}

#[test]
fn rates_times_and_replicas_of_a_volume_in_use() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("SKIP watch: not root");
    }
    let name = format!("test-{}-watch", std::process::id());
    let volume = Volume { root: tempfile::tempdir().unwrap(), name };
    let up = volume.run(&["up", "--size", "16MiB", "--replicas", "2", "--frontend", "nbd-server"]);
    assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| write_until(&volume.name, &stop));
        let checks = std::panic::catch_unwind(|| {
            // The first second with a write need not have it on every replica, nor need each be in sync by then.
            let object = volume.watch(&["-o", "json", "status", "--watch"], |line| {
                let object: Value = serde_json::from_str(line).unwrap();
                let activity = &object["activity"];
                let replicas = activity["replicas"].as_array().into_iter().flatten();
                object["robustness"] == "healthy" && replicas.chain([activity]).all(has_writes)
            });
            let object: Value = serde_json::from_str(&object).unwrap();
            let writes = &object["activity"]["writes"];
            let number = |value: &Value| value.as_u64().unwrap();
            assert!(number(&writes["bytes_per_second"]) >= 4096, "{writes}");
            assert!(
                number(&writes["p50"]) > 0 && number(&writes["p50"]) <= number(&writes["p99"]),
                "{writes}"
            );
            assert_eq!(number(&object["activity"]["reads"]["iops"]), 0);
            let replicas = object["activity"]["replicas"].as_array().unwrap();
            assert_eq!(replicas.len(), 2);
            assert!(replicas.iter().all(has_writes), "{replicas:?}");
            volume.watch(&["status", "--watch"], |line| {
                line.contains("attached healthy") && line.contains(" p99 ") && line.contains(" RW")
            });
        });
        stop.store(true, Ordering::Relaxed);
        if let Err(failed) = checks {
            std::panic::resume_unwind(failed);
        }
    });
}
