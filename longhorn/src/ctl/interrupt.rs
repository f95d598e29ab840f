//! SIGINT, SIGTERM and SIGHUP while a command runs.
//!
//! A command that is interrupted takes its progress off the terminal, says what it leaves and what goes on without it, and ends
//! with the status that shells give for the signal: 130, 143, 129. Most have nothing to take back: a volume's processes are
//! its manager's, and what an engine was asked for it does to the end. Those that have something hold the signal up
//! ([`hold`]) and look for it themselves; a second signal, other than SIGHUP, ends them where they are.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::signal::unix::{self, SignalKind};

use super::args::{Command, DownArgs, ReplicaCommand, SnapshotCommand};
use super::output::exact_size;
use crate::{next_step, progress};

/// How often a command that holds the signal up looks for it.
const LOOK: Duration = Duration::from_millis(20);

/// The first signal that has come; 0: none.
static CAME: AtomicI32 = AtomicI32::new(0);

/// How many parts of the command hold it up.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// What is said at the end.
static LEFT: Mutex<String> = Mutex::new(String::new());

/// Hears signals from when it returns, on a thread of its own: the command's may be in a system call. Without it they end the
/// command as they end any other.
pub(super) fn listen() {
    let (hears, heard) = std::sync::mpsc::channel();
    let _ = std::thread::Builder::new().name("signals".into()).spawn(move || hear(hears));
    // Nobody sends anything: it is dropped.
    let _ = heard.recv();
}

/// `hears` is dropped once signals are heard, or cannot be.
fn hear(hears: Sender<()>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        let ignored = ignored(&fs::read_to_string("/proc/self/status").unwrap_or_default());
        let stream = |signal: Signal| {
            // In the background of a script SIGINT is ignored, under nohup SIGHUP, and stays so.
            let is_ignored = ignored >> (signal as i32 - 1) & 1 == 1;
            (!is_ignored).then(|| unix::signal(SignalKind::from_raw(signal as i32))).transpose()
        };
        let (mut interrupt, mut terminate) = (stream(Signal::SIGINT)?, stream(Signal::SIGTERM)?);
        // Of a terminal that was closed, or a connection that broke.
        let mut hang_up = stream(Signal::SIGHUP)?;
        drop(hears);
        loop {
            tokio::select! {
                () = next(&mut interrupt) => take(Signal::SIGINT),
                () = next(&mut terminate) => take(Signal::SIGTERM),
                () = next(&mut hang_up) => take(Signal::SIGHUP),
            }
        }
    })
}

async fn next(stream: &mut Option<unix::Signal>) {
    match stream {
        Some(stream) => drop(stream.recv().await),
        None => std::future::pending().await,
    }
}

/// The signals that whoever started this process has it ignore, one bit each (`proc_pid_status(5)`).
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

fn take(signal: Signal) {
    // Of one terminal that was closed the shell and the kernel tell, one right after the other.
    if signal == Signal::SIGHUP && CAME.load(Ordering::SeqCst) != 0 {
        return;
    }
    let is_first = CAME.swap(signal as i32, Ordering::SeqCst) == 0;
    if !is_first || HELD.load(Ordering::SeqCst) == 0 {
        end();
    }
}

/// Ends the process by the signal that has come.
fn end() -> ! {
    let had_progress = progress::clear();
    // The terminal has put ^C behind whatever stood there.
    let from_new_line = if had_progress || !io::stderr().is_terminal() { "" } else { "\n" };
    let left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
    let said = match left.as_str() {
        "" => from_new_line.to_owned(),
        left => format!("{from_new_line}interrupted: {left}\n"),
    };
    let _ = io::stderr().write_all(next_step::complete(&said).as_bytes());
    std::process::exit(128 + CAME.load(Ordering::SeqCst))
}

/// The exit status of a command that a signal was held up for, and that came to its own end meanwhile.
pub(super) fn status() -> Option<u8> {
    let signal = CAME.load(Ordering::SeqCst);
    (signal != 0).then(|| u8::try_from(128 + signal).unwrap_or(u8::MAX))
}

/// From now on this is what is left by a signal.
pub(super) fn leaves(text: impl Into<String>) {
    *LEFT.lock().unwrap_or_else(PoisonError::into_inner) = text.into();
}

/// Holds the first signal up until [`Held::let_go`], or until it is dropped where the command fails anyhow.
#[must_use]
pub(super) fn hold() -> Held {
    HELD.fetch_add(1, Ordering::SeqCst);
    Held(())
}

/// Waits until a signal has come that is held up; for ever where none is.
pub(super) async fn wait(held: Option<&Held>) {
    match held {
        Some(held) => held.wait().await,
        None => std::future::pending().await,
    }
}

/// See [`hold`].
pub(super) struct Held(());

