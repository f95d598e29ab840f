//! What is done to both, and what is compared.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use lh_block::{BLOCK, Epoch, Extent, Generation, Instance};
use lh_wire::{ChainOp, Keep, LayerInfo, Outsider, ReplicaState};
use replica::serve::core::{Facts, Record, Trail};
use replica::store::SnapshotView;

use super::super::disk::{Cell, Disk, blocks};
use super::real::Real;
use super::same;
use tests::dice::Dice;
use tests::register::Stamp;

/// Chunks of the intent bitmap, and the blocks of each that are used: few, so that operations meet.
const CHUNKS: u64 = 3;
const USED: u64 = 12;

/// Bytes that the volume grows by.
const GROWS_BY: u64 = 4 * BLOCK;

/// Layers from which on none is added.
const LAYERS: usize = 7;

/// Both, and what has been done to them.
pub(super) struct History {
    path: PathBuf,
    seed: u64,
    dice: Dice,
    model: Disk,
    /// `None` while it is being opened.
    store: Option<Real>,
    stamps: u64,
    names: u64,
    epochs: u64,
    /// The directory is in use since it was opened or closed.
    begun: bool,
    prepared: Option<ChainOp>,
    out: bool,
    /// Something besides plain writes was not flushed yet: a power cut leaves of it what this test does not know.
    tangled: bool,
    /// Whether zeroes over nothing are a mark or a hole follows from what was done: no mark was written over, taken away or put.
    exact: bool,
    /// Layers that a fold was broken off between, which have what it had moved by then.
    halfway: BTreeSet<String>,
    /// The store was made anew, by a revert or a rebuild: what is marked then counts as found, which the simulation's disk does not say.
    remade: bool,
    /// A rebuild has ended: the store has taken idle marks away, which the simulation's disk keeps. Images below would tell.
    filled: bool,
    last: String,
}

impl History {
    pub(super) fn new(path: &Path, seed: u64) -> Self {
        let chunk = lh_wire::INTENT_CHUNK_MIN;
        let size = CHUNKS * chunk;
        let mut new = Self {
            path: path.to_owned(),
            seed,
            dice: Dice::new(seed),
            model: Disk::new(size, chunk),
            store: Some(Real::create(path, size)),
            stamps: 0,
            names: 0,
            epochs: 0,
            begun: false,
            prepared: None,
            out: false,
            tangled: false,
            exact: true,
            halfway: BTreeSet::new(),
            remade: false,
            filled: false,
            last: String::new(),
        };
        new.compare();
        new
    }

    fn real(&mut self) -> &mut Real {
        self.store.as_mut().expect("it is open")
    }

    fn same<T: PartialEq + std::fmt::Debug>(&self, what: &str, model: &T, store: &T) {
        same(self.seed, || format!("{what} after {}", self.last), model, store);
    }

    /// One operation, after which both tell the same.
    pub(super) fn go_on(&mut self) {
        let n = self.dice.below(100);
        let rebuilding = self.model.is_rebuilding();
        let folding = self.folds();
        match n {
            0..25 => self.write(),
            25..37 => self.zero(),
            37..40 if !folding && !self.filled && self.halfway.is_empty() => self.put(),
            40..47 => self.flush(),
            47..50 => self.real().punch(),
            50..58 => self.prepare(),
            58..68 => self.decide(),
            68..70 => self.fold(folding),
            70..80 if folding => self.fold_on(),
            70..75 => self.fold(false),
            80..82 => self.reopen(false),
            82..85 => self.reopen(true),
            // With something prepared the next opening changes its layers' names, after which the files are not as they were closed.
            85..87 if !rebuilding && !folding && self.prepared.is_none() => self.close(),
            87..89 => self.intent(),
            89..92 => self.epoch(),
            92 if self.out => self.missed(),
            93 => self.fence(),
            94 => self.settle(),
            95 => self.record(&Record::Whole),
            96 if !rebuilding => self.rebuild(),
            97..100 if rebuilding => self.end_rebuild(),
            _ => return,
        }
        self.compare();
    }

    pub(super) fn end(&mut self) {
        self.reopen(false);
        self.compare();
        self.compare_snapshots();
    }

    /// Notes what is done.
    fn does(&mut self, what: impl std::fmt::Debug) {
        self.last = format!("{what:?}");
        if std::env::var_os("LH_SEED").is_some() {
            println!("{}", self.last);
        }
    }

