//! The CSI driver `driver.longhorn.io`: a claim becomes a volume, a volume a file system or a device in a pod.
//!
//! What a request may ask is decided purely (`names`, `parameters`, `capability`); what it asks is written to the API
//! server as Longhorn's resources, on which the managers act (`cluster`); the node's part calls mount and its like. No
//! block I/O happens here (what reads snapshots is handed in), and nothing is kept: a driver that starts again knows what the last one knew.

mod capability;
mod cluster;
mod controller;
mod guard;
mod health;
mod identity;
mod metadata;
pub mod names;
mod node;
pub mod parameters;
pub mod proto;
mod refused;
mod registration;
mod serve;

pub use metadata::{Holder, Page, ReadSnapshots, SnapshotMap, Source};
pub use refused::Refused;
pub use serve::{Options, RunError, run, run_here};

pub use lh_cluster::api::DRIVER;
