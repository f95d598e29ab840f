//! Making members equal after an engine, a process or a power supply died (`docs/invariants.md`, 4).
//!
//! - Ranges in doubt, what an engine had in flight, are made equal before the volume opens.
//! - Chunks in doubt, what the intent bitmap of a member marks whose process did not live on, are made equal while it
//!   is open: a chunk that a request waits for first. Nobody reads from a chunk in doubt.
//! - Nobody folds meanwhile ([`view`]), and no rebuild copies: what it has read of a layer before a repair changed that must not
//!   replace it.
//! - The source is a member whose process lived on, if there is one, else one whose host kept its power. Nobody is told that nothing is in doubt any more
//!   ([`Control::Resolved`]) before nothing is.
//! - While the membership changes no chunk counts as equal: a member that failed may yet come back.

mod doubt;
mod view;

use std::collections::{BTreeSet, VecDeque};

use lh_block::{BLOCK, Extent};
use lh_wire::{Control, LayerInfo};

use super::{Ballot, Conductor, ControlFor, Job, JobFor, Phase, sabotaged};
use crate::message::{JobResult, LayerRef, MemberId, MemberSet, QueueId, SwitchId, ToQueue};
use doubt::{Chunk, Owed};
pub(super) use doubt::{Dead, Doubt};

/// Bytes of one copy.
const PIECE: u64 = lh_wire::MAX_DATA as u64;

/// Copies of ranges in doubt at once, for each queue: nobody else wants anything of the replicas before the volume is open, and
/// whoever uses it waits for them.
const AT_ONCE: u32 = crate::queue::JOB_SLOTS as u32;

/// How often copies may fail, all of them or those of one chunk, without a member being blamed by its queue. Then the one that they failed
/// on is put out, if it can be spared: it answers, but not this. What fails at once has failed once, however many were on their way: a disk
/// may be full for a moment.
const FAILURES_MAX: u32 = 5;

/// Ranges in doubt that are being made equal.
#[derive(Debug, Default)]
pub(super) struct InDoubt {
    pieces: Vec<Extent>,
    left: VecDeque<usize>,
    flying: u32,
    failures: u32,
    retry_at: Option<u64>,
}

impl InDoubt {
    pub(super) const fn retry_at(&self) -> Option<u64> {
        self.retry_at
    }
}

impl Conductor {
    /// Queues have their links: ranges in doubt come first.
    pub(super) fn begin_repairing(&mut self) -> bool {
        let mut in_doubt = InDoubt::default();
        if self.replicas.members().len() > 1 && !sabotaged!(self, forget_in_doubt) {
            in_doubt.pieces = pieces(&self.ranges_in_doubt());
            in_doubt.left = (0..in_doubt.pieces.len()).collect();
        }
        if !in_doubt.pieces.is_empty() {
            self.desk.log(format!("{} pieces are in doubt", in_doubt.pieces.len()));
        }
        self.phase = Phase::Repairing(in_doubt);
        true
    }

    fn ranges_in_doubt(&self) -> Vec<Extent> {
        let volume = Extent::new(0, self.chain.volume.size);
        let states =
            self.replicas.members().iter().filter_map(|m| self.replicas.state(m)).collect::<Vec<_>>();
        join(
            states
                .iter()
                .flat_map(|s| &s.in_doubt)
                .filter_map(|r| r.widen(BLOCK).intersection(volume))
                .collect(),
        )
    }

    pub(super) fn advance_in_doubt(&mut self) -> bool {
        let at_once = self.desk.limits.copies.max(AT_ONCE * u32::from(self.desk.queues));
        let now = self.desk.now;
        let Phase::Repairing(in_doubt) = &mut self.phase else { return false };
        if in_doubt.left.is_empty() && in_doubt.flying == 0 {
            self.put_in_doubt(self.dead_of(self.replicas.members()), self.replicas.members());
            self.phase = Phase::Running;
            self.tell_resolved_after(Vec::new());
            return true;
        }
        if in_doubt.flying >= at_once || in_doubt.retry_at.is_some_and(|at| at > now) {
            return false;
        }
        let Some(piece) = in_doubt.left.pop_front() else { return false };
        in_doubt.flying += 1;
        in_doubt.retry_at = None;
        let range = in_doubt.pieces[piece];
        self.equalise(JobFor::InDoubt(piece), None, range, self.dead_of(self.replicas.members()));
        true
    }

