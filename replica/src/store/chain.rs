//! Chain operations: prepared durably, then carried out or taken back (`docs/invariants.md`, 9).
//!
//! A snapshot's files are all made and synced by `prepare`, under names in `engine/`; the record `chain` says so. `commit`
//! only links and renames, each step idempotent, volume.meta last but for the removal of the old head's names:
//!
//! ```text
//! link    volume-head-OLD.img            -> volume-snap-NAME.img
//! rename  engine/next-snapshot           -> volume-snap-NAME.img.meta
//! rename  engine/next-head               -> volume-head-NEW.img
//! rename  engine/next-head-info          -> volume-head-NEW.img.meta
//! rename  engine/next-volume             -> volume.meta               (the switch)
//! remove  volume-head-OLD.img.meta, volume-head-OLD.img
//! ```
//!
//! A directory that is opened with a prepared snapshot has either switched, and the rest is done, or it has not, and what
//! was begun is undone: then it is prepared as before.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use lh_block::{Instance, check_name};
use lh_wire::ChainOp;

use super::directory::{DirLayer, Directory, NewHead};
use super::disk;
use super::error::ChainError;
use super::fs::Fs;
use super::meta::{
    LayerMeta, META_MAX, SNAPSHOTS_MAX, VOLUME_META, VolumeMeta, heads_after, meta_name, snapshot_file,
};
use super::record::{ChainRecord, ENGINE, Id, LAYER_ATTRIBUTE, Prepared, Switch};
use super::zero::{self, ZeroMap};

const NEXT_SNAPSHOT: &str = "next-snapshot";
const NEXT_HEAD: &str = "next-head";
const NEXT_HEAD_INFO: &str = "next-head-info";
const NEXT_VOLUME: &str = "next-volume";

