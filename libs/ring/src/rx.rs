//! A stream of received bytes, and payloads cut out of it where they lie.
//!
//! - The bytes lie in chunks of the pool, one after the other; what has been received and not been taken is
//!   `available`, what follows is free space for the next receive.
//! - The position in the stream and the address of a byte agree modulo `congruent`, so that what the peer aligned in
//!   the stream is aligned in memory, and goes to O_DIRECT without a copy.
//! - A byte is handed out once. The payload then keeps its chunk from being used again; when everything was taken and
//!   every payload is gone, the same chunk is filled again from its beginning.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use crate::payload::{IOVECS, SEGMENTS, Seg};
use crate::{CHUNK, Fd, Payload, Pool};

/// Free space that a receive gets if the pool has it, so that the end of a chunk does not cost a receive of few
/// bytes.
const ROOM: usize = 16 << 10;

const _: () = assert!(Rx::WANT_MAX as usize + 2 * CHUNK <= IOVECS * CHUNK);

/// The receiving side of a stream, or of a device that is read message by message.
#[derive(Debug)]
pub struct Rx(pub(crate) Rc<RxShared>);

/// The part that a receive in flight keeps alive.
#[derive(Debug)]
pub(crate) struct RxShared(RefCell<State>);

#[derive(Debug)]
struct State {
    pool: Pool,
    congruent: usize,
    /// Each with one reference.
    chunks: VecDeque<u32>,
    /// Offset of the first byte not taken, in the first chunk.
    head: usize,
    /// Bytes received and not taken.
    available: usize,
    /// Position in the stream of the first byte not taken.
    position: u64,
    /// A receive is in flight: the space behind `available` is the kernel's.
    outstanding: bool,
    /// The last receive left bytes in the socket.
    more_to_come: bool,
}

impl Rx {
    /// Most bytes that can be asked for at once.
    pub const WANT_MAX: u32 = 1536 << 10;

    /// A stream at position 0. `congruent` is a power of two up to 4096 (1: no wish).
    ///
    /// # Panics
    /// For any other `congruent`.
    pub fn new(pool: &Pool, congruent: u32) -> Self {
        assert!(congruent.is_power_of_two() && congruent <= 4096, "congruent {congruent}");
        Self(Rc::new(RxShared(RefCell::new(State {
            pool: pool.clone(),
            congruent: congruent as usize,
            chunks: VecDeque::with_capacity(2 * IOVECS),
            head: 0,
            available: 0,
            position: 0,
            outstanding: false,
            more_to_come: false,
        }))))
    }

    /// Bytes received and not taken.
    pub fn available(&self) -> usize {
        self.0.0.borrow().available
    }

    /// Position in the stream of the first byte not taken.
    pub fn position(&self) -> u64 {
        self.0.0.borrow().position
    }

    /// True while a receive is in flight.
    pub fn is_outstanding(&self) -> bool {
        self.0.0.borrow().outstanding
    }

    /// A copy of the next `N` bytes, if they are there.
    pub fn peek<const N: usize>(&self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.peek_at(0, &mut bytes).then_some(bytes)
    }

    /// Copies the bytes from `from` on behind the first one not taken; false, and nothing done, if they are not there.
    pub fn peek_at(&self, from: usize, to: &mut [u8]) -> bool {
        let state = self.0.0.borrow();
        if from.checked_add(to.len()).is_none_or(|end| end > state.available) {
            return false;
        }
        let mut done = 0;
        state.for_each(from, to.len(), |seg| {
            let part = &mut to[done..done + seg.len as usize];
            // SAFETY: the segment is inside `available`: received, not handed out, and in a chunk that this stream
            // has a reference to. The kernel writes only behind it, a payload's owner only before it.
            let bytes = unsafe {
                std::slice::from_raw_parts(state.pool.ptr(seg.at as usize).cast_const(), part.len())
            };
            part.copy_from_slice(bytes);
            done += part.len();
        });
        true
    }

    /// The next `n` bytes, where they lie.
    ///
    /// # Panics
    /// If there are fewer, or more than a payload holds.
    pub fn take(&mut self, n: usize) -> Payload {
        let mut state = self.0.0.borrow_mut();
        assert!(n <= state.available && n <= Payload::MAX, "{n} of {} bytes", state.available);
        let mut segs = [Seg::default(); SEGMENTS];
        let mut count = 0;
        state.for_each(0, n, |seg| {
            state.pool.retain(seg.chunk());
            segs[count] = seg;
            count += 1;
        });
        let payload = Payload::of_segments(&state.pool, &segs[..count]);
        state.advance(n);
        payload
    }

