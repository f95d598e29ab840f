//! One process's life, a task per process: started, watched, started again when it dies, ended when nobody wants it.
//!
//! ```text
//! Starting --> Running --> Starting (died)
//!    |            |------> Stopped (exit status 0), Error (gave up)
//!    '------------'---------'----> Stopping --> forgotten
//! ```
//!
//! In any state but the last a process may be replaced: it is ended if it runs, and starts anew as another program.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::sync::{broadcast, watch};

use super::deposits::Deposits;
use super::identity::Watched;
use super::launch::{Gate, launch};
use super::levels::Levels;
use super::lock::ManagerLock;
use super::log::{self, LastWords, WAS_ENDED};
use super::policy::{BackOff, EXIT_USAGE, Exit, Next, arguments_of_replacement, arguments_of_restart};
use super::program::Programs;
use super::state::{ProcessRecord, State};
use super::wish::{Replacement, Wish, Wishes};
use crate::host::Root;
use crate::proto::imrpc::ProcessResponse;

/// How long a process that was asked to end may take before it is killed: an engine flushes everything and closes its
/// replicas.
pub const STOP_PATIENCE: Duration = Duration::from_secs(30);

/// What ends a process that is replaced: Longhorn's signal for an engine that must not take its device away.
const REPLACE_SIGNAL: Signal = Signal::HUP;

/// The same as clients have to name it in `ProcessReplace`.
pub const REPLACE_SIGNAL_NAME: &str = "SIGHUP";

/// What all supervisors of a manager share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) root: Root,
    /// No other manager has the root before nothing of this one is left that writes there.
    pub(super) _lock: Arc<ManagerLock>,
    pub(super) programs: Programs,
    /// Every change of every process.
    pub(super) changes: broadcast::Sender<ProcessResponse>,
    /// What each process leaves for its next start.
    pub(super) deposits: Deposits,
    /// At which level they log.
    pub(super) levels: Levels,
}

/// The task's state.
#[derive(Debug)]
pub(super) struct Supervisor {
    shared: Arc<Shared>,
    record: ProcessRecord,
    latest: watch::Sender<ProcessResponse>,
    wishes: Arc<Wishes>,
    back_off: BackOff,
    /// Waited before the next start.
    delay: Duration,
    /// The next start is not the first.
    again: bool,
}

impl Supervisor {
    /// The supervisor of a new process, or of one that an earlier manager left.
    pub(super) fn new(
        shared: Arc<Shared>,
        record: ProcessRecord,
        latest: watch::Sender<ProcessResponse>,
        wishes: Arc<Wishes>,
        again: bool,
    ) -> Self {
        Self { shared, record, latest, wishes, back_off: BackOff::default(), delay: Duration::ZERO, again }
    }

    /// Lives until the process is no more. `process` is the one that runs already.
    pub(super) async fn run(mut self, mut process: Option<Watched>) {
        // What an earlier manager had begun.
        if std::mem::take(&mut self.record.replacing)
            && let Some(mut before) = process.take()
        {
            self.make_room(Some(&mut before)).await;
        }
        loop {
            match (self.record.state, &mut process) {
                (State::Starting, Some(_)) => self.record.state = State::Running,
                (State::Starting, None) => process = self.starting().await,
                (State::Running, Some(running)) => {
                    if self.running(running).await {
                        process = None;
                    }
                }
                (State::Running, None) => self.ended(Exit::Unknown, Duration::ZERO, None).await,
                (State::Stopped | State::Error, _) => {
                    let wish = self.wishes.next().await;
                    self.follow(wish, None).await;
                }
                (State::Stopping, running) => return self.stopping(running.as_mut()).await,
            }
        }
    }

    /// Waits as long as it has to, then starts the process. `None`: it was not started; the state says what follows.
    async fn starting(&mut self) -> Option<Watched> {
        self.publish();
        tokio::select! {
            () = tokio::time::sleep(self.delay) => {}
            wish = self.wishes.next() => {
                self.follow(wish, None).await;
                return None;
            }
        }
        match self.start().await {
            Ok(process) => {
                self.publish();
                Some(process)
            }
            Err(e) => {
                self.ended(Exit::Unknown, Duration::ZERO, Some(e)).await;
                None
            }
        }
    }

    async fn start(&mut self) -> io::Result<Watched> {
        if std::mem::replace(&mut self.again, true) {
            self.record.args = arguments_of_restart(&self.record.args);
            self.record.restarts += 1;
        }
        self.record.process = None;
        self.persist().await?;
        let program = self.shared.programs.resolve(&self.record.binary).map_err(io::Error::other)?;
        let log_path = self.shared.root.log(&self.record.name);
        let log_file = log::open(&log_path)?;
        let level = self.shared.levels.said();
        let (child, gate) =
            launch(self.shared.programs.own(), &program, &self.record.args, level, &log_file)?;
        let process = Watched::child(child)?;
        match self.let_run(&process, gate).await {
            Ok(()) => Ok(process),
            Err(e) => {
                process.abandon();
                Err(e)
            }
        }
    }

    /// Opens the gate to a process that is recorded, so that a manager which finds it knows it.
    async fn let_run(&mut self, process: &Watched, gate: Gate) -> io::Result<()> {
        self.record.process = Some(process.id().clone());
        self.record.state = State::Running;
        self.record.error.clear();
        if let Err(e) = self.persist().await {
            self.record.state = State::Starting;
            return Err(e);
        }
        let (name, pid, restarts) = (&self.record.name, process.id().pid, self.record.restarts);
        log::note(
            &self.shared.root.log(name),
            &format!("{name} starts as process {pid}, restart {restarts}"),
        );
        gate.open()
    }

