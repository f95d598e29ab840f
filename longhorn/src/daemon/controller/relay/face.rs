//! A relay as its gRPC server sees it: it can be looked at and ended; everything else is its volume's engine's.

use std::sync::{Arc, Mutex, PoisonError};

use control::chain::Layer;
use control::cloning::{CloneProgress, CloneSource};
use control::engine::{
    Answer, EngineControl, EngineError, EngineStatus, Operation, PurgeProgress, ScrubProgress,
    SnapshotRequest,
};
use control::proto::ptypes;
use control::proto::volume::Wait;
use crossbeam_channel::Sender;
use lh_block::Address;

use super::super::face::{FrontendState, Reply};
use super::connect::Obstacles;

/// The handle behind the gRPC server.
pub(super) struct Face {
    pub(super) volume: String,
    pub(super) size: u64,
    pub(super) from: Address,
    pub(super) shown: Arc<Mutex<FrontendState>>,
    pub(super) obstacles: Obstacles,
    /// Asks the main thread for the end.
    pub(super) ends: Sender<Reply>,
}

fn not_here<T: Send + 'static>() -> Answer<T> {
    let text = "this is a relay of the volume's engine on another node";
    Box::pin(std::future::ready(Err(EngineError::NotNow(text.to_owned()))))
}

impl EngineControl for Face {
    fn status(&self) -> EngineStatus {
        let FrontendState { frontend, endpoint, .. } =
            self.shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let up = endpoint.is_some();
        let waiting_for = match self.obstacles.first() {
            Some(obstacle) => obstacle,
            None if !up => format!("the frontend {frontend} is being made"),
            None => String::new(),
        };
        let wait = if waiting_for.is_empty() { Wait::Untold } else { Wait::Other };
        let endpoint = endpoint.unwrap_or_default();
        EngineStatus {
            volume: self.volume.clone(),
            size: self.size,
            frontend: frontend.to_owned(),
            up,
            device: endpoint.device,
            uri: endpoint.uri,
            waiting_for,
            wait,
            relay_from: Some(self.from.clone()),
            ..EngineStatus::default()
        }
    }

    fn snapshot(&self, _: SnapshotRequest) -> Answer<()> {
        not_here()
    }

    fn operate(&self, _: Operation) -> Answer<()> {
        not_here()
    }

    fn chain(&self) -> Answer<Vec<Layer>> {
        not_here()
    }

    fn purges(&self) -> Vec<PurgeProgress> {
        Vec::new()
    }

    fn scrub(&self) -> Option<ScrubProgress> {
        None
    }

    fn fill_from(&self, _: CloneSource) -> Answer<()> {
        not_here()
    }

    fn cloning(&self) -> Option<CloneProgress> {
        None
    }

    fn shutdown(&self) -> Answer<()> {
        let (sender, answer) = tokio::sync::oneshot::channel();
        let asked = self.ends.send(sender);
        Box::pin(async move {
            asked.map_err(|_| EngineError::Ending)?;
            answer.await.map_err(|_| EngineError::Ending)?
        })
    }

    fn activity(&self) -> ptypes::Activity {
        ptypes::Activity::default()
    }
}
