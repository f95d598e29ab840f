//! Bytes of a pool, shared without copying.
//!
//! A payload is a few ranges of chunks, each with a reference. What [`Pool::alloc`], a finished read or [`crate::Rx`]
//! hands out is *exclusive*: no other payload names these bytes, and they may be written. Cloning, slicing or
//! sending one makes both it and the result read-only, for ever: bytes that anybody else can see never change.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::{CHUNK, Pool};

/// Ranges in one payload: the largest one, unaligned at both ends, crosses nine ends of chunks.
pub(crate) const SEGMENTS: usize = 12;

/// Ranges of memory in one operation: a payload's, and a head before them; or those of a receive.
pub(crate) const IOVECS: usize = 16;

/// A range of bytes within one chunk of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seg {
    /// Offset in the pool.
    pub(crate) at: u32,
    pub(crate) len: u32,
}

impl Seg {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a pool is smaller than 4 GiB, checked where it is made"
    )]
    pub(crate) const fn new(at: usize, len: usize) -> Self {
        debug_assert!(at <= u32::MAX as usize && len <= u32::MAX as usize);
        Self { at: at as u32, len: len as u32 }
    }

    #[expect(clippy::cast_possible_truncation, reason = "chunks are fewer than bytes, which fit")]
    pub(crate) const fn chunk(self) -> u32 {
        (self.at as usize / CHUNK) as u32
    }

    pub(crate) const fn end(self) -> usize {
        self.at as usize + self.len as usize
    }
}

/// Up to 1 MiB + 64 KiB of a pool's memory.
#[derive(Debug, Default)]
pub struct Payload {
    /// `None` only in the empty default.
    pool: Option<Pool>,
    segs: [Seg; SEGMENTS],
    count: u8,
    /// Nobody else names these bytes.
    exclusive: Cell<bool>,
    len: u32,
}

const _: () = assert!(size_of::<Payload>() <= 128);

impl Payload {
    /// Most bytes in one payload: what the wire protocol's largest message carries.
    pub const MAX: usize = (1 << 20) + (64 << 10);

    /// Most pieces that the bytes of one lie in.
    pub const PIECES_MAX: usize = SEGMENTS;

    pub(crate) fn empty_of(pool: &Pool) -> Self {
        Self::of_segments(pool, &[])
    }

    /// Takes over one reference for each segment. The caller knows that no other payload names these bytes.
    pub(crate) fn of_segments(pool: &Pool, segs: &[Seg]) -> Self {
        let mut own = [Seg::default(); SEGMENTS];
        own[..segs.len()].copy_from_slice(segs);
        let len = segs.iter().map(|s| s.len).sum();
        #[expect(clippy::cast_possible_truncation, reason = "at most SEGMENTS, by the copy above")]
        let count = segs.len() as u8;
        Self { pool: Some(pool.clone()), segs: own, count, exclusive: Cell::new(true), len }
    }

    pub(crate) fn segs(&self) -> &[Seg] {
        &self.segs[..self.count as usize]
    }

    pub(crate) fn pool(&self) -> Option<&Pool> {
        self.pool.as_ref()
    }

    /// The segments with their references, which the caller takes over.
    pub(crate) fn into_segs(mut self) -> ([Seg; SEGMENTS], usize) {
        let count = usize::from(std::mem::take(&mut self.count));
        (self.segs, count)
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if the bytes may be written: nobody else names them.
    pub fn is_exclusive(&self) -> bool {
        self.exclusive.get()
    }

    /// Makes it read-only for ever.
    pub(crate) fn share(&self) {
        self.exclusive.set(false);
    }

    /// True if the bytes lie in this pool's memory.
    pub fn is_of(&self, pool: &Pool) -> bool {
        self.pool.as_ref().is_some_and(|own| own.is(pool))
    }

    /// Where the bytes lie in the pool's memory, in order: offset and length of each piece, at most
    /// [`Payload::PIECES_MAX`].
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = (u32, u32)> + '_ {
        self.segs().iter().map(|seg| (seg.at, seg.len))
    }

    /// The bytes, in order, in as many pieces as they lie in.
    pub fn segments(&self) -> impl Iterator<Item = &[u8]> {
        self.segs().iter().map(|seg| self.bytes(*seg))
    }

    fn bytes(&self, seg: Seg) -> &[u8] {
        let Some(pool) = &self.pool else { return &[] };
        // SAFETY: the segment is inside the pool's mapping, which `self.pool` keeps alive, and the reference that this
        // payload holds keeps the chunk from being handed out again. Nobody writes these bytes while the result
        // lives: writing needs `&mut` of an exclusive payload, which is this one, and the kernel writes only into
        // exclusive payloads that have been moved into an operation, and into what an Rx has not yet handed out.
        // Of memory that is lent the same is the lender's promise, who has proved that it may be believed; the memory
        // itself is there whatever it does (`Lent::open`).
        unsafe { std::slice::from_raw_parts(pool.ptr(seg.at as usize), seg.len as usize) }
    }

