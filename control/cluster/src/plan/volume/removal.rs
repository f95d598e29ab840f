//! A volume that is deleted: the engine goes first, then the replicas with their data, itself last.
//!
//! Nothing of it is used by anybody any more, so that nothing is lost by a process that is given up: of an engine the replicas are
//! ended under it, and what is left of it here holds a device and no data. What is still waited for is said.

use std::time::Duration;

use super::draft::{Draft, name_of};
use super::life::END_PATIENCE;
use super::{Action, ENDED};
use crate::api::{
    Conditions, DesireState, Engine, EngineSpec, InstanceState, Replica, Robustness, VolumeState,
};
use crate::plan::FINALIZER;

/// How long what is left of a volume may take, from when it was deleted, before people are told: much data takes its time.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(300);

/// The reason of the condition once people are told.
const WAITS: &str = "Waits";

impl Draft<'_> {
    /// Removes everything of the volume.
    pub(super) fn remove(&mut self) {
        self.status.state = VolumeState::Deleting;
        self.status.robustness = Robustness::Unknown;
        if self.status.conditions.get_condition(ENDED).is_none() {
            let now = self.now.clone();
            self.status.conditions.set_condition(ENDED, false, "Ending", "its processes end", &now);
        }
        if !self.remove_engines() {
            return;
        }
        for replica in &self.o.replicas {
            let name = name_of(replica);
            self.replicas.remove(&name);
            if self.is_gone(&replica.spec.node_id) {
                self.actions.push(Action::ForgetReplica(name));
            } else if replica.metadata.deletion_timestamp.is_none() {
                self.actions.push(Action::DeleteReplica(name));
            }
        }
        if self.o.snapshots > 0 {
            self.actions.push(Action::DeleteSnapshots);
        }
        self.forget_source();
        if self.o.attachment.is_some_and(|a| a.metadata.deletion_timestamp.is_none()) {
            self.actions.push(Action::DeleteAttachment);
        }
        let finalizers = self.o.volume.metadata.finalizers.as_deref().unwrap_or_default();
        let engines_gone = self.o.engine.is_none() && self.o.second.is_none();
        let all_gone = engines_gone && self.o.replicas.is_empty() && self.o.snapshots == 0;
        if all_gone && finalizers.iter().any(|f| f == FINALIZER) {
            self.actions.push(Action::RemoveFinalizer);
        } else {
            self.say_what_is_left();
        }
    }

    /// Removes the engine, and a second one, once their processes have ended, or have been given up. True if there is none any more.
    fn remove_engines(&mut self) -> bool {
        // One that should run may be about to be started, whatever is said of it: first nobody may start it any more.
        let is_wanted = |e: &EngineSpec| e.desire_state == DesireState::Running;
        let may_start = [&self.engine, &self.second].into_iter().flatten().any(is_wanted);
        let runs = !matches!(self.engine_state(), InstanceState::Stopped | InstanceState::Unknown);
        if let Some(engine) = &mut self.engine {
            engine.desire_state = DesireState::Stopped;
        }
        self.dismiss_second();
        let ended = !runs && self.second.is_none();
        if may_start {
            return false;
        }
        if let Some(rest) = self.patience(END_PATIENCE).filter(|_| !ended) {
            self.look_again(rest);
            return false;
        }
        if runs {
            self.tell_given_up(self.o.engine);
        }
        if self.second.take().is_some() {
            self.tell_given_up(self.o.second);
            self.status.current_migration_node_id.clear();
            self.actions
                .extend(self.o.second.and_then(|e| e.metadata.name.clone()).map(Action::DeleteEngine));
        }
        if self.engine.take().is_some() {
            self.actions
                .extend(self.o.engine.and_then(|e| e.metadata.name.clone()).map(Action::DeleteEngine));
        }
        true
    }

    fn tell_given_up(&mut self, engine: Option<&Engine>) {
        let node = engine.map(|e| e.spec.node_id.as_str()).unwrap_or_default();
        let message = format!(
            "deleted without the end of the engine's process on node {node}, which has no replica any more: it is an Orphan, and ends when what it waits for (a disk, whoever has its device open) lets go of it, or when the node is restarted"
        );
        self.tell(true, "EngineNotEnded", message);
    }

    /// Says what a volume still waits for that should be gone by now, and what can be done.
    fn say_what_is_left(&mut self) {
        if let Some(rest) = self.patience(REMOVAL_PATIENCE) {
            self.look_again(rest);
            return;
        }
        let left: Vec<String> = self.o.replicas.iter().map(|replica| self.what_keeps(replica)).collect();
        if left.is_empty() {
            return;
        }
        let message = format!("the volume is deleted once these are gone: {}", left.join("; "));
        let before = self.status.conditions.get_condition(ENDED);
        if before.is_none_or(|c| c.reason != WAITS) {
            self.tell(true, "DeletionWaits", message.clone());
        }
        let now = self.now.clone();
        self.status.conditions.set_condition(ENDED, false, WAITS, &message, &now);
    }

    fn what_keeps(&self, replica: &Replica) -> String {
        let (name, node) = (name_of(replica), &replica.spec.node_id);
        match self.replica_state(&name) {
            InstanceState::Unknown => format!(
                "{name}, whose node {node} does not answer: start it, or, if it is gone for good, delete it (kubectl delete node {node})"
            ),
            InstanceState::Stopped => {
                format!("{name}, whose data on node {node} is not removed yet: its events say why")
            }
            _ => format!(
                "{name}, whose process on node {node} has not ended: it ends when its disk answers, or when the node is restarted"
            ),
        }
    }
}
