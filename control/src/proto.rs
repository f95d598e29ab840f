//! The generated gRPC messages and services.
//!
//! Names, numbers and types are Longhorn's, so that its clients and this project's understand each other; what this
//! project adds is numbered from 1000 on. `control/tests/longhorn_numbers.rs` holds both.

/// Package `ptypes`: the services of engine and replica.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated from proto/")]
pub mod ptypes {
    tonic::include_proto!("ptypes");
}

/// Package `longhorn.volume`: what an engine can be asked beyond Longhorn's service.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated from proto/")]
pub mod volume {
    tonic::include_proto!("longhorn.volume");
}

/// Where the generated code of other packages looks for that one.
mod longhorn {
    pub(super) use super::volume;
}

/// Package `longhorn.node`: what the CSI driver of a node does for the node's manager.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated from proto/")]
pub mod node {
    tonic::include_proto!("longhorn.node");
}

/// Package `longhorn.process`: what every process of a node is asked.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated from proto/")]
pub mod process {
    tonic::include_proto!("longhorn.process");
}

/// Package `grpc.health.v1`: whether anybody answers.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated from proto/")]
pub mod health {
    tonic::include_proto!("grpc.health.v1");
}

/// What Longhorn declares outside of any package: the service of processes. The generated code of the package `imrpc`
/// looks for two of its messages here.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated from proto/")]
mod unpackaged {
    tonic::include_proto!("_");
}
pub use unpackaged::{LogResponse, VersionResponse};

/// The services of the instance manager: package `imrpc`, and the service of processes, which has none.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated from proto/")]
pub mod imrpc {
    pub use super::unpackaged::*;
    tonic::include_proto!("imrpc");
}

/// The descriptors of everything above, as a `google.protobuf.FileDescriptorSet`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
