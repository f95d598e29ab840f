//! A queue of bytes to send: headers, padding and payloads, in order.
//!
//! - Headers are copied into chunks of the queue's own and merge with their neighbours: many small answers are one
//!   range of memory. Payloads are sent from where they lie.
//! - Memory is let go as it is sent. What a send in flight covers stays as it is until its completion.

use std::cell::{RefCell, UnsafeCell};
use std::collections::VecDeque;
use std::rc::Rc;

use crate::payload::{SEGMENTS, Seg};
use crate::{CHUNK, Payload, Pool};

/// Ranges in one send. The kernel takes 1024; more than these only make its first look at the socket's free space
/// dearer.
pub(crate) const SEND_IOVECS: usize = 64;

/// Segments a queue holds without allocating.
const QUEUE: usize = 512;

/// Offset that stands for the page of zeroes.
const ZERO: u32 = u32::MAX;

static ZEROES: [u8; 4096] = [0; 4096];

/// The sending side of a stream.
#[derive(Debug)]
pub struct Tx(pub(crate) Rc<TxShared>);

/// The part that a send in flight keeps alive.
#[derive(Debug)]
pub(crate) struct TxShared {
    state: RefCell<State>,
    /// Read by the kernel while a send is in flight, written only while none is.
    args: UnsafeCell<SendArgs>,
}

pub(crate) struct SendArgs {
    pub(crate) iovecs: [libc::iovec; SEND_IOVECS],
    pub(crate) message: libc::msghdr,
}

impl std::fmt::Debug for SendArgs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SendArgs")
    }
}

#[derive(Debug)]
struct State {
    pool: Pool,
    /// Once a send covers so many bytes it covers no further range.
    send_max: usize,
    /// Chunk for headers, with a reference of the queue's own, and how much of it is taken.
    arena: Option<(u32, usize)>,
    /// The same for what [`Tx::packed`] has moved.
    packing: Option<(u32, usize)>,
    /// Each with a reference to its chunk, unless it is of the page of zeroes.
    segs: VecDeque<Seg>,
    queued: usize,
    /// A send of the front of the queue is in flight. What it covers is written down in its iovecs, so the last
    /// segment may still grow.
    outstanding: bool,
}

impl Tx {
    /// Longest header with its padding that [`Tx::push_header`] takes.
    pub const HEADER_MAX: usize = 4096;

    /// An empty queue.
    pub fn new(pool: &Pool) -> Self {
        Self::in_parts(pool, usize::MAX)
    }

    /// An empty queue whose sends end after some `send_max` bytes, a chunk more at most: so often its owner sees that a slow
    /// peer takes something.
    pub fn in_parts(pool: &Pool, send_max: usize) -> Self {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: msghdr is a plain C structure of integers and pointers, for which all-zero is a valid value.
        let message = unsafe { std::mem::zeroed() };
        Self(Rc::new(TxShared {
            state: RefCell::new(State {
                pool: pool.clone(),
                send_max,
                arena: None,
                packing: None,
                segs: VecDeque::with_capacity(QUEUE),
                queued: 0,
                outstanding: false,
            }),
            args: UnsafeCell::new(SendArgs { iovecs: [nothing; SEND_IOVECS], message }),
        }))
    }

    /// Queues a copy of `bytes`.
    ///
    /// # Panics
    /// For more than [`Tx::HEADER_MAX`] bytes; and when headers that nobody takes fill the whole reserve of the pool
    /// (32 MiB), which a caller that bounds its requests in flight cannot reach.
    pub fn push_header(&mut self, bytes: &[u8]) {
        let mut state = self.0.state.borrow_mut();
        let at = state.arena_space(bytes.len());
        // SAFETY: `arena_space` gave these bytes of the queue's own chunk to nobody before; no payload names them,
        // the kernel reads only what is queued, and `bytes` cannot overlap them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), state.pool.ptr(at), bytes.len()) };
        state.push_arena(at, bytes.len());
    }

    /// Queues `n` zero bytes.
    pub fn push_padding(&mut self, n: usize) {
        let mut state = self.0.state.borrow_mut();
        if n <= 512 {
            let at = state.arena_space(n);
            // SAFETY: as in `push_header`.
            unsafe { std::ptr::write_bytes(state.pool.ptr(at), 0, n) };
            state.push_arena(at, n);
            return;
        }
        let mut left = n;
        while left > 0 {
            let part = left.min(ZEROES.len());
            state.push(Seg { at: ZERO, len: Seg::new(0, part).len });
            left -= part;
        }
    }

