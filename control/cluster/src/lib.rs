//! The Kubernetes control plane: resource types, scheduling, controllers.
//!
//! What to do is decided in [`plan`], purely, and tested without a cluster; [`run`] watches, asks there and carries it out. No
//! block I/O happens here.

pub mod admission;
pub mod agent;
pub mod api;
pub mod kubernetes;
pub mod plan;
pub mod run;
pub mod schedule;
pub mod settings;
