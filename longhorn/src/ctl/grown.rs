//! A volume that has grown without its record.

use anyhow::Result;
use control::host::Root;
use control::proto::ptypes;

use super::{damaged, lock};

/// Notes the size of a volume that has grown without its record: Longhorn's clients ask its engine alone. The caller holds the
/// volume's lock.
pub(super) fn note_size(root: &Root, volume: &str, said: &ptypes::Volume) -> Result<()> {
    let found = lock::found(root, volume);
    // The engine of a volume whose record cannot be read is asked only so that it can be stopped.
    if damaged::is_damaged(&found) {
        return Ok(());
    }
    let Some(mut record) = found? else { return Ok(()) };
    let size = u64::try_from(said.size).unwrap_or_default();
    if size <= record.size {
        return Ok(());
    }
    record.size = size;
    Ok(record.store(root)?)
}
