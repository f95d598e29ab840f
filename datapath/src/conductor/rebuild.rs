//! Bringing a replica in sync while I/O goes on (`docs/invariants.md`, 8).
//!
//! ```text
//!  Asking --> Beginning --> Attaching --> Remembering --> Copying --> Flushing --> Ready --> Recorded --> Ending --> Whole
//!  (the       (it marks     (all queues   (what did it    (layers,    (all)                 (an epoch    (its mark
//!  source)    itself)       write to it)  miss?)          then head)                        with it)     goes)
//! ```
//!
//! - From `Ready` on the change of the membership leads. The mark goes together with the record of the epoch, and neither without
//!   the other: in its older epoch the target holds what the other members of that do not.
//! - Nothing is copied, and nobody asked what it missed, before every queue sends to the target and every write admitted
//!   before has completed.
//! - What is looked at is planned from what target and source say of themselves ([`mod@plan`]): what members remember since
//!   the target left, together with what it may have too much itself; where that is in doubt, everything.
//! - The head is copied under the order of overlapping requests.
//! - When a snapshot is taken, the copy of the former head goes on under its new name.
//! - Whatever goes wrong, the target is forgotten and begins anew after a while. What it holds by then is compared.

mod copy;
mod memory;
pub(super) mod pace;
mod plan;

use std::sync::Arc;

use lh_block::Epoch;
use lh_wire::{Control, LayerInfo, MapPage, ReplicaState};

use super::{Conductor, ControlFor, Job, JobFor, Phase, Quorum, Replicas, Role, sabotaged};
use crate::message::{JobResult, LayerRef, MemberId, MemberSet, Switch, SwitchId};

use copy::{Copy, Wanted};
use memory::Memory;
use plan::{How, Plan, plan};

pub(super) use copy::Side;
pub(super) use pace::Pace;

/// A rebuild on its way.
#[derive(Debug)]
pub(super) struct Rebuild {
    attempt: u64,
    source: MemberId,
    stage: Stage,
    plan: Plan,
    /// The source's chain that was planned by. Another member, whom somebody looks at meanwhile, may have folded what this one has.
    chain: Arc<Vec<LayerInfo>>,
    /// The last epoch that the target was in.
    base: Option<Epoch>,
    copy: Copy,
    /// Nothing more is given before this time, so that clients have their turn.
    rests_until: u64,
    /// The source has said that something it gives does not fit its checksums.
    rotten: bool,
}

#[derive(Debug)]
enum Stage {
    Asking,
    Beginning,
    Attaching(SwitchId),
    Remembering(Memory),
    Copying,
    Awaiting(SwitchId),
    Flushing { flying: bool, not_before: u64 },
    Ready,
    Recorded,
    Ending,
    Whole,
}

impl Rebuild {
    /// An epoch which includes the target counts for it, or may.
    pub(super) const fn may_count(&self) -> bool {
        matches!(self.stage, Stage::Ending | Stage::Whole)
    }

    /// Its mark is gone.
    const fn is_whole(&self) -> bool {
        matches!(self.stage, Stage::Whole)
    }

    /// Bytes looked at, to be looked at in all, and found different.
    pub(super) fn progress(&self) -> (u64, u64, u64) {
        (self.copy.done, self.copy.total(), self.copy.copied)
    }

    /// It compares everything; or it has not begun, and will be told to.
    pub(super) fn is_thorough(&self) -> bool {
        self.plan.how.iter().all(|how| *how == How::Whole)
    }

    const fn is_ready(&self) -> bool {
        matches!(self.stage, Stage::Ready | Stage::Recorded | Stage::Ending | Stage::Whole)
    }

    /// The target's chain is not yet the one that snapshots are taken of.
    pub(super) const fn is_setting_up(&self) -> bool {
        matches!(self.stage, Stage::Asking | Stage::Beginning | Stage::Attaching(_) | Stage::Remembering(_))
    }
}

/// Why the target cannot be filled: what lies below all layers is copied by nobody, and it would read something else there for ever.
fn other_backing(target: &ReplicaState, source: &ReplicaState) -> Option<&'static str> {
    match (target.backed?, source.backed?) {
        (false, true) => Some(
            "it has no backing file, and the replicas in sync stand on one, which no copy brings over: take it out, and add another one",
        ),
        (true, false) => Some("it stands on a backing file, and the replicas in sync on none"),
        _ => None,
    }
}

