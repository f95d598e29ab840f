//! A replica that was out, over real sockets and files: what the other one remembers, what is compared, what is copied.

mod serve_client;

use std::os::unix::net::UnixStream;

use lh_block::{Epoch, Extent, Instance};
use lh_wire::{
    BlockState, ChainOp, Control, Header, Keep, LayerDigest, LayerTrailer, MapPage, OpCode, ReplicaState,
    Status, block_hash, differing,
};
use serve_client::{Client, MIB, SIZE, Server, generation, pattern, places, session};

fn epoch(counter: u64, members: &[&str]) -> Epoch {
    let members = members.iter().map(|m| (*m).to_owned()).collect();
    Epoch {
        generation: generation(1),
        counter,
        members,
        id: Instance(counter.into()),
        after: None,
        round: None,
    }
}

fn ok(c: &mut Client<UnixStream>, control: &Control) {
    let answer = c.control(control);
    assert_eq!(answer.status(), Status::Ok, "{control:?}: {}", String::from_utf8_lossy(&answer.payload));
}

fn set_epoch(c: &mut Client<UnixStream>, epoch: Epoch, out: &[&str]) {
    ok(c, &Control::SetEpoch { epoch, out: out.iter().map(|m| (*m).to_owned()).collect() });
}

fn snapshot(c: &mut Client<UnixStream>, n: u128, name: &str) {
    let (id, labels) = (Instance(n), Default::default());
    let op = ChainOp::Snapshot { name: name.into(), user_created: true, created: String::new(), labels };
    ok(c, &Control::Prepare { id, op });
    ok(c, &Control::Commit { id });
    ok(c, &Control::Settled { snapshot: name.into() });
}

fn page(c: &mut Client<UnixStream>, control: &Control) -> Option<MapPage> {
    let answer = c.control(control);
    (answer.status() == Status::Ok).then(|| serde_json::from_slice(&answer.payload).unwrap())
}

fn missed(c: &mut Client<UnixStream>, base: Epoch) -> Option<Vec<Extent>> {
    page(c, &Control::Missed { replica: "t".into(), base, from: 0 }).map(|p| p.ranges)
}

fn layer_map(c: &mut Client<UnixStream>, layer: &str) -> Vec<Extent> {
    page(c, &Control::LayerMap { layer: layer.into(), from: 0, recorded: false }).unwrap().ranges
}

/// Makes a range of a layer the same; how many bytes were sent.
fn equalise(s: &mut Client<UnixStream>, t: &mut Client<UnixStream>, layer: &str, range: Extent) -> u64 {
    let length = u32::try_from(range.len).unwrap();
    let header = s.header(OpCode::DigestLayer, range.offset, length);
    let digest = s.ask(header, layer.as_bytes());
    assert_eq!(digest.status(), Status::Ok);
    assert_eq!(LayerDigest::decode(&digest.payload, length).unwrap().layer, layer);
    let header = t.header(OpCode::CompareLayer, range.offset, length);
    let bits = t.ask(header, &digest.payload);
    assert_eq!(bits.status(), Status::Ok);
    let mut sent = 0;
    for part in differing(range, bits.header.aux) {
        let length = u32::try_from(part.len).unwrap();
        let header = s.header(OpCode::ReadLayer, part.offset, length);
        let image = s.ask(header, layer.as_bytes());
        let header = t.header(OpCode::PutLayer, part.offset, length);
        let put = t.ask(Header { aux: image.header.aux, ..header }, &image.payload);
        assert_eq!(put.status(), Status::Ok);
        assert_eq!(u64::from(put.header.aux) * 4096, part.len, "only what differs was sent");
        sent += part.len;
    }
    sent
}

fn equal(s: &mut Client<UnixStream>, t: &mut Client<UnixStream>) {
    for n in 0..SIZE / u64::from(MIB) {
        let at = n * u64::from(MIB);
        assert!(s.read(at, MIB) == t.read(at, MIB), "they differ after {at}");
    }
}

