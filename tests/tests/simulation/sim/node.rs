//! A host with one replica: its disk, and the process on it, which runs the real machine of `replica::serve`.
//!
//! Store jobs take effect when they end, also after the death of their process: the kernel finishes what was submitted,
//! and a new process finds the layer files locked until then. A stopped process takes nothing from its sockets; what
//! arrives meanwhile waits there.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::{Rc, Weak};

use lh_block::Extent;
use lh_wire::flags;
use replica::serve::core::{
    Body as AnswerBody, Completed, ConnId, Core, Failure, Input, Job, Output, PersistId, Record, RequestId,
    Sabotage, SessionHello,
};

use super::disk::{Disk, blocks};
use super::grant::{Grant, Words};
use super::packet::{Body, Packet, written};
use super::world::{Event, Outbox};
use tests::dice::Dice;

/// A store job on its way.
#[derive(Clone, Debug)]
struct Running {
    job: Job,
    body: Body,
    /// Of a read: what does not fit its checksum is refused or told. Of a put: what is put is rotten.
    verify: bool,
}

/// A process.
struct Process {
    number: u64,
    core: Core,
    /// Payloads of requests, and what their jobs left for the answers.
    bodies: BTreeMap<RequestId, Body>,
    verify: BTreeSet<RequestId>,
    free: Vec<RequestId>,
    next_request: u32,
    persists: VecDeque<(PersistId, Record)>,
    last_persist: u64,
    stopped: bool,
    inbox: VecDeque<(ConnId, Packet)>,
    /// The earliest time that the machine will be told.
    wakes_at: Option<u64>,
}

/// How a node's disk behaves at the moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weather {
    /// Factor on every latency.
    pub(crate) slow: u64,
    /// Chance per mille that a job or sync fails with an error.
    pub(crate) error: u64,
    /// The same of records.
    pub(crate) records: u64,
    /// Factor on the time that a step of a fold takes.
    pub(crate) folds: u64,
}

/// A host with one replica.
pub(crate) struct Node {
    /// Number of the node, and of its replica.
    pub(crate) number: usize,
    /// Its disk.
    pub(crate) disk: Disk,
    /// How its disk behaves.
    pub(crate) weather: Weather,
    process: Option<Process>,
    /// Jobs of all processes that have been submitted and not ended, by (process, request).
    running: BTreeMap<(u64, RequestId), Running>,
    processes: u64,
    sabotage: Sabotage,
    /// For whom the grant that holds was made, and its connection.
    granted: Option<(SessionHello, ConnId)>,
    /// Copies of the descriptors of the last grant, and how many grants there were.
    locks: Weak<()>,
    grants: u32,
    /// What engines do not look at.
    pub(crate) unseen: (bool, bool),
    /// A full disk refuses some records.
    pub(crate) records_need_space: bool,
    /// Records that failed count as made.
    pub(crate) records_believed: bool,
}

impl Node {
    /// A host with this disk, without a process.
    pub(crate) fn new(number: usize, disk: Disk, sabotage: Sabotage) -> Self {
        let weather = Weather { slow: 1, error: 0, records: 0, folds: 1 };
        Self {
            number,
            disk,
            weather,
            process: None,
            running: BTreeMap::new(),
            processes: 0,
            sabotage,
            granted: None,
            locks: Weak::new(),
            grants: 0,
            unseen: (false, false),
            records_need_space: false,
            records_believed: false,
        }
    }

    /// True if a process runs, stopped or not.
    pub(crate) fn is_up(&self) -> bool {
        self.process.is_some()
    }

    /// True if a process runs that holds everything that was answered (`docs/invariants.md`, 4).
    pub(crate) fn has_lived(&self) -> bool {
        self.process.as_ref().is_some_and(|p| p.core.lived())
    }

    fn is_in_doubt(&self) -> bool {
        self.process.as_ref().is_some_and(|p| p.core.is_in_doubt())
    }

