//! An engine process: the real conductor and the real queues, and in place of ring and sockets the simulation's network.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use datapath::conductor::{self, Conductor, Refusal};
use datapath::link::{Found, Loans, PlaceCache, Unreturned, Watch};
use datapath::message::{ControlId, Fault, FromQueue, MemberId, QueueId, ToQueue};
use datapath::order::{Table, Ticket};
use datapath::queue::{self, Data, PLACES, Queue, Reply, Transmit};
use datapath::shared::Shared;
use lh_block::{BLOCK, Extent, Generation, Instance, IoError, Op};
use lh_wire::{Control, Header, OpCode, PIECE, Place, Status, flags, piece_of};
use replica::serve::core::{ConnId, SessionHello};

use super::grant::{Grant, Reading};
use super::packet::{Body, Memory};
use super::parts::merged;
use super::world::{Event, Outbox, Sabotage};
use tests::register::{FlushBegan, ReadBegan, Stamp, WriteId};

/// Client slots of each queue.
pub(crate) const DEPTH: u16 = 16;

/// Something in a queue's mailbox.
#[derive(Clone, Debug)]
pub(crate) enum Mail {
    /// From the conductor.
    Message(ToQueue),
    /// A new connection to a member.
    Link(MemberId, ConnId),
    /// The conductor ends the session with a member.
    Close(MemberId),
    /// A replica has granted its files.
    Places(MemberId, Grant),
    /// That grant is over.
    PlacesOver(MemberId, u32),
    /// From another queue.
    Granted(Ticket),
}

/// Something in the conductor's mailbox.
#[derive(Clone, Debug)]
pub(crate) enum Report {
    /// From a queue.
    FromQueue(QueueId, FromQueue),
    /// The answer to a control request.
    Reply(ControlId, MemberId, Result<conductor::Body, Refusal>),
    /// Anything else.
    Input(conductor::Input),
}

/// What the client keeps of a request, and the driver of its data.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// The request, as long as the client waits for it.
    pub(crate) request: Option<(Op, Extent)>,
    /// Marks of the oracle.
    pub(crate) read: Option<ReadBegan>,
    /// Marks of the oracle.
    pub(crate) writes: Vec<(u64, WriteId)>,
    /// Mark of the oracle.
    pub(crate) flush: Option<FlushBegan>,
    /// What the client writes, by block; and where in the first of them its range begins.
    pub(crate) client: Vec<Stamp>,
    skew: u64,
    stored: Option<Body>,
    /// Taken from the queue's point of view.
    pub(crate) taken: bool,
    /// Its client has given it up: nobody waits for the answer.
    pub(crate) left: bool,
    /// Counts its requests.
    pub(crate) uses: u64,
    /// Writes that this one was sent in place of.
    pub(crate) instead_of: Vec<(u64, WriteId)>,
}

impl Slot {
    /// Which of the client's blocks begins or goes on so many bytes behind the range's begin.
    fn block_at(&self, from: u32) -> usize {
        ((self.skew + u64::from(from)) / BLOCK) as usize
    }
}

/// An answer for the client.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// Whose.
    pub(crate) queue: usize,
    /// Whose.
    pub(crate) slot: u16,
    /// What became of it.
    pub(crate) result: Result<(), IoError>,
    /// The blocks of a read.
    pub(crate) blocks: Vec<Stamp>,
    /// Of each block whether it holds data, if that was asked.
    pub(crate) data: Vec<bool>,
    /// The queue wants to know when it has left.
    pub(crate) held: bool,
    /// For how long it has answered no read, ns.
    pub(crate) unread_for: u64,
    /// For how long it has answered nothing that changes data, ns.
    pub(crate) unwritten_for: u64,
    /// What was asked for, and the oracle's marks.
    pub(crate) request: Option<(Op, Extent)>,
    /// As in [`Slot`].
    pub(crate) read: Option<ReadBegan>,
    /// As in [`Slot`].
    pub(crate) writes: Vec<(u64, WriteId)>,
    /// As in [`Slot`].
    pub(crate) flush: Option<FlushBegan>,
    /// As in [`Slot`].
    pub(crate) left: bool,
    /// As in [`Slot`].
    pub(crate) instead_of: Vec<(u64, WriteId)>,
}

