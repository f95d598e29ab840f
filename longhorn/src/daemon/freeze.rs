//! `longhorn fs-freeze`: freezes the file system on a volume's device while an engine takes a snapshot.
//!
//! A frozen file system holds up everybody who writes to it, and stays frozen when its freezer dies. So a process of its
//! own freezes, and thaws on whichever comes first: the engine closes its end of the pipe, because it is done or because
//! it died; or the time is over. The engine thaws if this process died. For the case that both were killed at once a
//! note lies in /run/longhorn, and the next engine of the volume thaws what it names.
//!
//! The engine never calls into the file system itself: freezing writes to the device that the engine serves.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lh_ring::sys;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::mounts::{kind_mounted_anywhere, mount_of};

/// How long a file system may be frozen: programs that write wait so long at most. A snapshot takes milliseconds, but
/// may wait for one before it.
pub(super) const LIMIT: Duration = Duration::from_secs(20);

/// What the process says when the file system is frozen.
const FROZEN: &str = "frozen";

/// Its exit status when the time was over before it was asked to thaw.
const LATE: i32 = 3;

/// The exit status of a freezer that froze nothing: what is frozen there is somebody else's.
const NOT_FROZEN: i32 = 4;

/// Arguments of a freezer.
#[derive(Debug, clap::Args)]
pub(super) struct FreezeArgs {
    /// Where the file system is mounted
    mount_point: PathBuf,
    /// Thaw after so many milliseconds, whatever happens
    #[arg(long, value_name = "MILLISECONDS")]
    limit: u64,
}

/// Freezes, waits, thaws. Does not return if the time was over: the exit status says so.
pub(super) fn run(args: &FreezeArgs) -> Result<()> {
    let place = args.mount_point.display();
    let not_frozen = |why: &dyn std::fmt::Display| -> ! {
        let _ = writeln!(io::stderr(), "error: freezing {place}: {why}");
        std::process::exit(NOT_FROZEN);
    };
    // What is dirty is written while everybody goes on, so that freezing, for which they wait, has little left to write.
    let synced = File::open(&args.mount_point).and_then(|root| Ok(rustix::fs::syncfs(&root).map(|()| root)?));
    let root = synced.unwrap_or_else(|e| not_frozen(&e));
    if wait_for_end(Instant::now()) {
        not_frozen(&"writing what was dirty took too long");
    }
    let deadline = Instant::now() + Duration::from_millis(args.limit);
    sys::freeze(&root).unwrap_or_else(|e| not_frozen(&e));
    // From here on every way leads to the thaw.
    let said = writeln!(io::stdout(), "{FROZEN}").and_then(|()| io::stdout().flush());
    let in_time = said.is_ok() && wait_for_end(deadline);
    let thawed = sys::thaw(&root);
    thawed.with_context(|| format!("thawing {}", args.mount_point.display()))?;
    if !in_time {
        std::process::exit(LATE);
    }
    Ok(())
}

