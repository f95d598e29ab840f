//! The protocol over a socket: data in all the ways in which it can come, task management, sessions that come and go.

mod support;

use std::io::{Read, Write};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use iscsi_frontend::pdu::{FINAL, HEADER, IMMEDIATE, NO_TAG, flag, function, opcode, reject};
use iscsi_frontend::{Chap, Credentials, Ending, Limits};
use lh_block::{Extent, Geometry};
use lh_ring::Answers;
use nix::sys::socket::{setsockopt, sockopt};
use support::client::{Client, PLAIN, Pdu, rw10};
use support::pace::in_time;
use support::{GEOMETRY, Running, Setup};
use zerocopy::IntoBytes;

fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| ((i / 512) ^ i).to_le_bytes()[0] ^ seed).collect()
}

fn hold(server: &Running, answers: Answers) {
    server.inside(move |inside| inside.disk.set_answers(answers));
}

#[test]
fn data_comes_and_goes_in_every_way() {
    let server = Running::start();
    let digests = "HeaderDigest=CRC32C\0DataDigest=CRC32C\0";
    let small = "MaxRecvDataSegmentLength=8192\0MaxBurstLength=65536\0";
    let keys = [
        PLAIN.to_owned(),
        format!("{PLAIN}{digests}"),
        small.into(),
        format!("{small}{digests}InitialR2T=No\0"),
    ];
    for (i, keys) in keys.iter().enumerate() {
        let mut client = Client::login(&server, 1, keys);
        client.ready();
        for (len, immediate) in
            [(512, 512), (512, 0), (4096, 4096), (65536, 16384), (1 << 20, 0), (1 << 20, 4000)]
        {
            let data = bytes(len, i.to_le_bytes()[0]);
            let done = client.write(1000, &data, immediate);
            assert_eq!((done.status, done.residual), (0, (0, 0)), "{keys} {len} {immediate}");
            assert_eq!(done.r2ts > 0, immediate < len);
            let read = client.read(1000, u16::try_from(len / 512).unwrap());
            assert!(read.data == data, "{keys} {len}");
            assert_eq!(server.store.bytes(Extent::new(512_000, len as u64)), data);
        }
    }
}

#[test]
fn unsolicited_data_needs_no_question() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, "InitialR2T=No\0");
    assert!(client.text.contains("InitialR2T=No"));
    client.ready();
    let data = bytes(16384, 3);
    for immediate in [0, 1000, 8192] {
        let command = client.command(&rw10(0x2a, 0, 32), flag::WRITE, 16384, immediate);
        client.send(command.as_bytes(), &data[..immediate]).unwrap();
        client.data_out(client.itt, NO_TAG, immediate, &data[immediate..], 3000);
        let done = client.answer(b"");
        assert_eq!((done.status, done.r2ts), (0, 0));
    }
    // More than the first burst is asked for.
    let data = bytes(65536, 4);
    let command = client.command(&rw10(0x2a, 0, 128), flag::WRITE, 65536, 0);
    client.send(command.as_bytes(), b"").unwrap();
    client.data_out(client.itt, NO_TAG, 0, &data[..16384], 16384);
    let done = client.answer(&data);
    assert_eq!((done.status, done.r2ts), (0, 1));
    assert_eq!(server.store.bytes(Extent::new(0, 65536)), data);
}

/// RFC 7143, 13.14: 64 KiB, where nobody has said anything else.
#[test]
fn who_says_nothing_of_its_first_burst_has_the_default() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, "");
    // As much memory as with four times as many commands of a quarter each.
    assert_eq!(client.max_cmd_sn, client.cmd_sn + 15);
    client.ready();
    let data = bytes(65536, 6);
    let done = client.write(0, &data, 65536);
    assert_eq!((done.status, done.r2ts), (0, 0));
    assert_eq!(server.store.bytes(Extent::new(0, 65536)), data);
    assert_eq!(Client::login(&server, 2, PLAIN).max_cmd_sn, 64);
}

#[test]
fn tiny_pieces_make_a_whole() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    let data = bytes(256 << 10, 5);
    client.start(&rw10(0x2a, 0, 512), FINAL | flag::WRITE, 256 << 10);
    let r2t = client.recv().unwrap();
    assert_eq!(r2t.code(), opcode::R2T);
    client.data_out(client.itt, r2t.u32_at(20), 0, &data, 1000);
    assert_eq!(client.answer(b"").status, 0);
    assert!(server.store.bytes(Extent::new(0, 256 << 10)) == data);
}

#[test]
fn an_abort_is_answered_when_the_command_has_ended() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    hold(&server, Answers::Held);
    let write = client.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    server.until("the write is with the device", |load| load.commands == 1);
    let abort = client.function(function::ABORT_TASK, write);
    // Something else is answered meanwhile; the abort is not.
    let ping = client.simple(opcode::NOP_OUT, FINAL, b"there?");
    assert_eq!(client.recv().unwrap().itt(), ping);
    hold(&server, Answers::AtOnce);
    let answer = client.recv().unwrap();
    assert_eq!((answer.code(), answer.itt(), answer.raw[2]), (opcode::TASK_RESPONSE, abort, 0));
    assert_eq!(server.load().commands, 0);
    // The command itself has no answer, and its place in the window is free.
    assert_eq!(client.read(0, 1).data, [7; 512]);
    let unknown = client.function(function::ABORT_TASK, 4711);
    let answer = client.recv().unwrap();
    assert_eq!((answer.itt(), answer.raw[2]), (unknown, 1));
    let reassign = client.function(function::TASK_REASSIGN, 4711);
    let answer = client.recv().unwrap();
    assert_eq!((answer.itt(), answer.raw[2]), (reassign, 4));
}

#[test]
fn an_abort_ends_what_waits_for_data() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    let write = client.start(&rw10(0x2a, 0, 1), FINAL | flag::WRITE, 512);
    let r2t = client.recv().unwrap();
    client.function(function::ABORT_TASK_SET, 0);
    assert_eq!(client.recv().unwrap().code(), opcode::TASK_RESPONSE);
    // Data that was on its way belongs to nobody.
    client.data_out(write, r2t.u32_at(20), 0, &[9; 512], 512);
    assert_eq!(client.read(0, 1).data, [0; 512]);
    let load = server.load();
    assert_eq!((load.commands, load.payload_bytes), (0, 0));
}

