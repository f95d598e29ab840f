//! `up`: from a name to a usable endpoint.
//!
//! The volume's lock is held while record and processes change, not while the engine makes itself ready: `down` can
//! always come in between. A volume that this command made and that did not come up is taken back. Before its processes are
//! started it is noted that the volume is to be up, which `down` takes back (`up --all`).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use control::host::{LiveDirs, ReplicaRecord, Root, VolumeRecord, engine_name};
use control::manager::{ProcessRecord, State};
use control::proto::imrpc::{ProcessResponse, ProcessStatus};
use control::proto::ptypes;
use lh_block::{Address, Generation, format_size};

use super::Context;
use super::args::{Output, UpArgs, UpCommand};
use super::interrupt::written_size;
use super::manager::Manager;
use super::observe::{VolumeView, ask_engine, connect_engine, is_for_this_host, observe};
use super::output::{counted, print, print_json};
use super::{all, down, engine, interrupt, lock, remove, room};
use crate::arguments::{Checksum, Frontend, Quorum};
use crate::daemon::{ControllerArgs, ControllerFlags, ReplicaArgs, ReplicaFlags, can_be_had};
use crate::generation;
use crate::kernel;
use crate::progress::Progress;
use crate::tell::tell;

/// How long replicas may take to open their directories before the engine is started without those that have not.
/// Ten TiB in a million pieces open in 2 s; a killed predecessor was seen to hold its directory for 3 s.
const REPLICA_PATIENCE: Duration = Duration::from_secs(20);

/// How long they may take while none is open, and there is nothing to start an engine with: a host that starts has all its volumes'
/// replicas open their directories at once.
const FIRST_PATIENCE: Duration = Duration::from_secs(60);

// Whoever waits for a command that starts the volume waits until the replicas are open, and for its instance manager before.
const _: () = assert!(lock::START_PATIENCE.as_secs() > FIRST_PATIENCE.as_secs() + 30);

/// How long an engine may take until its endpoint is usable, in-doubt ranges made equal included.
const ENGINE_PATIENCE: Duration = Duration::from_secs(180);

/// What an engine waits for is told once it has taken this long: each start waits for its replicas for a moment.
const SILENCE: Duration = Duration::from_secs(1);

/// How often is asked meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// A replica of a new volume that has died so often will not come up.
const STARTS_MAX: u32 = 2;

pub(super) async fn run(context: &Context, command: UpCommand) -> Result<()> {
    let Some(volume) = command.volume else { return all::up(context).await };
    let (view, is_new) = bring_up(context, &volume, command.options, &mut Progress::new()).await?;
    announce(context, &view, is_new)
}

/// Starts a volume that exists, as it is.
pub(super) async fn again(context: &Context, volume: &str, progress: &mut Progress) -> Result<VolumeView> {
    // One that has gone meanwhile is not to be made.
    VolumeRecord::load(&context.root, volume)?;
    Ok(bring_up(context, volume, UpArgs::default(), progress).await?.0)
}

