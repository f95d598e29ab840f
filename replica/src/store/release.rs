//! Making a directory fit for Longhorn: what our own files say is written into the layers, and our files go.
//!
//! Longhorn takes any extent of a layer as data, also one that was never written, and knows nothing of zero maps. So each
//! block that is zero by a mark alone becomes an unwritten extent, and every other unwritten extent a hole. In this order,
//! each step durable before the next:
//!
//! ```text
//! mark    the record `releasing`, if it was closed cleanly; volume.meta: Dirty (and Rebuilding, as long as a mark is
//!         set); no record of a clean close
//! write   the layers' extents; their checksum files go where the bytes may be others
//! switch  volume.meta without our id, neither Dirty nor Rebuilding
//! tidy    engine/identity, then everything else in engine/ but the fence
//! ```
//!
//! Before the switch the marks count and the extents do not: the directory is what it was, and a release begins anew.
//! From the switch on our files are void, and the directory is read as Longhorn reads it: the bytes are the same.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lh_block::{BLOCK, Extent, format_size};
use lh_ring::{Falloc, sys};
use thiserror::Error;

use super::ENGINE;
use super::data::Store;
use super::directory::{Directory, OpenOptions};
use super::disk::{self, Look};
use super::error::{Damage, OpenError, damaged};
use super::fs::Fs;
use super::id::Id;
use super::load::{self, blocks, bytes};
use super::locks::lock_directory;
use super::meta::{VOLUME_META, VolumeMeta};
use super::open::open;
use super::owner::{Owner, owner};
use super::ranges::RangeSet;
use super::record::{Fence, Identity, Record, Records, Releasing};
use super::room::is_full;
use super::survey::Survey;
use super::tree;

/// How long the locks of a process that is just ending are waited for.
const PASSING: Duration = Duration::from_secs(60);

/// Why a directory is not released. What was done stays, and is done again by the next try.
#[derive(Debug, Error)]
pub enum ReleaseError {
    /// It cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// An engine has begun a chain operation and not finished it.
    #[error("{}: a change of the snapshots is not finished: start the volume and stop it, then try again", .0.display())]
    Unfinished(PathBuf),
    /// It is half of a rebuild.
    #[error("{}: its rebuild did not end: it is not the volume", .0.display())]
    Rebuilding(PathBuf),
    /// The operating system refused something.
    #[error("releasing {}: {source}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// A directory that is about to be released: open, and locked against every other process.
#[derive(Debug)]
pub struct Release {
    path: PathBuf,
    fs: Fs,
    /// `None`: it is not ours any more, and only to be tidied.
    open: Option<(Directory, Store)>,
    /// Closed cleanly and not written since, but for a release that was broken off.
    clean: bool,
    need: u64,
}

impl Release {
    /// Opens a directory and looks what it needs. Repairs what a crash interrupted, as any opening does.
    ///
    /// # Errors
    /// [`ReleaseError`].
    pub fn prepare(path: &Path) -> Result<Self, ReleaseError> {
        Self::prepare_with(path, Fs::default())
    }

    pub(super) fn prepare_with(path: &Path, fs: Fs) -> Result<Self, ReleaseError> {
        if let Owner::Other = owner(&Records { directory: path })? {
            return Self::released_before(path, fs);
        }
        let (directory, store) = open(path, &OpenOptions { lock_wait: PASSING }, fs.clone())?;
        let state = directory.state();
        if state.rebuilding {
            return Err(ReleaseError::Rebuilding(path.to_owned()));
        }
        if state.prepared.is_some() {
            return Err(ReleaseError::Unfinished(path.to_owned()));
        }
        let clean = state.clean || was_begun(&directory.records(), directory.identity.volume)?;
        let open = Some((directory, store));
        let mut release = Self { path: path.to_owned(), fs, open, clean, need: 0 };
        release.need = release.needed().map_err(|source| release.failed(source))?;
        Ok(release)
    }

    /// Past the switch. A directory that says it is not the volume was never past it.
    fn released_before(path: &Path, fs: Fs) -> Result<Self, ReleaseError> {
        let _lock = lock_directory(path, true, Instant::now() + PASSING)?;
        let tree = tree::load(path)?;
        if tree.volume.rebuilding || tree.recovered {
            return Err(damaged(path, Damage::Rebuilding).into());
        }
        Ok(Self { path: path.to_owned(), fs, open: None, clean: !tree.volume.dirty, need: 0 })
    }

    /// It is not ours any more, or never was: what is left to do changes nothing that Longhorn reads.
    pub const fn is_longhorns(&self) -> bool {
        self.open.is_none()
    }

    /// True if nobody has used it since that was found.
    pub fn is_as(&self, found: &Survey) -> bool {
        let epoch = self.open.as_ref().and_then(|(directory, _)| directory.epoch());
        self.clean == found.clean && epoch == found.epoch.as_ref()
    }

    /// Bytes that the file system must have free for it.
    pub const fn need(&self) -> u64 {
        self.need
    }

    /// The file system's number, and how many bytes are free there.
    ///
    /// # Errors
    /// The system's.
    pub fn free(&self) -> io::Result<(u64, u64)> {
        let directory = File::open(&self.path)?;
        Ok((directory.metadata()?.dev(), sys::file_system(&directory)?.available))
    }

