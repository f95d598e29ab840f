//! The world: the clock, the events, the network, the authority, the clients, and the end of a run.

mod authority;
mod chain;
mod clients;
mod copies;
mod disaster;
mod ending;
mod growth;
mod leaving;
mod network;
mod older;
mod pieces;
mod scrub;

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

use datapath::conductor::{
    self, Command, CommandId, ConnectError, Input as Conducted, Limits, Quorum, ReplicaConfig, Stored,
};
use datapath::message::{MemberId, QueueId};
use datapath::shared::Shared;
use lh_block::{BLOCK, Epoch, Extent, Generation, Instance, Op};
use lh_wire::Header;
use lh_wire::handshake::Verdict;
use replica::serve::core::{ConnId, SessionHello};

use super::disk::{Disk, Image, Seen, blocks};
use super::engine::{Answer, DEPTH, Engine, Mail, Report};
use super::faults::{ABSENCES, BRANCHES, FOLDS, Fault, MS, Mix, ROTS, SECOND};
use super::node::{Ended, Node, Weather};
use super::packet::{Body, Packet};
use super::parts::REGISTERS;
use tests::dice::Dice;
use tests::register::{History, Stamp};

/// Bytes of the simulated volume, and of a chunk of its intent bitmap.
const SIZE: u64 = 4 << 20;
const CHUNK: u64 = 128 << 10;

/// Blocks that it may come to have.
pub(crate) const BLOCKS: u64 = (SIZE + GROWTH) / BLOCK;

/// Blocks that clients use: few, so that requests meet; most in two chunks, and some in chunks of their own, so that
/// chunks are marked for the first time all through a run.
const HOT: u64 = 24;

/// Bytes that the volume may grow by, in all, and by each expansion.
const GROWTH: u64 = 4 * GROWS_BY;
const GROWS_BY: u64 = 32 << 10;

/// Device queues.
const QUEUES: u8 = 2;

/// How long a handshake may take.
const HANDSHAKE: u64 = 5 * SECOND;

/// How long a volume may take to be well again after the last fault.
const HEAL: u64 = 180 * SECOND;

/// Events after which a run goes round in circles: ordinary ones have some ten thousand.
const EVENTS_MAX: u64 = 2_000_000;

fn hot_block(n: u64) -> u64 {
    match n {
        0..10 => n,
        10..16 => 2 * CHUNK / BLOCK + n,
        _ => (n - 13) * 2 * CHUNK / BLOCK + n,
    }
}

/// One mechanism to take out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sabotage {
    /// In the queues.
    pub(crate) queue: Option<datapath::queue::Sabotage>,
    /// In the conductor.
    pub(crate) conductor: conductor::Sabotage,
    /// In the replicas.
    pub(crate) replica: replica::serve::core::Sabotage,
    /// What a link had lent that is gone counts as returned.
    pub(crate) returned_unheard: bool,
    /// Who reads in granted files does not look at the counters of what has moved.
    pub(crate) counters_unseen: bool,
    /// Nor whether the grant is over.
    pub(crate) grants_endless: bool,
    /// An engine leaves no note of what clients have lost.
    pub(crate) loss_not_noted: bool,
    /// Reads are not compared with checksums, nor is what is copied.
    pub(crate) reads_unverified: bool,
    /// What a replica could not record counts as recorded.
    pub(crate) records_believed: bool,
}

