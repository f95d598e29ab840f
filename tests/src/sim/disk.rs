//! A replica's directory as the simulation sees it: layers of blocks and durable records, on a disk with a volatile
//! cache.
//!
//! A block's content is one number ([`Stamp`]). What was written and not synced is kept as a history per block: after a
//! power cut any one of its values may be what is left. What a process had submitted when it was killed still lands.

use std::collections::BTreeMap;

use lh_block::{BLOCK, Epoch, Extent, Generation, Instance};
use lh_wire::{BlockState, ChainOp, Keep, Kept, LayerInfo, MapPage, Outsider, ReplicaState};
use replica::serve::core::{Facts, Failure, Record, Trail};

use super::dice::Dice;
use crate::register::Stamp;

/// What a layer holds of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cell {
    /// Nothing.
    #[default]
    Absent,
    /// Zeroes, whatever lies below.
    Zero,
    /// These bytes.
    Data(Stamp),
}

impl Cell {
    /// As in a layer image's trailer.
    pub const fn state(self) -> BlockState {
        match self {
            Self::Absent => BlockState::Absent,
            Self::Zero => BlockState::Zero,
            Self::Data(_) => BlockState::Data,
        }
    }
}

/// One block of one layer: what would survive a power cut, and what was written since, oldest first.
#[derive(Clone, Debug, Default)]
struct Slot {
    durable: Cell,
    since: Vec<Cell>,
}

impl Slot {
    fn current(&self) -> Cell {
        self.since.last().copied().unwrap_or(self.durable)
    }
}

/// One layer.
#[derive(Clone, Debug, Default)]
struct Layer {
    info: LayerInfo,
    slots: BTreeMap<u64, Slot>,
}

/// What the records say. Each change is durable at once: the simulation decides when it happens.
#[derive(Clone, Debug, Default)]
struct Records {
    fence: Option<(Generation, Instance)>,
    epoch: Option<Epoch>,
    prepared: Option<(Instance, ChainOp)>,
    committed: Option<Instance>,
    intent: Vec<u64>,
    settled: Option<String>,
    rebuilding: bool,
    kept: Option<Kept>,
    out: Vec<Outsider>,
    missed: BTreeMap<u64, Trail>,
    clean: bool,
}

/// Base first: every layer's name, and what is seen through it and all below. Blocks of zeroes are left out.
pub type Image = Vec<(String, BTreeMap<u64, Stamp>)>;

/// A directory.
#[derive(Clone, Debug)]
pub struct Disk {
    size: u64,
    chunk: u64,
    /// Base first, the head last.
    layers: Vec<Layer>,
    records: Records,
    /// Full until this time.
    pub full_until: u64,
    /// Lengths of every block's history at the start of the sync under way.
    syncing: Option<BTreeMap<(usize, u64), usize>>,
}

impl Disk {
    /// A new directory for a volume of `size` bytes with intent chunks of `chunk` bytes.
    pub fn new(size: u64, chunk: u64) -> Self {
        let head = Layer { info: LayerInfo { length: size, ..LayerInfo::default() }, slots: BTreeMap::new() };
        let records = Records { clean: true, ..Records::default() };
        Self { size, chunk, layers: vec![head], records, full_until: 0, syncing: None }
    }

    /// What a process that opens the directory finds.
    pub fn open(&self) -> Facts {
        Facts {
            size: self.size,
            fence: self.records.fence,
            epoch: self.records.epoch.clone(),
            prepared: self.records.prepared.clone(),
            committed: self.records.committed,
            intent_chunk: self.chunk,
            intent: self.records.intent.iter().map(|c| Extent::new(c * self.chunk, self.chunk)).collect(),
            clean: self.records.clean,
            out: self.records.out.clone(),
            missed: self.records.missed.iter().map(|(n, trail)| (*n, *trail)).collect(),
        }
    }

