//! The engine as its gRPC server sees it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use control::engine::{
    Answer, EngineControl, EngineError, EngineLimits, EngineReplica, EngineStatus, Operation, PurgeProgress,
    ScrubProgress, SnapshotRequest,
};
use control::proto::ptypes::{self, ReplicaMode};
use crossbeam_channel::{Receiver, Sender};
use datapath::conductor::{Command, CommandError, FoldStatus, Limits, Mode, NewLimits, ReplicaStatus};
use datapath::engine::{EngineHandle, ReplicaAddress};
use lh_block::{Address, Generation};

use super::activity::{Counts, Looks};
use super::show::Endpoint;
use crate::daemon::clock;
use crate::daemon::freeze::Frozen;

/// Where whoever sent an errand hears how it went.
pub(super) type Reply = tokio::sync::oneshot::Sender<Result<(), EngineError>>;

/// What only the engine's main thread can do.
#[derive(Debug)]
pub(super) enum Errand {
    /// Ends the engine; the answer says whether it does.
    End(Reply),
    /// Shows the volume, which is not shown.
    Show(Reply),
    /// Takes the frontend away.
    Hide(Reply),
}

/// How many copies a rebuild has in flight beyond Longhorn's count of files that it copies at once.
const COPIES_BEYOND: u32 = 3;

/// What the face knows besides the engine's own status.
#[derive(Clone, Debug, Default)]
pub(super) struct Shown {
    pub(super) frontend: &'static str,
    /// Once the endpoint is usable.
    pub(super) endpoint: Option<Endpoint>,
}

/// The handle behind the gRPC server.
pub(super) struct Face {
    pub(super) volume: String,
    pub(super) generation: Generation,
    /// Whether replicas may be reached over TCP, where nothing is encrypted.
    pub(super) insecure: bool,
    /// Where each replica is reached, by name.
    pub(super) addresses: Mutex<Vec<(String, String)>>,
    pub(super) engine: EngineHandle,
    pub(super) shown: Arc<Mutex<Shown>>,
    pub(super) errands: Sender<Errand>,
    pub(super) looks: Mutex<Looks>,
}

impl EngineControl for Face {
    fn status(&self) -> EngineStatus {
        let status = self.engine.status();
        let shown = lock(&self.shown).clone();
        let up = shown.endpoint.is_some();
        let waiting_for = match status.waiting_for {
            Some(reason) => reason,
            None if !status.open => "the replicas are being asked for what they hold".to_owned(),
            None if !up => format!("the frontend {} is being made", shown.frontend),
            None => String::new(),
        };
        let Endpoint { device, uri } = shown.endpoint.unwrap_or_default();
        EngineStatus {
            volume: self.volume.clone(),
            size: status.size,
            frontend: shown.frontend.to_owned(),
            up,
            device,
            uri,
            generation: self.generation,
            waiting_for,
            repaired_blocks: status.counters.repaired_blocks,
            replicas: status.replicas.into_iter().map(|r| self.replica(r)).collect(),
            limits: limits(&status.limits),
        }
    }

    fn snapshot(&self, request: SnapshotRequest) -> Answer<()> {
        let SnapshotRequest { name, labels, freeze } = request;
        let command = Command::Snapshot { name, user_created: true, created: clock::now(), labels };
        if !freeze {
            return ended(self.engine.command(command));
        }
        let device = lock(&self.shown).endpoint.as_ref().and_then(|shown| shown.device.clone());
        let (volume, engine) = (self.volume.clone(), self.engine.clone());
        // A thread of its own: whoever asked may go away, and the file system thaws all the same.
        let taken = tokio::task::spawn_blocking(move || {
            at_rest(&volume, device.as_deref(), || engine.command(command).recv())
        });
        Box::pin(async move { taken.await.unwrap_or_else(|_| Err(ending())) })
    }

    fn operate(&self, operation: Operation) -> Answer<()> {
        match operation {
            Operation::ShowFrontend { frontend } => {
                return match self.check_frontend(&frontend) {
                    Ok(()) => self.send(Errand::Show),
                    Err(refused) => Box::pin(std::future::ready(Err(refused))),
                };
            }
            Operation::HideFrontend => return self.send(Errand::Hide),
            _ => {}
        }
        let done = match self.begin(operation) {
            Ok(done) => done,
            Err(refused) => return Box::pin(std::future::ready(Err(refused))),
        };
        ended(done)
    }