    /// Carries it out. Durable when it returns; the locks are let go.
    ///
    /// # Errors
    /// [`ReleaseError::Io`].
    pub fn carry_out(mut self) -> Result<(), ReleaseError> {
        let done = match self.open.take() {
            Some((mut directory, store)) => self
                .write_out(&mut directory, &store)
                .and_then(|()| self.switch(&directory))
                .and_then(|()| self.tidy()),
            None => self.tidy(),
        };
        done.map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> ReleaseError {
        let source = if is_full(&source) {
            let text = format!("{} are needed: free some space, then release again", format_size(self.need));
            io::Error::new(source.kind(), text)
        } else {
            source
        };
        ReleaseError::Io { path: self.path.clone(), source }
    }

    fn needed(&self) -> io::Result<u64> {
        let Some((directory, store)) = &self.open else { return Ok(0) };
        let mut need = 0;
        for layer in &directory.layers {
            for zero in hiding(directory, store, &layer.name).iter() {
                let extent = bytes(zero);
                need += extent.len;
                for found in disk::extents(&layer.file, extent, Look::Synced) {
                    need -= found?.0.len;
                }
            }
        }
        Ok(need)
    }

    /// Makes the layers' extents say what the marks say.
    fn write_out(&self, directory: &mut Directory, store: &Store) -> io::Result<()> {
        directory.begin_release()?;
        for layer in &directory.layers {
            let path = self.path.join(&layer.file_name);
            let hiding = hiding(directory, store, &layer.name);
            let marked = marked(store, &layer.name);
            // What is not written and hides nothing is a hole, as is a mark with nothing below it.
            let mut holes = marked.clone();
            for extent in load::unwritten(&layer.file, layer.length)? {
                holes.insert(blocks(extent));
            }
            holes.subtract(&hiding);
            if !(marked.is_empty() && holes.is_empty()) {
                self.fs.remove(&self.path.join(format!("{}.checksum", layer.file_name)))?;
            }
            self.fs.overwrites(&path)?;
            for zero in hiding.iter() {
                make_unwritten(&layer.file, bytes(zero))?;
            }
            for hole in holes.iter() {
                disk::punch(&layer.file, bytes(hole))?;
            }
            self.fs.sync_file(&layer.file, &path)?;
        }
        self.fs.sync_directory(&self.path)
    }

    /// From here on it is Longhorn's.
    fn switch(&self, directory: &Directory) -> io::Result<()> {
        let volume =
            VolumeMeta { dirty: false, rebuilding: false, error: String::new(), ..directory.volume.clone() };
        let new = self.path.join(ENGINE).join("new-volume");
        self.fs.write(&new, &volume.encode(), None)?;
        self.fs.rename(&new, &self.path.join(VOLUME_META))?;
        self.fs.sync_directory(&self.path)?;
        self.fs.sync_directory(&self.path.join(ENGINE))
    }

    /// Our files are void, and go; the identity first, without which the others mean nothing. The fence stays: an engine
    /// of before is refused for ever.
    fn tidy(&self) -> io::Result<()> {
        let engine = self.path.join(ENGINE);
        if !engine.is_dir() {
            return Ok(());
        }
        self.fs.remove(&engine.join(Identity::NAME))?;
        self.fs.sync_directory(&engine)?;
        for entry in std::fs::read_dir(&engine)? {
            let entry = entry?;
            if entry.file_name() != Fence::NAME && !entry.file_type()?.is_dir() {
                self.fs.remove(&entry.path())?;
            }
        }
        self.fs.sync_directory(&engine)
    }
}

/// A release of it was begun and broken off, and nobody has written since: it is as a clean close has left it.
pub(super) fn was_begun(records: &Records<'_>, volume: Id) -> Result<bool, OpenError> {
    let Some(record) = records.load::<Releasing>()? else { return Ok(false) };
    Ok(record == Releasing::of(volume, records.load::<Fence>()?.as_ref()))
}

/// The layer's blocks that are zero by a mark.
fn marked(store: &Store, layer: &str) -> RangeSet {
    let held = store.layers.iter().find(|l| l.name.as_deref() == Some(layer));
    let zero = held.and_then(|l| Some((l.zero.as_ref()?, l.length)));
    zero.map(|(zero, length)| zero.zeroes(0..length / BLOCK)).unwrap_or_default()
}

/// Those that hide something: there is a layer below.
fn hiding(directory: &Directory, store: &Store, layer: &str) -> RangeSet {
    let lowest = directory.layers.iter().any(|l| l.name == layer && l.meta.parent.is_empty());
    if lowest && directory.volume.backing_file.is_empty() {
        return RangeSet::default();
    }
    marked(store, layer)
}

/// Makes the range read as zero and take its place in the file: an extent that was never written, or, where the file
/// system has no such thing, zeroes.
fn make_unwritten(file: &File, extent: Extent) -> io::Result<()> {
    match sys::fallocate(file, Falloc::ZeroRange, extent.offset, extent.len) {
        Err(err) if err.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        other => return other,
    }
    let file = disk::reopen(file)?;
    let zeroes = vec![0; 1 << 20];
    let mut rest = extent;
    while !rest.is_empty() {
        let now = rest.len.min(zeroes.len() as u64);
        file.write_all_at(&zeroes[..usize::try_from(now).unwrap_or(0)], rest.offset)?;
        rest = Extent::new(rest.offset + now, rest.len - now);
    }
    file.sync_data()
}