/// One process.
pub(crate) struct Engine {
    /// Counts engine processes.
    pub(crate) number: u64,
    /// Its generation.
    pub(crate) generation: Generation,
    /// Its instance.
    pub(crate) instance: Instance,
    conductor: Conductor,
    shared: Arc<Shared>,
    queues: Vec<Queue>,
    /// Per queue.
    pub(crate) slots: Vec<Vec<Slot>>,
    job_stored: BTreeMap<(usize, u16), Body>,
    /// Per member and queue.
    pub(crate) links: Vec<Vec<Option<ConnId>>>,
    /// What each of them has lent, and what those that are gone had, per queue. All replicas are lent to, as if all shared this
    /// host.
    loans: Vec<Vec<Loans<Memory>>>,
    unreturned: Vec<Unreturned<Memory>>,
    returned_unheard: bool,
    unverified: bool,
    /// What replicas have granted, per member and queue, and what each queue knows of places.
    granted: Vec<Vec<Option<Grant>>>,
    known: Vec<PlaceCache>,
    /// Reads under way in their files, and how many there were.
    readings: BTreeMap<u64, (usize, Reading)>,
    reading_count: u64,
    /// Connections over which something was granted.
    pub(crate) grant_conns: BTreeMap<ConnId, (MemberId, SessionHello, u32)>,
    lives: Rc<Cell<bool>>,
    layers: BTreeMap<u32, String>,
    controls: BTreeMap<ControlId, Control>,
    /// What waits outside is let in some time after it may be, as by a thread that waits for a processor; and what of that is due,
    /// per queue.
    pub(crate) stumbles: bool,
    turn_due: Vec<bool>,
    /// When each queue has last answered a read, ns.
    has_read_at: Vec<u64>,
    /// The same of what changes data.
    has_written_at: Vec<u64>,
    /// Clients may send requests.
    pub(crate) open: bool,
    /// It was told to end.
    pub(crate) ends: bool,
    /// It has ended by itself, and how.
    pub(crate) stopped: Option<conductor::Why>,
    /// SIGSTOP.
    pub(crate) frozen: bool,
    /// What waits while it is frozen.
    pub(crate) waiting: VecDeque<Event>,
    /// What was counted of its conductor's work.
    counted: conductor::Counters,
}

impl Engine {
    /// A process that has not begun; `full`: every read is compared with checksums; requests end after `io_timeout` ns with nobody to
    /// serve them.
    pub(crate) fn new(
        number: u64,
        generation: Generation,
        instance: Instance,
        queues: u8,
        config: conductor::Config,
        (full, io_timeout, sabotage): (bool, u64, Sabotage),
    ) -> Self {
        let table = Arc::new(Table::new());
        let queue_config = queue::Config {
            size: config.size,
            logical_block: 512,
            max_transfer: lh_wire::MAX_DATA,
            depth: DEPTH,
            io_timeout_ns: io_timeout,
            verify: full,
        };
        let made = (0..queues).map(|q| {
            let mut queue =
                Queue::new(queue_config.clone(), QueueId(q), table.clone(), Arc::clone(&config.shared));
            queue.sabotage(sabotage.queue);
            queue
        });
        // As many as may be added.
        let members = datapath::message::MEMBERS_MAX;
        Self {
            number,
            generation,
            instance,
            queues: made.collect(),
            shared: Arc::clone(&config.shared),
            conductor: Conductor::new(config),
            slots: (0..queues).map(|_| (0..DEPTH).map(|_| Slot::default()).collect()).collect(),
            job_stored: BTreeMap::new(),
            links: vec![vec![None; usize::from(queues)]; members],
            loans: (0..members).map(|_| (0..queues).map(|_| Loans::default()).collect()).collect(),
            unreturned: (0..queues).map(|_| Unreturned::default()).collect(),
            returned_unheard: sabotage.returned_unheard,
            unverified: sabotage.reads_unverified,
            granted: vec![vec![None; usize::from(queues)]; members],
            known: (0..queues).map(|_| PlaceCache::of(8)).collect(),
            readings: BTreeMap::new(),
            reading_count: 0,
            grant_conns: BTreeMap::new(),
            lives: Rc::new(Cell::new(true)),
            layers: BTreeMap::new(),
            controls: BTreeMap::new(),
            stumbles: false,
            turn_due: vec![false; usize::from(queues)],
            has_read_at: vec![0; usize::from(queues)],
            has_written_at: vec![0; usize::from(queues)],
            open: false,
            ends: false,
            stopped: None,
            frozen: false,
            waiting: VecDeque::new(),
            counted: conductor::Counters::default(),
        }
    }