/// True once the other end of standard input is closed; false if the time is over first. It is looked at once in any case.
fn wait_for_end(deadline: Instant) -> bool {
    let stdin = io::stdin();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut wait = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
        match poll(&mut wait, timeout) {
            // Nothing is ever written to it: what is to be read is its end.
            Ok(ready) if ready > 0 => return true,
            Ok(_) | Err(nix::errno::Errno::EINTR) if left.is_zero() => return false,
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
}

/// A frozen file system. Dropped, it thaws.
#[derive(Debug)]
pub(super) struct Frozen {
    child: Child,
    mount_point: PathBuf,
    note: PathBuf,
    ended: bool,
}

impl Frozen {
    /// Freezes the file system that is mounted from a volume's device. `None`: none is.
    ///
    /// # Errors
    /// It cannot be frozen: it is frozen already, of a kind that does not freeze, does not come to rest in time, or is mounted
    /// where this process does not see it.
    pub(super) fn of_device(volume: &str, device: &Path) -> Result<Option<Self>> {
        let Some(mount_point) = mount_of(device)? else {
            return match kind_mounted_anywhere(device)? {
                Some(kind) => {
                    bail!("the {kind} on {} is mounted where its engine does not see it", device.display())
                }
                None => Ok(None),
            };
        };
        let program = std::env::current_exe().context("this program's own path")?;
        let note = note(volume);
        std::fs::write(&note, mount_point.as_os_str().as_encoded_bytes())
            .with_context(|| note.display().to_string())?;
        let child = Command::new(program)
            .args(["fs-freeze", "--limit", &LIMIT.as_millis().to_string()])
            .arg(&mount_point)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("a process that freezes")?;
        let mut frozen = Self { child, mount_point, note, ended: false };
        frozen.wait_until_frozen()?;
        Ok(Some(frozen))
    }

    fn wait_until_frozen(&mut self) -> Result<()> {
        let stdout = self.child.stdout.take().context("the freezer has no output")?;
        let ready = {
            let timeout = PollTimeout::try_from(LIMIT).unwrap_or(PollTimeout::MAX);
            let mut wait = [PollFd::new(stdout.as_fd(), PollFlags::POLLIN)];
            matches!(poll(&mut wait, timeout), Ok(ready) if ready > 0)
        };
        let mut word = String::new();
        if ready {
            BufReader::new(stdout).read_line(&mut word)?;
        }
        if word.trim() == FROZEN {
            return Ok(());
        }
        let place = self.mount_point.display().to_string();
        if !ready {
            // It thaws by itself as soon as the kernel lets it: its pipe is closed.
            bail!("{place} does not come to rest within {} s", LIMIT.as_secs());
        }
        let mut reason = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = io::Read::read_to_string(&mut stderr, &mut reason);
        }
        bail!("{}", reason.trim().strip_prefix("error: ").unwrap_or("the freezer ended without a word"));
    }

    /// Thaws. `false`: it thawed earlier, because the time was over or its process was killed.
    ///
    /// # Errors
    /// It could not be thawed.
    pub(super) fn thaw(mut self) -> Result<bool> {
        self.end()
    }

    fn end(&mut self) -> Result<bool> {
        self.ended = true;
        drop(self.child.stdin.take());
        let deadline = Instant::now() + LIMIT;
        let status = loop {
            match self.child.try_wait()? {
                Some(status) => break status,
                // It hangs in the kernel, which waits for the device; it thaws when that answers.
                None if Instant::now() > deadline => {
                    bail!("{} is not thawed yet: its device does not answer", self.mount_point.display())
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let in_time = status.success();
        if !in_time && !matches!(status.code(), Some(LATE | NOT_FROZEN)) {
            self.thaw_in_its_place(status)?;
        }
        let _ = std::fs::remove_file(&self.note);
        Ok(in_time)
    }

    /// The process died, or could not thaw.
    fn thaw_in_its_place(&self, status: ExitStatus) -> Result<()> {
        let place = self.mount_point.display();
        thaw_at(&self.mount_point)
            .with_context(|| format!("{place} stays frozen ({status}): run `fsfreeze --unfreeze {place}`"))
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if !self.ended
            && let Err(e) = self.end()
        {
            tracing::error!("{e:#}");
        }
    }
}

/// Thaws what an engine of this volume that was killed together with its freezer has left frozen.
pub(super) fn thaw_left_over(volume: &str) {
    let note = note(volume);
    let Ok(mount_point) = std::fs::read(&note) else { return };
    let mount_point =
        PathBuf::from(<std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(mount_point));
    match thaw_at(&mount_point) {
        Ok(()) => drop(std::fs::remove_file(&note)),
        Err(e) => tracing::error!("{} may be frozen: {e}", mount_point.display()),
    }
}

/// A file system that is not frozen, or not there any more, is thawed.
fn thaw_at(mount_point: &Path) -> io::Result<()> {
    let thawed = File::open(mount_point).and_then(|root| sys::thaw(&root));
    match thawed {
        Err(e)
            if e.raw_os_error() == Some(nix::errno::Errno::EINVAL as i32)
                || e.kind() == io::ErrorKind::NotFound =>
        {
            Ok(())
        }
        other => other,
    }
}

fn note(volume: &str) -> PathBuf {
    Path::new("/run/longhorn").join(format!("{volume}.frozen"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_frozen_is_thawed() {
        assert!(thaw_at(Path::new("/no/such/place")).is_ok());
    }
}
