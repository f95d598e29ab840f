//! The node `/dev/longhorn/VOLUME`: a block node with the device's own numbers.
//!
//! - A path is at every moment either absent, the node before, or the new one: nodes are made beside it and renamed.
//! - A node of a live device is never replaced, whoever made it; the node of a dead one is.
//! - A device has one node: others with its numbers were left by a device that had them before, and go.
//! - What is no block node (a file, a directory, a link) is never touched.
//! - udev, which makes no such node, is told when there is one, and when it has gone.
//!
//! Check and rename happen under a lock, so that two keepers cannot pass each other. It is on a file that root alone may open: whoever can
//! read a directory could hold one on that for ever.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::{Mode, SFlag, major, makedev, minor, mknod};
use thiserror::Error;

/// In the directory of the nodes. No volume is called so, nor what is made beside one's node.
const LOCK: &str = ".~lock";

/// Why a node could not be made.
#[derive(Debug, Error)]
pub enum NodeError {
    /// Another device that is alive stands there.
    #[error(
        "{path} is the node of a device in use ({device}): a volume of that name runs under another root, or the node was left behind and \
         its number is another device's by now; in that case remove it"
    )]
    Live {
        /// The node.
        path: PathBuf,
        /// The device's name in /sys/block.
        device: String,
    },
    /// Something that is no device node stands there.
    #[error("{path} exists and is no block device: remove it or rename the volume")]
    Foreign {
        /// What stands in the way.
        path: PathBuf,
    },
    /// The system's.
    #[error("cannot make the device node {path}: {source}")]
    Io {
        /// The node.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Checks that a node may be made at `path`: nothing is there, or the node of a device that is not in use, or of one of
/// the `own` devices.
///
/// # Errors
/// [`NodeError`].
pub fn check(path: &Path, own: &[u64]) -> Result<(), NodeError> {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(NodeError::Io { path: path.into(), source }),
    };
    if !meta.file_type().is_block_device() {
        return Err(NodeError::Foreign { path: path.into() });
    }
    if own.contains(&meta.rdev()) {
        return Ok(());
    }
    match live_device(meta.rdev()) {
        Some(device) => Err(NodeError::Live { path: path.into(), device }),
        None => Ok(()),
    }
}

/// Makes `path` the node of the block device `rdev`, for root alone, in place of an `own` or a dead one. Its directory
/// is made with mode 0755.
///
/// # Errors
/// [`NodeError`]; then whatever was there still is.
pub fn place(path: &Path, rdev: u64, own: &[u64]) -> Result<(), NodeError> {
    let io = |source| NodeError::Io { path: path.into(), source };
    let parent = parent(path).map_err(io)?;
    fs::DirBuilder::new().recursive(true).mode(0o755).create(parent).map_err(io)?;
    let _lock = lock(parent).map_err(io)?;
    check(path, own)?;
    let beside = beside(path);
    let made = make(&beside, rdev).and_then(|()| fs::rename(&beside, path));
    if made.is_err() {
        let _ = fs::remove_file(&beside);
    }
    made.map_err(io)?;
    remove_others(path, parent, rdev);
    announce(rdev);
    Ok(())
}

/// Removes what other volumes have left at this device's numbers: whoever opens it by their names would write to this one. What cannot be
/// removed stays, as it would have without a look.
fn remove_others(path: &Path, parent: &Path, own: u64) {
    let entries = fs::read_dir(parent).into_iter().flatten().filter_map(Result::ok);
    for other in entries.map(|entry| entry.path()).filter(|other| other != path) {
        if rdev(&other) == Some(own) {
            let removed = fs::remove_file(&other);
            tracing::warn!(
                "{} was left behind with the numbers of {}: removed ({removed:?})",
                other.display(),
                path.display()
            );
        }
    }
}

/// Removes the node if it is that of `rdev`; anything else that stands there stays.
///
/// # Errors
/// The system's.
pub fn remove(path: &Path, rdev: u64) -> io::Result<()> {
    let parent = parent(path)?;
    let _lock = match lock(parent) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_block_device() && meta.rdev() == rdev => {
            fs::remove_file(path)?;
            announce(rdev);
            Ok(())
        }
        Ok(_) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

/// Removes the node of a device that has gone: its numbers go to whatever disk comes next. That of a live one stays, whosever it is.
///
/// # Errors
/// The system's.
pub fn remove_dead(path: &Path) -> io::Result<()> {
    match rdev(path) {
        Some(rdev) if live_device(rdev).is_none() => remove(path, rdev),
        _ => Ok(()),
    }
}

/// The numbers of the block device that stands at `path`, if one does.
pub fn rdev(path: &Path) -> Option<u64> {
    let meta = fs::symlink_metadata(path).ok()?;
    meta.file_type().is_block_device().then(|| meta.rdev())
}

/// The numbers of the block device whose directory in sysfs this is.
pub(crate) fn rdev_in(sys: &Path) -> Option<u64> {
    parse_numbers(fs::read_to_string(sys.join("dev")).ok()?.trim())
}

/// `MAJOR:MINOR`, as the kernel writes it.
pub(crate) fn parse_numbers(text: &str) -> Option<u64> {
    let (major, minor) = text.split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Name of the block device with these numbers, if the kernel has it and it holds anything: a loop device without a
/// file and an NBD device without a connection have size 0.
pub(crate) fn live_device(rdev: u64) -> Option<String> {
    let sys = sys_directory(rdev);
    let size = fs::read_to_string(sys.join("size")).ok()?;
    if size.trim() == "0" {
        return None;
    }
    Some(name_of(rdev)?.to_string_lossy().into_owned())
}

/// What the kernel calls the block device with these numbers.
pub(crate) fn name_of(rdev: u64) -> Option<OsString> {
    Some(fs::canonicalize(sys_directory(rdev)).ok()?.file_name()?.to_owned())
}

/// The device's directory in sysfs.
pub(crate) fn sys_directory(rdev: u64) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev)))
}

/// Has the kernel announce a change of the device: udev looks then by which names it goes (`deploy/host/90-longhorn.rules`). Where
/// nobody listens, or the device has gone, that changes nothing.
fn announce(rdev: u64) {
    let _ = fs::write(sys_directory(rdev).join("uevent"), "change");
}

fn make(path: &Path, rdev: u64) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    mknod(path, SFlag::S_IFBLK, Mode::S_IRUSR | Mode::S_IWUSR, rdev)?;
    Ok(())
}

/// Where a node is made before it takes its place. No volume is called so: names begin with a letter or digit.
fn beside(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    path.with_file_name(name)
}

fn parent(path: &Path) -> io::Result<&Path> {
    path.parent().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
}

fn lock(directory: &Path) -> io::Result<Flock<File>> {
    let mut options = File::options();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(directory.join(LOCK))?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno.into())
}
