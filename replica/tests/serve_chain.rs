//! Snapshots, zeroes over them, and rebuilds, over real sockets and files.

mod serve_client;

use std::os::unix::net::UnixStream;
use std::path::Path;

use lh_block::{Extent, Instance};
use lh_wire::{BlockState, ChainOp, Control, Header, LayerTrailer, OpCode, Status};
use replica::serve::{Mode, ServeError};
use serve_client::{Client, Killable, MIB, SIZE, Server, pattern, places, serve_if_child, session};

fn snapshot(name: &str) -> ChainOp {
    ChainOp::Snapshot {
        name: name.into(),
        user_created: true,
        created: "2026-01-01T00:00:00Z".into(),
        labels: Default::default(),
    }
}

fn take_snapshot(c: &mut Client<UnixStream>, id: u128, name: &str) {
    let id = Instance(id);
    assert_eq!(c.control(&Control::Prepare { id, op: snapshot(name) }).status(), Status::Ok);
    assert_eq!(c.control(&Control::Commit { id }).status(), Status::Ok);
}

/// Data, states and trailer's length of a layer's range.
fn layer(c: &mut Client<UnixStream>, name: &str, range: Extent) -> (Vec<u8>, Vec<BlockState>) {
    let length = range.len.try_into().unwrap();
    let header = c.header(OpCode::ReadLayer, range.offset, length);
    let answer = c.ask(header, name.as_bytes());
    assert_eq!(answer.status(), Status::Ok);
    let (data, trailer) = answer.payload.split_at(answer.payload.len() - answer.header.aux as usize);
    let trailer = LayerTrailer::decode(trailer, length, data.len().try_into().unwrap()).unwrap();
    (data.to_vec(), trailer.states().collect())
}

fn says_rebuilding(place: &Path) -> bool {
    let meta = std::fs::read_to_string(place.join("replica/volume.meta")).unwrap();
    meta.contains("\"Rebuilding\":true")
}

#[test]
fn a_snapshot_keeps_its_bytes() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        let (old, new) = (pattern(1, 16384), pattern(2, 4096));
        assert_eq!(c.write(0, &old), Status::Ok);
        take_snapshot(&mut c, 1, "s1");
        assert_eq!(c.write(4096, &new), Status::Ok);
        assert_eq!(c.read(0, 16384), [&old[..4096], &new, &old[8192..]].concat());
        assert_eq!(layer(&mut c, "s1", Extent::new(0, 16384)).0, old);
        use BlockState::{Absent, Data};
        let head = layer(&mut c, "", Extent::new(0, 16384));
        assert_eq!(head, (new.clone(), vec![Absent, Data, Absent, Absent]));
        let state = c.state();
        assert_eq!(state.chain.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), ["s1", ""]);
        assert_eq!((state.committed, state.prepared), (Some(Instance(1)), None));
        assert_eq!(state.unsettled, ["s1"]);
        assert_eq!(c.control(&Control::Settled { snapshot: "s1".into() }).status(), Status::Ok);
        assert!(c.state().unsettled.is_empty());
        server.stop();
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 2, 2);
        assert_eq!(c.read(0, 16384), [&old[..4096], &new, &old[8192..]].concat());
        assert_eq!(layer(&mut c, "s1", Extent::new(0, 16384)).0, old);
    }
}

/// Not a test by itself: what [`Killable`] runs.
#[test]
fn child() {
    serve_if_child();
}

/// All replicas of a host would fail at once.
#[test]
fn a_snapshot_for_which_no_files_can_be_opened_is_refused_and_nothing_else_is() {
    for place in places() {
        let server = Killable::start(place.path(), "child");
        let mut c = session(&server.socket, 1, 1);
        assert_eq!(c.write(0, &pattern(1, 4096)), Status::Ok);
        take_snapshot(&mut c, 1, "s1");
        for more in 0..20 {
            server.may_open(more);
            let id = Instance(2 + more as u128);
            let asked = c.control(&Control::Prepare { id, op: snapshot("s2") });
            if asked.status() == Status::Ok {
                assert!(more > 3, "a head needs more than {more} files");
                assert_eq!(c.control(&Control::Abort { id }).status(), Status::Ok);
            } else {
                assert_eq!(asked.status(), Status::Refused, "with {more} files more");
                let why = String::from_utf8_lossy(&asked.payload).into_owned();
                assert!(why.contains("raise the limit of open files"), "{why}");
            }
            server.may_open(more.max(6));
            assert_eq!(c.write(4096, &pattern(2, 4096)), Status::Ok);
            assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok, "with {more} files more");
        }
        server.may_open(100);
        take_snapshot(&mut c, 99, "s2");
        assert_eq!(c.read(0, 4096), pattern(1, 4096));
    }
}

