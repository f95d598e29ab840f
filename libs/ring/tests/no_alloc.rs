//! A steady load allocates nothing: the heap is not in the path of a request.

mod drive;

use std::time::Duration;

use drive::{pair, token};
use lh_rig::allocations::{self, Counting};
use lh_ring::{Bell, Completion, Fd, Pool, Ring, Rx, Tx};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK: u32 = 4096;
const MESSAGE: usize = 64 + BLOCK as usize;
const DEPTH: usize = 32;

/// One side of a connection: what it receives and what it sends.
struct Side {
    fd: Fd,
    rx: Rx,
    tx: Tx,
    slot: u16,
}

impl Side {
    fn start(&mut self, ring: &mut Ring) {
        ring.send(token(1, self.slot), &self.fd, &mut self.tx);
        if !self.rx.is_outstanding() {
            assert!(ring.recv(token(2, self.slot), &self.fd, &mut self.rx, 64 + BLOCK));
        }
    }
}

/// The server writes what it gets to a file, reads it back and answers with what it has read.
struct Server {
    side: Side,
    file: Fd,
    pool: Pool,
}

impl Server {
    fn received(&mut self, ring: &mut Ring) {
        while self.side.rx.available() >= MESSAGE {
            self.side.rx.skip(64);
            let payload = self.side.rx.take(BLOCK as usize);
            ring.writev(token(3, 0), &self.file, 0, &payload.slice(0, BLOCK as usize));
        }
    }

    fn written(&mut self, ring: &mut Ring) {
        let into = self.pool.alloc(BLOCK, 4096).expect("room");
        ring.readv(token(4, 0), &self.file, 0, into);
    }

    fn read(&mut self, c: Completion) {
        self.side.tx.push_header(&[2; 64]);
        self.side.tx.push_payload(c.payload.expect("given back"));
    }
}

#[test]
fn ten_thousand_round_trips_do_not_allocate() {
    let (near, far) = pair();
    let pool = Pool::new(4 << 20, 16 << 20).expect("pool");
    let mut ring = Ring::new(64).expect("io_uring");
    let bell = Bell::new().expect("eventfd");
    let file = Fd::new(tempfile::tempfile().expect("file"));
    let side = |fd, slot| Side { fd, rx: Rx::new(&pool, 4096), tx: Tx::new(&pool), slot };
    let mut client = side(near, 0);
    let mut server = Server { side: side(far, 1), file, pool: pool.clone() };
    let mut payload = pool.alloc(BLOCK, 4096).expect("room");
    payload.write_at(0, &drive::pattern(1, BLOCK as usize));
    let ask = |tx: &mut Tx| {
        tx.push_header(&[1; 64]);
        tx.push_payload(payload.clone());
    };
    (0..DEPTH).for_each(|_| ask(&mut client.tx));
    ring.wake_on(token(5, 0), &bell);
    ring.timeout(token(6, 0), Duration::from_millis(1));

    let (mut answers, mut rings, mut timers) = (0, 0, 0);
    let mut before = None;
    while answers < 12_000 {
        if answers >= 2000 && before.is_none() {
            allocations::count_this_thread(true);
            before = Some(allocations::so_far());
        }
        client.start(&mut ring);
        server.side.start(&mut ring);
        ring.turn(Some(Duration::from_secs(5))).expect("turn");
        while let Some(c) = ring.next() {
            assert!(c.result.is_ok(), "{c:?}");
            match (c.token.kind, c.token.slot) {
                (2, 1) => server.received(&mut ring),
                (3, _) => server.written(&mut ring),
                (4, _) => server.read(c),
                (2, _) => {
                    while client.rx.available() >= MESSAGE {
                        client.rx.skip(64);
                        let answer = client.rx.take(BLOCK as usize);
                        assert_eq!(answer.crc32c(), payload.crc32c());
                        answers += 1;
                        ask(&mut client.tx);
                        bell.ring();
                    }
                }
                (5, _) => rings += 1,
                (6, _) => {
                    timers += 1;
                    ring.timeout(token(6, 0), Duration::from_millis(1));
                }
                _ => {}
            }
        }
    }
    let after = allocations::so_far();
    assert_eq!(after - before.expect("warmed up"), 0, "allocations in {} round trips", answers - 2000);
    assert!(rings > 100 && timers > 3);
}
