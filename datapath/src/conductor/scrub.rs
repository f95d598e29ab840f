//! Comparing replicas with each other and with their checksums, and repairing what is rotten.
//!
//! ```text
//!  Checking ----------------------------------------> Hashing --> Ended
//!  (layer by layer, base first: pieces are compared   (each replica takes the
//!   on all members; what differs is looked at closely) checksums that it lacks)
//! ```
//!
//! - A piece of the head is compared under a shared claim: a write is either on every member or on none. A repair claims its
//!   range from its read to its last write, in whatever layer.
//! - Nothing is repaired from a copy that is not known to be sound ([`mod@judge`]).
//! - Nothing is looked at while chunks are in doubt, while a replica is brought in sync, or while anything is folded: then
//!   members differ, and rightly so. Blocks that a fold moves go upwards, and layers are taken base first, so none is missed.
//! - Each replica folds on its own, and may have folded a part of a removed snapshot, or all of it, while others have not: then
//!   layers differ, and what one says it does not hold must not be copied to another. A removed snapshot and what stands on
//!   it are passed over ([`mod@chains`]), and named.
//! - Checksums are taken last, of layers in which nothing is left wrong: a checksum of rot would make it the truth.

mod chains;
mod drill;
mod finding;
mod judge;
mod layer;
mod spot;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use lh_block::Extent;
use lh_wire::{Control, MapPage, ReplicaState, UNASKED_HASH_RATE};

use super::ask::Attempts;
use super::rebuild::pace::{BUSY_PIECE, Pace, REST_MAX};
use super::{Command, CommandError, CommandId, Conductor, ControlFor, Job, JobFor, Output, Phase};
use crate::message::{JobResult, LayerRef, MemberId, MemberSet};

use chains::Chains;
use drill::Drill;
pub use finding::{Finding, Flaw, Mend, ScrubStatus};
use layer::{Layer, closely};

/// Between two looks at checksums that replicas take, ns.
const LOOK_EVERY: u64 = 500_000_000;

/// Nobody's attempt: checksums that no scrub asked for.
const UNASKED: u64 = Attempts::NONE;

/// What a scrub job is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The comparison of the piece with this number.
    Piece(u64),
    /// The close look.
    Drill,
}

#[derive(Debug)]
enum Stage {
    Checking,
    Hashing { asked: MemberSet, done: MemberSet, waiting: MemberSet, look_at: u64 },
    Ended,
}

/// A scrub on its way, or the last one.
#[derive(Debug)]
pub(super) struct Scrub {
    attempt: u64,
    rate: u64,
    stage: Stage,
    status: ScrubStatus,
    /// Only this range is looked at, in every layer: a read found it rotten.
    spot: Option<Extent>,
    through: BTreeSet<String>,
    /// Layers that were not looked at in full: no checksums are taken of them.
    unsure: BTreeSet<String>,
    /// What the members say of their layers; asked anew whenever that may have changed.
    chains: Chains,
    layer: Option<Layer>,
    flying: BTreeMap<u64, (Extent, u64)>,
    /// Counts pieces and pages.
    number: u64,
    suspects: VecDeque<Extent>,
    drill: Option<Drill>,
    pace: Pace,
    rests_until: u64,
    held: bool,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Scrubs {
    /// The one that people asked for.
    asked: Option<Scrub>,
    /// The one that a read asked for.
    spot: Option<Scrub>,
    spots: VecDeque<Extent>,
    /// Replicas that a rebuild has filled with what is sound, as far as their source knows.
    filled: MemberSet,
    /// Replicas of which it was said, since they were let in, that they are needed whatever they cannot read.
    needed: MemberSet,
}

impl Scrubs {
    /// The replica was filled, and nothing that it got was rotten.
    pub(super) fn filled(&mut self, member: MemberId) {
        self.filled = self.filled.with(member);
    }

