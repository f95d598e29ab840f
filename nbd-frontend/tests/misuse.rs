//! What clients do wrong, and right, over a real socket: the right error, the volume unharmed, the connection usable
//! where the stream still makes sense.

mod support;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::Duration;

use lh_block::{Extent, IoError};
use lh_ring::Answers;
use nbd_frontend::proto::{command, command_flag, error, option, reply, state};
use nbd_frontend::{Ending, Framing};
use support::client::{Client, greeted, option_replies, send_option, string};
use support::{Running, SIZE, Setup};

const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

/// Bytes that tell where they belong.
fn pattern(offset: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| u8::try_from((offset + i) / 512 % 251 + 1).unwrap()).collect()
}

#[test]
fn data_comes_back_in_every_framing() {
    for framing in FRAMINGS {
        let server = Running::start();
        let mut client = Client::connect(&server, framing);
        assert_eq!(client.size, SIZE);
        for (offset, len) in
            [(0, 512), (4096, 4096), (1 << 20, 1 << 20), (SIZE - 512, 512), (12_800, 70_000 / 512 * 512)]
        {
            assert_eq!(client.write(offset, &pattern(offset, len)).error, 0);
            assert_eq!(
                client.read(offset, len as u64).data,
                pattern(offset, len),
                "{framing:?} {offset}+{len}"
            );
            assert_eq!(server.store.bytes(Extent::new(offset, len as u64)), pattern(offset, len));
        }
        for (kind, flags) in [
            (command::TRIM, 0),
            (command::TRIM, command_flag::FUA),
            (command::WRITE_ZEROES, 0),
            (command::WRITE_ZEROES, command_flag::NO_HOLE | command_flag::FUA),
            (command::WRITE_ZEROES, command_flag::FAST_ZERO),
        ] {
            client.write(0, &[7; 8192]);
            assert_eq!(client.call(kind, flags, 4096, 4096).error, 0);
            let data = client.read(0, 8192).data;
            assert!(data[..4096].iter().all(|b| *b == 7) && data[4096..].iter().all(|b| *b == 0));
        }
        assert_eq!(client.call(command::FLUSH, 0, 0, 0).error, 0);
        assert_eq!(client.call(command::CACHE, 0, 0, 1 << 20).error, 0);
        assert_eq!(client.call(command::READ, command_flag::FUA, 0, 512).data.len(), 512);
        client.header(command::DISC, 0, 0, 0);
        assert!(client.is_closed());
        server.until("closed", |load| load.connections == 0 && load.payload_bytes == 0);
    }
}

#[test]
fn refused_requests_leave_the_stream_usable_and_the_volume_unharmed() {
    for framing in FRAMINGS {
        let server = Running::start();
        let mut client = Client::connect(&server, framing);
        client.write(0, &pattern(0, 8192));
        let mut refused = |kind: u16, flags: u16, offset: u64, length: usize, error: u32| {
            let reply = if kind == command::WRITE {
                let cookie = client.send_write(flags, offset, &vec![0xee; length]);
                let reply = client.reply().unwrap();
                assert_eq!(reply.cookie, cookie);
                reply
            } else {
                client.call(kind, flags, offset, length as u64)
            };
            assert_eq!(reply.error, error, "{framing:?} {kind} {flags:#x} {offset}+{length}: {}", reply.text);
            assert!(framing == Framing::Simple || !reply.text.is_empty());
            // What follows is understood, and nothing has changed.
            assert_eq!(client.read(0, 8192).data, pattern(0, 8192));
        };
        // Beyond the end.
        refused(command::READ, 0, SIZE - 512, 1024, error::EINVAL);
        refused(command::WRITE, 0, SIZE - 512, 1024, error::ENOSPC);
        refused(command::WRITE, 0, u64::MAX - 511, 512, error::ENOSPC);
        refused(command::TRIM, 0, SIZE, 512, error::EINVAL);
        refused(command::WRITE_ZEROES, 0, SIZE, 512, error::ENOSPC);
        refused(command::CACHE, 0, SIZE, 512, error::EINVAL);
        // Unaligned.
        refused(command::READ, 0, 1, 512, error::EINVAL);
        refused(command::WRITE, 0, 0, 100, error::EINVAL);
        refused(command::WRITE, 0, 100, 512, error::EINVAL);
        refused(command::TRIM, 0, 0, 511, error::EINVAL);
        refused(command::WRITE_ZEROES, 0, 7, 512, error::EINVAL);
        // Oversize.
        refused(command::READ, 0, 0, (1 << 20) + 512, error::EINVAL);
        refused(command::WRITE, 0, 0, (1 << 20) + 512, error::EINVAL);
        refused(command::WRITE, 0, 0, 33 << 20, error::EINVAL);
        // Unknown.
        refused(99, 0, 0, 512, error::EINVAL);
        refused(8, 0, 0, 0, error::EINVAL);
        refused(command::READ, 1 << 14, 0, 512, error::EINVAL);
        refused(command::WRITE, 1 << 9, 0, 4096, error::EINVAL);
        refused(command::FLUSH, 0, 0, 512, error::EINVAL);
        refused(command::FLUSH, command_flag::NO_HOLE, 0, 0, error::EINVAL);
        if framing == Framing::Simple {
            refused(command::BLOCK_STATUS, 0, 0, 512, error::EINVAL);
        } else {
            refused(command::BLOCK_STATUS, 0, SIZE, 512, error::EINVAL);
        }
        // Nothing is done to nothing.
        assert_eq!(client.read(0, 0).error, 0);
        assert_eq!(client.write(0, b"").error, 0);
        assert_eq!(client.call(command::TRIM, 0, 0, 0).error, 0);
        assert_eq!(client.read(0, 8192).data, pattern(0, 8192));
        let all = server.store.bytes(Extent::new(8192, SIZE - 8192));
        assert!(all.iter().all(|b| *b == 0));
    }
}