    /// Whose clients it has: an engine that is started again on its host takes over those of the one before, with the device.
    pub(crate) fn session(&self) -> u64 {
        self.generation.attachment.into()
    }

    /// It shows the device that the engine before has left.
    pub(crate) fn clients_have_stayed(&self) {
        self.shared.loss().clients_have_stayed();
    }

    /// The engine before has lost something, and died before a flush told its clients.
    pub(crate) fn finds_a_loss_noted(&self) {
        self.shared.loss().lose_from_before();
    }

    /// Its note is still needed.
    pub(crate) fn is_loss_untold(&self) -> bool {
        self.shared.loss().is_untold()
    }

    /// What people see.
    pub(crate) fn status(&self) -> conductor::Status {
        self.conductor.status()
    }

    /// As far as it knows no other replica than one is in sync.
    pub(crate) fn is_alone(&self) -> bool {
        self.status().replicas.iter().filter(|r| r.mode == conductor::Mode::Rw).count() <= 1
    }

    /// Something for the conductor.
    pub(crate) fn conduct(&mut self, now: u64, report: Report, out: &mut Outbox) {
        let input = match report {
            Report::FromQueue(q, message) => conductor::Input::FromQueue(q, message),
            Report::Reply(id, member, result) => conductor::Input::Reply { id, member, result },
            Report::Input(input) => input,
        };
        let mut outputs = Vec::new();
        self.conductor.apply(now, input, &mut outputs);
        for output in outputs {
            self.carry_conducted(output, out);
        }
        let counters = self.conductor.counters();
        out.note("rebuild finished", counters.rebuilds - self.counted.rebuilds);
        out.note("block rebuilt", counters.rebuilt_blocks - self.counted.rebuilt_blocks);
        out.note("blocks repaired", counters.repaired_blocks - self.counted.repaired_blocks);
        out.note("chunks resolved", counters.resolved_chunks - self.counted.resolved_chunks);
        out.note("snapshot done", counters.snapshots - self.counted.snapshots);
        out.note("epoch made", counters.epochs - self.counted.epochs);
        self.counted = counters;
        if let Some(at) = self.conductor.wake_at() {
            out.later(at.max(now + 1_000_000), Event::ConductorTime { engine: self.number });
        }
    }

    fn carry_conducted(&mut self, output: conductor::Output, out: &mut Outbox) {
        use conductor::Output as O;
        match output {
            O::ToQueue(q, message) => out.queue_gets(self.number, q, Mail::Message(message)),
            O::Control { id, member, control } => {
                if !matches!(*control, Control::State) {
                    out.moment();
                }
                self.controls.insert(id, *control);
                out.queue_gets(self.number, QueueId(0), Mail::Message(ToQueue::Control(id, member)));
            }
            O::LoadEpoch => out.load_epoch(self.number),
            O::StoreEpoch { expected, epoch } => {
                out.moment();
                out.store_epoch(self.number, expected, epoch);
            }
            O::Connect { member, session, .. } => out.connect(self.number, member, session),
            O::Disconnect { member } => {
                for q in 0..self.queues.len() {
                    let q = QueueId(u8::try_from(q).unwrap_or(0));
                    out.queue_gets(self.number, q, Mail::Close(member));
                }
            }
            O::NameLayer(layer, name) => {
                self.layers.insert(layer.0, name);
            }
            O::ForgetLayers => self.layers.clear(),
            O::CommandDone(id, result) => out.command_done(id, result.is_ok()),
            O::Open { .. } => {
                self.open = true;
                out.opened(self.number);
            }
            O::Stop(why) => {
                self.open = false;
                self.stopped = Some(why);
            }
            O::StatusChanged | O::Resized { .. } | O::Vacated { .. } => {}
            O::Lost => out.lost(self.number),
            O::Log(line) => out.log(&line),
        }
    }

