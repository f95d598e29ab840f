//! Layer files, chain, extent index, snapshots, and the replica server.

pub mod serve;
pub mod store;

/// Tests count what they cost: a clock says as much of the machine.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: lh_rig::allocations::Counting = lh_rig::allocations::Counting;
