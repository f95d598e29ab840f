//! Chain operations: snapshots and marks of removal, one at a time, each one decision (`docs/invariants.md`, 9).
//!
//! ```text
//!  Reading --> Preparing --> Quieting --> Pausing --> Committing --> Resuming --> Flushing --> Settling --> (done)
//!                  |             |           |
//!                  +-------------+-----------+--> Aborting --> (refused)
//! ```
//!
//! - `Committing` is reached only when every member and every replica that is being rebuilt holds the operation
//!   prepared, nothing copies between them, nobody is failing and, for a snapshot, no write is in flight.
//! - From `Committing` on it is decided: whoever fails is put out, or commits when it comes back.
//! - The pause ends when all have switched; the sync of the former head follows it.
//! - A command is answered when nobody is left who could undo it.
//!
//! Snapshots that an engine before, or a rebuild, left unsettled are settled by a task that begins with `Flushing`.

mod state;
mod waits;

use std::sync::Arc;

use lh_block::{Instance, SNAPSHOTS_MAX};
use lh_wire::{ChainOp, Control, LayerInfo, ReplicaState};

use super::{Ballot, CommandError, CommandId, Conductor, ControlFor, Job, JobFor, Output, Phase, sabotaged};
use crate::message::{JobResult, MemberId, MemberSet, Switch, SwitchId};

pub(super) use state::Chain;

/// How long requests are held for an operation at most, ns. What was let in before may wait for space on full disks, or for a
/// replica that is gone, and everybody else is not to wait with it.
const PAUSE_MAX: u64 = 10_000_000_000;

/// The operation whose turn it is.
#[derive(Debug)]
pub(super) struct Task {
    /// Who is answered, if somebody asked.
    command: Option<CommandId>,
    id: Instance,
    /// What is prepared and committed; `None` if only snapshots are to be settled.
    op: Option<ChainOp>,
    /// The last snapshot that is settled by the flush.
    settles: Option<String>,
    stage: Stage,
    /// Numbers the present ballot, so that answers to another one do not count.
    ballot_number: u64,
    ballot: Ballot,
    /// Since when queues are paused for it.
    paused: Option<u64>,
    refused: Option<CommandError>,
}

#[derive(Debug)]
enum Stage {
    /// The chain as it is now is asked for.
    Reading(MemberId),
    Preparing,
    /// Nothing may be copied between replicas any more.
    Quieting,
    Pausing(SwitchId),
    Committing,
    Resuming(SwitchId),
    /// Of all that was written before the head was changed.
    Flushing {
        flying: bool,
        /// A flush failed: no other one before this time.
        not_before: u64,
    },
    Settling,
    Aborting(Option<SwitchId>),
    Ended,
}

impl Task {
    /// The operation, as long as it can still be taken back.
    pub(super) const fn undecided(&self) -> Option<Instance> {
        match self.stage {
            Stage::Reading(_) | Stage::Preparing | Stage::Quieting | Stage::Pausing(_) => Some(self.id),
            _ => None,
        }
    }

    const fn is_snapshot(&self) -> bool {
        matches!(self.op, Some(ChainOp::Snapshot { .. }))
    }

    /// It puts another head in the place of the head: nothing may be in flight.
    const fn changes_head(&self) -> bool {
        matches!(self.op, Some(ChainOp::Snapshot { .. } | ChainOp::Revert { .. } | ChainOp::Expand { .. }))
    }
}

/// What a replica has to do about an operation that it holds prepared: carry it out if that was decided, else take it
/// back.
pub(super) fn unfinished(state: &ReplicaState, decided: impl Fn(Instance) -> bool) -> Option<Control> {
    let (id, _) = state.prepared.as_ref()?;
    Some(if decided(*id) { Control::Commit { id: *id } } else { Control::Abort { id: *id } })
}

