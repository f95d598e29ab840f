//! Histories of several replicas against a model in memory: whatever is written, zeroed, snapshotted, removed, folded,
//! reverted, grown, cloned, filled from another one and broken off, the head and every snapshot of every replica read as
//! the model says.
//!
//! The engine of these replicas does as the real one: a chain operation is prepared everywhere, then carried out
//! everywhere; after a crash in between it is finished if any replica has carried it out, and taken back else.
//! `LH_HISTORIES=n` plays so many; a failure is made small, and proptest says how to play it again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lh_block::{BLOCK, Instance};
use lh_wire::{ChainOp, Keep, LayerInfo, ReplicaState};
use proptest::prelude::*;

use super::super::clone::{CloneOptions, clone_snapshot};
use super::super::error::ChainError;
use super::super::fold::Fold;
use super::super::offline::SnapshotView;
use super::super::pace::Pace;
use super::tape::Tape;
use super::volume::{SIZE, Volume, extent, revert_op, snapshot_op, temporary};

const BLOCKS: u64 = SIZE / BLOCK;
/// An expansion adds so many blocks, up to so many in all.
const GROWS_BY: u64 = 16;
const BLOCKS_MAX: u64 = 2 * BLOCKS;
const LAYERS_MAX: usize = 8;
/// Blocks of an image that goes from one replica to another.
const PART: u64 = 8;

#[derive(Clone, Debug)]
enum Data {
    Write { start: u64, blocks: u64, byte: u8 },
    Zero { start: u64, blocks: u64 },
}

#[derive(Clone, Copy, Debug)]
enum Chain {
    Snapshot,
    Remove,
    Revert,
    Expand,
}

/// The power of a replica's host goes after so many operations on its directory; `lose`: and takes what was not synced.
#[derive(Clone, Copy, Debug)]
struct Crash {
    steps: usize,
    lose: bool,
}

#[derive(Clone, Debug)]
enum Op {
    Data(Data),
    /// On the one picked; on `crash`'s replica the power goes in between.
    Chain {
        what: Chain,
        pick: usize,
        crash: Option<(usize, Crash)>,
    },
    /// One replica folds a removed snapshot away, while clients go on; it may be killed in the end, or stopped.
    Fold {
        replica: usize,
        pick: usize,
        beside: Vec<(usize, Data)>,
        end: End,
        crash: Option<Crash>,
    },
    /// A replica is filled from another one, from nothing or from what it has; both may be begun several times.
    Fill {
        replica: usize,
        keep: bool,
        killed_after: Option<usize>,
        crash: Option<Crash>,
    },
    /// A replica misses what follows.
    Leave {
        replica: usize,
    },
    Clone {
        replica: usize,
        pick: usize,
    },
    Flush,
    Punch {
        replica: usize,
    },
    Kill {
        replica: usize,
    },
    Close {
        replica: usize,
    },
}

#[derive(Clone, Copy, Debug)]
enum End {
    Done,
    Stopped,
    Killed,
}

fn data() -> impl Strategy<Value = Data> {
    let place = || (0..BLOCKS_MAX, 1_u64..12);
    prop_oneof![
        (place(), 1_u8..250).prop_map(|((start, blocks), byte)| Data::Write { start, blocks, byte }),
        place().prop_map(|(start, blocks)| Data::Zero { start, blocks }),
    ]
}

fn crash() -> impl Strategy<Value = Crash> {
    (0_usize..30, any::<bool>()).prop_map(|(steps, lose)| Crash { steps, lose })
}

fn op() -> impl Strategy<Value = Op> {
    let replica = || 0_usize..3;
    let what = prop_oneof![
        4 => Just(Chain::Snapshot), 3 => Just(Chain::Remove), 1 => Just(Chain::Revert), 1 => Just(Chain::Expand)
    ];
    let end = prop_oneof![3 => Just(End::Done), 1 => Just(End::Stopped), 1 => Just(End::Killed)];
    prop_oneof![
        10 => data().prop_map(Op::Data),
        6 => (what, any::<usize>(), prop::option::weighted(0.4, (replica(), crash())))
            .prop_map(|(what, pick, crash)| Op::Chain { what, pick, crash }),
        4 => (replica(), any::<usize>(), prop::collection::vec((0_usize..4, data()), 0..6), end, prop::option::of(crash()))
            .prop_map(|(replica, pick, beside, end, crash)| Op::Fold { replica, pick, beside, end, crash }),
        2 => (replica(), any::<bool>(), prop::option::of(0_usize..12), prop::option::of(crash()))
            .prop_map(|(replica, keep, killed_after, crash)| Op::Fill { replica, keep, killed_after, crash }),
        1 => replica().prop_map(|replica| Op::Leave { replica }),
        1 => (replica(), any::<usize>()).prop_map(|(replica, pick)| Op::Clone { replica, pick }),
        1 => Just(Op::Flush),
        2 => replica().prop_map(|replica| Op::Punch { replica }),
        1 => replica().prop_map(|replica| Op::Kill { replica }),
        1 => replica().prop_map(|replica| Op::Close { replica }),
    ]
}

