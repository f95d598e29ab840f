//! The server between a socket that stands for /dev/fuse (one datagram is one request or one answer) and a disk in
//! memory.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use lh_block::{Done, Extent, Geometry, IoError};
use lh_ring::{Answers, MemoryDisk};

use super::*;

const AGREEMENT: Agreement = Agreement { minor: 45, flags: 0, max_write: 64 << 10 };
const OWNER: u8 = 2;

/// A disk that notes where the bytes of writes lie, and where requests begin.
struct Noting {
    disk: MemoryDisk,
    aligned: Vec<bool>,
    offsets: Vec<u64>,
    room: Option<u32>,
}

impl Device<Payload> for Noting {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn room(&self) -> u32 {
        self.room.unwrap_or_else(|| self.disk.room())
    }

    fn submit(&mut self, request: Request<Payload>) {
        assert!(self.room() > 0);
        self.aligned.extend(request.data.as_ref().map(|data| data.is_aligned(4096, 1)));
        self.offsets.push(request.range.offset);
        self.disk.submit(request);
    }

    fn poll_done(&mut self) -> Option<Done<Payload>> {
        self.disk.poll_done()
    }
}

struct Rig {
    kernel: UnixDatagram,
    ring: Ring,
    pool: Pool,
    device: Noting,
    server: Server,
    /// Answers that the kernel has got: unique, error, data.
    got: Vec<(u64, i32, Vec<u8>)>,
}

impl Rig {
    fn new(depth: u32, chunks: usize) -> Self {
        let (kernel, own) = UnixDatagram::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        kernel.set_nonblocking(true).unwrap();
        let pool = Pool::new(chunks * lh_ring::CHUNK, chunks * lh_ring::CHUNK).unwrap();
        let geometry = Geometry {
            size: 1 << 20,
            logical_block: 512,
            physical_block: 4096,
            max_transfer: 1 << 20,
            depth,
        };
        let disk = MemoryDisk::new(&pool, geometry);
        let device = Noting { disk, aligned: Vec::new(), offsets: Vec::new(), room: None };
        let server = Server::new(Fd::new(own), &AGREEMENT, OWNER, &pool, depth).unwrap();
        let mut rig = Self { kernel, ring: Ring::new(64).unwrap(), pool, device, server, got: Vec::new() };
        rig.server.turn(&mut rig.ring, &mut rig.device);
        rig
    }

    /// Turns the loop, and takes answers, until nothing has happened for a moment.
    fn settle(&mut self) {
        let mut idle = 0;
        while idle < 3 {
            self.ring.turn(Some(Duration::from_millis(5))).unwrap();
            idle += 1;
            while let Some(completion) = self.ring.next() {
                assert_eq!(completion.token.owner, OWNER);
                self.server.completion(&mut self.ring, &mut self.device, completion);
                idle = 0;
            }
            self.server.turn(&mut self.ring, &mut self.device);
            self.take();
        }
    }

    fn ask(&self, opcode: u32, unique: u64, arguments: &[u8]) {
        let bytes = message(opcode, unique, arguments);
        assert_eq!(self.kernel.send(&bytes).unwrap(), bytes.len());
    }

    fn write(&self, unique: u64, offset: u64, data: &[u8]) {
        self.ask(16, unique, &[&io(offset, data.len())[..], data].concat());
    }

    fn read(&self, unique: u64, offset: u64, len: usize) {
        self.ask(15, unique, &io(offset, len));
    }

    fn take(&mut self) {
        let mut buffer = vec![0; 128 << 10];
        while let Ok(len) = self.kernel.recv(&mut buffer) {
            let number = |at: usize| u32::from_ne_bytes(buffer[at..at + 4].try_into().unwrap());
            assert_eq!(number(0) as usize, len, "the header counts the answer");
            let unique = u64::from_ne_bytes(buffer[8..16].try_into().unwrap());
            self.got.push((unique, number(4).cast_signed(), buffer[16..len].to_vec()));
        }
    }

    /// The answers since the last call, in order of their requests.
    fn answers(&mut self) -> Vec<(u64, i32, Vec<u8>)> {
        self.got.sort();
        std::mem::take(&mut self.got)
    }
}

fn message(opcode: u32, unique: u64, arguments: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(40 + arguments.len()).unwrap().to_ne_bytes().to_vec();
    bytes.extend(opcode.to_ne_bytes());
    bytes.extend(unique.to_ne_bytes());
    bytes.extend(1_u64.to_ne_bytes());
    bytes.extend([0; 16]);
    bytes.extend(arguments);
    bytes
}

