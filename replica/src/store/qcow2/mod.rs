//! qcow2 backing files (qemu docs/interop/qcow2.rst), read only.
//!
//! What is read: versions 2 and 3, standard, zero and compressed (zlib) clusters, internal snapshots passed over. What is
//! refused, each with its own words: encryption, a backing file of its own, an external data file, extended L2 entries,
//! zstd, features that this program does not know. Reference counts are never looked at.
//!
//! A file may come from anywhere: every number in it is checked before it is used, all memory is bounded by the size of
//! the file and of the volume, and all tables are walked once when the file is opened, so that a file that is cut off or
//! points nowhere is refused before anything is served from it.

mod format;
mod image;
#[cfg(test)]
mod tests;

pub use format::Qcow2Fault;
pub(super) use image::{Image, ImageError, Place};
