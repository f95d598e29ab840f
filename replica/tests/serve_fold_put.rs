//! Layer images that meet a fold: what is put into one of its two layers is in the one that stays.

mod serve_client;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use lh_block::Instance;
use lh_wire::{BlockState, ChainOp, Control, Header, OpCode, Status};
use replica::store::{Direction, Directory, OpenOptions, SnapshotView};
use serve_client::{Client, MIB, Server, options, pattern, places, session};

const M: u64 = 1 << 20;

struct World {
    c: Client<UnixStream>,
    operations: u128,
}

impl World {
    fn new(server: &Server, n: u32) -> Self {
        Self { c: session(&server.socket, n, n.into()), operations: u128::from(n) * 100 }
    }

    fn write(&mut self, offset: u64, len: u32) {
        assert_eq!(self.c.write(offset, &pattern(offset + 1, len as usize)), Status::Ok);
    }

    fn carry_out(&mut self, op: ChainOp) {
        self.operations += 1;
        let id = Instance(self.operations);
        assert_eq!(self.c.control(&Control::Prepare { id, op }).status(), Status::Ok);
        assert_eq!(self.c.control(&Control::Commit { id }).status(), Status::Ok);
    }

    fn snapshot(&mut self, name: &str) {
        let (name, created) = (name.to_owned(), "2026-01-01T00:00:00Z".to_owned());
        self.carry_out(ChainOp::Snapshot { name, user_created: true, created, labels: Default::default() });
    }

    fn remove(&mut self, name: &str) {
        self.carry_out(ChainOp::MarkRemoved { name: name.to_owned() });
    }

    fn fold(&mut self, name: &str, bytes_per_second: Option<u64>) {
        let fold = Control::Fold { name: name.to_owned(), bytes_per_second };
        assert_eq!(self.c.control(&fold).status(), Status::Ok);
    }

    /// Makes a block of a layer so.
    fn put(&mut self, layer: &str, offset: u64, state: BlockState, data: &[u8]) {
        let header = self.c.header(OpCode::PutLayer, offset, 4096);
        let image = [data, &[state as u8], layer.as_bytes()].concat();
        let aux = u32::try_from(1 + layer.len()).unwrap();
        assert_eq!(self.c.ask(Header { aux, ..header }, &image).status(), Status::Ok);
    }

    /// Waits until the fold has found so many bytes to move, or has ended.
    fn until_found(&mut self, bytes: u64) {
        self.until(|fold| fold.is_none_or(|done| done >= bytes));
    }

    fn until_folded(&mut self) {
        self.until(|fold| fold.is_none());
        assert!(self.c.state().chain.iter().all(|l| l.name != "one"), "{:?}", self.c.state());
    }

    fn until(&mut self, what: impl Fn(Option<u64>) -> bool) {
        let began = Instant::now();
        loop {
            let state = self.c.state();
            if what(state.fold.as_ref().map(|fold| fold.done)) {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{state:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// What a block of the snapshot "two" reads as.
fn two(place: &Path, offset: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let view = SnapshotView::open_beside(&place.join("replica"), "two").unwrap();
    view.read_at(offset, &mut bytes).unwrap();
    bytes
}

/// 32 MiB in a removed snapshot, a MiB in the one above it.
fn small_child(w: &mut World) {
    (0..32).for_each(|n| w.write(n * M, MIB));
    w.snapshot("one");
    w.write(4 * M, MIB);
    w.snapshot("two");
    w.write(60 * M, 4096);
    w.remove("one");
}

#[test]
fn what_is_put_behind_a_fold_into_the_parent_stays() {
    for place in places() {
        let server = Server::start(place.path());
        let mut w = World::new(&server, 1);
        small_child(&mut w);
        // After the only MiB that is to be moved it waits for three seconds, or for the first image.
        w.fold("one", Some(M / 3));
        w.until_found(M);
        let (child, parent, over) = (pattern(101, 4096), pattern(102, 4096), pattern(103, 4096));
        w.put("two", 8 * M, BlockState::Data, &child);
        w.put("one", 12 * M, BlockState::Data, &parent);
        w.put("one", 4 * M, BlockState::Data, &parent);
        w.put("two", 4 * M + 4096, BlockState::Data, &over);
        w.put("two", 16 * M, BlockState::Zero, &[]);
        w.until_folded();
        let copied = pattern(4 * M + 1, 8192)[..4096].to_vec();
        let expected = [(8, &child), (12, &parent), (4, &copied), (16, &vec![0; 4096])];
        for (at, bytes) in expected {
            assert!(two(place.path(), at * M) == *bytes, "the block at {at} MiB");
            assert!(w.c.read(at * M, 4096) == *bytes, "the block at {at} MiB, through the head");
        }
        assert!(two(place.path(), 4 * M + 4096) == over);
        let after = pattern(4 * M + 1, MIB as usize)[8192..12288].to_vec();
        assert!(two(place.path(), 4 * M + 8192) == after);
    }
}

#[test]
fn what_is_put_before_a_fold_into_the_child_stays() {
    for place in places() {
        let server = Server::start(place.path());
        let mut w = World::new(&server, 1);
        // As many runs as one look finds, and then so much that it is moved in three pieces.
        (0..256).for_each(|n| w.write(n * 8192, 4096));
        (16..40).for_each(|n| w.write(n * M, MIB));
        w.snapshot("one");
        (2..16).chain(40..64).for_each(|n| w.write(n * M, MIB));
        w.snapshot("two");
        w.remove("one");
        w.fold("one", Some(6 * M));
        w.until_found(20 * M);
        let child = pattern(101, 4096);
        w.put("two", 39 * M, BlockState::Data, &child);
        w.put("two", 39 * M + 4096, BlockState::Zero, &[]);
        w.until_folded();
        for (at, bytes) in [(39 * M, &child), (39 * M + 4096, &vec![0; 4096])] {
            assert!(two(place.path(), at) == *bytes, "the block at {at}");
            assert!(w.c.read(at, 4096) == *bytes, "the block at {at}, through the head");
        }
    }
}

/// A fold was killed that had noted how far it was. What is put before that place is not in the parent: the next fold begins anew.
#[test]
fn what_is_put_after_a_fold_was_killed_is_folded_by_the_next() {
    for place in places() {
        let server = Server::start(place.path());
        let mut w = World::new(&server, 1);
        small_child(&mut w);
        drop(w);
        server.stop();
        let lock_wait = Duration::from_secs(10);
        let (mut directory, _) =
            Directory::open(&options(place.path()).directory, &OpenOptions { lock_wait }).unwrap();
        let plan = directory.begin_fold("one").unwrap();
        directory.choose_fold(&plan, Direction::IntoParent).unwrap();
        directory.save_fold(&plan, Direction::IntoParent, 3 * M).unwrap();
        drop(directory);
        let server = Server::start(place.path());
        let mut w = World::new(&server, 2);
        let put = pattern(101, 4096);
        w.put("two", 2 * M, BlockState::Data, &put);
        w.fold("one", None);
        w.until_folded();
        assert!(two(place.path(), 2 * M) == put);
        assert!(two(place.path(), 4 * M) == pattern(4 * M + 1, 4096));
    }
}
