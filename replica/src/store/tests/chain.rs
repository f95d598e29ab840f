//! Snapshots, removals, folds, reverts and expansions in any order, with writes and zeroes in between and the process
//! killed at any point, against whole images in memory: the head and every snapshot that is not removed read as they
//! should, the index says what files and zero maps say, and who reads the granted files is not deceived.

use std::collections::BTreeMap;
use std::path::Path;

use lh_block::{BLOCK, Extent};
use lh_wire::{Keep, LayerInfo};
use proptest::prelude::*;

use super::super::fold::Fold;
use super::super::offline::SnapshotView;
use super::super::ranges::RangeSet;
use super::neighbour::Neighbour;
use super::volume::{SIZE, Volume, extent, revert_op, temporary};

const BLOCKS: u64 = SIZE / BLOCK;
/// An expansion adds so many blocks.
const MORE: u64 = 8;

#[derive(Clone, Debug)]
enum Op {
    Write {
        start: u64,
        blocks: u64,
        byte: u8,
    },
    Zero {
        start: u64,
        blocks: u64,
    },
    Snapshot,
    Remove(usize),
    Revert(usize),
    Expand,
    /// Begins to fold the n-th removed snapshot, if none is being folded.
    Fold(usize),
    /// Goes on with it for so many steps.
    Steps(usize),
    StopFold,
    Flush,
    Punch,
    /// Whoever reads the granted files asks where blocks are.
    Look,
    Kill,
    Close,
}

fn op() -> impl Strategy<Value = Op> {
    let place = || (0..BLOCKS + 2 * MORE, 1_u64..16);
    prop_oneof![
        8 => (place(), 1_u8..250).prop_map(|((start, blocks), byte)| Op::Write { start, blocks, byte }),
        6 => place().prop_map(|(start, blocks)| Op::Zero { start, blocks }),
        5 => Just(Op::Snapshot),
        6 => (0_usize..8).prop_map(Op::Remove),
        1 => (0_usize..8).prop_map(Op::Revert),
        1 => Just(Op::Expand),
        6 => (0_usize..8).prop_map(Op::Fold),
        8 => (1_usize..12).prop_map(Op::Steps),
        1 => Just(Op::StopFold),
        3 => Just(Op::Flush),
        3 => Just(Op::Punch),
        6 => Just(Op::Look),
        1 => Just(Op::Kill),
        1 => Just(Op::Close),
    ]
}

struct Snapshot {
    image: Vec<u8>,
    removed: bool,
}

/// What everything reads as.
struct Model {
    head: Vec<u8>,
    snapshots: BTreeMap<String, Snapshot>,
    made: usize,
    operations: u128,
}

struct World {
    volume: Volume,
    model: Model,
    fold: Option<Fold>,
    neighbour: Option<Neighbour>,
    /// Folds that came to their end.
    folded: usize,
}

impl World {
    fn new(path: &Path) -> Self {
        let model = Model {
            head: vec![0; usize::try_from(BLOCKS).unwrap()],
            snapshots: BTreeMap::new(),
            made: 0,
            operations: 0,
        };
        Self { volume: Volume::create(path), model, fold: None, neighbour: None, folded: 0 }
    }

    /// The n-th snapshot that is removed, or is not.
    fn name(&self, n: usize, removed: bool) -> Option<String> {
        let names: Vec<_> =
            self.model.snapshots.iter().filter(|(_, s)| s.removed == removed).map(|(n, _)| n).collect();
        names.get(n % names.len().max(1)).map(|n| (*n).clone())
    }

    fn operation(&mut self) -> u128 {
        self.model.operations += 1;
        self.model.operations
    }

    fn range(&self, start: u64, blocks: u64) -> std::ops::Range<usize> {
        let (start, len) = (usize::try_from(start).unwrap(), usize::try_from(blocks).unwrap());
        start.min(self.model.head.len())..(start + len).min(self.model.head.len())
    }

    /// A client's change of a range that is claimed waits for the claim's end.
    fn wait_for_claim(&mut self, range: Extent) {
        while self.volume.claim.is_some_and(|claim| claim.overlaps(range)) {
            self.step();
        }
    }

    fn step(&mut self) {
        self.check_neighbour();
        let Some(fold) = &mut self.fold else { return };
        let name = fold.plan().name.clone();
        self.volume.fold_step(fold).unwrap();
        // Once the names have changed, what is left is that writes go on.
        while !fold.is_ended() && !self.volume.directory.state().chain.iter().any(|l| l.name == name) {
            self.volume.fold_step(fold).unwrap();
        }
        if fold.is_ended() {
            let state = fold.state();
            assert!(state.error.as_deref().is_none_or(|e| e == "stopped"), "{state:?}");
            if state.error.is_none() {
                assert_eq!(state.done, state.total);
                self.model.snapshots.remove(&name).expect("folded once");
                self.folded += 1;
            }
            self.fold = None;
        }
    }