    /// Something in a queue's mailbox.
    pub(crate) fn mail(&mut self, now: u64, q: usize, mail: Mail, out: &mut Outbox) {
        let input = match mail {
            Mail::Places(member, grant) => {
                let m = usize::from(member.0);
                if self.links[m][q].is_some() && !grant.words.is_over() {
                    self.granted[m][q] = Some(grant);
                }
                return;
            }
            Mail::PlacesOver(member, number) => {
                self.granted[usize::from(member.0)][q].take_if(|grant| grant.number == number);
                return;
            }
            Mail::Message(message) => queue::Input::Message(message),
            Mail::Granted(ticket) => queue::Input::Granted { ticket },
            Mail::Link(member, conn) => {
                self.part(member, q);
                self.unreturned[q].settle(member);
                self.links[usize::from(member.0)][q] = Some(conn);
                queue::Input::LinkUp { member }
            }
            Mail::Close(member) => {
                let Some(conn) = self.part(member, q) else { return };
                out.close(conn);
                queue::Input::LinkDown { member }
            }
        };
        self.queue(now, q, input, None, out);
    }

    /// A queue's link to a member is gone: what it has lent is kept.
    fn part(&mut self, member: MemberId, q: usize) -> Option<ConnId> {
        let m = usize::from(member.0);
        self.granted[m][q] = None;
        let lent = std::mem::take(&mut self.loans[m][q]).into_payloads();
        if !self.returned_unheard {
            self.unreturned[q].keep(member, lent);
        }
        self.links[m][q].take()
    }

    /// A connection of a queue broke.
    pub(crate) fn broken(&mut self, now: u64, conn: ConnId, out: &mut Outbox) {
        for m in 0..self.links.len() {
            for q in 0..self.links[m].len() {
                if self.links[m][q] == Some(conn) {
                    let member = MemberId(u8::try_from(m).unwrap_or(0));
                    self.part(member, q);
                    self.queue(now, q, queue::Input::LinkDown { member }, None, out);
                }
            }
        }
    }

    /// A message has come over a connection.
    pub(crate) fn message(&mut self, now: u64, conn: ConnId, header: Header, body: Body, out: &mut Outbox) {
        let place = self
            .links
            .iter()
            .enumerate()
            .find_map(|(m, queues)| queues.iter().position(|c| *c == Some(conn)).map(|q| (m, q)));
        let Some((m, q)) = place else { return };
        if header.op == OpCode::Write {
            self.loans[m][q].end(header.tag);
        }
        if let (OpCode::Places, Body::Places(told)) = (header.op, &body)
            && let Some(grant) = &self.granted[m][q].as_ref().filter(|grant| grant.number == header.aux)
        {
            self.known[q].keep(grant.number, piece_of(header.offset), told);
        }
        if header.op == OpCode::Places && header.status != Status::Stale {
            return;
        }
        if header.status != Status::Ok {
            out.log(&format!(
                "replica {m}: {:?} of {}+{}: {:?}",
                header.op, header.offset, header.length, header.status
            ));
        }
        if header.status == Status::NoSpace {
            out.note("no space on a replica's disk", 1);
        }
        let (payload, _) = body.lengths();
        let aux = header.aux;
        let reply = Reply {
            member: MemberId(u8::try_from(m).unwrap_or(0)),
            tag: header.tag,
            op: header.op,
            status: header.status,
            aux,
            payload,
        };
        self.queue(now, q, queue::Input::Reply(reply), Some(body), out);
    }

    /// Time for a queue; true if it wants more.
    pub(crate) fn tick(&mut self, now: u64, q: usize, out: &mut Outbox) -> bool {
        if self.queues[q].wants_tick(now) {
            self.queue(now, q, queue::Input::Tick, None, out);
        }
        true
    }

    /// A client's request is read from its connection.
    pub(crate) fn request(&mut self, q: usize, slot: u16, op: Op, range: Extent) {
        let s = &mut self.slots[q][usize::from(slot)];
        s.request = Some((op, range));
        s.skew = range.offset % BLOCK;
        (s.taken, s.left) = (true, false);
        s.uses += 1;
        s.instead_of.clear();
        s.stored = None;
    }

    /// And handed to the queue.
    pub(crate) fn submit(&mut self, now: u64, q: usize, slot: u16, out: &mut Outbox) {
        if let Some((op, range)) = self.slots[q][usize::from(slot)].request {
            self.queue(now, q, queue::Input::Request { slot, op, range }, None, out);
        }
    }

    /// An answer has left the process.
    pub(crate) fn answered(&mut self, now: u64, q: usize, slot: u16, out: &mut Outbox) {
        self.queue(now, q, queue::Input::Answered { slot }, None, out);
    }

