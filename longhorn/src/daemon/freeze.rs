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
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use control::host::RUN;
use lh_cluster::agent::PATIENCE;
use lh_ring::sys;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::mounts::{kind_mounted_anywhere, mount_of};

/// How long a file system may be frozen: programs that write wait so long at most. A snapshot takes milliseconds, but
/// may wait for one before it.
const LIMIT: Duration = Duration::from_secs(6);

/// How long it may take to come to rest: what is dirty is written, and then what was being written when it was frozen.
const REST: Duration = Duration::from_secs(8);

/// How long the thaw may take before it is told that it hangs.
const THAW: Duration = Duration::from_secs(2);

/// How long somebody waits whose snapshot comes while the file system is frozen for another one.
const TURN: Duration = Duration::from_secs(1);

/// Whoever asks a node waits no longer than that, and would hear nothing of what went wrong: the rest is for the snapshot itself.
const _: () =
    assert!((TURN.as_secs() + REST.as_secs() + LIMIT.as_secs() + THAW.as_secs()) + 2 < PATIENCE.as_secs());

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

/// Whether an engine's file system is being frozen, or thawed: one freezes it at a time, and notes that it did.
#[derive(Debug, Default)]
pub(super) struct Freezing(AtomicBool);

/// The right to freeze the file system of an engine, until the last one who has it lets go of it.
#[derive(Debug)]
pub(super) struct Turn(Arc<Freezing>);

