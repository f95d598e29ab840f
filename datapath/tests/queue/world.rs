//! The queues, their driver, the network, the clients, and time.

use std::collections::VecDeque;
use std::sync::Arc;

use datapath::message::{FromQueue, MemberId, QueueId};
use datapath::order::Table;
use datapath::queue::{Config, Data, Input, Output, Queue, Reply, Transmit};
use datapath::shared::Shared;
use lh_block::{BLOCK, Extent, Op, SECTOR};
use lh_wire::OpCode;

use crate::history::{Register, Value};
use crate::manager::Manager;
use crate::replica::{Answer, Message, Replica};

pub(crate) const MS: u64 = 1_000_000;
const BLOCKS: u64 = 640;
const SECTORS: usize = (BLOCKS * BLOCK / SECTOR) as usize;
pub(crate) const CHUNK: u64 = 4 << 20;
const QUEUES: usize = 2;
const DEPTH: u16 = 12;

/// What may go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scenario {
    /// Nothing.
    Calm,
    /// Links break, disks fail and fill up, processes hang; members go and come back.
    Faults,
    /// Single writes take seconds on one member, while others pass.
    Stuck,
    /// Another engine fences some members off and writes.
    Takeover,
}

/// How often things happened, over all schedules of a scenario.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) answered: u64,
    pub(crate) errors: u64,
    pub(crate) pauses: u64,
    pub(crate) breaks: u64,
    pub(crate) forgotten: u64,
    pub(crate) rejoined: u64,
    pub(crate) returned: u64,
    pub(crate) doubts: u64,
    pub(crate) hung: u64,
    pub(crate) full: u64,
    pub(crate) failing: u64,
    pub(crate) stale: u64,
    pub(crate) foreign_writes: u64,
}

impl Seen {
    /// What a scenario is about and never happened.
    pub(crate) fn missing(&self, scenario: Scenario) -> Option<&'static str> {
        let must: &[(&str, u64)] = match scenario {
            Scenario::Calm | Scenario::Stuck => &[("an answer", self.answered), ("a pause", self.pauses)],
            Scenario::Faults => &[
                ("an answer", self.answered),
                ("a pause", self.pauses),
                ("a broken link", self.breaks),
                ("a member put out", self.forgotten),
                ("a member rejoined", self.rejoined),
                ("the last member's return", self.returned),
                ("a chunk in doubt", self.doubts),
                ("a hung member", self.hung),
                ("a full disk", self.full),
                ("a failing disk", self.failing),
            ],
            Scenario::Takeover => &[("a fence", self.stale), ("a foreign write", self.foreign_writes)],
        };
        must.iter().find(|(_, n)| *n == 0).map(|(what, _)| *what)
    }
}

/// Random numbers (splitmix64).
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A connection of one queue to one member.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    pub(crate) session: u64,
    /// The engine's side believes in it.
    pub(crate) up: bool,
    /// Broken; the engine's side will learn it.
    pub(crate) broken: bool,
    pub(crate) there: VecDeque<Message>,
    pub(crate) back: VecDeque<Answer>,
}

/// A client's request.
#[derive(Debug)]
struct Call {
    op: Op,
    range: Extent,
    value: Value,
    began: u64,
    stored: Vec<Value>,
    /// For a flush: what every member had done when it was asked for.
    covers: Vec<(MemberId, Vec<u64>)>,
    answered: bool,
}

/// A queue and its driver.
struct Station {
    queue: Queue,
    calls: Vec<Option<Call>>,
    images: Vec<Vec<Value>>,
    mailbox: VecDeque<Input>,
    /// Answers that are on their way to the client.
    leaving: Vec<u16>,
    next_tick: u64,
}

pub(crate) struct World {
    scenario: Scenario,
    pub(crate) random: Random,
    pub(crate) now: u64,
    moment: u64,
    stations: Vec<Station>,
    pub(crate) connections: Vec<Vec<Connection>>,
    pub(crate) replicas: Vec<Replica>,
    pub(crate) manager: Manager,
    pub(crate) shared: Arc<Shared>,
    history: Vec<Register>,
    value: Value,
    /// No new faults and no new requests.
    settling: bool,
    foreign: Option<Foreign>,
    read_only: bool,
    seed: u64,
}

/// The other engine.
struct Foreign {
    members: Vec<usize>,
    may_answer_at: u64,
}

