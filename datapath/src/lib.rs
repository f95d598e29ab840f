//! The engine of a volume: every write to every replica, every read from one that is healthy.
//!
//! The decisions are pure state machines: they take an input and the time, and give outputs; they do no I/O, read no
//! clock and start no thread. The processes drive them with the ring, the simulation in `tests/` with a seed.
//!
//! - [`order`]: one order for overlapping requests, on whatever queue they came.
//! - [`queue`]: one device queue: admission, fan-out, answers, retry, slow and dead members.
//! - [`conductor`]: the volume as a whole: start, membership and epochs, snapshots, repair, rebuild, close.
//! - [`engine`]: what drives the conductor: the control thread, handshakes, the authority.
//! - [`link`]: what drives a queue on its ring: connections to replicas, the data, the loop.
//! - [`message`]: what queue and conductor tell each other.
//! - [`shared`]: what they read and write without messages: counters of flushes, and what is marked and in doubt.
//! - [`loss`]: what clients have lost, until a flush has told them.
//! - [`salvage`]: which replica holds everything, when a volume does not start by itself.

pub mod conductor;
pub mod engine;
pub mod link;
pub mod loss;
pub mod message;
pub mod order;
pub mod queue;
pub mod salvage;
pub mod shared;
