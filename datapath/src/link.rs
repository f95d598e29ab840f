//! What drives a queue machine on a ring: the links to the replicas, the data of the requests, the thread's loop.
//!
//! - An [`EngineQueue`] is a [`Device`] for its frontend. Requests, replicas' answers and the frontend's own I/O complete
//!   on one ring in one thread; nothing on the way of a request goes to another thread or is allocated.
//! - The bytes of a write are the frontend's payload; the same pieces of memory go to every replica, and replicas on this host
//!   read those of longer writes where they lie. The bytes of a read are pieces of the stream that they came in.
//! - What comes from other threads comes as [`Mail`] in the queue's [`Mailbox`], in order.

mod connection;
mod data;
mod loan;
mod local_reads;
mod place_cache;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Duration;

use crossbeam_channel::Sender;
use lh_block::{Device, Done, Extent, Generation, Geometry, IoError, Request};
use lh_ring::{
    Bell, Completion, Inbox, Kept, Mailbox, OWNER_DEVICE, Payload, Pool, QueueDevice, Ring, Token, sys,
};
use lh_wire::{Header, OpCode, Status};

use crate::message::{ControlId, FromQueue, LayerRef, MEMBERS_MAX, MemberId, QueueId, ToQueue};
use crate::order::Ticket;
use crate::queue::{Data, Input, JOB_SLOTS, Output, PLACES, Queue, Reply, Transmit};

use connection::{Connection, Received, Terms};
use data::Slots;
pub use loan::{Loans, Offer, Unreturned};
pub use local_reads::Granted;
use local_reads::{LocalReads, Reading, Taken};
pub use place_cache::{Found, PlaceCache, Watch, Witness};

/// [`Token::kind`] of a read in a replica's file; those of links are the links' own.
const LOCAL_READ: u8 = 2;

/// Time between two ticks of a queue that wants them, ns.
const TICK_NS: u64 = 50_000_000;

/// A queue without memory for a receive looks again so soon.
const STARVED: Duration = Duration::from_millis(1);

/// Something for a queue thread.
#[derive(Debug)]
pub enum Mail {
    /// From the conductor.
    Message(ToQueue),
    /// The conductor's control request with this number and payload follows ([`ToQueue::Control`]).
    Control(ControlId, Vec<u8>),
    /// This number stands for this layer.
    NameLayer(LayerRef, String),
    /// A connection whose handshake is done: the replica looks at nothing any more that came before it.
    Link {
        /// To whom.
        member: MemberId,
        /// The socket.
        socket: OwnedFd,
        /// Payloads carry checksums.
        checksums: bool,
        /// The replica has the queue's memory mapped.
        lends: bool,
        /// The replica tells which blocks hold data.
        tells: bool,
    },
    /// The numbers so far stand for nothing any more.
    ForgetLayers,
    /// The session with the member is over.
    Close(MemberId),
    /// The member is no replica of the volume any more; its session is over.
    Vacated(MemberId),
    /// The member's replica has granted its files: reads of their blocks need not be sent.
    Places(MemberId, Box<Granted>),
    /// The grant of this number is over: its files are to be let go of.
    PlacesOver(MemberId, u32),
    /// A claim was granted by another queue.
    Granted(Ticket),
    /// The thread ends when its frontend has.
    End,
}

/// Something for the control thread.
#[derive(Debug)]
pub enum News {
    /// A queue says something.
    Report(QueueId, FromQueue),
    /// A control request was answered.
    Reply {
        /// Which.
        id: ControlId,
        /// By whom.
        member: MemberId,
        /// How.
        status: Status,
        /// With what.
        payload: Vec<u8>,
    },
}

/// What a queue thread is made of; may be sent to it.
#[derive(Debug)]
pub struct Parts {
    /// The machine.
    pub queue: Queue,
    /// Its number.
    pub id: QueueId,
    /// The engine's generation, for every header.
    pub generation: Generation,
    /// Sizes for the frontend. The size is kept up to date.
    pub geometry: Geometry,
    /// Where its mail comes from.
    pub inbox: Inbox<Mail>,
    /// The mailboxes of all queues, by number.
    pub peers: Vec<Mailbox<Mail>>,
    /// To the control thread.
    pub news: Sender<News>,
    /// To whoever connects: the memory that may be lent.
    pub offer: Offer,
}

