//! A queue with replicas at its links' other ends, which answer as a test says.

use std::io::{Read, Write};
use std::time::Instant;

use lh_block::{BLOCK, IoError, Op};
use lh_ring::{Completion, Frontend, Overseer, run_queue};
use lh_wire::{HEADER_LEN, flags};

use super::*;
use crate::message::{Switch, SwitchId};

const B: MemberId = MemberId(1);

/// An open queue, and its two members' ends.
struct Two {
    queue: EngineQueue,
    news: Receiver<News>,
    far: [UnixStream; 2],
    got: [Vec<u8>; 2],
    ring: Ring,
}

impl Two {
    fn new(io_timeout_ns: u64) -> Self {
        let (mut queue, news) = queue_with(io_timeout_ns);
        let far = [A, B].map(|member| {
            let (near, far) = UnixStream::pair().unwrap();
            far.set_nonblocking(true).unwrap();
            queue.take(Mail::Link {
                member,
                socket: near.into(),
                checksums: false,
                lends: false,
                tells: false,
            });
            far
        });
        let switches = [
            Switch::Attach { member: A },
            Switch::Attach { member: B },
            Switch::Promote { member: A },
            Switch::Promote { member: B },
            Switch::Resume,
        ];
        for (n, switch) in (1..).zip(switches) {
            queue.take(Mail::Message(ToQueue::Switch(SwitchId(n), switch)));
        }
        Self { queue, news, far, got: Default::default(), ring: Ring::new(64).unwrap() }
    }

    fn turn(&mut self) {
        self.queue.begin_turn();
        self.queue.let_in();
        self.queue.end_turn(&mut self.ring);
        self.ring.turn(Some(Duration::from_millis(2))).unwrap();
        while let Some(completion) = self.ring.next() {
            self.queue.completion(completion);
        }
    }

    fn write(&mut self, tag: u64) {
        let mut data = self.queue.pool().alloc(4096, 4096).unwrap();
        data.fill_zero(0..4096);
        let range = Extent::new(tag * BLOCK, BLOCK);
        self.queue.submit(Request { tag, op: Op::Write { fua: false }, range, data: Some(data) });
    }

    /// What has come is answered so.
    fn answer(&mut self, how: impl Fn(&Header) -> (Status, Vec<u8>)) {
        for (far, got) in self.far.iter_mut().zip(&mut self.got) {
            let _ = far.read_to_end(got);
            while let Some(head) = got.first_chunk::<HEADER_LEN>() {
                let header = Header::decode(head).unwrap();
                let len = HEADER_LEN + usize::from(header.pad) + header.payload as usize;
                if got.len() < len {
                    break;
                }
                got.drain(..len);
                let (status, payload) = how(&header);
                let mut reply = header.response(status);
                (reply.payload, reply.pad) = (u32::try_from(payload.len()).unwrap(), 0);
                assert!(reply.has(flags::RESPONSE));
                far.write_all(&[&reply.encode()[..], &payload].concat()).unwrap();
            }
        }
    }

    fn submit_read(&mut self, blocks: u64) {
        let range = Extent::new(0, blocks * BLOCK);
        self.queue.submit(Request { tag: 1, op: Op::Read, range, data: None });
    }

    /// Nobody has all of what is read, and somebody each block.
    fn answer_by_block(&mut self) {
        self.answer(|header| match header.op {
            OpCode::Read if header.length > 4096 => (Status::Rotten, vec![]),
            OpCode::Read => (Status::Ok, vec![u8::try_from(header.offset >> 12).unwrap(); 4096]),
            _ => (Status::Ok, vec![]),
        });
    }

    fn read_to_end(&mut self) -> Done<Payload> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            assert!(Instant::now() < deadline, "no answer");
            self.turn();
            self.answer_by_block();
            if let Some(done) = self.queue.poll_done() {
                return done;
            }
        }
    }

    /// A read of so many blocks, which goes block by block.
    fn read_by_block(&mut self, blocks: u64) -> Done<Payload> {
        self.submit_read(blocks);
        self.read_to_end()
    }
}

/// The answers lie in as many places of the stream, and a payload in twelve at most.
#[test]
fn a_read_that_goes_block_by_block_is_put_together() {
    for blocks in [2, 12, 13, 40, 256] {
        let done = Two::new(0).read_by_block(blocks);
        assert_eq!(done.result, Ok(()), "{blocks} blocks");
        let bytes = done.data.unwrap().to_vec();
        let expected: Vec<_> = (0..blocks).flat_map(|b| [u8::try_from(b).unwrap(); 4096]).collect();
        assert!(bytes == expected, "{blocks} blocks");
    }
}

