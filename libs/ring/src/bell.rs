//! Waking a ring from another thread.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// A bell that any thread may ring and one [`crate::Ring`] hears.
///
/// # Ordering
/// What a thread did before [`Bell::ring`] is visible to whoever takes the completion. Rings that come before the
/// completion is taken are one completion, and cost one system call together.
#[derive(Clone, Debug)]
pub struct Bell(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    event: OwnedFd,
    /// Rung, and not heard yet.
    rung: AtomicBool,
}

impl Bell {
    /// A bell that has not been rung.
    ///
    /// # Errors
    /// The system's, when there are no more descriptors.
    pub fn new() -> io::Result<Self> {
        // Not EFD_NONBLOCK: io_uring then answers a read at once with EAGAIN rather than waiting.
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?;
        Ok(Self(Arc::new(Shared { event: event.into(), rung: AtomicBool::new(false) })))
    }

    /// Wakes the ring that has been told to [`crate::Ring::wake_on`] this bell.
    pub fn ring(&self) {
        if self.0.rung.swap(true, Ordering::AcqRel) {
            return;
        }
        // Writing 1 to an eventfd fails only when its counter is at its end, and then the ring is awake.
        let _ = nix::unistd::write(&self.0.event, &1_u64.to_ne_bytes());
    }

    /// Called by the ring before it shows the completion: a ring after this one is a new one.
    pub(crate) fn heard(&self) {
        self.0.rung.swap(false, Ordering::AcqRel);
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.0.event.as_raw_fd()
    }
}
