//! Where a volume is attached: the ticket with the highest priority decides, then the lowest id.
//!
//! A volume goes from one node to another only over being detached, unless it is migratable (`migration`). A ticket of a
//! workload on another node ends what runs in the background (priority 800: snapshots, backups, rebuilds), and nothing
//! else is ended by a newcomer. A volume for which nobody holds a ticket on its node any more is detached.

mod migration;
#[cfg(test)]
mod tests;

use crate::api::{
    AttachmentTicket, Conditions, TicketStatus, TicketType, Volume, VolumeAttachment, VolumeState,
};

/// The parameter of a ticket that asks for the engine without a device.
pub const DISABLE_FRONTEND: &str = "disableFrontend";

/// What a ticket's condition is about.
const SATISFIED: &str = "Satisfied";

/// Tickets from here on belong to somebody who waits for the volume; those below run in the background.
const WORKLOAD: u32 = 900;

/// Where the volume should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// The node; empty for none.
    pub node: String,
    /// The node that it is shown on besides, to move there; empty for none.
    pub migration: String,
    /// Without a device.
    pub disable_frontend: bool,
    /// Who asked.
    pub by: String,
}

/// What to change.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Where the volume should be, if that changes.
    pub target: Option<Target>,
    /// How each ticket fares.
    pub tickets: std::collections::BTreeMap<String, TicketStatus>,
}

/// Longhorn's priorities.
const fn priority(kind: TicketType) -> u32 {
    match kind {
        TicketType::VolumeRestore | TicketType::VolumeExpansion => 2000,
        TicketType::Api => 1000,
        TicketType::Csi | TicketType::Salvage | TicketType::ShareManager => WORKLOAD,
        TicketType::VolumeClone
        | TicketType::Snapshot
        | TicketType::Backup
        | TicketType::VolumeEviction
        | TicketType::VolumeRebuilding
        | TicketType::BackingImageDataSource => 800,
        TicketType::Unknown => 0,
    }
}

fn disables_frontend(ticket: &AttachmentTicket) -> bool {
    ticket.parameters.get(DISABLE_FRONTEND).is_some_and(|v| v == "true")
}

/// Decides for one volume. Without the volume nothing is satisfied.
pub fn plan(attachment: &VolumeAttachment, volume: Option<&Volume>, now: &str) -> Plan {
    let tickets = &attachment.spec.attachment_tickets;
    let old = attachment.status.as_ref().map(|s| &s.attachment_ticket_statuses);
    let is_going = volume.is_some_and(|v| v.metadata.deletion_timestamp.is_some());
    let target = volume.filter(|_| !is_going).and_then(|volume| target(tickets.iter(), volume));
    // What is decided now counts: it is told once, not twice.
    let decided = target.as_ref().map(|t| (t.node.as_str(), t.migration.as_str()));
    let known = || volume.map(|v| (v.spec.node_id.as_str(), v.spec.migration_node_id.as_str()));
    let wanted = decided.or_else(known);
    let statuses = tickets.iter().map(|(id, ticket)| {
        let before = old.and_then(|all| all.get(id));
        (id.clone(), fare(id, ticket, volume.zip(wanted), before, now))
    });
    let tickets = statuses.collect();
    Plan { target, tickets }
}

