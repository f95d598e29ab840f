//! Readers of snapshots beside an engine: what they hear is what the snapshot holds, they disturb nobody, and they hear
//! nothing of what may change.

mod serve_client;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use lh_block::{BLOCK, Extent, Instance};
use lh_wire::handshake::Verdict;
use lh_wire::{Ask, ChainOp, Control, Looked, MapPage, OpCode, Opened, Status};
use serve_client::{
    Answer, Client, KEY, MAP_KEY, MIB, PATIENCE, SIZE, Server, knock, pattern, places, session, who,
};

const CREATED: &str = "2026-01-01T00:00:00Z";

/// An engine's connection, and the volume as it should read.
struct Engine {
    c: Client<UnixStream>,
    bytes: Vec<u8>,
    count: u64,
}

impl Engine {
    fn new(c: Client<UnixStream>) -> Self {
        Self { c, bytes: vec![0; usize::try_from(SIZE).unwrap()], count: 0 }
    }

    /// With the second block written in snapshot `one`.
    fn with_a_snapshot(server: &Server) -> Self {
        let mut engine = Self::new(session(&server.socket, 1, 1));
        engine.write(1, 1);
        engine.snapshot("one");
        engine.settle("one");
        engine
    }

    fn carry_out(&mut self, op: ChainOp) {
        self.count += 1;
        let id = Instance(self.count.into());
        assert_eq!(self.c.control(&Control::Prepare { id, op }).status(), Status::Ok);
        assert_eq!(self.c.control(&Control::Commit { id }).status(), Status::Ok);
    }

    /// Takes a snapshot and gives back the volume as it was.
    fn snapshot(&mut self, name: &str) -> Vec<u8> {
        let op = ChainOp::Snapshot {
            name: name.to_owned(),
            user_created: true,
            created: CREATED.to_owned(),
            labels: Default::default(),
        };
        self.carry_out(op);
        self.bytes.clone()
    }

