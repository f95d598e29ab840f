//! Deletes what takes up space, and says how far it is.
//!
//! A file system that tells its disk of each extent that is freed (ext4 mounted with `discard`) waits for the disk each time:
//! a layer in many extents takes minutes. Removed at once it would be one system call, of which nobody sees how far it is and
//! which no signal interrupts.

use std::fs::{self, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;

use crate::progress::Progress;

/// Space given back in one step, at the least.
const STEP: u64 = 4 << 20;

/// Steps for one file, at the most.
const STEPS_MAX: u64 = 1024;

/// Files being deleted, and how much space of theirs has been given back.
pub(super) struct Erasure {
    progress: Progress,
    done: u64,
    of: u64,
}

impl Erasure {
    /// For what lies in these directories.
    pub(super) fn of<'a>(directories: impl IntoIterator<Item = &'a Path>) -> Self {
        let of = directories.into_iter().map(allocated_below).sum();
        Self { progress: Progress::of_bytes("deleting"), done: 0, of }
    }

    /// Deletes a directory with all that is in it. Links are removed, and not what they lead to.
    ///
    /// # Errors
    /// The system's; `NotFound` if it is not there.
    pub(super) fn tree(&mut self, directory: &Path) -> io::Result<()> {
        if fs::symlink_metadata(directory)?.is_symlink() {
            return fs::remove_file(directory);
        }
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                self.tree(&entry.path())?;
            } else {
                self.file(&entry.path())?;
            }
        }
        fs::remove_dir(directory)
    }

    /// Deletes a file.
    ///
    /// # Errors
    /// The system's; `NotFound` if it is not there.
    pub(super) fn file(&mut self, path: &Path) -> io::Result<()> {
        let meta = fs::symlink_metadata(path)?;
        let before = self.done;
        // What has another name somewhere keeps its bytes there.
        if meta.is_file() && meta.nlink() == 1 && allocated(&meta) > STEP {
            self.shorten(path, &meta)?;
        }
        fs::remove_file(path)?;
        self.done = before + allocated(&meta);
        self.progress.at(self.done.min(self.of), self.of);
        Ok(())
    }

    /// Gives the space of a file back from its end on, step by step.
    fn shorten(&mut self, path: &Path, meta: &Metadata) -> io::Result<()> {
        let (before, all) = (self.done, allocated(meta));
        let file = OpenOptions::new().write(true).custom_flags(OFlag::O_NOFOLLOW.bits()).open(path)?;
        let steps = (all / STEP).clamp(1, STEPS_MAX);
        for step in (1..steps).rev() {
            file.set_len(meta.len() / steps * step)?;
            self.done = before + all.saturating_sub(allocated(&file.metadata()?));
            self.progress.at(self.done.min(self.of), self.of);
        }
        Ok(())
    }
}

/// Bytes of disk that a file takes up.
fn allocated(meta: &Metadata) -> u64 {
    meta.blocks() * 512
}

/// The same of all files below a directory; what cannot be looked at is nothing.
fn allocated_below(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => allocated_below(&entry.path()),
            Ok(meta) => allocated(&meta),
            Err(_) => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn filled(path: &Path, len: usize) {
        fs::write(path, vec![7; len]).unwrap();
    }

    #[test]
    fn a_directory_goes_with_all_that_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let replica = dir.path().join("replica");
        fs::create_dir_all(replica.join("engine")).unwrap();
        filled(&replica.join("volume-head-000.img"), 9 << 20);
        filled(&replica.join("engine/intent"), 5000);
        let mut erasure = Erasure::of([replica.as_path()]);
        assert!(erasure.of >= (9 << 20) + 5000, "{}", erasure.of);
        erasure.tree(&replica).unwrap();
        assert!(!replica.exists());
        assert_eq!(erasure.done, erasure.of);
        assert_eq!(erasure.tree(&replica).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_large_file_is_shortened_before_it_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layer");
        filled(&path, 10 << 20);
        let mut erasure = Erasure::of([dir.path()]);
        let meta = fs::metadata(&path).unwrap();
        erasure.shorten(&path, &meta).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 5 << 20);
        assert!(erasure.done > 0 && erasure.done < erasure.of, "{} of {}", erasure.done, erasure.of);
    }

    #[test]
    fn bytes_that_have_another_name_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (kept, replica) = (dir.path().join("kept"), dir.path().join("replica"));
        fs::create_dir(&replica).unwrap();
        filled(&kept, 9 << 20);
        fs::hard_link(&kept, replica.join("hard")).unwrap();
        let other = dir.path().join("other");
        filled(&other, 9 << 20);
        symlink(&other, replica.join("soft")).unwrap();
        let link = dir.path().join("link");
        symlink(dir.path(), &link).unwrap();
        let mut erasure = Erasure::of([replica.as_path()]);
        erasure.tree(&replica).unwrap();
        erasure.tree(&link).unwrap();
        assert!(!replica.exists() && !link.is_symlink());
        assert_eq!(
            (fs::metadata(kept).unwrap().len(), fs::metadata(other).unwrap().len()),
            (9 << 20, 9 << 20)
        );
    }
}
