//! A clone: this volume, which is empty, filled from a snapshot of another one, and not shown before it is whole.
//!
//! What makes it safe is durable on every replica as part of the chain:
//!
//! ```text
//! (empty head) --- snapshot MARK ---> MARK, head --- bytes, flush, snapshot NAME ---> MARK, NAME, head --- MARK removed ---> NAME, head
//! ```
//!
//! While MARK is there and not removed, no engine shows the volume. A clone that is asked for again goes back to MARK and
//! begins anew, or, with NAME there, only takes MARK away.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use control::cloning::CloneProgress;
use control::engine::EngineError;
use datapath::conductor::Command;
use datapath::engine::EngineHandle;
use lh_block::{Extent, IoError};
use lh_wire::{LayerInfo, MAX_DATA};

use super::fill::Writer;
use super::refusal::refusal;
use crate::daemon::clock;
use crate::reader::{ReadError, ReplicaAt, SnapshotReader};

/// The snapshot that says that the volume is not whole.
pub(super) const MARK: &str = "clone-unfinished";

/// Why nothing is shown.
pub(super) const UNFINISHED: &str =
    "a clone into this volume did not end, and it is not whole: clone again, or remove it";

/// Where a clone is read, and for whom.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// Replicas of the other volume that hold everything: the next one is asked when one goes away.
    pub(super) replicas: Vec<ReplicaAt>,
    /// A replica of this volume, to see that it is empty.
    pub(super) own: ReplicaAt,
    /// Name of the snapshot.
    pub(super) snapshot: String,
}

/// How far a clone is, for whoever asks.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress(Arc<Mutex<Option<CloneProgress>>>);

impl Progress {
    /// The clone that runs, or the last one.
    pub(super) fn get(&self) -> Option<CloneProgress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// One runs.
    pub(super) fn is_running(&self) -> bool {
        self.get().is_some_and(|progress| progress.running)
    }

    fn change(&self, change: impl FnOnce(&mut CloneProgress)) {
        change(self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default());
    }
}

/// True for a chain of a volume that is not whole.
pub(super) fn is_unfinished(chain: &[LayerInfo]) -> bool {
    chain.iter().any(|layer| layer.name == MARK && !layer.removed)
}

/// A clone that runs in a thread of its own.
pub(super) struct Cloning {
    thread: JoinHandle<()>,
    stop: Arc<AtomicBool>,
}

impl Cloning {
    /// Begins. `done` hears how it went.
    pub(super) fn start(
        engine: &EngineHandle,
        writer: Writer,
        source: Source,
        progress: &Progress,
        done: impl FnOnce(Result<(), EngineError>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let status = engine.status();
        progress.change(|p| {
            *p = CloneProgress {
                running: true,
                total: status.size,
                snapshot: source.snapshot.clone(),
                ..CloneProgress::default()
            };
        });
        let work = Work {
            engine: engine.clone(),
            writer,
            source,
            size: status.size,
            progress: progress.clone(),
            stop: stop.clone(),
        };
        match std::thread::Builder::new().name("clone".into()).spawn(move || done(work.run())) {
            Ok(thread) => Ok(Self { thread, stop }),
            Err(e) => {
                progress.change(|p| (p.running, p.error) = (false, e.to_string()));
                Err(e)
            }
        }
    }

    /// Has it end, whole or not.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Waits for its end: as long as an answer of the other volume's replica may take. What it has written is answered only by
    /// replicas, or once there are none any more for this volume.
    pub(super) fn end(self) {
        self.stop();
        if self.thread.join().is_err() {
            tracing::error!("the thread of a clone has panicked");
        }
    }
}

/// How far an earlier clone came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The volume has no snapshot.
    Nothing,
    /// It was not whole.
    Part,
    /// All of it is there, and only the mark is to go.
    Whole,
    /// The volume has snapshots of its own.
    Foreign,
}

