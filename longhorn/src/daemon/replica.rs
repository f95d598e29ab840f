//! `longhorn replica`: one replica's directory, served to its engine.

use std::fs::File;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use control::chain::Layer;
use control::front::Front;
use control::host::{MapKey, SNAPSHOT_COUNT, control_socket_beside, make_socket_directory, unfinished_copy};
use control::manager::is_launched;
use control::replica::{FoldProgress, HashStatus, ReplicaControl, ReplicaStatus};
use lh_block::{Address, SNAPSHOTS_MAX};
use lh_wire::LayerInfo;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use replica::serve::{HashOutcome, Mode, Options, ServeError, Status, run as serve};
use replica::store::{CloneOptions, Damage, OpenError, Pace, SnapshotView, clone_snapshot, survey};
use tokio::signal::unix::{SignalKind, signal};

use super::as_longhorn::{self, ReplicaFlags, wrong};
use super::engine_line::Target;
use super::size::{size, size_or_none};
use super::{GivesUp, key_of};
use super::{failed_disk, front};
use crate::arguments::{Realtime, control_address, process_name, snapshot_name, volume_name};

/// How long the process before this one may take to let go of the directory: a write that a killed process left in
/// the kernel was seen to take 3 s.
const LOCK_WAIT: Duration = Duration::from_secs(60);

/// How often a starting replica is asked whether it listens.
const STARTING: Duration = Duration::from_millis(5);

/// What is logged of data that is sent over TCP, which `--insecure` allows.
pub(super) const DATA_OPEN: &str = "insecure: data is not encrypted, and whoever is on the network between sees and may change the volume's bytes";

/// Arguments of a replica.
#[derive(Debug, clap::Args, PartialEq, Eq)]
#[command(after_help = as_longhorn::HELP)]
pub struct ReplicaArgs {
    /// Where the replica's files are
    pub directory: PathBuf,
    /// Create the directory with a volume of this size in bytes if it is missing or empty
    #[arg(long, value_parser = size)]
    pub size: Option<u64>,
    /// Copy this directory of another replica, which may be in use, if the own one is missing
    #[arg(long, value_name = "DIRECTORY", requires = "clone_snapshot", conflicts_with = "size")]
    pub clone_from: Option<PathBuf>,
    /// The snapshot of the other replica that is copied
    #[arg(long, value_parser = snapshot_name, value_name = "NAME", requires = "clone_from")]
    pub clone_snapshot: Option<String>,
    /// Name of the volume; may be given before `replica`, too
    #[arg(long, value_parser = volume_name, value_name = "NAME")]
    pub volume_name: Option<String>,
    /// Name of the replica
    #[arg(long, value_parser = process_name, value_name = "NAME")]
    pub replica_instance_name: String,
    /// Where to listen for control (gRPC): unix:PATH, or on TCP ADDRESS:PORT, with --tls-dir or --insecure
    #[arg(long, value_parser = control_address, value_name = "ADDRESS")]
    pub listen: Address,
    /// On TCP obey whoever has a certificate of ca.crt; tls.crt and tls.key are the own ones [default: /tls-files, if there]
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Where to listen for the engine: unix:PATH or tcp:ADDRESS:PORT
    #[arg(long, value_name = "ADDRESS")]
    pub data_listen: Address,
    /// Listen on TCP without encryption; with --listen on TCP and no --tls-dir, obey whoever reaches it
    #[arg(long)]
    pub insecure: bool,
    /// The volume's key, 32 bytes
    #[arg(long, value_name = "FILE")]
    pub key_file: PathBuf,
    /// When threads are real time, to which the kernel gives memory where others wait; else `pressure`
    #[arg(long, env = "LONGHORN_REALTIME", value_enum, value_name = "WHEN")]
    pub realtime: Option<Realtime>,
    /// Refuse a snapshot beyond so many, removed ones not counted
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=SNAPSHOT_COUNT.into()))]
    pub snapshot_max_count: Option<u32>,
    /// Refuse a snapshot once head and snapshots take more; 0: any
    #[arg(long, value_parser = size_or_none, value_name = "SIZE")]
    pub snapshot_max_size: Option<u64>,
    /// Of Longhorn's command line.
    #[command(flatten)]
    pub as_longhorn: ReplicaFlags,
}