impl Held {
    /// Waits until a signal has come.
    pub(super) async fn wait(&self) {
        while !self.has_come() {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// True if a signal has come.
    pub(super) fn has_come(&self) -> bool {
        CAME.load(Ordering::SeqCst) != 0
    }

    /// What had to be done is done: the command ends here if a signal has come, and at the next one.
    pub(super) fn let_go(self) {
        // Before it is looked at: one that comes now ends the command itself, and nobody else would.
        drop(self);
        if CAME.load(Ordering::SeqCst) != 0 {
            end();
        }
    }

    /// Ends the command, which has taken back what it can.
    pub(super) fn end(&self) -> ! {
        end()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        HELD.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What a command leaves wherever it is interrupted; empty for those that only look.
pub(super) fn left_by(command: &Command) -> String {
    match command {
        Command::Up(up) => match &up.volume {
            Some(volume) => format!(
                "what was started of volume {volume} goes on: `longhornctl status {volume}` says how far it is, `longhornctl \
                 down {volume}` stops it"
            ),
            None => "what was started goes on: `longhornctl ls` says what is up, `longhornctl up --all` starts the rest"
                .to_owned(),
        },
        Command::Down(down) => left_by_down(down),
        Command::Resize { volume, size } => format!(
            "volume {volume} may grow all the same: `longhornctl resize {volume} {}` waits for that",
            written_size(*size)
        ),
        Command::Upgrade(upgrade) => format!("volume {} has the engine that it had", upgrade.volume),
        Command::Clone { new, .. } => format!("there is no volume {new}"),
        Command::Salvage(salvage) => format!("nothing of volume {} is changed", salvage.volume),
        Command::Release(release) => match &release.volume {
            Some(volume) => format!(
                "`longhornctl release {volume}` goes on with it; until then the directories may not be Longhorn's"
            ),
            None => "the same command goes on with it; until then the directories may not be Longhorn's".to_owned(),
        },
        Command::Rm { .. } => "nothing was deleted".to_owned(),
        Command::Import { .. } => "the directories are as they were".to_owned(),
        Command::Snapshot { command } => left_by_snapshot(command),
        Command::Replica { command } => match command {
            ReplicaCommand::Add { volume, .. } | ReplicaCommand::Rebuild { volume, .. } => format!(
                "what the engine was asked for goes on: `longhornctl status {volume} --watch` says how far it is"
            ),
            ReplicaCommand::Rm { volume, replica } => {
                format!("`longhornctl replica rm {volume} {replica}` ends what was begun")
            }
            ReplicaCommand::Export(export) => format!("{} is as it was", export.file.display()),
            ReplicaCommand::Ls { .. } => String::new(),
        },
        Command::Scrub(scrub) if !scrub.status && !scrub.cancel => {
            let volume = &scrub.volume;
            format!(
                "a scrub that was begun goes on: `longhornctl scrub {volume} --status` says how far it is, `longhornctl scrub {volume} \
                 --cancel` ends it"
            )
        }
        Command::Trim { .. } => "what was given back already is".to_owned(),
        Command::Export { .. } => "the file is as it was".to_owned(),
        _ => String::new(),
    }
}

/// Of `down`, whatever it has come to.
pub(super) fn left_by_down(down: &DownArgs) -> String {
    let for_now = if down.for_now { " --for-now" } else { "" };
    match &down.volume {
        Some(volume) => format!(
            "volume {volume} was told to end and goes on to its end: `longhornctl down {volume}{for_now}` waits for it"
        ),
        None => format!(
            "what was told to end goes on to its end, the rest stays up: `longhornctl down --all{for_now}` ends that, too"
        ),
    }
}

/// A size as the command line takes it, in one word.
pub(super) fn written_size(size: u64) -> String {
    exact_size(size).replace(' ', "")
}

fn left_by_snapshot(command: &SnapshotCommand) -> String {
    match command {
        SnapshotCommand::Create { volume, .. }
        | SnapshotCommand::Rm { volume, .. }
        | SnapshotCommand::Revert { volume, .. } => format!(
            "what the engine was asked for it may do all the same: `longhornctl snapshot ls {volume}` says whether it did"
        ),
        SnapshotCommand::Purge { volume } => {
            format!("folding goes on: `longhornctl snapshot purge {volume}` waits for its end")
        }
        SnapshotCommand::Export { file, .. } => format!("{} is as it was", file.display()),
        SnapshotCommand::Ls { .. } | SnapshotCommand::Tree { .. } | SnapshotCommand::Diff { .. } => {
            String::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_told_as_it_can_be_given_again() {
        for size in [4096, 272 << 20, 1 << 40, (1 << 30) + 4096, (3 << 30) / 2] {
            assert_eq!(lh_block::parse_size(&written_size(size)), Ok(size));
        }
        assert_eq!(written_size(272 << 20), "272MiB");
    }

    #[test]
    fn what_the_background_ignores_is_seen() {
        let status =
            "Name:\tx\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001002\nSigCgt:\t0000000000004000\n";
        let ignored = ignored(status);
        let is_in = |signal: Signal| ignored >> (signal as i32 - 1) & 1 == 1;
        assert!(is_in(Signal::SIGINT) && is_in(Signal::SIGPIPE) && !is_in(Signal::SIGTERM));
    }
}
