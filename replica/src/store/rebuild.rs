//! Replacing all layers by empty ones, to be filled from another replica (`docs/invariants.md`, 8).
//!
//! The record `rebuilding` is durable before the first layer goes, and says whether the layers are being replaced: a
//! directory that is opened then gets one empty head and stays marked.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use lh_block::{BLOCK, SNAPSHOTS_MAX};
use lh_wire::LayerInfo;

use super::ENGINE;
use super::directory::Directory;
use super::disk;
use super::error::{ChainError, OpenError, damaged, failed};
use super::fold;
use super::fs::Fs;
use super::id::{Id, LAYER_ATTRIBUTE, VOLUME_ATTRIBUTE};
use super::intent::Intent;
use super::known::Known;
use super::load::Parts;
use super::locks::{Locked, lock_layers};
use super::meta::{
    LayerMeta, META_MAX, VOLUME_META, VolumeMeta, heads_after, is_head, meta_name, now, snapshot_file,
    snapshot_name,
};
use super::open::Opening;
use super::record::{ChainRecord, FoldRecord, Identity, Rebuild, Records};
use super::room::is_full;
use super::switch;
use super::zero;

impl Directory {
    /// Marks the replica as unusable alone and replaces all layers by empty ones of this form (parents before children,
    /// the head, whose name is empty, last). No request may be in flight. The result goes to [`super::Store::replace`].
    ///
    /// # Errors
    /// [`ChainError::BadChain`], [`ChainError::BadSize`] and [`ChainError::Directory`] before anything is changed;
    /// [`ChainError::Io`].
    pub fn begin_rebuild(&mut self, size: u64, chain: &[LayerInfo]) -> Result<Parts, ChainError> {
        check(size, chain)?;
        disk::probe(&self.engine(), size).map_err(Box::new)?;
        let what = format!("emptying {}", self.path.display());
        self.say_rebuilding(size, &what)?;
        self.empty(size, chain).map_err(|source| ChainError::Io { what, source })
    }

    /// The first word of a replacement of layers, after which there is no going on as before. Returns the record.
    pub(super) fn say_rebuilding(&mut self, size: u64, what: &str) -> Result<Rebuild, ChainError> {
        let rebuild = Rebuild::begun(self.identity.volume, size);
        let said = self.begin_use().and_then(|()| self.forget_layers());
        let said = said.and_then(|()| self.records().store(&self.fs, &rebuild));
        said.map(|()| rebuild).map_err(|source| match is_full(&source) {
            true => ChainError::NoSpace(what.to_owned()),
            false => ChainError::Io { what: what.to_owned(), source },
        })
    }

    fn empty(&mut self, size: u64, chain: &[LayerInfo]) -> io::Result<Parts> {
        self.forget_outsiders()?;
        let replace = Replace {
            fs: &self.fs,
            path: &self.path,
            identity: self.identity,
            volume: &self.volume,
            direct: self.direct.is_some(),
        };
        let rebuild = replace.run(size, chain)?;
        self.rebuild = Some(rebuild);
        self.identity.imported = false;
        self.chain = none(self.identity.volume);
        self.next = None;
        self.fold = None;
        self.zero_marked = false;
        self.clean = false;
        let intent = self.resize_intent(size)?;
        let locked = lock_layers(&self.path, true, Instant::now()).map_err(io::Error::other)?;
        let parts = self.gather_anew(&locked, intent, true)?;
        self.note_layers()?;
        Ok(parts)
    }

    /// The intent bitmap keeps its marks and chunks.
    pub(super) fn resize_intent(&self, size: u64) -> io::Result<Intent> {
        let id = self.identity.volume;
        let file = || Arc::clone(&self.intent);
        let mut intent = Intent::load(id, file(), self.size())?
            .unwrap_or_else(|| Intent::new(id, file(), size, lh_wire::intent_chunk(size), true));
        intent.resize(size);
        self.intent.write_all_at(&intent.image(), 0)?;
        self.intent.sync_data()?;
        Ok(intent)
    }

