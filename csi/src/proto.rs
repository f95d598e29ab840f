//! The generated messages and services.

/// Package `csi.v1`. `csi/tests/specification.rs` compares it with the specification's names and numbers.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated from proto/")]
pub mod csi {
    tonic::include_proto!("csi.v1");
}

/// Package `pluginregistration`: how a kubelet learns of a driver.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated from proto/")]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}

/// The descriptors of everything above, as a `google.protobuf.FileDescriptorSet`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