impl Found {
    fn of(chain: &[LayerInfo], snapshot: &str) -> Self {
        let mut others = chain.iter().filter(|l| !l.name.is_empty() && l.name != MARK && !l.removed);
        match (is_unfinished(chain), others.next()) {
            (false, None) => Self::Nothing,
            (true, None) => Self::Part,
            (true, Some(other)) if other.name == snapshot && others.next().is_none() => Self::Whole,
            (_, Some(_)) => Self::Foreign,
        }
    }
}

struct Work {
    engine: EngineHandle,
    writer: Writer,
    source: Source,
    size: u64,
    progress: Progress,
    stop: Arc<AtomicBool>,
}

impl Work {
    fn run(mut self) -> Result<(), EngineError> {
        let result = self.clone_all();
        let (done, error) = match &result {
            Ok(()) => (Some(self.size), String::new()),
            Err(e) => (None, e.to_string()),
        };
        self.progress.change(|p| {
            p.running = false;
            p.done = done.unwrap_or(p.done);
            p.error.clone_from(&error);
        });
        match &result {
            Ok(()) => tracing::info!(snapshot = self.source.snapshot, "the volume holds all of its clone"),
            Err(e) => tracing::warn!("the clone is not whole: {e}"),
        }
        result
    }

    fn clone_all(&mut self) -> Result<(), EngineError> {
        let snapshot = self.source.snapshot.clone();
        match Found::of(&self.engine.status().chain, &snapshot) {
            Found::Foreign => {
                return Err(EngineError::NotNow(
                    "the volume has snapshots: a clone fills an empty one".to_owned(),
                ));
            }
            Found::Whole => return self.unmark(),
            Found::Nothing => {
                // What cannot be read leaves the volume as it is.
                self.check_source()?;
                self.take(MARK, false)?;
                self.check_empty(false)?;
            }
            Found::Part => {
                self.check_empty(true)?;
                self.command(Command::Revert { name: MARK.to_owned(), created: clock::now() })?;
            }
        }
        self.copy()?;
        self.writer.flush().map_err(not_written)?;
        self.take(&snapshot, true)?;
        self.unmark()
    }

    /// Refuses, without the mark again, a volume that held something when it was marked. Where that cannot be seen and part of a clone
    /// may be there, the mark stays.
    fn check_empty(&self, may_hold_part: bool) -> Result<(), EngineError> {
        let held = SnapshotReader::open(&self.source.own, MARK, None).and_then(|mut own| own.map(0));
        let (refusal, is_whole) = match held {
            Ok(page) if page.ranges.is_empty() => return Ok(()),
            Ok(_) => ("the volume is not empty: a clone would overwrite it".to_owned(), true),
            Err(e) => (format!("whether the volume is empty cannot be seen: {e}"), !may_hold_part),
        };
        if is_whole {
            self.unmark()?;
        }
        Err(EngineError::NotNow(refusal))
    }

    fn unmark(&self) -> Result<(), EngineError> {
        self.command(Command::RemoveSnapshot { name: MARK.to_owned() })?;
        self.command(Command::Purge)
    }

    fn take(&self, name: &str, user_created: bool) -> Result<(), EngineError> {
        let (name, created, labels) = (name.to_owned(), clock::now(), Default::default());
        self.command(Command::Snapshot { name, user_created, created, labels })
    }

    fn command(&self, command: Command) -> Result<(), EngineError> {
        match self.engine.command(command).recv() {
            Ok(done) => done.map_err(refusal),
            Err(_) => Err(EngineError::Ending),
        }
    }

    /// Refuses a snapshot that no replica gives, or that is too large, before anything is changed.
    fn check_source(&self) -> Result<(), EngineError> {
        let mut refusals = Vec::new();
        for replica in &self.source.replicas {
            match self.open_source(replica) {
                Ok(_) => return Ok(()),
                Err(Broken::Source(why)) => refusals.push(format!("{}: {why}", replica.replica)),
                Err(Broken::Here(e)) => return Err(e),
            }
        }
        Err(EngineError::Failed(format!(
            "no replica gives snapshot {}, and nothing is changed: {}",
            self.source.snapshot,
            refusals.join("; ")
        )))
    }

