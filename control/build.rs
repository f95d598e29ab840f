//! Generates the gRPC messages and services from `proto/` without an installed protoc, and keeps the descriptors for
//! the test that compares them with Longhorn's published numbers.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    let files = [
        "common.proto",
        "controller.proto",
        "data_engine.proto",
        "disk.proto",
        "instance.proto",
        "operations.proto",
        "process_manager.proto",
        "proxy.proto",
        "replica.proto",
        "sync_agent.proto",
    ];
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is set by cargo")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    // None of Longhorn's: between the manager and the CSI driver of a node, and what every process is asked.
    tonic_prost_build::configure()
        .compile_fds(protox::compile(["health.proto", "node.proto", "process.proto"], ["proto"])?)?;
    Ok(())
}