    /// Waits for the process's end, or for the wish that it ends. True: it has ended.
    async fn running(&mut self, process: &mut Watched) -> bool {
        let since = Instant::now();
        tokio::select! {
            exit = process.exited() => {
                self.ended(exit, since.elapsed(), None).await;
                true
            }
            wish = self.wishes.next() => self.follow(wish, Some(process)).await,
        }
    }

    /// Does what a client wants. True: the process that ran has ended.
    async fn follow(&mut self, wish: Wish, process: Option<&mut Watched>) -> bool {
        match wish {
            Wish::End => {
                self.record.state = State::Stopping;
                false
            }
            Wish::Replace(replacement) => {
                self.replace(replacement, process).await;
                true
            }
        }
    }

    /// Ends the process, if it runs, and has it start as another program. The next manager, if this one dies now, goes on with
    /// that.
    async fn replace(&mut self, replacement: Replacement, process: Option<&mut Watched>) {
        self.record.args = arguments_of_replacement(&self.record.args, &replacement.args);
        self.record.binary = replacement.binary;
        self.record.replacing = process.is_some();
        if let Err(e) = self.persist().await {
            tracing::error!(name = self.record.name, error = %e, "record cannot be written");
        }
        self.make_room(process).await;
    }

    /// Ends the process, if it runs, for the one that the record names already.
    async fn make_room(&mut self, process: Option<&mut Watched>) {
        if let Some(process) = process {
            let exit = self.end(process, REPLACE_SIGNAL).await;
            let name = &self.record.name;
            log::note(&self.shared.root.log(name), &format!("{name}{WAS_ENDED} for another program: {exit}"));
        }
        self.record.process = None;
        self.record.replacing = false;
        self.record.error.clear();
        self.record.state = State::Starting;
        self.delay = Duration::ZERO;
        self.back_off = BackOff::default();
        // Its arguments are those of a first start.
        self.again = false;
    }

    /// Decides what follows an end, or a start that failed.
    async fn ended(&mut self, exit: Exit, ran: Duration, failure: Option<io::Error>) {
        let log_path = self.shared.root.log(&self.record.name);
        let next = self.back_off.after(exit, ran);
        let words = log::last_words(&log_path, exit == Exit::Status(EXIT_USAGE));
        let reason = match (&failure, exit, words) {
            (Some(failure), ..) => failure.to_string(),
            // Only a program that ended by itself had the time to say why.
            (None, Exit::Status(_), Some(LastWords::Reason(reason))) => reason,
            (None, Exit::Status(_), Some(LastWords::Line(line))) => format!("{exit}: {line}"),
            (None, ..) => exit.to_string(),
        };
        log::note(&log_path, &format!("{}{}{reason}", self.record.name, log::ENDED));
        tracing::warn!(name = self.record.name, reason, ?next, "process ended");
        self.record.process = None;
        (self.record.state, self.record.error) = match next {
            Next::Restart(delay) => {
                self.delay = delay;
                (State::Starting, reason)
            }
            Next::Stopped => (State::Stopped, String::new()),
            Next::Failed => (State::Error, reason),
        };
        if !matches!(next, Next::Restart(_)) {
            // Nobody will answer there: clients are to be refused, not to wait.
            self.shared.deposits.forget(&self.record.name);
        }
        // A start writes the record anyway, and one that comes at once is not to wait for another write.
        if !matches!(next, Next::Restart(Duration::ZERO))
            && let Err(e) = self.persist().await
        {
            tracing::error!(name = self.record.name, error = %e, "record cannot be written");
        }
        self.publish();
    }

    /// Ends the process and forgets it.
    async fn stopping(&mut self, process: Option<&mut Watched>) {
        self.publish();
        if let Err(e) = self.persist().await {
            tracing::error!(name = self.record.name, error = %e, "record cannot be written");
        }
        if let Some(process) = process {
            let exit = self.end(process, Signal::TERM).await;
            let name = &self.record.name;
            log::note(&self.shared.root.log(name), &format!("{name}{WAS_ENDED}: {exit}"));
        }
        let (record, shared) = (self.record.clone(), self.shared.clone());
        let forget = move || {
            shared.root.remove_sockets(&record.name);
            record.remove(&shared.root)
        };
        if let Err(e) = blocking(forget).await {
            tracing::error!(name = self.record.name, error = %e, "record cannot be removed");
        }
        self.record.process = None;
    }

    /// Asks the process to end, then makes it.
    async fn end(&self, process: &mut Watched, first: Signal) -> Exit {
        // A stopped process hears nothing until it is continued.
        for signal in [first, Signal::CONT] {
            self.signal(process, signal);
        }
        if let Ok(exit) = tokio::time::timeout(STOP_PATIENCE, process.exited()).await {
            return exit;
        }
        self.signal(process, Signal::KILL);
        process.exited().await
    }

    fn signal(&self, process: &Watched, signal: Signal) {
        if let Err(e) = process.signal(signal) {
            tracing::error!(name = self.record.name, ?signal, error = %e, "process cannot be signalled");
        }
    }

    async fn persist(&self) -> io::Result<()> {
        let (record, shared) = (self.record.clone(), self.shared.clone());
        blocking(move || record.store(&shared.root)).await
    }

    fn publish(&self) {
        let response = self.record.response(false);
        self.latest.send_replace(response.clone());
        // Nobody watching is no failure.
        let _ = self.shared.changes.send(response);
    }
}

/// A call that syncs files, off the thread that watches everybody else.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    match tokio::task::spawn_blocking(call).await {
        Ok(result) => result,
        Err(e) => Err(io::Error::other(e)),
    }
}
