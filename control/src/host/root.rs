//! Where everything lies below a root directory.

use std::io;
use std::path::{Path, PathBuf};

use lh_block::PROCESS_NAME_MAX;
use nix::unistd::{AccessFlags, access};
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::RUN;
use super::durable::create_dir_durably;

/// Longest path of a unix socket in bytes: `sun_path` has 108 with the final NUL (`unix(7)`).
const SOCKET_PATH_MAX: usize = 107;

/// Sockets whose path below the root would be too long lie here, below [`RUN`], under a name made from that path.
const SHORT_SOCKETS: &str = "sockets";

fn short_sockets() -> PathBuf {
    Path::new(RUN).join(SHORT_SOCKETS)
}

/// What is said of a root that cannot be named in text.
const NOT_UTF8: &str =
    "the path is not UTF-8, and records and addresses have to name it: use another directory as root";

/// Why a directory is none to keep volumes in, and what to do.
#[derive(Debug, Error)]
pub enum RootError {
    /// Something else has its name.
    #[error("{} cannot be used as a root: {} is no directory; name another with --root", root.display(), what.display())]
    NotADirectory {
        /// The root.
        root: PathBuf,
        /// What is in the way: the root or a name above it.
        what: PathBuf,
    },
    /// Its file system is not written to: mounted so, or since it has found itself damaged.
    #[error(
        "{} cannot be used as a root: its file system is read-only; mount it so that it can be written, or name another root with \
         --root",
        .0.display()
    )]
    ReadOnly(PathBuf),
    /// The system refused.
    #[error("{} cannot be used as a root: {source}; name another with --root", root.display())]
    Refused {
        /// The root.
        root: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl RootError {
    fn of(root: &Path, source: io::Error) -> Self {
        if source.kind() == io::ErrorKind::ReadOnlyFilesystem {
            return Self::ReadOnly(root.to_owned());
        }
        // A symbolic link to nothing is there, too.
        let in_the_way = root.ancestors().find(|path| path.symlink_metadata().is_ok());
        match in_the_way.filter(|path| !path.is_dir()) {
            Some(what) => Self::NotADirectory { root: root.to_owned(), what: what.to_owned() },
            None => Self::Refused { root: root.to_owned(), source },
        }
    }
}

/// A root directory and the places below it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Root {
    path: PathBuf,
}

