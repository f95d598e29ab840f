//! What a chain operation waits for, in words for people.

use super::{Chain, Stage, Task};
use crate::conductor::{Conductor, Role};
use crate::message::MemberSet;

/// What is over sooner is not told.
const SOON: u64 = 3_000_000_000;

impl Chain {
    /// From when on it is told what is waited for, ns.
    pub(super) fn late_at(&self) -> Option<u64> {
        self.since.map(|since| since.saturating_add(SOON))
    }
}

impl Conductor {
    /// Logs what an operation waits for that takes long, whenever that is another thing than before. Requests go on meanwhile.
    pub(in crate::conductor) fn tell_what_chain_waits_for(&mut self) {
        let now = self.chain_waits_for();
        if self.chain.told != now {
            if let Some(line) = &now {
                self.desk.log(line.clone());
            }
            self.chain.told = now;
        }
    }

    /// What the operation whose turn it is waits for, or the next one; `None`: there is none, or it does not take long yet.
    fn chain_waits_for(&self) -> Option<String> {
        let is_late = self.chain.late_at().is_some_and(|at| self.desk.now >= at);
        if !is_late || !self.chain_is_wanted() {
            return None;
        }
        let why = match self.chain.task.as_ref() {
            None => self.turn_waits_for(),
            Some(task) => self.task_waits_for(task),
        };
        Some(format!("a chain operation has to wait: {why}"))
    }

    fn turn_waits_for(&self) -> String {
        let beginning =
            self.replicas.select(|r| matches!(&r.role, Role::Joining(copy) if copy.is_setting_up()));
        if let Some(chunks) = self.doubtful() {
            chunks
        } else if beginning.is_empty() {
            "the membership changes".to_owned()
        } else {
            format!("the copy to {} is being prepared", self.names(beginning))
        }
    }

    fn task_waits_for(&self, task: &Task) -> String {
        let silent = || self.names(self.concerned().minus(task.ballot.yes()));
        match task.stage {
            Stage::Reading(source) => format!("{} is asked for the chain", self.replicas.name(source)),
            Stage::Preparing => format!("{} has not prepared it yet", silent()),
            Stage::Quieting => self.doubtful().unwrap_or_else(|| "copies are on their way".to_owned()),
            Stage::Pausing(_) | Stage::Resuming(_) => "requests are on their way".to_owned(),
            Stage::Committing => format!("{} has not carried it out yet", silent()),
            Stage::Flushing { .. } => "what was written before is being flushed".to_owned(),
            Stage::Settling => format!("{} has not noted that it is on stable storage", silent()),
            Stage::Aborting(_) | Stage::Ended => "it is being taken back".to_owned(),
        }
    }

    fn doubtful(&self) -> Option<String> {
        let differ = !self.doubt.is_empty();
        differ.then(|| "replicas may differ in some chunks, which are made equal first".to_owned())
    }

    fn names(&self, of: MemberSet) -> String {
        of.iter().map(|m| self.replicas.name(m)).collect::<Vec<_>>().join(", ")
    }
}
