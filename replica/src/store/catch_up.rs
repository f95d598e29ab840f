//! Taking over another replica's chain while keeping what the layers hold (`docs/invariants.md`, 8).
//!
//! The record `rebuilding` says `emptying` while files are renamed, made and removed: a crash in between costs what the
//! layers held, and the directory is filled from nothing. Afterwards it says what of the layers is known.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use lh_wire::{Keep, Kept, LayerInfo};

use super::ENGINE;
use super::checksum::LayerChecksums;
use super::directory::Directory;
use super::disk;
use super::error::ChainError;
use super::fold;
use super::id::{Id, LAYER_ATTRIBUTE};
use super::load::Parts;
use super::locks::Locked;
use super::meta::{VOLUME_META, VolumeMeta, heads_after, meta_name, snapshot_file};
use super::rebuild::{check, meta_of, none};
use super::record::{ChainRecord, FoldRecord, Rebuild};
use super::switch;
use super::zero;

/// A layer of the new chain.
struct Place<'a> {
    info: &'a LayerInfo,
    file_name: String,
    length: u64,
    /// The file that stays, and the name that it has now.
    kept: Option<(Arc<File>, String)>,
    /// What stays is a snapshot of the same name that was taken at another time.
    is_another: bool,
}

impl Directory {
    /// Marks the replica as unusable alone and gives its chain this form (parents before children, the head, whose name
    /// is empty, last). Layers of the same name keep what they hold, the head becomes the layer that `keep` says, all
    /// others go, and what is missing is made empty. No request may be in flight, and all was flushed before. The result
    /// goes to [`super::Store::replace`].
    ///
    /// # Errors
    /// [`ChainError::BadChain`], [`ChainError::BadSize`] and [`ChainError::Directory`] before anything is changed;
    /// [`ChainError::Io`].
    pub fn begin_catch_up(
        &mut self,
        size: u64,
        chain: &[LayerInfo],
        keep: &Keep,
    ) -> Result<Parts, ChainError> {
        check(size, chain)?;
        if size < self.size() {
            return Err(ChainError::BadSize(size));
        }
        let moved = !keep.head.is_empty();
        if moved
            && (self.layers.iter().any(|l| l.name == keep.head) || !chain.iter().any(|l| l.name == keep.head))
        {
            return Err(ChainError::BadChain("its head cannot become the layer that it is told to"));
        }
        disk::probe(&self.engine(), size).map_err(Box::new)?;
        let what = format!("taking over a chain in {}", self.path.display());
        let rebuild = self.say_rebuilding(size, &what)?;
        self.take_over(rebuild, chain, keep).map_err(|source| ChainError::Io { what, source })
    }

    fn take_over(&mut self, mut rebuild: Rebuild, chain: &[LayerInfo], keep: &Keep) -> io::Result<Parts> {
        let (volume, size) = (self.identity.volume, rebuild.size);
        // What is known of the layers is known only of those of this epoch.
        let based = self.epoch.is_some() && self.rebuild.as_ref().is_none_or(|r| r.kept.is_some());
        self.save_volume(|volume| volume.rebuilding = true)?;
        self.forget_outsiders()?;
        self.next = None;
        if let Some(prepared) = &self.chain.prepared {
            self.undo_names(prepared)?;
        }
        switch::remove_next(&self.fs, &self.path, None)?;
        self.records().remove::<FoldRecord>(&self.fs)?;
        fold::remove_left(&self.fs, &self.path)?;
        self.fold = None;
        // A layer that may hold anything may have nothing but the name of the settled one, and stand over what is not settled.
        let is_there =
            |s: &&str| chain.iter().any(|l| l.name == *s) && keep.unsure.iter().all(|unsure| unsure != s);
        let settled = self.settled().filter(is_there).map(str::to_owned);
        self.save_chain(ChainRecord { settled, ..none(volume) })?;
        let places = self.places(size, chain, keep);
        self.remove_others(&places)?;
        let head = self.arrange(&places)?;
        let parent = places.last().map(|p| meta_of(p.info, &p.file_name).parent).unwrap_or_default();
        let raw_size = i64::try_from(size).unwrap_or(i64::MAX);
        let meta =
            VolumeMeta { raw_size, head, parent, dirty: true, rebuilding: true, ..self.volume.clone() };
        self.write_volume(&meta, &self.path.join(VOLUME_META))?;
        self.fs.sync_directory(&self.path)?;
        rebuild.emptying = false;
        rebuild.kept = based.then(|| Kept { unsure: keep.unsure.clone() });
        self.records().store(&self.fs, &rebuild)?;
        self.rebuild = Some(rebuild);
        self.clean = false;
        self.reload(size, &places)
    }

