//! Whether a block device's requests are answered, as the kernel counts them (Documentation/block/stat.rst).

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);

/// Whether a device whose queue is to be frozen would come out of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// As many requests have been answered as were in flight at the beginning, or none is any more.
    All,
    /// Somebody waits for a replica, or for a timer of the kernel's.
    NotYet,
    /// The device's statistics are turned off (`queue/iostats`): it tells of no requests, whatever is in flight.
    Unknown,
}

/// Waits for the requests that are in flight at the beginning on the device with this directory in sysfs.
///
/// # Errors
/// The files cannot be read, or are not understood.
pub(super) fn answered(directory: &Path, within: Duration) -> io::Result<Answered> {
    let counts = || Ok::<_, io::Error>(fs::read_to_string(directory.join("queue/iostats"))?.trim() != "0");
    let counted_before = counts()?;
    let (first, deadline) = (Flow::of(directory)?, Instant::now() + within);
    loop {
        let now = Flow::of(directory)?;
        if !counted_before || !counts()? {
            return Ok(Answered::Unknown);
        }
        if now.has_answered(&first) {
            return Ok(Answered::All);
        }
        if Instant::now() > deadline {
            return Ok(Answered::NotYet);
        }
        std::thread::sleep(LOOK);
    }
}

/// The requests of one direction: how many are in flight, and how many have been answered since there is the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Count {
    in_flight: u64,
    answered: u64,
}

impl Count {
    fn has_answered(&self, first: &Self) -> bool {
        self.in_flight == 0 || self.answered.wrapping_sub(first.answered) >= first.in_flight
    }
}

/// A device's requests at one moment, where it counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Flow {
    reads: Count,
    /// And flushes, and what gives space back.
    writes: Count,
    /// All of them, and those that the driver has not begun to send, of which the two above know nothing: they wait for a connection.
    /// Kernels before 6.16 do not count these.
    all: Count,
}

impl Flow {
    /// Those of the device with this directory in sysfs.
    ///
    /// # Errors
    /// The files cannot be read, or are not understood.
    fn of(directory: &Path) -> io::Result<Self> {
        // In this order: an answer in between makes it look slower, never faster.
        let stat = fs::read_to_string(directory.join("stat"))?;
        let in_flight = fs::read_to_string(directory.join("inflight"))?;
        Self::read(&in_flight, &stat).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn read(in_flight: &str, stat: &str) -> Option<Self> {
        let numbers =
            |text: &str| text.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>().ok();
        let (in_flight, stat) = (numbers(in_flight)?, numbers(stat)?);
        // Kernels before 4.18 do not count discards, before 5.5 no flushes.
        let answered = |at: usize| stat.get(at).copied().unwrap_or(0);
        let reads = *stat.first()?;
        let writes = stat.get(4)? + answered(11) + answered(15);
        Some(Self {
            reads: Count { in_flight: *in_flight.first()?, answered: reads },
            writes: Count { in_flight: *in_flight.get(1)?, answered: writes },
            all: Count { in_flight: *stat.get(8)?, answered: reads + writes },
        })
    }

    /// True if since `first` as many have been answered as were in flight then, or none is now.
    fn has_answered(&self, first: &Self) -> bool {
        self.reads.has_answered(&first.reads)
            && self.writes.has_answered(&first.writes)
            && self.all.has_answered(&first.all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "     100        0      800       10       50        0      400       20        3       30       30        4        0        0        0        6        5\n";

    #[test]
    fn what_the_kernel_tells_is_read() {
        let flow = Flow::read("       2        3\n", STAT).unwrap();
        assert_eq!(flow.reads, Count { in_flight: 2, answered: 100 });
        assert_eq!(flow.writes, Count { in_flight: 3, answered: 60 });
        assert_eq!(flow.all, Count { in_flight: 3, answered: 160 });
        assert_eq!(Flow::read("1", STAT), None);
        assert_eq!(Flow::read("1 2", "3 four"), None);
    }

    /// A device without statistics has nothing in flight, by what it tells.
    #[test]
    fn what_a_device_without_statistics_tells_is_no_answer() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("queue")).unwrap();
        let tells = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let answered = || answered(dir.path(), Duration::ZERO).unwrap();
        for (iostats, in_flight, all, expected) in [
            ("1\n", "0 0\n", "0", Answered::All),
            ("1\n", "0 1\n", "1", Answered::NotYet),
            // They wait for a connection.
            ("1\n", "0 0\n", "2", Answered::NotYet),
            ("0\n", "0 0\n", "0", Answered::Unknown),
            ("0\n", "0 1\n", "1", Answered::Unknown),
        ] {
            tells("queue/iostats", iostats);
            tells("inflight", in_flight);
            tells("stat", &STAT.replace(" 3       30 ", &format!(" {all}       30 ")));
            assert_eq!(answered(), expected, "iostats {iostats}inflight {in_flight} {all}");
        }
    }

    #[test]
    fn requests_are_answered_when_each_direction_goes_on() {
        let at = |reads: (u64, u64), writes: (u64, u64)| Flow {
            reads: Count { in_flight: reads.0, answered: reads.1 },
            writes: Count { in_flight: writes.0, answered: writes.1 },
            all: Count { in_flight: reads.0 + writes.0, answered: reads.1 + writes.1 },
        };
        let first = at((2, 100), (3, 60));
        assert!(!first.has_answered(&first));
        assert!(at((0, 102), (0, 60)).has_answered(&first), "nothing is in flight");
        assert!(at((9, 102), (9, 63)).has_answered(&first), "others have come");
        assert!(!at((9, 200), (3, 62)).has_answered(&first), "a write waits beside reads that do not");
        assert!(at((0, 0), (0, 0)).has_answered(&at((0, 0), (0, 0))));
    }
}