    fn bytes_mut(&mut self, seg: Seg) -> &mut [u8] {
        assert!(self.exclusive.get(), "these bytes are shared");
        let Some(pool) = &self.pool else { return &mut [] };
        // SAFETY: as in `bytes`; and this payload is the only one that names the bytes (`exclusive`, cleared by every
        // clone and slice), so that `&mut self` is the only access to them.
        unsafe { std::slice::from_raw_parts_mut(pool.ptr(seg.at as usize), seg.len as usize) }
    }

    /// The parts of the segments that make up `range` of the payload.
    fn cut(&self, range: Range<usize>) -> impl Iterator<Item = Seg> + use<> {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {} bytes", self.len());
        let (segs, count, mut before) = (self.segs, usize::from(self.count), 0);
        segs.into_iter().take(count).filter_map(move |seg| {
            let (from, to) = (before, before + seg.len as usize);
            before = to;
            let (start, end) = (range.start.max(from), range.end.min(to));
            (start < end).then(|| Seg::new(seg.at as usize + start - from, end - start))
        })
    }

    /// `len` bytes from `from` on, sharing the memory. This payload is read-only afterwards, as is the result.
    ///
    /// # Panics
    /// If the range is not inside the payload.
    pub fn slice(&self, from: usize, len: usize) -> Self {
        let mut segs = [Seg::default(); SEGMENTS];
        let mut count = 0;
        for seg in self.cut(from..from + len) {
            segs[count] = seg;
            count += 1;
        }
        let Some(pool) = &self.pool else { return Self::default() };
        segs[..count].iter().for_each(|seg| pool.retain(seg.chunk()));
        self.exclusive.set(false);
        let slice = Self::of_segments(pool, &segs[..count]);
        slice.exclusive.set(false);
        slice
    }

    /// Keeps the first `len` bytes. Unlike [`Payload::slice`] it leaves an exclusive payload exclusive.
    ///
    /// # Panics
    /// If `len` is larger than the payload.
    pub fn truncate(&mut self, len: usize) {
        assert!(len <= self.len(), "{len} of {} bytes", self.len());
        let Some(pool) = &self.pool else { return };
        let mut left = len;
        let mut kept = 0;
        for i in 0..usize::from(self.count) {
            if left == 0 {
                pool.release(self.segs[i].chunk());
                continue;
            }
            let part = left.min(self.segs[i].len as usize);
            self.segs[i] = Seg::new(self.segs[i].at as usize, part);
            left -= part;
            kept += 1;
        }
        self.count = kept;
        #[expect(clippy::cast_possible_truncation, reason = "not above the length before, which fits")]
        let len = len as u32;
        self.len = len;
    }

