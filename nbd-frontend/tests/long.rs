//! Requests longer than the device takes at once, of clients that were not told how long they may be or did not listen: Linux'
//! nbd-client has the kernel send more than 1 MiB.

mod support;

use std::io::Write;
use std::net::Shutdown;

use lh_block::{Extent, Geometry, IoError};
use lh_ring::Answers;
use nbd_frontend::Framing;
use nbd_frontend::proto::{command, command_flag, error};
use support::client::Client;
use support::{GEOMETRY, Running, Setup};

const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

const MIB: u64 = 1 << 20;

fn pattern(len: u64) -> Vec<u8> {
    (0..len / 4).flat_map(|i| u32::try_from(i).unwrap().to_le_bytes()).collect()
}

fn hold(server: &Running, answers: Answers) {
    server.inside(move |inside| inside.disk.set_answers(answers));
}

fn gone(server: &Running) {
    server.until("gone", |load| load.connections == 0 && load.payload_bytes == 0);
}

#[test]
fn what_was_written_in_one_request_is_read_in_one() {
    for (framing, pool_bytes) in FRAMINGS.into_iter().flat_map(|f| [(f, 4 << 20), (f, 64 << 20)]) {
        let server = Setup { pool_bytes, ..Setup::default() }.start();
        let mut client = Client::unasked(&server, framing);
        let data = pattern(5 * MIB + 512);
        let write = client.send_write(0, 4096, &data);
        let reply = client.reply().unwrap();
        assert_eq!((reply.cookie, reply.error), (write, 0), "{framing:?}");
        assert!(server.store.bytes(Extent::new(4096, data.len() as u64)) == data, "{framing:?}");
        assert_eq!(server.inside(|inside| inside.disk.submitted()), 6);
        let read = client.header(command::READ, 0, 4096, data.len() as u64);
        let (chunks, reply) = client.reply_in_pieces().unwrap();
        assert_eq!((reply.cookie, reply.error), (read, 0), "{framing:?}");
        assert!(reply.data == data, "{framing:?}");
        assert_eq!(chunks, if framing == Framing::Simple { 1 } else { 6 });
        // The stream goes on behind both.
        assert_eq!(client.write(0, &[7; 512]).error, 0);
        assert_eq!(client.read(0, 512).data, [7; 512]);
        drop(client);
        gone(&server);
    }
}

/// As the kernel sends them: several at a time, and others between them.
#[test]
fn several_are_done_one_after_the_other() {
    let server = Running::start();
    for framing in FRAMINGS {
        let mut client = Client::unasked(&server, framing);
        let mut stream = client.stream.try_clone().unwrap();
        let (mut bytes, mut expected) = (Vec::new(), Vec::new());
        for i in 0..8_u8 {
            let flags = if framing == Framing::Extended { command_flag::PAYLOAD_LEN } else { 0 };
            let (head, cookie) = client.encode(command::WRITE, flags, u64::from(i) * 2 * MIB, 5 * MIB / 4);
            bytes.extend(head);
            bytes.resize(bytes.len() + (5 << 20) / 4, i + 1);
            expected.push(cookie);
            let (head, cookie) = client.encode(command::FLUSH, 0, 0, 0);
            bytes.extend(head);
            expected.push(cookie);
        }
        let sender = std::thread::spawn(move || stream.write_all(&bytes).unwrap());
        let mut answered: Vec<_> = expected.iter().map(|_| client.reply().unwrap()).collect();
        sender.join().unwrap();
        answered.sort_by_key(|reply| reply.cookie);
        assert!(
            answered.iter().map(|reply| (reply.cookie, reply.error)).eq(expected.iter().map(|c| (*c, 0)))
        );
        for i in 0..8_u8 {
            let read = client.header(command::READ, 0, u64::from(i) * 2 * MIB, 5 * MIB / 4);
            let (_, reply) = client.reply_in_pieces().unwrap();
            assert_eq!((reply.cookie, reply.error), (read, 0));
            assert!(reply.data == vec![i + 1; (5 << 20) / 4], "{framing:?} {i}");
        }
    }
}

#[test]
fn who_has_asked_is_held_to_what_it_was_told_and_nobody_may_have_more_than_the_protocol_says() {
    let server = Running::start();
    for framing in FRAMINGS {
        let mut asked = Client::connect(&server, framing);
        assert_eq!(asked.read(0, MIB + 512).error, error::EINVAL);
        assert_eq!(asked.write(0, &vec![7; (1 << 20) + 512]).error, error::EINVAL);
        let mut silent = Client::unasked(&server, framing);
        assert_eq!(silent.read(0, 32 * MIB + 512).error, error::EINVAL);
        assert_eq!(silent.write(0, &vec![7; (32 << 20) + 512]).error, error::EINVAL);
        if framing != Framing::Simple {
            let in_one = silent.call(command::READ, command_flag::DF, 0, MIB + 512);
            assert_eq!(in_one.error, error::EOVERFLOW);
        }
        assert_eq!(server.inside(|inside| inside.disk.submitted()), 0);
    }
    let mut silent = Client::unasked(&server, Framing::Simple);
    assert_eq!(silent.write(0, &vec![7; 32 << 20]).error, 0);
    assert!(silent.read(0, 32 * MIB).data == vec![7; 32 << 20]);
}