/// The volume once it is up, and whether it was made now.
async fn bring_up(
    context: &Context,
    volume: &str,
    args: UpArgs,
    progress: &mut Progress,
) -> Result<(VolumeView, bool)> {
    let root = &context.root;
    root.create()?;
    let lock = lock::name_to_start(root, volume, progress)?;
    LiveDirs::default().check_free(volume, root)?;
    if let Some(record) = lock::found(root, volume)?
        && (engine::is_left_over(root, &record)? || engine::is_ending(root, &record).await)
    {
        down::stop(context, &record, progress).await?;
    }
    if let Some(engine) = ask_engine(root, volume).await {
        engine::note_size(root, volume, &engine.volume)?;
    }
    let (record, is_new) = record_of(root, volume, &args)?;
    if is_new {
        room::check(root, record.replicas.len())?;
    }
    let mut manager = Manager::ensure(root).await?;
    let held = is_new.then(interrupt::hold);
    if is_new {
        record.create(root)?;
    } else if !super::observe::has_processes(root, &record)? && record.mend_key(root)? {
        progress.say("the volume's key was lost: it has a new one");
    }
    if let Err(e) = record.note_up(root) {
        progress.say(&format!("it cannot be noted that it is up ({e}): a later `up --all` leaves it out"));
    }
    let mut lock = Some(lock);
    let coming_up = async {
        start(root, &record, &mut manager, is_new, progress).await?;
        // Nothing but waiting is left, unless a new volume may have to be taken back.
        lock = lock.take().filter(|_| is_new);
        let view = wait_until_usable(root, &record, &mut manager, progress).await?;
        if let Some(limits) = limits_of(&args, &record) {
            tell_limits(root, &record, limits).await?;
        }
        Ok(view)
    };
    let ready = tokio::select! {
        ready = coming_up => ready,
        () = interrupt::wait(held.as_ref()) => Err(anyhow!("interrupted")),
    };
    let Some(held) = held else { return Ok((ready?, false)) };
    let e = match ready {
        Ok(view) => {
            held.let_go();
            return Ok((view, true));
        }
        Err(e) => e,
    };
    progress.say("taking back what was begun");
    if let Err(left) = take_back(root, &record, &mut manager).await {
        return Err(e.context(format!("(and the new volume could not be taken back: {left:#})")));
    }
    interrupt::leaves(format!("there is no volume {volume}"));
    held.let_go();
    Err(e)
}

/// The volume's record, and whether it is yet to be created.
fn record_of(root: &Root, volume: &str, args: &UpArgs) -> Result<(VolumeRecord, bool)> {
    Ok(match lock::found(root, volume)? {
        Some(record) => (changed_record(root, args, record)?, false),
        None => (new_record(root, volume, args)?, true),
    })
}

fn new_record(root: &Root, volume: &str, args: &UpArgs) -> Result<VolumeRecord> {
    let Some(size) = args.size else {
        bail!("there is no volume {volume} yet: give it a size to create it, for example --size 10GiB");
    };
    let frontend = args.frontend.unwrap_or(Frontend::Auto);
    kernel::check(frontend)?;
    let mut record = VolumeRecord::new(volume, size);
    record.block_size = args.block_size.unwrap_or(record.block_size);
    record.quorum = args.quorum.unwrap_or(Quorum::Any).into();
    record.frontend = frontend.to_string();
    record.listen = listen(args, frontend)?;
    record.io_timeout_seconds = args.io_timeout.unwrap_or(record.io_timeout_seconds);
    record.snapshot_max_count = args.snapshot_max_count.unwrap_or(record.snapshot_max_count);
    record.snapshot_max_size = args.snapshot_max_size.unwrap_or(record.snapshot_max_size);
    record.checksum_full = args.checksum == Some(Checksum::Full);
    for _ in 0..args.replicas.unwrap_or(3) {
        record.add_replica(root)?;
    }
    Ok(record)
}

/// Where the frontend is to listen on TCP, if that was asked for.
fn listen(args: &UpArgs, frontend: Frontend) -> Result<Option<SocketAddr>> {
    match (args.listen, frontend.port()) {
        (None, _) => Ok(None),
        (Some(listen), Some(port)) => Ok(Some(listen.with_default(port))),
        (Some(_), None) => bail!(
            "--listen is for --frontend nbd-server and iscsi-target: frontend {frontend} serves nothing over TCP"
        ),
    }
}

