//! A volume that rests and has a replica where all are to go (`evictionRequested`, `node-drain-policy`): attached for the time
//! of the move, and only if the replica has a place to go to. What cannot be helped is said, and looked at again; a volume that
//! is in use moves its replicas without any of this (`replicas`).

use std::time::Duration;

use super::draft::Draft;
use super::offline::{IDLE, START_PATIENCE, left};
use super::replicas::{ROOM, TURN};
use super::{Action, FILLS_ON, READY, Wish};
use crate::api::{
    AttachmentTicket, Conditions, DataLocality, InstanceState, ReplicaMode, ReplicaSpec, TicketType,
    VolumeState,
};
use crate::plan::age;

/// The condition: True while the volume is attached so that its replicas can move, False with what that waits for.
pub const EVICTION: &str = "ReplicaEviction";

/// How long one that came to nothing is left alone: an engine that starts in vain every minute helps nobody.
const PAUSE: Duration = Duration::from_secs(600);

/// The reasons in the condition of one that came to nothing, and of one that somebody uses meanwhile.
const GAVE_UP: &str = "GaveUp";
const IN_USE: &str = "InUse";

/// What to do.
enum Step {
    /// Nothing is to be said, and no ticket of ours to be there.
    Leave,
    /// Everything stays as it is, but for a ticket that is not to be there any more.
    Stay,
    /// Not now: the reason, and a sentence. No ticket of ours is to be there.
    Wait(&'static str, String),
    /// Somebody uses it under our ticket.
    Share,
    /// It is attached on this node, to fill a replica on that one.
    Begin(String, String),
    /// It is attached, or is being attached.
    GoOn,
    /// It was attached, and nothing moves.
    GiveUp(String),
}

impl Draft<'_> {
    /// Has a volume that rests attached while replicas of it move. True: it has just been asked for.
    pub(super) fn evict_at_rest(&mut self) -> bool {
        let asked = self.has_ticket(TicketType::VolumeEviction);
        let leaves = self.replicas.values().any(|r| r.eviction_requested);
        let step = match (leaves && !self.is_new(), asked) {
            // One that was never used has nothing to move.
            (false, _) => Step::Leave,
            (true, true) => self.eviction_goes_on(),
            (true, false) => self.eviction_begins(),
        };
        if asked && !matches!(step, Step::Share | Step::GoOn) {
            self.actions.push(Action::Ticket(TicketType::VolumeEviction, None));
        }
        let begins = matches!(step, Step::Begin(..));
        match step {
            Step::Stay => {}
            Step::Leave => self.status.conditions.retain(|c| c.kind != EVICTION),
            Step::Wait(reason, message) => self.say_eviction(false, reason, &message),
            Step::Share => {
                self.say_eviction(false, IN_USE, "the volume is in use, and its replicas move meanwhile");
            }
            Step::GoOn => self.say_eviction(true, "", "the volume is attached so that its replicas can move"),
            Step::GiveUp(why) => {
                self.say_eviction(false, GAVE_UP, &why);
                self.tell(true, "EvictionFailed", why);
            }
            Step::Begin(node, fills) => {
                self.say_eviction(true, "", "the volume is attached so that its replicas can move");
                let parameters = [(FILLS_ON.to_owned(), fills)].into();
                let wish = Wish { node, parameters };
                self.actions.push(Action::Ticket(TicketType::VolumeEviction, Some(wish)));
            }
        }
        begins
    }

    fn say_eviction(&mut self, on: bool, reason: &str, message: &str) {
        let now = self.now.clone();
        self.status.conditions.set_condition(EVICTION, on, reason, message, &now);
    }

    /// Somebody else has the volume, or waits for it.
    fn others_want_it(&self) -> bool {
        let wants = |t: &AttachmentTicket| t.kind != TicketType::VolumeEviction && !t.node_id.is_empty();
        self.o.attachment.is_some_and(|a| a.spec.attachment_tickets.values().any(wants))
    }

    /// A volume whose only replica belongs where the volume is used has no other place for it.
    fn cannot_move(&self) -> Option<Step> {
        let why = "the volume is strict-local: its only replica stays where the volume is used. Change dataLocality while the \
                   volume is detached, and it moves";
        (self.locality() == DataLocality::StrictLocal).then(|| Step::Wait("StrictLocal", why.to_owned()))
    }

    /// Without our ticket.
    fn eviction_begins(&mut self) -> Step {
        if self.others_want_it() {
            return Step::Leave;
        }
        let rests = self.o.volume.spec.node_id.is_empty()
            && self.status.state == VolumeState::Detached
            && matches!(self.engine_state(), InstanceState::Stopped | InstanceState::Unknown);
        if !rests || self.o.attachment.is_none() {
            return Step::Stay;
        }
        if let Some(step) = self.cannot_move() {
            return step;
        }
        let gave_up = self.status.conditions.get_condition(EVICTION).filter(|c| c.reason == GAVE_UP);
        if let Some(since) = gave_up.and_then(|c| age(&c.last_transition_time, self.o.now))
            && let Some(left) = left(PAUSE, since)
        {
            self.look_again(left);
            return Step::Stay;
        }
        // Not on the node that is to be empty, if there is another one.
        let is_near = |r: &&ReplicaSpec| r.failed_at.is_empty() && self.o.nodes_up.contains(&r.node_id);
        let source = self.replicas.values().filter(is_near).min_by_key(|r| r.eviction_requested);
        let Some(source) = source.map(|r| r.node_id.clone()) else {
            let why = "no node that answers has a replica that has not failed";
            return Step::Wait("NoSource", why.to_owned());
        };
        self.choose_eviction(source)
    }

