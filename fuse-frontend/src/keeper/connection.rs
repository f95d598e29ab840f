//! Making a FUSE connection whose root is the file itself.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Mutex;

use lh_ring::sys::mounts;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, poll};

use crate::init::{Agreement, MAX_READ, answer_init};

/// What INIT and its header may take; the kernel wants at least 8 KiB of room from every reader.
const INIT_ROOM: usize = 8 << 10;

/// The kernel sends INIT while it mounts; it is there when the mount is.
const INIT_PATIENCE_MS: u16 = 5_000;

/// A connection with INIT behind it.
#[derive(Debug)]
pub(super) struct Connection {
    /// /dev/fuse, non-blocking.
    pub(super) fuse: OwnedFd,
    /// The mount, which nobody sees; it goes with its last descriptor. `None` once the end has begun, and where another
    /// keeper had it.
    mount: Mutex<Option<OwnedFd>>,
    /// The file system's device number, by which the loop driver names its file.
    pub(super) device: u64,
    pub(super) agreement: Agreement,
}

impl Connection {
    /// Opens /dev/fuse, mounts, and answers INIT.
    ///
    /// # Errors
    /// In words, with what was tried.
    pub(super) fn create(volume: &str) -> Result<Self, String> {
        let fuse = File::options()
            .read(true)
            .write(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open("/dev/fuse")
            .map_err(|e| format!("cannot open /dev/fuse (is the fuse module there?): {e}"))?;
        let options = [
            ("source", format!("longhorn:{volume}")),
            ("fd", fuse.as_raw_fd().to_string()),
            ("rootmode", "100600".into()),
            ("user_id", "0".into()),
            ("group_id", "0".into()),
            ("max_read", MAX_READ.to_string()),
        ];
        let mount = mounts::detached("fuse", &options).map_err(|e| format!("cannot mount FUSE: {e}"))?;
        let agreement = agree(&fuse)?;
        let device = mounts::cached_identity(mount.as_fd())
            .map_err(|e| format!("cannot tell the FUSE connection's number: {e}"))?
            .dev;
        Ok(Self { fuse: fuse.into(), mount: Mutex::new(Some(mount)), device, agreement })
    }

    /// A connection that another keeper made.
    pub(super) fn adopted(fuse: OwnedFd, device: u64, agreement: Agreement) -> Self {
        Self { fuse, mount: Mutex::new(None), device, agreement }
    }

    /// Opens the file for the loop driver. The server is asked: see [`super::apart`].
    pub(super) fn open_file(&self) -> io::Result<File> {
        let mount = match &*self.mount.lock().unwrap_or_else(std::sync::PoisonError::into_inner) {
            Some(mount) => mount.try_clone()?,
            None => return Err(io::ErrorKind::NotConnected.into()),
        };
        File::options()
            .read(true)
            .write(true)
            .custom_flags(OFlag::O_DIRECT.bits())
            .open(format!("/proc/thread-self/fd/{}", mount.as_raw_fd()))
    }

    /// True once the kernel has ended the connection: nobody is asked through it any more, and whoever uses what it showed gets
    /// errors.
    pub(super) fn has_ended(&self) -> bool {
        // `fuse_dev_poll` of fs/fuse/dev.c says POLLERR then, and never before.
        let mut watched = [PollFd::new(self.fuse.as_fd(), PollFlags::empty())];
        poll(&mut watched, 0_u16).is_ok_and(|count| count > 0)
    }

    /// Ends the connection: what waits for its server fails.
    pub(super) fn abort(&self) -> io::Result<()> {
        // Of one that has ended the number may be another's: this one's mount need not be here to keep it.
        if self.has_ended() { Ok(()) } else { mounts::abort_fuse(self.device) }
    }

    /// Lets go of the mount: with the loop device gone, too, the connection ends.
    pub(super) fn unmount(&self) {
        self.mount.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }
}

/// The INIT exchange.
fn agree(fuse: &File) -> Result<Agreement, String> {
    let mut ready = [PollFd::new(fuse.as_fd(), PollFlags::POLLIN)];
    match poll(&mut ready, INIT_PATIENCE_MS) {
        Ok(1) => {}
        Ok(_) => return Err("the kernel did not begin the FUSE connection".into()),
        Err(e) => return Err(format!("cannot wait for /dev/fuse: {e}")),
    }
    let mut request = vec![0; INIT_ROOM];
    let len = nix::unistd::read(fuse, &mut request).map_err(|e| format!("cannot read /dev/fuse: {e}"))?;
    let (answer, agreement) = answer_init(&request[..len]).map_err(|e| e.to_string())?;
    nix::unistd::write(fuse, &answer).map_err(|e| format!("the kernel refused the INIT answer: {e}"))?;
    Ok(agreement)
}