impl Replicas {
    fn rebuild(&mut self, member: MemberId) -> Option<&mut Rebuild> {
        match &mut self.get_mut(member).role {
            Role::Joining(rebuild) => Some(rebuild),
            _ => None,
        }
    }

    fn rebuild_of(&mut self, member: MemberId, attempt: u64) -> Option<&mut Rebuild> {
        self.rebuild(member).filter(|r| r.attempt == attempt)
    }

    fn rebuild_goes_to(&mut self, member: MemberId, stage: Stage) -> bool {
        if let Some(rebuild) = self.rebuild(member) {
            rebuild.stage = stage;
        }
        true
    }

    /// An epoch with these is about to be recorded by them.
    pub(super) fn mark_recorded(&mut self, joiners: MemberSet) {
        for member in joiners.iter() {
            if let Some(rebuild) = self.rebuild(member).filter(|r| matches!(r.stage, Stage::Ready)) {
                rebuild.stage = Stage::Recorded;
            }
        }
    }

    /// Blocks of this member do not fit their checksums: what is copied from it is not known to be sound.
    pub(super) fn doubt_source(&mut self, source: MemberId) {
        for member in self.ids() {
            if let Some(rebuild) = self.rebuild(member).filter(|r| r.source == source) {
                rebuild.rotten = true;
            }
        }
    }

    pub(super) fn is_setting_up_rebuild(&self) -> bool {
        !self.select(|r| matches!(&r.role, Role::Joining(rebuild) if rebuild.is_setting_up())).is_empty()
    }

    /// Those whom every queue writes to, on a chain that is the members'.
    pub(super) fn filling(&self) -> MemberSet {
        let before = |stage: &Stage| matches!(stage, Stage::Asking | Stage::Beginning | Stage::Attaching(_));
        self.linked(self.select(|r| matches!(&r.role, Role::Joining(rebuild) if !before(&rebuild.stage))))
    }

    /// A snapshot was decided: rebuilds go on with the former head under its name.
    pub(super) fn head_became(&mut self, snapshot: LayerRef, name: &str) {
        for member in self.attached_joiners().iter() {
            if let Some(rebuild) = self.rebuild(member).filter(|r| matches!(r.stage, Stage::Copying)) {
                rebuild.copy.head_became(snapshot, name);
            }
        }
    }
}

