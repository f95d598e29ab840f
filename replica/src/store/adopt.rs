//! Taking over a directory that another program wrote.
//!
//! Longhorn reads any extent as data, also one that was never written: zeroes that hide what lies below. Here such an
//! extent is a hole. So where it could make a difference, zeroes are written into it first; the bytes stay the same for
//! both programs. Then our records are made, volume.meta's attribute last: a crash before leaves an import.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use lh_block::{BLOCK, Extent};

use super::ENGINE;
use super::data::Store;
use super::directory::Directory;
use super::disk;
use super::error::{Damage, OpenError, damaged, failed};
use super::fs::Fs;
use super::gather::{Files, new_intent, open_backing};
use super::id::{Id, LAYER_ATTRIBUTE, VOLUME_ATTRIBUTE};
use super::known::Known;
use super::load;
use super::locks::Locked;
use super::meta::{LayerMeta, VOLUME_META, VolumeMeta, meta_name};
use super::open::Opening;
use super::owner::identified;
use super::record::{
    ChainRecord, Closed, EpochRecord, FoldRecord, Identity, Rebuild, Record, Records, Releasing,
};
use super::tree::{self, LayerFile, Tree};
use super::zero;

impl Opening {
    /// Opens a directory that is not ours.
    pub(super) fn import(self, locked: Locked) -> Result<(Directory, Store), OpenError> {
        let mut tree = tree::load(&self.path)?;
        check(&self.path, &tree)?;
        open_backing(&self.path, &tree.volume, self.deadline)?;
        let engine = self.path.join(ENGINE);
        let new = !engine.is_dir();
        if new {
            self.fs.make_directory(&engine).map_err(failed("making", &engine))?;
        }
        if let Err(err) = disk::probe(&engine, BLOCK) {
            if new {
                // Nothing is lost if this fails: the directory is empty.
                let _ = self.fs.remove_directory(&engine);
            }
            return Err(err);
        }
        while let Some((gone, stays)) = folded_by_longhorn(&tree) {
            self.finish_fold_of_longhorn(gone, stays).map_err(failed("taking over", &self.path))?;
            tree = tree::load(&self.path)?;
        }
        if self.finish_fold_of_head(&tree).map_err(failed("taking over", &self.path))? {
            tree = tree::load(&self.path)?;
        }
        let files = Files { tree: &tree, locked: &locked };
        let adopting = failed("taking over", &self.path);
        let identity = self.adopt(&files).map_err(adopting)?;
        let chain = ChainRecord {
            volume: identity.volume,
            prepared: None,
            committed: None,
            settled: tree
                .layers
                .last()
                .and_then(|head| super::meta::snapshot_name(&head.meta.parent))
                .map(Into::into),
        };
        Records { directory: &self.path }
            .store(&self.fs, &chain)
            .map_err(failed("taking over", &self.path))?;
        // Now that it is ours, it is read as ours.
        let tree = tree::load(&self.path)?;
        let files = Files { tree: &tree, locked: &locked };
        self.assemble(&files, identity, chain, false)
    }

    /// Does the rest of what Longhorn was about when it had folded a layer into the removed snapshot below: the layer has the
    /// snapshot's file, which has a name of its own still.
    fn finish_fold_of_longhorn(&self, gone: &LayerFile, stays: &LayerFile) -> io::Result<()> {
        if stays.meta.parent == gone.file {
            let meta = LayerMeta { parent: gone.meta.parent.clone(), ..stays.meta.clone() };
            let new = self.path.join(ENGINE).join("new-layer");
            self.fs.write(&new, &meta.encode(), None)?;
            self.fs.rename(&new, &self.path.join(meta_name(&stays.file)))?;
            self.fs.sync_directory(&self.path)?;
        }
        // The meta goes last, as Longhorn does it: alone it is none, if nothing stands on it.
        for name in [format!("{}.checksum", gone.file), gone.file.clone(), meta_name(&gone.file)] {
            self.fs.remove(&self.path.join(name))?;
            self.fs.sync_directory(&self.path)?;
        }
        Ok(())
    }

    /// A fold of the head was cut short between the change of files and that of metas, and only its record, which is forgotten
    /// below, says that the head stands on another layer: from now on the metas say so. The rest are leftovers. `false`: there is
    /// nothing to do.
    fn finish_fold_of_head(&self, tree: &Tree) -> io::Result<bool> {
        let Some(head) = tree.layers.last().filter(|head| head.meta.parent != tree.volume.parent) else {
            return Ok(false);
        };
        let volume = VolumeMeta { parent: head.meta.parent.clone(), ..tree.volume.clone() };
        let metas = [
            ("new-layer", head.meta.encode(), meta_name(&head.file)),
            ("new-volume", volume.encode(), VOLUME_META.into()),
        ];
        for (new, bytes, name) in metas {
            let new = self.path.join(ENGINE).join(new);
            self.fs.write(&new, &bytes, None)?;
            self.fs.rename(&new, &self.path.join(name))?;
            self.fs.sync_directory(&self.path)?;
        }
        Ok(true)
    }

