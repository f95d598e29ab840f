//! Opening a directory for writing: locks first, then what a crash interrupted, then the layers.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::data::Store;
use super::directory::{Directory, OpenOptions};
use super::disk;
use super::error::{Damage, OpenError, damaged, failed};
use super::fs::Fs;
use super::gather::{Files, Gather};
use super::known::Known;
use super::locks::{Locked, lock_directory, lock_layers, lock_moved};
use super::meta::{VOLUME_META, VolumeMeta, meta_name};
use super::owner::{Owner, owner};
use super::record::{
    ChainRecord, Closed, Creating, EpochRecord, Fence, Identity, Power, Rebuild, Records, Whole,
};
use super::switch;
use super::tree::{self, Tree};

impl Directory {
    /// Opens a directory for writing: waits for its locks, finishes what a crash interrupted, takes an import over.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(path: &Path, options: &OpenOptions) -> Result<(Self, Store), OpenError> {
        open(path, options, Fs::default())
    }
}

/// See [`Directory::open`].
pub(super) fn open(path: &Path, options: &OpenOptions, fs: Fs) -> Result<(Directory, Store), OpenError> {
    let deadline = Instant::now() + options.lock_wait;
    let lock = lock_directory(path, true, deadline)?;
    let records = Records { directory: path };
    if records.load::<Creating>()?.is_some() {
        return Err(damaged(path, Damage::Unfinished));
    }
    let locked = lock_layers(path, true, deadline)?;
    let opening = Opening { path: path.to_owned(), fs, lock, deadline };
    match owner(&records)? {
        Owner::Ours { identity, clean } => opening.ours(locked, identity, clean),
        Owner::Other => opening.import(locked),
    }
}

/// A directory that is being opened.
pub(super) struct Opening {
    pub(super) path: PathBuf,
    pub(super) fs: Fs,
    pub(super) lock: File,
    pub(super) deadline: Instant,
}

impl Opening {
    pub(super) fn records(&self) -> Records<'_> {
        Records { directory: &self.path }
    }

    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> OpenError {
        failed(what, &self.path)
    }

    fn ours(self, locked: Locked, identity: Identity, clean: bool) -> Result<(Directory, Store), OpenError> {
        let id = identity.volume;
        let rebuild = self.records().load::<Rebuild>()?.filter(|r| r.volume == id);
        if let Some(rebuild) = rebuild.filter(|r| r.emptying) {
            drop(locked);
            let locked = self.restart_rebuild(identity, rebuild)?;
            return self.ours(locked, Identity { imported: false, ..identity }, false);
        }
        let none = ChainRecord { volume: id, prepared: None, committed: None, settled: None };
        let chain = self.records().load::<ChainRecord>()?.filter(|c| c.volume == id).unwrap_or(none);
        // What is tidied away below may be another name of a layer, and its going changes what the clean close has recorded of the
        // file. The record goes first: who looks at it next would take the change for somebody else's.
        let left = super::fold::is_left(&self.path).map_err(self.failed("recovering"))?;
        if clean && (chain.prepared.is_some() || left) {
            self.records().remove::<Closed>(&self.fs).map_err(failed("recovering", &self.path))?;
        }
        let found = self.recover(&chain)?;
        let fold = super::fold::recover(&self.fs, &self.path, id)?;
        let locked = lock_moved(&self.path, locked, self.deadline)?;
        let tree = tree::load(&self.path)?;
        let files = Files { tree: &tree, locked: &locked };
        Known::check(&self.path, id, &tree, |layer| files.file(&self.path, layer))?;
        self.remove_leftovers(&tree)?;
        let (mut directory, store) = self.assemble(&files, identity, chain, clean)?;
        directory.fold = fold;
        let finish = match found {
            Some(switch::Found::Committed(record)) => directory.save_chain(record),
            Some(switch::Found::Prepared(prepared)) => directory.make_next(&prepared),
            None => Ok(()),
        };
        finish.map_err(failed("recovering", &directory.path))?;
        Ok((directory, store))
    }

    fn recover(&self, chain: &ChainRecord) -> Result<Option<switch::Found>, OpenError> {
        let bytes = disk::read_small(&self.path.join(VOLUME_META), super::meta::META_MAX)
            .map_err(failed("reading volume.meta in", &self.path))?;
        let volume = VolumeMeta::parse(&bytes).map_err(|damage| damaged(&self.path, damage))?;
        switch::recover(&self.fs, &self.path, chain, &volume).map_err(self.failed("recovering"))
    }

    /// What Longhorn left of an interrupted snapshot. Metas go first: a file without one is known for what it is.
    pub(super) fn remove_leftovers(&self, tree: &Tree) -> Result<(), OpenError> {
        for name in &tree.leftovers {
            let remove = |name: &str| self.fs.remove(&self.path.join(name));
            remove(&meta_name(name)).and_then(|()| remove(name)).map_err(self.failed("tidying"))?;
        }
        if !tree.leftovers.is_empty() {
            self.fs.sync_directory(&self.path).map_err(self.failed("syncing"))?;
        }
        Ok(())
    }

    /// Both halves from what is in the files.
    pub(super) fn assemble(
        self,
        files: &Files<'_>,
        identity: Identity,
        chain: ChainRecord,
        clean: bool,
    ) -> Result<(Directory, Store), OpenError> {
        let id = identity.volume;
        let fence = self.records().load::<Fence>()?;
        let epoch = self.records().load::<EpochRecord>()?.filter(|e| e.volume == id);
        let rebuild = self.records().load::<Rebuild>()?.filter(|r| r.volume == id);
        let whole = self.records().load::<Whole>()?.filter(|w| w.volume == id);
        let power = self.records().load::<Power>()?.filter(|p| p.volume == id);
        let known = self.records().load::<Known>()?.filter(|k| k.is_of(id));
        let gather = Gather { path: &self.path, fs: &self.fs, deadline: self.deadline, id, clean };
        let intent = gather.intent(files.tree.volume.size())?;
        let (layers, parts) = gather.all(files, intent, rebuild.as_ref().is_some_and(|r| !r.ended))?;
        let mut directory = Directory {
            identity,
            volume: files.tree.volume.clone(),
            layers,
            fence,
            epoch,
            chain,
            rebuild,
            next: None,
            fold: None,
            old_head: None,
            zero_marked: parts.marked,
            clean,
            whole,
            power,
            known,
            in_use: false,
            direct: parts.direct,
            intent: Arc::clone(parts.intent.file()),
            path: self.path,
            _lock: self.lock,
            fs: self.fs,
        };
        if parts.marked {
            let path = directory.path.clone();
            directory.mark_zeroes().map_err(failed("marking", &path))?;
        }
        if directory.rebuild.as_ref().is_some_and(|r| r.ended) {
            let path = directory.path.clone();
            directory.end_rebuild().map_err(failed("ending a rebuild in", &path))?;
        }
        let path = directory.path.clone();
        directory.check_missed().map_err(failed("looking for what others missed in", &path))?;
        directory.note_layers().map_err(failed("noting the layers of", &path))?;
        Ok((directory, Store::new(parts)))
    }
}