/// The record of a volume that exists, with the options that may change while it is stopped.
fn changed_record(root: &Root, args: &UpArgs, mut record: VolumeRecord) -> Result<VolumeRecord> {
    let volume = &record.name.clone();
    record.check_ready()?;
    match args.size {
        Some(size) if size > record.size => bail!(
            "volume {volume} has {}: `longhornctl resize {volume} {}` makes it larger",
            format_size(record.size),
            written_size(size)
        ),
        Some(size) if size < record.size => bail!(
            "volume {volume} has {} and never shrinks: leave --size out to start it, or make another volume",
            format_size(record.size)
        ),
        _ => {}
    }
    let replicas = record.replicas.len();
    if args.replicas.is_some_and(|n| usize::from(n) != replicas) {
        bail!(
            "volume {volume} has {}: change that with `longhornctl replica add {volume}` or `longhornctl replica rm {volume} REPLICA`",
            counted(replicas, "replica")
        );
    }
    if args.block_size.is_some_and(|b| b != record.block_size) {
        bail!("volume {volume} has blocks of {} bytes for ever: make another volume", record.block_size);
    }
    if args.quorum.is_some_and(|q| control::host::Quorum::from(q) != record.quorum) {
        bail!("volume {volume} has the quorum {} for ever: make another volume", record.quorum);
    }
    let asked = match args.frontend {
        Some(frontend) if is_shown_by(root, &record, frontend)? => None,
        asked => asked,
    };
    let frontend = asked.map_or_else(|| record.frontend.clone(), |f| f.to_string());
    let wanted = frontend_of(&frontend)?;
    let is_up = super::observe::has_processes(root, &record)?;
    // A frontend that is named is told where to listen, or listens where it does by itself; one that is there already stays where
    // it is.
    let listen = match (listen(args, wanted)?, asked) {
        (None, None) => record.listen,
        (None, Some(_)) if is_up && frontend == record.frontend => record.listen,
        (listen, _) => listen,
    };
    let io_timeout = args.io_timeout.unwrap_or(record.io_timeout_seconds);
    let checksum_full = args.checksum.map_or(record.checksum_full, |c| c == Checksum::Full);
    let as_before = (&record.frontend, record.listen, record.io_timeout_seconds, record.checksum_full);
    if is_up && (&frontend, listen, io_timeout, checksum_full) != as_before {
        bail!(
            "volume {volume} is up with --frontend {}{}, --io-timeout {} and --checksum {}: stop it with `longhornctl down {volume}`, then start it with other options",
            record.frontend,
            record.listen.map(|address| format!(" --listen {address}")).unwrap_or_default(),
            record.io_timeout_seconds,
            if record.checksum_full { Checksum::Full } else { Checksum::Snapshots }
        );
    }
    kernel::check(wanted)?;
    // The record would keep it, whatever becomes of the engine.
    if let Some(address) = listen.filter(|_| listen != record.listen) {
        can_be_had(address)?;
    }
    let before = record.clone();
    (record.frontend, record.listen, record.io_timeout_seconds) = (frontend, listen, io_timeout);
    record.checksum_full = checksum_full;
    if let Some((count, size)) = limits_of(args, &record) {
        (record.snapshot_max_count, record.snapshot_max_size) = (count, size);
    }
    // All of it or nothing: what is refused together with another option is not half done.
    if record != before {
        record.store(root)?;
    }
    Ok(record)
}

/// True if the volume is up and `auto` has come to this frontend.
fn is_shown_by(root: &Root, record: &VolumeRecord, frontend: Frontend) -> Result<bool> {
    if record.frontend != Frontend::Auto.to_string() || frontend == Frontend::Auto {
        return Ok(false);
    }
    let engine = ProcessRecord::load(root, &engine_name(&record.name))?;
    let words = engine.map(|e| e.args).unwrap_or_default();
    Ok(words.windows(2).any(|pair| pair[0] == "--frontend" && pair[1] == frontend.to_string()))
}

/// The limits for snapshots, if any was named.
fn limits_of(args: &UpArgs, record: &VolumeRecord) -> Option<(u32, u64)> {
    let (count, size) = (args.snapshot_max_count, args.snapshot_max_size);
    (count.is_some() || size.is_some())
        .then(|| (count.unwrap_or(record.snapshot_max_count), size.unwrap_or(record.snapshot_max_size)))
}