#[test]
fn the_place_of_an_error_is_told() {
    let server = Running::start();
    let mut client = Client::connect(&server, Framing::Structured);
    let reply = client.read(SIZE - 512, 1024);
    assert_eq!((reply.error, reply.at), (error::EINVAL, Some(SIZE)));
    assert_eq!(client.read(SIZE, 1024).at, None);
}

#[test]
fn payloads_where_none_belong_are_swallowed() {
    let server = Running::start();
    let mut client = Client::connect(&server, Framing::Extended);
    for kind in [command::READ, command::TRIM, command::FLUSH, command::DISC + 90] {
        let (head, cookie) = client.encode(kind, command_flag::PAYLOAD_LEN, 0, 100_000);
        client.stream.write_all(&[head, vec![0x55; 100_000]].concat()).unwrap();
        let reply = client.reply().unwrap();
        assert_eq!((reply.cookie, reply.error), (cookie, error::EINVAL));
    }
    // QEMU's writes do not say that bytes follow, which they do.
    let (head, _) = client.encode(command::WRITE, 0, 0, 512);
    client.stream.write_all(&[head, vec![0x66; 512]].concat()).unwrap();
    assert_eq!(client.reply().unwrap().error, 0);
    assert_eq!(client.read(0, 512).data, [0x66; 512]);
}

#[test]
fn block_status_tells_what_the_device_knows() {
    for framing in [Framing::Structured, Framing::Extended] {
        let server = Running::start();
        let mut client = Client::connect(&server, framing);
        client.write(64 << 10, &[1; 128 << 10]);
        let hole = state::HOLE | state::ZERO;
        let all = [(64 << 10, hole), (128 << 10, 0), (SIZE - (192 << 10), hole)];
        assert_eq!(client.call(command::BLOCK_STATUS, 0, 0, SIZE).extents, all);
        let one = client.call(command::BLOCK_STATUS, command_flag::REQ_ONE, 96 << 10, 32 << 10);
        assert_eq!(one.extents, [(32 << 10, 0)]);
        let one = client.call(command::BLOCK_STATUS, command_flag::REQ_ONE, 0, SIZE);
        assert_eq!(one.extents, [(64 << 10, hole)]);
    }
}

#[test]
fn contexts_are_chosen_by_payload_with_extended_headers() {
    let server = Running::start();
    let mut client = Client::connect(&server, Framing::Extended);
    let mut ask = |length: u64, ids: &[u32]| {
        let mut payload = length.to_be_bytes().to_vec();
        ids.iter().for_each(|id| payload.extend_from_slice(&id.to_be_bytes()));
        let flags = command_flag::PAYLOAD_LEN;
        let (head, _) = client.encode(command::BLOCK_STATUS, flags, 0, payload.len() as u64);
        client.stream.write_all(&[head, payload].concat()).unwrap();
        client.reply().unwrap()
    };
    assert_eq!(ask(4096, &[1]).extents, [(4096, 3)]);
    let none = ask(4096, &[]);
    assert!(none.error == 0 && none.extents.is_empty());
    assert_eq!(ask(4096, &[1, 1]).error, error::EINVAL);
    assert_eq!(ask(4096, &[2]).error, error::EINVAL);
    assert_eq!(ask(4096, &[1; 100]).error, error::EINVAL);
    assert_eq!(ask(SIZE + 512, &[1]).error, error::EINVAL);
    assert_eq!(ask(SIZE, &[1]).extents, [(SIZE, 3)]);
}