    fn queue(&mut self, now: u64, q: usize, input: queue::Input, body: Option<Body>, out: &mut Outbox) {
        let mut outputs = Vec::new();
        let queue = &mut self.queues[q];
        queue.watch(self.stumbles);
        queue.apply(now, input, &mut outputs);
        let waits = queue.lets_in() || queue.looks();
        if waits && !self.stumbles {
            queue.apply(now, queue::Input::LetIn, &mut outputs);
        } else if waits && !std::mem::replace(&mut self.turn_due[q], true) {
            out.later(now, Event::TurnDue(self.number, q));
        }
        let mut body = body;
        for output in outputs {
            self.carry_queued((now, q), output, &mut body, out);
        }
    }

    /// Looks for the clients of what holds its range and of what waits outside, and lets the others' requests go on.
    pub(crate) fn let_in(&mut self, now: u64, q: usize, out: &mut Outbox) {
        for slot in 0..DEPTH {
            if self.slots[q][usize::from(slot)].left {
                self.queue(now, q, queue::Input::Abandoned { slot }, None, out);
            }
        }
        // What waits from here on waits for another look.
        self.turn_due[q] = false;
        if self.queues[q].looks() {
            out.note("clients looked for once their writes had ranges", 1);
            self.queue(now, q, queue::Input::Looked, None, out);
        }
        if self.queues[q].lets_in() {
            self.queue(now, q, queue::Input::LetIn, None, out);
        }
    }

    /// The end of a connection is noticed, of whose requests one is in this slot.
    pub(crate) fn hangs_up(&mut self, now: u64, q: usize, slot: u16, uses: u64, out: &mut Outbox) {
        let s = &self.slots[q][usize::from(slot)];
        if s.taken && s.uses == uses {
            self.queue(now, q, queue::Input::Abandoned { slot }, None, out);
        }
    }

    fn stored(&mut self, q: usize, slot: u16) -> Option<Body> {
        match self.slots[q].get(usize::from(slot)) {
            Some(s) => s.stored.clone(),
            None => self.job_stored.get(&(q, slot)).cloned(),
        }
    }