/// The head of a prepared snapshot, open.
#[derive(Debug)]
pub(super) struct NextHead {
    file: Arc<File>,
    zero: ZeroMap,
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
        let record = ChainRecord { prepared: Some(prepared.clone()), ..self.chain.clone() };
        // A link changes the layer's inode: that is use.
        let made = self.begin_use().and_then(|()| self.make_next(&prepared));
        let made = made.and_then(|()| self.records().store(&self.fs, &record));
        if let Err(source) = made {
            self.next = None;
            let what = format!("preparing {} in {}", describe(op), self.path.display());
            let undone = remove_next(&self.fs, &self.path, Some(&prepared));
            return Err(match undone {
                Ok(()) if source.kind() == io::ErrorKind::StorageFull => ChainError::NoSpace(describe(op)),
                _ => ChainError::Io { what, source },
            });
        }
        self.chain = record;
        Ok(())
    }

    fn check(&self, id: Instance, op: &ChainOp) -> Result<Prepared, ChainError> {
        let (switch, was_removed) = match op {
            ChainOp::Snapshot { name, .. } => {
                check_name("snapshot", name)?;
                if self.layers.iter().any(|l| l.name == *name) {
                    return Err(ChainError::NameTaken(name.clone()));
                }
                if self.snapshot_meta(op).is_some_and(|meta| meta.encode().len() > META_MAX) {
                    return Err(ChainError::LabelsTooLong(name.clone()));
                }
                let snapshots = self.layers.len() - 1;
                if snapshots >= SNAPSHOTS_MAX {
                    return Err(ChainError::TooMany(snapshots));
                }
                let failed = |source| ChainError::Io { what: "reading /dev/urandom".into(), source };
                let layer = Id::random().map_err(failed)?;
                let old_head = self.volume.head.clone();
                let free = |name: &String| self.path.join(name).symlink_metadata().is_err();
                let new_head = heads_after(&old_head).find(free).ok_or(ChainError::TooMany(snapshots))?;
                (Some(Switch { old_head, new_head, layer }), false)
            }
            ChainOp::MarkRemoved { name } => {
                let layer = self.layers.iter().find(|l| l.name == *name && !name.is_empty());
                let layer = layer.ok_or_else(|| ChainError::NoSnapshot(name.clone()))?;
                (None, layer.meta.removed)
            }
            ChainOp::Revert { .. } | ChainOp::Expand { .. } => return Err(ChainError::NotPrepared(id)),
        };
        Ok(Prepared { id, op: op.clone(), switch, was_removed })
    }

    /// Makes and syncs the files of a prepared snapshot.
    pub(super) fn make_next(&mut self, prepared: &Prepared) -> io::Result<()> {
        let (Some(switch), ChainOp::Snapshot { name, created, .. }, Some(snapshot)) =
            (&prepared.switch, &prepared.op, self.snapshot_meta(&prepared.op))
        else {
            return Ok(());
        };
        let engine = self.engine();
        let zero = self.new_zero_map(switch.layer, self.size())?;
        let attribute = (LAYER_ATTRIBUTE, switch.layer.to_string());
        let path = engine.join(NEXT_HEAD);
        let direct = self.direct.is_some();
        let file = self.fs.create_layer(&path, self.size(), direct, (attribute.0, &attribute.1))?;
        disk::lock_new(&file)?;
        self.write_layer_meta(&snapshot, &engine.join(NEXT_SNAPSHOT))?;
        let head = LayerMeta::head(&switch.new_head, &snapshot_file(name), created);
        self.write_layer_meta(&head, &engine.join(NEXT_HEAD_INFO))?;
        self.next = Some(NextHead { file: Arc::new(file), zero });
        self.make_next_volume(switch, name)?;
        self.fs.sync_directory(&engine)
    }

    /// What the head's meta becomes. Longhorn leaves the head's name in it.
    fn snapshot_meta(&self, op: &ChainOp) -> Option<LayerMeta> {
        let ChainOp::Snapshot { user_created, created, labels, .. } = op else { return None };
        Some(LayerMeta {
            name: self.volume.head.clone(),
            parent: self.volume.parent.clone(),
            removed: false,
            user_created: *user_created,
            created: created.clone(),
            labels: labels.clone(),
        })
    }

    fn make_next_volume(&self, switch: &Switch, snapshot: &str) -> io::Result<()> {
        let volume = VolumeMeta {
            head: switch.new_head.clone(),
            parent: snapshot_file(snapshot),
            ..self.volume.clone()
        };
        self.write_volume(&volume, &self.engine().join(NEXT_VOLUME))
    }

    /// The volume.meta that a prepared snapshot brings follows the one that is in force.
    pub(super) fn remake_switch(&mut self) -> io::Result<()> {
        if let Some(Prepared { op: ChainOp::Snapshot { name, .. }, switch: Some(switch), .. }) =
            &self.chain.prepared
            && self.next.is_some()
        {
            self.make_next_volume(switch, name)?;
            self.fs.sync_directory(&self.engine())?;
        }
        Ok(())
    }

    /// Carries a prepared operation out. For a snapshot: links and renames only; nothing may be in flight on the head.
    /// The answer waits for a flush and for [`Directory::sync_commit`]. `None`: no new head (done before, or another
    /// kind of operation).
    ///
    /// # Errors
    /// [`ChainError::NotPrepared`]; [`ChainError::Io`].
    pub fn commit(&mut self, id: Instance) -> Result<Option<NewHead>, ChainError> {
        if self.chain.committed == Some(id) {
            return Ok(None);
        }
        let prepared =
            self.chain.prepared.clone().filter(|p| p.id == id).ok_or(ChainError::NotPrepared(id))?;
        let what = format!("carrying out {} in {}", describe(&prepared.op), self.path.display());
        let failed = |source| ChainError::Io { what, source };
        // Done by `prepare`, unless the directory was closed since.
        if let Err(source) = self.begin_use() {
            return Err(failed(source));
        }
        let new = match (&prepared.op, &prepared.switch) {
            (ChainOp::Snapshot { name, .. }, Some(switch)) if self.next.is_some() => {
                switch_heads(&self.fs, &self.path, switch, name).map_err(failed)?;
                self.switched(switch, &prepared.op)
            }
            (ChainOp::MarkRemoved { name }, _) => {
                self.mark_removed(name).map_err(failed)?;
                None
            }
            _ => return Err(ChainError::NotPrepared(id)),
        };
        self.chain.prepared = None;
        self.chain.committed = Some(id);
        Ok(new)
    }

    /// The layers in memory after the switch.
    fn switched(&mut self, switch: &Switch, op: &ChainOp) -> Option<NewHead> {
        let ChainOp::Snapshot { name, created, .. } = op else { return None };
        let (next, meta) = (self.next.take()?, self.snapshot_meta(op)?);
        let file_name = snapshot_file(name);
        if let Some(former) = self.layers.last_mut() {
            former.file_name.clone_from(&file_name);
            former.name.clone_from(name);
            former.meta = meta;
        }
        self.layers.push(DirLayer {
            file_name: switch.new_head.clone(),
            name: String::new(),
            meta: LayerMeta::head(&switch.new_head, &file_name, created),
            file: Arc::clone(&next.file),
            length: self.size(),
        });
        self.volume.head.clone_from(&switch.new_head);
        self.volume.parent = file_name;
        Some(NewHead { snapshot: name.clone(), file: next.file, zero: next.zero })
    }

    fn mark_removed(&mut self, name: &str) -> io::Result<()> {
        let Some(at) = self.layers.iter().position(|l| l.name == name) else {
            return Err(io::Error::other("the snapshot is gone"));
        };
        let meta = LayerMeta { removed: true, ..self.layers[at].meta.clone() };
        self.write_layer_meta(&meta, &self.path.join(meta_name(&self.layers[at].file_name)))?;
        self.fs.sync_directory(&self.path)?;
        self.layers[at].meta = meta;
        Ok(())
    }

    /// Makes the last commit durable. The former head's data is synced by the ring thread's flush.
    ///
    /// # Errors
    /// The disk's.
    pub fn sync_commit(&mut self) -> io::Result<()> {
        self.fs.sync_directory(&self.path)?;
        self.fs.sync_directory(&self.engine())?;
        self.records().store(&self.fs, &self.chain)
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
        self.next = None;
        self.save_chain(ChainRecord { prepared: None, ..self.chain.clone() })
            .and_then(|()| remove_next(&self.fs, &self.path, Some(&prepared)))
            .map_err(failed)
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

/// Removes what a prepared snapshot made.
pub(super) fn remove_next(fs: &Fs, directory: &Path, prepared: Option<&Prepared>) -> io::Result<()> {
    let engine = directory.join(ENGINE);
    for name in [NEXT_VOLUME, NEXT_HEAD_INFO, NEXT_SNAPSHOT, NEXT_HEAD] {
        fs.remove(&engine.join(name))?;
    }
    if let Some(switch) = prepared.and_then(|p| p.switch.as_ref()) {
        fs.remove(&engine.join(zero::file_name(switch.layer)))?;
    }
    fs.sync_directory(&engine)
}

/// The steps of a commit. What is done already is passed over.
fn switch_heads(fs: &Fs, directory: &Path, switch: &Switch, snapshot: &str) -> io::Result<()> {
    let engine = directory.join(ENGINE);
    let at = |name: &str| directory.join(name);
    let there = |path: &Path| path.symlink_metadata().is_ok();
    let snapshot = snapshot_file(snapshot);
    if !there(&at(&snapshot)) {
        fs.link(&at(&switch.old_head), &at(&snapshot))?;
    }
    let moves = [
        (NEXT_SNAPSHOT, meta_name(&snapshot)),
        (NEXT_HEAD, switch.new_head.clone()),
        (NEXT_HEAD_INFO, meta_name(&switch.new_head)),
        (NEXT_VOLUME, VOLUME_META.to_owned()),
    ];
    for (from, to) in moves {
        if there(&engine.join(from)) {
            fs.rename(&engine.join(from), &at(&to))?;
        }
    }
    fs.remove(&at(&meta_name(&switch.old_head)))?;
    fs.remove(&at(&switch.old_head))
}

/// What was found of a prepared operation when the directory was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It was carried out: now it is wholly.
    Committed(ChainRecord),
    /// It was not: it is prepared as before, once its files are made anew.
    Prepared(Prepared),
}

