//! Folds, reverts and expansions of a served replica, with a client that goes on reading and writing.

mod serve_client;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;

use lh_block::Instance;
use lh_wire::{ChainOp, Control, FoldState, OpCode, ReplicaState, Status};
use replica::store::SnapshotView;
use serve_client::{Client, MIB, SIZE, Server, pattern, places, session};

const CREATED: &str = "2026-01-01T00:00:00Z";

struct World {
    c: Client<UnixStream>,
    /// What the volume reads as.
    bytes: Vec<u8>,
    operations: u128,
    seed: u64,
}

impl World {
    fn new(c: Client<UnixStream>) -> Self {
        Self { c, bytes: vec![0; usize::try_from(SIZE).unwrap()], operations: 0, seed: 1 }
    }

    fn carry_out(&mut self, op: ChainOp) -> Status {
        self.operations += 1;
        let id = Instance(self.operations);
        match self.c.control(&Control::Prepare { id, op }).status() {
            Status::Ok => self.c.control(&Control::Commit { id }).status(),
            refused => refused,
        }
    }

    fn snapshot(&mut self, name: &str) {
        let (name, created) = (name.to_owned(), CREATED.to_owned());
        let op = ChainOp::Snapshot { name, user_created: true, created, labels: Default::default() };
        assert_eq!(self.carry_out(op), Status::Ok);
    }

    fn remove(&mut self, name: &str) {
        assert_eq!(self.carry_out(ChainOp::MarkRemoved { name: name.to_owned() }), Status::Ok);
    }

    fn write(&mut self, offset: u64, len: u32) {
        self.seed += 1;
        let data = pattern(self.seed, len as usize);
        assert_eq!(self.c.write(offset, &data), Status::Ok);
        let at = usize::try_from(offset).unwrap();
        self.bytes[at..at + data.len()].copy_from_slice(&data);
    }

    fn zero(&mut self, offset: u64, len: u32) {
        assert_eq!(self.c.op(OpCode::Unmap, offset, len).status(), Status::Ok);
        let at = usize::try_from(offset).unwrap();
        self.bytes[at..at + len as usize].fill(0);
    }

    fn fold(&mut self, name: &str, bytes_per_second: Option<u64>) -> (Status, String) {
        let answer = self.c.control(&Control::Fold { name: name.to_owned(), bytes_per_second });
        (answer.status(), String::from_utf8(answer.payload).unwrap())
    }

    /// Writes each of these blocks once, many at a time, while a snapshot is folded away.
    fn write_at_once(&mut self, first: u32, blocks: u32, fold: &str) {
        const AT_ONCE: u32 = 128;
        self.seed += 1;
        let data = pattern(self.seed, blocks as usize * 4096);
        assert_eq!(self.fold(fold, None).0, Status::Ok);
        let answers = |c: &mut Client<UnixStream>| {
            (0..AT_ONCE).for_each(|_| assert_eq!(c.receive().status(), Status::Ok));
        };
        for n in 0..blocks / AT_ONCE {
            let mut batch = Vec::new();
            for block in n * AT_ONCE..(n + 1) * AT_ONCE {
                let at = block * 4099 % blocks * 4096;
                let header = self.c.header(OpCode::Write, u64::from(first + at), 4096);
                batch.extend(self.c.encode(header, &data[at as usize..][..4096]));
            }
            self.c.stream.write_all(&batch).unwrap();
            // The next ones are there before these have ended.
            if n > 0 {
                answers(&mut self.c);
            }
        }
        answers(&mut self.c);
        self.bytes[first as usize..][..data.len()].copy_from_slice(&data);
    }

    fn names(&mut self) -> Vec<String> {
        self.c.state().chain.into_iter().map(|l| l.name).collect()
    }

