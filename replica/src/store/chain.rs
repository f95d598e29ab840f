//! Chain operations: prepared durably, then carried out or taken back (`docs/invariants.md`, 9).
//!
//! The files of an operation that changes the head are all made and synced by `prepare`, under names in `engine/`; the
//! record `chain` says so, and then all but volume.meta get their names. `commit` takes the steps of [`super::switch`] that
//! are left, each idempotent, volume.meta being the switch. A directory that is opened with a prepared operation has either
//! switched, and the rest is done, or it has not, and what was begun is undone: then it is prepared as before.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use lh_block::{BLOCK, Instance, SNAPSHOTS_MAX, check_name};
use lh_wire::ChainOp;

use super::directory::{DirLayer, Directory, NewHead, NextHead};
use super::disk;
use super::error::ChainError;
use super::fs::found_at;
use super::id::{Id, LAYER_ATTRIBUTE};
use super::load::Parts;
use super::locks::Locked;
use super::meta::{LayerMeta, META_MAX, VolumeMeta, heads_after, meta_name, snapshot_file};
use super::record::{ChainRecord, Prepared, Switch};
use super::room::{self, is_full};
use super::switch::{
    NEXT_HEAD, NEXT_HEAD_INFO, NEXT_SNAPSHOT, NEXT_VOLUME, Turn, drop_old_head, place_names, remove_next,
    switch_heads, undo,
};

/// Label of the snapshot that an expansion takes (longhorn-engine `pkg/replica`): the new size in bytes.
const EXPANSION_LABEL: &str = "replica-expansion";

/// Bytes that all layers may take where they are told of, with their labels: beside two reports of ranges in doubt
/// (`serve::core::doubt`) they fit a message. Of a replica that cannot tell of its layers no engine can make any use.
pub(super) const CHAIN_MAX: usize = 640 << 10;

const _: () = assert!(CHAIN_MAX + 2 * 4096 * 45 + (64 << 10) <= lh_wire::MAX_PAYLOAD as usize);

/// What a commit has changed, for the [`super::Store`].
#[derive(Debug)]
pub enum Committed {
    /// Nothing that it knows of: done before, or only a mark.
    Nothing,
    /// There is a new head over the former one: [`super::Store::switch_head`].
    Head(Box<NewHead>),
    /// There is another chain: [`super::Store::replace`].
    Chain(Box<Parts>),
}

/// Descriptors that are left after a change of heads: for records, which each make a file, and for who connects. One that is missing
/// there fails the replica, or keeps everybody out.
const SPARE_DESCRIPTORS: usize = 16;

/// Tried with a file that is open anyway.
fn has_spare_descriptors(open: &File) -> bool {
    (0..SPARE_DESCRIPTORS).map(|_| open.try_clone()).collect::<io::Result<Vec<File>>>().is_ok()
}

impl Directory {
    /// Makes everything ready for a chain operation. Doing it twice is doing it once.
    ///
    /// # Errors
    /// [`ChainError`]; but for [`ChainError::Io`], nothing has changed.
    pub fn prepare(&mut self, id: Instance, op: &ChainOp) -> Result<(), ChainError> {
        if self.chain.committed == Some(id) {
            return Ok(());
        }
        match &self.chain.prepared {
            Some(prepared) if prepared.id == id => return Ok(()),
            Some(prepared) => return Err(ChainError::OtherPrepared(prepared.id)),
            None => {}
        }
        let prepared = self.check(id, op)?;
        if prepared.switch.is_some() && !has_spare_descriptors(&self.intent) {
            return Err(ChainError::NoDescriptors(describe(op)));
        }
        // The next change of heads would forget the name that is still to go.
        let what = "making a change of heads durable".to_owned();
        self.settle_heads().map_err(|source| ChainError::Io { what, source })?;
        let settled = self.settled().map(str::to_owned);
        let record = ChainRecord { prepared: Some(prepared.clone()), settled, ..self.chain.clone() };
        // A link changes the layer's inode: that is use.
        let made = self.begin_use().and_then(|()| self.make_next(&prepared));
        let made = made.and_then(|()| self.records().store(&self.fs, &record));
        let made = match made {
            Ok(()) => {
                self.chain = record;
                self.place_names(&prepared).map_err(|source| (source, self.take_back(&prepared)))
            }
            Err(source) => {
                self.next = None;
                Err((source, remove_next(&self.fs, &self.path, Some(&prepared))))
            }
        };
        made.map_err(|(source, undone)| match undone {
            Ok(()) if is_full(&source) => ChainError::NoSpace(describe(op)),
            _ => ChainError::Io {
                what: format!("preparing {} in {}", describe(op), self.path.display()),
                source,
            },
        })
    }