    /// By what they have said of themselves.
    pub(super) fn dead_of(&self, members: MemberSet) -> Dead {
        let is =
            |m: MemberId, what: fn(&lh_wire::ReplicaState) -> bool| self.replicas.state(m).is_some_and(what);
        let all: MemberSet = members.iter().filter(|m| !is(*m, |s| s.lived)).collect();
        let unpowered = all.iter().filter(|m| !is(*m, |s| s.powered)).collect();
        Dead { all, unpowered }
    }

    /// Copies a range from the best source among the members to all others. What that one cannot read another one gives that holds as
    /// much of what was answered; then it is written anew on the former, too.
    fn equalise(&mut self, purpose: JobFor, layer: Option<LayerRef>, range: Extent, dead: Dead) {
        let members = self.replicas.serving();
        let kept = self.best_of(members, dead);
        let Some(source) =
            self.replicas.nearest(kept.minus(dead.all)).or_else(|| self.replicas.nearest(kept))
        else {
            return;
        };
        let merged = self.may_have_folded(members) && !sabotaged!(self, repair_by_layer);
        // What is merged becomes the layer's own on all of them, on who is being filled, too: one that holds less in this layer
        // would do so for ever, and a scrub would find that.
        let filling = if sabotaged!(self, spare_filler) { MemberSet::EMPTY } else { self.replicas.filling() };
        let targets = match merged {
            true if sabotaged!(self, spare_source) => members.without(source),
            true => members.or(filling),
            false => members,
        };
        self.desk.give(
            purpose,
            Job::Equalise {
                layer,
                range,
                source,
                others: kept.without(source),
                targets,
                compare: false,
                merged,
                repair: false,
            },
        );
    }

    /// Those who hold everything that was answered.
    fn kept_all(&self, members: MemberSet, dead: Dead) -> MemberSet {
        if sabotaged!(self, power_unasked) { MemberSet::EMPTY } else { members.minus(dead.unpowered) }
    }

    /// Any of these may be the source for the others: they hold everything that was answered, or lost the least of it.
    pub(super) fn best_of(&self, members: MemberSet, dead: Dead) -> MemberSet {
        let best = [self.kept_all(members, dead), self.longest_powered(members)];
        best.into_iter().find(|set| !set.is_empty()).unwrap_or(members)
    }

    /// Of those who lost something with their hosts' power, who has had that again for longest.
    fn longest_powered(&self, members: MemberSet) -> MemberSet {
        if sabotaged!(self, power_unasked) {
            return MemberSet::EMPTY;
        }
        let since = |m: MemberId| self.replicas.get(m).state.as_ref().and_then(|s| s.power_since);
        let longest = members.iter().filter_map(since).min();
        let alike: MemberSet = members.iter().filter(|m| longest.is_some() && since(*m) == longest).collect();
        // All of them lost it under this engine, to which their sessions tell who lost it first.
        let own = self.config.generation;
        let here = longest.is_some_and(|since| since.late && since.generation == own)
            && !sabotaged!(self, losses_alike);
        let first = alike.iter().filter(|_| here).min_by_key(|m| self.replicas.get(*m).nth_session);
        first.map_or(alike, |first| MemberSet::EMPTY.with(first))
    }

    fn may_have_folded(&self, members: MemberSet) -> bool {
        may_differ(
            members.iter().filter_map(|m| self.replicas.get(m).state.as_ref()).map(|s| s.chain.as_slice()),
        )
    }

    /// Members that hold what this one does, layer by layer, by what they have said last. While a replica is filled nobody
    /// folds, so it stays so.
    pub(super) fn alike(&self, source: MemberId) -> MemberSet {
        let told = |m: &MemberId| self.replicas.get(*m).state.as_ref().is_some_and(|s| s.fold.is_none());
        let same = |m: &MemberId| !self.may_have_folded(MemberSet::EMPTY.with(source).with(*m));
        if !told(&source) {
            return MemberSet::EMPTY;
        }
        self.replicas.serving().without(source).iter().filter(told).filter(same).collect()
    }

