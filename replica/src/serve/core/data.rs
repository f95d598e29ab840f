//! Reads, writes and their kin: what is checked, what they wait for, how they end.
//!
//! The engine holds the ranges of overlapping requests, so nothing is ordered here. Everything that goes to the store
//! passes [`Core::start`].

use lh_block::{ALLOCATION_MAX, BLOCK, Extent};
use lh_wire::{Header, MAX_DATA, OpCode, Status, VERIFY_MAX, flags, pieces_of};

use super::intent::Mark;
use super::{Body, Completed, Core, Failure, Job, Output, RequestId, Stage, sabotaged};

/// The store's job for a header, or nothing if the header makes no sense for a volume of `size` bytes.
fn job(header: &Header, size: u64) -> Option<Job> {
    let range = Extent::new(header.offset, header.length.into());
    let sound = range.is_aligned(BLOCK) && !range.is_empty() && range.end() <= size;
    let short = header.length <= MAX_DATA;
    let bare = header.payload == 0;
    let (job, right) = match header.op {
        OpCode::Read => (Job::Read(range), short && bare),
        OpCode::Write => (Job::Write(range), short && header.payload == header.length),
        OpCode::WriteZeroes => (Job::Zero(range), bare),
        OpCode::Unmap => (Job::Unmap(range), bare),
        OpCode::ReadLayer => (Job::ReadLayer { range, merged: header.aux == lh_wire::MERGED }, short),
        OpCode::DigestLayer => (Job::DigestLayer(range), short),
        OpCode::CompareLayer => (Job::CompareLayer(range), short),
        OpCode::VerifyLayer => (Job::VerifyLayer(range), range.len <= VERIFY_MAX),
        OpCode::Places => (Job::Places(range), bare && pieces_of(range).count() == 1),
        OpCode::Allocation => (Job::Allocation(range), bare && range.len <= ALLOCATION_MAX),
        OpCode::PutLayer => {
            (Job::PutLayer { range, trailer: header.aux }, short && header.aux <= header.payload)
        }
        _ => return None,
    };
    (sound && right).then_some(job)
}

/// True for writes whose range may be unfinished elsewhere when their engine dies. A layer image is a copy that the
/// engine makes of what another member holds: what makes the copy necessary is remembered, not the copy.
const fn leaves_doubt(job: Job) -> bool {
    matches!(job, Job::Write(_) | Job::Zero(_) | Job::Unmap(_))
}

impl Core {
    /// True for what needs its chunks' marks: after a power cut it may be gone, also what another member has sent. Not
    /// while the directory is filled: it is unusable alone until all of it was synced.
    const fn needs_mark(&self, job: Job) -> bool {
        job.is_write() && (leaves_doubt(job) || !self.filling)
    }

    /// A request for the store has come.
    pub(super) fn take_data(&mut self, id: RequestId, header: &Header, out: &mut Vec<Output>) {
        let Some(job) = job(header, self.size) else {
            self.finish(id, Status::Invalid, Completed::default(), Body::None, out);
            return;
        };
        let Some(request) = self.request(id) else { return };
        request.job = Some(job);
        let conn = request.conn;
        self.jobs += usize::from(job.touches_layers());
        if job.is_write() {
            self.writes += 1;
            self.clean = false;
            if self.needs_mark(job) {
                self.missed.note(job.range());
            }
        }
        let writer = self.conns.iter_mut().find(|c| leaves_doubt(job) && c.id == conn);
        if let Some(c) = writer {
            c.window.push(job.range());
        }
        self.admit(id, job, out);
    }

    fn admit(&mut self, id: RequestId, job: Job, out: &mut Vec<Output>) {
        if self.switching {
            self.set_stage(id, Stage::Held);
            self.held.push(id);
        } else if self.needs_mark(job)
            && self.intent.mark(job.range()) == Mark::Wait
            && !sabotaged!(self, intent_not_durable)
        {
            self.set_stage(id, Stage::Intent);
            self.intent_waiting.push(id);
        } else {
            self.start(id, job, out);
        }
    }

    /// The one door to the store.
    fn start(&mut self, id: RequestId, job: Job, out: &mut Vec<Output>) {
        self.set_stage(id, Stage::Running);
        out.push(Output::Store { request: id, job });
    }

