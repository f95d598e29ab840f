//! A steady load allocates nothing, and many requests share one system call.

mod support;

use std::io::Write;

use lh_rig::allocations::{self, Counting};
use nbd_frontend::Framing;
use nbd_frontend::proto::command;
use support::Running;
use support::client::Client;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DEPTH: u64 = 32;

/// One batch: as many requests as the depth, sent at once, and all answers.
fn batch(client: &mut Client, round: u64) {
    let mut bytes = Vec::new();
    for i in 0..DEPTH {
        let offset = (round * 7 + i) % 256 * 4096;
        match (round + i) % 8 {
            0..=3 => {
                bytes.extend_from_slice(&client.encode(command::WRITE, 0, offset, 4096).0);
                bytes.resize(bytes.len() + 4096, 9);
            }
            4..=5 => bytes.extend_from_slice(&client.encode(command::READ, 0, offset, 4096).0),
            6 => bytes.extend_from_slice(&client.encode(command::FLUSH, 0, 0, 0).0),
            _ => bytes.extend_from_slice(&client.encode(command::READ, 0, 1 << 60, 4096).0),
        }
    }
    let mut stream = client.stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || stream.write_all(&bytes).unwrap());
    for _ in 0..DEPTH {
        client.reply().unwrap();
    }
    sender.join().unwrap();
}

#[test]
fn a_steady_load_allocates_nothing_and_shares_system_calls() {
    for framing in [Framing::Simple, Framing::Structured] {
        let server = Running::start();
        let mut client = Client::connect(&server, framing);
        // Makes every page of the disk that will be written.
        client.write(0, &[1; 1 << 20]);
        client.write(1 << 20, &[1; 64 << 10]);
        for round in 0..64 {
            batch(&mut client, round);
        }
        let (before, turns) = server.inside(|inside| {
            allocations::count_this_thread(true);
            (allocations::so_far(), inside.ring.turns())
        });
        for round in 0..256 {
            batch(&mut client, round);
        }
        let (allocations, turns) = server.inside(move |inside| {
            allocations::count_this_thread(false);
            (allocations::so_far() - before, inside.ring.turns() - turns)
        });
        assert!(allocations <= 4, "{allocations} allocations");
        let requests = 256 * DEPTH;
        println!("{framing:?}: {requests} requests in {turns} turns, {allocations} allocations");
        assert!(turns * 10 <= requests * 3, "{turns} turns for {requests} requests");
    }
}
