//! A replica's directory as the simulation sees it: layers of blocks and durable records, on a disk with a volatile
//! cache.
//!
//! A block's content is one number ([`Stamp`]). What was written and not synced is kept as a history per block: after a
//! power cut any one of its values may be what is left. What a process had submitted when it was killed still lands.

use std::collections::BTreeMap;
use std::rc::Rc;

use lh_block::{BLOCK, Epoch, Extent, Generation, Instance};
use lh_wire::{
    ChainOp, FoldState, Keep, Kept, LayerInfo, MapPage, Outsider, Place, Places, PowerSince, ReplicaState,
    counter_of, piece_of,
};
use replica::serve::core::{Facts, Failure, Record, Trail};

use super::grant::Words;
use tests::dice::Dice;
use tests::register::Stamp;

/// What a layer holds of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Cell {
    /// Nothing.
    #[default]
    Absent,
    /// Zeroes, whatever lies below.
    Zero,
    /// These bytes.
    Data(Stamp),
}

/// One block of one layer: what would survive a power cut, and what was written since, oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot {
    durable: Cell,
    since: Vec<Cell>,
}

impl Slot {
    pub(super) fn current(&self) -> Cell {
        self.since.last().copied().unwrap_or(self.durable)
    }

    /// Data that is safe on the disk.
    pub(super) fn is_settled_data(&self) -> bool {
        self.since.is_empty() && matches!(self.durable, Cell::Data(_))
    }

    /// It is something else from now on.
    pub(super) fn rot(&mut self, cell: Cell) {
        *self = Self { durable: cell, since: Vec::new() };
    }
}

/// One layer.
#[derive(Clone, Debug, Default)]
pub(super) struct Layer {
    pub(super) info: LayerInfo,
    pub(super) slots: BTreeMap<u64, Slot>,
    /// Number of its file: the same as long as the file is, whatever names it gets.
    file: u64,
    /// Checksums on record, of what each block held then; none since somebody changed it on purpose.
    pub(super) sums: Option<BTreeMap<u64, Cell>>,
}

impl Layer {
    pub(super) fn current(&self, block: u64) -> Cell {
        self.slots.get(&block).map_or(Cell::Absent, Slot::current)
    }

    /// What the checksums say of a block; `None` if there are none.
    pub(super) fn recorded(&self, block: u64) -> Option<Cell> {
        Some(self.sums.as_ref()?.get(&block).copied().unwrap_or_default())
    }
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
    /// The epoch that counts from the end of the rebuild on.
    next: Option<(Epoch, Vec<Outsider>)>,
    out: Vec<Outsider>,
    missed: BTreeMap<u64, Trail>,
    /// The boot on which everything that was answered was here last.
    whole: Option<u64>,
    /// The boot on which it was opened while something was missing, and from when on nothing is.
    power: Option<(u64, PowerSince)>,
    clean: bool,
}

/// What a layer shows, through it and all that it stands on. Blocks of zeroes are left out.
pub(crate) type Seen = BTreeMap<u64, Stamp>;

/// Every layer that is not removed, by name, and what it shows; the head has no name.
pub(crate) type Image = BTreeMap<String, Seen>;

/// A fold that runs in the replica's process.
#[derive(Clone, Debug)]
struct Fold {
    name: String,
    /// The head goes into the removed snapshot, which holds more; else the snapshot goes into the layer above.
    drains: bool,
    /// Both are snapshots, which clients do not write: what the upper one lacks was found at the beginning, and is copied
    /// over whatever is there meanwhile.
    between: bool,
    /// Blocks of the layer that goes that are still to be looked at.
    left: Vec<u64>,
}

/// A directory.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    size: u64,
    chunk: u64,
    /// Parents before those that stand on them, the head last.
    pub(super) layers: Vec<Layer>,
    records: Records,
    /// How often its host has lost its power.
    boot: u64,
    /// Full until this time.
    pub(crate) full_until: u64,
    /// Lengths of every block's history at the start of the sync under way.
    syncing: Option<BTreeMap<(usize, u64), usize>>,
    fold: Option<Fold>,
    /// Files so far.
    files: u64,
    /// Chunks that were marked when the directory was opened, and are since.
    found_marked: Vec<u64>,
    /// What an engine was granted: the words that say when it does not hold any more, and the files.
    grant: Option<(Rc<Words>, Vec<u64>)>,
    /// The words of those that nobody has ended.
    unended: Vec<Rc<Words>>,
    /// Files without a name that somebody may have open.
    gone: BTreeMap<u64, BTreeMap<u64, Slot>>,
}

