//! Engines, replicas and an authority, connected by channels that deliver in an order chosen by a seed.

use std::collections::BTreeMap;
use std::sync::Arc;

use datapath::conductor::{
    self, Command, CommandError, CommandId, ConnectError, Limits, Quorum, ReplicaConfig, Robustness, Stored,
    Why,
};
use datapath::message::{MEMBERS_MAX, MemberId, Switch};
use datapath::shared::Shared;
use lh_block::{BLOCK, Epoch, Extent, Generation, Instance, Op};
use lh_wire::{Control, OpCode, Status};

use crate::engine::{Engine, ForQueue, Message};
use crate::oracle::{Oracle, Reverted};
use crate::replica::{Layer, Payload, Replica};
use crate::rng::Rng;

pub(crate) const SIZE: u64 = 3 << 20;
pub(crate) const CHUNK: u64 = 64 << 10;
const MS: u64 = 1_000_000;

/// Blocks that clients use.
const HOT: u64 = 16;

/// What may happen in a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) quorum: Quorum,
    pub(crate) replicas: u8,
    pub(crate) queues: u8,
    /// Requests of clients.
    pub(crate) requests: u32,
    /// One fault in so many steps.
    pub(crate) fault_every: u64,
    pub(crate) faults: &'static [Fault],
    /// At most so many faults.
    pub(crate) faults_max: u32,
    /// How long those who are away are waited for once enough are back.
    pub(crate) grace_ns: u64,
    pub(crate) sabotage: conductor::Sabotage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    BreakLink,
    Kill,
    KillAll,
    CutPower,
    CutAllPower,
    Stall,
    CrashEngine,
    SecondEngine,
    CloseEngine,
    Snapshot,
    RemoveSnapshot,
    /// To any snapshot that there is: what stands on it stays, as a branch.
    Revert,
    /// What is removed is folded away.
    Purge,
    Rebuild,
    Scrub,
    AuthorityAway,
    /// A queue goes on, but does not look at what it is told.
    DeafQueue,
}

#[derive(Debug, Default)]
pub(crate) struct Authority {
    pub(crate) epoch: Option<Epoch>,
    pub(crate) history: Vec<Epoch>,
    pub(crate) away_until: u64,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Inbox(usize, usize),
    There(usize, usize, usize),
    Back(usize, usize, usize),
    Report(usize, usize),
    Outside(usize),
    Connect(usize, usize),
    Store(usize),
    Client(usize, usize),
}

/// What was asked for, of which something has to come.
#[derive(Debug)]
enum Asked {
    Snapshot(String),
    Revert(Vec<Reverted>),
    Other,
}

pub(crate) struct World {
    pub(crate) plan: Plan,
    rng: Rng,
    pub(crate) now: u64,
    pub(crate) replicas: Vec<Replica>,
    /// Who has learnt nothing yet, as the volume's record says.
    pub(crate) learners: Vec<String>,
    restart_at: Vec<Option<u64>>,
    pub(crate) authority: Authority,
    pub(crate) engines: Vec<Engine>,
    pub(crate) oracle: Oracle,
    generation: Generation,
    values: u32,
    requests_left: u32,
    /// Clients pause now and then, so that their load lasts as long as what happens beside it.
    clients_rest_until: u64,
    commands: BTreeMap<u64, Asked>,
    command_next: u64,
    /// Content of each snapshot when its command was answered.
    pub(crate) snapshots: BTreeMap<String, Vec<u32>>,
    epochs: BTreeMap<(Generation, u64), Instance>,
    pub(crate) happened: BTreeMap<String, u64>,
    /// What commands were answered with.
    pub(crate) answers: BTreeMap<u64, Result<(), CommandError>>,
}

impl World {
    pub(crate) fn new(seed: u64, plan: Plan) -> Self {
        let names = (0..plan.replicas).map(|n| format!("r{}", n + 1));
        let mut world = Self {
            plan,
            rng: Rng::new(seed),
            now: 0,
            replicas: names.map(|n| Replica::new(&n, SIZE, CHUNK)).collect(),
            learners: Vec::new(),
            restart_at: vec![None; usize::from(plan.replicas)],
            authority: Authority::default(),
            engines: Vec::new(),
            oracle: Oracle::default(),
            generation: Generation { attachment: 1, restart: 0 },
            values: 0,
            requests_left: plan.requests,
            clients_rest_until: 0,
            commands: BTreeMap::new(),
            command_next: 0,
            snapshots: BTreeMap::new(),
            epochs: BTreeMap::new(),
            happened: BTreeMap::new(),
            answers: BTreeMap::new(),
        };
        world.start_engine(true);
        world
    }