    fn carry_queued(
        &mut self,
        (now, q): (u64, usize),
        output: queue::Output,
        body: &mut Option<Body>,
        out: &mut Outbox,
    ) {
        use queue::Output as O;
        let queue_id = QueueId(u8::try_from(q).unwrap_or(0));
        match output {
            O::Send(t) => self.send_or_read(q, &t, out),
            O::Store { slot, append } => {
                let new = body.take().unwrap_or(Body::None);
                let old = if append { self.stored(q, slot) } else { None };
                let joined = match (old, new) {
                    (Some(Body::Blocks(mut a)), Body::Blocks(b)) => {
                        a.extend(b);
                        Body::Blocks(a)
                    }
                    (_, new) => new,
                };
                match self.slots[q].get_mut(usize::from(slot)) {
                    Some(s) => s.stored = Some(joined),
                    None => drop(self.job_stored.insert((q, slot), joined)),
                }
            }
            O::Merge { slot, at, from, len } => {
                out.note("block written in part", 1);
                let s = &mut self.slots[q][usize::from(slot)];
                let new = s.client[s.block_at(from)];
                let Some(Body::Blocks(blocks)) = &mut s.stored else { return };
                blocks.iter_mut().for_each(|block| *block = merged(*block, at, len, new));
            }
            O::Complete { slot, result, part, held } => {
                let blocks = match (self.stored(q, slot), part) {
                    (Some(Body::Blocks(b)), Some((from, len))) => {
                        let range = Extent::new(u64::from(from), u64::from(len)).widen(BLOCK);
                        let at = |n: u64| (n / BLOCK) as usize;
                        b.into_iter().skip(at(range.offset)).take(at(range.len)).collect()
                    }
                    _ => Vec::new(),
                };
                let data = match (self.stored(q, slot), part) {
                    (Some(Body::Allocation(data)), Some(_)) => data,
                    _ => Vec::new(),
                };
                let s = &mut self.slots[q][usize::from(slot)];
                let (request, read, flush) = (s.request.take(), s.read.take(), s.flush.take());
                let (writes, instead_of) = (std::mem::take(&mut s.writes), std::mem::take(&mut s.instead_of));
                let left = s.left;
                match (request, result) {
                    (Some((Op::Read, _)), Ok(())) => self.has_read_at[q] = now,
                    (Some((Op::Write { .. } | Op::WriteZeroes { .. } | Op::Unmap, _)), Ok(())) => {
                        self.has_written_at[q] = now;
                    }
                    _ => {}
                }
                let (unread_for, unwritten_for) = (now - self.has_read_at[q], now - self.has_written_at[q]);
                let answer = Answer {
                    queue: q,
                    slot,
                    result,
                    blocks,
                    data,
                    held,
                    unread_for,
                    unwritten_for,
                    request,
                    read,
                    writes,
                    flush,
                    left,
                    instead_of,
                };
                out.answer(self.number, answer);
            }
            O::Free { slot } => match self.slots[q].get_mut(usize::from(slot)) {
                Some(s) => {
                    s.taken = false;
                    s.stored = None;
                }
                None => drop(self.job_stored.remove(&(q, slot))),
            },
            O::Wake { queue, ticket } => out.queue_gets(self.number, queue, Mail::Granted(ticket)),
            O::Report(FromQueue::Failed(member, fault)) => {
                out.note(fault_name(fault), 1);
                let message = FromQueue::Failed(member, fault);
                out.conductor_gets(self.number, q, Report::FromQueue(queue_id, message));
            }
            O::Report(message) => out.conductor_gets(self.number, q, Report::FromQueue(queue_id, message)),
            O::ControlReply { id, member, status } => {
                self.controls.remove(&id);
                let result = match (status, body.take()) {
                    (Status::Ok, Some(Body::State(s))) => Ok(conductor::Body::State(s)),
                    (Status::Ok, Some(Body::Map(page))) => Ok(conductor::Body::Map(page)),
                    (Status::Ok, _) => Ok(conductor::Body::Done),
                    (Status::Stale, _) => Err(Refusal::Stale),
                    (Status::NoSpace, _) => Err(Refusal::NoSpace),
                    (Status::Refused, Some(Body::Text(t))) => Err(Refusal::Said(t)),
                    _ => Err(Refusal::Failed),
                };
                out.conductor_gets(self.number, q, Report::Reply(id, member, result));
            }
            O::Disconnect { member } => {
                if let Some(conn) = self.part(member, q) {
                    out.close(conn);
                }
            }
        }
    }

    /// Sends a request, or reads here what it asks for.
    fn send_or_read(&mut self, q: usize, t: &Transmit, out: &mut Outbox) {
        let m = usize::from(t.member.0);
        if t.verify && !self.unverified {
            return self.send(q, t, out);
        }
        let (Some(grant), OpCode::Read, Some(conn)) = (&self.granted[m][q], t.op, self.links[m][q]) else {
            return self.send(q, t, out);
        };
        if grant.words.is_over() {
            self.granted[m][q] = None;
            return self.send(q, t, out);
        }
        match self.known[q].find(grant.number, t.range, &*grant.words) {
            Found::Here(place, witness) => {
                let reading =
                    Reading { transmit: *t, conn, grant: grant.clone(), place, witness, read: None };
                self.reading_count += 1;
                self.readings.insert(self.reading_count, (q, reading));
                out.read_here(self.number, m, self.reading_count);
            }
            Found::Unknown(piece) => {
                self.send(q, t, out);
                let range =
                    Extent::new(piece * PIECE, PIECE).intersection(Extent::new(0, self.queues[q].size()));
                let tag = piece << 16 | PLACES;
                let (op, data) = (OpCode::Places, Data::None);
                self.send(q, &Transmit { tag, op, data, range: range.unwrap_or_default(), ..*t }, out);
            }
            Found::Elsewhere | Found::Restless => self.send(q, t, out),
        }
    }

    /// The kernel reads what a reading asks for: this block of this file, or zeroes.
    pub(crate) fn reads(&mut self, id: u64, read: impl Fn(u64, u64) -> Option<Stamp>) {
        let Some((_, reading)) = self.readings.get_mut(&id) else { return };
        let blocks = super::disk::blocks(reading.transmit.range);
        reading.read = match reading.place {
            Place::Zero => Some(blocks.map(|_| Stamp(0)).collect()),
            Place::File(n) => reading
                .grant
                .files
                .get(usize::from(n))
                .and_then(|file| blocks.map(|b| read(*file, b)).collect()),
            Place::Asked => None,
        };
    }

