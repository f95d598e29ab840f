//! One engine: the conductor and its queues, and what a driver does for them, without threads and sockets.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use datapath::conductor::{self, Conductor, Output as Order};
use datapath::message::{ControlId, FromQueue, LayerRef, MemberId, QueueId, Switch, ToQueue};
use datapath::order::Table;
use datapath::queue::{self, Data, Input, Output, Queue, Reply, Transmit};
use datapath::shared::Shared;
use lh_block::{BLOCK, Epoch, Extent, Generation, Op};
use lh_wire::{Control, OpCode, Status};

use crate::oracle::{Certain, Oracle};
use crate::replica::{Payload, span};

/// A message on its way to or from a replica.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) op: OpCode,
    pub(crate) tag: u64,
    pub(crate) range: Extent,
    pub(crate) verify: bool,
    pub(crate) status: Status,
    pub(crate) aux: u32,
    pub(crate) payload: Payload,
}

/// The connection of one queue to one replica. What is in it goes when it breaks.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    /// The session that it is of; `None`: no connection.
    pub(crate) session: Option<u64>,
    pub(crate) there: VecDeque<Message>,
    pub(crate) back: VecDeque<Message>,
    /// It broke; the queue has not noticed.
    pub(crate) broken: bool,
}

/// What waits to be given to a queue.
#[derive(Debug)]
pub(crate) enum ForQueue {
    Message(ToQueue),
    LinkUp(MemberId, u64),
    LinkDown(MemberId),
    Input(Input),
}

/// What a client asked for in a slot.
#[derive(Debug)]
enum Asked {
    Read { blocks: Vec<(usize, u64)> },
    Write { blocks: Vec<(usize, u32)> },
    Flush { certain: Certain },
}

pub(crate) struct DeviceQueue {
    pub(crate) queue: Queue,
    pub(crate) inbox: VecDeque<ForQueue>,
    pub(crate) wires: Vec<Wire>,
    asked: BTreeMap<u16, Asked>,
    stored: BTreeMap<u16, Payload>,
    next_tick: u64,
    pub(crate) deaf_until: u64,
}

pub(crate) struct Engine {
    pub(crate) number: u64,
    pub(crate) generation: Generation,
    pub(crate) conductor: Conductor,
    pub(crate) shared: Arc<Shared>,
    pub(crate) queues: Vec<DeviceQueue>,
    /// For the conductor, by sender: queues first, then the authority and connectors.
    pub(crate) reports: Vec<VecDeque<conductor::Input>>,
    pub(crate) outside: VecDeque<conductor::Input>,
    /// The authority is to be asked: at the start, and when the conductor wants it.
    pub(crate) load: bool,
    /// Sessions to be made, and epochs to be stored.
    pub(crate) connects: Vec<(MemberId, u64)>,
    pub(crate) store: Option<(Option<(Generation, u64)>, Epoch)>,
    controls: BTreeMap<ControlId, Control>,
    pub(crate) layers: BTreeMap<LayerRef, String>,
    pub(crate) open: bool,
    pub(crate) done: Vec<(u64, Result<(), conductor::CommandError>)>,
    pub(crate) stopped: Option<conductor::Why>,
    /// Every switch to the first queue, for those who check them.
    pub(crate) switches: Vec<Switch>,
    pub(crate) log: Vec<String>,
    pub(crate) loss_noted: bool,
}

impl DeviceQueue {
    /// No slot is free for a client.
    pub(crate) fn is_full(&self) -> bool {
        self.asked.len() >= usize::from(DEPTH)
    }

    /// A switch waits to be read.
    pub(crate) fn is_told(&self, which: fn(&Switch) -> bool) -> bool {
        self.inbox.iter().any(|m| matches!(m, ForQueue::Message(ToQueue::Switch(_, switch)) if which(switch)))
    }
}

pub(crate) const DEPTH: u16 = 6;