/// Tells an engine that runs already what the record says now.
async fn tell_limits(root: &Root, record: &VolumeRecord, (count, size): (u32, u64)) -> Result<()> {
    let Some(mut engine) = connect_engine(root, &record.name).await else { return Ok(()) };
    let (count, size) = (i32::try_from(count)?, i64::try_from(size)?);
    engine.volume_snapshot_max_count_set(ptypes::VolumeSnapshotMaxCountSetRequest { count }).await?;
    engine.volume_snapshot_max_size_set(ptypes::VolumeSnapshotMaxSizeSetRequest { size }).await?;
    Ok(())
}

fn frontend_of(name: &str) -> Result<Frontend> {
    <Frontend as clap::ValueEnum>::from_str(name, false)
        .map_err(|_| anyhow!("frontend {name} is not in this build: choose another with --frontend"))
}

/// Has the kernel load what the volume's device needs.
pub(super) fn load_modules(record: &VolumeRecord) {
    if let Ok(frontend) = frontend_of(&record.frontend) {
        kernel::load(frontend);
    }
}

fn quorum_of(quorum: control::host::Quorum) -> Quorum {
    match quorum {
        control::host::Quorum::Any => Quorum::Any,
        control::host::Quorum::Majority => Quorum::Majority,
        control::host::Quorum::Unsafe => Quorum::Unsafe,
    }
}

/// Starts the processes that are not there.
pub(super) async fn start(
    root: &Root,
    record: &VolumeRecord,
    manager: &mut Manager,
    is_new: bool,
    progress: &mut Progress,
) -> Result<()> {
    let engine = engine_name(&record.name);
    let given_up = given_up(manager, record, &engine).await?;
    manager.end(&given_up).await?;
    for replica in &record.replicas {
        let mut args = replica_args(root, record, replica);
        // One that lies elsewhere was made when it was added. If it is missing now its disk is not mounted, and what is at its place
        // meanwhile is no disk to fill.
        if !replica.directory.starts_with(root.replicas()) {
            args.size = None;
        }
        manager.create(&replica.name, args.command_line()).await?;
    }
    if manager.list().await?.contains_key(&engine) {
        return Ok(());
    }
    progress.say("starting the replicas");
    let seen = wait_for_replicas(root, record, manager, is_new).await?;
    let generation = record.authority(root).issue_generation(seen)?;
    progress.say("starting the engine");
    manager.create(&engine, engine_args(root, record, generation)?.command_line()).await
}

/// The volume's processes that ended and are not started again by themselves, and those that are just ending: what a command left
/// that was broken off while it stopped the volume.
async fn given_up(manager: &mut Manager, record: &VolumeRecord, engine: &str) -> Result<Vec<String>> {
    let processes = manager.list().await?;
    let names = record.replicas.iter().map(|r| r.name.as_str()).chain([engine]);
    let ended = names.filter(|name| {
        let state = processes.get(*name).and_then(|p| p.status.as_ref()).map(|s| s.state.as_str());
        [State::Error, State::Stopped, State::Stopping].iter().any(|ended| state == Some(ended.as_str()))
    });
    Ok(ended.map(str::to_owned).collect())
}

pub(super) fn replica_args(root: &Root, record: &VolumeRecord, replica: &ReplicaRecord) -> ReplicaArgs {
    ReplicaArgs {
        directory: replica.directory.clone(),
        clone_from: None,
        clone_snapshot: None,
        size: Some(record.size),
        volume_name: Some(record.name.clone()),
        replica_instance_name: replica.name.clone(),
        listen: Address::Unix(root.control_socket(&replica.name)),
        tls_dir: None,
        data_listen: Address::Unix(root.data_socket(&replica.name)),
        insecure: false,
        key_file: root.key(&record.name),
        realtime: None,
        snapshot_max_count: None,
        snapshot_max_size: None,
        as_longhorn: ReplicaFlags::default(),
    }
}