    /// Drops the next `n` bytes.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn skip(&mut self, n: usize) {
        let mut state = self.0.0.borrow_mut();
        assert!(n <= state.available, "{n} of {} bytes", state.available);
        state.advance(n);
    }

    /// Reads from a non-blocking descriptor at once, by a system call of its own, into room for `want` bytes: how many
    /// bytes are available now in addition; 0 at the end.
    ///
    /// # Errors
    /// The system's: `WouldBlock` if nothing is there; `OutOfMemory` if the pool has no memory now.
    ///
    /// # Panics
    /// While a receive is in flight.
    pub fn read_now(&mut self, fd: &Fd, want: u32) -> io::Result<usize> {
        assert!(!self.is_outstanding(), "a receive is in flight");
        let mut iovecs = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; IOVECS];
        let count = self.0.start(want, &mut iovecs).ok_or(io::ErrorKind::OutOfMemory)?;
        let count = libc::c_int::try_from(count).unwrap_or(0);
        // SAFETY: `start` gave this free space to this read alone; the call ends before anybody else gets it.
        let done = usize::try_from(unsafe { libc::readv(fd.raw(), iovecs.as_ptr(), count) });
        let result = done.map_err(|_| io::Error::last_os_error());
        self.0.complete(*result.as_ref().unwrap_or(&0));
        result
    }

    /// Says that the first byte not taken is at `position` of the stream: after a handshake, where the counting begins
    /// anew, or before each message of a device. What is there already is moved. False, and nothing done, if the pool
    /// has no memory for that now.
    ///
    /// # Panics
    /// While a receive is in flight.
    #[must_use]
    pub fn set_position(&mut self, position: u64) -> bool {
        let mut state = self.0.0.borrow_mut();
        assert!(!state.outstanding, "a receive is in flight");
        let ok = state.realign(position);
        if ok {
            state.position = position;
        }
        ok
    }

    /// Appends bytes as if they had been received: what a handshake read too much, and tests without a socket. False,
    /// and nothing done, if the pool has no memory for them now.
    ///
    /// # Panics
    /// While a receive is in flight, or for more than [`Rx::WANT_MAX`] bytes.
    #[must_use]
    pub fn feed(&mut self, bytes: &[u8]) -> bool {
        let mut state = self.0.0.borrow_mut();
        assert!(!state.outstanding, "a receive is in flight");
        state.append(bytes)
    }
}

impl RxShared {
    /// Makes room for `want` bytes and describes it in `iovecs`: how many of them, or `None` if a receive is in flight
    /// already or the pool has no memory now. From here to `complete` the room is the kernel's.
    pub(crate) fn start(&self, want: u32, iovecs: &mut [libc::iovec; IOVECS]) -> Option<usize> {
        let mut state = self.0.borrow_mut();
        if state.outstanding || !state.reserve(want.max(1) as usize) {
            return None;
        }
        state.outstanding = true;
        let room = state.chunks.len() * CHUNK - state.head - state.available;
        let mut count = 0;
        state.for_each(state.available, room, |seg| {
            if let Some(iovec) = iovecs.get_mut(count) {
                *iovec = libc::iovec {
                    iov_base: state.pool.ptr(seg.at as usize).cast(),
                    iov_len: seg.len as usize,
                };
                count += 1;
            }
        });
        Some(count)
    }

    /// Whether the last receive left bytes in the socket, as the kernel said.
    pub(crate) fn more_to_come(&self, more: bool) {
        self.0.borrow_mut().more_to_come = more;
    }

    /// See `more_to_come`.
    pub(crate) fn expects_more(&self) -> bool {
        self.0.borrow().more_to_come
    }

    /// The receive has ended with `n` bytes.
    pub(crate) fn complete(&self, n: usize) {
        let mut state = self.0.borrow_mut();
        state.outstanding = false;
        state.available += n;
        debug_assert!(state.head + state.available <= state.chunks.len() * CHUNK);
    }
}

