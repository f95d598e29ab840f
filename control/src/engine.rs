//! The gRPC face of an engine: Longhorn's `ControllerService` over a handle that knows the engine.

mod data_socket;
mod operations;
mod service;
mod waits;

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use lh_block::{Address, Generation};
use thiserror::Error;
use tonic::Status;
use tonic::service::Routes;

use crate::chain::Layer;
use crate::cloning::{CloneProgress, CloneSource};
use crate::front::{self, Front};
use crate::proto::ptypes;
use crate::proto::ptypes::controller_service_server::ControllerServiceServer;
use crate::proto::volume::Wait;
use crate::transport::Identity;
use service::Service;

/// Longhorn 1.12's versions, current and oldest understood.
const CLI_API: (i64, i64) = (12, 8);
const CONTROLLER_API: (i64, i64) = (6, 4);
const DATA_FORMAT: (i64, i64) = (1, 1);

/// An answer that takes time.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T, EngineError>> + Send>>;

/// What a gRPC server asks an engine. Called from the server's thread; no call may block.
pub trait EngineControl: Send + Sync + 'static {
    /// The engine as it is now.
    fn status(&self) -> EngineStatus;

    /// Takes a snapshot on every member, or on none. Answers when it is durable.
    fn snapshot(&self, request: SnapshotRequest) -> Answer<()>;

    /// Carries out an operation of the volume. Answers when it is durable, or has begun, as each says.
    fn operate(&self, operation: Operation) -> Answer<()>;

    /// All layers as a member has them now, also those of other branches: parents before children, the head last. Empty: no
    /// replica has told them yet.
    fn chain(&self) -> Answer<Vec<Layer>>;

    /// How far folding is, for each replica that folds or failed to.
    fn purges(&self) -> Vec<PurgeProgress>;

    /// The scrub that runs, or the last one since the engine started.
    fn scrub(&self) -> Option<ScrubProgress>;

    /// Fills the volume, which is empty and shown nowhere, from a snapshot of another one. Answers when it holds all of
    /// it, and is carried on if nobody waits any more.
    fn fill_from(&self, source: CloneSource) -> Answer<()>;

    /// The clone that runs, or the last one since the engine started.
    fn cloning(&self) -> Option<CloneProgress>;

    /// Takes the frontend away, flushes, closes every replica cleanly and ends the engine's process soon afterwards.
    /// Refused, with nothing changed, while somebody uses the device.
    fn shutdown(&self) -> Answer<()>;

    /// What it did lately; see the message's own description.
    fn activity(&self) -> ptypes::Activity;
}

/// Why an engine did not do what it was asked. The texts are one sentence each.
#[derive(Clone, Debug, Error)]
pub enum EngineError {
    /// The request makes no sense, now or ever.
    #[error("{0}")]
    Invalid(String),
    /// The name is taken.
    #[error("{0}")]
    Exists(String),
    /// There is no such snapshot or replica.
    #[error("{0}")]
    NotFound(String),
    /// Not in this state; it may be possible later.
    #[error("{0}")]
    NotNow(String),
    /// It would be beyond the volume's limits; room has to be made first.
    #[error("{0}")]
    NoRoom(String),
    /// The file system on the device should have been frozen for a snapshot, and was not: there is no snapshot.
    #[error("{0}")]
    NotFrozen(String),
    /// It was tried and failed.
    #[error("{0}")]
    Failed(String),
    /// The engine is about to be gone: nothing is begun any more, and what was begun has ended.
    #[error("the engine is ending")]
    Ending,
}

impl From<EngineError> for Status {
    fn from(e: EngineError) -> Self {
        match e {
            EngineError::Invalid(text) => Self::invalid_argument(text),
            EngineError::Exists(text) => Self::already_exists(text),
            EngineError::NotFound(text) => Self::not_found(text),
            EngineError::NotNow(text) => Self::failed_precondition(text),
            EngineError::NoRoom(text) => Self::resource_exhausted(text),
            EngineError::NotFrozen(text) => Self::aborted(text),
            EngineError::Failed(text) => Self::internal(text),
            // As for one that is gone.
            EngineError::Ending => Self::unavailable(e.to_string()),
        }
    }
}