impl Engine {
    pub(crate) fn new(number: u64, config: conductor::Config, members: usize) -> Self {
        let table = Arc::new(Table::new());
        let shared = config.shared.clone();
        let queues = (0..config.queues)
            .map(|q| {
                let setup = queue::Config {
                    size: config.size,
                    logical_block: 4096,
                    max_transfer: 1 << 20,
                    depth: DEPTH,
                    io_timeout_ns: 0,
                    verify: false,
                };
                DeviceQueue {
                    queue: Queue::new(setup, QueueId(q), table.clone(), shared.clone()),
                    inbox: VecDeque::new(),
                    wires: (0..members).map(|_| Wire::default()).collect(),
                    asked: BTreeMap::new(),
                    stored: BTreeMap::new(),
                    next_tick: 0,
                    deaf_until: 0,
                }
            })
            .collect();
        Self {
            shared: shared.clone(),
            number,
            generation: config.generation,
            queues,
            reports: (0..config.queues).map(|_| VecDeque::new()).collect(),
            conductor: Conductor::new(config),
            outside: VecDeque::new(),
            connects: Vec::new(),
            load: true,
            store: None,
            controls: BTreeMap::new(),
            layers: BTreeMap::new(),
            open: false,
            done: Vec::new(),
            stopped: None,
            switches: Vec::new(),
            log: Vec::new(),
            loss_noted: false,
        }
    }

    /// Gives the conductor an input and carries out what it says.
    pub(crate) fn conduct(&mut self, now: u64, input: conductor::Input) {
        let mut out = Vec::new();
        self.conductor.apply(now, input, &mut out);
        for order in out {
            self.obey(order);
        }
    }

    fn obey(&mut self, order: Order) {
        if order != Order::StatusChanged {
            trace!("   e{} {order:?}", self.number);
        }
        match order {
            Order::ToQueue(q, message) => {
                if let (0, ToQueue::Switch(_, switch)) = (q.0, &message) {
                    self.switches.push(*switch);
                }
                self.queues[usize::from(q.0)].inbox.push_back(ForQueue::Message(message));
            }
            Order::Control { id, member, control } => {
                self.controls.insert(id, *control);
                self.queues[0].inbox.push_back(ForQueue::Message(ToQueue::Control(id, member)));
            }
            Order::LoadEpoch => {
                assert!(!self.load, "one question at a time");
                self.load = true;
            }
            Order::StoreEpoch { expected, epoch } => {
                assert!(self.store.is_none(), "one compare-and-swap at a time");
                self.store = Some((expected, epoch));
            }
            Order::Connect { member, session, .. } => self.connects.push((member, session)),
            Order::Disconnect { member } => {
                for q in &mut self.queues {
                    q.inbox.push_back(ForQueue::LinkDown(member));
                }
            }
            Order::NameLayer(layer, name) => {
                self.layers.insert(layer, name);
            }
            Order::ForgetLayers => self.layers.clear(),
            Order::CommandDone(id, result) => self.done.push((id.0, result)),
            Order::Open { .. } => self.open = true,
            Order::Stop(why) => self.stopped = Some(why),
            Order::Resized { size } => {
                let know = self.queues.iter().all(|q| q.queue.size() == size);
                assert!(know, "a client that is told of {size} bytes would be refused some of them");
            }
            Order::StatusChanged | Order::Vacated { .. } => {}
            Order::Lost => self.loss_noted = true,
            Order::Log(line) => self.log.push(line),
        }
    }

    /// Takes the next thing from a queue's inbox.
    pub(crate) fn serve_inbox(&mut self, now: u64, q: usize, oracle: &mut Oracle) {
        match self.queues[q].inbox.pop_front() {
            None => {}
            Some(ForQueue::Message(message)) => self.drive(now, q, Input::Message(message), None, oracle),
            Some(ForQueue::Input(input)) => self.drive(now, q, input, None, oracle),
            Some(ForQueue::LinkUp(member, session)) => {
                let wire = &mut self.queues[q].wires[usize::from(member.0)];
                *wire = Wire { session: Some(session), ..Wire::default() };
                self.drive(now, q, Input::LinkUp { member }, None, oracle);
            }
            Some(ForQueue::LinkDown(member)) => self.close(now, q, member, oracle),
        }
    }

