//! What the tests of several crates stand on: an allocator that counts, and a frontend's server in a thread of its own.
//! No program has any of it.

pub mod allocations;
mod served;

pub use served::{Inside, Served};
