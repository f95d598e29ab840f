//! What was asked and is not answered yet: switches of the queues, control requests, jobs, and ballots of members.

use std::collections::BTreeMap;

use crate::message::{ControlId, JobId, MemberId, MemberSet, QueueId, SwitchId};

/// Switches on their way.
#[derive(Debug, Default)]
pub(super) struct Switches {
    next: u64,
    /// Queues that have not answered yet, a bit per queue.
    waiting: BTreeMap<SwitchId, u64>,
}

impl Switches {
    /// A new switch for these queues.
    pub(super) fn begin(&mut self, queues: impl Iterator<Item = QueueId>) -> SwitchId {
        self.next += 1;
        let id = SwitchId(self.next);
        let mask = queues.fold(0, |mask, q| mask | 1 << q.0);
        if mask != 0 {
            self.waiting.insert(id, mask);
        }
        id
    }

    /// A queue has made it.
    pub(super) fn answered(&mut self, id: SwitchId, queue: QueueId) {
        if let Some(mask) = self.waiting.get_mut(&id) {
            *mask &= !(1 << queue.0);
            if *mask == 0 {
                self.waiting.remove(&id);
            }
        }
    }

    /// Every queue has made it.
    pub(super) fn done(&self, id: SwitchId) -> bool {
        !self.waiting.contains_key(&id)
    }

    /// Every queue has made all of them.
    pub(super) fn all_done(&self, ids: &[SwitchId]) -> bool {
        ids.iter().all(|id| self.done(*id))
    }
}

/// Numbers changes of the membership, rounds, rebuilds and scrubs: each attempt anew, and all in one row. So an answer to what was given
/// up is never taken for one to what was begun since.
#[derive(Debug, Default)]
pub(super) struct Attempts(u64);

impl Attempts {
    /// Comes before the first: no attempt has it.
    pub(super) const NONE: u64 = 0;

    pub(super) const fn next(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }
}

/// What a control request is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControlFor {
    /// Somebody needs to know the replica's state.
    State,
    /// The epoch change with this number.
    Epoch(u64),
    /// The epoch that was recorded last counts. Nothing waits for the answer.
    Counts,
    /// The next round; by the number of the ballot.
    Round(u64),
    /// A step of the chain operation with this number.
    Chain(u64),
    /// A chain operation of an engine before is finished on this replica.
    Finish,
    /// A member's chain, for the repair of chunks in doubt; by the number of the look.
    Doubt(u64),
    /// Somebody outside looks at the chain.
    Look,
    /// Nothing is in doubt any more.
    Resolved,
    /// The rebuild of this replica, attempt by number.
    Rebuild(u64),
    /// What another member missed: the rebuild of that one, attempt by number.
    Missed(MemberId, u64),
    /// A page of a layer's map.
    Map {
        /// Whose rebuild it is for.
        target: MemberId,
        /// Which attempt.
        attempt: u64,
        /// Of whose layer.
        side: super::rebuild::Side,
        /// Which page.
        number: u64,
    },
    /// Something about a fold.
    Fold,
    /// A page of a layer's map for the scrub with this number, and which page.
    Scrub(u64, u64),
    /// Checksums that the scrub with this number wants to be taken.
    Hash(u64),
    /// The clean end.
    Close,
}

/// An answer that is overdue is waited for once more for so long, ns. It may have come and lie there unread: where this process was stopped,
/// or did not get to run, its time has passed all the same.
const LAST_LOOK: u64 = 1_000_000_000;

/// Control requests on their way.
#[derive(Debug, Default)]
pub(super) struct Controls {
    next: u64,
    waiting: BTreeMap<ControlId, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    member: MemberId,
    purpose: ControlFor,
    what: &'static str,
    deadline: u64,
    /// The deadline has passed once.
    overdue: bool,
}

impl Controls {
    pub(super) fn begin(
        &mut self,
        member: MemberId,
        purpose: ControlFor,
        what: &'static str,
        deadline: u64,
    ) -> ControlId {
        self.next += 1;
        let id = ControlId(self.next);
        self.waiting.insert(id, Waiting { member, purpose, what, deadline, overdue: false });
        id
    }

    /// It is asked for a round, and has not answered yet: it does one thing after the other.
    pub(super) fn records_round(&self, member: MemberId) -> bool {
        self.waiting.values().any(|w| w.member == member && matches!(w.purpose, ControlFor::Round(_)))
    }

    /// An answer came; `None` if nobody waits for it any more.
    pub(super) fn answered(&mut self, id: ControlId) -> Option<(MemberId, ControlFor)> {
        self.waiting.remove(&id).map(|w| (w.member, w.purpose))
    }

