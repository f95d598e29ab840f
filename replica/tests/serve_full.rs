//! A disk that fills up. A file of its own, since it starts programs: a child between fork and exec holds every
//! lock of its parent.

mod serve_client;

use std::io::{Read, Write};

use lh_block::Instance;
use lh_wire::{BlockState, ChainOp, Control, IN_PART, OpCode, Status, in_part};
use serve_client::{Client, MIB, Server, pattern, session};

/// A small file system of its own; unmounted when dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn mount() -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"])
            .arg(place.path())
            .stderr(std::process::Stdio::null())
            .status();
        mounted.is_ok_and(|s| s.success()).then_some(Self(place))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_is_no_failure() {
    let Some(small) = Small::mount() else {
        println!("SKIP a_full_disk_is_no_failure: mounting needs root");
        return;
    };
    let server = Server::start(small.0.path());
    let mut c = session(&server.socket, 1, 1);
    let data = pattern(1, MIB as usize);
    let written = (0..16).take_while(|n| c.write(n * u64::from(MIB), &data) == Status::Ok).count() as u64;
    assert!((4..8).contains(&written), "{written} MiB");
    let full = written * u64::from(MIB);
    assert_eq!(c.write(full, &data), Status::NoSpace);
    assert_eq!(server.status.snapshot().mode, replica::serve::Mode::Serving);
    assert_eq!(c.read(0, MIB), data);
    assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
    // What is given back can be written again.
    assert_eq!(c.op(OpCode::Unmap, 0, 2 * MIB).status(), Status::Ok);
    assert_eq!(c.write(full, &data), Status::Ok);
    assert_eq!(c.read(full, MIB), data);
    assert_eq!(c.read(0, MIB), vec![0; MIB as usize]);
}

/// By this an engine knows whether replicas may differ where all of them were full.
#[test]
fn a_write_that_a_full_disk_took_in_part_is_told_from_one_that_it_did_not() {
    let Some(small) = Small::mount() else {
        println!(
            "SKIP a_write_that_a_full_disk_took_in_part_is_told_from_one_that_it_did_not: mounting needs root"
        );
        return;
    };
    let server = Server::start(small.0.path());
    let mut c = session(&server.socket, 1, 1);
    let (old, new) = (pattern(1, 4096), pattern(2, 3 * 4096));
    let mut write = |at: u64, bytes: &[u8]| {
        let header = c.header(OpCode::Write, at, u32::try_from(bytes.len()).unwrap());
        let answer = c.ask(header, bytes);
        (answer.status(), answer.header.aux)
    };
    // Every other block, so that there are holes between.
    let refused = (0..).map(|n| write(n * 8192, &old)).find(|said| said.0 != Status::Ok);
    assert_eq!(refused, Some((Status::NoSpace, 0)));
    assert_eq!(write(0, &new), (Status::NoSpace, in_part(1)));
    assert_eq!(write(32 << 20, &new), (Status::NoSpace, 0), "it was a hole and is one");
    assert_eq!(write(5 * 4096, &new), (Status::NoSpace, 0), "it stopped at the first hole");
    assert_eq!(c.read(0, 3 * 4096), [&new[..4096], &[0; 4096], &old].concat());
    assert_eq!(c.read(5 * 4096, 3 * 4096), [&[0; 4096][..], &old, &[0; 4096]].concat());
    assert_eq!(c.read(32 << 20, 3 * 4096), [0; 3 * 4096]);
}

/// What was answered is whole. Of the write that was refused as much is read as was written, now and after the next start.
#[test]
fn a_part_of_a_write_is_read_as_it_is_when_the_replica_starts_again() {
    let Some(small) = Small::mount() else {
        println!(
            "SKIP a_part_of_a_write_is_read_as_it_is_when_the_replica_starts_again: mounting needs root"
        );
        return;
    };
    let server = Server::start(small.0.path());
    let mut c = session(&server.socket, 1, 1);
    let data = pattern(1, MIB as usize);
    let mut write = |n: u32| {
        let header = c.header(OpCode::Write, u64::from(n * MIB), MIB);
        let answer = c.ask(header, &data);
        (answer.status(), answer.header.aux)
    };
    let full = (0..).find(|n| write(*n) != (Status::Ok, 0)).unwrap();
    let (status, aux) = write(full);
    let done = lh_wire::done_of(aux).expect("it knows what it has done") as usize * 4096;
    assert!(status == Status::NoSpace && (4096..data.len()).contains(&done), "{status:?} {done}");
    assert!((0..full).all(|n| c.read(u64::from(n * MIB), MIB) == data));
    let part = c.read(u64::from(full * MIB), MIB);
    assert!(part[..done] == data[..done] && part[done..].iter().all(|byte| *byte == 0));
    drop(c);
    server.stop();
    let server = Server::start(small.0.path());
    assert!(session(&server.socket, 2, 2).read(u64::from(full * MIB), MIB) == part);
}

