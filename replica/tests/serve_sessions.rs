//! Who is let in, who is sent away, and what ends a session, over real sockets.

mod serve_client;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use lh_block::{Epoch, Extent, Instance};
use lh_wire::handshake::{CHALLENGE_LEN, HELLO_LEN, Role, Verdict, WELCOME_LEN};
use lh_wire::{Control, Header, OpCode, Status};
use replica::serve::{Address, Mode, Options, ServeError, run};
use serve_client::{KEY, MIB, Server, connect, generation, knock, options, pattern, session, shake, who};

fn server() -> (tempfile::TempDir, Server) {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    (place, server)
}

#[test]
fn refusals() {
    let (_place, server) = server();
    let _current = session(&server.socket, 5, 1);
    let verdict = |who| knock(&server.socket, &who).err();
    let mut other = who(6, 2);
    other.hello.volume = "other".into();
    assert_eq!(verdict(other), Some(Verdict::WrongName));
    let mut other = who(6, 2);
    other.hello.replica = "other".into();
    assert_eq!(verdict(other), Some(Verdict::WrongName));
    assert_eq!(verdict(who(4, 2)), Some(Verdict::Stale));
    let mut twin = who(5, 2);
    twin.hello.instance = Instance(99);
    assert_eq!(verdict(twin), Some(Verdict::Stale));
    assert_eq!(verdict(who(5, 1)), Some(Verdict::Invalid), "that queue is taken");
    // All that has changed nothing for the current session.
    assert_eq!(server.status.snapshot().mode, Mode::Serving);
    assert_eq!(server.status.snapshot().generation, generation(5));
}

#[test]
fn a_wrong_key_is_refused_without_a_proof() {
    let (_place, server) = server();
    let mut stream = connect(&server.socket);
    let mut bytes = [0; CHALLENGE_LEN];
    stream.read_exact(&mut bytes).unwrap();
    let challenge = lh_wire::handshake::Challenge::decode(&bytes).unwrap();
    let hello = who(1, 1).hello.encode(Role::Engine, &challenge, &[8; 32], [1; 32]).unwrap();
    stream.write_all(&hello).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = answer.try_into().unwrap();
    let verdict = lh_wire::handshake::decode_welcome(&answer, &challenge, &hello, &KEY).unwrap();
    assert_eq!(verdict, (Verdict::BadKey, generation(0)));
    assert!(answer[16..].iter().all(|b| *b == 0), "nothing to learn from");
}

#[test]
fn silence_and_noise_are_turned_away() {
    let (_place, server) = server();
    let mut noise = connect(&server.socket);
    noise.write_all(&[0x55; HELLO_LEN]).unwrap();
    let mut answer = Vec::new();
    noise.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.len(), CHALLENGE_LEN + WELCOME_LEN);
    let began = Instant::now();
    let mut silent = connect(&server.socket);
    let mut challenge = [0; CHALLENGE_LEN];
    silent.read_exact(&mut challenge).unwrap();
    assert_eq!(silent.read(&mut [0; 1]).unwrap(), 0, "closed");
    // Reading gives up after 20 s.
    assert!(began.elapsed() > Duration::from_secs(4), "{:?}", began.elapsed());
    session(&server.socket, 1, 1);
}

/// Whoever reaches the port can connect as often as he likes, and say nothing.
#[test]
fn strangers_who_say_nothing_keep_no_engine_out() {
    // Those of a host so busy that they all had to go by then show nothing.
    let shown = (0..5).any(|_| strangers_keep_no_engine_out());
    assert!(shown, "an engine comes in when the time of the first of them is over");
}

/// False if so much time has passed meanwhile that strangers are closed for that.
fn strangers_keep_no_engine_out() -> bool {
    let (_place, server) = server();
    let began = Instant::now();
    let silent: Vec<_> = (0..40).map(|_| connect(&server.socket)).collect();
    session(&server.socket, 1, 1);
    // The first ones had to go.
    let (gone, left) = silent.split_at(9);
    for mut stream in gone {
        let mut challenge = [0; CHALLENGE_LEN];
        stream.read_exact(&mut challenge).unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "closed");
    }
    let mut last = left.last().unwrap();
    last.read_exact(&mut [0; CHALLENGE_LEN]).unwrap();
    last.set_nonblocking(true).unwrap();
    let heard = last.read(&mut [0; 1]);
    // Before the time of the first of them was over.
    if began.elapsed() > Duration::from_secs(4) {
        return false;
    }
    assert_eq!(heard.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    true
}

