//! What a server does about what goes wrong inside it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crossbeam_channel::bounded;
use lh_block::Extent;
use lh_ring::Token;
use lh_wire::{BlockState, Header, LayerDigest, OpCode};

use super::*;
use crate::serve::core::ConnId;
use crate::serve::request::Digesting;
use crate::serve::{Address, Options};
use crate::store::{CreateOptions, Directory};

const SIZE: u64 = 64 << 20;

/// A server of a directory that is in use, and has this at its beginning.
fn server_of(place: &Path, bytes: &[u8]) -> Server {
    let (directory, lock_wait) = (place.join("replica"), Duration::from_secs(5));
    let create = CreateOptions { size: SIZE, backing: None, lock_wait };
    Directory::create(&directory, &create).unwrap().0.begin_use().unwrap();
    head(place).write_all_at(bytes, 0).unwrap();
    Server::start(Options {
        directory,
        size: None,
        lock_wait,
        volume: "demo".into(),
        replica: "demo-r-0a1b2c3d".into(),
        key: [7; 32],
        map_key: [8; 32],
        listen: Address::Unix(place.join("socket")),
        status: Status::default(),
    })
    .unwrap()
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
