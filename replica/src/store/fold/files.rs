//! Folding by hand: two files that belong to no open directory, without names and records.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use lh_block::{BLOCK, Extent};
use lh_ring::sys;
use thiserror::Error;

use super::super::ENGINE;
use super::super::disk::{self, Kind, Look};
use super::super::id::LAYER_ATTRIBUTE;
use super::super::zero;
use super::work::Buffer;

/// Why two files were not folded. But for [`FoldFilesError::Io`], nothing has changed.
#[derive(Debug, Error)]
pub enum FoldFilesError {
    /// No file, or not one of whole blocks.
    #[error("{0} is not a layer: it must be a plain file whose length is a multiple of 4096")]
    NoLayer(PathBuf),
    /// One file twice.
    #[error("{0} and {1} are the same file")]
    Same(PathBuf, PathBuf),
    /// A process holds the file.
    #[error("{0} is in use: stop the replica's process first")]
    InUse(PathBuf),
    /// Zero marks beside it say more than the file does.
    #[error(
        "{file} has zero marks in {}, which this does not carry: let the replica's process fold it",
        map.display()
    )]
    ZeroMarks {
        /// The layer.
        file: PathBuf,
        /// Its zero map.
        map: PathBuf,
    },
    /// The disk's.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

/// A layer's file that belongs to no open directory.
pub(in super::super) struct Layer {
    pub(in super::super) file: File,
    pub(in super::super) length: u64,
    /// Made by this program: extents that were never written are holes.
    pub(in super::super) ours: bool,
}

/// Opens a file that nobody uses, and keeps others from using it.
pub(in super::super) fn open(path: &Path, write: bool) -> Result<Layer, FoldFilesError> {
    let failed = |source| FoldFilesError::Io { what: format!("opening {}", path.display()), source };
    // Through the page cache: it is of no use to be faster than that by hand, and any file system will do.
    let file = disk::open_layer(path, write, false).map_err(|error| {
        if sys::NotPlain::is(&error) { FoldFilesError::NoLayer(path.to_owned()) } else { failed(error) }
    })?;
    let stat = file.metadata().map_err(failed)?;
    if !stat.len().is_multiple_of(BLOCK) {
        return Err(FoldFilesError::NoLayer(path.to_owned()));
    }
    if !sys::lock(&file, write).map_err(failed)? {
        return Err(FoldFilesError::InUse(path.to_owned()));
    }
    let id = disk::id(&file, LAYER_ATTRIBUTE).or_else(|e| match e.raw_os_error() {
        Some(libc::EOPNOTSUPP) => Ok(None),
        _ => Err(failed(e)),
    })?;
    if let Some(id) = id {
        let map = path.parent().unwrap_or(Path::new("")).join(ENGINE).join(zero::file_name(id));
        let length = match map.metadata() {
            Ok(stat) => stat.len(),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => 0,
            // It may be there.
            Err(e) => return Err(failed(e)),
        };
        if zero::may_have_marks(length) {
            return Err(FoldFilesError::ZeroMarks { file: path.to_owned(), map });
        }
    }
    Ok(Layer { file, length: stat.len(), ours: id.is_some() })
}

/// Copies everything that the layer `child` holds into the layer below it, `parent`, which then holds what both held
/// together and is as long as the longer of them. The child stays. `progress` is told of bytes done and bytes in all.
/// Interrupted, it is begun again.
///
/// An extent of the child that was never written counts as a hole in a layer of this program, and as zeroes in any other:
/// so Longhorn reads them.
///
/// # Errors
/// [`FoldFilesError`].
pub fn fold_files(
    child: &Path,
    parent: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), FoldFilesError> {
    use std::os::unix::fs::MetadataExt;
    let same = |a: &std::fs::Metadata, b: &std::fs::Metadata| a.ino() == b.ino() && a.dev() == b.dev();
    if let (Ok(a), Ok(b)) = (child.metadata(), parent.metadata())
        && same(&a, &b)
    {
        return Err(FoldFilesError::Same(child.to_owned(), parent.to_owned()));
    }
    let (from, to) = (open(child, false)?, open(parent, true)?);
    let failed = |source| FoldFilesError::Io {
        what: format!("folding {} into {}", child.display(), parent.display()),
        source,
    };
    fold(&from, &to, progress).map_err(failed)
}