    /// The steps before the switch, so that `commit` holds requests for as few as can be.
    fn place_names(&self, prepared: &Prepared) -> io::Result<()> {
        if let (Some(switch), Some(turn)) = (&prepared.switch, Turn::of(&prepared.op, self.size())) {
            place_names(&self.fs, &self.path, switch, turn.keep.as_deref())?;
            self.fs.sync_directory(&self.path)?;
            self.fs.sync_directory(&self.engine())?;
        }
        Ok(())
    }

    /// Undoes what `prepare` did. The record goes after the names: it is what tells a start which names to undo.
    fn take_back(&mut self, prepared: &Prepared) -> io::Result<()> {
        self.next = None;
        self.undo_names(prepared)?;
        self.save_chain(ChainRecord { prepared: None, ..self.chain.clone() })?;
        remove_next(&self.fs, &self.path, Some(prepared))
    }

    /// Takes the names back that [`Self::place_names`] gave.
    pub(super) fn undo_names(&self, prepared: &Prepared) -> io::Result<()> {
        match (&prepared.switch, Turn::of(&prepared.op, self.size())) {
            (Some(switch), Some(turn)) => undo(&self.fs, &self.path, switch, turn.keep.as_deref()),
            _ => Ok(()),
        }
    }

    fn check(&self, id: Instance, op: &ChainOp) -> Result<Prepared, ChainError> {
        let mut was_removed = false;
        match op {
            ChainOp::Snapshot { name, .. } => check_name("snapshot", name)?,
            ChainOp::Expand { size, .. } => {
                check_name("snapshot", &op.snapshot().unwrap_or_default())?;
                self.check_expansion(*size)?;
            }
            ChainOp::MarkRemoved { name } => was_removed = self.snapshot(name)?.meta.removed,
            ChainOp::Revert { name, .. } => {
                if self.snapshot(name)?.meta.removed {
                    return Err(ChainError::Removed(name.clone()));
                }
                if self.rebuild.is_some() {
                    return Err(ChainError::Rebuilding);
                }
            }
        }
        let switch = match Turn::of(op, self.size()) {
            None => None,
            Some(turn) => Some(self.check_turn(op, &turn)?),
        };
        Ok(Prepared { id, op: op.clone(), switch, was_removed })
    }

    fn snapshot(&self, name: &str) -> Result<&DirLayer, ChainError> {
        let layer = self.layers.iter().find(|l| l.name == name && !name.is_empty());
        layer.ok_or_else(|| ChainError::NoSnapshot(name.to_owned()))
    }

    fn check_expansion(&self, size: u64) -> Result<(), ChainError> {
        if !size.is_multiple_of(BLOCK) || i64::try_from(size).is_err() {
            return Err(ChainError::BadSize(size));
        }
        if size <= self.size() {
            return Err(ChainError::NotLarger { size, now: self.size() });
        }
        disk::probe(&self.engine(), size).map_err(Box::new)?;
        Ok(())
    }

