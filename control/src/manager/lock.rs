//! What makes a manager the only one of its root: a lock on a file, for as long as anything of this manager is left that changes something
//! below the root.
//!
//! A lock is on the file and not on its path: whoever finds none there, or another one, may begin beside this manager. So it is looked at
//! now and then. Where nothing is in its place it is taken anew; a manager that ended would take its processes along where it is the
//! command of a container. It ends where another manager may have begun, which is so if another file is there or somebody else's socket; and
//! where its own socket is gone, too, so that nobody reaches it.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::{ManagerError, io_error};
use crate::host::{Root, is_at};

/// The lock, held.
#[derive(Debug)]
pub(super) struct ManagerLock {
    path: PathBuf,
    /// What the file says: which process it is, and in a second line where it obeys whoever reaches it.
    said: String,
    file: Mutex<Flock<File>>,
}

/// A socket as it was bound: who begins after that puts another one in its place.
#[derive(Debug)]
pub(super) struct Bound {
    path: PathBuf,
    inode: (u64, u64),
}

impl Bound {
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), inode: inode(&std::fs::symlink_metadata(path)?) })
    }

    /// True if it is where it was: nobody reaches one that was removed, and another one is somebody else's.
    fn is_there(&self) -> bool {
        std::fs::symlink_metadata(&self.path).is_ok_and(|there| inode(&there) == self.inode)
    }
}

fn inode(of: &Metadata) -> (u64, u64) {
    (of.dev(), of.ino())
}

impl ManagerLock {
    /// Makes this the only instance manager of the root.
    pub(super) fn take(root: &Root, open_to_all: Option<SocketAddr>) -> Result<Self, ManagerError> {
        let path = root.manager_lock();
        let failed = |e| io_error(path.display(), e);
        let said = match open_to_all {
            Some(address) => format!("{}\n{address}\n", std::process::id()),
            None => format!("{}\n", std::process::id()),
        };
        let options = &mut OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        match Flock::lock(file.map_err(failed)?, FlockArg::LockExclusiveNonblock) {
            Ok(mut file) => {
                file.set_len(0).and_then(|()| file.write_all(said.as_bytes())).map_err(failed)?;
                Ok(Self { path, said, file: Mutex::new(file) })
            }
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut said = String::new();
                file.read_to_string(&mut said).map_err(failed)?;
                let pid = said.lines().next().unwrap_or_default().to_owned();
                Err(ManagerError::AlreadyRuns { root: root.path().to_owned(), pid })
            }
            Err((_, errno)) => Err(failed(errno.into())),
        }
    }

    /// Takes the lock anew where it was removed. `sockets`: those of this manager.
    ///
    /// # Errors
    /// [`ManagerError::LockLost`]: another manager may have begun, or has to, since nobody reaches this one. What cannot be looked at is there still, and what cannot be taken now
    /// is taken later.
    pub(super) fn keep(&self, sockets: &[Bound]) -> Result<(), ManagerError> {
        let lost = || Err(ManagerError::LockLost(self.path.clone()));
        let own = self.held().metadata().map(|own| inode(&own));
        match (std::fs::metadata(&self.path), own) {
            (Ok(there), Ok(own)) if inode(&there) != own => return lost(),
            (Err(e), _) if e.kind() == io::ErrorKind::NotFound => {}
            _ => return Ok(()),
        }
        if !sockets.iter().all(Bound::is_there) {
            return lost();
        }
        match self.take_anew() {
            Ok(true) => {
                tracing::warn!(lock = %self.path.display(), "the lock was removed, and is held again")
            }
            Ok(false) => return lost(),
            Err(e) => {
                tracing::error!(lock = %self.path.display(), error = %e, "the lock was removed and cannot be taken anew")
            }
        }
        Ok(())
    }

    fn held(&self) -> MutexGuard<'_, Flock<File>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts another file in its place, which is locked before anybody can find it. False: somebody else's came first.
    fn take_anew(&self) -> io::Result<bool> {
        let new = self.path.with_extension(format!("lock.{}", std::process::id()));
        let _ = std::fs::remove_file(&new);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&new)?;
        let locked = Flock::lock(file, FlockArg::LockExclusiveNonblock);
        let placed = locked.map_err(|(_, errno)| errno.into()).and_then(|mut file| {
            file.write_all(self.said.as_bytes())?;
            match std::fs::hard_link(&new, &self.path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
                linked => linked?,
            }
            // What was found under that name is what was locked.
            let is_it = is_at(&file, &self.path);
            *self.held() = file;
            Ok(is_it)
        });
        let _ = std::fs::remove_file(&new);
        placed
    }
}

