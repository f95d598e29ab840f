//! At which level the processes of a root log, once somebody has said so: those that start are given it in their environment,
//! and those that run are told (`telling`).
//!
//! It is said anew to each manager: one that nobody has told leaves processes as they are.

use tokio::sync::watch;

use crate::logging::{self, Level};

/// What was said.
#[derive(Debug)]
pub(super) struct Levels(watch::Sender<Option<Level>>);

impl Default for Levels {
    fn default() -> Self {
        Self(watch::Sender::new(None))
    }
}

impl Levels {
    /// Has this process, and all that are and will be of its root, log at this level.
    pub(super) fn set(&self, level: Level) {
        logging::set(level);
        self.0.send_if_modified(|said| said.replace(level) != Some(level));
    }

    /// What was said last; `None`: nobody said anything.
    pub(super) fn said(&self) -> Option<Level> {
        *self.0.borrow()
    }

    /// The same, now and whenever it changes.
    pub(super) fn watch(&self) -> watch::Receiver<Option<Level>> {
        self.0.subscribe()
    }
}