    fn of(&mut self, attempt: u64) -> Option<&mut Scrub> {
        let running = |s: &&mut Scrub| s.attempt == attempt && !matches!(s.stage, Stage::Ended);
        [&mut self.spot, &mut self.asked].into_iter().filter_map(Option::as_mut).find(running)
    }

    /// One is not through.
    pub(super) fn is_running(&self) -> bool {
        self.turn().is_some()
    }

    /// Whose turn it is.
    fn turn(&self) -> Option<u64> {
        let running = |s: &&Scrub| !matches!(s.stage, Stage::Ended);
        [&self.spot, &self.asked].into_iter().filter_map(Option::as_ref).find(running).map(|s| s.attempt)
    }
}

impl Scrub {
    fn new(attempt: u64, repair: bool, rate: u64, total: u64) -> Self {
        Self {
            attempt,
            rate,
            stage: Stage::Checking,
            status: ScrubStatus { running: true, repair, total, ..ScrubStatus::default() },
            spot: None,
            through: BTreeSet::new(),
            unsure: BTreeSet::new(),
            chains: Chains::default(),
            layer: None,
            flying: BTreeMap::new(),
            number: 0,
            suspects: VecDeque::new(),
            drill: None,
            pace: Pace::default(),
            rests_until: 0,
            held: false,
        }
    }

    fn end(&mut self, error: Option<&str>) {
        self.stage = Stage::Ended;
        self.status.running = false;
        self.status.doing.clear();
        self.status.error = error.map(str::to_owned);
        (self.layer, self.drill) = (None, None);
        self.flying.clear();
        self.suspects.clear();
    }

    fn next_number(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    /// Checksums may be taken of this layer: all of it was looked at, and nothing that is wrong is left in it, on any replica.
    fn is_sound(&self, layer: &str) -> bool {
        !layer.is_empty()
            && self.through.contains(layer)
            && !self.unsure.contains(layer)
            && !self.status.is_bad(layer)
    }

    /// The close look at some blocks came to no end.
    fn give_up(&mut self) {
        let (Some(drill), Some(layer)) = (self.drill.take(), &self.layer) else { return };
        let what = if layer.name.is_empty() { "the head" } else { &layer.name };
        let (len, offset) = (drill.range.len, drill.range.offset);
        let note = format!(
            "{what}: {len} bytes at {offset} could not be compared: they change, or replicas come and go"
        );
        self.unsure.insert(layer.name.clone());
        self.status.note(note);
    }

    /// Folds are about to move blocks: what is not through is looked for anew afterwards.
    fn rewind(&mut self) {
        self.chains = Chains::default();
        let number = self.next_number();
        let drilled = self.drill.take().map(|drill| drill.range.offset);
        let first = self.suspects.drain(..).map(|range| range.offset).chain(drilled).min();
        let first = self.flying.values().map(|(range, _)| range.offset).chain(first).min();
        self.flying.clear();
        if let Some(layer) = &mut self.layer {
            layer.rewind(first, number);
        }
    }
}

impl Conductor {
    pub(super) fn scrub_command(&mut self, id: CommandId, command: &Command) -> Result<(), CommandError> {
        match command {
            Command::Scrub { repair, bytes_per_second } => self.begin_scrub(*repair, *bytes_per_second)?,
            _ => self.stop_scrub("it was cancelled"),
        }
        self.desk.emit(Output::CommandDone(id, Ok(())));
        Ok(())
    }

    fn begin_scrub(&mut self, repair: bool, rate: u64) -> Result<(), CommandError> {
        if self.scrubs.asked.as_ref().is_some_and(|s| !matches!(s.stage, Stage::Ended)) {
            return Err(CommandError::Scrubbing);
        }
        let total = self.chain.volume.chain.iter().map(|l| l.allocated).sum();
        self.desk.log(format!("a scrub begins{}", if repair { ", with repair" } else { "" }));
        self.scrubs.asked = Some(Scrub::new(self.attempts.next(), repair, rate, total));
        Ok(())
    }