/// What a volume can be asked beyond a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Marks a snapshot as removed, on every member or on none. Answers when that is durable.
    RemoveSnapshot {
        /// Its name.
        name: String,
    },
    /// Begins to fold removed snapshots away.
    Purge,
    /// Makes the volume's bytes those of a snapshot. Refused while something is shown. Answers when it is durable.
    Revert {
        /// The snapshot's name, checked.
        name: String,
    },
    /// Makes the volume larger. Answers when it is durable and the frontend shows it.
    Expand {
        /// Bytes.
        size: u64,
    },
    /// Adds a replica, which is then brought in sync. Answers as soon as it is configured.
    AddReplica {
        /// Its name.
        name: String,
        /// `unix:PATH`.
        address: String,
    },
    /// Takes a replica out.
    RemoveReplica {
        /// Its name.
        name: String,
    },
    /// Brings a replica in sync anew.
    RebuildReplica {
        /// Its name.
        name: String,
    },
    /// Changes bounds, at once and until the engine ends.
    SetLimits(NewLimits),
    /// Shows the volume, which nothing shows now, by the frontend that the engine was started with.
    ShowFrontend {
        /// Its name, this project's or Longhorn's.
        frontend: String,
    },
    /// Takes the frontend away; the engine goes on. Refused while somebody uses the device.
    HideFrontend,
    /// Begins to compare the replicas with each other and with their checksums.
    Scrub {
        /// Repair what is rotten.
        repair: bool,
        /// Bytes of the volume in a second; 0: as fast as it goes.
        bytes_per_second: u64,
    },
    /// Ends the scrub that runs.
    CancelScrub,
}

/// How far a scrub is, and what it has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubProgress {
    /// It has not ended.
    pub running: bool,
    /// What is found is repaired.
    pub repair: bool,
    /// What it looks at or waits for, for people.
    pub doing: String,
    /// Bytes done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
    /// What it has found: the first 4096.
    pub findings: Vec<ScrubFinding>,
    /// Blocks found wrong in all.
    pub bad_blocks: u64,
    /// Blocks of these that are sound again.
    pub repaired_blocks: u64,
    /// One sentence for each snapshot of which a replica could not take checksums.
    pub notes: Vec<String>,
    /// Why it ended before it was through; empty if it did not.
    pub error: String,
}

/// Some neighbouring blocks of one replica that are not as they should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubFinding {
    /// Whose.
    pub replica: String,
    /// Name of the snapshot; empty: the head.
    pub layer: String,
    /// Where, in bytes.
    pub offset: u64,
    /// How long, in bytes.
    pub length: u64,
    /// "rotten" or "differs".
    pub flaw: &'static str,
    /// "reported", "repaired", "no_source", "unsure", "conflict" or "failed".
    pub done: &'static str,
}

/// How far a replica is with folding a snapshot away.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PurgeProgress {
    /// The replica.
    pub replica: String,
    /// It is not through yet.
    pub running: bool,
    /// The snapshot that goes; empty if none does now.
    pub snapshot: String,
    /// Bytes done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
    /// Why the last fold did not end; empty if it did.
    pub error: String,
    /// Removed snapshots that stay for now, and why: a sentence each.
    pub kept: Vec<(String, String)>,
}

/// A snapshot to take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// Its name, checked.
    pub name: String,
    /// Labels.
    pub labels: std::collections::BTreeMap<String, String>,
    /// The file system that is mounted from the volume's device rests meanwhile, if one is.
    pub freeze: bool,
}

/// Bounds of a volume that can be changed while it runs; `None`: as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewLimits {
    /// Most snapshots, removed ones not counted.
    pub snapshot_max_count: Option<u32>,
    /// Most bytes of all snapshots together; 0: any.
    pub snapshot_max_size: Option<u64>,
    /// Bytes that rebuilds may copy in a second; 0: as much as they can.
    pub rebuild_rate: Option<u64>,
    /// How much a rebuild copies at once, in Longhorn's count of files: 1 is the least.
    pub rebuild_concurrency: Option<u32>,
}

