//! Writes whose bytes the engine lends: what they do, what is taken for a loan, and what ends a connection.

mod serve_client;

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use lh_ring::{Payload, Pool};
use lh_wire::handshake::{CHALLENGE_LEN, Challenge, Verdict};
use lh_wire::{OpCode, Pieces, Status, flags};
use replica::serve::Address;
use serve_client::{
    Client, MIB, PATIENCE, Server, Who, connect, knock, knock_with_fds, options, pattern, places, session,
    shake, who,
};

/// An engine that lends this memory.
fn lender(server: &Server, pool: &Pool, n: u32, number: u128) -> Client<UnixStream> {
    let memory = pool.lend().unwrap();
    knock_with_fds(&server.socket, &lending(n, number), &[memory.as_fd()]).unwrap()
}

fn lending(n: u32, number: u128) -> Who {
    let mut who = who(n, number);
    who.hello.lends = true;
    who
}

fn pool() -> Pool {
    Pool::lendable(4 << 20, 48 << 20).unwrap()
}

fn filled(pool: &Pool, bytes: &[u8], align: u32) -> Payload {
    let mut payload = pool.alloc(u32::try_from(bytes.len()).unwrap(), align).unwrap();
    payload.write_at(0, bytes);
    payload
}

fn list(payload: &Payload) -> Vec<u8> {
    let (bytes, len) = Pieces::new(payload.pieces()).unwrap().encode();
    bytes[..len].to_vec()
}

fn message(c: &mut Client<UnixStream>, offset: u64, payload: &Payload, more: u8) -> Vec<u8> {
    let mut header = c.header(OpCode::Write, offset, u32::try_from(payload.len()).unwrap());
    header.flags |= more;
    if more & flags::CRC != 0 {
        header.payload_crc = payload.crc32c();
    }
    c.encode_lent(header, &list(payload))
}

/// Lent bytes of every shape and alignment among bytes that are sent, into holes and over data.
#[test]
fn what_is_lent_is_written() {
    const SPAN: usize = 8 << 20;
    for place in places() {
        let server = Server::start(place.path());
        let pool = pool();
        let mut c = lender(&server, &pool, 1, 1);
        let mut model = vec![0; SPAN];
        for round in 0..3_u64 {
            for (n, (len, align)) in
                (0..).zip([(4096, 4096), (4096, 512), (MIB, 4096), (MIB, 512), (69_632, 512), (8192, 1)])
            {
                let (at, len) = (n * 1_376_256 + round * 8192, len as usize);
                let bytes = pattern(round * 10 + n, len);
                let range = usize::try_from(at).unwrap()..usize::try_from(at).unwrap() + len;
                model[range].copy_from_slice(&bytes);
                if n % 4 == 3 && round == 1 {
                    assert_eq!(c.write(at, &bytes), Status::Ok);
                    continue;
                }
                // What is cut before it is where the payload does not begin at a chunk.
                let _before = pool.alloc(align, align);
                let payload = filled(&pool, &bytes, align);
                let more = [0, flags::FUA, flags::CRC][usize::try_from(n + round).unwrap() % 3];
                let bytes = message(&mut c, at, &payload, more);
                c.stream.write_all(&bytes).unwrap();
                let answer = c.receive();
                assert_eq!((answer.status(), answer.header.op), (Status::Ok, OpCode::Write));
            }
            for at in (0..SPAN).step_by(MIB as usize) {
                assert!(c.read(at as u64, MIB) == model[at..at + MIB as usize], "round {round}, {at}");
            }
        }
    }
}

#[test]
fn a_lent_write_with_a_wrong_checksum_changes_nothing() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let pool = pool();
    let mut c = lender(&server, &pool, 1, 1);
    let payload = filled(&pool, &pattern(1, 4096), 4096);
    let mut header = c.header(OpCode::Write, 0, 4096);
    header.flags |= flags::CRC;
    header.payload_crc = payload.crc32c() ^ 1;
    let bytes = c.encode_lent(header, &list(&payload));
    c.stream.write_all(&bytes).unwrap();
    assert_eq!(c.receive().status(), Status::Corrupt);
    assert_eq!(c.read(0, 4096), [0; 4096]);
}