    /// The thread looks at what was read here.
    pub(crate) fn has_read(&mut self, now: u64, id: u64, out: &mut Outbox) {
        let Some((q, reading)) = self.readings.remove(&id) else { return };
        let Transmit { member, tag, op, range, .. } = reading.transmit;
        if self.links[usize::from(member.0)][q] != Some(reading.conn) {
            return;
        }
        let Some(stamps) = reading.read.filter(|_| reading.witness.holds(&*reading.grant.words)) else {
            out.note("read here for nothing", 1);
            return self.send(q, &reading.transmit, out);
        };
        out.note("read here", 1);
        let payload = u32::try_from(range.len).unwrap_or(u32::MAX);
        let reply = Reply { member, tag, op, status: Status::Ok, aux: 0, payload };
        self.queue(now, q, queue::Input::LocalRead(reply), Some(Body::Blocks(stamps)), out);
    }

    /// Something was granted over this connection.
    pub(crate) fn is_granted(&mut self, conn: ConnId, grant: &Grant, out: &mut Outbox) {
        let Some((member, _, number)) = self.grant_conns.get_mut(&conn) else { return };
        *number = grant.number;
        for q in (0..self.queues.len()).filter_map(|q| u8::try_from(q).ok()) {
            out.queue_gets(self.number, QueueId(q), Mail::Places(*member, grant.clone()));
        }
    }

    /// A connection has ended over which something was granted, or was asked for: whom to ask again.
    pub(crate) fn grant_ends(&mut self, conn: ConnId, out: &mut Outbox) -> Option<(MemberId, SessionHello)> {
        let (member, hello, number) = self.grant_conns.remove(&conn)?;
        for q in (0..self.queues.len()).filter_map(|q| u8::try_from(q).ok()) {
            out.queue_gets(self.number, QueueId(q), Mail::PlacesOver(member, number));
        }
        Some((member, hello))
    }

    /// All queues have a link to the member.
    pub(crate) fn is_linked(&self, member: MemberId) -> bool {
        self.links[usize::from(member.0)].iter().all(Option::is_some)
    }

    fn send(&mut self, q: usize, t: &Transmit, out: &mut Outbox) {
        let Some(conn) = self.links[usize::from(t.member.0)][q] else { return };
        let length = u32::try_from(t.range.len).unwrap_or(u32::MAX);
        let mut header = Header::request(t.op, t.tag, t.range.offset, length, self.generation);
        header.flush = t.flush;
        header.aux = t.aux;
        if t.fua {
            header.flags |= flags::FUA;
        }
        if t.verify && !self.unverified {
            header.flags |= flags::VERIFY;
        }
        let body = match t.data {
            Data::None => Body::None,
            Data::Client { slot, from } => {
                let s = &self.slots[q][usize::from(slot)];
                let blocks = (t.range.len / BLOCK) as usize;
                let blocks = s.client.iter().skip(s.block_at(from)).take(blocks).copied().collect();
                let memory = Memory::new(blocks, &self.lives);
                let lent = memory.lend();
                self.loans[usize::from(t.member.0)][q].lend(t.tag, memory);
                Body::Lent(lent)
            }
            Data::Stored { slot } => self.stored(q, slot).unwrap_or(Body::None),
            Data::LayerName(layer) => {
                Body::Layer(layer.and_then(|l| self.layers.get(&l.0)).cloned().unwrap_or_default())
            }
            Data::Control(id) => match self.controls.get(&id) {
                Some(c) => Body::Control(Box::new(c.clone())),
                None => return,
            },
        };
        header.payload = if matches!(t.op, OpCode::Write | OpCode::PutLayer) { body.lengths().0 } else { 0 };
        out.send(conn, header, body);
    }
}

impl Drop for Engine {
    /// Whatever the process held stays as it is: nobody is left who would use it.
    fn drop(&mut self) {
        self.lives.set(false);
    }
}

const fn fault_name(fault: Fault) -> &'static str {
    match fault {
        Fault::Link => "member lost: link",
        Fault::Io => "member lost: disk error",
        Fault::NoSpace | Fault::Ahead => "member lost: disk full",
        Fault::Hung => "member lost: hung",
        Fault::Slow => "member lost: slow",
    }
}
