//! What is kept of the intent bitmap's file.

use std::io;

use lh_ring::Fd;

use super::core::{Failure, PersistId};
use crate::store::{IntentWrite, Store};

/// The bitmap's file and the record that is being written.
#[derive(Debug, Default)]
pub(super) struct Marks {
    pub(super) file: Option<Fd>,
    pub(super) run: Option<Run>,
}

/// A record that is being written.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) id: PersistId,
    pub(super) write: IntentWrite,
    /// Pages handed to the ring.
    pub(super) begun: usize,
    /// Operations that have not ended.
    pub(super) left: usize,
    pub(super) syncing: bool,
    pub(super) failure: Option<Failure>,
}

impl Marks {
    /// Takes the bitmap's file anew.
    pub(super) fn open(&mut self, store: &Store) -> io::Result<()> {
        self.file = Some(Fd::new(store.intent_file().try_clone()?));
        Ok(())
    }
}
