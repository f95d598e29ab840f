//! The processes of a volume started, and waited for until it can be used. The caller holds the volume's lock while they are
//! started.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use control::host::{ReplicaRecord, Root, VolumeRecord, engine_name};
use control::manager::State;
use control::proto::imrpc::{ProcessResponse, ProcessStatus};
use control::proto::ptypes;
use control::transport::is_gone;
use lh_block::{Address, Generation};
use replica::store::OpenError;

use super::manager::Manager;
use super::observe::{Attachment, Robustness, VolumeView, ask_engine, connect_engine, observe};
use super::only_replica::advice;
use super::{adopt, lock};
use crate::arguments::{Checksum, Frontend};
use crate::daemon::{ControllerArgs, ControllerFlags, ReplicaArgs, ReplicaFlags};
use crate::generation;
use crate::kernel;
use crate::progress::Progress;

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
    let processes = manager.list().await?;
    if !is_new && !record.replicas.iter().any(|replica| processes.contains_key(&replica.name)) {
        adopt::first(root, record, progress)?;
    }
    for replica in &record.replicas {
        let args = replica_args(root, record, replica);
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

/// The replica lies where those do that nobody gave a place.
pub(super) fn is_below(root: &Root, replica: &ReplicaRecord) -> bool {
    replica.directory.starts_with(root.replicas())
}

/// One that lies elsewhere was made when it was added. If it is missing at any start of its process its disk is not mounted, and what is
/// at its place meanwhile is no disk to fill.
pub(super) fn replica_args(root: &Root, record: &VolumeRecord, replica: &ReplicaRecord) -> ReplicaArgs {
    ReplicaArgs {
        directory: replica.directory.clone(),
        clone_from: None,
        clone_snapshot: None,
        size: is_below(root, replica).then_some(record.size),
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
fn engine_args(root: &Root, record: &VolumeRecord, generation: Generation) -> Result<ControllerArgs> {
    let name = engine_name(&record.name);
    let replicas = record.replicas.iter().map(|r| (r.name.clone(), root.data_socket(&r.name).into()));
    Ok(ControllerArgs {
        volume: record.name.clone(),
        listen: Some(root.control_socket(&name).into()),
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
            Frontend::Auto => kernel::choose(&record.name, root.path())?,
            frontend => frontend,
        },
        frontend_listen: record.listen,
        quorum: record.quorum,
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
            let process = processes.get(waiting[0]).and_then(|p| p.status.as_ref());
            bail!(
                "replica {} does not answer: {}",
                waiting[0],
                why_silent(root, record, waiting[0], process)
            );
        }
        tokio::time::sleep(LOOK).await;
    }
    match reason {
        Some(reason) if open == 0 => {
            bail!("no replica of volume {} can be opened: {}", record.name, advice(record, &reason))
        }
        _ => Ok(seen),
    }
}

/// Why a replica opens its directory for so long: it waits for who holds it, of whom only whoever asks for it hears.
fn why_silent(root: &Root, record: &VolumeRecord, name: &str, process: Option<&ProcessStatus>) -> String {
    let directory = record.replica(name).map(|replica| replica.directory.as_path());
    let looked = directory.map(replica::store::survey);
    // Its own process may hold it, busy with what is there.
    let own = process.map(|status| format!("process {} ", status.pid));
    match looked {
        Some(Err(held @ OpenError::InUse { .. }))
            if own.is_none_or(|own| !held.to_string().contains(&own)) =>
        {
            held.to_string()
        }
        _ => format!("{} may say why", root.log(name).display()),
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
    let (mut remark, mut is_faulted) = (String::new(), false);
    let before = Starts::of(&manager.list().await?);
    let mut is_asked = false;
    loop {
        if let Some(answer) = ask_engine(root, &record.name).await {
            if answer.volume.hidden && !std::mem::replace(&mut is_asked, true) {
                show_again(root, record, &answer.volume).await?;
                continue;
            }
            if answer.volume.frontend_state == "up" {
                let view = observe(root, record).await?;
                if is_usable(&view) {
                    return Ok(view);
                }
                is_faulted = view.robustness == Robustness::Faulted;
            }
            remark = answer.volume.waiting_for;
            if remark.is_empty() && is_faulted {
                "no replica can serve it".clone_into(&mut remark);
            }
            if !remark.is_empty() && begun.elapsed() > SILENCE {
                progress.say(&format!("waiting: {remark}"));
            }
        }
        let processes = manager.list().await?;
        let of_replica =
            |r: &ReplicaRecord| before.failure(&r.name, processes.get(&r.name)?.status.as_ref()?);
        // An engine that was started again, as after a reboot, waits for replicas whatever became of them.
        if let Some(reasons) = record.replicas.iter().map(of_replica).collect::<Option<Vec<_>>>() {
            let reasons = advice(record, &reasons.join("; "));
            bail!("no replica of volume {} can be opened: {reasons}", record.name);
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

/// Has the engine of a hidden volume show it.
async fn show_again(root: &Root, record: &VolumeRecord, hidden: &ptypes::Volume) -> Result<()> {
    let Some(mut engine) = connect_engine(root, &record.name).await else { return Ok(()) };
    let frontend = hidden.frontend.clone();
    let shown = engine.volume_frontend_start(ptypes::VolumeFrontendStartRequest { frontend }).await;
    match shown {
        Err(status) if !is_gone(&status) => {
            Err(status).with_context(|| format!("volume {} is hidden, and cannot be shown", record.name))
        }
        _ => Ok(()),
    }
}

/// True if whoever is told of the volume can use it: its replicas may have died, and not be there again yet.
fn is_usable(view: &VolumeView) -> bool {
    is_shown(view) && view.robustness != Robustness::Faulted
}

/// True if the volume is where it is to be. The engine may have ended, or may not have answered, since it said so.
pub(super) fn is_shown(view: &VolumeView) -> bool {
    view.state == Attachment::Attached
        && (!view.endpoint.is_empty() || view.frontend == Frontend::None.as_str())
}

pub(super) fn frontend_of(name: &str) -> Result<Frontend> {
    <Frontend as clap::ValueEnum>::from_str(name, false)
        .map_err(|_| anyhow!("frontend {name} is not in this build: choose another with --frontend"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_up_once_whoever_is_told_so_can_use_it() {
        let view = |state, endpoint: &str, frontend: &str| VolumeView {
            state,
            endpoint: endpoint.to_owned(),
            frontend: frontend.to_owned(),
            ..VolumeView::default()
        };
        assert!(is_usable(&view(Attachment::Attached, "/dev/longhorn/demo", "nbd")));
        assert!(is_usable(&view(Attachment::Attached, "", "none")));
        // Asked once more the engine has ended, or says nothing.
        assert!(!is_usable(&view(Attachment::Attached, "", "nbd")));
        assert!(!is_usable(&view(Attachment::Attaching, "", "none")));
        assert!(!is_usable(&view(Attachment::Detaching, "/dev/longhorn/demo", "nbd")));
        let faulted = VolumeView {
            robustness: Robustness::Faulted,
            ..view(Attachment::Attached, "/dev/longhorn/demo", "nbd")
        };
        assert!(is_shown(&faulted) && !is_usable(&faulted));
    }

    #[test]
    fn who_holds_a_replicas_directory_is_told_unless_it_is_the_replica() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        let mut record = VolumeRecord::new("demo", 1 << 20);
        record.add_replica(&root).unwrap();
        let (name, place) = (record.replicas[0].name.clone(), record.replicas[0].directory.clone());
        std::fs::create_dir_all(&place).unwrap();
        let held = std::fs::File::open(&place).unwrap();
        held.lock().unwrap();
        let own = std::process::id();
        let said = why_silent(&root, &record, &name, None);
        assert!(said.contains(&format!("in use by process {own} ")), "{said}");
        let status = ProcessStatus { pid: own, ..ProcessStatus::default() };
        let said = why_silent(&root, &record, &name, Some(&status));
        assert!(said.ends_with("may say why"), "{said}");
    }
}
