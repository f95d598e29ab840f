//! The bounded memory of a thread's I/O: chunks of one mapping, counted by reference.
//!
//! - A chunk has a count of references in a table beside the memory; it is free when the count is 0.
//! - Free chunks that have been used are taken first (last in, first out): an idle process touches few pages.
//! - Used free chunks beyond the soft size go back to the system. So at most `soft` bytes stay resident idle, and a
//!   load that swings above it does not map and unmap at every request.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use crate::map::Map;
use crate::payload::{SEGMENTS, Seg};
use crate::{Lent, Payload};

/// Bytes in a chunk.
pub const CHUNK: usize = 128 << 10;

/// Payloads up to this are one segment; larger ones may be split at the end of a chunk. It bounds the waste at the
/// end of a chunk to an eighth.
const CONTIGUOUS: usize = 16 << 10;

/// Chunks beyond the hard size that only the headers of send queues may take: an answer must get out, also when
/// requests have taken everything, or no memory would ever come back. 32 MiB of address space, untouched in use.
const RESERVE: u32 = 256;

/// Chunks beyond the hard size for what nobody may change although no request needs it any more ([`crate::Kept`]): as many as
/// what one connection to a replica has in flight at most is spread over. Those are 256 writes, or 16 MiB and the one that
/// crosses this line, in pieces that may each lie in a chunk of its own (`docs/invariants.md`, 4). 50 MiB of address space,
/// untouched in use.
const KEPT: u32 = 400;

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
    /// How often each chunk is kept; empty in a pool that lends nothing.
    kept: Box<[Cell<u32>]>,
    /// Chunks that are.
    kept_chunks: Cell<u32>,
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
        let (hard, all) = Self::chunks(hard_bytes, 0)?;
        Ok(Self::over(Map::new(all as usize * CHUNK)?, soft_bytes, hard, all, 0))
    }

    /// The same over memory that other processes may read where it lies ([`Pool::lend`]). Where the system has no such
    /// memory, or it would be more than [`Lent::MAX`], it is a pool as [`Pool::new`] makes it, and lends nothing.
    ///
    /// # Errors
    /// As for `new`.
    pub fn lendable(soft_bytes: usize, hard_bytes: usize) -> io::Result<Self> {
        let (hard, all) = Self::chunks(hard_bytes, KEPT)?;
        let bytes = all as usize * CHUNK;
        if bytes > Lent::MAX {
            return Self::new(soft_bytes, hard_bytes);
        }
        match Map::lendable(bytes) {
            Ok(map) => Ok(Self::over(map, soft_bytes, hard, all, all)),
            Err(_) => Self::new(soft_bytes, hard_bytes),
        }
    }

    /// Chunks of the hard size, and all chunks together with so many more.
    fn chunks(hard_bytes: usize, more: u32) -> io::Result<(u32, u32)> {
        let hard =
            u32::try_from(hard_bytes.div_ceil(CHUNK).max(1)).map_err(|_| io::ErrorKind::InvalidInput)?;
        let all = hard.saturating_add(RESERVE).saturating_add(more);
        // Segments carry 32-bit offsets, of which the last stands for the page of zeroes.
        if all as usize * CHUNK > u32::MAX as usize {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok((hard, all))
    }

    fn over(map: Map, soft_bytes: usize, hard: u32, all: u32, kept: u32) -> Self {
        let mut warm = Vec::new();
        warm.reserve_exact(all as usize);
        Self(Rc::new(Shared {
            map,
            refs: (0..all).map(|_| Cell::new(0)).collect(),
            warm: RefCell::new(warm),
            cold: RefCell::new((0..all).rev().collect()),
            soft: soft_bytes.div_ceil(CHUNK),
            hard,
            used: Cell::new(0),
            kept: (0..kept).map(|_| Cell::new(0)).collect(),
            kept_chunks: Cell::new(0),
            bump: Cell::new(NONE),
            bump_used: Cell::new(0),
        }))
    }

    /// A view of another process's memory: its payloads can be read, and nothing is ever taken from it.
    pub(crate) fn view(map: Map) -> Self {
        Self::over(map, 0, 0, 0, 0)
    }

    /// A descriptor of the memory, for [`Lent::open`] of a process that is to read payloads where they lie: it can be read
    /// through it, not written. Pieces of payloads are told by [`Payload::pieces`]. `None`: the pool lends nothing.
    pub fn lend(&self) -> Option<OwnedFd> {
        self.0.map.lend().ok()
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
        if fresh > self.0.hard.saturating_sub(self.charged()) as usize {
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
        // The one before has a holder: an idle one would have been cut from.
        debug_assert!(!self.bump_is_idle());
        let chunk = self.take_chunk()?;
        self.0.bump.set(chunk);
        self.0.bump_used.set(used);
        Some(chunk)
    }

    /// Chunks that [`Pool::alloc`] and receive streams can still take.
    pub fn free_chunks(&self) -> usize {
        let idle = u32::from(self.bump_is_idle());
        (self.0.hard + idle).saturating_sub(self.charged()) as usize
    }

    /// True once a quarter of the hard size is in use: what is kept from being used again for nothing is worth a copy.
    pub(crate) fn is_worth_packing(&self) -> bool {
        self.free_chunks() < self.0.hard as usize * 3 / 4
    }

    /// Chunks in use that count towards the hard size.
    fn charged(&self) -> u32 {
        self.0.used.get() - self.0.kept_chunks.get().min(KEPT)
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
        if self.charged() >= self.0.hard {
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
        // A view has no table: its memory is another's to use again.
        if let Some(refs) = self.0.refs.get(chunk as usize) {
            refs.set(refs.get() + 1);
        }
    }

    /// One reference less; the last one frees the chunk.
    pub(crate) fn release(&self, chunk: u32) {
        let Some(refs) = self.0.refs.get(chunk as usize) else { return };
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

    /// A chunk's memory is kept once more.
    pub(crate) fn keep(&self, chunk: u32) {
        if let Some(kept) = self.0.kept.get(chunk as usize) {
            self.0.kept_chunks.set(self.0.kept_chunks.get() + u32::from(kept.get() == 0));
            kept.set(kept.get() + 1);
        }
    }

    /// The reverse of `keep`.
    pub(crate) fn keep_no_more(&self, chunk: u32) {
        if let Some(kept) = self.0.kept.get(chunk as usize) {
            kept.set(kept.get() - 1);
            self.0.kept_chunks.set(self.0.kept_chunks.get() - u32::from(kept.get() == 0));
        }
    }

    /// References to a chunk.
    pub(crate) fn refs(&self, chunk: u32) -> u32 {
        self.0.refs[chunk as usize].get()
    }

    /// Bytes of the whole mapping.
    pub(crate) fn mapped_bytes(&self) -> usize {
        self.0.map.len()
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