    /// The queue closes a connection, or notices that it is gone.
    pub(crate) fn close(&mut self, now: u64, q: usize, member: MemberId, oracle: &mut Oracle) {
        self.queues[q].wires[usize::from(member.0)] = Wire::default();
        self.drive(now, q, Input::LinkDown { member }, None, oracle);
    }

    /// Takes the next answer from a wire.
    pub(crate) fn serve_wire(&mut self, now: u64, q: usize, member: MemberId, oracle: &mut Oracle) {
        let wire = &mut self.queues[q].wires[usize::from(member.0)];
        match wire.back.pop_front() {
            Some(message) => {
                let reply = Reply {
                    member,
                    tag: message.tag,
                    op: message.op,
                    status: message.status,
                    aux: message.aux,
                    payload: message.payload.bytes(),
                };
                self.drive(now, q, Input::Reply(reply), Some(message.payload), oracle);
            }
            None if wire.broken => self.close(now, q, member, oracle),
            None => {}
        }
    }

    pub(crate) fn tick_queues(&mut self, now: u64, oracle: &mut Oracle) {
        for q in 0..self.queues.len() {
            if self.queues[q].next_tick <= now && self.queues[q].queue.wants_tick(now) {
                self.queues[q].next_tick = now + 50_000_000;
                self.drive(now, q, Input::Tick, None, oracle);
            }
        }
    }

    pub(crate) fn next_queue_tick(&self, now: u64) -> Option<u64> {
        self.queues.iter().filter(|q| q.queue.wants_tick(now)).map(|q| q.next_tick).min()
    }

    /// A client asks for something, if there is a free slot.
    pub(crate) fn request(
        &mut self,
        now: u64,
        q: usize,
        op: Op,
        range: Extent,
        values: &[u32],
        oracle: &mut Oracle,
    ) -> bool {
        let Some(slot) = (0..DEPTH).find(|s| !self.queues[q].asked.contains_key(s)) else { return false };
        let asked = match op {
            Op::Read => Asked::Read { blocks: span(range).map(|b| (b, oracle.read_begins(b))).collect() },
            Op::Flush => Asked::Flush { certain: oracle.flush_begins() },
            _ => {
                let blocks: Vec<_> = span(range).zip(values.iter().copied()).collect();
                blocks.iter().for_each(|(b, v)| oracle.write_begins(self.number, *b, *v));
                Asked::Write { blocks }
            }
        };
        self.queues[q].asked.insert(slot, asked);
        self.drive(now, q, Input::Request { slot, op, range }, None, oracle);
        true
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.queues.iter().map(|q| q.asked.len()).sum()
    }

    fn drive(&mut self, now: u64, q: usize, input: Input, payload: Option<Payload>, oracle: &mut Oracle) {
        let mut out = Vec::new();
        let queue = &mut self.queues[q].queue;
        queue.apply(now, input, &mut out);
        if queue.lets_in() {
            queue.apply(now, Input::LetIn, &mut out);
        }
        for output in out {
            self.carry_out(q, output, payload.as_ref(), oracle);
        }
    }