    /// Takes the mark of a rebuild back, and lets the epoch count that was stored while it stood: both or neither, whatever becomes
    /// of the process. The ring thread has flushed everything before.
    ///
    /// # Errors
    /// The disk's.
    pub fn end_rebuild(&mut self) -> io::Result<()> {
        if let Some(next) = self.rebuild.as_ref().and_then(|r| r.next.clone()) {
            let ended = self.rebuild.clone().map(|rebuild| Rebuild { ended: true, ..rebuild });
            ended.map_or(Ok(()), |ended| self.records().store(&self.fs, &ended))?;
            self.record_epoch(next)?;
        }
        let marked = self.zero_marked;
        self.save_volume(|volume| volume.rebuilding = marked)?;
        self.records().remove::<Rebuild>(&self.fs)?;
        self.rebuild = None;
        Ok(())
    }
}

pub(super) const fn none(volume: Id) -> ChainRecord {
    ChainRecord { volume, prepared: None, committed: None, settled: None }
}

/// A change of all layers.
struct Replace<'a> {
    fs: &'a Fs,
    path: &'a Path,
    identity: Identity,
    /// As it was before.
    volume: &'a VolumeMeta,
    direct: bool,
}

impl Replace<'_> {
    /// From the first mark to the last sync.
    fn run(&self, size: u64, chain: &[LayerInfo]) -> io::Result<Rebuild> {
        let volume = self.identity.volume;
        let records = Records { directory: self.path };
        let mut rebuild = Rebuild::begun(volume, size);
        records.store(self.fs, &rebuild)?;
        records.remove::<Known>(self.fs)?;
        if !self.volume.rebuilding {
            self.write_volume(&VolumeMeta { rebuilding: true, ..self.volume.clone() })?;
        }
        records.store(self.fs, &none(volume))?;
        if self.identity.imported {
            records.store(self.fs, &Identity { imported: false, ..self.identity })?;
        }
        records.remove::<FoldRecord>(self.fs)?;
        self.remove_layers()?;
        self.make_layers(size, chain)?;
        rebuild.emptying = false;
        records.store(self.fs, &rebuild)?;
        Ok(rebuild)
    }

    fn write_volume(&self, volume: &VolumeMeta) -> io::Result<()> {
        let new = self.path.join(ENGINE).join("new-volume");
        let id = self.identity.volume.to_string();
        self.fs.write(&new, &volume.encode(), Some((VOLUME_ATTRIBUTE, &id)))?;
        self.fs.rename(&new, &self.path.join(VOLUME_META))?;
        self.fs.sync_directory(self.path)
    }

    /// Removes every layer, its meta and checksum, and all zero maps.
    fn remove_layers(&self) -> io::Result<()> {
        switch::remove_next(self.fs, self.path, None)?;
        fold::remove_left(self.fs, self.path)?;
        for entry in std::fs::read_dir(self.path.join(ENGINE))? {
            let entry = entry?;
            if entry.file_name().to_str().and_then(zero::parse_name).is_some() {
                self.fs.remove(&entry.path())?;
            }
        }
        for entry in std::fs::read_dir(self.path)? {
            let Ok(name) = entry?.file_name().into_string() else { continue };
            let image =
                name.strip_suffix(".meta").or_else(|| name.strip_suffix(".checksum")).unwrap_or(&name);
            if is_head(image) || snapshot_name(image).is_some() {
                self.fs.remove(&self.path.join(&name))?;
            }
        }
        self.fs.sync_directory(self.path)
    }

    fn make_layers(&self, size: u64, chain: &[LayerInfo]) -> io::Result<()> {
        let head = heads_after(&self.volume.head).next().unwrap_or_default();
        let engine = self.path.join(ENGINE);
        let mut parent = String::new();
        for layer in chain {
            let is_head = layer.name.is_empty();
            let file_name = if is_head { head.clone() } else { snapshot_file(&layer.name) };
            let meta = meta_of(layer, &file_name);
            parent.clone_from(&meta.parent);
            let id = Id::random()?;
            self.fs.write(&engine.join(zero::file_name(id)), &zero::header(id), None)?;
            let path = self.path.join(&file_name);
            let length = if is_head { size } else { layer.length };
            self.fs.create_layer(&path, length, self.direct, (LAYER_ATTRIBUTE, &id.to_string()))?;
            self.fs.write(&self.path.join(meta_name(&file_name)), &meta.encode(), None)?;
        }
        self.fs.sync_directory(&engine)?;
        self.write_volume(&VolumeMeta {
            dirty: true,
            rebuilding: true,
            backing_file: self.volume.backing_file.clone(),
            encrypted: self.volume.encrypted,
            ..VolumeMeta::new(size, head, parent)
        })
    }
}

