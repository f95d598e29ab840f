//! The io_uring loop, its buffers, and the raw system calls.
//!
//! Everything here is a safe API. The `unsafe` of the project is in this crate, but for what speaks to the kernel's ublk driver
//! (`ublk-frontend/src/kernel.rs`) and an allocator that only tests have (`libs/rig`). Two rules carry that.
//!
//! 1. **An operation owns what the kernel may touch** until its terminal completion: the descriptor, the memory, the
//!    iovec array and message header. All of them sit in the ring's table of operations, which outlives every
//!    submission; a ring that is dropped waits for its operations, and leaks what does not end.
//! 2. **A byte of a [`Pool`] is either written by one or read by many.** The kernel writes only into a [`Payload`] that
//!    was handed over to the operation, or into the part of an [`Rx`] that nobody has been given yet.
//!
//! Pool, ring and all their parts belong to one thread. A [`Bell`] or a [`Mailbox`] is what other threads may hold.
#![expect(unsafe_code, reason = "the kernel's interfaces take pointers; this crate keeps them valid")]

mod bell;
mod changes;
mod connection_count;
mod doors;
mod fd;
mod frontend;
mod lent;
mod mailbox;
mod map;
mod memory;
mod op;
mod payload;
mod places;
mod pool;
mod queue;
mod ring;
mod rx;
pub mod sys;
mod token;
mod tx;

pub use bell::Bell;
pub use changes::{Changes, Watched};
pub use connection_count::{Census, ConnectionCount, Counted};
pub use doors::{Doors, SILENT_SECONDS, tune_served};
pub use fd::Fd;
pub use frontend::Frontend;
pub use lent::{Kept, Lent};
pub use mailbox::{Inbox, Mailbox};
pub use memory::{Answers, MemoryDisk, MemoryStore};
pub use payload::Payload;
pub use places::{Place, Places};
pub use pool::{CHUNK, Pool};
pub use queue::{NoFrontend, OWNER_DEVICE, OWNER_FRONTEND, OWNER_LOOP, Overseer, QueueDevice, run_queue};
pub use ring::{Falloc, Ring};
pub use rx::Rx;
pub use token::{Completion, Token};
pub use tx::Tx;
