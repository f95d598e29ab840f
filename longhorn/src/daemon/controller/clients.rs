//! Who is connected where a volume is shown without a device of this host.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nbd_frontend::ConnectionCount;

/// The clients of an engine's servers, all queues together. What they do with the volume's bytes nobody here can see.
#[derive(Clone, Debug, Default)]
pub(super) struct Clients {
    /// NBD connections, through whichever queue, relays' among them.
    pub(super) nbd: ConnectionCount,
    initiators: Arc<AtomicUsize>,
    /// Of the NBD connections, those of relays.
    relays: Arc<AtomicUsize>,
}

impl Clients {
    /// Says how many iSCSI sessions the target has now.
    pub(super) fn set_initiators(&self, sessions: usize) {
        self.initiators.store(sessions, Ordering::Relaxed);
    }

    /// Says how many connections relays have now.
    pub(super) fn set_relays(&self, connections: usize) {
        self.relays.store(connections, Ordering::Relaxed);
    }

    /// The relays that are connected, for people; `None`: none. Their hosts show the volume, and who uses it there nobody here can see,
    /// whatever it is shown by on this one.
    pub(super) fn relays_named(&self) -> Option<String> {
        let connections = self.relays.load(Ordering::Relaxed);
        (connections > 0).then(|| format!("relays' connections: {connections}"))
    }

    /// Who is connected, for people; `None`: nobody.
    pub(super) fn named(&self) -> Option<String> {
        let (nbd, iscsi) = (self.nbd.now(), self.initiators.load(Ordering::Relaxed));
        match (nbd, iscsi) {
            (0, 0) => None,
            (0, sessions) => Some(format!("iSCSI sessions: {sessions}")),
            (connections, _) => Some(format!("NBD connections: {connections}")),
        }
    }
}
