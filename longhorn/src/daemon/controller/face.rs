//! The engine as its gRPC server sees it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use clap::ValueEnum;
use control::chain::Layer;
use control::cloning::{CloneProgress, CloneSource};
use control::engine::{
    Answer, EngineControl, EngineError, EngineLimits, EngineReplica, EngineStatus, Operation, PurgeProgress,
    ScrubProgress, SnapshotRequest,
};
use control::host::Root;
use control::proto::ptypes::controller_service_client::ControllerServiceClient;
use control::proto::ptypes::{self, ReplicaMode};
use control::proto::volume::Wait;
use crossbeam_channel::Sender;
use datapath::conductor::{Command, CommandError, FoldStatus, Limits, Mode, NewLimits, ReplicaStatus};
use datapath::engine::{Done, EngineHandle, ReplicaAddress};
use lh_block::{Address, Generation};

use super::activity::{Counts, Looks};
use super::authority::Trouble;
use super::clients::Clients;
use super::cloning::{MARK, Progress, Source, UNFINISHED, is_unfinished};
use super::refusal::refusal;
use super::show::{self, Endpoint};
use super::waits::waited_for;
use crate::arguments::Frontend;
use crate::daemon::clock;
use crate::daemon::freeze::{Freezing, Frozen, Turn};
use crate::reader::ReplicaAt;

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
    /// Fills the volume from a snapshot of another one.
    Clone(Box<Source>, Reply),
}

/// How many copies a rebuild has in flight beyond Longhorn's count of files that it copies at once.
const COPIES_BEYOND: u32 = 3;

/// How the frontend fares, which the engine's own status does not say.
#[derive(Clone, Debug, Default)]
pub(super) struct FrontendState {
    pub(super) frontend: &'static str,
    /// Once the endpoint is usable.
    pub(super) endpoint: Option<Endpoint>,
    /// It was hidden, and the engine goes on.
    pub(super) hidden: bool,
    /// It is being hidden for good, or was, and the engine ends.
    pub(super) ending: bool,
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
    pub(super) clients: Clients,
    pub(super) shown: Arc<Mutex<FrontendState>>,
    pub(super) errands: Sender<Errand>,
    pub(super) looks: Mutex<Looks>,
    /// Of the file system on the device.
    pub(super) freezing: Arc<Freezing>,
    pub(super) root: Root,
    /// The volume's key.
    pub(super) key: [u8; 32],
    pub(super) progress: Progress,
    pub(super) authority: Trouble,
}

impl EngineControl for Face {
    fn status(&self) -> EngineStatus {
        let status = self.engine.status();
        let shown = lock(&self.shown).clone();
        let up = shown.endpoint.is_some() && !is_unfinished(&status.chain);
        let other = |why: &str| (Wait::Other, why.to_owned());
        let (wait, waiting_for) = match waited_for(&status, &self.authority) {
            Some(reason) if status.lacks_members => (Wait::Replicas, reason),
            Some(reason) => (Wait::Other, reason),
            None if shown.ending && up => other("the device is being taken away"),
            None if shown.ending => other("what was written is being flushed"),
            None if !status.open => other("the replicas are being asked for what they hold"),
            None if is_unfinished(&status.chain) => other(UNFINISHED),
            None if shown.hidden => {
                (Wait::Shown, format!("it is hidden: `longhornctl up {}` shows it again", self.volume))
            }
            None if !up => (Wait::Other, format!("the frontend {} is being made", shown.frontend)),
            None => (Wait::Untold, String::new()),
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
            wait,
            ending: shown.ending,
            hidden: shown.hidden && !shown.ending,
            lacks_space: self.engine.stats().iter().any(|queue| queue.starved.load(Ordering::Relaxed)),
            has_lost: self.engine.has_lost(),
            repaired_blocks: status.counters.repaired_blocks,
            replicas: status.replicas.into_iter().map(|r| self.replica(r)).collect(),
            limits: limits(&status.limits),
            relay_from: None,
        }
    }