    pub(crate) fn start_engine(&mut self, known_dead: bool) {
        self.generation = self.generation.next_attachment();
        let number = u64::from(self.generation.attachment);
        let config = conductor::Config {
            volume: "demo".into(),
            generation: self.generation,
            instance: Instance(u128::from(self.rng.next()) << 64),
            quorum: self.plan.quorum,
            replicas: self
                .replicas
                .iter()
                .map(|r| ReplicaConfig {
                    name: r.name.clone(),
                    local: r.name == "r1",
                    learner: self.learners.contains(&r.name),
                })
                .collect(),
            queues: self.plan.queues,
            size: SIZE,
            shared: Arc::new(Shared::new(SIZE, CHUNK)),
            known_dead,
            limits: Limits { grace_ns: self.plan.grace_ns, ..Limits::default() },
            sabotage: self.plan.sabotage,
        };
        let mut engine = Engine::new(number, config, MEMBERS_MAX);
        engine.conduct(self.now, conductor::Input::Tick);
        self.engines.push(engine);
    }

    pub(crate) fn count(&mut self, what: &str) {
        *self.happened.entry(what.to_owned()).or_default() += 1;
    }

    /// The engine that was started last.
    pub(crate) fn engine(&mut self) -> &mut Engine {
        self.engines.last_mut().expect("an engine")
    }

    pub(crate) fn status(&self) -> conductor::Status {
        self.engines.last().expect("an engine").conductor.status()
    }

    /// One thing happens.
    pub(crate) fn step(&mut self) {
        self.fire_timers();
        self.reap_engines();
        let due = self.plan.faults_max > 0 && self.requests_left > 0;
        if due && self.rng.one_in(self.plan.fault_every) {
            self.plan.faults_max -= 1;
            let fault = self.rng.pick(self.plan.faults);
            self.inject(fault);
        }
        self.sweep();
        let actions = self.actions();
        if actions.is_empty() {
            self.now = self.next_time();
            return;
        }
        self.now += self.rng.below(200_000);
        let action = self.rng.pick(&actions);
        trace!("{} ms: {action:?}", self.now / MS);
        self.act(action);
        self.check_switches();
    }

    /// Connections whose other end is gone.
    fn sweep(&mut self) {
        for e in &mut self.engines {
            for q in &mut e.queues {
                for (wire, replica) in q.wires.iter_mut().zip(&self.replicas) {
                    let Some(session) = wire.session.filter(|_| !wire.broken) else { continue };
                    if replica.session != Some((e.number, session)) {
                        wire.broken = true;
                        wire.there.clear();
                        let kept = self.rng.below(wire.back.len() as u64 + 1);
                        wire.back.truncate(usize::try_from(kept).expect("few"));
                    }
                }
            }
        }
    }

    fn fire_timers(&mut self) {
        for (replica, at) in self.replicas.iter_mut().zip(&mut self.restart_at) {
            if at.is_some_and(|at| at <= self.now) {
                *at = None;
                replica.alive = true;
            }
        }
        for e in &mut self.engines {
            if e.conductor.wake_at().is_some_and(|at| at <= self.now) {
                e.conduct(self.now, conductor::Input::Tick);
            }
            e.tick_queues(self.now, &mut self.oracle);
        }
    }

    fn next_time(&self) -> u64 {
        let engines = self.engines.iter().flat_map(|e| [e.conductor.wake_at(), e.next_queue_tick(self.now)]);
        let replicas =
            self.restart_at.iter().copied().chain(self.replicas.iter().map(|r| Some(r.stalled_until)));
        let deaf = self.engines.iter().flat_map(|e| &e.queues).map(|q| Some(q.deaf_until));
        let others = [Some(self.authority.away_until), Some(self.clients_rest_until)];
        let times = engines.chain(deaf).chain(replicas).chain(others).flatten();
        times.filter(|at| *at > self.now).min().unwrap_or(self.now + 50 * MS).min(self.now + 1000 * MS)
    }

