//! Records on their way to stable storage, and what becomes true when they are there.

use super::intent::IntentMap;
use super::{
    Body, Completed, Core, Directory, Failure, Output, PersistId, Purpose, Record, RequestId, sabotaged,
};
use lh_wire::{ChainOp, Control, Status};

/// After so long trails are tried again that could not be saved.
const MISSED_AGAIN_NS: u64 = 1_000_000_000;

impl Core {
    pub(super) fn persist(&mut self, purpose: Purpose, record: Record, out: &mut Vec<Output>) {
        let id = PersistId(self.persist_next);
        self.persist_next += 1;
        if matches!(&record, Record::Epoch { out, .. } if out.is_empty()) {
            self.forgetting = Some(id);
        }
        self.persists.push((id, purpose));
        out.push(Output::Persist { id, record });
    }

    /// Puts out the next record of the intent bitmap, if there is one.
    pub(super) fn save_intent(&mut self, now_ns: u64, out: &mut Vec<Output>) {
        if self.directory != Directory::Open || self.switching || self.failed {
            return;
        }
        if let Some(record) = self.intent.next_record(now_ns) {
            self.persist(Purpose::Intent, record, out);
        }
    }

    pub(super) fn persisted(
        &mut self,
        now_ns: u64,
        id: PersistId,
        result: Result<(), Failure>,
        out: &mut Vec<Output>,
    ) {
        let Some(at) = self.persists.iter().position(|(p, _)| *p == id) else { return };
        let (_, purpose) = self.persists.swap_remove(at);
        self.forgetting.take_if(|forgetting| *forgetting == id);
        // The disk may hold half of it and would not tell: as with a failed sync, nothing more is believed.
        if result == Err(Failure::Io) {
            self.fail(out);
        }
        match purpose {
            Purpose::Fence(generation, instance) => {
                self.fence_saving = false;
                match result {
                    Ok(_) => self.fence_durable = Some((generation, instance)),
                    Err(_) => self.refuse_waiting(out),
                }
            }
            Purpose::Intent => {
                self.intent.saved(now_ns, result.is_ok());
                self.release_marked(result.as_ref().err(), out);
            }
            Purpose::Begin => {
                self.directory = if result.is_ok() { Directory::Open } else { Directory::Closed };
                self.powered |= self.lived && result.is_ok();
                if result.is_err() {
                    self.refuse_waiting(out);
                }
            }
            Purpose::Missed => {
                if result.is_err() {
                    // A full disk: the marks stay meanwhile.
                    self.missed_at = Some(now_ns.saturating_add(MISSED_AGAIN_NS));
                }
                for chunk in self.missed.saved(result.is_ok()) {
                    self.clear_chunk(now_ns, chunk);
                }
            }
            Purpose::Whole => self.powered |= result.is_ok(),
            Purpose::Forget(request) => match result {
                Ok(()) if !self.failed => self.forgotten(request, out),
                // The operation itself has not begun, so it has not been done either.
                result => self.control_persisted(request, Err(result.err().unwrap_or(Failure::Io)), out),
            },
            Purpose::Control(request) => self.control_persisted(request, result, out),
        }
    }

    fn control_persisted(&mut self, id: RequestId, result: Result<(), Failure>, out: &mut Vec<Output>) {
        let Some(control) = self.request(id).and_then(|r| r.control.take()) else { return };
        let done = result.is_ok();
        let commits = matches!(*control, Control::Commit { .. });
        self.take_effect(*control, done);
        // Control operations run one at a time, so a switch that is on its way is this one.
        if std::mem::take(&mut self.switching) {
            self.release_held(out);
        }
        match result {
            _ if self.failed => self.fail_request(id, Failure::Io, out),
            Err(failure) => self.fail_request(id, failure, out),
            Ok(_) if commits && !self.is_orphan(id) => self.await_sync(id),
            Ok(_) => self.finish(id, Status::Ok, Completed::default(), Body::None, out),
        }
    }

