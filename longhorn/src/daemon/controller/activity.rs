//! What the engine did lately: the difference between its counters now and at an earlier look.

use std::time::{Duration, Instant};

use control::proto::ptypes;
use datapath::conductor::ReplicaStatus;
use datapath::queue::{Stats, Tally};

/// A shorter time says little of rates and nothing of percentiles.
const WINDOW_MIN: Duration = Duration::from_secs(1);

/// All counters at one moment, queues added up.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    reads: Tally,
    writes: Tally,
    unmaps: Tally,
    flushes: Tally,
    /// Of each configured replica, its name, reads and writes.
    replicas: Vec<(String, Tally, Tally)>,
    in_queue: u64,
    parked: u64,
}

impl Counts {
    /// Counts now. Requests are counted on while this reads.
    pub(super) fn of<'a>(
        queues: impl Iterator<Item = &'a Stats> + Clone,
        replicas: Vec<ReplicaStatus>,
    ) -> Self {
        use std::sync::atomic::Ordering::Relaxed;
        let mut counts = Self::default();
        for queue in queues.clone() {
            queue.reads.add_to(&mut counts.reads);
            queue.writes.add_to(&mut counts.writes);
            queue.zeroes.add_to(&mut counts.writes);
            queue.unmaps.add_to(&mut counts.unmaps);
            queue.flushes.add_to(&mut counts.flushes);
            counts.in_queue += queue.in_queue.load(Relaxed);
            counts.parked += queue.parked.load(Relaxed);
        }
        for replica in replicas {
            let (mut reads, mut writes) = (Tally::default(), Tally::default());
            let member = usize::from(replica.member.0);
            for queue in queues.clone() {
                queue.member_reads[member].add_to(&mut reads);
                queue.member_writes[member].add_to(&mut writes);
            }
            counts.replicas.push((replica.name, reads, writes));
        }
        counts
    }

    fn replica(&self, name: &str) -> (Tally, Tally) {
        let found = self.replicas.iter().find(|(n, ..)| n == name);
        found.map(|(_, reads, writes)| (reads.clone(), writes.clone())).unwrap_or_default()
    }
}

/// The last two looks that were at least [`WINDOW_MIN`] apart.
#[derive(Debug)]
pub(super) struct Looks {
    before: (Instant, Counts),
    last: (Instant, Counts),
}

impl Looks {
    /// Nothing was counted before `start`.
    pub(super) fn new(start: Instant) -> Self {
        Self { before: (start, Counts::default()), last: (start, Counts::default()) }
    }

    /// What was done until `now`, since the look before this one, or the one before that if it was a moment ago.
    pub(super) fn until(&mut self, now: Instant, counts: Counts) -> ptypes::Activity {
        if now.saturating_duration_since(self.last.0) >= WINDOW_MIN {
            self.before = std::mem::replace(&mut self.last, (now, counts.clone()));
        }
        let (since, earlier) = &self.before;
        let window = now.saturating_duration_since(*since);
        let requests = |now: &Tally, earlier: &Tally| Some(requests(&now.since(earlier), window));
        let replica = |(name, reads, writes): &(String, Tally, Tally)| {
            let (reads_before, writes_before) = earlier.replica(name);
            ptypes::ReplicaActivity {
                name: name.clone(),
                reads: requests(reads, &reads_before),
                writes: requests(writes, &writes_before),
            }
        };
        ptypes::Activity {
            window: nanoseconds(window),
            reads: requests(&counts.reads, &earlier.reads),
            writes: requests(&counts.writes, &earlier.writes),
            unmaps: requests(&counts.unmaps, &earlier.unmaps),
            flushes: requests(&counts.flushes, &earlier.flushes),
            in_queue: counts.in_queue,
            parked: counts.parked,
            replicas: counts.replicas.iter().map(replica).collect(),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A tally as the message has it.
fn requests(tally: &Tally, window: Duration) -> ptypes::Requests {
    let nanoseconds = window.as_nanos().max(1);
    let per_second = |n: u64| {
        let rate = (u128::from(n) * 1_000_000_000 + nanoseconds / 2) / nanoseconds;
        u64::try_from(rate).unwrap_or(u64::MAX)
    };
    ptypes::Requests {
        rate: per_second(tally.count),
        throughput: per_second(tally.bytes),
        errors: tally.errors,
        mean: tally.mean(),
        p50: tally.percentile(500),
        p90: tally.percentile(900),
        p99: tally.percentile(990),
        p999: tally.percentile(999),
        count: tally.count,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(count: u64) -> Tally {
        let mut tally = Tally::default();
        (tally.count, tally.bytes) = (count, count * 4096);
        tally
    }

    fn writes(count: u64) -> Counts {
        Counts { writes: tally(count), ..Counts::default() }
    }

    #[test]
    fn rates_are_of_the_time_since_the_look_before() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut looks = Looks::new(start);
        let rate = |activity: ptypes::Activity| (activity.window / 1_000_000, activity.writes.unwrap().rate);
        assert_eq!(rate(looks.until(at(2000), writes(100))), (2000, 50));
        // Another asks a moment later: it hears of a second at least, and takes nothing from the first.
        assert_eq!(rate(looks.until(at(2500), writes(150))), (2500, 60));
        assert_eq!(rate(looks.until(at(3000), writes(200))), (1000, 100));
        assert_eq!(rate(looks.until(at(4000), writes(200))), (1000, 0));
    }

    /// A timer is late by some microseconds each time: one request a second would be none.
    #[test]
    fn rates_are_rounded_to_the_nearest_and_requests_counted() {
        let start = Instant::now();
        for (requests, window_us, rate) in [(1, 1_000_500, 1), (99, 1_006_000, 98), (1, 2_500_000, 0)] {
            let now = start + Duration::from_micros(window_us);
            let writes = Looks::new(start).until(now, writes(requests)).writes.unwrap();
            assert_eq!((writes.rate, writes.count), (rate, requests), "{window_us} us");
        }
    }

    #[test]
    fn a_replica_that_was_not_there_before_is_counted_from_nothing() {
        let start = Instant::now();
        let mut looks = Looks::new(start);
        let counts = Counts { replicas: vec![("r-1".into(), tally(10), tally(10))], ..Counts::default() };
        let activity = looks.until(start + Duration::from_secs(1), counts);
        assert_eq!(activity.replicas.len(), 1);
        assert_eq!(activity.replicas[0].writes.unwrap().rate, 10);
    }
}
