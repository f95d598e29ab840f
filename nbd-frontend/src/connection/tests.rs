use std::os::unix::net::UnixStream;

use lh_ring::{Answers, ConnectionCount, MemoryDisk, Pool};
use zerocopy::IntoBytes;

use super::*;
use crate::export::Agreed;
use crate::proto::{REQUEST_MAGIC, Request as Raw, command};

const OWN: Claimant = (1, 1);
const OTHER: Claimant = (2, 1);

/// A connection without a ring: what is received is fed, and what is sent stays in its queue.
struct Alone {
    pool: Pool,
    disk: MemoryDisk,
    requests: Requests,
    budget: Budget,
    connection: Connection,
    _peer: UnixStream,
}

impl Alone {
    fn new(budget: usize) -> Self {
        let pool = Pool::new(1 << 20, 4 << 20).unwrap();
        let geometry = Geometry {
            size: 1 << 20,
            logical_block: 512,
            physical_block: 4096,
            max_transfer: 1 << 20,
            depth: 8,
        };
        let (ours, peer) = UnixStream::pair().unwrap();
        let session = Session { agreed: Agreed::default(), read_only: false };
        let connection =
            Connection::new((Fd::new(ours), ConnectionCount::default().add()), session, OWN, &pool);
        let disk = MemoryDisk::new(&pool, geometry);
        Self {
            pool,
            disk,
            requests: Requests::default(),
            budget: Budget::new(budget),
            connection,
            _peer: peer,
        }
    }

    fn ask(&mut self, kind: u16, length: u32) {
        let raw = Raw {
            magic: REQUEST_MAGIC.into(),
            flags: 0.into(),
            kind: kind.into(),
            cookie: 7.into(),
            offset: 0.into(),
            length: length.into(),
        };
        assert!(self.connection.rx.feed(raw.as_bytes()));
    }

    fn serve(&mut self) -> Served {
        let mut work = Work {
            device: &mut self.disk,
            requests: &mut self.requests,
            budget: &mut self.budget,
            share: 1 << 20,
        };
        self.connection.serve(&mut work)
    }

    /// What a read of 4096 bytes is told when the device gives this: error and bytes behind it.
    fn told(&mut self, data: Option<Payload>) -> (u32, usize) {
        let mut call = [0; REQUEST_MAX];
        self.ask(command::READ, 4096);
        let len = self.connection.session.request_len();
        assert!(self.connection.rx.peek_at(0, &mut call[..len]));
        assert!(matches!(self.serve(), Served::Bytes(_)));
        let mut done = self.disk.poll_done().unwrap();
        done.data = data;
        let request = self.requests.take(done.tag).unwrap();
        self.connection.finish(&request, done, &mut self.budget);
        let bytes = self.connection.tx.drain();
        self.connection.sent(&mut self.budget);
        assert_eq!((self.budget.used(), self.connection.total), (0, 0));
        (u32::from_be_bytes(bytes[4..8].try_into().unwrap()), bytes.len() - 16)
    }
}

/// A simple reply does not tell how many bytes follow: one too few or too many, and nothing behind it makes sense.
#[test]
fn a_device_that_gives_other_bytes_than_were_asked_for_has_failed() {
    let mut alone = Alone::new(1 << 20);
    for (len, expected) in [(4096, (0, 4096)), (4095, (error::EIO, 0)), (8192, (error::EIO, 0))] {
        let data = alone.pool.alloc(len, 512);
        assert_eq!(alone.told(data), expected, "{len} bytes");
    }
    assert_eq!(alone.told(None), (error::EIO, 0));
}

#[test]
fn who_takes_no_answers_keeps_nobody_from_memory() {
    let mut alone = Alone::new(4096);
    assert!(alone.budget.take(OTHER, 4096));
    alone.ask(command::READ, 4096);
    assert_eq!(alone.serve(), Served::Blocked);
    // Its turn comes first, but it does not take it: answers to what it had asked for before pile up.
    (0..=ANSWERS_MAX / 4096).for_each(|_| alone.connection.tx.push_header(&[0; 4096]));
    assert_eq!(alone.serve(), Served::Blocked);
    alone.budget.give_back(4096);
    assert!(alone.budget.take(OTHER, 512), "it waits for who does not read");
    alone.budget.give_back(512);
    alone.connection.tx.drain();
    assert!(matches!(alone.serve(), Served::Bytes(_)));
    assert_eq!(alone.budget.used(), 4096);
}

/// Who has shut its side, and whose goodbye is nowhere to be seen.
fn shut(budget: usize) -> Alone {
    let mut alone = Alone::new(budget);
    alone.connection.seen(true, ConnectionCount::default().census());
    alone
}

#[test]
fn so_many_changes_are_held_for_who_has_shut_its_side_and_no_more() {
    let mut alone = shut(1 << 20);
    for _ in 0..HELD_MAX {
        alone.ask(command::TRIM, 4096);
        assert!(matches!(alone.serve(), Served::Bytes(_)));
    }
    alone.ask(command::TRIM, 4096);
    assert_eq!(alone.serve(), Served::Close(Why::TooMuchHeld));
    assert_eq!(alone.disk.submitted(), 0);
}

/// Clients that hold memory until their stream ends would wait for each other.
#[test]
fn who_has_shut_its_side_and_wants_more_memory_than_there_is_is_closed() {
    let mut alone = shut(8192);
    for _ in 0..2 {
        alone.ask(command::WRITE, 4096);
        assert!(alone.connection.rx.feed(&[7; 4096]));
        assert!(matches!(alone.serve(), Served::Bytes(_)));
    }
    alone.ask(command::WRITE, 4096);
    assert_eq!(alone.serve(), Served::Close(Why::TooMuchHeld));
    assert_eq!(alone.disk.submitted(), 0);
}

/// Others have the device, and nothing of it is there yet.
#[test]
fn who_has_said_goodbye_is_waited_for_by_a_server_that_stops_until_all_is_read() {
    for refuse in [false, true] {
        let mut alone = Alone::new(1 << 20);
        alone.disk.set_answers(Answers::Held);
        for tag in 100..108 {
            alone.disk.submit(Request { tag, op: Op::Flush, range: Extent::default(), data: None });
        }
        alone.ask(command::TRIM, 4096);
        alone.ask(command::DISC, 0);
        alone.connection.seen(true, ConnectionCount::default().census());
        alone.connection.stop(refuse, &mut alone.budget);
        assert_eq!(alone.serve(), Served::Blocked);
        assert!(!alone.connection.is_idle());
        alone.disk.set_answers(Answers::AtOnce);
        while alone.disk.poll_done().is_some() {}
        assert_eq!(alone.serve(), Served::Blocked, "refused? {refuse}");
        let done = alone.disk.poll_done().expect("it is with the device");
        let request = alone.requests.take(done.tag).unwrap();
        alone.connection.finish(&request, done, &mut alone.budget);
        assert_eq!(alone.connection.tx.drain()[4..8], [0; 4]);
        assert_eq!(alone.serve(), Served::Close(Why::Done));
    }
}
