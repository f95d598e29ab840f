//! One device queue: admission, fan-out, answers, retry, slow and dead members.
//!
//! A queue is a pure machine: [`Queue::apply`] takes one input and the time and pushes what is to be done. It never
//! sees a byte of data. The driver keeps the data by slot number: the client's bytes of a write, and *stored* bytes
//! that came from a replica. What always holds:
//!
//! - Nothing is sent for a range that is not claimed ([`crate::order`]), apart from copies of layers that never change.
//! - A write is answered `Ok` only when every attached member has done it; a member is dropped from that only by
//!   [`Switch::Forget`](crate::message::Switch::Forget), which means: an epoch without it is durable.
//! - A write's claim is given back when no member can act on it any more *and* its answer has left the process.
//! - A read is answered from a member that was readable then, and only if every attached member was heard within
//!   [`LEASE`].
//! - Waiting is the answer to everything that may pass; errors are for requests that can never succeed, for a block
//!   that no member can read, for `ioTimeout` with too few members, for what unmaps on full disks, and for the end of the engine.
//! - Once a member said that it belongs to a younger engine, nothing comes out any more.

mod admission;
mod flush;
mod full;
mod health;
mod jobs;
mod latency;
mod members;
mod read;
mod sabotage;
mod slot;
mod stats;
mod switches;
mod tag;
mod tally;
mod window;
mod write;

use std::collections::VecDeque;
use std::sync::Arc;

use lh_block::{Extent, IoError, Op};
use lh_wire::{OpCode, Status};

use crate::message::{ControlId, FromQueue, Job, JobId, LayerRef, MemberId, MemberSet, QueueId, ToQueue};
use crate::order::{Claim, Kind, Outcome, Table, Ticket};
use crate::shared::Shared;

pub use sabotage::Sabotage;
pub use stats::{Counters, Stats};
pub use tag::PLACES;
pub use tally::Tally;

use flush::Flush;
use health::Clock;
use members::Members;
use slot::{SLOTS_MAX, Slot, SlotSet, Stage};
use switches::{Barrier, Mode};
use tag::Tag;
use window::Window;

/// A read is answered only if every attached member was heard within this time, ns (`docs/invariants.md`, 12). A new
/// engine that could not fence a member waits twice as long before its first answer.
pub const LEASE: u64 = 2_000_000_000;

/// Slots for jobs of the conductor, behind those of the clients. Each may hold an image of 1 MiB.
pub const JOB_SLOTS: u16 = 8;

/// How a queue is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Bytes of the volume, a multiple of 4096.
    pub size: u64,
    /// Every client range is a multiple of this: 512 or 4096.
    pub logical_block: u32,
    /// Longest read or write of a client in bytes, at most [`lh_wire::MAX_DATA`].
    pub max_transfer: u32,
    /// Client slots: requests in the queue at one time. At most 504.
    pub depth: u16,
    /// How long requests wait while too few members are there to go on; 0 for ever.
    pub io_timeout_ns: u64,
    /// Members compare what a read gives with their checksums on record.
    pub verify: bool,
}

/// An answer of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Who answers.
    pub member: MemberId,
    /// The tag of the request.
    pub tag: u64,
    /// Its operation.
    pub op: OpCode,
    /// How it ended.
    pub status: Status,
    /// From the header.
    pub aux: u32,
    /// Bytes of payload that came with it. They are gone after this input unless [`Output::Store`] takes them.
    pub payload: u32,
}