#[test]
fn a_younger_engine_ends_the_session() {
    let (_place, server) = server();
    let mut old = session(&server.socket, 1, 1);
    assert_eq!(old.write(0, &pattern(1, 4096)), Status::Ok);
    let mut young = session(&server.socket, 2, 2);
    assert!(old.is_closed());
    assert_eq!(knock(&server.socket, &who(1, 3)).err(), Some(Verdict::Stale));
    let state = young.state();
    assert_eq!(state.previous_generation, generation(1));
    assert_eq!(state.in_doubt, [Extent::new(0, 4096)]);
    assert!(state.lived && !state.clean);
    assert_eq!(young.control(&Control::Resolved).status(), Status::Ok);
    assert!(young.state().in_doubt.is_empty());
    assert_eq!(young.read(0, 4096), pattern(1, 4096));
}

#[test]
fn generations_stay_fenced_over_a_restart() {
    let place = tempfile::tempdir().unwrap();
    let first = Server::start(place.path());
    session(&first.socket, 7, 1);
    first.stop();
    let second = Server::start(place.path());
    assert_eq!(knock(&second.socket, &who(6, 1)).err(), Some(Verdict::Stale));
    let mut c = session(&second.socket, 7, 1);
    assert!(!c.state().lived, "it was not closed cleanly");
}

/// What is not flushed outlives the process in the page cache, and not the host's boot.
#[test]
fn who_kept_its_power_says_so_until_the_host_has_another_boot() {
    let place = tempfile::tempdir().unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let another_boot = |record: &str| {
        let note = place.path().join("replica/engine").join(record);
        let text = std::fs::read_to_string(&note).unwrap();
        let (head, json) = text.split_once('\n').unwrap();
        assert!(json.contains(boot.trim()));
        let json = json.trim_end().replace(boot.trim(), "another-boot");
        let sum = crc32c::crc32c_append(crc32c::crc32c(record.as_bytes()), json.as_bytes());
        let head = format!("{} {sum:08x}", head.rsplit_once(' ').unwrap().0);
        std::fs::write(&note, format!("{head}\n{json}\n")).unwrap();
    };
    let found = |n: u32| {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, n, n.into());
        let state = c.state();
        assert_eq!(c.write(0, &pattern(1, 4096)), Status::Ok);
        server.stop();
        (state.lived, state.powered, state.power_since.map(|s| (s.generation.attachment, s.late)))
    };
    assert_eq!(found(1), (true, true, None), "a new one");
    assert_eq!(found(2), (false, true, None), "it was not closed cleanly");
    another_boot("whole");
    assert_eq!(found(3), (false, false, Some((3, false))), "the power was lost");
    assert_eq!(found(4), (false, false, Some((3, false))), "and nobody has made it equal since");
    another_boot("power");
    assert_eq!(found(4), (false, false, Some((4, true))), "lost again, under the same engine");
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 5, 5);
    assert_eq!(c.control(&Control::Resolved).status(), Status::Ok);
    assert!(c.state().powered);
    server.stop();
    assert_eq!(found(6), (false, true, None), "all were equal on this boot");
}

#[test]
fn when_one_connection_of_a_session_breaks_all_end() {
    let (_place, server) = server();
    let queue = |queue| {
        let mut who = who(1, 1);
        (who.hello.queue, who.hello.queues) = (queue, 2);
        knock(&server.socket, &who).unwrap()
    };
    let (a, mut b) = (queue(0), queue(1));
    assert_eq!(b.write(0, &pattern(1, 4096)), Status::Ok);
    drop(a);
    assert!(b.is_closed());
    let mut next = session(&server.socket, 1, 2);
    assert_eq!(next.read(0, 4096), pattern(1, 4096));
}

#[test]
fn a_write_whose_bytes_did_not_all_come_changes_nothing() {
    let (_place, server) = server();
    let mut c = session(&server.socket, 1, 1);
    assert_eq!(c.write(0, &pattern(1, MIB as usize)), Status::Ok);
    let header = c.header(OpCode::Write, 0, MIB);
    let bytes = c.encode(header, &pattern(2, MIB as usize));
    c.stream.write_all(&bytes[..bytes.len() - 1]).unwrap();
    drop(c);
    let mut next = session(&server.socket, 1, 2);
    assert_eq!(next.read(0, MIB), pattern(1, MIB as usize));
}

#[test]
fn hostile_headers_end_the_connection() {
    let (_place, server) = server();
    let mut c = session(&server.socket, 1, 1);
    let mut bytes = c.header(OpCode::Read, 0, 4096).encode();
    bytes[20] ^= 1;
    c.stream.write_all(&bytes).unwrap();
    assert!(c.is_closed());
    let mut c = session(&server.socket, 1, 2);
    let oversize = Header { payload: 8 << 20, ..c.header(OpCode::Write, 0, 4096) };
    c.stream.write_all(&oversize.encode()).unwrap();
    assert!(c.is_closed());
    let mut c = session(&server.socket, 1, 3);
    let other = Header { generation: generation(9), ..c.header(OpCode::Read, 0, 4096) };
    assert_eq!(c.ask(other, &[]).status(), Status::Stale);
}

