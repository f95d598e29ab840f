//! `longhornctl`: volumes for people. Results go to standard output, progress and errors to standard error; the exit
//! status is 0 if it was done, 1 if it failed, 2 if the command line was wrong, 130, 143 or 129 if it was interrupted.

mod activity;
mod adopt;
mod all;
mod args;
mod beneath;
mod clone;
mod complete;
mod damaged;
mod decree;
mod delete;
mod device;
mod diff;
mod doctor;
mod down;
mod engine;
mod erase;
mod first_counts;
mod grown;
mod host_path;
mod import;
mod install;
mod interrupt;
mod lock;
mod manager;
mod members;
mod moving;
mod observe;
mod only_replica;
mod output;
mod place;
mod purge;
mod release;
mod remove;
mod replica;
mod resize;
mod room;
mod salvage;
mod same_backing;
mod scrub;
mod show;
mod snapshot;
mod snapshot_tree;
mod snapshot_view;
mod start;
mod stop;
mod systemd;
mod trim;
mod up;
mod upgrade;
mod watch;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use control::host::Root;

pub use args::Program;
pub use observe::{ReplicaView, VolumeView};
pub use snapshot_view::SnapshotView;

use crate::arguments::{DEFAULT_ROOT, ROOT_VARIABLE, end, parse};
use crate::sentence::sentence;
use crate::tell::tell;
use crate::{limits, next_step, signals};
use args::{
    CheckCommand, Command, ExportCommand, ImageFormat, InstallCommand, Output, ReplicaCommand,
    SnapshotCommand, TrimCommand, UpCommand,
};
use down::How;
use engine::watched;
use snapshot::NewSnapshot;

/// What every command is given.
#[derive(Clone, Debug)]
struct Context {
    root: Root,
    output: Output,
}

/// Runs the command that the command line asks for.
pub fn main() -> ExitCode {
    signals::unblock();
    limits::lift_file_length();
    let program = parse::<Program>().unwrap_or_else(|e| match e.kind() {
        // With a root in the environment there is an argument, and clap shows no help by itself.
        ErrorKind::MissingSubcommand => show_help(&e),
        _ => end(&e),
    });
    match run(program) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tell!("error: {}", sentence(&e));
            interrupt::status().map_or(ExitCode::FAILURE, ExitCode::from)
        }
    }
}

/// Shows the help of the command whose subcommand is missing.
fn show_help(missing: &clap::Error) -> ! {
    let mut program = Program::command();
    program.build();
    let mut command = &program;
    if let Some(ContextValue::String(name)) = missing.get(ContextKind::InvalidSubcommand) {
        for word in name.split_whitespace().skip(1) {
            command = command.find_subcommand(word).unwrap_or(command);
        }
    }
    tell!("{}", command.clone().render_help());
    std::process::exit(missing.exit_code())
}

fn run(program: Program) -> Result<()> {
    if program.output == Output::Json
        && let Some(what) = without_json(&program.command)
    {
        let text = format!("{what}, whatever reads it: there is no JSON of it");
        Program::command().error(ErrorKind::ArgumentConflict, text).exit();
    }
    if let Command::Completion { shell } = program.command {
        return complete::script(shell);
    }
    if let Command::CompleteNames { words } = &program.command {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        return runtime.block_on(complete::names(words));
    }
    // Before the root is looked for: others may not even see it.
    if needs_root(&program.command) && !nix::unistd::geteuid().is_root() {
        bail!("volumes belong to root: run it again with sudo");
    }
    let root = match Root::at(&program.root) {
        Err(e) if needs_root(&program.command) => {
            return Err(e).with_context(|| program.root.display().to_string());
        }
        // These look at this host, and at what of the root can be seen.
        Err(_) => Root::unresolved(&program.root),
        Ok(root) => root,
    };
    next_step::are_for(root.path(), is_found_without(&root), Program::command);
    let context = Context { root, output: program.output };
    interrupt::leaves(interrupt::left_by(&program.command));
    interrupt::listen();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(dispatch(&context, program.command))
}