/// What happens to a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A client's request in a free slot below `depth`.
    Request {
        /// The slot; taken until [`Output::Free`].
        slot: u16,
        /// What to do.
        op: Op,
        /// Where; empty for a flush.
        range: Extent,
    },
    /// The answer of a slot whose [`Output::Complete`] said `held` has left the process.
    Answered {
        /// The slot.
        slot: u16,
    },
    /// The client of a slot is gone: what of its request was not begun is not done. It is answered all the same.
    Abandoned {
        /// The slot.
        slot: u16,
    },
    /// The driver has looked whether the clients of those are still there that [`Queue::looks`] tells of.
    Looked,
    /// Requests outside may go on: the driver has looked whether their clients are still there. Wanted while
    /// [`Queue::lets_in`].
    LetIn,
    /// A member answered.
    Reply(Reply),
    /// What was asked of a member was read in its files instead, on this host, or it is of a version that has no answer to it: it
    /// ends as if the member had answered, but is no sign of life of it.
    LocalRead(Reply),
    /// This queue has a new connection to the member; its handshake is done.
    LinkUp {
        /// To whom.
        member: MemberId,
    },
    /// The connection broke. No reply of it follows.
    LinkDown {
        /// To whom.
        member: MemberId,
    },
    /// A claim that waited is granted; from another queue's [`Output::Wake`].
    Granted {
        /// Whose.
        ticket: Ticket,
    },
    /// The conductor says something.
    Message(ToQueue),
    /// Time passes. Every 50 to 100 ms while [`Queue::wants_tick`].
    Tick,
}

/// The payload of a request to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// None.
    None,
    /// Bytes `from .. from + range.len` of what the client sent.
    Client {
        /// The slot.
        slot: u16,
        /// Byte offset in the client's data.
        from: u32,
    },
    /// What is stored for the slot.
    Stored {
        /// The slot.
        slot: u16,
    },
    /// The name of a layer; `None` is the head, whose name is empty.
    LayerName(Option<LayerRef>),
    /// The payload of a control request.
    Control(ControlId),
}

/// A request to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// To whom, on this queue's connection.
    pub member: MemberId,
    /// For the header.
    pub tag: u64,
    /// For the header.
    pub op: OpCode,
    /// For the header; whole blocks.
    pub range: Extent,
    /// For the header's flags.
    pub fua: bool,
    /// For the header's flags: blocks are compared with their checksums on record.
    pub verify: bool,
    /// For the header: the last flush complete on every member; in a flush its own number.
    pub flush: u64,
    /// For the header.
    pub aux: u32,
    /// What goes with it.
    pub data: Data,
}

/// What is to be done, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send a request. Dropped if the connection is gone.
    Send(Transmit),
    /// The payload of the reply that is being applied becomes stored bytes of the slot.
    Store {
        /// The slot.
        slot: u16,
        /// Behind what is stored already; else in its place.
        append: bool,
    },
    /// Overlay the stored block with bytes of the client's data, or with zeroes if the client sent none.
    Merge {
        /// The slot.
        slot: u16,
        /// First byte in the stored block.
        at: u32,
        /// First byte in the client's data.
        from: u32,
        /// Bytes.
        len: u32,
    },
    /// Answer the client.
    Complete {
        /// The slot.
        slot: u16,
        /// What became of the request.
        result: Result<(), IoError>,
        /// Of a successful read: first byte in the stored bytes, and how many are the client's.
        part: Option<(u32, u32)>,
        /// [`Input::Answered`] is needed when the answer has left the process; the slot is not free before.
        held: bool,
    },
    /// The slot is free: its data may go.
    Free {
        /// The slot.
        slot: u16,
    },
    /// Give `ticket` to `queue` as [`Input::Granted`].
    Wake {
        /// Which queue.
        queue: QueueId,
        /// Which claim.
        ticket: Ticket,
    },
    /// Tell the conductor.
    Report(FromQueue),
    /// The payload of the reply that is being applied answers a control request: give it to the conductor.
    ControlReply {
        /// Which.
        id: ControlId,
        /// Who answers.
        member: MemberId,
        /// How it ended.
        status: Status,
    },
    /// Close the connection: nothing goes out on it or comes in from it any more.
    Disconnect {
        /// To whom.
        member: MemberId,
    },
}