    fn places<'a>(&self, size: u64, chain: &'a [LayerInfo], keep: &Keep) -> Vec<Place<'a>> {
        let next_head = heads_after(&self.volume.head).next().unwrap_or_default();
        let place = |info: &'a LayerInfo| {
            let is_head = info.name.is_empty();
            let from = if info.name == keep.head {
                Some("")
            } else if is_head {
                None
            } else {
                Some(&*info.name)
            };
            let kept = from.and_then(|name| self.layers.iter().rfind(|l| l.name == name));
            let is_another = kept.is_some_and(|l| !l.name.is_empty() && l.meta.created != info.created);
            let kept = kept.map(|l| (Arc::clone(&l.file), l.file_name.clone()));
            let file_name = match (&kept, is_head) {
                (Some((_, name)), true) => name.clone(),
                (None, true) => next_head.clone(),
                (_, false) => snapshot_file(&info.name),
            };
            let length = if is_head { size } else { info.length };
            Place { info, file_name, length, kept, is_another }
        };
        chain.iter().map(place).collect()
    }

    /// Removes the layers that do not stay, with their zero maps.
    fn remove_others(&self, places: &[Place<'_>]) -> io::Result<()> {
        for layer in &self.layers {
            if places.iter().any(|p| p.kept.as_ref().is_some_and(|(_, name)| *name == layer.file_name)) {
                continue;
            }
            if let Some(id) = disk::id(&layer.file, LAYER_ATTRIBUTE)? {
                self.fs.remove(&self.path.join(ENGINE).join(zero::file_name(id)))?;
            }
            for name in [
                meta_name(&layer.file_name),
                format!("{}.checksum", layer.file_name),
                layer.file_name.clone(),
            ] {
                self.fs.remove(&self.path.join(name))?;
            }
        }
        Ok(())
    }

    /// Renames what stays, makes what is missing, writes every meta. Returns the head's file name.
    fn arrange(&self, places: &[Place<'_>]) -> io::Result<String> {
        for place in places {
            let path = self.path.join(&place.file_name);
            match &place.kept {
                Some((file, name)) => {
                    if place.is_another
                        && let Some(mut sums) = LayerChecksums::open(&self.path, file)
                    {
                        // Of it nothing is sound in the new one's place.
                        sums.give_up()?;
                    }
                    if *name != place.file_name {
                        self.fs.rename(&self.path.join(name), &path)?;
                        self.fs.remove(&self.path.join(meta_name(name)))?;
                    }
                    if file.metadata()?.len() < place.length {
                        self.fs.set_length(file, &path, place.length)?;
                        self.fs.sync_file(file, &path)?;
                    }
                }
                None => {
                    let id = Id::random()?;
                    self.fs.write(&self.engine().join(zero::file_name(id)), &zero::header(id), None)?;
                    let attribute = (LAYER_ATTRIBUTE, id.to_string());
                    let direct = self.direct.is_some();
                    self.fs.create_layer(&path, place.length, direct, (attribute.0, &attribute.1))?;
                }
            }
            let meta = meta_of(place.info, &place.file_name);
            self.write_layer_meta(&meta, &self.path.join(meta_name(&place.file_name)))?;
        }
        self.fs.sync_directory(&self.engine())?;
        Ok(places.last().map(|p| p.file_name.clone()).unwrap_or_default())
    }

    /// Both halves anew. The files that stay keep their locks.
    fn reload(&mut self, size: u64, places: &[Place<'_>]) -> io::Result<Parts> {
        let intent = self.resize_intent(size)?;
        let mut locked = Locked::new();
        for place in places {
            let file = match &place.kept {
                Some((file, _)) => Arc::clone(file),
                None => {
                    let path = self.path.join(&place.file_name);
                    let file = disk::open_layer(&path, true, self.direct.is_some())?;
                    disk::lock_new(&file)?;
                    Arc::new(file)
                }
            };
            locked.insert(file.metadata()?.ino(), file);
        }
        let parts = self.gather_anew(&locked, intent, true)?;
        self.note_layers()?;
        Ok(parts)
    }
}