impl Conductor {
    pub(super) fn advance_chain(&mut self) -> bool {
        if !matches!(self.phase, Phase::Running) {
            return false;
        }
        let Some(mut task) = self.chain.task.take() else { return self.begin_next() };
        let moved = match task.stage {
            _ if task.refused.is_some() && task.undecided().is_some() => self.begin_abort(&mut task),
            Stage::Reading(source) => self.read_chain(&mut task, source),
            Stage::Preparing => self.prepare(&mut task) && go(&mut task, Stage::Quieting),
            Stage::Quieting => self.pause_once_quiet(&mut task),
            Stage::Pausing(switch) => self.decide_once_paused(&mut task, switch),
            Stage::Committing => self.commit(&mut task),
            Stage::Resuming(switch) => self.flush_once_resumed(&mut task, switch),
            Stage::Flushing { flying, not_before } => self.flush(&mut task, flying, not_before),
            Stage::Settling => self.settle(&mut task),
            Stage::Aborting(resume) => self.abort(&mut task, resume),
            Stage::Ended => false,
        };
        self.chain.task = Some(task).filter(|t| !matches!(t.stage, Stage::Ended));
        if self.chain.task.is_none() {
            self.chain.next_waits(self.desk.now);
        }
        moved
    }

    fn begin_next(&mut self) -> bool {
        let calm = self.is_open() && self.is_calm() && self.doubt.is_empty();
        if !calm || self.replicas.is_setting_up_rebuild() {
            return false;
        }
        let Some(source) = self.replicas.nearest(self.replicas.serving()) else { return false };
        // A revert leaves the branch whose snapshots are yet to be settled, and nobody would look at them again.
        let leaves = matches!(self.chain.backlog.front(), Some((_, ChainOp::Revert { .. })));
        let settles_first = leaves && !self.chain.volume.unsettled.is_empty();
        let next = if settles_first { None } else { self.chain.backlog.pop_front() };
        let task = if let Some((command, op)) = next {
            self.ask_state(source);
            let settles = match &op {
                ChainOp::Snapshot { .. } | ChainOp::Expand { .. } => op.snapshot(),
                // What is settled is told by the last snapshot that is, which may now be on another branch.
                ChainOp::Revert { name, .. } => Some(name.clone()),
                ChainOp::MarkRemoved { .. } => None,
            };
            self.new_task(Some(command), Some(op), settles, Stage::Reading(source))
        } else if !self.chain.volume.unsettled.is_empty() && (settles_first || self.closing.is_none()) {
            // The last of all, whoever is unsettled: to go back to one below would unsettle those above.
            let last = self.chain.volume.may_settle().pop();
            self.new_task(None, None, last, Stage::Flushing { flying: false, not_before: 0 })
        } else {
            return false;
        };
        self.chain.task = Some(task);
        true
    }

    fn new_task(
        &mut self,
        command: Option<CommandId>,
        op: Option<ChainOp>,
        settles: Option<String>,
        stage: Stage,
    ) -> Task {
        let (id, ballot_number) = self.chain.next_id();
        Task {
            command,
            id,
            op,
            settles,
            stage,
            ballot_number,
            ballot: Ballot::default(),
            paused: None,
            refused: None,
        }
    }

    /// Replicas fold by themselves: only they know the chain as it is now.
    fn read_chain(&mut self, task: &mut Task, source: MemberId) -> bool {
        if !self.replicas.serving().has(source) {
            let Some(other) = self.replicas.nearest(self.replicas.serving()) else { return false };
            self.ask_state(other);
            return go(task, Stage::Reading(other));
        }
        let Some(state) = self.replicas.get(source).state.as_ref() else { return false };
        let chain = state.chain.clone();
        self.take_chain(chain);
        if let Err(why) = task.op.as_ref().map_or(Ok(()), |op| self.check_op(op)) {
            return self.answer(task, Err(why));
        }
        let head = self.chain.volume.chain.last().map(|head| head.created.clone()).unwrap_or_default();
        if let Some(created) = task.op.as_mut().and_then(ChainOp::created_mut)
            && !sabotaged!(self, same_time_again)
        {
            *created = later(created, &head);
        }
        go(task, Stage::Preparing)
    }