/// One device queue.
#[derive(Debug)]
pub struct Queue {
    config: Config,
    id: QueueId,
    table: Arc<Table>,
    shared: Arc<Shared>,
    stats: Arc<Stats>,
    mode: Mode,
    /// A younger engine exists: nothing comes out any more.
    fenced: bool,
    members: Members,
    slots: Vec<Slot>,
    /// Slots that are not free.
    used: SlotSet,
    /// Client requests that hold or wait for a claim, or were sent.
    in_flight: SlotSet,
    /// Reads that have their data and wait until every member was heard.
    held: SlotSet,
    /// By slot: who has answered the read of its present piece with an error of its disk. It tells that of those alone who were tried
    /// for that piece.
    unread: Vec<MemberSet>,
    /// Requests that wait outside, in order of arrival; and the same list's other half while it is gone through.
    parked: VecDeque<u16>,
    parked_before: VecDeque<u16>,
    /// Something has changed for those outside: they are tried again.
    let_in: bool,
    /// Clients may give a request up, and send it again elsewhere.
    watched: bool,
    /// What changes data, holds its range, and waits until its client was looked for.
    looking: VecDeque<u16>,
    /// Own claims that were granted and not yet acted on.
    ready: VecDeque<u16>,
    granted: Vec<Claim>,
    window: Window,
    flush: Flush,
    /// Jobs that wait for a slot.
    jobs: VecDeque<(JobId, Job)>,
    barriers: Vec<Barrier>,
    clock: Clock,
    /// Since when too few members can be read from, and no write was answered, ns.
    dark_since: Option<u64>,
    pings: u32,
    /// A job has ended: the next may start.
    job_slot_free: bool,
    /// Requests so far; and when the last one came, ns.
    requests: u64,
    last_request: u64,
    /// When [`Shared::note_activity`] was last called, ns.
    noted: u64,
    #[cfg(feature = "sabotage")]
    sabotage: Option<Sabotage>,
}

impl Queue {
    /// A queue that is paused and has no members.
    ///
    /// # Panics
    /// If `depth` is above its limit.
    pub fn new(config: Config, id: QueueId, table: Arc<Table>, shared: Arc<Shared>) -> Self {
        let slots = usize::from(config.depth) + usize::from(JOB_SLOTS);
        assert!(slots <= SLOTS_MAX, "a queue has at most {SLOTS_MAX} slots");
        Self {
            config,
            id,
            table,
            shared,
            stats: Arc::new(Stats::default()),
            mode: Mode::Paused,
            fenced: false,
            members: Members::new(),
            slots: (0..slots).map(|_| Slot::new()).collect(),
            used: SlotSet::default(),
            in_flight: SlotSet::default(),
            held: SlotSet::default(),
            unread: vec![MemberSet::EMPTY; slots],
            parked: VecDeque::with_capacity(slots),
            parked_before: VecDeque::with_capacity(slots),
            let_in: false,
            watched: false,
            looking: VecDeque::with_capacity(slots),
            ready: VecDeque::with_capacity(slots),
            granted: Vec::with_capacity(slots),
            window: Window::new(slots),
            flush: Flush::default(),
            jobs: VecDeque::new(),
            barriers: Vec::new(),
            clock: Clock::default(),
            dark_since: None,
            pings: 0,
            job_slot_free: false,
            requests: 0,
            last_request: 0,
            noted: 0,
            #[cfg(feature = "sabotage")]
            sabotage: None,
        }
    }

    /// The counters; any thread may read them.
    pub const fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    /// Bytes of the volume.
    pub const fn size(&self) -> u64 {
        self.config.size
    }

    /// True if a member said that a younger engine has the volume.
    pub const fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// True if the queue needs [`Input::Tick`]: something is under way, or was a moment ago. An idle queue needs none.
    pub fn wants_tick(&self, now: u64) -> bool {
        const LINGER: u64 = 1_000_000_000;
        !self.used.is_empty()
            || now.saturating_sub(self.last_request) < LINGER
            || Members::ids().any(|m| self.members[m].ping.is_some() || !self.members[m].controls.is_empty())
    }

    /// True if requests that wait outside may go on, and want [`Input::LetIn`]. They stand in no order with others: what their client
    /// has given up and sent again elsewhere may be done by now, and something newer over it.
    pub fn lets_in(&self) -> bool {
        self.let_in && self.mode != Mode::Paused && !self.parked.is_empty() && !self.fenced
    }

    /// Says whether clients may give requests up, and send them again elsewhere: what changes data goes on then only once its client
    /// was looked for after its range was claimed.
    pub const fn watch(&mut self, watched: bool) {
        self.watched = watched;
    }

    /// True if requests hold their ranges and want [`Input::Looked`].
    pub fn looks(&self) -> bool {
        !self.looking.is_empty() && !self.fenced
    }