/// A queue on its thread.
pub struct EngineQueue {
    queue: Queue,
    id: QueueId,
    generation: Generation,
    geometry: Geometry,
    inbox: Inbox<Mail>,
    peers: Vec<Mailbox<Mail>>,
    news: Sender<News>,
    /// When it began, on the clock that goes on while the host is suspended: the lease of reads ends meanwhile, too.
    began: Duration,
    /// Nanoseconds since then, as of the last completion, or as of the begin or the end of a turn of the ring.
    time: u64,
    pool: Pool,
    slots: Slots,
    links: [Option<Connection>; MEMBERS_MAX],
    /// What links lent that are gone.
    unreturned: Unreturned<Kept>,
    local_reads: LocalReads,
    /// Questions which blocks hold data to members that do not tell, and the numbers of their links.
    untold: VecDeque<(Transmit, u32)>,
    /// Reads that were done at once have ended since the last turn: their answers wait to be taken.
    answered_at_once: bool,
    /// Counts connections: completions of earlier ones are told by it.
    connections: u32,
    /// Reads whose parts there was no memory to put together, and when they begin again, ns: the earliest first. They have no slot, and
    /// one is left for each.
    again: VecDeque<(u64, u64, Extent)>,
    /// Answers for the frontend, and the slot if its range is held until the answer has left.
    done: VecDeque<(Done<Payload>, Option<u16>)>,
    /// Slots whose answers the frontend has taken since the last turn of the ring began: it is about to submit them, unless their client
    /// takes none (`docs/decisions/0025-an-untaken-answer-holds-no-range.md`).
    taken: Vec<u16>,
    /// Slots whose answers were submitted by that turn.
    submitted: Vec<u16>,
    outputs: Vec<Output>,
    /// Payload of the reply that is being applied.
    reply: Option<Payload>,
    /// When the machine is to tick next, ns.
    next_tick: Option<u64>,
    ending: bool,
}

impl EngineQueue {
    /// A queue on the calling thread, with data in the pool.
    pub fn new(parts: Parts, pool: &Pool) -> Self {
        let depth = u16::try_from(parts.geometry.depth).unwrap_or(u16::MAX);
        parts.offer.make(pool.lend());
        Self {
            queue: parts.queue,
            id: parts.id,
            generation: parts.generation,
            geometry: parts.geometry,
            inbox: parts.inbox,
            peers: parts.peers,
            news: parts.news,
            began: sys::since_boot(),
            time: 0,
            pool: pool.clone(),
            slots: Slots::new(depth, JOB_SLOTS),
            links: [const { None }; MEMBERS_MAX],
            unreturned: Unreturned::default(),
            local_reads: LocalReads::new(depth),
            untold: VecDeque::new(),
            answered_at_once: false,
            connections: 0,
            again: VecDeque::new(),
            done: VecDeque::with_capacity(depth.into()),
            taken: Vec::with_capacity(depth.into()),
            submitted: Vec::with_capacity(depth.into()),
            outputs: Vec::with_capacity(256),
            reply: None,
            next_tick: None,
            ending: false,
        }
    }

    /// A younger engine has the volume: nothing is answered any more.
    pub const fn is_fenced(&self) -> bool {
        self.queue.is_fenced()
    }