impl Disk {
    /// A new directory for a volume of `size` bytes with intent chunks of `chunk` bytes.
    pub(crate) fn new(size: u64, chunk: u64) -> Self {
        let info = LayerInfo { length: size, ..LayerInfo::default() };
        let head = Layer { info, ..Layer::default() };
        Self {
            size,
            chunk,
            layers: vec![head],
            records: Records { clean: true, ..Records::default() },
            boot: 0,
            full_until: 0,
            syncing: None,
            fold: None,
            files: 0,
            found_marked: Vec::new(),
            grant: None,
            unended: Vec::new(),
            gone: BTreeMap::new(),
        }
    }

    /// What a process that opens the directory finds.
    pub(crate) fn open(&mut self) -> Facts {
        self.sort_layers();
        self.found_marked.clone_from(&self.records.intent);
        Facts {
            size: self.size,
            fence: self.records.fence,
            epoch: self.records.epoch.clone(),
            prepared: self.records.prepared.clone(),
            committed: self.records.committed,
            intent_chunk: self.chunk,
            intent: self.records.intent.iter().map(|c| Extent::new(c * self.chunk, self.chunk)).collect(),
            clean: self.records.clean,
            powered: self.has_kept_power(),
            out: self.records.out.clone(),
            missed: self.records.missed.iter().map(|(n, trail)| (*n, *trail)).collect(),
        }
    }

    /// As a directory is read: what stands on fewer layers comes first, then by the file's name. A process that has made layers one by
    /// one has the last one last, on whatever branch it is.
    fn sort_layers(&mut self) {
        self.syncing = None;
        let name = |at: usize| self.layers[at].info.name.clone();
        let depths: BTreeMap<String, usize> =
            (0..self.layers.len()).map(|at| (name(at), self.path(at).count())).collect();
        let key = |name: &str| (name.is_empty(), depths[name], format!("{name}.img"));
        self.layers.sort_by_cached_key(|l| key(&l.info.name));
    }