/// Finishes or undoes what a crash interrupted, before the layers are read. `volume` is volume.meta.
pub(super) fn recover(
    fs: &Fs,
    directory: &Path,
    record: &ChainRecord,
    volume: &VolumeMeta,
) -> io::Result<Option<Found>> {
    let Some(prepared) = &record.prepared else {
        // A crash may have left the files of an operation that was taken back.
        remove_next(fs, directory, None)?;
        return Ok(None);
    };
    let committed = || ChainRecord { prepared: None, committed: Some(prepared.id), ..record.clone() };
    match (&prepared.op, &prepared.switch) {
        (ChainOp::Snapshot { name, .. }, Some(switch)) if volume.head == switch.new_head => {
            switch_heads(fs, directory, switch, name)?;
            fs.sync_directory(directory)?;
            Ok(Some(Found::Committed(committed())))
        }
        (ChainOp::Snapshot { name, .. }, Some(switch)) => {
            undo(fs, directory, switch, name)?;
            Ok(Some(Found::Prepared(prepared.clone())))
        }
        (ChainOp::MarkRemoved { name }, _) => {
            let file = snapshot_file(name);
            let bytes = disk::read_small(&directory.join(meta_name(&file)), META_MAX)?;
            let removed = LayerMeta::parse(&file, &bytes).is_ok_and(|meta| meta.removed);
            let done = removed && !prepared.was_removed;
            Ok(Some(if done { Found::Committed(committed()) } else { Found::Prepared(prepared.clone()) }))
        }
        _ => Ok(None),
    }
}

/// Takes back the steps before the switch. The new head was never written; the snapshot's name is the old head's file.
fn undo(fs: &Fs, directory: &Path, switch: &Switch, snapshot: &str) -> io::Result<()> {
    let at = |name: &str| directory.join(name);
    let snapshot = snapshot_file(snapshot);
    let head = at(&switch.old_head).symlink_metadata()?.ino();
    fs.remove(&at(&meta_name(&switch.new_head)))?;
    fs.remove(&at(&switch.new_head))?;
    if at(&snapshot).symlink_metadata().is_ok_and(|link| link.ino() == head) {
        fs.remove(&at(&meta_name(&snapshot)))?;
        fs.remove(&at(&snapshot))?;
    }
    fs.sync_directory(directory)
}