/// Bounds of a volume as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLimits {
    /// See [`NewLimits::snapshot_max_count`].
    pub snapshot_max_count: u32,
    /// See [`NewLimits::snapshot_max_size`].
    pub snapshot_max_size: u64,
    /// See [`NewLimits::rebuild_rate`].
    pub rebuild_rate: u64,
    /// See [`NewLimits::rebuild_concurrency`].
    pub rebuild_concurrency: u32,
}

/// An engine as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStatus {
    /// Volume.
    pub volume: String,
    /// Bytes; 0 until a replica told.
    pub size: u64,
    /// The frontend in use, never "auto"; empty until it is chosen.
    pub frontend: String,
    /// The endpoint is usable.
    pub up: bool,
    /// The block device, if there is one.
    pub device: Option<PathBuf>,
    /// The URI of what is served, if something is.
    pub uri: Option<String>,
    /// The engine's generation.
    pub generation: Generation,
    /// One sentence that says what requests wait for; empty while they are answered.
    pub waiting_for: String,
    /// What that sentence is about.
    pub wait: Wait,
    /// It was told to end: it hides the volume, flushes and closes its replicas.
    pub ending: bool,
    /// It was hidden, and is shown again when it is asked to.
    pub hidden: bool,
    /// Writes wait for space: every replica that takes them has said that its disk is full.
    pub lacks_space: bool,
    /// What was answered and not flushed may be lost, and who wrote it has the volume open: flushes have failed for it, or will.
    pub has_lost: bool,
    /// Blocks that differed between members when this engine started, and were made equal.
    pub repaired_blocks: u64,
    /// Every configured replica.
    pub replicas: Vec<EngineReplica>,
    /// What it may grow to.
    pub limits: EngineLimits,
    /// Of a relay: where the volume's engine serves it. `None` for an engine.
    pub relay_from: Option<Address>,
}

/// A replica as its engine sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineReplica {
    /// Its name.
    pub name: String,
    /// Where it is reached.
    pub address: String,
    /// What it does for the volume.
    pub mode: ptypes::ReplicaMode,
    /// One sentence that says why it is not RW; empty if it is.
    pub reason: String,
    /// Bytes done and bytes in all of a running rebuild.
    pub rebuild: Option<(u64, u64)>,
}

/// Serves the engine on a unix socket until it is dropped.
///
/// # Errors
/// The socket cannot be bound, or the server fails.
pub async fn serve(socket: &Path, instance: &str, engine: Arc<dyn EngineControl>) -> io::Result<()> {
    serve_at(&[Front::Unix(socket.to_owned())], instance, engine).await
}

/// The same wherever it is to answer, until nobody answers anywhere any more.
///
/// # Errors
/// As [`serve`].
pub async fn serve_at(fronts: &[Front], instance: &str, engine: Arc<dyn EngineControl>) -> io::Result<()> {
    let volume = engine.status().volume;
    let identity = Identity { volume, instance: instance.to_owned(), role: "controller" };
    let operations = operations::service(Arc::clone(&engine), identity.clone());
    let service = ControllerServiceServer::with_interceptor(Service { engine }, identity);
    let routes = Routes::new(service)
        .add_service(operations)
        .add_service(crate::logging::service())
        .add_service(crate::health::service());
    front::serve(fronts, routes).await
}

/// What this program is: its own version, and Longhorn's API versions that it understands.
pub fn version() -> ptypes::VersionOutput {
    ptypes::VersionOutput {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        git_commit: String::new(),
        build_date: String::new(),
        cli_api_version: CLI_API.0,
        cli_api_min_version: CLI_API.1,
        controller_api_version: CONTROLLER_API.0,
        controller_api_min_version: CONTROLLER_API.1,
        data_format_version: DATA_FORMAT.0,
        data_format_min_version: DATA_FORMAT.1,
    }
}
