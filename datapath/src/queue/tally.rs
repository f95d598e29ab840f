//! Counts of requests at one moment, which can be added up over queues and subtracted from later ones; and times in
//! buckets that widen with the time.
//!
//! Eight buckets to a power of two: a bucket is at most an eighth wider than its beginning, so that is how far a
//! percentile may be off, at 10 us as at 10 s. Counting is a shift and an addition.

/// Buckets to a power of two, as a power of two.
const STEPS_LOG: u32 = 3;
const STEPS: usize = 1 << STEPS_LOG;

/// Times below 2^10 ns share the first bucket: no request over a socket is faster.
const FIRST_LOG: u32 = 10;

/// Times of 2^39 ns (9 minutes) and more share the last one: it is longer than the time for which requests wait.
const END_LOG: u32 = 39;

/// Buckets of a histogram.
pub(super) const BUCKETS: usize = 1 + (END_LOG - FIRST_LOG) as usize * STEPS + 1;

/// The bucket that counts a time in ns.
pub(super) const fn bucket_of(time: u64) -> usize {
    if time < 1 << FIRST_LOG {
        return 0;
    }
    let log = time.ilog2();
    if log >= END_LOG {
        return BUCKETS - 1;
    }
    #[expect(clippy::cast_possible_truncation, reason = "three bits")]
    let step = (time >> (log - STEPS_LOG)) as usize % STEPS;
    1 + (log - FIRST_LOG) as usize * STEPS + step
}

/// The shortest time that a later bucket than this one would count, in ns; of the last bucket, where it begins.
fn bucket_end(bucket: usize) -> u64 {
    let next = bucket.min(BUCKETS - 2);
    let (log, step) = (next / STEPS, next % STEPS);
    ((STEPS + step) as u64) << (log + (FIRST_LOG - STEPS_LOG) as usize)
}

/// Requests of one kind, counted until some moment, or between two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tally {
    /// Requests that ended.
    pub count: u64,
    /// Of those, how many with an error.
    pub errors: u64,
    /// Bytes of those without an error.
    pub bytes: u64,
    /// Sum of their times, ns.
    pub time: u64,
    pub(super) histogram: Box<[u64; BUCKETS]>,
}

impl Default for Tally {
    fn default() -> Self {
        Self { count: 0, errors: 0, bytes: 0, time: 0, histogram: Box::new([0; BUCKETS]) }
    }
}

impl Tally {
    /// What was counted since an earlier tally of the same counters. They are read one by one while others write them,
    /// so a request may be in one of them and not yet in another.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            count: self.count.saturating_sub(earlier.count),
            errors: self.errors.saturating_sub(earlier.errors),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            time: self.time.saturating_sub(earlier.time),
            histogram: Box::new(std::array::from_fn(|i| {
                self.histogram[i].saturating_sub(earlier.histogram[i])
            })),
        }
    }

    /// Mean time in ns; 0 without requests.
    pub fn mean(&self) -> u64 {
        self.time.checked_div(self.count).unwrap_or(0)
    }

    /// The time in ns within which this share of the requests ended, in thousandths; 0 without requests. At most an
    /// eighth too long.
    pub fn percentile(&self, thousandths: u64) -> u64 {
        let counted: u64 = self.histogram.iter().sum();
        let wanted = counted.saturating_mul(thousandths).div_ceil(1000).max(1);
        let mut so_far = 0;
        for (bucket, count) in self.histogram.iter().enumerate() {
            so_far += count;
            if so_far >= wanted {
                return bucket_end(bucket);
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::super::stats::Counters;
    use super::*;

    #[test]
    fn buckets_follow_each_other_without_gaps() {
        assert_eq!((bucket_of(0), bucket_of(1023), bucket_of(1024)), (0, 0, 1));
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        for bucket in 0..BUCKETS - 1 {
            let end = bucket_end(bucket);
            assert_eq!((bucket_of(end - 1), bucket_of(end)), (bucket, bucket + 1), "{bucket} ends at {end}");
            if bucket > 0 {
                let begin = bucket_end(bucket - 1);
                assert!((end - begin) * 8 <= begin, "{begin} to {end} is too wide");
            }
        }
    }

    #[test]
    fn percentiles_are_at_most_an_eighth_off() {
        let counters = Counters::default();
        for n in 1..=1000 {
            counters.ended(4096, n * 10_000, true);
        }
        let mut tally = Tally::default();
        counters.add_to(&mut tally);
        assert_eq!((tally.count, tally.bytes, tally.mean()), (1000, 4_096_000, 5_005_000));
        for (thousandths, exact) in [(500, 5_000_000), (990, 9_900_000), (999, 9_990_000)] {
            let found = tally.percentile(thousandths);
            assert!((exact..=exact + exact / 8).contains(&found), "{thousandths}: {found} for {exact}");
        }
        assert_eq!(Tally::default().percentile(500), 0);
    }

    #[test]
    fn what_came_since_is_a_tally_of_its_own() {
        let counters = Counters::default();
        counters.ended(4096, 50_000_000, true);
        let mut before = Tally::default();
        counters.add_to(&mut before);
        counters.ended(4096, 100_000, true);
        counters.ended(4096, 100_000, false);
        let mut after = Tally::default();
        counters.add_to(&mut after);
        let between = after.since(&before);
        assert_eq!((between.count, between.errors, between.bytes), (2, 1, 4096));
        assert!((100_000..112_500).contains(&between.percentile(1000)), "the slow one was before");
    }
}