    pub(super) fn on_in_doubt_copied(&mut self, piece: usize, result: JobResult) {
        let retry_at = self.desk.now.saturating_add(self.desk.limits.retry_ns);
        let Phase::Repairing(in_doubt) = &mut self.phase else { return };
        in_doubt.flying -= 1;
        match result {
            JobResult::Done { changed } => self.counters.repaired_blocks += changed,
            JobResult::Skipped
            | JobResult::Failed { .. }
            | JobResult::Compared { .. }
            | JobResult::Verified(_) => {
                in_doubt.left.push_back(piece);
                in_doubt.failures += u32::from(in_doubt.retry_at.is_none());
                in_doubt.retry_at = Some(retry_at);
                if let (JobResult::Failed { member }, true) = (result, in_doubt.failures > FAILURES_MAX) {
                    self.lose(member, "copies fail on it");
                }
            }
        }
    }

    /// Puts the marked chunks in doubt where somebody is dead. Otherwise the marks are from finished writes: they are only kept to be
    /// taken back after a flush.
    ///
    /// What the others mark, or this engine knows to be marked, is in doubt, too. The dead mark the same, but for a directory that was put
    /// back as it was within the last two rounds: that has no mark of what it lacks ([`super::rounds`]).
    ///
    /// Who is alone has nobody to differ from but who is away: as long as an epoch with that one counts, an engine may yet go on
    /// from it, and a client that was told of a loss before would be told otherwise.
    pub(super) fn put_in_doubt(&mut self, dead: Dead, together: MemberSet) {
        let shared = self.config.shared.clone();
        let away = !self.replicas.failing().minus(together).is_empty();
        let differ = if together.len() > 1 { dead.all } else { dead.unpowered };
        if !together.is_empty() && dead.unpowered == together {
            self.look_for_a_loss(together);
        }
        let told_by = |members: MemberSet| -> BTreeSet<u64> {
            let states = members.iter().filter_map(|m| self.replicas.state(m));
            states.flat_map(|s| &s.intent).flat_map(|range| shared.chunks_of(*range)).collect()
        };
        let marked = told_by(together);
        let alike = differ.is_empty() || together.len() == 1 && !away || sabotaged!(self, skip_intent);
        let doubtful = match (alike, sabotaged!(self, others_marks_spared)) {
            (true, _) => BTreeSet::new(),
            (false, true) => told_by(differ),
            (false, false) => {
                (0..shared.chunks()).filter(|n| marked.contains(n) || shared.is_marked(*n)).collect()
            }
        };
        for chunk in marked.difference(&doubtful) {
            shared.wrote(Extent::new(chunk.saturating_mul(shared.chunk()), 1));
        }
        for number in doubtful {
            let owed = self.owed(number);
            shared.put_in_doubt(number);
            self.doubt.view.reset();
            let chunk = self.doubt.chunks.entry(number).or_default();
            chunk.owed = chunk.owed.max(owed);
            chunk.dead.all = chunk.dead.all.or(dead.all);
            chunk.dead.unpowered = chunk.dead.unpowered.or(dead.unpowered);
            chunk.spoilt |= chunk.left.is_some();
        }
        if self.doubt.is_empty() {
            self.doubt.lost = Owed::Nobody;
        } else {
            self.desk.log(format!("{} chunks are in doubt", self.doubt.chunks.len()));
        }
    }

    /// All of them have lost their hosts' power: what was answered and no flush covers may be gone.
    fn look_for_a_loss(&mut self, together: MemberSet) {
        let marked =
            |m: &MemberId| self.replicas.get(*m).state.as_ref().is_some_and(|s| !s.intent.is_empty());
        let marked = together.iter().any(|m| marked(&m));
        if marked {
            let line = "every replica that is here has lost its host's power, or its disk failed: what was answered and not flushed may be gone";
            self.desk.log(line.into());
        }
        let owes = if self.is_open() { self.config.shared.anything_unflushed() } else { marked };
        if owes {
            self.tell_of_loss(self.creditors());
        }
    }

    /// Before the volume opens only an engine before can have answered anything.
    fn creditors(&self) -> Owed {
        if self.is_open() { Owed::Everybody } else { Owed::WhoStayed }
    }

    /// Who was answered something in this marked chunk that no flush covers.
    fn owed(&self, chunk: u64) -> Owed {
        if self.is_open() && !self.config.shared.unflushed(chunk) { Owed::Nobody } else { self.creditors() }
    }