async fn dispatch(context: &Context, command: Command) -> Result<()> {
    match command {
        Command::Up(UpCommand { volume: None, .. }) => all::up(context).await,
        Command::Up(UpCommand { volume: Some(volume), options, .. }) => {
            up::run(context, &volume, options).await
        }
        Command::Down(args) => match &args.volume {
            None => all::down(context, How::of(&args)).await,
            Some(volume) => down::run(context, volume, &args).await,
        },
        Command::Ls => show::list(context).await,
        Command::Status { volume, watch: true } => watch::watch(context, &volume).await,
        Command::Status { volume, watch: false } => show::status(context, &volume).await,
        Command::Resize { volume, size } => resize::run(context, &volume, size).await,
        Command::Upgrade(args) => upgrade::run(context, &args).await,
        Command::Clone { source, new } => watched(&context.root, clone::run(context, &source, &new)).await,
        Command::Salvage(args) => salvage::run(context, args).await,
        Command::Release(args) => release::run(context, &args),
        Command::Rm { volume, yes } => remove::run(context, &volume, yes),
        Command::Import { volume, directories, quorum, block_size } => {
            let mut record = control::host::VolumeRecord::new(&volume, 0);
            record.quorum = quorum.unwrap_or(record.quorum);
            record.block_size = block_size.unwrap_or(record.block_size);
            import::run(context, record, &directories).await
        }
        Command::Snapshot { command } => match command {
            SnapshotCommand::Create { volume, name, labels, freeze } => {
                snapshot::create(context, &volume, NewSnapshot { name, labels, freeze }).await
            }
            SnapshotCommand::Ls { volume } => snapshot::list(context, &volume).await,
            SnapshotCommand::Tree { volume } => snapshot::tree(context, &volume).await,
            SnapshotCommand::Rm { volume, name } => snapshot::remove(context, &volume, &name).await,
            SnapshotCommand::Purge { volume } => purge::run(context, &volume).await,
            SnapshotCommand::Revert { volume, name } => snapshot::revert(context, &volume, &name).await,
            SnapshotCommand::Diff { volume, names } => {
                let (to, from) = (names.last().map_or("", String::as_str), names.len() > 1);
                diff::run(context, &volume, from.then(|| names[0].as_str()), to).await
            }
            SnapshotCommand::Export { format, volume, name, file } => {
                let format = ImageFormat::of_file(format, &file);
                snapshot::export(context, &volume, &name, format, &file).await
            }
        },
        Command::Replica { command } => match command {
            ReplicaCommand::Ls { volume } => replica::list(context, &volume).await,
            ReplicaCommand::Add { volume, dir } => {
                watched(&context.root, members::add(context, &volume, dir)).await
            }
            ReplicaCommand::Rm { volume, replica } => {
                watched(&context.root, members::remove(context, &volume, &replica)).await
            }
            ReplicaCommand::Rebuild { volume, replica } => {
                watched(&context.root, members::rebuild(context, &volume, &replica)).await
            }
            ReplicaCommand::Export(args) => replica::export(context, &args),
        },
        Command::Export { command: ExportCommand::Replica(args) } => replica::export(context, &args),
        Command::Trim { command: TrimCommand::Volume { volume, name } } => {
            trim::run(context, &volume.or(name).unwrap_or_default()).await
        }
        Command::Scrub(args) => watched(&context.root, scrub::run(context, &args)).await,
        Command::Doctor | Command::Check { command: CheckCommand::Preflight } => doctor::run(context),
        Command::Check { command: CheckCommand::Move { resources } } => moving::check(context, &resources),
        Command::Install { command: InstallCommand::Manifests(args) } => install::manifests(&args),
        Command::Install { command: InstallCommand::Systemd(args) } => systemd::install(&context.root, &args),
        Command::DeviceName { numbers } => device::print_name(&numbers),
        Command::Completion { .. } | Command::CompleteNames { .. } => Ok(()),
    }
}

/// What a command prints that has one form only.
const fn without_json(command: &Command) -> Option<&'static str> {
    match command {
        Command::Install { command: InstallCommand::Manifests(_) } => Some("`install manifests` prints YAML"),
        Command::Install { command: InstallCommand::Systemd(_) } => Some("`install systemd` prints files"),
        Command::Completion { .. } => Some("`completion` prints a shell's script"),
        _ => None,
    }
}

/// True if a command that names no root has this one. `LONGHORN_ROOT` may be there for this command alone, and counts as none.
fn is_found_without(root: &Root) -> bool {
    let is_usual = Root::at(Path::new(DEFAULT_ROOT)).is_ok_and(|usual| usual == *root);
    is_usual && std::env::var_os(ROOT_VARIABLE).is_none()
}

const fn needs_root(command: &Command) -> bool {
    !matches!(
        command,
        Command::Doctor
            | Command::Check { .. }
            | Command::Install { .. }
            | Command::DeviceName { .. }
            | Command::Completion { .. }
            | Command::CompleteNames { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Program::command().debug_assert();
    }
}
