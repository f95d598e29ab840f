//! A steady load allocates nothing, and many requests share one system call. A socket stands for /dev/fuse.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use fuse_frontend::{Server, init::Agreement};
use lh_block::Geometry;
use lh_rig::allocations::{self, Counting};
use lh_ring::{Fd, Frontend, MemoryDisk, Pool, Ring};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Requests at a time: what a datagram socket queues (net.unix.max_dgram_qlen).
const BATCH: u64 = 10;

fn request(opcode: u32, unique: u64, offset: u64, len: u32) -> Vec<u8> {
    let data = if opcode == 16 { len as usize } else { 0 };
    let mut bytes = u32::try_from(80 + data).unwrap().to_ne_bytes().to_vec();
    bytes.extend(opcode.to_ne_bytes());
    bytes.extend([unique, 1, 0, 0].map(u64::to_ne_bytes).concat());
    bytes.extend([0, offset].map(u64::to_ne_bytes).concat());
    bytes.extend(len.to_ne_bytes());
    bytes.resize(80 + data, 7);
    bytes
}

#[test]
fn a_steady_load_allocates_nothing_and_shares_system_calls() {
    let (kernel, own) = UnixDatagram::pair().unwrap();
    own.set_nonblocking(true).unwrap();
    kernel.set_nonblocking(true).unwrap();
    let pool = Pool::new(16 << 20, 16 << 20).unwrap();
    let geometry = Geometry {
        size: 1 << 20,
        logical_block: 512,
        physical_block: 4096,
        max_transfer: 1 << 20,
        depth: 64,
    };
    let mut disk = MemoryDisk::new(&pool, geometry);
    let mut ring = Ring::new(64).unwrap();
    let agreement = Agreement { minor: 45, flags: 0, max_write: 256 << 10 };
    let mut server = Server::new(Fd::new(own), &agreement, 2, &pool, 64).unwrap();
    server.turn(&mut ring, &mut disk);

    let mut buffer = vec![0; 64 << 10];
    let mut turns = 0;
    for round in 0..2000_u64 {
        if round == 500 {
            turns = ring.turns();
        }
        for i in 0..BATCH {
            let (unique, offset) = (2 * (round * BATCH + i), (round * 7 + i) % 256 * 4096);
            let opcode = [16, 16, 15, 15, 20][usize::try_from((round + i) % 5).unwrap()];
            kernel.send(&request(opcode, unique, offset, 4096)).unwrap();
        }
        let mut answers = 0;
        while answers < BATCH {
            allocations::count_this_thread(round >= 500);
            ring.turn(Some(Duration::from_millis(100))).unwrap();
            while let Some(completion) = ring.next() {
                server.completion(&mut ring, &mut disk, completion);
            }
            server.turn(&mut ring, &mut disk);
            allocations::count_this_thread(false);
            while kernel.recv(&mut buffer).is_ok() {
                answers += 1;
            }
        }
    }
    let (turns, requests) = (ring.turns() - turns, 1500 * BATCH);
    println!("{requests} requests in {turns} turns, {} allocations", allocations::so_far());
    assert_eq!(allocations::so_far(), 0);
    // Ten at a time is the worst case of batching: a poll, eight, two, and the answers with the next poll.
    assert!(turns <= requests / 2, "{turns} turns for {requests} requests");
}
