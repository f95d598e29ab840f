//! The thread that copies for folds: one piece of work at a time, and a ring of the bell after each.

use std::io;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use lh_ring::Bell;

use crate::store::FoldWork;

/// The ring thread's side of it. Few pieces of work are ever queued: one of a fold, and files to be closed.
#[derive(Debug)]
pub(super) struct FoldThread {
    work: Option<Sender<FoldWork>>,
    done: Receiver<FoldWork>,
    thread: Option<JoinHandle<()>>,
}

impl FoldThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start(bell: Option<Bell>) -> io::Result<Self> {
        let (work, inbox) = unbounded::<FoldWork>();
        let (outbox, done) = unbounded();
        let run = move || {
            for piece in inbox {
                if outbox.send(piece.run()).is_err() {
                    return;
                }
                if let Some(bell) = &bell {
                    bell.ring();
                }
            }
        };
        let thread = std::thread::Builder::new().name("replica-fold".into()).spawn(run)?;
        Ok(Self { work: Some(work), done, thread: Some(thread) })
    }

    pub(super) fn send(&mut self, work: FoldWork) {
        if let Some(sender) = &self.work {
            // The thread ends only after this side.
            let _ = sender.send(work);
        }
    }

    /// A piece of work that is done.
    pub(super) fn next(&mut self) -> Option<FoldWork> {
        self.done.try_recv().ok()
    }
}

impl Drop for FoldThread {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
