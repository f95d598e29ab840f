//! Writes from within the engine's process: what a clone reads elsewhere goes through a queue as any client's write does,
//! so that it reaches every replica in the same order.

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use datapath::engine::EngineHandle;
use lh_block::{Device, Extent, IoError, Op, Request};
use lh_ring::{Payload, Pool};

/// Writes in flight: four megabytes at most, as a client of some depth has.
const IN_FLIGHT: usize = 4;

/// What a queue is asked to carry out.
enum Job {
    Write(u64, Vec<u8>),
    Flush,
}

/// The end that writes.
pub(super) struct Writer {
    jobs: Option<Sender<Job>>,
    results: Receiver<Result<(), IoError>>,
    engine: EngineHandle,
    waiting: usize,
}

/// The end in the queue's thread.
pub(super) struct Filler {
    jobs: Receiver<Job>,
    results: Sender<Result<(), IoError>>,
    /// Waits for memory.
    held: Option<Job>,
    in_flight: u32,
    tag: u64,
    is_over: bool,
}

/// Both ends.
pub(super) fn channel(engine: &EngineHandle) -> (Writer, Filler) {
    let (jobs, taken) = unbounded();
    let (told, results) = unbounded();
    let writer = Writer { jobs: Some(jobs), results, engine: engine.clone(), waiting: 0 };
    (writer, Filler { jobs: taken, results: told, held: None, in_flight: 0, tag: 0, is_over: false })
}

impl Writer {
    /// Writes at an offset; waits while much is in flight.
    ///
    /// # Errors
    /// Of this write, or of an earlier one.
    pub(super) fn write(&mut self, offset: u64, bytes: Vec<u8>) -> Result<(), IoError> {
        while self.waiting >= IN_FLIGHT {
            self.settle_one()?;
        }
        self.send(Job::Write(offset, bytes))
    }

    /// Everything written is on stable storage on every member.
    ///
    /// # Errors
    /// Of the flush, or of an earlier write.
    pub(super) fn flush(&mut self) -> Result<(), IoError> {
        while self.waiting > 0 {
            self.settle_one()?;
        }
        self.send(Job::Flush)?;
        self.settle_one()
    }

    fn send(&mut self, job: Job) -> Result<(), IoError> {
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        self.waiting += 1;
        self.engine.wake_queues();
        if sent { Ok(()) } else { Err(IoError::Io) }
    }

    fn settle_one(&mut self) -> Result<(), IoError> {
        self.waiting -= 1;
        self.results.recv().unwrap_or(Err(IoError::Io))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.jobs.take());
        self.engine.wake_queues();
    }
}

impl Filler {
    /// No job will come any more, and none is unanswered.
    pub(super) const fn is_over(&self) -> bool {
        self.is_over && self.in_flight == 0
    }

    pub(super) fn turn(&mut self, pool: &Pool, device: &mut dyn Device<Payload>) {
        while let Some(done) = device.poll_done() {
            self.in_flight -= 1;
            // A writer that has gone waits for nothing.
            let _ = self.results.send(done.result);
        }
        while device.room() > 0 {
            let job = match self.held.take().map_or_else(|| self.jobs.try_recv(), Ok) {
                Ok(job) => job,
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.is_over = true;
                    return;
                }
            };
            let Some(request) = self.request(pool, &job) else {
                self.held = Some(job);
                return;
            };
            self.in_flight += 1;
            device.submit(request);
        }
    }

    /// `None`: there is no memory now.
    fn request(&mut self, pool: &Pool, job: &Job) -> Option<Request<Payload>> {
        let (op, range, data) = match job {
            Job::Flush => (Op::Flush, Extent::new(0, 0), None),
            Job::Write(offset, bytes) => {
                let mut payload = pool.alloc(u32::try_from(bytes.len()).ok()?, 4096)?;
                payload.write_at(0, bytes);
                (Op::Write { fua: false }, Extent::new(*offset, bytes.len() as u64), Some(payload))
            }
        };
        self.tag += 1;
        Some(Request { tag: self.tag, op, range, data })
    }
}