    fn check_turn(&self, op: &ChainOp, turn: &Turn) -> Result<Switch, ChainError> {
        let snapshots = self.layers.len() - 1;
        if let Some(name) = &turn.keep {
            if self.layers.iter().any(|l| l.name == *name) {
                return Err(ChainError::NameTaken(name.clone()));
            }
            if let Some(meta) = self.snapshot_meta(op) {
                self.check_labels(name, &meta)?;
            }
            if snapshots >= usize::from(SNAPSHOTS_MAX) {
                return Err(ChainError::TooMany(snapshots));
            }
        }
        let failed = |source| ChainError::Io { what: "a random id".into(), source };
        let layer = Id::random().map_err(failed)?;
        let old_head = self.volume.head.clone();
        let free = |name: &String| matches!(found_at(&self.path.join(name)), Ok(None));
        let new_head = heads_after(&old_head).find(free).ok_or(ChainError::TooMany(snapshots))?;
        Ok(Switch { old_head, new_head, layer })
    }

    /// Makes and syncs the files of a prepared operation: carrying it out takes no space.
    pub(super) fn make_next(&mut self, prepared: &Prepared) -> io::Result<()> {
        let (Some(switch), Some(turn)) = (&prepared.switch, Turn::of(&prepared.op, self.size())) else {
            return self.make_removed(&prepared.op);
        };
        let engine = self.engine();
        let zero = self.new_zero_map(switch.layer, turn.size)?;
        let attribute = (LAYER_ATTRIBUTE, switch.layer.to_string());
        let path = engine.join(NEXT_HEAD);
        let direct = self.direct.is_some();
        let file = self.fs.create_layer(&path, turn.size, direct, (attribute.0, &attribute.1))?;
        disk::lock_new(&file)?;
        if let Some(snapshot) = self.snapshot_meta(&prepared.op) {
            self.write_layer_meta(&snapshot, &engine.join(NEXT_SNAPSHOT))?;
        }
        self.make_intent_room(turn.size)?;
        let head = LayerMeta::head(&switch.new_head, &snapshot_file(&turn.base), &turn.created);
        self.write_layer_meta(&head, &engine.join(NEXT_HEAD_INFO))?;
        self.next = Some(NextHead { file: Arc::new(file), zero });
        self.make_next_volume(switch, &turn)?;
        self.fs.sync_directory(&engine)
    }

    /// Space for the longer intent bitmap of a larger volume: it is written when the names have changed.
    fn make_intent_room(&self, size: u64) -> io::Result<()> {
        if size <= self.size() {
            return Ok(());
        }
        let path = self.engine().join(super::intent::FILE);
        let length = super::intent::length_for(size, super::intent::chunk_of(&self.intent)?);
        room::with(&path, || match disk::allocate(&self.intent, 0, length) {
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            done => done,
        })
    }

    /// Refuses a snapshot whose labels do not fit its file, or that could not be told of any more together with all others.
    fn check_labels(&self, name: &str, meta: &LayerMeta) -> Result<(), ChainError> {
        if meta.encode().len() > META_MAX {
            return Err(ChainError::LabelsTooLong(name.to_owned()));
        }
        let mut chain = self.state().chain;
        chain.push(meta.info(name, 0, 0));
        let bytes = serde_json::to_vec(&chain).map_or(usize::MAX, |json| json.len());
        if bytes > CHAIN_MAX {
            return Err(ChainError::ChainTooLong { snapshot: name.to_owned(), bytes });
        }
        Ok(())
    }

    /// What the head's meta becomes. Longhorn leaves the head's name in it. `None`: the head is not kept.
    fn snapshot_meta(&self, op: &ChainOp) -> Option<LayerMeta> {
        let (user_created, created, labels) = match op {
            ChainOp::Snapshot { user_created, created, labels, .. } => {
                (*user_created, created, labels.clone())
            }
            ChainOp::Expand { size, created, .. } => {
                let label = (EXPANSION_LABEL.to_owned(), size.to_string());
                (false, created, BTreeMap::from([label]))
            }
            ChainOp::MarkRemoved { .. } | ChainOp::Revert { .. } => return None,
        };
        Some(LayerMeta {
            name: self.volume.head.clone(),
            parent: self.volume.parent.clone(),
            removed: false,
            user_created,
            created: created.clone(),
            labels,
        })
    }

