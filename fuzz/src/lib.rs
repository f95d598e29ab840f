//! What the fuzz targets do with an input, and what must hold whatever it is. Each module says how its inputs are
//! laid out. A target that finds nothing wrong returns; everything else is a panic.

pub mod chain;
pub mod client;
pub mod fuse;
pub mod iscsi;
pub mod keeper;
pub mod meta;
pub mod nbd;
pub mod wire;