fn names(state: &ReplicaState) -> Vec<&str> {
    state.chain.iter().map(|l| l.name.as_str()).collect()
}

#[test]
fn what_was_written_meanwhile_is_all_that_travels() {
    for place in places() {
        let (from, to) = (place.path().join("from"), place.path().join("to"));
        [&from, &to].into_iter().for_each(|p| std::fs::create_dir(p).unwrap());
        let (source, mut target) = (Server::start(&from), Server::start(&to));
        let (mut s, mut t) = (session(&source.socket, 1, 1), session(&target.socket, 1, 1));
        for c in [&mut s, &mut t] {
            set_epoch(c, epoch(1, &["s", "t"]), &[]);
            c.write(0, &pattern(1, MIB as usize));
            snapshot(c, 1, "old");
            c.write(8192, &pattern(2, 65536));
            c.op(OpCode::WriteZeroes, 0, 4096);
        }
        set_epoch(&mut s, epoch(2, &["s"]), &["t"]);
        s.write(16384, &pattern(3, 4096));
        snapshot(&mut s, 2, "new");
        s.write(3 << 20, &pattern(4, 4096));
        s.op(OpCode::Unmap, 65536, 4096);
        let marks = missed(&mut s, epoch(1, &["s", "t"])).unwrap();
        assert!(marks.iter().any(|m| m.contains(Extent::new(3 << 20, 4096))));
        assert_eq!(missed(&mut s, epoch(1, &["t"])), None, "another epoch");

        let state = s.state();
        let keep = Keep { head: "new".into(), unsure: Vec::new() };
        ok(&mut t, &Control::RebuildBegin { size: SIZE, chain: state.chain.clone(), keep: Some(keep) });
        let begun = t.state();
        assert_eq!((names(&begun), begun.unsettled.clone()), (names(&state), vec!["new".to_owned()]));
        assert!(begun.rebuilding && begun.kept.is_some() && begun.epoch == Some(epoch(1, &["s", "t"])));
        assert_eq!(layer_map(&mut t, "old"), [Extent::new(0, MIB.into())], "it stays");
        assert_eq!(layer_map(&mut t, ""), []);

        // It is interrupted, and goes on with what it has.
        drop(t);
        target.stop();
        target = Server::start(&to);
        t = session(&target.socket, 1, 2);
        assert_eq!((t.state().kept, t.state().rebuilding), (begun.kept, true));
        let mut sent = 0;
        for layer in ["new", ""] {
            for mark in &marks {
                let windows = (mark.offset..mark.end()).step_by(128 << 10);
                sent += windows
                    .map(|at| Extent::new(at, (mark.end() - at).min(128 << 10)))
                    .map(|range| equalise(&mut s, &mut t, layer, range))
                    .sum::<u64>();
            }
        }
        assert_eq!(sent, 3 * 4096, "one block in the snapshot, two in the head");
        set_epoch(&mut t, epoch(3, &["s", "t"]), &[]);
        let filled = t.state();
        assert!(filled.rebuilding && filled.epoch == Some(epoch(1, &["s", "t"])), "one goes with the other");
        ok(&mut t, &Control::RebuildEnd);
        let done = t.state();
        assert!(!done.rebuilding && done.kept.is_none());
        assert_eq!(done.epoch, Some(epoch(3, &["s", "t"])));
        equal(&mut s, &mut t);
        set_epoch(&mut s, epoch(3, &["s", "t"]), &[]);
        assert_eq!(missed(&mut s, epoch(1, &["s", "t"])), None, "nobody is out");
    }
}

