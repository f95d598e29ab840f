//! Random sequences of engines, requests, deaths and completions, judged by a model that knows only the rules.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use lh_block::Epoch;
use lh_wire::{ChainOp, WRITE_WINDOW};

use super::*;
use crate::serve::core::Job;

/// xorshift64*: the same numbers for the same seed, everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % sides
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        let at = usize::try_from(self.roll(from.len().max(1) as u64)).ok()?;
        from.get(at).copied()
    }
}

#[derive(Clone, Debug)]
struct Link {
    hello: SessionHello,
    welcomed: bool,
    alive: bool,
    writes: VecDeque<Extent>,
}

#[derive(Clone, Debug)]
struct Asked {
    conn: ConnId,
    header: Header,
    control: Option<Control>,
    /// The number of syncs begun when a sync began to be owed, as far as known.
    owes_sync_after: Option<usize>,
    ended: bool,
}

/// How often what happened, so that a test that tests nothing is noticed.
#[derive(Debug, Default)]
struct Seen {
    welcomes: usize,
    stale: usize,
    drained: usize,
    flushed: usize,
    marked: usize,
    doubts: usize,
    commits: usize,
}

struct World {
    dice: Dice,
    core: Core,
    now: u64,
    links: BTreeMap<ConnId, Link>,
    asked: BTreeMap<RequestId, Asked>,
    in_store: BTreeMap<RequestId, Job>,
    describing: BTreeSet<RequestId>,
    records: VecDeque<(PersistId, Record)>,
    sync_running: bool,
    syncs_begun: usize,
    syncs_ended: usize,
    disk_fence: Option<(Generation, Instance)>,
    disk_intent: BTreeSet<u64>,
    /// Ranges that the replica must remember.
    doubt: Vec<Extent>,
    youngest: u32,
    sessions: u128,
    requests: u32,
    prepared: Option<Instance>,
    seen: Seen,
}

type Verified = Result<(), String>;

macro_rules! hold {
    ($what:expr, $($why:tt)*) => { if !$what { return Err(format!($($why)*)); } };
}

impl World {
    fn new(seed: u64, core: Core) -> Self {
        Self {
            dice: Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            core,
            now: 0,
            links: BTreeMap::new(),
            asked: BTreeMap::new(),
            in_store: BTreeMap::new(),
            describing: BTreeSet::new(),
            records: VecDeque::new(),
            sync_running: false,
            syncs_begun: 0,
            syncs_ended: 0,
            disk_fence: None,
            disk_intent: BTreeSet::new(),
            doubt: Vec::new(),
            youngest: 1,
            sessions: 0,
            requests: 0,
            prepared: None,
            seen: Seen::default(),
        }
    }

    fn feed(&mut self, input: Input) -> Verified {
        let mut out = Vec::new();
        self.core.apply(self.now, input, &mut out);
        out.into_iter().try_for_each(|o| self.judge(o))
    }

    fn bury(&mut self, conn: ConnId) {
        if let Some(link) = self.links.get_mut(&conn).filter(|l| l.alive) {
            link.alive = false;
            self.doubt.extend(link.writes.drain(..));
        }
    }

    fn judge(&mut self, output: Output) -> Verified {
        match output {
            Output::Welcome { conn, generation } => self.judge_welcome(conn, generation)?,
            Output::Refuse { conn, verdict, .. } => {
                hold!(self.links[&conn].alive, "{conn:?} refused after its end");
                self.seen.stale += usize::from(verdict == Verdict::Stale);
                self.bury(conn);
            }
            Output::Close { conn, .. } => {
                hold!(self.links[&conn].alive, "{conn:?} closed twice");
                self.bury(conn);
            }
            Output::Reply { conn, request, header, body } => self.judge_reply(conn, request, header, body)?,
            Output::Drop { request } => {
                let asked = self.asked.get_mut(&request).ok_or("dropped what was never asked")?;
                hold!(!asked.ended, "{request:?} ended twice");
                asked.ended = true;
                hold!(!self.in_store.contains_key(&request), "{request:?} dropped while in the store");
                hold!(!self.links[&asked.conn].alive, "a living connection's request was dropped");
                self.seen.drained += 1;
            }
            Output::Store { request, job } => self.judge_store(request, job)?,
            Output::Sync => {
                hold!(!self.sync_running, "two syncs at once");
                self.sync_running = true;
                self.syncs_begun += 1;
            }
            Output::Map { .. } => hold!(false, "nobody asks for a map"),
            Output::Describe { request } => {
                self.describing.insert(request);
            }
            Output::Persist { id, record } => {
                if let Record::Intent { clear, .. } = &record {
                    clear.iter().for_each(|n| _ = self.disk_intent.remove(n));
                }
                if matches!(record, Record::Commit { .. }) {
                    hold!(!self.in_store.values().any(|j| j.is_write()), "switched beside a write");
                }
                self.records.push_back((id, record));
            }
        }
        Ok(())
    }

