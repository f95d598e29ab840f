//! What goes into the conductor and what comes out: the whole contract with whoever drives it, the engine's control
//! thread or a simulation.
//!
//! - Every [`Output::Connect`] is answered by exactly one [`Input::Connected`] or [`Input::ConnectFailed`]. Before
//!   `Connected` the driver has given every queue its link, so that whatever the conductor sends to a queue after it
//!   finds the link.
//! - [`Output::Disconnect`] closes the member's link in every queue, in order with the messages to that queue: what a
//!   queue says of the closed link it says before it answers a switch that was sent after `Disconnect`.
//! - Every [`Output::Control`] is answered by exactly one [`Input::Reply`] or [`FromQueue::ControlLost`].
//! - Every [`Output::StoreEpoch`] is answered by exactly one [`Input::AuthorityStored`], every [`Output::LoadEpoch`] by
//!   exactly one [`Input::AuthorityLoaded`]; the first of these comes unasked.
//! - After [`Output::Stop`] the machine says nothing any more.

use std::collections::BTreeMap;
use std::sync::Arc;

use lh_block::{Epoch, Generation, Instance, NameError, SNAPSHOTS_MAX};
use lh_wire::{Control, MapPage, ReplicaState};
use thiserror::Error;

use super::sabotage::Sabotage;
use crate::message::{ControlId, FromQueue, LayerRef, MemberId, QueueId, ToQueue};
use crate::shared::Shared;

pub use lh_block::Quorum;

/// A replica that the volume is configured with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaConfig {
    /// Its name, which epochs are made of.
    pub name: String,
    /// It runs on the engine's own host: preferred as a source.
    pub local: bool,
    /// It was added to a volume of one replica and has not been in sync since, as far as the record knows. With
    /// [`Quorum::Majority`] no majority has it and no start is decided with it before an epoch with it counts
    /// (`docs/decisions/0023-the-second-of-a-majority-learns-first.md`). Said of a replica that is not one of two, or with another
    /// quorum, it means nothing.
    pub learner: bool,
}

/// Times and other bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long a start that is possible waits for further members, and how long a volume that lost all waits for the
    /// others once one is back.
    pub grace_ns: u64,
    /// How long an engine waits before its first answer while an old one may still answer reads: twice the time for
    /// which a queue trusts its last answer of a member.
    pub lease_ns: u64,
    /// Between two attempts to connect.
    pub retry_ns: u64,
    /// For the answer to a control request. Pings find a hung replica sooner; this finds one that lost a request.
    pub control_ns: u64,
    /// As `control_ns`, for requests that sync several files one after the other while clients are served.
    pub control_syncs_ns: u64,
    /// As `control_ns`, for requests that sync or delete whole layers.
    pub control_long_ns: u64,
    /// Longest time between two attempts to rebuild a replica.
    pub rebuild_backoff_ns: u64,
    /// Between two rounds of taking back marks of the intent bitmap.
    pub clear_every_ns: u64,
    /// Written and not flushed for so long: the conductor flushes by itself, so that marks can be taken back.
    pub flush_after_ns: u64,
    /// For a clean shutdown as a whole.
    pub close_ns: u64,
    /// Copies in flight of one rebuild, and of one repair.
    pub copies: u32,
    /// Bytes that all rebuilds together may copy in a second; 0: as much as they can.
    pub rebuild_rate: u64,
    /// Bytes that a fold may copy in a second on each replica; 0: as much as it can.
    pub fold_rate: u64,
    /// Most snapshots of the volume, removed ones not counted; with those there are at most [`SNAPSHOTS_MAX`].
    pub snapshots: u32,
    /// No snapshot is taken once head and snapshots, removed ones not counted, take more bytes than that; 0: any.
    pub snapshot_bytes: u64,
}

/// A second in nanoseconds.
const SECOND: u64 = 1_000_000_000;

impl Default for Limits {
    fn default() -> Self {
        Self {
            grace_ns: 3 * SECOND,
            lease_ns: 4 * SECOND,
            retry_ns: SECOND,
            control_ns: 10 * SECOND,
            control_syncs_ns: 60 * SECOND,
            control_long_ns: 600 * SECOND,
            rebuild_backoff_ns: 60 * SECOND,
            clear_every_ns: 10 * SECOND,
            flush_after_ns: 60 * SECOND,
            close_ns: 60 * SECOND,
            copies: 4,
            rebuild_rate: 0,
            fold_rate: 0,
            snapshots: SNAPSHOTS_MAX.into(),
            snapshot_bytes: 0,
        }
    }
}

