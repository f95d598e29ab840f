//! A disk that fills up. A file of its own, since it starts programs: a child between fork and exec holds every
//! lock of its parent.

mod serve_client;

use std::io::{Read, Write};

use lh_block::Instance;
use lh_wire::{ChainOp, Control, OpCode, Status};
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