    fn used_block(&mut self) -> u64 {
        let per_chunk = lh_wire::INTENT_CHUNK_MIN / BLOCK;
        let end = self.model.describe().size / BLOCK;
        let grown = end - CHUNKS * per_chunk;
        match self.dice.below(8) {
            0 if grown > 0 => end - 1 - self.dice.below(grown),
            n => n % CHUNKS * per_chunk + self.dice.below(USED),
        }
    }

    fn range(&mut self) -> Extent {
        let end = self.model.describe().size / BLOCK;
        let first = self.used_block();
        Extent::new(first * BLOCK, self.dice.between(1, 9).min(end - first) * BLOCK)
    }

    fn stamp(&mut self) -> Stamp {
        self.stamps += 1;
        Stamp(self.stamps)
    }

    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            let record = Record::Begin { generation: self.generation() };
            self.record(&record);
        }
    }

    fn generation(&self) -> Generation {
        Generation { attachment: 1, restart: u32::try_from(self.epochs).unwrap_or(0) }
    }

    fn write(&mut self) {
        self.begin();
        let range = self.range();
        let stamps: Vec<_> = blocks(range).map(|_| self.stamp()).collect();
        self.does(("write", range, &stamps));
        if blocks(range).any(|block| self.model.is_zero_in_head(block)) {
            // Until the next flushes the mark is there, and comes back with zeroes.
            (self.tangled, self.exact) = (true, false);
        }
        blocks(range).zip(&stamps).for_each(|(block, stamp)| self.model.write(block, *stamp));
        if !self.real().write(range, &stamps) {
            self.flush_both();
        }
        self.tangled |= self.folds();
    }

    fn zero(&mut self) {
        self.begin();
        let (range, in_doubt) = (self.range(), self.dice.chance(100));
        self.does(("zero", range, in_doubt));
        blocks(range).for_each(|block| self.model.zero(block, in_doubt));
        self.real().zero(range, in_doubt);
        self.tangled = true;
    }

    fn put(&mut self) {
        self.begin();
        let layers = self.layers();
        let at = usize::try_from(self.dice.below(layers.len() as u64)).unwrap_or(0);
        let range = self.range();
        let LayerInfo { name, length, .. } = layers[at].clone();
        let Some(range) = Extent::new(0, length).intersection(range) else { return };
        let mut cells = Vec::new();
        for _ in blocks(range) {
            cells.push(match self.dice.below(3) {
                0 => Cell::Absent,
                1 => Cell::Zero,
                _ => Cell::Data(self.stamp()),
            });
        }
        self.does(("put", &name, range, &cells));
        self.exact = false;
        let put = self.model.put_layer(&name, range, &cells).is_ok();
        let done = self.real().put(&name, range, &cells);
        self.same("the layer is there", &put, &done.is_some());
        self.tangled = true;
        if done == Some(false) {
            self.flush_both();
        }
    }

    fn flush(&mut self) {
        self.does("flush");
        self.flush_both();
    }

    fn flush_both(&mut self) {
        self.model.sync_begins();
        self.model.sync_ends();
        self.real().flush();
        self.tangled = false;
    }

    /// Both make the record, or neither does.
    fn record(&mut self, record: &Record) {
        self.does(record);
        let model = self.model.record(record);
        let store = self.real().record(record);
        let both = model.is_ok() == store.is_ok();
        assert!(
            both,
            "LH_SEED={}: {record:?}: the simulation's disk {model:?}, the store {store:?}",
            self.seed
        );
    }

    fn prepare(&mut self) {
        self.begin();
        let layers = self.layers();
        let picked = usize::try_from(self.dice.below(layers.len() as u64)).unwrap_or(0);
        let name = if self.dice.chance(50) { "none".into() } else { layers[picked].name.clone() };
        let created = format!("2026-11-20T06:03:{:02}Z", self.names % 60);
        self.names += 1;
        let room = layers.len() < LAYERS;
        let op = match self.dice.below(10) {
            0..4 if room => {
                let taken = self.dice.chance(50);
                let name = if taken { name } else { format!("s{}", self.names) };
                let labels = [("note".to_owned(), "a & b".to_owned())].into();
                ChainOp::Snapshot { name, user_created: self.dice.chance(500), created, labels }
            }
            4 if room => {
                let grows = self.dice.below(3) * GROWS_BY;
                ChainOp::Expand { name: None, size: self.model.describe().size + grows, created }
            }
            5..7 => ChainOp::Revert { name, created },
            _ => ChainOp::MarkRemoved { name },
        };
        // The machine asks for one at a time.
        if self.prepared.is_some() || op.snapshot().is_some_and(|name| name.is_empty()) {
            return;
        }
        let id = Instance(u128::from(self.names));
        self.record(&Record::Prepare { id, op: op.clone() });
        self.prepared = self.model.describe().prepared.map(|_| op);
    }

    fn decide(&mut self) {
        let Some((id, op)) = self.model.describe().prepared else { return };
        self.begin();
        self.prepared = None;
        if self.dice.chance(200) {
            return self.record(&Record::Abort { id });
        }
        if matches!(op, ChainOp::Revert { .. }) {
            // Everything has been flushed.
            self.flush_both();
            self.break_fold_off();
            self.remade = true;
        }
        if self.halfway.contains("") {
            self.halfway.extend(op.snapshot());
        }
        self.record(&Record::Commit { id });
        self.tangled |= self.folds();
    }

    fn fold(&mut self, runs: bool) {
        let removed: Vec<_> = self.layers().into_iter().filter(|l| l.removed).map(|l| l.name).collect();
        let picked = usize::try_from(self.dice.below(removed.len().max(1) as u64)).unwrap_or(0);
        let Some(name) = removed.get(picked).filter(|_| !runs).cloned() else { return };
        self.begin();
        (self.exact, self.tangled) = (false, true);
        self.record(&Record::Fold { name, bytes_per_second: None });
    }

    /// Both go on, until one has ended: then the other ends, too.
    fn fold_on(&mut self) {
        self.does("fold on");
        let steps = self.dice.below(12);
        let (mut on, folded) = (true, self.model.folded());
        for _ in 0..steps {
            on &= self.model.fold_on();
            on &= self.real().fold_on();
        }
        // The names may have changed, and the last steps be still to come.
        on &= self.layers().len() == self.real().directory.state().chain.len();
        while !on && (self.model.fold_on() | self.real().fold_on()) {}
        if !on {
            self.halfway.retain(|name| !folded.contains(name));
        }
        self.tangled = true;
    }

    fn break_fold_off(&mut self) {
        let folded = self.model.folded();
        self.halfway.extend(folded);
    }

    fn folds(&self) -> bool {
        self.model.describe().fold.is_some()
    }

    /// The process dies, or the host loses its power.
    fn reopen(&mut self, power: bool) {
        if power && self.tangled {
            self.flush_both();
        }
        self.does(("reopen", power));
        self.break_fold_off();
        self.model.process_ended();
        if power {
            let before = self.model.clone();
            self.model.power_cut(&mut self.dice);
            let lost = before.lost_to(&self.model);
            self.real().lose(&lost);
        }
        self.store = None;
        if power {
            Real::forget_power(&self.path);
        }
        let store = Real::open(&self.path);
        let cut = |facts: Facts| Facts { intent: joined(facts.intent, facts.size), ..facts };
        let (model, store) = (cut(self.model.open()), (cut(store.facts()), self.store.replace(store)).0);
        self.same("what is found", &model, &store);
        (self.begun, self.tangled, self.remade) = (false, self.tangled && !power, false);
        self.compare_snapshots();
    }

    fn close(&mut self) {
        self.flush_both();
        self.record(&Record::Close);
        self.begun = false;
    }

    fn intent(&mut self) {
        self.begin();
        let (mut mark, mut clear) = (Vec::new(), Vec::new());
        for chunk in 0..self.model.describe().size.div_ceil(lh_wire::INTENT_CHUNK_MIN) {
            match self.dice.below(3) {
                0 => mark.push(chunk),
                1 => clear.push(chunk),
                _ => {}
            }
        }
        self.record(&Record::Intent { mark, clear });
    }

    fn epoch(&mut self) {
        self.begin();
        self.epochs += 1;
        let epoch = |counter, members: &[&str]| Epoch {
            generation: self.generation(),
            counter,
            members: members.iter().map(|name| (*name).to_owned()).collect(),
            id: Instance(u128::from(counter)),
            ..Epoch::default()
        };
        let counter = self.epochs;
        let base = epoch(counter, &["a", "b", "c"]);
        let next = epoch(counter, &["a", "b"]);
        let out =
            if self.dice.chance(600) { vec![Outsider { replica: "c".into(), base }] } else { Vec::new() };
        self.out = !out.is_empty() && !self.model.is_rebuilding();
        self.record(&Record::Epoch { epoch: next, out });
    }

    fn missed(&mut self) {
        self.begin();
        let chunk = self.dice.below(CHUNKS);
        let mut trail = [0; 16];
        trail[3] = self.dice.number();
        self.record(&Record::Missed { trails: vec![(chunk, Trail(trail))] });
    }

    fn fence(&mut self) {
        let record =
            Record::Fence { generation: self.generation(), instance: Instance(u128::from(self.epochs)) };
        self.record(&record);
    }

    fn settle(&mut self) {
        self.begin();
        let layers = self.layers();
        let picked = usize::try_from(self.dice.below(layers.len() as u64)).unwrap_or(0);
        if !layers[picked].name.is_empty() {
            self.record(&Record::Settled { snapshot: layers[picked].name.clone() });
        }
    }

    /// From nothing, or keeping what the layers have; the head may become another one's snapshot.
    fn rebuild(&mut self) {
        self.begin();
        self.flush_both();
        let mut chain = self.layers();
        let size = self.model.describe().size;
        let mut keep = Keep::default();
        if self.dice.chance(300) {
            self.names += 1;
            let name = format!("s{}", self.names);
            if let Some(head) = chain.last_mut() {
                let parent = std::mem::replace(&mut head.parent, name.clone());
                let info = LayerInfo { name: name.clone(), parent, length: size, ..LayerInfo::default() };
                chain.insert(chain.len() - 1, info);
            }
            keep.head = name;
        }
        let unsure = chain.iter().filter(|l| !l.name.is_empty() && self.dice.chance(200));
        keep.unsure = unsure.map(|l| l.name.clone()).collect();
        let keep = self.dice.chance(700).then_some(keep);
        self.break_fold_off();
        self.remade = true;
        if self.halfway.contains("") {
            self.halfway.extend(keep.as_ref().map(|keep| keep.head.clone()));
        }
        self.record(&Record::RebuildBegin { size, chain, keep });
        (self.prepared, self.out, self.tangled) = (None, false, true);
    }

    fn end_rebuild(&mut self) {
        self.begin();
        self.flush_both();
        (self.exact, self.filled) = (false, true);
        self.record(&Record::RebuildEnd);
        self.out = !self.real().facts().out.is_empty();
    }

    fn layers(&self) -> Vec<LayerInfo> {
        self.model.describe().chain
    }

    /// What both tell at any time.
    fn compare(&mut self) {
        let (model, store) = (told(self.model.describe()), told(self.real().directory.state()));
        self.same("the state", &model, &store);
        let branch = self.model.branch();
        let folds = self.folds();
        for range in self.all_used() {
            let read: Vec<_> = blocks(range).map(|block| self.model.read(block)).collect();
            self.same("what is read", &read, &self.store.as_ref().expect("open").read(range));
            let data: Vec<_> = blocks(range).map(|block| self.model.place(block).is_some()).collect();
            self.same("what holds data", &data, &self.store.as_ref().expect("open").allocation(range));
            for layer in self.layers() {
                let name = &layer.name;
                let on_branch = branch.contains(name);
                if on_branch && !layer.removed {
                    let model = self.model.read_layer(name, range, true).ok();
                    let store = self.store.as_ref().expect("open").merged(name, range);
                    self.same(&format!("through layer {name:?}, of {range:?}"), &bytes(model), &bytes(store));
                }
                // Of what is hidden below layers that a fold has copied between it has copied some.
                if folds || !self.halfway.is_empty() {
                    continue;
                }
                let compared = on_branch && !self.exact;
                let model = match compared {
                    true => self.model.compared_layer(name, range).ok(),
                    false => self.model.read_layer(name, range, false).ok(),
                };
                let store = self.store.as_ref().expect("open").layer(name, range, compared);
                self.same(&format!("layer {name:?}, of {range:?}"), &model, &store);
            }
        }
        if self.remade {
            return;
        }
        let chunk = lh_wire::INTENT_CHUNK_MIN;
        for n in 0..self.model.describe().size.div_ceil(chunk) {
            let found = self.store.as_ref().expect("open").store.was_found_marked(n * chunk);
            self.same("what was found marked", &self.model.was_found_marked(n * chunk / BLOCK), &found);
        }
    }

    /// The ranges that hold all that is used.
    fn all_used(&self) -> Vec<Extent> {
        let chunk = lh_wire::INTENT_CHUNK_MIN;
        let size = self.model.describe().size;
        let used = (0..CHUNKS).map(|n| Extent::new(n * chunk, (USED + 8) * BLOCK));
        let grown = Extent::new(CHUNKS * chunk, size - CHUNKS * chunk);
        used.chain((!grown.is_empty()).then_some(grown)).collect()
    }

    /// Every snapshot that is not removed, on whatever branch.
    fn compare_snapshots(&self) {
        if self.model.is_rebuilding() {
            return;
        }
        for layer in self.layers().into_iter().filter(|l| !l.removed && !l.name.is_empty()) {
            let view = SnapshotView::open_beside(&self.path, &layer.name).expect("it is there");
            let model = self.model.snapshot(&layer.name).unwrap_or_default();
            let mut bytes = [0; 4096];
            for block in self.all_used().into_iter().flat_map(blocks).filter(|b| b * BLOCK < view.size()) {
                view.read_at(block * BLOCK, &mut bytes).expect("a disk that works");
                let store = bytes[..8].try_into().map_or(0, u64::from_le_bytes);
                let model = model.get(&block).map_or(0, |stamp| stamp.0);
                self.same(&format!("block {block} of snapshot {:?}", layer.name), &model, &store);
            }
        }
    }
}