/// The same of a layer image.
#[test]
fn an_image_that_a_full_disk_takes_in_part_is_not_put() {
    let Some(small) = Small::mount() else {
        println!("SKIP an_image_that_a_full_disk_takes_in_part_is_not_put: mounting needs root");
        return;
    };
    let server = Server::start(small.0.path());
    let mut c = session(&server.socket, 1, 1);
    let data = pattern(1, MIB as usize);
    let states = [BlockState::Data as u8; MIB as usize / 4096];
    let mut put = |n: u32| {
        let mut header = c.header(OpCode::PutLayer, u64::from(n * MIB), MIB);
        header.aux = u32::try_from(states.len()).unwrap();
        c.ask(header, &[&data[..], &states].concat()).status()
    };
    let full = (0..).find(|n| put(*n) != Status::Ok).unwrap();
    assert_eq!(put(full), Status::NoSpace);
    assert!((0..full).all(|n| c.read(u64::from(n * MIB), MIB) == data));
    let part = c.read(u64::from(full * MIB), MIB);
    assert!(part != data && part[..4096] == data[..4096]);
}

/// Marks of zeroes in a snapshot that came with an import, which has no map of them yet: whether there is room for them shows when the map
/// is made, and not when nothing can be refused any more.
#[test]
fn marks_in_a_new_map_are_refused_on_a_full_disk_and_fail_nobody() {
    let mut seen = [0, 0];
    for pages in 0..16 {
        let Some(small) = Small::mount() else {
            println!(
                "SKIP marks_in_a_new_map_are_refused_on_a_full_disk_and_fail_nobody: mounting needs root"
            );
            return;
        };
        let server = imported(small.0.path());
        let mut c = session(&server.socket, 2, 2);
        let mut filling = std::fs::File::create(small.0.path().join("filling")).unwrap();
        while filling.write_all(&[1; 4096]).is_ok() {}
        let length = filling.metadata().unwrap().len();
        filling.set_len(length - pages * 4096).unwrap();
        let header = c.header(OpCode::PutLayer, FAR, 4096);
        let image = [&[BlockState::Zero as u8][..], b"s"].concat();
        let put = c.ask(lh_wire::Header { aux: 2, ..header }, &image).status();
        match put {
            Status::Ok => seen[0] += 1,
            Status::NoSpace => seen[1] += 1,
            other => panic!("{pages} pages are free: {other:?}"),
        }
        assert_eq!(server.status.snapshot().mode, replica::serve::Mode::Serving, "{pages} pages are free");
        let read = if put == Status::Ok { [0; 4096] } else { [7; 4096] };
        assert_eq!(c.read(FAR, 4096), read, "{pages} pages are free");
    }
    assert!(seen.iter().all(|n| *n > 0), "{seen:?}");
}

/// So far behind that its mark is in no page of the map that its header takes.
const FAR: u64 = 62 * MIB as u64;

/// A replica with a block of sevens in snapshot `s`, taken over from another program.
fn imported(place: &std::path::Path) -> Server {
    let server = Server::start(place);
    let mut c = session(&server.socket, 1, 1);
    assert_eq!(c.write(FAR, &[7; 4096]), Status::Ok);
    let created = "2026-11-20T06:03:39Z".to_owned();
    let op = ChainOp::Snapshot { name: "s".into(), user_created: true, created, labels: Default::default() };
    carry_out(&mut c, 1, op);
    drop(c);
    server.stop();
    let replica = place.join("replica");
    std::fs::remove_dir_all(replica.join("engine")).unwrap();
    let snapshot = replica.join("volume-snap-s.img");
    let length = snapshot.metadata().unwrap().len();
    std::fs::remove_file(&snapshot).unwrap();
    let file = std::fs::File::create(&snapshot).unwrap();
    file.set_len(length).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[7; 4096], FAR).unwrap();
    drop(file);
    Server::start(place)
}

