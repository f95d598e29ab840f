//! A seeded simulation of a whole volume: engine, replicas, disks, network and clock in one thread, driving the real
//! state machines. Everything follows from the seed; a failure prints it.

pub(crate) mod disk;
pub(crate) mod engine;
pub(crate) mod faults;
pub(crate) mod grant;
pub(crate) mod node;
pub(crate) mod packet;
pub(crate) mod parts;
pub(crate) mod rot;
pub(crate) mod world;
