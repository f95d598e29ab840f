//! Reads, writes, zeroes and layer images over real sockets and files.

mod serve_client;

use std::fs::File;
use std::path::Path;

use lh_block::{BLOCK, Extent, Instance, Run};
use lh_wire::{BlockState, ChainOp, Control, Header, LayerTrailer, OpCode, Status, flags};
use replica::serve::{Mode, ServeError};
use replica::store::{CreateOptions, Damage, Directory, OpenError, OpenOptions};
use serve_client::{MIB, PATIENCE, SIZE, Server, knock, pattern, places, session, who};

#[test]
fn what_was_written_is_read() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        let (small, large) = (pattern(1, 4096), pattern(2, MIB as usize));
        assert_eq!(c.write(8192, &small), Status::Ok);
        assert_eq!(c.write(4 << 20, &large), Status::Ok);
        assert_eq!(c.read(8192, 4096), small);
        assert_eq!(c.read(4 << 20, MIB), large);
        // Data, a hole, data: one answer.
        assert_eq!(c.write(16384, &small), Status::Ok);
        assert_eq!(c.read(8192, 12288), [&small[..], &[0; 4096], &small].concat());
        assert_eq!(c.read(SIZE - u64::from(MIB), MIB), vec![0; MIB as usize]);
        let counters = server.status.snapshot().counters;
        assert_eq!((counters.writes, counters.reads), (3, 4));
        assert_eq!(counters.written_bytes, 8192 + u64::from(MIB));
    }
}

#[test]
fn which_blocks_hold_data_is_told() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        let all = Extent::new(0, SIZE);
        let run = |offset, len, data| Run { range: Extent::new(offset, len), data };
        assert_eq!(c.allocation(all), [run(0, SIZE, false)]);
        assert_eq!(c.write(8192, &pattern(1, 8192)), Status::Ok);
        assert_eq!(c.write(SIZE - 4096, &[0; 4096]), Status::Ok);
        let end = run(SIZE - 4096, 4096, true);
        assert_eq!(
            c.allocation(all),
            [run(0, 8192, false), run(8192, 8192, true), run(16384, SIZE - 20480, false), end]
        );
        // Through a snapshot too, whose data the head hides.
        let id = Instance(7);
        let op = ChainOp::Snapshot {
            name: "s".into(),
            user_created: true,
            created: "2026-01-01T00:00:00Z".into(),
            labels: Default::default(),
        };
        assert_eq!(c.control(&Control::Prepare { id, op }).status(), Status::Ok);
        assert_eq!(c.control(&Control::Commit { id }).status(), Status::Ok);
        assert_eq!(c.op(OpCode::Unmap, 8192, 4096).status(), Status::Ok);
        assert_eq!(c.allocation(Extent::new(4096, 12288)), [run(4096, 8192, false), run(12288, 4096, true)]);

        // More runs than one answer tells.
        for n in 0..300 {
            assert_eq!(c.write((n * 2 + 1) << 12, &[7; 4096]), Status::Ok);
        }
        let answer = c.op(OpCode::Allocation, 0, 4 << 20);
        assert_eq!(answer.payload.len(), 4 * lh_block::RUNS_MAX);
        let half = c.allocation(Extent::new(1 << 20, 1 << 20));
        assert_eq!(half.len(), 256);
        assert!(
            half.iter().all(|run| run.range.len == 4096 && run.data == (run.range.offset / 4096 % 2 == 1))
        );

        let nonsense = [(0, 0), (100, 4096), (0, 2048), (SIZE - 4096, 8192)];
        for (offset, length) in nonsense {
            assert_eq!(
                c.op(OpCode::Allocation, offset, length).status(),
                Status::Invalid,
                "{offset} {length}"
            );
        }
    }
}