impl World {
    pub(crate) fn new(scenario: Scenario, seed: u64) -> Self {
        let mut random = Random(seed);
        let members = if scenario == Scenario::Takeover { 2 + random.below(2) } else { 1 + random.below(3) };
        let members = usize::try_from(members).expect("few");
        let table = Arc::new(Table::new());
        let shared = Arc::new(Shared::new(BLOCKS * BLOCK, CHUNK));
        if random.one_in(2) {
            (1..3).for_each(|m| shared.set_far(MemberId(m), true));
        }
        let config = Config {
            size: BLOCKS * BLOCK,
            logical_block: 512,
            max_transfer: 1 << 20,
            depth: DEPTH,
            io_timeout_ns: 0,
            verify: false,
        };
        let queue = |q| {
            let mut queue = Queue::new(config.clone(), QueueId(q), table.clone(), shared.clone());
            // Of some, the clients are looked for.
            queue.watch(q % 2 == 1);
            queue
        };
        let station = |q| Station {
            queue: queue(q),
            calls: (0..DEPTH).map(|_| None).collect(),
            images: vec![Vec::new(); 64],
            mailbox: VecDeque::new(),
            leaving: Vec::new(),
            next_tick: 0,
        };
        Self {
            scenario,
            now: 1_000_000 * MS,
            moment: 1,
            stations: (0_u8..).take(QUEUES).map(station).collect(),
            connections: (0..QUEUES).map(|_| (0..members).map(|_| Connection::default()).collect()).collect(),
            replicas: (0..members).map(|_| Replica::new(SECTORS, QUEUES)).collect(),
            manager: Manager::new(members, QUEUES),
            shared,
            history: (0..SECTORS).map(|_| Register::default()).collect(),
            value: 0,
            settling: false,
            foreign: None,
            read_only: false,
            seed,
            random,
        }
    }

    #[cfg(feature = "sabotage")]
    pub(crate) fn sabotage(&mut self, which: datapath::queue::Sabotage) {
        for s in &mut self.stations {
            s.queue.sabotage(Some(which));
        }
    }

    pub(crate) fn send(&mut self, queue: usize, input: Input) {
        self.stations[queue].mailbox.push_back(input);
    }

    /// One schedule.
    pub(crate) fn run(mut self, seen: &mut Seen) -> Result<(), String> {
        let steps = if self.scenario == Scenario::Stuck { 120_000 } else { 40_000 };
        for step in 0..steps {
            self.settling = step > steps * 9 / 10;
            self.step(seen)?;
        }
        if self.scenario == Scenario::Takeover {
            return self.check_history();
        }
        let deadline = self.now + 600_000 * MS;
        for m in &mut self.replicas {
            (m.full, m.failing, m.hangs_until) = (false, false, 0);
        }
        while !self.is_settled() {
            if self.now > deadline {
                return Err(format!("does not settle: {}", self.describe()));
            }
            self.step(seen)?;
        }
        self.check_equal()?;
        self.check_history()
    }

    fn is_settled(&self) -> bool {
        self.stations.iter().all(|s| s.calls.iter().all(Option::is_none) && s.mailbox.is_empty())
            && self.manager.is_settled()
            && self.replicas.iter().all(Replica::is_idle)
    }

    fn describe(&self) -> String {
        let calls: Vec<_> = self.stations.iter().map(|s| s.calls.iter().flatten().count()).collect();
        format!("{calls:?} requests open; {}", self.manager.describe())
    }

