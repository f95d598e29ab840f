//! The worker's half: everything that creates, renames and syncs files. All calls block.
//!
//! Each change is durable when its call returns, but for [`Directory::commit`]. After an error of the disk (`io::Error`,
//! [`super::ChainError::Io`]) the replica has failed: nobody knows what the directory holds.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lh_block::{Epoch, Generation, Instance};
use lh_wire::{LayerInfo, ReplicaState};

use super::ENGINE;
use super::data::Closing;
use super::disk::{self, Alignment};
use super::fs::Fs;
use super::id::{Id, LAYER_ATTRIBUTE, VOLUME_ATTRIBUTE};
use super::known::Known;
use super::load;
use super::meta::{LayerMeta, VOLUME_META, VolumeMeta};
use super::record::{
    ChainRecord, Closed, ClosedFile, EpochRecord, Fence, FoldRecord, Identity, Power, Rebuild, Record,
    Records, Releasing, Switch, Whole,
};
use super::room::is_full;
use super::zero::{self, ZeroMap};

/// How to open a directory.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// How long to wait for the locks of a process that is about to end.
    pub lock_wait: Duration,
}

/// What a new directory is made for.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Volume size in bytes.
    pub size: u64,
    /// Raw backing file below the lowest layer, if there is one. A relative path counts from the replica directory.
    pub backing: Option<String>,
    /// As in [`OpenOptions`].
    pub lock_wait: Duration,
}

/// The head of a prepared operation, open.
#[derive(Debug)]
pub(super) struct NextHead {
    pub(super) file: Arc<File>,
    pub(super) zero: ZeroMap,
}

/// The new head that a commit made, for [`super::Store::switch_head`].
#[derive(Debug)]
pub struct NewHead {
    /// Name of the snapshot that the former head became.
    pub(super) snapshot: String,
    /// Volume size in bytes from now on.
    pub(super) size: u64,
    pub(super) file: Arc<File>,
    pub(super) zero: ZeroMap,
}

/// A layer's new zero map, for [`super::Store::attach_zero_map`].
#[derive(Debug)]
pub struct NewZeroMap {
    /// Name of the layer.
    pub(super) layer: String,
    pub(super) zero: ZeroMap,
}

/// A layer as the directory knows it.
#[derive(Debug)]
pub(super) struct DirLayer {
    /// File name.
    pub(super) file_name: String,
    /// Snapshot name; empty for the head.
    pub(super) name: String,
    pub(super) meta: LayerMeta,
    pub(super) file: Arc<File>,
    pub(super) length: u64,
}

/// The worker's handle of a replica directory.
#[derive(Debug)]
pub struct Directory {
    pub(super) path: PathBuf,
    /// The directory itself: its lock says that a process is here.
    pub(super) _lock: File,
    pub(super) fs: Fs,
    pub(super) identity: Identity,
    pub(super) volume: VolumeMeta,
    /// Parents before children, the head last.
    pub(super) layers: Vec<DirLayer>,
    pub(super) fence: Option<Fence>,
    pub(super) epoch: Option<EpochRecord>,
    pub(super) chain: ChainRecord,
    pub(super) rebuild: Option<Rebuild>,
    /// The head of a prepared operation.
    pub(super) next: Option<NextHead>,
    /// A fold that has begun and not ended.
    pub(super) fold: Option<FoldRecord>,
    /// A switch that [`Directory::sync_commit`] has yet to make durable.
    pub(super) old_head: Option<Switch>,
    /// Zero marks may be in the files, so volume.meta has to say `Rebuilding`.
    pub(super) zero_marked: bool,
    /// Closed cleanly when it was opened, or since.
    pub(super) clean: bool,
    /// When everything that was answered was here last.
    pub(super) whole: Option<Whole>,
    /// From when on the host has kept its power, if something was missing then.
    pub(super) power: Option<Power>,
    /// What was noted of the layers' files last.
    pub(super) known: Option<Known>,
    /// [`Directory::begin_use`] was called since.
    pub(super) in_use: bool,
    pub(super) direct: Option<Alignment>,
    /// The intent bitmap's file, which the ring thread writes.
    pub(super) intent: Arc<File>,
}

impl Directory {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn engine(&self) -> PathBuf {
        self.path.join(ENGINE)
    }

