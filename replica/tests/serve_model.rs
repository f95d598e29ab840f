//! Random writes, zeroes, flushes and snapshots, many at once, over kills and restarts: what is read is what a model
//! says, in the head and in every snapshot.

#![expect(clippy::cast_possible_truncation, reason = "blocks in a test fit every number")]

mod serve_client;

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::Path;

use lh_block::{BLOCK, Extent, Instance};
use lh_wire::{BlockState, ChainOp, Control, LayerTrailer, OpCode, Status, flags};
use serve_client::{Client, Killable, pattern, places, serve_if_child, session};

/// Blocks that are used: few, so that requests meet old data, zeroes and holes often.
const BLOCKS: u64 = 256;
const ROUNDS: u32 = 12;
const REQUESTS: usize = 150;
const DEPTH: usize = 16;

/// Names another seed than the usual one.
const SEED: &str = "REPLICA_TEST_SEED";

/// Not a test by itself: what [`Killable`] runs.
#[test]
fn child() {
    serve_if_child();
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// What a block holds: the seed of its pattern, or 0 for zeroes.
type Content = u64;

fn bytes(content: Content) -> Vec<u8> {
    if content == 0 { vec![0; BLOCK as usize] } else { pattern(content, BLOCK as usize) }
}

struct Flight {
    range: Extent,
    /// What its blocks hold afterwards; `None`: it reads.
    after: Option<Vec<Content>>,
}

struct Model {
    dice: Dice,
    head: Vec<Content>,
    /// Blocks that may hold either, because the process was killed under a write.
    unsure: BTreeMap<u64, Content>,
    snapshots: Vec<(String, Vec<Content>)>,
    flights: BTreeMap<u64, Flight>,
    seed: u64,
}

impl Model {
    fn new(seed: u64) -> Self {
        Self {
            dice: Dice(seed),
            head: vec![0; BLOCKS as usize],
            unsure: BTreeMap::new(),
            snapshots: Vec::new(),
            flights: BTreeMap::new(),
            seed: 0,
        }
    }

    /// Sends one more request, unless its range is in use.
    fn send(&mut self, c: &mut Client<UnixStream>) {
        let first = self.dice.roll(BLOCKS);
        let count = (1 + self.dice.roll(8)).min(BLOCKS - first);
        let range = Extent::new(first * BLOCK, count * BLOCK);
        if self.flights.values().any(|f| f.range.overlaps(range)) {
            return;
        }
        let (mut op, mut fua) = (OpCode::Write, 0);
        let mut after = None;
        match self.dice.roll(10) {
            0..=1 => op = OpCode::Read,
            2 => op = OpCode::Flush,
            3..=5 => {
                op = if self.dice.roll(2) == 0 { OpCode::WriteZeroes } else { OpCode::Unmap };
                after = Some(vec![0; count as usize]);
            }
            roll => {
                fua = if roll == 6 { flags::FUA } else { 0 };
                self.seed += 1;
                after = Some((0..count).map(|n| self.seed << 8 | n).collect());
            }
        }
        let data: Vec<u8> = match (&after, op) {
            (Some(contents), OpCode::Write) => contents.iter().flat_map(|c| bytes(*c)).collect(),
            _ => Vec::new(),
        };
        let mut header = c.header(op, range.offset, range.len.try_into().unwrap());
        header.flags = fua;
        c.send(header, &data);
        self.flights.insert(header.tag, Flight { range, after });
    }

    fn receive(&mut self, c: &mut Client<UnixStream>) {
        let answer = c.receive();
        assert_eq!(answer.status(), Status::Ok, "{:?}", answer.header);
        let flight = self.flights.remove(&answer.header.tag).unwrap();
        let first = flight.range.offset / BLOCK;
        if answer.header.op == OpCode::Read {
            for (n, read) in (first..).zip(answer.payload.chunks(BLOCK as usize)) {
                self.check(n, read);
            }
        }
        for (n, content) in (first..).zip(flight.after.into_iter().flatten()) {
            self.head[n as usize] = content;
            self.unsure.remove(&n);
        }
    }

    /// What was read of a block is what it holds. An unsure one is settled by that.
    fn check(&mut self, block: u64, read: &[u8]) {
        if let Some(other) = self.unsure.remove(&block)
            && read == bytes(other)
        {
            self.head[block as usize] = other;
        }
        assert!(read == bytes(self.head[block as usize]), "block {block} holds something else");
    }

    fn check_all(&mut self, c: &mut Client<UnixStream>) {
        let read = c.read(0, (BLOCKS * BLOCK).try_into().unwrap());
        for (n, read) in (0..).zip(read.chunks(BLOCK as usize)) {
            self.check(n, read);
        }
        for run in c.allocation(Extent::new(0, BLOCKS * BLOCK)) {
            for n in run.range.offset / BLOCK..run.range.end() / BLOCK {
                assert_eq!(run.data, self.head[n as usize] != 0, "block {n}");
            }
        }
        for (at, (name, contents)) in self.snapshots.iter().enumerate() {
            let names: Vec<&str> = self.snapshots[..=at].iter().map(|(n, _)| n.as_str()).collect();
            assert!(
                through(c, &names) == *contents.iter().map(|c| bytes(*c)).collect::<Vec<_>>().concat(),
                "{name}"
            );
        }
    }

    fn snapshot(&mut self, c: &mut Client<UnixStream>) {
        let name = format!("s{}", self.snapshots.len());
        let id = Instance(self.snapshots.len() as u128 + 1);
        let op = ChainOp::Snapshot {
            name: name.clone(),
            user_created: true,
            created: "2026-01-01T00:00:00Z".into(),
            labels: Default::default(),
        };
        assert_eq!(c.control(&Control::Prepare { id, op }).status(), Status::Ok);
        let carry_out = if self.snapshots.len().is_multiple_of(2) {
            Control::Commit { id }
        } else {
            Control::Switch { id }
        };
        assert_eq!(c.control(&carry_out).status(), Status::Ok);
        self.snapshots.push((name, self.head.clone()));
    }

    /// The process is gone: what was in flight may have been done, block by block, or not.
    fn killed(&mut self) {
        for flight in std::mem::take(&mut self.flights).into_values() {
            let first = flight.range.offset / BLOCK;
            for (n, content) in (first..).zip(flight.after.into_iter().flatten()) {
                self.unsure.insert(n, content);
            }
        }
    }
}

/// The bytes of the used blocks through some layers, the lowest first.
fn through(c: &mut Client<UnixStream>, layers: &[&str]) -> Vec<u8> {
    let length = (BLOCKS * BLOCK).try_into().unwrap();
    let mut all = vec![0; (BLOCKS * BLOCK) as usize];
    for name in layers {
        let header = c.header(OpCode::ReadLayer, 0, length);
        let answer = c.ask(header, name.as_bytes());
        let (data, trailer) = answer.payload.split_at(answer.payload.len() - answer.header.aux as usize);
        let trailer = LayerTrailer::decode(trailer, length, data.len().try_into().unwrap()).unwrap();
        let mut data = data.chunks(BLOCK as usize);
        for (block, state) in all.chunks_mut(BLOCK as usize).zip(trailer.states()) {
            match state {
                BlockState::Absent => {}
                BlockState::Data => block.copy_from_slice(data.next().unwrap()),
                BlockState::Zero => block.fill(0),
            }
        }
    }
    all
}

fn run(place: &Path, seed: u64) {
    let mut model = Model::new(seed);
    let mut server = Killable::start(place, "child");
    let mut c = session(&server.socket, 1, 1);
    for round in 0..ROUNDS {
        for _ in 0..REQUESTS {
            if model.flights.len() == DEPTH {
                model.receive(&mut c);
            }
            model.send(&mut c);
        }
        if round % 3 == 2 {
            server.kill();
            model.killed();
            server = Killable::start(place, "child");
        } else {
            while !model.flights.is_empty() {
                model.receive(&mut c);
            }
        }
        c = session(&server.socket, round + 2, u128::from(round) + 2);
        model.check_all(&mut c);
        if round % 2 == 0 && model.unsure.is_empty() {
            model.snapshot(&mut c);
        }
    }
    assert!(model.snapshots.len() >= 4);
    server.kill();
}

#[test]
fn whatever_happens_the_model_is_right() {
    let first = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    std::thread::scope(|scope| {
        for (seed, place) in (first..).zip(places()) {
            println!("{SEED}={seed} in {}", place.path().display());
            scope.spawn(move || run(place.path(), seed));
        }
    });
}
