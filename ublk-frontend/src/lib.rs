//! A volume as a ublk device: `/dev/ublkbN`, served by this process on the queue threads' own rings.
//!
//! - [`abi`] declares the kernel's structures, [`session`] decides what each request asks of the device and what the
//!   kernel is told; neither does I/O.
//! - [`Server`] is a queue thread's frontend.
//! - [`attach()`] is an engine's way to its device: a new one, or the one that the last engine left behind. That one's
//!   requests, also those which it had not answered, are then served by the new engine.
//!
//! What the kernel does in each case is in `docs/formats/ublk.md`.

pub mod abi;
mod attach;
mod channel;
mod driver;
mod error;
pub mod identity;
mod kernel;
mod left_behind;
mod nodes;
mod server;
pub mod session;

pub use attach::{Attach, Attached, attach, is_fragile, missing};
pub use channel::Channel;
pub use error::{AttachError, DeviceError};
pub use left_behind::{has_device, left_behind, remove_left_behind};
pub use server::Server;