/// Each of these ends the connection, and with it the session; nothing is written, and the next session finds all well.
#[test]
fn malformed_references_end_the_connection() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let pool = pool();
    let end = u32::try_from(File::from(pool.lend().unwrap()).metadata().unwrap().len()).unwrap();
    let list = |pieces: &[(u32, u32)]| {
        pieces.iter().flat_map(|(at, len)| [at.to_le_bytes(), len.to_le_bytes()].concat()).collect::<Vec<_>>()
    };
    let thirteen: Vec<_> = (0..13).map(|n| (n * 4096, if n == 12 { 4096 - 12 * 256 } else { 256 })).collect();
    for (number, (what, bytes)) in (1..).zip([
        ("outside", list(&[(end, 4096)])),
        ("beyond the end", list(&[(end - 2048, 4096)])),
        ("beyond all", list(&[(u32::MAX, 4096)])),
        ("too short", list(&[(0, 2048)])),
        ("too long", list(&[(0, 4096), (0, 4096)])),
        ("one piece is empty", list(&[(0, 4096), (0, 0)])),
        ("none", Vec::new()),
        ("cut", list(&[(0, 4096)])[..7].to_vec()),
        ("too many", list(&thirteen)),
        ("the bytes themselves", pattern(1, 4096)),
    ]) {
        let mut c = lender(&server, &pool, 1, number);
        let header = c.header(OpCode::Write, 0, 4096);
        let bytes = c.encode_lent(header, &bytes);
        c.stream.write_all(&bytes).unwrap();
        assert!(c.is_closed(), "{what}");
    }
    // Who has lent nothing cannot refer to anything; and what is no write has no lent bytes.
    let mut c = session(&server.socket, 1, 100);
    let header = c.header(OpCode::Write, 0, 4096);
    let bytes = c.encode_lent(header, &list(&[(0, 4096)]));
    c.stream.write_all(&bytes).unwrap();
    assert!(c.is_closed());
    let mut c = lender(&server, &pool, 1, 101);
    let header = c.header(OpCode::PutLayer, 0, 4096);
    let bytes = c.encode_lent(header, &list(&[(0, 4096)]));
    c.stream.write_all(&bytes).unwrap();
    assert!(c.is_closed());
    assert_eq!(session(&server.socket, 1, 102).read(0, 4096), [0; 4096]);
}

/// What the ends of a pipe show: whether the server still has what it was passed.
fn witness() -> (std::io::PipeReader, OwnedFd) {
    let (reader, writer) = std::io::pipe().unwrap();
    (reader, writer.into())
}

#[test]
fn descriptors_that_are_no_loan_are_refused_and_closed() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let pool = pool();
    let current = lender(&server, &pool, 1, 1);
    let (good, other) = (pool.lend().unwrap(), pool.lend().unwrap());
    let file =
        tempfile::tempfile_in(if std::path::Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "." });
    let file = file.unwrap();
    file.set_len(1 << 20).unwrap();
    let (mut reader, writer) = witness();
    let verdict = |who: &Who, fds: &[_]| knock_with_fds(&server.socket, who, fds).err();
    let invalid = Some(Verdict::Invalid);
    assert_eq!(verdict(&lending(1, 2), &[]), invalid, "none");
    assert_eq!(verdict(&who(1, 2), &[good.as_fd()]), invalid, "one that nobody speaks of");
    assert_eq!(verdict(&lending(1, 2), &[good.as_fd(), other.as_fd()]), invalid, "two");
    assert_eq!(verdict(&lending(1, 2), &[writer.as_fd()]), invalid, "a pipe");
    assert_eq!(verdict(&lending(1, 2), &[writer.as_fd(); 8]), invalid, "pipes");
    assert_eq!(verdict(&lending(1, 2), &[file.as_fd()]), invalid, "a file, which may shrink");
    let mut reads = lending(1, 2);
    reads.reader = true;
    assert_eq!(verdict(&reads, &[good.as_fd()]), invalid, "a reader");
    // Who does not know the key is told just that, and leaves nothing behind either.
    let mut stranger = lending(1, 2);
    stranger.key = [9; 32];
    assert_eq!(verdict(&stranger, &[writer.as_fd()]), Some(Verdict::BadKey));
    // None of it has changed anything for the current session; and nobody else has the pipe.
    drop(writer);
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    drop(current);
}