    fn read_clock(&mut self) {
        let passed = sys::since_boot().saturating_sub(self.began);
        self.time = u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX);
    }

    fn replied(&mut self, member: MemberId, header: &Header, payload: Payload) {
        let reply = Reply {
            member,
            tag: header.tag,
            op: header.op,
            status: header.status,
            aux: header.aux,
            payload: header.payload,
        };
        self.reply = Some(payload);
        self.apply(Input::Reply(reply));
        self.reply = None;
    }

    fn take(&mut self, mail: Mail) {
        match mail {
            Mail::Message(message) => self.apply(Input::Message(message)),
            Mail::Control(id, payload) => self.slots.keep_control(id, payload),
            Mail::NameLayer(layer, name) => self.slots.name_layer(layer, name),
            Mail::ForgetLayers => self.slots.forget_layers(),
            Mail::Link { member, socket, checksums, lends, tells } => {
                self.link(member, socket, Terms { checksums, lends, tells });
            }
            Mail::Close(member) => self.lose(member),
            Mail::Vacated(member) => self.unreturned.settle(member),
            Mail::Places(member, granted) => {
                if self.links.get(usize::from(member.0)).is_some_and(Option::is_some) {
                    self.local_reads.take_grant(member, *granted);
                }
            }
            Mail::PlacesOver(member, number) => self.local_reads.let_go(member, Some(number)),
            Mail::Granted(ticket) => self.apply(Input::Granted { ticket }),
            Mail::End => self.ending = true,
        }
    }

    fn link(&mut self, member: MemberId, socket: OwnedFd, terms: Terms) {
        self.lose(member);
        // The replica let this session in when it had come to an end with those before (`docs/invariants.md`, 2).
        self.unreturned.settle(member);
        self.connections += 1;
        let connection = Connection::new(socket, self.connections, terms, &self.pool);
        self.links[usize::from(member.0)] = Some(connection);
        self.apply(Input::LinkUp { member });
    }

    /// The link is of no use any more.
    fn lose(&mut self, member: MemberId) {
        if self.part(member) {
            self.apply(Input::LinkDown { member });
        }
    }

    /// Ends the member's connection, if there is one, and keeps what it has lent.
    fn part(&mut self, member: MemberId) -> bool {
        self.local_reads.let_go(member, None);
        let Some(link) = self.links.get_mut(usize::from(member.0)).and_then(Option::take) else {
            return false;
        };
        self.unreturned.keep(member, link.close().into_payloads().map(Kept::new));
        true
    }

    fn apply(&mut self, input: Input) {
        let mut outputs = std::mem::take(&mut self.outputs);
        // An output may lead to further input (a link that breaks while it is written to): that has its own list.
        self.queue.apply(self.time, input, &mut outputs);
        for output in outputs.drain(..) {
            self.carry(output);
        }
        self.outputs = outputs;
    }

    fn carry(&mut self, output: Output) {
        match output {
            Output::Send(transmit) => self.send_or_read(&transmit),
            Output::Store { slot, append } => {
                let payload = self.reply.take().unwrap_or_default();
                if append {
                    self.slots.append(slot, payload, &self.pool)
                } else {
                    self.slots.store(slot, payload)
                }
            }
            Output::Merge { slot, at, from, len } => self.slots.merge(slot, at, from, len),
            Output::Complete { slot, result, part, held } => {
                let (tag, range) = (self.slots.tag(slot), self.slots.range(slot));
                let data = part.map(|(from, len)| self.slots.part(slot, from, len));
                if matches!(data, Some(None)) {
                    // The memory comes back; that every block can be read is known.
                    return self.again.push_back((self.time.saturating_add(TICK_NS), tag, range));
                }
                let done = Done { tag, result, data: data.flatten() };
                self.done.push_back((done, held.then_some(slot)));
            }
            Output::Free { slot } => self.slots.free(slot),
            Output::Wake { queue, ticket } => {
                if let Some(peer) = self.peers.get(usize::from(queue.0)) {
                    peer.put(Mail::Granted(ticket));
                }
            }
            Output::Report(message) => {
                if let FromQueue::ControlLost(id, _) = message {
                    self.slots.drop_control(id);
                }
                self.tell(News::Report(self.id, message));
            }
            Output::ControlReply { id, member, status } => {
                self.slots.drop_control(id);
                let payload = self.reply.take().map(|p| p.to_vec()).unwrap_or_default();
                self.tell(News::Reply { id, member, status, payload });
            }
            Output::Disconnect { member } => {
                self.part(member);
            }
        }
    }

    /// Sends a request, or begins to read here what it asks for.
    fn send_or_read(&mut self, transmit: &Transmit) {
        let link = self.links.get(usize::from(transmit.member.0)).and_then(Option::as_ref);
        let Some((link, tells)) = link.map(|link| (link.number(), link.tells())) else { return };
        let taken = match transmit.op {
            OpCode::Read => self.local_reads.take(transmit, link, self.queue.size(), &self.pool),
            OpCode::Allocation if !tells => return self.untold.push_back((*transmit, link)),
            _ => Taken::Sent,
        };
        if taken != Taken::Here {
            self.send(transmit);
        }
        if let Taken::Asking(range) = taken {
            let tag = lh_wire::piece_of(range.offset) << 16 | PLACES;
            self.send(&Transmit { tag, op: OpCode::Places, range, data: Data::None, ..*transmit });
        }
    }

    fn send(&mut self, transmit: &Transmit) {
        let Some(link) = self.links.get_mut(usize::from(transmit.member.0)).and_then(Option::as_mut) else {
            return;
        };
        let body = self.slots.body(transmit, link.checksums());
        link.push(transmit, self.generation, body);
    }

    /// Says that nothing is known of what members do not tell.
    fn answer_untold(&mut self) {
        while let Some((Transmit { member, tag, op, .. }, number)) = self.untold.pop_front() {
            let link = self.links.get(usize::from(member.0)).and_then(Option::as_ref);
            if link.is_some_and(|link| link.number() == number) {
                let unknown = Reply { member, tag, op, status: Status::Ok, aux: 0, payload: 0 };
                self.apply(Input::LocalRead(unknown));
                self.answered_at_once = true;
            }
        }
    }

    /// Begins the reads again that had no memory, if it is time.
    fn begin_again(&mut self) {
        while let Some(&(at, tag, range)) = self.again.front()
            && at <= self.time
            && self.slots.room() > 0
        {
            self.again.pop_front();
            let slot = self.slots.take(tag, range, None);
            self.apply(Input::Request { slot, op: lh_block::Op::Read, range });
        }
    }

    /// Does the reads that need not wait for a disk.
    fn read_at_once(&mut self) {
        self.answer_untold();
        while let Some((reading, payload, whole)) = self.local_reads.next_at_once() {
            self.read_clock();
            self.read_ended(&reading, payload, whole);
            self.answered_at_once = true;
        }
    }

    /// A read here has ended; `whole`: with all its bytes. It is answered in the member's place, or sent after all.
    fn read_ended(&mut self, reading: &Reading, payload: Payload, whole: bool) {
        let Transmit { member, tag, op, .. } = reading.transmit;
        let link = self.links.get(usize::from(member.0)).and_then(Option::as_ref);
        if link.is_none_or(|link| link.number() != reading.link) {
            // The queue has given it up with the link.
            return;
        }
        if !whole || !reading.holds() {
            drop(payload);
            return self.send(&reading.transmit);
        }
        let len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        self.reply = Some(payload);
        self.apply(Input::LocalRead(Reply { member, tag, op, status: Status::Ok, aux: 0, payload: len }));
        self.reply = None;
    }

    /// A member has said where blocks are.
    fn told(&mut self, member: MemberId, header: &Header, payload: Payload) {
        if header.status == Status::Stale {
            return self.replied(member, header, payload);
        }
        let range = Extent::new(header.offset, header.length.into());
        let places = (header.status == Status::Ok).then_some(&payload);
        if !self.local_reads.told(member, range, header.aux, places) {
            self.lose(member);
        }
    }

    fn tell(&self, news: News) {
        // A control thread that is gone has ended the process, or is about to.
        let _ = self.news.send(news);
    }
}

