//! What other threads may know of a running server, and the one thing they may ask of it: to stop.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_channel::{Sender, bounded};
use lh_block::Generation;
use lh_ring::Bell;
use lh_wire::{FoldState, ReplicaState};

use super::Address;
use super::hash::{HashOutcome, Hasher};
use super::task::Task;

/// What a replica is up to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Its directory is not open yet, or not any more.
    #[default]
    Down,
    /// The directory is open, no engine has been let in.
    Idle,
    /// An engine is connected.
    Serving,
    /// A sync or a record failed: it answers everything with an error until its process is replaced.
    Failed,
}

/// What a server has done since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads answered.
    pub reads: u64,
    /// Bytes of these.
    pub read_bytes: u64,
    /// Writes answered.
    pub writes: u64,
    /// Bytes of these.
    pub written_bytes: u64,
    /// Zeroes and unmaps answered.
    pub zeroes: u64,
    /// Flushes answered.
    pub flushes: u64,
    /// Syncs that served them.
    pub syncs: u64,
}

/// How a server fares.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// What it is up to.
    pub mode: Mode,
    /// The highest generation accepted.
    pub generation: Generation,
    /// What it has done.
    pub counters: Counters,
    /// The last error of the disk, in words.
    pub last_error: Option<String>,
}

/// A handle on a server, for any thread. Made before the server is started.
#[derive(Clone, Debug, Default)]
pub struct Status(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    memory_short: AtomicBool,
    counts: Counts,
    live: Mutex<Live>,
    snapshot_count: AtomicU32,
    snapshot_bytes: AtomicU64,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            stop: AtomicBool::default(),
            memory_short: AtomicBool::default(),
            counts: Counts::default(),
            live: Mutex::default(),
            snapshot_count: AtomicU32::new(u32::MAX),
            snapshot_bytes: AtomicU64::new(0),
        }
    }
}

/// Written by the ring's thread alone, read by anybody.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) reads: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    pub(super) zeroes: AtomicU64,
    pub(super) flushes: AtomicU64,
    pub(super) syncs: AtomicU64,
}

/// What of a disk made a replica fail, the worst last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DiskTrouble {
    /// Nothing of these: a sync that had no room, for instance, after which what was answered may be gone.
    #[default]
    None,
    /// An operation on the chain had no room to end. What was answered is there.
    Full,
    /// It failed.
    Failed,
}

#[derive(Debug, Default)]
struct Live {
    mode: Mode,
    generation: Generation,
    last_error: Option<String>,
    /// The worst that it did.
    trouble: DiskTrouble,
    fold: Option<FoldState>,
    address: Option<Address>,
    bell: Option<Bell>,
    worker: Option<Sender<Task>>,
    hasher: Option<Hasher>,
}

impl Status {
    /// How the server fares.
    pub fn snapshot(&self) -> Snapshot {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let c = &self.0.counts;
        let live = self.live();
        Snapshot {
            mode: live.mode,
            generation: live.generation,
            counters: Counters {
                reads: get(&c.reads),
                read_bytes: get(&c.read_bytes),
                writes: get(&c.writes),
                written_bytes: get(&c.written_bytes),
                zeroes: get(&c.zeroes),
                flushes: get(&c.flushes),
                syncs: get(&c.syncs),
            },
            last_error: live.last_error.clone(),
        }
    }

    /// Says whether the machine is short of memory: while it is, the server takes on no more than the memory suffices for that
    /// it has had from the start.
    pub fn set_memory_short(&self, short: bool) {
        self.0.memory_short.store(short, Ordering::Relaxed);
    }

    pub(super) fn is_memory_short(&self) -> bool {
        self.0.memory_short.load(Ordering::Relaxed)
    }

    /// What the directory says: size, chain, epoch, marks. What only the server's memory holds (`in_doubt`, `intent`,
    /// `lived`, `previous_generation`) is left empty. `None` while the server is not up. Waits for the worker thread:
    /// not for the ring's own.
    pub fn state(&self) -> Option<ReplicaState> {
        let worker = self.live().worker.clone()?;
        let (reply, answer) = bounded(1);
        worker.send(Task::Look(reply)).ok()?;
        answer.recv().ok()
    }

