//! Payloads that another process reads where they lie.
//!
//! - The lender's pool is over memory with a descriptor ([`Pool::lendable`]). It tells where a payload's bytes are
//!   ([`Payload::pieces`]) instead of sending them.
//! - The borrower maps the memory, and can only read it ([`Lent`]). What it makes of pieces is a [`Payload`] that is never
//!   exclusive; the mapping lives until the last of them is gone.
//! - Bytes that are lent do not change as long as the borrower may read them. That is the lender's to see to: it holds the
//!   payload until it has heard that the borrower is done, and longer if it never hears ([`Kept`]).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};

use crate::map::{LENT_SEALS, Map};
use crate::payload::{SEGMENTS, Seg};
use crate::sys::file_system;
use crate::{Payload, Pool};

/// Maps memory of another process, at most `max` bytes of it, which this one can only read.
///
/// # Errors
/// As [`Lent::open`].
pub(crate) fn lent_map(memory: OwnedFd, max: usize) -> io::Result<Map> {
    let seals = fcntl(&memory, FcntlArg::F_GET_SEALS).map_err(|_| io::ErrorKind::InvalidData)?;
    // Huge pages, which no tmpfs has, may be lacking at any access.
    if !SealFlag::from_bits_retain(seals).contains(LENT_SEALS) || !file_system(&memory)?.is_memory() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let len = usize::try_from(nix::sys::stat::fstat(&memory)?.st_size).unwrap_or(0);
    if len == 0 || len > max {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Map::lent(memory.as_fd(), len)
}

/// Memory of another process, which this one can only read.
#[derive(Clone, Debug)]
pub struct Lent(Pool);

impl Lent {
    /// Most bytes of memory that are mapped.
    pub const MAX: usize = 1 << 30;

    /// Maps what [`Pool::lend`] gave. The descriptor is closed.
    ///
    /// # Errors
    /// `InvalidData` for what is no such memory: it could become shorter, so that reading it would kill this process; or it
    /// is empty, or longer than [`Lent::MAX`]. The system's.
    pub fn open(memory: OwnedFd) -> io::Result<Self> {
        Ok(Self(Pool::view(lent_map(memory, Self::MAX)?)))
    }

    /// The bytes in these pieces, each an offset in the memory and a length, in order. `None` if there are more pieces than a
    /// payload has, or more bytes, or one is not wholly inside the memory.
    ///
    /// The bytes are what the lender has written, as long as it keeps them; a lender that does not, costs sense, not safety:
    /// nothing is decided by bytes that were read twice.
    pub fn payload(&self, pieces: impl IntoIterator<Item = (u32, u32)>) -> Option<Payload> {
        let mut segs = [Seg::default(); SEGMENTS];
        let (mut count, mut len) = (0, 0);
        for (at, piece) in pieces {
            let seg = Seg { at, len: piece };
            if seg.end() > self.0.mapped_bytes() {
                return None;
            }
            *segs.get_mut(count)? = seg;
            count += 1;
            len += piece as usize;
            if len > Payload::MAX {
                return None;
            }
        }
        let payload = Payload::of_segments(&self.0, &segs[..count]);
        payload.share();
        Some(payload)
    }
}

/// A payload that is not to change although no request needs it any more: another process may still read it. Its memory does
/// not count towards the pool's hard size, up to a bound (400 chunks: what one connection to a replica has in flight at most).
#[derive(Debug)]
pub struct Kept(Payload);

impl Kept {
    /// Keeps the payload.
    pub fn new(payload: Payload) -> Self {
        if let Some(pool) = payload.pool() {
            payload.segs().iter().for_each(|seg| pool.keep(seg.chunk()));
        }
        Self(payload)
    }

    /// Never lets go of it: for the end of whoever would hear that the other process is done.
    pub fn leak(self) {
        std::mem::forget(self);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(pool) = self.0.pool() {
            self.0.segs().iter().for_each(|seg| pool.keep_no_more(seg.chunk()));
        }
    }
}
