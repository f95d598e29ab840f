//! What all roots of a host share, and what is so on every host (`docs/formats/host.md`).

/// Locks, notes and sockets of processes that run. It is empty when the host starts.
pub const RUN: &str = "/run/longhorn";

/// Where volumes are shown as devices, each under its name.
pub const DEVICES: &str = "/dev/longhorn";
