//! A replica on a real directory against arrays: whatever is written, zeroed, snapshotted, put and killed, every layer
//! reads as it should, and reads the same when the directory is opened again.

use std::collections::BTreeSet;
use std::path::Path;

use lh_block::BLOCK;
use lh_wire::BlockState;
use proptest::prelude::*;

use super::super::offline::SnapshotView;
use super::volume::{SIZE, Volume, extent, temporary};

const BLOCKS: usize = (SIZE / BLOCK) as usize;

type Cell = (BlockState, u8);
const ABSENT: Cell = (BlockState::Absent, 0);

#[derive(Clone, Debug)]
enum Op {
    Write { start: u64, blocks: u64, byte: u8 },
    Zero { start: u64, blocks: u64 },
    Put { layer: usize, start: u64, image: Vec<Cell> },
    Snapshot,
    Flush,
    Punch,
    Kill,
    Close,
}

fn place() -> impl Strategy<Value = (u64, u64)> {
    (0..BLOCKS as u64, 1_u64..12).prop_map(|(start, len)| (start, len.min(BLOCKS as u64 - start)))
}

fn image() -> impl Strategy<Value = Vec<Cell>> {
    let cell = prop_oneof![
        Just(ABSENT),
        Just((BlockState::Zero, 0)),
        (1_u8..250).prop_map(|byte| (BlockState::Data, byte)),
    ];
    prop::collection::vec(cell, 1..8)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (place(), 1_u8..250).prop_map(|((start, blocks), byte)| Op::Write { start, blocks, byte }),
        8 => place().prop_map(|(start, blocks)| Op::Zero { start, blocks }),
        3 => (0_usize..6, place(), image()).prop_map(|(layer, (start, _), mut image)| {
            image.truncate(BLOCKS - usize::try_from(start).unwrap());
            Op::Put { layer, start, image }
        }),
        2 => Just(Op::Snapshot),
        3 => Just(Op::Flush),
        3 => Just(Op::Punch),
        1 => Just(Op::Kill),
        1 => Just(Op::Close),
    ]
}

/// What each layer of the chain says, base first.
struct Model {
    layers: Vec<Vec<Cell>>,
    names: Vec<String>,
}

impl Model {
    fn new() -> Self {
        Self { layers: vec![vec![ABSENT; BLOCKS]], names: vec![String::new()] }
    }

    /// What a block reads as through the layers up to one.
    fn read(&self, top: usize, block: usize) -> u8 {
        let said = self.layers[..=top]
            .iter()
            .rev()
            .map(|layer| layer[block])
            .find(|cell| cell.0 != BlockState::Absent);
        said.map_or(0, |cell| cell.1)
    }

    fn reads(&self, top: usize) -> Vec<u8> {
        (0..BLOCKS).map(|block| self.read(top, block)).collect()
    }

    fn holds_data(&self, below: usize, block: usize) -> bool {
        let said =
            self.layers[..below].iter().rev().map(|l| l[block].0).find(|state| *state != BlockState::Absent);
        said == Some(BlockState::Data)
    }

    fn head(&self) -> usize {
        self.layers.len() - 1
    }
}

fn range(start: u64, blocks: u64) -> std::ops::Range<usize> {
    let start = usize::try_from(start).unwrap();
    start..start + usize::try_from(blocks).unwrap()
}

fn zero(volume: &mut Volume, model: &mut Model, start: u64, blocks: u64) {
    volume.zero(extent(start, blocks));
    let said = volume.layer("");
    let head = model.head();
    for block in range(start, blocks) {
        // A mark is right anywhere; a mere hole only over nothing.
        assert_ne!(said[block].0, BlockState::Data, "block {block}");
        let mark_needed = model.holds_data(head, block);
        assert!(said[block].0 == BlockState::Zero || !mark_needed, "block {block} is no zero");
        model.layers[head][block] = said[block];
    }
}

fn step(volume: &mut Volume, model: &mut Model, op: &Op, path: &Path) {
    match op {
        Op::Write { start, blocks, byte } => {
            volume.write(extent(*start, *blocks), *byte);
            let head = model.head();
            model.layers[head][range(*start, *blocks)].fill((BlockState::Data, *byte));
        }
        Op::Zero { start, blocks } => zero(volume, model, *start, *blocks),
        Op::Put { layer, start, image } => {
            let layer = layer % model.layers.len();
            volume.put(&model.names[layer].clone(), *start, image);
            model.layers[layer][range(*start, image.len() as u64)].copy_from_slice(image);
        }
        Op::Snapshot if model.layers.len() < 6 => {
            let name = format!("s{}", model.layers.len());
            volume.snapshot(model.layers.len() as u128, &name).unwrap();
            *model.names.last_mut().unwrap() = name;
            model.layers.push(vec![ABSENT; BLOCKS]);
            model.names.push(String::new());
        }
        Op::Snapshot => {}
        Op::Flush => volume.flush(),
        Op::Punch => drop(volume.punch()),
        Op::Kill => reopen(volume, || Volume::open(path).unwrap()),
        Op::Close => {
            volume.flush();
            let closing = volume.store.close();
            volume.directory.close_clean(closing).unwrap();
            reopen(volume, || Volume::open(path).unwrap());
            assert!(volume.directory.state().clean && volume.store.intent().is_empty());
        }
    }
}

/// Lets go of the directory before it is opened again.
fn reopen(volume: &mut Volume, open: impl FnOnce() -> Volume) {
    let spare = temporary();
    let other = std::mem::replace(volume, Volume::create_sized(&spare.path().join("spare"), BLOCK));
    drop(other);
    *volume = open();
}