    /// True if the process has met an error that it cannot live with.
    pub(crate) fn has_failed(&self) -> bool {
        self.process.as_ref().is_some_and(|p| p.core.is_failed())
    }

    /// Starts a process unless one runs or the locks of a dead one are still held; true if one runs afterwards.
    pub(crate) fn start(&mut self) -> bool {
        if self.process.is_some() {
            return true;
        }
        if !self.running.is_empty() || self.locks.strong_count() > 0 {
            return false;
        }
        self.processes += 1;
        let core = Core::new(self.disk.open()).sabotaged(self.sabotage);
        self.process = Some(Process {
            number: self.processes,
            core,
            bodies: BTreeMap::new(),
            verify: BTreeSet::new(),
            free: Vec::new(),
            next_request: 0,
            persists: VecDeque::new(),
            last_persist: 0,
            stopped: false,
            inbox: VecDeque::new(),
            wakes_at: None,
        });
        true
    }

    /// SIGKILL. What was submitted to the disk goes on; of records on their way the first may have been made.
    pub(crate) fn kill(&mut self, dice: &mut Dice) {
        self.disk.process_ended();
        // Nobody is left who would end the grant: what holds it off is that the locks are held.
        self.disk.forget_grant();
        self.granted = None;
        if let Some(p) = self.process.take()
            && let Some((_, record)) = p.persists.front()
            && dice.chance(500)
        {
            let _ = self.disk.record(record);
        }
    }

    /// The host gets another disk in place of its own. The one that it had.
    pub(crate) fn exchange_disk(&mut self, disk: Disk) -> Disk {
        self.process = None;
        self.running.clear();
        self.lose_power_of_grant();
        std::mem::replace(&mut self.disk, disk)
    }

    /// The power goes: what was under way is done in part or not at all, what was not synced is lost in part.
    pub(crate) fn power_cut(&mut self, dice: &mut Dice) {
        self.lose_power_of_grant();
        self.kill(dice);
        for running in std::mem::take(&mut self.running).into_values() {
            self.carry_out_partly(&running, dice);
        }
        self.disk.power_cut(dice);
    }

    /// Whoever shares the host has lost it, too: nobody reads in its files any more.
    fn lose_power_of_grant(&mut self) {
        self.disk.lose_grants();
        self.granted = None;
        self.locks = Weak::new();
    }

    /// An engine on the host wants to be granted the files.
    fn asked(&mut self, conn: ConnId, hello: SessionHello, out: &mut Outbox) {
        if !self.process.as_ref().is_some_and(|p| p.core.may_be_granted(&hello)) {
            out.engine_gets(conn, Packet::End);
            return;
        }
        if let Some((_, before)) = self.granted.replace((hello, conn)) {
            out.engine_gets(before, Packet::End);
        }
        let words = Rc::new(Words::new(self.unseen.0, self.unseen.1));
        let files = Rc::new(self.disk.grant(Rc::clone(&words)));
        let locks = Rc::new(());
        self.locks = Rc::downgrade(&locks);
        self.grants += 1;
        let number = u32::try_from(self.number).unwrap_or(0) << 24 | self.grants;
        out.engine_gets(conn, Packet::Grant(Grant { number, words, files, locks }));
    }

    /// Ends the grant if what it was made for is no longer so.
    fn watch_grant(&mut self, out: &mut Outbox) {
        let Some((hello, conn)) = &self.granted else { return };
        let may = self.process.as_ref().is_some_and(|p| p.core.may_be_granted(hello));
        if !(may && self.disk.is_granted()) {
            out.engine_gets(*conn, Packet::End);
            self.disk.end_grant();
            self.granted = None;
        }
    }

