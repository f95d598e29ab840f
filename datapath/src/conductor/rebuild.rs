//! Bringing a replica in sync while I/O goes on (`docs/invariants.md`, 8).
//!
//! ```text
//!  Clearing --> Asking --> Beginning --> Attaching --> Copying --> Flushing --> Ending --> Ready --> Recorded
//!  (its old     (the       (it marks     (all queues   (layers,    (all)        (its mark  (an epoch with it:
//!  operation)   source)    itself)       write to it)  then head)               goes)      see `membership`)
//! ```
//!
//! - Nothing is copied before every queue sends to the target and every write admitted before has completed.
//! - The head is copied last, under the order of overlapping requests, and over its whole length: what the target
//!   makes of a zeroed block depends on the layers below, which were not there yet when it came.
//! - When a snapshot is taken, the copy of the former head goes on under its new name.
//! - Whatever goes wrong, the target is forgotten and begins anew after a while, from nothing.

use std::collections::{BTreeMap, VecDeque};

use lh_block::Extent;
use lh_wire::{Control, LayerInfo};

use super::{Conductor, ControlFor, Job, JobFor, Phase, Role, sabotaged};
use crate::message::{JobResult, LayerRef, MemberId, MemberSet, Switch, SwitchId};

/// Bytes of one copy.
const PIECE: u64 = lh_wire::MAX_DATA as u64;

/// A rebuild on its way.
#[derive(Debug)]
pub(super) struct Rebuild {
    attempt: u64,
    source: MemberId,
    stage: Stage,
    copy: Copy,
}

#[derive(Debug)]
enum Stage {
    Clearing,
    Asking,
    Beginning,
    Attaching(SwitchId),
    Copying,
    Flushing { flying: bool, not_before: u64 },
    Ending,
    Ready,
    Recorded,
}

/// What is copied, and what is still to be.
#[derive(Debug, Default)]
struct Copy {
    /// Base first, the head last.
    layers: VecDeque<LayerCopy>,
    flying: BTreeMap<usize, (Option<LayerRef>, Extent)>,
    /// Not done, to be given again.
    again: Vec<(Option<LayerRef>, Extent)>,
    next_piece: usize,
    /// Bytes, holes included.
    done: u64,
    total: u64,
}

/// What of a layer has been given to a queue: everything below `next`.
#[derive(Debug)]
struct LayerCopy {
    layer: Option<LayerRef>,
    length: u64,
    next: u64,
}

impl Rebuild {
    /// The target has recorded an epoch which includes it, or may have.
    pub(super) const fn is_recorded(&self) -> bool {
        matches!(self.stage, Stage::Recorded)
    }

    pub(super) fn recorded(&mut self) {
        self.stage = Stage::Recorded;
    }

    /// Bytes done and bytes in all.
    pub(super) const fn progress(&self) -> (u64, u64) {
        (self.copy.done, self.copy.total)
    }

    const fn is_ready(&self) -> bool {
        matches!(self.stage, Stage::Ready | Stage::Recorded)
    }

    /// The target's chain is not yet the one that snapshots are taken of.
    const fn is_setting_up(&self) -> bool {
        matches!(self.stage, Stage::Clearing | Stage::Asking | Stage::Beginning | Stage::Attaching(_))
    }
}

impl Copy {
    fn of(layers: impl Iterator<Item = (Option<LayerRef>, u64)>) -> Self {
        let layers: VecDeque<LayerCopy> =
            layers.map(|(layer, length)| LayerCopy { layer, length, next: 0 }).collect();
        let total = layers.iter().map(|l| l.length).sum();
        Self { layers, total, ..Self::default() }
    }

    fn is_complete(&self) -> bool {
        self.flying.is_empty() && self.again.is_empty() && self.layers.iter().all(|l| l.next >= l.length)
    }

    /// The next piece to copy; the head only when all below it is there.
    fn next(&mut self) -> Option<(Option<LayerRef>, Extent)> {
        if let Some(piece) = self.again.pop() {
            return Some(piece);
        }
        while self.layers.len() > 1 && self.layers.front().is_some_and(|l| l.next >= l.length) {
            self.layers.pop_front();
        }
        let below_flies = self.flying.values().any(|(layer, _)| layer.is_some());
        let front =
            self.layers.front_mut().filter(|l| l.next < l.length && (l.layer.is_some() || !below_flies))?;
        let range = Extent::new(front.next, PIECE.min(front.length - front.next));
        front.next = range.end();
        Some((front.layer, range))
    }