    /// A flush must not promise what is lost: the next ones fail.
    fn tell_of_loss(&mut self, owed: Owed) {
        if owed <= self.doubt.lost || sabotaged!(self, loss_untold) {
            return;
        }
        self.doubt.lost = owed;
        let loss = self.config.shared.loss();
        if owed == Owed::Everybody {
            loss.lose();
            self.desk.log(
                "clients were answered what may be gone: flushes fail for a minute, so that they hear of it"
                    .into(),
            );
        } else {
            loss.lose_from_before();
        }
        self.desk.emit(super::Output::Lost);
    }

    /// The members hear that nothing is in doubt, once nothing is and these switches are made.
    pub(super) fn tell_resolved_after(&mut self, switches: Vec<SwitchId>) {
        self.doubt.tell = true;
        self.doubt.told = Ballot::default();
        self.doubt.after.extend(switches);
    }

    /// The start begins again and finds out anew.
    pub(super) fn drop_doubt(&mut self) {
        for chunk in self.doubt.chunks.keys() {
            self.config.shared.resolve(*chunk);
        }
        // Answers that are still on their way count for nothing, so its number goes on.
        let mut view = std::mem::take(&mut self.doubt.view);
        view.reset();
        self.doubt = Doubt { view, ..Doubt::default() };
    }

    pub(super) fn advance_doubt(&mut self) -> bool {
        if !matches!(self.phase, Phase::Running) || !self.is_calm() || self.commits() {
            return false;
        }
        if self.doubt.is_empty() {
            return self.tell_resolved();
        }
        if self.replicas.serving().len() == 1 {
            return self.resolve_all();
        }
        self.resolve_finished() || self.look_at_chains() || self.sees_chains() && self.copy_next_piece()
    }

    fn tell_resolved(&mut self) -> bool {
        if !self.doubt.tell || !self.desk.switches.all_done(&self.doubt.after) {
            return false;
        }
        // With too few members the start may begin again with one more, which nobody was made equal to.
        if !self.replicas.are_enough(self.replicas.serving()) {
            return false;
        }
        self.doubt.after.clear();
        let serving = self.replicas.serving();
        let mut told = self.doubt.told;
        self.poll(&mut told, serving, ControlFor::Resolved, &Control::Resolved);
        self.doubt.told = told;
        if told.complete(serving) {
            self.doubt.tell = false;
            return true;
        }
        false
    }

    /// With one member there is nobody to differ from, once no copy to it is on its way any more: who had read before it came would
    /// read something else after it.
    fn resolve_all(&mut self) -> bool {
        if self.desk.jobs.count(|p| matches!(p, JobFor::Chunk(_))) > 0 {
            return false;
        }
        for chunk in self.doubt.chunks.keys().copied().collect::<Vec<_>>() {
            self.resolve(chunk);
        }
        true
    }

    /// Of all that can be read from it alone still has what was answered and not flushed in some chunk: the others have lost their
    /// hosts' power, and have not got it yet.
    pub(super) fn is_only_source(&self, member: MemberId) -> bool {
        let serving = self.replicas.serving();
        let alone = |c: &Chunk| serving.minus(c.dead.unpowered) == MemberSet::EMPTY.with(member);
        serving.len() > 1 && self.doubt.chunks.values().any(alone)
    }

    /// The others are enough, and have all that this one has.
    pub(super) fn can_be_spared(&self, member: MemberId) -> bool {
        self.replicas.are_enough(self.replicas.serving().without(member)) && !self.is_only_source(member)
    }

    fn resolve_finished(&mut self) -> bool {
        let found = self.doubt.finished();
        if let Some(chunk) = found {
            self.resolve(chunk);
        }
        found.is_some()
    }

    fn resolve(&mut self, chunk: u64) {
        let ended = self.doubt.remove(chunk);
        // Whoever still had it has been lost meanwhile.
        if self.replicas.serving().minus(ended.dead.unpowered).is_empty() {
            self.tell_of_loss(ended.owed);
        }
        if self.doubt.is_empty() {
            self.doubt.lost = Owed::Nobody;
        }
        let shared = &self.config.shared;
        shared.wrote(Extent::new(chunk.saturating_mul(shared.chunk()), 1));
        shared.resolve(chunk);
        self.counters.resolved_chunks += 1;
        self.desk.tell_queues(&ToQueue::ChunkResolved(chunk));
    }

