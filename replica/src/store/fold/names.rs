//! The worker's half of a fold. The names change in these steps, each of which may be the last before a crash:
//!
//! ```text
//! record  engine/fold: switching
//! link    volume-snap-P.img        -> volume-snap-C.img     (into the parent only; replaces C's file)
//! replace C's meta: its parent is P's parent                 (and volume.meta, if C is the head)
//! remove  volume-snap-P.img.meta, volume-snap-P.img, both .img.checksum
//! remove  the zero map of the file that is gone
//! remove  engine/fold
//! ```
//!
//! with a sync between any two. Who opens the directory in between sees C as it was, with or without P below it.
//!
//! If C is the head and goes into the parent, clients wait while its last blocks are copied. So what takes long is done before
//! ([`Directory::ready_fold`]: the metas, the record, a second name for P's file) or after ([`Directory::finish_fold`]: all but
//! the link), and the record decides nothing: the head has become P's file once it has P's inode ([`Directory::swap_fold`],
//! one rename and one sync), and a record of a head that has not is dropped by who opens the directory.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::super::ENGINE;
use super::super::directory::{DirLayer, Directory};
use super::super::disk;
use super::super::error::ChainError;
use super::super::fs::{Fs, found_at};
use super::super::id::{Id, LAYER_ATTRIBUTE, VOLUME_ATTRIBUTE};
use super::super::meta::{LayerMeta, VOLUME_META, VolumeMeta, meta_name, snapshot_file, snapshot_name};
use super::super::record::{FoldRecord, FoldSwitch, Record, Records};
use super::super::room::is_full;
use super::super::zero;
use super::Direction;

/// Names in `engine/` under which files are made that then take their places: all that needs space is made before the
/// first name changes, so that a full disk changes nothing.
const NEW_LINK: &str = "fold-layer";
const NEW_META: &str = "fold-info";
const NEW_VOLUME: &str = "fold-volume";
const CHECKSUM: &str = ".checksum";

/// A fold that may begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoldPlan {
    /// The removed snapshot.
    pub name: String,
    /// The layer above it, empty for the head. `None`: it has none, and is simply deleted.
    pub child: Option<String>,
    /// An earlier attempt went into the parent and came to this offset.
    pub resume: Option<u64>,
}

/// A fold whose names have changed, for [`super::Fold::switched`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folded {
    /// Length of the layer that stays.
    pub(super) length: u64,
}

impl Directory {
    /// Looks whether a removed snapshot can be folded away. Changes nothing but that the directory is in use, and that what a fold of
    /// another one has noted counts no more: of its layers nobody would forget it for an image that comes beside this one.
    ///
    /// # Errors
    /// [`ChainError`]: [`ChainError::ManyChildren`] for a snapshot that is to be passed over.
    pub fn begin_fold(&mut self, name: &str) -> Result<FoldPlan, ChainError> {
        let layer = self.layers.iter().find(|l| l.name == name && !name.is_empty());
        let layer = layer.ok_or_else(|| ChainError::NoSnapshot(name.to_owned()))?;
        if !layer.meta.removed {
            return Err(ChainError::NotRemoved(name.to_owned()));
        }
        if self.rebuild.is_some() {
            return Err(ChainError::Rebuilding);
        }
        let children: Vec<_> = self.layers.iter().filter(|l| l.meta.parent == layer.file_name).collect();
        if children.len() > 1 {
            return Err(ChainError::ManyChildren { name: name.to_owned(), children: children.len() });
        }
        let child = children.first().map(|l| l.name.clone());
        let earlier = self.fold.as_ref().filter(|f| f.name == name && f.child == child);
        let resume = earlier.filter(|f| f.direction == Direction::IntoParent).map(|f| f.done);
        let failed = |source| ChainError::Io { what: format!("folding {name}"), source };
        self.begin_use().map_err(&failed)?;
        if resume.is_none() {
            self.forget_fold().map_err(failed)?;
        }
        Ok(FoldPlan { name: name.to_owned(), child, resume })
    }