fn io(offset: u64, len: usize) -> Vec<u8> {
    let len = u32::try_from(len).unwrap();
    [&0_u64.to_ne_bytes()[..], &offset.to_ne_bytes(), &len.to_ne_bytes(), &[0; 20]].concat()
}

#[test]
fn what_is_written_is_read_and_lies_on_pages() {
    let mut rig = Rig::new(32, 64);
    let data: Vec<u8> = (0..50_000_u32).map(|i| i.to_le_bytes()[0] ^ i.to_le_bytes()[1]).collect();
    for i in 0..10_u32 {
        let len = 512 * (97 - i) as usize;
        rig.write(2 + 2 * u64::from(i), 65536 * u64::from(i), &data[..len]);
        rig.settle();
    }
    assert!(rig.answers().iter().all(|(_, error, size)| *error == 0 && size.len() == 8));
    assert_eq!(rig.device.aligned, [true; 10]);
    for i in 0..10 {
        rig.read(102 + 2 * i, 65536 * i, 512 * 80);
    }
    rig.settle();
    rig.ask(20, 200, &[0; 16]);
    rig.ask(3, 202, &[0; 16]);
    rig.ask(2, 204, &[0; 8]);
    rig.settle();
    let answers = rig.answers();
    assert_eq!(
        answers.len(),
        12,
        "the tenth reads, the flush, the attributes, and nothing for the forgotten"
    );
    for (unique, error, bytes) in &answers[..10] {
        assert_eq!((*unique % 2, *error), (0, 0));
        assert!(bytes == &data[..512 * 80]);
    }
    assert_eq!(answers[10], (200, 0, vec![]));
    assert_eq!(answers[11].2.len(), 104);
}

#[test]
fn requests_wait_in_the_kernel_while_the_device_has_no_room() {
    let mut rig = Rig::new(2, 64);
    rig.device.disk.set_answers(Answers::Held);
    for i in 0..5 {
        rig.read(2 + 2 * i, 0, 512);
    }
    rig.settle();
    assert_eq!(rig.device.disk.submitted(), 2);
    assert_eq!(rig.answers(), []);
    rig.device.disk.set_answers(Answers::Reversed);
    rig.server.turn(&mut rig.ring, &mut rig.device);
    rig.settle();
    assert_eq!(rig.answers().len(), 5);
}

#[test]
fn room_that_vanishes_after_the_question_loses_nothing() {
    let mut rig = Rig::new(8, 64);
    rig.settle();
    for i in 0..6 {
        rig.write(2 + 2 * i, 4096 * i, &[9; 4096]);
    }
    // The poll has been answered, the reads are asked for, and then the queue is taken by others.
    rig.ring.turn(Some(Duration::from_secs(1))).unwrap();
    while let Some(completion) = rig.ring.next() {
        rig.server.completion(&mut rig.ring, &mut rig.device, completion);
    }
    rig.server.turn(&mut rig.ring, &mut rig.device);
    rig.device.room = Some(0);
    rig.settle();
    assert_eq!((rig.device.disk.submitted(), rig.answers().len()), (0, 0));
    rig.device.room = None;
    rig.server.turn(&mut rig.ring, &mut rig.device);
    rig.settle();
    assert_eq!(rig.answers().len(), 6);
    assert_eq!(rig.device.disk.store().bytes(Extent::new(0, 6 * 4096)), [9; 6 * 4096]);
}

#[test]
fn requests_overtake_none_that_wait() {
    let mut rig = Rig::new(8, 64);
    // Room comes between two requests of one batch.
    for (room, unique, offset) in [(0, 2, 0), (8, 4, 4096), (8, 6, 8192)] {
        let request = message(15, unique, &io(offset, 512));
        let step = rig.server.session.request(&rig.device.geometry(), &request, request.len());
        rig.device.room = Some(room);
        rig.server.follow(&mut rig.device, (step, None));
    }
    assert_eq!(rig.device.offsets, []);
    rig.server.turn(&mut rig.ring, &mut rig.device);
    assert_eq!(rig.device.offsets, [0, 4096, 8192]);
    rig.settle();
    assert_eq!(rig.answers().len(), 3);
}

