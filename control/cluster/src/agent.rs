//! What the manager of a node asks that node: its instance manager, its engines and replicas, its disks.
//!
//! [`Agent`] is the edge: `LocalAgent` speaks gRPC with the real thing, the tests fake it. Everything a decision needs
//! is read first and handed over as plain values.

mod at_disk;
mod bounded;
mod command;
mod device;
mod disk;
mod kept;
mod level;
mod local;
mod reach;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use control::chain::Layer;
use control::logging::Level;
use lh_block::Generation;
use thiserror::Error;
use tonic::{Code, Status, async_trait};

use crate::api::{EngineSpec, InstanceState, ReplicaMode, ReplicaSpec, SnapshotLimits};

pub(crate) use bounded::Bounded;
pub use bounded::PATIENCE;
pub(crate) use command::authority_at;
pub use command::{engine_command, replica_command};
pub use disk::{DISK_CONFIG, inspect};
pub use local::LocalAgent;
pub use reach::Reach;

/// A process of the instance manager.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessView {
    /// What it is doing.
    pub state: InstanceState,
    /// Why it ended; empty if it did not.
    pub error: String,
    /// Another one for every process that was ever created.
    pub uuid: String,
    /// The TCP port that it was given; `None`: none.
    pub port: Option<u16>,
    /// The program that it was told to run; empty for the instance manager's own.
    pub binary: String,
    /// Where it was told that the volume's engine serves relays; empty for what is no relay.
    pub relay_from: String,
    /// Where it was told to ask for its volume's authority; empty for what is no engine.
    pub authority: String,
}

/// A replica as its engine sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineReplica {
    /// Its name.
    pub name: String,
    /// Where it is reached.
    pub address: String,
    /// What it is.
    pub mode: ReplicaMode,
    /// Why it is not RW; empty if it is.
    pub reason: String,
    /// Per cent of a running rebuild.
    pub rebuild_progress: i32,
}

/// One device. Another one at the same path is another one, and so is everything after the node was started anew.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceId {
    /// The node's boot.
    pub boot: String,
    /// The kernel's number of the disk, which it gives only once (`diskseq`, Linux 5.15).
    pub sequence: u64,
}

impl DeviceId {
    /// As it is written.
    pub fn parse(text: &str) -> Option<Self> {
        let (boot, sequence) = text.split_once('/')?;
        Some(Self { boot: boot.to_owned(), sequence: sequence.parse().ok()? })
    }
}

impl std::fmt::Display for DeviceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.boot, self.sequence)
    }
}

/// How the rebuilds of a volume are held back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RebuildLimits {
    /// Bytes that all of them together may copy in a second; 0: as much as they can.
    pub bytes_per_second: u64,
    /// How much each copies at once, in Longhorn's count of files: 1 is the least; 0: the engine does not tell.
    pub at_once: u32,
}

/// What an engine says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineView {
    /// The endpoint is usable, or there is to be none.
    pub up: bool,
    /// Bytes of the volume.
    pub size: u64,
    /// A device path or a URI; empty for none.
    pub endpoint: String,
    /// Which device that is, of all that there ever were; `None`: it is no device, or was not found.
    pub device: Option<DeviceId>,
    /// Its number.
    pub generation: Generation,
    /// What requests wait for; empty while they are answered.
    pub waiting_for: String,
    /// What was answered and not flushed may be lost with the power of every replica's host, and who wrote it has the volume open.
    pub has_lost: bool,
    /// An expansion goes on.
    pub expanding: bool,
    /// Beyond them it takes no snapshot.
    pub snapshot_limits: SnapshotLimits,
    /// How its rebuilds are held back.
    pub rebuild_limits: RebuildLimits,
    /// Its replicas.
    pub replicas: Vec<EngineReplica>,
    /// The layers, base first, the head last; `None`: the engine has not told them.
    pub chain: Option<Vec<Layer>>,
    /// Where the engine is that answers in its place; empty for an engine.
    pub relay_from: String,
}

/// How the trimming of a file system goes, or went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrimView {
    /// It is not through yet.
    pub running: bool,
    /// Bytes that the volume was told of so far.
    pub bytes: u64,
    /// Why it ended early; empty if it did not.
    pub error: String,
}