#[test]
fn a_reset_reaches_everybody() {
    let server = Running::start();
    let (mut one, mut two) = (Client::login(&server, 1, PLAIN), Client::login(&server, 2, PLAIN));
    one.ready();
    two.ready();
    hold(&server, Answers::Held);
    two.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    server.until("the write is with the device", |load| load.commands == 1);
    one.function(function::LOGICAL_UNIT_RESET, 0);
    let ping = one.simple(opcode::NOP_OUT, FINAL, b"");
    assert_eq!(one.recv().unwrap().itt(), ping);
    hold(&server, Answers::AtOnce);
    assert_eq!(one.recv().unwrap().code(), opcode::TASK_RESPONSE);
    // Who has not asked for the reset is told what became of his command.
    assert_eq!(two.answer(b"").status, 0x40);
    for client in [&mut one, &mut two] {
        client.start(&[0; 6], FINAL, 0);
        assert_eq!(client.answer(b"").sense, Some((6, 0x2903)));
    }
    // The controller's reset is nothing to the disk, and of a unit that is not there there is none.
    for (lun, response) in [(0, 0), (2, 2)] {
        for function in [function::ABORT_TASK_SET, function::CLEAR_TASK_SET, function::LOGICAL_UNIT_RESET] {
            one.lun = lun;
            one.function(function, 0);
            assert_eq!(one.recv().unwrap().raw[2], response, "{function} of {lun}");
        }
    }
    assert_eq!(two.read(0, 1).status, 0);
    one.lun = 1;
    one.function(function::TARGET_COLD_RESET, 0);
    assert_eq!(one.recv().unwrap().code(), opcode::TASK_RESPONSE);
    assert!(one.is_closed() && two.is_closed());
}

#[test]
fn a_port_logs_in_again_when_its_old_commands_have_ended() {
    let server = Running::start();
    let mut old = Client::login(&server, 1, PLAIN);
    old.ready();
    hold(&server, Answers::Held);
    old.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    server.until("the write is with the device", |load| load.commands == 1);
    let text = format!("InitiatorName=iqn.test\0TargetName={}\0", server.name);
    let (stream, other) = (server.connect(), server.connect());
    let again = std::thread::spawn(move || Client::over(stream, 1, &text));
    // The old session is gone at once, the new one does not begin.
    assert!(old.is_closed());
    server.until("the old session has ended", |load| load.sessions == 0);
    assert_eq!(server.load().commands, 1);
    assert!(!again.is_finished());
    // Another port is not held up.
    let text = format!("InitiatorName=iqn.other\0TargetName={}\0", server.name);
    Client::over(other, 1, &text).unwrap_or_else(|status| panic!("{status:#x}"));
    hold(&server, Answers::AtOnce);
    let mut again = again.join().unwrap().unwrap_or_else(|status| panic!("{status:#x}"));
    again.ready();
    assert_eq!(again.read(0, 1).data, [7; 512]);
}

/// RFC 7143, 6.3.1: there is one connection per session (13.2), and what is not there cannot be joined.
#[test]
fn a_second_connection_is_refused_and_the_first_goes_on() {
    let server = Running::start();
    let mut one = Client::login(&server, 1, PLAIN);
    one.ready();
    assert_eq!(Client::join(&server, 1, one.tsih, 1, PLAIN).err(), Some(0x0206));
    assert_eq!(Client::join(&server, 1, one.tsih + 1, 0, PLAIN).err(), Some(0x020a));
    // Another port has no such session.
    assert_eq!(Client::join(&server, 2, one.tsih, 0, PLAIN).err(), Some(0x020a));
    assert_eq!(one.write(0, &[7; 512], 512).status, 0);
    assert_eq!(server.load().sessions, 1);
    // Without a handle a session begins in the place of the one that is there, whatever the connection's number (6.3.5).
    let mut new = Client::join(&server, 1, 0, 9, PLAIN).unwrap_or_else(|status| panic!("{status:#x}"));
    assert!(one.is_closed() && new.tsih != one.tsih);
    new.ready();
    // That number is the session's now.
    assert_eq!(Client::join(&server, 1, new.tsih, 0, PLAIN).err(), Some(0x0206));
    drop(new);
    server.until("it has gone", |load| load.sessions == 0);
    assert_eq!(Client::join(&server, 1, one.tsih, 0, PLAIN).err(), Some(0x020a));
}

/// RFC 7143, 6.3.4 to 6.3.6: its commands end; what was agreed on, its reservation and its attentions stay. A session that takes
/// the place of another has none of these.
#[test]
fn a_session_goes_on_with_another_connection() {
    let server = Running::start();
    let mut other = Client::login(&server, 2, PLAIN);
    other.ready();
    let mut old = Client::login(&server, 1, "InitialR2T=No\0FirstBurstLength=4096\0");
    old.ready();
    let reserve = |client: &mut Client| {
        client.start(&[0x16, 0, 0, 0, 0, 0], FINAL, 0);
        assert_eq!(client.answer(b"").status, 0);
    };
    let ready = |client: &mut Client| {
        client.start(&[0; 6], FINAL, 0);
        client.answer(b"").sense
    };
    let (conflict, tsih) = (0x18, old.tsih);
    reserve(&mut old);
    hold(&server, Answers::Held);
    let write_and_wait = |client: &mut Client| {
        client.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
        server.until("the write is with the device", |load| load.commands == 1);
    };
    write_and_wait(&mut old);
    std::thread::scope(|threads| {
        let again = threads.spawn(|| Client::join(&server, 1, tsih, 0, ""));
        assert!(old.is_closed());
        server.until("the old connection has gone", |load| load.sessions == 1 && load.connections == 2);
        assert_eq!(other.read(0, 1).status, conflict);
        hold(&server, Answers::AtOnce);
        let mut again = again.join().unwrap().unwrap_or_else(|status| panic!("{status:#x}"));
        assert_eq!(again.tsih, tsih);
        // Its command was not answered (11.14.5).
        assert_eq!((ready(&mut again), ready(&mut again)), (Some((6, 0x477f)), None));
        assert_eq!(other.read(0, 1).status, conflict);
        let command = again.command(&rw10(0x2a, 0, 8), flag::WRITE, 4096, 0);
        again.send(command.as_bytes(), b"").unwrap();
        again.data_out(again.itt, NO_TAG, 0, &[8; 4096], 4096);
        assert_eq!(again.answer(b"").status, 0);
        // Nothing to be told of where nothing was on its way.
        let mut third = Client::join(&server, 1, tsih, 0, "").unwrap_or_else(|status| panic!("{status:#x}"));
        assert!(again.is_closed());
        assert_eq!(ready(&mut third), None);
        assert_eq!(other.read(0, 1).status, conflict);
        // One that waits to go on, and an initiator that begins anew meanwhile.
        hold(&server, Answers::Held);
        write_and_wait(&mut third);
        let waits = threads.spawn(|| Client::join(&server, 1, tsih, 0, "").err());
        assert!(third.is_closed());
        server.until("the third has gone", |load| load.sessions == 1 && load.connections == 2);
        let anew = threads.spawn(|| Client::login(&server, 1, PLAIN));
        assert_eq!(waits.join().unwrap(), Some(0xffff));
        hold(&server, Answers::AtOnce);
        let mut anew = anew.join().unwrap();
        assert_ne!(anew.tsih, tsih);
        assert_eq!(ready(&mut anew), Some((6, 0x2900)));
        assert_eq!(other.read(0, 8).status, 0);
    });
}