    fn snapshot(&self, request: SnapshotRequest) -> Answer<()> {
        let SnapshotRequest { name, labels, freeze } = request;
        if let Err(refused) = self.check_no_clone(&name) {
            return Box::pin(std::future::ready(Err(refused)));
        }
        let removal = Command::RemoveSnapshot { name: name.clone() };
        let command = Command::Snapshot { name, user_created: true, created: clock::now(), labels };
        if !freeze {
            let (done, answer) = told();
            self.engine.begin(command, done);
            return answer;
        }
        let device = lock(&self.shown).endpoint.as_ref().and_then(|shown| shown.device.clone());
        let (volume, engine, freezing) =
            (self.volume.clone(), self.engine.clone(), Arc::clone(&self.freezing));
        // A thread of its own: whoever asked may go away, and the file system thaws all the same.
        let taken = tokio::task::spawn_blocking(move || {
            let turn = freezing.turn().map_err(not_frozen)?;
            let carry_out =
                |command| engine.command(command).recv().unwrap_or(Err(CommandError::ShuttingDown));
            at_rest(&volume, device.as_deref(), turn, || carry_out(command), || carry_out(removal))
        });
        Box::pin(async move { taken.await.unwrap_or(Err(EngineError::Ending)) })
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
        let (done, answer) = told();
        match self.begin(operation, done) {
            Ok(()) => answer,
            Err(refused) => Box::pin(std::future::ready(Err(refused))),
        }
    }

    fn chain(&self) -> Answer<Vec<Layer>> {
        let (engine, (done, looked)) = (self.engine.clone(), told());
        engine.begin(Command::LookAtChain, done);
        Box::pin(async move {
            looked.await?;
            Ok(engine.status().chain.iter().cloned().map(crate::daemon::layer).collect())
        })
    }

    fn purges(&self) -> Vec<PurgeProgress> {
        self.engine.status().folds.into_iter().map(purge).collect()
    }

    fn scrub(&self) -> Option<ScrubProgress> {
        self.engine.status().scrub.map(super::scrub::progress)
    }

    fn fill_from(&self, source: CloneSource) -> Answer<()> {
        let own = self.own_replica();
        let (root, insecure, errands) = (self.root.clone(), self.insecure, self.errands.clone());
        Box::pin(async move {
            let (snapshot, own) = (source.snapshot.clone(), own?);
            let replicas = other_replicas(&root, insecure, source).await?;
            let (sender, answer) = tokio::sync::oneshot::channel();
            let source = Box::new(Source { replicas, own, snapshot });
            errands.send(Errand::Clone(source, sender)).map_err(|_| EngineError::Ending)?;
            answer.await.map_err(|_| EngineError::Ending)?
        })
    }

