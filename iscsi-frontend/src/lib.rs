//! A volume as an iSCSI target (RFC 7143) with one SCSI disk, for the initiators of other people (Linux, QEMU, libiscsi).
//!
//! Layers, from the wire up: [`pdu`] declares the protocol's structures, [`login`] and [`session`] are its two phases as
//! pure machines, [`Server`] drives them on a ring. The disk is in [`scsi`], which does not know what carries its
//! commands. `docs/formats/iscsi.md` tells what is spoken and what is not.

mod budget;
mod chap;
mod collect;
mod connection;
mod handshake;
pub mod initiator;
pub mod login;
pub mod pdu;
pub mod scsi;
mod server;
pub mod session;
mod target;
mod task;
mod text;

pub use chap::{Chap, Credentials};
pub use server::{Ending, Load, Server};
pub use target::{IQN_PREFIX, Limits, Listener, Target};