    fn step(&mut self, seen: &mut Seen) -> Result<(), String> {
        // Nothing much happens while things settle, or while the other engine waits.
        let waits = self.settling || self.foreign.as_ref().is_some_and(|f| self.now < f.may_answer_at);
        let slowly = if self.scenario == Scenario::Stuck { MS / 20 } else { MS / 5 };
        self.now += self.random.below(if waits { 4 * MS } else { slowly });
        if self.random.one_in(500) {
            self.now += self.random.below(30 * MS);
        }
        for q in 0..QUEUES {
            if self.now >= self.stations[q].next_tick {
                self.stations[q].next_tick = self.now + 50 * MS;
                if self.stations[q].queue.wants_tick(self.now) {
                    self.apply(q, Input::Tick, None, seen)?;
                }
            }
            if self.stations[q].queue.looks() && self.random.one_in(2) {
                self.apply(q, Input::Looked, None, seen)?;
            }
            // Some turns later.
            if self.stations[q].queue.lets_in() && self.random.one_in(4) {
                self.apply(q, Input::LetIn, None, seen)?;
            }
        }
        let q = usize::try_from(self.random.below(QUEUES as u64)).expect("few");
        let m = usize::try_from(self.random.below(self.replicas.len() as u64)).expect("few");
        match self.random.below(16) {
            0..=1 if !self.settling => self.submit(q, seen)?,
            2..=4 => self.deliver(q, m)?,
            5..=9 => self.work(m),
            10..=12 => self.receive(q, m, seen)?,
            13 => {
                if let Some(input) = self.stations[q].mailbox.pop_front() {
                    self.apply(q, input, None, seen)?;
                }
            }
            14 if !self.stations[q].leaving.is_empty() => {
                let n = self.random.below(self.stations[q].leaving.len() as u64);
                let slot = self.stations[q].leaving.swap_remove(usize::try_from(n).expect("few"));
                self.apply(q, Input::Answered { slot }, None, seen)?;
            }
            _ => {
                Manager::step(self, seen)?;
                match self.scenario {
                    Scenario::Calm | Scenario::Stuck => {}
                    Scenario::Faults => self.fault(m, seen),
                    Scenario::Takeover => self.foreign(seen),
                }
            }
        }
        Ok(())
    }

    /// A client asks for something.
    fn submit(&mut self, q: usize, seen: &mut Seen) -> Result<(), String> {
        let Some(slot) = self.stations[q].calls.iter().position(Option::is_none) else { return Ok(()) };
        let (op, range) = self.any_request();
        self.value += 1;
        self.moment += 1;
        let mut covers = Vec::new();
        if op == Op::Flush {
            for m in self.manager.epoch() {
                covers.push((MemberId(u8::try_from(m).expect("few")), self.replicas[m].changes.clone()));
            }
        }
        self.stations[q].calls[slot] = Some(Call {
            op,
            range,
            value: self.value,
            began: self.moment,
            stored: Vec::new(),
            covers,
            answered: false,
        });
        if op.is_write() {
            // Until it is answered nobody knows whether it was done.
            for s in Message::sectors(range) {
                self.history[s].write(self.value, self.moment, None);
            }
        }
        let slot = u16::try_from(slot).expect("few");
        self.apply(q, Input::Request { slot, op, range }, None, seen)
    }

    fn any_request(&mut self) -> (Op, Extent) {
        let op = match self.random.below(20) {
            _ if self.read_only => Op::Read,
            0..=5 => Op::Read,
            6..=7 => Op::Allocation,
            8 => Op::Flush,
            9..=10 => Op::WriteZeroes { fua: self.random.one_in(3), may_unmap: true, fast: false },
            11 => Op::Unmap,
            _ => Op::Write { fua: self.random.one_in(5) },
        };
        // Few blocks, around the border of two stripes, and seldom more than a piece.
        let first = if self.random.one_in(2) { 0 } else { 13 } + self.random.below(4);
        let mut range = Extent::new(first * BLOCK, (1 + self.random.below(3)) * BLOCK);
        if self.scenario == Scenario::Stuck {
            range = Extent::new(self.random.below(BLOCKS) * BLOCK, BLOCK);
        }
        if self.random.one_in(4) && self.scenario != Scenario::Stuck {
            range.offset += self.random.below(8) * SECTOR;
            range.len = (1 + self.random.below(12)) * SECTOR;
        }
        if matches!(op, Op::WriteZeroes { .. } | Op::Unmap | Op::Allocation)
            && self.random.one_in(8)
            && self.scenario != Scenario::Stuck
        {
            range.len = (260 + self.random.below(300)) * BLOCK + self.random.below(2) * SECTOR;
        }
        if op == Op::Flush {
            range = Extent::default();
        }
        (op, range)
    }

    /// A request reaches a replica.
    fn deliver(&mut self, q: usize, m: usize) -> Result<(), String> {
        let sticks = match self.scenario {
            Scenario::Calm | Scenario::Takeover => false,
            Scenario::Faults => !self.settling && self.random.one_in(400),
            Scenario::Stuck => !self.settling && self.random.one_in(1500),
        };
        let now = self.now;
        let c = &mut self.connections[q][m];
        if c.broken || now < self.replicas[m].hangs_until {
            return Ok(());
        }
        let Some(message) = c.there.pop_front() else { return Ok(()) };
        if message.session != self.replicas[m].session {
            return Ok(());
        }
        let not_before = if sticks { now + 3000 * MS } else { 0 };
        if let Some(forgotten) = self.replicas[m].take(message, not_before) {
            let lacks = |e: &usize| !self.replicas[*e].done.contains(&forgotten);
            let somebody_has = self.manager.epoch().iter().any(|e| !lacks(e));
            if somebody_has && let Some(e) = self.manager.epoch().iter().find(|e| lacks(e)) {
                return Err(format!("{m} forgets {forgotten:?}, which {e} lacks"));
            }
        }
        Ok(())
    }

