//! The two programs: command line and composition. `longhornctl` is for people; `longhorn` is the processes.

// It panics where nobody reads: `tell!` is for words to people.
#![deny(clippy::print_stderr)]

pub mod arguments;
pub mod ctl;
pub mod daemon;
mod device_names;
mod generation;
mod kernel;
mod limits;
mod living_keeper;
mod mounts;
mod next_step;
mod progress;
mod reader;
mod search_path;
mod sentence;
mod signals;
mod tell;
mod waiting;
