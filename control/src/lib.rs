//! Instance manager, the gRPC services and a volume's records on its host. No block I/O happens here: engines and
//! replicas are processes that this crate starts and talks to.

pub mod engine;
pub mod host;
pub mod manager;
pub mod proto;
mod random;
pub mod replica;
pub mod transport;
mod unbuilt;