    /// A replica goes on with something.
    fn work(&mut self, m: usize) {
        for _ in 0..1 + self.random.below(12) {
            let random = usize::try_from(self.random.below(1 << 16)).expect("small");
            let Some(answer) = self.replicas[m].step(self.now, random) else { continue };
            let c = &mut self.connections[usize::from(answer.to.queue.0)][m];
            if c.up && !c.broken && c.session == answer.to.session {
                c.back.push_back(answer);
            }
        }
    }

    /// An answer, or the end of a connection, reaches a queue.
    fn receive(&mut self, q: usize, m: usize, seen: &mut Seen) -> Result<(), String> {
        let member = MemberId(u8::try_from(m).expect("few"));
        let c = &mut self.connections[q][m];
        if let Some(answer) = c.back.pop_front() {
            let reply = Reply {
                member,
                tag: answer.to.tag,
                op: answer.to.op,
                status: answer.status,
                aux: answer.aux,
                payload: match answer.to.op {
                    OpCode::Allocation if !answer.data.is_empty() => 4,
                    _ => u32::try_from(answer.data.len() as u64 * SECTOR).expect("small"),
                },
            };
            return self.apply(q, Input::Reply(reply), Some(answer.data), seen);
        }
        let known = !self.stations[q].mailbox.contains(&Input::LinkUp { member });
        if c.up && c.broken && known {
            c.up = false;
            return self.apply(q, Input::LinkDown { member }, None, seen);
        }
        Ok(())
    }

    /// All connections to a member break.
    pub(crate) fn break_session(&mut self, m: usize) {
        for q in 0..QUEUES {
            let c = &mut self.connections[q][m];
            if c.up && !c.broken {
                c.broken = true;
                c.there.clear();
                let keep = usize::try_from(self.random.below(4)).expect("few");
                self.connections[q][m].back.truncate(keep);
            }
        }
    }

    fn fault(&mut self, m: usize, seen: &mut Seen) {
        if self.settling {
            return;
        }
        let long = 200 * MS + self.random.below(3000 * MS);
        match self.random.below(1600) {
            0 => {
                seen.breaks += 1;
                self.break_session(m);
            }
            1 => self.replicas[m].hangs_until = self.now + long,
            2 => self.replicas[m].failing = true,
            3..=20 => self.replicas[m].failing = false,
            21..=22 => self.replicas[m].full = true,
            23..=30 => self.replicas[m].full = false,
            _ => {}
        }
    }

    /// The other engine begins, or reads and writes.
    fn foreign(&mut self, seen: &mut Seen) {
        // Half of the schedules only read from some time on: no write tells this engine that it has lost the volume.
        self.read_only |= self.moment > 100 && self.seed.is_multiple_of(2);
        let mut calls = self.stations.iter().flat_map(|s| s.calls.iter().flatten());
        let quiet = !self.read_only || calls.all(|c| matches!(c.op, Op::Read | Op::Allocation));
        let due = self.foreign.is_none() && self.moment > 200 && self.manager.is_settled();
        if due && quiet && self.random.one_in(100) {
            self.take_over();
        }
        let Some(f) = &self.foreign else { return };
        if self.now < f.may_answer_at || !self.random.one_in(8) {
            return;
        }
        let members = f.members.clone();
        let sector = usize::try_from(self.random.below(24)).expect("few");
        self.moment += 2;
        if self.random.one_in(2) {
            let value = self.replicas[members[0]].sectors[sector];
            self.history[sector].read(value, self.moment - 1, self.moment);
            return;
        }
        seen.foreign_writes += 1;
        self.value += 1;
        self.history[sector].write(self.value, self.moment - 1, Some(self.moment));
        for m in members {
            self.replicas[m].sectors[sector] = self.value;
        }
    }

