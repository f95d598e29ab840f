//! `longhorn`: the processes. Command lines follow Longhorn's where it has the same thing.
//!
//! A process that fails says why in its last line, which begins with `error:`; its exit status tells its manager
//! whether starting it again can help.

mod as_longhorn;
mod clock;
mod cluster;
mod controller;
mod csi;
mod engine_line;
pub(crate) mod failed_disk;
mod freeze;
mod front;
mod journal;
mod keeper;
mod logging;
mod manager;
mod memory;
mod replica;
mod sfold;
mod size;
mod ssync;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use control::host::{RecordError, read_key};
use control::manager::{EXIT_GIVES_UP, LAUNCH_NAME, is_launched, run_launched};
use lh_ring::sys::is_shortage;
use tokio::signal::unix::{SignalKind, signal};

pub use as_longhorn::{ControllerFlags, ReplicaFlags};
pub use controller::ControllerArgs;
pub(crate) use front::can_be_had;
pub use replica::ReplicaArgs;
pub(crate) use replica::{keep_from_others, layer};

use crate::arguments::{DEFAULT_ROOT, ROOT_VARIABLE, end, parse, root_path};
use crate::sentence::sentence;
use crate::tell::tell;
use crate::{limits, signals};

/// A failure that another start would meet again. Its text is the sentence for people.
#[derive(Debug)]
pub(crate) struct GivesUp(pub(crate) String);

impl std::fmt::Display for GivesUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for GivesUp {}

impl GivesUp {
    /// The failure that the system has answered with: for good, unless it has only been short of something. Whoever has the device of
    /// an engine open that is not started again waits for ever.
    pub(crate) fn unless_short(text: String, source: &std::io::Error) -> anyhow::Error {
        if is_shortage(source) { anyhow::Error::msg(text) } else { Self(text).into() }
    }
}

/// A volume's key, for its engine and its replicas.
fn key_of(path: &Path) -> anyhow::Result<[u8; 32]> {
    read_key(path).map_err(|e| match &e {
        RecordError::Io { source, .. } => GivesUp::unless_short(e.to_string(), source),
        _ => GivesUp(e.to_string()).into(),
    })
}

/// The processes of Longhorn volumes.
#[derive(Debug, Parser)]
#[command(name = "longhorn", version, max_term_width = 100, after_help = AFTER_HELP)]
pub struct Program {
    /// Log more
    #[arg(long, global = true)]
    debug: bool,
    #[command(flatten)]
    target: engine_line::Target,
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
These are the processes behind a volume, and Longhorn's command line of an
engine. To work with volumes, use longhornctl:

  longhornctl up demo --size 1GiB

LONGHORN_LOG says what is logged: a level (error, warn, info, debug, trace), or
levels of parts, as in warn,replica=trace. Without it: info, and with --debug:
debug. Without either the cluster's setting log-level counts.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Start, watch and restart the processes of one root
    InstanceManager(ManagerArgs),
    /// Run the control plane of a Kubernetes node
    Manager(cluster::ClusterArgs),
    /// Run the CSI driver of a Kubernetes node
    Csi(csi::CsiArgs),
    /// Run a volume's engine
    Controller(ControllerArgs),
    /// Serve a replica's directory
    Replica(ReplicaArgs),
    /// Fold a layer's file into the one below it, by hand
    Sfold(sfold::SfoldArgs),
    /// Copy a sparse file to another place by what it holds, by hand
    Ssync(ssync::SsyncArgs),
    /// Hold a volume's FUSE connection while its engine is away
    #[command(hide = true)]
    FuseKeeper(keeper::KeeperArgs),
    /// Take away the device that a volume has left here, which is elsewhere since, or gone
    #[command(hide = true)]
    EndStay(controller::EndStayArgs),
    /// Freeze a file system while an engine takes a snapshot
    #[command(hide = true)]
    FsFreeze(freeze::FreezeArgs),
    #[command(flatten)]
    Engine(engine_line::EngineCommand),
}

/// Arguments of the instance manager.
#[derive(Debug, clap::Args)]
#[command(after_help = MANAGER_HELP)]
pub struct ManagerArgs {
    /// Where volumes, logs and sockets lie
    #[arg(long, env = ROOT_VARIABLE, default_value = DEFAULT_ROOT, value_parser = root_path(), value_name = "DIR")]
    root: PathBuf,
    /// Listen on TCP, too, for example on 127.0.0.1:8500
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<std::net::SocketAddr>,
    /// On TCP obey whoever has a certificate of ca.crt; tls.crt and tls.key are the own ones [default: /tls-files, if there]
    #[arg(long, value_name = "DIR", requires = "listen", conflicts_with = "insecure")]
    tls_dir: Option<PathBuf>,
    /// Obey whoever reaches the TCP address
    #[arg(long)]
    insecure: bool,
    /// End the instance manager that there is, and go on in its place
    #[arg(long)]
    take_over: bool,
    /// Leave the session of whoever started it
    #[arg(long, hide = true)]
    own_session: bool,
}

const MANAGER_HELP: &str = "\
There is one instance manager per root; `longhornctl up` starts it where there
is none. It listens on DIR/run/instance-manager.sock. Its end changes nothing
for running volumes: the next one takes them over.";

/// Runs the program that the command line asks for.
pub fn main() -> ExitCode {
    signals::unblock();
    limits::lift_file_length();
    let mut args = std::env::args_os();
    if args.next().is_some_and(|name| name == LAUNCH_NAME) {
        let e = run_launched(args);
        tell!("error: the program cannot be started: {e}");
        return ExitCode::FAILURE;
    }
    let program = parse::<Program>().unwrap_or_else(|e| end(&e));
    let logging = logging::start(program.debug);
    let result = run(program);
    drop(logging);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tell!("error: {}", sentence(&e));
            let gives_up = e.downcast_ref::<GivesUp>().is_some();
            ExitCode::from(if gives_up { u8::try_from(EXIT_GIVES_UP).unwrap_or(1) } else { 1 })
        }
    }
}

/// Whoever reaches an instance manager's port has it run this program, as root: the processes of volumes, and nothing with which
/// another file of the host could be written.
fn run(program: Program) -> anyhow::Result<()> {
    let is_instance =
        matches!(program.command, Command::Controller(_) | Command::Replica(_) | Command::EndStay(_));
    if is_launched() && !is_instance {
        let why =
            "an instance manager runs `controller` and `replica` of this program; the others are for a shell";
        return Err(GivesUp(why.to_owned()).into());
    }
    match program.command {
        Command::InstanceManager(args) => manager::run(args),
        Command::Manager(args) => cluster::run(args),
        Command::Csi(args) => csi::run(args),
        Command::Controller(args) => controller::run(&args.of(&program.target)),
        Command::Replica(args) => replica::run(args.of(&program.target)),
        Command::EndStay(args) => controller::end_stay(&args),
        Command::Sfold(args) => sfold::run(&args),
        Command::Ssync(args) => ssync::run(&args),
        Command::FuseKeeper(args) => keeper::run(args),
        Command::FsFreeze(args) => freeze::run(&args),
        Command::Engine(command) => engine_line::run(&program.target, command),
    }
}

/// Ends when the process is asked to end, by SIGTERM or SIGINT; both are caught from the call on, which needs a runtime.
///
/// # Errors
/// The system's.
fn asked_to_end() -> std::io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Program::command().debug_assert();
    }
}