/// What a conductor is made with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of the volume, for messages to people.
    pub volume: String,
    /// The engine's generation, issued and durable.
    pub generation: Generation,
    /// The engine's process: a fresh random number.
    pub instance: Instance,
    /// When an epoch counts.
    pub quorum: Quorum,
    /// The replicas; a replica's place is its [`MemberId`].
    pub replicas: Vec<ReplicaConfig>,
    /// How many device queues there are.
    pub queues: u8,
    /// Size of the volume in bytes as its record says; the members know better.
    pub size: u64,
    /// Shared with the queues.
    pub shared: Arc<Shared>,
    /// The node's manager saw the engine before this one die: nobody answers reads any more.
    pub known_dead: bool,
    /// Times and bounds.
    pub limits: Limits,
    /// Mechanisms taken out, for tests.
    pub sabotage: Sabotage,
}

/// Names one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommandId(pub u64);

/// What people and the control plane ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Takes a snapshot.
    Snapshot {
        /// Its name; nothing else has it.
        name: String,
        /// Asked for by a user.
        user_created: bool,
        /// RFC 3339.
        created: String,
        /// Labels.
        labels: BTreeMap<String, String>,
    },
    /// Marks a snapshot as removed, so that replicas may fold it.
    RemoveSnapshot {
        /// Its name.
        name: String,
    },
    /// Makes the volume what a snapshot has. The device should not be in use: what is mounted does not see it.
    Revert {
        /// The snapshot's name.
        name: String,
        /// RFC 3339.
        created: String,
    },
    /// Grows the volume.
    Expand {
        /// Bytes: more than now, a multiple of 4096.
        size: u64,
        /// RFC 3339.
        created: String,
    },
    /// Brings the chain in the status up to date: what replicas have folded, what each layer takes. Done at once, with the
    /// status as it was, while there is no replica that could be asked.
    LookAtChain,
    /// Folds away every snapshot that is marked as removed, on each replica. Done as soon as that is begun: the status
    /// tells how far it is.
    Purge,
    /// Compares the replicas with each other and with their checksums, one scrub at a time. Done as soon as that is begun:
    /// the status tells how far it is and what it has found.
    Scrub {
        /// Repair what is rotten.
        repair: bool,
        /// How many bytes of the volume may be looked at in a second; 0: as much as it can.
        bytes_per_second: u64,
    },
    /// Ends the scrub that runs, if one does.
    ScrubStop,
    /// Changes some of the [`Limits`], at once.
    SetLimits(NewLimits),
    /// Adds a replica to the configuration. It is rebuilt and then a member.
    AddReplica(ReplicaConfig),
    /// Takes a replica out of the configuration, out of the epoch first. Not before the volume is open.
    RemoveReplica {
        /// Its name.
        name: String,
    },
    /// Puts a replica out and brings it back; everything that it holds is compared. Not before the volume is open.
    Rebuild {
        /// Its name.
        name: String,
    },
    /// Flushes, closes the replicas cleanly, and ends.
    Shutdown,
}

/// Those of the [`Limits`] that can be changed; `None`: as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewLimits {
    /// See [`Limits::copies`]; for rebuilds and repairs that begin from now on, and those that run.
    pub copies: Option<u32>,
    /// See [`Limits::rebuild_rate`].
    pub rebuild_rate: Option<u64>,
    /// See [`Limits::fold_rate`]; for folds that begin from now on.
    pub fold_rate: Option<u64>,
    /// See [`Limits::snapshots`].
    pub snapshots: Option<u32>,
    /// See [`Limits::snapshot_bytes`].
    pub snapshot_bytes: Option<u64>,
}

/// Most changes of the chain that wait at a time, each of them with its name and labels: more than anybody asks for who looks
/// at answers, and a few megabytes.
pub const CHANGES_MAX: usize = 1024;