    fn copy_next_piece(&mut self) -> bool {
        // A mark that a copy makes must not be taken back by what was sent before it on another connection, and no copy of a rebuild
        // be made of what was read before it.
        let crosses = self.desk.jobs.count(|p| matches!(p, JobFor::ClearIntent | JobFor::Rebuild(..))) > 0;
        if self.doubt.flying() >= self.desk.limits.copies || self.doubt.retry_at > self.desk.now || crosses {
            return false;
        }
        let Some(number) = self.doubt.next_chunk() else { return false };
        if self.doubt.chunks.get(&number).is_some_and(|c| c.spoilt || c.left.is_none()) {
            let left = self.pieces_of_chunk(number);
            self.doubt.begin(number, left);
        }
        let piece = self.doubt.chunks.get_mut(&number).and_then(|c| {
            let piece = c.left.as_mut()?.pop()?;
            c.flying += 1;
            Some((piece, c.dead))
        });
        if let Some(((layer, range), dead)) = piece {
            self.equalise(JobFor::Chunk(number), layer, range, dead);
        }
        true
    }

    /// All of the chunk in every layer that may have been written since the last flush.
    fn pieces_of_chunk(&mut self, number: u64) -> Vec<(Option<LayerRef>, Extent)> {
        let chunk = self.config.shared.chunk();
        let whole = Extent::new(number.saturating_mul(chunk), chunk);
        let Some(range) = whole.intersection(Extent::new(0, self.chain.volume.size)) else {
            return Vec::new();
        };
        let mut layers: Vec<Option<LayerRef>> = vec![None];
        for name in self.unsettled_layers() {
            layers.push(self.layer_ref(&name));
        }
        layers.into_iter().flat_map(|layer| pieces(&[range]).into_iter().map(move |p| (layer, p))).collect()
    }

    pub(super) fn on_chunk_copied(&mut self, number: u64, result: JobResult) {
        let Some(chunk) = self.doubt.chunks.get_mut(&number) else { return };
        chunk.flying = chunk.flying.saturating_sub(1);
        match result {
            JobResult::Done { changed } => {
                self.counters.repaired_blocks += changed;
                self.doubt.failures = 0;
            }
            JobResult::Skipped
            | JobResult::Failed { .. }
            | JobResult::Compared { .. }
            | JobResult::Verified(_) => {
                chunk.failures += u32::from(!std::mem::replace(&mut chunk.spoilt, true));
                self.doubt.failures += u32::from(self.doubt.retry_at <= self.desk.now);
                let often = chunk.failures.max(self.doubt.failures) > FAILURES_MAX;
                // Whatever it failed for, the next attempt is by what is there then.
                self.doubt.view.reset();
                self.doubt.retry_at = self.desk.now.saturating_add(self.desk.limits.retry_ns);
                let JobResult::Failed { member } = result else { return };
                // Clients do not wait for who only is being filled.
                if self.replicas.filling().has(member) || often && self.can_be_spared(member) {
                    // Whoever is asked from now on is another one.
                    self.doubt.failures = 0;
                    self.doubt.chunks.values_mut().for_each(|chunk| chunk.failures = 0);
                    self.lose(member, "copies fail on it");
                }
            }
        }
    }

    /// A replica has told its state. What a serving member marks is kept to be taken back after a flush, what it calls
    /// unsettled is settled after one.
    pub(super) fn on_state(&mut self, member: MemberId, state: Box<lh_wire::ReplicaState>) {
        if matches!(self.phase, Phase::Running) && self.replicas.serving().has(member) {
            for range in &state.intent {
                self.config.shared.wrote(*range);
            }
            self.chain.volume.note_unsettled(&state.unsettled);
        }
        self.replicas.get_mut(member).state = Some(state);
    }

    pub(super) fn doubt_deadline(&self) -> Option<u64> {
        (!self.doubt.is_empty()).then_some(self.doubt.retry_at).filter(|at| *at > self.desk.now)
    }

    pub(super) fn on_chunk_wanted(&mut self, queue: QueueId, number: u64) {
        if !self.doubt.chunks.contains_key(&number) {
            self.desk.emit(super::Output::ToQueue(queue, ToQueue::ChunkResolved(number)));
        } else if !self.doubt.wanted.contains(&number) {
            self.doubt.wanted.push_back(number);
        }
    }
}