    pub(super) fn records(&self) -> Records<'_> {
        Records { directory: &self.path }
    }

    /// Volume size in bytes.
    pub fn size(&self) -> u64 {
        self.volume.size()
    }

    /// What the replica knows of itself. The ring thread's part is left empty: `in_doubt`, `lived`, `intent` and
    /// `intent_chunk`; and `clean` is true only if it has taken no write since ([`super::Store::touched`]).
    ///
    /// The chain has every layer, of other branches, too: parents before children, the head last.
    pub fn state(&self) -> ReplicaState {
        let prepared = self.chain.prepared.as_ref();
        ReplicaState {
            size: self.size(),
            previous_generation: self.fence.map(|f| f.generation).unwrap_or_default(),
            epoch: self.epoch().cloned(),
            chain: self.layers.iter().map(layer_info).collect(),
            prepared: prepared.map(|p| (p.id, p.op.clone())),
            committed: self.chain.committed,
            rebuilding: self.rebuild.is_some(),
            kept: self.rebuild.as_ref().and_then(|r| r.kept.clone()),
            unsettled: self.unsettled(),
            power_since: self.power_since(),
            clean: self.clean,
            imported: self.identity.imported,
            ..ReplicaState::default()
        }
    }

    /// The last snapshot that is settled. One that was folded away before it was called so is none: the next that has its name
    /// would count as settled from the start.
    pub(super) fn settled(&self) -> Option<&str> {
        self.chain.settled.as_deref().filter(|settled| self.layers.iter().any(|l| l.name == *settled))
    }

    /// Snapshots of the head's chain above the settled one, base first.
    fn unsettled(&self) -> Vec<String> {
        let by_file: BTreeMap<&str, &DirLayer> =
            self.layers.iter().map(|l| (l.file_name.as_str(), l)).collect();
        let layer = |file: &str| by_file.get(file).map(|l| (l.name.as_str(), l.meta.parent.as_str()));
        super::lasting::unsettled(&self.volume.parent, self.chain.settled.as_deref(), layer)
    }

    /// The highest generation ever fenced for, and whose it was; zeroes if there never was one.
    pub fn fence(&self) -> (Generation, Instance) {
        self.fence.map(|f| (f.generation, f.instance)).unwrap_or_default()
    }

    /// Makes a fence durable. The caller has compared it.
    ///
    /// # Errors
    /// The disk's.
    pub fn store_fence(&mut self, generation: Generation, instance: Instance) -> io::Result<()> {
        let fence = Fence { generation, instance };
        self.records().store(&self.fs, &fence)?;
        self.fence = Some(fence);
        Ok(())
    }

    /// The epoch stored last.
    pub fn epoch(&self) -> Option<&Epoch> {
        self.epoch.as_ref().map(|e| &e.epoch)
    }

    /// Makes an epoch durable; from then on an import is a replica like any other. `Ok(false)`: a higher one is stored.
    ///
    /// # Errors
    /// The disk's.
    pub fn store_epoch(&mut self, epoch: Epoch) -> io::Result<bool> {
        self.store_epoch_and_outsiders(epoch, Vec::new())
    }

    /// The directory is ours for good.
    pub(super) fn end_import(&mut self) -> io::Result<()> {
        if self.identity.imported {
            let identity = Identity { imported: false, ..self.identity };
            self.records().store(&self.fs, &identity)?;
            self.identity = identity;
        }
        Ok(())
    }

    /// The layers up to this snapshot are stable on every member.
    ///
    /// # Errors
    /// The disk's.
    pub fn store_settled(&mut self, snapshot: &str) -> io::Result<()> {
        let record = ChainRecord { settled: Some(snapshot.to_owned()), ..self.chain.clone() };
        self.save_chain(record)
    }

    pub(super) fn save_chain(&mut self, record: ChainRecord) -> io::Result<()> {
        // A record says of no change that it was carried out that may yet be lost.
        self.settle_heads()?;
        self.records().store(&self.fs, &record)?;
        self.chain = record;
        Ok(())
    }

    /// The directory is about to be written: takes the mark of a clean close back. Comes before the first mark of the
    /// intent bitmap and the first write; cheap when done already.
    ///
    /// # Errors
    /// The disk's.
    pub fn begin_use(&mut self) -> io::Result<()> {
        if self.in_use {
            return Ok(());
        }
        // What a release that was broken off has noted holds no longer.
        self.fs.remove(&self.engine().join(Releasing::NAME))?;
        self.take_close_back()
    }

    /// The same for a release: that the directory was closed cleanly stays noted until its end, or until somebody else writes.
    pub(super) fn begin_release(&mut self) -> io::Result<()> {
        if self.clean {
            let record = Releasing::of(self.identity.volume, self.fence.as_ref());
            self.records().store(&self.fs, &record)?;
        }
        self.take_close_back()
    }

    fn take_close_back(&mut self) -> io::Result<()> {
        if self.clean {
            self.note_whole()?;
        }
        self.records().remove::<Closed>(&self.fs)?;
        self.save_volume(|volume| volume.dirty = true)?;
        self.in_use = true;
        Ok(())
    }

    /// Notes in volume.meta that the files alone are not the volume: before the first zero mark is written.
    ///
    /// # Errors
    /// The disk's.
    pub fn mark_zeroes(&mut self) -> io::Result<()> {
        self.save_volume(|volume| volume.rebuilding = true)?;
        self.zero_marked = true;
        Ok(())
    }

    /// Makes a zero map for a layer that came with an import and has none. `None`: there is no such layer.
    ///
    /// # Errors
    /// The disk's.
    pub fn make_zero_map(&mut self, layer: &str) -> io::Result<Option<NewZeroMap>> {
        let Some(held) = self.layers.iter().find(|l| l.name == layer) else { return Ok(None) };
        let (path, file) = (self.path.join(&held.file_name), Arc::clone(&held.file));
        self.begin_use()?;
        let id = Id::random()?;
        let zero = self.new_zero_map(id, self.size())?;
        self.fs.sync_directory(&self.engine())?;
        // The file gets another id.
        self.forget_layers()?;
        self.fs.set_attribute(&file, &path, LAYER_ATTRIBUTE, &id.to_string())?;
        self.fs.sync_file(&file, &path)?;
        self.note_layers()?;
        Ok(Some(NewZeroMap { layer: layer.to_owned(), zero }))
    }

    /// Notes what the layers' files are by now, if that has changed.
    pub(super) fn note_layers(&mut self) -> io::Result<()> {
        let layers = self.layers.iter().map(|layer| (layer.file_name.as_str(), &*layer.file));
        let known = Known::of(self.identity.volume, layers)?;
        if self.known.as_ref() == Some(&known) {
            return Ok(());
        }
        match self.records().store(&self.fs, &known) {
            // Nothing is known rather than something old.
            Err(e) if is_full(&e) => return self.forget_layers(),
            done => done?,
        }
        self.known = Some(known);
        Ok(())
    }

    /// The layers are about to be replaced.
    pub(super) fn forget_layers(&mut self) -> io::Result<()> {
        self.known = None;
        self.records().remove::<Known>(&self.fs)
    }

    /// An empty zero map for a volume of that size; its name is not durable yet.
    pub(super) fn new_zero_map(&self, id: Id, size: u64) -> io::Result<ZeroMap> {
        let path = self.engine().join(zero::file_name(id));
        self.fs.write(&path, &zero::header(id), None)?;
        let file = disk::open_layer(&path, true, false)?;
        Ok(ZeroMap::empty(id, Arc::new(file), size / lh_block::BLOCK))
    }

    /// Closes cleanly. [`Directory::begin_use`] opens it again, also after an error: then the directory may say that nothing is
    /// marked and nobody writes, but not that it was closed cleanly.
    ///
    /// # Errors
    /// The disk's.
    pub fn close_clean(&mut self, closing: Closing) -> io::Result<()> {
        self.in_use = false;
        super::intent::write(&closing.intent, &closing.pages)?;
        for layer in &self.layers {
            // A write that failed half-way can leave such extents; Longhorn would read them as data.
            for extent in load::unwritten(&layer.file, layer.length)? {
                disk::punch(&layer.file, extent)?;
            }
            self.fs.sync_file(&layer.file, &self.path.join(&layer.file_name))?;
        }
        let rebuilding = self.rebuild.is_some() || closing.has_marks;
        self.save_volume(|volume| {
            volume.dirty = false;
            volume.rebuilding = rebuilding;
        })?;
        self.zero_marked = closing.has_marks;
        let files = self.layers.iter().map(closed_file).collect::<io::Result<_>>()?;
        self.records().store(&self.fs, &Closed { volume: self.identity.volume, files })?;
        self.clean = true;
        Ok(())
    }

    /// Replaces volume.meta, if it changes. The new file carries the id before it has the name.
    pub(super) fn save_volume(&mut self, change: impl FnOnce(&mut VolumeMeta)) -> io::Result<()> {
        let mut volume = self.volume.clone();
        change(&mut volume);
        if volume == self.volume {
            return Ok(());
        }
        self.write_volume(&volume, &self.path.join(VOLUME_META))?;
        self.fs.sync_directory(&self.path)?;
        let before = std::mem::replace(&mut self.volume, volume);
        self.remake_switch().inspect_err(|_| {
            // The next try has to do both.
            self.volume = before;
        })
    }

    /// Writes a volume.meta under a name of the replica directory or of `engine/`; the name is not durable yet.
    pub(super) fn write_volume(&self, volume: &VolumeMeta, path: &Path) -> io::Result<()> {
        let new = self.engine().join("new-volume");
        let id = self.identity.volume.to_string();
        self.fs.write(&new, &volume.encode(), Some((VOLUME_ATTRIBUTE, &id)))?;
        self.fs.rename(&new, path)
    }

    /// Writes a layer's meta; the name is not durable yet.
    pub(super) fn write_layer_meta(&self, meta: &LayerMeta, path: &Path) -> io::Result<()> {
        let new = self.engine().join("new-layer");
        self.fs.write(&new, &meta.encode(), None)?;
        self.fs.rename(&new, path)
    }
}

/// What others are told of a layer.
fn layer_info(layer: &DirLayer) -> LayerInfo {
    // A number for people; an open file that cannot be asked for it shows up elsewhere.
    let allocated = layer.file.metadata().map_or(0, |stat| stat.blocks() * 512);
    layer.meta.info(&layer.name, layer.length, allocated)
}

fn closed_file(layer: &DirLayer) -> io::Result<ClosedFile> {
    Ok(ClosedFile::of(&layer.file_name, &layer.file.metadata()?))
}
