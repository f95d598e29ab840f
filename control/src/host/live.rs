//! Which root a volume is live under: /dev/longhorn and /run/longhorn are shared by all roots of a host.
//!
//! An engine holds `/run/longhorn/VOLUME.engine.lock` as long as it lives, so a host never runs two engines of one volume name.
//! While the engine is being started again nobody holds the lock; the root named in the file then still owns the name as
//! long as its instance manager remembers the engine.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Root, engine_name};

/// How often a held lock is tried again.
const RETRY: Duration = Duration::from_millis(20);

/// What is written into a held lock.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Holder {
    root: PathBuf,
    pid: u32,
}

/// Why a volume's name cannot be used on this host now.
#[derive(Debug, Error)]
pub enum LiveError {
    /// Another root runs a volume of that name.
    #[error("a volume {volume} is live under the root {}: stop it there (longhornctl --root {} down {volume}), or use another name", root.display(), root.display())]
    Elsewhere {
        /// The volume.
        volume: String,
        /// The root that owns the name.
        root: PathBuf,
    },
    /// The engine of the same root has not ended.
    #[error("the engine of volume {volume} has not ended{}: stop it, then try again", pid.map(|pid| format!(" (process {pid})")).unwrap_or_default())]
    Running {
        /// The volume.
        volume: String,
        /// The engine's process, if it is known.
        pid: Option<u32>,
    },
    /// The lock file cannot be used.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// The directories that all roots of a host share.
#[derive(Clone, Debug)]
pub struct LiveDirs {
    run: PathBuf,
}

impl Default for LiveDirs {
    fn default() -> Self {
        Self { run: PathBuf::from(super::RUN) }
    }
}

/// Held by a volume's engine as long as it lives. Dropped, it takes its file away, so that names do not pile up; a killed
/// engine leaves it behind, with the root that the name still belongs to.
#[derive(Debug)]
pub struct LiveLock {
    _file: Flock<File>,
    path: PathBuf,
}

impl Drop for LiveLock {
    fn drop(&mut self) {
        // Still locked: nobody else can have put another file there. One that stays is no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl LiveDirs {
    /// Directories of a test's own.
    pub fn below(dir: &Path) -> Self {
        Self { run: dir.to_owned() }
    }

    /// Refuses a volume whose name another root uses.
    ///
    /// # Errors
    /// `Elsewhere`, `Io`.
    pub fn check_free(&self, volume: &str, root: &Root) -> Result<(), LiveError> {
        let path = self.lock_path(volume);
        let file = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(LiveError::Io { path, source }),
        };
        let (file, held) = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(free) => (free.unlock().map_err(|(_, errno)| io_at(&path, errno.into()))?, false),
            Err((file, Errno::EWOULDBLOCK)) => (file, true),
            Err((_, errno)) => return Err(io_at(&path, errno.into())),
        };
        match read_holder(&file) {
            Some(holder) if holder.root != root.path() && (held || owns(&holder.root, volume)) => {
                Err(LiveError::Elsewhere { volume: volume.to_owned(), root: holder.root })
            }
            _ => Ok(()),
        }
    }

