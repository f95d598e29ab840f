//! What a server does about what goes wrong inside it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crossbeam_channel::bounded;
use lh_block::{Extent, Generation, Instance};
use lh_ring::Token;
use lh_wire::{BlockState, Header, LayerDigest, OpCode, flags};
use nix::sys::socket::{getsockopt, sockopt};

use super::*;
use crate::serve::core::{ConnId, SessionHello};
use crate::serve::token::OWNER;
use crate::serve::{Address, Options, Status};
use crate::store::{Committed, CreateOptions, Directory, OpenOptions, Pace, SnapshotLayer};

const SIZE: u64 = 64 << 20;

/// A directory that is in use, and has this at its beginning.
fn create(place: &Path, bytes: &[u8]) {
    let (directory, lock_wait) = (place.join("replica"), Duration::from_secs(5));
    let create = CreateOptions { size: SIZE, backing: None, lock_wait };
    Directory::create(&directory, &create).unwrap().0.begin_use().unwrap();
    head(place).write_all_at(bytes, 0).unwrap();
}

fn server_of(place: &Path, bytes: &[u8]) -> Server {
    create(place, bytes);
    Server::start(options(place)).unwrap()
}

fn options(place: &Path) -> Options {
    Options {
        directory: place.join("replica"),
        size: None,
        lock_wait: Duration::from_secs(5),
        volume: "demo".into(),
        replica: "demo-r-0a1b2c3d".into(),
        key: [7; 32],
        map_key: [8; 32],
        listen: Address::Unix(place.join("socket")),
        status: Status::default(),
    }
}

fn server(place: &Path) -> Server {
    server_of(place, &[])
}

/// The file of the head; it cannot be read.
fn head(place: &Path) -> File {
    File::options().write(true).open(place.join("replica/volume-head-000.img")).unwrap()
}

/// The close waits for a fold, and that for a sync, which fails.
#[test]
fn a_replica_that_fails_while_a_record_waits_records_nothing_more() {
    for held in [Held::Close, Held::Revert(Instance(1)), Held::Rebuild(SIZE, Vec::new(), None)] {
        let place = tempfile::tempdir().unwrap();
        let mut server = server(place.path());
        server.flusher.fold_waits();
        server.hold(PersistId(77), held);
        server.release_held();
        assert!(server.held.is_some(), "it does not wait for the sync");
        server.inputs.push_back(Input::Broken);
        server.pump();
        assert!(server.core.is_failed() && server.held.is_none(), "who asked is not answered");
        // The worker does one task after the other.
        let (reply, answer) = bounded(1);
        server.ask_worker(Task::Look(reply));
        answer.recv().unwrap();
        assert!(server.worker.next_report().is_none(), "the worker was asked for a record");
        assert!(!place.path().join("replica/engine/closed").exists());
    }
}

/// Its worker has records to report, and nobody hears it: the process that watches it starts another one.
#[test]
fn a_replica_that_cannot_hear_its_own_threads_ends() {
    let place = tempfile::tempdir().unwrap();
    let mut server = server(place.path());
    let bell = |result| Completion {
        token: Token::new(OWNER, kind::BELL, 0, 0),
        result,
        more: false,
        payload: None,
        accepted: None,
    };
    assert!(server.completed(bell(Ok(0))).is_ok());
    let ended = server.completed(bell(Err(io::Error::from_raw_os_error(libc::EIO)))).unwrap_err();
    assert!(ended.to_string().contains("eventfd"), "{ended}");
}

/// Its session would go on for ever, and no engine elsewhere began without being told to fence it off.
#[test]
fn an_engine_whose_host_is_gone_is_noticed() {
    let place = tempfile::tempdir().unwrap();
    create(place.path(), &[]);
    let listen = Address::Tcp((std::net::Ipv4Addr::LOCALHOST, 0).into());
    let mut server = Server::start(Options { listen, ..options(place.path()) }).unwrap();
    let Address::Tcp(address) = *server.door.address() else { panic!("it listens elsewhere") };
    let _engine = std::net::TcpStream::connect(address).unwrap();
    let peer = loop {
        server.pump();
        server.ring.turn(Some(Duration::from_millis(10))).unwrap();
        while let Some(completion) = server.ring.next() {
            server.completed(completion).unwrap();
        }
        if let Some(peer) = server.peers.iter().next() {
            break peer;
        }
    };
    assert!(getsockopt(&peer.fd, sockopt::KeepAlive).unwrap());
    assert!(getsockopt(&peer.fd, sockopt::TcpNoDelay).unwrap());
}

