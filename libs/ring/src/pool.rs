//! The bounded memory of a thread's I/O: chunks of one mapping, counted by reference.
//!
//! - A chunk has a count of references in a table beside the memory; it is free when the count is 0.
//! - Free chunks that have been used are taken first (last in, first out): an idle process touches few pages.
//! - Used free chunks beyond the soft size go back to the system. So at most `soft` bytes stay resident idle, and a
//!   load that swings above it does not map and unmap at every request.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use crate::Payload;
use crate::map::Map;
use crate::payload::{SEGMENTS, Seg};

/// Bytes in a chunk.
pub const CHUNK: usize = 128 << 10;

/// Payloads up to this are one segment; larger ones may be split at the end of a chunk. It bounds the waste at the
/// end of a chunk to an eighth.
const CONTIGUOUS: usize = 16 << 10;

/// Chunks beyond the hard size that only the headers of send queues may take: an answer must get out, also when
/// requests have taken everything, or no memory would ever come back. 32 MiB of address space, untouched in use.
const RESERVE: u32 = 256;

/// No chunk.
const NONE: u32 = u32::MAX;

/// Buffers of one thread. Cheap to clone; the memory lives until the last payload is gone.
#[derive(Clone, Debug)]
pub struct Pool(Rc<Shared>);

#[derive(Debug)]
struct Shared {
    map: Map,
    /// References to each chunk.
    refs: Box<[Cell<u32>]>,
    /// Free chunks whose pages are resident.
    warm: RefCell<Vec<u32>>,
    /// Free chunks without pages.
    cold: RefCell<Vec<u32>>,
    soft: usize,
    hard: u32,
    /// Chunks outside both lists.
    used: Cell<u32>,
    /// The chunk that `alloc` cuts from, or [`NONE`]; it is outside the lists even while nobody refers to it.
    bump: Cell<u32>,
    /// Bytes of it that are taken.
    bump_used: Cell<usize>,
}

