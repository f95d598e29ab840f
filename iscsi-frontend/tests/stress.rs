//! Several initiators at once that write, read, abort, reset and leave, over a device that answers last first. What they
//! read is what they wrote; afterwards nothing is left: no command, no counted byte, no chunk of memory.

mod support;

use iscsi_frontend::pdu::{FINAL, flag, function, opcode};
use lh_ring::Answers;
use support::client::{Client, rw10};
use support::{Running, Setup};
use zerocopy::IntoBytes;

const CLIENTS: u8 = 4;
const ROUNDS: u32 = 600;

/// Blocks that each client has for itself, in slots of 64 KiB.
const SLOTS: u32 = 32;
const SLOT_BLOCKS: u32 = 128;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 >> 33).unwrap() % n
    }
}

/// What is known of a slot: the byte it is filled with; `None` after a write that was given up.
type Model = [Option<u8>; SLOTS as usize];

fn keys(random: &mut Random) -> String {
    let digests = if random.below(2) == 0 { "HeaderDigest=CRC32C\0DataDigest=CRC32C\0" } else { "" };
    let r2t = if random.below(2) == 0 { "InitialR2T=No\0" } else { "" };
    format!("MaxRecvDataSegmentLength={}\0{digests}{r2t}", [512, 8192, 262_144][random.below(3) as usize])
}

/// Reads and writes slots, several at a time.
fn burst(client: &mut Client, me: u8, random: &mut Random, model: &mut Model) {
    let first = u32::from(me) * SLOTS * SLOT_BLOCKS;
    for _ in 0..1 + random.below(6) {
        let slot = random.below(SLOTS);
        let block = first + slot * SLOT_BLOCKS;
        if random.below(2) == 0 {
            let fill = random.below(256).to_le_bytes()[0];
            let immediate = [0, 4096, 16384][random.below(3) as usize];
            let done = client.write(block, &vec![fill; 64 << 10], immediate);
            // A reset of somebody else ends it, or is told first.
            match (done.status, done.sense) {
                (0, _) => model[slot as usize] = Some(fill),
                (2, Some((6, _))) => {}
                (0x40, _) => model[slot as usize] = None,
                other => panic!("{other:?}"),
            }
        } else {
            let read = client.read(block, 128);
            if read.status == 0
                && let Some(fill) = model[slot as usize]
            {
                assert!(read.data == vec![fill; 64 << 10], "client {me}, slot {slot}");
            }
        }
    }
}

/// Begins a write and gives it up: by an abort, or by leaving.
fn give_up(client: &mut Client, me: u8, random: &mut Random, model: &mut Model) -> bool {
    let slot = random.below(SLOTS);
    let block = u32::from(me) * SLOTS * SLOT_BLOCKS + slot * SLOT_BLOCKS;
    model[slot as usize] = None;
    let immediate = random.below(2) as usize * 8192;
    let command = client.command(&rw10(0x2a, block, 128), FINAL | flag::WRITE, 64 << 10, immediate);
    client.send(command.as_bytes(), &vec![0xaa; immediate]).unwrap();
    if random.below(2) == 0 {
        return false;
    }
    let abort = client.function(function::ABORT_TASK, client.itt);
    // The R2T may come before the abort is seen, and so may an attention.
    loop {
        let pdu = client.recv().unwrap();
        if pdu.code() == opcode::TASK_RESPONSE && pdu.itt() == abort {
            return true;
        }
    }
}

fn run(server: &Running, me: u8) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ u64::from(me) << 40);
    let mut model: Model = [None; SLOTS as usize];
    let mut client = Client::login(server, me, &keys(&mut random));
    for round in 0..ROUNDS {
        burst(&mut client, me, &mut random, &mut model);
        let stays = random.below(4) != 0 || give_up(&mut client, me, &mut random, &mut model);
        if !stays {
            // The same port again: what was given up has ended when it is in.
            client = Client::login(server, me, &keys(&mut random));
        }
        if me == 0 && round % 40 == 39 {
            let reset = client.function(function::LOGICAL_UNIT_RESET, 0);
            assert_eq!(client.recv().unwrap().itt(), reset);
        }
    }
}

#[test]
fn nothing_is_lost_and_nothing_is_left() {
    // A small pool: commands wait for memory.
    let server = Setup { pool_bytes: 16 << 20, ..Setup::default() }.start();
    server.inside(|inside| inside.disk.set_answers(Answers::Reversed));
    let idle = server.inside(|inside| inside.pool.free_chunks());
    std::thread::scope(|scope| {
        for me in 0..CLIENTS {
            let server = &server;
            scope.spawn(move || run(server, me));
        }
    });
    server.until("all have gone", |load| load.connections == 0 && load.commands == 0);
    let load = server.load();
    assert_eq!((load.sessions, load.settling, load.payload_bytes), (0, 0, 0));
    assert_eq!(server.inside(|inside| inside.pool.free_chunks()), idle);
}
