//! A volume from a snapshot: a new replica directory that holds the bytes of another one's snapshot.
//!
//! The new directory has one snapshot with all the bytes and an empty head over it, as a clone of Longhorn's has. Where
//! both lie on a file system that shares extents (XFS, btrfs) it takes no space until it is written; elsewhere the data
//! is copied. Holes stay holes. Until all of it is there the directory says that it is being rebuilt: nobody believes
//! half a clone.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use lh_block::Extent;
use lh_ring::sys;
use lh_wire::LayerInfo;
use thiserror::Error;

use super::data::Store;
use super::directory::{CreateOptions, Directory};
use super::disk;
use super::error::{ChainError, OpenError};
use super::load::bytes;
use super::meta::now;
use super::offline::{SnapshotView, write_sparse};
use super::pace::{Pace, Stopped};

/// Bytes copied at a time.
const STEP: u64 = 1 << 20;
/// How long a lock of the new directory is waited for: a process that is just being started by another thread shares it
/// for a moment.
const PASSING: Duration = Duration::from_secs(5);
/// Bytes shared at a time: the file system answers for each at once, and a stop is heard between two.
const SHARE: u64 = 1 << 30;

/// What a clone is made of.
#[derive(Clone, Debug, Default)]
pub struct CloneOptions {
    /// Name of the one snapshot that the new directory gets.
    pub snapshot: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
}

/// What a clone took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cloned {
    /// Bytes that both directories share.
    pub shared: u64,
    /// Bytes that were copied, or left as holes because they are zeroes.
    pub copied: u64,
}

/// Why there is no clone. What was made of it is removed again.
#[derive(Debug, Error)]
pub enum CloneError {
    /// The new directory cannot be made, or the snapshot does not last.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The snapshot's name or labels cannot be used.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// Stopped by its [`Pace`].
    #[error("stopped before it was done")]
    Stopped,
    /// The operating system refused something.
    #[error("cloning into {target}: {source}")]
    Io {
        /// The new directory.
        target: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl From<Stopped> for CloneError {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

/// Makes `target` (missing or empty) a replica directory of its own with the bytes of the view. `progress`: bytes of
/// the volume passed, and its size. It is durable, and closed cleanly, when this returns.
///
/// # Errors
/// [`CloneError`]; then `target` is as it was before.
pub fn clone_snapshot(
    view: &SnapshotView,
    target: &Path,
    options: &CloneOptions,
    pace: &Pace,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Cloned, CloneError> {
    let new = !target.exists();
    let create = CreateOptions { size: view.size(), backing: None, lock_wait: PASSING };
    let (directory, store) = Directory::create(target, &create)?;
    // Only its files are of use here.
    drop(store);
    let done = fill(view, directory, options, pace, progress);
    if done.is_err() {
        take_back(target, new);
    }
    done
}

/// Nobody else knows of the directory yet: it was empty, and locked since.
fn take_back(target: &Path, new: bool) {
    let _ = if new {
        std::fs::remove_dir_all(target)
    } else {
        std::fs::read_dir(target).and_then(|mut entries| {
            entries.try_for_each(|entry| {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    // What a file system keeps for itself is not ours.
                    if entry.file_name() == "lost+found" {
                        Ok(())
                    } else {
                        std::fs::remove_dir_all(entry.path())
                    }
                } else {
                    std::fs::remove_file(entry.path())
                }
            })
        })
    };
}

/// Makes a new directory what the view shows.
pub(super) fn fill(
    view: &SnapshotView,
    mut directory: Directory,
    options: &CloneOptions,
    pace: &Pace,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Cloned, CloneError> {
    let target = directory.path().display().to_string();
    let failed = |source| CloneError::Io { target: target.clone(), source };
    let snapshot = LayerInfo {
        name: options.snapshot.clone(),
        user_created: true,
        created: now(),
        labels: options.labels.clone(),
        length: view.size(),
        ..LayerInfo::default()
    };
    let head = LayerInfo { parent: snapshot.name.clone(), created: now(), ..LayerInfo::default() };
    let parts = directory.begin_rebuild(view.size(), &[snapshot, head])?;
    let mut store = Store::new(parts);
    let path = directory.path().join(&directory.layers[0].file_name);
    let file = disk::reopen(&directory.layers[0].file).map_err(failed)?;
    directory.fs.overwrites(&path).map_err(failed)?;
    let mut copy = Copy { to: &file, share: true, cloned: Cloned::default(), pace };
    for (range, held) in view.held(Extent::new(0, view.size())) {
        let extent = bytes(range);
        copy.part(view, held, extent, progress).map_err(|err| match err {
            Broken::Stopped(stopped) => stopped.into(),
            Broken::Io(source) => failed(source),
        })?;
    }
    progress(view.size(), view.size());
    let cloned = copy.cloned;
    view.check_lasting()?;
    directory.fs.sync_file(&file, &path).map_err(failed)?;
    directory.end_rebuild().map_err(failed)?;
    directory.close_clean(store.close()).map_err(failed)?;
    Ok(cloned)
}

enum Broken {
    Stopped(Stopped),
    Io(io::Error),
}

impl From<io::Error> for Broken {
    fn from(err: io::Error) -> Self {
        Self::Io(err)
    }
}

impl From<Stopped> for Broken {
    fn from(stopped: Stopped) -> Self {
        Self::Stopped(stopped)
    }
}

/// What carries bytes from layers into the new one.
struct Copy<'a> {
    to: &'a File,
    /// The file systems have not refused to share yet.
    share: bool,
    cloned: Cloned,
    pace: &'a Pace,
}

impl Copy<'_> {
    /// A range that one layer holds.
    fn part(
        &mut self,
        view: &SnapshotView,
        held: usize,
        extent: Extent,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Broken> {
        let layer = &view.layers[held];
        let mut buffer = Vec::new();
        let mut rest = extent;
        while !rest.is_empty() {
            let begun = Instant::now();
            let mut now = Extent::new(rest.offset, rest.len.min(SHARE));
            // A backing file may be a qcow2 image, or end within a block: that is copied.
            let plain = layer.image.is_none() && now.end() <= layer.length;
            let shared = plain && self.share && self.shared(&layer.file, now)?;
            if shared {
                self.cloned.shared += now.len;
                self.pace.step(0, begun)?;
            } else {
                now.len = now.len.min(STEP).min(view.size() - now.offset);
                buffer.resize(usize::try_from(now.len).unwrap_or(0), 0);
                view.read_at(now.offset, &mut buffer)?;
                write_sparse(self.to, now.offset, &buffer)?;
                self.cloned.copied += now.len;
                self.pace.step(now.len, begun)?;
            }
            progress(now.end(), view.size());
            rest = Extent::new(now.end(), rest.end() - now.end());
        }
        Ok(())
    }

    /// `false`: these files do not share; it is not asked again.
    fn shared(&mut self, from: &File, extent: Extent) -> io::Result<bool> {
        match sys::clone_range(self.to, extent.offset, from, extent.offset, extent.len) {
            Ok(()) => Ok(true),
            Err(err) => match err.raw_os_error() {
                Some(libc::EOPNOTSUPP | libc::EXDEV | libc::EINVAL | libc::ENOTTY | libc::ENOSYS) => {
                    self.share = false;
                    Ok(false)
                }
                _ => Err(err),
            },
        }
    }
}
