//! What goes into the machine and what comes out: the whole contract between [`Core`](super::Core) and whoever drives
//! it, the process with its ring or a simulation.
//!
//! - The driver names connections ([`ConnId`], never used twice) and requests ([`RequestId`], a place in its own
//!   table, free again once the machine has put out [`Output::Reply`] or [`Output::Drop`] for it). Every
//!   [`Input::Message`] ends in exactly one of the two.
//! - Every [`Output::Store`], [`Output::Sync`], [`Output::Describe`], [`Output::Map`] and [`Output::Persist`] is answered by exactly
//!   one input, in any order. `Persist` and `Describe` are carried out in the order in which they were put out, but for
//!   [`Record::Intent`], which may run beside all others.
//! - After [`Output::Close`] or [`Output::Refuse`] the connection is gone for the machine: the driver drops what it
//!   has not read of it, and sends no further input for it.

use lh_block::{Epoch, Extent, Generation, Instance};
use lh_wire::handshake::Verdict;
use lh_wire::{ChainOp, Control, Header, Keep, LayerInfo, MapPage, Outsider, ReplicaState};

/// A connection. The driver never gives the same number twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u64);

/// A request in flight: a small number, used again after its end, by which the driver keeps the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u32);

/// Names one [`Output::Persist`]; counts up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PersistId(pub u64);

/// The part of a hello that decides about sessions. Key, names and version were checked by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionHello {
    /// The engine's generation.
    pub generation: Generation,
    /// The engine process.
    pub instance: Instance,
    /// All connections of a session carry the same number.
    pub session: Instance,
    /// Number of the connection's queue.
    pub queue: u16,
    /// Connections of the session.
    pub queues: u16,
}

/// What the records in the directory say when it is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Volume size in bytes.
    pub size: u64,
    /// The last fence: the highest generation ever accepted and whose it was. `None`: there never was one.
    pub fence: Option<(Generation, Instance)>,
    /// The last epoch stored.
    pub epoch: Option<Epoch>,
    /// The chain operation that was prepared, and neither carried out nor taken back.
    pub prepared: Option<(Instance, ChainOp)>,
    /// The last chain operation that was carried out.
    pub committed: Option<Instance>,
    /// Bytes in a chunk of the intent bitmap, a power of two.
    pub intent_chunk: u64,
    /// Marked ranges of the intent bitmap.
    pub intent: Vec<Extent>,
    /// The directory had been closed cleanly (or is new).
    pub clean: bool,
    /// The host has kept its power since [`Record::Whole`].
    pub powered: bool,
    /// Whom the trails are kept for.
    pub out: Vec<Outsider>,
    /// Trails that were saved, by chunk of the intent bitmap.
    pub missed: Vec<(u64, Trail)>,
}

/// Which units of a chunk of the intent bitmap were written: 1024 bits, the lowest of the first word first. A unit is a
/// 1024th of the chunk, but never less than a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trail(pub [u64; 16]);

impl Trail {
    /// Bits in a word.
    pub(super) const BITS: u32 = u64::BITS;
}

/// What happens to a replica.
#[derive(Clone, Debug)]
pub enum Input {
    /// A connection has proved the key and asks to be let in.
    Hello {
        /// The connection.
        conn: ConnId,
        /// Who comes.
        hello: SessionHello,
    },
    /// A whole message has arrived, its payload checked.
    Message {
        /// From where.
        conn: ConnId,
        /// The place that the driver keeps its payload in.
        request: RequestId,
        /// Its header.
        header: Header,
        /// Its payload, if it is a control message that could be read.
        control: Option<Box<Control>>,
    },
    /// The connection broke, or was closed by its peer.
    Closed {
        /// Which.
        conn: ConnId,
    },
    /// A store job ended.
    Done {
        /// Whose.
        request: RequestId,
        /// What came of it.
        result: Result<Completed, Failure>,
    },
    /// The answer to [`Output::Describe`].
    Described {
        /// Whose.
        request: RequestId,
        /// What the directory says; the machine adds what only it knows.
        result: Result<Box<ReplicaState>, Failure>,
    },
    /// The answer to [`Output::Map`].
    Mapped {
        /// Whose.
        request: RequestId,
        /// What the layer holds.
        result: Result<Box<MapPage>, Failure>,
    },
    /// The sync ended.
    Synced {
        /// Whether all is on stable storage.
        result: Result<(), Failure>,
    },
    /// Nobody knows any more what the directory holds: a sync that nobody asked for has failed, or the store could not
    /// note what had become of a request. The replica fails for good. Answers that are owed still come.
    Broken,
    /// A record is durable, or is not and never will be.
    Persisted {
        /// Which.
        id: PersistId,
        /// What came of it.
        result: Result<(), Failure>,
    },
    /// Time passed; see [`Core::wake_at`](super::Core::wake_at).
    Tick,
}