    /// Queues a payload without copying it. A clone, where the caller keeps it.
    ///
    /// # Panics
    /// If it is from another pool.
    pub fn push_payload(&mut self, payload: Payload) {
        let mut state = self.0.state.borrow_mut();
        if let Some(pool) = payload.pool() {
            assert!(state.pool.is(pool), "a payload of another pool");
        }
        let (segs, count) = payload.into_segs();
        segs[..count].iter().for_each(|seg| state.push(*seg));
    }

    /// An answer's bytes, before they are queued for a peer that may take none for long. A few bytes that lie where they came keep a
    /// whole chunk from being used again, and with many such answers one peer would have all of the pool. So what has to wait behind
    /// a send in flight is moved together, once memory is worth the copy.
    #[must_use]
    pub fn packed(&self, answer: Payload) -> Payload {
        let mut state = self.0.state.borrow_mut();
        if !state.outstanding || !state.pool.is_worth_packing() || !answer.is_loose() {
            return answer;
        }
        state.pack(&answer).unwrap_or(answer)
    }

    /// Bytes queued and not known to be sent.
    pub fn queued_bytes(&self) -> usize {
        self.0.state.borrow().queued
    }

    /// True if nothing is queued or in flight.
    pub fn is_empty(&self) -> bool {
        self.queued_bytes() == 0
    }

    /// True while a send is in flight.
    pub fn is_outstanding(&self) -> bool {
        self.0.state.borrow().outstanding
    }

    /// Takes everything out of the queue as bytes, as if it had been sent: for tests without a socket.
    ///
    /// # Panics
    /// While a send is in flight.
    pub fn drain(&mut self) -> Vec<u8> {
        let mut state = self.0.state.borrow_mut();
        assert!(!state.outstanding, "a send is in flight");
        let mut bytes = Vec::with_capacity(state.queued);
        for seg in &state.segs {
            // SAFETY: queued bytes are in chunks that the queue has references to, and nobody writes them.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts(state.address(*seg), seg.len as usize)
            });
        }
        let all = state.queued;
        state.sent(all);
        bytes
    }
}

impl TxShared {
    /// Covers the front of the queue with a send: its arguments, and how many iovecs; `None` if nothing is queued or
    /// a send is in flight.
    pub(crate) fn start(&self) -> Option<(*mut SendArgs, usize)> {
        let mut state = self.state.borrow_mut();
        if state.outstanding || state.segs.is_empty() {
            return None;
        }
        let args = self.args.get();
        let (mut count, mut bytes) = (0, 0);
        for (i, seg) in state.segs.iter().take(SEND_IOVECS).enumerate() {
            if bytes >= state.send_max {
                break;
            }
            (count, bytes) = (i + 1, bytes + seg.len as usize);
            let iovec =
                libc::iovec { iov_base: state.address(*seg).cast_mut().cast(), iov_len: seg.len as usize };
            // SAFETY: `args` points into this structure, no send is in flight (checked above), so the kernel does not
            // read it, and no reference into it exists: everybody goes through this pointer.
            unsafe { (*args).iovecs[i] = iovec };
        }
        state.outstanding = true;
        Some((args, count))
    }

    /// The send has ended with `n` bytes.
    pub(crate) fn complete(&self, n: usize) {
        let mut state = self.state.borrow_mut();
        state.outstanding = false;
        state.sent(n);
    }
}

impl State {
    fn address(&self, seg: Seg) -> *const u8 {
        if seg.at == ZERO { ZEROES.as_ptr() } else { self.pool.ptr(seg.at as usize).cast_const() }
    }

    /// Offset of `len` free bytes in the arena.
    fn arena_space(&mut self, len: usize) -> usize {
        assert!(len <= Tx::HEADER_MAX, "header of {len} bytes");
        if let Some((chunk, used)) = self.arena {
            if self.pool.refs(chunk) == 1 {
                // Everything in it has been sent.
                self.arena = Some((chunk, 0));
            } else if CHUNK - used < len {
                self.arena = None;
                self.pool.release(chunk);
            }
        }
        let (chunk, used) = *self.arena.get_or_insert_with(|| {
            let chunk = self.pool.take_header_chunk();
            (chunk.expect("headers in flight are bounded by requests in flight"), 0)
        });
        chunk as usize * CHUNK + used
    }

    fn push_arena(&mut self, at: usize, len: usize) {
        let Some((chunk, used)) = &mut self.arena else { return };
        *used += len;
        let chunk = *chunk;
        match self.segs.back_mut() {
            // The same chunk: a payload may end where this one begins.
            Some(last) if last.at != ZERO && last.chunk() == chunk && last.end() == at => {
                last.len += Seg::new(0, len).len;
                self.queued += len;
            }
            _ if len > 0 => {
                self.pool.retain(chunk);
                self.push(Seg::new(at, len));
            }
            _ => {}
        }
    }