#[cfg(test)]
mod tests {
    use super::super::predecessor::is_held;
    use super::*;

    fn root() -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        (dir, root)
    }

    #[test]
    fn a_lock_that_was_removed_is_held_again_and_says_the_same() {
        let (_dir, root) = root();
        let (path, address) = (root.manager_lock(), "127.0.0.1:8500".parse().unwrap());
        let lock = ManagerLock::take(&root, Some(address)).unwrap();
        let said = std::fs::read_to_string(&path).unwrap();
        for _ in 0..2 {
            std::fs::remove_file(&path).unwrap();
            lock.keep(&[]).unwrap();
            assert!(is_held(&path));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), said);
            let second = ManagerLock::take(&root, None).unwrap_err();
            assert!(matches!(second, ManagerError::AlreadyRuns { .. }), "{second}");
            assert!(matches!(lock.keep(&[]), Ok(())), "it is its own");
        }
        let left = std::fs::read_dir(path.parent().unwrap()).unwrap();
        assert!(left.into_iter().all(|file| !file.unwrap().file_name().to_string_lossy().contains(".lock.")));
        drop(lock);
        assert!(!is_held(&path));
    }

    #[test]
    fn a_lock_in_whose_place_another_one_is_is_lost_whoever_has_that() {
        let (_dir, root) = root();
        let path = root.manager_lock();
        let lock = ManagerLock::take(&root, None).unwrap();
        std::fs::remove_file(&path).unwrap();
        let next = ManagerLock::take(&root, None).unwrap();
        let lost = |kept: Result<(), ManagerError>| matches!(kept, Err(ManagerError::LockLost(_)));
        assert!(lost(lock.keep(&[])));
        drop(next);
        assert!(lost(lock.keep(&[])), "it has begun, and may have left anything");
        assert!(!lock.take_anew().unwrap(), "nobody's file is taken away");
    }

    #[test]
    fn a_lock_is_lost_where_another_manager_has_begun_and_its_lock_was_removed_too() {
        let (_dir, root) = root();
        let (path, socket) = (root.manager_lock(), root.manager_socket());
        let lock = ManagerLock::take(&root, None).unwrap();
        std::fs::write(&socket, "").unwrap();
        let bound = [Bound::at(&socket).unwrap()];
        std::fs::remove_file(&path).unwrap();
        std::fs::rename(&socket, socket.with_extension("old")).unwrap();
        std::fs::write(&socket, "").unwrap();
        assert!(matches!(lock.keep(&bound), Err(ManagerError::LockLost(_))));
        assert!(!path.exists(), "the other one finds its lock's path free");
        std::fs::remove_file(&socket).unwrap();
        assert!(matches!(lock.keep(&bound), Err(ManagerError::LockLost(_))), "nobody reaches it");
        std::fs::rename(socket.with_extension("old"), &socket).unwrap();
        lock.keep(&bound).unwrap();
        assert!(is_held(&path));
    }

    #[test]
    fn a_lock_that_cannot_be_taken_anew_now_is_taken_later() {
        let (_dir, root) = root();
        let path = root.manager_lock();
        let lock = ManagerLock::take(&root, None).unwrap();
        std::fs::remove_dir_all(root.run()).unwrap();
        lock.keep(&[]).unwrap();
        root.create().unwrap();
        lock.keep(&[]).unwrap();
        assert!(is_held(&path));
    }
}
