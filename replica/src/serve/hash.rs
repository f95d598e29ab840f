//! Takes checksums of snapshots beside everything else: one snapshot at a time, in the order in which they were asked for,
//! on a thread of its own that ends when nothing is left to do.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use lh_wire::{HashState, UNASKED_HASH_RATE};

use crate::store::{FoldedChecksums, Pace, ScrubError, SnapshotLayer};

/// Snapshots whose outcome is kept: as many as a volume has.
const KEPT_MAX: usize = 256;

/// What became of one snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HashOutcome {
    /// Nobody asked since the process began.
    #[default]
    None,
    /// It waits for its turn, or is being read.
    Running,
    /// Longhorn's crc64 of the whole layer.
    Complete {
        /// As 16 hex digits stand in the `.checksum` file.
        checksum: u64,
        /// The layer is not what it was when it was hashed before, though nobody changed it.
        corrupted: bool,
    },
    /// It was not hashed; one sentence.
    Failed(String),
}

#[derive(Debug)]
struct Task {
    name: String,
    /// Read it though its checksums are on record.
    again: bool,
    rate: u64,
    /// The checksums of what was folded into it.
    folded: Option<Box<FoldedChecksums>>,
}

/// What is read now, and how far.
#[derive(Debug)]
struct Running {
    name: String,
    folded: bool,
    pace: Arc<Pace>,
    done: u64,
    total: u64,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Task>,
    running: Option<Running>,
    outcomes: BTreeMap<String, HashOutcome>,
    /// Those of them that are over, the oldest first.
    over: VecDeque<String>,
    has_thread: bool,
}

impl State {
    /// Keeps an outcome. Beyond [`KEPT_MAX`] the oldest one that is over is forgotten: what waits or runs has its thread.
    fn set(&mut self, name: String, outcome: HashOutcome) {
        self.over.retain(|known| *known != name);
        if outcome != HashOutcome::Running {
            self.over.push_back(name.clone());
        }
        self.outcomes.insert(name, outcome);
        while self.outcomes.len() > KEPT_MAX {
            let Some(oldest) = self.over.pop_front() else { break };
            self.outcomes.remove(&oldest);
        }
    }
}

/// The hasher of one replica directory. All clones are one.
#[derive(Clone, Debug)]
pub(super) struct Hasher(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    directory: PathBuf,
    state: Mutex<State>,
    idle: Condvar,
}

impl Hasher {
    pub(super) fn new(directory: PathBuf) -> Self {
        Self(Arc::new(Shared { directory, state: Mutex::default(), idle: Condvar::new() }))
    }

    /// Snapshots to be hashed, after those before. One that waits already is not taken twice. `rate`: bytes per second,
    /// 0: as fast as it goes.
    pub(super) fn add(&self, names: impl IntoIterator<Item = String>, again: bool, rate: u64) {
        let mut state = self.lock();
        for name in names {
            let waits = state.queue.iter().any(|task| task.name == name && task.again >= again);
            if !waits {
                state.set(name.clone(), HashOutcome::Running);
                state.queue.push_back(Task { name, again, rate, folded: None });
            }
        }
        self.begin(state);
    }

    /// The layer of a snapshot that another was folded into, with the checksums of both from before.
    pub(super) fn add_folded(&self, name: String, before: Box<FoldedChecksums>) {
        let mut state = self.lock();
        state.set(name.clone(), HashOutcome::Running);
        state.queue.push_back(Task { name, again: false, rate: UNASKED_HASH_RATE, folded: Some(before) });
        self.begin(state);
    }

    fn begin(&self, mut state: MutexGuard<'_, State>) {
        if state.queue.is_empty() || std::mem::replace(&mut state.has_thread, true) {
            return;
        }
        let worker = self.clone();
        let started = std::thread::Builder::new().name("replica-hash".into()).spawn(move || worker.work());
        if let Err(e) = started {
            state.has_thread = false;
            let tasks = std::mem::take(&mut state.queue);
            for task in tasks {
                state.set(task.name, HashOutcome::Failed(format!("no thread for it: {e}")));
            }
        }
    }

    /// Ends the hashing of one snapshot, or of all.
    pub(super) fn cancel(&self, name: Option<&str>) {
        let mut state = self.lock();
        let wanted = |n: &str| name.is_none_or(|name| name == n);
        let (gone, left): (Vec<Task>, Vec<Task>) = state.queue.drain(..).partition(|task| wanted(&task.name));
        state.queue.extend(left);
        for task in gone {
            state.set(task.name, HashOutcome::Failed(ScrubError::Stopped.to_string()));
        }
        if let Some(running) = state.running.as_ref().filter(|running| wanted(&running.name)) {
            running.pace.stop();
        }
    }