/// The engine's arguments. What `auto` means is decided here, so that no restart decides otherwise.
pub(super) fn engine_args(
    root: &Root,
    record: &VolumeRecord,
    generation: Generation,
) -> Result<ControllerArgs> {
    let name = engine_name(&record.name);
    let replicas = record.replicas.iter().map(|r| (r.name.clone(), root.data_socket(&r.name).into()));
    Ok(ControllerArgs {
        volume: record.name.clone(),
        listen: Address::Unix(root.control_socket(&name)),
        tls_dir: None,
        engine_instance_name: Some(name),
        replicas: replicas.collect(),
        insecure: false,
        relay_listen: None,
        relay_from: None,
        stay: None,
        size: Some(record.size),
        block_size: record.block_size,
        frontend: match frontend_of(&record.frontend)? {
            Frontend::Auto => kernel::choose(&record.name, root.path()),
            frontend => frontend,
        },
        frontend_listen: record.listen,
        quorum: quorum_of(record.quorum),
        io_timeout: record.io_timeout_seconds,
        snapshot_max_count: record.snapshot_max_count,
        snapshot_max_size: record.snapshot_max_size,
        checksum: if record.checksum_full { Checksum::Full } else { Checksum::Snapshots },
        generation: Some(generation.into()),
        authority: Some(root.volume(&record.name)),
        key_file: Some(root.key(&record.name)),
        queues: 0,
        ublk_queue_depth: None,
        reads: None,
        realtime: None,
        root: root.path().to_owned(),
        as_longhorn: ControllerFlags::default(),
    })
}

/// Waits until every replica is open or cannot be. The highest generation that any of them has seen.
async fn wait_for_replicas(
    root: &Root,
    record: &VolumeRecord,
    manager: &mut Manager,
    is_new: bool,
) -> Result<Generation> {
    let begun = Instant::now();
    let mut waiting: Vec<&str> = record.replicas.iter().map(|r| r.name.as_str()).collect();
    let (mut seen, mut open, mut reason) = (Generation::default(), 0_usize, None);
    let before = Starts::of(&manager.list().await?);
    loop {
        let processes = manager.list().await?;
        let mut still = Vec::new();
        for name in waiting {
            let status = processes.get(name).and_then(|p| p.status.as_ref());
            if let Some(generation) = generation::seen_by(root, name).await {
                seen = seen.max(generation);
                open += 1;
            } else if let Some(failure) = status.and_then(|s| before.failure(name, s)) {
                if is_new {
                    bail!("{failure}");
                }
                reason.get_or_insert(failure);
            } else {
                still.push(name);
            }
        }
        waiting = still;
        let is_late = begun.elapsed() > REPLICA_PATIENCE;
        if waiting.is_empty() || is_late && open > 0 && !is_new {
            break;
        }
        if is_late && (is_new || begun.elapsed() > FIRST_PATIENCE) {
            bail!("replica {} does not answer: {} may say why", waiting[0], root.log(waiting[0]).display());
        }
        tokio::time::sleep(LOOK).await;
    }
    match reason {
        Some(reason) if open == 0 => bail!("no replica of volume {} can be opened: {reason}", record.name),
        _ => Ok(seen),
    }
}

/// Waits until a replica that was made now is open.
///
/// # Errors
/// Why it cannot be opened.
pub(super) async fn wait_for_new_replica(
    root: &Root,
    record: &VolumeRecord,
    replica: &ReplicaRecord,
    manager: &mut Manager,
) -> Result<()> {
    let mut alone = record.clone();
    alone.replicas = vec![replica.clone()];
    wait_for_replicas(root, &alone, manager, true).await.map(|_| ())
}

/// How often processes had been started again when a command began: what they died of before may be mended.
struct Starts(HashMap<String, u32>);

impl Starts {
    fn of(processes: &HashMap<String, ProcessResponse>) -> Self {
        let restarts = |p: &ProcessResponse| p.status.as_ref().map_or(0, |s| s.restarts);
        Self(processes.iter().map(|(name, p)| (name.clone(), restarts(p))).collect())
    }

    /// Why the process will not come up, if it will not.
    fn failure(&self, name: &str, status: &ProcessStatus) -> Option<String> {
        failure_since(status, self.0.get(name).copied().unwrap_or(0))
    }
}