impl Drop for EngineQueue {
    /// The thread ends, perhaps before the process: until then replicas may read what they were lent.
    fn drop(&mut self) {
        for member in (0..MEMBERS_MAX).filter_map(|n| u8::try_from(n).ok()) {
            self.part(MemberId(member));
        }
        self.unreturned.take_all().for_each(Kept::leak);
    }
}

impl Device<Payload> for EngineQueue {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.queue.size(), ..self.geometry }
    }

    fn room(&self) -> u32 {
        match self.slots.room().saturating_sub(u32::try_from(self.again.len()).unwrap_or(u32::MAX)) {
            // What was sent when the members went keeps its slot until they are back, whatever it was answered.
            0 if self.queue.is_timed_out(self.time) => 1,
            room => room,
        }
    }

    fn submit(&mut self, request: Request<Payload>) {
        let Request { tag, op, range, data } = request;
        if self.slots.room() == 0 {
            let done = Done { tag, result: Err(IoError::TimedOut), data: None };
            return self.done.push_back((done, None));
        }
        let range = if op == lh_block::Op::Flush { Extent::default() } else { range };
        let slot = self.slots.take(tag, range, data);
        self.apply(Input::Request { slot, op, range });
        self.read_at_once();
    }

    fn abandon(&mut self, tag: u64) {
        if let Some(slot) = self.slots.of(tag) {
            self.apply(Input::Abandoned { slot });
        }
    }

    fn poll_done(&mut self) -> Option<Done<Payload>> {
        let (done, held) = self.done.pop_front()?;
        self.taken.extend(held);
        Some(done)
    }
}