    /// Which replica takes the place of one that leaves, as it would be done if the volume were attached.
    fn choose_eviction(&mut self, source: String) -> Step {
        if self.has_successors() {
            let unfilled = |(name, spec): &(&String, &ReplicaSpec)| !self.is_in_sync(name, spec);
            let fills = self.successors().find(unfilled).map(|(_, spec)| spec.node_id.clone());
            return Step::Begin(source.clone(), fills.unwrap_or(source));
        }
        if self.o.settings.rebuilds_at_once() == 0 {
            let why = "concurrent-replica-rebuild-per-node-limit is 0".to_owned();
            return Step::Wait("NotAllowed", why);
        }
        // One that failed keeps its node from any other one, and its engine takes it back, though it was never filled.
        let failed =
            self.replicas.iter().filter(|(_, spec)| !spec.eviction_requested && !spec.failed_at.is_empty());
        let can_be_filled = |(name, spec): &(&String, &ReplicaSpec)| {
            self.can_run(name, spec) && self.o.cluster.is_readable(&spec.node_id, &spec.disk_id)
        };
        let mut back = failed.filter(can_be_filled).peekable();
        if back.peek().is_some() {
            let calm = back.map(|(_, spec)| spec.node_id.clone()).find(|node| !self.is_crowded(node));
            return calm.map_or_else(|| self.await_turn(), |fills| Step::Begin(source, fills));
        }
        let fill = u64::try_from(self.status.actual_size).unwrap_or_default();
        match self.place_now(fill) {
            Ok(Some(at)) => Step::Begin(source, at.node),
            Ok(None) => self.await_turn(),
            Err(refusal) => {
                self.look_again(ROOM);
                Step::Wait("NoPlace", refusal.to_string())
            }
        }
    }

    fn await_turn(&mut self) -> Step {
        self.look_again(TURN);
        let why = "as many replicas are being filled on the nodes as may be at once \
                   (concurrent-replica-rebuild-per-node-limit)";
        Step::Wait("Turn", why.to_owned())
    }

    /// Replicas that stay.
    fn successors(&self) -> impl Iterator<Item = (&String, &ReplicaSpec)> {
        self.replicas.iter().filter(|(_, spec)| !spec.eviction_requested && spec.failed_at.is_empty())
    }

    /// True if those that leave need no further one in their place.
    fn has_successors(&self) -> bool {
        self.successors().count() >= self.wanted()
    }

    /// Under our ticket.
    fn eviction_goes_on(&mut self) -> Step {
        if self.others_want_it() {
            return Step::Share;
        }
        if let Some(step) = self.cannot_move() {
            return step;
        }
        let condition = self.status.conditions.get_condition(EVICTION);
        if condition.is_some_and(|c| !c.is_true() && c.reason != IN_USE) {
            // It was given up, and the ticket is still there, for all that is known here.
            return Step::Stay;
        }
        let begun = condition.filter(|c| c.is_true());
        let Some(since) = begun.and_then(|c| age(&c.last_transition_time, self.o.now)) else {
            return Step::GoOn;
        };
        if !self.is_attached() {
            let Some(left) = left(START_PATIENCE, since) else {
                let why = self.status.conditions.get_condition(READY).map(|c| format!(": {}", c.message));
                let why = why.unwrap_or_default();
                return Step::GiveUp(format!("the volume could not be attached to move its replicas{why}"));
            };
            self.look_again(left);
            return Step::GoOn;
        }
        let is_filling = self.replicas.keys().any(|name| self.mode(name) == Some(ReplicaMode::WriteOnly));
        let is_placed = self.replicas.keys().any(|name| self.replica(name).is_none());
        if is_filling || is_placed || !self.is_written() {
            return Step::GoOn;
        }
        self.eviction_stands_still(since)
    }

    /// Nothing is being filled under our ticket, `since` when the volume is attached, or is being attached.
    fn eviction_stands_still(&mut self, since: Duration) -> Step {
        let fill = u64::try_from(self.status.actual_size).unwrap_or_default();
        let refusal = match self.place_now(fill) {
            _ if self.has_successors() => None,
            Ok(None) if self.o.settings.rebuilds_at_once() > 0 => {
                self.look_again(TURN);
                return Step::GoOn;
            }
            Ok(_) => None,
            Err(refusal) => Some(refusal.to_string()),
        };
        if let Some(left) = left(IDLE, self.unmoved().min(since)) {
            self.look_again(left);
            return Step::GoOn;
        }
        Step::GiveUp(refusal.unwrap_or_else(|| self.stuck()))
    }
}
