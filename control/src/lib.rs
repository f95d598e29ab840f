//! Instance manager, the gRPC services and a volume's records on its host. No block I/O happens here: engines and
//! replicas are processes that this crate starts and talks to.

pub mod authority;
pub mod chain;
pub mod cloning;
pub mod deposit;
pub mod engine;
pub mod front;
mod health;
pub mod host;
pub mod joining;
mod limits;
pub mod logging;
pub mod manager;
mod progress;
pub mod proto;
mod proxy;
pub mod random;
pub mod replica;
pub mod tls;
pub mod transport;
mod unbuilt;