/// A backing file that ends within a block: behind it are zeroes, and nothing that the memory held before.
#[test]
fn behind_the_end_of_a_backing_file_are_zeroes() {
    for place in places() {
        let backing = place.path().join("backing");
        std::fs::write(&backing, vec![9; 8192 + 512]).unwrap();
        let options = CreateOptions {
            size: SIZE,
            backing: Some(backing.to_str().unwrap().to_owned()),
            lock_wait: PATIENCE,
        };
        drop(Directory::create(&place.path().join("replica"), &options).unwrap());
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        for n in 0..16 {
            let data = pattern(n, MIB as usize);
            assert_eq!(c.write((n + 1) * u64::from(MIB), &data), Status::Ok);
            assert_eq!(c.read((n + 1) * u64::from(MIB), MIB), data);
            assert!(c.read(4096, 8192) == [vec![9; 4096 + 512], vec![0; 4096 - 512]].concat());
        }
    }
}

/// A backing file that was cut off since the replica was started: what it has lost is no zeroes.
#[test]
fn what_a_backing_file_has_lost_cannot_be_read() {
    for place in places() {
        let backing = place.path().join("backing");
        std::fs::write(&backing, vec![9; MIB as usize + 512]).unwrap();
        let options = CreateOptions {
            size: SIZE,
            backing: Some(backing.to_str().unwrap().to_owned()),
            lock_wait: PATIENCE,
        };
        drop(Directory::create(&place.path().join("replica"), &options).unwrap());
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        cut_off(&backing, 8192);
        for (offset, length) in [(4096, 8192), (0, MIB), (MIB.into(), 4096)] {
            assert_eq!(c.op(OpCode::Read, offset, length).status(), Status::Io);
        }
        assert_eq!(c.read(0, 8192), [9; 8192]);
        assert_eq!(server.status.snapshot().mode, Mode::Serving);
        let said = server.status.snapshot().last_error.unwrap();
        assert!(said.contains("cut off"), "{said}");
    }
}

fn cut_off(file: &Path, length: u64) {
    File::options().write(true).open(file).unwrap().set_len(length).unwrap();
}

/// A layer's file that was cut off under its process is no file of holes. A write farther behind would make it one: so the replica fails,
/// and the next process refuses the directory.
#[test]
fn a_replica_whose_file_is_cut_off_fails() {
    for place in places() {
        for (offset, length) in [(4096, 8192), (0, MIB), (65536, 4096)] {
            let path = place.path().join("replica");
            let server = Server::start(place.path());
            let mut c = session(&server.socket, 1, 1);
            let data = pattern(1, MIB as usize);
            assert_eq!(c.write(0, &data), Status::Ok);
            cut_off(&path.join("volume-head-000.img"), 8192);
            assert_eq!(c.read(0, 8192), data[..8192]);
            assert_eq!(c.op(OpCode::Read, offset, length).status(), Status::Io);
            assert_eq!(server.status.snapshot().mode, Mode::Failed);
            assert_eq!(c.write(MIB.into(), &data), Status::Io);
            let ended = server.ended();
            let Err(ServeError::Failed { why, full: false }) = ended else { panic!("{ended:?}") };
            assert!(why.contains("cut off"), "{why}");
            let opened = Directory::open(&path, &OpenOptions { lock_wait: PATIENCE }).map(drop);
            let Err(OpenError::Damaged { damage: Damage::HeadShort { .. }, .. }) = opened else {
                panic!("{opened:?}")
            };
            std::fs::remove_dir_all(path).unwrap();
        }
    }
}

#[test]
fn payloads_that_are_not_aligned_are_copied() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        for (n, len) in [4096_usize, 12288, MIB as usize].into_iter().enumerate() {
            let offset = n as u64 * 2 * u64::from(MIB);
            let data = pattern(n as u64, len);
            let header = c.header(OpCode::Write, offset, len.try_into().unwrap());
            let bytes = c.encode_unaligned(header, &data);
            std::io::Write::write_all(&mut c.stream, &bytes).unwrap();
            assert_eq!(c.receive().status(), Status::Ok);
            assert_eq!(c.read(offset, len.try_into().unwrap()), data);
        }
    }
}