/// Cuts ranges into what one copy takes.
fn pieces(ranges: &[Extent]) -> Vec<Extent> {
    let cut = |r: &Extent| {
        let r = *r;
        let count = r.len.div_ceil(PIECE);
        (0..count).map(move |n| r.offset + n * PIECE).map(move |at| Extent::new(at, PIECE.min(r.end() - at)))
    };
    ranges.iter().flat_map(cut).collect()
}

/// Sorts, and joins what overlaps or touches.
pub(super) fn join(mut ranges: Vec<Extent>) -> Vec<Extent> {
    ranges.sort_unstable();
    let mut joined: Vec<Extent> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.offset <= last.end() => last.len = last.end().max(range.end()) - last.offset,
            _ => joined.push(range),
        }
    }
    joined
}

/// True if members with these chains may not hold the same in the same layers: each folds removed snapshots on its own, also
/// while no engine is there. What one has in its head, another may have in a snapshot below, and copying "the head says
/// nothing of this block" would take it from the former.
fn may_differ<'a>(mut chains: impl Iterator<Item = &'a [LayerInfo]>) -> bool {
    let Some(first) = chains.next() else { return false };
    // Layers of a branch that a revert has left are told in any order.
    let places = |chain: &'a [LayerInfo]| -> BTreeSet<(&str, &str)> {
        chain.iter().map(|l| (l.name.as_str(), l.parent.as_str())).collect()
    };
    let expected = places(first);
    let same = |chain: &'a [LayerInfo]| chain.iter().all(|l| !l.removed) && places(chain) == expected;
    !(same(first) && chains.all(same))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_and_cut() {
        let joined = join(vec![Extent::new(8192, 4096), Extent::new(0, 8192), Extent::new(1 << 20, 4096)]);
        assert_eq!(joined, [Extent::new(0, 12288), Extent::new(1 << 20, 4096)]);
        let cut = pieces(&[Extent::new(4096, PIECE + 4096)]);
        assert_eq!(cut, [Extent::new(4096, PIECE), Extent::new(4096 + PIECE, 4096)]);
    }

    /// Layers by name, those marked with a minus removed, each on the one before.
    fn chain(names: &[&str]) -> Vec<LayerInfo> {
        let mut parent = String::new();
        let layer = |name: &&str| {
            let (removed, name) = (name.starts_with('-'), name.trim_start_matches('-').to_owned());
            let parent = std::mem::replace(&mut parent, name.clone());
            LayerInfo { name, parent, removed, ..LayerInfo::default() }
        };
        names.iter().map(layer).collect()
    }

    fn may_differ(chains: &[&[&str]]) -> bool {
        let chains: Vec<_> = chains.iter().map(|names| chain(names)).collect();
        super::may_differ(chains.iter().map(Vec::as_slice))
    }

    #[test]
    fn members_whose_chains_are_the_same_and_whole_hold_the_same() {
        assert!(!may_differ(&[]));
        assert!(!may_differ(&[&[""]]));
        assert!(!may_differ(&[&["a", "b", ""], &["a", "b", ""], &["a", "b", ""]]));
        // A revert has left c for a: whoever was opened since tells it behind d.
        let mut one = chain(&["a", "c", "d", ""]);
        one[2].parent = "a".into();
        let mut other = one.clone();
        other.swap(1, 2);
        assert!(!super::may_differ([one.as_slice(), &other].into_iter()));
    }

    #[test]
    fn a_removed_snapshot_may_be_folded_in_part_by_any_of_them() {
        assert!(may_differ(&[&["-a", ""]]));
        assert!(may_differ(&[&["-a", ""], &["-a", ""]]));
        // The removal has reached only one.
        assert!(may_differ(&[&["a", ""], &["-a", ""]]));
        assert!(may_differ(&[&["-a", ""], &["a", ""]]));
    }

    #[test]
    fn chains_that_differ_tell_of_a_fold() {
        assert!(may_differ(&[&["a", ""], &[""]]));
        assert!(may_differ(&[&[""], &["a", ""]]));
        assert!(may_differ(&[&["a", "b", ""], &["a", "b", ""], &["b", ""]]));
        // As many, but others; and the same on another parent.
        assert!(may_differ(&[&["a", "c", ""], &["b", "c", ""]]));
        let (one, mut other) = (chain(&["a", "b", ""]), chain(&["a", "b", ""]));
        other[1].parent.clear();
        assert!(super::may_differ([one.as_slice(), &other].into_iter()));
    }
}