/// RFC 7143, 11.14 and 11.15.1.
#[test]
fn a_logout_of_another_connection_is_refused() {
    let server = Running::start();
    let mut client = Client::join(&server, 1, 0, 3, PLAIN).unwrap_or_else(|status| panic!("{status:#x}"));
    client.ready();
    assert_eq!((client.logout(1, 4), client.logout(2, 3), client.logout(2, 4)), (1, 2, 2));
    assert_eq!(client.read(0, 1).status, 0);
    assert_eq!(client.logout(1, 3), 0);
    assert!(client.is_closed());
    // The session's logout is of all its connections, whatever number stands there.
    let mut client = Client::join(&server, 1, 0, 3, PLAIN).unwrap_or_else(|status| panic!("{status:#x}"));
    assert_eq!(client.logout(0, 4), 0);
    assert!(client.is_closed());
}

#[test]
fn a_login_that_waits_is_given_up_for_the_next_of_its_port() {
    let server = Running::start();
    let mut old = Client::login(&server, 1, PLAIN);
    old.ready();
    hold(&server, Answers::Held);
    old.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    server.until("the write is with the device", |load| load.commands == 1);
    let text = format!("InitiatorName=iqn.test\0TargetName={}\0", server.name);
    let log_in = |isid| {
        let (stream, text) = (server.connect(), text.clone());
        std::thread::spawn(move || Client::over(stream, isid, &text))
    };
    let first = log_in(1);
    server.until("the first waits", |load| load.sessions == 0 && load.connections == 1);
    // Another port's session changes nothing.
    let _other = log_in(2).join().unwrap().unwrap_or_else(|status| panic!("{status:#x}"));
    assert!(!first.is_finished());
    let second = log_in(1);
    assert_eq!(first.join().unwrap().err(), Some(0xffff));
    server.until("the second waits", |load| load.sessions == 1 && load.connections == 2);
    hold(&server, Answers::AtOnce);
    let mut second = second.join().unwrap().unwrap_or_else(|status| panic!("{status:#x}"));
    second.ready();
    assert_eq!(second.read(0, 1).data, [7; 512]);
}

#[test]
fn a_login_that_waits_is_not_let_in_by_a_server_that_stops() {
    let server = Running::start();
    let mut old = Client::login(&server, 1, PLAIN);
    old.ready();
    hold(&server, Answers::Held);
    old.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    server.until("the write is with the device", |load| load.commands == 1);
    let text = format!("InitiatorName=iqn.test\0TargetName={}\0", server.name);
    let stream = server.connect();
    let again = std::thread::spawn(move || Client::over(stream, 1, &text).err());
    assert!(old.is_closed());
    server.until("the new one waits", |load| load.sessions == 0 && load.connections == 1);
    server.inside(|inside| inside.server.stop(inside.ring, Ending::Leave));
    hold(&server, Answers::AtOnce);
    // No answer at all: the next server gives one.
    assert_eq!(again.join().unwrap(), Some(0xffff));
    assert!(server.inside(|inside| inside.server.is_done()));
}

/// The time for data begins when it is asked for.
#[test]
fn data_that_is_asked_for_late_may_come_late() {
    in_time(|pace| {
        let limits = |limits: &mut Limits| {
            (limits.patience_s, limits.ping_s, limits.payload_bytes) = (4, 1000, 65536);
        };
        let server = Setup { limits, ..Setup::default() }.start();
        let mut client = pace.within(Duration::from_secs(2), || Client::login(&server, 1, PLAIN));
        client.ready();
        hold(&server, Answers::Held);
        let first = client.start(&rw10(0x2a, 0, 128), FINAL | flag::WRITE, 65536);
        let second = pace.within(Duration::from_secs(2), || {
            let r2t = client.recv().unwrap();
            // There is no memory for it while the device has the first.
            let second = client.start(&rw10(0x2a, 256, 128), FINAL | flag::WRITE, 65536);
            client.data_out(first, r2t.u32_at(20), 0, &[1; 65536], 65536);
            second
        });
        server.until("the first is with the device", |load| load.commands == 2);
        std::thread::sleep(Duration::from_millis(5500));
        pace.within(Duration::from_millis(2800), || {
            hold(&server, Answers::AtOnce);
            assert_eq!(client.answer(b"").itt, first);
            let r2t = client.recv().unwrap();
            assert_eq!((r2t.code(), r2t.itt()), (opcode::R2T, second));
            std::thread::sleep(Duration::from_millis(1200));
            client.data_out(second, r2t.u32_at(20), 0, &[2; 65536], 65536);
        });
        assert_eq!(client.answer(b"").status, 0);
    });
}

