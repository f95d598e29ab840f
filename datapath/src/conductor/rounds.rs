//! Rounds of taking marks back, each of which all members have recorded before the next one is asked for
//! (`docs/invariants.md`, 8; `docs/decisions/0024-marks-are-taken-back-in-rounds.md`).
//!
//! A directory that is put back as it was some time ago tells the epoch that counts, and lacks what was written since, of which
//! nobody has a mark any more. By its round it is told from the member that it was: whoever is behind another one
//! ([`lh_block::Epoch::is_behind`]) is an older copy.
//!
//! - Two members are never more than one round apart: so nobody is taken for an older copy because somebody died.
//! - The marks go of what is covered by a flush that had ended before the round *before* the last one was asked for. Whoever has been
//!   copied in that round, or later, has it.
//! - A round that not all have recorded is asked for again, and covers no more than when it was asked for first. It may also be
//!   recorded with the next epoch, which is made in it.

use lh_block::{Epoch, Round};

use super::ask::{Attempts, Ballot};
use super::{Conductor, ControlFor, sabotaged};
use crate::message::MemberId;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    /// The present one, and the one that was told at the start.
    round: Round,
    told: Option<Round>,
    /// So many are still to be agreed to.
    wanted: u32,
    /// The present one was asked for, and not all members have said yes.
    open: bool,
    ballot: Ballot,
    ballot_number: u64,
    /// The last flush that was complete everywhere when the present round was first asked for; and when the one before it was.
    flush: u64,
    flush_before: u64,
    /// What this flush covers need not be marked.
    covered: u64,
    /// Somebody had no space for its record: nobody is asked before this time.
    rests_until: u64,
}

impl Rounds {
    /// The present one.
    pub(super) const fn present(&self) -> Round {
        self.round
    }

    /// At a start: members have told this one. What it covers nobody knows any more.
    pub(super) fn go_on_from(&mut self, told: Option<Round>) {
        self.round = self.round.max(told.unwrap_or_default());
        self.told = told;
    }

    /// Whoever has recorded this was rounds ahead of all that the start began with: they are older copies.
    pub(super) fn began_behind(&self, recorded: &Epoch) -> bool {
        Epoch { round: self.told, ..Epoch::default() }.is_behind(recorded)
    }

    /// The present one, or the next one.
    pub(super) fn want_one(&mut self) {
        self.wanted = self.wanted.max(1);
    }

    /// So that a copy from before now is behind: of the first one whatever was flushed is covered.
    pub(super) fn want_two_more(&mut self) {
        self.rests_until = 0;
        self.wanted = self.wanted.max(2 + u32::from(self.open));
    }

    /// Nothing is asked for, or can be now.
    pub(super) const fn are_settled(&self, now: u64) -> bool {
        self.wanted == 0 || self.rests_until > now
    }

    pub(super) fn says_yes(&mut self, member: MemberId, ballot_number: u64) {
        if self.ballot_number == ballot_number {
            self.ballot.says_yes(member);
        }
    }

    /// Nothing counts that the member said in its session.
    pub(super) const fn lost(&mut self, member: MemberId) {
        self.ballot.lost(member);
    }

    fn ask_anew(&mut self, attempts: &mut Attempts) {
        self.ballot = Ballot::default();
        self.ballot_number = attempts.next();
    }

    /// Another one begins; what is complete everywhere now is what it covers once the next one is agreed to.
    const fn open(&mut self, flush: u64) {
        self.open = true;
        self.round = self.round.next();
        self.flush_before = std::mem::replace(&mut self.flush, flush);
    }

    const fn agreed(&mut self) {
        self.open = false;
        self.wanted -= 1;
        self.covered = self.flush_before;
    }
}

impl Conductor {
    /// The epoch that counts, as its members record it anew: all of them have it, and are in the present round.
    pub(super) fn again(&self) -> Option<Epoch> {
        let epoch = self.epochs.current()?.clone();
        let after = Some(epoch.order()).filter(|_| !sabotaged!(self, after_unnoted));
        Some(Epoch { after: after.or(epoch.after), round: Some(self.rounds.present()), ..epoch })
    }

    pub(super) fn advance_rounds(&mut self) -> bool {
        if self.rounds.are_settled(self.desk.now) || self.chain.is_busy() {
            return false;
        }
        if !self.is_calm() {
            // An epoch may be made without one that has answered, or with one that was not asked.
            if self.rounds.ballot.begun() {
                self.rounds.ask_anew(&mut self.attempts);
            }
            return false;
        }
        if !self.rounds.open {
            self.rounds.open(self.config.shared.flush_everywhere());
            self.rounds.ask_anew(&mut self.attempts);
        }
        let Some(epoch) = self.again() else { return false };
        let control = self.set_epoch(epoch);
        let (members, mut ballot) = (self.replicas.members(), self.rounds.ballot);
        self.poll(&mut ballot, members, ControlFor::Round(self.rounds.ballot_number), &control);
        self.rounds.ballot = ballot;
        let all = ballot.complete(members);
        if all {
            self.rounds.agreed();
        }
        all
    }

    /// A full disk: marks stay meanwhile. Who is to be closed has to have it.
    pub(super) fn on_round_refused(&mut self, member: MemberId, text: &str) {
        if self.closing.is_some() {
            return self.lose(member, text);
        }
        self.rounds.ask_anew(&mut self.attempts);
        self.rounds.rests_until = self.desk.now.saturating_add(self.desk.limits.clear_every_ns);
    }

