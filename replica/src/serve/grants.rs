//! What is kept of the grant to the engine on this host.

use lh_ring::Fd;

use super::core::{ConnId, SessionHello};

/// The grant that holds, and how many there were.
#[derive(Debug, Default)]
pub(super) struct Grants {
    pub(super) holding: Option<Holding>,
    pub(super) count: u32,
}

/// A grant.
#[derive(Debug)]
pub(super) struct Holding {
    /// For which session.
    pub(super) to: SessionHello,
    pub(super) conn: ConnId,
    pub(super) fd: Fd,
}