    /// Everything that the snapshot holds, from one replica after another until one has given the rest.
    fn copy(&mut self) -> Result<(), EngineError> {
        let mut from = 0;
        let mut refusals = Vec::new();
        for replica in self.source.replicas.clone() {
            self.progress.change(|p| p.from_replica = replica.address.to_string());
            match self.copy_from(&replica, &mut from) {
                Ok(()) => return Ok(()),
                Err(Broken::Source(why)) => refusals.push(format!("{}: {why}", replica.replica)),
                Err(Broken::Here(e)) => return Err(e),
            }
        }
        Err(EngineError::Failed(format!(
            "no replica gives what snapshot {} holds from byte {from} on: {}",
            self.source.snapshot,
            refusals.join("; ")
        )))
    }

    fn open_source(&self, replica: &ReplicaAt) -> Result<SnapshotReader, Broken> {
        let reader = SnapshotReader::open(replica, &self.source.snapshot, None)?;
        if reader.size() > self.size {
            return Err(Broken::Here(EngineError::Invalid(format!(
                "the snapshot's volume has {} bytes, this one {}: a clone is at least as large",
                reader.size(),
                self.size
            ))));
        }
        Ok(reader)
    }

    fn copy_from(&mut self, replica: &ReplicaAt, from: &mut u64) -> Result<(), Broken> {
        let mut reader = self.open_source(replica)?;
        loop {
            let page = reader.map(*from)?;
            for range in &page.ranges {
                self.copy_range(&mut reader, *range, from)?;
            }
            match page.next {
                Some(next) => *from = next,
                None => return Ok(()),
            }
        }
    }

    /// One range; what lies before `from`, which is moved, is written.
    fn copy_range(
        &mut self,
        reader: &mut SnapshotReader,
        range: Extent,
        from: &mut u64,
    ) -> Result<(), Broken> {
        let mut at = range.offset.max(*from);
        while at < range.end() {
            if self.stop.load(Ordering::Acquire) {
                return Err(Broken::Here(EngineError::Ending));
            }
            let length = u32::try_from((range.end() - at).min(MAX_DATA.into())).unwrap_or(MAX_DATA);
            let bytes = reader.read(at, length)?;
            // What is not written reads as zero.
            if bytes.iter().any(|byte| *byte != 0) {
                self.writer.write(at, bytes).map_err(|e| Broken::Here(not_written(e)))?;
            }
            at += u64::from(length);
            *from = at;
            self.progress.change(|p| p.done = at);
        }
        Ok(())
    }
}

/// Why a replica was not read to its end.
enum Broken {
    /// Another one may go on.
    Source(ReadError),
    /// Nothing helps.
    Here(EngineError),
}

impl From<ReadError> for Broken {
    fn from(e: ReadError) -> Self {
        Self::Source(e)
    }
}

fn not_written(e: IoError) -> EngineError {
    EngineError::Failed(format!("the clone cannot be written: {e:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(names: &[&str]) -> Vec<LayerInfo> {
        let layer = |word: &&str| LayerInfo {
            name: word.trim_end_matches('!').to_owned(),
            removed: word.ends_with('!'),
            ..LayerInfo::default()
        };
        names.iter().map(layer).collect()
    }

    #[test]
    fn a_volume_with_the_mark_is_not_whole_whatever_else_it_has() {
        for (names, found, unfinished) in [
            (&[""][..], Found::Nothing, false),
            (&["clone-unfinished", ""], Found::Part, true),
            (&["clone-unfinished", "s", ""], Found::Whole, true),
            (&["clone-unfinished", "t", ""], Found::Foreign, true),
            (&["clone-unfinished", "s", "t", ""], Found::Foreign, true),
            (&["clone-unfinished!", "s", ""], Found::Foreign, false),
            (&["clone-unfinished!", ""], Found::Nothing, false),
            (&["s", ""], Found::Foreign, false),
        ] {
            let chain = chain(names);
            assert_eq!((Found::of(&chain, "s"), is_unfinished(&chain)), (found, unfinished), "{names:?}");
        }
    }
}
