//! Starting a process in a session of its own, never one whose number was not written down first.
//!
//! The manager starts this program under the name [`LAUNCH_NAME`]; that process leaves the manager's session and waits
//! for a byte on its standard input. The manager writes the process's number down, durably, then sends the byte, and the
//! process becomes the program that was asked for, under the same number. If the manager dies in between, standard input
//! ends and the process with it: no manager ever has to guess what an earlier one had started.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use super::ready;
use crate::logging::{self, Level};

/// The name (`argv[0]`) under which the program behaves as [`run_launched`] says. A client of the manager cannot choose
/// it: what it chooses comes behind it.
pub const LAUNCH_NAME: &str = "longhorn-launch";

/// The variable that tells a program that a manager has started it: the number of its process, so that it says nothing to what the
/// program starts itself.
const LAUNCHED: &str = "LONGHORN_LAUNCHED";

/// True if a manager has started this process, at the wish of whoever reaches the manager's port.
#[must_use]
pub fn is_launched() -> bool {
    std::env::var(LAUNCHED).is_ok_and(|pid| pid == std::process::id().to_string())
}

/// Opens the way for a launched process.
#[derive(Debug)]
pub(super) struct Gate(ChildStdin);

impl Gate {
    /// Lets the process become the program.
    pub(super) fn open(mut self) -> io::Result<()> {
        self.0.write_all(b"!")
    }
}

/// Starts a process that becomes `program` once the gate is opened. `launcher` is this program's path, `level` what it is to
/// log from its beginning. Both standard output and standard error go to `log`.
pub(super) fn launch(
    launcher: &Path,
    program: &Path,
    args: &[String],
    level: Option<Level>,
    log: &File,
) -> io::Result<(Child, Gate)> {
    let mut child = Command::new(launcher)
        .arg0(LAUNCH_NAME)
        .envs(level.map(|level| (logging::BEGINS_AT, logging::word(level))))
        .arg(program)
        .args(args)
        .current_dir("/")
        // That the manager is ready is for it alone to say.
        .env_remove(ready::SOCKET)
        .stdin(Stdio::piped())
        .stdout(log.try_clone()?)
        .stderr(log.try_clone()?)
        .spawn()?;
    match child.stdin.take() {
        Some(stdin) => Ok((child, Gate(stdin))),
        None => Err(io::Error::other("no standard input")),
    }
}

/// What this program does when it is started under [`LAUNCH_NAME`]: waits at the gate, then becomes the program named by
/// the first argument. Returns only if it cannot.
///
/// # Errors
/// Why the program cannot be executed, or that the manager is gone.
pub fn run_launched(args: impl IntoIterator<Item = std::ffi::OsString>) -> io::Error {
    let mut args = args.into_iter();
    let Some(program) = args.next().map(PathBuf::from) else {
        return io::Error::new(io::ErrorKind::InvalidInput, "no program to start");
    };
    // Out of the manager's session, so that no signal to a terminal's processes comes here.
    if let Err(e) = nix::unistd::setsid() {
        return e.into();
    }
    let mut byte = [0];
    match io::stdin().read(&mut byte) {
        Ok(1) => {
            let pid = std::process::id().to_string();
            Command::new(program).args(args).env(LAUNCHED, pid).stdin(Stdio::null()).exec()
        }
        Ok(_) => io::Error::other("the instance manager ended before the start was complete"),
        Err(e) => e,
    }
}