/// What the volume is, block by block.
#[derive(Debug)]
struct Model {
    head: Vec<u8>,
    /// Snapshots that are not removed.
    live: BTreeMap<String, Vec<u8>>,
}

struct Replica {
    path: PathBuf,
    volume: Option<Volume>,
    tape: Arc<Tape>,
}

impl Replica {
    fn volume(&mut self) -> &mut Volume {
        self.volume.as_mut().unwrap()
    }

    fn state(&mut self) -> ReplicaState {
        self.volume().directory.state()
    }

    /// As after SIGKILL, or after a power cut that the tape has told of.
    fn reopen(&mut self, lose: bool) {
        self.volume = None;
        if lose {
            self.tape.lose_unsynced();
        }
        self.tape = Arc::new(Tape::default());
        self.volume = Some(Volume::open_taped(&self.path, &self.tape).unwrap());
    }

    /// Does something during which the power may go. `None`: it went, and the directory was opened again.
    fn under<T>(
        &mut self,
        crash: Option<Crash>,
        what: impl FnOnce(&mut Volume) -> Result<T, ChainError>,
    ) -> Option<Result<T, ChainError>> {
        if let Some(crash) = crash {
            self.tape.stop_after(crash.steps);
        }
        let done = what(self.volume());
        if self.tape.stopped() {
            self.reopen(crash.is_some_and(|c| c.lose));
            return None;
        }
        self.tape.go_on();
        Some(done)
    }

    fn data(&mut self, data: &Data, blocks: u64) {
        let (start, count) = data.within(blocks);
        match data {
            Data::Write { byte, .. } => self.volume().write(extent(start, count), *byte),
            Data::Zero { .. } => self.volume().zero(extent(start, count)),
        }
    }
}

impl Data {
    fn within(&self, blocks: u64) -> (u64, u64) {
        let (Self::Write { start, blocks: count, .. } | Self::Zero { start, blocks: count }) = self;
        let start = start % blocks;
        (start, (*count).min(blocks - start))
    }
}

struct World {
    place: tempfile::TempDir,
    replicas: Vec<Replica>,
    /// Misses what is done.
    out: Option<usize>,
    model: Model,
    count: u128,
}

impl World {
    fn new() -> Self {
        let place = temporary();
        let replica = |n: usize| {
            let path = place.path().join(format!("r{n}"));
            drop(Volume::create(&path));
            let tape = Arc::new(Tape::default());
            let volume = Some(Volume::open_taped(&path, &tape).unwrap());
            Replica { path, volume, tape }
        };
        let replicas = (0..3).map(replica).collect();
        let model = Model { head: vec![0; usize::try_from(BLOCKS).unwrap()], live: BTreeMap::new() };
        Self { place, replicas, out: None, model, count: 0 }
    }

    fn blocks(&self) -> u64 {
        self.model.head.len() as u64
    }

    fn members(&self) -> impl Iterator<Item = usize> + use<> {
        let (out, count) = (self.out, self.replicas.len());
        (0..count).filter(move |n| Some(*n) != out)
    }

    fn live(&self, pick: usize) -> Option<String> {
        self.model.live.keys().nth(pick % self.model.live.len().max(1)).cloned()
    }

    fn data(&mut self, data: &Data) {
        let blocks = self.blocks();
        for n in self.members() {
            self.replicas[n].data(data, blocks);
        }
        let (start, count) = data.within(blocks);
        let byte = if let Data::Write { byte, .. } = data { *byte } else { 0 };
        self.model.head[usize::try_from(start).unwrap()..][..usize::try_from(count).unwrap()].fill(byte);
    }

