//! A volume that rests and has a replica where all are to go (`evictionRequested`, `node-drain-policy`): attached for the time
//! of the move, and only if the replica has a place to go to. What cannot be helped is said, and looked at again; a volume that
//! is in use moves its replicas without any of this (`replicas`).

use std::time::Duration;

use super::at_rest::{Course, GAVE_UP, Wait, left};
use super::draft::Draft;
use super::replicas::TURN;
use super::{Action, FILLS_ON, Wish};
use crate::api::{AttachmentTicket, Conditions, DataLocality, ReplicaSpec, TicketType};
use crate::plan::{age, written};

/// The condition: True while the volume is attached so that its replicas can move, False with what that waits for.
pub const EVICTION: &str = "ReplicaEviction";

/// How long one that came to nothing is left alone, twice as long after each further one, and the longest time: an engine that starts in
/// vain every minute helps nobody, and a disk that takes no replica today may take none tomorrow.
const PAUSE: (Duration, Duration) = (Duration::from_secs(600), Duration::from_secs(4 * 3600));

/// The reason in the condition of one that somebody uses meanwhile.
const IN_USE: &str = "InUse";

/// What to do.
enum Step {
    /// Nothing is to be said, and no ticket of ours to be there.
    Leave,
    /// Everything stays as it is, but for a ticket that is not to be there any more.
    Stay,
    /// Not now. No ticket of ours is to be there.
    Wait(Wait),
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
            Step::Leave => {
                self.status.conditions.retain(|c| c.kind != EVICTION);
                self.status.eviction_attempts = 0;
            }
            Step::Wait(Wait(reason, message)) => self.say_eviction(false, reason, &message),
            Step::Share => {
                self.say_eviction(false, IN_USE, "the volume is in use, and its replicas move meanwhile");
            }
            Step::GoOn => self.say_eviction(true, "", "the volume is attached so that its replicas can move"),
            Step::GiveUp(why) => self.give_up_eviction(&why),
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

    /// It was attached, and that came to nothing.
    fn give_up_eviction(&mut self, why: &str) {
        let attempts = self.status.eviction_attempts.saturating_add(1);
        self.status.eviction_attempts = attempts;
        let next = written(self.o.now + pause(attempts));
        let why = format!("{why} (attempt {attempts}; the next one is at {next})");
        self.say_eviction(false, GAVE_UP, &why);
        self.tell(true, "EvictionFailed", why);
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
        (self.locality() == DataLocality::StrictLocal)
            .then(|| Step::Wait(Wait("StrictLocal", why.to_owned())))
    }

    /// Without our ticket.
    fn eviction_begins(&mut self) -> Step {
        if self.others_want_it() {
            return Step::Leave;
        }
        if !self.rests() {
            return Step::Stay;
        }
        if let Some(step) = self.cannot_move() {
            return step;
        }
        let gave_up = self.status.conditions.get_condition(EVICTION).filter(|c| c.reason == GAVE_UP);
        if let Some(since) = gave_up.and_then(|c| age(&c.last_transition_time, self.o.now))
            && let Some(left) = left(pause(self.status.eviction_attempts), since)
        {
            self.look_again(left);
            return Step::Stay;
        }
        // Not on the node that is to be empty, if there is another one.
        let can_tell = |r: &&ReplicaSpec| r.failed_at.is_empty() && self.is_near(r);
        let source = self.replicas.values().filter(can_tell).min_by_key(|r| r.eviction_requested);
        let Some(source) = source.map(|r| r.node_id.clone()) else {
            let why = "no node that answers has a replica that has not failed";
            return Step::Wait(Wait("NoSource", why.to_owned()));
        };
        match self.choose_eviction(&source) {
            Ok(fills) => Step::Begin(source, fills),
            Err(wait) => Step::Wait(wait),
        }
    }

    /// The node on which a replica takes the place of one that leaves.
    fn choose_eviction(&mut self, source: &str) -> Result<String, Wait> {
        if self.has_successors() {
            let unfilled = |(name, spec): &(&String, &ReplicaSpec)| !self.is_in_sync(name, spec);
            let fills = self.successors().find(unfilled).map(|(_, spec)| spec.node_id.clone());
            return Ok(fills.unwrap_or_else(|| source.to_owned()));
        }
        self.may_fill()?;
        // One that failed keeps its node from any other one, and its engine takes it back, though it was never filled.
        let failed =
            self.replicas.iter().filter(|(_, spec)| !spec.eviction_requested && !spec.failed_at.is_empty());
        let back = failed.filter(|(name, spec)| {
            self.can_run(name, spec) && self.o.cluster.is_readable(&spec.node_id, &spec.disk_id)
        });
        let back: Vec<String> = back.map(|(_, spec)| spec.node_id.clone()).collect();
        if back.is_empty() { self.fill_new() } else { self.fill_back(&back) }
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
        match self.course(since, "move its replicas") {
            Course::GoesOn => Step::GoOn,
            Course::Unattached(why) => Step::GiveUp(why),
            Course::Still => self.eviction_stands_still(),
        }
    }

    /// Nothing is being filled under our ticket.
    fn eviction_stands_still(&mut self) -> Step {
        let fill = u64::try_from(self.status.actual_size).unwrap_or_default();
        let why = match self.place_now(fill) {
            _ if self.has_successors() => self.stuck(),
            Ok(None) if self.o.settings.rebuilds_at_once() > 0 => {
                self.look_again(TURN);
                return Step::GoOn;
            }
            Ok(_) => self.stuck(),
            Err(refusal) => refusal.to_string(),
        };
        Step::GiveUp(why)
    }
}

/// How long it is left alone after so many that came to nothing.
fn pause(attempts: i64) -> Duration {
    let doubled = u32::try_from(attempts.saturating_sub(1)).unwrap_or_default();
    let factor = 1_u32.checked_shl(doubled).unwrap_or(u32::MAX);
    PAUSE.0.saturating_mul(factor).min(PAUSE.1)
}