impl Root {
    /// The root at `path`, which need not exist yet. Symbolic links in what exists are resolved, so that two spellings
    /// of one directory are one root.
    ///
    /// # Errors
    /// A relative path while the current directory is gone, a parent that may not be read, or a path that is not UTF-8: records and
    /// addresses have to name it.
    pub fn at(path: &Path) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        let mut missing = Vec::new();
        let mut existing = path.as_path();
        loop {
            match existing.canonicalize() {
                Ok(mut resolved) => {
                    resolved.extend(missing.iter().rev());
                    if resolved.to_str().is_none() {
                        return Err(io::Error::new(io::ErrorKind::InvalidInput, NOT_UTF8));
                    }
                    return Ok(Self { path: resolved });
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    let (Some(above), Some(name)) = (existing.parent(), existing.file_name()) else {
                        return Err(e);
                    };
                    missing.push(name);
                    existing = above;
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// The root at an absolute path of which nothing is looked at: for who may not see it.
    pub fn unresolved(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Makes the root and the directories below it that every use needs.
    ///
    /// # Errors
    /// [`RootError`].
    pub fn create(&self) -> Result<(), RootError> {
        self.make_directories().map_err(|source| RootError::of(&self.path, source))?;
        check_writable(&self.path).map_err(|source| RootError::of(&self.path, source))
    }

    fn make_directories(&self) -> io::Result<()> {
        for dir in [
            self.volumes(),
            self.replicas(),
            self.processes(),
            self.volume_locks(),
            self.logs(),
            self.engine_binaries(),
        ] {
            create_dir_durably(&dir)?;
        }
        make_socket_directory(&self.manager_socket())?;
        // Programs of an earlier version do not make it themselves. Whoever cannot is told so where a socket has to lie there.
        let _ = make_socket_directory(&self.relay_socket(&"v".repeat(PROCESS_NAME_MAX)));
        Ok(())
    }

    /// True if nothing can be written below the root, as it is mounted now.
    pub fn is_read_only(&self) -> bool {
        check_writable(&self.path).is_err_and(|e| e.kind() == io::ErrorKind::ReadOnlyFilesystem)
    }

    /// The directory itself, absolute.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// One directory per volume.
    pub fn volumes(&self) -> PathBuf {
        self.path.join("volumes")
    }

    /// A volume's record, key and authority.
    pub fn volume(&self, volume: &str) -> PathBuf {
        self.volumes().join(volume)
    }

    /// Which stay of a volume the devices on this host are of.
    pub fn stay(&self, volume: &str) -> PathBuf {
        self.volume(volume).join("stay")
    }

    /// What an iSCSI target of the volume keeps on this host: in the directory of its record, or, where the record is a cluster's, of
    /// its key.
    pub fn reservations(directory: &Path) -> PathBuf {
        directory.join("reservations")
    }

    /// A volume's key: 32 bytes.
    pub fn key(&self, volume: &str) -> PathBuf {
        self.volume(volume).join("key")
    }

    /// The replica directories made here.
    pub fn replicas(&self) -> PathBuf {
        self.path.join("replicas")
    }

    /// The directory of the replica `VOLUME-r-SUFFIX`.
    pub fn replica(&self, volume: &str, suffix: &str) -> PathBuf {
        self.replicas().join(format!("{volume}-{suffix}"))
    }

    /// What the instance manager remembers of its processes.
    pub fn processes(&self) -> PathBuf {
        self.run().join("processes")
    }

    /// What the instance manager remembers of the process of that name.
    pub fn process(&self, name: &str) -> PathBuf {
        self.processes().join(format!("{name}.json"))
    }

    /// The locks of [`super::VolumeLock`].
    pub(super) fn volume_locks(&self) -> PathBuf {
        self.run().join("volumes")
    }

    /// Held by the one instance manager of this root.
    pub fn manager_lock(&self) -> PathBuf {
        self.run().join("instance-manager.lock")
    }

    /// Held by the one manager of a cluster that acts on this root.
    pub fn cluster_manager_lock(&self) -> PathBuf {
        self.run().join("manager.lock")
    }

    /// The instance manager listens here.
    pub fn manager_socket(&self) -> PathBuf {
        self.socket("instance-manager.sock")
    }

    /// Where processes leave their listening sockets with the instance manager ([`crate::deposit`]).
    pub fn deposit_socket(&self) -> PathBuf {
        self.socket("listeners.sock")
    }

    /// A process's control socket (gRPC).
    pub fn control_socket(&self, name: &str) -> PathBuf {
        control_socket_beside(&self.data_socket(name))
    }

    /// A replica's data socket.
    pub fn data_socket(&self, name: &str) -> PathBuf {
        self.socket(&format!("{name}.sock"))
    }

    /// Where the engine of that name serves the volume to relays on this host.
    pub fn relay_socket(&self, name: &str) -> PathBuf {
        self.socket(&format!("{name}.relay.sock"))
    }

    /// Removes the sockets of a process of that name that is no more: one that was killed left them. What is left after
    /// this is no data, and stands in nobody's way.
    pub fn remove_sockets(&self, name: &str) {
        for socket in [self.control_socket(name), self.data_socket(name), self.relay_socket(name)] {
            let _ = std::fs::remove_file(socket);
        }
    }

    /// Made by an engine whose clients have lost something, for as long as none was told.
    pub fn loss_note(&self, volume: &str) -> PathBuf {
        self.run().join(format!("{volume}.lost"))
    }

    /// The logs.
    pub fn logs(&self) -> PathBuf {
        self.path.join("log")
    }

    /// The log of the process of that name; the older part has `.1` behind it.
    pub fn log(&self, name: &str) -> PathBuf {
        self.logs().join(format!("{name}.log"))
    }

    /// The only programs, besides our own, that an instance manager starts.
    pub fn engine_binaries(&self) -> PathBuf {
        self.path.join("engine-binaries")
    }

    /// The program of an image, in a folder named as Longhorn does: like the image, with `-` for what a file name has not.
    /// Longhorn's own engines, which take other words, lie one level above.
    pub fn engine_binary(&self, image: &str) -> PathBuf {
        self.engine_binaries().join("images").join(image.replace(['/', ':', '@'], "-")).join("longhorn")
    }

    /// True if the directory of that name in it is kept by commands and managers alone, and this is a root in use. Nothing is
    /// created.
    pub fn keeps(&self, name: &Path) -> bool {
        let kept = [self.run(), self.logs(), self.volumes(), self.engine_binaries()];
        kept.contains(&self.path.join(name))
            && (self.manager_lock().exists() || self.processes().is_dir() && self.volumes().is_dir())
    }

    /// Sockets, locks and what managers remember, as long as the host runs.
    pub fn run(&self) -> PathBuf {
        self.path.join("run")
    }

    /// `ROOT/run/FILE`, or a short path of its own where that is too long for a socket.
    fn socket(&self, file: &str) -> PathBuf {
        short_enough(self.run().join(file))
    }
}

/// The control socket of the process with this data socket: both are named after it.
pub fn control_socket_beside(data: &Path) -> PathBuf {
    short_enough(data.with_extension("grpc.sock"))
}

fn short_enough(path: PathBuf) -> PathBuf {
    if path.as_os_str().len() <= SOCKET_PATH_MAX {
        return path;
    }
    let digest = Sha256::digest(path.as_os_str().as_encoded_bytes());
    let name: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    short_sockets().join(format!("{name}.sock"))
}

/// Makes the directory of a socket that is to be bound, if it is the one of those whose paths below their root are too long. It is
/// on a file system that is empty when the host starts, and whoever binds may be the first since.
///
/// # Errors
/// It cannot be made.
pub fn make_socket_directory(socket: &Path) -> io::Result<()> {
    match socket.parent() {
        Some(directory) if directory == short_sockets() => create_dir_durably(directory),
        _ => Ok(()),
    }
}

/// Asks the system without writing anything.
fn check_writable(path: &Path) -> io::Result<()> {
    Ok(access(path, AccessFlags::W_OK)?)
}

/// The name under which a replica's directory is made while it is copied from another one: what is left of a copy that was
/// broken off looks like no replica.
pub fn unfinished_copy(directory: &str) -> String {
    format!(".{directory}.copy")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_spellings_are_one_root() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real");
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, dir.path().join("link")).unwrap();
        let direct = Root::at(&real.join("not/yet")).unwrap();
        assert_eq!(Root::at(&dir.path().join("link/not/yet")).unwrap(), direct);
        direct.create().unwrap();
        assert_eq!(Root::at(&dir.path().join("link/not/yet")).unwrap(), direct);
    }

    #[test]
    fn what_text_cannot_name_is_no_root() {
        use std::os::unix::ffi::OsStrExt;
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join(std::ffi::OsStr::from_bytes(b"r\xff"));
        assert!(Root::at(&place).unwrap_err().to_string().contains("not UTF-8"));
        std::fs::create_dir(&place).unwrap();
        std::os::unix::fs::symlink(&place, dir.path().join("link")).unwrap();
        assert!(Root::at(&dir.path().join("link")).unwrap_err().to_string().contains("not UTF-8"));
    }

    #[test]
    fn what_is_no_directory_is_no_root() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, "x").unwrap();
        std::os::unix::fs::symlink(dir.path().join("nothing"), &link).unwrap();
        for (place, what) in [(file.clone(), &file), (link.clone(), &link)] {
            let refused = Root::at(&place).unwrap().create().unwrap_err().to_string();
            assert!(refused.contains(&format!("{} is no directory", what.display())), "{refused}");
        }
    }