fn check(volume: &Volume, model: &Model) {
    assert_eq!(volume.blocks(), model.reads(model.head()));
    for (layer, name) in model.layers.iter().zip(&model.names) {
        assert_eq!(&volume.layer(name), layer, "layer {name:?}");
    }
    for (top, name) in model.names.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
        let view = SnapshotView::open_beside(&volume.path(), name).unwrap();
        assert_eq!(first_bytes(&view), model.reads(top), "{name:?}, beside its process");
    }
    let says = volume.directory.zero_marked;
    assert!(says || !volume.store.has_zero_marks(), "marks, and volume.meta does not say so");
}

fn check_offline(path: &Path, model: &Model) {
    for (top, name) in model.names.iter().enumerate() {
        let view = SnapshotView::open(path, Some(name)).unwrap();
        assert_eq!(first_bytes(&view), model.reads(top), "{name:?}, offline");
    }
}

fn first_bytes(view: &SnapshotView) -> Vec<u8> {
    let mut bytes = vec![0; BLOCKS * 4096];
    view.read_at(0, &mut bytes).unwrap();
    bytes.chunks(4096).map(|block| block[0]).collect()
}

fn run(place: &Path, ops: &[Op]) {
    let path = place.join("replica");
    let (mut volume, mut model) = (Volume::create(&path), Model::new());
    for op in ops {
        step(&mut volume, &mut model, op, &path);
        check(&volume, &model);
    }
    drop(volume);
    check_offline(&path, &model);
    let volume = Volume::open(&path).unwrap();
    check(&volume, &model);
    let path = volume.close();
    check_offline(&path, &model);
    check(&Volume::open(&path).unwrap(), &model);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]
    #[test]
    fn in_ram(ops in prop::collection::vec(op(), 1..40)) {
        run(temporary().path(), &ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn on_disk(ops in prop::collection::vec(op(), 1..30)) {
        run(tempfile::tempdir().unwrap().path(), &ops);
    }
}

/// A replica that is being rebuilt takes writes and zeroes while its layers come, in any order.
#[derive(Clone, Debug)]
enum Coming {
    Layer { layer: usize, part: u64 },
    Write { start: u64, blocks: u64, byte: u8 },
    Zero { start: u64, blocks: u64 },
    Flush,
    Punch,
}

const PART: u64 = 8;

fn coming() -> impl Strategy<Value = Coming> {
    prop_oneof![
        6 => (0_usize..3, 0..SIZE / BLOCK / PART).prop_map(|(layer, part)| Coming::Layer { layer, part }),
        3 => (place(), 1_u8..250).prop_map(|((start, blocks), byte)| Coming::Write { start, blocks, byte }),
        3 => place().prop_map(|(start, blocks)| Coming::Zero { start, blocks }),
        1 => Just(Coming::Flush),
        1 => Just(Coming::Punch),
    ]
}

/// Brings a part of a layer, once, as the source has it now.
fn bring(
    source: &Volume,
    target: &mut Volume,
    brought: &mut BTreeSet<(usize, u64)>,
    layer: usize,
    part: u64,
) {
    if brought.insert((layer, part)) {
        let name = ["a", "b", ""][layer];
        let image = source.layer(name);
        target.put(name, part * PART, &image[range(part * PART, PART)]);
    }
}

fn rebuild(before: &[Op], ops: &[Coming]) {
    let (place, elsewhere) = (temporary(), temporary());
    let mut source = Volume::create(&place.path().join("source"));
    let mut model = Model::new();
    let path = source.path();
    for (n, op) in before.iter().enumerate() {
        if n == before.len() / 3 || n == before.len() * 2 / 3 {
            source.snapshot(n as u128 + 100, if n == before.len() / 3 { "a" } else { "b" }).unwrap();
            model.layers.push(vec![ABSENT; BLOCKS]);
            *model.names.last_mut().unwrap() = if n == before.len() / 3 { "a" } else { "b" }.into();
            model.names.push(String::new());
        }
        if let Op::Write { .. } | Op::Zero { .. } | Op::Flush | Op::Punch = op {
            step(&mut source, &mut model, op, &path);
        }
    }
    let mut target = Volume::create_sized(&elsewhere.path().join("target"), 4 * BLOCK);
    target.write(extent(1, 2), 255);
    let parts = target.directory.begin_rebuild(SIZE, &source.directory.state().chain).unwrap();
    target.store.replace(parts);
    let mut brought = BTreeSet::new();
    for op in ops {
        match op {
            Coming::Layer { layer, part } => bring(&source, &mut target, &mut brought, *layer, *part),
            Coming::Write { start, blocks, byte } => {
                source.write(extent(*start, *blocks), *byte);
                target.write(extent(*start, *blocks), *byte);
            }
            Coming::Zero { start, blocks } => {
                source.zero(extent(*start, *blocks));
                target.zero(extent(*start, *blocks));
            }
            Coming::Flush => target.flush(),
            Coming::Punch => drop(target.punch()),
        }
    }
    // Lower layers last: what the head got meanwhile must not be hidden by nothing.
    for part in 0..SIZE / BLOCK / PART {
        for layer in [2, 1, 0] {
            bring(&source, &mut target, &mut brought, layer, part);
        }
    }
    target.end_rebuild();
    assert_eq!(target.blocks(), source.blocks());
    for name in ["a", "b"] {
        assert_eq!(target.layer(name), source.layer(name), "layer {name}");
    }
    let path = target.path();
    drop(target);
    let target = Volume::open(&path).unwrap();
    assert!(!target.directory.state().rebuilding);
    assert_eq!(target.blocks(), source.blocks());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]
    #[test]
    fn a_rebuilt_replica_reads_as_its_source(
        before in prop::collection::vec(op(), 3..25),
        ops in prop::collection::vec(coming(), 0..25),
    ) {
        rebuild(&before, &ops);
    }
}