    fn carry_out_partly(&mut self, running: &Running, dice: &mut Dice) {
        match (&running.job, &running.body) {
            (Job::Write(range), body) => {
                for (block, stamp) in blocks(*range).zip(written(body).unwrap_or_default()) {
                    if dice.chance(500) {
                        self.disk.write(block, stamp);
                    }
                }
            }
            (Job::Zero(range) | Job::Unmap(range), _) => {
                let in_doubt = self.is_in_doubt();
                for block in blocks(*range).filter(|_| dice.chance(500)) {
                    self.disk.zero(block, in_doubt);
                }
            }
            _ => {}
        }
    }

    /// Writes up to the first hole for which there is no space, and tells how far that is; for every other hole there is. `None`: it
    /// is not known how far, or the write is one of those of which this is not told.
    fn write_what_has_space(&mut self, running: &Running) -> Option<Result<(Body, u32), Failure>> {
        let (Job::Write(range), body) = (&running.job, &running.body) else { return None };
        let blocks = blocks(*range);
        if blocks.start.is_multiple_of(4) || blocks.clone().any(|block| self.disk.is_marked(block)) {
            return None;
        }
        let has_space = |block: &u64| block.is_multiple_of(2) || self.disk.head_holds(*block);
        let done = blocks.clone().take_while(has_space).count();
        for (block, stamp) in blocks.clone().zip(written(body)?).take(done) {
            self.disk.write(block, stamp);
        }
        let all = blocks.count();
        Some(match u32::try_from(done).ok()? {
            0 => Err(Failure::NoSpace),
            _ if done == all => Ok((Body::None, 0)),
            done => Ok((Body::None, lh_wire::in_part(done))),
        })
    }

    /// SIGSTOP and SIGCONT. Returns what waited in the sockets, to be delivered again.
    pub(crate) fn set_stopped(&mut self, stopped: bool) -> VecDeque<(ConnId, Packet)> {
        match &mut self.process {
            Some(p) => {
                p.stopped = stopped;
                if stopped { VecDeque::new() } else { std::mem::take(&mut p.inbox) }
            }
            None => VecDeque::new(),
        }
    }