    /// Engines that have stopped go; there is always one.
    fn reap_engines(&mut self) {
        let mut ended = Vec::new();
        self.engines.retain_mut(|e| {
            let stopped = e.stopped.take();
            if let Some(why) = &stopped {
                ended.push((e.number, why.clone()));
            }
            stopped.is_none()
        });
        for (number, why) in ended {
            self.count(match why {
                Why::Clean => "closed",
                Why::Unopened => "unopened",
                Why::Unclean(_) => "ended",
                Why::Stale { .. } => "fenced",
            });
            self.drop_sessions(number);
        }
        if self.engines.is_empty() {
            self.start_engine(true);
        }
    }

    /// The process of an engine is gone, and its connections with it.
    fn drop_sessions(&mut self, number: u64) {
        for r in &mut self.replicas {
            if r.session.is_some_and(|(e, _)| e == number) {
                r.end_session();
            }
        }
    }

    fn actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        let awake = |m: usize| self.replicas[m].stalled_until <= self.now;
        for (e, engine) in self.engines.iter().enumerate() {
            for (q, queue) in engine.queues.iter().enumerate() {
                if !queue.inbox.is_empty() && queue.deaf_until <= self.now {
                    actions.push(Action::Inbox(e, q));
                }
                for m in 0..self.replicas.len() {
                    let wire = &queue.wires[m];
                    if !wire.there.is_empty() && awake(m) {
                        actions.push(Action::There(e, q, m));
                    }
                    if !wire.back.is_empty() || (wire.broken && wire.session.is_some()) {
                        actions.push(Action::Back(e, q, m));
                    }
                }
                if engine.open && self.requests_left > 0 && self.clients_rest_until <= self.now {
                    actions.push(Action::Client(e, q));
                }
            }
            for (q, reports) in engine.reports.iter().enumerate() {
                if !reports.is_empty() {
                    actions.push(Action::Report(e, q));
                }
            }
            if !engine.outside.is_empty() || (engine.load && self.authority_is_there()) {
                actions.push(Action::Outside(e));
            }
            for (i, (m, _)) in engine.connects.iter().enumerate() {
                if awake(usize::from(m.0)) {
                    actions.push(Action::Connect(e, i));
                }
            }
            if engine.store.is_some() {
                actions.push(Action::Store(e));
            }
        }
        let busy = |e: &usize, q: &usize| self.engines[*e].queues[*q].is_full();
        actions.retain(|a| !matches!(a, Action::Client(e, q) if busy(e, q)));
        actions
    }

    fn authority_is_there(&self) -> bool {
        self.authority.away_until <= self.now
    }

    fn act(&mut self, action: Action) {
        let now = self.now;
        match action {
            Action::Inbox(e, q) => self.engines[e].serve_inbox(now, q, &mut self.oracle),
            Action::There(e, q, m) => self.deliver(e, q, m),
            Action::Back(e, q, m) => {
                let member = MemberId(u8::try_from(m).expect("few"));
                self.engines[e].serve_wire(now, q, member, &mut self.oracle);
            }
            Action::Report(e, q) => {
                if let Some(input) = self.engines[e].reports[q].pop_front() {
                    self.engines[e].conduct(now, input);
                }
            }
            Action::Outside(e) => self.outside(e),
            Action::Connect(e, i) => self.connect(e, i),
            Action::Store(e) => self.store(e),
            Action::Client(e, q) => self.client(e, q),
        }
    }

    /// A replica takes a message and answers.
    fn deliver(&mut self, e: usize, q: usize, m: usize) {
        let number = self.engines[e].number;
        let wire = &mut self.engines[e].queues[q].wires[m];
        let Some(message) = wire.there.pop_front() else { return };
        assert_eq!(self.replicas[m].session, wire.session.map(|s| (number, s)), "swept");
        let not_before = match (message.op, &message.payload) {
            (_, Payload::Control(Control::Prepare { .. })) => self.replicas[m].syncs_until,
            (OpCode::PutLayer, _) => self.replicas[m].puts_until,
            _ => 0,
        };
        if self.now < not_before {
            wire.there.push_back(message);
            self.now += 10 * MS;
            return;
        }
        let (status, aux, payload) = match (&message.op, &message.payload) {
            (OpCode::Control, Payload::Control(control)) => {
                if let Control::SetEpoch { epoch, .. } = control {
                    note_epoch(&mut self.epochs, epoch);
                }
                (Status::Ok, 0, Payload::Answer(self.replicas[m].control(control)))
            }
            (op, payload) => self.replicas[m].data(*op, message.range, message.verify, message.aux, payload),
        };
        trace!("  {:?} {} -> {status:?} {payload:?}", message.op, message.range);
        wire.back.push_back(Message { status, aux, payload, ..message });
    }

    fn outside(&mut self, e: usize) {
        if self.engines[e].load && self.authority_is_there() {
            self.engines[e].load = false;
            let loaded = conductor::Input::AuthorityLoaded(self.authority.epoch.clone());
            self.engines[e].outside.push_back(loaded);
        } else if let Some(input) = self.engines[e].outside.pop_front() {
            self.engines[e].conduct(self.now, input);
        }
    }

    fn connect(&mut self, e: usize, i: usize) {
        let (member, session) = self.engines[e].connects.remove(i);
        let (number, generation) = (self.engines[e].number, self.engines[e].generation);
        let replica = &mut self.replicas[usize::from(member.0)];
        let answer = if replica.alive {
            replica.admit(generation, Instance(u128::from(number)), (number, session))
        } else {
            let why = ConnectError::Unreachable("nobody answers".into());
            let failed = conductor::Input::ConnectFailed { member, session, why };
            return self.engines[e].outside.push_back(failed);
        };
        let input = match answer {
            Ok(()) => {
                for q in &mut self.engines[e].queues {
                    q.inbox.push_back(ForQueue::LinkUp(member, session));
                }
                conductor::Input::Connected { member, session }
            }
            Err(seen) => conductor::Input::ConnectFailed { member, session, why: ConnectError::Stale(seen) },
        };
        self.engines[e].outside.push_back(input);
    }

    fn store(&mut self, e: usize) {
        let Some((expected, epoch)) = self.engines[e].store.take() else { return };
        note_epoch(&mut self.epochs, &epoch);
        let lost = self.plan.faults_max > 0 && self.rng.one_in(8);
        let reached = self.authority_is_there() || self.rng.one_in(4);
        let fits = self.authority.epoch.as_ref().map(Epoch::order) == expected;
        if reached && fits {
            self.authority.epoch = Some(epoch.clone());
            self.authority.history.push(epoch);
        }
        let stored = match (self.authority_is_there() && !lost, fits) {
            (false, _) => Stored::Unavailable { reason: "no answer".into() },
            (true, true) => Stored::Stored,
            (true, false) => Stored::Conflict { current: self.authority.epoch.clone() },
        };
        self.engines[e].outside.push_back(conductor::Input::AuthorityStored(stored));
    }

    pub(crate) fn is_asked(&mut self) -> bool {
        self.requests_left == 0
    }

    /// Blocks that clients use: pairs, each in a chunk of its own.
    pub(crate) const fn hot(n: u64) -> u64 {
        n / 2 * 64 + n % 2
    }

    fn client(&mut self, e: usize, q: usize) {
        self.requests_left = self.requests_left.saturating_sub(1);
        if self.rng.one_in(4) {
            self.clients_rest_until = self.now + self.rng.below(200) * MS;
        }
        let n = self.rng.below(HOT);
        let pair = n.is_multiple_of(2) && self.rng.one_in(3);
        let range = Extent::new(Self::hot(n) * BLOCK, if pair { 2 * BLOCK } else { BLOCK });
        let op = match self.rng.below(10) {
            0..4 => Op::Read,
            4..9 => Op::Write { fua: false },
            _ => Op::Flush,
        };
        let range = if op == Op::Flush { Extent::default() } else { range };
        self.request(e, q, op, range);
    }

    pub(crate) fn request(&mut self, e: usize, q: usize, op: Op, range: Extent) -> bool {
        let values = [self.values + 1, self.values + 2];
        self.values += 2;
        self.engines[e].request(self.now, q, op, range, &values, &mut self.oracle)
    }

    fn inject(&mut self, fault: Fault) {
        let m = usize::try_from(self.rng.below(self.replicas.len() as u64)).expect("few");
        let soon = self.now + self.rng.below(3000) * MS;
        self.count(&format!("{fault:?}"));
        trace!("{} ms: FAULT {fault:?} {m}", self.now / MS);
        match fault {
            Fault::BreakLink => self.replicas[m].end_session(),
            Fault::Kill => self.kill(m, soon),
            Fault::KillAll => (0..self.replicas.len()).for_each(|m| {
                let soon = self.now + self.rng.below(8000) * MS;
                self.kill(m, soon);
            }),
            Fault::CutPower => self.cut_power(m, soon),
            Fault::CutAllPower => (0..self.replicas.len()).for_each(|m| {
                let soon = self.now + self.rng.below(8000) * MS;
                self.cut_power(m, soon);
            }),
            Fault::Stall => self.replicas[m].stalled_until = soon,
            Fault::CrashEngine => self.crash_engine(),
            Fault::SecondEngine => {
                if self.engines.len() < 3 {
                    self.start_engine(false);
                }
            }
            Fault::CloseEngine => drop(self.command(Command::Shutdown)),
            Fault::Snapshot => {
                let name = format!("s{}", self.command_next);
                self.snapshot(&name);
            }
            Fault::RemoveSnapshot => {
                if let Some(name) = self.any_snapshot() {
                    // What it shows is nobody's any more.
                    self.snapshots.remove(&name);
                    self.command(Command::RemoveSnapshot { name });
                }
            }
            Fault::Revert => {
                if let Some(name) = self.any_snapshot() {
                    self.revert(&name);
                }
            }
            Fault::Purge => drop(self.command(Command::Purge)),
            Fault::Rebuild => {
                let name = self.replicas[m].name.clone();
                self.command(Command::Rebuild { name });
            }
            Fault::Scrub => {
                self.check_scrub();
                let repair = self.rng.one_in(2);
                self.command(Command::Scrub { repair, bytes_per_second: 0 });
            }
            Fault::AuthorityAway => self.authority.away_until = soon,
            Fault::DeafQueue => {
                let longest = if self.rng.one_in(4) { 4000 } else { 30 };
                let (now, ms) = (self.now, self.rng.below(longest));
                let q = usize::try_from(self.rng.below(u64::from(self.plan.queues))).expect("few");
                self.engine().queues[q].deaf_until = now + ms * MS;
            }
        }
    }

    pub(crate) fn kill(&mut self, m: usize, until: u64) {
        self.replicas[m].kill();
        self.restart_at[m] = Some(until);
    }

    /// Starts one more replica's process.
    pub(crate) fn add_replica(&mut self, name: &str) {
        self.replicas.push(Replica::new(name, SIZE, CHUNK));
        self.restart_at.push(None);
    }

    pub(crate) fn restart(&mut self, m: usize) {
        self.restart_at[m] = Some(self.now);
    }

    pub(crate) fn cut_power(&mut self, m: usize, until: u64) {
        self.replicas[m].cut_power(&mut self.rng);
        self.restart_at[m] = Some(until);
        self.oracle.power_lost();
    }

    /// The last engine's process dies.
    pub(crate) fn crash_engine(&mut self) {
        if let Some(engine) = self.engines.pop() {
            self.drop_sessions(engine.number);
        }
        let known_dead = self.engines.is_empty();
        self.start_engine(known_dead);
    }

    pub(crate) fn snapshot(&mut self, name: &str) -> u64 {
        let command = Command::Snapshot {
            name: name.to_owned(),
            user_created: true,
            created: "2026-01-01T00:00:00Z".into(),
            labels: BTreeMap::new(),
        };
        self.ask(command, Asked::Snapshot(name.to_owned()))
    }

    fn any_snapshot(&mut self) -> Option<String> {
        let n = self.rng.below(self.snapshots.len().max(1) as u64);
        self.snapshots.keys().nth(usize::try_from(n).expect("few")).cloned()
    }

    /// To clients it is a write of what the snapshot shows to every block.
    pub(crate) fn revert(&mut self, name: &str) -> u64 {
        let shows = self.snapshots.get(name).cloned().unwrap_or_default();
        let engine = self.engine().number;
        let reverted = (0..HOT).map(|n| {
            self.values += 1;
            let block = usize::try_from(Self::hot(n)).expect("small");
            let shows = shows.get(block).copied().unwrap_or(0);
            self.oracle.revert_begins(engine, block, self.values, shows)
        });
        let asked = Asked::Revert(reverted.collect());
        let created = "2026-01-01T00:00:00Z".into();
        self.ask(Command::Revert { name: name.to_owned(), created }, asked)
    }

    pub(crate) fn command(&mut self, command: Command) -> u64 {
        self.ask(command, Asked::Other)
    }

    fn ask(&mut self, command: Command, asked: Asked) -> u64 {
        self.command_next += 1;
        let id = self.command_next;
        self.commands.insert(id, asked);
        let now = self.now;
        self.engine().conduct(now, conductor::Input::Command(CommandId(id), command));
        id
    }

    /// Whatever the conductors have just told the queues must be allowed; answered commands are taken note of.
    fn check_switches(&mut self) {
        for e in 0..self.engines.len() {
            for switch in std::mem::take(&mut self.engines[e].switches) {
                match switch {
                    Switch::Forget { member } => self.check_forget(e, member),
                    Switch::Promote { member } => self.check_promote(e, member),
                    _ => {}
                }
            }
            for (command, result) in std::mem::take(&mut self.engines[e].done) {
                self.answers.insert(command, result.clone());
                self.count(if result.is_ok() { "command done" } else { "command refused" });
                match (self.commands.remove(&command), result) {
                    (Some(Asked::Snapshot(name)), Ok(())) => {
                        let content = self.content_of(e, &name);
                        self.snapshots.insert(name, content);
                    }
                    (Some(Asked::Revert(blocks)), Ok(())) => {
                        self.count("reverted");
                        blocks.iter().for_each(|b| self.oracle.revert_ends(b));
                    }
                    // An engine that ends leaves it to the next one, if it was prepared.
                    (Some(Asked::Revert(blocks)), Err(why)) if why != CommandError::ShuttingDown => {
                        blocks.iter().for_each(|b| self.oracle.revert_fails(b));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Nobody is forgotten before an epoch without it is durable, wherever it has to be.
    fn check_forget(&self, e: usize, member: MemberId) {
        let status = self.engines[e].conductor.status();
        let name = &self.replicas[usize::from(member.0)].name;
        let Some(epoch) = status.epoch.filter(|_| status.open) else { return };
        assert!(!epoch.has(name), "{name} is forgotten, but is in epoch {epoch:?}");
        let recorded = |r: &&Replica| r.epoch.as_ref().is_some_and(|own| own.order() >= epoch.order());
        match self.plan.quorum {
            Quorum::Any | Quorum::Unsafe => {
                let is_stored = self.plan.quorum == Quorum::Unsafe || self.authority.history.contains(&epoch);
                assert!(is_stored, "epoch {epoch:?} is not stored");
                let members = self.replicas.iter().filter(|r| epoch.has(&r.name));
                assert!(members.filter(recorded).count() == epoch.members.len(), "{epoch:?} is not recorded");
            }
            Quorum::Majority => {
                // The first of two has recorded whatever counts, whether the second does or not.
                let learn = usize::from(status.replicas.len() == 2 && self.learners.len() == 1);
                assert!(self.replicas.iter().filter(recorded).count() > (status.replicas.len() - learn) / 2);
            }
        }
    }

    /// Nobody is read from who is not in the epoch that counts, or has recorded a younger one that includes it.
    fn check_promote(&self, e: usize, member: MemberId) {
        let epoch = self.engines[e].conductor.status().epoch;
        let Replica { name, epoch: own, .. } = &self.replicas[usize::from(member.0)];
        let recorded = own.as_ref().filter(|own| epoch.as_ref().is_some_and(|e| own.order() > e.order()));
        let counts = [epoch.as_ref(), recorded].into_iter().flatten().any(|e| e.has(name));
        assert!(counts, "{name} may be read from, but is not in {epoch:?}");
    }

    fn content_of(&self, e: usize, snapshot: &str) -> Vec<u32> {
        let epoch = self.engines[e].conductor.status().epoch;
        let member = |r: &&Replica| epoch.as_ref().is_none_or(|e| e.has(&r.name));
        let held = self.replicas.iter().filter(member).map(|r| content(r, snapshot)).collect::<Vec<_>>();
        for other in &held {
            assert!(other.is_some(), "snapshot {snapshot} is not on every member");
        }
        held.into_iter().flatten().next().expect("a member")
    }

    /// Goes on until the condition holds. Fails when it does not within ten minutes of the world's time.
    pub(crate) fn run_until(&mut self, what: &str, condition: impl Fn(&mut Self) -> bool) {
        let end = self.now + 600_000 * MS;
        while !condition(self) {
            assert!(self.now < end, "it never comes to this: {what}\n{}", self.story());
            self.step();
        }
    }

    pub(crate) fn run_for(&mut self, ms: u64) {
        let end = self.now + ms * MS;
        while self.now < end {
            self.step();
        }
    }

    pub(crate) fn story(&self) -> String {
        let mut story = format!("{:?}\n", self.plan);
        for e in &self.engines {
            let tail = e.log.iter().rev().take(40).rev().cloned().collect::<Vec<_>>();
            trace!("{:#?}", e.conductor);
            story += &format!("engine {}: {:#?}\n{}\n", e.number, e.conductor.status(), tail.join("\n"));
        }
        story
    }

    /// Faults end; everything comes to rest; all is compared.
    pub(crate) fn settle(&mut self) {
        self.requests_left = 0;
        self.authority.away_until = self.now;
        for (m, r) in self.replicas.iter_mut().enumerate() {
            r.stalled_until = self.now;
            self.restart_at[m] = self.restart_at[m].map(|_| self.now);
        }
        self.run_until("all is well", |w| w.is_well());
        self.run_until("the scrub ends", |w| w.status().scrub.is_none_or(|s| !s.running));
        self.check_scrub();
        for n in 0..HOT {
            self.request(0, 0, Op::Read, Extent::new(Self::hot(n) * BLOCK, BLOCK));
            self.run_until("the last reads are answered", |w| w.engines[0].in_flight() == 0);
        }
        self.compare();
    }

    /// Nothing rots in these runs: a scrub has nothing to find.
    fn check_scrub(&mut self) {
        let Some(scrub) = self.status().scrub else { return };
        assert_eq!(scrub.findings, [], "a false alarm");
        if !scrub.running && scrub.error.is_none() {
            self.count("scrubbed");
        }
    }

    fn is_well(&mut self) -> bool {
        let status = self.status();
        self.engines.len() == 1
            && status.robustness == Robustness::Healthy
            && status.chunks_in_doubt == 0
            && self.replicas.iter().all(Replica::is_settled)
            && self.engines[0].in_flight() == 0
            && self.actions().is_empty()
    }

    /// All replicas hold the same, and every snapshot what it held when it was taken.
    fn compare(&self) {
        let (first, others) = self.replicas.split_first().expect("a replica");
        for other in others {
            assert_eq!(names(first), names(other), "{} and {} differ", first.name, other.name);
            self.compare_with(other);
        }
        for (name, then) in &self.snapshots {
            assert_eq!(content(first, name).as_ref(), Some(then), "snapshot {name} has changed");
        }
    }
}

impl World {
    /// What is not removed shows the same on both. What removed layers hold is each replica's own affair: it may be, in a
    /// repair, that one gets it in the layer above.
    pub(crate) fn compare_with(&self, other: &Replica) {
        let first = &self.replicas[0];
        for layer in first.layers.iter().filter(|l| !l.removed) {
            let (a, b) = (content(first, &layer.name), content(other, &layer.name));
            let (a, b) = (a.unwrap_or_default(), b.expect("every layer that is not removed"));
            let differ = a.iter().zip(&b).position(|(a, b)| a != b);
            assert_eq!(differ, None, "layer {:?} of {} and {}", layer.name, first.name, other.name);
        }
    }
}

/// Layers that are not removed, and what each stands on but for those that are: these each replica folds on its own.
fn names(replica: &Replica) -> BTreeMap<&str, &str> {
    let named = |name: &str| replica.layers.iter().find(|l| !name.is_empty() && l.name == name);
    let stands_on = |layer: &Layer| {
        let mut below = named(&layer.parent);
        while let Some(removed) = below.filter(|l| l.removed) {
            below = named(&removed.parent);
        }
        below.map_or("", |l| l.name.as_str())
    };
    let live = replica.layers.iter().filter(|l| !l.removed);
    live.map(|l| (l.name.as_str(), stands_on(l))).collect()
}

fn content(replica: &Replica, snapshot: &str) -> Option<Vec<u32>> {
    let at = replica.layers.iter().position(|l| l.name == snapshot)?;
    Some((0..replica.layers[at].blocks.len()).map(|b| replica.read(b, at)).collect())
}

/// No two epochs have the same order.
fn note_epoch(epochs: &mut BTreeMap<(Generation, u64), Instance>, epoch: &Epoch) {
    let known = *epochs.entry(epoch.order()).or_insert(epoch.id);
    assert_eq!(known, epoch.id, "two epochs of one order: {epoch:?}");
}