/// Something that will happen.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A packet arrives at a replica.
    ToNode(ConnId, Packet),
    /// A packet arrives at an engine.
    ToEngine(ConnId, Packet),
    /// Something of a node's process has ended.
    Ended {
        /// Node.
        node: usize,
        /// Process.
        process: u64,
        /// What.
        ended: Ended,
    },
    /// As `Ended`, held back while the process was stopped.
    Deliver {
        /// Node.
        node: usize,
        /// Process.
        process: u64,
        /// What.
        input: replica::serve::core::Input,
    },
    /// A queue's mailbox.
    Mail(u64, usize, Mail),
    /// The conductor's mailbox.
    Report(u64, Report),
    /// Time that a conductor asked for.
    ConductorTime {
        /// Which engine.
        engine: u64,
    },
    /// A queue's tick.
    QueueTick(u64, usize),
    /// The kernel reads for an engine in a node's file.
    LocalRead(u64, usize, u64),
    /// An engine looks at what was read for it.
    HasRead(u64, u64),
    /// An engine asks to be granted a replica's files in a session.
    AskGrant(u64, MemberId, SessionHello),
    /// An answer leaves an engine.
    Answer(u64, Answer),
    /// A handshake has taken too long.
    HandshakeOver(u64, MemberId, u64),
    /// A node's manager starts its replica.
    StartNode(usize),
    /// A manager starts an engine; `true`: on the node that saw the last one die.
    StartEngine(bool),
    /// A stopped replica goes on.
    ContinueNode(usize),
    /// A stopped engine goes on.
    ContinueEngine(u64),
    /// An engine that was replaced is killed.
    EndEngine(u64),
    /// A disk is well again.
    Calm(usize),
    /// A fault.
    Fault(Fault),
    /// Clients look for something to do; `true`: and do so again.
    Clients(bool),
    /// Some client gives up on a connection.
    GiveUp,
    /// A server notices that the client of a request has left: engine, queue, slot, and which of its requests.
    HangUp(u64, usize, u16, u64),
    /// A queue of an engine may let in what waits outside.
    TurnDue(u64, usize),
    /// And does.
    LetIn(u64, usize),
    /// A request in this slot of a queue of an engine is handed to the queue.
    Submit(u64, usize, u16),
}

/// What somebody wants done.
enum Effect {
    Later(u64, Event),
    ToEngine(ConnId, Packet),
    Send(ConnId, Header, Body),
    Close(ConnId),
    ToQueue(u64, QueueId, Mail),
    ToConductor(u64, usize, Report),
    LoadEpoch(u64),
    StoreEpoch(u64, Option<(Generation, u64)>, Epoch),
    Connect(u64, MemberId, u64),
    Answer(u64, Answer),
    Opened(u64),
    CommandDone(u64, bool),
    LocalRead(u64, usize, u64),
    Lost(u64),
}

