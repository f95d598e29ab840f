//! What the next engine of this host has to know: clients have lost something, and no flush has told them
//! (`docs/decisions/0019-a-flush-tells-of-a-loss.md`).
//!
//! An engine that dies leaves its device to the next one, with whoever has it open; replicas that have been made equal since tell
//! nothing of the loss. The note is an empty file on the host of the device. It need not survive the host: the clients do not.

use std::fs::File;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use crate::shared::Shared;

/// The file, where there is a place for one.
#[derive(Clone, Debug)]
pub(super) struct LossNote {
    path: Option<PathBuf>,
    shared: Arc<Shared>,
}

impl LossNote {
    /// What an engine before has noted is noted in `shared`.
    pub(super) fn find(path: Option<PathBuf>, shared: Arc<Shared>) -> Self {
        if path.as_ref().is_some_and(|path| path.exists()) {
            shared.loss().lose_from_before();
        }
        Self { path, shared }
    }

    /// Something is lost. Returns when the note is there: before anything is done that makes replicas look whole.
    pub(super) fn make(&self) {
        if let Some(path) = &self.path
            && let Err(e) = File::create(path)
        {
            tracing::error!("{}: {e}: if this engine dies now, no flush tells of the loss", path.display());
        }
    }

    /// Takes the note away when nobody has to be told any more.
    pub(super) fn look_after(&self) {
        let Some(path) = self.path.as_ref().filter(|_| !self.shared.loss().is_untold()) else { return };
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != ErrorKind::NotFound => tracing::error!("{}: {e}", path.display()),
            _ => {}
        }
        // Something more was lost just then.
        if self.shared.loss().is_untold() {
            self.make();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared() -> Arc<Shared> {
        Arc::new(Shared::new(16 << 20, 4 << 20))
    }

    #[test]
    fn a_loss_that_nobody_was_told_of_is_known_to_the_next_engine() {
        let directory = tempfile::tempdir().unwrap();
        let path = Some(directory.path().join("note"));
        let first = LossNote::find(path.clone(), shared());
        first.shared.loss().lose();
        first.make();
        first.look_after();

        let second = LossNote::find(path.clone(), shared());
        second.shared.loss().clients_have_stayed();
        second.look_after();
        assert!(second.shared.loss().fails_flush(0));
        second.look_after();

        let third = LossNote::find(path, shared());
        third.shared.loss().clients_have_stayed();
        assert!(!third.shared.loss().fails_flush(0), "they know");
    }

    #[test]
    fn whoever_comes_anew_takes_the_note_away() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("note");
        File::create(&path).unwrap();
        let note = LossNote::find(Some(path.clone()), shared());
        // The device is shown, and it is a new one.
        note.look_after();
        assert!(!path.exists() && !note.shared.loss().fails_flush(0));
    }
}