#[test]
fn zeroes_and_unmap_read_as_zero() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        c.write(0, &pattern(1, 65536));
        for (op, offset) in [(OpCode::WriteZeroes, 4096), (OpCode::Unmap, 16384)] {
            assert_eq!(c.op(op, offset, 8192).status(), Status::Ok);
            assert_eq!(c.read(offset, 8192), [0; 8192]);
        }
        let expected = pattern(1, 65536);
        assert_eq!(c.read(0, 4096), expected[..4096]);
        assert_eq!(c.read(24576, 40960), expected[24576..]);
        // Longer than any payload.
        assert_eq!(c.op(OpCode::WriteZeroes, 0, 32 << 20).status(), Status::Ok);
        assert_eq!(c.read(0, 65536), vec![0; 65536]);
    }
}

#[test]
fn flush_and_fua_are_answered() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        let header = c.header(OpCode::Write, 0, 4096);
        let answer = c.ask(Header { flags: flags::FUA, ..header }, &pattern(1, 4096));
        assert_eq!(answer.status(), Status::Ok);
        assert!(server.status.snapshot().counters.syncs >= 1);
        assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
        assert_eq!(c.op(OpCode::Ping, 0, 0).status(), Status::Ok);
    }
}

#[test]
fn many_flushes_share_few_syncs() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 1, 1);
    let before = server.status.snapshot().counters.syncs;
    let mut bytes = Vec::new();
    for n in 0..64 {
        let header = c.header(OpCode::Write, n * 4096, 4096);
        bytes.extend(c.encode(Header { flags: flags::FUA, ..header }, &pattern(n, 4096)));
    }
    std::io::Write::write_all(&mut c.stream, &bytes).unwrap();
    for _ in 0..64 {
        assert_eq!(c.receive().status(), Status::Ok);
    }
    let syncs = server.status.snapshot().counters.syncs - before;
    assert!(syncs < 32, "{syncs} syncs for 64 writes");
}

#[test]
fn checksums_are_checked_and_given() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut with = who(1, 1);
    with.hello.checksums = true;
    let mut c = knock(&server.socket, &with).unwrap();
    let data = pattern(1, 8192);
    assert_eq!(c.write(0, &data), Status::Ok);
    let header = c.header(OpCode::Write, 0, 4096);
    let wrong = Header { flags: flags::CRC, payload_crc: 1, ..header };
    assert_eq!(c.ask(wrong, &pattern(2, 4096)).status(), Status::Corrupt);
    // The client checks the checksums of what it reads, a hole's among them.
    assert_eq!(c.read(0, 12288), [&data[..], &[0; 4096]].concat());
}

#[test]
fn a_layer_is_read_and_put() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        let data = pattern(1, 8192);
        c.write(4096, &data);
        let answer = c.op(OpCode::ReadLayer, 0, 16384);
        assert_eq!(answer.status(), Status::Ok);
        let (bytes, trailer) = answer.payload.split_at(answer.payload.len() - answer.header.aux as usize);
        assert_eq!(bytes, data);
        let trailer = LayerTrailer::decode(trailer, 16384, 8192).unwrap();
        use BlockState::{Absent, Data};
        assert_eq!(trailer.states().collect::<Vec<_>>(), [Absent, Data, Data, Absent]);

        // Two blocks equal, one new, one gone.
        let new = pattern(3, 4096);
        let image = [&data[..4096], &data[4096..], &new, &[0, 1, 1, 1]].concat();
        let header = c.header(OpCode::PutLayer, 0, 16384);
        let answer = c.ask(Header { aux: 4, ..header }, &image);
        assert_eq!((answer.status(), answer.header.aux), (Status::Ok, 1));
        assert_eq!(c.read(0, 16384), [&[0; 4096], &data[..], &new].concat());
        let image = [&new[..], &[1, 0, 0, 0]].concat();
        let header = c.header(OpCode::PutLayer, 4096, 16384);
        let answer = c.ask(Header { aux: 4, ..header }, &image);
        assert_eq!((answer.status(), answer.header.aux), (Status::Ok, 3));
        assert_eq!(c.read(0, 20480), [&[0; 4096], &new[..], &[0; 12288]].concat());

        let header = c.header(OpCode::ReadLayer, 0, 4096);
        assert_eq!(c.ask(header, b"nobody").status(), Status::Refused);
        let header = c.header(OpCode::PutLayer, 0, 8192);
        assert_eq!(c.ask(Header { aux: 2, ..header }, &[7, 7]).status(), Status::Invalid);
    }
}

