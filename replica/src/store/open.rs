//! Opening a directory for writing: locks first, then what a crash interrupted, then the layers.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use lh_block::BLOCK;
use lh_ring::sys;

use super::ENGINE;
use super::data::Store;
use super::directory::{DirLayer, Directory, OpenOptions, stat_of};
use super::disk::{self, Alignment};
use super::error::{Damage, OpenError, damaged, failed};
use super::fs::{Fs, found_at};
use super::id::{Id, LAYER_ATTRIBUTE, VOLUME_ATTRIBUTE};
use super::intent::{self, Intent};
use super::known::Known;
use super::load::{self, LayerParts, Layers, Parts, Unwritten};
use super::meta::{VOLUME_META, VolumeMeta, is_head, meta_name, snapshot_name};
use super::qcow2::{Image, ImageError};
use super::record::{
    ChainRecord, Closed, ClosedFile, Creating, EpochRecord, Fence, Identity, Power, Rebuild, Records, Whole,
};
use super::switch;
use super::tree::{self, LayerFile, Tree};
use super::zero::{self, LoadError, ZeroMap};

/// Opens the directory itself and takes its lock.
pub(super) fn lock_directory(path: &Path, exclusive: bool, deadline: Instant) -> Result<File, OpenError> {
    let open = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(path);
    let file = match open {
        Ok(file) => file,
        Err(err) if matches!(err.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Err(OpenError::NoDirectory(path.to_owned()));
        }
        Err(err) => return Err(failed("opening", path)(err)),
    };
    disk::lock(&file, path, exclusive, deadline)?;
    Ok(file)
}

/// The layers' files by inode, each locked on the descriptor that will do its I/O. One file may have two names.
pub(super) type Locked = BTreeMap<u64, Arc<File>>;

/// Locks every layer's file before anything is read: the last writes of a process that is gone may still be in flight,
/// and hold the lock.
pub(super) fn lock_layers(path: &Path, write: bool, deadline: Instant) -> Result<Locked, OpenError> {
    each_layer(path, |file| {
        let open = open_layer(file, write).map_err(failed("opening", file))?;
        disk::lock(&open, file, write, deadline)?;
        Ok(open)
    })
}

/// The layers' files without locks, for reading what no process changes.
pub(super) fn open_layers(path: &Path) -> Result<Locked, OpenError> {
    each_layer(path, |file| open_layer(file, false).map_err(failed("opening", file)))
}

/// Locks the layers that recovery has moved into the directory: they were nobody's before.
fn lock_moved(path: &Path, locked: Locked, deadline: Instant) -> Result<Locked, OpenError> {
    each_other_layer(path, locked, |file| {
        let open = open_layer(file, true).map_err(failed("opening", file))?;
        disk::lock(&open, file, true, deadline)?;
        Ok(open)
    })
}

fn each_layer(path: &Path, open: impl FnMut(&Path) -> Result<File, OpenError>) -> Result<Locked, OpenError> {
    each_other_layer(path, Locked::new(), open)
}

fn each_other_layer(
    path: &Path,
    mut locked: Locked,
    mut open: impl FnMut(&Path) -> Result<File, OpenError>,
) -> Result<Locked, OpenError> {
    for entry in std::fs::read_dir(path).map_err(failed("reading", path))? {
        let entry = entry.map_err(failed("reading", path))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if !(is_head(&name) || snapshot_name(&name).is_some()) {
            continue;
        }
        let file = path.join(&name);
        let stat = file.symlink_metadata().map_err(failed("reading", &file))?;
        if stat.is_file() && !locked.contains_key(&stat.ino()) {
            locked.insert(stat.ino(), Arc::new(open(&file)?));
        }
    }
    Ok(locked)
}

/// With O_DIRECT where that works; an offline reader does without.
fn open_layer(path: &Path, write: bool) -> io::Result<File> {
    if write && disk::direct_alignment(path)?.is_some() {
        return disk::open_layer(path, true, true);
    }
    disk::open_layer(path, write, false)
}

/// What the records say of whose the directory is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Owner {
    /// The records are valid.
    Ours {
        /// They say so.
        identity: Identity,
        /// Closed cleanly and not touched since.
        clean: bool,
    },
    /// Never ours, or written by another program since.
    Other,
}