    /// The direction is chosen: notes it, and makes the file that stays as long as the longer of the two.
    ///
    /// # Errors
    /// The disk's.
    pub fn choose_fold(&mut self, plan: &FoldPlan, direction: Direction) -> io::Result<()> {
        let done = plan.resume.unwrap_or(0);
        self.save_fold(plan, direction, done)?;
        let Some((parent, Some(child))) = self.pair(&plan.name) else { return Ok(()) };
        let length = self.layers[parent].length.max(self.layers[child].length);
        let stays = if direction == Direction::IntoParent { parent } else { child };
        let layer = &mut self.layers[stays];
        if layer.length < length {
            let path = self.path.join(&layer.file_name);
            self.fs.set_length(&layer.file, &path, length)?;
            self.fs.sync_file(&layer.file, &path)?;
            layer.length = length;
            self.note_layers()?;
        }
        Ok(())
    }

    /// Notes how far a fold has come; what lies before is on stable storage.
    ///
    /// # Errors
    /// The disk's.
    pub fn save_fold(&mut self, plan: &FoldPlan, direction: Direction, done: u64) -> io::Result<()> {
        self.settle_heads()?;
        let child = self.pair(&plan.name).and_then(|(_, child)| child).map(|c| self.layers[c].name.clone());
        let record = FoldRecord {
            volume: self.identity.volume,
            name: plan.name.clone(),
            child,
            direction,
            done,
            switch: None,
        };
        self.records().store(&self.fs, &record)?;
        self.fold = Some(record);
        Ok(())
    }

    /// How far a fold has noted that it was counts no more: the next one begins at the start. No fold is at work, or it stands
    /// aside.
    ///
    /// # Errors
    /// The disk's.
    pub fn forget_fold(&mut self) -> io::Result<()> {
        if self.fold.take_if(|fold| fold.done > 0).is_some() {
            self.records().remove::<FoldRecord>(&self.fs)?;
        }
        Ok(())
    }

    /// A snapshot and the layer that stands on it, by their places. The head of the beginning may have become a snapshot.
    fn pair(&self, name: &str) -> Option<(usize, Option<usize>)> {
        let parent = self.layers.iter().position(|l| l.name == name && !name.is_empty())?;
        let file = &self.layers[parent].file_name;
        Some((parent, self.layers.iter().position(|l| l.meta.parent == *file)))
    }

    /// Changes the names: the layer that stays holds everything, on stable storage.
    ///
    /// # Errors
    /// [`ChainError::OtherPrepared`]: a chain operation is prepared, whose files name the chain as it is: try again
    /// when it is carried out or taken back. [`ChainError::NoSnapshot`]: it is gone, or stands elsewhere than when the
    /// fold began. [`ChainError::Io`].
    pub fn switch_fold(&mut self, plan: &FoldPlan, direction: Direction) -> Result<Folded, ChainError> {
        if let Some(prepared) = &self.chain.prepared {
            return Err(ChainError::OtherPrepared(prepared.id));
        }
        let gone = || ChainError::NoSnapshot(plan.name.clone());
        let (parent, child) = self.pair(&plan.name).ok_or_else(gone)?;
        if child.is_some() != plan.child.is_some() {
            return Err(gone());
        }
        let what = format!("folding {} in {}", plan.name, self.path.display());
        self.record_switch(plan, direction, parent, child).map_err(|e| not_begun(plan, e))?;
        self.finish_switch(direction, parent, child).map_err(|source| ChainError::Io { what, source })
    }

    /// Makes the child's meta, and volume.meta if the child is the head, as they will be.
    fn make_metas(&self, child: usize, parent: &str) -> io::Result<()> {
        let engine = self.engine();
        let (meta, volume) = self.metas_on(child, parent);
        self.fs.write(&engine.join(NEW_META), &meta.encode(), None)?;
        self.fs.remove(&engine.join(NEW_VOLUME))?;
        if self.layers[child].name.is_empty() {
            let id = self.identity.volume.to_string();
            self.fs.write(&engine.join(NEW_VOLUME), &volume.encode(), Some((VOLUME_ATTRIBUTE, &id)))?;
        }
        self.fs.sync_directory(&engine)
    }

