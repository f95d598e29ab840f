//! Control operations: one at a time, in the order in which a session sent them, whichever connection they came by.

use lh_wire::{ChainOp, Control, MapPage, Outsider, ReplicaState, Status};

use super::{
    Body, Completed, Core, Directory, Failure, Output, Purpose, Record, RequestId, Stage, sabotaged,
};

/// What a control operation comes to.
enum Step {
    /// Answered at once.
    Answer,
    /// Refused with a sentence.
    Refuse(String),
    /// Not beside a sync or a record of the intent bitmap: tried again after it.
    Later,
    /// Asks the directory first.
    Describe,
    /// Answered at once, with a page of a map.
    Tell(Box<MapPage>),
    /// Asks the store where a layer holds something, from a place on.
    Map(String, u64, bool),
    /// What is kept of others goes first; then it is its turn again.
    Forget(Record),
    /// A record, then the answer.
    Save(Record),
    /// A record that nothing else may run beside, then the answer.
    Switch(Record),
    /// A sync, then more.
    Sync,
}

impl Core {
    /// A control message has come.
    pub(super) fn queue_control(&mut self, id: RequestId, out: &mut Vec<Output>) {
        let readable = self.request(id).is_some_and(|r| r.control.is_some());
        match self.session.as_mut() {
            Some(session) if readable => session.controls.push_back(id),
            _ => self.finish(id, Status::Invalid, Completed::default(), Body::None, out),
        }
    }

    /// Starts whatever control operations can start.
    pub(super) fn start_controls(&mut self, out: &mut Vec<Output>) {
        while let Some(session) = self.session.as_mut().filter(|s| s.control.is_none()) {
            let Some(id) = session.controls.pop_front() else { return };
            let synced = session.synced;
            session.control = Some(id);
            let control = self.request(id).and_then(|r| r.control.take());
            let step = match control.as_deref() {
                Some(control) => self.step(control, synced),
                None => Step::Answer,
            };
            if let Some(request) = self.request(id) {
                request.control = control;
            }
            if matches!(step, Step::Later) {
                if let Some(session) = self.session.as_mut() {
                    session.control = None;
                    session.controls.push_front(id);
                }
                return;
            }
            self.take_step(id, step, out);
        }
    }

    fn take_step(&mut self, id: RequestId, step: Step, out: &mut Vec<Output>) {
        match step {
            Step::Later => {}
            Step::Answer => self.finish(id, Status::Ok, Completed::default(), Body::None, out),
            Step::Refuse(text) => self.fail_request(id, Failure::Refused(text.into()), out),
            Step::Sync => self.await_sync(id),
            Step::Describe => {
                self.set_stage(id, Stage::Running);
                out.push(Output::Describe { request: id });
            }
            Step::Tell(page) => {
                self.finish(id, Status::Ok, Completed::default(), Body::Map(page), out);
            }
            Step::Map(layer, from, recorded) => {
                self.set_stage(id, Stage::Running);
                out.push(Output::Map { request: id, layer, from, recorded });
            }
            Step::Forget(record) => {
                self.set_stage(id, Stage::Running);
                self.persist(Purpose::Forget(id), record, out);
            }
            Step::Save(record) => {
                self.set_stage(id, Stage::Running);
                self.persist(Purpose::Control(id), record, out);
            }
            Step::Switch(record) => {
                self.switching = true;
                if record == Record::Close {
                    self.directory = Directory::Closing;
                }
                self.set_stage(id, Stage::Running);
                self.persist(Purpose::Control(id), record, out);
            }
        }
    }

