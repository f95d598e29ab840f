//! The loop device over the FUSE file.
//!
//! - Numbers are given to others as soon as they are free. A loop device is ours as long as its sequence number is the
//!   one that the kernel gave it when we bound it (`diskseq`, Linux 5.15; before, a bound one is taken for ours).
//! - The driver is never asked for its settings: it would ask the file's server for the inode, of whatever volume that
//!   is, and wait for it.
//! - The kernel is not told to look for partitions: it would read the table before the device is there, and wait for replicas. Those
//!   that somebody adds (partx) go with the device.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use lh_ring::sys::{if_there, loops, remove_partitions};
use nix::sys::stat::{Mode, SFlag, mknod};

use crate::node;

/// Attempts to bind: between the question for a free device and the binding somebody else may take it.
const ATTEMPTS: u32 = 64;

/// A loop device as it was bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoopDevice {
    pub(super) number: u32,
    /// Differs after every other binding; 0 if the kernel does not tell.
    pub(super) sequence: u64,
}

/// Why a loop device is still there.
#[derive(Debug)]
pub(super) enum ClearError {
    /// Somebody has it open.
    InUse,
    Io(io::Error),
}

impl LoopDevice {
    /// Binds `file` to a free loop device, with direct I/O. The server of the file is asked for its size and more, and
    /// must be answering.
    pub(super) fn bind(file: &File, block_size: u32, name: &str) -> io::Result<Self> {
        let mut last = io::Error::from(io::ErrorKind::ResourceBusy);
        for _ in 0..ATTEMPTS {
            let free = Self { number: loops::get_free()?, sequence: 0 };
            free.remove_partitions()?;
            let opened = free.open()?;
            match loops::configure(opened.as_fd(), file.as_fd(), block_size, name) {
                Ok(()) => {
                    free.count_requests();
                    // Without its number nobody could tell it from what is bound there next.
                    let sequence = free.current_sequence().inspect_err(|_| {
                        let _ = loops::clear(opened.as_fd());
                    })?;
                    return Ok(Self { sequence, ..free });
                }
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy => last = e,
                Err(e) => return Err(e),
            }
        }
        Err(last)
    }

    /// By its statistics it is seen whether requests wait at the device. Who had the number before may have left them off.
    fn count_requests(self) {
        let setting = self.sys().join("queue/iostats");
        if fs::read_to_string(&setting).is_ok_and(|now| now.trim() == "0")
            && let Err(e) = fs::write(&setting, "1")
        {
            tracing::warn!(
                "{} does not count its requests ({}: {e})",
                self.path().display(),
                setting.display()
            );
        }
    }

    pub(super) fn path(self) -> PathBuf {
        PathBuf::from(format!("/dev/loop{}", self.number))
    }

