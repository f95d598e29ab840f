//! A snapshot's layer, opened beside whoever serves the directory.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lh_block::Extent;

use super::super::ENGINE;
use super::super::checksum::Version;
use super::super::disk;
use super::super::error::{Damage, OpenError, damaged, failed};
use super::super::gather::Files;
use super::super::id::{Id, LAYER_ATTRIBUTE};
use super::super::load::{LayerParts, look_through};
use super::super::locks::open_layers;
use super::super::offline::{LOOK, LOOKS, check_usable, find, open_layer};
use super::super::record::{Creating, Records};
use super::super::rescue::Care;
use super::super::tree;

use super::ScrubError;

/// The layer of one snapshot. Nothing is locked: a snapshot does not change, and where a fold works on it after all, the
/// tasks notice and say so.
#[derive(Debug)]
pub struct SnapshotLayer {
    pub(super) snapshot: String,
    /// The replica directory.
    pub(super) directory: PathBuf,
    /// Zero map included.
    pub(super) parts: LayerParts,
    /// For reading from the disk itself, past the page cache, where the file system can.
    pub(super) disk: File,
    /// What its checksums are bound to; layers that came with an import and have no zero map have none.
    pub(super) id: Option<Id>,
    /// The directory is ours: an extent that was never written is a hole.
    pub(super) ours: bool,
    /// Ids of all layers.
    pub(super) live: Vec<Id>,
    pub(super) version: Version,
}

impl SnapshotLayer {
    /// Opens the layer of a snapshot, whether or not a process serves the directory.
    ///
    /// # Errors
    /// [`OpenError`], also for a directory that is not usable alone.
    pub fn open(directory: &Path, snapshot: &str) -> Result<Self, OpenError> {
        let mut looks = 1;
        loop {
            match Self::look(directory, snapshot) {
                // A process that works on its chain moves names about.
                Err(OpenError::Damaged { .. } | OpenError::Io { .. }) if looks < LOOKS => looks += 1,
                done => return done,
            }
            std::thread::sleep(LOOK);
        }
    }

    fn look(directory: &Path, snapshot: &str) -> Result<Self, OpenError> {
        let records = Records { directory };
        if records.load::<Creating>()?.is_some() {
            return Err(damaged(directory, Damage::Unfinished));
        }
        let opened = open_layers(directory)?;
        let tree = tree::load(directory)?;
        let ours = check_usable(&records, &tree)?;
        let place = find(directory, &tree, Some(snapshot).filter(|name| !name.is_empty()))?;
        let layer = &tree.layers[place];
        if layer.name.is_empty() {
            let (name, known) = (String::new(), "names for all of them".to_owned());
            return Err(OpenError::NoSnapshot { dir: directory.to_owned(), name, known });
        }
        let files = Files { tree: &tree, locked: &opened };
        let mut parts = open_layer(directory, &files, layer, ours, &Care::strict())?;
        look_through(&mut parts).map_err(failed("reading", directory))?;
        let path = directory.join(&layer.file);
        let disk = match disk::open_layer(&path, false, true) {
            Err(err) if err.raw_os_error() == Some(libc::EINVAL) => disk::open_layer(&path, false, false),
            other => other,
        };
        let disk = disk.map_err(failed("opening", &path))?;
        let version = Version::of(&disk).map_err(failed("reading", &path))?;
        if disk.metadata().map_err(failed("reading", &path))?.ino() != layer.inode {
            let moved = io::Error::other("it changed while it was being opened");
            return Err(failed("opening", &path)(moved));
        }
        let id_of = |file: &Arc<File>| disk::id(file, LAYER_ATTRIBUTE).map_err(failed("reading", directory));
        let id = id_of(&parts.file)?.filter(|_| ours);
        let live = opened.values().map(id_of).filter_map(Result::transpose).collect::<Result<_, _>>()?;
        Ok(Self {
            snapshot: layer.name.clone(),
            directory: directory.to_owned(),
            parts,
            disk,
            id,
            ours,
            live,
            version,
        })
    }

    /// Its name.
    pub fn snapshot(&self) -> &str {
        &self.snapshot
    }

    /// Its length in bytes: the volume's when it was the head.
    pub const fn length(&self) -> u64 {
        self.version.length
    }

    /// Bytes that its file takes: about what a task over the whole layer reads.
    ///
    /// # Errors
    /// The disk's.
    pub fn allocated(&self) -> io::Result<u64> {
        Ok(self.disk.metadata()?.blocks() * 512)
    }

    pub(super) fn engine(&self) -> PathBuf {
        self.directory.join(ENGINE)
    }

    pub(super) const fn whole(&self) -> Extent {
        Extent::new(0, self.version.length)
    }

    /// Fails if somebody has changed the file since it was opened.
    pub(super) fn check_unchanged(&self) -> Result<(), ScrubError> {
        let version = Version::of(&self.disk).map_err(super::failed("reading", &self.directory))?;
        if version == self.version { Ok(()) } else { Err(ScrubError::Changed(self.snapshot.clone())) }
    }
}

#[cfg(test)]
impl SnapshotLayer {
    pub(in super::super) const fn id_for_tests(&self) -> Option<Id> {
        self.id
    }

    pub(in super::super) const fn version_for_tests(&self) -> Version {
        self.version
    }
}
