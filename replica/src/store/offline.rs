//! Reads a directory without changing it: `longhornctl replica export` and `snapshot export`.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lh_block::{BLOCK, Extent};
use lh_wire::LayerInfo;
use thiserror::Error;

use super::ENGINE;
use super::disk;
use super::error::{Damage, NotLasting, OpenError, damaged, failed};
use super::gather::{Files, load_zero_map, open_backing, zero_maps};
use super::id::{Id, LAYER_ATTRIBUTE};
use super::index::Index;
use super::known::Known;
use super::lasting::{self, lasting};
use super::load::{self, LayerParts, Unwritten, blocks, bytes};
use super::locks::{lock_directory, lock_layers, open_layers};
use super::owner::{Owner, identified, is_still, owner};
use super::record::{Closed, Creating, Rebuild, Records};
use super::rescue::{Care, Doubt, EVERYTHING};
use super::tree::{self, LayerFile, Tree};
use super::zero::{self, LoadError, ZeroMap};

/// How often, and how far apart, a directory that its process is just changing is looked at again.
pub(super) const LOOKS: u32 = 20;
pub(super) const LOOK: Duration = Duration::from_millis(20);

/// How long a lock is waited for that may be passing: a process that starts another one shares its descriptors, locks
/// included, with the child until the child has become another program.
const PASSING: Duration = Duration::from_millis(500);