    fn judge_welcome(&mut self, conn: ConnId, generation: Generation) -> Verified {
        let hello = self.links[&conn].hello;
        self.seen.welcomes += 1;
        hold!(
            self.disk_fence == Some((hello.generation, hello.instance)),
            "let in before the fence is durable"
        );
        hold!(generation == hello.generation, "welcomed under another generation");
        for (id, job) in &self.in_store {
            let other = self.links[&self.asked[id].conn].hello.session;
            hold!(other == hello.session, "let in while {job:?} of an earlier session runs");
        }
        let others =
            self.links.values().filter(|l| l.alive && l.welcomed && l.hello.session != hello.session);
        hold!(others.count() == 0, "two sessions at once");
        let link = self.links.get_mut(&conn).ok_or("unknown connection")?;
        hold!(link.alive && !link.welcomed, "welcomed twice or after the end");
        link.welcomed = true;
        Ok(())
    }

    fn judge_reply(&mut self, conn: ConnId, request: RequestId, header: Header, body: Body) -> Verified {
        hold!(self.links[&conn].alive, "an answer to a dead connection");
        let asked = self.asked.get_mut(&request).ok_or("answered what was never asked")?;
        hold!(!asked.ended, "{request:?} ended twice");
        asked.ended = true;
        hold!(asked.conn == conn && asked.header.tag == header.tag, "an answer to another");
        hold!(!self.in_store.contains_key(&request), "answered while in the store");
        let asked = asked.clone();
        if header.status != Status::Ok {
            return Ok(());
        }
        if let Some(begun) = asked.owes_sync_after {
            hold!(self.syncs_ended > begun, "answered without a sync that began after it");
            self.seen.flushed += 1;
        }
        match (asked.control, body) {
            (Some(Control::State), Body::State(state)) => {
                for range in &self.doubt {
                    hold!(state.in_doubt.iter().any(|d| d.contains(*range)), "{range} is forgotten");
                }
                self.seen.doubts += usize::from(!self.doubt.is_empty());
            }
            (Some(Control::Resolved), _) => self.doubt.clear(),
            (Some(Control::Commit { .. }), _) => {
                self.prepared = None;
                self.seen.commits += 1;
            }
            _ => {}
        }
        Ok(())
    }

    fn judge_store(&mut self, request: RequestId, job: Job) -> Verified {
        hold!(self.in_store.insert(request, job).is_none(), "stored twice");
        let range = job.range();
        if job.is_write() && !matches!(job, Job::PutLayer { .. }) {
            for n in range.offset / CHUNK..range.end().div_ceil(CHUNK) {
                hold!(self.disk_intent.contains(&n), "a write into chunk {n} before its mark is durable");
                self.seen.marked += 1;
            }
        }
        Ok(())
    }

    /// One thing that may happen next.
    fn step(&mut self) -> Verified {
        match self.dice.roll(100) {
            0..=1 => self.knock(),
            2 => match self.pick_link(false) {
                Some(conn) => {
                    self.bury(conn);
                    self.feed(Input::Closed { conn })
                }
                None => Ok(()),
            },
            3..=44 => match self.pick_link(true) {
                Some(conn) => self.ask(conn),
                None => self.knock(),
            },
            45..=75 => self.finish_job(),
            76..=85 => self.finish_record(),
            86..=92 => self.finish_sync(),
            93..=96 => match self.describing.pop_first() {
                Some(request) => self.feed(Input::Described { request, result: Ok(Box::default()) }),
                None => Ok(()),
            },
            _ => {
                self.now = self.core.wake_at().unwrap_or(self.now).max(self.now);
                self.feed(Input::Tick)
            }
        }
    }