    pub(super) fn stop_scrub(&mut self, why: &str) {
        let Some(scrub) = self.scrubs.asked.as_mut().filter(|s| !matches!(s.stage, Stage::Ended)) else {
            return;
        };
        let (hashes, attempt) = (matches!(scrub.stage, Stage::Hashing { .. }), scrub.attempt);
        scrub.end(Some(why));
        self.desk.log(format!("the scrub ends: {why}"));
        if hashes {
            for member in self.replicas.linked(self.replicas.serving()).iter() {
                self.desk.ask(member, ControlFor::Hash(attempt), Control::HashStop);
            }
        }
    }

    /// A replica that was filled is a member now: it takes the checksums of what it got.
    pub(super) fn hash_what_was_filled(&mut self, member: MemberId) {
        if self.scrubs.filled.has(member) {
            self.scrubs.filled = self.scrubs.filled.without(member);
            let snapshots: Vec<String> = self
                .chain
                .volume
                .chain
                .iter()
                .map(|l| l.name.clone())
                .filter(|name| !name.is_empty())
                .collect();
            if !snapshots.is_empty() {
                let hash = Control::Hash { snapshots, bytes_per_second: Some(UNASKED_HASH_RATE) };
                self.desk.ask(member, ControlFor::Hash(UNASKED), hash);
            }
        }
    }

    pub(super) fn advance_scrub(&mut self) -> bool {
        if !matches!(self.phase, Phase::Running) || !self.is_open() {
            return false;
        }
        if self.closing.is_some() {
            self.scrubs.spots.clear();
            self.stop_scrub("the volume is being stopped");
            self.scrubs.spot = None;
            return false;
        }
        let idle = self.scrubs.spot.as_ref().is_none_or(|s| matches!(s.stage, Stage::Ended));
        if idle && let Some(range) = self.scrubs.spots.pop_front() {
            let scrub = Scrub::new(self.attempts.next(), true, 0, 0);
            self.scrubs.spot = Some(Scrub { spot: Some(range), ..scrub });
        }
        let Some(attempt) = self.scrubs.turn() else { return false };
        let (folds, held) = (self.folds_want(), self.scrub_is_held());
        let Some(scrub) = self.scrubs.of(attempt) else { return false };
        if folds && !std::mem::replace(&mut scrub.held, folds) {
            scrub.rewind();
        }
        scrub.held = folds;
        if held {
            return false;
        }
        match scrub.stage {
            Stage::Checking => self.check_on(attempt),
            Stage::Hashing { .. } => self.hash_on(attempt),
            Stage::Ended => false,
        }
    }

    /// Members may differ now, and rightly so, or layers change their names.
    fn scrub_is_held(&self) -> bool {
        !self.is_calm()
            || self.copies_held()
            || self.folds_want()
            || !self.doubt.is_empty()
            || !self.replicas.joining().is_empty()
            // Copies of before a fold or a change of the membership end first.
            || self.desk.jobs.count(|p| matches!(p, JobFor::InDoubt(_) | JobFor::Chunk(_) | JobFor::Rebuild(..))) > 0
    }

    fn check_on(&mut self, attempt: u64) -> bool {
        let members = self.replicas.serving();
        let Some(scrub) = self.scrubs.of(attempt) else { return false };
        if !scrub.chains.are_of(members) {
            let unasked = scrub.chains.ask(members);
            for member in unasked.iter() {
                self.desk.ask(member, ControlFor::Hash(attempt), Control::State);
            }
            return !unasked.is_empty();
        }
        let apart = |layer: &mut Layer| scrub.chains.apart().contains(&layer.name);
        if scrub.layer.take_if(apart).is_some() {
            // It became so under way: the next look for a layer says so.
            scrub.drill = None;
            scrub.suspects.clear();
            scrub.flying.clear();
            return true;
        }
        if scrub.drill.is_some() {
            return self.drill_on(attempt);
        }
        if let Some(range) = scrub.suspects.pop_front() {
            scrub.drill = Some(Drill::new(range, members));
            return true;
        }
        let Some(layer) = &mut scrub.layer else { return self.next_layer(attempt) };
        if layer.lay_out(members) {
            return true;
        }
        if let Some(from) = layer.wants(members) {
            let (layer, number) = (layer.name.clone(), layer.number);
            for member in members.iter() {
                let purpose = ControlFor::Scrub(attempt, number);
                let control = Control::LayerMap { layer: layer.clone(), from, recorded: true };
                self.desk.ask(member, purpose, control);
            }
            return true;
        }
        if layer.is_through() && scrub.flying.is_empty() {
            let name = layer.name.clone();
            scrub.through.insert(name);
            scrub.layer = None;
            return true;
        }
        self.compare_next(attempt)
    }

