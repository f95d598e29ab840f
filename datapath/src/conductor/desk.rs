//! The desk: the time, what is to go out, and what was asked and is not answered yet.
//!
//! Nothing goes out but through here, in the order in which it was said, and whatever is answered has its number from here.

use lh_wire::Control;

use super::ask::{ControlFor, Controls, JobFor, Jobs, Switches};
use super::sabotage::sabotaged;
use super::{Config, Limits, Output};
use crate::message::{ControlId, Job, JobId, MemberId, QueueId, Switch, SwitchId, ToQueue};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Desk {
    /// When the input came that is being worked on, ns: it never goes back.
    pub(super) now: u64,
    out: Vec<Output>,
    pub(super) switches: Switches,
    pub(super) controls: Controls,
    pub(super) jobs: Jobs,
    /// How many device queues there are: they are told everything in the order of their numbers.
    pub(super) queues: u8,
    /// How many of these hear that somebody leaves: all, but for a test.
    told_of_leavers: u8,
    pub(super) limits: Limits,
}

impl Desk {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            now: 0,
            out: Vec::new(),
            switches: Switches::default(),
            controls: Controls::default(),
            jobs: Jobs::default(),
            queues: config.queues,
            told_of_leavers: if sabotaged!(in config, leaver_on_one_queue) { 1 } else { config.queues },
            limits: config.limits,
        }
    }

    /// What is to go out is appended, and is gone from here.
    pub(super) fn hand_over(&mut self, out: &mut Vec<Output>) {
        out.append(&mut self.out);
    }

    pub(super) fn emit(&mut self, output: Output) {
        self.out.push(output);
    }

    pub(super) fn log(&mut self, line: String) {
        self.emit(Output::Log(line));
    }

    /// Sends a switch to every queue.
    pub(super) fn switch(&mut self, switch: Switch) -> SwitchId {
        let leaver = matches!(switch, Switch::StopReads { .. } | Switch::Forget { .. });
        let queues = (0..if leaver { self.told_of_leavers } else { self.queues }).map(QueueId);
        let id = self.switches.begin(queues.clone());
        for queue in queues {
            self.emit(Output::ToQueue(queue, ToQueue::Switch(id, switch)));
        }
        id
    }

    pub(super) fn tell_queues(&mut self, message: &ToQueue) {
        for queue in 0..self.queues {
            self.emit(Output::ToQueue(QueueId(queue), message.clone()));
        }
    }

    /// Asks a replica.
    pub(super) fn ask(&mut self, member: MemberId, purpose: ControlFor, control: Control) {
        let (what, limit) = match purpose {
            // No request waits for it.
            ControlFor::Round(_) => ("a new round", self.limits.control_syncs_ns),
            _ => describe(&control, &self.limits),
        };
        // A disk that is busy for so long is no reason to lose its replica for what comes behind the round either.
        let behind_round = self.controls.records_round(member);
        let limit = if behind_round { limit.max(self.limits.control_syncs_ns) } else { limit };
        let id = self.controls.begin(member, purpose, what, self.now.saturating_add(limit));
        self.emit(Output::Control { id, member, control: Box::new(control) });
    }

    /// A replica answers; `None` if nobody waits for that, or another one was asked.
    pub(super) fn answered(&mut self, id: ControlId, by: MemberId) -> Option<ControlFor> {
        self.controls.answered(id).filter(|(asked, _)| *asked == by).map(|(_, purpose)| purpose)
    }

    /// Who has not answered in time, and what.
    pub(super) fn overdue(&mut self) -> Vec<(MemberId, &'static str)> {
        self.controls.overdue(self.now)
    }

    /// Gives a job to one of the queues, in turn.
    pub(super) fn give(&mut self, purpose: JobFor, job: Job) -> JobId {
        let id = self.jobs.begin(purpose);
        #[expect(clippy::cast_possible_truncation, reason = "smaller than the number of queues")]
        let queue = QueueId((id.0 % u64::from(self.queues)) as u8);
        self.emit(Output::ToQueue(queue, ToQueue::Job(id, job)));
        id
    }
}

/// What a control request is called in messages, and how long it may take. All replicas write the same, so what a busy disk
/// makes slow is slow on all of them, and whoever is late is lost.
const fn describe(control: &Control, limits: &Limits) -> (&'static str, u64) {
    let Limits { control_ns: short, control_syncs_ns: syncs, control_long_ns: long, .. } = *limits;
    match control {
        Control::State => ("a request for its state", short),
        Control::SetEpoch { .. } => ("a new epoch", short),
        Control::Resolved => ("the end of a repair", short),
        Control::Prepare { .. } => ("the preparation of a chain operation", syncs),
        Control::Commit { .. } => ("a chain operation", long),
        Control::Switch { .. } => ("a switch of the chain", short),
        Control::Abort { .. } => ("the end of a chain operation", syncs),
        Control::Settled { .. } => ("the end of a snapshot", syncs),
        Control::Fold { .. } => ("the start of a fold", short),
        Control::FoldStop => ("a request to stop folding", short),
        Control::Hash { .. } => ("a request to compute checksums", short),
        Control::HashStop => ("a request to stop computing checksums", short),
        Control::Missed { .. } => ("a question about what another replica missed", short),
        Control::LayerMap { .. } => ("a question about what a layer holds", short),
        Control::RebuildBegin { .. } => ("the start of a rebuild", long),
        Control::RebuildEnd => ("the end of a rebuild", long),
        Control::Close => ("the clean end", long),
    }
}