    fn purges(&self) -> Vec<PurgeProgress> {
        self.engine.status().folds.into_iter().map(purge).collect()
    }

    fn scrub(&self) -> Option<ScrubProgress> {
        self.engine.status().scrub.map(super::scrub::progress)
    }

    fn shutdown(&self) -> Answer<()> {
        self.send(Errand::End)
    }

    fn activity(&self) -> ptypes::Activity {
        let queues = self.engine.stats().iter().map(|queue| &**queue);
        let counts = Counts::of(queues, self.engine.status().replicas);
        lock(&self.looks).until(Instant::now(), counts)
    }
}

/// The end of a command that was begun.
fn ended(done: Receiver<Result<(), CommandError>>) -> Answer<()> {
    Box::pin(async move {
        let answer = tokio::task::spawn_blocking(move || done.recv()).await;
        match answer {
            Ok(Ok(result)) => result.map_err(refusal),
            Ok(Err(_)) | Err(_) => Err(ending()),
        }
    })
}

fn ending() -> EngineError {
    EngineError::NotNow("the engine is ending".to_owned())
}

/// Takes a snapshot while the file system on the device, if one is mounted, is frozen.
fn at_rest<E>(
    volume: &str,
    device: Option<&std::path::Path>,
    take: impl FnOnce() -> Result<Result<(), CommandError>, E>,
) -> Result<(), EngineError> {
    let not_frozen = |e: anyhow::Error| {
        EngineError::NotNow(format!("no snapshot was taken, because the file system was not frozen: {e:#}"))
    };
    let frozen =
        device.map(|device| Frozen::of_device(volume, device)).transpose().map_err(not_frozen)?.flatten();
    let taken = take().unwrap_or(Err(CommandError::ShuttingDown)).map_err(refusal);
    let Some(frozen) = frozen else { return taken };
    match (frozen.thaw(), taken) {
        (_, Err(e)) => Err(e),
        (Ok(true), Ok(())) => Ok(()),
        (Ok(false), Ok(())) => Err(EngineError::Failed(
            "the snapshot was taken, but the file system thawed before it: remove it, or keep it as one after a \
             power cut"
                .to_owned(),
        )),
        (Err(e), Ok(())) => Err(EngineError::Failed(format!("the snapshot was taken; {e:#}"))),
    }
}

fn limits(of: &Limits) -> EngineLimits {
    EngineLimits {
        snapshot_max_count: of.snapshots,
        snapshot_max_size: of.snapshot_bytes,
        rebuild_concurrency: of.copies.saturating_sub(COPIES_BEYOND).max(1),
    }
}

fn new_limits(new: control::engine::NewLimits) -> NewLimits {
    NewLimits {
        snapshots: new.snapshot_max_count,
        snapshot_bytes: new.snapshot_max_size,
        rebuild_rate: new.rebuild_rate,
        copies: new.rebuild_concurrency.map(|n| n.saturating_add(COPIES_BEYOND)),
        ..NewLimits::default()
    }
}

fn purge(of: FoldStatus) -> PurgeProgress {
    let failed: Vec<String> = of.failed.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    let fold = of.fold.unwrap_or_default();
    PurgeProgress {
        replica: of.replica,
        running: of.running,
        snapshot: fold.name,
        done: fold.done,
        total: fold.total,
        error: failed.join("; "),
        kept: of.kept.into_iter().map(|(name, layers)| (name, why_kept(layers))).collect(),
    }
}

fn why_kept(layers: usize) -> String {
    format!("{layers} layers stand on it: it is folded when all but one of them are gone")
}

impl Face {
    fn send(&self, errand: impl FnOnce(Reply) -> Errand) -> Answer<()> {
        let (sender, answer) = tokio::sync::oneshot::channel();
        let asked = self.errands.send(errand(sender));
        Box::pin(async move {
            asked.map_err(|_| ending())?;
            answer.await.map_err(|_| ending())?
        })
    }

    /// An engine has one frontend for life: that of its command line. Longhorn's names for a block device and for a
    /// target stand for whatever gives one here.
    fn check_frontend(&self, wanted: &str) -> Result<(), EngineError> {
        let own = lock(&self.shown).frontend;
        let is_meant = match wanted {
            "tgt-blockdev" => matches!(own, "fuse" | "ublk" | "nbd" | "iscsi"),
            "tgt-iscsi" => own == "iscsi-target",
            wanted => wanted == own,
        };
        if is_meant {
            return Ok(());
        }
        Err(EngineError::NotNow(format!(
            "the engine was started with the frontend {own}, and shows the volume by no other: start it with {wanted:?}"
        )))
    }