    /// The lowest layer that was not looked at. Without one: checksums are taken.
    fn next_layer(&mut self, attempt: u64) -> bool {
        let (chain, size) = (self.chain.volume.chain.clone(), self.chain.volume.size);
        let Some(scrub) = self.scrubs.of(attempt) else { return false };
        for passed in scrub.chains.apart() {
            scrub.unsure.insert(passed.clone());
            if scrub.through.insert(passed.clone()) && scrub.spot.is_none() {
                let what = if passed.is_empty() { "the head" } else { passed };
                scrub.status.note(format!(
                    "{what} was not compared: a removed snapshot may be folded on one replica and not on another; \
                     `longhornctl snapshot purge VOLUME` folds it everywhere, or says why it is kept"
                ));
            }
        }
        let next = chain.iter().find(|info| !scrub.through.contains(&info.name));
        let Some(info) = next else {
            if scrub.spot.is_some() {
                self.end_spot();
            } else {
                let (asked, done, waiting) = (MemberSet::EMPTY, MemberSet::EMPTY, MemberSet::EMPTY);
                scrub.stage = Stage::Hashing { asked, done, waiting, look_at: 0 };
                scrub.status.doing = "taking checksums".to_owned();
            }
            return true;
        };
        let (spot, number) = (scrub.spot, scrub.next_number());
        let length = if info.name.is_empty() { size } else { info.length };
        scrub.status.doing = match info.name.as_str() {
            "" => "the head".to_owned(),
            name => format!("snapshot {name}"),
        };
        let layer = self.layer_ref(&info.name);
        let layer = match spot {
            Some(range) => Layer::part(info.name.clone(), layer, length, range),
            None => Layer::new(info.name.clone(), layer, length, number),
        };
        if let Some(scrub) = self.scrubs.of(attempt) {
            scrub.layer = Some(layer);
        }
        true
    }

    fn compare_next(&mut self, attempt: u64) -> bool {
        let (now, copies, members) = (self.desk.now, self.desk.limits.copies, self.replicas.serving());
        let Some(source) = self.replicas.nearest(members) else { return false };
        let activity = self.config.shared.activity();
        let Some(scrub) = self.scrubs.of(attempt) else { return false };
        scrub.pace.see(now, activity);
        scrub.pace.refill(now, scrub.rate);
        let busy = scrub.pace.is_busy(now);
        let at_once = if busy { 1 } else { copies as usize };
        let rests = scrub.rests_until > now || !scrub.pace.is_free(now);
        if scrub.flying.len() >= at_once || rests {
            return false;
        }
        let most = if busy { BUSY_PIECE } else { u64::MAX };
        let Some(layer) = &mut scrub.layer else { return false };
        let Some(range) = layer.take(most) else { return false };
        let layer = layer.layer;
        let number = scrub.next_number();
        scrub.flying.insert(number, (range, now));
        scrub.pace.spend(range.len, scrub.rate);
        let job = Job::Compare { layer, range, source, targets: members.without(source) };
        self.desk.give(JobFor::Scrub(attempt, Step::Piece(number)), job);
        true
    }

    pub(super) fn on_scrubbed(&mut self, attempt: u64, step: Step, result: JobResult) {
        match step {
            Step::Drill => self.on_drilled(attempt, result),
            Step::Piece(number) => self.on_compared(attempt, number, result),
        }
    }

