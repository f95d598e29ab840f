//! The locks of a directory and of its layers' files: they say that a process is here, or was and has writes in flight.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::disk;
use super::error::{OpenError, failed};
use super::meta::{is_head, snapshot_name};

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
pub(super) fn lock_moved(path: &Path, locked: Locked, deadline: Instant) -> Result<Locked, OpenError> {
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
