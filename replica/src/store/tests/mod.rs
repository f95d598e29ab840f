//! Tests of the store as a whole.

mod cases;
mod crash;
mod damage;
mod model;
pub(super) mod tape;
mod volume;
mod zero_map;