/// What a finished store job gives to the answer's header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completed {
    /// Bytes of payload that the driver holds for the answer.
    pub payload: u32,
    /// [`Header::aux`] of the answer. Of a write that is done up to a block and found no space behind it: [`lh_wire::in_part`].
    pub aux: u32,
    /// The answer has to wait for a sync that begins from now on, as if the request had been FUA.
    pub sync: bool,
}

/// Why something was not done. Each variant is another answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The file system is full; nothing was changed.
    NoSpace,
    /// The file system is full; part of it may have been done before.
    FullInPart,
    /// The disk failed.
    Io,
    /// The request makes no sense.
    Invalid,
    /// A block does not fit its checksum on record.
    Rotten,
    /// Refused; one sentence for people.
    Refused(Box<str>),
}

impl Failure {
    /// The same of something that may have been done in part.
    pub fn in_part(self) -> Self {
        if self == Self::NoSpace { Self::FullInPart } else { self }
    }
}

/// Work on the layers. The request's payload is with the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// The bytes of the range through the chain.
    Read(Extent),
    /// The payload into the head.
    Write(Extent),
    /// The range reads as zero.
    Zero(Extent),
    /// The range reads as zero, its space is given back.
    Unmap(Extent),
    /// What the layer named in the payload holds of the range.
    ReadLayer {
        /// Where.
        range: Extent,
        /// What the layers below hold counts as its own.
        merged: bool,
    },
    /// Makes the range of a layer as the payload says.
    PutLayer {
        /// Where.
        range: Extent,
        /// Bytes of trailer at the payload's end.
        trailer: u32,
    },
    /// Checksums of what the layer named in the payload holds of the range.
    DigestLayer(Extent),
    /// Where what a layer holds of the range differs from the digest in the payload.
    CompareLayer(Extent),
    /// Say of each block of a layer whether it fits its checksum on record.
    VerifyLayer(Extent),
    /// Where the blocks of the range are, within a piece.
    Places(Extent),
    /// Which blocks of the range hold data.
    Allocation(Extent),
}

impl Job {
    /// True for what changes the layers.
    pub const fn is_write(self) -> bool {
        matches!(self, Self::Write(_) | Self::Zero(_) | Self::Unmap(_) | Self::PutLayer { .. })
    }

    /// True for what works on layers' bytes. Where blocks are is answered from the index that is there at that moment: an engine asks
    /// it beside whatever it has paused, and layers may change before the answer, which then says that nothing is granted.
    pub const fn touches_layers(self) -> bool {
        !matches!(self, Self::Places(_))
    }

    /// The range.
    pub const fn range(self) -> Extent {
        match self {
            Self::Read(range)
            | Self::Write(range)
            | Self::Zero(range)
            | Self::Unmap(range)
            | Self::ReadLayer { range, .. }
            | Self::DigestLayer(range)
            | Self::CompareLayer(range)
            | Self::VerifyLayer(range)
            | Self::Places(range)
            | Self::Allocation(range)
            | Self::PutLayer { range, .. } => range,
        }
    }
}