    /// Whether the operation makes sense in the present chain.
    fn check_op(&self, op: &ChainOp) -> Result<(), CommandError> {
        let snapshots = || self.chain.volume.chain.iter().filter(|l| !l.name.is_empty());
        match op {
            ChainOp::Snapshot { name, .. } => {
                lh_block::check_name("snapshot", name)?;
                if snapshots().any(|l| l.name == *name) {
                    return Err(CommandError::Exists(format!("snapshot {name}")));
                }
                self.check_room(snapshots().count())
            }
            ChainOp::MarkRemoved { name } => match snapshots().find(|l| l.name == *name) {
                None => Err(CommandError::NotFound(format!("snapshot {name}"))),
                Some(_) => Ok(()),
            },
            ChainOp::Revert { name, .. } => match snapshots().find(|l| l.name == *name) {
                None => Err(CommandError::NotFound(format!("snapshot {name}"))),
                Some(layer) if layer.removed => Err(CommandError::Removed(name.clone())),
                Some(_) => Ok(()),
            },
            ChainOp::Expand { size, .. } => {
                let (now, wanted, name) = (self.chain.volume.size, *size, op.snapshot().unwrap_or_default());
                if wanted <= now || wanted % lh_block::BLOCK != 0 || i64::try_from(wanted).is_err() {
                    return Err(CommandError::BadSize { now, wanted });
                }
                if snapshots().any(|l| l.name == name) {
                    return Err(CommandError::Exists(format!("snapshot {name}")));
                }
                check_format(snapshots().count())
            }
        }
    }

    /// Whether another snapshot may be taken, of `count` with removed ones. An expansion asks only what the format allows.
    fn check_room(&self, count: usize) -> Result<(), CommandError> {
        let (most, limit) = (self.desk.limits.snapshots as usize, self.desk.limits.snapshot_bytes);
        let live = || self.chain.volume.chain.iter().filter(|l| !l.removed);
        // The head is one of them, and becomes the next snapshot.
        let live_count = live().count().saturating_sub(1);
        check_format(count)?;
        if live_count >= most {
            return Err(CommandError::TooManySnapshots { count: live_count, limit: most });
        }
        let bytes = live().map(|l| l.allocated).sum();
        if limit > 0 && bytes > limit {
            return Err(CommandError::SnapshotsTooLarge { bytes, limit });
        }
        Ok(())
    }

    /// Who has to take part: every member, failing ones until they are out, and who is being rebuilt.
    fn concerned(&self) -> MemberSet {
        self.replicas.members().or(self.replicas.attached_joiners())
    }

    /// True once everybody concerned holds the operation prepared.
    fn prepare(&mut self, task: &mut Task) -> bool {
        let Some(op) = task.op.clone() else { return true };
        let control = Control::Prepare { id: task.id, op };
        self.poll_task(task, &control) && self.is_calm()
    }

    /// Somebody cannot: nobody does.
    fn begin_abort(&mut self, task: &mut Task) -> bool {
        let resume = task.paused.map(|_| self.desk.switch(Switch::Resume));
        self.new_ballot(task);
        go(task, Stage::Aborting(resume))
    }

    fn poll_task(&mut self, task: &mut Task, control: &Control) -> bool {
        let concerned = self.concerned();
        self.poll(&mut task.ballot, concerned, ControlFor::Chain(task.ballot_number), control);
        task.ballot.complete(concerned)
    }

    fn new_ballot(&mut self, task: &mut Task) {
        task.ballot_number = self.chain.next_number();
        task.ballot = Ballot::default();
    }

    fn pause_once_quiet(&mut self, task: &mut Task) -> bool {
        if !self.prepare(task) || !self.desk.jobs.no_copies() || !self.doubt.is_empty() {
            return false;
        }
        if !task.changes_head() || sabotaged!(self, commit_without_pause) {
            return self.decide(task);
        }
        task.paused = Some(self.desk.now);
        let pause = self.desk.switch(Switch::Pause);
        go(task, Stage::Pausing(pause))
    }

