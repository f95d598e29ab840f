//! A volume that moves while it is used: its second engine.
//!
//! One engine at a time answers for a volume. While a second node shows it, the process there is a relay, which passes every
//! request on to the engine. When the volume is that node's, the relay's resource becomes the engine's: its process is
//! replaced, under its device, by an engine with a newer number, which shuts the old one out (`docs/invariants.md`, 2).
//! So nothing has to be waited for, and whoever is late or cut off does no harm.
//!
//! ```text
//! VOLUME-e-0  active ----------------------> stopped, then deleted      or: active (rolled back)
//! VOLUME-e-1          created: a relay ----> active                     or: stopped, then deleted
//! ```
//!
//! The engine that is not `active` never is the volume's: the old one's is taken away before the new one's is given.

use super::Action;
use super::draft::Draft;
use crate::api::{DesireState, Engine, EngineSpec, InstanceState, Volume};
use crate::plan::engine_name;

/// The volume's engine, and a second one: a migration's relay, or the engine before it. The volume's is the active one; between
/// two writes neither may be, and then it is the one on the volume's node, else what is no relay.
pub fn pair<'a>(
    volume: &Volume,
    engines: impl IntoIterator<Item = &'a Engine>,
) -> (Option<&'a Engine>, Option<&'a Engine>) {
    let mut all: Vec<&Engine> = engines.into_iter().collect();
    all.sort_by_key(|e| {
        let is_there = e.spec.node_id == volume.spec.node_id;
        (!e.spec.active, !is_there, e.spec.relays(), e.metadata.name.clone())
    });
    let mut all = all.into_iter();
    (all.next(), all.next())
}

impl Draft<'_> {
    /// True while a second node shows the volume, or is to, or has just become its node.
    pub(super) fn migrates(&self) -> bool {
        self.o.second.is_some()
            || !self.o.volume.spec.migration_node_id.is_empty()
            || !self.status.current_migration_node_id.is_empty()
    }

    /// The volume is the node's that only showed it so far: the relay there becomes the engine. False: there is none.
    pub(super) fn take_over(&mut self, target: &str) -> bool {
        let is_confirmed = self.o.volume.spec.migration_node_id.is_empty()
            && !target.is_empty()
            && self.status.current_migration_node_id == target;
        let is_relay = |e: &&EngineSpec| e.relays() && e.node_id == target;
        if !is_confirmed {
            return false;
        }
        if let Some(relay) = self.second.as_ref().filter(is_relay) {
            self.second = Some(self.promoted(relay, target));
            // Written first: never are two wanted at once.
            if let Some(old) = &mut self.engine {
                old.desire_state = DesireState::Stopped;
                old.active = false;
            }
        } else if let Some(relay) = self.engine.as_ref().filter(is_relay) {
            // It was written so far, and no further.
            self.engine = Some(self.promoted(relay, target));
        } else {
            return false;
        }
        self.tell(false, "Migrating", format!("the volume moves to node {target}"));
        true
    }

    /// The engine that takes a relay's place, of the program that runs there.
    fn promoted(&self, relay: &EngineSpec, target: &str) -> EngineSpec {
        EngineSpec { image: relay.image.clone(), ..self.equipped(relay.clone(), target) }
    }

    /// Shows the volume on the node that it migrates to, or nowhere besides its own.
    pub(super) fn show_elsewhere(&mut self) {
        let spec = &self.o.volume.spec;
        let to = &spec.migration_node_id;
        let moves = spec.migratable && !spec.node_id.is_empty() && !to.is_empty() && *to != spec.node_id;
        // One that was told to end does that first, wanted again or not: nobody would have it run any more.
        let stays = |relay: &EngineSpec| {
            relay.node_id == *to && relay.relays() && relay.desire_state == DesireState::Running
        };
        match &self.second {
            None if moves => self.make_relay(to),
            Some(relay) if moves && stays(relay) => self.keep_relay(to),
            _ => self.dismiss_second(),
        }
    }

    /// Where the volume's engine serves relays; empty while nobody knows.
    fn relay_address(&self) -> String {
        self.o.engine.and_then(|e| e.status.as_ref()).map(|s| s.relay_address.clone()).unwrap_or_default()
    }

    fn make_relay(&mut self, to: &str) {
        let (address, image) = (self.relay_address(), self.image());
        self.status.current_migration_node_id.clear();
        let Some(engine) = self.engine.as_ref().filter(|_| self.is_attached() && !address.is_empty()) else {
            return;
        };
        self.second = Some(EngineSpec {
            active: false,
            node_id: to.to_owned(),
            desire_state: DesireState::Running,
            relay_from: address,
            replica_address_map: std::collections::BTreeMap::new(),
            image,
            ..engine.clone()
        });
        self.tell(false, "Migrating", format!("the volume is being shown on node {to}, too"));
    }

    fn keep_relay(&mut self, to: &str) {
        let address = self.relay_address();
        if let Some(relay) = self.second.as_mut().filter(|_| !address.is_empty()) {
            relay.relay_from = address;
        }
        // Once it is shown there it stays so: whoever uses it waits, whatever becomes of the process.
        let is_shown = self.status.current_migration_node_id == to
            || self.o.second.is_some_and(|e| self.state_of(e) == InstanceState::Running);
        self.status.current_migration_node_id = if is_shown { to.to_owned() } else { String::new() };
    }

    /// Has the second engine end, and forgets it when it has. Of a silent node nothing is waited for: its manager ends what
    /// no resource names when it is back.
    pub(super) fn dismiss_second(&mut self) {
        if let (Some(second), Some(known)) = (&mut self.second, self.o.second) {
            // One that should run may be about to be started, whatever is said of it: first nobody may start it any more.
            let was_wanted = std::mem::take(&mut second.desire_state) == DesireState::Running;
            second.active = false;
            let state = self.state_of(known);
            if was_wanted || !matches!(state, InstanceState::Stopped | InstanceState::Unknown) {
                return;
            }
            let name = known.metadata.name.clone().unwrap_or_default();
            self.second = None;
            self.actions.push(Action::DeleteEngine(name));
        }
        // Where it has become the volume's node, that is so until the engine there serves.
        if self.status.current_migration_node_id != self.o.volume.spec.node_id {
            self.status.current_migration_node_id.clear();
        }
    }

    /// Names of the volume's engines: the first that is free.
    pub(super) fn free_engine_name(&self) -> String {
        let taken = |name: &String| {
            let known = [self.o.engine, self.o.second];
            known.into_iter().flatten().any(|e| e.metadata.name.as_ref() == Some(name))
        };
        let names = [engine_name(&self.name), format!("{}-e-1", self.name)];
        names.iter().find(|name| !taken(name)).unwrap_or(&names[0]).clone()
    }
}