    /// Asks until it is so; a fold has no event for its client.
    fn until(&mut self, what: impl Fn(&ReplicaState) -> bool) -> ReplicaState {
        let began = std::time::Instant::now();
        loop {
            let state = self.c.state();
            if what(&state) {
                return state;
            }
            assert!(began.elapsed().as_secs() < 60, "{state:?}");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    fn check(&mut self) {
        for at in (0..SIZE).step_by(MIB as usize) {
            let from = usize::try_from(at).unwrap();
            let same = self.c.read(at, MIB) == self.bytes[from..from + MIB as usize];
            assert!(same, "the MiB at {at} reads otherwise");
        }
    }

    /// A little of everything, in small pieces that meet those of a fold.
    fn change(&mut self, n: u64) {
        let place = (n * 7919 % 4000) * 4096;
        self.write(place, 8192);
        let place = (n * 104_729 % 4000) * 4096;
        if n.is_multiple_of(3) {
            self.zero(place, 12288)
        } else {
            self.write(place, 4096)
        }
        let at = usize::try_from(place).unwrap();
        assert!(self.c.read(place, 4096) == self.bytes[at..at + 4096], "{place}");
    }
}

fn view(place: &Path, snapshot: &str) -> Vec<u8> {
    let view = SnapshotView::open_beside(&place.join("replica"), snapshot).unwrap();
    let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
    view.read_at(0, &mut bytes).unwrap();
    bytes
}

/// one <- two <- three <- head over 16 MiB, all but two removed.
fn layered(place: &Path, c: Client<UnixStream>) -> (World, Vec<u8>) {
    let mut w = World::new(c);
    (0..16).for_each(|n| w.write(n * u64::from(MIB), MIB));
    w.snapshot("one");
    (0..50).for_each(|n| w.write(n * 40960, 4096));
    w.zero(0x50000, 0x10000);
    w.snapshot("two");
    let two = w.bytes.clone();
    (0..300).for_each(|n| w.write(n * 49152, 8192));
    w.zero(0x200000, 0x40000);
    w.snapshot("three");
    (0..30).for_each(|n| w.write(n * 200_704, 4096));
    w.remove("one");
    w.remove("three");
    assert!(view(place, "two") == two);
    (w, two)
}

#[test]
fn folds_beside_a_client() {
    for place in places() {
        let server = Server::start(place.path());
        let (mut w, two) = layered(place.path(), session(&server.socket, 1, 1));
        assert_eq!(w.fold("three", None).0, Status::Ok);
        let mut n = 0;
        while w.names().contains(&"three".to_owned()) {
            (0..20).for_each(|_| {
                n += 1;
                w.change(n);
            });
        }
        // Its names have gone before it is over.
        w.until(|s| s.fold.is_none());
        assert_eq!(w.fold("one", None).0, Status::Ok);
        w.until(|s| s.chain.len() == 2);
        assert_eq!(w.names(), ["two", ""]);
        w.check();
        assert!(view(place.path(), "two") == two, "a live snapshot has changed");
        // What the memory says is what the files say.
        let World { bytes, .. } = w;
        server.stop();
        let server = Server::start(place.path());
        let mut w = World { bytes, ..World::new(session(&server.socket, 2, 2)) };
        w.check();
        assert!(view(place.path(), "two") == two);
    }
}

/// Many writes are on their way at any moment, while snapshots go into the head: no copy begins beside a write of its range, or
/// overtakes it.
#[test]
fn folds_into_the_head_beside_many_writes() {
    // On a disk, where a write takes its time.
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut world = World::new(session(&server.socket, 1, 1));
    let half = 8 * MIB;
    for round in 0..5 {
        let name = format!("s{round}");
        (0..2 * half).step_by(MIB as usize).for_each(|at| world.write(at.into(), MIB));
        world.snapshot(&name);
        // So much that the snapshot goes into the head.
        (0..half).step_by(MIB as usize).for_each(|at| world.write(at.into(), MIB));
        world.remove(&name);
        world.write_at_once(half, half / 4096, &name);
        world.until(|state| state.fold.is_none() && state.chain.len() == 1);
        world.check();
    }
}

#[test]
fn a_slow_fold_is_told_of_stopped_and_begun_again() {
    // With a little in the head that goes into the snapshot; with a MiB more it is the other way about.
    for more in [0, MIB] {
        slowly(more);
    }
}

fn slowly(more: u32) {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let (mut w, two) = layered(place.path(), session(&server.socket, 1, 1));
    let (status, why) = w.fold("two", None);
    assert_eq!(status, Status::Refused);
    assert!(why.contains("not marked as removed"), "{why}");
    assert!(w.fold("none", None).1.contains("no snapshot"));
    (0..more).step_by(65536).for_each(|n| w.write(u64::from(n) * 16, 65536));
    // One byte in a second: it stays after the first piece.
    assert_eq!(w.fold("three", Some(1)).0, Status::Ok);
    let state = w.until(|s| s.fold.as_ref().is_some_and(|f| f.done > 0));
    let FoldState { name, done, total, error } = state.fold.unwrap();
    assert_eq!((name.as_str(), error), ("three", None));
    let into_head = total > 1 << 20;
    assert!(done <= total && into_head == (more > 0), "{done} of {total}");
    assert!(w.fold("one", None).1.contains("one at a time"));
    w.change(1);
    // A snapshot in the middle: what was the head is one now.
    w.snapshot("four");
    w.change(2);
    assert_eq!(w.c.control(&Control::FoldStop).status(), Status::Ok);
    let state = w.until(|s| s.fold.as_ref().is_some_and(|f| f.error.is_some()));
    assert!(state.chain.iter().any(|l| l.name == "three"));
    w.check();
    assert_eq!(w.fold("three", None).0, Status::Ok);
    w.until(|s| s.chain.iter().all(|l| l.name != "three"));
    assert_eq!(w.names(), ["one", "two", "four", ""]);
    w.check();
    assert!(view(place.path(), "two") == two);
}

#[test]
fn a_close_ends_a_fold_and_a_new_process_goes_on_with_it() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let (mut w, two) = layered(place.path(), session(&server.socket, 1, 1));
    assert_eq!(w.fold("three", Some(1)).0, Status::Ok);
    assert_eq!(w.c.control(&Control::Close).status(), Status::Ok);
    let World { bytes, .. } = w;
    server.stop();
    let server = Server::start(place.path());
    let mut w = World { bytes, ..World::new(session(&server.socket, 2, 2)) };
    assert!(w.c.state().clean && !w.c.state().imported);
    w.check();
    assert_eq!(w.fold("three", None).0, Status::Ok);
    w.until(|s| s.chain.iter().all(|l| l.name != "three"));
    w.check();
    assert!(view(place.path(), "two") == two);
}

#[test]
fn a_revert_drops_what_came_after() {
    for place in places() {
        let server = Server::start(place.path());
        let (mut w, two) = layered(place.path(), session(&server.socket, 1, 1));
        w.operations = 100;
        // A fold into the head is ended by it.
        assert_eq!(w.fold("three", Some(1)).0, Status::Ok);
        assert_eq!(w.c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
        let removed = ChainOp::Revert { name: "one".into(), created: CREATED.into() };
        assert_eq!(w.carry_out(removed), Status::Refused);
        w.operations = 200;
        assert_eq!(w.carry_out(ChainOp::Revert { name: "two".into(), created: CREATED.into() }), Status::Ok);
        w.bytes.clone_from(&two);
        w.check();
        w.write(0, MIB);
        w.zero(4096, 4096);
        w.check();
        // What is left of the branch is a snapshot that nothing stands on.
        assert_eq!(w.fold("three", None).0, Status::Ok);
        w.until(|s| s.chain.len() == 3);
        assert_eq!(w.names(), ["one", "two", ""]);
        w.check();
        let World { bytes, .. } = w;
        server.stop();
        let server = Server::start(place.path());
        let mut w = World { bytes, ..World::new(session(&server.socket, 2, 2)) };
        w.check();
        assert!(view(place.path(), "two") == two);
    }
}

#[test]
fn an_expansion_gives_room_at_the_end() {
    for place in places() {
        let server = Server::start(place.path());
        let mut w = World::new(session(&server.socket, 1, 1));
        w.write(SIZE - 8192, 8192);
        let larger = SIZE + (16 << 20);
        assert_eq!(w.c.op(OpCode::Read, SIZE, 4096).status(), Status::Invalid);
        let named =
            |name: &str, size| ChainOp::Expand { name: Some(name.into()), size, created: CREATED.into() };
        let expand = |size| named("expand-v", size);
        for wrong in [SIZE, SIZE - 4096, SIZE + 1, 1 << 60] {
            assert_eq!(w.carry_out(expand(wrong)), Status::Refused, "{wrong}");
        }
        assert_eq!(w.carry_out(named("../v", larger)), Status::Refused);
        w.operations = 100;
        assert_eq!(w.carry_out(expand(larger)), Status::Ok);
        let state = w.c.state();
        assert_eq!(state.size, larger);
        assert_eq!(w.names(), ["expand-v", ""]);
        assert_eq!(state.chain[0].labels["replica-expansion"], larger.to_string());
        assert!(!state.chain[0].user_created && state.chain[0].length == SIZE);
        assert_eq!(w.c.read(SIZE - 4096, 8192)[4096..], [0; 4096]);
        let data = pattern(99, 8192);
        assert_eq!(w.c.write(larger - 8192, &data), Status::Ok);
        assert_eq!(w.c.write(SIZE - 4096, &data), Status::Ok);
        assert_eq!(w.c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
        server.stop();
        let server = Server::start(place.path());
        let mut w = World::new(session(&server.socket, 2, 2));
        assert_eq!(w.c.state().size, larger);
        assert!(w.c.read(larger - 8192, 8192) == data && w.c.read(SIZE - 4096, 8192) == data);
        // Only what was written is in doubt after the process has ended unclosed.
        let marked: u64 = w.c.state().intent.iter().map(|e| e.len).sum();
        assert!(marked <= 4 * (4 << 20), "{marked}");
    }
}

/// What has begun before may still read what was folded away since. Behind the last of that a revert numbers the layers anew: until
/// then all that is gone was let go of, not only the first of it.
#[test]
fn all_that_was_folded_away_is_let_go_of_before_a_revert_numbers_the_layers_anew() {
    const SNAPSHOTS: u64 = 24;
    // Of these reads a few are answered, and wait to be taken; the others wait for the memory.
    const READS: u32 = 12;
    let places = places();
    let server = Server::start(places.last().unwrap().path());
    let queue = |queue| {
        let mut who = serve_client::who(1, 1);
        (who.hello.queue, who.hello.queues) = (queue, 2);
        serve_client::knock(&server.socket, &who).unwrap()
    };
    let (c, mut slow) = (queue(0), queue(1));
    let mut w = World::new(c);
    w.write(0, MIB);
    w.snapshot("base");
    let base = w.bytes.clone();
    for n in 0..SNAPSHOTS {
        w.write(u64::from(MIB) + n * 4096, 4096);
        w.snapshot(&format!("s{n}"));
    }
    server.status.set_memory_short(true);
    for _ in 0..READS {
        let read = slow.header(OpCode::Read, 0, MIB);
        slow.send(read, &[]);
    }
    let began = std::time::Instant::now();
    for n in 0..SNAPSHOTS {
        let name = format!("s{n}");
        w.remove(&name);
        assert_eq!(w.fold(&name, None).0, Status::Ok);
        w.until(|s| s.fold.is_none() && s.chain.iter().all(|l| l.name != name));
    }
    assert!(began.elapsed().as_secs() < 25, "a connection that takes no answer is closed");
    let (id, op) = (Instance(1000), ChainOp::Revert { name: "base".into(), created: CREATED.into() });
    assert_eq!(w.c.control(&Control::Prepare { id, op }).status(), Status::Ok);
    let data = w.bytes[..MIB as usize].to_vec();
    for _ in 0..READS {
        assert!(slow.receive().payload == data);
    }
    assert_eq!(w.c.control(&Control::Commit { id }).status(), Status::Ok);
    w.bytes = base;
    w.check();
    w.snapshot("next");
    w.write(0, MIB);
    w.check();
}