/// What is read of cells.
fn bytes(cells: Option<Vec<Cell>>) -> Option<Vec<Option<Stamp>>> {
    let stamp = |cell| match cell {
        Cell::Absent => None,
        Cell::Zero => Some(Stamp(0)),
        Cell::Data(stamp) => Some(stamp),
    };
    Some(cells?.into_iter().map(stamp).collect())
}

/// Ranges that touch are one, and none goes beyond the volume's end.
fn joined(ranges: Vec<Extent>, size: u64) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::new();
    for range in ranges.into_iter().filter_map(|range| Extent::new(0, size).intersection(range)) {
        match joined.last_mut() {
            Some(last) if last.end() == range.offset => last.len += range.len,
            _ => joined.push(range),
        }
    }
    joined
}

/// Of a state what both know.
fn told(state: ReplicaState) -> ReplicaState {
    let layer = |l: LayerInfo| {
        let labels = if l.labels.contains_key("replica-expansion") { Default::default() } else { l.labels };
        // The first head of all is as old as the directory.
        let created = if l.name.is_empty() && l.parent.is_empty() { String::new() } else { l.created };
        LayerInfo { allocated: 0, labels, created, ..l }
    };
    ReplicaState {
        chain: state.chain.into_iter().map(layer).collect(),
        fold: None,
        clean: false,
        previous_generation: Generation::default(),
        ..state
    }
}