    /// Something else gets into the layer of this snapshot than was folded into it.
    pub(super) fn forget_folded(&self, name: &str) {
        let mut state = self.lock();
        if let Some(at) = state.queue.iter().position(|task| task.folded.is_some() && task.name == name) {
            state.queue.remove(at);
            state.set(name.to_owned(), HashOutcome::Failed(ScrubError::Changed(name.to_owned()).to_string()));
        }
        if let Some(running) = state.running.as_ref().filter(|running| running.folded && running.name == name)
        {
            running.pace.stop();
        }
    }

    /// Cancels everything and waits until the directory is left alone.
    pub(super) fn stop(&self) {
        self.cancel(None);
        let mut state = self.lock();
        while state.has_thread {
            state = self.0.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn outcome(&self, name: &str) -> HashOutcome {
        self.lock().outcomes.get(name).cloned().unwrap_or_default()
    }

    /// For [`lh_wire::ReplicaState::hash`]; `None`: nobody asked since the process began.
    pub(super) fn report(&self) -> Option<HashState> {
        let state = self.lock();
        if state.outcomes.is_empty() {
            return None;
        }
        let mut report = HashState { waiting: state.queue.len() as u64, ..HashState::default() };
        if let Some(Running { name, done, total, .. }) = &state.running {
            (report.name, report.done, report.total) = (name.clone(), *done, *total);
        } else if let Some(next) = state.queue.front() {
            report.name.clone_from(&next.name);
            report.waiting -= 1;
        }
        for (name, outcome) in &state.outcomes {
            match outcome {
                HashOutcome::Failed(why) => report.failed.push((name.clone(), why.clone())),
                HashOutcome::Complete { corrupted: true, .. } => report.corrupted.push(name.clone()),
                _ => {}
            }
        }
        Some(report)
    }

    fn work(&self) {
        loop {
            let (mut task, pace) = {
                let mut state = self.lock();
                let Some(task) = state.queue.pop_front() else {
                    state.has_thread = false;
                    return self.0.idle.notify_all();
                };
                let pace = Arc::new(Pace::new(task.rate));
                let (name, folded, paced) = (task.name.clone(), task.folded.is_some(), Arc::clone(&pace));
                state.running = Some(Running { name, folded, pace: paced, done: 0, total: 0 });
                (task, pace)
            };
            let outcome = self.hash(&mut task, &pace).unwrap_or_else(|e| {
                tracing::warn!("snapshot {} is not hashed: {e}", task.name);
                HashOutcome::Failed(e.to_string())
            });
            let mut state = self.lock();
            state.running = None;
            state.set(task.name, outcome);
        }
    }

    fn hash(&self, task: &mut Task, pace: &Pace) -> Result<HashOutcome, ScrubError> {
        let layer = SnapshotLayer::open(&self.0.directory, &task.name)?;
        if !task.again
            && let Some(recorded) = layer.recorded_checksum()?.filter(|_| layer.has_block_checksums())
        {
            let (checksum, corrupted) = (recorded.checksum, recorded.silently_corrupted);
            return Ok(HashOutcome::Complete { checksum, corrupted });
        }
        let total = layer.allocated().unwrap_or(0);
        let mut progress = |bytes: u64| {
            if let Some(running) = &mut self.lock().running {
                (running.done, running.total) = (bytes, total.max(bytes));
            }
        };
        let hashed = match &mut task.folded {
            Some(before) => layer.hash_folded(before, pace, &mut progress)?,
            None => layer.hash(pace, &mut progress)?,
        };
        if hashed.silently_corrupted {
            tracing::error!(
                "snapshot {} is not what it was when it was hashed: `longhornctl scrub` names the blocks",
                task.name
            );
        }
        Ok(HashOutcome::Complete { checksum: hashed.checksum, corrupted: hashed.silently_corrupted })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that holds it can leave it half written.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_outcome_is_forgotten_and_none_of_what_is_not_over() {
        let done = |checksum| HashOutcome::Complete { checksum, corrupted: false };
        let mut state = State::default();
        // The first one by name waits, and so does one that was over before.
        state.set("a".to_owned(), HashOutcome::Running);
        state.set("b".to_owned(), done(1));
        state.set("b".to_owned(), HashOutcome::Running);
        for n in 0..KEPT_MAX as u64 {
            state.set(format!("s{:03}", KEPT_MAX as u64 - n), done(n));
        }
        assert_eq!(state.outcomes.len(), KEPT_MAX);
        for name in ["a", "b"] {
            assert_eq!(state.outcomes.get(name), Some(&HashOutcome::Running), "{name}");
        }
        let kept = |name: &str| state.outcomes.contains_key(name);
        assert!(
            !kept("s256") && !kept("s255") && kept("s254") && kept("s001"),
            "the newest one has the first name"
        );
    }
}
