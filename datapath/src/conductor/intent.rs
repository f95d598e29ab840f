//! Taking back marks of the intent bitmap, lazily (`docs/invariants.md`, 4).
//!
//! A mark may go when everything written into its chunk is covered by a flush that every member has answered before a round was asked
//! for that all are in, or were before the present one ([`super::rounds`]), and the chunk is not in doubt. The queue looks again under
//! an exclusive claim before it tells the members. A mark that stays too long only costs a comparison after a power cut.

use lh_block::Extent;

use super::{Conductor, Job, JobFor, sabotaged};

/// Chunks looked at in one go: 1 TiB of chunks of 4 MiB. A larger volume takes several.
const CHUNKS_AT_ONCE: u64 = 1 << 18;

/// Jobs given in one go. Each holds its range against clients for a round trip.
const JOBS_AT_ONCE: usize = 64;

/// Chunks in one job, so that no client waits for a long range.
const CHUNKS_PER_JOB: u64 = 16;

/// Bytes in one job at most: a header tells of no more, and a chunk may have gigabytes.
const BYTES_PER_JOB: u64 = u32::MAX as u64;

/// How far it is.
#[derive(Debug, Default)]
pub(super) struct Clearing {
    next_at: u64,
    /// It is time to look, once the round is agreed to that this needs.
    due: bool,
    cursor: u64,
    /// Some chunk of this pass over the volume waits for a flush.
    unflushed: bool,
    /// The last flush seen complete everywhere, and when it was new.
    flush: u64,
    flush_at: u64,
    flushing: bool,
}

impl Clearing {
    /// The conductor's own flush ended, somehow.
    pub(super) const fn flushed(&mut self) {
        self.flushing = false;
    }
}

impl Conductor {
    pub(super) fn advance_clearing(&mut self) -> bool {
        let idle = self.is_open() && self.is_calm() && self.closing.is_none() && !self.chain_is_wanted();
        if !idle {
            return false;
        }
        if self.clearing.due {
            return self.rounds.are_settled(self.desk.now) && self.take_marks_back();
        }
        if self.desk.now < self.clearing.next_at {
            return false;
        }
        self.clearing.next_at = self.desk.now.saturating_add(self.desk.limits.clear_every_ns);
        self.clearing.due = true;
        if self.config.shared.anything_clearable() && !sabotaged!(self, rounds_unasked) {
            self.rounds.want_one();
        }
        true
    }

    fn take_marks_back(&mut self) -> bool {
        self.clearing.due = false;
        let on_their_way = self.desk.jobs.count(|p| p == JobFor::ClearIntent);
        let flush = self.covered();
        for range in self.clearable(JOBS_AT_ONCE.saturating_sub(on_their_way), flush) {
            self.desk.give(JobFor::ClearIntent, Job::ClearIntent { range, flush });
        }
        self.flush_if_nobody_does();
        true
    }

    /// Runs of chunks whose marks may go, since this flush covers what was written there, from the cursor on.
    fn clearable(&mut self, max: usize, flush: u64) -> Vec<Extent> {
        let shared = self.config.shared.clone();
        let (chunk, chunks) = (shared.chunk(), shared.chunks());
        let longest = (CHUNKS_PER_JOB * chunk).min(BYTES_PER_JOB);
        let mut runs: Vec<Extent> = Vec::new();
        for _ in 0..CHUNKS_AT_ONCE.min(chunks) {
            if runs.len() > max {
                break;
            }
            let n = self.clearing.cursor;
            self.clearing.cursor = (n + 1) % chunks;
            self.clearing.unflushed |= shared.unflushed(n);
            let at = Extent::new(n * chunk, chunk);
            if !shared.clearable(n, flush) || shared.in_doubt(at).is_some() {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end() == at.offset && run.len + chunk <= longest => run.len += chunk,
                _ => runs.push(at),
            }
        }
        runs.truncate(max);
        runs
    }

    /// Marks can go only after a flush. If clients write and never flush, the conductor does.
    fn flush_if_nobody_does(&mut self) {
        let flush = self.config.shared.flush_everywhere();
        if flush != self.clearing.flush || !self.clearing.unflushed {
            self.clearing.flush = flush;
            self.clearing.flush_at = self.desk.now;
        }
        let long_ago =
            self.desk.now >= self.clearing.flush_at.saturating_add(self.desk.limits.flush_after_ns);
        if long_ago && !self.clearing.flushing {
            self.clearing.flushing = true;
            self.clearing.flush_at = self.desk.now;
            self.desk.give(JobFor::IntentFlush, Job::Flush);
        }
        if self.clearing.cursor == 0 || self.clearing.flushing {
            self.clearing.unflushed = false;
        }
    }

    pub(super) fn clearing_deadline(&self) -> Option<u64> {
        (self.is_open() && self.closing.is_none())
            .then_some(self.clearing.next_at)
            .filter(|at| *at > self.desk.now)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use lh_block::Extent;

    use super::super::{Conductor, Config, Limits, Quorum, Sabotage};
    use crate::shared::Shared;

    const CHUNK: u64 = 4 << 20;

    pub(in crate::conductor) fn conductor(shared: &Arc<Shared>) -> Conductor {
        Conductor::new(Config {
            volume: "demo".into(),
            generation: lh_block::Generation::default(),
            instance: lh_block::Instance(1),
            quorum: Quorum::Any,
            replicas: Vec::new(),
            queues: 1,
            size: shared.chunks() * shared.chunk(),
            shared: Arc::clone(shared),
            known_dead: false,
            limits: Limits::default(),
            sabotage: Sabotage::default(),
        })
    }

    #[test]
    fn runs_are_short_and_leave_out_what_is_in_doubt() {
        let shared = Arc::new(Shared::new(40 * CHUNK, CHUNK));
        let mut conductor = conductor(&shared);
        shared.wrote(Extent::new(0, 20 * CHUNK));
        assert!(conductor.clearable(64, u64::MAX).is_empty(), "not flushed");
        let flush = shared.start_flush();
        shared.finish_flush(flush);
        assert!(conductor.clearable(64, flush - 1).is_empty(), "covered by a later flush alone");
        shared.put_in_doubt(18);
        let chunks = |from: u64, n: u64| Extent::new(from * CHUNK, n * CHUNK);
        assert_eq!(conductor.clearable(64, flush), [chunks(0, 16), chunks(16, 2), chunks(19, 1)]);
        assert_eq!(conductor.clearable(1, flush), [chunks(0, 16)]);
    }

    /// Of a volume of 128 TiB. Replicas would take back the marks of what they are told of, and the engine forget the others.
    #[test]
    fn runs_of_large_chunks_are_no_longer_than_a_header_tells() {
        let chunk = lh_wire::intent_chunk(128 << 40);
        let shared = Arc::new(Shared::new(40 * chunk, chunk));
        let mut conductor = conductor(&shared);
        shared.wrote(Extent::new(0, 40 * chunk));
        let flush = shared.start_flush();
        shared.finish_flush(flush);
        let runs = conductor.clearable(64, flush);
        assert!(runs.iter().all(|run| u32::try_from(run.len).is_ok()), "{runs:?}");
        assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), 40 * chunk);
    }
}
