//! One order for overlapping requests, on whatever queue they came (`docs/invariants.md`, 3).
//!
//! A request claims its range before anything is sent and gives it back after the last answer. Two claims that
//! overlap and of which one is exclusive are never granted together; who came first goes first.
//!
//! # How it works
//! The volume is cut into stripes of 64 KiB; stripe `n` belongs to slot `n % 256`. A claim stands in a line in every
//! slot that it touches. It enters the slots in ascending order *of the slot's number* and enters the next one only
//! once it is granted in this one: whoever waits holds only lower slots than the one it waits in, so no two claims
//! ever wait for each other. In one slot a claim waits for every earlier entry that conflicts, granted or not, so
//! none is overtaken for ever.
//!
//! Who releases carries the claims that it lets through on to their next slots itself; the owner of such a claim
//! hears of it only when it is wholly granted. A claim that meets nobody costs one lock per slot and no system call.

use std::sync::{Mutex, MutexGuard, PoisonError};

use lh_block::Extent;

use crate::message::QueueId;

/// Bytes in a stripe. A 4 KiB request touches one slot, the largest piece of 1 MiB at most seventeen.
const STRIPE: u64 = 64 << 10;

/// Slots in the table.
const SLOTS: u64 = 256;

/// Entries that a slot holds before its line has to grow; it keeps what it has grown to.
const LINE: usize = 16;

/// How a range is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Together with other shared claims: reads.
    Shared,
    /// Alone: writes, zeroes, unmap, and every copy that the system makes.
    Exclusive,
}

/// Names a claim within its queue: the number of the request slot that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u16);

/// A range that somebody holds or waits for. `queue` and `ticket` name it; no two live claims have both the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Whose ring is woken when it is granted.
    pub queue: QueueId,
    /// Which request of that queue.
    pub ticket: Ticket,
    /// What it covers.
    pub range: Extent,
    /// How.
    pub kind: Kind,
}

impl Claim {
    fn conflicts(&self, other: &Self) -> bool {
        (self.kind == Kind::Exclusive || other.kind == Kind::Exclusive) && self.range.overlaps(other.range)
    }

    fn is(&self, other: &Self) -> bool {
        self.queue == other.queue && self.ticket == other.ticket
    }
}

/// What came of [`Table::claim`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// The range is held.
    Granted,
    /// Somebody's [`Table::release`] will hand the claim out once it is granted, exactly once.
    Waits,
}

/// A claim in the line of one slot.
#[derive(Clone, Copy, Debug)]
struct Entry {
    claim: Claim,
    granted: bool,
}

/// The line of one slot, in order of arrival. On a cache line of its own: neighbours are taken by other threads.
#[derive(Debug)]
#[repr(align(64))]
struct Slot {
    line: Vec<Entry>,
    /// Entries that are not granted.
    waiting: usize,
}

impl Slot {
    /// Puts a claim at the end of the line; true if it is granted.
    fn enter(&mut self, claim: Claim) -> bool {
        let granted = !self.line.iter().any(|e| e.claim.conflicts(&claim));
        self.line.push(Entry { claim, granted });
        self.waiting += usize::from(!granted);
        granted
    }

    /// Takes a granted claim out of the line and pushes to `granted` whom that lets through.
    fn leave(&mut self, claim: &Claim, granted: &mut Vec<Claim>) {
        let Some(at) = self.line.iter().position(|e| e.granted && e.claim.is(claim)) else {
            unreachable!("only granted claims are released, and those stand in every slot of their range")
        };
        self.line.remove(at);
        if self.waiting == 0 {
            return;
        }
        for i in at..self.line.len() {
            let e = self.line[i];
            if !e.granted
                && e.claim.range.overlaps(claim.range)
                && !self.line[..i].iter().any(|earlier| earlier.claim.conflicts(&e.claim))
            {
                self.line[i].granted = true;
                self.waiting -= 1;
                granted.push(e.claim);
            }
        }
    }
}

/// The in-flight table: one for a volume, shared by its queues.
#[derive(Debug)]
pub struct Table {
    slots: Vec<Mutex<Slot>>,
}

impl Default for Table {
    fn default() -> Self {
        Self::new()
    }
}

impl Table {
    /// A table in which nothing is claimed.
    pub fn new() -> Self {
        let slot = || Mutex::new(Slot { line: Vec::with_capacity(LINE), waiting: 0 });
        Self { slots: (0..SLOTS).map(|_| slot()).collect() }
    }

    /// Claims a range. An empty range is granted at once and holds nothing.
    pub fn claim(&self, claim: Claim) -> Outcome {
        self.advance(claim, None)
    }

    /// Gives a granted claim back, and pushes to `granted` every claim that is wholly granted by that, of this queue
    /// and of others, in the order in which they came through.
    pub fn release(&self, claim: Claim, granted: &mut Vec<Claim>) {
        let mut at = next_slot(claim.range, None);
        while let Some(slot) = at {
            let before = granted.len();
            self.lock(slot).leave(&claim, granted);
            // What was let through here goes on to its next slots; what waits again there is not granted yet.
            let mut i = before;
            while i < granted.len() {
                match self.advance(granted[i], Some(slot)) {
                    Outcome::Granted => i += 1,
                    Outcome::Waits => drop(granted.remove(i)),
                }
            }
            at = next_slot(claim.range, Some(slot));
        }
    }

    /// True if nobody holds or waits for anything.
    pub fn is_idle(&self) -> bool {
        (0..SLOTS).all(|slot| self.lock(slot).line.is_empty())
    }

    /// Enters the slots of a claim behind `after` until it has to wait.
    fn advance(&self, claim: Claim, after: Option<u64>) -> Outcome {
        let mut at = next_slot(claim.range, after);
        while let Some(slot) = at {
            if !self.lock(slot).enter(claim) {
                return Outcome::Waits;
            }
            at = next_slot(claim.range, Some(slot));
        }
        Outcome::Granted
    }

    fn lock(&self, slot: u64) -> MutexGuard<'_, Slot> {
        #[expect(clippy::cast_possible_truncation, reason = "below 256")]
        let slot = &self.slots[slot as usize];
        // A line is whole between any two statements that can panic.
        slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The slot with the lowest number above `after` that a range touches.
fn next_slot(range: Extent, after: Option<u64>) -> Option<u64> {
    if range.is_empty() {
        return None;
    }
    let first_stripe = range.offset / STRIPE;
    let last_stripe = (range.end() - 1) / STRIPE;
    let at = after.map_or(0, |slot| slot + 1);
    if last_stripe - first_stripe >= SLOTS - 1 {
        return (at < SLOTS).then_some(at);
    }
    let (first, last) = (first_stripe % SLOTS, last_stripe % SLOTS);
    let next = if first <= last {
        Some(at.max(first)).filter(|slot| *slot <= last)
    } else if at <= last {
        Some(at)
    } else {
        Some(at.max(first))
    };
    next.filter(|slot| *slot < SLOTS)
}

#[cfg(test)]
mod tests;
