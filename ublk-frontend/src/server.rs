//! The server: a queue thread's end of a ublk device.
//!
//! - Every tag has one command in flight at the kernel, or one request here. Commands, copies and the device's own I/O
//!   complete on the thread's one ring.
//! - The kernel copies the bytes of a write into memory of the pool, which goes to the device as it is, and those of a
//!   read from where the device has them: user space copies nothing.
//! - A request whose bytes have no place yet waits at no cost: they are still the kernel's. Never more than half of the
//!   pool holds bytes of unanswered requests, and no write takes the last eighth, so that answers always find memory: the bytes of
//!   a write that was answered without a replica that is being filled stay in the pool until that one has them, too.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use lh_block::{Device, Request};
use lh_ring::{CHUNK, Completion, Fd, Frontend, Payload, Pool, Ring, Token};

use crate::abi::data_position;
use crate::channel::Channel;
use crate::kernel::{Descriptors, commit, fetch};
use crate::session::{Session, Slot, Step, Work};

/// Kinds of [`Token`].
mod kind {
    /// A fetch, or the commit that fetches again.
    pub(super) const COMMAND: u8 = 0;
    pub(super) const COPY_IN: u8 = 1;
    pub(super) const COPY_OUT: u8 = 2;
}

/// Of the pool, the part that no write takes: answers of replicas arrive there.
const SPARE: usize = 8;

/// True if a write may take memory.
fn has_memory(pool: &Pool) -> bool {
    pool.free_chunks() > pool.hard_bytes() / CHUNK / SPARE
}

/// Alignment of a write's bytes in memory: a page, so that they may go to O_DIRECT as they are.
const ALIGN: u32 = 4096;

/// A queue that is served.
#[derive(Debug)]
struct Queue {
    fd: Fd,
    number: u16,
    depth: u16,
    descriptors: Descriptors,
    /// Its first slot.
    first: u32,
}

/// Serves queues of one ublk device for one queue of a volume.
#[derive(Debug)]
pub struct Server {
    owner: u8,
    pool: Pool,
    queues: Vec<Queue>,
    session: Session,
    /// Fetches have been sent.
    begun: bool,
    /// Requests that wait for room at the device or memory, first come first served.
    waiting: VecDeque<Slot>,
    /// Writes whose bytes are here and for which the device has had no place, although it had one when they were copied.
    copied: VecDeque<(Slot, Work, Payload)>,
    /// Requests whose bytes come from the kernel.
    copying: u32,
    /// Bytes of requests that have been admitted and not been answered.
    bytes: usize,
    bytes_max: usize,
}

impl Server {
    /// A server of these queues of a device. `owner` marks its tokens. A server without a queue is gone from the begin.
    ///
    /// # Errors
    /// The system's; `InvalidInput` if half of the pool is less than the longest request.
    pub fn new(channels: Vec<Channel>, owner: u8, pool: &Pool) -> io::Result<Self> {
        let bytes_max = pool.hard_bytes() / 2;
        if bytes_max < Payload::MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut queues = Vec::with_capacity(channels.len());
        let mut slots = 0;
        for channel in channels {
            let descriptors = Descriptors::map(channel.fd.as_fd(), channel.queue, channel.depth)?;
            queues.push(Queue {
                fd: Fd::new(channel.fd),
                number: channel.queue,
                depth: channel.depth,
                descriptors,
                first: slots,
            });
            slots += u32::from(channel.depth);
        }
        let count = slots as usize;
        Ok(Self {
            owner,
            pool: pool.clone(),
            queues,
            session: Session::new(count),
            begun: false,
            waiting: VecDeque::with_capacity(count),
            copied: VecDeque::with_capacity(count),
            copying: 0,
            bytes: 0,
            bytes_max,
        })
    }

    /// True once the device has gone: stopped, by us or by somebody else. No request will come any more.
    pub const fn is_gone(&self) -> bool {
        self.session.is_gone()
    }

    fn token(&self, kind: u8, slot: Slot) -> Token {
        Token::new(self.owner, kind, 0, slot.0)
    }

    /// The queue of a slot, and the tag in it.
    fn place(&self, slot: Slot) -> (&Queue, u16) {
        let at = self.queues.partition_point(|queue| queue.first <= slot.0) - 1;
        let queue = &self.queues[at];
        (queue, u16::try_from(slot.0 - queue.first).unwrap_or(u16::MAX))
    }

    /// Asks for the first requests of all tags.
    fn begin(&mut self, ring: &mut Ring) {
        for queue in &self.queues {
            for tag in 0..queue.depth {
                let slot = Slot(queue.first + u32::from(tag));
                fetch(ring, self.token(kind::COMMAND, slot), &queue.fd, queue.number, tag);
            }
        }
    }

    fn commit(&self, ring: &mut Ring, slot: Slot, result: i32) {
        let (queue, tag) = self.place(slot);
        commit(ring, self.token(kind::COMMAND, slot), &queue.fd, queue.number, tag, result);
    }