    fn chain(&mut self, what: Chain, pick: usize, crash: Option<(usize, Crash)>) {
        let room = self.members().all(|n| self.replicas[n].state().chain.len() < LAYERS_MAX);
        let name = self.live(pick);
        let op = match (what, name) {
            (Chain::Snapshot, _) if room => snapshot_op(&format!("s{}", self.count)),
            (Chain::Expand, _) if room && self.blocks() < BLOCKS_MAX => {
                let size = (self.blocks() + GROWS_BY) * BLOCK;
                ChainOp::Expand {
                    name: Some(format!("to-{size}")),
                    size,
                    created: "2026-11-20T06:03:39Z".into(),
                }
            }
            (Chain::Remove, Some(name)) => ChainOp::MarkRemoved { name },
            (Chain::Revert, Some(name)) => revert_op(&name),
            _ => return,
        };
        self.count += 1;
        if self.carry_out(self.count, &op, crash) {
            self.apply(op);
        }
    }

    /// Whether it was decided.
    fn carry_out(&mut self, id: u128, op: &ChainOp, crash: Option<(usize, Crash)>) -> bool {
        let id = Instance(id);
        let of = |n: usize| crash.filter(|(replica, _)| *replica == n).map(|(_, crash)| crash);
        for commits in [false, true] {
            for n in self.members() {
                let step = |volume: &mut Volume| {
                    if commits { volume.commit(id.0) } else { volume.directory.prepare(id, op) }
                };
                match self.replicas[n]
                    .under(of(n).filter(|_| commits == (self.count.is_multiple_of(2))), step)
                {
                    Some(done) => done.unwrap(),
                    None => return self.settle(id),
                }
            }
        }
        true
    }

    /// What a starting engine does about an operation that the one before has left.
    fn settle(&mut self, id: Instance) -> bool {
        let members: Vec<usize> = self.members().collect();
        let states: Vec<_> = members.iter().map(|n| self.replicas[*n].state()).collect();
        let decided = states.iter().any(|s| s.committed == Some(id));
        for (n, state) in members.into_iter().zip(states) {
            let prepared = state.prepared.is_some_and(|(prepared, _)| prepared == id);
            let volume = self.replicas[n].volume();
            match (decided, prepared) {
                (true, true) => volume.commit(id.0).unwrap(),
                (true, false) => assert_eq!(state.committed, Some(id), "decided, and {n} was never asked"),
                (false, true) => volume.directory.abort(id).unwrap(),
                (false, false) => {}
            }
        }
        decided
    }

    fn apply(&mut self, op: ChainOp) {
        match op {
            ChainOp::Snapshot { name, .. } => drop(self.model.live.insert(name, self.model.head.clone())),
            ChainOp::Expand { size, .. } => {
                self.model.live.insert(format!("to-{size}"), self.model.head.clone());
                self.model.head.resize(usize::try_from(size / BLOCK).unwrap(), 0);
            }
            ChainOp::MarkRemoved { name } => drop(self.model.live.remove(&name)),
            ChainOp::Revert { name, .. } => {
                let size = self.model.head.len();
                self.model.head.clone_from(&self.model.live[&name]);
                self.model.head.resize(size, 0);
            }
        }
    }

    fn fold(&mut self, n: usize, pick: usize, beside: &[(usize, Data)], end: End, crash: Option<Crash>) {
        let removed: Vec<String> =
            self.replicas[n].state().chain.into_iter().filter(|l| l.removed).map(|l| l.name).collect();
        let Some(name) = removed.get(pick % removed.len().max(1)) else { return };
        if let Some(crash) = crash {
            self.replicas[n].tape.stop_after(crash.steps);
        }
        let Ok(mut fold) = self.replicas[n].volume().begin_fold(name) else {
            // Several stand on it; or the power went.
            return self.after_fold(n, crash);
        };
        let mut goes_on = true;
        for (steps, data) in beside {
            for _ in 0..*steps {
                goes_on = goes_on && self.fold_step(n, &mut fold);
            }
            if self.replicas[n].tape.stopped() {
                break;
            }
            goes_on = self.make_way(n, &mut fold, data, goes_on);
            if self.replicas[n].tape.stopped() {
                break;
            }
            // The power goes in the fold, not in what clients do.
            let left = self.replicas[n].tape.go_on();
            self.data(data);
            left.into_iter().for_each(|left| self.replicas[n].tape.stop_after(left));
        }
        if matches!(end, End::Stopped) {
            fold.stop("it was stopped");
        }
        while goes_on && !matches!(end, End::Killed) {
            goes_on = self.fold_step(n, &mut fold);
        }
        self.after_fold(n, crash);
        if matches!(end, End::Killed) && goes_on {
            self.replicas[n].reopen(false);
        }
    }

