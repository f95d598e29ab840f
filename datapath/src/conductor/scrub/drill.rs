//! The close look at a few blocks: every member says of its own copy whether it fits its checksums, every two copies are
//! compared, then it is judged, and what is wrong repaired.

use std::collections::VecDeque;

use lh_block::{BLOCK, Extent};
use lh_wire::Verified;

use super::judge::{Evidence, Judgement, Source};
use super::{Conductor, Finding, Flaw, Job, JobFor, Mend, Scrub, Step};
use crate::message::{JobResult, MemberId, MemberSet};

/// Looks at the same blocks, because something changed meanwhile or a member was lost.
const TRIES_MAX: u32 = 5;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Drill {
    pub(super) range: Extent,
    members: MemberSet,
    evidence: Evidence,
    /// Members and pairs that were not asked.
    verify: VecDeque<MemberId>,
    pairs: VecDeque<(MemberId, MemberId)>,
    /// What is left to be done about it; `None`: not judged.
    judged: Option<VecDeque<Judgement>>,
    asks: Asks,
    tries: u32,
    retry_at: u64,
}

/// What was asked last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    Nothing,
    Verify(MemberId),
    Pair(MemberId, MemberId),
    Repair(Judgement),
    /// The repair is looked at.
    Confirm(Judgement),
}

impl Drill {
    pub(super) fn new(range: Extent, members: MemberSet) -> Self {
        Self {
            range,
            members,
            evidence: Evidence::default(),
            verify: members.iter().collect(),
            pairs: members
                .iter()
                .flat_map(|a| members.iter().filter(move |b| a < *b).map(move |b| (a, b)))
                .collect(),
            judged: None,
            asks: Asks::Nothing,
            tries: 0,
            retry_at: 0,
        }
    }

    fn again(&mut self, members: MemberSet, retry_at: u64) {
        *self = Self { tries: self.tries + 1, retry_at, ..Self::new(self.range, members) };
    }
}

impl Scrub {
    /// When the close look is tried again.
    pub(super) fn retry_at(&self) -> u64 {
        self.drill.as_ref().map_or(0, |drill| drill.retry_at)
    }
}

impl Conductor {
    pub(super) fn drill_on(&mut self, attempt: u64) -> bool {
        let (now, serving) = (self.desk.now, self.replicas.serving());
        let Some(scrub) = self.scrubs.of(attempt) else { return false };
        let Some(layer) = scrub.layer.as_ref().map(|layer| layer.layer) else { return false };
        let repair = scrub.status.repair;
        let Some(drill) = scrub.drill.as_mut() else { return false };
        if drill.asks != Asks::Nothing || drill.retry_at > now {
            return false;
        }
        if drill.members != serving {
            drill.again(serving, 0);
            drill.tries -= 1;
            return true;
        }
        let range = drill.range;
        let job = if let Some(member) = drill.verify.pop_front() {
            drill.asks = Asks::Verify(member);
            Job::Verify { layer, range, member }
        } else if let Some((a, b)) = drill.pairs.pop_front() {
            drill.asks = Asks::Pair(a, b);
            Job::Compare { layer, range, source: a, targets: MemberSet::EMPTY.with(b) }
        } else if let Some(judged) = &mut drill.judged {
            let Some(judgement) = judged.pop_front() else {
                scrub.drill = None;
                return true;
            };
            match judgement.source {
                Source::From(source) if repair => {
                    drill.asks = Asks::Repair(judgement);
                    let (range, targets) = (judgement.range, judgement.bad());
                    Job::Equalise {
                        layer,
                        range,
                        source,
                        others: MemberSet::EMPTY,
                        targets,
                        compare: false,
                        merged: false,
                        repair: true,
                    }
                }
                Source::From(_) => return self.found(attempt, &judgement, Mend::Reported),
                Source::Nobody => return self.found(attempt, &judgement, Mend::NoSource),
                Source::Unsure => return self.found(attempt, &judgement, Mend::Unsure),
                Source::Conflict => return self.found(attempt, &judgement, Mend::Conflict),
            }
        } else {
            return self.judge(attempt);
        };
        self.desk.give(JobFor::Scrub(attempt, Step::Drill), job);
        true
    }

