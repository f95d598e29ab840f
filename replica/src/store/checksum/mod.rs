//! Checksums of snapshots: Longhorn's, one crc64 of a whole file, and ours, a crc32c of each block.
//!
//! Both hold only as long as the file's ctime is the one that they name: whoever changes a layer's file on purpose
//! changes its ctime, and rot does not.

mod attached;
mod crc64;
mod longhorn;
mod sums;

pub use attached::{BlockSum, FoldedChecksums, LayerChecksums, Verdict};
pub(super) use crc64::Crc64;
pub(super) use longhorn::{Recorded, file_name};
pub(super) use sums::{NEW_CHECKSUM, Sums, SumsWriter, Version, page_end, sweep};