/// What an initiator has sent meanwhile lies there, and is read afterwards.
#[test]
fn a_target_that_stood_still_takes_nobody_for_silent() {
    in_time(|pace| {
        let limits = |limits: &mut Limits| (limits.patience_s, limits.ping_s) = (4, 1000);
        let server = Setup { limits, ..Setup::default() }.start();
        let mut client = pace.within(Duration::from_secs(2), || Client::login(&server, 1, PLAIN));
        client.ready();
        let write = client.start(&rw10(0x2a, 0, 1), FINAL | flag::WRITE, 512);
        std::thread::scope(|threads| {
            let r2t = pace.within(Duration::from_secs(1), || {
                let r2t = client.recv().unwrap();
                let (stands, still) = channel();
                threads.spawn(|| {
                    server.inside(move |_| {
                        stands.send(()).unwrap();
                        std::thread::sleep(Duration::from_secs(6));
                    });
                });
                still.recv().unwrap();
                r2t
            });
            // Later than its timer: that is what it sees first.
            std::thread::sleep(Duration::from_secs(2));
            client.data_out(write, r2t.u32_at(20), 0, &[7; 512], 512);
        });
        let answer = client.answer(b"");
        assert_eq!((answer.itt, answer.status), (write, 0));
    });
}

/// While there is no memory to listen with, silence is nobody's fault.
#[test]
fn who_is_not_listened_to_is_not_closed_for_its_silence() {
    in_time(|pace| {
        let limits = |limits: &mut Limits| {
            (limits.patience_s, limits.ping_s, limits.spare_chunks) = (2, 0, usize::MAX);
        };
        let server = Setup { limits, ..Setup::default() }.start();
        let _client = pace.within(Duration::from_secs(1), || Client::login(&server, 1, PLAIN));
        std::thread::sleep(Duration::from_secs(5));
        assert_eq!(server.load().sessions, 1);
    });
}

/// What is taken for the begin of a command's data comes back only with the rest.
#[test]
fn the_rest_of_unsolicited_data_is_listened_to_without_memory() {
    let limits = |limits: &mut Limits| limits.spare_chunks = 460;
    let server = Setup { limits, ..Setup::default() }.start();
    let (mut one, mut two) = (Client::login(&server, 1, "InitialR2T=No\0"), Client::login(&server, 2, PLAIN));
    one.ready();
    two.ready();
    // 64 of the 512 chunks: so few are left that nobody else is listened to any more.
    hold(&server, Answers::Held);
    // At once: what came behind the seventh would not be listened to.
    let reads: Vec<u8> = (0..8)
        .flat_map(|_| {
            let read = two.command(&rw10(0x28, 0, 2048), FINAL | flag::READ, 1 << 20, 0);
            two.encode(read.as_bytes(), b"")
        })
        .collect();
    two.stream.write_all(&reads).unwrap();
    server.until("the reads are with the device", |load| load.commands == 8);
    let command = one.command(&rw10(0x2a, 0, 8), flag::WRITE, 4096, 0);
    one.send(command.as_bytes(), b"").unwrap();
    server.until("its data is to come", |load| load.commands == 9);
    one.data_out(one.itt, NO_TAG, 0, &[3; 4096], 4096);
    server.until("it is with the device", |_| server.inside(|inside| inside.disk.in_flight()) == 9);
    hold(&server, Answers::AtOnce);
    assert_eq!(one.answer(b"").status, 0);
}

#[test]
fn a_compared_range_is_written_by_nobody_else() {
    let server = Running::start();
    let (mut one, mut two) = (Client::login(&server, 1, PLAIN), Client::login(&server, 2, PLAIN));
    one.ready();
    two.ready();
    hold(&server, Answers::Held);
    let compare = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 1];
    one.start_write(&compare, &[vec![0; 512], vec![1; 512]].concat());
    server.until("the comparison has begun", |load| load.commands == 1);
    // A write into the range waits for it; one beside it does not.
    two.start_write(&rw10(0x2a, 4, 4), &[2; 2048]);
    two.start_write(&rw10(0x2a, 100, 1), &[3; 512]);
    server.until("all are there", |load| load.commands == 3);
    assert_eq!(server.inside(|inside| inside.disk.in_flight()), 2);
    hold(&server, Answers::AtOnce);
    assert_eq!((one.answer(b"").status, two.answer(b"").status, two.answer(b"").status), (0, 0, 0));
    // Compared and written as one, then overwritten.
    assert_eq!(server.store.bytes(Extent::new(5 * 512, 512)), [2; 512]);
    one.start_write(&compare, &[vec![9; 512], vec![1; 512]].concat());
    assert_eq!(one.answer(b"").sense, Some((0xe, 0x1d00)));
}

#[test]
fn an_ordered_command_waits_for_all_and_all_for_it() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    hold(&server, Answers::Held);
    let write = client.start(&rw10(0x2a, 0, 1), FINAL | flag::WRITE, 512);
    let r2t = client.recv().unwrap();
    client.start(&rw10(0x28, 0, 1), FINAL | flag::READ, 512);
    let ordered = client.start(&rw10(0x28, 0, 1), FINAL | flag::READ | 2, 512);
    client.start(&rw10(0x28, 16, 1), FINAL | flag::READ, 512);
    server.until("all are there", |load| load.commands == 4);
    assert_eq!(server.inside(|inside| inside.disk.in_flight()), 1);
    hold(&server, Answers::AtOnce);
    // The read before it is done; it waits for the write, whose data has not come.
    assert_eq!(client.answer(b"").itt, ordered - 1);
    assert_eq!(server.load().commands, 3);
    client.data_out(write, r2t.u32_at(20), 0, &[6; 512], 512);
    let order: Vec<u32> = (0..3).map(|_| client.answer(b"").itt).collect();
    assert_eq!(order, [write, ordered, ordered + 1]);
}