    fn decide_once_paused(&mut self, task: &mut Task, pause: SwitchId) -> bool {
        let quiet = self.prepare(task) && self.desk.jobs.no_copies() && self.doubt.is_empty();
        if quiet && self.desk.switches.done(pause) {
            return self.decide(task);
        }
        let late = task.paused.is_some_and(|since| self.desk.now >= since.saturating_add(PAUSE_MAX));
        if late {
            task.refused = Some(CommandError::RequestsWait);
        }
        late
    }

    /// From here on it is carried out.
    fn decide(&mut self, task: &mut Task) -> bool {
        self.chain.decide(task.id);
        match task.op.clone() {
            None => {}
            Some(ChainOp::Snapshot { name, user_created, created, labels }) => {
                let of = |head: &LayerInfo| LayerInfo {
                    name: name.clone(),
                    user_created,
                    created: created.clone(),
                    labels: labels.clone(),
                    ..head.clone()
                };
                self.put_head_over(of);
            }
            Some(ref op @ ChainOp::Expand { size, ref created, .. }) => {
                let name = op.snapshot().unwrap_or_default();
                let of = |head: &LayerInfo| LayerInfo {
                    name: name.clone(),
                    created: created.clone(),
                    ..head.clone()
                };
                self.put_head_over(of);
                self.chain.volume.size = size;
                if let Some(head) = Arc::make_mut(&mut self.chain.volume.chain).last_mut() {
                    head.length = size;
                }
            }
            Some(ChainOp::Revert { name, created }) => {
                if let Some(head) = Arc::make_mut(&mut self.chain.volume.chain).last_mut() {
                    *head = LayerInfo { parent: name, created, allocated: 0, ..head.clone() };
                }
                // What is left was settled first. Whoever was filled meanwhile and calls it unsettled has flushed it all.
                self.chain.volume.note_unsettled(&[]);
                // What they were filled with is gone.
                self.drop_rebuilds("the volume is reverted");
                self.expect_folds_stopped();
            }
            Some(ChainOp::MarkRemoved { name }) => {
                for layer in Arc::make_mut(&mut self.chain.volume.chain).iter_mut().filter(|l| l.name == name)
                {
                    layer.removed = true;
                }
                self.chain.volume.note_unsettled(&[]);
                self.expect_removed(&name);
            }
        }
        self.new_ballot(task);
        go(task, Stage::Committing)
    }

    /// The head becomes the layer that `of` makes of it, and an empty head is put over it.
    fn put_head_over(&mut self, of: impl Fn(&LayerInfo) -> LayerInfo) {
        let chain = Arc::make_mut(&mut self.chain.volume.chain);
        let mut head = chain.pop().unwrap_or_default();
        let layer = of(&head);
        let name = layer.name.clone();
        head.created.clone_from(&layer.created);
        chain.push(layer);
        head.parent.clone_from(&name);
        head.allocated = 0;
        chain.push(head);
        self.chain.volume.unsettled.push(name.clone());
        if self.replicas.joining().is_empty() && !self.scrubs.is_running() {
            // Copies of ranges in doubt have ended.
            self.forget_layer_refs();
        } else if let Some(layer) = self.layer_ref(&name) {
            self.replicas.head_became(layer, &name);
            self.scrub_head_became(layer, &name);
        }
    }

    fn commit(&mut self, task: &mut Task) -> bool {
        let id = task.id;
        let control = if task.changes_head() { Control::Switch { id } } else { Control::Commit { id } };
        let all = self.poll_task(task, &control);
        if !(all || task.changes_head() && sabotaged!(self, resume_early)) {
            return false;
        }
        if !task.changes_head() {
            return self.is_calm() && self.answer(task, Ok(()));
        }
        if let Some(ChainOp::Expand { size, .. }) = task.op {
            self.config.shared.grow(size);
            self.desk.switch(Switch::Resize { size });
        }
        let resume = self.desk.switch(Switch::Resume);
        go(task, Stage::Resuming(resume))
    }