    /// Takes the volume's name for this process, waiting up to `patience` for an engine of the same root to end.
    ///
    /// # Errors
    /// [`LiveError`].
    pub fn acquire(&self, volume: &str, root: &Root, patience: Duration) -> Result<LiveLock, LiveError> {
        std::fs::create_dir_all(&self.run).map_err(|e| io_at(&self.run, e))?;
        let path = self.lock_path(volume);
        let deadline = Instant::now() + patience;
        loop {
            self.check_free(volume, root)?;
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path);
            match Flock::lock(file.map_err(|e| io_at(&path, e))?, FlockArg::LockExclusiveNonblock) {
                // The one before took the file away between our opening and our locking it.
                Ok(file) if !is_at(&file, &path) => {}
                Ok(file) => {
                    let holder = Holder { root: root.path().to_owned(), pid: std::process::id() };
                    write_holder(&file, &holder).map_err(|e| io_at(&path, e))?;
                    return Ok(LiveLock { _file: file, path });
                }
                Err((file, Errno::EWOULDBLOCK)) if Instant::now() >= deadline => {
                    // One that has just taken the lock may not have said so yet.
                    let pid = read_holder(&file).map(|holder| holder.pid).filter(|pid| is_alive(*pid));
                    return Err(LiveError::Running { volume: volume.to_owned(), pid });
                }
                Err((_, Errno::EWOULDBLOCK)) => std::thread::sleep(RETRY),
                Err((_, errno)) => return Err(io_at(&path, errno.into())),
            }
        }
    }

    /// Takes away what a killed engine of this root has left of the volume's name, which will not be started again. What is in use, or
    /// another root's, stays.
    pub fn forget(&self, volume: &str, root: &Root) {
        let (path, socket) = (self.lock_path(volume), self.nbd_socket(volume));
        // The socket may have outlived the lock: it is removed under one all the same, or it might be the next engine's.
        let is_left = socket.symlink_metadata().is_ok();
        let file =
            OpenOptions::new().read(true).write(true).create(is_left).truncate(false).mode(0o600).open(&path);
        let Ok(file) = file else { return };
        let Ok(file) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { return };
        if is_at(&file, &path) && read_holder(&file).is_none_or(|holder| holder.root == root.path()) {
            // What stays is no harm.
            let _ = std::fs::remove_file(&socket);
            let _ = std::fs::remove_file(&path);
        }
    }

    /// Where the volume's engine serves NBD to this host. Who listens there has the volume's name.
    pub fn nbd_socket(&self, volume: &str) -> PathBuf {
        self.run.join(format!("{volume}.nbd.sock"))
    }

    /// The directory that everything in it is made in.
    pub fn path(&self) -> &Path {
        &self.run
    }

    fn lock_path(&self, volume: &str) -> PathBuf {
        self.run.join(format!("{volume}.engine.lock"))
    }
}

/// True if the open file is the one that stands at the path.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(there)) = (file.metadata(), std::fs::metadata(path)) else { return false };
    (open.dev(), open.ino()) == (there.dev(), there.ino())
}

/// True if the instance manager of that root still means to run the volume's engine.
fn owns(root: &Path, volume: &str) -> bool {
    Root::at(root).is_ok_and(|root| root.process(&engine_name(volume)).exists())
}

/// True if there is such a process, and it is no zombie.
fn is_alive(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}

/// What the file says; nothing if it was never held or its writer died while writing.
fn read_holder(mut file: &File) -> Option<Holder> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(16 << 10).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

fn write_holder(mut file: &File, holder: &Holder) -> io::Result<()> {
    let text = serde_json::to_vec(holder)?;
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(&text)
}

