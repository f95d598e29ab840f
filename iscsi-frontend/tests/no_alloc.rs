//! A steady load allocates nothing, and many commands share one system call.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;

use iscsi_frontend::pdu::{FINAL, flag};
use support::Running;
use support::client::{Client, PLAIN, rw10};
use zerocopy::IntoBytes;

/// Counts what one thread asks of the system's allocator.
struct Counting;

thread_local! {
    static COUNTED: Cell<bool> = const { Cell::new(false) };
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[expect(unsafe_code, reason = "an allocator is an unsafe trait")]
// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTED.get() {
            ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        }
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

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
    for keys in [PLAIN, "HeaderDigest=CRC32C\0DataDigest=CRC32C\0"] {
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
        let turns = server.inside(|inside| {
            ALLOCATIONS.set(0);
            COUNTED.set(true);
            inside.ring.turns()
        });
        for round in 0..256 {
            batch(&mut client, round);
        }
        let (allocations, turns) = server.inside(move |inside| {
            COUNTED.set(false);
            (ALLOCATIONS.get(), inside.ring.turns() - turns)
        });
        let commands = 256 * u64::from(DEPTH);
        println!("{keys:?}: {commands} commands in {turns} turns, {allocations} allocations");
        assert!(allocations <= 4, "{allocations} allocations");
        assert!(turns <= commands, "{turns} turns for {commands} commands");
    }
}