/// Who has seen that there is no write cache flushes nothing, nor what was written while there was one.
#[test]
fn the_write_cache_is_written_back_before_it_is_said_to_be_off() {
    let geometry = Geometry { depth: 1, ..GEOMETRY };
    let server = Setup { geometry, ..Setup::default() }.start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    let (mut list, select) = (vec![0; 24], [0x15, 0x10, 0, 0, 24, 0]);
    (list[4], list[5]) = (0x08, 18);
    hold(&server, Answers::Held);
    let write = client.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    let off = client.start_write(&select, &list);
    server.until("both are on their way", |load| load.commands == 2);
    let submitted = || server.inside(|inside| inside.disk.submitted());
    assert_eq!(submitted(), 1, "there is no room for the flush");
    hold(&server, Answers::AtOnce);
    assert_eq!((client.answer(b"").itt, client.answer(b"").itt), (write, off));
    assert_eq!(submitted(), 2);
    // It is off already.
    client.start_write(&select, &list);
    let done = client.answer(b"");
    assert_eq!((done.status, done.residual, submitted()), (0, (0, 0), 2));
}

/// The MODE SELECT that takes the write cache away, and its parameters.
fn write_cache_off() -> ([u8; 6], Vec<u8>) {
    let mut list = vec![0; 24];
    (list[4], list[5]) = (0x08, 18);
    ([0x15, 0x10, 0, 0, 24, 0], list)
}

/// What is answered once the write cache is off is on stable storage, also where it came before.
#[test]
fn a_write_that_was_on_its_way_is_durable_once_the_write_cache_is_off() {
    let server = Running::start();
    let (mut one, mut two) = (Client::login(&server, 1, PLAIN), Client::login(&server, 2, PLAIN));
    one.ready();
    two.ready();
    let (select, list) = write_cache_off();
    let looks = || server.inside(|inside| (inside.disk.submitted(), inside.disk.volatile()));
    // One is with the device; of another the data has not come.
    hold(&server, Answers::Held);
    let with_device = two.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    server.until("the write is with the device", |load| load.commands == 1);
    let waits = two.start(&rw10(0x2a, 8, 1), FINAL | flag::WRITE, 512);
    let r2t = two.recv().unwrap();
    let off = one.start_write(&select, &list);
    server.until("all are there", |load| load.commands == 3);
    assert_eq!(looks(), (1, 0), "the flush would not have the write that has no answer");
    hold(&server, Answers::AtOnce);
    assert_eq!((one.answer(b"").itt, two.answer(b"").itt), (off, with_device));
    assert_eq!(looks(), (2, 0));
    two.data_out(waits, r2t.u32_at(20), 0, &[8; 512], 512);
    let done = two.answer(b"");
    assert_eq!((done.itt, done.status, looks()), (waits, 0, (3, 0)));
}

/// SBC-3, 5.11: what a cache has and the medium has not is written to the medium first.
#[test]
fn what_is_read_with_fua_is_on_stable_storage() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    let volatile = || server.inside(|inside| inside.disk.volatile());
    let read = |client: &mut Client, byte1: u8| {
        let mut cdb = rw10(0x28, 0, 1);
        cdb[1] = byte1;
        client.start(&cdb, FINAL | flag::READ, 512);
        let answer = client.answer(b"");
        assert_eq!((answer.status, answer.residual), (0, (0, 0)));
        answer.data
    };
    assert_eq!(client.write(0, &[7; 512], 512).status, 0);
    assert_eq!((read(&mut client, 0), volatile()), (vec![7; 512], 1));
    assert_eq!((read(&mut client, 0x08), volatile()), (vec![7; 512], 0));
}

/// Where nothing is transferred, nobody may believe that all of it was.
#[test]
fn data_that_is_to_go_the_other_way_is_not_said_to_have_gone() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    let (select, _) = write_cache_off();
    let (write, read) = (rw10(0x2a, 0, 1), rw10(0x28, 0, 1));
    let refused = Some((5, 0x0e03));
    let cases: [(&[u8], u8, u32, _); 7] = [
        (&write, flag::READ, 512, refused),
        (&write, 0, 512, refused),
        (&select, flag::READ, 24, refused),
        (&[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], flag::READ, 24, refused),
        (&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], flag::READ, 24, refused),
        (&read, 0, 512, None),
        (&[0x12, 0, 0, 0, 36, 0], 0, 36, None),
    ];
    for (cdb, direction, expected, sense) in cases {
        client.start(cdb, FINAL | direction, expected);
        let answer = client.answer(b"");
        assert_eq!(answer.sense, sense, "{cdb:x?} {direction:#x}");
        assert_eq!((answer.residual, answer.data.len()), ((flag::UNDERFLOW, expected), 0));
    }
    // A read whose initiator sends; libiscsi's suite wants it to end well.
    client.start_write(&read, &[1; 512]);
    let answer = client.answer(b"");
    assert_eq!((answer.status, answer.residual), (0, (flag::UNDERFLOW, 512)));
    // Nothing is expected: the residual says what there would have been.
    client.start(&write, FINAL, 0);
    assert_eq!(client.answer(b"").residual, (flag::OVERFLOW, 512));
}

/// A list of parameters that is cut off where a page ends is another list.
#[test]
fn parameters_that_do_not_all_come_change_nothing() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    // WCE off, and behind it SWP on.
    let (_, mut list) = write_cache_off();
    list.extend_from_slice(&[0x0a, 10, 0x02, 0x10, 0x08, 0x40, 0, 0, 0xff, 0xff, 0, 0]);
    let select = [0x15, 0x10, 0, 0, 36, 0];
    for expected in [0_u32, 4, 24] {
        let command = client.command(&select, FINAL | flag::WRITE, expected, expected as usize);
        client.send(command.as_bytes(), &list[..expected as usize]).unwrap();
        let answer = client.answer(b"");
        assert_eq!(answer.sense, Some((5, 0x0e03)), "{expected}");
        assert_eq!(answer.residual, (flag::OVERFLOW, 36 - expected));
    }
    client.start(&[0x1a, 8, 8, 0, 255, 0], FINAL | flag::READ, 255);
    assert_eq!(client.answer(b"").data[6] & 4, 4, "the write cache is on");
    client.start_write(&select, &list);
    assert_eq!(client.answer(b"").status, 0);
    client.start(&[0x1a, 8, 0x3f, 0, 255, 0], FINAL | flag::READ, 255);
    let modes = client.answer(b"").data;
    assert_eq!((modes[2] & 0x80, modes[6] & 4), (0x80, 0));
}

