//! Flushes, grouped: one sync runs at a time, and whoever comes while it runs waits for the next, because what he
//! wants on stable storage may have been written after this one began.

use lh_wire::{Control, OpCode, Status};

use super::{Body, Completed, Core, Failure, Output, RequestId, Stage, sabotaged};

/// Who waits for which sync.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    running: bool,
    /// Served by the sync that runs.
    covered: Vec<RequestId>,
    /// Served by the next.
    waiting: Vec<RequestId>,
}

impl Syncs {
    pub(super) const fn is_running(&self) -> bool {
        self.running
    }

    /// Nobody waits for the next sync.
    pub(super) const fn nobody_waits(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes out whom `keep` does not want to keep.
    pub(super) fn retain(&mut self, keep: impl Fn(RequestId) -> bool) {
        self.covered.retain(|id| keep(*id));
        self.waiting.retain(|id| keep(*id));
    }

    /// Takes everybody out.
    pub(super) fn take_all(&mut self) -> Vec<RequestId> {
        let mut all = std::mem::take(&mut self.covered);
        all.append(&mut self.waiting);
        all
    }
}

impl Core {
    pub(super) fn flush(&mut self, id: RequestId, out: &mut Vec<Output>) {
        if sabotaged!(self, flush_early) {
            self.finish(id, Status::Ok, Completed::default(), Body::None, out);
        } else {
            self.await_sync(id);
        }
    }

    /// The request goes on after a sync that begins from now on.
    pub(super) fn await_sync(&mut self, id: RequestId) {
        self.set_stage(id, Stage::Syncing);
        self.syncs.waiting.push(id);
    }

    /// Starts a sync if one is wanted. None starts while the chain is being switched: the one that follows covers the
    /// former head.
    pub(super) fn start_sync(&mut self, out: &mut Vec<Output>) {
        let syncs = &mut self.syncs;
        if syncs.running || syncs.waiting.is_empty() || self.switching || self.failed {
            return;
        }
        std::mem::swap(&mut syncs.covered, &mut syncs.waiting);
        syncs.running = true;
        self.written = false;
        out.push(Output::Sync);
    }

    /// The sync has ended. A failed one is never tried again: pages that could not be written count as clean in the
    /// kernel, and a second sync would say that all is well.
    pub(super) fn synced(&mut self, result: Result<(), Failure>, out: &mut Vec<Output>) {
        self.syncs.running = false;
        if result.is_err() {
            self.fail(out);
            return;
        }
        let mut covered = std::mem::take(&mut self.syncs.covered);
        for id in covered.drain(..) {
            self.go_on_synced(id, out);
        }
        // Nobody can have joined a sync that is over; the buffer is used again.
        self.syncs.covered = covered;
    }

    fn go_on_synced(&mut self, id: RequestId, out: &mut Vec<Output>) {
        let Some(request) = self.request(id) else { return };
        let more = request.header.op == OpCode::Control
            && matches!(
                request.control.as_deref(),
                Some(Control::RebuildBegin { .. } | Control::RebuildEnd | Control::Close)
            );
        if more {
            self.control_synced(id);
        } else {
            let completed = Completed { aux: request.aux, ..Completed::default() };
            self.finish(id, Status::Ok, completed, Body::None, out);
        }
    }

    /// The replica has failed for good: whoever waits hears so, whoever comes too.
    pub(super) fn fail(&mut self, out: &mut Vec<Output>) {
        self.failed = true;
        for id in self.syncs.take_all() {
            self.fail_request(id, Failure::Io, out);
        }
        let mut waiting = std::mem::take(&mut self.held);
        waiting.append(&mut self.intent_waiting);
        for id in waiting {
            if let Some(job) = self.request(id).and_then(|r| r.job) {
                self.leave_store(job);
            }
            self.fail_request(id, Failure::Io, out);
        }
        for id in self.take_queued_controls() {
            self.fail_request(id, Failure::Io, out);
        }
    }
}