/// Why a process will not come up that had been started again so often before.
pub(super) fn failure_since(status: &ProcessStatus, before: u32) -> Option<String> {
    let dies = status.state == State::Starting.as_str() && status.restarts > before + STARTS_MAX;
    (dies || status.state == State::Error.as_str()).then(|| status.error_msg.clone())
}

/// Waits until the engine says that its endpoint is usable.
pub(super) async fn wait_until_usable(
    root: &Root,
    record: &VolumeRecord,
    manager: &mut Manager,
    progress: &mut Progress,
) -> Result<VolumeView> {
    let engine = engine_name(&record.name);
    let begun = Instant::now();
    let deadline = begun + ENGINE_PATIENCE;
    let mut remark = String::new();
    let before = Starts::of(&manager.list().await?);
    loop {
        if let Some(answer) = ask_engine(root, &record.name).await {
            if answer.volume.frontend_state == "up" {
                let view = observe(root, record).await?;
                if is_usable(&view) {
                    return Ok(view);
                }
            }
            remark = answer.volume.waiting_for;
            if !remark.is_empty() && begun.elapsed() > SILENCE {
                progress.say(&format!("waiting: {remark}"));
            }
        }
        let processes = manager.list().await?;
        let of_replica =
            |r: &ReplicaRecord| before.failure(&r.name, processes.get(&r.name)?.status.as_ref()?);
        // An engine that was started again, as after a reboot, waits for replicas whatever became of them.
        if let Some(reasons) = record.replicas.iter().map(of_replica).collect::<Option<Vec<_>>>() {
            bail!("no replica of volume {} can be opened: {}", record.name, reasons.join("; "));
        }
        match processes.get(&engine).and_then(|p| p.status.as_ref()) {
            None => bail!("volume {} was stopped by another command", record.name),
            Some(status) if status.state == State::Stopped.as_str() => bail!("the engine was stopped"),
            Some(status) => {
                if let Some(failure) = before.failure(&engine, status) {
                    bail!("the engine does not start: {failure}");
                }
            }
        }
        if Instant::now() > deadline {
            let why = if remark.is_empty() {
                root.log(&engine).display().to_string() + " may say why"
            } else {
                remark
            };
            bail!(
                "volume {} is not usable yet ({why}); it goes on trying: `longhornctl status {0}`, or `longhornctl down {0}`, and \
                 then `longhornctl salvage {0}` for the best that is there",
                record.name
            );
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// True if whoever is told of the volume can use it. The engine may have ended, or may not have answered, since it said so.
pub(super) fn is_usable(view: &VolumeView) -> bool {
    view.state == "attached" && (!view.endpoint.is_empty() || view.frontend == Frontend::None.as_str())
}

/// Makes a volume that never came up not exist.
async fn take_back(root: &Root, record: &VolumeRecord, manager: &mut Manager) -> Result<()> {
    let engine = engine_name(&record.name);
    manager.end(&[engine]).await?;
    let replicas: Vec<String> = record.replicas.iter().map(|r| r.name.clone()).collect();
    manager.end(&replicas).await?;
    LiveDirs::default().forget(&record.name, root);
    remove::everything(root, record)
}

/// Says where the volume is. Only of a new one it is said how to put a file system on it: another one may have one.
pub(super) fn announce(context: &Context, view: &VolumeView, is_new: bool) -> Result<()> {
    if context.output == Output::Json {
        return print_json(view);
    }
    let size = format_size(view.size);
    let replicas = counted(view.replicas.len(), "replica");
    tell!("{} is up: {size}, {replicas}, {}", view.name, view.robustness);
    if !view.endpoint.is_empty() {
        print(&format!("{}\n", view.endpoint))?;
    }
    tell!("\n{}", what_next(view, is_new));
    Ok(())
}

/// How the volume is used and stopped.
fn what_next(view: &VolumeView, is_new: bool) -> String {
    let volume = &view.name;
    if let Some(device) = &view.device {
        let make = if is_new { format!("mkfs.ext4 {device} && ") } else { String::new() };
        return format!(
            "To use it:   {make}mkdir -p /mnt/{volume} && mount {device} /mnt/{volume}\nTo stop it:  umount /mnt/{volume} && longhornctl down {volume}"
        );
    }
    let stop = format!("To stop it:  longhornctl down {volume}");
    let Some(uri) = &view.uri else { return stop };
    let with = if uri.starts_with("iscsi:") { "iscsi-inq" } else { "nbdinfo" };
    let others = match is_for_this_host(uri) {
        true => format!(
            "For others:  longhornctl down {volume} && longhornctl up {volume} --listen ADDRESS (no other host reaches it as it is)\n"
        ),
        false => String::new(),
    };
    format!("To use it:   {with} '{uri}'\n{others}{stop}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::listen_address;

    /// A volume under a root of its own.
    fn volume(dir: &tempfile::TempDir) -> (Root, VolumeRecord) {
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        let mut record = VolumeRecord::new("demo", 1 << 30);
        record.frontend = Frontend::None.to_string();
        record.add_replica(&root).unwrap();
        record.create(&root).unwrap();
        (root, record)
    }

    #[test]
    fn options_of_which_one_is_refused_change_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (root, record) = volume(&dir);
        let limited = UpArgs { snapshot_max_count: Some(5), ..UpArgs::default() };
        let listens = UpArgs { listen: Some(listen_address("127.0.0.1").unwrap()), ..limited.clone() };
        assert!(changed_record(&root, &listens, record.clone()).is_err());
        let engine = r#"{"format":1,"name":"demo-e-0","binary":"","args":[],"uuid":"1","state":"running"}"#;
        std::fs::write(root.process("demo-e-0"), engine).unwrap();
        let waits = UpArgs { io_timeout: Some(7), ..limited.clone() };
        assert!(changed_record(&root, &waits, record.clone()).is_err());
        assert_eq!(VolumeRecord::load(&root, "demo").unwrap(), record);
        // Alone it may change while the volume is up.
        changed_record(&root, &limited, record).unwrap();
        assert_eq!(VolumeRecord::load(&root, "demo").unwrap().snapshot_max_count, 5);
    }

    #[test]
    fn a_volume_is_up_once_whoever_is_told_so_can_use_it() {
        let view = |state, endpoint: &str, frontend: &str| VolumeView {
            state,
            endpoint: endpoint.to_owned(),
            frontend: frontend.to_owned(),
            ..VolumeView::default()
        };
        assert!(is_usable(&view("attached", "/dev/longhorn/demo", "nbd")));
        assert!(is_usable(&view("attached", "", "none")));
        // Asked once more the engine has ended, or says nothing.
        assert!(!is_usable(&view("attached", "", "nbd")));
        assert!(!is_usable(&view("attaching", "", "none")));
        assert!(!is_usable(&view("detaching", "/dev/longhorn/demo", "nbd")));
    }

    #[test]
    fn nobody_is_told_to_make_a_file_system_on_what_may_have_one() {
        let mut view = VolumeView {
            name: "demo".into(),
            size: 1 << 30,
            state: "attached",
            robustness: "healthy",
            frontend: "ublk".into(),
            endpoint: "/dev/longhorn/demo".into(),
            device: Some("/dev/longhorn/demo".into()),
            uri: None,
            generation: 1 << 32,
            ..VolumeView::default()
        };
        assert!(what_next(&view, true).starts_with("To use it:   mkfs.ext4 /dev/longhorn/demo && mkdir"));
        assert!(what_next(&view, false).starts_with("To use it:   mkdir -p /mnt/demo && mount"));
        (view.device, view.uri) = (None, Some("iscsi://127.0.0.1:3260/iqn:demo/1".into()));
        let told = what_next(&view, true);
        assert!(told.contains("iscsi-inq") && told.contains("--listen ADDRESS"), "{told}");
        view.uri = Some("iscsi://10.1.2.3:3260/iqn:demo/1".into());
        assert!(!what_next(&view, true).contains("--listen"));
    }
}