    fn make_next_volume(&self, switch: &Switch, turn: &Turn) -> io::Result<()> {
        let volume = VolumeMeta {
            raw_size: i64::try_from(turn.size).unwrap_or(i64::MAX),
            head: switch.new_head.clone(),
            parent: snapshot_file(&turn.base),
            ..self.volume.clone()
        };
        self.write_volume(&volume, &self.engine().join(NEXT_VOLUME))
    }

    /// The volume.meta that a prepared operation brings follows the one that is in force.
    pub(super) fn remake_switch(&mut self) -> io::Result<()> {
        if let Some(Prepared { op, switch: Some(switch), .. }) = &self.chain.prepared
            && let Some(turn) = Turn::of(op, self.size())
            && self.next.is_some()
        {
            self.make_next_volume(switch, &turn)?;
            self.fs.sync_directory(&self.engine())?;
        }
        Ok(())
    }

    /// Carries a prepared operation out. For a snapshot and an expansion: one rename (an expansion also writes the intent bitmap
    /// anew), and what a start has undone of the names; nothing may be in flight on the head. For a revert nothing may be in
    /// flight at all, and everything has been flushed. The answer waits for a flush and for [`Directory::sync_commit`].
    ///
    /// # Errors
    /// [`ChainError::NotPrepared`]; [`ChainError::Io`].
    pub fn commit(&mut self, id: Instance) -> Result<Committed, ChainError> {
        if self.chain.committed == Some(id) {
            return Ok(Committed::Nothing);
        }
        let prepared =
            self.chain.prepared.clone().filter(|p| p.id == id).ok_or(ChainError::NotPrepared(id))?;
        let what = format!("carrying out {} in {}", describe(&prepared.op), self.path.display());
        let failed = |source| ChainError::Io { what, source };
        // Done by `prepare`, unless the directory was closed since.
        if let Err(source) = self.begin_use() {
            return Err(match is_full(&source) {
                true => ChainError::NoSpace(describe(&prepared.op)),
                false => failed(source),
            });
        }
        let done = match (&prepared.op, &prepared.switch, Turn::of(&prepared.op, self.size())) {
            (ChainOp::MarkRemoved { name }, ..) => self.mark_removed(name).map(|()| Committed::Nothing),
            (op, Some(switch), Some(turn)) if self.next.is_some() => self.turn(op, switch, &turn),
            _ => return Err(ChainError::NotPrepared(id)),
        };
        let done = done.map_err(failed)?;
        self.chain.prepared = None;
        self.chain.committed = Some(id);
        Ok(done)
    }

    fn turn(&mut self, op: &ChainOp, switch: &Switch, turn: &Turn) -> io::Result<Committed> {
        switch_heads(&self.fs, &self.path, switch, turn.keep.as_deref())?;
        if turn.keep.is_none() {
            return self.reverted(switch, turn).map(|parts| Committed::Chain(Box::new(parts)));
        }
        self.old_head = Some(switch.clone());
        if turn.size != self.size() {
            self.resize_intent(turn.size)?;
        }
        let head = self.switched(switch, turn, op);
        Ok(head.map_or(Committed::Nothing, |head| Committed::Head(Box::new(head))))
    }

    /// The layers in memory after the switch.
    fn switched(&mut self, switch: &Switch, turn: &Turn, op: &ChainOp) -> Option<NewHead> {
        let (next, meta, snapshot) = (self.next.take()?, self.snapshot_meta(op)?, turn.keep.clone()?);
        let file_name = snapshot_file(&snapshot);
        if let Some(former) = self.layers.last_mut() {
            former.file_name.clone_from(&file_name);
            former.name.clone_from(&snapshot);
            former.meta = meta;
        }
        self.layers.push(DirLayer {
            file_name: switch.new_head.clone(),
            name: String::new(),
            meta: LayerMeta::head(&switch.new_head, &file_name, &turn.created),
            file: Arc::clone(&next.file),
            length: turn.size,
        });
        self.volume.raw_size = i64::try_from(turn.size).unwrap_or(i64::MAX);
        self.volume.head.clone_from(&switch.new_head);
        self.volume.parent = file_name;
        Some(NewHead { snapshot, size: turn.size, file: next.file, zero: next.zero })
    }