/// Collects what somebody wants done.
#[derive(Default)]
pub(crate) struct Outbox {
    effects: Vec<Effect>,
    log: Vec<String>,
    seen: Vec<(&'static str, u64)>,
    moments: u32,
}

impl Outbox {
    pub(super) fn later(&mut self, at: u64, event: Event) {
        self.effects.push(Effect::Later(at, event));
    }
    pub(super) fn engine_gets(&mut self, conn: ConnId, packet: Packet) {
        self.effects.push(Effect::ToEngine(conn, packet));
    }
    pub(super) fn send(&mut self, conn: ConnId, header: Header, body: Body) {
        self.effects.push(Effect::Send(conn, header, body));
    }
    pub(super) fn close(&mut self, conn: ConnId) {
        self.effects.push(Effect::Close(conn));
    }
    pub(super) fn queue_gets(&mut self, engine: u64, q: QueueId, mail: Mail) {
        self.effects.push(Effect::ToQueue(engine, q, mail));
    }
    pub(super) fn conductor_gets(&mut self, engine: u64, q: usize, report: Report) {
        self.effects.push(Effect::ToConductor(engine, q, report));
    }
    pub(super) fn load_epoch(&mut self, engine: u64) {
        self.effects.push(Effect::LoadEpoch(engine));
    }
    pub(super) fn store_epoch(&mut self, engine: u64, expected: Option<(Generation, u64)>, epoch: Epoch) {
        self.effects.push(Effect::StoreEpoch(engine, expected, epoch));
    }
    pub(super) fn connect(&mut self, engine: u64, member: MemberId, session: u64) {
        self.effects.push(Effect::Connect(engine, member, session));
    }
    pub(super) fn answer(&mut self, engine: u64, answer: Answer) {
        self.effects.push(Effect::Answer(engine, answer));
    }
    pub(super) fn opened(&mut self, engine: u64) {
        self.effects.push(Effect::Opened(engine));
    }
    pub(super) fn read_here(&mut self, engine: u64, node: usize, reading: u64) {
        self.effects.push(Effect::LocalRead(engine, node, reading));
    }
    pub(super) fn command_done(&mut self, command: CommandId, ok: bool) {
        self.effects.push(Effect::CommandDone(command.0, ok));
    }
    pub(super) fn lost(&mut self, engine: u64) {
        self.effects.push(Effect::Lost(engine));
    }
    /// Counts a state that was entered.
    pub(super) fn note(&mut self, what: &'static str, count: u64) {
        if count > 0 {
            self.seen.push((what, count));
        }
    }
    /// Something has changed that other things depend on.
    pub(super) fn moment(&mut self) {
        self.moments += 1;
    }
    pub(super) fn log(&mut self, line: &str) {
        self.log.push(line.to_owned());
    }
}

struct Due {
    at: u64,
    order: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap gives the largest first: the earliest is the largest.
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// A connection.
#[derive(Clone, Debug)]
struct Conn {
    engine: u64,
    node: usize,
    /// When the last packet in each direction arrives.
    to_node: u64,
    to_engine: u64,
    closed: bool,
}

/// A session that is being made.
#[derive(Clone, Debug)]
struct Handshake {
    conns: Vec<ConnId>,
    welcome: usize,
    hello: SessionHello,
}

/// The world of one run.
pub(crate) struct World {
    now: u64,
    order: u64,
    count: u64,
    events: BinaryHeap<Due>,
    dice: Dice,
    nodes: Vec<Node>,
    cut_until: Vec<u64>,
    /// Nobody starts the node's replica before.
    away_until: Vec<u64>,
    /// This engine reaches only this replica until then, nobody else reaches it, and not the authority.
    isolated: Option<(u64, usize, u64)>,
    /// Kept its power since it last held everything that was answered, flushed or not.
    powered: Vec<bool>,
    /// When answers from before the last loss of data have all been heard.
    loss_heard: u64,
    /// Sessions of clients that may have lost something, and are told with a flush; and those that have begun.
    may_have_lost: BTreeSet<u64>,
    sessions_begun: BTreeSet<u64>,
    /// Of which sessions an engine has noted a loss on its host, and told nobody yet.
    loss_notes: BTreeSet<u64>,
    frozen_until: u64,
    at_peace: bool,
    /// The run ends with this engine.
    at_its_end: bool,
    /// Engines that are about to start.
    starting: u32,
    engines: BTreeMap<u64, Engine>,
    engine_count: u64,
    current: u64,
    generation: Generation,
    epoch: Option<Epoch>,
    /// With a majority: the epoch that each replica has recorded, and who held everything when an epoch was made.
    recorded: Vec<Option<(Generation, u64)>>,
    holders: BTreeMap<(Generation, u64), Vec<usize>>,
    conns: BTreeMap<ConnId, Conn>,
    conn_count: u64,
    handshakes: BTreeMap<(u64, MemberId, u64), Handshake>,
    /// The last session of an engine with a replica.
    sessions: BTreeMap<(u64, MemberId), Instance>,
    mail_at: BTreeMap<(u64, usize), u64>,
    report_at: BTreeMap<(u64, usize), u64>,
    history: History,
    stamps: u64,
    budget: u64,
    /// Mean time between two looks of the clients, beyond their usual haste, ns.
    pace: u64,
    chain: chain::Chain,
    record: growth::Record,
    /// Chooses when the volume is scrubbed, and whether it is.
    scrub_dice: Dice,
    scrubs: bool,
    /// Chooses whether requests are of parts of blocks, or longer than what is sent at once, and which; and when they end that nobody
    /// serves, ns, or 0.
    piece_dice: Dice,
    told_dice: Dice,
    /// They ask at all: in every fourth run. The others are as they were without, and notice what is rare.
    asks_what_holds_data: bool,
    in_pieces: bool,
    io_timeout: u64,
    rots: u64,
    /// Faults that may still follow on something that changes.
    aftershocks: u64,
    mix: Mix,
    /// Whatever the seed says.
    only: Option<Mix>,
    quorum: Quorum,
    /// As in the limits of a conductor.
    grace: u64,
    sabotage: Sabotage,
    broken: Option<String>,
    errors_injected: bool,
    tracing: bool,
    /// A block whose fate on every disk is told, and what was last told of each.
    watched: Option<u64>,
    watched_as: Vec<String>,
    seen: BTreeMap<String, u64>,
}

impl World {
    /// A world of three replicas from the seed.
    pub(crate) fn new(seed: u64, sabotage: Sabotage, tracing: bool) -> Self {
        let dice = Dice::new(seed);
        let registers = usize::try_from(REGISTERS).unwrap_or(0);
        Self {
            now: 0,
            order: 0,
            count: 0,
            events: BinaryHeap::new(),
            dice,
            nodes: (0..3).map(|n| Self::node(n, sabotage)).collect(),
            cut_until: vec![0; 3],
            away_until: vec![0; 3],
            isolated: None,
            pace: 0,
            powered: vec![true; 3],
            recorded: vec![None; 3],
            holders: BTreeMap::new(),
            at_peace: false,
            at_its_end: false,
            starting: 0,
            loss_heard: 0,
            may_have_lost: BTreeSet::new(),
            sessions_begun: BTreeSet::new(),
            loss_notes: BTreeSet::new(),
            frozen_until: 0,
            engines: BTreeMap::new(),
            engine_count: 0,
            current: 0,
            generation: Generation::default(),
            epoch: None,
            conns: BTreeMap::new(),
            conn_count: 0,
            handshakes: BTreeMap::new(),
            sessions: BTreeMap::new(),
            mail_at: BTreeMap::new(),
            report_at: BTreeMap::new(),
            history: History::new(registers),
            stamps: 0,
            budget: 0,
            chain: chain::Chain::default(),
            record: growth::Record::of(3),
            scrub_dice: Dice::new(!seed),
            scrubs: false,
            piece_dice: Dice::new(seed.rotate_left(52)),
            told_dice: Dice::new(seed.rotate_left(20)),
            asks_what_holds_data: Dice::new(seed.rotate_left(28)).chance(250),
            in_pieces: false,
            io_timeout: 0,
            rots: 0,
            aftershocks: 0,
            mix: Mix::All,
            only: None,
            quorum: Quorum::Any,
            grace: 3 * SECOND,
            sabotage,
            broken: None,
            errors_injected: false,
            tracing,
            watched: None,
            watched_as: vec![String::new(); 3],
            seen: BTreeMap::new(),
        }
    }