    fn judge(&mut self, attempt: u64) -> bool {
        let (serving, retry_at) =
            (self.replicas.serving(), self.desk.now.saturating_add(self.desk.limits.retry_ns));
        let Some(scrub) = self.scrubs.of(attempt) else { return false };
        let Some(drill) = scrub.drill.as_mut() else { return false };
        match drill.evidence.judge(drill.range) {
            // What was sound when it was asked for may have rotted before it was compared.
            Some(judged) if drill.tries == 0 && judged.iter().any(|j| j.source == Source::Conflict) => {
                drill.again(serving, 0);
            }
            Some(judged) => drill.judged = Some(judged.into()),
            None if drill.tries < TRIES_MAX => drill.again(serving, retry_at),
            None => scrub.give_up(),
        }
        true
    }

    /// One more finding for each replica that it is of.
    fn found(&mut self, attempt: u64, judgement: &Judgement, mend: Mend) -> bool {
        for member in judgement.bad().iter() {
            let replica = self.replicas.name(member).to_owned();
            let flaw = if judgement.rotten.has(member) { Flaw::Rotten } else { Flaw::Differs };
            let Some(scrub) = self.scrubs.of(attempt) else { return false };
            let Some(layer) = scrub.layer.as_ref().map(|layer| layer.name.clone()) else { return false };
            scrub.status.add(Finding { replica, layer, range: judgement.range, flaw, mend });
        }
        true
    }

    pub(super) fn on_drilled(&mut self, attempt: u64, result: JobResult) {
        let (serving, retry_at) =
            (self.replicas.serving(), self.desk.now.saturating_add(self.desk.limits.retry_ns));
        let Some(scrub) = self.scrubs.of(attempt) else { return };
        let layer = scrub.layer.as_ref().map(|layer| layer.layer);
        let (Some(drill), Some(layer)) = (scrub.drill.as_mut(), layer) else { return };
        match (std::mem::replace(&mut drill.asks, Asks::Nothing), result) {
            (Asks::Verify(member), JobResult::Verified(own)) => drill.evidence.own.push((member, own)),
            (Asks::Verify(member), JobResult::Failed { .. }) if serving.has(member) => {
                self.cannot_read(attempt, member);
            }
            (Asks::Pair(a, b), JobResult::Compared { parts }) => drill.evidence.differ.push((a, b, parts)),
            (Asks::Repair(judgement), JobResult::Done { .. }) => {
                let Source::From(source) = judgement.source else { return };
                drill.asks = Asks::Confirm(judgement);
                let (range, targets) = (judgement.range, judgement.bad());
                let job = Job::Compare { layer, range, source, targets };
                self.desk.give(JobFor::Scrub(attempt, Step::Drill), job);
            }
            (Asks::Confirm(judgement), JobResult::Compared { parts: 0 }) => {
                self.found(attempt, &judgement, Mend::Repaired);
            }
            (Asks::Confirm(judgement), JobResult::Compared { .. }) => {
                self.not_mended(attempt, &judgement);
            }
            (Asks::Repair(judgement) | Asks::Confirm(judgement), JobResult::Failed { member })
                if serving.has(member) && drill.tries >= TRIES_MAX =>
            {
                self.not_mended(attempt, &judgement);
            }
            (Asks::Nothing, _) => {}
            // Somebody was lost, or what was sound a moment ago is not any more: all is looked at again.
            _ if drill.tries < TRIES_MAX => drill.again(serving, retry_at),
            _ => scrub.give_up(),
        }
    }

    /// It was tried, and is as it was.
    fn not_mended(&mut self, attempt: u64, judgement: &Judgement) {
        let drill = self.scrubs.of(attempt).and_then(|scrub| scrub.drill.as_ref());
        let unreadable = drill.map_or(MemberSet::EMPTY, |drill| drill.evidence.unreadable);
        self.found(attempt, judgement, Mend::Failed);
        self.give_up_mending(attempt, judgement, unreadable);
    }

    /// Some block of the range cannot be read: they are looked at one by one.
    fn cannot_read(&mut self, attempt: u64, member: MemberId) {
        let Some(scrub) = self.scrubs.of(attempt) else { return };
        let Some(drill) = scrub.drill.as_mut() else { return };
        if drill.range.len <= BLOCK {
            drill.evidence.own.push((member, Verified { rotten: 1, known: 1 }));
            drill.evidence.unreadable = drill.evidence.unreadable.with(member);
            drill.pairs.retain(|(a, b)| *a != member && *b != member);
            return;
        }
        let range = drill.range;
        scrub.drill = None;
        for n in (0..range.len / BLOCK).rev() {
            scrub.suspects.push_front(Extent::new(range.offset + n * BLOCK, BLOCK));
        }
    }
}