    /// What the records say, for messages.
    pub fn records(&self) -> impl std::fmt::Debug + '_ {
        &self.records
    }

    /// The generation of the last fence.
    pub fn fence(&self) -> Option<Generation> {
        self.records.fence.map(|(generation, _)| generation)
    }

    /// The epoch that is durable here.
    pub fn epoch(&self) -> Option<&Epoch> {
        self.records.epoch.as_ref()
    }

    /// True while a rebuild has begun and not ended.
    pub fn is_rebuilding(&self) -> bool {
        self.records.rebuilding
    }

    fn head(&mut self) -> &mut Layer {
        self.layers.last_mut().expect("there is always a head")
    }

    /// The block through the chain.
    pub fn read(&self, block: u64) -> Stamp {
        let from = self.layers.len();
        self.read_below(block, from)
    }

    fn read_below(&self, block: u64, layers: usize) -> Stamp {
        for layer in self.layers[..layers].iter().rev() {
            match layer.slots.get(&block).map_or(Cell::Absent, Slot::current) {
                Cell::Absent => {}
                Cell::Zero => return Stamp(0),
                Cell::Data(stamp) => return stamp,
            }
        }
        Stamp(0)
    }

    /// Writes one block of the head.
    pub fn write(&mut self, block: u64, stamp: Stamp) {
        self.head().slots.entry(block).or_default().since.push(Cell::Data(stamp));
    }

    /// One block of the head reads as zero from now on.
    pub fn zero(&mut self, block: u64) {
        let cell = if self.layers.len() > 1 { Cell::Zero } else { Cell::Absent };
        self.head().slots.entry(block).or_default().since.push(cell);
    }

    fn layer_named(&self, name: &str) -> Option<usize> {
        if name.is_empty() {
            return Some(self.layers.len() - 1);
        }
        self.layers[..self.layers.len() - 1].iter().position(|l| l.info.name == name)
    }

    /// What a layer holds of the range.
    ///
    /// # Errors
    /// There is no such layer.
    pub fn read_layer(&self, name: &str, range: Extent, merged: bool) -> Result<Vec<Cell>, Failure> {
        let at = self.layer_named(name).ok_or_else(|| Failure::Refused("no such layer".into()))?;
        let cell = |at: usize, b: u64| self.layers[at].slots.get(&b).map_or(Cell::Absent, Slot::current);
        let through = |b: u64| {
            let mut at = Some(at);
            while let Some(layer) = at {
                match cell(layer, b) {
                    Cell::Absent => {
                        at = self.layer_named(&self.layers[layer].info.parent).filter(|below| *below < layer)
                    }
                    held => return held,
                }
            }
            Cell::Zero
        };
        Ok(blocks(range).map(|b| if merged { through(b) } else { cell(at, b) }).collect())
    }

    /// Makes the range of a layer exactly so; counts the blocks that changed.
    ///
    /// # Errors
    /// There is no such layer.
    pub fn put_layer(&mut self, name: &str, range: Extent, cells: &[Cell]) -> Result<u32, Failure> {
        let at = self.layer_named(name).ok_or_else(|| Failure::Refused("no such layer".into()))?;
        let mut changed = 0;
        for (block, cell) in blocks(range).zip(cells) {
            let slot = self.layers[at].slots.entry(block).or_default();
            if slot.current() != *cell {
                slot.since.push(*cell);
                changed += 1;
            }
        }
        Ok(changed)
    }

    /// A sync begins: it will cover what was written so far.
    pub fn sync_begins(&mut self) {
        let mut covered = BTreeMap::new();
        for (i, layer) in self.layers.iter().enumerate() {
            for (block, slot) in layer.slots.iter().filter(|(_, s)| !s.since.is_empty()) {
                covered.insert((i, *block), slot.since.len());
            }
        }
        self.syncing = Some(covered);
    }

    /// The sync has ended: what it covered is durable.
    pub fn sync_ends(&mut self) {
        for ((layer, block), count) in self.syncing.take().unwrap_or_default() {
            let Some(slot) = self.layers.get_mut(layer).and_then(|l| l.slots.get_mut(&block)) else {
                continue;
            };
            if let Some(last) = count.checked_sub(1).and_then(|i| slot.since.get(i)).copied() {
                slot.durable = last;
                slot.since.drain(..count);
            }
        }
    }

    /// The power goes: of every block one of its unsynced values is left, or none.
    pub fn power_cut(&mut self, dice: &mut Dice) {
        self.syncing = None;
        for slot in self.layers.iter_mut().flat_map(|l| l.slots.values_mut()) {
            if !slot.since.is_empty() {
                let pick = dice.below(slot.since.len() as u64 + 1);
                if let Some(cell) = usize::try_from(pick).ok().and_then(|i| slot.since.get(i)).copied() {
                    slot.durable = cell;
                }
                slot.since.clear();
            }
        }
    }

    /// Carries a change of the records out.
    ///
    /// # Errors
    /// The change makes no sense in this state.
    pub fn record(&mut self, record: &Record) -> Result<(), Failure> {
        let r = &mut self.records;
        match record {
            Record::Fence { generation, instance } => r.fence = Some((*generation, *instance)),
            Record::Epoch { epoch, out } => {
                r.epoch = Some(epoch.clone());
                r.out.clone_from(out);
                if out.is_empty() {
                    r.missed.clear();
                }
            }
            Record::Missed { trails } => r.missed.extend(trails.iter().copied()),
            Record::Intent { mark, clear } => {
                r.intent.retain(|c| !clear.contains(c));
                r.intent.extend(mark);
                r.intent.sort_unstable();
                r.intent.dedup();
            }
            Record::Prepare { id, op } => {
                if let ChainOp::Snapshot { name, .. } = op
                    && self.layers.iter().any(|l| l.info.name == *name)
                {
                    return Err(Failure::Refused("a snapshot of this name exists".into()));
                }
                r.prepared = Some((*id, op.clone()));
            }
            Record::Commit { id } => self.commit(*id)?,
            Record::Abort { .. } => r.prepared = None,
            Record::Settled { snapshot } => r.settled = Some(snapshot.clone()),
            Record::RebuildBegin { size, chain, keep } => self.begin_rebuild(*size, chain, keep.as_ref()),
            Record::RebuildEnd => {
                r.rebuilding = false;
                r.kept = None;
            }
            Record::Close => {
                r.clean = true;
                r.intent.clear();
            }
            Record::Begin => r.clean = false,
            Record::Fold { .. } | Record::FoldStop => {
                return Err(Failure::Refused("the simulated disk folds nothing".into()));
            }
        }
        Ok(())
    }

    fn commit(&mut self, id: Instance) -> Result<(), Failure> {
        if self.records.committed == Some(id) {
            return Ok(());
        }
        let Some((prepared, op)) = self.records.prepared.take() else {
            return Err(Failure::Refused("nothing is prepared".into()));
        };
        if prepared != id {
            self.records.prepared = Some((prepared, op));
            return Err(Failure::Refused("another operation is prepared".into()));
        }
        self.records.committed = Some(id);
        match op {
            ChainOp::Snapshot { name, user_created, created, labels } => {
                let size = self.size;
                let head = self.head();
                head.info = LayerInfo {
                    name: name.clone(),
                    user_created,
                    created,
                    labels,
                    ..std::mem::take(&mut head.info)
                };
                let info = LayerInfo { parent: name, length: size, ..LayerInfo::default() };
                self.layers.push(Layer { info, slots: BTreeMap::new() });
            }
            ChainOp::MarkRemoved { name } => {
                if let Some(layer) = self.layers.iter_mut().find(|l| l.info.name == name) {
                    layer.info.removed = true;
                }
            }
            ChainOp::Revert { .. } | ChainOp::Expand { .. } => {
                return Err(Failure::Refused("the simulated disk knows neither".into()));
            }
        }
        Ok(())
    }

    fn begin_rebuild(&mut self, size: u64, chain: &[LayerInfo], keep: Option<&Keep>) {
        let r = &mut self.records;
        let based = r.epoch.is_some() && (!r.rebuilding || r.kept.is_some());
        r.kept = keep.filter(|_| based).map(|keep| Kept { unsure: keep.unsure.clone() });
        if keep.is_none() {
            r.epoch = None;
        }
        r.rebuilding = true;
        r.prepared = None;
        r.out.clear();
        r.missed.clear();
        self.size = size;
        self.syncing = None;
        let mut old = std::mem::take(&mut self.layers);
        let mut head = old.pop();
        let layer = |info: &LayerInfo| {
            let slots = match keep {
                Some(keep) if info.name == keep.head => head.take().map(|l| l.slots),
                Some(_) if !info.name.is_empty() => {
                    old.iter_mut().find(|l| l.info.name == info.name).map(|l| std::mem::take(&mut l.slots))
                }
                _ => None,
            };
            Layer { info: info.clone(), slots: slots.unwrap_or_default() }
        };
        self.layers = chain.iter().map(layer).collect();
    }

    /// Where a layer holds something: few ranges in a page, so that there are many pages.
    ///
    /// # Errors
    /// There is no such layer.
    pub fn layer_map(&self, name: &str, from: u64) -> Result<MapPage, Failure> {
        const PAGE: usize = 5;
        let at = self.layer_named(name).ok_or_else(|| Failure::Refused("no such layer".into()))?;
        let slots = self.layers[at].slots.range(from / BLOCK..);
        let mut held = slots.filter(|(_, s)| s.current() != Cell::Absent).map(|(block, _)| *block);
        let ranges: Vec<Extent> = held.by_ref().take(PAGE).map(|b| Extent::new(b * BLOCK, BLOCK)).collect();
        Ok(MapPage { next: held.next().map(|b| b * BLOCK), ranges, total: None })
    }

    /// What the directory says of itself; the replica's machine adds what only it knows.
    pub fn describe(&self) -> ReplicaState {
        let mut chain: Vec<_> = self
            .layers
            .iter()
            .map(|l| LayerInfo { allocated: l.slots.len() as u64 * BLOCK, ..l.info.clone() })
            .collect();
        if let Some(head) = chain.last_mut() {
            head.name = String::new();
        }
        let settled = self.records.settled.as_deref();
        let names: Vec<_> = chain[..chain.len() - 1].iter().map(|l| l.name.clone()).collect();
        let first_unsettled = names.iter().position(|n| Some(n.as_str()) == settled).map_or(0, |i| i + 1);
        ReplicaState {
            size: self.size,
            chain,
            epoch: self.records.epoch.clone(),
            prepared: self.records.prepared.clone(),
            committed: self.records.committed,
            rebuilding: self.records.rebuilding,
            kept: self.records.kept.clone(),
            unsettled: names[first_unsettled..].to_vec(),
            clean: self.records.clean,
            ..ReplicaState::default()
        }
    }

    /// Every layer's blocks that are not absent, for the comparison at the end.
    pub fn image(&self) -> Image {
        (1..=self.layers.len())
            .map(|n| {
                let touched: std::collections::BTreeSet<u64> =
                    self.layers[..n].iter().flat_map(|l| l.slots.keys().copied()).collect();
                let seen = touched.into_iter().map(|b| (b, self.read_below(b, n))).filter(|(_, s)| s.0 != 0);
                let name =
                    if n == self.layers.len() { String::new() } else { self.layers[n - 1].info.name.clone() };
                (name, seen.collect())
            })
            .collect()
    }
}

/// Numbers of the blocks of a range.
pub fn blocks(range: Extent) -> std::ops::Range<u64> {
    range.offset / BLOCK..range.end().div_ceil(BLOCK)
}