    fn node(number: usize, sabotage: Sabotage) -> Node {
        let mut node = Node::new(number, Disk::new(SIZE, CHUNK), sabotage.replica);
        node.unseen = (sabotage.counters_unseen, sabotage.grants_endless);
        node.records_believed = sabotage.records_believed;
        node
    }

    /// Instead of three.
    fn have_replicas(&mut self, replicas: usize) {
        self.nodes = (0..replicas).map(|n| Self::node(n, self.sabotage)).collect();
        (self.cut_until, self.away_until) = (vec![0; replicas], vec![0; replicas]);
        (self.powered, self.recorded) = (vec![true; replicas], vec![None; replicas]);
        self.watched_as = vec![String::new(); replicas];
        self.record = growth::Record::of(replicas);
    }

    /// Tells what becomes of a block on every disk, if anything is told.
    #[must_use]
    pub(crate) fn watching(mut self, block: Option<u64>) -> Self {
        self.watched = block.filter(|_| self.tracing);
        self
    }

    /// A run of this kind, whatever the seed says.
    #[must_use]
    pub(crate) fn only(mut self, mix: Option<Mix>) -> Self {
        self.only = mix;
        self
    }

    /// One run: load under faults, then peace, then the comparison.
    ///
    /// # Errors
    /// The first broken promise.
    pub(crate) fn run(mut self) -> Result<BTreeMap<String, u64>, String> {
        self.budget = self.dice.between(50, 400);
        self.aftershocks = self.dice.below(5);
        let mut length = self.dice.between(SECOND / 2, 6 * SECOND);
        self.mix = Mix::of(&mut self.dice);
        if self.scrub_dice.chance(60) {
            self.mix = Mix::Rot;
        }
        self.mix = self.only.unwrap_or(self.mix);
        if self.mix == Mix::Absences {
            length = ABSENCES;
            self.budget = self.budget.max(200);
        }
        self.quorum = match self.dice.below(100) {
            0..80 => Quorum::Any,
            80..96 => Quorum::Majority,
            _ if self.mix == Mix::Rot => Quorum::Any,
            _ => Quorum::Unsafe,
        };
        if matches!(self.mix, Mix::Older | Mix::Copies) {
            self.quorum = if self.dice.chance(500) { Quorum::Majority } else { Quorum::Any };
        }
        if self.mix == Mix::Grow {
            (self.quorum, self.record) = (Quorum::Majority, growth::Record::of(1));
        }
        if self.mix == Mix::Many {
            self.quorum = if self.dice.chance(700) { Quorum::Majority } else { Quorum::Any };
            let replicas = self.dice.pick(&[2, 4, 4, 5]).unwrap_or(4);
            self.have_replicas(replicas);
        }
        if self.mix == Mix::Ends {
            self.nodes.iter_mut().for_each(|n| n.records_need_space = true);
        }
        if self.dice.chance(500) {
            self.grace = SECOND / 2;
        }
        let quorum = format!("quorum {:?}", self.quorum).to_lowercase();
        self.say(|| quorum.clone());
        self.note(quorum);
        if matches!(self.mix, Mix::Folds | Mix::Fills) {
            length = FOLDS;
            let folds = self.dice.between(1, 20);
            self.nodes.iter_mut().for_each(|n| n.weather.folds = folds);
        }
        if self.mix == Mix::Rot {
            length = ROTS;
        }
        if self.mix == Mix::Branches {
            length = BRANCHES;
        }
        if self.mix == Mix::Clients {
            self.at(2 * MS, Event::GiveUp);
        }
        if self.mix == Mix::Disks {
            // Whoever is slow is put out only after some seconds under load.
            self.budget *= 4;
        }
        if self.dice.chance(500)
            || matches!(self.mix, Mix::Absences | Mix::Folds | Mix::Fills | Mix::Branches)
        {
            // Load all the time, so that it meets repairs and rebuilds.
            self.pace = length * 3 / self.budget;
        }
        for (at, fault) in self.mix.plan(&mut self.dice, self.nodes.len(), length) {
            self.at(at, Event::Fault(fault));
        }
        self.plan_scrubs(length);
        self.plan_pieces();
        for node in 0..self.nodes.len() {
            self.at(0, Event::StartNode(node));
        }
        self.at(MS, Event::StartEngine(true));
        self.at(2 * MS, Event::Clients(true));
        let ended = self.play(length + 15 * SECOND, |w| w.budget == 0 && w.now > length && w.quiet());
        if self.broken.is_none() && !ended {
            // Whatever still goes on is not harmful by itself; peace will tell.
            self.note("load cut short".into());
        }
        self.peace();
        if self.broken.is_none() && self.mix == Mix::Older {
            self.put_something_older_back();
        }
        if self.broken.is_none() && self.mix == Mix::Copies {
            self.put_a_copy_back();
        }
        if self.broken.is_none() {
            self.verify();
        }
        match self.broken.take() {
            Some(what) => Err(what),
            None => Ok(self.seen),
        }
    }

