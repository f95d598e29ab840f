//! Counters that one process writes and others see: what tells somebody who reads another's files that what it knows of them is
//! no longer so (`docs/decisions/0016-reads-on-one-host-are-the-engines-own.md`).
//!
//! The memory has a descriptor and keeps its length, as that which is lent ([`crate::Lent`]); whoever sees it cannot write it. Word 0
//! says whether all of it is over, word `1 + n` is counter `n`.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::lent::lent_map;
use crate::map::Map;

const WORD: usize = size_of::<u64>();
/// Multiple of every page there is.
const PAGES: usize = 64 << 10;

/// Bytes of the memory for so many counters.
fn bytes(counters: usize) -> usize {
    ((1 + counters) * WORD).next_multiple_of(PAGES)
}

/// The counters of who writes them. When it is dropped they are over.
#[derive(Debug)]
pub struct Changes {
    map: Map,
    counters: usize,
}

// SAFETY: the mapping stays where it is until it is dropped, and all accesses to it are atomic.
unsafe impl Send for Changes {}
// SAFETY: likewise.
unsafe impl Sync for Changes {}

impl Changes {
    /// So many counters, which stand at zero.
    ///
    /// # Errors
    /// The system's, where there is no memory with descriptors.
    pub fn new(counters: usize) -> io::Result<Self> {
        Ok(Self { map: Map::lendable(bytes(counters))?, counters })
    }

    /// A descriptor of the memory, for [`Watched::open`] of another process.
    ///
    /// # Errors
    /// The system's, where /proc is not mounted.
    pub fn lend(&self) -> io::Result<OwnedFd> {
        self.map.lend()
    }

    fn word(&self, n: usize) -> &AtomicU64 {
        assert!(n <= self.counters, "counter {n} of {}", self.counters);
        // SAFETY: the word lies inside the mapping (`bytes`), which `self` keeps, at a multiple of its size; everybody who
        // maps it takes it for an atomic one.
        unsafe { AtomicU64::from_ptr(self.map.ptr(n * WORD).cast()) }
    }

    /// How often the counter was raised.
    ///
    /// # Panics
    /// If there is no such counter; so do the others.
    pub fn count(&self, counter: usize) -> u64 {
        self.word(1 + counter).load(Ordering::SeqCst)
    }

    /// Counts a change. Whatever this thread does afterwards, system calls included, whoever has seen it sees the change, too.
    pub fn raise(&self, counter: usize) {
        self.word(1 + counter).fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Counts a change of everything.
    pub fn raise_all(&self) {
        for counter in 0..self.counters {
            self.word(1 + counter).fetch_add(1, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        self.word(0).store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

/// Another process's counters.
#[derive(Debug)]
pub struct Watched {
    map: Map,
    counters: usize,
}

// SAFETY: as for `Changes`.
unsafe impl Send for Watched {}
// SAFETY: likewise.
unsafe impl Sync for Watched {}

impl Watched {
    /// Maps what [`Changes::lend`] gave, of so many counters. The descriptor is closed.
    ///
    /// # Errors
    /// `InvalidData` for what is no such memory: it could become shorter, or is not of that length. The system's.
    pub fn open(memory: OwnedFd, counters: usize) -> io::Result<Self> {
        let map = lent_map(memory, bytes(counters))?;
        if map.len() != bytes(counters) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self { map, counters })
    }

    /// A word as it is now: not before anything that this thread has done, or seen, before.
    fn load(&self, n: usize) -> u64 {
        assert!(n <= self.counters, "counter {n} of {}", self.counters);
        fence(Ordering::SeqCst);
        // SAFETY: as in `Changes::word`. The memory cannot be written through this mapping, where only a relaxed load is promised
        // to be nothing but a load (std::sync::atomic, "Atomic accesses to read-only memory").
        let word = unsafe { AtomicU64::from_ptr(self.map.ptr(n * WORD).cast()) }.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        word
    }

    /// Nothing of it counts any more.
    pub fn is_over(&self) -> bool {
        self.load(0) != 0
    }

    /// How often the counter was raised.
    ///
    /// # Panics
    /// If there is no such counter.
    pub fn count(&self, counter: usize) -> u64 {
        self.load(1 + counter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    #[test]
    fn who_watches_sees_what_was_raised_and_the_end() {
        let changes = Changes::new(8191).unwrap();
        let watched = Watched::open(changes.lend().unwrap(), 8191).unwrap();
        assert!(!watched.is_over());
        changes.raise(0);
        changes.raise(8190);
        changes.raise(8190);
        assert_eq!([0, 1, 8190].map(|n| watched.count(n)), [1, 0, 2]);
        changes.raise_all();
        assert_eq!([0, 1, 8190].map(|n| watched.count(n)), [2, 1, 3]);
        assert_eq!([0, 1, 8190].map(|n| changes.count(n)), [2, 1, 3]);
        drop(changes);
        assert!(watched.is_over());
        assert_eq!(watched.count(8190), 3, "the memory is there still");
    }

    #[test]
    fn memory_of_another_length_or_kind_is_refused() {
        let changes = Changes::new(8191).unwrap();
        let refused = |memory, counters| Watched::open(memory, counters).unwrap_err().kind();
        assert_eq!(refused(changes.lend().unwrap(), 8192), io::ErrorKind::InvalidData);
        let other = Pool::lendable(1 << 20, 1 << 20).unwrap().lend().unwrap();
        assert_eq!(refused(other, 8191), io::ErrorKind::InvalidData);
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 10).unwrap();
        assert_eq!(refused(file.into(), 8191), io::ErrorKind::InvalidData);
    }

    /// What is written behind a raise is not seen without it.
    #[test]
    fn a_change_is_seen_no_later_than_what_follows_it() {
        let changes = Changes::new(1).unwrap();
        let watched = Watched::open(changes.lend().unwrap(), 1).unwrap();
        let file = tempfile::tempfile().unwrap();
        std::thread::scope(|threads| {
            threads.spawn(|| {
                use std::os::unix::fs::FileExt;
                for n in 1..=20_000_u64 {
                    changes.raise(0);
                    file.write_all_at(&n.to_le_bytes(), 0).unwrap();
                }
            });
            threads.spawn(|| {
                use std::os::unix::fs::FileExt;
                let mut last = 0;
                while last < 20_000 {
                    let mut bytes = [0; 8];
                    if file.read_at(&mut bytes, 0).unwrap() == 8 {
                        last = u64::from_le_bytes(bytes);
                    }
                    assert!(watched.count(0) >= last);
                }
            });
        });
    }
}