    /// Takes one input and pushes what is to be done. `now` is in nanoseconds and never goes back.
    ///
    /// # Panics
    /// If the driver breaks the contract: a request in a slot that is not free.
    pub fn apply(&mut self, now: u64, input: Input, out: &mut Vec<Output>) {
        if self.fenced {
            return;
        }
        match input {
            Input::Request { slot, op, range } => self.request(now, slot, op, range, out),
            Input::Answered { slot } => self.answered(slot, out),
            Input::Abandoned { slot } => self.abandoned(now, slot, out),
            Input::LetIn => self.let_in(now, out),
            Input::Looked => self.looked(now, out),
            Input::Reply(reply) => self.reply(now, reply, out),
            Input::LocalRead(reply) => self.read_here(now, &reply, out),
            Input::LinkUp { member } => self.link_up(now, member, out),
            Input::LinkDown { member } => self.link_down(now, member, out),
            Input::Granted { ticket } => self.ready.push_back(ticket.0),
            Input::Message(ToQueue::Switch(id, switch)) => self.switch(now, id, switch, out),
            Input::Message(ToQueue::Job(id, job)) => self.job(now, id, job, out),
            Input::Message(ToQueue::Control(id, member)) => self.control(now, id, member, out),
            Input::Message(ToQueue::ChunkResolved(chunk)) => self.chunk_resolved(chunk),
            Input::Tick => self.tick(now, out),
        }
        self.run(now, out);
    }

    /// Carries on what the input has made possible.
    fn run(&mut self, now: u64, out: &mut Vec<Output>) {
        while !self.fenced {
            if let Some(s) = self.ready.pop_front() {
                self.claimed(now, s, out);
            } else if let Some(s) =
                self.window.first_waiter().filter(|s| self.window.has_room(self.slot(*s).piece.whole.len))
            {
                self.window.stop_waiting(s);
                self.send_fan(now, s, out);
            } else if self.job_slot_free {
                self.start_waiting_jobs(now, out);
            } else {
                break;
            }
        }
    }

    fn tick(&mut self, now: u64, out: &mut Vec<Output>) {
        self.note_serving(now);
        self.check_health(now, out);
        self.retry_full(now, out);
        if !self.held.is_empty() {
            self.recheck_held(now, out);
        }
        if self.is_timed_out(now) {
            self.expire(now, out);
        }
    }

    fn slot(&self, s: u16) -> &Slot {
        &self.slots[usize::from(s)]
    }

    fn slot_mut(&mut self, s: u16) -> &mut Slot {
        &mut self.slots[usize::from(s)]
    }

    /// Claims a range for a slot. If it is not granted at once, the slot waits in [`Stage::Claiming`].
    fn claim(&mut self, s: u16, range: Extent, kind: Kind) -> Outcome {
        if self.lacks(Sabotage::NoOrder) || (kind == Kind::Shared && self.lacks(Sabotage::UnclaimedReads)) {
            return Outcome::Granted;
        }
        let claim = Claim { queue: self.id, ticket: Ticket(s), range, kind };
        self.slot_mut(s).claim = Some(claim);
        let outcome = self.table.claim(claim);
        if outcome == Outcome::Waits {
            self.slot_mut(s).enter(Stage::Claiming);
        }
        outcome
    }

    /// Gives a slot's claim back, if it holds one.
    fn release(&mut self, s: u16, out: &mut Vec<Output>) {
        let Some(claim) = self.slot_mut(s).claim.take() else { return };
        self.granted.clear();
        self.table.release(claim, &mut self.granted);
        for g in &self.granted {
            if g.queue == self.id {
                self.ready.push_back(g.ticket.0);
            } else {
                out.push(Output::Wake { queue: g.queue, ticket: g.ticket });
            }
        }
    }

    /// Ends the use of a slot.
    fn free(&mut self, s: u16, out: &mut Vec<Output>) {
        let slot = self.slot_mut(s);
        slot.enter(Stage::Free);
        slot.work = slot::Work::None;
        self.used.remove(s);
        if s < self.config.depth {
            self.stats.gone();
        }
        if self.used.is_empty() {
            // Nothing ticks for a queue without requests.
            self.stats.starved(false);
        }
        out.push(Output::Free { slot: s });
    }
}

#[cfg(test)]
mod tests;