    fn at(&mut self, at: u64, event: Event) {
        self.starting += u32::from(matches!(event, Event::StartEngine(_)));
        self.order += 1;
        self.events.push(Due { at, order: self.order, event });
    }

    fn note(&mut self, line: String) {
        *self.seen.entry(line).or_default() += 1;
    }

    fn say(&mut self, line: impl FnOnce() -> String) {
        if self.tracing {
            eprintln!("{:>12.6} {}", self.now as f64 / 1e9, line());
        }
    }

    /// The data is not what it should be. With the quorum `unsafe` nobody promises that.
    fn wrong(&mut self, what: String) {
        if self.quorum == Quorum::Unsafe {
            self.note("wrong data with the quorum unsafe".into());
        } else {
            self.fail(what);
        }
    }

    fn fail(&mut self, what: String) {
        self.say(|| format!("BROKEN {what}"));
        self.broken.get_or_insert(what);
    }

    /// Plays until `until` or `enough`; true if it was enough.
    fn play(&mut self, until: u64, enough: impl Fn(&Self) -> bool) -> bool {
        while self.broken.is_none() {
            if enough(self) {
                return true;
            }
            let Some(due) = self.events.pop() else { return false };
            if due.at > until {
                self.events.push(due);
                self.now = until;
                return false;
            }
            self.now = self.now.max(due.at);
            self.count += 1;
            if self.count > EVENTS_MAX {
                self.fail(format!("no end after {EVENTS_MAX} events, at {} ns: {:?}", self.now, due.event));
                return false;
            }
            let mut out = Outbox::default();
            self.happens(due.event, &mut out);
            self.carry(out);
            self.watch();
        }
        false
    }

