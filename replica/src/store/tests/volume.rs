//! A replica on a real directory with the simplest of drivers: one request at a time, blocking.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lh_block::{BLOCK, Extent, Instance};
use lh_wire::{BlockState, ChainOp};

use super::super::chain::Committed;
use super::super::checksum::LayerChecksums;
use super::super::data::{Answer, Source, Store};
use super::super::directory::{CreateOptions, Directory, OpenOptions};
use super::super::error::{ChainError, OpenError};
use super::super::fold::{Fold, Step};
use super::super::fs::Fs;
use super::super::layer::LayerNo;
use super::super::states::Told;
use super::super::zeroed::ZeroPlan;
use super::super::{create, disk, open};
use super::tape::Tape;

pub(super) const SIZE: u64 = 64 * BLOCK;

pub(super) const OPTIONS: OpenOptions = OpenOptions { lock_wait: Duration::from_millis(900) };

/// A temporary directory in RAM where there is one: the tests make thousands of files.
pub(in crate::store) fn temporary() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

pub(super) fn create_options(size: u64) -> CreateOptions {
    CreateOptions { size, backing: None, lock_wait: Duration::from_millis(900) }
}

pub(super) fn extent(start: u64, blocks: u64) -> Extent {
    Extent::new(start * BLOCK, blocks * BLOCK)
}

pub(super) fn snapshot_op(name: &str) -> ChainOp {
    ChainOp::Snapshot {
        name: name.into(),
        user_created: true,
        created: "2026-11-20T06:03:39Z".into(),
        labels: [("note".to_owned(), "a & b".to_owned())].into(),
    }
}

pub(super) fn revert_op(name: &str) -> ChainOp {
    ChainOp::Revert { name: name.into(), created: "2026-11-20T06:03:39Z".into() }
}

/// Both halves of an open replica.
#[derive(Debug)]
pub(in crate::store) struct Volume {
    pub(in crate::store) directory: Directory,
    pub(super) store: Store,
    /// What a fold has claimed of the head.
    pub(super) claim: Option<Extent>,
}

impl Volume {
    pub(in crate::store) fn create(path: &Path) -> Self {
        Self::create_sized(path, SIZE)
    }

    pub(super) fn create_sized(path: &Path, size: u64) -> Self {
        let (directory, store) = create::create(path, &create_options(size), Fs::default()).unwrap();
        Self { directory, store, claim: None }
    }

    pub(in crate::store) fn open(path: &Path) -> Result<Self, OpenError> {
        open::open(path, &OPTIONS, Fs::default()).map(|(directory, store)| Self {
            directory,
            store,
            claim: None,
        })
    }

    /// Opens with a recorder.
    pub(super) fn open_taped(path: &Path, tape: &Arc<Tape>) -> Result<Self, OpenError> {
        let fs = Fs { tape: Some(Arc::clone(tape)) };
        open::open(path, &OPTIONS, fs).map(|(directory, store)| Self { directory, store, claim: None })
    }

    pub(super) fn path(&self) -> PathBuf {
        self.directory.path().to_owned()
    }

    fn raw(&self, layer: LayerNo, extent: Extent, byte: Option<u8>) {
        // The driver's own memory is aligned; here the page cache does it.
        let file = disk::reopen(self.store.layer_file(layer)).unwrap();
        match byte {
            Some(byte) => {
                file.write_all_at(&vec![byte; usize::try_from(extent.len).unwrap()], extent.offset).unwrap();
            }
            None => disk::punch(&file, extent).unwrap(),
        }
        file.sync_data().unwrap();
    }

    pub(super) fn write(&mut self, extent: Extent, byte: u8) {
        self.directory.begin_use().unwrap();
        self.store.intent_mark(extent);
        self.store.save_intent().unwrap();
        let head = self.store.head();
        assert!(self.store.begin_write(head, extent));
        self.raw(head, extent, Some(byte));
        if self.store.wrote(extent) == Answer::AfterFlush {
            self.flush();
        }
    }

    pub(super) fn zero(&mut self, extent: Extent) {
        self.directory.begin_use().unwrap();
        let plan = self.store.plan_zero(extent, false, &mut self.recorded()).unwrap();
        self.make_zero(&plan);
    }

    /// What the layers should hold by their checksums.
    fn recorded(&self) -> impl FnMut(&Store, LayerNo, Extent) -> Vec<Extent> + use<> {
        let path = self.path();
        move |store, layer, part| {
            let sums = LayerChecksums::open(&path, store.layer_file(layer));
            sums.map(|mut sums| sums.recorded(part)).unwrap_or_default()
        }
    }

    /// What of the head is compared with that of another replica.
    pub(super) fn compared(&self, extent: Extent) -> Vec<BlockState> {
        let head = self.store.head();
        let states = self.store.layer_states(head, extent).unwrap();
        self.store.compared_states(head, extent, &states, &mut self.recorded()).unwrap()
    }