/// Replicas are made equal by what is said to differ.
#[test]
fn what_cannot_be_read_counts_as_another_one() {
    let place = tempfile::tempdir().unwrap();
    let mut server = server_of(place.path(), &[7; 4096]);
    // As a disk's error it is one of the ring's reads.
    server.in_memory = false;
    let number = usize::from(server.store.head().0);
    server.files[number] = Fd::new(head(place.path()));
    let digest = LayerDigest::encode(1, &[(BlockState::Data, Some(7))], "");
    let len = u32::try_from(digest.len()).unwrap();
    let mut payload = server.pool.alloc(len, 1).unwrap();
    payload.write_at(0, &digest);
    let header = Header::request(OpCode::CompareLayer, 1, 0, 4096, Generation::default());
    let id = server.requests.add(ConnId(1), header, payload);
    server.start_digest(id, Extent::new(0, 4096), Digesting::Compare);
    while server.inputs.is_empty() {
        server.ring.turn(Some(Duration::from_secs(5))).unwrap();
        while let Some(c) = server.ring.next() {
            assert_eq!(c.token.kind, kind::READ);
            assert!(c.result.is_err(), "{c:?}");
            server.read_done(c);
        }
    }
    let Some(Input::Done { result, .. }) = server.inputs.pop_front() else { panic!("it has ended") };
    assert_eq!(result.map(|done| done.aux), Ok(u32::MAX));
}

/// A sync that nobody asked for is due when the directory is in use again. Else the loop would turn without a pause until then, in a
/// replica that has failed for ever.
#[test]
fn what_cannot_be_done_now_wakes_nobody() {
    let place = tempfile::tempdir().unwrap();
    let mut server = server(place.path());
    assert!(!server.core.is_in_use());
    server.flusher.quiet_at = Some(0);
    server.pump();
    assert_eq!(server.next_wake(), None);
}

/// A snapshot is taken of the directory and marked as removed, and the beginning zeroed: the head hides by a mark what the snapshot
/// has there.
fn with_a_mark(place: &Path) {
    let open = OpenOptions { lock_wait: Duration::from_secs(5) };
    let (mut directory, mut store) = Directory::open(&place.join("replica"), &open).unwrap();
    let block = Extent::new(0, 4096);
    directory.begin_use().unwrap();
    let op = ChainOp::Snapshot {
        name: "one".into(),
        user_created: true,
        created: "2026-01-01T00:00:00Z".into(),
        labels: Default::default(),
    };
    for (id, op) in [(1, op), (2, ChainOp::MarkRemoved { name: "one".into() })] {
        directory.prepare(Instance(id), &op).unwrap();
        if let Committed::Head(head) = directory.commit(Instance(id)).unwrap() {
            store.switch_head(*head);
        }
        directory.sync_commit().unwrap();
    }
    directory.mark_zeroes().unwrap();
    store.marked();
    let plan = store.plan_zero(block, false, &mut |_, _, _| Vec::new()).unwrap();
    assert_eq!(plan.marks, [block]);
    store.zeroed(&plan).unwrap();
    store.flush_now().unwrap();
}

/// What is written while a hole is made there would go with what the hole is made for.
#[test]
fn a_write_waits_for_a_hole_that_is_being_punched_there() {
    let place = tempfile::tempdir().unwrap();
    create(place.path(), &[7; 4096]);
    with_a_mark(place.path());
    let mut server = Server::start(options(place.path())).unwrap();
    let other = Extent::new(8 << 20, 4096);
    let head = server.store.head();
    assert!(server.store.begin_write(head, other));
    let _ = server.store.wrote(other);
    server.store.flush_now().unwrap();
    let (layer, hole) = server.store.take_punch().expect("there is a hole to be made");
    assert_eq!(hole, Extent::new(0, 4096));
    let mut payload = server.pool.alloc(4096, 4096).unwrap();
    payload.write_at(0, &[9; 4096]);
    let header =
        Header { payload: 4096, ..Header::request(OpCode::Write, 1, 0, 4096, Generation::default()) };
    let id = server.requests.add(ConnId(1), header, payload);
    server.start_job(id, Job::Write(hole));
    assert_eq!(server.parked, [id]);
    assert!(!server.requests.is_any_in_the_ring() && server.inputs.is_empty());
    server.store.punched(layer, hole, true);
    server.unpark();
    assert!(server.parked.is_empty());
    assert!(server.requests.is_any_in_the_ring() || !server.inputs.is_empty());
}