    /// Says what has become of the watched block on every disk.
    fn watch(&mut self) {
        let Some(block) = self.watched else { return };
        for node in 0..self.nodes.len() {
            let now = self.nodes[node].disk.tell(block);
            if self.watched_as[node] != now {
                self.say(|| format!("block {block} of r{node}: {now}"));
                self.watched_as[node] = now;
            }
        }
    }

    fn quiet(&self) -> bool {
        self.engines.values().all(|e| e.slots.iter().flatten().all(|s| !s.taken))
    }

    fn happens(&mut self, event: Event, out: &mut Outbox) {
        let engine = match &event {
            Event::ToEngine(conn, _) => self.conns.get(conn).map(|c| c.engine),
            Event::Mail(e, ..)
            | Event::Report(e, _)
            | Event::ConductorTime { engine: e }
            | Event::QueueTick(e, _)
            | Event::HasRead(e, _)
            | Event::AskGrant(e, ..)
            | Event::Answer(e, _)
            | Event::HangUp(e, ..)
            | Event::TurnDue(e, _)
            | Event::LetIn(e, _)
            | Event::Submit(e, ..)
            | Event::HandshakeOver(e, ..) => Some(*e),
            _ => None,
        };
        if let Some(number) = engine {
            match self.engines.get_mut(&number) {
                None => {
                    if let Event::Answer(_, Answer { read: Some(read), .. }) = event {
                        self.history.read_ends(read);
                    }
                    return;
                }
                Some(e) if e.frozen => {
                    e.waiting.push_back(event);
                    return;
                }
                Some(_) => self.engine_event(number, event, out),
            }
            return;
        }
        let now = self.now;
        match event {
            Event::ToNode(conn, packet) => {
                if let Some(c) = self.conns.get(&conn) {
                    self.nodes[c.node].arrives(now, conn, packet, &mut self.dice, out);
                }
            }
            Event::Ended { node, process, ended } => {
                self.nodes[node].happens(now, process, ended, &mut self.dice, out);
                self.look_at_records();
                self.look_at_node(node, out);
            }
            Event::Deliver { node, process, input } => {
                self.nodes[node].delivers(now, process, input, &mut self.dice, out);
                self.look_at_node(node, out);
            }
            // Whether or not the engine is stopped.
            Event::LocalRead(engine, node, id) => {
                let (nodes, dice) = (&self.nodes, &mut self.dice);
                let failed = dice.chance(nodes[node].weather.error);
                if let Some(e) = self.engines.get_mut(&engine) {
                    e.reads(id, |file, block| nodes[node].disk.read_file(file, block).filter(|_| !failed));
                }
                let late = self.dice.between(1000, MS / 10);
                out.later(now + late, Event::HasRead(engine, id));
            }
            Event::StartNode(node) if now < self.away_until[node] => {
                out.later(self.away_until[node], Event::StartNode(node));
            }
            Event::StartNode(node) if self.nodes[node].start() => self.look_for_lost_power(),
            Event::StartNode(node) => out.later(now + 20 * MS, Event::StartNode(node)),
            Event::StartEngine(known_dead) => self.start_engine(known_dead, out),
            Event::ContinueNode(node) => {
                for (conn, packet) in self.nodes[node].set_stopped(false) {
                    self.nodes[node].arrives(now, conn, packet, &mut self.dice, out);
                }
            }
            Event::ContinueEngine(number) => self.thaw(number, out),
            Event::EndEngine(number) => self.kill_engine(number, out),
            Event::Calm(node) => {
                let folds = self.nodes[node].weather.folds;
                self.nodes[node].weather = Weather { slow: 1, error: 0, records: 0, folds };
            }
            Event::Fault(fault) => self.fault(fault, out),
            Event::Clients(again) => self.clients(again, out),
            Event::GiveUp => self.give_up(out),
            _ => {}
        }
    }

