//! Looks at the chain for whoever asks: its snapshots and what each takes, as a member has them now.
//!
//! Every member has the same chain, apart from what each folds away by itself. Chain operations keep the conductor's picture
//! up to date, folds and writes do not; so a member is asked, the nearest. Requests that come while one is on its way are
//! answered with the next: a look tells nothing older than the question.

use lh_wire::ReplicaState;

use super::{CommandError, CommandId, Conductor, ControlFor, Output};
use crate::message::MemberId;

/// Who waits for a look.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// For the look that is on its way.
    asked: Option<(MemberId, Vec<CommandId>)>,
    /// For the next one.
    waiting: Vec<CommandId>,
}

impl Looks {
    /// Nobody answers what this member was asked.
    pub(super) fn lost(&mut self, member: MemberId) {
        if let Some((_, waiting)) = self.asked.take_if(|(asked, _)| *asked == member) {
            self.waiting.extend(waiting);
        }
    }
}

impl Conductor {
    pub(super) fn look_at_chain(&mut self, command: CommandId) {
        self.looks.waiting.push(command);
    }

    /// Asks the nearest member. Without one, or before the volume is open, the chain is what was heard last: whoever asked is not
    /// to wait for replicas.
    pub(super) fn advance_looks(&mut self) -> bool {
        if self.looks.asked.is_some() || self.looks.waiting.is_empty() {
            return false;
        }
        let waiting = std::mem::take(&mut self.looks.waiting);
        match self.replicas.nearest(self.replicas.linked(self.replicas.serving())).filter(|_| self.is_open())
        {
            Some(member) => {
                self.looks.asked = Some((member, waiting));
                self.desk.ask(member, ControlFor::Look, lh_wire::Control::State);
            }
            None => self.end_looks(waiting, &Ok(())),
        }
        true
    }

    pub(super) fn on_looked(&mut self, member: MemberId, state: ReplicaState) {
        let Some((_, waiting)) = self.looks.asked.take_if(|(asked, _)| *asked == member) else { return };
        // An operation that is under way has read the chain itself, and changes it once it is decided: this member may have
        // told what it had before it carried that out.
        if !self.chain.is_busy() {
            self.take_chain(state.chain);
        }
        self.end_looks(waiting, &Ok(()));
    }

    /// The engine ends: nobody is asked any more.
    pub(super) fn end_all_looks(&mut self) {
        let asked = self.looks.asked.take().map(|(_, waiting)| waiting).unwrap_or_default();
        let waiting = std::mem::take(&mut self.looks.waiting);
        self.end_looks(asked.into_iter().chain(waiting).collect(), &Err(CommandError::ShuttingDown));
    }

    fn end_looks(&mut self, commands: Vec<CommandId>, result: &Result<(), CommandError>) {
        // Who hears that it is done finds it in the status.
        self.report();
        for command in commands {
            self.desk.emit(Output::CommandDone(command, result.clone()));
        }
    }
}