    fn pick_link(&mut self, welcomed: bool) -> Option<ConnId> {
        let alive: Vec<ConnId> = self
            .links
            .iter()
            .filter(|(_, l)| l.alive && (l.welcomed || !welcomed))
            .map(|(c, _)| *c)
            .collect();
        self.dice.pick(&alive)
    }

    /// A connection of an older, the same or a younger engine; of its last session or a new one.
    fn knock(&mut self) -> Verified {
        let age = self.dice.roll(10);
        let n = match age {
            0..=1 => self.youngest.saturating_sub(1).max(1),
            2..=7 => self.youngest,
            _ => self.youngest + 1,
        };
        self.youngest = self.youngest.max(n);
        if self.dice.roll(3) == 0 {
            self.sessions += 1;
        }
        let queue = u16::from(self.dice.roll(2) == 0);
        let instance = Instance(if self.dice.roll(8) == 0 { 1 << 64 } else { 0 } + u128::from(n));
        let session = Instance(u128::from(n) << 32 | self.sessions);
        let hello = SessionHello { instance, session, queue, queues: 2, ..hello(n, 0) };
        let conn = ConnId(self.links.len() as u64);
        let link = Link { hello, welcomed: false, alive: true, writes: VecDeque::new() };
        self.links.insert(conn, link);
        self.feed(Input::Hello { conn, hello })
    }

    fn ask(&mut self, conn: ConnId) -> Verified {
        let n = self.links[&conn].hello.generation.attachment;
        let offset = self.dice.roll(SIZE / 4096 - 64) * 4096;
        let ops =
            [OpCode::Read, OpCode::Write, OpCode::Write, OpCode::WriteZeroes, OpCode::Unmap, OpCode::Flush];
        let (mut header, mut control) = (request(OpCode::Read, offset, 4096, n), None);
        match self.dice.roll(12) {
            0 => header = request(OpCode::ClearIntent, offset & !(CHUNK - 1), 4 << 20, n),
            1 => header = fua(offset, n),
            2..=3 => {
                control = Some(self.some_control(n));
                header = request(OpCode::Control, 0, 0, n);
            }
            _ => {
                let op = self.dice.pick(&ops).unwrap_or(OpCode::Read);
                header = request(op, offset, header.length, n);
            }
        }
        header.tag = u64::from(self.requests);
        let id = RequestId(self.requests);
        self.requests += 1;
        if matches!(header.op, OpCode::Write | OpCode::WriteZeroes | OpCode::Unmap) {
            let writes = &mut self.links.get_mut(&conn).ok_or("unknown connection")?.writes;
            writes.push_back(Extent::new(header.offset, header.length.into()));
            if writes.len() > WRITE_WINDOW {
                writes.pop_front();
            }
        }
        let owes_sync_after = (header.op == OpCode::Flush).then_some(self.syncs_begun);
        let asked = Asked { conn, header, control: control.clone(), owes_sync_after, ended: false };
        self.asked.insert(id, asked);
        self.feed(Input::Message { conn, request: id, header, control: control.map(Box::new) })
    }

    fn some_control(&mut self, n: u32) -> Control {
        let id = Instance(self.requests.into());
        match (self.dice.roll(10), self.prepared) {
            (0..=2, _) => Control::State,
            (3, _) => Control::Resolved,
            (4..=7, Some(id)) => Control::Commit { id },
            (8, Some(id)) => {
                self.prepared = None;
                Control::Abort { id }
            }
            (4..=8, None) => {
                self.prepared = Some(id);
                Control::Prepare { id, op: snapshot_op() }
            }
            _ => Control::SetEpoch {
                epoch: Epoch { generation: generation(n), counter: self.requests.into(), ..Epoch::default() },
                out: Vec::new(),
            },
        }
    }

    fn finish_job(&mut self) -> Verified {
        let running: Vec<RequestId> = self.in_store.keys().copied().collect();
        let Some(request) = self.dice.pick(&running) else { return Ok(()) };
        self.in_store.remove(&request);
        let full = self.dice.roll(20) == 0;
        if let Some(asked) = self.asked.get_mut(&request).filter(|a| a.header.has(flags::FUA)) {
            asked.owes_sync_after = Some(self.syncs_begun);
        }
        let result = if full { Err(Failure::NoSpace) } else { Ok(Completed::default()) };
        self.feed(Input::Done { request, result })
    }

