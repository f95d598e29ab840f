//! A volume as an NBD export: a server for the clients of other people (the Linux kernel, QEMU, libnbd).
//!
//! Layers, from the wire up: [`proto`] declares the protocol's structures, [`negotiate`] is the handshake and
//! [`transmit`] the transmission phase as pure machines, [`Server`] drives them on a ring for one queue of a volume.
//! [`client`] is the other side: such a volume as a device. [`kernel`] is the way to the kernel's own client. `docs/formats/nbd.md` tells what is spoken and what is not.

mod budget;
pub mod client;
mod connection;
mod export;
mod handshake;
pub mod kernel;
mod listen;
pub mod negotiate;
pub mod proto;
mod requests;
mod server;
mod status;
pub mod transmit;

pub use export::{Agreed, Export, Framing};
pub use listen::Listener;
pub use server::{Ending, Lane, Limits, Load, Server, Spread};
pub use status::EXTENTS_MAX;