    /// The other engine fences off the members that it reaches, and makes them equal.
    fn take_over(&mut self) {
        let all = self.manager.epoch();
        let reaches = 1 + self.random.below(all.len() as u64);
        let first = self.random.below(all.len() as u64);
        let members: Vec<usize> = (0..reaches)
            .map(|i| all[usize::try_from((first + i) % all.len() as u64).expect("few")])
            .collect();
        let cut_off = self.random.one_in(3);
        for &m in &members {
            // A fence is a drain.
            while !self.replicas[m].is_idle() {
                self.replicas[m].step(u64::MAX, 0);
            }
            self.replicas[m].fenced = true;
            if cut_off {
                self.replicas[m].hangs_until = u64::MAX;
            }
        }
        let source = self.replicas[members[0]].sectors.clone();
        for &m in &members {
            self.replicas[m].sectors.clone_from(&source);
        }
        let may_answer_at = if members.len() == all.len() { self.now } else { self.now + 4000 * MS };
        self.manager.lose_authority();
        self.foreign = Some(Foreign { members, may_answer_at });
    }

    /// Gives an input to a queue and does what comes out.
    fn apply(
        &mut self,
        q: usize,
        input: Input,
        payload: Option<Vec<Value>>,
        seen: &mut Seen,
    ) -> Result<(), String> {
        let mut out = Vec::new();
        self.stations[q].queue.apply(self.now, input, &mut out);
        let mut payload = payload;
        for o in out {
            match o {
                Output::Send(t) => self.transmit(q, t),
                Output::Store { slot, append } => {
                    let data = payload.take().ok_or("stores what did not come")?;
                    let stored = self.stored(q, slot);
                    if !append {
                        stored.clear();
                    }
                    stored.extend(data);
                }
                Output::Merge { slot, at, from, len } => self.merge(q, slot, [at, from, len]),
                Output::Complete { slot, result, part, held } => {
                    match result {
                        Ok(()) => seen.answered += 1,
                        Err(_) => seen.errors += 1,
                    }
                    self.complete(q, slot, result.is_ok(), part)?;
                    if held {
                        self.stations[q].leaving.push(slot);
                    }
                }
                Output::Free { slot } => {
                    if let Some(call) = self.stations[q].calls.get_mut(usize::from(slot)) {
                        let call = call.take().ok_or("frees a free slot")?;
                        if !call.answered {
                            return Err(format!("slot {slot} is free without an answer"));
                        }
                    }
                }
                Output::Wake { queue, ticket } => self.send(usize::from(queue.0), Input::Granted { ticket }),
                Output::Report(report) => {
                    if let FromQueue::Stale(_) = report {
                        seen.stale += 1;
                    }
                    Manager::report(self, q, report, seen)?;
                }
                Output::ControlReply { .. } => return Err("nobody asked".into()),
                Output::Disconnect { member } => {
                    let c = &mut self.connections[q][usize::from(member.0)];
                    (c.up, c.broken) = (false, true);
                    c.there.clear();
                    c.back.clear();
                }
            }
        }
        Ok(())
    }

    fn stored(&mut self, q: usize, slot: u16) -> &mut Vec<Value> {
        let Station { calls, images, .. } = &mut self.stations[q];
        match slot.checked_sub(DEPTH) {
            None => &mut calls[usize::from(slot)].as_mut().expect("a request").stored,
            Some(job) => &mut images[usize::from(job)],
        }
    }

    fn merge(&mut self, q: usize, slot: u16, [at, _, len]: [u32; 3]) {
        let call = self.stations[q].calls[usize::from(slot)].as_mut().expect("a request");
        let sectors = Message::sectors(Extent::new(u64::from(at), u64::from(len)));
        call.stored[sectors].fill(call.value);
    }

    fn transmit(&mut self, q: usize, t: Transmit) {
        let count = usize::try_from(t.range.len / SECTOR).expect("small");
        let data = match t.data {
            Data::None if matches!(t.op, OpCode::WriteZeroes | OpCode::Unmap) => {
                let slot = usize::try_from(t.tag & 0xffff).expect("16 bits");
                vec![self.stations[q].calls[slot].as_ref().expect("a request").value]
            }
            Data::None | Data::LayerName(_) | Data::Control(_) => Vec::new(),
            Data::Client { slot, .. } => {
                vec![self.stations[q].calls[usize::from(slot)].as_ref().expect("a request").value; count]
            }
            Data::Stored { slot } => {
                let stored = self.stored(q, slot).clone();
                assert_eq!(stored.len(), count, "{t:?}");
                stored
            }
        };
        let c = &mut self.connections[q][usize::from(t.member.0)];
        if c.up && !c.broken {
            c.there.push_back(Message {
                queue: QueueId(u8::try_from(q).expect("few")),
                session: c.session,
                tag: t.tag,
                op: t.op,
                range: t.range,
                fua: t.fua,
                data,
                client_write: matches!(t.op, OpCode::Write | OpCode::WriteZeroes | OpCode::Unmap),
            });
        }
    }