/// A process that has not seen the last writes may lack some of a snapshot, which a repair brings. What clients have zeroed meanwhile
/// stays zero, over nothing, too; once nothing is in doubt nothing is marked over nothing.
#[test]
fn what_is_repaired_below_does_not_show_where_zeroes_were_written() {
    let places = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let mut source = Server::start(places[0].path());
    let mut target = Server::start(places[1].path());
    let (mut s, mut t) = (session(&source.socket, 1, 1), session(&target.socket, 1, 1));
    s.write(0, &pattern(1, 65536));
    [&mut s, &mut t].into_iter().for_each(|c| snapshot(c, 1, "a"));
    drop((s, t));
    source.stop();
    target.stop();
    source = Server::start(places[0].path());
    target = Server::start(places[1].path());
    let (mut s, mut t) = (session(&source.socket, 2, 2), session(&target.socket, 2, 2));
    for c in [&mut s, &mut t] {
        assert!(!c.state().lived);
        assert_eq!(c.op(OpCode::WriteZeroes, 8192, 4096).status(), Status::Ok);
        assert_eq!(c.op(OpCode::Unmap, 16384, 4096).status(), Status::Ok);
    }
    equalise(&mut s, &mut t, "a", Extent::new(0, 65536));
    for at in [8192, 16384] {
        assert!(t.read(at, 4096) == vec![0; 4096], "at {at}");
    }
    equal(&mut s, &mut t);
    ok(&mut t, &Control::Resolved);
    let before = layer_map(&mut t, "");
    assert_eq!(t.op(OpCode::Unmap, 1 << 20, 4096).status(), Status::Ok);
    assert_eq!(layer_map(&mut t, ""), before);
}

#[test]
fn what_is_missed_outlives_the_process_of_who_remembers_it() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 1, 1);
    set_epoch(&mut c, epoch(1, &["s", "t"]), &[]);
    set_epoch(&mut c, epoch(2, &["s"]), &["t"]);
    c.write(8192, &pattern(1, 4096));
    c.op(OpCode::Flush, 0, 0);
    ok(&mut c, &Control::Close);
    drop(c);
    server.stop();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 2, 2);
    let marks = missed(&mut c, epoch(1, &["s", "t"]));
    assert_eq!(marks, Some(vec![Extent::new(8192, 4096)]), "closed cleanly: to the block");
    c.write(4 << 20, &pattern(1, 4096));
    drop(c);
    server.stop();
    let server = Server::start(place.path());
    let marks = missed(&mut session(&server.socket, 3, 3), epoch(1, &["s", "t"])).unwrap();
    assert!(marks.iter().any(|m| m.contains(Extent::new(4 << 20, 4096))), "not closed: the chunk counts");
    assert!(marks.iter().any(|m| m.contains(Extent::new(8192, 4096))));
    server.stop();
    std::fs::remove_file(place.path().join("replica/engine/missed")).unwrap();
    let server = Server::start(place.path());
    assert_eq!(missed(&mut session(&server.socket, 4, 4), epoch(1, &["s", "t"])), None, "lost is lost");
}

/// As databases' pages and ext4's directories do. The crc32c of all such blocks is the same.
#[test]
fn blocks_that_end_with_their_own_checksum_are_made_the_same() {
    let sealed = |byte| {
        let mut block = vec![byte; 4092];
        block.extend(crc32c::crc32c(&block).to_le_bytes());
        block
    };
    let places = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let servers = places.each_ref().map(|place| Server::start(place.path()));
    let [mut source, mut target] = servers.each_ref().map(|server| session(&server.socket, 1, 1));
    for n in 0..8 {
        source.write(n * 4096, &sealed(1));
        target.write(n * 4096, &sealed(if n == 5 { 2 } else { 1 }));
    }
    assert_eq!(equalise(&mut source, &mut target, "", Extent::new(0, 8 * 4096)), 4096);
    assert_eq!(target.read(5 * 4096, 4096), sealed(1));
}