/// Where the volume should be, if that is not where its spec puts it.
fn target<'a>(
    tickets: impl Iterator<Item = (&'a String, &'a AttachmentTicket)> + Clone,
    volume: &Volume,
) -> Option<Target> {
    let spec = &volume.spec;
    let state = volume.status.as_ref().map(|s| s.state).unwrap_or_default();
    let wanted = || tickets.clone().filter(|(_, t)| !t.node_id.is_empty());
    if spec.node_id.is_empty() {
        if state != VolumeState::Detached {
            return None;
        }
        return best(wanted()).map(|ticket| Target {
            node: ticket.node_id.clone(),
            migration: String::new(),
            disable_frontend: disables_frontend(ticket),
            by: ticket.kind.to_string(),
        });
    }
    match migration::step(tickets.clone(), volume) {
        migration::Step::Ordinary => {}
        migration::Step::Stay => return None,
        migration::Step::Go(target) => return Some(target),
    }
    let here = || wanted().filter(|(_, t)| t.node_id == spec.node_id);
    let background_only = here().all(|(_, t)| priority(t.kind) < WORKLOAD);
    let elsewhere = wanted().any(|(_, t)| t.node_id != spec.node_id && priority(t.kind) >= WORKLOAD);
    let leaves = here().next().is_none() || background_only && elsewhere;
    if leaves {
        return Some(Target::default());
    }
    // A device is added or taken away only by attaching anew; a workload's wish counts before a background one's.
    let front = best(here())?;
    (disables_frontend(front) != spec.disable_frontend && !background_only).then(Target::default)
}

/// The ticket with the highest priority, then the lowest id.
fn best<'a>(
    tickets: impl Iterator<Item = (&'a String, &'a AttachmentTicket)>,
) -> Option<&'a AttachmentTicket> {
    let order = |(a_id, a): &(&String, &AttachmentTicket), (b_id, b): &(&String, &AttachmentTicket)| {
        priority(a.kind).cmp(&priority(b.kind)).then_with(|| b_id.cmp(a_id))
    };
    tickets.max_by(order).map(|(_, ticket)| ticket)
}

/// A volume, and the nodes that it should be on and shown on besides; empty for none.
type Wanted<'a> = (&'a Volume, (&'a str, &'a str));

/// How a ticket fares.
fn fare(
    id: &str,
    ticket: &AttachmentTicket,
    volume: Option<Wanted<'_>>,
    before: Option<&TicketStatus>,
    now: &str,
) -> TicketStatus {
    let mut status = before.cloned().unwrap_or_default();
    id.clone_into(&mut status.id);
    status.generation = ticket.generation;
    let (satisfied, reason, message) = verdict(ticket, volume);
    status.satisfied = satisfied;
    status.conditions.set_condition(SATISFIED, satisfied, reason, &message, now);
    status
}

fn verdict(ticket: &AttachmentTicket, volume: Option<Wanted<'_>>) -> (bool, &'static str, String) {
    let Some((volume, (wanted, second))) = volume else {
        return (false, "NoVolume", "the volume does not exist".to_owned());
    };
    let status = volume.status.clone().unwrap_or_default();
    let node = &ticket.node_id;
    let current = &status.current_node_id;
    // Shown there besides, and still while the engine takes its place.
    let is_shown = status.current_migration_node_id == *node && (second == node || wanted == node);
    if is_shown && !node.is_empty() {
        return (true, "", String::new());
    }
    let is_going = !wanted.is_empty() && wanted != node;
    if current == node && status.state == VolumeState::Attached && !node.is_empty() && !is_going {
        let wants_none = disables_frontend(ticket);
        if volume.spec.disable_frontend == wants_none || wants_none {
            return (true, "", String::new());
        }
        let message = "the volume is attached without a device, for maintenance".to_owned();
        return (false, "FrontendDisabled", message);
    }
    if second == node && !node.is_empty() {
        let message =
            format!("the volume is attached to node {current} and is being shown on node {node}, too");
        return (false, "Migrating", message);
    }
    if !current.is_empty() && current != node {
        let waits = migration::waits_for(volume).filter(|_| volume.spec.migratable);
        let message = match waits {
            _ if !second.is_empty() => {
                format!(
                    "the volume is attached to node {current} and migrates to node {second}: a third one waits"
                )
            }
            Some(what) => format!("the volume is attached to node {current}; this one waits until {what}"),
            None => format!("the volume is attached to node {current}"),
        };
        return (false, "Elsewhere", message);
    }
    if wanted == node && !node.is_empty() {
        return (false, "Attaching", format!("the volume is being attached to node {node}"));
    }
    (false, "Waiting", format!("the volume is {}", status.state))
}
