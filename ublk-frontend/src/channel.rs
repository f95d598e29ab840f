//! One queue of a device, on its way to the thread that serves it.

use std::os::fd::OwnedFd;

/// A queue that nobody serves yet. Whoever makes a [`crate::Server`] of it serves it until the device goes away.
#[derive(Debug)]
pub struct Channel {
    /// `/dev/ublkcN`, non-blocking: the ring then copies bytes at once, without a thread of the kernel's.
    pub(crate) fd: OwnedFd,
    /// Its number.
    pub(crate) queue: u16,
    /// Its requests at a time.
    pub(crate) depth: u16,
}

impl Channel {
    /// The queue's number.
    pub const fn queue(&self) -> u16 {
        self.queue
    }

    /// Its requests at a time.
    pub const fn depth(&self) -> u16 {
        self.depth
    }
}