impl QueueDevice for EngineQueue {
    fn bell(&self) -> &Bell {
        self.inbox.bell()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn is_ending(&self) -> bool {
        self.ending
    }

    /// Takes the mail, ticks, and tells the machine which answers have left.
    fn begin_turn(&mut self) {
        self.read_clock();
        let mut submitted = std::mem::take(&mut self.submitted);
        for slot in submitted.drain(..) {
            self.apply(Input::Answered { slot });
        }
        self.submitted = submitted;
        while let Some(mail) = self.inbox.take() {
            self.take(mail);
        }
        if self.next_tick.is_some_and(|at| at <= self.time) {
            self.next_tick = None;
            self.apply(Input::Tick);
        }
        self.begin_again();
        self.read_at_once();
    }

    fn watch(&mut self, watched: bool) {
        self.queue.watch(watched);
    }

    fn lets_in(&self) -> bool {
        self.queue.lets_in() || self.queue.looks()
    }

    fn let_in(&mut self) {
        // In this order: those outside claim their ranges now, after clients were looked for.
        self.apply(Input::Looked);
        if self.queue.lets_in() {
            self.apply(Input::LetIn);
        }
        self.read_at_once();
        self.answered_at_once = true;
    }

    fn end_turn(&mut self, ring: &mut Ring) -> Option<Duration> {
        self.local_reads.start(ring, |n| Token::new(OWNER_DEVICE, LOCAL_READ, n, 0));
        let mut starved = false;
        for (member, link) in (0_u8..).zip(&mut self.links) {
            if let Some(link) = link
                && !link.start(ring, member.into())
            {
                starved = true;
                self.queue.starved(self.time, MemberId(member));
            }
        }
        self.submitted.append(&mut self.taken);
        let untaken = std::mem::take(&mut self.answered_at_once) && !self.done.is_empty();
        if untaken || !self.submitted.is_empty() || self.lets_in() {
            return Some(Duration::ZERO);
        }
        self.read_clock();
        if self.next_tick.is_none() && self.queue.wants_tick(self.time) {
            self.next_tick = Some(self.time.saturating_add(TICK_NS));
        }
        let again = self.again.front().map(|(at, ..)| *at);
        let next = self.next_tick.into_iter().chain(again).min();
        let tick = next.map(|at| Duration::from_nanos(at.saturating_sub(self.time)));
        // Without memory for a receive there is no completion to wait for: look again soon.
        if starved { Some(tick.unwrap_or(STARVED).min(STARVED)) } else { tick }
    }

    /// Frontends submit requests and give them up while they take their completions.
    fn woke(&mut self) {
        self.read_clock();
    }

    fn completion(&mut self, completion: Completion) {
        let Token { kind, slot: member, data: number, .. } = completion.token;
        if kind == LOCAL_READ {
            self.read_clock();
            if let Some(reading) = self.local_reads.end(member) {
                let whole = completion.result.is_ok_and(|n| u64::from(n) == reading.transmit.range.len);
                self.read_ended(&reading, completion.payload.unwrap_or_default(), whole);
            }
            return self.read_at_once();
        }
        let at = usize::from(member);
        let member = MemberId(u8::try_from(member).unwrap_or(u8::MAX));
        let Some(link) = self.links.get_mut(at).and_then(Option::as_mut).filter(|l| l.number() == number)
        else {
            return;
        };
        let usable = link.completed(&completion);
        self.read_clock();
        if !usable {
            self.lose(member);
            return;
        }
        while let Some(link) = self.links[at].as_mut().filter(|l| l.number() == number) {
            match link.next_message(self.generation) {
                Received::Nothing => break,
                Received::Broken => self.lose(member),
                Received::Message(header, payload) if header.op == OpCode::Places => {
                    self.told(member, &header, payload);
                }
                Received::Message(header, payload) => self.replied(member, &header, payload),
            }
        }
        self.read_at_once();
    }
}

#[cfg(test)]
mod tests;
