//! TCP ports for processes, handed out in ranges. Whether a process listens there, and on which address, its arguments say.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::RangeInclusive;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The ports of processes: Longhorn's range.
pub(super) const RANGE: RangeInclusive<u16> = 10_000..=30_000;

/// Consecutive ports of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortRange {
    /// The first.
    pub start: u16,
    /// The last.
    pub end: u16,
}

/// Why a process gets no ports.
#[derive(Debug, PartialEq, Eq, Error)]
pub(super) enum PortError {
    #[error("a process cannot have {0} ports")]
    Count(i32),
    #[error("{arguments} port arguments for {count} ports: give at most one for each")]
    Arguments { arguments: usize, count: i32 },
    #[error("no {0} free ports in a row are left: end some processes first")]
    Exhausted(u16),
}

/// What is given out.
#[derive(Debug)]
pub(super) struct Ports {
    range: RangeInclusive<u16>,
    /// First and last port of each range that is given out.
    taken: Mutex<BTreeMap<u16, u16>>,
}

impl Ports {
    pub(super) fn new(range: RangeInclusive<u16>) -> Self {
        Self { range, taken: Mutex::default() }
    }

    /// Takes the lowest free ports in a row that nobody listens on.
    pub(super) fn take(&self, count: i32, arguments: usize) -> Result<PortRange, PortError> {
        let range = &self.range;
        let wanted = u16::try_from(count).ok().filter(|n| *n > 0).ok_or(PortError::Count(count))?;
        if arguments > usize::from(wanted) {
            return Err(PortError::Arguments { arguments, count });
        }
        let mut taken = self.taken();
        let mut start = *range.start();
        while let Some(end) = start.checked_add(wanted - 1).filter(|end| range.contains(end)) {
            let in_the_way = taken.range(..=end).next_back().filter(|(_, last)| **last >= start);
            let next = match in_the_way {
                Some((_, last)) => *last,
                None => match (start..=end).rev().find(|port| !is_free(*port)) {
                    Some(busy) => busy,
                    None => {
                        taken.insert(start, end);
                        return Ok(PortRange { start, end });
                    }
                },
            };
            let Some(after) = next.checked_add(1) else { break };
            start = after;
        }
        Err(PortError::Exhausted(wanted))
    }

    /// Takes what an earlier manager gave out.
    pub(super) fn keep(&self, ports: PortRange) {
        self.taken().insert(ports.start, ports.end);
    }

    pub(super) fn give_back(&self, ports: PortRange) {
        self.taken().remove(&ports.start);
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<u16, u16>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// False for a port that somebody listens on. Whoever comes later finds out by itself, and says so in its log.
fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok()
}

/// The arguments with ports: each of `port_args` ends in one port, beginning with the first, and is split at commas
/// (`--listen,0.0.0.0:` becomes `--listen 0.0.0.0:10000`).
pub(super) fn with_ports(args: &[String], port_args: &[String], ports: Option<PortRange>) -> Vec<String> {
    let mut all = args.to_vec();
    if let Some(ports) = ports {
        for (port, arg) in (ports.start..=ports.end).zip(port_args) {
            all.extend(format!("{arg}{port}").split(',').map(str::to_owned));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A part of the range that nothing on this machine is likely to use.
    fn ports(first: u16) -> Ports {
        Ports::new(first..=first + 9)
    }

    #[test]
    fn ranges_do_not_overlap_and_come_back() {
        let ports = ports(29_900);
        let (a, b) = (ports.take(4, 1).unwrap(), ports.take(1, 0).unwrap());
        assert_eq!(
            (a, b),
            (PortRange { start: 29_900, end: 29_903 }, PortRange { start: 29_904, end: 29_904 })
        );
        let c = ports.take(5, 0).unwrap();
        assert_eq!(c.start, 29_905);
        assert_eq!(ports.take(1, 0), Err(PortError::Exhausted(1)));
        ports.give_back(a);
        assert_eq!(ports.take(5, 0), Err(PortError::Exhausted(5)));
        assert_eq!(ports.take(4, 0), Ok(a));
    }

    #[test]
    fn what_an_earlier_manager_gave_out_and_what_others_listen_on_is_left_alone() {
        let ports = ports(29_920);
        ports.keep(PortRange { start: 29_922, end: 29_923 });
        let _other = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 29_924)).unwrap();
        assert_eq!(ports.take(3, 0).unwrap().start, 29_925);
        assert_eq!(ports.take(2, 0).unwrap().start, 29_920);
    }

    #[test]
    fn nonsense_is_refused() {
        let ports = ports(29_940);
        assert_eq!(ports.take(0, 0), Err(PortError::Count(0)));
        assert_eq!(ports.take(-1, 0), Err(PortError::Count(-1)));
        assert_eq!(ports.take(70_000, 0), Err(PortError::Count(70_000)));
        assert_eq!(ports.take(11, 0), Err(PortError::Exhausted(11)));
        assert_eq!(ports.take(1, 2), Err(PortError::Arguments { arguments: 2, count: 1 }));
    }

    #[test]
    fn arguments_end_in_their_ports() {
        let text = |words: &[&str]| words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
        let args = with_ports(
            &text(&["controller", "demo"]),
            &text(&["--listen,0.0.0.0:", "--more="]),
            Some(PortRange { start: 10_000, end: 10_002 }),
        );
        assert_eq!(args, ["controller", "demo", "--listen", "0.0.0.0:10000", "--more=10001"]);
        assert_eq!(with_ports(&text(&["a"]), &text(&["b"]), None), ["a"]);
    }
}