/// What comes while the heads are changed waits for that, is answered, and is none of the snapshot's.
#[test]
fn what_comes_behind_a_snapshot_waits_for_the_new_head() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        let (old, new) = (pattern(1, 4096), pattern(2, 4096));
        assert_eq!(c.write(0, &old), Status::Ok);
        let id = Instance(1);
        assert_eq!(c.control(&Control::Prepare { id, op: snapshot("s1") }).status(), Status::Ok);
        let commit = c.header(OpCode::Control, 0, 0);
        let mut all = c.encode(commit, &serde_json::to_vec(&Control::Commit { id }).unwrap());
        let write = c.header(OpCode::Write, 0, 4096);
        all.extend(c.encode(write, &new));
        std::io::Write::write_all(&mut c.stream, &all).unwrap();
        let mut tags = [c.receive(), c.receive()].map(|answer| {
            assert_eq!(answer.status(), Status::Ok);
            answer.header.tag
        });
        tags.sort_unstable();
        assert_eq!(tags, [commit.tag, write.tag]);
        assert_eq!(c.read(0, 4096), new);
        assert_eq!(layer(&mut c, "s1", Extent::new(0, 4096)).0, old);
    }
}

#[test]
fn a_snapshot_is_refused_beside_writes_and_without_preparation() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 1, 1);
    assert_eq!(c.control(&Control::Commit { id: Instance(1) }).status(), Status::Refused);
    take_snapshot(&mut c, 1, "s1");
    let taken = c.control(&Control::Prepare { id: Instance(2), op: snapshot("s1") });
    assert_eq!(taken.status(), Status::Refused);
    assert!(String::from_utf8(taken.payload).unwrap().contains("s1"));
    let id = Instance(3);
    assert_eq!(c.control(&Control::Prepare { id, op: snapshot("s2") }).status(), Status::Ok);
    assert_eq!(c.state().prepared, Some((id, snapshot("s2"))));
    assert_eq!(c.control(&Control::Abort { id }).status(), Status::Ok);
    assert_eq!(c.state().prepared, None);
    assert_eq!(c.control(&Control::Commit { id }).status(), Status::Refused);
    let id = Instance(4);
    let op = ChainOp::MarkRemoved { name: "s1".into() };
    assert_eq!(c.control(&Control::Prepare { id, op }).status(), Status::Ok);
    assert_eq!(c.control(&Control::Commit { id }).status(), Status::Ok);
    assert!(c.state().chain[0].removed);
}

#[test]
fn zeroes_hide_a_snapshots_data_for_ever() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        let data = pattern(1, MIB as usize);
        c.write(0, &data);
        take_snapshot(&mut c, 1, "s1");
        let over = pattern(2, 8192);
        c.write(8192, &over);
        let mut expected = data.clone();
        expected[8192..16384].copy_from_slice(&over);
        for (op, offset) in [(OpCode::WriteZeroes, 4096_u32), (OpCode::Unmap, 65536)] {
            assert_eq!(c.op(op, offset.into(), 8192).status(), Status::Ok);
            expected[offset as usize..offset as usize + 8192].fill(0);
        }
        assert_eq!(c.read(0, MIB), expected);
        assert!(says_rebuilding(place.path()), "the files alone are not the volume");
        assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
        // A second flush lets holes be punched; writes over them come back at once or after a flush, but come back.
        assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
        assert_eq!(c.write(8192, &over[..4096]), Status::Ok);
        expected[8192..12288].copy_from_slice(&over[..4096]);
        assert_eq!(c.read(0, MIB), expected);
        assert_eq!(layer(&mut c, "s1", Extent::new(0, MIB.into())).0, data);
        server.stop();
        let server = Server::start(place.path());
        assert_eq!(session(&server.socket, 2, 2).read(0, MIB), expected);
    }
}

#[test]
fn zeroes_after_a_clean_close_are_announced_again() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 1, 1);
    let data = pattern(1, 8192);
    c.write(0, &data);
    take_snapshot(&mut c, 1, "s1");
    c.op(OpCode::WriteZeroes, 0, 8192);
    assert!(says_rebuilding(place.path()));
    c.write(0, &data);
    for _ in 0..3 {
        c.op(OpCode::Flush, 0, 0);
    }
    assert_eq!(c.control(&Control::Close).status(), Status::Ok);
    assert!(!says_rebuilding(place.path()), "no mark is left");
    let mut c = session(&server.socket, 1, 2);
    assert_eq!(c.op(OpCode::WriteZeroes, 0, 4096).status(), Status::Ok);
    assert!(says_rebuilding(place.path()));
    assert_eq!(c.read(0, 8192), [&[0; 4096], &data[4096..]].concat());
}