    /// True while the process is stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.process.as_ref().is_some_and(|p| p.stopped)
    }

    /// Something has arrived at a socket of the process.
    pub(crate) fn arrives(
        &mut self,
        now: u64,
        conn: ConnId,
        packet: Packet,
        dice: &mut Dice,
        out: &mut Outbox,
    ) {
        let Some(p) = &mut self.process else {
            out.engine_gets(conn, Packet::End);
            return;
        };
        if p.stopped {
            p.inbox.push_back((conn, packet));
            return;
        }
        let input = match packet {
            Packet::Hello(hello) => Input::Hello { conn, hello },
            Packet::End => Input::Closed { conn },
            Packet::Ask(hello) => return self.asked(conn, hello, out),
            Packet::Verdict(_) | Packet::Grant(_) => return,
            Packet::Message(header, body) => {
                let request = p.free.pop().unwrap_or_else(|| {
                    p.next_request += 1;
                    RequestId(p.next_request - 1)
                });
                let control = match &body {
                    Body::Control(c) => Some(c.clone()),
                    _ => None,
                };
                p.bodies.insert(request, body);
                if header.has(flags::VERIFY) {
                    p.verify.insert(request);
                }
                Input::Message { conn, request, header, control }
            }
        };
        self.apply(now, input, dice, out);
    }

    /// The time that the machine asked for has come, or an operation of process `number` has ended.
    pub(crate) fn happens(&mut self, now: u64, number: u64, ended: Ended, dice: &mut Dice, out: &mut Outbox) {
        let alive = self.process.as_ref().is_some_and(|p| p.number == number);
        let input = match ended {
            Ended::Job(request) => {
                let Some(running) = self.running.remove(&(number, request)) else { return };
                let result = self.carry_out(now, &running, dice);
                let Some(p) = self.process.as_mut().filter(|_| alive) else { return };
                let result = result.map(|(body, aux)| {
                    let (payload, trailer) = body.lengths();
                    let aux = if trailer > 0 { trailer } else { aux };
                    p.bodies.insert(request, body);
                    Completed { payload, aux, sync: false }
                });
                Input::Done { request, result }
            }
            Ended::Sync if alive => {
                let result = if dice.chance(self.weather.error) { Err(Failure::Io) } else { Ok(()) };
                if result.is_ok() {
                    self.disk.sync_ends();
                }
                Input::Synced { result }
            }
            Ended::Record if alive => {
                let Some((id, record)) = self.process.as_mut().and_then(|p| p.persists.pop_front()) else {
                    return;
                };
                let result = self.record(now, &record, dice);
                if matches!(record, Record::Fold { .. }) && result.is_ok() {
                    let latency = self.latency(dice);
                    out.later(now + latency, self.ended(number, Ended::Fold));
                }
                Input::Persisted { id, result }
            }
            Ended::Fold if alive => {
                self.fold(now, number, dice, out);
                return self.watch_grant(out);
            }
            Ended::Describe(request) if alive => {
                Input::Described { request, result: Ok(Box::new(self.disk.describe())) }
            }
            Ended::Map(request, layer, from) if alive => {
                Input::Mapped { request, result: self.disk.layer_map(&layer, from).map(Box::new) }
            }
            Ended::Time if alive => {
                if let Some(p) = &mut self.process {
                    p.wakes_at = None;
                }
                Input::Tick
            }
            _ => return,
        };
        if self.is_stopped() {
            // The kernel has finished; the process looks at it when it is continued.
            out.later(now + 1_000_000, Event::Deliver { node: self.number, process: number, input });
            return;
        }
        self.apply(now, input, dice, out);
    }

    /// Makes a record, if the disk takes it. One that it gives an error for may be there all the same; a full one takes those for which
    /// nothing is kept back.
    fn record(&mut self, now: u64, record: &Record, dice: &mut Dice) -> Result<(), Failure> {
        let needs_space = matches!(record, Record::Prepare { .. } | Record::Missed { .. });
        if self.records_need_space && needs_space && now < self.disk.full_until {
            return Err(Failure::NoSpace);
        }
        if self.weather.records > 0 && dice.chance(self.weather.records) {
            if dice.chance(500) {
                let _ = self.disk.record(record);
            }
            return if self.records_believed { Ok(()) } else { Err(Failure::Io) };
        }
        self.disk.record(record)
    }

    /// The fold that runs goes on, unless the process is stopped.
    fn fold(&mut self, now: u64, number: u64, dice: &mut Dice, out: &mut Outbox) {
        let drains = self.disk.drains();
        if self.is_stopped() || self.disk.fold_on() {
            let latency = self.latency(dice).max(50_000) * self.weather.folds;
            out.later(now + latency, self.ended(number, Ended::Fold));
        } else {
            out.note(if drains { "fold of a head ended" } else { "fold ended" }, 1);
        }
    }

    /// An ended operation is looked at by the process it belongs to.
    pub(crate) fn delivers(
        &mut self,
        now: u64,
        number: u64,
        input: Input,
        dice: &mut Dice,
        out: &mut Outbox,
    ) {
        if self.process.as_ref().is_none_or(|p| p.number != number) {
            return;
        }
        if self.is_stopped() {
            out.later(now + 1_000_000, Event::Deliver { node: self.number, process: number, input });
            return;
        }
        self.apply(now, input, dice, out);
    }

    /// Whether a job needs space, on a full disk. Zeroes need none where nothing lies below; elsewhere there may be a mark.
    fn meets_the_end(&self, running: &Running, dice: &mut Dice) -> bool {
        matches!(running.job, Job::Write(_)) || (self.disk.has_snapshots() && dice.chance(300))
    }

    /// Does a job at its end.
    fn carry_out(&mut self, now: u64, running: &Running, dice: &mut Dice) -> Result<(Body, u32), Failure> {
        if let Job::Allocation(range) = running.job {
            let data = blocks(range).map(|block| self.disk.place(block).is_some());
            return Ok((Body::Allocation(data.collect()), 0));
        }
        if dice.chance(self.weather.error) {
            return Err(Failure::Io);
        }
        let full = now < self.disk.full_until;
        match (&running.job, &running.body) {
            (Job::Read(range), _) if running.verify && self.disk.reads_rot(*range) => Err(Failure::Rotten),
            (Job::Read(range), _) => {
                Ok((Body::Blocks(blocks(*range).map(|b| self.disk.read(b)).collect()), 0))
            }
            (Job::Write(_) | Job::Zero(_) | Job::Unmap(_), _)
                if full && self.meets_the_end(running, dice) =>
            {
                if !dice.chance(300) {
                    return Err(Failure::NoSpace);
                }
                if let Some(done) = self.write_what_has_space(running) {
                    return done;
                }
                self.carry_out_partly(running, dice);
                Err(Failure::FullInPart)
            }
            (Job::Write(range), body) => {
                let stamps = written(body).ok_or(Failure::Invalid)?;
                for (block, stamp) in blocks(*range).zip(stamps) {
                    self.disk.write(block, stamp);
                }
                Ok((Body::None, 0))
            }
            (Job::Zero(range) | Job::Unmap(range), _) => {
                let in_doubt = self.is_in_doubt();
                blocks(*range).for_each(|b| self.disk.zero(b, in_doubt));
                Ok((Body::None, 0))
            }
            (Job::ReadLayer { range, .. }, Body::Layer(name))
                if running.verify && self.disk.rotten_parts(name, *range) != 0 =>
            {
                Err(Failure::Rotten)
            }
            (Job::ReadLayer { range, merged }, Body::Layer(name)) => self
                .disk
                .read_layer(name, *range, *merged)
                .map(|cells| (Body::Image { layer: name.clone(), cells }, 0)),
            (Job::PutLayer { .. }, _) if full => Err(Failure::NoSpace),
            (Job::PutLayer { range, .. }, Body::Image { layer, .. })
                if running.verify && self.disk.is_sure(layer, *range) =>
            {
                Ok((Body::None, 0))
            }
            (Job::PutLayer { range, .. }, Body::Image { layer, cells }) => {
                if running.verify {
                    self.disk.void_sums(layer);
                }
                self.disk.put_layer(layer, *range, cells).map(|changed| (Body::None, changed))
            }
            (Job::DigestLayer(range), Body::Layer(name)) => self
                .disk
                .compared_layer(name, *range)
                .map(|cells| (Body::Digest { layer: name.clone(), cells }, self.rot(running, name, *range))),
            (Job::CompareLayer(range), Body::Digest { layer, cells }) => {
                let own = self.disk.compared_layer(layer, *range)?;
                let differ = own.iter().zip(cells).enumerate().filter(|(_, (own, theirs))| own != theirs);
                let bits = differ.map(|(n, _)| lh_wire::part_bit(range.len, n as u64 * lh_block::BLOCK));
                let rotten = self.rot(running, layer, *range);
                Ok((Body::None, bits.fold(rotten, |all, bit| all | bit)))
            }
            (Job::VerifyLayer(range), Body::Layer(name)) => {
                Ok((Body::None, self.disk.verified(name, *range).bits()))
            }
            (Job::Places(range), _) => match self.disk.tell_places(*range) {
                Some(places) => {
                    let number = u32::try_from(self.number).unwrap_or(0) << 24 | self.grants;
                    Ok((Body::Places(Box::new(places)), number))
                }
                None => Err(Failure::Refused("nothing is granted".into())),
            },
            _ => Err(Failure::Invalid),
        }
    }

    fn rot(&self, running: &Running, layer: &str, range: Extent) -> u32 {
        if running.verify { self.disk.rotten_parts(layer, range) } else { 0 }
    }

    fn apply(&mut self, now: u64, input: Input, dice: &mut Dice, out: &mut Outbox) {
        let Some(p) = &mut self.process else { return };
        let mut outputs = Vec::new();
        p.core.apply(now, input, &mut outputs);
        let number = p.number;
        self.watch_grant(out);
        for output in outputs {
            self.carry(now, number, output, dice, out);
        }
        let Some(p) = &mut self.process else { return };
        if let Some(at) = p.core.wake_at().map(|at| at.max(now + 1))
            && p.wakes_at.is_none_or(|known| at < known)
        {
            p.wakes_at = Some(at);
            out.later(at, self.ended(number, Ended::Time));
        }
    }

    const fn ended(&self, process: u64, ended: Ended) -> Event {
        Event::Ended { node: self.number, process, ended }
    }

    fn latency(&self, dice: &mut Dice) -> u64 {
        let us = if dice.chance(20) { dice.between(1000, 20_000) } else { dice.between(20, 400) };
        us * 1000 * self.weather.slow
    }

    fn carry(&mut self, now: u64, number: u64, output: Output, dice: &mut Dice, out: &mut Outbox) {
        let latency = self.latency(dice);
        let Some(p) = &mut self.process else { return };
        match output {
            Output::Welcome { conn, .. } => {
                out.engine_gets(conn, Packet::Verdict(lh_wire::handshake::Verdict::Welcome));
            }
            Output::Refuse { conn, verdict, .. } => {
                out.engine_gets(conn, Packet::Verdict(verdict));
                out.engine_gets(conn, Packet::End);
            }
            Output::Reply { conn, request, header, body } => {
                let kept = p.bodies.remove(&request).unwrap_or(Body::None);
                p.free.push(request);
                let body = match body {
                    AnswerBody::None => Body::None,
                    AnswerBody::Data => kept,
                    AnswerBody::Text(t) => Body::Text(t.into()),
                    AnswerBody::State(s) => Body::State(s),
                    AnswerBody::Map(page) => Body::Map(page),
                };
                out.engine_gets(conn, Packet::Message(header, body));
            }
            Output::Drop { request } => {
                p.bodies.remove(&request);
                p.free.push(request);
            }
            Output::Store { request, job } => {
                let body = p.bodies.remove(&request).unwrap_or(Body::None);
                let ends = now + latency;
                let verify = p.verify.remove(&request);
                self.running.insert((number, request), Running { job, body, verify });
                out.later(ends, self.ended(number, Ended::Job(request)));
            }
            Output::Sync => {
                self.disk.sync_begins();
                out.later(now + latency * 4, self.ended(number, Ended::Sync));
            }
            Output::Map { request, layer, from, .. } => {
                out.later(now + latency, self.ended(number, Ended::Map(request, layer, from)));
            }
            Output::Describe { request } => {
                out.later(now + latency, self.ended(number, Ended::Describe(request)));
            }
            Output::Persist { id, record } => {
                if matches!(&record, Record::Intent { mark, .. } if !mark.is_empty()) {
                    out.moment();
                }
                p.persists.push_back((id, record));
                p.last_persist = p.last_persist.max(now) + latency * 2;
                let at = p.last_persist;
                out.later(at, self.ended(number, Ended::Record));
            }
            Output::Close { conn, .. } => out.engine_gets(conn, Packet::End),
        }
    }
}

/// What has ended.
#[derive(Clone, Debug)]
pub(crate) enum Ended {
    /// A store job.
    Job(RequestId),
    /// The sync.
    Sync,
    /// The oldest record on its way.
    Record,
    /// The description of the directory.
    Describe(RequestId),
    /// A look at a layer, from a place on.
    Map(RequestId, String, u64),
    /// A piece of a fold.
    Fold,
    /// Time that the machine asked for.
    Time,
}
