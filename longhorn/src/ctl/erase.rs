//! Deletes what takes up space, and says how far it is.
//!
//! A file system that tells its disk of each extent that is freed (ext4 mounted with `discard`) waits for the disk each time:
//! a layer in many extents takes minutes. Removed at once it would be one system call, of which nobody sees how far it is and
//! which no signal interrupts.
//!
//! Whoever reads a replica meanwhile must not take what is gone for zeroes: directories that somebody has locked are left alone
//! ([`Alone`]), and what a reader without a lock asks for after its last byte goes before the first byte does.

use std::fs::{self, DirEntry, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};

use crate::progress::Progress;

/// How long a process that was just ended, or one that only looks at a directory, may still hold it.
const PASSING: Duration = Duration::from_secs(5);

/// Between two tries.
const AGAIN: Duration = Duration::from_millis(20);

/// Space given back in one step, at the least.
const STEP: u64 = 4 << 20;

/// Steps for one file, at the most.
const STEPS_MAX: u64 = 1024;

/// Directories of replicas that nobody else reads or writes, as long as this lives: exports and copies of what no process serves hold
/// a lock, and so does the process of a volume of another root that has the same directory.
#[derive(Debug)]
pub(super) struct Alone {
    _locks: Vec<Flock<File>>,
}

impl Alone {
    /// Waits a moment for who is just ending. In a directory that is not there is nobody.
    ///
    /// # Errors
    /// Somebody uses one of them; nothing has changed.
    pub(super) fn within<'a>(directories: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        let deadline = Instant::now() + PASSING;
        let mut locks = Vec::new();
        for directory in directories {
            // What cannot be opened is what cannot be deleted: that says why.
            let Ok(mut file) = File::open(directory) else { continue };
            loop {
                match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                    Ok(lock) => locks.push(lock),
                    Err((back, Errno::EWOULDBLOCK)) if Instant::now() < deadline => {
                        file = back;
                        std::thread::sleep(AGAIN);
                        continue;
                    }
                    Err((file, Errno::EWOULDBLOCK)) => bail!(
                        "{} is in use{}: wait until that is done, or stop it, then give the command again",
                        directory.display(),
                        holder(&file).map_or_else(String::new, |pid| format!(" by process {pid}"))
                    ),
                    // A file system without such locks.
                    Err(_) => {}
                }
                break;
            }
        }
        Ok(Self { _locks: locks })
    }
}

/// A process that holds the file's lock, by /proc/locks: "7: FLOCK  ADVISORY  READ 1234 fe:00:5678 0 EOF".
fn holder(file: &File) -> Option<u32> {
    let inode = file.metadata().ok()?.ino();
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "FLOCK").skip(3);
        let pid = words.next()?.parse().ok()?;
        let (_, number) = words.next()?.rsplit_once(':')?;
        (number.parse() == Ok(inode)).then_some(pid)
    })
}

/// Records of which each replica has one, by which what is left of it is known as a replica's.
const SIGNS: [&str; 2] = ["fence", "identity"];

/// What is in a directory, in the order in which it goes: first what says of a replica which snapshots it has, last by what it is
/// known.
pub(super) fn in_order(directory: &Path) -> io::Result<Vec<DirEntry>> {
    let mut entries = fs::read_dir(directory)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(|entry| {
        let is_sign = SIGNS.iter().any(|sign| entry.file_name() == *sign);
        (is_sign, entry.path().extension().is_none_or(|kind| kind != "meta"))
    });
    Ok(entries)
}

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
        for entry in in_order(directory)? {
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

    /// A reader without a lock asks the `.meta` files, after its last byte, whether what it has read was there.
    #[test]
    fn what_tells_of_snapshots_goes_before_their_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let names = [
            "volume-snap-a.img",
            "fence",
            "volume-snap-a.img.meta",
            "engine",
            "volume.meta",
            "volume-head-001.img",
        ];
        names.iter().for_each(|name| filled(&dir.path().join(name), 1));
        let order: Vec<_> = in_order(dir.path()).unwrap().iter().map(DirEntry::file_name).collect();
        assert_eq!(order.len(), names.len());
        let is_meta = |name: &std::ffi::OsString| name.to_str().unwrap().ends_with(".meta");
        assert!(order[..2].iter().all(is_meta) && !order[2..].iter().any(is_meta), "{order:?}");
        assert_eq!(order.last().unwrap(), "fence", "without it nobody knows whose the rest is");
    }

    #[test]
    fn a_directory_that_somebody_reads_is_left_alone() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let missing = dir.path().join("missing");
        let reader = Flock::lock(File::open(dir.path()).unwrap(), FlockArg::LockShared).unwrap();
        let refused = Alone::within([other.path(), dir.path()]).unwrap_err().to_string();
        let own = format!("{} is in use by process {}:", dir.path().display(), std::process::id());
        assert!(refused.contains(&own), "{refused}");
        drop(reader);
        let alone = Alone::within([other.path(), missing.as_path(), dir.path()]).unwrap();
        assert!(Flock::lock(File::open(dir.path()).unwrap(), FlockArg::LockSharedNonblock).is_err());
        drop(alone);
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
