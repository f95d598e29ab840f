//! The kernel-facing edge: the only module with `unsafe`. What leaves it is safe to call.
#![expect(unsafe_code, reason = "the kernel's interfaces take pointers; this module keeps them valid")]

mod commands;
mod control;
mod descriptors;

pub(crate) use commands::{commit, fetch};
pub(crate) use control::{Control, PATH as CONTROL};
pub(crate) use descriptors::Descriptors;
