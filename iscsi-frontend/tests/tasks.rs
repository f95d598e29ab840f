//! Commands beside each other: whose data it is, who waits for whom, and what ends with whom.

mod support;

use std::io::Write;
use std::time::Duration;

use iscsi_frontend::Limits;
use iscsi_frontend::pdu::{FINAL, NO_TAG, flag, function, opcode};
use lh_block::Extent;
use lh_ring::Answers;
use support::client::{Client, PLAIN, rw10};
use support::pace::in_time;
use support::{Running, Setup};
use zerocopy::IntoBytes;

fn hold(server: &Running, answers: Answers) {
    server.inside(move |inside| inside.disk.set_answers(answers));
}

fn ready(server: &Running, isid: u8, keys: &str) -> Client {
    let mut client = Client::login(server, isid, keys);
    client.ready();
    client
}

/// A target transfer tag can be guessed: it is its own session's, and its own command's.
#[test]
fn data_is_taken_for_the_command_that_asked_for_it_and_from_nobody_else() {
    let server = Running::start();
    let (mut own, mut other) = (ready(&server, 1, PLAIN), ready(&server, 2, PLAIN));
    let tag = own.start(&rw10(0x2a, 0, 1), FINAL | flag::WRITE, 512);
    let ttt = own.recv().unwrap().u32_at(20);
    other.data_out(tag, ttt, 0, &[0xee; 512], 512);
    own.data_out(tag + 1, ttt, 0, &[0xee; 512], 512);
    // Both have been taken, and nothing came of them.
    for client in [&mut own, &mut other] {
        let ping = client.simple(opcode::NOP_OUT, FINAL, b"");
        assert_eq!(client.recv().unwrap().itt(), ping);
    }
    assert_eq!(server.load().commands, 1);
    own.data_out(tag, ttt, 0, &[7; 512], 512);
    assert_eq!(own.answer(b"").status, 0);
    assert_eq!(server.store.bytes(Extent::new(0, 512)), [7; 512]);
}

#[test]
fn a_tag_that_stands_for_none_and_data_in_both_directions_are_refused() {
    let server = Running::start();
    let mut client = ready(&server, 1, PLAIN);
    let mut command = client.command(&rw10(0x28, 0, 1), FINAL | flag::READ, 512, 0);
    command.itt = NO_TAG.into();
    client.send(command.as_bytes(), b"").unwrap();
    let answer = client.recv().unwrap();
    assert_eq!((answer.code(), answer.raw[2]), (opcode::REJECT, 0x07));
    client.start(&rw10(0x28, 0, 1), FINAL | flag::READ | flag::WRITE, 512);
    assert_eq!(client.answer(b"").sense, Some((5, 0x0e03)));
    assert_eq!(client.read(0, 1).status, 0);
}

/// Neither what is asked for nor what is sent goes over the end of a burst, whatever the length of a segment.
#[test]
fn no_sequence_is_longer_than_a_burst() {
    let server = Running::start();
    let mut client = ready(&server, 1, "MaxRecvDataSegmentLength=49152\0MaxBurstLength=65536\0");
    let data: Vec<u8> = (0..262_144_u32).map(|i| (i / 512).to_le_bytes()[0]).collect();
    let tag = client.start(&rw10(0x2a, 0, 512), FINAL | flag::WRITE, 262_144);
    for i in 0..4_u32 {
        let r2t = client.recv().unwrap();
        assert_eq!(
            (r2t.code(), r2t.u32_at(36), r2t.u32_at(40), r2t.u32_at(44)),
            (opcode::R2T, i, i << 16, 65536)
        );
        let from = (i as usize) << 16;
        client.data_out(tag, r2t.u32_at(20), from, &data[from..from + 65536], 32 << 10);
    }
    assert_eq!(client.answer(b"").status, 0);
    client.start(&rw10(0x28, 0, 512), FINAL | flag::READ, 262_144);
    let mut read = Vec::new();
    for i in 0..8 {
        let pdu = client.recv().unwrap();
        let (is_last, len) = (i % 2 == 1, [49152, 16384][i % 2]);
        assert_eq!((pdu.code(), pdu.raw[1] & FINAL != 0, pdu.data.len()), (opcode::DATA_IN, is_last, len));
        read.extend_from_slice(&pdu.data);
    }
    assert!(read == data);
}