    /// Makes all that the change of names needs, the record last.
    fn record_switch(
        &mut self,
        plan: &FoldPlan,
        direction: Direction,
        parent: usize,
        child: Option<usize>,
    ) -> io::Result<()> {
        self.settle_heads()?;
        let goes = match (direction, child) {
            (Direction::IntoParent, Some(child)) => child,
            _ => parent,
        };
        if goes != parent && disk::id(&self.layers[parent].file, LAYER_ATTRIBUTE)?.is_none() {
            // Of an import. The name that its file gets is known as that of a file that has an id.
            self.forget_layers()?;
        }
        // A fold of the head that was broken off may have left it. It would keep the space of the file that goes.
        self.fs.remove(&self.engine().join(NEW_LINK))?;
        let grandparent = self.layers[parent].meta.parent.clone();
        let map = disk::id(&self.layers[goes].file, LAYER_ATTRIBUTE)?;
        let switch = FoldSwitch {
            parent: grandparent.clone(),
            child_file: child.map(|c| self.layers[c].file_name.clone()),
            map,
        };
        let record = FoldRecord {
            volume: self.identity.volume,
            name: plan.name.clone(),
            child: child.map(|c| self.layers[c].name.clone()),
            direction,
            done: 0,
            switch: Some(switch),
        };
        self.unsettle(&plan.name, &grandparent)?;
        if let Some(child) = child {
            self.make_metas(child, &grandparent)?;
        }
        self.records().store(&self.fs, &record)?;
        self.fold = Some(record);
        Ok(())
    }

    /// Carries out what the record says.
    fn finish_switch(
        &mut self,
        direction: Direction,
        parent: usize,
        child: Option<usize>,
    ) -> io::Result<Folded> {
        let grandparent = self.layers[parent].meta.parent.clone();
        if let Some(record) = &self.fold {
            finish(&self.fs, &self.path, record)?;
        }
        self.fold = None;
        let length = self.forget_layer(direction, parent, child, &grandparent);
        self.note_layers()?;
        Ok(Folded { length })
    }

    /// The head goes into the parent, and all but its last blocks is there: makes what [`Directory::swap_fold`] needs.
    /// `false`: the head has become a snapshot.
    ///
    /// # Errors
    /// As [`Directory::switch_fold`].
    pub fn ready_fold(&mut self, plan: &FoldPlan) -> Result<bool, ChainError> {
        if let Some(prepared) = &self.chain.prepared {
            return Err(ChainError::OtherPrepared(prepared.id));
        }
        let Some((parent, head)) = self.head_over(plan) else { return Ok(false) };
        let made = self.record_switch(plan, Direction::IntoParent, parent, Some(head)).and_then(|()| {
            let link = self.engine().join(NEW_LINK);
            self.fs.remove(&link)?;
            self.fs.link(&self.path.join(&self.layers[parent].file_name), &link)?;
            self.fs.sync_directory(&self.engine())
        });
        made.map(|()| true).map_err(|e| not_begun(plan, e))
    }

    /// The parent's file becomes the head: it has everything, on stable storage, and no client's write is on its way.
    /// [`Directory::finish_fold`] has to follow before anything else is asked of the directory. `None`: something has
    /// changed since [`Directory::ready_fold`], and nothing was done.
    ///
    /// # Errors
    /// The disk's.
    pub fn swap_fold(&mut self, plan: &FoldPlan) -> io::Result<Option<Folded>> {
        let Some((parent, head)) = self.head_over(plan).filter(|_| self.chain.prepared.is_none()) else {
            return Ok(None);
        };
        if !self.metas_are_as_made(head, &self.layers[parent].meta.parent)? {
            return Ok(None);
        }
        let link = self.engine().join(NEW_LINK);
        self.fs.rename(&link, &self.path.join(&self.layers[head].file_name))?;
        self.fs.sync_directory(&self.path)?;
        Ok(Some(Folded { length: self.layers[parent].length }))
    }

    /// The rest of what [`Directory::swap_fold`] began.
    ///
    /// # Errors
    /// The disk's.
    pub fn finish_fold(&mut self, plan: &FoldPlan) -> io::Result<()> {
        let Some((parent, head)) = self.head_over(plan) else { return Ok(()) };
        self.finish_switch(Direction::IntoParent, parent, Some(head)).map(drop)
    }

