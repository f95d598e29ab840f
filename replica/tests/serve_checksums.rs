//! Checksums on record over real sockets and files: taken, compared with what is read, kept over a repair.

mod serve_client;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lh_block::{Extent, Instance};
use lh_wire::{
    BlockState, ChainOp, Control, Header, Keep, LayerDigest, LayerInfo, MERGED, MapPage, OpCode, Status,
    Verified, flags,
};
use replica::store::LayerChecksums;
use serve_client::{Client, Killable, MIB, SIZE, Server, pattern, places, serve_if_child, session};

const BLOCK: u64 = 4096;

fn ok(c: &mut Client<UnixStream>, control: &Control) {
    let answer = c.control(control);
    assert_eq!(answer.status(), Status::Ok, "{control:?}: {}", String::from_utf8_lossy(&answer.payload));
}

/// Everything is flushed and no chunk is marked, on the disk, too: checksums count.
fn settle(c: &mut Client<UnixStream>, directory: &Path) {
    assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
    assert_eq!(c.op(OpCode::ClearIntent, 0, u32::try_from(SIZE).unwrap()).status(), Status::Ok);
    let began = Instant::now();
    // Marks are taken back a while later. Each page of the file ends with four bytes that are no marks.
    let is_marked = |file: &[u8]| file[512..].chunks(512).any(|page| page[..508].iter().any(|b| *b != 0));
    while is_marked(&std::fs::read(directory.join("engine/intent")).unwrap()) {
        assert!(began.elapsed() < Duration::from_secs(20), "the marks stay");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn verify(c: &mut Client<UnixStream>, block: u64) -> Verified {
    let header = c.header(OpCode::VerifyLayer, block * BLOCK, 4096);
    let answer = c.ask(header, b"s");
    assert_eq!(answer.status(), Status::Ok);
    Verified::from_bits(answer.header.aux)
}

fn checked(c: &mut Client<UnixStream>, op: OpCode, layer: &[u8]) -> (Status, Vec<u8>, u32) {
    let header = c.header(op, 0, MIB);
    let answer = c.ask(Header { flags: flags::VERIFY, ..header }, layer);
    (answer.status(), answer.payload, answer.header.aux)
}

/// Changes the layer's file as a disk would: the checksums still count for it.
fn change(directory: &Path, change: impl FnOnce(&File) -> std::io::Result<()>) {
    let file = directory.join("volume-snap-s.img");
    let file = Arc::new(File::options().read(true).write(true).open(file).unwrap());
    let mut sums = LayerChecksums::open(directory, &file).expect("checksums");
    // Times of files go by ticks: within the one of the last change this one would not show.
    std::thread::sleep(Duration::from_millis(20));
    change(&file).unwrap();
    file.sync_all().unwrap();
    assert!(!sums.are_of(&file));
    sums.rebind().unwrap();
}

fn rot(directory: &Path, block: u64) {
    change(directory, |file| file.write_all_at(&[0xee; 100], block * BLOCK + 9));
}

fn lose(directory: &Path, block: u64) {
    change(directory, |file| lh_ring::sys::punch_hole(file, block * BLOCK, BLOCK));
}

const SOUND: Verified = Verified { rotten: 0, known: 1 };
const ROTTEN: Verified = Verified { rotten: 1, known: 1 };
const UNKNOWN: Verified = Verified { rotten: 0, known: 0 };

fn snapshot(c: &mut Client<UnixStream>, directory: &Path, name: &str) {
    let (id, labels) = (Instance(name.as_bytes()[0].into()), Default::default());
    let op = ChainOp::Snapshot { name: name.into(), user_created: true, created: String::new(), labels };
    ok(c, &Control::Prepare { id, op });
    ok(c, &Control::Commit { id });
    ok(c, &Control::Settled { snapshot: name.into() });
    settle(c, directory);
}

fn hash(c: &mut Client<UnixStream>, names: &[&str]) {
    let snapshots = names.iter().map(|name| (*name).to_owned()).collect();
    ok(c, &Control::Hash { snapshots, bytes_per_second: None });
    hashed(c);
}

/// Until everything is hashed that is to be.
fn hashed(c: &mut Client<UnixStream>) {
    let began = Instant::now();
    while c.state().hash.is_none_or(|hash| !hash.name.is_empty()) {
        assert!(began.elapsed() < Duration::from_secs(20), "it is hashed for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The header and payload of an image of a block of the layer `s`.
fn image(c: &mut Client<UnixStream>, block: u64, data: &[u8]) -> (Header, Vec<u8>) {
    let header = c.header(OpCode::PutLayer, block * BLOCK, 4096);
    let mut image = data.to_vec();
    image.extend_from_slice(&[1, b's']);
    (Header { aux: 2, ..header }, image)
}

/// A server with a snapshot `s` of a MiB of data, and its checksums. `None`: a tmpfs of Linux before 6.6 keeps no
/// attributes, and there is no id to bind checksums of blocks to.
fn sample(place: &Path) -> Option<(Server, Client<UnixStream>, Vec<u8>)> {
    let directory = place.join("replica");
    let server = Server::start(place);
    let mut c = session(&server.socket, 1, 1);
    let data = pattern(1, MIB as usize);
    assert_eq!(c.write(0, &data), Status::Ok);
    snapshot(&mut c, &directory, "s");
    assert_eq!(verify(&mut c, 3), UNKNOWN);
    hash(&mut c, &["s"]);
    let has_sums = |e: std::io::Result<std::fs::DirEntry>| {
        e.unwrap().file_name().as_encoded_bytes().starts_with(b"sums-")
    };
    if !std::fs::read_dir(directory.join("engine")).unwrap().any(has_sums) {
        assert!(place.starts_with("/dev/shm"), "{}: no block checksums", place.display());
        return None;
    }
    assert_eq!(verify(&mut c, 3), SOUND);
    Some((server, c, data))
}

#[test]
fn a_rotten_block_is_not_answered_and_its_repair_is_believed() {
    for place in places() {
        let directory = place.path().join("replica");
        let Some((server, mut c, data)) = sample(place.path()) else { continue };
        assert_eq!((verify(&mut c, 3), verify(&mut c, 300)), (SOUND, SOUND));
        rot(&directory, 3);
        assert_eq!((verify(&mut c, 3), verify(&mut c, 4)), (ROTTEN, SOUND));
        assert_eq!(checked(&mut c, OpCode::Read, b"").0, Status::Rotten);
        assert_eq!(checked(&mut c, OpCode::ReadLayer, b"s").0, Status::Rotten);
        let (status, _, bits) = checked(&mut c, OpCode::DigestLayer, b"s");
        assert_eq!((status, bits), (Status::Ok, 1), "the first of 32 parts");
        // Who does not ask gets what is there, as always.
        assert_ne!(c.read(3 * BLOCK, 4096), &data[3 * 4096..4 * 4096]);
        // What the process itself marks it knows: a checksum counts in a chunk that is being written, too.
        assert_eq!(c.write(SIZE / 2, &data[..4096]), Status::Ok);
        assert_eq!(c.write(8 * BLOCK, &data[..4096]), Status::Ok);
        assert_eq!(verify(&mut c, 3), ROTTEN);
        assert_eq!(checked(&mut c, OpCode::Read, b"").0, Status::Rotten);
        // The repair: what was there, put back. Two at once, and reads beside them.
        let images = [3, 4].map(|n: u64| {
            let from = usize::try_from(n * BLOCK).unwrap();
            image(&mut c, n, &data[from..from + 4096])
        });
        for (header, payload) in &images {
            c.send(*header, payload);
            let read = c.header(OpCode::Read, 0, MIB);
            c.send(Header { flags: flags::VERIFY, ..read }, b"");
        }
        for _ in 0..4 {
            c.receive();
        }
        settle(&mut c, &directory);
        assert_eq!((verify(&mut c, 3), verify(&mut c, 4)), (SOUND, SOUND), "checksums outlive a repair");
        let (status, bytes, _) = checked(&mut c, OpCode::Read, b"");
        assert!(status == Status::Ok && bytes[3 * 4096..4 * 4096] == data[3 * 4096..4 * 4096]);
        drop(c);
        server.stop();
    }
}

/// It was removed and folded while this replica was away, and another one was taken by its name: what this one holds is none of that.
#[test]
fn checksums_of_a_snapshot_are_none_of_another_one_by_its_name() {
    for place in places() {
        let Some((server, mut c, _)) = sample(place.path()) else { continue };
        let mut chain = c.state().chain;
        for known in [SOUND, UNKNOWN] {
            let keep = Some(Keep::default());
            ok(&mut c, &Control::RebuildBegin { size: SIZE, chain: chain.clone(), keep });
            assert_eq!(verify(&mut c, 3), known);
            "2027-01-01T00:00:00Z".clone_into(&mut chain[0].created);
        }
        drop(c);
        server.stop();
    }
}

/// The source has lost blocks, or has other bytes, and nobody else has them: what is sound here stays, whatever else the image changes.
#[test]
fn what_is_sound_here_outlives_a_rotten_image() {
    for place in places() {
        let directory = place.path().join("replica");
        let Some((server, mut c, data)) = sample(place.path()) else { continue };
        rot(&directory, 6);
        let lost = c.header(OpCode::PutLayer, 3 * BLOCK, 4096);
        let lost = c.ask(Header { aux: 2, flags: flags::VERIFY, ..lost }, &[BlockState::Absent as u8, b's']);
        assert_eq!((lost.status(), lost.header.aux), (Status::Ok, 0));
        assert_eq!(c.read(3 * BLOCK, 4096), &data[3 * 4096..4 * 4096]);
        assert_eq!((verify(&mut c, 3), verify(&mut c, 6)), (SOUND, ROTTEN), "nothing was changed");
        let (other, payload) = image(&mut c, 5, &[7; 4096]);
        assert_eq!(c.ask(Header { flags: flags::VERIFY, ..other }, &payload).status(), Status::Ok);
        assert_eq!((c.read(5 * BLOCK, 4096), verify(&mut c, 5)), (data[5 * 4096..6 * 4096].to_vec(), SOUND));
        // One is lost there, and the next one was never here.
        let (both, mut payload) = image(&mut c, 255, &data[..4096]);
        payload.splice(4096..4097, [BlockState::Absent as u8, BlockState::Data as u8]);
        let both = Header { length: 8192, aux: 3, flags: flags::VERIFY, ..both };
        assert_eq!(c.ask(both, &payload).status(), Status::Ok);
        assert_eq!(c.read(255 * BLOCK, 8192), [&data[255 * 4096..], &data[..4096]].concat());
        assert_eq!(verify(&mut c, 3), UNKNOWN, "what is taken for want of another makes checksums void");
        let (rotten, payload) = image(&mut c, 6, &[7; 4096]);
        assert_eq!(c.ask(Header { flags: flags::VERIFY, ..rotten }, &payload).status(), Status::Ok);
        assert_eq!(c.read(6 * BLOCK, 4096), [7; 4096]);
        drop(c);
        server.stop();
    }
}

/// Members whose folds may differ are made equal by what is read through all layers. What has rotted in one of them, or is lost there, is
/// not among that: it would hide what another member has sound.
#[test]
fn what_is_read_through_layers_is_without_the_rot_of_any() {
    for place in places() {
        let directory = place.path().join("replica");
        let Some((server, mut c, data)) = sample(place.path()) else { continue };
        assert_eq!(c.write(8 * BLOCK, &[8; 4096]), Status::Ok);
        snapshot(&mut c, &directory, "t");
        assert_eq!(c.write(5 * BLOCK, &[5; 4096]), Status::Ok);
        rot(&directory, 3);
        lose(&directory, 6);
        // Nobody reads these.
        rot(&directory, 5);
        lose(&directory, 8);
        let merged = |c: &mut Client<UnixStream>, flags: u8, blocks: (u64, u32), layer: &[u8]| {
            let header = c.header(OpCode::ReadLayer, blocks.0 * BLOCK, blocks.1 * 4096);
            c.ask(Header { flags, aux: MERGED, ..header }, layer)
        };
        for (blocks, expected) in [
            ((0, 256), Status::Rotten),
            ((0, 3), Status::Ok),
            ((3, 1), Status::Rotten),
            ((4, 2), Status::Ok),
            ((6, 1), Status::Rotten),
            ((7, 249), Status::Ok),
        ] {
            assert_eq!(merged(&mut c, flags::VERIFY, blocks, b"").status(), expected, "{blocks:?}");
        }
        assert_eq!(merged(&mut c, flags::VERIFY, (5, 1), b"t").status(), Status::Rotten, "the head is above");
        let image = merged(&mut c, 0, (0, 256), b"");
        assert_eq!((image.status(), image.header.aux), (Status::Ok, 256));
        let (mut expected, mut states) = (data.clone(), [BlockState::Data as u8; 256]);
        (states[3], states[6]) = (BlockState::Absent as u8, BlockState::Absent as u8);
        for block in [5_u8, 8] {
            expected[usize::from(block) * 4096..][..4096].fill(block);
        }
        let told =
            [&expected[..3 * 4096], &expected[4 * 4096..6 * 4096], &expected[7 * 4096..], &states].concat();
        assert!(image.payload == told);
        // What they are made equal by takes nothing away that one of them has there.
        assert_eq!(c.write(3 * BLOCK, &data[3 * 4096..4 * 4096]), Status::Ok);
        let put = c.header(OpCode::PutLayer, 0, MIB);
        let put = c.ask(Header { aux: 256, flags: flags::VERIFY, ..put }, &told);
        assert_eq!((put.status(), put.header.aux), (Status::Ok, 253), "but for what is there, and its own");
        expected[6 * 4096..7 * 4096].fill(0);
        assert!(c.read(0, MIB) == expected);
        let map = c.control(&Control::LayerMap { layer: String::new(), from: 0, recorded: false });
        let ranges = serde_json::from_slice::<MapPage>(&map.payload).unwrap().ranges;
        assert_eq!(ranges, [Extent::new(0, 6 * BLOCK), Extent::new(7 * BLOCK, 249 * BLOCK)]);
        drop(c);
        server.stop();
    }
}

/// The snapshot has lost blocks. What is zeroed over them is told to whoever compares the head, and stays zero when they are back.
#[test]
fn zeroes_over_what_a_snapshot_has_lost_stay() {
    for place in places() {
        let directory = place.path().join("replica");
        let Some((server, mut c, data)) = sample(place.path()) else { continue };
        lose(&directory, 3);
        lose(&directory, 4);
        assert_eq!(c.op(OpCode::WriteZeroes, 3 * BLOCK, 4096).status(), Status::Ok);
        let head = c.header(OpCode::DigestLayer, 0, 32768);
        let told = c.ask(head, b"").payload;
        let told = LayerDigest::decode(&told, 32768).unwrap();
        let told: Vec<_> = told.blocks().map(|(state, _)| state).collect();
        let [zero, absent] = [BlockState::Zero, BlockState::Absent];
        assert_eq!(told, [absent, absent, absent, zero, absent, absent, absent, absent]);
        let chain = c.state().chain;
        ok(&mut c, &Control::RebuildBegin { size: SIZE, chain, keep: Some(Keep::default()) });
        assert_eq!(c.op(OpCode::WriteZeroes, 4 * BLOCK, 4096).status(), Status::Ok);
        assert_eq!(c.op(OpCode::WriteZeroes, 600 * BLOCK, 4096).status(), Status::Ok);
        ok(&mut c, &Control::RebuildEnd);
        for block in [3, 4] {
            let from = usize::try_from(block * BLOCK).unwrap();
            let (header, payload) = image(&mut c, block, &data[from..from + 4096]);
            assert_eq!(c.ask(header, &payload).status(), Status::Ok);
        }
        assert!(c.read(3 * BLOCK, 8192) == [0; 8192], "old data is back");
        let map = c.control(&Control::LayerMap { layer: String::new(), from: 0, recorded: false });
        let ranges = serde_json::from_slice::<MapPage>(&map.payload).unwrap().ranges;
        assert_eq!(ranges, [Extent::new(3 * BLOCK, 2 * BLOCK)], "the last one hid nothing");
        drop(c);
        server.stop();
    }
}

/// Not a test by itself: what [`Killable`] runs.
#[test]
fn child() {
    serve_if_child();
}

/// Where the process before was writing, the disk may have anything until the members are made equal.
#[test]
fn a_checksum_says_nothing_in_a_chunk_that_was_found_marked() {
    for place in places() {
        let directory = place.path().join("replica");
        let Some((server, c, data)) = sample(place.path()) else { continue };
        drop(c);
        server.stop();
        rot(&directory, 3);
        let server = Killable::start(place.path(), "child");
        let mut c = session(&server.socket, 2, 1);
        assert_eq!(verify(&mut c, 3), ROTTEN, "a clean close leaves no marks");
        assert_eq!(c.write(8 * BLOCK, &data[..4096]), Status::Ok);
        assert_eq!(verify(&mut c, 3), ROTTEN);
        drop(c);
        server.kill();
        let server = Killable::start(place.path(), "child");
        let mut c = session(&server.socket, 3, 2);
        assert_eq!(verify(&mut c, 3), UNKNOWN);
        assert_eq!(checked(&mut c, OpCode::Read, b"").0, Status::Ok);
        assert_eq!(c.write(8 * BLOCK, &data[..4096]), Status::Ok);
        assert_eq!(verify(&mut c, 3), UNKNOWN, "it is written again, and still in doubt");
        settle(&mut c, &directory);
        assert_eq!(verify(&mut c, 3), ROTTEN);
    }
}

/// A rebuild may bring something else than was hashed: another replica has folded into the layer. That is no rot.
#[test]
fn what_is_put_on_purpose_makes_checksums_void() {
    for place in places() {
        let directory = place.path().join("replica");
        let Some((server, mut c, data)) = sample(place.path()) else { continue };
        let (header, payload) = image(&mut c, 3, &[7; 4096]);
        assert_eq!(c.ask(header, &payload).status(), Status::Ok);
        // An image that fits does not make the others' checksums count again.
        let (header, payload) = image(&mut c, 4, &data[4 * 4096..5 * 4096]);
        assert_eq!(c.ask(header, &payload).status(), Status::Ok);
        settle(&mut c, &directory);
        assert_eq!((verify(&mut c, 3), verify(&mut c, 4)), (UNKNOWN, UNKNOWN));
        assert_eq!(checked(&mut c, OpCode::Read, b"").0, Status::Ok);
        hash(&mut c, &["s"]);
        assert_eq!((verify(&mut c, 3), verify(&mut c, 4)), (SOUND, SOUND));
        drop(c);
        server.stop();
    }
}

/// The snapshot `s` is folded into the next one.
fn fold(c: &mut Client<UnixStream>) {
    let (id, layers) = (Instance(77), c.state().chain.len());
    ok(c, &Control::Prepare { id, op: ChainOp::MarkRemoved { name: "s".into() } });
    ok(c, &Control::Commit { id });
    ok(c, &Control::Fold { name: "s".into(), bytes_per_second: None });
    let began = Instant::now();
    while c.state().chain.len() == layers {
        assert!(began.elapsed() < Duration::from_secs(20), "it is folded for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn verify_of(c: &mut Client<UnixStream>, layer: &[u8], block: u64) -> Verified {
    let header = c.header(OpCode::VerifyLayer, block * BLOCK, 4096);
    Verified::from_bits(c.ask(header, layer).header.aux)
}

/// What is folded keeps the checksums from before: of rot that was carried along others would make the truth.
#[test]
fn a_fold_leaves_the_checksums_from_before() {
    for rotten in [false, true] {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("replica");
        let Some((server, mut c, data)) = sample(place.path()) else { continue };
        assert_eq!(c.write(8 * BLOCK, &data[..4096]), Status::Ok);
        snapshot(&mut c, &directory, "t");
        hash(&mut c, &["t"]);
        if rotten {
            rot(&directory, 3);
        }
        fold(&mut c);
        hashed(&mut c);
        settle(&mut c, &directory);
        let expected = if rotten { ROTTEN } else { SOUND };
        assert_eq!([3, 4, 8].map(|block| verify_of(&mut c, b"t", block)), [expected, SOUND, SOUND]);
        let corrupted = c.state().hash.unwrap().corrupted;
        assert_eq!(corrupted.contains(&"t".to_owned()), rotten);
        drop(c);
        server.stop();
    }
}

/// Between a fold and the hash of what it has left, another image is put there.
#[test]
fn what_is_put_after_a_fold_is_not_judged_by_the_checksums_from_before() {
    for put in [false, true] {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("replica");
        let Some((server, mut c, data)) = sample(place.path()) else { continue };
        assert_eq!(c.write(8 * BLOCK, &data[..4096]), Status::Ok);
        snapshot(&mut c, &directory, "t");
        hash(&mut c, &["t"]);
        (1..4).for_each(|n| assert_eq!(c.write(n * u64::from(MIB), &data), Status::Ok));
        snapshot(&mut c, &directory, "u");
        // Until this is done no other snapshot's turn comes.
        ok(&mut c, &Control::Hash { snapshots: vec!["u".into()], bytes_per_second: Some(MIB.into()) });
        fold(&mut c);
        assert_eq!(c.state().hash.unwrap().name, "u", "too soon to tell");
        if put {
            let header = c.header(OpCode::PutLayer, 3 * BLOCK, 4096);
            let image = [&[7; 4096][..], &[BlockState::Data as u8, b't']].concat();
            assert_eq!(c.ask(Header { aux: 2, ..header }, &image).status(), Status::Ok);
        }
        hashed(&mut c);
        settle(&mut c, &directory);
        let expected = if put { UNKNOWN } else { SOUND };
        assert_eq!([3, 4].map(|block| verify_of(&mut c, b"t", block)), [expected; 2]);
        drop(c);
        server.stop();
    }
}

/// What a rebuild has changed elsewhere in a layer makes nothing of the rest of it any worse.
#[test]
fn what_is_sound_here_outlives_a_rotten_image_after_others() {
    for place in places() {
        let Some((server, mut c, data)) = sample(place.path()) else { continue };
        let (changed, payload) = image(&mut c, 3, &[7; 4096]);
        assert_eq!(c.ask(changed, &payload).status(), Status::Ok);
        assert_eq!(verify(&mut c, 4), UNKNOWN);
        // Sound here, changed by the image before, and sound again.
        for (block, other, expected) in [(5, 8, None), (3, 9, Some(9)), (6, 8, None)] {
            let (rotten, payload) = image(&mut c, block, &[other; 4096]);
            let put = c.ask(Header { flags: flags::VERIFY, ..rotten }, &payload);
            assert_eq!((put.status(), put.header.aux), (Status::Ok, expected.is_some().into()), "{block}");
            let from = usize::try_from(block * BLOCK).unwrap();
            let expected = expected.map_or(data[from..from + 4096].to_vec(), |byte| vec![byte; 4096]);
            assert!(c.read(block * BLOCK, 4096) == expected, "{block}");
        }
        // A block that was what its checksum says, and has become that again by an image, is not known to be sound: it was changed.
        let (back, payload) = image(&mut c, 3, &data[3 * 4096..4 * 4096]);
        assert_eq!(c.ask(back, &payload).status(), Status::Ok);
        let (rotten, payload) = image(&mut c, 3, &[9; 4096]);
        assert_eq!(c.ask(Header { flags: flags::VERIFY, ..rotten }, &payload).header.aux, 1);
        drop(c);
        server.stop();
    }
}

/// The target of a rebuild begins with nothing, and its source has lost blocks. What is zeroed over them stays zero when another replica
/// has brought them.
#[test]
fn zeroes_over_what_the_source_has_lost_stay() {
    for place in places() {
        let Some((server, mut c, data)) = sample(place.path()) else { continue };
        let chain = c.state().chain;
        ok(&mut c, &Control::RebuildBegin { size: SIZE, chain, keep: None });
        assert_eq!(c.op(OpCode::WriteZeroes, 3 * BLOCK, 4096).status(), Status::Ok);
        assert_eq!(c.op(OpCode::WriteZeroes, 600 * BLOCK, 4096).status(), Status::Ok);
        let lost = c.header(OpCode::PutLayer, 3 * BLOCK, 8192);
        let lost = c.ask(Header { aux: 3, flags: flags::VERIFY, ..lost }, &[0, 0, b's']);
        assert_eq!(lost.status(), Status::Ok);
        ok(&mut c, &Control::RebuildEnd);
        assert_eq!(c.op(OpCode::WriteZeroes, 4 * BLOCK, 4096).status(), Status::Ok);
        for block in [3, 4] {
            let from = usize::try_from(block * BLOCK).unwrap();
            let (header, payload) = image(&mut c, block, &data[from..from + 4096]);
            assert_eq!(c.ask(header, &payload).status(), Status::Ok);
        }
        assert!(c.read(3 * BLOCK, 8192) == [0; 8192], "old data is back");
        let map = c.control(&Control::LayerMap { layer: String::new(), from: 0, recorded: false });
        let ranges = serde_json::from_slice::<MapPage>(&map.payload).unwrap().ranges;
        assert_eq!(ranges, [Extent::new(3 * BLOCK, 2 * BLOCK)], "the other one hid nothing");
        drop(c);
        server.stop();
    }
}

/// A rebuild that begins at the start removes all layers, and needs their space.
#[test]
fn no_file_is_kept_open_of_a_layer_that_is_gone() {
    for place in places() {
        let Some((server, mut c, _)) = sample(place.path()) else { continue };
        assert_eq!(verify(&mut c, 3), SOUND);
        let head = LayerInfo { created: "2026-11-20T06:03:39Z".into(), ..LayerInfo::default() };
        ok(&mut c, &Control::RebuildBegin { size: SIZE, chain: vec![head], keep: None });
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        let files = open.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
        let is_gone = |file: &PathBuf| {
            file.starts_with(place.path()) && file.as_os_str().as_encoded_bytes().ends_with(b" (deleted)")
        };
        assert_eq!(files.filter(is_gone).collect::<Vec<_>>(), Vec::<PathBuf>::new());
        drop(c);
        server.stop();
    }
}