    fn cloning(&self) -> Option<CloneProgress> {
        self.progress.get()
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

/// The answer to a command, and where the engine says how it ended. No thread waits for it, however long that takes.
fn told() -> (Done, Answer<()>) {
    let (sender, answer) = tokio::sync::oneshot::channel();
    let done = Box::new(move |result| drop(sender.send(result)));
    (done, Box::pin(async move { answer.await.map_err(|_| EngineError::Ending)?.map_err(refusal) }))
}

/// Takes a snapshot while the file system on the device, if one is mounted, is frozen. One that was taken after it thawed is
/// removed again: whoever asked, or asks once more, would take it for what it is not.
fn at_rest(
    volume: &str,
    device: Option<&std::path::Path>,
    turn: Arc<Turn>,
    take: impl FnOnce() -> Result<(), CommandError>,
    remove: impl FnOnce() -> Result<(), CommandError>,
) -> Result<(), EngineError> {
    let frozen = device.map(|device| Frozen::of_device(volume, device, Arc::clone(&turn)));
    let frozen = frozen.transpose().map_err(not_frozen)?.flatten();
    let taken = take().map_err(refusal);
    let Some(frozen) = frozen else { return taken };
    let ended = ended(frozen.thaw(), taken, remove);
    drop(turn);
    ended
}

fn not_frozen(e: anyhow::Error) -> EngineError {
    EngineError::NotFrozen(format!("no snapshot was taken, because the file system was not frozen: {e:#}"))
}

/// How a snapshot of a frozen file system has ended. `thawed`: whether it was frozen until then.
fn ended(
    thawed: anyhow::Result<bool>,
    taken: Result<(), EngineError>,
    remove: impl FnOnce() -> Result<(), CommandError>,
) -> Result<(), EngineError> {
    match (thawed, taken) {
        (Ok(_), Err(e)) => Err(e),
        // Whoever writes to it waits, and nobody else says so.
        (Err(thaw), Err(e)) => Err(EngineError::Failed(format!("{e}; {thaw:#}"))),
        (Ok(true), Ok(())) => Ok(()),
        (Ok(false), Ok(())) => Err(match remove() {
            Ok(()) => EngineError::NotFrozen(
                "the file system thawed before the snapshot was taken, which was removed again".to_owned(),
            ),
            Err(e) => EngineError::Failed(format!(
                "the file system thawed before the snapshot was taken, which is as after a power cut: remove it ({e})"
            )),
        }),
        (Err(e), Ok(())) => Err(EngineError::Failed(format!("the snapshot was taken; {e:#}"))),
    }
}

fn limits(of: &Limits) -> EngineLimits {
    EngineLimits {
        snapshot_max_count: of.snapshots,
        snapshot_max_size: of.snapshot_bytes,
        rebuild_rate: of.rebuild_rate,
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
            asked.map_err(|_| EngineError::Ending)?;
            answer.await.map_err(|_| EngineError::Ending)?
        })
    }

    /// Refuses what would spoil a clone that runs, or would make one look whole.
    fn check_no_clone(&self, snapshot: &str) -> Result<(), EngineError> {
        if snapshot == MARK {
            return Err(EngineError::Invalid(format!("{MARK} is the name of the mark of a clone")));
        }
        if self.progress.is_running() {
            return Err(EngineError::NotNow("the volume is being filled with a clone".to_owned()));
        }
        Ok(())
    }

    /// A replica of this volume that is in sync.
    fn own_replica(&self) -> Result<ReplicaAt, EngineError> {
        let status = self.engine.status();
        let addresses = lock(&self.addresses);
        let in_sync = status.replicas.iter().filter(|r| r.mode == Mode::Rw);
        let address = in_sync.filter_map(|r| addresses.iter().find(|(name, _)| *name == r.name)).next();
        let Some((replica, address)) = address else {
            return Err(EngineError::NotNow("no replica of the volume is in sync".to_owned()));
        };
        let address = address.parse().map_err(EngineError::Invalid)?;
        Ok(ReplicaAt { volume: self.volume.clone(), replica: replica.clone(), address, key: self.key })
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
        Err(other_frontend(own, wanted))
    }

    /// Refuses while somebody has the device open, is connected where there is none, or has it shown on another host, who would not see
    /// that its bytes are others.
    fn check_unused(&self) -> Result<(), EngineError> {
        let device = lock(&self.shown).endpoint.as_ref().and_then(|shown| shown.device.clone());
        let refused = |who| EngineError::NotNow(format!("the volume is in use ({who}): disconnect first"));
        let Some(device) = device else {
            return self.clients.named().map_or(Ok(()), |who| Err(refused(who)));
        };
        if let Some(relays) = self.clients.relays_named() {
            return Err(refused(relays));
        }
        show::in_whose_hands(&device).map_or(Ok(()), |text| Err(EngineError::NotNow(text)))
    }

