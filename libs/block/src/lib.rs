//! The vocabulary every crate shares: units and ranges, names, sizes and times as people write them, generations and
//! epochs, and the device trait between a frontend and whatever serves it. No I/O happens here.

mod address;
mod allocation;
mod boot;
mod chain;
mod device;
mod epoch;
mod error;
mod extent;
mod hash;
mod name;
mod quorum;
mod size;
mod time;

pub use address::Address;
pub use allocation::{ALLOCATION_MAX, RUNS_MAX, Run, Runs, are_runs, runs};
pub use boot::boot;
pub use chain::{LAYERS_MAX, SNAPSHOTS_MAX};
pub use device::{Device, Done, Geometry, Op, Request};
pub use epoch::{Epoch, EpochOrder, Generation, Instance, REPLICAS_MAX, Round};
pub use error::IoError;
pub use extent::{BLOCK, Extent, SECTOR};
pub use hash::fnv1a;
pub use name::{NameError, PROCESS_NAME_MAX, check_name, check_process_name};
pub use quorum::{Quorum, QuorumError};
pub use size::{SizeError, format_size, parse_size};
pub use time::{parse_rfc3339, rfc3339};