    /// Requests go on. How long they were held is what people feel of a snapshot.
    fn flush_once_resumed(&mut self, task: &mut Task, resume: SwitchId) -> bool {
        if !self.desk.switches.done(resume) {
            return false;
        }
        if let Some(since) = task.paused.take() {
            let held = self.desk.now.saturating_sub(since) / 1000;
            self.desk.log(format!("requests were held for {held} us while the head was changed"));
        }
        if let Some(ChainOp::Expand { size, .. }) = task.op {
            // Every queue was told before it was told to go on.
            self.desk.emit(Output::Resized { size });
        }
        go(task, Stage::Flushing { flying: false, not_before: 0 })
    }

    fn flush(&mut self, task: &mut Task, flying: bool, not_before: u64) -> bool {
        if flying || !self.is_calm() || !self.doubt.is_empty() || self.desk.now < not_before {
            return false;
        }
        self.desk.give(JobFor::ChainFlush(task.ballot_number), Job::Flush);
        go(task, Stage::Flushing { flying: true, not_before: 0 })
    }

    pub(super) fn on_chain_flushed(&mut self, number: u64, result: JobResult) {
        let again_at = self.desk.now.saturating_add(self.desk.limits.retry_ns);
        let Some(mut task) = self.chain.task.take() else { return };
        if task.ballot_number == number && matches!(task.stage, Stage::Flushing { .. }) {
            // A member that came back meanwhile may lack what it should have flushed.
            if matches!(result, JobResult::Done { .. }) && self.doubt.is_empty() {
                self.new_ballot(&mut task);
                task.stage = Stage::Settling;
            } else {
                task.stage = Stage::Flushing { flying: false, not_before: again_at };
            }
        }
        self.chain.task = Some(task);
    }

    fn settle(&mut self, task: &mut Task) -> bool {
        let Some(snapshot) = task.settles.clone() else { return self.answer(task, Ok(())) };
        let control = Control::Settled { snapshot: snapshot.clone() };
        if !self.poll_task(task, &control) || !self.is_calm() {
            return false;
        }
        let names = self.chain.volume.may_settle();
        let above = names.rsplit(|name| *name == snapshot).next().unwrap_or_default();
        self.chain.volume.unsettled.retain(|name| above.contains(name));
        self.counters.snapshots += u64::from(task.is_snapshot());
        self.answer(task, Ok(()))
    }

    fn abort(&mut self, task: &mut Task, resume: Option<SwitchId>) -> bool {
        if self.outage.is_some() {
            // Who is away, or has been looked at while this was undecided, has to be told, too.
            return false;
        }
        let concerned = self.replicas.serving().or(self.replicas.attached_joiners());
        let control = Control::Abort { id: task.id };
        self.poll(&mut task.ballot, concerned, ControlFor::Chain(task.ballot_number), &control);
        if !task.ballot.complete(concerned) || !resume.is_none_or(|switch| self.desk.switches.done(switch)) {
            return false;
        }
        let why = task.refused.take().unwrap_or(CommandError::ShuttingDown);
        self.answer(task, Err(why))
    }

    fn answer(&mut self, task: &mut Task, result: Result<(), CommandError>) -> bool {
        let reverts = result.is_ok() && matches!(task.op, Some(ChainOp::Revert { .. }));
        if reverts && !sabotaged!(self, rounds_unasked) {
            // What a revert takes away no trail tells of: whoever is put back as it was before is to be behind.
            self.rounds.want_two_more();
        }
        if let Some(command) = task.command {
            self.desk.emit(Output::CommandDone(command, result));
        }
        go(task, Stage::Ended)
    }

    pub(super) fn on_chain_yes(&mut self, member: MemberId, number: u64) {
        if let Some(task) = self.chain.task.as_mut().filter(|t| t.ballot_number == number) {
            task.ballot.says_yes(member);
        }
    }