impl Opening {
    /// For a directory whose layers were being replaced: it gets one empty head and stays marked.
    pub(super) fn restart_rebuild(&self, identity: Identity, rebuild: Rebuild) -> Result<Locked, OpenError> {
        let volume = self.path.join(VOLUME_META);
        let bytes = disk::read_small(&volume, META_MAX).map_err(failed("reading", &volume))?;
        let volume = VolumeMeta::parse(&bytes).map_err(|damage| damaged(&self.path, damage))?;
        let direct = disk::probe(&self.path.join(ENGINE), rebuild.size)?;
        let head = LayerInfo { created: now(), ..LayerInfo::default() };
        Replace { fs: &self.fs, path: &self.path, identity, volume: &volume, direct }
            .run(rebuild.size, &[head])
            .map_err(failed("emptying", &self.path))?;
        lock_layers(&self.path, true, self.deadline)
    }
}

/// The meta of a layer that is made anew.
pub(super) fn meta_of(layer: &LayerInfo, file_name: &str) -> LayerMeta {
    LayerMeta {
        name: file_name.to_owned(),
        parent: if layer.parent.is_empty() { String::new() } else { snapshot_file(&layer.parent) },
        removed: layer.removed,
        user_created: layer.user_created,
        created: layer.created.clone(),
        labels: layer.labels.clone(),
    }
}

pub(super) fn check(size: u64, chain: &[LayerInfo]) -> Result<(), ChainError> {
    if size == 0 || !size.is_multiple_of(BLOCK) || i64::try_from(size).is_err() {
        return Err(ChainError::BadSize(size));
    }
    let Some((head, snapshots)) = chain.split_last() else { return Err(ChainError::BadChain("it is empty")) };
    if !head.name.is_empty() {
        return Err(ChainError::BadChain("its last layer is not the head"));
    }
    if snapshots.len() > usize::from(SNAPSHOTS_MAX) {
        return Err(ChainError::BadChain("it has more snapshots than Longhorn can open"));
    }
    for (at, layer) in chain.iter().enumerate() {
        let known = |name: &str| chain[..at].iter().any(|l| l.name == name);
        let named = at == snapshots.len() || snapshot_name(&snapshot_file(&layer.name)) == Some(&layer.name);
        if !named {
            return Err(ChainError::BadChain("a snapshot's name cannot be a file's name"));
        }
        if known(&layer.name) {
            return Err(ChainError::BadChain("two snapshots have one name"));
        }
        if !layer.parent.is_empty() && !known(&layer.parent) {
            return Err(ChainError::BadChain("a layer comes before its parent"));
        }
        if meta_of(layer, &layer.name).encode().len() > META_MAX {
            return Err(ChainError::LabelsTooLong(layer.name.clone()));
        }
        if layer.length % BLOCK != 0 || layer.length > size {
            return Err(ChainError::BadChain("a layer's length does not fit the volume"));
        }
    }
    Ok(())
}