    pub(super) fn end_rebuild(&mut self) {
        let mut recorded = self.recorded();
        assert_eq!(self.store.end_rebuild(0, &mut recorded, || false).unwrap(), None);
        self.flush();
        self.directory.end_rebuild().unwrap();
    }

    pub(super) fn make_zero(&mut self, plan: &ZeroPlan) {
        if plan.needs_mark {
            self.mark();
        }
        for hole in &plan.punch {
            self.raw(self.store.head(), *hole, None);
        }
        self.store.zeroed(plan).unwrap();
    }

    fn mark(&mut self) {
        self.directory.mark_zeroes().unwrap();
        self.store.marked();
    }

    pub(super) fn flush(&mut self) {
        self.store.flush_now().unwrap();
    }

    pub(super) fn punch(&mut self) -> bool {
        let Some((layer, hole)) = self.store.take_punch() else { return false };
        self.raw(layer, hole, None);
        self.store.punched(layer, hole, true);
        true
    }

    pub(super) fn read(&self, range: Extent) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut pieces = Vec::new();
        self.store.plan_read(range, &mut pieces);
        for piece in pieces {
            let mut part = vec![0; usize::try_from(piece.extent.len).unwrap()];
            if let Source::Layer(layer) = piece.source {
                let file = disk::reopen(self.store.layer_file(layer)).unwrap();
                let held = self.store.layer_length(layer).saturating_sub(piece.extent.offset);
                let held = usize::try_from(held).unwrap().min(part.len());
                file.read_exact_at(&mut part[..held], piece.extent.offset).unwrap();
            }
            bytes.extend_from_slice(&part);
        }
        bytes
    }

    /// The first byte of each block: tests write blocks of one byte.
    pub(super) fn blocks(&self) -> Vec<u8> {
        let bytes = self.read(Extent::new(0, self.store.size()));
        let step = usize::try_from(BLOCK).unwrap();
        assert!(bytes.chunks(step).all(|block| block.iter().all(|b| *b == block[0])), "a block is a mixture");
        bytes.chunks(step).map(|block| block[0]).collect()
    }

    pub(in crate::store) fn snapshot(&mut self, id: u128, name: &str) -> Result<(), ChainError> {
        self.directory.prepare(Instance(id), &snapshot_op(name))?;
        self.commit(id)
    }

    pub(super) fn carry_out(&mut self, id: u128, op: &ChainOp) -> Result<(), ChainError> {
        self.directory.prepare(Instance(id), op)?;
        self.commit(id)
    }

    pub(super) fn remove(&mut self, id: u128, name: &str) -> Result<(), ChainError> {
        self.carry_out(id, &ChainOp::MarkRemoved { name: name.into() })
    }

    pub(super) fn expand(&mut self, id: u128, size: u64) -> Result<(), ChainError> {
        self.carry_out(id, &ChainOp::Expand { name: None, size, created: "2026-11-20T06:03:39Z".into() })
    }

    pub(super) fn begin_fold(&mut self, name: &str) -> Result<Fold, ChainError> {
        let plan = self.directory.begin_fold(name)?;
        Ok(Fold::new(&self.store, plan).unwrap())
    }

    /// Does the next step of a fold. `false`: it is over.
    pub(super) fn fold_step(&mut self, fold: &mut Fold) -> Result<bool, ChainError> {
        let io = |source| ChainError::Io { what: "folding".into(), source };
        match fold.next(&mut self.store).map_err(io)? {
            Step::Work(work) => fold.worked(&mut self.store, work.run()).map_err(io)?,
            Step::Claim(range) => self.claim = Some(range),
            Step::Release => self.claim = None,
            Step::Punching => panic!("no punch is in flight"),
            Step::MakeMap(name) => {
                let map = self.directory.make_zero_map(&name).map_err(io)?;
                fold.map_made(&mut self.store, map);
            }
            Step::MarkZeroes => {
                self.directory.mark_zeroes().map_err(io)?;
                self.store.marked();
            }
            Step::Choose(direction) => {
                self.directory.choose_fold(fold.plan(), direction).map_err(io)?;
                fold.chosen(&mut self.store);
            }
            Step::Flush => {
                self.store.flush_now().map_err(io)?;
                fold.flushed();
            }
            Step::Note(direction, at) => {
                self.directory.save_fold(fold.plan(), direction, at).map_err(io)?;
                fold.noted();
            }
            Step::Switch(direction) => {
                let folded = self.directory.switch_fold(fold.plan(), direction)?;
                let gone = fold.switched(&mut self.store, &folded);
                drop(self.store.release(gone));
            }
            Step::Ready => {
                let ready = self.directory.ready_fold(fold.plan())?;
                fold.readied(ready);
            }
            Step::Swap => match self.directory.swap_fold(fold.plan()).map_err(io)? {
                Some(folded) => {
                    let parent = self.store.layer(&fold.plan().name).unwrap();
                    assert!(!self.store.at(parent).dirty, "what was copied is not on stable storage");
                    let gone = fold.switched(&mut self.store, &folded);
                    drop(self.store.release(gone));
                    self.directory.finish_fold(fold.plan()).map_err(io)?;
                    fold.finished();
                }
                None => fold.not_swapped(),
            },
            Step::Finish => panic!("that was done with the swap"),
            Step::GiveWay => self.directory.forget_fold().map_err(io)?,
            Step::Ended => return Ok(false),
        }
        Ok(true)
    }

    /// Makes a range of a layer so beside a fold, as the server does.
    pub(super) fn put_beside(&mut self, fold: &mut Fold, name: &str, start: u64, image: &[(BlockState, u8)]) {
        let layer = self.store.layer(name).unwrap();
        let touched = fold.touches(&self.store, layer);
        if touched {
            fold.give_way();
            while self.fold_step(fold).unwrap() && !fold.stands_aside() {}
        }
        self.put(name, start, image);
        if touched && fold.stands_aside() {
            fold.begin_anew(&mut self.store);
        }
    }

    /// Folds a removed snapshot away.
    pub(super) fn fold(&mut self, name: &str) -> Result<Fold, ChainError> {
        let mut fold = self.begin_fold(name)?;
        while self.fold_step(&mut fold)? {}
        Ok(fold)
    }

    pub(super) fn commit(&mut self, id: u128) -> Result<(), ChainError> {
        match self.directory.commit(Instance(id))? {
            Committed::Head(head) => drop(self.store.switch_head(*head)),
            Committed::Chain(parts) => drop(self.store.replace(*parts)),
            Committed::Nothing => {}
        }
        self.directory
            .sync_commit()
            .map_err(|source| ChainError::Io { what: "syncing a commit".into(), source })?;
        self.flush();
        Ok(())
    }

    /// What the layer says and, for each block of data, its byte.
    pub(super) fn layer(&self, name: &str) -> Vec<(BlockState, u8)> {
        let layer = self.store.layer(name).unwrap();
        let whole = Extent::new(0, self.store.size());
        let states = self.store.layer_states(layer, whole).unwrap();
        let file = disk::reopen(self.store.layer_file(layer)).unwrap();
        let byte = |(n, state)| {
            let mut byte = [0];
            if state == BlockState::Data {
                file.read_exact_at(&mut byte, n * BLOCK).unwrap();
            }
            (state, byte[0])
        };
        (0..).zip(states).map(byte).collect()
    }

    /// What is read through the layer and, for each block of data, its byte: what another replica is given to repair itself.
    pub(super) fn merged(&self, name: &str) -> Vec<(BlockState, u8)> {
        let layer = self.store.layer(name).unwrap();
        let whole = Extent::new(0, self.store.size());
        let merged = self.store.merged_states(layer, whole).unwrap();
        let mut image: Vec<_> = merged.states().into_iter().map(|state| (state, 0)).collect();
        let mut told = vec![false; image.len()];
        for Told { layer, states, .. } in merged.told {
            let file = disk::reopen(self.store.layer_file(layer)).unwrap();
            for (n, state) in states.into_iter().enumerate().filter(|(_, state)| *state != BlockState::Absent)
            {
                assert!(!std::mem::replace(&mut told[n], true), "block {n} is told twice");
                let mut byte = [0];
                if state == BlockState::Data {
                    file.read_exact_at(&mut byte, n as u64 * BLOCK).unwrap();
                }
                image[n].1 = byte[0];
            }
        }
        image
    }

    /// Makes a range of a layer so, as from another replica's image.
    pub(super) fn put(&mut self, name: &str, start: u64, image: &[(BlockState, u8)]) {
        self.directory.begin_use().unwrap();
        let layer = self.store.layer(name).unwrap();
        let range = extent(start, image.len() as u64);
        let states: Vec<_> = image.iter().map(|(state, _)| *state).collect();
        assert!(self.store.begin_write(layer, range));
        let plan = self.store.plan_put(layer, range, &states).unwrap();
        if plan.needs_mark {
            self.mark();
        }
        if plan.needs_map {
            let map = self.directory.make_zero_map(name).unwrap().unwrap();
            self.store.attach_zero_map(map);
        }
        for hole in &plan.punch {
            self.raw(layer, *hole, None);
        }
        let mut data = image.iter().filter(|(state, _)| *state == BlockState::Data).map(|(_, byte)| *byte);
        for run in &plan.write {
            for block in run.offset / BLOCK..run.end() / BLOCK {
                self.raw(layer, extent(block, 1), data.next());
            }
        }
        assert_eq!(data.next(), None, "the plan takes all of the image's data");
        if self.store.put_done(&plan).unwrap() == Answer::AfterFlush {
            self.flush();
        }
    }

    pub(super) fn close(mut self) -> PathBuf {
        self.flush();
        let closing = self.store.close();
        self.directory.close_clean(closing).unwrap();
        self.path()
    }
}