    pub(super) fn on_chain_no(&mut self, member: MemberId, number: u64, text: &str) {
        let replica = self.replicas.name(member).to_owned();
        let Some(task) = self.chain.task.as_mut().filter(|t| t.ballot_number == number) else { return };
        match task.stage {
            Stage::Preparing | Stage::Quieting | Stage::Pausing(_) => {
                task.refused.get_or_insert(CommandError::Refused { replica, reason: text.to_owned() });
            }
            // It has nothing to take back; or it has folded the snapshot away already.
            Stage::Aborting(_) | Stage::Settling => task.ballot.says_yes(member),
            _ => self.lose(member, text),
        }
    }

    /// Copies between replicas wait: a snapshot is near, and what is read from one layer must not be written to
    /// another.
    pub(super) fn copies_held(&self) -> bool {
        self.chain
            .task
            .as_ref()
            .is_some_and(|t| matches!(t.stage, Stage::Quieting | Stage::Pausing(_) | Stage::Committing))
    }

    /// Some members may have switched, and others not.
    pub(super) fn commits(&self) -> bool {
        self.chain.task.as_ref().is_some_and(|t| matches!(t.stage, Stage::Committing))
    }

    /// A chain operation runs or waits for its turn, which comes only once the volume is open.
    pub(super) fn chain_is_wanted(&self) -> bool {
        self.chain.task.as_ref().is_some_and(|t| t.op.is_some())
            || (self.is_open() && !self.chain.backlog.is_empty())
    }

    /// The chain as a member has told it.
    pub(super) fn take_chain(&mut self, chain: Vec<LayerInfo>) {
        self.chain.volume.chain = chain.into();
        self.chain.volume.note_unsettled(&[]);
    }

    pub(super) fn chain_deadline(&self) -> Option<u64> {
        let due = self.chain.task.as_ref().and_then(|task| match task.stage {
            Stage::Flushing { flying: false, not_before } => Some(not_before),
            Stage::Pausing(_) => task.paused.map(|since| since.saturating_add(PAUSE_MAX)),
            _ => None,
        });
        [due, self.chain.late_at()].into_iter().flatten().filter(|at| *at > self.desk.now).min()
    }
}

/// Whether another layer finds its place beside so many snapshots.
fn check_format(snapshots: usize) -> Result<(), CommandError> {
    if snapshots >= usize::from(SNAPSHOTS_MAX) { Err(CommandError::ChainFull(snapshots)) } else { Ok(()) }
}

/// How far ahead of the clock a head may be before the clock that dated it counts as wrong.
const AHEAD_MAX: u64 = 24 * 60 * 60;

/// The time of an operation that follows on the one which made this head: a second later at least, although times have whole
/// seconds and clocks go back. So no two snapshots of a volume that have one name have one time, whatever became of the first, and
/// a replica that has been away knows them apart (`super::rebuild`). The head has the time of the operation that made it, on
/// every replica and whatever is folded.
fn later(now: &str, head: &str) -> String {
    match (lh_block::parse_rfc3339(now), lh_block::parse_rfc3339(head)) {
        // A head from a day that is yet to come was made by a clock that was wrong: that one time may go back.
        (Some(now), Some(head)) if now <= head && head - now < AHEAD_MAX => lh_block::rfc3339(head + 1),
        _ => now.to_owned(),
    }
}

fn go(task: &mut Task, stage: Stage) -> bool {
    task.stage = stage;
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_later_than_the_one_before() {
        let at = |time: &str| format!("2026-01-01T{time}Z");
        assert_eq!(later(&at("10:00:05"), &at("10:00:04")), at("10:00:05"));
        assert_eq!(later(&at("10:00:05"), &at("10:00:05")), at("10:00:06"));
        assert_eq!(later(&at("10:00:05"), &at("10:00:59")), at("10:01:00"), "several in one second");
        assert_eq!(later(&at("10:00:05"), &at("23:59:59")), "2026-01-02T00:00:00Z", "the clock went back");
        assert_eq!(later(&at("10:00:05"), "2036-01-01T10:00:05Z"), at("10:00:05"), "it was wrong before");
        assert_eq!(later(&at("10:00:05"), ""), at("10:00:05"));
    }
}