    /// Takes a snapshot's checksums, after those that were asked for before; `again`: though they are on record. False
    /// while the server is not up.
    pub fn hash(&self, snapshot: &str, again: bool) -> bool {
        let hasher = self.live().hasher.clone();
        if let Some(hasher) = &hasher {
            hasher.add([snapshot.to_owned()], again, 0);
        }
        hasher.is_some()
    }

    /// What became of a snapshot that was to be hashed.
    pub fn hash_outcome(&self, snapshot: &str) -> HashOutcome {
        let hasher = self.live().hasher.clone();
        hasher.map(|hasher| hasher.outcome(snapshot)).unwrap_or_default()
    }

    /// Some snapshot is being hashed.
    pub fn is_hashing(&self) -> bool {
        let hasher = self.live().hasher.clone();
        hasher.and_then(|hasher| hasher.report()).is_some_and(|report| !report.name.is_empty())
    }

    /// Ends the hashing of a snapshot.
    pub fn cancel_hash(&self, snapshot: &str) {
        let hasher = self.live().hasher.clone();
        if let Some(hasher) = hasher {
            hasher.cancel(Some(snapshot));
        }
    }

    /// Where the server listens, once it does.
    pub fn address(&self) -> Option<Address> {
        self.live().address.clone()
    }

    /// Asks the server to end: it takes no connection any more, ends its sessions, waits for what is in the store, and
    /// returns from [`super::run`]. The directory counts as closed cleanly only if its engine closed it before.
    pub fn stop(&self) {
        self.0.stop.store(true, Ordering::Release);
        if let Some(bell) = &self.live().bell {
            bell.ring();
        }
    }

    /// From now on a snapshot is refused once there are `count` of them, or head and snapshots take more than `bytes`
    /// (0: any); removed ones do not count. `None`: as it is.
    pub fn set_snapshot_limits(&self, count: Option<u32>, bytes: Option<u64>) {
        if let Some(count) = count {
            self.0.snapshot_count.store(count, Ordering::Relaxed);
        }
        if let Some(bytes) = bytes {
            self.0.snapshot_bytes.store(bytes, Ordering::Relaxed);
        }
    }

    /// The limits as they are: count, bytes.
    pub fn snapshot_limits(&self) -> (u32, u64) {
        (self.0.snapshot_count.load(Ordering::Relaxed), self.0.snapshot_bytes.load(Ordering::Relaxed))
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.0.stop.load(Ordering::Acquire)
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.0.counts
    }

    pub(super) fn begin(&self, address: Address, bell: Bell, worker: Sender<Task>, hasher: Hasher) {
        let mut live = self.live();
        live.mode = Mode::Idle;
        live.address = Some(address);
        live.bell = Some(bell);
        live.worker = Some(worker);
        live.hasher = Some(hasher);
    }

    pub(super) fn end(&self) {
        let mut live = self.live();
        live.mode = Mode::Down;
        live.bell = None;
        live.worker = None;
        live.hasher = None;
    }

    pub(super) fn set_mode(&self, mode: Mode, generation: Generation) {
        let mut live = self.live();
        live.mode = mode;
        live.generation = generation;
    }

    pub(super) fn set_fold(&self, fold: Option<FoldState>) {
        self.live().fold = fold;
    }

    pub(super) fn fold(&self) -> Option<FoldState> {
        self.live().fold.clone()
    }

    /// Wakes the server's thread.
    pub(super) fn bell(&self) -> Option<Bell> {
        self.live().bell.clone()
    }

    pub(super) fn set_error(&self, error: String) {
        self.live().last_error = Some(error);
    }

    pub(super) fn set_trouble(&self, trouble: DiskTrouble) {
        let mut live = self.live();
        live.trouble = live.trouble.max(trouble);
    }

    pub(super) fn trouble(&self) -> DiskTrouble {
        self.live().trouble
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        // Nothing that holds it can leave it half written.
        self.0.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts, from the ring's thread.
pub(super) fn count(counter: &AtomicU64, by: u64) {
    // One writer: no need for a locked addition.
    counter.store(counter.load(Ordering::Relaxed) + by, Ordering::Relaxed);
}
