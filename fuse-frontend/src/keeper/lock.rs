//! The lock that says a keeper lives, and what the next one must know if it dies.
//!
//! The file is beside the socket. Its lock ends with the process, however that ends; its text names the loop device that
//! the keeper has bound. Both are of this boot: the directory is in /run.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::StartError;
use super::left_behind::LeftBehind;
use super::loop_device::LoopDevice;

/// A held lock.
#[derive(Debug)]
pub(super) struct Lock {
    file: Flock<File>,
    path: PathBuf,
    /// What the keeper before has bound.
    left_behind: Option<LoopDevice>,
}

impl Lock {
    /// Takes the lock that belongs to a socket.
    pub(super) fn take(socket: &Path) -> Result<Self, StartError> {
        let path = socket.with_extension("lock");
        let failed = |source| StartError::Io { what: format!("lock {}", path.display()), source };
        loop {
            let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
            let file = file.map_err(failed)?;
            let file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(file) => file,
                Err((_, Errno::EWOULDBLOCK)) => return Err(StartError::Running { lock: path }),
                Err((_, errno)) => return Err(failed(errno.into())),
            };
            // The keeper before may have removed the file between opening and locking.
            let own = file.metadata().map_err(failed)?.ino();
            if fs::metadata(&path).is_ok_and(|there| there.ino() == own) {
                let text = fs::read_to_string(&path).map_err(failed)?;
                return Ok(Self { file, left_behind: parse(&text), path });
            }
        }
    }

    /// Takes the lock of a keeper that died without removing it, or says what there is instead.
    pub(super) fn take_left_behind(socket: &Path) -> io::Result<Result<Self, LeftBehind>> {
        if !socket.with_extension("lock").try_exists()? {
            return Ok(Err(LeftBehind::Nothing));
        }
        match Self::take(socket) {
            Ok(lock) => Ok(Ok(lock)),
            Err(StartError::Running { .. }) => Ok(Err(LeftBehind::Alive)),
            Err(StartError::Io { source, .. }) => Err(source),
        }
    }

    /// The loop device that a keeper before this one has bound. It may be another's by now.
    pub(super) const fn recorded(&self) -> Option<LoopDevice> {
        self.left_behind
    }

    /// The same, if it is bound still as it was.
    pub(super) fn left_behind(&self) -> Option<LoopDevice> {
        self.recorded().filter(|device| device.is_bound())
    }

    /// Notes what this keeper has bound.
    pub(super) fn record(&self, device: LoopDevice) -> io::Result<()> {
        let text = format!("loop {} sequence {}\n", device.number, device.sequence);
        self.file.write_all_at(text.as_bytes(), 0)?;
        self.file.set_len(text.len() as u64)
    }

    /// Removes the file, at the keeper's orderly end.
    pub(super) fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn parse(text: &str) -> Option<LoopDevice> {
    let mut words = text.split_whitespace();
    let mut field = |name: &str| (words.next() == Some(name)).then(|| words.next()).flatten();
    let number = field("loop")?.parse().ok()?;
    let sequence = field("sequence")?.parse().ok()?;
    Some(LoopDevice { number, sequence })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn one_holds_it_and_the_next_learns_what_was_bound() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("x.sock");
        let first = Lock::take(&socket).unwrap();
        assert!(matches!(Lock::take(&socket), Err(StartError::Running { .. })));
        first.record(LoopDevice { number: 70_000, sequence: 123_456 }).unwrap();
        first.record(LoopDevice { number: 7, sequence: 9 }).unwrap();
        drop(first);
        let second = Lock::take(&socket).unwrap();
        assert_eq!(second.left_behind, Some(LoopDevice { number: 7, sequence: 9 }));
        second.remove();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    /// Whoever has opened a file that its holder removes meanwhile holds nothing by locking it.
    #[test]
    fn two_that_come_and_go_never_hold_it_both() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("x.sock");
        let holders = AtomicUsize::new(0);
        let come_and_go = || {
            let mut taken = 0;
            while taken < 400 {
                let Ok(lock) = Lock::take(&socket) else { continue };
                assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                taken += 1;
                // The other one may come now.
                std::thread::yield_now();
                holders.fetch_sub(1, Ordering::SeqCst);
                lock.remove();
            }
        };
        std::thread::scope(|scope| {
            let others = [scope.spawn(come_and_go), scope.spawn(come_and_go)];
            for other in others {
                other.join().unwrap();
            }
        });
    }

    #[test]
    fn nonsense_names_nothing() {
        for text in ["", "loop", "loop x sequence 1", "loop 1", "sequence 1 loop 1", "loop -1 sequence 1"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