/// An initiator has room for what it has said, and for no more.
#[test]
fn a_report_is_cut_to_what_the_initiator_expects() {
    let server = Running::start();
    let mut client = ready(&server, 1, PLAIN);
    client.start(&[0x12, 0, 0, 0, 255, 0], FINAL | flag::READ, 10);
    let answer = client.answer(b"");
    assert_eq!((answer.status, answer.data.len(), answer.residual), (0, 10, (flag::OVERFLOW, 64)));
}

#[test]
fn a_logout_for_recovery_is_refused_and_the_session_goes_on() {
    let server = Running::start();
    let mut client = ready(&server, 1, PLAIN);
    hold(&server, Answers::Held);
    let write = client.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    server.until("the write is with the device", |load| load.commands == 1);
    let logout = client.simple(opcode::LOGOUT_REQUEST, FINAL | 2, b"");
    let answer = client.recv().unwrap();
    assert_eq!((answer.code(), answer.itt(), answer.raw[2]), (opcode::LOGOUT_RESPONSE, logout, 2));
    hold(&server, Answers::AtOnce);
    let answer = client.answer(b"");
    assert_eq!((answer.itt, answer.status), (write, 0));
    assert_eq!(client.read(0, 1).data, [7; 512]);
}

#[test]
fn a_task_set_is_ones_own() {
    let server = Running::start();
    let (mut one, mut two) = (ready(&server, 1, PLAIN), ready(&server, 2, PLAIN));
    hold(&server, Answers::Held);
    two.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    one.start_write(&rw10(0x2a, 8, 1), &[8; 512]);
    server.until("both are with the device", |load| load.commands == 2);
    one.function(function::ABORT_TASK_SET, 0);
    server.until("the abort waits", |load| load.settling == 1);
    hold(&server, Answers::AtOnce);
    assert_eq!(two.answer(b"").status, 0);
    assert_eq!(one.recv().unwrap().code(), opcode::TASK_RESPONSE);
}

/// What is aborted later does not hold up the answer to what was asked before.
#[test]
fn an_abort_waits_for_older_commands_alone() {
    let server = Running::start();
    let mut client = ready(&server, 1, PLAIN);
    hold(&server, Answers::Held);
    let mut aborts = [0; 2];
    for (i, abort) in aborts.iter_mut().enumerate() {
        client.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
        server.until("the write is with the device", move |load| load.commands == i + 1);
        *abort = client.function(function::ABORT_TASK_SET, 0);
        server.until("the abort waits", move |load| load.settling == i + 1);
    }
    for abort in aborts {
        hold(&server, Answers::Next(1));
        let answer = client.recv().unwrap();
        assert_eq!((answer.code(), answer.itt()), (opcode::TASK_RESPONSE, abort));
    }
}

/// It has been done; that its answer waits for those whom it has ended does not make it one that can be ended.
#[test]
fn a_preemption_that_was_done_is_answered_whoever_resets_the_unit_meanwhile() {
    let server = Running::start();
    let mut clients = [1, 2].map(|isid| ready(&server, isid, PLAIN));
    let out = |client: &mut Client, action: u8, key: u64, new: u64| {
        let list = [&key.to_be_bytes()[..], &new.to_be_bytes(), &[0; 8]].concat();
        client.start_write(&[0x5f, action, 5, 0, 0, 0, 0, 0, 24, 0], &list)
    };
    for (client, key) in clients.iter_mut().zip([7, 8]) {
        out(client, 0, 0, key);
        assert_eq!(client.answer(b"").status, 0);
    }
    let [one, two] = &mut clients;
    hold(&server, Answers::Held);
    let write = one.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    server.until("the write is with the device", |load| load.commands == 1);
    let preemption = out(two, 5, 8, 7);
    server.until("the preemption waits", |load| load.settling == 1);
    one.function(function::LOGICAL_UNIT_RESET, 0);
    server.until("the reset waits, too", |load| load.settling == 2);
    hold(&server, Answers::AtOnce);
    let answer = two.answer(b"");
    assert_eq!((answer.itt, answer.status), (preemption, 0));
    let answer = one.answer_or_function();
    assert!(answer.contains(&(opcode::SCSI_RESPONSE, write, 0x40)), "{answer:?}");
}

impl Client {
    /// The next two answers, of a command and of a function in either order: operation, tag, status or response.
    fn answer_or_function(&mut self) -> [(u8, u32, u8); 2] {
        [(); 2].map(|()| {
            let pdu = self.recv().unwrap();
            let at = if pdu.code() == opcode::SCSI_RESPONSE { 3 } else { 2 };
            (pdu.code(), pdu.itt(), pdu.raw[at])
        })
    }
}

