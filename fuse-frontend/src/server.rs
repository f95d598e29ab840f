//! The server: a queue thread's end of the FUSE connection.
//!
//! - One descriptor, shared by all queues and non-blocking: poll, then several reads in one submission, then their
//!   answers. (A plain io_uring read left waiting on /dev/fuse hangs.)
//! - The bytes of a write lie where the kernel put them, from a page boundary on, and go to the device uncopied;
//!   those of a read go from where the device has them.
//! - No request is read that the device has no place for: what is not read waits in the kernel, in order.
//! - Requests never take all memory. What they wait for arrives in the same pool, and with none left for it nothing would
//!   ever be answered.
//! - Memory that the kernel copies to or from must be resident: a process killed while such a page is faulted in fails
//!   the request with EIO instead of leaving it for the next server. The pool is therefore made with as much soft as
//!   hard memory, populated and locked, before [`Server::new`].

use std::collections::VecDeque;
use std::io;

use lh_block::{Device, Request};
use lh_ring::{Completion, Fd, Frontend, Payload, Pool, Ring, Rx, Token};
use nix::errno::Errno;

use crate::init::Agreement;
use crate::proto::REQUEST_HEAD;
use crate::session::{Answer, Reply, Session, Step};

/// Reads in one batch. The kernel gives nothing to a reader with less room than its largest WRITE, so each takes that
/// much of the pool while it is in flight, used or not: 3 chunks, 3 MiB in all. Measured at depth 32, system calls per
/// request: 0.5 with two, 0.35 with four, 0.25 with eight, and hardly less with sixteen.
const LANES: usize = 8;

/// Of the pool, the part that no request is read into: answers of replicas arrive there.
const SPARE: usize = 8;

/// Where in a page a request begins, so that the bytes of a write begin a page.
const HEAD_AT: u64 = 4096 - REQUEST_HEAD as u64;

/// Kinds of [`Token`].
mod kind {
    pub(super) const POLL: u8 = 0;
    pub(super) const READ: u8 = 1;
    pub(super) const ANSWER: u8 = 2;
}

/// What the server waits for from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing is asked; the next turn asks, if there is room. `ready`: there may be requests, no need to poll.
    Idle { ready: bool },
    /// A poll is in flight.
    Polling,
    /// So many reads are in flight, so many have brought something; `dry` if one of them has found nothing.
    Reading { left: usize, found: usize, dry: bool },
    /// The connection has ended.
    Gone,
}

/// Serves one FUSE connection for one queue of a volume.
#[derive(Debug)]
pub struct Server {
    fd: Fd,
    owner: u8,
    session: Session,
    lanes: Vec<Rx>,
    /// Bytes of the longest request.
    want: u32,
    pool: Pool,
    phase: Phase,
    /// Reads of the next batch. One more than last found something: the one in vain tells in the same system call that
    /// it is time to poll. All found something: twice as many.
    batch: usize,
    /// Requests that came when the device had no place, although it had one when they were asked for.
    held: VecDeque<Request<Payload>>,
}

impl Server {
    /// A server on the connection `fd`, which is non-blocking and on which INIT has been answered. `owner` marks its
    /// tokens; `depth` is the device's.
    ///
    /// # Errors
    /// `InvalidInput` if the pool can never hold one request.
    pub fn new(fd: Fd, agreement: &Agreement, owner: u8, pool: &Pool, depth: u32) -> io::Result<Self> {
        let want = agreement.max_write + u32::try_from(REQUEST_HEAD).unwrap_or(u32::MAX);
        // A request begins near the end of a page, and its chunk may be another's up to there.
        if pool.hard_bytes() < want as usize + 2 * lh_ring::CHUNK {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self {
            fd,
            owner,
            session: Session::new(depth),
            lanes: (0..LANES).map(|_| Rx::new(pool, 4096)).collect(),
            want,
            pool: pool.clone(),
            phase: Phase::Idle { ready: false },
            batch: 1,
            held: VecDeque::with_capacity(LANES),
        })
    }

    /// True once the connection has ended: unmounted, or aborted. No request will come any more.
    pub fn is_gone(&self) -> bool {
        self.phase == Phase::Gone
    }

    fn token(&self, kind: u8, slot: usize) -> Token {
        #[expect(clippy::cast_possible_truncation, reason = "a lane's number, below LANES")]
        Token::new(self.owner, kind, slot as u16, 0)
    }

    /// Asks the kernel for requests: by a poll, or at once if there may be some.
    fn ask(&mut self, ring: &mut Ring, device: &dyn Device<Payload>) {
        let Phase::Idle { ready } = self.phase else { return };
        let room = device.room().min(self.session.room()) as usize;
        let reads = self.batch.min(room.saturating_sub(self.held.len()));
        if reads == 0 {
            return;
        }
        if !ready {
            ring.poll_in(self.token(kind::POLL, 0), &self.fd);
            self.phase = Phase::Polling;
            return;
        }
        let mut left = 0;
        let spare = self.pool.hard_bytes() / lh_ring::CHUNK / SPARE;
        for lane in 0..reads {
            let token = self.token(kind::READ, lane);
            let rx = &mut self.lanes[lane];
            // Without memory now: it comes back with answers, and each of those brings a turn.
            let memory = self.pool.free_chunks() > spare;
            if memory && rx.set_position(HEAD_AT) && ring.read_rx(token, &self.fd, rx, self.want) {
                left += 1;
            } else {
                break;
            }
        }
        if left > 0 {
            self.phase = Phase::Reading { left, found: 0, dry: false };
        }
    }