#[test]
fn residuals_are_told() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    let cases =
        [(0, flag::OVERFLOW, 512, 0), (200, flag::OVERFLOW, 312, 200), (10_000, flag::UNDERFLOW, 9488, 512)];
    for (expected, kind, count, len) in cases {
        client.start(&rw10(0x28, 0, 1), FINAL | flag::READ, expected);
        let answer = client.answer(b"");
        assert_eq!((answer.status, answer.residual, answer.data.len()), (0, (kind, count), len));
    }
    let data = [5; 1024];
    let command = client.command(&rw10(0x2a, 0, 1), FINAL | flag::WRITE, 1024, 1024);
    client.send(command.as_bytes(), &data).unwrap();
    assert_eq!(client.answer(b"").residual, (flag::UNDERFLOW, 512));
    assert_eq!(server.store.bytes(Extent::new(512, 512)), [0; 512]);
}

#[test]
fn discovery_tells_the_target_and_logs_out() {
    let server = Running::start();
    let text = "InitiatorName=iqn.test\0SessionType=Discovery\0";
    let mut client = Client::over(server.connect(), 1, text).unwrap_or_else(|status| panic!("{status:#x}"));
    client.simple(opcode::TEXT_REQUEST, FINAL, b"SendTargets=All\0");
    let answer = client.recv().unwrap();
    let expected = format!("TargetName={}\0TargetAddress={},1\0", server.name, server.address);
    assert_eq!(String::from_utf8(answer.data).unwrap(), expected);
    client.simple(opcode::TEXT_REQUEST, FINAL, b"SendTargets=iqn.other\0X-key=1\0");
    assert_eq!(client.recv().unwrap().data, b"X-key=NotUnderstood\0");
    // Nothing but that is served (RFC 7143, 4.3), and what was sent has had its number.
    client.start(&rw10(0x28, 0, 1), FINAL | flag::READ, 512);
    client.function(function::LOGICAL_UNIT_RESET, 0);
    client.data_out(1, NO_TAG, 0, &[1; 512], 512);
    for code in [opcode::SCSI_COMMAND, opcode::TASK_REQUEST | IMMEDIATE, opcode::DATA_OUT] {
        let answer = client.recv().unwrap();
        assert_eq!((answer.code(), answer.raw[2], answer.data[0]), (opcode::REJECT, 0x05, code));
    }
    let logout = client.simple(opcode::LOGOUT_REQUEST, FINAL, b"");
    let answer = client.recv().unwrap();
    assert_eq!((answer.code(), answer.itt(), answer.raw[2]), (opcode::LOGOUT_RESPONSE, logout, 0));
    assert!(client.is_closed());
}

/// Text in pieces, and text that is not all that is asked (RFC 7143, 11.10 and 11.11).
#[test]
fn text_goes_on_until_the_initiator_ends_it() {
    let server = Running::start();
    let text = "InitiatorName=iqn.test\0SessionType=Discovery\0";
    let mut client = Client::over(server.connect(), 1, text).unwrap_or_else(|status| panic!("{status:#x}"));
    let mut ask = |flags: u8, itt: u32, ttt: u32, data: &[u8]| {
        (client.itt, client.ttt) = (itt - 1, ttt);
        client.simple(opcode::TEXT_REQUEST, flags, data);
        client.recv().unwrap()
    };
    let goes_on = |answer: &Pdu| {
        assert_eq!((answer.code(), answer.raw[1]), (opcode::TEXT_RESPONSE, 0), "not over");
        assert_ne!(answer.u32_at(20), NO_TAG);
        answer.u32_at(20)
    };
    let target = format!("TargetName={}\0TargetAddress={},1\0", server.name, server.address);
    // A pair in two pieces.
    let answer = ask(flag::CONTINUE, 10, NO_TAG, b"SendTar");
    let ttt = goes_on(&answer);
    assert_eq!(answer.data, b"");
    // Another request does not know the tag.
    assert_eq!(ask(FINAL, 11, ttt, b"gets=All\0").code(), opcode::REJECT);
    let ttt = goes_on(&ask(flag::CONTINUE, 12, NO_TAG, b"SendTar"));
    let answer = ask(FINAL, 12, ttt, b"gets=All\0");
    assert_eq!((answer.raw[1], answer.u32_at(20), answer.itt()), (FINAL, NO_TAG, 12));
    assert_eq!(String::from_utf8(answer.data).unwrap(), target);
    // Whole pairs, and more to come.
    let answer = ask(0, 13, NO_TAG, b"X-key=1\0");
    let ttt = goes_on(&answer);
    assert_eq!(answer.data, b"X-key=NotUnderstood\0");
    let answer = ask(FINAL, 13, ttt, b"SendTargets=All\0");
    assert_eq!((answer.raw[1], String::from_utf8(answer.data).unwrap()), (FINAL, target.clone()));
    // What was begun and not ended is given up for what begins.
    goes_on(&ask(flag::CONTINUE, 14, NO_TAG, b"X-one"));
    let answer = ask(FINAL, 15, NO_TAG, b"SendTargets=All\0");
    assert_eq!(String::from_utf8(answer.data).unwrap(), target);
    // There is nothing to go on with; and text that is cut off and final at once.
    assert_eq!(ask(FINAL, 15, ttt, b"").code(), opcode::REJECT);
    assert_eq!(ask(FINAL | flag::CONTINUE, 16, NO_TAG, b"X").code(), opcode::REJECT);
}