fn io_at(path: &Path, source: io::Error) -> LiveError {
    LiveError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Host {
        _dir: tempfile::TempDir,
        live: LiveDirs,
        a: Root,
        b: Root,
    }

    fn host() -> Host {
        let dir = tempfile::tempdir().unwrap();
        let live = LiveDirs::below(&dir.path().join("run"));
        let root = |name| {
            let root = Root::at(&dir.path().join(name)).unwrap();
            root.create().unwrap();
            root
        };
        Host { a: root("a"), b: root("b"), live, _dir: dir }
    }

    #[test]
    fn the_socket_of_a_name_is_forgotten_by_whose_it_is() {
        let h = host();
        let socket = h.live.nbd_socket("demo");
        // Whether its engine has left the lock or not.
        for leaves_lock in [false, true] {
            let held = h.live.acquire("demo", &h.a, Duration::ZERO).unwrap();
            std::fs::write(&socket, "").unwrap();
            for root in [&h.a, &h.b] {
                h.live.forget("demo", root);
                assert!(socket.exists(), "an engine lives");
            }
            let lock = std::fs::read(h.live.lock_path("demo")).unwrap();
            drop(held);
            if leaves_lock {
                std::fs::write(h.live.lock_path("demo"), lock).unwrap();
                h.live.forget("demo", &h.b);
                assert!(socket.exists(), "the other root's engine may come back");
            }
            h.live.forget("demo", &h.a);
            assert!(!socket.exists() && !h.live.lock_path("demo").exists());
        }
    }

    #[test]
    fn a_live_volume_is_refused_under_another_root() {
        let h = host();
        h.live.check_free("demo", &h.a).unwrap();
        let held = h.live.acquire("demo", &h.a, Duration::ZERO).unwrap();
        h.live.check_free("demo", &h.a).unwrap();
        for refused in [
            h.live.check_free("demo", &h.b).unwrap_err(),
            h.live.acquire("demo", &h.b, Duration::ZERO).unwrap_err(),
        ] {
            assert!(matches!(&refused, LiveError::Elsewhere { root, .. } if root == h.a.path()), "{refused}");
        }
        h.live.acquire("other", &h.b, Duration::ZERO).unwrap();
        drop(held);
        h.live.acquire("demo", &h.b, Duration::ZERO).unwrap();
    }

    #[test]
    fn one_engine_at_a_time() {
        let h = host();
        let first = h.live.acquire("demo", &h.a, Duration::ZERO).unwrap();
        let refused = h.live.acquire("demo", &h.a, Duration::from_millis(50)).unwrap_err();
        assert!(matches!(refused, LiveError::Running { pid, .. } if pid == Some(std::process::id())));
        // The file still names the engine before it, which is dead.
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        let holder = Holder { root: h.a.path().to_owned(), pid: dead.id() };
        write_holder(&File::options().write(true).open(h.live.lock_path("demo")).unwrap(), &holder).unwrap();
        let refused = h.live.acquire("demo", &h.a, Duration::ZERO).unwrap_err();
        assert!(!refused.to_string().contains("process"), "{refused}");
        drop(first);
        h.live.acquire("demo", &h.a, Duration::ZERO).unwrap();
    }

    #[test]
    fn a_clean_end_leaves_no_file_and_the_next_one_holds_a_file_that_is_there() {
        let h = host();
        for _ in 0..2 {
            let held = h.live.acquire("demo", &h.a, Duration::ZERO).unwrap();
            let second = h.live.acquire("demo", &h.a, Duration::ZERO);
            assert!(matches!(second, Err(LiveError::Running { .. })));
            drop(held);
            assert!(!h.live.lock_path("demo").exists());
        }
        let path = h.live.lock_path("demo");
        std::fs::write(&path, "").unwrap();
        let gone = File::open(&path).unwrap();
        assert!(is_at(&gone, &path));
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(!is_at(&gone, &path));
    }

    #[test]
    fn an_engine_between_two_lives_keeps_its_name_until_its_manager_forgets_it() {
        let h = host();
        let killed = h.live.acquire("demo", &h.a, Duration::ZERO).unwrap();
        let left = std::fs::read(h.live.lock_path("demo")).unwrap();
        drop(killed);
        std::fs::write(h.live.lock_path("demo"), left).unwrap();
        let remembered = h.a.process(&engine_name("demo"));
        std::fs::write(&remembered, "{}").unwrap();
        assert!(matches!(h.live.check_free("demo", &h.b), Err(LiveError::Elsewhere { .. })));
        h.live.check_free("demo", &h.a).unwrap();
        std::fs::remove_file(&remembered).unwrap();
        h.live.check_free("demo", &h.b).unwrap();
    }

    #[test]
    fn what_a_killed_engine_left_is_taken_away_and_nobody_elses() {
        let h = host();
        let path = h.live.lock_path("demo");
        let held = h.live.acquire("demo", &h.a, Duration::ZERO).unwrap();
        let left = std::fs::read(&path).unwrap();
        h.live.forget("demo", &h.a);
        assert!(path.exists(), "an engine holds it");
        drop(held);
        std::fs::write(&path, &left).unwrap();
        h.live.forget("demo", &h.b);
        assert!(path.exists(), "it is another root's");
        h.live.forget("demo", &h.a);
        assert!(!path.exists());
        h.live.forget("demo", &h.a);
        // Its writer died before it had said whose it is.
        std::fs::write(&path, "").unwrap();
        h.live.forget("demo", &h.b);
        assert!(!path.exists());
    }
}
