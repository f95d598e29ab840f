//! What the tests of several crates stand on: an allocator that counts, a frontend's server in a thread of its own, a queue's
//! device that is turned by hand, the end of a connection, a loop device, a host that was suspended. No program has any of it.

pub mod allocations;
mod bound;
mod driven;
mod ended;
mod served;
mod suspended;

pub use bound::bind_loop;
pub use driven::Driven;
pub use ended::until_end_arrives;
pub use served::{Inside, Served};
pub use suspended::{SUSPENDED, on_a_host_that_was_suspended};

/// Bytes as lower-case hex digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