    /// As an engine does behind a snapshot: the layer is on stable storage, then it is called so.
    fn settle(&mut self, name: &str) {
        assert_eq!(self.c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
        let settled = Control::Settled { snapshot: name.to_owned() };
        assert_eq!(self.c.control(&settled).status(), Status::Ok);
    }

    fn write(&mut self, block: u64, blocks: u64) {
        let (at, len) = (block * BLOCK, usize::try_from(blocks * BLOCK).unwrap());
        let data = pattern(self.count + block, len);
        assert_eq!(self.c.write(at, &data), Status::Ok);
        let at = usize::try_from(at).unwrap();
        self.bytes[at..at + len].copy_from_slice(&data);
    }

    fn unmap(&mut self, block: u64, blocks: u64) {
        let length = u32::try_from(blocks * BLOCK).unwrap();
        assert_eq!(self.c.op(OpCode::Unmap, block * BLOCK, length).status(), Status::Ok);
        let at = usize::try_from(block * BLOCK).unwrap();
        self.bytes[at..at + length as usize].fill(0);
    }
}

fn reader(socket: &Path) -> Result<Client<UnixStream>, Verdict> {
    reader_with(socket, KEY)
}

fn reader_with(socket: &Path, key: [u8; 32]) -> Result<Client<UnixStream>, Verdict> {
    let mut who = who(1, 0);
    (who.reader, who.key) = (true, key);
    knock(socket, &who)
}

fn ask(reader: &mut Client<UnixStream>, ask: &Ask) -> Answer {
    let header = reader.header(OpCode::Control, 0, 0);
    reader.ask(header, &serde_json::to_vec(ask).unwrap())
}

fn open(reader: &mut Client<UnixStream>, snapshot: &str, base: Option<&str>) -> Result<Opened, String> {
    let answer = ask(reader, &Ask::Open { snapshot: snapshot.into(), base: base.map(str::to_owned) });
    match answer.status() {
        Status::Ok => Ok(serde_json::from_slice(&answer.payload).unwrap()),
        Status::Refused => Err(String::from_utf8(answer.payload).unwrap()),
        other => panic!("{other:?}"),
    }
}

fn map(reader: &mut Client<UnixStream>, mut from: u64) -> Vec<Extent> {
    let mut ranges = Vec::new();
    loop {
        let answer = ask(reader, &Ask::Map { from });
        assert_eq!(answer.status(), Status::Ok);
        let page: MapPage = serde_json::from_slice(&answer.payload).unwrap();
        assert!(page.ranges.len() <= MapPage::RANGES_MAX);
        ranges.extend(page.ranges);
        match page.next {
            Some(next) => from = next,
            None => return ranges,
        }
    }
}

/// Nothing that differs is missing; and nothing is told that nobody touched.
fn check(ranges: &[Extent], old: &[u8], new: &[u8], touched: &[(u64, u64)]) {
    assert!(ranges.windows(2).all(|two| two[0].end() < two[1].offset), "{ranges:?}");
    let block = usize::try_from(BLOCK).unwrap();
    for (n, (was, is)) in (0..).zip(old.chunks(block).zip(new.chunks(block))) {
        let at = n * BLOCK;
        let told = ranges.iter().any(|r| r.offset <= at && at < r.end());
        let is_touched = touched.iter().any(|(first, count)| (*first..first + count).contains(&n));
        assert!(told || was == is, "block {n} differs and is not told");
        assert!(!told || is_touched, "block {n} is told and was not touched");
    }
}

#[test]
fn whether_an_engine_is_there_is_told_to_whoever_may_read() {
    for place in places() {
        let server = Server::start(place.path());
        let engine = session(&server.socket, 1, 1);
        let mut r = reader(&server.socket).unwrap();
        let mut has_engine = |wanted: bool| {
            let until = Instant::now() + Duration::from_secs(20);
            loop {
                let answer = ask(&mut r, &Ask::Look);
                assert_eq!(answer.status(), Status::Ok);
                if serde_json::from_slice::<Looked>(&answer.payload).unwrap().engine == wanted {
                    return;
                }
                assert!(Instant::now() < until, "an engine is said to be there: {}", !wanted);
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        has_engine(true);
        drop(engine);
        has_engine(false);
        let _next = session(&server.socket, 2, 2);
        has_engine(true);
    }
}

#[test]
fn a_map_has_every_block_that_differs() {
    for place in places() {
        let server = Server::start(place.path());
        let mut engine = Engine::new(session(&server.socket, 1, 1));
        let zeroes = engine.bytes.clone();
        engine.write(3, 5);
        engine.write(700, 1);
        let one = engine.snapshot("one");
        let mut r = reader(&server.socket).unwrap();
        let refused = open(&mut r, "one", None).unwrap_err();
        assert!(refused.contains("stable storage"), "{refused}");
        assert!(open(&mut r, "none", None).is_err());
        assert_eq!(ask(&mut r, &Ask::Map { from: 0 }).status(), Status::Refused, "nothing is open");
        engine.settle("one");
        engine.write(6, 4);
        engine.unmap(700, 1);
        let two = engine.snapshot("two");
        engine.settle("two");
        // What comes after is in neither.
        engine.write(0, 2);
        engine.unmap(3, 3);

        assert_eq!(open(&mut r, "one", None), Ok(Opened { size: SIZE }));
        check(&map(&mut r, 0), &zeroes, &one, &[(3, 5), (700, 1)]);
        open(&mut r, "two", Some("one")).unwrap();
        let delta = map(&mut r, 0);
        check(&delta, &one, &two, &[(6, 4), (700, 1)]);
        assert_eq!(map(&mut r, 8 * BLOCK)[0], Extent::new(8 * BLOCK, 2 * BLOCK), "on from a place");
        let read = ask(&mut r, &Ask::Read { offset: 0, length: MIB });
        assert_eq!(read.status(), Status::Ok);
        assert!(read.payload == two[..MIB as usize], "other bytes than the snapshot's");
        // The engine was fenced by nobody, and its volume goes on.
        engine.write(9, 1);
        assert_eq!(engine.c.read(9 * BLOCK, 4096), engine.bytes[9 * 4096..10 * 4096]);
    }
}

#[test]
fn a_map_of_more_ranges_than_a_message_holds_comes_in_pages() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut engine = Engine::new(session(&server.socket, 1, 1));
    let zeroes = engine.bytes.clone();
    let every_other: Vec<(u64, u64)> = (0..SIZE / BLOCK / 2).map(|n| (n * 2, 1)).collect();
    every_other.iter().for_each(|(block, _)| engine.write(*block, 1));
    let one = engine.snapshot("one");
    engine.settle("one");
    let mut r = reader(&server.socket).unwrap();
    open(&mut r, "one", None).unwrap();
    let ranges = map(&mut r, 0);
    assert_eq!(ranges.len(), every_other.len());
    check(&ranges, &zeroes, &one, &every_other);
}

#[test]
fn what_may_change_and_who_may_not_know_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut engine = Engine::with_a_snapshot(&server);
    let mut r = reader(&server.socket).unwrap();
    open(&mut r, "one", None).unwrap();
    engine.carry_out(ChainOp::MarkRemoved { name: "one".into() });
    let read = ask(&mut r, &Ask::Read { offset: 0, length: 4096 });
    assert_eq!(read.status(), Status::Refused, "it may be folded any time");
    assert!(open(&mut r, "one", None).unwrap_err().contains("being removed"));
    // A reader is no engine.
    let write = r.header(OpCode::Write, 0, 4096);
    assert_eq!(r.ask(write, &[7; 4096]).status(), Status::Refused);
    assert_ne!(engine.c.read(0, 4096), [7; 4096]);

    assert_eq!(reader_with(&server.socket, [9; 32]).err(), Some(Verdict::BadKey));
    let others: Vec<_> = (0..3).map(|_| reader(&server.socket).unwrap()).collect();
    assert_eq!(reader(&server.socket).err(), Some(Verdict::Unusable), "so many at once");
    drop(others);
    let began = Instant::now();
    while reader(&server.socket).is_err() {
        assert!(began.elapsed() < PATIENCE, "those who have gone make no room");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn whoever_may_know_where_does_not_learn_what() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let _engine = Engine::with_a_snapshot(&server);
    let mut r = reader_with(&server.socket, MAP_KEY).unwrap();
    open(&mut r, "one", None).unwrap();
    assert_eq!(map(&mut r, 0), [Extent::new(BLOCK, BLOCK)]);
    let read = ask(&mut r, &Ask::Read { offset: 0, length: 4096 });
    assert_eq!((read.status(), read.payload.len() < 4096), (Status::Refused, true));
    // It makes no engine of anybody.
    let mut engine = who(2, 2);
    engine.key = MAP_KEY;
    assert_eq!(knock(&server.socket, &engine).err(), Some(Verdict::BadKey));
}

/// What the reader had was folded away, and its file may hold what stood on it.
#[test]
fn another_snapshot_of_the_same_name_is_another_one() {
    let place = places().remove(0);
    let server = Server::start(place.path());
    let mut engine = Engine::with_a_snapshot(&server);
    let mut r = reader(&server.socket).unwrap();
    open(&mut r, "one", None).unwrap();
    let read = Ask::Read { offset: 0, length: 8192 };
    assert_eq!(ask(&mut r, &read).payload, engine.bytes[..8192]);
    engine.write(1, 1);
    engine.carry_out(ChainOp::MarkRemoved { name: "one".into() });
    let fold = Control::Fold { name: "one".into(), bytes_per_second: None };
    assert_eq!(engine.c.control(&fold).status(), Status::Ok);
    let began = Instant::now();
    while engine.c.state().chain.len() > 1 {
        assert!(began.elapsed() < PATIENCE, "it is folded for ever");
        std::thread::sleep(Duration::from_millis(2));
    }
    engine.carry_out(ChainOp::Snapshot {
        name: "one".into(),
        user_created: true,
        created: "2026-01-02T00:00:00Z".into(),
        labels: Default::default(),
    });
    engine.settle("one");
    let answer = ask(&mut r, &read);
    assert_eq!(answer.status(), Status::Refused, "{}", String::from_utf8_lossy(&answer.payload));
    open(&mut r, "one", None).unwrap();
    assert_eq!(ask(&mut r, &read).payload, engine.bytes[..8192]);
}