    /// The places of the removed snapshot and of the head, if it is the head that stands on it.
    fn head_over(&self, plan: &FoldPlan) -> Option<(usize, usize)> {
        let (parent, child) = self.pair(&plan.name)?;
        child.filter(|child| self.layers[*child].name.is_empty()).map(|head| (parent, head))
    }

    /// Nobody has changed volume.meta or the head's meta since [`Directory::ready_fold`].
    fn metas_are_as_made(&self, head: usize, parent: &str) -> io::Result<bool> {
        let (layer, volume) = self.metas_on(head, parent);
        let is = |name: &str, bytes: Vec<u8>| match std::fs::read(self.engine().join(name)) {
            Ok(found) => Ok(found == bytes),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        };
        Ok(is(NEW_META, layer.encode())? && is(NEW_VOLUME, volume.encode())?)
    }

    /// The metas of a layer that stands on another parent than before: its own, and the volume's, should it be the head.
    fn metas_on(&self, child: usize, parent: &str) -> (LayerMeta, VolumeMeta) {
        let parent = || parent.to_owned();
        let layer = LayerMeta { parent: parent(), ..self.layers[child].meta.clone() };
        (layer, VolumeMeta { parent: parent(), ..self.volume.clone() })
    }

    /// The snapshot that everything is stable up to goes: the one below it takes its place.
    fn unsettle(&mut self, name: &str, parent: &str) -> io::Result<()> {
        if self.chain.settled.as_deref() != Some(name) {
            return Ok(());
        }
        let settled = snapshot_name(parent).map(str::to_owned);
        self.save_chain(super::super::record::ChainRecord { settled, ..self.chain.clone() })
    }

    /// The layers in memory after the change; the length of the one that stays.
    fn forget_layer(
        &mut self,
        direction: Direction,
        parent: usize,
        child: Option<usize>,
        grandparent: &str,
    ) -> u64 {
        let Some(at) = child else {
            self.layers.remove(parent);
            return 0;
        };
        let child = &mut self.layers[at];
        child.meta.parent = grandparent.to_owned();
        if child.name.is_empty() {
            self.volume.parent = grandparent.to_owned();
        }
        match direction {
            Direction::IntoChild => {
                let length = child.length;
                self.layers.remove(parent);
                length
            }
            // The child's name moves to the parent's place, which lies before all that stand on the child; the head is last.
            Direction::IntoParent => {
                let child = self.layers.remove(at);
                let stays: &mut DirLayer = &mut self.layers[parent];
                (stays.file_name, stays.name, stays.meta) = (child.file_name, child.name, child.meta);
                let length = stays.length;
                if stays.name.is_empty() {
                    let head = self.layers.remove(parent);
                    self.layers.push(head);
                }
                length
            }
        }
    }
}

/// No name has changed yet.
fn not_begun(plan: &FoldPlan, source: io::Error) -> ChainError {
    let what = format!("folding {}", plan.name);
    if is_full(&source) { ChainError::NoSpace(what) } else { ChainError::Io { what, source } }
}

/// Finishes the change of names that a crash interrupted, before the layers are read; forgets a fold whose snapshot is
/// gone. What is left of the record is what a fold goes on from.
pub(in super::super) fn recover(
    fs: &Fs,
    directory: &Path,
    volume: Id,
) -> Result<Option<FoldRecord>, super::super::error::OpenError> {
    let record = Records { directory }.load::<FoldRecord>()?.filter(|r| r.volume == volume);
    finish_or_forget(fs, directory, record).map_err(super::super::error::failed("recovering", directory))
}

fn finish_or_forget(fs: &Fs, directory: &Path, record: Option<FoldRecord>) -> io::Result<Option<FoldRecord>> {
    let records = Records { directory };
    let record = match record {
        Some(record) if !is_decided(directory, &record)? => {
            records.remove::<FoldRecord>(fs)?;
            None
        }
        other => other,
    };
    let Some(record) = record else { return remove_left(fs, directory).map(|()| None) };
    if record.switch.is_some() {
        return finish(fs, directory, &record).map(|()| None);
    }
    if found_at(&directory.join(snapshot_file(&record.name)))?.is_none() {
        return records.remove::<FoldRecord>(fs).map(|()| None);
    }
    Ok(Some(record))
}