    fn finish_record(&mut self) -> Verified {
        let Some((id, record)) = self.records.pop_front() else { return Ok(()) };
        if self.dice.roll(20) == 0 {
            return self.feed(Input::Persisted { id, result: Err(Failure::NoSpace) });
        }
        match record {
            Record::Fence { generation, instance } => {
                let back = self
                    .disk_fence
                    .is_some_and(|(g, i)| generation < g || (generation == g && instance != i));
                hold!(!back, "the fence went back");
                self.disk_fence = Some((generation, instance));
            }
            Record::Intent { mark, .. } => self.disk_intent.extend(mark),
            Record::Commit { .. } => {
                hold!(!self.in_store.values().any(|j| j.is_write()), "a write ran beside a switch");
            }
            _ => {}
        }
        self.feed(Input::Persisted { id, result: Ok(()) })
    }

    fn finish_sync(&mut self) -> Verified {
        if !std::mem::take(&mut self.sync_running) {
            return Ok(());
        }
        self.syncs_ended = self.syncs_begun;
        self.feed(Input::Synced { result: Ok(()) })
    }

    /// Everything that is on its way ends; nothing may be left.
    fn settle(&mut self) -> Verified {
        for conn in self.links.keys().copied().collect::<Vec<_>>() {
            self.bury(conn);
            self.feed(Input::Closed { conn })?;
        }
        for _ in 0..10_000 {
            self.finish_job()?;
            self.finish_record()?;
            self.finish_sync()?;
            if let Some(request) = self.describing.pop_first() {
                self.feed(Input::Described { request, result: Ok(Box::default()) })?;
            }
        }
        hold!(self.core.is_idle(), "something never ends");
        let open = self.asked.iter().find(|(_, a)| !a.ended);
        hold!(open.is_none(), "{open:?} was never answered nor dropped");
        Ok(())
    }
}

fn snapshot_op() -> ChainOp {
    ChainOp::Snapshot {
        name: "s".into(),
        user_created: false,
        created: String::new(),
        labels: Default::default(),
    }
}

fn run(seed: u64, core: Core) -> Result<Seen, String> {
    let mut world = World::new(seed, core);
    for _ in 0..600 {
        world.step()?;
    }
    world.settle()?;
    Ok(world.seen)
}

const SEEDS: u64 = 300;

#[test]
fn the_rules_hold_whatever_happens() {
    let mut total = Seen::default();
    for seed in 0..SEEDS {
        match run(seed, Core::new(facts())) {
            Err(broken) => panic!("seed {seed}: {broken}"),
            Ok(seen) => {
                total.welcomes += seen.welcomes;
                total.stale += seen.stale;
                total.drained += seen.drained;
                total.flushed += seen.flushed;
                total.marked += seen.marked;
                total.doubts += seen.doubts;
                total.commits += seen.commits;
            }
        }
    }
    println!("{total:?}");
    let Seen { welcomes, stale, drained, flushed, marked, doubts, commits } = total;
    for (n, what) in [
        (welcomes, "welcomes"),
        (stale, "stale engines"),
        (drained, "requests drained or dropped"),
        (flushed, "flushes"),
        (marked, "marks"),
        (doubts, "ranges in doubt"),
        (commits, "snapshots"),
    ] {
        assert!(n > 50, "only {n} {what}: the test tests nothing");
    }
}

#[cfg(feature = "sabotage")]
#[test]
fn every_mechanism_taken_out_is_noticed() {
    use crate::serve::core::Sabotage;
    let none = Sabotage::default();
    for (sabotage, sign) in [
        (Sabotage { fence_without_drain: true, ..none }, "of an earlier session runs"),
        (Sabotage { accept_stale: true, ..none }, "the fence went back"),
        (Sabotage { forget_in_doubt: true, ..none }, "is forgotten"),
        (Sabotage { flush_early: true, ..none }, "without a sync"),
        (Sabotage { intent_not_durable: true, ..none }, "before its mark is durable"),
    ] {
        let signs = (0..SEEDS).filter_map(|seed| run(seed, Core::new(facts()).sabotaged(sabotage)).err());
        let found = signs.into_iter().any(|broken| broken.contains(sign));
        assert!(found, "{sabotage:?} goes unnoticed");
    }
}