#[test]
fn what_is_no_request_ends_the_connection() {
    for framing in FRAMINGS {
        let server = Running::start();
        let mut client = Client::connect(&server, framing);
        client.write(0, &pattern(0, 4096));
        client.stream.write_all(&[0x5a; 64]).unwrap();
        assert!(client.is_closed());
        // A payload longer than anybody should read is as bad.
        let mut client = Client::connect(&server, framing);
        let flags = if framing == Framing::Extended { command_flag::PAYLOAD_LEN } else { 0 };
        client.header(command::WRITE, flags, 0, (64 << 20) + 512);
        assert!(client.is_closed());
        // With requests in flight, too; they run to their end.
        let mut client = Client::connect(&server, framing);
        server.inside(|inside| inside.disk.set_answers(Answers::Held));
        client.send_write(0, 8192, &[7; 4096]);
        client.header(command::READ, 0, 0, 4096);
        client.stream.write_all(&[0x5a; 64]).unwrap();
        assert!(client.is_closed());
        server.until("in flight", |load| load.connections == 0 && load.requests == 2);
        server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
        server.until("closed", |load| load.requests == 0 && load.payload_bytes == 0);
        assert_eq!(server.store.bytes(Extent::new(8192, 4096)), [7; 4096]);
        assert_eq!(server.store.bytes(Extent::new(0, 4096)), pattern(0, 4096));
    }
}

#[test]
fn a_read_only_export_is_not_written() {
    let server = Setup { read_only: true, ..Setup::default() }.start();
    for framing in FRAMINGS {
        let mut client = Client::connect(&server, framing);
        assert_eq!(client.write(0, &[1; 4096]).error, error::EPERM);
        assert_eq!(client.call(command::TRIM, 0, 0, 4096).error, error::EPERM);
        assert_eq!(client.call(command::WRITE_ZEROES, 0, 0, 4096).error, error::EPERM);
        assert_eq!(client.read(0, 4096).data, vec![0; 4096]);
    }
}

#[test]
fn errors_of_the_device_are_told() {
    let server = Running::start();
    for framing in FRAMINGS {
        let mut client = Client::connect(&server, framing);
        for (reason, error) in [
            (IoError::Io, error::EIO),
            (IoError::NoSpace, error::ENOSPC),
            (IoError::TimedOut, error::EIO),
            (IoError::NotSupported, error::ENOTSUP),
            (IoError::ShuttingDown, error::ESHUTDOWN),
        ] {
            server.inside(move |inside| inside.disk.set_failure(Some(reason)));
            assert_eq!(client.write(0, &[1; 4096]).error, error);
            assert_eq!(client.read(0, 4096).error, error);
            assert_eq!(client.call(command::FLUSH, 0, 0, 0).error, error);
        }
        server.inside(|inside| inside.disk.set_failure(None));
        assert_eq!(client.read(0, 4096).error, 0);
    }
    server.until("nothing kept", |load| load.payload_bytes == 0);
}

#[test]
fn answers_may_come_in_any_order() {
    let server = Running::start();
    let mut client = Client::connect(&server, Framing::Simple);
    for i in 0..8 {
        client.write(i * 4096, &[u8::try_from(i).unwrap() + 1; 4096]);
    }
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    let cookies: Vec<u64> = (0..8).map(|i| client.header(command::READ, 0, i * 4096, 4096)).collect();
    server.until("submitted", |load| load.requests == 8);
    server.inside(|inside| inside.disk.set_answers(Answers::Reversed));
    for i in (0..8).rev() {
        let reply = client.reply().unwrap();
        assert_eq!(reply.cookie, cookies[i]);
        assert_eq!(reply.data, [u8::try_from(i).unwrap() + 1; 4096]);
    }
}

