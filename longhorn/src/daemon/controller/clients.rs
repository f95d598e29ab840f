//! Who is connected where a volume is shown without a device of this host.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lh_ring::ConnectionCount;

/// The clients of an engine's servers, all queues together. What they do with the volume's bytes nobody here can see.
#[derive(Clone, Debug, Default)]
pub(super) struct Clients {
    /// NBD connections, through whichever queue, relays' among them, and iSCSI sessions.
    connections: ConnectionCount,
    /// Of these, the iSCSI sessions.
    initiators: Arc<AtomicUsize>,
    /// Of these, those of relays.
    relays: Arc<AtomicUsize>,
}

impl Clients {
    /// Those of a relay. Who leaves it may go on at the engine or another relay, of whose clients this process knows nothing.
    pub(super) fn of_relay() -> Self {
        Self { connections: ConnectionCount::default().beside_uncounted(), ..Self::default() }
    }

    /// The count for a queue's server, which shows the volume to `relays` or is a frontend's. A relay's clients may go on at a device
    /// that the engine shows on its host, where nobody counts them.
    pub(super) fn connections(&self, relays: bool) -> ConnectionCount {
        if relays { self.connections.beside_uncounted() } else { self.connections.clone() }
    }

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
        let sessions = self.initiators.load(Ordering::Relaxed);
        match (self.connections.now().saturating_sub(sessions), sessions) {
            (0, 0) => None,
            (0, sessions) => Some(format!("iSCSI sessions: {sessions}")),
            (connections, _) => Some(format!("NBD connections: {connections}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who has the only connection that is counted may go on where nobody counts.
    #[test]
    fn only_an_engines_own_client_is_ever_alone() {
        let is_alone = |count: ConnectionCount| count.add().is_alone(count.census());
        assert!(is_alone(Clients::default().connections(false)));
        assert!(!is_alone(Clients::default().connections(true)));
        assert!(!is_alone(Clients::of_relay().connections(false)));
    }

    #[test]
    fn sessions_are_told_from_connections() {
        let clients = Clients::default();
        let _session = clients.connections(false).add();
        clients.set_initiators(1);
        assert_eq!(clients.named().as_deref(), Some("iSCSI sessions: 1"));
        let _relay = clients.connections(true).add();
        assert_eq!(clients.named().as_deref(), Some("NBD connections: 1"));
    }
}