/// Somebody takes the directory's files away: with the first that has to be made anew the replica has failed, whatever it is for.
#[test]
fn a_replica_that_cannot_note_its_zeroes_fails() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        assert_eq!(c.write(0, &pattern(1, 8192)), Status::Ok);
        take_snapshot(&mut c, 1, "s1");
        let engine = place.path().join("replica/engine");
        let away = place.path().join("away");
        std::fs::rename(&engine, &away).unwrap();
        assert_eq!(c.op(OpCode::WriteZeroes, 0, 4096).status(), Status::Io);
        assert_eq!(server.status.snapshot().mode, Mode::Failed);
        std::fs::rename(&away, &engine).unwrap();
        assert_eq!(c.op(OpCode::WriteZeroes, 0, 4096).status(), Status::Io, "it is not tried again");
        drop(c);
        let ended = server.ended();
        assert!(matches!(ended, Err(ServeError::Failed { full: false, .. })), "{ended:?}");
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 2, 2);
        assert_eq!(c.read(0, 8192), pattern(1, 8192));
        assert_eq!(c.op(OpCode::WriteZeroes, 0, 4096).status(), Status::Ok);
        assert_eq!(c.read(0, 8192), [&[0; 4096], &pattern(1, 8192)[4096..]].concat());
    }
}

#[test]
fn a_replica_is_rebuilt_layer_by_layer() {
    for place in places() {
        let (from, to) = (place.path().join("from"), place.path().join("to"));
        [&from, &to].into_iter().for_each(|p| std::fs::create_dir(p).unwrap());
        let (source, target) = (Server::start(&from), Server::start(&to));
        let mut s = session(&source.socket, 1, 1);
        s.write(0, &pattern(1, MIB as usize));
        take_snapshot(&mut s, 1, "s1");
        s.write(MIB.into(), &pattern(2, MIB as usize));
        s.op(OpCode::WriteZeroes, 8192, 65536);

        let mut t = session(&target.socket, 1, 1);
        t.write(3 << 20, &pattern(3, 4096));
        let state = s.state();
        let begin = Control::RebuildBegin { size: SIZE, chain: state.chain.clone(), keep: None };
        assert_eq!(t.control(&begin).status(), Status::Ok);
        let begun = t.state();
        assert!(begun.rebuilding);
        let names = |s: &lh_wire::ReplicaState| s.chain.iter().map(|l| l.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&begun), names(&state));
        assert_eq!(t.read(3 << 20, 4096), [0; 4096], "everything it had is gone");
        for name in names(&state) {
            for n in 0..4 {
                let header = s.header(OpCode::ReadLayer, n * u64::from(MIB), MIB);
                let image = s.ask(header, name.as_bytes());
                let header = t.header(OpCode::PutLayer, n * u64::from(MIB), MIB);
                let put = t.ask(Header { aux: image.header.aux, ..header }, &image.payload);
                assert_eq!(put.status(), Status::Ok);
                // Once more changes nothing.
                let header = t.header(OpCode::PutLayer, n * u64::from(MIB), MIB);
                let put = t.ask(Header { aux: image.header.aux, ..header }, &image.payload);
                assert_eq!((put.status(), put.header.aux), (Status::Ok, 0));
            }
        }
        assert_eq!(t.control(&Control::RebuildEnd).status(), Status::Ok);
        let done = t.state();
        assert!(!done.rebuilding && done.lived);
        for n in 0..4 {
            let offset = n * u64::from(MIB);
            assert_eq!(t.read(offset, MIB), s.read(offset, MIB));
            let range = Extent::new(offset, MIB.into());
            assert_eq!(layer(&mut t, "s1", range), layer(&mut s, "s1", range));
        }
    }
}

#[test]
fn a_rebuild_that_was_broken_off_is_remembered() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 1, 1);
    let chain = c.state().chain;
    assert_eq!(c.control(&Control::RebuildBegin { size: SIZE, chain, keep: None }).status(), Status::Ok);
    server.stop();
    let server = Server::start(place.path());
    assert!(session(&server.socket, 2, 2).state().rebuilding);
}