impl ReplicaArgs {
    /// With what Longhorn's command line says before the word `replica`.
    pub(super) fn of(mut self, target: &Target) -> Self {
        self.as_longhorn.heed();
        front::check("replica", &self.listen, self.tls_dir.as_deref(), self.insecure);
        match (&self.volume_name, target.volume.as_str()) {
            (None, "") => wrong("replica", "a replica needs --volume-name: the name of its volume"),
            (Some(own), before) if !before.is_empty() && before != own => {
                let text = format!(
                    "--volume-name {before} before `replica` and --volume-name {own} behind it are not one"
                );
                wrong("replica", &text);
            }
            (Some(_), _) => {}
            (None, before) => match volume_name(before) {
                Ok(name) => self.volume_name = Some(name),
                Err(e) => wrong("replica", &e.to_string()),
            },
        }
        self
    }

    fn volume(&self) -> &str {
        self.volume_name.as_deref().unwrap_or_default()
    }

    /// The command line that means these arguments, for a process that an instance manager starts.
    pub fn command_line(&self) -> Vec<String> {
        let mut line = vec!["replica".to_owned()];
        let mut option = |name: &str, value: String| line.extend([format!("--{name}"), value]);
        if let Some(name) = &self.volume_name {
            option("volume-name", name.clone());
        }
        option("replica-instance-name", self.replica_instance_name.clone());
        if let Some(size) = self.size {
            option("size", size.to_string());
        }
        if let (Some(directory), Some(snapshot)) = (&self.clone_from, &self.clone_snapshot) {
            option("clone-from", directory.display().to_string());
            option("clone-snapshot", snapshot.clone());
        }
        option("listen", self.listen.to_string());
        if let Some(directory) = &self.tls_dir {
            option("tls-dir", directory.display().to_string());
        }
        option("data-listen", self.data_listen.to_string());
        option("key-file", self.key_file.display().to_string());
        if let Some(when) = self.realtime {
            option("realtime", when.to_string());
        }
        if let Some(count) = self.snapshot_max_count {
            option("snapshot-max-count", count.to_string());
        }
        if let Some(size) = self.snapshot_max_size {
            option("snapshot-max-size", size.to_string());
        }
        if self.insecure {
            line.push("--insecure".to_owned());
        }
        line.push(self.directory.display().to_string());
        line
    }
}

/// Whatever this process makes from now on is its user's alone: a replica's directory may lie on a disk of its own, below
/// nothing that keeps others out.
pub(crate) fn keep_from_others() {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
}

pub(super) fn run(args: ReplicaArgs) -> Result<()> {
    if matches!(args.data_listen, Address::Tcp(_)) && !args.insecure {
        let text = "a replica on TCP is not encrypted: whoever is on the network between sees and may change the volume's \
            bytes; give --insecure if that network is your own";
        return Err(GivesUp(text.to_owned()).into());
    }
    if let Address::Tcp(address) = &args.data_listen {
        tracing::warn!(%address, "{DATA_OPEN}");
    }
    keep_from_others();
    crate::limits::raise_open_files();
    let key = key_of(&args.key_file)?;
    if let (Some(source), Some(snapshot)) = (&args.clone_from, &args.clone_snapshot) {
        copy(source, snapshot, &args.directory)?;
    }
    let status = Status::default();
    status.set_snapshot_limits(args.snapshot_max_count, args.snapshot_max_size);
    let options = Options {
        directory: args.directory.clone(),
        size: args.size,
        lock_wait: LOCK_WAIT,
        volume: args.volume().to_owned(),
        replica: args.replica_instance_name.clone(),
        key,
        map_key: MapKey::of(&key).0,
        listen: args.data_listen.clone(),
        status: status.clone(),
    };
    let told = status.clone();
    let journal = super::journal::thread_of(&options.directory);
    super::memory::prepare(args.realtime.unwrap_or_default(), journal, move |short| {
        told.set_memory_short(short);
    });
    let usual = match &args.data_listen {
        Address::Unix(data) => {
            make_socket_directory(data).with_context(|| format!("cannot listen on {}", args.data_listen))?;
            Some(control_socket_beside(data))
        }
        Address::Tcp(_) => None,
    };
    let fronts = front::fronts(&args.listen, usual, args.tls_dir.as_deref(), args.insecure)?;
    let face = std::thread::Builder::new().name("grpc".into());
    let (name, directory) = (args.replica_instance_name.clone(), args.directory.clone());
    // Whoever has `longhornctl` start it has it made where it is to be made.
    let could_make = args.size.is_none() && !is_launched();
    face.spawn(move || match serve_control(&args, &fronts, &status) {
        Ok(()) => status.stop(),
        Err(e) => tracing::error!("signals cannot be heard: {e:#}"),
    })
    .context("a thread for the control socket")?;
    tell_holder(&directory);
    let served = failed_disk::heed(&name, &directory, LOCK_WAIT)
        .map_err(ServeError::Open)
        .and_then(|()| serve(options));
    served.map_err(|e| {
        failed_disk::remember(&name, &directory, &e);
        let why = match could_make && is_nothing(&e) {
            true => format!("{e}. With --size, in bytes, it is made here"),
            false => e.to_string(),
        };
        if is_final(&e) { GivesUp(why).into() } else { anyhow!(why) }
    })
}