    #[test]
    fn every_socket_path_can_be_bound() {
        let longest = format!("{}-r-0a1b2c3d", "v".repeat(64));
        for root in ["/var/lib/longhorn", &format!("/tmp/{}", "deep/".repeat(40))] {
            let root = Root::at(Path::new(root)).unwrap();
            for path in [
                root.manager_socket(),
                root.control_socket(&longest),
                root.data_socket(&longest),
                root.relay_socket(&longest),
            ] {
                assert!(path.as_os_str().len() <= SOCKET_PATH_MAX, "{}", path.display());
            }
            assert_ne!(root.data_socket(&longest), root.control_socket(&longest));
        }
        let usual = Root::at(Path::new("/var/lib/longhorn")).unwrap();
        assert_eq!(usual.control_socket(&longest).parent(), Some(usual.path().join("run").as_path()));
    }

    #[test]
    fn a_control_socket_is_found_by_the_data_socket_however_long_the_root_is() {
        for length in 1..120 {
            let root = Root::unresolved(Path::new(&format!("/{}", "d".repeat(length))));
            for name in ["demo-e-0", "a.b-r-0a1b2c3d", &"v".repeat(PROCESS_NAME_MAX)] {
                assert_eq!(
                    control_socket_beside(&root.data_socket(name)),
                    root.control_socket(name),
                    "{length}"
                );
            }
        }
        let beside = control_socket_beside(Path::new("/r/run/v-r-1.sock"));
        assert_eq!(beside, Path::new("/r/run/v-r-1.grpc.sock"));
    }

    #[test]
    fn only_the_directory_that_all_roots_share_is_made_for_a_socket() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("not/yet");
        make_socket_directory(&place.join("a.sock")).unwrap();
        assert!(!place.exists());
        // Others than root cannot make it.
        if nix::unistd::geteuid().is_root() {
            let deep = Root::at(&dir.path().join("deep/".repeat(40))).unwrap();
            make_socket_directory(&deep.data_socket("demo-r-0a1b2c3d")).unwrap();
            assert!(short_sockets().is_dir());
        }
    }
}