    /// An answer is given: notes it, and checks what it promises.
    fn complete(&mut self, q: usize, slot: u16, ok: bool, part: Option<(u32, u32)>) -> Result<(), String> {
        self.moment += 1;
        let end = self.moment;
        let call = self.stations[q].calls[usize::from(slot)].as_mut().ok_or("answers nobody")?;
        if std::mem::replace(&mut call.answered, true) {
            return Err(format!("slot {slot} is answered twice"));
        }
        let (op, range, value, began) = (call.op, call.range, call.value, call.began);
        let sectors = Message::sectors(range);
        if op == Op::Read {
            if let Some((at, len)) = part.filter(|_| ok) {
                let got = &call.stored[Message::sectors(Extent::new(u64::from(at), u64::from(len)))];
                assert_eq!(got.len(), sectors.len());
                for (s, v) in sectors.zip(got) {
                    self.history[s].read(*v, began, end);
                }
            }
            return Ok(());
        }
        if op == Op::Allocation {
            // From the block on that the range begins in, and perhaps not to its end.
            let first = Message::sectors(range.widen(BLOCK)).start;
            let told = if ok && part.is_some() { &call.stored[..] } else { &[] };
            for (s, v) in (first..).zip(told).filter(|(s, _)| sectors.contains(s)) {
                self.history[s].read(*v, began, end);
            }
            return Ok(());
        }
        if op == Op::Flush {
            let covers = std::mem::take(&mut call.covers);
            return if ok { self.check_flush(&covers) } else { Ok(()) };
        }
        for s in sectors.clone() {
            self.history[s].write(value, began, ok.then_some(end));
        }
        let one_piece =
            range.widen(BLOCK).len <= 1 << 20 && (range.is_aligned(BLOCK) || range.widen(BLOCK).len == BLOCK);
        if ok && one_piece && self.foreign.is_none() {
            for m in self.manager.epoch() {
                if let Some(s) = sectors.clone().find(|s| self.replicas[m].sectors[*s] != value) {
                    return Err(format!("{value} is answered and member {m} has no such sector {s}"));
                }
                let fua = matches!(op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. });
                let r = &self.replicas[m];
                if fua && sectors.clone().any(|s| r.stable[s] != r.changes[s]) {
                    return Err(format!("{value} is answered and not stable on member {m}"));
                }
            }
        }
        Ok(())
    }

    fn check_flush(&self, covers: &[(MemberId, Vec<u64>)]) -> Result<(), String> {
        let epoch = self.manager.epoch();
        for (m, changes) in covers.iter().filter(|(m, _)| epoch.contains(&usize::from(m.0))) {
            let stable = &self.replicas[usize::from(m.0)].stable;
            if changes.iter().zip(stable).any(|(must, is)| is < must) {
                return Err(format!("a flush is answered and not done by {m:?}"));
            }
        }
        Ok(())
    }

    fn check_equal(&self) -> Result<(), String> {
        let epoch = self.manager.epoch();
        for m in &epoch[1..] {
            let pairs = self.replicas[*m].sectors.iter().zip(&self.replicas[epoch[0]].sectors);
            if let Some(s) = pairs.enumerate().find(|(_, (a, b))| a != b) {
                return Err(format!("members {m} and {} differ: {s:?}", epoch[0]));
            }
        }
        Ok(())
    }

    fn check_history(&self) -> Result<(), String> {
        for (s, register) in self.history.iter().enumerate() {
            register.check().map_err(|e| format!("sector {s}: {e}"))?;
        }
        Ok(())
    }

    /// True if no write of a client of this queue is on its way or under way anywhere.
    pub(crate) fn is_drained(&self, q: usize) -> bool {
        let queue = QueueId(u8::try_from(q).expect("few"));
        self.connections[q].iter().zip(&self.replicas).all(|(c, r)| {
            !c.up
                || c.broken
                || (!c.there.iter().any(|m| m.client_write) && !r.has_client_write_of(queue, c.session))
        })
    }

    pub(crate) fn is_settling(&self) -> bool {
        self.settling
    }
}