/// Compares records and files.
pub(super) fn owner(records: &Records<'_>) -> Result<Owner, OpenError> {
    let path = records.directory;
    let Some(identity) = records.load::<Identity>()? else { return Ok(Owner::Other) };
    let volume = path.join(VOLUME_META);
    let found = match disk::open_layer(&volume, false, false) {
        Ok(file) => disk::id(&file, VOLUME_ATTRIBUTE).map_err(failed("reading", &volume))?,
        Err(err) if err.kind() == io::ErrorKind::NotFound => None,
        Err(err) => return Err(failed("opening", &volume)(err)),
    };
    if found != Some(identity.volume) {
        return Ok(Owner::Other);
    }
    // A rotten record of the clean close only means that the close is not believed.
    let closed = match records.load::<Closed>() {
        Err(OpenError::Damaged { .. }) => None,
        other => other?.filter(|closed| closed.volume == identity.volume),
    };
    let Some(closed) = closed else { return Ok(Owner::Ours { identity, clean: false }) };
    for file in &closed.files {
        if !is_still(path, file)? {
            return Ok(Owner::Other);
        }
    }
    Ok(Owner::Ours { identity, clean: true })
}

/// The file is there, and nobody has written to it since the clean close.
fn is_still(directory: &Path, file: &ClosedFile) -> Result<bool, OpenError> {
    let path = directory.join(&file.name);
    let found = found_at(&path).map_err(failed("reading", &path))?;
    Ok(found.is_some_and(|stat| file.is_still(&stat_of(&file.name, &stat))))
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
        directory.note_layers().map_err(failed("noting the layers of", &path))?;
        Ok((directory, Store::new(parts)))
    }
}

impl Directory {
    /// Both halves anew, from what the directory holds now. The descriptors are those that have the layers' locks, and go on.
    ///
    /// # Errors
    /// The disk's, or what is damaged: nothing has changed here then.
    pub(super) fn gather_anew(
        &mut self,
        locked: &Locked,
        intent: Intent,
        rebuilding: bool,
    ) -> io::Result<Parts> {
        let gather = Gather {
            path: &self.path,
            fs: &self.fs,
            deadline: Instant::now(),
            id: self.identity.volume,
            clean: true,
        };
        let tree = tree::load(&self.path).map_err(io::Error::other)?;
        let files = Files { tree: &tree, locked };
        let (layers, parts) = gather.all(&files, intent, rebuilding).map_err(io::Error::other)?;
        self.layers = layers;
        self.volume = tree.volume;
        Ok(parts)
    }
}

/// Both halves' view of the layers, from the files.
struct Gather<'a> {
    pub(super) path: &'a Path,
    pub(super) fs: &'a Fs,
    pub(super) deadline: Instant,
    pub(super) id: Id,
    /// Closed cleanly: there is nothing to tidy up.
    pub(super) clean: bool,
}

