//! A migratable volume that moves while it is used: a second node shows it, and then has it.
//!
//! ```text
//!            a ticket on a second node             the second node shows it, and the first one's tickets are gone
//! attached ---------------------------> migrating ------------------------------------------------> attached there
//!    ^                                   |      |
//!    +-----------------------------------+      +--> detached: the first one's tickets are gone too early, or all are
//!      the second one's ticket is gone
//! ```

use super::{Target, WORKLOAD, best, disables_frontend, priority};
use crate::api::{AttachmentTicket, TicketType, Volume, VolumeState};
use crate::plan::volume::exchanges;

/// What the tickets mean for a volume that is on a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Nothing but what they mean for every volume.
    Ordinary,
    /// It stays as it is.
    Stay,
    /// It goes there, is shown there besides, or is not any more.
    Go(Target),
}

/// Those who use a volume, not what runs in the background.
fn moves(ticket: &AttachmentTicket) -> bool {
    matches!(ticket.kind, TicketType::Csi | TicketType::Api)
        && !disables_frontend(ticket)
        && !ticket.node_id.is_empty()
}

/// Decides for a volume whose spec names a node.
pub(super) fn step<'a>(
    tickets: impl Iterator<Item = (&'a String, &'a AttachmentTicket)> + Clone,
    volume: &Volume,
) -> Step {
    let spec = &volume.spec;
    let (from, to) = (&spec.node_id, &spec.migration_node_id);
    let is_used = tickets.clone().any(|(_, t)| t.node_id == *from && priority(t.kind) >= WORKLOAD);
    let stays = Target { node: from.clone(), disable_frontend: spec.disable_frontend, ..Target::default() };
    let others = tickets.filter(|(_, t)| moves(t) && t.node_id != *from);
    if to.is_empty() {
        let next = best(others).filter(|_| spec.migratable && is_used && waits_for(volume).is_none());
        return next.map_or(Step::Ordinary, |t| Step::Go(Target { migration: t.node_id.clone(), ..stays }));
    }
    let comes = best(others.filter(|(_, t)| t.node_id == *to)).filter(|_| spec.migratable);
    let is_shown = volume.status.as_ref().is_some_and(|s| s.current_migration_node_id == *to);
    match (is_used, comes) {
        (true, Some(_)) => Step::Stay,
        (true, None) => Step::Go(stays),
        (false, Some(ticket)) if is_shown => {
            Step::Go(Target { node: to.clone(), by: ticket.kind.to_string(), ..Target::default() })
        }
        // Nobody there has the volume yet: it is attached anew.
        (false, _) => Step::Go(Target::default()),
    }
}

/// What a second node of an attached migratable volume has to wait for; `None`: nothing.
pub(super) fn waits_for(volume: &Volume) -> Option<&'static str> {
    let (spec, status) = (&volume.spec, volume.status.clone().unwrap_or_default());
    let is_there = status.state == VolumeState::Attached && status.current_node_id == spec.node_id;
    let cases = [
        (!status.current_migration_node_id.is_empty(), "its last migration ends"),
        (!is_there, "it is attached where it is going"),
        (spec.disable_frontend, "it has a device"),
        (status.expansion_required, "it has grown"),
        (exchanges(&status), "its programs are exchanged"),
    ];
    cases.into_iter().find(|(waits, _)| *waits).map(|(_, what)| what)
}
