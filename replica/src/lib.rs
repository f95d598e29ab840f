//! Layer files, chain, extent index, snapshots, and the replica server.

pub mod serve;
pub mod store;