/// A change of the directory's records: answered when it is on stable storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// The directory is about to be used: the mark of a clean close is taken back.
    Begin {
        /// Of the engine that is going to use it.
        generation: Generation,
    },
    /// Older generations are refused from now on, for ever.
    Fence {
        /// The generation.
        generation: Generation,
        /// The engine that has it.
        instance: Instance,
    },
    /// The epoch that counts, and whom the trails are kept for from now on. Trails that were saved are of no use any
    /// more if there is nobody.
    Epoch {
        /// The epoch.
        epoch: Epoch,
        /// Who is out.
        out: Vec<Outsider>,
    },
    /// Chunks of the intent bitmap, by number.
    Intent {
        /// Marked from now on.
        mark: Vec<u64>,
        /// Marked no more.
        clear: Vec<u64>,
    },
    /// Trails of chunks, in the place of what was saved of them before.
    Missed {
        /// By number of the chunk.
        trails: Vec<(u64, Trail)>,
    },
    /// A chain operation is made ready.
    Prepare {
        /// The decision.
        id: Instance,
        /// The operation.
        op: ChainOp,
    },
    /// The prepared operation is carried out: the switch. No write is in flight if it is a snapshot.
    Commit {
        /// The decision.
        id: Instance,
    },
    /// The prepared operation is taken back.
    Abort {
        /// The decision.
        id: Instance,
    },
    /// The layers up to this snapshot are on stable storage on every member.
    Settled {
        /// Name of the snapshot.
        snapshot: String,
    },
    /// Unusable alone; the chain is replaced by empty layers. The intent bitmap keeps its marks. Nothing is in flight.
    RebuildBegin {
        /// Volume size in bytes.
        size: u64,
        /// The layers, base first, the head last.
        chain: Vec<LayerInfo>,
        /// What layers of the same name hold stays.
        keep: Option<Keep>,
    },
    /// Everything that was answered is here, on this boot of the host. ([`Record::RebuildEnd`] says so, too, and
    /// [`Record::Begin`] after a clean close.)
    Whole,
    /// The mark of [`Record::RebuildBegin`] is taken back. All layers were synced before.
    RebuildEnd,
    /// A fold begins: answered when it runs. Nothing of it is durable before.
    Fold {
        /// Name of the removed snapshot.
        name: String,
        /// How many bytes may be copied in a second.
        bytes_per_second: Option<u64>,
    },
    /// The fold that runs is told to stop.
    FoldStop,
    /// Checksums of these snapshots are to be taken; durable at once, since nothing is to be kept.
    Hash {
        /// Their names.
        snapshots: Vec<String>,
        /// How many bytes may be read in a second; `None`: no limit.
        bytes_per_second: Option<u64>,
    },
    /// No more of that.
    HashStop,
    /// Closed cleanly: nothing is marked in the intent bitmap any more. Nothing is in flight, all was synced before.
    Close,
}

/// Why the machine closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// Another session took its place.
    Superseded,
    /// Another connection of its session ended.
    SessionEnded,
    /// More requests in flight than the protocol allows.
    TooMany,
    /// A message before the welcome.
    Protocol,
}

/// What goes behind the header of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Nothing.
    None,
    /// What the store job left with the driver, [`Completed::payload`] bytes.
    Data,
    /// One sentence for people.
    Text(Box<str>),
    /// The answer to [`Control::State`].
    State(Box<ReplicaState>),
    /// The answer to [`Control::Missed`] and [`Control::LayerMap`].
    Map(Box<MapPage>),
}

/// What is to be done.
#[derive(Clone, Debug)]
pub enum Output {
    /// Lets the connection in: earlier sessions are drained, the fence is durable.
    Welcome {
        /// The connection.
        conn: ConnId,
        /// The fence's generation.
        generation: Generation,
    },
    /// Sends the connection away.
    Refuse {
        /// The connection.
        conn: ConnId,
        /// Why.
        verdict: Verdict,
        /// The highest generation seen.
        generation: Generation,
    },
    /// Answers a request, whose place is then free. `payload`, `pad`, `payload_crc` and the CRC flag of the header
    /// are the driver's to fill in; `payload` is set for [`Body::Data`].
    Reply {
        /// The connection.
        conn: ConnId,
        /// The request.
        request: RequestId,
        /// The answer's header.
        header: Header,
        /// What goes behind it.
        body: Body,
    },
    /// The request gets no answer, its place is free.
    Drop {
        /// The request.
        request: RequestId,
    },
    /// Work on the layers.
    Store {
        /// Whose.
        request: RequestId,
        /// What.
        job: Job,
    },
    /// Everything that store jobs have written so far, in every layer, goes to stable storage: data, then zero maps.
    /// Never two at once.
    Sync,
    /// What the directory says of itself.
    Describe {
        /// Whose.
        request: RequestId,
    },
    /// Where a layer holds data or zeroes, from a place on.
    Map {
        /// Whose.
        request: RequestId,
        /// Name of the layer; empty for the head.
        layer: String,
        /// Nothing before this byte.
        from: u64,
        /// Also where it should hold data by its checksums.
        recorded: bool,
    },
    /// A record is to be made durable.
    Persist {
        /// Named in the answer.
        id: PersistId,
        /// Which.
        record: Record,
    },
    /// Closes a connection that was let in, or still waits to be.
    Close {
        /// The connection.
        conn: ConnId,
        /// Why.
        reason: CloseReason,
    },
}