    fn engine_event(&mut self, number: u64, event: Event, out: &mut Outbox) {
        let now = self.now;
        match event {
            Event::ToEngine(conn, packet) => self.engine_packet(number, conn, packet, out),
            Event::HandshakeOver(_, member, session) => {
                let why = ConnectError::Unreachable("no answer in time".into());
                self.handshake_failed(number, member, session, why, out);
            }
            Event::Answer(_, answer) => self.answer(number, answer, out),
            Event::HasRead(_, id) => {
                if let Some(e) = self.engines.get_mut(&number) {
                    e.has_read(now, id, out);
                }
            }
            Event::AskGrant(_, member, hello) => self.ask_grant(number, member, hello),
            Event::HangUp(..) | Event::TurnDue(..) | Event::LetIn(..) | Event::Submit(..) => {
                self.queue_turns(number, &event, out)
            }
            Event::Mail(_, q, mail) => {
                if let Some(e) = self.engines.get_mut(&number) {
                    e.mail(now, q, mail, out);
                }
            }
            Event::Report(_, report) => {
                if let Some(e) = self.engines.get_mut(&number) {
                    e.conduct(now, report, out);
                }
            }
            Event::ConductorTime { .. } => {
                if let Some(e) = self.engines.get_mut(&number) {
                    e.conduct(now, Report::Input(Conducted::Tick), out);
                }
            }
            Event::QueueTick(_, q) => {
                if let Some(e) = self.engines.get_mut(&number)
                    && e.tick(now, q, out)
                {
                    out.later(now + 50 * MS, Event::QueueTick(number, q));
                }
            }
            _ => {}
        }
        self.look_at_end(number, out);
    }

    /// A replica that cannot go on is started again.
    fn look_at_node(&mut self, node: usize, out: &mut Outbox) {
        if self.nodes[node].has_failed() {
            self.note("replica gave up".into());
            self.kill_node(node, out);
        }
    }

    /// An engine that ended by itself is replaced, unless it was told to end.
    fn look_at_end(&mut self, number: u64, out: &mut Outbox) {
        let Some(why) = self.engines.get(&number).and_then(|e| e.stopped.clone()) else { return };
        if why == conductor::Why::Clean && self.at_its_end {
            return;
        }
        self.say(|| format!("engine {number} stopped: {why}"));
        self.note(match &why {
            conductor::Why::Clean => "engine ended cleanly".into(),
            why if why.is_fenced() => "engine fenced off".into(),
            _ => "engine gave up".into(),
        });
        if why == conductor::Why::Clean && self.may_have_lost.is_empty() {
            // All that it has answered is on stable storage.
            let (flush, session) = (self.history.flush_begins(), self.generation.attachment.into());
            self.history.flush_acked(flush, session);
        }
        self.kill_engine(number, out);
        if number == self.current {
            let known_dead = self.engines.is_empty();
            out.later(self.now + 100 * MS, Event::StartEngine(known_dead));
        }
    }

    fn start_engine(&mut self, known_dead: bool, out: &mut Outbox) {
        self.starting -= 1;
        self.engine_count += 1;
        self.current = self.engine_count;
        let seen = self.nodes.iter().filter_map(|n| n.disk.fence()).max().unwrap_or_default();
        self.generation = self.generation.max(seen);
        // Another one may have been started since that one was seen to die.
        let known_dead = known_dead && self.engines.is_empty();
        self.generation =
            if known_dead { self.generation.next_restart() } else { self.generation.next_attachment() };
        let config = conductor::Config {
            volume: "sim".into(),
            generation: self.generation,
            instance: Instance(u128::from(self.dice.number()) << 64 | u128::from(self.engine_count)),
            quorum: self.quorum,
            replicas: self.record.config(),
            queues: QUEUES,
            size: SIZE,
            shared: Arc::new(Shared::new(SIZE, CHUNK)),
            known_dead,
            limits: Limits {
                grace_ns: self.grace,
                rebuild_backoff_ns: 2 * SECOND,
                flush_after_ns: 2 * SECOND,
                clear_every_ns: SECOND,
                ..Limits::default()
            },
            sabotage: self.sabotage.conductor,
        };
        let number = self.engine_count;
        self.say(|| format!("engine {number} starts"));
        let (generation, instance) = (config.generation, config.instance);
        let how = (self.mix == Mix::Rot, self.io_timeout, self.sabotage);
        let mut engine = Engine::new(number, generation, instance, QUEUES, config, how);
        engine.stumbles = self.mix == Mix::Clients;
        if self.loss_notes.contains(&engine.session()) {
            engine.finds_a_loss_noted();
        }
        self.engines.insert(number, engine);
        self.look_for_lost_power();
        for q in 0..usize::from(QUEUES) {
            out.later(self.now + 50 * MS, Event::QueueTick(number, q));
        }
        out.later(self.now, Event::ConductorTime { engine: number });
        out.load_epoch(number);
    }