    /// The head is this snapshot now; there is a new head, to be copied after it.
    fn head_became(&mut self, snapshot: LayerRef) {
        let Some(head) = self.layers.back_mut() else { return };
        head.layer = Some(snapshot);
        let length = head.length;
        for piece in self.again.iter_mut().filter(|(layer, _)| layer.is_none()) {
            piece.0 = Some(snapshot);
        }
        self.layers.push_back(LayerCopy { layer: None, length, next: 0 });
        self.total += length;
    }
}

impl Conductor {
    pub(super) fn advance_rebuilds(&mut self) -> bool {
        if !matches!(self.phase, Phase::Running) {
            return false;
        }
        self.ids().any(|member| match &self.replica(member).role {
            Role::Out => self.begin_rebuild(member),
            Role::Joining(_) => self.go_on_rebuilding(member),
            _ => false,
        })
    }

    /// Rebuilds are set up only while nothing else changes: the chain that the target gets is the volume's.
    fn begin_rebuild(&mut self, member: MemberId) -> bool {
        let replica = self.replica(member);
        let known = replica.link.is_up() && replica.state.is_some() && replica.rebuild_at <= self.now;
        let busy =
            self.closing.is_some() || self.chain_is_wanted() || !self.doubt.is_empty() || !self.is_calm();
        let old_copies = self.jobs.count(|p| matches!(p, JobFor::Rebuild(m, ..) if m == member)) > 0;
        if !known || busy || old_copies || replica.unwanted {
            return false;
        }
        let Some(source) = self.nearest(self.serving()) else { return false };
        let prepared = replica.state.as_ref().and_then(|s| s.prepared.as_ref().map(|(id, _)| *id));
        self.changes += 1;
        let attempt = self.changes;
        let stage = if let Some(id) = prepared {
            self.ask(member, ControlFor::Rebuild(attempt), Control::Abort { id });
            Stage::Clearing
        } else {
            self.ask_state(source);
            Stage::Asking
        };
        self.log(format!("replica {} is brought in sync from {}", self.name(member), self.name(source)));
        let rebuild = Rebuild { attempt, source, stage, copy: Copy::default() };
        self.replica_mut(member).role = Role::Joining(Box::new(rebuild));
        true
    }

    fn rebuild(&mut self, member: MemberId) -> Option<&mut Rebuild> {
        match &mut self.replica_mut(member).role {
            Role::Joining(rebuild) => Some(rebuild),
            _ => None,
        }
    }

    fn rebuild_of(&mut self, member: MemberId, attempt: u64) -> Option<&mut Rebuild> {
        self.rebuild(member).filter(|r| r.attempt == attempt)
    }

    fn go_on_rebuilding(&mut self, member: MemberId) -> bool {
        let (now, held) = (self.now, self.copies_held());
        let Some(rebuild) = self.rebuild(member) else { return false };
        let (attempt, source) = (rebuild.attempt, rebuild.source);
        match rebuild.stage {
            Stage::Asking => self.ask_to_begin(member, attempt, source),
            Stage::Attaching(switch) => {
                let drained = self.switches.done(switch) || sabotaged!(self, join_without_drain);
                drained && self.rebuild_goes_to(member, Stage::Copying)
            }
            Stage::Copying if rebuild.copy.is_complete() => {
                self.rebuild_goes_to(member, Stage::Flushing { flying: false, not_before: 0 })
            }
            Stage::Copying => !held && self.copy_next(member),
            Stage::Flushing { flying: false, not_before } if not_before <= now => {
                self.give(JobFor::RebuildFlush(member, attempt), Job::Flush);
                self.rebuild_goes_to(member, Stage::Flushing { flying: true, not_before: 0 })
            }
            _ => false,
        }
    }

    fn rebuild_goes_to(&mut self, member: MemberId, stage: Stage) -> bool {
        if let Some(rebuild) = self.rebuild(member) {
            rebuild.stage = stage;
        }
        true
    }

