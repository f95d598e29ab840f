//! A descriptor that operations can hold.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

/// A descriptor shared between its user and the operations in flight on it; closed when the last of them is gone.
///
/// To end a connection whose operations are in flight, [`crate::Ring::shutdown`] it: dropping only waits for them.
#[derive(Clone, Debug)]
pub struct Fd(Rc<OwnedFd>);

impl Fd {
    /// Takes a file, socket or descriptor.
    pub fn new(owned: impl Into<OwnedFd>) -> Self {
        Self(Rc::new(owned.into()))
    }

    /// The descriptor's number, for the kernel and for messages.
    pub fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// The descriptor itself, if no operation and no other clone holds it.
    pub fn into_owned(self) -> Option<OwnedFd> {
        Rc::into_inner(self.0)
    }
}

impl From<OwnedFd> for Fd {
    fn from(fd: OwnedFd) -> Self {
        Self::new(fd)
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.raw()
    }
}