    /// A client's write waits until what it meets is not claimed.
    fn make_way(&mut self, n: usize, fold: &mut Fold, data: &Data, mut goes_on: bool) -> bool {
        let (start, count) = data.within(self.blocks());
        let meets = |v: &Volume| v.claim.is_some_and(|claim| claim.overlaps(extent(start, count)));
        while goes_on && meets(self.replicas[n].volume()) {
            goes_on = self.fold_step(n, fold);
        }
        goes_on
    }

    /// `false`: it is over, or the power went.
    fn fold_step(&mut self, n: usize, fold: &mut Fold) -> bool {
        let replica = &mut self.replicas[n];
        match replica.volume().fold_step(fold) {
            Ok(goes_on) => goes_on,
            Err(_) if replica.tape.stopped() => false,
            Err(e) => panic!("{e}"),
        }
    }

    fn after_fold(&mut self, n: usize, crash: Option<Crash>) {
        let replica = &mut self.replicas[n];
        if replica.tape.stopped() {
            replica.reopen(crash.is_some_and(|c| c.lose));
        }
        replica.tape.go_on();
        replica.volume().claim = None;
    }

    /// Fills a replica from a member. What is missing elsewhere is nothing that it may have.
    fn fill(&mut self, n: usize, keep: bool, killed_after: Option<usize>, crash: Option<Crash>) {
        if self.members().all(|m| m == n) || self.out.is_some_and(|out| out != n) {
            return;
        }
        let source = self.members().find(|m| *m != n).unwrap();
        for (crash, killed_after) in [(crash, killed_after), (None, killed_after), (None, None)] {
            if self.begin_fill(source, n, keep, crash) && self.copy_all(source, n, killed_after) {
                break;
            }
        }
        self.out = self.out.filter(|out| *out != n);
    }

    fn begin_fill(&mut self, source: usize, n: usize, keep: bool, crash: Option<Crash>) -> bool {
        let chain = self.replicas[source].state().chain;
        let own = self.replicas[n].state();
        let size = self.blocks() * BLOCK;
        let target = &mut self.replicas[n];
        target.volume().flush();
        if own.prepared.is_some() {
            let id = own.prepared.as_ref().map(|(id, _)| *id).unwrap();
            target.volume().directory.abort(id).unwrap();
        }
        let keep = Some(keeps(&own, &chain)).filter(|_| keep);
        let began = target.under(crash, |volume| {
            let parts = match &keep {
                Some(keep) => volume.directory.begin_catch_up(size, &chain, keep)?,
                None => volume.directory.begin_rebuild(size, &chain)?,
            };
            volume.store.replace(parts);
            Ok(())
        });
        began.map(Result::unwrap).is_some()
    }

    /// Makes every layer what it is at the source. `false`: the target was killed before.
    fn copy_all(&mut self, source: usize, n: usize, killed_after: Option<usize>) -> bool {
        let mut target = self.replicas[n].volume.take().unwrap();
        let (mut puts, chain) = (0, self.replicas[source].state().chain);
        for layer in &chain {
            let (theirs, own) =
                (self.replicas[source].volume().layer(&layer.name), target.layer(&layer.name));
            for at in (0..theirs.len()).step_by(usize::try_from(PART).unwrap()) {
                let part = at..theirs.len().min(at + usize::try_from(PART).unwrap());
                if theirs[part.clone()] == own[part.clone()] {
                    continue;
                }
                if killed_after == Some(puts) {
                    self.replicas[n].volume = Some(target);
                    self.replicas[n].reopen(false);
                    return false;
                }
                target.put(&layer.name, at as u64, &theirs[part]);
                puts += 1;
            }
        }
        target.end_rebuild();
        self.replicas[n].volume = Some(target);
        true
    }

    fn clone_of(&mut self, n: usize, pick: usize) {
        let Some(name) = self.live(pick).filter(|_| self.out != Some(n)) else { return };
        let to = self.place.path().join("clone");
        let options = CloneOptions { snapshot: "base".into(), labels: BTreeMap::new() };
        let own = self.replicas[n].state();
        if let Some(top) = own.unsettled.last() {
            // Its engine says so after a flush.
            self.replicas[n].volume().flush();
            self.replicas[n].volume().directory.store_settled(top).unwrap();
        }
        let view = SnapshotView::open_beside(&self.replicas[n].path, &name).unwrap();
        clone_snapshot(&view, &to, &options, &Pace::new(0), &mut |_, _| {}).unwrap();
        let (clone, expected) = (Volume::open(&to).unwrap(), &self.model.live[&name]);
        assert_eq!(clone.blocks()[..expected.len()], expected[..], "a clone of {name}");
        drop(clone);
        fs::remove_dir_all(&to).unwrap();
    }

