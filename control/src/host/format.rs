//! The version of a record's file, which all of them say: what a newer program has written is nobody's to take for damaged, or to
//! replace.

use serde::Deserialize;

/// What files of all versions have.
#[derive(Deserialize)]
struct Format {
    format: u32,
}

/// The version of the file if it is above the one that this program writes; `None` also for what is no record at all.
pub(crate) fn newer_than(own: u32, bytes: &[u8]) -> Option<u32> {
    let found: Format = serde_json::from_slice(bytes).ok()?;
    (found.format > own).then_some(found.format)
}