/// A simple reply says that all went well before the first byte, and how long it is nobody says: what came between its pieces
/// would be taken for data.
#[test]
fn nothing_comes_between_the_pieces_of_a_simple_reply() {
    let server = Running::start();
    let mut client = Client::unasked(&server, Framing::Simple);
    let data = pattern(3 * MIB);
    assert_eq!(client.write(0, &data).error, 0);
    hold(&server, Answers::Held);
    let first = client.send_write(0, 8 * MIB, &[7; 4096]);
    server.until("the write is with the device", |load| load.requests == 1);
    let read = client.header(command::READ, 0, 0, 3 * MIB);
    let last = client.header(command::FLUSH, 0, 0, 0);
    server.turn();
    assert_eq!(server.load().requests, 1, "the read waits for the write's answer");
    hold(&server, Answers::AtOnce);
    assert_eq!(client.reply().unwrap().cookie, first);
    let reply = client.reply().unwrap();
    assert!(reply.cookie == read && reply.data == data);
    assert_eq!(client.reply().unwrap().cookie, last);
}

#[test]
fn an_error_in_a_long_write_is_told_once_and_behind_the_last_piece() {
    for framing in FRAMINGS {
        let server = Setup { geometry: Geometry { depth: 1, ..GEOMETRY }, ..Setup::default() }.start();
        hold(&server, Answers::Held);
        let mut client = Client::unasked(&server, framing);
        let flags = if framing == Framing::Extended { command_flag::PAYLOAD_LEN } else { 0 };
        let (head, write) = client.encode(command::WRITE, flags, 0, 3 * MIB);
        let mut stream = client.stream.try_clone().unwrap();
        // More than the connection takes while the device is full.
        let sender = std::thread::spawn(move || stream.write_all(&[head, pattern(3 * MIB)].concat()));
        server.until("the first piece", |load| load.requests == 1);
        server.inside(|inside| {
            inside.disk.set_failure(Some(IoError::NoSpace));
            inside.disk.set_answers(Answers::Next(1));
        });
        server.until("the second", |_| server.inside(|inside| inside.disk.submitted()) == 2);
        server.inside(|inside| {
            inside.disk.set_failure(None);
            inside.disk.set_answers(Answers::AtOnce);
        });
        let reply = client.reply().unwrap();
        assert_eq!((reply.cookie, reply.error), (write, error::ENOSPC), "{framing:?}");
        sender.join().unwrap().unwrap();
        assert_eq!(server.inside(|inside| inside.disk.submitted()), 3);
        assert_eq!(client.write(0, &[7; 512]).error, 0);
    }
}

/// A simple reply that has begun cannot say it any more.
#[test]
fn an_error_in_a_long_read_is_told_where_it_can_be_and_ends_the_connection_elsewhere() {
    for framing in FRAMINGS {
        let server = Running::start();
        hold(&server, Answers::Held);
        let mut client = Client::unasked(&server, framing);
        let read = client.header(command::READ, 0, 0, 3 * MIB);
        server.until("the first piece", |load| load.requests == 1);
        server.inside(|inside| {
            inside.disk.set_failure(Some(IoError::Io));
            inside.disk.set_answers(Answers::AtOnce);
        });
        if framing == Framing::Simple {
            client.reply().unwrap_err();
            assert!(client.is_closed());
        } else {
            let (chunks, reply) = client.reply_in_pieces().unwrap();
            assert_eq!((reply.cookie, reply.error, chunks), (read, error::EIO, 2), "{framing:?}");
            assert_eq!(reply.data.len(), 1 << 20);
            server.inside(|inside| inside.disk.set_failure(None));
            assert_eq!(client.read(0, 512).error, 0);
        }
        drop(client);
        gone(&server);
        // With the first piece, everybody can be told.
        server.inside(|inside| inside.disk.set_failure(Some(IoError::Io)));
        let mut client = Client::unasked(&server, framing);
        assert_eq!(client.read(0, 3 * MIB).error, error::EIO);
        assert_eq!(client.read(0, 512).error, error::EIO);
    }
}

#[test]
fn who_leaves_in_the_middle_leaves_nothing_behind() {
    for framing in FRAMINGS {
        let server = Running::start();
        hold(&server, Answers::Held);
        let mut writes = Client::unasked(&server, framing);
        let (head, _) = writes.encode(command::WRITE, 0, 0, 4 * MIB);
        writes.stream.write_all(&[head, vec![7; (2 << 20) + 100]].concat()).unwrap();
        let mut reads = Client::unasked(&server, framing);
        reads.header(command::READ, 0, 0, 4 * MIB);
        server.until("two pieces of one, one of the other", |load| load.requests == 3);
        drop((writes, reads));
        hold(&server, Answers::AtOnce);
        server.until("nothing is left", |load| load.requests == 0 && load.payload_bytes == 0);
        gone(&server);
    }
}

/// It meant what it had sent before its goodbye, and is held to that for as much as is held.
#[test]
fn a_goodbye_behind_a_long_write_is_kept_to() {
    let server = Running::start();
    let _another = server.connections.add();
    let mut client = Client::unasked(&server, Framing::Simple);
    client.send_write(0, 0, &pattern(3 * MIB));
    client.header(command::DISC, 0, 0, 0);
    client.stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(client.reply().unwrap().error, 0);
    assert!(client.is_closed());
    assert!(server.store.bytes(Extent::new(0, 3 * MIB)) == pattern(3 * MIB));
    gone(&server);
}
