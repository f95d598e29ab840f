//! A replica on a real directory, with the simplest of drivers: one request at a time, blocking.

use std::fs::{File, OpenOptions as FileOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use lh_block::{BLOCK, Extent};
use lh_ring::sys;
use lh_wire::BlockState;
use replica::serve::core::{Facts, Record, Trail};
use replica::store::{
    Answer, ChainError, Committed, CreateOptions, Directory, Fold, FoldStep, LayerNo, OpenOptions, Source,
    Store, forget_power,
};

use super::super::disk::{Cell, blocks};
use tests::register::Stamp;

const WAIT: Duration = Duration::from_secs(1);

/// A block is a stamp, so many times.
const WORDS: usize = 512;

/// Both halves of an open replica, and the fold that runs.
pub(super) struct Real {
    pub(super) directory: Directory,
    pub(super) store: Store,
    fold: Option<Fold>,
    claimed: bool,
}

/// Makes a record, as the server's worker does.
type Made = Result<(), ChainError>;

fn io(source: std::io::Error) -> ChainError {
    ChainError::Io { what: "a record".into(), source }
}

impl Real {
    pub(super) fn create(path: &Path, size: u64) -> Self {
        let options = CreateOptions { size, backing: None, lock_wait: WAIT };
        let (directory, store) = Directory::create(path, &options).expect("a new directory");
        Self { directory, store, fold: None, claimed: false }
    }

    pub(super) fn open(path: &Path) -> Self {
        let (directory, store) =
            Directory::open(path, &OpenOptions { lock_wait: WAIT }).expect("it is sound");
        Self { directory, store, fold: None, claimed: false }
    }

    /// As the server tells its machine.
    pub(super) fn facts(&self) -> Facts {
        let (state, fence) = (self.directory.state(), self.directory.fence());
        let missed = self.directory.missed().expect("trails");
        Facts {
            size: self.store.size(),
            fence: (fence != Default::default()).then_some(fence),
            epoch: self.directory.epoch().cloned(),
            prepared: state.prepared,
            committed: state.committed,
            intent_chunk: self.store.intent_chunk(),
            intent: self.store.intent(),
            clean: state.clean,
            powered: self.directory.is_powered(),
            out: missed.out,
            missed: missed.trails.into_iter().map(|(chunk, trail)| (chunk, Trail(trail))).collect(),
        }
    }

    fn file(&self, layer: LayerNo) -> File {
        // The driver's own memory is aligned; here the page cache does it.
        let path = format!("/proc/self/fd/{}", self.store.layer_file(layer).as_raw_fd());
        FileOptions::new().read(true).write(true).open(path).expect("a layer's file")
    }

    fn punch_file(&self, layer: LayerNo, hole: Extent) {
        sys::punch_hole(self.file(layer), hole.offset, hole.len).expect("a hole");
    }

    fn write_file(&self, layer: LayerNo, block: u64, stamp: Stamp) {
        let bytes = stamp.0.to_le_bytes().repeat(WORDS);
        self.file(layer).write_all_at(&bytes, block * BLOCK).expect("a write");
    }

    fn read_file(file: &File, block: u64) -> Stamp {
        let mut bytes = [0; WORDS * 8];
        file.read_exact_at(&mut bytes, block * BLOCK).expect("a read");
        let stamp = bytes[..8].try_into().map_or(0, u64::from_le_bytes);
        assert!(bytes[..] == *stamp.to_le_bytes().repeat(WORDS), "block {block} is a mixture");
        Stamp(stamp)
    }

    /// `false`: it is answered only after a flush.
    pub(super) fn write(&mut self, range: Extent, stamps: &[Stamp]) -> bool {
        self.wait_for_claim();
        let head = self.store.head();
        assert!(self.store.begin_write(head, range), "no punch is in flight");
        blocks(range).zip(stamps).for_each(|(block, stamp)| self.write_file(head, block, *stamp));
        self.store.wrote(range) == Answer::Now
    }

    pub(super) fn zero(&mut self, range: Extent, in_doubt: bool) {
        self.wait_for_claim();
        let plan = self.store.plan_zero(range, in_doubt, &mut |_, _, _| Vec::new()).expect("a plan");
        if plan.needs_mark {
            self.mark();
        }
        plan.punch.iter().for_each(|hole| self.punch_file(self.store.head(), *hole));
        self.store.zeroed(&plan).expect("a disk that works");
    }

    fn mark(&mut self) {
        self.directory.mark_zeroes().expect("a disk that works");
        self.store.marked();
    }

    /// `None`: there is no such layer. `Some(false)`: it is answered only after a flush.
    pub(super) fn put(&mut self, name: &str, range: Extent, cells: &[Cell]) -> Option<bool> {
        let layer = self.store.layer(name)?;
        let state = |cell: &Cell| match cell {
            Cell::Absent => BlockState::Absent,
            Cell::Zero => BlockState::Zero,
            Cell::Data(_) => BlockState::Data,
        };
        let states: Vec<_> = cells.iter().map(state).collect();
        assert!(self.store.begin_write(layer, range), "no punch is in flight");
        let plan = self.store.plan_put(layer, range, &states).expect("a plan");
        if plan.needs_mark {
            self.mark();
        }
        assert!(!plan.needs_map, "all layers are our own");
        plan.punch.iter().for_each(|hole| self.punch_file(layer, *hole));
        for (block, cell) in blocks(range).zip(cells) {
            if let Cell::Data(stamp) = cell {
                self.write_file(layer, block, *stamp);
            }
        }
        Some(self.store.put_done(&plan).expect("a disk that works") == Answer::Now)
    }

    pub(super) fn read(&self, range: Extent) -> Vec<Stamp> {
        let mut pieces = Vec::new();
        self.store.plan_read(range, &mut pieces);
        let mut read = Vec::new();
        for piece in pieces {
            match piece.source {
                Source::Zero => read.extend(blocks(piece.extent).map(|_| Stamp(0))),
                Source::Layer(layer) => {
                    let file = self.file(layer);
                    read.extend(blocks(piece.extent).map(|block| Self::read_file(&file, block)));
                }
                other => panic!("nothing here stands on a backing file: {other:?}"),
            }
        }
        read
    }

    /// Of each block whether it holds data.
    pub(super) fn allocation(&self, range: Extent) -> Vec<bool> {
        let (mut at, mut told) = (range.offset, Vec::new());
        while at < range.end() {
            let rest = Extent::new(at, range.end() - at);
            let before = at;
            for run in lh_block::runs(self.store.allocation(rest).as_bytes(), rest) {
                told.extend(blocks(run.range).map(|_| run.data));
                at = run.range.end();
            }
            assert_ne!(at, before, "each answer tells something");
        }
        told
    }

    /// What a layer itself holds, or what it is compared by.
    pub(super) fn layer(&self, name: &str, range: Extent, compared: bool) -> Option<Vec<Cell>> {
        let layer = self.store.layer(name)?;
        let mut states = self.store.layer_states(layer, range).expect("a disk that works");
        if compared {
            let nothing = &mut |_: &Store, _, _| Vec::new();
            states = self.store.compared_states(layer, range, &states, nothing).expect("a disk that works");
        }
        let file = self.file(layer);
        Some(blocks(range).zip(states).map(|(block, state)| Self::cell(&file, block, state)).collect())
    }

    /// What is read through a layer of the head's branch.
    pub(super) fn merged(&self, name: &str, range: Extent) -> Option<Vec<Cell>> {
        let layer = self.store.layer(name)?;
        let merged = self.store.merged_states(layer, range).expect("a disk that works");
        let mut cells: Vec<_> = merged
            .states()
            .into_iter()
            .map(|state| if state == BlockState::Absent { Cell::Absent } else { Cell::Zero })
            .collect();
        for told in merged.told {
            let file = self.file(told.layer);
            for ((cell, block), state) in cells.iter_mut().zip(blocks(range)).zip(told.states) {
                if state != BlockState::Absent {
                    *cell = Self::cell(&file, block, state);
                }
            }
        }
        Some(cells)
    }

    fn cell(file: &File, block: u64, state: BlockState) -> Cell {
        match state {
            BlockState::Absent => Cell::Absent,
            BlockState::Zero => Cell::Zero,
            BlockState::Data => Cell::Data(Self::read_file(file, block)),
        }
    }

    pub(super) fn flush(&mut self) {
        self.store.flush_now().expect("a disk that works");
    }

    /// Punches holes below marks that are durable.
    pub(super) fn punch(&mut self) {
        while let Some((layer, hole)) = self.store.take_punch() {
            self.punch_file(layer, hole);
            self.store.punched(layer, hole, true);
        }
    }

    /// As the server's worker and what it reports to.
    pub(super) fn record(&mut self, record: &Record) -> Made {
        match record.clone() {
            Record::Begin { generation } => {
                self.directory.begin_use().and_then(|()| self.directory.note_power(generation)).map_err(io)
            }
            Record::Whole => self.directory.note_whole().map_err(io),
            Record::Fence { generation, instance } => {
                self.directory.store_fence(generation, instance).map_err(io)
            }
            Record::Epoch { epoch, out } => {
                let stored = self.directory.store_epoch_and_outsiders(epoch, out).map_err(io)?;
                assert!(stored, "a younger one is there");
                Ok(())
            }
            Record::Missed { trails } => {
                let trails: Vec<_> = trails.into_iter().map(|(chunk, trail)| (chunk, trail.0)).collect();
                self.directory.store_missed(&trails).map_err(io)
            }
            Record::Intent { mark, clear } => {
                let chunk = self.store.intent_chunk();
                let size = self.store.size();
                let of = |n: u64| Extent::new(n * chunk, chunk.min(size - n * chunk));
                clear.into_iter().for_each(|n| self.store.intent_clear(of(n)));
                mark.into_iter().for_each(|n| self.store.intent_mark(of(n)));
                self.store.save_intent().map_err(io)
            }
            Record::Prepare { id, op } => self.directory.prepare(id, &op),
            Record::Commit { id } => {
                match self.directory.commit(id)? {
                    Committed::Head(head) => drop(self.store.switch_head(*head)),
                    Committed::Chain(parts) => {
                        (self.fold, self.claimed) = (None, false);
                        drop(self.store.replace(*parts));
                    }
                    Committed::Nothing => {}
                }
                self.directory.sync_commit().map_err(io)
            }
            Record::Abort { id } => self.directory.abort(id),
            Record::Settled { snapshot } => self.directory.store_settled(&snapshot).map_err(io),
            Record::RebuildBegin { size, chain, keep } => {
                let parts = match keep {
                    Some(keep) => self.directory.begin_catch_up(size, &chain, &keep)?,
                    None => self.directory.begin_rebuild(size, &chain)?,
                };
                (self.fold, self.claimed) = (None, false);
                drop(self.store.replace(parts));
                Ok(())
            }
            Record::RebuildEnd => {
                let ended = self.store.end_rebuild(0, &mut |_, _, _| Vec::new(), || false).map_err(io)?;
                assert_eq!(ended, None, "nobody has stopped it");
                self.flush();
                self.directory.note_whole().and_then(|()| self.directory.end_rebuild()).map_err(io)
            }
            Record::Close => {
                self.flush();
                let closing = self.store.close();
                self.directory.close_clean(closing).map_err(io)
            }
            Record::Fold { name, .. } => {
                let plan = self.directory.begin_fold(&name)?;
                self.fold = Some(Fold::new(&self.store, plan).expect("the store knows its layers"));
                Ok(())
            }
            other => panic!("no record of these: {other:?}"),
        }
    }

    /// What a client changes waits.
    fn wait_for_claim(&mut self) {
        while self.claimed && self.fold_on() {}
    }

    /// The fold does its next step. `false`: none runs any more.
    pub(super) fn fold_on(&mut self) -> bool {
        let Some(mut fold) = self.fold.take() else { return false };
        let on = match self.fold_step(&mut fold) {
            // Later.
            Err(ChainError::OtherPrepared(_)) => true,
            done => done.expect("a disk that works"),
        };
        self.claimed &= on;
        self.fold = Some(fold).filter(|_| on);
        on
    }

    fn fold_step(&mut self, fold: &mut Fold) -> Result<bool, ChainError> {
        match fold.next(&mut self.store).map_err(io)? {
            FoldStep::Work(work) => fold.worked(&mut self.store, work.run()).map_err(io)?,
            FoldStep::Claim(_) => self.claimed = true,
            FoldStep::Release => self.claimed = false,
            FoldStep::MarkZeroes => self.mark(),
            FoldStep::Choose(direction) => {
                self.directory.choose_fold(fold.plan(), direction).map_err(io)?;
                fold.chosen(&mut self.store);
            }
            FoldStep::Flush => {
                self.flush();
                fold.flushed();
            }
            FoldStep::Note(direction, at) => {
                self.directory.save_fold(fold.plan(), direction, at).map_err(io)?;
                fold.noted();
            }
            FoldStep::Switch(direction) => {
                let folded = self.directory.switch_fold(fold.plan(), direction)?;
                let gone = fold.switched(&mut self.store, &folded);
                drop(self.store.release(gone));
            }
            FoldStep::Ready => {
                let ready = self.directory.ready_fold(fold.plan())?;
                fold.readied(ready);
            }
            FoldStep::Swap => match self.directory.swap_fold(fold.plan()).map_err(io)? {
                Some(folded) => {
                    let gone = fold.switched(&mut self.store, &folded);
                    drop(self.store.release(gone));
                    self.directory.finish_fold(fold.plan()).map_err(io)?;
                    fold.finished();
                }
                None => fold.not_swapped(),
            },
            FoldStep::GiveWay => self.directory.forget_fold().map_err(io)?,
            FoldStep::Ended => return Ok(false),
            other => panic!("nothing asks for {other:?} here"),
        }
        Ok(true)
    }

    /// The blocks are so from now on, whatever was written; nobody uses the store any more.
    pub(super) fn lose(&self, lost: &[(String, u64, Cell)]) {
        for (layer, block, cell) in lost {
            let layer = self.store.layer(layer).expect("both have the same layers");
            match cell {
                Cell::Data(stamp) => self.write_file(layer, *block, *stamp),
                Cell::Absent => self.punch_file(layer, Extent::new(block * BLOCK, BLOCK)),
                Cell::Zero => panic!("marks are flushed before the power goes"),
            }
        }
    }

    /// The host has lost its power.
    pub(super) fn forget_power(path: &Path) {
        forget_power(path, WAIT).expect("a disk that works");
    }
}