    fn finish_fold(&mut self) {
        while self.fold.is_some() {
            self.step();
        }
    }

    fn stop_fold(&mut self) {
        if let Some(fold) = &mut self.fold {
            fold.stop("stopped");
        }
        self.finish_fold();
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Write { start, blocks, byte } => {
                let range = self.range(*start, *blocks);
                if !range.is_empty() {
                    let extent = extent(range.start as u64, range.len() as u64);
                    self.wait_for_claim(extent);
                    self.volume.write(extent, *byte);
                    self.model.head[range].fill(*byte);
                }
            }
            Op::Zero { start, blocks } => {
                let range = self.range(*start, *blocks);
                if !range.is_empty() {
                    let extent = extent(range.start as u64, range.len() as u64);
                    self.wait_for_claim(extent);
                    self.volume.zero(extent);
                    self.model.head[range].fill(0);
                }
            }
            Op::Snapshot => self.snapshot(),
            Op::Remove(n) => {
                if let Some(name) = self.name(*n, false) {
                    let id = self.operation();
                    self.volume.remove(id, &name).unwrap();
                    self.model.snapshots.get_mut(&name).unwrap().removed = true;
                }
            }
            Op::Revert(n) => self.revert(*n),
            Op::Expand => self.expand(),
            Op::Fold(n) => self.begin_fold(*n),
            Op::Steps(n) => (0..*n).for_each(|_| self.step()),
            Op::StopFold => self.stop_fold(),
            Op::Flush => self.volume.flush(),
            Op::Punch => drop(self.volume.punch()),
            Op::Look => self.look(),
            Op::Kill => self.reopen(),
            Op::Close => {
                self.stop_fold();
                self.volume.flush();
                let closing = self.volume.store.close();
                self.volume.directory.close_clean(closing).unwrap();
                self.reopen();
                assert!(self.volume.directory.state().clean);
            }
        }
    }

    fn snapshot(&mut self) {
        if self.model.snapshots.len() < 7 {
            let (name, id) = (format!("s{}", self.model.made), self.operation());
            self.model.made += 1;
            self.volume.snapshot(id, &name).unwrap();
            let snapshot = Snapshot { image: self.model.head.clone(), removed: false };
            self.model.snapshots.insert(name, snapshot);
        }
    }

    fn revert(&mut self, n: usize) {
        let Some(name) = self.name(n, false) else { return };
        self.stop_fold();
        self.volume.flush();
        let id = self.operation();
        self.volume.carry_out(id, &revert_op(&name)).unwrap();
        self.model.head = self.model.snapshots[&name].image.clone();
    }

    fn expand(&mut self) {
        let blocks = self.model.head.len() as u64 + MORE;
        if blocks > BLOCKS + 2 * MORE || self.model.snapshots.len() >= 7 {
            return;
        }
        let (id, size) = (self.operation(), blocks * BLOCK);
        self.volume.expand(id, size).unwrap();
        let snapshot = Snapshot { image: self.model.head.clone(), removed: false };
        self.model.snapshots.insert(format!("expand-{size}"), snapshot);
        let longer = usize::try_from(blocks).unwrap();
        self.model.head.resize(longer, 0);
        self.model.snapshots.values_mut().for_each(|s| s.image.resize(longer, 0));
    }

    fn begin_fold(&mut self, n: usize) {
        let (Some(name), true) = (self.name(n, true), self.fold.is_none()) else { return };
        match self.volume.begin_fold(&name) {
            Ok(fold) => self.fold = Some(fold),
            Err(err) => assert!(err.to_string().contains("layers stand on"), "{err}"),
        }
    }

    fn look(&mut self) {
        match self.neighbour.as_mut().filter(|neighbour| !neighbour.is_over()) {
            Some(neighbour) => neighbour.look(&self.volume),
            None => self.neighbour = Some(Neighbour::new(&mut self.volume)),
        }
        let read = self.neighbour.as_ref().map_or(0, |neighbour| neighbour.check(&self.model.head));
        assert_eq!(read, self.model.head.len());
    }

    fn check_neighbour(&self) {
        if let Some(neighbour) = &self.neighbour {
            neighbour.check(&self.model.head);
        }
    }

    /// The process is killed and another one opens the directory.
    fn reopen(&mut self) {
        self.fold = None;
        let path = self.volume.path();
        let spare = temporary();
        let other =
            std::mem::replace(&mut self.volume, Volume::create_sized(&spare.path().join("spare"), BLOCK));
        drop(other);
        self.volume = Volume::open(&path).unwrap();
    }

    fn check(&self) {
        assert_eq!(self.volume.blocks(), self.model.head);
        self.check_neighbour();
        check_index(&self.volume);
        let mut names: Vec<_> = self.volume.directory.state().chain.into_iter().map(|l| l.name).collect();
        names.sort();
        let known: Vec<_> = [""].into_iter().chain(self.model.snapshots.keys().map(String::as_str)).collect();
        assert_eq!(names, known);
    }

    fn check_snapshots(&self) {
        for (name, snapshot) in self.model.snapshots.iter().filter(|(_, s)| !s.removed) {
            let view = SnapshotView::open_beside(&self.volume.path(), name).unwrap();
            let mut bytes = vec![0; snapshot.image.len() * 4096];
            view.read_at(0, &mut bytes).unwrap();
            let reads: Vec<_> = bytes.chunks(4096).map(|block| block[0]).collect();
            assert_eq!(reads, snapshot.image, "{name}");
        }
    }
}

