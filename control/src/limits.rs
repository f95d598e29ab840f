//! Bounds as Longhorn's clients send them to an engine or to one of its replicas.

use tonic::Status;

use crate::host::SNAPSHOT_COUNT;

/// Most files that Longhorn's setting lets a rebuild copy at once.
pub(crate) const REBUILD_CONCURRENCY_MAX: u32 = 5;

/// A limit for the number of snapshots as Longhorn's clients send it: 2 to 250 there, where the head counts.
pub(crate) fn snapshot_count(count: i32) -> Result<u32, Status> {
    let fits = u32::try_from(count).ok().filter(|n| (1..=SNAPSHOT_COUNT).contains(n));
    let text = || format!("{count} cannot be the limit for snapshots: 1 to {SNAPSHOT_COUNT} can");
    fits.ok_or_else(|| Status::invalid_argument(text()))
}

/// A limit for the bytes of snapshots; 0: none.
pub(crate) fn snapshot_size(bytes: i64) -> Result<u64, Status> {
    u64::try_from(bytes)
        .map_err(|_| Status::invalid_argument(format!("{bytes} bytes cannot be the limit for snapshots")))
}

/// Longhorn can mark every snapshot as removed that a trim meets; that is not built.
pub(crate) fn refuse_unmap_mark(enabled: bool) -> Result<(), Status> {
    if enabled {
        return Err(Status::unimplemented(
            "a trim that marks snapshots as removed is not built: UNMAP never touches what a snapshot needs; \
             `longhornctl snapshot rm` removes snapshots",
        ));
    }
    Ok(())
}
