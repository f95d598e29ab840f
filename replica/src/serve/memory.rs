//! Memory for buffers: how much of it there is, and what may still begin when how much is in use.

/// Memory that is resident from the start, and kept: all that is used while the machine is short of memory.
pub(super) const POOL_SOFT: usize = 4 << 20;

/// Memory for buffers at most. Reads stop at [`READS_MAX`], receiving at [`RECEIVED_MAX`]: what is left above both
/// lets every received request end, and 64 connections finish receiving one message of the largest size (77 MiB).
pub(super) const POOL_HARD: usize = 256 << 20;

/// Memory in use above which no read begins.
pub(super) const READS_MAX: usize = 48 << 20;

/// Memory in use above which no layer image is compared with what is there. Images hold memory themselves: the limit
/// lies above [`RECEIVED_MAX`], so that they always end.
pub(super) const IMAGES_MAX: usize = 200 << 20;

/// Memory in use above which nothing is received: above reads and half-received messages together.
pub(super) const RECEIVED_MAX: usize = 160 << 20;

/// While the machine is short of memory nothing begins above this, so that what is resident from the start suffices with
/// one more message of the largest size: what waits stays with the engine, whose memory is resident.
pub(super) const SHORT_MAX: usize = POOL_SOFT - (1 << 20);

/// Alignment of memory that is read into: a page, which suits every disk.
pub(super) const PAGE: u32 = 4096;
