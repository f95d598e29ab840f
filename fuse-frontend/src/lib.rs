//! A volume as one FUSE file under a loop device: a block device on any kernel that has FUSE and loop, containers
//! included.
//!
//! - [`proto`], [`init`] and [`session`] speak the kernel's protocol and do no I/O.
//! - [`Server`] is a queue thread's frontend: it reads requests, hands them to the device, and writes the answers.
//! - [`keeper`] is a process of its own that holds the connection and the loop device, so that both outlive the engine:
//!   requests pause while there is none, and the next one is handed what the last one left unanswered.
//! - [`attach()`] is an engine's way to all that.
//!
//! What the kernel does in each case is in `docs/formats/fuse.md`.

mod attach;
pub mod init;
pub mod keeper;
mod needed;
pub mod node;
pub mod proto;
mod server;
pub mod session;
mod users;

pub use attach::{Attach, AttachError, Attached, attach};
pub use needed::{FUSE, LOOP, MISC, Needed, Present};
pub use node::NodeError;
pub use server::Server;
pub use users::{Holder, users_of, users_of_number};

/// What this kernel lacks for the frontend, in words that name it; `None` if nothing.
pub fn missing() -> Option<String> {
    [FUSE, LOOP].iter().find_map(Needed::missing)
}