    fn carry(&mut self, out: Outbox) {
        for line in out.log {
            self.say(|| line);
        }
        for (what, count) in out.seen {
            *self.seen.entry(what.into()).or_default() += count;
        }
        for _ in 0..out.moments {
            self.moment();
        }
        for effect in out.effects {
            self.effect(effect);
        }
    }

    fn effect(&mut self, effect: Effect) {
        let now = self.now;
        match effect {
            Effect::Later(at, event) => self.at(at, event),
            Effect::ToEngine(conn, packet) => {
                let delay = self.delay();
                let cut = self.cut(conn);
                let Some(c) = self.conns.get_mut(&conn) else { return };
                c.to_engine = c.to_engine.max(now + delay).max(cut);
                let at = c.to_engine;
                self.at(at, Event::ToEngine(conn, packet));
            }
            Effect::Send(conn, header, body) => self.node_gets(conn, Packet::Message(header, body)),
            Effect::Close(conn) => {
                if self.conns.get(&conn).is_some_and(|c| !c.closed) {
                    self.node_gets(conn, Packet::End);
                    if let Some(c) = self.conns.get_mut(&conn) {
                        c.closed = true;
                    }
                }
            }
            Effect::ToQueue(engine, q, mail) => {
                let q = usize::from(q.0);
                let at = self.fifo_mail(engine, q);
                self.at(at, Event::Mail(engine, q, mail));
            }
            Effect::ToConductor(engine, q, report) => {
                let delay = self.dice.between(MS / 200, MS / 5);
                let last = self.report_at.entry((engine, q)).or_default();
                *last = (*last).max(now + delay);
                let at = *last;
                self.at(at, Event::Report(engine, report));
            }
            Effect::LoadEpoch(engine) => {
                let loaded = Conducted::AuthorityLoaded(self.epoch.clone());
                let delay = self.dice.between(MS / 10, 20 * MS);
                self.at(now + delay, Event::Report(engine, Report::Input(loaded)));
            }
            Effect::StoreEpoch(engine, expected, epoch) => self.store_epoch(engine, expected, epoch),
            Effect::Connect(engine, member, session) => self.connect(engine, member, session),
            Effect::Answer(engine, answer) => {
                let delay = self.dice.between(MS / 100, MS / 3);
                self.at(now + delay, Event::Answer(engine, answer));
            }
            Effect::CommandDone(command, ok) => self.command_done(command, ok),
            Effect::LocalRead(engine, node, id) => {
                let slow = self.nodes[node].weather.slow;
                let us = if self.dice.chance(20) {
                    self.dice.between(1000, 20_000)
                } else {
                    self.dice.between(5, 400)
                };
                self.at(now + us * 1000 * slow, Event::LocalRead(engine, node, id));
            }
            Effect::Lost(engine) => {
                if let Some(e) = self.engines.get(&engine)
                    && !self.sabotage.loss_not_noted
                {
                    self.loss_notes.insert(e.session());
                }
            }
            Effect::Opened(engine) => {
                self.say(|| format!("engine {engine} is open"));
                self.note("engine open".into());
                if let Some(e) = self.engines.get(&engine)
                    && !self.sessions_begun.insert(e.session())
                {
                    e.clients_have_stayed();
                }
                self.moment();
                if engine == self.current {
                    self.history.engine_replaced();
                }
                self.tempt_the_isolated();
                if self.mix == Mix::Ends && !self.at_peace && self.dice.chance(300) {
                    // What was in doubt is made equal about now.
                    let soon = self.dice.below(60 * MS);
                    self.at(self.now + soon, Event::Fault(Fault::End));
                }
                if self.mix == Mix::Folds && !self.at_peace {
                    // Who came back may differ from the others in what is folded now.
                    for _ in 0..2 {
                        let soon = self.dice.below(50 * MS);
                        self.at(now + soon, Event::Fault(Fault::Purge));
                    }
                }
            }
        }
    }
}