impl Pool {
    /// A pool that keeps at most `soft_bytes` resident when idle and never hands out more than `hard_bytes`.
    /// Both are rounded up to whole chunks.
    ///
    /// # Errors
    /// The system's, when the address space cannot be reserved; `InvalidInput` beyond 4 GiB.
    pub fn new(soft_bytes: usize, hard_bytes: usize) -> io::Result<Self> {
        let hard =
            u32::try_from(hard_bytes.div_ceil(CHUNK).max(1)).map_err(|_| io::ErrorKind::InvalidInput)?;
        let all = hard.saturating_add(RESERVE);
        let bytes = all as usize * CHUNK;
        // Segments carry 32-bit offsets, of which the last stands for the page of zeroes.
        if bytes > u32::MAX as usize {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut warm = Vec::new();
        warm.reserve_exact(all as usize);
        Ok(Self(Rc::new(Shared {
            map: Map::new(bytes)?,
            refs: (0..all).map(|_| Cell::new(0)).collect(),
            warm: RefCell::new(warm),
            cold: RefCell::new((0..all).rev().collect()),
            soft: soft_bytes.div_ceil(CHUNK),
            hard,
            used: Cell::new(0),
            bump: Cell::new(NONE),
            bump_used: Cell::new(0),
        })))
    }

    /// `len` bytes that begin at a multiple of `align` (a power of two, at most 4096), as do all segments; inner
    /// segment boundaries are ends of chunks. The bytes are whatever was there: the caller writes before it shows
    /// them to anyone. Up to 16 KiB come as one segment.
    ///
    /// `None` if the pool is exhausted now; memory comes back when payloads are dropped.
    ///
    /// # Panics
    /// If `len` is above 1 MiB + 64 KiB or `align` no power of two up to 4096.
    pub fn alloc(&self, len: u32, align: u32) -> Option<Payload> {
        assert!(align.is_power_of_two() && align <= 4096, "alignment {align}");
        let len = len as usize;
        assert!(len <= Payload::MAX, "payload of {len} bytes");
        if len == 0 {
            return Some(Payload::empty_of(self));
        }
        let start = self.0.bump_used.get().next_multiple_of(align as usize);
        let rest = if self.0.bump.get() == NONE { 0 } else { CHUNK.saturating_sub(start) };
        let rest = if rest < len && len <= CONTIGUOUS { 0 } else { rest };
        let fresh = len.saturating_sub(rest).div_ceil(CHUNK);
        // All or nothing. An idle bump chunk has all its bytes as rest, so it is not among the fresh ones.
        if fresh > self.0.hard.saturating_sub(self.0.used.get()) as usize {
            return None;
        }
        let mut segs = [Seg::default(); SEGMENTS];
        let (mut count, mut done) = (0, 0);
        if rest > 0 {
            let chunk = self.0.bump.get();
            self.retain(chunk);
            done = rest.min(len);
            segs[0] = Seg::new(chunk as usize * CHUNK + start, done);
            count = 1;
            self.0.bump_used.set(start + done);
        }
        while done < len {
            let part = CHUNK.min(len - done);
            let chunk = self.next_bump(part)?;
            segs[count] = Seg::new(chunk as usize * CHUNK, part);
            count += 1;
            done += part;
        }
        Some(Payload::of_segments(self, &segs[..count]))
    }

    /// Makes a fresh chunk the one to cut from, with `used` bytes and one reference taken.
    fn next_bump(&self, used: usize) -> Option<u32> {
        let old = self.0.bump.replace(NONE);
        if old != NONE && self.0.refs[old as usize].get() == 0 {
            self.put_back(old);
        }
        let chunk = self.take_chunk()?;
        self.0.bump.set(chunk);
        self.0.bump_used.set(used);
        Some(chunk)
    }

    /// Chunks that [`Pool::alloc`] and receive streams can still take.
    pub fn free_chunks(&self) -> usize {
        let idle = u32::from(self.bump_is_idle());
        (self.0.hard + idle).saturating_sub(self.0.used.get()) as usize
    }

    /// Bytes in chunks that somebody holds.
    pub fn used_bytes(&self) -> usize {
        (self.0.used.get() - u32::from(self.bump_is_idle())) as usize * CHUNK
    }

    /// The hard size in bytes.
    pub fn hard_bytes(&self) -> usize {
        self.0.hard as usize * CHUNK
    }

    /// Locks the memory: a page once touched stays resident. Processes that serve a block device call it before the
    /// first request.
    ///
    /// # Errors
    /// The system's, for want of CAP_IPC_LOCK or RLIMIT_MEMLOCK; the pool works all the same.
    pub fn lock(&self) -> io::Result<()> {
        self.0.map.lock()
    }

    /// Makes the soft size resident now, so that no request waits for memory. To be called before the first use.
    ///
    /// # Errors
    /// The system's (Linux before 5.14: `EINVAL`); the pool works all the same.
    pub fn populate(&self) -> io::Result<()> {
        let mut cold = self.0.cold.borrow_mut();
        let mut warm = self.0.warm.borrow_mut();
        while warm.len() < self.0.soft {
            let Some(&chunk) = cold.last() else { break };
            self.0.map.populate(chunk as usize * CHUNK, CHUNK)?;
            cold.pop();
            warm.push(chunk);
        }
        Ok(())
    }

    fn bump_is_idle(&self) -> bool {
        let bump = self.0.bump.get();
        bump != NONE && self.0.refs[bump as usize].get() == 0
    }

    /// A free chunk with one reference, unless the hard size is reached.
    pub(crate) fn take_chunk(&self) -> Option<u32> {
        if self.0.used.get() >= self.0.hard {
            if !self.bump_is_idle() {
                return None;
            }
            let chunk = self.0.bump.replace(NONE);
            self.put_back(chunk);
        }
        self.take_any()
    }

    /// A free chunk for headers, beyond the hard size if need be.
    pub(crate) fn take_header_chunk(&self) -> Option<u32> {
        self.take_any()
    }

    fn take_any(&self) -> Option<u32> {
        let warm = self.0.warm.borrow_mut().pop();
        let chunk = warm.or_else(|| self.0.cold.borrow_mut().pop())?;
        self.0.used.set(self.0.used.get() + 1);
        self.0.refs[chunk as usize].set(1);
        Some(chunk)
    }

    /// One more reference to a chunk that has some.
    pub(crate) fn retain(&self, chunk: u32) {
        let refs = &self.0.refs[chunk as usize];
        refs.set(refs.get() + 1);
    }

    /// One reference less; the last one frees the chunk.
    pub(crate) fn release(&self, chunk: u32) {
        let refs = &self.0.refs[chunk as usize];
        let left = refs.get() - 1;
        refs.set(left);
        if left > 0 {
            return;
        }
        if chunk == self.0.bump.get() {
            self.0.bump_used.set(0);
        } else {
            self.put_back(chunk);
        }
    }

    fn put_back(&self, chunk: u32) {
        self.0.used.set(self.0.used.get() - 1);
        let mut warm = self.0.warm.borrow_mut();
        if warm.len() >= self.0.soft && self.0.map.discard(chunk as usize * CHUNK, CHUNK) {
            self.0.cold.borrow_mut().push(chunk);
        } else {
            warm.push(chunk);
        }
    }

    /// References to a chunk.
    pub(crate) fn refs(&self, chunk: u32) -> u32 {
        self.0.refs[chunk as usize].get()
    }

    /// Address of a byte of the pool.
    pub(crate) fn ptr(&self, at: usize) -> *mut u8 {
        self.0.map.ptr(at)
    }

    /// True if both are the same pool.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}