    fn on_compared(&mut self, attempt: u64, number: u64, result: JobResult) {
        let (now, serving) = (self.desk.now, self.replicas.serving());
        let activity = self.config.shared.activity();
        let Some(scrub) = self.scrubs.of(attempt) else { return };
        let Some((range, since)) = scrub.flying.remove(&number) else { return };
        scrub.pace.see(now, activity);
        if scrub.pace.is_busy(now) {
            // Half of the time at most is the scrub's.
            scrub.rests_until = now.saturating_add(now.saturating_sub(since).min(REST_MAX));
        }
        match result {
            JobResult::Compared { parts } => {
                scrub.status.done += range.len;
                scrub.status.total = scrub.status.total.max(scrub.status.done);
                scrub.suspects.extend(lh_wire::differing(range, parts).flat_map(closely));
            }
            // It is there and does not give it: some block of it is bad.
            JobResult::Failed { member } if serving.has(member) => {
                scrub.status.done += range.len;
                scrub.suspects.extend(closely(range));
            }
            _ => {
                if let Some(layer) = &mut scrub.layer {
                    layer.give_back(range);
                }
            }
        }
    }

    pub(super) fn on_scrub_map(&mut self, attempt: u64, number: u64, member: MemberId, page: MapPage) {
        if let Some(layer) = self.scrubs.of(attempt).and_then(|s| s.layer.as_mut())
            && layer.number == number
        {
            layer.heard(member, page);
        }
    }

    /// The layer is gone: folded into another one, or reverted away.
    pub(super) fn on_no_scrub_map(&mut self, attempt: u64, number: u64, text: &str) {
        let Some(scrub) = self.scrubs.of(attempt) else { return };
        match scrub.layer.take_if(|layer| layer.number == number) {
            Some(layer) if layer.name.is_empty() => scrub.end(Some(text)),
            // The engine's own picture may have it for long. Nobody is to take checksums of what was not compared.
            Some(layer) => {
                scrub.unsure.insert(layer.name.clone());
                scrub.through.insert(layer.name);
            }
            None => {}
        }
    }

    /// A snapshot was taken: the head goes on under its name, and there is a new one.
    pub(super) fn scrub_head_became(&mut self, snapshot: LayerRef, name: &str) {
        for scrub in [&mut self.scrubs.asked, &mut self.scrubs.spot].into_iter().flatten() {
            let number = scrub.next_number();
            scrub.chains = Chains::default();
            if let Some(layer) = scrub.layer.as_mut().filter(|layer| layer.layer.is_none()) {
                layer.became(snapshot, name, number);
            } else if scrub.through.remove("") {
                scrub.through.insert(name.to_owned());
            }
            // What was written since it was compared was not, and the next scrub does.
            scrub.unsure.insert(name.to_owned());
        }
    }

    fn hash_on(&mut self, attempt: u64) -> bool {
        let (now, serving) = (self.desk.now, self.replicas.linked(self.replicas.serving()));
        let chain = self.chain.volume.chain.clone();
        let Some(scrub) = self.scrubs.of(attempt) else { return false };
        let rate = Some(scrub.rate).filter(|rate| *rate > 0);
        let Stage::Hashing { asked, done, waiting, look_at } = &mut scrub.stage else { return false };
        if serving.minus(*done).is_empty() {
            scrub.end(None);
            self.desk.log("the scrub is through".to_owned());
            return true;
        }
        if let Some(member) = serving.minus(*asked).iter().next() {
            *asked = asked.with(member);
            *waiting = waiting.with(member);
            *look_at = now.saturating_add(LOOK_EVERY);
            // A checksum of what is still wrong, or may be, would make it the truth.
            let snapshots =
                chain.iter().map(|l| &l.name).filter(|name| scrub.is_sound(name)).cloned().collect();
            self.desk.ask(
                member,
                ControlFor::Hash(attempt),
                Control::Hash { snapshots, bytes_per_second: rate },
            );
            return true;
        }
        let due = serving.minus(*done).minus(*waiting);
        if due.is_empty() || *look_at > now {
            return false;
        }
        *look_at = now.saturating_add(LOOK_EVERY);
        *waiting = waiting.or(due);
        for member in due.iter() {
            self.desk.ask(member, ControlFor::Hash(attempt), Control::State);
        }
        true
    }

