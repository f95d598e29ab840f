//! Clones and exports of a snapshot beside the process that serves the directory, while snapshots are removed and folded away.

mod serve_client;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lh_block::Instance;
use lh_wire::{ChainOp, Control, Status};
use replica::store::{CloneOptions, Pace, SnapshotView, clone_snapshot};
use serve_client::{Client, MIB, Server, pattern, session};

const M: u64 = 1 << 20;

struct World {
    c: Client<UnixStream>,
    operations: u128,
}

impl World {
    /// 16 MiB in "one"; in "two" above it, that with one MiB written anew.
    fn new(server: &Server) -> Self {
        let mut w = Self { c: session(&server.socket, 1, 1), operations: 0 };
        (0..16).for_each(|n| w.write(n * M, n + 1));
        w.snapshot("one");
        w.write(4 * M, 99);
        w.snapshot("two");
        w.settle("two");
        w
    }

    fn write(&mut self, offset: u64, seed: u64) {
        assert_eq!(self.c.write(offset, &pattern(seed, MIB as usize)), Status::Ok);
    }

    fn prepare(&mut self, op: ChainOp) -> Instance {
        self.operations += 1;
        let id = Instance(self.operations);
        assert_eq!(self.c.control(&Control::Prepare { id, op }).status(), Status::Ok);
        id
    }

    fn carry_out(&mut self, op: ChainOp) {
        let id = self.prepare(op);
        assert_eq!(self.c.control(&Control::Commit { id }).status(), Status::Ok);
    }

    fn snapshot(&mut self, name: &str) {
        self.carry_out(taking(name, self.operations));
    }

    fn settle(&mut self, name: &str) {
        let control = Control::Settled { snapshot: name.into() };
        assert_eq!(self.c.control(&control).status(), Status::Ok);
    }

    fn remove(&mut self, name: &str) {
        self.carry_out(ChainOp::MarkRemoved { name: name.into() });
    }

    fn fold(&mut self, name: &str) {
        let fold = Control::Fold { name: name.into(), bytes_per_second: None };
        assert_eq!(self.c.control(&fold).status(), Status::Ok);
    }

