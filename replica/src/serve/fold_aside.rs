//! Layer images that meet a fold. It looks at the layers below the head as if nobody else wrote them; so an image of one of its
//! two layers waits until it stands aside, and is planned then. The fold begins anew once there was none for a while: a repair
//! sends many.
//!
//! What an earlier fold has noted of how far it was holds only for layers that nobody has written since. Before the first image
//! of a layer below the head it is forgotten, durably.

use super::core::{Failure, Input, Job, RequestId};
use super::folder::{Run, Waits};
use super::server::Server;
use super::task::{FoldTask, Task};
use crate::store::Fold;

/// How long after the last image a fold begins anew.
const QUIET_NS: u64 = 1_000_000_000;

impl Server {
    /// True for an image that must not begin now.
    pub(super) fn waits_for_fold(&mut self, id: RequestId, job: Job) -> bool {
        let Job::PutLayer { range, trailer } = job else { return false };
        if self.folder.is_idle() && self.folder.forgotten {
            return false;
        }
        let Some(layer) = self.layer_of_image(id, range, trailer).filter(|l| *l != self.store.head()) else {
            return false;
        };
        match &mut self.folder.run {
            Some(run) if run.waits == Waits::Images || !run.fold.touches(&self.store, layer) => false,
            Some(run) => {
                run.fold.give_way();
                true
            }
            // Where it is to go on from may have been read already.
            None if self.folder.beginning.is_some() => true,
            None => {
                self.forget_fold();
                true
            }
        }
    }

    /// Asks the worker to forget what is noted of a fold.
    pub(super) fn forget_fold(&mut self) {
        if !std::mem::replace(&mut self.folder.forgetting, true) {
            self.ask_worker(Task::Fold(FoldTask::Forget));
        }
    }

    pub(super) fn fold_forgotten(&mut self, result: &Result<(), Failure>) {
        self.folder.forgetting = false;
        self.folder.forgotten = true;
        if result.is_err() {
            self.inputs.push_back(Input::Broken);
        }
        if let Some(run) = self.folder.run.as_mut().filter(|run| run.fold.stands_aside()) {
            run.waits = Waits::Images;
            run.not_before = 0;
        }
        self.begin_waiting();
    }

    /// An image of one of the fold's layers has begun and not ended.
    pub(super) fn has_images_of(&self, fold: &Fold) -> bool {
        self.requests.images().any(|layer| fold.touches(&self.store, layer))
    }

    /// Begins a fold anew that stands aside, if there was no image for a while.
    pub(super) fn end_standing_aside(&mut self, now: u64) {
        let Some(run) = self.folder.run.take_if(|run| run.waits == Waits::Images) else { return };
        let images = self.has_images_of(&run.fold);
        let run = self.folder.run.insert(run);
        if images {
            run.not_before = 0;
        } else if run.not_before == 0 {
            run.not_before = now.saturating_add(QUIET_NS);
        } else if now >= run.not_before {
            run.fold.begin_anew(&mut self.store);
            run.waits = Waits::Nothing;
            run.not_before = 0;
            let plan = run.fold.plan().clone();
            let checksums = self.checksums_of_both(&plan);
            if let Some(Run { checksums: before, .. }) = &mut self.folder.run {
                *before = checksums;
            }
        }
    }
}