    /// A read has ended.
    fn read(&mut self, device: &mut dyn Device<Payload>, lane: usize, result: io::Result<u32>) {
        let Phase::Reading { left, found, dry } = &mut self.phase else { return };
        *left -= 1;
        match result {
            Ok(_) => {
                *found += 1;
                let step = self.take(device, lane);
                self.follow(device, step);
            }
            // Nothing there; the request was taken back while it was copied; or the kernel has no memory just now, and the request waits.
            Err(e) if is(&e, &[Errno::EAGAIN, Errno::EINTR, Errno::ENOENT, Errno::ENOMEM]) => {
                *dry = true;
                // Others may have need of the room that this lane had.
                let _ = self.lanes[lane].set_position(HEAD_AT);
            }
            Err(e) => self.end(&e),
        }
        if let Phase::Reading { left: 0, found, dry } = self.phase {
            self.batch = if dry { found + 1 } else { found * 2 }.min(LANES);
            self.phase = Phase::Idle { ready: !dry };
        }
    }

    /// Takes the request that a lane has received, and the bytes that belong to it.
    fn take(&mut self, device: &dyn Device<Payload>, lane: usize) -> (Step, Option<Payload>) {
        let rx = &mut self.lanes[lane];
        let len = rx.available();
        let mut head = [0; REQUEST_HEAD];
        let head = &mut head[..len.min(REQUEST_HEAD)];
        rx.peek_at(0, head);
        let step = self.session.request(&device.geometry(), head, len);
        let data = match &step {
            Step::Submit { op: lh_block::Op::Write { .. }, .. } => {
                rx.skip(REQUEST_HEAD);
                Some(rx.take(len - REQUEST_HEAD))
            }
            _ => {
                rx.skip(len);
                None
            }
        };
        (step, data)
    }

    fn follow(&mut self, device: &mut dyn Device<Payload>, (step, data): (Step, Option<Payload>)) {
        match step {
            Step::Submit { tag, op, range } => {
                let request = Request { tag, op, range, data };
                if device.room() == 0 || !self.held.is_empty() {
                    self.held.push_back(request);
                } else {
                    device.submit(request);
                }
            }
            Step::Answer(answer) => self.answer_at_once(&answer),
            Step::Nothing => {}
        }
    }

    /// Writes an answer that has no data: rare ones, on the way to a device and from it.
    fn answer_at_once(&mut self, answer: &Answer) {
        if let Err(errno) = nix::unistd::write(&self.fd, answer.bytes()) {
            self.answered(Err(errno.into()));
        }
    }

    /// Hands the device's answers to the kernel.
    fn reply(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>) {
        while let Some(done) = device.poll_done() {
            let data = done.data.unwrap_or_default();
            let (answer, data) = match self.session.done(done.tag, done.result, data.len()) {
                Reply::Plain(answer) => (answer, Payload::default()),
                Reply::WithData(answer) => (answer, data),
                Reply::Withheld => continue,
            };
            ring.writev_head(self.token(kind::ANSWER, 0), &self.fd, answer.bytes(), &data);
        }
    }

    /// The kernel has taken an answer, or has not.
    fn answered(&mut self, result: io::Result<u32>) {
        match result {
            // Nobody waits for it any more: the waiter was killed, or a later server has been given the request.
            Err(e) if is(&e, &[Errno::ENOENT]) => tracing::debug!("an answer that nobody waits for"),
            Err(e) if is(&e, &[Errno::ECANCELED]) => {}
            Err(e) if is(&e, &[Errno::ENODEV, Errno::ECONNABORTED, Errno::EPERM]) => self.end(&e),
            Err(e) => tracing::error!("the kernel refused an answer: {e}"),
            Ok(_) => {}
        }
    }

    fn end(&mut self, reason: &io::Error) {
        if self.phase != Phase::Gone {
            tracing::info!("the FUSE connection has ended: {reason}");
            self.phase = Phase::Gone;
        }
    }
}

impl Frontend for Server {
    fn completion(&mut self, _: &mut Ring, device: &mut dyn Device<Payload>, completion: Completion) {
        match completion.token.kind {
            kind::POLL if self.phase == Phase::Polling => self.phase = Phase::Idle { ready: true },
            kind::READ => self.read(device, completion.token.slot.into(), completion.result),
            kind::ANSWER => self.answered(completion.result),
            _ => {}
        }
    }

    fn turn(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>) {
        while device.room() > 0 {
            let Some(request) = self.held.pop_front() else { break };
            device.submit(request);
        }
        self.reply(ring, device);
        self.ask(ring, device);
    }
}

/// True if the error is one of these.
fn is(error: &io::Error, errnos: &[Errno]) -> bool {
    error.raw_os_error().is_some_and(|raw| errnos.iter().any(|e| *e as i32 == raw))
}

#[cfg(test)]
mod tests;