#[test]
fn a_stranger_that_sends_descriptors_byte_by_byte_has_them_closed() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let stream = connect(&server.socket);
    let (mut reader, writer) = witness();
    for _ in 0..100 {
        lh_ring::sys::send_with_fds(stream.as_fd(), b"x", &[writer.as_fd(); 8]).unwrap();
    }
    // All of it has been received when what came last has been closed.
    let (mut last_reader, last) = witness();
    lh_ring::sys::send_with_fds(stream.as_fd(), b"x", &[last.as_fd()]).unwrap();
    drop(last);
    let (end, ends) = std::sync::mpsc::channel();
    std::thread::spawn(move || end.send(last_reader.read(&mut [0]).unwrap()));
    assert_eq!(ends.recv_timeout(PATIENCE).expect("what came last is kept"), 0);
    let pipe =
        std::fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&writer))).unwrap();
    let copies = || {
        let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        all.filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|link| link == pipe)).count()
    };
    assert!(copies() <= 4, "{} copies", copies());
    drop((stream, writer));
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
}

#[test]
fn over_tcp_nothing_is_borrowed() {
    let place = tempfile::tempdir().unwrap();
    let mut options = options(place.path());
    options.listen = Address::Tcp("127.0.0.1:0".parse().unwrap());
    let server = Server::with(options);
    let Some(Address::Tcp(address)) = server.status.address() else { unreachable!("it listens there") };
    let connect = || TcpStream::connect(address).unwrap();
    let mut challenge = [0; CHALLENGE_LEN];
    connect().read_exact(&mut challenge).unwrap();
    assert!(!Challenge::decode(&challenge).unwrap().borrows());
    assert_eq!(shake(connect(), &lending(1, 1)).err(), Some(Verdict::Invalid));
    assert!(shake(connect(), &who(1, 1)).is_ok());
}

/// An engine of before, and one that lends no more: a session each.
#[test]
fn sessions_with_and_without_a_loan_follow_each_other() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let pool = pool();
    for number in 1..6_u64 {
        let (at, bytes) = (number * 4096, pattern(number, 4096));
        let mut c = if number % 2 == 0 {
            let mut c = lender(&server, &pool, 1, number.into());
            let payload = filled(&pool, &bytes, 512);
            let message = message(&mut c, at, &payload, 0);
            c.stream.write_all(&message).unwrap();
            assert_eq!(c.receive().status(), Status::Ok);
            c
        } else {
            let mut c = knock(&server.socket, &who(1, number.into())).unwrap();
            assert_eq!(c.write(at, &bytes), Status::Ok);
            c
        };
        for n in 1..=number {
            assert_eq!(c.read(n * 4096, 4096), pattern(n, 4096));
        }
    }
}

/// Bytes that have to be copied before the disk takes them into holes, far more than is resident, while memory is short.
#[test]
fn while_memory_is_short_lent_writes_are_done_one_after_the_other() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let pool = pool();
    let mut c = lender(&server, &pool, 1, 1);
    server.status.set_memory_short(true);
    let bytes = pattern(5, MIB as usize);
    let _before = pool.alloc(512, 512);
    let payload = filled(&pool, &bytes, 512);
    let mut all = Vec::new();
    for n in 0..32 {
        let bytes = message(&mut c, n * u64::from(MIB), &payload, 0);
        all.extend(bytes);
    }
    c.stream.write_all(&all).unwrap();
    for _ in 0..32 {
        assert_eq!(c.receive().status(), Status::Ok);
    }
    for n in 0..32 {
        assert!(c.read(n * u64::from(MIB), MIB) == bytes, "{n}");
    }
}