    /// The member's session ended: none of its answers comes.
    pub(super) fn forget(&mut self, member: MemberId) {
        self.waiting.retain(|_, w| w.member != member);
    }

    /// Members whose answer is overdue and did not come by [`LAST_LOOK`] either, and to what.
    pub(super) fn overdue(&mut self, now: u64) -> Vec<(MemberId, &'static str)> {
        let mut late = Vec::new();
        for waiting in self.waiting.values_mut().filter(|w| w.deadline <= now) {
            if std::mem::replace(&mut waiting.overdue, true) {
                late.push((waiting.member, waiting.what));
            } else {
                waiting.deadline = now.saturating_add(LAST_LOOK);
            }
        }
        late
    }

    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.waiting.values().map(|w| w.deadline).min()
    }
}

/// What a job is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobFor {
    /// A range in doubt, before the volume opens; by its place in the list.
    InDoubt(usize),
    /// A piece of a chunk in doubt.
    Chunk(u64),
    /// The rebuild of this replica, attempt by number: a piece of it, by place.
    Rebuild(MemberId, u64, usize),
    /// The flush before the end of that rebuild.
    RebuildFlush(MemberId, u64),
    /// The flush after the snapshot with this number.
    ChainFlush(u64),
    /// A step of the scrub with this number.
    Scrub(u64, super::scrub::Step),
    /// A mark of the intent bitmap.
    ClearIntent,
    /// A flush so that marks can be taken back.
    IntentFlush,
    /// The last flush.
    CloseFlush,
}

/// Jobs on their way. Each is answered exactly once, however it ends.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    next: u64,
    waiting: BTreeMap<JobId, JobFor>,
}

impl Jobs {
    pub(super) fn begin(&mut self, purpose: JobFor) -> JobId {
        self.next += 1;
        let id = JobId(self.next);
        self.waiting.insert(id, purpose);
        id
    }

    pub(super) fn answered(&mut self, id: JobId) -> Option<JobFor> {
        self.waiting.remove(&id)
    }

    /// How many of a kind are on their way.
    pub(super) fn count(&self, of: impl Fn(JobFor) -> bool) -> usize {
        self.waiting.values().filter(|p| of(**p)).count()
    }

    /// No copy between members, and no comparison of them, is on its way.
    pub(super) fn no_copies(&self) -> bool {
        let copies =
            |p| matches!(p, JobFor::InDoubt(_) | JobFor::Chunk(_) | JobFor::Rebuild(..) | JobFor::Scrub(..));
        self.count(copies) == 0
    }
}

/// One request that every member of a set has to answer with yes.
///
/// A member whose session ends has not answered, whatever it said before: it is asked again when it is back, or leaves
/// the set when it is out. So a ballot is never complete because nobody is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ballot {
    sent: MemberSet,
    yes: MemberSet,
}

impl Ballot {
    /// Those of the set who are not asked yet.
    pub(super) const fn unasked(&self, of: MemberSet) -> MemberSet {
        of.minus(self.sent)
    }

    pub(super) const fn asked(&mut self, member: MemberId) {
        self.sent = self.sent.with(member);
    }

    pub(super) const fn says_yes(&mut self, member: MemberId) {
        self.sent = self.sent.with(member);
        self.yes = self.yes.with(member);
    }

    pub(super) const fn lost(&mut self, member: MemberId) {
        self.sent = self.sent.without(member);
        self.yes = self.yes.without(member);
    }

    /// Those who said yes.
    pub(super) const fn yes(&self) -> MemberSet {
        self.yes
    }

    /// Somebody was asked.
    pub(super) const fn begun(&self) -> bool {
        !self.sent.is_empty()
    }

    /// Everybody in the set said yes.
    pub(super) const fn complete(&self, of: MemberSet) -> bool {
        of.minus(self.yes).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_is_overdue_is_waited_for_once_more() {
        let mut controls = Controls::default();
        let (late, soon) = (MemberId(0), MemberId(1));
        controls.begin(late, ControlFor::Look, "a question", 10);
        let answered = controls.begin(soon, ControlFor::Look, "a question", 10);
        let looked = 30 * LAST_LOOK;
        assert_eq!((controls.overdue(9), controls.overdue(looked)), (vec![], vec![]));
        assert_eq!(controls.answered(answered), Some((soon, ControlFor::Look)), "it lay there");
        assert_eq!(controls.next_deadline(), Some(looked + LAST_LOOK));
        assert_eq!(controls.overdue(looked + LAST_LOOK), [(late, "a question")]);
    }
}