    /// A command has ended: with a request, or for good.
    fn fetched(
        &mut self,
        ring: &mut Ring,
        device: &dyn Device<Payload>,
        slot: Slot,
        result: io::Result<u32>,
    ) {
        if let Err(e) = result {
            // The device is being stopped (ENODEV), or this server's ring is being given up (ECANCELED).
            if !matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ECANCELED)) {
                tracing::error!("the kernel refused a command of request {}: {e}", slot.0);
            }
            self.session.gone(slot);
            return;
        }
        let (queue, tag) = self.place(slot);
        let descriptor = queue.descriptors.get(tag);
        match self.session.fetched(slot, &descriptor, &device.geometry()) {
            Step::Commit(result) => {
                tracing::error!("a request that cannot be: {descriptor:?}");
                self.commit(ring, slot, result);
            }
            _ => self.waiting.push_back(slot),
        }
    }

    /// Starts what waits, as far as there are room and memory. True if anything was started.
    fn admit(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>) -> bool {
        let before = self.copied.len() + self.waiting.len();
        while device.room() > 0 {
            let Some((slot, work, data)) = self.copied.pop_front() else { break };
            submit(device, slot, work, Some(data));
        }
        while let Some(&slot) = self.waiting.front() {
            let bytes = self.session.waiting(slot).bytes();
            let taken = u32::try_from(self.copied.len()).unwrap_or(u32::MAX).saturating_add(self.copying);
            if device.room() <= taken || self.bytes + bytes as usize > self.bytes_max {
                break;
            }
            if !self.start(ring, device, slot, bytes) {
                break;
            }
            self.bytes += bytes as usize;
            self.waiting.pop_front();
        }
        self.copied.len() + self.waiting.len() < before
    }

    /// Starts one request; false, and nothing done, without memory for its bytes.
    fn start(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>, slot: Slot, bytes: u32) -> bool {
        let is_write = matches!(self.session.waiting(slot).op, lh_block::Op::Write { .. });
        let memory = match is_write {
            true if !has_memory(&self.pool) => None,
            true => self.pool.alloc(bytes, ALIGN),
            false => Some(Payload::default()),
        };
        let Some(memory) = memory else { return false };
        match self.session.admit(slot) {
            Step::CopyIn(_) => {
                let (queue, tag) = self.place(slot);
                let at = data_position(queue.number, tag);
                ring.readv(self.token(kind::COPY_IN, slot), &queue.fd, at, memory);
                self.copying += 1;
            }
            Step::Submit(work) => submit(device, slot, work, None),
            _ => {}
        }
        true
    }

    /// The bytes of a write are here, or are not.
    fn copied_in(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>, slot: Slot, done: Completion) {
        self.copying -= 1;
        let bytes = done.payload.as_ref().map_or(0, Payload::len);
        match self.session.copied_in(slot, errno_of(&done.result)) {
            Step::Submit(work) => {
                let data = done.payload.unwrap_or_default();
                if device.room() == 0 || !self.copied.is_empty() {
                    self.copied.push_back((slot, work, data));
                } else {
                    submit(device, slot, work, Some(data));
                }
            }
            Step::Commit(result) => {
                self.bytes -= bytes;
                // The device is going away, and the kernel has answered the request itself.
                tracing::debug!("the bytes of write {} did not come: {:?}", slot.0, done.result);
                self.commit(ring, slot, result);
            }
            _ => {}
        }
    }

    /// The bytes of a read have reached the kernel, or have not.
    fn copied_out(&mut self, ring: &mut Ring, slot: Slot, result: &io::Result<u32>) {
        if let Step::Commit(result) = self.session.copied_out(slot, errno_of(result)) {
            self.commit(ring, slot, result);
        }
    }

    /// Takes the device's answers.
    fn reply(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>) {
        while let Some(done) = device.poll_done() {
            let slot = Slot(u32::try_from(done.tag).unwrap_or(u32::MAX));
            let data = done.data.unwrap_or_default();
            self.bytes -= self.session.bytes(slot) as usize;
            let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
            match self.session.done(slot, done.result, len) {
                Step::CopyOut(_) => {
                    let (queue, tag) = self.place(slot);
                    let at = data_position(queue.number, tag);
                    ring.writev(self.token(kind::COPY_OUT, slot), &queue.fd, at, &data);
                }
                Step::Commit(result) => self.commit(ring, slot, result),
                _ => {}
            }
        }
    }
}

fn submit(device: &mut dyn Device<Payload>, slot: Slot, work: Work, data: Option<Payload>) {
    device.submit(Request { tag: slot.0.into(), op: work.op, range: work.range, data });
}

fn errno_of(result: &io::Result<u32>) -> Result<u32, i32> {
    match result {
        Ok(bytes) => Ok(*bytes),
        Err(e) => Err(e.raw_os_error().unwrap_or(libc::EIO)),
    }
}

impl Frontend for Server {
    fn completion(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>, completion: Completion) {
        let slot = Slot(completion.token.data);
        match completion.token.kind {
            kind::COMMAND => self.fetched(ring, device, slot, completion.result),
            kind::COPY_IN => self.copied_in(ring, device, slot, completion),
            kind::COPY_OUT => self.copied_out(ring, slot, &completion.result),
            _ => {}
        }
    }

    fn turn(&mut self, ring: &mut Ring, device: &mut dyn Device<Payload>) {
        if !self.begun {
            self.begun = true;
            self.begin(ring);
        }
        self.reply(ring, device);
        // What was answered at once has made room again, and no other completion may come to tell so.
        while self.admit(ring, device) {
            self.reply(ring, device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_leave_memory_for_the_answers_that_they_wait_for() {
        let pool = Pool::new(16 * CHUNK, 16 * CHUNK).unwrap();
        let chunk = u32::try_from(CHUNK).unwrap();
        // What was answered without a replica that is being filled, and is not counted as unanswered any more.
        let mut held: Vec<Payload> = (0..13).map(|_| pool.alloc(chunk, ALIGN).unwrap()).collect();
        assert!(has_memory(&pool));
        held.push(pool.alloc(chunk, ALIGN).unwrap());
        assert!(!has_memory(&pool), "{} chunks are left", pool.free_chunks());
        held.pop();
        assert!(has_memory(&pool));
    }
}