/// Makes the directory a copy of a snapshot in another one, unless it is there. It gets its name when it is whole: a
/// process that dies meanwhile leaves nothing that looks like a replica.
fn copy(source: &Path, snapshot: &str, target: &Path) -> Result<()> {
    if target.exists() {
        return Ok(());
    }
    let name = target.file_name().and_then(|n| n.to_str()).context("the directory has no name")?;
    let parent = target.parent().context("the directory has no parent")?;
    std::fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
    let unfinished = parent.join(unfinished_copy(name));
    match std::fs::remove_dir_all(&unfinished) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(e).with_context(|| unfinished.display().to_string());
        }
        _ => {}
    }
    let view = SnapshotView::open_beside(source, snapshot)
        .with_context(|| format!("snapshot {snapshot} in {}", source.display()))?;
    let options = CloneOptions { snapshot: snapshot.to_owned(), ..CloneOptions::default() };
    let taken = clone_snapshot(&view, &unfinished, &options, &Pace::new(0), &mut |_, _| {})?;
    std::fs::rename(&unfinished, target).with_context(|| target.display().to_string())?;
    std::fs::File::open(parent)?.sync_all().with_context(|| parent.display().to_string())?;
    tracing::info!(shared = taken.shared, copied = taken.copied, "the directory is copied");
    Ok(())
}

/// Says for whom the directory is waited for, if somebody has it: one that is just ending, or one that somebody has to end.
fn tell_holder(directory: &Path) {
    let Ok(file) = File::open(directory) else { return };
    if !matches!(Flock::lock(file, FlockArg::LockSharedNonblock), Err((_, Errno::EWOULDBLOCK))) {
        return;
    }
    // It waits itself for a moment: of who is gone by then nobody need hear.
    if let Err(held @ OpenError::InUse { .. }) = survey(directory) {
        tracing::warn!("{held}; it is waited for, {} s at most", LOCK_WAIT.as_secs());
    }
}

/// True of a place where no replica is, nor anything else.
const fn is_nothing(e: &ServeError) -> bool {
    use OpenError::{Damaged, NoDirectory};
    matches!(e, ServeError::Open(NoDirectory(_) | Damaged { damage: Damage::NothingHere, .. }))
}

/// True for what another start would meet again. A directory that is not there may be on a disk that comes back.
const fn is_final(e: &ServeError) -> bool {
    use OpenError::{BadSize, Damaged, FileSystem, NotEmpty, TooLarge};
    matches!(
        e,
        ServeError::Open(Damaged { .. } | NotEmpty(_) | BadSize(_) | TooLarge { .. } | FileSystem { .. })
    )
}

/// Answers on the control socket until the process is asked to end.
fn serve_control(args: &ReplicaArgs, fronts: &[Front], status: &Status) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        // Once it listens it holds the directory's locks: nobody else answers under its name.
        while status.address().is_none() {
            tokio::select! {
                () = tokio::time::sleep(STARTING) => {}
                // Its thread waits for a lock, or reads the chain: it hears nothing, and has served nobody.
                _ = terminate.recv() => std::process::exit(0),
                _ = interrupt.recv() => std::process::exit(0),
            }
        }
        let handle = Arc::new(Handle(status.clone()));
        let served = async {
            let name = &args.replica_instance_name;
            // The data goes on without; who asks for the status is told that nobody answers.
            if let Err(e) = control::replica::serve_at(fronts, args.volume(), name, handle).await {
                tracing::error!("control socket {}: {e}", args.listen);
            }
            std::future::pending().await
        };
        tokio::select! {
            () = served => Ok(()),
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
        }
    })
}