    fn begin(&self, operation: Operation, done: Done) -> Result<(), EngineError> {
        match &operation {
            Operation::RemoveSnapshot { name } => self.check_no_clone(name)?,
            Operation::Revert { .. } | Operation::Expand { .. } => self.check_no_clone("")?,
            _ => {}
        }
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
                // The engine refuses a name that it has and reaches; others may come back elsewhere.
                if !self.engine.status().replicas.iter().any(|r| r.name == name && r.connected) {
                    addresses.retain(|(known, _)| *known != name);
                    addresses.push((name.clone(), address));
                }
                self.engine.add_replica(ReplicaAddress { name, address: reached, learner: false }, done);
                return Ok(());
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
        self.engine.begin(command, done);
        Ok(())
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

/// The replicas of another volume that hold everything, as its engine says.
async fn other_replicas(
    root: &Root,
    insecure: bool,
    source: CloneSource,
) -> Result<Vec<ReplicaAt>, EngineError> {
    let unreachable = |e: &dyn std::fmt::Display| {
        EngineError::NotNow(format!("the other volume's engine at {}: {e}", source.engine.display()))
    };
    let channel = control::transport::connect(&source.engine).await.map_err(|e| unreachable(&e))?;
    let ask = || {
        let mut request = tonic::Request::new(());
        for (key, name) in [("volume-name", &source.volume), ("instance-name", &source.instance)] {
            if let Some(name) = name.parse().ok().filter(|_| !name.is_empty()) {
                request.metadata_mut().insert(key, name);
            }
        }
        request
    };
    let mut engine = ControllerServiceClient::new(channel);
    let volume = engine.volume_get(ask()).await.map_err(|e| unreachable(&e.message()))?.into_inner().name;
    let list = engine.replica_list(ask()).await.map_err(|e| unreachable(&e.message()))?.into_inner();
    let key = control::host::read_key(&root.key(&volume)).map_err(|e| EngineError::NotNow(e.to_string()))?;
    let mut found = Vec::new();
    for replica in list.replicas.into_iter().filter(|r| r.mode() == ReplicaMode::Rw) {
        let at = replica.address.unwrap_or_default();
        let address: Address = at.address.parse().map_err(EngineError::Invalid)?;
        if !address.is_local() && !insecure {
            return Err(EngineError::Invalid(super::UNENCRYPTED.to_owned()));
        }
        found.push(ReplicaAt { volume: volume.clone(), replica: at.instance_name, address, key });
    }
    if found.is_empty() {
        return Err(EngineError::NotNow(format!("no replica of volume {volume} is in sync")));
    }
    Ok(found)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one of these can leave it half written.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why an engine that has the frontend `own` does not show its volume by another one.
fn other_frontend(own: &str, wanted: &str) -> EngineError {
    if Frontend::from_str(wanted, false).is_err() {
        let names: Vec<&str> = Frontend::value_variants().iter().map(|frontend| frontend.as_str()).collect();
        let names = names.join(", ");
        return EngineError::Invalid(format!(
            "there is no frontend {wanted:?}: there are {names}, and this engine has {own}"
        ));
    }
    EngineError::NotNow(format!(
        "the engine was started with the frontend {own}, and shows the volume by no other: start it with `--frontend {wanted}`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_stays_frozen_is_told_whatever_became_of_its_snapshot() {
        let refused = || Err(EngineError::NotNow("too few replicas are left".to_owned()));
        let frozen = || Err(anyhow::anyhow!("/mnt is not thawed yet: its device does not answer"));
        let unasked = || panic!("there is none to remove");
        for (taken, says) in [(Ok(()), "was taken"), (refused(), "too few replicas")] {
            let said = ended(frozen(), taken, unasked).unwrap_err().to_string();
            assert!(said.contains("/mnt is not thawed") && said.contains(says), "{said}");
        }
        assert!(matches!(ended(Ok(true), refused(), unasked), Err(EngineError::NotNow(_))));
    }

    #[test]
    fn who_asks_for_a_frontend_that_there_is_not_is_told_those_that_there_are() {
        let said = other_frontend("nbd", "nosuch").to_string();
        assert!(said.contains("\"nosuch\"") && said.contains("ublk, nbd, iscsi, fuse, nbd-server"), "{said}");
        for other in ["fuse", "tgt-iscsi"] {
            let said = other_frontend("nbd", other).to_string();
            assert!(said.ends_with(&format!("start it with `--frontend {other}`")), "{said}");
        }
    }
}