#[test]
fn a_deep_queue_of_everything_at_once() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        let (mut bytes, mut tags) = (Vec::new(), Vec::new());
        for n in 0..400 {
            let header = c.header(OpCode::Write, n * 16384, 16384);
            tags.push(header.tag);
            bytes.extend(c.encode(header, &pattern(n, 16384)));
        }
        let mut writer = c.stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || std::io::Write::write_all(&mut writer, &bytes));
        let mut answered: Vec<u64> = (0..400)
            .map(|_| {
                let answer = c.receive();
                assert_eq!(answer.status(), Status::Ok);
                answer.header.tag
            })
            .collect();
        sender.join().unwrap().unwrap();
        answered.sort_unstable();
        assert_eq!(answered, tags);
        let reads: Vec<u8> = (0..400)
            .flat_map(|n| {
                let header = c.header(OpCode::Read, n * 16384, 16384);
                c.encode(header, &[])
            })
            .collect();
        std::io::Write::write_all(&mut c.stream, &reads).unwrap();
        for _ in 0..400 {
            let answer = c.receive();
            assert_eq!(answer.payload, pattern(answer.header.offset / 16384, 16384));
        }
    }
}

#[test]
fn ranges_that_make_no_sense_are_invalid() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut c = session(&server.socket, 1, 1);
    for range in [Extent::new(512, 4096), Extent::new(SIZE, BLOCK), Extent::new(0, 0)] {
        let answer = c.op(OpCode::Read, range.offset, range.len.try_into().unwrap());
        assert_eq!(answer.status(), Status::Invalid, "{range}");
    }
    let header = c.header(OpCode::Control, 0, 0);
    assert_eq!(c.ask(header, b"{\"do\":\"nonsense\"}").status(), Status::Invalid);
}

#[test]
fn more_is_asked_than_there_is_memory_for() {
    for place in places() {
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        let data = pattern(1, MIB as usize);
        for n in 0..32 {
            c.write(n * u64::from(MIB), &data);
        }
        // 300 MiB of answers, and 300 MiB of images of what is there already.
        for image in [false, true] {
            let mut writer = c.stream.try_clone().unwrap();
            let messages: Vec<Vec<u8>> = (0..300)
                .map(|n| {
                    let op = if image { OpCode::PutLayer } else { OpCode::Read };
                    let header = c.header(op, n % 32 * u64::from(MIB), MIB);
                    let body = if image { [&data[..], &[1; 256]].concat() } else { Vec::new() };
                    c.encode(Header { aux: if image { 256 } else { 0 }, ..header }, &body)
                })
                .collect();
            let sender = std::thread::spawn(move || {
                messages.iter().try_for_each(|m| std::io::Write::write_all(&mut writer, m))
            });
            for _ in 0..300 {
                let answer = c.receive();
                assert_eq!((answer.status(), answer.header.aux), (Status::Ok, 0));
                assert_eq!(answer.payload.len(), if image { 0 } else { MIB as usize });
            }
            sender.join().unwrap().unwrap();
        }
    }
}

/// Of a creation that was interrupted nothing counts, however far it was.
#[test]
fn a_creation_that_was_interrupted_begins_anew() {
    for left in [&[][..], &["creating.new"], &["creating"], &["creating", "probe"]] {
        let place = tempfile::tempdir().unwrap();
        // As it was when the power went: the record of one that came to its end is gone.
        let engine = place.path().join("replica/engine");
        std::fs::create_dir_all(&engine).unwrap();
        let record = "longhorn creating 1 870db882\n{}\n";
        left.iter().for_each(|name| std::fs::write(engine.join(name), record).unwrap());
        let server = Server::start(place.path());
        let mut c = session(&server.socket, 1, 1);
        assert_eq!(c.read(0, 4096), [0; 4096], "{left:?}");
    }
    // What is somebody's stays.
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(place.path().join("replica")).unwrap();
    std::fs::write(place.path().join("replica/mine"), b"x").unwrap();
    assert!(replica::serve::run(serve_client::options(place.path())).is_err());
    assert_eq!(std::fs::read_dir(place.path().join("replica")).unwrap().count(), 1);
}
