//! Writes and zeroes.

use lh_block::Extent;
use lh_ring::{Completion, Falloc, Payload, Token};

use super::core::{Completed, Failure, Input, RequestId};
use super::memory::{PAGE, SHORT_MAX};
use super::request::Work;
use super::server::{AT_ONCE_MAX, Server};
use super::task::Task;
use super::token::{OWNER, kind};
use super::trouble::note;
use crate::store::{Answer, LayerNo, Store};

impl Server {
    /// Writes the request's payload to the head.
    pub(super) fn start_write(&mut self, id: RequestId, range: Extent) {
        let head = self.store.head();
        if !self.store.begin_write(head, range) {
            self.parked.push(id);
        } else if self.in_memory && self.requests.get(id).payload.len() <= AT_ONCE_MAX {
            let payload = std::mem::take(&mut self.requests.get(id).payload);
            match payload.write_to(self.store.layer_file(head), range.offset) {
                Ok(()) => self.written(id, range),
                Err(e) => self.fail_write(id, head, range, &e),
            }
        } else if self.align_payload(id) {
            let slot = self.requests.get(id);
            slot.work = Work::Write { done: 0 };
            slot.left = 1;
            let token = Token::new(OWNER, kind::WRITE, 0, id.0);
            self.ring.writev(token, &self.files[usize::from(head.0)], range.offset, &slot.payload);
        } else {
            self.starve(id);
        }
    }

    /// Makes the payload fit for the disk: where it lies, or as a copy. False if there is no memory for that now.
    fn align_payload(&mut self, id: RequestId) -> bool {
        let slot = self.requests.get(id);
        let range = Extent::new(slot.header.offset, slot.header.length.into());
        let Some((memory, offset)) = self.store.write_alignment(range) else { return true };
        if slot.payload.is_aligned(memory, offset) {
            return true;
        }
        // Bytes that are lent take no memory here until they are copied: for that holds what holds for receiving.
        let short = self.status.is_memory_short() && self.pool.used_bytes() >= SHORT_MAX;
        if short && self.requests.is_any_in_the_ring() {
            return false;
        }
        let slot = self.requests.get(id);
        match aligned_copy(&self.pool, &slot.payload) {
            Some(copy) => {
                slot.payload = copy;
                true
            }
            None => false,
        }
    }

    pub(super) fn write_done(&mut self, c: &Completion) {
        let id = RequestId(c.token.data);
        if matches!(self.requests.get(id).work, Work::Put(_)) {
            return self.put_op_done(c);
        }
        let head = self.store.head();
        let slot = self.requests.get(id);
        let range = Extent::new(slot.header.offset, slot.header.length.into());
        let Work::Write { done } = &mut slot.work else { return };
        match &c.result {
            Ok(n) if *n > 0 && *done + (*n as usize) < slot.payload.len() => {
                *done += *n as usize;
                let rest = slot.payload.slice(*done, slot.payload.len() - *done);
                let offset = range.offset + *done as u64;
                self.ring.writev(c.token, &self.files[usize::from(head.0)], offset, &rest);
            }
            Ok(n) if *n > 0 => self.written(id, range),
            Ok(_) => self.fail_write(id, head, range, &std::io::ErrorKind::WriteZero.into()),
            Err(e) => self.fail_write(id, head, range, e),
        }
    }

    fn written(&mut self, id: RequestId, range: Extent) {
        let sync = self.store.wrote(range) == Answer::AfterFlush;
        self.end(id, Ok(Completed { sync, ..Completed::default() }));
    }

    /// Something went wrong between plan and report: the store looks at what the file holds now. If that is nothing, nothing was
    /// written; what it held before may have been written over.
    fn fail_write(&mut self, id: RequestId, layer: LayerNo, range: Extent, error: &std::io::Error) {
        let failure = note(&self.status, error);
        self.refresh(layer, range);
        let in_part = self.store.head_holds_any(range);
        self.end(id, Err(if in_part { failure.in_part() } else { failure }));
    }

    pub(super) fn refresh(&mut self, layer: LayerNo, range: Extent) {
        if let Err(e) = self.store.refresh(layer, range) {
            self.break_down(&e);
        }
    }

