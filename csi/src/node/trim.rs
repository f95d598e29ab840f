//! File systems of this node trimmed for its manager, which sees no pod's mounts itself (`control/proto/node.proto`).
//!
//! It is done in pieces, by fstrim(8): between two of them nothing is open on the mount, so that a volume that is to be
//! unmounted waits for one piece and not for all. What is carried out, and what came of it, is kept in memory alone: asked
//! by a manager after this driver was started anew it is done once more, which changes nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use control::proto::node::file_systems_server::FileSystems;
use control::proto::node::{TrimRequest, TrimState};
use tokio::sync::watch;
use tonic::{Request, Response, Status, async_trait};

use super::NodeService;
use super::trimmable::Trimmable;
use crate::Refused;
use crate::refused::required;

/// Bytes of a file system that are trimmed at once: whole block groups of ext4 with any size of block, which it then
/// remembers as trimmed.
const PIECE: u64 = 4 << 30;

/// How long a volume that is to be unmounted waits for the end of a piece. A device that does not answer keeps it longer,
/// and then the unmounting itself fails.
const END: Duration = Duration::from_secs(30);

/// What is carried out, and what came of it, by volume.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trims {
    jobs: Arc<Mutex<HashMap<String, Job>>>,
}

#[derive(Debug)]
struct Job {
    request: String,
    state: TrimState,
    /// Says that it is to end; its last receiver goes with it.
    stop: watch::Sender<bool>,
}

impl Trims {
    fn jobs(&self) -> MutexGuard<'_, HashMap<String, Job>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How a volume's request is, or the one before it that is not done yet; `None`: it is to be begun.
    fn known(&self, volume: &str, request: &str) -> Option<TrimState> {
        let jobs = self.jobs();
        let job = jobs.get(volume).filter(|job| job.request == request || job.state.running)?;
        Some(job.state.clone())
    }

    fn tell(&self, volume: &str, state: TrimState) {
        if let Some(job) = self.jobs().get_mut(volume) {
            job.state = state;
        }
    }

    /// Begins one, unless one runs. Gives back how that is.
    fn begin(&self, volume: &str, request: &str, place: Trimmable, piece: u64) -> TrimState {
        let mut jobs = self.jobs();
        if let Some(job) = jobs.get(volume).filter(|job| job.state.running) {
            return job.state.clone();
        }
        let (stop, stopped) = watch::channel(false);
        let state = TrimState { running: true, ..TrimState::default() };
        jobs.insert(volume.to_owned(), Job { request: request.to_owned(), state: state.clone(), stop });
        let (trims, volume) = (self.clone(), volume.to_owned());
        tokio::spawn(async move {
            tracing::info!(volume, path = %place.point.display(), "the file system is trimmed");
            let mut bytes = 0;
            let done = trims.carry_out(&volume, &place, piece, &stopped, &mut bytes).await;
            let error = done.err().map(|e| e.to_string()).unwrap_or_default();
            tracing::info!(volume, bytes, error, "trimming has ended");
            trims.tell(&volume, TrimState { running: false, bytes, error });
            drop(stopped);
        });
        state
    }

    async fn carry_out(
        &self,
        volume: &str,
        place: &Trimmable,
        piece: u64,
        stopped: &watch::Receiver<bool>,
        bytes: &mut u64,
    ) -> Result<(), Refused> {
        let mut from = 0;
        while from < place.size {
            if *stopped.borrow() {
                return Err(Refused::Precondition(
                    "the volume was unmounted before it was through".to_owned(),
                ));
            }
            match place.trim(from, piece).await? {
                Some(trimmed) => *bytes = bytes.saturating_add(trimmed),
                // The file system ends before its device.
                None => break,
            }
            self.tell(volume, TrimState { running: true, bytes: *bytes, error: String::new() });
            from = from.saturating_add(piece);
        }
        Ok(())
    }

    /// Has what runs on a volume end, and forgets what came of it: the volume goes from this node.
    pub(super) async fn end(&self, volume: &str) {
        let ended = {
            let mut jobs = self.jobs();
            jobs.retain(|name, job| name != volume || job.state.running);
            jobs.get(volume).map(|job| {
                job.stop.send_replace(true);
                job.stop.clone()
            })
        };
        let Some(ended) = ended else { return };
        if tokio::time::timeout(END, ended.closed()).await.is_err() {
            tracing::warn!(volume, "trimming does not end: the device does not answer");
        }
    }
}

/// What is asked of the driver by the node's manager.
pub(crate) struct FileSystemService {
    pub(crate) node: NodeService,
}

impl FileSystemService {
    fn trim(&self, request: &TrimRequest) -> Result<TrimState, Refused> {
        let volume = required("the volume's name", &request.volume)?;
        let id = required("what tells the request apart", &request.request)?;
        if let Some(known) = self.node.trims.known(volume, id) {
            return Ok(known);
        }
        let place = self.node.trimmable(volume)?;
        Ok(self.node.trims.begin(volume, id, place, PIECE))
    }
}

#[async_trait]
impl FileSystems for FileSystemService {
    async fn trim(&self, request: Request<TrimRequest>) -> Result<Response<TrimState>, Status> {
        Ok(Response::new(FileSystemService::trim(self, &request.into_inner())?))
    }
}