impl Gather<'_> {
    fn engine(&self) -> PathBuf {
        self.path.join(ENGINE)
    }

    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> OpenError {
        failed(what, self.path)
    }

    pub(super) fn all(
        &self,
        files: &Files<'_>,
        intent: Intent,
        rebuilding: bool,
    ) -> Result<(Vec<DirLayer>, Parts), OpenError> {
        let volume = &files.tree.volume;
        let size = volume.size();
        let direct = files.direct(self.path)?;
        let layers = files.directory_layers(self.path)?;
        let mut parts = self.layer_parts(&layers, size)?;
        parts.extend(open_backing(self.path, volume, self.deadline)?);
        let chain = files.chain(parts.len() > layers.len());
        let mut unwritten = Unwritten::Hole(Vec::new());
        let index = load::index(size, &mut parts, &chain, &mut unwritten);
        let index = index.map_err(self.failed("reading"))?;
        self.tidy(&mut parts, &chain, unwritten).map_err(self.failed("reading"))?;
        let marks = parts.iter().filter_map(|l| l.zero.as_ref()).any(ZeroMap::has_marks);
        let marked = marks || (volume.rebuilding && !rebuilding);
        let parts = Layers { layers: parts, chain, index };
        let engine = self.engine();
        Ok((layers, Parts { size, engine, layers: parts, direct, intent, rebuilding, marked }))
    }

    /// What the index did not look at, and holes for extents that were never written: Longhorn would read them as data.
    /// The backing file is none of ours.
    fn tidy(&self, parts: &mut [LayerParts], chain: &[usize], unwritten: Unwritten) -> io::Result<()> {
        let mut holes = match unwritten {
            Unwritten::Hole(found) => found,
            Unwritten::Data => Vec::new(),
        };
        for (at, layer) in parts.iter_mut().enumerate().filter(|(at, _)| !chain.contains(at)) {
            load::look_through(layer)?;
            if !self.clean {
                holes.extend(load::unwritten(&layer.file, layer.length)?.into_iter().map(|e| (at, e)));
            }
        }
        for (at, extent) in holes.into_iter().filter(|(at, _)| !self.clean && parts[*at].name.is_some()) {
            disk::punch(&parts[at].file, extent)?;
        }
        Ok(())
    }

    /// Zero maps for the layers, and a check that none is left over: its layer would have been replaced.
    fn layer_parts(&self, layers: &[DirLayer], size: u64) -> Result<Vec<LayerParts>, OpenError> {
        let damage = |damage| damaged(self.path, damage);
        let mut maps = zero_maps(self.path)?;
        let mut parts = Vec::new();
        for layer in layers {
            let id = disk::id(&layer.file, LAYER_ATTRIBUTE).map_err(self.failed("reading"))?;
            let zero = match id {
                None => None,
                Some(id) => {
                    let path = maps.remove(&id);
                    let path = path.ok_or_else(|| damage(Damage::ZeroMissing(layer.file_name.clone())))?;
                    let file = disk::open_layer(&path, true, false).map_err(failed("opening", &path))?;
                    if zero::may_have_marks(file.metadata().map_err(failed("reading", &path))?.len()) {
                        self.settle(&file, &path)?;
                    }
                    Some(load_zero_map(self.path, id, &path, size, true)?)
                }
            };
            let (name, file) = (Some(layer.name.clone()), Arc::clone(&layer.file));
            parts.push(LayerParts { name, file, length: layer.length, zero, image: None });
        }
        for (id, path) in maps {
            // One without room for marks may not even have its header: its layer was never made.
            let length = path.symlink_metadata().map_err(self.failed("reading"))?.len();
            if zero::may_have_marks(length) && load_zero_map(self.path, id, &path, size, true)?.has_marks() {
                return Err(damage(Damage::ZeroOrphan(zero::file_name(id))));
            }
            self.fs.remove(&path).map_err(self.failed("tidying"))?;
        }
        Ok(parts)
    }

    /// What is read of a file from now on is on stable storage. A process that was killed may have left something in the page cache
    /// alone. What a failed sync has left there counts as written, so that no other sync would write it: it is let go of.
    fn settle(&self, file: &File, path: &Path) -> Result<(), OpenError> {
        if self.clean {
            return Ok(());
        }
        let synced = self.fs.sync_file(file, path).and_then(|()| sys::forget_cached(file));
        synced.map_err(failed("syncing", path))
    }

    /// The intent bitmap. Without a readable one every chunk counts as marked.
    pub(super) fn intent(&self, size: u64) -> Result<Intent, OpenError> {
        let path = self.engine().join(intent::FILE);
        match disk::open_layer(&path, true, false) {
            Ok(file) => {
                disk::lock(&file, &path, true, self.deadline)?;
                self.settle(&file, &path)?;
                let loaded = Intent::load(self.id, Arc::new(file), size).map_err(failed("reading", &path))?;
                if let Some(intent) = loaded {
                    return Ok(intent);
                }
            }
            Err(err) if err.kind() == io::ErrorKind::NotFound => {}
            Err(err) => return Err(failed("opening", &path)(err)),
        }
        new_intent(self.fs, self.path, self.id, size, true).map_err(failed("making", &path))
    }
}

/// The zero maps in `engine/`.
pub(super) fn zero_maps(directory: &Path) -> Result<BTreeMap<Id, PathBuf>, OpenError> {
    let engine = directory.join(ENGINE);
    let mut maps = BTreeMap::new();
    for entry in std::fs::read_dir(&engine).map_err(failed("reading", &engine))? {
        let entry = entry.map_err(failed("reading", &engine))?;
        let id = entry.file_name().to_str().and_then(zero::parse_name);
        maps.extend(id.map(|id| (id, entry.path())));
    }
    Ok(maps)
}