/// Why there is no export. What was written is none.
#[derive(Debug, Error)]
pub enum ExportError {
    /// The snapshot does not last.
    #[error(transparent)]
    Snapshot(#[from] OpenError),
    /// The disks'.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A snapshot that is read beside the process that holds the directory.
#[derive(Debug)]
struct Beside {
    path: PathBuf,
    name: String,
    /// When it was taken: another one may get its name.
    created: String,
    /// Whether it lasted already before the first look at what it holds: else something may have been put into it since.
    lasted: Result<(), NotLasting>,
}

/// The volume as a snapshot, or the head, has it.
#[derive(Debug)]
pub struct SnapshotView {
    _lock: Option<File>,
    beside: Option<Beside>,
    care: Care,
    size: u64,
    infos: Vec<LayerInfo>,
    pub(super) layers: Vec<LayerParts>,
    pub(super) chain: Vec<usize>,
    pub(super) index: Index,
}

impl SnapshotView {
    /// Opens a directory for reading. `snapshot`: its name; `None`: the head. Holds shared locks: no process can open the
    /// directory for writing meanwhile.
    ///
    /// # Errors
    /// [`OpenError`], also if a process holds the directory, or if the snapshot is marked as removed: a fold that was broken off may have
    /// left in it what was written later. The head reads the same whatever a fold below it has done.
    pub fn open(path: &Path, snapshot: Option<&str>) -> Result<Self, OpenError> {
        Self::load(path, snapshot, true, Care::strict())
    }

    /// The same of a directory that is damaged, as far as anything can be read of it: [`SnapshotView::doubts`] has what is not sure,
    /// and what cannot be read is zeroes.
    ///
    /// # Errors
    /// [`OpenError`], where a layer's meta is damaged above all: nothing says then which layer lies over which.
    pub fn rescue(path: &Path, snapshot: Option<&str>) -> Result<Self, OpenError> {
        Self::load(path, snapshot, true, Care::rescue())
    }

    /// What is not sure of the bytes that were read so far. `None`: the view was not made by [`SnapshotView::rescue`].
    pub fn doubts(&self) -> Option<Vec<Doubt>> {
        self.care.doubts(self.size)
    }

    /// Opens a snapshot for reading beside the process that holds the directory. What it reads is the snapshot's if
    /// [`SnapshotView::check_lasting`] says so when everything was read: it may be removed, and folded, meanwhile. The names around it may
    /// be moving, so a look that fails is taken again.
    ///
    /// # Errors
    /// [`OpenError`], as [`SnapshotView::open`].
    pub fn open_beside(path: &Path, snapshot: &str) -> Result<Self, OpenError> {
        if snapshot.is_empty() {
            // The head, which does change.
            let (name, known) = (String::new(), "names for all of them".to_owned());
            return Err(OpenError::NoSnapshot { dir: path.to_owned(), name, known });
        }
        patiently(|| {
            let before = lasting::look(path);
            let mut view = Self::load(path, Some(snapshot), false, Care::strict())?;
            if let Some(beside) = &mut view.beside {
                beside.lasted = lasting(&before?, snapshot).map(drop);
            }
            Ok(view)
        })
    }

    /// Fails unless all that was read before is the snapshot's. Clones and exports ask it by themselves. A view that was opened while
    /// its snapshot was not settled yet fails for ever: what a repair has put into the snapshot since is not in the view's maps.
    ///
    /// # Errors
    /// [`OpenError::NotLasting`] above all.
    pub fn check_lasting(&self) -> Result<(), OpenError> {
        // Else there are locks, beside which nobody changes anything.
        let Some(beside) = &self.beside else { return Ok(()) };
        let state = patiently(|| lasting::look(&beside.path))?;
        match lasting(&state, &beside.name) {
            Ok(layer) if layer.created == beside.created => beside.lasted.clone(),
            Ok(_) => Err(NotLasting::Another(beside.name.clone())),
            Err(why) => Err(why),
        }
        .map_err(|why| OpenError::NotLasting { dir: beside.path.clone(), why })
    }

    fn load(path: &Path, snapshot: Option<&str>, alone: bool, care: Care) -> Result<Self, OpenError> {
        let deadline = Instant::now() + PASSING;
        let lock = if alone { Some(lock_directory(path, false, deadline)?) } else { None };
        let records = Records { directory: path };
        if records.load::<Creating>().or_else(|err| care.pass(EVERYTHING, err, None))?.is_some() {
            return Err(damaged(path, Damage::Unfinished));
        }
        let locked = if alone { lock_layers(path, false, deadline)? } else { open_layers(path)? };
        let tree = tree::load_with(path, &care)?;
        let top = find(path, &tree, snapshot)?;
        let mut below = tree::chain_of(&tree.layers, top);
        let ours = if care.is_rescue() {
            let chosen: Vec<_> = below.iter().map(|place| &tree.layers[*place]).collect();
            note_unusable(&records, &tree, &chosen, &care)?
        } else {
            check_usable(&records, &tree)?
        };
        let chosen = &tree.layers[top];
        if chosen.meta.removed {
            let why = NotLasting::Removed(chosen.name.clone());
            return Err(OpenError::NotLasting { dir: path.to_owned(), why });
        }
        let beside = || {
            let (name, created) = (chosen.name.clone(), chosen.meta.created.clone());
            Beside { path: path.to_owned(), name, created, lasted: Ok(()) }
        };
        let beside = (!alone).then(beside);
        let files = Files { tree: &tree, locked: &locked };
        let (mut layers, mut infos) = (Vec::new(), Vec::new());
        for (place, layer) in tree.layers.iter().enumerate() {
            // Beside a process, the maps of what it still writes are not to be trusted, nor are they needed.
            let marked = ours && (alone && !care.is_rescue() || below.contains(&place));
            let parts = open_layer(path, &files, layer, marked, &care)?;
            let allocated = parts.file.metadata().map_err(failed("reading", path))?.blocks() * 512;
            infos.push(layer.meta.info(&layer.name, layer.length, allocated));
            layers.push(parts);
        }
        let backing = open_backing(path, &tree.volume, deadline)?;
        let mut chain: Vec<usize> = backing.is_some().then_some(layers.len()).into_iter().collect();
        chain.append(&mut below);
        layers.extend(backing);
        let size = tree.volume.size();
        let mut unwritten = if ours { Unwritten::Hole(Vec::new()) } else { Unwritten::Data };
        let index =
            load::index(size, &mut layers, &chain, &mut unwritten).map_err(failed("reading", path))?;
        Ok(Self { _lock: lock, beside, care, size, infos, layers, chain, index })
    }

    /// Size in bytes: the volume's, also for a snapshot from before it grew.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// All layers of the directory, parents before children, the head, whose name is empty, last.
    pub fn layers(&self) -> &[LayerInfo] {
        &self.infos
    }

    /// Fills `buffer` with the bytes from `offset` on.
    ///
    /// # Errors
    /// The disk's, or a range beyond the end.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let extent = Extent::new(offset, buffer.len() as u64);
        if extent.end() > self.size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        buffer.fill(0);
        for (range, held) in self.held(extent) {
            let Some(part) = bytes(range).intersection(extent) else { continue };
            let at = |n: u64| usize::try_from(n - offset).unwrap_or(usize::MAX);
            self.care.read(&self.layers[held], part.offset, &mut buffer[at(part.offset)..at(part.end())])?;
        }
        Ok(())
    }

    /// Ranges of blocks that a layer holds, with its place in `layers`.
    pub(super) fn held(&self, extent: Extent) -> impl Iterator<Item = (Range<u64>, usize)> + '_ {
        let layer = |held: u8| self.chain.get(usize::from(held).wrapping_sub(1)).copied();
        self.index.runs(blocks(extent)).filter_map(move |(range, held)| Some((range, layer(held)?)))
    }

