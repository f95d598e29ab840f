//! A steady load allocates nothing, and many commands share one system call.

mod support;

use std::io::Write;

use iscsi_frontend::pdu::{FINAL, flag};
use lh_rig::allocations::{self, Counting};
use support::Running;
use support::client::{Client, PLAIN, rw10};
use zerocopy::IntoBytes;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DEPTH: u32 = 32;

/// One batch: as many commands as the depth, sent at once, and all answers.
fn batch(client: &mut Client, round: u32) {
    let mut bytes = Vec::new();
    for i in 0..DEPTH {
        let block = (round * 7 + i) % 256 * 8;
        match (round + i) % 8 {
            0..=2 => {
                let command = client.command(&rw10(0x2a, block, 8), FINAL | flag::WRITE, 4096, 4096);
                bytes.extend_from_slice(&client.encode(command.as_bytes(), &[9; 4096]));
            }
            // A question for its data.
            3 => {
                let command = client.command(&rw10(0x2a, block, 8), FINAL | flag::WRITE, 4096, 0);
                bytes.extend_from_slice(&client.encode(command.as_bytes(), b""));
            }
            4..=5 => {
                let command = client.command(&rw10(0x28, block, 8), FINAL | flag::READ, 4096, 0);
                bytes.extend_from_slice(&client.encode(command.as_bytes(), b""));
            }
            6 => {
                let command = client.command(&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], FINAL, 0, 0);
                bytes.extend_from_slice(&client.encode(command.as_bytes(), b""));
            }
            _ => {
                let command = client.command(&rw10(0x28, u32::MAX, 8), FINAL | flag::READ, 4096, 0);
                bytes.extend_from_slice(&client.encode(command.as_bytes(), b""));
            }
        }
    }
    let mut stream = client.stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || stream.write_all(&bytes).unwrap());
    sender.join().unwrap();
    for _ in 0..DEPTH {
        client.answer(&[9; 4096]);
    }
}

#[test]
fn a_steady_load_allocates_nothing_and_shares_system_calls() {
    let digests = format!("{PLAIN}HeaderDigest=CRC32C\0DataDigest=CRC32C\0");
    for keys in [PLAIN, &digests] {
        let server = Running::start();
        let mut client = Client::login(&server, 1, keys);
        client.ready();
        // Makes every page of the disk that will be written.
        for i in 0..2 {
            client.write(i * 2048, &vec![1; 1 << 20], 0);
        }
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
        let commands = 256 * u64::from(DEPTH);
        println!("{keys:?}: {commands} commands in {turns} turns, {allocations} allocations");
        assert!(allocations <= 4, "{allocations} allocations");
        assert!(turns <= commands, "{turns} turns for {commands} commands");
    }
}
