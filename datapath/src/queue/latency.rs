//! How long a member takes, by class of request and window by window: its median is what the others are compared with.

/// Latencies are compared within a class: all members get the same writes, but not the same reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Reads of clients.
    Read,
    /// What changes data.
    Write,
}

pub(super) const CLASSES: [Class; 2] = [Class::Read, Class::Write];

/// Buckets of the latency histogram, two per power of two, from 1 us to 68 s.
const BUCKETS: usize = 52;
const FIRST_POWER: u32 = 10;

fn bucket(ns: u64) -> usize {
    let ns = ns.max(1 << FIRST_POWER);
    let power = ns.ilog2();
    let half = ns >> (power - 1) & 1;
    (((power - FIRST_POWER) * 2) as usize + usize::from(half == 1)).min(BUCKETS - 1)
}

/// The least latency that falls into a bucket.
const fn floor(bucket: usize) -> u64 {
    let power = FIRST_POWER as usize + bucket / 2;
    (1 << power) + if bucket % 2 == 1 { 1 << (power - 1) } else { 0 }
}

/// Windows without a request after which a median tells of another time: longer than a single request takes before its member is judged
/// by that alone.
const IDLE_WINDOWS: u32 = 8;

/// Latencies of one class in the present window, and what the windows before said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Histogram {
    counts: [u32; BUCKETS],
    samples: u32,
    /// Of the last window that had samples.
    pub median: Option<u64>,
    /// Windows that have had none since.
    idle_windows: u32,
    /// Windows in a row in which the member was slow, and the requests in those.
    pub slow_windows: u32,
    pub slow_samples: u32,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            counts: [0; BUCKETS],
            samples: 0,
            median: None,
            idle_windows: 0,
            slow_windows: 0,
            slow_samples: 0,
        }
    }
}

impl Histogram {
    fn add(&mut self, ns: u64) {
        self.counts[bucket(ns)] += 1;
        self.samples += 1;
    }

    /// Ends the window: its median replaces the last one, if it had any samples.
    pub(super) fn close(&mut self) -> u32 {
        let samples = self.samples;
        let mut below = 0;
        for (i, n) in self.counts.iter_mut().enumerate() {
            if samples > 0 && below * 2 < samples && (below + *n) * 2 >= samples {
                self.median = Some(floor(i));
            }
            below += std::mem::take(n);
        }
        self.samples = 0;
        self.idle_windows = if samples > 0 { 0 } else { self.idle_windows.saturating_add(1) };
        samples
    }

    /// The median that others may be compared with: not one of another time, when less was asked for.
    pub(super) fn recent_median(&self) -> Option<u64> {
        self.median.filter(|_| self.idle_windows <= IDLE_WINDOWS)
    }
}

/// A member's latencies, by class.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latencies {
    read: Histogram,
    write: Histogram,
}

impl Latencies {
    pub(super) fn add(&mut self, class: Class, ns: u64) {
        self.of(class).add(ns);
    }

    pub(super) const fn of(&mut self, class: Class) -> &mut Histogram {
        match class {
            Class::Read => &mut self.read,
            Class::Write => &mut self.write,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn buckets_and_their_floors_agree() {
        for b in 0..BUCKETS {
            assert_eq!(bucket(floor(b)), b);
        }
        for ns in [0, 1, 1 << 20, 3 << 20, u64::MAX] {
            assert!(floor(bucket(ns)) <= ns.max(1 << FIRST_POWER));
        }
    }

    #[test]
    fn medians() {
        let mut h = Histogram::default();
        for ns in [MS, MS, 100 * MS, MS, 100 * MS] {
            h.add(ns);
        }
        assert_eq!(h.close(), 5);
        assert!(h.median.is_some_and(|m| m > MS / 2 && m <= MS));
        assert_eq!(h.close(), 0);
        assert!(h.recent_median().is_some(), "a window without samples says nothing new");
        (0..IDLE_WINDOWS).for_each(|_| assert_eq!(h.close(), 0));
        assert_eq!(h.recent_median(), None);
        h.add(MS);
        h.close();
        assert_eq!(h.recent_median(), h.median);
    }
}