    fn step(&mut self, control: &Control, synced: bool) -> Step {
        if self.directory != Directory::Open {
            return Step::Refuse(super::CLOSED.into());
        }
        match control {
            Control::State => Step::Describe,
            Control::SetEpoch { epoch, out } => self.step_epoch(epoch, out),
            Control::Resolved => {
                self.all_is_equal();
                Step::Answer
            }
            Control::Prepare { id, op } => match &self.prepared {
                Some((prepared, _)) if prepared == id => Step::Answer,
                Some(_) => {
                    Step::Refuse("another chain operation is prepared: commit or abort it first".into())
                }
                None if self.committed == Some(*id) => {
                    Step::Refuse("this chain operation was carried out already".into())
                }
                // What the head held is gone then: no trail tells of it.
                None if matches!(op, ChainOp::Revert { .. })
                    && !self.missed.out().is_empty()
                    && !sabotaged!(self, map_survives_revert) =>
                {
                    let epoch = self.epoch.clone().unwrap_or_default();
                    Step::Forget(Record::Epoch { epoch, out: Vec::new() })
                }
                None => Step::Save(Record::Prepare { id: *id, op: op.clone() }),
            },
            Control::Missed { replica, base, from } => {
                match self.missed.page(replica, base, *from, self.size) {
                    Some(page) => Step::Tell(Box::new(page)),
                    None => {
                        Step::Refuse(format!("this replica has not seen every write since {replica} left"))
                    }
                }
            }
            Control::LayerMap { layer, from, recorded } => Step::Map(layer.clone(), *from, *recorded),
            Control::Commit { id } => self.step_commit(*id),
            Control::Switch { id } if self.committed == Some(*id) => Step::Answer,
            Control::Switch { id } => self.step_commit(*id),
            Control::Abort { id } => match &self.prepared {
                Some((prepared, _)) if prepared == id => Step::Save(Record::Abort { id: *id }),
                _ if self.committed == Some(*id) => {
                    Step::Refuse("this chain operation was carried out and cannot be taken back".into())
                }
                _ => Step::Answer,
            },
            // What is settled on the members need not be here yet: an interrupted rebuild has to look at it again.
            Control::Settled { .. } if self.filling => Step::Answer,
            Control::Settled { snapshot } => Step::Save(Record::Settled { snapshot: snapshot.clone() }),
            Control::Fold { .. } if self.filling => {
                Step::Refuse("this replica is being rebuilt: fold when that is done".into())
            }
            Control::Fold { name, bytes_per_second } => {
                Step::Save(Record::Fold { name: name.clone(), bytes_per_second: *bytes_per_second })
            }
            Control::FoldStop => Step::Save(Record::FoldStop),
            Control::Hash { .. } if self.filling => {
                Step::Refuse("this replica is being rebuilt: take checksums when that is done".into())
            }
            Control::Hash { snapshots, bytes_per_second } => {
                Step::Save(Record::Hash { snapshots: snapshots.clone(), bytes_per_second: *bytes_per_second })
            }
            Control::HashStop => Step::Save(Record::HashStop),
            Control::RebuildBegin { keep: Some(_), .. } if !synced => Step::Sync,
            Control::RebuildBegin { size, chain, keep } => match self.unquiet("a rebuild can begin") {
                None => Step::Switch(Record::RebuildBegin {
                    size: *size,
                    chain: chain.clone(),
                    keep: keep.clone(),
                }),
                Some(step) => step,
            },
            Control::RebuildEnd if synced => Step::Save(Record::RebuildEnd),
            Control::RebuildEnd => Step::Sync,
            Control::Close => self.step_close(synced),
        }
    }

    /// An engine has made everything equal that was in doubt: what was answered is here.
    fn all_is_equal(&mut self) {
        self.doubt.resolve();
        self.lived = true;
        let noted = self.persists.iter().any(|(_, purpose)| matches!(purpose, Purpose::Whole));
        self.notes_whole = !self.powered && !noted;
    }

    fn step_epoch(&self, epoch: &lh_block::Epoch, names: &[String]) -> Step {
        let own = self.generation();
        if epoch.generation > own {
            return Step::Refuse(format!(
                "an epoch of generation {} cannot be set by an engine of generation {own}",
                epoch.generation
            ));
        }
        let next = self.next_epoch.as_ref().map(|(next, _)| next);
        match next.or(self.epoch.as_ref()) {
            Some(stored) if stored == epoch && stored.after >= epoch.after && stored.round >= epoch.round => {
                Step::Answer
            }
            Some(stored) if stored != epoch && stored.order() >= epoch.order() => Step::Refuse(format!(
                "this replica has a younger epoch: generation {}, number {}",
                stored.generation, stored.counter
            )),
            _ => {
                let out = self.leavers(self.epoch.as_ref(), epoch, names);
                Step::Save(Record::Epoch { epoch: epoch.clone(), out })
            }
        }
    }

    /// Whom trails are kept for once this epoch has followed on that one. Who leaves while a revert is prepared will not have the
    /// head that it makes, and no trail would tell of that: it is compared wholly.
    pub(super) fn leavers(
        &self,
        old: Option<&lh_block::Epoch>,
        new: &lh_block::Epoch,
        names: &[String],
    ) -> Vec<Outsider> {
        let reverts = matches!(self.prepared, Some((_, ChainOp::Revert { .. })));
        let names = if reverts && !sabotaged!(self, map_survives_revert) { &[] } else { names };
        self.missed.after(old, new, names, self.strange)
    }