    fn carry_out(&mut self, q: usize, output: Output, payload: Option<&Payload>, oracle: &mut Oracle) {
        match output {
            Output::Send(transmit) => self.send(q, transmit),
            Output::Store { slot, append } => {
                let payload = payload.expect("a payload that is being applied").clone();
                let stored = match (self.queues[q].stored.remove(&slot).filter(|_| append), payload) {
                    (Some(Payload::Numbers(mut before)), Payload::Numbers(more)) => {
                        before.extend(more);
                        Payload::Numbers(before)
                    }
                    (_, payload) => payload,
                };
                self.queues[q].stored.insert(slot, stored);
            }
            Output::Merge { .. } => panic!("all requests are of whole blocks"),
            Output::Complete { slot, result, part, held } => {
                self.complete(q, slot, result.is_ok(), part, oracle);
                if held {
                    self.queues[q].inbox.push_back(ForQueue::Input(Input::Answered { slot }));
                }
            }
            Output::Free { slot } => {
                self.queues[q].stored.remove(&slot);
                self.queues[q].asked.remove(&slot);
            }
            Output::Wake { queue, ticket } => {
                self.queues[usize::from(queue.0)].inbox.push_back(ForQueue::Input(Input::Granted { ticket }));
            }
            Output::Report(report) => {
                if let FromQueue::ControlLost(id, _) = report {
                    self.controls.remove(&id);
                }
                let q_id = QueueId(u8::try_from(q).expect("few queues"));
                self.reports[q].push_back(conductor::Input::FromQueue(q_id, report));
            }
            Output::ControlReply { id, member, .. } => {
                self.controls.remove(&id);
                if let Some(Payload::Answer(result)) = payload {
                    let result = result.clone();
                    self.reports[q].push_back(conductor::Input::Reply { id, member, result });
                }
            }
            Output::Disconnect { member } => self.queues[q].wires[usize::from(member.0)] = Wire::default(),
        }
    }

    fn send(&mut self, q: usize, transmit: Transmit) {
        let payload = match transmit.data {
            Data::None => Payload::None,
            Data::Client { slot, from } => match &self.queues[q].asked.get(&slot) {
                Some(Asked::Write { blocks }) => {
                    let skip = usize::try_from(u64::from(from) / BLOCK).expect("small");
                    let count = span(transmit.range).len();
                    Payload::Numbers(blocks.iter().skip(skip).take(count).map(|(_, v)| *v).collect())
                }
                other => panic!("data of {other:?} is sent"),
            },
            Data::Stored { slot } => self.queues[q].stored.get(&slot).expect("stored").clone(),
            Data::LayerName(layer) => {
                Payload::Layer(layer.map_or_else(String::new, |l| self.layers[&l].clone()))
            }
            Data::Control(id) => match self.controls.get(&id) {
                Some(control) => Payload::Control(control.clone()),
                None => return,
            },
        };
        let wire = &mut self.queues[q].wires[usize::from(transmit.member.0)];
        if wire.session.is_some() && !wire.broken {
            wire.there.push_back(Message {
                op: transmit.op,
                tag: transmit.tag,
                range: transmit.range,
                verify: transmit.verify,
                status: Status::Ok,
                aux: transmit.aux,
                payload,
            });
        }
    }

    fn complete(&mut self, q: usize, slot: u16, ok: bool, part: Option<(u32, u32)>, oracle: &mut Oracle) {
        let number = self.number;
        let stored = self.queues[q].stored.get(&slot).cloned();
        match self.queues[q].asked.get(&slot) {
            Some(Asked::Read { blocks }) => match (ok, stored, part) {
                (true, Some(Payload::Numbers(numbers)), Some((first, len))) => {
                    assert_eq!((first, u64::from(len)), (0, blocks.len() as u64 * BLOCK), "whole blocks");
                    for ((block, read), value) in blocks.iter().zip(numbers) {
                        oracle.read_ends(number, *block, *read, value);
                    }
                }
                (true, stored, part) => panic!("a read without data: {stored:?} {part:?}"),
                (false, ..) => blocks.iter().for_each(|(b, read)| oracle.read_fails(*b, *read)),
            },
            Some(Asked::Write { blocks }) if ok => {
                blocks.iter().for_each(|(b, v)| oracle.write_ends(number, *b, *v));
            }
            Some(Asked::Flush { certain }) => {
                oracle.flushes.push(ok);
                if ok {
                    oracle.flush_ends(certain);
                }
            }
            _ => {}
        }
    }
}
