//! Processes that a test stops.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Far more than a stop takes, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Stops a process, and waits until none of its threads does anything more: who sends the signal does not wait for that.
pub(crate) fn stand_still(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    let until = Instant::now() + PATIENCE;
    while !stands_still(pid) {
        assert!(Instant::now() < until, "process {pid} does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether each thread has stopped. One that ends meanwhile is looked at again, as are those that there are then.
fn stands_still(pid: i32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    threads.flatten().all(|thread| state(&thread.path()) == Some('T'))
}

/// A thread's state, behind its name in brackets (proc_pid_stat(5)).
fn state(thread: &Path) -> Option<char> {
    let stat = std::fs::read_to_string(thread.join("stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}