#[test]
fn a_client_gone_in_the_middle_of_a_payload_writes_nothing() {
    for framing in FRAMINGS {
        let server = Running::start();
        for sent in [0, 1, 511, 4096, 500_000] {
            let mut client = Client::connect(&server, framing);
            let flags = if framing == Framing::Extended { command_flag::PAYLOAD_LEN } else { 0 };
            let (head, _) = client.encode(command::WRITE, flags, 0, 1 << 20);
            client.stream.write_all(&[head, vec![0xee; sent]].concat()).unwrap();
            drop(client);
        }
        // In the middle of a header.
        let mut client = Client::connect(&server, framing);
        client.stream.write_all(&[0x25, 0x60]).unwrap();
        drop(client);
        server.until("all gone", |load| load.connections == 0 && load.payload_bytes == 0);
        assert!(server.store.bytes(Extent::new(0, 1 << 20)).iter().all(|b| *b == 0));
        assert_eq!(server.inside(|inside| inside.disk.submitted()), 0);
    }
}

#[test]
fn a_disconnect_finishes_what_is_in_flight() {
    let server = Running::start();
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    let mut client = Client::connect(&server, Framing::Simple);
    let cookies: Vec<u64> = (0..5).map(|i| client.send_write(0, i * 4096, &[9; 4096])).collect();
    client.header(command::DISC, 0, 0, 0);
    // Behind it nothing is read.
    client.send_write(0, 1 << 20, &[8; 4096]);
    client.stream.shutdown(Shutdown::Write).unwrap();
    server.until("submitted", |load| load.requests == 5);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(server.load().connections, 1);
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    for cookie in cookies {
        assert_eq!(client.reply().unwrap().cookie, cookie);
    }
    assert!(client.is_closed());
    assert!(server.store.bytes(Extent::new(0, 5 * 4096)).iter().all(|b| *b == 9));
    assert!(server.store.bytes(Extent::new(1 << 20, 4096)).iter().all(|b| *b == 0));
}

/// A client that gives up on a connection sends its writes again elsewhere and goes on: the old copies, read late,
/// must not overwrite what came after them.
#[test]
fn writes_of_a_client_that_hung_up_are_dropped() {
    for (framing, tcp) in FRAMINGS.into_iter().flat_map(|framing| [(framing, false), (framing, true)]) {
        let connect = if tcp { Client::connect_tcp } else { Client::connect };
        let server =
            Setup { geometry: lh_block::Geometry { depth: 4, ..support::GEOMETRY }, ..Setup::default() }
                .start();
        server.inside(|inside| inside.disk.set_answers(Answers::Held));
        let mut filler = Client::connect(&server, framing);
        let mut old = connect(&server, framing);
        let mut new = Client::connect(&server, framing);
        // These fill the device; what comes next waits.
        for i in 0..4 {
            filler.send_write(0, (10 + i) * 4096, &[1; 4096]);
        }
        server.until("full", |load| load.requests == 4);
        for _ in 0..20 {
            old.send_write(0, 0, &[1; 4096]);
        }
        old.header(command::WRITE_ZEROES, 0, 4096, 4096);
        old.stream.shutdown(Shutdown::Both).unwrap();
        if tcp {
            // Its end travels behind the data, and takes a moment where a unix socket's does not.
            lh_rig::until_end_arrives(&old.stream);
        }
        drop(old);
        server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
        assert_eq!(new.write(0, &[2; 8192]).error, 0);
        let submitted = server.inside(|inside| inside.disk.submitted());
        assert_eq!(submitted, 5, "{framing:?}, tcp {tcp}: writes of a client that is gone were submitted");
        server.until("gone", |load| load.connections == 2 && load.requests == 0 && load.payload_bytes == 0);
        assert!(server.store.bytes(Extent::new(0, 8192)).iter().all(|b| *b == 2), "{framing:?}");
    }
}