    /// Cuts the payload in two: keeps the bytes before `at` and returns the others. Both are exclusive if it was, so
    /// that parts of one buffer can be read from different places.
    ///
    /// # Panics
    /// If `at` is behind the end.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Self {
        let exclusive = self.exclusive.get();
        let tail = self.slice(at, self.len() - at);
        self.truncate(at);
        self.exclusive.set(exclusive);
        tail.exclusive.set(exclusive);
        tail
    }

    /// True if it keeps more than a quarter more than its own bytes from being used again.
    pub(crate) fn is_loose(&self) -> bool {
        let (mut chunks, mut last) = (0, None);
        for chunk in self.segs().iter().map(|seg| seg.chunk()) {
            chunks += usize::from(last.replace(chunk) != Some(chunk));
        }
        4 * chunks * CHUNK > 5 * self.len()
    }

    /// Appends the bytes of another payload without copying them: what [`Payload::split_off`] cut, or answers that
    /// came in parts. The result is exclusive if both are.
    ///
    /// # Errors
    /// The other payload, when it is of another pool or both together are in too many pieces or too long; nothing has
    /// changed then.
    pub fn append(&mut self, other: Self) -> Result<(), Self> {
        let (Some(pool), Some(others)) = (&self.pool, &other.pool) else {
            if self.is_empty() {
                *self = other;
            }
            return Ok(());
        };
        let mut segs = [Seg::default(); 2 * SEGMENTS];
        let mut count = 0;
        for seg in self.segs().iter().chain(other.segs()) {
            match segs[..count].last_mut() {
                Some(last) if last.end() == seg.at as usize && last.chunk() == seg.chunk() => {
                    *last = Seg::new(last.at as usize, last.len as usize + seg.len as usize);
                }
                _ => {
                    segs[count] = *seg;
                    count += 1;
                }
            }
        }
        if !pool.is(others) || count > SEGMENTS || self.len() + other.len() > Self::MAX {
            return Err(other);
        }
        // One reference for each segment, so merged neighbours give one back.
        let pool = pool.clone();
        let before = self.segs().iter().chain(other.segs()).map(|seg| seg.chunk());
        let exclusive = self.exclusive.get() && other.exclusive.get();
        segs[..count].iter().for_each(|seg| pool.retain(seg.chunk()));
        before.for_each(|chunk| pool.release(chunk));
        let mut joined = Self::of_segments(&pool, &segs[..count]);
        joined.exclusive.set(exclusive);
        // Their references went over above.
        other.into_segs();
        std::mem::swap(self, &mut joined);
        joined.into_segs();
        Ok(())
    }

    /// Copies the bytes out.
    ///
    /// # Panics
    /// If `to` has another length.
    pub fn copy_to(&self, to: &mut [u8]) {
        assert_eq!(to.len(), self.len());
        self.read_at(0, to);
    }

    /// Copies bytes out, from `from` on.
    ///
    /// # Panics
    /// If the range is not inside the payload.
    pub fn read_at(&self, from: usize, to: &mut [u8]) {
        let mut done = 0;
        for seg in self.cut(from..from + to.len()) {
            let bytes = self.bytes(seg);
            to[done..done + bytes.len()].copy_from_slice(bytes);
            done += bytes.len();
        }
    }

    /// All bytes in a vector of their own: for small payloads and tests.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len());
        self.segments().for_each(|part| bytes.extend_from_slice(part));
        bytes
    }

    /// Writes bytes, from `at` on.
    ///
    /// # Panics
    /// If the payload is shared, or the range not inside it.
    pub fn write_at(&mut self, at: usize, from: &[u8]) {
        let mut done = 0;
        for seg in self.cut(at..at + from.len()) {
            let bytes = self.bytes_mut(seg);
            bytes.copy_from_slice(&from[done..done + bytes.len()]);
            done += bytes.len();
        }
    }

    /// Writes zeroes.
    ///
    /// # Panics
    /// If the payload is shared, or the range not inside it.
    pub fn fill_zero(&mut self, range: Range<usize>) {
        for seg in self.cut(range) {
            self.bytes_mut(seg).fill(0);
        }
    }

    /// Writes all bytes of another payload, from `at` on.
    ///
    /// # Panics
    /// If this payload is shared, or the range not inside it.
    pub fn write_payload(&mut self, at: usize, from: &Self) {
        let mut at = at;
        for bytes in from.segments() {
            self.write_at(at, bytes);
            at += bytes.len();
        }
    }

    /// Reads from a file without a ring, as many bytes as it has from `offset` on: for files that lie in memory, where a
    /// ring only adds a thread of the kernel's. Returns how many; fewer than there is room for only at the end of the
    /// file.
    ///
    /// # Errors
    /// The system's.
    ///
    /// # Panics
    /// If the payload is shared.
    pub fn read_from(&mut self, file: &File, offset: u64) -> io::Result<usize> {
        let mut done = 0;
        for seg in self.cut(0..self.len()) {
            let bytes = self.bytes_mut(seg);
            let mut part = 0;
            while part < bytes.len() {
                match file.read_at(&mut bytes[part..], offset + (done + part) as u64) {
                    Ok(0) => return Ok(done + part),
                    Ok(n) => part += n,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(e),
                }
            }
            done += part;
        }
        Ok(done)
    }

    /// Writes all bytes to a file without a ring, from `offset` on: for files that lie in memory.
    ///
    /// # Errors
    /// The system's; some of it may be written.
    pub fn write_to(&self, file: &File, offset: u64) -> io::Result<()> {
        let mut done = 0;
        for bytes in self.segments() {
            file.write_all_at(bytes, offset + done)?;
            done += bytes.len() as u64;
        }
        Ok(())
    }

    /// crc32c of all bytes.
    pub fn crc32c(&self) -> u32 {
        self.crc32c_append(0)
    }

    /// crc32c of what `before` is the checksum of, followed by these bytes.
    pub fn crc32c_append(&self, before: u32) -> u32 {
        self.segments().fold(before, crc32c::crc32c_append)
    }

    /// True if every byte is zero.
    pub fn is_zero(&self) -> bool {
        self.segments().all(|bytes| bytes.iter().all(|b| *b == 0))
    }

    /// True if every segment begins at a multiple of `mem` and has a multiple of `len` bytes: what O_DIRECT asks for.
    /// Both are powers of two, `mem` at most 4096.
    pub fn is_aligned(&self, mem: u32, len: u32) -> bool {
        // Chunks begin at multiples of the page, so offsets in the pool tell the same as addresses.
        self.segs().iter().all(|seg| seg.at & (mem - 1) == 0 && seg.len & (len - 1) == 0)
    }
}

impl Clone for Payload {
    /// Shares the bytes: no copy, no allocation. Both are read-only afterwards.
    fn clone(&self) -> Self {
        if let Some(pool) = &self.pool {
            self.segs().iter().for_each(|seg| pool.retain(seg.chunk()));
        }
        self.exclusive.set(false);
        Self {
            pool: self.pool.clone(),
            segs: self.segs,
            count: self.count,
            exclusive: Cell::new(false),
            len: self.len,
        }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            self.segs().iter().for_each(|seg| pool.release(seg.chunk()));
        }
    }
}