impl Freezing {
    /// Waits for [`TURN`] at most: whoever is not heard by then is refused, and nobody waits in a line whose first one may hang for hours.
    ///
    /// # Errors
    /// Another one has it still, or its freezer has not ended.
    pub(super) fn turn(self: &Arc<Self>) -> Result<Arc<Turn>> {
        let deadline = Instant::now() + TURN;
        loop {
            if !self.0.swap(true, Ordering::AcqRel) {
                return Ok(Arc::new(Turn(Arc::clone(self))));
            }
            if Instant::now() > deadline {
                bail!(
                    "an earlier attempt has not ended: its device does not answer, it has much to write, or the engine waits for its \
                     replicas; try again later"
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Release);
    }
}

/// A frozen file system. Dropped, it thaws.
#[derive(Debug)]
pub(super) struct Frozen {
    /// `None`: it has ended, or somebody waits for it.
    child: Option<Child>,
    place: Place,
}

/// What is frozen, by whom.
#[derive(Clone, Debug)]
struct Place {
    mount_point: PathBuf,
    note: PathBuf,
    _turn: Arc<Turn>,
}

impl Frozen {
    /// Freezes the file system that is mounted from a volume's device, in [`REST`]. `None`: none is.
    ///
    /// # Errors
    /// It cannot be frozen: it is frozen already, of a kind that does not freeze, does not come to rest in time, or is mounted
    /// where this process does not see it.
    pub(super) fn of_device(volume: &str, device: &Path, turn: Arc<Turn>) -> Result<Option<Self>> {
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
        let mut command = Command::new(program);
        command.args(["fs-freeze", "--limit", &LIMIT.as_millis().to_string()]).arg(&mount_point);
        Self::by(command, Place { mount_point, note, _turn: turn }, REST).map(Some)
    }

    /// Has this command freeze it, in that time.
    fn by(mut command: Command, place: Place, rest: Duration) -> Result<Self> {
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("a process that freezes")?;
        let mut frozen = Self { child: Some(child), place };
        frozen.wait_until_frozen(rest)?;
        Ok(frozen)
    }

    fn wait_until_frozen(&mut self, rest: Duration) -> Result<()> {
        let child = self.child.as_mut().context("the freezer has ended")?;
        let stdout = child.stdout.take().context("the freezer has no output")?;
        let ready = {
            let timeout = PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX);
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
        if !ready {
            // It freezes nothing any more, or thaws as soon as the kernel lets it: its pipe is closed.
            self.leave();
            bail!(
                "{} does not come to rest within {} s: it has much to write, which goes on, or its device does not answer; try again later",
                self.place.mount_point.display(),
                rest.as_secs()
            );
        }
        let mut reason = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            let _ = io::Read::read_to_string(&mut stderr, &mut reason);
        }
        bail!("{}", reason.trim().strip_prefix("error: ").unwrap_or("the freezer ended without a word"));
    }

    /// Thaws, in [`THAW`]. `false`: it thawed earlier, because the time was over or its process was killed.
    ///
    /// # Errors
    /// It could not be thawed, or is not yet.
    pub(super) fn thaw(mut self) -> Result<bool> {
        self.end()
    }

    fn end(&mut self) -> Result<bool> {
        let Some(child) = self.child.as_mut() else { return Ok(false) };
        drop(child.stdin.take());
        let deadline = Instant::now() + THAW;
        loop {
            match child.try_wait()? {
                Some(status) => {
                    self.child = None;
                    return self.place.after(status);
                }
                // It hangs in the kernel, which waits for the device; it thaws when that answers.
                None if Instant::now() > deadline => {
                    self.leave();
                    bail!(
                        "{} is not thawed yet: its device does not answer",
                        self.place.mount_point.display()
                    );
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Lets the freezer end when it can, which a thread waits for: it must not stay as a zombie, nor may another one freeze meanwhile.
    fn leave(&mut self) {
        const STACK: usize = 64 << 10;
        let Some(mut child) = self.child.take() else { return };
        drop(child.stdin.take());
        let place = self.place.clone();
        let waiting = std::thread::Builder::new().name("freezer".into()).stack_size(STACK);
        let waits = waiting.spawn(move || {
            let ended = child.wait().map_err(anyhow::Error::from).and_then(|status| place.after(status));
            if let Err(e) = ended {
                tracing::error!("{e:#}");
            }
        });
        if let Err(e) = waits {
            tracing::error!("the freezer will not be waited for: {e}");
        }
    }
}

impl Place {
    /// The freezer has ended. True: it had frozen it until it was asked to thaw.
    fn after(&self, status: ExitStatus) -> Result<bool> {
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
        if let Err(e) = self.end() {
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
    Path::new(RUN).join(format!("{volume}.frozen"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_frozen_is_thawed() {
        assert!(thaw_at(Path::new("/no/such/place")).is_ok());
    }
    /// Seen: whoever asked for the snapshot had gone by then, each further attempt waited behind this one, and froze when it was over.
    #[test]
    fn a_freezer_that_hangs_is_not_waited_for_and_keeps_others_away_until_it_ends_and_is_reaped() {
        let scratch = tempfile::tempdir().unwrap();
        let (pid, note) = (scratch.path().join("pid"), scratch.path().join("note"));
        std::fs::write(&note, "/mnt").unwrap();
        let freezing = Arc::new(Freezing::default());
        let place = || Place {
            mount_point: scratch.path().to_owned(),
            note: note.clone(),
            _turn: freezing.turn().unwrap(),
        };
        // As one that writes for long what was dirty, and freezes nothing since nobody waits for it by then.
        let mut hangs = Command::new("sh");
        hangs.args(["-c", "echo $$ > $0; sleep 3; exit 4"]).arg(&pid);
        let begun = Instant::now();
        let refused = Frozen::by(hangs, place(), Duration::from_millis(300)).unwrap_err().to_string();
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        assert!(
            refused.contains("does not come to rest within 0 s") && refused.contains("try again"),
            "{refused}"
        );
        let refused = freezing.turn().unwrap_err().to_string();
        assert!(refused.contains("has not ended"), "{refused}");
        let process = format!("/proc/{}", std::fs::read_to_string(&pid).unwrap().trim());
        assert!(Path::new(&process).exists());
        let deadline = Instant::now() + Duration::from_secs(20);
        let turn = loop {
            match freezing.turn() {
                Ok(turn) => break turn,
                Err(e) => assert!(Instant::now() < deadline, "{e}"),
            }
        };
        assert!(!Path::new(&process).exists(), "it is a zombie");
        assert!(!note.exists());
        drop(turn);
        // What freezes is thawed by the end of its pipe.
        let mut freezes = Command::new("sh");
        freezes.args(["-c", "echo frozen; cat"]);
        assert!(Frozen::by(freezes, place(), Duration::from_secs(10)).unwrap().thaw().unwrap());
        assert!(freezing.turn().is_ok());
    }
}