/// The same over zeroes whose hole is durable: what is written there counts, whatever becomes of the write.
#[test]
fn a_part_of_a_write_over_zeroes_is_told_and_read_as_when_the_replica_starts_again() {
    let Some(small) = Small::mount() else {
        println!(
            "SKIP a_part_of_a_write_over_zeroes_is_told_and_read_as_when_the_replica_starts_again: mounting needs root"
        );
        return;
    };
    let server = Server::start(small.0.path());
    let mut c = session(&server.socket, 1, 1);
    let data = pattern(1, MIB as usize);
    assert_eq!(c.write(0, &data), Status::Ok);
    let created = "2026-11-20T06:03:39Z".to_owned();
    let op = ChainOp::Snapshot { name: "s".into(), user_created: true, created, labels: Default::default() };
    carry_out(&mut c, 1, op);
    assert_eq!(c.write(0, &data), Status::Ok);
    assert_eq!(c.op(OpCode::Unmap, 0, MIB).status(), Status::Ok);
    let began = std::time::Instant::now();
    // Two bits for each of 256 blocks, in the first page behind the header.
    while !zero_maps(small.0.path()).any(|map| map.len() > 576 && map[512..576].iter().all(|b| *b == 0xff)) {
        assert!(began.elapsed() < std::time::Duration::from_secs(20), "the marks are not armed");
        assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let at = u64::from(4 * MIB);
    let full = (0..).find(|n| c.write(at + n * 4096, &data[..4096]) != Status::Ok).unwrap();
    // Room for one block of three.
    assert_eq!(c.op(OpCode::Unmap, at + (full - 1) * 4096, 4096).status(), Status::Ok);
    let header = c.header(OpCode::Write, 0, 3 * 4096);
    let answer = c.ask(header, &data[..3 * 4096]);
    assert_eq!((answer.status(), answer.header.aux), (Status::NoSpace, IN_PART));
    let part = c.read(0, 3 * 4096);
    assert_eq!(part, [&data[..4096], &[0; 2 * 4096]].concat());
    drop(c);
    server.stop();
    let server = Server::start(small.0.path());
    assert_eq!(session(&server.socket, 2, 2).read(0, 3 * 4096), part);
}

fn zero_maps(place: &std::path::Path) -> impl Iterator<Item = Vec<u8>> {
    let entries = std::fs::read_dir(place.join("replica/engine")).unwrap().map(|e| e.unwrap());
    let maps = entries.filter(|e| e.file_name().to_str().unwrap().starts_with("zero-"));
    maps.map(|e| std::fs::read(e.path()).unwrap())
}

/// Zeroes over a snapshot take marks. There is room for some, so that a full disk can be given something back.
#[test]
fn what_a_snapshot_has_is_unmapped_on_a_full_disk() {
    let Some(small) = Small::mount() else {
        println!("SKIP what_a_snapshot_has_is_unmapped_on_a_full_disk: mounting needs root");
        return;
    };
    let server = Server::start(small.0.path());
    let mut c = session(&server.socket, 1, 1);
    let data = pattern(1, MIB as usize);
    // So far behind that its marks lie in a page of their own.
    let at = 62 << 20;
    assert_eq!(c.write(at, &data), Status::Ok);
    let created = "2026-11-20T06:03:39Z".to_owned();
    let op = ChainOp::Snapshot { name: "s".into(), user_created: true, created, labels: Default::default() };
    carry_out(&mut c, 1, op);
    assert_eq!(c.write(at, &data), Status::Ok);
    let written = (0..).take_while(|n| c.write(n * 4096, &data[..4096]) == Status::Ok).count() as u64;
    assert_eq!(c.op(OpCode::Unmap, at, MIB).status(), Status::Ok);
    assert_eq!(c.read(at, MIB), vec![0; MIB as usize]);
    // The hole follows when its mark is durable.
    assert_eq!(c.op(OpCode::Flush, 0, 0).status(), Status::Ok);
    let began = std::time::Instant::now();
    while c.write(written * 4096, &data[..4096]) != Status::Ok {
        assert!(began.elapsed() < std::time::Duration::from_secs(10), "nothing was given back");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert_eq!(c.read(at, MIB), vec![0; MIB as usize]);
}

fn carry_out(c: &mut Client<impl Read + Write>, id: u128, op: ChainOp) {
    let id = Instance(id);
    assert_eq!(c.control(&Control::Prepare { id, op }).status(), Status::Ok);
    assert_eq!(c.control(&Control::Commit { id }).status(), Status::Ok);
}

/// Else nobody could start the volume to give something back: a start makes records, and a removal of a snapshot a meta.
#[test]
fn a_replica_starts_on_a_full_disk_and_lets_go_of_a_snapshot() {
    let Some(small) = Small::mount() else {
        println!("SKIP a_replica_starts_on_a_full_disk_and_lets_go_of_a_snapshot: mounting needs root");
        return;
    };
    let server = Server::start(small.0.path());
    let mut c = session(&server.socket, 1, 1);
    let data = pattern(1, MIB as usize);
    assert_eq!(c.write(0, &data), Status::Ok);
    let created = "2026-11-20T06:03:39Z".to_owned();
    let op = ChainOp::Snapshot { name: "s".into(), user_created: true, created, labels: Default::default() };
    carry_out(&mut c, 1, op);
    assert_eq!(
        (0..).find_map(|n| Some(c.write(n * 4096, &data[..4096])).filter(|s| *s != Status::Ok)),
        Some(Status::NoSpace)
    );
    server.stop();
    let server = Server::start(small.0.path());
    let mut c = session(&server.socket, 2, 2);
    assert_eq!(c.read(0, 4096), data[..4096]);
    carry_out(&mut c, 2, ChainOp::MarkRemoved { name: "s".into() });
    assert_eq!(c.state().chain.iter().filter(|layer| layer.removed).count(), 1);
    assert_eq!(server.status.snapshot().mode, replica::serve::Mode::Serving);
}