struct Handle(Status);

impl ReplicaControl for Handle {
    fn hash(&self, snapshot: &str, again: bool) -> bool {
        self.0.hash(snapshot, again)
    }

    fn hash_status(&self, snapshot: &str) -> HashStatus {
        match self.0.hash_outcome(snapshot) {
            HashOutcome::None => HashStatus::None,
            HashOutcome::Running => HashStatus::Running,
            HashOutcome::Complete { checksum, corrupted } => HashStatus::Complete { checksum, corrupted },
            HashOutcome::Failed(why) => HashStatus::Failed(why),
        }
    }

    fn cancel_hash(&self, snapshot: &str) {
        self.0.cancel_hash(snapshot);
    }

    fn is_hashing(&self) -> bool {
        self.0.is_hashing()
    }

    fn status(&self) -> Pin<Box<dyn Future<Output = Option<ReplicaStatus>> + Send>> {
        let status = self.0.clone();
        Box::pin(async move {
            // The state comes from the replica's worker thread, which may be busy with a sync.
            tokio::task::spawn_blocking(move || describe(&status)).await.ok().flatten()
        })
    }

    fn set_snapshot_limits(&self, count: Option<u32>, bytes: Option<u64>) {
        self.0.set_snapshot_limits(count, bytes);
    }
}

fn describe(status: &Status) -> Option<ReplicaStatus> {
    let state = status.state()?;
    let live = status.snapshot();
    Some(ReplicaStatus {
        size: state.size,
        generation: live.generation.max(state.previous_generation),
        epoch_recorded: state.epoch.is_some(),
        open: live.mode == Mode::Serving,
        dirty: !state.clean,
        rebuilding: state.rebuilding,
        chain: state.chain.into_iter().map(layer).collect(),
        fold: state.fold.map(|f| FoldProgress { done: f.done, total: f.total, error: f.error }),
        snapshots_max: status.snapshot_limits().0.min(SNAPSHOTS_MAX.into()),
    })
}

/// A layer in the control plane's words.
pub(crate) fn layer(info: LayerInfo) -> Layer {
    Layer {
        name: info.name,
        parent: info.parent,
        removed: info.removed,
        user_created: info.user_created,
        created: info.created,
        labels: info.labels,
        allocated: info.allocated,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::daemon::{Command, Program};

    #[test]
    fn a_composed_command_line_means_what_it_was_made_from() {
        let args = ReplicaArgs {
            directory: "/r/replicas/demo-0a1b2c3d".into(),
            size: Some(1 << 30),
            clone_from: None,
            clone_snapshot: None,
            volume_name: Some("demo".into()),
            replica_instance_name: "demo-r-0a1b2c3d".into(),
            listen: Address::Unix("/r/run/demo-r-0a1b2c3d.grpc.sock".into()),
            tls_dir: Some("/tls".into()),
            data_listen: Address::Unix("/r/run/demo-r-0a1b2c3d.sock".into()),
            insecure: false,
            key_file: "/r/volumes/demo/key".into(),
            realtime: Some(Realtime::Never),
            snapshot_max_count: Some(7),
            snapshot_max_size: Some(1 << 31),
            as_longhorn: ReplicaFlags::default(),
        };
        let line = args.command_line();
        assert_eq!(line.first().map(String::as_str), Some("replica"));
        assert_eq!(line.last().map(String::as_str), Some("/r/replicas/demo-0a1b2c3d"));
        let parsed = Program::try_parse_from(std::iter::once("longhorn".to_owned()).chain(line)).unwrap();
        assert!(matches!(parsed.command, Command::Replica(parsed) if parsed == args));
        let clone = ReplicaArgs {
            size: None,
            clone_from: Some("/r/replicas/old-0a1b2c3d".into()),
            clone_snapshot: Some("s1".into()),
            ..args
        };
        let line = std::iter::once("longhorn".to_owned()).chain(clone.command_line());
        let parsed = Program::try_parse_from(line).unwrap();
        assert!(matches!(parsed.command, Command::Replica(parsed) if parsed == clone));
    }
}