    fn step_commit(&self, id: lh_block::Instance) -> Step {
        if self.committed == Some(id) {
            // The switch is done; the sync that its answer stands for may not be.
            return Step::Sync;
        }
        match &self.prepared {
            Some((prepared, op)) if *prepared == id => match op {
                ChainOp::Snapshot { .. } if self.writes > 0 => {
                    Step::Refuse(in_flight("a snapshot can be taken"))
                }
                ChainOp::Snapshot { .. } => Step::Switch(Record::Commit { id }),
                ChainOp::Expand { .. } if self.writes > 0 => {
                    Step::Refuse(in_flight("the volume can be expanded"))
                }
                // The directory writes the bitmap anew.
                ChainOp::Expand { .. } if self.intent.is_saving() => Step::Later,
                ChainOp::Expand { .. } => Step::Switch(Record::Commit { id }),
                // The old head's file goes.
                ChainOp::Revert { .. } => match self.unquiet("the volume can be reverted") {
                    None => Step::Switch(Record::Commit { id }),
                    Some(step) => step,
                },
                ChainOp::MarkRemoved { .. } => Step::Save(Record::Commit { id }),
            },
            _ => Step::Refuse("this chain operation was not prepared here".into()),
        }
    }

    /// What is to be done where some request is in the store, a sync runs, or a mark is on its way. `None`: none is.
    fn unquiet(&self, what: &str) -> Option<Step> {
        if self.jobs > 0 {
            Some(Step::Refuse(in_flight(what)))
        } else if self.syncs.is_running() || self.intent.is_saving() {
            Some(Step::Later)
        } else {
            None
        }
    }

    /// The sync that a control operation begins with has ended: it is its turn again.
    pub(super) fn control_synced(&mut self, id: RequestId) {
        self.set_stage(id, Stage::Queued);
        if let Some(session) = self.session.as_mut() {
            session.control = None;
            session.synced = true;
            session.controls.push_front(id);
        }
    }

    /// A directory is closed after a sync that nothing was written behind.
    fn step_close(&mut self, synced: bool) -> Step {
        let late = self.written || !self.syncs.nobody_waits();
        if self.jobs > 0 || (synced && late) {
            self.missed.save_what_is_due();
            return Step::Refuse(in_flight("the directory can be closed"));
        }
        match synced {
            false => Step::Sync,
            true if self.syncs.is_running() || self.intent.is_saving() => Step::Later,
            // The marks go with the close.
            true if !self.missed.save_all() => Step::Later,
            true => Step::Switch(Record::Close),
        }
    }

    /// The directory has spoken; the machine adds what only it knows.
    pub(super) fn described(
        &mut self,
        id: RequestId,
        result: Result<Box<ReplicaState>, Failure>,
        out: &mut Vec<Output>,
    ) {
        let mut state = match result {
            Ok(state) if !self.failed => state,
            Ok(_) => return self.fail_request(id, Failure::Io, out),
            Err(failure) => return self.fail_request(id, failure, out),
        };
        state.previous_generation = self.session.as_ref().map(|s| s.previous).unwrap_or_default();
        state.in_doubt = self.doubt.report(self.size);
        state.intent_chunk = self.intent.chunk();
        state.intent = self.intent.report(self.size);
        state.lived = self.lived;
        state.powered = self.lived || self.powered;
        state.clean = self.clean;
        self.finish(id, Status::Ok, Completed::default(), Body::State(state), out);
    }

    /// The store has looked at a layer.
    pub(super) fn mapped(
        &mut self,
        id: RequestId,
        result: Result<Box<MapPage>, Failure>,
        out: &mut Vec<Output>,
    ) {
        match result {
            Ok(page) if !self.failed => {
                self.finish(id, Status::Ok, Completed::default(), Body::Map(page), out);
            }
            Ok(_) => self.fail_request(id, Failure::Io, out),
            Err(failure) => self.fail_request(id, failure, out),
        }
    }

    /// What was kept of others is durably forgotten: the operation that asked for it has its turn again.
    pub(super) fn forgotten(&mut self, id: RequestId, out: &mut Vec<Output>) {
        let intent = &self.intent;
        self.missed.set_out(Vec::new(), |n| intent.is_marked(n));
        if self.is_orphan(id) {
            // Nobody waits for it any more, and it has not begun.
            return self.finish(id, Status::Ok, Completed::default(), Body::None, out);
        }
        self.set_stage(id, Stage::Queued);
        if let Some(session) = self.session.as_mut().filter(|s| s.control == Some(id)) {
            session.control = None;
            session.controls.push_front(id);
        }
    }

    /// The control operations that have not begun.
    pub(super) fn take_queued_controls(&mut self) -> Vec<RequestId> {
        self.session.as_mut().map(|s| s.controls.drain(..).collect()).unwrap_or_default()
    }
}

fn in_flight(what: &str) -> String {
    format!("requests are in flight: pause them before {what}")
}