impl Conductor {
    /// Why the replica is not to be overwritten: it came too late to say that the authority, or the replica that was begun with, was put
    /// back, and may hold what nobody here has. With the other quorums the newest epoch found was started from.
    fn knows_better(&self, own: &ReplicaState) -> Option<&'static str> {
        let recorded = own.epoch.as_ref().filter(|e| e.generation < self.config.generation)?;
        let from = self.epochs.started_from()?;
        if recorded.order() == from && self.rounds.began_behind(recorded) {
            return Some(
                "it is rounds ahead of the replicas that the volume was started with, which are older copies: it is kept as it is. Stop \
                 the volume and salvage it with that replica, or take the replica out",
            );
        }
        let is_younger = self.config.quorum == Quorum::Any && recorded.outdates(from);
        is_younger.then_some(
            "it knows of an epoch that counted and is younger than the authority's was: it is kept as it is. Stop the volume and salvage it \
             with that replica here, or take the replica out",
        )
    }

    pub(super) fn advance_rebuilds(&mut self) -> bool {
        if !matches!(self.phase, Phase::Running) {
            return false;
        }
        self.replicas.ids().any(|member| match &self.replicas.get(member).role {
            Role::Out => self.begin_rebuild(member),
            Role::Joining(_) => self.go_on_rebuilding(member),
            _ => false,
        })
    }

    /// Rebuilds are set up only while nothing else changes: the chain that the target gets is the volume's.
    fn begin_rebuild(&mut self, member: MemberId) -> bool {
        if !self.is_rebuild_due(member) || self.stop_folds() {
            return false;
        }
        let Some(source) = self.replicas.nearest(self.replicas.serving()) else { return false };
        let attempt = self.attempts.next();
        // What is rotten on the source is taken from those who hold the same.
        self.replicas
            .linked(self.replicas.serving().without(source))
            .iter()
            .for_each(|other| self.ask_state(other));
        // An operation that the target holds prepared goes when it takes the chain over, and not before: the plan is made by it,
        // and the next one's, too, should this engine die.
        self.ask_state(source);
        self.desk.log(format!(
            "replica {} is brought in sync from {}",
            self.replicas.name(member),
            self.replicas.name(source)
        ));
        let plan = Plan { keep: None, how: Vec::new(), own: Vec::new() };
        let copy = Copy::default();
        let rebuild = Rebuild {
            attempt,
            source,
            stage: Stage::Asking,
            plan,
            chain: Arc::default(),
            base: None,
            copy,
            rests_until: 0,
            rotten: false,
        };
        self.replicas.get_mut(member).role = Role::Joining(Box::new(rebuild));
        true
    }

    /// Nothing but folds stands against bringing this replica in sync. Until that has begun none begins: members whose folds are
    /// stopped one after the other would each be at the next one when the last of them rests.
    pub(super) fn is_rebuild_due(&self, member: MemberId) -> bool {
        let replica = self.replicas.get(member);
        let known = matches!(replica.role, Role::Out)
            && replica.link.is_up()
            && replica.state.is_some()
            && replica.rebuild_at <= self.desk.now;
        if !known || replica.unwanted {
            return false;
        }
        let busy =
            self.closing.is_some() || self.chain_is_wanted() || !self.doubt.is_empty() || !self.is_calm();
        let old_copies = || self.desk.jobs.count(|p| matches!(p, JobFor::Rebuild(m, ..) if m == member)) > 0;
        !busy && !old_copies()
    }

    fn go_on_rebuilding(&mut self, member: MemberId) -> bool {
        let (now, held) = (self.desk.now, self.copies_held() || !self.doubt.is_empty());
        let repairs = self.desk.jobs.count(|p| matches!(p, JobFor::Chunk(_))) > 0;
        let Some(rebuild) = self.replicas.rebuild(member) else { return false };
        let (attempt, source) = (rebuild.attempt, rebuild.source);
        match rebuild.stage {
            Stage::Asking => self.ask_to_begin(member, attempt, source),
            Stage::Attaching(switch) => {
                let drained = self.desk.switches.done(switch) || sabotaged!(self, join_without_drain);
                // Repairs that were given without it are remembered once they are done.
                drained && !repairs && self.begin_remembering(member)
            }
            Stage::Remembering(_) => self.remember(member),
            // Before the flush, which has to cover all that clients believe done.
            Stage::Copying if rebuild.copy.is_complete() => {
                let switch = self.desk.switch(Switch::Await { member });
                self.replicas.rebuild_goes_to(member, Stage::Awaiting(switch))
            }
            Stage::Awaiting(switch) => {
                self.desk.switches.done(switch)
                    && self.replicas.rebuild_goes_to(member, Stage::Flushing { flying: false, not_before: 0 })
            }
            Stage::Copying => !held && (self.ask_for_pages(member) || self.copy_next(member)),
            Stage::Flushing { flying: false, not_before } if not_before <= now => {
                self.desk.give(JobFor::RebuildFlush(member, attempt), Job::Flush);
                self.replicas.rebuild_goes_to(member, Stage::Flushing { flying: true, not_before: 0 })
            }
            _ => false,
        }
    }

    /// The source has told its chain as it is now.
    fn ask_to_begin(&mut self, member: MemberId, attempt: u64, source: MemberId) -> bool {
        let trusting = self.config.quorum != Quorum::Unsafe && !self.replicas.get(member).thorough;
        let (forgets, blind) = (sabotaged!(self, forget_own_doubt), sabotaged!(self, snapshot_meanwhile));
        let (Some(theirs), Some(own)) =
            (self.replicas.get(source).state.as_ref(), self.replicas.get(member).state.as_ref())
        else {
            return false;
        };
        if theirs.fold.as_ref().is_some_and(|fold| fold.error.is_none()) {
            // It moves blocks from layer to layer: whoever began it, it has to rest before anything is read.
            self.stop_fold(source);
            self.ask_state(source);
            return true;
        }
        let refused = other_backing(own, theirs).or_else(|| self.knows_better(own));
        if let Some(why) = refused {
            self.lose(member, why);
            return true;
        }
        let (size, chain, base) = (theirs.size, theirs.chain.clone(), own.epoch.clone());
        // Before enough are there nothing was made equal.
        let settled = self.replicas.are_enough(self.replicas.serving());
        let mut plan = plan(own, theirs, trusting, settled);
        if forgets {
            plan.own.clear();
        }
        if blind && plan.keep.as_ref().is_some_and(|k| !k.head.is_empty()) {
            plan.how.iter_mut().rev().skip(1).for_each(|how| *how = How::Nothing);
        }
        let keep = plan.keep.clone();
        self.take_chain(chain.clone());
        let planned = Arc::clone(&self.chain.volume.chain);
        if let Some(rebuild) = self.replicas.rebuild(member) {
            (rebuild.plan, rebuild.chain, rebuild.base) = (plan, planned, base);
        }
        self.desk.ask(member, ControlFor::Rebuild(attempt), Control::RebuildBegin { size, chain, keep });
        self.replicas.rebuild_goes_to(member, Stage::Beginning)
    }

    pub(super) fn on_rebuild_yes(&mut self, member: MemberId, attempt: u64) {
        let Some(rebuild) = self.replicas.rebuild_of(member, attempt) else { return };
        match rebuild.stage {
            Stage::Beginning => {
                let switch = self.desk.switch(Switch::Fill { member });
                self.replicas.get_mut(member).attached = true;
                self.replicas.rebuild_goes_to(member, Stage::Attaching(switch));
            }
            Stage::Ending => rebuild.stage = Stage::Whole,
            _ => {}
        }
    }

    /// Every write reaches the target: what it missed before is asked for.
    fn begin_remembering(&mut self, member: MemberId) -> bool {
        let left = self.replicas.serving();
        let Some(rebuild) = self.replicas.rebuild(member) else { return false };
        let marks = rebuild.plan.own.clone();
        let stage = Stage::Remembering(Memory { left, asked: None, known: false, marks, from: 0 });
        self.replicas.rebuild_goes_to(member, stage)
    }

    fn remember(&mut self, member: MemberId) -> bool {
        let linked = self.replicas.linked(self.replicas.serving());
        let Some(rebuild) = self.replicas.rebuild(member) else { return false };
        let (attempt, base) = (rebuild.attempt, rebuild.base.clone());
        let marked = rebuild.plan.how.contains(&How::Marked);
        let Stage::Remembering(memory) = &mut rebuild.stage else { return false };
        if memory.asked.is_some() {
            return false;
        }
        let next = memory.left.and(linked).iter().next();
        match (next, base) {
            (Some(other), Some(base)) if marked => {
                memory.left = memory.left.without(other);
                (memory.asked, memory.from) = (Some(other), 0);
                self.ask_missed(member, attempt, other, base, 0);
                true
            }
            _ => self.begin_copying(member),
        }
    }

    fn ask_missed(&mut self, member: MemberId, attempt: u64, other: MemberId, base: Epoch, from: u64) {
        let replica = self.replicas.name(member).to_owned();
        self.desk.ask(other, ControlFor::Missed(member, attempt), Control::Missed { replica, base, from });
    }

    /// A member tells what the target missed; `None`: it does not know.
    pub(super) fn on_missed(
        &mut self,
        member: MemberId,
        attempt: u64,
        other: MemberId,
        page: Option<MapPage>,
    ) {
        let Some(rebuild) = self.replicas.rebuild_of(member, attempt) else { return };
        let base = rebuild.base.clone();
        let Stage::Remembering(memory) = &mut rebuild.stage else { return };
        if memory.asked != Some(other) {
            return;
        }
        memory.asked = None;
        let Some(page) = page else { return };
        if let (Some(next), Some(base)) = (memory.take(page), base) {
            memory.asked = Some(other);
            self.ask_missed(member, attempt, other, base, next);
        }
    }

    fn begin_copying(&mut self, member: MemberId) -> bool {
        let size = self.chain.volume.size;
        let Some(chain) = self.replicas.rebuild(member).map(|rebuild| Arc::clone(&rebuild.chain)) else {
            return false;
        };
        let layers: Vec<Option<LayerRef>> = chain.iter().map(|l| self.layer_ref(&l.name)).collect();
        let name = self.replicas.name(member).to_owned();
        let Some(rebuild) = self.replicas.rebuild(member) else { return false };
        let Stage::Remembering(memory) = &mut rebuild.stage else { return false };
        let (known, marks) = (memory.known, std::mem::take(&mut memory.marks));
        let length = |l: &LayerInfo| if l.name.is_empty() { size } else { l.length };
        let how = |at: usize| match rebuild.plan.how.get(at).copied().unwrap_or(How::Whole) {
            How::Marked if !known => How::Whole,
            how => how,
        };
        let whole = (0..layers.len()).filter(|at| how(*at) == How::Whole).count();
        let layers = chain
            .iter()
            .zip(layers)
            .enumerate()
            .map(|(at, (info, layer))| (layer, info.name.clone(), length(info), info.allocated, how(at)));
        rebuild.copy = Copy::of(layers, marks);
        rebuild.stage = Stage::Copying;
        let bytes = rebuild.copy.total();
        self.desk.log(format!("replica {name}: {bytes} bytes to look at, {whole} of its layers wholly"));
        true
    }

    /// Asks source and target where the layer whose turn it is holds anything.
    fn ask_for_pages(&mut self, member: MemberId) -> bool {
        let Some(rebuild) = self.replicas.rebuild(member) else { return false };
        let (attempt, source, wanted) = (rebuild.attempt, rebuild.source, rebuild.copy.wants());
        let asks = !wanted.is_empty();
        for Wanted { side, layer, from, number } in wanted {
            let whom = if side == Side::Source { source } else { member };
            let purpose = ControlFor::Map { target: member, attempt, side, number };
            // What the source has lost others may have. What the target lacks is looked at where the source should hold anything.
            let recorded = side == Side::Source;
            self.desk.ask(whom, purpose, Control::LayerMap { layer, from, recorded });
        }
        asks
    }

    pub(super) fn on_map(&mut self, target: MemberId, attempt: u64, side: Side, number: u64, page: MapPage) {
        if let Some(rebuild) = self.replicas.rebuild_of(target, attempt) {
            rebuild.copy.heard(side, number, page);
        }
    }

    pub(super) fn on_no_map(&mut self, target: MemberId, attempt: u64, text: &str) {
        if self.replicas.rebuild_of(target, attempt).is_some() {
            self.lose(target, text);
        }
    }

    pub(super) fn on_rebuild_no(&mut self, member: MemberId, attempt: u64, text: &str) {
        if self.replicas.rebuild_of(member, attempt).is_some() {
            self.lose(member, text);
        }
    }

    fn copy_next(&mut self, member: MemberId) -> bool {
        let now = self.desk.now;
        self.pace.see(now, self.config.shared.activity());
        self.pace.refill(now, self.desk.limits.rebuild_rate);
        let (busy, free) = (self.pace.is_busy(now), self.pace.is_free(now));
        let at_once = if busy { 1 } else { self.desk.limits.copies as usize };
        let most = if busy { pace::BUSY_PIECE } else { u64::MAX };
        let ready = |r: &&mut Rebuild| r.copy.flying.len() < at_once && r.rests_until <= now;
        let Some(rebuild) = self.replicas.rebuild(member).filter(ready).filter(|_| free) else {
            return false;
        };
        let Some((number, piece)) = rebuild.copy.next(most, now) else { return false };
        let (attempt, source) = (rebuild.attempt, rebuild.source);
        self.pace.spend(piece.range.len, self.desk.limits.rebuild_rate);
        let targets = MemberSet::EMPTY.with(member);
        let (layer, range, compare) = (piece.layer, piece.range, piece.compare);
        let others = self.alike(source);
        let job =
            Job::Equalise { layer, range, source, others, targets, compare, merged: false, repair: false };
        self.desk.give(JobFor::Rebuild(member, attempt, number), job);
        true
    }

    pub(super) fn on_piece_copied(
        &mut self,
        member: MemberId,
        attempt: u64,
        piece: usize,
        result: JobResult,
    ) {
        let now = self.desk.now;
        self.pace.see(now, self.config.shared.activity());
        let busy = self.pace.is_busy(now);
        let Some(rebuild) = self.replicas.rebuild_of(member, attempt) else { return };
        if let Some(since) = rebuild.copy.given_at(piece).filter(|_| busy) {
            // Half of the time at most: who waits meanwhile is not kept waiting by two copies in a row.
            rebuild.rests_until = now.saturating_add(now.saturating_sub(since).min(pace::REST_MAX));
        }
        match result {
            JobResult::Done { changed } => {
                rebuild.copy.copied(piece, changed * lh_block::BLOCK);
                self.counters.rebuilt_blocks += changed;
            }
            JobResult::Skipped | JobResult::Compared { .. } | JobResult::Verified(_) => {
                rebuild.copy.not_copied(piece);
            }
            // Whoever it failed on: the source may have folded the layer away. It begins anew.
            JobResult::Failed { .. } => self.lose(member, "a copy failed"),
        }
    }

    pub(super) fn on_rebuild_flushed(&mut self, member: MemberId, attempt: u64, result: JobResult) {
        let not_before = self.desk.now.saturating_add(self.desk.limits.retry_ns);
        let Some(rebuild) = self.replicas.rebuild_of(member, attempt) else { return };
        if !matches!(rebuild.stage, Stage::Flushing { .. }) {
            return;
        }
        if !matches!(result, JobResult::Done { .. }) {
            rebuild.stage = Stage::Flushing { flying: false, not_before };
            return;
        }
        rebuild.stage = Stage::Ready;
        let (rotten, (looked, _, copied)) = (rebuild.rotten, rebuild.progress());
        if !rotten {
            self.scrubs.filled(member);
        }
        let name = self.replicas.name(member);
        self.desk
            .log(format!("replica {name}: of {looked} bytes looked at, {copied} differed and were copied"));
    }

    /// They have recorded an epoch: the marks go, and it counts for them. True once all are gone.
    pub(super) fn end_rebuilds(&mut self, joiners: MemberSet) -> bool {
        for member in self.replicas.linked(joiners).iter() {
            if let Some(rebuild) =
                self.replicas.rebuild(member).filter(|r| matches!(r.stage, Stage::Recorded))
            {
                rebuild.stage = Stage::Ending;
                let attempt = rebuild.attempt;
                self.desk.ask(member, ControlFor::Rebuild(attempt), Control::RebuildEnd);
            }
        }
        joiners.iter().all(|member| self.replicas.rebuild(member).is_some_and(|r| r.is_whole()))
    }

    /// The epoch with them counts, every queue may read from them.
    pub(super) fn on_change_done(&mut self, joiners: MemberSet) {
        for member in self.replicas.linked(joiners.and(self.replicas.serving())).iter() {
            self.replicas.get_mut(member).backoff = 0;
            self.replicas.get_mut(member).thorough = false;
            // What it marked while it was filled is taken back after a flush, like all other marks.
            self.ask_state(member);
            self.tell_resolved_after(Vec::new());
            self.hash_what_was_filled(member);
            self.fold_what_was_missed(member);
        }
    }

    /// Those who hold everything and only lack an epoch.
    pub(super) fn ready_joiners(&self) -> MemberSet {
        let ready = self.replicas.select(|r| matches!(&r.role, Role::Joining(rebuild) if rebuild.is_ready()));
        if self.closing.is_some() { MemberSet::EMPTY } else { self.replicas.linked(ready) }
    }

    /// A rebuild of it ended without success: the next one waits.
    pub(super) fn set_back(&mut self, member: MemberId) {
        let (limit, first) = (self.desk.limits.rebuild_backoff_ns, self.desk.limits.retry_ns);
        let now = self.desk.now;
        let replica = self.replicas.get_mut(member);
        replica.backoff = replica.backoff.saturating_mul(2).clamp(first, limit);
        replica.rebuild_at = now.saturating_add(replica.backoff);
    }

    /// Rebuilds that copy from this replica cannot go on.
    pub(super) fn lose_source(&mut self, source: MemberId) {
        let of_it = |r: &super::Replica| matches!(&r.role, Role::Joining(rebuild) if rebuild.source == source && !rebuild.is_ready());
        for member in self.replicas.select(of_it).iter() {
            self.lose(member, "its source failed");
        }
        for member in self.replicas.ids() {
            if let Some(Rebuild { stage: Stage::Remembering(memory), .. }) = self.replicas.rebuild(member) {
                memory.asked = memory.asked.filter(|asked| *asked != source);
            }
        }
    }

    /// Ends all rebuilds.
    pub(super) fn drop_rebuilds(&mut self, why: &str) {
        for member in self.replicas.joining().iter() {
            self.lose(member, why);
        }
    }

    pub(super) fn rebuild_deadline(&self) -> Option<u64> {
        let due = self.replicas.ids().filter_map(|m| match &self.replicas.get(m).role {
            Role::Out if self.replicas.get(m).link.is_up() => Some(self.replicas.get(m).rebuild_at),
            Role::Joining(rebuild) => match rebuild.stage {
                Stage::Flushing { flying: false, not_before } => Some(not_before),
                Stage::Copying => Some(rebuild.rests_until.max(self.pace.free_at())),
                _ => None,
            },
            _ => None,
        });
        due.filter(|at| *at > self.desk.now).min()
    }
}
