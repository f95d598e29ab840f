//! Tests of the store as a whole.

mod blind;
mod cases;
mod chain;
mod clone;
mod crash;
mod damage;
mod diff;
mod fifos;
mod folds;
mod full;
mod histories;
mod known;
mod loss;
mod model;
mod names;
mod neighbour;
mod rescue;
mod scrub;
pub(super) mod tape;
mod volume;
mod zero_map;

pub(super) use volume::{Volume, temporary};