#[test]
fn who_sends_without_end_and_takes_no_answers_is_held_off() {
    let (_place, server) = server();
    let mut c = session(&server.socket, 1, 1);
    let header = c.header(OpCode::Read, 0, MIB);
    let read = c.encode(header, &[]);
    c.stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut sent = 0;
    while sent < 100_000 && c.stream.write_all(&read).is_ok() {
        sent += 1;
    }
    // Either the replica stops reading, or it has closed the connection for its requests in flight; a megabyte of
    // answer each was never made for all of them.
    assert!(sent < 100_000);
    session(&server.socket, 2, 2);
}

#[test]
fn closed_cleanly_and_used_again() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 1, 1);
    c.write(0, &pattern(1, 4096));
    assert_eq!(c.state().intent.len(), 1);
    assert_eq!(c.control(&Control::Close).status(), Status::Ok);
    assert_eq!(c.op(OpCode::Read, 0, 4096).status(), Status::Refused);
    let mut c = session(&server.socket, 1, 2);
    let state = c.state();
    assert!(state.clean && state.lived && state.intent.is_empty() && state.in_doubt.is_empty());
    assert_eq!(c.read(0, 4096), pattern(1, 4096));
    assert_eq!(c.control(&Control::Close).status(), Status::Ok);
    server.stop();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 2, 3);
    let state = c.state();
    assert!(state.clean && state.lived);
    c.write(4096, &pattern(2, 4096));
    assert!(!c.state().clean);
    server.stop();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 3, 4);
    let state = c.state();
    assert!(!state.clean && !state.lived);
    assert_eq!(state.intent, [Extent::new(0, state.intent_chunk)]);
}

#[test]
fn epochs_are_kept() {
    let place = tempfile::tempdir().unwrap();
    let (members, id) = (vec!["a".into()], Instance(5));
    let epoch = Epoch { generation: generation(1), counter: 2, members, id, after: None, round: None };
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 1, 1);
    assert_eq!(c.control(&Control::SetEpoch { epoch: epoch.clone(), out: Vec::new() }).status(), Status::Ok);
    let lower = Epoch { counter: 1, ..epoch.clone() };
    let refused = c.control(&Control::SetEpoch { epoch: lower, out: Vec::new() });
    assert_eq!(refused.status(), Status::Refused);
    assert!(String::from_utf8(refused.payload).unwrap().contains("younger epoch"));
    server.stop();
    let server = Server::start(place.path());
    assert_eq!(session(&server.socket, 2, 2).state().epoch, Some(epoch));
    assert_eq!(server.status.state().unwrap().epoch.unwrap().counter, 2);
}

#[test]
fn over_tcp() {
    let place = tempfile::tempdir().unwrap();
    let listen = Address::Tcp("127.0.0.1:0".parse().unwrap());
    let server = Server::with(Options { listen, ..options(place.path()) });
    let Some(Address::Tcp(address)) = server.status.address() else { panic!("no address") };
    let mut with = who(1, 1);
    with.hello.checksums = true;
    let mut c = shake(TcpStream::connect(address).unwrap(), &with).unwrap();
    assert_eq!(c.write(0, &pattern(1, MIB as usize)), Status::Ok);
    assert_eq!(c.read(0, MIB), pattern(1, MIB as usize));
}

#[test]
fn what_cannot_be_served_is_said() {
    let place = tempfile::tempdir().unwrap();
    let missing = Options { size: None, ..options(place.path()) };
    assert!(matches!(run(missing), Err(ServeError::Open(_))));
    let server = Server::start(place.path());
    let other = Options { directory: place.path().join("other"), ..options(place.path()) };
    match run(other) {
        Err(e @ ServeError::Listen { .. }) => assert!(e.to_string().contains("unix:"), "{e}"),
        other => panic!("{other:?}"),
    }
    // The one that was there goes on, and leaves no socket behind.
    session(&server.socket, 1, 1);
    let socket = server.socket.clone();
    server.stop();
    assert!(!socket.exists());
}

#[test]
fn after_the_welcome_nothing_of_an_earlier_session_happens() {
    let (_place, server) = server();
    for n in 1..20 {
        let mut old = session(&server.socket, n, 2 * u128::from(n));
        let mut bytes = Vec::new();
        for at in 0..64 {
            let header = old.header(OpCode::Write, u64::from(at) * 65536, 65536);
            bytes.extend(old.encode(header, &pattern(u64::from(n * 64 + at), 65536)));
        }
        let mut writer = old.stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || writer.write_all(&bytes));
        std::thread::sleep(Duration::from_micros(u64::from(n) * 300));
        let mut young = session(&server.socket, n, 2 * u128::from(n) + 1);
        let _ = sender.join().unwrap();
        let first = young.read(0, MIB);
        let doubt = young.state().in_doubt;
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(young.read(0, MIB), first, "round {n}");
        assert!(doubt.len() <= 1, "adjacent writes are one range: {doubt:?}");
    }
}