/// Who waits for much memory is not passed for ever by those who want little.
#[test]
fn memory_goes_to_who_has_waited_longest() {
    let limits = |limits: &mut Limits| (limits.payload_bytes, limits.session_bytes) = (128 << 10, 1 << 20);
    let server = Setup { limits, ..Setup::default() }.start();
    let mut client = ready(&server, 1, PLAIN);
    hold(&server, Answers::Held);
    let read = |client: &mut Client, blocks: u16| {
        client.start(&rw10(0x28, 0, blocks), FINAL | flag::READ, u32::from(blocks) * 512)
    };
    let first = [read(&mut client, 128), read(&mut client, 128)];
    let (large, small) = (read(&mut client, 256), read(&mut client, 64));
    server.until("all are there", |load| load.commands == 4 && load.payload_bytes == 128 << 10);
    hold(&server, Answers::Next(1));
    assert_eq!(client.answer(b"").itt, first[0]);
    // 64 KiB are free: enough for the small one, which is not its turn.
    server.until("it has been sent", |load| load.payload_bytes == 64 << 10);
    assert_eq!(server.inside(|inside| inside.disk.submitted()), 2);
    hold(&server, Answers::AtOnce);
    assert_eq!([(); 3].map(|()| client.answer(b"").itt), [first[1], large, small]);
}

/// A login is over, and waits for the old commands of its port as long as they take.
#[test]
fn a_login_that_waits_for_old_commands_is_not_too_slow() {
    in_time(|pace| {
        let limits = |limits: &mut Limits| (limits.patience_s, limits.ping_s) = (2, 1000);
        let server = Setup { limits, ..Setup::default() }.start();
        let mut old = pace.within(Duration::from_secs(1), || ready(&server, 1, PLAIN));
        hold(&server, Answers::Held);
        old.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
        server.until("the write is with the device", |load| load.commands == 1);
        let text = format!("InitiatorName=iqn.test\0TargetName={}\0", server.name);
        let again = pace.within(Duration::from_secs(1), || {
            let stream = server.connect();
            let again = std::thread::spawn(move || Client::over(stream, 1, &text).map(drop));
            // The login has come to its end.
            assert!(old.is_closed());
            again
        });
        std::thread::sleep(Duration::from_millis(4500));
        hold(&server, Answers::AtOnce);
        assert_eq!(again.join().unwrap(), Ok(()));
    });
}

/// The place that it had has been given to another meanwhile.
#[test]
fn a_login_that_has_waited_finds_no_place_where_there_is_none() {
    let server = Setup { limits: |limits| limits.sessions = 1, ..Setup::default() }.start();
    let mut old = ready(&server, 1, PLAIN);
    hold(&server, Answers::Held);
    old.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    server.until("the write is with the device", |load| load.commands == 1);
    let text = format!("InitiatorName=iqn.test\0TargetName={}\0", server.name);
    let stream = server.connect();
    let again = std::thread::spawn(move || Client::over(stream, 1, &text).map(drop));
    assert!(old.is_closed());
    server.until("it waits", |load| load.sessions == 0 && load.connections == 1);
    let mut other = Client::login(&server, 2, PLAIN);
    hold(&server, Answers::AtOnce);
    assert_eq!(again.join().unwrap(), Err(0xffff));
    assert_eq!(server.load().sessions, 1);
    other.ready();
}

/// Behind a PDU that is not what was sent nothing is done, whatever else has come with it.
#[test]
fn nothing_is_done_behind_data_with_a_wrong_digest() {
    let server = Running::start();
    let mut client = ready(&server, 1, "DataDigest=CRC32C\0");
    let mut bytes = Vec::new();
    for block in [0, 8] {
        let command = client.command(&rw10(0x2a, block, 1), FINAL | flag::WRITE, 512, 512);
        bytes.extend(client.encode(command.as_bytes(), &[7; 512]));
    }
    bytes[100] ^= 1;
    client.stream.write_all(&bytes).unwrap();
    let answer = client.recv().unwrap();
    assert_eq!((answer.code(), answer.raw[2]), (opcode::REJECT, 0x02));
    assert!(client.is_closed());
    assert!(server.store.bytes(Extent::new(0, 8192)).iter().all(|b| *b == 0));
}