    fn adopt(&self, files: &Files<'_>) -> io::Result<Identity> {
        let tree = files.tree;
        self.forget()?;
        self.remove_leftovers(tree).map_err(io::Error::other)?;
        for layer in &tree.layers {
            let file = files.file(&self.path, layer).map_err(io::Error::other)?;
            let path = self.path.join(&layer.file);
            if !layer.meta.parent.is_empty() || !tree.volume.backing_file.is_empty() {
                fill_unwritten(&file, layer.length)?;
            }
            // An id from an earlier life names a zero map that is gone.
            let is_head = layer.name.is_empty();
            if is_head || disk::id(&file, LAYER_ATTRIBUTE)?.is_some() {
                let id = Id::random()?;
                self.fs.write(&self.path.join(ENGINE).join(zero::file_name(id)), &zero::header(id), None)?;
                self.fs.set_attribute(&file, &path, LAYER_ATTRIBUTE, &id.to_string())?;
            }
            self.fs.sync_file(&file, &path)?;
        }
        let identity = Identity { volume: Id::random()?, imported: true };
        new_intent(&self.fs, &self.path, identity.volume, tree.volume.size(), false)?;
        let records = Records { directory: &self.path };
        records.store(&self.fs, &identity)?;
        self.fs.sync_directory(&self.path)?;
        let new = self.path.join(ENGINE).join("new-volume");
        let id = identity.volume.to_string();
        self.fs.write(&new, &tree.volume.encode(), Some((VOLUME_ATTRIBUTE, &id)))?;
        self.fs.rename(&new, &self.path.join(VOLUME_META))?;
        self.fs.sync_directory(&self.path)?;
        Ok(identity)
    }

    /// Removes records of an earlier life, the identity first: without it the others mean nothing. The fence stays.
    fn forget(&self) -> io::Result<()> {
        let engine = self.path.join(ENGINE);
        let remove = |fs: &Fs, name: &str| fs.remove(&engine.join(name));
        remove(&self.fs, Identity::NAME)?;
        self.fs.sync_directory(&engine)?;
        for name in [
            Closed::NAME,
            ChainRecord::NAME,
            EpochRecord::NAME,
            Rebuild::NAME,
            FoldRecord::NAME,
            Known::NAME,
            Releasing::NAME,
        ] {
            remove(&self.fs, name)?;
        }
        super::switch::remove_next(&self.fs, &self.path, None)?;
        super::fold::remove_left(&self.fs, &self.path)?;
        for entry in std::fs::read_dir(&engine)? {
            let entry = entry?;
            if entry.file_name().to_str().and_then(zero::parse_name).is_some() {
                self.fs.remove(&entry.path())?;
            }
        }
        self.fs.sync_directory(&engine)
    }
}

/// A removed snapshot whose file is that of another one, which alone may stand on it: that one, and the other.
fn folded_by_longhorn(tree: &Tree) -> Option<(&LayerFile, &LayerFile)> {
    let snapshots = || tree.layers.iter().filter(|l| !l.name.is_empty());
    let alone = |gone: &LayerFile, stays: &LayerFile| {
        tree.layers.iter().all(|l| l.meta.parent != gone.file || l.file == stays.file)
    };
    snapshots().filter(|gone| gone.meta.removed).find_map(|gone| {
        let stays = snapshots().find(|l| l.inode == gone.inode && l.file != gone.file)?;
        alone(gone, stays).then_some((gone, stays))
    })
}

/// An import must be the whole volume.
pub(super) fn check(path: &Path, tree: &Tree) -> Result<(), OpenError> {
    if tree.volume.rebuilding {
        return Err(damaged(path, Damage::Rebuilding));
    }
    let records = Records { directory: path };
    if let Some(identity) = identified(&records)? {
        Known::check_lengths(path, identity.volume, tree)?;
    }
    if !tree.recovered {
        return Ok(());
    }
    // Longhorn never loses volume.meta without a trace; without it nothing says whether our marks still count.
    let rebuilding = records.load::<Rebuild>()?.is_some();
    let engine = path.join(ENGINE);
    let marks = has_marks(&engine).map_err(|source| OpenError::Io {
        what: format!("looking for zero maps in {}", engine.display()),
        source,
    })?;
    if rebuilding || marks {
        return Err(damaged(path, Damage::MarksWithoutVolume));
    }
    Ok(())
}

/// Whether a zero map in `engine` may have a mark. What cannot be looked at is an error: it may have one.
fn has_marks(engine: &Path) -> io::Result<bool> {
    let entries = match std::fs::read_dir(engine) {
        Ok(entries) => entries,
        Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(err) => return Err(err),
    };
    for entry in entries {
        let entry = entry?;
        let zero = entry.file_name().to_str().and_then(zero::parse_name).is_some();
        if zero && zero::may_have_marks(entry.metadata()?.len()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Writes zeroes into extents that were never written.
fn fill_unwritten(file: &Arc<File>, length: u64) -> io::Result<()> {
    let extents = load::unwritten(file, length)?;
    if extents.is_empty() {
        return Ok(());
    }
    // A second descriptor without O_DIRECT needs no aligned memory. The first one holds the lock.
    let file = disk::reopen(file)?;
    let zeroes = vec![0; 1 << 20];
    for extent in extents {
        let mut rest = extent;
        while !rest.is_empty() {
            let now = rest.len.min(zeroes.len() as u64);
            file.write_all_at(&zeroes[..usize::try_from(now).unwrap_or(0)], rest.offset)?;
            rest = Extent::new(rest.offset + now, rest.len - now);
        }
    }
    file.sync_all()
}