/// Removes what a fold that does not go on has made in `engine/`: another name of a snapshot's file would keep its space.
pub(in super::super) fn remove_left(fs: &Fs, directory: &Path) -> io::Result<()> {
    [NEW_LINK, NEW_META, NEW_VOLUME].iter().try_for_each(|name| fs.remove(&directory.join(ENGINE).join(name)))
}

/// True if a fold has left what [`recover`] looks into: its record, or another name of a layer.
pub(in super::super) fn is_left(directory: &Path) -> io::Result<bool> {
    let engine = directory.join(ENGINE);
    Ok(found_at(&engine.join(FoldRecord::NAME))?.is_some() || found_at(&engine.join(NEW_LINK))?.is_some())
}

/// `false`: the head was about to go into the parent's file, and has not.
fn is_decided(directory: &Path, record: &FoldRecord) -> io::Result<bool> {
    let (Some(switch), Direction::IntoParent, Some("")) =
        (&record.switch, record.direction, record.child.as_deref())
    else {
        return Ok(true);
    };
    let Some(parent) = found_at(&directory.join(snapshot_file(&record.name)))? else {
        // The parent's own name goes near the end, when the metas have their places.
        return Ok(found_at(&directory.join(ENGINE).join(NEW_META))?.is_none());
    };
    let Some(child) = &switch.child_file else { return Ok(false) };
    Ok(found_at(&directory.join(child))?.is_some_and(|child| child.ino() == parent.ino()))
}

/// The steps; what is done already is passed over.
fn finish(fs: &Fs, directory: &Path, record: &FoldRecord) -> io::Result<()> {
    let Some(switch) = &record.switch else { return Ok(()) };
    let parent_file = snapshot_file(&record.name);
    let parent = directory.join(&parent_file);
    let engine = directory.join(ENGINE);
    if let Some(child_file) = &switch.child_file {
        let child = directory.join(child_file);
        if record.direction == Direction::IntoParent {
            replace_file(fs, directory, &parent, &child)?;
        }
        stand_on(fs, directory, child_file)?;
        fs.remove(&directory.join(format!("{child_file}{CHECKSUM}")))?;
    }
    fs.remove(&directory.join(meta_name(&parent_file)))?;
    fs.sync_directory(directory)?;
    fs.remove(&parent)?;
    // After the image, which whoever writes a checksum looks for once it is written: one of the two takes it away.
    fs.remove(&directory.join(format!("{parent_file}{CHECKSUM}")))?;
    fs.sync_directory(directory)?;
    if let Some(map) = switch.map {
        fs.remove(&engine.join(zero::file_name(map)))?;
        fs.sync_directory(&engine)?;
    }
    Records { directory }.remove::<FoldRecord>(fs)
}

/// Gives the parent's file the child's name, too.
fn replace_file(fs: &Fs, directory: &Path, parent: &Path, child: &Path) -> io::Result<()> {
    let engine = directory.join(ENGINE);
    let link = engine.join(NEW_LINK);
    let Some(stays) = found_at(parent)? else { return Ok(()) };
    if child.symlink_metadata()?.ino() != stays.ino() {
        fs.remove(&link)?;
        fs.link(parent, &link)?;
        fs.rename(&link, child)?;
        fs.sync_directory(directory)?;
    }
    // Renaming one name of a file to another of the same does nothing.
    fs.remove(&link)?;
    fs.sync_directory(&engine)
}

/// The child's parent becomes the parent's. The head's meta goes first; readers pass over a volume.meta that is behind.
fn stand_on(fs: &Fs, directory: &Path, child_file: &str) -> io::Result<()> {
    let engine = directory.join(ENGINE);
    for (new, name) in [(NEW_META, meta_name(child_file)), (NEW_VOLUME, VOLUME_META.to_owned())] {
        let new = engine.join(new);
        if found_at(&new)?.is_some() {
            fs.rename(&new, &directory.join(name))?;
            fs.sync_directory(directory)?;
        }
    }
    fs.sync_directory(&engine)
}