    /// Writes all bytes to `out` (empty before), zeroes as holes. `progress`: bytes done and bytes in all.
    ///
    /// # Errors
    /// [`ExportError`].
    pub fn export(&self, out: &File, progress: &mut dyn FnMut(u64, u64)) -> Result<(), ExportError> {
        /// Bytes copied at a time.
        const STEP: u64 = 1 << 20;
        let mut buffer = vec![0; 1 << 20];
        out.set_len(self.size)?;
        for (range, held) in self.held(Extent::new(0, self.size)) {
            let mut rest = bytes(range);
            while !rest.is_empty() {
                let now = rest.len.min(STEP);
                let part = &mut buffer[..usize::try_from(now).unwrap_or(0)];
                self.care.read(&self.layers[held], rest.offset, part)?;
                write_sparse(out, rest.offset, part)?;
                rest = Extent::new(rest.offset + now, rest.len - now);
                progress(rest.offset, self.size);
            }
        }
        progress(self.size, self.size);
        self.check_lasting()?;
        Ok(out.sync_all()?)
    }
}

/// Looks again where the names are just moving.
fn patiently<T>(mut look: impl FnMut() -> Result<T, OpenError>) -> Result<T, OpenError> {
    let mut looks = 1;
    loop {
        match look() {
            Err(OpenError::Damaged { .. } | OpenError::Io { .. }) if looks < LOOKS => looks += 1,
            done => return done,
        }
        std::thread::sleep(LOOK);
    }
}

/// Fails for a directory that is not the whole volume. `true`: the records are valid, zero maps count.
pub(super) fn check_usable(records: &Records<'_>, tree: &Tree) -> Result<bool, OpenError> {
    match owner(records)? {
        Owner::Ours { .. } if records.load::<Rebuild>()?.is_some() => {
            Err(damaged(records.directory, Damage::Rebuilding))
        }
        Owner::Ours { identity, .. } => {
            Known::check_closed(records.directory, identity.volume, tree)?;
            Ok(true)
        }
        Owner::Other => super::adopt::check(records.directory, tree).map(|()| false),
    }
}