fn fold(from: &Layer, to: &Layer, progress: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
    let held = || {
        let counts = |kind| kind == Kind::Written || !from.ours;
        disk::extents(&from.file, Extent::new(0, from.length), Look::Synced)
            .filter(move |found| found.as_ref().map_or(true, |(_, kind)| counts(*kind)))
    };
    let mut total = 0;
    for found in held() {
        total += found?.0.len;
    }
    if to.length < from.length {
        to.file.set_len(from.length)?;
    }
    let (mut done, mut share, mut buffer) = (0, true, Buffer::default());
    let go_on = AtomicBool::new(false);
    progress(done, total);
    for found in held() {
        let (extent, kind) = found?;
        // Sharing turns what was never written into holes.
        let shared = share
            && kind == Kind::Written
            && sys::clone_range(&to.file, extent.offset, &from.file, extent.offset, extent.len).is_ok();
        share &= shared || kind != Kind::Written;
        if !shared {
            buffer.copy(&from.file, &to.file, extent, &go_on).map_err(|(_, e)| e)?;
        }
        done += extent.len;
        progress(done, total);
    }
    to.file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use lh_ring::Falloc;

    use super::*;

    fn layer(path: &Path, blocks: u64, held: &[(u64, u8)]) -> File {
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(blocks << 12).unwrap();
        held.iter().for_each(|(at, byte)| file.write_all_at(&[*byte; 4096], at << 12).unwrap());
        file
    }

    fn firsts(path: &Path) -> Vec<u8> {
        std::fs::read(path).unwrap().chunks(4096).map(|block| block[0]).collect()
    }

    #[test]
    fn the_childs_blocks_win_and_holes_stay_holes() {
        let place = tempfile::tempdir().unwrap();
        let (parent, child) = (place.path().join("p"), place.path().join("c"));
        drop(layer(&parent, 4, &[(0, 1), (1, 1)]));
        let held = layer(&child, 8, &[(1, 2), (5, 2)]);
        // Longhorn takes an extent that was never written for zeroes.
        sys::fallocate(&held, Falloc::Allocate, 0, 4096).unwrap();
        drop(held);
        let mut seen = Vec::new();
        fold_files(&child, &parent, &mut |done, total| seen.push((done, total))).unwrap();
        let zeroes_told =
            disk::extents(&File::open(&child).unwrap(), Extent::new(0, 4096), Look::Synced).count() > 0;
        assert_eq!(firsts(&parent), [if zeroes_told { 0 } else { 1 }, 2, 0, 0, 0, 2, 0, 0]);
        let (last, first) = (*seen.last().unwrap(), seen[0]);
        assert!(last.0 == last.1 && first.0 == 0 && last.1 >= 2 << 12, "{seen:?}");
        assert_eq!(sys::seek_data(File::open(&parent).unwrap(), 3 << 12).unwrap(), Some(5 << 12));
        // Twice is once.
        fold_files(&child, &parent, &mut |_, _| ()).unwrap();
        assert_eq!(firsts(&parent)[1..], [2, 0, 0, 0, 2, 0, 0]);
    }

    #[test]
    fn what_cannot_be_folded_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let (parent, child) = (place.path().join("p"), place.path().join("c"));
        drop(layer(&parent, 4, &[]));
        std::fs::write(&child, b"short").unwrap();
        let fold = || fold_files(&child, &parent, &mut |_, _| ());
        assert!(matches!(fold(), Err(FoldFilesError::NoLayer(_))));
        assert!(matches!(fold_files(&parent, &parent, &mut |_, _| ()), Err(FoldFilesError::Same(..))));
        std::fs::remove_file(&child).unwrap();
        let held = layer(&child, 4, &[(0, 1)]);
        // Whether there are marks is not known.
        let id = "0123456789abcdef0123456789abcdef";
        sys::set_xattr(&held, LAYER_ATTRIBUTE, id.as_bytes()).unwrap();
        std::fs::create_dir(place.path().join(ENGINE)).unwrap();
        let map = place.path().join(ENGINE).join(format!("zero-{id}"));
        std::os::unix::fs::symlink(&map, &map).unwrap();
        assert!(matches!(fold(), Err(FoldFilesError::Io { .. })));
        std::fs::remove_file(&map).unwrap();
        assert!(sys::lock(&held, true).unwrap());
        assert!(matches!(fold(), Err(FoldFilesError::InUse(_))));
    }
}