/// RFC 7143, 6.4 and 13.12: that alone may be said anew, and it holds when both have said all.
#[test]
fn an_initiator_may_say_anew_which_segments_it_takes() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    let pieces = |client: &mut Client| client.read(0, 8).data_ins;
    assert_eq!(pieces(&mut client), 1);
    let text = b"MaxRecvDataSegmentLength=1024\0InitiatorAlias=B\xc3\xbcro\0MaxBurstLength=512\0X-key=1\0";
    client.simple(opcode::TEXT_REQUEST, FINAL, text);
    let answer = client.recv().unwrap();
    assert_eq!(String::from_utf8(answer.data).unwrap(), "MaxBurstLength=Reject\0X-key=NotUnderstood\0");
    assert_eq!(pieces(&mut client), 4);
    // In two requests.
    let itt = client.simple(opcode::TEXT_REQUEST, 0, b"MaxRecvDataSegmentLength=512\0");
    let ttt = client.recv().unwrap().u32_at(20);
    client.itt += 100;
    assert_eq!(pieces(&mut client), 4);
    (client.itt, client.ttt) = (itt - 1, ttt);
    client.simple(opcode::TEXT_REQUEST, FINAL, b"");
    assert_eq!(client.recv().unwrap().raw[1], FINAL);
    client.itt += 200;
    assert_eq!(pieces(&mut client), 8);
    // None that can be; and an answer that is longer than a segment is none.
    client.ttt = NO_TAG;
    client.simple(opcode::TEXT_REQUEST, FINAL, b"MaxRecvDataSegmentLength=511\0");
    assert_eq!(client.recv().unwrap().data, b"MaxRecvDataSegmentLength=Reject\0");
    client.simple(opcode::TEXT_REQUEST, FINAL, "A=\0".repeat(40).as_bytes());
    let answer = client.recv().unwrap();
    assert_eq!((answer.code(), answer.raw[2]), (opcode::REJECT, reject::PROTOCOL_ERROR));
    assert_eq!(pieces(&mut client), 8);
}

#[test]
fn a_logout_ends_commands_first() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    hold(&server, Answers::Held);
    client.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    server.until("the write is with the device", |load| load.commands == 1);
    let logout = client.simple(opcode::LOGOUT_REQUEST, FINAL, b"");
    server.until("the logout waits", |load| load.settling == 1);
    assert_eq!((server.load().sessions, server.load().commands), (1, 1));
    hold(&server, Answers::AtOnce);
    let answer = client.recv().unwrap();
    assert_eq!((answer.code(), answer.itt()), (opcode::LOGOUT_RESPONSE, logout));
    assert!(client.is_closed());
}

#[test]
fn reservations_outlive_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("reservations");
    let start = || {
        let mut setup = Setup::default();
        setup.target.reservations = Some(path.clone());
        setup.start()
    };
    let reserve = |client: &mut Client, action: u8, key: u64, new: u64| {
        let list = [&key.to_be_bytes()[..], &new.to_be_bytes(), &[0; 8]].concat();
        client.start_write(&[0x5f, action, 3, 0, 0, 0, 0, 0, 24, 0], &list);
        client.answer(b"").status
    };
    {
        let server = start();
        let mut one = Client::login(&server, 1, PLAIN);
        one.ready();
        assert_eq!((reserve(&mut one, 0, 0, 7), reserve(&mut one, 1, 7, 0)), (0, 0));
    }
    let server = start();
    let (mut one, mut two) = (Client::login(&server, 1, PLAIN), Client::login(&server, 2, PLAIN));
    one.ready();
    two.ready();
    assert_eq!((one.read(0, 1).status, two.read(0, 1).status), (0, 0x18));
    // Another takes over, and the commands of the first end before he is told.
    assert_eq!(reserve(&mut two, 0, 0, 8), 0);
    hold(&server, Answers::Held);
    one.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    server.until("the write is with the device", |load| load.commands == 1);
    let list = [&8_u64.to_be_bytes()[..], &7_u64.to_be_bytes(), &[0; 8]].concat();
    two.start_write(&[0x5f, 5, 3, 0, 0, 0, 0, 0, 24, 0], &list);
    server.until("the preemption waits", |load| load.settling == 1);
    hold(&server, Answers::AtOnce);
    assert_eq!((one.answer(b"").status, two.answer(b"").status), (0x40, 0));
    one.start(&[0; 6], FINAL, 0);
    assert_eq!(one.answer(b"").sense, Some((6, 0x2a05)));
    assert_eq!((one.read(0, 1).status, two.read(0, 1).data), (0x18, vec![7; 512]));
}

#[test]
fn only_who_knows_the_secret_comes_in() {
    let mut setup = Setup::default();
    let initiator = Credentials { name: "alice".into(), secret: b"a long secret".to_vec() };
    setup.target.chap = Some(Chap { initiator, target: None });
    let server = setup.start();
    assert_eq!(Client::try_login(&server, 1, PLAIN).err(), Some(0x0201));
}

#[test]
fn a_stopping_server_asks_for_logouts_and_refuses_the_rest() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    server.inside(|inside| inside.server.stop(inside.ring, Ending::Refuse));
    let message = client.recv().unwrap();
    assert_eq!((message.code(), message.raw[36]), (opcode::ASYNC, 1));
    assert_eq!(client.read(0, 1).sense, Some((2, 0x0400)));
    client.simple(opcode::LOGOUT_REQUEST, FINAL, b"");
    assert_eq!(client.recv().unwrap().code(), opcode::LOGOUT_RESPONSE);
    assert!(client.is_closed());
    assert!(server.inside(|inside| inside.server.is_done()));
}

/// The volume is to go, and nobody waits half a minute for data that does not come.
#[test]
fn who_owes_data_is_not_waited_for_by_a_server_that_stops() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    client.start(&rw10(0x2a, 0, 1), FINAL | flag::WRITE, 512);
    assert_eq!(client.recv().unwrap().code(), opcode::R2T);
    server.inside(|inside| inside.server.stop(inside.ring, Ending::Refuse));
    server.until("closed", |load| load.connections == 0 && load.commands == 0);
    assert!(server.inside(|inside| inside.server.is_done()));
}

/// What was in flight is answered, and an answer that is on its way arrives.
#[test]
fn who_takes_its_answers_slowly_is_waited_for_by_a_server_that_stops() {
    in_time(|pace| {
        let server = Running::start();
        let mut client = Client::login(&server, 1, PLAIN);
        client.ready();
        // What lies in buffers of the kernel's is taken, as far as the target sees.
        setsockopt(&client.stream, sockopt::RcvBuf, &(64 << 10)).unwrap();
        for _ in 0..8 {
            client.start(&rw10(0x28, 0, 2048), FINAL | flag::READ, 1 << 20);
        }
        server.until("all is answered", |load| load.commands == 0 && load.payload_bytes > 4 << 20);
        server.inside(|inside| inside.server.stop(inside.ring, Ending::Refuse));
        // 1.3 MiB in a second, four PDUs for each command, and the message that asks for a logout.
        let mut left = 8 * ((1 << 20) + 4 * HEADER) + HEADER;
        let mut piece = vec![0; 64 << 10];
        while left > 0 {
            // A MiB or so.
            pace.within(Duration::from_millis(2200), || {
                for _ in 0..17 {
                    let len = piece.len().min(left);
                    client.stream.read_exact(&mut piece[..len]).expect("closed before it had its answers");
                    left -= len;
                    std::thread::sleep(Duration::from_millis(48));
                }
            });
        }
        assert!(client.is_closed());
        assert!(server.inside(|inside| inside.server.is_done()));
    });
}