/// What a replica says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicaView {
    /// The highest generation that it has seen.
    pub generation: Generation,
    /// It has recorded an epoch.
    pub epoch_recorded: bool,
}

/// What was found where a disk should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskView {
    /// From its `longhorn-disk.cfg`, which is written where there is none.
    pub uuid: String,
    /// Tells two file systems apart.
    pub filesystem_id: String,
    /// For people: ext4, xfs and so on.
    pub filesystem_type: String,
    /// Bytes.
    pub maximum: u64,
    /// Bytes free for this program.
    pub available: u64,
    /// Directories below `replicas/`.
    pub directories: Vec<String>,
}

/// How to start an engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineStart<'a> {
    /// Its name.
    pub name: &'a str,
    /// What it is.
    pub spec: &'a EngineSpec,
    /// Its number, issued by the volume's authority for this start alone; the lowest one for a relay, which needs none.
    pub generation: Generation,
    /// Tells this stay of the volume on the node from earlier ones; empty: nothing does.
    pub stay: &'a str,
}

/// A process whose program is to be exchanged.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    /// An engine's, whose number becomes the next one whatever is said here.
    Engine(EngineStart<'a>),
    /// A replica's.
    Replica(&'a ReplicaSpec),
}

/// Why a node did not do what it was asked.
#[derive(Debug, Error)]
pub enum AgentError {
    /// Its instance manager does not answer: it may be starting, or gone.
    #[error("the instance manager of this node does not answer: {0}")]
    Away(String),
    /// The CSI driver of the node does not answer: it may be starting, or gone.
    #[error("the CSI driver of this node does not answer: {0}")]
    DriverAway(String),
    /// This build cannot do it. Asking again is useless.
    #[error("{0}")]
    Unbuilt(String),
    /// It would be beyond the volume's limits, until room is made.
    #[error("{0}")]
    NoRoom(String),
    /// The file system should have been frozen for a snapshot, and was not: there is no snapshot.
    #[error("{0}")]
    NotFrozen(String),
    /// It was refused or failed.
    #[error("{0}")]
    Failed(String),
    /// It was not answered in time. It may be done, or be done yet.
    #[error("the node was asked {0}, and did not answer within {1:?}")]
    Late(&'static str, Duration),
}

/// What a gRPC status means here.
fn refusal(status: &Status) -> AgentError {
    let text = status.message().to_owned();
    match status.code() {
        Code::Unavailable => AgentError::Away(text),
        Code::Unimplemented => AgentError::Unbuilt(text),
        _ => AgentError::Failed(text),
    }
}

/// One node.
#[async_trait]
pub trait Agent: Send + Sync + 'static {
    /// Every process, by name.
    async fn processes(&self) -> Result<BTreeMap<String, ProcessView>, AgentError>;

    /// One of them as it is now; `None`: there is none of that name. The others, of which there may be hundreds, are not read for it.
    async fn process(&self, name: &str) -> Result<Option<ProcessView>, AgentError> {
        Ok(self.processes().await?.remove(name))
    }

    /// Waits until a process changes. Returns at once after a change that nobody waited for.
    async fn changed(&self);

    /// Hears of changes for as long as it is polled, which is for ever.
    async fn listen(&self);

    /// Starts a replica's process, of the image that its spec names. One that is there already is left as it is.
    async fn start_replica(&self, name: &str, spec: &ReplicaSpec) -> Result<(), AgentError>;

    /// Starts an engine's process, of the image that its spec names. One that is there already is left as it is.
    async fn start_engine(&self, start: EngineStart<'_>) -> Result<(), AgentError>;

    /// Has the process of an engine, or of a replica, end and run the program that its image has here. An engine's device
    /// stays, and its number becomes the next one. The old program goes on if the new one cannot be run at all.
    async fn exchange(&self, name: &str, part: Part<'_>) -> Result<(), AgentError>;

    /// Has the process of a relay end and this one run under its device. Returns when that has begun, or has not for long.
    async fn take_over(&self, start: EngineStart<'_>) -> Result<(), AgentError>;

    /// Where the program of an image is on this node, or would be.
    fn program(&self, image: &str) -> PathBuf;

    /// True if the program of an image is on this node.
    async fn has_program(&self, image: &str) -> bool;

    /// Lays this program on the node as that of the image, unless it is there.
    async fn install_program(&self, image: &str) -> Result<(), AgentError>;

    /// Asks a process to end. It is gone when it is not listed any more.
    async fn stop(&self, name: &str) -> Result<(), AgentError>;

    /// Asks an engine how it is; `None`: it does not answer.
    async fn engine(&self, name: &str) -> Option<EngineView>;

    /// Asks a replica how it is; `None`: it does not answer.
    async fn replica(&self, name: &str) -> Option<ReplicaView>;

    /// Where an engine reaches the data of the replica of that name, whose process this is.
    fn replica_address(&self, name: &str, process: &ProcessView) -> String;

    /// Where relays reach the engine of that name, whose process this is.
    fn relay_address(&self, name: &str, process: &ProcessView) -> String;

    /// Lets a running engine have one more replica.
    async fn add_replica(&self, engine: &str, name: &str, address: &str) -> Result<(), AgentError>;

    /// Lets a running engine go on without a replica.
    async fn remove_replica(&self, engine: &str, name: &str) -> Result<(), AgentError>;

    /// Grows a volume.
    async fn expand(&self, engine: &str, size: u64) -> Result<(), AgentError>;

    /// Limits the snapshots that a running engine takes from now on.
    async fn limit_snapshots(&self, engine: &str, limits: SnapshotLimits) -> Result<(), AgentError>;

    /// Holds back the rebuilds of a running engine from now on.
    async fn limit_rebuilds(&self, engine: &str, limits: RebuildLimits) -> Result<(), AgentError>;

    /// Takes a snapshot. With `freeze` the file system that is mounted from the volume rests meanwhile, if one is; refused
    /// ([`AgentError::NotFrozen`]) where it cannot.
    async fn take_snapshot(
        &self,
        engine: &str,
        name: &str,
        labels: &BTreeMap<String, String>,
        freeze: bool,
    ) -> Result<(), AgentError>;

    /// Marks a snapshot for removal.
    async fn remove_snapshot(&self, engine: &str, name: &str) -> Result<(), AgentError>;

    /// Has the file system that is mounted from a volume tell the volume what it does not use, once for each request, and
    /// asks how that goes. Refused ([`AgentError::Failed`]) where there is none.
    async fn trim(&self, volume: &str, request: &str) -> Result<TrimView, AgentError>;

    /// Which volumes are shown as devices on this node, or were when their engines died, and of which stay each device is.
    async fn devices(&self) -> BTreeMap<String, String>;

    /// Takes away the device that a stay has left, also from those who use it: all that waits there fails. Refused
    /// ([`AgentError::Failed`]) while an engine of the volume runs; nothing is done where another stay has begun. `image`: whose program
    /// does it, that of an instance manager may be older.
    async fn end_stay(&self, volume: &str, stay: &str, image: &str) -> Result<(), AgentError>;

    /// Volumes of which something is kept on this node besides data, such as a key.
    async fn kept_volumes(&self) -> BTreeSet<String>;

    /// Removes what is kept of a volume besides data. Refused ([`AgentError::Failed`]) while its device is there.
    async fn forget_volume(&self, volume: &str) -> Result<(), AgentError>;

    /// Has the instance manager, all its processes and the CSI driver of the node log at this level from now on.
    async fn log_at(&self, level: Level) -> Result<(), AgentError>;

    /// Looks at what is at a disk's path.
    async fn inspect_disk(&self, path: PathBuf) -> Result<DiskView, String>;

    /// Removes a replica's directory. One that is not there is gone.
    async fn remove_directory(&self, disk_path: PathBuf, directory: String) -> Result<(), AgentError>;

    /// Lays the volume's key where engine and replicas read it.
    async fn store_key(&self, volume: &str, key: &[u8]) -> Result<(), AgentError>;
}