#[test]
fn digests_tell_data_zeroes_and_nothing_apart() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 1, 1);
    c.write(0, &pattern(1, 8192));
    snapshot(&mut c, 1, "s");
    c.write(0, &pattern(2, 4096));
    c.op(OpCode::WriteZeroes, 4096, 4096);
    let header = c.header(OpCode::DigestLayer, 0, 16384);
    let answer = c.ask(header, b"");
    let digest = LayerDigest::decode(&answer.payload, 16384).unwrap();
    let blocks: Vec<_> = digest.blocks().collect();
    let hash = block_hash(digest.seed, [&pattern(2, 4096)[..]].into_iter());
    assert_eq!(blocks[0], (BlockState::Data, Some(hash)));
    let again = c.ask(header, b"");
    assert_ne!(LayerDigest::decode(&again.payload, 16384).unwrap().seed, digest.seed);
    assert_eq!((blocks[1].0, blocks[2].0), (BlockState::Zero, BlockState::Absent));
    let header = c.header(OpCode::CompareLayer, 0, 16384);
    assert_eq!(c.ask(header, b"nonsense").status(), Status::Invalid);
    let header = c.header(OpCode::DigestLayer, 0, 4096);
    assert_eq!(c.ask(header, b"unknown").status(), Status::Refused);
}

fn fold_away(c: &mut Client<UnixStream>, name: &str) {
    ok(c, &Control::Fold { name: name.into(), bytes_per_second: None });
    while c.state().chain.iter().any(|layer| layer.name == name) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

fn states(c: &mut Client<UnixStream>, op: OpCode, length: u32) -> Vec<BlockState> {
    let header = c.header(op, 0, length);
    let answer = c.ask(header, b"");
    if op == OpCode::DigestLayer {
        return LayerDigest::decode(&answer.payload, length)
            .unwrap()
            .blocks()
            .map(|(state, _)| state)
            .collect();
    }
    let data = u32::try_from(answer.payload.len()).unwrap() - answer.header.aux;
    LayerTrailer::decode(&answer.payload[data as usize..], length, data).unwrap().states().collect()
}

/// Zeroes find data below on a replica that has not folded it away yet, and nothing on one that has.
#[test]
fn a_fold_before_zeroes_or_after_them_is_no_difference() {
    for stands_on_another in [false, true] {
        let places = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let servers = places.each_ref().map(|place| Server::start(place.path()));
        let [mut early, mut late] = servers.each_ref().map(|server| session(&server.socket, 1, 1));
        for c in [&mut early, &mut late] {
            if stands_on_another {
                c.write(8 * 4096, &pattern(1, 4096));
                snapshot(c, 1, "stays");
            }
            c.write(0, &pattern(2, 8192));
            snapshot(c, 2, "goes");
            c.write(4096, &pattern(3, 8192));
            let id = Instance(3);
            ok(c, &Control::Prepare { id, op: ChainOp::MarkRemoved { name: "goes".into() } });
            ok(c, &Control::Commit { id });
        }
        fold_away(&mut early, "goes");
        for c in [&mut early, &mut late] {
            assert_eq!(c.op(OpCode::WriteZeroes, 0, 8192).status(), Status::Ok);
        }
        fold_away(&mut late, "goes");
        let (absent, zero, data) = (BlockState::Absent, BlockState::Zero, BlockState::Data);
        assert_eq!(states(&mut early, OpCode::ReadLayer, 4 * 4096), [absent, absent, data, absent]);
        assert_eq!(states(&mut late, OpCode::ReadLayer, 4 * 4096), [zero, zero, data, absent]);
        for c in [&mut early, &mut late] {
            assert_eq!(states(c, OpCode::DigestLayer, 4 * 4096), [absent, absent, data, absent]);
        }
        assert_eq!(equalise(&mut early, &mut late, "", Extent::new(0, 16 * 4096)), 0);
        assert_eq!(equalise(&mut late, &mut early, "", Extent::new(0, 16 * 4096)), 0);
        // Where something is held below they are what hides it.
        if stands_on_another {
            assert_eq!(late.op(OpCode::WriteZeroes, 8 * 4096, 4096).status(), Status::Ok);
            assert_eq!(states(&mut late, OpCode::DigestLayer, 9 * 4096)[8], zero);
        }
    }
}