    /// What the records say, for messages.
    pub(crate) fn records(&self) -> impl std::fmt::Debug + '_ {
        &self.records
    }

    /// The generation of the last fence.
    pub(crate) fn fence(&self) -> Option<Generation> {
        self.records.fence.map(|(generation, _)| generation)
    }

    /// The epoch that is durable here.
    pub(crate) fn epoch(&self) -> Option<&Epoch> {
        self.records.epoch.as_ref()
    }

    /// True while a rebuild has begun and not ended.
    pub(crate) fn is_rebuilding(&self) -> bool {
        self.records.rebuilding
    }

    /// The block is in a chunk of the intent bitmap that was marked when the directory was opened, and is since.
    pub(super) fn was_found_marked(&self, block: u64) -> bool {
        self.found_marked.contains(&(block * BLOCK / self.chunk))
    }

    /// The head lies over a snapshot.
    pub(crate) fn has_snapshots(&self) -> bool {
        self.layers.last().is_some_and(|head| !head.info.parent.is_empty())
    }

    fn head(&mut self) -> &mut Layer {
        self.layers.last_mut().expect("there is always a head")
    }

    /// The block through the chain.
    pub(crate) fn read(&self, block: u64) -> Stamp {
        self.read_through(block, self.layers.len() - 1)
    }

    /// The layer and what it stands on, down to the base.
    pub(super) fn path(&self, top: usize) -> impl Iterator<Item = &Layer> {
        let below = |layer: &&Layer| self.layer_at(&layer.info.parent).map(|at| &self.layers[at]);
        std::iter::successors(Some(&self.layers[top]), below)
    }

    fn read_through(&self, block: u64, top: usize) -> Stamp {
        for layer in self.path(top) {
            match layer.slots.get(&block).map_or(Cell::Absent, Slot::current) {
                Cell::Absent => {}
                Cell::Zero => return Stamp(0),
                Cell::Data(stamp) => return stamp,
            }
        }
        Stamp(0)
    }

    /// Writes one block of the head.
    pub(crate) fn write(&mut self, block: u64, stamp: Stamp) {
        self.moving(block, |disk| disk.head().slots.entry(block).or_default().since.push(Cell::Data(stamp)));
    }

    /// One block of the head reads as zero from now on: by a mark where it takes one, or where there is one. Layers below may
    /// still get data as long as the replica is filled, or is in doubt.
    pub(crate) fn zero(&mut self, block: u64, in_doubt: bool) {
        let head = self.layers.len() - 1;
        let marked = self.layers[head].slots.get(&block).map(Slot::current) == Some(Cell::Zero);
        let filled = (self.records.rebuilding || in_doubt) && !self.layers[head].info.parent.is_empty();
        let marks = marked || filled || self.is_held_below(block, head);
        let cell = if marks { Cell::Zero } else { Cell::Absent };
        self.moving(block, |disk| disk.head().slots.entry(block).or_default().since.push(cell));
    }

    /// The file that holds a block; `None` if it is zeroes.
    pub(crate) fn place(&self, block: u64) -> Option<u64> {
        for layer in self.path(self.layers.len() - 1) {
            match layer.slots.get(&block).map_or(Cell::Absent, Slot::current) {
                Cell::Absent => {}
                Cell::Zero => return None,
                Cell::Data(_) => return Some(layer.file),
            }
        }
        None
    }

    /// The head itself holds data in the block.
    pub(crate) fn head_holds(&self, block: u64) -> bool {
        matches!(self.head_cell(block), Cell::Data(_))
    }

    /// The head says that the block is zero.
    pub(crate) fn is_marked(&self, block: u64) -> bool {
        self.head_cell(block) == Cell::Zero
    }

    fn head_cell(&self, block: u64) -> Cell {
        self.layers.last().and_then(|head| head.slots.get(&block)).map_or(Cell::Absent, Slot::current)
    }

    /// Does something to a block. Whoever was granted the files is told if it is elsewhere then.
    fn moving<T>(&mut self, block: u64, what: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.grant.is_some().then(|| self.place(block));
        let done = what(self);
        if before.is_some_and(|before| before != self.place(block)) {
            self.raise(block);
        }
        done
    }

    fn raise(&self, block: u64) {
        if let Some((words, _)) = &self.grant {
            words.raise(counter_of(piece_of(block * BLOCK)));
        }
    }

    /// Grants the files of all layers: their numbers.
    pub(crate) fn grant(&mut self, words: Rc<Words>) -> Vec<u64> {
        self.end_grant();
        self.gone.clear();
        let files: Vec<u64> = self.layers.iter().rev().take(lh_wire::FILES_MAX).map(|l| l.file).collect();
        self.grant = Some((words, files.clone()));
        files
    }

    /// What was granted holds no more.
    pub(crate) fn end_grant(&mut self) {
        if let Some((words, _)) = self.grant.take() {
            words.end();
        }
    }

    /// The process is gone that would have said so.
    pub(crate) fn forget_grant(&mut self) {
        self.unended.extend(self.grant.take().map(|(words, _)| words));
    }

    /// Whoever was granted something was on this host, which has lost its power.
    pub(crate) fn lose_grants(&mut self) {
        self.end_grant();
        self.unended.drain(..).for_each(|words| words.end());
    }

    /// Something is granted.
    pub(crate) const fn is_granted(&self) -> bool {
        self.grant.is_some()
    }

    /// Where the blocks of a range are.
    pub(crate) fn tell_places(&self, range: Extent) -> Option<Places> {
        let (words, files) = self.grant.as_ref()?;
        let mut told = Places::new(words.told(counter_of(piece_of(range.offset))));
        for block in blocks(range) {
            let place = match self.place(block) {
                None => Place::Zero,
                Some(file) => files
                    .iter()
                    .position(|f| *f == file)
                    .and_then(|n| u8::try_from(n).ok())
                    .map_or(Place::Asked, Place::File),
            };
            told.push(1, place);
        }
        Some(told)
    }

    /// A block of a file that somebody has open; `None` if it is no more.
    pub(crate) fn read_file(&self, file: u64, block: u64) -> Option<Stamp> {
        let named = self.layers.iter().find(|l| l.file == file).map(|l| &l.slots);
        let slots = named.or_else(|| self.gone.get(&file))?;
        match slots.get(&block).map_or(Cell::Absent, Slot::current) {
            Cell::Data(stamp) => Some(stamp),
            Cell::Absent | Cell::Zero => Some(Stamp(0)),
        }
    }

    fn new_file(&mut self) -> u64 {
        self.files += 1;
        self.files
    }

    pub(super) fn layer_named(&self, name: &str) -> Option<usize> {
        if name.is_empty() { Some(self.layers.len() - 1) } else { self.layer_at(name) }
    }

    /// The snapshot of this name.
    pub(super) fn layer_at(&self, name: &str) -> Option<usize> {
        self.layers[..self.layers.len() - 1].iter().position(|l| l.info.name == name)
    }

    /// What a layer holds of the range.
    ///
    /// # Errors
    /// There is no such layer.
    pub(crate) fn read_layer(&self, name: &str, range: Extent, merged: bool) -> Result<Vec<Cell>, Failure> {
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

    /// Data is read below the layer, or will be when a fold has ended: the marks of what is folded away go with it.
    fn is_held_below(&self, block: u64, at: usize) -> bool {
        for layer in self.path(at).skip(1) {
            let folds = self.fold.as_ref().is_some_and(|fold| fold.name == layer.info.name);
            match layer.slots.get(&block).map_or(Cell::Absent, Slot::current) {
                Cell::Data(_) => return true,
                Cell::Zero if !folds => return false,
                Cell::Zero | Cell::Absent => {}
            }
        }
        false
    }

    /// What a layer holds of the range, as it is compared with another replica's: zeroes over nothing are nothing.
    ///
    /// # Errors
    /// There is no such layer.
    pub(crate) fn compared_layer(&self, name: &str, range: Extent) -> Result<Vec<Cell>, Failure> {
        let at = self.layer_named(name).ok_or_else(|| Failure::Refused("no such layer".into()))?;
        let idle = |(block, cell): (u64, Cell)| match cell {
            Cell::Zero if !self.is_held_below(block, at) => Cell::Absent,
            cell => cell,
        };
        Ok(blocks(range).zip(self.read_layer(name, range, false)?).map(idle).collect())
    }

    /// Makes the range of a layer exactly so; counts the blocks that changed.
    ///
    /// # Errors
    /// There is no such layer.
    pub(crate) fn put_layer(&mut self, name: &str, range: Extent, cells: &[Cell]) -> Result<u32, Failure> {
        let at = self.layer_named(name).ok_or_else(|| Failure::Refused("no such layer".into()))?;
        let mut changed = 0;
        for (block, cell) in blocks(range).zip(cells) {
            let slot = self.layers[at].slots.entry(block).or_default();
            if slot.current() != *cell {
                slot.since.push(*cell);
                changed += 1;
                self.raise(block);
                let layer = &mut self.layers[at];
                // A repair writes what they say.
                if layer.recorded(block) != Some(*cell) {
                    layer.sums = None;
                }
            }
        }
        Ok(changed)
    }

    /// A sync begins: it will cover what was written so far.
    pub(crate) fn sync_begins(&mut self) {
        let mut covered = BTreeMap::new();
        for (i, layer) in self.layers.iter().enumerate() {
            for (block, slot) in layer.slots.iter().filter(|(_, s)| !s.since.is_empty()) {
                covered.insert((i, *block), slot.since.len());
            }
        }
        self.syncing = Some(covered);
    }

    /// The sync has ended: what it covered is durable.
    pub(crate) fn sync_ends(&mut self) {
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
    pub(crate) fn power_cut(&mut self, dice: &mut Dice) {
        self.boot += 1;
        self.syncing = None;
        self.fold = None;
        self.gone.clear();
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

    /// What would be here had the power gone now.
    pub(crate) fn copy(&self, dice: &mut Dice) -> Self {
        let mut copy = Self { grant: None, unended: Vec::new(), ..self.clone() };
        copy.power_cut(dice);
        copy
    }

    /// Carries a change of the records out.
    ///
    /// # Errors
    /// The change makes no sense in this state.
    pub(crate) fn record(&mut self, record: &Record) -> Result<(), Failure> {
        let r = &mut self.records;
        match record {
            Record::Fence { generation, instance } => r.fence = Some((*generation, *instance)),
            Record::Epoch { epoch, out } if r.rebuilding => {
                r.next = Some((epoch.clone(), out.clone()));
            }
            Record::Epoch { epoch, out } => self.record_epoch(epoch.clone(), out.clone()),
            // A directory passes over trails of nobody. An error would be one more of a disk that fails now and then: that they are
            // put out at all is a fault of the machine.
            Record::Missed { trails } => {
                assert!(!r.out.is_empty(), "trails are saved though nobody is out: {trails:?}");
                r.missed.extend(trails.iter().copied());
            }
            Record::Intent { mark, clear } => {
                r.intent.retain(|c| !clear.contains(c));
                self.found_marked.retain(|c| !clear.contains(c));
                r.intent.extend(mark);
                r.intent.sort_unstable();
                r.intent.dedup();
            }
            Record::Prepare { id, op } => {
                self.check(op)?;
                self.records.prepared = Some((*id, op.clone()));
                self.forget_settled_if_gone();
            }
            Record::Commit { id } => self.commit(*id)?,
            Record::Abort { .. } => r.prepared = None,
            Record::Settled { snapshot } => r.settled = Some(snapshot.clone()),
            Record::RebuildBegin { size, chain, keep } => self.begin_rebuild(*size, chain, keep.as_ref()),
            Record::RebuildEnd => {
                r.rebuilding = false;
                r.kept = None;
                r.whole = Some(self.boot);
                if let Some((epoch, out)) = r.next.take() {
                    self.record_epoch(epoch, out);
                }
            }
            Record::Close => {
                r.clean = true;
                r.intent.clear();
            }
            Record::Whole => r.whole = Some(self.boot),
            Record::Begin { generation } => {
                if std::mem::take(&mut r.clean) {
                    r.whole = Some(self.boot);
                }
                let noted = r.power.is_some_and(|(boot, _)| boot == self.boot);
                if r.whole != Some(self.boot) && !noted {
                    let late = r.fence.is_some_and(|(fence, _)| fence == *generation);
                    r.power = Some((self.boot, PowerSince { generation: *generation, late }));
                }
            }
            Record::Fold { name, .. } => self.begin_fold(name)?,
            Record::FoldStop => self.fold = None,
            Record::Hash { snapshots, .. } => self.hash(snapshots),
            Record::HashStop => {}
        }
        Ok(())
    }

    fn record_epoch(&mut self, epoch: Epoch, out: Vec<Outsider>) {
        let r = &mut self.records;
        r.epoch = Some(epoch);
        if out.is_empty() {
            r.missed.clear();
        }
        r.out = out;
    }

    /// Whether the operation can be carried out here.
    fn check(&self, op: &ChainOp) -> Result<(), Failure> {
        let why = match op {
            ChainOp::Snapshot { name, .. } => self.layer_at(name).map(|_| "a snapshot of this name exists"),
            ChainOp::Expand { size, .. } => (*size <= self.size).then_some("it has that size"),
            ChainOp::Revert { name, .. } | ChainOp::MarkRemoved { name } => {
                self.layer_at(name).is_none().then_some("there is no such snapshot")
            }
        };
        why.map_or(Ok(()), |why| Err(Failure::Refused(why.into())))
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
        if !matches!(op, ChainOp::MarkRemoved { .. }) {
            self.end_grant();
        }
        let kept = op.snapshot().unwrap_or_default();
        match op {
            ChainOp::Snapshot { name, user_created, created, labels } => {
                self.put_head_over(LayerInfo { name, user_created, created, labels, ..LayerInfo::default() });
            }
            ChainOp::Expand { size, created, .. } => {
                let old = std::mem::replace(&mut self.size, size);
                self.put_head_over(LayerInfo { name: kept, created, length: old, ..LayerInfo::default() });
            }
            ChainOp::Revert { name, created } => {
                self.syncing = None;
                self.fold = None;
                let info = LayerInfo { parent: name, created, length: self.size, ..LayerInfo::default() };
                let file = self.new_file();
                let old = std::mem::replace(self.head(), Layer { info, file, ..Layer::default() });
                self.gone.insert(old.file, old.slots);
            }
            ChainOp::MarkRemoved { name } => {
                if let Some(layer) = self.layers.iter_mut().find(|l| l.info.name == name) {
                    layer.info.removed = true;
                }
            }
        }
        Ok(())
    }

    /// The head becomes a snapshot, and an empty head is put over it.
    fn put_head_over(&mut self, info: LayerInfo) {
        let size = self.size;
        let head = self.head();
        let (name, created, length) = (info.name.clone(), info.created.clone(), head.info.length);
        head.info = LayerInfo { parent: std::mem::take(&mut head.info.parent), length, ..info };
        let info = LayerInfo { parent: name, created, length: size, ..LayerInfo::default() };
        let file = self.new_file();
        self.layers.push(Layer { info, file, ..Layer::default() });
    }

    fn begin_fold(&mut self, name: &str) -> Result<(), Failure> {
        let refused = |why: &str| Err(Failure::Refused(why.into()));
        let Some(at) = self.layer_at(name).filter(|at| self.layers[*at].info.removed) else {
            return refused("no removed snapshot has this name");
        };
        if self.layers.iter().filter(|l| l.info.parent == name).count() > 1 {
            return refused("several stand on it");
        }
        let head = self.layers.len() - 1;
        let held = |layer: usize| self.layers[layer].slots.len();
        let drains = self.layers[head].info.parent == name && held(head) * 2 < held(at);
        let goes = if drains { head } else { at };
        let child = self.layers.iter().position(|l| l.info.parent == name);
        let between = child.is_some_and(|child| child != head);
        let cell = |block: &u64| {
            child.and_then(|c| self.layers[c].slots.get(block)).map_or(Cell::Absent, Slot::current)
        };
        let held = |block: &u64| cell(block) != Cell::Absent;
        let left = self.layers[goes].slots.keys().rev().filter(|b| !(between && held(b))).copied().collect();
        self.fold = Some(Fold { name: name.to_owned(), drains, between, left });
        Ok(())
    }

    /// The fold that runs takes the head into the snapshot below.
    pub(crate) fn drains(&self) -> bool {
        self.fold.as_ref().is_some_and(|fold| fold.drains)
    }

    /// Moves one block of the snapshot that is folded away, or ends the fold. `false`: none runs any more.
    pub(crate) fn fold_on(&mut self) -> bool {
        let Some(fold) = &mut self.fold else { return false };
        let (name, drains, between, block) = (fold.name.clone(), fold.drains, fold.between, fold.left.pop());
        let Some(at) = self.layer_at(&name) else {
            self.fold = None;
            return false;
        };
        let child = self.layers.iter().position(|l| l.info.parent == name);
        match (block, child) {
            (Some(block), Some(child)) if drains => {
                // Hidden below what the layer above has itself, whatever becomes of that.
                let cell = self.layers[child].slots.get(&block).map_or(Cell::Absent, Slot::current);
                if cell != Cell::Absent {
                    self.moving(block, |disk| {
                        disk.layers[at].slots.entry(block).or_default().since.push(cell);
                        disk.layers[at].sums = None;
                    });
                }
            }
            (Some(block), Some(child)) => self.move_up(at, child, block, between),
            (Some(_), None) => {}
            // What is prepared names layers as they are.
            (None, _) if self.records.prepared.is_some() => {}
            (None, child) => {
                if let Some(child) = child.filter(|_| drains) {
                    // What the layer above has itself counts, the last of it copied while writes wait.
                    let blocks: Vec<u64> = self.layers[at].slots.keys().copied().collect();
                    blocks.into_iter().for_each(|block| self.move_up(at, child, block, false));
                }
                self.end_fold(at, child);
            }
        }
        self.fold.is_some()
    }

    /// What a removed snapshot has of a block is in the layer above, unless that has something itself, or `over` it.
    fn move_up(&mut self, at: usize, child: usize, block: u64, over: bool) {
        self.moving(block, |disk| disk.copy_up(at, child, block, over));
    }

    fn copy_up(&mut self, at: usize, child: usize, block: u64, over: bool) {
        let base = self.layers[at].info.parent.is_empty();
        let cell = self.layers[at].slots.get(&block).map_or(Cell::Absent, Slot::current);
        let slot = self.layers[child].slots.entry(block).or_default();
        let needed = cell != Cell::Absent && !(base && cell == Cell::Zero);
        if needed && (over || slot.current() == Cell::Absent) {
            slot.since.push(cell);
            self.layers[child].sums = None;
        }
    }

    /// Everything is on stable storage, and the names change.
    fn end_fold(&mut self, at: usize, child: Option<usize>) {
        self.fold = None;
        self.end_grant();
        for slot in self.layers.iter_mut().flat_map(|l| l.slots.values_mut()) {
            if let Some(last) = slot.since.last().copied() {
                slot.durable = last;
                slot.since.clear();
            }
        }
        if let Some(child) = child {
            let info = &self.layers[at].info;
            let (parent, length) = (info.parent.clone(), info.length);
            let child = &mut self.layers[child].info;
            (child.parent, child.length) = (parent, child.length.max(length));
        }
        let gone = self.layers.remove(at);
        if self.records.settled.as_deref() == Some(&gone.info.name) {
            self.records.settled = Some(gone.info.parent.clone()).filter(|parent| !parent.is_empty());
        }
        let moved = |((layer, block), count)| match layer {
            layer if layer == at => None,
            layer => Some(((layer - usize::from(layer > at), block), count)),
        };
        self.syncing = self.syncing.take().map(|s| s.into_iter().filter_map(moved).collect());
        self.gone.insert(gone.file, gone.slots);
    }

    /// The process is gone, and with it the fold that it ran.
    pub(crate) fn process_ended(&mut self) {
        self.fold = None;
    }

    /// A snapshot may be called settled after it was folded away.
    fn forget_settled_if_gone(&mut self) {
        let settled = self.records.settled.take();
        self.records.settled = settled.filter(|s| self.layers.iter().any(|l| l.info.name == *s));
    }

    fn begin_rebuild(&mut self, size: u64, chain: &[LayerInfo], keep: Option<&Keep>) {
        self.end_grant();
        self.forget_settled_if_gone();
        let r = &mut self.records;
        let based = r.epoch.is_some() && (!r.rebuilding || r.kept.is_some());
        r.kept = keep.filter(|_| based).map(|keep| Kept { unsure: keep.unsure.clone() });
        r.next = None;
        r.rebuilding = true;
        r.prepared = None;
        r.out.clear();
        r.missed.clear();
        let sure = |name: &String| keep.is_some_and(|keep| !keep.unsure.contains(name));
        r.settled = r.settled.take().filter(|s| sure(s) && chain.iter().any(|l| l.name == *s));
        self.size = size;
        self.syncing = None;
        self.fold = None;
        let mut old = std::mem::take(&mut self.layers);
        let mut head = old.pop();
        let mut files = self.files;
        let layer = |info: &LayerInfo| {
            files += 1;
            let kept = match keep {
                Some(keep) if info.name == keep.head => head.take(),
                Some(_) if !info.name.is_empty() => {
                    old.iter_mut().find(|l| l.info.name == info.name).map(std::mem::take)
                }
                _ => None,
            };
            Layer { info: info.clone(), file: files, ..kept.unwrap_or_default() }
        };
        self.layers = chain.iter().map(layer).collect();
        self.files = files;
        self.sort_layers();
    }

    /// Where a layer holds something: few ranges in a page, so that there are many pages.
    ///
    /// # Errors
    /// There is no such layer.
    pub(crate) fn layer_map(&self, name: &str, from: u64) -> Result<MapPage, Failure> {
        const PAGE: usize = 5;
        let at = self.layer_named(name).ok_or_else(|| Failure::Refused("no such layer".into()))?;
        let slots = self.layers[at].slots.range(from / BLOCK..);
        let mut held = slots.filter(|(_, s)| s.current() != Cell::Absent).map(|(block, _)| *block);
        let ranges: Vec<Extent> = held.by_ref().take(PAGE).map(|b| Extent::new(b * BLOCK, BLOCK)).collect();
        Ok(MapPage { next: held.next().map(|b| b * BLOCK), ranges, total: None })
    }

    /// What the directory says of itself; the replica's machine adds what only it knows.
    pub(crate) fn describe(&self) -> ReplicaState {
        let mut chain: Vec<_> = self
            .layers
            .iter()
            .map(|l| LayerInfo { allocated: l.slots.len() as u64 * BLOCK, ..l.info.clone() })
            .collect();
        if let Some(head) = chain.last_mut() {
            head.name = String::new();
        }
        ReplicaState {
            size: self.size,
            chain,
            epoch: self.records.epoch.clone(),
            prepared: self.records.prepared.clone(),
            committed: self.records.committed,
            rebuilding: self.records.rebuilding,
            kept: self.records.kept.clone(),
            unsettled: self.unsettled(),
            power_since: self.power_since(),
            clean: self.records.clean,
            fold: self.fold.as_ref().map(|f| FoldState { name: f.name.clone(), ..FoldState::default() }),
            ..ReplicaState::default()
        }
    }

    /// An engine has called every snapshot of the head's branch settled.
    pub(crate) fn is_settled(&self) -> bool {
        let is_removed = |name: &String| self.layer_at(name).is_some_and(|at| self.layers[at].info.removed);
        self.unsettled().iter().all(is_removed)
    }

    /// Snapshots of the head's branch above the settled one, base first.
    fn unsettled(&self) -> Vec<String> {
        let mut names = Vec::new();
        let mut at = self.layers.last().map_or("", |head| head.info.parent.as_str());
        while let Some(below) = self.layer_at(at).filter(|_| self.records.settled.as_deref() != Some(at)) {
            names.push(at.to_owned());
            at = &self.layers[below].info.parent;
        }
        names.reverse();
        names
    }

    /// What every layer that is not removed shows.
    pub(crate) fn image(&self) -> Image {
        let live = (0..self.layers.len()).filter(|at| !self.layers[*at].info.removed);
        live.map(|at| {
            (
                if at + 1 == self.layers.len() { String::new() } else { self.layers[at].info.name.clone() },
                self.seen(at),
            )
        })
        .collect()
    }

    /// For people: what each layer says of a block, whether it is marked, and what may be lost with the power.
    pub(crate) fn tell(&self, block: u64) -> String {
        let layers = self.layers.iter().map(|l| match l.slots.get(&block) {
            None => format!("{:?} -", l.info.name),
            Some(slot) => format!("{:?} {:?}, unsynced {:?}", l.info.name, slot.durable, slot.since),
        });
        let marked = self.records.intent.contains(&(block * BLOCK / self.chunk));
        layers.chain(marked.then(|| "marked".into())).collect::<Vec<_>>().join("; ")
    }

    /// It is noted that the host has kept its power since everything that was answered was here.
    pub(crate) fn has_kept_power(&self) -> bool {
        self.records.whole == Some(self.boot)
    }

    /// As the state tells.
    pub(crate) fn power_since(&self) -> Option<PowerSince> {
        let on_this_boot = |(boot, since)| (boot == self.boot && !self.has_kept_power()).then_some(since);
        self.records.power.and_then(on_this_boot)
    }

    /// What a snapshot shows, if it is there.
    pub(crate) fn snapshot(&self, name: &str) -> Option<Seen> {
        self.layer_at(name).map(|at| self.seen(at))
    }

    fn seen(&self, top: usize) -> Seen {
        let touched: std::collections::BTreeSet<u64> =
            self.path(top).flat_map(|l| l.slots.keys().copied()).collect();
        touched.into_iter().map(|b| (b, self.read_through(b, top))).filter(|(_, s)| s.0 != 0).collect()
    }
}

/// Numbers of the blocks of a range.
pub(crate) fn blocks(range: Extent) -> std::ops::Range<u64> {
    range.offset / BLOCK..range.end().div_ceil(BLOCK)
}
