//! Records that had to wait, of a replica that has failed meanwhile.

use crossbeam_channel::bounded;

use super::*;
use crate::serve::{Address, Options};
use crate::store::{CreateOptions, Directory};

const SIZE: u64 = 64 << 20;

/// A server of a directory that is in use.
fn server(place: &std::path::Path) -> Server {
    let (directory, lock_wait) = (place.join("replica"), Duration::from_secs(5));
    let create = CreateOptions { size: SIZE, backing: None, lock_wait };
    Directory::create(&directory, &create).unwrap().0.begin_use().unwrap();
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