impl State {
    /// Calls `f` with the pieces of `len` bytes from `from` on, counted from the first byte not taken.
    fn for_each(&self, from: usize, len: usize, mut f: impl FnMut(Seg)) {
        let (mut at, mut left) = (self.head + from, len);
        while left > 0 {
            let offset = at % CHUNK;
            let part = left.min(CHUNK - offset);
            f(Seg::new(self.chunks[at / CHUNK] as usize * CHUNK + offset, part));
            at += part;
            left -= part;
        }
    }

    /// Takes `n` bytes off, and lets go of the chunks they filled to the end.
    fn advance(&mut self, n: usize) {
        self.head += n;
        self.available -= n;
        self.position += n as u64;
        while self.head >= CHUNK {
            self.head -= CHUNK;
            if let Some(chunk) = self.chunks.pop_front() {
                self.pool.release(chunk);
            }
        }
    }

    /// With nothing available and nothing in flight: keeps at most one chunk, from its beginning if nobody else has a
    /// part of it, else from `head` on.
    fn rewind(&mut self) {
        debug_assert!(self.available == 0 && !self.outstanding);
        while self.chunks.len() > 1 {
            self.chunks.pop_back().into_iter().for_each(|chunk| self.pool.release(chunk));
        }
        if self.chunks.front().is_none_or(|chunk| self.pool.refs(*chunk) == 1) {
            self.head %= self.congruent;
        }
    }

    /// Makes sure that `want` bytes fit behind the available ones.
    fn reserve(&mut self, want: usize) -> bool {
        assert!(want <= Rx::WANT_MAX as usize, "{want} bytes wanted at once");
        if self.available == 0 {
            self.rewind();
        }
        let before = self.chunks.len();
        let end = self.head + self.available;
        while self.chunks.len() * CHUNK < end + want.max(ROOM) {
            let enough = self.chunks.len() * CHUNK >= end + want;
            match self.pool.take_chunk() {
                Some(chunk) => self.chunks.push_back(chunk),
                None if enough => break,
                None => {
                    self.chunks.drain(before..).for_each(|chunk| self.pool.release(chunk));
                    return false;
                }
            }
        }
        true
    }

    fn append(&mut self, bytes: &[u8]) -> bool {
        if !self.reserve(bytes.len()) {
            return false;
        }
        let mut done = 0;
        self.for_each(self.available, bytes.len(), |seg| {
            let part = &bytes[done..done + seg.len as usize];
            // SAFETY: the segment is free space of this stream: in a chunk it holds a reference to, behind everything
            // handed out, and no receive is in flight. `bytes` cannot overlap it, since nobody was given it.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), self.pool.ptr(seg.at as usize), part.len());
            }
            done += part.len();
        });
        self.available += bytes.len();
        true
    }

    /// Moves on (or the available bytes over) to an address congruent to `position`.
    fn realign(&mut self, position: u64) -> bool {
        let modulus = self.congruent as u64;
        #[expect(clippy::cast_possible_truncation, reason = "smaller than the modulus")]
        let offset = (position % modulus) as usize;
        if self.available == 0 {
            self.rewind();
            let forward = (offset + self.congruent - self.head % self.congruent) % self.congruent;
            self.head += forward;
            if self.head >= CHUNK {
                // Only when somebody else holds the chunk's other bytes.
                self.head -= CHUNK;
                self.chunks.pop_front().into_iter().for_each(|chunk| self.pool.release(chunk));
            }
            return true;
        }
        if self.head % self.congruent == offset {
            return true;
        }
        let mut moved = Self {
            pool: self.pool.clone(),
            congruent: self.congruent,
            chunks: VecDeque::with_capacity(self.chunks.capacity()),
            head: offset,
            available: 0,
            position: 0,
            outstanding: false,
            more_to_come: false,
        };
        let mut ok = moved.reserve(self.available);
        self.for_each(0, self.available, |seg| {
            // SAFETY: received bytes that nobody has been given, as in `peek_at`; `moved` lies in other chunks.
            let bytes = unsafe {
                std::slice::from_raw_parts(self.pool.ptr(seg.at as usize).cast_const(), seg.len as usize)
            };
            ok = ok && moved.append(bytes);
        });
        if ok {
            std::mem::swap(&mut self.chunks, &mut moved.chunks);
            self.head = moved.head;
        }
        ok
    }
}

impl Drop for State {
    fn drop(&mut self) {
        while let Some(chunk) = self.chunks.pop_front() {
            self.pool.release(chunk);
        }
    }
}
