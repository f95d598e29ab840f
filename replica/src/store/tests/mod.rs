//! Tests of the store as a whole.

mod cases;
mod chain;
mod crash;
mod damage;
mod model;
pub(super) mod tape;
mod volume;
mod zero_map;