/// Nobody waits for it, and what it could not write is lost all the same.
#[test]
fn a_sync_that_nobody_asked_for_fails_the_replica_as_any_other() {
    let place = tempfile::tempdir().unwrap();
    let mut server = server(place.path());
    let (session, generation) = (Instance(1), Generation::from(1));
    let hello = SessionHello { generation, instance: session, session, queue: 0, queues: 1 };
    server.inputs.push_back(Input::Hello { conn: ConnId(1), hello });
    server.run_machine();
    while !server.core.is_in_use() {
        let report = report(&mut server);
        server.reported(report);
    }
    server.flusher.quiet_at = Some(0);
    server.pump();
    assert!(!server.flusher.is_idle() && !server.core.is_failed());
    let result = Err(io::Error::from_raw_os_error(libc::EIO));
    let token = Token::new(OWNER, kind::SYNC, 0, 0);
    server.sync_done(&Completion { token, result, more: false, payload: None, accepted: None });
    server.run_machine();
    assert!(server.core.is_failed());
}

/// What the worker says next.
fn report(server: &mut Server) -> Report {
    loop {
        match server.worker.next_report() {
            Some(report) => return report,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// An image of the first block of the snapshot "one" comes.
fn put(server: &mut Server) -> RequestId {
    let trailer = [&[BlockState::Data as u8][..], b"one"].concat();
    let len = 4096 + u32::try_from(trailer.len()).unwrap();
    let mut payload = server.pool.alloc(len, 4096).unwrap();
    payload.write_at(0, &[9; 4096]);
    payload.write_at(4096, &trailer);
    let header = Header::request(OpCode::PutLayer, 1, 0, 4096, Generation::default());
    let id = server.requests.add(ConnId(1), Header { payload: len, ..header }, payload);
    server.start_job(id, Job::PutLayer { range: Extent::new(0, 4096), trailer: len - 4096 });
    id
}

/// A fold looks at its layers as if nobody wrote them.
#[test]
fn a_fold_and_an_image_of_its_layer_do_not_begin_beside_each_other() {
    let place = tempfile::tempdir().unwrap();
    create(place.path(), &[7; 4096]);
    with_a_mark(place.path());
    let mut server = Server::start(options(place.path())).unwrap();
    // What is on its way stays there until the ring is asked.
    server.in_memory = false;
    server.begin_fold(PersistId(1), "one".into(), None);
    let waits = put(&mut server);
    assert_eq!(server.folder.waiting, [waits], "where the fold begins may have been read already");
    server.folder.waiting.clear();
    server.folder.forgotten = true;
    server.folder.beginning = None;
    put(&mut server);
    assert!(server.folder.waiting.is_empty() && server.requests.is_any_in_the_ring());
    let begun = report(&mut server);
    server.reported(begun);
    let run = server.folder.run.as_ref().expect("it has begun");
    assert!(run.fold.is_broken_off(), "it does not wait for the image");
}

/// Whoever sends a rotten image has lost both blocks, and here the disk does not give one of them.
#[test]
fn a_block_that_cannot_be_read_costs_no_sound_one_beside_it() {
    let place = tempfile::tempdir().unwrap();
    create(place.path(), &[7; 8192]);
    with_a_mark(place.path());
    let directory = place.path().join("replica");
    SnapshotLayer::open(&directory, "one").unwrap().hash(&Pace::new(0), &mut |_| {}).unwrap();
    let mut server = Server::start(options(place.path())).unwrap();
    server.in_memory = false;
    let trailer = [&[BlockState::Absent as u8; 2][..], b"one"].concat();
    let len = u32::try_from(trailer.len()).unwrap();
    let mut payload = server.pool.alloc(len, 1).unwrap();
    payload.write_at(0, &trailer);
    let header = Header::request(OpCode::PutLayer, 1, 0, 8192, Generation::default());
    let id = server.requests.add(ConnId(1), Header { flags: flags::VERIFY, payload: len, ..header }, payload);
    server.folder.forgotten = true;
    server.start_job(id, Job::PutLayer { range: Extent::new(0, 8192), trailer: len });
    while server.inputs.is_empty() {
        server.ring.turn(Some(Duration::from_secs(5))).unwrap();
        while let Some(mut c) = server.ring.next() {
            // The first read is of both, then they are read one by one.
            let both = c.result.as_ref().is_ok_and(|n| *n == 8192);
            if c.token.kind == kind::READ && (both || c.token.slot == 1) {
                c.result = Err(io::Error::from_raw_os_error(libc::EIO));
            }
            match c.token.kind {
                kind::READ => server.read_done(c),
                _ => server.put_op_done(&c),
            }
        }
    }
    let Some(Input::Done { result, .. }) = server.inputs.pop_front() else { panic!("it has ended") };
    assert_eq!(result.map(|done| done.aux), Ok(1));
    let left = std::fs::read(directory.join("volume-snap-one.img")).unwrap();
    assert!(left[..4096] == [7; 4096] && left[4096..8192] == [0; 4096]);
}