/// libnbd shuts its writing side behind NBD_CMD_DISC, with writes still unread on this side: it meant them.
#[test]
fn writes_before_a_goodbye_are_done() {
    let connects = [Client::connect, Client::connect_tcp];
    for (framing, connect) in FRAMINGS.into_iter().flat_map(|f| connects.map(|c| (f, c))) {
        let server =
            Setup { geometry: lh_block::Geometry { depth: 4, ..support::GEOMETRY }, ..Setup::default() }
                .start();
        server.inside(|inside| inside.disk.set_answers(Answers::Held));
        let mut client = connect(&server, framing);
        for i in 0..20 {
            client.send_write(0, i * 4096, &[3; 4096]);
        }
        client.header(command::WRITE_ZEROES, 0, 20 * 4096, 4096);
        client.header(command::DISC, 0, 0, 0);
        client.stream.shutdown(Shutdown::Write).unwrap();
        server.until("full", |load| load.requests == 4);
        server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
        for _ in 0..21 {
            assert_eq!(client.reply().unwrap().error, 0);
        }
        assert!(client.is_closed());
        assert!(server.store.bytes(Extent::new(0, 20 * 4096)).iter().all(|b| *b == 3));
        server.until("gone", |load| load.connections == 0 && load.payload_bytes == 0);
    }
}

#[test]
fn a_stopping_server_answers_what_it_has_and_refuses_the_rest() {
    let server = Running::start();
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    let mut busy = Client::connect(&server, Framing::Structured);
    let mut idle = Client::connect(&server, Framing::Structured);
    let mut shaking = greeted(&server);
    let first = busy.send_write(0, 0, &[1; 4096]);
    server.until("submitted", |load| load.requests == 1);
    let mut asks = shaking.try_clone().unwrap();
    server.inside(move |inside| {
        inside.server.stop(inside.ring, Ending::Refuse);
        // Before any of the two seconds that a handshake is given then has passed.
        send_option(&mut asks, option::GO, &[string("demo"), vec![0, 0]].concat()).unwrap();
    });
    assert!(idle.is_closed());
    assert!(std::os::unix::net::UnixStream::connect(&server.socket).is_err());
    assert_eq!(option_replies(&mut shaking).unwrap()[0].0, reply::ERR_SHUTDOWN);
    let second = busy.send_write(0, 4096, &[1; 4096]);
    let refused = busy.reply().unwrap();
    assert_eq!((refused.cookie, refused.error), (second, error::ESHUTDOWN));
    assert!(!server.inside(|inside| inside.server.is_done()));
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    let done = busy.reply().unwrap();
    assert_eq!((done.cookie, done.error), (first, 0));
    assert!(busy.is_closed());
    // The handshake has not gone by itself, and is given two seconds.
    server.until("done", |load| load.connections == 0);
    assert!(server.inside(|inside| inside.server.is_done()));
    assert_eq!(shaking.read(&mut [0]).unwrap_or(0), 0);
}

#[test]
fn a_server_that_is_taken_over_answers_nothing_new() {
    let server = Running::start();
    server.inside(|inside| inside.disk.set_answers(Answers::Held));
    let mut client = Client::connect(&server, Framing::Simple);
    let first = client.send_write(0, 0, &[1; 4096]);
    server.until("submitted", |load| load.requests == 1);
    server.inside(|inside| inside.server.stop(inside.ring, Ending::Leave));
    client.send_write(0, 4096, &[1; 4096]);
    server.inside(|inside| inside.disk.set_answers(Answers::AtOnce));
    assert_eq!(client.reply().unwrap().cookie, first);
    assert!(client.is_closed());
    server.until("done", |load| load.connections == 0);
    assert!(server.store.bytes(Extent::new(4096, 4096)).iter().all(|b| *b == 0));
}

#[test]
fn handshakes_end_in_words_or_at_once() {
    let server = Running::start();
    // Not NBD at all.
    let mut stream = server.connect();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut greeting = Vec::new();
    // A reset is as good an end.
    let _ = stream.read_to_end(&mut greeting);
    assert!(greeting.len() <= 18);

    let mut stream = greeted(&server);
    send_option(&mut stream, option::GO, &[string("wrong"), vec![0, 0]].concat()).unwrap();
    assert_eq!(option_replies(&mut stream).unwrap()[0].0, reply::ERR_UNKNOWN);
    send_option(&mut stream, option::LIST, &vec![1; 1 << 20]).unwrap();
    assert_eq!(option_replies(&mut stream).unwrap()[0].0, reply::ERR_TOO_BIG);
    send_option(&mut stream, option::STARTTLS, b"").unwrap();
    assert_eq!(option_replies(&mut stream).unwrap()[0].0, reply::ERR_UNSUP);
    send_option(&mut stream, option::ABORT, b"").unwrap();
    assert_eq!(option_replies(&mut stream).unwrap()[0].0, reply::ACK);
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    server.until("gone", |load| load.connections == 0);
}