    /// Refuses while somebody has the device open, who would not see that its bytes are others.
    fn check_unused(&self) -> Result<(), EngineError> {
        let device = lock(&self.shown).endpoint.as_ref().and_then(|shown| shown.device.clone());
        let Some(device) = device else { return Ok(()) };
        let users: Vec<String> = fuse_frontend::users_of(&device).iter().map(ToString::to_string).collect();
        if users.is_empty() {
            return Ok(());
        }
        let text =
            format!("{} is in use by {}: unmount or close it first", device.display(), users.join(", "));
        Err(EngineError::NotNow(text))
    }

    fn begin(&self, operation: Operation) -> Result<Receiver<Result<(), CommandError>>, EngineError> {
        let command = match operation {
            Operation::RemoveSnapshot { name } => Command::RemoveSnapshot { name },
            Operation::RemoveReplica { name } => Command::RemoveReplica { name },
            Operation::RebuildReplica { name } => Command::Rebuild { name },
            Operation::AddReplica { name, address } => {
                let reached: Address = address.parse().map_err(EngineError::Invalid)?;
                if !reached.is_local() && !self.insecure {
                    return Err(EngineError::Invalid(super::UNENCRYPTED.to_owned()));
                }
                let mut addresses = lock(&self.addresses);
                // The engine refuses a name that it has; one that was taken out may come back elsewhere.
                if !self.engine.status().replicas.iter().any(|r| r.name == name) {
                    addresses.retain(|(known, _)| *known != name);
                    addresses.push((name.clone(), address));
                }
                return Ok(self.engine.add_replica(ReplicaAddress { name, address: reached }));
            }
            Operation::Purge => Command::Purge,
            Operation::Scrub { repair, bytes_per_second } => Command::Scrub { repair, bytes_per_second },
            Operation::CancelScrub => Command::ScrubStop,
            Operation::Revert { name } => {
                self.check_unused()?;
                Command::Revert { name, created: clock::now() }
            }
            Operation::Expand { size } => Command::Expand { size, created: clock::now() },
            Operation::SetLimits(new) => Command::SetLimits(new_limits(new)),
            Operation::ShowFrontend { .. } | Operation::HideFrontend => {
                return Err(EngineError::NotNow("the frontend is not the conductor's".to_owned()));
            }
        };
        Ok(self.engine.command(command))
    }

    fn replica(&self, replica: ReplicaStatus) -> EngineReplica {
        let address = lock(&self.addresses).iter().find(|(name, _)| *name == replica.name).cloned();
        let reason = match (replica.mode, replica.last_error) {
            (Mode::Rw, _) => String::new(),
            (Mode::Wo, _) => "it is being brought in sync".to_owned(),
            (Mode::Err, Some(error)) => error,
            (Mode::Err, None) if replica.connected => "it is not in sync".to_owned(),
            (Mode::Err, None) => "it does not answer".to_owned(),
        };
        EngineReplica {
            address: address.map(|(_, address)| address).unwrap_or_default(),
            name: replica.name,
            mode: match replica.mode {
                Mode::Rw => ReplicaMode::Rw,
                Mode::Wo => ReplicaMode::Wo,
                Mode::Err => ReplicaMode::Err,
            },
            reason,
            rebuild: replica.rebuild.map(|progress| (progress.done, progress.total)),
        }
    }
}

fn refusal(e: CommandError) -> EngineError {
    let text = e.to_string();
    match e {
        CommandError::Name(_) | CommandError::BadSize { .. } => EngineError::Invalid(text),
        CommandError::Exists(_) => EngineError::Exists(text),
        CommandError::NotFound(_) => EngineError::NotFound(text),
        CommandError::Refused { .. } => EngineError::Failed(text),
        CommandError::TooManySnapshots(_)
        | CommandError::SnapshotsTooLarge { .. }
        | CommandError::Removed(_)
        | CommandError::TooManyReplicas(_)
        | CommandError::Needed(_)
        | CommandError::Scrubbing
        | CommandError::ShuttingDown => EngineError::NotNow(text),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one of these can leave it half written.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
