//! The Kubernetes control plane: resource types, scheduling, controllers.
//!
//! A controller is `plan(observed, desired) -> actions`, pure and tested without a cluster, and a thin `reconcile` that
//! carries the actions out. No block I/O happens here.

pub mod admission;
pub mod agent;
pub mod api;
pub mod kubernetes;
pub mod plan;
pub mod run;
pub mod schedule;
pub mod settings;
