//! Work at a disk, on threads of its own: one at a place at a time.
//!
//! A disk that dies keeps whoever asks it, for as long as the kernel tries. Whoever waits may give up; the thread cannot,
//! and each further one at the same place would hang beside it until none were left for the disks that live.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The places where something is being done.
#[derive(Clone, Debug, Default)]
pub(super) struct AtDisk {
    places: Arc<Mutex<BTreeSet<PathBuf>>>,
}

/// A place that is taken; free again when this is dropped, by the thread that works there.
struct Taken {
    place: PathBuf,
    of: AtDisk,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.of.places.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.place);
    }
}

impl AtDisk {
    /// Does this at that place. What was begun goes on when the caller gives up.
    ///
    /// # Errors
    /// What was begun there before has not ended, or this ended badly: one sentence.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        place: PathBuf,
        work: impl FnOnce(&Path) -> T + Send + 'static,
    ) -> Result<T, String> {
        let is_free = self.places.lock().unwrap_or_else(PoisonError::into_inner).insert(place.clone());
        if !is_free {
            return Err(format!("{} does not answer since it was asked before", place.display()));
        }
        let taken = Taken { place, of: self.clone() };
        let task = tokio::task::spawn_blocking(move || work(&taken.place));
        task.await.map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_disk_that_hangs_keeps_one_thread() {
        let (at, (go, wait)) = (AtDisk::default(), mpsc::channel::<()>());
        let hangs = at.run("/a".into(), move |_| wait.recv().is_ok());
        assert!(tokio::time::timeout(Duration::from_millis(20), hangs).await.is_err());
        let refused = at.run("/a".into(), |_| ()).await.unwrap_err();
        assert!(refused.starts_with("/a does not answer"), "{refused}");
        assert_eq!(at.run("/b".into(), |place| place.to_owned()).await, Ok("/b".into()));
        go.send(()).unwrap();
        while at.run("/a".into(), |_| ()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
