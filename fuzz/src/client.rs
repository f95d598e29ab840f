//! A server of the NBD client: its greeting and its answer to the client's option, then its replies, on a connection that
//! the client believes in until it is shown otherwise.
//!
//! Input: one byte of circumstances, then the server's bytes. The client asks for what is in [`script`].
//!
//! | bits | meaning |
//! |---|---|
//! | 0, 1 | 0: reply by reply; 1: all bytes at once; 2: in pieces that end anywhere; 3: reply by reply, the last byte of each by itself |
//! | 2 | there is no handshake in the stream |
//! | 3 | the replies come again, as they are, on the next connection |
//! | 4 | nobody serves the client afterwards, and its device is given up; else an honest server answers what is left |
//!
//! What the bytes mean is decided a second time here, from the protocol's document alone; the client has to come to the same
//! requests ended, in the same order, with the same bytes, and to give the connection up where the protocol is broken and
//! nowhere else. At the end every request has been answered once.

mod peer;
pub mod script;
mod served;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use lh_block::{Device, Done, Extent, IoError, Op};
use lh_rig::Driven;
use lh_ring::{Mailbox, Payload, Pool, QueueDevice, Ring};
use nbd_frontend::client::{Client, Mail, Parts};

use peer::{Ended, Peer};
use script::GEOMETRY;

/// Memory of a client whose longest request has 2 KiB, in bytes: what is received in one go, and the writes.
const MEMORY_MAX: usize = 1 << 20;

/// Turns of the loop after which a client that has been sent nothing new is busy for nothing.
const TURNS_MAX: u32 = 100;

thread_local! {
    /// Made once: each costs more than a session.
    static LOOP: RefCell<(Ring, Pool)> =
        RefCell::new((Ring::new(64).expect("io_uring"), Pool::new(1 << 20, 16 << 20).expect("memory")));
}

/// A request that is not answered.
struct Waiting {
    op: Op,
    range: Extent,
    /// Bytes whose pieces are answered.
    done: u64,
}

/// A client on its thread, and what it was asked for.
struct World<'a> {
    driven: Driven<Client, &'a mut Ring>,
    mailbox: Mailbox<Mail>,
    wishes: Receiver<()>,
    waiting: BTreeMap<u64, Waiting>,
    batch: usize,
}

impl<'a> World<'a> {
    fn new(ring: &'a mut Ring, pool: &'a Pool) -> Self {
        let (parts, mailbox, wishes) = Parts::new(GEOMETRY).expect("an eventfd");
        let driven = Driven::on(ring, Client::new(parts, pool));
        wishes.try_recv().expect("it wishes for its first connection");
        Self { driven, mailbox, wishes, waiting: BTreeMap::new(), batch: 0 }
    }

    /// Asks for the next batch if nothing is left of the last one.
    fn ask(&mut self) {
        if !self.waiting.is_empty() {
            return;
        }
        for request in script::batch(self.batch, self.driven.device.pool()) {
            let waiting = Waiting { op: request.op, range: request.range, done: 0 };
            self.waiting.insert(request.tag, waiting);
            self.driven.device.submit(request);
        }
        self.batch += 1;
    }

    /// Turns until nothing happens any more.
    fn settle(&mut self, peer: Option<&mut Peer>) {
        for _ in 0..TURNS_MAX {
            let still = self.driven.turn(Duration::ZERO) == 0;
            let used = self.driven.device.pool().used_bytes();
            assert!(used <= MEMORY_MAX, "{used} bytes of memory");
            if still {
                if let Some(peer) = peer {
                    peer.hear(&self.waiting);
                }
                return;
            }
        }
        panic!("the loop does not come to rest");
    }

    fn connect(&mut self) -> Peer {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        self.mailbox.put(Mail::Link(ours.into()));
        let mut peer = Peer::new(theirs);
        self.ask();
        self.settle(Some(&mut peer));
        assert!(self.driven.answers.is_empty());
        peer
    }