    /// A copy in the queue's own chunks, one after the other; `None` if there is no memory for it.
    fn pack(&mut self, answer: &Payload) -> Option<Payload> {
        let rest = self.packing.map_or(0, |(_, used)| CHUNK - used);
        if answer.len().saturating_sub(rest).div_ceil(CHUNK) > self.pool.free_chunks() {
            return None;
        }
        let mut segs = [Seg::default(); SEGMENTS];
        let (mut count, mut left) = (0, answer.len());
        while left > 0 {
            let (chunk, used) = match self.packing.filter(|(_, used)| *used < CHUNK) {
                Some(place) => place,
                None => {
                    let fresh = self.pool.take_chunk();
                    let full = std::mem::replace(&mut self.packing, fresh.map(|chunk| (chunk, 0)));
                    full.into_iter().for_each(|(chunk, _)| self.pool.release(chunk));
                    (fresh.expect("as many are free as were counted"), 0)
                }
            };
            let part = left.min(CHUNK - used);
            self.pool.retain(chunk);
            segs[count] = Seg::new(chunk as usize * CHUNK + used, part);
            self.packing = Some((chunk, used + part));
            (count, left) = (count + 1, left - part);
        }
        let mut packed = Payload::of_segments(&self.pool, &segs[..count]);
        packed.write_payload(0, answer);
        Some(packed)
    }

    /// Queues a segment with the reference it brings.
    fn push(&mut self, seg: Seg) {
        self.queued += seg.len as usize;
        self.segs.push_back(seg);
    }

    /// Lets go of the first `n` bytes.
    fn sent(&mut self, n: usize) {
        debug_assert!(n <= self.queued);
        let mut left = n;
        while left > 0 {
            let Some(front) = self.segs.front_mut() else { break };
            let len = front.len as usize;
            if left < len {
                let at = if front.at == ZERO { ZERO } else { Seg::new(front.at as usize + left, 0).at };
                *front = Seg { at, len: Seg::new(0, len - left).len };
                self.queued -= left;
                return;
            }
            left -= len;
            self.queued -= len;
            if front.at != ZERO {
                let chunk = front.chunk();
                self.pool.release(chunk);
            }
            self.segs.pop_front();
        }
        // An idle queue holds no memory; the pool hands the same chunk out again.
        if self.segs.is_empty() {
            let idle = self.arena.take().into_iter().chain(self.packing.take());
            idle.for_each(|(chunk, _)| self.pool.release(chunk));
        }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let all = self.queued;
        self.sent(all);
    }
}

#[cfg(test)]
mod tests {
    use crate::Rx;

    use super::*;

    /// Each lies in a chunk of its own: between two of them others have been answered.
    #[test]
    fn small_answers_behind_a_send_do_not_keep_the_memory_between_them() {
        const ANSWER: usize = 512;
        for (waits, fills) in [(false, true), (true, false)] {
            let pool = Pool::new(1 << 20, 64 << 20).unwrap();
            let (mut stream, mut tx) = (Rx::new(&pool, 1), Tx::new(&pool));
            tx.push_header(&[1; 64]);
            if waits {
                tx.0.start().unwrap();
            }
            let mut sent = 0_usize;
            for i in 0..1000_usize {
                if !stream.feed(&[i.to_le_bytes()[0]; ANSWER]) {
                    break;
                }
                let answer = tx.packed(stream.take(ANSWER));
                tx.push_payload(answer);
                sent = i + 1;
                if !stream.feed(&[0; CHUNK]) {
                    break;
                }
                stream.skip(CHUNK);
                let _others = pool.alloc(200_000, 1);
            }
            assert_eq!(pool.free_chunks() < 8, fills, "{} chunks are free", pool.free_chunks());
            assert_eq!(sent < 1000, fills);
            if waits {
                tx.0.complete(0);
            }
            let bytes = tx.drain();
            assert_eq!(bytes.len(), 64 + sent * ANSWER);
            let of = |i: usize| bytes[64 + i * ANSWER..][..ANSWER].iter().all(|b| *b == i.to_le_bytes()[0]);
            assert!((0..sent).all(of));
        }
    }

    /// What fills its chunks is sent from where it lies, however long it waits.
    #[test]
    fn long_answers_are_not_moved() {
        let pool = Pool::new(1 << 20, 8 << 20).unwrap();
        let mut tx = Tx::new(&pool);
        tx.push_header(&[1; 64]);
        tx.0.start().unwrap();
        let _taken: Vec<_> = (0..3).map(|_| pool.alloc(1 << 20, 4096).unwrap()).collect();
        let answer = pool.alloc(1 << 20, 4096).unwrap();
        let before: Vec<_> = answer.pieces().collect();
        assert!(tx.packed(answer).pieces().eq(before));
        tx.0.complete(0);
    }
}