    /// The highest flush such that marks may go of what it covers.
    pub(super) fn covered(&self) -> u64 {
        match (sabotaged!(self, rounds_unasked), sabotaged!(self, rounds_unpinned)) {
            (true, _) => u64::MAX,
            (false, true) => self.config.shared.flush_everywhere(),
            (false, false) => self.rounds.covered,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lh_block::{Generation, Instance};
    use lh_wire::{Control, ReplicaState};

    use super::*;
    use crate::conductor::Quorum;
    use crate::conductor::choose::{Candidate, Choice, choose};
    use crate::conductor::intent::tests::conductor;
    use crate::shared::Shared;

    fn epoch(generation: u64, round: Option<u64>) -> Epoch {
        Epoch {
            generation: Generation::from(generation),
            counter: 1,
            members: ["1", "2", "3"].map(str::to_owned).to_vec(),
            id: Instance(generation.into()),
            after: None,
            round: round.map(Round),
        }
    }

    fn knows(epoch: &Epoch) -> Option<ReplicaState> {
        let previous_generation = Generation::from(8);
        Some(ReplicaState { epoch: Some(epoch.clone()), previous_generation, ..ReplicaState::default() })
    }

    /// Which of the replicas 1, 2 and 3 a volume starts with.
    fn chosen(
        quorum: Quorum,
        authority: Option<&Option<Epoch>>,
        states: &[Option<ReplicaState>; 3],
    ) -> Result<Vec<u8>, String> {
        let candidates: Vec<_> = (0..3)
            .zip(["1", "2", "3"])
            .zip(states)
            .map(|((id, name), state)| Candidate {
                id: MemberId(id),
                name,
                counts: true,
                state: state.as_ref(),
            })
            .collect();
        match choose(quorum, Generation::from(9), authority, 2, &candidates) {
            Choice::Start(start) => Ok(start.members.iter().map(|m| m.0 + 1).collect()),
            Choice::Wait(why) => Err(why),
        }
    }

    /// 3 has the disk that it had some hours ago.
    #[test]
    fn who_is_rounds_behind_another_one_is_none_to_start_with() {
        let at = |round| epoch(1, Some(round));
        let next = |round| Epoch { after: Some(at(0).order()), ..epoch(2, Some(round)) };
        let asked = [
            (Quorum::Any, Some(Some(at(0)))),
            (Quorum::Any, Some(None)),
            (Quorum::Majority, None),
            (Quorum::Unsafe, None),
        ];
        for (quorum, authority) in &asked {
            let start = |states| chosen(*quorum, authority.as_ref(), &states).unwrap();
            let with = |third: Epoch| start([knows(&at(8)), knows(&at(9)), knows(&third)]);
            assert_eq!(with(at(7)), [1, 2], "{quorum:?}");
            for well in [at(8), at(9), epoch(1, None)] {
                assert_eq!(with(well.clone()), [1, 2, 3], "{quorum:?}: {well:?}");
            }
            // The next epoch was being recorded.
            let with = |third: Epoch| start([knows(&next(9)), knows(&at(8)), knows(&third)]);
            assert_eq!((with(at(7)), with(at(8))), (vec![1, 2], vec![1, 2, 3]), "{quorum:?}");
        }
        let authority = Some(Some(at(0)));
        let alone = |first| chosen(Quorum::Any, authority.as_ref(), &[first, None, knows(&at(3))]);
        assert_eq!(alone(None), Ok(vec![3]), "nobody is here to tell");
        // Another program has written that directory: its records tell of nobody.
        let foreign = knows(&at(9)).map(|s| ReplicaState { imported: true, ..s });
        assert_eq!(alone(foreign), Ok(vec![3]));
        // Who is of no use itself tells all the same.
        let unended = knows(&at(9)).map(|s| ReplicaState { rebuilding: true, ..s });
        assert!(alone(unended).is_err());
    }

    /// The flush of which marks may go is one that had ended before the round was asked for that all were in before the last one.
    #[test]
    fn a_round_covers_what_was_flushed_before_it_was_first_asked_for() {
        let mut rounds = Rounds::default();
        rounds.go_on_from(Some(Round(7)));
        let mut agree = |flushed: u64, asked_again: bool| {
            rounds.want_one();
            rounds.open(flushed);
            if asked_again {
                // Somebody was lost, and there are later flushes by now.
                rounds.ask_anew(&mut Attempts::default());
            }
            rounds.agreed();
            (rounds.present(), rounds.covered)
        };
        assert_eq!(agree(10, false), (Round(8), 0), "what engines before have flushed is not known");
        assert_eq!(agree(20, true), (Round(9), 10));
        assert_eq!(agree(30, false), (Round(10), 20));
        assert!(rounds.are_settled(0));
        rounds.rests_until = 9;
        rounds.want_two_more();
        assert_eq!((rounds.wanted, rounds.are_settled(0)), (2, false));
        rounds.open(40);
        rounds.want_two_more();
        assert_eq!(rounds.wanted, 3, "the one that is asked for may be one of before");
    }

    /// A replica does one thing after the other, and its disk may be busy for as long as a round may take.
    #[test]
    fn what_a_replica_is_asked_behind_a_round_may_take_as_long() {
        let mut conductor = conductor(&Arc::new(Shared::new(16 << 20, 4 << 20)));
        let (slow, other) = (MemberId(0), MemberId(1));
        let limits = conductor.desk.limits;
        conductor.desk.ask(slow, ControlFor::Round(1), Control::State);
        conductor.desk.ask(slow, ControlFor::Look, Control::State);
        assert_eq!(conductor.desk.controls.next_deadline(), Some(limits.control_syncs_ns));
        conductor.desk.ask(other, ControlFor::Look, Control::State);
        assert_eq!(conductor.desk.controls.next_deadline(), Some(limits.control_ns));
    }
}