    /// What is true from now on.
    fn take_effect(&mut self, control: Control, done: bool) {
        match control {
            Control::Close => self.closed_by(done),
            _ if !done => {}
            Control::SetEpoch { epoch, out } if self.filling => self.next_epoch = Some((epoch, out)),
            Control::SetEpoch { epoch, out } => self.epoch_stored(epoch, &out),
            Control::Prepare { id, op } => self.prepared = Some((id, op)),
            Control::Commit { id } | Control::Switch { id } => {
                if let Some((_, ChainOp::Expand { size, .. })) = self.prepared.take() {
                    self.size = size;
                    self.intent.resize(size);
                }
                self.committed = Some(id);
            }
            Control::Abort { .. } => self.prepared = None,
            Control::RebuildBegin { size, .. } => {
                let keeps_maps = sabotaged!(self, map_with_gap);
                if !keeps_maps {
                    self.strange = true;
                    let intent = &self.intent;
                    self.missed.set_out(Vec::new(), |n| intent.is_marked(n));
                }
                self.size = size;
                self.intent.resize(size);
                self.prepared = None;
                self.committed = None;
                self.clean = false;
                self.filling = true;
                self.notes_whole = false;
                self.next_epoch = None;
            }
            // Everything it holds came through this process and is synced.
            Control::RebuildEnd => {
                self.lived = true;
                self.powered = true;
                self.filling = false;
                if let Some((epoch, out)) = self.next_epoch.take() {
                    self.epoch_stored(epoch, &out);
                }
            }
            Control::State
            | Control::Resolved
            | Control::Missed { .. }
            | Control::LayerMap { .. }
            | Control::Settled { .. }
            | Control::Fold { .. }
            | Control::FoldStop
            | Control::Hash { .. }
            | Control::HashStop => {}
        }
    }

    /// The epoch counts for this replica: who is out is remembered.
    fn epoch_stored(&mut self, epoch: lh_block::Epoch, names: &[String]) {
        let out = self.leavers(self.epoch.as_ref(), &epoch, names);
        if self.epoch.as_ref() == Some(&epoch) && out == self.missed.out() {
            // Another round of the same: nothing is to be looked through for it.
            self.epoch = Some(epoch);
            return;
        }
        self.strange = false;
        #[cfg(feature = "sabotage")]
        if self.sabotage.map_begins_empty && out.len() > self.missed.out().len() {
            self.missed.forget_written();
        }
        let intent = &self.intent;
        self.missed.set_out(out, |n| intent.is_marked(n));
        self.epoch = Some(epoch);
    }

    /// Everything that was answered is here, and the directory is to say so. Nobody waits for it, and it is not tried again: without
    /// it the replica counts for less than it is.
    pub(super) fn note_whole(&mut self, out: &mut Vec<Output>) {
        if self.directory == Directory::Open && !self.switching && std::mem::take(&mut self.notes_whole) {
            self.persist(Purpose::Whole, Record::Whole, out);
        }
    }

    /// Puts out the next trails that have to be saved, if there are some. None behind an epoch that nobody is out of: what was
    /// saved goes with that, and whoever leaves afterwards needs all of it saved anew.
    pub(super) fn save_missed(&mut self, now_ns: u64, out: &mut Vec<Output>) {
        self.missed_at.take_if(|at| *at <= now_ns);
        if self.missed_at.is_some() {
            return;
        }
        let goes = self.forgetting.is_some();
        if self.directory != Directory::Open || self.switching || self.failed || goes {
            return;
        }
        if let Some(record) = self.missed.next_record() {
            self.persist(Purpose::Missed, record, out);
        }
    }

    /// All is complete, on stable storage, and the same on every member, says who closes: nothing is in doubt. If the close could
    /// not be noted (`cleanly` is false), the marks may be gone from the disk all the same, and volume.meta may say that nobody
    /// writes: the next session opens the directory anew, and its writes wait for marks of their own.
    fn closed_by(&mut self, cleanly: bool) {
        self.directory = Directory::Closed;
        self.intent = IntentMap::new(self.intent.chunk(), self.size, &[]);
        self.missed.set_out(self.missed.out().to_vec(), |_| false);
        self.doubt.resolve();
        self.conns.iter_mut().for_each(|c| c.window.clear());
        self.clean |= cleanly;
        self.lived |= cleanly;
    }

    pub(super) fn is_orphan(&mut self, id: RequestId) -> bool {
        self.request(id).is_some_and(|r| r.orphan)
    }
}