    /// The source has told its chain as it is now.
    fn ask_to_begin(&mut self, member: MemberId, attempt: u64, source: MemberId) -> bool {
        let Some(state) = self.replica(source).state.as_ref() else { return false };
        let (size, chain) = (state.size, state.chain.clone());
        self.volume.chain = chain.clone().into();
        self.ask(member, ControlFor::Rebuild(attempt), Control::RebuildBegin { size, chain });
        self.rebuild_goes_to(member, Stage::Beginning)
    }

    pub(super) fn on_rebuild_yes(&mut self, member: MemberId, attempt: u64) {
        let Some(rebuild) = self.rebuild_of(member, attempt) else { return };
        let source = rebuild.source;
        match rebuild.stage {
            Stage::Clearing => {
                rebuild.stage = Stage::Asking;
                self.ask_state(source);
            }
            Stage::Beginning => {
                let copy = self.copy_of_volume();
                let switch = self.switch(Switch::Attach { member });
                self.replica_mut(member).attached = true;
                if let Some(rebuild) = self.rebuild(member) {
                    rebuild.copy = copy;
                    rebuild.stage = Stage::Attaching(switch);
                }
            }
            Stage::Ending => rebuild.stage = Stage::Ready,
            _ => {}
        }
    }

    fn copy_of_volume(&mut self) -> Copy {
        let chain = self.volume.chain.clone();
        let length = |l: &LayerInfo| if l.name.is_empty() { self.volume.size } else { l.length };
        let lengths: Vec<u64> = chain.iter().map(length).collect();
        let layers: Vec<_> = chain.iter().zip(lengths).map(|(l, n)| (self.layer_ref(&l.name), n)).collect();
        Copy::of(layers.into_iter())
    }

    pub(super) fn on_rebuild_no(&mut self, member: MemberId, attempt: u64, text: &str) {
        let Some(rebuild) = self.rebuild_of(member, attempt) else { return };
        let source = rebuild.source;
        if matches!(rebuild.stage, Stage::Clearing) {
            // It has nothing to take back any more.
            rebuild.stage = Stage::Asking;
            self.ask_state(source);
        } else {
            self.lose(member, text);
        }
    }

    fn copy_next(&mut self, member: MemberId) -> bool {
        let copies = self.config.limits.copies as usize;
        let Some(rebuild) = self.rebuild(member).filter(|r| r.copy.flying.len() < copies) else {
            return false;
        };
        let Some((layer, range)) = rebuild.copy.next() else { return false };
        let (attempt, source, piece) = (rebuild.attempt, rebuild.source, rebuild.copy.next_piece);
        rebuild.copy.next_piece += 1;
        rebuild.copy.flying.insert(piece, (layer, range));
        let targets = MemberSet::EMPTY.with(member);
        let job = Job::Equalise { layer, range, source, targets };
        self.give(JobFor::Rebuild(member, attempt, piece), job);
        true
    }

    pub(super) fn on_piece_copied(
        &mut self,
        member: MemberId,
        attempt: u64,
        piece: usize,
        result: JobResult,
    ) {
        let Some(rebuild) = self.rebuild_of(member, attempt) else { return };
        let Some(given) = rebuild.copy.flying.remove(&piece) else { return };
        match result {
            JobResult::Done { .. } => rebuild.copy.done += given.1.len,
            JobResult::Skipped => rebuild.copy.again.push(given),
            // Whoever it failed on: the source may have folded the layer away. It begins anew.
            JobResult::Failed { .. } => self.lose(member, "a copy failed"),
        }
    }

    pub(super) fn on_rebuild_flushed(&mut self, member: MemberId, attempt: u64, result: JobResult) {
        let not_before = self.now.saturating_add(self.config.limits.retry);
        let Some(rebuild) = self.rebuild_of(member, attempt) else { return };
        if !matches!(rebuild.stage, Stage::Flushing { .. }) {
            return;
        }
        if matches!(result, JobResult::Done { .. }) {
            rebuild.stage = Stage::Ending;
            self.ask(member, ControlFor::Rebuild(attempt), Control::RebuildEnd);
        } else {
            rebuild.stage = Stage::Flushing { flying: false, not_before };
        }
    }

    /// The epoch with them counts, every queue may read from them.
    pub(super) fn on_change_done(&mut self, joiners: MemberSet) {
        for member in self.linked(joiners.and(self.serving())).iter() {
            self.replica_mut(member).backoff = 0;
            // What it marked while it was filled is taken back after a flush, like all other marks.
            self.ask_state(member);
            self.tell_resolved_after(Vec::new());
        }
    }

