//! A SCSI disk (SAM-5, SPC-4, SBC-3). It does not know what carries its commands.
//!
//! [`command`] is the table of commands, [`LogicalUnit`] decides what each comes to, [`Execution`] carries out what
//! touches the medium. [`reservation`] and [`mode`] are state that [`keep`] makes durable; [`sense`] says why something
//! failed.

pub mod command;
pub mod inquiry;
pub mod keep;
mod lba_status;
pub mod mode;
pub mod reservation;
pub mod sense;
mod unit;
mod work;

pub use inquiry::Identity;
pub(crate) use inquiry::Place;
pub use lba_status::LbaStatus;
pub(crate) use unit::place_of;
pub use unit::{DISK_LUN, Decision, LogicalUnit, NexusId, OpenError, Reset};
pub use work::{COMPARE_WRITE_BYTES, Claim, Execution, Step, TRANSFER_MAX, Work};
