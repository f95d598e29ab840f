//! Logs that never make their writer wait: a disk that holds the log may be the one that waits for the volume.
//!
//! A line goes into a bounded queue; a thread of its own writes it to standard error. When the queue is full, the line is
//! counted and dropped, and the next one that finds room is preceded by the count.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use control::logging::{self, BEGINS_AT, Level};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Lines on their way: at 200 bytes a line some 200 KiB, and half a second of a disk that stalls under a line per
/// half millisecond.
const QUEUE_LINES: usize = 1024;

/// Writes what is queued when dropped.
pub(super) struct Logging {
    queue: Option<SyncSender<Message>>,
    thread: Option<JoinHandle<()>>,
}

enum Message {
    Line(Vec<u8>),
    End,
}

/// The project's own crates, as lines of the log name them. A level below `info` is of their lines: what libraries say of each
/// of their frames would bury them.
const OWN: [&str; 14] = [
    "backupstore",
    "control",
    "csi",
    "datapath",
    "fuse_frontend",
    "iscsi_frontend",
    "lh_block",
    "lh_cluster",
    "lh_ring",
    "lh_wire",
    "longhorn",
    "nbd_frontend",
    "replica",
    "ublk_frontend",
];

/// What is logged at a level.
fn filter(level: Level) -> EnvFilter {
    let word = logging::word(level);
    if level <= Level::INFO {
        return EnvFilter::new(word);
    }
    let own = OWN.map(|name| format!("{name}={word}"));
    EnvFilter::new(format!("info,{}", own.join(",")))
}

/// The variable in which whoever starts a process says what it logs.
const ASKED: &str = "LONGHORN_LOG";

/// What is logged by a value of [`ASKED`]; `Err`: why it says nothing, one sentence.
fn asked_for(value: &OsStr) -> Result<EnvFilter, String> {
    let no_level = |word: &str| {
        format!(
            "{ASKED} is {word:?}, which is no level, and is left out: error, warn, info, debug and trace are"
        )
    };
    let text = value.to_str().ok_or_else(|| no_level(&value.to_string_lossy()))?;
    if text.trim().is_empty() {
        return Err(format!("{ASKED} is empty, and is left out"));
    }
    // A word that is neither would be taken for a library's name, and nothing be logged but its lines.
    let is_known = |word: &str| {
        let part = word.split("::").next().unwrap_or_default();
        word.contains(['=', '[']) || word.parse::<LevelFilter>().is_ok() || OWN.contains(&part)
    };
    match text.split(',').map(str::trim).find(|word| !is_known(word)) {
        Some(word) => Err(no_level(word)),
        None => EnvFilter::try_new(text).map_err(|_| no_level(text)),
    }
}

/// Begins to log to standard error. What whoever starts the process says counts to its end: `LONGHORN_LOG` chooses what is
/// logged (`info`, `debug`, `replica=trace`), else `debug` does. Without either it is a level that changes with
/// `control::logging`; `LONGHORN_LOG_LEVEL` is the one to begin with.
pub(super) fn start(debug: bool) -> Logging {
    let (queue, lines) = sync_channel(QUEUE_LINES);
    let dropped = Arc::new(AtomicU64::new(0));
    let writer = Writer { queue: queue.clone(), dropped: dropped.clone() };
    let (asked, wrong) = match std::env::var_os(ASKED).map(|value| asked_for(&value)) {
        None => (None, None),
        Some(Ok(filter)) => (Some(filter), None),
        Some(Err(wrong)) => (None, Some(wrong)),
    };
    let asked = asked.or_else(|| debug.then(|| EnvFilter::new("debug")));
    let begins = std::env::var(BEGINS_AT).ok().and_then(|word| logging::parse(&word)).unwrap_or(Level::INFO);
    let is_settled = asked.is_some();
    let log = tracing_subscriber::fmt()
        .with_env_filter(asked.unwrap_or_else(|| filter(begins)))
        .with_ansi(false)
        .with_writer(writer)
        .with_filter_reloading();
    let handle = log.reload_handle();
    log.init();
    if let Some(wrong) = wrong {
        tracing::warn!("{wrong}");
    }
    if !is_settled {
        let now = Mutex::new(begins);
        logging::switch(move |level| {
            let before = std::mem::replace(&mut *now.lock().unwrap_or_else(PoisonError::into_inner), level);
            if before != level && handle.reload(filter(level)).is_ok() {
                tracing::info!("logs at level {} from now on", logging::word(level));
            }
        });
    }
    let thread =
        std::thread::Builder::new().name("log".into()).spawn(move || write_out(&lines, &dropped)).ok();
    Logging { queue: Some(queue), thread }
}