    /// Those who hold everything and only lack an epoch.
    pub(super) fn ready_joiners(&self) -> MemberSet {
        let ready = self.select(|r| matches!(&r.role, Role::Joining(rebuild) if rebuild.is_ready()));
        if self.closing.is_some() { MemberSet::EMPTY } else { self.linked(ready) }
    }

    pub(super) fn is_setting_up_rebuild(&self) -> bool {
        !self.select(|r| matches!(&r.role, Role::Joining(rebuild) if rebuild.is_setting_up())).is_empty()
    }

    /// A snapshot was decided: rebuilds go on with the former head under its name.
    pub(super) fn head_became(&mut self, snapshot: LayerRef) {
        for member in self.attached_joiners().iter() {
            if let Some(rebuild) = self.rebuild(member).filter(|r| matches!(r.stage, Stage::Copying)) {
                rebuild.copy.head_became(snapshot);
            }
        }
    }

    /// A rebuild of it ended without success: the next one waits.
    pub(super) fn set_back(&mut self, member: MemberId) {
        let (limit, first) = (self.config.limits.rebuild_backoff, self.config.limits.retry);
        let now = self.now;
        let replica = self.replica_mut(member);
        replica.backoff = replica.backoff.saturating_mul(2).clamp(first, limit);
        replica.rebuild_at = now.saturating_add(replica.backoff);
    }

    /// Rebuilds that copy from this replica cannot go on.
    pub(super) fn lose_source(&mut self, source: MemberId) {
        let of_it = |r: &super::Replica| matches!(&r.role, Role::Joining(rebuild) if rebuild.source == source && !rebuild.is_ready());
        for member in self.select(of_it).iter() {
            self.lose(member, "its source failed");
        }
    }

    /// Ends all rebuilds.
    pub(super) fn drop_rebuilds(&mut self, why: &str) {
        for member in self.select(|r| matches!(r.role, Role::Joining(_))).iter() {
            self.lose(member, why);
        }
    }

    pub(super) fn rebuild_deadline(&self) -> Option<u64> {
        let due = self.ids().filter_map(|m| match &self.replica(m).role {
            Role::Out if self.replica(m).link.is_up() => Some(self.replica(m).rebuild_at),
            Role::Joining(rebuild) => match rebuild.stage {
                Stage::Flushing { flying: false, not_before } => Some(not_before),
                _ => None,
            },
            _ => None,
        });
        due.filter(|at| *at > self.now).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn take(copy: &mut Copy) -> Option<(Option<LayerRef>, u64)> {
        let (layer, range) = copy.next()?;
        copy.flying.insert(copy.next_piece, (layer, range));
        copy.next_piece += 1;
        Some((layer, range.offset))
    }

    #[test]
    fn the_head_waits_for_all_below_it() {
        let s = Some(LayerRef(0));
        let mut copy = Copy::of([(s, MIB), (None, 2 * MIB)].into_iter());
        assert_eq!(take(&mut copy), Some((s, 0)));
        assert_eq!(take(&mut copy), None, "a piece of the layer below is on its way");
        copy.flying.clear();
        assert_eq!(take(&mut copy), Some((None, 0)));
        assert_eq!(take(&mut copy), Some((None, MIB)));
        assert_eq!(take(&mut copy), None);
        assert!(!copy.is_complete());
        copy.flying.clear();
        assert!(copy.is_complete());
    }

    #[test]
    fn after_a_snapshot_the_former_head_goes_on_and_the_new_one_follows() {
        let mut copy = Copy::of([(None, 2 * MIB)].into_iter());
        assert_eq!(take(&mut copy), Some((None, 0)));
        copy.flying.clear();
        copy.again.push((None, Extent::new(0, MIB)));
        let s = LayerRef(7);
        copy.head_became(s);
        assert_eq!(take(&mut copy), Some((Some(s), 0)));
        assert_eq!(take(&mut copy), Some((Some(s), MIB)));
        assert_eq!(take(&mut copy), None);
        copy.flying.clear();
        assert_eq!(take(&mut copy), Some((None, 0)));
        assert_eq!(copy.total, 4 * MIB);
    }
}
