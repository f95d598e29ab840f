//! Commands to `/dev/ublk-control`.
//!
//! They are few in a device's life, so each has a ring of its own and no state is shared between them. Two kinds: those
//! that hand memory over end soon and are waited for as long as it takes; those that may wait for somebody name no
//! memory, and are given up when their time is over.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::abi::{ControlCommand, NO_QUEUE};

/// Where the kernel takes commands.
pub(crate) const PATH: &str = "/dev/ublk-control";

/// Between two attempts to hand a command on.
const AGAIN: Duration = Duration::from_millis(1);

/// A ring with places for the commands' 80 bytes.
type Wide = IoUring<squeue::Entry128, cqueue::Entry>;

/// The way to the driver.
#[derive(Debug)]
pub(crate) struct Control(File);

impl Control {
    /// Opens `/dev/ublk-control`.
    ///
    /// # Errors
    /// The system's: `NotFound` without the driver, `PermissionDenied`.
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self(File::options().read(true).write(true).open(PATH)?))
    }

    /// A command that takes `value` and fills it in.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn exchange<T>(&self, op: u32, device: u32, value: &mut T) -> io::Result<()>
    where
        T: IntoBytes + FromBytes + Immutable,
    {
        let bytes = value.as_mut_bytes();
        let command = ControlCommand {
            dev_id: device,
            queue_id: NO_QUEUE,
            len: u16::try_from(bytes.len()).map_err(io::Error::other)?,
            addr: bytes.as_mut_ptr() as u64,
            ..ControlCommand::default()
        };
        let mut ring = Wide::builder().dontfork().build(1)?;
        // SAFETY: the command's address is `value`, exclusively borrowed until this function returns, which is not
        // before the command has ended; its length is that of `value`, for which every pattern of bytes is valid.
        unsafe { self.submit(&mut ring, op, &command)? };
        loop {
            match ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(e) if passes(&e) => std::thread::sleep(AGAIN),
                // The command may be with the driver, and write to `value`, which a thread that unwinds would give away.
                Err(e) => {
                    tracing::error!("a command to {PATH} can neither be waited for nor given up: {e}");
                    std::process::abort();
                }
            }
            if let Some(entry) = ring.completion().next() {
                return result(&entry);
            }
        }
    }

    /// A command that needs no more than a number, and may wait for others until `patience` has passed.
    ///
    /// # Errors
    /// The driver's; `TimedOut`.
    pub(crate) fn order(&self, op: u32, device: u32, data: u64, patience: Duration) -> io::Result<()> {
        let command =
            ControlCommand { dev_id: device, queue_id: NO_QUEUE, data, ..ControlCommand::default() };
        let mut ring = Wide::builder().dontfork().build(1)?;
        // SAFETY: the command names no memory.
        unsafe { self.submit(&mut ring, op, &command)? };
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let time = Timespec::from(left);
            match ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time)) {
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::ETIME) => {}
                Err(e) if passes(&e) => std::thread::sleep(AGAIN.min(left)),
                Err(e) => return Err(e),
            }
            if let Some(entry) = ring.completion().next() {
                return result(&entry);
            }
            // The ring's end cancels the command.
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Queues a command.
    ///
    /// # Safety
    /// The memory that the command names is valid for what the driver does with it, until the command has ended.
    unsafe fn submit(&self, ring: &mut Wide, op: u32, command: &ControlCommand) -> io::Result<()> {
        let mut bytes = [0; 80];
        bytes[..size_of::<ControlCommand>()].copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd80::new(Fd(self.0.as_raw_fd()), op).cmd(bytes).build();
        // SAFETY: the caller's promise for the memory; the descriptor lives as long as `self`, and the kernel holds the
        // file itself from the submission on.
        unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)
    }
}

/// True for what is no word on the ring: a signal, or no memory just now to hand the command on, which stays queued.
fn passes(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

fn result(entry: &cqueue::Entry) -> io::Result<()> {
    if entry.result() < 0 { Err(io::Error::from_raw_os_error(-entry.result())) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that serves a block device is not to end since the kernel has had no memory at one moment.
    #[test]
    fn a_moment_without_memory_and_a_signal_pass() {
        let passes = |errno| passes(&io::Error::from_raw_os_error(errno));
        assert!([libc::EINTR, libc::EAGAIN, libc::EBUSY].into_iter().all(passes));
        assert!(![libc::EBADF, libc::EFAULT, libc::EINVAL, libc::ETIME].into_iter().any(passes));
    }
}
