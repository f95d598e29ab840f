//! Asking: switches and jobs of the queues, control requests of the replicas, names of layers.

use lh_wire::Control;

use super::ask::{ControlFor, JobFor};
use super::{Conductor, Limits, Output, sabotaged};
use crate::message::{Job, JobId, LayerRef, MemberId, QueueId, Switch, SwitchId, ToQueue};

impl Conductor {
    /// Sends a switch to every queue.
    pub(super) fn switch(&mut self, switch: Switch) -> SwitchId {
        let queues = self.queues_for(switch);
        let id = self.switches.begin(queues.clone());
        for queue in queues {
            self.emit(Output::ToQueue(queue, ToQueue::Switch(id, switch)));
        }
        id
    }

    pub(super) fn queues_for(&self, switch: Switch) -> impl Iterator<Item = QueueId> + Clone + use<> {
        let leaver = matches!(switch, Switch::StopReads { .. } | Switch::Forget { .. });
        let queues = if leaver && sabotaged!(self, leaver_on_one_queue) { 1 } else { self.config.queues };
        (0..queues).map(QueueId)
    }

    /// Asks a replica.
    pub(super) fn ask(&mut self, member: MemberId, purpose: ControlFor, control: Control) {
        let (what, limit) = describe(&control, &self.config.limits);
        let id = self.controls.begin(member, purpose, what, self.now.saturating_add(limit));
        self.emit(Output::Control { id, member, control: Box::new(control) });
    }

    pub(super) fn ask_state(&mut self, member: MemberId) {
        self.replica_mut(member).state = None;
        self.ask(member, ControlFor::State, Control::State);
    }

    /// Gives a job to one of the queues, in turn.
    pub(super) fn give(&mut self, purpose: JobFor, job: Job) -> JobId {
        let id = self.jobs.begin(purpose);
        #[expect(clippy::cast_possible_truncation, reason = "smaller than the number of queues")]
        let queue = QueueId((id.0 % u64::from(self.config.queues)) as u8);
        self.emit(Output::ToQueue(queue, ToQueue::Job(id, job)));
        id
    }

    pub(super) fn tell_queues(&mut self, message: &ToQueue) {
        for queue in 0..self.config.queues {
            self.emit(Output::ToQueue(QueueId(queue), message.clone()));
        }
    }

    /// The number of a layer's name; `None` is the head.
    pub(super) fn layer_ref(&mut self, name: &str) -> Option<LayerRef> {
        if name.is_empty() {
            return None;
        }
        if let Some(known) = self.volume.names.get(name) {
            return Some(*known);
        }
        let number = LayerRef(self.volume.named);
        self.volume.named += 1;
        self.volume.names.insert(name.to_owned(), number);
        self.emit(Output::NameLayer(number, name.to_owned()));
        Some(number)
    }

    /// Nobody copies or compares layers: no number stands for any. A volume has a few hundred, but in the life of an engine any number
    /// of snapshots come and go.
    pub(super) fn forget_layer_refs(&mut self) {
        if !std::mem::take(&mut self.volume.names).is_empty() {
            self.emit(Output::ForgetLayers);
        }
    }
}

/// What a control request is called in messages, and how long it may take. All replicas write the same, so what a busy disk
/// makes slow is slow on all of them, and whoever is late is lost.
const fn describe(control: &Control, limits: &Limits) -> (&'static str, u64) {
    let Limits { control_ns: short, control_syncs_ns: syncs, control_long_ns: long, .. } = *limits;
    match control {
        Control::State => ("a question for its state", short),
        Control::SetEpoch { .. } => ("a new epoch", short),
        Control::Resolved => ("the end of a repair", short),
        Control::Prepare { .. } => ("the preparation of a chain operation", syncs),
        Control::Commit { .. } => ("a chain operation", long),
        Control::Switch { .. } => ("a switch of the chain", short),
        Control::Abort { .. } => ("the end of a chain operation", syncs),
        Control::Settled { .. } => ("the end of a snapshot", syncs),
        Control::Fold { .. } => ("the begin of a fold", short),
        Control::FoldStop => ("the end of a fold", short),
        Control::Hash { .. } => ("a wish for checksums", short),
        Control::HashStop => ("the end of a wish for checksums", short),
        Control::Missed { .. } => ("a question what another replica missed", short),
        Control::LayerMap { .. } => ("a question what a layer holds", short),
        Control::RebuildBegin { .. } => ("the begin of a rebuild", long),
        Control::RebuildEnd => ("the end of a rebuild", long),
        Control::Close => ("the clean end", long),
    }
}
