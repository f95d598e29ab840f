//! The listening sockets that this manager's processes have left with it (`crate::deposit`).

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One socket per process, by the process's name.
#[derive(Debug, Default)]
pub(super) struct Deposits(Mutex<BTreeMap<String, OwnedFd>>);

impl Deposits {
    /// Keeps what a process leaves, in place of what it left before.
    pub(super) fn leave(&self, name: &str, listener: OwnedFd) {
        self.all().insert(name.to_owned(), listener);
    }

    /// Another descriptor of what a process has left.
    pub(super) fn copy(&self, name: &str) -> io::Result<Option<OwnedFd>> {
        self.all().get(name).map(OwnedFd::try_clone).transpose()
    }

    /// Closes what a process has left: it will not be started again, or does not want to be found.
    pub(super) fn forget(&self, name: &str) {
        self.all().remove(name);
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
