//! Which process is meant, beyond doubt: a number is used again, also after a reboot; a number, its start time and the
//! boot are not.

use std::io;
use std::os::fd::OwnedFd;
use std::process::Child;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::policy::Exit;

/// A process, told apart from every other that had or will have its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its number.
    pub pid: u32,
    /// Clock ticks between the boot and its start (`proc_pid_stat(5)`, field 22).
    start_time: u64,
    /// The boot, since after another one the same number may start at the same tick.
    boot: String,
}

impl ProcessId {
    /// The process that has this number now. `None`: nobody has, or it has ended and waits to be reaped.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn of(pid: u32) -> io::Result<Option<Self>> {
        let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat,
            // ESRCH: it ended between open and read.
            Err(e) if e.kind() == io::ErrorKind::NotFound || is_gone(&e) => return Ok(None),
            Err(e) => return Err(e),
        };
        match parse_stat(&stat) {
            Some(('Z' | 'X' | 'x', _)) => Ok(None),
            Some((_, start_time)) => Ok(Some(Self { pid, start_time, boot: lh_block::boot()?.to_owned() })),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat: {stat:?}"))),
        }
    }

    /// True while the process runs.
    pub fn is_alive(&self) -> bool {
        Self::of(self.pid).is_ok_and(|now| now.as_ref() == Some(self))
    }
}

fn is_gone(e: &io::Error) -> bool {
    e.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

/// State and start time. The second field, the program's name, may contain anything, so what follows its last `)` counts.
fn parse_stat(stat: &str) -> Option<(char, u64)> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    // Field 3 was the state; 22 is the 19th behind it.
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// A process that is watched: one's own child, or one that an earlier manager started.
#[derive(Debug)]
pub(super) struct Watched {
    id: ProcessId,
    fd: AsyncFd<OwnedFd>,
    child: Option<Child>,
}

impl Watched {
    /// Watches a child that was just started, so that nobody else can have its number.
    pub(super) fn child(mut child: Child) -> io::Result<Self> {
        let pid = child.id();
        let known = open(pid).and_then(|fd| {
            let id = ProcessId::of(pid)?;
            Ok((id.ok_or_else(|| io::Error::other("the process ended at once"))?, fd))
        });
        match known {
            Ok((id, fd)) => Ok(Self { id, fd, child: Some(child) }),
            Err(e) => {
                // Nobody would ever ask for its status.
                child.kill().and_then(|()| child.wait())?;
                Err(e)
            }
        }
    }

    /// Watches a process that somebody else started. `None`: it has ended.
    pub(super) fn adopt(id: &ProcessId) -> io::Result<Option<Self>> {
        let fd = match open(id.pid) {
            Ok(fd) => fd,
            Err(e) if is_gone(&e) => return Ok(None),
            Err(e) => return Err(e),
        };
        // Compared after the descriptor was opened: a descriptor of a later process would show a later start.
        Ok(id.is_alive().then(|| Self { id: id.clone(), fd, child: None }))
    }

    pub(super) fn id(&self) -> &ProcessId {
        &self.id
    }

    /// Ends a child that waits at its gate. Nobody else would ask for its status, and each try to start it on a full disk would
    /// leave another one.
    pub(super) fn abandon(mut self) {
        let ended = self.child.as_mut().map(|child| child.kill().and_then(|()| child.wait()));
        if let Some(Err(e)) = ended {
            tracing::warn!(pid = self.id.pid, "a process that was not started does not end: {e}");
        }
    }

    /// Waits for its end. May be dropped and called again.
    pub(super) async fn exited(&mut self) -> Exit {
        // A descriptor that cannot be waited for would be asked for ever: taken for an end.
        if let Err(e) = self.fd.ready(Interest::READABLE).await {
            tracing::error!(pid = self.id.pid, error = %e, "process cannot be watched any more");
        }
        let Some(child) = &mut self.child else { return Exit::Unknown };
        match child.try_wait() {
            Ok(Some(status)) => exit_of(status),
            Ok(None) | Err(_) => Exit::Unknown,
        }
    }

    /// Sends it a signal; one that has ended gets none.
    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(self.fd.get_ref(), signal) {
            Err(rustix::io::Errno::SRCH) => Ok(()),
            other => other.map_err(Into::into),
        }
    }
}

#[expect(
    deprecated,
    reason = "its successor is unsafe; an OwnedFd keeps the descriptor open and the same, as that one asks"
)]
fn open(pid: u32) -> io::Result<AsyncFd<OwnedFd>> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let fd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
    AsyncFd::with_interest(fd, Interest::READABLE)
}

fn exit_of(status: std::process::ExitStatus) -> Exit {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Status(code),
        (None, Some(signal)) => Exit::Signal(signal),
        (None, None) => Exit::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_name_with_brackets_and_spaces_does_not_confuse() {
        let stat = "42 (a) b) (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 777 20 21";
        assert_eq!(parse_stat(stat), Some(('S', 777)));
        assert_eq!(parse_stat("42 (x) Z 1 2"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn a_process_is_itself_and_nobody_else() {
        let me = ProcessId::of(std::process::id()).unwrap().unwrap();
        assert!(me.is_alive());
        assert!(!ProcessId { start_time: me.start_time + 1, ..me.clone() }.is_alive());
        assert!(!ProcessId { boot: "another".into(), ..me.clone() }.is_alive());
        assert!(!ProcessId { pid: 1, ..me }.is_alive());
        assert_eq!(ProcessId::of(0).unwrap(), None);
    }

    #[tokio::test]
    async fn nothing_is_left_of_a_child_that_was_not_started() {
        let child = Command::new("/bin/sleep").arg("600").spawn().unwrap();
        let place = std::path::PathBuf::from(format!("/proc/{}", child.id()));
        let watched = Watched::child(child).unwrap();
        assert!(place.exists());
        watched.abandon();
        assert!(!place.exists(), "it runs, or is a zombie");
    }

    #[tokio::test]
    async fn the_end_of_a_child_is_seen_with_its_status() {
        let mut command = Command::new("/bin/sh");
        let mut child = command.args(["-c", "read word; exit 7"]).stdin(Stdio::piped()).spawn().unwrap();
        let word = child.stdin.take();
        let mut watched = Watched::child(child).unwrap();
        let early = tokio::time::timeout(Duration::from_millis(5), watched.exited()).await;
        assert!(early.is_err(), "it runs");
        drop(word);
        assert_eq!(watched.exited().await, Exit::Status(7));
        assert!(!watched.id().is_alive());
        watched.signal(Signal::TERM).unwrap();
    }

    #[tokio::test]
    async fn somebody_elses_process_is_adopted_and_its_end_seen() {
        let mut child = Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap().unwrap();
        let mut adopted = Watched::adopt(&id).unwrap().unwrap();
        adopted.signal(Signal::KILL).unwrap();
        assert_eq!(adopted.exited().await, Exit::Unknown);
        child.wait().unwrap();
        assert!(Watched::adopt(&id).unwrap().is_none());
    }

    #[tokio::test]
    async fn a_zombie_is_not_adopted() {
        let mut child = Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap().unwrap();
        child.kill().unwrap();
        while id.is_alive() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(Watched::adopt(&id).unwrap().is_none());
        child.wait().unwrap();
    }
}
