//! The device trait: all that a frontend sees of a volume.
//!
//! A `Device` is one queue of a volume, used by one thread. A frontend hands it requests and later collects what
//! became of them; it never learns whether an engine, a memory disk or a test stands behind it. The data type `B`
//! is the caller's: `lh_ring::Payload` in the processes, plain vectors in tests and simulations.

use crate::{Extent, IoError};

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Returns the bytes of the range.
    Read,
    /// Stores the bytes that come with the request.
    Write {
        /// The answer waits until the data is on stable storage on every member (FUA).
        fua: bool,
    },
    /// The range reads back as zero, also over snapshots.
    WriteZeroes {
        /// As for `Write`.
        fua: bool,
        /// Space may be given back. Without it the client asks for allocated zeroes; this system keeps no such
        /// promise on thin volumes and treats both alike.
        may_unmap: bool,
        /// Fail with [`IoError::NotSupported`] rather than be slow.
        fast: bool,
    },
    /// The range reads back as zero and its space is given back. Parts of blocks at either end are zeroed too.
    Unmap,
    /// Everything whose answer left before this request came is on stable storage before this one's answer.
    Flush,
    /// Returns which blocks hold data, from the range's begin on, as [`runs`](crate::runs) reads it: no more than is told for
    /// [`ALLOCATION_MAX`](crate::ALLOCATION_MAX) bytes in [`RUNS_MAX`](crate::RUNS_MAX) runs. Ordered among others as a read is: what is not called
    /// data would have been read as zeroes. Without bytes in the answer nothing is known, and all of it is to be taken for data.
    Allocation,
}

impl Op {
    /// True for what changes data.
    pub const fn is_write(self) -> bool {
        matches!(self, Self::Write { .. } | Self::WriteZeroes { .. } | Self::Unmap)
    }
}

/// One request of a frontend.
#[derive(Debug)]
pub struct Request<B> {
    /// The frontend's own mark, given back with the answer. Unique among the requests in flight of one queue.
    pub tag: u64,
    /// What to do.
    pub op: Op,
    /// Where. Empty for a flush.
    pub range: Extent,
    /// The bytes of a write, exactly `range.len` of them; `None` for everything else.
    pub data: Option<B>,
}

/// What became of a request.
#[derive(Debug)]
pub struct Done<B> {
    /// The request's tag.
    pub tag: u64,
    /// Whether it was done.
    pub result: Result<(), IoError>,
    /// The bytes of a successful read, exactly as many as asked for; or the runs of an [`Op::Allocation`], if they are known.
    pub data: Option<B>,
}

/// Sizes that a frontend tells its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the volume in bytes, a multiple of the block.
    pub size: u64,
    /// Logical block in bytes: 512 or 4096. Every range is a multiple of it.
    pub logical_block: u32,
    /// Physical block in bytes: 4096.
    pub physical_block: u32,
    /// Largest read or write in bytes; longer ones are refused with [`IoError::Invalid`]. All else: no limit.
    pub max_transfer: u32,
    /// How many requests the queue accepts before the first must be answered.
    pub depth: u32,
}

/// One queue of a volume.
///
/// # Ordering
/// Requests may be answered in any order. Two that overlap and of which one writes take effect one after the other.
///
/// # Cancellation
/// A request cannot be taken back. A frontend whose client is gone says so ([`Device::abandon`]), and drops the answers when they
/// come.
pub trait Device<B> {
    /// The sizes as they are now; may grow between two calls.
    fn geometry(&self) -> Geometry;

    /// Free places in the queue. A frontend reads no further request from its clients while this is 0.
    fn room(&self) -> u32;

    /// Takes a request. Every accepted request is answered exactly once through [`Device::poll_done`].
    ///
    /// Invalid ranges are answered, too, with the matching error.
    ///
    /// # Panics
    /// If `room()` is 0.
    fn submit(&mut self, request: Request<B>);

    /// The client of a request is gone, and may send the same again elsewhere: what has not been begun of it is not done any more.
    /// It is answered all the same. An unknown tag, of a request that has been answered, changes nothing.
    ///
    /// A device that begins every request when it takes it, in the order in which it takes them, has nothing to do here.
    fn abandon(&mut self, tag: u64) {
        let _ = tag;
    }

    /// The next finished request, if there is one.
    fn poll_done(&mut self) -> Option<Done<B>>;
}