    /// A switch has ended: what was held goes on.
    pub(super) fn release_held(&mut self, out: &mut Vec<Output>) {
        for id in std::mem::take(&mut self.held) {
            if let Some(job) = self.request(id).and_then(|r| r.job) {
                self.admit(id, job, out);
            }
        }
    }

    /// Marks became durable, or will not (`failure`).
    pub(super) fn release_marked(&mut self, failure: Option<&Failure>, out: &mut Vec<Output>) {
        let mut waiting = std::mem::take(&mut self.intent_waiting);
        waiting.retain(|&id| {
            let Some(job) = self.request(id).and_then(|r| r.job) else { return false };
            if self.intent.is_durable(job.range()) {
                self.start(id, job, out);
                return false;
            }
            match failure {
                Some(failure) if self.intent.is_lost(job.range()) => {
                    self.leave_store(job);
                    self.fail_request(id, failure.clone(), out);
                    false
                }
                _ => true,
            }
        });
        // Nothing that runs above adds to the list; the buffer is used again.
        self.intent_waiting = waiting;
    }

    /// A job is no longer on its way to or in the store.
    pub(super) fn leave_store(&mut self, job: Job) {
        self.jobs -= usize::from(job.touches_layers());
        if job.is_write() {
            self.writes -= 1;
        }
    }

    /// The store is done with a request.
    pub(super) fn store_done(
        &mut self,
        id: RequestId,
        result: Result<Completed, Failure>,
        out: &mut Vec<Output>,
    ) {
        let Some(request) = self.request(id) else { return };
        let (header, orphan) = (request.header, request.orphan);
        let Some(job) = request.job else { return };
        request.aux = result.as_ref().map_or(0, |done| done.aux);
        self.leave_store(job);
        self.written |= job.is_write();
        let fua = header.has(flags::FUA) && matches!(job, Job::Write(_) | Job::Zero(_));
        match result {
            _ if self.failed => self.fail_request(id, Failure::Io, out),
            Err(failure) => self.fail_request(id, failure, out),
            Ok(done) if (fua || done.sync) && !orphan && !sabotaged!(self, flush_early) => {
                self.await_sync(id)
            }
            Ok(completed) => {
                let body = if completed.payload > 0 { Body::Data } else { Body::None };
                self.finish(id, Status::Ok, completed, body, out);
            }
        }
    }

    /// No write is unfinished in the range, says the engine; unless one of ours is.
    pub(super) fn clear_intent(
        &mut self,
        now_ns: u64,
        id: RequestId,
        header: &Header,
        out: &mut Vec<Output>,
    ) {
        let mut range = Extent::new(header.offset, header.length.into());
        if range.end() >= self.size {
            // The last chunk counts as whole, though the volume may end within it.
            range.len = self.size.next_multiple_of(self.intent.chunk()).saturating_sub(range.offset);
        }
        // While the directory is filled a mark may be the only word of what it has too much.
        if !self.filling {
            let chunk = self.intent.chunk();
            for n in range.offset.div_ceil(chunk)..range.end() / chunk {
                if sabotaged!(self, missed_not_saved) || self.missed.may_clear(n) {
                    self.clear_chunk(now_ns, n);
                }
            }
        }
        self.finish(id, Status::Ok, Completed::default(), Body::None, out);
    }

    /// Takes a chunk's mark back, unless a write of ours is in it.
    pub(super) fn clear_chunk(&mut self, now_ns: u64, n: u64) {
        let chunk = self.intent.chunk();
        let requests = &self.requests;
        self.intent.clear(now_ns, Extent::new(n * chunk, chunk), |chunk| {
            let writes = requests.iter().flatten().filter(|r| r.stage != Stage::Syncing);
            writes.filter_map(|r| r.job).any(|job| job.is_write() && job.range().overlaps(chunk))
        });
        if !self.intent.is_marked(n) {
            self.missed.cleared(n);
        }
    }

    pub(super) fn set_stage(&mut self, id: RequestId, stage: Stage) {
        if let Some(request) = self.request(id) {
            request.stage = stage;
        }
    }
}