    /// Compares the client's answers with what the bytes meant.
    fn compare(&mut self, ended: Vec<Ended>) {
        let answers = std::mem::take(&mut self.driven.answers);
        let tags = |answers: &[Done<Payload>]| answers.iter().map(|done| done.tag).collect::<Vec<_>>();
        assert_eq!(tags(&answers), ended.iter().map(|ended| ended.tag).collect::<Vec<_>>());
        for (done, ended) in answers.into_iter().zip(ended) {
            assert_eq!(done.result, ended.result, "request {}", done.tag);
            let data = done.data.map(|data| data.to_vec()).unwrap_or_default();
            assert!(data == ended.data, "other bytes for request {}", done.tag);
            self.waiting.remove(&done.tag).expect("answered once");
        }
    }

    /// Sends bytes to the client; false if they end the connection.
    fn deliver(&mut self, peer: &mut Peer, bytes: &[u8]) -> bool {
        let (ended, broken) = peer.meaning(bytes, &mut self.waiting);
        peer.send(bytes);
        self.settle(Some(peer));
        self.compare(ended);
        assert_eq!(broken, peer.is_shut(), "whether the connection is given up");
        assert_eq!(broken, self.wishes.try_recv().is_ok(), "whether it wishes for another one");
        if !broken {
            self.ask();
            self.settle(Some(peer));
        }
        !broken
    }

    /// A connection whose server sends this and goes.
    fn hostile(&mut self, stream: &[u8], manner: u8) {
        let mut peer = self.connect();
        let mut rest = stream;
        let mut count = 0;
        while !rest.is_empty() {
            let len = match manner {
                0 => peer.next_reply(rest),
                1 => rest.len(),
                2 => [1, 15, 17, 7, 509, 3, 2000][count % 7],
                _ if count % 2 == 0 => (peer.next_reply(rest) - 1).max(1),
                _ => 1,
            };
            count += 1;
            let (now, later) = rest.split_at(len.min(rest.len()));
            rest = later;
            if !self.deliver(&mut peer, now) {
                return;
            }
        }
        drop(peer);
        self.settle(None);
        assert!(self.driven.answers.is_empty(), "an end is no answer");
        self.wishes.try_recv().expect("it wishes for a connection that does not end");
    }

    /// A connection on which every request is answered.
    fn honest(&mut self) {
        let mut peer = self.connect();
        while !self.waiting.is_empty() {
            let replies = peer.replies();
            assert!(!replies.is_empty(), "{} requests wait, and none is sent", self.waiting.len());
            assert!(self.deliver(&mut peer, &replies), "a connection of an honest server is given up");
        }
    }

    fn give_up(&mut self) {
        self.mailbox.put(Mail::LetGo(Some(Instant::now())));
        self.settle(None);
        let left = self.waiting.keys();
        let ended = left.map(|tag| Ended { tag: *tag, result: Err(IoError::ShuttingDown), data: Vec::new() });
        self.compare(ended.collect());
        assert!(self.waiting.is_empty());
    }

    /// Everything is given back.
    fn end(self) {
        let Driven { ring, device, .. } = self.driven;
        let pool = device.pool().clone();
        drop(device);
        for _ in 0..TURNS_MAX {
            if ring.in_flight() == 0 {
                break;
            }
            ring.turn(Some(Duration::from_millis(10))).expect("a turn");
            while ring.next().is_some() {}
        }
        assert_eq!((ring.in_flight(), pool.used_bytes()), (0, 0), "operations and bytes left");
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let Some((circumstances, mut stream)) = input.split_first() else { return };
    if circumstances & 4 == 0 {
        let Some(later) = served::greet(stream) else { return };
        stream = later;
    }
    LOOP.with_borrow_mut(|(ring, pool)| {
        let mut world = World::new(ring, pool);
        world.hostile(stream, circumstances & 3);
        if circumstances & 8 != 0 {
            world.hostile(stream, circumstances & 3);
        }
        if circumstances & 16 != 0 {
            world.give_up()
        } else {
            world.honest()
        }
        world.end();
    });
}
