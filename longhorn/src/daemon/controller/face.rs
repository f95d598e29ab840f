//! The engine as its gRPC server sees it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use control::engine::{
    Answer, EngineControl, EngineError, EngineMetrics, EngineReplica, EngineStatus, SnapshotRequest,
};
use control::proto::ptypes::ReplicaMode;
use crossbeam_channel::Sender;
use datapath::conductor::{Command, CommandError, Mode, ReplicaStatus};
use datapath::engine::EngineHandle;
use datapath::queue::Counters;
use lh_block::Generation;

use super::show::Endpoint;
use crate::daemon::clock;

/// A wish that the engine ends; the answer says whether it does.
pub(super) type Shutdown = tokio::sync::oneshot::Sender<Result<(), EngineError>>;

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
    /// Where each replica is reached, by name.
    pub(super) addresses: Vec<(String, String)>,
    pub(super) engine: EngineHandle,
    pub(super) shown: Arc<Mutex<Shown>>,
    pub(super) shutdowns: Sender<Shutdown>,
    pub(super) last_metrics: Mutex<Option<(Instant, Totals)>>,
}

/// Sums over all queues.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    reads: Sum,
    writes: Sum,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    count: u64,
    bytes: u64,
    time: u64,
}

impl Sum {
    fn add(&mut self, counters: &Counters) {
        use std::sync::atomic::Ordering::Relaxed;
        self.count += counters.count.load(Relaxed);
        self.bytes += counters.bytes.load(Relaxed);
        self.time += counters.time.load(Relaxed);
    }

    /// What was added since.
    const fn since(self, earlier: Self) -> Self {
        Self {
            count: self.count - earlier.count,
            bytes: self.bytes - earlier.bytes,
            time: self.time - earlier.time,
        }
    }
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
        }
    }

    fn snapshot(&self, request: SnapshotRequest) -> Answer<()> {
        let SnapshotRequest { name, labels } = request;
        let command = Command::Snapshot { name, user_created: true, created: clock::now(), labels };
        let done = self.engine.command(command);
        Box::pin(async move {
            let answer = tokio::task::spawn_blocking(move || done.recv()).await;
            match answer {
                Ok(Ok(result)) => result.map_err(refusal),
                Ok(Err(_)) | Err(_) => Err(EngineError::NotNow("the engine is ending".to_owned())),
            }
        })
    }

    fn shutdown(&self) -> Answer<()> {
        let (sender, answer) = tokio::sync::oneshot::channel();
        let asked = self.shutdowns.send(sender);
        Box::pin(async move {
            let ending = || EngineError::NotNow("the engine is ending".to_owned());
            asked.map_err(|_| ending())?;
            answer.await.map_err(|_| ending())?
        })
    }

    fn metrics(&self) -> EngineMetrics {
        let mut now = Totals::default();
        for queue in self.engine.stats() {
            now.reads.add(&queue.reads);
            now.writes.add(&queue.writes);
        }
        let mut last = lock(&self.last_metrics);
        let (since, before) = last.unwrap_or_else(|| (Instant::now(), Totals::default()));
        let millis = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX).max(1);
        *last = Some((Instant::now(), now));
        let (reads, writes) = (now.reads.since(before.reads), now.writes.since(before.writes));
        let per_second = |n: u64| n.saturating_mul(1000) / millis;
        let mean = |sum: Sum| sum.time.checked_div(sum.count).unwrap_or(0);
        EngineMetrics {
            read_bytes: per_second(reads.bytes),
            write_bytes: per_second(writes.bytes),
            read_latency: mean(reads),
            write_latency: mean(writes),
            reads: per_second(reads.count),
            writes: per_second(writes.count),
        }
    }
}

impl Face {
    fn replica(&self, replica: ReplicaStatus) -> EngineReplica {
        let address = self.addresses.iter().find(|(name, _)| *name == replica.name);
        let reason = match (replica.mode, replica.last_error) {
            (Mode::Rw, _) => String::new(),
            (Mode::Wo, _) => "it is being brought in sync".to_owned(),
            (Mode::Err, Some(error)) => error,
            (Mode::Err, None) if replica.connected => "it is not in sync".to_owned(),
            (Mode::Err, None) => "it does not answer".to_owned(),
        };
        let progress = replica.rebuild.map_or(0, |p| p.done.saturating_mul(100) / p.total.max(1));
        EngineReplica {
            address: address.map(|(_, address)| address.clone()).unwrap_or_default(),
            name: replica.name,
            mode: match replica.mode {
                Mode::Rw => ReplicaMode::Rw,
                Mode::Wo => ReplicaMode::Wo,
                Mode::Err => ReplicaMode::Err,
            },
            reason,
            rebuild_progress: u8::try_from(progress.min(100)).unwrap_or(100),
        }
    }
}

fn refusal(e: CommandError) -> EngineError {
    let text = e.to_string();
    match e {
        CommandError::Name(_) => EngineError::Invalid(text),
        CommandError::Exists(_) => EngineError::Exists(text),
        CommandError::Refused { .. } => EngineError::Failed(text),
        CommandError::NotFound(_)
        | CommandError::TooManySnapshots(_)
        | CommandError::TooManyReplicas(_)
        | CommandError::Needed(_)
        | CommandError::ShuttingDown => EngineError::NotNow(text),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one of these can leave it half written.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