    fn step(&mut self, op: &Op) {
        match op {
            Op::Data(data) => self.data(data),
            Op::Chain { what, pick, crash } => {
                let crash = crash.filter(|(replica, _)| Some(*replica) != self.out);
                self.chain(*what, *pick, crash);
            }
            Op::Fold { replica, pick, beside, end, crash } if self.out != Some(*replica) => {
                self.fold(*replica, *pick, beside, *end, *crash);
            }
            Op::Fold { .. } => {}
            Op::Fill { replica, keep, killed_after, crash } => {
                self.fill(*replica, *keep, *killed_after, *crash)
            }
            Op::Leave { replica } => self.out = self.out.or(Some(*replica)),
            Op::Clone { replica, pick } => self.clone_of(*replica, *pick),
            Op::Flush => self.members().for_each(|n| self.replicas[n].volume().flush()),
            Op::Punch { replica } => {
                self.replicas[*replica].volume().flush();
                self.replicas[*replica].volume().punch();
            }
            Op::Kill { replica } => self.replicas[*replica].reopen(false),
            Op::Close { replica } => {
                let replica = &mut self.replicas[*replica];
                replica.volume.take().unwrap().close();
                replica.reopen(false);
                assert!(replica.state().clean);
            }
        }
    }

    fn check(&mut self) {
        for n in self.members() {
            let model = &self.model;
            let replica = &mut self.replicas[n];
            assert_eq!(replica.volume().blocks(), model.head, "the head of replica {n}");
            let named = |l: LayerInfo| Some(l).filter(|l| !l.removed && !l.name.is_empty()).map(|l| l.name);
            let names: BTreeSet<String> = replica.state().chain.into_iter().filter_map(named).collect();
            assert_eq!(names, model.live.keys().cloned().collect(), "the snapshots of replica {n}");
            for (name, expected) in &model.live {
                // A volume that has grown shows its older snapshots as long as itself.
                let mut expected = expected.clone();
                expected.resize(model.head.len(), 0);
                assert_eq!(reads(&replica.path, name), expected, "snapshot {name} of replica {n}");
            }
        }
    }
}

/// What becomes of the layers of a replica that has these, when it takes that chain over.
fn keeps(own: &ReplicaState, chain: &[LayerInfo]) -> Keep {
    let parent = own.chain.last().map(|head| head.parent.clone()).unwrap_or_default();
    let mut at = chain.last();
    // The layer of the head's branch that stands where the own head stands.
    while let Some(layer) = at.filter(|layer| layer.parent != parent) {
        at = chain.iter().find(|l| l.name == layer.parent && !layer.parent.is_empty());
    }
    let heir = at.map(|l| l.name.clone()).filter(|name| own.chain.iter().all(|l| l.name != *name));
    Keep { head: heir.unwrap_or_default(), unsure: chain.iter().map(|l| l.name.clone()).collect() }
}

fn reads(path: &Path, snapshot: &str) -> Vec<u8> {
    let view = SnapshotView::open_beside(path, snapshot).unwrap();
    let mut bytes = vec![0; usize::try_from(view.size()).unwrap()];
    view.read_at(0, &mut bytes).unwrap();
    bytes.chunks(4096).map(|block| block[0]).collect()
}

fn play(ops: &[Op]) {
    let mut world = World::new();
    for op in ops {
        world.step(op);
        world.check();
    }
    if let Some(out) = world.out {
        world.fill(out, true, None, None);
    }
    for replica in &mut world.replicas {
        replica.volume.take().unwrap().close();
        replica.reopen(false);
    }
    world.check();
}

/// Histories of the usual run, or what `LH_HISTORIES` says; with `LH_FULL=1` as many as are promised.
fn histories() -> u32 {
    let full = std::env::var("LH_FULL").is_ok_and(|v| v == "1");
    let said = std::env::var("LH_HISTORIES").ok().and_then(|n| n.parse().ok());
    said.unwrap_or(if full { 20_000 } else { 150 })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(histories()))]
    #[test]
    fn every_snapshot_of_every_replica_is_the_models(ops in prop::collection::vec(op(), 1..40)) {
        play(&ops);
    }
}