/// Notes why a directory is not the whole volume, as far as these layers go. `true`: zero maps count.
fn note_unusable(
    records: &Records<'_>,
    tree: &Tree,
    layers: &[&LayerFile],
    care: &Care,
) -> Result<bool, OpenError> {
    let path = records.directory;
    let identity = match identified(records) {
        Ok(Some(identity)) => identity,
        Ok(None) => {
            let usable = super::adopt::check(path, tree).map(|()| false);
            return usable.or_else(|err| care.pass(EVERYTHING, err, tree.recovered));
        }
        // Where the identity is not to be read, what is there is taken for what this program has left.
        Err(err) => return care.pass(EVERYTHING, err, true),
    };
    if records.load::<Rebuild>().or_else(|err| care.pass(EVERYTHING, err, None))?.is_some() {
        care.pass(EVERYTHING, damaged(path, Damage::Rebuilding), ())?;
    }
    Known::check_layers(path, identity.volume, &mut layers.iter().copied(), care)?;
    let closed = records.load::<Closed>().or_else(|err| care.pass(EVERYTHING, err, None))?;
    for file in closed.filter(|closed| closed.volume == identity.volume).iter().flat_map(|c| &c.files) {
        if layers.iter().any(|layer| layer.file == file.name) && !is_still(path, file)? {
            care.note_changed(&file.name);
        }
    }
    Ok(true)
}

/// The place of the snapshot, or of the head.
pub(super) fn find(path: &Path, tree: &Tree, snapshot: Option<&str>) -> Result<usize, OpenError> {
    let Some(name) = snapshot.filter(|name| !name.is_empty()) else { return Ok(tree.layers.len() - 1) };
    tree.layers.iter().position(|l| l.name == name).ok_or_else(|| {
        let names: Vec<&str> =
            tree.layers.iter().map(|l| l.name.as_str()).filter(|n| !n.is_empty()).collect();
        let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        OpenError::NoSnapshot { dir: path.to_owned(), name: name.to_owned(), known }
    })
}

pub(super) fn open_layer(
    path: &Path,
    files: &Files<'_>,
    layer: &LayerFile,
    ours: bool,
    care: &Care,
) -> Result<LayerParts, OpenError> {
    let file = files.file(path, layer)?;
    let id = disk::id(&file, LAYER_ATTRIBUTE).map_err(failed("reading", path))?.filter(|_| ours);
    let size = files.tree.volume.size();
    let zero = match id {
        None => None,
        Some(id) if care.is_rescue() => rescue_zero_map(path, id, &layer.file, size, care)?,
        Some(id) => {
            let map = zero_maps(path)?.remove(&id);
            let map = map.ok_or_else(|| damaged(path, Damage::ZeroMissing(layer.file.clone())))?;
            Some(load_zero_map(path, id, &map, size, false)?)
        }
    };
    Ok(LayerParts {
        name: Some(layer.name.clone()),
        file: Arc::clone(&file),
        length: layer.length,
        zero,
        image: None,
    })
}

/// What can be read of a layer's zero map.
fn rescue_zero_map(
    path: &Path,
    id: Id,
    layer: &str,
    size: u64,
    care: &Care,
) -> Result<Option<ZeroMap>, OpenError> {
    let map = path.join(ENGINE).join(zero::file_name(id));
    let name = format!("engine/{}", zero::file_name(id));
    let Ok(file) = disk::open_layer(&map, false, false) else {
        care.note_zeroes(Extent::new(0, size), format!("the zero map of {layer}"));
        return Ok(None);
    };
    let mut bad = |_, told: Range<u64>| {
        care.note_zeroes(bytes(told), name.clone());
        Ok(())
    };
    match ZeroMap::load_beyond(id, Arc::new(file), size / BLOCK, &mut bad) {
        Ok(map) => Ok(Some(map)),
        Err(LoadError::Damaged(damage)) => Err(damaged(path, damage)),
        Err(LoadError::Io(source)) => Err(failed("reading", &map)(source)),
    }
}

/// Writes the blocks that are not zero.
pub(super) fn write_sparse(out: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    const STEP: usize = 4096;
    let mut start = 0;
    while start < bytes.len() {
        let zero = |at: usize| bytes[at..(at + STEP).min(bytes.len())].iter().all(|b| *b == 0);
        let mut end = start;
        while end < bytes.len() && !zero(end) {
            end = (end + STEP).min(bytes.len());
        }
        if end > start {
            out.write_all_at(&bytes[start..end], offset + start as u64)?;
            start = end;
        } else {
            start += STEP;
        }
    }
    Ok(())
}
