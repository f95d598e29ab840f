//! Whether the history of one register is linearizable, for writes that all have different values.
//!
//! Gibbons and Korach, "Testing Shared Memories" (SIAM J. Comput. 26, 1997): all operations of one value form a
//! cluster. Between the first end and the last beginning in a cluster the register must hold its value (a forward
//! zone); a cluster whose operations all overlap can stand anywhere in between (a backward zone). The history is
//! linearizable if no two forward zones overlap and no backward zone lies inside a forward one.

use std::collections::BTreeMap;

/// When something happened: counts.
pub(crate) type Moment = u64;

/// A value; 0 is what the register holds at first.
pub(crate) type Value = u64;

#[derive(Clone, Copy, Debug)]
struct Cluster {
    written: Option<Moment>,
    first_end: Moment,
    last_begin: Moment,
    first_read_end: Moment,
}

/// What happened to one register.
#[derive(Debug, Default)]
pub(crate) struct Register {
    clusters: BTreeMap<Value, Cluster>,
}

impl Register {
    fn cluster(&mut self, value: Value) -> &mut Cluster {
        let initial = (value == 0).then_some(0);
        self.clusters.entry(value).or_insert(Cluster {
            written: initial,
            first_end: initial.unwrap_or(Moment::MAX),
            last_begin: 0,
            first_read_end: Moment::MAX,
        })
    }

    /// A write; `end` is `None` if nobody knows whether it was done.
    pub(crate) fn write(&mut self, value: Value, begin: Moment, end: Option<Moment>) {
        let c = self.cluster(value);
        c.written = Some(begin);
        c.first_end = c.first_end.min(end.unwrap_or(Moment::MAX));
        c.last_begin = c.last_begin.max(begin);
    }

    /// A read that returned `value`.
    pub(crate) fn read(&mut self, value: Value, begin: Moment, end: Moment) {
        let c = self.cluster(value);
        c.first_end = c.first_end.min(end);
        c.last_begin = c.last_begin.max(begin);
        c.first_read_end = c.first_read_end.min(end);
    }

    /// What is wrong, if anything.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut forward = Vec::new();
        let mut backward = Vec::new();
        for (value, c) in &self.clusters {
            let Some(written) = c.written else { return Err(format!("{value} was read and never written")) };
            if c.first_read_end < written {
                return Err(format!("{value} was read before it was written"));
            }
            if c.first_end < c.last_begin {
                forward.push((c.first_end, c.last_begin, *value));
            } else {
                backward.push((c.last_begin, c.first_end, *value));
            }
        }
        forward.sort_unstable();
        for pair in forward.windows(2) {
            if pair[1].0 < pair[0].1 {
                return Err(format!("{} and {} alternate", pair[0].2, pair[1].2));
            }
        }
        for (begin, end, value) in backward {
            let at = forward.partition_point(|f| f.0 <= begin);
            if let Some(f) = at.checked_sub(1).map(|i| forward[i])
                && f.0 < begin
                && end < f.1
            {
                return Err(format!("{value} stands where {} must", f.2));
            }
        }
        Ok(())
    }
}

#[test]
fn histories() {
    let mut r = Register::default();
    r.write(1, 1, Some(2));
    r.read(1, 3, 4);
    r.write(2, 3, Some(8));
    r.read(2, 4, 5);
    r.read(2, 9, 10);
    assert_eq!(r.check(), Ok(()));
    r.read(1, 11, 12);
    assert!(r.check().is_err(), "goes back");

    let mut r = Register::default();
    r.write(1, 1, Some(2));
    r.read(0, 3, 4);
    assert!(r.check().is_err(), "an acknowledged write is lost");

    let mut r = Register::default();
    r.write(1, 5, None);
    r.read(1, 1, 2);
    assert!(r.check().is_err(), "from the future");

    let mut r = Register::default();
    r.write(1, 1, None);
    r.read(0, 2, 3);
    r.read(1, 4, 5);
    assert_eq!(r.check(), Ok(()), "an unanswered write may happen late");
}