/// Every block can be read, and memory comes back.
#[test]
fn without_memory_to_put_it_together_a_read_begins_again() {
    let mut two = Two::new(0);
    let mut taken: Vec<_> = std::iter::from_fn(|| two.queue.pool().alloc(128 << 10, 4096)).collect();
    // Enough for what comes from the replicas, and not for what they send together.
    taken.truncate(taken.len() - 6);
    let room = two.queue.room();
    two.submit_read(256);
    let deadline = Instant::now() + Duration::from_secs(60);
    while two.queue.again.is_empty() {
        assert!(Instant::now() < deadline, "it has its memory");
        two.turn();
        two.answer_by_block();
        assert!(two.queue.poll_done().is_none());
    }
    assert_eq!(two.queue.room(), room - 1, "nobody else gets its slot");
    drop(taken);
    let done = two.read_to_end();
    assert_eq!((done.tag, done.result), (1, Ok(())));
    let bytes = done.data.unwrap().to_vec();
    assert!(bytes.chunks(4096).zip(0..=u8::MAX).all(|(block, n)| block.iter().all(|b| *b == n)));
    assert_eq!(two.queue.room(), room);
}

/// One that is read from needs more memory for its answers than others: it would be put out, and then the next.
#[test]
fn a_member_is_not_hung_for_want_of_memory_to_hear_it() {
    let mut two = Two::new(0);
    // Both are listened to, with a chunk each.
    two.turn();
    let taken: Vec<_> = std::iter::from_fn(|| two.queue.pool().alloc(128 << 10, 4096)).collect();
    two.submit_read(35);
    let hears = |two: &mut Two| {
        two.turn();
        two.answer(|header| match header.op {
            OpCode::Read => (Status::Ok, vec![7; usize::try_from(header.length).unwrap()]),
            _ => (Status::Ok, vec![]),
        });
    };
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(1800) {
        hears(&mut two);
        assert!(two.queue.poll_done().is_none(), "there was memory");
    }
    let failed = |news| matches!(news, News::Report(_, FromQueue::Failed(..)));
    assert!(!two.news.try_iter().any(failed));
    drop(taken);
    let deadline = Instant::now() + Duration::from_secs(60);
    let done = loop {
        hears(&mut two);
        assert!(Instant::now() < deadline, "no answer");
        if let Some(done) = two.queue.poll_done() {
            break done;
        }
    };
    assert_eq!((done.result, done.data.unwrap().to_vec()), (Ok(()), vec![7; 35 * 4096]));
}

/// What was sent to them holds its slot until they are back.
#[test]
fn after_the_timeout_there_is_room_for_what_fails_at_once() {
    const DEPTH: usize = 8;
    let mut two = Two::new(200_000_000);
    (0..8).for_each(|tag| two.write(tag));
    assert_eq!(two.queue.room(), 0);
    for far in &two.far {
        far.shutdown(std::net::Shutdown::Both).unwrap();
    }
    let mut failed = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    while failed.len() < 2 * DEPTH {
        assert!(Instant::now() < deadline, "{failed:?}");
        two.turn();
        failed.extend(std::iter::from_fn(|| two.queue.poll_done()).map(|done| (done.tag, done.result)));
        if failed.len() >= DEPTH && two.queue.room() > 0 {
            two.write(u64::try_from(failed.len()).unwrap());
        }
    }
    let expected: Vec<_> = (0..16).map(|tag| (tag, Err(IoError::TimedOut))).collect();
    assert_eq!(failed, expected);
}

/// A client that sends one request, and is gone when it is looked for.
#[derive(Default)]
struct Gone {
    is_sent: bool,
    done: Option<Done<Payload>>,
}

impl Frontend for Gone {
    fn completion(&mut self, _: &mut Ring, _: &mut dyn Device<Payload>, _: Completion) {}

    fn turn(&mut self, _: &mut Ring, device: &mut dyn Device<Payload>) {
        if !std::mem::replace(&mut self.is_sent, true) {
            let op = Op::WriteZeroes { fua: false, may_unmap: false, fast: false };
            device.submit(Request { tag: 7, op, range: Extent::new(0, BLOCK), data: None });
        }
        self.done = device.poll_done().or(self.done.take());
    }

    fn looks(&self) -> bool {
        true
    }

    fn look(&mut self, device: &mut dyn Device<Payload>) {
        device.abandon(7);
    }
}

/// Ends the loop when there is an answer, or has been none for so many turns.
struct Turns(u32);

impl Overseer<EngineQueue, Gone> for Turns {
    fn oversee(&mut self, _: &mut Ring, _: &mut EngineQueue, gone: &mut Gone) -> bool {
        self.0 -= 1;
        self.0 > 0 && gone.done.is_none()
    }
}

/// What it has sent again elsewhere, and anything newer, may be done by then.
#[test]
fn what_changes_data_is_not_sent_if_its_client_is_gone_when_it_has_its_range() {
    let mut two = Two::new(0);
    let mut gone = Gone::default();
    run_queue(&mut two.ring, &mut two.queue, &mut gone, &mut Turns(10)).unwrap();
    assert_eq!(gone.done.map(|done| done.result), Some(Err(IoError::ShuttingDown)));
    for far in &mut two.far {
        let _ = far.read_to_end(&mut two.got[0]);
    }
    assert!(two.got[0].is_empty(), "replicas have been told something");
}