/// The kernel says so of a request whose sender was killed while it was copied, and where it has no memory just now.
#[test]
fn a_request_that_was_taken_back_or_must_wait_ends_nothing_and_leaves_no_memory_behind() {
    let mut rig = Rig::new(8, 64);
    for errno in [Errno::ENOENT, Errno::EINTR, Errno::ENOMEM] {
        let (fd, lane) = (rig.server.fd.clone(), &mut rig.server.lanes[0]);
        assert!(lane.set_position(HEAD_AT));
        assert!(lane.read_now(&fd, 256 << 10).is_err());
        assert!(rig.pool.free_chunks() < 63);
        rig.server.phase = Phase::Reading { left: 1, found: 0, dry: false };
        let result = Err(errno.into());
        let token = rig.server.token(kind::READ, 0);
        let completion = Completion { token, result, more: false, payload: None, accepted: None };
        rig.server.completion(&mut rig.ring, &mut rig.device, completion);
        assert_eq!(rig.server.phase, Phase::Idle { ready: false }, "{errno}");
        // A lane may keep the chunk that it begins with.
        assert_eq!(rig.pool.free_chunks(), 63, "{errno}");
    }
}

#[test]
fn a_pool_without_memory_delays_and_does_not_fail() {
    // Enough for one of the lanes, and then for none.
    let mut rig = Rig::new(16, 4);
    let hold = rig.pool.alloc(u32::try_from(lh_ring::CHUNK * 4).unwrap(), 4096).unwrap();
    for i in 0..5 {
        rig.write(2 + 2 * i, 32768 * i, &[u8::try_from(i).unwrap() + 1; 32768]);
    }
    rig.settle();
    assert_eq!(rig.answers(), []);
    drop(hold);
    rig.server.turn(&mut rig.ring, &mut rig.device);
    rig.settle();
    assert_eq!(rig.answers().len(), 5);
    let bytes = rig.device.disk.store().bytes(Extent::new(0, 5 * 32768));
    assert!(bytes.chunks(32768).zip(1..).all(|(chunk, n)| chunk.iter().all(|b| *b == n)));
    assert!(Server::new(rig.server.fd.clone(), &AGREEMENT, OWNER, &Pool::new(0, 1).unwrap(), 1).is_err());
}

#[test]
fn requests_leave_memory_for_what_they_wait_for() {
    let chunk = u32::try_from(lh_ring::CHUNK).unwrap();
    let mut rig = Rig::new(16, 16);
    let hold = [8, 6].map(|chunks| rig.pool.alloc(chunks * chunk, 4096).unwrap());
    rig.write(2, 0, &[7; 32768]);
    rig.settle();
    assert_eq!((rig.answers(), rig.pool.free_chunks()), (vec![], 2), "an eighth is for the answers");
    drop(hold);
    rig.server.turn(&mut rig.ring, &mut rig.device);
    rig.settle();
    assert_eq!(rig.answers().len(), 1);
}

#[test]
fn errors_are_told_and_those_of_a_stopping_engine_are_kept() {
    let mut rig = Rig::new(4, 64);
    rig.device.disk.set_failure(Some(IoError::TimedOut));
    rig.read(2, 0, 512);
    rig.settle();
    assert_eq!(rig.answers(), [(2, -110, vec![])]);
    rig.device.disk.set_failure(Some(IoError::ShuttingDown));
    rig.read(4, 0, 512);
    rig.settle();
    assert_eq!(rig.answers(), []);
    rig.device.disk.set_failure(None);
    rig.read(u64::MAX - 1, 0, 512);
    rig.settle();
    assert_eq!(rig.answers(), [(u64::MAX - 1, 0, vec![0; 512])]);
}

#[test]
fn holes_and_flushes_reach_the_device() {
    let mut rig = Rig::new(4, 64);
    rig.write(2, 0, &[1; 8192]);
    rig.settle();
    let hole = |mode: u32| {
        let range = [&0_u64.to_ne_bytes()[..], &0_u64.to_ne_bytes(), &4096_u64.to_ne_bytes()].concat();
        [&range[..], &mode.to_ne_bytes(), &[0; 4]].concat()
    };
    rig.ask(43, 4, &hole(3));
    rig.ask(43, 6, &hole(0x20));
    rig.settle();
    assert_eq!(rig.answers()[1..], [(4, 0, vec![]), (6, -95, vec![])]);
    assert_eq!(rig.device.disk.store().bytes(Extent::new(4095, 2)), [0, 1]);
    assert!(!rig.server.is_gone());
}