#[test]
fn a_server_that_gives_way_answers_what_the_device_has() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    hold(&server, Answers::Held);
    let write = client.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    // One that waits for its data is left to the next server.
    client.start(&rw10(0x2a, 8, 1), FINAL | flag::WRITE, 512);
    assert_eq!(client.recv().unwrap().code(), opcode::R2T);
    server.until("the write is with the device", |load| load.commands == 2);
    server.inside(|inside| inside.server.stop(inside.ring, Ending::Leave));
    assert!(!server.inside(|inside| inside.server.is_done()));
    hold(&server, Answers::AtOnce);
    let answer = client.answer(b"");
    assert_eq!((answer.itt, answer.status), (write, 0));
    assert!(client.is_closed());
    assert!(server.inside(|inside| inside.server.is_done()));
}

/// It owes the rest of a PDU that nobody will read: that is no reason not to wait for an answer.
#[test]
fn an_answer_is_waited_for_whatever_the_initiator_has_begun_to_send() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    hold(&server, Answers::Held);
    let write = client.start_write(&rw10(0x2a, 0, 1), &[7; 512]);
    client.stream.write_all(&[1; HEADER / 2]).unwrap();
    server.until("the write is with the device", |load| load.commands == 1);
    server.inside(|inside| inside.server.stop(inside.ring, Ending::Leave));
    // Longer than bytes and the taking of answers are waited for.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(7500) {
        assert_eq!(server.load().connections, 1, "closed after {:?}", begun.elapsed());
        std::thread::sleep(Duration::from_millis(100));
    }
    hold(&server, Answers::AtOnce);
    assert_eq!(client.answer(b"").itt, write);
    assert!(client.is_closed());
}

#[test]
fn who_takes_its_answers_slowly_is_not_closed() {
    in_time(|pace| {
        let limits = |limits: &mut Limits| (limits.patience_s, limits.ping_s) = (3, 1000);
        let server = Setup { limits, ..Setup::default() }.start();
        let mut client = pace.within(Duration::from_secs(2), || Client::login(&server, 1, PLAIN));
        client.ready();
        // What lies in buffers of the kernel's is taken, as far as the target sees.
        setsockopt(&client.stream, sockopt::RcvBuf, &(64 << 10)).unwrap();
        for _ in 0..8 {
            client.start(&rw10(0x28, 0, 2048), FINAL | flag::READ, 1 << 20);
        }
        // 1.3 MiB in a second: six seconds for what lies ready at once, four PDUs for each command.
        let mut left = 8 * ((1 << 20) + 4 * HEADER);
        let mut piece = vec![0; 64 << 10];
        while left > 0 {
            // A MiB or so.
            pace.within(Duration::from_millis(1400), || {
                for _ in 0..17 {
                    let len = piece.len().min(left);
                    client.stream.read_exact(&mut piece[..len]).expect("closed as if it took nothing");
                    left -= len;
                    std::thread::sleep(Duration::from_millis(48));
                }
            });
        }
        assert_eq!(client.read(0, 1).status, 0);
    });
}

#[test]
fn who_says_nothing_is_pinged_and_then_closed() {
    in_time(|pace| {
        let setup =
            Setup { limits: |limits| (limits.ping_s, limits.patience_s) = (0, 3), ..Setup::default() };
        let server = setup.start();
        let mut client = pace.within(Duration::from_secs(2), || Client::login(&server, 1, PLAIN));
        let ping = client.recv().unwrap();
        assert_eq!((ping.code(), ping.itt(), ping.u32_at(20)), (opcode::NOP_IN, NO_TAG, 1));
        assert!(client.is_closed());
    });
}

#[test]
fn who_answers_pings_stays() {
    let setup = Setup { limits: |limits| (limits.ping_s, limits.patience_s) = (0, 20), ..Setup::default() };
    let server = setup.start();
    let mut client = Client::login(&server, 1, PLAIN);
    for _ in 0..2 {
        let ping = loop {
            let pdu = client.recv().unwrap();
            if pdu.code() == opcode::NOP_IN {
                break pdu;
            }
        };
        let mut pong = [0; HEADER];
        (pong[0], pong[1]) = (opcode::NOP_OUT | IMMEDIATE, FINAL);
        pong[16..20].copy_from_slice(&NO_TAG.to_be_bytes());
        pong[20..24].copy_from_slice(&ping.raw[20..24]);
        client.send(&pong, b"").unwrap();
        // While a command is with the device time passes by seconds.
        hold(&server, Answers::Held);
        for _ in 0..2 {
            // The first is told that the session is new.
            client.start(&rw10(0x28, 0, 1), FINAL | flag::READ, 512);
        }
    }
    assert_eq!(server.load().sessions, 1);
}

#[test]
fn what_cannot_be_served_is_rejected_and_nothing_else_happens() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    let cases = [(opcode::SNACK, reject::SNACK), (0x1c, reject::NOT_SUPPORTED)];
    for (code, reason) in cases {
        client.simple(code, FINAL, b"");
        // It was not counted.
        client.cmd_sn -= 1;
        let answer = client.recv().unwrap();
        assert_eq!((answer.code(), answer.raw[2], answer.data[0]), (opcode::REJECT, reason, code));
    }
    hold(&server, Answers::Held);
    let tag = client.start(&rw10(0x28, 0, 1), FINAL | flag::READ, 512);
    let mut again = client.command(&rw10(0x28, 0, 1), FINAL | flag::READ, 512, 0);
    again.itt = tag.into();
    client.send(again.as_bytes(), b"").unwrap();
    assert_eq!(client.recv().unwrap().raw[2], reject::TASK_IN_PROGRESS);
    hold(&server, Answers::AtOnce);
    assert_eq!(client.answer(b"").itt, tag);
}