    /// The store could not note what has happened: nobody knows what the directory holds.
    pub(super) fn break_down(&mut self, error: &std::io::Error) -> Failure {
        note(&self.status, error);
        self.inputs.push_back(Input::Broken);
        Failure::Io
    }

    /// The worker could not make something durable that is no record. Unless the disk is full nobody knows what it holds of that, and
    /// it would not tell with the next try.
    pub(super) fn worker_failed(&mut self, failure: &Failure) {
        if *failure == Failure::Io {
            self.inputs.push_back(Input::Broken);
        }
    }

    /// Makes a range of the head read as zero.
    pub(super) fn start_zero(&mut self, id: RequestId, range: Extent) {
        let head = self.store.head();
        let in_doubt = self.core.is_in_doubt();
        let checksums = &mut self.checksums;
        let mut recorded = |store: &Store, layer, part| checksums.recorded(store, layer, part);
        let plan = match self.store.plan_zero(range, in_doubt, &mut recorded) {
            Ok(plan) => plan,
            Err(e) => {
                let failure = note(&self.status, &e);
                return self.end(id, Err(failure));
            }
        };
        let slot = self.requests.get(id);
        slot.left = u32::try_from(plan.punch.len()).unwrap_or(u32::MAX);
        for hole in &plan.punch {
            let token = Token::new(OWNER, kind::PUNCH, 0, id.0);
            self.ring.fallocate(
                token,
                &self.files[usize::from(head.0)],
                Falloc::PunchHole,
                hole.offset,
                hole.len,
            );
        }
        slot.work = Work::Zero(Box::new(plan));
        if slot.left == 0 {
            self.zero_punched(id);
        }
    }

    pub(super) fn punch_done(&mut self, c: &Completion) {
        let id = RequestId(c.token.data);
        if matches!(self.requests.get(id).work, Work::Put(_)) {
            return self.put_op_done(c);
        }
        let slot = self.requests.get(id);
        slot.left -= 1;
        if let Err(e) = &c.result {
            slot.failure = Some(note(&self.status, e));
        }
        if slot.left == 0 {
            self.zero_punched(id);
        }
    }

    fn zero_punched(&mut self, id: RequestId) {
        let slot = self.requests.get(id);
        let Work::Zero(plan) = &slot.work else { return };
        if slot.failure.is_none() && plan.needs_mark {
            self.await_mark(id);
        } else {
            self.zero_report(id);
        }
    }

    fn zero_report(&mut self, id: RequestId) {
        let head = self.store.head();
        let slot = self.requests.get(id);
        let Work::Zero(plan) = std::mem::take(&mut slot.work) else { return };
        let result = match slot.failure.take() {
            Some(failure) => {
                self.refresh(head, plan.extent);
                Err(if plan.punch.is_empty() { failure } else { failure.in_part() })
            }
            None => self.store.zeroed(&plan).map_err(|e| self.break_down(&e)),
        };
        self.end(id, result.map(|()| Completed::default()));
    }

    /// Waits until volume.meta says that there are zero bits; one task serves all.
    pub(super) fn await_mark(&mut self, id: RequestId) {
        if self.unmarked.is_empty() {
            self.ask_worker(Task::MarkZeroes);
        }
        self.unmarked.push(id);
    }

    pub(super) fn zeroes_marked(&mut self, result: Result<(), Failure>) {
        match &result {
            Ok(()) => self.store.marked(),
            Err(failure) => self.worker_failed(failure),
        }
        for id in std::mem::take(&mut self.unmarked) {
            let slot = self.requests.get(id);
            slot.failure = result.clone().err();
            match slot.work {
                Work::Put(_) => self.put_report(id),
                _ => self.zero_report(id),
            }
        }
    }

    /// A punch has ended: writes that waited for one ask again.
    pub(super) fn unpark(&mut self) {
        for id in std::mem::take(&mut self.parked) {
            if let Some(job) = self.requests.get(id).job {
                self.start_job(id, job);
            }
        }
    }
}

/// A copy that every disk takes. `None` if there is no memory for it now.
pub(super) fn aligned_copy(pool: &lh_ring::Pool, payload: &Payload) -> Option<Payload> {
    let mut copy = pool.alloc(u32::try_from(payload.len()).ok()?, PAGE)?;
    copy.write_payload(0, payload);
    Some(copy)
}
