//! Both halves' view of a directory, from its files: what is in the layers, their zero maps, the intent bitmap and the backing file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use lh_block::BLOCK;
use lh_ring::sys;

use super::ENGINE;
use super::directory::{DirLayer, Directory};
use super::disk::{self, Alignment};
use super::error::{Damage, OpenError, damaged, failed};
use super::fs::Fs;
use super::id::{Id, LAYER_ATTRIBUTE};
use super::intent::{self, Intent};
use super::load::{self, LayerParts, Layers, Parts, Unwritten};
use super::locks::Locked;
use super::meta::VolumeMeta;
use super::qcow2::{Image, ImageError};
use super::tree::{self, LayerFile, Tree};
use super::zero::{self, LoadError, ZeroMap};

/// Both halves' view of the layers, from the files.
pub(super) struct Gather<'a> {
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