pub(super) fn load_zero_map(
    directory: &Path,
    id: Id,
    path: &Path,
    size: u64,
    write: bool,
) -> Result<ZeroMap, OpenError> {
    let file = disk::open_layer(path, write, false).map_err(failed("opening", path))?;
    ZeroMap::load(id, Arc::new(file), size / BLOCK).map_err(|err| match err {
        LoadError::Damaged(damage) => damaged(directory, damage),
        LoadError::Io(source) => failed("reading", path)(source),
    })
}

/// Makes the file of an intent bitmap.
pub(super) fn new_intent(fs: &Fs, directory: &Path, id: Id, size: u64, marked: bool) -> io::Result<Intent> {
    let path = directory.join(ENGINE).join(intent::FILE);
    let image = |file| Intent::new(id, Arc::new(file), size, lh_wire::intent_chunk(size), marked);
    // The image needs no file; the file needs the image.
    let bytes = image(File::open("/dev/null")?).image();
    fs.write(&path, &bytes, None)?;
    fs.sync_directory(&directory.join(ENGINE))?;
    let file = disk::open_layer(&path, true, false)?;
    disk::lock_new(&file)?;
    Ok(image(file))
}

/// The layers and their open files.
pub(super) struct Files<'a> {
    pub(super) tree: &'a Tree,
    pub(super) locked: &'a Locked,
}

impl Files<'_> {
    pub(super) fn file(&self, directory: &Path, layer: &LayerFile) -> Result<Arc<File>, OpenError> {
        let gone = || io::Error::other("it changed while the directory was being opened");
        let file = self.locked.get(&layer.inode).ok_or_else(gone);
        file.map(Arc::clone).map_err(failed("opening", &directory.join(&layer.file)))
    }

    fn directory_layers(&self, directory: &Path) -> Result<Vec<DirLayer>, OpenError> {
        let open = |layer: &LayerFile| {
            Ok(DirLayer {
                file_name: layer.file.clone(),
                name: layer.name.clone(),
                meta: layer.meta.clone(),
                file: self.file(directory, layer)?,
                length: layer.length,
            })
        };
        self.tree.layers.iter().map(open).collect()
    }

    /// What O_DIRECT asks for, where the layers are opened so.
    fn direct(&self, directory: &Path) -> Result<Option<Alignment>, OpenError> {
        let path = directory.join(&self.tree.volume.head);
        disk::direct_alignment(&path).map_err(failed("opening", &path))
    }

    /// The head's chain, below it the backing file, whose place is behind all layers.
    pub(super) fn chain(&self, backing: bool) -> Vec<usize> {
        backing.then_some(self.tree.layers.len()).into_iter().chain(self.tree.chain.iter().copied()).collect()
    }
}

/// Opens the backing file that volume.meta names. Nobody writes it, so a shared lock will do.
pub(super) fn open_backing(
    directory: &Path,
    volume: &VolumeMeta,
    deadline: Instant,
) -> Result<Option<LayerParts>, OpenError> {
    if volume.backing_file.is_empty() {
        return Ok(None);
    }
    let path =
        disk::backing_path(directory, &volume.backing_file).map_err(|damage| damaged(directory, damage))?;
    // A symbolic link is as good as the file: whoever names a backing file says where it lies.
    let file = sys::open_plain(&path, std::fs::OpenOptions::new().read(true), 0);
    let file = Arc::new(file.map_err(failed("opening", &path))?);
    let image = if disk::is_qcow2(&file).map_err(failed("reading", &path))? {
        Some(Arc::new(open_image(directory, &path, &file, volume.size())?))
    } else {
        None
    };
    let length = match &image {
        Some(image) => image.size(),
        None => file.metadata().map_err(failed("reading", &path))?.len(),
    };
    let size = volume.size();
    if length == 0 || length % lh_block::SECTOR != 0 || length > size {
        return Err(damaged(directory, Damage::BackingLength { file: path, length, size }));
    }
    disk::lock(&file, &path, false, deadline)?;
    Ok(Some(LayerParts { name: None, file, length, zero: None, image }))
}

fn open_image(directory: &Path, path: &Path, file: &Arc<File>, size: u64) -> Result<Image, OpenError> {
    Image::open(Arc::clone(file), size).map_err(|err| match err {
        ImageError::Fault(fault) => damaged(directory, Damage::BackingQcow2 { file: path.to_owned(), fault }),
        ImageError::TooLarge(length) => {
            damaged(directory, Damage::BackingLength { file: path.to_owned(), length, size })
        }
        ImageError::Io(source) => failed("reading", path)(source),
    })
}