/// Why a command was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CommandError {
    /// The name cannot be used.
    #[error(transparent)]
    Name(#[from] NameError),
    /// There is one of that name.
    #[error("{0} exists already")]
    Exists(String),
    /// There is none of that name.
    #[error("there is no {0}")]
    NotFound(String),
    /// At most [`Limits::snapshots`], removed ones not counted.
    #[error("the volume has {count} snapshots and may have {limit}: remove some first, or raise the limit")]
    TooManySnapshots {
        /// Those that it has.
        count: usize,
        /// Those that it may have.
        limit: usize,
    },
    /// At most [`SNAPSHOTS_MAX`], removed ones counted until they are folded. That is the format's, and no limit raises it.
    #[error(
        "the volume has {0} snapshots, counting removed ones that are not purged, and cannot have more: purge, and remove \
         some before that if none is removed"
    )]
    ChainFull(usize),
    /// [`Limits::snapshot_bytes`].
    #[error(
        "with another snapshot the volume's snapshots would take {bytes} bytes, the limit is {limit}: remove and \
         purge some first, or raise the limit"
    )]
    SnapshotsTooLarge {
        /// What they take.
        bytes: u64,
        /// What they may.
        limit: u64,
    },
    /// A size that is not larger, or not a multiple of the block.
    #[error(
        "the volume has {now} bytes and cannot become {wanted}: it only grows, by multiples of 4096 bytes"
    )]
    BadSize {
        /// As it is.
        now: u64,
        /// As it should be.
        wanted: u64,
    },
    /// At most [`CHANGES_MAX`], of which each waits until those before it are done.
    #[error(
        "{0} changes of the volume's chain wait for its replicas already: try again once it serves again"
    )]
    TooManyWait(usize),
    /// The snapshot is marked as removed.
    #[error("snapshot {0} is removed: it cannot be reverted to")]
    Removed(String),
    /// At most [`crate::message::MEMBERS_MAX`].
    #[error("the volume has {0} replicas, which is the limit")]
    TooManyReplicas(usize),
    /// With [`Quorum::Majority`] an epoch has more than half of the configured replicas. One more must not make that untrue.
    #[error(
        "of {replicas} replicas {needed} would have to be in sync, and {in_sync} {}: wait until the others are, or remove one that is \
         lost first", if *.in_sync == 1 { "is" } else { "are" }
    )]
    TooFewInSync {
        /// With the new one.
        replicas: usize,
        /// More than half of them.
        needed: usize,
        /// As it is.
        in_sync: usize,
    },
    /// Nobody else holds the data.
    #[error("replica {0} cannot leave: the others are not enough to go on")]
    Needed(String),
    /// Another one has lost its host's power, and gets back from this one alone what was answered and not flushed.
    #[error(
        "replica {0} cannot leave: another one lost what was not flushed with its host's power, and is getting it from this one: try \
         again when nothing is in doubt any more"
    )]
    Source(String),
    /// Which replicas hold everything is decided by the start of an engine, and it has not come so far.
    #[error(
        "replica {0} cannot leave: the volume is starting, and which of its replicas hold everything is not known yet: try again \
         when it has started"
    )]
    NotOpen(String),
    /// A replica said no.
    #[error("replica {replica}: {reason}")]
    Refused {
        /// Which.
        replica: String,
        /// Its own sentence.
        reason: String,
    },
    /// The head cannot be changed beside them.
    #[error(
        "requests from before wait for a replica, or for space on the replicas' disks, and the head cannot be changed until they \
         have ended: try again then"
    )]
    RequestsWait,
    /// One at a time.
    #[error(
        "a scrub of this volume runs already: wait for it, or cancel it with `longhornctl scrub VOLUME --cancel`"
    )]
    Scrubbing,
    /// The engine is ending.
    #[error("the volume is being stopped")]
    ShuttingDown,
}

/// Why a connection was not made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConnectError {
    /// Nobody answers, or not this protocol.
    #[error("{0}")]
    Unreachable(String),
    /// The replica has been fenced by a younger engine.
    #[error("the replica has seen generation {0}")]
    Stale(Generation),
    /// The replica does not let this engine in.
    #[error("{0}")]
    Refused(String),
}

/// What a control request was answered with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Done.
    Done,
    /// The answer to [`Control::State`].
    State(Box<ReplicaState>),
    /// The answer to [`Control::Missed`] and [`Control::LayerMap`].
    Map(Box<MapPage>),
}

/// Why a control request was not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A younger engine exists.
    Stale,
    /// Refused; the replica's own sentence.
    Said(String),
    /// The replica's disk is full; nothing was changed.
    NoSpace,
    /// The replica failed.
    Failed,
}