impl Drop for Logging {
    fn drop(&mut self) {
        let (Some(queue), Some(thread)) = (self.queue.take(), self.thread.take()) else { return };
        // The thread is gone, or it writes everything before the end.
        let _ = queue.send(Message::End);
        let _ = thread.join();
    }
}

fn write_out(lines: &Receiver<Message>, dropped: &AtomicU64) {
    let mut out = io::stderr();
    while let Ok(Message::Line(line)) = lines.recv() {
        let lost = dropped.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let _ = writeln!(out, "({lost} lines of this log were dropped)");
        }
        // Nobody can be told that the log cannot be written.
        let _ = out.write_all(&line);
    }
}

#[derive(Clone)]
struct Writer {
    queue: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

/// One line: the formatter writes each event whole.
impl Write for Writer {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Err(TrySendError::Full(_)) = self.queue.try_send(Message::Line(line.to_vec())) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Writer {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_of_the_projects_own_lines() {
        let members = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml")).unwrap();
        let (_, members) = members.split_once("members = [").unwrap();
        let (members, _) = members.split_once(']').unwrap();
        let places = members.split('"').skip(1).step_by(2);
        let mut names: Vec<String> = places
            .map(|place| {
                let path = format!("{}/../{place}/Cargo.toml", env!("CARGO_MANIFEST_DIR"));
                let text = std::fs::read_to_string(path).unwrap();
                let name = text.lines().find_map(|line| line.strip_prefix("name = ")).unwrap();
                name.trim_matches('"').replace('-', "_")
            })
            // No program has them.
            .filter(|name| !["benches", "tests", "lh_rig"].contains(&name.as_str()))
            .collect();
        names.sort();
        assert_eq!(names, OWN);
    }

    #[test]
    fn a_level_that_changes_lets_other_lines_through_and_no_librarys() {
        let (queue, lines) = sync_channel(16);
        let writer = Writer { queue, dropped: Arc::default() };
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter(Level::INFO))
            .with_writer(writer)
            .with_filter_reloading();
        let handle = log.reload_handle();
        tracing::subscriber::with_default(log.finish(), || {
            tracing::debug!(target: "replica::store", "before");
            handle.reload(filter(Level::DEBUG)).unwrap();
            tracing::debug!(target: "replica::store", "own");
            tracing::debug!(target: "h2::codec", "frame");
            tracing::info!(target: "h2::codec", "notice");
            handle.reload(filter(Level::ERROR)).unwrap();
            tracing::warn!(target: "replica::store", "after");
        });
        let said: Vec<String> = lines
            .try_iter()
            .map(|line| match line {
                Message::Line(bytes) => String::from_utf8(bytes).unwrap(),
                Message::End => String::new(),
            })
            .collect();
        let has = |word: &str| said.iter().any(|line| line.contains(word));
        let words = ["before", "own", "frame", "notice", "after"].map(has);
        assert_eq!(words, [false, true, false, true, false], "{said:?}");
    }

    #[test]
    fn what_names_no_level_leaves_the_log_as_it_is() {
        for good in ["debug", "INFO", "off", "warn,replica=trace", "h2=debug", "datapath", "replica::store"] {
            assert!(asked_for(OsStr::new(good)).is_ok(), "{good}");
        }
        for (bad, told) in [("", "empty"), ("  ", "empty"), ("verbose", "\"verbose\""), ("info,al", "\"al\"")]
        {
            let wrong = asked_for(OsStr::new(bad)).unwrap_err();
            assert!(wrong.contains(told) && wrong.contains("LONGHORN_LOG"), "{wrong}");
        }
        assert!(asked_for(OsStr::new("replica=loud")).unwrap_err().contains("trace"));
    }

    #[test]
    fn a_full_queue_drops_lines_and_counts_them() {
        let (queue, lines) = sync_channel(2);
        let dropped = Arc::new(AtomicU64::new(0));
        let mut writer = Writer { queue, dropped: dropped.clone() };
        for _ in 0..5 {
            writer.write_all(b"line\n").unwrap();
        }
        assert_eq!(dropped.load(Ordering::Relaxed), 3);
        assert_eq!(lines.try_iter().count(), 2);
    }
}