    fn fold_away(&mut self, name: &str) {
        self.fold(name);
        while self.c.state().chain.iter().any(|layer| layer.name == name) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn taking(name: &str, second: u128) -> ChainOp {
    let created = format!("2026-01-01T00:00:{second:02}Z");
    ChainOp::Snapshot { name: name.into(), user_created: true, created, labels: Default::default() }
}

/// What a snapshot is read for.
#[derive(Clone, Copy, Debug)]
enum Taken {
    Clone,
    Raw,
    Qcow2,
}

const ALL: [Taken; 3] = [Taken::Clone, Taken::Raw, Taken::Qcow2];

impl Taken {
    /// Calls `meanwhile` when something was read and not all.
    fn take(
        self,
        view: &SnapshotView,
        place: &Path,
        meanwhile: impl FnOnce(),
    ) -> Result<PathBuf, Box<dyn std::error::Error>> {
        let (mut steps, mut meanwhile) = (0, Some(meanwhile));
        let mut progress = |_, _| {
            steps += 1;
            if let Some(meanwhile) = meanwhile.take_if(|_| steps == 2) {
                meanwhile();
            }
        };
        let target = place.join(format!("{self:?}"));
        match self {
            Self::Clone => {
                let options = CloneOptions { snapshot: "base".into(), ..CloneOptions::default() };
                clone_snapshot(view, &target, &options, &Pace::new(0), &mut progress)?;
            }
            Self::Raw => view.export(&File::create(&target)?, &mut progress)?,
            Self::Qcow2 => view.export_qcow2(&File::create(&target)?, &mut progress)?,
        }
        assert!(steps > 2, "it was too fast for this test");
        Ok(target)
    }
}

#[test]
fn a_snapshot_that_is_removed_while_it_is_cloned_or_exported_gives_neither() {
    for taken in ALL {
        let place = tempfile::tempdir().unwrap();
        let server = Server::start(place.path());
        let mut w = World::new(&server);
        let view = SnapshotView::open_beside(&place.path().join("replica"), "one").unwrap();
        let done = taken.take(&view, place.path(), || {
            w.remove("one");
            w.fold_away("one");
        });
        let refused =
            done.expect_err("the bytes of what was written later, as those of the snapshot").to_string();
        assert!(
            refused.contains("no snapshot one any more") && refused.contains("choose another"),
            "{refused}"
        );
        match taken {
            Taken::Clone => assert!(!place.path().join("Clone").exists(), "half a clone is left"),
            Taken::Raw => {}
            Taken::Qcow2 => {
                let mut magic = [0; 4];
                let _ = File::open(place.path().join("Qcow2")).unwrap().read_at(&mut magic, 0).unwrap();
                assert_eq!(magic, [0; 4], "half an image says that it is one");
            }
        }
    }
}

/// What was removed below a snapshot is folded with it, and the file that has its name afterwards is another one.
#[test]
fn a_snapshot_over_one_that_is_folded_away_is_exported_as_it_is() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut w = World::new(&server);
    let path = place.path().join("replica");
    let inode = || std::os::unix::fs::MetadataExt::ino(&path.join("volume-snap-two.img").metadata().unwrap());
    let before = inode();
    let view = SnapshotView::open_beside(&path, "two").unwrap();
    let image = Taken::Raw.take(&view, place.path(), || {
        w.remove("one");
        w.fold_away("one");
    });
    assert_ne!(inode(), before, "it was folded the other way about");
    let mut bytes = vec![0; MIB as usize];
    let image = File::open(image.unwrap()).unwrap();
    for (at, seed) in [(0, 1), (4, 99), (15, 16)] {
        image.read_exact_at(&mut bytes, at * M).unwrap();
        assert!(bytes == pattern(seed, MIB as usize), "MiB {at}");
    }
}

/// Its fold has copied and not changed the names: it waits for an operation on the chain, and then it is stopped.
#[test]
fn a_removed_snapshot_is_neither_cloned_nor_exported_with_or_without_a_process() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut w = World::new(&server);
    w.remove("one");
    let three = w.prepare(taking("three", 50));
    w.fold("one");
    while w.c.state().fold.is_none_or(|fold| fold.done < fold.total || fold.total == 0) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(w.c.control(&Control::FoldStop).status(), Status::Ok);
    while w.c.state().fold.is_some_and(|fold| fold.error.is_none()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(w.c.control(&Control::Abort { id: three }).status(), Status::Ok);
    assert!(w.c.state().chain.iter().any(|layer| layer.name == "one" && layer.removed));
    let path = place.path().join("replica");
    let refused = |opened: Result<SnapshotView, _>| {
        let refused: replica::store::OpenError = opened.map(drop).expect_err("a removed snapshot");
        let refused = refused.to_string();
        assert!(
            refused.contains("snapshot one is being removed") && refused.contains("choose another"),
            "{refused}"
        );
    };
    refused(SnapshotView::open_beside(&path, "one"));
    drop(w);
    server.stop();
    refused(SnapshotView::open(&path, Some("one")));
    // What stands on it reads the same however much of it was folded.
    for snapshot in [Some("two"), None] {
        let mut bytes = vec![0; MIB as usize];
        let view = SnapshotView::open(&path, snapshot).unwrap();
        for (at, seed) in [(0, 1), (4, 99), (15, 16)] {
            view.read_at(at * M, &mut bytes).unwrap();
            assert!(bytes == pattern(seed, MIB as usize), "{snapshot:?}: MiB {at}");
        }
    }
}

/// A replica that has lost its host's power may lack what of it was not flushed, until that is repaired.
#[test]
fn a_snapshot_that_is_not_settled_is_cloned_and_exported_when_it_is() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(place.path());
    let mut w = World::new(&server);
    w.write(8 * M, 100);
    w.snapshot("three");
    let view = SnapshotView::open_beside(&place.path().join("replica"), "three").unwrap();
    for taken in ALL {
        let refused = taken.take(&view, place.path(), || ()).unwrap_err().to_string();
        assert!(refused.contains("snapshot three is not known to be on stable storage"), "{refused}");
    }
    w.settle("three");
    // What a repair has put there before that is not in a view from before.
    view.check_lasting().unwrap_err();
    let view = SnapshotView::open_beside(&place.path().join("replica"), "three").unwrap();
    for taken in ALL {
        taken.take(&view, place.path(), || ()).unwrap();
    }
    let clone = SnapshotView::open(&place.path().join("Clone"), None).unwrap();
    let mut bytes = vec![0; MIB as usize];
    clone.read_at(8 * M, &mut bytes).unwrap();
    assert!(bytes == pattern(100, MIB as usize));
}