/// What the authority says to a compare-and-swap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Stored durably.
    Stored,
    /// Another epoch stands there.
    Conflict {
        /// Which.
        current: Option<Epoch>,
    },
    /// No answer, or none that can be relied on: it may be stored or not.
    Unavailable {
        /// For people.
        reason: String,
    },
}

/// What happens to a conductor.
#[derive(Clone, Debug)]
pub enum Input {
    /// The authority's epoch, once it answered; `None` if it never stored one. An authority that does not answer is
    /// asked again by the driver.
    AuthorityLoaded(Option<Epoch>),
    /// The answer to [`Output::StoreEpoch`].
    AuthorityStored(Stored),
    /// All connections are made: the replica is fenced for this engine and has drained.
    Connected {
        /// Which.
        member: MemberId,
        /// As in [`Output::Connect`].
        session: u64,
    },
    /// No connection.
    ConnectFailed {
        /// Which.
        member: MemberId,
        /// As in [`Output::Connect`].
        session: u64,
        /// Why.
        why: ConnectError,
    },
    /// The driver saw a connection end. Queues report what they see by themselves; this is for drivers that see more.
    Disconnected {
        /// Which.
        member: MemberId,
        /// As in [`Output::Connect`].
        session: u64,
    },
    /// The answer to [`Output::Control`].
    Reply {
        /// Which request.
        id: ControlId,
        /// Who answers.
        member: MemberId,
        /// What.
        result: Result<Body, Refusal>,
    },
    /// A queue says something.
    FromQueue(QueueId, FromQueue),
    /// Somebody wants something.
    Command(CommandId, Command),
    /// Time passed; see [`super::Conductor::wake_at`].
    Tick,
}

/// Why the engine has to end.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Why {
    /// All is flushed, the replicas are closed.
    #[error("closed")]
    Clean,
    /// Shut down before clients were served: nothing was written here, and the replicas are as this engine found them.
    #[error("stopped before the volume was open")]
    Unopened,
    /// Shut down, but the replicas could not be closed: the next start repairs.
    #[error("stopped without closing the replicas: {0}")]
    Unclean(String),
    /// A younger engine exists. No request may be answered any more, not even with an error.
    #[error("fenced off: {by}")]
    Stale {
        /// What is known of it.
        by: String,
        /// Its generation, if it is known.
        seen: Option<Generation>,
    },
}

impl Why {
    /// True if requests in flight must stay unanswered.
    pub const fn is_fenced(&self) -> bool {
        matches!(self, Self::Stale { .. })
    }
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// To a queue.
    ToQueue(QueueId, ToQueue),
    /// A control request, through the link of the first queue ([`ToQueue::Control`] and its payload).
    Control {
        /// Names it in the answer.
        id: ControlId,
        /// To whom.
        member: MemberId,
        /// What.
        control: Box<Control>,
    },
    /// To the authority: tell the epoch that counts now.
    LoadEpoch,
    /// To the authority: store the epoch if the one that is there has this order.
    StoreEpoch {
        /// Order of the epoch that is replaced; `None`: there is none.
        expected: Option<(Generation, u64)>,
        /// The new one.
        epoch: Epoch,
    },
    /// Make a session with the replica: a connection per queue.
    Connect {
        /// Which.
        member: MemberId,
        /// Its name.
        name: String,
        /// Counts up; named in the answer.
        session: u64,
    },
    /// End the session.
    Disconnect {
        /// Which.
        member: MemberId,
    },
    /// The replica is no longer one of the volume's; its place may be taken by another.
    Vacated {
        /// Which it was.
        member: MemberId,
    },
    /// This number stands for this layer from now on.
    NameLayer(LayerRef, String),
    /// The numbers so far stand for nothing any more.
    ForgetLayers,
    /// A command ended.
    CommandDone(CommandId, Result<(), CommandError>),
    /// The device may be shown; its size in bytes.
    Open {
        /// Bytes.
        size: u64,
    },
    /// The volume has grown; every queue knows. The device is to be told.
    Resized {
        /// Bytes.
        size: u64,
    },
    /// What clients were answered may be lost, and [`Shared`] says so to the queues. Should this engine die before a flush has told
    /// them, the next one on this host has to know; what follows this waits for the note.
    Lost,
    /// The engine ends. Unless [`Why::is_fenced`], every request was answered before.
    Stop(Why),
    /// [`super::Conductor::status`] says something new.
    StatusChanged,
    /// A line for the log.
    Log(String),
}
