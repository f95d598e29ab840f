//! Ending the manager before this one, so that this one can go on in its place: its processes do not notice.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long it may take to end. It has nothing to do then but to close its sockets.
const PATIENCE: Duration = Duration::from_secs(20);

/// How often is looked meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// Asks the manager that holds this lock to end, and waits until it has. If it does not, whoever wants the lock next is told so.
pub(super) async fn end(lock: &Path) {
    let deadline = Instant::now() + PATIENCE;
    let mut asked = None;
    while is_held(lock) && Instant::now() < deadline {
        match holder(lock) {
            Some(pid) if asked != Some(pid) => {
                tracing::info!(pid = pid.as_raw(), "the instance manager before this one is to end");
                let _ = kill(pid, Signal::SIGTERM);
                asked = Some(pid);
            }
            _ => {}
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// True if a manager has this lock, whether it answers yet or not.
pub(super) fn is_held(lock: &Path) -> bool {
    let Ok(file) = OpenOptions::new().read(true).open(lock) else { return false };
    matches!(Flock::lock(file, FlockArg::LockSharedNonblock), Err((_, Errno::EWOULDBLOCK)))
}

/// The process that the file names, if it is an instance manager: a number in it may be an older one's.
fn holder(lock: &Path) -> Option<Pid> {
    let pid: i32 = fs::read_to_string(lock).ok()?.lines().next()?.parse().ok()?;
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let is_manager = line.split(|byte| *byte == 0).nth(1) == Some(b"instance-manager");
    (is_manager && pid > 1).then(|| Pid::from_raw(pid))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn only_an_instance_manager_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let lock = dir.path().join("lock");
        assert_eq!(holder(&lock), None);
        for (script, is_one) in [("instance-manager", true), ("another", false)] {
            fs::write(dir.path().join(script), "read line").unwrap();
            let mut shell = Command::new("/bin/sh");
            let mut child = shell.arg(script).current_dir(&dir).stdin(Stdio::piped()).spawn().unwrap();
            fs::write(&lock, format!("{}\n", child.id())).unwrap();
            // Until it is the shell.
            let deadline = Instant::now() + PATIENCE;
            while is_one && holder(&lock).is_none() && Instant::now() < deadline {
                std::thread::sleep(LOOK);
            }
            assert_eq!(holder(&lock).is_some(), is_one, "{script}");
            child.kill().and_then(|()| child.wait()).unwrap();
        }
    }
}