    /// A replica says how far it is with its checksums, or that it has begun.
    pub(super) fn on_hashing(&mut self, member: MemberId, attempt: u64, state: Option<&ReplicaState>) {
        let name = self.replicas.name(member).to_owned();
        let Some(scrub) = self.scrubs.of(attempt) else { return };
        if let Some(state) = state {
            scrub.chains.heard(member, state);
        }
        let Stage::Hashing { done, waiting, .. } = &mut scrub.stage else { return };
        *waiting = waiting.without(member);
        let Some(state) = state else { return };
        let hash = state.hash.clone().unwrap_or_default();
        if !hash.name.is_empty() {
            scrub.status.doing = format!("taking checksums of {}", hash.name);
            return;
        }
        *done = done.with(member);
        let corrupted = "it is not what it was when it was hashed, though nobody changed it";
        let failed =
            hash.failed.into_iter().chain(hash.corrupted.into_iter().map(|s| (s, corrupted.to_owned())));
        // It also tells of what was hashed before.
        let asked: Vec<_> = failed.filter(|(snapshot, _)| scrub.is_sound(snapshot)).collect();
        for (snapshot, why) in asked {
            scrub.status.note(format!("replica {name}, snapshot {snapshot}: {why}"));
        }
    }

    pub(super) fn on_no_hash(&mut self, member: MemberId, attempt: u64, text: &str) {
        let name = self.replicas.name(member).to_owned();
        let Some(scrub) = self.scrubs.of(attempt) else { return };
        let Stage::Hashing { done, .. } = &mut scrub.stage else { return };
        *done = done.with(member);
        scrub.status.note(format!("replica {name} takes no checksums: {text}"));
    }

    pub(super) fn forget_scrub(&mut self, member: MemberId) {
        self.scrubs.filled = self.scrubs.filled.without(member);
        self.scrubs.needed = self.scrubs.needed.without(member);
        for scrub in [&mut self.scrubs.asked, &mut self.scrubs.spot].into_iter().flatten() {
            scrub.chains = Chains::default();
            if let Some(layer) = &mut scrub.layer {
                layer.lost(member);
            }
        }
        if let Some(Stage::Hashing { asked, waiting, .. }) = self.scrubs.asked.as_mut().map(|s| &mut s.stage)
        {
            *asked = asked.without(member);
            *waiting = waiting.without(member);
        }
    }

    /// How the last scrub fares.
    pub(super) fn scrub_status(&self) -> Option<ScrubStatus> {
        self.scrubs.asked.as_ref().map(|scrub| {
            let mut status = scrub.status.clone();
            if status.running && self.scrub_is_held() {
                status.doing = "waits for a fold, a rebuild or a repair to end".to_owned();
            }
            status
        })
    }

    /// A scrub's jobs are on their way.
    pub(super) fn scrub_is_flying(&self) -> bool {
        self.desk.jobs.count(|p| matches!(p, JobFor::Scrub(..))) > 0
    }

    pub(super) fn scrub_deadline(&self) -> Option<u64> {
        let running = [&self.scrubs.spot, &self.scrubs.asked].into_iter().flatten();
        let due = running.filter_map(|scrub| match scrub.stage {
            Stage::Checking => Some(scrub.rests_until.max(scrub.pace.free_at()).max(scrub.retry_at())),
            Stage::Hashing { look_at, .. } => Some(look_at),
            Stage::Ended => None,
        });
        due.filter(|at| *at > self.desk.now).min()
    }
}