/// The index names for each block the first layer from above that says anything of it.
fn check_index(volume: &Volume) {
    let store = &volume.store;
    let mut rest = RangeSet::default();
    rest.insert(0..store.size / BLOCK);
    for (rank, layer) in store.up_to(u8::MAX).rev() {
        for part in rest.clone().iter() {
            let own = store.own(layer, part).unwrap();
            for (set, holder) in [(&own.data, Some(layer)), (&own.zero, None)] {
                for range in set.iter() {
                    let said = store.places.runs(range.clone());
                    let right = said.clone().all(|(_, value)| store.holder(value) == holder);
                    let name = &store.at(layer).name;
                    assert!(
                        right,
                        "{:?}, and {name:?} (rank {rank}) has {range:?}",
                        said.collect::<Vec<_>>()
                    );
                }
                rest.subtract(set);
            }
        }
    }
    for range in rest.iter() {
        assert_eq!(store.places.runs(range.clone()).collect::<Vec<_>>(), [(range, 0)]);
    }
}

fn run(place: &Path, ops: &[Op]) -> usize {
    let mut world = World::new(&place.join("replica"));
    for (n, op) in ops.iter().enumerate() {
        world.apply(op);
        world.check();
        if n % 8 == 0 || matches!(op, Op::Kill | Op::Revert(_) | Op::Expand) {
            world.check_snapshots();
        }
    }
    world.finish_fold();
    // What was removed goes in the end, whatever was begun, but where it branches.
    let removed = world.model.snapshots.values().filter(|s| s.removed).count();
    for n in (0..removed).rev() {
        world.begin_fold(n);
        world.finish_fold();
    }
    world.check();
    world.check_snapshots();
    world.reopen();
    world.check();
    world.check_snapshots();
    world.folded
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn in_ram(ops in prop::collection::vec(op(), 1..90)) {
        run(temporary().path(), &ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn on_disk(ops in prop::collection::vec(op(), 1..60)) {
        run(tempfile::tempdir().unwrap().path(), &ops);
    }
}

/// The word that a snapshot is settled comes after it was folded away.
#[test]
fn a_snapshot_is_not_settled_because_one_of_its_name_was() {
    let place = temporary();
    let mut volume = Volume::create(&place.path().join("r"));
    volume.snapshot(1, "one").unwrap();
    volume.remove(2, "one").unwrap();
    volume.fold("one").unwrap();
    volume.directory.store_settled("one").unwrap();
    volume.snapshot(3, "one").unwrap();
    assert_eq!(volume.directory.state().unsettled, ["one"]);
    volume.directory.store_settled("one").unwrap();
    volume.snapshot(4, "two").unwrap();
    assert_eq!(volume.directory.state().unsettled, ["two"]);
}

/// A replica that was out has the snapshot that is settled; or only one of that name, over others that were taken meanwhile.
#[test]
fn what_is_settled_of_a_chain_that_is_taken_over_has_to_be_known() {
    let layer = |name: &str, parent: &str| LayerInfo {
        name: name.into(),
        parent: parent.into(),
        created: "2026-11-20T06:03:39Z".into(),
        length: SIZE,
        ..LayerInfo::default()
    };
    let take_over = |chain: &[LayerInfo], keep: &Keep| {
        let directory = temporary();
        let mut volume = Volume::create(directory.path());
        volume.snapshot(1, "one").unwrap();
        volume.directory.store_settled("one").unwrap();
        volume.directory.begin_catch_up(SIZE, chain, keep).unwrap();
        volume.directory.state().unsettled
    };
    let chain = [layer("one", ""), layer("", "one")];
    assert!(take_over(&chain, &Keep::default()).is_empty());
    let chain = [layer("two", ""), layer("one", "two"), layer("", "one")];
    let unsure = vec!["one".to_owned(), String::new()];
    assert_eq!(take_over(&chain, &Keep { head: "two".into(), unsure }), ["two", "one"]);

    // It was folded away here; the members have taken one of its name since, which the head becomes.
    let directory = temporary();
    let mut volume = Volume::create(directory.path());
    volume.directory.store_settled("one").unwrap();
    let keep = Keep { head: "one".into(), unsure: Vec::new() };
    volume.directory.begin_catch_up(SIZE, &[layer("one", ""), layer("", "one")], &keep).unwrap();
    assert_eq!(volume.directory.state().unsettled, ["one"]);
}
