//! Logs that never make their writer wait: a disk that holds the log may be the one that waits for the volume.
//!
//! A line goes into a bounded queue; a thread of its own writes it to standard error. When the queue is full, the line is
//! counted and dropped, and the next one that finds room is preceded by the count.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use tracing_subscriber::EnvFilter;
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

/// Begins to log to standard error. `LONGHORN_LOG` chooses what (`info`, `debug`, `replica=trace`).
pub(super) fn start(debug: bool) -> Logging {
    let (queue, lines) = sync_channel(QUEUE_LINES);
    let dropped = Arc::new(AtomicU64::new(0));
    let writer = Writer { queue: queue.clone(), dropped: dropped.clone() };
    let default = if debug { "debug" } else { "info" };
    let filter = EnvFilter::try_from_env("LONGHORN_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(writer).init();
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