    /// The old head goes, and the layers are read again: another branch may be in force.
    fn reverted(&mut self, switch: &Switch, turn: &Turn) -> io::Result<Parts> {
        drop_old_head(&self.fs, &self.path, switch, false)?;
        let next = self.next.take().ok_or_else(|| io::Error::other("the new head is gone"))?;
        // The same descriptors go on: they hold the locks.
        let mut locked = Locked::new();
        let layers = self.layers.iter().filter(|l| !l.name.is_empty()).map(|l| &l.file);
        for file in layers.chain([&next.file]) {
            locked.insert(file.metadata()?.ino(), Arc::clone(file));
        }
        let intent = self.resize_intent(turn.size)?;
        self.gather_anew(&locked, intent, self.rebuild.is_some())
    }

    /// The meta of a snapshot that is to be marked.
    fn make_removed(&self, op: &ChainOp) -> io::Result<()> {
        let ChainOp::MarkRemoved { name } = op else { return Ok(()) };
        let Some(layer) = self.layers.iter().find(|l| l.name == *name) else { return Ok(()) };
        let meta = LayerMeta { removed: true, ..layer.meta.clone() };
        self.write_layer_meta(&meta, &self.engine().join(NEXT_SNAPSHOT))?;
        self.fs.sync_directory(&self.engine())
    }

    fn mark_removed(&mut self, name: &str) -> io::Result<()> {
        let Some(at) = self.layers.iter().position(|l| l.name == name) else {
            return Err(io::Error::other("the snapshot is gone"));
        };
        let meta = self.path.join(meta_name(&self.layers[at].file_name));
        self.fs.rename(&self.engine().join(NEXT_SNAPSHOT), &meta)?;
        self.fs.sync_directory(&self.path)?;
        self.layers[at].meta.removed = true;
        Ok(())
    }

    /// Makes the last commit durable. The former head's data is synced by the ring thread's flush.
    ///
    /// # Errors
    /// The disk's.
    pub fn sync_commit(&mut self) -> io::Result<()> {
        match self.old_head.take() {
            // Its name is a snapshot's, too.
            Some(switch) => drop_old_head(&self.fs, &self.path, &switch, true)?,
            None => self.fs.sync_directory(&self.path)?,
        }
        self.fs.sync_directory(&self.engine())?;
        self.records().store(&self.fs, &self.chain)?;
        self.note_layers()
    }

    /// The last change of heads may be one that nobody has flushed since: what is made durable from here on would name layers that a
    /// power cut takes away.
    pub(super) fn settle_heads(&mut self) -> io::Result<()> {
        if self.old_head.is_some() { self.sync_commit() } else { Ok(()) }
    }

    /// Takes a prepared operation back. One that was never prepared is taken back already.
    ///
    /// # Errors
    /// [`ChainError::Committed`]; [`ChainError::Io`].
    pub fn abort(&mut self, id: Instance) -> Result<(), ChainError> {
        if self.chain.committed == Some(id) {
            return Err(ChainError::Committed(id));
        }
        let Some(prepared) = self.chain.prepared.clone().filter(|p| p.id == id) else { return Ok(()) };
        let what = format!("taking {} back in {}", describe(&prepared.op), self.path.display());
        let failed = |source| ChainError::Io { what, source };
        self.take_back(&prepared).map_err(failed)
    }
}

fn describe(op: &ChainOp) -> String {
    match op {
        ChainOp::Snapshot { name, .. } => format!("snapshot {name}"),
        ChainOp::MarkRemoved { name } => format!("the removal of snapshot {name}"),
        ChainOp::Revert { name, .. } => format!("the return to snapshot {name}"),
        ChainOp::Expand { size, .. } => format!("the expansion to {size} bytes"),
    }
}
