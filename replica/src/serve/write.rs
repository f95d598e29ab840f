//! Writes and zeroes.

use lh_block::{BLOCK, Extent};
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
                Err(e) => {
                    self.requests.get(id).payload = payload;
                    self.fail_write(id, head, range, &e);
                }
            }
        } else if self.align_payload(id) {
            let until = self.requests.get(id).payload.len();
            self.write_until(id, head, range, until);
        } else {
            self.starve(id);
        }
    }

    /// Submits the first `until` bytes of a write.
    fn write_until(&mut self, id: RequestId, head: LayerNo, range: Extent, until: usize) {
        let slot = self.requests.get(id);
        slot.work = Work::Write { done: 0, until };
        slot.left = 1;
        let token = Token::new(OWNER, kind::WRITE, 0, id.0);
        let file = &self.files[usize::from(head.0)];
        if until == slot.payload.len() {
            self.ring.writev(token, file, range.offset, &slot.payload);
        } else {
            self.ring.writev(token, file, range.offset, &slot.payload.slice(0, until));
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
        let Work::Write { done, until } = &mut slot.work else { return };
        match &c.result {
            Ok(n) if *n > 0 && *done + (*n as usize) < *until => {
                *done += *n as usize;
                let rest = slot.payload.slice(*done, *until - *done);
                let offset = range.offset + *done as u64;
                self.ring.writev(c.token, &self.files[usize::from(head.0)], offset, &rest);
            }
            Ok(n) if *n > 0 && *until < slot.payload.len() => {
                let first = Extent::new(range.offset, *until as u64);
                self.written_first(id, first);
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

    /// The first blocks of a write are done, all that need no space.
    fn written_first(&mut self, id: RequestId, first: Extent) {
        let sync = self.store.wrote(first) == Answer::AfterFlush;
        let aux = lh_wire::in_part(u32::try_from(first.len / BLOCK).unwrap_or(u32::MAX >> 1));
        self.end(id, Ok(Completed { sync, aux, payload: 0 }));
    }

    /// Something went wrong between plan and report: the store looks at what the file holds now. If that is nothing, nothing was
    /// written; what it held before may have been written over.
    fn fail_write(&mut self, id: RequestId, layer: LayerNo, range: Extent, error: &std::io::Error) {
        let failure = note(&self.status, error);
        self.refresh(layer, range);
        let first = if failure == Failure::NoSpace { self.store.head_holds_first(range) } else { None };
        let untouched = first.is_some_and(|first| first.is_empty()) || !self.store.head_holds_any(range);
        if untouched {
            return self.end(id, Err(failure));
        }
        match first {
            Some(first) if first != range && self.write_first(id, layer, first) => {}
            _ => self.end(id, Err(failure.in_part())),
        }
    }

    /// A write had no space for all blocks. Those before the first hole need none: they are written, again, so that it can be told
    /// what is done, and the engine need not keep the whole range until there is space. True if that has begun.
    fn write_first(&mut self, id: RequestId, head: LayerNo, first: Extent) -> bool {
        let slot = self.requests.get(id);
        let is_second = matches!(slot.work, Work::Write { until, .. } if until < slot.payload.len());
        let Ok(until) = usize::try_from(first.len) else { return false };
        let begun = !is_second && self.store.begin_write(head, first) && self.align_payload(id);
        if begun {
            self.write_until(id, head, first, until);
        }
        begun
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