    /// The device's own numbers.
    pub(super) fn rdev(self) -> io::Result<u64> {
        let text = fs::read_to_string(self.sys().join("dev"))?;
        node::parse_numbers(text.trim()).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// True while the device is bound as it was.
    pub(super) fn is_bound(self) -> bool {
        // The directory is there while a file is bound.
        let file = if_there(fs::metadata(self.sys().join("loop")));
        self.is_bound_by(file.map(|found| found.is_some()), self.current_sequence())
    }

    /// The same by what the kernel tells. What cannot be looked at is taken for bound: who takes it for gone binds another one, beside
    /// what may be mounted.
    fn is_bound_by(self, has_file: io::Result<bool>, sequence: io::Result<u64>) -> bool {
        has_file.unwrap_or(true) && sequence.map_or(true, |now| now == self.sequence)
    }

    fn current_sequence(self) -> io::Result<u64> {
        let text = if_there(fs::read_to_string(self.sys().join("diskseq")))?.unwrap_or_default();
        Ok(text.trim().parse().unwrap_or(0))
    }

    /// Bytes of its logical block, if the kernel tells.
    pub(super) fn block_size(self) -> Option<u32> {
        fs::read_to_string(self.sys().join("queue/logical_block_size")).ok()?.trim().parse().ok()
    }

    fn sys(self) -> PathBuf {
        PathBuf::from(format!("/sys/block/loop{}", self.number))
    }

    /// Takes the file's new size over. The server is asked for it. Of a device that somebody else has unbound nothing has to grow: the
    /// one that is bound next has the size, and who has the number by now is left alone.
    pub(super) fn grow(self) -> io::Result<()> {
        match self.open_bound()? {
            Some(device) => loops::set_capacity(device.as_fd()),
            None => Ok(()),
        }
    }

    /// Unbinds the device, if nobody else has it open.
    pub(super) fn clear(self, name: &str) -> Result<(), ClearError> {
        self.clear_at_last_close().map_err(ClearError::Io)?;
        // Others have it open, and the driver would unbind it under their successors. They may have closed it in between, and whoever
        // has bound the number since keeps what they have set.
        let Some(device) = self.open_bound().map_err(ClearError::Io)? else { return Ok(()) };
        match loops::keep_after_last_close(device.as_fd(), name) {
            Ok(()) => Err(ClearError::InUse),
            Err(_) if !self.is_bound() => Ok(()),
            Err(e) => Err(ClearError::Io(e)),
        }
    }

    /// Unbinds the device as soon as nobody has it open: now, or later.
    pub(super) fn clear_at_last_close(self) -> io::Result<()> {
        self.unbind_at_last_close()?;
        if !self.is_bound()
            && let Err(e) = self.remove_partitions()
        {
            tracing::warn!("partitions of {} stay: {e}", self.path().display());
        }
        Ok(())
    }

    fn unbind_at_last_close(self) -> io::Result<()> {
        let Some(device) = self.open_bound()? else { return Ok(()) };
        match loops::clear(device.as_fd()) {
            // Unbound in between.
            Err(e) if e.raw_os_error() == Some(nix::errno::Errno::ENXIO as i32) => Ok(()),
            other => other,
        }
    }

    /// Removes the partitions of a device that nobody has bound: they would be parts of what is bound to it next.
    fn remove_partitions(self) -> io::Result<()> {
        // While it is open so, nobody binds it.
        let device = match self.open_with(nix::fcntl::OFlag::O_EXCL) {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => return Ok(()),
            opened => opened?,
        };
        if self.sys().join("loop").exists() { Ok(()) } else { remove_partitions(device.as_fd()) }
    }

    /// The device, if it is bound as it was. While it is open here nobody else binds it anew.
    fn open_bound(self) -> io::Result<Option<File>> {
        if !self.is_bound() {
            return Ok(None);
        }
        let device = self.open()?;
        Ok(self.is_bound().then_some(device))
    }

    fn open(self) -> io::Result<File> {
        self.open_with(nix::fcntl::OFlag::empty())
    }

    /// Opens the device, whose node is made if nobody did (containers have a /dev of their own).
    fn open_with(self, flags: nix::fcntl::OFlag) -> io::Result<File> {
        let (path, rdev) = (self.path(), self.rdev()?);
        if !path.exists() {
            mknod(&path, SFlag::S_IFBLK, Mode::from_bits_truncate(0o660), rdev)?;
        }
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags((nix::fcntl::OFlag::O_CLOEXEC | flags).bits())
            .open(&path)?;
        if file.metadata()?.rdev() != rdev {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} is another device's node", path.display()),
            ));
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_looked_at_is_not_taken_for_gone() {
        let device = LoopDevice { number: 7, sequence: 9 };
        let short = || io::Error::from_raw_os_error(nix::errno::Errno::ENFILE as i32);
        assert!(device.is_bound_by(Ok(true), Ok(9)));
        assert!(!device.is_bound_by(Ok(false), Ok(9)) && !device.is_bound_by(Ok(true), Ok(10)));
        assert!(device.is_bound_by(Ok(true), Err(short())) && device.is_bound_by(Err(short()), Ok(9)));
        assert!(!device.is_bound_by(Ok(false), Err(short())));
    }
}
