//! A seeded simulation of a whole volume: engine, replicas, disks, network and clock in one thread, driving the real
//! state machines. Everything follows from the seed; a failure prints it.

pub mod disk;
pub mod engine;
pub mod faults;
pub mod node;
pub mod packet;
pub mod world;
