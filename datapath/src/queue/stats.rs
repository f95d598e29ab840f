//! What a queue counts, for `status` and metrics: written by the queue's thread, read by any.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use lh_block::Op;

use super::tally::{BUCKETS, Tally, bucket_of};
use crate::message::{MEMBERS_MAX, MemberId};

/// Counts, bytes and times of one kind of request.
#[derive(Debug)]
pub struct Counters {
    /// Requests that ended.
    pub count: AtomicU64,
    /// Of those, how many with an error.
    pub errors: AtomicU64,
    /// Bytes of those without an error.
    pub bytes: AtomicU64,
    /// Sum of their times, ns.
    pub time: AtomicU64,
    /// Times; [`bucket_of`] says which bucket counts a time.
    histogram: [AtomicU64; BUCKETS],
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            count: AtomicU64::default(),
            errors: AtomicU64::default(),
            bytes: AtomicU64::default(),
            time: AtomicU64::default(),
            histogram: std::array::from_fn(|_| AtomicU64::default()),
        }
    }
}

/// Adds without a locked instruction: each counter has one writer.
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

impl Counters {
    /// A request of `bytes` ended after `time` ns.
    pub(super) fn ended(&self, bytes: u64, time: u64, ok: bool) {
        add(&self.count, 1);
        if ok {
            add(&self.bytes, bytes);
        } else {
            add(&self.errors, 1);
        }
        add(&self.time, time);
        add(&self.histogram[bucket_of(time)], 1);
    }

    /// Adds what was counted so far to a tally.
    pub fn add_to(&self, tally: &mut Tally) {
        tally.count += self.count.load(Ordering::Relaxed);
        tally.errors += self.errors.load(Ordering::Relaxed);
        tally.bytes += self.bytes.load(Ordering::Relaxed);
        tally.time += self.time.load(Ordering::Relaxed);
        for (sum, bucket) in tally.histogram.iter_mut().zip(&self.histogram) {
            *sum += bucket.load(Ordering::Relaxed);
        }
    }
}

/// What a queue counts.
#[derive(Debug, Default)]
pub struct Stats {
    /// Client reads.
    pub reads: Counters,
    /// Client writes.
    pub writes: Counters,
    /// Client write-zeroes.
    pub zeroes: Counters,
    /// Client unmaps.
    pub unmaps: Counters,
    /// Client flushes.
    pub flushes: Counters,
    /// Questions of clients which blocks hold data: apart, since their bytes and times would say something wrong of reads.
    pub allocations: Counters,
    /// Reads sent to each member.
    pub member_reads: [Counters; MEMBERS_MAX],
    /// What changes data, sent to each member.
    pub member_writes: [Counters; MEMBERS_MAX],
    /// Reads that were sent to another member after one failed.
    pub read_retries: AtomicU64,
    /// Requests in the queue now.
    pub in_queue: AtomicU64,
    /// Of those, requests that wait outside: paused, in doubt, without a member or without space.
    pub parked: AtomicU64,
    /// Some of them wait for space: the disks of all members are full.
    pub starved: AtomicBool,
}

impl Stats {
    pub(super) const fn of(&self, op: Op) -> &Counters {
        match op {
            Op::Read => &self.reads,
            Op::Write { .. } => &self.writes,
            Op::WriteZeroes { .. } => &self.zeroes,
            Op::Unmap => &self.unmaps,
            Op::Flush => &self.flushes,
            Op::Allocation => &self.allocations,
        }
    }

    pub(super) fn member_read(&self, m: MemberId) -> &Counters {
        &self.member_reads[usize::from(m.0)]
    }

    pub(super) fn member_write(&self, m: MemberId) -> &Counters {
        &self.member_writes[usize::from(m.0)]
    }

    pub(super) fn retried(&self) {
        add(&self.read_retries, 1);
    }

    pub(super) fn entered(&self) {
        add(&self.in_queue, 1);
    }

    pub(super) fn gone(&self) {
        add(&self.in_queue, u64::MAX);
    }

    pub(super) fn parked(&self, now: usize) {
        self.parked.store(now as u64, Ordering::Relaxed);
    }

    pub(super) fn starved(&self, now: bool) {
        self.starved.store(now, Ordering::Relaxed);
    }
}