impl Disk {
    /// The head says that the block is zero.
    fn is_zero_in_head(&self, block: u64) -> bool {
        self.layers.last().is_some_and(|head| head.current(block) == Cell::Zero)
    }

    /// What is other after the power was lost.
    fn lost_to(&self, after: &Self) -> Vec<(String, u64, Cell)> {
        let layers = self.layers.iter().zip(&after.layers).enumerate();
        let of = |(n, (before, after)): (usize, (&super::super::disk::Layer, &super::super::disk::Layer))| {
            let name = if n + 1 == self.layers.len() { String::new() } else { before.info.name.clone() };
            let differs = before.slots.keys().filter(|b| before.current(**b) != after.current(**b));
            differs.map(|b| (name.clone(), *b, after.current(*b))).collect::<Vec<_>>()
        };
        layers.flat_map(of).collect()
    }

    /// Names of the layers of the head's branch; the head has none.
    fn branch(&self) -> BTreeSet<String> {
        self.path(self.layers.len() - 1).map(|l| l.info.name.clone()).collect()
    }

    /// Names of the layers between which a fold moves something: how far it is is nobody's affair.
    fn folded(&self) -> BTreeSet<String> {
        let Some(fold) = self.describe().fold else { return BTreeSet::new() };
        let child = self.layers.iter().find(|l| l.info.parent == fold.name).map(|l| l.info.name.clone());
        child.into_iter().chain([fold.name]).collect()
    }
}
